"""A report as one HTML file that needs nothing else: no network, no other file."""

from __future__ import annotations

import difflib
import functools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template

from v100ctl.audit import AuditReport, HostAudit
from v100ctl.audit.formats import LAYERS
from v100ctl.findings import Finding

_SEVERITIES = ("critical", "error", "warn", "info")
_KINDS = ("drifted", "pending", "external")
#: Lines of one difference that are shown.
_DIFF_LINES = 200


@dataclass(frozen=True)
class _Cell:
    """One layer of one host: how many findings, and the worst of them."""

    layer: str
    count: int
    worst: str


@dataclass(frozen=True)
class _Line:
    """One line of a difference: ``+``, ``-``, ``@`` or a blank, and its text."""

    sign: str
    text: str


def _cells(host: HostAudit) -> Iterator[_Cell]:
    for layer in LAYERS:
        found = [finding.severity for finding in host.findings if finding.layer == layer]
        worst = next((severity for severity in _SEVERITIES if severity in found), "")
        unknown = host.probe_ms is None
        yield _Cell(layer, len(found), "unknown" if unknown else worst or "clean")


def _diff(finding: Finding) -> list[_Line]:
    """From what is there to what is expected, as `-` and `+`: what mending does."""
    before, after = finding.actual.splitlines(), finding.expected.splitlines()
    if len(before) < 2 and len(after) < 2:
        return [_Line("-", finding.actual), _Line("+", finding.expected)]
    lines = list(difflib.unified_diff(before, after, lineterm="", n=2))[2:]
    kept = [_Line(line[0], line.strip("@ ") if line[0] == "@" else line[1:]) for line in lines[:_DIFF_LINES] if line]
    if len(lines) > _DIFF_LINES:
        kept.append(_Line("@", f"{len(lines) - _DIFF_LINES} more lines; `v100ctl render` prints the whole file"))
    return kept


@functools.cache
def _template() -> Template:
    loader = FileSystemLoader(Path(__file__).parent)
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.get_template("page.html.j2")


def to_html(report: AuditReport, *, now_s: float) -> str:
    """The whole page. Every word from a host is escaped.

    Args:
        report: The report.
        now_s: When it was made, seconds since 1970.
    """
    severities: Counter[str] = Counter(finding.severity for host in report.hosts.values() for finding in host.findings)
    kinds: Counter[str] = Counter(finding.kind for host in report.hosts.values() for finding in host.findings)
    statuses = Counter(host.status for host in report.hosts.values())
    return _template().render(
        made=datetime.fromtimestamp(now_s, UTC).strftime("%Y-%m-%d %H:%M UTC"),
        hosts=[
            {
                "name": name,
                "audit": host,
                "cells": list(_cells(host)),
                "findings": [{"finding": finding, "diff": _diff(finding)} for finding in host.findings],
            }
            for name, host in report.hosts.items()
        ],
        layers=LAYERS,
        severities=[(name, severities[name]) for name in _SEVERITIES],
        kinds=[(name, kinds[name]) for name in _KINDS],
        statuses=[(name, statuses[name]) for name in ("clean", "drift", "error", "unreachable")],
        total=sum(severities.values()),
        interrupted=report.interrupted,
    )
