#!/usr/bin/env python3
"""Whole-process timings, side by side in one run, with hyperfine (Debian's package `hyperfine`).

    tests/bench/bench.py help             v100ctl --help beside a bare Python start
    tests/bench/bench.py noop             a provision that changes nothing beside ansible-playbook of the same playbook, same host
    tests/bench/bench.py warm-try         a second `try` (the host is up)
    tests/bench/bench.py cold-try         the first `try` beside the bare compile of the same release; takes over 20 minutes a run
    tests/bench/bench.py plan-fleet       planning 1,000 hosts offline beside ansible-inventory of the same inventory
    tests/bench/bench.py model-header     reading the header of a 20 GB GGUF file: from disk, over HTTP, by the `gguf` package

Medians and ratios are what to quote: machines are noisy. Run from a checkout, as root, after `./v100ctl try` for `noop`.
"""

from __future__ import annotations

import argparse
import atexit
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LAUNCHER = str(ROOT / "v100ctl")
VENV_BIN = ROOT / ".venv" / "bin"


@dataclass(frozen=True)
class Command:
    """One command to time. ``prepare`` runs before each timed run and is not counted."""

    name: str
    argv: Sequence[str]
    prepare: Sequence[str] = ()


def practice_inventory() -> str:
    """The inventory that `try` wrote."""
    code = "from v100ctl.practice import inventory_path; print(inventory_path())"
    path = Path(subprocess.run([VENV_BIN / "python", "-c", code], check=True, capture_output=True, text=True).stdout.strip())
    if not path.is_file():
        sys.exit("there is no practice host: run `./v100ctl try` first")
    return str(path)


def help_commands() -> list[Command]:
    """Start-up: a bare Python, the CLI without and with the launcher before it."""
    python = str(VENV_BIN / "python")
    return [
        Command("python -c pass", [python, "-P", "-c", "pass"]),
        Command("python -m v100ctl --help", [python, "-P", "-m", "v100ctl", "--help"]),
        Command("./v100ctl --help", [LAUNCHER, "--help"]),
    ]


def noop_commands() -> list[Command]:
    """A host that is as planned: v100ctl asks and proves it, Ansible runs every task."""
    inventory = practice_inventory()
    return [
        Command(
            "ansible-playbook provision.yml", [str(VENV_BIN / "ansible-playbook"), "-i", inventory, "playbooks/provision.yml"]
        ),
        Command("v100ctl provision", [LAUNCHER, "provision", "-i", inventory]),
    ]


def warm_try_commands() -> list[Command]:
    """A second `try`: the host is up and as planned."""
    return [Command("v100ctl try, again", [LAUNCHER, "try"])]


def cold_try_commands() -> list[Command]:
    """The first `try` on a machine that has Docker but no image, source, release or model, beside the compile alone."""
    compile_argv = [str(VENV_BIN / "python"), "tests/bench/bare_compile.py"]
    purge = [LAUNCHER, "try", "--purge"]
    return [
        Command("bare compile", compile_argv, prepare=[*compile_argv, "--prepare"]),
        Command("v100ctl try, cold", [LAUNCHER, "try"], prepare=purge),
    ]


def model_header_commands() -> list[Command]:
    """A bare Python, then one that reads the header of a (sparse) 20 GB file."""
    python, script = str(VENV_BIN / "python"), str(ROOT / "tests" / "bench" / "model_header.py")
    folder = tempfile.mkdtemp(prefix="v100ctl-bench-")
    atexit.register(shutil.rmtree, folder)
    path = f"{folder}/large.gguf"
    subprocess.run([python, script, "--make", path], check=True)
    print(subprocess.run([python, script, "--http", path], check=True, capture_output=True, text=True).stdout, end="")
    return [
        Command("python -c pass", [python, "-P", "-c", "pass"]),
        Command("header from disk", [python, script, path]),
        Command("header over HTTP", [python, script, "--http", path]),
        Command("header by gguf.GGUFReader", [python, script, "--gguf", path]),
    ]


def plan_fleet_commands() -> list[Command]:
    """Planning 1,000 hosts offline, beside Ansible's own reading of the same inventory."""
    sys.path.insert(0, str(ROOT / "tests/bench"))
    from plan_fleet import make

    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    inventory, facts = make(folder, 1000)
    plan = [LAUNCHER, "plan", "-i", str(inventory), "--offline", "--facts", str(facts)]
    # A plan that would change something ends with 2.
    changes = "; [ $? -eq 2 ]"
    return [
        Command("ansible-inventory --list", [str(VENV_BIN / "ansible-inventory"), "-i", str(inventory), "--list"]),
        Command("plan --json, 1,000 hosts", ["sh", "-c", shlex.join([*plan, "--json"]) + changes]),
        Command("plan, 1,000 hosts", ["sh", "-c", shlex.join(plan) + changes]),
    ]


BENCHMARKS: dict[str, Callable[[], list[Command]]] = {
    "help": help_commands,
    "noop": noop_commands,
    "warm-try": warm_try_commands,
    "cold-try": cold_try_commands,
    "model-header": model_header_commands,
    "plan-fleet": plan_fleet_commands,
}


def measure(commands: Sequence[Command], runs: int, warmup: int) -> list[dict[str, float]]:
    """hyperfine's figures for each command, in seconds."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        argv = ["hyperfine", "--shell=none", f"--runs={runs}", f"--warmup={warmup}", "--style=basic", f"--export-json={report}"]
        # Output to a pipe would be buffered by nobody's terminal: what a script sees.
        argv += ["--output=pipe"]
        if any(command.prepare for command in commands):
            for command in commands:
                argv += ["--prepare", shlex.join(command.prepare or ["true"])]
        for command in commands:
            argv += ["--command-name", command.name, shlex.join(command.argv)]
        subprocess.run(argv, cwd=ROOT, check=True, stdout=sys.stderr)
        results: list[dict[str, float]] = json.loads(report.read_text(encoding="utf-8"))["results"]
    return results


def main() -> int:
    """Run one benchmark and print its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("benchmark", choices=BENCHMARKS)
    parser.add_argument("--runs", type=int, default=5, help="counted runs of each command (default: 5)")
    parser.add_argument(
        "--warmup", type=int, default=None, help="runs before those, not counted (default: 1, and 0 for cold-try)"
    )
    arguments = parser.parse_args()
    if shutil.which("hyperfine") is None:
        sys.exit("hyperfine is missing: `apt-get install hyperfine`")
    warmup = arguments.warmup if arguments.warmup is not None else 0 if arguments.benchmark == "cold-try" else 1
    results = measure(BENCHMARKS[arguments.benchmark](), arguments.runs, warmup)
    base = results[0]["median"]
    print(f"{'command':<34} {'median':>9} {'min':>9} {'max':>9} {'user':>9} {'system':>9}  first / this")
    for result in results:
        row = "".join(f" {result[key]:>8.3f}s" for key in ("median", "min", "max", "user", "system"))
        print(f"{result['command']:<34}{row}  {base / result['median']:.2f}")
    print(f"{arguments.runs} runs each, {os.cpu_count()} processors, load {os.getloadavg()[0]:.1f} at the end")
    return 0


if __name__ == "__main__":
    sys.exit(main())
