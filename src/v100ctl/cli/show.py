"""Tables for people: plans, findings, results. Text from hosts is cleaned of terminal control characters."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from v100ctl.apply.reporter import clean, clean_line
from v100ctl.compare import Finding
from v100ctl.examine import Examined
from v100ctl.plan.types import describe

_SEVERITY_STYLE = {"refuse": "bold red", "warn": "yellow", "info": "dim", "error": "red", "critical": "bold red"}
_WIDE_ENOUGH = 120


def console(*, no_color: bool = False, output: Path | None = None) -> Console:
    """The console for data on stdout, or for the file ``output``. Not a terminal: plain lines, never cut to a width."""
    if output is not None or not sys.stdout.isatty():
        return Console(file=sys.stdout, no_color=True, force_terminal=False, highlight=False, width=_WIDE_ENOUGH * 2)
    return Console(file=sys.stdout, no_color=True if no_color else None, highlight=False)


def print_host(out: Console, state: Examined, verdict: str) -> None:
    """One host's heading, and the error that kept it from being asked."""
    probe = f"  (probe {state.facts.probe_ms:.0f} ms)" if state.facts else ""
    out.print(Text.assemble((clean_line(state.host.name), "bold"), f"  {verdict}{probe}"))
    if state.error is not None:
        out.print(Text(f"  error: {clean(state.error.message)}"))
        if state.error.hint:
            out.print(Text(f"  hint: {clean(state.error.hint)}"))


def shorten(value: str, limit: int = 90) -> str:
    """``value`` as one line of at most ``limit`` characters."""
    line = clean_line(value)
    return line if len(line) <= limit else f"{line[: limit - 3]}..."


def findings_table(findings: Iterable[Finding]) -> Table:
    """Findings with what is expected and what is there."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("finding", "kind", "expected", "actual", "fix"):
        table.add_column(title, overflow="fold")
    for finding in findings:
        table.add_row(
            Text(clean_line(finding.id), style=_SEVERITY_STYLE.get(finding.severity, "")),
            finding.kind,
            Text(shorten(finding.expected)),
            Text(shorten(finding.actual)),
            Text(clean_line(finding.fix)),
        )
    return table


def changes_table(changes: Iterable[Mapping[str, Any]]) -> Table:
    """What a plan would change on one host."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("role", "what", "from", "to", "restarts"):
        table.add_column(title, overflow="fold")
    for change in changes:
        table.add_row(
            str(change["role"]),
            Text(clean_line(str(change["what"]))),
            Text(shorten(str(change["from"]), 50)),
            Text(shorten(str(change["to"]), 50)),
            ", ".join(change["restarts"]) or "-",
        )
    return table


def print_rules(out: Console, state: Examined) -> None:
    """The verdicts of one host's plan, worst first."""
    if state.plan is None:
        return
    order = {"refuse": 0, "warn": 1, "info": 2}
    for rule in sorted(state.plan.rules, key=lambda rule: order[rule.severity]):
        out.print(Text(f"  {rule.severity}: {clean(describe(rule))}", style=_SEVERITY_STYLE[rule.severity]))


def settings_table(state: Examined) -> Table:
    """What was set on a host, instance by instance."""
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    if state.plan is None:
        return table
    for release in state.plan.releases:
        table.add_row("engine", f"{release.engine} {release.build['build_number']}, backend {release.build['backend']}")
        table.add_row("release", Text(release.path))
    for instance in state.plan.instances:
        table.add_row("instance", f"{instance.name}: {instance.unit}, {instance.listen}:{instance.port}")
        table.add_row("model", Text(instance.model_path))
        table.add_row("context", f"{instance.max_context_length} tokens a request, {instance.parallel} at once")
        table.add_row("command", Text(shlex.join(instance.argv)))
    return table
