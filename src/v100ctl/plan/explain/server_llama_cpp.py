"""A ``llama-server`` command line, word by word as the build's own parser reads it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from v100ctl.catalog import Catalog
from v100ctl.catalog.history import FormerFlag, History, Verdict
from v100ctl.catalog.llama_cpp import LlamaCppBuild, LlamaCppParser, ParserFlag
from v100ctl.fleet import parse_config
from v100ctl.plan.argv import ArgvProblem
from v100ctl.plan.command_line import Command
from v100ctl.plan.explain.inventory import Wish, typed
from v100ctl.plan.explain.shared import (
    add_to,
    advice_applies,
    environment_findings,
    hidden,
    is_loopback,
    listening_finding,
    published_findings,
    rule_findings,
    secret_finding,
    settings_said,
    text_findings,
    unseen_finding,
    wrapper_findings,
)
from v100ctl.plan.explain.types import Card, CommandExplanation, Finding, is_opaque, ordered, plain_dash
from v100ctl.plan.llama_cpp import check_argv, split_argv
from v100ctl.plan.rules.instance import instance_rules, kv_kernel_rules

_PROGRAM = "llama-server"
#: What the engine listens on where nothing is said (common/common.h: hostname and port).
_DEFAULT_PORT = 8080
#: Flags that name a model which is not a file of the host.
_REMOTE_MODELS = ("--hf-repo", "--docker-repo")


@dataclass
class _Said:
    """A flag that the command line says, by its first long name."""

    words: tuple[str, ...]
    value: str | None
    positive: bool
    #: Where in the findings its own finding stands.
    index: int


@dataclass
class _Reading:
    """What has been read so far."""

    parser: LlamaCppParser
    row: LlamaCppBuild
    history: History
    card: Card
    wish: Wish
    findings: list[Finding] = field(default_factory=list)
    said: dict[str, _Said] = field(default_factory=dict)


def nearest_row(catalog: Catalog, build: int) -> LlamaCppBuild:
    """The row that spells settings for ``build``: its own, else that of the next build that has one."""
    rows = sorted(catalog.llama_cpp, key=lambda row: row.build)
    return next((row for row in rows if row.build >= build), rows[-1])


def explain_llama_server(command: Command, catalog: Catalog, build: int, history: History, card: Card) -> CommandExplanation:
    """Explain one command for one build.

    Raises:
        KeyError: nobody has read the source of this build.
    """
    parser = catalog.llama_cpp_parser(build)
    if parser is None:
        raise KeyError(build)
    row = nearest_row(catalog, build)
    command = hidden(command, row.secret_flags)
    reading = _Reading(parser, row, history, card, Wish("llama_cpp", str(build)))
    if history.programs.get(command.typed.rsplit("/", 1)[-1]):
        reading.findings.append(
            Finding(
                (command.typed,),
                "renamed",
                "program-renamed",
                meaning="the server",
                reason=history.programs[command.typed.rsplit("/", 1)[-1]],
                nearest="`llama-server`",
            )
        )
    _image(command, reading)
    reading.findings += wrapper_findings(command)
    environment = list(environment_findings(command, "llama_cpp", history, card))
    reading.findings += environment
    _words(command.words, reading)
    _environment_arguments(command.environment, reading)
    _gather(reading, environment)
    _rules(catalog, reading)
    _together(command, reading)
    findings = (*text_findings(command), *reading.findings)
    return CommandExplanation(
        program=_PROGRAM,
        typed=command.typed,
        line=command.line,
        engine="llama_cpp",
        version=str(build),
        findings=ordered(findings),
        inventory=reading.wish.snippet(),
    )


def _image(command: Command, reading: _Reading) -> None:
    if command.image is None:
        return
    row = next((item for item in reading.history.images if item.prefix in command.image), None)
    if row is not None:
        reading.findings.append(
            Finding((command.image,), row.verdict, "image", meaning="a container image", reason=row.reason, nearest=row.nearest)
        )


def _words(words: tuple[str, ...], reading: _Reading) -> None:
    """Every word, cut as the engine cuts it; typographic dashes are read as what they were."""
    read = tuple(_resolved(word, reading.parser) for word in words)
    position = 0
    skip = 0
    for word, flag, values in split_argv(read, reading.parser):
        original = words[position : position + 1 + len(values)]
        position += 1 + len(values)
        if skip:
            skip -= 1
            continue
        if flag is None:
            skip = _unknown(word, original, words[position:], reading)
        else:
            _known(word, flag, values, original, reading)
        if original[0] != word and reading.findings:
            reading.findings[-1] = replace(
                reading.findings[-1],
                verdict="refused",
                id="typographic-dash",
                reason=f"begins with a typographic dash of a web page: a stray word to the parser; explained as `{word}`",
                nearest=f"`{' '.join((word, *values))}`",
            )


def _resolved(word: str, parser: LlamaCppParser) -> str:
    candidates = plain_dash(word)
    return next((item for item in candidates if parser.flag(item)), candidates[0] if candidates else word)


def _unknown(word: str, original: tuple[str, ...], rest: tuple[str, ...], reading: _Reading) -> int:
    """A word that names no flag; returns how many words after it were its values."""
    parser, history = reading.parser, reading.history
    normal = parser.normal(word)
    former = history.former(normal)
    name, equals, value = word.partition("=")
    known = parser.flag(name) if equals and name.startswith("-") else None
    if former is not None or normal in parser.former_flags:
        taken = rest[: former.takes] if former else ()
        instead = parser.former_flags.get(normal) or (former.instead if former else None)
        _wish_former(former, reading)
        reading.findings.append(
            Finding(
                (*original, *taken),
                "refused",
                "former-flag",
                meaning=_former_meaning(former, instead, reading),
                reason=former.reason if former else f"llama-server {parser.build} does not take it",
                nearest=f"`{instead}`" if instead else None,
                settings=dict(former.settings) if former else {},
            )
        )
        return len(taken)
    if known is not None:
        said = f"{name} {value}" if known.arity else name
        reading.findings.append(
            Finding(
                original,
                "refused",
                "equals-sign",
                meaning=_meaning(known, reading),
                reason="llama-server takes a value as a word of its own",
                nearest=f"`{said}`",
            )
        )
        _note(name, known, (value,) if known.arity else (), original, reading)
        return 0
    if is_opaque(word):
        reading.findings.append(unseen_finding(original))
        return 0
    if not word.startswith("-"):
        reading.findings.append(_stray(original, reading))
        return 0
    (problem,) = check_argv((_PROGRAM, word), parser)
    taken = _values_after(rest)
    other = normal in parser.other_programs
    reading.findings.append(
        Finding(
            (*original, *taken),
            "refused",
            "other-program" if other else "unknown-flag",
            meaning=history.meaning((normal,)),
            reason="an argument of other llama.cpp programs, which `llama-server` does not take"
            if other
            else f"llama-server {parser.build} has no such argument",
            nearest=f"did you mean `{problem.meant}`?" if problem.meant else None,
        )
    )
    return len(taken)


def _values_after(rest: tuple[str, ...]) -> tuple[str, ...]:
    """The one word after an unknown flag that can only be its value."""
    return rest[:1] if rest and not rest[0].startswith("-") else ()


def _stray(words: tuple[str, ...], reading: _Reading) -> Finding:
    before = reading.findings[-1] if reading.findings else None
    after = (
        f"; `{before.words[0]}` before it takes no value"
        if before and len(before.words) == 1 and before.words[0][:1] == "-"
        else ""
    )
    if before is not None and before.id in ("swallowed-flag", "bare-flag") and len(before.words) == 2:
        after = f"; it was meant for `{before.words[-1]}`, which has gone as the value of `{before.words[0]}`"
        flag = reading.parser.flag(before.words[-1])
        if flag is not None and flag.arity == 1:
            _note(before.words[-1], flag, (words[0],), (before.words[-1], words[0]), reading)
    return Finding(words, "refused", "stray-word", reason=f"belongs to no argument{after}")


def _former_meaning(former: FormerFlag | None, instead: str | None, reading: _Reading) -> str | None:
    names = tuple(former.names) if former else ()
    found = reading.history.meaning(names)
    if found is None and instead:
        flag = reading.parser.flag(instead.split()[0])
        found = _meaning(flag, reading) if flag else None
    return found


def _wish_former(former: FormerFlag | None, reading: _Reading) -> None:
    if former is not None:
        reading.wish.settings |= former.settings


def _meaning(flag: ParserFlag, reading: _Reading) -> str:
    found = reading.history.meaning(flag.words)
    return found or "known to this build; `llama-server --help` describes it"


def _known(word: str, flag: ParserFlag, values: tuple[str, ...], original: tuple[str, ...], reading: _Reading) -> None:
    parser = reading.parser
    problems = check_argv((_PROGRAM, word, *values), parser)
    if any(is_opaque(value) for value in values):
        problems = [problem for problem in problems if problem.kind not in ("value", "deprecated")]
    meaning = _meaning(flag, reading)
    bare = next((row for row in reading.history.bare_flags if set(row.names) & set(flag.names)), None)
    swallowed = bool(values) and values[-1].startswith("-") and parser.flag(values[-1]) is not None
    deprecated = problems[0] if problems and problems[0].kind == "deprecated" else None
    if problems and deprecated is None:
        problem = problems[0]
        verdict, identity = _judged(problem, flag)
        reason = re.sub(rf"^`{re.escape(word)}`:? ?", "", problem.message)
        nearest = f"`{problem.meant}`" if problem.meant else None
        identity = "swallowed-flag" if swallowed else identity
        if bare is not None and problem.kind in ("value", "missing-value") and (swallowed or not values):
            has = f": here it takes `{values[-1]}`" if values else ", and nothing follows"
            identity, reason, nearest = "bare-flag", bare.reason + has, f"`{bare.instead}`"
            reading.wish.settings |= bare.settings
        reading.findings.append(Finding(original, verdict, identity, meaning, reason, nearest))
        if swallowed and (inner := parser.flag(values[-1])) is not None and inner.arity == 0:
            _note(values[-1], inner, (), values[-1:], reading)
        return
    if swallowed:
        reading.findings.append(
            Finding(
                original,
                "unwise",
                "swallowed-flag",
                meaning,
                f"it takes the next word whatever that is: its value is `{values[-1]}`, which is then no flag",
                "give the value that is missing",
            )
        )
        return
    earlier = reading.said.get(flag.name)
    if earlier is not None and earlier.index < len(reading.findings) and flag.name != "--spec-type" and not _repeatable(flag):
        old = reading.findings[earlier.index]
        reading.findings[earlier.index] = replace(
            old,
            verdict="ignored" if old.verdict == "ok" else old.verdict,
            id="said-again" if old.verdict == "ok" else old.id,
            reason=f"said again later: `{' '.join(original)}` counts" if old.verdict == "ok" else old.reason,
            settings={},
        )
    if deprecated is not None and values and deprecated.meant and deprecated.meant.startswith(f"{word} "):
        # `-c 8192abc`: what the engine reads of it.
        values = (deprecated.meant.removeprefix(f"{word} "),)
    _note(word, flag, values, original, reading)
    value = values[0] if values else None
    advice = next(
        (
            item
            for item in reading.history.advice
            if advice_applies(item, _polar(flag, word), value, reading.card)
            and (item.first is None or item.first <= parser.build)
            and (item.last is None or parser.build <= item.last)
        ),
        None,
    )
    found = Finding(original, "ok", "ok", meaning, settings=_settings_of(word, flag, values, reading))
    if advice is not None:
        found = replace(found, verdict=advice.verdict, id=advice.id, reason=advice.reason, nearest=advice.nearest)
    elif deprecated is not None:
        former = reading.history.former(LlamaCppParser.normal(word))
        meant = former.instead if former and former.instead else deprecated.meant
        found = replace(
            found,
            verdict="renamed" if meant else "ignored",
            id="deprecated-flag",
            reason=re.sub(rf"^`{re.escape(word)}`:? ?", "", deprecated.message),
            nearest=f"`{meant}`" if meant else None,
        )
    reading.findings.append(found)


def _judged(problem: ArgvProblem, flag: ParserFlag) -> tuple[Verdict, str]:
    if problem.kind == "refused":
        return (
            ("fails", "prints-and-ends") if flag.exits else ("refused", "not-compiled" if flag.needs_option else "removed-flag")
        )
    return "refused", {"value": "value-refused", "missing-value": "value-missing"}.get(problem.kind, "unknown-flag")


def _repeatable(flag: ParserFlag) -> bool:
    """Flags whose every mention counts; their handlers add to a list (common/arg.cpp)."""
    names = {
        "--lora",
        "--lora-scaled",
        "--override-kv",
        "--override-tensor",
        "--logit-bias",
        "--control-vector",
        "--image",
        "--header",
    }
    return bool(names & set(flag.names)) or flag.name.startswith(("--spec-draft-override", "--dry-sequence"))


def _polar(flag: ParserFlag, word: str) -> tuple[str, ...]:
    """The spellings that mean the same as ``word``: a flag's, or those of its negation."""
    normal = LlamaCppParser.normal(word)
    return flag.negated if normal in flag.negated else flag.names


