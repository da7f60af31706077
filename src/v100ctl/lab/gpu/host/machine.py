"""A machine with V100s as its kernel shows it: PCI bus, loaded modules, ``/proc/driver/nvidia``, device nodes, kernel log.

Everything follows from one JSON document, the state. What is *loaded* is decided at boot from what the package manager says is
installed then; a fault changes the state; :meth:`Machine.show` makes the files say so. The files lie in ``/run/fake-v100`` and
are bound over the kernel's own places, so that programs find them where they look anyway.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import struct
import subprocess
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from . import packages

if TYPE_CHECKING:
    from typing import Any

    # Python 3.8 knows no `dict[...]` outside annotations.
    State = dict[str, Any]
    Card = dict[str, Any]

#: Name -> size in bytes and who uses it, as ``/proc/modules`` lists them.
_MODULES = {
    "nvidia_uvm": (1527808, ""),
    "nvidia_drm": (77824, ""),
    "nvidia_modeset": (1306624, "nvidia_drm,"),
    "nvidia": (56717312, "nvidia_uvm,nvidia_modeset,"),
    "nouveau": (2433024, ""),
}
#: How much memory of each of its cards a process plays to hold, in MiB.
HELD_VARIABLE = "FAKE_CUDA_MEMORY_MIB"
NVIDIA_MODULES = ("nvidia", "nvidia_modeset", "nvidia_drm", "nvidia_uvm")
_NOUVEAU_OFF = re.compile(r"^\s*(?:blacklist\s+nouveau|alias\s+nouveau\s+off|install\s+nouveau\s+\S*/(?:true|false))", re.M)
_MODPROBE_DIRECTORIES = ("etc/modprobe.d", "run/modprobe.d", "usr/lib/modprobe.d", "lib/modprobe.d")
#: Every node stands for /dev/null: the container may open it, and nothing comes of it.
_HARMLESS = os.makedev(1, 3)
#: A terminal that was never opened, outside the file system of terminals: each `open` fails with EIO, as that of a poisoned UVM.
_FAILING = os.makedev(136, 4095)
#: An unassigned region's flags: memory, 64 bits wide, prefetchable, no address.
_BAR1_FLAGS, _BAR1_UNSET_FLAGS = 0x14220C, 0x2014220C


class Machine:
    """The machine below ``root``, which is ``/`` on a lab host.

    Args:
        root: Where its files are.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self.root = root
        self.folder = root / "var/lib/fake-v100"
        self.run = root / "run/fake-v100"

    # --- state ------------------------------------------------------------------------------------------------------

    def load(self) -> State:
        """The state; made of the specification that the lab wrote where there is none yet."""
        try:
            state: State = json.loads((self.folder / "state.json").read_text(encoding="utf-8"))
        except FileNotFoundError:
            state = json.loads((self.folder / "spec.json").read_text(encoding="utf-8"))
            state.update({"boots": 0, "loaded": None, "modules": [], "faults": {}, "log": [], "booted_s": 0.0, "uvm": "well"})
        return state

    def holders(self, card: dict[str, Any]) -> list[dict[str, Any]]:
        """Processes that play holding memory of a card: by their own environment, :data:`HELD_VARIABLE`, on the cards that
        ``CUDA_VISIBLE_DEVICES`` names (all of them without it). Who asks is none of them: what looks at the cards before a server
        is started has the server's environment.
        """
        found = []
        asking = self._ancestors(os.getpid())
        for folder in sorted((self.root / "proc").glob("[0-9]*"), key=lambda item: int(item.name)):
            try:
                words = (folder / "environ").read_bytes().decode("utf-8", "replace").split("\0")
                environment = dict(word.split("=", 1) for word in words if "=" in word)
                held = environment.get(HELD_VARIABLE, "")
                visible = environment.get("CUDA_VISIBLE_DEVICES")
                mine = visible is None or {card["uuid"], str(card["minor"])} & set(visible.split(","))
                if held.isdigit() and mine and int(folder.name) not in asking:
                    name = os.readlink(folder / "exe")
                    found.append({"pid": int(folder.name), "name": name, "memory_mib": int(held)})
            except OSError:
                # It has ended, or belongs to somebody else.
                continue
        return found

    def _ancestors(self, pid: int) -> set[int]:
        """A process, its parent, that one's parent, and so on."""
        found: set[int] = set()
        while pid > 0 and pid not in found:
            found.add(pid)
            try:
                # The name of the program stands in brackets and may hold anything.
                status = (self.root / f"proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
                pid = int(status.rpartition(")")[2].split()[1])
            except (OSError, ValueError, IndexError):
                break
        return found

    @contextmanager
    def change(self) -> Iterator[State]:
        """The state to be changed, alone; it is written in one step when the block ends without an error."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "lock").open("a", encoding="utf-8") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            state = self.load()
            yield state
            aside = self.folder / "state.json.new"
            aside.write_text(json.dumps(state, indent=1), encoding="utf-8")
            aside.replace(self.folder / "state.json")

    # --- what happens -----------------------------------------------------------------------------------------------

    def boot(self) -> None:
        """Starts the machine: another boot id, an empty kernel log, and the modules that are installed now."""
        with self.change() as state:
            state["boots"] += 1
            state["booted_s"] = time.time()
            state["log"] = []
            state["uvm"] = "well"
            # What a restart mends. Cards, cables and firmware stay as they are.
            for name in ("wedged", "not-loaded", "driver-mismatch", "uvm-poisoned"):
                state["faults"].pop(name, None)
            self.run.mkdir(parents=True, exist_ok=True)
            (self.run / "boot_id").write_text(f"{uuid.uuid4()}\n", encoding="utf-8")
            self.restart_driver(state)
        self.refresh()
        self.show()
        self._bind()
        # The lab's image has masked it; `shutdown -r`, with which Ansible restarts a host, asks it.
        mask = self.root / "etc/systemd/system/systemd-logind.service"
        if mask.is_symlink():
            mask.unlink()

    def restart_driver(self, state: State) -> None:
        """Loads what is installed now, as a boot does, and forgets what a driver keeps in memory."""
        found = packages.module(packages.installed(self.root))
        state["loaded"], state["modules"] = None, []
        for card in state["cards"]:
            card.update({"persistence": False, "power_set_w": None, "clocks_set": None, "ecc": card["ecc_pending"]})
            # A page that waited for it is taken out of use.
            card["faults"].pop("memory-error", None)
        if "nouveau" in state["faults"]:
            if not self._nouveau_is_off():
                state["modules"] = ["nouveau"]
                self.log(state, "nouveau: detected chipset GV100 (140000a1)", 6)
                return
            del state["faults"]["nouveau"]
        if found and "not-loaded" not in state["faults"]:
            self.load_driver(state, found["version"], found["flavour"])

    def load_driver(self, state: State, version: str, flavour: str) -> None:
        """Loads NVIDIA's modules, which say in the kernel log what they make of the cards."""
        state["loaded"] = {"version": version, "flavour": flavour}
        state["modules"] = list(NVIDIA_MODULES)
        for card in state["cards"]:
            address = card["pci_address"]
            if flavour == "open":
                self.log(state, f"NVRM: The NVIDIA GPU {address} (PCI ID: {card['pci_id']})", 3)
                for line in (
                    "NVRM: installed in this system is not supported by open",
                    "NVRM: nvidia.ko because it does not include the required GPU",
                    "NVRM: System Processor (GSP).",
                ):
                    self.log(state, line, 3)
                self.log(state, f"nvidia: probe of {address} failed with error -1", 4)
            elif card["faults"].get("fallen-off"):
                self.log(state, f"NVRM: The NVIDIA GPU {address}", 3)
                self.log(state, f"NVRM: (PCI ID: {card['pci_id']}) installed in this system has", 3)
                self.log(state, "NVRM: fallen off the bus and is not responding to commands.", 3)
            elif card["faults"].get("bar1-zero"):
                self.log(state, "NVRM: This PCI I/O region assigned to your NVIDIA device is invalid:", 3)
                self.log(state, f"NVRM: BAR1 is 0M @ 0x0 (PCI:{address.rpartition('.')[0]})", 3)
                self.log(state, f"nvidia: probe of {address} failed with error -1", 4)
        self.log(state, f"NVRM: loading NVIDIA UNIX {nvrm_words(version, flavour, state['driver']['built'])}", 6)

    def log(self, state: State, message: str, level: int) -> None:
        """Writes into the kernel log. ``level`` is the priority of syslog, 0 to 7."""
        entry = {"at_s": time.time() - state["booted_s"], "level": level, "message": message}
        # The records of /dev/kmsg count from the start of the kernel, which a lab host shares with the machine below.
        state["log"].append({**entry, "kernel_s": time.clock_gettime(time.CLOCK_MONOTONIC)})

    def refresh(self) -> None:
        """What follows from the packages at once: the module on the disk, and whether there is an ``nvidia-smi``."""
        found = packages.installed(self.root)
        wanted = {"usr/local/bin/nvidia-smi": packages.has_smi(found)}
        wanted.update({f"usr/bin/{name}": name in found for name in packages.DAEMONS})
        for place, is_there in wanted.items():
            link = self.root / place
            if link.is_symlink():
                link.unlink()
            if is_there:
                link.symlink_to(f"/usr/local/lib/fake-v100/bin/{link.name}")
        self._put_module(packages.module(found))

    def _nouveau_is_off(self) -> bool:
        for folder in _MODPROBE_DIRECTORIES:
            for path in sorted((self.root / folder).glob("*.conf")):
                if _NOUVEAU_OFF.search(path.read_text(encoding="utf-8", errors="replace")):
                    return True
        return False

    def _put_module(self, built: dict[str, str] | None) -> None:
        """The module as DKMS would have built it for the kernel that runs, or none. Real modules of real kernels stay."""
        release = os.uname().release
        folder = self.root / "lib/modules" / release
        mark = self.root / "usr/local/lib/fake-v100/modules"
        path = folder / "updates/dkms/nvidia.ko"
        if path.exists() and not mark.exists():
            return
        if built is None:
            if mark.exists():
                path.unlink(missing_ok=True)
                (folder / "modules.dep").unlink(missing_ok=True)
                mark.unlink()
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.write_text(f"{path}\n", encoding="utf-8")
        licence = "Dual MIT/GPL" if built["flavour"] == "open" else "NVIDIA"
        fields = {
            "license": licence,
            "version": built["version"],
            "supported": "external",
            "name": "nvidia",
            "vermagic": f"{release} SMP mod_unload modversions ",
        }
        path.write_bytes(module_file(fields))
        (folder / "modules.dep").write_text("updates/dkms/nvidia.ko:\n", encoding="utf-8")

    # --- what is seen -----------------------------------------------------------------------------------------------

    def show(self) -> None:
        """Makes every file say what the state says. The folders themselves stay, since they are bound elsewhere."""
        state = self.load()
        self._show_bus(state)
        self._show_modules(state)
        self._show_driver(state)
        self._show_devices(state)
        self._show_log(state)

    def reachable(self, state: State) -> list[Card]:
        """The cards that the loaded driver has: none without an address for its memory, none for modules that drive no Volta."""
        loaded = state["loaded"]
        if loaded is None or loaded["flavour"] == "open" or loaded["version"].split(".")[0] in state["ignore_volta"]:
            return []
        return [card for card in state["cards"] if not card["faults"].get("bar1-zero")]

    def _show_bus(self, state: State) -> None:
        bus = self.run / "pci"
        bus.mkdir(parents=True, exist_ok=True)
        nodes = len(list((self.root / "sys/devices/system/node").glob("node[0-9]*"))) or 1
        reachable = {card["pci_address"] for card in self.reachable(state)}
        _device(bus / "0000:00:00.0", "0x8086", "0x2020", "0x060000", {"numa_node": "0"})
        for card in state["cards"]:
            driver = ""
            if "nouveau" in state["modules"]:
                driver = "nouveau"
            elif card["pci_address"] in reachable:
                driver = "nvidia"
            _show_card(bus / card["pci_address"], card, min(card["numa_node"], nodes - 1), driver)
        for address in state["switches"]:
            # Its class is what tells a switch; no source was found for its device id.
            _device(bus / address, "0x10de", "0x0000", "0x068000", {"numa_node": "0"})

    def _show_modules(self, state: State) -> None:
        lines = [
            f"{name} {size} {users.count(',')} {users or '-'} Live 0x0000000000000000 (POE)\n"
            for name, (size, users) in _MODULES.items()
            if name in state["modules"]
        ]
        self._write("modules", "".join(lines))
        folder = self.run / "sys-module"
        folder.mkdir(parents=True, exist_ok=True)
        for name in _MODULES:
            shutil.rmtree(folder / name, ignore_errors=True)
            if name in state["modules"]:
                (folder / name).mkdir()
                (folder / name / "initstate").write_text("live\n", encoding="utf-8")
                if name != "nouveau":
                    (folder / name / "version").write_text(f"{state['loaded']['version']}\n", encoding="utf-8")

    def _show_driver(self, state: State) -> None:
        driver = self.run / "proc-driver/nvidia"
        shutil.rmtree(driver, ignore_errors=True)
        driver.parent.mkdir(parents=True, exist_ok=True)
        loaded = state["loaded"]
        if loaded is None:
            return
        (driver / "gpus").mkdir(parents=True)
        words = nvrm_words(loaded["version"], loaded["flavour"], state["driver"]["built"])
        (driver / "version").write_text(
            f"NVRM version: NVIDIA UNIX {words}\nGCC version:  gcc version 12.2.0 (Debian 12.2.0-14+deb12u1) \n", encoding="utf-8"
        )
        for card in self.reachable(state):
            folder = driver / "gpus" / card["pci_address"]
            folder.mkdir()
            lines = {
                "Model: \t\t": card["name"],
                "IRQ:   \t\t": str(40 + card["minor"]),
                "GPU UUID: \t": card["uuid"],
                "Video BIOS: \t": card["vbios"].lower(),
                "Bus Type: \t": "PCIe",
                "DMA Size: \t": "47 bits",
                "DMA Mask: \t": "0x7fffffffffff",
                "Bus Location: \t": card["pci_address"],
                "Device Minor: \t": str(card["minor"]),
                "GPU Excluded:\t": "No",
            }
            (folder / "information").write_text("".join(f"{key} {value}\n" for key, value in lines.items()), encoding="utf-8")

    def _show_devices(self, state: State) -> None:
        device = self.root / "dev"
        wanted = {}
        if state["loaded"] is not None:
            wanted = {f"nvidia{card['minor']}": 0o666 for card in self.reachable(state)}
            wanted["nvidiactl"] = 0o666
            if "nvidia_uvm" in state["modules"]:
                wanted.update({"nvidia-uvm": 0o666, "nvidia-uvm-tools": 0o666})
        for path in device.glob("nvidia*"):
            if path.name not in wanted:
                path.unlink()
        for name, mode in wanted.items():
            number = _FAILING if name == "nvidia-uvm" and state["uvm"] != "well" else _HARMLESS
            if (device / name).exists() and (device / name).stat().st_rdev != number:
                (device / name).unlink()
            if not (device / name).exists():
                os.mknod(device / name, 0o020000 | mode, number)
                (device / name).chmod(mode)
        real = (self.run / "devices.real").read_text(encoding="utf-8") if (self.run / "devices.real").exists() else ""
        if not real:
            real = _read(self.root / "proc/devices") or "Character devices:\n  1 mem\n\nBlock devices:\n"
            self._write("devices.real", real)
        # Under the number that the nodes really have, so that a unit's `DeviceAllow=char-nvidia*` opens them.
        branch = int(state["loaded"]["version"].split(".")[0]) if state["loaded"] else 0
        classes = [] if not branch else ["nvidia-frontend" if branch < 545 else "nvidia", "nvidiactl", "nvidia-uvm"]
        head, separator, tail = real.partition("  1 mem\n")
        self._write("devices", head + separator + "".join(f"  1 {name}\n" for name in classes) + tail)

    def _show_log(self, state: State) -> None:
        # The records of /dev/kmsg: priority with the facility (0: kernel), number, microseconds since boot, flags; the text.
        lines = [
            f"{entry['level']},{number},{int(entry['kernel_s'] * 1e6)},-;{entry['message']}\n"
            for number, entry in enumerate(state["log"])
        ]
        path = self.root / "dev/kmsg"
        if path.exists() and not path.is_file():
            return
        path.write_text("".join(lines), encoding="utf-8")

    def _write(self, name: str, text: str) -> None:
        """In place: a file that is bound elsewhere must stay the same file."""
        self.run.mkdir(parents=True, exist_ok=True)
        (self.run / name).write_text(text, encoding="utf-8")

    def _bind(self) -> None:
        """Lays the files over the kernel's own. A place that this kernel does not have cannot be covered and is left out."""
        real = self.run / "sys-module.real"
        real.mkdir(exist_ok=True)
        _mount(self.root / "sys/module", real)
        for path in real.iterdir():
            link = self.run / "sys-module" / path.name
            if not link.exists() and path.name not in _MODULES:
                link.symlink_to(path)
        for name, place in (
            ("pci", "sys/bus/pci/devices"),
            ("sys-module", "sys/module"),
            ("proc-driver", "proc/driver"),
            ("devices", "proc/devices"),
            ("modules", "proc/modules"),
            ("boot_id", "proc/sys/kernel/random/boot_id"),
        ):
            target = self.root / place
            if target.exists():
                _mount(self.run / name, target)


def nvrm_words(version: str, flavour: str, built: str) -> str:
    """What stands after ``NVIDIA UNIX`` in the driver's version line. ``built`` is a date in the words of ``date``."""
    if flavour == "open":
        return f"Open Kernel Module for x86_64  {version}  Release Build  (root@localhost)  {built}"
    return f"x86_64 Kernel Module  {version}  {built}"


def _mount(source: Path, target: Path) -> None:
    subprocess.run(["mount", "--bind", str(source), str(target)], check=True)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


# --- PCI --------------------------------------------------------------------------------------------------------------


def _device(folder: Path, vendor: str, device: str, kind: str, more: dict[str, str]) -> None:
    folder.mkdir(exist_ok=True)
    for name, value in {"vendor": vendor, "device": device, "class": kind, **more}.items():
        (folder / name).write_text(f"{value}\n", encoding="utf-8")


def _show_card(folder: Path, card: Card, numa_node: int, driver: str) -> None:
    lost = bool(card["faults"].get("fallen-off"))
    width, speed = link(card)
    board_vendor, board = card["subsystem_id"].split(":")
    _device(
        folder,
        "0x10de",
        f"0x{card['pci_id'][5:]}",
        "0x030200",
        {
            "subsystem_vendor": f"0x{board_vendor}",
            "subsystem_device": f"0x{board}",
            "revision": "0xa1",
            "irq": str(40 + card["minor"]),
            "numa_node": str(numa_node),
            "enable": "1" if driver else "0",
            # The kernel's words for a card that reads all ones.
            "current_link_speed": "Unknown" if lost else f"{speed:.1f} GT/s PCIe",
            "current_link_width": "63" if lost else str(width),
            "max_link_speed": "8.0 GT/s PCIe",
            "max_link_width": "16",
            "resource": _resources(card),
            "uevent": f"PCI_CLASS=30200\nPCI_ID={card['pci_id'].upper()}\nPCI_SLOT_NAME={card['pci_address']}",
        },
    )
    (folder / "config").write_bytes(b"\xff" * 256 if lost else _configuration(card))
    (folder / "power").mkdir(exist_ok=True)
    (folder / "power/runtime_status").write_text("active\n", encoding="utf-8")
    for name, leads_to in (("driver", f"/sys/bus/pci/drivers/{driver}" if driver else ""), ("iommu_group", _group(card))):
        path = folder / name
        if path.is_symlink():
            path.unlink()
        if leads_to:
            path.symlink_to(leads_to)


def _group(card: Card) -> str:
    return f"/sys/kernel/iommu_groups/{card['iommu_group']}"


def link(card: Card) -> tuple[int, float]:
    """Lanes and GT/s of the card's link now."""
    return (8, 2.5) if card["faults"].get("link-degraded") else (16, 8.0)


def _bars(card: Card) -> tuple[tuple[int, int, int], ...]:
    """Start, end and flags of the first four regions: 16 MiB of registers, the memory (two lines), 32 MiB."""
    base = 0x380000000000 + card["minor"] * (64 << 30)
    memory = (0, 0, _BAR1_UNSET_FLAGS) if card["faults"].get("bar1-zero") else _region(base, card["bar1_mib"] << 20, _BAR1_FLAGS)
    registers = _region(0xB0000000 + card["minor"] * (16 << 20), 16 << 20, 0x40200)
    return registers, memory, (0, 0, 0), _region(base + (48 << 30), 32 << 20, _BAR1_FLAGS)


def _region(start: int, size: int, flags: int) -> tuple[int, int, int]:
    return start, start + size - 1, flags


def _resources(card: Card) -> str:
    bars = [*_bars(card), *[(0, 0, 0)] * 9]
    return "\n".join(" ".join(f"0x{number:016x}" for number in bar) for bar in bars)


def _configuration(card: Card) -> bytes:
    """The first 256 bytes of the card's configuration space: a type 0 header without capabilities."""
    board_vendor, board = (int(part, 16) for part in card["subsystem_id"].split(":"))
    registers, memory, _, tail = (bar[0] for bar in _bars(card))
    # Identity, command and status, revision and class, cache line and header type.
    head = struct.pack("<HHHHBBBBBBBB", 0x10DE, int(card["pci_id"][5:], 16), 0x0506, 0x0010, 0xA1, 0, 0x02, 0x03, 0x10, 0, 0, 0)
    bars = struct.pack("<IQQI", registers, memory | 0xC, tail | 0xC, 0)
    rest = struct.pack("<IHHIQBBBB", 0, board_vendor, board, 0, 0, 0xFF, 1, 0, 0)
    return (head + bars + rest).ljust(256, b"\0")


# --- a kernel module's file -------------------------------------------------------------------------------------------


def module_file(fields: dict[str, str]) -> bytes:
    """An ELF object that holds nothing but what ``modinfo`` shows (a ``.modinfo`` section)."""
    information = b"".join(f"{name}={value}".encode() + b"\0" for name, value in fields.items())
    names = b"\0.modinfo\0.shstrtab\0"
    start = 64
    sections_at = (start + len(information) + len(names) + 7) // 8 * 8
    header = struct.pack(
        "<16sHHIQQQIHHHHHH", b"\x7fELF\x02\x01\x01".ljust(16, b"\0"), 1, 62, 1, 0, 0, sections_at, 0, 64, 0, 0, 64, 3, 2
    )
    body = (header + information + names).ljust(sections_at, b"\0")

    def section(name: int, kind: int, flags: int, offset: int, size: int) -> bytes:
        return struct.pack("<IIQQQQIIQQ", name, kind, flags, 0, offset, size, 0, 0, 1, 0)

    return body + bytes(64) + section(1, 1, 2, start, len(information)) + section(10, 3, 0, start + len(information), len(names))


def module_fields(raw: bytes) -> dict[str, str]:
    """What :func:`module_file` put in."""
    found = {}
    for entry in raw[64:].split(b"\0"):
        name, separator, value = entry.partition(b"=")
        if not separator:
            break
        found[name.decode()] = value.decode()
    return found
