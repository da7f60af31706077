"""Rules about one instance: how it is reached, what is asked of its engine, what it must not share with its neighbours."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator

from v100ctl.catalog import Catalog, LlamaCppBuild
from v100ctl.facts import Facts
from v100ctl.fleet import HostConfig, InstanceSpec
from v100ctl.plan import adoption, llama_cpp
from v100ctl.plan.keys import is_loopback
from v100ctl.plan.rules.host import memory_bytes
from v100ctl.plan.rules.text import gib
from v100ctl.plan.types import Model, Rule

_UNAUTHENTICATED_HINT = (
    "`api_keys`, `listen: 127.0.0.1`, or `llm_server_allow_unauthenticated: true` on a network where everyone may use it"
)


def instance_rules(
    name: str, spec: InstanceSpec, config: HostConfig, row: LlamaCppBuild | None, catalog: Catalog
) -> Iterator[Rule]:
    """Rules about one instance that need no host."""
    if not spec.keys and not is_loopback(spec.listen) and not config.llm_server_allow_unauthenticated:
        yield Rule(
            "listen-unauthenticated",
            "refuse",
            f"listening on {spec.listen} would let anyone on that network use the server",
            _UNAUTHENTICATED_HINT,
            instance=name,
        )
    if spec.engine == "llama_cpp" and spec.gpus and config.llama_cpp_backend == "cpu":
        yield Rule("gpus-without-cuda", "refuse", "`gpus` is given, but the backend is cpu", "`gpus: []`", instance=name)
    settings = spec.settings
    if spec.engine != "llama_cpp" or row is None:
        return
    for setting, why in llama_cpp.meaningless_settings(settings).items():
        yield Rule(
            "setting-meaningless",
            "refuse",
            f"`{setting}` has no meaning for llama.cpp: {why}",
            f"leave `{setting}` out",
            instance=name,
        )
    quantised_v = settings.kv_cache_type_v not in (None, "f32", "f16", "bf16")
    if row.quantised_v_needs_flash_attention and quantised_v and settings.flash_attention == "off":
        yield Rule(
            "quantised-v-needs-flash-attention",
            "refuse",
            f"a {settings.kv_cache_type_v} V cache with flash attention off is refused by the engine at start",
            "`flash_attention: on`, or `kv_cache_type_v: f16`",
            instance=name,
        )
    if settings.kv_unified and (settings.parallel or 1) > 1:
        yield Rule(
            "context-shared",
            "info",
            f"{settings.parallel} requests share one pool of {llama_cpp.context_per_request(settings)} tokens: "
            "one may use all of it only while the others need little",
            None,
            instance=name,
        )
    if settings.batch_size and settings.ubatch_size and settings.ubatch_size > settings.batch_size:
        yield Rule(
            "ubatch-above-batch",
            "warn",
            f"ubatch_size {settings.ubatch_size} is above batch_size {settings.batch_size}: the engine lowers it",
            f"`ubatch_size: {settings.batch_size}`",
            instance=name,
        )


def extra_args_rules(name: str, spec: InstanceSpec, row: LlamaCppBuild, catalog: Catalog) -> Iterator[Rule]:
    """Rules about words for the engine's own command line: none may say what the plan has to know."""
    if not spec.extra_args:
        return
    settings = llama_cpp.settings_by_flag(row, catalog.llama_cpp_parser(row.build))
    for word in spec.extra_args:
        # The engine's parser reads `_` in a flag as `-`. It knows neither `FLAG=VALUE` nor capitals, and a secret after those is
        # a secret all the same.
        flag = word.partition("=")[0]
        flag = flag.replace("_", "-").lower() if flag.startswith("--") else flag
        if flag in row.secret_flags:
            yield Rule(
                "extra-args-secret",
                "refuse",
                f"`{flag}` in `extra_args` would show a secret to every user of the host, in reports and in the unit",
                "leave it out",
                instance=name,
            )
        elif flag in settings:
            yield Rule(
                "extra-args-setting",
                "refuse",
                f"`{flag}` in `extra_args` would say again, and past every check, what the plan says with `{settings[flag]}`",
                f"`{settings[flag]}` in the inventory",
                instance=name,
            )