def _note(word: str, flag: ParserFlag, values: tuple[str, ...], original: tuple[str, ...], reading: _Reading) -> None:
    positive = LlamaCppParser.normal(word) not in flag.negated
    reading.said[flag.name] = _Said(original, values[0] if values else None, positive, len(reading.findings))


def _settings_of(word: str, flag: ParserFlag, values: tuple[str, ...], reading: _Reading) -> dict[str, Any]:
    """The settings that a flag says, by the spellings of the build; numbers that slots divide are worked out later."""
    names = _polar(flag, word)
    for path, spelling in reading.row.flags.spellings.items():
        if path == "speculative.gpu_layers":
            # Not a setting of the inventory: the plan puts a draft model onto the card by itself.
            continue
        setting = "speculative.depth" if path.startswith("speculative.depth.") else path
        if isinstance(spelling, str):
            if spelling in names and len(values) == 1:
                value = typed(setting, values[0])
                return {setting: value} if value is not None else {}
            continue
        for meant, words in spelling.items():
            if len(words) == 1 + len(values) and words and words[0] in names and words[1:] == values:
                value = typed(setting, meant)
                return {setting: value} if value is not None else {}
    former = reading.history.former(LlamaCppParser.normal(word))
    return dict(former.settings) if former else {}


def _environment_arguments(environment: Mapping[str, str], reading: _Reading) -> None:
    """``LLAMA_ARG_*``: arguments given as variables; a flag on the command line wins."""
    by_variable = {flag.env: flag for flag in reading.parser.flags if flag.env}
    for name, value in environment.items():
        if any(row.name == name for row in reading.history.environment):
            continue
        flag = by_variable.get(name)
        words = (f"{name}={value}",)
        if flag is None:
            if name.startswith("LLAMA_ARG_"):
                reading.findings.append(
                    Finding(
                        words, "ignored", "unknown-variable", reason=f"llama-server {reading.parser.build} reads no such variable"
                    )
                )
            continue
        if flag.name in reading.said:
            reading.findings.append(
                Finding(
                    words, "ignored", "variable-overridden", _meaning(flag, reading), f"`{flag.name}` on the command line wins"
                )
            )
            continue
        if flag.arity == 0:
            true = value in ("on", "enabled", "true", "1")
            word = flag.names[0] if true or not flag.negated else flag.negated[0]
            values: tuple[str, ...] = ()
        else:
            word, values = flag.name, (value,)
        problems = [] if is_opaque(value) else check_argv((_PROGRAM, word, *values), reading.parser)
        _note(word, flag, values, words, reading)
        reading.findings.append(
            Finding(
                words,
                "refused" if any(problem.fatal for problem in problems) else "ok",
                "value-refused" if problems else "ok",
                _meaning(flag, reading),
                problems[0].message if problems else None,
                settings=_settings_of(word, flag, values, reading),
            )
        )


