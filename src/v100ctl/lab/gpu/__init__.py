"""Fake V100s for lab hosts: what a host with such cards shows to programs that look, and what can go wrong with them.

Nothing here is in the product's way: a lab host's ``/sys/bus/pci/devices``, ``/proc/driver``, device nodes, kernel log and
``nvidia-smi`` are made to look so (see :mod:`.host`), and the probe, the plan and the roles meet them where they meet real ones.

- :class:`FakeCards` says which cards, of the kinds in ``catalog/gpus.yml``; :class:`FakeDriver` which driver.
- :func:`files` is what a host carries; :mod:`v100ctl.lab.hosts` puts it in.
- :func:`fault` breaks a running host, or mends it.

What is *loaded* is what was installed at boot, as ``dpkg`` has it. A host that starts with a driver has small packages that stand
for the real ones of the same names and versions; one that starts without (``none``) takes real packages.
"""

from __future__ import annotations

import io
import json
import re
import tarfile
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

from v100ctl.catalog import load_catalog
from v100ctl.catalog.hardware import DriverBranch, GpuRow
from v100ctl.errors import LabError
from v100ctl.lab.containers import execute

if TYPE_CHECKING:
    from docker.models.containers import Container

    from v100ctl.lab.hosts import RunningHost

MAX_CARDS = 8
NO_DRIVER = "none"
#: Where a host keeps the programs, and where its state.
LIBRARY = "/usr/local/lib/fake-v100"
STATE = "/var/lib/fake-v100"
CONTROL = "/usr/local/sbin/fake-v100"

#: Name -> what happens. The order is that of a card's way from bare to broken.
FAULTS: Mapping[str, str] = {
    "no-driver": "the driver's packages are removed, and nothing is loaded",
    "nouveau": "the kernel's own driver holds the cards, until it is blacklisted and the host restarts",
    "not-loaded": "the driver is installed, its module is not loaded: before the first restart",
    "open-modules": "the open kernel modules are installed and loaded, which drive no V100",
    "driver-mismatch": "library and `nvidia-smi` are newer than the loaded module, until the host restarts",
    "wedged": "`nvidia-smi` hangs, and only SIGKILL ends it, until the host restarts",
    "fallen-off": "a card has fallen off the bus, with XID 79 in the kernel log",
    "throttled": "a card is too hot: the hardware slows its clocks",
    "link-degraded": "a card's link has 8 lanes at 2.5 GT/s",
    "bar1-zero": "the firmware gave a card no address space for its memory",
    "persistence-off": "nvidia-persistenced is disabled, so that no setting stays",
    "uvm-poisoned": "CUDA programs fail with `unknown error`, until nvidia_uvm is loaded anew",
    "memory-error": "a card has met a double-bit error (XID 48), and a page of its memory waits for a reset to be retired",
}
#: Those that hit one card; the last one unless another is named.
CARD_FAULTS = frozenset({"fallen-off", "throttled", "link-degraded", "bar1-zero", "memory-error"})


@dataclass(frozen=True)
class _Board:
    """What a kind of card shows beside its row in the catalog. ``None``: no source was found, so it shows ``N/A``.

    ``app_mhz``: the SM clock that it runs at unless told otherwise.
    """

    subsystem_id: str | None = None
    sm_max_mhz: int | None = None
    app_mhz: int | None = None
    memory_mhz: int | None = None
    video_max_mhz: int | None = None
    board_part: str | None = None
    gpu_part: str | None = None
    inforom: str | None = None
    vbios: str = "88.00.4F.00.09"


