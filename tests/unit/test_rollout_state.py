"""What is written down of rollouts: who may begin one, who may go on with which, and what one that lost a host holds."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import subprocess
from collections.abc import Callable, Iterator, Sequence
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import pytest

from v100ctl.access import Access
from v100ctl.apply.reporter import make_reporter
from v100ctl.errors import UnreachableError, V100ctlError
from v100ctl.examine import Examined
from v100ctl.findings import Finding
from v100ctl.fleet import Fleet, FleetHost, parse_config
from v100ctl.probe import Connection
from v100ctl.provision import lock_path
from v100ctl.rollout import claims, state
from v100ctl.rollout import fleet_rollout as module
from v100ctl.rollout.fleet_rollout import carry_out, find_unfinished, plan_rollout
from v100ctl.rollout.state import HostState, Options, Phase, Rollout, RolloutError

from .factory import make_plan
from .test_rollout_machine import ControllerDied, PlayedFleet, PlayedHost

ROOT = Path(__file__).resolve().parents[2]
AS_OF = date(2026, 11, 30)
CHANGE = Finding("file.content:/x", "drifted", "file", "llm_server", "a", "b", "error", "provision", restarts=("chat",))


@pytest.fixture(autouse=True)
def _state(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


def inventory(*names: str) -> Fleet:
    return Fleet({name: FleetHost(name, {"ansible_host": name}, parse_config(name, {})) for name in names})


def address(name: str) -> str:
    return lock_path(inventory(name).hosts[name], Connection(name, kind="ssh", address=name)).name


def rollout_of(identifier: str = "r1", *, status: Any = "running", **phases: Phase) -> Rollout:
    hosts = {name: HostState(name, address=address(name), phase=phase, restarts=["chat"]) for name, phase in phases.items()}
    begun = "2026-11-30T04:00:00+00:00"
    return Rollout(identifier, "me@here", begun, "2026-11-30", Options(), hosts, [list(hosts)], status=status, prepared=True)


class Play:
    """A played fleet in the place of real hosts. ``wanted``: host to another plan than its rollout was begun with."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path, *names: str) -> None:
        self.fleet = PlayedFleet({name: PlayedHost() for name in names})
        self.examined: list[str] = []
        self.wanted: dict[str, str] = {}
        monkeypatch.setattr(module, "FleetActions", lambda *_, **__: self.fleet)
        monkeypatch.setattr(module, "examine", self.examine)
        monkeypatch.setattr(module, "open_session", self.session)
        #: By whom each host is claimed, in real files.
        self.folder = folder
        monkeypatch.setattr(claims, "CLAIM", "rollout.json")
        monkeypatch.setattr(module, "_wanted", lambda found: self.wanted.get(found.host.name, ""))

    @contextlib.contextmanager
    def session(self, connection: Connection) -> Iterator[Any]:
        if not self.fleet.hosts[connection.host].up:
            raise UnreachableError(f"{connection.host} does not answer")

        def run(command: Sequence[str], **_: Any) -> Any:
            # sh -c SCRIPT sh FILE MORE
            argv = [*command[:4], str(self.claimed(connection.host)), *command[5:]]
            done = subprocess.run(argv, capture_output=True, check=False)
            return SimpleNamespace(rc=done.returncode, stdout=done.stdout, stderr=done.stderr)

        yield SimpleNamespace(run=run)

    def claimed(self, name: str) -> Path:
        folder = self.folder / name
        folder.mkdir(parents=True, exist_ok=True)
        return folder / "rollout.json"

    def examine(self, hosts: Sequence[FleetHost], *_: Any, **__: Any) -> dict[str, Examined]:
        self.examined += [host.name for host in hosts]
        plan = dataclasses.replace(make_plan(), driver=None)
        found = {
            host.name: Examined(host, Connection(host.name, kind="ssh", address=host.name), plan=plan, findings=(CHANGE,))
            for host in hosts
        }
        return found

    def plan(self, *names: str) -> Rollout:
        return plan_rollout(inventory(*names), Access(), make_reporter(), AS_OF, Options())

    def carry_out(self, rollout: Rollout, *names: str, **options: Any) -> Rollout:
        return carry_out(rollout, inventory(*names), Access(forks=1), make_reporter(), **options)


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Play:
    return Play(monkeypatch, tmp_path / "hosts", "a", "b", "c")


# --- two at once --------------------------------------------------------------------------------------------------------------


def test_one_that_was_cut_off_while_a_person_was_asked_is_not_gone_over(play: Play) -> None:
    planned = play.plan("a", "b")
    state.save(rollout_of("r0", a="applying", b="waiting"))
    with pytest.raises(RolloutError, match="was not ended"):
        play.carry_out(planned, "a", "b")
    assert play.fleet.effects == 0
    assert [found.id for found in state.load_all()] == ["r0"]


