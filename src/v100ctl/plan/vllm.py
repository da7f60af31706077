"""vLLM: an argv and an environment to run, spelled for the pinned version by the catalog, and what its parser says of an argv."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from v100ctl.catalog import Distribution
from v100ctl.catalog.vllm import VllmArgument, VllmParser, VllmRow
from v100ctl.catalog.vllm_lock import shipped_lock_for
from v100ctl.facts import Facts
from v100ctl.fleet import HostConfig, InstanceSpec, Settings
from v100ctl.plan.argv import ArgvProblem
from v100ctl.plan.llama_cpp import ENGINES_DIR
from v100ctl.plan.types import Release

#: The server as a module: unlike the script `vllm`, it does not hold the path of the interpreter that it was installed with.
MODULE = "vllm.entrypoints.openai.api_server"
#: The file of a release that has its parser read a command line and ends (`roles/vllm/files/read_arguments.py`).
PARSER = "read_arguments.py"
#: Below it each instance has a folder of its own for what it compiles while it runs.
CACHE_ROOT = "/var/cache"
CACHE_DIR = f"{CACHE_ROOT}/v100ctl"
#: Bumped when the role lays a release out differently.
RELEASE_LAYOUT = 1
#: Tokens that one request may use where the inventory says nothing; every engine of this toolkit has the same.
DEFAULT_CONTEXT_LENGTH = 4096


def own_build(config: HostConfig) -> bool:
    """Whether the user's own requirements are installed, of which the catalog knows nothing."""
    return bool(config.vllm_requirements)


def host_python(facts: Facts) -> str:
    """The minor version of the host's Python (``3.11``), empty where it is not known."""
    return ".".join(facts.python.version.split(".")[:2]) if facts.python.version else ""


def release(config: HostConfig, row: VllmRow, distribution: Distribution | None, facts: Facts) -> Release | None:
    """The release that a host needs; ``None`` where this version has no lock for its Python.

    Its id hashes everything that decides the files: the lock's lines for this Python, or the user's requirements file, and the
    machine.
    """
    python = host_python(facts)
    decides: dict[str, Any] = {"python": python, "machine": facts.machine, "layout": RELEASE_LAYOUT}
    if own_build(config):
        decides["file_sha256"] = config.vllm_requirements_sha256
    else:
        lock = shipped_lock_for(row.version, python) if row.lock is not None and python in row.lock.pythons else None
        if lock is None:
            return None
        decides["lock_sha256"] = hashlib.sha256(lock.encode()).hexdigest()
    digest = hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()[:12]
    name = "own" if own_build(config) else row.version
    build_id = f"{name}-py{python}-{digest}"
    path = f"{ENGINES_DIR}/vllm/{build_id}"
    build: dict[str, Any] = {
        "schema": "v100ctl/build/1",
        "engine": "vllm",
        "build_id": build_id,
        "path": path,
        "version": "" if own_build(config) else row.version,
        # Where it lies decides nothing: its minor version does.
        "interpreter": facts.python.executable,
        **decides,
        # Looked for in PyTorch, in vLLM's own libraries and in xformers' before the release gets its name.
        "architectures": ["sm_70"],
        "environment": dict(row.environment),
        "download_bytes": row.lock.download_bytes if row.lock and not own_build(config) else 0,
        "release_bytes": row.lock.release_bytes if row.lock and not own_build(config) else 0,
    }
    return Release(
        engine="vllm",
        build_id=build_id,
        path=path,
        build=build,
        toolchain_packages=distribution.python_packages if distribution else (),
    )


class UnspelledSettingError(KeyError):
    """This version has no words for a setting with this value. ``args[0]`` is the setting's path (``sampling.top_k``)."""

    def __init__(self, setting: str, value: str) -> None:
        super().__init__(setting)
        self.setting = setting
        self.value = value

    def versions(self, rows: Sequence[VllmRow]) -> tuple[str, ...]:
        """The versions that can say it, oldest first."""
        return tuple(row.version for row in rows if row.words(self.setting, self.value) is not None or _in_json(row, self))


