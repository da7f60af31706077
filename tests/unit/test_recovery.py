"""Which way back a host has: what alone helps, and that nothing is touched where something else does."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.factory import AS_OF, make_config
from tests.unit.plan.test_cases import CASES, decide
from v100ctl import recovery
from v100ctl.access import Access
from v100ctl.apply.reporter import make_reporter
from v100ctl.errors import UnreachableError
from v100ctl.examine import Examined
from v100ctl.fleet import Fleet, FleetHost
from v100ctl.plan import HostPlan
from v100ctl.probe.connection import Connection
from v100ctl.recovery import RecoverResult, diagnose, recover

FOLDER = CASES[0].parent


def case(name: str) -> HostPlan:
    return decide(FOLDER / name)


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("card-fallen-off-the-bus", "power cycle"),
        ("driver-hangs", "reboot"),
        ("unified-memory-is-poisoned", "recover"),
        ("page-to-be-retired-after-a-double-bit-error", "recover"),
        ("library-and-module-differ", "recover"),
        ("driver-installed-and-not-loaded", "recover"),
        ("nouveau-is-loaded", "provision"),
        ("open-modules-on-volta", "provision"),
        ("bar1-unassigned", "hand"),
        ("card-too-hot", "hand"),
        ("page-that-could-not-be-retired", "hand"),
        ("card-in-good-health", "none"),
        ("hot-card-that-nothing-uses", "none"),
    ],
)
def test_the_remedy_follows_from_the_rules(name: str, remedy: str) -> None:
    found = diagnose(case(name).rules)
    assert found.remedy == remedy
    assert bool(found.rules) == (remedy != "none")


def test_what_needs_power_is_not_mended_by_less() -> None:
    rules = (*case("unified-memory-is-poisoned").rules, *case("card-fallen-off-the-bus").rules)
    assert diagnose(rules).remedy == "power cycle"


def test_every_remedy_is_for_rules_that_there_are() -> None:
    source = Path(recovery.__file__).parent / "plan"
    text = "".join(path.read_text(encoding="utf-8") for path in source.rglob("*.py"))
    assert [rule for ids in recovery._REMEDIES.values() for rule in ids if f'"{rule}"' not in text] == []


class Helper:
    """A host whose plan is that of one case and then of the next, and whose helper answers as it is told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *names: str, **answer: Any) -> None:
        self.host = FleetHost("h1", {}, make_config())
        self.plans = [case(name) for name in names]
        self.calls: list[dict[str, Any]] = []
        self.answer = {
            "steps": ["users stopped", "cards reset"],
            "users": ["v100-chat.service"],
            "problem": "",
            "needs": "",
            **answer,
        }
        self.problem_when_done = ""
        connection = Connection.from_vars("h1", {"ansible_connection": "local"})
        states = iter([Examined(self.host, connection, plan=plan) for plan in self.plans])
        monkeypatch.setattr(recovery, "examine", lambda hosts, access, as_of: {"h1": next(states)})
        monkeypatch.setattr(recovery, "open_session", self.session)
        monkeypatch.setattr(recovery, "run_python", self.run)

    @contextmanager
    def session(self, connection: Connection) -> Iterator[SimpleNamespace]:
        yield SimpleNamespace()

    def run(self, session: object, script: bytes, request: str, *, what: str, timeout_s: float) -> bytes:
        assert b"def recover(" in script
        self.calls.append(json.loads(request))
        problem = self.answer["problem"] or (self.problem_when_done if not self.calls[-1]["check"] else "")
        return json.dumps({**self.answer, "problem": problem}).encode()

    def recover(self, **options: Any) -> RecoverResult:
        reporter = make_reporter(color=False)
        try:
            fleet = Fleet({"h1": self.host}, ())
            return recover(fleet, access=Access(), reporter=reporter, as_of=AS_OF, **options)
        finally:
            reporter.close()


def yes(question: str) -> bool:
    return True