@pytest.mark.parametrize("way", [{"resumed": True}, {"abort": True}])
def test_what_counts_is_written_down_and_not_what_was_read_before_the_lock(play: Play, way: dict[str, bool]) -> None:
    state.save(rollout_of(a="waiting", b="waiting"))
    found = find_unfinished(inventory("a", "b"), Access())
    # Another run goes on with it and is killed.
    state.save(rollout_of(a="done", b="applying"))
    play.fleet.hosts["a"].runs = "new"
    play.fleet.hosts["b"].open = False
    ended = play.carry_out(found, "a", "b", **way)
    assert ended.hosts["a"].phase == "done"
    assert ended.hosts["b"].phase == ("returned" if "abort" in way else "done")
    assert all(host.good for host in play.fleet.hosts.values())
    # Another run has ended it.
    with pytest.raises(RolloutError, match="has ended meanwhile"):
        play.carry_out(found, "a", "b", **way)


def test_two_at_once_are_refused_with_owner_and_age(play: Play) -> None:
    planned = play.plan("a", "b")
    with (
        state.alone([address("b")]),
        pytest.raises(RolloutError, match=r"another rollout runs over the same hosts: \S+@\S+ .* ago"),
    ):
        play.carry_out(planned, "a", "b")
    assert play.fleet.effects == 0
    play.carry_out(planned, "a", "b")


def test_another_controller_is_refused_with_owner_and_age(play: Play, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    state.save(rollout_of(a="waiting", b="waiting", c="waiting"))
    found = find_unfinished(inventory("a"), Access())
    play.fleet.dies_after = 9
    with pytest.raises(ControllerDied):
        play.carry_out(found, "a", "b", "c", resumed=True)
    play.fleet.dies_after = None

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another"))
    planned = play.plan("b", "c")
    play.claimed("c").unlink()
    effects = play.fleet.effects
    with pytest.raises(RolloutError, match=r"b is being changed by the rollout that me@here began .* ago"):
        play.carry_out(planned, "b", "c")
    assert play.fleet.effects == effects
    # What it could claim is let go, and nothing is left unfinished there.
    assert not play.claimed("c").exists()
    assert list(state.load_all()) == []

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert play.carry_out(found, "a", "b", "c", resumed=True).status == "done"
    assert not any(play.claimed(name).exists() for name in "abc")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another"))
    assert play.carry_out(play.plan("b", "c"), "b", "c").status == "done"
    # Nothing is left beside it.
    assert not [path for path in (tmp_path / "hosts").rglob("*") if path.is_file()]


def test_a_host_that_was_away_at_the_end_is_not_held_for_good(play: Play) -> None:
    state.save(rollout_of("r0", status="aborted", a="untouched", b="done"))
    mine = json.dumps({"id": "r0", "owner": "me@here", "since": "2026-11-30T04:00:00+00:00"})
    play.claimed("a").write_text(mine)
    assert play.carry_out(play.plan("a"), "a").status == "done"
    assert not play.claimed("a").exists()


@pytest.mark.parametrize("content", ["", "{", "[]", '{"id": 7}'])
def test_a_claim_that_says_nothing_is_one_all_the_same(play: Play, content: str) -> None:
    play.claimed("a").write_text(content)
    with pytest.raises(RolloutError, match="a is being changed by the rollout that somebody began an unknown time ago") as error:
        play.carry_out(play.plan("a"), "a")
    assert error.value.hint is not None
    assert "remove rollout.json on the host" in error.value.hint
    assert play.claimed("a").read_text() == content


def test_a_bare_host_and_one_that_is_away_are_claimed_by_nobody(play: Play) -> None:
    with play.session(Connection("a")) as session:
        done = session.run(["/bin/sh", "-c", claims._TAKE, "sh", "-", "x"])
        assert (done.rc, play.claimed("a").read_text()) == (0, "x\n")
    bare = play.folder / "bare/rollout.json"
    for script in (claims._TAKE, claims._REPLACE, claims._LEAVE):
        assert subprocess.run(["/bin/sh", "-c", script, "sh", str(bare), "x"], check=False).returncode == 0
        assert not bare.parent.exists()
    play.fleet.hosts["b"].up = False
    rollout = rollout_of(b="lost", status="stopped")
    claims.claim(rollout, ["b"], lambda name: play.session(Connection(name)), ended=(), forks=1)
    claims.let_go(rollout, ["b"], lambda name: play.session(Connection(name)), forks=1)


# --- one that has lost a host -------------------------------------------------------------------------------------------------


def test_a_lost_host_keeps_no_other_from_being_changed(play: Play) -> None:
    state.save(rollout_of(status="stopped", a="lost", b="done", c="untouched"))
    with pytest.raises(RolloutError, match=r"was not ended: .* has lost a") as error:
        play.plan("a", "b", "c")
    assert error.value.hint is not None
    assert "--limit 'all:!a'" in error.value.hint
    ended = play.carry_out(play.plan("b", "c"), "b", "c")
    assert (ended.status, list(ended.hosts)) == ("done", ["b", "c"])
    # It left the inventory together with a host that was done: the one that is lost can be led back all the same.
    found = find_unfinished(inventory("a", "c"), Access())
    ended = play.carry_out(found, "a", resumed=True)
    assert (ended.hosts["a"].phase, ended.unfinished) == ("returned", False)
    play.plan("a", "b", "c")


def test_what_was_not_begun_may_have_left_the_inventory_of_one_that_is_ended(play: Play) -> None:
    state.save(rollout_of(a="done", b="applying", c="waiting"))
    found = find_unfinished(inventory("b"), Access())
    with pytest.raises(RolloutError, match="the rollout has c, which"):
        play.carry_out(found, "b", resumed=True)
    ended = play.carry_out(found, "b", abort=True)
    assert (ended.status, ended.hosts["b"].phase, ended.hosts["c"].phase) == ("aborted", "returned", "untouched")


# --- another plan -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", ["waiting", "draining", "applying", "proving", "opening", "settling"])
def test_what_was_begun_with_one_plan_does_not_end_with_another(play: Play, phase: Phase) -> None:
    state.save(rollout_of(a="done", b=phase))
    play.wanted = {"a": "another", "b": "another"}
    found = find_unfinished(inventory("a", "b"), Access())
    with pytest.raises(RolloutError, match="no longer wants for b what"):
        play.carry_out(found, "a", "b", resumed=True)
    assert play.fleet.effects == 0
    ended = play.carry_out(found, "a", "b", abort=True)
    assert not ended.unfinished


# --- the disk -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "null", '{"schema": "v100ctl/rollout/2"}', '{"schema": "v100ctl/rollout/1"}', "\xff"],
)
def test_what_cannot_be_read_is_not_taken_for_ended(play: Play, content: str) -> None:
    state.save(rollout_of(a="applying"))
    path = state.folder() / "r1.json"
    path.write_bytes(content.encode("latin-1"))
    ways: list[Callable[[], Rollout]] = [lambda: play.plan("b"), lambda: find_unfinished(inventory("b"), Access())]
    for refused in ways:
        with pytest.raises(RolloutError, match=r"r1\.json, where a rollout was written down, cannot be read"):
            refused()
    path.unlink()
    play.plan("b")


