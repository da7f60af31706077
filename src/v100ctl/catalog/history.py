"""What pasted command lines need explained: flags of other times, what flags do, environment variables, images.

``llama_cpp_history.yml`` and ``vllm_history.yml`` hold what an engine's own parser cannot say: why a word of a tutorial is
refused today, what a flag does in a few words, and what is unwise on a card although the parser takes it. What a build takes, and
how each setting is spelled for it, stands in the engine's own rows and is not repeated here.
"""

from __future__ import annotations

import functools
from datetime import date
from importlib import resources
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field

Verdict = Literal["ok", "ignored", "renamed", "unwise", "fails", "refused"]


class _Row(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class FormerFlag(_Row):
    """A word that tutorials use and that a build does not take: what it was, and what says the same now.

    ``takes`` is how many words followed it. ``first_without`` is the first build (llama.cpp) or version (vLLM) that is known to
    refuse it, ``None`` where no release ever took it. ``settings`` are what it means, where that can be said.
    """

    names: tuple[str, ...] = Field(min_length=1)
    takes: int = 0
    first_without: int | str | None = None
    instead: str | None = None
    settings: dict[str, Any] = {}
    reason: str
    source: str


class Advice(_Row):
    """Something about a flag that the parser takes. All conditions that are given must hold.

    ``values`` are the values that it is about (``None``: any), ``above`` a number that they exceed.
    ``compute_capability_below`` compares with the card's. ``first`` and ``last`` are builds of llama.cpp, ``versions`` is a
    specifier for vLLM (PEP 440).
    """

    id: str
    names: tuple[str, ...] = Field(min_length=1)
    values: tuple[str, ...] | None = None
    above: float | None = None
    compute_capability_below: float | None = None
    first: int | None = None
    last: int | None = None
    versions: str | None = None
    verdict: Verdict
    reason: str
    nearest: str | None = None
    source: str


class Variable(_Row):
    """An environment variable. ``values`` restricts the row to some values, ``versions`` to some of vLLM (PEP 440)."""

    name: str
    values: tuple[str, ...] | None = None
    versions: str | None = None
    compute_capability_below: float | None = None
    verdict: Verdict = "ok"
    meaning: str
    reason: str | None = None
    nearest: str | None = None
    secret: bool = False
    setting: str | None = None
    source: str


class Image(_Row):
    """Container images by the beginning of their name (without a registry), whose entry point is the server."""

    prefix: str
    verdict: Verdict
    reason: str
    nearest: str | None = None
    source: str


class CmakeName(_Row):
    """A CMake name that this engine's build does not declare: CMake's own, or one of other times."""

    names: tuple[str, ...] = Field(min_length=1)
    verdict: Verdict = "ok"
    meaning: str | None = None
    reason: str | None = None
    instead: str | None = None
    source: str


class CmakeAdvice(_Row):
    """Something about a declared option with one of ``values`` (as CMake reads them: upper case, ON for any true word)."""

    id: str
    name: str
    values: tuple[str, ...]
    verdict: Verdict
    reason: str
    nearest: str | None = None
    source: str


class Meanings(_Row):
    """What flags do, in a few words, by any of their names."""

    source: str
    flags: dict[str, str]


class CmakeHistory(_Row):
    """CMake for llama.cpp. ``renamed_prefixes`` map the beginnings of old names to today's."""

    meanings: Meanings
    renamed_prefixes: dict[str, str]
    renamed_source: str
    names: tuple[CmakeName, ...]
    #: Words of the `cmake` program itself -> (number of words that follow, what it does).
    words: dict[str, tuple[int, str]]
    words_source: str
    advice: tuple[CmakeAdvice, ...]


class History(_Row):
    """One engine's file."""

    as_of: date
    meanings: Meanings
    former_flags: tuple[FormerFlag, ...]
    #: Flags that once took no value and now take one.
    bare_flags: tuple[FormerFlag, ...] = ()
    advice: tuple[Advice, ...]
    environment: tuple[Variable, ...]
    images: tuple[Image, ...]
    #: Old names of the program -> why, and what it is called now.
    programs: dict[str, str] = {}
    programs_source: str | None = None
    cmake: CmakeHistory | None = None

    def meaning(self, names: tuple[str, ...]) -> str | None:
        """What a flag with these names does."""
        return next((self.meanings.flags[name] for name in names if name in self.meanings.flags), None)

    def former(self, word: str) -> FormerFlag | None:
        """The row of a word that a build does not take."""
        return next((row for row in self.former_flags if word in row.names), None)


@functools.cache
def load_history(engine: Literal["llama_cpp", "vllm"]) -> History:
    """The history that this version ships for an engine."""
    text = resources.files(__package__ or "v100ctl.catalog").joinpath(f"{engine}_history.yml").read_text(encoding="utf-8")
    # The C loader reads the same YAML several times faster; not every build of PyYAML has it.
    return History.model_validate(yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)))  # noqa: S506 - both safe
