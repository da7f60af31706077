"""Templates to bytes. The only renderer: what a role writes, what ``render`` prints and what ``audit`` expects come from here."""

from __future__ import annotations

import functools
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from v100ctl.fleet import is_noncharacter
from v100ctl.paths import content_dir

#: First line of every file that lands on a host. Constant: a date in it would be drift.
MANAGED_HEADER = "Managed by v100ctl. Changes are overwritten."


def _refuse_unsayable(value: str) -> None:
    if "\0" in value:
        raise ValueError("neither an argument nor a variable can hold a NUL character")
    found = next((character for character in value if is_noncharacter(character)), None)
    if found is not None:
        raise ValueError(f"systemd refuses U+{ord(found):04X}, which is no character")


@functools.lru_cache(maxsize=4096)
def systemd_escape(value: str) -> str:
    """``value`` as one word of an ``ExecStart=`` line.

    Follows systemd.service(5) "Command lines" and systemd.syntax(7) "Quoting": ``%`` starts a specifier and ``$`` a variable, so
    both are doubled; a quoted word understands C escapes. Words made only of characters without meaning stay bare and readable.

    Raises:
        ValueError: ``value`` holds a NUL, which no argument can, or a code point that is no character, which systemd refuses.
    """
    _refuse_unsayable(value)
    escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return _quoted(escaped, bare=value)


def systemd_escape_environment(name: str, value: str) -> str:
    """``NAME=value`` as one word of an ``Environment=`` line, where ``$`` has no meaning but ``%`` has.

    Raises:
        ValueError: as of :func:`systemd_escape`.
    """
    _refuse_unsayable(value)
    escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return _quoted(f"{name}={escaped}", bare=f"{name}={value}")


_BARE = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-+=./:,@")
_CONTROL = {"\n": "\\n", "\t": "\\t", "\r": "\\r"}


def _quoted(escaped: str, *, bare: str) -> str:
    if bare and set(bare) <= _BARE:
        return escaped
    pieces = []
    for character in escaped:
        if character in _CONTROL:
            pieces.append(_CONTROL[character])
        elif ord(character) < 0x20 or ord(character) == 0x7F:
            pieces.append(f"\\x{ord(character):02x}")
        else:
            pieces.append(character)
    return f'"{"".join(pieces)}"'


def haproxy_word(value: str) -> str:
    """``value`` as one word of HAProxy's configuration, where a ``#`` starts a comment also in the middle of a word.

    Between single quotes nothing has a meaning ("2.2. Quoting and escaping" of its manual).
    """
    if value and set(value) <= _BARE | {"?", "&", "[", "]"}:
        return value
    quoted = value.replace("'", "'\\''")
    return f"'{quoted}'"


def argument_lines(argv: tuple[str, ...] | list[str]) -> list[str]:
    """``argv`` as lines for a unit: the program, then one flag with its value a line, so that a diff shows one flag."""
    words = [systemd_escape(word) for word in argv]
    lines = [words[0]]
    for raw, word in zip(argv[1:], words[1:], strict=True):
        # A negative number after a flag is its value, not a flag of its own.
        starts_flag = raw.startswith("-") and not _is_number(raw)
        if starts_flag or len(lines) == 1:
            lines.append(word)
        else:
            lines[-1] += f" {word}"
    return lines


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


@functools.cache
def _environment() -> Environment:
    # Not HTML: autoescape would corrupt unit files. StrictUndefined: a misspelt variable must not render as nothing.
    environment = Environment(
        loader=FileSystemLoader(content_dir() / "templates"),
        undefined=StrictUndefined,
        autoescape=False,  # noqa: S701 - plain-text files for a host, not markup
        keep_trailing_newline=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["systemd_argument_lines"] = argument_lines
    environment.filters["systemd_environment"] = lambda mapping: [systemd_escape_environment(k, v) for k, v in mapping.items()]
    environment.filters["haproxy_word"] = haproxy_word
    environment.globals["managed_header"] = MANAGED_HEADER
    return environment


def render(template: str, **values: Any) -> str:
    """The text of ``templates/TEMPLATE``.

    Raises:
        jinja2.UndefinedError: the template names a value that was not given.
    """
    return _environment().get_template(template).render(**values)
