#!/usr/bin/env python3
"""Installs, checks and prunes releases of engines that the user brings.

Runs where nothing of ours is installed: standard library only, Python 3.8 or later. Each verb prints one JSON object.

``install --spec JSON --source FILE --release DIR``
    Lays a program or the content of an archive out aside, checks it, and renames it in. ``{"changed", "path", "replaced"}``.
``verify --spec JSON --release DIR``
    ``{"sound": true|false, "problem"}``, exit status 1 when it is not. ``--hashes`` reads every file, instead of sizes and modes.
``prune --engines DIR --keep BUILD_ID ... [--dry-run]``
    Removes the releases that nobody needs: kept are those named, those that processes, units or the applied plan use, and of each
    engine one more, the one before. ``{"changed", "removed"}``.

The specification (``v100ctl/external/1``): ``build_id``, ``name``, ``kind`` (file, archive), ``file_name``, ``strip_components``,
``sha256``, ``source``, ``licence``, ``programs`` and ``paths`` (what the command line names of the release), ``check`` and
``check_environment`` (a command that has to end with status 0).
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import json
import lzma
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
import zipfile
import zlib
from pathlib import Path
from typing import IO, Any, Callable, Dict, Iterator, NoReturn, Sequence

SPEC_SCHEMA = "v100ctl/external/1"
RELEASE_SCHEMA = "v100ctl/release/1"
MIB = 1024**2
#: More files than the probe reads of a release.
MAX_FILES = 5000
MAX_LINK_HOPS = 40
#: Left free beside what is unpacked.
SPARE_BYTES = 256 * MIB
CHECK_TIMEOUT_S = 60
#: The account that owns nothing, as every distribution numbers it: a program that nobody here has built is not run as root.
NOBODY = 65534
SYSTEM_PATH = "/usr/sbin:/usr/bin:/sbin:/bin"
HOST_JSON = Path("/etc/v100ctl/host.json")
UNITS = Path("/etc/systemd/system")
#: The last states that the host has served by: TIMESTAMP.json.
HISTORY = Path("/var/lib/v100ctl/state/history")
#: ``e_machine`` of an ELF header, by the kernel's name of the machine.
ELF_MACHINES = {"x86_64": 62, "aarch64": 183, "ppc64le": 21}

JsonObject = Dict[str, Any]


class InstallError(Exception):
    """Something that cannot be done, said for a person: what was wrong and where, and as ``hint`` what to do next."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


# --------------------------------------------------------------------------------------------------------------- small tools


def _digest(stream: IO[bytes], target: IO[bytes] | None = None) -> tuple[str, int]:
    """SHA-256 and size of what is read, written to ``target`` on the way where there is one."""
    digest, size_bytes = hashlib.sha256(), 0
    for block in iter(lambda: stream.read(MIB), b""):
        digest.update(block)
        size_bytes += len(block)
        if target is not None:
            target.write(block)
    return digest.hexdigest(), size_bytes


