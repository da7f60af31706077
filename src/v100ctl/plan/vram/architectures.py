"""The computation graphs of the architectures, as far as memory goes.

Sources, all of llama.cpp b11434: `src/llama-graph.cpp` (the `build_*` functions), `src/models/*.cpp` (one file an architecture),
`src/models/delta-net-base.cpp`, `src/llama-kv-cache.cpp` (`cpy_k`, `get_k`, ...), `ggml/src/ggml-cuda/fattn.cu` (what flash
attention's result has room for beside itself).
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence

from v100ctl.plan.vram.graph import Graph, Mixture, Tensor
from v100ctl.plan.vram.memory import HOST, Sizes, sizes
from v100ctl.plan.vram.model import BLOCKS, Hyper, Model, UnknownArchitectureError
from v100ctl.plan.vram.pool import Product
from v100ctl.plan.vram.types import Launch

_F16_BYTES = 2


class Builder:
    """Builds the graph of one micro-batch.

    ``outputs``: tokens whose logits are computed. ``snapshots``: recurrent states kept to roll back to. ``layers``: which layers
    to build; a few of each kind are enough, since later ones reuse the same memory.
    """

    def __init__(
        self,
        model: Model,
        launch: Launch,
        devices: Sequence[str],
        *,
        outputs: int,
        snapshots: int = 0,
        layers: Sequence[int] | None = None,
    ) -> None:
        self.model = model
        self.hyper: Hyper = model.hyper
        self.launch = launch
        self.devices = devices
        self.snapshots = snapshots
        self.layers = tuple(range(self.hyper.n_layer)) if layers is None else tuple(layers)
        self.size: Sizes = sizes(self.hyper, launch)
        # Sequences of equal length fill the micro-batch (`graph_reserve`).
        self.tokens = -(-self.size.tokens // launch.parallel) * launch.parallel
        self.outputs = min(outputs, self.size.tokens)
        self.graph = Graph()
        self._weights = model.by_name
        self._made: dict[tuple[str, str], Tensor] = {}
        self._inputs: dict[str, Tensor] = {}
        #: Matrix products, for what their kernels take for themselves.
        self.products: list[Product] = []
        self._activation: Tensor | None = None

    # Elements

    def weight(self, name: str, device: str) -> Tensor | None:
        """A weight by name, or None where the file has none."""
        found = self._weights.get(name)
        if found is None:
            return None
        if (name, device) not in self._made:
            shape = (*found.shape, 1, 1, 1)[:4]
            self._made[name, device] = Tensor("none", shape, outside=True, device=device, type=found.type)
        return self._made[name, device]

    def layer_weight(self, layer: int, name: str) -> Tensor | None:
        """A weight of a layer, on that layer's device."""
        return self.weight(f"blk.{layer}.{name}", self.devices[layer])

    def input(self, name: str, *shape: int, element_bytes: int = 4) -> Tensor:
        """Something the host writes before the graph runs; one of each name."""
        if name not in self._inputs:
            tensor = Tensor("none", (*shape, 1, 1, 1)[:4], element_bytes=element_bytes)
            tensor.input = True
            self._inputs[name] = tensor
        return self._inputs[name]

    def op(self, name: str, shape: Sequence[int], *srcs: Tensor | None, element_bytes: int = 4) -> Tensor:
        """An operation with a result of its own."""
        return Tensor(name, (*shape, 1, 1, 1)[:4], tuple(src for src in srcs if src is not None), element_bytes=element_bytes)

    def same(self, name: str, tensor: Tensor, *others: Tensor | None) -> Tensor:
        """An operation element by element: a result of the first operand's shape."""
        return self.op(name, tensor.shape, tensor, *others)

    def view(self, tensor: Tensor, *shape: int, strided: bool = False, op: str = "view") -> Tensor:
        """Another look at a tensor's memory."""
        result = Tensor(op, (*shape, 1, 1, 1)[:4], (tensor,), root=tensor.root or tensor, strided=strided or tensor.strided)
        return result

    def reshape(self, tensor: Tensor, *shape: int) -> Tensor:
        """A contiguous view."""
        return self.view(tensor, *shape, op="reshape")

    def product(self, weight: Tensor | None, tensor: Tensor) -> Tensor:
        """A matrix product with a weight."""
        weight = self._needed(weight)
        shape = (weight.shape[1], *tensor.shape[1:])
        self.products.append(Product(weight.device or HOST, weight.type, weight.shape, tensor.shape))
        return self.op("mul_mat", shape, weight, tensor)

    def _needed(self, weight: Tensor | None) -> Tensor:
        if weight is None:
            raise UnknownArchitectureError(
                f"this `{self.hyper.architecture}` file lacks tensors that the architecture's graph is known to have",
                hint="the file may be damaged, or made for another engine",
            )
        return weight

    def norm(self, tensor: Tensor, weight: Tensor | None, bias: Tensor | None = None) -> Tensor:
        """A norm with its weight."""
        result = self.same("norm" if bias is not None else "rms_norm", tensor)
        if weight is not None:
            # Norms are pinned to their layer's device, or else the one before would take them.
            result.device = weight.device
            result = self.same("mul", result, weight)
        return self.same("add", result, bias) if bias is not None else result

    # The parts of a decoder

    def embeddings(self) -> Tensor:
        """The three ways a batch may come in; only the one by tokens is computed, but all are part of the graph."""
        hyper, n = self.hyper, self.tokens
        table = self.weight("token_embd.weight", HOST)
        by_token = self.op("get_rows", (hyper.n_embd, n), table, self.input("tokens", n))
        by_vector = self.input("embd", hyper.n_embd, n)
        mixed_tokens, slots = self.input("mixed_tokens", n), self.input("mixed_slots", n, element_bytes=8)
        copy = self.same("dup", self.input("mixed_embd", hyper.n_embd, n))
        rows = self.op("get_rows", (hyper.n_embd, n), table, mixed_tokens)
        for tensor in (by_token, by_vector, Tensor("set_rows", copy.shape, (rows, slots, copy), root=copy)):
            self.graph.expand(tensor)
        result = by_token
        if hyper.architecture in ("gemma3", "gemma4"):
            result = self.same("mul", result, self.input("scale_rows", 1, n))
        elif "embedding_scale" in self.flags:
            result = self.same("scale", result)
        self.graph.expand(result)
        return self.same("scale", result) if hyper.architecture in ("gemma", "gemma2") else result

    @property
    def flags(self) -> set[str]:
        """Keys of the metadata that change the graph, without the architecture's name."""
        prefix = self.hyper.architecture + "."
        return {key.removeprefix(prefix) for key in self.hyper.metadata if key.startswith(prefix)}

    def mask(self, layer: int) -> Tensor:
        """Who sees whom: a row for each token, f16 for flash attention."""
        windowed = self.hyper.windowed[layer]
        cells = self.size.window_cells if windowed else self.size.cells
        streams = self.size.streams
        width = _F16_BYTES if self.launch.flash_attention else 4
        return self.input(f"mask{windowed}", cells, self.tokens // streams, 1, streams, element_bytes=width)

    def _cache(self, layer: int, kind: str, elements: int, cells: int) -> Tensor:
        shape = (elements, cells, self.size.streams, 1)
        return Tensor("none", shape, outside=True, device=self.devices[layer], type="cache", element_bytes=0)

    def rotation(self, kind: str, head: int, *, window: bool, largest: bool) -> Tensor | None:
        """The Hadamard matrix that a quantised cache turns its rows with: 64 wide, for K as wide as divides the head."""
        if BLOCKS.get(kind, (1, 0))[0] == 1 or head % 64:
            return None
        n = 64
        while largest and head % (2 * n) == 0:
            n *= 2
        return self.input(f"rotation{largest}{window}", n, n)

    def rotate(self, tensor: Tensor, rotation: Tensor | None) -> Tensor:
        """A product with the Hadamard matrix, row piece by row piece."""
        if rotation is None:
            return tensor
        n = rotation.shape[0]
        count = math.prod(tensor.shape) // n
        flat = self.op("cont", (n, count), tensor) if tensor.strided else self.reshape(tensor, n, count)
        return self.reshape(self.op("mul_mat", (n, count), rotation, flat), *tensor.shape)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, sinks: Tensor | None = None, key_first: bool) -> Tensor:
        """Store K and V, attend, and return one row a token."""
        hyper, launch, size = self.hyper, self.launch, self.size
        windowed = hyper.windowed[layer]
        cells = size.window_cells if windowed else size.cells
        head_k, heads_kv = k.shape[0], k.shape[1]
        head_v = v.shape[0]
        k_turn = self.rotation(launch.kv_type_k, head_k, window=windowed, largest=True)
        v_turn = self.rotation(launch.kv_type_v, head_v, window=windowed, largest=False)
        q, k, v = self.rotate(q, k_turn), self.rotate(k, k_turn), self.rotate(v, v_turn)
        for tensor in (q, k, v) if key_first else (q, v, k):
            self.graph.expand(tensor)
        n = self.tokens
        k_cache = self._cache(layer, "k", head_k * heads_kv, cells)
        v_cache = self._cache(layer, "v", head_v * heads_kv, cells)
        k_rows = self.view(k, head_k * heads_kv, n)
        k_ids = self.input(f"k_ids{windowed}", n, element_bytes=8)
        self.graph.expand(Tensor("set_rows", k_cache.shape, (k_rows, k_ids, k_cache), root=k_cache, element_bytes=0))
        if launch.flash_attention:
            v_rows = self.view(v, head_v * heads_kv, n)
            v_ids = self.input(f"v_ids{windowed}", n, element_bytes=8)
        else:
            flat = self.op("cont", (head_v * heads_kv, n), v) if v.strided else self.reshape(v, head_v * heads_kv, n)
            v_rows = self.reshape(flat, 1, head_v * heads_kv * n)
            v_ids = self.input(f"v_ids{windowed}", n * max(map(hyper.values, range(hyper.n_layer_all))), element_bytes=8)
        self.graph.expand(Tensor("set_rows", v_cache.shape, (v_rows, v_ids, v_cache), root=v_cache, element_bytes=0))
        result = self._attention(layer, q, k_cache, v_cache, head_v, sinks=sinks)
        return self.rotate(result, v_turn)

    def _attention(
        self,
        layer: int,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        head_v: int,
        *,
        sinks: Tensor | None = None,
        lift: Tensor | None = None,
    ) -> Tensor:
        """`build_attn_mha`: the attention itself. ``lift``: brings latent values back to a head's width."""
        head, heads, n = q.shape[0], q.shape[1], self.tokens
        streams = self.size.streams
        each = n // streams
        cells = k_cache.shape[1]
        heads_kv = k_cache.shape[0] // head
        mask = self.mask(layer)
        q = self.view(
            self.view(q, head, heads, each, streams, strided=True), head, each, heads, streams, strided=True, op="permute"
        )
        k = self.view(
            self.view(k_cache, head, heads_kv, cells, streams, strided=True), head, cells, heads_kv, streams, op="permute"
        )
        v = self.view(
            self.view(v_cache, head_v, heads_kv, cells, streams, strided=True), head_v, cells, heads_kv, streams, op="permute"
        )
        if self.launch.flash_attention:
            result = self.op("flash_attn", (head_v, heads, each, streams), q, k, v, mask, sinks)
            result.extra = self._dequantised(head, head_v, cells, heads_kv, latent=lift is not None)
            if lift is not None:
                result = self.view(result, head_v, each, heads, streams, strided=True, op="permute")
                result = self._lift(lift, result)
                result = self.view(result, lift.shape[1], heads, each, streams, strided=True, op="permute")
                result = self.op("cont", (lift.shape[1], heads, each, streams), result)
            out = self.reshape(result, result.shape[0] * heads, n)
            return self.graph.expand(out)
        scores = self.op("mul_mat", (cells, each, heads, streams), k, q)
        device = self.devices[layer]
        self.products.append(Product(device, self.launch.kv_type_k, (head, cells, heads_kv, streams), q.shape, precise=True))
        if "attn_logit_softcapping" in self.flags:
            scores = self.same("scale", self.same("unary", self.same("scale", scores)))
        scores = self.same("soft_max", scores, mask, sinks)
        if lift is not None:
            # A latent cache keeps no transposed values.
            v = self.op(
                "cont",
                (cells, head_v, heads_kv, streams),
                self.view(v, cells, head_v, heads_kv, streams, op="transpose"),
                element_bytes=2,
            )
        result = self.op("mul_mat", (head_v, each, heads, streams), v, scores)
        self.products.append(Product(device, "f16", (cells, head_v, heads_kv, streams), scores.shape))
        if lift is not None:
            result = self._lift(lift, result)
        result = self.view(result, result.shape[0], heads, each, streams, strided=True, op="permute")
        return self.graph.expand(self.op("cont", (result.shape[0] * heads, n), result))

    def _lift(self, weight: Tensor, tensor: Tensor) -> Tensor:
        self.products.append(Product(weight.device or HOST, weight.type, weight.shape, tensor.shape))
        return self.op("mul_mat", (weight.shape[1], *tensor.shape[1:]), weight, tensor)

    def _dequantised(self, head_k: int, head_v: int, cells: int, heads_kv: int, *, latent: bool) -> int:
        """Bytes behind flash attention's result for K and V turned into f16, where the cache is of another type."""
        total = 0
        streams = self.size.streams
        if self.launch.kv_type_k != "f16":
            total += 128 + _F16_BYTES * head_k * cells * heads_kv * streams
        if self.launch.kv_type_v != "f16" and not latent:
            total += 128 + _F16_BYTES * head_v * cells * heads_kv * streams
        return total

    def feed_forward(self, layer: int, tensor: Tensor, suffix: str = "") -> Tensor:
        """Gated or plain, dense."""
        up = self.product(self.layer_weight(layer, f"ffn_up{suffix}.weight"), tensor)
        up = self._biased(up, layer, f"ffn_up{suffix}.bias")
        gate_weight = self.layer_weight(layer, f"ffn_gate{suffix}.weight")
        if gate_weight is not None:
            gate = self._biased(self.product(gate_weight, tensor), layer, f"ffn_gate{suffix}.bias")
            hidden = self.op("glu", up.shape, gate, up)
        elif up.shape[0] == 2 * self.hyper.ff[layer]:
            hidden = self.op("glu", (up.shape[0] // 2, *up.shape[1:]), up)
        else:
            hidden = self.same("unary", up)
        self._activation = hidden
        down = self.product(self.layer_weight(layer, f"ffn_down{suffix}.weight"), hidden)
        return self._biased(down, layer, f"ffn_down{suffix}.bias")

    def _biased(self, tensor: Tensor, layer: int, name: str) -> Tensor:
        bias = self.layer_weight(layer, name)
        return tensor if bias is None else self.same("add", tensor, bias)

    def experts(
        self, layer: int, tensor: Tensor, *, normalise: bool, weigh_late: bool = False, routed_by: Tensor | None = None
    ) -> Tensor:
        """Route each token to a few experts and add up what they say. ``routed_by``: what decides, where it is not the input."""
        hyper = self.hyper
        n_embd, n = tensor.shape[0], tensor.shape[1]
        used, count = hyper.n_expert_used, hyper.n_expert
        logits = self.product(self.layer_weight(layer, "ffn_gate_inp.weight"), tensor if routed_by is None else routed_by)
        logits = self._biased(logits, layer, "ffn_gate_inp.bias")
        gating = int(hyper.metadata.get(f"{hyper.architecture}.expert_gating_func", 0))
        probabilities = logits if weigh_late else self.same("unary" if gating == 2 else "soft_max", logits)
        bias = self.layer_weight(layer, "exp_probs_b.bias")
        selection = probabilities if bias is None else self.same("add", probabilities, bias)
        ids = self.view(self.op("argsort", selection.shape, selection), used, n, strided=True)
        weights = self.op("get_rows", (1, used, n), self.reshape(probabilities, 1, count, n), ids)
        if weigh_late:
            weights = self.reshape(self.same("soft_max", self.reshape(weights, used, n)), 1, used, n)
        if normalise:
            weights = self.reshape(weights, used, n)
            total = self.same("clamp", self.op("sum_rows", (1, n), weights))
            weights = self.reshape(self.same("div", weights, total), 1, used, n)
        scale = float(hyper.metadata.get(f"{hyper.architecture}.expert_weights_scale", 0.0))
        if scale not in (0.0, 1.0):
            weights = self.same("scale", weights)
        self.graph.expand(weights)
        rows = self.reshape(tensor, n_embd, 1, n)
        fused = self.layer_weight(layer, "ffn_gate_up_exps.weight")
        if fused is not None:
            both = self._scaled_by_expert(self._by_expert(fused, rows, ids), layer, "ffn_up_exps.scale", ids)
            half = both.shape[0] // 2
            gate = self.view(both, half, used, n, strided=True)
            up = self.view(both, half, used, n, strided=True)
            hidden = self.op("glu", (half, used, n), gate, up)
        else:
            up = self._by_expert(self.layer_weight(layer, "ffn_up_exps.weight"), rows, ids)
            up = self._biased_by_expert(up, layer, "ffn_up_exps.bias", ids)
            gate_weight = self.layer_weight(layer, "ffn_gate_exps.weight")
            if gate_weight is not None:
                gate = self._biased_by_expert(self._by_expert(gate_weight, rows, ids), layer, "ffn_gate_exps.bias", ids)
                hidden = self.op("glu", up.shape, gate, up)
            else:
                hidden = self.same("unary", up)
        said = self._by_expert(self.layer_weight(layer, "ffn_down_exps.weight"), hidden, ids)
        raw = said
        said = self._scaled_by_expert(said, layer, "ffn_down_exps.scale", ids)
        scales = said.srcs[1] if said is not raw else None
        said = self._biased_by_expert(said, layer, "ffn_down_exps.bias", ids)
        weighed = self.graph.expand(self.same("mul", said, weights))
        views = [self.graph.expand(self.view(weighed, n_embd, n, strided=True)) for _ in range(used)]
        result = views[0]
        for piece in views[1:]:
            result = self.graph.expand(self.op("add", (n_embd, n), result, piece))
        if used == 1:
            return self.op("cont", (n_embd, n), result)
        fused_routing = not weigh_late and ((count.bit_count() == 1 and count <= 512) or count in (288, 576))
        kept = (said,) if scales is None else (raw, scales)
        self.graph.mixtures.append(Mixture(probabilities if fused_routing else None, weights, kept, result, hidden))
        return result

    def _by_expert(self, weight: Tensor | None, tensor: Tensor, ids: Tensor) -> Tensor:
        weight = self._needed(weight)
        self.products.append(Product(weight.device or HOST, weight.type, weight.shape, tensor.shape, experts=ids.shape[0]))
        return self.op("mul_mat_id", (weight.shape[1], ids.shape[0], ids.shape[1]), weight, tensor, ids)

    def _scaled_by_expert(self, tensor: Tensor, layer: int, name: str, ids: Tensor) -> Tensor:
        scale = self.layer_weight(layer, name)
        if scale is None:
            return tensor
        count, n = scale.shape[0], ids.shape[1]
        repeated = self.op("repeat", (1, count, n), self.reshape(scale, 1, count, 1))
        return self.same("mul", tensor, self.op("get_rows", (1, ids.shape[0], n), repeated, ids))

    def _biased_by_expert(self, tensor: Tensor, layer: int, name: str, ids: Tensor) -> Tensor:
        bias = self.layer_weight(layer, name)
        return tensor if bias is None else self.op("add_id", tensor.shape, tensor, bias, ids)

    # Layers

    def heads(self, layer: int, tensor: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Q, K and V of a layer, with what the file has of biases and norms, and turned by position."""
        hyper, n = self.hyper, self.tokens
        windowed = hyper.windowed[layer]
        head_k = hyper.head_k_window if windowed else hyper.head_k
        head_v = hyper.head_v_window if windowed else hyper.head_v
        shapes = ((head_k, hyper.heads[layer]), (head_k, hyper.kv_heads[layer]), (head_v, hyper.kv_heads[layer]))
        together = self.layer_weight(layer, "attn_qkv.weight")
        if together is not None:
            one = self._biased(self.product(together, tensor), layer, "attn_qkv.bias")
            q, k, v = (self.view(one, *shape, n, strided=True) for shape in shapes)
        else:
            flats: list[Tensor] = []
            for letter in "qkv":
                weight = self.layer_weight(layer, f"attn_{letter}.weight")
                if weight is None and letter == "v" and hyper.architecture == "gemma4":
                    flats.append(flats[1])
                else:
                    flats.append(self._biased(self.product(weight, tensor), layer, f"attn_{letter}.bias"))
            q, k, v = (self.reshape(flat, *shape, n) for flat, shape in zip(flats, shapes, strict=True))
        place = self.input("positions", n)
        q_norm, k_norm = self.layer_weight(layer, "attn_q_norm.weight"), self.layer_weight(layer, "attn_k_norm.weight")
        q = self.norm(q, q_norm) if q_norm is not None else q
        q = self.same("rope", q, place)
        k = self.norm(k, k_norm) if k_norm is not None else k
        if hyper.architecture == "gemma4":
            v = self.same("rms_norm", v)
        k = self.same("rope", k, place)
        return q, k, v

    def attention(self, layer: int, tensor: Tensor) -> Tensor:
        """Self-attention with its output projection."""
        if self.hyper.latent:
            return self.latent_attention(layer, tensor)
        q, k, v = self.heads(layer, tensor)
        if self.hyper.architecture in ("gemma", "gemma2", "gemma3"):
            q = self.same("scale", q)
        sinks = self.layer_weight(layer, "attn_sinks.weight")
        result = self.attend(layer, q, k, v, sinks=sinks, key_first=bool(self.hyper.window))
        result = self.product(self.layer_weight(layer, "attn_output.weight"), result)
        return self._biased(result, layer, "attn_output.bias")

    def latent_attention(self, layer: int, tensor: Tensor) -> Tensor:
        """Multi-head latent attention with the K projection absorbed into Q (deepseek2)."""
        hyper, n = self.hyper, self.tokens
        prefix = f"{hyper.architecture}."
        rank = int(hyper.metadata[prefix + "attention.kv_lora_rank"])
        width = int(hyper.metadata[prefix + "attention.key_length_mla"])
        rope = hyper.head_k - rank
        heads = hyper.heads[layer]
        low = self.layer_weight(layer, "attn_q_a.weight")
        if low is not None:
            q = self.norm(self.product(low, tensor), self.layer_weight(layer, "attn_q_a_norm.weight"))
            q = self.product(self.layer_weight(layer, "attn_q_b.weight"), q)
        else:
            q = self.product(self.layer_weight(layer, "attn_q.weight"), tensor)
        q = self.reshape(q, width, heads, n)
        compressed = self.product(self.layer_weight(layer, "attn_kv_a_mqa.weight"), tensor)
        place = self.input("positions", n)
        k_turned = self.op("rope", (rope, 1, n), self.view(compressed, rope, 1, n, strided=True), place)
        latent = self.norm(self.view(compressed, rank, n, strided=True), self.layer_weight(layer, "attn_kv_a_norm.weight"))
        q_turned = self.op("rope", (rope, heads, n), self.view(q, rope, heads, n, strided=True), place)
        plain = self.view(self.view(q, width - rope, heads, n, strided=True), width - rope, n, heads, op="permute")
        absorbed = self.product(self.layer_weight(layer, "attn_k_b.weight"), plain)
        absorbed = self.view(absorbed, rank, heads, n, strided=True, op="permute")
        q = self.op("concat", (rank + rope, heads, n), absorbed, q_turned)
        latent = self.reshape(latent, rank, 1, n)
        k = self.op("concat", (rank + rope, 1, n), latent, k_turned)
        for made in (q, latent, k):
            self.graph.expand(made)
        cache = self._cache(layer, "k", rank + rope, self.size.cells)
        rows = self.view(k, rank + rope, n)
        ids = self.input("k_idsFalse", n, element_bytes=8)
        self.graph.expand(Tensor("set_rows", cache.shape, (rows, ids, cache), root=cache, element_bytes=0))
        lift = self.layer_weight(layer, "attn_v_b.weight")
        result = self._attention(layer, q, cache, cache, rank, lift=lift)
        return self.product(self.layer_weight(layer, "attn_output.weight"), result)

    def gated_attention(self, layer: int, tensor: Tensor) -> Tensor:
        """Attention whose Q projection also makes a gate for its result (qwen3next, qwen35)."""
        hyper, n = self.hyper, self.tokens
        head, heads, heads_kv = hyper.head_v, hyper.heads[layer], hyper.kv_heads[layer]
        both = self.product(self.layer_weight(layer, "attn_q.weight"), tensor)
        k = self.product(self.layer_weight(layer, "attn_k.weight"), tensor)
        v = self.product(self.layer_weight(layer, "attn_v.weight"), tensor)
        q = self.norm(self.view(both, head, heads, n, strided=True), self.layer_weight(layer, "attn_q_norm.weight"))
        k = self.norm(self.reshape(k, head, heads_kv, n), self.layer_weight(layer, "attn_k_norm.weight"))
        gate = self.op("cont", (head * heads, n), self.view(both, head, heads, n, strided=True))
        v = self.reshape(v, head, heads_kv, n)
        place = self.input("positions", 4 * n)
        result = self.attend(layer, self.same("rope", q, place), self.same("rope", k, place), v, key_first=False)
        result = self.same("mul", result, self.same("unary", gate))
        return self.product(self.layer_weight(layer, "attn_output.weight"), result)

    def delta_net(self, layer: int, tensor: Tensor) -> Tensor:
        """A gated delta net: a convolution over time, then the recurrent state (qwen3next, qwen35)."""
        hyper, n = self.hyper, self.tokens
        sequences = self.launch.parallel
        each = n // sequences
        value_heads = int(hyper.metadata[f"{hyper.architecture}.ssm.time_step_rank"])
        state, groups = hyper.state, hyper.groups
        head_v = hyper.inner // value_heads
        mixed = self.reshape(
            self.product(self.layer_weight(layer, "attn_qkv.weight"), tensor), 2 * groups * state + hyper.inner, each, sequences
        )
        z = self.product(self.layer_weight(layer, "attn_gate.weight"), tensor)
        joint = self.layer_weight(layer, "ssm_ba.weight")
        if joint is not None:
            made = self.reshape(self.product(joint, tensor), 2 * value_heads // groups, groups, each, sequences)
            half = (value_heads // groups, groups, each, sequences)
            beta = self.same("unary", self.op("cont", half, self.view(made, *half, strided=True)))
            alpha = self.op("cont", (value_heads, each, sequences), self.view(made, *half, strided=True))
        else:
            beta = self.reshape(
                self.product(self.layer_weight(layer, "ssm_beta.weight"), tensor), 1, value_heads, each, sequences
            )
            beta = self.same("unary", beta)
            alpha = self.product(self.layer_weight(layer, "ssm_alpha.weight"), tensor)
            alpha = self.reshape(alpha, value_heads, each, sequences)
        alpha = self.same("add", alpha, self.layer_weight(layer, "ssm_dt.bias"))
        gate = self.same("mul", self.same("unary", alpha), self.layer_weight(layer, "ssm_a"))
        if joint is not None:
            beta = self.reshape(beta, 1, value_heads, each, sequences)
        gate = self.reshape(gate, 1, value_heads, each, sequences)
        channels = hyper.inner + 2 * groups * state
        past = hyper.conv_kernel - 1
        remembered = self._state(layer, "r", hyper.conv_state)
        mixed = self.view(mixed, each, channels, sequences, strided=True, op="transpose")
        joined = self.op("concat", (past + each, channels, sequences), self.reshape(remembered, past, channels, sequences), mixed)
        for _ in range(1 + self.snapshots):
            kept = self.view(joined, past, channels, sequences, strided=True)
            self.graph.expand(self._store(layer, "r", kept))
        before = self.reshape(self._state(layer, "s", hyper.recurrent_state), head_v, head_v, value_heads, sequences)
        out = self.op("ssm_conv", (channels, each, sequences), joined, self.layer_weight(layer, "ssm_conv1d.weight"))
        out = self.same("unary", out)
        q = self.view(out, state, groups, each, sequences, strided=True)
        k = self.view(out, state, groups, each, sequences, strided=True)
        v = self.view(out, head_v, value_heads, each, sequences, strided=True)
        q = self.same("scale", self.same("rms_norm", q))
        k = self.same("scale", self.same("rms_norm", k))
        if hyper.architecture == "qwen3next" and groups != value_heads:
            q, k = (self._repeat_heads(tensor, value_heads // groups) for tensor in (q, k))
        rows = each * sequences + head_v * sequences * (1 + self.snapshots)
        result = self.op("gated_delta_net", (head_v * value_heads, rows), q, k, v, gate, beta, before)
        said = self.view(result, head_v, value_heads, each, sequences, strided=True)
        new = self.view(result, head_v * head_v * value_heads, sequences, 1 + self.snapshots, strided=True)
        self.graph.expand(self._store(layer, "s", new))
        said = self.norm(said, self.layer_weight(layer, "ssm_norm.weight"))
        said = self.same("mul", said, self.same("unary", self.reshape(z, head_v, value_heads, each, sequences)))
        final = self.reshape(said, head_v * value_heads, each, sequences)
        result = self.product(self.layer_weight(layer, "ssm_out.weight"), final)
        return self.reshape(result, hyper.n_embd, n)

    def _repeat_heads(self, tensor: Tensor, times: int) -> Tensor:
        head, heads, each, sequences = tensor.shape
        single = self.reshape(tensor, head, 1, heads, each * sequences)
        return self.reshape(
            self.op("repeat", (head, times, heads, each * sequences), single), head, times * heads, each, sequences
        )

    def _state(self, layer: int, name: str, elements: int) -> Tensor:
        """`build_rs`: the sequences' states, gathered from the cache."""
        sequences = self.launch.parallel
        cache = self._states(layer, name, elements)
        states = self.reshape(cache, elements, cache.shape[1])
        zero = self.view(states, elements)
        self.graph.expand(Tensor("scale", zero.shape, (zero,), root=cache, element_bytes=0))
        copy = self.input("state_copy", sequences)
        gathered = self.op("get_rows", (elements, sequences), states, copy)
        output = self.graph.expand(self.view(gathered, elements, sequences))
        rest = self.view(gathered, 0, 0)
        self.graph.expand(Tensor("cpy", (0, 0, 1, 1), (rest, self.view(cache, 0, 0)), root=cache))
        return output

    def _states(self, layer: int, name: str, elements: int) -> Tensor:
        key = (f"state {name} {layer}", self.devices[layer])
        if key not in self._made:
            rows = self.launch.parallel * (1 + self.snapshots)
            self._made[key] = Tensor("none", (elements, rows, 1, 1), outside=True, device=self.devices[layer], type="cache")
        return self._made[key]

    def _store(self, layer: int, name: str, tensor: Tensor) -> Tensor:
        elements = self.hyper.conv_state if name == "r" else self.hyper.recurrent_state
        cache = self._states(layer, name, elements)
        return Tensor("cpy", tensor.shape, (tensor, self.view(cache, elements)), root=cache)

    # Whole graphs

    def build(self) -> Graph:
        """The graph of a micro-batch that asks for the logits of ``outputs`` tokens."""
        hyper = self.hyper
        state = self.embeddings()
        hybrid = any(hyper.recurrent)
        # These keep every token's last hidden state, as a seed for prediction layers.
        after_norm = hybrid or hyper.architecture == "gemma4"
        whole = after_norm or hyper.architecture == "gpt-oss"
        last = self.layers[-1]
        wanted = self.input("out_ids", self.outputs)
        for layer in self.layers:
            state = self._layer(layer, state, None if whole or layer != last else wanted)
        if hyper.architecture == "gpt-oss":
            state.output = True
            state = self.op("get_rows", (hyper.n_embd, self.outputs), state, wanted)
        state = self.norm(
            state, self.weight("output_norm.weight", self.devices[-1]), self.weight("output_norm.bias", self.devices[-1])
        )
        state.output = True
        if after_norm:
            state = self.op("get_rows", (hyper.n_embd, self.outputs), state, wanted)
            state.output = True
        return self._logits(state)

    def _logits(self, state: Tensor) -> Graph:
        name = "token_embd.weight" if self.model.tied else "output.weight"
        logits = self.product(self.weight(name, self.devices[-1]), state)
        if "final_logit_softcapping" in self.flags:
            logits = self.same("scale", self.same("unary", self.same("scale", logits)))
        logits.output = True
        self.graph.expand(logits)
        return self.graph

    def _layer(self, layer: int, state: Tensor, wanted: Tensor | None) -> Tensor:
        hyper = self.hyper
        residual = state
        name = "attn_norm.weight"
        tensor = self.norm(state, self.layer_weight(layer, name), self.layer_weight(layer, "attn_norm.bias"))
        if any(hyper.recurrent):
            self.graph.expand(tensor)
            tensor = self.delta_net(layer, tensor) if hyper.recurrent[layer] else self.gated_attention(layer, tensor)
        else:
            tensor = self.attention(layer, tensor)
        if wanted is not None:
            tensor = self.op("get_rows", (hyper.n_embd, self.outputs), tensor, wanted)
            residual = self.op("get_rows", (hyper.n_embd, self.outputs), residual, wanted)
        before, after = (self.layer_weight(layer, name) for name in ("ffn_norm.weight", "post_attention_norm.weight"))
        if before is not None and after is not None:
            # Norms on both sides of each part.
            tensor = self.norm(tensor, after)
        middle = self.same("add", tensor, residual)
        if hyper.architecture == "gemma4" and self.layer_weight(layer, "ffn_gate_inp.weight") is not None:
            tensor = self._mix_gemma4(layer, middle)
        else:
            tensor = self.norm(middle, before if before is not None else after, self.layer_weight(layer, "ffn_norm.bias"))
            tensor = self.mix(layer, tensor)
        last = self.layer_weight(layer, "post_ffw_norm.weight")
        if last is not None:
            tensor = self.norm(tensor, last)
        result = self.same("add", tensor, middle)
        scale = self.layer_weight(layer, "layer_output_scale.weight")
        return result if scale is None else self.same("mul", result, scale)

    def _mix_gemma4(self, layer: int, tensor: Tensor) -> Tensor:
        """Dense and experts side by side, each between norms of its own; the router sees the input before the norm."""
        dense = self.feed_forward(layer, self.norm(tensor, self.layer_weight(layer, "ffn_norm.weight")))
        dense = self.norm(dense, self.layer_weight(layer, "post_ffw_norm_1.weight"))
        into = self.norm(tensor, self.layer_weight(layer, "pre_ffw_norm_2.weight"))
        router = self.same("scale", self.same("rms_norm", tensor))
        router = self.same("mul", router, self.layer_weight(layer, "ffn_gate_inp.scale"))
        said = self.experts(layer, into, normalise=True, routed_by=router)
        return self.same("add", dense, self.norm(said, self.layer_weight(layer, "post_ffw_norm_2.weight")))

    def mix(self, layer: int, tensor: Tensor) -> Tensor:
        """The feed-forward part: dense, or experts with what else the file has beside them."""
        if self.layer_weight(layer, "ffn_gate_inp.weight") is None:
            return self.feed_forward(layer, tensor)
        hyper = self.hyper
        late = hyper.architecture == "gpt-oss"
        normalise = not late and bool(hyper.metadata.get(f"{hyper.architecture}.expert_weights_norm", _normalises(hyper)))
        result = self.experts(layer, tensor, normalise=normalise, weigh_late=late)
        if self.layer_weight(layer, "ffn_up_shexp.weight") is not None:
            shared = self.feed_forward(layer, tensor, "_shexp")
            self._pair_experts(layer)
            gate = self.layer_weight(layer, "ffn_gate_inp_shexp.weight")
            if gate is not None:
                self.products.append(Product(gate.device or HOST, gate.type, gate.shape, tensor.shape))
                shared = self.same("mul", shared, self.same("unary", self.op("mul_mat", (1, tensor.shape[1]), gate, tensor)))
            result = self.same("add", result, shared)
        return result

    def _pair_experts(self, layer: int) -> None:
        """A shared expert of the routed ones' shape and type is computed together with them."""
        routed, shared = (self.layer_weight(layer, f"ffn_up{suffix}.weight") for suffix in ("_exps", "_shexp"))
        plain = BLOCKS.get(shared.type, (1, 0))[0] == 1 if shared is not None else True
        if routed is None or shared is None or plain or routed.type != shared.type or routed.shape[:2] != shared.shape[:2]:
            return
        made, mixture = self._activation, self.graph.mixtures[-1]
        if made is not None and mixture.glu.op == made.op == "glu":
            self.graph.mixtures[-1] = dataclasses.replace(mixture, shared_glu=made)

    def build_prediction(self) -> Graph:
        """The graph of a prediction layer that drafts (MTP): embedding and hidden state joined, one attention layer, logits."""
        hyper, n = self.hyper, self.tokens
        layer = hyper.n_layer
        table = self.layer_weight(layer, "nextn.embed_tokens.weight") or self.weight("token_embd.weight", HOST)
        token = self.op("get_rows", (hyper.n_embd, n), table, self.input("tokens", n))
        hidden = self.input("hidden", hyper.n_embd, n)
        wanted = self.input("out_ids", self.outputs)
        hidden = self.norm(hidden, self.layer_weight(layer, "nextn.hnorm.weight"))
        token = self.norm(token, self.layer_weight(layer, "nextn.enorm.weight"))
        joined = self.op("concat", (2 * hyper.n_embd, n), token, hidden)
        state = self.product(self.layer_weight(layer, "nextn.eh_proj.weight"), joined)
        gated = any(hyper.recurrent)
        tensor = self.norm(state, self.layer_weight(layer, "attn_norm.weight"))
        tensor = self.gated_attention(layer, tensor) if gated else self.attention(layer, tensor)
        middle = self.same("add", tensor, state)
        second = "post_attention_norm.weight" if gated else "ffn_norm.weight"
        tensor = self.mix(layer, self.norm(middle, self.layer_weight(layer, second)))
        state = self.same("add", tensor, middle)
        head_norm = self.layer_weight(layer, "nextn.shared_head_norm.weight") or self.weight(
            "output_norm.weight", self.devices[-1]
        )
        state = self.norm(state, head_norm)
        state.output = True
        state = self.op("get_rows", (hyper.n_embd, self.outputs), state, wanted)
        head = self.layer_weight(layer, "nextn.shared_head_head.weight")
        if head is None:
            return self._logits(state)
        logits = self.product(head, state)
        logits.output = True
        self.graph.expand(logits)
        return self.graph


def _normalises(hyper: Hyper) -> bool:
    """Whether expert weights are normalised where no key says so: a constant in each architecture's source."""
    return hyper.architecture not in ("deepseek", "deepseek2", "qwen2moe", "olmoe")


def kinds(model: Model, devices: Sequence[str]) -> tuple[int, ...]:
    """A few layers that stand for all: on each device its first ones until every kind came twice, and the last of all.

    Each layer frees what it takes, so a second one of its kind finds the same holes as every later one.
    """
    hyper = model.hyper

    def kind(layer: int) -> tuple[object, ...]:
        routed = f"blk.{layer}.ffn_gate_inp.weight" in model.by_name
        shape = (hyper.heads[layer], hyper.kv_heads[layer], hyper.ff[layer])
        return devices[layer], hyper.recurrent[layer], hyper.windowed[layer], routed, *shape

    left = {name: min(2, count) for name, count in Counter(map(kind, range(hyper.n_layer))).items()}
    chosen = []
    for layer in range(hyper.n_layer):
        if layer == hyper.n_layer - 1 or any(count > 0 for name, count in left.items() if name[0] == devices[layer]):
            chosen.append(layer)
        left[kind(layer)] -= 1
    return tuple(chosen)
