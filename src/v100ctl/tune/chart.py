"""A search as a picture. Plain SVG, with the axes of `bench`. Pure; standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from v100ctl.bench.chart import HEIGHT, Panel, page, text

#: So many candidates have a bar; the table has all of them.
BARS = 6


def chart(document: Mapping[str, Any]) -> str:
    """The document of a search as one SVG: the fastest candidates against the live settings, and the pairs of the test."""
    unit, live = document["unit"], document["live"]
    shown = [row for row in document["rows"] if row["median"] is not None][:BARS]
    highest = max([live["median"] or 0, *(row["median"] for row in shown)], default=1.0)
    letters = {row["candidate"]: chr(ord("A") + place) for place, row in enumerate(shown)}
    bars = Panel(0, f"{document['objective']}, {unit}", highest * 1.12)
    bars.bars([(letters[row["candidate"]], row["median"]) for row in shown])
    if live["median"]:
        bars.level(live["median"], f"live settings {live['median']:.4g}", "#c0392b")
    parts = [*bars.parts]
    legend = HEIGHT + 10
    for place, row in enumerate(shown):
        gain = "" if row["gain"] is None else f"   {row['gain']:+.1%} ({row['low']:+.1%} to {row['high']:+.1%})"
        parts.append(text(60, legend + place * 18, f"{letters[row['candidate']]}  {row['candidate']}{gain}   {row['status']}"))
    tested = [row for row in shown if row["pairs"]]
    for number, row in enumerate(tested[:2], 1):
        ratios = [ratio * 100 for ratio in row["pairs"]]
        panel = Panel(
            number, f"{letters[row['candidate']]} in % of the live settings, pair by pair", max([*ratios, 100.0]) * 1.12
        )
        panel.dots(ratios)
        panel.level(100.0, "live settings", "#c0392b")
        parts += panel.parts
    title = f"{document['host']}/{document['instance']}  {document['measured_at']}"
    said = f"winner: {document['winner']}" if document["winner"] else "nothing is surely better than the live settings"
    return page(title, said, parts, height=legend + max(len(shown), 1) * 18 + 10)
