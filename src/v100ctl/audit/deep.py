"""What Ansible's own check mode would change, held against the findings: a second pair of eyes on the first."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import date

from v100ctl.access import Access
from v100ctl.apply import Reporter, run_playbook
from v100ctl.apply import Secrets as AnsibleSecrets
from v100ctl.apply.runner import ApplyResult, TaskChange
from v100ctl.audit import AuditReport
from v100ctl.findings import DEEP_FIX, Finding, Layer
from v100ctl.fleet import Fleet

#: The layer in which a role works, for what it would change and no finding names.
_LAYERS: Mapping[str, Layer] = {
    "preflight": "package",
    "nvidia_driver": "driver",
    "cuda_toolkit": "package",
    "gpu_tuning": "hardware",
    "llama_cpp": "file",
    "external_engine": "file",
    "vllm": "file",
    "model_store": "file",
    "llm_server": "unit",
    "gateway": "unit",
    "monitoring": "unit",
}


def check_hosts(fleet: Fleet, report: AuditReport, *, access: Access, reporter: Reporter, as_of: date) -> AuditReport:
    """``ansible-playbook --check --diff`` of the provisioning playbook on the hosts that answered and are not refused.

    What it would change in a role that has findings on that host is what those say. Everything else is a finding of its own, and
    so is a host on which it fails.
    """
    names = [name for name, host in report.hosts.items() if host.status in ("clean", "drift")]
    if not names:
        return report
    applied = run_playbook(
        "provision",
        fleet.sources if fleet.document is None else fleet.document,
        names,
        check=True,
        diff=True,
        passwords=AnsibleSecrets(
            connection_password=access.secrets.connection_password,
            become_password=access.secrets.become_password,
            vault_password=fleet.vault_password,
        ),
        vault_arguments=fleet.vault_arguments,
        reporter=reporter,
        forks=access.forks,
        extra_vars={"v100ctl_as_of": as_of.isoformat()},
        title="what Ansible would change",
    )
    return report.with_findings(unexplained(report, applied))


def unexplained(report: AuditReport, applied: ApplyResult) -> dict[str, list[Finding]]:
    """What Ansible would change or fails at and no finding of the same role on that host explains."""
    found: dict[str, list[Finding]] = {}
    explained = {
        name: {finding.role for finding in host.findings if finding.kind != "external"} for name, host in report.hosts.items()
    }
    for change in applied.changes:
        role = change.role or "preflight"
        if change.host in report.hosts and role not in explained[change.host]:
            found.setdefault(change.host, []).append(_finding(change, role))
    for failure in applied.failures:
        if failure.host in report.hosts:
            role = failure.role or "preflight"
            found.setdefault(failure.host, []).append(
                Finding(
                    f"ansible.failed:{role}:{failure.task}",
                    "drifted",
                    _LAYERS.get(role, "file"),
                    role,
                    "a role that runs to its end in check mode",
                    failure.message,
                    "error",
                    failure.hint or DEEP_FIX,
                )
            )
    return found


def _finding(change: TaskChange, role: str) -> Finding:
    return Finding(
        f"ansible.changed:{role}:{change.task}",
        "drifted",
        _LAYERS.get(role, "file"),
        role,
        "nothing that Ansible would change",
        change.diff or "it would change something",
        "error",
        DEEP_FIX,
    )