# By PCI id. Sources: `nvidia-smi -q` of V100-SXM2-16GB on 550.127.05, of V100-PCIE-16GB on 570.124.06, of V100-SXM2-32GB in
# NVIDIA/nvidia-docker#1076; boards of 10de:1db5 in NVIDIA/nccl#671; maximum and memory clocks of the others: V100 data sheets.
_BOARDS: Mapping[str, _Board] = {
    "10de:1db1": _Board("10de:1212", 1530, 1312, 877, 1372, "900-2G503-0300-000", "1DB1-895-A1", "G503.0201.00.03"),
    "10de:1db5": _Board("10de:1249", 1530, 1290, 877, 1372),
    "10de:1db4": _Board(
        "10de:1214", 1380, 1245, 877, 1237, "900-2G500-0000-000", "1DB4-893-A1", "G500.0200.00.03", "88.00.4F.00.04"
    ),
    "10de:1db6": _Board("10de:124a", 1380, 1230, 877, 1237, vbios="88.00.98.00.01"),
    "10de:1df6": _Board(None, 1597, 1245, 1107, None, "900-2G500-0040-000", vbios="88.00.98.00.01"),
    "10de:1df5": _Board(None, 1530, 1312, 877, 1372),
    "10de:1db8": _Board(None, None, None, 876, None),
}
#: Bus numbers as DGX-1 and DGX-2 have them; below, those of common servers.
_BUSES: Mapping[str, Sequence[int]] = {
    "SXM2": (0x06, 0x07, 0x0A, 0x0B, 0x85, 0x86, 0x89, 0x8A),
    "SXM3": (0x34, 0x36, 0x39, 0x3B, 0x57, 0x59, 0x5C, 0x5E),
}
_PCIE_BUSES_FEW = (0x3B, 0x5E, 0x86, 0xAF)
_PCIE_BUSES = (0x1A, 0x1B, 0x3D, 0x3E, 0x88, 0x89, 0xB1, 0xB2)
#: The switches of one baseboard of a DGX-2.
_SWITCHES = tuple(f"0000:{bus:02x}:00.0" for bus in (0x5F, 0x60, 0x61, 0x62, 0x63, 0x64))


@dataclass(frozen=True)
class FakeCards:
    """The cards of one host, in PCI order. ``kinds`` are PCI ids with a row in ``catalog/gpus.yml``."""

    kinds: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str) -> FakeCards:
        """``4xV100-SXM2-16GB``, ``V100-PCIE-32GB``, ``1xV100-PCIE-16GB,1xV100-PCIE-32GB``; ``none`` for a host without a card.

        Raises:
            LabError: It names a card that the catalog does not have, or more than :data:`MAX_CARDS`.
        """
        catalog = load_catalog()
        kinds: list[str] = []
        if text.strip().lower() in ("", "none", "0"):
            return cls()
        for part in text.split(","):
            found = re.fullmatch(r"\s*(?:(\d{1,3})\s*[x*]\s*)?(\S.*?)\s*", part)
            row = catalog.gpu_named(found.group(2)) if found else None
            if found is None or row is None:
                known = ", ".join(catalog.gpu_names)
                raise LabError(
                    f"{part.strip() or text!r} is no card that the lab can play", hint=f"one of {known}; `4xNAME` for more"
                )
            kinds += [row.pci_id] * int(found.group(1) or 1)
        if not 1 <= len(kinds) <= MAX_CARDS:
            raise LabError(f"{text}: a lab host has 1 to {MAX_CARDS} cards", hint="`4xV100-SXM2-16GB`, or `none`")
        return cls(tuple(kinds))

    @property
    def rows(self) -> tuple[GpuRow, ...]:
        """The catalog's rows of the cards."""
        catalog = load_catalog()
        return tuple(row for row in map(catalog.gpu, self.kinds) if row is not None)

    def __str__(self) -> str:
        """As :meth:`parse` takes it."""
        names = [row.name.removeprefix("Tesla ") for row in self.rows]
        parts: list[tuple[str, int]] = []
        for name in names:
            if parts and parts[-1][0] == name:
                parts[-1] = (name, parts[-1][1] + 1)
            else:
                parts.append((name, 1))
        return ",".join(f"{count}x{name}" for name, count in parts) or "none"


@dataclass(frozen=True)
class FakeDriver:
    """The driver that a host starts with. ``version`` is empty for none.

    ``older_version``: one of the same branch that may still be loaded when this one is installed. ``built``: the date that its
    module shows. ``family``: how its packages' names start.
    """

    version: str = ""
    revision: str = ""
    family: str = "nvidia"
    older_version: str = ""
    open_package: str = ""
    built: str = ""

    @classmethod
    def parse(cls, text: str, *, debian: str = "12") -> FakeDriver:
        """A branch (``535``), an exact version (``580.159.04``) or ``none``.

        Args:
            text: What somebody asked for.
            debian: The release whose packages it stands for.

        Raises:
            LabError: The catalog has no such branch.
        """
        if text == NO_DRIVER:
            return cls()
        catalog = load_catalog()
        row = catalog.driver(text) if re.fullmatch(r"\d{3}(\.\d+){0,2}", text) else None
        if row is None or row.branch != text.split(".")[0] or row.first_version is None:
            known = ", ".join(row.branch for row in catalog.drivers if row.drives_volta)
            raise LabError(
                f"{text}: the catalog has no such driver", hint=f"`{NO_DRIVER}`, or one of {known}, or an exact version"
            )
        packaged = next(
            (source for source in row.sources("debian", debian) if source.kind == "distribution" and source.version), None
        )
        # In a release that carries several branches, all but one have their branch in their names.
        modules = (
            name.removesuffix("-kernel-dkms") for name in (packaged.packages if packaged else ()) if name.endswith("-kernel-dkms")
        )
        family = next(modules, "nvidia")
        version = text if "." in text else _newest(row, debian)
        return cls(
            version=version,
            # As Debian's own archive and as NVIDIA's repository number their packages.
            revision=f"-{packaged.version.partition('-')[2]}" if packaged and packaged.version else "-1",
            family=family,
            older_version=row.first_version,
            open_package=f"{family}-open-kernel-dkms" if packaged else "nvidia-kernel-open-dkms",
            built=f"{row.released or date(2020, 1, 1):%a %b %e} 00:00:00 UTC {(row.released or date(2020, 1, 1)).year}",
        )


