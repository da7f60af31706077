"""What of a GGUF header decides memory: the hyper-parameters as llama.cpp resolves them, and where each tensor goes.

Sources are files of llama.cpp at b11434: `src/llama-model.cpp` (`load_hparams`, `load_tensors`), `src/llama-hparams.cpp`,
`src/models/ARCHITECTURE.cpp` (`load_arch_hparams`).
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from v100ctl.errors import V100ctlError
from v100ctl.models.gguf import GGML_TYPES
from v100ctl.models.types import ModelHeader

#: name -> (elements a block, bytes a block).
BLOCKS: Mapping[str, tuple[int, int]] = {name: (elements, size) for name, elements, size in GGML_TYPES.values()}

#: Every layer keeps keys and values of the whole context: no window, no recurrent state, no latent cache in their source.
# fmt: off
_FULL = frozenset({
    "llama", "qwen", "qwen2", "qwen2moe", "qwen2vl", "qwen3", "qwen3moe", "qwen3vl", "qwen3vlmoe", "mistral3", "glm4",
    "glm4moe", "smollm3", "granite", "granitemoe", "command-r", "gemma", "starcoder2", "internlm2", "minicpm", "olmo",
    "olmoe", "dots1", "ernie4_5", "ernie4_5-moe", "hunyuan-moe", "hunyuan-dense", "seed_oss", "deepseek", "bailingmoe",
    "bailingmoe2", "baichuan", "chatglm", "codeshell", "stablelm", "phi2", "arcee", "exaone", "orion", "xverse", "nemotron",
    "minimax-m2", "apertus",
})
# fmt: on
#: Sliding windows: (layers a period, the last of which sees everything; window without a key, 0: no window at all then).
_WINDOWED: Mapping[str, tuple[int, int]] = {
    "gemma2": (2, 4096),
    "gemma3": (6, 0),
    "gemma4": (6, 0),
    "gpt-oss": (2, 0),
    "cohere2": (4, 0),
    "olmo2": (4, 0),
    "mellum": (4, 0),
}
#: Three gated-delta-net layers for each attention layer.
_HYBRID = frozenset({"qwen3next", "qwen35", "qwen35moe"})
#: Of the hybrids, those that keep states to roll a rejected draft back (`llm_arch_supports_rs_rollback`).
_ROLLBACK = frozenset({"qwen35", "qwen35moe"})
#: phi3 reads a window and ignores it ("fix conversion scripts").
_IGNORES_WINDOW = frozenset({"phi3"})
_LATENT = frozenset({"deepseek2"})
KNOWN = _FULL | _WINDOWED.keys() | _HYBRID | _IGNORES_WINDOW | _LATENT

#: Whose compute buffers were compared with those of the engine, on a card (docs/measurements/vram.md).
MEASURED = frozenset(
    (
        "llama", "qwen2", "qwen3", "qwen3moe", "qwen3next", "qwen35", "qwen35moe", "gemma2", "gemma3", "gemma4", "deepseek2",
        "gpt-oss",
    )
)  # fmt: skip

#: `LLAMA_MAX_LAYERS` (src/llama-hparams.h).
_LAYERS_MAX = 512
_BLOCK = re.compile(r"blk\.(\d+)\.")


class UnknownArchitectureError(V100ctlError):
    """Nothing is known about how this architecture keeps its cache."""


@dataclass(frozen=True)
class Hyper:
    """Hyper-parameters, one value a layer where layers may differ. ``n_layer`` counts without the prediction layers (MTP)."""

    architecture: str
    n_layer: int
    n_nextn: int
    n_ctx_train: int
    n_embd: int
    n_vocab: int
    heads: tuple[int, ...]
    kv_heads: tuple[int, ...]
    head_k: int
    head_v: int
    head_k_window: int
    head_v_window: int
    ff: tuple[int, ...]
    n_expert: int
    n_expert_used: int
    ff_expert: int
    ff_shared: int
    window: int
    windowed: tuple[bool, ...]
    recurrent: tuple[bool, ...]
    conv_kernel: int
    inner: int
    state: int
    groups: int
    latent: bool
    metadata: Mapping[str, Any]

    @property
    def n_layer_all(self) -> int:
        """All blocks of the file."""
        return self.n_layer + self.n_nextn

    @property
    def rolls_back(self) -> bool:
        """Whether a speculating context keeps extra recurrent states."""
        return self.architecture in _ROLLBACK

    def keys(self, layer: int) -> int:
        """Elements a token of a layer's K cache (`n_embd_k_gqa`)."""
        return (self.head_k_window if self.windowed[layer] else self.head_k) * self.kv_heads[layer]

    def values(self, layer: int) -> int:
        """Elements a token of a layer's V cache (`n_embd_v_gqa`)."""
        return (self.head_v_window if self.windowed[layer] else self.head_v) * self.kv_heads[layer]

    @property
    def conv_state(self) -> int:
        """Elements of the convolution's state a layer and sequence (`n_embd_r`)."""
        return max(0, self.conv_kernel - 1) * (self.inner + 2 * self.groups * self.state)

    @property
    def recurrent_state(self) -> int:
        """Elements of the recurrent state a layer and sequence (`n_embd_s`)."""
        return self.state * self.inner


@dataclass(frozen=True)
class Weight:
    """A tensor with the layer it belongs to (None: of no layer)."""

    name: str
    type: str
    shape: tuple[int, ...]
    size_bytes: int
    layer: int | None


@dataclass(frozen=True)
class Model:
    """A header, prepared. Made once for each model (see :func:`of`)."""

    hyper: Hyper
    weights: tuple[Weight, ...]
    tied: bool
    by_name: Mapping[str, Weight]


