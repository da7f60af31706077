"""llama.cpp: a release to build and an argv to run, spelled for the pinned build by the catalog and checked by its parser."""

from __future__ import annotations

import difflib
import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from v100ctl.catalog import Catalog, Distribution, LlamaCppBuild, LlamaCppParser, ParserFlag
from v100ctl.facts import Facts
from v100ctl.fleet import HostConfig, InstanceSpec, Settings, SourceSpec
from v100ctl.plan.argv import ArgvProblem
from v100ctl.plan.cuda import builder_image, toolchain
from v100ctl.plan.types import Proof, Release

ENGINES_DIR = "/opt/v100ctl/engines"
#: Bumped when the build script lays a release out differently, so that an old copy in a cache is not taken for a new one.
RELEASE_LAYOUT = 1
#: `llama_cpp_build_on` for a container on the controller.
CONTAINER = "container"
DEFAULT_CONTEXT_LENGTH = 4096
DEFAULT_PARALLEL = 1
#: More than any model has; works in every build, unlike the word `all`.
ALL_LAYERS = 99


def build_release(config: HostConfig, row: LlamaCppBuild, distribution: Distribution, facts: Facts, catalog: Catalog) -> Release:
    """The release that a host needs.

    Its id hashes everything that decides the bytes: source tree, patches, options, targets, backend, CUDA version, architectures,
    C library and machine. Where a toolkit lies on a build host, and whether compiled objects are kept, decides none.
    """
    git = next((item for item in config.llama_cpp_sources if item.git), None)
    commit = row.commit if git is None else str(git.commit)[:12]
    options = dict(row.cmake_options.common)
    options["LLAMA_BUILD_NUMBER"] = str(row.build)
    options["LLAMA_BUILD_COMMIT"] = commit
    architectures: list[str] = []
    if config.llama_cpp_backend == "cuda":
        options.update(row.cmake_options.cuda)
        options["GGML_CUDA_FORCE_MMQ"] = "ON" if config.llama_cpp_force_mmq else "OFF"
        options["CMAKE_CUDA_ARCHITECTURES"] = config.llama_cpp_cuda_architectures
        architectures = config.llama_cpp_cuda_architectures.split(";")
        parser = catalog.llama_cpp_parser(row.build)
        if config.llama_cpp_flash_attention_all_types and parser is not None:
            options.update(parser.cuda_flash_attention.everything)
    source: dict[str, Any] = {
        "archives": [
            *map(_place, config.llama_cpp_sources),
            *(archive.model_dump(exclude_none=True) for archive in row.archives),
        ],
        "tree_sha256": row.tree_sha256,
    }
    if git is not None:
        source = {"archives": [_place(git)], "tree_sha256": ""}
    if config.llama_cpp_patches is not None:
        source["patches_sha256"] = config.llama_cpp_patches.sha256
    build: dict[str, Any] = {
        "schema": "v100ctl/build/1",
        "engine": "llama_cpp",
        "build_number": row.build,
        "commit": commit,
        "backend": config.llama_cpp_backend,
        "source": source,
        "cmake_options": dict(sorted(options.items())),
        "targets": list(row.targets),
        "cuda_architectures": architectures,
        "libc": f"{facts.libc.name}-{facts.libc.version}",
        "machine": facts.machine,
        "licence": row.licence,
    }
    decides = {key: value for key, value in build.items() if key != "source"}
    decides |= {"tree_sha256": source["tree_sha256"], "layout": RELEASE_LAYOUT}
    if git is not None:
        decides["git"] = git.commit
    if config.llama_cpp_patches is not None:
        decides["patches_sha256"] = config.llama_cpp_patches.sha256
        source["patches"] = config.llama_cpp_patches.path
    if config.llama_cpp_backend == "cuda":
        decides["cuda"] = config.cuda_toolkit_version
        build["cuda"] = {**toolchain(config, facts, distribution, catalog), "bundle": list(row.cuda_beside.libraries)}
        # The libraries lie in the staged release, and once more in its archive.
        build["build_space_bytes"] = row.build_bytes + row.cuda_beside.build_bytes + 2 * row.cuda_beside.release_bytes
    packages = [*distribution.toolchain_packages]
    if config.llama_cpp_patches is not None:
        packages.append("patch")
    if config.llama_cpp_ccache:
        build["ccache"] = True
        packages += [distribution.ccache_package] if distribution.ccache_package else []
    if config.llama_cpp_build_on == CONTAINER:
        image = builder_image(config, facts, distribution, catalog)
        build["container"] = {**image, "packages": sorted({*image["packages"], *packages, "ccache"})}
    digest = hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()[:12]
    build_id = f"b{row.build}-{config.llama_cpp_backend}-{digest}"
    repository = distribution.toolchain_repository.get(facts.distribution.id)
    build["build_id"] = build_id
    return Release(
        engine="llama_cpp",
        build_id=build_id,
        path=f"{ENGINES_DIR}/llama_cpp/{build_id}",
        build=build,
        toolchain_packages=tuple(packages),
        toolchain_repositories=(repository,) if repository else (),
    )


