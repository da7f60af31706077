# Managed by v100ctl. Changes are overwritten.
"""Keeps what was applied to this host and proved, and goes back to it without anybody's help.

Runs as root with the host's own Python (3.8 or later), standard library only. Each verb prints one JSON object.

``record``
    Files the plan that was just applied (``applied.json``) into the history, where it differs from the newest state there.
    ``{"changed", "id"}``
``list``
    ``{"current", "previous", "states": [...]}``, the newest first. ``current`` is the state that the host is in, where it is one
    of them; ``previous`` the one that `restore` would take.
``restore [--to ID] [--drain-limit-s N] [--check]``
    Writes that state's files aside and renames them in, restarts the servers that do not run it, waits for them and has each
    answer a question. Without ``--to``: the newest state, or the one before where the host is in the newest.
    ``{"id", "changed", "restarted", "removed", "problem", "instances": {NAME: {"text", "tokens", "tokens_per_second"}}}``

Exit status 5: a state cannot be gone back to, since its release or model is no longer there, and nothing was changed. 3: requests
still ran at the limit, and nothing was changed. 1: it was restored and does not serve. 4: another one runs.
Killed at any moment, the same call completes it: what is left to do follows from files and processes, not from what was done.
"""

from __future__ import annotations

import argparse
import calendar
import contextlib
import fcntl
import grp
import hashlib
import json
import os
import pwd
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Dict, Iterator, NoReturn, Sequence

SCHEMA = "v100ctl/state/1"
STATE = Path("/var/lib/v100ctl/state")
HISTORY = STATE / "history"
APPLIED = STATE / "applied.json"
HOST_JSON = Path("/etc/v100ctl/host.json")
UNITS = Path("/etc/systemd/system")
INSTANCES = Path("/etc/v100ctl/instances")
PROGRAMS = Path("/opt/v100ctl/llm_server")
GATEWAY_UNIT = "v100ctl-gateway.service"
GATEWAY_PROGRAM = Path("/opt/v100ctl/gateway/gateway_control.py")
MANAGED = "# Managed by v100ctl. Changes are overwritten.\n"
DIGEST = "V100CTL_INSTANCE_DIGEST"

KEPT = 10
NAME = re.compile(r"[0-9]{8}T[0-9]{6}Z")
COMMAND_TIMEOUT_S = 300.0
POLL_S = 1.0

EXIT_FAILED = 1
EXIT_BUSY = 3
EXIT_LOCKED = 4
EXIT_IMPOSSIBLE = 5

JsonObject = Dict[str, Any]


class GoBackError(Exception):
    """Why it was not done, and the exit status that says so."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


# --- files --------------------------------------------------------------------------------------------------------------------


def write(path: Path, content: str, mode: int, owner: str = "root", group: str = "root") -> None:
    """Writes a file aside and renames it in: whoever reads it sees the old or the new one whole."""
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    descriptor, aside = tempfile.mkstemp(dir=str(path.parent), prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8", newline="") as file:
            file.write(content)
            file.flush()
            os.fchmod(file.fileno(), mode)
            if os.geteuid() == 0:
                os.fchown(file.fileno(), pwd.getpwnam(owner).pw_uid, grp.getgrnam(group).gr_gid)
            os.fsync(file.fileno())
        Path(aside).replace(path)
    except BaseException:
        Path(aside).unlink()
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Has the names in a folder survive a loss of power."""
    descriptor = os.open(str(folder), os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read(path: Path) -> str | None:
    """A text file, ``None`` where there is none."""
    try:
        return path.read_bytes().decode("utf-8", "replace")
    except OSError:
        return None


def remove(path: Path) -> None:
    """Removes a file that may be gone already."""
    with contextlib.suppress(FileNotFoundError):
        path.unlink()


# --- the history --------------------------------------------------------------------------------------------------------------


def states() -> list[JsonObject]:
    """All states that can be read, the newest first."""
    found = []
    for path in sorted(HISTORY.glob("*.json"), reverse=True) if HISTORY.is_dir() else ():
        text = read(path) if NAME.fullmatch(path.stem) else None
        try:
            document = json.loads(text or "")
        except ValueError:
            continue
        if isinstance(document, dict) and document.get("schema") == SCHEMA and document.get("id") == path.stem:
            found.append(document)
    return found


def state_digest(document: JsonObject) -> str:
    """One value for everything that makes a state what it is, but not for when it was reached."""
    kept = {key: value for key, value in document.items() if key not in ("id", "state", "restored_from")}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:16]


def next_id(known: Sequence[JsonObject], now_s: float) -> str:
    """A time that is later than every known one, also where the clock was set back."""
    newest_s = 0
    if known:
        newest_s = calendar.timegm(time.strptime(str(known[0]["id"]), "%Y%m%dT%H%M%SZ"))
    return time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(max(int(now_s), newest_s + 1)))


