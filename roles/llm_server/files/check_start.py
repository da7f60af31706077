# Managed by v100ctl. Changes are overwritten.
"""Looks, as root, whether an instance can start: its models are there, and its cards are there and have room.

Runs before each start with the host's own Python (3.8 or later). It waits for memory that a stopped server still holds. What is
wrong goes to the journal in one line, with what to do next; the start then fails.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

MIB = 1024**2
#: A driver that has to wake its cards first takes half a minute.
SMI_TIMEOUT_S = 60
POLL_S = 1.0
#: What of a model's file lies on cards at least: the table of its input words stays with the processor.
SHARE_ON_CARDS = 0.75
FIELDS = "index,uuid,pci.bus_id,memory.free"


class CannotStartError(Exception):
    """Why the instance cannot start."""


class Card:
    """One line of ``nvidia-smi --query-gpu``."""

    def __init__(self, fields: list[str]) -> None:
        self.index, self.uuid, bus_id, free = fields
        # `00000000:3B:00.0` there, `0000:3b:00.0` to the kernel.
        self.pci_address = bus_id.lower()[-12:]
        self.free_bytes = int(free) * MIB if free.isdigit() else None


def nvidia_smi(*words: str) -> str:
    """What ``nvidia-smi`` says.

    Raises:
        CannotStartError: it fails or hangs.
    """
    try:
        done = subprocess.run(
            ["nvidia-smi", *words, "--format=csv,noheader,nounits"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=SMI_TIMEOUT_S,
            check=False,
        )
    except FileNotFoundError as error:
        raise CannotStartError("`nvidia-smi` is missing: `v100ctl provision` installs the driver") from error
    except subprocess.TimeoutExpired as error:
        raise CannotStartError(
            f"`nvidia-smi` did not answer within {SMI_TIMEOUT_S} s: the driver hangs, and a reboot of the host helps"
        ) from error
    output = done.stdout.decode("utf-8", "replace")
    if done.returncode != 0:
        said = (output.strip().splitlines() or [f"exit code {done.returncode}"])[0]
        raise CannotStartError(f"`nvidia-smi` fails: {said}; `v100ctl audit` says what mends that")
    return output


def cards() -> list[Card]:
    """All cards that the driver has."""
    lines = [[field.strip() for field in line.split(",")] for line in nvidia_smi("--query-gpu=" + FIELDS).splitlines()]
    return [Card(fields) for fields in lines if len(fields) == len(FIELDS.split(","))]


def find(name: str, present: list[Card]) -> Card:
    """The card of that UUID or PCI address.

    Raises:
        CannotStartError: it is gone.
    """
    for card in present:
        if name in (card.uuid, card.pci_address):
            return card
    there = ", ".join(card.uuid for card in present) or "none"
    raise CannotStartError(
        f"card {name} is gone; there are {there}. It has fallen off the bus or was taken out: reboot the host, "
        "or plan another card with `gpus` and run `v100ctl provision`"
    )


class User:
    """A process that computes on a card."""

    def __init__(self, fields: list[str]) -> None:
        self.card, pid, self.name, self.held = fields
        self.pid = int(pid) if pid.isdigit() else 0

    def __str__(self) -> str:
        return f"`{self.name}` (process {self.pid}) holds {self.held} MiB"

    def is_left_over(self, unit: str) -> bool:
        """Whether it is of an earlier start: still in the unit's control group, or ended and not yet cleared away."""
        try:
            status = Path(f"/proc/{self.pid}/status").read_text(encoding="utf-8", errors="replace")
            group = Path(f"/proc/{self.pid}/cgroup").read_text(encoding="utf-8", errors="replace")
        except OSError:
            # In a container these are the numbers of the host below: nothing can be said of them.
            return False
        return f"/{unit}" in group or "State:\tZ" in status


def users() -> list[User]:
    """Who computes on the cards."""
    lines = nvidia_smi("--query-compute-apps=gpu_uuid,pid,process_name,used_gpu_memory").splitlines()
    fields = [[field.strip() for field in line.split(",")] for line in lines]
    return [User(found) for found in fields if len(found) == 4]


def check_cards(wanted: list[str], unit: str, needed_bytes: int, wait_s: float) -> list[Card]:
    """The cards, once nothing of an earlier start is left there and they have so much memory free together.

    Raises:
        CannotStartError: one is gone, or that is not so after ``wait_s``.
    """
    deadline_s = time.monotonic() + wait_s
    while True:
        present = cards()
        found = [find(name, present) for name in wanted]
        on_them = [user for user in users() if user.card in {card.uuid for card in found}]
        left = [user for user in on_them if user.is_left_over(unit)]
        free = [card.free_bytes for card in found if card.free_bytes is not None]
        full = len(free) == len(found) and sum(free) < needed_bytes
        if not left and not full:
            return found
        if time.monotonic() >= deadline_s:
            names = ", ".join(map(str, left or on_them)) or "no process shows there that holds the rest"
            if left:
                raise CannotStartError(
                    f"after {wait_s:g} s an earlier start still holds its card: {names}. Kill it, or try `v100ctl recover`"
                )
            raise CannotStartError(
                f"{sum(free) // MIB} MiB are free on {', '.join(wanted)}, and the model alone takes {needed_bytes // MIB} MiB: "
                f"{names}. Stop that, or plan another card or a smaller model"
            )
        time.sleep(POLL_S)


def check_model(path: str) -> int:
    """The bytes of a model's weights: of all parts of a split file, of all weights in a folder.

    Raises:
        CannotStartError: it is missing.
    """
    model = Path(path)
    if not model.exists():
        raise CannotStartError(f"the model {path} is missing: mount its disk, or `v100ctl provision` brings it")
    parts = re.fullmatch(r"(.*-)00001(-of-[0-9]{5}\.gguf)", model.name)
    if model.is_dir():
        files = [*model.glob("*.safetensors"), *model.glob("*.bin")]
    elif parts:
        files = [file for file in model.parent.iterdir() if file.name.startswith(parts[1]) and file.name.endswith(parts[2])]
    else:
        files = [model]
    return sum(file.stat().st_size for file in files)


def write_indices(path: Path, found: list[Card]) -> None:
    """Writes the numbers that the cards have now, for an engine that knows no other names."""
    path.parent.mkdir(mode=0o755, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=str(path.parent), prefix=".")
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write("CUDA_VISIBLE_DEVICES=" + ",".join(card.index for card in found) + "\n")
        os.fchmod(descriptor, 0o644)
    Path(temporary).replace(path)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", action="append", default=[], help="a file or folder that has to be there")
    parser.add_argument("--card", action="append", default=[], help="a card by UUID or PCI address")
    parser.add_argument("--unit", default="", help="the unit that starts")
    parser.add_argument("--weights-on-cards", action="store_true", help="the models' weights have to fit there")
    parser.add_argument("--wait-s", type=float, default=60.0, help="how long to wait for memory that is not free yet")
    parser.add_argument("--indices", type=Path, help="write CUDA_VISIBLE_DEVICES with the cards' numbers to this file")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Exit code 0: it can start."""
    options = parse(arguments)
    try:
        model_bytes = sum(check_model(path) for path in options.model)
        if options.card:
            needed_bytes = int(model_bytes * SHARE_ON_CARDS) if options.weights_on_cards else 0
            found = check_cards(options.card, options.unit, needed_bytes, options.wait_s)
            if options.indices is not None:
                write_indices(options.indices, found)
    except CannotStartError as error:
        sys.stderr.write(f"cannot start: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
