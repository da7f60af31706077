"""Which cards a host has, and which of them an instance gets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from v100ctl.catalog import Catalog
from v100ctl.catalog.hardware import Architecture, GpuRow, NeighbourGpu
from v100ctl.facts import Facts, Gpu
from v100ctl.fleet import InstanceSpec
from v100ctl.plan.types import Rule

#: Kernel drivers that give a card to a virtual machine; CUDA on the host does not see it then.
PASS_THROUGH_DRIVERS = ("vfio-pci", "pci-stub")


@dataclass(frozen=True)
class HostCard:
    """One NVIDIA card of a host, with what the catalog knows of it: ``row`` for a V100, ``neighbour`` for some others.

    ``index`` counts as ``nvidia-smi`` does, in PCI order over the cards that the driver can have.
    """

    gpu: Gpu
    row: GpuRow | None
    index: int | None
    neighbour: NeighbourGpu | None = None
    architecture: Architecture | None = None

    @property
    def key(self) -> str:
        """What names this card in plans: its UUID, or its PCI address as long as no driver has told the UUID."""
        return self.gpu.uuid or self.gpu.pci_address

    @property
    def visible_as(self) -> str:
        """The card as ``CUDA_VISIBLE_DEVICES`` takes it."""
        return self.gpu.uuid or str(self.index)

    @property
    def name(self) -> str:
        """The card's name for people."""
        known = self.row or self.neighbour
        return self.gpu.name or (known.name if known else f"the card {self.gpu.pci_id}")

    @property
    def total_bytes(self) -> int | None:
        """Memory as the driver reports it, else as the catalog has it."""
        return self.gpu.memory_total_bytes or (self.row.memory_bytes if self.row else None)

    @property
    def compute_capability(self) -> str:
        """Such as ``7.0``; empty where it is not known."""
        known = self.row or self.neighbour
        return (known.compute_capability if known else "") or self.gpu.compute_capability

    @property
    def passed_through(self) -> bool:
        """Whether a virtual machine has it."""
        return self.gpu.kernel_driver in PASS_THROUGH_DRIVERS

    @property
    def is_volta(self) -> bool:
        """Compute capability 7.0: no GSP, so proprietary kernel modules only, and no driver after branch 580."""
        return self.compute_capability == "7.0" or (self.architecture is not None and self.architecture.name == "volta")

    @property
    def needs_open_modules(self) -> bool:
        """Whether the proprietary kernel modules do not drive it."""
        return self.architecture is not None and self.architecture.open_modules == "required"


def host_cards(facts: Facts, catalog: Catalog) -> tuple[HostCard, ...]:
    """All NVIDIA cards in PCI order."""
    cards: list[HostCard] = []
    index = 0
    for gpu in sorted(facts.gpus, key=lambda gpu: gpu.pci_address):
        usable = gpu.kernel_driver not in PASS_THROUGH_DRIVERS
        neighbour = next((row for row in catalog.neighbours if row.pci_id == gpu.pci_id.lower()), None)
        architecture = catalog.architecture(gpu.pci_id, gpu.name)
        cards.append(HostCard(gpu, catalog.gpu(gpu.pci_id), index if usable else None, neighbour, architecture))
        index += usable
    return tuple(cards)


def runs_on(card: HostCard, architectures: str) -> bool:
    """Whether code built for ``CMAKE_CUDA_ARCHITECTURES`` is meant for a card. PTX for older ones, which may run, is not counted.

    PTX for just this one (``70-virtual``) is: whether the driver loads it is another question.
    """
    wanted = card.compute_capability.replace(".", "")
    return bool(wanted) and wanted in {name.split("-")[0] for name in architectures.split(";")}


def usable_cards(cards: Sequence[HostCard], architectures: str) -> tuple[HostCard, ...]:
    """The cards that the planned engine can compute on."""
    return tuple(card for card in cards if not card.passed_through and runs_on(card, architectures))


def choose(
    name: str, spec: InstanceSpec, cards: Sequence[HostCard], usable: Sequence[HostCard]
) -> tuple[tuple[HostCard, ...], tuple[Rule, ...]]:
    """The cards that an instance gets, and what is wrong with its wish.

    Without a wish it gets the only usable card; where there are several it has to say.
    """
    rules = tuple(_problems(name, spec, cards, usable))
    if spec.gpus is None:
        return (tuple(usable[:1]), rules)
    found = [_find(wish, cards) for wish in spec.gpus]
    chosen = [card for card in found if card is not None and card in usable]
    return (tuple(dict.fromkeys(chosen)), rules)


def _find(wish: int | str, cards: Sequence[HostCard]) -> HostCard | None:
    if isinstance(wish, int) or wish.isdigit():
        return next((card for card in cards if card.index == int(wish)), None)
    return next((card for card in cards if card.gpu.uuid and card.gpu.uuid.lower() == wish.lower()), None)


def _listed(cards: Sequence[HostCard]) -> str:
    return ", ".join(f"{card.index} ({card.name})" for card in cards) or "none"


def _problems(name: str, spec: InstanceSpec, cards: Sequence[HostCard], usable: Sequence[HostCard]) -> Iterator[Rule]:
    if spec.gpus is None:
        if len(usable) > 1:
            yield Rule(
                "gpus-unsaid",
                "refuse",
                f"the host has {len(usable)} cards for this engine and `gpus` does not say which",
                f"`gpus: [{usable[0].index}]`; the cards are {_listed(usable)}",
                instance=name,
            )
        return
    if not spec.gpus:
        if usable:
            yield Rule(
                "gpus-empty",
                "refuse",
                "`gpus: []` gives no card, and the backend computes on cards",
                f"`gpus: [{usable[0].index}]`" + (", or `llama_cpp_backend: cpu`" if spec.engine == "llama_cpp" else ""),
                instance=name,
            )
        return
    for wish in spec.gpus:
        card = _find(wish, cards)
        if card is None:
            known_uuids = all(card.gpu.uuid for card in cards)
            if isinstance(wish, str) and not wish.isdigit() and not known_uuids:
                reason = f"card {wish} cannot be found: no working driver tells the UUIDs of the host's {len(cards)} cards"
            else:
                reason = f"the host has no card {wish}; it has {len(cards)}"
            nearest = f"`gpus: [{usable[0].index}]`; the cards are {_listed(usable)}" if usable else "a card in the host"
            yield Rule("gpu-missing", "refuse", reason, nearest, instance=name)
        elif usable and card not in usable and not card.passed_through and card.compute_capability:
            yield Rule(
                "gpu-not-built-for",
                "refuse",
                f"card {wish} is {card.name}, compute capability {card.compute_capability}; the engine is not built for it",
                f"one of {_listed(usable)}",
                instance=name,
            )
    repeated = len(spec.gpus) - len({card.key for wish in spec.gpus if (card := _find(wish, cards))})
    if repeated > 0 and all(_find(wish, cards) for wish in spec.gpus):
        yield Rule(
            "gpu-twice",
            "refuse",
            f"`gpus` names one card twice: {', '.join(map(str, spec.gpus))}",
            "each card once",
            instance=name,
        )
