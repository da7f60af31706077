"""The controller's cache: files that can be fetched or built again, each checked against its SHA-256 whenever it is used.

Layout below :func:`v100ctl.paths.cache_dir`: ``sources/``, ``releases/BUILD_ID.tar.gz``, ``models/SHA256``, each file with its
digest in ``NAME.sha256`` beside it. A file is made as ``NAME.part`` and renamed in; what a killed process left under that name is
removed by the next one that makes the same file.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import importlib.util
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import ModuleType

from v100ctl.errors import ArtifactError
from v100ctl.paths import cache_dir, content_dir

#: Called with a sentence for the user that is no error: a place that was skipped, an entry that was dropped.
Note = Callable[[str], None]

_BLOCK_BYTES = 1024 * 1024


@cache
def build_script() -> ModuleType:
    """The role's build script as a module: what a source tree's digest is and what a sound release is, is said there alone."""
    path = content_dir() / "roles" / "llama_cpp" / "files" / "build_release.py"
    spec = importlib.util.spec_from_file_location("v100ctl_build_release", path)
    if spec is None or spec.loader is None:
        raise ArtifactError(f"`{path}` cannot be read", hint="install v100ctl again")
    module = importlib.util.module_from_spec(spec)
    # Not `sys.dont_write_bytecode` for the whole process: only this file lies in a folder that is copied as it is.
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        spec.loader.exec_module(module)
    finally:
        sys.dont_write_bytecode = before
    return module


def sha256_file(path: Path) -> str:
    """The SHA-256 of a file's content, in hexadecimal; constant memory."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def ignore_note(text: str) -> None:
    """A :data:`Note` that nobody wants to read."""


@contextlib.contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Turns the system's refusals to write into :class:`ArtifactError`: disk full, no permission."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ArtifactError(
                f"the disk with `{folder}` is full",
                hint="free some space there, or set `XDG_CACHE_HOME` to a folder on a larger disk",
            ) from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise ArtifactError(
                f"`{error.filename or folder}` cannot be written: {error.strerror}",
                hint="set `XDG_CACHE_HOME` to a folder of your own",
            ) from error
        raise


class Cache:
    """The cache below ``root``; several processes may use it at once."""

    def __init__(self, root: Path | None = None) -> None:
        self.root = root or cache_dir()

    def source_path(self, key: str) -> Path:
        """Where the source archive with this key lies, there or not."""
        return self.root / "sources" / f"{_file_name(key)}.tar.gz"

    def release_path(self, build_id: str) -> Path:
        """Where the packed release lies, there or not."""
        return self.root / "releases" / f"{_file_name(build_id)}.tar.gz"

    def model_path(self, sha256: str) -> Path:
        """Where the model with this content lies, there or not."""
        return self.root / "models" / _file_name(sha256)

    def engine_path(self, sha256: str) -> Path:
        """Where the file of an engine that the user brings lies, there or not."""
        return self.root / "engines" / _file_name(sha256)

    @contextlib.contextmanager
    def locked(self, path: Path) -> Iterator[Path]:
        """Holds the lock of one entry and yields where to make it; whatever lies there afterwards is removed."""
        part = path.with_name(path.name + ".part")
        with writing(self.root):
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = (path.parent / f".{path.name}.lock").open("a")
        with lock, writing(self.root):
            fcntl.flock(lock, fcntl.LOCK_EX)
            remove(part)
            try:
                yield part
            finally:
                remove(part)

    def check(self, path: Path, note: Note = ignore_note) -> bool:
        """Whether the entry is there and is what was put in. One that is not is dropped, with a note. Call it locked."""
        if not path.is_file():
            return False
        digest = _digest_path(path)
        kept = digest.read_text(encoding="ascii", errors="replace").strip() if digest.is_file() else ""
        if kept and kept == sha256_file(path):
            return True
        note(f"`{path}` was damaged and is made again")
        path.unlink()
        digest.unlink(missing_ok=True)
        return False

    def put(self, part: Path, path: Path, sha256: str) -> None:
        """Makes ``part`` the entry ``path``, on disk before it has its name. Call it locked."""
        descriptor = os.open(part, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        # The digest comes first: an entry without one would not be trusted, a digest without an entry harms nobody.
        path.unlink(missing_ok=True)
        aside = _digest_path(path).with_name(_digest_path(path).name + ".part")
        aside.write_text(sha256 + "\n", encoding="ascii")
        aside.replace(_digest_path(path))
        part.replace(path)

    def find_release(self, build_id: str, note: Note = ignore_note) -> tuple[Path, str] | None:
        """Path and SHA-256 of the packed release, or ``None`` when it has to be built."""
        path = self.release_path(build_id)
        if not path.is_file():
            return None
        with self.locked(path):
            return (path, _digest_path(path).read_text(encoding="ascii").strip()) if self.check(path, note) else None

    def incoming_path(self, build_id: str, host: str) -> Path:
        """Where to put a packed release that comes from ``host``, on the cache's own filesystem."""
        return self.root / "releases" / f".incoming-{_file_name(build_id)}-{hashlib.sha256(host.encode()).hexdigest()[:12]}"

    def slice_path(self, path: str, host: str) -> Path:
        """Where to put a slice of a model that goes to ``path`` on ``host``; its folder is there."""
        key = hashlib.sha256(f"{host} {path}".encode()).hexdigest()[:16]
        with writing(self.root):
            (self.root / "models").mkdir(parents=True, exist_ok=True)
        return self.root / "models" / f".slice-{key}"

    def store_release(self, build_id: str, archive: Path, sha256: str) -> Path:
        """Takes the packed release at ``archive`` into the cache, which moves it when it lies in the cache's folder.

        Raises:
            ArtifactError: It is cut off, another release, or its files are not those that its ``release.json`` lists.
        """
        path = self.release_path(build_id)
        with self.locked(path) as part:
            if archive.parent == path.parent:
                archive.rename(part)
            else:
                shutil.copyfile(archive, part)
            found = sha256_file(part)
            if found != sha256:
                raise ArtifactError(
                    f"the packed release {build_id} came with the sha256 {found} instead of {sha256}", hint="run it again"
                )
            try:
                document = build_script().archive_release(part)
            except build_script().BuildError as error:
                raise ArtifactError(f"the packed release {build_id} cannot be used: {error.message}") from error
            if document["build_id"] != build_id:
                raise ArtifactError(f"the packed release is {document['build_id']}, and {build_id} was asked for")
            self.put(part, path, sha256)
        return path


def remove(path: Path) -> None:
    """Removes a file or a folder, there or not."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _digest_path(path: Path) -> Path:
    return path.with_name(path.name + ".sha256")


def _file_name(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._+-]*", name):
        raise ArtifactError(f"`{name}` cannot be the name of a file in the cache")
    return name
