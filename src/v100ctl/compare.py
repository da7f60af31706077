"""What differs between a plan and a host. The only list of things to check: plan, provision, audit and rollout all use it."""

from __future__ import annotations

import hashlib
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from v100ctl.catalog import load_catalog
from v100ctl.facts import Facts, ProcessFacts, UnitFacts
from v100ctl.findings import PROVISION as _PROVISION
from v100ctl.findings import Applied, Finding, FindingSeverity, Kind, Layer
from v100ctl.plan import DIGEST_VARIABLE, firewall, gateway, monitoring
from v100ctl.plan.driver_actions import package_problem, unheld_packages
from v100ctl.plan.llama_cpp import ENGINES_DIR
from v100ctl.plan.numa import format_cpus, parse_cpus
from v100ctl.plan.rules.text import gib
from v100ctl.plan.tuning import PERSISTENCED_UNIT, SETTINGS, UNIT
from v100ctl.plan.types import (
    DriverDecision,
    GatewayDecision,
    GatewayFront,
    HostPlan,
    ManagedFile,
    Model,
    ModelFile,
    Rule,
    plain_data,
)
from v100ctl.plan.units import TRIAL_DROP_IN, attainable_nofile, told, unit_name
from v100ctl.plan.upkeep import CRON_FILE
from v100ctl.probe.host_script import KEYED_DIGEST_ROUNDS, without_secrets
from v100ctl.surroundings import around

__all__ = ["Finding", "FindingSeverity", "Kind", "Layer", "compare", "model_file_problem", "restarts"]


def keyed_digest(salt: str, content: str) -> str:
    """What the probe says of a file of secrets with this content, in a document with this salt."""
    return hashlib.pbkdf2_hmac("sha256", content.encode(), salt.encode("ascii"), KEYED_DIGEST_ROUNDS).hex()


@dataclass(frozen=True)
class _Ailment:
    """What a rule about the state of a host is as a finding. A role mends those that are not external."""

    id: str
    layer: Layer
    expected: str
    severity: FindingSeverity
    kind: Kind = "external"
    role: str = "gpu_tuning"


#: By rule. What a host suffers from is judged once, by the plan's rules.
_AILMENTS: Mapping[str, _Ailment] = {
    "driver-wedged": _Ailment("driver.wedged", "driver", "`nvidia-smi` answers", "critical", role="nvidia_driver"),
    "driver-library-mismatch": _Ailment(
        "driver.library-mismatch", "driver", "library and loaded module of one version", "error", role="nvidia_driver"
    ),
    "driver-not-loaded": _Ailment("driver.not-loaded", "driver", "the driver loaded", "error", "pending", "nvidia_driver"),
    "nouveau-loaded": _Ailment("driver.nouveau", "driver", "NVIDIA's driver has the cards", "error", "pending", "nvidia_driver"),
    "uvm-poisoned": _Ailment("driver.uvm-poisoned", "driver", "CUDA programs start", "critical"),
    "gpu-gone": _Ailment("gpu.gone", "hardware", "every card that the last plan had", "error"),
    "gpu-fallen-off": _Ailment("gpu.fallen-off", "hardware", "the card answers on the bus", "critical"),
    "gpu-bar1-unassigned": _Ailment("gpu.bar1-unassigned", "hardware", "address space for the card's memory", "error"),
    "gpu-link-degraded": _Ailment("gpu.link-degraded", "hardware", "a PCIe link of 8 GT/s and 16 lanes", "warn"),
    "gpu-throttled": _Ailment("gpu.throttled", "hardware", "clocks as asked", "warn"),
    "gpu-retirement-pending": _Ailment("gpu.retirement-pending", "hardware", "no page waits to be retired", "error"),
    "gpu-memory-failing": _Ailment("gpu.memory-failing", "hardware", "memory that can still retire pages", "error"),
    "gpu-xid": _Ailment("gpu.xid", "hardware", "no errors of the hardware in the last day", "warn"),
}


def _ailments(plan: HostPlan) -> Iterator[Finding]:
    """What the plan's rules found wrong with driver and cards. What they only inform of is no finding."""
    used = {key for instance in plan.instances for key in instance.gpus}
    for rule in plan.rules:
        ailment = _AILMENTS.get(rule.id)
        if ailment is not None and rule.severity != "info":
            # A card that nothing computes on stops nobody.
            idle = rule.card is not None and bool(used) and rule.card not in used
            yield _ailing(rule, ailment, plan.host, "warn" if idle else ailment.severity)


def _ailing(rule: Rule, ailment: _Ailment, host: str, severity: FindingSeverity) -> Finding:
    return Finding(
        f"{ailment.id}:{rule.card}" if rule.card else ailment.id,
        ailment.kind,
        ailment.layer,
        ailment.role,
        ailment.expected,
        rule.reason,
        severity,
        _PROVISION if ailment.kind != "external" else (rule.nearest or "").replace("recover HOST", f"recover {host}"),
    )


