"""Debian 11 (Python 3.9, systemd 247, HAProxy 2.2) and 13 (Python 3.13, systemd 257, HAProxy 3.0), as far as they differ from 12.

The tests of one release share a host and run in order. Units alone are in `test_units.py`, drivers in `test_nvidia_driver.py`.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.device import shapes
from v100ctl import practice
from v100ctl.lab.containers import put_file
from v100ctl.lab.gpu import FakeCards, FakeDriver
from v100ctl.lab.hosts import LabHost, run_identity, write_inventory
from v100ctl.lab.image import ensure_image
from v100ctl.plan import gateway, upkeep

from .hosts import ROOT, on_host, v100ctl
from .test_external_engine import KERNEL, MODEL_ON_HOST, make_archive

if TYPE_CHECKING:
    from v100ctl.apply.reporter import Reporter
    from v100ctl.lab.hosts import Lab, RunningHost

pytestmark = pytest.mark.slow

UNIT = "v100-chat.service"
#: What each release brings: systemd, Python, HAProxy.
BROUGHT = {"11": ("247", "3.9", "2.2"), "13": ("257", "3.13", "3.0")}
SERVE = [
    *("{release}/bin/llama-server", "--model", "{model}", "--host", "{listen}", "--port", "{port}", "-ngl", "99"),
    *("--ctx-size", "{context_length}", "--parallel", "{parallel}", "--flash-attn", "{flash_attention}"),
    *("--cache-type-k", "{kv_cache_type_k}", "--cache-type-v", "{kv_cache_type_v}"),
]
SETTINGS = {"context_length": 8192, "flash_attention": "on", "kv_cache_type_k": "q8_0", "kv_cache_type_v": "q8_0"}


@pytest.fixture(scope="module", params=sorted(BROUGHT))
def release(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture(scope="module")
def host(release: str, lab: Lab, lab_reporter: Reporter, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningHost]:
    """A host with one V100, a driver and a model."""
    driver = FakeDriver.parse("535", debian=release)
    name = f"test-{os.getpid()}-debian-{release}"
    made = LabHost(name, owner=run_identity(), cards=FakeCards.parse("1xV100-SXM2-16GB"), driver=driver)
    model = tmp_path_factory.mktemp("model") / "x.gguf"
    shapes.write(shapes.MODELS["smallest"](), model)
    running = lab.up(made, ensure_image(lab.client, lab_reporter, debian=release), lab_reporter)
    on_host(running, "mkdir -p /srv/models")
    put_file(running.container, MODEL_ON_HOST, model.read_bytes(), mode=0o644)
    yield running
    lab.down(name)


@pytest.fixture(scope="module")
def inventory(host: RunningHost, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One instance behind the gateway, bound to node 0, restarted at night by cron."""
    folder = tmp_path_factory.mktemp("fleet")
    write(folder / "hosts.yml", host)
    return folder / "hosts.yml"


def write(path: Path, host: RunningHost, **nightly: str) -> None:
    """Write the inventory; ``nightly`` adds to when the restart is."""
    archive = path.parent / "engine.tar.gz"
    if not archive.exists():
        make_archive(archive)
    source = {"from_controller": str(archive), "sha256": hashlib.sha256(archive.read_bytes()).hexdigest()}
    definition = {
        "source": {**source, "kind": "archive", "strip_components": 1},
        "argv": SERVE,
        "env": {"FAKE_CUDA_MEMORY_MIB": "9000"},
        "must_log": [KERNEL],
        "min_driver": "535",
    }
    chat = {
        "engine": "external",
        "external": "stand-in",
        "model": {"path": MODEL_ON_HOST, "sha256": on_host(host, f"sha256sum {MODEL_ON_HOST}").split()[0]},
        "gpus": [0],
        "port": 8000,
        "settings": SETTINGS,
        "numa": 0,
        "nightly_restart": {"enabled": True, "window": "03:00-05:00", **nightly},
    }
    variables = {
        "external_engine_definitions": {"stand-in": definition},
        "llm_server_instances": {"chat": chat},
        "gateway_placement": "host",
    }
    write_inventory(path, {host.name: host.variables()}, variables=variables)


def result(inventory: Path, host: RunningHost, *arguments: str, code: int = 0) -> dict[str, Any]:
    """What a command says of the host."""
    done = v100ctl(*arguments, "-i", inventory, "--json")
    assert done.code == code, done.out + done.err
    found: dict[str, Any] = done.document["hosts"][host.name]
    return found


def test_one_command_sets_a_host_up(host: RunningHost, inventory: Path, release: str) -> None:
    found = result(inventory, host, "provision")
    assert (found["status"], found["proofs"]["chat"]["tokens"]) == ("changed", 5)
    systemd, python, haproxy = BROUGHT[release]
    assert on_host(host, "systemctl --version").split()[1] == systemd
    assert on_host(host, "python3 --version").startswith(f"Python {python}.")
    assert on_host(host, "haproxy -v").split()[2].startswith(haproxy)


