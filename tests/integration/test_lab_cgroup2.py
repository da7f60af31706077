"""A lab host on an engine that sees the unified hierarchy (cgroup v2), whatever this machine itself has mounted."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path

import docker
import pytest

from v100ctl.apply.reporter import Reporter
from v100ctl.lab import engine
from v100ctl.lab.engine import Daemon
from v100ctl.lab.hosts import Lab, LabHost
from v100ctl.lab.image import ensure_image

pytestmark = [pytest.mark.slow, pytest.mark.skipif(os.geteuid() != 0, reason="starting a Docker Engine takes root")]


def test_systemd_makes_its_groups_in_the_containers_own_tree(
    make_daemon: Callable[..., Daemon], lab: Lab, lab_reporter: Reporter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = make_daemon()
    arguments = shlex.join(daemon.arguments)
    script = f"umount --lazy --recursive /sys/fs/cgroup && mount -t cgroup2 none /sys/fs/cgroup && exec dockerd {arguments}"
    with daemon.log_file.open("wb") as log:
        process = subprocess.Popen(["unshare", "--mount", "/bin/sh", "-c", script], stdout=log, stderr=log)
    monkeypatch.setenv("DOCKER_HOST", daemon.url)
    assert engine._await(lambda: process.poll() is not None or engine._connect(daemon.url)[0] is not None, 60)
    assert process.poll() is None, daemon.log_file.read_text(encoding="utf-8")
    client = docker.DockerClient(base_url=daemon.url, timeout=120)
    assert client.info()["CgroupVersion"] == "2"
    image = ensure_image(lab.client, lab_reporter)
    client.images.load(image.save(named=True))

    host = Lab(client, tmp_path / "lab").up(LabHost("unified"), client.images.get(image.tags[0]), lab_reporter)

    def run(command: str) -> str:
        return subprocess.run(host.ssh_command("sh", "-c", command), capture_output=True, text=True, check=True).stdout.strip()

    assert run("stat --file-system --format=%T /sys/fs/cgroup") == "cgroup2fs"
    assert run("grep ^0:: /proc/1/cgroup") == "0::/init.scope"
    assert run("systemctl is-system-running") == "running"
    assert run("sudo systemd-run --wait --pipe --quiet grep ^0:: /proc/self/cgroup").startswith("0::/system.slice/run-u")
    process.terminate()
    process.wait(60)
