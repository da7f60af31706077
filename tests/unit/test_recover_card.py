"""Bringing cards back: in which order what is stopped, mended and started, and when only a power cycle helps."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

ROOT = Path(__file__).resolve().parents[2]


def _module() -> ModuleType:
    spec = importlib.util.spec_from_file_location("recover_card", ROOT / "roles/gpu_tuning/files/recover_card.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


recover_card = _module()
RESET = "nvidia-smi -r"


LOOK = "nvidia-smi --query-gpu=index,uuid --format=csv,noheader"


class Host:
    """A host whose programs are recorded. ``fails`` names commands that fail, with what is wrong.

    ``modules`` are loaded; ``rmmod`` and ``modprobe`` change that.
    """

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.fails: dict[str, Any] = {}
        self.modules = {"nvidia", "nvidia_uvm", "nvidia_modeset"}

    def run(self, argv: list[str], limit_s: float = 0) -> str:
        command = " ".join(argv)
        self.calls.append(command)
        if command in self.fails:
            raise self.fails[command]
        if argv[0] == "rmmod":
            self.modules.remove(argv[1])
            # The next one is of the same version as the library.
            self.fails.pop(LOOK, None)
        if argv[0] == "modprobe":
            self.modules.add(argv[1])
        return {"ActiveState": "ActiveState=active\n", "UnitFileState": "UnitFileState=enabled\n"}.get(argv[-2], "")


@pytest.fixture
def make_host(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Host]:
    def make(users: dict[int, str], lost: tuple[str, ...] = ()) -> Host:
        host = Host()
        monkeypatch.setattr(recover_card, "run", host.run)
        monkeypatch.setattr(recover_card, "card_users", lambda: users)
        monkeypatch.setattr(recover_card, "lost_cards", lambda: list(lost))
        real = Path.exists
        monkeypatch.setattr(
            Path,
            "exists",
            lambda path: path.name in host.modules if str(path.parent) == "/sys/module" else real(path),
        )
        return host

    return make


def result(capsys: pytest.CaptureFixture[str], code: int, *arguments: str) -> dict[str, Any]:
    """What the program prints, with the exit code that it must have."""
    assert recover_card.main(list(arguments)) == code
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def test_everything_in_its_order(make_host: Callable[..., Host], capsys: pytest.CaptureFixture[str]) -> None:
    host = make_host({10: "v100-chat.service", 11: "v100-chat.service", 12: "nvidia-persistenced.service"})
    document = result(capsys, 0)
    assert [call for call in host.calls if "show" not in call] == [
        LOOK,
        "systemctl stop v100-chat.service",
        "systemctl stop nvidia-persistenced.service",
        "nvidia-smi -pm 0",
        "rmmod nvidia_uvm",
        "modprobe nvidia_uvm",
        RESET,
        "systemctl restart nvidia-persistenced.service",
        "systemctl restart v100ctl-gpu-tuning.service",
        "systemctl restart v100-chat.service",
        LOOK,
    ]
    assert (document["problem"], document["needs"]) == ("", "")
    assert document["steps"] == ["users stopped", "persistence off", "unified memory reloaded", "cards reset", "users started"]


@pytest.mark.parametrize("command", ["rmmod nvidia_uvm", RESET, "systemctl stop v100-chat.service"])
def test_what_was_stopped_is_started_whatever_fails(
    command: str, make_host: Callable[..., Host], capsys: pytest.CaptureFixture[str]
) -> None:
    host = make_host({10: "v100-chat.service"})
    host.fails = {command: recover_card.Problem("it is in use")}
    document = result(capsys, 1)
    assert document["problem"] == "it is in use"
    assert "systemctl restart v100-chat.service" in host.calls


def test_a_card_that_does_not_answer_afterwards(make_host: Callable[..., Host], capsys: pytest.CaptureFixture[str]) -> None:
    host = make_host({})
    host.modules.remove("nvidia_uvm")
    host.fails = {LOOK: recover_card.Problem("no answer")}
    assert result(capsys, 1)["needs"] == "reboot"


def test_a_driver_that_hangs_is_left_alone(make_host: Callable[..., Host], capsys: pytest.CaptureFixture[str]) -> None:
    host = make_host({10: "v100-chat.service"})
    host.fails = {LOOK: recover_card.Problem("no answer within 60 s: the driver hangs", "reboot")}
    document = result(capsys, 1)
    assert (document["needs"], document["users"], host.calls) == ("reboot", [], [LOOK])


def test_a_library_of_another_version_gets_its_module(make_host: Callable[..., Host], capsys: pytest.CaptureFixture[str]) -> None:
    host = make_host({10: "v100-chat.service"})
    host.fails = {LOOK: recover_card.Problem("Failed to initialize NVML: Driver/library version mismatch")}
    document = result(capsys, 0)
    assert document["steps"] == ["users stopped", "driver reloaded", "users started"]
    assert [call for call in host.calls if call.split()[0] in ("rmmod", "modprobe")] == [
        "rmmod nvidia_uvm",
        "rmmod nvidia_modeset",
        "rmmod nvidia",
        "modprobe nvidia",
        "modprobe nvidia_modeset",
        "modprobe nvidia_uvm",
    ]
    # Nothing that asks the driver works before that.
    assert "nvidia-smi -pm 0" not in host.calls


def test_a_driver_that_is_not_loaded_is_loaded(make_host: Callable[..., Host], capsys: pytest.CaptureFixture[str]) -> None:
    host = make_host({})
    host.modules.clear()
    document = result(capsys, 0)
    assert document["steps"] == ["driver loaded", "users started"]
    assert [call for call in host.calls if "show" not in call] == [
        "modprobe nvidia",
        "systemctl restart nvidia-persistenced.service",
        "systemctl restart v100ctl-gpu-tuning.service",
        LOOK,
    ]
    host.modules = {"nouveau"}
    host.calls.clear()
    assert (result(capsys, 1)["needs"], host.calls) == ("reboot", [])


@pytest.mark.parametrize("arguments", [("--check",), ("--request", '{"check": true}')])
def test_what_would_be_done_is_told_and_not_done(
    arguments: tuple[str, ...], make_host: Callable[..., Host], capsys: pytest.CaptureFixture[str]
) -> None:
    host = make_host({10: "v100-chat.service"})
    document = result(capsys, 0, *arguments)
    assert document["users"] == ["v100-chat.service", "nvidia-persistenced.service"]
    assert document["steps"][0] == "users stopped"
    assert [call for call in host.calls if "show" not in call] == [LOOK]


def test_a_card_off_the_bus_needs_a_power_cycle(make_host: Callable[..., Host], capsys: pytest.CaptureFixture[str]) -> None:
    host = make_host({10: "v100-chat.service"}, lost=("0000:06:00.0",))
    document = result(capsys, 1)
    assert (document["needs"], host.calls) == ("power cycle", [])
    assert "power the host off and on" in document["problem"]


def test_users_that_are_no_service_are_left_alone(make_host: Callable[..., Host], capsys: pytest.CaptureFixture[str]) -> None:
    host = make_host({10: "v100-chat.service", 77: ""})
    document = result(capsys, 1)
    assert "processes 77 use a card" in document["problem"]
    assert (host.calls, document["users"], document["needs"]) == ([LOOK], [], "")


def test_a_driver_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(recover_card.Problem, match="the driver hangs") as caught:
        recover_card.run(["sleep", "30"], 0.2)
    assert caught.value.needs == "reboot"


def test_cards_off_the_bus(tmp_path: Path) -> None:
    def device(address: str, vendor: str, kind: str, config: bytes) -> None:
        folder = tmp_path / address
        folder.mkdir()
        (folder / "vendor").write_text(f"{vendor}\n")
        (folder / "class").write_text(f"{kind}\n")
        (folder / "config").write_bytes(config)

    device("0000:06:00.0", "0x10de", "0x030200", b"\xff" * 64)
    device("0000:07:00.0", "0x10de", "0x030200", b"\xde\x10\xb1\x1d" + b"\0" * 60)
    device("0000:08:00.0", "0x10de", "0x068000", b"\xff" * 64)
    device("0000:09:00.0", "0x8086", "0x030000", b"\xff" * 64)
    (tmp_path / "0000:0a:00.0").mkdir()
    assert recover_card.lost_cards(str(tmp_path)) == ["0000:06:00.0"]


def test_users_by_their_open_devices(tmp_path: Path) -> None:
    def process(pid: int, target: str, cgroup: str) -> None:
        (tmp_path / f"{pid}/fd").mkdir(parents=True)
        (tmp_path / f"{pid}/fd/3").symlink_to(target)
        (tmp_path / f"{pid}/cgroup").write_text(cgroup)

    process(10, "/dev/nvidia0", "0::/system.slice/v100-chat.service\n")
    process(11, "/dev/nvidia-uvm", "0::/user.slice/user-0.slice/session-1.scope\n")
    process(12, "/dev/null", "0::/system.slice/ssh.service\n")
    process(13, "/dev/nvidiactl", "12:pids:/\n1:name=systemd:/system.slice/docker.service\n")
    process(14, "/dev/nvidia1", "1:name=systemd:/docker/4f1c/system.slice/system-v100.slice/v100-embed.service/worker\n")
    process(15, "/dev/nvidia1", "0::/system.slice/docker-4f1c.scope\n")
    assert recover_card.card_users(str(tmp_path)) == {
        10: "v100-chat.service",
        11: "",
        13: "docker.service",
        14: "v100-embed.service",
        15: "",
    }


@given(st.text())
def test_any_control_group_can_be_read(text: str) -> None:
    assert isinstance(recover_card.service_of(text), str)
