"""Find engine and build commands in text as people paste it.

A tutorial's line, a shell script, ``docker run``, or a systemd unit goes in; out come the commands of the programs that
:mod:`v100ctl.plan.explain` knows, each with its words as the program would get them and the environment that it would see.
Nothing is ever run: a command substitution stays a word, and so does a variable that the text does not set.

Shell quoting follows POSIX (XCU 2.2 to 2.7), units follow systemd.service(5) "Command lines" and systemd.syntax(7) "Quoting".
"""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

Program = Literal["llama-server", "vllm", "cmake"]

#: What is looked for, as it is said to people.
LOOKED_FOR = (
    "`llama-server ...`",
    "`vllm serve ...`",
    "`python -m vllm.entrypoints.openai.api_server ...`",
    "`cmake ...`",
    "`docker run IMAGE ...` with an image of either engine",
)
#: A text nested deeper than this (`sh -c` in `sh -c`, here-documents) is not followed: it is no command of a tutorial.
_DEEPEST = 5
#: More than any tutorial has; the rest is not read, so that no text takes long.
LONGEST_TEXT = 200_000
_MOST_COMMANDS = 40
_MOST_WORDS = 400
#: A longer first word is no shell prompt.
_LONGEST_PROMPT = 200
_LONGEST_QUOTATION = 1000

DASHES = "\u2010\u2011\u2012\u2013\u2014\u2015\u2212\ufe58\ufe63\uff0d"
_QUOTES = {"\u201c": "\u201d", "\u201e": "\u201c", "\u201d": "\u201d", "\u2018": "\u2019", "\u2019": "\u2019", "\u00ab": "\u00bb"}
_BLANKS = "\u00a0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u202f\u205f\u3000"
_INVISIBLE = "\u200b\u200c\u200d\u2060\ufeff\u00ad"


@dataclass(frozen=True)
class Remark:
    """Something about the pasted text itself. ``harmful``: as it stands the command would not do what it looks like."""

    id: str
    text: str
    line: int
    harmful: bool = False


@dataclass(frozen=True)
class Command:
    """One command that was found.

    ``words`` are the arguments after the program (after ``serve`` or ``-m MODULE`` too). ``environment`` is what the text itself
    sets for it. ``wrappers`` are the programs before it, with their own words. ``style`` tells vLLM's two front ends apart.
    """

    program: Program
    typed: str
    words: tuple[str, ...]
    line: int
    environment: Mapping[str, str] = field(default_factory=dict)
    wrappers: tuple[tuple[str, ...], ...] = ()
    image: str | None = None
    style: Literal["serve", "module", "image"] | None = None
    origin: Literal["shell", "systemd"] = "shell"
    remarks: tuple[Remark, ...] = ()


@dataclass(frozen=True)
class _Piece:
    text: str
    kind: Literal["text", "variable", "array", "opaque"] = "text"
    quoted: bool = False
    default: str | None = None


@dataclass
class _Word:
    line: int
    pieces: list[_Piece] = field(default_factory=list)


@dataclass
class _Simple:
    """A simple command: words, and the here-documents that it reads."""

    line: int
    words: list[_Word] = field(default_factory=list)
    documents: list[tuple[str, int]] = field(default_factory=list)
    after_newline: bool = False


def find_commands(text: str, images: Mapping[str, Program] | None = None) -> tuple[Command, ...]:
    """Every command in ``text``, in order.

    Args:
        text: What was pasted; read up to :data:`LONGEST_TEXT` characters.
        images: Container images whose entry point is a program: the beginning of their name (without registry) -> program.
    """
    text = text[:LONGEST_TEXT].replace("\r\n", "\n").replace("\r", "\n").replace("\0", "")
    remarks: list[Remark] = []
    text = _plain_blanks(text, remarks)
    finder = _Finder(images or {})
    found = finder.text(_without_fences(text), 1, {}, 0)
    if not found:
        # A root prompt looks like a comment, and prose holds commands between backticks.
        uncommented = re.sub(r"(?m)^([ \t]*)#[ \t]+(?=\S)", r"\1", text)
        found = finder.text(uncommented, 1, {}, 0) if uncommented != text else []
    if not found:
        for number, line in enumerate(text.split("\n"), 1):
            for span in re.findall(r"`([^`]+)`", line):
                found += finder.text(span, number, {}, 0)
    return tuple(_bounded(replace(command, remarks=(*remarks, *command.remarks))) for command in found[:_MOST_COMMANDS])