def _in_json(row: VllmRow, error: UnspelledSettingError) -> bool:
    values = row.json_values.get(error.setting)
    return row.json_key(error.setting) is not None and (values is None or error.value in values)


#: Settings of other engines -> why they have no meaning here.
_MEANINGLESS = {
    "kv_unified": "vLLM keeps the cache of all requests in one pool, always",
    "ubatch_size": "vLLM reads `batch_size` tokens in one step and has no smaller unit",
    "flash_attention": "vLLM chooses the attention kernel by the card; below compute capability 8.0 that is xformers",
    "gpu_layers": "vLLM keeps the whole model on the cards",
    "split_mode": "vLLM splits every layer over `gpus` (tensor parallel)",
    "threads_batch": "vLLM computes on the card; `threads` sets what little runs on the processor",
    "load_mode": "vLLM copies the weights to the card and keeps nothing of the file",
    "mmproj": "vLLM reads the projector from the model's own folder",
}
_KV_CACHE_TYPES = ("auto", "fp8", "fp8_e4m3", "fp8_e5m2")


def meaningless_settings(settings: Settings, row: VllmRow | None = None) -> dict[str, str]:
    """Settings that were given and that vLLM (of this version) has no counterpart for -> why.

    One value per process holds for all that is left: "0.85 while loading, then 0.96" cannot be said to vLLM.
    """
    given = settings.model_dump(exclude_none=True)
    found = {name: why for name, why in _MEANINGLESS.items() if name in given}
    for name in ("kv_cache_type_k", "kv_cache_type_v"):
        if given.get(name, "auto") not in _KV_CACHE_TYPES:
            found[name] = f"`{given[name]}` is a cache type of llama.cpp; vLLM has {', '.join(_KV_CACHE_TYPES)}"
    if row is not None and row.launchable:
        for name in given.get("sampling", {}):
            setting = f"sampling.{name}"
            if row.json_key(setting) is None and row.words(setting, "") is None:
                found[setting] = f"vLLM {row.version} takes it from each request, or from the model's generation_config.json"
    return found


def context_per_request(settings: Settings) -> int:
    """Tokens that one request may use."""
    return settings.context_length or DEFAULT_CONTEXT_LENGTH


def requests_at_once(settings: Settings, row: VllmRow) -> int:
    """Sequences of one step at most; more wait."""
    return settings.parallel or (row.defaults.parallel if row.defaults else 1)


def tokens_per_step(settings: Settings, row: VllmRow) -> int:
    """Tokens of one step at most. Without chunked prefill a step takes whole prompts, so the context is the least."""
    least = row.defaults.batch_size_min if row.defaults else 0
    return settings.batch_size or max(context_per_request(settings), least)


def _values(
    spec: InstanceSpec, row: VllmRow, model_path: str, alias: str, gpu_count: int, draft_model_path: str | None
) -> Iterator[tuple[str, Any]]:
    settings = spec.settings
    yield "model", model_path
    yield "served_model_name", alias
    yield "listen", spec.listen
    yield "port", spec.port
    if gpu_count > 1:
        yield "tensor_parallel", gpu_count
    yield "context_length", context_per_request(settings)
    yield "parallel", settings.parallel
    yield "batch_size", settings.batch_size
    yield "kv_cache_type_k", settings.kv_cache_type_k or settings.kv_cache_type_v
    # Always said: `auto` would take bfloat16 from the model's own config.
    yield "dtype", settings.dtype or (row.defaults.dtype if row.defaults else None)
    yield "quantization", settings.quantization
    yield "gpu_memory_utilization", settings.gpu_memory_utilization
    yield "swap_space_gib", settings.swap_space_gib
    yield "enforce_eager", settings.enforce_eager
    # Always said: a long context would turn it on, and on Volta it ends the process.
    yield "chunked_prefill", settings.chunked_prefill or False
    yield "prefix_caching", settings.prefix_caching or False
    speculative = settings.speculative
    if speculative is not None and speculative.kind != "none":
        yield "speculative.kind", speculative.kind
        yield "speculative.model", draft_model_path if speculative.kind == "draft" else None
        yield "speculative.depth", speculative.depth
    if settings.rope_scaling is not None:
        scaling = settings.rope_scaling.model_dump(exclude_none=True)
        if scaling["kind"] == "none":
            del scaling["kind"]
        for name, value in scaling.items():
            yield f"rope_scaling.{name}", value
    if settings.sampling is not None:
        for name, value in settings.sampling.model_dump(exclude_none=True).items():
            yield f"sampling.{name}", value
    yield "chat_template", settings.chat_template
    # Prompts belong into no journal unless somebody asks for them.
    yield "log_requests", settings.log_requests or False
    yield "metrics", True if settings.metrics is None else settings.metrics


