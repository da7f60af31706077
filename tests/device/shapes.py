"""Model files that have a model's shape and no weights: real hyper-parameters and tensor list, sparse zeros for data.

An engine maps such a file and allocates exactly what it would for the real model, so its log and a card's use can be compared
with a prediction; the file takes some KiB of disk. Standard library alone: it also runs on a bare machine with a card.
The hyper-parameters are those of the models' published `config.json`, named in each function.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: name -> (id in the file, elements a block, bytes a block); ggml/include/ggml.h and ggml-common.h.
TYPES: Mapping[str, tuple[int, int, int]] = {
    "f32": (0, 1, 4),
    "f16": (1, 1, 2),
    "q4_0": (2, 32, 18),
    "q5_0": (6, 32, 22),
    "q8_0": (8, 32, 34),
    "q4_K": (12, 256, 144),
    "q6_K": (14, 256, 210),
    "mxfp4": (39, 32, 17),
}
ALIGNMENT = 32


@dataclass(frozen=True)
class Shape:
    """A model without weights: GGUF keys and (name, type, dimensions with the contiguous one first)."""

    architecture: str
    metadata: dict[str, Any]
    tensors: tuple[tuple[str, str, tuple[int, ...]], ...]


def tensor_bytes(kind: str, dimensions: tuple[int, ...]) -> int:
    """The bytes a tensor takes in the file."""
    _, block, size = TYPES[kind]
    assert dimensions[0] % block == 0, (kind, dimensions)
    return math.prod(dimensions) // block * size


def write(shape: Shape, path: Path, *, tokens: bool = False) -> int:
    """Write the shape as a sparse GGUF file (version 3); its apparent size in bytes.

    Without ``tokens`` the vocabulary is only a number: enough to load, but a completion needs words for its tokens.
    """
    metadata = {"general.architecture": shape.architecture, "general.alignment": ALIGNMENT, **shape.metadata}
    if tokens:
        count = metadata[f"{shape.architecture}.vocab_size"]
        # A byte each for what is no word, as the tokenizer wants it; 2, 3, 6 and 1 are unknown, control, byte and normal tokens.
        byte_words = [f"<0x{number:02X}>" for number in range(256)]
        words = ["<unk>", "<s>", "</s>", *byte_words, *(f"t{number}" for number in range(259, count))]
        kinds = [2, 3, 3, *[6] * 256, *[1] * (count - 259)]
        metadata |= {"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": words, "tokenizer.ggml.token_type": kinds}
    parts = [struct.pack("<4sIQQ", b"GGUF", 3, len(shape.tensors), len(metadata))]
    for key, value in metadata.items():
        parts += [_text(key), _value(value)]
    offset = 0
    for name, kind, dimensions in shape.tensors:
        parts.append(_text(name) + struct.pack(f"<I{len(dimensions)}Q", len(dimensions), *dimensions))
        parts.append(struct.pack("<IQ", TYPES[kind][0], offset))
        offset += -(-tensor_bytes(kind, dimensions) // ALIGNMENT) * ALIGNMENT
    header = b"".join(parts)
    header += b"\0" * (-len(header) % ALIGNMENT)
    with path.open("wb") as file:
        file.write(header)
        file.truncate(len(header) + offset)
    return len(header) + offset


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _value(value: Any) -> bytes:
    """One typed value: bool, int (uint32), float (float32), str, or a list of ints, bools or strings."""
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + _text(value)
    if all(isinstance(item, bool) for item in value):
        return struct.pack(f"<IIQ{len(value)}?", 9, 7, len(value), *value)
    if isinstance(value[0], str):
        return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(_text, value))
    return struct.pack(f"<IIQ{len(value)}i", 9, 5, len(value), *value)


class _Builder:
    """Collects tensors; ``weight`` is the type of the large matrices."""

    def __init__(self, weight: str) -> None:
        self.weight = weight
        self.tensors: list[tuple[str, str, tuple[int, ...]]] = []

    def matrix(self, name: str, *dimensions: int, kind: str | None = None) -> None:
        kind = kind or self.weight
        # As the quantiser does: rows that no K block divides get blocks of 32.
        if dimensions[0] % TYPES[kind][1]:
            kind = "q5_0" if kind == "q4_K" else "q8_0"
        self.tensors.append((name, kind, dimensions))

    def vector(self, name: str, *dimensions: int) -> None:
        self.tensors.append((name, "f32", dimensions))

    def ends(self, n_embd: int, n_vocab: int, *, tied: bool, output: str = "q6_K") -> None:
        self.matrix("token_embd.weight", n_embd, n_vocab, kind=output if tied else None)
        self.vector("output_norm.weight", n_embd)
        if not tied:
            self.matrix("output.weight", n_embd, n_vocab, kind=output)

    def attention(
        self, i: int, n_embd: int, q: int, kv: int, *, bias: bool = False, norm: int = 0, out: int | None = None
    ) -> None:
        block = f"blk.{i}."
        self.vector(block + "attn_norm.weight", n_embd)
        for letter, width in (("q", q), ("k", kv), ("v", kv)):
            self.matrix(f"{block}attn_{letter}.weight", n_embd, width)
            if bias:
                self.vector(f"{block}attn_{letter}.bias", width)
        self.matrix(block + "attn_output.weight", out or q, n_embd)
        if norm:
            self.vector(block + "attn_q_norm.weight", norm)
            self.vector(block + "attn_k_norm.weight", norm)

    def dense(self, i: int, n_embd: int, n_ff: int, *, norm: bool = True) -> None:
        block = f"blk.{i}."
        if norm:
            self.vector(block + "ffn_norm.weight", n_embd)
        self.matrix(block + "ffn_gate.weight", n_embd, n_ff)
        self.matrix(block + "ffn_up.weight", n_embd, n_ff)
        self.matrix(block + "ffn_down.weight", n_ff, n_embd)

    def experts(
        self, i: int, n_embd: int, n_ff: int, n_expert: int, *, shared: int = 0, gated: bool = False, norm: bool = True
    ) -> None:
        block = f"blk.{i}."
        if norm:
            self.vector(block + "ffn_norm.weight", n_embd)
        self.vector(block + "ffn_gate_inp.weight", n_embd, n_expert)
        self.matrix(block + "ffn_gate_exps.weight", n_embd, n_ff, n_expert)
        self.matrix(block + "ffn_up_exps.weight", n_embd, n_ff, n_expert)
        self.matrix(block + "ffn_down_exps.weight", n_ff, n_embd, n_expert)
        if shared:
            if gated:
                self.vector(block + "ffn_gate_inp_shexp.weight", n_embd)
            self.matrix(block + "ffn_gate_shexp.weight", n_embd, shared)
            self.matrix(block + "ffn_up_shexp.weight", n_embd, shared)
            self.matrix(block + "ffn_down_shexp.weight", shared, n_embd)


def _keys(architecture: str, vocabulary: int, **values: Any) -> dict[str, Any]:
    """Keys with the architecture's prefix (`__` stands for a dot) and no tokenizer."""
    keys = {f"{architecture}.{name.replace('__', '.')}": value for name, value in values.items()}
    return {**keys, f"{architecture}.vocab_size": vocabulary, "tokenizer.ggml.model": "none"}


