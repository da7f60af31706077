# Managed by v100ctl. Changes are overwritten.
"""Restarts one LLM server at rest, and never leaves it down. Runs on the host as root with its own Python (3.8 or later).

Running requests end first, new ones wait in the gateway. Where requests still run at the limit, nothing is restarted that night.
After the restart the server has to be healthy and to answer a question with words before requests are let in. One that does not
come up twice is started from the unit that was proved last; that, and every other end, is written down and told to the journal.

Exit status 0: restarted, or not, for a reason that is told. 1: an older unit serves, or nothing does.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, Callable, Dict, NamedTuple

SETTINGS = Path("/etc/v100ctl/upkeep.json")
STATE_DIR = Path("/var/lib/v100ctl/state/upkeep")
HISTORY_DIR = Path("/var/lib/v100ctl/state/history")
BASELINES_DIR = Path("/var/lib/v100ctl/state/baselines")
UNITS_DIR = Path("/etc/systemd/system")
LOCKS_DIR = Path("/run/v100ctl")
PROGRAMS_DIR = Path("/opt/v100ctl/llm_server")
GATEWAY_PROGRAM = Path("/opt/v100ctl/gateway/gateway_control.py")
CONNECTIONS = ("/proc/net/tcp", "/proc/net/tcp6")
#: The state of a connection that is open, as the kernel writes it there.
ESTABLISHED = "01"

PYTHON = ("/usr/bin/python3", "-I", "-S", "-B")
#: The watchdog holds the lock for one look, or while it restarts.
LOCK_TIMEOUT_S = 900.0
SYSTEMCTL_TIMEOUT_S = 30.0
#: Stopping takes 90 s at most, and the checks before a start 240 s.
RESTART_TIMEOUT_S = 600.0
PROOF_TIMEOUT_S = 300
POLL_S = 2.0
#: The gateway looks every second.
OPEN_LIMIT_S = 60
#: Requests that come in while nobody holds them back: it has to be quiet in so many looks in a row.
QUIET_LOOKS = 3
PROMPT = "Reply with one short sentence: what is a GPU?"
MAX_TOKENS = 24
#: So often an unproved unit is tried.
ATTEMPTS = 2
DIGEST_LINE = re.compile(r'^Environment="?V100CTL_INSTANCE_DIGEST=([0-9a-f]+)"?$', re.MULTILINE)
EXIT_DRAIN_LIMIT = 3

JsonObject = Dict[str, Any]


class Outcome(NamedTuple):
    """How a night ended: ``restarted``, ``skipped``, ``fell-back``, ``failed`` or ``idle`` (there was nothing to restart)."""

    what: str
    reason: str = ""

    @property
    def priority(self) -> int:
        """Of its line in the journal."""
        return {"restarted": 6, "idle": 6, "skipped": 4}.get(self.what, 3)


def run(argv: list[str], timeout_s: float) -> tuple[int | None, str]:
    """Exit status and output of a command; ``None`` where it is missing or did not end in time."""
    try:
        done = subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=timeout_s, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, str(error)
    return done.returncode, done.stdout.decode("utf-8", "replace").strip()


def say(priority: int, message: str) -> None:
    """One line for the journal."""
    sys.stdout.write(f"<{priority}>{message}\n")
    sys.stdout.flush()


def write_whole(path: Path, content: bytes) -> None:
    """Writes a file whole or not at all."""
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    descriptor, aside = tempfile.mkstemp(dir=str(path.parent), prefix=".")
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(descriptor)
        os.fchmod(descriptor, 0o644)
    Path(aside).replace(path)


def first_key(path: str) -> str:
    """The key that helpers on the host use; empty where the server asks for none."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    return next((line.strip() for line in lines if line.strip()), "")


# --- requests that run --------------------------------------------------------------------------------------------------------


def open_connections(tables: list[str], port: int) -> int:
    """How many connections to a port of this host are open, from ``/proc/net/tcp`` and ``/proc/net/tcp6``."""
    wanted = f"{port:04X}"
    rows = (line.split() for table in tables for line in table.splitlines()[1:])
    return sum(1 for row in rows if len(row) > 3 and row[1].rpartition(":")[2] == wanted and row[3] == ESTABLISHED)


