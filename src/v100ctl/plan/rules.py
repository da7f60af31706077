"""Rules: can this host do what is asked of it?

Each rule is a generator over facts, configuration and catalog; it yields nothing where all is well. Ids are stable: they stand
in JSON, in documentation and in people's scripts.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator

from v100ctl.catalog import Catalog, Distribution, LlamaCppBuild
from v100ctl.facts import Facts
from v100ctl.fleet import HostConfig, InstanceSpec
from v100ctl.plan.types import Model, Release, Rule

_X86_LEVELS = ("x86-64", "x86-64-v2", "x86-64-v3", "x86-64-v4")
#: Space for packages, logs and files made aside, beyond what is counted.
_SPARE_BYTES = 256 * 1024**2
_UNAUTHENTICATED_HINT = "`listen: 127.0.0.1`, or `llm_server_allow_unauthenticated: true` on a network where everyone may use it"


def gib(value_bytes: float) -> str:
    """Bytes for people, in GiB (2^30), or MiB below one."""
    return f"{value_bytes / 1024**3:.1f} GiB" if value_bytes >= 1024**3 else f"{value_bytes / 1024**2:.0f} MiB"


def host_rules(facts: Facts, catalog: Catalog) -> Iterator[Rule]:
    """Rules about the host alone."""
    distribution = catalog.distribution(facts.distribution.id, facts.distribution.version_id)
    if distribution is None:
        found = (
            facts.distribution.name
            or f"{facts.distribution.id} {facts.distribution.version_id}".strip()
            or "an unknown distribution"
        )
        yield Rule(
            "distribution-unsupported",
            "refuse",
            f"{found} has no row in the catalog of {catalog.as_of}",
            ", ".join(row.name for row in catalog.distributions),
        )
    elif distribution.tested == "rendered":
        yield Rule(
            "distribution-untested",
            "info",
            f"{distribution.name}: package names were looked up, but this project's tests do not run there",
            ", ".join(row.name for row in catalog.distributions if row.tested == "run"),
        )
    if facts.machine != "x86_64":
        yield Rule("machine-unsupported", "refuse", f"the machine is {facts.machine or 'unknown'}", "x86_64")
    if facts.systemd is None:
        yield Rule(
            "systemd-missing",
            "refuse",
            "systemd is not the running service manager (PID 1)",
            "a host or container that boots systemd",
        )
    if facts.packages.half_configured:
        names = ", ".join(facts.packages.half_configured[:5])
        yield Rule(
            "packages-half-configured", "warn", f"packages are left half configured: {names}", "`dpkg --configure -a` on the host"
        )
    for filesystem in ("/opt/v100ctl", "/var/lib/v100ctl"):
        found_at = facts.filesystems.get(filesystem)
        if found_at and found_at.read_only:
            yield Rule(
                "filesystem-read-only",
                "refuse",
                f"{filesystem} lies on {found_at.mount}, which is mounted read-only",
                "a writable disk",
            )


def engine_rules(config: HostConfig, facts: Facts, row: LlamaCppBuild | None, catalog: Catalog) -> Iterator[Rule]:
    """Rules about building and running the engine on this host."""
    if row is None:
        known = ", ".join(str(item.build) for item in catalog.llama_cpp)
        yield Rule(
            "llama-cpp-build-unknown", "refuse", f"llama.cpp {config.llama_cpp_build} has no row in the catalog", f"build {known}"
        )
        return
    if config.llama_cpp_backend == "cuda":
        yield Rule(
            "cuda-backend-unavailable",
            "refuse",
            "this version has no roles for the NVIDIA driver and CUDA yet, so the cuda backend cannot be built or served",
            "`llama_cpp_backend: cpu`",
        )
    level = facts.cpu.level
    if config.llama_cpp_backend == "cpu" and level in _X86_LEVELS and _X86_LEVELS.index(level) < _X86_LEVELS.index(row.cpu_level):
        yield Rule(
            "cpu-level",
            "refuse",
            f"the processor ({facts.cpu.model or 'unknown'}) is {level}; llama.cpp {row.build} is built for {row.cpu_level}",
            "a processor with AVX2, FMA, F16C and BMI2 (Intel Haswell, AMD Excavator or newer)",
        )


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


def space_rules(
    releases: tuple[Release, ...], models: tuple[Model, ...], facts: Facts, row: LlamaCppBuild | None, *, builds_here: bool
) -> Iterator[Rule]:
    """Is there room for what is missing? Counts per filesystem, what is there already not at all."""
    needs: dict[str, tuple[str, int]] = {}

    def need(path: str, size_bytes: int) -> None:
        filesystem = facts.filesystems.get(path)
        if filesystem is not None:
            mount, so_far = filesystem.mount, needs.get(filesystem.mount, (path, 0))
            needs[mount] = (so_far[0], so_far[1] + size_bytes)

    for release in releases:
        found = facts.release(release.path)
        if row is not None and (found is None or found.problem):
            # The archive is unpacked beside the final folder, so for a moment both lie there.
            need("/opt/v100ctl", 2 * row.release_bytes)
            if builds_here:
                need("/var/lib/v100ctl", row.build_bytes)
    for model in models:
        present = facts.models.get(model.path)
        if model.source["kind"] != "host" and not (present and present.exists) and model.size_bytes:
            need("/var/lib/v100ctl", model.size_bytes)
    for mount, (path, size_bytes) in needs.items():
        free_bytes = facts.filesystems[path].free_bytes
        if free_bytes < size_bytes + _SPARE_BYTES:
            yield Rule(
                "disk-space",
                "refuse",
                f"{mount} has {gib(free_bytes)} free; {gib(size_bytes)} are needed there and {gib(_SPARE_BYTES)} to spare",
                f"free at least {gib(size_bytes + _SPARE_BYTES - free_bytes)} on {mount}, or mount a disk at {path}",
            )


def distribution_of(facts: Facts, catalog: Catalog) -> Distribution | None:
    """The catalog's row of the host's distribution."""
    return catalog.distribution(facts.distribution.id, facts.distribution.version_id)
