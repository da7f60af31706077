"""What to do about failures whose text we know.

The first row that matches wins, so a row stands before the more general ones. The texts are those of ansible-core's modules,
apt, dpkg, OpenSSH, sudo and the kernel, in the C locale that Ansible asks hosts to speak.
"""

from __future__ import annotations

import re
from typing import NamedTuple


class HintRow(NamedTuple):
    """A pattern that is searched in a failure's message, and what to do then."""

    pattern: re.Pattern[str]
    hint: str


def _row(pattern: str, hint: str) -> HintRow:
    return HintRow(re.compile(pattern, re.IGNORECASE), hint)


HINTS: tuple[HintRow, ...] = (
    # Disk
    _row(
        r"no space left on device|errno 28\b|not enough free space in /|you don't have enough free space",
        "the disk is full: `df -h` on the host shows which; `apt-get clean` and old folders in `/opt/v100ctl/engines` are easy to free",
    ),
    _row(r"errno 122\b|disk quota exceeded", "the quota of this account on the host is used up: raise it or free space, then run again"),
    _row(
        r"read-only file system",
        "the host's disk is mounted read-only, often after an I/O error: look at `dmesg` on the host before anything else",
    ),
    # sudo
    _row(
        r"missing sudo password|sudo: a password is required|sudo: a terminal is required to read the password",
        "this account's sudo asks for a password: give `-K`, or set `ansible_become_password` (in a vault) for the host",
    ),
    _row(
        r"incorrect sudo password|sudo: \d+ incorrect password attempts?",
        "the sudo password was wrong: it is this account's password on the host; try it by hand with `sudo -v`",
    ),
    _row(
        r"is not in the sudoers file|is not allowed to (?:execute|run) .* on|may not run sudo on",
        "this account may not use sudo on the host: let an administrator add it to the group `sudo`, or connect as another user",
    ),
    _row(
        r"sudo: (?:command )?not found|\bsudo\b.{0,40}: no such file or directory|the sudo command is not",
        "the host has no sudo: `apt-get install sudo` there as root, or connect as root",
    ),
    # apt and dpkg
    _row(
        r"could not get lock /var/(?:lib/(?:dpkg|apt)|cache/apt)|unable to (?:acquire the dpkg frontend lock|lock (?:the )?(?:directory|administration directory|download directory))"
        r"|failed to lock apt for exclusive operation|waiting for apt: held by",
        "another program is installing packages on the host; unattended upgrades end by themselves: wait for it, then run again",
    ),
    _row(
        r"dpkg was interrupted",
        "an earlier installation on the host was cut off: run `sudo dpkg --configure -a` there, then run again",
    ),
    _row(
        r"unmet dependencies|held broken packages",
        "apt cannot satisfy what is asked with what is installed or held: `apt-get -f install` and `apt-mark showhold` on the host show why",
    ),
    _row(
        r"no package matching '.*' is available|unable to locate package|has no installation candidate",
        "the host's package lists do not have it: check `/etc/apt/sources.list*` there, and run `apt-get update`",
    ),
    _row(
        r"NO_PUBKEY|the repository '.*' is not signed|EXPKEYSIG",
        "apt does not trust one of the host's package sources: renew its key or remove the source, then `apt-get update`",
    ),
    # What was downloaded
    _row(
        r"checksum .{0,300}did not match|did not match .{0,40}checksum|hash sum mismatch|sha256 (?:mismatch|is .* expected)",
        "what arrived is not what was asked for (a cut-off download, a changed file, or a proxy): nothing was kept; check the URL and the sha256",
    ),
    _row(
        r"certificate verify failed|CERTIFICATE_VERIFY_FAILED",
        "the server's TLS certificate is not trusted by the host: check its clock (`date`), its package `ca-certificates` and any proxy",
    ),
    # Reaching the host
    _row(
        r"remote host identification has changed|host key for .* has changed",
        "the host's SSH key is not the known one: if it was installed anew, remove the old key with `ssh-keygen -R HOST`, "
        "and compare the new fingerprint with the host's console",
    ),
    _row(
        r"host key verification failed|no (?:\w+ )?host key is known for",
        "the host's SSH key is not known here yet: connect once with `ssh HOST` and compare the fingerprint, or give `--accept-new-host-keys`",
    ),
    _row(
        r"permission denied \((?:[\w-]+,?)+\)|invalid/incorrect password|too many authentication failures",
        "the host refused every key and password that was offered: try `ssh USER@HOST` by hand; `-k` asks for a password, "
        "`ansible_user` and `ansible_ssh_private_key_file` say who and with which key",
    ),
    _row(
        r"could not resolve hostname|name or service not known|temporary failure in name resolution|nodename nor servname",
        "the name does not resolve: check its spelling, DNS (`getent hosts NAME`), and `ansible_host` where it is a host of the inventory",
    ),
    _row(
        r"connection refused",
        "nothing listens there: check address and port, and that the service (sshd, a proxy, a server) runs",
    ),
    _row(
        r"connection timed out|no route to host|network is unreachable|operation timed out|timed out waiting for|timeout when waiting for",
        "no answer came in time: check that the machine is up, and routes and firewalls on the way",
    ),
    _row(
        r"connection closed by|connection reset by peer|shared connection to .* closed|broken pipe",
        "the connection broke: the host may be restarting or its sshd was stopped; run again once it answers, it goes on where it was",
    ),
    # The host's software
    _row(
        r"(?:/usr/bin/|/usr/local/bin/)?python[\d.]*\S*: (?:command )?not found|python[\d.]*: no such file or directory"
        r"|no python interpreters found|the module interpreter .* was not found",
        "the host has no Python where Ansible looks for it: `apt-get install python3` there, or set `ansible_python_interpreter`",
    ),
    _row(
        r"unable to (?:start|restart|reload) service|control process exited with error code|failed because .* exited|job for .* failed",
        "the unit did not start: `systemctl status UNIT` and `journalctl -u UNIT -n 50` on the host say why",
    ),
    _row(
        r"system has not been booted with systemd|failed to connect to bus|service is in unknown state",
        "the host does not run systemd as its first process; v100ctl needs a host (or container) that boots systemd",
    ),
    _row(
        r"address already in use|errno 98\b",
        "another process has that port: `ss -ltnp` on the host names it; stop it or give the instance another `port`",
    ),
    _row(
        r"cannot allocate memory|errno 12\b|out of memory|oom-kill",
        "the host ran out of memory: `free -h` there; fewer things at once or a swap file help while compiling",
    ),
    _row(
        r"decryption failed|attempting to decrypt but no vault secrets found",
        "the vault password is missing or wrong: give `--vault-password-file` or `--ask-vault-password`",
    ),
)


def hint_for(message: str) -> str | None:
    """What to do about a failure with this ``message``, when we know."""
    return next((row.hint for row in HINTS if row.pattern.search(message)), None)
