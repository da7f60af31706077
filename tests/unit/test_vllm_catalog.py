"""The catalog's rows of vLLM against the files that the versions themselves made, and the extraction's own arrangement."""

from __future__ import annotations

from datetime import date
from typing import Any, get_args

import pytest
import yaml

from v100ctl.catalog import load_catalog, version_key
from v100ctl.catalog.extract_vllm import ExtractError, arrange, main, to_yaml
from v100ctl.catalog.vllm import VllmArgument, VllmParser, VllmRow
from v100ctl.fleet import RopeScaling, Sampling, Settings

ROWS = load_catalog().vllm_rows
LAUNCHABLE = [row for row in ROWS if row.launchable]
#: What a setting is to vLLM where it is no word of its command line.
ELSEWHERE = {"threads", "kv_cache_type_v", "speculative", "rope_scaling", "sampling"}


def words_of(row: VllmRow) -> set[str]:
    found = {
        word for spelling in row.spellings.values() if isinstance(spelling, dict) for words in spelling.values() for word in words
    }
    found |= {spelling for spelling in row.spellings.values() if isinstance(spelling, str)}
    found |= {word for words in row.quantization_words.values() for word in words}
    return {word for word in (*found, *row.json_arguments, *row.secret_flags) if word.startswith("-")}


def test_every_row_names_its_sources() -> None:
    for row in ROWS:
        assert row.source
        assert row.reason
        assert row.reason_source
        assert bool(row.requirements) == bool(row.requirements_source)
        assert version_key(row.python_min) <= version_key(row.python_max)
    assert [row.version for row in ROWS] == sorted((row.version for row in ROWS), key=version_key)


def test_ranges_neither_overlap_nor_leave_holes() -> None:
    catalog = load_catalog()
    for version, expected in (
        ("0.9.0", "0.9.2"),
        ("0.9.0.1", "0.9.2"),
        ("0.10.0", "0.10.2"),
        ("0.11.0", "0.11.0"),
        ("1.0.0", "0.11.0"),
    ):
        assert [row.version for row in ROWS if row.answers_for(version)] == [expected]
        found = catalog.vllm(version)
        assert found is not None
        assert found.version == expected
    assert catalog.vllm("0.5.5") is None
    assert catalog.vllm("nonsense") is None


@pytest.mark.parametrize("row", LAUNCHABLE, ids=lambda row: row.version)
def test_a_row_that_can_be_launched(row: VllmRow) -> None:
    parser = row.parser
    assert parser is not None
    assert parser.version == row.version
    assert row.sm_70 == "yes"
    assert 70 in row.torch_architectures
    # Every word that the row spells is one of its parser's, and every switch that it uses is one.
    for word in words_of(row):
        argument = parser.flag(word)
        assert argument is not None, word
        assert parser.normal(word) in parser.by_word, f"{word} is an abbreviation"
    defaults = row.defaults
    assert defaults is not None
    for setting, expected in (
        ("gpu_memory_utilization", defaults.gpu_memory_utilization),
        ("swap_space_gib", defaults.swap_space_gib),
    ):
        argument = parser.flag(str(row.spellings[setting]))
        assert argument is not None
        assert argument.default == expected
    parallel = parser.flag("--max-num-seqs")
    assert parallel is not None
    assert parallel.default in (None, defaults.parallel)
    # A method that a scheme of compressed-tensors falls back on cannot ask for less than the method itself.
    assert set(row.compressed_tensors.values()) <= {75, 80}


@pytest.mark.parametrize("row", LAUNCHABLE, ids=lambda row: row.version)
def test_every_setting_is_spelled_or_meaningless(row: VllmRow) -> None:
    from v100ctl.plan.vllm import _MEANINGLESS

    spelled = {setting.partition(".")[0] for setting in row.spellings}
    assert set(Settings.model_fields) == (spelled & set(Settings.model_fields)) | set(_MEANINGLESS) | ELSEWHERE
    assert not spelled & set(_MEANINGLESS)
    for name in RopeScaling.model_fields:
        assert row.json_key(f"rope_scaling.{name}") or f"rope_scaling.{name}" in row.spellings
    # Whole numbers, fractions and texts go to arguments that take them.
    parser = row.parser
    assert parser is not None
    for setting, kind in (("context_length", int), ("gpu_memory_utilization", float), ("served_model_name", str)):
        assert kind in get_args(Settings.model_fields[setting].annotation) or setting == "served_model_name"
        argument = parser.flag(str(row.spellings[setting]))
        assert argument is not None
        assert argument.problem({int: "7", float: "0.5", str: "x"}[kind]) is None


def test_sampling_is_said_where_the_version_has_words_for_it() -> None:
    said = {row.version: {name for name in Sampling.model_fields if row.json_key(f"sampling.{name}")} for row in LAUNCHABLE}
    assert said["0.6.3.post1"] == set()
    assert said["0.8.5.post1"] == set(Sampling.model_fields) - {"presence_penalty"}