def _bounded(command: Command) -> Command:
    if len(command.words) <= _MOST_WORDS:
        return command
    remark = Remark("too-long", f"only the first {_MOST_WORDS} words are explained", command.line, harmful=True)
    return replace(command, words=command.words[:_MOST_WORDS], remarks=(*command.remarks, remark))


def _plain_blanks(text: str, remarks: list[Remark]) -> str:
    odd = re.search(f"[{_BLANKS}{_INVISIBLE}]", text.lstrip("\ufeff"))
    if odd:
        line = text.count("\n", 0, odd.start()) + 1
        remarks.append(
            Remark(
                "odd-blank",
                f"the text holds blanks of a web page (U+{ord(odd[0]):04X}), which a shell takes for letters; read as plain ones",
                line,
                harmful=True,
            )
        )
    return text.translate({ord(blank): " " for blank in _BLANKS} | {ord(nothing): None for nothing in _INVISIBLE})


def _without_fences(text: str) -> str:
    # Lines stay, so that line numbers do.
    return re.sub(r"(?m)^[ \t]*(```|~~~)[^\n`]*$", "", text)


# --- shell ---------------------------------------------------------------------------------------------------------------


_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(\+?)=")
_OPERATORS = ("&&", "||", ";;", "|&", ";", "|", "&", "(", ")")
_REDIRECTION = re.compile(r"(?:[0-9]{0,4}(?:<<<|<<-|<<|>>|>\||>&|<&|<>|>|<)|&>>|&>)")
_PLACEHOLDER = re.compile(r"<[A-Za-z][^<>\n|;&]{0,80}>")


#: A run of letters without meaning to the lexer.
_PLAIN = re.compile(r"[^\s\\'\"$`<>&|;()0-9#" + "".join(_QUOTES) + "]+")
_PLAIN_IN_QUOTES = re.compile(r"[^\\\"$`]+")
_PLAIN_DIGITS = re.compile(r"[0-9]+")


_Redirect = Literal["", "target", "document", "document-tabs"]
_HERE_DOCUMENTS: dict[str, _Redirect] = {"<<": "document", "<<-": "document-tabs"}


