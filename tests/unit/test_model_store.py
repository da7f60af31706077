"""The script that puts models on a host, against a web server on this machine that behaves as badly as servers do."""

from __future__ import annotations

import errno
import hashlib
import http.server
import importlib.util
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

SCRIPT = Path(__file__).parents[2] / "roles/model_store/files/model_store.py"
#: Chunks are 64 KiB in these tests: 40 of them, the last one short.
CHUNK_BYTES = 64 * 1024
CONTENT = random.Random(1).randbytes(40 * CHUNK_BYTES - 1000)
TOKEN = "hf_aTokenThatNobodyElseMaySee"


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("model_store_script", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        spec.loader.exec_module(module)
    finally:
        sys.dont_write_bytecode = before
    vars(module).update(CHUNK_BYTES=CHUNK_BYTES, BACKOFF_S=0.001, MAX_BACKOFF_S=0.001, STATUS_INTERVAL_S=0.0)
    return module


store = load()


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


class Server(http.server.ThreadingHTTPServer):
    """Serves ``content`` by ranges, and badly in every way that its attributes say."""

    daemon_threads = True
    # A test's many connections at once are not to wait for each other.
    request_queue_size = 64

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.content = CONTENT
        self.etag: str | None = '"one"'
        #: After so many bytes of an answer the connection is cut; one entry an answer, 0 for a whole one.
        self.cuts: list[int] = []
        #: Statuses that are answered first, with their further headers.
        self.refusals: list[tuple[int, dict[str, str]]] = []
        self.ranges: str = "good"  # good, none, first-only, shifted, unnamed, longer, short
        self.redirect = ""
        self.linked = ""
        self.token = ""
        self.on_request: Any = None
        self.requests: list[dict[str, str]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/x.gguf"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        server = self.server
        server.requests.append({"path": self.path, **{key.lower(): value for key, value in self.headers.items()}})
        if server.on_request is not None:
            server.on_request(len(server.requests))
        if server.refusals:
            status, headers = server.refusals.pop(0)
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        if server.token and self.headers.get("Authorization") != f"Bearer {server.token}":
            self.send_response(401)
            self.send_header("X-Error-Message", "Access to this model is restricted")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        if server.redirect:
            self.send_response(302)
            self.send_header("Location", server.redirect)
            if server.linked:
                self.send_header("X-Linked-Etag", f'"{server.linked}"')
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self._send()

    def _send(self) -> None:
        server, content = self.server, self.server.content
        begin, end = 0, len(content)
        span = self.headers.get("Range")
        if server.ranges == "none" or (server.ranges == "first-only" and len(server.requests) > 2):
            span = None
        if span:
            first, last = span.removeprefix("bytes=").split("-")
            begin, end = int(first), min(int(last) + 1, len(content))
            if begin >= len(content):
                self.send_response(416)
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            if server.ranges == "short":
                end = min(end, begin + 10000)
            shown = begin + 1 if server.ranges == "shifted" else begin
            self.send_response(206)
            if server.ranges != "unnamed":
                self.send_header("Content-Range", f"bytes {shown}-{end - 1}/{len(content)}")
        else:
            self.send_response(200)
        body = content[begin:end] + (b"more" * 100 if span and server.ranges == "longer" else b"")
        self.send_header("Content-Length", str(len(body)))
        if server.etag:
            self.send_header("ETag", server.etag)
        self.end_headers()
        cut = server.cuts.pop(0) if server.cuts else 0
        if cut:
            self.wfile.write(body[:cut])
            self.wfile.flush()
            self.connection.shutdown(socket.SHUT_RDWR)
        else:
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def serving() -> Iterator[Server]:
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as server:
        yield server


class Host:
    """A host's folders, and one model that it shall have."""

    def __init__(self, root: Path, server: Server) -> None:
        self.root = root
        self.server = server
        self.path = root / "models" / "x.gguf"
        self.model: dict[str, Any] = {
            "path": str(self.path),
            "sha256": sha256(server.content),
            "size_bytes": None,
            "source": {"kind": "hf", "url": server.url},
        }
        self.phases: list[tuple[str, int, int, str]] = []
        self.connections = 4

    def make(self, *, token: str = "", remove: list[str] | None = None, hashes: bool = False) -> Any:
        spec = {
            "schema": "v100ctl/models/1",
            "models": [self.model],
            "remove": remove or [],
            "connections": self.connections,
            "stall_timeout_s": 5,
            "attempts": 4,
            "hashes": hashes,
        }
        made = store.Store(spec, self.root / "state")
        problems = made.run(token, lambda *said: self.phases.append(said))
        if problems:
            raise problems[0]
        return made

    def left(self) -> list[str]:
        folder = self.path.parent
        return sorted(str(path.relative_to(folder)) for path in folder.rglob("*")) if folder.exists() else []


@pytest.fixture
def host(tmp_path: Path, server: Server) -> Host:
    return Host(tmp_path, server)


def asked_bytes(server: Server) -> int:
    """How much was asked for in parts, without the look at the first one."""
    spans = [request["range"].removeprefix("bytes=").split("-") for request in server.requests if "range" in request]
    return sum(min(int(last) + 1, len(server.content)) - int(first) for first, last in spans[1:])


def break_down_after(server: Server, chunks: int) -> None:
    """Let it answer one look and so many chunks, and nothing more."""

    def refuse(number: int) -> None:
        if number > chunks + 1:
            server.refusals.append((503, {}))

    server.on_request = refuse


def test_a_file_comes_by_several_connections_and_is_verified(host: Host, server: Server) -> None:
    made = host.make()
    assert host.path.read_bytes() == CONTENT
    assert made.changed == [str(host.path)]
    assert host.left() == ["x.gguf"]
    assert oct(host.path.stat().st_mode)[-3:] == "644"
    record = json.loads(made.record_path(str(host.path)).read_text())
    assert record == {
        "path": str(host.path),
        "sha256": sha256(CONTENT),
        "size_bytes": len(CONTENT),
        "mtime_s": int(host.path.stat().st_mtime),
    }
    assert len(server.requests) == 41, "one look, then each chunk once"
    assert any(phase == ("downloading x.gguf", len(CONTENT), len(CONTENT), "bytes") for phase in host.phases)
    server.requests.clear()
    assert host.make().changed == []
    assert server.requests == [], "what was verified is not asked for again"


def test_cuts_are_mended_where_they_happen(host: Host, server: Server) -> None:
    server.cuts = [0, 1000, 0, 30000, 0, 1, 60000, 10, 10, 10]
    host.make()
    assert host.path.read_bytes() == CONTENT
    assert asked_bytes(server) < len(CONTENT) + 8 * CHUNK_BYTES


@given(
    cuts=st.lists(st.integers(0, CHUNK_BYTES), max_size=40),
    size=st.integers(0, 5 * CHUNK_BYTES),
    connections=st.integers(1, 5),
    ranges=st.sampled_from(["good", "none", "first-only", "shifted", "unnamed", "longer", "short"]),
    etag=st.sampled_from(['"one"', 'W/"weak"', None]),
    refusals=st.lists(st.sampled_from([429, 500, 502, 503, 504]), max_size=6),
)
@settings(max_examples=60)
def test_whatever_a_server_does_the_file_is_exact_or_an_error_says_why(
    cuts: list[int], size: int, connections: int, ranges: str, etag: str | None, refusals: list[int]
) -> None:
    with tempfile.TemporaryDirectory() as folder, serving() as server:
        server.content = CONTENT[:size]
        server.cuts, server.ranges, server.etag = cuts, ranges, etag
        server.refusals = [(status, {}) for status in refusals]
        host = Host(Path(folder), server)
        host.connections = connections
        try:
            host.make()
        except store.StoreError as error:
            assert "times in a row" in error.message or "cannot be read" in error.message, error.message
            assert not host.path.exists(), "what bears the name is whole"
            # The next run, with a server that has come to its senses, makes it.
            server.cuts, server.refusals, server.ranges = [], [], "good"
            host.make()
        assert host.path.read_bytes() == server.content
        assert host.left() == ["x.gguf"]


def test_a_run_that_is_given_up_is_taken_up_by_the_next(host: Host, server: Server) -> None:
    break_down_after(server, 20)
    host.connections = 1
    with pytest.raises(store.StoreError, match="cut off 4 times in a row") as caught:
        host.make()
    assert "goes on where it stopped" in caught.value.hint
    assert not host.path.exists()
    assert host.left() == [".x.gguf.v100ctl-incoming", ".x.gguf.v100ctl-incoming/part", ".x.gguf.v100ctl-incoming/state.json"]
    server.on_request = None
    server.requests.clear()
    host.make()
    assert host.path.read_bytes() == CONTENT
    assert asked_bytes(server) == len(CONTENT) - 20 * CHUNK_BYTES, "what came before is not asked for again"


def test_a_file_that_changes_in_the_middle_is_begun_anew(host: Host, server: Server) -> None:
    fresh = CONTENT[::-1]
    host.model["sha256"] = sha256(fresh)

    def change(number: int) -> None:
        if number == 10:
            server.content, server.etag = fresh, '"two"'

    server.on_request = change
    host.make()
    assert host.path.read_bytes() == fresh


def test_a_file_that_never_stays_the_same_is_given_up(host: Host, server: Server) -> None:
    def change(number: int) -> None:
        server.content = CONTENT[: len(CONTENT) - number]

    server.on_request = change
    with pytest.raises(store.StoreError, match="changed again and again"):
        host.make()
    assert host.left() == []


def test_servers_in_turn_that_name_the_same_bytes_differently_are_no_change(host: Host, server: Server) -> None:
    def another(number: int) -> None:
        server.etag = f'"{number}"'

    server.on_request = another
    host.make()
    assert host.path.read_bytes() == CONTENT


def test_what_changed_between_runs_is_begun_anew(host: Host, server: Server) -> None:
    break_down_after(server, 20)
    host.connections = 1
    with pytest.raises(store.StoreError):
        host.make()
    server.content, server.etag, server.on_request = CONTENT[::-1], '"two"', None
    host.model["sha256"] = sha256(server.content)
    host.make()
    assert host.path.read_bytes() == server.content


def test_what_a_power_cut_left_is_noticed_and_fetched_again(host: Host, server: Server) -> None:
    break_down_after(server, 20)
    host.connections = 1
    with pytest.raises(store.StoreError):
        host.make()
    part = host.path.parent / ".x.gguf.v100ctl-incoming" / "part"
    with part.open("r+b") as stream:
        stream.write(bytes(5000))
    server.on_request = None
    host.make()
    assert host.path.read_bytes() == CONTENT


@pytest.mark.parametrize(
    "state", ["", "{", "[]", '{"done": [1]}', '{"url": 1, "chunk_bytes": 65536, "total_bytes": "x", "done": 3}']
)
def test_a_state_file_that_is_nonsense_is_no_harm(host: Host, state: str) -> None:
    folder = host.path.parent / ".x.gguf.v100ctl-incoming"
    folder.mkdir(parents=True)
    (folder / "state.json").write_text(state)
    (folder / "part").write_bytes(b"half")
    host.make()
    assert host.path.read_bytes() == CONTENT


def test_another_file_than_the_inventory_says_leaves_nothing(host: Host) -> None:
    host.model["sha256"] = "ab" * 32
    with pytest.raises(store.StoreError, match=f"has the SHA-256 checksum {sha256(CONTENT)}, the inventory says {'ab' * 32}"):
        host.make()
    assert host.left() == []


def test_a_hub_that_says_another_digest_is_believed_before_the_file_comes(host: Host, server: Server) -> None:
    with serving() as storage:
        server.redirect, server.linked = storage.url, "cd" * 32
        with pytest.raises(store.StoreError, match=f"checksum {'cd' * 32}"):
            host.make()
        assert len(storage.requests) == 1
    assert host.left() == []


def test_another_size_than_the_inventory_says_is_refused_before_the_file_comes(host: Host, server: Server) -> None:
    host.model["size_bytes"] = 7
    with pytest.raises(store.StoreError, match=f"{len(CONTENT)} bytes, the inventory says 7"):
        host.make()
    assert len(server.requests) == 1


def test_a_token_goes_to_its_own_server_alone(host: Host, server: Server) -> None:
    with serving() as storage:
        server.redirect, server.linked, server.token = storage.url, sha256(CONTENT), TOKEN
        host.make(token=TOKEN)
        assert {request.get("authorization") for request in server.requests} == {f"Bearer {TOKEN}"}
        assert {request.get("authorization") for request in storage.requests} == {None}
        assert len(server.requests) == 1, "where it redirects to is asked directly"
    assert host.path.read_bytes() == CONTENT
    told = "".join(path.read_text() for path in (host.root / "state").rglob("*.json"))
    assert TOKEN not in told


def test_an_address_of_the_storage_that_expires_is_asked_for_anew(host: Host, server: Server) -> None:
    with serving() as storage:
        server.redirect = storage.url + "?signature=1"

        def expire(number: int) -> None:
            if number in (5, 12, 20):
                storage.refusals.append((403, {}))

        storage.on_request = expire
        host.make()
        assert host.path.read_bytes() == CONTENT
        assert 2 <= len(server.requests) <= 13


@pytest.mark.parametrize(
    ("status", "said", "hint"),
    [
        (401, "answered 401", "model_store_hf_token"),
        (403, "answered 403", "model_store_hf_token"),
        (404, "answered 404", "correct the address"),
        (410, "answered 410", "correct the address"),
    ],
)
def test_refusals_say_what_to_do(host: Host, server: Server, status: int, said: str, hint: str) -> None:
    server.refusals = [(status, {})]
    with pytest.raises(store.StoreError, match=said) as caught:
        host.make()
    assert hint in caught.value.hint
    assert len(server.requests) == 1
    assert host.left() == []


def test_a_token_that_does_not_suffice_says_so(host: Host, server: Server) -> None:
    server.token = "another"
    with pytest.raises(store.StoreError, match="Access to this model is restricted") as caught:
        host.make(token=TOKEN)
    assert "licence" in caught.value.hint
    assert TOKEN not in caught.value.message + caught.value.hint


def test_a_server_that_says_when_to_come_again_is_obeyed(host: Host, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float | None] = []
    wait = threading.Event.wait

    def briefly(event: threading.Event, timeout: float | None = None) -> bool:
        waited.append(timeout)
        return wait(event, 0.001)

    monkeypatch.setattr(threading.Event, "wait", briefly)
    server.refusals = [(429, {"Retry-After": "17"})]
    host.make()
    assert 17.0 in waited


def test_a_server_without_ranges_serves_by_one_connection(host: Host, server: Server) -> None:
    server.ranges = "none"
    server.cuts = [0, 5000]
    host.make()
    assert host.path.read_bytes() == CONTENT
    server.requests.clear()


def test_encryption_is_not_left(host: Host, server: Server) -> None:
    redirects = store._Redirects()
    request = store.urllib.request.Request("https://hub.example/x")
    with pytest.raises(store.StoreError, match="from https to http"):
        redirects.redirect_request(request, None, 302, "", {}, "http://hub.example/x")


def test_too_little_room_is_said_before_anything_is_written(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = store.shutil.disk_usage

    def little(path: str) -> Any:
        return usage(path)._replace(free=store.SPARE_BYTES + 1000)

    monkeypatch.setattr(store.shutil, "disk_usage", little)
    with pytest.raises(store.StoreError, match=r"No space left on device for .*it needs 2\.5 MiB"):
        host.make()
    assert host.left() == []


def test_a_disk_that_becomes_full_is_left_as_it_was(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.pwrite
    written = []

    def full(descriptor: int, data: bytes, offset: int) -> int:
        written.append(len(data))
        if len(written) > 9:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, data, offset)

    monkeypatch.setattr(store.os, "pwrite", full)
    with pytest.raises(store.StoreError, match=r"No space left on device: the disk with .* became full"):
        host.make()
    assert host.left() == []


def test_memory_does_not_grow_with_the_file(tmp_path: Path, server: Server) -> None:
    """The peak of a process that fetches 200 MB with the ordinary chunk size stays near that of one that fetches little."""
    program = (
        "import sys, resource; sys.argv = ['x']; sys.path.insert(0, sys.argv[0]);"
        "import importlib.util as u; s = u.spec_from_file_location('m', {script!r}); m = u.module_from_spec(s);"
        "sys.dont_write_bytecode = True; s.loader.exec_module(m); from pathlib import Path;"
        "model = dict(path={path!r}, sha256={sha256!r}, size_bytes=None, source=dict(kind='url', url={url!r}));"
        "st = m.Store(dict(schema='v100ctl/models/1', models=[model]), Path({state!r}));"
        "p = st.run('', lambda *a: None); assert not p, p[0].message;"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    )

    def peak_kib(content: bytes, name: str) -> int:
        server.content, server.etag = content, f'"{name}"'
        filled = program.format(
            script=str(SCRIPT),
            path=str(tmp_path / name),
            sha256=sha256(content),
            url=server.url,
            state=str(tmp_path / "state"),
        )
        done = subprocess.run([sys.executable, "-c", filled], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return int(done.stdout)

    small, large = peak_kib(CONTENT, "small"), peak_kib(bytes(200_000_000), "large")
    assert large - small < 30_000


def test_two_at_once_make_one_file(host: Host, server: Server) -> None:
    results: list[Any] = []
    threads = [threading.Thread(target=lambda: results.append(host.make().changed)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(map(len, results)) == [0, 0, 1], "the others waited, and found it there"
    assert host.path.read_bytes() == CONTENT
    assert len(server.requests) == 41


# The job


def start(tmp_path: Path, host: Host, *, script: Path = SCRIPT, token: str = "") -> dict[str, Any]:
    spec = tmp_path / "wanted.json"
    wanted = {"schema": "v100ctl/models/1", "models": [host.model], "connections": 2, "stall_timeout_s": 5, "attempts": 3}
    spec.write_text(json.dumps(wanted))
    argv = [sys.executable, "-B", str(script), "start", "--spec", str(spec), "--work", str(tmp_path / "jobs/job")]
    done = subprocess.run(argv, input=token, capture_output=True, text=True, check=True, timeout=30)
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def status(tmp_path: Path, script: Path = SCRIPT) -> dict[str, Any]:
    argv = [sys.executable, "-B", str(script), "status", "--work", str(tmp_path / "jobs/job")]
    answer: dict[str, Any] = json.loads(subprocess.run(argv, capture_output=True, text=True, check=True).stdout)
    return answer


def wait_for_end(tmp_path: Path, script: Path) -> dict[str, Any]:
    deadline_s = time.monotonic() + 60
    while (found := status(tmp_path, script))["state"] == "running":
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    return found


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """The script with its folders below this test's, as it would be with another root, and with chunks of 64 KiB."""
    text = SCRIPT.read_text(encoding="utf-8")
    for before, after in (
        ('Path("/var/lib/v100ctl/state")', f"Path({str(tmp_path / 'state')!r})"),
        ("CHUNK_BYTES = 32 * MIB", f"CHUNK_BYTES = {CHUNK_BYTES}"),
        ("BACKOFF_S = 1.0", "BACKOFF_S = 0.01"),
    ):
        assert text.count(before) == 1
        text = text.replace(before, after)
    path = tmp_path / "model_store.py"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_job_goes_on_by_itself_and_knows_its_token(tmp_path: Path, host: Host, server: Server, script: Path) -> None:
    server.token = TOKEN
    seen: list[str] = []

    def look(number: int) -> None:
        if number == 5:
            for process in Path("/proc").glob("[0-9]*"):
                try:
                    words = (process / "cmdline").read_bytes()
                    if str(tmp_path).encode() in words:
                        seen.append((words + (process / "environ").read_bytes()).decode())
                except OSError:
                    continue

    server.on_request = look
    assert start(tmp_path, host, script=script, token=TOKEN)["started"]
    found = wait_for_end(tmp_path, script)
    assert (found["state"], found["changed"], found["waiting"]) == ("done", [str(host.path)], [])
    assert host.path.read_bytes() == CONTENT
    assert seen
    assert TOKEN not in "".join(seen)
    kept = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file() and path != host.path)
    assert TOKEN.encode() not in kept


def test_a_job_that_is_killed_at_any_moment_is_taken_up(tmp_path: Path, host: Host, server: Server, script: Path) -> None:
    """Killed again and again, each time a little later: nothing under the final name, and in the end the file."""
    fallen = 0
    for moment in (2, 12, 30):
        server.requests.clear()
        arrived = threading.Event()

        def slow(number: int, moment: int = moment, arrived: threading.Event = arrived) -> None:
            if number >= moment:
                arrived.set()
                time.sleep(0.2)

        server.on_request = slow
        start(tmp_path, host, script=script)
        assert arrived.wait(60)
        for process in Path("/proc").glob("[0-9]*"):
            try:
                words = (process / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if str(script).encode() in words and b"run" in words:
                os.kill(int(process.name), signal.SIGKILL)
                fallen += 1
        found = wait_for_end(tmp_path, script)
        assert found["state"] == "failed", found
        assert "the job died while" in found["message"]
        assert not host.path.exists()
    assert fallen == 3
    server.on_request = None
    start(tmp_path, host, script=script)
    assert wait_for_end(tmp_path, script)["state"] == "done"
    assert host.path.read_bytes() == CONTENT


def test_a_second_start_attaches(tmp_path: Path, host: Host, server: Server, script: Path) -> None:
    server.on_request = lambda number: time.sleep(0.05)
    assert start(tmp_path, host, script=script)["started"]
    assert not start(tmp_path, host, script=script)["started"]
    assert wait_for_end(tmp_path, script)["state"] == "done"
    assert len(server.requests) == 41
    assert start(tmp_path, host, script=script)["started"]
    assert wait_for_end(tmp_path, script)["changed"] == []


# What is brought, made and removed


def bring(host: Host, content: bytes, *, slice_bytes: int = 1000) -> None:
    """As the role does: slices of a file elsewhere, one after the other."""
    elsewhere = host.root / "elsewhere"
    elsewhere.write_bytes(content)
    for offset in range(0, len(content), slice_bytes):
        piece = host.root / "slice"
        said = store.take_slice(elsewhere, offset, slice_bytes, piece, None)
        assert said == {"size_bytes": len(content), "slice_bytes": min(slice_bytes, len(content) - offset)}
        Path(store.Store({"schema": "v100ctl/models/1"}).incoming(str(host.path))).mkdir(parents=True, exist_ok=True)
        store.append(str(host.path), host.model["sha256"], len(content), piece, offset)


@pytest.fixture
def brought(host: Host, monkeypatch: pytest.MonkeyPatch) -> Host:
    monkeypatch.setattr(store, "STATE_DIR", host.root / "state")
    monkeypatch.setattr(store.Store.__init__, "__defaults__", (host.root / "state",))
    host.model["source"] = {"kind": "controller", "path": "/home/me/x.gguf"}
    return host


def test_what_is_brought_in_slices_is_verified(brought: Host) -> None:
    assert brought.make().waiting == [str(brought.path)]
    bring(brought, CONTENT, slice_bytes=1_000_000)
    made = brought.make()
    assert (made.waiting, made.changed) == ([], [str(brought.path)])
    assert brought.path.read_bytes() == CONTENT
    assert brought.left() == ["x.gguf"]


def test_slices_that_were_brought_before_a_kill_are_kept(brought: Host) -> None:
    brought.make()
    elsewhere, piece = brought.root / "elsewhere", brought.root / "slice"
    elsewhere.write_bytes(CONTENT)
    incoming = brought.path.parent / ".x.gguf.v100ctl-incoming"
    incoming.mkdir(parents=True)
    store.take_slice(elsewhere, 0, 1_000_000, piece, None)
    store.append(str(brought.path), brought.model["sha256"], len(CONTENT), piece, 0)
    with (incoming / "part").open("ab") as stream:
        stream.write(b"half of a slice that was being added")
    assert brought.make().waiting == [str(brought.path)]
    spec = {"schema": "v100ctl/models/1", "models": [brought.model]}
    assert store.Store(spec).look()["todo"][0]["done_bytes"] == 1_000_000
    for offset in (1_000_000, 2_000_000):
        store.take_slice(elsewhere, offset, 1_000_000, piece, None)
        store.append(str(brought.path), brought.model["sha256"], len(CONTENT), piece, offset)
    store.take_slice(elsewhere, 5, 10, piece, None)
    with pytest.raises(store.StoreError, match="does not go on at 5"):
        store.append(str(brought.path), brought.model["sha256"], len(CONTENT), piece, 5)
    brought.make()
    assert brought.path.read_bytes() == CONTENT


def test_what_is_brought_wrong_is_dropped(brought: Host) -> None:
    bring(brought, b"another file")
    with pytest.raises(store.StoreError, match=f"has the SHA-256 checksum {sha256(b'another file')}"):
        brought.make()
    assert brought.left() == []


def test_a_file_of_the_users_own_is_verified_and_left_alone(host: Host) -> None:
    host.model["source"] = {"kind": "host"}
    with pytest.raises(store.StoreError, match="it does not exist"):
        host.make()
    host.path.parent.mkdir()
    host.path.write_bytes(b"mine")
    host.path.chmod(0o640)
    with pytest.raises(store.StoreError, match=f"has the SHA-256 {sha256(b'mine')}, not"):
        host.make()
    assert host.path.read_bytes() == b"mine"
    host.model["sha256"] = sha256(b"mine")
    assert host.make().changed == [str(host.path)]
    assert host.make().changed == []
    assert oct(host.path.stat().st_mode)[-3:] == "640"


def test_what_was_verified_is_read_again_where_that_is_asked_for(host: Host) -> None:
    host.make()
    at = host.path.stat()
    host.path.write_bytes(b"x" + CONTENT[1:])
    os.utime(host.path, ns=(at.st_atime_ns, at.st_mtime_ns))
    assert host.make().changed == [], "its size and time are as they were"
    assert host.make(hashes=True).changed == [str(host.path)]
    assert host.path.read_bytes() == CONTENT
    assert host.make(hashes=True).changed == []


def test_what_is_no_longer_wanted_is_removed_last(host: Host) -> None:
    models = host.path.parent
    folder = models / "0123456789ab-old"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    host.make(remove=[str(folder), str(models / "gone")])
    assert host.left() == ["x.gguf"]
    old = models / "0123456789ab-other"
    old.write_bytes(b"other")
    host.model["sha256"], host.model["path"] = "ab" * 32, str(models / "y.gguf")
    with pytest.raises(store.StoreError):
        host.make(remove=[str(old)])
    assert old.exists(), "while what replaces it has not come"


def test_what_killed_runs_left_of_files_that_nobody_wants_is_removed(host: Host) -> None:
    stale = host.path.parent / ".old.gguf.v100ctl-incoming"
    stale.mkdir(parents=True)
    (stale / "part").write_bytes(b"half")
    host.make()
    assert host.left() == ["x.gguf"]


class Maker:
    """A host with a source model and a step that makes another of it."""

    def __init__(self, root: Path, words: list[str], **step: Any) -> None:
        self.root = root
        self.source = root / "models" / "f16.gguf"
        self.path = root / "models" / "q.gguf"
        self.source.parent.mkdir(exist_ok=True)
        self.source.write_bytes(b"weights")
        # The step runs as nobody, who has to get here.
        for folder in (root, *list(root.parents)[:3]):
            folder.chmod(folder.stat().st_mode | 0o055)
        self.step: dict[str, Any] = {
            "kind": "prepared",
            "recipe": "r1",
            "argv": words,
            "environment": {"KIND": "good"},
            "timeout_s": 20,
            "inputs": [str(self.source)],
            **step,
        }

    def make(self) -> Any:
        models = [
            {"path": str(self.source), "sha256": sha256(b"weights"), "size_bytes": None, "source": {"kind": "host"}},
            {"path": str(self.path), "sha256": "", "size_bytes": None, "source": self.step},
        ]
        made = store.Store({"schema": "v100ctl/models/1", "models": models}, self.root / "state")
        problems = made.run("", lambda *said: None)
        if problems:
            raise problems[0]
        return made


def shell(text: str) -> list[str]:
    return ["/bin/sh", "-c", text, "step", "{output}"]


needs_root = pytest.mark.skipif(os.getuid() != 0, reason="a step is run as nobody, and only root can do that")


@needs_root
def test_a_step_makes_a_file_once(tmp_path: Path) -> None:
    maker = Maker(tmp_path, shell(f'cat {tmp_path}/models/f16.gguf > "$1"; id -u >> "$1"; echo $KIND >> "$1"; echo "[ 1/ 2]"'))
    made = maker.make()
    assert maker.path.read_text() == f"weights{store.PREPARE_UID}\ngood\n"
    status = maker.path.stat()
    assert (status.st_uid, oct(status.st_mode)[-3:]) == (0, "644")
    record = json.loads(made.record_path(str(maker.path)).read_text())
    assert record["recipe"] == "r1"
    assert record["sha256"] == sha256(maker.path.read_bytes())
    assert record["inputs"] == {str(maker.source): sha256(b"weights")}
    assert record["argv"] == maker.step["argv"]
    assert maker.make().changed == []
    maker.step["recipe"] = "r2"
    assert maker.make().changed == [str(maker.path)], "another recipe makes it again"


@needs_root
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('echo half > "$1"; echo it is broken >&2; exit 3', "exit status 3\nit is broken"),
        ("true", "wrote nothing to its output"),
        ('ln -s /etc/hostname "$1"', "wrote nothing to its output"),
        ('echo half > "$1"; kill -9 $$', "signal 9"),
        ('echo half > "$1"; sleep 60', "did not end within 1 s"),
    ],
)
def test_a_step_that_fails_leaves_nothing(tmp_path: Path, text: str, said: str) -> None:
    maker = Maker(tmp_path, shell(text), timeout_s=1)
    with pytest.raises(store.StoreError) as caught:
        maker.make()
    assert said in caught.value.message
    assert sorted(path.name for path in maker.path.parent.iterdir()) == ["f16.gguf"]


def test_it_runs_on_the_oldest_python() -> None:
    """The hosts' oldest is 3.8; here it is enough that its grammar takes the script."""
    import ast

    ast.parse(SCRIPT.read_text(encoding="utf-8"), feature_version=(3, 8))
