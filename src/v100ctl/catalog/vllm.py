"""Typed rows of ``vllm.yml`` and of ``vllm_parsers/``: what each version of vLLM is, runs on and takes."""

from __future__ import annotations

import difflib
import functools
import json
import re
from collections.abc import Mapping
from datetime import date
from importlib import resources
from typing import Any, Literal

import yaml
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version
from pydantic import Field

from v100ctl.catalog.rows import Progress, Row

#: An argument that the value follows, or the words for each value; no words: nothing needs saying.
Spelling = str | dict[str, tuple[str, ...]]


class VllmArgument(Row):
    """One argument of the OpenAI-compatible server, as the version's own parser has it.

    ``arity`` is the number of words that follow; ``optional``: none or one, ``any``: one or more. ``choices`` are the only values
    taken. ``nullable``: an empty word or ``None`` stands for no value. ``type`` is what a word is converted to.
    """

    names: tuple[str, ...]
    negated: tuple[str, ...] = ()
    arity: int | Literal["optional", "any"]
    type: str
    default: Any = None
    choices: tuple[str | int, ...] | None = None
    nullable: bool = False
    repeats: bool = False
    deprecated: bool = False

    @property
    def is_switch(self) -> bool:
        """Takes no value at all."""
        return self.arity == 0

    def problem(self, value: str) -> str | None:
        """Why this argument does not take ``value``, ``None`` where it does. Types that only the engine knows take anything."""
        if self.nullable and value in ("", "None"):
            return None
        converted: str | int | None = value
        if self.type in ("integer", "human-integer"):
            converted = _integer(value, human=self.type == "human-integer")
            if converted is None:
                return f"takes a whole number, not `{value}`"
        elif self.type == "number" and not _is_number(value):
            return f"takes a number, not `{value}`"
        elif self.type == "boolean" and value.lower() not in ("true", "false"):
            return f"takes `True` or `False`, not `{value}`"
        elif self.type == "json" and not _is_json(value, pairs=self.nullable):
            return f"takes JSON, not `{value}`"
        elif self.type == "json-object" and not _is_object(value):
            return f"takes a JSON object, not `{value}`"
        elif self.type == "level-or-json" and value not in ("0", "1", "2", "3") and not _is_object(value):
            return f"takes a level from 0 to 3 or a JSON object, not `{value}`"
        elif self.type == "named-path" and value.count("=") != 1:
            return f"takes NAME=PATH, not `{value}`"
        elif (
            self.type == "named-path-or-json"
            and value not in ("", "None")
            and not (_is_object(value) or (value.count("=") == 1 and "," not in value))
        ):
            return f"takes NAME=PATH or a JSON object, not `{value}`"
        elif self.type == "key-values" and not _are_pairs(value):
            return f"takes KEY=NUMBER pairs with commas between them, not `{value}`"
        if self.choices is not None and converted not in self.choices:
            return f"takes {', '.join(str(choice) for choice in self.choices)}, not `{value}`"
        return None

    def nearest(self, value: str) -> str | None:
        """A choice that ``value`` may be a slip for."""
        choices = [str(choice) for choice in self.choices or ()]
        return next(iter(difflib.get_close_matches(value.lower(), choices, n=1, cutoff=0.6)), None)


def _integer(value: str, *, human: bool) -> int | None:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmMgGtT])", value.strip()) if human else None
    if match:
        # `1k` is 1000, `1K` 1024; decimals go with the decimal ones only.
        decimal = {"k": 10**3, "m": 10**6, "g": 10**9}.get(match[2])
        if decimal is not None:
            return int(float(match[1]) * decimal)
        binary = {"K": 2**10, "M": 2**20, "G": 2**30}.get(match[2])
        return int(match[1]) * binary if binary is not None and "." not in match[1] else None
    try:
        return int(value)
    except ValueError:
        return None


def _is_number(value: str) -> bool:
    try:
        float(value)
    except ValueError:
        return False
    return True


def _is_json(value: str, *, pairs: bool) -> bool:
    # Where no value is allowed too, the engine takes anything that is no object for KEY=NUMBER pairs.
    if pairs and not re.match(r"^{.*}$", value):
        return _are_pairs(value)
    try:
        json.loads(value)
    except ValueError:
        return False
    return True


def _is_object(value: str) -> bool:
    try:
        return isinstance(json.loads(value), dict)
    except ValueError:
        return False


def _are_pairs(value: str) -> bool:
    seen: dict[str, int] = {}
    for part in value.split(","):
        key, equals, number = (item.strip() for item in part.lower().partition("="))
        parsed = _integer(number, human=False) if equals and "=" not in number else None
        if parsed is None or seen.setdefault(key, parsed) != parsed:
            return False
    return True


