"""A computation graph as far as memory goes, the scheduler that spreads it over devices, and the allocator.

This follows ggml at b11434 step by step, because how large a compute buffer gets is decided by nothing else: `ggml/src/ggml.c`
(`ggml_visit_parents_graph`), `ggml/src/ggml-backend.cpp` (`ggml_backend_sched_split_graph`) and `ggml/src/ggml-alloc.c`
(`ggml_gallocr_alloc_graph_impl`, `ggml_dyn_tallocr_alloc`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from v100ctl.plan.vram.memory import ALIGNMENT, HOST, pad

#: Operations whose result may take the place of an operand (`ggml_op_can_inplace`).
_IN_PLACE = frozenset(
    {"fill", "scale", "add", "add_id", "sub", "mul", "div", "sqr", "unary", "rope", "rms_norm", "clamp", "soft_max"}
)
#: Operations that only look at memory (`ggml_is_view_op`).
_VIEW = frozenset({"view", "reshape", "permute", "transpose"})
#: Operations whose weights are too small to decide where they run.
_NOT_BY_WEIGHT = frozenset({"rope", "flash_attn"})

Shape = tuple[int, ...]


class Tensor:
    """One tensor: its operation and operands, shape, bytes, and whose memory it uses.

    ``root``: the tensor it views. ``strided``: not contiguous in its own shape, so nothing of that shape can take its place.
    ``outside``: weights and caches, which have buffers of their own on ``device``. ``extra``: bytes that its buffer has beyond
    the tensor on a card.
    """

    __slots__ = ("device", "extra", "input", "op", "output", "outside", "root", "shape", "size", "srcs", "strided", "type")

    def __init__(
        self,
        op: str,
        shape: Shape,
        srcs: tuple[Tensor, ...] = (),
        *,
        element_bytes: int = 4,
        root: Tensor | None = None,
        strided: bool = False,
        outside: bool = False,
        device: str | None = None,
        type: str = "f32",
    ) -> None:
        self.op = op
        self.shape = shape
        self.srcs = srcs
        self.size = math.prod(shape) * element_bytes
        self.root = root
        self.strided = strided
        self.outside = outside
        self.device = device
        self.input = False
        self.output = False
        self.extra = 0
        self.type = type

    def bytes_on(self, backend: str) -> int:
        """Bytes it takes in a buffer of a backend."""
        return self.size + (self.extra if backend == "cuda" else 0)

    def same_layout(self, other: Tensor) -> bool:
        """Whether one can stand in the other's memory element by element."""
        return self.shape == other.shape and self.size == other.size and not (self.strided or other.strided)


@dataclass(frozen=True)
class Mixture:
    """The parts of a mixture of experts that a card's backend computes as one and so keeps alive longer.

    ``probabilities`` to ``weights``: the routing (None where it is not computed as one). ``said``: what the experts say, before
    it is weighed. ``glu``, ``shared_glu``: the gated activations of the routed and of a shared expert of the same shape.
    """

    probabilities: Tensor | None
    weights: Tensor
    said: tuple[Tensor, ...]
    result: Tensor
    glu: Tensor
    shared_glu: Tensor | None = None


class Graph:
    """Nodes in the order in which they run."""

    def __init__(self) -> None:
        self.nodes: list[Tensor] = []
        self.leafs: list[Tensor] = []
        self.mixtures: list[Mixture] = []
        self._seen: set[int] = set()

    def expand(self, tensor: Tensor) -> Tensor:
        """Add a tensor after everything that it needs (operands from left to right)."""
        if id(tensor) in self._seen:
            return tensor
        self._seen.add(id(tensor))
        for source in tensor.srcs:
            self.expand(source)
        (self.nodes if tensor.op != "none" else self.leafs).append(tensor)
        return tensor


class _Space:
    """One buffer's addresses: free blocks by offset, the last one without an end."""

    def __init__(self, alignment: int) -> None:
        self.alignment = alignment
        self.blocks: list[list[float]] = [[0, math.inf]]
        self.highest = 0

    def take(self, size: int) -> int:
        """The best fitting hole, or else the end."""
        size = pad(size, self.alignment)
        best = -1
        smallest = math.inf
        for i, (_, room) in enumerate(self.blocks[:-1]):
            if size <= room <= smallest:
                best, smallest = i, room
        block = self.blocks[best]
        offset = int(block[0])
        block[0] += size
        block[1] -= size
        if block[1] == 0:
            del self.blocks[best]
        self.highest = max(self.highest, offset + size)
        return offset

    def give(self, offset: int, size: int) -> None:
        """Free a piece and join it with its neighbours."""
        size = pad(size, self.alignment)
        blocks = self.blocks
        i = 0
        while i < len(blocks) and blocks[i][0] < offset:
            i += 1
        blocks.insert(i, [offset, size])
        if i + 1 < len(blocks) and offset + size == blocks[i + 1][0]:
            blocks[i][1] += blocks[i + 1][1]
            del blocks[i + 1]
        if i and blocks[i - 1][0] + blocks[i - 1][1] == blocks[i][0]:
            blocks[i - 1][1] += blocks[i][1]
            del blocks[i]


