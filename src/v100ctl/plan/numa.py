"""Which processors and which memory an instance is bound to, on a host with several NUMA nodes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from v100ctl.facts import Facts, NumaNode
from v100ctl.fleet import InstanceSpec
from v100ctl.plan.cards import HostCard
from v100ctl.plan.types import Placement, Rule

#: The oldest systemd that knows `NUMAPolicy=`.
NUMA_SINCE = 243
#: More than any kernel is built for (``NR_CPUS``), and more than its list of them takes.
_MAX_PROCESSORS = 65536
_MAX_LIST_CHARACTERS = 1 << 16


def parse_cpus(text: str) -> frozenset[int]:
    """The numbers in the kernel's list form. What is no list holds none."""
    found: set[int] = set()
    for part in text[:_MAX_LIST_CHARACTERS].split(","):
        span = re.fullmatch(r"([0-9]{1,6})(?:-([0-9]{1,6})?)?", part.strip())
        if span is not None:
            # What no kernel numbers would only fill this side's memory.
            found |= set(range(int(span[1]), min(int(span[2] or span[1]), _MAX_PROCESSORS) + 1))
    return frozenset(found)


def format_cpus(numbers: Iterable[int]) -> str:
    """Numbers in the kernel's list form, as `/proc/PID/status` has them."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def usable_nodes(facts: Facts) -> dict[int, tuple[NumaNode, frozenset[int]]]:
    """The nodes on which services of this host can run and have memory, with the processors that they may use there."""
    cpus = parse_cpus(facts.cpu.usable_cpus)
    nodes = parse_cpus(facts.cpu.usable_nodes)
    found = {}
    for node in facts.cpu.numa_nodes:
        own = parse_cpus(node.cpus)
        own = own & cpus if cpus else own
        if own and node.memory_bytes and (not nodes or node.id in nodes):
            found[node.id] = (node, own)
    return found


def threads_of(placement: Placement, facts: Facts) -> int:
    """One thread a physical core of the nodes: hyper-threads slow an engine's own work on the processor down."""
    count = len(parse_cpus(placement.cpus))
    if facts.cpu.logical_count and facts.cpu.physical_count:
        count = count * facts.cpu.physical_count // facts.cpu.logical_count
    return max(count, 1)


def place(name: str, spec: InstanceSpec, chosen: Sequence[HostCard], facts: Facts) -> tuple[Placement | None, tuple[Rule, ...]]:
    """Where an instance shall run, and what there is to say about that. Nowhere in particular: ``None``.

    Without a word in the inventory it gets the node of its cards. Its memory is then preferred there and not bound: a model that
    is larger than the node must not be killed for it while the other node is empty.
    """
    if spec.numa == "off":
        return None, ()
    usable = usable_nodes(facts)
    if isinstance(spec.numa, int):
        return _asked(name, spec.numa, chosen, usable, facts)
    if len(usable) < 2 or not chosen or (facts.systemd and 0 < facts.systemd.version < NUMA_SINCE):
        return None, ()
    nodes = tuple(sorted({card.gpu.numa_node for card in chosen}))
    if any(node < 0 for node in nodes):
        rule = Rule(
            "numa-unknown",
            "info",
            f"the host has {len(usable)} NUMA nodes, and its firmware does not say at which one the card is: nothing is bound",
            "`numa: N` with the node that `nvidia-smi topo -m` shows",
            instance=name,
        )
        return None, (rule,)
    if any(node not in usable for node in nodes):
        gone = ", ".join(str(node) for node in nodes if node not in usable)
        rule = Rule(
            "numa-node-unusable",
            "info",
            f"the card is at NUMA node {gone}, whose processors or memory this host may not use: nothing is bound",
            "a container or a virtual machine with the processors beside the card",
            instance=name,
        )
        return None, (rule,)
    cpus = format_cpus(cpu for node in nodes for cpu in usable[node][1])
    if len(nodes) == 1:
        return Placement(nodes, cpus, "preferred"), ()
    rule = Rule(
        "numa-spans",
        "info",
        f"the cards are at NUMA nodes {', '.join(map(str, nodes))}: it runs on the processors of all of them, and its memory is "
        "spread over them",
        "cards of one node, where there are enough",
        instance=name,
    )
    return Placement(nodes, cpus, "interleave"), (rule,)


def _asked(
    name: str,
    wish: int,
    chosen: Sequence[HostCard],
    usable: dict[int, tuple[NumaNode, frozenset[int]]],
    facts: Facts,
) -> tuple[Placement | None, tuple[Rule, ...]]:
    if wish not in usable:
        there = ", ".join(map(str, sorted(usable))) or "none"
        rule = Rule(
            "numa-node-missing",
            "refuse",
            f"`numa: {wish}`: the host has no such NUMA node with processors and memory that services may use; it has {there}",
            "`numa: auto`" if not usable else f"`numa: {min(usable)}`, or `numa: auto`",
            instance=name,
        )
        return None, (rule,)
    rules = []
    far = sorted({card.gpu.numa_node for card in chosen if card.gpu.numa_node >= 0} - {wish})
    if far:
        rules.append(
            Rule(
                "numa-far",
                "warn",
                f"`numa: {wish}`: the card is at node {', '.join(map(str, far))}, so that everything it is sent crosses the "
                "processors' link",
                f"`numa: {far[0]}`, or `numa: auto`",
                instance=name,
            )
        )
    return Placement((wish,), format_cpus(usable[wish][1]), "bind"), tuple(rules)
