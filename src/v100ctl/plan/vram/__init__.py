"""What llama.cpp takes of each card, before anything is started.

The promise is the peak under a full prompt, not the load. Weights, KV cache and recurrent state are exact: what `llama-server`
prints. Everything is pure: a header, the launch and the cards in, numbers out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from v100ctl.models.types import ModelHeader
from v100ctl.plan.types import GpuBudget
from v100ctl.plan.vram import memory
from v100ctl.plan.vram.memory import HOST
from v100ctl.plan.vram.model import KNOWN, Hyper, Model, UnknownArchitectureError, of
from v100ctl.plan.vram.types import Buffers, Card, Estimate, Launch, Speculative

__all__ = [
    "KNOWN",
    "Buffers",
    "Card",
    "Estimate",
    "Launch",
    "Speculative",
    "UnknownArchitectureError",
    "decode_ceiling_tps",
    "estimate",
    "largest_context",
]


def estimate(header: ModelHeader, launch: Launch, cards: Sequence[Card]) -> Estimate:
    """What an instance takes of each card and of the host.

    Raises:
        UnknownArchitectureError: nothing is known about how the architecture keeps its cache.
        V100ctlError: a KV type that does not exist or does not divide the model's rows.
    """
    model = of(header)
    speculative = launch.speculative
    notes: list[str] = []
    mtp = speculative is not None and speculative.kind == "mtp" and model.hyper.n_nextn > 0
    if speculative is not None and speculative.kind == "mtp" and not mtp:
        notes.append(
            f"the file has no prediction layers ({model.hyper.architecture}.nextn_predict_layers), so it cannot draft by itself"
        )
    snapshots = speculative.depth if mtp and speculative and model.hyper.rolls_back else 0
    devices = memory.placement(model.hyper.n_layer_all, launch, cards)
    buffers = _weights(model, launch, devices, prediction=mtp)
    _add(buffers, _context(model, launch, devices, snapshots=snapshots, prediction=False))
    if speculative is not None and (mtp or (speculative.kind == "draft" and speculative.draft)):
        side = dataclasses.replace(launch, kv_type_k=speculative.kv_type_k, kv_type_v=speculative.kv_type_v, speculative=None)
        side = dataclasses.replace(side, context_size=memory.sizes(model.hyper, launch).context)
        if mtp:
            _add(buffers, _context(model, side, devices, snapshots=0, prediction=True))
        elif speculative.draft:
            draft = of(speculative.draft)
            draft_devices = memory.placement(draft.hyper.n_layer_all, dataclasses.replace(side, gpu_layers=None), cards)
            _add(buffers, _weights(draft, side, draft_devices, prediction=False))
            _add(buffers, _context(draft, side, draft_devices, snapshots=0, prediction=False))
    if launch.backend == "cuda" and HOST in devices:
        notes.append(f"{devices[:-1].count(HOST)} of {model.hyper.n_layer_all} layers stay on the host")
    budgets = {card.uuid: _budget(card, buffers.get(card.uuid)) for card in cards} if launch.backend == "cuda" else {}
    host = buffers.get(HOST, Buffers())
    host_bytes = {item.name: getattr(host, item.name) for item in dataclasses.fields(host) if item.name != "pool"}
    return Estimate(budgets, host_bytes, tuple(notes), buffers)


def _budget(card: Card, used: Buffers | None) -> GpuBudget:
    """A card's budget; one that holds nothing has no CUDA context worth naming either."""
    part = used or Buffers()
    return GpuBudget(
        total_bytes=card.total_bytes,
        reserve_bytes=card.reserve_bytes,
        weights_bytes=part.weights,
        kv_bytes=part.kv,
        state_bytes=part.state,
        compute_bytes=part.compute + part.pool,
        output_bytes=part.output,
        context_bytes=card.context_bytes if used else 0,
    )


def _add(buffers: dict[str, Buffers], more: dict[str, Buffers]) -> None:
    for device, part in more.items():
        buffers[device] = buffers.get(device, Buffers()).plus(part)


def _weights(model: Model, launch: Launch, devices: Sequence[str], *, prediction: bool) -> dict[str, Buffers]:
    taken = memory.weight_bytes(model, launch, devices, prediction=prediction)
    return {device: Buffers(weights=size) for device, size in taken.items()}


