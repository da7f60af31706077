# Managed by v100ctl. Changes are overwritten.
"""Asks an instance one question and looks whether it computes where it shall. Prints one JSON object; changes nothing.

Runs on the host with its own Python (3.8 or later). What the answer is worth is judged by who called: here is seen what only the
host can see, the unit's log since its start and the memory that it holds of its cards.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import select
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, Iterable

SYSTEMCTL_TIMEOUT_S = 15
#: A driver that has to wake its cards first takes half a minute.
SMI_TIMEOUT_S = 60
#: Engines speak of their cards while they load: a long log is not read to its end.
JOURNAL_LINES = 50000
JOURNAL_TIMEOUT_S = 30
#: What a server has just said may still be on its way to the journal.
LOG_DELAY_S = 5.0
#: `nvidia-smi` counts in whole MiB, and an engine may leave out what it shares.
LEAST_SHARE = 0.95
#: A CUDA context alone takes more than this on any driver; a card at rest less.
CONTEXT_BYTES = 100 * 1024**2
MIB = 1024**2
MAX_ANSWER_BYTES = 4 * 1024**2
CGROUP_ROOTS = ("/sys/fs/cgroup", "/sys/fs/cgroup/systemd", "/sys/fs/cgroup/unified")


def run(argv: list[str], timeout_s: float) -> tuple[int | None, str]:
    """Exit status and output of a command; ``None`` where it is missing or did not end in time."""
    try:
        done = subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=timeout_s, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, str(error)
    return done.returncode, done.stdout.decode("utf-8", "replace")


def unit_properties(unit: str) -> dict[str, str]:
    """What systemd knows of the unit's present start."""
    names = "InvocationID,ControlGroup,MainPID,ExecMainStartTimestampMonotonic"
    _, shown = run(["systemctl", "show", "--property", names, "--", unit], SYSTEMCTL_TIMEOUT_S)
    return dict(line.split("=", 1) for line in shown.splitlines() if "=" in line)


# --- the question -------------------------------------------------------------------------------------------------------------


def ask(request: dict[str, Any]) -> dict[str, Any]:
    """The server's answer as it is: ``status``, ``body`` (decoded JSON or ``None``), ``error`` and ``elapsed_s``."""
    body = {
        "model": request["model"],
        "messages": [{"role": "user", "content": request["prompt"]}],
        "temperature": 0,
        "max_tokens": request["max_tokens"],
    }
    headers = {"Content-Type": "application/json"}
    if request.get("keys_file"):
        # From the file: the request stands in the command line of this very program.
        headers["Authorization"] = "Bearer " + Path(request["keys_file"]).read_text(encoding="ascii").split("\n")[0]
    asked = urllib.request.Request(  # noqa: S310 - the plan's own address of a server on this host
        request["url"], data=json.dumps(body).encode(), headers=headers, method="POST"
    )
    # No proxy: the address is this host's own.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    started_s = time.monotonic()
    try:
        with opener.open(asked, timeout=request["timeout_s"]) as response:
            status, raw = int(response.status), response.read(MAX_ANSWER_BYTES)
    except urllib.error.HTTPError as error:
        status, raw = error.code, error.read(MAX_ANSWER_BYTES)
    except (OSError, ValueError) as error:
        reason = str(getattr(error, "reason", error)) or type(error).__name__
        return {"status": None, "body": None, "error": reason, "elapsed_s": time.monotonic() - started_s}
    elapsed_s = time.monotonic() - started_s
    try:
        decoded = json.loads(raw)
    except ValueError:
        return {"status": status, "body": None, "error": raw[:200].decode("utf-8", "replace"), "elapsed_s": elapsed_s}
    return {"status": status, "body": decoded if isinstance(decoded, dict) else None, "error": "", "elapsed_s": elapsed_s}


# --- the log ------------------------------------------------------------------------------------------------------------------


def journal(arguments: list[str], most_lines: int) -> list[str]:
    """The first lines of the journal, oldest first."""
    argv = ["journalctl", "--no-pager", "--quiet", *arguments]
    try:
        process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    except OSError:
        return []
    output = process.stdout
    if output is None:
        return []
    deadline_s = time.monotonic() + JOURNAL_TIMEOUT_S
    raw, lines_count = bytearray(), 0
    try:
        while lines_count < most_lines:
            ready, _, _ = select.select([output], [], [], max(0.0, deadline_s - time.monotonic()))
            piece = os.read(output.fileno(), 1 << 16) if ready else b""
            if not piece:
                break
            raw += piece
            lines_count += piece.count(b"\n")
    finally:
        process.kill()
        process.wait()
        output.close()
    return raw.decode("utf-8", "replace").splitlines()[:most_lines]


