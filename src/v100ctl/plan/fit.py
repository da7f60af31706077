"""Does a model fit the cards it gets, how long may its context be, how fast can it answer? llama.cpp's side, in numbers."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from v100ctl.catalog import LlamaCppBuild
from v100ctl.fleet import InstanceSpec, Settings
from v100ctl.models.types import ModelHeader
from v100ctl.plan import llama_cpp, vram
from v100ctl.plan.cards import HostCard
from v100ctl.plan.types import GpuBudget

#: Kept free on every card: what the driver takes between two looks at it, and fragmentation after days of serving.
MARGIN_BYTES = 128 * 1024**2


@dataclass(frozen=True)
class Fit:
    """What one instance takes of its cards.

    ``largest_context_length`` is in tokens per request, 0 where no context fits. ``notes`` say what the figures leave out.
    """

    budgets: Mapping[str, GpuBudget]
    largest_context_length: int
    decode_ceiling_tps: float
    header: ModelHeader
    launch: vram.Launch
    cards: tuple[vram.Card, ...]
    notes: tuple[str, ...] = ()

    @property
    def short_bytes(self) -> int:
        """How much is missing on the card where most is missing; 0 or less where everything fits."""
        return max((-budget.free_bytes for budget in self.budgets.values()), default=0)


def launch_of(
    spec: InstanceSpec,
    row: LlamaCppBuild,
    backend: Literal["cuda", "cpu"],
    draft: ModelHeader | None,
    *,
    force_mmq: bool = True,
) -> vram.Launch:
    """What the engine will be started with, its own defaults filled in."""
    settings = spec.settings
    defaults = row.defaults
    parallel = settings.parallel or llama_cpp.DEFAULT_PARALLEL
    context_size = llama_cpp.context_per_request(settings) * (1 if settings.kv_unified else parallel)
    batch_size = settings.batch_size or defaults.batch_size
    speculative = settings.speculative
    return vram.Launch(
        context_size=context_size,
        parallel=parallel,
        kv_unified=bool(settings.kv_unified),
        batch_size=batch_size,
        ubatch_size=min(settings.ubatch_size or defaults.ubatch_size, batch_size),
        kv_type_k=settings.kv_cache_type_k or defaults.kv_cache_type,
        kv_type_v=settings.kv_cache_type_v or defaults.kv_cache_type,
        flash_attention=settings.flash_attention != "off",
        gpu_layers=settings.gpu_layers,
        split_mode=settings.split_mode or "layer",
        speculative=(
            None
            if speculative is None or speculative.kind == "none"
            else vram.Speculative(kind=speculative.kind, depth=speculative.depth or defaults.speculative_depth, draft=draft)
        ),
        backend=backend,
        force_mmq=force_mmq,
    )


def cards_of(
    chosen: Sequence[HostCard], taken_bytes: Mapping[str, int], *, margin_bytes: int = MARGIN_BYTES
) -> tuple[vram.Card, ...]:
    """Cards as the memory models take them. ``taken_bytes``: what others hold, by card key.

    Reserved are the margin, what others hold, and what the driver keeps of the total that it reports (driver 570 and later count
    their own share in; older ones report less).
    """
    return tuple(
        vram.Card(
            uuid=card.key,
            total_bytes=card.total_bytes or 0,
            reserve_bytes=margin_bytes + _driver_bytes(card) + taken_bytes.get(card.key, 0),
            context_bytes=vram.V100_CONTEXT_BYTES,
            bandwidth_bytes_per_s=float((card.row.bandwidth_bytes_per_s if card.row else None) or 0),
            compute_capability=card.compute_capability or "7.0",
        )
        for card in chosen
    )


def cuda_cards(cards: tuple[vram.Card, ...], chosen: Sequence[HostCard]) -> tuple[vram.Card, ...]:
    """The same cards with the total that CUDA itself reports, for an engine that takes a share of that."""
    return tuple(
        dataclasses.replace(
            card, total_bytes=card.total_bytes - _driver_bytes(host), reserve_bytes=card.reserve_bytes - _driver_bytes(host)
        )
        for card, host in zip(cards, chosen, strict=True)
    )


def _driver_bytes(card: HostCard) -> int:
    """What the driver keeps of the total that it reports: its own word, else what the catalog says that CUDA can have."""
    if card.gpu.memory_reserved_bytes is not None:
        return card.gpu.memory_reserved_bytes
    return max((card.total_bytes or 0) - card.row.memory_bytes, 0) if card.row else 0


def fit(header: ModelHeader, launch: vram.Launch, cards: tuple[vram.Card, ...]) -> Fit:
    """Fit a model onto cards.

    Raises:
        UnknownArchitectureError: how this architecture keeps its cache is not known.
    """
    # A fleet serves few models on many like cards: which card it is changes no figure.
    alike = tuple(dataclasses.replace(card, uuid=str(number)) for number, card in enumerate(cards))
    # A launch that holds a draft model's header cannot be a key.
    draft = launch.speculative.draft if launch.speculative else None
    found = _fit_alike(_SameHeader(header), _with_draft(launch, None), alike, _SameHeader(draft) if draft else None)
    uuids = {str(number): card.uuid for number, card in enumerate(cards)}
    return dataclasses.replace(found, budgets={uuids[key]: budget for key, budget in found.budgets.items()}, cards=cards)


class _SameHeader:
    """A header that is equal only to itself: comparing a thousand tensors costs more than what a cache saves."""

    def __init__(self, header: ModelHeader) -> None:
        self.header = header

    def __hash__(self) -> int:
        return id(self.header)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _SameHeader) and other.header is self.header


def _with_draft(launch: vram.Launch, draft: ModelHeader | None) -> vram.Launch:
    if launch.speculative is None:
        return launch
    return dataclasses.replace(launch, speculative=dataclasses.replace(launch.speculative, draft=draft))


@functools.lru_cache(maxsize=256)
def _fit_alike(same: _SameHeader, launch: vram.Launch, cards: tuple[vram.Card, ...], draft: _SameHeader | None) -> Fit:
    launch = _with_draft(launch, draft.header if draft else None)
    estimate = vram.estimate(same.header, launch, cards)
    return Fit(
        budgets=estimate.budgets,
        largest_context_length=vram.largest_context(same.header, launch, cards),
        # A ceiling is given for a short context: the figure that published speeds are measured at.
        decode_ceiling_tps=vram.decode_ceiling_tps(same.header, launch, cards, fill_tokens=0),
        header=same.header,
        launch=launch,
        cards=cards,
        notes=estimate.notes,
    )


def _largest(found: Fit, launch: vram.Launch) -> int:
    """The largest context with another launch; 0 where it cannot be launched so (blocks of a cache type do not fill its rows)."""
    with contextlib.suppress(vram.UnknownArchitectureError):
        return vram.largest_context(found.header, launch, found.cards)
    return 0


def alternatives(found: Fit, settings: Settings) -> Iterator[tuple[str, int]]:
    """Changes that would make it fit, mildest first: the setting as it is written, and the context that then fits."""
    launch = found.launch
    if found.largest_context_length:
        yield f"`context_length: {found.largest_context_length}`", found.largest_context_length
    tried: list[tuple[str, vram.Launch]] = []
    if launch.parallel > 1:
        single = dataclasses.replace(
            launch, parallel=1, context_size=launch.context_size // (1 if launch.kv_unified else launch.parallel)
        )
        tried.append(("`parallel: 1`", single))
    if {launch.kv_type_k, launch.kv_type_v} & {"f32", "f16", "bf16"}:
        quantised = dataclasses.replace(launch, kv_type_k="q8_0", kv_type_v="q8_0", flash_attention=True)
        tried.append(("`kv_cache_type_k: q8_0`, `kv_cache_type_v: q8_0`, `flash_attention: on`", quantised))
    if launch.ubatch_size > 128:
        tried.append(("`ubatch_size: 128`", dataclasses.replace(launch, ubatch_size=128)))
    everything = launch
    words = []
    for text, change in tried:
        largest = _largest(found, change)
        if largest >= llama_cpp.context_per_request(settings):
            yield text, llama_cpp.context_per_request(settings)
        changed = {
            field.name: getattr(change, field.name)
            for field in dataclasses.fields(change)
            if getattr(change, field.name) != getattr(launch, field.name)
        }
        everything = dataclasses.replace(everything, **changed)
        words.append(text)
    if len(tried) > 1:
        largest = _largest(found, everything)
        # Where the context alone does as much, the rest need not change.
        if largest > found.largest_context_length:
            asked = llama_cpp.context_per_request(settings)
            shorter = "" if largest >= asked else f", `context_length: {largest}`"
            yield ", ".join(words) + shorter, min(largest, asked)
