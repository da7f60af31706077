"""Rules about building and running an engine on a host."""

from __future__ import annotations

from collections.abc import Iterator

from v100ctl.catalog import Catalog, LlamaCppBuild
from v100ctl.facts import Facts
from v100ctl.fleet import HostConfig
from v100ctl.plan.types import Rule

_X86_LEVELS = ("x86-64", "x86-64-v2", "x86-64-v3", "x86-64-v4")


def engine_rules(config: HostConfig, facts: Facts, row: LlamaCppBuild | None, catalog: Catalog) -> Iterator[Rule]:
    """Rules about building and running the engine on this host."""
    if row is None:
        known = sorted(item.build for item in catalog.llama_cpp)
        near = min(known, key=lambda build: abs(build - config.llama_cpp_build))
        yield Rule(
            "llama-cpp-build-unknown",
            "refuse",
            f"llama.cpp {config.llama_cpp_build} has no row in the catalog of {catalog.as_of}",
            f"build {near}; known are {', '.join(map(str, known))}",
        )
        return
    level = facts.cpu.level
    if config.llama_cpp_backend == "cpu" and level in _X86_LEVELS and _X86_LEVELS.index(level) < _X86_LEVELS.index(row.cpu_level):
        yield Rule(
            "cpu-level",
            "refuse",
            f"the processor ({facts.cpu.model or 'unknown'}) is {level}; llama.cpp {row.build} is built for {row.cpu_level}",
            "a processor with AVX2, FMA, F16C and BMI2 (Intel Haswell, AMD Excavator or newer)",
        )
