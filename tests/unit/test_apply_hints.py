"""Hints against what ansible-core's modules, ssh, apt and sudo really said on a Debian 12 host."""

from __future__ import annotations

import pytest

from v100ctl.apply.hints import HINTS, hint_for

_SSH = 'Data could not be sent to remote host "192.0.2.6". Make sure this host can be reached over ssh: '
_LOST = "Module result deserialization failed: No start of json char found\n"
_APT = (
    '\'/usr/bin/apt-get -y -o "Dpkg::Options::=--force-confdef" -o "Dpkg::Options::=--force-confold" '
    "-o DPkg::Lock::Timeout=60       install 'hello=2.10-3'' failed: "
)

#: (a word of the hint that is due, the message)
REAL = [
    (
        "disk is full",
        "non-zero return code\ndd: error writing '/small/g': No space left on device\n2+0 records in\n1+0 records out",
    ),
    (
        "disk is full",
        "Failed to replace '/small/f' with b'/root/.ansible/tmp/ansible-tmp-1/.source': [Errno 28] No space left on device: "
        "b'/root/.ansible/tmp/ansible-tmp-1/.source' -> b'/small/.ansible_tmpwhkmts8yf'",
    ),
    (
        "could not be put in place",
        "failed to copy /root/.ansible/tmp/ansible-moduletmp-1/tmpr8k04dbo to /small/h: Failed to replace '/small/h' with "
        "'/root/.ansible/tmp/ansible-moduletmp-1/tmpr8k04dbo'.",
    ),
    ("could not be put in place", "Destination /mnt not writable"),
    ("give `-K`", "Missing sudo password"),
    ("sudo password was wrong", "Incorrect sudo password"),
    # On a local connection a wrong password reads so.
    (
        "sudo password was wrong",
        "Duplicate become password prompt encountered waiting for become success.\n>>> Standard Error\n"
        "[sudo via ansible, key=iawoxdhhvmekzvcdnhezezkelbpqtypi] password:Sorry, try again.\n"
        "[sudo via ansible, key=iawoxdhhvmekzvcdnhezezkelbpqtypi] password:",
    ),
    ("may not use sudo", _LOST + "n is not in the sudoers file."),
    ("has no sudo", _LOST + "/bin/sh: 1: sudo: not found"),
    (
        "installing packages",
        "E: Could not get lock /var/lib/dpkg/lock-frontend. It is held by process 210 (python3)\n"
        "E: Unable to acquire the dpkg frontend lock (/var/lib/dpkg/lock-frontend), is another process using it?",
    ),
    (
        "dpkg --configure -a",
        _APT + "E: dpkg was interrupted, you must manually run 'dpkg --configure -a' to correct the problem.",
    ),
    ("apt-mark showhold", _APT + "E: Unable to correct problems, you have held broken packages."),
    ("apt-mark showhold", "Dependency is not satisfiable: nosuchdep"),
    ("sources do not offer it", "No package matching 'nopkg99' is available"),
    # As the module has it in its source; no host with dnf was to be had.
    ("CodeReady Linux Builder", "Failed to install some of the specified packages"),
    (
        "gone or not trusted",
        "Failed to update apt cache after 5 retries: W:Updating from such a repository can't be done securely, and is therefore "
        "disabled by default., E:The repository 'file:/srv/repo ./ Release' does not have a Release file.",
    ),
    (
        "compare URL and checksum",
        "The checksum for /root/.ansible/tmp/ansible-moduletmp-1/tmpgl6ahvr0 did not match "
        "0000000000000000000000000000000000000000000000000000000000000000; it was "
        "5891b5b522d5df086d0ff0b110fbd9d21bb4fc7163af34d08286a2e846f6be03.",
    ),
    (
        "compare URL and checksum",
        "Failed to update apt cache after 5 retries: E:Failed to fetch file:/srv/repo/./Packages  Hash Sum mismatch\n"
        "Hashes of expected file:\n - Filesize:202 [weak]",
    ),
    (
        "certificate is not trusted",
        "Request failed: <urlopen error [SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: self-signed certificate "
        "(_ssl.c:992)>",
    ),
    (
        "is not the known one",
        _SSH + "Offending ED25519 key in /home/u/.ssh/known_hosts:1\n  remove with:\n"
        '  ssh-keygen -f "/home/u/.ssh/known_hosts" -R "192.0.2.6"\n'
        "Host key for 192.0.2.6 has changed and you have requested strict checking.\nHost key verification failed.",
    ),
    ("--accept-new-host-keys", _SSH + "Host key verification failed."),
    ("refused every key", _SSH + "zzz@192.0.2.6: Permission denied (publickey,password)."),
    ("refuses logins", _LOST + "This account is currently not available."),
    ("does not resolve", _SSH + "ssh: Could not resolve hostname nosuch.invalid: Name or service not known"),
    ("does not resolve", "Request failed: <urlopen error [Errno -2] Name or service not known>"),
    ("nothing listens", _SSH + "ssh: connect to host 192.0.2.6 port 1: Connection refused"),
    ("nothing listens", "Status code was -1 and not [200]: Request failed: <urlopen error [Errno 111] Connection refused>"),
    ("no answer came", _SSH + "ssh: connect to host 192.0.2.250 port 22: No route to host"),
    ("no answer came", _SSH + "Connection timed out during banner exchange\nConnection to 192.0.2.6 port 8097 timed out"),
    ("no answer came", "Timeout when waiting for 127.0.0.1:1"),
    (
        "connection broke",
        _SSH + "kex_exchange_identification: Connection closed by remote host\nConnection closed by 192.0.2.6 port 8098",
    ),
    # `pkill -9 sshd` as the task.
    ("connection broke", _SSH.strip()),
    ("finds no Python", "The module interpreter '/usr/bin/python3' was not found."),
    ("finds no Python", _LOST + "/bin/sh: 1: /usr/bin/python3: not found"),
    (
        "does not run systemd",
        "System has not been booted with systemd as init system (PID 1). Can't operate.\nFailed to connect to bus: Host is down",
    ),
    (
        "unit did not start",
        "Unable to start service bad: Job for bad.service failed because the control process exited with error code.\n"
        'See "systemctl status bad.service" and "journalctl -xeu bad.service" for details.',
    ),
    (
        "has that port",
        "non-zero return code\n    self.socket.bind(self.server_address)\nOSError: [Errno 98] Address already in use",
    ),
    (
        "out of memory",
        "non-zero return code\ng++: fatal error: Killed signal terminated program cc1plus\ncompilation terminated.",
    ),
    (
        "out of memory",
        "non-zero return code\nRunning as unit: run-u3.service\nFinished with result: signal\n"
        "Main processes terminated with: code=killed/status=KILL\nService runtime: 93ms",
    ),
    ("out of memory", 'non-zero return code\nTraceback (most recent call last):\n  File "<string>", line 1\nMemoryError'),
    ("vault password", "Attempting to decrypt but no vault secrets found."),
    ("vault password", "Decryption failed (no vault secrets were found that could decrypt)."),
]

