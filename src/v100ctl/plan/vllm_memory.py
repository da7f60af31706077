"""What vLLM takes of each card, before anything is started.

vLLM fills a share of the card (``gpu_memory_utilization``): weights, the peak of one profiled step, what CUDA libraries take, and
with all that is left the KV cache. So the question is not whether it fits but how many tokens the cache then holds: the engine
refuses to start when one request of full length does not fit. Weights and cache follow the source (``worker.py``:
``determine_num_available_blocks``, ``cache_engine.py``: ``get_cache_block_size``, ``config.py``: ``get_head_size``); the peak of
a step is a formula checked against published start-up logs, see :func:`step_bytes`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from v100ctl.catalog.vllm import VllmRow
from v100ctl.errors import V100ctlError
from v100ctl.fleet import Settings
from v100ctl.models.types import ModelHeader, Tensor
from v100ctl.plan import vllm
from v100ctl.plan.types import GpuBudget
from v100ctl.plan.vram.types import Card

_MIB = 1024**2
#: The sampler's tensors for one logit: the logits in two precisions, sorted with their indices, masks, probabilities and sums.
#: From start-up logs: 38.4 on an 8B Llama 3 (1.19 GiB), a 7B and a 1.5B Qwen2.5 (1.42 and 1.39 GiB), 256 sequences each.
_SAMPLER_BYTES_PER_LOGIT = 38.4
#: "non_torch_memory takes": 0.01 to 0.12 GiB on one card, 0.20 to 0.30 GiB with NCCL (logs of 0.6.5 to 0.8.5).
_NON_TORCH_BYTES = 64 * _MIB
_NON_TORCH_PARALLEL_BYTES = 300 * _MIB
#: "Graph capturing finished ... took 0.17 GiB": 35 graphs of 28 layers on a T4.
_GRAPH_BYTES_PER_LAYER = 190_000
_EMBEDDING_PADDING = 64


class UnknownModelError(V100ctlError):
    """The model's configuration does not say what its memory depends on, or it keeps state that is not computed here."""


@dataclass(frozen=True)
class Shape:
    """What memory depends on, from ``config.json``. ``kv_heads`` and ``head_size`` are those of the cache; ``kv_parts`` is 2 for
    keys and values, 1 for a latent cache (MLA), which is never split over cards.
    """

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_size: int
    kv_parts: int
    vocabulary: int
    experts: int
    active_experts: int
    expert_intermediate: int


def text_config(header: ModelHeader) -> Mapping[str, Any]:
    """The part of ``config.json`` that describes the language model: its ``text_config`` where it has one."""
    nested = header.metadata.get("text_config")
    return nested if isinstance(nested, Mapping) and "num_attention_heads" in nested else header.metadata


def _first(config: Mapping[str, Any], *names: str) -> int | None:
    for name in names:
        value = config.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


def _needed(config: Mapping[str, Any], *names: str) -> int:
    found = _first(config, *names)
    if found is None:
        raise UnknownModelError(f"config.json has no `{names[0]}`", hint="a model whose config.json is complete")
    return found


def shape(header: ModelHeader, row: VllmRow) -> Shape:
    """The sizes of a model as ``row`` reads them.

    Raises:
        UnknownModelError: its configuration has not enough, or it is hybrid or recurrent.
    """
    config = text_config(header)
    if any(config.get(key) for key in ("layers_block_type", "attn_layer_period", "block_configs", "ssm_cfg", "state_size")):
        raise UnknownModelError(f"`{header.architecture}` keeps more than keys and values, and how much is not known")
    kinds = config.get("layer_types")
    if isinstance(kinds, Sequence) and {"full_attention", "sliding_attention"}.union(map(str, kinds)) != {
        "full_attention",
        "sliding_attention",
    }:
        raise UnknownModelError(
            f"`{header.architecture}` has layers without a cache of keys and values, and what they keep is not known"
        )
    hidden = _needed(config, "hidden_size", "n_embd", "d_model")
    heads = _needed(config, "num_attention_heads", "n_head", "n_heads")
    kv_heads = _first(config, "n_head_kv", "num_kv_heads", "num_key_value_heads", "multi_query_group_num") or heads
    nested = config.get("attn_config")
    if isinstance(nested, Mapping) and isinstance(nested.get("kv_n_heads"), int):
        kv_heads = nested["kv_n_heads"]
    if config.get("multi_query") is True and not config.get("new_decoder_architecture"):
        kv_heads = 1
    head_size = _first(config, "head_dim") or hidden // heads
    kv_parts = 2
    if config.get("model_type") in ("deepseek_v2", "deepseek_v3") and config.get("kv_lora_rank"):
        rope = _needed(config, "qk_rope_head_dim")
        if row.mla:
            kv_heads, kv_parts, head_size = 1, 1, _needed(config, "kv_lora_rank") + rope
        elif config.get("model_type") == "deepseek_v2":
            # Padded to a size that the kernels have.
            head_size = 256
    intermediate = _first(config, "intermediate_size", "ffn_hidden_size", "ffn_dim", "n_inner") or 4 * hidden
    experts = _first(config, "num_local_experts", "num_experts", "n_routed_experts") or 0
    return Shape(
        layers=_needed(config, "num_hidden_layers", "n_layer", "num_layers", "n_layers"),
        hidden=hidden,
        intermediate=intermediate,
        heads=heads,
        kv_heads=kv_heads,
        head_size=head_size,
        kv_parts=kv_parts,
        vocabulary=_needed(config, "vocab_size", "padded_vocab_size"),
        experts=experts,
        active_experts=(_first(config, "num_experts_per_tok", "moe_topk", "num_selected_experts") or 1) if experts else 0,
        expert_intermediate=_first(config, "moe_intermediate_size") or intermediate,
    )