def _gather(reading: _Reading, environment: list[Finding]) -> None:
    """What the command line asks for, as an instance of the inventory."""
    wish, said, row = reading.wish, reading.said, reading.row
    for finding in environment:
        if "gpus" in finding.settings:
            wish.gpus = list(finding.settings["gpus"])
    always = {words[0] for words in row.flags.always}
    for item in said.values():
        flag = reading.parser.flag(_resolved(item.words[0].partition("=")[0], reading.parser))
        if flag is None:
            continue
        word = item.words[0] if item.positive else next(iter(flag.negated), item.words[0])
        values = (item.value,) if item.value is not None else ()
        found = _settings_of(word, flag, values, reading)
        for setting, value in found.items():
            wish.settings[setting] = value
        if found or flag.name in _INSTANCE_KEYS or set(flag.words) & (always | set(row.secret_flags)):
            continue
        if row.proof.flag in flag.words and values == (str(row.proof.verbosity),):
            # On cards it is what the plan says itself, so that the log proves where the engine computes.
            continue
        if set(flag.names) & _HANDLED or flag.removed or flag.exits or any(is_opaque(value) for value in values):
            continue
        wish.extra_args += [_resolved(item.words[0], reading.parser), *values]
    model = said.get("--model") or said.get("--model-url")
    wish.model = model.value if model else None
    remote = next((said[name] for name in _REMOTE_MODELS if name in said), None)
    if wish.model is None and remote is not None:
        wish.model = remote.value
    wish.listen = said["--host"].value if "--host" in said else None
    port = said.get("--port")
    wish.port = int(port.value) if port and port.value and port.value.isdecimal() else _DEFAULT_PORT
    wish.has_key = bool({"--api-key", "--api-key-file"} & set(said))
    for name in ("model", "listen", "port"):
        wish.settings.pop(name, None)
    _gather_context(reading)
    _gather_speculative(wish)
    if {key for key in wish.settings if key.startswith("rope_scaling.")}:
        wish.settings.setdefault(
            "rope_scaling.kind", "yarn" if "rope_scaling.original_context_length" in wish.settings else "linear"
        )


