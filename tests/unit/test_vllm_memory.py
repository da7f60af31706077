"""What vLLM takes of a card, against start-up logs that people published and against the report's two models."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.vllm_models import GEMMA2_27B, GIB, GPTQ, LLAMA3_8B, MIB, QWEN25_1_5B, QWEN25_7B, QWEN25_14B, cards, model
from v100ctl.catalog import load_catalog
from v100ctl.fleet import Settings
from v100ctl.models.types import ModelHeader
from v100ctl.plan.vllm_memory import (
    UnknownModelError,
    VllmEstimate,
    context_limit,
    decode_ceiling_tps,
    estimate,
    graphs_captured,
    launch_of,
)
from v100ctl.plan.vram.types import Card


def row(version: str = "0.8.5.post1") -> Any:
    found = load_catalog().vllm(version)
    assert found is not None
    return found


def estimated(
    header: ModelHeader, on: tuple[Card, ...], method: str | None = None, version: str = "0.8.5.post1", **settings: Any
) -> VllmEstimate:
    given = Settings(**settings)
    limit = context_limit(header, given, row(version))
    assert limit is not None
    return estimate(header, launch_of(given, row(version), method), row(version), on, limit=limit.tokens)


def test_a_1_5b_on_a_t4_as_its_log_says() -> None:
    # vLLM 0.7 with xformers: weights 2.89, step 2.02, cache 2.36 GiB in 5519 blocks of 16 tokens; 32768 tokens, half the card.
    found = estimated(model(QWEN25_1_5B), cards(total_bytes=int(14.56 * GIB)), context_length=32768, gpu_memory_utilization=0.5)
    assert found.weights_bytes / GIB == pytest.approx(2.89, rel=0.01)
    assert found.step_bytes / GIB == pytest.approx(2.02, rel=0.01)
    assert found.left_bytes / GIB == pytest.approx(2.36, rel=0.02)
    assert found.tokens == pytest.approx(5519 * 16, rel=0.02)
    assert found.kv_bytes_per_token == 28672


@pytest.mark.parametrize(
    ("config", "context", "total_gib", "utilization", "weights_gib", "step_gib"),
    [
        # vllm-project/vllm#13882: a 7B in 4 bits, 4096 tokens, 256 requests; nothing was left.
        (QWEN25_7B, 4096, 8.0, 0.7, 5.20, 1.42),
        # vllm-project/vllm#10511: Llama 3 8B, 8192 tokens, 256 requests.
        (LLAMA3_8B, 8192, 79.22, 0.9, 14.96, 1.26),
    ],
)
def test_steps_that_the_sampler_decides(
    config: dict[str, Any], context: int, total_gib: float, utilization: float, weights_gib: float, step_gib: float
) -> None:
    header = model(config, GPTQ if config is QWEN25_7B else None)
    found = estimated(
        header,
        cards(total_bytes=int(total_gib * GIB)),
        "awq" if config is QWEN25_7B else None,
        context_length=context,
        gpu_memory_utilization=utilization,
    )
    assert found.weights_bytes / GIB == pytest.approx(weights_gib, rel=0.01)
    assert found.step_bytes / GIB == pytest.approx(step_gib, rel=0.03)
    assert (found.tokens == 0) == (config is QWEN25_7B)


def test_the_samplers_part_is_not_shared_by_cards() -> None:
    # vllm-project/vllm#10511 again: with two cards half the weights on each, the step as large as on one.
    one = estimated(model(LLAMA3_8B), cards(1, int(79.22 * GIB)), context_length=8192)
    two = estimated(model(LLAMA3_8B), cards(2, int(79.22 * GIB)), context_length=8192)
    assert two.step_bytes == one.step_bytes
    assert two.weights_bytes / GIB == pytest.approx(7.48, rel=0.01)
    assert two.kv_bytes_per_token * 2 == one.kv_bytes_per_token


def test_a_14b_in_4_bits_serves_the_reports_context_on_16_gb() -> None:
    found = estimated(
        model(QWEN25_14B, GPTQ), cards(), "gptq", context_length=8192, parallel=4, batch_size=8192, gpu_memory_utilization=0.96
    )
    assert found.tokens >= 8192
    assert found.short_bytes <= 0
    assert 8192 < found.largest_context < 32768
    budget = found.budgets["GPU-0"]
    # The engine fills its share to the last block; CUDA stands beside it.
    assert budget.weights_bytes + budget.kv_bytes + budget.compute_bytes == pytest.approx(0.96 * 16160 * MIB - 64 * MIB, rel=1e-6)
    assert budget.free_bytes > 0


def test_a_27b_in_4_bits_leaves_nothing_on_16_gb() -> None:
    found = estimated(model(GEMMA2_27B, GPTQ), cards(), "gptq", context_length=4096, parallel=4, gpu_memory_utilization=0.96)
    assert found.left_bytes < 0
    assert found.tokens == 0
    assert found.largest_context == 0
    assert estimated(model(GEMMA2_27B, GPTQ), cards(total_bytes=32510 * MIB), "gptq", context_length=4096).tokens > 4096


def test_the_largest_context_is_exact() -> None:
    header = model(QWEN25_14B, GPTQ)
    found = estimated(header, cards(), "gptq", context_length=32768, parallel=4, gpu_memory_utilization=0.9)
    assert found.tokens < 32768
    longest = found.largest_context
    at = estimated(header, cards(), "gptq", context_length=longest, parallel=4, gpu_memory_utilization=0.9)
    beyond = estimated(header, cards(), "gptq", context_length=longest + 1, parallel=4, gpu_memory_utilization=0.9)
    assert at.tokens >= longest
    assert beyond.tokens < longest + 1


def test_weights_follow_the_launch() -> None:
    plain = estimated(model(QWEN25_7B), cards(total_bytes=32510 * MIB)).weights_bytes
    double = estimated(model(QWEN25_7B), cards(total_bytes=32510 * MIB), dtype="float32").weights_bytes
    loaded = estimated(model(QWEN25_7B), cards(total_bytes=32510 * MIB), "bitsandbytes").weights_bytes
    assert double == 2 * plain
    assert plain / 4 < loaded < plain / 2


@pytest.mark.parametrize(("parallel", "captured"), [(1, 1), (2, 2), (3, 3), (4, 3), (8, 4), (9, 5), (256, 35)])
def test_graphs(parallel: int, captured: int) -> None:
    assert graphs_captured(parallel) == captured


def test_a_latent_cache_where_the_version_keeps_one() -> None:
    config = {
        **LLAMA3_8B,
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "hidden_size": 2048,
        "num_hidden_layers": 27,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
    }
    big = cards(total_bytes=80 * GIB)
    assert estimated(model(config), big).kv_bytes_per_token == 27 * (512 + 64) * 2
    assert estimated(model(config), big, version="0.6.3.post1").kv_bytes_per_token == 27 * 2 * 16 * 256 * 2


@pytest.mark.parametrize(
    "change",
    [
        {"layer_types": ["linear_attention", "full_attention"]},
        {"layers_block_type": ["mamba", "attention"]},
        {"hidden_size": None},
    ],
)
def test_models_whose_memory_is_not_known(change: dict[str, Any]) -> None:
    header = model(LLAMA3_8B)
    header = header.model_copy(update={"metadata": {**header.metadata, **change}})
    with pytest.raises(UnknownModelError):
        estimate(header, launch_of(Settings(), row(), None), row(), cards(), limit=8192)


@pytest.mark.parametrize(
    ("config", "scaling", "version", "tokens"),
    [
        (LLAMA3_8B, None, "0.8.5.post1", 8192),
        (QWEN25_14B, {"kind": "yarn", "factor": 4, "original_context_length": 32768}, "0.8.5.post1", 131072),
        (LLAMA3_8B, {"kind": "linear", "factor": 2}, "0.8.5.post1", 16384),
        ({**QWEN25_14B, "rope_scaling": {"type": "linear", "factor": 2.0}}, None, "0.6.3.post1", 65536),
        ({**LLAMA3_8B, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, None, "0.8.5.post1", 8192),
        (GEMMA2_27B, None, "0.8.5.post1", 4096),
        ({**GEMMA2_27B, "model_type": "gemma3_text"}, None, "0.7.3", 8192),
        ({**GEMMA2_27B, "model_type": "gemma3_text"}, None, "0.8.5.post1", 4096),
    ],
)
def test_the_models_own_limit(config: dict[str, Any], scaling: dict[str, Any] | None, version: str, tokens: int) -> None:
    settings = Settings.model_validate({"rope_scaling": scaling})
    limit = context_limit(model(config), settings, row(version))
    assert limit is not None
    assert limit.tokens == tokens


def test_the_ceiling_reads_every_weight_but_the_embeddings() -> None:
    header = model(QWEN25_14B, GPTQ)
    launch = launch_of(Settings(), row(), "gptq")
    empty = decode_ceiling_tps(header, launch, row(), cards(), fill_tokens=0)
    read = header.tensor_bytes - 152064 * 5120 * 2
    assert empty == pytest.approx(900e9 / read, rel=1e-3)
    assert decode_ceiling_tps(header, launch, row(), cards(), fill_tokens=8192) < empty
