"""The small programs around a driver: ``modprobe``, ``rmmod``, ``lsmod``, ``modinfo``, ``dmesg``, ``nvidia-persistenced``...

A container may load no modules and has no kernel of its own, so these answer for the machine that the lab host plays. Where the
package with the real program is installed, it is left what the fake knows nothing of.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from . import packages
from .machine import NVIDIA_MODULES, Machine, module_fields
from .smi import hang, set_persistence

_REAL_FOLDERS = ("/usr/sbin", "/usr/bin", "/sbin", "/bin")


def _real(name: str, arguments: list[str]) -> int:
    """Hands over to the real program of this name, where there is one."""
    for folder in _REAL_FOLDERS:
        path = f"{folder}/{name}"
        if os.access(path, os.X_OK):
            return subprocess.run([path, *arguments], check=False).returncode
    sys.stderr.write(f"{name}: not known on this lab host: {' '.join(arguments)}\n")
    return 127


def _module_name(word: str) -> str:
    return word.replace("-", "_")


def lsmod(machine: Machine, arguments: list[str]) -> int:
    """The loaded modules."""
    print(f"{'Module':<23} {'Size':<8} Used by")
    for line in (machine.run / "modules").read_text(encoding="utf-8").splitlines():
        name, size, count, users = line.split()[:4]
        print(f"{name:<19} {size:>8}  {count} {users.strip(',-')}".rstrip())
    return 0


def modprobe(machine: Machine, arguments: list[str]) -> int:
    """Loads or, with ``-r``, removes NVIDIA's modules and nouveau."""
    words = [_module_name(word) for word in arguments if not word.startswith("-")]
    if not words or not set(words) <= {*NVIDIA_MODULES, "nouveau"}:
        return _real("modprobe", arguments)
    if "-r" in arguments or "--remove" in arguments:
        return rmmod(machine, [*words, *(["--with-users"] if len(words) == 1 else [])])
    with machine.change() as state:
        for name in words:
            if name in state["modules"]:
                continue
            if name == "nouveau":
                state["modules"].append(name)
                continue
            built = packages.module(packages.installed(machine.root))
            if built is None:
                sys.stderr.write(f"modprobe: FATAL: Module {name} not found in directory /lib/modules/{os.uname().release}\n")
                return 1
            if "nouveau" in state["modules"]:
                machine.log(state, f"NVRM: The NVIDIA probe routine was not called for {len(state['cards'])} device(s).", 4)
                machine.log(state, "NVRM: No NVIDIA devices probed.", 3)
                sys.stderr.write(f"modprobe: ERROR: could not insert '{name}': No such device\n")
                return 1
            state["faults"].pop("not-loaded", None)
            if state["loaded"] is None:
                machine.load_driver(state, built["version"], built["flavour"])
                # Only what is asked for, and what that needs.
                state["modules"] = ["nvidia"]
            if name == "nvidia_drm" and "nvidia_modeset" not in state["modules"]:
                state["modules"].append("nvidia_modeset")
            if name not in state["modules"]:
                state["modules"].append(name)
            if name == "nvidia_uvm":
                state["uvm"] = "well"
                state["faults"].pop("uvm-poisoned", None)
    machine.show()
    return 0


def rmmod(machine: Machine, arguments: list[str]) -> int:
    """Removes modules that nothing uses."""
    words = [_module_name(word) for word in arguments if not word.startswith("-")]
    if not words or not set(words) <= {*NVIDIA_MODULES, "nouveau"}:
        return _real("rmmod", arguments)
    with machine.change() as state:
        if "--with-users" in arguments and words == ["nvidia"]:
            words = [name for name in ("nvidia_uvm", "nvidia_drm", "nvidia_modeset") if name in state["modules"]] + words
        for name in words:
            if name not in state["modules"]:
                sys.stderr.write(f"rmmod: ERROR: Module {name} is not currently loaded\n")
                return 1
            used = any(card["processes"] for card in state["cards"]) or "wedged" in state["faults"]
            if name == "nvidia":
                used = used or any(card["persistence"] for card in state["cards"])
            needed = [other for other in state["modules"] if other != name and other in _USERS.get(name, ())]
            if needed:
                sys.stderr.write(f"rmmod: ERROR: Module {name} is in use by: {' '.join(needed)}\n")
                return 1
            if used and name in ("nvidia", "nvidia_uvm"):
                sys.stderr.write(f"rmmod: ERROR: Module {name} is in use\n")
                return 1
            state["modules"].remove(name)
            if name == "nvidia":
                state["loaded"] = None
    machine.show()
    return 0