#: Where a context's length may stand; the smallest one counts (``config.py``: ``_get_and_verify_max_len``).
_LENGTH_KEYS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "model_max_length",
    "max_sequence_length",
    "max_seq_length",
    "seq_len",
)
#: Kinds of rope scaling whose factor does not lengthen what the configuration says.
_UNSCALED = ("su", "longrope", "llama3")


@dataclass(frozen=True)
class ContextLimit:
    """The longest context that a model allows, and why it is not longer."""

    tokens: int
    why: str


def context_limit(header: ModelHeader, settings: Settings, row: VllmRow) -> ContextLimit | None:
    """The longest context that ``row`` takes for a model, rope scaling of the inventory or of the model counted.

    ``None`` where the configuration names none: any length is taken then.
    """
    config = text_config(header)
    named = [(value, key) for key in _LENGTH_KEYS if (value := _first(config, key)) is not None]
    window = _first(config, "sliding_window")
    if not named:
        return None
    tokens, key = min(named)
    why = f"`{key}` {tokens} in config.json"
    scaling = settings.rope_scaling
    if scaling is not None and scaling.kind != "none":
        original = scaling.original_context_length if scaling.kind == "yarn" else tokens
        factor = scaling.factor or 1.0
        tokens = int((original or tokens) * factor)
        why = f"{original} tokens times the factor {_plain(factor)} of `rope_scaling`"
    else:
        own = config.get("rope_scaling")
        kind = str(own.get("rope_type", own.get("type"))) if isinstance(own, Mapping) else None
        if isinstance(own, Mapping) and kind not in _UNSCALED and "gemma3" not in str(config.get("model_type")):
            factor = float(own.get("factor") or 1.0)
            original = own.get("original_max_position_embeddings") if kind == "yarn" else tokens
            tokens = int((original or tokens) * factor)
            why = f"{original} tokens times the factor {_plain(factor)} of its own rope scaling"
    if window is not None and config.get("model_type") in row.capped_to_window and window < tokens:
        return ContextLimit(
            window, f"its window of {window} tokens: the xformers backend caps `{config['model_type']}` models to their window"
        )
    return ContextLimit(tokens, why)


def _plain(value: float) -> str:
    return repr(value).removesuffix(".0")


@dataclass(frozen=True)
class VllmLaunch:
    """What the engine is started with, its own defaults filled in. ``batch_size`` is the most tokens of one step."""

    context_length: int
    parallel: int
    batch_size: int
    gpu_memory_utilization: float
    element_bytes: int
    kv_element_bytes: int
    block_size: int
    graphs: bool
    quantization: str | None

    def with_context(self, context_length: int) -> VllmLaunch:
        """The same with another context; a step that was just long enough stays so."""
        least = max(context_length, 2048) if self.batch_size == max(self.context_length, 2048) else self.batch_size
        return dataclasses.replace(self, context_length=context_length, batch_size=max(least, context_length))