#: Flags that become keys of an instance rather than settings.
_INSTANCE_KEYS = frozenset(
    {"--model", "--host", "--port", "--model-url", "--hf-repo", "--docker-repo", "--hf-file", "--api-key-file"}
)
#: Flags whose meaning is worked out together with others.
_HANDLED = frozenset({"--ctx-size", "--parallel", "--kv-unified", "--cont-batching", "--split-mode"})


def _gather_context(reading: _Reading) -> None:
    """Context by request: the engine's is of all slots together, unless they share one cache."""
    wish, said, defaults = reading.wish, reading.said, reading.row.defaults
    size = _number(said.get("--ctx-size"))
    asked = _number(said.get("--parallel"))
    unified = said["--kv-unified"].positive if "--kv-unified" in said else None
    parallel = asked
    if asked is None and "--parallel" not in said:
        parallel = defaults.parallel
    if parallel is not None and parallel < 0:
        # The engine decides: several slots that share one cache.
        parallel, unified = defaults.auto_parallel, True
        wish.comments.append(f"the number of slots is the build's own choice: {parallel} that share one cache")
    wish.settings.pop("context_length", None)
    wish.settings.pop("kv_unified", None)
    if parallel is not None and 1 <= parallel <= 256:
        wish.settings["parallel"] = parallel
    else:
        wish.settings.pop("parallel", None)
    if unified is not None:
        wish.settings["kv_unified"] = unified
    if size is None:
        return
    if size == 0:
        wish.comments.append("no context was given: the engine takes the model's own; say how much one request needs")
        return
    per_slot = size if unified or not parallel else size // parallel
    if per_slot >= 1:
        wish.settings["context_length"] = per_slot


