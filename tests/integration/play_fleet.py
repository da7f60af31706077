"""A fleet of lab hosts behind its gateway, with an engine of a few lines, and clients that ask it without a pause."""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonschema

from v100ctl.lab.containers import put_file
from v100ctl.lab.hosts import LabHost, run_identity, write_inventory
from v100ctl.lab.image import ensure_image

from .hosts import ROOT, on_host, v100ctl

if TYPE_CHECKING:
    from v100ctl.apply.reporter import Reporter
    from v100ctl.lab.hosts import Lab, RunningHost

MODEL = "/srv/models/x.gguf"
WORDS = 24
#: Speaks as an engine does. `--fault` makes it answer rubbish, decode slowly, or load for ever.
SERVER = """#!/usr/bin/python3
import argparse
import json
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

parser = argparse.ArgumentParser()
for flag in ("host", "port", "model", "ctx-size", "release"):
    parser.add_argument(f"--{flag}", required=True)
parser.add_argument("--fault", choices=["none", "garbage", "slow", "hang"], default="none")
options = parser.parse_args()
speed = 50.0 if options.fault == "slow" else 200.0


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *words):
        pass

    def send(self, status, body):
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        self.send(503 if options.fault == "hang" else 200, b"{}")

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        count = min(asked.get("max_tokens", 24), 24)
        words = ["G" if options.fault == "garbage" else f"w{number} " for number in range(count)]
        if not asked.get("stream"):
            time.sleep(count / speed)
            message = {"role": "assistant", "content": "".join(words)}
            usage, timings = {"completion_tokens": count}, {"predicted_per_second": speed}
            self.send(200, json.dumps({"choices": [{"message": message}], "usage": usage, "timings": timings}).encode())
            return
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for word in [*words, None]:
            data = b"[DONE]" if word is None else json.dumps({"choices": [{"delta": {"content": word}}]}).encode()
            data = b"data: " + data + b"\\n\\n"
            self.wfile.write(b"%x\\r\\n%s\\r\\n" % (len(data), data))
            self.wfile.flush()
            time.sleep(0.05)
        self.wfile.write(b"0\\r\\n\\r\\n")


ThreadingHTTPServer((options.host, int(options.port)), Handler).serve_forever()
"""


class Load:
    """Clients that ask without a pause, every second one for a stream. What fails or is cut off is noted."""

    def __init__(self, address: str, clients: int = 4) -> None:
        self._address = address
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(number % 2 == 0,)) for number in range(clients)]
        self.answered = 0
        self.problems: list[str] = []
        self.slowest_s = 0.0

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _run(self, stream: bool) -> None:
        while not self._stop.is_set():
            began_s = time.monotonic()
            try:
                problem = ask(self._address, stream=stream)
            except (OSError, http.client.HTTPException, ValueError) as error:
                problem = f"{type(error).__name__}: {error}"
            self.slowest_s = max(self.slowest_s, time.monotonic() - began_s)
            if problem:
                self.problems.append(problem)
            else:
                self.answered += 1
            self._stop.wait(0.1)


def ask(address: str, *, stream: bool) -> str:
    """One request; what is wrong with its answer, empty for nothing."""
    connection = http.client.HTTPConnection(address, 8000, timeout=300)
    try:
        body = {"model": "chat", "messages": [{"role": "user", "content": "?"}], "max_tokens": WORDS, "stream": stream}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        text = response.read().decode()
    finally:
        connection.close()
    whole = text.rstrip().endswith("data: [DONE]") and text.count("delta") == WORDS if stream else f"w{WORDS - 1} " in text
    return "" if response.status == 200 and whole else f"HTTP {response.status}: {text[-200:]!r}"


class PlayFleet:
    """Hosts that serve, the gateway in front of them, and their inventory."""

    def __init__(self, folder: Path, serving: Sequence[RunningHost], front: RunningHost) -> None:
        self.serving, self.front = list(serving), front
        self.folder = folder
        self.inventory = folder / "hosts.yml"
        self.address = str(front.variables()["ansible_host"])

    def want(self, *, fault: str = "none", context_length: int = 1024, flags: Sequence[str] = (), server: str = SERVER) -> None:
        """The inventory asks for this from now on. Another text of the server is another release."""
        program = self.folder / "server"
        program.write_text(server)
        digest = hashlib.sha256(b"GGUF").hexdigest()
        argv = ["{release}/bin/server", "--host", "{listen}", "--port", "{port}", "--model", "{model}", "--release", "{release}"]
        engine = {
            "source": {"from_controller": str(program), "sha256": hashlib.sha256(server.encode()).hexdigest(), "kind": "file"},
            "backend": "cpu",
            "argv": [*argv, "--ctx-size", "{context_length}", "--fault", fault, *flags],
        }
        chat = {
            "engine": "external",
            "external": "server",
            "model": {"path": MODEL, "sha256": digest},
            "gpus": [],
            "listen": "0.0.0.0",
            "settings": {"context_length": context_length},
        }
        every = {"external_engine_definitions": {"server": engine}, "llm_server_allow_unauthenticated": True}
        hosts = {host.name: {**host.variables(), "llm_server_instances": {"chat": chat}} for host in self.serving}
        hosts[self.front.name] = {**self.front.variables(), "gateway_placement": "fleet", "gateway_listen": "0.0.0.0"}
        write_inventory(self.inventory, hosts, variables=every)

    def contexts(self) -> list[str]:
        """The context length that each host's process was started with."""
        command = "tr '\\0' ' ' < /proc/$(systemctl show --property MainPID --value v100-chat)/cmdline"
        return [on_host(host, command).split("--ctx-size ")[1].split()[0] for host in self.serving]

    def servers(self) -> dict[str, str]:
        """How the gateway sees each server."""
        said = json.loads(on_host(self.front, "python3 -I -S -B /opt/v100ctl/gateway/gateway_control.py status"))
        return {name: server["status"].split()[0] for name, server in said["servers"].items()}

    def assert_all_serve(self, contexts: Sequence[int]) -> None:
        """Every host runs one of these, and the gateway sends it requests."""
        assert set(self.contexts()) <= set(map(str, contexts))
        assert set(self.servers().values()) == {"UP"}
        assert len(self.servers()) == len(self.serving)


@contextmanager
def hosts_up(lab: Lab, reporter: Reporter, label: str, count: int) -> Iterator[list[RunningHost]]:
    """The gateway's host and then ``count`` that serve, each with the model's file; gone at the end."""
    names = [f"test-{os.getpid()}-{label}-{number}" for number in ("front", *range(1, count + 1))]
    hosts = [lab.up(LabHost(name, owner=run_identity()), ensure_image(lab.client, reporter), reporter) for name in names]
    for host in hosts[1:]:
        on_host(host, "mkdir -p /srv/models")
        put_file(host.container, MODEL, b"GGUF", mode=0o644)
    yield hosts
    lab.down(*names)


def rollout(fleet: PlayFleet, *arguments: str) -> tuple[int, dict[str, Any], str]:
    """Run it; exit code, report and what was said."""
    done = v100ctl("rollout", "-i", fleet.inventory, "--yes", "--settle", "1", "--batch", "2", "--json", *arguments)
    document = done.document if done.out.startswith("{") else {}
    if document:
        schema = json.loads((ROOT / "docs/reference/rollout.schema.json").read_text())
        jsonschema.validate(document, schema, cls=jsonschema.Draft202012Validator)
    return done.code, document, done.err
