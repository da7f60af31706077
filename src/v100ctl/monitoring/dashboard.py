"""A dashboard for Grafana, as JSON that is imported or provisioned."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from v100ctl.catalog import Catalog
from v100ctl.monitoring.targets import NODE_JOB
from v100ctl.surroundings import MEMORY_C, OPERATING_C

#: Grafana 9 and later read this.
SCHEMA_VERSION = 37
_WIDTH, _HEIGHT = 24, 8
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_CARD = "{{host}} {{uuid}}"


@dataclass(frozen=True)
class Panel:
    """One panel: its queries, each with the legend of its series."""

    title: str
    queries: tuple[tuple[str, str], ...]
    kind: str = "timeseries"
    unit: str = "short"
    width: int = 12
    #: From where on a value is shown in red.
    red_from: float | None = None


def rows(catalog: Catalog) -> tuple[tuple[str, tuple[Panel, ...]], ...]:
    """The panels by row."""
    engines = catalog.monitoring.engines

    def of_engines(field: str, words: str) -> tuple[tuple[str, str], ...]:
        return tuple((words.format(name=getattr(row, field)), "{{host}}/{{instance_name}}") for _, row in sorted(engines.items()))

    def gpu(name: str) -> str:
        return f'v100ctl_gpu_{name}{{host=~"$host"}}'

    return (
        (
            "Fleet",
            (
                Panel("Hosts that answer", ((f'sum(up{{job="{NODE_JOB}",host=~"$host"}})', ""),), "stat", width=4),
                Panel("Cards present", (('sum(v100ctl_cards_present{host=~"$host"})', ""),), "stat", width=4),
                Panel(
                    "Cards missing",
                    (('sum(clamp_min(v100ctl_cards_expected{host=~"$host"} - v100ctl_cards_present, 0))', ""),),
                    "stat",
                    width=4,
                    red_from=1,
                ),
                Panel(
                    "Instances that do not run",
                    (('count(v100ctl_unit_active{host=~"$host",instance_name!=""} == 0) or vector(0)', ""),),
                    "stat",
                    width=4,
                    red_from=1,
                ),
                Panel("Differences", (('sum(v100ctl_drift_differences{host=~"$host"})', ""),), "stat", width=4, red_from=1),
                Panel("Age of the last audit", (("time() - max(v100ctl_audit_timestamp_seconds)", ""),), "stat", "s", 4),
            ),
        ),
        (
            "State",
            (
                Panel("Drivers", (('v100ctl_driver_info{host=~"$host"}', ""),), "table"),
                Panel("Differences from what was applied", (('v100ctl_drift{host=~"$host"}', ""),), "table"),
                Panel("Findings of the audit", (('v100ctl_audit_finding{host=~"$host"}', ""),), "table"),
                Panel("Units that do not run", (('v100ctl_unit_active{host=~"$host"} == 0', ""),), "table"),
            ),
        ),
        (
            "Cards",
            (
                Panel("Temperature", ((gpu("temperature_celsius"), _CARD),), unit="celsius", red_from=OPERATING_C),
                Panel(
                    "Temperature of the memory", ((gpu("memory_temperature_celsius"), _CARD),), unit="celsius", red_from=MEMORY_C
                ),
                Panel("Power", ((gpu("power_watts"), _CARD), (gpu("power_limit_watts"), f"{_CARD} limit")), unit="watt"),
                Panel("Clock", ((gpu("sm_clock_hertz"), _CARD),), unit="hertz"),
                Panel(
                    "Memory in use",
                    ((f"{gpu('memory_used_bytes')} / {gpu('memory_total_bytes')}", _CARD),),
                    unit="percentunit",
                ),
                Panel("Slowed by", ((f"{gpu('throttled')} == 1", f"{_CARD} {{{{reason}}}}"),)),
            ),
        ),
        (
            "Errors of cards",
            (
                Panel("XIDs of the last day", ((gpu("xids"), ""),), "table"),
                Panel("Lanes of the link", ((gpu("link_width_lanes"), _CARD),)),
                Panel("Memory errors", ((gpu("ecc_errors"), f"{_CARD} {{{{kind}}}} since {{{{since}}}}"),)),
                Panel("Retired pages", ((gpu("retired_pages"), f"{_CARD} {{{{cause}}}}"),)),
            ),
        ),
        (
            "Servers",
            (
                Panel("Tokens generated a second", of_engines("generated_tokens", 'rate({name}{{host=~"$host"}}[5m])')),
                Panel("Tokens read a second", of_engines("prompt_tokens", 'rate({name}{{host=~"$host"}}[5m])')),
                Panel("Requests that run", of_engines("running", '{name}{{host=~"$host"}}')),
                Panel("Requests that wait", of_engines("waiting", '{name}{{host=~"$host"}}')),
                Panel(
                    "Restarts in an hour",
                    (
                        (
                            'increase(v100ctl_unit_restarts_total{host=~"$host",instance_name!=""}[1h])',
                            "{{host}}/{{instance_name}} by systemd",
                        ),
                        (
                            'increase(v100ctl_watchdog_restarts_total{host=~"$host"}[1h])',
                            "{{host}}/{{instance_name}} by the watchdog",
                        ),
                    ),
                ),
                Panel("Last restart at night", (('v100ctl_nightly_outcome{host=~"$host"}', ""),), "table"),
            ),
        ),
    )


def _panel(panel: Panel, number: int, x: int, y: int) -> dict[str, Any]:
    steps: list[dict[str, Any]] = [{"color": "green", "value": None}]
    if panel.red_from is not None:
        steps.append({"color": "red", "value": panel.red_from})
    table = panel.kind == "table"
    targets = [
        {
            "datasource": _SOURCE,
            "expr": expression,
            "legendFormat": legend or "__auto",
            "refId": chr(ord("A") + place),
            **({"format": "table", "instant": True} if table else {}),
        }
        for place, (expression, legend) in enumerate(panel.queries)
    ]
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "datasource": _SOURCE,
        "gridPos": {"h": _HEIGHT if panel.kind != "stat" else _HEIGHT // 2, "w": panel.width, "x": x, "y": y},
        "fieldConfig": {"defaults": {"unit": panel.unit, "thresholds": {"mode": "absolute", "steps": steps}}, "overrides": []},
        # Of a table the labels tell it all.
        **({"transformations": [{"id": "organize", "options": {"excludeByName": _DULL}}]} if table else {}),
        "targets": targets,
    }


_DULL = {name: True for name in ("Time", "Value", "__name__", "instance", "job")}


def _placed(found: Sequence[tuple[str, Sequence[Panel]]]) -> list[dict[str, Any]]:
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in found:
        grid = {"h": 1, "w": _WIDTH, "x": 0, "y": y}
        panels.append({"id": len(panels) + 1, "type": "row", "title": title, "collapsed": False, "gridPos": grid, "panels": []})
        x, y, tallest = 0, y + 1, 0
        for panel in row:
            if x + panel.width > _WIDTH:
                x, y, tallest = 0, y + tallest, 0
            panels.append(_panel(panel, len(panels) + 1, x, y))
            x, tallest = x + panel.width, max(tallest, panels[-1]["gridPos"]["h"])
        y += tallest
    return panels


def render_dashboard(catalog: Catalog) -> str:
    """The dashboard; which Prometheus it asks is chosen in it."""
    variables = [
        {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus", "hide": 0},
        {
            "name": "host",
            "label": "Host",
            "type": "query",
            "datasource": _SOURCE,
            "query": {"query": "label_values(v100ctl_metrics_timestamp_seconds, host)", "refId": "host"},
            "definition": "label_values(v100ctl_metrics_timestamp_seconds, host)",
            "multi": True,
            "includeAll": True,
            "allValue": ".*",
            "current": {"text": "All", "value": "$__all"},
            "refresh": 2,
            "sort": 1,
        },
    ]
    document = {
        "uid": "v100ctl",
        "title": "V100 fleet",
        "tags": ["v100ctl"],
        "schemaVersion": SCHEMA_VERSION,
        "editable": True,
        "refresh": "1m",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {"list": variables},
        "panels": _placed(rows(catalog)),
    }
    return json.dumps(document, indent=2) + "\n"
