"""A rollout over a played fleet: whatever dies and whenever, every host ends on a good state, in the gateway."""

from __future__ import annotations

import contextlib
import copy
import json
import signal
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from v100ctl.errors import UnreachableError, V100ctlError
from v100ctl.rollout.machine import Machine, sleep_unless
from v100ctl.rollout.state import HostState, Options, Rollout, RolloutError, in_batches


class ControllerDied(BaseException):
    """Nothing of the controller's program runs any more."""


@dataclass
class PlayedHost:
    """A host: what is applied to it, whether that serves, and whether the gateway sends requests there."""

    runs: str = "old"
    open: bool = True
    serves: bool = True
    up: bool = True
    history: list[str] = field(default_factory=lambda: ["old"])

    @property
    def good(self) -> bool:
        return self.up and self.open and self.serves and self.runs in ("old", "new")


@dataclass
class PlayedFleet:
    """``faults``: host to what is wrong with the new state there. ``dies_after``: so many effects, then the controller dies."""

    hosts: dict[str, PlayedHost]
    faults: dict[str, str] = field(default_factory=dict)
    dies_after: int | None = None
    reboots: bool = False
    effects: int = 0
    most_out: int = 0

    def effect(self) -> None:
        self.effects += 1
        self.most_out = max(self.most_out, sum(not host.open or not host.up for host in self.hosts.values()))
        if self.dies_after is not None and self.effects > self.dies_after:
            raise ControllerDied

    def reach(self, name: str) -> PlayedHost:
        if not self.hosts[name].up:
            raise UnreachableError(f"{name} does not answer")
        return self.hosts[name]

    # --- what a rollout does

    def prepare(self, names: Sequence[str]) -> Mapping[str, V100ctlError]:
        self.effect()
        return {name: V100ctlError("no room") for name in names if self.faults.get(name) == "full"}

    def drain(self, host: HostState) -> None:
        self.effect()
        self.reach(host.name)
        if self.faults.get(host.name) == "busy":
            raise V100ctlError("requests still ran")
        self.hosts[host.name].open = False
        self.effect()

    def stop(self, host: HostState) -> None:
        self.effect()
        self.reach(host.name).serves = False

    def good_state(self, host: HostState) -> str | None:
        self.effect()
        return self.reach(host.name).history[-1]

    def speed(self, host: HostState, *, may_be_silent: bool = False) -> dict[str, float]:
        self.effect()
        if not self.reach(host.name).serves:
            if may_be_silent:
                return {}
            raise V100ctlError("nobody answers")
        slow = self.hosts[host.name].runs == "new" and self.faults.get(host.name) == "slow"
        return {"chat": 10.0 if slow else 100.0}

    def apply(self, names: Sequence[str]) -> Mapping[str, V100ctlError]:
        problems: dict[str, V100ctlError] = {}
        for name in names:
            self.effect()
            host, fault = self.hosts[name], self.faults.get(name)
            if fault in ("dies", "gone"):
                host.up = False
                problems[name] = UnreachableError(f"{name} does not answer")
            elif fault == "garbage":
                host.runs = "broken"
                problems[name] = V100ctlError("it answered, but with rubbish")
            else:
                if self.reboots and host.serves and host.runs != "new":
                    problems[name] = V100ctlError("chat serve on the driver that would be replaced")
                    continue
                # Killed in between a host runs half of it.
                host.runs = "half"
                self.effect()
                host.runs, host.serves = "new", True
                host.history.append("new")
        self.effect()
        return problems

    def open(self, host: HostState) -> None:
        self.effect()
        self.reach(host.name).open = True
        self.effect()

    def settle(self, host: HostState) -> None:
        self.effect()
        if self.reach(host.name).runs == "new" and self.faults.get(host.name) == "later":
            raise V100ctlError("it answers no more")

    def go_back(self, host: HostState) -> None:
        self.effect()
        if self.faults.get(host.name) != "gone":
            # Somebody switches it on again: what is waited for.
            self.hosts[host.name].up = True
        played = self.reach(host.name)
        if host.good is None and not host.looked:
            host.good = played.history[-1]
        if host.good is None:
            raise V100ctlError("it has no earlier state")
        played.runs, played.serves = host.good, True
        self.effect()
        played.history.append(host.good)