def unspelled_rule(name: str, row: LlamaCppBuild, error: llama_cpp.UnspelledSettingError, catalog: Catalog) -> Rule:
    """This build has no words for what a setting says."""
    able = error.builds(catalog.llama_cpp)
    return Rule(
        "setting-unspelled",
        "refuse",
        f"llama.cpp {row.build} has no way to say `{error.setting}: {error.value}`",
        f"leave `{error.setting}` out, or `llama_cpp_build: {able[-1]}`" if able else f"leave `{error.setting}` out",
        instance=name,
    )


def argv_rules(name: str, argv: tuple[str, ...], row: LlamaCppBuild, catalog: Catalog) -> Iterator[Rule]:
    """The whole command line, held against what the build's own source says that its parser takes."""
    parser = catalog.llama_cpp_parser(row.build)
    if parser is None:
        return
    for problem in llama_cpp.check_argv(argv, parser):
        yield Rule(
            "argv-refused" if problem.fatal else "argv-deprecated",
            "refuse" if problem.fatal else "warn",
            f"llama.cpp {row.build} would not start: {problem.message}" if problem.fatal else problem.message,
            f"`{problem.meant}`" if problem.meant else "leave it out of `extra_args`",
            instance=name,
        )


def kv_kernel_rules(name: str, spec: InstanceSpec, row: LlamaCppBuild, *, all_types: bool = False) -> Iterator[Rule]:
    """On a card: has the build a flash-attention kernel for this pair of cache types? ``all_types``: was it compiled for all?"""
    settings = spec.settings
    if settings.flash_attention == "off":
        return
    type_k, type_v = (value or row.defaults.kv_cache_type for value in (settings.kv_cache_type_k, settings.kv_cache_type_v))
    kernel = row.cuda_flash_attention.kernel(type_k, type_v, all_types=all_types)
    if kernel == "compiled":
        return
    like_k = f"`kv_cache_type_v: {type_k}`"
    pairs = ", ".join(row.cuda_flash_attention.pairs)
    if kernel == "converted":
        yield Rule(
            "kv-types-converted",
            "warn",
            f"llama.cpp {row.build} has no kernel for a {type_k} K cache with a {type_v} V cache: it converts both at every step",
            f"{like_k if f'{type_k}-{type_k}' in row.cuda_flash_attention.pairs else 'one of the compiled pairs'} ({pairs})",
            instance=name,
        )
    else:
        yield Rule(
            "kv-types-without-kernel",
            "refuse",
            f"llama.cpp {row.build} has no CUDA kernel for a {type_k} K cache with a {type_v} V cache: "
            "attention would run on the processor, tens of times slower",
            f"{like_k if f'{type_k}-{type_k}' in row.cuda_flash_attention.pairs else 'one of the compiled pairs'} ({pairs})",
            instance=name,
        )


def port_rules(
    name: str, spec: InstanceSpec, facts: Facts, ours: Collection[str], leaving: Collection[int] = ()
) -> Iterator[Rule]:
    """Whether somebody else listens where ``spec`` wants to. ``leaving``: processes that are stopped before."""
    for listener in adoption.taking(spec, facts, ours):
        if listener.pid in leaving:
            continue
        occupant = facts.occupant(listener.pid)
        owner = f"`{listener.command}` (pid {listener.pid})" if listener.pid else "another process"
        taken = {item.port for item in facts.listeners}
        free = next((port for port in range(spec.port + 1, 65536) if port not in taken), None)
        kept = adoption.stays(occupant) if occupant else None
        stop = "stop it"
        if kept is not None:
            stop = kept[1]
        elif occupant is not None:
            stop = f"`v100ctl provision --adopt {name}`, which stops it"
        yield Rule(
            "port-taken",
            "refuse",
            f"port {spec.port} on {listener.address} is taken by {adoption.who(occupant) if occupant else owner}",
            f"{stop}, or `port: {free}`" if free else stop,
            instance=name,
        )
        break


