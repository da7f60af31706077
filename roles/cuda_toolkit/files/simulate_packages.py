#!/usr/bin/env python3
"""Say what installing packages would do to this host, and what of it must not happen. Changes nothing.

Standard library only, Python >= 3.8. Prints one JSON document:

* ``actions``: what would be done: ``kind`` (install, upgrade, downgrade, reinstall, remove), ``name``, ``old`` and ``new``.
* ``drivers``: the names of driver packages that would be added, which then want to be held like the driver itself.
* ``refusals``: why it must not be done, one sentence each. An installed driver, kernel, DKMS or firmware package would change, a
  driver of another version than the host's would be added, a kernel would be added, or something would be removed.

Exit code 0 with that document, whatever it says; 1 and its reason as ``problem`` when the package manager gave none.
"""

import argparse
import fnmatch
import json
import os
import re
import subprocess
import sys
from pathlib import Path

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Collection, Iterable

    Action = dict[str, str]

LIMIT_S = 300
#: Names of packages that belong to the driver, where their version is one of a driver's: CUDA's own begin with two digits.
DRIVER_NAMES = ("*nvidia*", "libcuda1*", "libcuda.so*", "libcudadebugger1*", "cuda-drivers*", "cuda-compat-*")
DRIVER_VERSION = re.compile(r"(?:[0-9]+:)?([0-9]{3}\.[0-9]+(?:\.[0-9]+)*)")
#: These go with a branch, and are released less often than its drivers.
HELPER_NAMES = ("nvidia-modprobe*", "nvidia-persistenced*", "nvidia-settings*", "nvidia-xconfig*", "libxnvctrl*")
KERNEL_IMAGES = ("linux-image*", "kernel", "kernel-core", "kernel-rt", "kernel-rt-core", "kernel-uek*")
#: linux-libc-dev and kernel-headers are what programs are compiled with, not parts of a kernel.
GUARDED = {
    "kernel": (
        *KERNEL_IMAGES,
        "linux-headers*",
        "linux-modules*",
        "linux-kbuild*",
        "linux-generic*",
        "kernel-modules*",
        "kernel-devel*",
    ),
    "DKMS": ("dkms", "*-dkms", "dkms-*", "kmod-*", "akmod-*"),
    "firmware": ("firmware-*", "*-firmware", "linux-firmware*", "*-microcode"),
}
DNF_SECTIONS = {
    "installing": "install",
    "upgrading": "upgrade",
    "downgrading": "downgrade",
    "reinstalling": "reinstall",
    "removing": "remove",
}


class NoAnswer(Exception):
    """The package manager could not say; the text is its own reason."""


def matches(name: str, patterns: "Iterable[str]") -> bool:
    """Does a package's name, without its architecture, match one of the patterns?"""
    return any(fnmatch.fnmatchcase(name.partition(":")[0], pattern) for pattern in patterns)


def driver_version(name: str, version: str) -> str:
    """The driver's version of a package that belongs to it, empty for any other package."""
    found = DRIVER_VERSION.match(version)
    return found.group(1) if found and matches(name, DRIVER_NAMES) else ""


def parse_apt(output: str) -> "list[Action]":
    """The actions of ``apt-get --simulate``: ``Inst NAME [OLD] (NEW ARCHIVE [ARCHITECTURE])`` and ``Remv NAME [OLD]``."""
    actions = []
    for line in output.splitlines():
        found = re.match(r"(Inst|Remv|Purg) (\S+)(?: \[([^\]\s]+)\])?(?: \(([^\s)]+))?", line)
        if not found:
            continue
        word, name, old, new = (part or "" for part in found.groups())
        kind = "remove" if word != "Inst" else "upgrade" if old else "install"
        actions.append({"kind": kind, "name": name, "old": old, "new": new if word == "Inst" else ""})
    return actions


def parse_dnf(output: str) -> "list[Action]":
    """The actions of ``dnf --assumeno``: a table under headings. A name that is too long stands on a line of its own."""
    actions = []
    kind = ""
    words = []  # type: list[str]
    for line in output.splitlines():
        heading = re.fullmatch(r"(?i)(installing|upgrading|downgrading|reinstalling|removing)\b[a-z ]*:", line.strip())
        if heading:
            kind, words = DNF_SECTIONS[heading.group(1).lower()], []
        elif line.startswith("Transaction Summary"):
            break
        elif not kind or not line.startswith(" ") or line.strip().startswith("replacing "):
            continue
        else:
            words = words + line.split() if line.startswith("  ") else line.split()
            if len(words) >= 4:
                name, version = words[0], words[2]
                old = version if kind == "remove" else ""
                actions.append({"kind": kind, "name": name, "old": old, "new": "" if kind == "remove" else version})
                words = []
    return actions