class Disk:
    """What survives the controller."""

    def __init__(self) -> None:
        self.text = ""

    def save(self, rollout: Rollout) -> None:
        self.text = json.dumps(rollout.to_json())

    def load(self) -> Rollout:
        return Rollout.from_json(json.loads(self.text))


def new_rollout(names: Sequence[str], **options: Any) -> Rollout:
    chosen = Options(**options)
    hosts = {name: HostState(name, address=name, restarts=["chat"]) for name in names}
    return Rollout(
        "r1", "me@here", "2026-11-30T04:00:00+00:00", "2026-11-30", chosen, hosts, in_batches(names, chosen, len(names))
    )


def run(fleet: PlayedFleet, rollout: Rollout, *, forks: int = 1, disk: Disk | None = None) -> tuple[Rollout, Disk]:
    disk = disk or Disk()
    disk.save(rollout)
    Machine(rollout, fleet, disk.save, forks=forks).go_on()
    return rollout, disk


def fleet_of(count: int, **faults: str) -> PlayedFleet:
    return PlayedFleet({f"h{number}": PlayedHost() for number in range(count)}, faults)


def test_every_host_gets_what_is_planned_and_the_canary_goes_first() -> None:
    fleet = fleet_of(9)
    rollout, disk = run(fleet, new_rollout(list(fleet.hosts)))
    assert [len(batch) for batch in rollout.batches] == [1, 3, 3, 2]
    assert (rollout.status, rollout.exit_code) == ("done", 0)
    assert all(host.runs == "new" and host.open for host in fleet.hosts.values())
    assert fleet.most_out == 3
    steps = [event.step for event in rollout.hosts["h0"].events]
    assert steps == ["prepare", "look", "drain", "measure", "apply", "measure again", "open", "settle"]
    assert disk.load().to_json() == rollout.to_json()


@pytest.mark.parametrize("fault", ["garbage", "slow", "busy", "later", "dies"])
def test_a_failed_canary_returns_and_nobody_follows(fault: str) -> None:
    fleet = fleet_of(5, h0=fault)
    rollout, _ = run(fleet, new_rollout(list(fleet.hosts)))
    assert (rollout.status, rollout.exit_code, rollout.failed) == ("stopped", 1, ["h0"])
    assert rollout.hosts["h0"].phase == "returned"
    assert {host.phase for name, host in rollout.hosts.items() if name != "h0"} == {"untouched"}
    assert all(host.runs == "old" and host.good for host in fleet.hosts.values())
    if fault == "slow":
        assert "10.0 tokens/s instead of 100.0 before (10 %, and 90 % are asked for)" in rollout.hosts["h0"].problem


@pytest.mark.parametrize(("count", "options"), [(1, {}), (3, {"batch": "1"})])
def test_one_that_fails_last_stops_the_rollout_too(count: int, options: dict[str, Any]) -> None:
    last = f"h{count - 1}"
    fleet = fleet_of(count, **{last: "garbage"})
    rollout, _ = run(fleet, new_rollout(list(fleet.hosts), **options))
    assert (rollout.status, rollout.failed) == ("stopped", [last])


def test_a_host_that_does_not_return_is_said_to_be_lost() -> None:
    fleet = fleet_of(3, h1="gone")
    fleet.hosts["h1"].up = False
    rollout, _ = run(fleet, new_rollout(list(fleet.hosts)))
    assert (rollout.status, rollout.hosts["h1"].phase) == ("stopped", "lost")
    assert rollout.unfinished
    # Later it is back, and `--resume` looks after it.
    del fleet.faults["h1"]
    rollout, _ = run(fleet, rollout)
    assert rollout.hosts["h1"].phase == "returned"
    assert not rollout.unfinished


def test_so_many_may_fail() -> None:
    fleet = fleet_of(6, h0="garbage", h3="slow")
    rollout, _ = run(fleet, new_rollout(list(fleet.hosts), max_failed=2))
    assert (rollout.status, rollout.exit_code, rollout.failed) == ("done", 1, ["h0", "h3"])
    assert sorted(host.runs for host in fleet.hosts.values()) == ["new"] * 4 + ["old"] * 2


def test_a_host_that_does_not_serve_gets_what_mends_it() -> None:
    fleet = fleet_of(3)
    fleet.hosts["h0"].serves = False
    rollout, _ = run(fleet, new_rollout(list(fleet.hosts)))
    assert (rollout.status, rollout.exit_code) == ("done", 0)
    assert (rollout.hosts["h0"].before, rollout.hosts["h0"].after) == ({}, {"chat": 100.0})


