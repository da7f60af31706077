"""A ``vllm serve`` command line, or one of the API server's module, as that version's argparse reads it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from v100ctl.catalog import Catalog
from v100ctl.catalog.history import Advice, History
from v100ctl.catalog.vllm import VllmArgument, VllmParser, VllmRow
from v100ctl.facts import Facts
from v100ctl.fleet import parse_config
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
from v100ctl.plan.rules.vllm import vllm_rules
from v100ctl.plan.vllm import split_argv
from v100ctl.plan.vram.types import Card as GpuCard

_DEFAULT_PORT = 8000
#: The least compute capability with the instructions that the `volta_prefill` kernels need (Ampere).
_AMPERE = 8.0
_NEGATIVE_NUMBER = re.compile(r"-\d+|-\d*\.\d+")


@dataclass(frozen=True)
class _Piece:
    """Words that belong together: an argument with its values, a positional word, or one that names nothing."""

    kind: Literal["argument", "positional", "unknown", "ambiguous", "taken"]
    words: tuple[str, ...]
    name: str
    argument: VllmArgument | None = None
    values: tuple[str, ...] = ()
    #: Whether the value stood behind an equals sign.
    explicit: bool = False


@dataclass
class _Said:
    words: tuple[str, ...]
    values: tuple[str, ...]
    positive: bool
    index: int


@dataclass
class _Reading:
    parser: VllmParser
    row: VllmRow
    history: History
    card: Card
    wish: Wish
    serves: bool
    findings: list[Finding] = field(default_factory=list)
    said: dict[str, _Said] = field(default_factory=dict)
    model: str | None = None


def explain_vllm(command: Command, catalog: Catalog, version: str, history: History, card: Card) -> CommandExplanation:
    """Explain one command for one version.

    Raises:
        KeyError: nobody has asked this version what it takes.
    """
    row, parser = catalog.vllm(version), catalog.vllm_parser(version)
    if row is None or parser is None:
        raise KeyError(version)
    command = hidden(command, row.secret_flags)
    reading = _Reading(parser, row, history, card, Wish("vllm", version), serves=command.style == "serve")
    _image(command, catalog, reading)
    reading.findings += wrapper_findings(command)
    environment = list(environment_findings(command, "vllm", history, card, version))
    reading.findings += environment
    pieces = list(_cut(command.words, parser, serves=reading.serves))
    for index, piece in enumerate(pieces):
        whole = _with_its_value(pieces, index, reading)
        _piece(whole, reading)
        if len(whole.words) > len(piece.words):
            pieces[index + 1] = replace(pieces[index + 1], kind="taken")
    _gather(reading, environment, has_key="VLLM_API_KEY" in command.environment)
    _rules(catalog, reading)
    _together(command, reading)
    return CommandExplanation(
        program="vllm",
        typed=command.typed,
        line=command.line,
        engine="vllm",
        version=version,
        findings=ordered((*text_findings(command), *reading.findings)),
        inventory=reading.wish.snippet(),
    )


def _image(command: Command, catalog: Catalog, reading: _Reading) -> None:
    if command.image is None:
        return
    bare, _, tag = command.image.rpartition("/")[2].partition(":")
    if not bare.startswith("vllm-openai"):
        return
    tag = tag.partition("@")[0]
    try:
        version = str(Version(tag.removeprefix("v")))
    except InvalidVersion:
        version = ""
    if not version:
        reading.findings.append(
            Finding(
                (command.image,),
                "fails" if tag in ("", "latest", "nightly") and reading.card.sm == 70 else "unwise",
                "image-without-version",
                meaning="a container image that brings its own vLLM, torch and CUDA",
                reason="the newest release no longer runs on this card, and tomorrow's image is another one"
                if reading.card.sm == 70
                else "tomorrow's image is another one",
                nearest=f"`vllm/vllm-openai:v{reading.row.version}`, or the toolkit's own environment",
            )
        )
        return
    found = catalog.vllm(version)
    if found is not None and found.sm_70 != "yes" and reading.card.sm == 70:
        reading.findings.append(
            Finding(
                (command.image,),
                "fails" if found.sm_70 == "no" else "unwise",
                "vllm-version-without-volta" if found.sm_70 == "no" else "vllm-version-unproven",
                meaning=f"an image of vLLM {version}, CUDA {found.cuda}",
                reason=found.reason,
                nearest=f"`vllm/vllm-openai:v{reading.row.version}`",
            )
        )
    elif version != reading.row.version:
        reading.findings.append(
            Finding(
                (command.image,),
                "ok",
                "image-of-another-version",
                meaning=f"an image of vLLM {version}",
                reason=f"explained for {reading.row.version}; `--engine-version {version}` would be its own, where that is known",
            )
        )


def _cut(words: Sequence[str], parser: VllmParser, *, serves: bool) -> Iterator[_Piece]:
    """The words as argparse groups them, with the text's own words beside each."""
    own = {name: item for item in parser.serve_arguments for name in item.names if name.startswith("--")} if serves else {}
    start = position = 0
    while position < len(words):
        name, equals, value = _plain(words[position], parser).partition("=")
        argument = own.get(parser.normal(name)) if name != "--" else None
        if argument is None:
            position += 1
            continue
        # What only `serve` takes (`--config FILE`): the rest of the parser does not know it.
        yield from _cut_known(words[start:position], parser)
        taken = () if equals else tuple(words[position + 1 : position + 2])
        values = (value,) if equals else taken
        yield _Piece("argument", (words[position], *taken), parser.normal(name), argument, values, explicit=bool(equals))
        start = position = position + 1 + len(taken)
    yield from _cut_known(words[start:], parser)


