"""The lab's pure parts: what is decided from texts, and the texts that it writes."""

from __future__ import annotations

import io
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import docker
import pytest
import yaml
from docker.models.containers import Container, ExecResult
from hypothesis import given
from hypothesis import strategies as st

from v100ctl import practice
from v100ctl.apply.reporter import make_reporter
from v100ctl.errors import LabError
from v100ctl.fleet import InstanceSpec
from v100ctl.lab import engine, image
from v100ctl.lab.engine import Daemon, os_release, system_daemon
from v100ctl.lab.hosts import (
    LabHost,
    RunningHost,
    capability_lists,
    read_host_key,
    run_identity,
    ssh_config,
    ssh_quote,
    write_inventory,
)
from v100ctl.lab.image import Recipe, apt_settings, parse_sources, reachable_proxies

# --- names and recipes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a", "gpu-1", "0", "a" * 40])
def test_names_that_are_host_names_are_taken(name: str) -> None:
    assert LabHost(name).container_name == f"v100ctl-{name}"


@pytest.mark.parametrize("name", ["", "A", "-a", "a-", "a b", "a/b", "a.b", "a\n", "a" * 41, "*"])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(LabError, match="cannot be a lab host's name"):
        LabHost(name)


def test_a_password_is_not_shown() -> None:
    assert "hidden" not in repr(LabHost("a", sudo_password="hidden"))


def test_the_tag_changes_with_every_part_of_the_recipe() -> None:
    digests = {
        Recipe().digest,
        Recipe(packages=("sudo",)).digest,
        Recipe(install="other").digest,
        Recipe(setup="other").digest,
    }
    assert len(digests) == 4
    assert Recipe().digest == Recipe().digest
    assert Recipe().tag("debian", "12") == f"v100ctl/lab-host:debian-12-{Recipe().digest}"


# --- capabilities -----------------------------------------------------------------------------------------------------


def _status(permitted: int, bounding: int) -> str:
    return f"Name:\tdockerd\nCapInh:\t0000000000000000\nCapPrm:\t{permitted:016x}\nCapEff:\t0\nCapBnd:\t{bounding:016x}\n"


def test_with_all_capabilities_only_the_withheld_are_dropped() -> None:
    assert capability_lists(_status(0x1FFFFFFFFFF, 0x1FFFFFFFFFF)) == (["ALL"], ["SYS_MODULE", "SYS_RAWIO", "SYS_TIME"])


@pytest.mark.parametrize(("permitted", "bounding"), [(~(1 << 24), ~0), (~0, ~(1 << 24))])
def test_a_missing_capability_is_dropped_too(permitted: int, bounding: int) -> None:
    full = 0x1FFFFFFFFFF
    _, dropped = capability_lists(_status(permitted & full, bounding & full))
    assert dropped == ["SYS_MODULE", "SYS_RAWIO", "SYS_RESOURCE", "SYS_TIME"]


def test_without_any_knowledge_all_are_asked_for() -> None:
    assert capability_lists("") == (["ALL"], ["SYS_MODULE", "SYS_RAWIO", "SYS_TIME"])


# --- apt --------------------------------------------------------------------------------------------------------------

TARGETS = """\
http://m.example|http://m.example/debian/|bookworm|bookworm|main|Debian
http://m.example|http://m.example/debian/|bookworm-updates|bookworm-updates|main|Debian
http://s.example|http://s.example/security/|bookworm-security|bookworm-security|main|Debian
http://m.example|http://m.example/debian/|bookworm-backports|bookworm-backports|main|Debian
https://other.example|https://other.example/|bookworm|bookworm|main|Somebody
cdrom://disc|cdrom://disc/|bookworm|bookworm|main|Debian
"""


def test_only_the_releases_own_sources_are_taken() -> None:
    assert parse_sources(TARGETS, "debian", "bookworm") == [
        "deb http://m.example/debian/ bookworm main",
        "deb http://m.example/debian/ bookworm-updates main",
        "deb http://s.example/security/ bookworm-security main",
    ]


