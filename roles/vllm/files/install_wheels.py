#!/usr/bin/env python3
"""Installs one release of vLLM on a host: a virtual environment of locked wheels, made aside and renamed in.

Runs where nothing of ours is installed: standard library only, Python 3.8 or later. Each verb prints one JSON object.

``start --work DIR``
    Starts the installation that ``DIR/asked.json`` describes as a unit of systemd's, so that it goes on when the caller goes
    away, or attaches to the one that runs. Wheels that an earlier run has brought are kept.
``status --work DIR``
    ``{"state": "absent|running|done|failed", "phase", "done", "total", "message", "hint"}``.
``run --work DIR``
    The installation itself.
``verify --release DIR [--sizes]``
    ``{"sound": true|false, "problem"}``, exit status 1 when it is not. ``--sizes`` trusts sizes instead of hashing.

The work folder: ``asked.json`` (what to install), ``requirements.txt`` (one package a line, with hashes), ``check_engine.py`` and
``read_arguments.py`` (which become part of the release), ``wheels/``, ``status.json``, ``install.log``.
"""

import argparse
import base64
import contextlib
import csv
import email.parser
import hashlib
import io
import json
import os
import platform
import re
import shutil
import stat
import subprocess
import sys
from collections import deque
from pathlib import Path
from typing import Any, Dict, Iterator, List, Mapping, NoReturn, Optional, Sequence, Tuple

RELEASE_SCHEMA = "v100ctl/release/1"
MANIFEST = "manifest.json"
MIB = 1024**2
#: Where distributions keep the wheels that new environments get: Debian and Fedora, Enterprise Linux.
WHEEL_FOLDERS = ("/usr/share/python-wheels", "/usr/share/python3-wheels")
#: Packages that one call of pip fetches: fewer calls start faster, more of them lose less when the line breaks.
BATCH = 8
LOG_TAIL_LINES = 30
#: Imports of PyTorch and vLLM from a cold, slow disk.
CHECK_TIMEOUT_S = 600
#: The kernel's limit for the first line of a script.
SHEBANG_BYTES = 127
#: Files above this size stand in release.json itself, where the probe looks: the engine's and CUDA's own libraries.
LARGE_BYTES = MIB
#: What pip and the network may need of the caller's surroundings, beside the host's own pip.conf.
PASSED_ON = re.compile(r"PIP_\w+|(https?|no|all|ftp)_proxy|(HTTPS?|NO|ALL|FTP)_PROXY|SSL_CERT_(FILE|DIR)|REQUESTS_CA_BUNDLE")

JsonObject = Dict[str, Any]


class InstallError(Exception):
    """Something that cannot be done, said for a person: what was wrong and where, and as ``hint`` what to do next."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


def sha256_file(path: Path) -> str:
    """The SHA-256 of a file's content, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        for block in iter(lambda: stream.read(MIB), b""):
            digest.update(block)
    return digest.hexdigest()


def _write_atomic(path: Path, content: str) -> None:
    aside = path.with_name(f"{path.name}.{os.getpid()}.part")
    aside.write_text(content, encoding="utf-8")
    aside.replace(path)


def _read_json(path: Path) -> Optional[JsonObject]:
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


# ------------------------------------------------------------------------------------------------------------------- releases


def _entries(release: Path) -> Iterator[Tuple[str, os.stat_result]]:
    """Path and status of everything in a release that is no folder."""
    pending = [str(release)]
    while pending:
        with os.scandir(pending.pop()) as found:
            for entry in found:
                if entry.is_dir(follow_symlinks=False):
                    pending.append(entry.path)
                else:
                    yield os.path.relpath(entry.path, str(release)), entry.stat(follow_symlinks=False)