def argv(
    spec: InstanceSpec,
    row: VllmRow,
    *,
    release_path: str,
    model_path: str,
    alias: str,
    gpu_count: int = 1,
    draft_model_path: str | None = None,
) -> tuple[str, ...]:
    """The exact words that start the server.

    Args:
        spec: The instance.
        row: The version.
        release_path: Where the release (a virtual environment) lies on the host.
        model_path: Where the model lies there: a folder, or one GGUF file.
        alias: The name under which it is served.
        gpu_count: How many cards it is spread over.
        draft_model_path: Where the draft model lies, for ``speculative: {kind: draft}``.

    Raises:
        UnspelledSettingError: this version has no words for a setting that was asked for.
        ValueError: a draft model is asked for and ``draft_model_path`` is missing.
    """
    speculative = spec.settings.speculative
    if speculative is not None and speculative.kind == "draft" and draft_model_path is None:
        raise ValueError("a draft model without its path")
    words = [f"{release_path}/bin/python", "-m", MODULE]
    documents: dict[str, dict[str, Any]] = {}
    for setting, value in _values(spec, row, model_path, alias, gpu_count, draft_model_path):
        if value is None:
            continue
        text = _text(value)
        spelled = row.words(setting, text)
        if spelled is not None:
            words += spelled
            continue
        key = row.json_key(setting)
        values = row.json_values.get(setting)
        if key is None or (values is not None and text not in values):
            raise UnspelledSettingError(setting, text)
        documents.setdefault(key[0], {})[key[1]] = values[text] if values else value
    words += row.quantization_words.get((spec.settings.quantization or "").lower(), ())
    for flag, document in documents.items():
        words += [flag, json.dumps(document, separators=(", ", ": "))]
    for extra in row.always:
        words += extra
    return (*words, *spec.extra_args)


def cache_directory(instance: str) -> str:
    """Where an instance may write: kernels that Triton compiles are loaded from there, so it must not be mounted ``noexec``."""
    return f"{CACHE_DIR}/{instance}"


def environment(instance: str, spec: InstanceSpec, row: VllmRow) -> dict[str, str]:
    """What the server finds in its environment; the cards (``CUDA_VISIBLE_DEVICES``, by index) and keys are added on the host.

    Everything that writes below the home of its user is led into the instance's own cache: its unit can write nowhere else.
    """
    cache = cache_directory(instance)
    found = {
        **row.environment,
        "TRITON_CACHE_DIR": f"{cache}/triton",
        "XDG_CACHE_HOME": cache,
        "XDG_CONFIG_HOME": f"{cache}/config",
    }
    if spec.settings.threads is not None:
        found["OMP_NUM_THREADS"] = str(spec.settings.threads)
    return found


def parser_argv(argv: Sequence[str]) -> tuple[str, ...]:
    """The command that has the release's own parser read ``argv``: it ends with 0 where that takes every word."""
    interpreter, _, _, *arguments = argv
    return (interpreter, "-B", interpreter.removesuffix("bin/python") + PARSER, *arguments)


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return repr(value).removesuffix(".0") if isinstance(value, float) else str(value)


# What the version's own parser says of an argv.
# --------------------------------------------------------------------------------------------------------------------


