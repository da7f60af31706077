"""``nvidia-smi`` for fake V100s: its answers, its settings, its errors and exit codes.

What it does not know it refuses as the real one refuses a wrong argument, so that nothing passes here that would fail there.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

from . import fields as query
from . import packages, report
from .machine import Machine
from .readings import Reading, bus_id, graphics_clocks

# Of nvidia-smi(1), "Return value".
EXIT_ARGUMENT, EXIT_PERMISSION, EXIT_NO_DEVICE, EXIT_NO_DRIVER, EXIT_MISMATCH, EXIT_LOST, EXIT_UNKNOWN = 2, 4, 6, 9, 18, 15, 255
_NO_DRIVER = (
    "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. "
    "Make sure that the latest NVIDIA driver is installed and running.\n"
)
_EARLY = "Terminating early due to previous errors."
_APP_FIELDS = {
    "timestamp": "",
    "gpu_name": "",
    "gpu_bus_id": "",
    "gpu_serial": "",
    "gpu_uuid": "",
    "pid": "",
    "process_name": "",
    "used_gpu_memory": "MiB",
}
_APP_ALIASES = {"name": "process_name", "used_memory": "used_gpu_memory"}
_TOPOLOGY_WORDS = (
    "\nLegend:\n\n"
    "  X    = Self\n"
    "  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)\n"
    "  NODE = Connection traversing PCIe as well as the interconnect between PCIe Host Bridges within a NUMA node\n"
    "  PHB  = Connection traversing PCIe as well as a PCIe Host Bridge (typically the CPU)\n"
    "  PXB  = Connection traversing multiple PCIe bridges (without traversing the PCIe Host Bridge)\n"
    "  PIX  = Connection traversing at most a single PCIe bridge\n"
    "  NV#  = Connection traversing a bonded set of # NVLinks"
)
#: NVLinks between the eight cards of a DGX-1 (the hybrid cube mesh; NVIDIA/nccl#671 has the first rows).
_CUBE_MESH = {
    (0, 1): 1, (0, 2): 1, (0, 3): 2, (0, 4): 2, (1, 2): 2, (1, 3): 1, (1, 5): 2, (2, 3): 2,
    (2, 6): 1, (3, 7): 1, (4, 5): 1, (4, 6): 1, (4, 7): 2, (5, 6): 2, (5, 7): 1, (6, 7): 2,
}  # fmt: skip


class Refused(Exception):
    """The program ends with a message and an exit code."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.message = message
        self.code = code