class _Use:
    """What the allocator knows of a tensor."""

    __slots__ = ("allocated", "children", "device", "offset", "views")

    def __init__(self) -> None:
        self.children = 0
        self.views = 0
        self.allocated = False
        self.device = ""
        self.offset = 0


def assign(graph: Graph, devices: Sequence[str]) -> dict[int, str]:
    """The device of every node, by `id`. ``devices``: the cards in the engine's order; the host comes last."""
    where: dict[int, str] = {}
    for tensor in (*graph.leafs, *graph.nodes):
        root = tensor.root or tensor
        if root.outside and root.device is not None:
            where[id(tensor)] = root.device
        elif tensor.input:
            where[id(tensor)] = HOST
        elif tensor.device is not None and tensor.root is None:
            where[id(tensor)] = tensor.device
        elif tensor.op not in _NOT_BY_WEIGHT:
            weight = next(
                (source for source in tensor.srcs if source.outside and source.op == "none" and source.type != "cache"), None
            )
            if weight is not None and weight.device is not None:
                where[id(tensor)] = weight.device
    for cards_only in (True, False):
        for order in (graph.nodes, graph.nodes[::-1]):
            current: str | None = None
            for node in order:
                if node.op in _VIEW:
                    continue
                found = where.get(id(node))
                if found is not None:
                    current = None if cards_only and found == HOST else found
                elif current is not None:
                    where[id(node)] = current
    first = devices[0] if devices else HOST
    for node in graph.nodes:
        if id(node) not in where:
            where[id(node)] = where.get(id(node.root), first) if node.root else first
        for source in node.srcs:
            if id(source) not in where:
                where[id(source)] = where.get(id(source.root), where[id(node)]) if source.root else where[id(node)]
    return where


def buffer_sizes(graph: Graph, devices: Sequence[str], backend: str, *, copies: int = 1) -> dict[str, int]:
    """The bytes of each device's compute buffer for a graph.

    ``copies``: how many micro-batches are in flight (4 with several cards, which work as a pipeline).
    """
    where = assign(graph, devices)
    order, leafs = _with_copies(graph, where, copies, fuses=backend == "cuda")
    uses: dict[int, _Use] = {}

    def use(tensor: Tensor) -> _Use:
        found = uses.get(id(tensor))
        if found is None:
            found = uses[id(tensor)] = _Use()
        return found

    spaces = {name: _Space(ALIGNMENT[backend]) for name in devices}
    spaces[HOST] = _Space(ALIGNMENT["cpu"])
    kinds = dict.fromkeys(devices, backend)
    kinds[HOST] = "cpu"

    def allocate(tensor: Tensor, device: str) -> None:
        own = use(tensor)
        if tensor.outside or own.allocated or tensor.root is not None:
            return
        own.allocated = True
        if tensor.op in _IN_PLACE:
            for parent in tensor.srcs:
                other = use(parent)
                # A view never owns memory, so nothing takes the place of one.
                if (
                    other.allocated
                    and not parent.output
                    and tensor.same_layout(parent)
                    and other.children == 1
                    and other.views == 0
                ):
                    own.device, own.offset = other.device, other.offset
                    other.allocated = False
                    _release_rest(spaces, kinds, tensor, parent, own)
                    return
        own.device = device
        own.offset = spaces[device].take(tensor.bytes_on(kinds[device]))

    def release(tensor: Tensor) -> None:
        if tensor.output:
            return
        own = use(tensor)
        spaces[own.device].give(own.offset, tensor.bytes_on(kinds[own.device]))
        own.allocated = False

    for leaf in leafs:
        allocate(leaf, where[id(leaf)])
    for node in order:
        if node.root is not None and node.op != "none":
            use(node.root).views += 1
        if node.input:
            allocate(node, where[id(node)])
        for source in node.srcs:
            use(source).children += 1
            if source.input:
                allocate(source, where[id(node)])
    for node in order:
        for source in node.srcs:
            allocate(source, where[id(node)])
        allocate(node, where[id(node)])
        for source in node.srcs:
            other = use(source)
            other.children -= 1
            if other.children == 0 and other.views == 0:
                if source.root is not None:
                    owner = use(source.root)
                    owner.views -= 1
                    if owner.views == 0 and owner.children == 0 and owner.allocated:
                        release(source.root)
                elif other.allocated:
                    release(source)
    return {name: space.highest for name, space in spaces.items()}


