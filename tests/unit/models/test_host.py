"""The parsers on a host: sent over SSH, on every Python that a host may have, and what may come back instead."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.unit.models import making
from tests.unit.models.making import by_hand
from tests.unit.ssh_server import USER, ssh_server, write_key
from v100ctl.errors import ProbeError
from v100ctl.models import host, host_script
from v100ctl.models.host import read_from_host
from v100ctl.models.local import read_local
from v100ctl.models.source import ModelHeaderError, ModelMissingError
from v100ctl.models.types import ModelHeader
from v100ctl.probe import HostKeyPolicy, PythonMissingError, Result, open_session
from v100ctl.probe.connection import Connection

LOCAL = {"ansible_connection": "local", "ansible_become": False}


class FakeSession:
    """Answers with what it is given."""

    def __init__(self, *results: Result) -> None:
        self.connection = Connection.from_vars("web1", {})
        self.results = list(results)

    def run(
        self, command: Sequence[str] | str, *, stdin: bytes | None = None, timeout_s: float = 30, become: bool = False
    ) -> Result:
        assert become
        return self.results.pop(0)

    def open_tcp(self, address: str, port: int, *, timeout_s: float = 10.0) -> Any:
        raise NotImplementedError

    def close(self) -> None:
        """Nothing is open."""


@pytest.fixture
def models(tmp_path: Path) -> list[str]:
    """A GGUF file, a split one, a folder, and things that are none; with odd names."""
    making.dense(tmp_path / 'it\'s a "tiny" !model\\.gguf')
    making.folder(tmp_path / "folder")
    (tmp_path / "bad.gguf").write_bytes(by_hand(version=1))
    names = ['it\'s a "tiny" !model\\.gguf', making.split(tmp_path).name, "folder", "bad.gguf", "none.gguf"]
    return [str(tmp_path / name) for name in names]


def check(answers: dict[str, Any], models: list[str]) -> None:
    assert list(answers) == models
    for path in models[:3]:
        assert answers[path] == read_local(Path(path))
    assert isinstance(answers[models[3]], ModelHeaderError) and "is GGUF version 1" in answers[models[3]].message
    assert isinstance(answers[models[4]], ModelMissingError) and "web1: " in answers[models[4]].message


def test_over_ssh(models: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    key = write_key(tmp_path / "key")
    with ssh_server(authorized=[key]) as server:
        options = ["-F", "/dev/null", "-o", "GlobalKnownHostsFile=/dev/null", "-o", f"UserKnownHostsFile={tmp_path / 'known'}"]
        variables = {
            "ansible_host": "127.0.0.1",
            "ansible_port": server.port,
            "ansible_user": USER,
            "ansible_ssh_private_key_file": str(tmp_path / "key"),
            "ansible_ssh_common_args": options,
            "ansible_python_interpreter": sys.executable,
            "ansible_become": False,
        }
        with open_session(Connection.from_vars("web1", variables, host_keys=HostKeyPolicy.ACCEPT_NEW)) as session:
            check(read_from_host(session, models), models)


def test_nothing_asked_needs_no_host() -> None:
    assert read_from_host(FakeSession(), []) == {}


def oldest_python() -> str:
    """Python 3.8, where this machine has one that works."""
    found = shutil.which("python3.8")
    if found is None or subprocess.run([found, "-c", ""], capture_output=True).returncode:
        pytest.skip("this machine has no Python 3.8")
    return found


def test_on_the_oldest_python(models: list[str]) -> None:
    argv = [oldest_python(), "-I", "-S", "-B", "-", "--request", json.dumps({"paths": models})]
    done = subprocess.run(argv, input=host.script(), capture_output=True, check=True)
    check(read_from_host(FakeSession(Result(0, done.stdout, done.stderr)), models), models)


def test_a_path_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_script, "answer", lambda path: time.sleep(60))
    answer = json.loads(host_script.answer_aside("/dead/model.gguf", 0.1))
    assert answer["error"]["message"] == "`/dead/model.gguf` could not be read within 0.1 s"


def test_a_reader_that_is_killed_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_script, "answer", lambda path: os._exit(9))
    assert "was killed" in json.loads(host_script.answer_aside("/m.gguf", 5))["error"]["message"]


def test_headers_that_are_too_much_together_are_refused(
    models: list[str], monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    monkeypatch.setattr(host_script, "MAX_DOCUMENT_BYTES", 1500)
    monkeypatch.setattr(sys, "argv", ["-", "--request", json.dumps({"paths": models[:2]})])
    host_script.main()
    answers = read_from_host(FakeSession(Result(0, capsysbinary.readouterr().out, b"")), models[:2])
    assert [isinstance(item, ModelHeader) for item in answers.values()].count(False) >= 1
    assert any("too much to send" in str(item) for item in answers.values())


@pytest.mark.parametrize(
    "document",
    [
        b"",
        b"welcome!",
        b"[]",
        b"{}",
        b'{"schema": "v100ctl/model-headers/1", "headers": []}',
        b'{"schema": "x", "headers": {}}',
        b"[" * 100000,
    ],
)
def test_what_is_no_document_is_an_error(document: bytes) -> None:
    with pytest.raises(ProbeError, match="did not return a usable document"):
        read_from_host(FakeSession(Result(0, document, b"")), ["/m.gguf"])


@pytest.mark.parametrize(
    "answer",
    [
        None,
        {},
        {"header": {}},
        {"header": {"format": "zip", "architecture": "x"}},
        {"header": {"format": "gguf", "architecture": "x", "tensors": [["a", "f32", "no", 1]]}},
        {"error": {}},
        {"error": {"message": "\x1b[2J"}},
    ],
)
def test_what_is_no_header_is_an_error_of_that_model(answer: Any) -> None:
    document = json.dumps({"schema": host_script.SCHEMA, "headers": {"/m.gguf": answer}}).encode()
    outcome = read_from_host(FakeSession(Result(0, document, b"")), ["/m.gguf"])["/m.gguf"]
    assert isinstance(outcome, ModelHeaderError)
    assert outcome.message.startswith("web1: ") and "\x1b" not in outcome.message


def test_without_python_the_hint_installs_it() -> None:
    with pytest.raises(PythonMissingError):
        read_from_host(FakeSession(Result(127, b"ID=debian\n", b"v100ctl: no python\n")), ["/m.gguf"])


def test_a_python_that_is_too_old_says_so() -> None:
    old = Result(78, b"", b"v100ctl: Python 3.6.8 is too old, 3.8 or newer is needed\n")
    with pytest.raises(ProbeError, match=r"Python 3\.6\.8 is too old"):
        read_from_host(FakeSession(old, old), ["/m.gguf"])
