"""The probe against real hosts: sshd, sudo and systemd as they are."""

from __future__ import annotations

import http.client
import json
import shlex
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from v100ctl.errors import UnreachableError, V100ctlError
from v100ctl.facts import Facts, ProbeRequest
from v100ctl.lab.hosts import PASSWORD_ADMIN
from v100ctl.probe import (
    HostKeyPolicy,
    PythonMissingError,
    Secrets,
    install_python,
    known_hosts,
    open_session,
    probe_host,
    probe_hosts,
    probe_session,
)
from v100ctl.probe.connection import Connection
from v100ctl.probe.run import HOST_SCRIPT

from .hosts import on_host

if TYPE_CHECKING:
    from v100ctl.lab.hosts import RunningHost

SUDO_PASSWORD = 'it\'s $HOME \\ "quoted" é'


def way(
    host: RunningHost,
    *,
    user: str | None = None,
    ask: Secrets | None = None,
    host_keys: HostKeyPolicy = HostKeyPolicy.REFUSE,
    known: Path | None = None,
    **variables: Any,
) -> Connection:
    """A connection to a lab host, with another known_hosts file or other variables where they are given."""
    given = {**host.variables(user), **variables}
    if known is not None:
        given["ansible_ssh_extra_args"] = ["-o", f"UserKnownHostsFile={known}"]
        given["ansible_ssh_common_args"] = ["-F", "/dev/null", "-o", "GlobalKnownHostsFile=/dev/null"]
    return Connection.from_vars(host.name, given, ask=ask, host_keys=host_keys)


def refused(connection: Connection, kind: type[V100ctlError] = UnreachableError, timeout_s: float = 30.0) -> V100ctlError:
    with pytest.raises(kind) as caught:
        probe_host(connection, ProbeRequest(), timeout_s=timeout_s)
    return caught.value


# --- what is seen -------------------------------------------------------------------------------------------------------------


def test_a_host_is_seen_as_it_is(lab_host: RunningHost) -> None:
    facts = probe_host(way(lab_host), ProbeRequest(accounts=("admin", "nobody-else")))
    assert facts.errors == {}
    assert facts.user.name == "root"
    assert facts.hostname == on_host(lab_host, "uname -n").strip()
    assert facts.systemd is not None
    assert facts.systemd.state == on_host(lab_host, "systemctl is-system-running").strip()
    assert str(facts.systemd.version) == on_host(lab_host, "systemctl --version").split()[1]
    assert facts.packages.manager == "dpkg"
    version = on_host(lab_host, "dpkg-query -W -f '${Version}' openssh-server")
    assert facts.packages.installed["openssh-server"] == version
    assert facts.package_locks == ()
    assert facts.accounts["admin"].home == "/home/admin"
    assert "nobody-else" not in facts.accounts
    ssh = next(listener for listener in facts.listeners if listener.port == 22)
    assert (ssh.command, ssh.unit) == ("sshd", "ssh.service")
    hard = on_host(lab_host, "grep 'Max open files' /proc/1/limits").split()[4]
    assert facts.limits.nofile_hard is not None and facts.limits.nofile_hard >= int(hard)
    assert facts.nvidia.smi.status == "absent"


UNIT = """\
[Service]
Environment=V100CTL_INSTANCE_DIGEST=abc
EnvironmentFile=/etc/v100ctl/instances/t.env
ExecStart=/usr/bin/python3 -m http.server --bind 127.0.0.1 8123
LimitNOFILE=2048
[Install]
WantedBy=multi-user.target
"""


