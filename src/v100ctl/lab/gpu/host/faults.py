"""What goes wrong with V100s, done to the machine as it happens there."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from typing import Any

from . import packages
from .machine import NVIDIA_MODULES, Machine

#: Faults of one card; the others are the host's.
OF_CARDS = ("fallen-off", "throttled", "link-degraded", "bar1-zero", "memory-error")


class NotPossible(Exception):
    """The host is not in a state that this fault could happen in."""


def inject(machine: Machine, name: str, card: int | None, undo: bool) -> None:
    """Breaks the machine, or mends it.

    Args:
        machine: This host.
        name: One of :data:`ALL`.
        card: Index of the card for one of :data:`OF_CARDS`; the last one where not given.
        undo: Mend it, as whoever found the cause would.

    Raises:
        NotPossible: There is no such card, no driver to break, or no daemon to stop.
    """
    if name in OF_CARDS:
        with machine.change() as state:
            cards = state["cards"]
            index = len(cards) - 1 if card is None else card
            if not 0 <= index < len(cards):
                raise NotPossible(f"the host has no card {index}" if cards else "the host has no card")
            _of_card(machine, state, name, cards[index], undo)
        if name == "bar1-zero":
            machine.show()
            _daemon("try-restart")
    else:
        ALL[name](machine, undo)
    machine.refresh()
    machine.show()


def _of_card(machine: Machine, state: dict[str, Any], name: str, card: dict[str, Any], undo: bool) -> None:
    if undo:
        card["faults"].pop(name, None)
    else:
        card["faults"][name] = True
    address = card["pci_address"]
    if name == "fallen-off" and not undo:
        place = address.rpartition(".")[0]
        machine.log(state, f"NVRM: GPU at PCI:{place}: {card['uuid']}", 4)
        machine.log(state, f"NVRM: Xid (PCI:{place}): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.", 3)
        machine.log(state, f"NVRM: GPU {address}: GPU has fallen off the bus.", 3)
    elif name == "memory-error" and not undo:
        place = address.rpartition(".")[0]
        words = (
            "An uncorrectable double bit error (DBE) has been detected on GPU in the framebuffer at partition 4, subpartition 1."
        )
        machine.log(state, f"NVRM: Xid (PCI:{place}): 48, pid='<unknown>', name=<unknown>, {words}", 3)
        card["retired_double"] += 1
    elif name == "bar1-zero" and state["loaded"] is not None:
        # Firmware assigns addresses before a kernel starts: this is seen after a boot only.
        machine.restart_driver(state)


def _no_driver(machine: Machine, undo: bool) -> None:
    if undo:
        _install(machine, "proprietary")
        return
    _daemon("disable", "--now")
    packages.purge()
    with machine.change() as state:
        machine.restart_driver(state)


def _install(machine: Machine, flavour: str) -> None:
    state = machine.load()
    if not state["driver"]["version"]:
        raise NotPossible("the host was made without a driver; remove it and use `--driver 535`")
    _daemon("stop")
    packages.install(dict(state["driver"], flavour=flavour))
    with machine.change() as state:
        machine.restart_driver(state)
    machine.show()
    _daemon("enable", "--now")


def _nouveau(machine: Machine, undo: bool) -> None:
    with machine.change() as state:
        if undo:
            state["faults"].pop("nouveau", None)
        else:
            state["faults"]["nouveau"] = True
        machine.restart_driver(state)
    _daemon("restart" if undo else "stop")


def _not_loaded(machine: Machine, undo: bool) -> None:
    _must_be_installed(machine)
    if not undo:
        _daemon("stop")
    with machine.change() as state:
        if undo:
            state["faults"].pop("not-loaded", None)
        else:
            state["faults"]["not-loaded"] = True
        machine.restart_driver(state)
    machine.show()
    if undo:
        _daemon("start")


def _open_modules(machine: Machine, undo: bool) -> None:
    _must_be_installed(machine)
    _install(machine, "proprietary" if undo else "open")


def _mismatch(machine: Machine, undo: bool) -> None:
    _must_be_installed(machine)
    with machine.change() as state:
        if undo:
            state["faults"].pop("driver-mismatch", None)
            machine.restart_driver(state)
        else:
            if state["loaded"] is None:
                raise NotPossible("no driver is loaded that could be of another version")
            # As an unattended upgrade leaves it: all on the disk is new, what was loaded at boot is not.
            state["faults"]["driver-mismatch"] = True
            state["loaded"]["version"] = state["driver"]["older_version"]
    machine.show()
    if undo:
        _daemon("restart")


def _wedged(machine: Machine, undo: bool) -> None:
    with machine.change() as state:
        if undo:
            state["faults"].pop("wedged", None)
            return
        if state["loaded"] is None:
            raise NotPossible("no driver is loaded that could hang")
        state["faults"]["wedged"] = True
        machine.log(state, "INFO: task nvidia-smi:4711 blocked for more than 120 seconds.", 3)


def _persistence(machine: Machine, undo: bool) -> None:
    _must_be_installed(machine)
    if not _daemon("enable" if undo else "disable", "--now"):
        raise NotPossible("nvidia-persistenced could not be " + ("started" if undo else "stopped"))


def _uvm(machine: Machine, undo: bool) -> None:
    with machine.change() as state:
        if undo:
            state["faults"].pop("uvm-poisoned", None)
            state["uvm"] = "well"
            return
        if "nvidia_uvm" not in state["modules"]:
            raise NotPossible("nvidia_uvm is not loaded")
        state["faults"]["uvm-poisoned"] = True
        state["uvm"] = "poisoned"


def _must_be_installed(machine: Machine) -> None:
    if packages.module(packages.installed(machine.root)) is None:
        raise NotPossible("the host has no driver; make it with `--driver 535`, or mend it with `lab fault no-driver --undo`")


def _daemon(*arguments: str) -> bool:
    """Does something to nvidia-persistenced, where it is installed."""
    subprocess.run(["systemctl", "daemon-reload"], check=False)
    done = subprocess.run(["systemctl", *arguments, "nvidia-persistenced.service"], check=False, capture_output=True)
    return done.returncode == 0


#: The host's faults; :data:`OF_CARDS` has the others.
ALL: dict[str, Callable[[Machine, bool], None]] = {
    "no-driver": _no_driver,
    "nouveau": _nouveau,
    "not-loaded": _not_loaded,
    "open-modules": _open_modules,
    "driver-mismatch": _mismatch,
    "wedged": _wedged,
    "persistence-off": _persistence,
    "uvm-poisoned": _uvm,
}


def setup(machine: Machine) -> None:
    """What a new host still lacks after its first boot: the driver that it was asked for. Does nothing the second time."""
    with machine.change() as state:
        first = not state.get("set_up")
        state["set_up"] = True
    if not first:
        return
    packages.divert()
    if not machine.load()["driver"]["version"]:
        return
    _install(machine, machine.load()["driver"]["flavour"])
    machine.refresh()
    machine.show()
    if not set(NVIDIA_MODULES) <= set(machine.load()["modules"]):
        raise NotPossible("the driver's stand-ins are installed, but no module is loaded")