#: Messages near one of the rows, for which a hint would be wrong.
UNKNOWN = [
    "non-zero return code\nexit code 1",
    "non-zero return code\nModuleNotFoundError: No module named 'nosuchmodule'",
    "Request failed\nHTTP Error 404: File not found\nhttp://127.0.0.1:8099/none",
    "Could not find the requested service none: host",
    "Error executing command: [Errno 2] No such file or directory: b'nosuchcommand'",
    # No disk, apt, sudo or host key in these, although they speak of such things.
    "needs 5.0 GB on /var, 12.0 GB are free",
    "the lock file /var/lib/v100ctl/build/lock is held by pid 12",
    "the checksum of release b11434-cpu matches",
    "mkdir: cannot create directory '/etc/v100ctl': Permission denied",
    "the service answered, but its connection pool is at its limit",
    "user v100 is missing",
    "python3 version 3.7 is too old",
    _SSH + "Bad configuration option: nosuch",
]


@pytest.mark.parametrize(("words", "message"), REAL, ids=[message[-40:] for _, message in REAL])
def test_a_known_failure_gets_its_hint(words: str, message: str) -> None:
    hint = hint_for(message)

    assert hint is not None
    assert words in hint


@pytest.mark.parametrize("message", UNKNOWN)
def test_another_failure_gets_none(message: str) -> None:
    assert hint_for(message) is None


def test_every_row_has_a_real_message() -> None:
    given = {hint_for(message) for _, message in REAL}

    assert [row.hint for row in HINTS if row.hint not in given] == []


def test_hints_read_as_one_sentence_part() -> None:
    for row in HINTS:
        assert not row.hint.endswith(".")
        assert "\n" not in row.hint
        assert row.hint.count("`") % 2 == 0