def compare(plan: HostPlan, facts: Facts) -> tuple[Finding, ...]:
    """Every difference between what is planned and what the probe found, in the order in which roles would mend them."""
    applied = Applied.read(facts.host_json.document, facts.host_json.problem)
    return (
        *_ailments(plan),
        *_driver(plan, facts, applied),
        *_cuda(plan),
        *_tuning(plan, facts, applied),
        *_packages(plan, facts, applied),
        *_accounts(plan, facts, applied),
        *_releases(plan, facts, applied),
        *_models(plan, facts, applied),
        *_directories(plan, facts, applied),
        *_files(plan, facts, applied),
        *_adoptions(plan),
        *_units(plan, facts, applied),
        *_processes(plan, facts, applied),
        *_services(plan, facts),
        *_gateway(plan, facts, applied),
        *_firewall(plan, facts),
        *around(plan, facts),
        *_upkeep(plan, facts, applied),
        *_monitoring(plan, facts, applied),
    )


def _driver(plan: HostPlan, facts: Facts, applied: Applied) -> Iterator[Finding]:
    driver = plan.driver
    if driver is None:
        return
    kind: Kind = applied.kind(applied.mapping("driver").get("branch") == driver.branch)
    users = tuple(item.name for item in plan.instances if item.gpus)

    def finding(what: str, expected: str, actual: str, restarted: tuple[str, ...] = ()) -> Finding:
        return Finding(
            f"driver.{what}", kind, "driver", "nvidia_driver", expected, actual, "error", _PROVISION, restarts=restarted
        )

    found = facts.nvidia.module_version or facts.nvidia.on_disk_module_version
    if driver.action != "keep":
        flavour = facts.nvidia.module_flavour or facts.nvidia.on_disk_module_flavour
        yield finding(
            "wrong" if found else "missing",
            f"driver {driver.version or driver.branch}, proprietary modules"
            + (f", from {driver.source}" if driver.source else ""),
            f"{found}, {flavour or 'unknown'} modules" if found else "none",
            users,
        )
    catalog = load_catalog()
    for name in driver.packages:
        problem = package_problem(driver, name, facts, catalog)
        if problem is not None:
            what = f"package-{'version' if problem else 'missing'}:{name}"
            yield finding(what, driver.exact or f"branch {driver.branch}", problem or "not installed", users)
    for name in driver.unwanted:
        yield finding(f"package-unwanted:{name}", "not installed", facts.packages.installed[name], users)
    loose = unheld_packages(driver, facts)
    if loose:
        yield finding("unheld", f"held: {', '.join(loose)}", "not held")
    for path in driver.absent_files:
        yield finding(f"file-unwanted:{path}", "absent", "names NVIDIA's repository with another key")
    yield from _next_boot(driver, facts, kind)


def _next_boot(driver: DriverDecision, facts: Facts, kind: Kind) -> Iterator[Finding]:
    """Whether the kernel that boots next has modules that work with what is installed: else the next boot loses the cards."""
    if driver.action != "keep" or driver.unloaded or not facts.kernels_installed:
        # A driver that comes brings modules for it; a container boots no kernel.
        return
    nvidia, kernel = facts.nvidia, facts.kernels_installed[-1]
    version, flavour = nvidia.next_boot_module_version, nvidia.next_boot_module_flavour
    if kernel == facts.kernel:
        unread = "nvidia.module_file" in facts.errors
        version, flavour = None if unread else nvidia.on_disk_module_version, nvidia.on_disk_module_flavour
    if version is None:
        # Nobody could look.
        return
    # Open and proprietary modules have the same version, and one of them does not drive a Volta.
    same_flavour = not nvidia.module_flavour or not flavour or flavour == nvidia.module_flavour
    if version and same_flavour and version == (nvidia.library_version or version):
        return
    failed = next((item for item in facts.dkms if item.failed == kernel), None)
    log = f"/var/lib/dkms/{failed.name}/{failed.version}/build/make.log" if failed else ""
    actual = f"{version}, {flavour or 'unknown'} modules" if version else "no modules"
    # A role builds for the kernels of a driver that it installed, and leaves one alone that was found.
    ours = kernel in driver.kernels
    yield Finding(
        "driver.next-boot",
        kind if ours else "external",
        "driver",
        "nvidia_driver",
        f"modules of driver {nvidia.library_version or driver.version or driver.branch} for kernel {kernel}, which boots next",
        actual + (f": a build for it has failed, see {log} on the host" if log else ""),
        "error",
        _PROVISION
        if ours
        else f"have them built (`dkms autoinstall -k {kernel}` on the host, with that kernel's headers), or boot {facts.kernel}",
    )