def requests_running(instance: JsonObject) -> int:
    """How many requests run, as the engine says; where it cannot be asked, how many connections to it are open."""
    progress = instance.get("progress")
    if progress:
        key = first_key(str(instance["keys_file"]))
        asked = urllib.request.Request(  # noqa: S310 - the plan's own address on this host
            progress["url"], headers={"Authorization": f"Bearer {key}"} if key else {}
        )
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(asked, timeout=60) as response:
                return running_of(progress, response.read())
        except (OSError, ValueError):
            pass
    port = int(str(instance["health_url"]).split("://", 1)[-1].split("/", 1)[0].rpartition(":")[2])
    tables = [Path(path).read_text(encoding="ascii") for path in CONNECTIONS if Path(path).exists()]
    return open_connections(tables, port)


def running_of(progress: JsonObject, text: bytes) -> int:
    """The requests in an engine's own words.

    Raises:
        ValueError: It says something else.
    """
    if progress["kind"] == "slots":
        slots = json.loads(text)
        if not isinstance(slots, list):
            raise ValueError("no list of slots")
        return sum(1 for slot in slots if isinstance(slot, dict) and slot.get("is_processing"))
    total, seen = 0.0, False
    for line in text.decode("utf-8", "replace").splitlines():
        match = re.match(r"([a-zA-Z_:][\w:]*)(?:\{.*\})?\s+(\S+)", line)
        if match and match.group(1) in progress["busy"]:
            total, seen = total + float(match.group(2)), True
    if not seen:
        raise ValueError("none of its gauges is there")
    return int(total)


def gateway(*words: str, timeout_s: float) -> tuple[int | None, str]:
    """One verb of the gateway's program; status 4 where there is no gateway."""
    if not GATEWAY_PROGRAM.exists():
        return 4, ""
    return run([*PYTHON, str(GATEWAY_PROGRAM), *words], timeout_s)


# --- the night ----------------------------------------------------------------------------------------------------------------


