"""What llama.cpp takes of each card, before anything is started.

The promise is the peak under a full prompt, not the load. Weights, KV cache and recurrent state are exact: what `llama-server`
prints. Everything is pure: a header, the launch and the cards in, numbers out.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ParamSpec, TypeVar

from v100ctl.errors import V100ctlError
from v100ctl.models.types import ModelHeader
from v100ctl.plan.types import GpuBudget
from v100ctl.plan.vram import memory
from v100ctl.plan.vram.architectures import Builder, kinds
from v100ctl.plan.vram.graph import buffer_sizes
from v100ctl.plan.vram.memory import HOST, Identity
from v100ctl.plan.vram.model import KNOWN, MEASURED, Model, UnknownArchitectureError, of
from v100ctl.plan.vram.pool import needs
from v100ctl.plan.vram.types import CUBLAS_BYTES, V100_CONTEXT_BYTES, Buffers, Card, Estimate, Launch, Speculative

__all__ = [
    "CUBLAS_BYTES",
    "KNOWN",
    "MEASURED",
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


_Given = ParamSpec("_Given")
_Found = TypeVar("_Found")


def _of_sensible_headers(function: Callable[_Given, _Found]) -> Callable[_Given, _Found]:
    """A header is somebody else's file: values that no arithmetic can use make its memory unknown, and end nothing else."""

    @functools.wraps(function)
    def call(*args: _Given.args, **kwargs: _Given.kwargs) -> _Found:
        try:
            return function(*args, **kwargs)
        except UnknownArchitectureError:
            raise
        except V100ctlError as error:
            raise UnknownArchitectureError(error.message, hint=error.hint) from error
        except (TypeError, ValueError, ArithmeticError) as error:
            raise UnknownArchitectureError("the model's header holds values that make no sense") from error

    return call


@_of_sensible_headers
def estimate(header: ModelHeader, launch: Launch, cards: Sequence[Card]) -> Estimate:
    """What an instance takes of each card and of the host.

    Raises:
        UnknownArchitectureError: nothing is known about how the architecture keeps its cache.
        V100ctlError: a KV type that does not exist or does not divide the model's rows.
    """
    asked = _asked(header, launch, cards)
    buffers = _buffers(*asked.key)
    model, devices = asked.model, asked.devices
    notes = _notes(model, launch, devices)
    named = {card.uuid: buffers.get(str(number)) for number, card in enumerate(_used(launch, cards))}
    budgets = {card.uuid: _budget(card, named.get(card.uuid)) for card in cards} if launch.backend == "cuda" else {}
    host = buffers.get(HOST, Buffers())
    host_bytes = {kind: getattr(host, kind) for kind in ("weights", "kv", "state", "compute", "output")}
    return Estimate(budgets, host_bytes, notes, {name: part for name, part in named.items() if part} | {HOST: host})


def _notes(model: Model, launch: Launch, devices: Sequence[str]) -> tuple[str, ...]:
    notes = []
    hyper = model.hyper
    if launch.speculative is not None and launch.speculative.kind == "mtp" and not hyper.n_nextn:
        notes.append(
            f"the file has no prediction layers (`{hyper.architecture}.nextn_predict_layers`): it cannot draft by itself"
        )
    if launch.backend == "cuda" and HOST in devices:
        notes.append(
            f"{devices.count(HOST)} of {len(devices)} layers stay on the host; what a card needs to help with a prompt is "
            "not counted"
        )
    if hyper.architecture not in MEASURED:
        notes.append(f"compute buffers of `{hyper.architecture}` follow the general graph and were not compared with the engine")
    return tuple(notes)


@dataclass(frozen=True)
class _Asked:
    """A question in a form that hosts which differ in nothing that matters share: cards by number, no header objects."""

    model: Model
    launch: Launch
    devices: tuple[str, ...]
    cards: tuple[tuple[str, int], ...]
    side: _Side | None

    @property
    def key(self) -> tuple[Identity, Launch, tuple[str, ...], tuple[tuple[str, int], ...], _Side | None]:
        """Arguments of :func:`_buffers`."""
        return Identity(self.model), self.launch, self.devices, self.cards, self.side


