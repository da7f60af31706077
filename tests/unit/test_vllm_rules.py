"""Each rule about vLLM on both sides: it speaks where the engine would fail, and is silent where it would not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from tests.unit.factory import make_config, make_facts
from tests.unit.vllm_models import AWQ, GEMMA2_27B, GIB, GPTQ, LLAMA3_8B, MIB, QWEN25_7B, QWEN25_14B, cards, model
from v100ctl.catalog import load_catalog
from v100ctl.models.types import ModelHeader
from v100ctl.plan.argv import ArgvProblem
from v100ctl.plan.rules.vllm import (
    quantization_method,
    vllm_argv_rules,
    vllm_extra_args_rules,
    vllm_release_rules,
    vllm_rules,
    vllm_sharing_rules,
)
from v100ctl.plan.types import Rule
from v100ctl.plan.vram.types import Card

OLD, NEW = "0.6.3.post1", "0.8.5.post1"
SEVEN = model(QWEN25_7B, GPTQ)
PLAIN = model(LLAMA3_8B)
BIG = 32510 * MIB
A100 = cards(total_bytes=40 * GIB, compute_capability="8.0")


def judged(
    settings: Mapping[str, Any] | None = None,
    header: ModelHeader | None = SEVEN,
    *,
    version: str = NEW,
    on: tuple[Card, ...] | None = None,
    facts: Mapping[str, Any] | None = None,
    **variables: Any,
) -> dict[str, Rule]:
    instance = {"engine": "vllm", "settings": {"context_length": 4096, "parallel": 4, **(settings or {})}}
    config = make_config(instance, vllm_version=version, **variables)
    spec = config.llm_server_instances["chat"]
    catalog = load_catalog()
    on = cards() if on is None else on
    rules = vllm_rules("chat", spec, config, make_facts(**(facts or {})), catalog.vllm(version), header, on, catalog)
    found = {rule.id: rule for rule in rules}
    for rule in found.values():
        assert rule.instance == "chat"
        assert rule.nearest or rule.severity != "refuse", rule.id
        assert not rule.reason.endswith(".")
    return found


def judged_release(version: str, python: str = "3.11.2", **variables: Any) -> dict[str, Rule]:
    config = make_config({"engine": "vllm"}, vllm_version=version, **variables)
    catalog = load_catalog()
    row = catalog.vllm(version)
    assert row is not None
    facts = make_facts(python={"version": python, "executable": "/usr/bin/python3"})
    return {rule.id: rule for rule in vllm_release_rules("chat", config, facts, row, catalog)}


def test_a_lock_is_needed_for_version_and_python() -> None:
    for version in (OLD, NEW):
        for python in ("3.9.2", "3.10.12", "3.11.2", "3.12.3"):
            assert judged_release(version, python) == {}
    for python in ("3.8.10", "3.13.5", ""):
        refused = judged_release(NEW, python)["vllm-python"]
        assert "3.9 to 3.12" in refused.reason
        assert refused.nearest is not None
        assert "Debian 12" in refused.nearest and "Debian 13" not in refused.nearest
    unlocked = judged_release("0.7.3")["vllm-version-without-lock"]
    assert unlocked.nearest is not None
    assert NEW in unlocked.nearest


def test_a_build_of_the_users_own_is_named_by_its_hash_and_known_to_nobody() -> None:
    own = {"vllm_requirements": "/srv/fork.txt"}
    assert list(judged_release(NEW, **own)) == ["vllm-requirements-unpinned"]
    pinned = {**own, "vllm_requirements_sha256": "ab" * 32}
    (warned,) = judged_release("0.7.3", "3.13.5", **pinned).values()
    assert (warned.id, warned.severity) == ("vllm-build-unknown", "warn")
    # What upstream's version refuses may run in a fork.
    awq = model(QWEN25_7B, AWQ)
    assert "vllm-quantization-below-minimum" in judged({"quantization": "awq"}, awq)
    assert judged({"quantization": "awq", "chunked_prefill": True}, awq, **pinned) == {}
    assert "setting-meaningless" in judged({"flash_attention": "on"}, **pinned)


def test_a_sound_instance_is_let_pass_in_every_version_that_runs() -> None:
    for version in load_catalog().vllm_versions:
        assert judged(version=version) == {}


@pytest.mark.parametrize(
    ("rule", "refused", "passes"),
    [
        ("vllm-version-unknown", {"version": "0.5.0"}, {"version": OLD}),
        ("vllm-version-without-volta", {"version": "0.11.0"}, {"version": NEW}),
        ("vllm-version-without-volta", {"version": "0.14.1"}, {"version": "0.11.0", "on": A100}),
        ("vllm-version-unproven", {"version": "0.9.1"}, {"version": "0.7.3"}),
        ("vllm-version-unproven", {"version": "0.10.2"}, {"version": "0.10.2", "on": A100}),
        (
            "vllm-driver-too-old",
            {"facts": {"nvidia": {"module_version": "470.256.02"}}},
            {"facts": {"nvidia": {"module_version": "535.309.01"}}},
        ),
        (
            "vllm-driver-too-old",
            {"nvidia_driver_branch": "520"},
            {"nvidia_driver_branch": "535", "facts": {"nvidia": {"module_version": "470.256.02"}}},
        ),
        ("vllm-driver-too-old", {"facts": {"nvidia": {"module_version": "525.60.11"}}}, {"nvidia_driver_branch": "525"}),
        ("setting-meaningless", {"settings": {"flash_attention": "on"}}, {"settings": {"enforce_eager": True}}),
        ("setting-meaningless", {"settings": {"kv_cache_type_k": "q8_0"}}, {"settings": {"kv_cache_type_k": "auto"}}),
        (
            "setting-meaningless",
            {"settings": {"sampling": {"temperature": 0.8}}, "version": OLD},
            {"settings": {"sampling": {"temperature": 0.8}}},
        ),
        ("vllm-chunked-prefill-on-volta", {"settings": {"chunked_prefill": True}}, {"settings": {"chunked_prefill": False}}),
        (
            "vllm-chunked-prefill-on-volta",
            {"settings": {"chunked_prefill": True, "context_length": 8192}},
            {"settings": {"chunked_prefill": True}, "on": A100},
        ),
        ("vllm-prefix-caching-on-volta", {"settings": {"prefix_caching": True}}, {"settings": {"prefix_caching": False}}),
        (
            "vllm-kv-types-differ",
            {"settings": {"kv_cache_type_k": "fp8", "kv_cache_type_v": "auto"}},
            {"settings": {"kv_cache_type_k": "fp8"}},
        ),
        ("vllm-batch-below-context", {"settings": {"batch_size": 2048}}, {"settings": {"batch_size": 4096}}),
        (
            "vllm-batch-below-context",
            {"settings": {"batch_size": 4096, "context_length": 8192}},
            {"settings": {"batch_size": 2048, "chunked_prefill": True}, "on": A100},
        ),
        (
            "vllm-batch-below-parallel",
            {"settings": {"batch_size": 64, "context_length": 32, "parallel": 128}},
            {"settings": {"batch_size": 128, "context_length": 32, "parallel": 128}},
        ),
        (
            "vllm-speculative-depth",
            {"settings": {"speculative": {"kind": "ngram"}}},
            {"settings": {"speculative": {"kind": "ngram", "depth": 4}}},
        ),
        ("vllm-speculative-mtp", {"settings": {"speculative": {"kind": "mtp"}}}, {"settings": {"speculative": {"kind": "none"}}}),
        (
            "vllm-rope-incomplete",
            {"settings": {"rope_scaling": {"kind": "yarn", "factor": 4}}},
            {"settings": {"rope_scaling": {"kind": "yarn", "factor": 4, "original_context_length": 32768}}},
        ),
        (
            "vllm-rope-incomplete",
            {"settings": {"rope_scaling": {"kind": "linear"}}},
            {"settings": {"rope_scaling": {"kind": "none"}}},
        ),
        ("vllm-swap-space", {"settings": {"swap_space_gib": 48}}, {"settings": {"swap_space_gib": 40}}),
        (
            "vllm-swap-space",
            {"facts": {"memory": {"total_bytes": 5 * GIB}}},
            {"facts": {"memory": {"total_bytes": 5 * GIB}}, "settings": {"swap_space_gib": 0}},
        ),
        (
            "vllm-architecture-unknown",
            {"header": model(QWEN25_7B, GPTQ, architectures=["Qwen3ForCausalLM"]), "version": OLD},
            {"header": model(QWEN25_7B, GPTQ, architectures=["Qwen3ForCausalLM"])},
        ),
        (
            "vllm-architecture-unknown",
            {"header": model(QWEN25_7B, GPTQ, architectures=["Qwen3_5ForConditionalGeneration"])},
            {"header": model(QWEN25_7B, GPTQ, architectures=["HeliumForCausalLM"])},
        ),
        ("vllm-quantization-below-minimum", {"header": model(QWEN25_7B, AWQ)}, {"header": model(QWEN25_7B, AWQ), "on": A100}),
        (
            "vllm-quantization-below-minimum",
            {"header": model(QWEN25_7B, AWQ), "settings": {"quantization": "awq"}},
            {"settings": {"quantization": "gptq"}},
        ),
        (
            "vllm-quantization-below-minimum",
            {"settings": {"quantization": "gptq_marlin"}},
            {"settings": {"quantization": "gptq_marlin"}, "on": A100},
        ),
        (
            "vllm-quantization-below-minimum",
            {"header": model(QWEN25_7B), "settings": {"quantization": "fp8"}, "on": cards(total_bytes=BIG)},
            {"header": model(QWEN25_7B), "settings": {"quantization": "bitsandbytes"}},
        ),
        (
            "vllm-quantization-below-minimum",
            {"header": model(QWEN25_7B, {"quant_method": "compressed-tensors", "format": "pack-quantized"})},
            {"header": model(QWEN25_7B, {"quant_method": "compressed-tensors", "format": "pack-quantized"}), "on": A100},
        ),
        ("vllm-quantization-below-minimum", {"header": None, "settings": {"quantization": "awq"}}, {"header": None}),
        (
            "vllm-quantization-unknown",
            {"header": model(QWEN25_7B, {"quant_method": "exl2"})},
            {"header": SEVEN},
        ),
        (
            "vllm-quantization-missing",
            {"header": model(QWEN25_7B), "settings": {"quantization": "gptq"}, "on": cards(total_bytes=BIG)},
            {"header": model(QWEN25_7B), "on": cards(total_bytes=BIG)},
        ),
        ("vllm-quantization-differs", {"settings": {"quantization": "awq"}}, {"settings": {"quantization": "moe_wna16"}}),
        (
            "vllm-quantization-differs",
            {"header": model(QWEN25_7B, AWQ), "settings": {"quantization": "moe_wna16"}},
            {"header": model(QWEN25_7B, AWQ), "settings": {"quantization": "moe_wna16"}, "on": A100},
        ),
        ("vllm-gptq-bits", {"header": model(QWEN25_7B, {**GPTQ, "bits": 5})}, {"header": model(QWEN25_7B, {**GPTQ, "bits": 8})}),
        (
            "vllm-gptq-experts",
            {"header": model(QWEN25_7B, GPTQ, architectures=["Qwen2MoeForCausalLM"], num_experts=60)},
            {"header": model(QWEN25_7B, GPTQ, architectures=["MixtralForCausalLM"], num_local_experts=8)},
        ),
        ("vllm-bfloat16", {"settings": {"dtype": "bfloat16"}}, {"settings": {"dtype": "half"}}),
        (
            "vllm-bfloat16",
            {"header": PLAIN, "settings": {"dtype": "auto"}, "on": cards(total_bytes=BIG)},
            {"settings": {"dtype": "auto"}},
        ),
        ("vllm-bfloat16", {"settings": {"dtype": "bfloat16"}}, {"settings": {"dtype": "bfloat16"}, "on": A100}),
        (
            "vllm-quantization-dtype",
            {"settings": {"dtype": "float32"}},
            {"header": model(QWEN25_7B), "settings": {"dtype": "float32"}, "on": cards(2, BIG)},
        ),
        (
            "vllm-context-above-limit",
            {"header": PLAIN, "settings": {"context_length": 8193}, "on": cards(total_bytes=BIG)},
            {"header": PLAIN, "settings": {"context_length": 8192}, "on": cards(total_bytes=BIG)},
        ),
        (
            "vllm-context-above-limit",
            {"header": model(GEMMA2_27B, GPTQ), "settings": {"context_length": 8192}, "on": cards(total_bytes=BIG)},
            {"header": model(GEMMA2_27B, GPTQ), "settings": {"context_length": 4096}, "on": cards(total_bytes=BIG)},
        ),
        (
            "vllm-context-above-limit",
            {"settings": {"context_length": 40000}},
            {
                "settings": {
                    "context_length": 40000,
                    "rope_scaling": {"kind": "yarn", "factor": 2, "original_context_length": 32768},
                },
                "on": cards(total_bytes=BIG),
            },
        ),
        ("vllm-heads-not-divisible", {"on": cards(3)}, {"on": cards(4)}),
        (
            "vllm-heads-not-divisible",
            {"header": model(QWEN25_14B), "on": cards(5)},
            {"header": model(QWEN25_14B), "on": cards(4)},
        ),
        (
            "vllm-groups-not-divisible",
            {"header": model(QWEN25_7B, GPTQ, intermediate_size=18944 + 128), "on": cards(2)},
            {"header": model(QWEN25_7B, GPTQ, intermediate_size=18944 + 256), "on": cards(2)},
        ),
        (
            "vllm-head-size",
            {"header": model(QWEN25_7B, GPTQ, head_dim=160), "on": cards(total_bytes=BIG)},
            {"header": model(QWEN25_7B, GPTQ, head_dim=256), "on": cards(total_bytes=BIG)},
        ),
        (
            "vllm-model-does-not-fit",
            {"header": model(GEMMA2_27B, GPTQ), "settings": {"gpu_memory_utilization": 0.96}},
            {"header": model(QWEN25_14B, GPTQ), "settings": {"gpu_memory_utilization": 0.96, "context_length": 8192}},
        ),
        (
            "vllm-model-does-not-fit",
            {"header": PLAIN},
            {"header": PLAIN, "on": cards(2)},
        ),
        (
            "vllm-cache-too-small",
            {"header": model(QWEN25_14B, GPTQ), "settings": {"context_length": 32768}},
            {"header": model(QWEN25_14B, GPTQ), "settings": {"context_length": 16000}},
        ),
        (
            "vllm-utilization-too-high",
            {"settings": {"gpu_memory_utilization": 0.98}},
            {"settings": {"gpu_memory_utilization": 0.96}},
        ),
        (
            "vllm-utilization-too-high",
            {"settings": {"gpu_memory_utilization": 1.0}, "on": cards(total_bytes=BIG)},
            {"settings": {"gpu_memory_utilization": 0.98}, "on": cards(total_bytes=BIG)},
        ),
    ],
)
def test_refusals(rule: str, refused: dict[str, Any], passes: dict[str, Any]) -> None:
    assert judged(**refused)[rule].severity == "refuse"
    assert rule not in judged(**passes)


@pytest.mark.parametrize(
    ("rule", "severity", "speaks", "silent"),
    [
        ("vllm-fp8-cache", "warn", {"settings": {"kv_cache_type_k": "fp8_e5m2"}}, {"settings": {"kv_cache_type_k": "auto"}}),
        (
            "vllm-long-context",
            "info",
            {"header": model(QWEN25_7B, GPTQ, max_position_embeddings=131072), "settings": {"context_length": 40000}},
            {"settings": {"context_length": 32768}},
        ),
        (
            "vllm-half-of-bfloat16",
            "info",
            {"header": PLAIN, "on": cards(total_bytes=BIG)},
            {"header": PLAIN, "on": A100},
        ),
        (
            "vllm-architecture-by-transformers",
            "warn",
            {"header": model(QWEN25_7B, GPTQ, architectures=["HeliumForCausalLM"])},
            {"header": SEVEN},
        ),
        (
            "vllm-memory-unknown",
            "warn",
            {"header": model(QWEN25_7B, GPTQ, layer_types=["linear_attention"])},
            {"header": model(QWEN25_7B, GPTQ, layer_types=["full_attention"])},
        ),
        ("vllm-gguf", "warn", {"header": ModelHeader(format="gguf", architecture="qwen2")}, {"header": SEVEN}),
    ],
)
def test_what_is_only_told(rule: str, severity: str, speaks: dict[str, Any], silent: dict[str, Any]) -> None:
    assert judged(**speaks)[rule].severity == severity
    assert rule not in judged(**silent)


@pytest.mark.parametrize(
    ("rule", "case", "nearest"),
    [
        ("vllm-architecture-unknown", {"header": model(QWEN25_7B, architectures=["Qwen3ForCausalLM"]), "version": OLD}, NEW),
        ("vllm-quantization-below-minimum", {"header": model(QWEN25_7B, AWQ)}, "quantization: gptq"),
        ("vllm-version-without-volta", {"version": "0.11.0"}, "`vllm_version: 0.8.5.post1`"),
        ("vllm-heads-not-divisible", {"on": cards(3)}, "2 of `gpus`"),
        ("vllm-context-above-limit", {"settings": {"context_length": 100000}}, "factor: 4, original_context_length: 32768"),
        ("vllm-batch-below-context", {"settings": {"batch_size": 2048}}, "`batch_size: 4096`"),
        ("vllm-utilization-too-high", {"settings": {"gpu_memory_utilization": 0.98}}, "`gpu_memory_utilization: 0.97`"),
    ],
)
def test_the_nearest_that_works(rule: str, case: dict[str, Any], nearest: str) -> None:
    assert nearest in (judged(**case)[rule].nearest or "")


def test_the_nearest_context_and_share_do_work() -> None:
    case: dict[str, Any] = {"header": model(QWEN25_14B, GPTQ), "settings": {"context_length": 32768, "parallel": 4}}
    nearest = judged(**case)["vllm-cache-too-small"].nearest or ""
    context = int(nearest.strip("`").removeprefix("context_length: "))
    assert judged({"context_length": context}, case["header"]) == {}
    assert "vllm-cache-too-small" in judged({"context_length": context + 16}, case["header"])
    assert "vllm-utilization-too-high" not in judged({"gpu_memory_utilization": 0.97})


def test_the_reports_own_settings() -> None:
    settings = {
        "context_length": 8192,
        "parallel": 4,
        "batch_size": 4096,
        "dtype": "half",
        "quantization": "awq",
        "gpu_memory_utilization": 0.96,
        "kv_cache_type_k": "auto",
        "enforce_eager": False,
        "chunked_prefill": True,
        "prefix_caching": True,
        "log_requests": False,
    }
    found = judged(settings, model(GEMMA2_27B, AWQ), version=OLD)
    assert {rule.id for rule in found.values() if rule.severity == "refuse"} == {
        "vllm-quantization-below-minimum",
        "vllm-chunked-prefill-on-volta",
        "vllm-prefix-caching-on-volta",
        "vllm-batch-below-context",
        "vllm-context-above-limit",
        "vllm-model-does-not-fit",
    }


@pytest.mark.parametrize(
    ("quantization", "asked", "capability", "method"),
    [
        (GPTQ, None, 70, "gptq"),
        (GPTQ, None, 80, "gptq_marlin"),
        (GPTQ, "GPTQ", 80, "gptq"),
        (AWQ, None, 75, "awq"),
        (None, None, 70, None),
        (None, "bitsandbytes", 70, "bitsandbytes"),
    ],
)
def test_the_method_that_will_run(
    quantization: dict[str, Any] | None, asked: str | None, capability: int, method: str | None
) -> None:
    settings = make_config({"settings": {"quantization": asked}}).llm_server_instances["chat"].settings
    assert quantization_method(settings, model(QWEN25_7B, quantization), capability) == method


@pytest.mark.parametrize(
    ("first", "second", "same_card", "refused"),
    [(0.5, 0.45, True, False), (0.6, 0.45, True, True), (None, None, True, True), (None, None, False, False)],
)
def test_instances_on_one_card(first: float | None, second: float | None, same_card: bool, refused: bool) -> None:
    other = {
        "engine": "vllm",
        "port": 8001,
        "model": {"path": "/srv/m", "sha256": "ab" * 32},
        "settings": {"gpu_memory_utilization": second},
    }
    config = make_config({"engine": "vllm", "settings": {"gpu_memory_utilization": first}})
    spec = config.llm_server_instances["chat"]
    both = config.model_copy(update={"llm_server_instances": {"chat": spec, "other": type(spec).model_validate(other)}})
    cards_by_instance = {"chat": ["GPU-0"], "other": ["GPU-0" if same_card else "GPU-1"]}
    found = list(vllm_sharing_rules(both, cards_by_instance, load_catalog()))
    assert [rule.id for rule in found] == (["vllm-shares-above-card"] if refused else [])
    if refused:
        assert found[0].nearest == "`gpu_memory_utilization: 0.47` for each, or another card for other"


@pytest.mark.parametrize(
    ("words", "rules"),
    [
        (["--max-logprobs", "5"], []),
        (["--api-key", "s"], ["extra-args-secret"]),
        (["--api_key=s"], ["extra-args-secret"]),
        (["--hf-token", "s"], ["extra-args-secret"]),
        (["--max-model-l", "5"], ["extra-args-setting"]),
        (["-tp", "2"], ["extra-args-setting"]),
        (["--enable-chunked-prefill"], ["extra-args-setting"]),
        (["--speculative-config", "{}"], ["extra-args-setting"]),
    ],
)
def test_extra_words(words: list[str], rules: list[str]) -> None:
    catalog = load_catalog()
    row = catalog.vllm(NEW)
    assert row is not None
    spec = make_config({"engine": "vllm", "extra_args": words}).llm_server_instances["chat"]
    found = list(vllm_extra_args_rules("chat", spec, row))
    assert [rule.id for rule in found] == rules
    assert not any("tensor_parallel" in (rule.nearest or "") for rule in found), "no setting has this name"
    assert not any("s`" in rule.reason.split("in `extra_args`")[0].replace("`--", "") and "=s" in rule.reason for rule in found)


def test_problems_of_an_argv_become_rules() -> None:
    fatal = ArgvProblem("--chunked-prefill", "unknown", "no such argument", "--enable-chunked-prefill")
    mild = ArgvProblem("--use-v2-block-manager", "deprecated", "has no effect")
    assert [(rule.id, rule.severity, rule.nearest) for rule in vllm_argv_rules("chat", [fatal, mild])] == [
        ("vllm-argument", "refuse", "`--enable-chunked-prefill`"),
        ("vllm-argument-deprecated", "warn", "leave it out"),
    ]
