"""A host that compiles for others gets the toolkit, and those that serve do not."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import yaml

from v100ctl.lab.containers import put_file

from .hosts import ROOT, WriteInventory, on_host

if TYPE_CHECKING:
    from v100ctl.lab.hosts import RunningHost


@pytest.mark.slow
def test_the_toolkit_goes_to_the_host_that_compiles(
    make_lab_host: Callable[..., RunningHost],
    make_v100_host: Callable[..., RunningHost],
    lab_inventory: WriteInventory,
    tmp_path: Path,
) -> None:
    builder, first, second = make_lab_host(), make_v100_host(driver="535"), make_v100_host(driver="535")
    # Debian's toolkit is 5.6 GB on disk; small packages of its names are newer, so apt takes them.
    script = (ROOT / "molecule/cuda_toolkit/files/make_archive.py").read_bytes()
    put_file(builder.container, "/srv/make_archive.py", script, mode=0o644)
    on_host(builder, "python3 /srv/make_archive.py /srv/archive")
    on_host(builder, "echo 'deb [trusted=yes] file:/srv/archive ./' > /etc/apt/sources.list.d/stand-in.list")
    on_host(builder, "apt-get -qq update")
    playbook = tmp_path / "site.yml"
    tasks = [
        {"ansible.builtin.import_tasks": str(ROOT / "playbooks/tasks/plan.yml")},
        {"ansible.builtin.include_tasks": str(ROOT / "playbooks/tasks/toolkit.yml")},
    ]
    playbook.write_text(yaml.safe_dump([{"hosts": "all:!builders", "gather_facts": False, "become": True, "tasks": tasks}]))
    instance = {"model": {"path": "/srv/models/any.gguf", "sha256": "ab" * 32}, "gpus": [0], "port": 8000}
    variables = {
        "llama_cpp_backend": "cuda",
        "llama_cpp_build_on": builder.name,
        "llm_server_instances": {"chat": instance},
    }
    inventory = lab_inventory(builder, first, second, variables=variables, groups={"builders": [builder.name]})

    def run() -> str:
        done = subprocess.run(
            [str(Path(sys.executable).with_name("ansible-playbook")), "-i", str(inventory), str(playbook)],
            env={
                **os.environ,
                "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
                "ANSIBLE_FILTER_PLUGINS": str(ROOT / "playbooks/filter_plugins"),
                "ANSIBLE_ROLES_PATH": str(ROOT / "roles"),
                # Nobody has compiled this engine yet.
                "XDG_CACHE_HOME": str(tmp_path / "cache"),
            },
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.rpartition("PLAY RECAP")[2]

    first_run = run()
    assert "release 11.8" in on_host(builder, "/usr/lib/nvidia-cuda-toolkit/bin/nvcc --version")
    assert on_host(builder, "/usr/bin/g++-11 -dumpversion").startswith("11")
    for host in (first, second):
        assert host.execute("/bin/sh", "-c", "test -e /usr/lib/nvidia-cuda-toolkit || test -e /usr/bin/g++-11")[0] == 1
    # It is asked for once, by the first of those that need it.
    assert first_run.count("changed=0 ") == 1
    assert run().count("changed=0 ") == 2