class ParserWords(Row):
    """How a version's parser reads the words themselves.

    ``abbreviations``: an unambiguous beginning of a long name is taken for it. ``underscores``: ``--max_model_len`` is
    ``--max-model-len``. ``dotted_json``: ``--hf-overrides.key value`` is read as JSON.
    """

    abbreviations: bool
    underscores: bool
    dotted_json: bool


class VllmParser(Row):
    """What one version takes: ``vllm_parsers/VERSION.yml``, made by :mod:`v100ctl.catalog.extract_vllm`.

    ``transformers_architectures`` are those that the version knows only through the Transformers library's own code.
    """

    as_of: date
    version: str
    source: str
    made_with: Mapping[str, Any]
    words: ParserWords
    arguments: tuple[VllmArgument, ...]
    #: What `vllm serve` takes beside them; `model_tag` is its positional one.
    serve_arguments: tuple[VllmArgument, ...]
    #: Method -> least compute capability, in tenths (70 is 7.0).
    quantization: Mapping[str, int]
    quantization_unknown: tuple[str, ...]
    architectures: frozenset[str]
    transformers_architectures: frozenset[str]

    @property
    def flags(self) -> tuple[VllmArgument, ...]:
        """The arguments; the name that llama.cpp's parser has for them."""
        return self.arguments

    @functools.cached_property
    def by_word(self) -> dict[str, VllmArgument]:
        """Every spelling -> its argument."""
        return {word: argument for argument in self.arguments for word in (*argument.names, *argument.negated)}

    @property
    def known_words(self) -> tuple[str, ...]:
        """Every spelling of every argument."""
        return tuple(self.by_word)

    def normal(self, word: str) -> str:
        """``word`` as the parser compares it: without ``=VALUE``, underscores of a long name turned into hyphens."""
        name = word.partition("=")[0] if word.startswith("--") else word
        return "--" + name[2:].replace("_", "-") if self.words.underscores and name.startswith("--") else name

    def candidates(self, word: str) -> tuple[str, ...]:
        """The spellings that ``word`` may stand for: itself, or every one that it begins."""
        name = self.normal(word)
        if name in self.by_word:
            return (name,)
        if not (self.words.abbreviations and name.startswith("--") and len(name) > len("--")):
            return ()
        return tuple(known for known in self.by_word if known.startswith(name))

    def flag(self, word: str) -> VllmArgument | None:
        """The argument that ``word`` names, in any spelling that the parser takes; ``None`` where it names none, or several."""
        found = self.candidates(word)
        return self.by_word[found[0]] if len(found) == 1 else None

    def nearest(self, word: str) -> str | None:
        """A known spelling that ``word`` may be a slip for."""
        name = self.normal(word)
        near = difflib.get_close_matches(name, self.by_word, n=1, cutoff=0.75)
        if near:
            return near[0]
        # `--chunked-prefill` for `--enable-chunked-prefill`.
        tail = name.removeprefix("--").removeprefix("no-")
        return next((known for known in self.by_word if tail and known.endswith(f"-{tail}")), None)


class VllmDefaults(Row):
    """What the plan says where the inventory says nothing (``dtype``), and what the version does where nothing is said.

    ``batch_size_min``: without chunked prefill a step takes the context's length in tokens, and never fewer than this.
    """

    source: str
    dtype: str
    parallel: int
    gpu_memory_utilization: float
    swap_space_gib: float
    block_size: int
    batch_size_min: int


class VllmLock(Row):
    """How the complete lock of a version is made (:mod:`v100ctl.catalog.lock_vllm`), and how large what it installs is.

    ``until`` is the day after which no package of it was published, ``left_out`` are packages that cannot be installed (name ->
    why), ``download_bytes`` all wheels together, ``release_bytes`` what they are once they are unpacked and compiled.
    """

    source: str
    until: date
    pythons: tuple[str, ...]
    left_out: Mapping[str, str] = Field(default_factory=dict)
    download_bytes: int
    release_bytes: int


