"""Runs a unit with other words for a while, and brings the live settings back whatever happens. Prints one JSON object.

Runs on the host as root with its own Python (3.8 or later). A trial is a drop-in below ``/run``, so that a reboot ends it. Before
the first one a unit of its own is started, the dead-man: it runs this same script and brings everything back when the lease that
the controller renews has lapsed, or when it is asked to. It also holds the lock by which the watchdog and the nightly restart
leave the server alone.

Verbs: ``begin`` (state, lease, dead-man), ``trial`` (drop-in, restart), ``look`` (renews the lease, says how the server is),
``end`` (bring back). ``--watch NAME`` is the dead-man.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, Dict, Iterator

RUN_DIR = Path("/run")
DROP_IN_NAME = "90-v100ctl-tune.conf"
GATEWAY_PROGRAM = Path("/opt/v100ctl/gateway/gateway_control.py")
SYSTEMCTL_TIMEOUT_S = 30.0
#: Stopping takes 90 s at most, and the checks before a start 240 s.
RESTART_TIMEOUT_S = 600.0
GATEWAY_LIMIT_S = 5.0
SMI_TIMEOUT_S = 30.0
HEALTH_TIMEOUT_S = 5.0
#: How long `begin` waits until the dead-man holds the server's lock: the watchdog holds it for one look.
HELD_TIMEOUT_S = 60.0
POLL_S = 1.0

JsonObject = Dict[str, Any]


class Refused(Exception):
    """It cannot be done now; nothing was changed."""


# --- the world ----------------------------------------------------------------------------------------------------------------


def run(argv: list[str], timeout_s: float) -> tuple[int, str]:
    """Exit status and output of a command; -1 where it is missing or does not end in time."""
    try:
        done = subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=timeout_s, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return -1, str(error)
    return done.returncode, done.stdout.decode("utf-8", "replace")


def write(path: Path, text: str) -> None:
    """Aside, then renamed in: a file is whole or not there."""
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    descriptor, aside = tempfile.mkstemp(dir=str(path.parent), prefix="." + path.name + ".")
    with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
        stream.write(text)
    Path(aside).chmod(0o644)
    Path(aside).replace(path)


def remove(path: Path) -> None:
    """Gone afterwards; twice is fine."""
    with contextlib.suppress(FileNotFoundError):
        path.unlink()


def now_s() -> float:
    """Seconds since the boot, the same for every process."""
    return time.monotonic()


# --- what is kept -------------------------------------------------------------------------------------------------------------


def folder(name: str) -> Path:
    """What is known of a server that is being tuned."""
    return RUN_DIR / "v100ctl" / "tune" / name


def drop_in(unit: str) -> Path:
    """The file that makes a trial of a unit."""
    return RUN_DIR / "systemd" / "system" / (unit + ".d") / DROP_IN_NAME


def state_of(name: str) -> JsonObject:
    """The state that `begin` has written; empty where nothing is tuned."""
    try:
        found = json.loads((folder(name) / "state.json").read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def keep(name: str, state: JsonObject) -> None:
    """Write the state down, before what it tells of is done."""
    write(folder(name) / "state.json", json.dumps(state))


def renew(name: str, lease_s: float) -> None:
    """The controller lives."""
    write(folder(name) / "lease", repr(now_s() + lease_s))


def lapsed(name: str) -> bool:
    """Whether nobody has renewed the lease in time. One that cannot be read has lapsed."""
    try:
        return now_s() > float((folder(name) / "lease").read_text("ascii"))
    except (OSError, ValueError):
        return True


@contextlib.contextmanager
def alone(name: str) -> Iterator[None]:
    """A trial does not begin while the dead-man brings back, nor the other way round."""
    path = RUN_DIR / "v100ctl" / ("tune-" + name + ".lock")
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    descriptor = os.open(str(path), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


# --- verbs --------------------------------------------------------------------------------------------------------------------


def watcher(name: str) -> str:
    """The dead-man's unit. Not `v100-NAME.service`: such a unit is an instance."""
    return "v100ctl-tune-" + name + ".service"


def properties(unit: str, names: str) -> dict[str, str]:
    """Properties of a unit; empty where systemd does not answer."""
    _, shown = run(["systemctl", "show", "--property", names, "--", unit], SYSTEMCTL_TIMEOUT_S)
    return dict(line.split("=", 1) for line in shown.splitlines() if "=" in line)