def _release_rest(spaces: Mapping[str, _Space], kinds: Mapping[str, str], tensor: Tensor, parent: Tensor, own: _Use) -> None:
    """A smaller result in a larger operand's place gives the rest back."""
    kind = kinds[own.device]
    taken = pad(tensor.bytes_on(kind), ALIGNMENT[kind])
    held = pad(parent.bytes_on(kind), ALIGNMENT[kind])
    if held > taken:
        spaces[own.device].give(own.offset + taken, held - taken)


def _with_copies(graph: Graph, where: dict[int, str], copies: int, *, fuses: bool) -> tuple[list[Tensor], list[Tensor]]:
    """Nodes and leafs with the copies that carry operands from device to device, allocated where a device's part begins."""

    def twin(tensor: Tensor, device: str) -> Tensor:
        made = Tensor("none", tensor.shape)
        made.size = tensor.size
        # With several in flight, no copy may be overwritten before its micro-batch is done.
        made.input = made.output = copies > 1
        where[id(made)] = device
        return made

    order: list[Tensor] = []
    inputs: list[Tensor] = []
    carried: list[Tensor] = []
    if copies > 1:
        for leaf in graph.leafs:
            if leaf.input:
                leaf.output = True
                inputs += [leaf, *(twin(leaf, where[id(leaf)]) for _ in range(copies - 1))]
    made: dict[tuple[int, str], Tensor] = {}
    for device, nodes in _splits(graph.nodes, where):
        sources: list[Tensor] = []
        for node in nodes:
            if node.op in _VIEW:
                continue
            srcs = list(node.srcs)
            for position, source in enumerate(srcs):
                if where[id(source)] == device:
                    continue
                key = (id(source), device)
                if key not in made:
                    made[key] = twin(source, device)
                    if copies > 1:
                        carried += [made[key], *(twin(source, device) for _ in range(copies - 1))]
                    sources.append(source)
                srcs[position] = made[key]
            node.srcs = tuple(srcs)
        for source in sources:
            # Keeps the original until it is copied.
            dependency = Tensor("none", source.shape, (source,), root=source.root or source)
            where[id(dependency)] = where[id(source)]
            order += [dependency, made[id(source), device]]
        if fuses and device != HOST and graph.mixtures:
            nodes, kept = _fused(nodes, graph.mixtures)
            for node in nodes:
                order.append(node)
                if id(node) in kept:
                    keep = kept[id(node)]
                    dependency = Tensor("none", keep[0].shape, tuple(keep), root=keep[0].root or keep[0])
                    where[id(dependency)] = device
                    order.append(dependency)
        else:
            order += nodes
    return order, [*inputs, *carried, *graph.leafs]


def _fused(nodes: list[Tensor], mixtures: Sequence[Mixture]) -> tuple[list[Tensor], dict[int, list[Tensor]]]:
    """A card's nodes as its backend reorders them, and what each keeps alive (`ggml_backend_cuda_graph_optimize`)."""
    place = {id(node): i for i, node in enumerate(nodes)}
    kept: dict[int, list[Tensor]] = {}

    def keep(until: Tensor, *tensors: Tensor) -> None:
        found = kept.setdefault(id(until), [])
        found += [tensor for tensor in tensors if not any(tensor is other for other in found)]

    ours = [mixture for mixture in mixtures if id(mixture.result) in place]
    for mixture in ours:
        if mixture.shared_glu is not None and id(mixture.shared_glu) in place:
            routed, shared = place[id(mixture.glu)], place[id(mixture.shared_glu)]
            moved = nodes[shared - 2 : shared + 1]
            nodes = nodes[: routed + 1] + moved + nodes[routed + 1 : shared - 2] + nodes[shared + 1 :]
            place = {id(node): i for i, node in enumerate(nodes)}
            up = mixture.glu.srcs[1]
            keep(mixture.shared_glu, up.srcs[1], up.srcs[2])
    for mixture in ours:
        keep(mixture.result, *mixture.said, mixture.weights)
        if mixture.probabilities is not None:
            first, last = place[id(mixture.probabilities)], place[id(mixture.weights)]
            for node in nodes[first : last + 1]:
                keep(nodes[last + 1], node, *node.srcs)
    return nodes, kept


def _splits(nodes: Iterable[Tensor], where: Mapping[int, str]) -> Iterable[tuple[str, list[Tensor]]]:
    """Runs of nodes on one device; what only looks at memory goes with the run it stands in."""
    current: str | None = None
    run: list[Tensor] = []
    for node in nodes:
        device = where[id(node)]
        if node.op not in _VIEW and device != current:
            if current is not None:
                yield current, run
                run = []
            current = device
        run.append(node)
    if current is not None:
        yield current, run