def _cut_known(words: Sequence[str], parser: VllmParser) -> Iterator[_Piece]:
    position = 0
    for word, argument, values, spellings in split_argv([_plain(word, parser) for word in words], parser):
        if argument is None:
            if not word.startswith("-") or " " in word or _NEGATIVE_NUMBER.fullmatch(word):
                yield _Piece("positional", (words[position],), word)
            elif len(spellings) > 1:
                yield _Piece("ambiguous", (words[position],), ", ".join(spellings))
            else:
                yield _Piece("unknown", (words[position],), parser.normal(word))
            position += 1
            continue
        explicit = bool(values) and ("=" in word or (word not in parser.known_words and not word.startswith("--")))
        taken = () if explicit else tuple(words[position + 1 : position + 1 + len(values)])
        yield _Piece("argument", (words[position], *taken), spellings[0], argument, values, explicit=explicit)
        position += 1 + len(taken)


def _plain(word: str, parser: VllmParser) -> str:
    candidates = plain_dash(word)
    return next((item for item in candidates if parser.candidates(item)), candidates[0] if candidates else word)


def _meaning(names: tuple[str, ...], reading: _Reading) -> str:
    return reading.history.meaning(names) or "known to this version; its `--help` describes it"


def _with_its_value(pieces: Sequence[_Piece], index: int, reading: _Reading) -> _Piece:
    """An unknown argument together with the word after it, which argparse has left over as well."""
    piece, following = pieces[index], pieces[index + 1 : index + 2]
    if piece.kind != "unknown" or "=" in piece.words[0] or not following or following[0].kind != "positional":
        return piece
    former = reading.history.former(piece.name)
    if (former is not None and not former.takes) or (reading.serves and reading.model is None):
        return piece
    return replace(piece, words=(*piece.words, *following[0].words))


def _piece(piece: _Piece, reading: _Reading) -> None:
    if piece.kind == "taken":
        return
    if piece.kind == "positional":
        _positional(piece, reading)
    elif piece.kind == "unknown":
        _unknown(piece, reading)
    elif piece.kind == "ambiguous":
        reading.findings.append(
            Finding(piece.words, "refused", "ambiguous-flag", reason=f"may be short for {piece.name}", nearest="the whole name")
        )
    else:
        _argument(piece, reading)
    if plain_dash(piece.words[0]) and reading.findings:
        word = _plain(piece.words[0], reading.parser)
        reading.findings[-1] = replace(
            reading.findings[-1],
            verdict="refused",
            id="typographic-dash",
            reason=f"begins with a typographic dash of a web page: a stray word to the parser; explained as `{word}`",
            nearest=f"`{' '.join((word, *piece.words[1:]))}`",
        )