def test_units_processes_files_and_health(fresh_lab_host: RunningHost) -> None:
    host = fresh_lab_host
    on_host(
        host,
        f"""set -e
        mkdir -p /etc/v100ctl/instances /etc/systemd/system/v100-t.service.d
        printf %s {shlex.quote(UNIT)} > /etc/systemd/system/v100-t.service
        printf %s {shlex.quote(UNIT)} > /etc/systemd/system/v100-deleted.service
        sed -i s/8123/8124/ /etc/systemd/system/v100-deleted.service
        printf '[Service]\\nNice=1\\n' > /etc/systemd/system/v100-t.service.d/more.conf
        printf hush > /etc/v100ctl/instances/t.keys
        printf SECRET=hush > /etc/v100ctl/instances/t.env
        printf '{{"schema": "v100ctl/host/1", "files": {{"/etc/shadow": {{}}}}}}' > /etc/v100ctl/host.json
        mkfifo /etc/v100ctl/fifo; ln -s /etc/shadow /etc/v100ctl/link; ln -s /etc /etc/v100ctl/folder
        touch "/etc/systemd/system/v100-odd name.service" /etc/systemd/system/v100-template@.service
        systemctl daemon-reload; systemctl enable --quiet --now v100-t; systemctl start v100-deleted
        rm /etc/systemd/system/v100-deleted.service; systemctl daemon-reload
        printf '# more\\n' >> /etc/systemd/system/v100-t.service
        for try in $(seq 100); do python3 -c 'import socket; socket.create_connection(("127.0.0.1", 8123))' 2>/dev/null && break
        sleep 0.1; done""",
    )
    request = ProbeRequest(health={"t": "http://127.0.0.1:8123/", "gone": "http://127.0.0.1:8999/"})
    facts = probe_host(way(host), request)
    assert facts.errors == {}

    unit = facts.units["v100-t.service"]
    assert (unit.load_state, unit.active_state, unit.unit_file_state) == ("loaded", "active", "enabled")
    assert unit.need_daemon_reload
    assert unit.drop_in_paths == ("/etc/systemd/system/v100-t.service.d/more.conf",)
    # It has no file any more, but it runs.
    assert facts.units["v100-deleted.service"].active_state == "active"

    process = facts.process_of("v100-t.service")
    assert process is not None
    assert process.pid == unit.main_pid
    assert process.environ == {"V100CTL_INSTANCE_DIGEST": "abc"}
    assert process.argv[1:3] == ("-m", "http.server")
    assert process.nofile_soft == 2048
    listener = next(found for found in facts.listeners if found.port == 8123)
    assert (listener.pid, listener.unit, listener.command) == (unit.main_pid, "v100-t.service", "python3 -m http.server")

    assert facts.health["t"].status == 200
    assert facts.health["gone"].error == "Connection refused"
    assert facts.files["/etc/systemd/system/v100-t.service"].content == UNIT + "# more\n"
    assert facts.files["/etc/v100ctl/instances/t.keys"].content is None
    assert facts.files["/etc/v100ctl/instances/t.env"].content is None
    assert facts.files["/etc/v100ctl/fifo"].kind == "other"
    assert facts.files["/etc/v100ctl/link"].kind == "symlink"
    assert facts.files["/etc/v100ctl/folder"].kind == "symlink"
    assert facts.files["/etc/shadow"].content is None
    assert facts.host_json.document is not None
    assert "hush" not in facts.model_dump_json()


def test_a_hanging_systemd_is_a_part_that_is_missing(fresh_lab_host: RunningHost) -> None:
    on_host(fresh_lab_host, "mv /usr/bin/systemctl /usr/bin/systemctl.real")
    on_host(fresh_lab_host, "printf '#!/bin/sh\\nsleep 600\\n' > /usr/bin/systemctl; chmod 755 /usr/bin/systemctl")
    facts = probe_host(way(fresh_lab_host), ProbeRequest())
    assert set(facts.errors) == {"systemd", "units"}
    assert "gave no answer within" in facts.errors["units"]
    assert facts.packages.installed and facts.listeners


def test_the_probe_changes_nothing(lab_host: RunningHost) -> None:
    # Beside the logs of the login itself.
    changed = "find / -xdev -newer /run/before -type f -not -path '/var/log/*' -not -path '/proc/*' 2>/dev/null || true"
    on_host(lab_host, "touch /run/before; sleep 1.1")
    probe_host(way(lab_host), ProbeRequest(accounts=("admin",)))
    assert on_host(lab_host, changed) == ""


def test_the_package_managers_lock_is_shown_with_its_holder(lab_host: RunningHost) -> None:
    holder = (
        "import fcntl, time; f = open('/var/lib/dpkg/lock-frontend', 'w'); fcntl.lockf(f, fcntl.LOCK_EX);"
        "open('/run/locked', 'w'); time.sleep(600)"
    )
    on_host(lab_host, f"systemd-run --quiet --unit holder python3 -c {shlex.quote(holder)}")
    on_host(lab_host, "for try in $(seq 100); do [ -e /run/locked ] && exit; sleep 0.1; done; exit 1")
    try:
        pid = int(on_host(lab_host, "systemctl show --property MainPID --value holder"))
        (lock,) = probe_host(way(lab_host), ProbeRequest()).package_locks
        assert (lock.path, lock.pid, lock.command) == ("/var/lib/dpkg/lock-frontend", pid, "python3")
        with open_session(way(lab_host)) as session:
            done = session.run(["python3", "-I", "-", "--locks"], stdin=HOST_SCRIPT.read_bytes(), become=True)
        assert json.loads(done.stdout) == {"package_locks": [lock.model_dump()]}
    finally:
        on_host(lab_host, "systemctl stop holder; rm -f /run/locked")


# --- host keys ----------------------------------------------------------------------------------------------------------------