def _cuda(plan: HostPlan) -> Iterator[Finding]:
    """What compiling lacks. The plan has a toolkit only for a host that compiles: one that has its engine needs none."""
    cuda = plan.cuda
    if cuda is None:
        return
    if cuda.action == "keep" and cuda.packages:
        yield Finding(
            f"cuda.compiler-missing:{cuda.host_compiler}",
            "pending",
            "package",
            "cuda_toolkit",
            f"{cuda.host_compiler} for CUDA {cuda.version}",
            "none",
            "error",
            _PROVISION,
        )
    if cuda.action == "install":
        yield Finding(
            f"cuda.missing:{cuda.version}",
            "pending",
            "package",
            "cuda_toolkit",
            f"CUDA {cuda.version}"
            + (f" with {cuda.host_compiler}" if cuda.host_compiler else "")
            + (f", from {cuda.source}" if cuda.source else ""),
            "none",
            "error",
            _PROVISION,
        )


def _tuning(plan: HostPlan, facts: Facts, applied: Applied) -> Iterator[Finding]:
    """What cards, processors and the units that set them differ in. What no driver tells yet is no difference."""
    decision = plan.tuning
    if decision is None:
        return
    planned = next((file for file in plan.files if file.path == SETTINGS), None)
    # The settings that were applied, by the hash of the file that holds them.
    same = planned is not None and applied.file(SETTINGS).get("sha256") == _sha256(planned.content)
    kind: Kind = applied.kind(same)

    def finding(what: str, expected: str, actual: str, layer: Layer = "hardware") -> Finding:
        return Finding(f"gpu.{what}", kind, layer, "gpu_tuning", expected, actual, "warn", _PROVISION)

    cards = {gpu.pci_address: gpu for gpu in facts.gpus if gpu.uuid}
    for card in decision.cards:
        gpu = cards.get(card.pci_address)
        if gpu is None:
            continue
        if decision.persistence and gpu.persistence_mode == "disabled":
            yield finding(f"persistence:{gpu.uuid}", "persistence mode on", "off")
        limit = gpu.power_limit_w
        if card.power_limit_w is not None and limit is not None and limit != card.power_limit_w:
            yield finding(f"power-limit:{gpu.uuid}", f"{card.power_limit_w} W", f"{limit:g} W")
        clocks = (gpu.application_memory_clock_mhz, gpu.application_graphics_clock_mhz)
        if card.application_clocks_mhz is not None and None not in clocks and clocks != card.application_clocks_mhz:
            memory, graphics = card.application_clocks_mhz
            yield finding(f"application-clocks:{gpu.uuid}", f"{memory},{graphics} MHz", f"{clocks[0]},{clocks[1]} MHz")
        if card.ecc and gpu.ecc_mode and gpu.ecc_mode != card.ecc:
            yield finding(f"ecc:{gpu.uuid}", f"ECC {card.ecc}", gpu.ecc_mode)
        if card.compute_mode and gpu.compute_mode and gpu.compute_mode != card.compute_mode:
            yield finding(f"compute-mode:{gpu.uuid}", card.compute_mode, gpu.compute_mode)
    if decision.cpu_governor and facts.cpu.governors and facts.cpu.governors != (decision.cpu_governor,):
        yield finding("cpu-governor", decision.cpu_governor, ", ".join(facts.cpu.governors))
    daemon = facts.units.get(PERSISTENCED_UNIT)
    if decision.persistence and daemon is not None:
        if "masked" in (daemon.load_state, daemon.unit_file_state):
            yield finding(f"unit-masked:{PERSISTENCED_UNIT}", "enabled", "masked", "unit")
        elif daemon.unit_file_state != "enabled":
            yield finding(f"unit-disabled:{PERSISTENCED_UNIT}", "enabled", daemon.unit_file_state or "unknown", "unit")
        elif daemon.active_state != "active" and cards:
            yield finding(f"unit-inactive:{PERSISTENCED_UNIT}", "active", daemon.active_state, "unit")
    unit = facts.units.get(UNIT)
    if unit is None or unit.unit_file_state != "enabled":
        yield finding(f"unit-disabled:{UNIT}", "enabled", unit.unit_file_state or "unknown" if unit else "absent", "unit")
    elif unit.active_state == "failed":
        yield finding(f"unit-failed:{UNIT}", "no failure", f"result {unit.result or 'unknown'}", "unit")


def _packages(plan: HostPlan, facts: Facts, applied: Applied) -> Iterator[Finding]:
    known = applied.words("packages")
    for package in plan.packages:
        if package not in facts.packages.installed:
            kind: Kind = applied.kind(package in known)
            yield Finding(
                f"package.missing:{package}", kind, "package", "preflight", "installed", "not installed", "error", _PROVISION
            )


def _accounts(plan: HostPlan, facts: Facts, applied: Applied) -> Iterator[Finding]:
    account = plan.account
    if plan.instances and account.name not in facts.accounts:
        kind: Kind = applied.kind(bool(applied))
        yield Finding(
            f"account.missing:{account.name}", kind, "unit", "llm_server", f"user {account.name}", "absent", "error", _PROVISION
        )


#: The roles of engines that are not called like them.
_ENGINE_ROLES = {"external": "external_engine"}