def arguments_of(words: Sequence[str]) -> tuple[str, list[str]]:
    """A command line as ``("serve" or "module", its arguments)``, without the program and what starts it."""
    for position, word in enumerate(words[:4]):
        if word == MODULE or word.endswith("/openai/api_server.py"):
            return "module", list(words[position + 1 :])
        if word == "serve":
            return "serve", list(words[position + 1 :])
    return "module", list(words[1:])


Resolved = tuple[VllmArgument | None, str | None, tuple[str, ...]]


def _resolve(word: str, parser: VllmParser) -> Resolved:
    """What a word that starts with a hyphen names: (argument, the value inside the word, all spellings that it may stand for)."""
    known = parser.by_word
    name, equals, value = word.partition("=")
    inside = value if equals else None
    if word.startswith("--"):
        found = parser.candidates(name)
    elif word in known:
        return known[word], None, (word,)
    elif equals and name in known:
        return known[name], inside, (name,)
    else:
        # `-q4` is `-q 4`; `-spec-draft` begins `-spec-draft-tp`.
        short = (word[:2],) if word[:2] in known else ()
        begun = tuple(
            item for item in known if parser.words.abbreviations and item.startswith(name) and not item.startswith("--")
        )
        found = (*short, *begun)
        if found == short and short:
            return known[short[0]], word[2:], short
    return (known[found[0]] if len(found) == 1 else None), inside, found


_NEGATIVE_NUMBER = re.compile(r"-\d+|-\d*\.\d+")


def _is_value(word: str, parser: VllmParser) -> bool:
    """Whether argparse takes a word for a value: it names no argument, and starts with no hyphen, is a number or has a blank."""
    if not word.startswith("-") or word == "-":
        return True
    if word == "--" or _resolve(word, parser)[2]:
        return False
    return _NEGATIVE_NUMBER.fullmatch(word) is not None or " " in word


def split_argv(
    words: Sequence[str], parser: VllmParser
) -> Iterator[tuple[str, VllmArgument | None, tuple[str, ...], tuple[str, ...]]]:
    """Arguments (without the program) cut as argparse cuts them.

    Yields:
        The word, the argument that it names, the values that it gets, and all spellings that it may stand for. A word that is no
        argument stands alone, with ``None``.
    """
    position = 0
    while position < len(words):
        word = words[position]
        position += 1
        if word == "--":
            # What follows names no argument, whatever it looks like; the word itself is refused too (before Python 3.13).
            for rest in words[position - 1 :]:
                yield rest, None, (), ()
            return
        if _is_value(word, parser):
            yield word, None, (), ()
            continue
        argument, inside, spellings = _resolve(word, parser)
        if argument is None:
            yield word, None, (), spellings
            continue
        if inside is not None:
            yield word, argument, (inside,), spellings
            continue
        most = {"optional": 1, "any": len(words)}.get(argument.arity, 0) if isinstance(argument.arity, str) else argument.arity
        values: list[str] = []
        while len(values) < most and position < len(words) and _is_value(words[position], parser):
            values.append(words[position])
            position += 1
        yield word, argument, tuple(values), spellings


def moves_memory(words: Sequence[str], row: VllmRow) -> str | None:
    """The first word that changes what lies on the cards, and how large it is, in a way that no setting says."""
    if row.parser is None:
        return None
    for word, argument, _, _ in split_argv(words, row.parser):
        if argument is not None and set(argument.names) & set(row.moves_memory):
            return word.partition("=")[0]
    return None