def test_minima_of_a_card_of_7_0() -> None:
    for row in LAUNCHABLE:
        runs = {method for method, least in row.quantization.items() if 0 <= least <= 70}
        assert {"gptq", "gguf", "bitsandbytes"} <= runs
        assert not {"awq", "awq_marlin", "gptq_marlin", "fp8"} & runs
    assert "moe_wna16" in LAUNCHABLE[-1].quantization
    assert "moe_wna16" not in LAUNCHABLE[0].quantization


def test_architectures_only_grow() -> None:
    assert "Qwen3ForCausalLM" in LAUNCHABLE[-1].architectures
    assert "Qwen3ForCausalLM" not in LAUNCHABLE[0].architectures
    assert "LlamaForCausalLM" in LAUNCHABLE[0].architectures


def said(**changes: Any) -> dict[str, Any]:
    return {
        "version": "0.8.5.post1",
        "made_with": {"python": "3.11.7", "torch": "2.6.0", "transformers": "4.51.3"},
        "torch_architectures": ["sm_70"],
        "words": {"abbreviations": True, "underscores": True, "dotted_json": False},
        "arguments": [
            {"names": ["--port"], "negated": [], "arity": 1, "type": "integer", "default": 8000},
            {"names": ["--foo"], "negated": ["--no-foo"], "arity": 0, "type": "switch", "default": None},
            {
                "names": ["--quantization", "-q"],
                "negated": [],
                "arity": 1,
                "type": "string",
                "default": None,
                "choices": [f"method-{number}" for number in range(20)],
            },
        ],
        "serve_arguments": [],
        "quantization": {"gptq": 60, "tpu_int8": None, "awq": 75},
        "architectures": ["B", "A"],
        "transformers_architectures": [],
        **changes,
    }


def test_what_a_version_says_becomes_one_same_file() -> None:
    document = arrange("0.8.5.post1", said(), as_of=date(2026, 11, 29), from_source=False)
    again = arrange("0.8.5.post1", said(arguments=said()["arguments"][::-1]), as_of=date(2026, 11, 29), from_source=False)
    text = to_yaml(document)
    assert text == to_yaml(again)
    assert max(map(len, text.splitlines())) <= 160
    parser = VllmParser.model_validate(yaml.safe_load(text))
    assert [argument.names[0] for argument in parser.arguments] == ["--foo", "--port", "--quantization"]
    assert parser.quantization == {"awq": 75, "gptq": 60}
    assert parser.quantization_unknown == ("tpu_int8",)
    assert parser.flag("--no-foo") == parser.flag("--foo")


def test_another_version_is_not_taken_for_the_one_that_was_asked() -> None:
    with pytest.raises(ExtractError, match=r"0\.7\.3 was asked for, 0\.8\.5\.post1 answered"):
        arrange("0.7.3", said(), as_of=date(2026, 11, 29), from_source=False)


def test_an_interpreter_without_vllm_writes_nothing(tmp_path: Any, monkeypatch: Any, capsys: Any) -> None:
    import sys

    monkeypatch.setattr("v100ctl.catalog.extract_vllm.OUTPUT", tmp_path / "parsers")
    assert main(["0.8.5.post1", "--python", sys.executable]) == 1
    assert "could not ask vLLM" in capsys.readouterr().err
    assert not (tmp_path / "parsers").exists()
    with pytest.raises(SystemExit):
        main(["../evil", "--python", sys.executable])


@pytest.mark.parametrize(
    ("type_", "nullable", "good", "bad"),
    [
        ("integer", False, ["1", "-3", " 5", "1_000"], ["x", "1.5", "", "8k"]),
        ("human-integer", False, ["8k", "8K", "1.5k", "4096", "2M"], ["1.5K", "k", "8t"]),
        ("number", False, ["0.9", "1e3", "nan", "-1"], ["x", ""]),
        ("boolean", False, ["True", "false"], ["1", "yes", ""]),
        ("json", False, ["{}", "1", '"x"'], ["{", "a=1"]),
        ("json", True, ["{}", "a=1,b=2", "", "None"], ["{a}", "a=x", "1"]),
        ("json-object", False, ['{"a": 1}'], ["1", "x"]),
        ("level-or-json", False, ["3", "{}"], ["4", "x"]),
        ("key-values", True, ["a=1", ""], ["a", "a=1,a=2", "a=1=2"]),
        ("named-path", False, ["a=/p"], ["a", "a=b=c"]),
        ("named-path-or-json", False, ["a=/p", "{}", ""], ["a", "a=1,b=2"]),
        ("string", False, ["anything", ""], []),
    ],
)
def test_values(type_: str, nullable: bool, good: list[str], bad: list[str]) -> None:
    argument = VllmArgument(names=("--x",), arity=1, type=type_, nullable=nullable)
    assert [argument.problem(value) for value in good] == [None] * len(good)
    assert all(argument.problem(value) for value in bad)


@pytest.mark.parametrize("version", load_catalog().vllm_versions)
def test_what_moves_memory_is_an_argument_of_the_version(version: str) -> None:
    row, parser = load_catalog().vllm(version), load_catalog().vllm_parser(version)
    assert row is not None
    assert parser is not None
    known = {name for argument in parser.arguments for name in argument.names}
    assert set(row.moves_memory) <= known
    assert row.reads_arguments