_USERS = {"nvidia": ("nvidia_uvm", "nvidia_modeset", "nvidia_drm"), "nvidia_modeset": ("nvidia_drm",)}


def modinfo(machine: Machine, arguments: list[str]) -> int:
    """What a module file says of itself."""
    words = [word for word in arguments if not word.startswith("-")]
    if not words or arguments != words:
        return _real("modinfo", arguments)
    path = Path(words[0])
    if path.suffix != ".ko":
        path = machine.root / "lib/modules" / os.uname().release / f"updates/dkms/{words[0]}.ko"
    try:
        fields = module_fields(path.read_bytes())
    except OSError:
        sys.stderr.write(f"modinfo: ERROR: Module {words[0]} not found.\n")
        return 1
    if "version" not in fields:
        return _real("modinfo", arguments)
    for name, value in {"filename": str(path), **fields}.items():
        print(f"{name + ':':<15} {value}")
    return 0


def dmesg(machine: Machine, arguments: list[str]) -> int:
    """The machine's kernel log instead of the one of the machine that all containers share."""
    state = machine.load()
    for entry in state["log"]:
        if "-T" in arguments or "--ctime" in arguments:
            stamp = time.strftime("%a %b %e %H:%M:%S %Y", time.localtime(state["booted_s"] + entry["at_s"]))
        else:
            stamp = f"{entry['at_s']:12.6f}"
        print(f"[{stamp}] {entry['message']}")
    return 0


def nvidia_modprobe(machine: Machine, arguments: list[str]) -> int:
    """Loads modules and makes device nodes, as units do before a server starts."""
    if "wedged" in machine.load()["faults"]:
        hang()
    code = modprobe(machine, ["nvidia"])
    if code == 0 and "-u" in arguments:
        code = modprobe(machine, ["nvidia-uvm"])
    return code


def nvidia_persistenced(machine: Machine, arguments: list[str]) -> int:
    """The daemon that keeps the cards initialised while it runs. Returns once they are, and goes on in the background."""
    with machine.change() as state:
        cards = machine.reachable(state)
        if state["loaded"] is None or not cards:
            sys.stderr.write("nvidia-persistenced failed to initialize. Check syslog for more details.\n")
            return 1
        for card in cards:
            set_persistence(card, "--no-persistence-mode" not in arguments)
    pid = os.fork()
    if pid != 0:
        folder = machine.root / "run/nvidia-persistenced"
        folder.mkdir(exist_ok=True)
        (folder / "nvidia-persistenced.pid").write_text(f"{pid}\n", encoding="ascii")
        return 0
    os.setsid()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
    try:
        while True:
            time.sleep(3600)
    finally:
        with machine.change() as state:
            for card in state["cards"]:
                set_persistence(card, False)


def cuda_context(machine: Machine, arguments: list[str]) -> int:
    """What a CUDA program meets when it makes a context: nothing, or the error that a poisoned UVM gives."""
    state = machine.load()
    if "wedged" in state["faults"]:
        hang()
    if not machine.reachable(state):
        sys.stderr.write("CUDA error 100: no CUDA-capable device is detected\n")
        return 1
    if state["uvm"] != "well" or "nvidia_uvm" not in state["modules"]:
        sys.stderr.write("CUDA error 999: unknown error\n")
        return 1
    return 0
