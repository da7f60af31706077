"""What to do about failures whose text we know.

The first row that matches wins, so a row stands before the more general ones. The texts are those of ansible-core's modules,
apt, dpkg, OpenSSH, sudo, systemd and the kernel, in the C locale that Ansible asks hosts to speak.
"""

from __future__ import annotations

import re
from typing import NamedTuple


class HintRow(NamedTuple):
    """A pattern that is searched in a failure's message, and what to do then."""

    pattern: re.Pattern[str]
    hint: str


def _row(patterns: tuple[str, ...], hint: str) -> HintRow:
    return HintRow(re.compile("|".join(patterns), re.IGNORECASE), hint)


HINTS: tuple[HintRow, ...] = (
    # Files
    _row(
        (r"no space left on device", r"errno 28\b", r"you don't have enough free space"),
        "the disk is full: `df -h` on the host shows which one; `apt-get clean` and unused folders in "
        "`/opt/v100ctl/engines` free some of it",
    ),
    _row(
        (r"failed to replace '/", r"destination \S+ not writable", r"read-only file system"),
        "the file could not be put in place: on the host see `df -h` for a full disk, and `findmnt -T PATH` for one that "
        "is mounted read-only, often after an I/O error",
    ),
    # sudo
    _row(
        (r"missing sudo password", r"sudo: a password is required", r"sudo: a terminal is required to read the password"),
        "this account's sudo asks for a password: give `-K`, or set `ansible_become_password` (in a vault) for the host",
    ),
    _row(
        (
            r"incorrect sudo password",
            r"sudo: \d+ incorrect password attempt",
            r"duplicate become password prompt",
            r"\bsorry, try again\.",
        ),
        "the sudo password was wrong: it is this account's password on the host; try it there with `sudo -k -v`",
    ),
    _row(
        (r"is not in the sudoers file", r"user \S+ is not allowed to execute", r"may not run sudo on"),
        "this account may not use sudo on the host: have it added to the group `sudo` there, or connect as another user",
    ),
    _row(
        (r"\bsudo: (?:command )?not found",),
        "the host has no sudo: install it there as root with `apt-get install sudo`, or connect as root",
    ),
    # apt and dpkg
    _row(
        (
            r"could not get lock /var/(?:lib/(?:dpkg|apt)|cache/apt)",
            r"unable to acquire the dpkg frontend lock",
            r"failed to lock apt for exclusive operation",
        ),
        "another program is installing packages on the host; unattended upgrades end by themselves: wait for it, then run again",
    ),
    _row(
        (r"dpkg was interrupted",),
        "an earlier installation on the host was cut off: run `sudo dpkg --configure -a` there, then run again",
    ),
    _row(
        (r"unmet dependencies", r"held broken packages", r"dependency is not satisfiable"),
        "apt cannot satisfy this with what is installed, held or offered: on the host see `apt-get -s install PACKAGE` "
        "and `apt-mark showhold`",
    ),
    _row(
        (r"no package matching '.*' is available", r"unable to locate package", r"has no installation candidate"),
        "the host's package sources do not offer it: see `/etc/apt/sources.list` and `/etc/apt/sources.list.d` there, "
        "then run `apt-get update`",
    ),
    _row(
        (r"failed to install some of the specified packages",),
        "the host's repositories do not offer it: see `dnf repolist --all` there; `ninja-build` is in CodeReady Linux Builder "
        "(`crb`), which a host of Red Hat's own has by its subscription",
    ),
    _row(
        (r"the repository '.*' (?:is not signed|does not have a release file)", r"\bNO_PUBKEY\b"),
        "one of the host's package sources is gone or not trusted: correct or remove it in `/etc/apt/sources.list.d`, "
        "then run `apt-get update` there",
    ),
    # What was downloaded
    _row(
        (r"the checksum for \S+ did not match", r"hash sum mismatch"),
        "what arrived is not what was asked for (a cut-off download, a changed file, or a proxy in between): run again, "
        "and if it stays so compare URL and checksum with their source",
    ),
    _row(
        (r"certificate verify failed", r"CERTIFICATE_VERIFY_FAILED"),
        "the server's TLS certificate is not trusted there: check its clock (`date`), package `ca-certificates` and any proxy",
    ),
    # Reaching the host
    _row(
        (r"remote host identification has changed", r"host key for \S+ has changed"),
        "the host's SSH key is not the known one: if the host was installed anew, compare the fingerprint with its console, "
        "then remove the old key with `ssh-keygen -R HOST`",
    ),
    _row(
        (r"host key verification failed", r"no \S+ host key is known for"),
        "the host's SSH key is not known here: connect once with `ssh HOST` and compare the fingerprint, "
        "or give `--accept-new-host-keys`",
    ),
    _row(
        (r"permission denied \([\w,-]+\)", r"invalid/incorrect (?:\w+ )?password", r"too many authentication failures"),
        "the host refused every key and password offered: try `ssh USER@HOST`; `-k` asks for a password, "
        "`ansible_user` and `ansible_ssh_private_key_file` say who and with which key",
    ),
    _row(
        (r"this account is currently not available",),
        "this account's shell on the host refuses logins: connect as another user, or change it with `usermod -s /bin/bash USER`",
    ),
    _row(
        (r"could not resolve hostname", r"name or service not known", r"temporary failure in name resolution"),
        "the name does not resolve: check its spelling and `getent hosts NAME`; for a host of the inventory `ansible_host` "
        "may give its address",
    ),
    _row(
        (r"connection refused",),
        "nothing listens there: check address and port, and that the service (sshd, a proxy, a server) runs",
    ),
    _row(
        (r"connection timed out", r"no route to host", r"network is unreachable", r"timeout when waiting for"),
        "no answer came: check that the machine is up, and the routes and firewalls on the way",
    ),
    _row(
        (
            r"connection closed by",
            r"connection reset by peer",
            r"shared connection to .* closed",
            r"broken pipe",
            # What is left when ssh was cut off without a word.
            r"can be reached over ssh:\s*\Z",
        ),
        "the connection broke: the host may be restarting, or its sshd was stopped; run again once it answers, "
        "and what is done already is kept",
    ),
    # The host's software
    _row(
        (
            r"the module interpreter '.*' was not found",
            r"python[\d.]*: (?:command )?not found",
            r"no python interpreters found",
        ),
        "Ansible finds no Python on the host: install it there with `apt-get install python3`, "
        "or say where it is with `ansible_python_interpreter`",
    ),
    _row(
        (r"system has not been booted with systemd", r"failed to connect to bus"),
        "the host does not run systemd as its first process: v100ctl needs a machine or container that boots it",
    ),
    _row(
        (r"unable to (?:start|restart|reload) service", r"\bjob for \S+ failed"),
        "the unit did not start: on the host `systemctl status UNIT` and `journalctl -u UNIT -n 50` say why",
    ),
    _row(
        (r"address already in use",),
        "another process has that port: `ss -ltnp` on the host names it; stop it, or give the instance another `port`",
    ),
    _row(
        (
            r"cannot allocate memory",
            r"\bMemoryError\b",
            r"killed signal terminated program",
            r"code=killed[,/ ]+status=(?:9/)?KILL",
        ),
        "the host ran out of memory: see `free -h` and `dmesg` there; while compiling more memory or swap helps",
    ),
    # The controller
    _row(
        (r"decryption failed", r"attempting to decrypt but no vault secrets found"),
        "the vault password is missing or wrong: give `--vault-password-file PATH` or `--ask-vault-password`",
    ),
)


def hint_for(message: str) -> str | None:
    """What to do about a failure with this ``message``, when we know."""
    return next((row.hint for row in HINTS if row.pattern.search(message)), None)
