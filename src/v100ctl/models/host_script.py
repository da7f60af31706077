"""Model headers by path, on the machine where they lie; on hosts as a script of which :mod:`v100ctl.models.host` sends the text.

``--request {"paths": [...], "limit_s": 10}`` prints one JSON document: ``{"schema", "headers": {PATH: {"header": {...}} or
{"error": {"kind", "message", "hint"}}}}``. A path that hangs (a dead file server) is given up after ``limit_s``.

Standard library only, Python >= 3.8.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
from typing import Any

from v100ctl.errors import V100ctlError
from v100ctl.models.gguf import read_gguf_model
from v100ctl.models.safetensors import read_folder
from v100ctl.models.source import (
    FileSource,
    ModelFormatError,
    ModelIncompleteError,
    ModelMissingError,
    Source,
    cannot_open,
    shown,
)

SCHEMA = "v100ctl/model-headers/1"
DEFAULT_LIMIT_S = 10.0
#: All headers together, as JSON: the controller takes 32 MiB at most.
MAX_DOCUMENT_BYTES = 24 << 20
MAX_LISTED = 100000


def read_path(path: str) -> dict[str, Any]:
    """The header of a GGUF file (the first part, where it is split) or of a folder with ``config.json``.

    Returns:
        The fields of :class:`v100ctl.models.types.ModelHeader`.

    Raises:
        ModelHeaderError: there is none, or it cannot be read or be true.
    """
    name = "`" + shown(path) + "`"
    listing: list[str] = []
    try:
        with os.scandir(path) as entries:
            for entry in entries:
                if entry.name.endswith(".safetensors") and len(listing) < MAX_LISTED:
                    listing.append(entry.name)
    except NotADirectoryError:
        return read_gguf_model(FileSource, path)
    except (OSError, ValueError) as error:
        raise cannot_open(name, error) from error

    def opener(file_name: str) -> Source:
        return FileSource(path.rstrip("/") + "/" + file_name)

    return read_folder(opener, name, listing)


def answer(path: str) -> dict[str, Any]:
    """A path's header or error, as it stands in the document."""
    try:
        return {"header": read_path(path)}
    except V100ctlError as error:
        kinds = (("incomplete", ModelIncompleteError), ("missing", ModelMissingError), ("format", ModelFormatError))
        kind = next((name for name, cls in kinds if isinstance(error, cls)), "header")
        return {"error": {"kind": kind, "message": error.message, "hint": error.hint}}
    except MemoryError:
        return _error(path, "cannot be read: out of memory")


def _error(path: str, said: str) -> dict[str, Any]:
    return {"error": {"kind": "header", "message": f"`{shown(path)}` {said}", "hint": None}}


def answer_aside(path: str, limit_s: float) -> bytes:
    """:func:`answer` as JSON, by a process of its own that may hang or be killed."""
    reading, writing = os.pipe()
    worker = os.fork()
    if worker == 0:
        try:
            # What it holds open would keep the controller waiting if it could not be killed.
            nothing = os.open(os.devnull, os.O_RDWR)
            for descriptor in (0, 1, 2):
                os.dup2(nothing, descriptor)
            os.close(reading)
            data = json.dumps(answer(path)).encode("ascii")
            while data:
                data = data[os.write(writing, data) :]
        finally:
            os._exit(0)
    os.close(writing)
    parts = []
    end_s = time.monotonic() + limit_s
    try:
        while True:
            if not select.select([reading], [], [], max(0.0, end_s - time.monotonic()))[0]:
                os.kill(worker, signal.SIGKILL)
                return json.dumps(_error(path, f"could not be read within {limit_s:g} s")).encode("ascii")
            part = os.read(reading, 1 << 20)
            if not part:
                break
            parts.append(part)
    finally:
        os.close(reading)
    os.waitpid(worker, 0)
    return b"".join(parts) or json.dumps(_error(path, "cannot be read: the reader was killed")).encode("ascii")


def main() -> None:
    """Answer the request in ``sys.argv``."""
    request = json.loads(sys.argv[sys.argv.index("--request") + 1])
    limit_s = float(request.get("limit_s", DEFAULT_LIMIT_S))
    answers = []
    left_bytes = MAX_DOCUMENT_BYTES
    for path in request["paths"]:
        found = answer_aside(path, limit_s)
        if len(found) > left_bytes:
            found = json.dumps(_error(path, f"has a header of {len(found)} bytes, too much to send")).encode("ascii")
        left_bytes -= len(found)
        answers.append(json.dumps(path).encode("ascii") + b": " + found)
    document = b'{"schema": "' + SCHEMA.encode("ascii") + b'", "headers": {' + b", ".join(answers) + b"}}\n"
    sys.stdout.buffer.write(document)
    sys.stdout.buffer.flush()