def test_a_release_named_by_its_role_is_known_by_its_code_name() -> None:
    assert parse_sources("a|http://a/|stable|bookworm|main|Debian\n", "debian", "bookworm") == ["deb http://a/ stable main"]


def test_other_releases_lie_where_the_own_one_does() -> None:
    assert parse_sources(TARGETS, "debian", "trixie", derive_from="bookworm") == [
        "deb http://m.example/debian/ trixie main",
        "deb http://m.example/debian/ trixie-updates main",
        "deb http://s.example/security/ trixie-security main",
    ]
    # One that is configured itself is taken as it is.
    known = "a|http://old/|oldstable|bullseye|main|Debian\n"
    assert parse_sources(TARGETS + known, "debian", "bullseye", derive_from="bookworm") == ["deb http://old/ oldstable main"]
    # A role's name means another release than the one that is wanted, and Debian 11 has no component of that name.
    by_role = "a|http://a/|stable|bookworm|main|Debian\na|http://a/|stable|bookworm|non-free-firmware|Debian\n"
    assert parse_sources(by_role, "debian", "bullseye", derive_from="bookworm") == ["deb http://a/ bullseye main"]
    with pytest.raises(LabError, match="does not know debian trixie"):
        parse_sources(TARGETS, "debian", "trixie", derive_from="buster")


def test_a_release_that_no_host_is_made_of_is_refused() -> None:
    with pytest.raises(LabError, match="cannot be made of Debian 10") as caught:
        image.ensure_image(cast(docker.DockerClient, None), make_reporter(stream=io.StringIO()), debian="10")
    assert caught.value.hint == "one of 11, 12, 13"


def test_ubuntus_updates_share_the_code_name() -> None:
    text = "a|http://a/|jammy|jammy|main|Ubuntu\na|http://a/|jammy-security|jammy|main|Ubuntu\na|http://a/|jammy|jammy|universe|Ubuntu\n"
    assert parse_sources(text, "ubuntu", "jammy") == [
        "deb http://a/ jammy main",
        "deb http://a/ jammy-security main",
        "deb http://a/ jammy universe",
    ]


@pytest.mark.parametrize("text", ["", "nonsense\n", "a|http://a/|bookworm-updates|bookworm-updates|main|Debian\n"])
def test_without_the_release_itself_there_is_no_base(text: str) -> None:
    with pytest.raises(LabError, match="does not know debian bookworm"):
        parse_sources(text, "debian", "bookworm")


def test_settings_for_the_network_are_taken_and_those_of_trust_are_not() -> None:
    dump = (
        'Acquire::http::Proxy "http://proxy.example:3128";\n'
        'Acquire::Retries "3";\n'
        'Acquire::Check-Valid-Until "false";\n'
        'Acquire::AllowInsecureRepositories "true";\n'
        'APT::Get::AllowUnauthenticated "true";\n'
        'Acquire::https::CAInfo "/etc/ssl/own.pem";\n'
        'Acquire::http::Proxy-Auto-Detect "/usr/bin/detect";\n'
        'Acquire::http "";\n'
    )
    assert apt_settings(dump, {}) == (
        'Acquire::http::Proxy "http://proxy.example:3128";\nAcquire::Retries "3";\nAcquire::Check-Valid-Until "false";\n'
    )


@pytest.mark.parametrize(
    "address", ["http://127.0.0.1:3128", "http://localhost:3128/", "http://user:word@[::1]:3128", "127.0.0.2:80"]
)
def test_a_proxy_on_this_machine_alone_is_left_out(address: str) -> None:
    assert apt_settings(f'Acquire::http::Proxy "{address}";\n', {"http_proxy": address}) == ""
    assert reachable_proxies({"HTTP_PROXY": address}) == {}