def unit_log(properties: dict[str, str]) -> list[str]:
    """What the unit's processes have logged since its present start."""
    invocation = properties.get("InvocationID", "")
    if not re.fullmatch(r"[0-9a-f]{32}", invocation):
        return []
    return journal(["--output", "cat", f"_SYSTEMD_INVOCATION_ID={invocation}"], JOURNAL_LINES)


def journal_reaches(properties: dict[str, str]) -> bool:
    """Whether the journal goes back as far as the unit's start: a server outlives what is kept of the log."""
    started = properties.get("ExecMainStartTimestampMonotonic", "")
    first = journal(["--output", "json", "--boot"], 1)
    try:
        return int(json.loads(first[0])["__MONOTONIC_TIMESTAMP"]) <= int(started)
    except (IndexError, KeyError, ValueError):
        return False


def judge_log(lines: Iterable[str], must: list[str], must_not: list[str]) -> tuple[list[str], list[str]]:
    """The expressions that no line matches, and the lines that match a forbidden one."""
    wanted = {pattern: re.compile(pattern) for pattern in must}
    forbidden = [re.compile(pattern) for pattern in must_not]
    bad: list[str] = []
    for line in lines:
        for pattern in [pattern for pattern, compiled in wanted.items() if compiled.search(line)]:
            del wanted[pattern]
        if any(pattern.search(line) for pattern in forbidden) and line not in bad:
            bad.append(line)
    return list(wanted), bad


def log_problems(unit: str, proof: dict[str, Any], properties: dict[str, str]) -> tuple[str, list[str]]:
    """``seen``, ``lost`` (the journal keeps it no more) or ``none`` (nothing was to be seen), and what is wrong."""
    must, must_not = list(proof.get("must_log", [])), list(proof.get("must_not_log", []))
    if not must and not must_not:
        return "none", []
    deadline_s = time.monotonic() + LOG_DELAY_S
    while True:
        missing, bad = judge_log(unit_log(properties), must, must_not)
        if bad or not missing:
            break
        if time.monotonic() >= deadline_s:
            break
        time.sleep(0.5)
    if missing and not bad and not journal_reaches(properties):
        return "lost", []
    problems = [f"it has logged `{line.strip()}`" for line in bad[:5]]
    problems += [f"since its start it has logged nothing like `{pattern}`" for pattern in missing]
    if problems:
        problems.append(f"so it does not compute as planned: `journalctl -u {unit}` on the host says more")
    return "seen", problems


# --- the cards ----------------------------------------------------------------------------------------------------------------


def unit_pids(properties: dict[str, str], roots: Iterable[str] = CGROUP_ROOTS) -> set[int]:
    """The processes of the unit: those of its control group, in whichever hierarchy systemd keeps it."""
    main_pid = properties.get("MainPID", "")
    found = {int(main_pid)} if main_pid.isdigit() else set()
    group = properties.get("ControlGroup", "").lstrip("/")
    for root in roots if group else ():
        for file in Path(root, group).glob("**/cgroup.procs"):
            try:
                found |= {int(line) for line in file.read_text(encoding="ascii").split()}
            except (OSError, ValueError):
                continue
    return found - {0}


def rows(output: str) -> list[list[str]]:
    """The lines of a CSV answer of `nvidia-smi`."""
    return [[field.strip() for field in line.split(",")] for line in output.splitlines() if "," in line]


def mebibytes(field: str) -> int | None:
    """A number of MiB as bytes; ``None`` for what `nvidia-smi` does not know."""
    return int(field) * MIB if field.isdigit() else None


