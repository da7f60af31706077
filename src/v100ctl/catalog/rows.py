"""What every row of the catalog is: frozen, and strict about its keys."""

from __future__ import annotations

import functools
import re
from typing import Literal

from pydantic import BaseModel, ConfigDict


class Row(BaseModel):
    """A row that refuses unknown keys and cannot be changed."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Progress(Row):
    """Where an engine shows that it gets on with its requests.

    ``slots``: JSON of llama.cpp's slots. ``metrics``: Prometheus' text, where ``busy`` are gauges of requests and ``counters``
    grow with each step. ``hidden_by`` are words of the command line with which it shows nothing, or must not be asked.
    """

    source: str
    kind: Literal["slots", "metrics"]
    path: str
    hidden_by: tuple[str, ...]
    busy: tuple[str, ...] = ()
    counters: tuple[str, ...] = ()


@functools.lru_cache(maxsize=4096)
def version_key(version: str) -> tuple[int, ...]:
    """The numbers of a version, for comparing: ``535.309.01-0ubuntu1`` -> ``(535, 309, 1)``, ``6.1.0-57-amd64`` -> ``(6, 1, 0)``.

    Only what stands before the first character that is neither digit nor full stop counts; nothing numeric gives ``()``.
    """
    # No version is longer, and Python refuses numbers of thousands of digits.
    leading = re.match(r"[0-9.]{0,100}", version.strip())
    return tuple(int(part) for part in (leading.group() if leading else "").split(".") if part)
