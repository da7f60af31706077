"""Memory of llama.cpp: predictions against what a real server printed and took of a real card, and arithmetic by hand."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.device import shapes
from v100ctl.errors import V100ctlError
from v100ctl.models.types import ModelHeader, Tensor
from v100ctl.plan import vram
from v100ctl.plan.vram import Card, Launch, Speculative

MIB = 1 << 20
GIB = 1 << 30
MEASURED: dict[str, Any] = json.loads((Path(__file__).parent / "fixtures" / "vram" / "h200.json").read_text(encoding="utf-8"))
#: What the measured card's own CUDA context and cuBLAS took (docs/measurements/vram.md says how that was told apart).
CONTEXT_BYTES, LIBRARY_BYTES = 604 * MIB, 96 * MIB
#: The same where every kernel is loaded at the start (CUDA_MODULE_LOADING=EAGER).
EAGER_CONTEXT_BYTES, EAGER_LIBRARY_BYTES = 716 * MIB, 512 * MIB
BANDWIDTH = 900e9


def header_of(shape: shapes.Shape) -> ModelHeader:
    """The header that a reader makes of the shape's file."""
    tensors = tuple(Tensor(name, kind, size, shapes.tensor_bytes(kind, size)) for name, kind, size in shape.tensors)
    return ModelHeader(format="gguf", architecture=shape.architecture, metadata=shape.metadata, tensors=tensors)


@functools.cache
def header(name: str) -> ModelHeader:
    """One of the measured models."""
    return header_of(shapes.MODELS[name]())


def launch_of(arguments: str) -> Launch:
    """The launch that a measured command line means."""
    words = arguments.split()

    def value(flag: str, default: str) -> str:
        return words[words.index(flag) + 1] if flag in words else default

    speculative = None
    if "draft-mtp" in words:
        speculative = Speculative("mtp", int(value("--spec-draft-n-max", "3")))
    elif "draft-simple" in words:
        draft = re.search(r"\{(.*?)\}", arguments)
        assert draft
        speculative = Speculative("draft", draft=header(draft[1]))
    return Launch(
        context_size=int(value("-c", "0")),
        parallel=int(value("-np", "1")),
        kv_unified="-kvu" in words,
        batch_size=int(value("-b", "2048")),
        ubatch_size=int(value("-ub", "512")),
        kv_type_k=value("-ctk", "f16"),
        kv_type_v=value("-ctv", "f16"),
        flash_attention=value("-fa", "on") != "off",
        speculative=speculative,
    )


def printed(run: dict[str, Any], device: str, kind: str) -> list[float]:
    """The MiB that the server printed for a device and a kind of buffer."""
    found = [mib for _, where, what, mib in run["buffers"] if where == device and what == kind]
    # A context that drafts is given its buffer, then asked for the same one again.
    return found[:2] if kind == "compute" and "draft-mtp" in run["args"] else found


def measured_cards(run: dict[str, Any]) -> list[Card]:
    """The cards of a measured run, as the engine names them."""
    return [
        Card(
            f"CUDA{number}",
            total_bytes=143771 * MIB,
            reserve_bytes=0,
            context_bytes=EAGER_CONTEXT_BYTES if run.get("eager") else CONTEXT_BYTES,
            bandwidth_bytes_per_s=4.8e12,
            library_bytes=EAGER_LIBRARY_BYTES if run.get("eager") else LIBRARY_BYTES,
            compute_capability="9.0",
            multiprocessors=132,
        )
        for number in range(run.get("cards", 1))
    ]


def v100(memory_mib: int = 32501, uuid: str = "GPU-0", **values: Any) -> Card:
    """A V100 as CUDA sees it."""
    fields = {"reserve_bytes": 0, "context_bytes": vram.V100_CONTEXT_BYTES, "bandwidth_bytes_per_s": BANDWIDTH, **values}
    return Card(uuid, memory_mib * MIB, **fields)


