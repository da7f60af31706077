"""How hosts are taken out of a fleet's gateways and let in again, by a rollout and by a rollback."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from datetime import date
from types import SimpleNamespace
from typing import Any

import pytest

from v100ctl import rollback as rollback_module
from v100ctl.access import Access
from v100ctl.apply.reporter import make_reporter
from v100ctl.errors import UnreachableError, V100ctlError
from v100ctl.fleet import Fleet, FleetHost, parse_config
from v100ctl.fronts import FrontError, Fronts
from v100ctl.history import History, State
from v100ctl.rollback import HostHistory, HostRollback, rollback
from v100ctl.rollout import actions as actions_module
from v100ctl.rollout.actions import FleetActions
from v100ctl.rollout.machine import Machine
from v100ctl.rollout.state import HostState, Options, Rollout, alone

LIMIT, NOT_RUNNING, UNKNOWN = 3, 4, 5


def front(*hosts: str) -> FleetHost:
    servers = [
        {"instance": name, "host": host, "address": "192.0.2.1", "port": 8000} for host in hosts for name in ("chat", "embed")
    ]
    variables = {"gateway_placement": "fleet", "gateway_servers": servers}
    return FleetHost("front", {"ansible_host": "192.0.2.9"}, parse_config("front", variables))


class PlayedGateways:
    """Gateways by name. ``faults``: what the program of one answers for a server (or for all) instead of going well."""

    def __init__(self, *names: str, hosts: Sequence[str] = ("a",)) -> None:
        self.gateways = {name: FleetHost(name, {"ansible_host": name}, front(*hosts).config) for name in names}
        self.faults: dict[str, int | Exception] = {}
        self.calls: list[str] = []
        self.out: set[str] = set()

    @contextlib.contextmanager
    def session(self, host: FleetHost) -> Iterator[Any]:
        yield SimpleNamespace(run=lambda command, **_: self.run(host.name, command))

    def run(self, name: str, command: Sequence[str]) -> Any:
        verb, server = (*command[5:7], "")[:2]
        fault = self.faults.get(f"{verb} {name} {server}", self.faults.get(name, 0))
        if isinstance(fault, Exception):
            raise fault
        self.calls.append(f"{verb} {name} {server}")
        if fault in (0, LIMIT):
            place = f"{name} {server}"
            self.out = self.out | {place} if verb == "drain" else self.out - {place} if verb == "open" else self.out
        answer = {"running": 2, "status": "DOWN"} if fault == LIMIT else {}
        return SimpleNamespace(rc=fault, stdout=json.dumps(answer).encode(), stderr=b"error: no socket\n")

    def fronts(self) -> Fronts:
        return Fronts(self.gateways, self.session, sleep=lambda _s: None)


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("v100ctl.fronts.GATEWAY_RESTART_S", 0.0)


def test_a_host_is_taken_out_of_every_gateway_and_let_in_again() -> None:
    played = PlayedGateways("f1", "f2", hosts=("a", "b"))
    played.fronts().drain("a", 5.0)
    assert played.out == {f"{name} {instance}@a" for name in ("f1", "f2") for instance in ("chat", "embed")}
    played.fronts().open("a")
    assert played.out == set()
    played.fronts().drain("a", 5.0, "embed")
    assert played.out == {"f1 embed@a", "f2 embed@a"}
    played.fronts().open("a", "chat")
    assert played.out == {"f1 embed@a", "f2 embed@a"}
    played.fronts().open("a", "embed", limit_s=0.0)
    assert played.out == set()
    played.calls.clear()
    played.fronts().drain("nobody", 5.0)
    assert played.calls == []


@pytest.mark.parametrize("fault", [LIMIT, NOT_RUNNING, 1, UnreachableError("f1 does not answer")])
@pytest.mark.parametrize("where", ["f1", "open f1 chat@a"])
def test_what_cannot_be_opened_keeps_nothing_else_closed(fault: int | Exception, where: str) -> None:
    played = PlayedGateways("f1", "f2")
    played.fronts().drain("a", 5.0)
    played.faults[where] = fault
    with pytest.raises(V100ctlError) as error:
        played.fronts().open("a")
    assert "f1" in error.value.message
    assert not {place for place in played.out if place.startswith("f2") or (where != "f1" and "embed" in place)}


def test_running_requests_are_told_and_a_gateway_that_knows_nothing_is_no_error() -> None:
    played = PlayedGateways("f1", "f2")
    played.faults["f1"] = UNKNOWN
    played.faults["drain f2 embed@a"] = LIMIT
    with pytest.raises(FrontError, match="2 requests to embed@a still ran after 5 s"):
        played.fronts().drain("a", 5.0)


@pytest.mark.parametrize("fault", [NOT_RUNNING, 1, UnreachableError("f2 does not answer")])
def test_a_gateway_that_cannot_be_told_is_found_out_before(fault: int | Exception) -> None:
    played = PlayedGateways("f1", "f2", "f3")
    played.faults.update({"f1": UNKNOWN, "f2": fault})
    played.fronts().check(["nobody"])
    assert played.calls == []
    with pytest.raises(V100ctlError, match="f2"):
        played.fronts().check(["a", "nobody"])
    del played.faults["f2"]
    played.fronts().check(["a"])
    assert played.out == set()


def test_a_rollout_drains_nobody_where_a_gateway_cannot_be_told(monkeypatch: pytest.MonkeyPatch) -> None:
    played = PlayedGateways("f1")
    played.faults["f1"] = NOT_RUNNING
    monkeypatch.setattr(actions_module, "connection_to", lambda host, access: host)
    monkeypatch.setattr(actions_module, "open_session", played.session)
    monkeypatch.setattr(actions_module, "examine", lambda *_, **__: pytest.fail("it goes on"))
    fleet = Fleet({"a": FleetHost("a", {}, parse_config("a", {}))}, gateways=played.gateways)
    actions = FleetActions(fleet, Access(), make_reporter(), date(2026, 11, 30), Options(), sleep=lambda _s: None)
    hosts = {"a": HostState("a", restarts=["chat"])}
    rollout = Rollout("r1", "me@here", "2026-11-30T04:00:00+00:00", "2026-11-30", Options(), hosts, [["a"]])
    Machine(rollout, actions, lambda _rollout: None).go_on()
    assert (rollout.status, rollout.hosts["a"].phase, rollout.unfinished) == ("stopped", "untouched", False)
    assert "the gateway on f1 fails" in rollout.hosts["a"].problem
    assert played.out == set()


# --- rollback -----------------------------------------------------------------------------------------------------------------

LOCKED, BUSY, IMPOSSIBLE, FAILED = 4, 3, 5, 1
STATES = tuple(State(identifier, identifier, None, (), (), {}) for identifier in ("20261130T040000Z", "20261129T040000Z"))


class PlayedRollback(PlayedGateways):
    """Also the hosts, which are led back: ``status`` is how that ends, ``restarted`` what it restarts."""

    def __init__(self, **options: Any) -> None:
        super().__init__("f1", hosts=("a", "b"))
        self.status: int | Exception = 0
        self.restarted = ["chat"]
        self.__dict__.update(options)
        self.out_meanwhile: set[str] = set()

    def run(self, name: str, command: Sequence[str]) -> Any:
        if command[0] == "python3":
            return super().run(name, command)
        status = 0 if "--check" in command else self.status
        if "--check" not in command:
            self.out_meanwhile |= self.out
            self.calls.append(f"restore {name}")
        if isinstance(status, Exception):
            raise status
        document = {
            "id": STATES[1].id,
            "changed": bool(self.restarted),
            "restarted": self.restarted,
            "removed": [],
            "files": [],
            "problem": "it was not to be" if status else "",
            "instances": {},
        }
        return SimpleNamespace(rc=status, stdout=json.dumps(document).encode(), stderr=b"")

    def carry_out(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Any, **options: Any) -> dict[str, HostRollback]:
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
        hosts = {name: FleetHost(name, {"ansible_host": name}, parse_config(name, {})) for name in ("a", "b")}
        known = HostHistory(History(STATES, STATES[0].id, STATES[1].id))
        monkeypatch.setattr(rollback_module, "histories", lambda fleet, access: dict.fromkeys(fleet.hosts, known))
        monkeypatch.setattr(rollback_module, "connection_to", lambda host, access: host)
        monkeypatch.setattr(rollback_module, "lock_path", lambda host, connection: tmp_path / host.name)
        monkeypatch.setattr(rollback_module, "open_session", self.session)
        fleet = Fleet(hosts, gateways=self.gateways)
        return rollback(fleet, access=Access(), reporter=make_reporter(), confirm=lambda question: True, **options)


def test_a_rollback_sends_requests_elsewhere_meanwhile(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    played = PlayedRollback()
    results = played.carry_out(monkeypatch, tmp_path)
    assert [result.status for result in results.values()] == ["restored"] * 2
    assert played.out_meanwhile == {f"f1 {instance}@{host}" for instance in ("chat", "embed") for host in ("a", "b")}
    assert played.out == set()
    assert played.calls.index("open f1 chat@a") < played.calls.index("drain f1 chat@b")


def test_a_rollback_that_restarts_nothing_takes_nobody_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    played = PlayedRollback(restarted=[])
    # A run that was cut off has left it outside.
    played.out = {"f1 chat@a"}
    assert [result.status for result in played.carry_out(monkeypatch, tmp_path).values()] == ["unchanged"] * 2
    assert not [call for call in played.calls if call.startswith("drain")]
    assert played.out == set()
    played = PlayedRollback()
    assert [result.status for result in played.carry_out(monkeypatch, tmp_path, check=True).values()] == ["would-restore"] * 2
    assert played.calls == []


@pytest.mark.parametrize(
    ("status", "left_outside"),
    [(LOCKED, False), (BUSY, False), (IMPOSSIBLE, False), (FAILED, True), (UnreachableError("a does not answer"), True)],
)
def test_a_host_that_was_changed_and_does_not_serve_stays_outside(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Any,
    capsys: pytest.CaptureFixture[str],
    status: int | Exception,
    left_outside: bool,
) -> None:
    played = PlayedRollback(status=status)
    results = played.carry_out(monkeypatch, tmp_path)
    assert results["a"].status in ("failed", "unreachable")
    assert results["b"].status == "skipped"
    assert bool(played.out) == left_outside
    said = f"a may be out of the fleet's gateway until `v100ctl rollback a --to {STATES[1].id}` ends well"
    assert (said in capsys.readouterr().err) == left_outside


def test_ctrl_c_before_anything_was_changed_leaves_nobody_outside(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    played = PlayedRollback()
    real = played.run

    def run(name: str, command: Sequence[str]) -> Any:
        if command[5:7] == ["drain", "embed@a"]:
            raise KeyboardInterrupt
        return real(name, command)

    monkeypatch.setattr(played, "run", run)
    with pytest.raises(KeyboardInterrupt):
        played.carry_out(monkeypatch, tmp_path)
    assert played.out == set()
    assert not [call for call in played.calls if call.startswith("restore")]


def test_a_host_that_a_rollout_changes_right_now_is_not_rolled_back(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    played = PlayedRollback()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with alone(["a"]):
        results = played.carry_out(monkeypatch, tmp_path)
        assert (results["a"].status, results["b"].status) == ("failed", "skipped")
        assert "another rollout runs over the same hosts" in results["a"].message
        assert played.calls == []
        assert played.carry_out(monkeypatch, tmp_path, check=True)["a"].status == "would-restore"


@pytest.mark.parametrize("fault", [LIMIT, NOT_RUNNING])
def test_requests_that_do_not_end_keep_a_host_as_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Any, fault: int) -> None:
    played = PlayedRollback()
    played.faults["drain f1 embed@a"] = fault
    results = played.carry_out(monkeypatch, tmp_path)
    assert (results["a"].status, results["b"].status) == ("failed", "skipped")
    assert not [call for call in played.calls if call.startswith("restore")]
    assert played.out == set()