def llama(
    n_layer: int = 32,
    n_embd: int = 4096,
    n_ff: int = 14336,
    n_head: int = 32,
    n_head_kv: int = 8,
    n_vocab: int = 128256,
    tied: bool = False,
    weight: str = "q4_K",
) -> Shape:
    """Dense with grouped queries: Llama-3.1-8B."""
    head = n_embd // n_head
    build = _Builder(weight)
    build.ends(n_embd, n_vocab, tied=tied)
    build.vector("rope_freqs.weight", head // 2)
    for i in range(n_layer):
        build.attention(i, n_embd, n_embd, n_head_kv * head)
        build.dense(i, n_embd, n_ff)
    keys = _keys(
        "llama",
        n_vocab,
        block_count=n_layer,
        context_length=131072,
        embedding_length=n_embd,
        feed_forward_length=n_ff,
        attention__head_count=n_head,
        attention__head_count_kv=n_head_kv,
        attention__layer_norm_rms_epsilon=1e-5,
        rope__dimension_count=head,
        rope__freq_base=500000.0,
    )
    return Shape("llama", keys, tuple(build.tensors))


def qwen2(
    n_layer: int = 28,
    n_embd: int = 3584,
    n_ff: int = 18944,
    n_head: int = 28,
    n_head_kv: int = 4,
    n_vocab: int = 152064,
    tied: bool = False,
    weight: str = "q4_K",
) -> Shape:
    """Dense with biases on Q, K and V: Qwen2.5-7B."""
    build = _Builder(weight)
    build.ends(n_embd, n_vocab, tied=tied)
    for i in range(n_layer):
        build.attention(i, n_embd, n_embd, n_head_kv * (n_embd // n_head), bias=True)
        build.dense(i, n_embd, n_ff)
    keys = _keys(
        "qwen2",
        n_vocab,
        block_count=n_layer,
        context_length=131072,
        embedding_length=n_embd,
        feed_forward_length=n_ff,
        attention__head_count=n_head,
        attention__head_count_kv=n_head_kv,
        attention__layer_norm_rms_epsilon=1e-6,
        rope__freq_base=1000000.0,
    )
    return Shape("qwen2", keys, tuple(build.tensors))


def qwen3(
    n_layer: int = 36,
    n_embd: int = 4096,
    n_ff: int = 12288,
    n_head: int = 32,
    n_head_kv: int = 8,
    head: int = 128,
    n_vocab: int = 151936,
    tied: bool = False,
    weight: str = "q4_K",
) -> Shape:
    """Dense with normed Q and K, heads wider than the embedding allows: Qwen3-8B."""
    build = _Builder(weight)
    build.ends(n_embd, n_vocab, tied=tied)
    for i in range(n_layer):
        build.attention(i, n_embd, n_head * head, n_head_kv * head, norm=head)
        build.dense(i, n_embd, n_ff)
    keys = _keys(
        "qwen3",
        n_vocab,
        block_count=n_layer,
        context_length=40960,
        embedding_length=n_embd,
        feed_forward_length=n_ff,
        attention__head_count=n_head,
        attention__head_count_kv=n_head_kv,
        attention__key_length=head,
        attention__value_length=head,
        attention__layer_norm_rms_epsilon=1e-6,
        rope__freq_base=1000000.0,
    )
    return Shape("qwen3", keys, tuple(build.tensors))


def qwen3moe(
    n_layer: int = 48,
    n_embd: int = 2048,
    n_ff: int = 768,
    n_head: int = 32,
    n_head_kv: int = 4,
    head: int = 128,
    n_expert: int = 128,
    n_expert_used: int = 8,
    n_vocab: int = 151936,
    weight: str = "q4_K",
) -> Shape:
    """Mixture of experts: Qwen3-30B-A3B."""
    build = _Builder(weight)
    build.ends(n_embd, n_vocab, tied=False)
    for i in range(n_layer):
        build.attention(i, n_embd, n_head * head, n_head_kv * head, norm=head)
        build.experts(i, n_embd, n_ff, n_expert)
    keys = _keys(
        "qwen3moe",
        n_vocab,
        block_count=n_layer,
        context_length=40960,
        embedding_length=n_embd,
        feed_forward_length=6144,
        expert_feed_forward_length=n_ff,
        expert_count=n_expert,
        expert_used_count=n_expert_used,
        attention__head_count=n_head,
        attention__head_count_kv=n_head_kv,
        attention__key_length=head,
        attention__value_length=head,
        attention__layer_norm_rms_epsilon=1e-6,
        rope__freq_base=1000000.0,
    )
    return Shape("qwen3moe", keys, tuple(build.tensors))


def gemma3(
    n_layer: int = 62,
    n_embd: int = 5376,
    n_ff: int = 21504,
    n_head: int = 32,
    n_head_kv: int = 16,
    head: int = 128,
    window: int = 1024,
    n_vocab: int = 262144,
    weight: str = "q4_K",
) -> Shape:
    """Five windowed layers for each full one, tied embeddings: Gemma-3-27B."""
    build = _Builder(weight)
    build.ends(n_embd, n_vocab, tied=True)
    for i in range(n_layer):
        build.attention(i, n_embd, n_head * head, n_head_kv * head, norm=head)
        build.vector(f"blk.{i}.post_attention_norm.weight", n_embd)
        build.dense(i, n_embd, n_ff)
        build.vector(f"blk.{i}.post_ffw_norm.weight", n_embd)
    keys = _keys(
        "gemma3",
        n_vocab,
        block_count=n_layer,
        context_length=131072,
        embedding_length=n_embd,
        feed_forward_length=n_ff,
        attention__head_count=n_head,
        attention__head_count_kv=n_head_kv,
        attention__key_length=head,
        attention__value_length=head,
        attention__sliding_window=window,
        attention__layer_norm_rms_epsilon=1e-6,
        rope__freq_base=1000000.0,
    )
    return Shape("gemma3", keys, tuple(build.tensors))


def qwen35(
    n_layer: int = 64,
    n_embd: int = 5120,
    n_ff: int = 17408,
    n_head: int = 24,
    n_head_kv: int = 4,
    head: int = 256,
    value_heads: int = 48,
    key_heads: int = 16,
    state: int = 128,
    nextn: int = 0,
    n_vocab: int = 248320,
    weight: str = "q4_K",
    n_expert: int = 0,
    n_expert_used: int = 0,
    shared: int = 0,
) -> Shape:
    """Three gated-delta-net layers for each attention layer: Qwen3.5-27B; with experts: Qwen3.5-35B-A3B."""
    architecture = "qwen35moe" if n_expert else "qwen35"
    build = _Builder(weight)
    build.ends(n_embd, n_vocab, tied=False)
    inner = value_heads * state
    channels = 2 * key_heads * state + inner
    for i in range(n_layer + nextn):
        block = f"blk.{i}."
        if i >= n_layer or i % 4 == 3:
            build.attention(i, n_embd, 2 * n_head * head, n_head_kv * head, norm=head, out=n_head * head)
        else:
            build.vector(block + "attn_norm.weight", n_embd)
            build.matrix(block + "attn_qkv.weight", n_embd, channels)
            build.matrix(block + "attn_gate.weight", n_embd, inner)
            build.vector(block + "ssm_conv1d.weight", 4, channels)
            build.vector(block + "ssm_dt.bias", value_heads)
            build.vector(block + "ssm_a", value_heads)
            build.matrix(block + "ssm_beta.weight", n_embd, value_heads)
            build.matrix(block + "ssm_alpha.weight", n_embd, value_heads)
            build.vector(block + "ssm_norm.weight", state)
            build.matrix(block + "ssm_out.weight", inner, n_embd)
        build.vector(block + "post_attention_norm.weight", n_embd)
        if n_expert:
            build.experts(i, n_embd, n_ff, n_expert, shared=shared, gated=True, norm=False)
        else:
            build.dense(i, n_embd, n_ff, norm=False)
        if i >= n_layer:
            build.matrix(block + "nextn.eh_proj.weight", 2 * n_embd, n_embd)
            build.vector(block + "nextn.enorm.weight", n_embd)
            build.vector(block + "nextn.hnorm.weight", n_embd)
            build.vector(block + "nextn.shared_head_norm.weight", n_embd)
    keys = _keys(
        architecture,
        n_vocab,
        block_count=n_layer + nextn,
        context_length=262144,
        embedding_length=n_embd,
        feed_forward_length=n_ff,
        attention__head_count=n_head,
        attention__head_count_kv=n_head_kv,
        attention__key_length=head,
        attention__value_length=head,
        attention__layer_norm_rms_epsilon=1e-6,
        rope__dimension_count=64,
        rope__dimension_sections=[11, 11, 10, 0],
        rope__freq_base=10000000.0,
        full_attention_interval=4,
        ssm__conv_kernel=4,
        ssm__state_size=state,
        ssm__group_count=key_heads,
        ssm__time_step_rank=value_heads,
        ssm__inner_size=inner,
    )
    if nextn:
        keys[f"{architecture}.nextn_predict_layers"] = nextn
    if n_expert:
        keys |= {
            f"{architecture}.expert_count": n_expert,
            f"{architecture}.expert_used_count": n_expert_used,
            f"{architecture}.expert_feed_forward_length": n_ff,
            f"{architecture}.expert_shared_feed_forward_length": shared,
        }
    return Shape(architecture, keys, tuple(build.tensors))


def deepseek2(
    n_layer: int = 27,
    n_embd: int = 2048,
    n_ff: int = 10944,
    n_ff_expert: int = 1408,
    n_head: int = 16,
    rank: int = 512,
    rope: int = 64,
    nope: int = 128,
    value: int = 128,
    n_expert: int = 64,
    n_expert_used: int = 6,
    n_shared: int = 2,
    q_rank: int = 0,
    n_vocab: int = 102400,
    weight: str = "q4_K",
) -> Shape:
    """Latent attention: one compressed head for K and V. DeepSeek-V2-Lite; with ``q_rank`` as DeepSeek-V3 routes and projects."""
    build = _Builder(weight)
    build.ends(n_embd, n_vocab, tied=False)
    for i in range(n_layer):
        block = f"blk.{i}."
        build.vector(block + "attn_norm.weight", n_embd)
        build.vector(block + "attn_kv_a_norm.weight", rank)
        if q_rank:
            build.matrix(block + "attn_q_a.weight", n_embd, q_rank)
            build.vector(block + "attn_q_a_norm.weight", q_rank)
            build.matrix(block + "attn_q_b.weight", q_rank, n_head * (nope + rope))
        else:
            build.matrix(block + "attn_q.weight", n_embd, n_head * (nope + rope))
        build.matrix(block + "attn_kv_a_mqa.weight", n_embd, rank + rope)
        build.matrix(block + "attn_k_b.weight", nope, rank, n_head, kind="q8_0")
        build.matrix(block + "attn_v_b.weight", rank, value, n_head, kind="q8_0")
        build.matrix(block + "attn_output.weight", n_head * value, n_embd)
        if i < 1:
            build.dense(i, n_embd, n_ff)
        else:
            build.experts(i, n_embd, n_ff_expert, n_expert, shared=n_shared * n_ff_expert)
            if q_rank:
                build.vector(block + "exp_probs_b.bias", n_expert)
    keys = _keys(
        "deepseek2",
        n_vocab,
        block_count=n_layer,
        context_length=163840,
        embedding_length=n_embd,
        feed_forward_length=n_ff,
        expert_feed_forward_length=n_ff_expert,
        expert_count=n_expert,
        expert_used_count=n_expert_used,
        expert_shared_count=n_shared,
        expert_weights_scale=1.0,
        leading_dense_block_count=1,
        attention__head_count=n_head,
        attention__head_count_kv=1,
        attention__kv_lora_rank=rank,
        attention__key_length=rank + rope,
        attention__value_length=rank,
        attention__key_length_mla=nope + rope,
        attention__value_length_mla=value,
        attention__layer_norm_rms_epsilon=1e-6,
        rope__dimension_count=rope,
        rope__freq_base=10000.0,
    )
    if q_rank:
        keys |= {
            "deepseek2.attention.q_lora_rank": q_rank,
            "deepseek2.expert_gating_func": 2,
            "deepseek2.expert_weights_norm": True,
            "deepseek2.expert_weights_scale": 2.5,
        }
    return Shape("deepseek2", keys, tuple(build.tensors))


def gpt_oss(
    n_layer: int = 24,
    n_embd: int = 2880,
    n_ff: int = 2880,
    n_head: int = 64,
    n_head_kv: int = 8,
    head: int = 64,
    window: int = 128,
    n_expert: int = 32,
    n_expert_used: int = 4,
    n_vocab: int = 201088,
    weight: str = "q8_0",
) -> Shape:
    """Every second layer windowed, attention sinks, experts with biases in MXFP4: gpt-oss-20b."""
    build = _Builder(weight)
    build.ends(n_embd, n_vocab, tied=False, output="q8_0")
    for i in range(n_layer):
        block = f"blk.{i}."
        build.attention(i, n_embd, n_head * head, n_head_kv * head, bias=True)
        build.vector(block + "attn_output.bias", n_embd)
        build.vector(block + "attn_sinks.weight", n_head)
        build.vector(block + "post_attention_norm.weight", n_embd)
        build.vector(block + "ffn_gate_inp.weight", n_embd, n_expert)
        build.vector(block + "ffn_gate_inp.bias", n_expert)
        for name, rows, columns in (("gate", n_embd, n_ff), ("up", n_embd, n_ff), ("down", n_ff, n_embd)):
            build.matrix(f"{block}ffn_{name}_exps.weight", rows, columns, n_expert, kind="mxfp4")
            build.vector(f"{block}ffn_{name}_exps.bias", columns, n_expert)
    keys = _keys(
        "gpt-oss",
        n_vocab,
        block_count=n_layer,
        context_length=131072,
        embedding_length=n_embd,
        feed_forward_length=n_ff,
        expert_feed_forward_length=n_ff,
        expert_count=n_expert,
        expert_used_count=n_expert_used,
        attention__head_count=n_head,
        attention__head_count_kv=n_head_kv,
        attention__key_length=head,
        attention__value_length=head,
        attention__sliding_window=window,
        attention__layer_norm_rms_epsilon=1e-5,
        rope__dimension_count=head,
        rope__freq_base=150000.0,
    )
    return Shape("gpt-oss", keys, tuple(build.tensors))


def gemma2(
    n_layer: int = 46,
    n_embd: int = 4608,
    n_ff: int = 36864,
    n_head: int = 32,
    n_head_kv: int = 16,
    head: int = 128,
    window: int = 4096,
    n_vocab: int = 256000,
    weight: str = "q4_K",
) -> Shape:
    """Every second layer windowed, scores and logits capped: Gemma-2-27B."""
    build = _Builder(weight)
    build.ends(n_embd, n_vocab, tied=True)
    for i in range(n_layer):
        build.attention(i, n_embd, n_head * head, n_head_kv * head)
        build.vector(f"blk.{i}.post_attention_norm.weight", n_embd)
        build.dense(i, n_embd, n_ff)
        build.vector(f"blk.{i}.post_ffw_norm.weight", n_embd)
    keys = _keys(
        "gemma2",
        n_vocab,
        block_count=n_layer,
        context_length=8192,
        embedding_length=n_embd,
        feed_forward_length=n_ff,
        attention__head_count=n_head,
        attention__head_count_kv=n_head_kv,
        attention__key_length=head,
        attention__value_length=head,
        attention__sliding_window=window,
        attention__layer_norm_rms_epsilon=1e-6,
        attn_logit_softcapping=50.0,
        final_logit_softcapping=30.0,
    )
    return Shape("gemma2", keys, tuple(build.tensors))


def gemma4(
    n_layer: int = 60,
    n_embd: int = 5376,
    n_ff: int = 21504,
    n_head: int = 32,
    n_head_kv: int = 16,
    n_head_kv_full: int = 4,
    head: int = 256,
    head_full: int = 512,
    window: int = 1024,
    n_vocab: int = 262144,
    weight: str = "q4_K",
    n_expert: int = 0,
    n_expert_used: int = 0,
    n_ff_expert: int = 0,
) -> Shape:
    """Full layers have few wide heads whose values are their keys, windowed ones more: Gemma-4-31B; with experts: 26B-A4B."""
    build = _Builder(weight)
    build.ends(n_embd, n_vocab, tied=True)
    build.vector("rope_freqs.weight", head_full // 2)
    windowed = [i % 6 != 5 for i in range(n_layer)]
    for i in range(n_layer):
        block = f"blk.{i}."
        width, heads_kv = (head, n_head_kv) if windowed[i] else (head_full, n_head_kv_full)
        build.attention(i, n_embd, n_head * width, heads_kv * width, norm=width)
        if not windowed[i]:
            build.tensors = [tensor for tensor in build.tensors if tensor[0] != block + "attn_v.weight"]
        build.vector(block + "post_attention_norm.weight", n_embd)
        build.dense(i, n_embd, n_ff)
        if n_expert:
            build.vector(block + "ffn_gate_inp.weight", n_embd, n_expert)
            build.vector(block + "ffn_gate_inp.scale", n_embd)
            for name in ("pre_ffw_norm_2", "post_ffw_norm_1", "post_ffw_norm_2"):
                build.vector(f"{block}{name}.weight", n_embd)
            build.matrix(block + "ffn_gate_up_exps.weight", n_embd, 2 * n_ff_expert, n_expert)
            build.matrix(block + "ffn_down_exps.weight", n_ff_expert, n_embd, n_expert)
            build.vector(block + "ffn_down_exps.scale", n_expert)
        build.vector(block + "post_ffw_norm.weight", n_embd)
        build.vector(block + "layer_output_scale.weight", 1)
    keys = _keys(
        "gemma4",
        n_vocab,
        block_count=n_layer,
        context_length=262144,
        embedding_length=n_embd,
        embedding_length_per_layer_input=0,
        feed_forward_length=n_ff,
        attention__head_count=n_head,
        attention__head_count_kv=[n_head_kv if one else n_head_kv_full for one in windowed],
        attention__key_length=head_full,
        attention__value_length=head_full,
        attention__key_length_swa=head,
        attention__value_length_swa=head,
        attention__sliding_window=window,
        attention__sliding_window_pattern=windowed,
        attention__layer_norm_rms_epsilon=1e-6,
        rope__dimension_count=head_full,
        rope__dimension_count_swa=head,
        rope__freq_base=1000000.0,
        rope__freq_base_swa=10000.0,
        final_logit_softcapping=30.0,
    )
    if n_expert:
        keys |= {
            "gemma4.expert_count": n_expert,
            "gemma4.expert_used_count": n_expert_used,
            "gemma4.expert_feed_forward_length": n_ff_expert,
        }
    return Shape("gemma4", keys, tuple(build.tensors))


def qwen3next(
    n_layer: int = 48,
    n_embd: int = 2048,
    n_ff: int = 512,
    n_head: int = 16,
    n_head_kv: int = 2,
    value_heads: int = 32,
    key_heads: int = 16,
    n_expert: int = 512,
    n_expert_used: int = 10,
    n_vocab: int = 151936,
    weight: str = "q4_K",
) -> Shape:
    """As the mixture of Qwen3.5, with one projection for both rates of the delta net: Qwen3-Next-80B-A3B."""
    made = qwen35(
        n_layer=n_layer,
        n_embd=n_embd,
        n_ff=n_ff,
        n_head=n_head,
        n_head_kv=n_head_kv,
        value_heads=value_heads,
        key_heads=key_heads,
        n_expert=n_expert,
        n_expert_used=n_expert_used,
        shared=n_ff,
        n_vocab=n_vocab,
        weight=weight,
    )
    tensors: list[tuple[str, str, tuple[int, ...]]] = []
    for name, kind, dimensions in made.tensors:
        if name.endswith("ssm_beta.weight"):
            tensors.append((name.replace("ssm_beta", "ssm_ba"), kind, (dimensions[0], 2 * value_heads)))
        elif not name.endswith("ssm_alpha.weight"):
            tensors.append((name, kind, dimensions))
    keys = {key.replace("qwen35moe.", "qwen3next."): value for key, value in made.metadata.items() if "sections" not in key}
    return Shape("qwen3next", keys, tuple(tensors))


#: Models by the name that the measurements use. `smallest` takes little more than a CUDA context; `qwen3-small` is a draft.
MODELS: Mapping[str, Callable[[], Shape]] = {
    "smallest": lambda: qwen3(n_layer=2, n_embd=256, n_ff=512, n_head=2, n_head_kv=1, n_vocab=1024),
    "qwen3-small": lambda: qwen3(n_layer=28, n_embd=1024, n_ff=3072, n_head=16, n_head_kv=8, tied=True),
    "llama-8b": llama,
    "llama-8b-f16": lambda: llama(weight="f16"),
    "qwen2-7b": qwen2,
    "qwen3-8b": qwen3,
    "qwen3-14b": lambda: qwen3(n_layer=40, n_embd=5120, n_ff=17408, n_head=40),
    "qwen3-32b": lambda: qwen3(n_layer=64, n_embd=5120, n_ff=25600, n_head=64),
    "qwen3-30b-a3b": qwen3moe,
    "gemma3-27b": gemma3,
    "gemma3-12b": lambda: gemma3(n_layer=48, n_embd=3840, n_ff=15360, n_head=16, n_head_kv=8, head=256),
    "qwen35-27b": qwen35,
    "qwen35-27b-mtp": lambda: qwen35(nextn=1),
    "qwen35-27b-q6": lambda: qwen35(weight="q6_K"),
    "qwen35-35b-a3b": lambda: qwen35(
        n_layer=40,
        n_embd=2048,
        n_ff=512,
        n_head=16,
        n_head_kv=2,
        value_heads=32,
        n_expert=256,
        n_expert_used=8,
        shared=512,
    ),
    "deepseek2-lite": deepseek2,
    "gemma2-27b": gemma2,
    "gemma4-31b": gemma4,
    "gemma4-26b-a4b": lambda: gemma4(
        n_layer=30,
        n_embd=2816,
        n_ff=2112,
        n_head=16,
        n_head_kv=8,
        n_head_kv_full=2,
        n_expert=128,
        n_expert_used=8,
        n_ff_expert=704,
    ),
    "qwen3next-80b-a3b": qwen3next,
    "gpt-oss-20b": gpt_oss,
}