def _positional(piece: _Piece, reading: _Reading) -> None:
    before = reading.findings[-1] if reading.findings else None
    after_switch = before is not None and len(before.words) == 1 and before.words[0].startswith("-")
    value = piece.words[0]
    if reading.serves and reading.model is None and not (after_switch and value.lower() in ("true", "false")):
        reading.model = value
        reading.findings.append(Finding(piece.words, "ok", "ok", meaning=_meaning(("model_tag",), reading)))
        return
    if is_opaque(value):
        reading.findings.append(unseen_finding(piece.words))
        return
    name = before.words[0] if before is not None and after_switch else None
    flag = reading.parser.flag(name) if name else None
    if flag is not None and name is not None and flag.is_switch and before is not None and value.lower() in ("true", "false"):
        _valued_switch(piece, flag, name, value.lower() == "true", before, reading)
        return
    instead = "`--model` before it" if not reading.serves and reading.model is None else None
    extra = f"; `{name}` before it takes no value" if flag is not None and flag.is_switch else ""
    reading.findings.append(
        Finding(piece.words, "refused", "stray-word", reason=f"`unrecognized arguments: {value}`{extra}", nearest=instead)
    )


def _valued_switch(piece: _Piece, flag: VllmArgument, name: str, on: bool, before: Finding, reading: _Reading) -> None:
    """``--enforce-eager False``: a switch takes no value, so the word is left over."""
    positive = reading.parser.normal(name) not in flag.negated
    wanted = on if positive else not on
    negated = flag.negated[0] if flag.negated else None
    instead = f"`{flag.names[0]}`" if wanted else f"`{negated}`" if negated else "leave it out: it is off by default"
    said = reading.said.get(flag.names[0])
    if said is not None:
        reading.said[flag.names[0]] = replace(said, positive=wanted)
    reading.findings[-1] = Finding(
        (*before.words, *piece.words),
        "refused",
        "switch-with-value",
        meaning=before.meaning,
        reason=f"a switch without a value: `unrecognized arguments: {piece.words[0]}`",
        nearest=instead,
        settings=_settings_of(flag, (), reading, positive=wanted),
    )


def _unknown(piece: _Piece, reading: _Reading) -> None:
    parser, row = reading.parser, reading.row
    former = reading.history.former(piece.name)
    instead = row.former_arguments.get(piece.name)
    if former is not None or instead is not None:
        words = instead or (former.instead if former else None)
        reading.findings.append(
            Finding(
                piece.words,
                "refused",
                "former-flag",
                meaning=_former_meaning(words, piece, reading),
                reason=former.reason if former else f"an argument of other versions, which vLLM {row.version} does not have",
                nearest=f"`{words}`" if words else "leave it out",
                settings=dict(former.settings) if former else {},
            )
        )
        if former is not None:
            reading.wish.settings |= former.settings
        return
    near = parser.nearest(piece.words[0])
    reading.findings.append(
        Finding(
            piece.words,
            "refused",
            "unknown-flag",
            meaning=reading.history.meaning((piece.name,)),
            reason=f"`unrecognized arguments`: vLLM {row.version} has no `{piece.name}`",
            nearest=f"did you mean `{near}`?" if near else None,
        )
    )


def _former_meaning(instead: str | None, piece: _Piece, reading: _Reading) -> str | None:
    words = [piece.name, *([instead.partition(" ")[0].partition("=")[0]] if instead else [])]
    return reading.history.meaning(tuple(words))


def _argument(piece: _Piece, reading: _Reading) -> None:
    argument = piece.argument
    if argument is None:
        return
    meaning = _meaning((*argument.names, *argument.negated), reading)
    problem = _problem(piece, argument)
    if problem is not None:
        reading.findings.append(Finding(piece.words, "refused", problem[0], meaning, problem[1], problem[2]))
        return
    positive = piece.name not in argument.negated
    if argument.type == "boolean" and piece.values:
        positive = piece.values[0].lower() == "true"
    name = argument.names[0]
    earlier = reading.said.get(name)
    if earlier is not None and not argument.repeats and earlier.index < len(reading.findings):
        old = reading.findings[earlier.index]
        if old.verdict == "ok":
            reading.findings[earlier.index] = replace(
                old, verdict="ignored", id="said-again", reason=f"said again later: `{' '.join(piece.words)}` counts", settings={}
            )
    reading.said[name] = _Said(piece.words, piece.values, positive, len(reading.findings))
    value = piece.values[0] if piece.values else None
    found = Finding(piece.words, "ok", "ok", meaning, settings=_settings_of(argument, piece.values, reading, positive=positive))
    typed_name = reading.parser.normal(_plain(piece.words[0], reading.parser)).partition("=")[0]
    if argument.deprecated:
        found = replace(found, verdict="ignored", id="deprecated-flag", reason="out of date: the version takes it with a warning")
    elif piece.name != typed_name and piece.name.startswith(typed_name) and typed_name.startswith("--"):
        found = replace(
            found,
            verdict="renamed",
            id="abbreviated-flag",
            reason=f"taken for `{piece.name}`, until a version has another argument that begins so",
            nearest=f"`{piece.name}`",
        )
    advice = next((row for row in reading.history.advice if positive and _applies(row, argument, value, reading)), None)
    if advice is not None:
        found = replace(found, verdict=advice.verdict, id=advice.id, reason=advice.reason, nearest=advice.nearest)
    reading.findings.append(found)