def test_what_cannot_be_prepared_drains_nobody() -> None:
    fleet = fleet_of(3, h2="full")
    rollout, _ = run(fleet, new_rollout(list(fleet.hosts)))
    assert (rollout.status, rollout.exit_code) == ("stopped", 1)
    assert fleet.most_out == 0
    assert all(host.runs == "old" for host in fleet.hosts.values())


@pytest.mark.parametrize("step", ["prepare", "apply"])
@pytest.mark.parametrize("error", [V100ctlError("Ansible was killed"), OSError(28, "No space left on device", "/tmp/x")])
def test_what_cannot_be_run_at_all_leaves_nobody_outside(monkeypatch: pytest.MonkeyPatch, step: str, error: Exception) -> None:
    fleet = fleet_of(4)

    def fails(_names: Sequence[str]) -> Mapping[str, V100ctlError]:
        raise error

    monkeypatch.setattr(fleet, step, fails)
    rollout, disk = run(fleet, new_rollout(list(fleet.hosts), canary=2))
    assert (rollout.status, rollout.exit_code) == ("stopped", 1)
    assert rollout.failed == (["h0", "h1"] if step == "apply" else list(fleet.hosts))
    assert all(host.good and host.runs == "old" for host in fleet.hosts.values())
    assert not disk.load().unfinished
    assert str(getattr(error, "strerror", error)) in rollout.hosts["h0"].problem


def test_what_is_started_gets_no_request_before_it_was_judged() -> None:
    fleet = fleet_of(2, h0="slow")
    rollout = new_rollout(list(fleet.hosts))
    fleet.hosts["h0"].serves = False
    rollout.hosts["h0"].restarts, rollout.hosts["h0"].starts = [], ["chat"]
    run(fleet, rollout)
    assert rollout.hosts["h0"].phase == "done", "there was no speed to compare with"
    steps = [event.step for event in rollout.hosts["h0"].events]
    assert steps == ["prepare", "look", "drain", "measure", "apply", "measure again", "open", "settle"]


def test_a_host_whose_servers_go_on_is_not_drained() -> None:
    fleet = fleet_of(2)
    rollout = new_rollout(list(fleet.hosts))
    rollout.hosts["h1"].restarts = []
    run(fleet, rollout)
    assert [event.step for event in rollout.hosts["h1"].events] == ["prepare", "look", "apply", "settle"]


def test_servers_of_a_host_whose_driver_changes_are_measured_and_then_stopped() -> None:
    fleet = fleet_of(2)
    fleet.reboots = True
    rollout = new_rollout(list(fleet.hosts))
    for host in rollout.hosts.values():
        host.reboots = True
    run(fleet, rollout)
    assert rollout.exit_code == 0
    steps = [event.step for event in rollout.hosts["h0"].events]
    assert steps == ["prepare", "look", "drain", "measure", "stop", "apply", "measure again", "open", "settle"]
    assert rollout.hosts["h0"].before == {"chat": 100.0}


FAULTS = st.sampled_from(["", "", "", "garbage", "slow", "busy", "later", "dies", "full"])


@settings(max_examples=400)
@given(
    faults=st.lists(FAULTS, min_size=1, max_size=6),
    dies_after=st.lists(st.integers(min_value=0, max_value=40), min_size=1, max_size=4),
    abort_at=st.integers(min_value=0, max_value=4),
    max_failed=st.integers(min_value=0, max_value=2),
    batch=st.sampled_from(["1", "2", "25%", "100%"]),
    canary=st.integers(min_value=0, max_value=2),
    reboots=st.booleans(),
)
def test_whatever_dies_resume_or_abort_ends_well(
    faults: list[str], dies_after: list[int], abort_at: int, max_failed: int, batch: str, canary: int, reboots: bool
) -> None:
    """The controller dies again and again, at any step; each time the next one resumes, or at some time aborts."""
    names = [f"h{number}" for number in range(len(faults))]
    fleet = fleet_of(len(faults), **{name: fault for name, fault in zip(names, faults, strict=True) if fault})
    disk = Disk()
    rollout = new_rollout(names, canary=canary, batch=batch, max_failed=max_failed)
    fleet.reboots = reboots
    for host in rollout.hosts.values():
        host.reboots = reboots
    most = max(map(len, rollout.batches))
    disk.save(rollout)
    aborted = False
    for attempt, limit in enumerate([*dies_after, None]):
        fleet.dies_after, fleet.effects = limit, 0
        rollout = disk.load()
        if not rollout.unfinished:
            break
        machine = Machine(rollout, fleet, disk.save)
        aborted = aborted or attempt >= abort_at > 0
        try:
            machine.abort() if aborted else machine.go_on()
        except ControllerDied:
            continue
        break
    rollout = disk.load()
    assert not rollout.unfinished
    assert all(host.good for host in fleet.hosts.values()), rollout.to_json()
    for name, host in rollout.hosts.items():
        assert fleet.hosts[name].runs == ("new" if host.phase == "done" else "old"), (name, host)
        assert host.phase in ("done", "returned", "untouched")
    assert fleet.most_out <= most
    if not aborted:
        assert rollout.exit_code == (0 if all(host.phase == "done" for host in rollout.hosts.values()) else 1)


