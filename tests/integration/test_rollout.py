"""A fleet behind its gateway, under load, while it is changed: no request may fail or be cut off.

An engine of a few lines stands in, whose speed is steady and whose faults can be ordered. The tests share the hosts and run in
order.
The client is a plain HTTP client that tries nothing twice.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from .hosts import ROOT, on_host, v100ctl
from .play_fleet import Load, PlayFleet, ask, hosts_up, rollout

if TYPE_CHECKING:
    from v100ctl.apply.reporter import Reporter
    from v100ctl.lab.hosts import Lab


@pytest.fixture(scope="module")
def fleet(lab: Lab, lab_reporter: Reporter, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlayFleet]:
    with hosts_up(lab, lab_reporter, "fleet", 3) as hosts:
        made = PlayFleet(tmp_path_factory.mktemp("rollout"), hosts[1:], hosts[0])
        made.want()
        done = v100ctl("provision", "-i", made.inventory, "--json")
        assert done.code == 0, done.err + done.out
        yield made


def test_a_changed_context_length_costs_no_request(fleet: PlayFleet) -> None:
    assert not ask(fleet.address, stream=True)
    fleet.want(context_length=2048)
    with Load(fleet.address) as load:
        code, report, said = rollout(fleet)
    assert code == 0, said
    assert load.problems == []
    assert load.answered > 20
    assert fleet.contexts() == ["2048"] * 3
    fleet.assert_all_serve([2048])
    assert [len(batch) for batch in report["batches"]] == [1, 2]
    steps = [event["step"] for event in report["hosts"][fleet.serving[0].name]["events"]]
    assert steps == ["prepare", "look", "drain", "measure", "apply", "measure again", "open", "settle"]
    # Nothing is left to do.
    code, report, _ = rollout(fleet)
    assert (code, report["hosts"]) == (0, {})


@pytest.mark.parametrize(
    ("wanted", "says"),
    [
        pytest.param({"fault": "garbage"}, "repeated", id="garbage"),
        pytest.param({"fault": "slow"}, "tokens/s instead of", id="slow", marks=pytest.mark.slow),
        pytest.param({"fault": "hang"}, "its health path answers with HTTP status 503", id="hang", marks=pytest.mark.slow),
        pytest.param({"flags": ["--bogus"]}, "unrecognized arguments: --bogus", id="flag", marks=pytest.mark.slow),
    ],
)
def test_a_canary_that_fails_returns_and_nobody_follows(fleet: PlayFleet, wanted: dict[str, Any], says: str) -> None:
    fleet.want(context_length=4096, **wanted)
    with Load(fleet.address) as load:
        code, report, said = rollout(fleet, "--start-limit", "20")
    assert code == 1, said
    assert load.problems == []
    assert report["status"] == "stopped"
    phases = sorted(host["phase"] for host in report["hosts"].values())
    assert phases == ["returned", "untouched", "untouched"]
    (failed,) = [host for host in report["hosts"].values() if host["problem"]]
    assert says in failed["problem"]
    fleet.assert_all_serve([2048])


def cut_off(fleet: PlayFleet, until: Callable[[str], bool]) -> None:
    """Begin a rollout, and kill its controller at a moment."""
    argv = [
        sys.executable,
        "-P",
        "-m",
        "v100ctl",
        "rollout",
        "-i",
        str(fleet.inventory),
        "--yes",
        "--settle",
        "1",
        "--batch",
        "2",
    ]
    with subprocess.Popen(argv, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if until(line.decode("utf-8", "replace")):
                break
        assert process.poll() is None, "it was over before"
        process.send_signal(signal.SIGKILL)
        process.wait()


@pytest.mark.slow
def test_a_controller_that_dies_is_followed_by_one_that_goes_on(fleet: PlayFleet) -> None:
    fleet.want(context_length=8192)
    with Load(fleet.address) as load:
        # The canary is out of the gateway by then, and nothing is changed on it yet.
        cut_off(fleet, lambda line: "measure: done" in line)
        code, _, said = rollout(fleet)
        assert code == 1
        assert "was not ended" in said
        code, report, said = rollout(fleet, "--resume")
    assert code == 0, said
    assert load.problems == []
    assert report["status"] == "done"
    fleet.assert_all_serve([8192])


@pytest.mark.slow
def test_an_aborted_one_leads_back(fleet: PlayFleet) -> None:
    fleet.want(context_length=16384)
    with Load(fleet.address) as load:
        cut_off(fleet, lambda line: "apply: done" in line)
        code, report, said = rollout(fleet, "--abort")
    assert code == 0, said
    assert load.problems == []
    assert report["status"] == "aborted"
    fleet.assert_all_serve([8192])


@pytest.mark.slow
def test_a_gateway_that_starts_anew_keeps_what_is_out(fleet: PlayFleet) -> None:
    fleet.want(context_length=32768)
    restart = threading.Timer(20, lambda: on_host(fleet.front, "systemctl restart v100ctl-gateway"))
    restart.start()
    code, _, said = rollout(fleet)
    restart.join()
    assert code == 0, said
    fleet.assert_all_serve([32768])
