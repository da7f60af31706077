#!/usr/bin/env python3
"""Puts verified model files on a host: downloads, takes over what was copied, prepares, removes.

Runs where nothing of ours is installed: standard library only, Python 3.8 or later. Each verb prints one JSON object.

``look --spec JSON``
    What of the wanted is there already: ``{"good", "todo": [{"path", "kind", "state", "done_bytes"}], "remove", "leftovers"}``.
``start --spec FILE --work DIR``
    Starts a job that goes on by itself when the caller goes away, or attaches to the one that runs in DIR already. A token for
    the model hub is read from stdin: it is never in a file, an argument or an environment.
``status --work DIR``
    ``{"state": "absent|running|done|failed", "phase", "done", "total", "unit", "message", "hint", "changed", "waiting"}``;
    ``waiting`` are files that the caller has to bring.
``slice --path FILE --offset N --size N --out FILE [--uid N]``
    Copies a part of a file, for one transfer. ``append --path FILE --sha256 HEX --size N --slice FILE --offset N`` takes it in
    elsewhere; ``size`` is that of the whole file.

``room --path FILE --size N``
    Refuses what there is no room for.

A spec is ``{"schema": "v100ctl/models/1", "models": [...], "remove": [PATH], "connections", "stall_timeout_s", "attempts",
"hashes"}``; with ``hashes`` what was verified before is read again. A model is ``{"path", "sha256", "size_bytes", "source":
{"kind": ...}}``. Kinds: ``host`` lies there already; ``url`` and ``hf``
are downloaded from ``url``; ``controller``, ``pypi`` and ``fleet`` are brought; ``prepared`` is made by a program from others.

A file is made in a folder of its own beside its place (``.NAME.v100ctl-incoming``), verified, and renamed in. What was verified
is recorded with size and time in the folder of records, so that it is not read again.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import email.utils
import errno
import fcntl
import hashlib
import http.client
import json
import os
import re
import shutil
import signal
import socket
import ssl
import stat
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections import deque
from pathlib import Path
from typing import IO, Any, Callable, Dict, Iterator, Mapping, Sequence

SCHEMA = "v100ctl/models/1"
STATE_DIR = Path("/var/lib/v100ctl/state")
INCOMING_SUFFIX = ".v100ctl-incoming"
#: What the role has to bring.
BROUGHT = ("controller", "pypi", "fleet")

MIB = 1024**2
BLOCK_BYTES = MIB
#: What one request asks for. A kill loses at most this much of each connection.
CHUNK_BYTES = 32 * MIB
#: Left free on a disk beside what is counted.
SPARE_BYTES = 64 * MIB
#: The first pause after a failed request; each further one is twice as long, up to the second figure.
BACKOFF_S = 1.0
MAX_BACKOFF_S = 30.0
#: The longest that a server's `Retry-After` is obeyed.
MAX_RETRY_AFTER_S = 300.0
#: How often a file that changes while it comes is begun anew.
RESTARTS = 3
STATUS_INTERVAL_S = 0.5
LOG_TAIL_LINES = 15
#: Whom a preparing program runs as: nobody, on every distribution that is provisioned.
PREPARE_UID = PREPARE_GID = 65534
USER_AGENT = "v100ctl-model-store"

JsonObject = Dict[str, Any]
#: ``(phase, done, total, unit)``.
Report = Callable[[str, int, int, str], None]


class StoreError(Exception):
    """Something that cannot be done, said for a person: what was wrong and where, and as ``hint`` what to do next."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class _Interrupted(Exception):
    """The connection broke off, or the server said to come again: worth another attempt."""

    def __init__(self, message: str, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class _Changed(Exception):
    """The file on the server is no longer the one that was begun."""


class _BadRanges(Exception):
    """The server does not send the parts that it is asked for."""


# --------------------------------------------------------------------------------------------------------------- small tools


def gib(size_bytes: int) -> str:
    """A size for people."""
    return f"{size_bytes / 1024**3:.1f} GiB" if size_bytes >= 1024**3 // 10 else f"{size_bytes / MIB:.1f} MiB"


def sha256_file(path: Path, tell: Callable[[int], None] = lambda done: None) -> str:
    """The SHA-256 of a file's content, in hexadecimal; constant memory. ``tell`` gets the bytes read so far."""
    digest, done = hashlib.sha256(), 0
    with path.open("rb") as stream:
        for block in iter(lambda: stream.read(BLOCK_BYTES), b""):
            digest.update(block)
            done += len(block)
            tell(done)
    return digest.hexdigest()


def _write_atomic(path: Path, document: Mapping[str, Any]) -> None:
    aside = path.with_name(f".{path.name}.{os.getpid()}.part")
    with aside.open("w", encoding="utf-8") as stream:
        json.dump(document, stream, sort_keys=True)
        stream.write("\n")
        stream.flush()
        os.fsync(stream.fileno())
    aside.replace(path)


def _read_json(path: Path) -> JsonObject:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}


def _fsync(path: Path) -> None:
    descriptor = os.open(str(path), os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(str(path))
    else:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()


def shown_url(url: str) -> str:
    """A URL for a message: without a password and without the query, where signatures and keys are."""
    address = urllib.parse.urlsplit(url)
    return urllib.parse.urlunsplit((address.scheme, address.netloc.rpartition("@")[2], address.path, "", ""))


def _origin(url: str) -> tuple[str, str, int]:
    address = urllib.parse.urlsplit(url)
    port = address.port or (443 if address.scheme == "https" else 80)
    return address.scheme, (address.hostname or "").lower(), port


@contextlib.contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Turns the system's refusals to write into :class:`StoreError`."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StoreError(
                f"No space left on device: the disk with `{folder}` became full", "free some space there and run it again"
            ) from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise StoreError(f"`{error.filename or folder}` cannot be written: {error.strerror}") from error
        raise