#: By header object, and by what is in it: a thousand hosts may each have read the same model.
_by_object: dict[int, tuple[weakref.ref[ModelHeader], Model]] = {}
_by_content: dict[tuple[Any, ...], Model] = {}
_MODELS_MAX = 256


def of(header: ModelHeader) -> Model:
    """The prepared model; the same object for headers that say the same.

    Raises:
        UnknownArchitectureError: the architecture's cache is not known, or the file is no GGUF.
    """
    found = _by_object.get(id(header))
    if found and found[0]() is header:
        return found[1]
    content = (header.format, header.architecture, header.tensors, repr(header.metadata), repr(header.array_lengths))
    model = _by_content.get(content)
    if model is None:
        model = _prepare(header)
        while len(_by_content) >= _MODELS_MAX:
            del _by_content[next(iter(_by_content))]
        _by_content[content] = model
    key = id(header)
    _by_object[key] = (weakref.ref(header, lambda _: _by_object.pop(key, None)), model)
    return model


def _prepare(header: ModelHeader) -> Model:
    if header.format != "gguf" or header.architecture not in KNOWN:
        raise UnknownArchitectureError(
            f"how the architecture `{header.architecture}` keeps its cache is not known, so its memory cannot be computed",
            hint="known are " + ", ".join(f"`{name}`" for name in sorted(KNOWN)),
        )
    weights = []
    for tensor in header.tensors:
        block = _BLOCK.match(tensor.name)
        weights.append(Weight(tensor.name, tensor.type, tensor.shape, tensor.size_bytes, int(block[1]) if block else None))
    by_name = {weight.name: weight for weight in weights}
    try:
        hyper = _hyper(header)
    except (TypeError, ValueError, ArithmeticError) as error:
        raise UnknownArchitectureError(
            f"the header of this `{header.architecture}` model holds values that make no sense"
        ) from error
    for name in ("heads", "kv_heads", "ff", "windowed", "recurrent"):
        if len(getattr(hyper, name)) != hyper.n_layer_all:
            raise UnknownArchitectureError(
                f"the header of this `{header.architecture}` model lists {len(getattr(hyper, name))} values for its "
                f"{hyper.n_layer_all} layers"
            )
    return Model(hyper, tuple(weights), "output.weight" not in by_name, by_name)


def _hyper(header: ModelHeader) -> Hyper:
    architecture = header.architecture

    def key(name: str, default: Any = None) -> Any:
        return header.metadata.get(f"{architecture}.{name}", default)

    def number(name: str, default: int = 0) -> int:
        value = key(name, default)
        return int(max(value, default=0)) if isinstance(value, list | tuple) else int(value)

    def each(name: str, default: Any) -> tuple[int, ...]:
        value = key(name, default)
        return tuple(int(item) for item in value) if isinstance(value, list | tuple) else (int(value),) * n_all

    n_all = number("block_count")
    n_nextn = number("nextn_predict_layers")
    n_layer = n_all - n_nextn
    n_embd = number("embedding_length")
    heads = each("attention.head_count", 0) if 0 < n_all <= _LAYERS_MAX else ()
    if not 0 < n_all <= _LAYERS_MAX or not 0 <= n_nextn < n_all or n_embd <= 0 or not any(heads):
        raise UnknownArchitectureError(
            f"the header of this `{architecture}` model lacks its block count, embedding length or number of attention heads"
        )
    head = n_embd // heads[0] if heads[0] else 0
    head_k, head_v = number("attention.key_length", head), number("attention.value_length", head)
    window, windowed = 0, (False,) * n_all
    if architecture in _WINDOWED:
        period, without = _WINDOWED[architecture]
        window = number("attention.sliding_window", without)
        pattern = key("attention.sliding_window_pattern")
        if isinstance(pattern, list | tuple):
            windowed = tuple(bool(item) for item in pattern)
        elif window:
            period = int(pattern or period)
            windowed = tuple(i < n_layer and i % period < period - 1 for i in range(n_all))
    recurrent = (False,) * n_all
    if architecture in _HYBRID:
        listed = key("attention.recurrent_layers")
        interval = number("full_attention_interval", 4)
        recurrent = (
            tuple(bool(item) for item in listed)
            if isinstance(listed, list | tuple)
            else tuple(i < n_layer and (i + 1) % interval != 0 for i in range(n_all))
        )
    if number("embedding_length_per_layer_input"):
        raise UnknownArchitectureError(
            f"this `{architecture}` model has embeddings of its own for each layer, whose memory is not known",
            hint="its larger sisters without them are known",
        )
    ff_expert = number("expert_feed_forward_length")
    shared = number("expert_shared_feed_forward_length") or number("expert_shared_count") * ff_expert
    return Hyper(
        architecture=architecture,
        n_layer=n_layer,
        n_nextn=n_nextn,
        n_ctx_train=number("context_length"),
        n_embd=n_embd,
        n_vocab=header.array_lengths.get("tokenizer.ggml.tokens") or number("vocab_size"),
        heads=heads,
        kv_heads=each("attention.head_count_kv", list(heads)),
        head_k=head_k,
        head_v=head_v,
        head_k_window=number("attention.key_length_swa", head_k),
        head_v_window=number("attention.value_length_swa", head_v),
        ff=each("feed_forward_length", 0),
        n_expert=number("expert_count"),
        n_expert_used=number("expert_used_count"),
        ff_expert=ff_expert,
        ff_shared=shared,
        window=window,
        windowed=windowed,
        recurrent=recurrent,
        conv_kernel=number("ssm.conv_kernel"),
        inner=number("ssm.inner_size"),
        state=number("ssm.state_size"),
        groups=number("ssm.group_count"),
        latent=bool(key("attention.key_length_mla")) and architecture in _LATENT,
        metadata=header.metadata,
    )