def test_an_unknown_key_is_refused_accepted_and_known(lab_host: RunningHost, tmp_path: Path) -> None:
    known = tmp_path / "known_hosts"
    error = refused(way(lab_host, known=known))
    assert "is not known (ssh-ed25519 SHA256:" in error.message
    shown = on_host(lab_host, "ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub").split()[1]
    assert shown in error.message
    assert not known.exists()
    for policy in (HostKeyPolicy.ACCEPT_NEW, HostKeyPolicy.REFUSE):
        probe_host(way(lab_host, known=known, host_keys=policy), ProbeRequest())
    # What was written is what `ssh` itself looks for.
    argv = ["ssh", "-F", "/dev/null", "-i", str(lab_host.key_path), "-o", f"UserKnownHostsFile={known}", "-o", "BatchMode=yes"]
    subprocess.run([*argv, "-o", "StrictHostKeyChecking=yes", f"admin@{lab_host.address}", "true"], check=True)


def test_a_changed_key_is_refused_with_file_and_line(lab_host: RunningHost, tmp_path: Path) -> None:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / "other")], check=True)
    key_type, key = (tmp_path / "other.pub").read_text().split()[:2]
    known = tmp_path / "known_hosts"
    known.write_text(f"# by hand\n{lab_host.address} {key_type} {key}\n")
    for policy in HostKeyPolicy:
        error = refused(way(lab_host, known=known, host_keys=policy))
        assert "its host key has changed" in error.message
        assert f"{known}:2" in error.message
        assert "ssh-keygen -f" in (error.hint or "")


# --- getting in ---------------------------------------------------------------------------------------------------------------


def test_a_refused_key(lab_host: RunningHost, tmp_path: Path) -> None:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / "other")], check=True)
    error = refused(way(lab_host, ansible_ssh_private_key_file=str(tmp_path / "other")))
    assert "`admin` cannot log in" in error.message and "refuses 1 key (it takes publickey)" in error.message


def test_another_known_type_of_key_and_passwords(fresh_lab_host: RunningHost, tmp_path: Path) -> None:
    host = fresh_lab_host
    settings = "HostKey /etc/ssh/ssh_host_rsa_key\\nPasswordAuthentication yes\\n"
    on_host(host, f"ssh-keygen -A; printf '{settings}' > /etc/ssh/sshd_config.d/05-test.conf; systemctl restart ssh")
    on_host(host, "echo 'admin:correct horse' | chpasswd")
    key_type, key = on_host(host, "cat /etc/ssh/ssh_host_rsa_key.pub").split()[:2]
    known = tmp_path / "known_hosts"
    known.write_text(f"{known_hosts.hash_name(host.address)} {key_type} {key}\n")
    assert probe_host(way(host, known=known), ProbeRequest()).user.uid == 0

    no_key = {"ansible_ssh_private_key_file": str(tmp_path / "none"), "known": known}
    assert probe_host(way(host, ansible_password="correct horse", **no_key), ProbeRequest()).user.uid == 0
    assert probe_host(way(host, ask=Secrets("correct horse"), **no_key), ProbeRequest()).user.uid == 0
    error = refused(way(host, ansible_password="wrong pony", **no_key))
    assert "refuses the password" in error.message
    assert "wrong pony" not in error.message + str(error.hint)


def test_an_unreachable_host(lab_host: RunningHost) -> None:
    assert "Connection refused" in refused(way(lab_host, ansible_port=1)).message


def test_a_frozen_host_ends_in_time_and_delays_no_other(lab_host: RunningHost) -> None:
    # Its kernel still takes the connection, but nobody answers.
    deaf = "import socket, time; s = socket.create_server(('', 2022)); time.sleep(600)"
    on_host(lab_host, f"systemd-run --quiet --unit deaf python3 -c {shlex.quote(deaf)}")
    on_host(lab_host, "for try in $(seq 100); do ss -Htln 'sport = 2022' | grep -q . && exit; sleep 0.1; done; exit 1")
    try:
        items = {
            "deaf": (way(lab_host, ansible_port=2022), ProbeRequest()),
            "good": (way(lab_host), ProbeRequest()),
        }
        found = probe_hosts(items, forks=1, timeout_s=8.0)
        assert isinstance(found["deaf"], UnreachableError)
        assert isinstance(found["good"], Facts)
    finally:
        on_host(lab_host, "systemctl stop deaf")


def test_through_a_jump_host(lab_host: RunningHost, fresh_lab_host: RunningHost, tmp_path: Path) -> None:
    # The jump is an `ssh` of its own, with the configuration that is named.
    connection = way(lab_host)
    options = [f"-F{fresh_lab_host.ssh_config_path}", "-J", fresh_lab_host.name]
    connection = way(lab_host, ansible_ssh_common_args=[*options, "-o", f"UserKnownHostsFile={lab_host.known_hosts_path}"])
    with open_session(connection) as session:
        via = session.run("echo $SSH_CONNECTION").stdout.split()[0].decode()
    assert via == fresh_lab_host.address