def _gather_speculative(wish: Wish) -> None:
    """Drafting needs a kind, and the inventory a model with its checksum."""
    parts = {key: value for key, value in wish.settings.items() if key.startswith("speculative.")}
    for key in parts:
        wish.settings.pop(key)
    kind = parts.get("speculative.kind")
    if kind == "draft" or (kind is None and "speculative.model" in parts):
        wish.comments.append("a draft model goes under `settings.speculative`: {kind: draft, model: {path: ..., sha256: ...}}")
    elif kind is not None:
        wish.settings["speculative.kind"] = kind
        depth = parts.get("speculative.depth")
        if isinstance(depth, str) and depth.isdecimal():
            depth = int(depth)
        if isinstance(depth, int) and kind != "none" and 1 <= depth <= 64:
            wish.settings["speculative.depth"] = depth


def _number(said: _Said | None) -> int | None:
    """A flag's whole number, read as the C library reads it; ``None`` where it is not said or cannot be known."""
    if said is None or said.value is None or is_opaque(said.value):
        return None
    match = re.match(r"\s*([+-]?[0-9]{1,10})", said.value)
    return int(match[1]) if match else None


def _judge(reading: _Reading, said: _Said, found: Finding) -> None:
    """Put a verdict on a flag's own finding; where that has one already, beside it."""
    own = reading.findings[said.index] if said.index < len(reading.findings) else None
    if own is not None and own.verdict == "ok" and own.words == said.words:
        reading.findings[said.index] = replace(
            own,
            verdict=found.verdict,
            id=found.id,
            reason=found.reason,
            nearest=found.nearest,
            meaning=own.meaning or found.meaning,
        )
    else:
        reading.findings.append(found)


