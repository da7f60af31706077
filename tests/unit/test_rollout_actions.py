"""How a host is led back that does not answer, was never looked at, or is led back by somebody else right now."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from datetime import date
from types import SimpleNamespace
from typing import Any

import pytest

from v100ctl.access import Access
from v100ctl.apply.reporter import make_reporter
from v100ctl.errors import UnreachableError, V100ctlError
from v100ctl.fleet import Fleet, FleetHost, parse_config
from v100ctl.history import HistoryError
from v100ctl.provision import ProvisionResult
from v100ctl.rollout import actions as module
from v100ctl.rollout.actions import FleetActions
from v100ctl.rollout.state import Event, HostState, Options, RolloutError
from v100ctl.serving import Completion, ServingError

STATE: dict[str, Any] = {
    "id": "20261130T040000Z",
    "state": "a",
    "restored_from": None,
    "releases": [],
    "models": [],
    "missing": [],
}
RESTORED: dict[str, Any] = {
    "id": STATE["id"],
    "changed": False,
    "restarted": [],
    "removed": [],
    "files": [],
    "problem": "",
    "instances": {},
}
LOCKED = 4


class PlayedSession:
    """A host's `go_back.py`: each call takes the next of ``answers``; an error is raised, else it is exit code and document."""

    def __init__(self, *answers: tuple[int, dict[str, Any]] | Exception) -> None:
        self.answers = list(answers)
        self.calls: list[list[str]] = []

    def run(self, command: Sequence[str], **_: Any) -> Any:
        # sh -c SCRIPT sh WORDS
        self.calls.append(list(command[4:]))
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return SimpleNamespace(rc=answer[0], stdout=json.dumps(answer[1]).encode(), stderr=b"")


