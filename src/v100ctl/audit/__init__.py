"""Drift: what hosts are, compared with what is planned for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from typing import Any, Literal

from v100ctl.access import Access
from v100ctl.errors import EXIT_DIFFERENCES, EXIT_ERROR, EXIT_OK, UnreachableError
from v100ctl.examine import Examined, examine
from v100ctl.fleet import Fleet

AUDIT_SCHEMA = "v100ctl/audit/1"
HostAuditStatus = Literal["clean", "drift", "unreachable", "error"]


@dataclass(frozen=True)
class AuditReport:
    """The findings of all hosts."""

    hosts: Mapping[str, Examined]

    def status(self, name: str) -> HostAuditStatus:
        """``clean``, ``drift``, ``unreachable``, or ``error`` where the probe failed or the plan refuses the host."""
        state = self.hosts[name]
        if state.error is not None:
            return "unreachable" if isinstance(state.error, UnreachableError) else "error"
        if state.plan is not None and state.plan.verdict == "refused":
            return "error"
        return "drift" if state.findings else "clean"

    @property
    def exit_code(self) -> int:
        """1 before 2 before 0, over all hosts; 2 where a finding is more than a warning."""
        statuses = {self.status(name) for name in self.hosts}
        if statuses & {"unreachable", "error"}:
            return EXIT_ERROR
        findings = [finding for state in self.hosts.values() for finding in state.findings]
        # Warnings alone are no failure: a timer that runs this must not cry for them.
        return EXIT_DIFFERENCES if any(finding.severity in ("error", "critical") for finding in findings) else EXIT_OK

    def to_json(self) -> dict[str, Any]:
        """The document of the contract ``v100ctl/audit/1``."""
        hosts: dict[str, Any] = {}
        for name, state in self.hosts.items():
            hosts[name] = {
                "status": self.status(name),
                "probe_ms": round(state.facts.probe_ms, 1) if state.facts else None,
                "findings": [
                    {
                        "id": finding.id,
                        "kind": finding.kind,
                        "layer": finding.layer,
                        "instance": finding.instance,
                        "role": finding.role,
                        "expected": finding.expected,
                        "actual": finding.actual,
                        "severity": finding.severity,
                        "fix": finding.fix,
                    }
                    for finding in state.findings
                ],
                **({"error": state.error.message} if state.error is not None else {}),
            }
            if state.plan is not None and state.plan.verdict == "refused":
                hosts[name]["error"] = "; ".join(rule.reason for rule in state.plan.rules if rule.severity == "refuse")
        return {"schema": AUDIT_SCHEMA, "hosts": hosts}


def audit(fleet: Fleet, *, access: Access, as_of: date, deep: bool = False) -> AuditReport:
    """Probe every host in one round trip each and compare it with its plan.

    Args:
        fleet: The hosts.
        access: How they are reached.
        as_of: Today, for the plan.
        deep: Hash releases and models instead of trusting size and time.
    """
    return AuditReport(examine(list(fleet.hosts.values()), access, as_of=as_of, deep=deep))