def _asked(header: ModelHeader, launch: Launch, cards: Sequence[Card]) -> _Asked:
    model = of(header)
    used = tuple(dataclasses.replace(card, uuid=str(number)) for number, card in enumerate(_used(launch, cards)))
    plain = dataclasses.replace(launch, speculative=None)
    side = None
    if launch.speculative is not None:
        speculative = launch.speculative
        draft = of(speculative.draft) if speculative.kind == "draft" and speculative.draft else None
        drafted_on = memory.placement(draft.hyper.n_layer_all, dataclasses.replace(plain, gpu_layers=None), used) if draft else ()
        side = _Side(
            speculative.kind,
            speculative.depth,
            speculative.kv_type_k,
            speculative.kv_type_v,
            Identity(draft) if draft else None,
            drafted_on,
        )
    devices = memory.placement(model.hyper.n_layer_all, plain, used)
    return _Asked(model, plain, devices, tuple((card.compute_capability, card.multiprocessors) for card in used), side)


@dataclass(frozen=True)
class _Side:
    """What drafts beside a model: a key for what is computed once."""

    kind: str
    depth: int
    kv_type_k: str
    kv_type_v: str
    draft: Identity | None
    devices: tuple[str, ...]


@lru_cache(maxsize=1024)
def _buffers(
    key: Identity, launch: Launch, devices: tuple[str, ...], cards: tuple[tuple[str, int], ...], side: _Side | None
) -> dict[str, Buffers]:
    """Everything an instance allocates, by device; ``cards``: compute capability and multiprocessors. Not to be changed."""
    model = key.model
    hyper = model.hyper
    mtp = side is not None and side.kind == "mtp" and hyper.n_nextn > 0
    drafted = side.depth if side is not None and (side.kind != "mtp" or mtp) else 0
    outputs = min(launch.batch_size, launch.parallel * (1 + drafted))
    buffers = _weights(model, launch, devices, prediction=mtp)
    _add(buffers, _context(model, launch, devices, cards, outputs=outputs, snapshots=drafted if mtp and hyper.rolls_back else 0))
    if side is not None:
        context = memory.sizes(hyper, launch).context
        second = dataclasses.replace(launch, context_size=context, kv_type_k=side.kv_type_k, kv_type_v=side.kv_type_v)
        if mtp:
            _add(buffers, _context(model, second, devices, cards, outputs=launch.parallel, prediction=True))
        elif side.draft is not None:
            draft = side.draft.model
            second = dataclasses.replace(second, gpu_layers=None)
            _add(buffers, _weights(draft, second, side.devices, prediction=False))
            _add(buffers, _context(draft, second, side.devices, cards, outputs=launch.parallel))
    return buffers


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
    cards: tuple[tuple[str, int], ...],
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
    _add(result, _compute(model, launch, tuple(devices), cards, outputs=outputs, snapshots=snapshots, prediction=prediction))
    return result


def _compute(
    model: Model,
    launch: Launch,
    devices: tuple[str, ...],
    cards: tuple[tuple[str, int], ...],
    *,
    outputs: int,
    snapshots: int,
    prediction: bool,
) -> dict[str, Buffers]:
    """Compute buffers, and what kernels take beside them, by device."""
    builder = Builder(model, launch, devices, outputs=outputs, snapshots=snapshots, layers=kinds(model, devices))
    try:
        graph = builder.build_prediction() if prediction else builder.build()
    except (KeyError, IndexError, ValueError, ArithmeticError) as error:
        raise UnknownArchitectureError(
            f"the header of this `{model.hyper.architecture}` model does not fit together, so its memory cannot be computed"
        ) from error
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