def launch_of(settings: Settings, row: VllmRow, method: str | None) -> VllmLaunch:
    """What ``settings`` mean to ``row``. ``method`` is the quantisation that will run.

    Raises:
        ValueError: the row cannot be launched.
    """
    if row.defaults is None:
        raise ValueError(f"vLLM {row.version} cannot be launched")
    dtype = settings.dtype or row.defaults.dtype
    kv_type = settings.kv_cache_type_k or settings.kv_cache_type_v or "auto"
    element_bytes = 4 if dtype in ("float", "float32") else 2
    return VllmLaunch(
        context_length=vllm.context_per_request(settings),
        parallel=vllm.requests_at_once(settings, row),
        batch_size=vllm.tokens_per_step(settings, row),
        gpu_memory_utilization=settings.gpu_memory_utilization or row.defaults.gpu_memory_utilization,
        element_bytes=element_bytes,
        kv_element_bytes=1 if kv_type.startswith("fp8") else element_bytes,
        block_size=row.defaults.block_size,
        graphs=not settings.enforce_eager,
        quantization=method,
    )


_FLOATS = ("F64", "F32", "F16", "BF16")
#: Weights that a row-parallel or replicated layer keeps whole on every card.
_WHOLE = (".bias", "norm.weight", "g_idx")


def weights_bytes(header: ModelHeader, launch: VllmLaunch, cards: int) -> int:
    """Weights on each of ``cards`` cards: matrices are divided, vectors are kept whole, floats take the launch's own type.

    bitsandbytes quantises the layers' matrices while it loads them: 4 bits an element and a 32-bit scale for each 64.
    """
    tied = bool(text_config(header).get("tie_word_embeddings", header.metadata.get("tie_word_embeddings")))
    total = 0
    for tensor in header.tensors:
        if tied and tensor.name == "lm_head.weight":
            continue
        size = _tensor_bytes(tensor, launch)
        divided = len(tensor.shape) > 1 and not tensor.name.endswith(_WHOLE)
        total += math.ceil(size / cards) if divided else size
    return total


def _tensor_bytes(tensor: Tensor, launch: VllmLaunch) -> int:
    if tensor.type not in _FLOATS:
        return tensor.size_bytes
    elements = math.prod(tensor.shape)
    is_layer = len(tensor.shape) == 2 and "embed" not in tensor.name and not tensor.name.startswith("lm_head")
    if launch.quantization == "bitsandbytes" and is_layer:
        return elements // 2 + elements // 64 * 4
    return elements * launch.element_bytes