class Smi:
    """One call.

    Args:
        machine: Where the cards are.
        write: Takes what is written to standard output.
    """

    def __init__(self, machine: Machine, write: Any = None) -> None:
        self.machine = machine
        self.write = write or sys.stdout.write
        self.state: dict[str, Any] = {}
        self.branch = 0

    def run(self, arguments: list[str]) -> int:
        """Answers, and returns the exit code."""
        try:
            self.state = self._seen()
            return self._run(arguments)
        except Refused as refused:
            self.write(refused.message + "\n")
            return refused.code

    def _seen(self) -> dict[str, Any]:
        """The state, with the processes that run now."""
        state = self.machine.load()
        for card in state["cards"]:
            card["processes"] = [*card["processes"], *self.machine.holders(card)]
        return state

    def _run(self, arguments: list[str]) -> int:
        if arguments[:1] == ["topo"]:
            self._connect()
            return self._topology(arguments[1:])
        if arguments[:1] == ["dmon"]:
            self._connect()
            return self._monitor(arguments[1:])
        options = _parse(arguments)
        if "help" in options:
            self.write(_HELP)
            return 0
        if "version" in options:
            version = packages.library_version(self.machine.root, packages.installed(self.machine.root))
            self.write(f"NVIDIA-SMI version  : {version}\nNVML version        : {version.rpartition('.')[0]}\n")
            return 0
        self._connect()
        for name, change in (
            ("pm", self._persistence),
            ("pl", self._power_limit),
            ("ac", self._clocks),
            ("rac", self._default_clocks),
            ("e", self._ecc),
            ("c", self._compute_mode),
            ("r", self._reset),
        ):
            if name in options:
                return change(options[name], options.get("i"))
        if "L" in options:
            for card in self._cards(options.get("i")):
                self.write(f"GPU {card['minor']}: {card['name']} (UUID: {card['uuid']})\n")
            return 0
        if "query-gpu" in options:
            return self._query(options)
        if "query-compute-apps" in options:
            return self._query_apps(options)
        if "q" in options:
            return self._log(options)
        return self._table(options)

    # --- reaching the driver ----------------------------------------------------------------------------------------

    def _connect(self) -> None:
        """What happens before anything is answered.

        Raises:
            Refused: No driver, or one of another version than the library.
        """
        if "wedged" in self.state["faults"]:
            hang()
        loaded = self.state["loaded"]
        if loaded is None:
            raise Refused(_NO_DRIVER, EXIT_NO_DRIVER)
        self.branch = int(loaded["version"].split(".")[0])
        library = packages.library_version(self.machine.root, packages.installed(self.machine.root))
        if library and library != loaded["version"]:
            short = ".".join(library.split(".")[:2])
            raise Refused(
                f"Failed to initialize NVML: Driver/library version mismatch\nNVML library version: {short}", EXIT_MISMATCH
            )

    def _cards(self, wanted: str | None, *, lost_is_an_error: bool = True) -> list[dict[str, Any]]:
        cards = self.machine.reachable(self.state)
        if not cards:
            raise Refused("No devices were found", EXIT_NO_DEVICE)
        if wanted is not None:
            chosen = []
            for name in wanted.split(","):
                found = [card for card in cards if name in (str(card["minor"]), card["uuid"], bus_id(card), card["pci_address"])]
                if not found:
                    raise Refused("No devices were found", EXIT_NO_DEVICE)
                chosen += found
            cards = chosen
        for card in cards:
            # A card that is gone ends the whole call, unless another one is asked for.
            if card["faults"].get("fallen-off") and lost_is_an_error:
                address = card["pci_address"].upper()
                space = "" if self.branch >= 525 else " "
                raise Refused(
                    f"Unable to determine the device handle for GPU{space}{address}: Unknown Error"
                    + ("\nNo devices were found" if len(cards) == 1 and self.branch >= 570 else ""),
                    EXIT_UNKNOWN,
                )
        return cards

    def _reading(self, card: dict[str, Any]) -> Reading:
        return Reading(card, self.branch)

    # --- queries ----------------------------------------------------------------------------------------------------

    def _query(self, options: dict[str, str]) -> int:
        header, units = _format(options)
        names = [name.strip() for name in options["query-gpu"].split(",")]
        found = []
        for name in names:
            field = query.find(name, self.branch)
            if field is None:
                raise Refused(f'Field "{name}" is not a valid field to query.\n', EXIT_ARGUMENT)
            found.append((name, field))
        cards = self._cards(options.get("i"))
        if header:
            self.write(", ".join(f"{name} [{field.unit}]" if field.unit else name for name, field in _heads(found)) + "\n")
        for card in cards:
            reading = self._reading(card)
            values = []
            for _, field in found:
                value = field.value(reading, self.state)
                values.append(f"{value} {field.unit}" if field.unit and units and value != query.NA else value)
            self.write(", ".join(values) + "\n")
        return 0

    def _query_apps(self, options: dict[str, str]) -> int:
        header, units = _format(options)
        names = [name.strip() for name in options["query-compute-apps"].split(",")]
        for name in names:
            if _APP_ALIASES.get(name, name) not in _APP_FIELDS:
                raise Refused(f'Field "{name}" is not a valid field to query.\n', EXIT_ARGUMENT)
        names = [_APP_ALIASES.get(name, name) for name in names]
        cards = self._cards(options.get("i"))
        if header:
            self.write(", ".join(f"{name} [{_APP_FIELDS[name]}]" if _APP_FIELDS[name] else name for name in names) + "\n")
        for card in cards:
            for process in card["processes"]:
                values = {
                    "timestamp": time.strftime("%Y/%m/%d %H:%M:%S.000"),
                    "gpu_name": card["name"],
                    "gpu_bus_id": bus_id(card),
                    "gpu_serial": card["serial"],
                    "gpu_uuid": card["uuid"],
                    "pid": str(process["pid"]),
                    "process_name": process["name"],
                    "used_gpu_memory": f"{process['memory_mib']}{' MiB' if units else ''}",
                }
                self.write(", ".join(values[name] for name in names) + "\n")
        return 0

    def _log(self, options: dict[str, str]) -> int:
        sections = [section for section in options.get("d", "").upper().split(",") if section]
        for section in sections:
            if section not in _SECTIONS:
                raise Refused(f'Invalid combination of input arguments. "{section}" is no display type', EXIT_ARGUMENT)
        readings = [self._reading(card) for card in self._cards(options.get("i"))]
        cards = [(reading, report.tree(reading, self.state)) for reading in readings]
        write = report.as_xml if "x" in options else report.as_text
        self.write(write(cards, self.state, self._cuda(), self.branch, sections))
        return 0

    def _cuda(self) -> str:
        table: dict[str, str] = self.state["cuda"]
        return table.get(str(self.branch), "N/A")

    def _table(self, options: dict[str, str]) -> int:
        cards = self._cards(options.get("i"))
        self.write(time.strftime("%a %b %e %H:%M:%S %Y") + "       \n")
        lines = table(self.state["loaded"]["version"], self._cuda(), [self._reading(card) for card in cards])
        self.write("\n".join(lines) + "\n")
        return 0

    def _topology(self, arguments: list[str]) -> int:
        if arguments not in (["-m"], ["--matrix"]):
            raise Refused(f"Invalid combination of input arguments. Please run 'nvidia-smi topo -h' for help.{os.linesep}", 2)
        cards = self._cards(None)
        nodes = {card["minor"]: self._numa(card) for card in cards}
        last = "\tGPU NUMA ID" if self.branch >= 535 else ""
        names = "\t".join(f"GPU{card['minor']}" for card in cards)
        self.write(f"\t\033[4m{names}\tCPU Affinity\tNUMA Affinity{last}\033[0m\n")
        for card in cards:
            cells = [" X " if other is card else _connection(card, other, nodes) for other in cards]
            node = nodes[card["minor"]]
            cpus = _cpus(self.machine.root, node)
            end = f"\t{node}\t\tN/A" if self.branch >= 535 else f"\t{node}"
            self.write(f"GPU{card['minor']}\t" + "\t".join(cells) + f"\t{cpus}{end}\n")
        self.write(_TOPOLOGY_WORDS + "\n")
        return 0

    def _numa(self, card: dict[str, Any]) -> int:
        try:
            path = self.machine.run / "pci" / card["pci_address"] / "numa_node"
            return max(0, int(path.read_text(encoding="ascii")))
        except OSError:
            return int(card["numa_node"])

    def _monitor(self, arguments: list[str]) -> int:
        options = {"s": "puc", "c": "0", "d": "1"}
        rest = iter(arguments)
        for argument in rest:
            name = argument.lstrip("-")
            if name not in ("s", "c", "d", "i"):
                raise Refused(f"Invalid combination of input arguments. Please run 'nvidia-smi dmon -h' for help.{os.linesep}", 2)
            options[name] = next(rest, "")
        if not set(options["s"]) <= set(_MONITOR) or not options["c"].isdigit() or not options["d"].isdigit():
            raise Refused("Failed to process command line.", EXIT_ARGUMENT)
        count, groups = int(options["c"]), [group for group in "pucm" if group in options["s"]]
        columns = [
            column for group in groups for column in _MONITOR[group] if self.branch >= 535 or column[0] not in ("jpg", "ofa")
        ]
        heads = (
            "# gpu" + "".join(f"{name:>7}" for name, _, _ in columns),
            "# Idx" + "".join(f"{unit:>7}" for _, unit, _ in columns),
        )
        shown = 0
        while not count or shown < count:
            if shown:
                time.sleep(int(options["d"]))
                self.state = self._seen()
            cards = self._cards(options.get("i"))
            if shown % 10 == 0:
                self.write(f"{heads[0]} \n{heads[1]} \n")
            for card in cards:
                reading = self._reading(card)
                self.write(f"{card['minor']:>5}" + "".join(f"{value(reading):>7}" for _, _, value in columns) + " \n")
            sys.stdout.flush()
            shown += 1
        return 0

    # --- settings ---------------------------------------------------------------------------------------------------

    def _must_be_root(self, what: str, card: dict[str, Any]) -> None:
        if os.geteuid() != 0:
            raise Refused(f"Unable to set {what} for GPU {bus_id(card)}: Insufficient Permissions\n{_EARLY}", EXIT_PERMISSION)

    def _persistence(self, value: str, wanted: str | None) -> int:
        on = {"1": True, "enabled": True, "0": False, "disabled": False}.get(value.lower())
        if on is None:
            raise Refused(f"{value} is not a valid persistence mode", EXIT_ARGUMENT)
        with self.machine.change() as state:
            self.state = state
            for card in self._cards(wanted):
                self._must_be_root("persistence mode", card)
                word = "Enabled" if on else "Disabled"
                if card["persistence"] == on:
                    self.write(f"Persistence mode is already {word} for GPU {bus_id(card)}.\n")
                    continue
                set_persistence(card, on)
                self.write(f"{word} persistence mode for GPU {bus_id(card)}.\n")
        return self._done()

    def _power_limit(self, value: str, wanted: str | None) -> int:
        if not re.fullmatch(r"\d{1,5}(\.\d+)?", value):
            raise Refused(f"Unable to parse power limit {value}", EXIT_ARGUMENT)
        limit_w = float(value)
        with self.machine.change() as state:
            self.state = state
            for card in self._cards(wanted):
                self._must_be_root("power management limit", card)
                low, high = card["power_min_w"], card["power_limit_w"]
                if high is None or low is None:
                    self.write(
                        f"Changing power management limit is not supported for GPU: {bus_id(card)}.\n"
                        "Treating as warning and moving on.\n"
                    )
                    continue
                if not low <= limit_w <= high:
                    raise Refused(
                        f"Provided power limit {limit_w:.2f} W is not a valid power limit which should be between {low:.2f} W "
                        f"and {high:.2f} W for GPU {bus_id(card)}\n{_EARLY}",
                        EXIT_ARGUMENT,
                    )
                before = self._reading(card).limit_w
                self.write(f"Power limit for GPU {bus_id(card)} was set to {limit_w:.2f} W from {before:.2f} W.\n")
                if keeps_state(card):
                    card["power_set_w"] = limit_w
                else:
                    # Nobody holds the card: the driver lets go of it, and its settings, when this program ends.
                    self.write(
                        f"\nWarning: persistence mode is disabled on device {bus_id(card)}. See the Known Issues section of the "
                        "nvidia-smi(1) man page for more information. Run with [--help | -h] switch to get more information on "
                        "how to enable persistence mode.\n"
                    )
        return self._done()

    def _clocks(self, value: str, wanted: str | None) -> int:
        found = re.fullmatch(r"(\d+),(\d+)", value)
        if not found:
            raise Refused(f"Unable to parse clocks {value}", EXIT_ARGUMENT)
        memory, core = int(found.group(1)), int(found.group(2))
        with self.machine.change() as state:
            self.state = state
            for card in self._cards(wanted):
                self._must_be_root("applications clocks", card)
                if memory != card["memory_mhz"] or core not in graphics_clocks(card):
                    raise Refused(
                        f'Specified clock combination "(MEM {memory}, SM {core})" is not supported for GPU {bus_id(card)}. Run '
                        f"'nvidia-smi -q -d SUPPORTED_CLOCKS' to see list of supported clock combinations\n{_EARLY}",
                        EXIT_ARGUMENT,
                    )
                self.write(f'Applications clocks set to "(MEM {memory}, SM {core})" for GPU {bus_id(card)}\n')
                if keeps_state(card):
                    card["clocks_set"] = [memory, core]
        return self._done()

    def _default_clocks(self, value: str, wanted: str | None) -> int:
        with self.machine.change() as state:
            self.state = state
            for card in self._cards(wanted):
                self._must_be_root("applications clocks", card)
                card["clocks_set"] = None
        return self._done()

    def _ecc(self, value: str, wanted: str | None) -> int:
        on = {"1": True, "enabled": True, "0": False, "disabled": False}.get(value.lower())
        if on is None:
            raise Refused(f"{value} is not a valid ECC mode", EXIT_ARGUMENT)
        with self.machine.change() as state:
            self.state = state
            for card in self._cards(wanted):
                self._must_be_root("ECC mode", card)
                word = "Enabled" if on else "Disabled"
                if card["ecc_pending"] == on:
                    self.write(f"ECC support is already {word} for GPU {bus_id(card)}.\n")
                    continue
                card["ecc_pending"] = on
                self.write(f"{word} ECC support for GPU {bus_id(card)}.\n")
        self._done()
        self.write("Reboot required.\n")
        return 0

    def _compute_mode(self, value: str, wanted: str | None) -> int:
        modes = {"0": "Default", "2": "Prohibited", "3": "Exclusive_Process"}
        modes.update({name.upper(): name for name in modes.values()})
        mode = modes.get(value.upper())
        if mode is None:
            raise Refused(f"{value} is not a valid compute mode", EXIT_ARGUMENT)
        with self.machine.change() as state:
            self.state = state
            for card in self._cards(wanted):
                self._must_be_root("compute mode", card)
                if card["compute_mode"] == mode:
                    self.write(f"Compute mode is already set to {mode.upper()} for GPU {bus_id(card)}.\n")
                else:
                    self.write(f"Set compute mode to {mode.upper()} for GPU {bus_id(card)}.\n")
                    card["compute_mode"] = mode
        return self._done()

    def _reset(self, value: str, wanted: str | None) -> int:
        with self.machine.change() as state:
            self.state = state
            for card in self._cards(wanted):
                self._must_be_root("reset", card)
                if card["processes"] or card["persistence"] or self.machine.holders(card):
                    raise Refused(
                        f"The following GPUs could not be reset:\n  GPU {bus_id(card)}: In use by another client\n\n"
                        "1 device is currently being used by one or more other processes (e.g., Fabric Manager, CUDA "
                        "application, graphics application such as an X server, or a monitoring application such as another "
                        "instance of nvidia-smi). Please first kill all processes using this device and all compute "
                        "applications running in the system.\n",
                        EXIT_UNKNOWN,
                    )
                card.update({"power_set_w": None, "clocks_set": None, "ecc": card["ecc_pending"], "compute_mode": "Default"})
                # A page that waits is taken out of use now.
                card["faults"].pop("memory-error", None)
                self.write(f"GPU {bus_id(card)} was successfully reset.\n")
        return self._done()

    def _done(self) -> int:
        self.write("All done.\n")
        return 0


