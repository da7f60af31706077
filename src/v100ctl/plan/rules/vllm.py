"""Rules about vLLM: can this version run this model, with these settings, on these cards?"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from v100ctl.catalog import Catalog, version_key
from v100ctl.catalog.vllm import VllmRow
from v100ctl.facts import Facts
from v100ctl.fleet import HostConfig, InstanceSpec, Settings
from v100ctl.models.types import ModelHeader
from v100ctl.plan import vllm
from v100ctl.plan.argv import ArgvProblem
from v100ctl.plan.rules.text import gib
from v100ctl.plan.types import GpuBudget, Rule
from v100ctl.plan.vllm_memory import UnknownModelError, VllmEstimate, context_limit, estimate, launch_of, shape, text_config
from v100ctl.plan.vram.types import Card

_GIB = 1024**3
_LLAMA_CPP = "`engine: llama_cpp` with a GGUF of the model"
#: The least capability with bfloat16, and with the instructions that the engine's Triton kernels need.
_AMPERE = 80
#: Shares of the host's memory: above this one the engine refuses its swap space (config.py: `verify_with_parallel_config`).
_SWAP_SHARE = 0.7
#: Kernels of GPTQ checkpoints exist for these widths (gptq.py).
_GPTQ_BITS = (2, 3, 4, 8)
#: Methods whose weights must have been quantised before; the others do it while they load.
_NEEDS_CHECKPOINT = ("gptq", "gptq_marlin", "gptq_marlin_24", "gptq_bitblas", "awq", "awq_marlin", "marlin", "moe_wna16", "aqlm")
#: What a checkpoint's own method may be asked to run as; any other name is refused (config.py: `_verify_quantization`).
_RUNS_AS: Mapping[str, tuple[str, ...]] = {
    "gptq": ("gptq", "gptq_marlin", "marlin", "gptq_bitblas", "moe_wna16"),
    "awq": ("awq", "awq_marlin", "marlin", "moe_wna16"),
}


def capability_of(cards: Sequence[Card]) -> int:
    """The least compute capability of the cards in tenths (70 for a V100); 70 where there are none."""
    return min((int(float(card.compute_capability) * 10 + 0.5) for card in cards), default=70)


def vllm_rules(
    name: str,
    spec: InstanceSpec,
    config: HostConfig,
    facts: Facts,
    row: VllmRow | None,
    header: ModelHeader | None,
    cards: Sequence[Card],
    catalog: Catalog,
) -> Iterator[Rule]:
    """Everything about one instance of vLLM that needs no other instance.

    Args:
        name: The instance.
        spec: What is asked of it.
        config: The host's variables.
        facts: The host.
        row: The catalog's row of ``config.vllm_version``.
        header: The model's, ``None`` where it has not been read; rules about the model are left out then.
        cards: Those that the instance gets.
        catalog: For versions that would work.
    """
    check = _Check(name, spec, config, facts, header, cards, catalog)
    if row is None:
        known = ", ".join(catalog.vllm_versions)
        yield check.refuse(
            "vllm-version-unknown",
            f"nothing is known about vLLM {config.vllm_version}; known: {known}",
            f"`vllm_version: {catalog.vllm_versions[-1]}`",
        )
        return
    if vllm.own_build(config):
        # Its flags are spelled like this version's; what it can run is known to nobody here.
        if row.launchable:
            yield from check.meaningless_rules(row)
        return
    yield from check.version_rules(row)
    if not row.launchable:
        return
    yield from check.meaningless_rules(row)
    yield from check.setting_rules(row)
    if header is None:
        yield from check.method_rules(row, spec.settings.quantization)
        return
    if header.format == "gguf":
        yield check.warn(
            "vllm-gguf",
            "vLLM reads GGUF, but its documentation calls that highly experimental and under-optimized",
            "`engine: llama_cpp` with the same file",
        )
        return
    yield from check.architecture_rules(row)
    yield from check.quantization_rules(row)
    yield from check.type_rules(row)
    yield from check.context_rules(row)
    yield from check.parallel_rules(row)
    yield from check.memory_rules(row)


@dataclass(frozen=True)
class _Check:
    name: str
    spec: InstanceSpec
    config: HostConfig
    facts: Facts
    header: ModelHeader | None
    cards: Sequence[Card]
    catalog: Catalog

    def refuse(self, rule: str, reason: str, nearest: str) -> Rule:
        return Rule(rule, "refuse", reason, nearest, instance=self.name)

    def warn(self, rule: str, reason: str, nearest: str | None) -> Rule:
        return Rule(rule, "warn", reason, nearest, instance=self.name)

    def info(self, rule: str, reason: str) -> Rule:
        return Rule(rule, "info", reason, None, instance=self.name)

    @property
    def settings(self) -> Settings:
        return self.spec.settings

    @property
    def capability(self) -> int:
        return capability_of(self.cards)

    @property
    def metadata(self) -> Mapping[str, Any]:
        return self.header.metadata if self.header is not None else {}

    def version_rules(self, row: VllmRow) -> Iterator[Rule]:
        working = self.catalog.vllm_versions[-1]
        if self.capability < 75:
            if row.sm_70 == "no":
                yield self.refuse(
                    "vllm-version-without-volta",
                    f"vLLM {self.config.vllm_version} does not run on compute capability 7.0: {row.reason} ({row.reason_source})",
                    f"`vllm_version: {working}`, or {_LLAMA_CPP}",
                )
            elif row.sm_70 == "unproven":
                yield self.refuse(
                    "vllm-version-unproven",
                    f"vLLM {self.config.vllm_version} is not known to run on a V100: {row.reason} ({row.reason_source})",
                    f"`vllm_version: {working}`, or {_LLAMA_CPP}",
                )
        driver = self._driver()
        if driver and version_key(driver) < version_key(row.driver_min)[: len(version_key(driver))]:
            yield self.refuse(
                "vllm-driver-too-old",
                f"the wheels of vLLM {row.version} hold CUDA {row.cuda}, which needs driver {row.driver_min}; this is {driver}",
                "`nvidia_driver_branch: auto`, which installs 535",
            )

    def _driver(self) -> str:
        """The driver that will run: the one that is pinned, else the one that is there."""
        branch = self.config.nvidia_driver_branch
        return branch if branch != "auto" else self.facts.nvidia.module_version

    def meaningless_rules(self, row: VllmRow) -> Iterator[Rule]:
        for setting, why in vllm.meaningless_settings(self.settings, row).items():
            yield self.refuse("setting-meaningless", f"`{setting}` means nothing to vLLM: {why}", f"leave `{setting}` out")

    def setting_rules(self, row: VllmRow) -> Iterator[Rule]:
        settings = self.settings
        if self.capability < _AMPERE:
            for setting, asked in (("chunked_prefill", settings.chunked_prefill), ("prefix_caching", settings.prefix_caching)):
                if asked and settings.dtype not in ("float", "float32"):
                    yield self.refuse(
                        f"vllm-{setting.replace('_', '-')}-on-volta",
                        f"`{setting}: true` below compute capability 8.0: {row.volta_prefill[setting]}",
                        f"`{setting}: false`",
                    )
        kinds = (settings.kv_cache_type_k or settings.kv_cache_type_v, settings.kv_cache_type_v or settings.kv_cache_type_k)
        if kinds[0] != kinds[1]:
            yield self.refuse(
                "vllm-kv-types-differ",
                f"vLLM has one type for keys and values; `kv_cache_type_k` is {kinds[0]} and `kv_cache_type_v` {kinds[1]}",
                "`kv_cache_type_k: auto`, and no `kv_cache_type_v`",
            )
        if (kinds[0] or "").startswith("fp8") and self.capability < 89:
            yield self.warn(
                "vllm-fp8-cache",
                f"a cache in {kinds[0]} only stores in 8 bits and computes in 16; no V100 is known to have served with it",
                "`kv_cache_type_k: auto`",
            )
        yield from self._step_rules(row)
        speculative = settings.speculative
        if speculative is not None and speculative.kind in ("draft", "ngram") and speculative.depth is None:
            yield self.refuse(
                "vllm-speculative-depth",
                f"vLLM has no default for how many tokens a {speculative.kind} proposes at once",
                "`speculative: {depth: 5, ...}`",
            )
        if speculative is not None and speculative.kind == "mtp":
            yield self.refuse(
                "vllm-speculative-mtp",
                f"vLLM {row.version} has prediction heads for DeepSeek V3 at most, which fits no V100",
                "`speculative: {kind: ngram, depth: 5}`, or llama.cpp",
            )
        scaling = settings.rope_scaling
        if scaling is not None and scaling.kind != "none":
            missing = ["factor"] if scaling.factor is None else []
            missing += ["original_context_length"] if scaling.kind == "yarn" and scaling.original_context_length is None else []
            if missing:
                yield self.refuse(
                    "vllm-rope-incomplete",
                    f"`rope_scaling` of kind {scaling.kind} needs {' and '.join(f'`{item}`' for item in missing)}",
                    "`rope_scaling: {kind: yarn, factor: 4, original_context_length: 32768}`, as the model's card says",
                )
        swap_gib = settings.swap_space_gib
        if swap_gib is None:
            swap_gib = row.defaults.swap_space_gib if row.defaults else 0
        swap_bytes = swap_gib * _GIB * max(len(self.cards), 1)
        memory = self.facts.memory.limit_bytes or self.facts.memory.total_bytes
        if memory and swap_bytes > _SWAP_SHARE * memory:
            fits = math.floor(_SWAP_SHARE * memory / max(len(self.cards), 1) / _GIB)
            yield self.refuse(
                "vllm-swap-space",
                f"a swap space of {gib(swap_bytes)} in all is above 70% of the host's {gib(memory)}, which the engine refuses",
                f"`swap_space_gib: {fits}`",
            )

    def _step_rules(self, row: VllmRow) -> Iterator[Rule]:
        context, batch = vllm.context_per_request(self.settings), self.settings.batch_size
        chunked = bool(self.settings.chunked_prefill) and self.capability >= _AMPERE
        if batch is not None and batch < context and not chunked:
            yield self.refuse(
                "vllm-batch-below-context",
                f"without chunked prefill one step reads a whole prompt: `batch_size` {batch} is below the context of {context}",
                f"`batch_size: {context}`, or `context_length: {batch}`",
            )
        parallel = vllm.requests_at_once(self.settings, row)
        if batch is not None and batch < parallel:
            yield self.refuse(
                "vllm-batch-below-parallel",
                f"a step of {batch} tokens cannot hold one of each of {parallel} requests",
                f"`batch_size: {max(parallel, context)}`",
            )
        if row.long_context_chunks_above is not None and context > row.long_context_chunks_above and not chunked:
            yield self.info(
                "vllm-long-context",
                f"above {row.long_context_chunks_above} tokens vLLM turns chunked prefill on by itself; the plan turns it off",
            )

    def architecture_rules(self, row: VllmRow) -> Iterator[Rule]:
        header, parser = self.header, row.parser
        if header is None or parser is None or header.architecture in parser.architectures:
            return
        if header.architecture in parser.transformers_architectures:
            yield self.warn(
                "vllm-architecture-by-transformers",
                f"vLLM {row.version} has no code for `{header.architecture}` and runs the Transformers library's own: slower",
                _LLAMA_CPP,
            )
            return
        knowing = [
            other.version
            for other in self.catalog.vllm_rows
            if other.launchable and header.architecture in other.architectures and (other.sm_70 == "yes" or self.capability >= 75)
        ]
        newest = self.catalog.vllm_versions[-1]
        nearest = (
            f"`vllm_version: {knowing[-1]}`, or {_LLAMA_CPP}" if knowing else f"{_LLAMA_CPP}; no version up to {newest} has it"
        )
        yield self.refuse(
            "vllm-architecture-unknown",
            f"vLLM {row.version} does not know the model's architecture `{header.architecture}`",
            nearest,
        )

    def quantization_rules(self, row: VllmRow) -> Iterator[Rule]:
        own = self.metadata.get("quantization_config") or self.metadata.get("compression_config")
        own = own if isinstance(own, Mapping) else {}
        method = str(own.get("quant_method", "")).lower() or None
        asked = self.settings.quantization.lower() if self.settings.quantization else None
        if method is None and asked in _NEEDS_CHECKPOINT:
            yield self.refuse(
                "vllm-quantization-missing",
                f"`quantization: {asked}` needs a model that was quantised so, and its config.json names no quantisation",
                f"a {asked.upper()} copy of the model, or no `quantization`",
            )
            return
        # An AWQ checkpoint becomes `moe_wna16` only where AWQ itself would run.
        as_awq = (method, asked) == ("awq", "moe_wna16") and self.capability < row.quantization.get("awq", 75)
        if method is not None and asked is not None and (as_awq or asked not in _RUNS_AS.get(method, (method,))):
            yield self.refuse(
                "vllm-quantization-differs",
                f"the model is quantised by {method}; `quantization: {asked}` is refused",
                f"leave `quantization` out, or a {asked.upper()} copy of the model",
            )
            return
        yield from self.method_rules(row, quantization_method(self.settings, self.header, self.capability))
        if method == "gptq" and own.get("bits") not in (None, *_GPTQ_BITS):
            yield self.refuse(
                "vllm-gptq-bits",
                f"a GPTQ model of {own['bits']} bits has no kernel; there are those of 2, 3, 4 and 8",
                "a GPTQ copy in 4 bits",
            )
        if method == "compressed-tensors":
            least = row.compressed_tensors.get(str(own.get("format")))
            if least is not None and self.capability < least:
                yield self._below(row, f"compressed-tensors {own['format']}", least)
        experts = self._experts()
        if method == "gptq" and asked in (None, "gptq") and self.capability < _AMPERE and experts:
            yield self.refuse(
                "vllm-gptq-experts",
                f"the model has {experts} experts, and vLLM's GPTQ below compute capability 8.0 has no kernel for them",
                _LLAMA_CPP,
            )

    def _experts(self) -> int:
        if self.header is None or self.header.architecture == "MixtralForCausalLM":
            # Mixtral alone has a second implementation, with plain layers, for such methods.
            return 0
        config = text_config(self.header)
        return next((int(config[key]) for key in ("num_experts", "num_local_experts", "n_routed_experts") if config.get(key)), 0)

    def method_rules(self, row: VllmRow, method: str | None) -> Iterator[Rule]:
        """Can the cards run a quantisation method in this version at all?"""
        if method is None or row.parser is None:
            return
        least = row.quantization.get(method.lower())
        if least is None:
            runs = ", ".join(known for known, minimum in row.quantization.items() if 0 < minimum <= self.capability)
            yield self.refuse(
                "vllm-quantization-unknown",
                f"vLLM {row.version} has no quantisation `{method}` for NVIDIA cards",
                f"one of {runs}, or {_LLAMA_CPP}",
            )
        elif self.capability < least:
            yield self._below(row, method.lower(), least)

    def _below(self, row: VllmRow, method: str, least: int) -> Rule:
        return self.refuse(
            "vllm-quantization-below-minimum",
            f"`{method}` needs compute capability {least / 10:.1f} in vLLM {row.version}, and this is {self.capability / 10:.1f}",
            f"a GPTQ copy of the model (`quantization: gptq` needs 6.0), or {_LLAMA_CPP}",
        )

    def type_rules(self, row: VllmRow) -> Iterator[Rule]:
        settings = self.settings
        config = text_config(self.header) if self.header is not None else {}
        own = str(config.get("torch_dtype", self.metadata.get("torch_dtype", ""))).removeprefix("torch.")
        dtype = settings.dtype or (row.defaults.dtype if row.defaults else "half")
        if self.capability < _AMPERE and (dtype == "bfloat16" or (dtype == "auto" and own == "bfloat16")):
            why = "`dtype: bfloat16`" if dtype == "bfloat16" else "`dtype: auto` takes the model's own bfloat16, which"
            yield self.refuse(
                "vllm-bfloat16",
                f"{why} needs compute capability 8.0; the card has {self.capability / 10:.1f}",
                "`dtype: half`",
            )
        elif self.capability < _AMPERE and own == "bfloat16" and dtype in ("half", "float16"):
            yield self.info(
                "vllm-half-of-bfloat16",
                "the model was trained in bfloat16 and is computed in fp16: values above 65504 overflow, which shows in the text",
            )
        method = quantization_method(settings, self.header, self.capability)
        if dtype in ("float", "float32") and method in ("gptq", "awq", "gptq_marlin", "awq_marlin"):
            yield self.refuse("vllm-quantization-dtype", f"{method} computes in fp16 only, not in float32", "`dtype: half`")

    def context_rules(self, row: VllmRow) -> Iterator[Rule]:
        if self.header is None:
            return
        limit = context_limit(self.header, self.settings, row)
        context = vllm.context_per_request(self.settings)
        if limit is None or context <= limit.tokens:
            return
        scaling = self.settings.rope_scaling
        factor = ""
        if scaling is None and text_config(self.header).get("rope_scaling") is None and "window" not in limit.why:
            needed = math.ceil(context / limit.tokens)
            factor = (
                f", or `rope_scaling: {{kind: yarn, factor: {needed}, original_context_length: {limit.tokens}}}` "
                "if the model's card allows it"
            )
        yield self.refuse(
            "vllm-context-above-limit",
            f"context_length {context} is above the {limit.tokens} that the model allows ({limit.why}); the engine refuses it",
            f"`context_length: {limit.tokens}`{factor}",
        )

    def parallel_rules(self, row: VllmRow) -> Iterator[Rule]:
        if self.header is None:
            return
        try:
            model = shape(self.header, row)
        except UnknownModelError:
            return
        head_sizes = row.head_sizes
        if head_sizes and model.kv_parts == 2 and model.head_size not in head_sizes:
            yield self.refuse(
                "vllm-head-size",
                f"its heads have {model.head_size} elements; vLLM's kernels for this card know {', '.join(map(str, head_sizes))}",
                _LLAMA_CPP,
            )
        count = len(self.cards)
        if count <= 1:
            return
        uneven = model.heads % count or (model.kv_heads % count if model.kv_heads >= count else count % model.kv_heads)
        fitting = [
            number
            for number in range(count - 1, 0, -1)
            if model.heads % number == 0 and (model.kv_heads % number == 0 or number % model.kv_heads == 0)
        ]
        if uneven:
            yield self.refuse(
                "vllm-heads-not-divisible",
                f"{model.heads} attention heads and {model.kv_heads} key-value heads cannot be divided among {count} cards",
                f"{fitting[0]} of `gpus`",
            )
            return
        own = self.metadata.get("quantization_config")
        group = own.get("group_size") if isinstance(own, Mapping) else None
        if isinstance(group, int) and group > 0 and model.intermediate % (count * group):
            yield self.refuse(
                "vllm-groups-not-divisible",
                f"{model.intermediate} rows in groups of {group} cannot be divided among {count} cards",
                f"{next((number for number in fitting if not model.intermediate % (number * group)), 1)} of `gpus`",
            )

    def memory_rules(self, row: VllmRow) -> Iterator[Rule]:
        if self.header is None or not self.cards:
            return
        moving = vllm.moves_memory(self.spec.extra_args, row)
        if moving is not None:
            reason = f"`{moving}` in `extra_args` decides what lies on the cards, so the model's memory is not computed"
            yield self.warn("vllm-memory-unknown", reason, "leave it out, or look at `nvidia-smi` after a start by hand")
            return
        method = quantization_method(self.settings, self.header, self.capability)
        limit = context_limit(self.header, self.settings, row)
        context = vllm.context_per_request(self.settings)
        launch = launch_of(self.settings, row, method)
        try:
            found = estimate(self.header, launch, row, self.cards, limit=limit.tokens if limit else context)
        except UnknownModelError as error:
            yield self.warn("vllm-memory-unknown", f"how much memory the model takes is not known: {error.message}", error.hint)
            return
        yield from self._fit_rules(found, context, launch.gpu_memory_utilization)

    def _fit_rules(self, found: VllmEstimate, context: int, utilization: float) -> Iterator[Rule]:
        total = min(card.total_bytes for card in self.cards)
        share = total * utilization
        numbers = (
            f"{utilization:.2f} of {gib(total)} is {gib(share)}; weights take {gib(found.weights_bytes)} and one step "
            f"{gib(found.step_bytes)}"
        )
        if found.left_bytes > 0 and found.short_bytes > 0:
            budget = min(found.budgets.values(), key=lambda item: item.free_bytes)
            beside = budget.peak_bytes + budget.reserve_bytes - int(budget.total_bytes * utilization)
            fits = math.floor((1 - (beside / budget.total_bytes)) * 100) / 100
            yield self.refuse(
                "vllm-utilization-too-high",
                f"{utilization:.2f} of {gib(budget.total_bytes)} leaves {gib(budget.total_bytes * (1 - utilization))}, and CUDA "
                f"itself, captured graphs and a margin take {gib(beside)} beside that share",
                f"`gpu_memory_utilization: {fits:.2f}`",
            )
            if fits < utilization:
                return
        if found.tokens >= context:
            return
        if found.largest_context <= 0:
            yield self.refuse(
                "vllm-model-does-not-fit",
                f"{numbers}: nothing is left for a cache",
                f"a smaller model, more `gpus`, or {_LLAMA_CPP}",
            )
            return
        yield self.refuse(
            "vllm-cache-too-small",
            f"{numbers}, so the cache holds {found.tokens} tokens ({found.kv_bytes_per_token // 1024} KiB each), less than one "
            f"request of {context}: the engine does not start",
            f"`context_length: {found.largest_context}`",
        )


def quantization_method(settings: Settings, header: ModelHeader | None, capability: int) -> str | None:
    """The method that will run: what is asked, else what the model's own configuration says.

    A GPTQ or AWQ checkpoint turns into its Marlin form by itself only where that runs, from compute capability 8.0 on.
    """
    if settings.quantization:
        return settings.quantization.lower()
    own = None
    if header is not None:
        own = header.metadata.get("quantization_config") or header.metadata.get("compression_config")
    method = str(own.get("quant_method", "")).lower() if isinstance(own, Mapping) else ""
    if method in ("gptq", "awq") and capability >= _AMPERE:
        return f"{method}_marlin"
    return method or None


def vllm_argv_rules(name: str, problems: Sequence[ArgvProblem]) -> Iterator[Rule]:
    """What the version's parser says of an instance's whole argv, ``extra_args`` included."""
    for problem in problems:
        yield Rule(
            "vllm-argument" if problem.fatal else "vllm-argument-deprecated",
            "refuse" if problem.fatal else "warn",
            problem.message,
            f"`{problem.meant}`" if problem.meant else "leave it out",
            instance=name,
        )


def vllm_release_rules(name: str, config: HostConfig, facts: Facts, row: VllmRow, catalog: Catalog) -> Iterator[Rule]:
    """Can this host get and run what the inventory asks for: is there a lock for its Python, or a file of the user's own?"""
    cache = facts.filesystems.get(vllm.CACHE_ROOT)
    if cache is not None and cache.no_exec:
        yield Rule(
            "vllm-cache-noexec",
            "refuse",
            f"Triton loads the kernels that it compiles from {vllm.cache_directory(name)}, and {cache.mount} is mounted `noexec`",
            f"`mount -o remount,exec {cache.mount}`, and the same in /etc/fstab, or {_LLAMA_CPP}",
            instance=name,
        )
    if vllm.own_build(config):
        if not config.vllm_requirements_sha256:
            yield Rule(
                "vllm-requirements-unpinned",
                "refuse",
                f"`vllm_requirements: {config.vllm_requirements}` stands without its sha256: a changed file would go unnoticed",
                f"`vllm_requirements_sha256:` with what `sha256sum {config.vllm_requirements}` prints",
                instance=name,
            )
            return
        yield Rule(
            "vllm-build-unknown",
            "warn",
            f"nothing is known about the build of `{config.vllm_requirements}`: its flags are spelled as in {row.version}, and "
            "neither they nor the model, its quantisation and its memory were checked",
            "its own parser reads the command line on the host before anything of a running server is replaced",
            instance=name,
        )
        return
    if row.lock is None:
        locked = [item.version for item in catalog.vllm_rows if item.lock is not None]
        yield Rule(
            "vllm-version-without-lock",
            "refuse",
            f"no lock of vLLM {row.version} comes with this version, and what a plain installation gets today does not import",
            " or ".join(f"`vllm_version: {version}`" for version in locked) + ", or `vllm_requirements` with a lock of your own",
            instance=name,
        )
        return
    python = vllm.host_python(facts)
    if python not in row.lock.pythons:
        rows = [item for item in catalog.distributions if item.python in row.lock.pythons]
        yield Rule(
            "vllm-python",
            "refuse",
            f"vLLM {row.version} has wheels for Python {row.lock.pythons[0]} to {row.lock.pythons[-1]}; "
            f"the host has {facts.python.version or 'none'}",
            f"{', '.join(item.name for item in rows)}, or {_LLAMA_CPP}",
            instance=name,
        )


