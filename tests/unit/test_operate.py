"""Instances by hand: what runs where, and what is asked of a host to stop, start or restart one."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from v100ctl import operate as module
from v100ctl.apply.reporter import make_reporter
from v100ctl.cli import COMMANDS
from v100ctl.cli import logs as logs_module
from v100ctl.cli import status as status_module
from v100ctl.cli.operate import complete_instance
from v100ctl.errors import UnreachableError, V100ctlError
from v100ctl.examine import Examined
from v100ctl.fleet import FleetHost
from v100ctl.fronts import FrontError
from v100ctl.operate import operate, status_exit_code, status_of
from v100ctl.probe.connection import Connection
from v100ctl.probe.session import Result

from .factory import applied_facts, make_config, make_plan

UNIT = "v100-chat.service"
HOST = FleetHost("h1", {}, make_config())
PLAN = make_plan()


def looked_at(**changes: Any) -> Examined:
    return Examined(HOST, Connection.from_vars("h1", {"ansible_connection": "local"}), applied_facts(PLAN, **changes), PLAN)


def unit(**changes: Any) -> dict[str, Any]:
    return {"units": {UNIT: changes}}


@pytest.mark.parametrize(
    ("changes", "state", "code"),
    [
        ({}, "serving", 0),
        ({"health": {"chat": {"status": 503}}}, "loading", 2),
        ({"health": {"chat": {"status": None, "error": "refused"}}}, "loading", 2),
        ({"health": {"chat": {"status": 500}}}, "unhealthy", 2),
        (unit(active_state="activating"), "starting", 2),
        (unit(active_state="deactivating"), "stopping", 2),
        (unit(active_state="inactive"), "stopped", 2),
        (unit(active_state="failed"), "failed", 2),
        (unit(load_state="not-found"), "absent", 2),
    ],
)
def test_the_state_of_an_instance(changes: dict[str, Any], state: str, code: int) -> None:
    found = status_of(looked_at(**changes))
    assert found.instances["chat"].state == state
    assert status_exit_code({"h1": found}) == code


@pytest.mark.parametrize(
    "record", [{"gateway": {"fronts": ["x"]}}, {"gateway": {"fronts": {"chat": "x"}}}, {"gateway": 7}, {"instances": {"chat": 7}}]
)
def test_a_lying_record_changes_no_state(record: dict[str, Any]) -> None:
    found = status_of(looked_at(host_json={"document": record}))
    assert found.instances["chat"].state == "serving"


def test_what_the_inventory_has_dropped_is_shown_and_is_no_difference() -> None:
    found = status_of(looked_at(units={"v100-old.service": {"load_state": "loaded", "active_state": "active"}}))
    assert (found.instances["old"].planned, found.instances["old"].state) == (False, "serving")
    assert status_exit_code({"h1": found}) == 0


def test_the_table_has_a_line_for_each_and_no_control_sequences(capsys: pytest.CaptureFixture[str]) -> None:
    facts = {"gateway": {"servers": {"chat": {"status": "DRAIN\x1b[31m", "requests_running": 3}}}}
    lost = Examined(HOST, error=UnreachableError("no route\x1b[2J"))
    status_module.print_status({"h1": status_of(looked_at(**facts)), "h2": status_of(lost)}, no_color=True, output=None)
    text = capsys.readouterr().out
    assert "h1/chat" in text
    assert "DRAIN at the gateway" in text
    assert "unreachable" in text
    assert "\x1b" not in text


class Host:
    """A session that answers as a host does, and remembers what it was asked."""

    def __init__(self, **answers: tuple[int, str]) -> None:
        self.answers = {"readiness": (0, json.dumps({"state": "done", "message": "it is healthy"})), **answers}
        self.asked: list[str] = []

    def run(self, command: Sequence[str], *, stdin: bytes | None = None, timeout_s: float = 30.0, become: bool = False) -> Result:
        assert become
        words = " ".join(command)
        verb = "readiness" if stdin else next((word for word in ("drain", "open") if f" {word} " in words), command[1])
        self.asked.append(verb)
        code, text = self.answers.get(verb, (0, "{}"))
        return Result(code, text.encode(), text.encode())


class PlayedFronts:
    """The fleet's gateways; they write to what the host was asked. ``problem``: the server cannot be taken out."""

    def __init__(self, host: Host, problem: V100ctlError | None = None) -> None:
        self.host, self.problem = host, problem

    def drain(self, host: str, limit_s: float, instance: str) -> None:
        self.host.asked.append(f"out {instance}@{host}")
        if self.problem is not None:
            raise self.problem

    def open(self, host: str, instance: str, *, limit_s: float) -> None:
        self.host.asked.append(f"in {instance}@{host}")
        raise FrontError("it is not seen healthy yet")


def act(
    host: Host, action: Any, monkeypatch: pytest.MonkeyPatch, *, force: bool = False, fronts: Any = None, **changes: Any
) -> str:
    @contextmanager
    def session(connection: Connection) -> Iterator[Host]:
        yield host

    monkeypatch.setattr(module, "open_session", session)
    return operate(looked_at(**changes), "chat", action, reporter=make_reporter(), drain_limit_s=5, force=force, fronts=fronts)


STOPPED = unit(active_state="inactive")


