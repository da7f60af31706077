"""Model headers from web servers, by ranges: a few MB of a file of many GB, in a few round trips."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import requests

from v100ctl import __version__
from v100ctl.artifacts.download import CONNECT_TIMEOUT_S, reason
from v100ctl.models.gguf import read_gguf_model
from v100ctl.models.local import to_header
from v100ctl.models.safetensors import CONFIG, INDEX, read_folder
from v100ctl.models.source import Budget, ModelHeaderError, ModelMissingError, Source
from v100ctl.models.types import ModelHeader
from v100ctl.probe.deadline import Deadline
from v100ctl.probe.text import printable

DEFAULT_TIMEOUT_S = 60.0
#: The longest silence within an answer.
READ_TIMEOUT_S = 15.0
ATTEMPTS = 3
_BLOCK_BYTES = 64 * 1024
_CONTENT_RANGE = re.compile(r"bytes ([0-9]{1,18})-([0-9]{1,18})/([0-9]{1,18}|\*)")


def read_url(url: str, *, timeout_s: float = DEFAULT_TIMEOUT_S, token: str = "") -> ModelHeader:
    """The header of a model on a web server.

    Proxies and certificates come from the usual environment variables.

    Args:
        url: A GGUF file (the first part, where it is split; the others are looked for beside it), or the folder that has
            ``config.json``.
        timeout_s: For everything together.
        token: Sent to the server of ``url``, and to no other that it redirects to.

    Raises:
        ModelHeaderError: nobody answers, the server refuses, or what comes is no model or cannot be true.
    """
    deadline = Deadline(timeout_s)
    address = urlsplit(url)
    last = address.path.rpartition("/")[2]
    folder = url if last in (CONFIG, INDEX) else urlunsplit(address._replace(path=address.path.rstrip("/") + "/"))
    with requests.Session() as session:
        session.headers["User-Agent"] = f"v100ctl/{__version__}"

        def open_beside(beside: str, name: str) -> Source:
            return HttpSource(session, _beside(beside, name), deadline, token=token)

        def folder_header() -> ModelHeader:
            return to_header(read_folder(partial(open_beside, folder), f"`{shown_url(_beside(folder, ''))}`"))

        if last in ("", CONFIG, INDEX):
            return folder_header()
        try:
            return to_header(read_gguf_model(partial(open_beside, url), last))
        except ModelHeaderError as error:
            if last.endswith(".gguf") or deadline.expired:
                raise
            # An address without a slash at its end may be a folder's all the same.
            try:
                return folder_header()
            except ModelMissingError:
                raise error from None


def _beside(url: str, name: str) -> str:
    """The URL of another file in the same folder; what follows the path (`?download=true`) stays."""
    address = urlsplit(url)
    return urlunsplit(address._replace(path=address.path.rpartition("/")[0] + "/" + name))


def _origin(url: str) -> tuple[str, str]:
    address = urlsplit(url)
    return address.scheme, address.netloc.lower()


def shown_url(url: str) -> str:
    """A URL for a message: without a password and without the query, where signatures and keys are."""
    address = urlsplit(url)
    return printable(urlunsplit((address.scheme, address.netloc.rpartition("@")[2], address.path, "", "")))


class HttpSource(Source):
    """A file on a web server. The first request is made at once, so that a missing file shows at once."""

    chunk_bytes = 4 << 20

    def __init__(self, session: requests.Session, url: str, deadline: Deadline, *, token: str = "") -> None:
        self._token, self._token_for = token, _origin(url)
        self.name = f"`{shown_url(url)}`"
        self._session = session
        self._url = url
        self._secure = urlsplit(url).scheme == "https"
        self._deadline = deadline
        self._validator = ""
        # A GGUF file's vocabulary takes megabytes, a safetensors header rarely 100 KB; a model may have many of those.
        self.first_chunk_bytes = 1 << 20 if url.partition("?")[0].endswith(".gguf") else 128 << 10
        #: Set where the server has no ranges: one answer, read from its beginning.
        self._stream: _Stream | None = None
        self._head_offset = 0
        self._head = self._get(0, self.first_chunk_bytes)

    def read(self, offset: int, size: int) -> bytes:
        """See :class:`Source`."""
        parts = []
        if self._head_offset <= offset < self._head_offset + len(self._head):
            begin = offset - self._head_offset
            part = self._head[begin : begin + size]
            parts.append(part)
            offset += len(part)
            size -= len(part)
        if self.size_bytes is not None:
            size = min(size, self.size_bytes - offset)
        if size > 0:
            if self._stream is None:
                # A reader that goes forward in small steps costs few round trips.
                data = self._get(offset, max(size, self.first_chunk_bytes))
                self._head_offset, self._head = offset, data
                parts.append(data[:size])
            else:
                parts.append(self._stream.read(offset, size))
        return b"".join(parts)

    def close(self) -> None:
        """See :class:`Source`."""
        if self._stream is not None:
            self._stream.close()

    def _get(self, offset: int, size: int) -> bytes:
        """A part of the file; all attempts within the deadline."""
        if self.size_bytes is not None:
            size = min(size, self.size_bytes - offset)
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return self._attempt(offset, size)
            except _Interrupted as error:
                if attempt == ATTEMPTS or self._deadline.expired:
                    raise self._error(f"was cut off: {error}") from error
                time.sleep(min(0.2 * attempt, self._deadline.remaining_s()))
        raise AssertionError("unreachable: the last attempt returns or raises")

    def _attempt(self, offset: int, size: int) -> bytes:
        headers = {"Accept-Encoding": "identity", "Range": f"bytes={offset}-{offset + size - 1}"}
        if self._token and _origin(self._url) == self._token_for:
            # `requests` leaves it out where the server redirects to another.
            headers["Authorization"] = f"Bearer {self._token}"
        timeout = (CONNECT_TIMEOUT_S, min(READ_TIMEOUT_S, max(0.1, self._deadline.remaining_s())))
        if self._deadline.expired:
            raise self._error(f"did not come within {self._deadline.timeout_s:g} s", hint="try again")
        try:
            answer = self._session.get(self._url, headers=headers, stream=True, timeout=timeout)
        except requests.exceptions.ConnectionError as error:
            if offset:
                raise _Interrupted(reason(error)) from error
            raise self._error(
                reason(error), hint="connect this machine to it; proxies from the environment are honoured"
            ) from error
        except (requests.exceptions.RequestException, UnicodeError) as error:
            raise self._error(reason(error)) from error
        keep = False
        try:
            keep = self._check(answer, offset)
            if keep:
                self._stream = _Stream(self, answer, self._deadline)
                return self._stream.read(0, size)
            return _take(answer, size, self)
        finally:
            if not keep:
                answer.close()

    def _check(self, answer: requests.Response, offset: int) -> bool:
        """Look at an answer's head. Returns whether it is the whole file instead of the part that was asked for."""
        if self._secure and urlsplit(answer.url).scheme != "https":
            raise self._error("is redirected from https to http", hint="use an address that stays encrypted")
        status = answer.status_code
        if status in (429, 500, 502, 503, 504):
            raise _Interrupted(f"the server answered {status} {printable(answer.reason or '', 60)}")
        if status in (404, 410):
            raise ModelMissingError(f"{self.name} does not exist: the server answered {status}", hint="correct the address")
        if status == 416:
            raise self._error("is empty, or shorter than it was")
        if status not in (200, 206):
            hint = None
            if status in (401, 403):
                hint = "it may need a login: `model_store_hf_token` for a hub, else fetch it yourself and use `from_controller`"
                if self._token:
                    hint = "the token may not read it: its licence may have to be accepted on the hub"
            raise self._error(f"cannot be had: the server answered {status} {printable(answer.reason or '', 60)}", hint=hint)
        if answer.headers.get("Content-Encoding", "identity").lower() not in ("", "identity"):
            raise self._error("comes compressed, so that no part of it can be asked for", hint="use another server")
        size_bytes = None
        if status == 206:
            found = _CONTENT_RANGE.fullmatch(answer.headers.get("Content-Range", ""))
            if found is None or int(found[1]) != offset:
                raise self._error("cannot be read by parts: the server sent another part than was asked for")
            size_bytes = None if found[3] == "*" else int(found[3])
        elif (length := answer.headers.get("Content-Length", "")).isdecimal() and len(length) < 19:
            size_bytes = int(length)
        validator = answer.headers.get("ETag", "")
        if offset and (status == 200 or size_bytes != self.size_bytes or validator != self._validator):
            raise self._error("changed while it was read", hint="try again")
        self.size_bytes, self._validator = size_bytes, validator
        # Where it redirects to is asked directly from now on: one round trip less each time.
        self._url = answer.url
        return status == 200

    def _error(self, text: str, *, hint: str | None = None) -> ModelHeaderError:
        return ModelHeaderError(f"{self.name} {text}", hint=hint)


