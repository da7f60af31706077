"""Every metric that this toolkit writes or relies on, by name. Alert rules and dashboard use no other."""

from __future__ import annotations

from collections.abc import Mapping

from v100ctl.catalog import Catalog
from v100ctl.monitoring.host_script import METRICS as HOST_METRICS

#: What ``v100ctl audit --format prometheus`` writes: name -> help. All are gauges.
AUDIT_METRICS: Mapping[str, str] = {
    "v100ctl_audit_host_status": "1 for the status that the host has.",
    "v100ctl_audit_findings": "Findings of a host by kind, layer and severity.",
    "v100ctl_audit_finding": "1 for each finding, by its id.",
    "v100ctl_audit_probe_seconds": "How long the host took to look at itself.",
    "v100ctl_audit_exit_code": "What `v100ctl audit` exited with.",
    "v100ctl_audit_timestamp_seconds": "When it was made.",
}
#: Of Prometheus itself, for each target.
UP = "up"


def known_names(catalog: Catalog) -> frozenset[str]:
    """The names that an expression may hold."""
    engines = catalog.monitoring.engines.values()
    return frozenset(
        {UP, *HOST_METRICS, *AUDIT_METRICS, *catalog.monitoring.dcgm.fields}
        | {name for row in engines for name in (row.running, row.waiting, row.prompt_tokens, row.generated_tokens)}
    )
