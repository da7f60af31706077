"""What a release of vLLM is installed from, on the controller: its requirements, and its wheels.

``python -m v100ctl.wheels --release BUILD_ID --python 3.11`` reads a release's requirements from its standard input, fetches
every wheel from the package index that the controller's pip is configured for, and prints the folder.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from v100ctl.catalog.vllm_lock import LockProblem, for_python, shipped_lock_for
from v100ctl.errors import V100ctlError
from v100ctl.locks import exclusive
from v100ctl.paths import cache_dir

#: What a host with glibc 2.28 or newer runs, the newest first.
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64", "manylinux1_x86_64", "linux_x86_64")
#: Packages that one call of pip fetches: fewer calls start faster, more of them lose less when the line breaks.
BATCH = 8


def requirements(build: Mapping[str, Any], file: str) -> str:
    """The packages of a release, one a line with hashes: the shipped lock's for its Python, or those of the user's file.

    Args:
        build: What the plan asks for.
        file: The user's own requirements file.

    Raises:
        V100ctlError: the user's file cannot be read, is another than the plan was made for, or holds a package without a hash.
    """
    if "file_sha256" not in build:
        shipped = shipped_lock_for(str(build["version"]), str(build["python"]))
        if shipped is None or hashlib.sha256(shipped.encode()).hexdigest() != build["lock_sha256"]:
            raise V100ctlError(f"the plan of {build['build_id']} was made with another lock", hint="run it again")
        return shipped
    try:
        raw = Path(file).expanduser().read_bytes()
    except OSError as error:
        raise V100ctlError(f"`vllm_requirements: {file}` cannot be read: {error.strerror}") from error
    found = hashlib.sha256(raw).hexdigest()
    if found != build["file_sha256"]:
        raise V100ctlError(
            f"`{file}` has the sha256 {found} instead of {build['file_sha256']}",
            hint="correct `vllm_requirements_sha256`, if you have changed the file",
        )
    try:
        return for_python(raw.decode(), str(build["python"]))
    except (LockProblem, UnicodeDecodeError) as error:
        raise V100ctlError(
            f"`{file}`: {error}", hint="`uv pip compile --generate-hashes` and `pip-compile --generate-hashes` write such files"
        ) from error


def wheels(folder: str, lock: str) -> list[str]:
    """The wheels of a folder that a lock's hashes allow.

    Raises:
        V100ctlError: the folder is none, or lacks a package.
    """
    path = Path(folder).expanduser()
    if not path.is_dir():
        raise V100ctlError(
            f"`vllm_wheels: {folder}` is no folder on this machine", hint="`vllm_wheels_on: host`, if it is one there"
        )
    allowed = _allowed(lock)
    found = {allowed[digest]: str(wheel) for digest, wheel in _present(path).items() if digest in allowed}
    missing = sorted(set(allowed.values()) - set(found))
    if missing:
        raise V100ctlError(
            f"`{folder}` lacks {len(missing)} of {len(set(allowed.values()))} wheels: {', '.join(missing[:5])}",
            hint="`pip download --no-deps --require-hashes` with the lock fetches all of them",
        )
    return list(found.values())


def fetch(release: str, python: str, lock: str) -> Path:
    """Have every wheel of a lock in the cache, whatever Python the controller itself has; the folder.

    Several runs at once do not collide, and one that was cut off goes on where it stopped.

    Raises:
        V100ctlError: the index lacks a wheel, serves another file, or does not answer.
    """
    folder = cache_dir() / "wheels" / release
    folder.mkdir(parents=True, exist_ok=True)
    with exclusive(folder / "lock"):
        allowed, present = _allowed(lock), _present(folder)
        there = {allowed[digest] for digest in present if digest in allowed}
        options = [line for line in lock.splitlines() if line.startswith("-")]
        missing = [line for line in lock.splitlines() if line and not line.startswith("-") and line.split()[0] not in there]
        listed = folder / "batch.txt"
        for position in range(0, len(missing), BATCH):
            lines = missing[position : position + BATCH]
            listed.write_text("\n".join([*options, *lines]) + "\n", encoding="utf-8")
            argv = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--no-cache-dir", "--no-deps"]
            argv += ["--require-hashes", "--only-binary", ":all:", "--python-version", python, "--dest", str(folder)]
            argv += [word for platform in PLATFORMS for word in ("--platform", platform)]
            done = subprocess.run([*argv, "--requirement", str(listed)], capture_output=True, text=True, check=False)
            if done.returncode != 0:
                errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()
                names = ", ".join(line.split()[0] for line in lines)
                raise V100ctlError(f"one of {names} could not be fetched: {' '.join(errors[:3])[:500]}", hint="run it again")
    return folder


def _allowed(lock: str) -> dict[str, str]:
    """SHA-256 -> the package that it is allowed for."""
    return {
        digest: line.split()[0]
        for line in lock.splitlines()
        if not line.startswith("-")
        for digest in re.findall(r"--hash=sha256:([0-9a-f]{64})", line)
    }


def _present(folder: Path) -> dict[str, Path]:
    """SHA-256 -> the wheel in a folder."""
    found = {}
    for wheel in sorted(folder.glob("*.whl")):
        with wheel.open("rb") as stream:
            found[hashlib.file_digest(stream, "sha256").hexdigest()] = wheel
    return found


def main(arguments: Sequence[str]) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m v100ctl.wheels", description="Fetch the wheels of a release of vLLM")
    parser.add_argument("--release", required=True, help="its name")
    parser.add_argument("--python", required=True, help="the host's: 3.11")
    given = parser.parse_args(arguments)
    try:
        print(fetch(given.release, given.python, sys.stdin.read()))
    except V100ctlError as error:
        print(f"error: {error.message}" + (f"\nhint: {error.hint}" if error.hint else ""), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
