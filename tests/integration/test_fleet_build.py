"""A fleet of hosts that need the same release: one of them compiles it, or a container on the controller, and all get it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.toy_engine import BUILD_NUMBER, build_spec, source_files, write_archive
from v100ctl.artifacts import Cache
from v100ctl.artifacts.cache import sha256_file

from .hosts import ROOT, on_host

if TYPE_CHECKING:
    from v100ctl.lab.hosts import RunningHost

PLAYBOOK = """\
- hosts: all
  gather_facts: false
  become: true
  tasks:
    - ansible.builtin.include_role:
        name: llama_cpp
"""
BUILD_ID = "b4711-cpu-0f1ee70f1ee7"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cache:
    """A cache of this test alone that has the toy engine's source."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    cache = Cache()
    path = cache.source_path(f"tree-{build_spec(source_files())['source']['tree_sha256']}")
    archive = write_archive(tmp_path / "toy.tar.gz", source_files())
    with cache.locked(path) as part:
        part.write_bytes(archive.read_bytes())
        cache.put(part, path, sha256_file(part))
    return cache


def release(**changed: Any) -> dict[str, Any]:
    """The toy engine's release as a plan would have it."""
    spec = build_spec(source_files(), build_id=BUILD_ID, libc="glibc-2.36", **changed)
    path = f"/opt/v100ctl/engines/llama_cpp/{BUILD_ID}"
    packages = ["g++", "cmake", "ninja-build"]
    return {"engine": "llama_cpp", "build_id": BUILD_ID, "path": path, "build": spec, "toolchain_packages": packages}


def play(inventory: Path, folder: Path, **variables: Any) -> str:
    """Runs the role on all hosts of an inventory; returns what Ansible printed."""
    playbook = folder / "site.yml"
    playbook.write_text(PLAYBOOK, encoding="utf-8")
    (folder / "variables.json").write_text(json.dumps(variables), encoding="utf-8")
    environment = {
        **os.environ,
        "ANSIBLE_FILTER_PLUGINS": str(ROOT / "playbooks/filter_plugins"),
        "ANSIBLE_ROLES_PATH": str(ROOT / "roles"),
        "PYTHONPATH": str(ROOT / "src"),
    }
    argv = [str(Path(sys.executable).with_name("ansible-playbook")), "-i", str(inventory), str(playbook)]
    done = subprocess.run(
        [*argv, "-e", f"@{folder}/variables.json"], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_three_hosts_get_one_compile(
    make_lab_host: Callable[..., RunningHost], lab_inventory: Callable[..., Path], cache: Cache, tmp_path: Path
) -> None:
    hosts = [make_lab_host() for _ in range(3)]
    play(lab_inventory(*hosts), tmp_path, llama_cpp_releases=[release()])
    path = release()["path"]
    seen = {on_host(host, f"{path}/bin/toy-server; sha256sum {path}/release.json") for host in hosts}
    assert len(seen) == 1, "all have the same bytes"
    assert f"build {BUILD_NUMBER}" in seen.pop()
    compilers = [on_host(host, "ls /usr/bin/ninja 2>/dev/null || true") for host in hosts]
    assert len([found for found in compilers if found]) == 1, "the others did not even get a compiler"
    (stored,) = (cache.root / "releases").glob("*.tar.gz")
    assert stored.name == f"{BUILD_ID}.tar.gz"


@pytest.mark.slow
def test_a_container_compiles_for_the_fleet(
    make_lab_host: Callable[..., RunningHost], lab_inventory: Callable[..., Path], cache: Cache, tmp_path: Path
) -> None:
    """On the controller, for hosts that get no compiler at all."""
    hosts = [make_lab_host() for _ in range(2)]
    container = {"distribution": "debian", "version": "12", "components": [], "files": [], "key": None}
    packages = ["ccache", "cmake", "g++", "ninja-build"]
    wanted = release(container={**container, "packages": packages})
    play(lab_inventory(*hosts), tmp_path, llama_cpp_releases=[wanted], llama_cpp_build_on="container")
    for host in hosts:
        assert f"build {BUILD_NUMBER}" in on_host(host, f"{wanted['path']}/bin/toy-server")
        assert on_host(host, "ls /usr/bin/ninja /var/lib/v100ctl/build 2>/dev/null || true") == ""
    left = subprocess.run(
        ["docker", "ps", "-aq", "--filter", f"label=v100ctl.builder={BUILD_ID}"], capture_output=True, check=True
    )
    assert left.stdout == b"", "what has ended is removed"