def keeps_state(card: dict[str, Any]) -> bool:
    """Whether the driver keeps the card, and with it what was set, after the program that set it has ended."""
    return bool(card["persistence"] or card["processes"])


def set_persistence(card: dict[str, Any], on: bool) -> None:
    """Switches persistence mode; without it, and without users, the driver forgets what was set."""
    card["persistence"] = on
    if not keeps_state(card):
        card.update({"power_set_w": None, "clocks_set": None})


def hang() -> None:
    """Never returns, like a program that waits for a driver that does not answer: no signal but SIGKILL ends it.

    It sleeps uninterruptibly (state D) where it can: a parent does between ``vfork`` and the end of its child.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM):
        signal.signal(number, signal.SIG_IGN)
    sys.stdout.flush()
    try:
        import ctypes

        parent = os.getpid()
        # The child shares the parent's memory, and the parent never goes on, so that neither can disturb the other.
        if ctypes.CDLL(None).vfork() == 0:
            while os.getppid() == parent:
                time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGKILL)
    except (ImportError, OSError, AttributeError):
        pass
    while True:
        time.sleep(3600)


# --- the command line -------------------------------------------------------------------------------------------------

_SECTIONS = frozenset(
    {
        "ACCOUNTING", "CLOCK", "COMPUTE", "ECC", "ENCODER_STATS", "FBC_STATS", "MEMORY", "PAGE_RETIREMENT", "PERFORMANCE", "PIDS",
        "POWER", "ROW_REMAPPER", "SUPPORTED_CLOCKS", "TEMPERATURE", "UTILIZATION", "VOLTAGE",
    }
)  # fmt: skip
#: Long and short names -> the one used here; those of the second set take a value.
_FLAGS = {
    "-q": "q", "--query": "q", "-x": "x", "--xml-format": "x", "-L": "L", "--list-gpus": "L", "-h": "help", "--help": "help",
    "-rac": "rac", "--reset-applications-clocks": "rac", "-r": "r", "--gpu-reset": "r", "--version": "version",
}  # fmt: skip
_VALUED = {
    "-i": "i", "--id": "i", "-d": "d", "--display": "d", "-pm": "pm", "--persistence-mode": "pm", "-pl": "pl",
    "--power-limit": "pl", "-ac": "ac", "--applications-clocks": "ac", "-e": "e", "--ecc-config": "e", "-c": "c",
    "--compute-mode": "c", "--query-gpu": "query-gpu", "--query-compute-apps": "query-compute-apps", "--format": "format",
}  # fmt: skip
_HELP = (
    "NVIDIA System Management Interface of a v100ctl lab host\n\n"
    "    nvidia-smi [-L] [-q [-x] [-d TYPE]] [-i ID] [--query-gpu=FIELDS --format=csv[,noheader][,nounits]]\n"
    "    nvidia-smi --query-compute-apps=FIELDS --format=csv | topo -m | dmon [-s pucm] [-c COUNT] [-d SECONDS]\n"
    "    nvidia-smi [-i ID] -pm 0|1 | -pl WATTS | -ac MEM,SM | -rac | -e 0|1 | -c MODE | -r\n"
)


def _parse(arguments: list[str]) -> dict[str, str]:
    options: dict[str, str] = {}
    rest = iter(arguments)
    for argument in rest:
        name, separator, value = argument.partition("=")
        if argument in _FLAGS:
            options[_FLAGS[argument]] = ""
        elif name in _VALUED:
            options[_VALUED[name]] = value if separator else next(rest, "")
        elif re.fullmatch(r"-q[xd]|-[dipcl]\S+", argument) and argument[:2] in _VALUED:
            options[_VALUED[argument[:2]]] = argument[2:]
        else:
            raise Refused(
                f"Invalid combination of input arguments. Please run 'nvidia-smi -h' for help.{os.linesep}", EXIT_ARGUMENT
            )
    return options


def _format(options: dict[str, str]) -> tuple[bool, bool]:
    """Whether a head and whether units are wanted."""
    words = options.get("format", "").split(",")
    if "csv" not in words:
        raise Refused("\"--format=\" switch is missing. Please run 'nvidia-smi -h' for help.\n", EXIT_ARGUMENT)
    for word in words:
        if word.strip() not in ("csv", "noheader", "nounits"):
            raise Refused(f'"{word}" is not a valid format', EXIT_ARGUMENT)
    return "noheader" not in words, "nounits" not in words


def _heads(found: list[tuple[str, query.Field]]) -> list[tuple[str, query.Field]]:
    return [(field.name, field) for _, field in found]


# --- tables -----------------------------------------------------------------------------------------------------------

_MONITOR: dict[str, list[tuple[str, str, Any]]] = {
    "p": [
        ("pwr", "W", lambda reading: int(reading.power_w)),
        ("gtemp", "C", lambda reading: reading.temperature_c),
        ("mtemp", "C", lambda reading: reading.memory_temperature_c),
    ],
    "u": [
        ("sm", "%", lambda reading: reading.utilization),
        ("mem", "%", lambda reading: reading.utilization // 2),
        ("enc", "%", lambda reading: 0),
        ("dec", "%", lambda reading: 0),
        ("jpg", "%", lambda reading: "-"),
        ("ofa", "%", lambda reading: "-"),
    ],
    "c": [
        ("mclk", "MHz", lambda reading: reading.card["memory_mhz"] or "-"),
        ("pclk", "MHz", lambda reading: reading.sm_mhz),
    ],
    "m": [
        ("fb", "MB", lambda reading: reading.used_mib),
        ("bar1", "MB", lambda reading: 2),
    ],
}


def _connection(one: dict[str, Any], other: dict[str, Any], nodes: dict[int, int]) -> str:
    first, second = sorted((one["minor"], other["minor"]))
    if one["form"] == "SXM3":
        return "NV6"
    if one["form"] == "SXM2" and (first, second) in _CUBE_MESH:
        return f"NV{_CUBE_MESH[first, second]}"
    return "NODE" if nodes[first] == nodes[second] else "SYS"


def _cpus(root: Path, node: int) -> str:
    try:
        return (root / f"sys/devices/system/node/node{node}/cpulist").read_text(encoding="ascii").strip()
    except OSError:
        return f"0-{(os.cpu_count() or 1) - 1}"


def table(version: str, cuda: str, readings: list[Reading]) -> list[str]:
    """The table that ``nvidia-smi`` without arguments prints, after the line with the time."""
    branch = int(version.split(".")[0])
    if branch >= 545:
        widths, mig = (41, 24, 22), True
        title = f"| NVIDIA-SMI {version:<23}Driver Version: {version:<15}CUDA Version: {cuda:<9}|"
        rule = "+" if branch >= 575 else "|"
    elif branch >= 530:
        widths, mig = (41, 22, 22), True
        title = f"| NVIDIA-SMI {version:<23}Driver Version: {version:<13}CUDA Version: {cuda:<9}|"
        rule = "|"
    else:
        widths, mig = (31, 22, 22), branch >= 450
        title = f"| NVIDIA-SMI {version:<13}Driver Version: {version:<13}CUDA Version: {cuda:<9}|"
        rule = "|"
    inside = sum(widths) + 2
    edge = "+" + "-" * inside + "+"
    between = "+" + "+".join("-" * width for width in widths) + "+"
    lines = [edge, title, rule + between[1:]]
    if branch >= 530:
        gap = "          " if widths[1] == 24 else "        "
        wide = "Bus-Id" + gap + "Disp.A"
        lines.append(f"| GPU  Name                 Persistence-M | {wide:<{widths[1] - 2}} | Volatile Uncorr. ECC |")
        lines.append(f"| Fan  Temp   Perf          Pwr:Usage/Cap |{'Memory-Usage':>{widths[1] - 1}} | GPU-Util  Compute M. |")
    else:
        lines.append("| GPU  Name        Persistence-M| Bus-Id        Disp.A | Volatile Uncorr. ECC |")
        lines.append("| Fan  Temp  Perf  Pwr:Usage/Cap|         Memory-Usage | GPU-Util  Compute M. |")
    if mig:
        lines.append("|" + "|".join((" " * widths[0], " " * widths[1], f"{'MIG M.':>{widths[2] - 1}} ")) + "|")
    lines.append("|" + "+".join("=" * width for width in widths) + "|")
    for reading in readings:
        lines += _rows(reading, widths, mig)
        lines.append(between)
    lines += [" " * len(edge) if branch < 575 else "", edge]
    lines += _process_box(readings, inside, branch)
    return lines


def _rows(reading: Reading, widths: tuple[int, int, int], mig: bool) -> list[str]:
    card = reading.card
    on = "On" if card["persistence"] else "Off"
    ecc = "0" if card["ecc"] else "Off"
    limit = f"{int(reading.limit_w)}W" if reading.limit_w is not None else "N/A"
    if widths[0] == 41:
        first = _cell(f" {card['minor']:>3}  {card['name']}", f"{on}  ", 41)
        # Wider numbers have had room since 545.
        pad = " " if widths[1] == 24 else ""
        second = _cell(f" N/A {reading.temperature_c:>4}C    P0", f"{int(reading.power_w)}W / {pad}{limit:>4} ", 41)
        memory = f"{reading.used_mib}MiB / {pad}{reading.total_mib:>5}MiB "
    else:
        shown = card["name"] if len(card["name"]) <= 18 else card["name"][:15] + "..."
        first = f" {card['minor']:>3}  {shown:<18}  {on:<4} "
        second = f" N/A {reading.temperature_c:>4}C    P0 {int(reading.power_w):>5}W / {limit:>4} "
        memory = f"{reading.used_mib}MiB / {reading.total_mib:>5}MiB "
    lines = [
        "|".join(("", first, _cell("", f"{reading.bus_id} Off ", widths[1]), _cell("", f"{ecc} ", widths[2]), "")),
        "|".join(
            (
                "",
                second,
                _cell("", memory, widths[1]),
                _cell("", f"{reading.utilization}%{card['compute_mode'][:11]:>13} ", widths[2]),
                "",
            )
        ),
    ]
    if mig:
        lines.append("|".join(("", " " * widths[0], " " * widths[1], _cell("", "N/A ", widths[2]), "")))
    return lines


def _cell(left: str, right: str, width: int) -> str:
    """A cell of a table: one text at its left edge, one at its right."""
    return left + right.rjust(width - len(left))


def _process_box(readings: list[Reading], inside: int, branch: int) -> list[str]:
    edge = "+" + "-" * inside + "+"
    lines = ["|" + " Processes:".ljust(inside) + "|"]
    pid = 15 if branch >= 575 else 9
    heads = f"  GPU   GI   CI {'PID':>{pid + 1}}   Type   Process name".ljust(inside - 11) + "GPU Memory "
    lines.append("|" + heads + "|")
    lines.append("|" + "        ID   ID".ljust(inside - 11) + "Usage      " + "|")
    lines.append("|" + "=" * inside + "|")
    rows = [(reading, process) for reading in readings for process in reading.processes]
    for reading, process in rows:
        left = f"  {reading.card['minor']:>3}   N/A  N/A {process['pid']:>{pid + 1}}      C   {process['name']}"
        size = f"{process['memory_mib']}MiB "
        lines.append("|" + left[: inside - 12].ljust(inside - len(size)) + size + "|")
    if not rows:
        lines.append("|" + "  No running processes found".ljust(inside) + "|")
    return [*lines, edge]
