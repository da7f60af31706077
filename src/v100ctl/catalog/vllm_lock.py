"""Locks of vLLM's packages: requirements files with hashes, read for the Python that a host has."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from importlib import resources
from typing import NamedTuple

from packaging.markers import InvalidMarker, Marker

#: The folder of the shipped ones, beside this module: VERSION.txt.
LOCKS = "vllm_locks"


class LockedPackage(NamedTuple):
    """One package of a lock. ``hashes`` are ``sha256:HEX``, of every file that the version has."""

    name: str
    version: str
    hashes: tuple[str, ...]


class LockProblem(ValueError):
    """A line of a requirements file that a host cannot install as it is. ``args[0]`` says which and why."""


def _lines(text: str) -> Iterator[str]:
    """Logical lines: continued ones joined, comments and blank ones left out."""
    for line in re.sub(r"\\\r?\n", " ", text).splitlines():
        stripped = re.sub(r"(^|\s+)#.*$", "", line).strip()
        if stripped:
            yield stripped


def parse_lock(text: str) -> tuple[LockedPackage, ...]:
    """Every pinned package of a lock, whatever its marker says."""
    found = []
    for line in _lines(text):
        match = re.match(r"([A-Za-z0-9][A-Za-z0-9._-]*)==([^\s;]+)", line)
        if match:
            found.append(LockedPackage(match[1], match[2], tuple(re.findall(r"--hash=(\S+)", line))))
    return tuple(found)


def for_python(text: str, python: str) -> str:
    """The lines of a requirements file that hold for one Python on Linux and x86-64, without markers: one package a line.

    Lines with options of pip's (``--index-url`` and the like) stay. The same packages give the same text, however the file
    was written.

    Raises:
        LockProblem: a package without a hash, or a marker that is none.
    """
    environment = {
        "implementation_name": "cpython",
        "implementation_version": f"{python}.0",
        "os_name": "posix",
        "platform_machine": "x86_64",
        "platform_python_implementation": "CPython",
        "platform_system": "Linux",
        "python_full_version": f"{python}.0",
        "python_version": python,
        "sys_platform": "linux",
    }
    options, packages = [], []
    for line in _lines(text):
        if line.startswith("-"):
            options.append(line)
            continue
        words, *hashes = re.split(r"\s+(?=--hash=)", line)
        # An address may hold a semicolon; a marker has a blank before it.
        requirement, _, marker = words.partition(" ;") if " @ " in words else words.partition(";")
        if not hashes:
            raise LockProblem(f"`{requirement.strip()}` has no `--hash`")
        try:
            holds = not marker.strip() or Marker(marker.strip()).evaluate(environment)
        except InvalidMarker as error:
            raise LockProblem(f"`{requirement.strip()}` has a marker that is none: `{marker.strip()}`") from error
        if holds:
            packages.append(" ".join([requirement.strip(), *sorted(digest.strip() for digest in hashes)]))
    return "".join(f"{line}\n" for line in (*options, *sorted(packages)))


@functools.cache
def shipped_lock(version: str) -> str | None:
    """``vllm_locks/VERSION.txt``, read once; ``None`` where there is none."""
    if not re.fullmatch(r"[0-9]+(\.[0-9]+)+(\.post[0-9]+)?", version):
        return None
    file = resources.files(__package__).joinpath(f"{LOCKS}/{version}.txt")
    return file.read_text(encoding="utf-8") if file.is_file() else None


@functools.cache
def shipped_lock_for(version: str, python: str) -> str | None:
    """:func:`shipped_lock` for one Python."""
    text = shipped_lock(version)
    return None if text is None else for_python(text, python)
