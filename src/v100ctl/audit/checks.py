"""The audit as tests, for whoever lives in pytest: ``pytest --pyargs v100ctl.audit.checks --hosts=ssh://gpu1``.

Any backend of testinfra (``ssh://``, ``docker://``, ``ansible://``, ``local://`` ...) reaches the hosts; the inventory that plans
them comes from ``--v100ctl-inventory``, else ``$V100CTL_INVENTORY``, else ``./inventory/hosts.yml``. One test a layer: it fails
for what `v100ctl audit` exits with 2 for, and warns of the rest. The fixtures ``v100ctl_facts``, ``v100ctl_plan`` and
``v100ctl_findings`` are there for tests of your own.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import pytest

from v100ctl.audit.formats import LAYERS
from v100ctl.audit.through_testinfra import AuditWarning
from v100ctl.findings import Finding
from v100ctl.plan.types import HostPlan, describe


def _lines(findings: Sequence[Finding]) -> str:
    return "\n".join(
        f"{item.severity}: {item.id} ({item.kind})\n  expected: {item.expected}\n  actual: {item.actual}\n  fix: {item.fix}"
        for item in findings
    )


def test_plan(v100ctl_plan: HostPlan) -> None:
    """The plan does not refuse the host."""
    refusals = [describe(rule) for rule in v100ctl_plan.rules if rule.severity == "refuse"]
    if refusals:
        pytest.fail("\n".join(refusals), pytrace=False)


@pytest.mark.parametrize("layer", LAYERS)
def test_layer(layer: str, v100ctl_findings: tuple[Finding, ...]) -> None:
    """Nothing in this layer differs from the plan, and nothing of others harms."""
    found = [finding for finding in v100ctl_findings if finding.layer == layer]
    failing = [finding for finding in found if finding.severity in ("error", "critical")]
    if mild := [finding for finding in found if finding not in failing]:
        warnings.warn(AuditWarning(_lines(mild)), stacklevel=1)
    if failing:
        pytest.fail(_lines(failing), pytrace=False)