def _releases(plan: HostPlan, facts: Facts, applied: Applied) -> Iterator[Finding]:
    known = applied.names("releases", "path")
    for release in plan.releases:
        found = facts.release(release.path)
        if found is not None and not found.problem:
            continue
        kind: Kind = applied.kind(release.path in known)
        users = tuple(item.name for item in plan.instances if item.release_path == release.path)
        yield Finding(
            f"release.{'damaged' if found else 'missing'}:{release.build_id}",
            kind,
            "file",
            _ENGINE_ROLES.get(release.engine, release.engine),
            release.path,
            found.problem if found else "absent",
            "error",
            _PROVISION,
            restarts=users,
        )


def _models(plan: HostPlan, facts: Facts, applied: Applied) -> Iterator[Finding]:
    known = applied.names("models", "path")
    for model in plan.models:
        problems = [problem for file in model.files if (problem := model_file_problem(file, facts)) is not None]
        if not problems:
            continue
        kind: Kind = applied.kind(model.path in known)
        # The worst of its files: what is missing has to come, what is wrong to go.
        what, actual = min(problems, key=lambda problem: ("missing", "wrong", "unverified").index(problem[0]))
        if len(model.files) > 1:
            actual = f"{len(problems)} of {len(model.files)} files, the first: {actual}"
        users = tuple(item.name for item in plan.instances if item.model_path == model.path)
        yield Finding(
            f"model.{what}:{model.path}",
            kind,
            "file",
            "model_store",
            _wanted_model(model),
            actual,
            "error",
            _PROVISION,
            instance=users[0] if len(users) == 1 else None,
        )
    for path in plan.unused_models:
        yield Finding(
            f"model.unused:{path}",
            "pending",
            "file",
            "model_store",
            "absent",
            f"{gib(facts.stored_models.get(path, 0))} that no instance uses",
            "info",
            _PROVISION,
        )


def model_file_problem(file: ModelFile, facts: Facts) -> tuple[str, str] | None:
    """What is wrong with one file of a model, as ``missing``, ``wrong`` or ``unverified`` and in words; ``None``: nothing."""
    found = facts.models.get(file.path)
    if found is None or not found.exists:
        return "missing", "absent"
    # What a step makes has no SHA-256 before; its path stands for what it is made of, and its record for the rest.
    if found.sha256 and found.sha256 == (file.sha256 or found.sha256):
        return None
    if found.sha256:
        return "wrong", f"sha256 {found.sha256}"
    # Present, but size or time differ from what was verified: the bytes are not known until they are hashed again.
    return "unverified", f"{found.size_bytes} bytes, changed since it was verified"


def _wanted_model(model: Model) -> str:
    if model.source["kind"] == "prepared":
        return f"made by `{PurePosixPath(model.source['argv'][0]).name}`"
    return f"sha256 {model.sha256}" if len(model.files) == 1 else f"{len(model.files)} files, verified"


def _directories(plan: HostPlan, facts: Facts, applied: Applied) -> Iterator[Finding]:
    kind: Kind = applied.kind(bool(applied))
    for directory in plan.directories if plan.instances else ():
        found = facts.files.get(directory.path)

        def finding(what: str, expected: str, actual: str, path: str = directory.path) -> Finding:
            return Finding(f"directory.{what}:{path}", kind, "file", "llm_server", expected, actual, "error", _PROVISION)

        # A link to a folder on another disk is an administrator's choice that the roles leave alone.
        if found is not None and found.kind == "symlink":
            continue
        wanted = f"{directory.owner}:{directory.group} {directory.mode}"
        if found is None or found.kind != "directory":
            yield finding("missing", "a directory", "absent" if found is None else f"a {found.kind}")
        elif f"{found.owner}:{found.group} {found.mode}" != wanted:
            yield finding("mode", wanted, f"{found.owner}:{found.group} {found.mode}")


def _sha256(content: str) -> str:
    return hashlib.sha256(content.encode()).hexdigest()


def _files(plan: HostPlan, facts: Facts, applied: Applied) -> Iterator[Finding]:
    units = (f"/etc/systemd/system/{unit.name}" for unit in plan.units if unit.state == "started")
    # A record that is gone from a host with our units was there.
    lost = any(path in facts.files for path in units)
    for file in plan.all_files:
        if file.secret:
            yield from _secret_file(file, facts, applied)
        else:
            yield from _file(file, facts, applied, is_record=file is plan.host_json, lost=lost)
    for path in plan.absent_files:
        yield Finding(
            f"file.unwanted:{path}", "pending", "file", "llm_server", "absent", "secrets that nothing needs", "warn", _PROVISION
        )