def vllm_unspelled_rule(name: str, row: VllmRow, error: vllm.UnspelledSettingError, catalog: Catalog) -> Rule:
    """This version has no words for what a setting says."""
    able = [version for version in error.versions(catalog.vllm_rows) if version != row.version]
    return Rule(
        "setting-unspelled",
        "refuse",
        f"vLLM {row.version} has no way to say `{error.setting}: {error.value}`",
        f"leave `{error.setting}` out" + (f", or `vllm_version: {able[-1]}`" if able else ""),
        instance=name,
    )


def vllm_extra_args_rules(name: str, spec: InstanceSpec, row: VllmRow) -> Iterator[Rule]:
    """Rules about words for the engine's own command line: none may say what the plan has to know, or show a secret."""
    parser, settings = row.parser, row.settings()
    if parser is None:
        return
    for word, argument, _, _ in vllm.split_argv(spec.extra_args, parser):
        if word.partition("=")[0].replace("_", "-") in row.reads_arguments:
            yield Rule(
                "extra-args-setting",
                "refuse",
                f"`{word.partition('=')[0]}` in `extra_args` would read further arguments from a file, past every check",
                "its contents as `settings`, and what no setting says in `extra_args`",
                instance=name,
            )
            continue
        if argument is None:
            continue
        flag = argument.names[0]
        shown = word.partition("=")[0]
        if flag in row.secret_flags:
            yield Rule(
                "extra-args-secret",
                "refuse",
                f"`{shown}` in `extra_args` would show a secret to every user of the host, in reports and in the unit",
                "leave it out",
                instance=name,
            )
        elif flag in settings:
            # A model is always spread over all the cards that its instance gets.
            setting = "gpus" if settings[flag] == "tensor_parallel" else settings[flag]
            yield Rule(
                "extra-args-setting",
                "refuse",
                f"`{shown}` in `extra_args` would say again, and past every check, what the plan says with `{setting}`",
                f"`{setting}` in the inventory",
                instance=name,
            )


