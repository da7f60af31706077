"""What an explanation is made of. Plain frozen data."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from v100ctl.catalog.history import Verdict
from v100ctl.plan.command_line import DASHES

#: Worst first; also the order in which findings are shown.
VERDICTS: tuple[Verdict, ...] = ("refused", "fails", "unwise", "renamed", "ignored", "ok")
Engine = Literal["llama_cpp", "vllm"]
#: What stands for a secret wherever the text had one.
HIDDEN = "(hidden)"


@dataclass(frozen=True)
class Card:
    """What flags are judged for. ``source`` says where that comes from."""

    name: str | None
    compute_capability: str
    source: Literal["asked", "facts", "default"]

    @property
    def capability(self) -> float:
        """The compute capability as a number, for comparing: ``7.0``."""
        return float(self.compute_capability)

    @property
    def sm(self) -> int:
        """The compute capability as architectures are numbered: ``70``."""
        major, _, minor = self.compute_capability.partition(".")
        return int(major) * 10 + int(minor or 0)

    def __str__(self) -> str:
        return self.name or f"a card of compute capability {self.compute_capability}"


@dataclass(frozen=True)
class Finding:
    """What one flag (or several that belong together) means.

    ``words`` are as they stand in the text, secrets replaced. ``verdict``: ``ok``; ``ignored`` (without effect); ``renamed``
    (works under an old name); ``unwise``; ``fails`` (taken by the parser, but cannot work on that card or together);
    ``refused`` (by the parser). ``settings`` are the inventory's keys that say the same.
    """

    words: tuple[str, ...]
    verdict: Verdict
    id: str
    meaning: str | None = None
    reason: str | None = None
    nearest: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class CommandExplanation:
    """One command of the text. ``inventory`` is a snippet of YAML, ready to paste."""

    program: str
    typed: str
    line: int
    engine: Engine
    version: str
    findings: tuple[Finding, ...]
    inventory: str

    @property
    def verdict(self) -> Verdict:
        """The worst of its findings."""
        return worst(finding.verdict for finding in self.findings)


@dataclass(frozen=True)
class Explanation:
    """Everything about a text."""

    card: Card
    commands: tuple[CommandExplanation, ...]

    @property
    def verdict(self) -> Verdict:
        """The worst of its commands."""
        return worst(command.verdict for command in self.commands)


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """The first of them in the order of :data:`VERDICTS`."""
    found = set(verdicts)
    return next((verdict for verdict in VERDICTS if verdict in found), "ok")


def ordered(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """Worst first, otherwise in the order of the text."""
    return tuple(sorted(findings, key=lambda finding: VERDICTS.index(finding.verdict)))


def is_opaque(value: str) -> bool:
    """Whether a value is known only when the command runs: a variable, a substitution, a specifier or a placeholder."""
    return bool(re.search(r"\$[A-Za-z_{(@*#0-9]|`|%[A-Za-z]|<[^<>]+>|\{\{", value))


def plain_dash(word: str) -> tuple[str, ...]:
    """What a word that begins with a typographic dash may have been, likeliest first; empty where it begins with none."""
    stripped = word.lstrip(DASHES + "-")
    lead = word[: len(word) - len(stripped)]
    if not stripped or not set(lead) & set(DASHES):
        return ()
    return (f"--{stripped}", f"-{stripped}") if len(stripped) > 1 else (f"-{stripped}",)


_SECRET_NAME = re.compile(r"(api[-_]?key|token|password|passwd|secret|credential)s?$", re.IGNORECASE)
_NOT_SECRET = re.compile(r"(file|max|num|special|ids?|batched|tokens)", re.IGNORECASE)


def looks_secret(name: str) -> bool:
    """Whether a flag or variable of this name holds a secret, going by the name alone."""
    bare = name.lstrip("-").replace("-", "_")
    return bool(_SECRET_NAME.search(bare)) and not _NOT_SECRET.search(bare)
