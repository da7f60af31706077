"""Rules about the state that cards are in: hot, worn out, poisoned, asleep, gone.

What the numbers of errors (XID) mean: NVIDIA's XID documentation. Page retirement (cards before Ampere: at most 64 pages; one
that waits goes with a reset, and after a double-bit error no new context is made until then): NVIDIA's documents on dynamic page
retirement and on memory error management.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from v100ctl.facts import Facts, Xid
from v100ctl.plan.cards import HostCard
from v100ctl.plan.types import Rule, Severity

#: Reasons for lower clocks that are no one's wish. A power cap and synchronised clocks are.
SLOWED: Mapping[str, str] = {
    "hw_thermal_slowdown": "heat, in hardware",
    "sw_thermal_slowdown": "heat",
    "hw_power_brake_slowdown": "the power brake of the board or the supply",
}
PAGES_AT_MOST = 64
DOUBLE_BIT_ERROR, _RETIREMENT_FAILED = 48, 64
_XID_WORDS: Mapping[int, str] = {
    13: "an exception in a program",
    31: "a memory fault of a program",
    43: "a program's channel stopped",
    45: "a program's channels were torn down",
    48: "a double-bit memory error",
    61: "the card's own processor warns",
    62: "the card's own processor halted",
    63: "a page of memory retired",
    64: "a page of memory could not be retired",
    69: "a wrong command of a program",
    74: "an NVLink error",
    79: "fallen off the bus",
    92: "many single-bit memory errors",
    119: "the card's own processor gave no answer",
}
#: Those that a program brings about by itself.
XIDS_OF_PROGRAMS = frozenset({13, 31, 43, 45, 69})
_RECOVER = "`v100ctl recover HOST`"


def state_rules(cards: Sequence[HostCard], chosen: Collection[str], facts: Facts, *, persistence: bool) -> Iterator[Rule]:
    """Rules about each card, and about what all of them share.

    Args:
        cards: All cards of the host.
        chosen: Keys of those that some instance uses; of the others only a line is said.
        facts: What the probe found.
        persistence: Whether the plan keeps cards awake.
    """
    yield from _gone_rules(cards, facts)
    if facts.uvm == "poisoned":
        yield Rule(
            "uvm-poisoned",
            "refuse",
            "`nvidia_uvm` fails each program that opens it: CUDA ends with `unknown error`, while `nvidia-smi` shows nothing",
            f"{_RECOVER}: it stops what uses the cards, loads the module anew, and starts all of it again",
        )
    for card in cards:
        if card.passed_through or card.gpu.revision_ff:
            continue
        warn: Severity = "warn" if card.key in chosen or not chosen else "info"
        xids = [xid for xid in facts.kernel_log.xids if xid.pci_address == card.gpu.pci_address]
        yield from _heat_rules(card, warn)
        yield from _memory_rules(card, xids, warn, is_chosen=card.key in chosen)
        yield from _xid_rules(card, xids, warn)
        if card.is_volta and card.gpu.persistence_mode == "disabled":
            yield Rule(
                "gpu-persistence-off",
                "info",
                f"{_place(card)} is not kept awake: it forgets what was set, and the first program waits for it",
                "`nvidia-persistenced`, which the plan enables" if persistence else "`gpu_tuning_persistence: true`",
                card=card.key,
            )


def _place(card: HostCard) -> str:
    return f"{card.name} at {card.gpu.pci_address}"


def _gone_rules(cards: Sequence[HostCard], facts: Facts) -> Iterator[Rule]:
    applied = (facts.host_json.document or {}).get("cards", [])
    recorded = [str(address) for address in applied] if isinstance(applied, list) else []
    missing = sorted(set(recorded) - {card.gpu.pci_address for card in cards})
    # A card that was added may move the addresses of others: then none is missing.
    if missing and len(cards) < len(recorded) and "gpus" not in facts.errors:
        yield Rule(
            "gpu-gone",
            "warn",
            f"the plan that was applied here had {len(recorded)} V100s, and the bus shows {len(cards)}: nothing is at "
            f"{', '.join(missing)}",
            "power the host off and on; if it stays away, look at its seat, its power cables and the riser",
        )


def _heat_rules(card: HostCard, severity: Severity) -> Iterator[Rule]:
    gpu = card.gpu
    reasons = [words for name, words in SLOWED.items() if name in (gpu.throttle_reasons or ())]
    if not reasons and "hw_slowdown" in (gpu.throttle_reasons or ()):
        reasons = ["the hardware, without a reason"]
    if not reasons:
        return
    figures = [
        f"{gpu.temperature_c} C" if gpu.temperature_c is not None else "",
        f"memory {gpu.memory_temperature_c} C" if gpu.memory_temperature_c is not None else "",
        f"{gpu.sm_clock_mhz} of {gpu.max_sm_clock_mhz} MHz" if gpu.sm_clock_mhz and gpu.max_sm_clock_mhz else "",
    ]
    shown = ", ".join(figure for figure in figures if figure)
    hot = any("heat" in reason for reason in reasons)
    yield Rule(
        "gpu-throttled",
        severity,
        f"{_place(card)} is slowed by {' and '.join(reasons)}{f' ({shown})' if shown else ''}: every answer takes longer",
        "air through the card, which has no fan of its own in a server; then a lower `gpu_tuning_power_limit_w`"
        if hot
        else "the power supply and the card's power cables",
        card=card.key,
    )


def _memory_rules(card: HostCard, xids: Sequence[Xid], severity: Severity, *, is_chosen: bool) -> Iterator[Rule]:
    gpu = card.gpu
    single, double = gpu.retired_pages_single_bit or 0, gpu.retired_pages_double_bit or 0
    so_far = f"{double} pages retired for double-bit errors and {single} for single-bit ones"
    if gpu.retired_pages_pending:
        broken = bool(gpu.ecc_uncorrected_volatile) or any(xid.code == DOUBLE_BIT_ERROR and xid.this_boot for xid in xids)
        what = "met a double-bit error: it takes no new program until" if broken else "has weak cells: at the next reset"
        yield Rule(
            "gpu-retirement-pending",
            "refuse" if broken and is_chosen else severity,
            f"the memory of {_place(card)} {what} a page is retired ({so_far})",
            f"{_RECOVER}: it stops what uses the cards, resets them, and starts all of it again",
            card=card.key,
        )
    failed = [xid for xid in xids if xid.code == _RETIREMENT_FAILED]
    if failed or single + double >= PAGES_AT_MOST:
        yield Rule(
            "gpu-memory-failing",
            severity,
            f"the memory of {_place(card)} is worn out: "
            + ("a page could not be retired (XID 64)" if failed else f"{single + double} of {PAGES_AT_MOST} pages are retired")
            + f", {so_far}",
            "another card; `nvidia-smi -q -d ECC,PAGE_RETIREMENT` is what a warranty asks for",
            card=card.key,
        )


def _xid_rules(card: HostCard, xids: Sequence[Xid], severity: Severity) -> Iterator[Rule]:
    if not xids:
        return
    said = ", ".join(
        f"{xid.code} ({_XID_WORDS.get(xid.code, xid.message[:60] or 'unknown')})"
        + (f" {xid.count} times" if xid.count > 1 else "")
        + ("" if xid.this_boot else " before the last boot")
        for xid in sorted(xids, key=lambda xid: xid.code)[:6]
    )
    serious = any(xid.code not in XIDS_OF_PROGRAMS for xid in xids)
    yield Rule(
        "gpu-xid",
        severity if serious else "info",
        f"{_place(card)} had errors in the last day, by XID: {said}",
        "if they come again: heat, power cables and the riser first, then another card"
        if serious
        else "the program that ran then: `dmesg` on the host has its pid",
        card=card.key,
    )
