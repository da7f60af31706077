"""A model hub on this machine, which answers as the real one's client and documentation say that it does.

``GET /api/models/REPO/revision/REV`` -> ``{"sha": COMMIT}``; ``GET /api/models/REPO/tree/COMMIT?recursive=true`` -> a page of
``{"type", "path", "size", "oid", "lfs": {"oid", "size", "pointerSize"}}``, the next one by ``Link: <...>; rel="next"``; ``GET
/REPO/resolve/COMMIT/PATH`` -> a small file itself, a large one by a redirect to the storage with its digest in ``X-Linked-Etag``
(as huggingface_hub 0.36 reads them: ``hf_api.py``, ``file_download.py``, ``utils/_pagination.py``). The storage is another server
(another port), takes ranges, and answers 400 to a token, as signed addresses do.
"""

from __future__ import annotations

import hashlib
import http.server
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def sha256(content: bytes) -> str:
    """In hexadecimal."""
    return hashlib.sha256(content).hexdigest()


class Hub(http.server.ThreadingHTTPServer):
    """One repository. ``large`` files are in large-file storage; ``page_size`` entries come at once."""

    daemon_threads = True

    def __init__(self, address: str, storage: Storage, repo: str, files: Mapping[str, bytes], large: set[str]) -> None:
        super().__init__((address, 0), _HubHandler)
        self.storage = storage
        self.repo = repo
        self.files = dict(files)
        self.large = large
        self.token = ""
        self.page_size = 1000
        #: Where the next page is said to be; a mirror may give the address that it mirrors.
        self.link_base = ""
        self.name = "127.0.0.1"
        self.commit = COMMIT
        self.requests: list[str] = []
        self.seen_tokens: set[str | None] = set()

    @property
    def url(self) -> str:
        return f"http://{self.name}:{self.server_port}"


class Storage(http.server.ThreadingHTTPServer):
    """Where large files are."""

    daemon_threads = True

    def __init__(self, address: str) -> None:
        super().__init__((address, 0), _StorageHandler)
        self.blobs: dict[str, bytes] = {}
        self.seen_tokens: set[str | None] = set()


class _Handler(http.server.BaseHTTPRequestHandler):
    def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        # A client that only looks, or that is killed, reads no further.
        with suppress(ConnectionError):
            self.wfile.write(body)

    def by_range(self, content: bytes, etag: str) -> None:
        span = self.headers.get("Range")
        if not span:
            self.answer(200, content, ETag=etag)
            return
        first, last = span.removeprefix("bytes=").split("-")
        begin, end = int(first), min(int(last) + 1, len(content))
        self.answer(206, content[begin:end], ETag=etag, Content_Range=f"bytes {begin}-{end - 1}/{len(content)}")

    def log_message(self, format: str, *args: Any) -> None:
        pass


class _StorageHandler(_Handler):
    server: Storage

    def do_GET(self) -> None:
        self.server.seen_tokens.add(self.headers.get("Authorization"))
        if "Authorization" in self.headers:
            self.answer(400)
            return
        digest = urlsplit(self.path).path.rpartition("/")[2]
        self.by_range(self.server.blobs[digest], f'"{digest[:32]}"')


class _HubHandler(_Handler):
    server: Hub

    def do_GET(self) -> None:
        hub = self.server
        address = urlsplit(self.path)
        path = unquote(address.path)
        hub.requests.append(path)
        token = self.headers.get("Authorization")
        hub.seen_tokens.add(token)
        if hub.token and token != f"Bearer {hub.token}":
            self.answer(401, X_Error_Code="GatedRepo", X_Error_Message=f"Access to model {hub.repo} is restricted.")
        elif path in (f"/api/models/{hub.repo}/revision/main", f"/api/models/{hub.repo}/revision/{hub.commit}"):
            self.answer(200, json.dumps({"id": hub.repo, "sha": hub.commit}).encode())
        elif path == f"/api/models/{hub.repo}/tree/{hub.commit}":
            self._tree(int(parse_qs(address.query).get("cursor", ["0"])[0]))
        elif path.startswith(f"/{hub.repo}/resolve/{hub.commit}/"):
            self._file(path.removeprefix(f"/{hub.repo}/resolve/{hub.commit}/"))
        else:
            self.answer(404, X_Error_Code="RepoNotFound", X_Error_Message="Repository not found")

    def _tree(self, begin: int) -> None:
        hub = self.server
        entries: list[dict[str, Any]] = [
            {"type": "directory", "path": folder, "size": 0, "oid": "0" * 40}
            for folder in sorted({name.rpartition("/")[0] for name in hub.files if "/" in name})
        ]
        for name, content in sorted(hub.files.items()):
            entry: dict[str, Any] = {"type": "file", "path": name, "size": len(content), "oid": "1" * 40}
            if name in hub.large:
                entry["lfs"] = {"oid": sha256(content), "size": len(content), "pointerSize": 135}
            else:
                entry["oid"] = hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
            entries.append(entry)
        page = entries[begin : begin + hub.page_size]
        headers = {}
        if begin + hub.page_size < len(entries):
            base = hub.link_base or hub.url
            address = f"{base}/api/models/{hub.repo}/tree/{hub.commit}?recursive=true&cursor={begin + hub.page_size}"
            headers["Link"] = f'<{address}>; rel="next"'
        self.answer(200, json.dumps(page).encode(), **headers)

    def _file(self, name: str) -> None:
        hub = self.server
        content = hub.files.get(name)
        if content is None:
            self.answer(404, X_Error_Code="EntryNotFound", X_Error_Message="Entry not found")
        elif name in hub.large:
            digest = sha256(content)
            hub.storage.blobs[digest] = content
            self.answer(
                302,
                Location=f"http://{hub.name}:{hub.storage.server_port}/blobs/{digest}?signature=1",
                X_Linked_Etag=f'"{digest}"',
                X_Linked_Size=str(len(content)),
                X_Repo_Commit=hub.commit,
            )
        else:
            self.by_range(content, f'"{hashlib.sha1(content, usedforsecurity=False).hexdigest()}"')


@contextmanager
def serving_hub(
    files: Mapping[str, bytes], *, large: set[str], repo: str = "example/tiny", address: str = "127.0.0.1"
) -> Iterator[Hub]:
    """A hub with its storage, until the end of the ``with`` block."""
    with Storage(address) as storage, Hub(address, storage, repo, files, large) as hub:
        for server in (storage, hub):
            threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        try:
            yield hub
        finally:
            hub.shutdown()
            storage.shutdown()
