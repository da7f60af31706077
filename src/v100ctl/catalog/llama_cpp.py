"""Typed rows of ``llama_cpp.yml`` and of ``llama_cpp_parsers/``: what each build of llama.cpp is and takes."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from datetime import date
from typing import Literal

from pydantic import Field

from v100ctl.catalog.rows import Progress, Row


class Archive(Row):
    """One place that serves an engine's source; ``strip`` is the folder in it that is the source tree."""

    kind: Literal["url", "pypi"]
    strip: str
    url: str | None = None
    requirement: str | None = None
    sha256: str | None = None


class CmakeOptions(Row):
    """Options of a build: ``common`` always, ``cuda`` with that backend; and the oldest CMake that takes it."""

    source: str
    cmake_min: str
    cuda_cmake_min: str
    common: dict[str, str]
    cuda: dict[str, str] = Field(default_factory=dict)


#: A flag that the value follows, or the words for each value (of a boolean or an enumeration); no words: nothing needs saying.
Spelling = str | dict[str, tuple[str, ...]]


class LlamaCppFlags(Row):
    """How one build spells each setting, by the setting's path in the inventory (``sampling.top_k``).

    ``always`` are the words that every launch gets. ``shared`` are flags that mean more than the setting they spell, so that a
    user may still give them in ``extra_args``. ``moves_memory`` are those that no setting says and that change what lies where
    and how large it is; ``loads_model`` those that load another model than ``model``.
    """

    source: str
    always: tuple[tuple[str, ...], ...] = ()
    shared: tuple[str, ...] = ()
    moves_memory: tuple[str, ...] = ()
    loads_model: tuple[str, ...] = ()
    spellings: dict[str, Spelling]

    def flag(self, setting: str) -> Spelling | None:
        """The spelling of ``setting``, ``None`` where this build has none."""
        return self.spellings.get(setting)

    def words(self, setting: str, value: str) -> tuple[str, ...] | None:
        """The words that say ``setting`` with this value, ``None`` where this build cannot say it."""
        spelling = self.spellings.get(setting)
        if isinstance(spelling, str):
            return spelling, value
        return None if spelling is None else spelling.get(value)

    def settings(self) -> dict[str, str]:
        """Flag -> the setting that it spells. Flags that mean more than that (``shared``) are left out."""
        found: dict[str, str] = dict.fromkeys(self.loads_model, "model")
        for setting, spelling in self.spellings.items():
            words = [spelling] if isinstance(spelling, str) else [word for value in spelling.values() for word in value]
            found |= {word: setting for word in words if word.startswith("-") and word not in self.shared}
        return found


class LlamaCppDefaults(Row):
    """What a build does where nothing is said. ``parallel`` -1: ``auto_parallel`` slots; ``context_length`` 0: the model's."""

    source: str
    context_length: int
    parallel: int
    auto_parallel: int
    batch_size: int
    ubatch_size: int
    kv_cache_type: str
    flash_attention: Literal["on", "off", "auto"]
    speculative_depth: int


class CudaFlashAttention(Row):
    """Which K and V cache types have flash-attention kernels in a CUDA build with the options of this row.

    A build for all types (``llama_cpp_flash_attention_all_types``) has them for every pair of ``all_types``.

    ``pairs`` (``K-V``) are compiled. Of the others those of two ``convertible`` types are turned into f16 at every step, which is
    slow; the rest run on the processor, which is far slower.
    """

    source: str
    pairs: tuple[str, ...]
    all_types: tuple[str, ...]
    convertible: tuple[str, ...] = ()

    def kernel(self, type_k: str, type_v: str, *, all_types: bool = False) -> Literal["compiled", "converted", "cpu"]:
        """How a pair of cache types is computed on the card."""
        if f"{type_k}-{type_v}" in self.pairs or (all_types and {type_k, type_v} <= set(self.all_types)):
            return "compiled"
        return "converted" if {type_k, type_v} <= set(self.convertible) else "cpu"


class CudaSizes(Row):
    """What a CUDA build and its release take on disk beside those for the processor.

    ``libraries`` are those of the toolkit that the release brings along, as their names begin.
    """

    source: str
    build_bytes: int
    release_bytes: int
    libraries: tuple[str, ...]


class LlamaCppProof(Row):
    """What a build with CUDA logs about its cards, as regular expressions, and at which verbosity.

    ``all_layers``: every layer is on cards; ``some_layers``: ``LAYERS`` of them are there; ``not_all_layers``: some are not.
    Those lines come with at least ``verbosity`` for ``flag``. ``forbidden`` are errors, which always come; ``disabled_by`` are
    flags that keep all of it out of the log.
    """

    source: str
    flag: str
    verbosity: int
    verbose: tuple[str, ...]
    disabled_by: tuple[str, ...]
    all_layers: str
    some_layers: str
    not_all_layers: str
    forbidden: tuple[str, ...]


