"""Trials one after the other, each written down as soon as it is over, so that a search that was cut goes on where it was.

The log is JSON lines: what is searched, then one line a trial. A search asks for the same trials in the same order when it is
told the same results, so reading the log again brings it to where it ended. Standard library only.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from v100ctl.tune import objectives
from v100ctl.tune.objectives import QUALITY_LIMIT_NATS, Name, Workload
from v100ctl.tune.search import LIVE, Candidate, Outcome, OutOfTime

LOG_SCHEMA = "v100ctl/tune-log/1"


class TrialFailed(Exception):
    """A candidate did not come up, or ended while it was measured; the text says why."""


class Rig(Protocol):
    """Where trials run."""

    def start(self, candidate: Candidate) -> None:
        """Have the server run as the candidate says, and wait until it serves.

        Raises:
            TrialFailed: it does not come up so.
        """

    def ask(self, candidate: Candidate, request: Mapping[str, Any]) -> Mapping[str, Any]:
        """Send one phase's requests to it; what the script of `bench` saw.

        Raises:
            TrialFailed: the server is gone.
        """

    def context_length(self, candidate: Candidate) -> int:
        """Tokens that one request may use."""


def plan_of(path: Path) -> dict[str, Any] | None:
    """What a log was of; ``None`` where there is none that can be read."""
    try:
        with path.open(encoding="utf-8") as stream:
            found = json.loads(stream.readline())
    except (OSError, ValueError):
        return None
    if not isinstance(found, dict) or found.pop("schema", None) != LOG_SCHEMA:
        return None
    return found


class Log:
    """The trials of one search, on disk. ``plan``: what is searched; a log of another plan is set aside."""

    def __init__(self, path: Path, plan: Mapping[str, Any]) -> None:
        self.path = path
        self.entries: list[dict[str, Any]] = []
        self._plan = json.loads(json.dumps({"schema": LOG_SCHEMA, **plan}))
        self._left: dict[str, list[dict[str, Any]]] = {}

    def open(self, *, fresh: bool = False) -> int:
        """Read what is there; how many trials that is. ``fresh``: begin anew."""
        lines = [] if fresh or not self.path.exists() else self.path.read_text(encoding="utf-8").splitlines()
        found = []
        for line in lines:
            try:
                found.append(json.loads(line))
            except ValueError:
                # The last line of a run that was killed while it wrote.
                break
        same = bool(found) and found[0] == self._plan
        self.entries = found[1:] if same else []
        if self.path.exists() and not same:
            self.path.replace(self.path.with_suffix(".old.jsonl"))
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._write([self._plan, *self.entries], "w")
        self._left = {}
        for entry in self.entries:
            self._left.setdefault(entry["candidate"], []).append(entry)
        return len(self.entries)

    def replay(self, candidate: Candidate) -> dict[str, Any] | None:
        """The next trial of a candidate that was measured before; ``None`` where it has to be done."""
        left = self._left.get(candidate.id)
        return left.pop(0) if left else None

    def append(self, entry: dict[str, Any]) -> None:
        """Write one down; on disk before this returns."""
        self.entries.append(entry)
        self._write([entry], "a")

    def _write(self, documents: list[dict[str, Any]], mode: str) -> None:
        with self.path.open(mode, encoding="utf-8") as stream:
            stream.writelines(json.dumps(document, sort_keys=True) + "\n" for document in documents)
            stream.flush()
            os.fsync(stream.fileno())


@dataclass
class Trials:
    """Measures candidates for a search.

    Attributes:
        rig: Where.
        log: What was measured.
        name, work: What for.
        guarded: Whether a candidate may change what the model says, so that this is compared.
        clock: Seconds that only go forward.
        deadline_s: No trial begins after it, by that clock.
        note: Told what is done.
        quality_limit_nats: See :data:`v100ctl.tune.objectives.QUALITY_LIMIT_NATS`.
        fills: Whether a candidate's context is filled.
    """

    rig: Rig
    log: Log
    name: Name
    work: Workload
    guarded: Callable[[Candidate], bool]
    clock: Callable[[], float]
    deadline_s: float
    note: Callable[[str], None] = lambda text: None
    quality_limit_nats: float = QUALITY_LIMIT_NATS
    fills: bool = False
    divergences: dict[str, float] = field(default_factory=dict)
    _spent_s: list[float] = field(default_factory=list)
    _baseline: list[dict[str, float]] = field(default_factory=list)
    _judged: dict[str, str] = field(default_factory=dict)

    def measure(self, candidate: Candidate) -> Outcome:
        """One trial, from the log where it was done before.

        Raises:
            OutOfTime: there is no time for one more.
        """
        entry = self.log.replay(candidate)
        if entry is None:
            # The mean of those before is what the next one takes.
            expected_s = statistics.fmean(self._spent_s[-8:]) if self._spent_s else 0.0
            if self.clock() + expected_s > self.deadline_s:
                raise OutOfTime
            entry = self._trial(candidate)
            self.log.append(entry)
        self._remember(candidate, entry)
        return Outcome(entry["value"], entry["problem"])

    def _remember(self, candidate: Candidate, entry: Mapping[str, Any]) -> None:
        self._spent_s.append(entry["elapsed_s"])
        if entry.get("likely") and candidate.id == LIVE:
            self._baseline = entry["likely"]
        if entry.get("divergence_nats") is not None:
            self.divergences[candidate.id] = entry["divergence_nats"]
            self._judged[candidate.id] = entry["problem"]

    def _trial(self, candidate: Candidate) -> dict[str, Any]:
        began_s = self.clock()
        entry: dict[str, Any] = {"candidate": candidate.id, "choices": dict(candidate.choices), "value": None, "problem": ""}
        try:
            self.rig.start(candidate)
            context_length = self.rig.context_length(candidate)
            self._compare(candidate, context_length, entry)
            if not entry["problem"]:
                fill = self.fills and candidate.id != LIVE
                answers = {
                    phase.id: self.rig.ask(candidate, phase.to_request())
                    for phase in objectives.phases(self.name, self.work, context_length, fill=fill)
                }
                entry["problem"] = objectives.problem(answers)
                entry["notes"] = objectives.notes(answers)
                if not entry["problem"]:
                    entry["value"] = objectives.value(self.name, answers)
                    entry["problem"] = "" if entry["value"] else "nothing to judge it by came"
        except TrialFailed as error:
            entry["problem"] = str(error)
        entry["elapsed_s"] = round(self.clock() - began_s, 1)
        shown = "" if entry["value"] is None else f"{entry['value']:.4g} {objectives.UNITS[self.name]}"
        self.note(f"{candidate.id}: {shown or entry['problem']}")
        return entry

    def _compare(self, candidate: Candidate, context_length: int, entry: dict[str, Any]) -> None:
        """What the settings make the model say, against the live ones; once for each candidate."""
        first = candidate.id == LIVE and not self._baseline
        if not first and (not self.guarded(candidate) or candidate.id in self._judged):
            return
        try:
            likely = self.rig.ask(candidate, objectives.quality_request(context_length)).get("likely", [])
        except TrialFailed:
            # A server that does not tell its probabilities: what may change its answers is not taken on trust.
            if not first:
                raise
            return
        if first:
            entry["likely"] = likely
            return
        if not self._baseline:
            entry["problem"] = "quality: the server tells no probabilities, so nobody can tell what this costs"
            return
        shorter = min(len(likely), len(self._baseline))
        entry["divergence_nats"] = round(objectives.divergence(self._baseline[:shorter], likely[:shorter]), 5)
        if entry["divergence_nats"] > self.quality_limit_nats:
            entry["problem"] = (
                f"quality: the next token's distribution moves by {entry['divergence_nats']:.4f} nats, "
                f"the limit is {self.quality_limit_nats:g}"
            )
