"""The script with which the role llm_server waits for a server."""

from __future__ import annotations

import importlib.util
import json
import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "roles/llm_server/files/readiness.py"


@pytest.fixture(scope="module")
def readiness() -> Any:
    spec = importlib.util.spec_from_file_location("readiness", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def server() -> Iterator[str]:
    """The address of a server that is healthy under ``/health`` and loads under every other path."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/health" else 503)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing."""

    found = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=found.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{found.server_port}"
    found.shutdown()
    found.server_close()


ACTIVE = {"ActiveState": "active", "SubState": "running", "Result": "success", "NRestarts": "0", "ExecMainStatus": "0"}


@pytest.mark.parametrize(
    ("properties", "status", "restarts_before", "state", "words"),
    [
        (ACTIVE, 200, 0, "done", "healthy"),
        (ACTIVE, 503, 0, "running", "HTTP status 503"),
        (ACTIVE, None, 0, "running", "does not answer (refused)"),
        # Something else answers on the port while the unit still starts, or is gone.
        ({**ACTIVE, "ActiveState": "activating"}, 200, 0, "running", "activating"),
        (
            {**ACTIVE, "ActiveState": "failed", "Result": "exit-code", "ExecMainStatus": "203"},
            200,
            0,
            "failed",
            "203, result exit-code",
        ),
        ({**ACTIVE, "ActiveState": "inactive"}, None, 0, "failed", "inactive"),
        # One restart can be a mishap; two are a habit. What happened before this start does not count.
        ({**ACTIVE, "NRestarts": "1"}, None, 0, "running", "does not answer"),
        ({**ACTIVE, "NRestarts": "2"}, None, 0, "failed", "2 restarts"),
        ({**ACTIVE, "NRestarts": "7"}, None, 6, "running", "does not answer"),
        ({**ACTIVE, "NRestarts": "8"}, None, 6, "failed", "2 restarts"),
        ({**ACTIVE, "NRestarts": "8"}, 200, 0, "done", "healthy"),
        # systemd did not answer in time: nothing is known of the unit, so go on asking.
        ({}, 200, 0, "running", "unknown"),
    ],
)
def test_judge(
    readiness: Any, properties: dict[str, str], status: int | None, restarts_before: int, state: str, words: str
) -> None:
    document = readiness.judge("v100-chat.service", properties, status, "refused", restarts_before)
    assert document["state"] == state
    assert words in document["message"]


def test_health_is_asked_without_a_proxy(readiness: Any, server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    assert readiness.health(f"{server}/health") == (200, "")
    assert readiness.health(f"{server}/loading") == (503, "")


def test_health_of_nothing_has_a_reason(readiness: Any) -> None:
    status, reason = readiness.health("http://127.0.0.1:9/health")
    assert status is None
    assert "refused" in reason
    assert readiness.health("not a URL")[0] is None


def test_command_prints_one_object(
    readiness: Any, server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    systemctl = tmp_path / "systemctl"
    systemctl.write_text("#!/bin/sh\nprintf 'ActiveState=active\\nSubState=running\\nNRestarts=0\\n'\n")
    systemctl.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert readiness.main(["--unit", "v100-chat.service", "--url", f"{server}/health"]) == 0
    assert json.loads(capsys.readouterr().out)["state"] == "done"


def test_a_hung_systemctl_is_not_waited_for(readiness: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    systemctl = tmp_path / "systemctl"
    systemctl.write_text("#!/bin/sh\nexec sleep 60\n")
    systemctl.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(readiness, "SYSTEMCTL_TIMEOUT_S", 0.2)
    assert readiness.unit_properties("v100-chat.service") == {}
