#!/usr/bin/env python3
"""Stops servers that somebody has started by hand where an instance shall be, and records how each is brought back.

Runs where nothing of ours is installed: standard library only, Python 3.8 or later. ``--request`` is a JSON list of what the
plan has decided (``v100ctl_plan.adoptions``). Each is looked at again right before it is touched: what is no longer the process
that was planned for is left alone, and the exit status is 1. A unit is stopped and disabled, its file stays. Any other process
gets SIGTERM, and SIGKILL after ``--limit-s``, and so do those that it has started.

Prints ``{"changed", "stopped": [...], "problems": [...]}``. The record is written before anything is stopped.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import pwd
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Sequence, Tuple

RECORD = Path("/var/lib/v100ctl/state/adopted.json")
SCHEMA = "v100ctl/adopted/1"
#: As in the probe, whose digest is compared.
DIGEST_ROUNDS = 20000
MAX_COMMAND_BYTES = 1 << 17
MAX_ENTRIES = 100
POLL_S = 0.1
#: Sockets of a process that has ended are gone at once; one that is started anew by somebody takes the port within this.
SETTLE_S = 1.0
ENABLED = ("enabled", "enabled-runtime", "linked", "linked-runtime")

#: A process and its start in clock ticks since boot.
Identity = Tuple[int, int]


def start_ticks(pid: int, proc: Path = Path("/proc")) -> int:
    """When a process was started; -1 where there is none, or it has ended and nobody has taken notice yet."""
    try:
        fields = (proc / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return -1
    return -1 if fields[0] in ("Z", "X") else int(fields[19])


def command_digest(pid: int, salt: str, proc: Path = Path("/proc")) -> str:
    """What the probe says of a command line."""
    try:
        content = (proc / str(pid) / "cmdline").read_bytes()[:MAX_COMMAND_BYTES]
    except OSError:
        return ""
    return hashlib.pbkdf2_hmac("sha256", content, salt.encode("ascii"), DIGEST_ROUNDS).hex()


def is_same(wanted: dict[str, Any], proc: Path = Path("/proc")) -> bool:
    """Whether a process is the one that was planned for: its number, its start and its whole command line."""
    if start_ticks(wanted["pid"], proc) != wanted["start_ticks"]:
        return False
    return command_digest(wanted["pid"], wanted["salt"], proc) == str(wanted["command_digest"])


def descendants(pid: int, proc: Path = Path("/proc")) -> list[Identity]:
    """Those that a process has started, and those that they have."""
    children = {}  # type: dict[int, list[int]]
    for folder in proc.iterdir():
        if folder.name.isdigit():
            try:
                parent = int((folder / "stat").read_text(errors="replace").rpartition(")")[2].split()[1])
            except (OSError, ValueError, IndexError):
                continue
            children.setdefault(parent, []).append(int(folder.name))
    found = []  # type: list[Identity]
    waiting = [pid]
    while waiting:
        for child in children.get(waiting.pop(), []):
            found.append((child, start_ticks(child, proc)))
            waiting.append(child)
    return [identity for identity in found if identity[1] >= 0]


def left(processes: Sequence[Identity]) -> list[Identity]:
    """Those that still run."""
    return [(pid, ticks) for pid, ticks in processes if start_ticks(pid) == ticks]


def wait(processes: Sequence[Identity], limit_s: float) -> list[Identity]:
    """Those that still run at the limit."""
    end_s = time.monotonic() + limit_s
    while left(processes) and time.monotonic() < end_s:
        time.sleep(POLL_S)
    return left(processes)


def send(processes: Sequence[Identity], number: int) -> None:
    """Signal those that are still the same."""
    for pid, ticks in processes:
        if start_ticks(pid) == ticks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


def end(wanted: dict[str, Any], limit_s: float) -> str:
    """End a process and those that it has started. Empty, or what went wrong."""
    target = (wanted["pid"], wanted["start_ticks"])
    family = [target, *descendants(wanted["pid"])]
    if not is_same(wanted):
        return f"pid {wanted['pid']} is another process by now: plan again"
    # Who has started the others ends them in its own order.
    send([target], signal.SIGTERM)
    if not wait([target], limit_s):
        send(left(family), signal.SIGTERM)
    remaining = wait(family, 5.0) if not left([target]) else left(family)
    send(remaining, signal.SIGKILL)
    remaining = wait(remaining, 10.0)
    if remaining:
        return "pid {} does not end, not even by SIGKILL: it hangs in the kernel; `dmesg` on the host may say why".format(
            ", ".join(str(pid) for pid, _ in remaining)
        )
    return ""


def control(wanted: dict[str, Any]) -> list[str]:
    """How the manager of a unit is spoken to."""
    user = wanted["unit_user"]
    if not user:
        return ["systemctl"]
    account = pwd.getpwnam(user)
    runtime = f"XDG_RUNTIME_DIR=/run/user/{account.pw_uid}"
    as_user = ["setpriv", "--reuid", user, "--regid", str(account.pw_gid), "--init-groups", "--"]
    return [*as_user, "env", runtime, f"HOME={account.pw_dir}", "systemctl", "--user"]


def unit_state(wanted: dict[str, Any]) -> str:
    """Whether a unit is started at boot, in systemd's words."""
    argv = [*control(wanted), "show", "--property=UnitFileState", "--value", "--", wanted["unit"]]
    return subprocess.run(argv, stdout=subprocess.PIPE, text=True, check=False).stdout.strip()


