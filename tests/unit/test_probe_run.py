"""Sending the probe, reading what comes back, and many hosts at once."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from v100ctl.errors import ProbeError, UnreachableError, V100ctlError
from v100ctl.facts import Distribution, Facts, ProbeRequest
from v100ctl.probe import (
    PythonMissingError,
    install_python,
    parse_facts,
    probe_host,
    probe_hosts,
    python_bootstrap_command,
    run,
)
from v100ctl.probe.connection import Connection
from v100ctl.probe.session import Result, TcpStream
from v100ctl.probe.text import last_line, printable

#: This machine, as whoever runs the tests.
LOCAL = {"ansible_connection": "local", "ansible_become": False}


class FakeSession:
    """Answers each run with the next of its results."""

    def __init__(self, *results: Result, **variables: Any) -> None:
        self.connection = Connection.from_vars("web1", variables)
        self.results = list(results)
        self.commands: list[Sequence[str] | str] = []

    def run(
        self, command: Sequence[str] | str, *, stdin: bytes | None = None, timeout_s: float = 30, become: bool = False
    ) -> Result:
        self.commands.append(command)
        return self.results.pop(0)

    def open_tcp(self, address: str, port: int, *, timeout_s: float = 10.0) -> TcpStream:
        raise NotImplementedError

    def close(self) -> None:
        """Nothing is open."""


DOCUMENT = b'{"schema": "v100ctl/facts/1", "hostname": "web1"}\n'
TOO_OLD = Result(78, b"", b"v100ctl: Python 3.6.8 is too old, 3.8 or newer is needed\n")
NO_PYTHON = Result(127, b'ID=debian\nVERSION_ID="12"\nPRETTY_NAME="Debian 12"\n', b"v100ctl: no python\n")


def test_this_machine_can_be_probed() -> None:
    facts = probe_host(Connection.from_vars("here", LOCAL), ProbeRequest())
    assert facts.hostname == os.uname().nodename
    assert facts.user.uid == os.getuid()


def test_a_document_is_read() -> None:
    assert run.probe_session(FakeSession(Result(0, DOCUMENT, b"")), ProbeRequest()).hostname == "web1"


def test_without_python_the_hint_installs_it() -> None:
    with pytest.raises(PythonMissingError) as caught:
        run.probe_session(FakeSession(NO_PYTHON), ProbeRequest())
    assert caught.value.message == "web1: it has no Python (Debian 12)"
    assert "apt-get install --yes --no-install-recommends python3" in (caught.value.hint or "")


def test_a_named_interpreter_that_is_not_there_is_named() -> None:
    session = FakeSession(NO_PYTHON, ansible_python_interpreter="/opt/python")
    with pytest.raises(PythonMissingError, match="there is no /opt/python") as caught:
        run.probe_session(session, ProbeRequest())
    assert "ansible_python_interpreter" in (caught.value.hint or "")


def test_where_the_usual_python_is_too_old_newer_ones_are_tried() -> None:
    session = FakeSession(TOO_OLD, Result(0, DOCUMENT, b""))
    assert run.probe_session(session, ProbeRequest()).hostname == "web1"
    assert "python3.12" in session.commands[1][2]


def test_a_host_with_old_pythons_only_says_so() -> None:
    with pytest.raises(ProbeError, match=r"web1: Python 3\.6\.8 is too old"):
        run.probe_session(FakeSession(TOO_OLD, NO_PYTHON), ProbeRequest())


def test_a_named_interpreter_that_is_too_old_is_not_replaced_silently() -> None:
    session = FakeSession(TOO_OLD, ansible_python_interpreter="/usr/bin/python3")
    with pytest.raises(ProbeError, match="too old"):
        run.probe_session(session, ProbeRequest())
    assert len(session.commands) == 1


def test_a_script_that_fails_shows_its_last_words() -> None:
    with pytest.raises(ProbeError, match="exit code 1: MemoryError"):
        run.probe_session(FakeSession(Result(1, b"", b"Traceback\nMemoryError\n")), ProbeRequest())


@pytest.mark.parametrize(
    "document",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b'{"schema": "v100ctl/facts/1", "cpu": 7}',
        b'{"gpus": [{"uuid": "x"}]}',
        b"[" * 200_000,
        b'{"files": ' * 200_000,
        b"\x1b[2J\x1b]0;owned\x07" * 1000,
        DOCUMENT + b"{}",
        b'{"probe_ms": ' + b"9" * 10_000 + b"}",
    ],
)
def test_what_is_no_document_is_shown_escaped_and_short(document: bytes) -> None:
    with pytest.raises(ProbeError) as caught:
        parse_facts("web1", document)
    assert caught.value.message.startswith("web1: the probe did not return a usable document")
    assert caught.value.message.isprintable()
    assert len(caught.value.message) < 700


@given(st.binary(max_size=300))
def test_any_answer_is_read_or_refused(document: bytes) -> None:
    try:
        assert isinstance(parse_facts("web1", document), Facts)
    except ProbeError as error:
        assert error.message.isprintable()


@given(st.text(st.characters(exclude_characters="\0", codec="utf-8")))
def test_requests_survive_shells_that_do_not_quote_as_sh_does(path: str) -> None:
    encoded = run.encode_request(ProbeRequest(files=(path,)))
    assert json.loads(encoded)["files"] == [path]
    # csh obeys `!` inside quotes; fish takes `\\\\` and `\\'` there for one character.
    assert "!" not in encoded and "'" not in encoded and "\\\\" not in encoded and "\n" not in encoded


@pytest.mark.parametrize(
    ("pythons", "output"),
    [
        (("/no/such/python", "{fake}"), "fake: -I -S -B - --request it's"),
        (("/usr/bin/env {fake}",), "fake: -I -S -B - --request it's"),
        (("/usr/bin/env no-such-python",), "no python"),
        ((), "no python"),
    ],
)
def test_the_first_interpreter_that_is_there_is_run(tmp_path: Path, pythons: tuple[str, ...], output: str) -> None:
    fake = tmp_path / "my-python"
    fake.write_text('#!/bin/sh\necho "fake: $*"\n')
    fake.chmod(0o755)
    script = run.find_python_script([python.format(fake=fake) for python in pythons])
    assert "\n" not in script
    done = subprocess.run(["/bin/sh", "-c", script, "sh", "it's"], capture_output=True, text=True, check=False)
    assert output in done.stdout + done.stderr
    assert done.returncode == (0 if "fake" in output else 127)


@pytest.mark.parametrize(
    ("distribution", "command"),
    [
        (Distribution(id="debian", version_id="12"), "apt-get install --yes --no-install-recommends python3"),
        (Distribution(id="linuxmint", id_like=("ubuntu", "debian")), "apt-get install --yes --no-install-recommends python3"),
        (Distribution(id="rocky", version_id="9.4", id_like=("rhel", "fedora")), "dnf install --assumeyes python3"),
        (Distribution(id="rocky", version_id="8.10", id_like=("rhel", "fedora")), "dnf install --assumeyes python3.12"),
        (Distribution(id="fedora", version_id="43"), "dnf install --assumeyes python3"),
        (Distribution(id="opensuse-leap", id_like=("suse", "opensuse")), "zypper --non-interactive install python3"),
        (Distribution(id="plan9"), "apt-get install python3 || dnf install python3"),
        (None, "apt-get install python3 || dnf install python3"),
    ],
)
def test_the_command_that_installs_python(distribution: Distribution | None, command: str) -> None:
    assert python_bootstrap_command(distribution).endswith(command)


def test_installing_python_runs_that_command() -> None:
    session = FakeSession(Result(0, b"ID=debian\n", b""), Result(0, b"", b""))
    install_python(session)
    assert "apt-get update && apt-get -o DPkg::Lock::Timeout=300 install --yes" in session.commands[1]


def test_installing_python_that_fails_says_why() -> None:
    session = FakeSession(Result(0, b"ID=debian\n", b""), Result(100, b"", b"E: Unable to locate package python3\n"))
    with pytest.raises(ProbeError, match="Unable to locate package python3"):
        install_python(session)


def test_nothing_is_installed_on_an_unknown_system() -> None:
    session = FakeSession(Result(0, b'ID=plan9\nPRETTY_NAME="Plan 9"\n', b""))
    with pytest.raises(ProbeError, match="no way is known to install Python on Plan 9"):
        install_python(session)


# --- many hosts ---------------------------------------------------------------------------------------------------------------


def items(*names: str) -> dict[str, tuple[Connection, ProbeRequest]]:
    return {name: (Connection.from_vars(name, LOCAL), ProbeRequest()) for name in names}


def test_all_hosts_are_probed_and_each_is_told_of() -> None:
    done: list[str] = []
    threads: set[int] = set()

    def on_done(host: str, outcome: Facts | V100ctlError) -> None:
        done.append(host)
        threads.add(threading.get_ident())

    found = probe_hosts(items("a", "b", "c"), forks=2, on_done=on_done)
    assert list(found) == ["a", "b", "c"]
    assert all(isinstance(outcome, Facts) for outcome in found.values())
    assert sorted(done) == ["a", "b", "c"]
    assert threads == {threading.get_ident()}
    assert probe_hosts({}) == {}


def test_an_error_is_the_hosts_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def look(connection: Connection, request: ProbeRequest, deadline: object) -> bytes:
        if connection.host == "bad":
            raise UnreachableError("bad: no way in")
        return Facts(hostname=connection.host).model_dump_json().encode()

    monkeypatch.setattr(run, "_probe", look)
    found = probe_hosts(items("good", "bad"))
    assert isinstance(found["good"], Facts)
    assert isinstance(found["bad"], UnreachableError)


def test_stuck_hosts_delay_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()

    def look(connection: Connection, request: ProbeRequest, deadline: object) -> bytes:
        if connection.host.startswith("stuck"):
            # As in a name lookup: nothing can interrupt it.
            release.wait(60)
        return Facts(hostname=connection.host).model_dump_json().encode()

    monkeypatch.setattr(run, "_probe", look)
    monkeypatch.setattr(run, "_GRACE_S", 0.1)
    # More of them than there are forks: each place has to be taken over.
    found = probe_hosts(items("stuck1", "stuck2", "stuck3", "a", "b"), forks=2, timeout_s=0.2)
    release.set()
    assert {host for host, outcome in found.items() if isinstance(outcome, Facts)} == {"a", "b"}
    assert all("no answer within 0.2 s" in str(found[host]) for host in ("stuck1", "stuck2", "stuck3"))


def test_a_host_that_waits_for_a_person_is_not_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def look(connection: Connection, request: ProbeRequest, deadline: Any) -> bytes:
        with deadline.paused():
            threading.Event().wait(1.0)
        return Facts(hostname=connection.host).model_dump_json().encode()

    monkeypatch.setattr(run, "_probe", look)
    monkeypatch.setattr(run, "_GRACE_S", 0.1)
    assert isinstance(probe_hosts(items("a"), timeout_s=0.2)["a"], Facts)


def test_a_bug_is_no_hosts_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def look(connection: Connection, request: ProbeRequest, deadline: object) -> bytes:
        raise ZeroDivisionError

    monkeypatch.setattr(run, "_probe", look)
    with pytest.raises(ZeroDivisionError):
        probe_hosts(items("a"))


# --- text ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        ("plain", "plain"),
        (" a\nb\t", "a\\nb"),
        ("\x1b[31mred", "\\x1b[31mred"),
        (b"caf\xe9", "caf\\xe9"),
        ("\u202egnp", "\\u202egnp"),
        ("\udcff", "\\udcff"),
        ("はい", "はい"),
        ("x" * 300, "x" * 200 + "..."),
    ],
)
def test_printable(raw: str | bytes, shown: str) -> None:
    assert printable(raw) == shown


@given(st.text(st.characters()) | st.binary())
def test_printable_is_always_printable_and_short(raw: str | bytes) -> None:
    assert printable(raw, 50).isprintable()
    assert len(printable(raw, 50)) <= 53


def test_last_line() -> None:
    assert last_line("first\nlast \n\n") == "last"
    assert last_line(b"") == ""
