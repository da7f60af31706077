"""Virtual lab hosts without starting one: command lines, scripts that fill a disk, and the card that is played on a socket."""

from __future__ import annotations

import itertools
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from v100ctl.errors import LabError
from v100ctl.lab import qemu
from v100ctl.lab.pci_card import BAR_SIZES, PlayedCard
from v100ctl.lab.qemu import Card, Hardware, qemu_arguments

V100 = Card("10de:1db1", "10de:1212", node=1)


def options(arguments: list[str], name: str) -> list[str]:
    """The values of an option that may come several times."""
    return [value for option, value in itertools.pairwise(arguments) if option == name]


def made(hardware: Hardware, disk: str = "/d/h.img") -> list[str]:
    descriptors = list(range(7, 7 + len(hardware.cards)))
    return qemu_arguments(hardware, Path(disk), ssh_port=2201, console=Path("/d/h.console"), card_descriptors=descriptors)


def test_memory_and_processors_are_shared_out_to_two_nodes() -> None:
    arguments = made(Hardware(processors=4, memory_mib=3072))
    assert options(arguments, "-m") == ["3072M"]
    assert options(arguments, "-smp") == ["4,sockets=2,cores=2,threads=1"]
    assert options(arguments, "-object") == [f"memory-backend-memfd,id=memory{node},size=1536M,share=on" for node in (0, 1)]
    assert options(arguments, "-numa") == [
        "node,nodeid=0,memdev=memory0,cpus=0-1",
        "node,nodeid=1,memdev=memory1,cpus=2-3",
        "dist,src=0,dst=1,val=21",
    ]


def test_one_node_has_no_distances() -> None:
    assert options(made(Hardware(nodes=1)), "-numa") == ["node,nodeid=0,memdev=memory0,cpus=0-1"]


def test_ssh_is_reached_from_this_machine_alone() -> None:
    assert options(made(Hardware()), "-netdev") == ["user,id=network,hostfwd=tcp:127.0.0.1:2201-:22"]


def test_a_comma_in_the_disks_path_is_not_the_next_option() -> None:
    assert options(made(Hardware(), "/d/a,b.img"), "-drive")[0].endswith("file=/d/a,,b.img")


def test_cards_sit_on_a_bus_of_their_node() -> None:
    devices = options(made(Hardware(cards=(V100, V100))), "-device")
    assert [device for device in devices if device.startswith("pxb")] == ["pxb,id=bus1,bus_nr=128,numa_node=1"]
    assert [device for device in devices if "proxy" in device] == [
        "x-pci-proxy-dev,id=card0,bus=bus1,fd=7",
        "x-pci-proxy-dev,id=card1,bus=bus1,fd=8",
    ]


def test_a_machine_without_cards_has_no_such_bus() -> None:
    assert not [device for device in options(made(Hardware()), "-device") if device.startswith("pxb")]


@pytest.mark.parametrize(
    ("parts", "complaint"),
    [
        ({"processors": 3}, "cannot be shared out"),
        ({"memory_mib": 2049}, "cannot be shared out"),
        ({"cards": (Card("10de:1db1", "10de:1212", node=2),)}, "a NUMA node that the machine does not have"),
        ({"cards": (Card("10de:1db1", "10de:1212", node=-1),)}, "a NUMA node that the machine does not have"),
    ],
)
def test_parts_that_do_not_fit_are_refused(parts: dict[str, object], complaint: str) -> None:
    with pytest.raises(LabError, match=complaint):
        Hardware(**parts)  # type: ignore[arg-type]  # what is refused is of any kind


@pytest.mark.parametrize("script", [qemu._MAKE, qemu._SETUP])
def test_scripts_are_shell_and_leave_nothing_open(script: str) -> None:
    subprocess.run(["/bin/sh", "-n"], input=script, text=True, check=True)
    assert not [word for word in ("AUTHORIZED_KEYS", "ADMIN", "NAMESERVER", " LABEL ") if word in script]


