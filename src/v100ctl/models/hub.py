"""What a model hub (Hugging Face, or a mirror that speaks as it does) has: a repository's files, with their digests.

Two requests do: ``GET /api/models/REPO/revision/REV`` names the commit (``sha``), ``GET /api/models/REPO/tree/COMMIT`` lists the
files. A file in large-file storage has its SHA-256 there (``lfs.oid``); the small ones have git's own digest (``oid``), so they
are fetched, checked by that, and hashed. What a commit holds never changes, so it is asked for once and kept.
"""

from __future__ import annotations

import contextlib
import fnmatch
import hashlib
import json
import os
import re
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import requests

from v100ctl import __version__
from v100ctl.artifacts.download import CONNECT_TIMEOUT_S, reason
from v100ctl.errors import V100ctlError
from v100ctl.fleet import SPLIT_GGUF, HostConfig, HubSource
from v100ctl.models.types import HubFile, HubListing
from v100ctl.paths import cache_dir
from v100ctl.plan.models import listing_key, source_specs
from v100ctl.probe.deadline import Deadline
from v100ctl.probe.text import printable

DEFAULT_TIMEOUT_S = 60.0
READ_TIMEOUT_S = 15.0
#: How long it is believed where a name such as `main` leads: one run asks once.
NAME_LIFETIME_S = 300.0
#: What a small file (not in large-file storage) may have; hubs refuse larger ones.
_MAX_SMALL_BYTES = 64 << 20
_MAX_ANSWER_BYTES = 32 << 20
_MAX_FILES = 20000
_CACHE_VERSION = 1
#: Weights in forms that no server here reads, and what is for people.
_NOT_SERVED = (
    "*.bin", "*.pt", "*.pth", "*.gguf", "*.onnx", "*.msgpack", "*.h5", "*.ot", "*.tflite", "*.mlmodel", "*.ckpt",
    "*.md", "*.png", "*.jpg", "*.jpeg", "*.gif", "*.svg", "*.pdf", "*.webp", "*.mp4", ".gitattributes", ".gitignore",
)  # fmt: skip
_NOT_SERVED_FOLDERS = ("original/", "onnx/", "coreml/", "openvino/", "metal/")


class HubError(V100ctlError):
    """A hub did not say what a repository holds."""


def listings(config: HostConfig, *, timeout_s: float = DEFAULT_TIMEOUT_S, ask: bool = True) -> dict[str, HubListing]:
    """What hubs have of the models of one host that the inventory gives no digests for, by :func:`listing_key`.

    Args:
        config: The host's configuration.
        timeout_s: For each repository.
        ask: ``False``: only what is known from before.
    """
    return collect([config], timeout_s=timeout_s, ask=ask)


def collect(configs: Iterable[HostConfig], *, timeout_s: float = DEFAULT_TIMEOUT_S, ask: bool = True) -> dict[str, HubListing]:
    """Like :func:`listings`, for many hosts: each repository is asked for once. One that says nothing has its ``problem``."""
    wanted: dict[str, tuple[HubSource, HostConfig]] = {}
    for config in configs:
        for spec in config.llm_server_instances.values():
            for model in source_specs(spec) if spec.state == "present" else ():
                key = listing_key(config, model)
                if key is not None and model.hf is not None:
                    wanted.setdefault(key, (model.hf, config))
    found: dict[str, HubListing] = {}

    def look(key: str, source: HubSource, config: HostConfig) -> None:
        token = config.model_store_hf_token.get_secret_value()
        hub = Hub(config.model_store_hf_endpoint, token=token, timeout_s=timeout_s)
        try:
            found[key] = hub.listing(source, ask=ask)
        except HubError as error:
            found[key] = HubListing(problem=error.message)

    threads = [threading.Thread(target=look, args=(key, *item), daemon=True) for key, item in wanted.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout_s + READ_TIMEOUT_S)
    late = HubListing(problem=f"the hub did not answer within {timeout_s:g} s")
    return {key: found.get(key, late) for key in wanted}


