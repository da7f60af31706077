"""Settings of cards, processors and Docker: what lands on a host, and what differs there."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.factory import AS_OF, MODEL, merge
from v100ctl.compare import compare
from v100ctl.facts import Facts
from v100ctl.fleet import parse_config
from v100ctl.plan import HostPlan, plan, probe_request
from v100ctl.plan.tuning import DOCKER_CONFIG, PROGRAM, SETTINGS, UNIT, UNIT_PATH, merged_docker_config

ROOT = Path(__file__).resolve().parents[2]
HOST = json.loads((ROOT / "tests/unit/plan/hosts/v100-pcie-32gb-x2-ubuntu-24.04-driver-580.json").read_text(encoding="utf-8"))
ULIMITS = {"memlock": -1, "stack": 67108864}
#: An undisturbed host: our unit at work, the daemon running.
UNITS = {
    UNIT: {"load_state": "loaded", "active_state": "active", "unit_file_state": "enabled"},
    "nvidia-persistenced.service": {"load_state": "loaded", "active_state": "active", "unit_file_state": "enabled"},
}


def facts(card: dict[str, Any] | None = None, **changes: Any) -> Facts:
    """The host with both cards changed."""
    cards = [{**gpu, "persistence_mode": "enabled", **(card or {})} for gpu in HOST["gpus"]]
    return Facts.model_validate(merge({**HOST, "gpus": cards, "units": UNITS}, changes))


def decide(found: Facts | None = None, **variables: Any) -> HostPlan:
    """The plan of that host with its first card in use."""
    instances = {"chat": {"model": MODEL, "gpus": [0]}}
    config = parse_config("h1", {"llama_cpp_backend": "cuda", "llm_server_instances": instances, **variables})
    return plan("h1", config, found or facts(), as_of=AS_OF)


def file(decided: HostPlan, path: str) -> str:
    """What is in a planned file."""
    return next(item.content for item in decided.files if item.path == path)


def findings(decided: HostPlan, found: Facts) -> dict[str, str]:
    """What differs on cards and their units: id without the card -> kind."""
    return {
        item.id.partition(":GPU-")[0]: item.kind
        for item in compare(decided, found)
        if item.role == "gpu_tuning" and item.id.startswith("gpu.")
    }


def test_what_is_not_asked_for_is_left_alone() -> None:
    decided = decide()
    settings = json.loads(file(decided, SETTINGS))
    assert settings["persistence"] is True
    assert (settings["cpu_governor"], list(settings["cards"].values())) == ("", [{}, {}])
    assert findings(decided, facts()) == {}


def test_what_is_asked_for() -> None:
    decided = decide(
        gpu_tuning_power_limit_w=200,
        gpu_tuning_application_clocks_mhz="877,1380",
        gpu_tuning_ecc="enabled",
        gpu_tuning_compute_mode="exclusive_process",
        gpu_tuning_cpu_governor="performance",
    )
    settings = json.loads(file(decided, SETTINGS))
    assert settings["cpu_governor"] == "performance"
    assert sorted(settings["cards"]) == sorted(gpu["pci_address"] for gpu in HOST["gpus"])
    for card in settings["cards"].values():
        assert card == {
            "power_limit_w": 200,
            "application_clocks_mhz": [877, 1380],
            "ecc": "enabled",
            "compute_mode": "exclusive_process",
        }


def test_the_unit_runs_the_program_that_is_written() -> None:
    decided = decide()
    assert f"{PROGRAM} --settings {SETTINGS}" in file(decided, UNIT_PATH)
    assert file(decided, PROGRAM) == (ROOT / "roles/gpu_tuning/files/apply_tuning.py").read_text(encoding="utf-8")
    # A unit named as instances are would be taken for one, and removed.
    assert not UNIT.startswith("v100-")


def test_a_host_that_computes_on_no_card_is_not_tuned() -> None:
    config = parse_config("h1", {"llama_cpp_backend": "cpu", "llm_server_instances": {"chat": {"model": MODEL}}})
    decided = plan("h1", config, facts(), as_of=AS_OF)
    assert decided.tuning is None
    assert not [item for item in decided.files if item.role == "gpu_tuning"]
    assert findings(decided, facts()) == {}


def test_cards_of_others_are_left_alone() -> None:
    cards = [HOST["gpus"][0], {**HOST["gpus"][1], "kernel_driver": "vfio-pci"}]
    decided = decide(Facts.model_validate({**HOST, "gpus": cards}), gpu_tuning_power_limit_w=200)
    assert decided.tuning is not None
    assert [card.pci_address for card in decided.tuning.cards] == [HOST["gpus"][0]["pci_address"]]


@pytest.mark.parametrize(
    ("variables", "card", "expected"),
    [
        ({}, {"persistence_mode": "disabled"}, "gpu.persistence"),
        ({"gpu_tuning_power_limit_w": 200}, {"power_limit_w": 250.0}, "gpu.power-limit"),
        (
            {"gpu_tuning_application_clocks_mhz": "877,1380"},
            {"application_memory_clock_mhz": 877, "application_graphics_clock_mhz": 1245},
            "gpu.application-clocks",
        ),
        ({"gpu_tuning_ecc": "enabled"}, {"ecc_mode": "disabled"}, "gpu.ecc"),
        ({"gpu_tuning_compute_mode": "exclusive_process"}, {"compute_mode": "default"}, "gpu.compute-mode"),
    ],
)
def test_a_card_that_differs(variables: dict[str, Any], card: dict[str, Any], expected: str) -> None:
    decided = decide(**variables)
    assert findings(decided, facts(card)) == {expected: "pending"}
    (settings,) = (file for file in decided.files if file.path == SETTINGS)
    for sha256, kind in ((hashlib.sha256(settings.content.encode()).hexdigest(), "drifted"), ("ab" * 32, "pending")):
        applied = {"document": {"files": {SETTINGS: {"sha256": sha256}}}, "problem": ""}
        assert findings(decided, facts(card, host_json=applied)) == {expected: kind}


def test_what_a_driver_does_not_tell_is_no_difference() -> None:
    decided = decide(
        gpu_tuning_power_limit_w=200, gpu_tuning_application_clocks_mhz="877,1380", gpu_tuning_compute_mode="default"
    )
    assert findings(decided, facts()) == {}
    assert findings(decided, facts({"power_limit_w": 200.0, "compute_mode": "default"})) == {}


@pytest.mark.parametrize(
    ("unit", "state", "expected"),
    [
        ("nvidia-persistenced.service", {"load_state": "masked", "unit_file_state": "masked"}, "gpu.unit-masked"),
        ("nvidia-persistenced.service", {"unit_file_state": "disabled"}, "gpu.unit-disabled"),
        ("nvidia-persistenced.service", {"active_state": "inactive"}, "gpu.unit-inactive"),
        (UNIT, {"unit_file_state": "disabled"}, "gpu.unit-disabled"),
        (UNIT, {"active_state": "failed", "result": "exit-code"}, "gpu.unit-failed"),
    ],
)
def test_a_unit_that_differs(unit: str, state: dict[str, str], expected: str) -> None:
    assert list(findings(decide(), facts(units={unit: state}))) == [f"{expected}:{unit}"]


def test_persistence_that_nobody_wants_is_not_missed() -> None:
    decided = decide(gpu_tuning_persistence=False)
    found = facts({"persistence_mode": "disabled"}, units={"nvidia-persistenced.service": {"unit_file_state": "disabled"}})
    assert findings(decided, found) == {}


def test_the_governor() -> None:
    decided = decide(gpu_tuning_cpu_governor="performance")
    assert findings(decided, facts(cpu={"governors": ["performance"]})) == {}
    assert findings(decided, facts(cpu={"governors": ["performance", "powersave"]})) == {"gpu.cpu-governor": "pending"}
    assert findings(decided, facts()) == {}


def test_docker_keeps_what_it_has() -> None:
    before = '{\n  "live-restore": true,\n  "default-ulimits": {"nofile": {"Name": "nofile", "Hard": 5, "Soft": 5}}\n}\n'
    after = json.loads(merged_docker_config(before, ULIMITS))
    assert after == {
        "live-restore": True,
        "default-ulimits": {
            "nofile": {"Name": "nofile", "Hard": 5, "Soft": 5},
            "memlock": {"Name": "memlock", "Hard": -1, "Soft": -1},
            "stack": {"Name": "stack", "Hard": 67108864, "Soft": 67108864},
        },
    }


@pytest.mark.parametrize("content", ["[]", '"text"', "3", "{", '{"default-ulimits": []}', "null"])
def test_docker_settings_that_are_none(content: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        merged_docker_config(content, ULIMITS)


@given(st.dictionaries(st.text(), st.recursive(st.none() | st.booleans() | st.integers() | st.text(), st.lists)))
def test_docker_settings_settle(document: dict[str, Any]) -> None:
    document.pop("default-ulimits", None)
    once = merged_docker_config(json.dumps(document), ULIMITS)
    assert merged_docker_config(once, ULIMITS) == once
    assert {name: value for name, value in json.loads(once).items() if name != "default-ulimits"} == document


def test_docker_where_it_is() -> None:
    unit = {"docker.service": {"load_state": "loaded", "active_state": "active", "unit_file_state": "enabled"}}
    decided = decide(facts(units=unit))
    (written,) = [item for item in decided.files if item.path == DOCKER_CONFIG]
    assert written.secret
    assert json.loads(written.content)["default-ulimits"]["memlock"]["Hard"] == -1
    assert [item for item in decide().files if item.path == DOCKER_CONFIG] == []
    assert [item for item in decide(facts(units=unit), gpu_tuning_docker_ulimits={}).files if item.path == DOCKER_CONFIG] == []


def test_docker_keeps_its_owner_and_mode() -> None:
    unit = {"docker.service": {"load_state": "loaded"}}
    found = {DOCKER_CONFIG: {"kind": "file", "mode": "0664", "owner": "root", "group": "docker", "content": "{}"}}
    (written,) = [item for item in decide(facts(units=unit, files=found)).files if item.path == DOCKER_CONFIG]
    assert (written.mode, written.owner, written.group) == ("0664", "root", "docker")


def test_the_probe_is_asked_for_the_files() -> None:
    config = parse_config("h1", {"llama_cpp_backend": "cuda", "llm_server_instances": {"chat": {"model": MODEL}}})
    assert {UNIT_PATH, PROGRAM, DOCKER_CONFIG} <= set(probe_request(config).files)


def test_the_decision_is_plain_data_for_the_role() -> None:
    variables = decide(gpu_tuning_application_clocks_mhz="877,1380").to_role_variables()
    assert variables["tuning"]["cards"][0]["application_clocks_mhz"] == [877, 1380]
    assert dataclasses.is_dataclass(decide().tuning)
