"""Answers pip in place of a source archive's own build backend.

``pip download`` of a source archive wants to know its name and version from the archive's build backend, and for that installs
the backend and everything else that the archive needs for a build, then runs its code. We only want the file, whose SHA-256 is
known: nothing that comes with it, and nothing unpinned, shall run on the controller, nor take the seconds and downloads that it
costs. So pip is told to use what is installed (``--no-build-isolation``), and a copy of this file lies first on its path under
the backend's name, setuptools. Name and version are in every source archive's ``PKG-INFO``.

Runs inside pip's process, in the unpacked archive: the standard library only.
"""

from __future__ import annotations

import email.parser
import re
import shutil
from pathlib import Path
from typing import Any


def prepare_metadata_for_build_wheel(metadata_directory: str, config_settings: dict[str, Any] | None = None) -> str:
    """PEP 517: writes ``NAME-VERSION.dist-info`` into the folder and returns its name."""
    with Path("PKG-INFO").open(encoding="utf-8") as stream:
        headers = email.parser.HeaderParser().parse(stream)
    name = re.sub(r"[-_.]+", "_", headers["Name"]).lower()
    folder = Path(metadata_directory, f"{name}-{headers['Version']}.dist-info")
    folder.mkdir()
    shutil.copyfile("PKG-INFO", folder / "METADATA")
    return folder.name
