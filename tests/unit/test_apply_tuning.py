"""The program that sets cards and processors, with a stand-in for `nvidia-smi` that remembers what it was told."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.unit.test_fake_v100 import Host as FakeHost
from v100ctl.lab.gpu import FakeCards, FakeDriver

ROOT = Path(__file__).resolve().parents[2]
NVIDIA_SMI = ROOT / "molecule/gpu_tuning/files/nvidia_smi.py"
CARD = "0000:06:00.0"


def _module() -> ModuleType:
    spec = importlib.util.spec_from_file_location("apply_tuning", ROOT / "roles/gpu_tuning/files/apply_tuning.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


apply_tuning = _module()


class Host:
    """A host with one card and two processors."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.state = root / "state.json"
        self.devices = root / "cpu"
        for number in (0, 1):
            folder = self.devices / f"cpu{number}/cpufreq"
            folder.mkdir(parents=True)
            (folder / "scaling_governor").write_text("powersave\n")
        self.set(persistence="Disabled", power="300.00", clocks=["877", "1290"], ecc=["Enabled", "Enabled"], mode="Default")

    def set(self, **values: Any) -> None:
        self.state.write_text(json.dumps({**(json.loads(self.state.read_text()) if self.state.exists() else {}), **values}))

    def get(self, name: str) -> Any:
        return json.loads(self.state.read_text()).get(name)

    def calls(self) -> list[str]:
        return list(json.loads(self.state.read_text()).get("calls", []))

    def apply(self, settings: dict[str, Any], *, check: bool = False) -> dict[str, list[str]]:
        report: dict[str, list[str]] = apply_tuning.apply(settings, check, str(self.devices))
        return report


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    found = Host(tmp_path)
    program = tmp_path / "bin/nvidia-smi"
    program.parent.mkdir()
    program.write_text(NVIDIA_SMI.read_text(encoding="utf-8"))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    monkeypatch.setenv("STAND_IN_STATE", str(found.state))
    return found


ALL = {
    "persistence": True,
    "cpu_governor": "performance",
    "cards": {
        CARD: {
            "power_limit_w": 250,
            "application_clocks_mhz": [877, 1380],
            "compute_mode": "exclusive_process",
            "ecc": "disabled",
        }
    },
}


def test_everything_is_set_and_a_second_run_sets_nothing(host: Host) -> None:
    report = host.apply(ALL)
    assert report["problems"] == []
    assert len(report["changed"]) == 7
    assert report["pending"] == [f"{CARD}: ECC disabled"]
    assert (host.get("persistence"), host.get("power"), host.get("clocks")) == ("Enabled", "250.00", ["877", "1380"])
    assert (host.get("mode"), host.get("ecc")) == ("Exclusive_Process", ["Enabled", "Disabled"])
    assert (host.devices / "cpu1/cpufreq/scaling_governor").read_text() == "performance\n"
    again = host.apply(ALL)
    assert (again["changed"], again["problems"], again["pending"]) == ([], [], [f"{CARD}: ECC disabled"])


def test_only_what_differs_is_set(host: Host) -> None:
    host.apply(ALL)
    host.set(power="300.00", calls=[])
    assert host.apply(ALL)["changed"] == [f"{CARD}: power limit 250 W"]
    assert [call for call in host.calls() if "--query" not in call] == [f"-i {CARD} -pl 250"]


def test_a_dry_run_sets_nothing(host: Host) -> None:
    before = host.get("power")
    report = host.apply(ALL, check=True)
    assert (len(report["changed"]), report["problems"]) == (7, [])
    assert host.get("power") == before
    assert all("--query" in call for call in host.calls())
    assert (host.devices / "cpu0/cpufreq/scaling_governor").read_text() == "powersave\n"


def test_what_is_not_asked_for_is_left_alone(host: Host) -> None:
    report = host.apply({"persistence": False, "cpu_governor": "", "cards": {CARD: {}}})
    assert report == {"cards": [CARD], "changed": [], "pending": [], "problems": []}


def test_a_limit_that_the_card_refuses(host: Host) -> None:
    report = host.apply({"cards": {CARD: {"power_limit_w": 500}}})
    (problem,) = report["problems"]
    assert problem.startswith(f"{CARD}: `nvidia-smi -i {CARD} -pl 500` failed: ")
    assert "not a valid power limit" in problem


