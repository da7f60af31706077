"""Killed at any moment, the next run completes, and nothing half-written is ever used."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from .hosts import ROOT, WriteInventory, on_host, serving_variables, v100ctl

if TYPE_CHECKING:
    from v100ctl.lab.hosts import RunningHost

# The engine is compiled once, by the first `try`.
pytestmark = pytest.mark.usefixtures("practiced")

#: Kills something of a run: the process of the command line and the host it works on are given.
Kill = Callable[["subprocess.Popen[bytes]", "RunningHost"], None]
#: Set to the number that a failed run printed, it makes the same kills again.
SEED_VARIABLE = "V100CTL_KILL_SEED"
#: Long enough to fall into every part of a run, from the first probe to the proof.
LATEST_KILL_S = 30.0
UNIT = "v100-chat.service"
UNIT_FILE = f"/etc/systemd/system/{UNIT}"


def children(pid: int) -> list[int]:
    """Every descendant of ``pid``."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in map(int, (task / "children").read_text().split()):
                found += [child, *children(child)]
    return found


def kill_cli(process: subprocess.Popen[bytes], host: RunningHost) -> None:
    """The command line dies; what it started is on its own."""
    process.kill()


def kill_ansible(process: subprocess.Popen[bytes], host: RunningHost) -> None:
    """Everything under the command line dies, Ansible and its workers among them."""
    for pid in children(process.pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def kill_sshd(process: subprocess.Popen[bytes], host: RunningHost) -> None:
    """Every connection to the host breaks, and what ran in them."""
    on_host(host, "pkill -9 -f '[s]shd: admin' || true")


def kill_host(process: subprocess.Popen[bytes], host: RunningHost) -> None:
    """The host loses power and comes back."""
    subprocess.run(["docker", "kill", f"v100ctl-{host.name}"], check=True, capture_output=True)
    subprocess.run(["docker", "start", f"v100ctl-{host.name}"], check=True, capture_output=True)


def assert_nothing_half_written(host: RunningHost) -> None:
    """What lies under its final name is whole: releases by their own list, models by their hash, units by systemd."""
    script = (
        "for folder in /opt/v100ctl/engines/*/*/; do"
        ' if [ -d "$folder" ] && [ ! -s "$folder/release.json" ]; then echo "$folder"; fi; done;'
        "find /var/lib/v100ctl/models -maxdepth 1 -name '*.gguf' -not -name '.*' 2>/dev/null"
        ' | while read -r file; do sha256sum "$file" | grep -q ^b179c9523d0e || echo "$file"; done;'
        f"[ ! -e {UNIT_FILE} ] || grep -q WantedBy {UNIT_FILE} || echo unit;"
        "[ ! -e /etc/v100ctl/host.json ] || python3 -m json.tool /etc/v100ctl/host.json >/dev/null || echo host.json"
    )
    assert on_host(host, script) == ""


def wipe(host: RunningHost) -> None:
    """The host is bare again (packages stay: they are apt's to keep whole)."""
    on_host(
        host,
        f"systemctl disable --now {UNIT} v100ctl-watchdog 2>/dev/null; rm -f /etc/systemd/system/v100ctl-watchdog.service;"
        f"rm -rf {UNIT_FILE} /etc/v100ctl /opt/v100ctl /var/lib/v100ctl;"
        "systemctl daemon-reload; userdel v100 2>/dev/null; true",
    )


# One round each of a dying controller and of dying connections belongs to every run; the rest takes its time.
@pytest.mark.parametrize(
    ("kill", "rounds"),
    [
        pytest.param(kill_cli, 1, id="cli"),
        pytest.param(kill_sshd, 1, id="sshd"),
        *(
            pytest.param(kill, 4, id=f"{kill.__name__.removeprefix('kill_')}-often", marks=pytest.mark.slow)
            for kill in (kill_cli, kill_ansible, kill_sshd, kill_host)
        ),
    ],
)
def test_killed_at_random_points(kill: Kill, rounds: int, fresh_lab_host: RunningHost, lab_inventory: WriteInventory) -> None:
    inventory = lab_inventory(fresh_lab_host, variables=serving_variables())
    seed = int(os.environ.get(SEED_VARIABLE) or random.randrange(1_000_000))
    print(f"{SEED_VARIABLE}={seed}")
    chance = random.Random(seed)
    for number in range(rounds):
        # One kill in each slice of a run, so that few rounds still reach early and late parts.
        after_s = LATEST_KILL_S * (number + chance.random()) / rounds
        if number:
            wipe(fresh_lab_host)
        while not killed(kill, fresh_lab_host, inventory, after_s):
            # The run was over before: this machine is quicker, so the whole scale is.
            wipe(fresh_lab_host)
            after_s /= 2
        assert_nothing_half_written(fresh_lab_host)
        wait_for_ssh(fresh_lab_host)
        done = v100ctl("provision", "-i", inventory, "--json")
        assert done.code == 0, f"killed after {after_s:.1f} s ({SEED_VARIABLE}={seed}): {done.err}"
        done = v100ctl("audit", "-i", inventory, "--deep", "--json")
        assert done.code == 0, f"killed after {after_s:.1f} s ({SEED_VARIABLE}={seed}): {done.out}"
        leftovers = on_host(fresh_lab_host, "find /opt/v100ctl /var/lib/v100ctl/models /etc/v100ctl -name '.*' -mindepth 1")
        assert leftovers == "", "a completed run leaves nothing aside"


def killed(kill: Kill, host: RunningHost, inventory: Path, after_s: float) -> bool:
    """Whether a run was still going after ``after_s`` seconds, when it was killed."""
    with subprocess.Popen(
        [sys.executable, "-P", "-m", "v100ctl", "provision", "-i", str(inventory)],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(after_s)
            return False
        kill(process, host)
        process.wait(300)
    return True


def wait_for_ssh(host: RunningHost) -> None:
    """Until the host takes logins again."""
    deadline_s = time.monotonic() + 60
    while subprocess.run(host.ssh_command("true"), capture_output=True, check=False).returncode != 0:
        assert time.monotonic() < deadline_s, "the host did not come back"
        time.sleep(0.5)