def _problem(piece: _Piece, argument: VllmArgument) -> tuple[str, str, str | None] | None:
    """Why argparse stops at an argument: (id, reason, instead)."""
    name = piece.name
    if argument.is_switch and piece.explicit:
        negated = argument.negated[0] if argument.negated else None
        off = piece.values[0].lower() == "false"
        instead = f"`{negated}`" if off and negated else "leave it out" if off else f"`{name}`"
        return "switch-with-value", f"a switch without a value: `ignored explicit argument '{piece.values[0]}'`", instead
    if not piece.values and (argument.arity == "any" or (isinstance(argument.arity, int) and argument.arity > 0)):
        return "value-missing", "`expected one argument`: nothing follows that could be its value", None
    for value in piece.values:
        if is_opaque(value):
            continue
        problem = argument.problem(value)
        if problem is not None:
            near = argument.nearest(value)
            return "value-refused", problem, f"`{name} {near}`" if near else None
    return None


def _applies(row: Advice, argument: VllmArgument, value: str | None, reading: _Reading) -> bool:
    if not advice_applies(row, argument.names, value, reading.card):
        return False
    return row.versions is None or Version(reading.row.version) in SpecifierSet(row.versions)


# --- settings ----------------------------------------------------------------------------------------------------------------


def _settings_of(argument: VllmArgument, values: tuple[str, ...], reading: _Reading, *, positive: bool) -> dict[str, Any]:
    """The settings that an argument says, by the version's spellings."""
    row = reading.row
    if any(is_opaque(value) for value in values):
        return {}
    for flag, keys in row.json_arguments.items():
        if flag in argument.names and len(values) == 1:
            return _json_settings(values[0], keys, row)
    names = set(argument.names) | set(argument.negated)
    for path, spelling in row.spellings.items():
        if isinstance(spelling, str):
            if spelling in names and values:
                value = typed(path, _plain_number(values[0]) if argument.type == "human-integer" else values[0])
                return {path: value} if value is not None else {}
        elif any(word.partition("=")[0] in names for words in spelling.values() for word in words):
            if not argument.is_switch and argument.type != "boolean":
                continue
            # A switch for one value says the other one where it is negated.
            says = next((meant for meant, words in spelling.items() if argument.names[0] in words), "true")
            on = positive if says == "true" else not positive
            value = typed(path, "true" if on else "false")
            return {path: value} if value is not None else {}
    return {}


def _plain_number(value: str) -> str:
    """``8k`` as 8000 and ``8K`` as 8192, as the versions that read such numbers do (vllm/engine/arg_utils.py)."""
    match = re.fullmatch(r"([0-9]+)([kKmM])", value)
    return str(int(match[1]) * {"k": 10**3, "m": 10**6, "K": 2**10, "M": 2**20}[match[2]]) if match else value


def _json_settings(text: str, keys: Mapping[str, str], row: VllmRow) -> dict[str, Any]:
    try:
        document = json.loads(text)
    except ValueError:
        return {}
    if not isinstance(document, dict):
        return {}
    found: dict[str, Any] = {}
    for path, key in keys.items():
        value = document.get(key, document.get("type") if key == "rope_type" else None)
        names = {text: meant for meant, text in row.json_values.get(path, {}).items()}
        if isinstance(value, str | int | float) and not isinstance(value, bool):
            setting = typed(path, names.get(str(value), str(value)))
            if setting is not None:
                found[path] = setting
    return found


