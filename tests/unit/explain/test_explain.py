"""Explaining pasted command lines: cases in YAML beside this file, and properties."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.factory import make_config, make_facts
from v100ctl.catalog import load_catalog
from v100ctl.catalog.history import load_history
from v100ctl.errors import V100ctlError
from v100ctl.fleet import parse_config
from v100ctl.plan import llama_cpp, vllm
from v100ctl.plan.command_line import LONGEST_TEXT
from v100ctl.plan.explain import Card, CommandExplanation, Explanation, explain
from v100ctl.plan.explain.report import exit_code

HERE = Path(__file__).parent
CATALOG = load_catalog()
SECRET = "sesame"


def explained(text: str, case: dict[str, Any] | None = None) -> Explanation:
    case = case or {}
    capability = case.get("compute_capability", "7.0")
    card = Card(None, capability, "default")
    if "gpu" in case:
        row = CATALOG.gpu_named(case["gpu"])
        assert row is not None
        card = Card(row.name, row.compute_capability, "asked")
    return explain(
        text,
        CATALOG,
        llama_cpp_build=case.get("build", 11434),
        vllm_version=case.get("vllm", "0.8.5.post1"),
        card=card,
    )


def lines(command: CommandExplanation, *, everything: bool = False) -> list[str]:
    """The findings as the cases write them; those that are plainly ok only on demand."""
    found = [finding for finding in command.findings if everything or finding.id != "ok"]
    return [f"{finding.verdict}{'' if finding.id == 'ok' else f' {finding.id}'} | {' '.join(finding.words)}" for finding in found]


def contains(whole: Any, part: Any) -> bool:
    if isinstance(part, dict):
        return isinstance(whole, dict) and all(key in whole and contains(whole[key], value) for key, value in part.items())
    return bool(whole == part)


def load(name: str) -> list[dict[str, Any]]:
    document: list[dict[str, Any]] = yaml.safe_load((HERE / name).read_text(encoding="utf-8"))
    return document


@pytest.mark.parametrize("case", load("reports.yml"), ids=lambda case: case["name"])
def test_a_report_is_explained_flag_by_flag(case: dict[str, Any]) -> None:
    found = explained(case["text"], case)
    assert [command.program for command in found.commands] == [command["program"] for command in case["commands"]]
    for command, expected in zip(found.commands, case["commands"], strict=True):
        if "findings" in expected:
            assert lines(command, everything=True) == expected["findings"]
        else:
            assert lines(command) == expected["not_ok"]
        if "inventory" in expected:
            snippet = yaml.safe_load(command.inventory)
            assert contains(snippet, expected["inventory"]), command.inventory
    assert exit_code(found) == case["exit"]


FLAGS = [({**case}, f"{group['base']} {case['text']}".strip()) for group in load("flags.yml") for case in group["cases"]]


@pytest.mark.parametrize(("case", "text"), FLAGS, ids=[text for _, text in FLAGS])
def test_a_flag_means_what_the_engine_makes_of_it(case: dict[str, Any], text: str) -> None:
    found = explained(text, case)
    (command,) = found.commands
    assert lines(command) == case["not_ok"]
    verdicts = {line.split()[0] for line in case["not_ok"]}
    assert exit_code(found) == (1 if verdicts & {"refused", "fails"} else 2 if verdicts - {"ok"} else 0)


SURROUNDINGS = load("surroundings.yml")


@pytest.mark.parametrize("case", SURROUNDINGS, ids=lambda case: case.get("name", case["text"]))
def test_what_surrounds_a_command_is_read_too(case: dict[str, Any]) -> None:
    found = explained(case["text"], case)
    (command,) = found.commands
    assert sorted(lines(command)) == sorted(case["not_ok"])


def test_every_advice_of_the_catalog_has_a_case() -> None:
    seen = {line.split(" | ")[0].split()[-1] for case, _ in FLAGS for line in case["not_ok"]}
    histories = [load_history("llama_cpp"), load_history("vllm")]
    advice = {row.id for history in histories for row in history.advice}
    advice |= {row.id for history in histories if history.cmake for row in history.cmake.advice}
    assert advice <= seen


# --- the catalog's own ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("build", CATALOG.llama_cpp_parser_builds)
def test_former_flags_of_llama_cpp_are_gone_when_they_are_said_to_be(build: int) -> None:
    parser = CATALOG.llama_cpp_parser(build)
    assert parser is not None
    for row in load_history("llama_cpp").former_flags:
        for name in row.names:
            gone = row.first_without is None or build >= int(row.first_without)
            assert (parser.flag(name) is None) or not gone, f"{name} at {build}"


@pytest.mark.parametrize("version", CATALOG.vllm_versions)
def test_former_arguments_of_vllm_are_gone_when_they_are_said_to_be(version: str) -> None:
    from packaging.version import Version

    parser = CATALOG.vllm_parser(version)
    assert parser is not None
    for row in load_history("vllm").former_flags:
        for name in row.names:
            gone = row.first_without is None or Version(version) >= Version(str(row.first_without))
            assert not gone or name not in parser.known_words, f"{name} at {version}"


def test_what_replaces_a_former_flag_is_known() -> None:
    parser = CATALOG.llama_cpp_parser(11434)
    assert parser is not None
    for row in (*load_history("llama_cpp").former_flags, *load_history("llama_cpp").bare_flags):
        if row.instead:
            assert parser.flag(row.instead.split()[0]) is not None, row.instead


def test_meanings_are_of_flags_that_some_build_has() -> None:
    llama_cpp_words = {
        word for build in CATALOG.llama_cpp_parser_builds for word in (CATALOG.llama_cpp_parser(build) or pytest.fail()).words
    }
    assert set(load_history("llama_cpp").meanings.flags) <= llama_cpp_words
    vllm_words = {"model_tag", "--config"} | {
        word for version in CATALOG.vllm_versions for word in (CATALOG.vllm_parser(version) or pytest.fail()).known_words
    }
    assert set(load_history("vllm").meanings.flags) <= vllm_words
    cmake = load_history("llama_cpp").cmake
    parser = CATALOG.llama_cpp_parser(11434)
    assert cmake is not None and parser is not None
    assert set(cmake.meanings.flags) <= set(parser.cmake_options)
    assert not {name for row in cmake.names for name in row.names} & set(parser.cmake_options)


# --- properties -------------------------------------------------------------------------------------------------------------


PIECES = st.sampled_from(
    [
        "llama-server", "vllm serve", "python -m vllm.entrypoints.openai.api_server", "cmake", "docker run", "sudo", "bash -c",
        "-m", "-fa", "--flash-attn", "-c", "4096", "--ctx-size=1", "-ctk", "q8_0", "--enforce-eager", "False", "-q", "awq", "-D",
        "-DGGML_CUDA=ON", "\u2013ngl", "\u201c", "'", '"', "\\\n", "\\ \n", "\n", ";", "|", "&&", "(", ")", "$(", "${A",
        "`", "<<EOF", "EOF",
        "[Service]", "ExecStart=", "Environment=A=b", "A=b", "A=(", "$A", "${A[@]}", "#", "--", "-", "<x>", "\t", "%i", "{}",
    ]
)  # fmt: skip


@settings(max_examples=150)
@given(st.one_of(st.text(max_size=300), st.lists(PIECES, max_size=25).map(" ".join), st.lists(PIECES, max_size=25).map("".join)))
def test_no_text_is_too_odd(text: str) -> None:
    try:
        found = explained(text)
    except V100ctlError as error:
        assert error.hint
        return
    assert found.commands
    for command in found.commands:
        yaml.safe_load(command.inventory or "{}")


HOSTILE = [
    "'",
    "\u201c",
    "\u2019",
    "${",
    "$",
    "(",
    "<<A",
    "\\",
    "\n",
    "# ",
    "1",
    "a'",
    "@",
    "[",
    "\nExecStart=",
    "bash -c ",
    "-x ",
]


@pytest.mark.parametrize("piece", HOSTILE)
def test_no_text_takes_long(piece: str) -> None:
    """A text is bounded, and so is what any of it costs: a step that grows with the square of the text would hang here."""
    text = piece * (LONGEST_TEXT // len(piece))
    assert explained(f"llama-server -m /m {text}").commands[0].program == "llama-server"


WORDS = st.text(st.characters(blacklist_categories=("Cs", "Cc")), max_size=20)


@settings(max_examples=200)
@given(st.lists(WORDS, max_size=6))
def test_quoted_words_are_read_as_a_shell_reads_them(words: list[str]) -> None:
    from v100ctl.plan.command_line import find_commands

    plain = [re.sub(r"[\s\u00ad\u200b-\u200d\u2060\ufeff]", " ", word) for word in words]
    (command,) = find_commands(f"llama-server {shlex.join(plain)}")
    assert list(command.words) == plain


@settings(max_examples=60)
@given(
    st.sampled_from([row.build for row in CATALOG.llama_cpp]),
    st.fixed_dictionaries(
        {},
        optional={
            "context_length": st.integers(1, 200_000),
            "parallel": st.integers(1, 8),
            "kv_unified": st.booleans(),
            "batch_size": st.integers(2048, 4096),
            "ubatch_size": st.integers(1, 2048),
            "flash_attention": st.sampled_from(["on", "auto"]),
            "threads": st.integers(1, 64),
            "gpu_layers": st.integers(1, 99),
            "split_mode": st.sampled_from(["none", "layer"]),
            "metrics": st.booleans(),
            "log_requests": st.booleans(),
            "sampling": st.fixed_dictionaries({"temperature": st.floats(0, 2)}, optional={"top_k": st.integers(0, 100)}),
            "rope_scaling": st.just({"kind": "yarn", "factor": 2.0, "original_context_length": 32768}),
        },
    ),
    st.sampled_from([None, "f16", "q8_0", "q4_0"]),
)
def test_what_the_plan_renders_means_what_it_says(build: int, chosen: dict[str, Any], cache: str | None) -> None:
    """The toolkit's own command lines get exit code 0, and their settings come back."""
    if cache is not None:
        chosen |= {"kv_cache_type_k": cache, "kv_cache_type_v": cache}
    config = make_config({"settings": chosen}, llama_cpp_build=build, llama_cpp_backend="cuda")
    row = CATALOG.llama_cpp_build(build)
    assert row is not None
    spec = config.llm_server_instances["chat"]
    argv = llama_cpp.argv(
        config, spec, row, make_facts(), release_path="/opt/x", model_path="/srv/m.gguf", alias="chat", draft_model_path=None
    )
    found = explained(shlex.join(argv), {"build": build})
    assert exit_code(found) == 0, lines(found.commands[0])
    snippet = yaml.safe_load(found.commands[0].inventory)
    instance = snippet["llm_server_instances"]["chat"]
    instance["model"]["sha256"] = "ab" * 32
    again = parse_config("h1", snippet).llm_server_instances["chat"]
    wanted = spec.settings.model_dump(exclude_none=True)
    # What a build says with no words is its default, and leaves nothing to read.
    for name in ("metrics", "log_requests"):
        if name in wanted and row.flags.words(name, str(wanted[name]).lower()) == ():
            del wanted[name]
    came_back = again.settings.model_dump(exclude_none=True)
    assert {key: came_back.get(key) for key in wanted} == wanted
    assert not set(again.extra_args) - {"--fit", "off", "--no-ui", "--offline"}


