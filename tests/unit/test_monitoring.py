"""Monitoring: the plan of it, what the host's program writes, and what Prometheus and Grafana are told."""

from __future__ import annotations

import json
import re
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from v100ctl import findings
from v100ctl.audit import AuditReport, HostAudit
from v100ctl.audit.formats import to_prometheus
from v100ctl.catalog import load_catalog
from v100ctl.cli import cli
from v100ctl.compare import compare
from v100ctl.facts import Facts
from v100ctl.fleet import HostConfig, parse_config
from v100ctl.monitoring import host_script
from v100ctl.monitoring.audit_timer import audit_units
from v100ctl.monitoring.dashboard import render_dashboard
from v100ctl.monitoring.names import AUDIT_METRICS, known_names
from v100ctl.monitoring.rules import alerts, render_rules
from v100ctl.monitoring.targets import engines_of, render_prometheus, scrape_configs, unreachable_of
from v100ctl.plan import HostPlan, monitoring, probe_request
from v100ctl.plan import plan as make_host_plan
from v100ctl.plan.driver_actions import NVIDIA_SOURCES
from v100ctl.probe import host_script as probe_script

from .factory import AS_OF, MODEL, applied_facts, make_config, make_facts, make_plan

CATALOG = load_catalog()
ROW = CATALOG.monitoring.node_exporter
KEY = "a-secret-key-of-some-length"
CARD: dict[str, Any] = {
    "pci_address": "0000:06:00.0",
    "pci_id": "10de:1db1",
    "pci_class": "0302",
    "bar1_bytes": 16 * 1024**3,
    "link_width": 16,
    "max_link_width": 16,
    "link_speed_gts": 8.0,
    "index": 0,
    "uuid": "GPU-1",
    "name": "Tesla V100-SXM2-16GB",
    "temperature_c": 40,
    "memory_temperature_c": 41,
    "power_draw_w": 55.5,
    "power_limit_w": 300.0,
    "sm_clock_mhz": 1530,
    "memory_used_bytes": 1,
    "memory_total_bytes": 2,
    "throttle_reasons": ["hw_thermal_slowdown"],
    "persistence_mode": "enabled",
    "ecc_mode": "enabled",
    "ecc_corrected_volatile": 3,
    "ecc_uncorrected_volatile": 0,
    "ecc_uncorrected_aggregate": 1,
    "retired_pages_single_bit": 2,
    "retired_pages_double_bit": 1,
    "retired_pages_pending": False,
    "processes": [{"pid": 1}],
}


def decided(facts: Facts | None = None, **variables: Any) -> HostPlan:
    return make_plan(facts, make_config(monitoring_enabled=True, **variables))


def file(plan: HostPlan, path: str) -> str:
    return next(item.content for item in plan.files if item.path == path)


def monitored(plan: HostPlan, **changes: Any) -> Facts:
    """A host on which a plan with monitoring was applied."""
    assert plan.monitoring is not None
    units = {
        name: {"load_state": "loaded", "active_state": "active", "sub_state": "running", "unit_file_state": "enabled"}
        for name in plan.monitoring.units
    }
    processes = [
        *applied_facts(plan).model_dump()["processes"],
        *(
            {"pid": 900 + number, "unit": item.unit, "argv": ["x", *item.arguments], "user": "prometheus"}
            for number, item in enumerate(plan.monitoring.exporters)
        ),
    ]
    installed = {name: "1" for name in plan.monitoring.packages}
    return applied_facts(plan, **{"units": units, "processes": processes, "packages": {"installed": installed}, **changes})


def again(plan: HostPlan, facts: Facts, **variables: Any) -> HostPlan:
    """The plan that is made of the host afterwards."""
    return make_host_plan("h1", make_config(**{"monitoring_enabled": True, **variables}), facts, as_of=AS_OF)


# --- the plan -----------------------------------------------------------------------------------------------------------------


def test_it_is_off_by_default() -> None:
    plan = make_plan()
    assert plan.monitoring is None
    assert not [item for item in plan.files if item.role == "monitoring"]
    assert not [rule for rule in plan.rules if rule.id.startswith("monitoring")]


