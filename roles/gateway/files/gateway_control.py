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
``fit``
    Has the state that was written before agree with the configuration as it is now; part of a start.
``status``
    ``{"digest", "keys_current", "servers": {INSTANCE: {"status", "running", "engine"}}}``: which file is loaded, whether the
    keys are those of the files, and how each server is seen.

A gateway that does not run is exit status 4, an instance that it does not know is 5.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import fcntl
import io
import ipaddress
import json
import pwd
import re
import socket
import sys
import time
from pathlib import Path
from typing import Any, Dict, NoReturn, Sequence, Tuple

FOLDER = Path("/run/v100ctl-gateway")
CONFIG = Path("/etc/v100ctl/gateway.cfg")
KEYS = Path("/etc/v100ctl/gateway")
ANSWER_TIMEOUT_S = 5.0
MAX_ANSWER_BYTES = 4 * 1024 * 1024
POLL_S = 0.2
#: Those of both families.
CONNECTIONS = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
#: Who the gateway is while it serves.
ACCOUNT = "haproxy"
#: The state of a connection that is open, as the kernel writes it there.
ESTABLISHED = "01"

EXIT_LIMIT = 3
EXIT_NOT_RUNNING = 4
EXIT_UNKNOWN = 5

JsonObject = Dict[str, Any]
#: A server by the names of its backend and of itself.
ServerName = Tuple[str, str]


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


def open_connections(table: str, engine: str, user: int | None = None) -> int:
    """How many connections of ``user`` to ``engine`` (``ADDRESS:PORT``) are open, from ``/proc/net/tcp`` or ``tcp6``.

    A process that is about to end, since another has loaded a new configuration, still serves its requests and is not asked any
    more: what it serves is seen here. The gateway closes a connection to an engine with the answer, so that each is a request.
    Somebody else's is none, such as that of a Prometheus on this host, which stays open from one scrape to the next.
    """
    address, _, port = engine.rpartition(":")
    try:
        packed = ipaddress.ip_address(address.strip("[]")).packed
    except ValueError:
        # A server whose name nobody knows has no address, and no connection.
        return 0
    if not port.isdigit():
        return 0
    # The kernel writes each four bytes as a number of its own order.
    words = (int.from_bytes(packed[start : start + 4], sys.byteorder) for start in range(0, len(packed), 4))
    wanted = "".join(f"{word:08X}" for word in words) + f":{int(port):04X}"
    rows = (line.split() for line in table.splitlines()[1:])
    return sum(
        1 for row in rows if len(row) > 7 and row[2] == wanted and row[3] == ESTABLISHED and (user is None or row[7] == str(user))
    )


def _account() -> int | None:
    try:
        return pwd.getpwnam(ACCOUNT).pw_uid
    except KeyError:
        return None


def _running(instance: str) -> int:
    server = _server(instance)
    # A host without IPv6 has no table of it.
    tables = (table.read_text(encoding="ascii") for table in CONNECTIONS if table.exists())
    return max(int(server["running"]), sum(open_connections(table, server["engine"], _account()) for table in tables))


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


def configured_servers(configuration: str) -> dict[ServerName, JsonObject]:
    """Each server's address, port and whether it speaks TLS, from the text of a configuration."""
    found: dict[ServerName, JsonObject] = {}
    backend = ""
    for line in configuration.splitlines():
        words = line.split()
        if words and not line.startswith((" ", "#")):
            backend = words[1] if words[0] == "backend" and len(words) > 1 else ""
        elif backend and words[:1] == ["server"] and len(words) > 2:
            address, _, port = words[2].rpartition(":")
            found[backend, words[1]] = {"address": address, "port": port, "tls": "ssl" in words[3:]}
    return found


def fitted(state: str, configuration: str) -> str:
    """``state`` (``show servers state``) for a process that loads ``configuration``.

    HAProxy takes port, TLS and the address behind a name from the state that was kept, whatever its configuration says: a server
    that has moved would be looked for where it was. Of what was kept, only how a server was seen and whether it was taken out is
    meant to last.
    """
    wanted = configured_servers(configuration)
    columns: list[str] = []
    lines = []
    for line in state.splitlines():
        words = line.split(" ")
        if line.startswith("# "):
            columns = words[1:]
        elif columns and len(words) == len(columns):
            row = dict(zip(columns, words))
            server = wanted.get((row.get("be_name", ""), row.get("srv_name", "")))
            if server is None:
                continue
            fresh = {"srv_port": server["port"], "srv_use_ssl": str(int(server["tls"]))}
            if row.get("srv_fqdn") != _name(server["address"]):
                fresh.update(srv_addr="-", srv_fqdn="-")
            line = " ".join(fresh.get(column, value) for column, value in row.items())
        lines.append(line)
    return "\n".join(lines) + "\n"


def _name(address: str) -> str:
    """What is looked up for an address, as HAProxy writes it: ``-`` for one that is a number already."""
    try:
        ipaddress.ip_address(address.strip("[]"))
    except ValueError:
        return address
    return "-"


def _keep(state: str) -> None:
    # Without a configuration nothing starts.
    with contextlib.suppress(OSError):
        state = fitted(state, CONFIG.read_text(encoding="utf-8"))
    aside = FOLDER / "servers.new"
    aside.write_text(state, encoding="utf-8")
    aside.replace(FOLDER / "servers")


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
        _keep(state)
    return 0


def fit() -> int:
    """See the verb ``fit`` above. At the first start nothing was written yet."""
    try:
        _keep((FOLDER / "servers").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return 0
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
    verbs.add_parser("fit")
    verbs.add_parser("status")
    given = parser.parse_args(arguments)
    try:
        if given.verb == "drain":
            return drain(given.instance, given.limit_s)
        if given.verb == "open":
            return reopen(given.instance, given.limit_s)
        if given.verb == "save":
            return save()
        if given.verb == "fit":
            return fit()
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