def _secret_file(file: ManagedFile, facts: Facts, applied: Applied) -> Iterator[Finding]:
    """A file of keys: whether it differs, and never how. Its server reads it when it starts."""
    found = facts.files.get(file.path)

    def finding(what: str, kind: Kind, expected: str, actual: str, restarted: tuple[str, ...] = ()) -> Finding:
        return Finding(
            f"file.{what}:{file.path}", kind, "file", file.role, expected, actual, "error", _PROVISION, file.instance, restarted
        )

    users = (file.instance,) if file.instance and file.role == "llm_server" else ()
    if found is None or found.kind != "file":
        actual = "absent" if found is None else f"a {found.kind}"
        yield finding("missing", applied.kind(bool(applied.file(file.path))), "a file", actual, users)
        return
    if facts.secret_salt and found.keyed_digest != keyed_digest(facts.secret_salt, file.content):
        # No record tells what was applied. A server is started anew whenever its keys are written: where it has others than
        # the file, somebody else has written that.
        process = facts.process_of(unit_name(file.instance or ""))
        gateway_facts = facts.gateway if file.role == gateway.ROLE else None
        current = gateway_facts.keys_current if gateway_facts else process.keys_current if process else None
        yield finding("content", "drifted" if current is False else "pending", "the planned secrets", "others", users)
    wanted, actual = f"{file.owner}:{file.group} {file.mode}", f"{found.owner}:{found.group} {found.mode}"
    if wanted != actual:
        yield finding("mode", "drifted", wanted, actual)


def _file(file: ManagedFile, facts: Facts, applied: Applied, *, is_record: bool, lost: bool) -> Iterator[Finding]:
    planned_sha256 = _sha256(file.content)
    record = applied.file(file.path)
    # The record has no entry of its own: it is as it was applied where its seal is whole.
    was_applied = bool(record) or (is_record and bool(applied))
    found = facts.files.get(file.path)

    def finding(what: str, kind: Kind, expected: str, actual: str) -> Finding:
        return Finding(f"file.{what}:{file.path}", kind, "file", file.role, expected, actual, "error", _PROVISION, file.instance)

    if found is None or found.kind != "file":
        actual = "absent" if found is None else f"a {found.kind}"
        yield finding("missing", applied.kind(was_applied or (is_record and lost)), "a file", actual)
        return
    if found.sha256 != planned_sha256:
        untouched = not applied.edited and (not was_applied or is_record or record.get("sha256") == found.sha256)
        hidden = found.content is None
        expected = f"sha256 {planned_sha256}" if hidden else file.content
        yield finding(
            "content", "pending" if untouched else "drifted", expected, f"sha256 {found.sha256}" if hidden else str(found.content)
        )
    wanted, actual = f"{file.owner}:{file.group} {file.mode}", f"{found.owner}:{found.group} {found.mode}"
    if wanted != actual:
        before = f"{record.get('owner')}:{record.get('group')} {record.get('mode')}" if record else ""
        yield finding("mode", "pending" if actual == before else "drifted", wanted, actual)


def _adoptions(plan: HostPlan) -> Iterator[Finding]:
    """Servers of others that are stopped for one of ours, since the inventory says so."""
    for item in plan.adoptions:
        what = item.unit or f"pid {item.pid}"
        yield Finding(
            f"process.hand-run:{what}",
            "pending",
            "process",
            "llm_server",
            f"{item.where} is free for {item.instance}",
            f"`{item.command}` of {item.user or 'somebody'}" + (f", unit {item.unit}" if item.unit else ""),
            "warn",
            _PROVISION,
            item.instance,
        )


def _is_tried(unit: UnitFacts | None) -> bool:
    """Whether `v100ctl tune` has it run with other settings for now."""
    return unit is not None and any(path.endswith(f"/{TRIAL_DROP_IN}") for path in unit.drop_in_paths)


def _units(plan: HostPlan, facts: Facts, applied: Applied) -> Iterator[Finding]:
    for unit in plan.units:
        found = facts.units.get(unit.name)
        kind: Kind = applied.kind(bool(applied.instance(unit.instance)))

        def finding(
            what: str, expected: str, actual: str, kind: Kind = kind, name: str = unit.name, instance: str = unit.instance
        ) -> Finding:
            return Finding(
                f"unit.{what}:{name}",
                kind,
                "unit",
                "llm_server",
                expected,
                actual,
                "error",
                _PROVISION,
                instance,
                # Enabling or reloading a unit leaves its server alone.
                restarts=(instance,) if what in ("missing", "inactive", "failed", "start-limit") else (),
            )

        if unit.state == "absent":
            if (found and found.load_state not in ("", "not-found")) or f"/etc/systemd/system/{unit.name}" in facts.files:
                yield Finding(
                    f"unit.unwanted:{unit.name}",
                    "pending",
                    "unit",
                    "llm_server",
                    "absent",
                    found.active_state if found else "a unit file",
                    "warn",
                    _PROVISION,
                    unit.instance,
                )
            continue
        if found is None or found.load_state == "not-found":
            yield finding("missing", "loaded", "not loaded")
            continue
        if found.unit_file_state == "masked" or found.load_state == "masked":
            yield finding("masked", "enabled", "masked")
        elif found.unit_file_state != "enabled":
            yield finding("disabled", "enabled", found.unit_file_state or "unknown")
        if found.need_daemon_reload:
            yield finding("stale", "the unit file as loaded", "the file changed since it was loaded")
        if _is_tried(found):
            yield Finding(
                f"unit.trial:{unit.name}",
                "external",
                "unit",
                "llm_server",
                "the live settings",
                "a trial of `v100ctl tune`",
                "info",
                "it ends by itself: soon after its controller has gone, and with a reboot",
                unit.instance,
            )
            continue
        for path in found.drop_in_paths:
            yield Finding(
                f"unit.drop-in:{path}",
                "external",
                "unit",
                "llm_server",
                "no drop-in",
                path,
                "warn",
                f"look at it, then `rm {shlex.quote(path)}` and `systemctl daemon-reload` on the host",
                unit.instance,
            )
        # Units start anew by themselves: one that has failed after that is one that systemd has given up. (Its result then is
        # that of the last start; only a start by hand after that ends in `start-limit-hit`.)
        given_up = found.active_state == "failed" and found.restarts_count > 0
        if given_up or (found.result == "start-limit-hit" and found.active_state != "active"):
            yield finding("start-limit", "active (running)", "it failed too often in a short time, and systemd starts it no more")
        elif found.active_state == "failed":
            yield finding("failed", "active (running)", f"failed, result {found.result or 'unknown'}")
        elif found.active_state != "active":
            yield finding(
                "inactive", "active (running)", f"{found.active_state} ({found.sub_state}), result {found.result or 'unknown'}"
            )


