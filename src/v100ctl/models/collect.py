"""The model headers that a plan needs, from wherever the models are, each read once and then kept on the controller."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from v100ctl.access import Access
from v100ctl.artifacts.cache import Cache
from v100ctl.errors import V100ctlError
from v100ctl.fleet import ModelSpec
from v100ctl.models.host import read_from_host
from v100ctl.models.http import read_url
from v100ctl.models.local import read_local, to_header
from v100ctl.models.source import ModelHeaderError
from v100ctl.models.types import ModelHeader
from v100ctl.paths import cache_dir
from v100ctl.probe.connection import Connection
from v100ctl.probe.deadline import Deadline
from v100ctl.probe.session import start_session
from v100ctl.probe.text import printable

#: Raised by one when a parser says more or less than before, so that what an older one wrote is read anew.
_CACHE_VERSION = 1
#: An entry of the cache that is larger was not written by us.
_MAX_ENTRY_BYTES = 64 << 20
#: How long past its time limit a reader may take to notice that it is over.
_GRACE_S = 2.0


class ModelHeaderUnknown(ModelHeaderError):
    """A header cannot be known before the model has been fetched or its host asked. No fault; the plan says so."""


@dataclass(frozen=True)
class HeaderRequest:
    """A header that is wanted.

    Attributes:
        host: The host that is to serve the model, or ``None`` where no host is meant.
        connection: The way into it; ``None`` offline.
        spec: The model, as the inventory has it; ``None`` for a file that the inventory only names (`mmproj`). Without its
            sha256 it is read each time.
        path: Where the file lies on the host, or will.
        path_there: Where ``connection`` leads to has it by this path, where that is another host.
        hub_url, token: For a model of a hub: where it has the file or folder, and the token that it asks for.
    """

    host: str | None
    connection: Connection | None
    spec: ModelSpec | None
    path: str
    #: Where a hub has it, and the token for it.
    hub_url: str = ""
    token: str = field(default="", repr=False)
    path_there: str = ""


#: A header, or why there is none.
Outcome = ModelHeader | V100ctlError


def collect_headers(
    requests: Sequence[HeaderRequest], access: Access, *, cache: Path | None = None, models: Cache | None = None
) -> dict[HeaderRequest, Outcome]:
    """Read the headers of many models at once.

    Each is looked for in the cache of headers, then where the model comes from: on this machine (``from_controller``, and
    whatever the controller has fetched already), by HTTP ranges (``url``), on the host over SSH (``path``). What cannot be had
    from its source is looked for on the host too, where an earlier run may have put it.

    Args:
        requests: What is wanted; the same model for many hosts is read once.
        access: How many at a time, and how long each may take.
        cache: Where headers are kept; below :func:`v100ctl.paths.cache_dir` by default.
        models: The cache with models that were fetched; the user's by default.

    Returns:
        For each request the header or why there is none; :class:`ModelHeaderUnknown` where that is no fault.
    """
    store = HeaderCache(cache or cache_dir() / "headers")
    fetched = models or Cache()
    found: dict[str, Outcome] = {}
    missing: dict[str, list[HeaderRequest]] = {}
    for request in requests:
        identity = _identity(request)
        if identity in missing:
            missing[identity].append(request)
        elif identity not in found:
            kept = store.get(request.spec.digest, identity) if request.spec is not None else None
            if kept is not None:
                found[identity] = kept
            else:
                missing[identity] = [request]
    here: dict[tuple[str, ...], Callable[[], dict[str, Outcome]]] = {
        (identity,): partial(_from_here, identity, same[0], same[0].spec, fetched, access.timeout_s)
        for identity, same in missing.items()
        if same[0].spec is not None and not _only_on_host(same[0].spec)
    }
    found |= _all_at_once(here, access)
    elsewhere = {
        identity: same
        for identity, same in missing.items()
        if not isinstance(found.get(identity), ModelHeader) and not (same[0].spec and same[0].spec.from_controller)
    }
    found |= _from_hosts(elsewhere, found, access)
    for identity, same in missing.items():
        header = found[identity]
        if isinstance(header, ModelHeader) and same[0].spec is not None:
            store.put(same[0].spec.digest, identity, header)
    return {request: found[_identity(request)] for request in requests}


def known_headers(
    requests: Sequence[HeaderRequest], *, cache: Path | None = None, models: Cache | None = None
) -> dict[HeaderRequest, Outcome]:
    """The headers of models without a host or the network: read before, from a file of this machine, or fetched already.

    Models that the inventory gives the same sha256 are taken for the same, so that a fleet's one model is loaded once.
    """
    store = HeaderCache(cache or cache_dir() / "headers")
    fetched = models or Cache()
    by_sha256: dict[str, Outcome] = {}
    found: dict[HeaderRequest, Outcome] = {}
    for request in requests:
        known = by_sha256.get(request.spec.digest) if request.spec is not None else None
        if known is None:
            known = _known_header(request, store, fetched)
            if request.spec is not None and isinstance(known, ModelHeader):
                by_sha256[request.spec.digest] = known
        found[request] = known
    return found


def _known_header(request: HeaderRequest, store: HeaderCache, fetched: Cache) -> Outcome:
    if request.spec is not None:
        kept = store.get(request.spec.digest, _identity(request))
        if kept is not None:
            return kept
        spec = request.spec
        local = spec.from_controller if spec.prepare is None else None
        copy = None
        if local is not None:
            copy = first_file(spec, Path(local))
        elif spec.sha256 is not None and spec.prepare is None:
            copy = fetched.model_path(spec.sha256)
        if copy is not None and (local is not None or copy.is_file()):
            try:
                return read_local(copy)
            except ModelHeaderError as error:
                return error
    return ModelHeaderUnknown(
        f"`{printable(request.path)}` is not on this machine, and its header was not read before",
        hint="run it without `--offline` once, or give the file with `--model-header`",
    )


def _identity(request: HeaderRequest) -> str:
    """Where a model's bytes come from, beside its sha256. The inventory's sha256 alone is a claim."""
    spec = request.spec
    if spec is None or _only_on_host(spec):
        return f"host {request.host} {request.path} {spec.digest if spec is not None else ''}"
    if spec.url is not None:
        return f"url {spec.url} {spec.digest}"
    if spec.hf is not None:
        return f"hub {request.hub_url} {spec.digest}"
    if spec.pypi is not None:
        return f"pypi {spec.pypi} {spec.archive_sha256} {spec.member} {spec.sha256}"
    path = Path(spec.from_controller or "").expanduser()
    try:
        status = path.stat()
    except (OSError, ValueError):
        return f"controller {path} {spec.digest}"
    return f"controller {path} {status.st_size} {status.st_mtime_ns} {spec.digest}"


def _only_on_host(spec: ModelSpec) -> bool:
    """Whether nobody but the host itself has what is served."""
    return spec.path is not None or spec.from_host is not None or spec.prepare is not None


def _from_here(identity: str, request: HeaderRequest, spec: ModelSpec, fetched: Cache, timeout_s: float) -> dict[str, Outcome]:
    """The header without asking a host."""
    if spec.from_controller is not None:
        return {identity: read_local(first_file(spec, Path(spec.from_controller)))}
    if spec.sha256 is not None and (copy := fetched.model_path(spec.sha256)).is_file():
        # One that is damaged is noticed, and fetched anew, when it is used.
        with contextlib.suppress(ModelHeaderError):
            return {identity: read_local(copy)}
    if spec.url is not None:
        return {identity: read_url(spec.url, timeout_s=timeout_s)}
    if spec.hf is not None:
        if not request.hub_url:
            raise ModelHeaderUnknown(f"{spec.hf.repo} did not say what it holds")
        return {identity: read_url(request.hub_url, timeout_s=timeout_s, token=request.token)}
    unknown = ModelHeaderUnknown(
        f"`{printable(spec.member or '')}` of {spec.pypi} has not been fetched yet, so its header is not known",
        hint="`v100ctl provision` fetches it; the plan is complete from then on",
    )
    return {identity: unknown}


def _from_hosts(
    wanted: Mapping[str, Sequence[HeaderRequest]], found: Mapping[str, Outcome], access: Access
) -> dict[str, Outcome]:
    """What the hosts have of these, one session a host. Where that is nothing, the first reason stays."""
    results: dict[str, Outcome] = {}
    by_host: dict[str, tuple[Connection, dict[str, str]]] = {}
    for identity, same in wanted.items():
        request = next((item for item in same if item.connection is not None), None)
        if request is None or request.connection is None:
            results[identity] = found.get(identity) or ModelHeaderUnknown(
                f"`{printable(same[0].path)}` is on {same[0].host or 'its host'}, which was not asked",
                hint="run it without `--offline`",
            )
            continue
        path = request.path_there or request.path
        by_host.setdefault(request.connection.host, (request.connection, {}))[1][identity] = path
    tasks: dict[tuple[str, ...], Callable[[], dict[str, Outcome]]] = {
        tuple(paths): partial(_ask_host, connection, paths, access.timeout_s) for connection, paths in by_host.values()
    }
    for identity, outcome in _all_at_once(tasks, access).items():
        first = found.get(identity)
        results[identity] = outcome if isinstance(outcome, ModelHeader) or first is None else first
    return results


def _ask_host(connection: Connection, paths: Mapping[str, str], timeout_s: float) -> dict[str, Outcome]:
    deadline = Deadline(timeout_s)
    session = start_session(connection, deadline)
    try:
        answers = read_from_host(session, list(paths.values()), timeout_s=deadline.remaining_s())
    finally:
        session.close()
    return {identity: answers[path] for identity, path in paths.items()}


def _all_at_once(tasks: Mapping[tuple[str, ...], Callable[[], dict[str, Outcome]]], access: Access) -> dict[str, Outcome]:
    """Run tasks, ``access.forks`` at a time. One that fails or hangs gives its error for all its identities."""
    waiting = deque(tasks)
    running: dict[tuple[str, ...], Deadline] = {}
    answers: queue.SimpleQueue[tuple[tuple[str, ...], dict[str, Outcome] | BaseException]] = queue.SimpleQueue()
    results: dict[str, Outcome] = {}

    def work(key: tuple[str, ...]) -> None:
        try:
            answers.put((key, tasks[key]()))
        except BaseException as error:  # the caller's thread decides what it means
            answers.put((key, error))

    def finish(key: tuple[str, ...], outcome: Mapping[str, Outcome]) -> None:
        del running[key]
        results.update(outcome)

    while waiting or running:
        while waiting and len(running) < max(1, access.forks):
            key = waiting.popleft()
            running[key] = Deadline(access.timeout_s)
            # Not a pool: its threads are waited for at exit, and one may hang in a name lookup or on a dead file server.
            threading.Thread(target=work, args=(key,), name="model header", daemon=True).start()
        with contextlib.suppress(queue.Empty):
            key, answer = answers.get(timeout=min(deadline.remaining_s() for deadline in running.values()) + _GRACE_S)
            if isinstance(answer, BaseException) and not isinstance(answer, V100ctlError):
                raise answer
            # One that was given up may still answer: too late.
            if key in running:
                finish(key, dict.fromkeys(key, answer) if isinstance(answer, V100ctlError) else answer)
        for key in [key for key, deadline in running.items() if deadline.overdue_s() > _GRACE_S]:
            late = ModelHeaderError(f"a model's header was not read within {access.timeout_s:g} s", hint="look at where it lies")
            finish(key, dict.fromkeys(key, late))
    return results


def first_file(spec: ModelSpec, path: Path) -> Path:
    """What the reader of headers is given of a model on this machine: a file, the first of a split one, or a folder."""
    ggufs = sorted(name for name in spec.files if name.endswith(".gguf"))
    path = path.expanduser()
    return path / ggufs[0] if ggufs and len(ggufs) == len(spec.files) and path.name not in spec.files else path


class HeaderCache:
    """Headers as JSON, each with its digest. An entry that is not what was written is dropped."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, sha256: str, identity: str) -> Path:
        """Where the header of these bytes from this source lies, there or not."""
        return self.folder / f"{sha256}-{hashlib.sha256(identity.encode('utf-8', 'surrogateescape')).hexdigest()[:16]}.json"

    def get(self, sha256: str, identity: str) -> ModelHeader | None:
        """The header, if it is there and sound."""
        path = self.path(sha256, identity)
        try:
            with path.open("rb") as stream:
                content = stream.read(_MAX_ENTRY_BYTES + 1)
        except OSError:
            return None
        digest, _, body = content.partition(b"\n")
        try:
            if hashlib.sha256(body).hexdigest().encode() != digest:
                raise ValueError("not what was written")
            document = json.loads(body)
            if document["version"] != _CACHE_VERSION or document["identity"] != identity:
                raise ValueError("another parser's, or another file's")
            return to_header(document["header"])
        except (ValueError, TypeError, KeyError, ModelHeaderError):
            with contextlib.suppress(OSError):
                path.unlink()
            return None

    def put(self, sha256: str, identity: str, header: ModelHeader) -> None:
        """Keep a header, whole or not at all."""
        document = {"version": _CACHE_VERSION, "identity": identity, "header": header.model_dump(mode="json")}
        body = json.dumps(document, separators=(",", ":")).encode("ascii")
        path = self.path(sha256, identity)
        part = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.part")
        with contextlib.suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            try:
                part.write_bytes(hashlib.sha256(body).hexdigest().encode() + b"\n" + body)
                part.replace(path)
            finally:
                part.unlink(missing_ok=True)
