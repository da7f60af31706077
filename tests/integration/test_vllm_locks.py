"""Both locks of vLLM really installed on a host with a fake V100 (7 GB each): what the release, its parser and a start say there.

No card is needed, and none is there: the wheels are CUDA's, so a start ends where the driver's library is looked for.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from v100ctl.catalog.vllm_lock import shipped_lock_for
from v100ctl.wheels import fetch

from .hosts import ROOT, WriteInventory, on_host, v100ctl

if TYPE_CHECKING:
    from v100ctl.lab.hosts import RunningHost

MODEL = {"path": "/srv/models/m", "sha256": "ab" * 32}
WHEELS = "/srv/wheels"
#: The report's own line, as far as it names arguments.
REPORTED = (
    "--quantization awq --dtype half --max-model-len 8192 --gpu-memory-utilization 0.96 --max-num-seqs 4 "
    "--max-num-batched-tokens 4096 --kv-cache-dtype auto --disable-log-requests"
)
PLAYBOOK = """\
- hosts: all
  gather_facts: false
  become: true
  tasks:
    - ansible.builtin.include_tasks: "{{ root }}/playbooks/tasks/plan.yml"

    - ansible.builtin.include_role: {name: preflight, tasks_from: packages}
      vars: {preflight_packages: "{{ v100ctl_plan.packages }}"}

    - ansible.builtin.include_role: {name: vllm}
      vars: {vllm_releases: "{{ v100ctl_plan.releases }}", vllm_wheels: /srv/wheels, vllm_wheels_on: host}

    - ansible.builtin.include_role: {name: llm_server, tasks_from: account, public: true}
      vars: {llm_server_account: "{{ v100ctl_plan.account }}", llm_server_directories: "{{ v100ctl_plan.directories }}"}

    - ansible.builtin.include_role: {name: llm_server, tasks_from: parse}
      vars: {llm_server_account: "{{ v100ctl_plan.account }}", llm_server_endpoints: "{{ v100ctl_plan.instances }}"}
"""
#: As in the unit: nothing may be written but the instance's cache, and the network is what the unit says.
SANDBOX = (
    "systemd-run --quiet --wait --pipe --uid v100 --property ProtectSystem=strict --property PrivateTmp=yes "
    "--property NoNewPrivileges=yes --property CacheDirectory=v100ctl/chat --setenv HOME=/var/lib/v100ctl "
    "--setenv TRITON_CACHE_DIR=/var/cache/v100ctl/chat/triton "
    "--property 'RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6 AF_NETLINK' -- "
)
#: What Triton does for each kernel: a small C program with Python's headers, compiled, kept in the cache and loaded from there.
COMPILE = """
import importlib.util, os, tempfile
from triton.runtime.build import _build
from triton.runtime.cache import get_cache_manager
source = '#include <Python.h>\\nstatic struct PyModuleDef d = {PyModuleDef_HEAD_INIT, "probe", 0, -1, 0};\\n'
source += 'PyMODINIT_FUNC PyInit_probe(void) { return PyModule_Create(&d); }\\n'
with tempfile.TemporaryDirectory() as folder:
    path = os.path.join(folder, "main.c")
    open(path, "w").write(source)
    built = _build("probe", path, folder, [], [], [])
    kept = get_cache_manager("0" * 64).put(open(built, "rb").read(), "probe.so", binary=True)