@pytest.mark.parametrize(
    ("action", "changes", "asked"),
    [
        ("restart", {}, ["drain", "reset-failed", "restart", "readiness", "open"]),
        ("restart", STOPPED, ["reset-failed", "restart", "readiness", "open"]),
        ("start", STOPPED, ["reset-failed", "start", "readiness", "open"]),
        ("start", {}, []),
        ("stop", {}, ["drain", "stop"]),
        ("stop", STOPPED, []),
        # One that starts over and over is stopped too.
        ("stop", unit(active_state="activating"), ["drain", "stop"]),
    ],
)
def test_what_is_asked_of_the_host(
    action: str, changes: dict[str, Any], asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    host = Host()
    assert "h1/chat" in act(host, action, monkeypatch, **changes)
    assert host.asked == asked


def test_running_requests_are_cut_only_when_that_was_said(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(drain=(3, json.dumps({"running": 2})))
    with pytest.raises(V100ctlError, match="2 requests still ran"):
        act(host, "restart", monkeypatch)
    assert host.asked == ["drain", "open"], "it serves on"
    host = Host(drain=(3, json.dumps({"running": 2})))
    act(host, "stop", monkeypatch, force=True)
    assert host.asked == ["drain", "stop"]


@pytest.mark.parametrize(
    ("action", "changes", "asked"),
    [
        ("restart", {}, ["out chat@h1", "drain", "reset-failed", "restart", "readiness", "open", "in chat@h1"]),
        ("start", STOPPED, ["reset-failed", "start", "readiness", "open", "in chat@h1"]),
        ("stop", {}, ["out chat@h1", "drain", "stop", "in chat@h1"]),
        ("stop", STOPPED, []),
    ],
)
def test_the_gateways_of_the_fleet_send_requests_elsewhere_meanwhile(
    action: str, changes: dict[str, Any], asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    host = Host()
    act(host, action, monkeypatch, fronts=PlayedFronts(host), **changes)
    assert host.asked == asked


def test_what_the_gateways_do_not_let_go_serves_on(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host()
    with pytest.raises(FrontError, match="2 requests"):
        act(host, "stop", monkeypatch, fronts=PlayedFronts(host, FrontError("2 requests still ran")))
    assert host.asked == ["out chat@h1", "in chat@h1"]
    host = Host(readiness=(0, json.dumps({"state": "failed", "message": "it is failed"})))
    with pytest.raises(V100ctlError, match="did not come up"):
        act(host, "restart", monkeypatch, force=True, fronts=PlayedFronts(host, FrontError("2 requests still ran")))
    assert host.asked[-1] == "in chat@h1"


@pytest.mark.parametrize("code", [2, 4, 5])
def test_without_a_gateway_nothing_is_waited_for(code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(drain=(code, "x"))
    act(host, "stop", monkeypatch)
    assert host.asked == ["drain", "stop"]


def test_what_fails_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(V100ctlError, match="is not on its host yet"):
        act(Host(), "start", monkeypatch, **unit(load_state="not-found"))
    with pytest.raises(V100ctlError, match="Unit is masked"):
        act(Host(start=(1, "Unit is masked")), "start", monkeypatch, **STOPPED)
    with pytest.raises(V100ctlError, match="did not come up: it is failed"):
        failed = json.dumps({"state": "failed", "message": "it is failed"})
        act(Host(readiness=(0, failed)), "restart", monkeypatch)
    with pytest.raises(V100ctlError, match="does not let it go"):
        act(Host(drain=(1, "Traceback")), "stop", monkeypatch)


def test_logs_end_where_the_journal_does_and_hold_no_control_sequences(capsys: pytest.CaptureFixture[str]) -> None:
    said = "2026-11-29T00:00:00+0000 h1 llama-server[1]: \x1b]0;title\x07red\x1b[31m -- cursor: no\r\n-- cursor: s=1;i=2\n"
    session = SimpleNamespace(run=lambda argv, **_: Result(0, said.encode() + b"", b""))
    assert logs_module._show(session, ["journalctl"], "h1") == "s=1;i=2"  # type: ignore[arg-type]  # it has what is used
    out = capsys.readouterr().out
    assert out == "2026-11-29T00:00:00+0000 h1 llama-server[1]: red -- cursor: no\n"
    broken = SimpleNamespace(run=lambda argv, **_: Result(1, b"", b"Failed to parse timestamp: x\n"))
    with pytest.raises(V100ctlError, match="Failed to parse timestamp"):
        logs_module._show(broken, ["journalctl"], "h1")  # type: ignore[arg-type]  # it has what is used


def test_instances_are_completed(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    inventory = tmp_path / "hosts.yml"
    model = {"path": "/srv/x.gguf", "sha256": "ab" * 32}
    inventory.write_text(
        json.dumps({"all": {"hosts": {"gpu1": {"llm_server_instances": {"chat": {"model": model}, "embed": {"model": model}}}}}})
    )
    context = SimpleNamespace(params={"inventory": (str(inventory),)})
    assert complete_instance(context, None, "gpu1/e") == ["gpu1/embed"]  # type: ignore[arg-type]  # as click calls it
    context = SimpleNamespace(params={"inventory": (str(tmp_path / "none"),)})
    assert complete_instance(context, None, "") == []  # type: ignore[arg-type]  # as click calls it


@pytest.mark.parametrize("verb", ["status", "logs", "start", "stop", "restart"])
def test_help_says_how_it_ends(verb: str) -> None:
    import importlib

    command = importlib.import_module(COMMANDS[verb][0]).command
    shown = CliRunner().invoke(command, ["--help"])
    assert shown.exit_code == 0
    assert f"v100ctl {verb}" in shown.output
