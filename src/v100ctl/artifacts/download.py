"""One file over HTTP(S): checked, resumed where the connection breaks off, and given up in seconds where nobody answers."""

from __future__ import annotations

import hashlib
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import requests
from requests.utils import select_proxy

from v100ctl import __version__
from v100ctl.errors import ArtifactError

#: ``(done_bytes, total_bytes or None when not known, label)``.
Progress = Callable[[int, int | None, str], None]

CONNECT_TIMEOUT_S = 5.0
#: The longest silence within a download.
READ_TIMEOUT_S = 60.0
ATTEMPTS = 4
_BLOCK_BYTES = 256 * 1024


class _Interrupted(Exception):
    """The connection broke off, or the server said to come again: worth another attempt."""


def download(url: str, part: Path, progress: Progress, *, expected_bytes: int | None = None) -> str:
    """Downloads ``url`` to ``part`` and returns the SHA-256 of what came.

    A connection that breaks off is resumed where the server allows it, else the file is begun anew; ``part`` may be left
    incomplete when this raises. Proxies and certificates come from the usual environment variables.

    Raises:
        ArtifactError: Nobody answers, the server refuses, or the file is cut off again and again.
    """
    address = urlsplit(url)
    if address.scheme not in ("http", "https") or not address.hostname:
        raise ArtifactError(f"`{url}` is not an http or https address")
    label = address.path.rpartition("/")[2] or address.hostname
    with requests.Session() as session:
        session.headers["User-Agent"] = f"v100ctl/{__version__}"
        settings = session.merge_environment_settings(url, {}, None, None, None)
        if select_proxy(url, settings["proxies"]) is None:
            _resolve(address.hostname)
        transfer = _Transfer(session, url, part, label, progress)
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return transfer.go_on(expected_bytes)
            except _Interrupted as error:
                if attempt == ATTEMPTS:
                    raise ArtifactError(f"`{url}` was cut off {ATTEMPTS} times: {error}") from error
                time.sleep(attempt)
    raise AssertionError("unreachable: the last attempt returns or raises")


class _Transfer:
    """What is known of a download between its attempts."""

    def __init__(self, session: requests.Session, url: str, part: Path, label: str, progress: Progress) -> None:
        self.session = session
        self.url = url
        self.part = part
        self.label = label
        self.progress = progress
        self.done_bytes = 0
        self.validator = ""
        self.digest = hashlib.sha256()

    def go_on(self, expected_bytes: int | None) -> str:
        headers = {"Accept-Encoding": "identity"}
        if self.done_bytes and self.validator:
            headers |= {"Range": f"bytes={self.done_bytes}-", "If-Range": self.validator}
        try:
            with self.session.get(self.url, headers=headers, stream=True, timeout=(CONNECT_TIMEOUT_S, READ_TIMEOUT_S)) as answer:
                return self._read(answer, expected_bytes)
        except (requests.exceptions.SSLError, requests.exceptions.InvalidProxyURL) as error:
            raise ArtifactError(f"`{self.url}`: {reason(error)}") from error
        except (requests.exceptions.ChunkedEncodingError, requests.exceptions.ContentDecodingError) as error:
            raise _Interrupted(reason(error)) from error
        except requests.exceptions.ConnectionError as error:
            if self.done_bytes:
                raise _Interrupted(reason(error)) from error
            raise ArtifactError(f"`{self.url}`: {reason(error)}") from error
        except requests.exceptions.RequestException as error:
            raise ArtifactError(f"`{self.url}`: {reason(error)}") from error

    def _read(self, answer: requests.Response, expected_bytes: int | None) -> str:
        if answer.status_code in (429, 500, 502, 503, 504):
            raise _Interrupted(f"the server answered {answer.status_code} {answer.reason}")
        if answer.status_code not in (200, 206):
            raise ArtifactError(f"`{self.url}`: the server answered {answer.status_code} {answer.reason}")
        resumed = answer.status_code == 206 and answer.headers.get("Content-Range", "").startswith(f"bytes {self.done_bytes}-")
        if not resumed:
            if answer.status_code == 206:
                raise ArtifactError(f"`{self.url}`: the server sent another part than was asked for")
            self.done_bytes, self.digest = 0, hashlib.sha256()
        etag = answer.headers.get("ETag", "")
        self.validator = etag if etag and not etag.startswith("W/") else answer.headers.get("Last-Modified", "")
        length = answer.headers.get("Content-Length", "")
        total_bytes = self.done_bytes + int(length) if length.isdigit() else expected_bytes
        with self.part.open("ab" if resumed else "wb") as stream:
            self.progress(self.done_bytes, total_bytes, self.label)
            for block in answer.iter_content(_BLOCK_BYTES):
                stream.write(block)
                self.digest.update(block)
                self.done_bytes += len(block)
                self.progress(self.done_bytes, total_bytes, self.label)
        if length.isdigit() and self.done_bytes != total_bytes:
            raise _Interrupted(f"{self.done_bytes} of {total_bytes} bytes came")
        return self.digest.hexdigest()


def _resolve(host: str) -> None:
    """Looks a name up within a few seconds: the system's own time limit is far longer where no name server answers."""
    failed: list[OSError] = []

    def look_up() -> None:
        try:
            socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        except OSError as error:
            failed.append(error)

    thread = threading.Thread(target=look_up, daemon=True)
    thread.start()
    thread.join(CONNECT_TIMEOUT_S)
    if thread.is_alive():
        raise ArtifactError(f"`{host}` was not resolved within {CONNECT_TIMEOUT_S:.0f} s")
    if failed:
        raise ArtifactError(f"`{host}` cannot be resolved: {failed[0].strerror or failed[0]}")


def reason(error: Exception) -> str:
    """The innermost cause in words: the library wraps it in several layers of its own."""
    inner: BaseException = error
    while True:
        cause = getattr(inner, "reason", None)
        if not isinstance(cause, BaseException):
            cause = next((item for item in inner.args if isinstance(item, BaseException)), None)
        if cause is None or cause is inner:
            break
        inner = cause
    text = str(inner)
    return text.rpartition(": ")[2] if text.startswith("<") else text or type(inner).__name__