def listing(*states: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    current = states[0]["id"] if states else None
    return 0, {"current": current, "previous": None, "states": [{**state, "instances": {}} for state in states]}


@pytest.fixture
def waited() -> list[float]:
    return []


@pytest.fixture
def lead_back(monkeypatch: pytest.MonkeyPatch, waited: list[float]) -> Any:
    """Leads a host back whose program answers so; the words of each call."""

    def lead(host: HostState, *answers: tuple[int, dict[str, Any]] | Exception, return_limit_s: float = 60.0) -> list[list[str]]:
        session = PlayedSession(*answers)

        @contextlib.contextmanager
        def opened(_connection: object) -> Iterator[PlayedSession]:
            yield session

        monkeypatch.setattr(module, "open_session", opened)
        fleet = Fleet({"a": FleetHost("a", {"ansible_host": "192.0.2.1"}, parse_config("a", {}))})
        options = Options(return_limit_s=return_limit_s)
        FleetActions(fleet, Access(), make_reporter(), date(2026, 11, 30), options, sleep=waited.append).go_back(host)
        assert session.answers == []
        return session.calls

    return lead


def looked(good: str | None) -> HostState:
    return HostState("a", good=good, events=[Event("look", "2026-11-30T04:00:00+00:00", 0.1)])


def test_a_host_that_was_away_before_its_turn_stays_what_it_was(lead_back: Any, waited: list[float]) -> None:
    host = HostState("a", events=[Event("look", "2026-11-30T04:00:00+00:00", 9.0, "a: it does not answer")])
    calls = lead_back(host, UnreachableError("a: it does not answer"), listing(STATE), (0, RESTORED))
    assert [words[0] for words in calls] == ["list", "list", "restore"]
    assert calls[-1][-2:] == ["--to", STATE["id"]]
    assert host.good == STATE["id"]
    assert len(waited) == 1


@pytest.mark.parametrize("host", [looked(None), HostState("a")], ids=["looked", "not looked"])
def test_where_nothing_was_proved_there_is_nothing_to_go_back_to(host: HostState, lead_back: Any) -> None:
    answers = [] if host.looked else [listing()]
    with pytest.raises(RolloutError, match="a has no earlier state to go back to"):
        lead_back(host, *answers)


OLDER, NEWER = {**STATE, "id": "20261129T040000Z"}, {**STATE, "id": "20261130T050000Z"}
GIVEN_UP = Event("go back", "2026-11-30T04:10:00+00:00", 900.0, "a: it does not answer")


@pytest.mark.parametrize(
    ("good", "known", "aim"),
    [
        # It was away, and is as it was left.
        (STATE["id"], [NEWER, STATE, OLDER], STATE["id"]),
        # Somebody has provisioned it by hand since.
        (None, [NEWER], NEWER["id"]),
        (STATE["id"], [NEWER, OLDER], NEWER["id"]),
        (STATE["id"], [NEWER, {**STATE, "missing": ["/var/lib/v100ctl/models/x.gguf"]}], NEWER["id"]),
    ],
)
def test_one_that_was_lost_serves_what_was_proved_since(
    lead_back: Any, good: str | None, known: list[dict[str, Any]], aim: str
) -> None:
    host = looked(good)
    host.events.append(GIVEN_UP)
    calls = lead_back(host, listing(*known), (0, RESTORED))
    assert calls[-1][-2:] == ["--to", aim]
    assert host.good == aim


def test_one_that_was_lost_and_serves_nothing_stays_so(lead_back: Any) -> None:
    host = looked(None)
    host.events.append(GIVEN_UP)
    with pytest.raises(RolloutError, match="once `v100ctl provision --limit a` has made it serve"):
        lead_back(host, (44, {}))


def test_one_that_another_controller_sent_back_is_waited_for(lead_back: Any, waited: list[float]) -> None:
    busy = (LOCKED, {"id": None, "changed": False, "problem": "another one goes back on this host right now"})
    calls = lead_back(looked("20261130T030000Z"), busy, busy, (0, RESTORED))
    assert [words[0] for words in calls] == ["restore"] * 3
    assert len(waited) == 2
    with pytest.raises(Exception, match="another one goes back"):
        lead_back(looked("20261130T030000Z"), busy, return_limit_s=0.0)


def test_a_history_that_cannot_be_read_is_not_taken_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    broken: Any = (1, ["Traceback"])
    sessions = [PlayedSession((44, {})), PlayedSession(broken)]

    @contextlib.contextmanager
    def opened(_connection: object) -> Iterator[PlayedSession]:
        yield sessions.pop(0)

    monkeypatch.setattr(module, "open_session", opened)
    fleet = Fleet({"a": FleetHost("a", {"ansible_host": "192.0.2.1"}, parse_config("a", {}))})
    actions = FleetActions(fleet, Access(), make_reporter(), date(2026, 11, 30), Options())
    assert actions.good_state(HostState("a")) is None
    with pytest.raises(HistoryError, match="failed with exit code 1"):
        actions.good_state(HostState("a"))


SERVED = {"digest": "d", "unit": "v100-chat.service", "url": "http://127.0.0.1:1/v1", "model": "m", "keys_file": ""}


def measured(monkeypatch: pytest.MonkeyPatch, error: V100ctlError, *, may_be_silent: bool) -> dict[str, float]:
    """What is measured of a host whose `chat` answers, and of whose `embed` one learns ``error``."""
    instances = {name: {**SERVED, "unit": f"v100-{name}.service"} for name in ("chat", "embed")}
    session = PlayedSession((0, {"current": STATE["id"], "previous": None, "states": [{**STATE, "instances": instances}]}))

    @contextlib.contextmanager
    def opened(_connection: object) -> Iterator[PlayedSession]:
        yield session

    def ask(_session: object, instance: dict[str, Any], *_: Any, **__: Any) -> Completion:
        if instance["name"] == "embed":
            raise error
        return Completion("a GPU computes", 3, 50.0, 0.1)

    monkeypatch.setattr(module, "open_session", opened)
    monkeypatch.setattr(module, "ask", ask)
    fleet = Fleet({"a": FleetHost("a", {"ansible_host": "192.0.2.1"}, parse_config("a", {}))})
    actions = FleetActions(fleet, Access(), make_reporter(), date(2026, 11, 30), Options())
    return actions.speed(HostState("a"), may_be_silent=may_be_silent)


def test_what_does_not_answer_before_is_left_out_and_afterwards_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    silent = ServingError("embed did not answer")
    assert measured(monkeypatch, silent, may_be_silent=True) == {"chat": 50.0}
    with pytest.raises(ServingError, match="embed did not answer"):
        measured(monkeypatch, silent, may_be_silent=False)
    # A host that is away is no server that is silent.
    with pytest.raises(UnreachableError):
        measured(monkeypatch, UnreachableError("a does not answer"), may_be_silent=True)


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({}, {}),
        ({"start_limit_s": 30}, {"llm_server_start_limit_s": 30}),
        # A host's own gateway is drained by its role.
        ({"drain_limit_s": 3600.0}, {"gateway_drain_limit_s": 3600}),
        ({"drain_limit_s": 0.5}, {"gateway_drain_limit_s": 1}),
    ],
)
def test_limits_reach_the_roles(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], wanted: dict[str, Any]) -> None:
    given: dict[str, Any] = {}

    def provision(_fleet: Fleet, **arguments: Any) -> ProvisionResult:
        given.update(arguments["variables"])
        return ProvisionResult({})

    monkeypatch.setattr(module, "provision", provision)
    fleet = Fleet({"a": FleetHost("a", {}, parse_config("a", {}))})
    FleetActions(fleet, Access(), make_reporter(), date(2026, 11, 30), Options(**options)).apply(["a"])
    assert given == {"model_store_unused": [], **wanted}
    assert not [value for value in given.values() if isinstance(value, float)], "the roles take whole seconds"
