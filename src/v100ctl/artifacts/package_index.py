"""One archive from the package index that the user's pip is configured for, by SHA-256.

pip itself downloads: mirrors, proxies, certificates, keyrings and offline folders are then right because they are pip's own. The
one thing it does beyond that is to ask a source archive's build backend for its metadata, after installing that backend and
whatever else the archive names; see :mod:`v100ctl.artifacts.metadata_backend` for why and how that does not happen here.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from v100ctl.artifacts import metadata_backend
from v100ctl.artifacts.cache import remove
from v100ctl.artifacts.download import Progress
from v100ctl.errors import ArtifactError


@contextlib.contextmanager
def download_package(requirement: str, sha256: str, part: Path, progress: Progress, *, as_source: bool) -> Iterator[Path]:
    """Downloads ``NAME==VERSION`` into a folder beside ``part``, yields the file and removes the folder.

    Args:
        requirement: ``NAME==VERSION``.
        sha256: What pip accepts: nothing else is kept.
        part: Where the caller makes its entry; the folder is ``part`` with ``.pip`` added.
        progress: Told of every block that came.
        as_source: Take the source archive, not a wheel.

    Raises:
        ArtifactError: No configured index has it, none answers, or the file is another one.
    """
    match = re.fullmatch(r"([A-Za-z0-9][A-Za-z0-9._-]*)==([A-Za-z0-9][A-Za-z0-9._+!-]*)", requirement)
    if match is None:
        raise ArtifactError(f"`{requirement}` does not have the form NAME==VERSION")
    folder = part.with_name(part.name + ".pip")
    remove(folder)
    try:
        for name in ("out", "tmp", "backend/setuptools"):
            (folder / name).mkdir(parents=True)
        (folder / "requirements.txt").write_text(f"{requirement} --hash=sha256:{sha256}\n", encoding="utf-8")
        shim = folder / "backend" / "setuptools"
        (shim / "__init__.py").write_text("", encoding="utf-8")
        (shim / "build_meta.py").write_bytes(Path(metadata_backend.__file__).read_bytes())
        options = ["--no-build-isolation", "--no-binary", match.group(1)] if as_source else []
        _pip_download(folder, options, requirement, progress)
        files = list((folder / "out").iterdir())
        if len(files) != 1:
            raise ArtifactError(f"pip downloaded {len(files)} files for {requirement} instead of one")
        yield files[0]
    finally:
        remove(folder)


def _pip_download(folder: Path, options: list[str], requirement: str, progress: Progress) -> None:
    argv = [sys.executable, "-m", "pip", "download", "--no-input", "--progress-bar", "raw", "--disable-pip-version-check"]
    # The archive is kept in our own cache, so pip's would hold it twice. One repetition: another place may be next.
    argv += ["--no-cache-dir", "--retries", "1", "--no-deps", "--require-hashes", "--ignore-requires-python"]
    argv += [*options, "--dest", str(folder / "out"), "--requirement", str(folder / "requirements.txt")]
    environment = {key: value for key, value in os.environ.items() if key not in ("PIP_QUIET", "PIP_VERBOSE", "PIP_LOG")}
    environment |= {"TMPDIR": str(folder / "tmp"), "PYTHONPATH": str(folder / "backend"), "PYTHONUNBUFFERED": "1"}
    lines: deque[str] = deque(maxlen=200)
    process = subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment,
        cwd=folder,
        text=True,
        errors="replace",
    )
    with process:
        try:
            for line in process.stdout or ():
                match = re.match(r"Progress (\d+) of (\d+)", line)
                if match:
                    progress(int(match.group(1)), int(match.group(2)) or None, requirement)
                else:
                    lines.append(line.rstrip())
        except BaseException:
            process.kill()
            raise
    if process.returncode != 0:
        raise ArtifactError(explain_pip(list(lines), requirement), hint="`pip config list` shows which index is asked")


def explain_pip(lines: list[str], requirement: str) -> str:
    """Why ``pip download`` failed, from what it printed."""
    text = "\n".join(lines)
    if "DO NOT MATCH THE HASHES" in text:
        got = re.search(r"Got\s+([0-9a-f]{64})", text)
        expected = re.search(r"Expected sha256 ([0-9a-f]{64})", text)
        if got and expected:
            return f"it has sha256 {got.group(1)} instead of {expected.group(1)}"
        return "it has another sha256 than was asked for"
    broken = re.search(r"after connection broken by '(.*)': /", text)
    if broken:
        cause = re.search(
            r"Failed to (?:establish|resolve)[^\"]*|(?:[Rr]ead )?timed out|certificate verify failed[^\"]*", broken.group(1)
        )
        return f"pip reached no index that has {requirement}: {(cause or broken).group(0)[:200]}"
    insecure = re.search(r"The repository located at (\S+) is not a trusted or secure host", text)
    if insecure:
        return f"pip does not trust the index at {insecure.group(1)}, which is configured without https"
    if "No space left on device" in text:
        return "the disk became full during the download"
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    return errors[-1] if errors else f"`pip download {requirement}` failed: {lines[-1] if lines else 'it printed nothing'}"