@settings(max_examples=200)
@given(
    faults=st.lists(st.sampled_from(["", "", "gone", "garbage", "full"]), min_size=1, max_size=5),
    dies_after=st.lists(st.integers(min_value=0, max_value=40), max_size=3),
    max_failed=st.integers(min_value=0, max_value=5),
    batch=st.sampled_from(["1", "2", "100%"]),
    others=st.integers(min_value=0, max_value=1),
    abort=st.booleans(),
)
def test_whoever_is_lost_is_led_back_later_and_somebody_serves_all_the_time(
    faults: list[str], dies_after: list[int], max_failed: int, batch: str, others: int, abort: bool
) -> None:
    names = [f"h{number}" for number in range(len(faults))]
    fleet = fleet_of(len(faults), **{name: fault for name, fault in zip(names, faults, strict=True) if fault})
    servers = len(names) + others
    rollout = new_rollout(names, batch=batch, max_failed=max_failed)
    rollout.batches = in_batches(
        names, rollout.options, len(names), missing={name: ["chat"] for name in names}, servers={"chat": servers}
    )
    rollout.servers = {"chat": servers}
    for host in rollout.hosts.values():
        host.serves = ["chat"]
    disk = Disk()
    disk.save(rollout)
    for limit in [*dies_after, None]:
        fleet.dies_after, fleet.effects = limit, 0
        with contextlib.suppress(ControllerDied):
            Machine(disk.load(), fleet, disk.save).go_on()
    if servers > 1:
        assert fleet.most_out < servers
    lost = [name for name, host in disk.load().hosts.items() if host.phase == "lost"]
    assert set(lost) == set(disk.load().held)
    assert all(fleet.hosts[name].good for name in names if name not in lost)
    # Somebody switches them on again.
    fleet.faults = {name: fault for name, fault in fleet.faults.items() if fault != "gone"}
    if lost:
        machine = Machine(disk.load(), fleet, disk.save)
        machine.abort() if abort else machine.go_on()
    assert not disk.load().unfinished
    assert all(host.good for host in fleet.hosts.values())


@pytest.mark.parametrize("forks", [1, 4])
def test_hosts_of_a_batch_go_at_once(forks: int) -> None:
    fleet = fleet_of(8)
    rollout, _ = run(fleet, new_rollout(list(fleet.hosts), batch="100%"), forks=forks)
    assert rollout.exit_code == 0


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Ctrl-C as in a terminal: a shell's background jobs ignore it from the start."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_after_ctrl_c_nothing_more_is_begun() -> None:
    fleet = fleet_of(4)
    stopped = threading.Event()
    sleep, both = sleep_unless(stopped), threading.Barrier(2)

    def drain(host: HostState) -> None:
        fleet.hosts[host.name].open = False
        both.wait(10)
        if host.name == "h0":
            # To the thread that a terminal's Ctrl-C wakes, once that waits for the others.
            stopped.wait(0.3)
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            assert stopped.wait(30)
        else:
            # As one that waits for a host that does not answer.
            sleep(60)

    fleet.drain = drain  # type: ignore[method-assign]
    disk = Disk()
    rollout = new_rollout(list(fleet.hosts), canary=0, batch="2")
    with pytest.raises(KeyboardInterrupt):
        Machine(rollout, fleet, disk.save, forks=2, stopped=stopped).go_on()
    found = disk.load()
    assert [host.phase for host in found.hosts.values()] == ["draining", "draining", "waiting", "waiting"]
    assert not [event.step for host in found.hosts.values() for event in host.events if event.step == "measure"]
    assert not found.failed
    del fleet.drain
    Machine(found, fleet, disk.save, forks=2).go_on()
    assert found.exit_code == 0
    assert all(host.good for host in fleet.hosts.values())


