"""What is wrong with one word of a command line, whichever engine it is for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ProblemKind = Literal["unknown", "value", "missing-value", "refused", "deprecated"]


@dataclass(frozen=True)
class ArgvProblem:
    """One word of an argv that the engine's own parser would not take, or would not take as meant.

    ``kind`` is ``unknown`` (no such argument), ``value`` (the argument does not take this value), ``missing-value`` (it takes
    one and none follows), ``refused`` (known, but this build stops with an error) or ``deprecated`` (taken, with a warning).
    ``meant`` is the spelling that this build does know, ``None`` where nothing is near.
    """

    word: str
    kind: ProblemKind
    message: str
    meant: str | None = None

    @property
    def fatal(self) -> bool:
        """Whether the engine does not start with it."""
        return self.kind != "deprecated"
