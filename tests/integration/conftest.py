"""Fixtures for tests in containers. Those of the lab itself come from ``v100ctl.lab.pytest_plugin``."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from v100ctl.lab import engine
from v100ctl.lab.engine import Daemon

from .hosts import Done, v100ctl


@pytest.fixture(scope="session")
def practiced() -> Done:
    """One ``v100ctl try``, as the README says. What needs an engine asks for it: the release is in the cache afterwards.

    The practice host is this user's own, as is the cache; both are left as a user would want them after a ``try``.
    """
    return v100ctl("try")


@pytest.fixture
def make_daemon(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Daemon]]:
    """Paths and arguments for a Docker Engine beside the machine's own, and its removal. Starting it takes root."""
    # Short: a Unix socket's path has at most 107 bytes.
    folder = Path(tempfile.mkdtemp(prefix="v100e"))
    monkeypatch.setenv("XDG_STATE_HOME", str(folder / "state"))
    bridge = f"v100e{os.getpid()}"

    def make(*arguments: str) -> Daemon:
        subprocess.run(["ip", "link", "add", bridge, "type", "bridge"], check=True)
        subprocess.run(["ip", "address", "add", "198.18.77.1/24", "dev", bridge], check=True)
        return Daemon(
            socket=folder / "s",
            pid_file=folder / "pid",
            exec_root=folder / "x",
            log_file=folder / "log",
            arguments=(
                f"--data-root={folder}/data",
                f"--exec-root={folder}/x",
                f"--pidfile={folder}/pid",
                f"--host=unix://{folder}/s",
                # Nothing of the first engine's network may be touched. (`--bridge=none` would remove docker0 itself.)
                f"--bridge={bridge}",
                "--iptables=false",
                "--ip-forward=false",
                "--ip-masq=false",
                *arguments,
            ),
        )

    yield make
    # The daemon's own pid file may be part of the test, so its processes are found by their command lines.
    for name in ("dockerd", "containerd", "containerd-shim"):
        for pid in list(engine._all_pids()):
            if engine._program(pid) == name and str(folder) in " ".join(engine._arguments_of(pid)):
                engine._end(pid, name)
    for line in Path("/proc/mounts").read_text(encoding="utf-8").splitlines():
        if line.split()[1].startswith(str(folder)):
            subprocess.run(["umount", "--lazy", line.split()[1]], check=False)
    subprocess.run(["ip", "link", "delete", bridge], check=False)
    shutil.rmtree(folder)


@pytest.fixture
def daemon(make_daemon: Callable[..., Daemon]) -> Daemon:
    """A Docker Engine of its own, not started."""
    return make_daemon()