def _together(command: Command, reading: _Reading) -> None:
    """What flags mean together, and what is missing."""
    said = reading.said
    _slots(reading)
    host = said.get("--host")
    has_key = reading.wish.has_key
    if command.image is not None:
        if not has_key:
            reading.findings += published_findings(command)
    elif host is not None and host.value and not is_opaque(host.value) and not is_loopback(host.value) and not has_key:
        _judge(reading, host, listening_finding(host.words, host.value))
    for name in reading.row.secret_flags:
        flag = reading.parser.flag(name)
        item = said.get(flag.name) if flag else None
        if item is not None and item.words[0].startswith("-") and flag is not None and name == flag.name:
            nearest = "`api_keys` from a vault" if name == "--api-key" else "leave it out"
            _judge(reading, item, secret_finding(item.words, nearest))
    split = said.get("--split-mode")
    if split is not None and split.value == "row" and not reading.row.cuda_row_split:
        found = Finding(
            split.words,
            "fails",
            "row-split-gone",
            meaning="splits single tensors over cards",
            reason=f"no CUDA build of {reading.parser.build} has it: the parser takes the word, the model does not load",
            nearest="`--split-mode layer`",
        )
        _judge(reading, split, found)
    ubatch = _number(said.get("--ubatch-size"))
    if ubatch is not None and "--batch-size" not in said and ubatch > reading.row.defaults.batch_size:
        found = Finding(
            said["--ubatch-size"].words,
            "unwise",
            "ubatch-above-batch",
            reason=f"above the batch size, {reading.row.defaults.batch_size} where it is not said: the engine lowers it",
            nearest=f"`--batch-size {ubatch}` too",
        )
        _judge(reading, said["--ubatch-size"], found)


def _rules(catalog: Catalog, reading: _Reading) -> None:
    """The plan's own rules about these settings; what they refuse is put right in the snippet."""
    wish = reading.wish
    spec = wish.instance()
    if spec is None:
        return
    config = parse_config("explained", {"llama_cpp_backend": "cuda"})
    rules = [*instance_rules("chat", spec, config, reading.row, catalog), *kv_kernel_rules("chat", spec, reading.row)]
    for found in rule_findings(rules, settings_said(reading.findings), _PROGRAM):
        add_to(reading.findings, found)
    if any(rule.id == "quantised-v-needs-flash-attention" for rule in rules):
        wish.settings["flash_attention"] = "on"
        wish.comments.append(f"flash_attention was off, which a {spec.settings.kv_cache_type_v} V cache does not allow: on")


def _slots(reading: _Reading) -> None:
    """Several slots and one number of tokens."""
    said, wish = reading.said, reading.wish
    size, parallel = _number(said.get("--ctx-size")), _number(said.get("--parallel"))
    if size is None or size <= 0 or parallel is None or parallel <= 1 or wish.settings.get("kv_unified"):
        return
    size_said = said["--ctx-size"]
    own = reading.findings[size_said.index]
    reading.findings[size_said.index] = replace(own, settings={})
    reading.findings.append(
        Finding(
            (*said["--ctx-size"].words, *said["--parallel"].words),
            "ok",
            "context-divided",
            meaning="the context is of all slots together",
            reason=f"{size} tokens over {parallel} slots: each request gets {size // parallel}",
            nearest=f"`--ctx-size {size * parallel}` for {size} each, or `--kv-unified` for one shared cache",
            settings={"context_length": size // parallel, "parallel": parallel},
        )
    )