class _Interrupted(Exception):
    """The connection broke off, or the server said to come again: worth another attempt."""


class _Stream:
    """A whole file as it comes. It can only be read forward; skipping costs as much as reading."""

    def __init__(self, source: HttpSource, answer: requests.Response, deadline: Deadline) -> None:
        self._source = source
        self._answer = answer
        self._blocks = _blocks(answer, source, deadline)
        self._buffer = b""
        self._offset = 0

    def read(self, offset: int, size: int) -> bytes:
        if offset < self._offset or offset + size > Budget.MAX_READ_BYTES:
            raise ModelHeaderError(
                f"{self._source.name} cannot be read by parts, and its header needs more than {Budget.MAX_READ_BYTES >> 20} MiB",
                hint="download it yourself and use `from_controller`, or use a server that knows ranges",
            )
        parts = []
        while size > 0:
            if not self._buffer:
                try:
                    self._buffer = next(self._blocks, b"")
                except _Interrupted as error:
                    raise ModelHeaderError(f"{self._source.name} was cut off: {error}", hint="try again") from error
                if not self._buffer:
                    break
            skipped = min(offset - self._offset, len(self._buffer))
            taken = self._buffer[skipped : skipped + size]
            self._buffer = self._buffer[skipped + len(taken) :]
            self._offset += skipped + len(taken)
            offset += len(taken)
            size -= len(taken)
            parts.append(taken)
        return b"".join(parts)

    def close(self) -> None:
        self._answer.close()