@settings(max_examples=60)
@given(
    st.sampled_from(CATALOG.vllm_versions),
    st.fixed_dictionaries(
        {},
        optional={
            "context_length": st.integers(16, 100_000),
            "parallel": st.integers(1, 16),
            "gpu_memory_utilization": st.floats(0.3, 0.97),
            "swap_space_gib": st.integers(0, 8),
            "enforce_eager": st.booleans(),
            "chunked_prefill": st.just(False),
            "dtype": st.sampled_from(["half", "float16"]),
            "quantization": st.sampled_from(["gptq", "bitsandbytes"]),
            "log_requests": st.booleans(),
            "served_model_name": st.sampled_from(["m", "a b"]),
        },
    ),
)
def test_what_the_plan_renders_for_vllm_means_what_it_says(version: str, chosen: dict[str, Any]) -> None:
    config = make_config({"engine": "vllm", "model": {"path": "/srv/m", "sha256": "ab" * 32, "url": None}, "settings": chosen})
    row = CATALOG.vllm(version)
    assert row is not None
    spec = config.llm_server_instances["chat"]
    alias = spec.settings.served_model_name or "chat"
    argv = vllm.argv(spec, row, release_path="/opt/x", model_path="/srv/m", alias=alias)
    found = explained(shlex.join(argv), {"vllm": version})
    assert exit_code(found) == 0, lines(found.commands[0])
    snippet = yaml.safe_load(found.commands[0].inventory)
    snippet["llm_server_instances"]["chat"]["model"]["sha256"] = "ab" * 32
    came_back = parse_config("h1", snippet).llm_server_instances["chat"].settings.model_dump(exclude_none=True)
    wanted = {
        name: value
        for name, value in spec.settings.model_dump(exclude_none=True).items()
        if row.words(name, str(value).lower() if isinstance(value, bool) else str(value)) != ()
    }
    assert {key: came_back.get(key) for key in wanted} == wanted