class Night:
    """One restart of one instance.

    Args:
        name: The instance.
        instance: What the settings say of it.
        clock: Seconds that only go forward.
        sleep: Lets some of them pass.
    """

    def __init__(
        self,
        name: str,
        instance: JsonObject,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.name, self.instance, self.unit = name, instance, str(instance["unit"])
        self.nightly: JsonObject = instance["nightly"]
        self._clock, self._sleep = clock, sleep
        self._proved = STATE_DIR / f"{name}.service"
        self._unit_file = UNITS_DIR / self.unit
        #: Whether a gateway holds requests back.
        self._held = False

    def run(self) -> Outcome:
        """All of it."""
        found = self.properties()
        state = found.get("ActiveState", "")
        if not found or found.get("LoadState") != "loaded":
            return Outcome("failed", f"systemd does not have {self.unit} loaded ({found.get('LoadState', 'no answer')})")
        if state in ("inactive", "deactivating"):
            return Outcome("idle", "somebody has stopped it")
        if found.get("Job", "0") not in ("", "0"):
            return Outcome("skipped", "it is being started or stopped already")
        if found.get("NeedDaemonReload") == "yes":
            return Outcome("skipped", "its unit has changed and systemd has not read it yet: `v100ctl provision` ends that")
        self._keep_proved()
        # One that does not run has no requests to wait for.
        if state == "active":
            running = self.drain()
            if running:
                self.let_in()
                return Outcome("skipped", f"after {self.nightly['limit_s']} s {running} of its requests still ran")
            if self.properties().get("ActiveState") in ("inactive", "deactivating"):
                self.let_in()
                return Outcome("idle", "somebody has stopped it")
        return self._restart()

    def _restart(self) -> Outcome:
        problem = ""
        for attempt in range(1, ATTEMPTS + 1):
            problem = self.attempt()
            if not problem:
                self._keep_proved(always=True)
                self.let_in()
                return Outcome("restarted")
            say(3, f"{self.unit}: start {attempt} of {ATTEMPTS}: {problem}")
        before = self._last_good()
        if before is None:
            self._let_in_unless_healthy()
            return Outcome("failed", f"it did not come up twice ({problem}), and no other unit of it was ever proved here")
        refused = self._unit_file.read_bytes()
        write_whole(STATE_DIR / f"{self.name}.refused.service", refused)
        write_whole(self._unit_file, before)
        run(["systemctl", "daemon-reload"], SYSTEMCTL_TIMEOUT_S * 4)
        again = self.attempt()
        if again:
            self._let_in_unless_healthy()
            return Outcome("failed", f"it did not come up twice ({problem}), nor did the unit that was proved last ({again})")
        self.let_in()
        return Outcome(
            "fell-back",
            f"it did not come up twice ({problem}); the unit that was proved last serves. The other one is "
            f"{STATE_DIR}/{self.name}.refused.service; `v100ctl provision` tries it again",
        )

    # Requests

    def drain(self) -> int:
        """Waits until no request runs; how many still do at the limit."""
        limit_s = float(self.nightly["limit_s"])
        status, output = gateway("drain", self.name, "--limit-s", str(limit_s), timeout_s=limit_s + 60)
        if status in (0, EXIT_DRAIN_LIMIT):
            self._held = True
            return 0 if status == 0 else int(json.loads(output)["running"])
        if status not in (4, 5):
            say(4, f"{self.unit}: the gateway cannot hold its requests back: {output}")
        deadline_s, quiet = self._clock() + limit_s, 0
        while True:
            running = requests_running(self.instance)
            quiet = 0 if running else quiet + 1
            if quiet >= QUIET_LOOKS:
                return 0
            if self._clock() >= deadline_s:
                return max(running, 1)
            self._sleep(POLL_S)

    def let_in(self) -> None:
        """Lets requests in again, where they were held back."""
        if self._held:
            status, output = gateway("open", self.name, "--limit-s", str(OPEN_LIMIT_S), timeout_s=OPEN_LIMIT_S + 60)
            if status != 0:
                say(3, f"{self.unit}: the gateway does not see it healthy: {output}")
            self._held = False

    def _let_in_unless_healthy(self) -> None:
        # A server that is down gets no request from the gateway, and gets them as soon as it is up. One that answers wrongly
        # stays outside.
        if self._ready()[0] != "done":
            self.let_in()

    # The unit

    def properties(self) -> dict[str, str]:
        """What systemd knows of the unit; empty where it does not answer."""
        names = "LoadState,ActiveState,SubState,NeedDaemonReload,Job"
        status, shown = run(["systemctl", "show", "--property", names, "--", self.unit], SYSTEMCTL_TIMEOUT_S)
        return dict(line.split("=", 1) for line in shown.splitlines() if "=" in line) if status == 0 else {}

    def attempt(self) -> str:
        """One start, until it is proved; what is wrong, else empty."""
        run(["systemctl", "reset-failed", self.unit], SYSTEMCTL_TIMEOUT_S)
        status, output = run(["systemctl", "restart", "--", self.unit], RESTART_TIMEOUT_S)
        if status != 0:
            return output or f"`systemctl restart` ended with status {status}"
        deadline_s = self._clock() + float(self.nightly["start_timeout_s"])
        while True:
            state, message = self._ready()
            if state == "done":
                return self._prove()
            if state == "failed":
                return message
            if self._clock() >= deadline_s:
                return f"after {self.nightly['start_timeout_s']} s {message}"
            self._sleep(POLL_S)

    def _ready(self) -> tuple[str, str]:
        argv = [*PYTHON, str(PROGRAMS_DIR / "readiness.py"), "--unit", self.unit, "--url", str(self.instance["health_url"])]
        status, output = run(argv, SYSTEMCTL_TIMEOUT_S * 2)
        try:
            document = json.loads(output)
            return str(document["state"]), str(document["message"])
        except (ValueError, KeyError, TypeError):
            return "failed", f"readiness.py ended with status {status}: {output[-200:]}"

    def _prove(self) -> str:
        request = {
            "unit": self.unit,
            "url": self.instance["completion_url"],
            "model": self.instance["model"],
            "keys_file": self.instance["keys_file"],
            "prompt": PROMPT,
            "max_tokens": MAX_TOKENS,
            "timeout_s": PROOF_TIMEOUT_S,
            "proof": self.nightly["proof"],
        }
        argv = [*PYTHON, str(PROGRAMS_DIR / "prove.py"), "--request", json.dumps(request)]
        status, output = run(argv, PROOF_TIMEOUT_S + 300)
        try:
            document = json.loads(output)
            problems = [str(problem) for problem in document["problems"]]
            body = document["answer"]["body"]
        except (ValueError, KeyError, TypeError):
            return f"prove.py ended with status {status}: {output[-200:]}"
        if not problems:
            wrong = judge_answer(body)
            problems = [f"it answered, but {wrong}"] if wrong else []
        return "; ".join(problems)

    # What was proved

    def _keep_proved(self, *, always: bool = False) -> None:
        """Keeps the unit, where it is known that it was proved: by this night, or by the run that recorded its speed."""
        try:
            content = self._unit_file.read_bytes()
            if not always:
                recorded = json.loads((BASELINES_DIR / f"{self.name}.json").read_text(encoding="utf-8"))["digest"]
                match = DIGEST_LINE.search(content.decode("utf-8"))
                if match is None or match.group(1) != recorded:
                    return
            if not self._proved.exists() or self._proved.read_bytes() != content:
                write_whole(self._proved, content)
        except (OSError, ValueError, KeyError, TypeError):
            return

    def _last_good(self) -> bytes | None:
        """The unit that was proved last; ``None`` where that is the one that does not come up, or there is none."""
        try:
            present = self._unit_file.read_bytes()
        except OSError:
            return None
        candidates = [self._proved.read_bytes()] if self._proved.exists() else []
        candidates += units_of_history(str(self._unit_file))
        return next((content for content in candidates if content != present), None)


def units_of_history(path: str) -> list[bytes]:
    """What a unit's file was in the states that were proved on this host, the newest first."""
    found = []
    for file in sorted(HISTORY_DIR.glob("*.json"), reverse=True) if HISTORY_DIR.is_dir() else ():
        try:
            files = json.loads(file.read_text(encoding="utf-8"))["files"]
            found += [item["content"].encode() for item in files if item["path"] == path]
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue
    return found


def judge_answer(body: Any) -> str:
    """What is wrong with a completion; empty where it has words. Broken arithmetic gives nothing, or one character."""
    try:
        message = body["choices"][0]["message"]
        text = str(message.get("content") or message.get("reasoning_content") or "")
    except (KeyError, IndexError, TypeError, AttributeError):
        return f"with no completion: {str(body)[:200]}"
    visible = "".join(text.split())
    if not visible:
        return "the answer is empty"
    if len(visible) >= 8 and len(set(visible)) == 1:
        return f"the answer is {visible[0]!r} repeated {len(visible)} times"
    return ""


def take_lock(name: str, timeout_s: float) -> int | None:
    """The lock of one server, for as long as this process lives; ``None`` where somebody else keeps it."""
    LOCKS_DIR.mkdir(mode=0o755, parents=True, exist_ok=True)
    descriptor = os.open(str(LOCKS_DIR / f"{name}.lock"), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    deadline_s = time.monotonic() + timeout_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            if time.monotonic() >= deadline_s:
                os.close(descriptor)
                return None
            time.sleep(0.5)
        else:
            return descriptor


def record(name: str, unit: str, outcome: Outcome, began_s: float) -> None:
    """Writes down how it ended, and when it last ended well."""
    path = STATE_DIR / f"{name}.nightly.json"
    try:
        before = json.loads(path.read_text(encoding="utf-8"))
        restarted_at_s = before.get("restarted_at_s") if isinstance(before, dict) else None
    except (OSError, ValueError):
        restarted_at_s = None
    ended_s = time.time()
    document = {
        "schema": "v100ctl/nightly/1",
        "instance": name,
        "unit": unit,
        "outcome": outcome.what,
        "reason": outcome.reason,
        "began_at_s": round(began_s),
        "ended_at_s": round(ended_s),
        "restarted_at_s": round(ended_s) if outcome.what in ("restarted", "fell-back") else restarted_at_s,
    }
    try:
        write_whole(path, (json.dumps(document, indent=2, sort_keys=True) + "\n").encode())
    except OSError as error:
        say(4, f"{unit}: {path} cannot be written: {error}")


def _stopped(*_: Any) -> None:
    raise InterruptedError("it was stopped")


def main(arguments: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("instance", help="the instance's name")
    parser.add_argument("--after", action="store_true", help="let requests in again where a run was killed (systemd calls it)")
    options = parser.parse_args(arguments)
    name = options.instance
    try:
        instance = json.loads(SETTINGS.read_text(encoding="utf-8"))["instances"][name]
    except (OSError, ValueError, KeyError, TypeError) as error:
        say(3, f"{name}: {SETTINGS} does not have it ({type(error).__name__})")
        return 1
    if not instance.get("nightly"):
        say(6, f"{name}: no nightly restart is wanted")
        return 0
    if options.after:
        if os.environ.get("SERVICE_RESULT") not in ("success", "exit-code"):
            gateway("open", name, "--limit-s", "1", timeout_s=60)
        return 0
    signal.signal(signal.SIGTERM, _stopped)
    began_s = time.time()
    lock = take_lock(name, LOCK_TIMEOUT_S)
    if lock is None:
        outcome = Outcome("skipped", "the watchdog or another restart has it in hand")
    else:
        night = Night(name, instance)
        try:
            outcome = night.run()
        except Exception as error:
            outcome = Outcome("failed", f"{type(error).__name__}: {error}")
            night.let_in()
    record(name, str(instance["unit"]), outcome, began_s)
    say(outcome.priority, f"{instance['unit']}: {outcome.what}{f': {outcome.reason}' if outcome.reason else ''}")
    return 1 if outcome.what in ("fell-back", "failed") else 0


if __name__ == "__main__":
    sys.exit(main())
