# Managed by v100ctl. Changes are overwritten.
"""Looks whether LLM servers get on with their requests, and restarts one that does not.

Runs on the host as root with its own Python (3.8 or later), one thread a server. What counts is what the engine says that it has
computed: a server whose HTTP threads still answer may compute nothing any more. It is wedged when it has requests, or does not
answer at all, and nothing of that has changed for the limit. A server that loads, that reads a long prompt or has a full queue
gets on: none of them is touched. Nor is one that somebody has stopped, or that is being restarted at night.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, NamedTuple

SETTINGS = Path("/etc/v100ctl/upkeep.json")
STATE_DIR = Path("/var/lib/v100ctl/state/upkeep")
#: Held by whoever restarts a server of that name: this program, or the nightly restart.
LOCKS_DIR = Path("/run/v100ctl")
UNIT_FILE = Path("/etc/systemd/system/v100ctl-watchdog.service")
DIGEST_VARIABLE = "V100CTL_WATCHDOG_DIGEST"

SYSTEMCTL_TIMEOUT_S = 30
#: Stopping takes 90 s at most, and the checks before a start 240 s.
RESTART_TIMEOUT_S = 600
#: A server that has not answered yet since its start loads its model, however long that takes on a slow disk.
LOADING_LIMIT_S = 3600.0
#: So often in a row nothing has to have changed: one late look on a busy host is no evidence.
LEAST_LOOKS = 3
LONGEST_POLL_S = 30.0
#: A server at rest that only counts what it has computed is asked for one token so often.
ASK_EVERY_S = 300.0
MAX_ANSWER_BYTES = 16 * 1024**2

JsonObject = Dict[str, Any]


class Seen(NamedTuple):
    """One look at a server.

    ``state``: ``busy`` (it has requests), ``idle``, ``loading``, ``silent`` (no answer) or ``blind`` (it answers, but does not
    say what it computes). ``mark`` is what changes whenever something was computed; ``words`` say it for people.
    """

    state: str
    mark: str = ""
    words: str = ""


class Judge:
    """Decides from looks at one server whether it is wedged. Times are seconds of any clock that only goes forward."""

    def __init__(self, limit_s: float, loading_limit_s: float = LOADING_LIMIT_S) -> None:
        self.limit_s = limit_s
        self.loading_limit_s = max(loading_limit_s, limit_s)
        self._start = ""
        self._ready = False
        self._mark = ""
        self._since_s = 0.0
        self._looks = 0

    def reset(self) -> None:
        """Forget everything: somebody else has the server in hand."""
        self._start = ""

    def look(self, now_s: float, start: str, started_s: float, seen: Seen) -> str:
        """Take one look into account.

        Args:
            now_s: When it was.
            start: What names this start of the unit.
            started_s: When that was.
            seen: What was seen.

        Returns:
            Why the server is wedged; empty where it is not.
        """
        if start != self._start:
            self._start, self._ready, self._mark = start, False, ""
            self._since_s, self._looks = now_s, 0
        if seen.state in ("idle", "blind") or (seen.state == "busy" and seen.mark != self._mark):
            self._ready, self._mark = True, seen.mark
            self._since_s, self._looks = now_s, 0
            return ""
        self._looks += 1
        stalled_s = now_s - self._since_s
        loads = not self._ready and now_s - started_s < self.loading_limit_s
        if stalled_s < self.limit_s or loads or self._looks < LEAST_LOOKS:
            return ""
        what = "it has requests, and has computed nothing" if seen.state == "busy" else "it has not answered"
        return f"{what} for {stalled_s:.0f} s ({seen.words})"


# --- looking ------------------------------------------------------------------------------------------------------------------


def first_key(path: str) -> str:
    """The key that helpers on the host use; empty where the server asks for none."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    return next((line.strip() for line in lines if line.strip()), "")


def request(url: str, key: str, timeout_s: float, body: JsonObject | None = None) -> bytes:
    """What a server of this host answers with status 200.

    Raises:
        OSError: It does not, or not in time.
    """
    headers = {"Content-Type": "application/json"} if body is not None else {}
    if key:
        headers["Authorization"] = f"Bearer {key}"
    data = json.dumps(body).encode() if body is not None else None
    asked = urllib.request.Request(url, data=data, headers=headers)  # noqa: S310 - the plan's own address on this host
    # No proxy: the address is this host's own.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(asked, timeout=timeout_s) as response:
        return bytes(response.read(MAX_ANSWER_BYTES))


def read_slots(text: bytes) -> Seen:
    """llama.cpp's ``/slots``.

    Raises:
        ValueError: It is something else.
    """
    slots = json.loads(text)
    if not isinstance(slots, list) or not all(isinstance(slot, dict) for slot in slots):
        raise ValueError("no list of slots")
    # What a request asked for never changes, and is long.
    known = [{key: value for key, value in slot.items() if key != "params"} for slot in slots]
    mark = hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()
    busy = sum(1 for slot in slots if slot.get("is_processing"))
    return Seen("busy" if busy else "idle", mark, f"{busy} of {len(slots)} slots have requests")


