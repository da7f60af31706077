#!/usr/bin/env python3
"""Bring a card back without a reboot: users stopped, persistence off, unified memory reloaded, cards reset, users started.

Standard library only, Python >= 3.8; run it as root. It stops every service that uses a card of this host, and starts those again
whatever comes of it. A user that is no service is named and left alone: then nothing was changed. Cards are reset together, since
those that NVLink connects must be. A driver that is not loaded is loaded; one whose library is of another version (packages were
upgraded, and nobody rebooted) is taken out of the kernel, and the one that is installed takes its place.

Prints one JSON document: ``steps`` that were taken, ``users`` that were stopped, ``problem`` (empty when the cards answer again),
and ``needs`` (``power cycle``, ``reboot`` or nothing). Exit code 0 when the cards answer, else 1. With ``--check`` nothing is
changed: ``steps`` and ``users`` are what would be. Programs give ``--request JSON``, and the document alone tells them how it
went.
"""

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    Document = dict[str, Any]

LIMIT_S = 120
#: A hang of the driver shows here first, and every call that hangs leaves a process behind that nobody can kill.
LOOK_LIMIT_S = 60
PERSISTENCED = "nvidia-persistenced.service"
TUNING = "v100ctl-gpu-tuning.service"
#: In the order in which they can be removed.
MODULES = ("nvidia_uvm", "nvidia_drm", "nvidia_modeset", "nvidia")
MISMATCH = "Driver/library version mismatch"


class Problem(Exception):
    """It cannot go on; ``needs`` says what alone helps."""

    def __init__(self, message: str, needs: str = "") -> None:
        super().__init__(message)
        self.needs = needs


def run(argv: "list[str]", limit_s: float = LIMIT_S) -> str:
    """What a program printed.

    Raises:
        Problem: it is missing, failed, or gave no answer in time.
    """
    command = " ".join(argv)
    try:
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=limit_s, check=False
        )
    except OSError as error:
        raise Problem(f"`{command}` does not start: {error.strerror}") from None
    except subprocess.TimeoutExpired:
        raise Problem(f"`{command}` gave no answer within {limit_s:g} s: the driver hangs", "reboot") from None
    output = done.stdout.decode("utf-8", "replace")
    if done.returncode != 0:
        raise Problem(f"`{command}` failed: {' '.join(output.split())[:500]}")
    return output


def lost_cards(root: str = "/sys/bus/pci/devices") -> "list[str]":
    """NVIDIA's display controllers whose configuration space reads all ones: they have fallen off the bus."""
    lost = []
    for device in sorted(Path(root).glob("*")):
        try:
            if (device / "vendor").read_text(encoding="ascii").strip() != "0x10de":
                continue
            if not (device / "class").read_text(encoding="ascii").startswith("0x03"):
                continue
            if (device / "config").read_bytes()[:4] == b"\xff\xff\xff\xff":
                lost.append(device.name)
        except (OSError, ValueError):
            continue
    return lost


def service_of(cgroup: str) -> str:
    """The service in a process's control group, empty where it is in none.

    In a container the paths begin with the container's own.
    """
    for line in cgroup.splitlines():
        hierarchy, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "name=systemd" or (hierarchy, controllers) == ("0", ""):
            found = re.search(r"/system\.slice/(?:[^/]+\.slice/)*([^/]+\.service)(?:/|$)", path)
            if found:
                return found.group(1)
    return ""


def card_users(proc: str = "/proc") -> "dict[int, str]":
    """Processes that have a device of the driver open, this one excepted, and the service of each."""
    users = {}
    for folder in Path(proc).glob("[0-9]*"):
        try:
            targets = [os.readlink(link) for link in (folder / "fd").glob("*")]
            if folder.name != str(os.getpid()) and any(re.match(r"/dev/nvidia(?:[0-9]|ctl|-uvm)", target) for target in targets):
                users[int(folder.name)] = service_of((folder / "cgroup").read_text(encoding="utf-8", errors="replace"))
        except OSError:
            # It has ended meanwhile.
            continue
    return users


def shows(unit: str, state: str) -> bool:
    """Has a unit a property of this value?"""
    return state in run(["systemctl", "show", "--property", state.partition("=")[0], unit]).splitlines()


def look() -> None:
    """See that every card answers.

    Raises:
        Problem: one does not.
    """
    run(["nvidia-smi", "--query-gpu=index,uuid", "--format=csv,noheader"], LOOK_LIMIT_S)


def loaded() -> "list[str]":
    """The driver's modules that are loaded, in the order in which they can be removed."""
    return [name for name in MODULES if Path("/sys/module", name).exists()]


