"""systemd quoting: whatever an argument holds, the process gets the same bytes."""

from __future__ import annotations

import jinja2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from v100ctl.fleet import is_noncharacter
from v100ctl.plan.render import argument_lines, render, systemd_escape, systemd_escape_environment

# What an argument can hold: any text without NUL. Lone surrogates cannot be written to a UTF-8 file.
NONCHARACTERS = "".join(character for character in map(chr, range(0x110000)) if is_noncharacter(character))
ARGUMENT = st.text(st.characters(blacklist_characters="\0" + NONCHARACTERS, blacklist_categories=("Cs",)), max_size=60)

_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\", '"': '"'}


def read_like_systemd(line: str, *, variables: bool = True) -> list[str]:
    """The words of a command line by the rules of systemd.service(5): an independent reader, to hold the writer against."""
    words: list[str] = []
    word: str | None = None
    quoted = False
    position = 0
    while position < len(line):
        character = line[position]
        if character == "\\":
            following = line[position + 1]
            if following == "x":
                word = (word or "") + chr(int(line[position + 2 : position + 4], 16))
                position += 4
                continue
            word = (word or "") + _ESCAPES[following]
            position += 2
            continue
        if character == '"':
            quoted, word = not quoted, word or ""
        elif character.isspace() and not quoted and character in " \t\n\r":
            if word is not None:
                words.append(word)
            word = None
        elif character == "%" or (character == "$" and variables):
            assert line[position + 1] == character, "a lone % or $ would be expanded"
            word = (word or "") + character
            position += 1
        else:
            word = (word or "") + character
        position += 1
    assert not quoted
    return words if word is None else [*words, word]


@given(ARGUMENT)
def test_an_argument_survives(argument: str) -> None:
    escaped = systemd_escape(argument)
    assert "\n" not in escaped, "a unit's line must stay one line"
    assert read_like_systemd(escaped) == [argument]


@given(st.lists(ARGUMENT, min_size=1, max_size=6))
def test_a_command_line_survives(arguments: list[str]) -> None:
    argv = ["/opt/server", *arguments]
    assert read_like_systemd(" ".join(argument_lines(argv))) == argv


@given(ARGUMENT)
def test_an_environment_value_survives(value: str) -> None:
    assert read_like_systemd(systemd_escape_environment("NAME", value), variables=False) == [f"NAME={value}"]


@pytest.mark.parametrize("plain", ["--port", "8000", "/srv/models/a-b_c.gguf", "q8_0", "a,b:c@d=e+f"])
def test_plain_words_stay_readable(plain: str) -> None:
    assert systemd_escape(plain) == plain


@pytest.mark.parametrize("word", ["", ";", "a b", "~", "'x'", "#x", "é"])
def test_words_with_a_meaning_are_quoted(word: str) -> None:
    assert systemd_escape(word) == f'"{word}"'


def test_a_nul_is_refused() -> None:
    with pytest.raises(ValueError, match="NUL"):
        systemd_escape("a\0b")
    with pytest.raises(ValueError, match="NUL"):
        systemd_escape_environment("A", "a\0b")


@pytest.mark.parametrize("character", ["\ufffe", "\uffff", "\ufdd0", "\U0010ffff"])
def test_what_systemd_takes_for_no_character_is_refused(character: str) -> None:
    """A unit with such an argument does not load, and a variable is left out with a warning: seen with systemd 252."""
    with pytest.raises(ValueError, match="no character"):
        systemd_escape(f"a{character}")
    with pytest.raises(ValueError, match="no character"):
        systemd_escape_environment("A", character)


def test_one_flag_a_line() -> None:
    argv = ["/opt/server", "--port", "8000", "--metrics", "--temp", "-1", "--fit", "off"]
    assert argument_lines(argv) == ["/opt/server", "--port 8000", "--metrics", "--temp -1", "--fit off"]


def test_a_misspelt_name_in_a_template_is_an_error() -> None:
    with pytest.raises(jinja2.UndefinedError):
        render("systemd/llm_server.service.j2", name="x")