def _gather(reading: _Reading, environment: Sequence[Finding], *, has_key: bool) -> None:
    wish, said, row = reading.wish, reading.said, reading.row
    for finding in environment:
        if "gpus" in finding.settings:
            wish.gpus = list(finding.settings["gpus"])
        if "threads" in finding.settings:
            wish.settings["threads"] = finding.settings["threads"]
    secrets = set(row.secret_flags)
    for name, item in said.items():
        argument = reading.parser.flag(name)
        if argument is None:
            continue
        found = _settings_of(argument, item.values, reading, positive=item.positive)
        wish.settings |= found
        if found or name in _INSTANCE_KEYS or set(argument.names) & secrets or argument.deprecated:
            continue
        if any(is_opaque(value) for value in item.values):
            continue
        wish.extra_args += [name if item.positive or not argument.negated else argument.negated[0], *item.values]
    model = said.get("--model")
    wish.model = reading.model or (model.values[0] if model and model.values else None)
    host, port = said.get("--host"), said.get("--port")
    wish.listen = host.values[0] if host and host.values else None
    wish.port = int(port.values[0]) if port and port.values and port.values[0].isdecimal() else _DEFAULT_PORT
    wish.has_key = has_key or "--api-key" in said
    cards = said.get("--tensor-parallel-size")
    if cards and wish.gpus is None and cards.values[0].isdecimal() and 1 <= int(cards.values[0]) <= 16:
        wish.gpus = list(range(int(cards.values[0])))
    for path in ("model", "listen", "port", "tensor_parallel"):
        wish.settings.pop(path, None)
    if any(path.startswith("speculative.") for path in wish.settings):
        for path in [path for path in wish.settings if path.startswith("speculative.")]:
            del wish.settings[path]
        wish.comments.append("drafting goes under `settings.speculative`: {kind: draft or ngram, depth: N, model: {...}}")
    if any(path.startswith("rope_scaling.") for path in wish.settings):
        wish.settings.setdefault("rope_scaling.kind", "linear")
    if said.get("--dtype") is None and row.defaults is not None:
        wish.settings["dtype"] = row.defaults.dtype


#: Arguments that become keys of an instance rather than settings.
_INSTANCE_KEYS = frozenset({"--model", "--host", "--port", "--tensor-parallel-size", "--config"})


def _judge(reading: _Reading, said: _Said, found: Finding) -> None:
    own = reading.findings[said.index]
    if own.verdict == "ok":
        reading.findings[said.index] = replace(
            own, verdict=found.verdict, id=found.id, reason=found.reason, nearest=found.nearest
        )
    else:
        reading.findings.append(found)


def _together(command: Command, reading: _Reading) -> None:
    """What arguments mean together, on the card, and what is missing."""
    said, card = reading.said, reading.card
    _model(reading)
    _named_quantization(reading)
    _long_context(reading)
    if "--dtype" not in said and card.capability < _AMPERE:
        reading.findings.append(
            Finding(
                ("vllm",),
                "unwise",
                "dtype-unsaid",
                meaning="no `--dtype`",
                reason="the model's own type is taken, and most say bfloat16, which stops the worker on this card",
                nearest="`--dtype half`",
            )
        )
    secret = said.get("--api-key")
    if secret is not None:
        _judge(
            reading,
            secret,
            secret_finding(secret.words, "`VLLM_API_KEY` from a file that only its reader may read, or `api_keys`"),
        )
    _listening(command, reading)
    cards = said.get("--tensor-parallel-size")
    if cards is not None and reading.wish.gpus is not None and cards.values[0].isdecimal():
        wanted = int(cards.values[0])
        if wanted > len(reading.wish.gpus):
            _judge(
                reading,
                cards,
                Finding(
                    cards.words,
                    "fails",
                    "more-workers-than-cards",
                    reason=f"{wanted} workers, and CUDA_VISIBLE_DEVICES shows {len(reading.wish.gpus)} of the cards",
                    nearest=f"`--tensor-parallel-size {len(reading.wish.gpus)}`",
                ),
            )


def _listening(command: Command, reading: _Reading) -> None:
    """Who can reach the server; without ``--host`` it listens everywhere."""
    if reading.wish.has_key:
        return
    host = reading.said.get("--host")
    if command.image is not None:
        reading.findings += published_findings(command)
    elif host is None:
        reading.findings.append(listening_finding(("vllm",), "every address (no `--host`)"))
        reading.wish.listen = "0.0.0.0"  # noqa: S104 - said to the reader, not bound
    elif not is_opaque(host.values[0]) and not is_loopback(host.values[0]):
        _judge(reading, host, listening_finding(host.words, host.values[0]))