def stop_unit(wanted: dict[str, Any], state: str) -> str:
    """Stop a unit, now and at the next boot. Empty, or what went wrong."""
    if not is_same(wanted):
        return "pid {} of {} is another process by now: plan again".format(wanted["pid"], wanted["unit"])
    for verb in ("stop", "disable") if state in ENABLED else ("stop",):
        done = subprocess.run(
            [*control(wanted), verb, "--", wanted["unit"]],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if done.returncode:
            return "`systemctl {} {}` failed: {}".format(verb, wanted["unit"], done.stdout.strip()[-500:])
    if wait([(wanted["pid"], wanted["start_ticks"])], 10.0):
        return "{} was stopped, and pid {} still runs".format(wanted["unit"], wanted["pid"])
    return ""


def is_free(listen: str, port: int) -> bool:
    """Whether somebody could listen there now."""
    family = socket.AF_INET6 if ":" in listen else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # Connections that have ended do not keep a port, as they do not keep a server's.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((listen, port))
        except OSError:
            return False
    return True


def read_record(path: Path) -> list[dict[str, Any]]:
    """What was stopped before; nothing where the file is damaged."""
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))["adopted"]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    return entries if isinstance(entries, list) else []


def write_record(entries: Sequence[dict[str, Any]], path: Path) -> None:
    """Replace the record: made aside and renamed in."""
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    descriptor, aside = tempfile.mkstemp(dir=str(path.parent), prefix=".adopted.")
    with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
        # It holds no secrets, like the applied plan, and the probe tells what everybody may read.
        os.fchmod(descriptor, 0o644)
        json.dump({"schema": SCHEMA, "adopted": list(entries)[-MAX_ENTRIES:]}, stream, indent=1)
        stream.write("\n")
        stream.flush()
        os.fsync(stream.fileno())
    Path(aside).replace(path)


def adopt(wanted: dict[str, Any], limit_s: float, record: Path) -> tuple[dict[str, Any], str]:
    """Stop one. Its entry in the record (empty where it had ended before), and what went wrong."""
    if start_ticks(wanted["pid"]) != wanted["start_ticks"]:
        # Where somebody has started it anew, the port is not free.
        return {}, ""
    if not is_same(wanted):
        return {}, "pid {} runs another program by now: plan again".format(wanted["pid"])
    state = unit_state(wanted) if wanted["unit"] else ""
    keys = ("instance", "where", "pid", "command", "user", "unit", "unit_user", "undo")
    entry = {**{key: wanted[key] for key in keys}, "unit_was": state, "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
    before = read_record(record)
    write_record([*before, {**entry, "state": "stopping"}], record)
    problem = stop_unit(wanted, state) if wanted["unit"] else end(wanted, limit_s)
    entry["state"] = "failed" if problem else "stopped"
    write_record([*before, entry], record)
    return entry, problem


def main(arguments: Sequence[str]) -> int:
    """The program."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--request", required=True, help="what to stop, as JSON")
    parser.add_argument("--limit-s", type=float, default=60.0, help="how long one may take to end before it is killed")
    parser.add_argument("--record", type=Path, default=RECORD, help="where it is recorded")
    options = parser.parse_args(arguments)
    stopped = []  # type: list[dict[str, Any]]
    problems = []  # type: list[str]
    request = json.loads(options.request)
    for wanted in request:
        entry, problem = adopt(wanted, options.limit_s, options.record)
        if problem:
            problems.append(problem)
        elif entry:
            stopped.append(entry)
    ports = {(wanted["listen"], wanted["port"]) for wanted in request if wanted["port"]}
    if not problems and ports:
        time.sleep(SETTLE_S)
        problems += [
            f"port {port} on {listen} is taken again: something starts that server anew; `v100ctl plan` names it"
            for listen, port in sorted(ports)
            if not is_free(listen, port)
        ]
    print(json.dumps({"changed": bool(stopped), "stopped": stopped, "problems": problems}))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
