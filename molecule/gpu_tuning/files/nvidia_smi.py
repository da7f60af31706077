#!/usr/bin/env python3
"""Stands in for `nvidia-smi` on a host with one card: remembers settings and calls in a file."""

import json
import os
import re
import sys
import time
from pathlib import Path

STATE = Path(os.environ.get("STAND_IN_STATE", "/var/lib/stand-in-card.json"))
BUS_ID = "00000000:06:00.0"


def answer(state, field):
    """One field of `--query-gpu`."""
    answers = {
        "index": "0",
        "uuid": "GPU-00000000-0000-0000-0000-000000000001",
        "pci.bus_id": BUS_ID,
        "name": "Tesla V100-SXM2-16GB",
        "persistence_mode": state["persistence"],
        "power.limit": state["power"],
        "clocks.applications.memory": state["clocks"][0],
        "clocks.applications.graphics": state["clocks"][1],
        "ecc.mode.current": state["ecc"][0],
        "ecc.mode.pending": state["ecc"][1],
        "compute_mode": state["mode"],
    }
    return answers.get(field, "[N/A]")


def set_one(state, option, value):
    """One setting; returns what the card says against it."""
    if option == "-pl" and not 150 <= float(value) <= 300:
        return (
            f"Provided power limit {float(value):.2f} W is not a valid power limit which should be between 150.00 W and 300.00 W"
        )
    if state.get("deaf"):
        return ""
    if option == "-pm":
        state["persistence"] = "Enabled" if value == "1" else "Disabled"
    elif option == "-pl":
        state["power"] = f"{float(value):.2f}"
    elif option == "-ac":
        state["clocks"] = value.split(",")
    elif option == "-e":
        state["ecc"][1] = "Enabled" if value == "1" else "Disabled"
    elif option == "-c":
        state["mode"] = {"0": "Default", "2": "Prohibited", "3": "Exclusive_Process"}[value]
    return ""


def main(arguments):
    """The program; returns its exit code."""
    state = json.loads(STATE.read_text(encoding="utf-8"))
    if state.get("hangs"):
        time.sleep(600)
    state.setdefault("calls", []).append(" ".join(arguments))
    if state.get("fails"):
        code, text = state["fails"]
        print(text)
        return code
    problem = ""
    query = re.match(r"--query-gpu=(.*)", arguments[0]) if arguments else None
    if query:
        print(", ".join(answer(state, field) for field in query.group(1).split(",")))
    elif len(arguments) == 4 and arguments[0] == "-i":
        problem = set_one(state, arguments[2], arguments[3])
    STATE.write_text(json.dumps(state), encoding="utf-8")
    if problem:
        print(problem)
    return 2 if problem else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