# --- sudo ---------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def password_host(make_lab_host: Callable[..., RunningHost]) -> RunningHost:
    """A host with an account whose sudo asks for a password."""
    return make_lab_host(sudo_password=SUDO_PASSWORD)


def test_sudo_with_a_password(password_host: RunningHost) -> None:
    host = password_host

    def admin(**variables: Any) -> Connection:
        return way(host, user=PASSWORD_ADMIN, **variables)

    for connection in (
        admin(ansible_become_password=SUDO_PASSWORD),
        admin(ask=Secrets(become_password=SUDO_PASSWORD)),
        admin(ansible_become_password=SUDO_PASSWORD, ansible_become=None),
    ):
        assert probe_host(connection, ProbeRequest()).user.name == "root"
    # Never in an argument, where everybody could read it.
    with open_session(admin(ansible_become_password=SUDO_PASSWORD)) as session:
        watching = threading.Thread(target=lambda: session.run(["sleep", "2"], become=True))
        watching.start()
        seen = on_host(host, "for try in $(seq 20); do ps -eo args; sleep 0.1; done")
        watching.join()
        assert "sleep 2" in seen
        assert "quoted" not in seen
        done = session.run("cat; id -un >&2", stdin=b"my input\n", become=True)
        assert (done.stdout, done.stderr) == (b"my input\n", b"root\n")

    assert "`sudo` does not take the password" in refused(admin(ansible_become_password="wrong")).message
    missing = refused(admin())
    assert "`sudo` wants a password" in missing.message
    assert "-K" in (missing.hint or "") and "ansible_become_password" in (missing.hint or "")
    assert probe_host(admin(ansible_become=False), ProbeRequest()).user.name == PASSWORD_ADMIN


def test_no_sudo(fresh_lab_host: RunningHost) -> None:
    host = fresh_lab_host
    on_host(host, "useradd --create-home --shell /bin/bash joe && echo joe:pw | chpasswd")
    assert "joe is not in the sudoers file" in refused(way(host, user="joe", ansible_become_password="pw")).message
    on_host(host, "mv /usr/bin/sudo /usr/bin/hidden")
    error = refused(way(host, user="joe"))
    assert "root is needed and `sudo` is not installed" in error.message
    assert "ansible_user: root" in (error.hint or "")


# --- Python -------------------------------------------------------------------------------------------------------------------


def test_no_python_is_offered_and_installed(fresh_lab_host: RunningHost) -> None:
    host = fresh_lab_host
    on_host(host, "DEBIAN_FRONTEND=noninteractive apt-get remove --yes python3.11-minimal")
    error = refused(way(host), PythonMissingError)
    assert "it has no Python (Debian GNU/Linux 12 (bookworm))" in error.message
    assert "apt-get install --yes --no-install-recommends python3" in (error.hint or "")
    with open_session(way(host)) as session:
        install_python(session)
        assert probe_session(session, ProbeRequest()).errors == {}


def test_login_shells_that_talk_or_run_nothing(fresh_lab_host: RunningHost) -> None:
    # Debian's bash reads this for every command that comes over SSH.
    on_host(fresh_lab_host, "sed -i '1i echo Welcome; echo oops >&2' ~admin/.bashrc")
    assert probe_host(way(fresh_lab_host), ProbeRequest()).errors == {}
    for shell in ("/usr/sbin/nologin", "/bin/false"):
        on_host(fresh_lab_host, f"usermod --shell {shell} admin")
        assert "the login shell ran nothing" in refused(way(fresh_lab_host)).message


# --- ports --------------------------------------------------------------------------------------------------------------------


def test_a_service_on_the_hosts_loopback_is_reached(lab_host: RunningHost) -> None:
    on_host(lab_host, "systemd-run --quiet --unit web python3 -m http.server --bind 127.0.0.1 --directory /etc/ssh 8124")
    try:
        with open_session(way(lab_host)) as session:
            session.run("for try in $(seq 100); do ss -Htln 'sport = 8124' | grep -q . && exit; sleep 0.1; done; exit 1")
            for _ in range(2):
                client = http.client.HTTPConnection("127.0.0.1")
                client.sock = session.open_tcp("127.0.0.1", 8124)
                client.request("GET", "/ssh_host_ed25519_key.pub")
                response = client.getresponse()
                assert response.status == 200
                assert response.read().startswith(b"ssh-ed25519 ")
                client.close()
            with pytest.raises(ConnectionRefusedError):
                session.open_tcp("127.0.0.1", 9)
    finally:
        on_host(lab_host, "systemctl stop web")
