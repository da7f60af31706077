"""Text that came from a host, made safe for a terminal and for a log."""

from __future__ import annotations


def printable(raw: bytes | str, limit: int = 200) -> str:
    """At most ``limit`` characters of what a host said, on one line and without anything that a terminal would obey.

    Control characters, bytes that are not UTF-8 and characters that turn the direction of writing stand as escapes.
    """
    text = raw.decode("utf-8", "backslashreplace") if isinstance(raw, bytes) else raw
    escaped = "".join(
        character if character.isprintable() else character.encode("unicode_escape", "backslashreplace").decode("ascii")
        for character in text.strip()[:limit]
    )
    return escaped[:limit] + ("..." if len(text.strip()) > limit or len(escaped) > limit else "")


def last_line(raw: bytes | str, limit: int = 200) -> str:
    """The last line that says something, :func:`printable`: where a failing program says why."""
    text = raw.decode("utf-8", "backslashreplace") if isinstance(raw, bytes) else raw
    lines = [line for line in text.splitlines() if line.strip()]
    return printable(lines[-1], limit) if lines else ""


def escaped(raw: str, limit: int, *, lines: bool = False) -> str:
    """At most ``limit`` characters of a text, as :func:`printable` has them; with ``lines`` its newlines and tabs stay."""
    kept = "\n\t" if lines else ""
    text = raw if len(raw) <= limit else f"{raw[:limit]}... and {len(raw) - limit} more characters"
    if text.isprintable():
        return text
    return "".join(
        character
        if character in kept or character.isprintable()
        else character.encode("unicode_escape", "backslashreplace").decode("ascii")
        for character in text
    )
