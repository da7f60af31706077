"""What dies in the middle of a rollout: a host in its turn, a host while another has its turn, the controller at any moment.

Whatever it is, the fleet ends with every host on a good state that serves, exit code and report say what happened, and no client
has lost a request that another host could have answered. The tests share the hosts and run in order.
"""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from .addresses import keep_addresses
from .hosts import ROOT, v100ctl
from .play_fleet import Load, PlayFleet, hosts_up, rollout

if TYPE_CHECKING:
    from v100ctl.apply.reporter import Reporter
    from v100ctl.lab.hosts import Lab

pytestmark = pytest.mark.slow

#: How long the gateway may take to see that a host is gone: three checks, two seconds apart, and what the machine adds.
NOTICED_S = 20.0
OPTIONS = ("--yes", "--settle", "1", "--batch", "2")
#: After so many deaths the controller is left alone.
MOST_KILLS = 4
#: A rollout over three hosts says at least so many, and one whose canary answers garbage.
LINES = {"none": 80, "garbage": 32}


@pytest.fixture(scope="module")
def fleet(lab: Lab, lab_reporter: Reporter, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlayFleet]:
    folder = tmp_path_factory.mktemp("deaths")
    with hosts_up(lab, lab_reporter, "deaths", 3) as hosts:
        kept = keep_addresses(hosts, folder / "ssh")
        made = PlayFleet(folder, kept[1:], kept[0])
        made.want()
        done = v100ctl("provision", "-i", made.inventory, "--json")
        assert done.code == 0, done.err + done.out
        yield made


class Controller:
    """A rollout that runs, and what it has said so far. ``at`` is called with each line, from another thread."""

    def __init__(self, fleet: PlayFleet, *arguments: str, at: Callable[[str], None] = lambda line: None) -> None:
        argv = [sys.executable, "-P", "-m", "v100ctl", "rollout", "-i", str(fleet.inventory), *OPTIONS, *arguments]
        self._out = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115 - read after the process has ended
        self._process = subprocess.Popen(
            argv, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=self._out, stderr=subprocess.PIPE, text=True, errors="replace"
        )
        self.said = ""
        self._at = at
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self.said += line
            self._at(line)

    def wait(self, lines: int | None = None) -> int | None:
        """Its exit code; ``None`` where it still runs when it has said so many lines."""
        while (code := self._process.poll()) is None:
            if lines is not None and self.said.count("\n") >= lines:
                return None
            time.sleep(0.05)
        # What Ansible leaves running a moment longer holds the pipe open too.
        self._reader.join(timeout=60)
        return code

    def kill(self) -> None:
        """As the kernel ends it when memory is short: nothing of its own runs after this."""
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()


def test_a_host_that_dies_in_its_turn_goes_back_when_it_is_there_again(fleet: PlayFleet) -> None:
    fleet.want(context_length=2048)
    dead: list[str] = []

    def at(line: str) -> None:
        # Out of the gateway by then; Ansible is about to change it.
        if "measure: done" in line and not dead:
            (victim,) = [host for host in fleet.serving if host.name in line]
            dead.append(victim.name)
            victim.container.kill()
            threading.Timer(45, victim.container.start).start()

    with Load(fleet.address) as load:
        path = fleet.folder / "report.json"
        controller = Controller(fleet, "--json", "-o", str(path), at=at)
        assert controller.wait() == 1, controller.said
    assert load.problems == []
    assert load.answered > 20
    report = json_of(path)
    assert report["status"] == "stopped"
    assert {name: host["phase"] for name, host in report["hosts"].items()} == {
        host.name: "returned" if host.name in dead else "untouched" for host in fleet.serving
    }
    assert report["hosts"][dead[0]]["problem"]
    assert "waiting for it" in controller.said
    fleet.assert_all_serve([1024])


def test_a_host_that_dies_while_another_has_its_turn_is_lost_until_it_is_back(fleet: PlayFleet) -> None:
    fleet.want(context_length=4096)
    victim = fleet.serving[-1]
    lost_at_kill: list[int] = []

    with Load(fleet.address) as load:

        def at(line: str) -> None:
            if "drain: done" in line and not lost_at_kill and victim.name not in line:
                victim.container.kill()
                time.sleep(NOTICED_S)
                lost_at_kill.append(len(load.problems))

        path = fleet.folder / "report.json"
        controller = Controller(fleet, "--return-limit", "20", "--json", "-o", str(path), at=at)
        assert controller.wait() == 1, controller.said
        # What ran on it is lost, at most one request of each client, and nothing that was asked later.
        assert len(load.problems) == lost_at_kill[0] <= 4, load.problems
        report = json_of(path)
        phases = {name: host["phase"] for name, host in report["hosts"].items()}
        assert phases == {host.name: "lost" if host is victim else "done" for host in fleet.serving}
        assert report["status"] == "stopped"

        # Nobody begins another one meanwhile; once it is back, it is led back to what it was, and is asked again.
        victim.container.start()
        code, _, said = rollout(fleet)
        assert code == 1
        assert "was not ended" in said
        code, report, said = rollout(fleet, "--resume")
        assert code == 1, said
        assert report["hosts"][victim.name]["phase"] == "returned"
        fleet.assert_all_serve([1024, 4096])
        code, report, said = rollout(fleet)
        assert code == 0, said
        assert list(report["hosts"]) == [victim.name]
        assert len(load.problems) == lost_at_kill[0], load.problems
    fleet.assert_all_serve([4096])
    assert set(fleet.contexts()) == {"4096"}


# What a seed stands for is where the controller dies first: early, in the middle, late.
@pytest.mark.parametrize("seed", [2, 3, 0, 7])
def test_the_controller_dies_at_any_moment_and_another_one_goes_on(fleet: PlayFleet, seed: int) -> None:
    chosen = random.Random(seed)
    before = int(fleet.contexts()[0])
    wanted = 8192 * (seed + 1)
    fault = ["none", "garbage"][seed % 2]
    fleet.want(context_length=wanted, fault=fault)
    deaths: list[str] = []
    path = fleet.folder / "report.json"
    with Load(fleet.address) as load:
        resume: tuple[str, ...] = ()
        while True:
            path.unlink(missing_ok=True)
            controller = Controller(fleet, *resume, "--json", "-o", str(path))
            # By what it has done and not by the clock: a machine on which much else runs takes ten times as long for the same.
            lines = chosen.randint(1, LINES[fault]) if len(deaths) < MOST_KILLS else None
            code = controller.wait(lines)
            if code is None:
                time.sleep(chosen.uniform(0, 2))
                controller.kill()
                deaths.append(f"after {lines} lines: {controller.said.splitlines()[-1:]}")
                resume = ("--resume",)
                continue
            if "was left unfinished" in controller.said:
                # It died before it had written down anything, so before it had done anything.
                assert not path.exists()
                resume = ()
                continue
            break
    told = f"{deaths}\n{controller.said}"
    assert deaths, told
    assert code == (0 if fault == "none" else 1), told
    assert load.problems == [], told
    report = json_of(path)
    phases = {host["phase"] for host in report["hosts"].values()}
    if fault == "none":
        assert (report["status"], phases) == ("done", {"done"}), told
        fleet.assert_all_serve([wanted])
    else:
        assert (report["status"], phases) == ("stopped", {"returned", "untouched"}), told
        assert any("repeated" in host["problem"] for host in report["hosts"].values()), told
        fleet.assert_all_serve([before])


def json_of(path: Path) -> dict[str, Any]:
    """The report in a file."""
    document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return document