def _place(source: SourceSpec) -> dict[str, Any]:
    """One place of the inventory as the build specification has it."""
    kind, key, value = next(
        (kind, key, value)
        for kind, key, value in (
            ("file", "path", source.path),
            ("url", "url", source.url),
            ("pypi", "requirement", source.pypi),
            ("git", "url", source.git),
        )
        if value is not None
    )
    found = {"kind": kind, key: value, "sha256": source.sha256, "strip": source.strip, "commit": source.commit}
    return {name: item for name, item in found.items() if item is not None}


def context_per_request(settings: Settings) -> int:
    """Tokens that one request may use."""
    return settings.context_length or DEFAULT_CONTEXT_LENGTH


class UnspelledSettingError(KeyError):
    """This build has no words for a setting with this value. ``args[0]`` is the setting's path (``speculative.depth``)."""

    def __init__(self, setting: str, value: str) -> None:
        super().__init__(setting)
        self.setting = setting
        self.value = value

    def builds(self, rows: Sequence[LlamaCppBuild]) -> tuple[int, ...]:
        """The builds that can say it, oldest first."""
        return tuple(row.build for row in rows if row.flags.words(self.setting, self.value) is not None)


#: Settings of other engines -> why they have no meaning here.
_MEANINGLESS = {
    "dtype": "llama.cpp computes in the types that the GGUF holds",
    "quantization": "a GGUF says itself how it is quantised",
    "gpu_memory_utilization": "llama.cpp takes what weights, cache and buffers need, not a share of the card",
    "swap_space_gib": "llama.cpp never moves a running request's cache to the host's memory",
    "enforce_eager": "whether llama.cpp uses CUDA graphs is decided when it is compiled (GGML_CUDA_GRAPHS)",
    "chunked_prefill": "llama.cpp always reads a prompt in pieces of `ubatch_size` tokens",
    "prefix_caching": "llama.cpp always keeps a slot's last prompt",
}
_VLLM_CACHE_TYPES = ("auto", "fp8", "fp8_e4m3", "fp8_e5m2")


def meaningless_settings(settings: Settings) -> dict[str, str]:
    """Settings that were given and that llama.cpp has no counterpart for -> why."""
    given = settings.model_dump(exclude_none=True)
    found = {name: why for name, why in _MEANINGLESS.items() if name in given}
    for name in ("kv_cache_type_k", "kv_cache_type_v"):
        if given.get(name) in _VLLM_CACHE_TYPES:
            found[name] = f"`{given[name]}` is a cache type of vLLM; llama.cpp has f16, q8_0 and other types of GGUF"
    return found