@pytest.mark.parametrize("run", MEASURED["runs"], ids=lambda run: f"{run['model']} {run['args']}")
def test_prediction_against_a_real_card(run: dict[str, Any]) -> None:
    cards = measured_cards(run)
    estimate = vram.estimate(header(run["model"]), launch_of(run["args"]), cards)
    assert estimate.notes == ()
    for number, card in enumerate(cards):
        buffers = estimate.buffers[card.uuid]
        for kind, predicted in (
            ("model", buffers.weights),
            ("KV", buffers.kv),
            ("RS", buffers.state),
            ("compute", buffers.compute),
        ):
            parts = printed(run, card.uuid, kind)
            # Each printed number is rounded to a hundredth. For compute buffers ten percent are promised.
            allowed = 0.01 if kind == "compute" else 0.0051
            assert abs(predicted / MIB - sum(parts)) <= allowed * max(1, len(parts)), kind
        highest = run["highest_mib"][str(run["devices"][number])]
        peak = estimate.budgets[card.uuid].peak_bytes / MIB
        assert highest * 0.95 <= peak <= highest * 1.05
        assert peak >= highest - 10, "the promise is an upper bound, to the granularity of a few mappings"
    for kind, device, name in (
        ("model", "CPU_Mapped", "weights"),
        ("compute", "CUDA_Host", "compute"),
        ("output", "CUDA_Host", "output"),
    ):
        parts = printed(run, device, kind)
        assert abs(estimate.host_bytes[name] / MIB - sum(parts)) <= 0.0051 * max(1, len(parts)), kind


def test_the_measurements_cover_what_is_promised() -> None:
    architectures = {header(run["model"]).architecture for run in MEASURED["runs"]}
    assert architectures == vram.MEASURED
    assert len({run["model"] for run in MEASURED["runs"]}) >= 6
    assert all("error" not in run for run in MEASURED["runs"])


# Arithmetic by hand


def test_kv_bytes_a_token_are_layers_heads_and_type() -> None:
    """The report's own example: 2 x 48 layers x 8 heads x 128 x 2 bytes are 192 KiB a token, not 384."""
    model = header_of(shapes.qwen3(n_layer=48, n_embd=512, n_ff=512, n_head=16, n_vocab=1024))
    kv = [vram.estimate(model, Launch(tokens), [v100()]).budgets["GPU-0"].kv_bytes for tokens in (4096, 8192)]
    assert kv[0] == 4096 * 192 * 1024
    assert kv[1] == 2 * kv[0]


@pytest.mark.parametrize(("kind", "kib"), [("f16", 64), ("q8_0", 34), ("q4_0", 18)])
def test_a_hybrid_keeps_a_quarter_of_its_layers(kind: str, kib: int) -> None:
    launch = Launch(65536, kv_type_k=kind, kv_type_v=kind)
    assert vram.estimate(header("qwen35-27b"), launch, [v100()]).budgets["GPU-0"].kv_bytes == 65536 * kib * 1024


def test_slots_divide_the_context_or_share_it() -> None:
    model = header("qwen3-8b")
    apart = vram.estimate(model, Launch(8192, parallel=3), [v100()]).budgets["GPU-0"].kv_bytes
    together = vram.estimate(model, Launch(8192, parallel=3, kv_unified=True), [v100()]).budgets["GPU-0"].kv_bytes
    cell = 36 * 2 * 8 * 128 * 2
    # 8192 / 3 = 2730 a slot, rounded up to 2816.
    assert (apart, together) == (3 * 2816 * cell, 8192 * cell)


def test_windowed_layers_keep_a_window_and_a_micro_batch() -> None:
    model = header("gemma3-27b")
    kv = vram.estimate(model, Launch(32768, ubatch_size=512), [v100(80000)]).budgets["GPU-0"].kv_bytes
    cell = 2 * 16 * 128 * 2
    assert kv == 10 * 32768 * cell + 52 * 1536 * cell
    shared = vram.estimate(model, Launch(32768, parallel=4, kv_unified=True), [v100(80000)]).budgets["GPU-0"].kv_bytes
    assert shared == 10 * 32768 * cell + 52 * (4 * 1024 + 512) * cell


def test_a_latent_cache_has_no_values() -> None:
    kv = vram.estimate(header("deepseek2-lite"), Launch(16384), [v100()]).budgets["GPU-0"].kv_bytes
    assert kv == 27 * 16384 * 576 * 2


def test_prediction_layers_cost_weights_cache_and_states() -> None:
    model = header("qwen35-27b-mtp")
    plain = vram.estimate(model, Launch(32768), [v100()]).budgets["GPU-0"]
    drafting = vram.estimate(model, Launch(32768, speculative=Speculative("mtp", 3)), [v100()]).budgets["GPU-0"]
    assert plain.weights_bytes == vram.estimate(header("qwen35-27b"), Launch(32768), [v100()]).budgets["GPU-0"].weights_bytes
    assert drafting.weights_bytes - plain.weights_bytes == pytest.approx(228 * MIB, rel=0.01)
    assert drafting.kv_bytes - plain.kv_bytes == 32768 * 4 * 1024
    # Three snapshots to roll back to beside each state.
    assert drafting.state_bytes == 4 * plain.state_bytes
    # The operator's own figure for all of it: "about 1 GB".
    assert 0.7 * GIB < drafting.peak_bytes - plain.peak_bytes < 1.2 * GIB