def _stale_reasons(
    process: ProcessFacts, facts: Facts, *, digest: str, argv: Sequence[str], user: str, environment: Mapping[str, str]
) -> Iterator[tuple[str, str, str]]:
    """Why a running process is not the planned one: what, expected, actual. Nothing when it is."""
    if process.environ.get(DIGEST_VARIABLE) != digest:
        yield "stale", f"digest {digest}", f"digest {process.environ.get(DIGEST_VARIABLE) or 'none'}"
    elif process.executable_deleted or not (
        _is_script(process, argv) or _is_interpreted(process, argv[0]) or _is_program(process.executable, argv[0])
    ):
        yield "executable", argv[0], process.executable + (" (deleted)" if process.executable_deleted else "")
    elif list(process.argv) != list(argv) and not _is_script(process, argv):
        # Whoever starts a server by hand may give it a key on its command line.
        yield "argv", shlex.join(without_secrets(list(argv))), shlex.join(without_secrets(list(process.argv)))
    else:
        for name, value in told(environment).items():
            if process.environ.get(name) != value:
                yield "environment", f"{name}={value}", f"{name}={process.environ.get(name, '')}"
    if process.keys_current is False:
        yield "keys", "the API keys of its file", "others, from before it changed"
    if process.user != user:
        yield "user", user, process.user
    if process.cgroup_unit and process.cgroup_unit != process.unit:
        yield "cgroup", process.unit, process.cgroup_unit
    # What the host cannot give is no drift; `None` is unlimited, and so is more than was asked for.
    nofile = attainable_nofile(facts)
    if process.nofile_soft is not None and process.nofile_soft < nofile:
        yield "limit-nofile", f"{nofile} open files", str(process.nofile_soft)
    memlock_bytes, asked_bytes = process.memlock_soft_bytes, facts.limits.memlock_hard_bytes
    if memlock_bytes is not None and (asked_bytes is None or memlock_bytes < asked_bytes):
        yield "limit-memlock", "unlimited" if asked_bytes is None else f"{asked_bytes} bytes", f"{memlock_bytes} bytes"


_POLICIES = {"preferred": "prefer", "bind": "bind", "interleave": "interleave"}


def _misplaced(process: ProcessFacts, facts: Facts, placement: Mapping[str, Any] | None) -> Iterator[tuple[str, str, str]]:
    """Why a running process is not where it shall be, as far as the kernel tells. Nothing when it is."""
    wanted = parse_cpus(str(placement["cpus"])) if placement else parse_cpus(facts.cpu.usable_cpus)
    allowed = parse_cpus(process.cpus_allowed)
    if wanted and allowed and wanted != allowed:
        yield "cpus", format_cpus(wanted), format_cpus(allowed)
    if placement and process.memory_policy:
        policy = f"{_POLICIES[str(placement['policy'])]}:{format_cpus(int(node) for node in placement['nodes'])}"
        # The kernel may add flags: `bind=static:0`.
        if re.sub(r"=[a-z|]+", "", process.memory_policy) != policy:
            yield "memory-policy", policy, process.memory_policy


def _is_script(process: ProcessFacts, planned: Sequence[str]) -> bool:
    """Whether ``planned`` is what an interpreter runs, whose own file is no part of a release.

    Of a script the kernel puts the words of its first line before its own; an interpreter that is named itself
    (``/usr/bin/python3``) is a link to the program that runs.
    """
    if list(process.argv[-len(planned) :]) != list(planned):
        return False
    return len(process.argv) > len(planned) or not planned[0].startswith(f"{ENGINES_DIR}/")


def _is_interpreted(process: ProcessFacts, planned: str) -> bool:
    """Whether an interpreter runs the program ``planned``, whatever else its words are."""
    return planned in process.argv[1:3] and process.argv[0] != planned


