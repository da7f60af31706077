"""Settings spelled for each version of vLLM, and words judged as the version's own parser judges them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from v100ctl.catalog import load_catalog
from v100ctl.catalog.vllm import VllmParser, VllmRow
from v100ctl.fleet import InstanceSpec, Settings
from v100ctl.plan import vllm
from v100ctl.plan.vllm import MODULE, UnspelledSettingError, argv, check_argv, environment, meaningless_settings

VERSIONS = load_catalog().vllm_versions
OLD, NEW = "0.6.3.post1", "0.8.5.post1"
MODEL = {"path": "/srv/models/qwen", "sha256": "ab" * 32}
DRAFT = {"kind": "draft", "depth": 4, "model": {"path": "/srv/models/draft", "sha256": "cd" * 32}}


def row(version: str) -> VllmRow:
    found = load_catalog().vllm(version)
    assert found is not None
    return found


def parser(version: str) -> VllmParser:
    found = load_catalog().vllm_parser(version)
    assert found is not None
    return found


def words(version: str, settings: dict[str, Any] | None = None, *, gpu_count: int = 1, **instance: Any) -> tuple[str, ...]:
    spec = InstanceSpec.model_validate({"engine": "vllm", "model": MODEL, "settings": settings or {}, **instance})
    return argv(
        spec,
        row(version),
        release_path="/opt/r",
        model_path="/srv/models/qwen",
        alias="chat",
        gpu_count=gpu_count,
        draft_model_path="/srv/models/draft",
    )


def refused(version: str, *arguments: str, serve: bool = False) -> dict[str, str]:
    start = ("vllm", "serve", "model") if serve else ("python", "-m", MODULE)
    problems = check_argv((*start, *arguments), parser(version), former=row(version).former_arguments)
    return {problem.word: problem.kind for problem in problems}


def test_a_whole_command_line() -> None:
    assert words(NEW, {"context_length": 8192, "parallel": 4, "gpu_memory_utilization": 0.96, "quantization": "gptq"}) == (
        *("/opt/r/bin/python", "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", "/srv/models/qwen", "--served-model-name", "chat", "--host", "127.0.0.1", "--port", "8000"),
        *("--max-model-len", "8192", "--max-num-seqs", "4", "--dtype", "half", "--quantization", "gptq"),
        *("--gpu-memory-utilization", "0.96", "--no-enable-chunked-prefill", "--no-enable-prefix-caching"),
        "--disable-log-requests",
    )


@pytest.mark.parametrize(
    ("version", "settings", "expected", "missing"),
    [
        (OLD, {}, ("--enable-chunked-prefill=False",), "--enable-prefix-caching"),
        (NEW, {}, ("--no-enable-chunked-prefill", "--no-enable-prefix-caching"), "--enable-chunked-prefill=False"),
        (OLD, {"prefix_caching": True}, ("--enable-prefix-caching",), "--no-enable-prefix-caching"),
        (NEW, {"enforce_eager": True}, ("--enforce-eager",), "False"),
        (NEW, {"enforce_eager": False}, (), "--enforce-eager"),
        (NEW, {"log_requests": True, "metrics": False}, ("--disable-log-stats",), "--disable-log-requests"),
        (OLD, {"swap_space_gib": 2.5}, ("--swap-space", "2.5"), "--cpu-offload-gb"),
        (OLD, {"dtype": "float32"}, ("--dtype", "float32"), "half"),
        (NEW, {"kv_cache_type_v": "auto"}, ("--kv-cache-dtype", "auto"), "--kv-cache-type"),
        (OLD, {"quantization": "bitsandbytes"}, ("--load-format", "bitsandbytes"), "--awq"),
        (OLD, {"speculative": {"kind": "ngram", "depth": 3}}, ("--speculative-model", "[ngram]"), "--speculative-config"),
        (OLD, {"speculative": DRAFT}, ("--speculative-model", "/srv/models/draft", "--num-speculative-tokens", "4"), "[ngram]"),
        (NEW, {"speculative": {"kind": "none"}}, (), "--speculative-config"),
        (OLD, {"chat_template": "/srv/t.jinja"}, ("--chat-template", "/srv/t.jinja"), "--jinja"),
    ],
)
def test_spellings(version: str, settings: dict[str, Any], expected: tuple[str, ...], missing: str) -> None:
    found = words(version, settings)
    assert " ".join(expected) in " ".join(found)
    assert missing not in found
    assert refused(version, *found[3:]) == {}


@pytest.mark.parametrize(
    ("version", "settings", "flag", "document"),
    [
        (
            OLD,
            {"rope_scaling": {"kind": "yarn", "factor": 4, "original_context_length": 32768, "attention_factor": 0.5}},
            "--rope-scaling",
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768, "attn_factor": 0.5},
        ),
        (
            NEW,
            {"sampling": {"temperature": 0.8, "repeat_penalty": 1.1}},
            "--override-generation-config",
            {"temperature": 0.8, "repetition_penalty": 1.1},
        ),
        (
            NEW,
            {"speculative": DRAFT},
            "--speculative-config",
            {"method": "draft_model", "model": "/srv/models/draft", "num_speculative_tokens": 4},
        ),
        (
            NEW,
            {"speculative": {"kind": "ngram", "depth": 3}},
            "--speculative-config",
            {"method": "ngram", "num_speculative_tokens": 3},
        ),
    ],
)
def test_settings_that_are_json(version: str, settings: dict[str, Any], flag: str, document: dict[str, Any]) -> None:
    found = words(version, settings)
    assert json.loads(found[found.index(flag) + 1]) == document
    assert refused(version, *found[3:]) == {}


def test_cards_are_counted_and_extra_words_stand_last() -> None:
    found = words(NEW, gpu_count=4, extra_args=["--max-logprobs", "5"])
    assert found[found.index("--tensor-parallel-size") + 1] == "4"
    assert found[-2:] == ("--max-logprobs", "5")
    assert "--tensor-parallel-size" not in words(NEW)


@pytest.mark.parametrize(
    ("version", "settings", "setting", "versions"),
    [
        (OLD, {"sampling": {"temperature": 0.8}}, "sampling.temperature", ("0.7.3", NEW)),
        (NEW, {"sampling": {"presence_penalty": 0.5}}, "sampling.presence_penalty", ()),
        (NEW, {"speculative": {"kind": "mtp"}}, "speculative.kind", ()),
        (OLD, {"flash_attention": "on"}, None, ()),
    ],
)
def test_what_a_version_cannot_say(
    version: str, settings: dict[str, Any], setting: str | None, versions: tuple[str, ...]
) -> None:
    if setting is None:
        assert "flash_attention" in meaningless_settings(Settings.model_validate(settings))
        return
    with pytest.raises(UnspelledSettingError) as caught:
        words(version, settings)
    assert caught.value.args == (setting,)
    assert caught.value.versions(load_catalog().vllm_rows) == versions


def test_a_draft_needs_its_path() -> None:
    spec = InstanceSpec.model_validate({"engine": "vllm", "model": MODEL, "settings": {"speculative": DRAFT}})
    with pytest.raises(ValueError, match="without its path"):
        argv(spec, row(NEW), release_path="/opt/r", model_path="/m", alias="chat")


def test_the_environment_forces_the_engine_that_runs_on_volta() -> None:
    spec = InstanceSpec.model_validate({"engine": "vllm", "model": MODEL, "settings": {"threads": 8}})
    found = environment("chat", spec, row(NEW))
    assert found["VLLM_USE_V1"] == "0"
    assert found["VLLM_ATTENTION_BACKEND"] == "XFORMERS"
    assert found["OMP_NUM_THREADS"] == "8"
    assert "VLLM_USE_V1" not in environment("chat", spec, row(OLD))


@pytest.mark.parametrize(
    ("settings", "meaningless"),
    [
        ({"kv_cache_type_k": "q8_0"}, {"kv_cache_type_k"}),
        ({"kv_cache_type_k": "fp8", "kv_cache_type_v": "auto"}, set()),
        (
            {"gpu_layers": 20, "ubatch_size": 512, "load_mode": "mlock", "kv_unified": True},
            {"gpu_layers", "ubatch_size", "load_mode", "kv_unified"},
        ),
        ({"sampling": {"temperature": 1.0, "presence_penalty": 0.1}}, {"sampling.presence_penalty"}),
        ({"context_length": 8192, "gpu_memory_utilization": 0.9, "enforce_eager": True}, set()),
    ],
)
def test_settings_without_a_meaning(settings: dict[str, Any], meaningless: set[str]) -> None:
    assert set(meaningless_settings(Settings.model_validate(settings), row(NEW))) == meaningless


# The table of spellings that was fed to both real parsers.
@pytest.mark.parametrize(
    ("arguments", "old", "new"),
    [
        (("--enforce-eager", "False"), {"False": "unknown"}, {"False": "unknown"}),
        (("--enforce-eager",), {}, {}),
        (("--no-enforce-eager",), {"--no-enforce-eager": "unknown"}, {"--no-enforce-eager": "unknown"}),
        (("--enable-chunked-prefill=False",), {}, {"--enable-chunked-prefill=False": "value"}),
        (("--enable-chunked-prefill", "False"), {}, {"False": "unknown"}),
        (("--enable-chunked-prefill",), {}, {}),
        (("--no-enable-chunked-prefill",), {"--no-enable-chunked-prefill": "unknown"}, {}),
        (("--enable-prefix-caching",), {}, {}),
        (("--no-enable-prefix-caching",), {"--no-enable-prefix-caching": "unknown"}, {}),
        (("--chunked-prefill",), {"--chunked-prefill": "unknown"}, {"--chunked-prefill": "unknown"}),
        (("--speculative-model", "M"), {}, {"--speculative-model": "unknown"}),
        (("--speculative-config", "{}"), {"--speculative-config": "unknown"}, {}),
        (("--swap-space", "2"), {}, {}),
        (("--rope-scaling", '{"rope_type": "linear", "factor": 2.0}'), {}, {}),
        (("--rope-scaling", "yarn"), {"--rope-scaling": "value"}, {"--rope-scaling": "value"}),
        (("--disable-log-requests",), {}, {}),
        (("--max_model_len", "8192"), {}, {}),
        (("--max-model-l", "8192"), {}, {}),
        (("--max-model-len", "8k"), {"--max-model-len": "value"}, {}),
        (("--max-model-len", "1.5K"), {"--max-model-len": "value"}, {"--max-model-len": "value"}),
        (("--max-model-len",), {"--max-model-len": "missing-value"}, {"--max-model-len": "missing-value"}),
        (("--max-num", "5"), {"--max-num": "unknown"}, {"--max-num": "unknown"}),
        (("-tp", "2"), {}, {}),
        (("-tp=2",), {}, {}),
        (("-tp2",), {"-tp2": "unknown"}, {"-tp2": "unknown"}),
        (("-qgptq",), {}, {}),
        (("-q", "gtpq"), {"-q": "value"}, {"-q": "value"}),
        (("-q", "None"), {}, {}),
        (("--dtype", "bf16"), {"--dtype": "value"}, {"--dtype": "value"}),
        (("--kv-cache-dtype", "q8_0"), {"--kv-cache-dtype": "value"}, {"--kv-cache-dtype": "value"}),
        (("--gpu-memory-utilization", "-0.5"), {}, {}),
        (("--seed", "-1"), {}, {}),
        (("--served-model-name", "a", "b"), {}, {}),
        (("--served-model-name",), {"--served-model-name": "missing-value"}, {"--served-model-name": "missing-value"}),
        (("--use-v2-block-manager",), {"--use-v2-block-manager": "deprecated"}, {"--use-v2-block-manager": "deprecated"}),
        (("--hf-token",), {"--hf-token": "unknown"}, {}),
        (("stray",), {"stray": "unknown"}, {"stray": "unknown"}),
        # A file of further arguments: it is read before the words are looked at.
        (("--config", "/etc/v.yaml"), {}, {}),
        (("--config",), {"--config": "missing-value"}, {"--config": "missing-value"}),
    ],
)
def test_words_as_both_real_parsers_take_them(arguments: tuple[str, ...], old: dict[str, str], new: dict[str, str]) -> None:
    assert refused(OLD, *arguments) == old
    assert refused(NEW, *arguments) == new


@pytest.mark.parametrize(
    ("version", "arguments", "meant"),
    [
        (NEW, ("--enable-chunked-prefill=False",), "--no-enable-chunked-prefill"),
        (OLD, ("--no-enable-chunked-prefill",), "--enable-chunked-prefill=False"),
        (NEW, ("--chunked-prefill",), "--enable-chunked-prefill"),
        (NEW, ("--speculative-model", "M"), "--speculative-config"),
        (NEW, ("--enable-chunked-prefill", "False"), "--no-enable-chunked-prefill"),
        (NEW, ("--max-model-length", "5"), "--max-model-len"),
        (NEW, ("-q", "gtpq"), "-q gptq"),
        (NEW, ("--enforce-eager", "False"), None),
        (NEW, ("--no-enforce-eager",), None),
    ],
)
def test_what_was_meant(version: str, arguments: tuple[str, ...], meant: str | None) -> None:
    problems = check_argv(("python", "-m", MODULE, *arguments), parser(version), former=row(version).former_arguments)
    assert problems[0].meant == meant
    assert problems[0].fatal


def test_serve_takes_the_model_first_and_refuses_its_argument() -> None:
    assert refused(NEW, "--port", "8001", serve=True) == {}
    assert refused(OLD, "--model", "m", serve=True) == {"--model": "refused"}
    assert {item.word for item in check_argv(("vllm", "serve", "--port", "8001"), parser(OLD))} == {"serve"}
    assert check_argv(("vllm", "serve", "--port", "8001"), parser(NEW)) == []
    assert refused(NEW, "second", serve=True) == {"second": "unknown"}


def test_the_reports_own_line() -> None:
    report = [
        *("--quantization", "awq", "--dtype", "half", "--max-model-len", "8192", "--gpu-memory-utilization", "0.96"),
        *("--max-num-seqs", "4", "--max-num-batched-tokens", "4096", "--kv-cache-dtype", "auto", "--enforce-eager", "False"),
        *("--disable-log-requests", "--chunked-prefill"),
    ]
    for version in (OLD, NEW):
        assert refused(version, *report) == {"False": "unknown", "--chunked-prefill": "unknown"}


def test_the_other_reports_line() -> None:
    report = [
        *("--max-model-len", "262144", "--kv-cache-type", "pxq", "--rope-scaling", "yarn", "--rope-factor", "8"),
        *("--rope-alpha", "96", "--sparsity", "0.35", "--gpu-memory-utilization", "0.98"),
    ]
    unknown = dict.fromkeys(("--kv-cache-type", "--rope-factor", "--rope-alpha", "--sparsity"), "unknown")
    for version in (OLD, NEW):
        assert refused(version, *report) == {**unknown, "--rope-scaling": "value"}


_ANY_WORD = st.one_of(
    st.sampled_from(parser(NEW).known_words),
    st.sampled_from(["--", "-", "-1", "-0.5", "8k", "False", "{}", "a=1", "--x=1", "=", "--=", "-q4", "serve", ""]),
    st.text(max_size=6),
)


@given(st.lists(_ANY_WORD, max_size=8), st.sampled_from(VERSIONS))
def test_any_words_are_judged(arguments: list[str], version: str) -> None:
    for problem in check_argv(("vllm", "serve", *arguments), parser(version)):
        assert problem.message
        assert problem.word in (*arguments, "serve")


_SETTINGS = st.fixed_dictionaries(
    {},
    optional={
        "context_length": st.integers(1, 10**6),
        "parallel": st.integers(1, 256),
        "batch_size": st.integers(1, 10**6),
        "kv_cache_type_k": st.sampled_from(["auto", "fp8", "fp8_e5m2", "fp8_e4m3"]),
        "dtype": st.sampled_from(["auto", "half", "float16", "bfloat16", "float", "float32"]),
        "quantization": st.sampled_from(["gptq", "awq", "bitsandbytes", "gguf", "compressed-tensors"]),
        "gpu_memory_utilization": st.floats(0.01, 1.0),
        "swap_space_gib": st.floats(0, 64),
        "enforce_eager": st.booleans(),
        "chunked_prefill": st.booleans(),
        "prefix_caching": st.booleans(),
        "served_model_name": st.text("abc/:-", min_size=1).filter(lambda text: not text.startswith("-")),
        "log_requests": st.booleans(),
        "metrics": st.booleans(),
        "rope_scaling": st.fixed_dictionaries(
            {"kind": st.sampled_from(["none", "linear", "yarn"])},
            optional={"factor": st.floats(1, 8), "beta_fast": st.floats(1, 64), "base_frequency": st.floats(1, 1e6)},
        ),
        "speculative": st.sampled_from([{"kind": "none"}, {"kind": "ngram", "depth": 4}, DRAFT]),
    },
)


@pytest.mark.parametrize("version", VERSIONS)
@given(settings=_SETTINGS, gpu_count=st.integers(1, 8))
def test_every_rendered_argv_is_one_that_the_parser_takes(version: str, settings: dict[str, Any], gpu_count: int) -> None:
    found = words(version, settings, gpu_count=gpu_count)
    assert refused(version, *found[3:]) == {}


def test_a_command_line_is_told_from_its_program() -> None:
    assert vllm.arguments_of(("vllm", "serve", "m", "--port", "1")) == ("serve", ["m", "--port", "1"])
    assert vllm.arguments_of(("/r/bin/python", "-m", MODULE, "--port", "1")) == ("module", ["--port", "1"])
    assert vllm.arguments_of(("python", "/x/vllm/entrypoints/openai/api_server.py", "--port")) == ("module", ["--port"])