class Quantize(Row):
    """The types that ``llama-quantize`` of a build makes, and those of them that it refuses without an importance matrix."""

    source: str
    types: tuple[str, ...]
    needs_imatrix: tuple[str, ...]


class LlamaCppBuild(Row):
    """One build of llama.cpp that can be compiled and launched."""

    build: int
    commit: str
    licence: str
    source: str
    archives: tuple[Archive, ...]
    tree_sha256: str
    targets: tuple[str, ...]
    quantize: Quantize
    build_bytes: int
    release_bytes: int
    cuda_beside: CudaSizes
    cmake_options: CmakeOptions
    cpu_level: str
    flags: LlamaCppFlags
    #: Flags whose value is a secret; every user of a host can read a command line.
    secret_flags: tuple[str, ...]
    defaults: LlamaCppDefaults
    quantised_v_needs_flash_attention: bool
    cuda_flash_attention: CudaFlashAttention
    #: Whether a CUDA build of it splits single tensors over cards (``--split-mode row``); the parser takes the word either way.
    cuda_row_split: bool
    health_path: str
    progress: Progress
    proof: LlamaCppProof
    #: Words that this build refuses and that tutorials use -> what says the same to it.
    former_flags: dict[str, str] = Field(default_factory=dict)


class ParserFlag(Row):
    """One argument of ``llama-server``, as the build's own parser has it.

    ``arity`` is the number of words that follow. ``choices`` are the only values taken (with ``separator``: any of them, joined
    by it; with ``or_integer``: a whole number too); ``None`` means that the parser takes any text, or any number of ``type``.
    ``removed`` and ``deprecated`` say what happens to an argument that the build no longer wants, ``instead`` what it has for it.
    """

    names: tuple[str, ...]
    negated: tuple[str, ...] = ()
    arity: Literal[0, 1, 2]
    type: Literal["int", "float", "string"] | None = None
    hint: str | None = None
    choices: tuple[str, ...] | None = None
    or_integer: bool = False
    separator: str | None = None
    #: A choice after which the rest of a list is not read.
    list_end: str | None = None
    minimum: int | None = None
    maximum: int | None = None
    excluded: int | None = None
    env: str | None = None
    programs: tuple[str, ...]
    removed: str | None = None
    deprecated: str | None = None
    instead: tuple[str, ...] = ()
    reads_file: bool = False
    exits: bool = False
    needs_option: str | None = None

    @property
    def words(self) -> tuple[str, ...]:
        """Every spelling, the negated ones included."""
        return (*self.names, *self.negated)

    @property
    def name(self) -> str:
        """The long spelling that the engine lists first."""
        return next((name for name in self.names if name.startswith("--")), self.names[0])


class CmakeRemoved(Row):
    """A CMake option that is gone: the configure run stops (``fatal``), sets the new one, or only warns (``ignored``)."""

    effect: Literal["fatal", "renamed", "ignored"]
    instead: str | None = None


class CudaFlashAttentionOption(Row):
    """The CMake option that chooses the compiled pairs of cache types, and its default."""

    option: str
    default: str

    @property
    def everything(self) -> dict[str, str]:
        """The option that compiles every pair."""
        return {self.option: "all" if ";" in self.default else "ON"}


class LlamaCppParser(Row):
    """What one build's own source says that it takes; made by ``extract_llama_cpp.py``."""

    as_of: date
    build: int
    source: str
    kv_cache_types: tuple[str, ...]
    cuda_flash_attention: CudaFlashAttentionOption
    #: Option -> default; ``${NAME}`` where that depends on the machine.
    cmake_options: dict[str, str]
    cmake_removed: dict[str, CmakeRemoved]
    architectures: frozenset[str]
    tensor_types: frozenset[str]
    quantisations: frozenset[str]
    #: Flags that other programs of the build take and ``llama-server`` does not.
    other_programs: frozenset[str]
    flags: tuple[ParserFlag, ...]
    #: From the build's row in ``llama_cpp.yml``: words that it refuses -> what says the same to it.
    former_flags: dict[str, str] = Field(default_factory=dict)

    @functools.cached_property
    def _by_word(self) -> Mapping[str, ParserFlag]:
        return {word: flag for flag in self.flags for word in flag.words}

    @staticmethod
    def normal(word: str) -> str:
        """A word as the parser compares it: ``_`` in a long flag is read as ``-``."""
        return word.replace("_", "-") if word.startswith("--") else word

    def flag(self, word: str) -> ParserFlag | None:
        """The argument that ``word`` names, ``None`` where the build has none."""
        return self._by_word.get(self.normal(word))

    @property
    def words(self) -> frozenset[str]:
        """Every flag that the build knows, in all spellings."""
        return frozenset(self._by_word)
