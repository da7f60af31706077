#!/usr/bin/env python3
"""Bring cards and processors to what `/etc/v100ctl/gpu_tuning.json` says: at boot, when a card returns, and when a role asks.

Standard library only, Python >= 3.8. Sets only what differs, and looks again afterwards. Each call of ``nvidia-smi`` has a time
limit: a driver that hangs is reported, not waited for. Prints one JSON document:

* ``cards``: the cards that ``nvidia-smi`` lists, by PCI address; none is no error, as on a host whose driver comes with a reboot.
* ``changed``: what was set (with ``--check``: what would be). ``pending``: what takes effect with the next reboot, cards whose
  driver is not loaded among it.
* ``problems``: what could not be set or seen, and why; exit code 1 with any, else 0.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Iterator

    Document = dict[str, Any]

SETTINGS = "/etc/v100ctl/gpu_tuning.json"
CPU_DEVICES = "/sys/devices/system/cpu"
#: A first call on a card that nothing keeps awake takes over half a minute.
LIMIT_S = 90
FIELDS = (
    "pci.bus_id",
    "persistence_mode",
    "power.limit",
    "clocks.applications.memory",
    "clocks.applications.graphics",
    "ecc.mode.current",
    "ecc.mode.pending",
    "compute_mode",
)
#: The numbers that `nvidia-smi -c` takes.
COMPUTE_MODES = {"default": 0, "prohibited": 2, "exclusive_process": 3}


#: nvidia-smi(1), "Return value": no device was found, the driver is not loaded, it is of another version than its library.
UNREADY_CODES = (6, 9, 18)


class Problem(Exception):
    """Something could not be done; the text says what and why."""


class Unready(Problem):
    """The driver serves no card, as before the reboot that loads it."""


def pci_address(text: str) -> str:
    """An address as the kernel spells it: ``00000000:06:00.0`` -> ``0000:06:00.0``."""
    domain, _, rest = text.strip().lower().partition(":")
    return f"{domain[-4:].rjust(4, '0')}:{rest}"


def run(program: str, arguments: "list[str]") -> str:
    """What ``nvidia-smi`` printed.

    Raises:
        Unready: the driver serves no card.
        Problem: it failed otherwise, or gave no answer in time.
    """
    command = " ".join([Path(program).name, *arguments])
    try:
        done = subprocess.run(
            [program, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=LIMIT_S,
            check=False,
        )
    except OSError as error:
        raise Problem(f"`{command}` does not start: {error.strerror}") from None
    except subprocess.TimeoutExpired:
        raise Problem(f"`{command}` gave no answer within {LIMIT_S} s: the driver hangs") from None
    output = done.stdout.decode("utf-8", "replace")
    if done.returncode in UNREADY_CODES:
        raise Unready(" ".join(output.split())[:500])
    if done.returncode != 0:
        raise Problem(f"`{command}` failed: {' '.join(output.split())[:500]}")
    return output


def parse_cards(output: str) -> "dict[str, dict[str, str]]":
    """The rows of ``nvidia-smi --query-gpu``, by PCI address."""
    cards = {}
    for line in output.splitlines():
        values = [value.strip() for value in line.split(",")]
        if len(values) == len(FIELDS) and re.fullmatch(r"[0-9a-fA-F]{4,8}:[0-9a-fA-F:.]+", values[0]):
            cards[pci_address(values[0])] = dict(zip(FIELDS, values))
    return cards


def number(text: str) -> "float | None":
    """A figure of ``nvidia-smi``, ``None`` for `[N/A]` and the like."""
    return float(text) if re.fullmatch(r"[0-9]+(?:\.[0-9]+)?", text) else None


def wanted(settings: "Document", address: str, now: "dict[str, str]") -> "Iterator[tuple[str, list[str], bool]]":
    """What differs on a card: in words, the arguments that set it, and whether it waits for a reboot."""
    card = settings.get("cards", {}).get(address, {})
    if settings.get("persistence") and now["persistence_mode"] == "Disabled":
        yield "persistence mode on", ["-pm", "1"], False
    limit = card.get("power_limit_w")
    if limit is not None and number(now["power.limit"]) != float(limit):
        yield f"power limit {limit} W", ["-pl", str(limit)], False
    clocks = card.get("application_clocks_mhz")
    if clocks is not None:
        current = [number(now["clocks.applications.memory"]), number(now["clocks.applications.graphics"])]
        if current != [float(clock) for clock in clocks]:
            memory, graphics = clocks
            yield f"application clocks {memory},{graphics} MHz", ["-ac", f"{memory},{graphics}"], False
    mode = card.get("compute_mode")
    if mode is not None and now["compute_mode"].lower() != mode:
        yield f"compute mode {mode}", ["-c", str(COMPUTE_MODES[mode])], False
    ecc = card.get("ecc")
    if ecc is not None and now["ecc.mode.pending"].lower() != ecc:
        yield f"ECC {ecc}", ["-e", str(int(ecc == "enabled"))], True


def tune_cards(settings: "Document", program: str, check: bool, report: "dict[str, list[str]]") -> None:
    """Cards, through ``nvidia-smi``.

    Raises:
        Problem: it does not answer.
    """
    query = ["--query-gpu=" + ",".join(FIELDS), "--format=csv,noheader,nounits"]
    cards = parse_cards(run(program, query))
    report["cards"] += sorted(cards)
    missing = sorted(set(settings.get("cards", {})) - set(cards)) if cards else []
    report["problems"] += [f"{address}: the card does not answer" for address in missing]
    tried = []
    for address in sorted(set(settings.get("cards", {})) & set(cards)):
        for words, arguments, _ in wanted(settings, address, cards[address]):
            tried.append(f"{address}: {words}")
            try:
                if not check:
                    run(program, ["-i", address, *arguments])
            except Problem as error:
                report["problems"].append(f"{address}: {error}")
    report["changed"] += tried
    after = parse_cards(run(program, query)) if tried and not check else cards
    for address in sorted(set(settings.get("cards", {})) & set(after)):
        if not check:
            left = [words for words, _, _ in wanted(settings, address, after[address])]
            report["problems"] += [f"{address}: {words} was set and is not so" for words in left if not report["problems"]]
        ecc = settings["cards"][address].get("ecc")
        if ecc is not None and after[address]["ecc.mode.current"].lower() != ecc:
            report["pending"].append(f"{address}: ECC {ecc}")


def tune_processors(governor: str, check: bool, report: "dict[str, list[str]]", devices: str = CPU_DEVICES) -> None:
    """The frequency governor of every processor that has one."""
    for file in sorted(Path(devices).glob("cpu[0-9]*/cpufreq/scaling_governor")):
        try:
            if file.read_text(encoding="ascii").strip() == governor:
                continue
            if not check:
                file.write_text(governor + "\n", encoding="ascii")
            report["changed"].append(f"{file.parent.parent.name}: governor {governor}")
        except (OSError, ValueError) as error:
            report["problems"].append(f"{file.parent.parent.name}: governor {governor}: {error}")


def apply(settings: "Document", check: bool, devices: str = CPU_DEVICES) -> "dict[str, list[str]]":
    """Bring the host to ``settings``; the report as it is printed."""
    report = {"cards": [], "changed": [], "pending": [], "problems": []}  # type: dict[str, list[str]]
    if settings.get("cpu_governor"):
        tune_processors(settings["cpu_governor"], check, report, devices)
    program = shutil.which("nvidia-smi")
    # Without the program there is no driver, and nothing to tune.
    if program is not None:
        try:
            tune_cards(settings, program, check, report)
        except Unready as error:
            report["pending"].append(f"cards: {error}")
        except Problem as error:
            report["problems"].append(str(error))
    return report


def main(arguments: "list[str]") -> int:
    """The program; returns its exit code."""
    parser = argparse.ArgumentParser(description="Bring cards and processors to their settings.")
    parser.add_argument("--settings", default=SETTINGS, help="the file that says them")
    parser.add_argument("--json", help="the settings themselves, instead of a file")
    parser.add_argument("--check", action="store_true", help="say what would be set, and set nothing")
    options = parser.parse_args(arguments)
    try:
        settings = json.loads(options.json if options.json is not None else Path(options.settings).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        print(json.dumps({"cards": [], "changed": [], "pending": [], "problems": [f"{options.settings}: {error}"]}))
        return 1
    report = apply(settings, options.check)
    print(json.dumps(report))
    return 1 if report["problems"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
