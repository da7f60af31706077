"""The plan as the JSON document ``v100ctl/plan/1``."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from datetime import date
from typing import TYPE_CHECKING, Any

from v100ctl.catalog import load_catalog
from v100ctl.errors import EXIT_DIFFERENCES, EXIT_ERROR, EXIT_OK, UnreachableError
from v100ctl.plan.types import GpuBudget, plain_data

if TYPE_CHECKING:
    from v100ctl.examine import Examined

PLAN_SCHEMA = "v100ctl/plan/1"
#: What of the driver is told; files and changes stand for the rest.
_DRIVER_KEYS = ("branch", "version", "action", "source", "packages")
#: The same for the toolkit.
_CUDA_KEYS = ("version", "action", "source", "host_compiler", "packages")


def budget_document(budget: GpuBudget) -> dict[str, int]:
    """What an instance takes of one card, in bytes, with the sums."""
    return {**dataclasses.asdict(budget), "peak_bytes": budget.peak_bytes, "free_bytes": budget.free_bytes}


def host_document(state: Examined) -> dict[str, Any]:
    """One host's part of the document. ``changes`` comes from the comparison, so plan and audit cannot disagree."""
    plan = state.plan
    if plan is None:
        verdict = "unreachable" if isinstance(state.error, UnreachableError) else "error"
        return {
            "verdict": verdict,
            "rules": [],
            "instances": {},
            "changes": [],
            "driver": None,
            "cuda": None,
            "error": state.error.message if state.error else "no facts",
        }
    units = {file.instance: file.content for file in plan.files if file.instance and not file.secret}
    return {
        "verdict": plan.verdict,
        "rules": [
            {"id": rule.id, "instance": rule.instance, "severity": rule.severity, "reason": rule.reason, "nearest": rule.nearest}
            for rule in plan.rules
        ],
        "instances": {
            instance.name: {
                "argv": list(instance.argv),
                "unit": units.get(instance.name, ""),
                "gpus": {key: budget_document(budget) for key, budget in instance.budgets.items()},
                "context_length": instance.context_length,
                "parallel": instance.parallel,
                "max_context_length": instance.largest_context_length,
                "decode_ceiling_tps": None if instance.decode_ceiling_tps is None else round(instance.decode_ceiling_tps, 1),
                "published": [
                    {"model": row.model, "card": row.card, "decode_tps": row.decode_tps, "source": row.source}
                    for row in instance.published
                ],
            }
            for instance in plan.instances
        },
        "driver": None if plan.driver is None else {name: plain_data(getattr(plan.driver, name)) for name in _DRIVER_KEYS},
        "cuda": None if plan.cuda is None else {name: plain_data(getattr(plan.cuda, name)) for name in _CUDA_KEYS},
        "changes": [
            {
                "role": finding.role,
                "what": finding.id,
                "from": finding.actual,
                "to": finding.expected,
                "restarts": [name for name in finding.restarts if name in state.restarts],
            }
            for finding in state.changes
        ],
    }


def plan_document(examined: Mapping[str, Examined], *, as_of: date) -> dict[str, Any]:
    """The whole document."""
    return {
        "schema": PLAN_SCHEMA,
        "as_of": as_of.isoformat(),
        "catalog_as_of": load_catalog().as_of.isoformat(),
        "hosts": {name: host_document(state) for name, state in examined.items()},
    }


def exit_code(document: Mapping[str, Any]) -> int:
    """1 before 2 before 0, over all hosts of a plan document."""
    hosts = document["hosts"].values()
    if any(host["verdict"] in ("refused", "unreachable", "error") for host in hosts):
        return EXIT_ERROR
    return EXIT_DIFFERENCES if any(host["changes"] for host in hosts) else EXIT_OK