def test_the_environments_proxy_is_used_in_either_spelling() -> None:
    environment = {
        "http_proxy": "http://a.example:1",
        "HTTPS_PROXY": "http://localhost.example:2",
        "no_proxy": "x",
        "HTTP_PROXY": "http://b",
    }
    assert reachable_proxies(environment) == {
        "http_proxy": "http://a.example:1",
        "https_proxy": "http://localhost.example:2",
        "no_proxy": "x",
    }
    assert apt_settings("", environment) == (
        'Acquire::http::Proxy "http://a.example:1";\nAcquire::https::Proxy "http://localhost.example:2";\n'
    )
    assert apt_settings("", {"http_proxy": 'http://a"; Evil "1'}) == ""


def test_events_come_through_and_so_does_their_error() -> None:
    def request() -> Iterator[dict[str, object]]:
        yield {"status": "one"}
        raise OSError("gone")

    received = []
    with pytest.raises(OSError, match="gone"):
        for event in image._bounded(request):
            received.append(event)
    assert received == [{"status": "one"}]
    assert list(image._bounded(lambda: iter([{"a": 1}, {"a": 2}]))) == [{"a": 1}, {"a": 2}]


# --- the engine -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "field", "value"),
    [
        ('ID=debian\nPRETTY_NAME="Debian GNU/Linux 12 (bookworm)"\n', "PRETTY_NAME", "Debian GNU/Linux 12 (bookworm)"),
        ("ID='ubuntu'\n", "ID", "ubuntu"),
        ("# a comment\n\nID=\n", "ID", ""),
    ],
)
def test_os_release_is_read(text: str, field: str, value: str, tmp_path: Path) -> None:
    (tmp_path / "os-release").write_text(text, encoding="utf-8")
    assert os_release(tmp_path / "os-release")[field] == value
    assert os_release(tmp_path / "absent") == {}


@pytest.mark.parametrize(
    ("text", "pid_file", "exec_root"),
    [
        ('{"pidfile": "/x/pid", "exec-root": "/x/run"}', "/x/pid", "/x/run"),
        ('{"pidfile": 3, "exec-root": "relative"}', "/var/run/docker.pid", "/var/run/docker"),
        ("[]", "/var/run/docker.pid", "/var/run/docker"),
        ("{broken", "/var/run/docker.pid", "/var/run/docker"),
    ],
)
def test_the_daemons_own_paths_are_respected(text: str, pid_file: str, exec_root: str, tmp_path: Path) -> None:
    (tmp_path / "daemon.json").write_text(text, encoding="utf-8")
    daemon = system_daemon(tmp_path / "daemon.json")
    assert (str(daemon.pid_file), str(daemon.exec_root)) == (pid_file, exec_root)
    assert str(system_daemon(tmp_path / "absent").pid_file) == "/var/run/docker.pid"


@pytest.mark.parametrize(
    ("log", "complaint"),
    [
        (
            'time="x" level=info msg="Starting up"\nfailed to start daemon: no "iptables"\n',
            'failed to start daemon: no "iptables"',
        ),
        ('time="x" level=fatal msg="cannot use \\"x\\"" key=1\ntime="x" level=info msg="bye"\n', 'cannot use "x"'),
        ('time="x" level=info msg="Starting up"\n', ""),
        ("", ""),
    ],
)
def test_the_reason_is_found_in_the_daemons_log(log: str, complaint: str) -> None:
    assert engine._complaint(log) == complaint


def _daemon(folder: Path) -> Daemon:
    return Daemon(socket=folder / "s", pid_file=folder / "pid", exec_root=folder / "x", log_file=folder / "log")


@pytest.mark.parametrize("content", ["", "nonsense", "-1", "0", "4194305"])
def test_a_pid_file_that_names_nothing_is_cleared(content: str, tmp_path: Path) -> None:
    daemon = _daemon(tmp_path)
    daemon.pid_file.write_text(content, encoding="ascii")
    daemon.containerd_pid_file.parent.mkdir(parents=True)
    daemon.containerd_pid_file.write_text(content, encoding="ascii")
    engine.clear_leftovers(daemon)
    assert not daemon.pid_file.exists()
    assert not daemon.containerd_pid_file.exists()