def read_metrics(text: bytes, busy_names: Iterable[str], counter_names: Iterable[str]) -> Seen:
    """Prometheus' text: the sums of some gauges and counters over their labels. ``blind`` where none of them is there."""
    sums: dict[str, float] = {}
    for line in text.decode("utf-8", "replace").splitlines():
        match = re.match(r"([a-zA-Z_:][\w:]*)(?:\{.*\})?\s+(\S+)", line)
        if match:
            try:
                sums[match.group(1)] = sums.get(match.group(1), 0.0) + float(match.group(2))
            except ValueError:
                continue
    counters = {name: sums[name] for name in counter_names if name in sums}
    if not counters:
        return Seen("blind", words="none of its counters is there")
    requests = sum(sums.get(name, 0.0) for name in busy_names)
    mark = json.dumps(counters, sort_keys=True)
    return Seen("busy" if requests else "idle", mark, f"{requests:.0f} requests")


def look(progress: JsonObject, key: str, timeout_s: float) -> Seen:
    """One look at a server."""
    try:
        text = request(progress["url"], key, timeout_s)
        if progress["kind"] == "slots":
            return read_slots(text)
        return read_metrics(text, progress["busy"], progress["counters"])
    except urllib.error.HTTPError as error:
        if error.code == 503:
            return Seen("loading", words="HTTP status 503")
        return Seen("blind", words=f"{progress['url']} answers with HTTP status {error.code}")
    except OSError as error:
        return Seen("silent", words=str(getattr(error, "reason", error)) or type(error).__name__)
    except ValueError as error:
        return Seen("blind", words=f"{progress['url']}: {error}")


class Question:
    """One token, asked for in a thread of its own: the answer may never come."""

    def __init__(self, settings: JsonObject, key: str, timeout_s: float) -> None:
        #: ``None`` while it is open; then whether the engine has answered, or ``unasked`` where it cannot be asked like that.
        self.outcome: str | None = None
        self._settings, self._key, self._timeout_s = settings, key, timeout_s
        threading.Thread(target=self._ask, daemon=True).start()

    def _ask(self) -> None:
        message = {"role": "user", "content": "Hi"}
        body = {"model": self._settings["model"], "messages": [message], "max_tokens": 1}
        try:
            request(self._settings["completion_url"], self._key, self._timeout_s, body)
            self.outcome = "answered"
        except urllib.error.HTTPError as error:
            # A model without a chat template, say: the engine itself was not asked.
            self.outcome = "unasked" if error.code < 500 else "failed"
        except OSError:
            self.outcome = "failed"


# --- systemd ------------------------------------------------------------------------------------------------------------------