def power_limits(cards: list[str]) -> dict[str, float]:
    """The power limit of each card in watts."""
    argv = ["nvidia-smi", "--query-gpu=uuid,power.limit", "--format=csv,noheader,nounits"]
    code, shown = run(argv, SMI_TIMEOUT_S)
    rows = [line.split(",") for line in shown.splitlines()] if code == 0 else []
    found = {row[0].strip(): row[1].strip() for row in rows if len(row) == 2 and row[0].strip() in cards}
    return {uuid: float(watts) for uuid, watts in found.items() if watts.replace(".", "", 1).isdigit()}


def set_power(limits: dict[str, float]) -> str:
    """Set power limits; what is wrong, or nothing."""
    for uuid, watts in limits.items():
        code, said = run(["nvidia-smi", "-i", uuid, "-pl", f"{watts:g}"], SMI_TIMEOUT_S)
        if code != 0:
            return said.strip() or "nvidia-smi failed"
    return ""


def begin(request: JsonObject) -> JsonObject:
    """Write down what is, and start the dead-man. Nothing of the server is changed yet."""
    name, unit = request["name"], request["unit"]
    with alone(name):
        known = state_of(name)
        if known and not lapsed(name):
            raise Refused("another tune of it is running here; it ends by itself when its controller has gone")
        if known:
            bring_back(name)
        if properties(unit, "ActiveState").get("ActiveState") != "active":
            raise Refused(unit + " does not run")
        limits = power_limits(request["cards"]) if request.get("power") else {}
        if request.get("power") and set(limits) != set(request["cards"]):
            raise Refused("nvidia-smi does not tell the cards' power limits")
        remove(folder(name) / "held")
        renew(name, request["lease_s"])
        keep(name, {"token": request["token"], "unit": unit, "name": name, "touched": False, "power": limits})
        write(folder(name) / "dead_man.py", request["script"])
    argv = ["systemd-run", "--quiet", "--collect", "--unit", watcher(name)]
    # It comes back when it is killed, and brings back what it finds then.
    argv += ["--property", "Restart=on-failure", "--property", "RestartSec=1"]
    argv += [sys.executable or "/usr/bin/python3", "-I", "-S", "-B", str(folder(name) / "dead_man.py"), "--watch", name]
    run(["systemctl", "reset-failed", watcher(name)], SYSTEMCTL_TIMEOUT_S)
    code, said = run(argv, SYSTEMCTL_TIMEOUT_S)
    if code != 0:
        forget(name)
        raise Refused("no dead-man can be started: " + said.strip())
    deadline_s = now_s() + HELD_TIMEOUT_S
    while not (folder(name) / "held").exists():
        if now_s() > deadline_s:
            end(request)
            raise Refused("the server is being restarted by somebody else")
        renew(name, request["lease_s"])
        time.sleep(POLL_S / 4)
    return {"power": limits}


def own(request: JsonObject) -> JsonObject:
    """The state, where it is this controller's and the lease has not lapsed."""
    state = state_of(request["name"])
    if state.get("token") != request["token"]:
        raise Refused("the lease has lapsed and the live settings were brought back")
    return state


def trial(request: JsonObject) -> JsonObject:
    """Run the unit with a drop-in; without one, with its live settings. Does not wait until it serves."""
    name = request["name"]
    with alone(name):
        state = own(request)
        unit = state["unit"]
        renew(name, request["lease_s"])
        keep(name, dict(state, touched=True))
        before = properties(unit, "InvocationID").get("InvocationID", "")
        wrong = set_power(dict(state["power"], **request["power"])) if state["power"] else ""
        if wrong:
            return {"before": before, "problem": wrong}
        if request["drop_in"]:
            write(drop_in(unit), request["drop_in"])
        else:
            remove(drop_in(unit))
        run(["systemctl", "daemon-reload"], SYSTEMCTL_TIMEOUT_S)
        # Each start counts against the unit's limit.
        run(["systemctl", "reset-failed", unit], SYSTEMCTL_TIMEOUT_S)
        code, said = run(["systemctl", "restart", "--no-block", unit], SYSTEMCTL_TIMEOUT_S)
        return {"before": before, "problem": "" if code == 0 else said.strip()}


def look(request: JsonObject) -> JsonObject:
    """Renew the lease; with an address, say how the server is."""
    with alone(request["name"]):
        unit = own(request)["unit"]
        renew(request["name"], request["lease_s"])
    if not request.get("url"):
        return {}
    shown = properties(unit, "ActiveState,SubState,Result,NRestarts,InvocationID,Job")
    found: JsonObject = {"active": shown.get("ActiveState", ""), "invocation": shown.get("InvocationID", "")}
    found["job"] = shown.get("Job", "") not in ("", "0")
    found["status"] = health(request["url"], request.get("keys_file", ""))
    if found["active"] == "failed" or shown.get("Result", "success") != "success":
        found["result"] = shown.get("Result", "")
        found["said"] = last_words(unit, found["invocation"])
    return found