def test_a_pid_file_that_names_a_dockerd_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    daemon = _daemon(tmp_path)
    daemon.pid_file.write_text("12", encoding="ascii")
    monkeypatch.setattr(engine, "_program", lambda pid: {12: "dockerd"}.get(pid))
    engine.clear_leftovers(daemon)
    assert daemon.pid_file.exists()


@pytest.mark.parametrize(
    ("release", "command"),
    [
        ("ID=debian\n", "sudo apt-get install -y docker.io iptables"),
        ("ID=linuxmint\nID_LIKE=ubuntu\n", "sudo apt-get install -y docker.io iptables"),
        ("ID=fedora\n", "sudo dnf install -y moby-engine"),
        ('ID=rocky\nID_LIKE="rhel centos fedora"\n', "sudo dnf install -y docker-ce"),
        ("ID=arch\n", "sudo pacman -S --needed docker"),
        ("ID=opensuse-leap\nID_LIKE='suse opensuse'\n", "sudo zypper install -y docker"),
        ("ID=plan9\n", "docs.docker.com"),
    ],
)
def test_the_hint_is_the_command_of_this_system(
    release: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "os-release").write_text(release, encoding="utf-8")
    fields = os_release(tmp_path / "os-release")
    monkeypatch.setattr(engine, "os_release", lambda: fields)
    assert command in engine._install_hint()


@pytest.mark.parametrize(
    ("root", "installed", "system", "message", "hint"),
    [
        (False, False, "debian", "not installed, and installing it needs root", "sudo apt-get install -y docker.io iptables"),
        (False, True, "debian", "not running, and starting it needs root", "run `sudo "),
        (True, False, "fedora", "on Debian and Ubuntu only (this is fedora)", "sudo dnf install -y moby-engine"),
    ],
)
def test_what_is_missing_is_named_with_its_command(
    root: bool, installed: bool, system: str, message: str, hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.os, "geteuid", lambda: 0 if root else 1000)
    monkeypatch.setattr(engine, "_find", lambda program: f"/usr/sbin/{program}" if installed else None)
    monkeypatch.setattr(engine, "os_release", lambda: {"ID": system, "PRETTY_NAME": system})
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.delenv("DOCKER_HOST", raising=False)
    with pytest.raises(LabError) as caught:
        engine.ensure_docker(make_reporter(stream=io.StringIO()), install=True, daemon=_daemon(tmp_path))
    assert message in caught.value.message
    assert hint in (caught.value.hint or "")