def sha256_file(path: Path) -> str:
    """The SHA-256 of a file's content, in hexadecimal."""
    with path.open("rb") as stream:
        return _digest(stream)[0]


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


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    holder = os.open(str(folder), os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(holder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(holder)


# ------------------------------------------------------------------------------------------------------------------- archives


def safe_name(name: str) -> str:
    """A path of an archive in its shortest form.

    Raises:
        InstallError: It is absolute, leads out, or holds characters that no path should.
    """
    if name.startswith("/") or ".." in name.split("/") or not name.isprintable():
        raise InstallError(f"the archive holds the unsafe path {name!r}", "pack it anew with plain relative paths")
    return posixpath.normpath(name)


class Contents:
    """The files of an archive, and its links as further names of them.

    ``places`` maps each path of the release to the name of the file in the archive that lies there.
    """

    def __init__(self, strip: int) -> None:
        self._strip = strip
        self._files: dict[str, tuple[int, int]] = {}
        self._links: dict[str, str] = {}
        self.places: dict[str, str] = {}

    def add_file(self, name: str, mode: int, size_bytes: int) -> None:
        """A regular file; the last one of a name counts, as when it is unpacked."""
        self._links.pop(name, None)
        self._files[name] = (mode, size_bytes)

    def add_link(self, name: str, target: str) -> None:
        """A link to ``target``, a path of the archive."""
        self._files.pop(name, None)
        self._links[name] = target

    def symbolic_target(self, name: str, linkname: str) -> str:
        """Where the symbolic link ``name`` leads to, as a path of the archive.

        Raises:
            InstallError: Out of the archive.
        """
        target = posixpath.normpath(posixpath.join(posixpath.dirname(name), linkname))
        if posixpath.isabs(linkname) or target == ".." or target.startswith("../"):
            raise InstallError(f"the archive holds a link out of its folder: `{name}` -> `{linkname}`", "pack it anew without it")
        return target

    def mode(self, name: str) -> int:
        """The permissions of a file: all may read, and run what its owner may run."""
        return 0o755 if self._files[name][0] & 0o100 else 0o644

    def _resolve(self, name: str) -> str:
        """A path with every link in it followed."""
        for _ in range(MAX_LINK_HOPS):
            parts = name.split("/")
            for depth in range(1, len(parts) + 1):
                target = self._links.get("/".join(parts[:depth]))
                if target is not None:
                    name = posixpath.normpath(posixpath.join(target, *parts[depth:]))
                    break
            else:
                return name
        raise InstallError(f"the archive holds a link to itself: `{name}`")

    def settle(self) -> None:
        """Works out ``places``.

        Raises:
            InstallError: A link leads nowhere or in a circle, a path is both a file and a folder, or nothing is left.
        """
        found = {name: name for name in self._files}
        folders = {parent for name in self._files for parent in _parents(name)}
        linked_folders = {}
        for name in self._links:
            target = self._resolve(name)
            if target in self._files:
                found[name] = target
            elif target in folders:
                linked_folders[name] = target
            else:
                raise InstallError(f"the archive holds a link to something that it lacks: `{name}` -> `{self._links[name]}`")
        for name, target in linked_folders.items():
            inside = f"{target}/"
            if any(f"{other}/".startswith(inside) for other in linked_folders):
                raise InstallError(
                    f"the archive holds a link to a folder with links to folders: `{name}`", "pack it anew without it"
                )
            found.update((name + path[len(target) :], place) for path, place in list(found.items()) if path.startswith(inside))
        for path, name in found.items():
            stripped = path.split("/")[self._strip :]
            if stripped:
                self.places["/".join(stripped)] = name
        if not self.places:
            raise InstallError("nothing is left of the archive", "a smaller `strip_components`" if self._strip else "")
        for path in self.places:
            both = next((parent for parent in _parents(path) if parent in self.places), None)
            if both is not None:
                raise InstallError(f"the archive has `{both}` both as a file and as a folder")
        if "release.json" in self.places:
            raise InstallError(
                "the archive has a `release.json` at its top, where v100ctl keeps its own", "pack it anew in a folder"
            )
        if len(self.places) > MAX_FILES:
            raise InstallError(f"the archive holds {len(self.places)} files; more than {MAX_FILES} are not checked in each run")

    @property
    def wanted(self) -> set[str]:
        """The files that are unpacked."""
        return set(self.places.values())

    @property
    def size_bytes(self) -> int:
        """What they take."""
        return sum(self._files[name][1] for name in self.wanted)


def _parents(path: str) -> list[str]:
    parts = path.split("/")
    return ["/".join(parts[:depth]) for depth in range(1, len(parts))]


#: Calls a function for each wanted file with its name and content, in the archive's order: compressed streams read forward.
Reader = Callable[[Callable[[str, IO[bytes]], None]], None]


def _read_tar(archive: tarfile.TarFile, contents: Contents) -> Reader:
    for member in archive:
        name = safe_name(member.name)
        if member.isreg():
            contents.add_file(name, member.mode, member.size)
        elif member.issym():
            contents.add_link(name, contents.symbolic_target(name, member.linkname))
        elif member.islnk():
            contents.add_link(name, safe_name(member.linkname))
        elif not member.isdir():
            raise InstallError(f"the archive holds `{member.name}`, which is neither a file, a folder nor a link")
    contents.settle()

    def read(take: Callable[[str, IO[bytes]], None]) -> None:
        last = {safe_name(member.name): member for member in archive.getmembers() if member.isreg()}
        for name, member in sorted(last.items(), key=lambda item: item[1].offset_data):
            stream = archive.extractfile(member) if name in contents.wanted else None
            if stream is not None:
                take(name, stream)

    return read


def _read_zip(archive: zipfile.ZipFile, contents: Contents) -> Reader:
    for info in archive.infolist():
        name, mode = safe_name(info.filename), info.external_attr >> 16
        if info.is_dir():
            continue
        if stat.S_ISLNK(mode):
            contents.add_link(name, contents.symbolic_target(name, archive.read(info).decode("utf-8", "replace")))
        elif stat.S_IFMT(mode) in (0, stat.S_IFREG):
            contents.add_file(name, mode, info.file_size)
        else:
            raise InstallError(f"the archive holds `{info.filename}`, which is neither a file, a folder nor a link")
    contents.settle()

    def read(take: Callable[[str, IO[bytes]], None]) -> None:
        last = {safe_name(info.filename): info for info in archive.infolist()}
        for name in sorted(contents.wanted):
            with archive.open(last[name]) as stream:
                take(name, stream)

    return read


def unpack(source: Path, dest: Path, strip: int) -> dict[str, JsonObject]:
    """Lays an archive out in the new folder ``dest`` and returns what ``release.json`` lists: mode, sha256 and size of each file.

    A link becomes a further name of its file, so that everything in a release is a regular file.

    Raises:
        InstallError: Not an archive, one with unsafe paths, or one that does not fit.
    """
    contents, listed = Contents(strip), {}  # type: Contents, dict[str, JsonObject]
    with contextlib.ExitStack() as stack:
        try:
            if tarfile.is_tarfile(str(source)):
                read = _read_tar(stack.enter_context(tarfile.open(str(source), "r:*")), contents)
            elif zipfile.is_zipfile(str(source)):
                read = _read_zip(stack.enter_context(zipfile.ZipFile(str(source))), contents)
            else:
                raise InstallError(
                    "it is no archive (.tar, .tar.gz, .tar.bz2, .tar.xz or .zip)", "`kind: file` for a single program"
                )
            _refuse_too_large(contents.size_bytes, dest.parent)
            names = {}  # type: dict[str, list[str]]
            for path, name in sorted(contents.places.items()):
                names.setdefault(name, []).append(path)
            dest.mkdir()

            def take(name: str, stream: IO[bytes]) -> None:
                first, *others = names[name]
                path = dest / first
                path.parent.mkdir(parents=True, exist_ok=True)
                with path.open("xb") as target:
                    sha256, size_bytes = _digest(stream, target)
                path.chmod(contents.mode(name))
                for other in others:
                    (dest / other).parent.mkdir(parents=True, exist_ok=True)
                    os.link(str(path), str(dest / other))
                for item in names[name]:
                    listed[item] = {"mode": f"{contents.mode(name):04o}", "sha256": sha256, "size_bytes": size_bytes}

            read(take)
        except (tarfile.TarError, EOFError, zlib.error, lzma.LZMAError, zipfile.BadZipFile, RuntimeError) as error:
            # RuntimeError is what an encrypted .zip or an unknown compression gives.
            raise InstallError(f"it is not a whole archive that can be read: {error}") from error
    return listed


def _refuse_too_large(size_bytes: int, folder: Path) -> None:
    free_bytes = shutil.disk_usage(str(folder)).free
    if size_bytes + SPARE_BYTES > free_bytes:
        raise InstallError(
            f"unpacked it takes {size_bytes // MIB} MiB, and `{folder}` has {free_bytes // MIB} MiB free",
            f"free at least {(size_bytes + SPARE_BYTES - free_bytes) // MIB + 1} MiB there",
        )


# ------------------------------------------------------------------------------------------------------------------- releases


def release_problem(release: Path, build_id: str, hashes: bool = True) -> str | None:
    """Why the release in this folder cannot be used, or ``None`` when it is sound."""
    if not release.is_dir():
        return "it does not exist"
    document = _read_json(release / "release.json")
    files = document.get("files") if document is not None else None
    if document is None or document.get("schema") != RELEASE_SCHEMA or not isinstance(files, dict) or not files:
        return "release.json is missing, damaged, or of another kind"
    if document.get("build_id") != build_id:
        return f"release.json belongs to {document.get('build_id')}"
    for name, expected in sorted(files.items()):
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
    return None


def check_named(release: Path, spec: JsonObject) -> None:
    """Everything that the command line names of the release is there, and its programs can run on this machine.

    Raises:
        InstallError: Something is missing, or made for another machine.
    """
    for name in (*spec["programs"], *spec["paths"]):
        if not (release / name).exists():
            raise InstallError(
                f"`{{release}}/{name}` is in the engine's command line and not in what came", _similar(release, name)
            )
    for name in spec["programs"]:
        with (release / name).open("rb") as stream:
            head = stream.read(20)
        if head[:2] == b"#!":
            continue
        if head[:4] != b"\x7fELF" or len(head) < 20:
            raise InstallError(f"`{name}` is neither a Linux program nor a script with `#!`", "`kind: archive` for an archive")
        machine = int.from_bytes(head[18:20], "little" if head[5] == 1 else "big")
        if machine != ELF_MACHINES.get(platform.machine(), machine):
            raise InstallError(
                f"`{name}` is made for another machine than this host's {platform.machine()}", "the build for this one"
            )


def _similar(release: Path, name: str) -> str:
    """Where else a file of that name lies."""
    last = name.rpartition("/")[2]
    found = sorted(str(path.relative_to(release)) for path in release.rglob("*") if path.name == last)
    if not found:
        return f"the top of it holds {', '.join(sorted(path.name for path in release.iterdir())[:8])}"
    deeper = found[0][: -len(name)].count("/") if found[0].endswith(f"/{name}") else 0
    return f"it is `{found[0]}`" + (f": `strip_components` {deeper} higher, or that path" if deeper else "")


def _become_nobody() -> None:
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)


def run_check(release: Path, spec: JsonObject) -> None:
    """Runs the engine's check in an environment of its own.

    Raises:
        InstallError: It does not start, or does not end with status 0.
    """
    argv = [word.replace("{release}", str(release)) for word in spec["check"]]
    if not argv:
        return
    environment = {name: value.replace("{release}", str(release)) for name, value in spec["check_environment"].items()}
    environment = {"PATH": SYSTEM_PATH, "HOME": "/nonexistent", "LANG": "C.UTF-8", **environment}
    shown = " ".join(spec["check"])
    try:
        # A session of its own, so that whatever it starts ends with it.
        process = subprocess.Popen(
            argv,
            env=environment,
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_become_nobody,
        )
    except OSError as error:
        raise InstallError(f"its check `{shown}` does not start on this host: {error.strerror}") from error
    try:
        output = process.communicate(timeout=CHECK_TIMEOUT_S)[0].decode("utf-8", "replace").strip()
    except subprocess.TimeoutExpired as error:
        raise InstallError(f"its check `{shown}` did not end within {CHECK_TIMEOUT_S} s") from error
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    missing = re.search(r"shared libraries: (\S+): cannot open", output)
    if missing:
        raise InstallError(
            f"its check `{shown}` lacks the library {missing.group(1)} on this host",
            'put it beside the engine and name its folder in `env`: `LD_LIBRARY_PATH: "{release}/lib"`',
        )
    if process.returncode == -signal.SIGILL:
        raise InstallError(f"its check `{shown}` uses instructions that this host's processor lacks")
    if process.returncode != 0:
        raise InstallError(f"its check `{shown}` ended with status {process.returncode}: {output[-500:]}")


def install(spec: JsonObject, source: Path, release: Path) -> JsonObject:
    """Makes ``release`` the folder that the source holds: nothing is ever half-written at that path.

    A sound release of that name is left alone. A broken one is moved aside only after its successor has passed every check.

    Raises:
        InstallError: The source is not what its SHA-256 says, or what it holds cannot serve on this host.
    """
    parent, name = release.parent, release.name
    parent.mkdir(parents=True, exist_ok=True)
    with _locked(parent):
        incoming, broken = parent / f".incoming-{name}", parent / f".broken-{name}"
        _remove(incoming)
        _remove(broken)
        problem = release_problem(release, spec["build_id"]) if os.path.lexists(str(release)) else "it does not exist"
        if problem is None:
            check_named(release, spec)
            return {"changed": False, "path": str(release)}
        if not source.is_file():
            raise InstallError(f"`{source}` does not exist on this host", "put it there, or give the engine another source")
        found = sha256_file(source)
        if found != spec["sha256"]:
            raise InstallError(
                f"`{source}` has sha256 {found} instead of {spec['sha256']}",
                "correct the inventory's `sha256` if this is the file that you want",
            )
        try:
            _lay_out(spec, source, incoming)
            check_named(incoming, spec)
            run_check(incoming, spec)
            for folder, _, names in os.walk(str(incoming)):
                for item in names:
                    _fsync(Path(folder, item))
                _fsync(Path(folder))
        except BaseException:
            _remove(incoming)
            raise
        if os.path.lexists(str(release)):
            release.rename(broken)
        incoming.rename(release)
        _fsync(parent)
        _remove(broken)
        return {"changed": True, "path": str(release), "replaced": problem if problem != "it does not exist" else ""}


def _lay_out(spec: JsonObject, source: Path, dest: Path) -> None:
    if spec["kind"] == "archive":
        files = unpack(source, dest, spec["strip_components"])
    else:
        _refuse_too_large(source.stat().st_size, dest.parent)
        place = f"bin/{spec['file_name']}"
        (dest / "bin").mkdir(parents=True)
        with source.open("rb") as stream, (dest / place).open("xb") as target:
            sha256, size_bytes = _digest(stream, target)
        (dest / place).chmod(0o755)
        files = {place: {"mode": "0755", "sha256": sha256, "size_bytes": size_bytes}}
    # A .zip may have lost that its programs can be run.
    for name in spec["programs"]:
        if name in files:
            (dest / name).chmod(0o755)
    # Two names of one file share its permissions.
    for name, entry in files.items():
        entry["mode"] = f"{stat.S_IMODE((dest / name).stat().st_mode):04o}"
    document = {
        "schema": RELEASE_SCHEMA,
        "engine": "external",
        "build_id": spec["build_id"],
        "name": spec["name"],
        "source": {**spec["source"], "sha256": spec["sha256"], "kind": spec["kind"]},
        "strip_components": spec["strip_components"],
        "licence": spec["licence"],
        "machine": platform.machine(),
        "files": files,
    }
    (dest / "release.json").write_text(json.dumps(document, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    (dest / "release.json").chmod(0o644)


# --------------------------------------------------------------------------------------------------------------------- pruning


def _good_states() -> Iterator[str]:
    """The last two states that the host has served by and can go back to."""
    found = {}  # type: dict[str, str]
    for path in sorted(HISTORY.glob("*.json"), reverse=True):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            text = path.read_text(encoding="utf-8", errors="replace")
            found.setdefault(json.loads(text)["state"], text)
    yield from list(found.values())[:2]


def _texts_that_name_releases() -> Iterator[str]:
    """What refers to releases by their paths: the applied plan, good states, units, and what processes run and have loaded."""
    yield from _good_states()
    for path in (HOST_JSON, *sorted(UNITS.glob("v100-*.service"))):
        with contextlib.suppress(OSError):
            yield path.read_text(encoding="utf-8", errors="replace")
    for process in Path("/proc").glob("[0-9]*"):
        # A process may end while it is looked at.
        with contextlib.suppress(OSError):
            yield os.readlink(str(process / "exe"))
        for name in ("cmdline", "maps"):
            with contextlib.suppress(OSError):
                yield (process / name).read_bytes().replace(b"\0", b"\n").decode("utf-8", "replace")


def prune(engines: Path, keep: Sequence[str], dry_run: bool) -> JsonObject:
    """Removes the releases below ``engines`` that nobody needs, and what killed runs have left."""
    if not engines.is_dir():
        return {"changed": False, "removed": []}
    with _locked(engines):
        used = set(keep)
        # Processes are known by real paths, which lead elsewhere where the folder is a link to another disk.
        folders = "|".join(re.escape(folder) for folder in {str(engines), os.path.realpath(str(engines))})
        for text in _texts_that_name_releases():
            used.update(re.findall(rf"(?:{folders})/([^/\s\"']+)", text))
        by_name = {}  # type: dict[str, list[Path]]
        leftovers = []
        for path in engines.iterdir():
            if path.name.startswith("."):
                owner = re.sub(r"^\.(incoming|broken|removed)-", "", path.name)
                if not any(owner.startswith(name) for name in keep):
                    leftovers.append(path)
            elif path.is_dir():
                by_name.setdefault(path.name.rpartition("-")[0], []).append(path)
        removed = []
        for paths in by_name.values():
            newest_first = sorted(paths, key=lambda item: (item.stat().st_mtime_ns, item.name), reverse=True)
            spare = [path for path in newest_first if path.name not in used]
            # The one before, to go back to: unless one that is not asked for any more is in use still.
            if not any(path.name in used and path.name not in keep for path in paths):
                spare = spare[1:]
            removed += spare
        if not dry_run:
            for path in removed:
                aside = engines / f".removed-{path.name}"
                _remove(aside)
                path.rename(aside)
                _remove(aside)
            for path in leftovers:
                _remove(path)
        return {"changed": bool(removed), "removed": sorted(path.name for path in removed)}


# ------------------------------------------------------------------------------------------------------------------- command line


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        sys.stderr.write(f"error: {message}\n")
        raise SystemExit(64)


def _spec(text: str) -> JsonObject:
    document = json.loads(text)
    if not isinstance(document, dict) or document.get("schema") != SPEC_SCHEMA:
        raise ValueError("not a specification of an engine")
    return document


def main(arguments: Sequence[str]) -> int:
    """The command line; returns the exit status."""
    parser = _Parser(description="Installs, checks and prunes releases of engines that the user brings")
    verbs = parser.add_subparsers(dest="verb", required=True)
    for verb in ("install", "verify"):
        sub = verbs.add_parser(verb)
        sub.add_argument("--spec", required=True, type=_spec)
        sub.add_argument("--release", required=True, type=Path)
        if verb == "install":
            sub.add_argument("--source", required=True, type=Path)
        else:
            sub.add_argument("--hashes", action="store_true")
    sub = verbs.add_parser("prune")
    sub.add_argument("--engines", required=True, type=Path)
    sub.add_argument("--keep", nargs="*", default=[])
    sub.add_argument("--dry-run", action="store_true")
    given = parser.parse_args(arguments)
    os.umask(0o022)
    code = 0
    try:
        if given.verb == "install":
            answer = install(given.spec, given.source, given.release)
        elif given.verb == "prune":
            answer = prune(given.engines, given.keep, given.dry_run)
        else:
            problem = release_problem(given.release, given.spec["build_id"], hashes=given.hashes)
            if problem is None:
                try:
                    check_named(given.release, given.spec)
                except InstallError as error:
                    problem = error.message
            answer = {"sound": problem is None, "problem": problem or ""}
            code = 0 if problem is None else 1
    except InstallError as error:
        sys.stderr.write(f"error: {error.message}\n" + (f"hint: {error.hint}\n" if error.hint else ""))
        return 1
    except OSError as error:
        sys.stderr.write(f"error: {error.strerror}: `{error.filename}`\n")
        return 1
    sys.stdout.write(json.dumps(answer, sort_keys=True) + "\n")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
