"""What Prometheus itself says of its configuration and of the alert rules: ``promtool`` of Debian's package, just unpacked."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from v100ctl.catalog import load_catalog
from v100ctl.fleet import parse_config
from v100ctl.monitoring.rules import alerts, render_rules
from v100ctl.monitoring.targets import engines_of, render_prometheus

# Fetches 25 MB.
pytestmark = pytest.mark.slow

HOST = 'host="h1"'
CARD = f'{HOST},uuid="GPU-1",pci_address="0000:06:00.0"'
CHAT = f'{HOST},unit="v100-chat.service",instance_name="chat"'
#: By alert: series that raise it, and the same where all is well. ``NxM`` of promtool: N, then M times the same.
CASES: dict[str, tuple[dict[str, str], dict[str, str]]] = {
    "V100HostDown": ({f'up{{job="v100ctl-node",{HOST}}}': "0x60"}, {f'up{{job="v100ctl-node",{HOST}}}': "1x60"}),
    "V100MetricsStale": (
        {f"v100ctl_metrics_timestamp_seconds{{{HOST}}}": "0x60", f"v100ctl_metrics_interval_seconds{{{HOST}}}": "60x60"},
        {f"v100ctl_metrics_timestamp_seconds{{{HOST}}}": "0+60x60", f"v100ctl_metrics_interval_seconds{{{HOST}}}": "60x60"},
    ),
    "V100MetricsAbsent": (
        {f'up{{job="v100ctl-node",{HOST}}}': "1x60"},
        {f'up{{job="v100ctl-node",{HOST}}}': "1x60", f"v100ctl_metrics_timestamp_seconds{{{HOST}}}": "0+60x60"},
    ),
    "V100DriverMismatch": (
        {f"v100ctl_driver_mismatch{{{HOST}}}": "1x60"},
        {f"v100ctl_driver_mismatch{{{HOST}}}": "0x60"},
    ),
    "V100DriverNoAnswer": (
        {f'v100ctl_nvidia_smi_status{{{HOST},status="timeout"}}': "1x60"},
        {
            f'v100ctl_nvidia_smi_status{{{HOST},status="timeout"}}': "0x60",
            f'v100ctl_nvidia_smi_status{{{HOST},status="ok"}}': "1x60",
        },
    ),
    "V100UvmPoisoned": ({f"v100ctl_uvm_poisoned{{{HOST}}}": "1x60"}, {f"v100ctl_uvm_poisoned{{{HOST}}}": "0x60"}),
    "V100CardMissing": (
        {f"v100ctl_cards_present{{{HOST}}}": "1x60", f"v100ctl_cards_expected{{{HOST}}}": "2x60"},
        {f"v100ctl_cards_present{{{HOST}}}": "2x60", f"v100ctl_cards_expected{{{HOST}}}": "2x60"},
    ),
    "V100CardFallenOff": ({f"v100ctl_gpu_fallen_off{{{CARD}}}": "1x60"}, {f"v100ctl_gpu_fallen_off{{{CARD}}}": "0x60"}),
    # 31 is a program's own fault.
    "V100Xid": ({f'v100ctl_gpu_xids{{{CARD},code="79"}}': "1x60"}, {f'v100ctl_gpu_xids{{{CARD},code="31"}}': "5x60"}),
    "V100Throttled": (
        {f'v100ctl_gpu_throttled{{{CARD},reason="hw_thermal_slowdown"}}': "1x60"},
        {f'v100ctl_gpu_throttled{{{CARD},reason="sw_power_cap"}}': "1x60"},
    ),
    "V100TooHot": (
        {f"v100ctl_gpu_temperature_celsius{{{CARD}}}": "84x60"},
        {f"v100ctl_gpu_temperature_celsius{{{CARD}}}": "83x60"},
    ),
    "V100MemoryTooHot": (
        {f"v100ctl_gpu_memory_temperature_celsius{{{CARD}}}": "86x60"},
        {f"v100ctl_gpu_memory_temperature_celsius{{{CARD}}}": "85x60"},
    ),
    "V100LinkDegraded": (
        {f"v100ctl_gpu_link_width_lanes{{{CARD}}}": "8x60", f"v100ctl_gpu_link_width_max_lanes{{{CARD}}}": "16x60"},
        {f"v100ctl_gpu_link_width_lanes{{{CARD}}}": "16x60", f"v100ctl_gpu_link_width_max_lanes{{{CARD}}}": "16x60"},
    ),
    "V100RetirementPending": (
        {f"v100ctl_gpu_retirement_pending{{{CARD}}}": "1x60"},
        {f"v100ctl_gpu_retirement_pending{{{CARD}}}": "0x60"},
    ),
    "V100MemoryFailing": (
        {
            f'v100ctl_gpu_retired_pages{{{CARD},cause="single_bit"}}': "60x60",
            f'v100ctl_gpu_retired_pages{{{CARD},cause="double_bit"}}': "4x60",
        },
        {
            f'v100ctl_gpu_retired_pages{{{CARD},cause="single_bit"}}': "60x60",
            f'v100ctl_gpu_ecc_errors{{{CARD},kind="corrected",since="driver_load"}}': "9x60",
        },
    ),
    "V100PersistenceOff": (
        {f"v100ctl_gpu_persistence_enabled{{{CARD}}}": "0x60"},
        {f"v100ctl_gpu_persistence_enabled{{{CARD}}}": "1x60"},
    ),
    "V100HostDrifted": (
        {f"v100ctl_drift_differences{{{HOST}}}": "2x60"},
        {f"v100ctl_drift_differences{{{HOST}}}": "0x60"},
    ),
    "V100AuditFoundDrift": (
        {f'v100ctl_audit_findings{{{HOST},kind="drifted",layer="unit",severity="error"}}': "1x60"},
        {f'v100ctl_audit_findings{{{HOST},kind="external",layer="file",severity="warn"}}': "3x60"},
    ),
    "V100AuditUnreachable": (
        {f'v100ctl_audit_host_status{{{HOST},status="unreachable"}}': "1x60"},
        {f'v100ctl_audit_host_status{{{HOST},status="drift"}}': "1x60"},
    ),
    "V100AuditStale": (
        {'v100ctl_audit_timestamp_seconds{instance="c"}': "0x60"},
        {'v100ctl_audit_timestamp_seconds{instance="c"}': "0+60x60"},
    ),
    "V100InstanceDown": ({f"v100ctl_unit_active{{{CHAT}}}": "0x60"}, {f"v100ctl_unit_active{{{CHAT}}}": "1x60"}),
    "V100InstanceNoMetrics": (
        {f'up{{job="v100ctl-engine-chat",{HOST},instance_name="chat"}}': "0x60"},
        {f'up{{job="v100ctl-engine-chat",{HOST},instance_name="chat"}}': "1x60"},
    ),
    "V100UnitDown": (
        {f'v100ctl_unit_active{{{HOST},unit="v100ctl-gateway.service",instance_name=""}}': "0x60"},
        {f'v100ctl_unit_active{{{HOST},unit="nvidia-persistenced.service",instance_name=""}}': "0x60"},
    ),
    "V100InstanceCrashes": (
        {f"v100ctl_unit_restarts_total{{{CHAT}}}": "0x30 1x30"},
        {f"v100ctl_unit_restarts_total{{{CHAT}}}": "7x60"},
    ),
    "V100WatchdogRestarts": (
        {f'v100ctl_watchdog_restarts_total{{{HOST},instance_name="chat"}}': "1x30 2x30"},
        {f'v100ctl_watchdog_restarts_total{{{HOST},instance_name="chat"}}': "2x60"},
    ),
    "V100DcgmDown": ({f'up{{job="v100ctl-dcgm",{HOST}}}': "0x60"}, {f'up{{job="v100ctl-dcgm",{HOST}}}': "1x60"}),
}


@pytest.fixture(scope="module")
def promtool(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program, out of Debian's package."""
    folder = tmp_path_factory.mktemp("prometheus")
    subprocess.run(["apt-get", "-o", "APT::Sandbox::User=root", "download", "prometheus"], cwd=folder, check=True)
    (package,) = folder.glob("prometheus_*.deb")
    subprocess.run(["dpkg-deb", "-x", str(package), str(folder / "unpacked")], check=True)
    return folder / "unpacked/usr/bin/promtool"