def file_state(document: JsonObject, restored_from: str | None, now_s: float) -> str:
    """Adds a state to the history, as the newest; returns its id. Only the last ones are kept."""
    HISTORY.mkdir(mode=0o700, parents=True, exist_ok=True)
    known = states()
    identifier = next_id(known, now_s)
    document = dict(document, id=identifier, state=state_digest(document), restored_from=restored_from)
    write(HISTORY / f"{identifier}.json", json.dumps(document, indent=1, sort_keys=True) + "\n", 0o600)
    for old in sorted((path for path in HISTORY.glob("*.json") if NAME.fullmatch(path.stem)), reverse=True)[KEPT:]:
        remove(old)
    return identifier


def record(now_s: float) -> JsonObject:
    """See the verb ``record`` above."""
    text = read(APPLIED)
    if text is None:
        raise GoBackError(f"{APPLIED} is missing", EXIT_FAILED)
    applied = json.loads(text)
    known = states()
    if known and known[0]["state"] == state_digest(applied):
        return {"changed": False, "id": known[0]["id"]}
    return {"changed": True, "id": file_state(applied, None, now_s)}


def is_there(state: JsonObject) -> bool:
    """Whether the host's files are those of a state."""
    wanted = {file["path"]: file["content"] for file in state["files"]}
    wanted[str(HOST_JSON)] = state["host_json"]
    return all(read(Path(path)) == content for path, content in wanted.items())


def before(state: JsonObject, known: Sequence[JsonObject]) -> JsonObject | None:
    """The state before one. Of one that was gone back to: that before the original, or two would be changed to and fro."""
    origin = str(state.get("restored_from") or state["id"])
    earlier = [item for item in known if str(item["id"]) < origin and item["state"] != state["state"]]
    return earlier[0] if earlier else None


def default_target(known: Sequence[JsonObject]) -> JsonObject | None:
    """The last good state that the host is not in."""
    if not known:
        return None
    return before(known[0], known) if is_there(known[0]) else known[0]


def listing() -> JsonObject:
    """See the verb ``list`` above."""
    known = states()
    target = default_target(known)
    return {
        "current": known[0]["id"] if known and is_there(known[0]) else None,
        "previous": target["id"] if target else None,
        "states": [
            {
                "id": state["id"],
                "state": state["state"],
                "restored_from": state.get("restored_from"),
                "releases": state["releases"],
                "models": state["models"],
                "instances": {
                    name: {
                        "digest": item["digest"],
                        "unit": item["unit"],
                        "url": item["proof_request"]["url"],
                        "model": item["proof_request"]["model"],
                        "keys_file": item["proof_request"].get("keys_file", ""),
                    }
                    for name, item in state["instances"].items()
                },
                "missing": missing(state),
            }
            for state in known
        ],
    }


def missing(state: JsonObject) -> list[str]:
    """What a state rests on and the host has no longer."""
    gone = [item["path"] for item in state["releases"] if not Path(item["path"], "release.json").is_file()]
    return gone + [item["path"] for item in state["models"] if not Path(item["path"]).exists()]


# --- the servers --------------------------------------------------------------------------------------------------------------


def run(*argv: str, timeout_s: float = COMMAND_TIMEOUT_S) -> tuple[int, str]:
    """Exit status and output of a program."""
    try:
        done = subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=timeout_s, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return 127, str(error)
    return done.returncode, done.stdout.decode("utf-8", "replace").strip()


def systemctl(*words: str) -> None:
    """One call of systemctl.

    Raises:
        GoBackError: it fails.
    """
    status, said = run("systemctl", *words)
    if status != 0:
        raise GoBackError(f"`systemctl {' '.join(words)}` failed: {said}", EXIT_FAILED)


def runs(unit: str, digest: str) -> bool:
    """Whether the unit's process was started by the plan of that digest."""
    _, shown = run("systemctl", "show", "--property", "MainPID,ActiveState", "--", unit)
    properties = dict(line.split("=", 1) for line in shown.splitlines() if "=" in line)
    if properties.get("ActiveState") != "active":
        return False
    try:
        environment = Path("/proc", properties.get("MainPID", "0"), "environ").read_bytes().split(b"\0")
    except OSError:
        return False
    return f"{DIGEST}={digest}".encode() in environment


def program(name: str, *words: str) -> list[str]:
    """The command line of one of our own programs on the host."""
    return [sys.executable or "/usr/bin/python3", "-I", "-S", "-B", name, *words]


def healthy(instance: JsonObject) -> JsonObject:
    """What `readiness.py` says of an instance."""
    _, said = run(*program(str(PROGRAMS / "readiness.py"), "--unit", instance["unit"], "--url", instance["health_url"]))
    try:
        document = json.loads(said)
    except ValueError:
        return {"state": "failed", "message": said or "readiness.py said nothing"}
    return document if isinstance(document, dict) else {"state": "failed", "message": said}