class _Lexer:
    """Text to simple commands. Never fails: what a shell would wait for more of ends where the line ends, with a remark."""

    def __init__(self, text: str, first_line: int) -> None:
        self.text = text
        self.line = first_line
        self.position = 0
        self.remarks: list[Remark] = []
        self.commands: list[_Simple] = []
        self.current = _Simple(first_line)
        self.word: _Word | None = None
        #: Here-documents whose bodies begin at the next line: terminator, tabs stripped, command.
        self.pending: list[tuple[str, bool, _Simple]] = []
        self.redirect: _Redirect = ""

    def commands_of(self) -> list[_Simple]:
        text = self.text
        while self.position < len(text):
            character = text[self.position]
            if character == "\\":
                self._backslash()
            elif character == "\n":
                self._newline()
            elif character in " \t":
                self._end_word()
                self.position += 1
            elif character == "#" and self.word is None:
                end = text.find("\n", self.position)
                self.position = len(text) if end < 0 else end
            elif character in "'\"" or character in _QUOTES:
                self._quote(character)
            elif character == "$":
                self._piece(self._dollar(quoted=False))
            elif character == "`":
                self._backtick(quoted=False)
            elif character in "<>&|;()" or character.isdigit():
                self._operator(character)
            else:
                run = _PLAIN.match(text, self.position)
                plain = run[0] if run else character
                self._piece(_Piece(plain))
                self.position += len(plain)
        self._end_word()
        self._end_command()
        return self.commands

    def _piece(self, piece: _Piece) -> None:
        if self.word is None:
            self.word = _Word(self.line)
        self.word.pieces.append(piece)

    def _end_word(self) -> None:
        word, self.word = self.word, None
        if word is None:
            return
        word.pieces = _joined(word.pieces)
        if self.redirect:
            if self.redirect != "target":
                terminator = "".join(piece.text for piece in word.pieces)
                self.pending.append((terminator, self.redirect == "document-tabs", self.current))
            self.redirect = ""
            return
        if not self.current.words:
            self.current.line = word.line
        self.current.words.append(word)

    def _end_command(self, *, newline: bool = False) -> None:
        self.redirect = ""
        if self.current.words or self.current.documents or any(item[2] is self.current for item in self.pending):
            self.commands.append(self.current)
            self.current = _Simple(self.line, after_newline=newline)
        else:
            self.current.after_newline = newline

    def _remark(self, remark: Remark) -> None:
        """Once a line is enough."""
        if not any((known.id, known.line) == (remark.id, remark.line) for known in self.remarks[-2:]) and len(self.remarks) < 20:
            self.remarks.append(remark)

    def _backslash(self) -> None:
        rest = re.compile(r"\\([ \t]*)\n").match(self.text, self.position)
        if rest:
            if rest[1]:
                self._remark(
                    Remark(
                        "continuation-blank",
                        f"line {self.line} ends in a backslash with blanks after it: a shell ends the command there",
                        self.line,
                        harmful=True,
                    )
                )
                self._end_word()
            self.position = rest.end()
            self.line += 1
            return
        following = self.text[self.position + 1 : self.position + 2]
        if following:
            self._piece(_Piece(following, quoted=True))
        self.position += 2

    def _newline(self) -> None:
        self._end_word()
        self._end_command(newline=True)
        self.position += 1
        self.line += 1
        self.current.line = self.line
        pending, self.pending = self.pending, []
        for terminator, tabs, command in pending:
            self._document(terminator, command, tabs=tabs)

    def _document(self, terminator: str, command: _Simple, *, tabs: bool) -> None:
        first_line, body = self.line, []
        while self.position < len(self.text):
            end = self.text.find("\n", self.position)
            end = len(self.text) if end < 0 else end
            line = self.text[self.position : end]
            self.position = min(end + 1, len(self.text))
            self.line += 1
            if (line.lstrip("\t") if tabs else line) == terminator:
                break
            body.append(line)
        command.documents.append(("\n".join(body), first_line))

    def _quote(self, character: str) -> None:
        typographic = character in _QUOTES
        closing = _QUOTES.get(character, character)
        start = self.position + 1
        # A typographic quote closes near by, if at all.
        line_end = self.text.find("\n", start, start + _LONGEST_QUOTATION)
        line_end = min(len(self.text), start + _LONGEST_QUOTATION) if line_end < 0 else line_end
        end = self.text.find(closing, start, line_end) if typographic else self._closing(start, closing, double=character == '"')
        before, after = self.text[self.position - 1 : self.position], self.text[start : start + 1]
        apostrophe = character in "'\u2018\u2019" and before.isalpha() and after.isalpha() and not start <= end < line_end
        if (typographic and not start <= end < line_end) or apostrophe:
            # A lone one is a letter: prose has apostrophes, and a typographic quote means nothing to a shell.
            self._piece(_Piece(character))
            self.position += 1
            return
        if end < 0:
            self._remark(Remark("quote-open", f"a quote in line {self.line} is never closed", self.line, harmful=True))
            end = self.text.find("\n", start)
            end = len(self.text) if end < 0 else end
        if typographic:
            self._remark(
                Remark(
                    "typographic-quotes",
                    f"line {self.line} has typographic quotes ({character} {closing}), which a shell takes for letters; "
                    "read as plain ones",
                    self.line,
                    harmful=True,
                )
            )
        if character == '"':
            self._double(start, end)
        else:
            self._piece(_Piece(self.text[start:end], quoted=True))
        self.line += self.text.count("\n", start, end)
        self.position = end + 1 if end < len(self.text) and self.text[end] == closing else end

    def _closing(self, start: int, closing: str, *, double: bool) -> int:
        if not double:
            return self.text.find(closing, start)
        position = start
        while position < len(self.text):
            found = self.text.find(closing, position)
            escape = self.text.find("\\", position, found if found >= 0 else len(self.text))
            if escape < 0:
                return found
            position = escape + 2
        return -1

    def _double(self, start: int, end: int) -> None:
        self._piece(_Piece("", quoted=True))
        position = self.position
        self.position = start
        while self.position < end:
            character = self.text[self.position]
            if character == "\\" and self.position + 1 < end:
                following = self.text[self.position + 1]
                if following != "\n":
                    self._piece(_Piece(following if following in '$`"\\' else "\\" + following, quoted=True))
                self.position += 2
            elif character == "$":
                self._piece(self._dollar(quoted=True))
            elif character == "`":
                self._backtick(quoted=True)
            else:
                run = _PLAIN_IN_QUOTES.match(self.text, self.position, end)
                plain = run[0] if run else character
                self._piece(_Piece(plain, quoted=True))
                self.position += len(plain)
        self.position = position

    def _dollar(self, *, quoted: bool) -> _Piece:
        """The piece that a ``$`` starts; moves past it."""
        text, start = self.text, self.position
        following = text[start + 1 : start + 2]
        if following == "'" and not quoted:
            end = self._closing(start + 2, "'", double=True)
            if end >= 0:
                self.position = end + 1
                return _Piece(_unescape(text[start + 2 : end]), quoted=True)
        if following == "(":
            end = _balanced(text, start + 1)
            self.position = end
            return _Piece(text[start:end], "opaque", quoted)
        if following == "{":
            match = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(\[[@*]\])?(?::?-([^}\n]*))?\}").match(text, start)
            if match:
                self.position = match.end()
                return _Piece(match[1], "array" if match[2] else "variable", quoted, match[3])
            end = text.find("}", start, start + 200)
            if end > 0:
                self.position = end + 1
                return _Piece(text[start : end + 1], "opaque", quoted)
        match = _NAME.match(text, start + 1)
        if match:
            self.position = match.end()
            return _Piece(match[0], "variable", quoted)
        if following and following in "@*#?!0123456789":
            self.position = start + 2
            return _Piece(text[start : start + 2], "opaque", quoted)
        self.position = start + 1
        return _Piece("$", quoted=quoted)

    def _backtick(self, *, quoted: bool) -> None:
        end = self.text.find("`", self.position + 1)
        if end < 0 or "\n" in self.text[self.position : end]:
            self._piece(_Piece("`", quoted=quoted))
            self.position += 1
            return
        self._piece(_Piece(self.text[self.position : end + 1], "opaque", quoted))
        self.position = end + 1

    def _operator(self, character: str) -> None:
        placeholder = _PLACEHOLDER.match(self.text, self.position) if character == "<" else None
        if placeholder:
            self._piece(_Piece(placeholder[0], "opaque", quoted=True))
            self.position = placeholder.end()
            return
        # A digit begins a redirection only as a word of its own.
        redirection = _REDIRECTION.match(self.text, self.position) if self.word is None or not character.isdigit() else None
        if redirection:
            self._end_word()
            here = redirection[0].lstrip("0123456789")
            self.redirect = _HERE_DOCUMENTS.get(here, "target")
            self.position = redirection.end()
            return
        if character.isdigit():
            run = _PLAIN_DIGITS.match(self.text, self.position)
            plain = run[0] if run else character
            self._piece(_Piece(plain))
            self.position += len(plain)
            return
        operator = next(item for item in _OPERATORS if self.text.startswith(item, self.position))
        if operator == "(" and self.word is not None and "".join(piece.text for piece in self.word.pieces).endswith("="):
            # `NAME=(a b c)`: an array, kept as its words.
            end = _balanced(self.text, self.position)
            self._piece(_Piece(self.text[self.position + 1 : max(end - 1, self.position + 1)]))
            self.line += self.text.count("\n", self.position, end)
            self.position = end
            return
        self._end_word()
        self._end_command()
        self.position += len(operator)


