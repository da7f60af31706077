"""A report as text for programs: JSON, JUnit's XML, Prometheus's text format; HTML is in ``page.py``."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Mapping
from typing import Any

from v100ctl.audit import AuditReport, HostAudit
from v100ctl.findings import Finding, Layer
from v100ctl.monitoring.names import AUDIT_METRICS

LAYERS: tuple[Layer, ...] = ("package", "driver", "file", "unit", "process", "hardware", "service")
_FAILING = ("error", "critical")
#: What XML 1.0 cannot hold, escaped or not.
_NOT_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def to_json(document: Mapping[str, Any]) -> str:
    """JSON for people, too: indented, in ASCII."""
    return json.dumps(document, indent=2)


def _xml(text: str) -> str:
    return _NOT_XML.sub("\ufffd", text)


def to_junit(report: AuditReport) -> str:
    """One suite a host.

    A layer in which nothing fails is a test that has passed, each error a failure of its own. What is only a warning is told in
    the output of its layer's test.
    """
    root = ElementTree.Element("testsuites", name="v100ctl audit")
    totals: Counter[str] = Counter()
    for name, host in report.hosts.items():
        suite = ElementTree.SubElement(root, "testsuite", name=_xml(name))
        counts: Counter[str] = Counter()
        if host.status in ("unreachable", "error"):
            case = ElementTree.SubElement(suite, "testcase", classname=_xml(name), name="host")
            problem = ElementTree.SubElement(case, "error", type=host.status, message=_xml(host.error.split("\n")[0]))
            problem.text = _xml("\n".join(filter(None, (host.error, f"hint: {host.hint}" if host.hint else ""))))
            counts.update(tests=1, errors=1)
        if host.status != "unreachable" and host.probe_ms is not None:
            for layer in LAYERS:
                found = [finding for finding in host.findings if finding.layer == layer]
                counts += _layer(suite, name, layer, found)
        if host.probe_ms is not None:
            suite.set("time", f"{host.probe_ms / 1000:.3f}")
        for key in ("tests", "failures", "errors"):
            suite.set(key, str(counts[key]))
        totals += counts
    for key in ("tests", "failures", "errors"):
        root.set(key, str(totals[key]))
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def _layer(suite: ElementTree.Element, host: str, layer: str, found: list[Finding]) -> Counter[str]:
    counts: Counter[str] = Counter()
    failing = [finding for finding in found if finding.severity in _FAILING]
    for finding in failing:
        case = ElementTree.SubElement(suite, "testcase", classname=_xml(f"{host}.{layer}"), name=_xml(finding.id))
        message = f"{finding.kind}: {finding.actual}".split("\n")[0]
        problem = ElementTree.SubElement(case, "failure", type=finding.severity, message=_xml(message))
        problem.text = _xml(f"expected: {finding.expected}\nactual: {finding.actual}\nfix: {finding.fix}")
        counts.update(tests=1, failures=1)
    if not failing:
        case = ElementTree.SubElement(suite, "testcase", classname=_xml(f"{host}.{layer}"), name=layer)
        counts.update(tests=1)
        if found:
            lines = [f"{item.severity}: {item.id}: expected {item.expected}, found {item.actual}; {item.fix}" for item in found]
            ElementTree.SubElement(case, "system-out").text = _xml("\n".join(lines))
    return counts


def _label(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


def _sample(name: str, labels: Mapping[str, str], value: float | int) -> str:
    inner = ",".join(f"{key}={_label(text)}" for key, text in labels.items())
    return f"{name}{{{inner}}} {value}" if inner else f"{name} {value}"


def to_prometheus(report: AuditReport, *, now_s: float) -> str:
    """Prometheus's text format, for the textfile collector of the node exporter.

    Args:
        report: The report.
        now_s: When it was made, seconds since 1970.
    """
    lines: list[str] = []

    def metric(name: str, samples: list[str]) -> None:
        if samples:
            lines.extend((f"# HELP {name} {AUDIT_METRICS[name]}", f"# TYPE {name} gauge", *samples))

    hosts = report.hosts
    metric(
        "v100ctl_audit_host_status",
        [
            _sample("v100ctl_audit_host_status", {"host": name, "status": status}, int(host.status == status))
            for name, host in hosts.items()
            for status in ("clean", "drift", "unreachable", "error")
        ],
    )
    metric(
        "v100ctl_audit_findings",
        [
            _sample("v100ctl_audit_findings", {"host": name, "kind": kind, "layer": layer, "severity": severity}, findings)
            for name, host in hosts.items()
            for (kind, layer, severity), findings in sorted(_counted(host).items())
        ],
    )
    metric(
        "v100ctl_audit_finding",
        [
            _sample(
                "v100ctl_audit_finding",
                {"host": name, "id": item.id, "kind": item.kind, "layer": item.layer, "severity": item.severity},
                1,
            )
            for name, host in hosts.items()
            # Each id once: a series cannot come twice.
            for item in {item.id: item for item in host.findings}.values()
        ],
    )
    metric(
        "v100ctl_audit_probe_seconds",
        [
            _sample("v100ctl_audit_probe_seconds", {"host": name}, round(host.probe_ms / 1000, 4))
            for name, host in hosts.items()
            if host.probe_ms is not None
        ],
    )
    metric("v100ctl_audit_exit_code", [_sample("v100ctl_audit_exit_code", {}, report.exit_code)])
    metric("v100ctl_audit_timestamp_seconds", [_sample("v100ctl_audit_timestamp_seconds", {}, round(now_s, 3))])
    return "\n".join(lines) + "\n"


def _counted(host: HostAudit) -> Counter[tuple[str, str, str]]:
    return Counter((finding.kind, finding.layer, finding.severity) for finding in host.findings)
