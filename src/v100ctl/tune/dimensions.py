"""What can be tuned: a setting of the inventory and the values worth trying, as data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from v100ctl.facts import Facts
from v100ctl.fleet import HostConfig, InstanceSpec
from v100ctl.plan.llama_cpp import default_threads
from v100ctl.plan.numa import usable_nodes
from v100ctl.plan.types import Instance
from v100ctl.tune.objectives import Name

#: A path into a host's variables; ``INSTANCE`` stands for the instance's name, a word in brackets for a flag of `extra_args`.
Path = tuple[str, ...]
_SETTINGS: Path = ("llm_server_instances", "INSTANCE", "settings")
_EXTRA: Path = ("llm_server_instances", "INSTANCE", "extra_args")


@dataclass(frozen=True)
class Around:
    """What values depend on."""

    config: HostConfig
    spec: InstanceSpec
    facts: Facts
    live: Instance
    power_range_w: tuple[int, int] | None = None


@dataclass(frozen=True)
class Dimension:
    """One thing that can be tuned.

    Attributes:
        name: What ``--dimension`` calls it.
        set: A value in words -> path -> what the inventory says then.
        values: The words that are tried where the user names none.
        objectives: For which it is tried without being asked for; none: only when asked for.
        quality: Whether it may change what the model says.
        engines: For which engines.
    """

    name: str
    set: Callable[[str], Mapping[Path, Any]]
    values: Callable[[Around], Sequence[str]]
    objectives: tuple[Name, ...] = ()
    quality: bool = False
    engines: tuple[str, ...] = ("llama_cpp",)


def _setting(*names: str, kind: Callable[[str], Any] = str) -> Callable[[str], Mapping[Path, Any]]:
    return lambda word: {(*_SETTINGS, *name.split(".")): kind(word) for name in names}


def _speculative(word: str) -> Mapping[Path, Any]:
    kind, _, depth = word.partition(":")
    found: dict[Path, Any] = {(*_SETTINGS, "speculative", "kind"): kind}
    if depth:
        found[(*_SETTINGS, "speculative", "depth")] = int(depth)
    return found


def _numa(word: str) -> Mapping[Path, Any]:
    return {("llm_server_instances", "INSTANCE", "numa"): int(word) if word.isdigit() else word}


def _drafts(around: Around) -> Sequence[str]:
    """Depths of the kind that the instance drafts with, and the kinds that need nothing more than the model itself."""
    speculative = around.spec.settings.speculative
    kind = speculative.kind if speculative else "none"
    if kind == "draft":
        return ("none", "draft:2", "draft:4", "draft:8")
    return ("none", "mtp:1", "mtp:2", "mtp:3", "ngram:4")


def _threads(around: Around) -> Sequence[str]:
    most = default_threads(around.facts)
    return [str(count) for count in sorted({max(1, most // 4), max(1, most // 2), most})]


def _nodes(around: Around) -> Sequence[str]:
    nodes = usable_nodes(around.facts)
    return ["off", *map(str, sorted(nodes))] if len(nodes) > 1 else []


def _power(around: Around) -> Sequence[str]:
    if around.power_range_w is None:
        return []
    least, most = around.power_range_w
    return [str(least + (most - least) * part // 4) for part in range(5)]


_UBATCHES, _BATCHES = ("256", "512", "1024", "2048"), ("512", "1024", "2048", "4096")
_KV = ("f16", "q8_0", "q4_0")
_ALL: tuple[Name, ...] = ("latency", "throughput", "energy")
#: In the order in which they are tried.
DIMENSIONS: tuple[Dimension, ...] = (
    Dimension("flash_attention", _setting("flash_attention"), lambda _: ("on", "off"), _ALL),
    Dimension("kv_cache_type", _setting("kv_cache_type_k", "kv_cache_type_v"), lambda _: _KV, (*_ALL, "context"), quality=True),
    Dimension("ubatch_size", _setting("ubatch_size", kind=int), lambda _: _UBATCHES, ("throughput", "energy")),
    Dimension("batch_size", _setting("batch_size", kind=int), lambda _: _BATCHES, ("throughput", "energy")),
    Dimension("parallel", _setting("parallel", kind=int), lambda _: ("1", "2", "4", "8"), ("throughput",)),
    Dimension("threads", _setting("threads", kind=int), _threads, ("latency",)),
    Dimension("numa", _numa, _nodes, ("latency",), engines=("llama_cpp", "vllm")),
    Dimension("speculative", _speculative, _drafts, ("latency",)),
    Dimension("cache_ram", lambda word: {(*_EXTRA, "[--cache-ram]"): word}, lambda _: ("0",), ("latency",)),
    Dimension("context_length", _setting("context_length", kind=int), lambda _: (), ("context",)),
    Dimension("force_mmq", lambda word: {("llama_cpp_force_mmq",): word == "true"}, lambda _: ("true", "false"), quality=True),
    Dimension("power_limit", lambda word: {("gpu_tuning_power_limit_w",): int(word)}, _power, engines=("llama_cpp", "vllm")),
)
BY_NAME: Mapping[str, Dimension] = {item.name: item for item in DIMENSIONS}
