"""What is not ours on a host, and harms what is: findings of the kind *external*. Roles leave all of it alone."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import PurePosixPath

from v100ctl.facts import Facts, Gpu, ProcessFacts
from v100ctl.findings import Finding, FindingSeverity, Layer
from v100ctl.plan import adoption, driver_actions, gateway, tuning
from v100ctl.plan.rules.text import gib
from v100ctl.plan.types import HostPlan, Instance
from v100ctl.plan.units import DEVICES_UNIT

#: What is ours among the tables of jobs.
_OWN_CRON = "/etc/cron.d/v100ctl"
#: So often has systemd to start a server anew before it is told: one crash is in the journal.
_CRASHES = 3
#: A server's own memory is told to grow when it has grown by this, and by half: what caches take in the first hours is less.
_GROWTH_BYTES = 1024**3
_SWAPPED_BYTES = 64 * 1024**2
#: `nvidia-smi` counts in whole MiB, and an engine may leave out what it shares.
_LEAST_SHARE = 0.95
#: "GPU Max Operating Temp" and "Memory Max Operating Temp" that `nvidia-smi -q` shows of a V100.
OPERATING_C, MEMORY_C = 83, 85


def around(plan: HostPlan, facts: Facts) -> Iterator[Finding]:
    """Everything of others that harms, in the order of its layers."""
    yield from _packages(plan, facts)
    yield from _files(plan, facts)
    yield from _units(plan, facts)
    for instance in plan.instances:
        process = facts.process_of(instance.unit)
        if process is not None:
            yield from _process(instance, process, facts)
            yield from _service(instance, process, facts)
        yield from _port(plan, instance, facts)
    yield from _cards(plan, facts)


def _external(
    identifier: str,
    layer: Layer,
    role: str,
    expected: str,
    actual: str,
    fix: str,
    *,
    severity: FindingSeverity = "warn",
    instance: str | None = None,
) -> Finding:
    return Finding(identifier, "external", layer, role, expected, actual, severity, fix, instance)


def _packages(plan: HostPlan, facts: Facts) -> Iterator[Finding]:
    if facts.packages.half_configured:
        yield _external(
            "package.half-configured",
            "package",
            "preflight",
            "every package installed to its end",
            ", ".join(facts.packages.half_configured[:20]),
            "`dpkg --configure -a` on the host",
            severity="error",
        )
    if plan.driver is None:
        return
    for preference in facts.apt_preferences:
        # What a package brings goes with it, and which packages are wanted is the driver's own matter.
        if preference.path != driver_actions.PREFERENCES and not preference.owner:
            yield _external(
                f"package.preference:{preference.path}",
                "package",
                "nvidia_driver",
                f"no preference for the driver but {driver_actions.PREFERENCES}",
                f"one for {', '.join(preference.packages)}",
                f"look at it, then `rm {shlex.quote(preference.path)}` on the host",
            )
    held = {name.partition(":")[0] for name in facts.packages.held}
    loose = sorted(
        name
        for name, version in facts.packages.installed.items()
        if driver_actions.is_driver_package(name, version) and name.partition(":")[0] not in held
    )
    # The file by which upgrades leave the driver alone is compared like every other one.
    if facts.unattended_upgrades and loose and driver_actions.UPGRADES not in facts.files:
        yield _external(
            "package.unattended-upgrades",
            "package",
            "nvidia_driver",
            "upgrades that leave the driver alone",
            f"upgraded by itself, under running servers: {', '.join(loose[:10])}",
            f"`apt-mark hold {shlex.join(loose[:10])}` on the host",
        )


def _files(plan: HostPlan, facts: Facts) -> Iterator[Finding]:
    for table in facts.cron:
        if not table.path.startswith(_OWN_CRON):
            yield _external(
                f"file.cron:{table.path}",
                "file",
                "llm_server",
                "no job of others for servers, cards or restarts",
                f"a job with {', '.join(f'`{word}`' for word in table.words)}",
                f"look at it, and take it out of {table.path} on the host",
            )
    known = {unit.instance for unit in plan.units}
    for path in sorted(facts.files):
        found = re.fullmatch(r"/etc/v100ctl/instances/(.+)\.(?:env|keys)", path)
        # What a role removes is told as that.
        if found and found[1] not in known and path not in plan.absent_files:
            yield _external(
                f"file.unknown:{path}",
                "file",
                "llm_server",
                "absent",
                f"left by an instance {found[1]} that nobody plans; it may hold secrets",
                f"`rm {shlex.quote(path)}` on the host",
            )


def _units(plan: HostPlan, facts: Facts) -> Iterator[Finding]:
    planned = {unit.name for unit in plan.units}
    for name, unit in sorted(facts.units.items()):
        if name.startswith("v100-") and name not in planned and unit.load_state not in ("", "not-found"):
            yield _external(
                f"unit.foreign:{name}",
                "unit",
                "llm_server",
                "no unit of others by such a name",
                f"{unit.active_state}, from {unit.fragment_path or 'nowhere'}",
                f"rename it, or `systemctl disable --now {shlex.quote(name)}` on the host",
            )
        if name in planned and unit.active_state == "active" and unit.restarts_count >= _CRASHES:
            yield _external(
                f"unit.crashes:{name}",
                "unit",
                "llm_server",
                "no end but by a planned restart",
                f"systemd had to start it anew {unit.restarts_count} times",
                f"`journalctl --unit {name}` on the host says why",
            )
    for name, role in ((gateway.UNIT, gateway.ROLE), (tuning.UNIT, tuning.ROLE), (DEVICES_UNIT, "llm_server")):
        if name in facts.units:
            for path in facts.units[name].drop_in_paths:
                yield _external(
                    f"unit.drop-in:{path}",
                    "unit",
                    role,
                    "no drop-in",
                    path,
                    f"look at it, then `rm {shlex.quote(path)}` and `systemctl daemon-reload` on the host",
                )


def _restart(instance: Instance) -> str:
    return f"`systemctl restart {instance.unit}` on the host, when nobody waits for an answer"


def _process(instance: Instance, process: ProcessFacts, facts: Facts) -> Iterator[Finding]:
    if process.deleted_libraries:
        yield _external(
            f"process.libraries:{instance.name}",
            "process",
            "llm_server",
            "the libraries that are installed",
            f"ones that were removed or replaced since it started: {', '.join(process.deleted_libraries[:5])}",
            _restart(instance),
            instance=instance.name,
        )
    baseline = facts.baselines.get(instance.name)
    before_bytes = baseline.anonymous_bytes if baseline and baseline.digest == instance.digest else None
    now_bytes = process.rss_anonymous_bytes + process.swap_bytes
    if before_bytes and now_bytes > max(before_bytes + _GROWTH_BYTES, before_bytes * 1.5):
        yield _external(
            f"process.memory-growth:{instance.name}",
            "process",
            "llm_server",
            f"about {gib(before_bytes)} of its own memory, as after its start",
            gib(now_bytes),
            f"{_restart(instance)}; `nightly_restart` does so every night",
            instance=instance.name,
        )
    if process.swap_bytes > _SWAPPED_BYTES:
        yield _external(
            f"process.swapped:{instance.name}",
            "process",
            "llm_server",
            "all of its memory in RAM",
            f"{gib(process.swap_bytes)} swapped out",
            "more memory, fewer programs beside it, or `swapoff -a` on the host",
            instance=instance.name,
        )


def _service(instance: Instance, process: ProcessFacts, facts: Facts) -> Iterator[Finding]:
    wide = sorted({item.address for item in facts.listeners if item.unit == instance.unit and item.port == instance.port})
    if (
        wide
        and instance.listen not in adoption.ANYWHERE
        and (open_to := [address for address in wide if address in adoption.ANYWHERE])
    ):
        yield _external(
            f"service.exposed:{instance.name}",
            "service",
            "llm_server",
            f"listens on {instance.listen}:{instance.port}",
            f"listens on {', '.join(open_to)}: every address of the host",
            _restart(instance),
            severity="critical",
            instance=instance.name,
        )
    identity = facts.identity.get(instance.name)
    if identity is not None and identity.models and instance.model_alias not in identity.models:
        yield _external(
            f"service.model:{instance.name}",
            "service",
            "llm_server",
            f"the model {instance.model_alias}",
            ", ".join(identity.models[:5]),
            _restart(instance),
            severity="error",
            instance=instance.name,
        )
    health = facts.health.get(instance.name)
    if health is None or health.status != 200:
        # One that still loads holds less.
        return
    for gpu in facts.gpus:
        least_bytes = instance.proof.least_bytes.get(gpu.uuid, 0)
        held = [item.memory_bytes for item in gpu.processes if item.unit == instance.unit]
        if least_bytes and None not in held and sum(item or 0 for item in held) < least_bytes * _LEAST_SHARE:
            yield _external(
                f"service.off-card:{instance.name}",
                "service",
                "llm_server",
                f"at least {gib(least_bytes)} on card {gpu.index if gpu.index is not None else gpu.pci_address}",
                f"{gib(sum(item or 0 for item in held))}: its layers are not there",
                _restart(instance),
                severity="error",
                instance=instance.name,
            )


def _port(plan: HostPlan, instance: Instance, facts: Facts) -> Iterator[Finding]:
    leaving = {item.pid for item in plan.adoptions}
    for listener in facts.listeners:
        if listener.port != instance.port or listener.unit == instance.unit or listener.pid in leaving:
            continue
        # One of another address is in nobody's way.
        if adoption.overlap(listener.address, instance.listen):
            who = f"`{listener.command or '?'}`" + (f" of {listener.unit}" if listener.unit else "")
            occupant = facts.occupant(listener.pid)
            who = adoption.who(occupant) if occupant else who
            kept = adoption.stays(occupant) if occupant else None
            yield _external(
                f"service.port-taken:{instance.name}",
                "service",
                "llm_server",
                f"{instance.unit} on port {instance.port}",
                f"{who} on {listener.address}:{listener.port}",
                (
                    f"end it on the host (pid {listener.pid or 'unknown'})"
                    if occupant is None
                    else kept[1]
                    if kept
                    else f"`v100ctl provision --adopt {plan.host}/{instance.name}` stops it"
                )
                + ", or another `port` in the inventory",
                severity="error",
                instance=instance.name,
            )
            return


def _cards(plan: HostPlan, facts: Facts) -> Iterator[Finding]:
    used = {key for instance in plan.instances for key in instance.gpus}
    for gpu in facts.gpus:
        key = gpu.uuid or gpu.pci_address
        severity: FindingSeverity = "error" if key in used else "warn"
        yield from _users(plan, facts, gpu, key, severity)
        core, memory = gpu.temperature_c or 0, gpu.memory_temperature_c or 0
        slowed = gpu.throttle_reasons is not None and any("thermal" in reason for reason in gpu.throttle_reasons)
        # One that is slowed already is told by its own finding.
        if key in used and not slowed and (core > OPERATING_C or memory > MEMORY_C):
            yield _external(
                f"gpu.hot:{key}",
                "hardware",
                "gpu_tuning",
                f"at most {OPERATING_C} C, and {MEMORY_C} C of its memory",
                f"{core} C, memory {memory} C",
                "look at fans, filters and the air before the card; `gpu_tuning_power_limit_w` lowers its heat",
            )
        if gpu.ecc_uncorrected_volatile:
            yield _external(
                f"gpu.ecc-errors:{key}",
                "hardware",
                "gpu_tuning",
                "no memory error that cannot be corrected",
                f"{gpu.ecc_uncorrected_volatile} since the driver was loaded",
                f"`v100ctl recover {plan.host}` resets the card; where they come again, another card",
            )


def _users(plan: HostPlan, facts: Facts, gpu: Gpu, key: str, severity: FindingSeverity) -> Iterator[Finding]:
    ours = {unit.name for unit in plan.units}
    leaving = {item.pid for item in plan.adoptions}
    programs = {PurePosixPath(instance.argv[0]).name for instance in plan.instances}
    others = [process for process in gpu.processes if process.unit not in ours and process.pid not in leaving]
    orphans = [item for item in others if not item.unit and set(re.split(r"[\s/]", item.command)) & programs]
    foreign = [item for item in others if item not in orphans]
    for what, found, expected in (
        ("orphan", orphans, "servers that their units have started"),
        ("foreign-process", foreign, "no program of others on the card"),
    ):
        if found:
            known = {item.pid: facts.occupant(item.pid) for item in found[:5]}
            who = ", ".join(
                adoption.who(occupant) if (occupant := known[item.pid]) else f"`{item.command or '?'}` (pid {item.pid})"
                for item in found[:5]
            )
            used_bytes = sum(item.memory_bytes or 0 for item in found)
            yield _external(
                f"gpu.{what}:{key}",
                "process",
                "llm_server",
                expected,
                f"{who} with {gib(used_bytes)} of it",
                f"`kill {shlex.join(str(item.pid) for item in found[:5])}` on the host, once it is known whose it is",
                severity=severity,
            )
