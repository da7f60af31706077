#!/usr/bin/env python3
"""Builds, checks and installs one release of an engine on a host.

Runs where nothing of ours is installed: standard library only, Python 3.8 or later. Each verb prints one JSON object.

``start --spec FILE --archive FILE --work DIR [--patches DIR]``
    Starts a build that goes on by itself when the caller goes away, or attaches to the one that runs in DIR already. A build
    that was killed is taken up where it stopped.
``status --work DIR``
    ``{"state": "absent|running|done|failed", "phase", "done", "total", "message", ...}``; a build whose process died is
    ``failed``. When done: ``archive``, ``sha256``, ``size_bytes``.
``install --archive FILE --sha256 HEX --release DIR``
    Unpacks a release aside, checks every file and that its program starts in an empty environment, and renames it in.
``verify --release DIR [--sizes]``
    ``{"sound": true|false, "problem"}``, exit status 1 when it is not. ``--sizes`` trusts sizes instead of hashing.

``prune --keep DIR [--keep DIR ...] [--units DIR] [--history DIR] [--check]``
    Removes older releases beside those of ``--keep``: what a unit or a process uses stays, and else the newest one.
    ``{"changed", "removed"}``; with ``--check`` nothing is done.
``patches-digest --patches DIR``
    ``{"sha256", "names"}`` of a folder of patches.

The work folder: ``spec.json`` (what is built), ``lock`` (held by the builder and by everything it starts), ``builder.json``
(who it is), ``status.json``, ``build.log``, ``src/``, ``build/``, ``stage/``, ``release.tar.gz``.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import fcntl
import gzip
import hashlib
import json
import os
import platform
import posixpath
import re
import shutil
import signal
import stat
import subprocess
import sys
import tarfile
import time
import zlib
from collections import deque
from pathlib import Path
from typing import IO, Any, Callable, Dict, Iterator, Mapping, NamedTuple, NoReturn, Sequence

BUILD_SCHEMA = "v100ctl/build/1"
RELEASE_SCHEMA = "v100ctl/release/1"

GIB = 1024**3
MIB = 1024**2
#: What one compiler process of llama.cpp may need at its peak.
JOB_MEMORY_BYTES = 2 * GIB
#: Sources, objects, the staged release and its archive, where the spec does not say.
BUILD_SPACE_BYTES = GIB // 2
LOG_TAIL_LINES = 40
#: Programs that a build may use come from the distribution, whatever the caller's PATH holds.
SYSTEM_PATH = "/usr/sbin:/usr/bin:/sbin:/bin"
#: A fixed time for all sources: one from the future would make ninja configure again without end.
SOURCE_MTIME_S = 1_000_000_000
PROGRAM_TIMEOUT_S = 60
#: The driver's own library: it has to be the running driver's, so it never comes with a release.
DRIVER_LIBRARY = "libcuda.so.1"
#: The most that compiled objects may take in the build host's own ccache.
CCACHE_SIZE = "4G"

#: The last states that the host has served by: TIMESTAMP.json.
HISTORY = Path("/var/lib/v100ctl/state/history")

JsonObject = Dict[str, Any]


class BuildError(Exception):
    """Something that cannot be done, said for a person: what was wrong and where, and as ``hint`` what to do next."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


# --------------------------------------------------------------------------------------------------------------- small tools


def sha256_file(path: Path) -> str:
    """The SHA-256 of a file's content, in hexadecimal."""
    with path.open("rb") as stream:
        return _sha256_stream(stream)


def _sha256_stream(stream: IO[bytes]) -> str:
    digest = hashlib.sha256()
    for block in iter(lambda: stream.read(MIB), b""):
        digest.update(block)
    return digest.hexdigest()


def _write_atomic(path: Path, content: str) -> None:
    aside = path.with_name(f"{path.name}.{os.getpid()}.part")
    aside.write_text(content, encoding="utf-8")
    aside.replace(path)


def _read_json(path: Path) -> JsonObject | None:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return document if isinstance(document, dict) else None


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(str(path))
    else:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()


def _fsync(path: Path) -> None:
    descriptor = os.open(str(path), os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _fsync_tree(root: Path) -> None:
    for folder, _, names in os.walk(str(root)):
        for name in names:
            _fsync(Path(folder, name))
        _fsync(Path(folder))


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / MIB:.0f} MiB"


# ------------------------------------------------------------------------------------------------------------ source archives


def is_build_input(path: str) -> bool:
    """Whether the compile may read this file of the source tree; nothing else is unpacked or counted in its digest.

    The web page's own project (``tools/ui`` below its top level) is left out: it is not built, and a ready-made page lying there
    would go into the server unchecked.
    """
    parts = path.split("/")
    if len(parts) == 1:
        return path in ("CMakeLists.txt", "LICENSE")
    if parts[0] == "scripts":
        return len(parts) == 2 and path.endswith(".cmake")
    if parts[0] == "tools":
        return parts[1] != "ui" or len(parts) == 3
    return parts[0] in ("cmake", "common", "ggml", "include", "licenses", "src", "vendor")


class _Source:
    """The build inputs of an opened source archive: regular files, and links that stay among them."""

    def __init__(self, archive: tarfile.TarFile, strips: Sequence[str]) -> None:
        self.files: dict[str, tarfile.TarInfo] = {}
        self.links: dict[str, str] = {}
        members = archive.getmembers()
        names = {member.name for member in members}
        prefixes = [strip.strip("/") + "/" if strip.strip("/") else "" for strip in strips]
        prefix = next((prefix for prefix in prefixes if prefix + "CMakeLists.txt" in names), None)
        if prefix is None:
            looked = ", ".join(f"`{prefix}CMakeLists.txt`" for prefix in prefixes)
            raise BuildError(f"the source archive holds none of {looked}")
        for member in members:
            _refuse_unsafe_name(member.name)
            if not member.name.startswith(prefix):
                continue
            path = posixpath.normpath(member.name[len(prefix) :])
            if member.isdir() or not is_build_input(path):
                continue
            if member.isreg():
                self.files[path] = member
            elif member.issym() or member.islnk():
                self.links[path] = self._target(path, member, prefix)
            else:
                raise BuildError(f"the source archive holds `{member.name}`, which is neither a file, a folder nor a link")
        for path in self.links:
            self._final(path)

    @staticmethod
    def _target(path: str, member: tarfile.TarInfo, prefix: str) -> str:
        if member.issym():
            target = posixpath.normpath(posixpath.join(posixpath.dirname(path), member.linkname))
        else:
            target = posixpath.normpath(member.linkname[len(prefix) :]) if member.linkname.startswith(prefix) else ".."
        if posixpath.isabs(member.linkname) or target == ".." or target.startswith("../"):
            raise BuildError(f"the source archive holds a link out of its folder: `{member.name}` -> `{member.linkname}`")
        return target

    def _final(self, path: str) -> tarfile.TarInfo:
        seen = {path}
        target = self.links[path]
        while target in self.links:
            if target in seen:
                raise BuildError(f"the source archive holds a link to itself: `{path}`")
            seen.add(target)
            target = self.links[target]
        if target not in self.files:
            raise BuildError(f"the source archive holds a link to a file that it lacks: `{path}` -> `{self.links[path]}`")
        return self.files[target]

    def items(self) -> list[tuple[str, tarfile.TarInfo]]:
        """Path and content of each file, links as copies of what they point at, in the archive's order: gzip reads forward."""
        found = dict(self.files)
        found.update((path, self._final(path)) for path in self.links)
        return sorted(found.items(), key=lambda item: item[1].offset_data)


def _refuse_unsafe_name(name: str) -> None:
    if name.startswith("/") or ".." in name.split("/"):
        raise BuildError(f"the archive holds the unsafe path `{name}`")


