"""What one version of vLLM takes, asked of that version itself.

``python -m v100ctl.catalog.extract_vllm VERSION --python PYTHON`` writes ``vllm_parsers/VERSION.yml`` beside this module: every
argument of the OpenAI-compatible server with its values, how the parser reads words, the quantisation methods with the compute
capability that each asks for, and the model architectures.
``PYTHON`` is the interpreter of an environment in which that version is installed; no GPU is needed. With ``--source-tree`` the
version is imported from an unpacked source archive instead, and the environment only lends its dependencies.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import yaml

OUTPUT = Path(__file__).with_name("vllm_parsers")
#: A longer row is written over several lines.
_LINE_LENGTH = 150
#: Imports of PyTorch and vLLM on a slow disk.
TIMEOUT_S = 600

#: Runs in the version's own interpreter (Python >= 3.9) and prints one JSON object on file descriptor 3.
_ASK = r'''
import argparse, enum, importlib, json, os, sys, typing

from vllm.engine import arg_utils

# Where an argument has two lists of choices this version takes the first of a set, another one at each start: only what
# both have is taken every time.
first_type = getattr(arg_utils, "get_type", None)

def common_type(hints, kind):
    found = [hint for hint in hints if arg_utils.is_type(hint, kind)]
    if kind is typing.Literal and len(found) > 1:
        shared = set.intersection(*(set(typing.get_args(hint)) for hint in found))
        return typing.Literal[tuple(sorted(shared))]
    return first_type(hints, kind)

if first_type is not None:
    arg_utils.get_type = common_type

from vllm.entrypoints.openai.cli_args import make_arg_parser
try:
    from vllm.utils import FlexibleArgumentParser
except ImportError:
    from vllm.utils.argparse_utils import FlexibleArgumentParser
import vllm, torch, transformers

def plain(value):
    if isinstance(value, enum.Enum):
        return plain(value.value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple, set)):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    return "(" + type(value).__name__ + ")"

def inner(function):
    """What an optional type converts to, found in its closure."""
    for cell in getattr(function, "__closure__", None) or ():
        if callable(cell.cell_contents):
            return cell.cell_contents
    return None

def kind_of(action):
    """(type, whether an empty word or `None` stands for no value)"""
    function, nullable = action.type, False
    acting = {"StoreBoolean": "boolean", "LoRAParserAction": "named-path-or-json", "PromptAdapterParserAction": "named-path"}
    if type(action).__name__ in acting:
        return acting[type(action).__name__], False
    while getattr(function, "__name__", "") in ("_optional_type", "parse_type", "_parse_type"):
        nullable = nullable or function.__name__ == "_optional_type"
        function = inner(function)
    name = getattr(function, "__name__", str(function))
    if name == "nullable_str":
        return "string", True
    if name == "nullable_kvs":
        return "key-values", True
    known = {"str": "string", "int": "integer", "float": "number", "loads": "json", "human_readable_int": "human-integer"}
    whole = getattr(function, "__qualname__", "")
    if whole in ("PoolerConfig.from_json", "KVTransferConfig.from_cli"):
        return "json-object", nullable
    if whole == "CompilationConfig.from_cli":
        return "level-or-json", nullable
    if function is None or function in (str, int, float):
        return known[name] if function else "string", nullable
    return known.get(name, name), nullable

def describe(action):
    negated = [name for name in action.option_strings if name.startswith("--no-")] \
        if isinstance(action, argparse.BooleanOptionalAction) else []
    kind, nullable = kind_of(action)
    arity = {None: 1, "?": "optional", "+": "any", "*": "any"}.get(action.nargs, action.nargs)
    row = {
        "names": [name for name in action.option_strings if name not in negated] or [action.dest],
        "negated": negated,
        "arity": arity,
        "type": kind if arity != 0 else "switch",
        "default": plain(action.default),
    }
    if type(action).__name__.endswith("AppendAction"):
        row["repeats"] = True
    if action.choices is not None:
        choices = list(action.choices)
        # `None` as a string is never met where the type has turned it into no value before the comparison.
        row["choices"] = [plain(choice) for choice in choices if choice is not None and not (nullable and choice == "None")]
        nullable = nullable and None in choices
    if nullable:
        row["nullable"] = True
    if "deprecat" in (action.help or "").lower():
        row["deprecated"] = True
    return row

class Caught(Exception):
    pass

def serve_parser():
    """The `serve` subcommand's parser, as the command line itself makes it."""
    caught = []
    def parse_args(self, args=None, namespace=None):
        caught.append(self)
        raise Caught
    original = FlexibleArgumentParser.parse_args
    FlexibleArgumentParser.parse_args = parse_args
    sys.argv = ["vllm", "serve", "model"]
    try:
        for name in ("vllm.entrypoints.cli.main", "vllm.scripts"):
            try:
                module = importlib.import_module(name)
            except ImportError:
                continue
            try:
                module.main()
            except Caught:
                break
    finally:
        FlexibleArgumentParser.parse_args = original
    for action in caught[0]._actions:
        if isinstance(action, argparse._SubParsersAction):
            return action.choices["serve"]
    raise SystemExit("no `serve` subcommand was found")

