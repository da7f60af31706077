"""Debian's whole CUDA 11.8, really installed (1.6 GB to fetch, 5.6 GB on disk), and a kernel that it compiles for a V100."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from .hosts import ROOT, on_host

if TYPE_CHECKING:
    from v100ctl.lab.hosts import RunningHost

PLAYBOOK = """\
- hosts: all
  gather_facts: false
  become: true
  tasks:
    - ansible.builtin.include_tasks: "{{ tasks }}"

    # Where packages come from is the driver's to say, before it.
    - ansible.builtin.include_role:
        name: nvidia_driver
        tasks_from: repository
      vars:
        nvidia_driver_decision: "{{ plan.driver }}"

    - ansible.builtin.include_role:
        name: cuda_toolkit
      vars:
        cuda_toolkit_decision: "{{ plan.cuda }}"
"""


@pytest.mark.slow
def test_debians_own_toolkit(fresh_lab_host: RunningHost, lab_inventory: Callable[[RunningHost], Path], tmp_path: Path) -> None:
    playbook = tmp_path / "site.yml"
    playbook.write_text(PLAYBOOK, encoding="utf-8")
    environment = {
        **os.environ,
        "ANSIBLE_FILTER_PLUGINS": str(ROOT / "playbooks/filter_plugins"),
        "ANSIBLE_ROLES_PATH": str(ROOT / "roles"),
    }
    tasks = ROOT / "molecule/cuda_toolkit/tasks/plan.yml"
    command = [str(Path(sys.executable).with_name("ansible-playbook")), "-i", str(lab_inventory(fresh_lab_host))]
    command += ["-e", f"tasks={tasks}", str(playbook)]

    def run() -> int:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        found = re.search(r"changed=([0-9]+)", done.stdout.rpartition("PLAY RECAP")[2])
        assert found is not None
        return int(found.group(1))

    assert run() > 0
    assert run() == 0
    compile_it = (
        "cd /tmp && echo '__global__ void scale(float *x) { x[threadIdx.x] *= 2; }' > scale.cu"
        " && /usr/lib/nvidia-cuda-toolkit/bin/nvcc -arch=sm_70 -ccbin /usr/bin/g++-11 -c -o scale.o scale.cu"
        " && cuobjdump --list-elf scale.o"
    )
    assert "sm_70" in on_host(fresh_lab_host, compile_it)
    versions = on_host(fresh_lab_host, "dpkg-query -W -f '${Version}\\n' libcuda1 libnvidia-ml1").split()
    assert len({version.partition("-")[0] for version in versions}) == 1
    assert "libcuda1" in on_host(fresh_lab_host, "apt-mark showhold")
