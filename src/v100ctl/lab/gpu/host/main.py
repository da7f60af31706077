"""One program under many names: what it is called decides what it does."""

from __future__ import annotations

import sys
from pathlib import Path

from . import faults, tools
from .machine import Machine
from .smi import Smi

_PROGRAMS = {
    "lsmod": tools.lsmod,
    "modprobe": tools.modprobe,
    "rmmod": tools.rmmod,
    "modinfo": tools.modinfo,
    "dmesg": tools.dmesg,
    "nvidia-modprobe": tools.nvidia_modprobe,
    "nvidia-persistenced": tools.nvidia_persistenced,
    "fake-cuda-context": tools.cuda_context,
}


def main(argv: list[str], root: Path = Path("/")) -> int:
    """Runs the program that ``argv[0]`` names and returns its exit code."""
    machine = Machine(root)
    name, arguments = Path(argv[0]).name, argv[1:]
    if name == "nvidia-smi":
        return Smi(machine).run(arguments)
    if name in _PROGRAMS:
        return _PROGRAMS[name](machine, arguments)
    return _control(machine, arguments)


def _control(machine: Machine, arguments: list[str]) -> int:
    """``fake-v100 boot | setup | refresh | fault NAME CARD|- do|undo``: for the lab itself."""
    command, rest = arguments[0] if arguments else "", arguments[1:]
    try:
        if command == "boot":
            machine.boot()
        elif command == "setup":
            faults.setup(machine)
        elif command == "refresh":
            machine.refresh()
        elif command == "fault" and len(rest) == 3:
            faults.inject(machine, rest[0], None if rest[1] == "-" else int(rest[1]), rest[2] == "undo")
        else:
            sys.stderr.write(f"{_control.__doc__}\n")
            return 64
    except faults.NotPossible as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0