@pytest.mark.parametrize(
    ("name", "remedy", "words"),
    [
        ("card-fallen-off-the-bus", "power cycle", "only switching the host off and on helps, and nothing was changed"),
        ("driver-hangs", "reboot", "only a reboot helps, and nothing was changed"),
        ("bar1-unassigned", "hand", "no program mends that, and nothing was changed"),
        ("nouveau-is-loaded", "provision", "`v100ctl provision` mends that"),
    ],
)
def test_what_something_else_mends_is_not_touched(name: str, remedy: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    helper = Helper(monkeypatch, name)
    result = helper.recover(confirm=yes)
    found = result.hosts["h1"]
    assert (found.status, found.remedy, helper.calls, result.exit_code) == ("stopped", remedy, [], 1)
    assert words in found.message
    assert found.hint


def test_force_does_not_reach_a_driver_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    helper = Helper(monkeypatch, "driver-hangs")
    assert helper.recover(force=True, confirm=yes).hosts["h1"].status == "stopped"
    assert helper.calls == []


def test_a_host_that_is_well_is_left_alone_unless_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    helper = Helper(monkeypatch, "card-in-good-health")
    result = helper.recover(confirm=yes)
    assert (result.hosts["h1"].status, helper.calls, result.exit_code) == ("well", [], 0)
    helper = Helper(monkeypatch, "card-in-good-health", "card-in-good-health")
    assert helper.recover(force=True, confirm=yes).hosts["h1"].status == "recovered"


def test_it_is_asked_before_it_is_done_and_looked_at_after(monkeypatch: pytest.MonkeyPatch) -> None:
    helper = Helper(monkeypatch, "unified-memory-is-poisoned", "card-in-good-health")
    questions: list[str] = []
    result = helper.recover(confirm=lambda question: bool(questions.append(question) or True))
    assert [call["check"] for call in helper.calls] == [True, False]
    assert "v100-chat.service" in questions[0]
    found = result.hosts["h1"]
    assert (found.status, found.steps, result.exit_code) == ("recovered", ("users stopped", "cards reset"), 0)


def test_nobody_said_yes(monkeypatch: pytest.MonkeyPatch) -> None:
    helper = Helper(monkeypatch, "unified-memory-is-poisoned")
    found = helper.recover().hosts["h1"]
    assert (found.status, [call["check"] for call in helper.calls]) == ("stopped", [True])
    # Nobody has to be asked where no server stops.
    helper = Helper(monkeypatch, "unified-memory-is-poisoned", "card-in-good-health", users=["nvidia-persistenced.service"])
    assert helper.recover().hosts["h1"].status == "recovered"


def test_check_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    helper = Helper(monkeypatch, "unified-memory-is-poisoned")
    found = helper.recover(check=True).hosts["h1"]
    assert (found.status, [call["check"] for call in helper.calls]) == ("would-recover", [True])


def test_what_the_helper_cannot_do_is_told_with_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    helper = Helper(monkeypatch, "unified-memory-is-poisoned", problem="processes 77 use a card and belong to no service")
    found = helper.recover(confirm=yes).hosts["h1"]
    assert (found.status, found.remedy) == ("stopped", "recover")
    helper = Helper(monkeypatch, "unified-memory-is-poisoned", needs="reboot")
    helper.problem_when_done = "`rmmod nvidia_uvm` failed"
    result = helper.recover(confirm=yes)
    found = result.hosts["h1"]
    assert (found.status, found.remedy, result.exit_code) == ("failed", "reboot", 1)


def test_what_is_still_there_afterwards_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    helper = Helper(monkeypatch, "unified-memory-is-poisoned", "unified-memory-is-poisoned")
    assert helper.recover(confirm=yes).hosts["h1"].status == "failed"
    helper = Helper(monkeypatch, "unified-memory-is-poisoned", "card-too-hot")
    found = helper.recover(confirm=yes).hosts["h1"]
    assert (found.status, [rule.id for rule in found.left]) == ("recovered", ["gpu-throttled"])


def test_a_host_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    helper = Helper(monkeypatch)
    failed = Examined(helper.host, error=UnreachableError("no route", hint="x"))
    monkeypatch.setattr(recovery, "examine", lambda hosts, access, as_of: {"h1": failed})
    result = helper.recover()
    assert (result.hosts["h1"].status, result.exit_code) == ("unreachable", 1)
