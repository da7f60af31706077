"""Model headers as vLLM reads them, made from hyper-parameters alone."""

from __future__ import annotations

import math
from typing import Any

from v100ctl.models.types import ModelHeader, Tensor
from v100ctl.plan.vram.types import Card

GIB = 1024**3
MIB = 1024**2
_ELEMENT_BYTES = {"F16": 2, "BF16": 2, "I32": 4}

QWEN25_1_5B: dict[str, Any] = {
    "num_hidden_layers": 28,
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
QWEN25_7B: dict[str, Any] = {
    "num_hidden_layers": 28,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
}
QWEN25_14B: dict[str, Any] = {
    "num_hidden_layers": 48,
    "hidden_size": 5120,
    "intermediate_size": 13824,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "vocab_size": 152064,
}
LLAMA3_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
}
GEMMA2_27B: dict[str, Any] = {
    "architectures": ["Gemma2ForCausalLM"],
    "model_type": "gemma2",
    "num_hidden_layers": 46,
    "hidden_size": 4608,
    "intermediate_size": 36864,
    "num_attention_heads": 32,
    "num_key_value_heads": 16,
    "head_dim": 128,
    "vocab_size": 256000,
    "max_position_embeddings": 8192,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
#: What AutoGPTQ writes.
GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}
AWQ: dict[str, Any] = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True}


def model(config: dict[str, Any], quantization: dict[str, Any] | None = None, **changes: Any) -> ModelHeader:
    """A decoder of Llama's kind with these hyper-parameters; its matrices in GPTQ's layout where it is quantised to 4 bits."""
    metadata: dict[str, Any] = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "max_position_embeddings": 32768,
        "torch_dtype": "float16",
        **config,
        **changes,
    }
    if quantization is not None:
        metadata["quantization_config"] = quantization
    kind = {"bfloat16": "BF16"}.get(metadata["torch_dtype"], "F16")
    hidden, wide, vocabulary = metadata["hidden_size"], metadata["intermediate_size"], metadata["vocab_size"]
    head = metadata.get("head_dim") or hidden // metadata["num_attention_heads"]
    queries, keys = metadata["num_attention_heads"] * head, metadata["num_key_value_heads"] * head
    tensors: list[Tensor] = []

    def add(name: str, type_: str, *shape: int) -> None:
        tensors.append(Tensor(name, type_, shape, math.prod(shape) * _ELEMENT_BYTES[type_]))

    def matrix(name: str, outputs: int, inputs: int) -> None:
        if quantization is None:
            add(f"{name}.weight", kind, outputs, inputs)
            return
        add(f"{name}.qweight", "I32", inputs // 8, outputs)
        add(f"{name}.qzeros", "I32", inputs // 128, outputs // 8)
        add(f"{name}.scales", "F16", inputs // 128, outputs)
        add(f"{name}.g_idx", "I32", inputs)

    add("model.embed_tokens.weight", kind, vocabulary, hidden)
    for layer in range(metadata["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        matrix(f"{prefix}.self_attn.q_proj", queries, hidden)
        matrix(f"{prefix}.self_attn.k_proj", keys, hidden)
        matrix(f"{prefix}.self_attn.v_proj", keys, hidden)
        matrix(f"{prefix}.self_attn.o_proj", hidden, queries)
        matrix(f"{prefix}.mlp.gate_proj", wide, hidden)
        matrix(f"{prefix}.mlp.up_proj", wide, hidden)
        matrix(f"{prefix}.mlp.down_proj", hidden, wide)
        add(f"{prefix}.input_layernorm.weight", kind, hidden)
        add(f"{prefix}.post_attention_layernorm.weight", kind, hidden)
    add("model.norm.weight", kind, hidden)
    if not metadata.get("tie_word_embeddings"):
        add("lm_head.weight", kind, vocabulary, hidden)
    return ModelHeader(
        format="safetensors",
        architecture=metadata["architectures"][0],
        metadata=metadata,
        tensors=tuple(tensors),
        file_bytes=sum(tensor.size_bytes for tensor in tensors),
    )


def cards(count: int = 1, total_bytes: int = 16160 * MIB, **changes: Any) -> tuple[Card, ...]:
    """V100s of 16 GB, with what CUDA and a margin take beside the engine."""
    values = {"reserve_bytes": 128 * MIB, "context_bytes": 300 * MIB, "bandwidth_bytes_per_s": 900e9, **changes}
    return tuple(Card(uuid=f"GPU-{number}", total_bytes=total_bytes, **values) for number in range(count))
