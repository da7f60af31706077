"""The pytest plugin as another repository uses it: in a pytest of its own."""

from __future__ import annotations

import importlib.metadata
import os
import signal
import subprocess
import sys
from pathlib import Path

from v100ctl.lab import engine
from v100ctl.lab.hosts import Lab

# Installed, pytest finds the plugin by itself; it must not be named a second time.
_INSTALLED = any(point.value == "v100ctl.lab.pytest_plugin" for point in importlib.metadata.entry_points(group="pytest11"))
_PYTEST = [sys.executable, "-m", "pytest", "-q", *([] if _INSTALLED else ["-p", "v100ctl.lab.pytest_plugin"])]

_ROLE_TEST = """
def test_one(lab_host, lab_ssh):
    assert lab_ssh.check_output("hostname") == lab_host.name
    assert lab_ssh.run("sudo touch /shared").rc == 0

def test_two(lab_ssh):
    assert lab_ssh.file("/shared").exists

def test_three(fresh_lab_host, fresh_lab_ssh, lab_host):
    assert fresh_lab_host.name != lab_host.name
    assert not fresh_lab_ssh.file("/shared").exists
"""


def _environment(folder: Path) -> dict[str, str]:
    # A worker's name of its own, so that a host that somebody keeps just now is not in the way.
    return {**os.environ, "XDG_STATE_HOME": str(folder / "state"), "PYTEST_XDIST_WORKER": f"w{os.getpid()}"}


def _hosts(lab: Lab, folder: Path) -> list[str]:
    return [state.name for state in Lab(lab.client, folder / "state" / "v100ctl" / "lab").list()]


def test_hosts_are_shared_or_fresh_and_gone_afterwards(lab: Lab, tmp_path: Path) -> None:
    (tmp_path / "test_role.py").write_text(_ROLE_TEST, encoding="utf-8")
    result = subprocess.run(
        [*_PYTEST, str(tmp_path)], cwd=tmp_path, env=_environment(tmp_path), capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "3 passed" in result.stdout
    assert _hosts(lab, tmp_path) == []


def test_a_kept_host_is_used_again(lab: Lab, tmp_path: Path) -> None:
    (tmp_path / "test_role.py").write_text(
        "def test_it(lab_host):\n    print('container', lab_host.container.id)\n", encoding="utf-8"
    )
    try:
        seen = set()
        for _ in range(2):
            result = subprocess.run(
                [*_PYTEST, "-s", "--lab-keep", str(tmp_path)],
                cwd=tmp_path,
                env=_environment(tmp_path),
                capture_output=True,
                text=True,
                check=False,
            )
            assert result.returncode == 0, result.stdout + result.stderr
            seen.add(next(line for line in result.stdout.splitlines() if "container" in line).split()[-1])
        assert len(seen) == 1
        assert _hosts(lab, tmp_path) == [f"test-w{os.getpid()}"]
    finally:
        Lab(lab.client, tmp_path / "state" / "v100ctl" / "lab").down()


def test_what_a_killed_session_left_the_next_one_removes(lab: Lab, tmp_path: Path) -> None:
    (tmp_path / "test_hang.py").write_text("import time\ndef test_it(lab_host):\n    time.sleep(600)\n", encoding="utf-8")
    victim = subprocess.Popen(
        [*_PYTEST, str(tmp_path)], cwd=tmp_path, env=_environment(tmp_path), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        assert engine._await(lambda: bool(_hosts(lab, tmp_path)), 60)
    finally:
        victim.send_signal(signal.SIGKILL)
        victim.wait()
    assert _hosts(lab, tmp_path) != []
    (tmp_path / "test_hang.py").unlink()
    (tmp_path / "test_role.py").write_text("def test_it(lab_host):\n    pass\n", encoding="utf-8")
    subprocess.run([*_PYTEST, str(tmp_path)], cwd=tmp_path, env=_environment(tmp_path), check=True, stdout=subprocess.DEVNULL)
    assert _hosts(lab, tmp_path) == []