class VllmRow(Row):
    """One version, or a range of versions (``covers``) that is not offered.

    ``spellings`` and ``json_arguments`` go by the setting's path in the inventory (``rope_scaling.factor``); the latter are
    collected into one JSON object for each argument. A row without ``spellings`` cannot be launched.
    """

    version: str
    covers: str | None = None
    source: str
    torch: str
    cuda: str
    driver_min: str
    python_min: str
    python_max: str
    engine_mode: Literal["V0", "V1"]
    sm_70: Literal["yes", "no", "unproven"]
    reason: str
    reason_source: str
    #: Of the wheel of PyTorch that the package index has.
    torch_architectures: tuple[int, ...]
    requirements: Mapping[str, str] = Field(default_factory=dict)
    requirements_source: str | None = None
    #: Rows without cannot be installed.
    lock: VllmLock | None = None
    environment: Mapping[str, str] = Field(default_factory=dict)
    always: tuple[tuple[str, ...], ...] = ()
    defaults: VllmDefaults | None = None
    #: A longer context turns chunked prefill on where the command line is silent about it.
    long_context_chunks_above: int | None = None
    #: Whether the latent cache of DeepSeek V2 and V3 is kept as it is; else every head has its own keys and values.
    mla: bool = False
    #: Sizes of an attention head that its kernels are compiled for.
    head_sizes: tuple[int, ...] = ()
    #: Model types whose context is capped to their sliding window by the attention backend of ``environment``.
    capped_to_window: tuple[str, ...] = ()
    spellings: Mapping[str, Spelling] = Field(default_factory=dict)
    json_arguments: Mapping[str, Mapping[str, str]] = Field(default_factory=dict)
    #: Setting -> its values -> what they are called in the JSON.
    json_values: Mapping[str, Mapping[str, str]] = Field(default_factory=dict)
    #: Quantisation method -> the words that go with it.
    quantization_words: Mapping[str, tuple[str, ...]] = Field(default_factory=dict)
    #: Arguments whose value is a secret; every user of a host can read a command line.
    secret_flags: tuple[str, ...] = ()
    #: Paths beside `/health` that answer without the API key.
    keyless_paths: tuple[str, ...] = ()
    #: Arguments that no setting says and that change what lies on the cards, and how large it is.
    moves_memory: tuple[str, ...] = ()
    #: Arguments that name a file of further arguments.
    reads_arguments: tuple[str, ...] = ()
    compressed_tensors: Mapping[str, int] = Field(default_factory=dict)
    #: Setting -> why it cannot be on below compute capability 8.0.
    volta_prefill: Mapping[str, str] = Field(default_factory=dict)
    health_path: str = "/health"
    progress: Progress | None = None
    #: Words that other versions take -> what says the same to this one, empty where that is this version's default.
    former_arguments: Mapping[str, str] = Field(default_factory=dict)

    @property
    def launchable(self) -> bool:
        """Whether a command line can be made for it."""
        return bool(self.spellings)

    @property
    def parser(self) -> VllmParser | None:
        """What the version takes; ``None`` where nobody has asked it."""
        return load_parser(self.version)

    @property
    def quantization(self) -> Mapping[str, int]:
        """Method -> least compute capability in tenths; empty where nobody has asked this version."""
        return self.parser.quantization if self.parser else {}

    @property
    def architectures(self) -> frozenset[str]:
        """The model architectures that this version has code for."""
        return self.parser.architectures if self.parser else frozenset()

    def words(self, setting: str, value: str) -> tuple[str, ...] | None:
        """The words that say ``setting`` with this value; ``None`` where this version has none (see ``json_arguments`` too)."""
        spelling = self.spellings.get(setting)
        if isinstance(spelling, str):
            return spelling, value
        return None if spelling is None else spelling.get(value)

    def json_key(self, setting: str) -> tuple[str, str] | None:
        """The argument and the key in its JSON that say ``setting``."""
        return next(((flag, keys[setting]) for flag, keys in self.json_arguments.items() if setting in keys), None)

    def settings(self) -> dict[str, str]:
        """Argument -> the setting that it spells; one that holds JSON has the setting's first part (``rope_scaling``)."""
        found: dict[str, str] = {}
        for setting, spelling in self.spellings.items():
            words = [spelling] if isinstance(spelling, str) else [word for value in spelling.values() for word in value]
            for word in words:
                if word.startswith("--"):
                    found.setdefault(word.partition("=")[0], setting)
        for flag, keys in self.json_arguments.items():
            found.setdefault(flag, next(iter(keys)).partition(".")[0])
        return found

    def answers_for(self, version: str) -> bool:
        """Whether this row is the one of ``version``."""
        if version == self.version or self.covers is None:
            return version == self.version
        try:
            return Version(version) in SpecifierSet(self.covers)
        except InvalidVersion:
            return False


@functools.cache
def load_parser(version: str) -> VllmParser | None:
    """``vllm_parsers/VERSION.yml``, read once."""
    if not re.fullmatch(r"[0-9]+(\.[0-9]+)+(\.post[0-9]+)?", version):
        return None
    file = resources.files(__package__).joinpath(f"vllm_parsers/{version}.yml")
    if not file.is_file():
        return None
    # The C loader reads the same YAML several times faster; not every build of PyYAML has it.
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return VllmParser.model_validate(yaml.load(file.read_text(encoding="utf-8"), Loader=loader))  # noqa: S506 - a safe loader