def check_argv(words: Sequence[str], parser: VllmParser, *, former: Mapping[str, str] | None = None) -> list[ArgvProblem]:
    """What the version's own parser would say about an argv.

    The engine stops at the first problem; this goes on, so that all are seen at once. What a JSON text holds, and rules between
    arguments, are not looked at.

    Args:
        words: The program and its words, as in a unit: ``python -m vllm.entrypoints.openai.api_server`` or ``vllm serve``.
        parser: The version's parser.
        former: Words of other versions -> what says the same to this one (:attr:`VllmRow.former_arguments`).
    """
    style, arguments = arguments_of(words)
    former = former or {}
    problems: list[ArgvProblem] = []
    if "--config" in arguments:
        # The file's lines take the place of these two words, before anything is parsed.
        position = arguments.index("--config")
        if position + 1 == len(arguments):
            problems.append(ArgvProblem("--config", "missing-value", "`--config` needs a file, and nothing follows"))
        del arguments[position : position + 2]
    switch: str | None = None
    follows_unknown = False
    model_given = False
    for word, argument, values, spellings in split_argv(arguments, parser):
        if argument is None:
            is_word = word.startswith("-") and not _is_value(word, parser)
            if style == "serve" and not model_given and not is_word:
                model_given = True
            elif follows_unknown and not is_word:
                # The value of an argument that is told of already.
                pass
            elif style != "serve" or not word.startswith("--config="):
                problems.append(_unknown(word, spellings, parser, former, switch))
            follows_unknown = follows_unknown or is_word
            switch = None
            continue
        follows_unknown = False
        switch = word if argument.is_switch else None
        if style == "serve" and argument.names[0] == "--model":
            message = "`vllm serve` takes the model as its first word and refuses `--model`"
            problems.append(ArgvProblem(word, "refused", message, f"vllm serve {values[0]}" if values else None))
            continue
        problems += _value_problems(word, argument, values, spellings[0], former)
    needs_model = any(item.names[0] == "model_tag" and item.arity == 1 for item in parser.serve_arguments)
    if style == "serve" and needs_model and not model_given:
        problems.append(ArgvProblem("serve", "missing-value", "`vllm serve` needs the model as its first word"))
    return problems


def _unknown(
    word: str, spellings: tuple[str, ...], parser: VllmParser, former: Mapping[str, str], switch: str | None
) -> ArgvProblem:
    if not word.startswith("-"):
        if switch is None:
            return ArgvProblem(word, "unknown", f"`{word}` belongs to no argument")
        argument = parser.flag(switch)
        meant = None
        if argument is not None and word.lower() == "true":
            meant = argument.names[0]
        elif argument is not None and word.lower() == "false" and argument.negated:
            meant = argument.negated[0]
        message = f"`{switch}` is a switch and takes no value: `{word}` belongs to no argument"
        return ArgvProblem(word, "unknown", message, meant)
    if len(spellings) > 1:
        return ArgvProblem(word, "unknown", f"`{word}` may stand for {', '.join(f'`{item}`' for item in spellings)}")
    name = parser.normal(word)
    whole = former.get(word) if word in former else former.get(name)
    if whole is not None:
        told = f"it has `{whole}`" if whole else "leaving it out says the same"
        return ArgvProblem(word, "unknown", f"vLLM {parser.version} has no `{name}`; {told}", whole or None)
    return ArgvProblem(word, "unknown", f"vLLM {parser.version} has no argument `{name}`", parser.nearest(word))


def _value_problems(
    word: str, argument: VllmArgument, values: tuple[str, ...], spelling: str, former: Mapping[str, str]
) -> Iterator[ArgvProblem]:
    if argument.is_switch:
        if values:
            name, _, value = word.partition("=")
            meant = former.get(word)
            if meant is None and value.lower() == "true":
                meant = spelling
            elif meant is None and value.lower() == "false":
                meant = next(iter(argument.negated), None)
            yield ArgvProblem(word, "value", f"`{name}` is a switch and takes no value, so not `{value}`", meant or None)
            return
    elif not values and argument.arity != "optional":
        yield ArgvProblem(word, "missing-value", f"`{spelling}` needs a value, and nothing that is one follows")
        return
    elif isinstance(argument.arity, int) and len(values) < argument.arity:
        yield ArgvProblem(word, "missing-value", f"`{spelling}` needs {argument.arity} values")
        return
    for value in values:
        problem = argument.problem(value)
        if problem is not None:
            near = argument.nearest(value)
            yield ArgvProblem(word, "value", f"`{spelling}` {problem}", f"{spelling} {near}" if near else None)
    if argument.deprecated:
        meant = former.get(argument.names[0]) or None
        yield ArgvProblem(word, "deprecated", f"`{spelling}` is deprecated: it has no effect, or another name has it", meant)
