"""Real output is held against the JSON Schemas in docs/reference/."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.unit.factory import AS_OF, applied_facts, make_config, make_facts, make_plan
from v100ctl.audit import AuditReport
from v100ctl.cli.provision import result_document
from v100ctl.errors import ProbeError, UnreachableError
from v100ctl.examine import Examined, decide
from v100ctl.facts import Facts
from v100ctl.fleet import FleetHost
from v100ctl.history import History, Restored, State
from v100ctl.operate import status_document, status_exit_code, status_of
from v100ctl.plan.report import exit_code, plan_document
from v100ctl.plan.types import Rule
from v100ctl.provision import HostResult, ProvisionResult
from v100ctl.recovery import RecoverResult, Recovery
from v100ctl.rollback import (
    HostHistory,
    HostRollback,
    histories_document,
    histories_exit_code,
    rollback_document,
    rollback_exit_code,
)
from v100ctl.rollout.report import page
from v100ctl.rollout.state import Event, HostState, Options, Rollout
from v100ctl.serving import Completion

REFERENCE = Path(__file__).parents[2] / "docs/reference"


def validate(document: dict[str, Any], name: str) -> None:
    """Raises where ``document``, as it is printed, is not what the schema says."""
    schema = json.loads((REFERENCE / f"{name}.schema.json").read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(json.loads(json.dumps(document)), schema, cls=jsonschema.Draft202012Validator)


def examined(facts: Facts, **config: Any) -> Examined:
    return decide(FleetHost("h1", {}, make_config(**config)), None, facts, as_of=AS_OF)


STATES = {
    "clean": examined(applied_facts(make_plan())),
    "bare": examined(make_facts()),
    "refused": examined(make_facts(systemd=None)),
    "unreachable": Examined(FleetHost("h1", {}, make_config()), error=UnreachableError("no route", hint="x")),
    "broken": Examined(FleetHost("h1", {}, make_config()), error=ProbeError("no JSON")),
}


@pytest.mark.parametrize(("name", "code"), [("clean", 0), ("bare", 2), ("refused", 1), ("unreachable", 1), ("broken", 1)])
def test_plan(name: str, code: int) -> None:
    document = plan_document({"h1": STATES[name]}, as_of=AS_OF)
    validate(document, "plan")
    assert exit_code(document) == code


@pytest.mark.parametrize(
    ("name", "status", "code"),
    [
        ("clean", "clean", 0),
        ("bare", "drift", 2),
        ("refused", "error", 1),
        ("unreachable", "unreachable", 1),
        ("broken", "error", 1),
    ],
)
def test_audit(name: str, status: str, code: int) -> None:
    report = AuditReport.of({"h1": STATES[name]})
    validate(report.to_json(), "audit")
    assert (report.status("h1"), report.exit_code) == (status, code)


@pytest.mark.parametrize(("name", "code"), [("clean", 0), ("bare", 2), ("unreachable", 1), ("broken", 1)])
def test_status(name: str, code: int) -> None:
    found = {"h1": status_of(STATES[name])}
    validate(status_document(found), "status")
    assert status_exit_code(found) == code


def test_the_worst_host_decides_the_exit_code() -> None:
    assert AuditReport.of({"a": STATES["clean"], "b": STATES["bare"]}).exit_code == 2
    assert AuditReport.of({"a": STATES["unreachable"], "b": STATES["bare"]}).exit_code == 1
    assert exit_code(plan_document({"a": STATES["refused"], "b": STATES["bare"]}, as_of=AS_OF)) == 1


def test_provision() -> None:
    proof = Completion("ready", 2, None, 0.25)
    result = ProvisionResult(
        {
            "a": HostResult("changed", STATES["clean"], proofs={"chat": proof}),
            "b": HostResult("would-change", STATES["bare"]),
            "c": HostResult("unreachable", STATES["unreachable"], "no route"),
        },
        Path("/x/log"),
    )
    validate(result_document(result), "provision")
    assert result.exit_code == 1


def test_a_schema_refuses_what_it_does_not_know() -> None:
    document = plan_document({"h1": STATES["bare"]}, as_of=AS_OF)
    document["hosts"]["h1"]["surprise"] = 1
    with pytest.raises(jsonschema.ValidationError):
        validate(document, "plan")


@pytest.mark.parametrize(
    ("recovery", "code"),
    [
        (Recovery("well"), 0),
        (Recovery("recovered", "none", "cards reset", steps=("cards reset",), users=("v100-chat.service",)), 0),
        (Recovery("would-recover", "recover"), 0),
        (Recovery("stopped", "power cycle", "off the bus", "power", left=(Rule("gpu-fallen-off", "refuse", "off", None),)), 1),
        (Recovery("unreachable", message="no route"), 1),
    ],
)
def test_recover(recovery: Recovery, code: int) -> None:
    result = RecoverResult({"h1": recovery})
    validate(result.to_json(), "recover")
    assert result.exit_code == code


STATE = State("20261130T041500Z", "0123456789abcdef", None, ("b11434-cpu-1",), ("/m/x.gguf",), {"chat": "abcd"})


def test_history() -> None:
    found = {
        "a": HostHistory(History((STATE,), STATE.id, None)),
        "b": HostHistory(error=UnreachableError("no route")),
    }
    validate(histories_document(found), "history")
    assert histories_exit_code(found) == 1


def test_rollback() -> None:
    done = Restored(STATE.id, True, ("chat",), (), ("/etc/x",), {"chat": Completion("ready", 2, 31.5, 0.0)})
    results = {
        "a": HostRollback("restored", STATE, done),
        "b": HostRollback("would-restore", STATE, done),
        "c": HostRollback("skipped", STATE, message="left as it is"),
        "d": HostRollback("failed", message="no history"),
    }
    validate(rollback_document(results), "rollback")
    assert rollback_exit_code(results) == 1
    assert rollback_exit_code({"b": results["b"]}) == 2


def test_rollout() -> None:
    host = HostState("a", "0123", "4567", ["process.stale:chat"], ["llm_server"], ["chat"], good=STATE.id, before={"chat": 31.5})
    host.phase, host.problem = "returned", "chat decodes 10.0 tokens/s"
    host.events.append(Event("apply", "2026-11-30T04:15:00+00:00", 12.5))
    rollout = Rollout("r", "me@here", "2026-11-30T04:00:00+00:00", "2026-11-30", Options(), {"a": host}, [["a"]], ended=None)
    validate(rollout.to_json(), "rollout")
    assert Rollout.from_json(rollout.to_json()) == rollout
    assert "chat decodes 10.0 tokens/s" in page(rollout)