def release_problem(release: Path, hashes: bool = True) -> Optional[str]:
    """Why the release in this folder cannot be used, or ``None`` when it is sound."""
    if not release.is_dir():
        return "it does not exist"
    document = _read_json(release / "release.json")
    if document is None or document.get("schema") != RELEASE_SCHEMA or document.get("build_id") != release.name:
        return "release.json is missing, damaged, or of another kind"
    manifest = release / MANIFEST
    try:
        if sha256_file(manifest) != document["files"][MANIFEST]["sha256"]:
            return f"`{MANIFEST}` has another sha256 than release.json says"
        expected = json.loads(manifest.read_text(encoding="utf-8"))
    except (OSError, ValueError, KeyError, TypeError):
        return f"`{MANIFEST}` is missing or damaged"
    for name, found in _entries(release):
        if name in ("release.json", MANIFEST):
            continue
        known = expected.pop(name, None)
        if known is None:
            return f"`{name}` does not belong to it"
        size_bytes, mode, content = known
        if stat.S_ISLNK(found.st_mode) != (mode == "link") or not (stat.S_ISREG(found.st_mode) or stat.S_ISLNK(found.st_mode)):
            return f"`{name}` is of another kind"
        if mode == "link":
            if os.readlink(str(release / name)) != content:
                return f"`{name}` leads elsewhere"
            continue
        if found.st_size != size_bytes:
            return f"`{name}` has {found.st_size} bytes instead of {size_bytes}"
        if f"{stat.S_IMODE(found.st_mode):04o}" != mode:
            return f"`{name}` has mode {stat.S_IMODE(found.st_mode):04o} instead of {mode}"
        if hashes and sha256_file(release / name) != content:
            return f"`{name}` has another sha256 than {MANIFEST} says"
    missing = next(iter(sorted(expected)), None)
    return f"`{missing}` is missing" if missing is not None else None


def recorded_hashes(release: Path) -> Dict[str, List[str]]:
    """What the wheels' own RECORD files say of their files: path in the release -> sha256 of each wheel that brings it."""
    found: Dict[str, List[str]] = {}
    for record in release.glob("lib/python*/site-packages/*.dist-info/RECORD"):
        base = record.parent.parent
        for name, digest, _ in csv.reader(io.StringIO(record.read_text(encoding="utf-8"))):
            # A wheel may bring modules that it has compiled itself (numpy does); they are compiled anew.
            if digest.startswith("sha256=") and not name.endswith(".pyc"):
                raw = base64.urlsafe_b64decode(digest[len("sha256=") :] + "==")
                path = os.path.relpath(os.path.normpath(str(base / name)), str(release))
                found.setdefault(path, []).append(raw.hex())
    return found


def make_manifest(release: Path) -> Dict[str, Tuple[int, str, str]]:
    """Every file of a release: size, mode and sha256; of a link its target, with ``link`` for the mode.

    Raises:
        InstallError: a file is not what its wheel's RECORD says: two wheels bring it, or the disk lost something.
    """
    recorded = recorded_hashes(release)
    manifest: Dict[str, Tuple[int, str, str]] = {}
    for name, status in _entries(release):
        if stat.S_ISLNK(status.st_mode):
            manifest[name] = (0, "link", os.readlink(str(release / name)))
            continue
        digest = sha256_file(release / name)
        if name in recorded and digest not in recorded.pop(name):
            raise InstallError(f"`{name}` is not what its wheel brought", "run it again; if it comes back, check the disk")
        manifest[name] = (status.st_size, f"{stat.S_IMODE(status.st_mode):04o}", digest)
    absent = sorted(name for name in recorded if name not in manifest)
    if absent:
        raise InstallError(f"`{absent[0]}` is missing after the installation", "run it again")
    return manifest