def unit_properties(unit: str) -> dict[str, str]:
    """What systemd knows of a unit; empty where it does not answer."""
    names = "ActiveState,SubState,InvocationID,ActiveEnterTimestampMonotonic,NeedDaemonReload,Job"
    try:
        shown = subprocess.run(
            ["systemctl", "show", "--property", names, "--", unit],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=SYSTEMCTL_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return {}
    return dict(line.split("=", 1) for line in shown.stdout.decode("utf-8", "replace").splitlines() if "=" in line)


def running_start(unit: str) -> tuple[str, float]:
    """What names the present start of a unit that runs and that nobody is about to stop, and when it was; else empty."""
    found = unit_properties(unit)
    settled = (found.get("ActiveState"), found.get("SubState")) == ("active", "running") and found.get("Job", "0") in ("", "0")
    started = found.get("ActiveEnterTimestampMonotonic", "")
    return found.get("InvocationID", "") if settled else "", int(started) / 1e6 if started.isdigit() else 0.0


def restart(unit: str) -> str:
    """Restart a unit unless somebody has stopped it or is about to; what went wrong, else empty."""
    # `try-restart` leaves one alone that does not run, and the job mode one for which another job waits.
    argv = ["systemctl", "--job-mode=fail", "try-restart", "--", unit]
    try:
        done = subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=RESTART_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return "" if done.returncode == 0 else done.stdout.decode("utf-8", "replace").strip()


class Lock:
    """One server in one hand: a lock file that goes with the process that holds it."""

    def __init__(self, name: str) -> None:
        LOCKS_DIR.mkdir(mode=0o755, parents=True, exist_ok=True)
        self._descriptor = os.open(str(LOCKS_DIR / f"{name}.lock"), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)

    def take(self) -> bool:
        """Whether it is ours now."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return True

    def release(self) -> None:
        """Give it back."""
        os.close(self._descriptor)


# --- what it does -------------------------------------------------------------------------------------------------------------


def say(priority: int, message: str) -> None:
    """One line for the journal."""
    sys.stdout.write(f"<{priority}>{message}\n")
    sys.stdout.flush()


def write_json(path: Path, document: JsonObject) -> None:
    """Writes a file whole or not at all."""
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    descriptor, aside = tempfile.mkstemp(dir=str(path.parent), prefix=".")
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        json.dump(document, file, indent=2, sort_keys=True)
        file.write("\n")
        os.fchmod(descriptor, 0o644)
    Path(aside).replace(path)


def record(name: str, unit: str, reason: str, problem: str) -> None:
    """Writes down that a server was restarted, and how often that was."""
    path = STATE_DIR / f"{name}.watchdog.json"
    try:
        count = int(json.loads(path.read_text(encoding="utf-8"))["restarts_count"])
    except (OSError, ValueError, KeyError, TypeError):
        count = 0
    document = {
        "schema": "v100ctl/watchdog/1",
        "instance": name,
        "unit": unit,
        "restarts_count": count + 1,
        "restarted_at_s": round(time.time()),
        "reason": reason,
        "problem": problem,
    }
    try:
        write_json(path, document)
    except OSError as error:
        say(4, f"{unit}: {path} cannot be written: {error}")


class Watch:
    """Watches one server until it is told to end."""

    def __init__(self, name: str, settings: JsonObject, ended: threading.Event) -> None:
        self.settings = settings
        self._name, self._ended = name, ended
        self._judge = Judge(float(settings["watchdog"]["limit_s"]))
        self._poll_s = min(LONGEST_POLL_S, self._judge.limit_s / 6)
        self._question: Question | None = None
        self._asked_s = float("-inf")
        self._in_vain = False
        self._blind_said = ""

    def run(self) -> None:
        """Look, judge, restart, again and again."""
        while not self._ended.wait(self._poll_s):
            lock = Lock(self._name)
            try:
                if lock.take():
                    self.once(time.monotonic)
                else:
                    self._judge.reset()
            finally:
                lock.release()

    def once(self, clock: Callable[[], float]) -> None:
        """One round."""
        unit = str(self.settings["unit"])
        start, started_s = running_start(unit)
        if not start:
            self._judge.reset()
            return
        seen = self._look(clock)
        if seen.state == "blind" and seen.words != self._blind_said:
            say(4, f"{unit}: cannot see whether it gets on: {seen.words}")
        self._blind_said = seen.words if seen.state == "blind" else ""
        reason = self._judge.look(clock(), start, started_s, seen)
        # Between the look and here somebody may have stopped it.
        if not reason or running_start(unit)[0] != start:
            return
        say(3, f"{unit} is wedged and is restarted: {reason}")
        problem = restart(unit)
        if problem:
            say(3, f"{unit} could not be restarted: {problem}")
        self._judge.reset()
        record(self._name, unit, reason, problem)

    def _look(self, clock: Callable[[], float]) -> Seen:
        progress = self.settings["progress"]
        key = first_key(str(self.settings["keys_file"]))
        seen = look(progress, key, self._judge.limit_s / 3)
        if progress["kind"] != "metrics":
            return seen
        # A request shows in these only once the engine has taken it: one that is stuck at rest never does.
        question = self._question
        if question is not None and question.outcome is not None:
            self._question, self._asked_s = None, clock()
            self._in_vain = question.outcome == "failed" and seen.state == "idle"
        elif question is None and seen.state == "idle" and (self._in_vain or clock() - self._asked_s >= ASK_EVERY_S):
            self._question = Question(self.settings, key, self._judge.limit_s * 2)
        if seen.state == "idle" and (self._question is not None or self._in_vain):
            return Seen("busy", seen.mark, "it was asked for one token")
        return seen


def wanted() -> dict[str, JsonObject]:
    """The servers that are to be watched, by name; none where the file is missing or damaged."""
    try:
        instances = json.loads(SETTINGS.read_text(encoding="utf-8"))["instances"]
        return {str(name): found for name, found in instances.items() if found.get("watchdog") and found.get("progress")}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def is_superseded() -> bool:
    """Whether another version of this program or its unit lies there, and systemd knows it."""
    try:
        text = UNIT_FILE.read_text(encoding="utf-8")
    except OSError:
        return False
    match = re.search(rf"^Environment={DIGEST_VARIABLE}=(\w*)$", text, re.MULTILINE)
    if match is None or match.group(1) == os.environ.get(DIGEST_VARIABLE):
        return False
    return unit_properties(UNIT_FILE.name).get("NeedDaemonReload") == "no"


def main() -> int:
    """Starts and ends a watch for each server, as the settings change."""
    watches: dict[str, Watch] = {}
    ends: dict[str, threading.Event] = {}
    over = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: over.set())
    known: list[str] = []
    while not over.is_set():
        servers = wanted()
        for name in list(watches):
            if watches[name].settings != servers.get(name):
                ends.pop(name).set()
                del watches[name]
        for name, settings in servers.items():
            if name not in watches:
                ends[name] = threading.Event()
                watches[name] = Watch(name, settings, ends[name])
                threading.Thread(target=watches[name].run, daemon=True).start()
        if sorted(servers) != known:
            known = sorted(servers)
            say(6, f"watching {', '.join(known) or 'nothing'}")
        if is_superseded():
            say(6, "another version is there: making room for it")
            return 0
        over.wait(10.0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