def _context(model: Model, launch: Launch, devices: Sequence[str], *, snapshots: int, prediction: bool) -> dict[str, Buffers]:
    """One context's cache, states, compute and output buffers."""
    hyper = model.hyper
    result: dict[str, Buffers] = {}
    for layer in memory.kv_layers(hyper, prediction=prediction):
        backend = "cpu" if devices[layer] == HOST else launch.backend
        _add(result, {devices[layer]: Buffers(kv=memory.kv_bytes(hyper, launch, layer, backend))})
    if not prediction:
        for layer in range(hyper.n_layer):
            if hyper.recurrent[layer]:
                backend = "cpu" if devices[layer] == HOST else launch.backend
                _add(result, {devices[layer]: Buffers(state=memory.state_bytes(hyper, launch, backend, snapshots=snapshots))})
    # Logits of one token a slot come back to the host (`output_reserve`).
    _add(result, {HOST: Buffers(output=4 * hyper.n_vocab * launch.parallel)})
    for device in {*devices} - {HOST} or {HOST}:
        _add(result, {device: Buffers(compute=_compute(hyper, launch))})
    return result


def _compute(hyper: Hyper, launch: Launch) -> int:
    """The intermediate results that live at once for one micro-batch: twice the feed-forward width, a few times the embedding,
    the mask, and without flash attention the attention scores."""
    size = memory.sizes(hyper, launch)
    tokens = size.tokens
    width = max(*hyper.ff, hyper.ff_expert * hyper.n_expert_used)
    mask = size.cells * tokens * (2 if launch.flash_attention else 4)
    scores = 0 if launch.flash_attention else 4 * max(hyper.heads) * size.cells * tokens
    return 4 * tokens * (2 * width + 4 * hyper.n_embd) + mask + scores


def largest_context(header: ModelHeader, launch: Launch, cards: Sequence[Card]) -> int:
    """Tokens per request of the largest context that fits, in steps of 256 up to what the model was trained with; 0: none."""
    trained = of(header).hyper.n_ctx_train or 1 << 20
    slots = 1 if launch.kv_unified else launch.parallel

    def fits(tokens: int) -> bool:
        return estimate(header, dataclasses.replace(launch, context_size=tokens * slots), cards).fits

    low, high = 0, max(1, trained // 256)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(256 * middle) else (low, middle - 1)
    return 256 * low


def decode_ceiling_tps(header: ModelHeader, launch: Launch, cards: Sequence[Card], *, fill_tokens: int) -> float:
    """Tokens a second that memory bandwidth allows one stream: what is read for a token over how fast it can be read.

    Read are: all weights but the embedding table, of experts only those that are used; the KV cells filled so far (of windowed
    layers at most the window); the recurrent states, read and written. Cards of a layer split work one after the other, so their
    times add up.
    """
    model = of(header)
    hyper = model.hyper
    devices = memory.placement(hyper.n_layer_all, launch, cards)
    per_layer: dict[str, float] = {}
    for weight in model.weights:
        if weight.layer is not None and weight.layer >= hyper.n_layer:
            continue
        share = hyper.n_expert_used / hyper.n_expert if "_exps." in weight.name and hyper.n_expert else 1.0
        where = devices[weight.layer] if weight.layer is not None else devices[-1]
        if weight.name == "token_embd.weight" and not model.tied:
            continue
        per_layer[where] = per_layer.get(where, 0.0) + share * weight.size_bytes
    for layer in memory.kv_layers(hyper, prediction=False):
        cells = min(fill_tokens, hyper.window) if hyper.windowed[layer] else fill_tokens
        size = memory.row_bytes(launch.kv_type_k, hyper.keys(layer))
        size += 0 if hyper.latent else memory.row_bytes(launch.kv_type_v, hyper.values(layer))
        per_layer[devices[layer]] = per_layer.get(devices[layer], 0.0) + cells * size
    state = 2 * 4 * (hyper.conv_state + hyper.recurrent_state)
    for layer in range(hyper.n_layer):
        if hyper.recurrent[layer]:
            per_layer[devices[layer]] = per_layer.get(devices[layer], 0.0) + state
    bandwidth = {card.uuid: card.bandwidth_bytes_per_s for card in cards}
    slowest = min(bandwidth.values(), default=0.0)
    seconds = sum(size / bandwidth.get(device, slowest) for device, size in per_layer.items()) if slowest else 0.0
    return 1.0 / seconds if seconds else 0.0
