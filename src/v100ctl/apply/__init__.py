"""Runs playbooks and tells a person how they go."""

from v100ctl.apply.hints import hint_for
from v100ctl.apply.reporter import LiveReporter, Phase, PlainReporter, Reporter, Status, Unit, make_reporter
from v100ctl.apply.runner import ApplyError, ApplyResult, Failure, HostResult, Inventory, Secrets, run_playbook

__all__ = [
    "ApplyError",
    "ApplyResult",
    "Failure",
    "HostResult",
    "Inventory",
    "LiveReporter",
    "Phase",
    "PlainReporter",
    "Reporter",
    "Secrets",
    "Status",
    "Unit",
    "hint_for",
    "make_reporter",
    "run_playbook",
]
