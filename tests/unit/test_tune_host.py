"""What a host does for `tune`: trials, and the live settings again after a kill at any point of anybody."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from v100ctl.tune import host_script as host

UNIT = "v100-chat.service"
BEGIN = {
    "verb": "begin",
    "name": "chat",
    "unit": UNIT,
    "token": "t1",
    "lease_s": 90.0,
    "script": "# the script",
    "cards": ["GPU-1"],
    "power": True,
}
COMMON = {key: BEGIN[key] for key in ("name", "unit", "token", "lease_s")}


class KilledError(BaseException):
    """As SIGKILL: no clean-up runs."""


class World:
    """A host with one unit. ``steps_left``: how many more effects happen before whoever acts is killed; ``None``: nobody is."""

    def __init__(self, root: Path) -> None:
        self.root, self.now_s, self.steps_left = root, 1000.0, None
        self.power, self.runs_with, self.active, self.dead_man, self.gateway = 300.0, "live", True, False, "open"
        self.invocation = 1
        self.steps = 0

    def step(self) -> None:
        self.steps += 1
        if self.steps_left is not None:
            if self.steps_left == 0:
                raise KilledError
            self.steps_left -= 1

    def run(self, argv: list[str], timeout_s: float) -> tuple[int, str]:
        if argv[:2] == ["systemctl", "show"]:
            return 0, f"ActiveState={'active' if self.active else 'failed'}\nInvocationID={self.invocation}\nJob=0\n"
        if argv[0] == "nvidia-smi" and argv[1].startswith("--query"):
            return 0, f"GPU-1, {self.power:.2f}\nGPU-2, 250.00\n"
        self.step()
        if argv[0] == "nvidia-smi":
            self.power = float(argv[-1])
        elif argv[0] == "systemd-run":
            self.dead_man = True
            (host.folder("chat") / "held").write_text("")
        elif argv[:2] == ["systemctl", "restart"]:
            file = host.drop_in(UNIT)
            self.runs_with = file.read_text() if file.exists() else "live"
            self.active, self.invocation = True, self.invocation + 1
        elif "open" in argv:
            self.gateway = "open"
        return 0, ""

    @property
    def as_it_was(self) -> bool:
        left = [path for path in self.root.rglob("*") if path.is_file() and path.suffix != ".lock"]
        return (self.runs_with, self.active, self.power, self.gateway, left) == ("live", True, 300.0, "open", [])


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    made = World(tmp_path / "run")
    monkeypatch.setattr(host, "RUN_DIR", made.root)
    gateway = tmp_path / "gateway_control.py"
    gateway.write_text("")
    monkeypatch.setattr(host, "GATEWAY_PROGRAM", gateway)
    monkeypatch.setattr(host, "now_s", lambda: made.now_s)
    monkeypatch.setattr(host, "run", made.run)
    for name in ("write", "remove"):
        real: Callable[..., None] = getattr(host, name)

        def stepping(*arguments: Any, real: Callable[..., None] = real) -> None:
            made.step()
            real(*arguments)

        monkeypatch.setattr(host, name, stepping)
    return made


def trial(text: str, watts: float | None = None) -> dict[str, Any]:
    return {**COMMON, "verb": "trial", "drop_in": text, "power": {} if watts is None else {"GPU-1": watts}}


def session(world: World) -> None:
    """All that a controller has done on a host, from the first word to the last."""
    host.begin(BEGIN)
    world.step()
    world.gateway = "drained"
    host.trial(trial("", None))
    host.trial(trial("candidate", 175.0))
    host.look(COMMON)
    host.trial(trial("", None))
    host.trial(trial("another", 200.0))
    host.end(COMMON)


def dead_man(world: World) -> None:
    """What systemd keeps running: it looks again and again, however often it is killed, until nothing is tuned any more."""
    while world.dead_man and host.check("chat"):
        world.now_s += 1.0
    world.dead_man = False


def test_a_whole_session_leaves_nothing(world: World) -> None:
    host.begin(BEGIN)
    host.trial(trial("candidate", 175.0))
    assert (world.runs_with, world.power) == ("candidate", 175.0)
    assert host.check("chat")
    host.trial(trial("", None))
    # The live settings are those of the unit and of the card as it was.
    assert (world.runs_with, world.power) == ("live", 300.0)
    host.end(COMMON)
    assert world.as_it_was
    assert not host.check("chat")


def test_the_live_settings_come_back_after_a_kill_of_the_controller_at_any_step(world: World) -> None:
    session(world)
    steps = world.steps
    dead_man(world)
    assert steps > 30 and world.as_it_was
    for killed_after in range(steps):
        world.steps_left = killed_after
        with pytest.raises(KilledError):
            session(world)
        world.steps_left = None
        if world.dead_man:
            dead_man(world)
            assert world.as_it_was, killed_after
        else:
            # It was killed before anything of the server was touched.
            assert (world.runs_with, world.power, world.gateway) == ("live", 300.0, "open"), killed_after
            assert not host.drop_in(UNIT).exists()
            world.now_s += 100.0
            host.begin(BEGIN)
            host.end(COMMON)
            assert world.as_it_was


def test_they_come_back_although_the_dead_man_is_killed_at_any_step_too(world: World) -> None:
    for killed_after in range(40):
        host.begin(BEGIN)
        world.gateway = "drained"
        host.trial(trial("candidate", 175.0))
        world.now_s += 100.0
        world.steps_left = killed_after
        try:
            host.check("chat")
        except KilledError:
            world.steps_left = None
            assert world.dead_man
            dead_man(world)
        else:
            assert killed_after > 5
            break
        finally:
            world.steps_left = None
        assert world.as_it_was, killed_after
    else:
        raise AssertionError("it never ended")
    assert world.as_it_was


def test_a_lease_that_is_renewed_does_not_lapse(world: World) -> None:
    host.begin(BEGIN)
    host.trial(trial("candidate"))
    for _ in range(5):
        world.now_s += 80.0
        host.look(COMMON)
        assert host.check("chat")
    assert world.runs_with == "candidate"
    world.now_s += 91.0
    assert not host.check("chat")
    assert world.as_it_was
    # A controller that comes back is told so, and changes nothing any more.
    for verb in (host.look, host.trial):
        with pytest.raises(host.Refused, match="lapsed"):
            verb({**trial("candidate"), "url": ""})
    assert world.as_it_was


def test_a_lease_that_cannot_be_read_has_lapsed(world: World) -> None:
    host.begin(BEGIN)
    host.trial(trial("candidate"))
    (host.folder("chat") / "lease").write_text("")
    assert not host.check("chat")
    assert world.as_it_was


def test_one_at_a_time(world: World) -> None:
    host.begin(BEGIN)
    for verb, said in ((host.begin, "another tune"), (host.end, "another tune"), (host.trial, "lapsed")):
        with pytest.raises(host.Refused, match=said):
            verb({**BEGIN, **trial("x"), "token": "t2"})
    # After its lease the next one takes over, and brings back first.
    host.trial(trial("candidate"))
    world.now_s += 100.0
    host.begin({**BEGIN, "token": "t2"})
    assert world.runs_with == "live"


def test_what_does_not_run_is_not_tuned(world: World) -> None:
    world.active = False
    with pytest.raises(host.Refused, match="does not run"):
        host.begin(BEGIN)
    assert list(world.root.rglob("*.json")) == []


def test_without_a_dead_man_nothing_begins(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    real = world.run
    monkeypatch.setattr(host, "run", lambda argv, limit: (1, "no systemd") if argv[0] == "systemd-run" else real(argv, limit))
    with pytest.raises(host.Refused, match="no dead-man can be started: no systemd"):
        host.begin(BEGIN)
    assert world.as_it_was


def test_a_power_limit_that_a_card_refuses_ends_the_trial(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    host.begin(BEGIN)
    real = world.run
    monkeypatch.setattr(host, "run", lambda argv, limit: (6, "out of range") if "-pl" in argv else real(argv, limit))
    assert host.trial(trial("candidate", 900.0))["problem"] == "out of range"
    assert world.runs_with == "live"


def test_without_being_asked_for_power_limits_are_not_touched(world: World) -> None:
    host.begin({**BEGIN, "power": False})
    host.trial(trial("candidate", 175.0))
    assert world.power == 300.0
    host.end(COMMON)
    assert world.as_it_was


def test_the_program_prints_one_object(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    assert host.main(["--request", json.dumps(BEGIN)]) == 0
    assert json.loads(capsys.readouterr().out) == {"power": {"GPU-1": 300.0}}
    assert host.main(["--request", json.dumps({**BEGIN, "token": "t2"})]) == 0
    assert "another tune" in json.loads(capsys.readouterr().out)["refused"]


def test_it_runs_on_the_oldest_python_of_a_host() -> None:
    ast.parse(Path(host.__file__).read_text(encoding="utf-8"), feature_version=(3, 8))