def test_a_file_without_prediction_layers_says_so() -> None:
    estimate = vram.estimate(header("qwen35-27b"), Launch(8192, speculative=Speculative("mtp")), [v100()])
    assert "cannot draft by itself" in estimate.notes[0]
    assert estimate.budgets["GPU-0"] == vram.estimate(header("qwen35-27b"), Launch(8192), [v100()]).budgets["GPU-0"]


# What an operator measured on a V100-PCIE-32GB (bradrlaw/ai-server, docs/benchmarking.md): Qwen3.6-27B Q6_K, 22 GB of weights


@pytest.mark.parametrize(("context", "reported"), [(32768, 23.3), (131072, 29.4), (163840, 31.5)])
def test_an_operators_figures(context: int, reported: float) -> None:
    """Reported in thousands of MiB, by a build of some months before this one: within five percent."""
    peak = vram.estimate(header("qwen35-27b-q6"), Launch(context), [v100()]).budgets["GPU-0"].peak_bytes
    assert peak / MIB / 1000 == pytest.approx(reported, rel=0.05)


def test_an_operators_limit() -> None:
    """With the micro-batch of 2048 that the operator serves with, 163840 fits a card and 172032 does not."""
    model = header("qwen35-27b-q6")
    fits = {size: vram.estimate(model, Launch(size, ubatch_size=2048), [v100()]).fits for size in (131072, 163840, 172032)}
    assert fits == {131072: True, 163840: True, 172032: False}


def test_the_promise_is_the_peak_not_the_load() -> None:
    """What a prompt needs beyond the load: without flash attention, and in builds that turn weights into f16 for prompts."""
    model = header("qwen3-32b")
    for launch in (Launch(8192, ubatch_size=1024, flash_attention=False), Launch(8192, ubatch_size=1024, force_mmq=False)):
        estimate = vram.estimate(model, launch, [v100()])
        buffers = estimate.buffers["GPU-0"]
        assert buffers.pool > 250 * MIB
        assert estimate.budgets["GPU-0"].compute_bytes == buffers.compute + buffers.pool
    forced = vram.estimate(model, Launch(8192, ubatch_size=1024), [v100()])
    assert forced.buffers["GPU-0"].pool < 50 * MIB


def test_weights_without_blocks_are_copied_for_prompts() -> None:
    """bf16 is no type that a V100 computes in: a whole matrix becomes f32."""
    shape = shapes.qwen3(n_layer=4, n_vocab=1024)
    bf16 = dataclasses.replace(
        shape, tensors=tuple((name, "f16" if kind == "q4_K" else kind, size) for name, kind, size in shape.tensors)
    )
    made = header_of(bf16)
    tensors = tuple(tensor._replace(type="bf16") if tensor.type == "f16" else tensor for tensor in made.tensors)
    estimate = vram.estimate(made.model_copy(update={"tensors": tensors}), Launch(4096), [v100()])
    assert estimate.buffers["GPU-0"].pool == pytest.approx(4 * 4096 * 12288, rel=0.05)
    assert estimate.buffers["GPU-0"].library
    assert estimate.budgets["GPU-0"].context_bytes == vram.V100_CONTEXT_BYTES + vram.CUBLAS_BYTES


# Several cards, few cards, no card


def test_layers_are_spread_by_free_memory() -> None:
    model = header("qwen3-8b")
    cards = [v100(32501, "a"), v100(16150, "b")]
    budgets = vram.estimate(model, Launch(8192), cards).budgets
    assert 1.7 < budgets["a"].kv_bytes / budgets["b"].kv_bytes < 2.3
    assert budgets["a"].kv_bytes + budgets["b"].kv_bytes == vram.estimate(model, Launch(8192), cards[:1]).budgets["a"].kv_bytes
    alone = vram.estimate(model, dataclasses.replace(Launch(8192), split_mode="none"), cards).budgets
    assert alone["b"].peak_bytes == 0
    assert alone["a"] == vram.estimate(model, Launch(8192), cards[:1]).budgets["a"]


def test_two_cards_need_more_than_half_each() -> None:
    """Four micro-batches in flight need four copies of everything that crosses."""
    model = header("qwen3-14b")
    one = vram.estimate(model, Launch(16384), [v100()]).buffers["GPU-0"]
    both = vram.estimate(model, Launch(16384), [v100(uuid="a"), v100(uuid="b")]).buffers
    assert both["a"].compute > one.compute
    assert both["a"].weights + both["b"].weights == one.weights