@pytest.mark.parametrize(
    ("count", "options", "most", "sizes"),
    [
        (1, {}, 1, [1]),
        (5, {}, 4, [1, 2, 2]),
        (5, {"batch": "100%", "canary": 0}, 4, [4, 1]),
        (200, {"canary": 2}, 199, [2, 50, 50, 50, 48]),
        (4, {"batch": "3"}, 9, [1, 3]),
        (3, {"canary": 9}, 2, [2, 1]),
    ],
)
def test_batches(count: int, options: dict[str, Any], most: int, sizes: list[int]) -> None:
    names = [f"h{number}" for number in range(count)]
    batches = in_batches(names, Options(**options), most)
    assert [len(batch) for batch in batches] == sizes
    assert [name for batch in batches for name in batch] == names


@pytest.mark.parametrize(
    ("missing", "options", "batches"),
    [
        # Of `b` there are two among many of `a`.
        ("aaaaaabb", {"batch": "3"}, ["0", "123", "456", "7"]),
        ("bbaaaaaa", {"canary": 2}, ["0", "1", "23", "45", "67"]),
        # Hosts that serve nothing yet take nobody away.
        ("aa--", {"batch": "100%", "canary": 0}, ["023", "1"]),
        # One that alone serves a name has to go all the same.
        ("abcd", {"batch": "2", "canary": 0}, ["01", "23"]),
        ("ab", {"batch": "2", "canary": 0}, ["01"]),
        # A host with several instances counts for each.
        (["ab", "a", "b", "ab"], {"batch": "3", "canary": 0}, ["012", "3"]),
        (["ab", "a", "b"], {"batch": "3", "canary": 0}, ["0", "12"]),
    ],
)
def test_of_no_name_all_servers_are_out_at_once(missing: Sequence[str], options: dict[str, Any], batches: list[str]) -> None:
    away = {str(number): [name for name in names if name != "-"] for number, names in enumerate(missing)}
    servers = Counter(name for names in away.values() for name in names)
    found = in_batches(list(away), Options(**options), len(away), missing=away, servers=servers)
    assert ["".join(batch) for batch in found] == batches


@pytest.mark.parametrize("batch", ["1", "100%"])
@pytest.mark.parametrize(("servers", "left"), [(3, ["h2"]), (4, [])])
def test_one_that_is_lost_is_missed_by_those_that_follow(batch: str, servers: int, left: list[str]) -> None:
    fleet = fleet_of(3, h0="dies")
    rollout = new_rollout(list(fleet.hosts), max_failed=2, batch=batch)
    rollout.servers = {"chat": servers}
    for host in rollout.hosts.values():
        host.serves = ["chat"]
    real, names = fleet.reach, list(fleet.hosts)
    # h0 and h1 die and never come back; the fourth server, where there is one, is none of this rollout.
    fleet.faults["h1"] = "dies"

    def go_back(host: HostState) -> None:
        real(host.name)

    fleet.go_back = go_back  # type: ignore[method-assign]
    run(fleet, rollout)
    assert [host.phase for host in rollout.hosts.values()] == ["lost", "lost", "untouched" if left else "done"]
    assert [name for name in names if "nobody would serve chat" in rollout.hosts[name].problem] == left
    assert (rollout.status, rollout.exit_code) == ("stopped", 1)


@pytest.mark.parametrize("batch", ["", "0", "-1", "half", "25 %"])
def test_a_batch_that_means_nothing_is_refused(batch: str) -> None:
    with pytest.raises(RolloutError, match="--batch"):
        in_batches(["a"], Options(batch=batch), 1)


def test_what_is_written_down_can_be_read_again() -> None:
    fleet = fleet_of(2, h1="slow")
    rollout, disk = run(fleet, new_rollout(list(fleet.hosts)))
    again = disk.load()
    assert again == rollout
    changed = copy.deepcopy(again)
    changed.hosts["h0"].phase = "lost"
    assert changed.unfinished
