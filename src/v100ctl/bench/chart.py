"""A report as a picture: decode runs against the ceiling, prompts by length, streams. Plain SVG, no library. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 960, 420
_TOP, _BOTTOM, _PANEL, _GAP = 70, 350, 260, 50
_BLUE, _RED, _GREY, _INK = "#2f6fb0", "#c0392b", "#8a8f98", "#22262b"


def text(x: float, y: float, words: str, *, size: int = 12, anchor: str = "start", colour: str = _INK, bold: bool = False) -> str:
    """One line of words."""
    weight = ' font-weight="600"' if bold else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="{colour}"{weight}>{escape(words)}</text>'
    )


def line(x1: float, y1: float, x2: float, y2: float, colour: str = _GREY, *, dashed: bool = False) -> str:
    """A thin line."""
    dash = ' stroke-dasharray="5 4"' if dashed else ""
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"{dash}/>'


def page(title: str, subtitle: str, parts: Sequence[str], *, width: int = WIDTH, height: int = HEIGHT) -> str:
    """A whole picture, that a browser shows by itself."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'font-family="system-ui, sans-serif">\n'
        f"<title>{escape(title)}</title>\n"
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>'
    )
    words = [text(24, 28, title, size=17, bold=True), text(24, 47, subtitle, colour=_GREY)]
    return "\n".join([head, *words, *parts, "</svg>"]) + "\n"


class Panel:
    """One set of axes from 0 to ``top``."""

    def __init__(self, number: int, title: str, top: float) -> None:
        self.left = 60 + number * (_PANEL + _GAP)
        self.right = self.left + _PANEL
        self.top = top or 1.0
        self.parts = [
            text(self.left, _TOP + 4, title, bold=True),
            line(self.left, _BOTTOM, self.right, _BOTTOM),
            line(self.left, _TOP + 16, self.left, _BOTTOM),
        ]
        for share in (0.25, 0.5, 0.75, 1.0):
            value = self.top * share
            self.parts += [
                line(self.left, self.y(value), self.right, self.y(value), "#e6e8eb"),
                text(self.left - 6, self.y(value) + 4, f"{value:.4g}", size=10, anchor="end", colour=_GREY),
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
            self.parts += [
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{_BOTTOM - y:.1f}" fill="{_BLUE}"/>',
                text(middle, y - 4, f"{value:.4g}", size=10, anchor="middle"),
                text(middle, _BOTTOM + 15, name, size=10, anchor="middle", colour=_GREY),
            ]

    def dots(self, values: Sequence[float]) -> None:
        """One dot a run, in their order."""
        step = _PANEL / (len(values) + 1)
        for place, value in enumerate(values, 1):
            self.parts.append(f'<circle cx="{self.left + place * step:.1f}" cy="{self.y(value):.1f}" r="4" fill="{_BLUE}"/>')

    def level(self, value: float, words: str, colour: str) -> None:
        """A dashed line with words."""
        self.parts += [
            line(self.left, self.y(value), self.right, self.y(value), colour, dashed=True),
            text(self.right, self.y(value) - 4, words, size=10, anchor="end", colour=colour),
        ]


def chart(document: Mapping[str, Any]) -> str:
    """The report as one SVG."""
    decode, ceiling = document["decode"], document["ceiling"]["decode_tps"]
    samples = decode["samples_tps"]
    published = document["published"]
    highest = max([*samples, ceiling or 0, *(row["decode_tps"] for row in published)], default=1.0)
    runs = Panel(0, "one stream, tokens/s a run", highest * 1.12)
    runs.dots(samples)
    if decode["client_tps"]:
        runs.level(decode["client_tps"]["median"], f"median {decode['client_tps']['median']:.1f}", _BLUE)
    if ceiling:
        runs.level(ceiling, f"memory bandwidth allows {ceiling:.1f}", _RED)
    for row in published:
        runs.level(row["decode_tps"], f"published: {row['decode_tps']:g}", _GREY)
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
        title, f"{cards}  {document['identity'].get('release', '')}{wrong}", [*runs.parts, *prefill.parts, *streams.parts]
    )


def _short(tokens: int) -> str:
    return f"{tokens // 1024}K" if tokens >= 1024 and tokens % 1024 == 0 else str(tokens)