def _values(
    config: HostConfig,
    spec: InstanceSpec,
    threads: int,
    model_path: str,
    alias: str,
    draft_model_path: str | None,
    api_keys_file: str | None,
) -> Iterator[tuple[str, Any]]:
    settings = spec.settings
    parallel = settings.parallel or DEFAULT_PARALLEL
    on_card = config.llama_cpp_backend == "cuda"
    yield "model", model_path
    yield "served_model_name", alias
    yield "listen", spec.listen
    yield "port", spec.port
    yield "api_keys", api_keys_file
    # The engine's context is shared by its slots, so a request's own length is multiplied, unless the pool is one for all.
    yield "context_length", context_per_request(settings) * (1 if settings.kv_unified else parallel)
    # Explicit always: the engine's own default is several slots, which would divide the context.
    yield "parallel", parallel
    yield "kv_unified", settings.kv_unified
    yield "batch_size", settings.batch_size
    yield "ubatch_size", settings.ubatch_size
    yield "kv_cache_type_k", settings.kv_cache_type_k
    yield "kv_cache_type_v", settings.kv_cache_type_v
    yield "flash_attention", settings.flash_attention
    if on_card:
        yield "gpu_layers", ALL_LAYERS if settings.gpu_layers is None else settings.gpu_layers
        yield "split_mode", settings.split_mode
    yield "threads", settings.threads or threads
    yield "threads_batch", settings.threads_batch or settings.threads or threads
    yield "load_mode", settings.load_mode
    if settings.speculative:
        kind = settings.speculative.kind
        yield "speculative.kind", kind
        if kind == "draft":
            yield "speculative.model", draft_model_path
            if on_card:
                yield "speculative.gpu_layers", ALL_LAYERS
        if kind != "none":
            yield f"speculative.depth.{kind}", settings.speculative.depth
    if settings.rope_scaling:
        for name, value in settings.rope_scaling.model_dump(exclude_none=True).items():
            yield f"rope_scaling.{name}", value
    if settings.sampling:
        for name, value in settings.sampling.model_dump(exclude_none=True).items():
            yield f"sampling.{name}", value
    yield "chat_template", settings.chat_template
    yield "mmproj", settings.mmproj
    yield "log_requests", settings.log_requests
    yield "metrics", True if settings.metrics is None else settings.metrics


def default_threads(facts: Facts) -> int:
    """One thread a physical core that the host may use: hyper-threads slow llama.cpp's matrix work down."""
    counts = [count for count in (facts.cpu.physical_count, facts.cpu.usable_count) if count > 0]
    return min(counts, default=1)


def argv(
    config: HostConfig,
    spec: InstanceSpec,
    row: LlamaCppBuild,
    facts: Facts,
    *,
    release_path: str,
    model_path: str,
    alias: str,
    draft_model_path: str | None = None,
    api_keys_file: str | None = None,
    parser: LlamaCppParser | None = None,
    threads: int | None = None,
) -> tuple[str, ...]:
    """The exact words that start the server.

    Args:
        config: The host's configuration.
        spec: The instance.
        row: The build.
        facts: The host.
        release_path: Where the release lies on the host.
        model_path: Where the model lies there.
        alias: The name under which it is served.
        draft_model_path: Where the draft model lies, for ``speculative: {kind: draft}``.
        api_keys_file: Where its keys lie, one a line.
        parser: The build's parser, which tells what ``extra_args`` say about the log.
        threads: How many it uses where the settings do not say; one for each physical core of the host by default.

    Raises:
        UnspelledSettingError: this build has no words for a setting that was asked for.
        ValueError: a draft model is asked for and ``draft_model_path`` is missing.
    """
    words = [f"{release_path}/bin/llama-server"]
    speculative = spec.settings.speculative
    if speculative is not None and speculative.kind == "draft" and draft_model_path is None:
        raise ValueError("a draft model without its path")
    decided = _values(config, spec, threads or default_threads(facts), model_path, alias, draft_model_path, api_keys_file)
    for setting, value in decided:
        if value is None:
            continue
        text = _text(value)
        spelled = row.flags.words(setting, text)
        if spelled is None:
            raise UnspelledSettingError(setting, text)
        words += spelled
    for extra in row.flags.always:
        words += extra
    if config.llama_cpp_backend == "cuda" and spec.settings.log_requests is not False and _verbosity(spec, row, parser) is None:
        words += [row.proof.flag, str(row.proof.verbosity)]
    return (*words, *spec.extra_args)


def _verbosity(spec: InstanceSpec, row: LlamaCppBuild, parser: LlamaCppParser | None) -> int | None:
    """How much an instance logs by its ``extra_args``, in the engine's own measure; ``None`` where they do not say."""
    found: int | None = None
    if parser is None:
        return 0 if spec.extra_args else None
    for _, flag, values in split_argv(spec.extra_args, parser):
        names = set(flag.words) if flag else set()
        if row.proof.flag in names:
            found = int(values[0]) if values and values[0].lstrip("-").isdigit() else 0
        elif names & set(row.proof.verbose):
            found = row.proof.verbosity
        elif names & set(row.proof.disabled_by):
            return 0
    return found