def vllm_sharing_rules(
    config: HostConfig,
    cards_by_instance: Mapping[str, Sequence[str]],
    catalog: Catalog,
    budgets: Mapping[str, Mapping[str, GpuBudget]] | None = None,
) -> Iterator[Rule]:
    """Several instances of vLLM on one card: each takes its share of the whole card, whatever the others take.

    Args:
        config: The host's variables, profiles applied.
        cards_by_instance: The UUIDs of each instance's cards.
        catalog: For the version's default share.
        budgets: What an instance takes of each card, where it is known: CUDA itself and captured graphs lie beside its share.
    """
    row = catalog.vllm(config.vllm_version)
    default = row.defaults.gpu_memory_utilization if row and row.defaults else 0.9
    shares: dict[str, dict[str, float]] = {}
    beside: dict[str, float] = {}
    for name, spec in sorted(config.llm_server_instances.items()):
        if spec.engine == "vllm" and spec.state == "present":
            for uuid in cards_by_instance.get(name, ()):
                shares.setdefault(uuid, {})[name] = spec.settings.gpu_memory_utilization or default
                budget = (budgets or {}).get(name, {}).get(uuid)
                beside[uuid] = beside.get(uuid, 0.0) + (budget.context_bytes / budget.total_bytes if budget else 0.0)
    told: set[tuple[str, ...]] = set()
    for uuid, users in shares.items():
        names = tuple(users)
        total = sum(users.values())
        if len(users) > 1 and total + beside[uuid] > 1 and names not in told:
            told.add(names)
            each = math.floor(100 * min(0.95, 1 - beside[uuid]) / len(users)) / 100
            parts = " + ".join(f"{share:.2f}" for share in users.values())
            more = f", and {beside[uuid]:.2f} for CUDA itself and captured graphs beside that" if beside[uuid] else ""
            yield Rule(
                "vllm-shares-above-card",
                "refuse",
                f"{' and '.join(names)} share a card and take {parts} = {total:.2f} of it{more}",
                f"`gpu_memory_utilization: {each:.2f}` for each, or another card for {names[-1]}",
            )