def test_a_timer_and_the_distribution_s_exporter() -> None:
    plan = decided(monitoring_interval_s=30, monitoring_listen="10.0.0.1")
    assert plan.monitoring is not None
    assert plan.monitoring.units == (monitoring.TIMER, ROW.unit)
    assert plan.monitoring.packages == plan.monitoring.missing_packages == ("prometheus-node-exporter",)
    # The role installs it once its address is known, not what comes first.
    assert "prometheus-node-exporter" not in plan.packages
    assert plan.host_json is not None and "prometheus-node-exporter" in json.loads(plan.host_json.content)["packages"]
    assert "OnUnitActiveSec=30s\n" in file(plan, f"/etc/systemd/system/{monitoring.TIMER}")
    assert "ExecStart=\n" in file(plan, monitoring.drop_in(ROW.unit))
    assert file(plan, monitoring.drop_in(ROW.unit)).endswith("$ARGS \\\n    --web.listen-address=10.0.0.1:9100\n")
    settings = json.loads(file(plan, monitoring.SETTINGS))
    assert settings["output"] == plan.monitoring.textfile == "/var/lib/prometheus/node-exporter/v100ctl.prom"
    assert "10de:1db1" in settings["card_ids"]
    assert file(plan, monitoring.PROBE).split("\n", 1)[1] == Path(probe_script.__file__).read_text("utf-8")
    assert set(monitoring.FILES) <= set(probe_request(make_config()).files)
    assert {item.path for item in plan.files if item.role == "monitoring"} <= set(monitoring.FILES)
    assert {monitoring.TIMER, monitoring.SERVICE, ROW.unit, CATALOG.monitoring.dcgm.unit} <= set(probe_script.OTHER_UNITS)


@pytest.mark.parametrize(
    ("listen", "url"),
    [
        ("0.0.0.0", "http://127.0.0.1:9100/metrics"),
        ("::", "http://[::1]:9100/metrics"),
        ("10.0.0.1", "http://10.0.0.1:9100/metrics"),
    ],
)
def test_the_role_asks_an_exporter_where_it_listens(listen: str, url: str) -> None:
    plan = decided(monitoring_listen=listen)
    assert plan.monitoring is not None and plan.monitoring.exporters[0].url == url


def rule_ids(plan: HostPlan) -> dict[str, str]:
    return {rule.id: rule.severity for rule in plan.rules if rule.id.startswith("monitoring")}


def test_rules_about_addresses_and_ports() -> None:
    assert rule_ids(decided()) == {"monitoring-loopback": "info"}
    assert rule_ids(decided(monitoring_listen="10.0.0.1")) == {"monitoring-open": "info"}
    assert rule_ids(decided(monitoring_port=8000))["monitoring-port-taken"] == "refuse"
    assert rule_ids(decided(monitoring_port=18000)) == {"monitoring-loopback": "info"}
    assert rule_ids(decided(monitoring_port=18000, gateway_placement="host"))["monitoring-port-taken"] == "refuse"
    other = make_facts(listeners=[{"address": "::", "port": 9100, "command": "node_exporter", "unit": "own.service"}])
    assert rule_ids(decided(other))["monitoring-port-taken"] == "refuse"
    ours = make_facts(listeners=[{"address": "::", "port": 9100, "unit": ROW.unit}])
    assert "monitoring-port-taken" not in rule_ids(decided(ours))


def test_an_exporter_of_one_s_own_reads_a_folder_that_is_named() -> None:
    assert rule_ids(decided(monitoring_node_exporter="none")) == {"monitoring-directory-unknown": "refuse"}
    assert rule_ids(decided(monitoring_textfile_directory="/srv/x")) == {
        "monitoring-directory-unread": "refuse",
        "monitoring-loopback": "info",
    }
    plan = decided(monitoring_node_exporter="none", monitoring_textfile_directory="/srv/textfiles")
    assert rule_ids(plan) == {}
    assert plan.monitoring is not None and plan.monitoring.units == (monitoring.TIMER,)
    assert plan.monitoring.packages == ()
    assert plan.monitoring.textfile == "/srv/textfiles/v100ctl.prom"
    assert "ReadWritePaths=/srv/textfiles\n" in file(plan, f"/etc/systemd/system/{monitoring.SERVICE}")


def with_card(**variables: Any) -> HostPlan:
    facts = make_facts(
        gpus=[CARD], nvidia={"module_version": "535.309.01", "module_flavour": "proprietary"}, **variables.pop("facts", {})
    )
    config = parse_config(
        "h1",
        {"llm_server_instances": {"chat": {"model": MODEL}}, "monitoring_enabled": True, "monitoring_dcgm": True, **variables},
    )
    return make_host_plan("h1", config, facts, as_of=AS_OF)


