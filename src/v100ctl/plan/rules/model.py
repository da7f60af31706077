"""Rules about the model: does the engine know it, does it fit, is what is asked of it possible?"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from v100ctl.catalog import Catalog, LlamaCppBuild
from v100ctl.fleet import HostConfig, InstanceSpec
from v100ctl.models.types import ModelHeader
from v100ctl.plan import llama_cpp
from v100ctl.plan.fit import Fit, alternatives
from v100ctl.plan.rules.text import gib
from v100ctl.plan.types import GpuBudget, Rule


def header_rules(
    name: str, spec: InstanceSpec, header: ModelHeader, config: HostConfig, row: LlamaCppBuild, catalog: Catalog
) -> Iterator[Rule]:
    """Rules about a GGUF's header against one build of llama.cpp."""
    if header.format != "gguf":
        yield Rule(
            "model-format",
            "refuse",
            f"the model is in {header.format} form; llama.cpp reads GGUF",
            "a GGUF of the same model, or `engine: vllm`",
            instance=name,
        )
        return
    if header.parts < header.expected_parts:
        yield Rule(
            "model-incomplete",
            "refuse",
            f"{header.parts} of the model's {header.expected_parts} files are there",
            "all of them in one folder, named as they were published",
            instance=name,
        )
    parser = catalog.llama_cpp_parser(row.build)
    if parser is not None and header.architecture not in parser.architectures:
        knowing = [
            str(item.build)
            for item in catalog.llama_cpp
            if (other := catalog.llama_cpp_parser(item.build)) and header.architecture in other.architectures
        ]
        newest = max(item.build for item in catalog.llama_cpp)
        yield Rule(
            "model-architecture-unknown",
            "refuse",
            f"llama.cpp {row.build} does not know the model's architecture `{header.architecture}`: it would stop while loading",
            f"`llama_cpp_build: {knowing[0]}`" if knowing else f"no build up to {newest}; a model of another architecture",
            instance=name,
        )
    if parser is not None:
        strange = sorted({tensor.type for tensor in header.tensors} - set(parser.tensor_types))
        if strange:
            yield Rule(
                "model-quantisation-unknown",
                "refuse",
                f"the model holds tensors of type {', '.join(strange)}, which llama.cpp {row.build} cannot read",
                "the same model in a common quantisation such as Q4_K_M",
                instance=name,
            )
    yield from _context_rules(name, spec, header)
    yield from _speculative_rules(name, spec, header)


def _metadata_int(header: ModelHeader, key: str) -> int | None:
    value = header.metadata.get(f"{header.architecture}.{key}")
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _context_rules(name: str, spec: InstanceSpec, header: ModelHeader) -> Iterator[Rule]:
    trained = _metadata_int(header, "context_length")
    asked = llama_cpp.context_per_request(spec.settings)
    scaling = spec.settings.rope_scaling
    if trained and asked > trained and (scaling is None or scaling.kind == "none"):
        yield Rule(
            "context-above-trained",
            "warn",
            f"context_length {asked} is above the {trained} tokens that the model was trained for: answers degrade beyond that",
            f"`context_length: {trained}`, or `rope_scaling` if the model's card says how",
            instance=name,
        )


def _speculative_rules(name: str, spec: InstanceSpec, header: ModelHeader) -> Iterator[Rule]:
    speculative = spec.settings.speculative
    if speculative is None or speculative.kind == "none":
        return
    if speculative.kind == "mtp" and not _metadata_int(header, "nextn_predict_layers"):
        yield Rule(
            "speculative-head-missing",
            "refuse",
            f"the model file (`{header.architecture}`) holds no multi-token-prediction head",
            "a GGUF that was converted with its MTP layers, or `speculative: {kind: draft, model: ...}`",
            instance=name,
        )
    if (spec.settings.parallel or llama_cpp.DEFAULT_PARALLEL) > 1:
        yield Rule(
            "speculative-with-slots",
            "warn",
            f"speculative decoding speeds up one stream; with {spec.settings.parallel} slots it costs, and crashes were reported",
            "`parallel: 1`, or no `speculative`",
            instance=name,
        )


def header_unread_rule(name: str, reason: str, *, on_cards: bool) -> Rule:
    """The model's header could not be read, so nothing about it was checked."""
    return Rule(
        "model-header-unread",
        "warn" if on_cards else "info",
        f"the model's header was not read ({reason}), so memory and architecture are not checked",
        "`plan` reads it from a file on the host or here, or from a URL that answers; `--model-header FILE` gives it by hand",
        instance=name,
    )


def invalid_model_rule(name: str, reason: str) -> Rule:
    """What lies there is certainly no model that an engine could load."""
    return Rule(
        "model-invalid",
        "refuse",
        f"the model cannot be loaded: {reason}",
        "a GGUF file, or for vLLM a folder with `config.json` and all its safetensors; its published sha256 tells a whole one",
        instance=name,
    )


#: By how many tokens the vocabularies of a model and its draft may differ (common/speculative.cpp, the same in builds 9851 to
#: 11434: `SPEC_VOCAB_MAX_SIZE_DIFFERENCE`).
_VOCABULARY_DIFFERENCE = 128