@_of_sensible_headers
def largest_context(header: ModelHeader, launch: Launch, cards: Sequence[Card]) -> int:
    """Tokens per request of the largest context that fits, in steps of 256 up to what the model was trained with; 0: none."""
    asked = _asked(header, launch, cards)
    room = tuple(
        (card.total_bytes - card.reserve_bytes - card.context_bytes, card.library_bytes) for card in _used(launch, cards)
    )
    return _largest(*asked.key, room)


@lru_cache(maxsize=1024)
def _largest(
    key: Identity,
    launch: Launch,
    devices: tuple[str, ...],
    cards: tuple[tuple[str, int], ...],
    side: _Side | None,
    room: tuple[tuple[int, int], ...],
) -> int:
    """Tokens per request; ``room``: each card's bytes beside the CUDA context, and what cuBLAS takes of them."""
    slots = 1 if launch.kv_unified else launch.parallel

    def fits(tokens: int) -> bool:
        buffers = _buffers(key, dataclasses.replace(launch, context_size=tokens * slots), devices, cards, side)
        return all(
            part.total + (library if part.library else 0) <= free
            for number, (free, library) in enumerate(room)
            if (part := buffers.get(str(number)))
        )

    low, high = 0, max(1, (key.model.hyper.n_ctx_train or 1 << 20) // 256)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(256 * middle) else (low, middle - 1)
    return 256 * low


@_of_sensible_headers
def decode_ceiling_tps(header: ModelHeader, launch: Launch, cards: Sequence[Card], *, fill_tokens: int) -> float:
    """Tokens a second that memory bandwidth allows one stream: what is read for a token over how fast it can be read.

    Read are: all weights but the embedding table, of experts only those that are used; the KV cells filled so far (of windowed
    layers at most the window); the recurrent states, read and written. Cards of a layer split work one after the other, so their
    times add up.
    """
    asked = _asked(header, launch, cards)
    types = (launch.kv_type_k, launch.kv_type_v)
    hyper = asked.model.hyper
    bandwidth = {str(number): card.bandwidth_bytes_per_s for number, card in enumerate(_used(launch, cards))}
    slowest = min(bandwidth.values(), default=0.0)
    seconds = 0.0
    for device, fixed, per_cell, per_windowed_cell in _read_bytes(Identity(asked.model), asked.devices, *types):
        size = fixed + fill_tokens * per_cell + min(fill_tokens, hyper.window) * per_windowed_cell
        seconds += size / bandwidth.get(device, slowest) if slowest else 0.0
    return 1.0 / seconds if seconds else 0.0


@lru_cache(maxsize=1024)
def _read_bytes(key: Identity, devices: tuple[str, ...], kv_type_k: str, kv_type_v: str) -> list[tuple[str, float, int, int]]:
    """What one token reads of each device: weights and states, and the bytes of a filled cell of full and of windowed layers."""
    model = key.model
    hyper = model.hyper
    fixed = dict.fromkeys(devices, 0.0)
    cell = dict.fromkeys(devices, 0)
    windowed = dict.fromkeys(devices, 0)
    for weight in model.weights:
        if weight.layer is not None and weight.layer >= hyper.n_layer:
            continue
        if weight.name == "token_embd.weight" and not model.tied:
            continue
        share = hyper.n_expert_used / hyper.n_expert if "_exps." in weight.name and hyper.n_expert else 1.0
        fixed[devices[weight.layer] if weight.layer is not None else devices[-1]] += share * weight.size_bytes
    for layer in range(hyper.n_layer):
        if hyper.recurrent[layer]:
            fixed[devices[layer]] += 2 * 4 * (hyper.conv_state + hyper.recurrent_state)
            continue
        size = memory.row_bytes(kv_type_k, hyper.keys(layer))
        size += 0 if hyper.latent else memory.row_bytes(kv_type_v, hyper.values(layer))
        (windowed if hyper.windowed[layer] else cell)[devices[layer]] += size
    return [(device, fixed[device], cell[device], windowed[device]) for device in fixed]