def _blocks(answer: requests.Response, source: HttpSource, deadline: Deadline) -> Iterator[bytes]:
    """What comes, as it comes, within the deadline."""
    # `read1` returns what is there; `read` would wait for a whole block, for ever where single bytes drip.
    read: Any = getattr(answer.raw, "read1", None) or answer.raw.read
    while True:
        if deadline.expired:
            raise ModelHeaderError(f"{source.name} did not come within {deadline.timeout_s:g} s", hint="try again")
        try:
            block = read(_BLOCK_BYTES)
        except Exception as error:  # urllib3's own kinds, `http.client`'s, and the socket's
            said = reason(error)
            raise _Interrupted("the answer ended too early" if said.startswith("IncompleteRead") else said) from error
        if not block:
            return
        yield block


def _take(answer: requests.Response, size: int, source: HttpSource) -> bytes:
    """At most ``size`` bytes of an answer; exactly as many as it promised."""
    promised = min(size, int(length)) if (length := answer.headers.get("Content-Length", "")).isdecimal() else None
    parts = bytearray()
    for block in _blocks(answer, source, source._deadline):
        parts += block
        if len(parts) >= size:
            break
    if promised is not None and len(parts) < promised:
        raise _Interrupted(f"{len(parts)} of {promised} bytes came")
    with suppress(Exception):
        # An answer that was read to its end gives its connection back.
        answer.raw.read1(1)
    return bytes(parts[:size])
