"""Trials on a host as the controller sees them: when a server is the new one, when it has failed, and the heartbeat."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tests.unit.factory import make_plan
from v100ctl.bench.report import Target
from v100ctl.errors import UnreachableError
from v100ctl.plan.units import START_TIMEOUT_S
from v100ctl.probe.connection import Connection
from v100ctl.probe.session import Result
from v100ctl.tune import remote
from v100ctl.tune.remote import Host, HostRig, TuneError, heartbeat
from v100ctl.tune.search import Candidate
from v100ctl.tune.trials import TrialFailed

(INSTANCE,) = make_plan().instances
TARGET = Target("h1", "chat", "http://127.0.0.1:8000", "llama_cpp", "chat", 4096, 1, cards=("GPU-1",))
CONNECTION = Connection.from_vars("h1", {"ansible_connection": "local"})
OLD = {"invocation": "a", "active": "active", "status": 200, "job": True}
NEW = {"invocation": "b", "active": "active", "status": 200, "job": False}


class Script:
    """Answers as the script on a host would, one after the other, the last again and again."""

    connection = CONNECTION

    def __init__(self, *answers: dict[str, Any]) -> None:
        self.answers, self.asked = list(answers), list[dict[str, Any]]()

    def run(self, command: Any, *, stdin: bytes | None = None, timeout_s: float = 0, become: bool = False) -> Result:
        self.asked.append(json.loads(command[-1]))
        answer = self.answers[0] if len(self.answers) == 1 else self.answers.pop(0)
        return Result(0, json.dumps(answer).encode(), b"")


def rig_of(script: Script, watts: float | None = None) -> HostRig:
    host = Host(script, "chat", "v100-chat.service", 60.0)  # type: ignore[arg-type]  # it has what is used
    ticks = iter(range(0, 10**6, 50))
    return HostRig(
        host,
        script,  # type: ignore[arg-type]  # it has what is used
        TARGET,
        lambda _: INSTANCE,
        lambda _: watts,
        sleep=lambda _: None,
        clock=lambda: float(next(ticks)),
    )


def test_the_server_that_ends_is_not_taken_for_the_one_that_starts() -> None:
    loading = {**NEW, "status": 503}
    script = Script({"before": "a", "problem": ""}, OLD, {**OLD, "active": "deactivating", "status": None}, loading, NEW)
    rig_of(script, watts=175.0).start(Candidate({"ubatch_size": "1024"}))
    assert [item["verb"] for item in script.asked] == ["trial", "look", "look", "look", "look"]
    assert script.asked[0]["power"] == {"GPU-1": 175.0}
    assert "ExecStart=\nExecStart=/opt/v100ctl" in script.asked[0]["drop_in"]


def test_the_live_settings_are_those_of_the_unit() -> None:
    script = Script({"before": "a", "problem": ""}, NEW)
    rig_of(script).start(Candidate())
    assert script.asked[0]["drop_in"] == "" and script.asked[0]["power"] == {}


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        ([{"before": "a", "problem": "out of range"}], "out of range"),
        ([{"before": "a", "problem": ""}, {**NEW, "active": "failed", "said": "cudaMalloc failed"}], "cudaMalloc failed"),
        ([{"before": "a", "problem": ""}, {**NEW, "active": "inactive", "status": None}], "it has ended"),
        ([{"before": "a", "problem": ""}, {**NEW, "status": 503}], f"within {START_TIMEOUT_S} s"),
    ],
)
def test_what_does_not_come_up_is_no_candidate(answers: list[dict[str, Any]], said: str) -> None:
    with pytest.raises(TrialFailed, match=said):
        rig_of(Script(*answers)).start(Candidate({"ubatch_size": "1024"}))


def test_a_host_that_refuses_ends_the_search() -> None:
    with pytest.raises(TuneError, match="h1: the lease has lapsed"):
        rig_of(Script({"refused": "the lease has lapsed"})).start(Candidate())


def test_the_heart_beats_on_a_session_of_its_own_and_over_lost_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script({})
    enough = threading.Event()
    opened: list[int] = []

    @contextlib.contextmanager
    def session(connection: Connection) -> Iterator[Script]:
        opened.append(1)
        if len(opened) == 1:
            raise UnreachableError("no route")
        if len(script.asked) > 2:
            enough.set()
        yield script
        raise UnreachableError("lost")

    monkeypatch.setattr(remote, "open_session", session)
    host = Host(script, "chat", "v100-chat.service", 0.04)  # type: ignore[arg-type]  # it has what is used
    with heartbeat(host, CONNECTION, 0.04):
        for _ in range(600):
            if len(script.asked) > 2:
                break
            enough.wait(0.05)
    assert {item["verb"] for item in script.asked} == {"look"} and len(opened) >= 2
    beats = len(script.asked)
    assert all(item["token"] == script.asked[0]["token"] for item in script.asked)
    enough.wait(0.2)
    assert len(script.asked) == beats