def gateway(*words: str) -> tuple[int, str]:
    """One call of the gateway's program. 0 where there is no gateway."""
    if not GATEWAY_PROGRAM.is_file():
        return 0, "{}"
    status, said = run(*program(str(GATEWAY_PROGRAM), *words), timeout_s=24 * 3600.0)
    # The gateway does not run, or does not know the instance: nothing goes through it.
    return (0, "{}") if status in (4, 5) else (status, said)


def answer_problem(body: Any) -> tuple[str, JsonObject]:
    """What is wrong with an answer of ``/v1/chat/completions`` (empty: nothing), and what it says."""
    body = body if isinstance(body, dict) else {}
    choices = body.get("choices")
    first = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}
    message = first.get("message")
    message = message if isinstance(message, dict) else {}
    text = str(message.get("content") or message.get("reasoning_content") or "")
    usage, timings = body.get("usage"), body.get("timings")
    tokens = usage.get("completion_tokens") if isinstance(usage, dict) else None
    speed = timings.get("predicted_per_second") if isinstance(timings, dict) else None
    seen = {
        "text": text,
        "tokens": tokens if isinstance(tokens, int) else 0,
        "tokens_per_second": round(float(speed), 2) if isinstance(speed, (int, float)) else None,
    }
    visible = "".join(text.split())
    if "error" in body:
        error = body["error"]
        return f"the server answered with an error: {error.get('message') if isinstance(error, dict) else error}", seen
    if not visible:
        return "the answer is empty", seen
    if len(visible) >= 8 and len(set(visible)) == 1:
        return f"the answer is {visible[0]!r} repeated {len(visible)} times", seen
    return "", seen


def prove(instance: JsonObject) -> tuple[str, JsonObject]:
    """Waits until an instance is healthy and has it answer: what is wrong (empty: nothing), and its answer."""
    deadline_s = time.monotonic() + float(instance["start_timeout_s"])
    while True:
        seen = healthy(instance)
        if seen.get("state") == "done":
            break
        if seen.get("state") == "failed" or time.monotonic() >= deadline_s:
            return f"{instance['unit']}: {seen.get('message')}", {}
        time.sleep(POLL_S)
    request = json.dumps(instance["proof_request"])
    limit_s = float(instance["proof_request"].get("timeout_s", 300)) + COMMAND_TIMEOUT_S
    _, said = run(*program(str(PROGRAMS / "prove.py"), "--request", request), timeout_s=limit_s)
    try:
        document = json.loads(said)
        problems = list(document["problems"])
        body = document["answer"]["body"]
    except (ValueError, KeyError, TypeError):
        return f"{instance['unit']}: {said or 'prove.py said nothing'}", {}
    wrong, answer = answer_problem(body)
    if not problems and wrong:
        problems = [f"it answered, but {wrong}"]
    return (f"{instance['unit']}: {'; '.join(problems)}" if problems else ""), answer


# --- going back ---------------------------------------------------------------------------------------------------------------


def unwanted_instances(state: JsonObject) -> Iterator[str]:
    """Instances whose unit of ours is on the host and not in the state."""
    for path in sorted(UNITS.glob("v100-*.service")):
        name = path.name[len("v100-") : -len(".service")]
        if name not in state["instances"] and (read(path) or "").startswith(MANAGED):
            yield name


def differing(state: JsonObject) -> list[JsonObject]:
    """The files of a state that the host does not have so."""
    return [file for file in state["files"] if read(Path(file["path"])) != file["content"]]


def restore(to: str | None, drain_limit_s: float, check: bool, now_s: float) -> tuple[JsonObject, int]:
    """See the verb ``restore`` above; the document and the exit status."""
    known = states()
    target = next((state for state in known if state["id"] == to), None) if to else default_target(known)
    if target is None:
        raise GoBackError(
            f"there is no state {to}" if to else "there is no earlier state in the history of this host", EXIT_IMPOSSIBLE
        )
    gone = missing(target)
    if gone:
        raise GoBackError(f"the state {target['id']} cannot be restored: {', '.join(gone)} is no longer there", EXIT_IMPOSSIBLE)
    files, unwanted = differing(target), list(unwanted_instances(target))
    stale = [name for name, item in sorted(target["instances"].items()) if not runs(item["unit"], item["digest"])]
    document = {
        "id": target["id"],
        "changed": bool(files or unwanted or stale or not is_there(target)),
        "restarted": stale,
        "removed": unwanted,
        "files": [file["path"] for file in files],
        "problem": "",
        "instances": {},
    }
    if check:
        return document, 0
    drain([name for name in stale if runs_at_all(target["instances"][name]["unit"])], target, drain_limit_s)
    make_so(target, files, unwanted, stale)
    problems = []
    for name, instance in sorted(target["instances"].items()):
        problem, answer = prove(instance)
        document["instances"][name] = answer
        if problem:
            problems.append(problem)
        elif target.get("gateway"):
            gateway("open", name, "--limit-s", "60")
    if problems:
        return dict(document, problem="; ".join(problems)), EXIT_FAILED
    # Last: as long as it is not there, the host is seen as one on which something is unfinished.
    if read(HOST_JSON) != target["host_json"]:
        write(HOST_JSON, target["host_json"], 0o644)
    if known[0]["id"] != target["id"] and known[0]["state"] != target["state"]:
        document["id"] = file_state(target, str(target.get("restored_from") or target["id"]), now_s)
    return document, 0


