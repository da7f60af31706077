"""A report as a picture: decode runs against the ceiling, prompts by length, streams. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from v100ctl.bench.picture import GREY, Bar, Dot, Line, Picture, Shape, Text

WIDTH, HEIGHT = 960, 420
_TOP, _BOTTOM, _PANEL, _GAP = 70, 350, 260, 50
BLUE, RED, _PALE = "#2f6fb0", "#c0392b", "#e6e8eb"


def page(title: str, subtitle: str, shapes: Sequence[Shape], *, width: int = WIDTH, height: int = HEIGHT) -> Picture:
    """A whole picture, with its words on top."""
    words = [Text(24, 28, title, size=17, bold=True), Text(24, 47, subtitle, colour=GREY)]
    return Picture(title, width, height, (*words, *shapes))


class Panel:
    """One set of axes from 0 to ``top``."""

    def __init__(self, number: int, title: str, top: float) -> None:
        self.left = 60 + number * (_PANEL + _GAP)
        self.right = self.left + _PANEL
        self.top = top or 1.0
        self.shapes: list[Shape] = [
            Text(self.left, _TOP + 4, title, bold=True),
            Line(self.left, _BOTTOM, self.right, _BOTTOM),
            Line(self.left, _TOP + 16, self.left, _BOTTOM),
        ]
        for share in (0.25, 0.5, 0.75, 1.0):
            value = self.top * share
            self.shapes += [
                Line(self.left, self.y(value), self.right, self.y(value), _PALE),
                Text(self.left - 6, self.y(value) + 4, f"{value:.4g}", size=10, anchor="end", colour=GREY),
            ]

    def y(self, value: float) -> float:
        """Where a value is."""
        return _BOTTOM - (_BOTTOM - _TOP - 24) * min(value / self.top, 1.0)

    def bars(self, values: Sequence[tuple[str, float]]) -> None:
        """One bar a value, with its name below and its number above."""
        step = _PANEL / max(len(values), 1)
        for place, (name, value) in enumerate(values):
            x, width = self.left + place * step + step * 0.15, step * 0.7
            y = self.y(value)
            middle = x + width / 2
            self.shapes += [
                Bar(x, y, width, _BOTTOM - y, BLUE),
                Text(middle, y - 4, f"{value:.4g}", size=10, anchor="middle"),
                Text(middle, _BOTTOM + 15, name, size=10, anchor="middle", colour=GREY),
            ]

    def dots(self, values: Sequence[float]) -> None:
        """One dot a run, in their order."""
        step = _PANEL / (len(values) + 1)
        for place, value in enumerate(values, 1):
            self.shapes.append(Dot(self.left + place * step, self.y(value), 4, BLUE))

    def level(self, value: float, words: str, colour: str) -> None:
        """A dashed line with words."""
        self.shapes += [
            Line(self.left, self.y(value), self.right, self.y(value), colour, dashed=True),
            Text(self.right, self.y(value) - 4, words, size=10, anchor="end", colour=colour),
        ]


def chart(document: Mapping[str, Any]) -> Picture:
    """The report as one picture."""
    decode, ceiling = document["decode"], document["ceiling"]["decode_tps"]
    samples = decode["samples_tps"]
    published = document["published"]
    highest = max([*samples, ceiling or 0, *(row["decode_tps"] for row in published)], default=1.0)
    runs = Panel(0, "one stream, tokens/s a run", highest * 1.12)
    runs.dots(samples)
    if decode["client_tps"]:
        runs.level(decode["client_tps"]["median"], f"median {decode['client_tps']['median']:.1f}", BLUE)
    if ceiling:
        runs.level(ceiling, f"memory bandwidth allows {ceiling:.1f}", RED)
    for row in published:
        runs.level(row["decode_tps"], f"published: {row['decode_tps']:g}", GREY)
    prompts = [(_short(row["prompt_tokens"]), row["client_tps"]["median"]) for row in document["prefill"] if row["client_tps"]]
    prefill = Panel(1, "prompt tokens/s by length", max((value for _, value in prompts), default=1.0) * 1.12)
    prefill.bars(prompts)
    counts = [(str(row["streams"]), row["aggregate_tps"]) for row in document["streams"] if row["aggregate_tps"]]
    streams = Panel(2, "all streams together, tokens/s", max((value for _, value in counts), default=1.0) * 1.12)
    streams.bars(counts)
    cards = ", ".join(card["name"] for card in document["cards"]) or "CPU"
    wrong = (
        ""
        if document["comparable"]
        else "  NOT COMPARABLE: " + ", ".join(item["id"] for item in document["flags"] if item["severity"] == "error")
    )
    title = f"{document['host']}/{document['instance']}  {document['measured_at']}"
    return page(
        title, f"{cards}  {document['identity'].get('release', '')}{wrong}", [*runs.shapes, *prefill.shapes, *streams.shapes]
    )


def _short(tokens: int) -> str:
    return f"{tokens // 1024}K" if tokens >= 1024 and tokens % 1024 == 0 else str(tokens)