class Hub:
    """A model hub. ``token`` goes to its own address and nowhere else."""

    def __init__(
        self, endpoint: str, *, token: str = "", timeout_s: float = DEFAULT_TIMEOUT_S, cache: Path | None = None
    ) -> None:
        self.endpoint = endpoint.rstrip("/")
        self._token = token
        self._deadline = Deadline(timeout_s)
        self._cache = (cache or cache_dir()) / "hub"
        self._session = requests.Session()
        self._session.headers["User-Agent"] = f"v100ctl/{__version__}"

    def listing(self, source: HubSource, *, ask: bool = True) -> HubListing:
        """The files that ``source`` means, at the commit that its revision means now.

        Raises:
            HubError: the hub cannot be reached, refuses, or has no such file.
        """
        commit = source.revision if source.pinned else self._commit(source, ask)
        tree = self._tree(source.repo, commit, ask)
        names = _chosen(source, tree)
        files = []
        for path in names:
            entry = tree[path]
            sha256 = entry.get("sha256") or self._small(source.repo, commit, path, entry, ask)
            files.append(HubFile(name=_local_name(source, path), sha256=sha256, size_bytes=entry["size_bytes"], path=path))
        return HubListing(commit=commit, files=tuple(files))

    def _commit(self, source: HubSource, ask: bool) -> str:
        name = f"name {self.endpoint} {source.repo} {source.revision}"
        kept = self._kept(name)
        age_s = time.time() - kept.get("time_s", 0.0) if kept else None
        if kept and (not ask or (age_s is not None and 0 <= age_s < NAME_LIFETIME_S)):
            return str(kept["commit"])
        url = f"{self.endpoint}/api/models/{source.repo}/revision/{quote(source.revision, safe='')}"
        answer, _ = self._json(url, ask)
        commit = answer.get("sha") if isinstance(answer, Mapping) else None
        if not isinstance(commit, str) or not re.fullmatch(r"[0-9a-f]{40}", commit):
            raise HubError(f"`{url}` does not say which commit {source.revision} is")
        self._keep(name, {"commit": commit, "time_s": time.time()})
        return commit

    def _tree(self, repo: str, commit: str, ask: bool) -> dict[str, dict[str, Any]]:
        name = f"tree {self.endpoint} {repo} {commit}"
        kept = self._kept(name)
        if kept:
            return dict(kept["files"])
        files: dict[str, dict[str, Any]] = {}
        base = f"{self.endpoint}/api/models/{repo}/tree/{commit}"
        url = f"{base}?recursive=true"
        while url:
            page, following = self._json(url, ask)
            if not isinstance(page, list) or len(files) + len(page) > _MAX_FILES:
                raise HubError(f"`{_shown(url)}` is no list of files")
            files.update(_entries(page, _shown(url)))
            # A mirror's next page may be given at the address that it mirrors.
            url = f"{base}?{urlsplit(following).query}" if following else ""
        self._keep(name, {"files": files})
        return files

    def _small(self, repo: str, commit: str, path: str, entry: Mapping[str, Any], ask: bool) -> str:
        """The SHA-256 of a file that the hub has only git's digest of: fetched, and checked by that."""
        name = f"file {repo} {commit} {path} {entry['git']}"
        kept = self._kept(name)
        if kept:
            return str(kept["sha256"])
        url = f"{self.endpoint}/{repo}/resolve/{commit}/{quote(path)}"
        body, _ = self._get(url, ask, limit_bytes=min(_MAX_SMALL_BYTES, entry["size_bytes"]))
        git = hashlib.sha1(b"blob %d\0" % len(body) + body, usedforsecurity=False).hexdigest()
        if git != entry["git"]:
            raise HubError(f"`{url}` is not the file that the hub lists")
        sha256 = hashlib.sha256(body).hexdigest()
        self._keep(name, {"sha256": sha256})
        return sha256

    def _json(self, url: str, ask: bool) -> tuple[Any, str]:
        body, following = self._get(url, ask, limit_bytes=_MAX_ANSWER_BYTES)
        try:
            return json.loads(body), following
        except (ValueError, RecursionError) as error:
            raise HubError(f"`{_shown(url)}` did not answer with JSON: is it a model hub?") from error

    def _get(self, url: str, ask: bool, *, limit_bytes: int) -> tuple[bytes, str]:
        """A whole answer, and where it goes on (the ``Link`` header's ``next``)."""
        if not ask:
            raise HubError("it was not looked at before, and this run asks nobody")
        if _origin(url) != _origin(self.endpoint):
            raise HubError(f"`{_shown(url)}` is another server than the hub's")
        headers = {"Authorization": f"Bearer {self._token}"} if self._token else {}
        timeout = (CONNECT_TIMEOUT_S, min(READ_TIMEOUT_S, max(0.1, self._deadline.remaining_s())))
        try:
            # Where it redirects to another server, `requests` leaves the token out.
            with self._session.get(url, headers=headers, stream=True, timeout=timeout) as answer:
                if answer.status_code != 200:
                    raise self._refused(url, answer)
                body = bytearray()
                for block in answer.iter_content(1 << 16):
                    body += block
                    if len(body) > limit_bytes or self._deadline.expired:
                        raise HubError(f"`{_shown(url)}` answers with more, or slower, than can be true")
                return bytes(body), answer.links.get("next", {}).get("url", "")
        except requests.exceptions.RequestException as error:
            raise HubError(f"`{_shown(url)}`: {reason(error)}") from error

    def _refused(self, url: str, answer: requests.Response) -> HubError:
        said = answer.headers.get("X-Error-Message") or answer.reason or ""
        text = f"`{_shown(url)}` answered {answer.status_code} {printable(said, 200)}".rstrip()
        if answer.status_code in (401, 403):
            why = "the token may not read it (is its licence accepted?)" if self._token else "it may need `model_store_hf_token`"
            text += f": {why}"
        return HubError(text)

    # What was said before

    def _kept_path(self, name: str) -> Path:
        return self._cache / f"{hashlib.sha256(name.encode()).hexdigest()[:32]}.json"

    def _kept(self, name: str) -> dict[str, Any]:
        try:
            document = json.loads(self._kept_path(name).read_text(encoding="utf-8"))
            if document["version"] == _CACHE_VERSION and document["name"] == name:
                return dict(document["value"])
        except (OSError, ValueError, TypeError, KeyError):
            pass
        return {}

    def _keep(self, name: str, value: Mapping[str, Any]) -> None:
        path = self._kept_path(name)
        part = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.part")
        with contextlib.suppress(OSError):
            self._cache.mkdir(parents=True, exist_ok=True)
            try:
                part.write_text(json.dumps({"version": _CACHE_VERSION, "name": name, "value": value}), encoding="utf-8")
                part.replace(path)
            finally:
                part.unlink(missing_ok=True)


