"""llama.cpp: a release to build and an argv to run, spelled for the pinned build by the catalog."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from v100ctl.catalog import Distribution, LlamaCppBuild
from v100ctl.facts import Facts
from v100ctl.fleet import HostConfig, InstanceSpec, Settings
from v100ctl.plan.types import Release

ENGINES_DIR = "/opt/v100ctl/engines"
#: Bumped when the build script lays a release out differently, so that an old copy in a cache is not taken for a new one.
RELEASE_LAYOUT = 1
DEFAULT_CONTEXT_LENGTH = 4096
DEFAULT_PARALLEL = 1


def build_release(config: HostConfig, row: LlamaCppBuild, distribution: Distribution, facts: Facts) -> Release:
    """The release that a host needs.

    Its id hashes everything that decides the bytes: source tree, options, targets, backend, architectures, C library and machine.
    """
    options = dict(row.cmake_options.common)
    options["LLAMA_BUILD_NUMBER"] = str(row.build)
    options["LLAMA_BUILD_COMMIT"] = row.commit
    architectures: list[str] = []
    if config.llama_cpp_backend == "cuda":
        options.update(row.cmake_options.cuda)
        options["GGML_CUDA_FORCE_MMQ"] = "ON" if config.llama_cpp_force_mmq else "OFF"
        options["CMAKE_CUDA_ARCHITECTURES"] = config.llama_cpp_cuda_architectures
        architectures = config.llama_cpp_cuda_architectures.split(";")
    build: dict[str, Any] = {
        "schema": "v100ctl/build/1",
        "engine": "llama_cpp",
        "build_number": row.build,
        "commit": row.commit,
        "backend": config.llama_cpp_backend,
        "source": {
            "archives": [archive.model_dump(exclude_none=True) for archive in row.archives],
            "tree_sha256": row.tree_sha256,
        },
        "cmake_options": dict(sorted(options.items())),
        "targets": list(row.targets),
        "cuda_architectures": architectures,
        "libc": f"{facts.libc.name}-{facts.libc.version}",
        "machine": facts.machine,
        "licence": row.licence,
    }
    decides = {key: value for key, value in build.items() if key != "source"}
    decides |= {"tree_sha256": row.tree_sha256, "layout": RELEASE_LAYOUT}
    digest = hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()[:12]
    build_id = f"b{row.build}-{config.llama_cpp_backend}-{digest}"
    build["build_id"] = build_id
    return Release(
        engine="llama_cpp",
        build_id=build_id,
        path=f"{ENGINES_DIR}/llama_cpp/{build_id}",
        build=build,
        toolchain_packages=distribution.toolchain_packages,
    )


def context_per_request(settings: Settings) -> int:
    """Tokens that one request may use."""
    return settings.context_length or DEFAULT_CONTEXT_LENGTH


def _values(config: HostConfig, spec: InstanceSpec, facts: Facts, model_path: str, alias: str) -> Iterator[tuple[str, Any]]:
    settings = spec.settings
    parallel = settings.parallel or DEFAULT_PARALLEL
    yield "model", model_path
    yield "served_model_name", alias
    yield "listen", spec.listen
    yield "port", spec.port
    # The engine's context is shared by its slots, so a request's own length is multiplied, unless the pool is one for all.
    yield "context_length", context_per_request(settings) * (1 if settings.kv_unified else parallel)
    # Explicit always: the engine's own default is several slots, which would divide the context.
    yield "parallel", parallel
    yield "kv_unified", settings.kv_unified
    yield "batch_size", settings.batch_size
    yield "ubatch_size", settings.ubatch_size
    yield "kv_cache_type_k", settings.kv_cache_type_k
    yield "kv_cache_type_v", settings.kv_cache_type_v
    yield "flash_attention", settings.flash_attention
    if config.llama_cpp_backend == "cuda":
        yield "gpu_layers", 99 if settings.gpu_layers is None else settings.gpu_layers
        yield "split_mode", settings.split_mode
    yield "threads", settings.threads or default_threads(facts)
    yield "threads_batch", settings.threads_batch or settings.threads or default_threads(facts)
    yield "load_mode", settings.load_mode
    if settings.sampling:
        yield from settings.sampling.model_dump(exclude_none=True).items()
    yield "metrics", True if settings.metrics is None else settings.metrics


def default_threads(facts: Facts) -> int:
    """One thread a physical core that the host may use: hyper-threads slow llama.cpp's matrix work down."""
    counts = [count for count in (facts.cpu.physical_count, facts.cpu.usable_count) if count > 0]
    return min(counts, default=1)


def argv(
    config: HostConfig, spec: InstanceSpec, row: LlamaCppBuild, facts: Facts, *, release_path: str, model_path: str, alias: str
) -> tuple[str, ...]:
    """The exact words that start the server.

    Raises:
        KeyError: this build has no spelling for a setting that was asked for; ``args[0]`` names the setting.
    """
    words = [f"{release_path}/bin/llama-server"]
    for setting, value in _values(config, spec, facts, model_path, alias):
        if value is None:
            continue
        flag = row.flags.flag(setting)
        if isinstance(value, bool):
            if isinstance(flag, Mapping):
                spelled = flag.get("true" if value else "false")
                words += [spelled] if spelled else []
                continue
            raise KeyError(setting)
        if not isinstance(flag, str):
            raise KeyError(setting)
        words += [flag, _number(value) if isinstance(value, float) else str(value)]
    for extra in row.flags.always:
        words += extra
    return (*words, *spec.extra_args)


def _number(value: float) -> str:
    return repr(value).removesuffix(".0")
