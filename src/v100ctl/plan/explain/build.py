"""A ``cmake`` command line of llama.cpp."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from v100ctl.catalog import Catalog
from v100ctl.catalog.history import CmakeHistory, History
from v100ctl.catalog.llama_cpp import LlamaCppParser
from v100ctl.plan.command_line import Command
from v100ctl.plan.explain.shared import hidden, nearest_name, text_findings
from v100ctl.plan.explain.types import Card, CommandExplanation, Finding, is_opaque, ordered, plain_dash

_ARCHITECTURES = "CMAKE_CUDA_ARCHITECTURES"
#: What CMake's `if()` takes for true, beside numbers that are not zero (cmake-commands, `if`).
_TRUE = frozenset({"ON", "YES", "TRUE", "Y"})


def explain_cmake(command: Command, catalog: Catalog, build: int, history: History, card: Card) -> CommandExplanation:
    """Explain one command for one build.

    Raises:
        KeyError: nobody has read the source of this build.
    """
    parser = catalog.llama_cpp_parser(build)
    if parser is None or history.cmake is None:
        raise KeyError(build)
    command = hidden(command, ())
    findings = list(text_findings(command))
    words = [_resolved(word) for word in command.words]
    defined: dict[str, tuple[str, tuple[str, ...]]] = {}
    findings += _walk(words, command.words, history.cmake, defined)
    on = {name: _is_true(value) for name, (value, _) in defined.items()}
    for name, (value, said) in defined.items():
        findings.append(_definition(name, value, said, parser, history.cmake, card))
    configures = not any(word in ("--build", "--install") for word in words)
    if configures:
        findings += _missing(defined, on, parser, history.cmake)
    return CommandExplanation(
        program="cmake",
        typed=command.typed,
        line=command.line,
        engine="llama_cpp",
        version=str(build),
        findings=ordered(findings),
        inventory=_inventory(build, defined, on, parser, card) if configures else "",
    )


def _resolved(word: str) -> str:
    """A definition that begins with a typographic dash, as it was meant."""
    candidates = plain_dash(word)
    return (
        next((item for item in reversed(candidates) if re.match(r"-D|-[BSGj]$|--", item)), candidates[0]) if candidates else word
    )


def _is_true(value: str) -> bool:
    upper = value.upper()
    return upper in _TRUE or bool(re.fullmatch(r"[0-9]+", upper) and int(upper))


def _walk(
    words: Sequence[str], typed: Sequence[str], history: CmakeHistory, defined: dict[str, tuple[str, tuple[str, ...]]]
) -> Iterator[Finding]:
    """Words of the program itself; definitions are put into ``defined`` (the last of a name counts)."""
    position = 0
    while position < len(words):
        word, said = words[position], tuple(typed[position : position + 1])
        position += 1
        if word != said[0]:
            yield Finding(
                said,
                "refused",
                "typographic-dash",
                reason=f"begins with a typographic dash of a web page, which CMake takes for a folder; explained as `{word}`",
                nearest=f"`{word}`",
            )
        if word.startswith("-D"):
            text = word[2:]
            if not text and position < len(words):
                text, said = words[position], (*said, typed[position])
                position += 1
            match = re.match(r"([A-Za-z0-9_.+-]+)(?::[A-Za-z]+)?=(.*)", text, re.DOTALL)
            if match is None:
                yield Finding(
                    said,
                    "refused",
                    "definition-without-value",
                    reason="CMake wants NAME=VALUE after -D",
                    nearest=f"`-D{text}=ON`",
                )
                continue
            name, value = match[1], match[2]
            if name in defined:
                yield Finding(defined[name][1], "ignored", "said-again", reason=f"said again later: `{' '.join(said)}` counts")
            defined[name] = (value, said)
            continue
        if word == "--":
            yield Finding(tuple(typed[position - 1 :]), "ok", "ok", meaning="for the build tool itself")
            return
        name, equals, _ = word.partition("=")
        attached = re.match(r"(-[BSGATCUj])(.+)", word)
        row = history.words.get(name) or (history.words.get(attached[1]) if attached else None)
        if row is not None:
            takes, meaning = row
            if takes and not equals and not (attached and name not in history.words):
                if name in ("-j", "--parallel") and not (position < len(words) and words[position].isdecimal()):
                    takes = 0
                said = (*said, *typed[position : position + takes])
                position += takes
            yield Finding(said, "ok", "ok", meaning=meaning)
        elif word.startswith("-"):
            yield Finding(
                said,
                "unwise",
                "unknown-flag",
                reason="not known here as a word of the `cmake` program",
                nearest=_did_you_mean(name, history.words),
            )
        else:
            yield Finding(said, "ok", "ok", meaning="the source or build folder")


def _did_you_mean(word: str, names: Sequence[str] | dict[str, tuple[int, str]]) -> str | None:
    near = nearest_name(word, names)
    return f"did you mean `{near}`?" if near else None


def _definition(
    name: str, value: str, said: tuple[str, ...], parser: LlamaCppParser, history: CmakeHistory, card: Card
) -> Finding:
    if name == _ARCHITECTURES:
        return _architectures(value, said, card)
    meaning = history.meanings.flags.get(name)
    advice = next((row for row in history.advice if row.name == name and _matches(value, row.values)), None)
    if advice is not None:
        return Finding(said, advice.verdict, advice.id, meaning, advice.reason, advice.nearest)
    if name in parser.cmake_options:
        default = parser.cmake_options[name]
        settings = {"llama_cpp_force_mmq": _is_true(value)} if name == "GGML_CUDA_FORCE_MMQ" else {}
        same = "" if not default or "$" in default else f" (default {default})"
        return Finding(said, "ok", "ok", f"{meaning or 'an option of this build'}{same}", settings=settings)
    removed = parser.cmake_removed.get(name)
    if removed is not None:
        if not _is_true(value):
            return Finding(
                said, "ignored", "cmake-former-option", meaning, "an old name; switched off it does nothing", "leave it out"
            )
        instead: str | None = f"`-D{removed.instead}={value}`" if removed.instead else "leave it out"
        meaning = history.meanings.flags.get(removed.instead or "", meaning)
        if removed.effect == "fatal":
            return Finding(
                said, "refused", "cmake-former-option", meaning, "the configure run stops: the option has another name", instead
            )
        if removed.effect == "renamed":
            return Finding(said, "renamed", "cmake-former-option", meaning, "an old name, which only warns for now", instead)
        return Finding(said, "ignored", "cmake-former-option", meaning, "CMake only warns that it is ignored", instead)
    row = next((item for item in history.names if name in item.names), None)
    if row is not None:
        instead = f"`-D{row.instead}={value}`" if row.instead else None
        return Finding(said, row.verdict, "cmake-other-name" if row.verdict != "ok" else "ok", row.meaning, row.reason, instead)
    today = next(
        (
            new + name.removeprefix(old)
            for old, new in history.renamed_prefixes.items()
            if name.startswith(old) and new + name.removeprefix(old) in parser.cmake_options
        ),
        None,
    )
    if today is not None:
        return Finding(
            said,
            "ignored",
            "cmake-former-option",
            history.meanings.flags.get(today),
            "the name changed in June 2024; CMake only lists it among variables that were not used, and builds without it",
            f"`-D{today}={value}`",
        )
    if name.startswith(
        ("CMAKE_", "FETCHCONTENT_", "CUDAToolkit_", "CUDA_", "CPACK_", "CTEST_", "Python", "OpenMP_", "BLAS_", "NCCL_")
    ):
        return Finding(said, "ok", "ok", "CMake's own, or of something that the build looks for")
    near = nearest_name(name, parser.cmake_options)
    return Finding(
        said,
        "ignored",
        "cmake-unknown-option",
        None,
        f"llama.cpp {parser.build} declares no such option: CMake only lists it among variables that were not used",
        f"did you mean `{near}`?" if near else None,
    )


def _matches(value: str, values: Sequence[str]) -> bool:
    upper = value.upper()
    if upper in values:
        return True
    if "ON" in values:
        return _is_true(value)
    return "OFF" in values and upper in ("0", "NO", "FALSE", "N", "")


def _architectures(value: str, said: tuple[str, ...], card: Card) -> Finding:
    """Whether what is compiled can run on the card: machine code of its own architecture, else PTX of an older one."""
    meaning = "the architectures that CUDA code is compiled for"
    sm = card.sm
    if is_opaque(value):
        return Finding(said, "ok", "ok", meaning)
    entries = [entry.strip() for entry in re.split(r"[;,\s]+", value) if entry.strip()]
    if any(entry in ("all", "all-major") for entry in entries):
        return Finding(
            said,
            "unwise",
            "cmake-architectures-all",
            meaning,
            "compiles for every architecture that the toolkit knows: hours of work and gigabytes, and CUDA 13 no longer knows 70",
            f"`-D{_ARCHITECTURES}={sm}`",
            {"llama_cpp_cuda_architectures": str(sm)},
        )
    if "native" in entries:
        return Finding(
            said,
            "unwise",
            "cmake-architectures-native",
            meaning,
            "asks the card of the machine that compiles; without one there it is empty or wrong",
            f"`-D{_ARCHITECTURES}={sm}`",
            {"llama_cpp_cuda_architectures": str(sm)},
        )
    parsed = [re.fullmatch(r"([0-9]{2,3})[af]?(-real|-virtual)?", entry) for entry in entries]
    if not entries or any(match is None for match in parsed):
        wrong = next((entry for entry, match in zip(entries, parsed, strict=True) if match is None), value)
        return Finding(
            said,
            "refused",
            "cmake-architecture-unknown",
            meaning,
            f"`{wrong}` is no architecture: CMake wants numbers such as 70, 70-real, 70-virtual",
            f"`-D{_ARCHITECTURES}={sm}`",
        )
    codes = [(int(match[1]), match[2] or "") for match in parsed if match]
    settings = (
        {"llama_cpp_cuda_architectures": value}
        if re.fullmatch(r"[0-9]{2,3}(-real|-virtual)?(;[0-9]{2,3}(-real|-virtual)?)*", value)
        else {}
    )
    if any(sm // 10 == number // 10 and number <= sm and kind != "-virtual" for number, kind in codes):
        return Finding(said, "ok", "ok", meaning, settings=settings)
    if any(number <= sm and kind != "-real" for number, kind in codes):
        return Finding(
            said,
            "unwise",
            "cmake-architecture-ptx",
            meaning,
            f"holds no machine code for {card}: the driver must translate PTX, which fails where the toolkit is newer",
            f"`-D{_ARCHITECTURES}={sm}`",
            settings,
        )
    return Finding(
        said,
        "fails",
        "cmake-architecture-missing",
        meaning,
        f"holds nothing that {card} (architecture {sm}) can run: `no kernel image is available`",
        f"`-D{_ARCHITECTURES}={sm}`",
    )


def _missing(
    defined: dict[str, tuple[str, tuple[str, ...]]], on: dict[str, bool], parser: LlamaCppParser, history: CmakeHistory
) -> Iterator[Finding]:
    """What is not said and decides about the card."""
    cuda = on.get("GGML_CUDA", False) or any(
        on.get(name, False) for name, row in parser.cmake_removed.items() if row.instead == "GGML_CUDA"
    )
    about_cuda = [said for name, (_, said) in defined.items() if "CUDA" in name or "CUBLAS" in name]
    if not cuda and about_cuda:
        yield Finding(
            about_cuda[0],
            "unwise",
            "cmake-without-cuda",
            reason="`-DGGML_CUDA=ON` is missing: what is built computes on the processor",
            nearest="`-DGGML_CUDA=ON`",
        )
    elif not cuda and defined:
        yield Finding((), "ok", "cmake-without-cuda", reason="without `-DGGML_CUDA=ON` what is built computes on the processor")
    if cuda and _ARCHITECTURES not in defined:
        native = on.get("GGML_NATIVE", True)
        reason = (
            "the architecture of the card in the machine that compiles is taken, so that machine needs the card"
            if native
            else "the default holds this card's code as PTX only, which does not load where the toolkit is newer than the driver"
        )
        yield Finding(
            ("cmake",),
            "unwise",
            "cmake-architecture-unsaid",
            meaning=f"no `{_ARCHITECTURES}`",
            reason=reason,
            nearest=f"`-D{_ARCHITECTURES}=70`",
        )


def _inventory(
    build: int, defined: dict[str, tuple[str, tuple[str, ...]]], on: dict[str, bool], parser: LlamaCppParser, card: Card
) -> str:
    """The inventory's variables that say the same; the toolkit compiles from them."""

    def wanted(name: str) -> bool:
        old = [key for key, row in parser.cmake_removed.items() if row.instead == name]
        short = name.removeprefix("GGML_")
        return any(on.get(key, False) for key in (name, *old, f"LLAMA_{short}"))

    architectures = defined.get(_ARCHITECTURES, ("", ()))[0]
    good = _architectures(architectures, (), card)
    taken = good.verdict in ("ok", "unwise") and good.settings.get("llama_cpp_cuda_architectures") == architectures
    cuda = wanted("GGML_CUDA") or any("CUDA" in name for name in defined)
    lines = [f"llama_cpp_build: {build}", f"llama_cpp_backend: {'cuda' if cuda else 'cpu'}"]
    if cuda:
        lines.append(f'llama_cpp_cuda_architectures: "{architectures if taken else card.sm}"')
        lines.append(f"llama_cpp_force_mmq: {'true' if wanted('GGML_CUDA_FORCE_MMQ') else 'false'}")
    return "\n".join(lines) + "\n"