def takes(*words):
    try:
        make_arg_parser(FlexibleArgumentParser()).parse_args(list(words))
    except SystemExit:
        return False
    return True

parser = make_arg_parser(FlexibleArgumentParser())
arguments = [describe(action) for action in parser._actions if not isinstance(action, argparse._HelpAction)]
known = {name for row in arguments for name in row["names"]}
serve = serve_parser()
extra = [describe(action) for action in serve._actions if not isinstance(action, argparse._HelpAction)]
extra = [row for row in extra if not known & set(row["names"])]

from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, get_quantization_config
from vllm.model_executor.models.registry import ModelRegistry

minimum = {}
for method in QUANTIZATION_METHODS:
    try:
        minimum[method] = get_quantization_config(method).get_min_capability()
    except Exception as error:
        minimum[method] = None
        print(method, type(error).__name__, error, file=sys.stderr)

fallback = sorted(name for name in ModelRegistry.models if name in ("TransformersModel", "TransformersForCausalLM"))
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as causal
compatible = []
for name in sorted(set(causal.values())) if fallback else []:
    model = getattr(transformers, name, None)
    try:
        if model is not None and model.is_backend_compatible():
            compatible.append(name)
    except Exception:
        pass

document = {
    "arguments": arguments,
    "serve_arguments": extra,
    "words": {
        "abbreviations": takes("--max-model-l", "7"),
        "underscores": takes("--max_model_len", "7"),
        "dotted_json": takes("--override-neuron-config.a", "1") or takes("--hf-overrides.a", "1"),
    },
    "quantization": minimum,
    "architectures": sorted(ModelRegistry.get_supported_archs()),
    "transformers_architectures": compatible,
    "made_with": {
        "python": sys.version.split()[0], "torch": torch.__version__, "transformers": transformers.__version__,
    },
    "version": vllm.__version__,
    "torch_architectures": torch._C._cuda_getArchFlags().split() if torch.version.cuda else [],
}
os.write(3, json.dumps(document).encode())
'''


class ExtractError(Exception):
    """The version could not be asked; nothing is written."""


def ask(python: Path, *, source_tree: Path | None = None) -> dict[str, Any]:
    """Everything that a version of vLLM says of itself.

    Args:
        python: An interpreter that can import it.
        source_tree: An unpacked source archive to import it from instead.

    Raises:
        ExtractError: It does not import, or says nothing.
    """
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "VLLM_"))}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    # The engine that runs on Volta; its defaults differ from the other's.
    environment |= {"VLLM_USE_V1": "0", "PYTHONHASHSEED": "0"}
    if source_tree is not None:
        environment["PYTHONPATH"] = str(source_tree)
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder, "answer.json")
        with answer.open("wb") as stream:
            # File descriptor 3, since vLLM logs to standard output while it is imported.
            shell = ["/bin/sh", "-c", 'exec "$@" 3>&"$ANSWER"', "sh", str(python), "-c", _ASK]
            environment["ANSWER"] = str(stream.fileno())
            done = subprocess.run(
                shell, env=environment, cwd=folder, pass_fds=(stream.fileno(),), capture_output=True, text=True, timeout=TIMEOUT_S
            )
        text = answer.read_text(encoding="utf-8")
    if done.returncode != 0 or not text:
        raise ExtractError(f"`{python}` could not ask vLLM: {done.stderr.strip()[-2000:] or done.stdout.strip()[-2000:]}")
    document: dict[str, Any] = json.loads(text)
    return document


def arrange(version: str, said: Mapping[str, Any], *, as_of: date, from_source: bool) -> dict[str, Any]:
    """The file's content: sorted, with its source, without what is a default.

    Raises:
        ExtractError: Another version answered, or a quantisation method did not say its minimum.
    """
    if said["version"].split("+")[0] != version:
        raise ExtractError(f"vLLM {version} was asked for, {said['version']} answered")

    def row(argument: Mapping[str, Any]) -> dict[str, Any]:
        kept = {key: value for key, value in argument.items() if not (key == "negated" and not value)}
        return _OnOneLine(kept) if len(json.dumps(kept)) <= _LINE_LENGTH else kept

    made = {**said["made_with"], "torch_architectures": said["torch_architectures"]}
    where = f"vllm-{version} source archive" if from_source else f"vllm=={version}"
    return {
        "as_of": as_of,
        "version": version,
        "source": f"{where}: make_arg_parser(FlexibleArgumentParser()), get_quantization_config, ModelRegistry",
        "made_with": _OnOneLine(made),
        "words": _OnOneLine(said["words"]),
        "arguments": sorted(map(row, said["arguments"]), key=lambda item: str(item["names"][0])),
        "serve_arguments": sorted(map(row, said["serve_arguments"]), key=lambda item: str(item["names"][0])),
        "quantization": {name: minimum for name, minimum in sorted(said["quantization"].items()) if minimum is not None},
        "quantization_unknown": sorted(name for name, minimum in said["quantization"].items() if minimum is None),
        "architectures": said["architectures"],
        "transformers_architectures": said["transformers_architectures"],
    }


class _OnOneLine(dict[str, Any]):
    """A mapping that is written on one line."""


class _Dumper(yaml.SafeDumper):
    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        # Sequences are indented under their key, as yamllint asks.
        super().increase_indent(flow, False)


_Dumper.add_representer(
    _OnOneLine, lambda dumper, row: dumper.represent_mapping("tag:yaml.org,2002:map", row.items(), flow_style=True)
)


def to_yaml(document: Mapping[str, Any]) -> str:
    """The file's bytes: the same document gives the same ones."""
    version = document["version"]
    head = f"# vLLM {version}, asked of itself: `python -m v100ctl.catalog.extract_vllm {version}` makes it again.\n"
    return head + yaml.dump(
        dict(document), Dumper=_Dumper, sort_keys=False, default_flow_style=False, width=2**31, allow_unicode=False
    )


def main(arguments: Sequence[str]) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m v100ctl.catalog.extract_vllm", description=__doc__.splitlines()[0])
    parser.add_argument("version", help="as the package index has it: 0.8.5.post1")
    parser.add_argument("--python", type=Path, required=True, help="an interpreter that can import that version")
    parser.add_argument("--source-tree", type=Path, help="an unpacked source archive to import it from")
    parser.add_argument("--as-of", type=date.fromisoformat, default=datetime.now(tz=UTC).date(), help="the file's date")
    given = parser.parse_args(arguments)
    if not re.fullmatch(r"[0-9]+(\.[0-9]+)+(\.post[0-9]+)?", given.version):
        parser.error(f"{given.version!r} is not a version of vLLM")
    try:
        said = ask(given.python, source_tree=given.source_tree)
        document = arrange(given.version, said, as_of=given.as_of, from_source=given.source_tree is not None)
    except (ExtractError, OSError, subprocess.TimeoutExpired) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    OUTPUT.mkdir(exist_ok=True)
    path = OUTPUT / f"{given.version}.yml"
    path.write_text(to_yaml(document), encoding="utf-8")
    print(f"{path}: {len(document['arguments'])} arguments, {len(document['architectures'])} architectures")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