def test_a_setting_that_does_not_stick(host: Host) -> None:
    host.set(deaf=True)
    assert host.apply({"cards": {CARD: {"power_limit_w": 250}}})["problems"] == [
        f"{CARD}: power limit 250 W was set and is not so"
    ]


def test_a_card_that_is_gone(host: Host) -> None:
    report = host.apply({"cards": {CARD: {}, "0000:07:00.0": {"power_limit_w": 250}}})
    assert report["problems"] == ["0000:07:00.0: the card does not answer"]


def test_a_driver_that_hangs(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apply_tuning, "LIMIT_S", 1)
    host.set(hangs=True)
    (problem,) = host.apply(ALL)["problems"]
    assert "gave no answer within 1 s: the driver hangs" in problem


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (9, "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver."),
        (6, "No devices were found"),
        (18, "Failed to initialize NVML: Driver/library version mismatch"),
    ],
)
def test_a_driver_that_comes_with_the_next_reboot(code: int, text: str, host: Host) -> None:
    host.set(fails=[code, text])
    assert host.apply({**ALL, "cpu_governor": ""}) == {"cards": [], "changed": [], "pending": [f"cards: {text}"], "problems": []}


def test_a_driver_that_fails_otherwise(host: Host) -> None:
    host.set(fails=[255, "Unable to determine the device handle for GPU"])
    (problem,) = host.apply(ALL)["problems"]
    assert "Unable to determine the device handle" in problem


def test_a_host_without_a_driver(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    report = host.apply({"persistence": True, "cards": {CARD: {"power_limit_w": 250}}})
    assert report == {"cards": [], "changed": [], "pending": [], "problems": []}


def test_the_program(host: Host, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = tmp_path / "settings.json"
    settings.write_text(json.dumps({"cards": {CARD: {"power_limit_w": 250}}}))
    assert apply_tuning.main(["--settings", str(settings)]) == 0
    assert json.loads(capsys.readouterr().out)["changed"] == [f"{CARD}: power limit 250 W"]
    assert apply_tuning.main(["--json", '{"cards": {"0000:ff:00.0": {}}}']) == 1
    assert apply_tuning.main(["--settings", str(tmp_path / "none.json")]) == 1
    assert "none.json" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "address"),
    [("00000000:06:00.0", "0000:06:00.0"), ("0000:AF:00.0", "0000:af:00.0"), (" 00000001:3B:00.0", "0001:3b:00.0")],
)
def test_addresses_as_the_kernel_spells_them(text: str, address: str) -> None:
    assert apply_tuning.pci_address(text) == address


@pytest.mark.parametrize("driver", ["535", "580"])
def test_on_the_labs_fake_cards(driver: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lab's `nvidia-smi` is held against real output, and refuses what it does not know."""
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setattr("os.mknod", lambda path, mode, device: Path(path).touch())
    fake = FakeHost(tmp_path, FakeCards.parse("2xV100-PCIE-16GB"), FakeDriver.parse(driver))

    def run(program: str, arguments: list[str]) -> str:
        code, output = fake.smi(*arguments)
        if code:
            raise apply_tuning.Problem(output)
        return output

    monkeypatch.setattr(apply_tuning, "run", run)
    monkeypatch.setattr(apply_tuning.shutil, "which", lambda name: f"/usr/bin/{name}")
    addresses = apply_tuning.apply({}, True)["cards"]
    assert len(addresses) == 2
    asked = {"power_limit_w": 200, "application_clocks_mhz": [877, 1380], "compute_mode": "exclusive_process", "ecc": "disabled"}
    settings = {"persistence": True, "cpu_governor": "", "cards": {address: asked for address in addresses}}
    first = apply_tuning.apply(settings, False)
    assert (first["problems"], len(first["changed"]), len(first["pending"])) == ([], 10, 2)
    second = apply_tuning.apply(settings, False)
    assert (second["problems"], second["changed"], len(second["pending"])) == ([], [], 2)
    wrong = {"cards": {addresses[0]: {"power_limit_w": 500}}}
    assert "not a valid power limit" in apply_tuning.apply(wrong, False)["problems"][0]