def proof(config: HostConfig, spec: InstanceSpec, row: LlamaCppBuild, parser: LlamaCppParser | None) -> Proof:
    """What a running server has to have said about its cards. A log that is kept short on purpose can only be free of errors."""
    if config.llama_cpp_backend != "cuda":
        return Proof()
    verbosity = 0 if spec.settings.log_requests is False else _verbosity(spec, row, parser)
    layers = ALL_LAYERS if spec.settings.gpu_layers is None else spec.settings.gpu_layers
    must: tuple[str, ...] = ()
    must_not = row.proof.forbidden
    if verbosity is None or verbosity >= row.proof.verbosity:
        whole = layers >= ALL_LAYERS
        must = (row.proof.all_layers if whole else row.proof.some_layers.replace("LAYERS", str(layers)),)
        must_not += (row.proof.not_all_layers,) if whole else ()
    return Proof(on_cards=layers > 0, must_log=must, must_not_log=must_not)


def parser_argv(argv: Sequence[str]) -> tuple[str, ...]:
    """The command that has the engine's own parser read ``argv``: it exits 1 on a word that it does not take, else with 0.

    Neither a model nor a card is touched. Rules between arguments are not looked at: those are met when the server starts.
    The parser opens the file of keys, which is written only after it has agreed: an empty one stands for it.
    """
    return (
        *("/dev/null" if before == "--api-key-file" else word for before, word in zip(("", *argv), argv, strict=False)),
        "--help",
    )


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return repr(value).removesuffix(".0") if isinstance(value, float) else str(value)


def settings_by_flag(row: LlamaCppBuild, parser: LlamaCppParser | None) -> dict[str, str]:
    """Every word of the build's parser that says what a setting says -> that setting; short and negated spellings too."""
    found = row.flags.settings()
    if parser is not None:
        for word, setting in list(found.items()):
            flag = parser.flag(word)
            found |= dict.fromkeys(flag.words if flag else (), setting)
    return found


def moves_memory(words: Sequence[str], row: LlamaCppBuild, parser: LlamaCppParser | None) -> str | None:
    """The first word that changes what lies where on the cards, and how large it is, in a way that no setting says."""
    if parser is None:
        return next((word for word in words if word in row.flags.moves_memory), None)
    moving = {name for word in row.flags.moves_memory if (flag := parser.flag(word)) for name in flag.words}
    return next((word for word, flag, _ in split_argv(words, parser) if flag and moving & set(flag.words)), None)


def split_argv(words: Sequence[str], parser: LlamaCppParser) -> Iterator[tuple[str, ParserFlag | None, tuple[str, ...]]]:
    """An argv without its program, cut as the build's parser cuts it: a word, the argument that it names, the words it takes.

    An argument takes what follows, whatever that looks like. A word that names none stands alone.
    """
    position = 0
    while position < len(words):
        flag = parser.flag(words[position])
        following = tuple(words[position + 1 : position + 1 + (flag.arity if flag else 0)])
        yield words[position], flag, following
        position += 1 + len(following)


def check_argv(argv: Sequence[str], parser: LlamaCppParser) -> list[ArgvProblem]:
    """What the build's own parser would say about an argv, by what its source says that it takes.

    The engine stops at the first problem; this goes on, so that all are seen at once. Rules between arguments, files that are not
    there and values that only the engine understands (a JSON text, a device's name) are not looked at.

    Args:
        argv: The program and its words, as in a unit.
        parser: The build's parser.
    """
    problems: list[ArgvProblem] = []
    for word, flag, values in split_argv(argv[1:], parser):
        if flag is None:
            problems.append(_unknown(word, parser))
        elif len(values) < flag.arity:
            problems.append(ArgvProblem(word, "missing-value", f"`{word}` needs {_needs(flag)}, and nothing follows"))
        elif flag.removed:
            problems.append(ArgvProblem(word, "refused", f"`{word}`: {flag.removed}", next(iter(flag.instead), None)))
        else:
            if flag.needs_option:
                message = f"`{word}` works only in a build with {flag.needs_option}, which releases of this toolkit are not"
                problems.append(ArgvProblem(word, "refused", message))
            elif flag.exits:
                problems.append(ArgvProblem(word, "refused", f"`{word}` prints something and ends: no server starts"))
            elif flag.deprecated:
                problems.append(ArgvProblem(word, "deprecated", f"`{word}`: {flag.deprecated}", next(iter(flag.instead), None)))
            if flag.arity == 1:
                problems += _value_problems(word, values[0], flag, parser)
    return problems


def _needs(flag: ParserFlag) -> str:
    return "two values" if flag.arity == 2 else "a value"


