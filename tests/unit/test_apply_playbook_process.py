"""What becomes of Ansible when the program that started it is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "src/v100ctl/apply"
#: Starts the script as the runner does, and waits to be killed.
STARTER = """
import os, subprocess, sys
argv = [sys.executable, "-P", "-c", sys.argv[1], "--parent", str(os.getpid()), "--pid-file", sys.argv[2], "--", "play.yml"]
subprocess.Popen(argv, start_new_session=True).wait()
"""
#: Stands in for Ansible: says its own and a child's number, and ends by the first interrupt or by none.
ANSIBLE = """
import os, signal, subprocess, time

def main():
    if {deaf}:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    child = subprocess.Popen(["sleep", "600"], start_new_session=True)
    with open({says!r} + ".new", "w") as file:
        print(os.getpid(), child.pid, file=file)
    os.rename({says!r} + ".new", {says!r})
    try:
        time.sleep({seconds})
    finally:
        child.kill()
        child.wait()
"""

Start = Callable[..., "tuple[subprocess.Popen[bytes], list[int]]"]


@pytest.fixture
def start(tmp_path: Path) -> Start:
    def start_it(*, deaf: bool, seconds: int = 600) -> tuple[subprocess.Popen[bytes], list[int]]:
        says = tmp_path / "says"
        (tmp_path / "ansible/cli").mkdir(parents=True)
        for folder in ("ansible", "ansible/cli"):
            # Without it the installed package would win.
            (tmp_path / folder / "__init__.py").touch()
        (tmp_path / "ansible/cli/playbook.py").write_text(ANSIBLE.format(deaf=deaf, says=str(says), seconds=seconds))
        run = (
            f"import sys; sys.path.insert(0, {str(FOLDER)!r}); import playbook_process as script\n"
            "script.GRACE_S = 0.2; script.main()"
        )
        process = subprocess.Popen(
            [sys.executable, "-c", STARTER, run, str(tmp_path / "pid")],
            env={**os.environ, "PYTHONPATH": str(tmp_path)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        wait_until(says.exists)
        return process, [int(word) for word in says.read_text().split()]

    return start_it


def wait_until(condition: Callable[[], bool], limit_s: float = 60.0) -> None:
    end_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.parametrize("deaf", [pytest.param(False, id="hears"), pytest.param(True, id="deaf")])
def test_it_ends_with_its_parent_even_if_it_does_not_hear(start: Start, deaf: bool) -> None:
    process, pids = start(deaf=deaf)
    assert all(map(alive, pids))
    process.send_signal(signal.SIGKILL)
    wait_until(lambda: not any(map(alive, pids)))
    # Nothing holds the streams of the one that was killed.
    process.communicate(timeout=60)


def test_one_that_ends_by_itself_leaves_nobody_watching(start: Start) -> None:
    process, _ = start(deaf=False, seconds=0)
    assert process.wait(60) == 0
    wait_until(lambda: not watchers(process.pid))


def watchers(parent: int) -> list[str]:
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = file.read_bytes().split(b"\0")
        except OSError:
            continue
        if b"--parent" in words and str(parent).encode() in words:
            found.append(file.parent.name)
    return found
