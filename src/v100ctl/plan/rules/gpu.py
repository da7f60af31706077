"""Rules about the cards themselves: are they there, can the driver reach them, are they whole, are they free?"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from v100ctl.catalog import Catalog
from v100ctl.facts import Facts
from v100ctl.plan import adoption
from v100ctl.plan.cards import HostCard
from v100ctl.plan.rules.text import gib
from v100ctl.plan.types import Rule, Severity


def presence_rules(
    cards: Sequence[HostCard],
    usable: Sequence[HostCard],
    architectures: str,
    facts: Facts,
    catalog: Catalog,
    *,
    compiled: bool = True,
) -> Iterator[Rule]:
    """Rules about what the host has at all, for a backend that needs a card.

    ``compiled``: the engine is compiled for ``architectures``; otherwise they are what its packages hold.
    """
    if not cards and "gpus" in facts.errors:
        yield Rule(
            "gpus-not-probed",
            "refuse",
            f"the host's PCI bus could not be looked at: {facts.errors['gpus']}",
            "plan again; a bus that hangs has a card that hangs: `dmesg` on the host names it",
        )
        return
    if not cards:
        yield Rule(
            "gpu-none",
            "refuse",
            "the host shows no NVIDIA card on its PCI bus",
            "`lspci -d 10de:` on the host must list one: seat it, give it power, switch `Above 4G Decoding` on; "
            "or `llama_cpp_backend: cpu`",
        )
        return
    for card in cards:
        if card.row is None and card.neighbour is None and not card.compute_capability:
            yield Rule(
                "gpu-unknown",
                "warn" if usable else "refuse",
                f"{card.name} ({card.gpu.pci_id} at {card.gpu.pci_address}) has no row in the catalog of {catalog.as_of}",
                f"a V100: {', '.join(catalog.gpu_names)}",
            )
    known = [card for card in cards if card.compute_capability and not card.passed_through]
    if known and not usable:
        found = ", ".join(f"{card.name} ({card.compute_capability})" for card in known)
        codes = sorted({card.compute_capability.replace(".", "") for card in known})
        asked = f'`llama_cpp_cuda_architectures: "{";".join(codes)}"`'
        if any(card.is_volta for card in known):
            nearest = asked.replace(";".join(codes), "70")
        else:
            nearest = f"a V100, or {asked} for another generation, which nobody has tried" if compiled else "a V100"
        yield Rule(
            "gpu-unsupported",
            "refuse",
            f"no card of the host can run an engine built for architecture {architectures}: it has {found}",
            nearest,
        )


def bus_rules(cards: Sequence[HostCard], chosen: Collection[str]) -> Iterator[Rule]:
    """Rules about each card on its bus. ``chosen``: keys of the cards that some instance uses; the others only warn."""
    for card in cards:
        severity: Severity = "refuse" if card.key in chosen or not chosen else "warn"
        where = f"{card.name} at {card.gpu.pci_address}"
        if card.gpu.revision_ff:
            yield Rule(
                "gpu-fallen-off",
                severity,
                f"{where} answers all ones on the bus: it has fallen off (XID 79 in the kernel log says so)",
                "power the host off and on; if it comes back, look at power cables, heat and risers",
                card=card.key,
            )
            continue
        if card.passed_through:
            yield Rule(
                "gpu-passed-through",
                severity if not chosen else "info",
                f"{where} is bound to {card.gpu.kernel_driver}, so a virtual machine has it and the host's driver does not",
                "take it out of the vfio configuration, or provision the virtual machine",
                card=card.key,
            )
            continue
        if card.gpu.bar1_bytes == 0:
            yield Rule(
                "gpu-bar1-unassigned",
                severity,
                f"{where} got no address space for its memory (BAR1 is 0)",
                "`Above 4G Decoding` on in the firmware, and `pci=realloc` on the kernel command line if that is not enough",
                card=card.key,
            )
        yield from _link_rules(card, where)


def _link_rules(card: HostCard, where: str) -> Iterator[Rule]:
    row = card.row
    if row is None or not card.is_volta:
        return
    width, speed_gts = card.gpu.link_width, card.gpu.link_speed_gts
    narrow = bool(width) and width is not None and width < row.pcie_width
    # The full speed of PCIe generation 3 is 8 GT/s; an idle card may have stepped down, so the slot's own limit counts too.
    slow = bool(speed_gts) and speed_gts is not None and speed_gts < 8.0
    if narrow or slow:
        yield Rule(
            "gpu-link-degraded",
            "warn",
            f"{where} has a PCIe link of {speed_gts or '?'} GT/s x{width or '?'} instead of 8 GT/s x{row.pcie_width}: "
            "loading a model and sharing it between cards take longer",
            "a slot with 16 lanes to the processor, no riser; an idle card may show a lower speed than under load",
            card=card.key,
        )


def fabric_rules(cards: Sequence[HostCard], facts: Facts, branch: str | None) -> Iterator[Rule]:
    """NVSwitch machines (DGX-2, HGX-2) answer CUDA only while the fabric manager runs."""
    if not facts.nvidia.nvswitch_count:
        return
    if facts.nvidia.fabric_manager != "active":
        state = "is installed but does not run" if facts.nvidia.fabric_manager == "installed" else "is not installed"
        yield Rule(
            "fabric-manager-missing",
            "refuse",
            f"the host has {facts.nvidia.nvswitch_count} NVSwitches and {len(cards)} cards, and the fabric manager {state}: "
            "CUDA does not start without it",
            f"`nvidia-fabricmanager-{branch or 'BRANCH'}` in just the driver's version, enabled and started",
        )


def busy_rules(card: HostCard, ours: Collection[str], name: str, facts: Facts, leaving: Collection[int] = ()) -> Iterator[Rule]:
    """Somebody else computes on the card. ``ours``: units of this toolkit, ``leaving``: processes that are stopped."""
    others = [process for process in card.gpu.processes if process.unit not in ours and process.pid not in leaving]
    if others:
        used_bytes = sum(process.memory_bytes or 0 for process in others)
        known = {process.pid: facts.occupant(process.pid) for process in others}
        names = ", ".join(
            adoption.who(occupant) if (occupant := known[process.pid]) else f"`{process.command or '?'}` (pid {process.pid})"
            for process in others[:3]
        )
        more = f" and {len(others) - 3} more" if len(others) > 3 else ""
        yield Rule(
            "gpu-in-use",
            "warn",
            f"{card.name} is used by {names}{more}, which {'hold' if len(others) > 1 else 'holds'} {gib(used_bytes)} of it",
            "stop it first: what it takes is missing for the model, and its work slows every answer"
            + (f"; `v100ctl provision --adopt {name}` stops it" if any(known.values()) else ""),
            instance=name,
        )


def others_bytes(card: HostCard, ours: Collection[str], leaving: Collection[int] = ()) -> int:
    """Memory of the card that processes which are not ours hold, and go on holding."""
    return sum(
        process.memory_bytes or 0 for process in card.gpu.processes if process.unit not in ours and process.pid not in leaving
    )