def _joined(pieces: Sequence[_Piece]) -> list[_Piece]:
    """Neighbours of one kind as one piece."""
    joined: list[_Piece] = []
    for (kind, quoted), group in itertools.groupby(pieces, key=lambda piece: (piece.kind, piece.quoted)):
        if kind == "text":
            joined.append(_Piece("".join(piece.text for piece in group), quoted=quoted))
        else:
            joined += group
    return joined


def _balanced(text: str, start: int) -> int:
    """The position after the bracket that closes the one at ``start``; of the line's end where none does."""
    depth = 0
    for position in range(start, len(text)):
        if text[position] == "(":
            depth += 1
        elif text[position] == ")":
            depth -= 1
            if depth == 0:
                return position + 1
    end = text.find("\n", start)
    return len(text) if end < 0 else end


_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "f": "\f", "v": "\v", "e": "\x1b", "s": " "}


def _unescape(text: str) -> str:
    """C escapes, as in ``$'...'`` and in a unit."""

    def one(match: re.Match[str]) -> str:
        body = match[1]
        if body[0] == "x" and len(body) > 1:
            return chr(int(body[1:], 16))
        if body[0] in "01234567" and len(body) == 3:
            return chr(int(body, 8) & 0xFF)
        return _ESCAPES.get(body, body)

    return re.sub(r"\\(x[0-9A-Fa-f]{1,2}|[0-7]{3}|.)", one, text, flags=re.DOTALL)


