"""Two reports against each other: what is a gain, and what is noise. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from v100ctl.bench.stats import change_interval

COMPARE_SCHEMA = "v100ctl/bench-compare/1"
#: A change smaller than this is called none however sure it is: the next restart moves a server by as much.
SMALLEST_CHANGE = 0.005

Verdict = Literal["faster", "slower", "same", "unsure"]


@dataclass(frozen=True)
class Change:
    """One figure of two reports. ``low`` and ``high`` bound the relative change; ``None`` where there was one run only."""

    figure: str
    before: float
    after: float
    change: float
    low: float | None
    high: float | None
    verdict: Verdict

    def to_json(self) -> dict[str, Any]:
        """For a report."""
        return {
            "figure": self.figure,
            "before": round(self.before, 3),
            "after": round(self.after, 3),
            "change": round(self.change, 4),
            "low": None if self.low is None else round(self.low, 4),
            "high": None if self.high is None else round(self.high, 4),
            "verdict": self.verdict,
        }


def judge(low: float, high: float) -> Verdict:
    """What an interval of the change says."""
    if low > SMALLEST_CHANGE:
        return "faster"
    if high < -SMALLEST_CHANGE:
        return "slower"
    # Certainly no more than what a restart moves is "same"; an interval that reaches further says only that nobody knows.
    return "same" if high - low < 4 * SMALLEST_CHANGE else "unsure"


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Change]:
    """The figures that both reports have; decode first, with its interval."""
    found = []
    one, two = before["decode"]["samples_tps"], after["decode"]["samples_tps"]
    if len(one) > 1 and len(two) > 1:
        change, low, high = change_interval(one, two)
        median_before, median_after = before["decode"]["client_tps"]["median"], after["decode"]["client_tps"]["median"]
        found.append(Change("decode", median_before, median_after, change, low, high, judge(low, high)))
    for name, key in (("prefill", "prompt_tokens"), ("streams", "streams")):
        old = {row[key]: _speed(row) for row in before[name]}
        for row in after[name]:
            was, now = old.get(row[key]), _speed(row)
            if was and now:
                found.append(Change(f"{name} {row[key]}", was, now, now / was - 1, None, None, "unsure"))
    return found


def _speed(row: Mapping[str, Any]) -> float | None:
    """Of a row of `prefill` or of `streams`."""
    speed = row["aggregate_tps"] if "aggregate_tps" in row else (row["client_tps"] or {}).get("median")
    return None if speed is None else float(speed)


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """What else differs between the two, so that nobody takes it for the effect of a setting."""
    found = []
    for key in ("engine", "release", "model", "model_sha256"):
        one, two = before["identity"].get(key), after["identity"].get(key)
        if one != two:
            found.append(f"{key}: {one} -> {two}")
    one, two = before["identity"].get("settings") or {}, after["identity"].get("settings") or {}
    for key in sorted({*one, *two}):
        if one.get(key) != two.get(key):
            found.append(f"{key}: {_word(one.get(key))} -> {_word(two.get(key))}")
    cards = [sorted(card["name"] for card in report["cards"]) for report in (before, after)]
    if cards[0] != cards[1]:
        found.append(f"cards: {', '.join(cards[0]) or 'none'} -> {', '.join(cards[1]) or 'none'}")
    if before["decode"]["tokens"] != after["decode"]["tokens"]:
        found.append(f"tokens a run: {before['decode']['tokens']} -> {after['decode']['tokens']}")
    texts: list[Sequence[str]] = [report["decode"]["text_sha256"] for report in (before, after)]
    if before["identity"].get("model_sha256") == after["identity"].get("model_sha256") and texts[0] != texts[1]:
        found.append("the answers' text at temperature 0")
    return found


def _word(value: Any) -> str:
    return "unset" if value is None else str(value)


def compare(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Both reports against each other as JSON (``docs/reference/bench-compare.schema.json``)."""
    sides = [
        {"host": side["host"], "instance": side["instance"], "measured_at": side["measured_at"], "comparable": side["comparable"]}
        for side in (before, after)
    ]
    return {
        "schema": COMPARE_SCHEMA,
        "before": sides[0],
        "after": sides[1],
        "differences": differences(before, after),
        "changes": [change.to_json() for change in changes(before, after)],
    }