def check_space(folder: Path, needed_bytes: int, what: str) -> None:
    """Refuses what would not fit, before anything of it is written.

    Raises:
        StoreError: There is too little room.
    """
    free_bytes = shutil.disk_usage(str(folder)).free
    if free_bytes < needed_bytes + SPARE_BYTES:
        raise StoreError(
            f"No space left on device for {what}: it needs {gib(needed_bytes)}, and {gib(SPARE_BYTES)} are kept free; "
            f"the disk with `{folder}` has {gib(free_bytes)}",
            f"free at least {gib(needed_bytes + SPARE_BYTES - free_bytes)} there",
        )


# ------------------------------------------------------------------------------------------------------------------ downloads


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects; a token stays with the server that it is for, and what began encrypted stays so."""

    def __init__(self) -> None:
        self.first_headers: Any = None

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        # The hub's own answer, which redirects to its storage, has the digest of the file in its headers.
        if self.first_headers is None:
            self.first_headers = headers
        if req.full_url.startswith("https:") and not newurl.startswith("https:"):
            raise StoreError(f"`{shown_url(req.full_url)}` redirects from https to http", "use an address that stays encrypted")
        # Python 3.8 to 3.10 do not know 308, which means what 307 does.
        request = super().redirect_request(req, fp, 307 if code == 308 else code, msg, headers, newurl)
        if request is not None and _origin(newurl) != _origin(req.full_url):
            request.remove_header("Authorization")
        return request

    http_error_308 = urllib.request.HTTPRedirectHandler.http_error_302


class Answer:
    """What a server answered to one request for a part of a file: checked, and read block by block."""

    def __init__(self, response: Any, url: str, linked_sha256: str) -> None:
        headers = response.headers
        self.response = response
        self.url = url
        #: What the hub says that the file's SHA-256 is; empty where it does not.
        self.linked_sha256 = linked_sha256
        self.partial = response.status == 206
        self.begin, self.end, self.total_bytes = 0, -1, -1
        etag = headers.get("ETag", "")
        self.validator = etag or headers.get("Last-Modified", "")
        if headers.get("Content-Encoding", "identity").lower() not in ("", "identity"):
            raise StoreError(f"`{shown_url(url)}` comes compressed, which is another file than was asked for")
        length = headers.get("Content-Length", "")
        if self.partial:
            found = re.fullmatch(r"bytes ([0-9]{1,18})-([0-9]{1,18})/([0-9]{1,18})", headers.get("Content-Range", "").strip())
            if found is None:
                raise _BadRanges("it answers 206 without saying which part that is")
            self.begin, self.end, self.total_bytes = int(found[1]), int(found[2]) + 1, int(found[3])
        elif length.isdigit() and len(length) < 19:
            self.end = self.total_bytes = int(length)

    def blocks(self) -> Iterator[bytes]:
        """The content as it comes.

        Raises:
            _Interrupted: The connection broke off.
        """
        while True:
            try:
                block = self.response.read1(BLOCK_BYTES)
            except (OSError, http.client.HTTPException) as error:
                raise _Interrupted(_reason(error)) from error
            if not block:
                return
            yield block

    def close(self) -> None:
        """Let go of the connection."""
        with contextlib.suppress(OSError, http.client.HTTPException):
            self.response.close()


def _reason(error: BaseException) -> str:
    inner = getattr(error, "reason", None)
    if isinstance(inner, BaseException):
        return _reason(inner)
    if isinstance(error, socket.timeout):
        return "nothing came for too long"
    if isinstance(error, http.client.IncompleteRead):
        return "the answer ended too early"
    strerror = getattr(error, "strerror", None)
    return str(strerror or str(error) or type(error).__name__)


class Server:
    """Where one file comes from. Proxies come from the usual environment variables."""

    def __init__(self, url: str, *, token: str, timeout_s: float) -> None:
        address = urllib.parse.urlsplit(url)
        if address.scheme not in ("http", "https") or not address.hostname:
            raise StoreError(f"`{shown_url(url)}` is not an http or https address")
        self.url = url
        self._token = token
        self._timeout_s = timeout_s
        #: Where the file was redirected to: asked directly from then on, as long as that works.
        self._location = url

    def ask(self, begin: int, end: int | None) -> Answer:
        """The file from ``begin`` up to ``end``.

        Raises:
            StoreError: It cannot be had.
            _Interrupted: Worth another attempt.
            _BadRanges: The answer is no part of the file.
        """
        location = self._location
        try:
            return self._ask(location, begin, end)
        except StoreError:
            if location == self.url:
                raise
            # Signed addresses of a hub's storage expire.
            self._location = self.url
            return self._ask(self.url, begin, end)

    def _ask(self, url: str, begin: int, end: int | None) -> Answer:
        redirects = _Redirects()
        request = urllib.request.Request(url, headers={"User-Agent": USER_AGENT, "Accept-Encoding": "identity"})  # noqa: S310 - the scheme was checked
        if end is not None:
            request.add_header("Range", f"bytes={begin}-{end - 1}")
        if self._token and _origin(url) == _origin(self.url):
            request.add_header("Authorization", f"Bearer {self._token}")
        try:
            response = urllib.request.build_opener(redirects).open(request, timeout=self._timeout_s)
        except urllib.error.HTTPError as error:
            with error:
                raise self._refused(error, begin) from error
        except urllib.error.URLError as error:
            if isinstance(error.reason, ssl.SSLCertVerificationError):
                raise StoreError(
                    f"the certificate of `{shown_url(url)}` is not trusted: {error.reason.verify_message}",
                    "install `ca-certificates`, or name the authority's file in `SSL_CERT_FILE`",
                ) from error
            raise _Interrupted(_reason(error)) from error
        except (OSError, http.client.HTTPException, UnicodeError) as error:
            raise _Interrupted(_reason(error)) from error
        try:
            if response.status not in (200, 206):
                raise StoreError(f"`{shown_url(url)}`: the server answered {response.status}")
            self._location = response.geturl()
            linked = (redirects.first_headers or response.headers).get("X-Linked-Etag", "")
            linked = linked[2:] if linked.startswith("W/") else linked
            return Answer(response, url, linked.strip('"').lower())
        except BaseException:
            response.close()
            raise

    def _refused(self, error: urllib.error.HTTPError, begin: int) -> Exception:
        where, status = shown_url(self.url), error.code
        said = f"`{where}`: the server answered {status} {error.reason}".rstrip()
        hub = error.headers.get("X-Error-Message", "")
        if hub:
            said += f" ({' '.join(hub.split())[:300]})"
        if status in (408, 425, 429, 500, 502, 503, 504):
            return _Interrupted(said, _retry_after_s(error.headers.get("Retry-After", "")))
        if status in (401, 403):
            if self._token:
                return StoreError(
                    said, "the token may not read it: on the model's page the licence may have to be accepted first"
                )
            return StoreError(
                said, "it needs a token: `model_store_hf_token` for a model hub, or fetch it here and use `from_controller`"
            )
        if status in (404, 410):
            return StoreError(said, "correct the address, the file's name or the revision in the inventory")
        if status == 416:
            # An empty file has no parts.
            return _Changed() if begin else _BadRanges("it has no first part")
        return StoreError(said)


def _retry_after_s(value: str) -> float:
    if value.isdigit():
        return min(float(value), MAX_RETRY_AFTER_S)
    try:
        moment = email.utils.parsedate_to_datetime(value)
        return min(max(moment.timestamp() - time.time(), 0.0), MAX_RETRY_AFTER_S)
    except (TypeError, ValueError, OverflowError):
        return 0.0


class Download:
    """One file from a web server into ``folder``: by several connections, resumed after a kill, begun anew when it changes.

    ``folder`` holds ``part`` and ``state.json``, which says what of it is there: ``{"url", "total_bytes", "validator",
    "chunk_bytes", "done": [chunk numbers]}``.
    """

    def __init__(
        self,
        server: Server,
        folder: Path,
        *,
        sha256: str,
        size_bytes: int | None,
        connections: int,
        attempts: int,
        tell: Callable[[int, int], None],
    ) -> None:
        self.part = folder / "part"
        self.resumed = False
        self._server = server
        self._state_path = folder / "state.json"
        self._sha256 = sha256
        self._size_bytes = size_bytes
        self._connections = max(1, connections)
        self._attempts = max(1, attempts)
        self._tell = tell
        self._ranges = True
        self._strict = True
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._validator = ""
        self._total_bytes = -1
        self._done: set[int] = set()
        self._came_bytes = 0

    def run(self) -> None:
        """Fetch all of it; ``part`` is complete and not verified then.

        Raises:
            StoreError: It cannot be had. What came is kept for the next run where that makes sense.
        """
        self._load_state()
        for restart in range(RESTARTS + 1):
            try:
                self._once()
                return
            except _Changed:
                if restart == RESTARTS:
                    break
                # Servers that answer in turn may each have a name of their own for the same bytes: the digest decides.
                self._strict = restart < RESTARTS - 2
            except _BadRanges as error:
                if not self._ranges:
                    raise StoreError(f"`{shown_url(self._server.url)}` cannot be read: {error}") from error
                self._ranges = False
            self.discard()
        raise StoreError(f"`{shown_url(self._server.url)}` changed again and again while it was read", "try again later")

    def discard(self) -> None:
        """Forget everything that came."""
        self.resumed = False
        self._begin_anew()
        for path in (self._state_path, self.part):
            _remove(path)

    def _load_state(self) -> None:
        state = _read_json(self._state_path)
        total_bytes, done = state.get("total_bytes"), state.get("done")
        fits = state.get("url") == self._server.url and state.get("chunk_bytes") == CHUNK_BYTES
        if not fits or not isinstance(total_bytes, int) or not isinstance(done, list) or not self.part.is_file():
            self.discard()
            return
        count = -(-total_bytes // CHUNK_BYTES)
        self._total_bytes, self._validator = total_bytes, str(state.get("validator", ""))
        self._done = {number for number in done if isinstance(number, int) and 0 <= number < count}
        self._came_bytes = sum(end - begin for begin, end in map(self._bounds, self._done))
        if self.part.stat().st_size != total_bytes:
            self.discard()
        self.resumed = bool(self._done)

    def _save_state(self) -> None:
        state = {
            "url": self._server.url,
            "total_bytes": self._total_bytes,
            "validator": self._validator,
            "chunk_bytes": CHUNK_BYTES,
            "done": sorted(self._done),
        }
        _write_atomic(self._state_path, state)

    def _bounds(self, chunk: int) -> tuple[int, int]:
        begin = chunk * CHUNK_BYTES
        return begin, min(begin + CHUNK_BYTES, self._total_bytes)

    def _once(self) -> None:
        self._stop, self._error = threading.Event(), None
        if not self._ranges:
            self._stream()
            return
        missing: deque[int] = deque()
        if self._total_bytes >= 0:
            missing.extend(chunk for chunk in range(-(-self._total_bytes // CHUNK_BYTES)) if chunk not in self._done)
            if not missing:
                return
        first = missing[0] if missing else 0
        begin = first * CHUNK_BYTES
        answer = self._patiently(lambda: self._server.ask(begin, begin + CHUNK_BYTES), self._stop)
        try:
            if not answer.partial:
                if self._done:
                    raise _Changed
                self._stream(answer)
                return
            self._check(answer, begin)
        finally:
            # Its first part is asked for again by a worker: one small request more, and no special case.
            answer.close()
        if not missing:
            missing.extend(range(-(-self._total_bytes // CHUNK_BYTES)))
            self._check_first(answer)
            with self.part.open("wb") as stream:
                stream.truncate(self._total_bytes)
            self._save_state()
        self._work(missing)

    def _work(self, missing: deque[int]) -> None:
        descriptor = os.open(str(self.part), os.O_WRONLY)
        try:
            workers = [
                threading.Thread(target=self._worker, args=(missing, descriptor), daemon=True)
                for _ in range(min(self._connections, len(missing)))
            ]
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()
        finally:
            os.close(descriptor)
        if self._error is not None:
            raise self._error

    def _worker(self, missing: deque[int], descriptor: int) -> None:
        try:
            while not self._stop.is_set():
                with self._lock:
                    if not missing:
                        return
                    chunk = missing.popleft()
                self._fetch(chunk, descriptor)
                with self._lock:
                    self._done.add(chunk)
                    self._save_state()
        except BaseException as error:  # the thread that waits raises it
            with self._lock:
                # What one finds first, the others only suffer from.
                self._error = self._error or error
            self._stop.set()

    def _fetch(self, chunk: int, descriptor: int) -> None:
        offset, end = self._bounds(chunk)

        def go_on() -> None:
            nonlocal offset
            answer = self._server.ask(offset, end)
            try:
                self._check(answer, offset)
                for block in answer.blocks():
                    block = block[: end - offset]
                    written = 0
                    while written < len(block):
                        written += os.pwrite(descriptor, block[written:], offset + written)
                    offset += len(block)
                    with self._lock:
                        self._came_bytes += len(block)
                        self._tell(self._came_bytes, self._total_bytes)
                    if offset >= end or self._stop.is_set():
                        return
            finally:
                answer.close()
            raise _Interrupted("the answer ended too early")

        while offset < end and not self._stop.is_set():
            self._patiently(go_on, self._stop, lambda: offset)

    def _check(self, answer: Answer, begin: int) -> None:
        """Is an answer the part that was asked for, of the file that was begun?"""
        if not answer.partial:
            raise _BadRanges("it sends the whole file where a part was asked for")
        if answer.begin != begin or answer.end <= begin:
            raise _BadRanges("it sends another part than was asked for")
        with self._lock:
            if self._total_bytes < 0:
                self._total_bytes, self._validator = answer.total_bytes, answer.validator
            elif answer.total_bytes != self._total_bytes or (self._strict and answer.validator != self._validator):
                raise _Changed

    def _check_first(self, answer: Answer) -> None:
        """Refuse another file before gigabytes of it have come, and one that there is no room for."""
        linked = answer.linked_sha256
        if len(linked) == 64 and linked != self._sha256:
            raise StoreError(
                f"`{shown_url(self._server.url)}` has the SHA-256 checksum {linked}, the inventory says {self._sha256}",
                "correct the inventory's `sha256`, or pin the revision that has this file",
            )
        if answer.total_bytes < 0:
            return
        if self._size_bytes is not None and answer.total_bytes != self._size_bytes:
            raise StoreError(
                f"`{shown_url(self._server.url)}` has {answer.total_bytes} bytes, the inventory says {self._size_bytes}",
                "correct `size_bytes`, or the address",
            )
        check_space(self.part.parent, answer.total_bytes, f"`{shown_url(self._server.url)}`")

    def _stream(self, answer: Answer | None = None) -> None:
        """From a server that has no ranges: one connection, from the beginning each time."""
        given = [answer] if answer is not None else []

        def whole() -> None:
            current = given.pop() if given else self._server.ask(0, None)
            try:
                if current.partial:
                    raise _BadRanges("it sends a part where the whole file was asked for")
                self._check_first(current)
                came = 0
                with self.part.open("wb") as stream:
                    for block in current.blocks():
                        stream.write(block)
                        came += len(block)
                        self._tell(came, max(current.total_bytes, 0))
                        if self._size_bytes is not None and came > self._size_bytes:
                            raise StoreError(
                                f"`{shown_url(self._server.url)}` is larger than the {self._size_bytes} bytes of the inventory"
                            )
            finally:
                current.close()
            if 0 <= came < current.total_bytes:
                raise _Interrupted(f"{came} of {current.total_bytes} bytes came")

        self._patiently(whole, self._stop)

    def _patiently(self, attempt: Callable[[], Any], stop: threading.Event, mark: Callable[[], int] = lambda: 0) -> Any:
        """``attempt`` until it works, with pauses; given up after so many failures in a row without progress of ``mark``."""
        failures, reached = 0, mark()
        while True:
            try:
                return attempt()
            except _Interrupted as error:
                if mark() > reached:
                    failures, reached = 0, mark()
                failures += 1
                if failures >= self._attempts:
                    raise StoreError(
                        f"`{shown_url(self._server.url)}` was cut off {failures} times in a row: {error}",
                        "run it again: the download goes on where it stopped",
                    ) from error
                pause_s = max(error.retry_after_s, min(BACKOFF_S * 2 ** (failures - 1), MAX_BACKOFF_S))
                if stop.wait(pause_s):
                    return None


# ------------------------------------------------------------------------------------------------------------------ the store


class Store:
    """The models of one host. ``state_dir`` holds what is known of them (``models/``) and locks (``model_store/locks/``)."""

    def __init__(self, spec: Mapping[str, Any], state_dir: Path = STATE_DIR) -> None:
        if spec.get("schema") != SCHEMA:
            raise StoreError(f"this script reads {SCHEMA}, not {spec.get('schema')}")
        self.spec = spec
        self.models: Sequence[JsonObject] = list(spec.get("models", []))
        self.records = state_dir / "models"
        self.locks = state_dir / "model_store" / "locks"
        self.changed: list[str] = []
        self.waiting: list[str] = []

    # What is there

    def record_path(self, path: str) -> Path:
        """Where the probe looks for what was verified of this model."""
        return self.records / f"{Path(path).name}-{hashlib.sha256(path.encode()).hexdigest()[:12]}.json"

    def verified(self, model: Mapping[str, Any]) -> bool:
        """Whether the file is there, and is as it was when it was verified as just this model."""
        record = _read_json(self.record_path(model["path"]))
        try:
            status = Path(model["path"]).stat()
        except OSError:
            return False
        if not stat.S_ISREG(status.st_mode) or (record.get("size_bytes"), record.get("mtime_s")) != (
            status.st_size,
            int(status.st_mtime),
        ):
            return False
        if self.spec.get("hashes") and sha256_file(Path(model["path"])) != record.get("sha256"):
            return False
        if model["source"]["kind"] == "prepared":
            return bool(record.get("recipe") == model["source"]["recipe"] and record.get("sha256"))
        return bool(record.get("sha256") == model["sha256"])

    def look(self) -> JsonObject:
        """See the module."""
        todo = []
        for model in self.models:
            if self.verified(model):
                continue
            exists = Path(model["path"]).exists()
            todo.append(
                {
                    "path": model["path"],
                    "kind": model["source"]["kind"],
                    "state": "unverified" if exists else "absent",
                    "done_bytes": self.brought_bytes(model),
                }
            )
        remove = [path for path in self.spec.get("remove", []) if os.path.lexists(path)]
        leftovers = [str(path) for path in self.leftovers()]
        return {"good": not todo and not remove and not leftovers, "todo": todo, "remove": remove, "leftovers": leftovers}

    def incoming(self, path: str) -> Path:
        """The folder in which a file is made."""
        place = Path(path)
        return place.with_name(f".{place.name}{INCOMING_SUFFIX}")

    def leftovers(self) -> list[Path]:
        """What killed runs left of files that are no longer wanted, in the folders that this host's models go to."""
        fetched = [model["path"] for model in self.models if model["source"]["kind"] != "host"]
        wanted = {self.incoming(path) for path in fetched}
        found = []
        for folder in sorted({Path(path).parent for path in fetched}):
            found += [path for path in sorted(folder.glob(f".*{INCOMING_SUFFIX}")) if path not in wanted]
        return found

    def brought_bytes(self, model: Mapping[str, Any]) -> int:
        """How much of a file that is brought in slices has come."""
        state = _read_json(self.incoming(model["path"]) / "state.json")
        done = state.get("brought_bytes")
        return done if isinstance(done, int) and state.get("sha256") == model["sha256"] else 0

    def brought(self, model: Mapping[str, Any]) -> bool:
        """Whether all of such a file has come."""
        total_bytes = _read_json(self.incoming(model["path"]) / "state.json").get("total_bytes")
        return total_bytes is not None and self.brought_bytes(model) == total_bytes

    # What is done

    def run(self, token: str, report: Report) -> list[StoreError]:
        """Make everything as wanted. One that fails takes no other with it; returns why each failed."""
        problems = []
        for path in self.leftovers():
            final = path.with_name(path.name[1 : -len(INCOMING_SUFFIX)])
            with self._locked(str(final), wait=False) as mine:
                if mine:
                    _remove(path)
        for model in self.models:
            try:
                with writing(Path(model["path"]).parent):
                    self._provide(model, token, report)
            except StoreError as error:
                problems.append(StoreError(f"{model['path']} was not provided: {error.message}", error.hint))
            except OSError as error:
                problems.append(StoreError(f"{model['path']} was not provided: {error.strerror or error}"))
        if not problems and not self.waiting:
            for path in self.spec.get("remove", []):
                self._drop(path)
        return problems

    @contextlib.contextmanager
    def _locked(self, path: str, *, wait: bool = True, report: Callable[[], None] = lambda: None) -> Iterator[bool]:
        self.locks.mkdir(parents=True, exist_ok=True)
        lock = self.locks / hashlib.sha256(path.encode()).hexdigest()[:24]
        with lock.open("a") as stream:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if not wait:
                    yield False
                    return
                report()
                fcntl.flock(stream, fcntl.LOCK_EX)
            yield True

    def _provide(self, model: JsonObject, token: str, report: Report) -> None:
        path, name = model["path"], Path(model["path"]).name
        kind = model["source"]["kind"]
        with self._locked(path, report=lambda: report(f"waiting for another run that makes {name}", 0, 0, "steps")):
            if self.verified(model):
                return
            found = ""
            if Path(path).is_file() and kind != "prepared":
                found = self._hash(Path(path), f"verifying {name}", report)
                if found == model["sha256"]:
                    self._record(model, found)
                    self.changed.append(path)
                    return
            if kind == "host":
                problem = (
                    f"it has the SHA-256 {found}, not {model['sha256']} as the inventory says" if found else "it does not exist"
                )
                raise StoreError(
                    problem, "put the right file there, or give the model a source such as `url` or `hf` in the inventory"
                )
            folder = self.incoming(path)
            folder.parent.mkdir(parents=True, exist_ok=True, mode=0o755)
            if kind in BROUGHT and not self.brought(model):
                self.waiting.append(path)
                return
            folder.mkdir(mode=0o700, exist_ok=True)
            if kind == "prepared":
                self._prepare(model, folder, report)
            elif kind in BROUGHT:
                self._install(model, folder, self._hash(folder / "part", f"verifying {name}", report))
            else:
                self._download(model, folder, token, report)
            self.changed.append(path)

    def _hash(self, path: Path, phase: str, report: Report) -> str:
        total_bytes = path.stat().st_size
        return sha256_file(path, lambda done: report(phase, done, total_bytes, "bytes"))

    def _download(self, model: JsonObject, folder: Path, token: str, report: Report) -> None:
        source, name = model["source"], Path(model["path"]).name
        server = Server(
            source["url"],
            token=token if source["kind"] == "hf" else "",
            timeout_s=float(self.spec.get("stall_timeout_s", 60)),
        )
        download = Download(
            server,
            folder,
            sha256=model["sha256"],
            size_bytes=model.get("size_bytes"),
            connections=int(self.spec.get("connections", 4)),
            attempts=int(self.spec.get("attempts", 8)),
            tell=lambda done, total: report(f"downloading {name}", done, total, "bytes"),
        )
        try:
            with writing(folder):
                download.run()
            sha256 = self._hash(download.part, f"verifying {name}", report)
            if sha256 != model["sha256"] and download.resumed:
                # What was there from before may be what a power cut left of it.
                download.discard()
                with writing(folder):
                    download.run()
                sha256 = self._hash(download.part, f"verifying {name}", report)
        except StoreError as error:
            # A disk that is full is not to stay so; what can be resumed is.
            if not _read_json(folder / "state.json").get("done") or "No space" in error.message:
                _remove(folder)
            raise
        self._install(model, folder, sha256)

    def _install(self, model: JsonObject, folder: Path, sha256: str, **record: Any) -> None:
        """Rename a complete file in, if it is what was wanted; on the disk before it has its name."""
        part, path = folder / "part", Path(model["path"])
        if model["source"]["kind"] != "prepared" and sha256 != model["sha256"]:
            _remove(folder)
            raise StoreError(
                f"what came has the SHA-256 checksum {sha256}, the inventory says {model['sha256']}; nothing of it was kept",
                "correct the inventory's `sha256` if this is the file that you want",
            )
        part.chmod(0o644)
        _fsync(part)
        part.replace(path)
        _fsync(path.parent)
        self._record(model, sha256, **record)
        _remove(folder)

    def _record(self, model: Mapping[str, Any], sha256: str, **more: Any) -> None:
        status = Path(model["path"]).stat()
        self.records.mkdir(parents=True, exist_ok=True, mode=0o755)
        record = self.record_path(model["path"])
        document = {
            "path": model["path"],
            "sha256": sha256,
            "size_bytes": status.st_size,
            "mtime_s": int(status.st_mtime),
            **more,
        }
        _write_atomic(record, document)
        record.chmod(0o644)

    def _drop(self, path: str) -> None:
        """Remove a model that nothing uses, its record first: a file without one is not trusted."""
        with self._locked(path):
            place = Path(path)
            if not os.path.lexists(path):
                return
            inside = [str(item) for item in place.rglob("*")] if place.is_dir() and not place.is_symlink() else [path]
            for item in inside:
                _remove(self.record_path(item))
            _remove(place)
            self.changed.append(path)

    # Making one model of others

    def _prepare(self, model: JsonObject, folder: Path, report: Report) -> None:
        source, name = model["source"], Path(model["path"]).name
        known = {item["path"]: item for item in self.models}
        for item in source["inputs"]:
            if item in self.waiting:
                self.waiting.append(model["path"])
                return
            if not self.verified(known[item]):
                raise StoreError(f"`{item}`, of which it is made, is not there")
        part = folder / "part"
        for path in folder.iterdir():
            _remove(path)
        check_space(folder, sum(Path(item).stat().st_size for item in source["inputs"]), f"`{name}`, which is made there")
        words = {"{output}": str(part)}
        argv = [words.get(word, word.replace("{output}", str(part))) for word in source["argv"]]
        log = folder / "log"
        began_s = time.monotonic()
        os.chown(str(folder), PREPARE_UID, PREPARE_GID)
        with log.open("wb") as stream:
            code = self._call(argv, source, folder, stream, lambda: report(*_steps(f"preparing {name}", log)))
        elapsed_s = time.monotonic() - began_s
        tail = _tail(log)
        if code is None or code != 0 or not part.is_file() or part.is_symlink() or part.stat().st_size == 0:
            if code is None:
                problem = f"`{argv[0]}` did not end within {source['timeout_s']} s"
            elif code:
                problem = f"`{argv[0]}` ended with {f'exit status {code}' if code > 0 else f'signal {-code}'}"
            else:
                problem = f"`{argv[0]}` ended well and wrote nothing to its output"
            _remove(folder)
            raise StoreError("\n".join([problem, *tail]), "try the command by hand on the host")
        os.chown(str(part), 0, 0)
        os.chown(str(folder), 0, 0)
        sha256 = self._hash(part, f"verifying {name}", report)
        inputs = {item: known[item]["sha256"] or _read_json(self.record_path(item)).get("sha256") for item in source["inputs"]}
        self._install(
            model, folder, sha256, recipe=source["recipe"], argv=source["argv"], inputs=inputs, elapsed_s=round(elapsed_s, 1)
        )

    @staticmethod
    def _call(
        argv: Sequence[str], source: Mapping[str, Any], folder: Path, log: IO[bytes], tell: Callable[[], None]
    ) -> int | None:
        """The exit status; ``None`` when the time was up. It runs as nobody, who may read what the inputs' groups may."""
        groups = sorted({Path(item).stat().st_gid for item in source["inputs"]} | {PREPARE_GID})
        libc = ctypes.CDLL(None)

        def become_nobody() -> None:
            os.setgroups(groups)
            os.setgid(PREPARE_GID)
            os.setuid(PREPARE_UID)
            os.nice(10)
            # It dies with this process (PR_SET_PDEATHSIG), so that a kill leaves nobody who writes.
            libc.prctl(1, signal.SIGKILL)

        environment = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8", "HOME": str(folder), "TMPDIR": str(folder)}
        try:
            process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=str(folder),
                env={**environment, **source.get("environment", {})},
                preexec_fn=become_nobody,
            )
        except OSError as error:
            raise StoreError(f"`{argv[0]}` cannot be run: {error.strerror}") from error
        deadline_s = time.monotonic() + float(source["timeout_s"])
        while True:
            try:
                return process.wait(timeout=STATUS_INTERVAL_S)
            except subprocess.TimeoutExpired:
                tell()
                if time.monotonic() > deadline_s:
                    process.kill()
                    process.wait()
                    return None


