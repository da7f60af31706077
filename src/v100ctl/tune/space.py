"""What is tried: each value of each dimension alone, and combinations, as far as somebody says that they work. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from v100ctl.tune.search import Candidate


@dataclass(frozen=True)
class Checked:
    """What is known of choices before they are tried.

    ``key`` is what the server is started with: choices with the same key are the same. ``rule`` and ``reason`` say why they are
    not tried; empty where they are.
    """

    key: str
    rule: str = ""
    reason: str = ""


#: Judges choices beside the live settings.
Check = Callable[[Mapping[str, str]], Checked]


@dataclass(frozen=True)
class Excluded:
    """What is not tried, and why."""

    candidate: str
    rule: str
    reason: str

    def to_json(self) -> dict[str, str]:
        """For the report."""
        return dict(vars(self))


class Space:
    """The candidates of one search.

    Args:
        values: Dimension -> values in words.
        check: Judges choices. It is asked once for each.
    """

    def __init__(self, values: Mapping[str, Sequence[str]], check: Check) -> None:
        self._values, self._check = values, check
        self.excluded: list[Excluded] = []
        self._known: dict[str, Checked] = {}
        self._keys: dict[str, str] = {self.checked({}).key: ""}

    def checked(self, choices: Mapping[str, str]) -> Checked:
        """What is known of choices."""
        name = Candidate(choices).id
        if name not in self._known:
            self._known[name] = self._check(choices)
        return self._known[name]

    def _new(self, candidate: Candidate) -> bool:
        """Whether it works and is not the same as the live settings or one before."""
        found = self.checked(candidate.choices)
        if found.rule or found.key in self._keys:
            return False
        self._keys[found.key] = candidate.id
        return True

    def singles(self) -> list[Candidate]:
        """Each value alone; where it does not work so, together with the first other value with which it does."""
        alone, refused = [], []
        for name, values in self._values.items():
            for value in values:
                candidate = Candidate({name: value}, lead=name)
                if self.checked(candidate.choices).rule:
                    refused.append(candidate)
                elif self._new(candidate):
                    alone.append(candidate)
        for candidate in refused:
            found = self.checked(candidate.choices)
            helped = next(
                (
                    pair
                    for other, values in self._values.items()
                    if other != candidate.lead
                    for value in values
                    if self._new(pair := Candidate({**candidate.choices, other: value}, lead=candidate.lead))
                ),
                None,
            )
            if helped is not None:
                alone.append(helped)
            self.excluded.append(Excluded(candidate.id, found.rule, found.reason))
        return alone

    def combine(self, sets: Sequence[Mapping[str, str]]) -> list[Candidate]:
        """The combinations that work and are new."""
        made = []
        for choices in sets:
            candidate = Candidate(dict(choices))
            found = self.checked(candidate.choices)
            if found.rule:
                self.excluded.append(Excluded(candidate.id, found.rule, found.reason))
            elif self._new(candidate):
                made.append(candidate)
        return made
