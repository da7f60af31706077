"""What is new since an earlier report, and what has gone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from v100ctl.audit import AUDIT_SCHEMA, AuditReport
from v100ctl.errors import V100ctlError

#: A report on a thousand hosts is some megabytes.
_MAX_BYTES = 256 * 1024**2


@dataclass(frozen=True)
class Since:
    """Ids by host. A finding is the same one while its id and kind are: a temperature that has changed is no news."""

    new: Mapping[str, tuple[str, ...]]
    gone: Mapping[str, tuple[str, ...]]

    def to_json(self) -> dict[str, Any]:
        """As it stands in a report."""
        return {key: {host: list(ids) for host, ids in found.items()} for key, found in (("new", self.new), ("gone", self.gone))}


def read_report(path: Path) -> dict[str, set[tuple[str, str]]]:
    """Ids and kinds by host, from what ``v100ctl audit --json`` has written.

    Raises:
        V100ctlError: it is no such report.
    """
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise V100ctlError(f"{path} is larger than any report")
        document = json.loads(path.read_text(encoding="utf-8"))
        if document["schema"] != AUDIT_SCHEMA:
            raise ValueError("another schema")
        return {
            str(host): {(str(item["id"]), str(item["kind"])) for item in found["findings"]}
            for host, found in document["hosts"].items()
        }
    except OSError as error:
        raise V100ctlError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise V100ctlError(
            f"{path} is no report of `v100ctl audit`", hint="`v100ctl audit -o json:REPORT` writes one to compare with later"
        ) from error


def compare_with(report: AuditReport, before: Mapping[str, set[tuple[str, str]]]) -> Since:
    """What is new and what has gone. Of a host that was not asked now, nothing has gone."""
    new: dict[str, tuple[str, ...]] = {}
    gone: dict[str, tuple[str, ...]] = {}
    for name, host in report.hosts.items():
        now = {(finding.id, finding.kind) for finding in host.findings}
        old = before.get(name, set())
        if fresh := tuple(finding.id for finding in host.findings if (finding.id, finding.kind) not in old):
            new[name] = fresh
        if host.probe_ms is not None and (past := tuple(sorted(identifier for identifier, _ in old - now))):
            gone[name] = past
    return Since(new, gone)