def test_the_process_is_the_plans(host: RunningHost, inventory: Path) -> None:
    planned = result(inventory, host, "plan")["instances"]["chat"]
    assert on_host(host, f"cat /etc/systemd/system/{UNIT}") == planned["unit"]
    pid = on_host(host, f"systemctl show --property MainPID --value {UNIT}").strip()
    # An interpreter runs it, and is what the kernel names first.
    assert on_host(host, f"cat /proc/{pid}/cmdline").split("\0")[1:-1] == planned["argv"]
    environ = set(on_host(host, f"cat /proc/{pid}/environ").split("\0"))
    wanted = set(re.findall(r"^Environment=(.*)$", planned["unit"], re.M))
    assert len(wanted) > 3 and wanted <= environ
    assert on_host(host, f"stat -c %U:%G /proc/{pid}").strip() == "v100:v100"
    assert f"/{UNIT}" in on_host(host, f"cat /proc/{pid}/cgroup")
    limits = {line.split("  ")[0]: line for line in on_host(host, f"cat /proc/{pid}/limits").splitlines()}
    ceiling = {line.split("  ")[0]: line for line in on_host(host, "cat /proc/1/limits").splitlines()}
    for limit in ("Max open files", "Max locked memory"):
        assert limits[limit].split()[3] == ceiling[limit].split()[4], limits[limit]
    policy, cpus = (re.search(rf"^{key}=(.*)$", planned["unit"], re.M) for key in ("NUMAPolicy", "CPUAffinity"))
    assert policy is not None and cpus is not None
    assert on_host(host, f"head -n1 /proc/{pid}/numa_maps").split()[1] == {"bind": "bind:0", "preferred": "prefer:0"}[policy[1]]
    assert f"Cpus_allowed_list:\t{cpus[1]}\n" in on_host(host, f"cat /proc/{pid}/status")


def test_a_second_run_changes_nothing(host: RunningHost, inventory: Path) -> None:
    assert result(inventory, host, "provision")["status"] == "unchanged"
    program = Path(sys.executable).with_name("ansible-playbook")
    done = subprocess.run(
        [program, "-i", inventory, "playbooks/provision.yml"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(rf"^{re.escape(host.name)}\s*:.*changed=0 .*unreachable=0 .*failed=0 ", done.stdout, re.M), done.stdout


def test_audit_is_clean(host: RunningHost, inventory: Path) -> None:
    assert result(inventory, host, "audit", "--deep")["findings"] == []


def test_the_gateway_is_sound(host: RunningHost) -> None:
    """That it drains and reloads under load is shown by its molecule scenario, below."""
    assert on_host(host, f"haproxy -c -V -f {gateway.CONFIG} 2>&1").strip().splitlines()[-1] == "Configuration file is valid"
    status = json.loads(on_host(host, f"python3 -I -S -B {gateway.PROGRAM} status"))
    assert status["servers"]["chat"]["status"] == "UP"


def test_the_nightly_restart_runs(host: RunningHost, inventory: Path) -> None:
    assert on_host(host, "systemctl is-active cron.service").strip() == "active"
    before = on_host(host, f"systemctl show --value --property MainPID {UNIT}")
    # The lab's `nvidia-smi` reads other processes' environments, where a real one asks the driver.
    drop_in = "/run/systemd/system/v100ctl-nightly@chat.service.d"
    text = r"[Service]\nCapabilityBoundingSet=CAP_SYS_PTRACE CAP_DAC_READ_SEARCH\n"
    on_host(host, f"mkdir -p {drop_in}; printf '{text}' > {drop_in}/lab.conf")
    host.execute("/bin/sh", "-c", "systemctl daemon-reload; systemctl start v100ctl-nightly@chat.service")
    on_host(host, f"rm -r {drop_in}; systemctl daemon-reload")
    said = on_host(host, "journalctl --no-pager --output cat --unit v100ctl-nightly@chat.service")
    assert "the gateway cannot" not in said, said
    state = json.loads(on_host(host, f"cat {upkeep.STATE_DIR}/chat.nightly.json"))
    assert state["outcome"] == "restarted", said
    assert on_host(host, f"systemctl show --value --property MainPID {UNIT}") != before
    assert result(inventory, host, "audit")["findings"] == []


def test_a_timer_takes_the_place_of_cron(host: RunningHost, inventory: Path) -> None:
    write(inventory, host, time_zone="Europe/Berlin")
    assert result(inventory, host, "provision")["status"] == "changed"
    assert host.execute("test", "-e", upkeep.CRON_FILE)[0] != 0
    timer = "v100ctl-nightly@chat.timer"
    assert on_host(host, f"systemctl is-active {timer}").strip() == "active"
    assert on_host(host, f"systemctl show --value --property NextElapseUSecRealtime {timer}").strip()
    assert result(inventory, host, "provision")["status"] == "unchanged"
    assert result(inventory, host, "audit")["findings"] == []


def test_llama_cpp_is_compiled_and_serves(release: str, lab: Lab, lab_reporter: Reporter, tmp_path: Path) -> None:
    """With the release's own compiler and libraries: what is built on one is not what serves on another."""
    made = LabHost(f"test-{os.getpid()}-build-{release}", owner=run_identity())
    host = lab.up(made, ensure_image(lab.client, lab_reporter, debian=release), lab_reporter)
    try:
        path = write_inventory(
            tmp_path / "hosts.yml", {host.name: host.variables()}, variables=practice.inventory_variables(builder=False)
        )
        found = result(path, host, "provision")
        assert found["status"] == "changed" and found["proofs"]["chat"]["tokens"] > 0
        assert result(path, host, "provision")["status"] == "unchanged"
        assert result(path, host, "audit", "--deep")["findings"] == []
    finally:
        lab.down(host.name)


#: Roles whose scenarios name no package of one release.
SCENARIOS = ("external_engine", "gateway", "gpu_tuning", "llm_server", "model_store", "preflight")


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_roles_hold_there(release: str, scenario: str) -> None:
    program = Path(sys.executable).with_name("molecule")
    done = subprocess.run(
        [program, "--base-config", ".config/molecule/config.yml", "test", "--scenario-name", scenario],
        cwd=ROOT,
        env={**os.environ, "V100CTL_LAB_DEBIAN": release, "PATH": f"{program.parent}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-4000:]