def sickness() -> str:
    """What kind of help is needed: ``not loaded``, ``mismatch`` or nothing that the driver itself tells. Nothing is changed.

    Raises:
        Problem: the driver hangs, or something else holds the cards.
    """
    if "nvidia" not in loaded():
        if Path("/sys/module/nouveau").exists():
            raise Problem("the kernel's own driver nouveau holds the cards: `v100ctl provision` blacklists it", "reboot")
        return "not loaded"
    try:
        look()
    except Problem as error:
        if error.needs:
            raise
        return "mismatch" if MISMATCH in str(error) else ""
    return ""


def reload_driver(document: "Document") -> None:
    """The module that is installed in place of the one that is loaded.

    Raises:
        Problem: something still uses it, or the installed one does not load.
    """
    names = loaded()
    for name in names:
        run(["rmmod", name])
    for name in reversed(names):
        run(["modprobe", name])
    document["steps"].append("driver reloaded")


def mend(document: "Document") -> None:
    """Persistence off, unified memory reloaded, cards reset. A killed program may have left either unusable.

    Raises:
        Problem: one of the three failed.
    """
    # Kept awake by nvidia-smi itself, a card counts as used. Its settings' unit switches that on again.
    run(["nvidia-smi", "-pm", "0"])
    document["steps"].append("persistence off")
    if Path("/sys/module/nvidia_uvm").exists():
        run(["rmmod", "nvidia_uvm"])
        run(["modprobe", "nvidia_uvm"])
        document["steps"].append("unified memory reloaded")
    run(["nvidia-smi", "-r"])
    document["steps"].append("cards reset")


def recover(document: "Document", check: bool = False) -> None:
    """All of it; ``document`` tells afterwards how far it went, or with ``check`` how far it would go.

    Raises:
        Problem: the cards do not answer.
    """
    lost = lost_cards()
    if lost:
        raise Problem(f"{', '.join(lost)} fell off the bus: power the host off and on again", "power cycle")
    sick = sickness()
    if sick == "not loaded":
        document["steps"].append("driver loaded")
        if not check:
            run(["modprobe", "nvidia"])
            start(document)
            look()
        return
    users = card_users()
    loose = sorted(pid for pid, unit in users.items() if not unit)
    if loose:
        named = ", ".join(map(str, loose))
        raise Problem(f"processes {named} use a card and belong to no service: end them, then run this again")
    daemon = shows(PERSISTENCED, "ActiveState=active")
    units = sorted(set(users.values()) - {PERSISTENCED})
    if check:
        document["users"] += [*units, *((PERSISTENCED,) if daemon else ())]
        reset = ["driver reloaded"] if sick == "mismatch" else ["persistence off", "unified memory reloaded", "cards reset"]
        document["steps"] += ["users stopped", *reset, "users started"]
        return
    try:
        for unit in (*units, *((PERSISTENCED,) if daemon else ())):
            # Remembered first: what is half stopped is started again too.
            document["users"].append(unit)
            run(["systemctl", "stop", unit])
        document["steps"].append("users stopped")
        if sick == "mismatch":
            reload_driver(document)
        else:
            mend(document)
    finally:
        start(document)
    look()


def start(document: "Document") -> None:
    """What was stopped, the last first, and the settings that a reset card has lost before those that compute."""
    stopped = list(reversed(document["users"]))
    # It ends where no card answers, and then it has not been stopped here.
    first = [PERSISTENCED] if PERSISTENCED in stopped or shows(PERSISTENCED, "UnitFileState=enabled") else []
    settings = [TUNING] if shows(TUNING, "UnitFileState=enabled") else []
    for unit in (*first, *settings, *(unit for unit in stopped if unit not in first)):
        try:
            run(["systemctl", "restart", unit])
        except Problem as error:
            document["steps"].append(f"{unit} did not start: {error}")
    document["steps"].append("users started")


def main(arguments: "list[str]") -> int:
    """The program; returns its exit code."""
    parser = argparse.ArgumentParser(description="Bring this host's cards back without a reboot.")
    parser.add_argument("--check", action="store_true", help="say what would be done; change nothing")
    parser.add_argument("--request", type=json.loads, help='the same as JSON, for programs: {"check": true}; ends with 0')
    options = parser.parse_args(arguments)
    document = {"steps": [], "users": [], "problem": "", "needs": ""}  # type: Document
    try:
        recover(document, check=options.check or bool(options.request and options.request.get("check")))
    except Problem as error:
        document["problem"] = str(error)
        document["needs"] = error.needs or ("reboot" if "users stopped" in document["steps"] else "")
    print(json.dumps(document))
    return 1 if document["problem"] and options.request is None else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