def judge_card(
    unit: str, uuid: str, least_bytes: int, own: set[int], processes: list[tuple[int, int | None]], used_bytes: int | None
) -> tuple[dict[str, Any], str]:
    """What the unit holds of one card, as far as can be seen, and what is wrong with that.

    Args:
        unit: The unit.
        uuid: The card.
        least_bytes: What it has to hold; 0 where nobody knows.
        own: The unit's processes.
        processes: What computes on the card: process and the bytes that it holds.
        used_bytes: What of the card is in use, by whomever.
    """
    ours = [held for pid, held in processes if pid in own]
    # In a container a card's processes have the numbers of the host below, or are not told at all: then the card itself is asked.
    foreign = not processes or any(not Path(f"/proc/{pid}").exists() for pid, _ in processes)
    hint = (
        f"it computes elsewhere: `journalctl -u {unit}` on the host says what CUDA found, "
        f"`nvidia-smi -i {uuid}` there what is on the card"
    )
    if ours and None not in ours:
        held_bytes: int | None = sum(held or 0 for held in ours)
        seen = "process"
    elif ours or foreign:
        held_bytes, seen = used_bytes, "card"
    else:
        names = ", ".join(str(pid) for pid, _ in processes)
        return {"held_bytes": 0, "seen": "process"}, f"none of its processes is on card {uuid} (process {names} is): {hint}"
    document = {"held_bytes": held_bytes, "seen": seen}
    needed_bytes = max(int(least_bytes * LEAST_SHARE), CONTEXT_BYTES)
    if held_bytes is None:
        return document, f"`nvidia-smi` does not say what is in use of card {uuid}"
    if held_bytes < needed_bytes:
        whose = "it holds" if seen == "process" else "in use are"
        return document, f"{whose} {held_bytes // MIB} MiB of card {uuid}, and {needed_bytes // MIB} MiB are needed there: {hint}"
    return document, ""


def card_problems(unit: str, proof: dict[str, Any], properties: dict[str, str]) -> tuple[dict[str, Any], list[str]]:
    """What the unit holds of each card that it shall compute on, and what is wrong with that."""
    least = {str(uuid): int(size) for uuid, size in dict(proof.get("least_bytes", {})).items()}
    if not proof.get("on_cards"):
        return {}, []
    if not least:
        return {}, ["the plan does not know the UUID of its card: run it again now that a driver tells them"]
    form = "--format=csv,noheader,nounits"
    status, apps = run(["nvidia-smi", "--query-compute-apps=gpu_uuid,pid,used_gpu_memory", form], SMI_TIMEOUT_S)
    cards_status, cards = run(["nvidia-smi", "--query-gpu=uuid,memory.used", form], SMI_TIMEOUT_S) if status == 0 else (1, "")
    if status != 0 or cards_status != 0:
        said = (cards if status == 0 else apps).strip().splitlines()
        return {}, [f"`nvidia-smi` does not answer: {said[0] if said else f'exit code {status}'}"]
    used = {row[0]: mebibytes(row[1]) for row in rows(cards)}
    own = unit_pids(properties)
    document, problems = {}, []
    for uuid, least_bytes in least.items():
        if uuid not in used:
            problems.append(f"card {uuid} is gone; there are {', '.join(used) or 'none'}")
            continue
        processes = [
            (int(row[1]), mebibytes(row[2])) for row in rows(apps) if len(row) > 2 and row[0] == uuid and row[1].isdigit()
        ]
        document[uuid], problem = judge_card(unit, uuid, least_bytes, own, processes, used[uuid])
        problems += [problem] if problem else []
    return document, problems


# --- the memory ---------------------------------------------------------------------------------------------------------------


def anonymous_bytes(pid: str) -> int | None:
    """What the server's process holds of its own, beside files: what grows when it leaks."""
    try:
        status = Path(f"/proc/{int(pid)}/status").read_text(encoding="utf-8")
    except (OSError, ValueError):
        return None
    found = re.search(r"^RssAnon:\s*([0-9]+) kB$", status, re.M)
    return int(found.group(1)) * 1024 if found else None


# --- all of it ----------------------------------------------------------------------------------------------------------------


def baseline_digest(path: str) -> str:
    """The digest of the plan for which a baseline is recorded; empty where there is none."""
    try:
        return str(json.loads(Path(path).read_text(encoding="utf-8"))["digest"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def prove(request: dict[str, Any]) -> dict[str, Any]:
    """Everything that was seen of one instance."""
    answer = ask(request)
    problems = []
    if answer["status"] != 200:
        how = f"HTTP status {answer['status']}: " if answer["status"] is not None else ""
        said = answer["body"] if answer["body"] is not None else answer["error"]
        problems.append(f"it is healthy, but does not answer a question ({how}{said})")
    unit, proof = request["unit"], request.get("proof") or {}
    properties = unit_properties(unit)
    log, found = log_problems(unit, proof, properties)
    problems += found
    cards, found = card_problems(unit, proof, properties)
    problems += found
    return {
        "unit": unit,
        "answer": answer,
        "log": log,
        "cards": cards,
        "problems": problems,
        "anonymous_bytes": anonymous_bytes(properties.get("MainPID", "")),
        "baseline_digest": baseline_digest(request.get("baseline", "")),
    }


def main(arguments: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--request", required=True, help="what to ask and what to look for, as JSON")
    options = parser.parse_args(arguments)
    json.dump(prove(json.loads(options.request)), sys.stdout)
    sys.stdout.write("\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