def health(url: str, keys_file: str) -> Any:
    """The status that the server's health path answers with; ``None`` where it does not."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    headers = {}
    with contextlib.suppress(OSError):
        if keys_file:
            headers["Authorization"] = "Bearer " + Path(keys_file).read_text("ascii").split("\n")[0]
    try:
        with opener.open(urllib.request.Request(url, headers=headers), timeout=HEALTH_TIMEOUT_S) as answer:  # noqa: S310 - the plan's
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code
    except (OSError, ValueError):
        return None


def last_words(unit: str, invocation: str) -> str:
    """What a server said that has ended: its last line that tells of an error, else its last line."""
    argv = ["journalctl", "--no-pager", "-o", "cat", "-n", "60", "-u", unit]
    _, said = run([*argv, "_SYSTEMD_INVOCATION_ID=" + invocation] if invocation else argv, SYSTEMCTL_TIMEOUT_S)
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    wrong = [line for line in lines if "error" in line.lower() or "failed" in line.lower()]
    return ((wrong or lines or [""])[-1])[:300]


def end(request: JsonObject) -> JsonObject:
    """Bring everything back, and let the dead-man go."""
    name = request["name"]
    with alone(name):
        if state_of(name).get("token") not in (None, request["token"]):
            raise Refused("another tune of it is running here")
        bring_back(name)
    return {}


def bring_back(name: str) -> None:
    """The live settings again: what was changed is undone, in an order in which it can be cut and done again."""
    state = state_of(name)
    if state:
        unit = state["unit"]
        remove(drop_in(unit))
        with contextlib.suppress(OSError):
            drop_in(unit).parent.rmdir()
        if state["touched"]:
            if state["power"]:
                set_power(state["power"])
            run(["systemctl", "daemon-reload"], SYSTEMCTL_TIMEOUT_S)
            run(["systemctl", "reset-failed", unit], SYSTEMCTL_TIMEOUT_S)
            run(["systemctl", "restart", unit], RESTART_TIMEOUT_S)
        if GATEWAY_PROGRAM.exists():
            argv = ["/usr/bin/python3", "-I", "-S", "-B", str(GATEWAY_PROGRAM), "open", name, "--limit-s", str(GATEWAY_LIMIT_S)]
            run(argv, GATEWAY_LIMIT_S + 30)
    forget(name)


def forget(name: str) -> None:
    """Nothing is tuned any more. What the dead-man runs goes last: killed before that, it comes back and does the rest."""
    for file in ("lease", "held", "state.json", "dead_man.py"):
        remove(folder(name) / file)
    with contextlib.suppress(OSError):
        folder(name).rmdir()


# --- the dead-man -------------------------------------------------------------------------------------------------------------


def check(name: str) -> bool:
    """One look of the dead-man; whether it is needed any more."""
    with alone(name):
        if not state_of(name):
            forget(name)
            return False
        if lapsed(name):
            bring_back(name)
            return False
    return True


def watch(name: str) -> int:
    """Look until nothing is tuned any more, holding the lock by which others leave the server alone."""
    path = RUN_DIR / "v100ctl" / (name + ".lock")
    lock = os.open(str(path), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    held = False
    while True:
        with contextlib.suppress(OSError):
            if not held:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                held = True
            # Written again where the folder is new: this process may have been started anew.
            if state_of(name) and not (folder(name) / "held").exists():
                write(folder(name) / "held", "")
        try:
            if not check(name):
                return 0
        except Exception as error:  # whatever it is, the next look tries again
            print(f"v100ctl tune: {error}", file=sys.stderr, flush=True)
        time.sleep(POLL_S)


VERBS = {"begin": begin, "trial": trial, "look": look, "end": end}


def main(arguments: Any = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--request", help="what to do, as JSON")
    parser.add_argument("--watch", metavar="NAME", help="be the dead-man")
    options = parser.parse_args(arguments)
    if options.watch:
        return watch(options.watch)
    request = json.loads(options.request)
    try:
        answer = VERBS[request["verb"]](request)
    except Refused as error:
        answer = {"refused": str(error)}
    json.dump(answer, sys.stdout)
    sys.stdout.write("\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
