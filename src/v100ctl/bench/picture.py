"""What a chart is drawn of, and the forms in which it is written: SVG for browsers, PNG where only bitmaps are shown. Pure."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, assert_never
from xml.sax.saxutils import escape

if TYPE_CHECKING:
    from PIL.ImageDraw import ImageDraw

INK, GREY, WHITE = "#22262b", "#8a8f98", "#ffffff"
#: Bitmap pixels for one of a picture's, so that words stay sharp where they are shown larger.
_SCALE = 2
_DASH, _SPACE = 5.0, 4.0


@dataclass(frozen=True)
class Text:
    """One line of words, with its baseline at ``y``."""

    x: float
    y: float
    words: str
    size: int = 12
    anchor: Literal["start", "middle", "end"] = "start"
    colour: str = INK
    bold: bool = False


@dataclass(frozen=True)
class Line:
    """A thin line."""

    x1: float
    y1: float
    x2: float
    y2: float
    colour: str = GREY
    dashed: bool = False


@dataclass(frozen=True)
class Bar:
    """A filled rectangle."""

    x: float
    y: float
    width: float
    height: float
    colour: str


@dataclass(frozen=True)
class Dot:
    """A filled circle."""

    x: float
    y: float
    radius: float
    colour: str


Shape = Text | Line | Bar | Dot


@dataclass(frozen=True)
class Picture:
    """Shapes on white, later ones above earlier ones. Lengths are pixels of an SVG."""

    title: str
    width: int
    height: int
    shapes: Sequence[Shape]

    def to_svg(self) -> str:
        """A document that a browser shows by itself."""
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{self.width}" height="{self.height}" '
            f'viewBox="0 0 {self.width} {self.height}" font-family="system-ui, sans-serif">\n'
            f"<title>{escape(self.title)}</title>\n"
            f'<rect width="{self.width}" height="{self.height}" fill="{WHITE}"/>'
        )
        return "\n".join([head, *map(_element, self.shapes), "</svg>"]) + "\n"

    def to_png(self) -> bytes:
        """A bitmap of twice the size."""
        from PIL import Image, ImageDraw

        image = Image.new("RGB", (self.width * _SCALE, self.height * _SCALE), WHITE)
        drawing = ImageDraw.Draw(image)
        for shape in self.shapes:
            _draw(drawing, shape)
        stream = io.BytesIO()
        image.save(stream, format="PNG", optimize=True)
        return stream.getvalue()


def _element(shape: Shape) -> str:
    match shape:
        case Text(x, y, words, size, anchor, colour, bold):
            weight = ' font-weight="600"' if bold else ""
            return (
                f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="{colour}"{weight}>'
                f"{escape(words)}</text>"
            )
        case Line(x1, y1, x2, y2, colour, dashed):
            dash = f' stroke-dasharray="{_DASH:g} {_SPACE:g}"' if dashed else ""
            return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"{dash}/>'
        case Bar(x, y, width, height, colour):
            return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{colour}"/>'
        case Dot(x, y, radius, colour):
            return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}" fill="{colour}"/>'
    assert_never(shape)


def _draw(drawing: ImageDraw, shape: Shape) -> None:
    from PIL import ImageFont

    match shape:
        case Text(x, y, words, size, anchor, colour, bold):
            # The library's own font has one weight.
            drawing.text(
                (x * _SCALE, y * _SCALE),
                words,
                fill=colour,
                font=ImageFont.load_default(size=size * _SCALE),
                anchor={"start": "ls", "middle": "ms", "end": "rs"}[anchor],
                stroke_width=0.5 if bold else 0,
            )
        case Line(x1, y1, x2, y2, colour, dashed):
            length = math.hypot(x2 - x1, y2 - y1)
            step = _DASH + _SPACE
            starts = [number * step for number in range(math.ceil(length / step))] if dashed else [0.0]
            for start in starts:
                shares = [start / length, min(start + _DASH, length) / length] if dashed else [0.0, 1.0]
                ends = [((x1 + (x2 - x1) * share) * _SCALE, (y1 + (y2 - y1) * share) * _SCALE) for share in shares]
                drawing.line(ends, fill=colour, width=_SCALE)
        case Bar(x, y, width, height, colour):
            drawing.rectangle((x * _SCALE, y * _SCALE, (x + width) * _SCALE, (y + height) * _SCALE), fill=colour)
        case Dot(x, y, radius, colour):
            drawing.circle((x * _SCALE, y * _SCALE), radius * _SCALE, fill=colour)
