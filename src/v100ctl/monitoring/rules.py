"""Alert rules for Prometheus."""

from __future__ import annotations

from dataclasses import dataclass

import yaml

from v100ctl.monitoring.targets import DCGM_JOB, ENGINE_JOB, NODE_JOB
from v100ctl.plan.render import MANAGED_HEADER
from v100ctl.plan.rules.card_state import DOUBLE_BIT_ERROR, PAGES_AT_MOST, SLOWED, XIDS_OF_PROGRAMS
from v100ctl.surroundings import MEMORY_C, OPERATING_C

GROUP = "v100ctl"
#: A file that is older than so many of its intervals is no longer written.
MISSED_INTERVALS = 5


@dataclass(frozen=True)
class Alert:
    """One rule: when, for how long, and what it says. ``{{ }}`` are Prometheus' own templates."""

    name: str
    expression: str
    severity: str
    summary: str
    for_: str = "5m"


def alerts(*, audit_stale_s: int) -> tuple[Alert, ...]:
    """Every rule.

    Args:
        audit_stale_s: So old the last audit may be.
    """
    card = "{{ $labels.uuid }} at {{ $labels.pci_address }} of {{ $labels.host }}"
    of_programs = "|".join(str(code) for code in sorted(XIDS_OF_PROGRAMS))
    slowed = "|".join(sorted((*SLOWED, "hw_slowdown")))
    return (
        Alert(
            "V100HostDown",
            f'up{{job="{NODE_JOB}"}} == 0',
            "critical",
            "The node exporter of {{ $labels.host }} does not answer.",
        ),
        Alert(
            "V100MetricsStale",
            f"time() - v100ctl_metrics_timestamp_seconds > {MISSED_INTERVALS} * v100ctl_metrics_interval_seconds",
            "warning",
            "{{ $labels.host }} writes no metrics any more: `systemctl status v100ctl-metrics.service` there.",
            "1m",
        ),
        Alert(
            "V100MetricsAbsent",
            f'up{{job="{NODE_JOB}"}} == 1 unless on (host) v100ctl_metrics_timestamp_seconds',
            "warning",
            "The node exporter of {{ $labels.host }} has no file of v100ctl.",
        ),
        Alert(
            "V100DriverMismatch",
            "v100ctl_driver_mismatch == 1",
            "critical",
            "Library and loaded module of {{ $labels.host }}'s driver differ: nothing new starts on its cards until a restart.",
        ),
        Alert(
            "V100DriverNoAnswer",
            'v100ctl_nvidia_smi_status{status=~"error|timeout"} == 1',
            "critical",
            "nvidia-smi of {{ $labels.host }}: {{ $labels.status }}; `v100ctl recover {{ $labels.host }} --check` says more.",
        ),
        Alert(
            "V100UvmPoisoned",
            "v100ctl_uvm_poisoned == 1",
            "critical",
            "Every new CUDA program of {{ $labels.host }} fails: `v100ctl recover {{ $labels.host }}`.",
            "0m",
        ),
        Alert(
            "V100CardMissing",
            "v100ctl_cards_present < v100ctl_cards_expected",
            "critical",
            "{{ $labels.host }} had more V100s when its plan was applied than the {{ $value }} of now.",
            "2m",
        ),
        Alert("V100CardFallenOff", "v100ctl_gpu_fallen_off == 1", "critical", f"Card {card} has fallen off the bus.", "0m"),
        Alert(
            "V100Xid",
            f'v100ctl_gpu_xids{{code!~"{of_programs}"}} > 0',
            "warning",
            f"Card {card} had XID {{{{ $labels.code }}}} {{{{ $value }}}} times in the last day.",
            "0m",
        ),
        Alert(
            "V100Throttled",
            f'v100ctl_gpu_throttled{{reason=~"{slowed}"}} == 1',
            "warning",
            f"Card {card} is slowed: {{{{ $labels.reason }}}}.",
        ),
        Alert(
            "V100TooHot",
            f"v100ctl_gpu_temperature_celsius > {OPERATING_C}",
            "warning",
            f"Card {card} has {{{{ $value }}}} C; at most {OPERATING_C} are meant for it.",
        ),
        Alert(
            "V100MemoryTooHot",
            f"v100ctl_gpu_memory_temperature_celsius > {MEMORY_C}",
            "warning",
            f"The memory of card {card} has {{{{ $value }}}} C; at most {MEMORY_C} are meant for it.",
        ),
        Alert(
            "V100LinkDegraded",
            "v100ctl_gpu_link_width_lanes < v100ctl_gpu_link_width_max_lanes",
            "warning",
            f"The PCIe link of card {card} has {{{{ $value }}}} lanes.",
        ),
        Alert(
            "V100RetirementPending",
            "v100ctl_gpu_retirement_pending == 1",
            "warning",
            f"A page of the memory of card {card} waits for a reset: `v100ctl recover {{{{ $labels.host }}}}`.",
            "0m",
        ),
        Alert(
            "V100MemoryFailing",
            f"sum without (cause) (v100ctl_gpu_retired_pages) >= {PAGES_AT_MOST}"
            f' or v100ctl_gpu_ecc_errors{{kind="uncorrected",since="driver_load"}} > 0',
            "critical",
            f"The memory of card {card} fails (XID {DOUBLE_BIT_ERROR}, retired pages): {{{{ $value }}}}.",
            "0m",
        ),
        Alert(
            "V100PersistenceOff",
            "v100ctl_gpu_persistence_enabled == 0",
            "info",
            f"Card {card} is not kept awake and forgets its settings.",
            "15m",
        ),
        Alert(
            "V100HostDrifted",
            "v100ctl_drift_differences > 0",
            "warning",
            "{{ $labels.host }} differs {{ $value }} times from what was applied: `v100ctl audit --limit {{ $labels.host }}`.",
            "15m",
        ),
        Alert(
            "V100AuditFoundDrift",
            'sum by (host) (v100ctl_audit_findings{severity=~"error|critical"}) > 0',
            "warning",
            "The audit found {{ $value }} errors on {{ $labels.host }}.",
            "0m",
        ),
        Alert(
            "V100AuditUnreachable",
            'v100ctl_audit_host_status{status=~"unreachable|error"} == 1',
            "warning",
            "The audit says of {{ $labels.host }}: {{ $labels.status }}.",
            "0m",
        ),
        Alert(
            "V100AuditStale",
            f"time() - v100ctl_audit_timestamp_seconds > {audit_stale_s}",
            "warning",
            "No audit ended for {{ $value | humanizeDuration }}: `systemctl status v100ctl-audit.service` where it runs.",
            "0m",
        ),
        Alert(
            "V100InstanceDown",
            'v100ctl_unit_active{instance_name!=""} == 0',
            "critical",
            "Instance {{ $labels.instance_name }} of {{ $labels.host }} does not run.",
            "2m",
        ),
        Alert(
            "V100InstanceNoMetrics",
            f'up{{job=~"{ENGINE_JOB}.*"}} == 0',
            "critical",
            "Instance {{ $labels.instance_name }} of {{ $labels.host }} does not answer on /metrics, or not with that key.",
        ),
        Alert(
            "V100UnitDown",
            'v100ctl_unit_active{instance_name="",unit!="nvidia-persistenced.service"} == 0',
            "warning",
            "{{ $labels.unit }} of {{ $labels.host }} does not run.",
        ),
        Alert(
            "V100InstanceCrashes",
            'increase(v100ctl_unit_restarts_total{instance_name!=""}[1h]) > 0',
            "warning",
            "systemd has restarted instance {{ $labels.instance_name }} of {{ $labels.host }} within the last hour.",
            "0m",
        ),
        Alert(
            "V100WatchdogRestarts",
            "increase(v100ctl_watchdog_restarts_total[1h]) > 0",
            "warning",
            "The watchdog has restarted {{ $labels.instance_name }} of {{ $labels.host }}, which computed nothing any more.",
            "0m",
        ),
        Alert(
            "V100DcgmDown",
            f'up{{job="{DCGM_JOB}"}} == 0',
            "warning",
            "The DCGM exporter of {{ $labels.host }} does not answer.",
        ),
    )


def render_rules(*, audit_stale_s: int) -> str:
    """The rules as a file for ``rule_files``."""
    rules = [
        {
            "alert": alert.name,
            "expr": alert.expression,
            "for": alert.for_,
            "labels": {"severity": alert.severity},
            "annotations": {"summary": alert.summary},
        }
        for alert in alerts(audit_stale_s=audit_stale_s)
    ]
    document = {"groups": [{"name": GROUP, "rules": rules}]}
    return f"# {MANAGED_HEADER}\n" + yaml.safe_dump(document, sort_keys=False, width=200)