def runs_at_all(unit: str) -> bool:
    """Whether a unit is active."""
    return run("systemctl", "is-active", "--quiet", "--", unit)[0] == 0


def drain(names: Sequence[str], target: JsonObject, limit_s: float) -> None:
    """Lets the running requests of servers end that are going to be restarted.

    Raises:
        GoBackError: they still run at the limit; all are let in again. One that is not well is not waited for.
    """
    taken = []  # type: list[str]
    for name in names:
        instance = target["instances"][name]
        if healthy(instance).get("state") != "done":
            continue
        taken.append(name)
        status, said = gateway("drain", name, "--limit-s", str(limit_s))
        if status == 3:
            for other in taken:
                gateway("open", other, "--limit-s", "60")
            raise GoBackError(f"requests to {name} still ran after {limit_s:g} s ({said}), so nothing was changed", EXIT_BUSY)


def make_so(target: JsonObject, files: Sequence[JsonObject], unwanted: Sequence[str], stale: Sequence[str]) -> None:
    """Files, units and processes as in the state."""
    for name in unwanted:
        run("systemctl", "disable", "--now", f"v100-{name}.service")
        for path in (INSTANCES / f"{name}.env", INSTANCES / f"{name}.keys", STATE / f"baselines/{name}.json"):
            remove(path)
        remove(UNITS / f"v100-{name}.service")
    had_gateway, has_gateway = (UNITS / GATEWAY_UNIT).exists(), bool(target.get("gateway"))
    if had_gateway and not has_gateway:
        # The engines take their public ports back.
        run("systemctl", "disable", "--now", GATEWAY_UNIT)
        remove(UNITS / GATEWAY_UNIT)
    for name in stale:
        # All of them first: they may have changed ports among each other.
        run("systemctl", "stop", target["instances"][name]["unit"])
    for file in files:
        write(Path(file["path"]), file["content"], int(file["mode"], 8), file["owner"], file["group"])
    systemctl("daemon-reload")
    for name, instance in sorted(target["instances"].items()):
        systemctl("enable", "--quiet", instance["unit"])
        if name in stale:
            run("systemctl", "reset-failed", instance["unit"])
            systemctl("restart", instance["unit"])
    if has_gateway:
        systemctl("enable", "--quiet", GATEWAY_UNIT)
        changed = {Path(file["path"]) for file in files} & {Path(path) for path in target["gateway"]["files"]}
        systemctl("reload-or-restart" if changed else "start", GATEWAY_UNIT)


# --- command line -------------------------------------------------------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        sys.stderr.write(f"error: {message}\n")
        raise SystemExit(64)


def say(document: JsonObject) -> None:
    """The answer on standard output."""
    sys.stdout.write(json.dumps(document, sort_keys=True) + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = _Parser(description="Keeps what was applied to this host and proved, and goes back to it")
    verbs = parser.add_subparsers(dest="verb", required=True)
    verbs.add_parser("record")
    verbs.add_parser("list")
    sub = verbs.add_parser("restore")
    sub.add_argument("--to", help="the id of a state; by default the last good one that the host is not in")
    sub.add_argument("--drain-limit-s", type=float, default=600.0)
    sub.add_argument("--check", action="store_true", help="change nothing; say what would be done")
    given = parser.parse_args(arguments)
    if given.verb == "list":
        say(listing())
        return 0
    STATE.mkdir(mode=0o755, parents=True, exist_ok=True)
    descriptor = os.open(str(STATE), os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise GoBackError("another one goes back on this host right now", EXIT_LOCKED) from None
        if given.verb == "record":
            say(record(time.time()))
            return 0
        document, status = restore(given.to, given.drain_limit_s, given.check, time.time())
        say(document)
        return status
    except GoBackError as error:
        say({"id": None, "changed": False, "problem": str(error)})
        return error.status
    finally:
        os.close(descriptor)


if __name__ == "__main__":
    sys.exit(main())