SECRETS = [
    f"llama-server -m x.gguf --api-key -{SECRET}-with-a-dash",
    f"vllm serve m --api {SECRET}",
    f"vllm serve m --ap={SECRET}",
    f"llama-server -m x.gguf --header 'Authorization: Bearer {SECRET}'",
    f"llama-server -mu https://hf_{SECRET}{SECRET}@example.com/x.gguf",
    f"llama-server -mu https://example.com/x.gguf?token={SECRET}",
    "llama-server -m /m --api-key sesame",
    "llama-server -m /m --api_key sesame",
    "llama-server -m /m --api-key=sesame",
    "llama-server -m /m \u2013api-key sesame",
    "llama-server -m /m -hft sesame --hf-token sesame",
    "LLAMA_API_KEY=sesame llama-server -m /m",
    "export HF_TOKEN=sesame\nllama-server -m /m",
    "sudo HF_TOKEN=sesame llama-server -m /m",
    "llama-server --model-url https://user:sesame@host/m.gguf",
    "vllm serve m --api-key sesame",
    "vllm serve m --api-k sesame",
    "vllm serve m --api-key=sesame",
    "vllm serve m --hf-token sesame",
    "vllm serve m --password sesame",
    "VLLM_API_KEY=sesame vllm serve m",
    "docker run -e VLLM_API_KEY=sesame vllm/vllm-openai:v0.8.5.post1 --model m --api-key sesame",
    "[Service]\nEnvironment=HF_TOKEN=sesame\nExecStart=llama-server -m /m --api-key sesame",
    "cmake -B build -DHF_TOKEN=sesame",
    "llama-server -m /m --api-key 'sesame",
]


@pytest.mark.parametrize("text", SECRETS)
def test_a_secret_is_never_printed_back(text: str) -> None:
    found = explained(text)
    assert found.commands
    assert SECRET not in repr(found)


def test_what_was_looked_for_is_said_where_nothing_is_found() -> None:
    for text in ("", "sudo apt install cmake", "pip install vllm", "-ngl 99 -c 8192", "pkill llama-server", "cd vllm && ls"):
        with pytest.raises(V100ctlError, match="no command was found") as caught:
            explained(text)
        assert "`llama-server ...`" in str(caught.value.hint)


@pytest.mark.parametrize("case", [case for case in SURROUNDINGS if "words" in case], ids=lambda case: case["name"])
def test_a_command_gets_the_words_that_it_would_get(case: dict[str, Any]) -> None:
    from v100ctl.plan.command_line import find_commands

    (command,) = find_commands(case["text"])
    assert list(command.words) == case["words"]