def licences(release: Path) -> Dict[str, str]:
    """Each package of a release with its version -> its licence, as its metadata names it; empty where that says nothing."""
    found = {}
    for path in sorted(release.glob("lib/python*/site-packages/*.dist-info/METADATA")):
        metadata = email.parser.HeaderParser().parsestr(path.read_text(encoding="utf-8", errors="replace"))
        classified = [
            line.rpartition("::")[2].strip() for line in metadata.get_all("Classifier", []) if line.startswith("License ::")
        ]
        # Some hold the whole text of their licence.
        named = (metadata.get("License-Expression") or metadata.get("License") or "").strip()
        short = named if named and len(named) < 80 and "\n" not in named else ", ".join(classified)
        found["{} {}".format(metadata.get("Name"), metadata.get("Version"))] = short
    return found


def relocate(release: Path, final: Path) -> None:
    """Make scripts that were installed at ``release`` run from ``final``, and RECORD files agree with them."""
    changed = {}
    old = f"#!{release}/".encode()
    for path in sorted((release / "bin").iterdir()):
        if path.is_symlink() or not path.is_file():
            continue
        if re.match(r"activate|Activate", path.name):
            # What a shell reads has the folder's name in many places, and nobody works in a release.
            path.unlink()
            continue
        content = path.read_bytes()
        if content.startswith(b"#!/bin/sh\n'''exec' ") or content.startswith(old):
            first, _, rest = content.partition(b"\n")
            if first == b"#!/bin/sh":
                # For names above the kernel's limit: the second line runs the interpreter, the third ends the text.
                rest = rest.split(b"\n", 2)[2]
                first = b"#!" + str(release / "bin/python").encode()
            first = first.replace(str(release).encode(), str(final).encode(), 1)
            if len(first) > SHEBANG_BYTES:
                first = b"#!/bin/sh\n'''exec' " + first[2:] + b" \"$0\" \"$@\"\n' '''"
            path.write_bytes(first + b"\n" + rest)
            changed[path] = path.read_bytes()
    for record in release.glob("lib/python*/site-packages/*.dist-info/RECORD"):
        rows = list(csv.reader(io.StringIO(record.read_text(encoding="utf-8"))))
        for row in rows:
            content = changed.get(Path(os.path.normpath(str(record.parent.parent / row[0]))), b"")
            if content:
                digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
                row[1:] = ["sha256=" + digest, str(len(content))]
        with io.StringIO() as text:
            csv.writer(text, lineterminator="\n").writerows(rows)
            record.write_text(text.getvalue(), encoding="utf-8")
    configuration = release / "pyvenv.cfg"
    configuration.write_text(configuration.read_text(encoding="utf-8").replace(str(release), str(final)), encoding="utf-8")


# ----------------------------------------------------------------------------------------------------------- the installation


def hashes_of(line: str) -> List[str]:
    """The SHA-256 values that a line of a requirements file allows."""
    return re.findall(r"--hash=sha256:([0-9a-f]{64})", line)