def _expand(word: _Word, variables: Mapping[str, str]) -> list[str]:
    """The fields that a word becomes. What is not known stays as it is written."""
    fields: list[str] = []
    current: list[str] = []
    started = False
    for piece in word.pieces:
        value = piece.text
        if piece.kind == "array" and piece.text in variables:
            fields += [*(["".join(current)] if any(current) else []), *_array(variables[piece.text], variables)]
            current, started = [], False
            continue
        if piece.kind == "array":
            value = f"${{{piece.text}[@]}}"
        elif piece.kind == "variable":
            value = variables.get(piece.text) or piece.default or variables.get(piece.text, f"${piece.text}")
            if not piece.quoted:
                parts = value.split()
                if not parts:
                    continue
                if value[:1].isspace() and started:
                    fields.append("".join(current))
                    current = []
                for part in parts[:-1]:
                    fields.append("".join((*current, part)))
                    current = []
                current.append(parts[-1])
                started = True
                continue
        current.append(value)
        started = True
    if started:
        fields.append("".join(current))
    return fields


def _array(text: str, variables: Mapping[str, str]) -> list[str]:
    """The words of ``NAME=(...)``, whose text is kept as it was written."""
    try:
        words = shlex.split(text, comments=True)
    except ValueError:
        words = text.split()
    return [re.sub(r"\$\{?([A-Za-z_][A-Za-z0-9_]*)\}?", lambda match: variables.get(match[1], match[0]), word) for word in words]


# --- finding programs -------------------------------------------------------------------------------------------------------


_KEYWORDS = frozenset({"if", "then", "else", "elif", "do", "while", "until", "!", "{", "}", "time", "RUN", "CMD"})
_PROMPTS = re.compile(r"[$%>\u276f\u279c]|\S*[@:~]\S*[$#%]|PS>")
#: Programs that start another one, whose options may take a value.
_WRAPPERS = frozenset(
    [
        "sudo",
        "doas",
        "env",
        "nohup",
        "exec",
        "nice",
        "ionice",
        "chrt",
        "taskset",
        "numactl",
        "stdbuf",
        "setsid",
        "timeout",
        "systemd-run",
        "command",
        "unbuffer",
        "prlimit",
        "cgexec",
        "screen",
        "srun",
        "uv",
        "uvx",
        "poetry",
        "pipenv",
        "conda",
        "mamba",
        "micromamba",
        "nsys",
        "time",
        "strace",
        "gdb",
        "catchsegv",
        "proxychains4",
        "dumb-init",
        "tini",
    ]
)
#: Words that belong to a wrapper and are neither options nor their values.
_WRAPPER_WORDS = re.compile(r"run|--|[0-9]+(\.[0-9]+)?[smhd]?|0x[0-9a-fA-F]+|[0-9]+([-,:][0-9]+)*")
_SHELLS = frozenset({"sh", "bash", "dash", "zsh", "ash", "ksh"})
_CONTAINERS = frozenset({"docker", "podman", "nerdctl"})
#: Options of ``docker run`` without a value; every other one takes one (docs.docker.com/reference/cli/docker/container/run).
_CONTAINER_SWITCHES = frozenset(
    [
        "--detach",
        "--init",
        "--interactive",
        "--no-healthcheck",
        "--oom-kill-disable",
        "--privileged",
        "--publish-all",
        "--quiet",
        "--read-only",
        "--rm",
        "--sig-proxy",
        "--tty",
        "--disable-content-trust",
        "--use-api-socket",
    ]
)
_VLLM_MODULES = ("vllm.entrypoints.openai.api_server", "vllm.entrypoints.api_server")


