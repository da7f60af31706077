"""Like hosts and like cards compared with each other: the odd one out is named."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from statistics import median

from v100ctl.examine import Examined
from v100ctl.findings import Finding, Layer

#: Fewer say nothing about what is usual.
_LEAST = 3
#: So large has the part of those to be that agree.
_MAJORITY = 2 / 3
#: One that is slower than this part of its like.
_SLOW = 0.7
_NAMED = 3
#: No host has more. One that claims more would outvote all others, and what it says is kept until all have answered.
_MAX_CARDS = 16
_MAX_CHARACTERS = 200

#: What hosts are compared by, and the layer of each.
_HOST_TRAITS: Mapping[str, Layer] = {
    "distribution": "package",
    "libc": "package",
    "kernel": "driver",
    "driver": "driver",
    "processor": "hardware",
    "processors": "hardware",
    "memory": "hardware",
    "governor": "hardware",
    "secure-boot": "hardware",
    "open-files": "process",
}
#: What cards are compared by, and the findings of the plan that speak of the same.
_CARD_TRAITS: Mapping[str, tuple[str, ...]] = {
    "power-limit": ("gpu.power-limit",),
    "clocks": ("gpu.application-clocks",),
    "clock-limit": (),
    "ecc": ("gpu.ecc",),
    "compute-mode": ("gpu.compute-mode",),
    "persistence": ("gpu.persistence",),
    "bar1": ("gpu.bar1-unassigned",),
    "lanes": ("gpu.link-degraded",),
    "memory": (),
}


@dataclass(frozen=True)
class CardTraits:
    """One card: its model, and what it is compared by."""

    key: str
    name: str
    values: Mapping[str, str]


@dataclass(frozen=True)
class Traits:
    """What a host is compared by. ``alike``: hosts with the same are of one kind. ``speeds``: tokens per second of what serves
    the same model with the same engine on the same cards.
    """

    alike: tuple[str, ...]
    values: Mapping[str, str]
    cards: tuple[CardTraits, ...] = ()
    speeds: Mapping[tuple[str, ...], tuple[str, float]] = field(default_factory=dict)
    told: frozenset[str] = frozenset()


def traits_of(state: Examined) -> Traits | None:
    """What is compared of one host; ``None`` where it was not asked. What is not known is left out."""
    facts, decided = state.facts, state.plan
    if facts is None or decided is None:
        return None
    cards = tuple(gpu for gpu in facts.gpus if gpu.uuid)[:_MAX_CARDS]
    names = tuple(sorted(gpu.name[:_MAX_CHARACTERS] for gpu in cards))
    engines = tuple(sorted(item.release_path for item in decided.instances))
    values = {
        "distribution": f"{facts.distribution.id} {facts.distribution.version_id}".strip(),
        "libc": facts.libc.version,
        "kernel": facts.kernel,
        "driver": facts.nvidia.module_version,
        "processor": facts.cpu.model,
        "processors": str(facts.cpu.usable_count or ""),
        "memory": f"{facts.memory.total_bytes / 1024**3:.0f} GiB" if facts.memory.total_bytes else "",
        "governor": ", ".join(facts.cpu.governors),
        "secure-boot": "" if facts.secure_boot is None else "on" if facts.secure_boot else "off",
        "open-files": str(facts.limits.nofile_hard or ""),
    }
    speeds = {}
    for item in decided.instances:
        baseline = facts.baselines.get(item.name)
        if baseline is not None and baseline.tokens_per_second and baseline.digest == item.digest:
            kind = (item.release_path, item.model_path, str(item.context_length), str(item.parallel), *names)
            speeds[kind] = (item.name, baseline.tokens_per_second)
    return Traits(
        alike=(facts.machine[:_MAX_CHARACTERS], *names, *engines),
        values={name: value[:_MAX_CHARACTERS] for name, value in values.items() if value},
        cards=tuple(
            CardTraits(
                gpu.uuid[:_MAX_CHARACTERS],
                gpu.name[:_MAX_CHARACTERS],
                {
                    name: value[:_MAX_CHARACTERS]
                    for name, value in {
                        "power-limit": f"{gpu.power_limit_w:g} W" if gpu.power_limit_w else "",
                        "clocks": f"{gpu.application_memory_clock_mhz},{gpu.application_graphics_clock_mhz} MHz"
                        if gpu.application_graphics_clock_mhz
                        else "",
                        "clock-limit": f"{gpu.max_sm_clock_mhz} MHz" if gpu.max_sm_clock_mhz else "",
                        "ecc": gpu.ecc_mode,
                        "compute-mode": gpu.compute_mode,
                        "persistence": gpu.persistence_mode,
                        "bar1": f"{gpu.bar1_bytes / 1024**2:.0f} MiB" if gpu.bar1_bytes is not None else "",
                        # An idle card lowers its rate, never its width.
                        "lanes": f"{gpu.link_width} lanes" if gpu.link_width else "",
                        "memory": f"{gpu.memory_total_bytes / 1024**2:.0f} MiB" if gpu.memory_total_bytes else "",
                    }.items()
                    if value
                },
            )
            for gpu in cards
        ),
        speeds=speeds,
        told=frozenset(finding.id for finding in state.findings if finding.layer == "hardware" and finding.id.startswith("gpu.")),
    )


def odd_ones_out(hosts: Mapping[str, Traits]) -> dict[str, list[Finding]]:
    """What tells a host, or one of its cards, from the others of its kind; by host. Where they do not agree, nobody is odd."""
    found: dict[str, list[Finding]] = {}
    for name, finding in (*_odd_hosts(hosts), *_odd_cards(hosts), *_slow(hosts)):
        found.setdefault(name, []).append(finding)
    return found


def _odd_hosts(hosts: Mapping[str, Traits]) -> Iterator[tuple[str, Finding]]:
    groups: dict[tuple[str, ...], list[str]] = {}
    for name, traits in hosts.items():
        groups.setdefault(traits.alike, []).append(name)
    for members in groups.values():
        for trait, layer in _HOST_TRAITS.items():
            values = {(name, ""): hosts[name].values[trait] for name in members if trait in hosts[name].values}
            for (name, key), usual, others in _odd(values):
                yield (
                    name,
                    _finding(
                        f"host.odd:{trait}",
                        layer,
                        "preflight",
                        f"{usual}, as {others}",
                        values[(name, key)],
                        "look why it differs",
                    ),
                )


def _odd_cards(hosts: Mapping[str, Traits]) -> Iterator[tuple[str, Finding]]:
    groups: dict[str, dict[tuple[str, str], CardTraits]] = {}
    for host, traits in hosts.items():
        for card in traits.cards:
            groups.setdefault(card.name, {})[(host, card.key)] = card
    for members in groups.values():
        for trait, same in _CARD_TRAITS.items():
            values = {key: card.values[trait] for key, card in members.items() if trait in card.values}
            for (host, key), usual, others in _odd(values, of_card=True):
                # What its own plan says of it needs no comparison.
                if any(f"{prefix}:{key}" in hosts[host].told for prefix in same):
                    continue
                actual = values[(host, key)]
                identifier = f"gpu.odd:{trait}:{key}"
                fix = "look why it differs; a role sets what the inventory asks for"
                yield host, _finding(identifier, "hardware", "gpu_tuning", f"{usual}, as {others}", actual, fix)


def _odd(values: Mapping[tuple[str, str], str], *, of_card: bool = False) -> Iterator[tuple[tuple[str, str], str, str]]:
    """By host and card (empty for a host): who differs from what nearly all are, what those are, and some of them by name."""
    if len(values) < _LEAST:
        return
    usual, count = Counter(values.values()).most_common(1)[0]
    if count < len(values) * _MAJORITY or count == len(values):
        return
    agree = [key for key, value in values.items() if value == usual]
    hosts = list(dict.fromkeys(host for host, _ in agree))
    named = ", ".join(hosts[:_NAMED]) + (f" and {len(hosts) - _NAMED} more" if len(hosts) > _NAMED else "")
    others = f"{count} cards of its kind on {named}" if of_card else f"on {named}"
    for key, value in values.items():
        if value != usual:
            yield key, usual, others


def _slow(hosts: Mapping[str, Traits]) -> Iterator[tuple[str, Finding]]:
    groups: dict[tuple[str, ...], list[tuple[str, str, float]]] = {}
    for host, traits in hosts.items():
        for kind, (instance, speed) in traits.speeds.items():
            groups.setdefault(kind, []).append((host, instance, speed))
    for members in groups.values():
        if len(members) < _LEAST:
            continue
        usual = median(speed for _, _, speed in members)
        for host, instance, speed in members:
            if speed < usual * _SLOW:
                yield (
                    host,
                    _finding(
                        f"service.slower:{instance}",
                        "service",
                        "llm_server",
                        f"about {usual:.1f} tokens/s, as {len(members) - 1} others of its kind",
                        f"{speed:.1f} tokens/s when it was proved",
                        "look at its card's heat, clocks and link, and at what else runs there",
                        instance=instance,
                    ),
                )


def _finding(
    identifier: str, layer: Layer, role: str, expected: str, actual: str, fix: str, *, instance: str | None = None
) -> Finding:
    return Finding(identifier, "external", layer, role, expected, actual, "warn", fix, instance)