def draft_rules(name: str, header: ModelHeader, draft: ModelHeader) -> Iterator[Rule]:
    """A model can only check what another drafts where both count tokens alike (``common_speculative_are_compatible``)."""
    kinds = [item.metadata.get("tokenizer.ggml.model") for item in (header, draft)]
    sizes = [item.array_lengths.get("tokenizer.ggml.tokens", 0) for item in (header, draft)]
    if None not in kinds and kinds[0] != kinds[1]:
        reason = f"the model's tokenizer is {kinds[0]}, that of its draft {kinds[1]}"
    elif all(sizes) and abs(sizes[0] - sizes[1]) > _VOCABULARY_DIFFERENCE:
        reason = f"the model knows {sizes[0]} tokens and its draft {sizes[1]}; they may differ by {_VOCABULARY_DIFFERENCE}"
    else:
        return
    yield Rule(
        "draft-of-another-vocabulary",
        "refuse",
        f"{reason}: the engine does not draft with such a pair",
        "a draft of the same family as the model",
        instance=name,
    )


def memory_unknown_rule(name: str, reason: str) -> Rule:
    """Nothing is known about how the architecture keeps its cache."""
    return Rule(
        "memory-not-computed",
        "warn",
        f"what the model takes of the card is not computed: {reason}",
        "start it by hand once and look at `nvidia-smi`; the engine refuses loudly if it does not fit",
        instance=name,
    )


def projector_rule(name: str, path: str) -> Rule:
    """A projector lies on the card too, and its file's header is not read."""
    return Rule(
        "projector-not-counted",
        "warn",
        f"the projector {path} lies on the first card beside the model, and its memory is not counted",
        "more left free than its file takes, or `extra_args: [--no-mmproj-offload]`, which keeps it off the card",
        instance=name,
    )


def fit_rules(
    name: str,
    spec: InstanceSpec,
    found: Fit,
    neighbours: Mapping[str, Sequence[tuple[str, GpuBudget]]],
    card_names: Mapping[str, str],
    shares: Collection[str] = (),
) -> Iterator[Rule]:
    """Does it fit? ``neighbours``: by card, the other instances there and what they take.

    ``shares``: those of them that take a share of the card, whatever they need.
    """
    layers = _metadata_int(found.header, "block_count")
    asked_layers = spec.settings.gpu_layers
    if asked_layers is not None and layers and asked_layers <= layers:
        yield Rule(
            "partial-offload",
            "warn",
            f"gpu_layers {asked_layers} leaves {layers + 1 - asked_layers} of {layers + 1} layers on the processor: "
            "each token then crosses PCIe, and decoding slows several times",
            "no `gpu_layers`, and a smaller quantisation or context if that does not fit",
            instance=name,
        )
    for note in found.notes:
        yield Rule("memory-note", "info", f"memory: {note}", None, instance=name)
    for key, budget in found.budgets.items():
        others = neighbours.get(key, ())
        others_bytes = sum(item.peak_bytes for _, item in others)
        short_bytes = others_bytes - budget.free_bytes
        if short_bytes <= 0:
            continue
        parts = ", ".join(
            f"{label} {gib(size_bytes)}"
            for label, size_bytes in (
                ("weights", budget.weights_bytes),
                ("KV cache", budget.kv_bytes),
                ("recurrent state", budget.state_bytes),
                ("compute buffers", budget.compute_bytes + budget.output_bytes),
                ("CUDA context", budget.context_bytes),
            )
            if size_bytes
        )
        beside = f", beside {gib(others_bytes)} for {' and '.join(other for other, _ in others)}" if others else ""
        yield Rule(
            "model-does-not-fit",
            "refuse",
            f"{card_names.get(key, key)} has {gib(budget.total_bytes)}, of which {gib(budget.reserve_bytes)} are reserved; "
            f"needed are {gib(budget.peak_bytes)} ({parts}){beside}: {gib(short_bytes)} too much",
            _nearest(spec, found, others, shares),
            instance=name,
        )


def _nearest(spec: InstanceSpec, found: Fit, others: Sequence[tuple[str, GpuBudget]], shares: Collection[str]) -> str:
    if others:
        names = [other for other, _ in others]
        sharing = [other for other in names if other in shares]
        less = f"a smaller `gpu_memory_utilization` for {name_list(sharing)}" if sharing else "a shorter context for one of them"
        return f"another card for {name_list(names)}, or {less}"
    ways = [text for text, _ in alternatives(found, spec.settings)]
    if ways:
        return "; or ".join(ways[:3])
    budget = min(found.budgets.values(), key=lambda item: item.free_bytes)
    room_bytes = budget.total_bytes - budget.reserve_bytes - (budget.peak_bytes - budget.weights_bytes)
    return f"a file whose weights take at most {gib(max(room_bytes, 0))} of this card, a card with more memory, or a second card"


def name_list(names: Sequence[str]) -> str:
    """Names as a list for people."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