class _Finder:
    def __init__(self, images: Mapping[str, Program]) -> None:
        self.images = images

    def text(self, text: str, line: int, environment: Mapping[str, str], depth: int) -> list[Command]:
        if depth > _DEEPEST:
            return []
        return self._unit(text, line, depth) if _is_unit(text) else self._shell(text, line, environment, depth)

    def _shell(self, text: str, line: int, environment: Mapping[str, str], depth: int) -> list[Command]:
        lexer = _Lexer(text, line)
        simples = lexer.commands_of()
        exported, variables = dict(environment), dict(environment)
        found: list[Command] = []
        last_simple = -2
        for index, simple in enumerate(simples):
            words: list[str] = []
            assigned: dict[str, str] = {}
            lines: list[int] = []
            for word in simple.words:
                first = word.pieces[0]
                assignment = _ASSIGNMENT.match(first.text) if first.kind == "text" and not first.quoted else None
                if assignment and (not words or words in (["export"], ["readonly"], ["declare", "-x"], ["local"])):
                    value = " ".join(_expand(_unsplit(word), {**variables, **assigned})).removeprefix(assignment[0])
                    # Whole values: an assignment is not split into fields.
                    old = variables.get(assignment[1], "") if assignment[2] else ""
                    assigned[assignment[1]] = old + value
                    continue
                fields = _expand(word, variables)
                words += fields
                lines += [word.line] * len(fields)
            if not words or words in (["export"], ["readonly"], ["declare", "-x"], ["local"]):
                variables |= assigned
                if words == ["export"] or words == ["declare", "-x"]:
                    exported |= assigned
                elif not words:
                    exported |= {name: value for name, value in assigned.items() if name in exported}
            if words[:1] == ["export"]:
                exported |= {name: variables[name] for name in words[1:] if name in variables}
            if found and index == last_simple + 1 and simple.after_newline and _is_lost_continuation(words, found[-1]):
                found[-1] = replace(
                    found[-1],
                    words=(*found[-1].words, *words),
                    remarks=(
                        *found[-1].remarks,
                        Remark(
                            "continuation-lost",
                            f"line {simple.line} starts with a flag and the line before ends without a backslash: a shell would "
                            "run it as a command of its own; read as one command",
                            simple.line,
                            harmful=True,
                        ),
                    ),
                )
                last_simple = index
                continue
            for document, first_line in simple.documents:
                found += self.text(document, first_line, exported, depth + 1)
            for command in self._simple(words, lines, simple.line, {**exported, **assigned}, depth):
                found.append(command)
                last_simple = index
        # Remarks belong to the command that stands at or before their line.
        for remark in lexer.remarks:
            owner = next((i for i in reversed(range(len(found))) if found[i].line <= remark.line), None)
            if owner is not None:
                found[owner] = replace(found[owner], remarks=(*found[owner].remarks, remark))
        return found

    def _simple(
        self, words: Sequence[str], lines: Sequence[int], line: int, environment: Mapping[str, str], depth: int
    ) -> Iterator[Command]:
        start = 0
        while start < len(words) and (words[start] in _KEYWORDS or _is_prompt(words[start])):
            start += 1
        own: dict[str, str] = dict(environment)
        wrappers: list[tuple[str, ...]] = []
        position, wrapper_start, value_may_follow = start, -1, False
        while position < len(words):
            word = words[position]
            command = self._program(words, position)
            if command is not None:
                if wrapper_start >= 0:
                    wrappers.append(tuple(words[wrapper_start:position]))
                at = lines[position] if position < len(lines) else line
                yield replace(command, line=at, environment=own, wrappers=tuple(wrappers))
                return
            base = _base(word)
            if base in _SHELLS or (base in ("tmux", "screen") and position + 1 < len(words)):
                script = _script(words[position + 1 :], base)
                if script is not None:
                    yield from self.text(script, line, own, depth + 1)
                    return
            if base in _CONTAINERS:
                yield from self._container(words[position:], line, own, tuple(wrappers), depth)
                return
            assignment = _ASSIGNMENT.match(word)
            if base in _WRAPPERS:
                if wrapper_start >= 0:
                    wrappers.append(tuple(words[wrapper_start:position]))
                wrapper_start, value_may_follow = position, False
            elif assignment and not assignment[2]:
                own[assignment[1]] = word[assignment.end() :]
                value_may_follow = False
            elif wrapper_start >= 0 and word.startswith("-") and word != "--":
                value_may_follow = "=" not in word
            elif wrapper_start >= 0 and (value_may_follow or _WRAPPER_WORDS.fullmatch(word)):
                value_may_follow = False
            else:
                return
            position += 1

    def _program(self, words: Sequence[str], position: int) -> Command | None:
        word, following = words[position], words[position + 1 : position + 2]
        rest = tuple(words[position + 1 :])
        base = _base(word)
        if base == "llama-server" or (base == "server" and "/" in word):
            return Command("llama-server", word, rest, 0)
        if base == "llama" and following and following[0] in ("serve", "server"):
            return Command("llama-server", f"{word} {following[0]}", rest[1:], 0)
        if base == "vllm" and following == ["serve"]:
            return Command("vllm", f"{word} serve", rest[1:], 0, style="serve")
        if base == "cmake" or base == "cmake3":
            return Command("cmake", word, rest, 0)
        if re.fullmatch(r"python[0-9.]*", base):
            for offset, argument in enumerate(rest):
                module = rest[offset + 1] if argument == "-m" and offset + 1 < len(rest) else argument.removeprefix("-m")
                after = offset + (2 if argument == "-m" else 1)
                if (argument.startswith("-m") and module in _VLLM_MODULES) or re.search(
                    r"(^|/)vllm/entrypoints/(openai/)?api_server\.py$", argument
                ):
                    return Command("vllm", " ".join((word, *rest[:after])), rest[after:], 0, style="module")
                if (
                    argument.startswith("-m")
                    and module in ("vllm", "vllm.entrypoints.cli.main")
                    and rest[after:][:1] == ("serve",)
                ):
                    return Command("vllm", " ".join((word, *rest[: after + 1])), rest[after + 1 :], 0, style="serve")
                if not argument.startswith("-") or argument == "-m":
                    break
        return None

    def _container(
        self, words: Sequence[str], line: int, environment: Mapping[str, str], wrappers: tuple[tuple[str, ...], ...], depth: int
    ) -> Iterator[Command]:
        position = 1
        while position < len(words) and (words[position].startswith("-") or words[position] in ("container", "compose")):
            position += 1
        if position >= len(words) or words[position] not in ("run", "create", "exec"):
            return
        position += 1
        inside: dict[str, str] = {}
        entry: str | None = None
        while position < len(words) and words[position].startswith("-") and len(words[position]) > 1:
            option, separator, value = words[position].partition("=")
            position += 1
            if option in _CONTAINER_SWITCHES or re.fullmatch(r"-[ditPq]+", option):
                continue
            if re.fullmatch(r"-[a-zA-Z].+", option) and not option.startswith("--"):
                # `-eNAME=value`, `-itv x`: the last letter may have its value joined to it.
                joined = words[position - 1]
                if joined.startswith("-e"):
                    option, value, separator = "-e", joined[2:], "="
                elif re.fullmatch(r"-[ditPq]*[a-zA-Z]", joined):
                    option, separator = f"-{joined[-1]}", ""
                else:
                    continue
            if not separator:
                value = words[position] if position < len(words) else ""
                position += 1
            if option in ("-e", "--env"):
                name, _, setting = value.partition("=")
                inside[name] = setting if "=" in value else environment.get(name, f"${name}")
            elif option == "--entrypoint":
                entry = value
        if position >= len(words):
            return
        image, rest = words[position], list(words[position + 1 :])
        typed = f"{words[0]} run {image}"
        around = (*wrappers, tuple(words[: position + 1]))
        named = [entry, *rest] if entry else rest
        nested = list(self._simple(named, [line] * len(named), line, inside, depth + 1))
        if nested:
            yield from (replace(item, image=image, wrappers=(*around, *item.wrappers)) for item in nested)
            return
        program = None if entry else self._image_program(image)
        if program is not None:
            if program == "llama-server" and rest[:1] in (["--server"], ["-s"]):
                rest = rest[1:]
            style: Literal["image"] | None = "image" if program == "vllm" else None
            yield Command(program, typed, tuple(rest), line, inside, around, image, style)

    def _image_program(self, image: str) -> Program | None:
        bare = image.split("@", 1)[0]
        # A registry has a dot or a port in its first part.
        first, _, rest = bare.partition("/")
        if rest and ("." in first or ":" in first or first == "localhost"):
            bare = rest
        return next((program for prefix, program in self.images.items() if bare.startswith(prefix)), None)

    def _unit(self, text: str, line: int, depth: int) -> list[Command]:
        environment: dict[str, str] = {}
        remarks: list[Remark] = []
        lines = list(_unit_lines(text, line))
        for _, key, value in lines:
            if key == "Environment":
                for item in _unit_words(value):
                    name, separator, setting = item.partition("=")
                    if separator:
                        environment[name] = setting.replace("%%", "%")
            elif key == "EnvironmentFile":
                remarks.append(
                    Remark("environment-file", f"`EnvironmentFile={value}` may set more variables: not seen here", line)
                )
        found: list[Command] = []
        for number, key, value in lines:
            if not key.startswith("Exec"):
                continue
            words = []
            for word in _unit_words(value.lstrip("-@:+!| ")):
                words += _unit_expand(word, environment)
            own = list(remarks)
            specifiers = sorted(set(re.findall(r"(?<!%)(?:%%)*(%[A-Za-z])", " ".join(words))))
            if specifiers:
                own.append(
                    Remark("specifier", f"{', '.join(specifiers)} stand for what systemd puts in (systemd.unit(5))", number)
                )
            words = [word.replace("%%", "%") for word in words]
            for command in self._simple(words, [number] * len(words), number, environment, depth):
                found.append(replace(command, origin="systemd", remarks=(*command.remarks, *own)))
        return found