def test_a_partial_offload_leaves_the_first_layers_on_the_host() -> None:
    estimate = vram.estimate(header("qwen3-8b"), dataclasses.replace(Launch(8192), gpu_layers=10), [v100()])
    cell = 8192 * 2 * 8 * 128 * 2
    assert estimate.budgets["GPU-0"].kv_bytes == 9 * cell
    assert estimate.host_bytes["kv"] == 27 * cell
    assert "27 of 37 layers stay on the host" in estimate.notes[0]


def test_the_cpu_backend_takes_host_memory_only() -> None:
    estimate = vram.estimate(header("qwen3-8b"), dataclasses.replace(Launch(8192), backend="cpu"), [v100()])
    assert estimate.budgets == {}
    assert estimate.fits
    assert estimate.host_bytes["kv"] == 8192 * 36 * 2 * 8 * 128 * 2
    assert estimate.host_bytes["weights"] > 4 * GIB


# The largest context


@settings(max_examples=25)
@given(
    name=st.sampled_from(["qwen3-8b", "qwen35-27b", "gemma3-12b", "deepseek2-lite", "qwen3-30b-a3b"]),
    memory=st.integers(1000, 40000),
    parallel=st.integers(1, 4),
    unified=st.booleans(),
    ubatch=st.sampled_from([128, 512, 2048]),
    kind=st.sampled_from(["f16", "q8_0"]),
)
def test_the_largest_context_fits_and_the_next_does_not(
    name: str, memory: int, parallel: int, unified: bool, ubatch: int, kind: str
) -> None:
    card = v100(memory)
    launch = Launch(0, parallel=parallel, kv_unified=unified, ubatch_size=ubatch, kv_type_k=kind, kv_type_v=kind)
    model = header(name)
    found = vram.largest_context(model, launch, [card])
    slots = 1 if unified else parallel

    def fits(tokens: int) -> bool:
        return vram.estimate(model, dataclasses.replace(launch, context_size=tokens * slots), [card]).fits

    trained = int(model.metadata[f"{model.architecture}.context_length"])
    assert 0 <= found <= trained
    assert found == 0 or fits(found)
    assert found >= trained or not fits(found + 256)


@settings(max_examples=25)
@given(
    name=st.sampled_from(["qwen3-8b", "qwen35-27b", "gpt-oss-20b"]),
    context=st.integers(256, 65536),
    more=st.integers(0, 65536),
    ubatch=st.sampled_from([64, 512]),
)
def test_more_context_never_takes_less(name: str, context: int, more: int, ubatch: int) -> None:
    peaks = [
        vram.estimate(header(name), Launch(size, ubatch_size=ubatch), [v100()]).budgets["GPU-0"].peak_bytes
        for size in (context, context + more)
    ]
    assert peaks[0] <= peaks[1]


# The ceiling


def test_the_ceiling_reads_every_weight_once() -> None:
    """The operator's 27B Q6_K decodes 22.6 tokens a second: over half of what bandwidth allows."""
    ceiling = vram.decode_ceiling_tps(header("qwen35-27b-q6"), Launch(32768), [v100()], fill_tokens=0)
    assert ceiling == pytest.approx(BANDWIDTH / (20054.43 * MIB + 2 * 149.62 * MIB), rel=0.001)
    assert 22.6 / ceiling == pytest.approx(0.54, abs=0.02)


def test_the_ceiling_counts_active_experts_and_the_filled_cache() -> None:
    card = [v100()]
    dense = vram.decode_ceiling_tps(header("qwen3-32b"), Launch(32768), card, fill_tokens=0)
    sparse = vram.decode_ceiling_tps(header("qwen3-30b-a3b"), Launch(32768), card, fill_tokens=0)
    assert sparse > 7 * dense
    filled = vram.decode_ceiling_tps(header("qwen3-32b"), Launch(32768), card, fill_tokens=32000)
    assert 1 / filled - 1 / dense == pytest.approx(32000 * 256 * 1024 / BANDWIDTH, rel=0.001)
    # A window stops growing.
    windowed = [vram.decode_ceiling_tps(header("gemma3-27b"), Launch(32768), card, fill_tokens=fill) for fill in (0, 1024, 32000)]
    assert 1 / windowed[1] - 1 / windowed[0] == pytest.approx(1024 * 62 * 8192 / BANDWIDTH, rel=0.001)
    assert 1 / windowed[2] - 1 / windowed[1] == pytest.approx((32000 - 1024) * 10 * 8192 / BANDWIDTH, rel=0.001)


