"""What every row of the catalog is: frozen, and strict about its keys."""

from __future__ import annotations

import functools
import re

from pydantic import BaseModel, ConfigDict


class Row(BaseModel):
    """A row that refuses unknown keys and cannot be changed."""

    model_config = ConfigDict(extra="forbid", frozen=True)


@functools.lru_cache(maxsize=4096)
def version_key(version: str) -> tuple[int, ...]:
    """The numbers of a version, for comparing: ``535.309.01-0ubuntu1`` -> ``(535, 309, 1)``, ``6.1.0-57-amd64`` -> ``(6, 1, 0)``.

    Only what stands before the first character that is neither digit nor full stop counts; nothing numeric gives ``()``.
    """
    # No version is longer, and Python refuses numbers of thousands of digits.
    leading = re.match(r"[0-9.]{0,100}", version.strip())
    return tuple(int(part) for part in (leading.group() if leading else "").split(".") if part)