def _is_prompt(word: str) -> bool:
    return len(word) <= _LONGEST_PROMPT and _PROMPTS.fullmatch(word) is not None


def _unsplit(word: _Word) -> _Word:
    return _Word(word.line, [replace(piece, quoted=True) for piece in word.pieces])


def _is_lost_continuation(words: Sequence[str], command: Command) -> bool:
    return bool(words) and command.program != "cmake" and re.match(rf"-{{1,2}}[A-Za-z]|[{DASHES}][A-Za-z]", words[0]) is not None


def _base(word: str) -> str:
    return re.split(r"[/\\]", word)[-1].removesuffix(".exe")


def _script(words: Sequence[str], base: str) -> str | None:
    """What ``sh -c``, ``tmux new`` or ``screen -dm`` runs: a text to be read by a shell."""
    if base in _SHELLS:
        for index, word in enumerate(words):
            if not word.startswith("-"):
                return None
            if re.fullmatch(r"-[a-z]*c[a-z]*", word):
                return words[index + 1] if index + 1 < len(words) else None
        return None
    last = words[-1]
    return last if " " in last else None


def _is_unit(text: str) -> bool:
    for line in text.split("\n"):
        stripped = line.strip()
        if not stripped or stripped[0] in "#;":
            continue
        return bool(
            re.fullmatch(r"\[(Unit|Service|Install|Container)\]", stripped) or re.match(r"(Exec\w+|Environment)\s*=", stripped)
        )
    return False