def _tree_digest(entries: Mapping[str, str]) -> str:
    digest = hashlib.sha256()
    for path, content_sha256 in sorted(entries.items()):
        digest.update(f"{content_sha256}  {path}\n".encode())
    return digest.hexdigest()


def _content(archive: tarfile.TarFile, member: tarfile.TarInfo) -> IO[bytes]:
    stream = archive.extractfile(member)
    if stream is None:
        raise BuildError(f"the archive holds no content for `{member.name}`")
    return stream


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[tarfile.TarFile]:
    try:
        with gzip.open(str(path)) as stream:
            with tarfile.open(fileobj=stream, mode="r:") as archive:
                yield archive
            # A tar archive ends before its stream does: only at the very end is there a checksum over all of it.
            while stream.read(MIB):
                pass
    except (tarfile.TarError, EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise BuildError(f"`{path}` is not a whole .tar.gz archive: {error}") from error


def archive_tree_sha256(path: Path, strips: Sequence[str]) -> str:
    """The digest of the build inputs in a source archive, the same for every archive of one tree.

    SHA-256 over lines ``<sha256 of the content>  <path>`` sorted by path. File modes are left out: packagers disagree on them
    and the compile does not read them.

    Raises:
        BuildError: Not an archive, or one with unsafe paths.
    """
    with _opened(path) as archive:
        items = _Source(archive, strips).items()
        return _tree_digest({name: _sha256_stream(_content(archive, member)) for name, member in items})


def unpack_source(path: Path, strips: Sequence[str], dest: Path, progress: Callable[[int, int], None]) -> str:
    """Writes the build inputs of a source archive into the new folder ``dest`` and returns their digest.

    Raises:
        BuildError: Not an archive, or one with unsafe paths.
    """
    digests: dict[str, str] = {}
    dest.mkdir()
    with _opened(path) as archive:
        items = _Source(archive, strips).items()
        for count, (name, member) in enumerate(items, start=1):
            target = dest / name
            target.parent.mkdir(parents=True, exist_ok=True)
            content = _content(archive, member).read()
            target.write_bytes(content)
            target.chmod(0o755 if member.mode & 0o100 else 0o644)
            os.utime(str(target), (SOURCE_MTIME_S, SOURCE_MTIME_S))
            digests[name] = hashlib.sha256(content).hexdigest()
            if count % 50 == 0 or count == len(items):
                progress(count, len(items))
    return _tree_digest(digests)


def patches_digest(folder: Path) -> tuple[str, list[str]]:
    """The digest of a folder's patches (``*.patch``, ``*.diff``), made like a source tree's, and their names as they are applied.

    Raises:
        BuildError: There is no such folder, or it holds no patch.
    """
    if not folder.is_dir():
        raise BuildError(f"the folder of patches `{folder}` does not exist")
    names = sorted(path.name for path in folder.iterdir() if path.suffix in (".patch", ".diff") and path.is_file())
    if not names:
        raise BuildError(f"`{folder}` holds no file that ends in .patch or .diff")
    return _tree_digest({name: sha256_file(folder / name) for name in names}), names


# ------------------------------------------------------------------------------------------------------------------- releases


def _release_document(document: JsonObject | None) -> JsonObject:
    if document is None or document.get("schema") != RELEASE_SCHEMA or not isinstance(document.get("files"), dict):
        raise BuildError("release.json is missing, damaged, or of another kind")
    for name in document["files"]:
        _refuse_unsafe_name(name)
    return document


def release_problem(release: Path, hashes: bool = True) -> str | None:
    """Why the release in this folder cannot be used, or ``None`` when it is sound."""
    if not release.is_dir():
        return "it does not exist"
    try:
        document = _release_document(_read_json(release / "release.json"))
    except BuildError as error:
        return error.message
    for name, expected in sorted(document["files"].items()):
        path = release / name
        try:
            found = path.lstat()
        except OSError:
            return f"`{name}` is missing"
        if not stat.S_ISREG(found.st_mode):
            return f"`{name}` is not a regular file"
        if found.st_size != expected["size_bytes"]:
            return f"`{name}` has {found.st_size} bytes instead of {expected['size_bytes']}"
        if stat.S_IMODE(found.st_mode) != int(expected["mode"], 8):
            return f"`{name}` has mode {stat.S_IMODE(found.st_mode):04o} instead of {expected['mode']}"
        if hashes and sha256_file(path) != expected["sha256"]:
            return f"`{name}` has another sha256 than release.json says"
    if hashes:
        for folder, folders, names in os.walk(str(release)):
            for name in names + [entry for entry in folders if Path(folder, entry).is_symlink()]:
                relative = str(Path(folder, name).relative_to(release))
                if relative != "release.json" and relative not in document["files"]:
                    return f"`{relative}` is not listed in release.json"
    return None


def archive_release(path: Path) -> JsonObject:
    """The ``release.json`` of a packed release, after every file in the archive was checked against it.

    Raises:
        BuildError: Not a whole archive, or its files are not those that its ``release.json`` lists.
    """
    with _opened(path) as archive:
        members: dict[str, tarfile.TarInfo] = {}
        for member in archive.getmembers():
            _refuse_unsafe_name(member.name)
            if not member.isreg():
                raise BuildError(f"the release archive holds `{member.name}`, which is not a regular file")
            members[member.name] = member
        described = members.pop("release.json", None)
        if described is None:
            raise BuildError("the release archive holds no release.json")
        try:
            document = _release_document(json.loads(_content(archive, described).read()))
        except ValueError as error:
            raise BuildError(f"the release archive's release.json is damaged: {error}") from error
        different = sorted(set(members) ^ set(document["files"]))
        if different:
            raise BuildError(f"the release archive and its release.json disagree on `{different[0]}`")
        for name, member in members.items():
            if _sha256_stream(_content(archive, member)) != document["files"][name]["sha256"]:
                raise BuildError(f"the release archive's `{name}` has another sha256 than its release.json says")
    return document


def check_program(release: Path, document: Mapping[str, Any], driver_folder: str = "") -> None:
    """Starts the release's first program in an empty environment and looks for its build number in what it prints.

    Args:
        release: The release's folder.
        document: Its ``release.json``.
        driver_folder: A folder that holds a library of the driver's name, for a build host that has no driver.

    Raises:
        BuildError: It does not start here, or it is another build.
    """
    program = release / "bin" / str(document["targets"][0])
    number = str(document["build_number"])
    try:
        done = subprocess.run(
            [str(program), "--version"],
            env={"LD_LIBRARY_PATH": driver_folder} if driver_folder else {},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=PROGRAM_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"`{program} --version` did not end within {PROGRAM_TIMEOUT_S} s") from error
    except OSError as error:
        raise BuildError(f"`{program}` does not start on this host: {error.strerror}") from error
    output = done.stdout.decode("utf-8", "replace").strip()
    if done.returncode == -signal.SIGILL:
        level = document.get("cpu", {}).get("level") or "another processor"
        raise BuildError(
            f"`{program}` was built for {level}, and this host's processor lacks some of its instructions",
            "build it with the options of an older processor (`GGML_AVX2=OFF` and the like), or use a newer host",
        )
    missing = re.search(r"shared libraries: (\S+): cannot open", output)
    if missing and missing.group(1) == DRIVER_LIBRARY:
        raise BuildError(
            f"`{program}` does not start on this host: it lacks {DRIVER_LIBRARY}, which comes with the NVIDIA driver",
            "install the driver first (role nvidia_driver)",
        )
    if missing:
        raise BuildError(
            f"`{program}` does not start on this host: it lacks the library {missing.group(1)}",
            "install the package that brings it, for example `apt-get install libgomp1` for libgomp.so.1",
        )
    if done.returncode != 0:
        raise BuildError(f"`{program} --version` ended with status {done.returncode}: {output[-500:]}")
    if not re.search(rf"(?<!\d){re.escape(number)}(?!\d)", output):
        raise BuildError(f"`{program} --version` does not name build {number}: {output[-500:]}")


def install(archive: Path, sha256: str, release: Path) -> JsonObject:
    """Makes ``release`` the folder that the archive holds: nothing is ever half-written at that path.

    A sound release of that name is left alone. A broken one is moved aside only after its successor has passed every check.

    Raises:
        BuildError: The archive is not what ``sha256`` says, or what it holds does not run on this host.
    """
    parent, name = release.parent, release.name
    parent.mkdir(parents=True, exist_ok=True)
    holder = os.open(str(parent), os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(holder, fcntl.LOCK_EX)
        incoming, broken = parent / f".incoming-{name}", parent / f".broken-{name}"
        _remove(incoming)
        _remove(broken)
        problem = release_problem(release) if os.path.lexists(str(release)) else "it does not exist"
        if problem is None:
            return {"changed": False, "path": str(release)}
        found = sha256_file(archive)
        if found != sha256:
            raise BuildError(f"`{archive}` has sha256 {found} instead of {sha256}", "run it again: the archive is copied anew")
        try:
            document = _unpack_release(archive, incoming)
            unsound = release_problem(incoming)
            if unsound is not None:
                raise BuildError(f"the release in `{archive}` is damaged: {unsound}")
            if document["build_id"] != name:
                raise BuildError(f"`{archive}` holds the release {document['build_id']} instead of {name}")
            check_program(incoming, document)
            _fsync_tree(incoming)
        except BaseException:
            _remove(incoming)
            raise
        if os.path.lexists(str(release)):
            release.rename(broken)
        incoming.rename(release)
        _fsync(parent)
        _remove(broken)
        return {"changed": True, "path": str(release), "replaced": problem if problem != "it does not exist" else ""}
    finally:
        os.close(holder)


def good_states(history: Path) -> list[str]:
    """The last two states, as texts, that the host has served by and can go back to; each is named in them by its path."""
    found = {}  # type: Dict[str, str]
    for path in sorted(history.glob("*.json"), reverse=True):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            text = path.read_text(encoding="utf-8", errors="replace")
            found.setdefault(json.loads(text)["state"], text)
    return list(found.values())[:2]


def prune(keep: Sequence[Path], units: Path, check: bool, history: Path = HISTORY) -> JsonObject:
    """Removes releases that nothing needs from the folder that holds those of ``keep``, which stay.

    So does what a unit of ours or one of the last good states names, or a process runs from. Where that is nothing else, the
    newest one stays: the one before.
    """
    (parent,) = {path.parent for path in keep}
    if not parent.is_dir():
        return {"changed": False, "removed": []}
    used = {path.name for path in keep}
    texts = [unit.read_text(encoding="utf-8", errors="replace") for unit in units.glob("v100-*.service")]
    texts += good_states(history)
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            with contextlib.suppress(OSError):
                texts.append(os.readlink(str(process / "exe")))
    for text in texts:
        used.update(re.findall(re.escape(str(parent)) + r"/([A-Za-z0-9][A-Za-z0-9._+-]*)", text))
    holder = os.open(str(parent), os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(holder, fcntl.LOCK_EX)
        found = [path for path in parent.iterdir() if path.is_dir() and not path.is_symlink() and not path.name.startswith(".")]
        others = sorted((path for path in found if path.name not in used), key=lambda path: -path.stat().st_mtime_ns)
        if not any(path.name in used and path not in keep for path in found):
            del others[:1]
        if not check:
            for path in others:
                # Under another name first: a release that lacks half of its files shall not be found.
                aside = parent / f".removed-{path.name}"
                _remove(aside)
                path.rename(aside)
            for left in parent.glob(".removed-*"):
                _remove(left)
        return {"changed": bool(others), "removed": sorted(path.name for path in others)}
    finally:
        os.close(holder)


def _unpack_release(path: Path, dest: Path) -> JsonObject:
    document = archive_release(path)
    dest.mkdir()
    with _opened(path) as archive:
        for member in archive.getmembers():
            target = dest / member.name
            target.parent.mkdir(parents=True, exist_ok=True)
            with target.open("xb") as stream:
                shutil.copyfileobj(_content(archive, member), stream, MIB)
            target.chmod(int(document["files"].get(member.name, {"mode": "0644"})["mode"], 8))
    return document


def pack_release(stage: Path, archive: Path) -> None:
    """Packs a release so that the same files give the same bytes: sorted, without times, owners or folders."""
    aside = archive.with_name(archive.name + ".part")
    names = sorted(str(path.relative_to(stage)) for path in stage.rglob("*") if path.is_file())
    with aside.open("wb") as raw:
        # A library for cards is most of a gigabyte, whose code is compressed already: more effort takes minutes and saves little.
        packed = gzip.GzipFile(filename="", mode="wb", compresslevel=1, fileobj=raw, mtime=0)
        with packed, tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as tar:
            for name in names:
                path = stage / name
                member = tarfile.TarInfo(name)
                member.size = path.stat().st_size
                member.mode = stat.S_IMODE(path.stat().st_mode)
                with path.open("rb") as stream:
                    tar.addfile(member, stream)
        raw.flush()
        os.fsync(raw.fileno())
    aside.replace(archive)


# ----------------------------------------------------------------------------------------------------------------- the builder


def load_spec(path: Path) -> JsonObject:
    """Reads a build specification.

    Raises:
        BuildError: It is not one, or holds a name that cannot be used as a folder or program name.
    """
    spec = _read_json(path)
    if spec is None or spec.get("schema") != BUILD_SCHEMA:
        raise BuildError(f"`{path}` is not a build specification ({BUILD_SCHEMA})")
    for key in ("engine", "build_id", "build_number", "backend", "source", "cmake_options", "targets", "licence"):
        if key not in spec:
            raise BuildError(f"`{path}` lacks `{key}`")
    for name in [spec["build_id"], *spec["targets"]]:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._+-]*", str(name)):
            raise BuildError(f"`{path}` holds a name that cannot be used: `{name}`")
    if not spec["targets"]:
        raise BuildError(f"`{path}` names no target to build")
    if spec["backend"] == "cuda":
        for key in ("version", "nvcc", "host_compiler", "bundle"):
            if key not in spec.get("cuda", {}):
                raise BuildError(f"`{path}` is for CUDA and lacks `cuda.{key}`")
    return spec


def host_libc() -> str:
    """This host's C library, as a spec names it (``glibc-2.36``)."""
    name, version = platform.libc_ver()
    return f"{name}-{version}" if name else ""


def _check_host(spec: JsonObject, work: Path) -> None:
    for what, asked, here in (
        ("machine", spec.get("machine"), platform.machine()),
        ("C library", spec.get("libc"), host_libc()),
    ):
        if asked and asked != here:
            raise BuildError(
                f"release {spec['build_id']} is for the {what} {asked}, and this host has {here}",
                "build it on a host with the same distribution (`llama_cpp_build_on`)",
            )
    needed_bytes = int(spec.get("build_space_bytes", BUILD_SPACE_BYTES))
    free_bytes = shutil.disk_usage(str(work)).free
    if free_bytes < needed_bytes and not (work / "build").is_dir():
        raise BuildError(
            f"the build needs {_mib(needed_bytes)} in `{work}`, and {_mib(free_bytes)} are free there",
            f"free {_mib(needed_bytes - free_bytes)} on that filesystem",
        )


def _start_ticks(pid: int) -> int | None:
    """When a living process was started, in clock ticks since boot; ``None`` for none or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in ("Z", "X") else int(fields[19])


class Work:
    """The work folder of one build: its lock, who holds it, and its status."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.log = path / "build.log"
        self.archive = path / "release.tar.gz"

    def builder_pid(self) -> int | None:
        """The living builder, or ``None``."""
        builder = _read_json(self.path / "builder.json")
        if builder is None or _start_ticks(builder["pid"]) != builder["start_ticks"]:
            return None
        return int(builder["pid"])

    def note_builder(self, pid: int) -> None:
        _write_atomic(self.path / "builder.json", json.dumps({"pid": pid, "start_ticks": _start_ticks(pid)}))

    def try_lock(self) -> int | None:
        """The lock's file descriptor, or ``None`` when a living builder has it. Ends what a killed builder left running."""
        descriptor = os.open(str(self.path / "lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        # Another call may hold it for a moment: `status` while it looks, `start` until its builder is noted.
        deadline_s = time.monotonic() + 10
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return descriptor
            except BlockingIOError:
                # One that has said its last word is about to end, and is nothing to attach to.
                spoken = (_read_json(self.path / "status.json") or {}).get("state") in ("done", "failed")
                if (self.builder_pid() is not None and not spoken) or time.monotonic() > deadline_s:
                    os.close(descriptor)
                    return None
                for pid in () if self.builder_pid() is not None else self._orphans():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                time.sleep(0.05)

    def _orphans(self) -> set[int]:
        """Processes of a dead builder's session that still have the lock open: compilers, ninja."""
        builder = _read_json(self.path / "builder.json")
        if builder is None:
            return set()
        lock = str(self.path.resolve() / "lock")
        found = set()
        for process in Path("/proc").iterdir():
            if not process.name.isdigit():
                continue
            try:
                if os.getsid(int(process.name)) != builder["pid"]:
                    continue
                if any(os.readlink(str(entry)) == lock for entry in (process / "fd").iterdir()):
                    found.add(int(process.name))
            except OSError:
                continue
        return found

    def locked(self) -> bool:
        """Whether someone holds the lock now."""
        try:
            descriptor = os.open(str(self.path / "lock"), os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        else:
            return False
        finally:
            os.close(descriptor)

    def write_status(self, state: str, **values: Any) -> None:
        _write_atomic(self.path / "status.json", json.dumps({"state": state, **values}, sort_keys=True) + "\n")

    def log_tail(self) -> list[str]:
        try:
            with self.log.open(encoding="utf-8", errors="replace") as stream:
                return [line.rstrip("\n")[:500] for line in deque(stream, LOG_TAIL_LINES)]
        except OSError:
            return []

    def status(self) -> JsonObject:
        """What is known of the build now; a builder that is gone without a last word has failed."""
        status = _read_json(self.path / "status.json")
        if status is None:
            return {"state": "absent", "phase": "", "done": 0, "total": 0, "message": f"nothing was built in `{self.path}`"}
        if status["state"] == "running" and (not self.locked() or self.builder_pid() is None):
            # Its last word may have come between the two looks.
            status = _read_json(self.path / "status.json") or status
            if status["state"] == "running" and self.builder_pid() is None:
                free_bytes = shutil.disk_usage(str(self.path)).free
                why = f"; only {_mib(free_bytes)} are free in `{self.path}`" if free_bytes < 16 * MIB else ""
                status.update(
                    state="failed",
                    message=f"the builder died while in the phase {status['phase']}{why}",
                    hint="run it again: the build goes on where it stopped",
                    log_tail=self.log_tail(),
                )
        return status


def start(spec_path: Path, archive: Path, work_path: Path, patches: Path | None = None) -> JsonObject:
    """Starts the build in its own session, or attaches to the running one; returns its status and ``started``.

    Raises:
        BuildError: The spec cannot be built here.
    """
    spec = load_spec(spec_path)
    work_path.mkdir(parents=True, exist_ok=True)
    work = Work(work_path.resolve())
    lock = work.try_lock()
    if lock is None:
        return {**work.status(), "started": False}
    try:
        content = json.dumps(spec, sort_keys=True, indent=1)
        kept = work.path / "spec.json"
        if not kept.is_file() or kept.read_text(encoding="utf-8") != content:
            for name in ("src", "build", "stage", "release.tar.gz", "status.json"):
                _remove(work.path / name)
            _write_atomic(kept, content)
        status = work.status()
        if status["state"] == "done" and work.archive.is_file() and sha256_file(work.archive) == status["sha256"]:
            return {**status, "started": False}
        _check_host(spec, work.path)
        if spec["backend"] == "cuda":
            # Said to the caller at once rather than by a build that has begun.
            find_toolkit(spec["cuda"])
        if not (work.path / "src").is_dir() and not archive.is_file():
            raise BuildError(f"the source archive `{archive}` does not exist")
        work.note_builder(os.getpid())
        work.write_status("running", build_id=spec["build_id"], phase="unpack", done=0, total=0, message="starting")
        # Room for the last word when the disk has become full.
        (work.path / "reserve").write_bytes(b"\0" * 65536)
        with work.log.open("ab") as log:
            argv = [sys.executable, "-B", str(Path(__file__).resolve()), "run"]
            if patches is not None:
                argv += ["--patches", str(patches.resolve())]
            builder = subprocess.Popen(
                [*argv, "--archive", str(archive.resolve()), "--work", str(work.path), "--lock", str(lock)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=_clean_environment(work.path, SYSTEM_PATH, {}),
                cwd=str(work.path),
                start_new_session=True,
                pass_fds=(lock,),
            )
        work.note_builder(builder.pid)
        return {**work.status(), "started": True}
    finally:
        os.close(lock)


def _clean_environment(work: Path, path: str, extra: Mapping[str, str]) -> dict[str, str]:
    """All that a build sees of its surroundings: no flags, compilers or caches of whoever started it."""
    return {
        "PATH": path,
        "HOME": str(work / "home"),
        "TMPDIR": str(work / "tmp"),
        "LC_ALL": "C.UTF-8",
        "GIT_CEILING_DIRECTORIES": str(work.parent),
        **extra,
    }


def _memory_bytes() -> int:
    """Memory that is free for this process: what the kernel calls available, or less where a cgroup limits it."""
    available = JOB_MEMORY_BYTES
    match = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(encoding="utf-8"))
    if match:
        available = int(match.group(1)) * 1024
    for folder, limit_name, used_name, cache_name in (
        ("/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
        ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        # An absent file is the other cgroup version; the word `max` is no limit.
        with contextlib.suppress(OSError, ValueError):
            limit, used = (int(Path(folder, name).read_text(encoding="utf-8")) for name in (limit_name, used_name))
            cached = re.search(rf"^{cache_name} (\d+)", Path(folder, "memory.stat").read_text(encoding="utf-8"), re.MULTILINE)
            available = min(available, limit - used + (int(cached.group(1)) if cached else 0))
    return available


def job_count(usable_cpus: int, memory_bytes: int) -> int:
    """How many compilers may run at once: one a processor, as far as memory allows."""
    return max(1, min(usable_cpus, memory_bytes // JOB_MEMORY_BYTES))


def unused_options(output: str) -> list[str]:
    """The options that CMake says it did not use, from what it printed."""
    heading = "Manually-specified variables were not used by the project:"
    match = re.search(heading + r"\s*\n((?:[ \t]*\n|[ \t]+\S+[ \t]*\n?)+)", output)
    return match.group(1).split() if match else []


def read_cmake_cache(text: str) -> dict[str, str]:
    """Name and value of each entry of a ``CMakeCache.txt``."""
    found = {}
    for line in text.splitlines():
        match = re.match(r'"?([^"#/=:][^"=:]*)"?:([A-Z]+)=(.*)$', line)
        if match:
            value = match.group(3)
            # CMake quotes a value that begins or ends in a blank.
            found[match.group(1)] = value[1:-1] if re.fullmatch(r"'.*'", value) else value
    return found


def option_problems(asked: Mapping[str, str], unused: Sequence[str], cache: Mapping[str, str]) -> list[str]:
    """What is wrong with the options of a configured build, one sentence each; empty when all stand as asked."""
    problems = []
    for name in unused:
        suffix = "_" + name.partition("_")[2]
        alike = sorted(other for other in cache if other.endswith(suffix) and other != name and other not in unused)
        also = f" (it knows `{alike[0]}`)" if alike and suffix != "_" else ""
        problems.append(f"the project does not use the option `{name}`{also}")
    for name, value in sorted(asked.items()):
        if name in unused:
            continue
        if name not in cache:
            problems.append(f"the option `{name}` was asked as `{value}` and is not in CMakeCache.txt")
        elif cache[name] != value:
            problems.append(f"the option `{name}` was asked as `{value}` and stands as `{cache[name]}`")
    return problems


class Toolkit(NamedTuple):
    """A CUDA toolkit on this host.

    ``root`` is the folder below which CMake looks for headers and libraries. It is not always the compiler's own: Debian spreads
    a toolkit over ``/usr`` and keeps the programs that nvcc calls in a folder of their own.
    """

    version: str
    nvcc: Path
    root: Path
    host_compiler: Path
    cuobjdump: Path

    @property
    def search_path(self) -> str:
        """PATH for programs that look for a CUDA compiler there."""
        return f"{self.nvcc.parent}:{SYSTEM_PATH}"

    def options(self) -> dict[str, str]:
        """CMake's options that name this toolkit and no other."""
        return {
            "CMAKE_CUDA_COMPILER": str(self.nvcc),
            "CMAKE_CUDA_HOST_COMPILER": str(self.host_compiler),
            "CUDAToolkit_ROOT": str(self.root),
        }


def _nvcc_version(nvcc: Path) -> str:
    """What ``nvcc --version`` says (``11.8.89``); empty where it cannot be asked."""
    try:
        done = subprocess.run(
            [str(nvcc), "--version"],
            env={"PATH": SYSTEM_PATH},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=PROGRAM_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    match = re.search(r"release [0-9.]+, V([0-9.]+)", done.stdout.decode("utf-8", "replace"))
    return match.group(1) if match else ""


def find_toolkit(asked: Mapping[str, Any]) -> Toolkit:
    """The toolkit that a spec asks for (its ``cuda``): the first of the named compilers that is there and has that version.

    Raises:
        BuildError: None is, or something that belongs to it is missing.
    """
    version = str(asked["version"])
    seen = []
    for nvcc in (Path(place) for place in asked["nvcc"]):
        found = _nvcc_version(nvcc)
        if not found:
            seen.append(f"`{nvcc}` is not there" if not nvcc.exists() else f"`{nvcc}` does not say its version")
        elif not found.startswith(version + "."):
            seen.append(f"`{nvcc}` is {found}")
        else:
            break
    else:
        raise BuildError(
            f"this host has no CUDA {version} where it is looked for: {', '.join(seen) or 'no place was named'}",
            "provision this host (role cuda_toolkit), or let a container compile (`llama_cpp_build_on: container`)",
        )
    compilers = [Path(place) for place in asked["host_compiler"]]
    compiler = next((place for place in compilers if place.is_file()), None)
    if compiler is None:
        names = ", ".join(f"`{place}`" for place in compilers)
        raise BuildError(f"the C++ compiler beside CUDA {version} is missing: {names}", f"install {compilers[0].name}")
    folders = [nvcc.parent, nvcc.resolve().parent, Path("/usr/bin"), Path("/usr/local/bin")]
    cuobjdump = next((folder / "cuobjdump" for folder in folders if (folder / "cuobjdump").is_file()), None)
    if cuobjdump is None:
        raise BuildError(
            f"CUDA {version} at `{nvcc}` lacks cuobjdump, which tells what was compiled", "install the whole toolkit"
        )
    for root in (nvcc.parent.parent, Path("/usr")):
        headers = [root / "include", *root.glob("targets/*/include")]
        if any((folder / "cuda_runtime.h").is_file() for folder in headers) and _nvcc_version(root / "bin/nvcc") == found:
            return Toolkit(found, nvcc, root, compiler, cuobjdump)
    raise BuildError(f"CUDA {version} at `{nvcc}` has no headers (cuda_runtime.h)", "install the whole toolkit")


def code_lists(output: str) -> dict[str, int]:
    """How many code objects of each architecture a listing of cuobjdump names (``--list-elf``, ``--list-ptx``)."""
    found: dict[str, int] = {}
    for name in re.findall(r"^(?:ELF|PTX) file\s+\d+: .*?\.(sm_[0-9]+[a-z]?)\.(?:cubin|ptx)\s*$", output, re.MULTILINE):
        found[name] = found.get(name, 0) + 1
    return dict(sorted(found.items()))


def code_problems(asked: Sequence[str], machine_code: Mapping[str, int], ptx: Mapping[str, int]) -> list[str]:
    """What a library holds beyond the architectures asked for (CMake's words: ``70``, ``70-real``, ``70-virtual``), or lacks."""
    problems = []
    for what, skipped, found in (("machine code", "-virtual", machine_code), ("PTX", "-real", ptx)):
        wanted = {"sm_" + name.split("-")[0] for name in asked if not name.endswith(skipped)}
        # CMake's newest words have a letter (`120a`), which the project adds by itself where it is left out.
        there = {name if name in wanted else name.rstrip("abcdefghijklmnopqrstuvwxyz") for name in found}
        problems += [f"holds no {what} for {name}" for name in sorted(wanted - there)]
        problems += [f"holds {what} for {name}, which nobody asked for" for name in sorted(there - wanted)]
    return problems


def cpu_level(flags: Sequence[str]) -> str:
    """The least x86-64 level whose processors all have these compiler flags' instructions; empty for other processors."""
    if platform.machine() != "x86_64":
        return ""
    names = {flag.replace("-m", "", 1) for flag in flags}
    if any(name.startswith("avx512") for name in names):
        return "x86-64-v4"
    if names & {"avx", "avx2", "bmi", "bmi2", "f16c", "fma", "lzcnt", "movbe"}:
        return "x86-64-v3"
    if names & {"sse3", "ssse3", "sse4.1", "sse4.2", "popcnt"}:
        return "x86-64-v2"
    return "x86-64-v1"


def explain(log: str, work: Path, jobs: int) -> tuple[str, str]:
    """Why a build failed and what to do, from the end of its log; two empty strings when it is not a known case."""
    if "No space left on device" in log:
        free = _mib(shutil.disk_usage(str(work)).free)
        return f"the disk became full: {free} are free in `{work}`", "free some space there and run it again"
    if re.search(r"Killed signal terminated program|internal compiler error: Killed|^Killed$", log, re.MULTILINE):
        return (
            f"a compiler was killed, most likely for lack of memory ({jobs} at once, {_mib(_memory_bytes())} available now)",
            "give the build host more memory or swap, or build on another host (`llama_cpp_build_on`), and run it again",
        )
    missing = re.search(r"CMake Error: CMake was unable to find a build program|No CMAKE_(\w+)_COMPILER could be found", log)
    if missing:
        return "the toolchain is not complete", "install the packages g++, cmake and ninja-build"
    return "", ""


class Builder:
    """One run of a build, phase by phase; each can be cut off anywhere and is then done or taken up again."""

    def __init__(self, work: Work, spec: JsonObject, archive: Path, lock: int, patches: Path | None = None) -> None:
        self.work = work
        self.spec = spec
        self.archive = archive
        self.patches = patches
        self.lock = lock
        self.src = work.path / "src"
        self.build = work.path / "build"
        self.stage = work.path / "stage"
        self.phase = "unpack"
        self.jobs = job_count(len(os.sched_getaffinity(0)), _memory_bytes())
        self.toolkit = find_toolkit(spec["cuda"]) if spec["backend"] == "cuda" else None
        path = self.toolkit.search_path if self.toolkit else SYSTEM_PATH
        self.environment = _clean_environment(work.path, path, {**self._ccache(), **self.spec.get("environment", {})})

    def _ccache(self) -> dict[str, str]:
        """ccache's settings: its own folder beside the builds, and results that do not depend on this build's folder."""
        if not self.spec.get("ccache"):
            return {}
        return {
            "CCACHE_DIR": str(self.work.path.parent / "ccache"),
            "CCACHE_BASEDIR": str(self.work.path),
            "CCACHE_NOHASHDIR": "1",
            "CCACHE_COMPILERCHECK": "content",
            "CCACHE_MAXSIZE": CCACHE_SIZE,
        }

    def options(self) -> dict[str, str]:
        """Every CMake option of this build."""
        asked = {str(name): str(value) for name, value in self.spec["cmake_options"].items()}
        if self.toolkit:
            asked.update(self.toolkit.options())
        if self.spec.get("ccache"):
            for language in ["C", "CXX", *(["CUDA"] if self.toolkit else [])]:
                asked[f"CMAKE_{language}_COMPILER_LAUNCHER"] = "ccache"
        return asked

    def report(self, done: int, total: int, message: str) -> None:
        self.work.write_status(
            "running", build_id=self.spec["build_id"], phase=self.phase, done=done, total=total, message=message[:200]
        )

    def run(self) -> JsonObject:
        """Builds, and returns the last status' values."""
        for name in ("home", "tmp"):
            (self.work.path / name).mkdir(exist_ok=True)
        origin = self.unpack()
        self.phase = "configure"
        output = self.configure()
        self.phase = "compile"
        self.compile()
        self.phase = "verify"
        self.report(0, 1, "checking the programs")
        self.collect(origin, output)
        self.phase = "pack"
        self.report(0, 1, "packing the release")
        pack_release(self.stage, self.work.archive)
        return {
            "archive": str(self.work.archive),
            "sha256": sha256_file(self.work.archive),
            "size_bytes": self.work.archive.stat().st_size,
        }

    def unpack(self) -> JsonObject:
        source = self.spec["source"]
        expected = source.get("tree_sha256", "")
        noted = self.work.path / "source.json"
        if self.src.is_dir():
            return _read_json(noted) or {}
        aside = self.work.path / "src.part"
        _remove(aside)
        self.report(0, 0, "unpacking the source")
        strips = [str(entry["strip"]) for entry in source["archives"] if entry.get("strip")] + [""]
        found = unpack_source(self.archive, strips, aside, lambda done, total: self.report(done, total, "unpacking the source"))
        if expected and found != expected:
            raise BuildError(f"the source tree in `{self.archive}` has the digest {found} instead of {expected}")
        origin: JsonObject = {"archive_sha256": sha256_file(self.archive), "tree_sha256": found}
        if source.get("patches_sha256"):
            origin["patches"] = self.patch(aside, source["patches_sha256"])
            origin["patches_sha256"] = source["patches_sha256"]
        _write_atomic(noted, json.dumps(origin))
        aside.rename(self.src)
        return origin

    def patch(self, tree: Path, expected: str) -> list[str]:
        """Applies the patches to the source tree, in the order of their names, which are returned.

        Raises:
            BuildError: They are not those that the spec names, or one does not fit.
        """
        if self.patches is None:
            raise BuildError("the spec names patches, and none were given", "name their folder with `--patches`")
        found, names = patches_digest(self.patches)
        if found != expected:
            raise BuildError(f"the patches in `{self.patches}` have the digest {found} instead of {expected}")
        for name in names:
            argv = ["patch", "-p1", "--batch", "--forward", "--no-backup-if-mismatch", "-d", str(tree)]
            self.call([*argv, "-i", str(self.patches / name)], self.work.path, problem=f"the patch `{name}` does not fit")
        # `patch` gives what it wrote the time of day; ninja would not mind, but equal trees shall be equal.
        for folder, _, files in os.walk(str(tree)):
            for file in files:
                os.utime(str(Path(folder, file)), (SOURCE_MTIME_S, SOURCE_MTIME_S))
        return names

    def configure(self) -> str:
        mark = self.build / ".configured"
        if not mark.is_file():
            # Cut off while it wrote its files, or never run: what lies there is not trusted.
            _remove(self.build)
        self.report(0, 0, "configuring")
        asked = self.options()
        argv = ["cmake", "-G", "Ninja", "-S", str(self.src), "-B", str(self.build)]
        output = self.call([*argv, *(f"-D{name}={value}" for name, value in sorted(asked.items()))], self.work.path)
        cache = read_cmake_cache((self.build / "CMakeCache.txt").read_text(encoding="utf-8", errors="replace"))
        problems = option_problems(asked, unused_options(output), cache)
        if self.toolkit:
            problems += self.toolkit_problems(self.toolkit, output, cache)
        if problems:
            _remove(mark)
            raise BuildError("; ".join(problems), "correct the option's name or value: nothing was compiled")
        mark.write_text("", encoding="utf-8")
        return output

    def toolkit_problems(self, toolkit: Toolkit, output: str, cache: Mapping[str, str]) -> list[str]:
        """Whether the project was configured with another CUDA than the one that was asked for."""
        problems = []
        described = self.compiler_description("CUDA")
        if described.get("VERSION") != toolkit.version:
            problems.append(f"the CUDA compiler is {described.get('VERSION') or 'unknown'} instead of {toolkit.version}")
        used = cache.get("CUDAToolkit_NVCC_EXECUTABLE", "")
        if used and Path(used).resolve() != (toolkit.root / "bin/nvcc").resolve():
            problems.append(f"headers and libraries are taken from beside `{used}` instead of from `{toolkit.root}`")
        found = re.search(r"Found CUDAToolkit: .*found version \"([0-9.]+)\"", output)
        version = str(self.spec["cuda"]["version"])
        if found and not f"{found.group(1)}.".startswith(version + "."):
            problems.append(f"headers and libraries are of CUDA {found.group(1)} instead of {version}")
        return problems

    def compiler_description(self, language: str) -> dict[str, str]:
        """What CMake found out about the compiler of a language: ``ID``, ``VERSION``, ``TOOLKIT_ROOT``..."""
        files = sorted(self.build.glob(f"CMakeFiles/*/CMake{language}Compiler.cmake"))
        text = files[0].read_text(encoding="utf-8", errors="replace") if files else ""
        return dict(re.findall(rf'set\(CMAKE_{language}_COMPILER_(\w+) "([^"]*)"\)', text))

    def compile(self) -> None:
        def progress(line: str) -> None:
            match = re.match(r"\[(\d+)/(\d+)\] (.*)", line)
            if match:
                self.report(int(match.group(1)), int(match.group(2)), match.group(3))

        self.report(0, 0, f"compiling with {self.jobs} jobs")
        self.call(["ninja", "-C", str(self.build), "-j", str(self.jobs), *self.spec["targets"]], self.work.path, progress)

    def call(
        self, argv: Sequence[str], cwd: Path, on_line: Callable[[str], None] = lambda line: None, *, problem: str = ""
    ) -> str:
        """Runs a program with its output in the log, line by line, and returns that output.

        Args:
            argv: The program and its words.
            cwd: Where it runs.
            on_line: Told of every line.
            problem: What it means when the program fails, where its log does not say.

        Raises:
            BuildError: It cannot be started, or ended with another status than 0.
        """
        lines: list[str] = []
        with self.work.log.open("a", encoding="utf-8") as log:
            log.write("$ " + " ".join(argv) + "\n")
            log.flush()
            try:
                process = subprocess.Popen(
                    list(argv),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    env=self.environment,
                    cwd=str(cwd),
                    # Whatever outlives a killed builder keeps the lock, so that no second build runs beside it.
                    pass_fds=(self.lock,),
                    encoding="utf-8",
                    errors="replace",
                )
            except FileNotFoundError as error:
                package = argv[0] if argv[0] in ("patch", "ccache") else "g++, cmake and ninja-build"
                raise BuildError(f"`{argv[0]}` is not installed", f"install {package}") from error
            with process:
                try:
                    for line in process.stdout or ():
                        log.write(line)
                        log.flush()
                        lines.append(line)
                        on_line(line)
                except BaseException:
                    process.kill()
                    raise
        output = "".join(lines)
        if process.returncode != 0:
            why, hint = explain(output[-20000:], self.work.path, self.jobs)
            failed = next((line.strip() for line in lines if line.startswith("FAILED: ")), "")
            what = why or failed or problem or f"`{argv[0]}` ended with status {process.returncode}"
            raise BuildError(f"the phase {self.phase} failed: {what}", hint or f"the whole log is `{self.work.log}`")
        return output

    def dynamic(self, path: Path) -> dict[str, list[str]]:
        """The ``NEEDED``, ``SONAME`` and ``RUNPATH`` entries of a program or library."""
        output = self.call(["readelf", "-dW", str(path)], self.work.path)
        found: dict[str, list[str]] = {"NEEDED": [], "SONAME": [], "RUNPATH": []}
        for kind, value in re.findall(r"\((NEEDED|SONAME|RUNPATH|RPATH)\).*\[(.*)\]", output):
            found["RUNPATH" if kind == "RPATH" else kind].append(value)
        return found

    def collect(self, origin: JsonObject, configure_output: str) -> None:
        """Puts together the release folder and proves that its program starts from there."""
        aside = self.work.path / "stage.part"
        for path in (aside, self.stage):
            _remove(path)
        (aside / "bin").mkdir(parents=True)
        (aside / "lib").mkdir()
        built = self.build / "bin"
        needed: set[str] = set()
        shipped: set[str] = set()
        # One file a library, under the name that the loader asks for: links would only be more to check.
        sources = [(built / target, aside / "bin" / target) for target in self.spec["targets"]]
        for library in sorted(built.glob("lib*.so*")):
            if not library.is_symlink():
                names = self.dynamic(library)["SONAME"] or [library.name]
                sources.append((library, aside / "lib" / names[0]))
        for source, target in sources:
            if not source.is_file():
                raise BuildError(f"the build made no `{source}`")
            entries = self.dynamic(source)
            for runpath in entries["RUNPATH"]:
                if any(not part.startswith("$ORIGIN") for part in runpath.split(":")):
                    raise BuildError(f"`{source.name}` looks for libraries in `{runpath}`, not beside itself ($ORIGIN)")
            shutil.copyfile(str(source), str(target))
            self.call(["strip", "--strip-unneeded", str(target)], self.work.path)
            target.chmod(0o755)
            needed.update(entries["NEEDED"])
            shipped.add(target.name)
        licences = self.licences()
        bundled: JsonObject = {}
        if self.toolkit:
            bundled, texts = self.bundle(self.toolkit, aside / "lib", needed, shipped)
            licences += texts
            foreign = sorted(name for name in needed - shipped if re.match(r"lib(cu|nv|nccl)", name) and name != DRIVER_LIBRARY)
            if foreign:
                raise BuildError(f"the release would need {', '.join(foreign)}, which only a host with a CUDA toolkit has")
        for name, licence in licences:
            target = aside / name
            target.parent.mkdir(exist_ok=True)
            shutil.copyfile(str(licence), str(target))
            target.chmod(0o644)
        document = self.describe(origin, configure_output, sorted(needed - shipped))
        if self.toolkit:
            document["cuda"] = self.describe_cuda(self.toolkit, aside / "lib")
            document["cuda"]["libraries"] = bundled
        document["files"] = {
            str(path.relative_to(aside)): {
                "mode": f"{stat.S_IMODE(path.stat().st_mode):04o}",
                "sha256": sha256_file(path),
                "size_bytes": path.stat().st_size,
            }
            for path in sorted(aside.rglob("*"))
            if path.is_file()
        }
        (aside / "release.json").write_text(json.dumps(document, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        (aside / "release.json").chmod(0o644)
        check_program(aside, document, self.driver_folder(document))
        aside.rename(self.stage)

    def bundle(
        self, toolkit: Toolkit, lib: Path, needed: set[str], shipped: set[str]
    ) -> tuple[JsonObject, list[tuple[str, Path]]]:
        """Copies the CUDA runtime libraries that are needed, and what they need of each other, beside the engine's own.

        Adds to ``needed`` and ``shipped``. Returns what ``release.json`` says of each, and where the licence texts go.
        """
        cache = read_cmake_cache((self.build / "CMakeCache.txt").read_text(encoding="utf-8", errors="replace"))
        libraries = [Path(value) for name, value in sorted(cache.items()) if re.fullmatch(r"CUDA_\w+_LIBRARY|CUDA_CUDART", name)]
        folders = [folder for path in libraries if path.is_file() for folder in (path.parent, path.resolve().parent)]
        names = "|".join(re.escape(name) for name in self.spec["cuda"]["bundle"])
        bundled: JsonObject = {}
        texts: list[tuple[str, Path]] = []
        while True:
            name = next((name for name in sorted(needed - shipped) if re.fullmatch(rf"(?:{names})\.so\.[0-9.]+", name)), None)
            if name is None:
                return bundled, texts
            source = next((folder / name for folder in folders if (folder / name).is_file()), None)
            if source is None:
                raise BuildError(f"{name}, which the engine needs, is not beside the toolkit's other libraries")
            # As it is: it is the vendor's, and its licence allows to pass it on unchanged.
            shutil.copyfile(str(source), str(lib / name))
            (lib / name).chmod(0o755)
            needed.update(self.dynamic(source)["NEEDED"])
            shipped.add(name)
            package, version = self.package_of(source.resolve())
            places = [Path("/usr/share/doc", package, "copyright")] if package else []
            places += [toolkit.root / "EULA.txt", toolkit.nvcc.resolve().parent.parent / "EULA.txt"]
            text = next((place for place in places if place.is_file()), None)
            bundled[name] = {
                "size_bytes": source.stat().st_size,
                "package": f"{package} {version}".strip(),
                "licence": f"licenses/LICENSE-{package or name}" if text else "",
            }
            if text is not None:
                texts.append((bundled[name]["licence"], text))

    def package_of(self, path: Path) -> tuple[str, str]:
        """Name and version of the package that a file came with; two empty strings for none that is known."""
        with contextlib.suppress(BuildError):
            if shutil.which("dpkg-query", path=SYSTEM_PATH):
                name = self.call(["dpkg-query", "-S", str(path)], self.work.path).partition(":")[0].partition(",")[0].strip()
                return name, self.call(["dpkg-query", "-W", "-f", "${Version}\\n", name], self.work.path).split("\n")[0]
            if shutil.which("rpm", path=SYSTEM_PATH):
                query = ["rpm", "-qf", "--queryformat", "%{NAME} %{VERSION}-%{RELEASE}\\n", str(path)]
                name, _, version = self.call(query, self.work.path).strip().partition(" ")
                return name, version
        return "", ""

    def describe_cuda(self, toolkit: Toolkit, lib: Path) -> JsonObject:
        """What the release holds for cards, from the library itself.

        Raises:
            BuildError: That is more or less than was asked for.
        """
        library = next(iter(sorted(lib.glob("libggml-cuda.so*"))), None)
        if library is None:
            raise BuildError("the build made no libggml-cuda.so")
        machine_code, ptx = (self.code_list(toolkit, library, option) for option in ("--list-elf", "--list-ptx"))
        problems = code_problems(self.spec.get("cuda_architectures", []), machine_code, ptx)
        if problems:
            raise BuildError(f"`{library.name}` {'; '.join(problems)}")
        compiler = self.call([str(toolkit.host_compiler), "-dumpfullversion"], self.work.path)
        return {
            "version": toolkit.version,
            "host_compiler": f"{toolkit.host_compiler.name} {compiler.strip()}",
            "machine_code": machine_code,
            "ptx": ptx,
        }

    def code_list(self, toolkit: Toolkit, library: Path, option: str) -> dict[str, int]:
        """The code objects in a library. cuobjdump fails where there are none, which is no error here."""
        argv = [str(toolkit.cuobjdump), option, str(library)]
        done = subprocess.run(
            argv, env=self.environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
        )
        output = done.stdout.decode("utf-8", "replace")
        with self.work.log.open("a", encoding="utf-8") as log:
            log.write("$ " + " ".join(argv) + "\n" + output)
        return code_lists(output)

    def driver_folder(self, document: Mapping[str, Any]) -> str:
        """Where the program finds a library of the driver's name on a build host without a driver: the toolkit's stand-in.

        It answers every call with an error, which the engine takes for a host without cards; it never goes into a release.
        """
        if DRIVER_LIBRARY not in document["needs"] or not self.toolkit:
            return ""
        listed = self.call(["ldconfig", "-p"], self.work.path)
        if re.search(rf"^\s*{re.escape(DRIVER_LIBRARY)} ", listed, re.MULTILINE):
            return ""
        cache = read_cmake_cache((self.build / "CMakeCache.txt").read_text(encoding="utf-8", errors="replace"))
        stub = Path(cache.get("CUDA_cuda_driver_LIBRARY", ""))
        if not stub.is_file():
            raise BuildError(f"this host has neither a driver nor the toolkit's stand-in for {DRIVER_LIBRARY}")
        folder = self.work.path / "driver"
        folder.mkdir(exist_ok=True)
        link = folder / DRIVER_LIBRARY
        _remove(link)
        link.symlink_to(stub)
        return str(folder)

    def licences(self) -> list[tuple[str, Path]]:
        """Where each licence text goes in the release, and where it is in the source."""
        found = [("LICENSE", self.src / "LICENSE")]
        found += [("licenses/" + path.name, path) for path in sorted((self.src / "licenses").glob("*")) if path.is_file()]
        for path in sorted((self.src / "vendor").rglob("LICEN[CS]E*")):
            found.append((f"licenses/LICENSE-{path.parent.name}", path))
        return found

    def describe(self, origin: JsonObject, configure_output: str, needs: list[str]) -> JsonObject:
        """``release.json`` without its list of files."""
        spec = self.spec
        compiler = self.compiler_description("CXX")
        variant = re.search(r"-- Adding CPU backend variant ggml-cpu: (\S*)", configure_output)
        flags = [flag for flag in (variant.group(1) if variant else "").split(";") if flag]
        return {
            "schema": RELEASE_SCHEMA,
            "engine": spec["engine"],
            "build_id": spec["build_id"],
            "build_number": spec["build_number"],
            "commit": spec.get("commit", ""),
            "backend": spec["backend"],
            "machine": platform.machine(),
            "libc": host_libc(),
            "compiler": f"{compiler.get('ID', '')} {compiler.get('VERSION', '')}".strip(),
            "cpu": {"flags": flags, "level": cpu_level(flags)},
            "cuda_architectures": spec.get("cuda_architectures", []),
            "source": origin,
            "cmake_options": spec["cmake_options"],
            "targets": spec["targets"],
            "needs": needs,
            "licence": spec["licence"],
        }


def run(archive: Path, work_path: Path, lock: int, patches: Path | None = None) -> int:
    """The builder's own process: builds and leaves its last word in ``status.json``."""
    work = Work(work_path)
    # Serving goes before building on a host that does both.
    os.nice(10)
    builder: Builder | None = None
    spec: JsonObject = {}
    try:
        work.note_builder(os.getpid())
        spec = load_spec(work_path / "spec.json")
        builder = Builder(work, spec, archive, lock, patches)
        values = builder.run()
    except Exception as error:
        _remove(work_path / "reserve")
        if isinstance(error, BuildError):
            message, hint = error.message, error.hint
        elif isinstance(error, OSError) and error.errno == errno.ENOSPC:
            message, hint = explain("No space left on device", work_path, 1)
        else:
            message, hint = f"{type(error).__name__}: {error}", f"the whole log is `{work.log}`"
        work.write_status(
            "failed",
            build_id=spec.get("build_id", ""),
            phase=builder.phase if builder else "unpack",
            done=0,
            total=0,
            message=message,
            hint=hint,
            log_tail=work.log_tail(),
        )
        return 1
    work.write_status("done", build_id=spec["build_id"], phase="pack", done=1, total=1, message="built", **values)
    return 0


# ------------------------------------------------------------------------------------------------------------------- command line


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        sys.stderr.write(f"error: {message}\n")
        raise SystemExit(64)


def main(arguments: Sequence[str]) -> int:
    """The command line; returns the exit status."""
    parser = _Parser(description="Builds, checks and installs one release of an engine")
    verbs = parser.add_subparsers(dest="verb", required=True)
    options: dict[str, tuple[str, ...]] = {
        "start": ("--spec", "--archive", "--work"),
        "run": ("--archive", "--work", "--lock"),
        "status": ("--work",),
        "install": ("--archive", "--sha256", "--release"),
        "verify": ("--release",),
        "patches-digest": ("--patches",),
        "prune": (),
    }
    for verb, names in options.items():
        sub = verbs.add_parser(verb)
        for name in names:
            kind: Callable[[str], Any] = {"--lock": int, "--sha256": str}.get(name, Path)
            sub.add_argument(name, required=True, type=kind)
        if verb == "verify":
            sub.add_argument("--sizes", action="store_true")
        if verb == "prune":
            sub.add_argument("--keep", type=Path, action="append", required=True)
            sub.add_argument("--units", type=Path, default=Path("/etc/systemd/system"))
            sub.add_argument("--history", type=Path, default=HISTORY)
            sub.add_argument("--check", action="store_true")
        if verb in ("start", "run"):
            sub.add_argument("--patches", type=Path)
    given = parser.parse_args(arguments)
    os.umask(0o022)
    code = 0
    answer: JsonObject
    try:
        if given.verb == "run":
            return run(given.archive, given.work, given.lock, given.patches)
        if given.verb == "start":
            answer = start(given.spec, given.archive, given.work, given.patches)
        elif given.verb == "prune":
            answer = prune(given.keep, given.units, given.check, given.history)
        elif given.verb == "patches-digest":
            digest, patches = patches_digest(given.patches)
            answer = {"sha256": digest, "names": patches}
        elif given.verb == "status":
            answer = Work(given.work.resolve()).status()
        elif given.verb == "install":
            answer = install(given.archive, given.sha256, given.release)
        else:
            problem = release_problem(given.release, hashes=not given.sizes)
            answer = {"sound": problem is None, "problem": problem or ""}
            code = 0 if problem is None else 1
    except BuildError as error:
        sys.stderr.write(f"error: {error.message}\n" + (f"hint: {error.hint}\n" if error.hint else ""))
        return 1
    except OSError as error:
        sys.stderr.write(f"error: {error.strerror}: `{error.filename}`\n")
        return 1
    sys.stdout.write(json.dumps(answer, sort_keys=True) + "\n")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
