"""Rules about one instance: how it is reached, what is asked of its engine, what it must not share with its neighbours."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator

from v100ctl.catalog import LlamaCppBuild
from v100ctl.facts import Facts
from v100ctl.fleet import HostConfig, InstanceSpec
from v100ctl.plan.rules._text import gib
from v100ctl.plan.types import Model, Rule

_UNAUTHENTICATED_HINT = "`listen: 127.0.0.1`, or `llm_server_allow_unauthenticated: true` on a network where everyone may use it"


def instance_rules(name: str, spec: InstanceSpec, config: HostConfig, row: LlamaCppBuild | None) -> Iterator[Rule]:
    """Rules about one instance that need no host."""
    if spec.engine != "llama_cpp":
        yield Rule(
            "engine-unavailable",
            "refuse",
            f"this version cannot install the engine {spec.engine}",
            "`engine: llama_cpp`",
            instance=name,
        )
    if spec.profile is not None:
        yield Rule(
            "profile-unknown",
            "refuse",
            f"the catalog has no profile `{spec.profile}`",
            "write the profile's values into `settings`",
            instance=name,
        )
    loopback = spec.listen == "::1" or spec.listen.startswith("127.")
    if spec.api_keys is not None:
        yield Rule(
            "api-keys-unavailable",
            "refuse",
            "this version cannot hand API keys to a server yet, and serving without them would not be what you asked",
            _UNAUTHENTICATED_HINT,
            instance=name,
        )
    elif not loopback and not config.llm_server_allow_unauthenticated:
        yield Rule(
            "listen-unauthenticated",
            "refuse",
            f"listening on {spec.listen} would let anyone on that network use the server",
            _UNAUTHENTICATED_HINT,
            instance=name,
        )
    if spec.gpus and config.llama_cpp_backend == "cpu":
        yield Rule("gpus-without-cuda", "refuse", "`gpus` is given, but the backend is cpu", "`gpus: []`", instance=name)
    settings = spec.settings
    quantised_v = settings.kv_cache_type_v not in (None, "f32", "f16", "bf16")
    if row is not None and row.quantised_v_needs_flash_attention and quantised_v and settings.flash_attention == "off":
        yield Rule(
            "quantised-v-needs-flash-attention",
            "refuse",
            f"a {settings.kv_cache_type_v} V cache with flash attention off is refused by the engine at start",
            "`flash_attention: on`, or `kv_cache_type_v: f16`",
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


def extra_args_rules(name: str, spec: InstanceSpec, row: LlamaCppBuild) -> Iterator[Rule]:
    """Rules about words for the engine's own command line: none may say what the plan has to know."""
    settings = row.flags.settings()
    for word in spec.extra_args:
        # The engine's parser reads `_` in a flag as `-`.
        flag = word.replace("_", "-") if word.startswith("--") else word
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


def placement_rules(
    name: str, spec: InstanceSpec, model: Model, unit: str, facts: Facts, *, going: Collection[str]
) -> Iterator[Rule]:
    """Rules about one instance on this host: its port and its model. ``going``: units that are stopped before it starts."""
    for listener in facts.listeners:
        same_address = listener.address in (spec.listen, "0.0.0.0", "::", "*") or spec.listen in ("0.0.0.0", "::")  # noqa: S104 - compared
        if listener.port == spec.port and same_address and listener.unit not in (unit, *going):
            owner = f"`{listener.command}` (pid {listener.pid})" if listener.pid else "another process"
            taken = {item.port for item in facts.listeners}
            free = next((port for port in range(spec.port + 1, 65536) if port not in taken), None)
            yield Rule(
                "port-taken",
                "refuse",
                f"port {spec.port} on {listener.address} is taken by {owner}",
                f"stop it, or `port: {free}`" if free else "stop it",
                instance=name,
            )
            break
    if model.source["kind"] == "host":
        found = facts.models.get(model.path)
        if found is not None and not found.exists:
            yield Rule(
                "model-missing",
                "refuse",
                f"the model {model.path} is not on the host",
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
    size_bytes = model.size_bytes or (facts.models[model.path].size_bytes if model.path in facts.models else 0)
    if size_bytes and facts.memory.total_bytes and size_bytes > facts.memory.total_bytes:
        yield Rule(
            "model-above-memory",
            "refuse",
            f"the model's {gib(size_bytes)} do not fit into the host's {gib(facts.memory.total_bytes)} of memory",
            "a smaller model or quantisation",
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
            hashes.setdefault(spec.model.path, set()).add(spec.model.sha256)
    for path, sha256s in hashes.items():
        if len(sha256s) > 1:
            yield Rule(
                "model-two-hashes",
                "refuse",
                f"the model {path} is given with {len(sha256s)} values of sha256: {', '.join(sorted(sha256s))}",
                f"one: `sha256sum {path}` on the host prints it",
            )
    if not by_port:
        yield Rule("nothing-to-serve", "info", "no instance is configured for this host", "an entry in `llm_server_instances`")
