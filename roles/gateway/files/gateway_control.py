#!/usr/bin/env python3
"""Takes an LLM server out of this host's gateway and brings it back, and says what the gateway runs.

The gateway of a fleet knows its servers as ``INSTANCE@HOST``.

Runs where nothing of ours is installed: standard library only, Python 3.8 or later. Each verb prints one JSON object.

``drain INSTANCE --limit-s N``
    New requests wait from now on. Ends when the running ones have ended, or at the limit: then the exit status is 3 and the
    server stays out. ``{"running": N}``
``open INSTANCE --limit-s N``
    Lets requests in again, and ends when the gateway has seen the server healthy; status 3 when it has not within the limit.
``save``
    Writes the servers' state for the process that takes over; part of a reload.
``status``
    ``{"digest", "keys_current", "servers": {INSTANCE: {"status", "running", "engine"}}}``: which file is loaded, whether the
    keys are those of the files, and how each server is seen.

A gateway that does not run is exit status 4, an instance that it does not know is 5.
"""

from __future__ import annotations

import argparse
import csv
import fcntl
import io
import ipaddress
import json
import re
import socket
import sys
import time
from pathlib import Path
from typing import Any, Dict, NoReturn, Sequence

FOLDER = Path("/run/v100ctl-gateway")
KEYS = Path("/etc/v100ctl/gateway")
ANSWER_TIMEOUT_S = 5.0
MAX_ANSWER_BYTES = 4 * 1024 * 1024
POLL_S = 0.2
#: Of IPv4 and IPv6; a kernel without IPv6 has the first alone.
CONNECTIONS = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
#: The state of a connection that is open, as the kernel writes it there.
ESTABLISHED = "01"

EXIT_LIMIT = 3
EXIT_NOT_RUNNING = 4
EXIT_UNKNOWN = 5

JsonObject = Dict[str, Any]


class NotRunning(Exception):
    """Nobody answers on the gateway's socket."""


class UnknownInstance(Exception):
    """The gateway has no such instance."""


def ask(command: str) -> str:
    """One command of HAProxy's runtime API, and its answer.

    Raises:
        NotRunning: There is no gateway, or it does not answer within the time limit.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as channel:
        channel.settimeout(ANSWER_TIMEOUT_S)
        try:
            channel.connect(str(FOLDER / "admin.sock"))
            channel.sendall(command.encode() + b"\n")
            answer = b""
            while len(answer) < MAX_ANSWER_BYTES:
                block = channel.recv(65536)
                if not block:
                    break
                answer += block
        except OSError as error:
            raise NotRunning(str(error)) from error
    return answer.decode("utf-8", errors="replace")


def loaded_digest(info: str) -> str:
    """The digest in the description of the running configuration; empty where it is not one of ours."""
    match = re.search(r"^description: v100ctl ([0-9a-f]+)\s*$", info, re.MULTILINE)
    return match.group(1) if match else ""


def server_states(statistics: str) -> dict[str, JsonObject]:
    """Each instance's server from the answer to ``show stat``."""
    found: dict[str, JsonObject] = {}
    for row in csv.DictReader(io.StringIO(statistics.lstrip("# "))):
        name, server = row.get("pxname") or "", row.get("svname") or ""
        if name.startswith("engine-") and server not in ("FRONTEND", "BACKEND"):
            running = int(row.get("scur") or 0)
            found[name[len("engine-") :] + ("" if server == "engine" else f"@{server}")] = {
                "status": row.get("status") or "",
                "running": running,
                "engine": row.get("addr") or "",
            }
    return found


def keys_current() -> bool:
    """Whether the keys that are loaded are those of the files: they are no part of the digest, which everybody may read."""
    listed = ask("show map")
    loaded = {Path(name) for name in re.findall(r"\((/[^()]+\.keys)\)", listed)}
    files = set(KEYS.glob("*.keys"))
    return loaded == files and all(
        _entries(re.sub(r"(?m)^0x[0-9a-f]+ ", "", ask(f"show map {file}"))) == _entries(file.read_text("utf-8")) for file in files
    )


def _entries(content: str) -> set[str]:
    return {line for line in content.splitlines() if line.strip() and not line.startswith("#")}