def judge(actions: "list[Action]", known: "Collection[str]", branch: str) -> "list[str]":
    """Why the actions must not be carried out.

    Args:
        actions: What would be done.
        known: Versions of the driver that the host has, loaded or installed; empty where there is none.
        branch: The branch that the host shall have, for a host that has no driver yet; empty where it shall have none.
    """
    refusals = []
    for action in actions:
        kind, name, old, new = action["kind"], action["name"], action["old"], action["new"]
        version = driver_version(name, new or old)
        guarded = "driver" if version or driver_version(name, old) else ""
        guarded = guarded or next((what for what, patterns in GUARDED.items() if matches(name, patterns)), "")
        if kind == "remove":
            refusals.append("the {}package {} {} would be removed".format(guarded and guarded + " ", name, old))
        elif kind != "install":
            if guarded:
                old_words = f" from {old}" if old else ""
                refusals.append(f"the installed {guarded} package {name} would change{old_words} to {new}")
        elif version:
            other = other_version(name, version, known, branch)
            if other:
                refusals.append(f"{name} {new} would be added beside {other}")
        elif matches(name, KERNEL_IMAGES):
            refusals.append(f"a kernel would be added: {name} {new}")
    return refusals


def other_version(name: str, version: str, known: "Collection[str]", branch: str) -> str:
    """The driver in words that a package of ``version`` does not belong to, empty where it does."""
    branches = {item.partition(".")[0] for item in known} or ({branch} if branch else set())
    if not branches or (version.partition(".")[0] in branches and (matches(name, HELPER_NAMES) or not known or version in known)):
        return ""
    return "the driver " + ", ".join(sorted(known)) if known else "a driver of branch " + branch


def driver_versions(installed: "dict[str, str]", proc_version: str) -> "set[str]":
    """The versions of the driver that a host has: of its packages, and of the module that is loaded.

    Args:
        installed: Package -> version.
        proc_version: ``/proc/driver/nvidia/version``, empty where there is none.
    """
    versions = {driver_version(name, version) for name, version in installed.items() if not matches(name, HELPER_NAMES)}
    loaded = re.search(r"\s([0-9]{3}\.[0-9]+(?:\.[0-9]+)*)\s", proc_version)
    return (versions | {loaded.group(1) if loaded else ""}) - {""}


def run(argv: "list[str]") -> "tuple[int, str, str]":
    """A program's exit code, output and messages.

    Raises:
        NoAnswer: it is missing or took too long.
    """
    environment = dict(os.environ, LC_ALL="C", DEBIAN_FRONTEND="noninteractive")
    try:
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env=environment,
            timeout=LIMIT_S,
            check=False,
        )
    except OSError as error:
        raise NoAnswer(f"`{argv[0]}` does not start: {error.strerror}") from None
    except subprocess.TimeoutExpired:
        raise NoAnswer(f"`{argv[0]}` gave no answer within {LIMIT_S} s") from None
    return done.returncode, done.stdout.decode("utf-8", "replace"), done.stderr.decode("utf-8", "replace")


def simulate(manager: str, packages: "list[str]") -> "list[Action]":
    """What ``manager`` would do to install ``packages``.

    Raises:
        NoAnswer: it would not install them.
    """
    if manager == "apt":
        argv = ["apt-get", "--simulate", "--quiet", "--no-install-recommends", "install", *packages]
        code, output, messages = run(argv)
        if code != 0:
            raise NoAnswer(messages.strip() or output.strip())
        return parse_apt(output)
    code, output, messages = run(["dnf", "--assumeno", "--setopt=install_weak_deps=False", "install", *packages])
    actions = parse_dnf(output)
    # Declining what it asked for is its error 1 too.
    if not actions and code != 0:
        raise NoAnswer(messages.strip() or output.strip())
    return actions


def installed_packages(manager: str) -> "dict[str, str]":
    """Installed packages and their versions."""
    if manager == "apt":
        argv = ["dpkg-query", "--show", "--showformat", "${db:Status-Status} ${Package} ${Version}\n"]
    else:
        argv = ["rpm", "--query", "--all", "--queryformat", "installed %{NAME} %{VERSION}-%{RELEASE}\n"]
    found = {}
    for line in run(argv)[1].splitlines():
        words = line.split()
        # What is only unpacked counts too: it will be configured.
        if len(words) == 3 and words[0] not in ("config-files", "not-installed"):
            found[words[1]] = words[2]
    return found


def main(arguments: "list[str]") -> int:
    """The program; returns its exit code."""
    parser = argparse.ArgumentParser(description="Say what installing packages would do. Changes nothing.")
    parser.add_argument("--manager", choices=["apt", "dnf"], required=True)
    parser.add_argument("--driver-branch", default="", help="the branch that a host without a driver shall have")
    parser.add_argument("packages", nargs="+")
    options = parser.parse_args(arguments)
    try:
        known = driver_versions(installed_packages(options.manager), read("/proc/driver/nvidia/version"))
        actions = simulate(options.manager, options.packages)
    except NoAnswer as error:
        print(json.dumps({"problem": str(error)}))
        return 1
    added = [item for item in actions if item["kind"] == "install"]
    drivers = sorted(item["name"] for item in added if driver_version(item["name"], item["new"]))
    print(json.dumps({"actions": actions, "drivers": drivers, "refusals": judge(actions, known, options.driver_branch)}))
    return 0


def read(path: str) -> str:
    """A small file's text, empty where it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
