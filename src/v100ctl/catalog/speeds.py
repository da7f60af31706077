"""Speeds that people have published for V100s: something to hold a ceiling and a measurement against. None is this project's."""

from __future__ import annotations

import functools
from importlib import resources

import yaml

from v100ctl.catalog.rows import Row

#: How far a file's size may be from a published one's to be called the like.
_ALIKE = 0.2


class PublishedSpeed(Row):
    """One stream's decode speed as its author gives it. ``weights_bytes`` is the size of the model's file."""

    model: str
    architecture: str
    weights_bytes: int
    card: str
    decode_tps: float
    source: str

    def in_words(self) -> str:
        """For people."""
        return f"published: {self.decode_tps:g} for {self.model} on a {self.card}"


@functools.cache
def published_speeds() -> tuple[PublishedSpeed, ...]:
    """All rows."""
    text = resources.files("v100ctl.catalog").joinpath("published_speeds.yml").read_text(encoding="utf-8")
    loaded = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # noqa: S506 - both are safe loaders
    return tuple(PublishedSpeed.model_validate(row) for row in loaded["speeds"])


def speeds_like(architecture: str, weights_bytes: int) -> tuple[PublishedSpeed, ...]:
    """Published speeds of the same architecture with a file of about this size, the nearest first, at most two."""
    alike = [
        row
        for row in published_speeds()
        if row.architecture == architecture and abs(row.weights_bytes - weights_bytes) <= _ALIKE * row.weights_bytes
    ]
    return tuple(sorted(alike, key=lambda row: abs(row.weights_bytes - weights_bytes))[:2])