def _unit_lines(text: str, first_line: int) -> Iterator[tuple[int, str, str]]:
    """Line number, key and value of each assignment; continuation lines are joined, comments between them dropped."""
    pending: list[str] = []
    started = first_line
    for number, raw in enumerate(text.split("\n"), first_line):
        line = raw.strip()
        if line[:1] in ("#", ";"):
            continue
        if not pending:
            started = number
        if line.endswith("\\"):
            pending.append(line[:-1])
            continue
        key, separator, value = " ".join([*pending, line]).partition("=")
        pending = []
        if separator and re.fullmatch(r"\s*[A-Za-z]+\s*", key):
            yield started, key.strip(), value.strip()
    key, separator, value = " ".join(pending).partition("=")
    if separator:
        yield started, key.strip(), value.strip()


def _unit_words(value: str) -> list[str]:
    """A value's words by systemd's quoting: quotes only at a word's beginning, C escapes everywhere."""
    words: list[str] = []
    for match in re.finditer(r"""(?:"((?:[^"\\]|\\.)*)"|'((?:[^'\\]|\\.)*)')(?=\s|$)|((?:\\.|\S)+)""", value, re.DOTALL):
        text = next(group for group in match.groups() if group is not None)
        words.append(_unescape(text))
    return words


def _unit_expand(word: str, environment: Mapping[str, str]) -> list[str]:
    """``$NAME`` as a word of its own is split at blanks, ``${NAME}`` inside a word is not; ``$$`` is a dollar."""
    whole = re.fullmatch(r"\$([A-Za-z_][A-Za-z0-9_]*)", word)
    if whole and whole[1] in environment:
        return environment[whole[1]].split()

    def one(match: re.Match[str]) -> str:
        return "$" if match[0] == "$$" else environment.get(match[1], match[0])

    return [re.sub(r"\$\$|\$\{([A-Za-z_][A-Za-z0-9_]*)\}", one, word)]
