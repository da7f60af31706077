"""What llama.cpp takes of each card, before anything is started.

The promise is the peak under a full prompt, not the load. Weights, KV cache and recurrent state are exact: what `llama-server`
prints. Everything is pure: a header, the launch and the cards in, numbers out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import lru_cache

from v100ctl.models.types import ModelHeader
from v100ctl.plan.types import GpuBudget
from v100ctl.plan.vram import memory
from v100ctl.plan.vram.architectures import Builder, kinds
from v100ctl.plan.vram.graph import buffer_sizes
from v100ctl.plan.vram.memory import HOST, Identity
from v100ctl.plan.vram.model import KNOWN, Model, UnknownArchitectureError, of
from v100ctl.plan.vram.pool import needs
from v100ctl.plan.vram.types import CUBLAS_BYTES, V100_CONTEXT_BYTES, Buffers, Card, Estimate, Launch, Speculative

__all__ = [
    "CUBLAS_BYTES",
    "KNOWN",
    "V100_CONTEXT_BYTES",
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
    # Cards by their number, so that hosts that differ in nothing else share what is computed once.
    used = tuple(dataclasses.replace(card, uuid=str(number)) for number, card in enumerate(_used(launch, cards)))
    devices = memory.placement(model.hyper.n_layer_all, launch, used)
    buffers = _weights(model, launch, devices, prediction=mtp)
    plain = dataclasses.replace(launch, speculative=None)
    drafted = speculative.depth if speculative and (speculative.kind != "mtp" or mtp) else 0
    outputs = min(launch.batch_size, launch.parallel * (1 + drafted))
    _add(buffers, _context(model, plain, devices, used, outputs=outputs, snapshots=snapshots))
    if speculative is not None:
        context = memory.sizes(model.hyper, launch).context
        side = dataclasses.replace(plain, context_size=context, kv_type_k=speculative.kv_type_k, kv_type_v=speculative.kv_type_v)
        if mtp:
            _add(buffers, _context(model, side, devices, used, outputs=launch.parallel, prediction=True))
        elif speculative.kind == "draft" and speculative.draft:
            draft = of(speculative.draft)
            side = dataclasses.replace(side, gpu_layers=None)
            draft_devices = memory.placement(draft.hyper.n_layer_all, side, used)
            _add(buffers, _weights(draft, side, draft_devices, prediction=False))
            _add(buffers, _context(draft, side, draft_devices, used, outputs=launch.parallel))
    if launch.backend == "cuda" and HOST in devices:
        notes.append(f"{devices[:-1].count(HOST)} of {model.hyper.n_layer_all} layers stay on the host")
    named = {card.uuid: buffers.get(str(number)) for number, card in enumerate(_used(launch, cards))}
    budgets = {card.uuid: _budget(card, named.get(card.uuid)) for card in cards} if launch.backend == "cuda" else {}
    host = buffers.get(HOST, Buffers())
    host_bytes = {kind: getattr(host, kind) for kind in ("weights", "kv", "state", "compute", "output")}
    return Estimate(budgets, host_bytes, tuple(notes), {name: part for name, part in named.items() if part} | {HOST: host})


def _used(launch: Launch, cards: Sequence[Card]) -> Sequence[Card]:
    """The cards that the engine spreads a model over."""
    if launch.backend == "cpu":
        return ()
    return cards[:1] if launch.split_mode == "none" else cards


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
        context_bytes=card.context_bytes + (card.library_bytes if part.library else 0) if used else 0,
    )


def _add(buffers: dict[str, Buffers], more: dict[str, Buffers]) -> None:
    for device, part in more.items():
        buffers[device] = buffers.get(device, Buffers()).plus(part)


def _weights(model: Model, launch: Launch, devices: Sequence[str], *, prediction: bool) -> dict[str, Buffers]:
    taken = memory.weight_bytes(model, launch, devices, prediction=prediction)
    return {device: Buffers(weights=size) for device, size in taken.items()}


def _context(
    model: Model,
    launch: Launch,
    devices: Sequence[str],
    cards: tuple[Card, ...],
    *,
    outputs: int,
    snapshots: int = 0,
    prediction: bool = False,
) -> dict[str, Buffers]:
    """One context's cache, states, compute and output buffers, by device."""
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
    # Logits come back to the host, one token's a slot (`output_reserve`).
    _add(result, {HOST: Buffers(output=4 * hyper.n_vocab * launch.parallel)})
    kinds_of_card = tuple((card.compute_capability, card.multiprocessors) for card in cards)
    _add(result, _compute(Identity(model), launch, tuple(devices), kinds_of_card, outputs, snapshots, prediction))
    return result


@lru_cache(maxsize=4096)
def _compute(
    key: Identity,
    launch: Launch,
    devices: tuple[str, ...],
    cards: tuple[tuple[str, int], ...],
    outputs: int,
    snapshots: int,
    prediction: bool,
) -> dict[str, Buffers]:
    """Compute buffers, and what kernels take beside them, by device; ``cards``: compute capability and multiprocessors."""
    model = key.model
    builder = Builder(model, launch, devices, outputs=outputs, snapshots=snapshots, layers=kinds(model, devices))
    graph = builder.build_prediction() if prediction else builder.build()
    names = [str(number) for number in range(len(cards)) if str(number) in devices]
    # With several cards four micro-batches are in flight (`GGML_SCHED_MAX_COPIES`), if nothing stays on the host.
    copies = 4 if len(names) > 1 and HOST not in devices else 1
    sizes = buffer_sizes(graph, names, launch.backend, copies=copies)
    result = {device: Buffers(compute=size) for device, size in sizes.items()}
    for name in names:
        capability, multiprocessors = cards[int(name)]
        products = [product for product in builder.products if product.device == name]
        found = needs(products, capability, multiprocessors, force_mmq=launch.force_mmq)
        _add(result, {name: Buffers(pool=found.pool_bytes, library=found.cublas)})
    return result


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
