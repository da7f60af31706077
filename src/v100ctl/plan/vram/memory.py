"""Weights, KV cache and recurrent state: which device holds what. Exact.

Sources: llama.cpp b11434, `src/llama-model.cpp` (`load_tensors`, `create_memory`), `src/llama-kv-cache*.cpp`,
`src/llama-memory-recurrent.cpp`, `src/llama-context.cpp` (the constructor), `ggml/src/ggml-cuda/ggml-cuda.cu`
(`ggml_backend_cuda_buffer_type_get_alloc_size`).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from v100ctl.errors import V100ctlError
from v100ctl.plan.vram.model import BLOCKS, Hyper, Model, Weight
from v100ctl.plan.vram.types import Card, Launch

#: Where tensors of the host lie in results.
HOST = "host"
#: Buffers begin tensors at multiples of this: `ggml_backend_cuda_buffer_type_get_alignment`, `TENSOR_ALIGNMENT` of the CPU's.
ALIGNMENT = {"cuda": 128, "cpu": 32}
#: `MATRIX_ROW_PADDING`: CUDA pads the last row of a quantised tensor to a multiple of so many elements.
_ROW_PADDING = 512
#: Contexts are rounded up to this many cells.
_CELLS = 256


@dataclass(frozen=True)
class Sizes:
    """A context's sizes after the engine has rounded them.

    ``cells``: KV cells of one stream; ``window_cells``: of a windowed layer; ``streams``: KV streams; ``sequences``: slots.
    """

    cells: int
    window_cells: int
    streams: int
    sequences: int
    tokens: int
    context: int


def pad(value: int, multiple: int) -> int:
    """Round up."""
    return -(-value // multiple) * multiple


def row_bytes(kind: str, elements: int) -> int:
    """Bytes of so many elements of a type (`ggml_row_size`).

    Raises:
        V100ctlError: no such type, or its blocks do not divide the row.
    """
    if kind not in BLOCKS:
        raise V100ctlError(f"`{kind}` is no tensor type that the engine has", hint="for example `f16`, `q8_0` or `q4_0`")
    block, size = BLOCKS[kind]
    if elements % block:
        raise V100ctlError(f"rows of {elements} elements cannot be `{kind}`, which comes in blocks of {block}")
    return elements // block * size


def alloc_bytes(kind: str, shape: tuple[int, ...], size_bytes: int, backend: str) -> int:
    """What a tensor takes in a buffer: its bytes, CUDA's row padding, the buffer's alignment."""
    if backend == "cuda" and BLOCKS.get(kind, (1, 0))[0] > 1 and shape[0] % _ROW_PADDING:
        size_bytes += row_bytes(kind, _ROW_PADDING - shape[0] % _ROW_PADDING)
    return pad(size_bytes, ALIGNMENT[backend])


def sizes(hyper: Hyper, launch: Launch) -> Sizes:
    """The context's sizes as `llama_context` rounds them."""
    asked = launch.context_size or hyper.n_ctx_train
    batch = min(asked, launch.batch_size)
    ubatch = min(batch, launch.ubatch_size or batch)
    context = pad(asked, _CELLS)
    if not launch.kv_unified:
        context = pad(context // launch.parallel, _CELLS) * launch.parallel
    cells = context if launch.kv_unified else context // launch.parallel
    # A unified pool holds a window for each slot.
    window = hyper.window * (launch.parallel if launch.kv_unified else 1)
    window_cells = pad(min(cells, window + ubatch), _CELLS) if hyper.window else 0
    streams = 1 if launch.kv_unified else launch.parallel
    return Sizes(cells, window_cells, streams, launch.parallel, min(context, ubatch), context)


def kv_layers(hyper: Hyper, *, prediction: bool) -> tuple[int, ...]:
    """Layers that keep keys and values: the trunk's, or the prediction layers' in an MTP context."""
    if prediction:
        return tuple(range(hyper.n_layer, hyper.n_layer_all))
    return tuple(i for i in range(hyper.n_layer) if not hyper.recurrent[i])


def kv_bytes(hyper: Hyper, launch: Launch, layer: int, backend: str) -> int:
    """One layer's K and V cache. A latent cache (MLA) has no V; without flash attention V is as wide as the widest layer's."""
    size = sizes(hyper, launch)
    cells = size.window_cells if hyper.windowed[layer] else size.cells
    width = hyper.values(layer) if launch.flash_attention else max(map(hyper.values, range(hyper.n_layer_all)))
    total = 0
    for kind, elements in ((launch.kv_type_k, hyper.keys(layer)), (launch.kv_type_v, 0 if hyper.latent else width)):
        if elements:
            rows = cells * size.streams
            total += alloc_bytes(kind, (elements, rows), row_bytes(kind, elements) * rows, backend)
    return total


def state_bytes(hyper: Hyper, launch: Launch, backend: str, *, snapshots: int) -> int:
    """One recurrent layer's states in f32: convolution and state, a row for each slot and each snapshot to roll back to."""
    rows = launch.parallel * (1 + snapshots)
    return sum(pad(4 * elements * rows, ALIGNMENT[backend]) for elements in (hyper.conv_state, hyper.recurrent_state))


def _single(value: float) -> float:
    """A number as C's `float` keeps it: split points are compared in that."""
    return float(struct.unpack("<f", struct.pack("<f", value))[0])


def placement(n_layer_all: int, launch: Launch, cards: Sequence[Card]) -> tuple[str, ...]:
    """The device of each layer; the last entry is the output's.

    Layers go to the cards in proportion to their free memory; with fewer ``gpu_layers`` the first ones stay on the host.
    """
    layers = n_layer_all + 1
    wanted = layers if launch.gpu_layers is None else max(0, launch.gpu_layers)
    if launch.backend == "cpu" or not cards:
        return (HOST,) * layers
    used = cards[:1] if launch.split_mode == "none" else cards
    free = tuple(card.total_bytes - card.reserve_bytes for card in used)
    placed = _placed(layers, wanted, free if len(used) > 1 else (1,))
    return tuple(HOST if number is None else used[number].uuid for number in placed)


@lru_cache(maxsize=1024)
def _placed(layers: int, wanted: int, free: tuple[int, ...]) -> tuple[int | None, ...]:
    """The number of each layer's card (None: the host)."""
    start, count = max(layers - wanted, 0), min(wanted, layers)
    total = 0.0
    sums = []
    for amount in free:
        total = _single(total + _single(amount))
        sums.append(total)
    splits = [_single(part / total) for part in sums]

    def card(i: int) -> int | None:
        if i < start or i - start >= count:
            return None
        position = _single(_single(i - start) / _single(count))
        return next(k for k, split in enumerate(splits) if position < split)

    return tuple(card(i) for i in range(layers))


#: Tensors of no layer that go with the layers all the same, one copy for each device.
_SHARED = ("rope_freqs.", "rope_factors_long.", "rope_factors_short.")
#: The token embeddings, and what else is read by row on the host.
_INPUT = ("token_embd.", "token_embd_norm.", "token_types.", "position_embd.")


def weight_bytes(model: Model, launch: Launch, devices: Sequence[str], *, prediction: bool) -> dict[str, int]:
    """Weights by device. ``prediction``: whether the prediction layers are loaded (only where they draft)."""
    return dict(_weight_bytes(Identity(model), tuple(devices), launch.backend, prediction))


class Identity:
    """A model as a cache key: two are the same where they are one object."""

    def __init__(self, model: Model) -> None:
        self.model = model

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Identity) and other.model is self.model

    def __hash__(self) -> int:
        return id(self.model)


@lru_cache(maxsize=256)
def _weight_bytes(key: Identity, devices: tuple[str, ...], backend: str, prediction: bool) -> tuple[tuple[str, int], ...]:
    model = key.model
    result: dict[str, int] = {}
    for weight in model.weights:
        if weight.layer is not None and weight.layer >= model.hyper.n_layer and not prediction:
            continue
        for device in _devices(model, weight, devices):
            kind = "cpu" if device == HOST else backend
            result[device] = result.get(device, 0) + alloc_bytes(weight.type, weight.shape, weight.size_bytes, kind)
    return tuple(result.items())


def _devices(model: Model, weight: Weight, devices: Sequence[str]) -> Iterable[str]:
    if weight.layer is not None:
        return (devices[min(weight.layer, len(devices) - 1)],)
    if weight.name.startswith(_SHARED):
        return dict.fromkeys(devices[:-1])
    if weight.name.startswith(_INPUT):
        # Tied: the same tensor serves as output too and is loaded a second time beside the other weights of the output.
        return dict.fromkeys((HOST, devices[-1])) if model.tied and weight.name == "token_embd.weight" else (HOST,)
    return (devices[-1],)