def test_whoever_is_cut_off_is_told_how_to_go_on(
    play: Play, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    planned = play.plan("a")

    def full(_rollout: Rollout) -> None:
        raise RolloutError("the disk is full")

    written: Any = state.save
    calls: list[int] = []

    def save(rollout: Rollout) -> None:
        calls.append(1)
        (written if len(calls) < 4 else full)(rollout)

    monkeypatch.setattr(state, "save", save)
    with pytest.raises(V100ctlError, match="the disk is full"):
        play.carry_out(planned, "a")
    assert "`v100ctl rollout --resume` goes on from here" in capsys.readouterr().err


def test_a_host_that_is_away_has_no_other_plan(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    state.save(rollout_of(a="applying"))
    monkeypatch.setattr(
        module, "examine", lambda hosts, *_, **__: {host.name: Examined(host, error=UnreachableError("away")) for host in hosts}
    )
    play.wanted = {"a": "another"}
    assert play.carry_out(find_unfinished(inventory("a"), Access()), "a", resumed=True).hosts["a"].phase == "done"


# --- what is told -------------------------------------------------------------------------------------------------------------


def test_the_document_has_the_exit_code_that_the_command_ends_with(play: Play) -> None:
    schema = json.loads((ROOT / "docs/reference/rollout.schema.json").read_text("utf-8"))
    planned = play.plan("a")
    assert (planned.status, planned.exit_code) == ("planned", 2)
    jsonschema.validate(planned.to_json(), schema)
    ended = play.carry_out(planned, "a")
    assert (ended.status, ended.exit_code) == ("done", 0)
    jsonschema.validate(ended.to_json(), schema)
    endings: list[tuple[Phase, int]] = [("applying", 0), ("lost", 1)]
    for phase, code in endings:
        state.save(rollout_of(a="waiting", b=phase))
        if phase == "lost":
            play.fleet.faults["b"] = "gone"
            play.fleet.hosts["b"].up = False
        ended = play.carry_out(find_unfinished(inventory("b"), Access()), "b", abort=True)
        assert (ended.status, ended.exit_code) == ("aborted", code)
        jsonschema.validate(ended.to_json(), schema)
    # What was ended stays ended when the one that was lost is back.
    play.fleet.faults.clear()
    ended = play.carry_out(find_unfinished(inventory("b"), Access()), "b", resumed=True)
    assert (ended.status, ended.exit_code) == ("aborted", 0)
    nothing = dataclasses.replace(planned, hosts={}, batches=[], status="done")
    assert nothing.exit_code == 0