def _newest(row: DriverBranch, debian: str) -> str:
    """The newest version of a branch that the catalog names: Debian's own, else the last known to build for a kernel."""
    packaged = [source.version for source in row.sources("debian", debian) if source.version]
    upstream = re.match(r"\d{3}\.\d+(?:\.\d+)?", packaged[0]) if packaged else None
    if upstream:
        return upstream.group()
    return row.kernels[-1].driver if row.kernels else row.first_version or f"{row.branch}.00"


def specification(host: str, cards: FakeCards, driver: FakeDriver) -> dict[str, Any]:
    """Everything that decides what a host shows, as plain data; the same for the same arguments.

    Args:
        host: The host's name; UUIDs and serial numbers follow from it.
        cards: Its cards.
        driver: Its driver.
    """
    rows = cards.rows
    addresses = _addresses(rows)
    half = (len(rows) + 1) // 2
    document = []
    for minor, (row, address) in enumerate(zip(rows, addresses, strict=True)):
        board = _BOARDS.get(row.pci_id, _Board())
        identity = uuid.uuid5(uuid.NAMESPACE_DNS, f"{host}/{minor}/{row.pci_id}")
        document.append(
            {
                "minor": minor,
                "pci_address": address,
                "pci_id": row.pci_id,
                "name": row.name,
                "form": row.form,
                # Where no source gives the board's id, the card's own stands for it.
                "subsystem_id": board.subsystem_id or row.pci_id,
                "uuid": f"GPU-{identity}",
                "serial": f"{identity.int % 10**13:013d}",
                "numa_node": 0 if minor < half else 1,
                "iommu_group": 30 + minor,
                "module_id": minor + 1,
                "memory_total_mib": row.memory_total_bytes >> 20,
                # What `nvidia-smi` of 550 and 570 tells as reserved is 240 MiB.
                "memory_cuda_mib": (row.memory_total_bytes >> 20) - 240,
                "bar1_mib": row.memory_total_bytes >> 20,
                "compute_capability": row.compute_capability,
                "power_limit_w": row.power_limit_w,
                "power_min_w": row.power_min_w,
                "sm_max_mhz": board.sm_max_mhz,
                "app_mhz": board.app_mhz,
                "memory_mhz": board.memory_mhz,
                "video_max_mhz": board.video_max_mhz,
                "board_part": board.board_part,
                "gpu_part": board.gpu_part,
                "inforom": board.inforom,
                "vbios": board.vbios,
                "retired_single": 0,
                "retired_double": 0,
                "persistence": False,
                "power_set_w": None,
                "clocks_set": None,
                "ecc": True,
                "ecc_pending": True,
                "compute_mode": "Default",
                "processes": [],
                "faults": {},
            }
        )
    catalog = load_catalog()
    return {
        "host": host,
        "cards": document,
        "switches": list(_SWITCHES) if any(row.nvswitch for row in rows) else [],
        "driver": {
            "version": driver.version,
            "revision": driver.revision,
            "family": driver.family,
            "older_version": driver.older_version,
            "open_package": driver.open_package,
            "built": driver.built or "Thu Jan  1 00:00:00 UTC 1970",
            "flavour": "proprietary",
        },
        "ignore_volta": [row.branch for row in catalog.drivers if not row.drives_volta],
        # What a later driver may be, too: its CUDA level stands in the table's head.
        "cuda": {row.branch: row.cuda for row in catalog.drivers},
    }


def _addresses(rows: Sequence[GpuRow]) -> list[str]:
    forms = {row.form for row in rows}
    if len(forms) == 1 and next(iter(forms)) in _BUSES:
        buses = _BUSES[next(iter(forms))]
    else:
        buses = _PCIE_BUSES_FEW if len(rows) <= len(_PCIE_BUSES_FEW) else _PCIE_BUSES
    if len(rows) == 2 and buses is not _PCIE_BUSES_FEW:
        buses = buses[:2]
    return [f"0000:{bus:02x}:00.0" for bus in buses[: len(rows)]]


