"""A search as a picture, with the axes of `bench`. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from v100ctl.bench.chart import HEIGHT, RED, Panel, page
from v100ctl.bench.picture import Picture, Shape, Text

#: So many candidates have a bar; the table has all of them.
BARS = 6


def chart(document: Mapping[str, Any]) -> Picture:
    """The document of a search as one picture: the fastest candidates against the live settings, and the pairs of the test."""
    unit, live = document["unit"], document["live"]
    shown = [row for row in document["rows"] if row["median"] is not None][:BARS]
    highest = max([live["median"] or 0, *(row["median"] for row in shown)], default=1.0)
    letters = {row["candidate"]: chr(ord("A") + place) for place, row in enumerate(shown)}
    bars = Panel(0, f"{document['objective']}, {unit}", highest * 1.12)
    bars.bars([("live", live["median"] or 0.0), *((letters[row["candidate"]], row["median"]) for row in shown)])
    shapes: list[Shape] = [*bars.shapes]
    legend = HEIGHT + 10
    for place, row in enumerate(shown):
        gain = "" if row["gain"] is None else f"   {row['gain']:+.1%} ({row['low']:+.1%} to {row['high']:+.1%})"
        shapes.append(Text(60, legend + place * 18, f"{letters[row['candidate']]}  {row['candidate']}{gain}   {row['status']}"))
    tested = [row for row in shown if row["pairs"]]
    for number, row in enumerate(tested[:2], 1):
        ratios = [ratio * 100 for ratio in row["pairs"]]
        panel = Panel(
            number, f"{letters[row['candidate']]} in % of the live settings, pair by pair", max([*ratios, 100.0]) * 1.12
        )
        panel.dots(ratios)
        panel.level(100.0, "live settings", RED)
        shapes += panel.shapes
    title = f"{document['host']}/{document['instance']}  {document['measured_at']}"
    said = f"winner: {document['winner']}" if document["winner"] else "nothing is surely better than the live settings"
    return page(title, said, shapes, height=legend + max(len(shown), 1) * 18 + 10)
