"""Which candidate is better than what runs now, and which only looks so. Pure but for the one call that measures.

Every score is a ratio to the live settings, measured close by in time: a card that warms up slows both. First each change is
tried alone; then those that help are combined and halved round by round; what is left is measured in pairs with the live
settings, on fresh data alone, and tested. Standard library only, so that it runs on a bare machine with a card too.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from v100ctl.bench.stats import paired_change_interval, sign_flip_p

#: The settings that run now.
LIVE = "live"
#: How often chance alone may make a gain of nothing, over all that is tested at the end.
ALPHA = 0.05
#: A gain below this is none, however sure it is: the next restart moves a server by as much.
SMALLEST_GAIN = 0.005
#: Between two looks at the live settings at most so many candidates are tried.
BLOCK = 4
#: Dimensions whose best values are combined with each other.
COMBINED = 3
#: The largest contexts that are put to the test, until one passes.
CONTEXTS = 3

Status = Literal["winner", "finalist", "dropped", "failed", "untried"]


@dataclass(frozen=True)
class Candidate:
    """Settings to try. ``choices``: dimension -> what was chosen there, in words; what is not named is as it runs now.

    ``lead`` is the dimension that a single change is about, where it works only together with another.
    """

    choices: Mapping[str, str] = field(default_factory=dict)
    lead: str = ""

    @property
    def id(self) -> str:
        """A name that is the same each time."""
        return " ".join(f"{name}={value}" for name, value in sorted(self.choices.items())) or LIVE


@dataclass(frozen=True)
class Outcome:
    """What one trial said; without a value, why there is none."""

    value: float | None = None
    problem: str = ""


class OutOfTime(Exception):
    """The budget is used up; what was measured is kept, and the search goes on from there another time."""


class LiveFailed(Exception):
    """The live settings could not be measured: nothing can be compared with them."""


#: One trial of a candidate. May raise :class:`OutOfTime`.
Measure = Callable[[Candidate], Outcome]
#: The candidates that combine choices, without those that cannot work.
Combine = Callable[[Sequence[Mapping[str, str]]], Sequence[Candidate]]


@dataclass(frozen=True)
class Schedule:
    """How much is tried.

    Attributes:
        pool: Candidates that enter the halving.
        finalists: Those that are tested at the end.
        pairs: Pairs of each with the live settings in that test.
    """

    pool: int = 8
    finalists: int = 2
    pairs: int = 7

    def trials(self, singles: int) -> int:
        """About how many trials it takes."""

        def with_live(count: int) -> int:
            return count + -(-count // BLOCK) + 1

        total = with_live(singles)
        left = min(self.pool, max(singles * 2, self.finalists))
        while left > self.finalists:
            total += with_live(left)
            left = max(self.finalists, -(-left // 2))
        return total + self.pairs * (1 + self.finalists)


#: The richest first. A test of m finalists in n pairs can say something only where m / 2 ** n is below ALPHA.
SCHEDULES = (Schedule(), Schedule(6, 2, 7), Schedule(6, 1, 6), Schedule(4, 1, 6), Schedule(3, 1, 5))


def schedule_for(singles: int, trials: float) -> Schedule:
    """The richest schedule that so many trials allow, the leanest where none does."""
    return next((item for item in SCHEDULES if item.trials(singles) <= trials), SCHEDULES[-1])


@dataclass
class Row:
    """What is known of a candidate at the end. ``gain``, ``low``, ``high``: relative to the live settings (0.05: 5% more)."""

    candidate: Candidate
    status: Status = "untried"
    values: list[float] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    problem: str = ""
    gain: float | None = None
    low: float | None = None
    high: float | None = None
    p: float | None = None

    @property
    def score(self) -> float:
        """The mean of its log ratios to the live settings; what was not measured comes last."""
        return statistics.fmean(self.scores) if self.scores else -math.inf


@dataclass
class Result:
    """How a search ended. ``live``: every value of the live settings. ``winner`` is ``None`` where nothing is surely better."""

    rows: list[Row]
    live: list[float]
    finished: bool
    winner: Row | None = None


class Search:
    """One search; :meth:`run` does it. The same answers of ``measure`` make the same search, so that a log of them replays it.

    Args:
        singles: Candidates that change one dimension each, and another only where it does not work without.
        combine: Makes candidates of several choices.
        measure: Does one trial.
        schedule: How much.
        seed: Of the order within a round.
        smallest: The gain that counts as one.
    """

    def __init__(
        self,
        singles: Sequence[Candidate],
        combine: Combine,
        measure: Measure,
        schedule: Schedule,
        *,
        seed: int = 1,
        smallest: float = SMALLEST_GAIN,
    ) -> None:
        self._singles, self._combine, self._measure, self._schedule = singles, combine, measure, schedule
        self._dice = random.Random(seed)  # noqa: S311 - an order that is the same each time, no secret
        self._smallest = smallest
        self._rows: dict[str, Row] = {item.id: Row(item) for item in singles}
        self._failed: set[str] = set()
        self._live: list[float] = []

    def run(self) -> Result:
        """Search until the end or until the time is used up.

        Raises:
            LiveFailed: the live settings do not answer as they should.
        """
        winner, finished = None, True
        try:
            winner = self._final(self._halve(self._pool()))
        except OutOfTime:
            finished = False
        return Result(list(self._rows.values()), self._live, finished, winner)

    def run_contexts(self, keep: float) -> Result:
        """The first of the candidates, in their order, that serves with at least ``keep`` of the live settings' speed."""
        winner, finished, tested = None, True, 0
        try:
            for candidate in self._singles:
                row = self._rows[candidate.id]
                if tested == CONTEXTS:
                    break
                self._round([candidate])
                if candidate.id not in self._failed and row.score >= math.log(keep) - 0.05:
                    tested += 1
                    # Fewer could not be sure enough, whatever they say.
                    self._pairs([row], max(self._schedule.pairs, 6))
                    self._judge(row, keep - 1)
                    if row.p is not None and row.p <= ALPHA / CONTEXTS:
                        winner, row.status = row, "winner"
                        break
                if candidate.id not in self._failed:
                    row.status = "dropped"
        except OutOfTime:
            finished = False
        return Result(list(self._rows.values()), self._live, finished, winner)

    # --- rounds ---------------------------------------------------------------------------------------------------------------

    def _ask_live(self) -> float:
        outcome = self._measure(Candidate())
        if outcome.value is None or outcome.value <= 0:
            raise LiveFailed(outcome.problem or "no value")
        self._live.append(outcome.value)
        return math.log(outcome.value)

    def _ask(self, row: Row) -> float | None:
        outcome = self._measure(row.candidate)
        if outcome.value is None or outcome.value <= 0:
            row.status, row.problem = "failed", outcome.problem or "no value"
            self._failed.add(row.candidate.id)
            return None
        row.values.append(outcome.value)
        return math.log(outcome.value)

    def _round(self, candidates: Sequence[Candidate]) -> None:
        """One trial of each, with the live settings before, between and after; drift between those is taken out."""
        order = list(candidates)
        self._dice.shuffle(order)
        before = self._ask_live()
        for first in range(0, len(order), BLOCK):
            block = [self._rows[item.id] for item in order[first : first + BLOCK]]
            found = [(place, row, value) for place, row in enumerate(block, 1) if (value := self._ask(row)) is not None]
            after = self._ask_live()
            for place, row, value in found:
                share = place / (len(block) + 1)
                row.scores.append(value - (before * (1 - share) + after * share))
            before = after

    def _working(self, candidates: Iterable[Candidate]) -> list[Candidate]:
        """Those that were not seen to fail, the best first."""
        rows = [self._rows[item.id] for item in candidates if item.id not in self._failed]
        return [row.candidate for row in sorted(rows, key=self._rank, reverse=True)]

    def _rank(self, row: Row) -> float:
        """Its score, where each change has to earn its place: what makes no difference is better left alone."""
        return row.score - self._smallest * len(row.candidate.choices)

    def _pool(self) -> list[Candidate]:
        """Each change alone; then what combines the best of each dimension, beside the best single ones."""
        if not self._singles:
            return []
        self._round(self._singles)
        ranked = self._working(self._singles)
        best: dict[str, Candidate] = {}
        for candidate in ranked:
            best.setdefault(candidate.lead or next(iter(candidate.choices)), candidate)
        promising = [item for item in best.values() if self._rows[item.id].score > 0][:COMBINED]
        sets = [
            {name: value for item in chosen for name, value in item.choices.items()}
            for size in range(len(promising), 1, -1)
            for chosen in itertools.combinations(promising, size)
        ]
        combined = list({item.id: item for item in self._combine(sets) if item.id not in self._rows}.values())
        self._rows |= {item.id: Row(item) for item in combined}
        pool = [*combined, *ranked][: self._schedule.pool]
        for candidate in ranked:
            if candidate not in pool:
                self._rows[candidate.id].status = "dropped"
        return pool

    def _halve(self, pool: list[Candidate]) -> list[Row]:
        left = pool
        while len(left) > self._schedule.finalists:
            self._round(left)
            ranked = self._working(left)
            kept = ranked[: max(self._schedule.finalists, -(-len(left) // 2))]
            for candidate in ranked[len(kept) :]:
                self._rows[candidate.id].status = "dropped"
            left = kept
        return [self._rows[item.id] for item in left]

    # --- the test ---------------------------------------------------------------------------------------------------------------

    def _pairs(self, rows: Sequence[Row], count: int) -> None:
        """Fresh trials of the finalists and of the live settings in turn. Scores from here on are of these alone."""
        for row in rows:
            row.status, row.scores, row.values = "finalist", [], []
        for number in range(count):
            order: list[Row | None] = [None, *rows]
            shift = number % len(order)
            seen: dict[int, float] = {}
            live = 0.0
            for turn in [*order[shift:], *order[:shift]]:
                if turn is None:
                    live = self._ask_live()
                elif turn.candidate.id not in self._failed and (value := self._ask(turn)) is not None:
                    seen[id(turn)] = value
            for row in rows:
                if id(row) in seen:
                    row.scores.append(seen[id(row)] - live)

    def _judge(self, row: Row, smallest: float) -> None:
        if row.candidate.id in self._failed or len(row.scores) < 2:
            return
        row.gain, row.low, row.high = paired_change_interval(row.scores)
        row.p = sign_flip_p([score - math.log1p(smallest) for score in row.scores])

    def _final(self, rows: list[Row]) -> Row | None:
        if not rows:
            return None
        self._pairs(rows, self._schedule.pairs)
        for row in rows:
            self._judge(row, self._smallest)
        # Holm: the surest of m has to be below ALPHA / m, the next below ALPHA / (m - 1) ...
        better: list[Row] = []
        tested = sorted((row for row in rows if row.p is not None), key=lambda row: row.p or 0.0)
        for place, row in enumerate(tested):
            if (row.p or 0.0) > ALPHA / (len(tested) - place):
                break
            better.append(row)
        winner = max(better, key=self._rank, default=None)
        if winner is not None:
            winner.status = "winner"
        return winner