def _model(reading: _Reading) -> None:
    said = reading.said.get("--model")
    if not reading.serves:
        if said is None:
            reading.findings.append(
                Finding(
                    ("vllm",),
                    "unwise",
                    "model-unsaid",
                    reason="without `--model` a test model is served",
                    nearest="`--model`",
                )
            )
        return
    if said is not None:
        # A parser takes it; what starts the server (scripts.py, entrypoints/cli/serve.py) does not.
        reason = "with `vllm serve` the model is a word of its own, and the server does not start"
        nearest = f"`vllm serve {said.values[0]}`"
        _judge(reading, said, Finding(said.words, "refused", "model-with-serve", reason=reason, nearest=nearest))
    elif reading.model is None and "--config" not in reading.said:
        needed = any(item.names == ("model_tag",) and item.arity == 1 for item in reading.parser.serve_arguments)
        reading.findings.append(
            Finding(
                ("vllm",),
                "refused" if needed else "unwise",
                "model-unsaid",
                reason="`vllm serve` wants a model" if needed else "without a model a small one for tests is served",
                nearest="`vllm serve MODEL ...`",
            )
        )


def _rules(catalog: Catalog, reading: _Reading) -> None:
    """The plan's own rules about these settings; what they refuse is put right in the snippet."""
    wish, row, card = reading.wish, reading.row, reading.card
    spec = wish.instance()
    if spec is None:
        return
    config = parse_config("explained", {"vllm_version": row.version})
    cards = (GpuCard("", 0, 0, 0, 0.0, compute_capability=card.compute_capability),)
    rules = list(vllm_rules("chat", spec, config, Facts(), row, None, cards, catalog))
    if "--max-model-len" not in reading.said:
        # The plan's default is not the engine's, which is the model's own.
        rules = [rule for rule in rules if rule.id != "vllm-batch-below-context"]
    for found in rule_findings(rules, settings_said(reading.findings), "vllm"):
        add_to(reading.findings, found)
    refused = {rule.id for rule in rules if rule.severity == "refuse"}
    for setting in row.volta_prefill:
        if f"vllm-{setting.replace('_', '-')}-on-volta" in refused:
            wish.settings[setting] = False
    if "vllm-batch-below-context" in refused:
        del wish.settings["batch_size"]
    if {"vllm-quantization-below-minimum", "vllm-quantization-unknown"} & refused:
        method = wish.settings.pop("quantization")
        wish.comments.append(f"the model has to be another one: {method} does not run on this card")


def _named_quantization(reading: _Reading) -> None:
    """A model whose name says a quantisation that the card cannot run."""
    if "--quantization" in reading.said:
        return
    minima, card = reading.parser.quantization, reading.card
    model = reading.model or (reading.said["--model"].values[0] if "--model" in reading.said else "")
    named = re.search(r"[-_.](awq|fp8|nvfp4)\b", model, re.IGNORECASE)
    method = named[1].lower() if named else ""
    least = minima.get("modelopt" if method == "nvfp4" else method)
    if named and least is not None and least > card.sm:
        reading.findings.append(
            Finding(
                (model,),
                "unwise",
                "quantization-by-name",
                meaning=_meaning(("model_tag",), reading),
                reason=f"its name says {named[1]}, which needs compute capability {least / 10:.1f}",
                nearest="a GPTQ-Int4 of the same model",
            )
        )


def _long_context(reading: _Reading) -> None:
    limit, said = reading.row.long_context_chunks_above, reading.said.get("--max-model-len")
    if limit is None or said is None or "--enable-chunked-prefill" in reading.said or reading.card.capability >= _AMPERE:
        return
    value = reading.wish.settings.get("context_length")
    if isinstance(value, int) and value > limit and "chunked_prefill" not in reading.wish.settings:
        off = reading.row.words("chunked_prefill", "false") or ()
        _judge(
            reading,
            said,
            Finding(
                said.words,
                "unwise",
                "chunked-prefill-by-itself",
                reason=f"above {limit} tokens this version turns chunked prefill on by itself, which can end the process",
                nearest=f"`{' '.join(off)}` too",
            ),
        )
        reading.wish.settings["chunked_prefill"] = False
