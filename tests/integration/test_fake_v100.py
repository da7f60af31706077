"""Lab hosts that play machines with V100s: seen by the probe over SSH, judged by `v100ctl plan`, broken, restarted."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.device import shapes
from v100ctl.catalog import load_catalog
from v100ctl.facts import Facts, ProbeRequest
from v100ctl.lab.containers import put_file
from v100ctl.lab.gpu import FakeCards, FakeDriver, fault
from v100ctl.lab.hosts import LabHost, run_identity
from v100ctl.lab.image import ensure_image
from v100ctl.probe import probe_host
from v100ctl.probe.connection import Connection

from .hosts import ROOT, WriteInventory, on_host, v100ctl

if TYPE_CHECKING:
    from v100ctl.apply.reporter import Reporter
    from v100ctl.lab.hosts import Lab, RunningHost

MODEL_ON_HOST = "/srv/models/x.gguf"


def facts_of(host: RunningHost) -> Facts:
    """What the probe sees over SSH."""
    return probe_host(Connection.from_vars(host.name, host.variables()), ProbeRequest())


@pytest.fixture(scope="module")
def v100_host(lab: Lab, lab_reporter: Reporter, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningHost]:
    """Two V100-PCIE-16GB with driver 535; every test leaves it as it was."""
    name = f"test-{os.getpid()}-v100"
    made = LabHost(name, owner=run_identity(), cards=FakeCards.parse("2xV100-PCIE-16GB"), driver=FakeDriver.parse("535"))
    host = lab.up(made, ensure_image(lab.client, lab_reporter), lab_reporter)
    on_host(host, "mkdir -p /srv/models")
    model = tmp_path_factory.mktemp("model") / "x.gguf"
    shapes.write(shapes.MODELS["smallest"](), model)
    put_file(host.container, MODEL_ON_HOST, model.read_bytes(), mode=0o644)
    yield host
    lab.down(name)


def rules_of(host: RunningHost, inventory: WriteInventory) -> tuple[str, dict[str, str]]:
    """The verdict of `v100ctl plan` and its rules with their severities."""
    digest = on_host(host, f"sha256sum {MODEL_ON_HOST}").split()[0]
    instance = {
        "model": {"path": MODEL_ON_HOST, "sha256": digest},
        "gpus": [0, 1],
        "port": 8000,
        "settings": {"context_length": 1024},
    }
    path = inventory(host, variables={"llama_cpp_backend": "cuda", "llm_server_instances": {"chat": instance}})
    done = v100ctl("plan", "-i", path, "--json")
    planned = done.document["hosts"][host.name]
    return planned["verdict"], {rule["id"]: rule["severity"] for rule in planned["rules"]}


# --- what is seen -------------------------------------------------------------------------------------------------------------


def test_the_probe_sees_what_it_sees_on_a_real_host(v100_host: RunningHost) -> None:
    facts = facts_of(v100_host)
    assert facts.errors == {}
    document = ROOT / "tests/unit/plan/hosts/v100-pcie-16gb-debian-12-driver-535.json"
    known = Facts.model_validate_json(document.read_bytes())
    # Identifiers, and which groups the firmware made, are each machine's own; what the document does not say it cannot show.
    fields = known.gpus[0].model_fields_set - {"uuid", "iommu_group"}
    assert facts.gpus[0].model_dump(include=fields) == known.gpus[0].model_dump(include=fields)
    assert len(facts.gpus) == 2
    driver = known.nvidia.model_fields_set - {"smi"}
    assert facts.nvidia.model_dump(include=driver) == known.nvidia.model_dump(include=driver)
    assert facts.nvidia.smi.status == known.nvidia.smi.status
    packages = {name: version for name, version in facts.packages.installed.items() if "nvidia" in name or "cuda" in name}
    assert packages
    # Of another source there, with versions of their own.
    for name in packages.keys() - {"nvidia-modprobe", "nvidia-persistenced"}:
        assert packages[name] == known.packages.installed[name]


@pytest.mark.parametrize("half", [0, 1], ids=["first", "last"])
def test_every_kind_of_card_is_known(half: int, make_lab_host: Callable[..., RunningHost]) -> None:
    rows = load_catalog().gpus[half * 8 : half * 8 + 8]
    driver = FakeDriver.parse("580" if half else "535")
    host = make_lab_host(cards=FakeCards(tuple(row.pci_id for row in rows)), driver=driver)
    facts = facts_of(host)
    assert facts.errors == {}
    assert [gpu.pci_id for gpu in facts.gpus] == [row.pci_id for row in rows]
    assert [gpu.name for gpu in facts.gpus] == [row.name for row in rows]
    assert [gpu.memory_total_bytes for gpu in facts.gpus] == [row.memory_total_bytes for row in rows]
    assert [gpu.index for gpu in facts.gpus] == list(range(len(rows)))
    for gpu in facts.gpus:
        assert (gpu.kernel_driver, gpu.link_width, gpu.link_speed_gts, gpu.persistence_mode) == ("nvidia", 16, 8.0, "enabled")
        assert gpu.bar1_bytes == gpu.memory_total_bytes
    assert facts.nvidia.module_version == driver.version
    assert facts.nvidia.cuda_version == ("13.0" if half else "12.2")
    assert bool(facts.nvidia.nvswitch_count) == any(row.nvswitch for row in rows)


def test_a_host_without_a_driver_and_one_without_a_card(make_v100_host: Callable[..., RunningHost]) -> None:
    host = make_v100_host("none", driver="none")
    facts = facts_of(host)
    assert (facts.gpus, facts.nvidia.module_version, facts.nvidia.smi.status) == ((), "", "absent")
    assert facts.errors == {}


def test_a_host_like_this_is_planned_as_a_real_one(v100_host: RunningHost, lab_inventory: WriteInventory) -> None:
    verdict, rules = rules_of(v100_host, lab_inventory)
    assert verdict == "warn"
    assert rules["driver-kept"] == "info"
    # R535 is past its end; nothing else is to be said of this host.
    assert {name for name, severity in rules.items() if severity != "info"} == {"driver-end-of-life"}


def test_settings_are_kept_as_long_as_the_driver_keeps_a_card(v100_host: RunningHost) -> None:
    ask = "nvidia-smi --query-gpu=power.limit --format=csv,noheader,nounits"
    assert on_host(v100_host, "nvidia-smi -pl 180").count("was set to 180.00 W from 250.00 W") == 2
    assert on_host(v100_host, ask).split() == ["180.00", "180.00"]
    on_host(v100_host, "systemctl restart nvidia-persistenced; sleep 1")
    assert on_host(v100_host, ask).split() == ["250.00", "250.00"]


# --- what goes wrong ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "seen", "rule"),
    [
        ("no-driver", {"module_version": "", "on_disk_module_version": "", "status": "absent"}, "driver-kernel-unproven"),
        ("nouveau", {"module_version": "", "kernel_driver": "nouveau", "nouveau": True, "status": "error"}, "nouveau-loaded"),
        ("not-loaded", {"module_version": "", "on_disk_module_version": "535.309.01", "status": "error"}, ""),
        ("open-modules", {"module_flavour": "open", "kernel_driver": "", "status": "error"}, "driver-open-modules"),
        ("driver-mismatch", {"module_version": "535.54.03", "mismatch": True, "status": "error"}, "driver-library-mismatch"),
        ("wedged", {"module_version": "535.309.01", "status": "timeout"}, "driver-wedged"),
        ("fallen-off", {"revision_ff": True, "link_width": None, "status": "error"}, "gpu-fallen-off"),
        ("link-degraded", {"link_width": 8, "link_speed_gts": 2.5, "status": "ok"}, "gpu-link-degraded"),
        ("bar1-zero", {"bar1_bytes": 0, "kernel_driver": "", "status": "ok"}, "gpu-bar1-unassigned"),
        ("persistence-off", {"persistence_mode": "disabled", "status": "ok"}, ""),
    ],
)
def test_a_fault_shows_in_facts_and_plan(
    name: str,
    seen: dict[str, Any],
    rule: str,
    v100_host: RunningHost,
    lab_fault: Callable[..., None],
    lab_inventory: WriteInventory,
) -> None:
    lab_fault(v100_host, name)
    facts = facts_of(v100_host)
    found = {
        **facts.gpus[1].model_dump(),
        **facts.nvidia.model_dump(),
        **facts.nvidia.smi.model_dump(),
        "nouveau": facts.nouveau.loaded,
    }
    assert {key: found[key] for key in seen} == seen
    if rule:
        assert rule in rules_of(v100_host, lab_inventory)[1]
    if name == "fallen-off":
        log = on_host(v100_host, "cat /dev/kmsg")
        assert "NVRM: Xid (PCI:0000:5e:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus." in log
        assert on_host(v100_host, "nvidia-smi -i 0 -L").startswith("GPU 0: ")
    fault(v100_host, name, undo=True)
    mended = facts_of(v100_host)
    assert mended.nvidia.smi.status == "ok"
    assert [gpu.persistence_mode for gpu in mended.gpus] == ["enabled", "enabled"]


def test_a_hot_card_slows_down(v100_host: RunningHost, lab_fault: Callable[..., None]) -> None:
    lab_fault(v100_host, "throttled", card=0)
    fields = "clocks_event_reasons.hw_thermal_slowdown,temperature.gpu,clocks.sm"
    rows = on_host(v100_host, f"nvidia-smi --query-gpu={fields} --format=csv,noheader,nounits").splitlines()
    assert rows == ["Active, 88, 690", "Not Active, 34, 135"]


def test_a_wedged_driver_is_ended_by_sigkill_alone(v100_host: RunningHost, lab_fault: Callable[..., None]) -> None:
    lab_fault(v100_host, "wedged")
    # The shell itself says "Killed" on stderr, which may arrive before or after what the script prints.
    script = """
        exec 2>/dev/null
        nvidia-smi >/dev/null & pid=$!
        sleep 1; kill -TERM $pid; kill -INT $pid; sleep 0.5
        cut -d' ' -f3 /proc/$pid/stat
        kill -KILL $pid; wait $pid; echo $?
    """
    words = on_host(v100_host, script).split()
    assert (words[0], words[-1]) == ("D", "137")


def test_poisoned_memory_is_mended_by_loading_the_module_anew(v100_host: RunningHost, lab_fault: Callable[..., None]) -> None:
    on_host(v100_host, "fake-cuda-context")
    lab_fault(v100_host, "uvm-poisoned")
    code, output = v100_host.execute("/usr/local/bin/fake-cuda-context")
    assert (code, output) == (1, "CUDA error 999: unknown error\n")
    assert facts_of(v100_host).nvidia.smi.status == "ok"
    on_host(v100_host, "/usr/local/sbin/rmmod nvidia_uvm && /usr/local/sbin/modprobe nvidia_uvm && fake-cuda-context")


# --- restarting ---------------------------------------------------------------------------------------------------------------


def test_a_restart_loses_ssh_and_comes_back_with_another_boot_id(
    v100_host: RunningHost, lab_fault: Callable[..., None], lab_inventory: WriteInventory
) -> None:
    lab_fault(v100_host, "driver-mismatch")
    before = facts_of(v100_host)
    assert before.nvidia.smi.mismatch
    # As a role does it: over SSH, by Ansible's own module, which waits for another boot id.
    inventory = lab_inventory(v100_host)
    done = subprocess.run(
        ["ansible", "-i", str(inventory), v100_host.name, "-m", "ansible.builtin.reboot", "-a", "reboot_timeout=90"],
        env={**os.environ, "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg")},
        capture_output=True,
        text=True,
        check=False,
        timeout=180,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert '"rebooted": true' in done.stdout
    after = facts_of(v100_host)
    assert after.boot_id not in ("", before.boot_id)
    # What is loaded now is what was installed, and the daemon has started as it does at every boot.
    deadline_s = time.monotonic() + 20
    while facts_of(v100_host).gpus[0].persistence_mode != "enabled" and time.monotonic() < deadline_s:
        time.sleep(0.5)
    assert (after.nvidia.module_version, after.nvidia.smi.status) == ("535.309.01", "ok")
    assert facts_of(v100_host).gpus[0].persistence_mode == "enabled"


def test_nouveau_is_gone_once_it_is_blacklisted_and_the_host_restarts(
    v100_host: RunningHost, lab_fault: Callable[..., None], lab_reboot: Callable[[RunningHost], RunningHost]
) -> None:
    lab_fault(v100_host, "nouveau")
    assert facts_of(lab_reboot(v100_host)).nouveau.loaded
    on_host(v100_host, "echo 'blacklist nouveau' > /etc/modprobe.d/nouveau.conf")
    facts = facts_of(lab_reboot(v100_host))
    on_host(v100_host, "rm /etc/modprobe.d/nouveau.conf")
    assert (facts.nouveau.loaded, facts.nvidia.module_version) == (False, "535.309.01")


def test_what_is_installed_is_loaded_at_the_next_boot(
    make_v100_host: Callable[..., RunningHost], lab_reboot: Callable[[RunningHost], RunningHost]
) -> None:
    host = make_v100_host(driver="535")
    on_host(host, "systemctl disable --now nvidia-persistenced; dpkg --purge --force-depends nvidia-kernel-dkms")
    # Removed from the disk, still in the kernel.
    facts = facts_of(host)
    assert (facts.nvidia.module_version, facts.nvidia.on_disk_module_version) == ("535.309.01", "")
    facts = facts_of(lab_reboot(host))
    assert (facts.nvidia.module_version, facts.nvidia.smi.status) == ("", "error")


def test_the_example_of_the_guide_works(tmp_path: Path) -> None:
    guide = (ROOT / "docs/lab.md").read_text(encoding="utf-8")
    # The guide has programs of other kinds too.
    (example,) = [text for text in re.findall(r"^```python\n(.*?)^```$", guide, re.S | re.M) if "\ndef test_" in text]
    (tmp_path / "test_example.py").write_text(example, encoding="utf-8")
    points = importlib.metadata.entry_points(group="pytest11")
    named = any(point.value == "v100ctl.lab.pytest_plugin" for point in points)
    argv = [sys.executable, "-m", "pytest", "-q", *([] if named else ["-p", "v100ctl.lab.pytest_plugin"]), str(tmp_path)]
    environment = {
        **os.environ,
        "XDG_STATE_HOME": str(tmp_path / "state"),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    done = subprocess.run(argv, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed" in done.stdout


# --- the command --------------------------------------------------------------------------------------------------------------


def test_the_command_line_makes_breaks_and_removes_hosts(tmp_path: Path, lab: Lab) -> None:
    state = {"XDG_STATE_HOME": str(tmp_path / "state")}
    names = [f"lab-{os.getpid()}-{number}" for number in (1, 2)]
    inventory = tmp_path / "hosts.yml"
    try:
        made = v100ctl("lab", "up", *names, "--cards", "4xV100-SXM2-16GB", "-o", inventory, environment=state)
        assert made.code == 0, made.err
        listed = json.loads(v100ctl("lab", "list", "--json", environment=state).out)
        assert {row["name"]: row["cards"] for row in listed} == dict.fromkeys(names, "4xV100-SXM2-16GB")
        cards = v100ctl("lab", "ssh", names[0], "nvidia-smi", "-L", environment=state)
        assert cards.out.count("Tesla V100-SXM2-16GB") == 4
        assert v100ctl("lab", "fault", "driver-mismatch", names[1], environment=state).code == 0
        broken = v100ctl("lab", "ssh", names[1], "nvidia-smi", environment=state)
        assert (broken.code, broken.out.splitlines()[0]) == (18, "Failed to initialize NVML: Driver/library version mismatch")
        planned = v100ctl("plan", "-i", inventory, "--json", environment=state)
        assert set(planned.document["hosts"]) == set(names)
        assert {host["verdict"] for host in planned.document["hosts"].values()} == {"ok"}
        wrong = v100ctl("lab", "fault", "rust", names[0], environment=state)
        assert wrong.code == 1
        assert "rust is no fault" in wrong.err
    finally:
        removed = v100ctl("lab", "down", environment=state)
    assert removed.code == 0
    assert json.loads(v100ctl("lab", "list", "--json", environment=state).out) == []