def test_cards_in_a_row_take_turns() -> None:
    """Two equal cards by layers are as fast as one."""
    model = header("qwen3-14b")
    one = vram.decode_ceiling_tps(model, Launch(8192), [v100()], fill_tokens=4096)
    two = vram.decode_ceiling_tps(model, Launch(8192), [v100(uuid="a"), v100(uuid="b")], fill_tokens=4096)
    assert two == pytest.approx(one)


# What cannot be computed


@pytest.mark.parametrize("architecture", ["mamba2", "made-up", "jamba"])
def test_an_unknown_architecture_is_no_guess(architecture: str) -> None:
    made = ModelHeader(format="gguf", architecture=architecture)
    with pytest.raises(vram.UnknownArchitectureError, match=architecture) as error:
        vram.estimate(made, Launch(4096), [v100()])
    assert "qwen35" in str(error.value.hint)


def test_embeddings_for_each_layer_are_no_guess() -> None:
    whole = header("gemma4-31b")
    small = whole.model_copy(update={"metadata": {**whole.metadata, "gemma4.embedding_length_per_layer_input": 256}})
    with pytest.raises(vram.UnknownArchitectureError, match="for each layer"):
        vram.estimate(small, Launch(4096), [v100()])


def test_a_header_without_dimensions_is_no_guess() -> None:
    with pytest.raises(vram.UnknownArchitectureError, match="block count"):
        vram.estimate(ModelHeader(format="gguf", architecture="llama"), Launch(4096), [v100()])


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("block_count", 2**31, "lacks its block count"),
        ("block_count", "many", "make no sense"),
        ("nextn_predict_layers", 99, "lacks its block count"),
        ("attention.head_count_kv", [8, 8], "lists 2 values for its 64 layers"),
        ("ssm.group_count", 0, "does not fit together"),
        ("ssm.time_step_rank", 0, "does not fit together"),
    ],
)
def test_a_header_that_makes_no_sense_is_no_guess(key: str, value: object, said: str) -> None:
    whole = header("qwen35-27b")
    changed = whole.model_copy(update={"metadata": {**whole.metadata, f"qwen35.{key}": value}})
    if key == "ssm.group_count":
        tensors = tuple(tensor for tensor in whole.tensors if "ssm_beta" not in tensor.name)
        joint = tuple(tensor._replace(name=tensor.name.replace("ssm_alpha", "ssm_ba")) for tensor in tensors)
        changed = changed.model_copy(update={"tensors": joint})
    with pytest.raises(vram.UnknownArchitectureError, match=said):
        vram.estimate(changed, Launch(4096), [v100()])


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("qwen3-32b", "qwen3.embedding_length", 1e308),
        ("deepseek2-lite", "deepseek2.attention.key_length_mla", [1, 2, 3]),
        ("qwen3-8b", "qwen3.attention.key_length", 7),
    ],
)
def test_figures_that_no_arithmetic_can_use_end_nothing_else(name: str, key: str, value: object) -> None:
    whole = header(name)
    changed = whole.model_copy(update={"metadata": {**whole.metadata, key: value}})
    launch = Launch(4096, kv_type_k="q8_0", kv_type_v="q8_0")
    with pytest.raises(vram.UnknownArchitectureError):
        vram.estimate(changed, launch, [v100()])


def test_a_file_without_a_needed_tensor_is_no_guess() -> None:
    whole = header("qwen3-8b")
    tensors = tuple(tensor for tensor in whole.tensors if not tensor.name.endswith("ffn_down.weight"))
    with pytest.raises(vram.UnknownArchitectureError, match="lacks tensors"):
        vram.estimate(whole.model_copy(update={"tensors": tensors}), Launch(4096), [v100()])


@pytest.mark.parametrize("kind", ["q8_1x", "fp8"])
def test_a_cache_type_that_does_not_exist(kind: str) -> None:
    with pytest.raises(V100ctlError, match=kind):
        vram.estimate(header("qwen3-8b"), Launch(4096, kv_type_k=kind), [v100()])


def test_a_known_architecture_that_was_not_measured_says_so() -> None:
    shape = shapes.qwen3(n_layer=2, n_vocab=1024)
    renamed = {key.replace("qwen3.", "seed_oss."): value for key, value in shape.metadata.items()}
    made = header_of(dataclasses.replace(shape, architecture="seed_oss", metadata=renamed))
    assert "not compared" in vram.estimate(made, Launch(4096), [v100()]).notes[0]


def test_headers_that_say_the_same_share_the_work() -> None:
    first = header("qwen3-8b")
    again = ModelHeader.model_validate(first.model_dump(mode="json"))
    assert again is not first
    ours, theirs = (vram.estimate(model, Launch(4096), [v100()]) for model in (first, again))
    assert ours == theirs