def open_connections(table: str, engine: str) -> int:
    """How many connections to ``engine`` (``127.0.0.1:PORT``, ``[::1]:PORT``) are open, from ``/proc/net/tcp`` and ``tcp6``.

    A process that is about to end, since another has loaded a new configuration, still serves its requests and is not asked any
    more: what it serves is seen here. The gateway closes a connection to an engine with the answer, so that each is a request.
    """
    address, _, port = engine.rpartition(":")
    try:
        octets, number = ipaddress.ip_address(address.strip("[]")).packed, int(port)
    except ValueError:
        # A name that was not resolved yet, or a socket in a file: nothing is connected there by TCP.
        return 0
    # The kernel writes words of four octets, each as the number that it is to this processor.
    words = [octets[start : start + 4] for start in range(0, len(octets), 4)]
    wanted = "".join(word[::-1].hex() for word in words).upper() + f":{number:04X}"
    rows = (line.split() for line in table.splitlines()[1:])
    return sum(1 for row in rows if len(row) > 3 and row[2] == wanted and row[3] == ESTABLISHED)


def _running(instance: str) -> int:
    server = _server(instance)
    tables = [path.read_text(encoding="ascii") for path in CONNECTIONS if path.is_file()]
    return max(server["running"], sum(open_connections(table, server["engine"]) for table in tables))


def _server(instance: str) -> JsonObject:
    states = server_states(ask("show stat"))
    if instance not in states:
        raise UnknownInstance(f"the gateway has no instance `{instance}`; it has {', '.join(sorted(states)) or 'none'}")
    return states[instance]


def _set_state(instance: str, state: str) -> None:
    """Has the gateway treat a server so, also when it is started anew."""
    name, _, server = instance.partition("@")
    _server(instance)
    ask(f"set server engine-{name}/{server or 'engine'} state {state}")
    save()


def drain(instance: str, limit_s: float) -> int:
    """See the verb ``drain`` above."""
    _set_state(instance, "drain")
    deadline = time.monotonic() + limit_s
    while True:
        running = _running(instance)
        if running == 0 or time.monotonic() >= deadline:
            break
        time.sleep(POLL_S)
    _say({"running": running})
    return 0 if running == 0 else EXIT_LIMIT


def reopen(instance: str, limit_s: float) -> int:
    """See the verb ``open`` above."""
    _set_state(instance, "ready")
    deadline = time.monotonic() + limit_s
    while True:
        server = _server(instance)
        if server["status"].startswith("UP") or time.monotonic() >= deadline:
            break
        time.sleep(POLL_S)
    _say(server)
    return 0 if server["status"].startswith("UP") else EXIT_LIMIT


def save() -> int:
    """See the verb ``save`` above."""
    if not FOLDER.is_dir():
        return 0
    # Several servers are taken out at once: who asks first must not write last, nor two into one file.
    with (FOLDER / "servers.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            state = ask("show servers state")
        except NotRunning:
            return 0
        aside = FOLDER / "servers.new"
        aside.write_text(state, encoding="utf-8")
        aside.replace(FOLDER / "servers")
    return 0


def _say(document: JsonObject) -> None:
    sys.stdout.write(json.dumps(document, sort_keys=True) + "\n")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        sys.stderr.write(f"error: {message}\n")
        raise SystemExit(64)


def main(arguments: Sequence[str]) -> int:
    """The command line; returns the exit status."""
    parser = _Parser(description="Takes LLM servers out of this host's gateway and brings them back")
    verbs = parser.add_subparsers(dest="verb", required=True)
    for verb in ("drain", "open"):
        sub = verbs.add_parser(verb)
        sub.add_argument("instance")
        sub.add_argument("--limit-s", type=float, default=600.0)
    verbs.add_parser("save")
    verbs.add_parser("status")
    given = parser.parse_args(arguments)
    try:
        if given.verb == "drain":
            return drain(given.instance, given.limit_s)
        if given.verb == "open":
            return reopen(given.instance, given.limit_s)
        if given.verb == "save":
            return save()
        _say(
            {
                "digest": loaded_digest(ask("show info")),
                "keys_current": keys_current(),
                "servers": server_states(ask("show stat")),
            }
        )
    except NotRunning as error:
        sys.stderr.write(f"error: the gateway does not answer: {error}\n")
        return EXIT_NOT_RUNNING
    except UnknownInstance as error:
        sys.stderr.write(f"error: {error}\n")
        return EXIT_UNKNOWN
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