def _entries(page: Iterable[Any], where: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The files of one page of a tree; folders and what is no file are left out."""
    for item in page:
        if not isinstance(item, Mapping) or item.get("type") != "file":
            continue
        path, size_bytes, git = item.get("path"), item.get("size"), item.get("oid")
        plain = isinstance(path, str) and re.fullmatch(r"[A-Za-z0-9._+ -]+(/[A-Za-z0-9._+ -]+)*", path)
        if not plain or not isinstance(path, str) or {".", ".."} & set(path.split("/")):
            # A name that no path on the host could have; nothing that a server loads is called like that.
            continue
        large = item.get("lfs")
        sha256 = str(large.get("oid", "")).removeprefix("sha256:") if isinstance(large, Mapping) else ""
        if sha256 and not re.fullmatch(r"[0-9a-f]{64}", sha256):
            raise HubError(f"`{where}` gives no SHA-256 for `{path}`")
        if not isinstance(size_bytes, int) or size_bytes < 0 or not isinstance(git, str):
            raise HubError(f"`{where}` says nothing of the size of `{path}`")
        yield path, {"size_bytes": size_bytes, "sha256": sha256, "git": git}


def _chosen(source: HubSource, tree: Mapping[str, Any]) -> list[str]:
    """The files that are meant: one, all parts of a split one, or all that a server loads."""
    if source.file is not None:
        split = SPLIT_GGUF.fullmatch(source.file)
        if split:
            names = [f"{split[1]}-{number:05d}-of-{split[3]}.gguf" for number in range(1, int(split[3]) + 1)]
        else:
            names = [source.file]
        missing = [name for name in names if name not in tree]
        if missing:
            alike = [path for path in sorted(tree) if path.endswith(Path(source.file).suffix)][:8]
            raise HubError(f"{source.repo} has no `{missing[0]}`" + (f"; it has {', '.join(alike)}" if alike else ""))
        return names
    if source.include:
        names = [path for path in sorted(tree) if any(fnmatch.fnmatch(path, pattern) for pattern in source.include)]
    else:
        names = [
            path
            for path in sorted(tree)
            if not path.startswith(_NOT_SERVED_FOLDERS)
            and not any(fnmatch.fnmatch(Path(path).name.lower(), pattern) for pattern in _NOT_SERVED)
        ]
    if "config.json" not in names:
        raise HubError(f"{source.repo} has no `config.json` among its files, so it is no folder that vLLM loads; name a `file`")
    return names


def _local_name(source: HubSource, path: str) -> str:
    """The parts of a split file lie in one folder by their own names, wherever the repository has them."""
    return path if source.file is None else path.rpartition("/")[2]


def _shown(url: str) -> str:
    return printable(url.partition("?")[0])


def _origin(url: str) -> tuple[str, str]:
    address = urlsplit(url)
    return address.scheme, address.netloc.lower()