def test_dcgm_comes_only_from_nvidias_repository() -> None:
    without = with_card()
    assert rule_ids(without)["monitoring-dcgm-no-repository"] == "warn"
    assert without.monitoring is not None and without.monitoring.units == (monitoring.TIMER, ROW.unit)
    source = {
        "path": "/etc/apt/sources.list.d/cuda.list",
        "uri": f"{CATALOG.nvidia_repository.url}/debian12/x86_64/",
        "suite": "/",
    }
    dcgm = CATALOG.monitoring.dcgm
    for plan in (
        with_card(facts={"apt_sources": [source]}),
        with_card(nvidia_driver_source="nvidia_repository", nvidia_driver_branch="580"),
    ):
        assert "monitoring-dcgm-no-repository" not in rule_ids(plan)
        assert plan.monitoring is not None and plan.monitoring.units == (monitoring.TIMER, ROW.unit, dcgm.unit)
        assert set(dcgm.packages) <= set(plan.monitoring.missing_packages)
        text = file(plan, monitoring.drop_in(dcgm.unit))
        assert "ExecStart=\n" in text and f"-f {monitoring.DCGM_FIELDS} \\\n    -a 127.0.0.1:9400\n" in text
        fields = file(plan, monitoring.DCGM_FIELDS)
        assert re.search(r"^DCGM_FI_DEV_MEMORY_TEMP, gauge, ", fields, re.M)
        assert all(len(line.split(", ")) == 3 for line in fields.splitlines() if not line.startswith("#"))
        # Those that a V100 lacks.
        assert not re.search("ROW_REMAP|REMAPPED|VGPU|PROF", fields)
    assert any(item.path == NVIDIA_SOURCES for item in plan.files)
    # A host without cards has no use for it, and both on one port are refused.
    assert rule_ids(decided(monitoring_dcgm=True)) == {"monitoring-loopback": "info"}
    twice = with_card(facts={"apt_sources": [source]}, monitoring_dcgm_port=9100)
    assert rule_ids(twice)["monitoring-port-twice"] == "refuse"


# --- the comparison -----------------------------------------------------------------------------------------------------------


def found_of(plan: HostPlan, facts: Facts) -> dict[str, str]:
    return {item.id: item.kind for item in compare(plan, facts) if item.role == "monitoring"}


def test_a_host_as_planned_differs_in_nothing() -> None:
    plan = decided()
    facts = monitored(plan)
    after = again(plan, facts)
    assert after.monitoring is not None and after.monitoring.missing_packages == ()
    assert compare(after, facts) == ()


@pytest.mark.parametrize(
    ("changes", "identifier", "kind"),
    [
        ({"units": {monitoring.TIMER: {"active_state": "inactive"}}}, f"unit.inactive:{monitoring.TIMER}", "drifted"),
        ({"units": {ROW.unit: {"unit_file_state": "disabled"}}}, f"unit.disabled:{ROW.unit}", "drifted"),
        ({"units": {monitoring.SERVICE: {"active_state": "failed"}}}, f"unit.failed:{monitoring.SERVICE}", "drifted"),
        ({"files": {monitoring.PROGRAM: {"sha256": "0" * 64}}}, f"file.content:{monitoring.PROGRAM}", "drifted"),
    ],
)
def test_what_somebody_changed_is_found(changes: dict[str, Any], identifier: str, kind: str) -> None:
    plan = decided()
    base = monitored(plan).model_dump(by_alias=True)
    facts = monitored(plan, **{key: merged(base[key], value) for key, value in changes.items()})
    assert found_of(again(plan, facts), facts) == {identifier: kind}