def _is_program(executable: str, planned: str) -> bool:
    """Whether ``executable``, as the kernel names it, is ``planned``, which a link to another disk may lead to.

    A release's folder is named by what it holds, so engine, build and program are enough.
    """
    return executable == planned or PurePosixPath(executable).parts[-4:] == PurePosixPath(planned).parts[-4:]


def _processes(plan: HostPlan, facts: Facts, applied: Applied) -> Iterator[Finding]:
    for instance in plan.instances:
        process = facts.process_of(instance.unit)
        if process is None or _is_tried(facts.units.get(instance.unit)):
            # A server that does not run, or runs as it is tuned, is a unit's finding already.
            continue
        before = applied.instance(instance.name)
        # What runs is just what was applied, and the plan has moved on since.
        untouched = not before or (
            before.get("digest") == process.environ.get(DIGEST_VARIABLE) and before.get("digest") != instance.digest
        )
        kind: Kind = "pending" if untouched and not applied.edited else "drifted"
        reasons = _stale_reasons(
            process,
            facts,
            digest=instance.digest,
            argv=instance.argv,
            user=plan.account.name,
            environment=instance.environment,
        )
        file = facts.files.get(f"/etc/systemd/system/{instance.unit}")
        older = file is not None and 0 < process.started_s < file.mtime_s
        placement = plain_data(instance.placement) if instance.placement else None
        for what, expected, actual in (*reasons, *_misplaced(process, facts, placement)):
            yield Finding(
                f"process.{what}:{instance.name}",
                kind if what == "stale" else "drifted",
                "process",
                "llm_server",
                expected,
                f"{actual}, started before its unit was changed" if what == "stale" and older else actual,
                "error",
                _PROVISION,
                instance.name,
                restarts=(instance.name,),
            )


def _services(plan: HostPlan, facts: Facts) -> Iterator[Finding]:
    for instance in plan.instances:
        health = facts.health.get(instance.name)
        if health is None or facts.process_of(instance.unit) is None or _is_tried(facts.units.get(instance.unit)):
            # A server that does not run, or runs as it is tuned, is a unit's finding already.
            continue
        if health.status != 200:
            actual = f"HTTP {health.status}" if health.status is not None else health.error or "no answer"
            yield Finding(
                f"service.unhealthy:{instance.name}",
                "drifted",
                "service",
                "llm_server",
                "HTTP 200",
                actual,
                "error",
                # The roles wait for a server that loads, and restart none that runs as planned.
                f"`journalctl -u {instance.unit}` on the host says why; `systemctl restart {instance.unit}` there starts it anew",
                instance.name,
            )


def _gateway(plan: HostPlan, facts: Facts, applied: Applied) -> Iterator[Finding]:
    """The gateway: its unit, the configuration that it has loaded, and the servers that somebody has taken out of it."""
    decision = plan.gateway
    if decision is None:
        return
    kind: Kind = applied.kind("gateway" in applied.document and decision.state == "started")

    def finding(what: str, expected: str, actual: str, layer: Layer = "unit") -> Finding:
        return Finding(f"{layer}.{what}:{decision.unit}", kind, layer, gateway.ROLE, expected, actual, "error", _PROVISION)

    if decision.state == "absent":
        yield finding("unwanted", "absent", "its files are there")
        return
    unit = facts.units.get(decision.unit)
    for problem in _not_running(unit):
        yield finding(*problem)
    if unit is None or unit.active_state != "active":
        return
    if facts.gateway is None:
        # Without root nobody can ask it.
        return
    if facts.gateway.digest != decision.digest:
        yield finding(
            "stale", f"configuration {decision.digest}", f"configuration {facts.gateway.digest or 'of another kind'}", "process"
        )
    for path in decision.absent_files:
        yield Finding(
            f"file.unwanted:{path}", kind, "file", gateway.ROLE, "absent", "keys that nothing needs", "warn", _PROVISION
        )
    if facts.gateway.keys_current is False:
        yield finding("keys", "the API keys of its files", "others, from before they changed", "process")
    for front, name in _behind(decision):
        server = facts.gateway.servers.get(name)
        if server is None or server.status.split(" ")[0] not in ("DRAIN", "MAINT"):
            continue
        found, fix = "taken-out", f"`python3 {gateway.PROGRAM} open {name}` on the host lets requests in again"
        if server.status == "MAINT (resolution)":
            found, fix = "name-unknown", f"`systemctl reload {gateway.UNIT}` on the host, once its name can be looked up there"
        yield Finding(
            f"service.{found}:{name}", "external", "service", gateway.ROLE, "UP", server.status, "warn", fix, front.instance
        )