spec = importlib.util.spec_from_file_location("probe", kept)
spec.loader.exec_module(importlib.util.module_from_spec(spec))
print("compiled", kept)
"""
#: What every engine of vLLM does at its start, with one process.
PROCESS_GROUP = """
import torch.distributed
torch.distributed.init_process_group("gloo", init_method="tcp://127.0.0.1:29511", rank=0, world_size=1)
print("process group of", torch.distributed.get_world_size())
"""


def play(playbook: Path, inventory: Path) -> int:
    """Run it; how many tasks changed something."""
    environment = {
        **os.environ,
        "ANSIBLE_FILTER_PLUGINS": str(ROOT / "playbooks/filter_plugins"),
        "ANSIBLE_ROLES_PATH": str(ROOT / "roles"),
    }
    command = [str(Path(sys.executable).with_name("ansible-playbook")), "-i", str(inventory), "-e", f"root={ROOT}", str(playbook)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr
    found = re.search(r"changed=([0-9]+)", done.stdout.rpartition("PLAY RECAP")[2])
    assert found is not None
    return int(found.group(1))


@pytest.mark.slow
@pytest.mark.parametrize("version", ["0.8.5.post1", "0.6.3.post1"])
def test_a_lock_installs_imports_and_reads_the_profile(
    version: str, make_v100_host: Callable[..., RunningHost], lab_inventory: WriteInventory, tmp_path: Path
) -> None:
    lock = shipped_lock_for(version, "3.11")
    assert lock is not None
    # Kept in the user's cache: 4 GB are not fetched again for each run.
    wheels = fetch(f"test-{version}-py3.11", "3.11", lock)
    host = make_v100_host("1xV100-PCIE-16GB")
    on_host(host, f"mkdir -p {WHEELS}")
    with subprocess.Popen(["tar", "-C", str(wheels), "-cf", "-", "."], stdout=subprocess.PIPE) as packed:
        host.container.put_archive(WHEELS, packed.stdout)
    # No version before 0.7.3 can be told defaults for what a request does not say.
    without: dict[str, Any] = {"settings": {"sampling": None}} if version == "0.6.3.post1" else {}
    chat = {"engine": "vllm", "profile": "vllm-16gb-latency", "model": MODEL, "gpus": [0], "port": 8000, **without}
    variables = {"llama_cpp_backend": "cuda", "vllm_version": version, "llm_server_instances": {"chat": chat}}
    inventory = lab_inventory(host, variables=variables)

    planned = v100ctl("plan", "-i", inventory, "--json").document["hosts"][host.name]
    words = planned["instances"]["chat"]["argv"]
    assert words[words.index("--quantization") + 1] == "gptq"
    refused = {**chat, "settings": {**without.get("settings", {}), "quantization": "awq"}}
    inventory = lab_inventory(host, variables={**variables, "llm_server_instances": {"chat": refused}})
    rules = {rule["id"]: rule for rule in v100ctl("plan", "-i", inventory, "--json").document["hosts"][host.name]["rules"]}
    assert "needs compute capability 7.5" in rules["vllm-quantization-below-minimum"]["reason"]
    assert "gptq" in rules["vllm-quantization-below-minimum"]["nearest"]

    playbook = tmp_path / "site.yml"
    playbook.write_text(PLAYBOOK, encoding="utf-8")
    inventory = lab_inventory(host, variables=variables)
    began_s = time.monotonic()
    assert play(playbook, inventory) > 0
    took_s = time.monotonic() - began_s
    assert play(playbook, inventory) == 0

    release = words[0].removesuffix("/bin/python")
    document = json.loads(on_host(host, f"cat {release}/release.json"))
    print(version, f"installed in {took_s:.0f} s", {name: document[name] for name in ("torch", "cuda", "size_bytes")})
    assert document["version"] == version
    assert "sm_70" in document["cuda_architectures"]
    assert len(document["licences"]) > 100
    assert "serve" in on_host(host, f"{release}/bin/vllm --help")

    # The report's line, argument for argument: what the profile says in its place is taken.
    parse = f"{release}/bin/python -B {release}/read_arguments.py --model /srv/models/m"
    on_host(host, f"{parse} {REPORTED}")
    for wrong in ("--enforce-eager False", "--chunked-prefill"):
        code, said = host.execute("/bin/sh", "-c", f"{parse} {REPORTED} {wrong}")
        assert code == 2
        assert "unrecognized arguments" in said

    # What it needs while it runs, under the unit's hardening.
    assert "compiled /var/cache/v100ctl/chat/triton/" in on_host(host, f"{SANDBOX}{release}/bin/python -c {shlex.quote(COMPILE)}")
    assert "process group of 1" in on_host(host, f"{SANDBOX}{release}/bin/python -c {shlex.quote(PROCESS_GROUP)}")

    # How far a start gets without a card.
    code, said = host.execute("/bin/sh", "-c", f"{SANDBOX}{shlex.join(words)} 2>&1")
    print(version, "without a card:", said[-1500:])
    assert code != 0
