"""Runs playbooks and tells a person how they go."""

from v100ctl.apply.reporter import LiveReporter, Phase, PlainReporter, Reporter, Status, Unit, make_reporter

__all__ = ["LiveReporter", "Phase", "PlainReporter", "Reporter", "Status", "Unit", "make_reporter"]