def merged(base: Mapping[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    return {**base, **{key: {**(base.get(key) or {}), **value} for key, value in change.items()}}


def test_an_exporter_that_runs_with_other_words_is_found() -> None:
    plan = decided()
    processes = [dict(item) for item in monitored(plan).model_dump()["processes"]]
    processes[-1]["argv"] = ("/usr/bin/prometheus-node-exporter",)
    facts = monitored(plan, processes=processes)
    assert found_of(again(plan, facts), facts) == {f"process.argv:{ROW.unit}": "drifted"}


def test_what_is_wanted_no_more_goes_with_its_exporter() -> None:
    plan = decided()
    facts = monitored(plan)
    off = again(plan, facts, monitoring_enabled=False)
    assert off.monitoring is not None and off.monitoring.state == "absent"
    assert set(off.monitoring.absent_units) == {monitoring.TIMER, monitoring.SERVICE, ROW.unit}
    assert {item.path for item in plan.files if item.role == "monitoring"} < set(off.monitoring.absent_files)
    assert plan.monitoring is not None and plan.monitoring.textfile in off.monitoring.absent_files
    assert set(found_of(off, facts).values()) == {"pending"}
    own = again(plan, facts, monitoring_node_exporter="none", monitoring_textfile_directory="/srv/textfiles")
    assert own.monitoring is not None
    assert own.monitoring.absent_files == (monitoring.drop_in(ROW.unit),)
    assert own.monitoring.absent_units == (ROW.unit,)
    # A host that never had any of it has nothing to remove.
    assert make_plan().monitoring is None


# --- what the host writes -----------------------------------------------------------------------------------------------------

SETTINGS = {"interval_s": 60, "card_ids": [row.pci_id for row in CATALOG.gpus], "output": "x"}


def document(**changes: Any) -> dict[str, Any]:
    """A probe's document of a host with a card on which a plan was applied."""
    facts: dict[str, Any] = json.loads(monitored(decided()).model_dump_json(by_alias=True))
    facts["gpus"] = [CARD]
    facts["nvidia"] = {
        "module_version": "535.309.01",
        "library_version": "535.309.01",
        "on_disk_module_version": "535.309.01",
        "smi": {"status": "ok", "mismatch": False},
    }
    facts["kernel_log"] = {"seen": True, "xids": [{"pci_address": "0000:06:00.0", "code": 48, "count": 2, "last_s": 100.0}]}
    applied = facts["host_json"]["document"]
    applied["cards"] = ["0000:06:00.0"]
    applied["driver"] = {"branch": "535", "packages": ["nvidia-driver"]}
    facts["packages"]["installed"]["nvidia-driver"] = "535.309.01-1"
    applied["digest"] = host_script.seal(applied)
    return {**facts, **changes}


def series(facts: Mapping[str, Any], state_dir: Path = Path("/nonexistent")) -> dict[str, float]:
    text = host_script.to_text(host_script.samples(dict(facts), SETTINGS, 1000.25, state_dir))
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in text.splitlines() if not line.startswith("#")}


def test_a_healthy_host_shows_no_difference() -> None:
    found = series(document())
    assert found["v100ctl_drift_differences"] == 0
    assert found["v100ctl_metrics_timestamp_seconds"] == 1000.25
    assert (found["v100ctl_cards_expected"], found["v100ctl_cards_present"]) == (1, 1)
    assert (found["v100ctl_driver_mismatch"], found["v100ctl_driver_reboot_pending"]) == (0, 0)
    assert found['v100ctl_gpu_xids{pci_address="0000:06:00.0",uuid="GPU-1",code="48"}'] == 2
    labels = '{pci_address="0000:06:00.0",uuid="GPU-1"'
    assert found[f'v100ctl_gpu_throttled{labels},reason="hw_thermal_slowdown"}}'] == 1
    assert found[f'v100ctl_gpu_throttled{labels},reason="sw_power_cap"}}'] == 0
    assert found[f"v100ctl_gpu_sm_clock_hertz{labels}}}"] == 1.53e9
    assert found[f'v100ctl_gpu_retired_pages{labels},cause="single_bit"}}'] == 2
    assert found['v100ctl_unit_active{unit="v100-chat.service",instance_name="chat"}'] == 1
    assert found[f'v100ctl_unit_active{{unit="{monitoring.TIMER}",instance_name=""}}'] == 1
    assert not [name for name in found if name.startswith(("v100ctl_card_missing", "v100ctl_drift{"))]


def test_the_reasons_are_those_of_the_probe() -> None:
    assert set(host_script.THROTTLE_REASONS) == {name for _, name in probe_script.SMI_REASONS}


@pytest.mark.parametrize(
    ("nvidia", "mismatch", "pending"),
    [
        ({"module_version": "535.1.1", "library_version": "535.2.2", "on_disk_module_version": "535.2.2"}, 1, 1),
        ({"module_version": "535.1.1", "library_version": "535.1.1", "on_disk_module_version": "535.2.2"}, 0, 1),
        ({"module_version": "", "library_version": "535.2.2", "on_disk_module_version": "535.2.2"}, 0, 0),
        ({"smi": {"status": "error", "mismatch": True}}, 1, 0),
        ({}, 0, 0),
    ],
)
def test_versions_of_the_driver(nvidia: dict[str, Any], mismatch: int, pending: int) -> None:
    found = series(document(nvidia=nvidia))
    assert (found["v100ctl_driver_mismatch"], found["v100ctl_driver_reboot_pending"]) == (mismatch, pending)


def test_cards_that_are_gone_or_have_moved() -> None:
    gone = series(document(gpus=[]))
    assert gone["v100ctl_cards_present"] == 0
    assert gone['v100ctl_card_missing{pci_address="0000:06:00.0"}'] == 1
    moved = series(document(gpus=[{**CARD, "pci_address": "0000:07:00.0"}]))
    assert not [name for name in moved if name.startswith("v100ctl_card_missing")]
    fallen = series(document(gpus=[{"pci_address": "0000:06:00.0", "pci_id": "", "revision_ff": True, "link_width": 63}]))
    assert fallen['v100ctl_gpu_fallen_off{pci_address="0000:06:00.0",uuid=""}'] == 1
    assert fallen["v100ctl_cards_present"] == 0
    assert not [name for name in fallen if "link_width" in name]
    # A card of another kind is none of ours.
    assert series(document(gpus=[{**CARD, "pci_id": "10de:2330"}]))["v100ctl_cards_present"] == 0


def drift(facts: Mapping[str, Any]) -> set[str]:
    return {match[1] for name in series(facts) if (match := re.fullmatch(r'v100ctl_drift\{id="(.+)",layer="\w+"\}', name))}


def test_differences_have_the_audits_ids() -> None:
    plan = decided()
    base = monitored(plan).model_dump(by_alias=True)
    unit = "v100-chat.service"
    program = monitoring.PROGRAM
    changes: dict[str, dict[str, Any]] = {
        f"file.mode:{program}": {"files": merged(base["files"], {program: {"mode": "0777"}})},
        f"file.content:{program}": {"files": merged(base["files"], {program: {"sha256": "0" * 64}})},
        f"file.missing:{program}": {"files": {path: item for path, item in base["files"].items() if path != program}},
        f"unit.inactive:{unit}": {"units": merged(base["units"], {unit: {"active_state": "inactive"}})},
        f"unit.failed:{unit}": {"units": merged(base["units"], {unit: {"active_state": "failed"}})},
        f"unit.disabled:{unit}": {"units": merged(base["units"], {unit: {"unit_file_state": "disabled"}})},
        f"unit.masked:{unit}": {"units": merged(base["units"], {unit: {"unit_file_state": "masked"}})},
        f"unit.stale:{unit}": {"units": merged(base["units"], {unit: {"need_daemon_reload": True}})},
        "package.missing:libgomp1": {
            "packages": {"installed": {name: "1" for name in base["packages"]["installed"] if name != "libgomp1"}}
        },
        "process.stale:chat": {"processes": [{**item, "environ": {}} for item in base["processes"]]},
    }
    for identifier, change in changes.items():
        # Not merged: what was taken out has to stay out.
        facts = Facts.model_validate({**base, **change})
        host = json.loads(facts.model_dump_json(by_alias=True))
        assert drift(host) == {identifier}, identifier
        assert identifier in {item.id for item in compare(again(plan, facts), facts)}, identifier


def test_an_edited_record_shows() -> None:
    facts = document()
    facts["host_json"]["document"]["packages"] = []
    assert drift(facts) == {"file.content:/etc/v100ctl/host.json"}
    applied = facts["host_json"]["document"]
    assert host_script.seal(applied) == findings.seal(applied)
    assert drift(document(host_json={"document": None, "problem": "not JSON"})) == {"file.content:/etc/v100ctl/host.json"}
    assert drift(document(host_json={"document": None, "problem": ""})) == set()


def test_what_watchdog_and_nights_have_written(tmp_path: Path) -> None:
    (tmp_path / "chat.watchdog.json").write_text(
        json.dumps({"schema": "v100ctl/watchdog/1", "instance": "chat", "restarts_count": 3})
    )
    (tmp_path / "chat.nightly.json").write_text(
        json.dumps({"schema": "v100ctl/nightly/1", "instance": "chat", "outcome": "skipped", "ended_at_s": 77})
    )
    (tmp_path / "other.json").write_text("[")
    found = series(document(), tmp_path)
    assert found['v100ctl_watchdog_restarts_total{instance_name="chat"}'] == 3
    assert found['v100ctl_nightly_outcome{instance_name="chat",outcome="skipped"}'] == 1
    assert found['v100ctl_nightly_timestamp_seconds{instance_name="chat"}'] == 77


@pytest.mark.parametrize("facts", [{}, {"gpus": 3, "units": [], "host_json": {"document": []}, "nvidia": "x", "errors": 1}])
def test_whatever_the_probe_says_gives_metrics(facts: dict[str, Any]) -> None:
    found = series(facts)
    assert found["v100ctl_cards_present"] == 0
    assert found["v100ctl_drift_differences"] == 0


def test_hostile_names_stay_one_label() -> None:
    path = '/etc/x"} 1\nv100ctl_driver_mismatch 1\u202e\\' + "y" * 1000
    facts = document()
    facts["host_json"]["document"]["files"] = {path: {}}
    text = host_script.to_text(host_script.samples(facts, SETTINGS, 1.0, Path("/nonexistent")))
    (line,) = [line for line in text.splitlines() if line.startswith('v100ctl_drift{id="file.missing')]
    assert len(line) < 400 and line.endswith('layer="file"} 1')
    assert [line for line in text.splitlines() if line.startswith("v100ctl_driver_mismatch")] == ["v100ctl_driver_mismatch 0"]
    many = document()
    many["host_json"]["document"]["files"] = {f"/x/{number}": {} for number in range(1000)}
    assert len(drift(many)) == host_script.MAX_DRIFT
    assert series(many)["v100ctl_drift_differences"] > 1000


def test_each_series_comes_once_and_each_metric_has_its_type() -> None:
    text = host_script.to_text(host_script.samples(document(gpus=[CARD, CARD]), SETTINGS, 1.0))
    lines = [line.rpartition(" ")[0] for line in text.splitlines() if not line.startswith("#")]
    assert len(lines) == len(set(lines))
    typed = re.findall(r"^# TYPE (\S+) (gauge|counter)$", text, re.M)
    assert [name for name, _ in typed] == list(dict.fromkeys(line.partition("{")[0] for line in lines))
    assert all((kind == "counter") == name.endswith("_total") for name, kind in typed)


def test_a_file_is_written_whole_and_through_no_link(tmp_path: Path) -> None:
    folder = tmp_path / "textfiles"
    folder.mkdir()
    target = folder / "v100ctl.prom"
    host_script.write_whole(target, "a 1\n")
    host_script.write_whole(target, "a 2\n")
    assert target.read_text() == "a 2\n"
    assert stat.S_IMODE(target.stat().st_mode) == 0o644
    assert [path.name for path in folder.iterdir()] == ["v100ctl.prom"]
    (tmp_path / "link").symlink_to(folder)
    with pytest.raises(OSError):
        host_script.write_whole(tmp_path / "link" / "v100ctl.prom", "a 3\n")
    # What lies at the name is replaced, not what it points to.
    target.unlink()
    target.symlink_to(tmp_path / "elsewhere")
    host_script.write_whole(target, "a 4\n")
    assert not target.is_symlink() and not (tmp_path / "elsewhere").exists()


def test_the_program_says_why_it_wrote_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(host_script, "SETTINGS", tmp_path / "none.json")
    assert host_script.main() == 1
    assert "says not where to write" in capsys.readouterr().err
    probe = tmp_path / "probe.py"
    probe.write_text("import sys; sys.exit('no')")
    with pytest.raises(OSError, match="ended with 1: no"):
        host_script.ask_probe(probe)
    probe.write_text("print('{\"a\": 1}')")
    assert host_script.ask_probe(probe) == {"a": 1}


# --- names --------------------------------------------------------------------------------------------------------------------


def names_in(expression: str) -> set[str]:
    """The metrics of an expression: words that are neither functions, labels, nor values."""
    bare = re.sub(r'"(?:[^"\\]|\\.)*"', "", expression)
    bare = re.sub(r"\{[^}]*\}|\[[^\]]*\]|\b(?:by|on|without|ignoring|group_left)\s*\([^)]*\)", "", bare)
    words = {match[1]: match[2] for match in re.finditer(r"([A-Za-z_:][\w:]*)\s*(\(?)", bare)}
    return {word for word, bracket in words.items() if not bracket and word not in ("or", "and", "unless", "by", "on")}


def expressions() -> Iterator[tuple[str, str]]:
    for alert in alerts(audit_stale_s=3600):
        yield alert.name, alert.expression
    for panel in json.loads(render_dashboard(CATALOG))["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]


def test_rules_and_dashboard_use_no_other_names() -> None:
    known = known_names(CATALOG)
    used = {name: where for where, expression in expressions() for name in names_in(expression)}
    assert {name: where for name, where in used.items() if name not in known} == {}
    assert len(used) > 30
    assert names_in('sum(rate(no_such_metric{a="b"}[5m])) by (host) > 0 unless on (host) other') == {"no_such_metric", "other"}


def test_every_name_is_really_written(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps({"schema": "v100ctl/watchdog/1", "instance": "chat"}))
    (tmp_path / "b.json").write_text(json.dumps({"schema": "v100ctl/nightly/1", "instance": "chat"}))
    facts = document()
    facts["host_json"]["document"]["cards"].append("0000:09:00.0")
    written = {name.partition("{")[0] for name in series(facts, tmp_path)}
    assert written == set(host_script.METRICS)
    finding = findings.Finding("file.mode:/x", "drifted", "file", "gateway", "a", "b", "error", "c")
    text = to_prometheus(AuditReport({"h1": HostAudit("drift", (finding,), 12.0)}), now_s=1.0)
    assert {line.split("{")[0].split(" ")[0] for line in text.splitlines() if not line.startswith("#")} == set(AUDIT_METRICS)


def test_labels_in_rules_are_those_that_are_written() -> None:
    facts = document()
    facts["host_json"]["document"]["cards"].append("0000:09:00.0")
    labels = {match[1] for name in series(facts) for match in re.finditer(r'[{,](\w+)="', name)} | {
        "host",
        "job",
        "severity",
        "status",
        "kind",
        "layer",
        "id",
    }
    for alert in alerts(audit_stale_s=3600):
        asked = set(re.findall(r'[{,](\w+)(?:=~?|!~?=?|!=)"', alert.expression)) | set(
            re.findall(r"\$labels\.(\w+)", alert.summary)
        )
        assert asked <= labels, alert.name


def test_rules_are_a_file_of_prometheus() -> None:
    (group,) = yaml.safe_load(render_rules(audit_stale_s=7200))["groups"]
    rules = {rule["alert"]: rule for rule in group["rules"]}
    assert len(rules) == len(group["rules"]) > 20
    assert all(set(rule) == {"alert", "expr", "for", "labels", "annotations"} for rule in rules.values())
    assert rules["V100AuditStale"]["expr"].endswith("> 7200")
    # What a program brings about by itself is no alarm; what the card does is.
    assert '"13|31|43|45|69"' in rules["V100Xid"]["expr"]


def test_the_dashboard_can_be_imported() -> None:
    board = json.loads(render_dashboard(CATALOG))
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    places = set()
    for panel in panels:
        grid = panel["gridPos"]
        cells = {(x, y) for x in range(grid["x"], grid["x"] + grid["w"]) for y in range(grid["y"], grid["y"] + grid["h"])}
        assert not cells & places and grid["x"] + grid["w"] <= 24
        places |= cells
    assert all(panel["datasource"]["uid"] == "${datasource}" for panel in panels if panel["type"] != "row")
    assert {variable["name"] for variable in board["templating"]["list"]} == {"datasource", "host"}


# --- where metrics are --------------------------------------------------------------------------------------------------------


def host(name: str, address: str, instance: dict[str, Any] | None = None, **variables: Any) -> tuple[dict[str, Any], HostConfig]:
    chat = {"model": MODEL, "listen": address, **(instance or {})}
    config = parse_config(
        name,
        {
            "llama_cpp_backend": "cpu",
            "llm_server_allow_unauthenticated": True,
            "monitoring_enabled": True,
            "monitoring_listen": address,
            "llm_server_instances": {"chat": chat},
            **variables,
        },
    )
    return {"ansible_host": address}, config


def jobs(hosts: dict[str, tuple[dict[str, Any], HostConfig]]) -> dict[str, dict[str, Any]]:
    return {job["job_name"]: job for job in scrape_configs(hosts, CATALOG, keys_folder="/etc/keys/")}


def test_one_job_for_exporters_and_one_for_each_name() -> None:
    found = jobs(
        {
            "a": host("a", "10.0.0.1"),
            "b": host("b", "10.0.0.2", monitoring_dcgm=True),
            "c": host("c", "10.0.0.3", monitoring_enabled=False),
        }
    )
    assert list(found) == ["v100ctl-node", "v100ctl-dcgm", "v100ctl-engine-chat"]
    targets = [item["targets"] for item in found["v100ctl-node"]["static_configs"]]
    assert targets == [["10.0.0.1:9100"], ["10.0.0.2:9100"]]
    assert found["v100ctl-dcgm"]["static_configs"] == [{"targets": ["10.0.0.2:9400"], "labels": {"host": "b"}}]
    engine = found["v100ctl-engine-chat"]
    assert [item["labels"]["host"] for item in engine["static_configs"]] == ["a", "b", "c"]
    assert "authorization" not in engine and engine["metrics_path"] == "/metrics"


def test_keys_are_named_by_their_file() -> None:
    hosts = {
        "a": host("a", "10.0.0.1", {"api_keys": [KEY, "another-key-of-some-length"]}),
        "b": host("b", "10.0.0.2", {"api_keys": [KEY]}),
    }
    job = jobs(hosts)["v100ctl-engine-chat"]
    assert job["authorization"] == {"credentials_file": "/etc/keys/chat.key"}
    text = render_prometheus(hosts, CATALOG, keys_folder="/etc/keys", rule_files=["r.yml"])
    assert KEY not in text and KEY not in repr(engines_of(hosts, CATALOG))
    assert yaml.safe_load(text)["rule_files"] == ["r.yml"]
    # Two that differ are two jobs and two files.
    hosts["b"] = host("b", "10.0.0.2", {"api_keys": ["another-key-of-some-length"]})
    found = jobs(hosts)
    assert found["v100ctl-engine-chat-a"]["authorization"] == {"credentials_file": "/etc/keys/chat-a.key"}
    assert found["v100ctl-engine-chat-b"]["authorization"] == {"credentials_file": "/etc/keys/chat-b.key"}


def test_servers_without_metrics_are_left_out() -> None:
    assert list(jobs({"a": host("a", "10.0.0.1", {"settings": {"metrics": False}})})) == ["v100ctl-node"]
    assert unreachable_of({"a": host("a", "10.0.0.1")}, CATALOG) == []
    assert len(unreachable_of({"a": host("a", "127.0.0.1")}, CATALOG)) == 2


INVENTORY = f"""
all:
  vars: {{llama_cpp_backend: cpu, monitoring_enabled: true, monitoring_listen: 10.0.0.1}}
  hosts:
    a:
      ansible_host: 10.0.0.1
      llm_server_instances:
        chat: {{model: {{path: /m.gguf, sha256: "{"ab" * 32}"}}, listen: 10.0.0.1, api_keys: [{KEY}]}}
"""


def run(*arguments: str) -> str:
    result = CliRunner().invoke(cli, ["monitoring", *arguments], standalone_mode=False)
    if result.exception is not None:
        raise result.exception
    return result.output


def test_the_command(tmp_path: Path) -> None:
    inventory = tmp_path / "hosts.yml"
    inventory.write_text(INVENTORY)
    printed = run("prometheus", "-i", str(inventory), "--keys-folder", str(tmp_path / "keys"))
    path = yaml.safe_load(printed)["scrape_configs"][1]["authorization"]["credentials_file"]
    assert KEY not in printed
    assert KEY not in run("keys", "-i", str(inventory), str(tmp_path / "keys"))
    assert Path(path).read_text() == f"{KEY}\n"
    assert stat.S_IMODE(Path(path).stat().st_mode) == 0o600
    assert stat.S_IMODE(Path(path).parent.stat().st_mode) == 0o700
    assert "groups:" in run("rules")
    assert json.loads(run("dashboard"))["uid"] == "v100ctl"
    units = run("audit-timer", "-i", str(inventory), "--interval", "600")
    assert f"--inventory {inventory}" in units and "OnUnitActiveSec=600s" in units
    with pytest.raises(Exception, match="nobody to ask"):
        run("audit-timer", "-i", str(inventory), "-K")


def test_the_audits_units() -> None:
    service, timer = audit_units(
        ["/usr/bin/python3", "-m", "v100ctl", "audit"],
        user="ops",
        home="/home/ops",
        folder=Path("/srv/my fleet"),
        textfile_directory="/srv/textfiles",
        interval_s=900,
        units_dir="/etc/systemd/system",
    )
    assert "User=ops\nEnvironment=HOME=/home/ops\n" in service.content
    assert "--output prometheus:/var/lib/v100ctl-audit/v100ctl_audit.prom\n" in service.content
    assert "SuccessExitStatus=2\n" in service.content
    assert service.content.index("/usr/bin/cp") < service.content.index("/usr/bin/mv")
    assert timer.path.endswith("/v100ctl-audit.timer")