def test_without_leave_nothing_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.os, "geteuid", lambda: 0)
    monkeypatch.setattr(engine, "_find", lambda program: None)
    monkeypatch.setattr(engine, "install_packages", lambda *arguments, **options: pytest.fail("packages were installed"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with pytest.raises(LabError, match="Docker Engine is not installed"):
        engine.ensure_docker(make_reporter(stream=io.StringIO()), install=False, daemon=_daemon(tmp_path))


@pytest.mark.parametrize("address", ["tcp://192.0.2.1:2375", "ssh://somewhere"])
def test_an_engine_elsewhere_is_refused(address: str) -> None:
    with pytest.raises(LabError, match="on another machine"):
        engine._usable(cast(docker.DockerClient, None), address)


def test_this_program_is_running_and_carries_its_own_start() -> None:
    pid, _, start = run_identity().partition(":")
    assert pid.isdigit()
    assert start.isdigit()


# --- SSH and inventory ------------------------------------------------------------------------------------------------


def _host(folder: Path, name: str = "h") -> RunningHost:
    return RunningHost(name, "172.17.0.2", "ssh-ed25519 AAAA", folder, cast(Container, None))


@pytest.mark.parametrize("folder", ["/plain", "/with blank", "/100%", "/%h and %%", "/it's", '/a "b" c', "/a\\b", "/#a"])
def test_openssh_reads_back_what_was_written(folder: str, tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.write_text(ssh_config([_host(Path(folder))]), encoding="utf-8")
    shown = subprocess.run(["ssh", "-F", str(config), "-G", "h"], capture_output=True, text=True, check=True).stdout
    settings = dict(line.split(" ", 1) for line in shown.splitlines() if " " in line)
    assert settings["hostname"] == "172.17.0.2"
    assert settings["user"] == "admin"
    assert settings["stricthostkeychecking"] == "true"
    # It shows the one as it will use it and the other before that.
    assert settings["userknownhostsfile"] == f"{folder}/known_hosts"
    assert settings["identityfile"].replace("%%", "%") == f"{folder}/id_ed25519"


@given(st.text(st.characters(exclude_categories=["C", "Z"], exclude_characters="\"'\\#"), min_size=1))
def test_an_ordinary_path_is_only_freed_of_tokens(text: str) -> None:
    assert ssh_quote(text).replace("%%", "%") == text


class Answers:
    """A container of which only what its commands say is of interest."""

    def __init__(self, *answers: tuple[int, bytes]) -> None:
        self._answers = iter(answers)

    def exec_run(self, *_: object, **__: object) -> ExecResult:
        return ExecResult(*next(self._answers))


@pytest.mark.parametrize(
    ("answers", "key"),
    [
        ([(0, b"ssh-ed25519 AAAA root@h\n")], "ssh-ed25519 AAAA"),
        ([(0, b""), (0, b"ssh-ed25519"), (0, b"ssh-ed25519 AAAA root@h\n")], "ssh-ed25519 AAAA"),
        ([(1, b"cat: no such file")], None),
        ([(0, b"")] * 5, None),
    ],
    ids=["said", "lost at first", "none yet", "lost"],
)
def test_a_host_key_is_whole_or_none(answers: list[tuple[int, bytes]], key: str | None) -> None:
    assert read_host_key(cast(Container, Answers(*answers))) == key


def test_the_variables_name_everything_that_a_connection_needs() -> None:
    variables = _host(Path("/a b")).variables()
    assert variables["ansible_host"] == "172.17.0.2"
    assert variables["ansible_user"] == "admin"
    assert """'UserKnownHostsFile="/a b/known_hosts"'""" in variables["ansible_ssh_common_args"]
    assert "StrictHostKeyChecking" not in variables["ansible_ssh_common_args"]
    assert _host(Path("/a")).variables("other")["ansible_user"] == "other"


def test_the_inventory_is_plain_ansible_yaml(tmp_path: Path) -> None:
    path = write_inventory(
        tmp_path / "new" / "hosts.yml",
        {"h": {"ansible_host": "1.2.3.4"}, "b": {}},
        groups={"builders": ["b"]},
        variables={"text": "yes", "number": 1, "list": []},
    )
    assert yaml.safe_load(path.read_text(encoding="utf-8")) == {
        "all": {
            "hosts": {"h": {"ansible_host": "1.2.3.4"}, "b": {}},
            "children": {"builders": {"hosts": {"b": {}}}},
            "vars": {"text": "yes", "number": 1, "list": []},
        }
    }
    assert [file.name for file in path.parent.iterdir()] == ["hosts.yml"]
    assert path.stat().st_mode & 0o777 == 0o600


# --- the practice host ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("builder", "where"), [(True, "builder"), (False, "first")])
def test_the_practice_hosts_variables_are_an_inventorys(builder: bool, where: str) -> None:
    variables = practice.inventory_variables(builder=builder)
    assert variables["llama_cpp_build_on"] == where
    InstanceSpec.model_validate(variables["llm_server_instances"][practice.INSTANCE])