def test_another_release_is_not_taken_for_debian_12(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(qemu, "ensure_programs", lambda reporter: None)
    monkeypatch.setattr(qemu, "os_release", lambda: {"ID": "ubuntu", "VERSION_CODENAME": "noble"})
    with pytest.raises(LabError, match="has to hold debian bookworm"):
        qemu.make_disk(tmp_path, "h", None)  # type: ignore[arg-type]  # nothing is reported before the release was looked at


@pytest.mark.parametrize(
    ("flags", "device", "works"),
    [
        ("fpu svm sse", True, True),
        ("fpu vmx", True, True),
        ("fpu sse", True, False),
        ("fpu svm_lock", True, False),
        ("fpu svm", False, False),
    ],
)
def test_the_processor_runs_guests_only_where_it_says_so(flags: str, device: bool, works: bool, tmp_path: Path) -> None:
    cpuinfo, node = tmp_path / "cpuinfo", tmp_path / "kvm"
    cpuinfo.write_text(f"processor\t: 0\nflags\t\t: {flags}\nbugs\t\t:\n", encoding="ascii")
    if device:
        node.touch()
    assert qemu.kvm_works(node, cpuinfo) == works
    assert options(made(Hardware()), "-accel") == ["tcg,thread=multi"]


# --- the card ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def card() -> Iterator[PlayedCard]:
    played = PlayedCard("10de:1db1", "10de:1212")
    played.start()
    yield played
    played.remote.close()
    played.join(10)
    assert not played.is_alive()


def say(card: PlayedCard, command: int, body: bytes) -> int:
    """Sends a message as QEMU does, and takes the answer."""
    card.remote.sendall(struct.pack("<i4xQ", command, len(body)) + body)
    code, size, value = struct.unpack("<i4xQQ", card.remote.recv(24))
    assert (code, size) == (1, 8)
    answer: int = value
    return answer


def read(card: PlayedCard, address: int, length: int) -> int:
    return say(card, 3, struct.pack("<IIi", address, 0, length))


def write(card: PlayedCard, address: int, value: int, length: int) -> None:
    say(card, 2, struct.pack("<IIi", address, value, length))


def test_it_says_what_it_is(card: PlayedCard) -> None:
    assert read(card, 0, 4) == 0x1DB110DE
    assert read(card, 0x2C, 4) == 0x121210DE
    assert read(card, 8, 4) == 0x030200A1


def test_an_identity_cannot_be_written(card: PlayedCard) -> None:
    write(card, 0, 0xFFFFFFFF, 4)
    assert read(card, 0, 4) == 0x1DB110DE


@pytest.mark.parametrize("index", range(6))
def test_the_size_of_a_memory_area_is_found_as_firmware_does(card: PlayedCard, index: int) -> None:
    write(card, 0x10 + 4 * index, 0xFFFFFFFF, 4)
    assert (1 << 32) - read(card, 0x10 + 4 * index, 4) == BAR_SIZES.get(index, 1 << 32)


def test_its_link_is_that_of_a_v100(card: PlayedCard) -> None:
    offsets, offset = {}, read(card, 0x34, 1)
    while offset:
        offsets[read(card, offset, 1)] = offset
        offset = read(card, offset + 1, 1)
    assert set(offsets) == {0x01, 0x10}
    assert read(card, offsets[0x10] + 18, 2) == 0x0103


def test_its_chip_is_read_where_the_firmware_put_it(card: PlayedCard) -> None:
    write(card, 0x10, 0xE0000000, 4)
    assert say(card, 5, struct.pack("<QQI?3x", 0xE0000000, 0, 4, True)) == 0x140000A1
    assert say(card, 5, struct.pack("<QQI?3x", 0xE0000000 + 0x1000, 0, 4, True)) == 0


def test_a_reset_takes_its_addresses(card: PlayedCard) -> None:
    write(card, 0x10, 0xE0000000, 4)
    write(card, 4, 0x0006, 2)
    say(card, 7, b"")
    assert read(card, 0x10, 4) == 0
    assert read(card, 4, 2) == 0


def test_what_has_no_answer_gets_none(card: PlayedCard) -> None:
    # Where the machine's memory lies, and how interrupts are raised; the next answer is that of the next question.
    card.remote.sendall(struct.pack("<i4xQ", 0, 192) + bytes(192) + struct.pack("<i4xQ", 6, 0))
    assert read(card, 0, 2) == 0x10DE