def _unknown(word: str, parser: LlamaCppParser) -> ArgvProblem:
    normal = parser.normal(word)
    if normal in parser.former_flags:
        meant = parser.former_flags[normal]
        return ArgvProblem(word, "unknown", f"build {parser.build} has no `{word}`; it has `{meant}`", meant)
    name, equals, value = normal.partition("=")
    known = parser.flag(name) if equals else None
    if known is not None:
        meant = f"{name} {value}" if known.arity else name
        return ArgvProblem(word, "unknown", f"`{word}`: llama.cpp takes a value as a word of its own", meant)
    if not word.startswith("-"):
        return ArgvProblem(word, "unknown", f"`{word}` belongs to no argument")
    if normal in parser.other_programs:
        message = f"`{word}` is an argument of other llama.cpp programs; `llama-server` does not take it"
        return ArgvProblem(word, "unknown", message)
    near = difflib.get_close_matches(normal, sorted(parser.words), n=1, cutoff=0.75)
    return ArgvProblem(word, "unknown", f"build {parser.build} has no argument `{word}`", near[0] if near else None)


#: What the C library's `strtol` and `strtof` read at the beginning of a text; they leave the rest.
_INTEGER = re.compile(r"[ \t\n\v\f\r]*[+-]?[0-9]+")
_FLOAT = re.compile(
    r"[ \t\n\v\f\r]*[+-]?(?:0[xX](?:[0-9a-fA-F]+\.?[0-9a-fA-F]*|\.[0-9a-fA-F]+)(?:[pP][+-]?[0-9]+)?"
    r"|(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?|[iI][nN][fF](?:[iI][nN][iI][tT][yY])?|[nN][aA][nN])"
)


def _value_problems(word: str, value: str, flag: ParserFlag, parser: LlamaCppParser) -> Iterator[ArgvProblem]:
    swallowed = f"; `{word}` takes the next word for its value" if parser.flag(value) is not None else ""
    if flag.choices is not None:
        parts = value.split(flag.separator) if flag.separator else [value]
        if flag.list_end in parts:
            parts = parts[: parts.index(flag.list_end)]
        wrong = [part for part in parts if part not in flag.choices]
        if not wrong:
            return
        if not flag.or_integer:
            near = _nearest_choice(wrong[0], flag)
            allowed = ", ".join(choice for choice in flag.choices if choice)
            yield ArgvProblem(
                word,
                "value",
                f"`{word}` does not take `{wrong[0]}`, only {allowed}{swallowed}",
                f"{word} {near}" if near else None,
            )
            return
    if flag.type == "string" or flag.type is None:
        return
    match = (_INTEGER if flag.type == "int" else _FLOAT).match(value)
    if match is None:
        kind = "a whole number" if flag.type == "int" else "a number"
        words = f" or {', '.join(flag.choices)}" if flag.choices else ""
        yield ArgvProblem(word, "value", f"`{word}` takes {kind}{words}, not `{value}`{swallowed}")
        return
    if flag.type == "int":
        number = int(match[0])
        if not -(2**31) <= number < 2**31:
            yield ArgvProblem(word, "value", f"`{word} {value}` is beyond what the engine can hold (32 bits)")
            return
        if (
            (flag.minimum is not None and number < flag.minimum)
            or (flag.maximum is not None and number > flag.maximum)
            or number == flag.excluded
        ):
            yield ArgvProblem(word, "value", f"`{word}` does not take {number}{_bounds(flag)}")
            return
    if match.end() != len(value):
        read = match[0].strip()
        message = f"`{word} {value}` is taken as {read}: the engine reads the number and leaves the rest out"
        yield ArgvProblem(word, "deprecated", message, f"{word} {read}")


def _nearest_choice(value: str, flag: ParserFlag) -> str | None:
    found = difflib.get_close_matches(value.lower(), flag.choices or (), n=1, cutoff=0.6)
    if found:
        return found[0]
    return "on" if "on" in (flag.choices or ()) and value.startswith("-") else None


def _bounds(flag: ParserFlag) -> str:
    bounds = [f"{flag.minimum} or more"] if flag.minimum is not None else []
    bounds += [f"at most {flag.maximum}"] if flag.maximum is not None else []
    bounds += [f"not {flag.excluded}"] if flag.excluded is not None else []
    return f": {', '.join(bounds)}" if bounds else ""