def run(promtool: Path, *arguments: str) -> str:
    done = subprocess.run([str(promtool), *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_the_configuration_is_one(promtool: Path, tmp_path: Path) -> None:
    key = "a-secret-key-of-some-length"
    chat = {"model": {"path": "/m.gguf", "sha256": "ab" * 32}, "listen": "10.0.0.1", "api_keys": [key]}
    variables = {"llama_cpp_backend": "cpu", "monitoring_enabled": True, "monitoring_dcgm": True}
    config = parse_config("h1", {**variables, "llm_server_instances": {"chat": chat}})
    hosts: Any = {"h1": ({"ansible_host": "10.0.0.1"}, config)}
    for engines in engines_of(hosts, load_catalog()):
        (tmp_path / engines.key_name).write_text(engines.key)
    (tmp_path / "rules.yml").write_text(render_rules(audit_stale_s=3600))
    (tmp_path / "prometheus.yml").write_text(
        render_prometheus(hosts, load_catalog(), keys_folder=str(tmp_path), rule_files=["rules.yml"])
    )
    said = run(promtool, "check", "config", str(tmp_path / "prometheus.yml"))
    assert f"{len(alerts(audit_stale_s=3600))} rules found" in said


def firing(name: str, series: dict[str, str], *, fires: bool) -> dict[str, Any]:
    """A test of promtool: after an hour the alert is there, or is not."""
    return {
        "name": f"{name} {'fires' if fires else 'is silent'}",
        "interval": "1m",
        "input_series": [{"series": key, "values": value} for key, value in series.items()],
        "promql_expr_test": [
            {
                "expr": f'count(ALERTS{{alertname="{name}",alertstate="firing"}})',
                "eval_time": "50m",
                "exp_samples": [{"labels": "{}", "value": 1}] if fires else [],
            }
        ],
    }


def test_each_alert_is_raised_and_only_then(promtool: Path, tmp_path: Path) -> None:
    assert set(CASES) == {alert.name for alert in alerts(audit_stale_s=1800)}
    (tmp_path / "rules.yml").write_text(render_rules(audit_stale_s=1800))
    document = {
        "rule_files": ["rules.yml"],
        "evaluation_interval": "1m",
        "tests": [
            firing(name, series, fires=fires)
            for name, both in CASES.items()
            for series, fires in zip(both, (True, False), strict=True)
        ],
    }
    (tmp_path / "tests.yml").write_text(yaml.safe_dump(document, sort_keys=False))
    assert "SUCCESS" in run(promtool, "test", "rules", str(tmp_path / "tests.yml"))