def placement_rules(
    name: str,
    spec: InstanceSpec,
    model: Model,
    unit: str,
    facts: Facts,
    *,
    going: Collection[str],
    leaving: Collection[int],
    on_cards: bool,
) -> Iterator[Rule]:
    """Rules about one instance on this host: its port and its model.

    ``going``: units that are stopped before it starts, ``leaving``: processes of others that are.
    """
    yield from port_rules(name, spec, facts, {unit, *going}, leaving)
    if model.source["kind"] == "host":
        missing = [file.path for file in model.files if (found := facts.models.get(file.path)) is not None and not found.exists]
        if missing:
            several = f": {len(missing)} of {len(model.files)} files are missing" if len(model.files) > 1 else ""
            yield Rule(
                "model-missing",
                "refuse",
                f"the model {model.path} is not on the host{several}",
                "copy it there, or give `url:` or `from_controller:` instead of `path:`",
                instance=name,
            )
        if re.match(r"/(tmp|var/tmp)/", model.path):
            yield Rule(
                "model-hidden",
                "refuse",
                f"the unit has a private /tmp and would not see {model.path}",
                "a folder such as /srv/models",
                instance=name,
            )
    size_bytes = model.size_bytes or sum(facts.models[file.path].size_bytes for file in model.files if file.path in facts.models)
    total_bytes = memory_bytes(facts)
    # Weights that go to a card are only mapped while they are copied; the processor's own must stay in memory.
    if not on_cards and size_bytes and total_bytes and size_bytes > total_bytes:
        yield Rule(
            "model-above-memory",
            "refuse",
            f"the model's {gib(size_bytes)} do not fit into the host's {gib(total_bytes)} of memory",
            "a smaller model or quantisation",
            instance=name,
        )
    locked_bytes = facts.limits.memlock_hard_bytes
    locks = "mlock" in (spec.settings.load_mode or "")
    # The unit asks for no limit; a container's own ceiling stays.
    if locks and size_bytes and locked_bytes is not None and locked_bytes < size_bytes:
        yield Rule(
            "limit-memlock",
            "warn",
            f"`load_mode: {spec.settings.load_mode}` locks {gib(size_bytes)} into memory; this host allows {gib(locked_bytes)}",
            "`load_mode: none`, or the container's memlock limit raised",
            instance=name,
        )


def host_memory_rules(name: str, needed_bytes: int, spec: InstanceSpec, facts: Facts) -> Iterator[Rule]:
    """On the processor: do weights, cache and buffers fit into the host's memory together?"""
    total_bytes = memory_bytes(facts)
    if total_bytes and needed_bytes > total_bytes:
        yield Rule(
            "memory-too-small",
            "refuse",
            f"weights, cache and buffers take {gib(needed_bytes)}, and the host has {gib(total_bytes)} of memory",
            "a shorter `context_length`, fewer `parallel`, or a smaller quantisation",
            instance=name,
        )


def fleet_of_one_rules(config: HostConfig) -> Iterator[Rule]:
    """Rules between the instances of one host."""
    by_port: dict[int, list[str]] = {}
    for name, spec in config.llm_server_instances.items():
        if spec.state == "present":
            by_port.setdefault(spec.port, []).append(name)
    for port, names in by_port.items():
        if len(names) > 1:
            yield Rule(
                "port-twice", "refuse", f"port {port} is given to {' and '.join(names)}", f"`port: {port + 1}` for one of them"
            )
    hashes: dict[str, set[str]] = {}
    for spec in config.llm_server_instances.values():
        if spec.state == "present" and spec.model.path is not None:
            hashes.setdefault(spec.model.path, set()).add(spec.model.source_digest)
    for path, sha256s in hashes.items():
        if len(sha256s) > 1:
            yield Rule(
                "model-two-hashes",
                "refuse",
                f"the model {path} is given with {len(sha256s)} values of sha256: {', '.join(sorted(sha256s))}",
                f"one: `sha256sum {path}` on the host prints it",
            )
    # In front of others a host need not serve itself.
    if not by_port and config.gateway_placement != "fleet":
        yield Rule("nothing-to-serve", "info", "no instance is configured for this host", "an entry in `llm_server_instances`")