def kv_bytes_per_token(model: Shape, launch: VllmLaunch, cards: int) -> int:
    """Cache of one token on each card. Key-value heads are divided; with fewer of them than cards each card has a copy of one."""
    heads = 1 if model.kv_parts == 1 else max(1, model.kv_heads // cards)
    return model.layers * model.kv_parts * heads * model.head_size * launch.kv_element_bytes


def step_bytes(model: Shape, launch: VllmLaunch, cards: int) -> int:
    """The peak of the profiled step: ``batch_size`` tokens of ``parallel`` requests, above the weights.

    The larger of two moments. In a layer's MLP four tensors of the hidden size and three of the intermediate size are alive for
    every token (a 1.5B Qwen2.5 with 32768 tokens and xformers on a T4: 2.02 GiB logged, 2.02 computed); GPTQ's kernel unpacks one
    matrix into fp16 beside them for more than 50 tokens (``csrc/quantization/gptq/q_gemm.cu``). In the sampler it is
    :data:`_SAMPLER_BYTES_PER_LOGIT` for every request and word of the vocabulary, which cards do not share.
    """
    wide = model.intermediate / cards
    element = launch.element_bytes
    mlp = launch.batch_size * (4 * model.hidden + 3 * wide) * element
    if model.experts:
        # Every token's copies for its experts: two halves, their product, and the way back (`fused_moe.py`).
        copies = model.active_experts * (3 * model.expert_intermediate / cards + model.hidden)
        mlp = max(mlp, launch.batch_size * (4 * model.hidden + copies) * element)
    if launch.quantization == "gptq":
        unpacked = model.hidden * 2 * wide * 2
        mlp = max(mlp, launch.batch_size * (4 * model.hidden + 2 * wide) * element + unpacked)
    vocabulary = math.ceil(model.vocabulary / _EMBEDDING_PADDING) * _EMBEDDING_PADDING
    requests = min(launch.parallel, launch.batch_size)
    sampler = requests * vocabulary * _SAMPLER_BYTES_PER_LOGIT + launch.batch_size * model.hidden * element
    return math.ceil(max(mlp, sampler))


def graphs_captured(parallel: int) -> int:
    """Batch sizes that a graph is captured for: 1, 2, 4 and every multiple of 8 up to the next one above ``parallel``."""
    if parallel <= 4:
        return parallel.bit_length() if parallel != 3 else 3
    return 3 + math.ceil(parallel / 8)


@dataclass(frozen=True)
class VllmEstimate:
    """What one instance takes of each card, and what its cache then holds.

    ``budgets`` count the cache as the engine allocates it: all that is left of its share. ``left_bytes`` is that on the card
    where it is least, negative where not even the weights fit the share; ``tokens`` is what the cache holds,
    ``largest_context`` the longest request that can be served at all, 0 where none can.
    """

    budgets: Mapping[str, GpuBudget]
    weights_bytes: int
    step_bytes: int
    kv_bytes_per_token: int
    left_bytes: int
    tokens: int
    largest_context: int

    @property
    def short_bytes(self) -> int:
        """How much the engine would take beyond what the fullest card has; 0 or less where all is well."""
        return max((-budget.free_bytes for budget in self.budgets.values()), default=0)


def estimate(header: ModelHeader, launch: VllmLaunch, row: VllmRow, cards: Sequence[Card], *, limit: int) -> VllmEstimate:
    """What an instance takes of ``cards``, over which the model is spread.

    Args:
        header: The model.
        launch: What the engine is started with.
        row: The version.
        cards: At least one.
        limit: The longest context that the model allows.

    Raises:
        UnknownModelError: see :func:`shape`.
    """
    model = shape(header, row)
    count = len(cards)
    weights = weights_bytes(header, launch, count)
    left, tokens = _cache(model, launch, weights, cards)
    step = step_bytes(model, launch, count)
    per_token = kv_bytes_per_token(model, launch, count)
    graphs = graphs_captured(launch.parallel) * model.layers * _GRAPH_BYTES_PER_LAYER if launch.graphs else 0
    budgets = {}
    for card in cards:
        share = int(card.total_bytes * launch.gpu_memory_utilization)
        budgets[card.uuid] = GpuBudget(
            total_bytes=card.total_bytes,
            reserve_bytes=card.reserve_bytes,
            weights_bytes=weights,
            kv_bytes=max(share - weights - step - _libraries(count), 0),
            state_bytes=0,
            compute_bytes=step,
            output_bytes=0,
            context_bytes=card.context_bytes + _libraries(count) + graphs,
        )
    return VllmEstimate(
        budgets=budgets,
        weights_bytes=weights,
        step_bytes=step,
        kv_bytes_per_token=per_token,
        left_bytes=left,
        tokens=tokens,
        largest_context=_largest(model, launch, weights, cards, limit),
    )


def _libraries(cards: int) -> int:
    return _NON_TORCH_BYTES if cards == 1 else _NON_TORCH_PARALLEL_BYTES


def _cache(model: Shape, launch: VllmLaunch, weights: int, cards: Sequence[Card]) -> tuple[int, int]:
    """Bytes left for the cache on the least card (may be negative), and the tokens that they hold in whole blocks."""
    count = len(cards)
    share = int(min(card.total_bytes for card in cards) * launch.gpu_memory_utilization)
    left = share - weights - step_bytes(model, launch, count) - _libraries(count)
    blocks = max(left, 0) // (kv_bytes_per_token(model, launch, count) * launch.block_size)
    return left, blocks * launch.block_size


def _largest(model: Shape, launch: VllmLaunch, weights: int, cards: Sequence[Card], limit: int) -> int:
    """The longest context that fits its own cache; a longer one needs a longer step too, so that it is searched."""
    low, high = 0, max(limit, 0)
    while low < high:
        middle = (low + high + 1) // 2
        tokens = _cache(model, launch.with_context(middle), weights, cards)[1]
        low, high = (middle, high) if tokens >= middle else (low, middle - 1)
    return low


def decode_ceiling_tps(
    header: ModelHeader, launch: VllmLaunch, row: VllmRow, cards: Sequence[Card], *, fill_tokens: int
) -> float:
    """Tokens per second that one request cannot exceed: bandwidth by what a step reads, all weights and the cache so far.

    Of experts only the active ones are read; the embedding table is not, except where the output layer shares it.

    Raises:
        UnknownModelError: see :func:`shape`.
    """
    model = shape(header, row)
    count = len(cards)
    config = text_config(header)
    tied = bool(config.get("tie_word_embeddings", header.metadata.get("tie_word_embeddings")))
    read = 0.0
    for tensor in header.tensors:
        if "embed_tokens" in tensor.name and not tied:
            continue
        size = _tensor_bytes(tensor, launch) / count
        is_expert = model.experts and ".experts." in tensor.name
        read += size * model.active_experts / model.experts if is_expert else size
    read += fill_tokens * kv_bytes_per_token(model, launch, count)
    return min(card.bandwidth_bytes_per_s for card in cards) / read if read else 0.0