def _firewall(plan: HostPlan, facts: Facts) -> Iterator[Finding]:
    """Ports that the host's own firewall keeps closed, and openings for what is gone."""
    decision = plan.firewall
    if decision is None:
        return
    recorded = firewall.recorded_ports(facts)
    for port in decision.closed:
        # Nobody reaches what is served there.
        kind: Kind = "drifted" if port in recorded else "pending"
        yield Finding(f"firewall.closed:{port}", kind, "file", gateway.ROLE, "open", "closed", "error", _PROVISION)
    for port in decision.unwanted:
        actual = "open for an instance that is not served there any more"
        yield Finding(f"firewall.unwanted:{port}", "pending", "file", gateway.ROLE, "closed", actual, "warn", _PROVISION)


def _not_running(unit: UnitFacts | None) -> Iterator[tuple[str, str, str]]:
    """Why a unit does not run as it shall, now and after a boot: what, expected, actual."""
    if unit is None or unit.load_state == "not-found":
        yield "missing", "loaded", "not loaded"
        return
    if "masked" in (unit.load_state, unit.unit_file_state):
        yield "masked", "enabled", "masked"
    elif unit.unit_file_state != "enabled":
        yield "disabled", "enabled", unit.unit_file_state or "unknown"
    if unit.need_daemon_reload:
        yield "stale", "the unit file as loaded", "the file changed since it was loaded"
    if unit.active_state != "active":
        yield "inactive", "active", f"{unit.active_state} ({unit.sub_state}), result {unit.result or 'unknown'}"


def _upkeep(plan: HostPlan, facts: Facts, applied: Applied) -> Iterator[Finding]:
    """Who looks after running servers: the watchdog, and what starts restarts at night."""
    for name in plan.upkeep.units:
        # The host's own cron has no file of ours.
        ours = f"/etc/systemd/system/{name}" if name.startswith("v100ctl-") else CRON_FILE
        kind: Kind = applied.kind(bool(applied.file(ours)))

        for what, expected, actual in _not_running(facts.units.get(name)):
            yield Finding(f"unit.{what}:{name}", kind, "unit", "llm_server", expected, actual, "error", _PROVISION)
    for path in plan.upkeep.absent_files:
        yield Finding(
            f"file.unwanted:{path}", "pending", "file", "llm_server", "absent", "of a plan before this", "warn", _PROVISION
        )


def _monitoring(plan: HostPlan, facts: Facts, applied: Applied) -> Iterator[Finding]:
    """Who tells the state of the host: the timer, and the exporters as they run."""
    decision = plan.monitoring
    if decision is None:
        return

    def finding(what: str, name: str, expected: str, actual: str, kind: Kind, layer: Layer = "unit") -> Finding:
        return Finding(f"{layer}.{what}:{name}", kind, layer, monitoring.ROLE, expected, actual, "warn", _PROVISION)

    for name in decision.units:
        ours = monitoring.drop_in(name) if name != monitoring.TIMER else f"{monitoring.UNITS_DIR}/{name}"
        for what, expected, actual in _not_running(facts.units.get(name)):
            yield finding(what, name, expected, actual, applied.kind(bool(applied.file(ours))))
    service = facts.units.get(decision.service)
    if service is not None and service.active_state == "failed":
        yield finding("failed", decision.service, "no failure", f"result {service.result or 'unknown'}", "drifted")
    for exporter in decision.exporters:
        process = facts.process_of(exporter.unit)
        if process is not None and not set(exporter.arguments) <= set(process.argv):
            kind = applied.kind(bool(applied.file(monitoring.drop_in(exporter.unit))))
            yield finding("argv", exporter.unit, shlex.join(exporter.arguments), shlex.join(process.argv), kind, "process")
    for path in decision.absent_files:
        # What the timer wrote goes with its files.
        if path in facts.files:
            yield finding("unwanted", path, "absent", "of a plan before this", "pending", "file")
    for name in decision.missing_packages:
        yield finding("missing", name, "installed", "not installed", applied.kind(name in applied.words("packages")), "package")


def _behind(decision: GatewayDecision) -> Iterator[tuple[GatewayFront, str]]:
    """Each server behind the gateway, by the name that its program knows."""
    for front in decision.fronts:
        for name in [f"{front.instance}@{server}" for server in front.servers] or [front.instance]:
            yield front, name


def restarts(plan: Mapping[str, Any], facts: Mapping[str, Any]) -> list[str]:
    """The instances that must be (re)started, decided on the running processes and not on what a task changed.

    So a run that was killed between writing a file and restarting is mended by the next one.

    Args:
        plan: ``v100ctl_plan``, the plan as role variables.
        facts: A probe's document, made after the files were written.
    """
    found = Facts.model_validate(facts)
    names: list[str] = []
    for item in plan["instances"]:
        unit = found.units.get(str(item["unit"]))
        process = found.process_of(str(item["unit"]))
        stale = process is None or any(
            (
                *_stale_reasons(
                    process,
                    found,
                    digest=item["digest"],
                    argv=item["argv"],
                    user=plan["account"]["name"],
                    environment=item.get("environment", {}),
                ),
                *_misplaced(process, found, item.get("placement")),
            )
        )
        if stale or unit is None or unit.active_state != "active":
            names.append(str(item["name"]))
    return names
