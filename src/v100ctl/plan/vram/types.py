"""What goes into an estimate and what comes out. Plain frozen data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from v100ctl.models.types import ModelHeader
from v100ctl.plan.types import GpuBudget

#: What a V100's CUDA context takes. Before a model is loaded 309 MiB: 32501 MiB of which 32192 are free on a V100-SXM2-32GB
#: (ollama/ollama#16533), 15841 free on a V100-PCIE-16GB (the engine's own test logs, builds 3984 to 4892). On another card the
#: same server took 78 MiB more from there to the end of its first prompt, for kernels and their bookkeeping
#: (docs/measurements/vram.md); rounded up.
V100_CONTEXT_BYTES = 400 << 20
#: What cuBLAS took at its first use, measured on another card (docs/measurements/vram.md).
CUBLAS_BYTES = 96 << 20


@dataclass(frozen=True)
class Card:
    """A card as the estimate sees it.

    ``context_bytes``: what the CUDA context and the loaded kernels take beside the engine's own buffers; ``library_bytes``: what
    cuBLAS takes where something needs it (attention scores without flash attention, routing to experts, weights that are not
    quantised). Both depend on the card's generation, the driver and the toolkit. ``compute_capability`` and
    ``multiprocessors`` decide which kernels run and so what they need for themselves.
    """

    uuid: str
    total_bytes: int
    reserve_bytes: int
    context_bytes: int
    bandwidth_bytes_per_s: float
    library_bytes: int = CUBLAS_BYTES
    compute_capability: str = "7.0"
    multiprocessors: int = 80


@dataclass(frozen=True)
class Speculative:
    """How the engine drafts. ``draft`` is a separate draft model's header; ``mtp`` uses the model's own prediction layers."""

    kind: Literal["mtp", "draft", "ngram"]
    depth: int = 3
    draft: ModelHeader | None = None
    kv_type_k: str = "f16"
    kv_type_v: str = "f16"


@dataclass(frozen=True)
class Launch:
    """What the engine is started with, in its own terms.

    ``context_size`` is `--ctx-size`: the total over the slots (0: what the model was trained with). ``gpu_layers`` None: all.
    ``force_mmq``: whether the engine was built with GGML_CUDA_FORCE_MMQ; without it, prompts turn weights into f16 on a V100.
    """

    context_size: int
    parallel: int = 1
    kv_unified: bool = False
    batch_size: int = 2048
    ubatch_size: int = 512
    kv_type_k: str = "f16"
    kv_type_v: str = "f16"
    flash_attention: bool = True
    gpu_layers: int | None = None
    split_mode: Literal["none", "layer"] = "layer"
    speculative: Speculative | None = None
    backend: Literal["cuda", "cpu"] = "cuda"
    force_mmq: bool = True


@dataclass(frozen=True)
class Buffers:
    """The buffers of one device as the engine prints them at load, in bytes.

    Several contexts (a draft, an MTP head) are summed. ``pool`` is not printed: what kernels take for themselves at the peak;
    ``library`` says whether they need cuBLAS.
    """

    weights: int = 0
    kv: int = 0
    state: int = 0
    compute: int = 0
    output: int = 0
    pool: int = 0
    library: bool = False

    @property
    def total(self) -> int:
        """All of it, in bytes, beside the CUDA context."""
        return self.weights + self.kv + self.state + self.compute + self.output + self.pool

    def plus(self, other: Buffers) -> Buffers:
        """Both together; the pool is one for each context."""
        return Buffers(
            self.weights + other.weights,
            self.kv + other.kv,
            self.state + other.state,
            self.compute + other.compute,
            self.output + other.output,
            self.pool + other.pool,
            self.library or other.library,
        )


@dataclass(frozen=True)
class Estimate:
    """What one instance takes: a budget for each card by UUID, the host's part by kind in bytes, and remarks for people."""

    budgets: dict[str, GpuBudget]
    host_bytes: dict[str, int]
    notes: tuple[str, ...] = ()
    buffers: dict[str, Buffers] = field(default_factory=dict)

    @property
    def fits(self) -> bool:
        """Whether every card has room at the peak."""
        return all(budget.free_bytes >= 0 for budget in self.budgets.values())