def _tail(log: Path) -> list[str]:
    with log.open(encoding="utf-8", errors="replace") as stream:
        return [line.rstrip("\n")[:300] for line in deque(stream, LOG_TAIL_LINES)]


def _steps(phase: str, log: Path) -> tuple[str, int, int, str]:
    """How far a program is by its own words (``[  12/ 291]``), where it says so."""
    with log.open("rb") as stream:
        stream.seek(max(0, log.stat().st_size - 8192))
        found = re.findall(rb"\[ *([0-9]{1,9}) */ *([0-9]{1,9})\]", stream.read())
    done, total = found[-1] if found else (b"0", b"0")
    return phase, int(done), int(total), "steps"


# -------------------------------------------------------------------------------------------------------------------- the job


class Job:
    """A run in the background: ``spec.json``, ``status.json``, ``lock``, ``log`` in a folder of its own."""

    def __init__(self, work: Path) -> None:
        self.path = work
        self._told_s = 0.0
        self._lock = threading.Lock()

    def try_lock(self) -> int | None:
        """The lock, held by the job as long as it lives; ``None`` while somebody has it."""
        descriptor = os.open(str(self.path / "lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        return descriptor

    def locked(self) -> bool:
        """Whether somebody has the lock."""
        try:
            descriptor = os.open(str(self.path / "lock"), os.O_RDWR | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)
        return False

    def write(self, state: str, **values: Any) -> None:
        """Leave word."""
        with contextlib.suppress(OSError):
            _write_atomic(self.path / "status.json", {"state": state, **values})

    def report(self, phase: str, done: int, total: int, unit: str) -> None:
        """Leave word of how far it is, not too often."""
        with self._lock:
            now_s = time.monotonic()
            if now_s - self._told_s < STATUS_INTERVAL_S:
                return
            self._told_s = now_s
            self.write("running", phase=phase, done=done, total=total, unit=unit)

    def status(self) -> JsonObject:
        """See the module; a job that is gone without a last word has failed."""
        status = _read_json(self.path / "status.json")
        if not status:
            return {"state": "absent", "message": f"nothing was started in `{self.path}`"}
        if status["state"] == "running" and not self.locked():
            # Its last word may have come between the two looks.
            status = _read_json(self.path / "status.json")
            if status.get("state") == "running":
                log = self.path / "log"
                said = _tail(log) if log.is_file() else []
                status = {
                    "state": "failed",
                    "message": "\n".join([f"the job died while {status.get('phase') or 'starting'}", *said]),
                    "hint": "run it again: it goes on where it stopped",
                }
        return status


def start(spec_path: Path, work: Path, token: str) -> JsonObject:
    """Start the job, or attach to the one that runs; returns its status and ``started``."""
    spec = json.loads(spec_path.read_text(encoding="utf-8"))
    work.mkdir(parents=True, exist_ok=True, mode=0o700)
    for other in work.parent.iterdir():
        # What an earlier run was not there to remove.
        if other != work and (other / "status.json").exists() and not Job(other).locked():
            _remove(other)
    job = Job(work)
    lock = job.try_lock()
    if lock is None:
        # Somebody who only looks has it for a moment.
        time.sleep(0.2)
        lock = job.try_lock()
    if lock is None:
        return {**job.status(), "started": False}
    try:
        Store(spec)
        _write_atomic(work / "spec.json", spec)
        job.write("running", phase="starting", done=0, total=0, unit="bytes")
        with (work / "log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-B", str(Path(__file__).resolve()), "run", "--work", str(work), "--lock", str(lock)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                cwd="/",
                start_new_session=True,
                pass_fds=(lock,),
            )
        assert process.stdin is not None  # noqa: S101 - it was asked for
        with contextlib.suppress(BrokenPipeError), process.stdin as stream:
            stream.write(token.encode())
        return {**job.status(), "started": True}
    except StoreError as error:
        job.write("failed", message=error.message, hint=error.hint)
        return {**job.status(), "started": False}
    finally:
        os.close(lock)


def run(work: Path, token: str) -> None:
    """The job itself."""
    job = Job(work)
    store = Store(_read_json(work / "spec.json"))
    os.umask(0o022)
    problems = store.run(token, job.report)
    said = {"changed": store.changed, "waiting": store.waiting}
    if problems:
        hints = list(dict.fromkeys(problem.hint for problem in problems if problem.hint))
        job.write("failed", message="\n".join(problem.message for problem in problems), hint="; ".join(hints), **said)
    else:
        job.write("done", **said)


def take_slice(path: Path, offset: int, size_bytes: int, out: Path, uid: int | None) -> JsonObject:
    """See the module. Returns ``{"size_bytes", "slice_bytes"}`` of the file and of the slice."""
    came = 0
    with contextlib.suppress(FileNotFoundError):
        out.unlink()
    try:
        source = path.open("rb")
    except OSError as error:
        raise StoreError(f"`{path}` cannot be read: {error.strerror}") from error
    with source, writing(out.parent):
        source.seek(offset)
        descriptor = os.open(str(out), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as target:
            if uid is not None:
                os.chown(str(out), uid, -1)
            while came < size_bytes:
                block = source.read(min(BLOCK_BYTES, size_bytes - came))
                if not block:
                    break
                target.write(block)
                came += len(block)
        return {"size_bytes": os.fstat(source.fileno()).st_size, "slice_bytes": came}


def append(path: str, sha256: str, total_bytes: int, piece: Path, offset: int) -> JsonObject:
    """See the module. Returns ``{"done_bytes"}``."""
    store = Store({"schema": SCHEMA})
    folder = store.incoming(path)
    with store._locked(path), writing(folder):
        state_path, part = folder / "state.json", folder / "part"
        state = _read_json(state_path)
        if offset == 0:
            _remove(state_path)
            _remove(part)
        elif state.get("brought_bytes") != offset or state.get("sha256") != sha256:
            raise StoreError(f"`{part}` does not go on at {offset}", "run it again")
        with piece.open("rb") as source, part.open("ab") as target:
            # What a kill left beyond the last whole slice.
            target.truncate(offset)
            shutil.copyfileobj(source, target, BLOCK_BYTES)
            target.flush()
            os.fsync(target.fileno())
            done_bytes = target.tell()
        _write_atomic(state_path, {"brought_bytes": done_bytes, "total_bytes": total_bytes, "sha256": sha256})
        piece.unlink()
    return {"done_bytes": done_bytes}


def main(arguments: Sequence[str]) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(description="Puts verified model files on a host")
    verbs = parser.add_subparsers(dest="verb", required=True)
    for name in ("look", "start", "status", "run", "room", "slice", "append"):
        verb = verbs.add_parser(name)
        if name in ("look", "start"):
            verb.add_argument("--spec", required=True)
        if name in ("start", "status", "run"):
            verb.add_argument("--work", type=Path, required=True)
        if name == "run":
            verb.add_argument("--lock", type=int, required=True)
        if name in ("room", "slice", "append"):
            verb.add_argument("--path", required=True)
            verb.add_argument("--size", type=int, required=True)
        if name in ("slice", "append"):
            verb.add_argument("--offset", type=int, required=True)
        if name == "slice":
            verb.add_argument("--out", type=Path, required=True)
            verb.add_argument("--uid", type=int)
        if name == "append":
            verb.add_argument("--sha256", required=True)
            verb.add_argument("--slice", type=Path, required=True)
    given = parser.parse_args(arguments)
    try:
        if given.verb == "run":
            run(given.work, sys.stdin.read())
            return 0
        if given.verb == "look":
            found = Store(json.loads(given.spec)).look()
        elif given.verb == "start":
            found = start(Path(given.spec), given.work.resolve(), sys.stdin.read().strip())
        elif given.verb == "status":
            found = Job(given.work).status()
        elif given.verb == "room":
            check_space(Path(given.path).parent, given.size, f"`{given.path}`")
            found = {}
        elif given.verb == "slice":
            found = take_slice(Path(given.path), given.offset, given.size, given.out, given.uid)
        else:
            found = append(given.path, given.sha256, given.size, given.slice, given.offset)
    except StoreError as error:
        sys.stderr.write(f"error: {error.message}\n" + (f"hint: {error.hint}\n" if error.hint else ""))
        return 1
    print(json.dumps(found, sort_keys=True))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