class Installation:
    """One run of an installation, phase by phase; each can be cut off anywhere and is then done or begun again."""

    def __init__(self, work: Path) -> None:
        self.work = work
        asked = _read_json(work / "asked.json")
        if asked is None:
            raise InstallError("`{}` is missing or damaged".format(work / "asked.json"))
        self.asked = asked
        self.final = Path(asked["path"])
        self.incoming = self.final.with_name(".incoming-" + self.final.name)
        self.wheels = work / "wheels"
        self.log = work / "install.log"
        self.phase = "prepare"
        lines = (work / "requirements.txt").read_text(encoding="utf-8").splitlines()
        self.options = [line for line in lines if line.startswith("-")]
        self.packages = [line for line in lines if line and not line.startswith("-")]

    def report(self, done: int, total: int, message: str) -> None:
        _write_atomic(
            self.work / "status.json",
            json.dumps({"state": "running", "phase": self.phase, "done": done, "total": total, "message": message[:200]}) + "\n",
        )

    def call(self, argv: Sequence[str], what: str) -> str:
        """Run a program, its output into the log.

        Raises:
            InstallError: it ended with another status than 0, or ran too long.
        """
        with self.log.open("ab") as log:
            log.write("$ {}\n".format(" ".join(argv)).encode())
            log.flush()
            done = subprocess.run(
                list(argv),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                cwd=str(self.work),
                check=False,
            )
            log.write(done.stdout)
        output = done.stdout.decode("utf-8", "replace")
        if done.returncode != 0:
            lines = [line for line in output.splitlines() if line.strip()]
            errors = [line for line in lines if re.match(r"\s*(ERROR|error)", line)]
            raise InstallError("{}: {}".format(what, " ".join((errors or lines)[:3])[:700]), explain(output))
        return output

    def run(self) -> None:
        """Everything, from a bare host to a release at its place."""
        self.check_host()
        self.phase = "environment"
        self.report(0, 1, "making the environment")
        _remove(self.incoming)
        self.incoming.parent.mkdir(parents=True, exist_ok=True)
        made = [self.asked["interpreter"], "-m", "venv", "--without-pip", str(self.incoming)]
        self.call(made, "no virtual environment could be made")
        self.phase = "download"
        files = self.download()
        self.phase = "install"
        self.install(files)
        self.phase = "check"
        self.report(0, 1, "importing the engine")
        said = self.check()
        self.phase = "finish"
        self.report(0, 1, "hashing every file")
        self.finish(said)

    def check_host(self) -> None:
        machine = platform.machine()
        if machine != self.asked["machine"]:
            raise InstallError("the release is for {}, and this host is {}".format(self.asked["machine"], machine))
        interpreter = self.asked["interpreter"]
        argv = [interpreter, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
        try:
            found = subprocess.run(argv, stdout=subprocess.PIPE, check=True).stdout.decode().strip()
        except (OSError, subprocess.CalledProcessError) as error:
            raise InstallError(f"`{interpreter}` does not run: {error}", "install python3-venv") from error
        if found != self.asked["python"]:
            raise InstallError(
                "the release is for Python {}, and `{}` is {}".format(self.asked["python"], interpreter, found),
                "run the plan again: it takes the interpreter that the host has now",
            )

    def present(self) -> Dict[str, Path]:
        """The wheels that are there, by SHA-256. What a broken download left has the hash of nothing."""
        return {sha256_file(path): path for path in sorted(self.wheels.glob("*")) if path.is_file()}

    def download(self) -> List[Path]:
        """Every wheel of the lock, in its order."""
        self.wheels.mkdir(exist_ok=True)
        self.report(0, len(self.packages), "looking at the wheels that are there")
        present = self.present()
        given = self.asked.get("wheels") or ""
        if given:
            self.link(Path(given), present)
            present = self.present()
        missing = [line for line in self.packages if not set(hashes_of(line)) & set(present)]
        if missing and given:
            names = ", ".join(line.split()[0] for line in missing[:5])
            raise InstallError(
                f"`{given}` lacks {len(missing)} of {len(self.packages)} wheels: {names}",
                "put them there: `pip download --no-deps --require-hashes` with the release's lock fetches all of them",
            )
        total, batch = len(self.packages), self.work / "batch.txt"
        for position in range(0, len(missing), BATCH):
            lines = missing[position : position + BATCH]
            names = ", ".join(line.split()[0] for line in lines)
            self.report(total - len(missing) + position, total, f"fetching {names}")
            batch.write_text("\n".join([*self.options, *lines]) + "\n", encoding="utf-8")
            words = ["download", "--disable-pip-version-check", "--no-input", "--no-deps", "--require-hashes", "--no-cache-dir"]
            words += ["--only-binary", ":all:", "--progress-bar", "off", "--dest", str(self.wheels), "--requirement", str(batch)]
            self.call(self.pip(words), "the wheels could not be fetched")
        present = self.present()
        files = []
        for line in self.packages:
            fitting = sorted(present[digest] for digest in hashes_of(line) if digest in present)
            if not fitting:
                raise InstallError(f"no wheel of `{line.split()[0]}` was fetched", f"look at `{self.log}`")
            files.append(fitting[0])
        return files

    def link(self, folder: Path, present: Mapping[str, Path]) -> None:
        """Take the wheels of the lock out of a folder of the host's."""
        wanted = {digest for line in self.packages for digest in hashes_of(line)} - set(present)
        for path in sorted(folder.glob("*.whl")):
            if wanted and sha256_file(path) in wanted:
                target = self.wheels / path.name
                _remove(target)
                try:
                    os.link(str(path), str(target))
                except OSError:
                    shutil.copyfile(str(path), str(target))

    def pip(self, words: Sequence[str]) -> List[str]:
        return [str(self.incoming / "bin/python"), "-B", str(self.pip_wheel() / "pip"), *words]

    def pip_wheel(self) -> Path:
        """The pip that the distribution has for new environments. It is run out of its wheel, and is no part of the release.

        Raises:
            InstallError: there is none.
        """
        program = "import ensurepip; print(ensurepip.version()); print(ensurepip.__path__[0])"
        try:
            said = subprocess.run([self.asked["interpreter"], "-c", program], stdout=subprocess.PIPE, check=True).stdout
            version, folder = said.decode().splitlines()
        except (OSError, subprocess.CalledProcessError, ValueError) as error:
            raise InstallError("there is no pip for new environments on this host", "install python3-venv") from error
        name = f"pip-{version}-py3-none-any.whl"
        for path in (Path(place, name) for place in (*WHEEL_FOLDERS, f"{folder}/_bundled")):
            if path.is_file():
                return path
        raise InstallError(f"there is no `{name}` on this host", "install python3-venv")

    def install(self, files: Sequence[Path]) -> None:
        self.report(0, 2, f"unpacking {len(files)} wheels")
        listed = self.work / "files.txt"
        # By file and hash: neither an index nor a resolver has a say here.
        listed.write_text("".join(f"{path} --hash=sha256:{sha256_file(path)}\n" for path in files), encoding="utf-8")
        words = [
            "install",
            "--disable-pip-version-check",
            "--no-input",
            "--no-index",
            "--no-deps",
            "--require-hashes",
            "--no-compile",
        ]
        self.call(
            self.pip([*words, "--no-warn-script-location", "--requirement", str(listed)]), "the wheels could not be installed"
        )
        relocate(self.incoming, self.final)
        for name in ("check_engine.py", "read_arguments.py"):
            shutil.copyfile(str(self.work / name), str(self.incoming / name))
        self.report(1, 2, "compiling modules")
        # Some packages bring files for other Pythons; what cannot be compiled is met again, or never, when it is imported.
        for cache in self.incoming.glob("lib/**/__pycache__"):
            _remove(cache)
        argv = [
            str(self.incoming / "bin/python"),
            "-m",
            "compileall",
            "-q",
            "-j",
            "0",
            "-s",
            str(self.incoming),
            "-p",
            str(self.final),
        ]
        with self.log.open("ab") as log:
            subprocess.run([*argv, str(self.incoming / "lib")], stdout=log, stderr=log, check=False)

    def check(self) -> JsonObject:
        """What the release says about itself: it has to import, hold the card's machine code, and read a command line."""
        home = self.work / "home"
        home.mkdir(exist_ok=True)
        argv = [str(self.incoming / "bin/python"), "-B", str(self.incoming / "check_engine.py")]
        environment = {
            "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": str(home),
            "LC_ALL": "C.UTF-8",
            **self.asked["environment"],
        }
        try:
            done = subprocess.run(
                [*argv, *self.asked["architectures"]],
                env=environment,
                cwd=str(home),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=CHECK_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise InstallError(f"the engine was not imported within {CHECK_TIMEOUT_S} s") from error
        said = done.stderr.decode("utf-8", "replace")
        with self.log.open("ab") as log:
            log.write("$ {}\n{}\n".format(" ".join(argv), said).encode())
        try:
            answer = json.loads(done.stdout.decode("utf-8", "replace").splitlines()[-1])
        except (IndexError, ValueError):
            answer = None
        if done.returncode != 0 or not isinstance(answer, dict):
            lines = [line for line in said.splitlines() if line.strip()]
            why = lines[-1] if lines else f"exit status {done.returncode}"
            raise InstallError(f"the engine does not work on this host: {why[:500]}", f"the whole log is `{self.log}`")
        version = self.asked.get("version", "")
        if version and answer.get("version") != version:
            raise InstallError("the engine calls itself {}, not {}".format(answer.get("version"), version))
        return answer

    def finish(self, said: Mapping[str, Any]) -> None:
        for folder, _, _ in os.walk(str(self.incoming)):
            Path(folder).chmod(0o755)
        manifest = make_manifest(self.incoming)
        text = json.dumps(manifest, sort_keys=True, separators=(",", ":"))
        (self.incoming / MANIFEST).write_text(text, encoding="utf-8")
        shown = {MANIFEST: (len(text.encode()), "0644", hashlib.sha256(text.encode()).hexdigest())}
        shown.update({name: entry for name, entry in manifest.items() if entry[0] >= LARGE_BYTES and entry[1] != "link"})
        shown.update({name: manifest[name] for name in ("check_engine.py", "read_arguments.py", "pyvenv.cfg")})
        document = {
            "schema": RELEASE_SCHEMA,
            "engine": "vllm",
            "build_id": self.asked["build_id"],
            "version": said["version"],
            "python": self.asked["python"],
            "machine": self.asked["machine"],
            "requirements_sha256": sha256_file(self.work / "requirements.txt"),
            "torch": said["torch"],
            "cuda": said["cuda"],
            "cuda_architectures": said["architectures"],
            "licences": licences(self.incoming),
            "size_bytes": sum(entry[0] for entry in manifest.values()),
            "files": {
                name: {"size_bytes": size_bytes, "mode": mode, "sha256": digest}
                for name, (size_bytes, mode, digest) in sorted(shown.items())
            },
        }
        (self.incoming / "release.json").write_text(json.dumps(document, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        for name in ("release.json", MANIFEST):
            (self.incoming / name).chmod(0o644)
        os.sync()
        broken = self.final.with_name(".broken-" + self.final.name)
        _remove(broken)
        if os.path.lexists(str(self.final)):
            self.final.rename(broken)
        self.incoming.rename(self.final)
        os.sync()
        _remove(broken)


def explain(output: str) -> str:
    """What to do about a failure of pip, as far as its output tells."""
    if "THESE PACKAGES DO NOT MATCH THE HASHES" in output:
        return "the index serves another file than the lock was made for: do not install it; ask whoever runs the index"
    if "No space left on device" in output:
        return "free some space and run it again: wheels that are there are kept"
    if "No matching distribution" in output or "Could not find a version" in output:
        return "the package index that pip is configured for lacks it; `vllm_wheels` takes a folder of wheels instead"
    if "ensurepip is not" in output:
        return "install python3-venv"
    return "run it again: wheels that are there are kept"


# -------------------------------------------------------------------------------------------------------------- its unit, status


def unit_of(work: Path) -> str:
    """The transient unit that installs what ``work`` describes."""
    return "v100ctl-install-{}.service".format(re.sub(r"[^A-Za-z0-9._-]", "-", work.name))


def _active(unit: str) -> bool:
    done = subprocess.run(
        ["systemctl", "show", "--value", "--property", "ActiveState", unit], stdout=subprocess.PIPE, check=False
    )
    return done.stdout.decode().strip() in ("active", "activating", "deactivating", "reloading")


def start(work: Path) -> JsonObject:
    """Start the installation, or attach to the one that runs; its status, and ``started``.

    Raises:
        InstallError: systemd does not start it.
    """
    unit = unit_of(work)
    if _active(unit):
        return {**status(work), "started": False}
    problem = release_problem(Path((_read_json(work / "asked.json") or {}).get("path", "/nowhere")))
    if problem is None:
        _write_atomic(work / "status.json", json.dumps({"state": "done", "message": "installed"}) + "\n")
        return {**status(work), "started": False}
    _write_atomic(
        work / "status.json",
        json.dumps({"state": "running", "phase": "prepare", "done": 0, "total": 0, "message": "starting"}) + "\n",
    )
    argv = ["systemd-run", "--quiet", "--collect", "--unit", unit, "--property", "Nice=10", "--property", "UMask=0022"]
    argv += ["--setenv=HOME=/root", "--setenv=LC_ALL=C.UTF-8"]
    argv += [f"--setenv={name}={value}" for name, value in sorted(os.environ.items()) if PASSED_ON.fullmatch(name)]
    argv += [sys.executable, "-B", str(Path(__file__).resolve()), "run", "--work", str(work)]
    done = subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    if done.returncode != 0 and not _active(unit):
        raise InstallError("systemd does not start the installation: {}".format(done.stdout.decode("utf-8", "replace").strip()))
    return {**status(work), "started": done.returncode == 0}


def status(work: Path) -> JsonObject:
    """What is known of the installation now; one whose unit is gone without a last word has failed."""
    found = _read_json(work / "status.json")
    if found is None:
        return {"state": "absent", "phase": "", "done": 0, "total": 0, "message": f"nothing was installed from `{work}`"}
    if found["state"] == "running" and not _active(unit_of(work)):
        # Its last word may have come between the two looks.
        found = _read_json(work / "status.json") or found
        if found["state"] == "running":
            found.update(
                state="failed",
                message="the installation was ended while in the phase {}".format(found.get("phase")),
                hint="run it again: wheels that are there are kept",
                log_tail=log_tail(work),
            )
    return found


def log_tail(work: Path) -> List[str]:
    """The last lines of the log."""
    try:
        with (work / "install.log").open(encoding="utf-8", errors="replace") as stream:
            return [line.rstrip("\n")[:500] for line in deque(stream, LOG_TAIL_LINES)]
    except OSError:
        return []


def run(work: Path) -> int:
    """The installation's own process: leaves its last word in ``status.json``."""
    installation: Optional[Installation] = None
    try:
        installation = Installation(work)
        installation.run()
    except Exception as error:
        if isinstance(error, InstallError):
            message, hint = error.message, error.hint
        else:
            message, hint = f"{type(error).__name__}: {error}", "the whole log is `{}`".format(work / "install.log")
        if installation is not None:
            _remove(installation.incoming)
        phase = installation.phase if installation is not None else "prepare"
        last = {"state": "failed", "phase": phase, "message": message, "hint": hint, "log_tail": log_tail(work)}
        _write_atomic(work / "status.json", json.dumps(last) + "\n")
        return 1
    _write_atomic(work / "status.json", json.dumps({"state": "done", "phase": "finish", "message": "installed"}) + "\n")
    return 0


# ------------------------------------------------------------------------------------------------------------------- command line


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        sys.stderr.write(f"error: {message}\n")
        raise SystemExit(64)


def main(arguments: Sequence[str]) -> int:
    """The command line; returns the exit status."""
    parser = _Parser(description="Installs one release of vLLM")
    verbs = parser.add_subparsers(dest="verb", required=True)
    for verb in ("start", "run", "status"):
        verbs.add_parser(verb).add_argument("--work", required=True, type=Path)
    verify = verbs.add_parser("verify")
    verify.add_argument("--release", required=True, type=Path)
    verify.add_argument("--sizes", action="store_true")
    given = parser.parse_args(arguments)
    os.umask(0o022)
    code = 0
    try:
        if given.verb == "run":
            return run(given.work.resolve())
        if given.verb == "start":
            answer = start(given.work.resolve())
        elif given.verb == "status":
            answer = status(given.work.resolve())
        else:
            problem = release_problem(given.release, hashes=not given.sizes)
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
