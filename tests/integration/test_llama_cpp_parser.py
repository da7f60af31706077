"""A real ``llama-server``'s own parser, asked about everything that the catalog says of it. It needs no model for that."""

from __future__ import annotations

import os
import subprocess
import tarfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.unit.test_llama_cpp_catalog import SETTINGS, argv_of
from v100ctl import paths
from v100ctl.catalog import LlamaCppParser, ParserFlag, load_catalog
from v100ctl.plan import llama_cpp

from .hosts import Done

BUILD = 11434


@dataclass(frozen=True)
class Question:
    """Words for the parser, and whether the catalog says that it takes them."""

    words: tuple[str, ...]
    taken: bool


class Server:
    """A compiled ``llama-server`` and a folder with files that arguments can name."""

    def __init__(self, program: Path, build: int, folder: Path) -> None:
        self.program, self.folder = program, folder
        parser = load_catalog().llama_cpp_parser(build)
        assert parser is not None
        self.parser: LlamaCppParser = parser
        for name, text in (("chat.jinja", "{{ messages }}"), ("a.json", "{}"), ("keys", "a"), ("a.gbnf", 'root ::= "a"')):
            (folder / name).write_text(text, encoding="utf-8")

    def takes(self, words: Sequence[str]) -> tuple[bool, str]:
        """Whether the engine's parser takes the words, and what it said."""
        done = subprocess.run(
            [str(self.program), *words, "--help"],
            cwd=self.folder,
            env={"HOME": str(self.folder), "PATH": os.environ["PATH"]},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        return done.returncode == 0, done.stderr.split("\n\n")[0]

    def disagreements(self, questions: Sequence[Question]) -> list[str]:
        """Where the engine answers otherwise than the catalog."""
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            answers = list(pool.map(lambda question: self.takes(question.words), questions))
        return [
            f"{' '.join(question.words)!r}: catalog {question.taken}, engine {taken} {said}"
            for question, (taken, said) in zip(questions, answers, strict=True)
            if taken != question.taken
        ]


#: A value for arguments whose text has a form of its own.
_SAMPLES = {
    "--api-key-file": "keys",
    "--chat-template": "chatml",
    "--chat-template-file": "chat.jinja",
    "--chat-template-kwargs": "{}",
    "--control-vector-scaled": "a:1",
    "--cpu-mask": "ff",
    "--cpu-mask-batch": "ff",
    "--cpu-range": "0-1",
    "--cpu-range-batch": "0-1",
    "--device": "none",
    "--fit-target": "1024",
    "--grammar": 'root ::= "a"',
    "--grammar-file": "a.gbnf",
    "--json-schema": "{}",
    "--json-schema-file": "a.json",
    "--logit-bias": "1+1",
    "--lora-scaled": "a:1",
    "--mcp-servers-json": "{}",
    "--media-path": ".",
    "--mmproj-device": "none",
    "--override-kv": "a=int:1",
    "--override-tensor": "a=CPU",
    "--slot-save-path": ".",
    "--spec-draft-cpu-mask": "ff",
    "--spec-draft-cpu-mask-batch": "ff",
    "--spec-draft-cpu-range": "0-1",
    "--spec-draft-device": "none",
    "--spec-draft-override-tensor": "a=CPU",
    "--spec-synth-rates": "0.5",
    "--tensor-split": "1",
    "--tools-runtime": "native",
    "--ui-config": "{}",
    "--ui-config-file": "a.json",
}


def _sample(flag: ParserFlag) -> str:
    if flag.choices:
        return flag.choices[-1]
    for name in flag.names:
        if name in _SAMPLES:
            return _SAMPLES[name]
    if flag.type == "int":
        number = max(1, flag.minimum or 1)
        return str(number if flag.maximum is None else min(number, flag.maximum))
    return "0.5" if flag.type == "float" else "a"


def flag_questions(parser: LlamaCppParser) -> Iterator[Question]:
    """Every argument in every spelling, with values that it takes and values that it does not."""
    for flag in parser.flags:
        values = (_sample(flag),) if flag.arity == 1 else ("1", "2")[: flag.arity]
        takes = not flag.removed and not flag.needs_option
        for word in flag.words:
            yield Question((word, *values), takes)
        name = flag.name
        yield Question((name.replace("-", "_").replace("__", "--", 1), *values), takes)
        if flag.arity == 0 or not takes:
            continue
        if flag.choices is not None:
            for choice in flag.choices:
                yield Question((name, choice), True)
            yield Question((name, "no-such-value"), False)
            if flag.or_integer:
                yield Question((name, "7"), True)
        elif flag.type in ("int", "float"):
            yield Question((name, "x"), False)
        if flag.separator and flag.choices:
            yield Question((name, flag.separator.join(flag.choices[-2:])), True)
            yield Question((name, flag.separator.join((flag.choices[0], "no-such-value"))), False)
            if flag.list_end:
                yield Question((name, flag.separator.join((flag.list_end, "no-such-value"))), True)
        for number in (flag.minimum, flag.maximum):
            if number is not None:
                yield Question((name, str(number)), number != flag.excluded)
        if flag.minimum is not None:
            yield Question((name, str(flag.minimum - 1)), False)
        if flag.maximum is not None:
            yield Question((name, str(flag.maximum + 1)), False)
        if flag.excluded is not None:
            yield Question((name, str(flag.excluded)), False)
    for word in sorted(parser.other_programs | set(parser.former_flags) | {"--no-such-flag", "word", "--ctx-size=4096"}):
        yield Question((word,), False)


def setting_questions(build: int) -> Iterator[Question]:
    """Every setting and profile, as the plan renders it for both backends."""
    for settings in SETTINGS:
        for backend in ("cpu", "cuda"):
            argv = argv_of(build, settings, backend=backend)
            yield Question(tuple("chat.jinja" if word.endswith(".jinja") else word for word in argv[1:]), True)


@pytest.fixture(scope="module")
def server(practiced: Done, tmp_path_factory: pytest.TempPathFactory) -> Server:
    """The release that ``v100ctl try`` has left in the cache."""
    assert practiced.code == 0, practiced.err
    folder = tmp_path_factory.mktemp("release")
    (archive,) = (paths.cache_dir() / "releases").glob(f"b{BUILD}-cpu-*.tar.gz")
    with tarfile.open(archive) as stream:
        stream.extractall(folder, filter="data")
    return Server(folder / "bin" / "llama-server", BUILD, tmp_path_factory.mktemp("parser"))


def test_it_takes_exactly_the_arguments_of_its_parser_file(server: Server) -> None:
    questions = list(flag_questions(server.parser))
    assert len(questions) > 1000
    assert server.disagreements(questions) == []


def test_it_takes_every_setting_and_profile(server: Server) -> None:
    assert server.disagreements(list(setting_questions(BUILD))) == []


def test_the_check_at_plan_time_says_the_same(server: Server) -> None:
    for question in flag_questions(server.parser):
        flag = server.parser.flag(question.words[0])
        if flag is not None and flag.exits:
            # The parser takes it; that no server starts then is the plan's own verdict.
            continue
        problems = llama_cpp.check_argv(("llama-server", *question.words), server.parser)
        assert any(problem.fatal for problem in problems) != question.taken, (question, problems)


def test_its_own_message_is_about_the_word_that_is_wrong(server: Server) -> None:
    for words in (("--no-such-flag",), ("--flash-attn", "--cache-type-k"), ("--load-mode", "nonsense"), ("--device", "CUDA7")):
        taken, said = server.takes(words)
        assert not taken
        assert words[0] in said
