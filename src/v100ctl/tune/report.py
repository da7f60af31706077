"""What a search has found, as JSON and as a table. Pure; standard library only."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from v100ctl.tune.objectives import UNITS, Name
from v100ctl.tune.search import Result, Row

SCHEMA = "v100ctl/tune/1"
_ORDER = {"winner": 0, "finalist": 1, "dropped": 2, "failed": 3, "untried": 4}


def _row(row: Row, divergences: Mapping[str, float]) -> dict[str, Any]:
    tested = row.gain is not None
    return {
        "candidate": row.candidate.id,
        "choices": dict(row.candidate.choices),
        "status": row.status,
        "reason": row.problem,
        "trials": len(row.values),
        "median": round(statistics.median(row.values), 3) if row.values else None,
        "estimate": round(math.expm1(row.score), 4) if row.scores else None,
        "gain": round(row.gain, 4) if row.gain is not None else None,
        "low": round(row.low, 4) if row.low is not None else None,
        "high": round(row.high, 4) if row.high is not None else None,
        "p": round(row.p, 5) if row.p is not None else None,
        "pairs": [round(math.exp(score), 4) for score in row.scores] if tested else [],
        "divergence_nats": divergences.get(row.candidate.id),
    }


def document(
    result: Result,
    *,
    host: str,
    instance: str,
    name: Name,
    work: Mapping[str, Any],
    measured_at: str,
    version: str,
    excluded: Sequence[Mapping[str, Any]] = (),
    divergences: Mapping[str, float] | None = None,
    notes: Sequence[str] = (),
) -> dict[str, Any]:
    """The report as JSON (``docs/reference/tune.schema.json``).

    Args:
        result: Of the search.
        host, instance: What was tuned.
        name, work: What for.
        measured_at: When.
        version: Of this program.
        excluded: What was not tried: ``candidate``, ``rule`` and ``reason``.
        divergences: How far what a candidate says moves from the live settings', in nats.
        notes: What else is worth knowing.
    """
    rows = sorted(result.rows, key=lambda row: (_ORDER[row.status], -row.score))
    return {
        "schema": SCHEMA,
        "v100ctl_version": version,
        "measured_at": measured_at,
        "host": host,
        "instance": instance,
        "objective": name,
        "unit": UNITS[name],
        "work": dict(work),
        "finished": result.finished,
        "winner": result.winner.candidate.id if result.winner else None,
        "choices": dict(result.winner.candidate.choices) if result.winner else {},
        "live": {
            "trials": len(result.live),
            "median": round(statistics.median(result.live), 3) if result.live else None,
        },
        "rows": [_row(row, divergences or {}) for row in rows],
        "excluded": [dict(item) for item in excluded],
        "notes": list(dict.fromkeys(notes)),
    }


def table(document: Mapping[str, Any]) -> str:
    """The report for people, as lines."""
    unit, live = document["unit"], document["live"]
    lines = [f"{document['host']}/{document['instance']}  {document['objective']}  {document['measured_at']}"]
    if live["median"] is not None:
        lines.append(f"  {'live settings':<52} {live['median']:10.4g} {unit}  {live['trials']} trials")
    for row in document["rows"]:
        measured = f"{row['median']:10.4g} {unit}" if row["median"] is not None else f"{'-':>10} {unit}"
        lines.append(f"  {row['candidate']:<52} {measured}  {_verdict(row)}")
    for item in document["excluded"]:
        lines.append(f"  {item['candidate']:<52} not tried: [{item['rule']}] {item['reason']}")
    lines += [f"  note: {note}" for note in document["notes"]]
    if document["winner"]:
        lines.append(f"winner: {document['winner']}")
    elif document["finished"]:
        lines.append("nothing is surely better than the live settings: they stay")
    else:
        lines.append("the time was used up before anything was sure; the same command goes on from here")
    return "\n".join(lines)


def _verdict(row: Mapping[str, Any]) -> str:
    if row["status"] == "failed":
        return f"failed: {row['reason']}"
    if row["gain"] is not None:
        interval = f"{row['gain']:+.1%}, 95%: {row['low']:+.1%} to {row['high']:+.1%}, p {row['p']:.3f}"
        sure = "winner" if row["status"] == "winner" else "tested" if row["status"] == "finalist" else row["status"]
        return f"{sure}: {interval}"
    if row["status"] == "untried":
        return "not tried: no time"
    estimate = "" if row["estimate"] is None else f" ({row['estimate']:+.1%}, not tested)"
    return f"{row['status']}{estimate}"