_LAUNCHER = f"""#!/usr/bin/python3 -IB
import sys

sys.path.insert(0, "{LIBRARY}")
from v100fake.main import main

sys.exit(main(sys.argv))
"""
_PROGRAMS = ("nvidia-smi", "nvidia-persistenced", "nvidia-modprobe", "fake-v100")
_LINKS = {
    CONTROL: "fake-v100",
    "/usr/local/bin/lsmod": "lsmod",
    "/usr/local/sbin/modinfo": "modinfo",
    "/usr/local/sbin/modprobe": "modprobe",
    "/usr/local/sbin/rmmod": "rmmod",
    "/usr/local/bin/dmesg": "dmesg",
    "/usr/local/bin/fake-cuda-context": "fake-cuda-context",
}
#: ``dpkg`` tells the machine whenever packages have changed.
_HOOK = f"post-invoke={CONTROL} refresh\n"


def files(host: str, cards: FakeCards, driver: FakeDriver) -> bytes:
    """A tar archive, to be unpacked at the root of a host that is not started yet (or again)."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        # The last one comes with kmod, which every host with a kernel of its own has.
        for path in (LIBRARY, f"{LIBRARY}/bin", f"{LIBRARY}/v100fake", STATE, "/etc/modprobe.d"):
            entry = tarfile.TarInfo(path.lstrip("/"))
            entry.type, entry.mode = tarfile.DIRTYPE, 0o755
            archive.addfile(entry)
        programs = {*_PROGRAMS, *_LINKS.values()}
        contents = {f"{LIBRARY}/bin/{name}": (_LAUNCHER.encode(), 0o755) for name in sorted(programs)}
        for source in sorted((Path(__file__).parent / "host").glob("*.py")):
            contents[f"{LIBRARY}/v100fake/{source.name}"] = (source.read_bytes(), 0o644)
        contents["/etc/dpkg/dpkg.cfg.d/fake-v100"] = (_HOOK.encode(), 0o644)
        contents[f"{STATE}/spec.json"] = (json.dumps(specification(host, cards, driver), indent=1).encode(), 0o644)
        for path, (content, mode) in contents.items():
            entry = tarfile.TarInfo(path.lstrip("/"))
            entry.mode, entry.size = mode, len(content)
            archive.addfile(entry, io.BytesIO(content))
        for path, program in _LINKS.items():
            entry = tarfile.TarInfo(path.lstrip("/"))
            entry.type, entry.mode, entry.linkname = tarfile.SYMTYPE, 0o777, f"{LIBRARY}/bin/{program}"
            archive.addfile(entry)
    return buffer.getvalue()


def set_up(container: Container, name: str) -> None:
    """Installs the driver that a new host was asked for. Does nothing the second time.

    Args:
        container: The host's, running.
        name: The host's name, for messages.

    Raises:
        LabError: The host could not install it.
    """
    code, output = execute(container, [CONTROL, "setup"])
    if code != 0:
        raise LabError(f"the lab host {name} could not be given its driver: {output.strip()[-500:]}")


def fault(host: RunningHost, name: str, *, card: int | None = None, undo: bool = False) -> None:
    """Breaks a host as reality does, or mends it as whoever found the cause would.

    Args:
        host: A host with fake cards.
        name: One of :data:`FAULTS`.
        card: Which card, for :data:`CARD_FAULTS`; the last one where not given.
        undo: Mend it.

    Raises:
        LabError: There is no such fault, or the host is not in a state that it could happen in.
    """
    if name not in FAULTS:
        raise LabError(f"{name} is no fault that the lab can make", hint=f"one of {', '.join(FAULTS)}")
    if card is not None and name not in CARD_FAULTS:
        raise LabError(f"{name} is not of one card", hint=f"a card is named for {', '.join(sorted(CARD_FAULTS))}")
    code, output = host.execute(CONTROL, "fault", name, "-" if card is None else str(card), "undo" if undo else "do")
    if code == 0:
        return
    words = output.strip().splitlines()
    if code == 1 and words:
        raise LabError(f"{host.name}: {words[-1]}")
    missing = "no such file" in output.lower() or "not found" in output.lower()
    raise LabError(
        f"{name} could not be made on {host.name}: {'it has no fake cards' if missing else output.strip()[-500:]}",
        hint="`v100ctl lab up --cards 1xV100-PCIE-16GB` makes a host with cards" if missing else None,
    )
