"""Which NVIDIA driver a host shall have, and whether it can: branch, kernel modules, kernel, packages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import date

from v100ctl.catalog import Catalog, Distribution, version_key
from v100ctl.catalog.hardware import DriverBranch, PackageSource
from v100ctl.facts import Facts
from v100ctl.fleet import HostConfig
from v100ctl.plan.cards import HostCard
from v100ctl.plan.driver_actions import (
    chosen_source,
    distribution_kernels,
    is_driver_package,
    kernel_headers,
    signs_modules,
    with_actions,
)
from v100ctl.plan.types import DriverDecision, Rule

#: What a bare host gets. 580 is the upgrade that outlives it.
DEFAULT_BRANCH = "535"
#: A working driver from this branch on is kept.
OLDEST_KEPT_BRANCH = 535
UPGRADE_BRANCH = "580"


def installed_version(facts: Facts) -> str:
    """The driver on the host: what is loaded, else what the running kernel would load; empty where there is none."""
    return facts.nvidia.module_version or facts.nvidia.on_disk_module_version


def is_incomplete(facts: Facts) -> bool:
    """Did somebody install the kernel modules alone? Without the library no program reaches a card."""
    return (
        bool(installed_version(facts))
        and not facts.nvidia.library_version
        and facts.nvidia.smi.status == "absent"
        # A driver that came in another way is known by what is loaded alone.
        and any(is_driver_package(name, version) for name, version in facts.packages.installed.items())
    )


def decide_driver(
    config: HostConfig,
    facts: Facts,
    cards: Sequence[HostCard],
    distribution: Distribution | None,
    catalog: Catalog,
    as_of: date,
) -> tuple[DriverDecision | None, tuple[Rule, ...]]:
    """The driver for a host whose cards shall compute, and what is wrong with it.

    A working driver that supports the card is never replaced, unless the inventory pins another.
    """
    volta = any(card.is_volta and not card.passed_through for card in cards)
    found = installed_version(facts)
    flavour = facts.nvidia.module_flavour or facts.nvidia.on_disk_module_flavour
    installed = catalog.driver(found) if found else None
    pin = config.nvidia_driver_branch
    rules: list[Rule] = []
    if config.nvidia_driver_version:
        if pin != "auto" and not config.nvidia_driver_version.startswith(f"{pin.partition('.')[0]}."):
            rules.append(
                Rule(
                    "driver-version-other-branch",
                    "refuse",
                    f"`nvidia_driver_version: {config.nvidia_driver_version}` is no version of `nvidia_driver_branch: {pin}`",
                    "one of the two alone",
                )
            )
            return None, tuple(rules)
        pin = config.nvidia_driver_version
    target = _target(pin, installed, flavour, volta=volta, catalog=catalog)
    if target is None:
        known = ", ".join(row.branch for row in catalog.drivers if row.drives_volta and int(row.branch) >= OLDEST_KEPT_BRANCH)
        rules.append(
            Rule(
                "driver-branch-unknown",
                "refuse",
                f"`nvidia_driver_branch: {pin}` has no row in the catalog of {catalog.as_of}",
                f"`nvidia_driver_branch: auto`, or one of {known}",
            )
        )
        return None, tuple(rules)
    exact = pin if "." in pin else ""
    same = installed is not None and installed.branch == target.branch and exact in ("", found)
    usable_flavour = not (volta and flavour == "open")
    incomplete = is_incomplete(facts)
    keep = same and usable_flavour and not incomplete
    sources = _sources(target, distribution)
    source = chosen_source(config, sources)
    local = config.nvidia_driver_source == "local_files"
    words = f"package files of {config.nvidia_driver_local_files}" if local else source_in_words(source) if source else ""
    decision = DriverDecision(
        branch=target.branch,
        version=found if keep else exact,
        action="keep" if keep else "install" if not found or (same and incomplete) else "replace",
        source=words if not keep else "",
        unloaded=keep and bool(cards) and not facts.nvidia.module_version,
    )
    rules += _state_rules(facts, found, installed, flavour, decision, volta=volta)
    rules += _mixed_rules(cards, volta=volta)
    rules += _target_rules(pin, target, decision, cards, distribution, catalog, as_of, volta=volta)
    if not keep and (target.drives_volta or not volta):
        rules += _source_rules(config, target, distribution, catalog, as_of)
        rules += _kernel_rules(config, target, decision, source, facts, distribution, catalog)
    if distribution is not None:
        decision = with_actions(
            decision, config, facts, target, source, sources, distribution, catalog, source_words=words, volta=volta
        )
    return decision, tuple(rules)


def _sources(branch: DriverBranch, distribution: Distribution | None) -> tuple[PackageSource, ...]:
    return branch.sources(distribution.id, distribution.version_id) if distribution else ()


def source_in_words(source: PackageSource) -> str:
    """Where packages come from, for people."""
    if source.of_nvidia:
        return f"NVIDIA's repository {source.repository}"
    return f"the distribution's own archive ({source.repository})" if source.repository else "the distribution's own archive"


def _target(pin: str, installed: DriverBranch | None, flavour: str, *, volta: bool, catalog: Catalog) -> DriverBranch | None:
    if pin != "auto":
        return catalog.driver(pin)
    if (
        installed is not None
        and int(installed.branch) >= OLDEST_KEPT_BRANCH
        and (installed.drives_volta or not volta)
        and not (volta and flavour == "open")
    ):
        return installed
    # Open modules on a Volta are replaced by the proprietary ones of the same branch, where that drives the card.
    if installed is not None and int(installed.branch) >= OLDEST_KEPT_BRANCH and installed.drives_volta:
        return installed
    return catalog.driver(DEFAULT_BRANCH)


def _state_rules(
    facts: Facts, found: str, installed: DriverBranch | None, flavour: str, decision: DriverDecision, *, volta: bool
) -> Iterator[Rule]:
    """What the host has now."""
    if volta and flavour == "open":
        yield Rule(
            "driver-open-modules",
            "warn",
            f"the host has the open kernel modules of driver {found}; a V100 has no GSP, so they report `No devices were found`",
            f"the proprietary modules of branch {decision.branch}, which the plan installs in their place",
        )
    if volta and installed is not None and not installed.drives_volta and decision.branch != installed.branch:
        yield Rule(
            "driver-ignores-volta",
            "warn",
            f"the installed driver {found} no longer drives a V100 ({UPGRADE_BRANCH} is the last branch that does)",
            f"branch {decision.branch}, which the plan installs in its place",
        )
    if is_incomplete(facts):
        yield Rule(
            "driver-incomplete",
            "warn",
            f"the host has the kernel modules of driver {found}, and neither its library nor `nvidia-smi`: no program reaches "
            "a card",
            f"the packages of branch {decision.branch}, which the plan installs",
        )
    if "nvidia" in facts.errors:
        yield Rule(
            "driver-not-probed",
            "refuse",
            f"which driver the host has could not be learned: {facts.errors['nvidia']}",
            "plan again: a busy host answers later; one that never does has a driver that hangs, and `dmesg` there says so",
        )
    smi = facts.nvidia.smi
    library = facts.nvidia.library_version
    if smi.mismatch or (library and found and library != found):
        yield Rule(
            "driver-library-mismatch",
            "refuse",
            f"the loaded module is {found or 'absent'} and the user-space library is "
            f"{library if library and library != found else 'of another version'}: an upgrade went in without a reboot",
            "`v100ctl recover HOST`, which loads the installed one where only services use the cards; a reboot does too",
        )
    if smi.status == "timeout":
        yield Rule(
            "driver-wedged",
            "refuse",
            "`nvidia-smi` gave no answer within the probe's time: the driver hangs",
            "reboot the host, and power it off and on where that hangs too; `dmesg` there has what the driver said last",
        )
    if decision.unloaded and not facts.nouveau.loaded:
        yield Rule(
            "driver-not-loaded",
            "warn",
            f"driver {found} is installed for the kernel that runs, and not loaded: no program reaches a card",
            "`v100ctl provision` loads it, or reboots the host as `nvidia_driver_reboot` says",
        )
    # Beside a driver that answers it holds no card of ours.
    if facts.nouveau.loaded and smi.status != "ok":
        yield Rule(
            "nouveau-loaded",
            "warn",
            "the kernel's own driver `nouveau` is loaded and holds the card"
            + ("; it is blacklisted, so a reboot gets rid of it" if facts.nouveau.blacklisted else ""),
            "it is blacklisted and the initramfs rebuilt before NVIDIA's driver is installed; a reboot follows",
        )


def _mixed_rules(cards: Sequence[HostCard], *, volta: bool) -> Iterator[Rule]:
    needing = [card for card in cards if not card.passed_through and card.needs_open_modules]
    if volta and needing:
        names = ", ".join(sorted({card.name for card in needing}))
        yield Rule(
            "gpu-mixed-modules",
            "refuse",
            f"the host has a V100, which needs the proprietary kernel modules, and {names}, which needs the open ones; "
            "a kernel loads one of the two",
            "one kind of card in this host, or the other card handed to a virtual machine (vfio)",
        )


def _target_rules(
    pin: str,
    target: DriverBranch,
    decision: DriverDecision,
    cards: Sequence[HostCard],
    distribution: Distribution | None,
    catalog: Catalog,
    as_of: date,
    *,
    volta: bool,
) -> Iterator[Rule]:
    """What the plan wants."""
    if volta and not target.drives_volta:
        yield Rule(
            "driver-ignores-volta",
            "refuse",
            f"`nvidia_driver_branch: {pin}`: branch {target.branch} no longer drives a V100",
            f'`nvidia_driver_branch: "{UPGRADE_BRANCH}"`, the last branch that does',
        )
        return
    if target.has_ended(as_of):
        # A card that is not seen is taken for a V100: that is what the host shall serve on.
        any_card = all(card.compute_capability and not card.is_volta for card in cards) and bool(cards)
        later = [
            row
            for row in catalog.drivers
            if (row.drives_volta or any_card)
            and row.end_of_life
            and not row.has_ended(as_of)
            and (distribution is None or any(source.usable for source in _sources(row, distribution)))
        ]
        best = max(later, key=lambda row: row.end_of_life or date.min, default=None)
        since = f" since {target.end_of_life.isoformat()}" if target.end_of_life else ""
        yield Rule(
            "driver-end-of-life",
            "warn",
            f"driver branch {target.branch} has had no security fixes{since}",
            f'`nvidia_driver_branch: "{best.branch}"`, maintained until {best.end_of_life}' if best else None,
        )
    if decision.action == "keep" and pin == "auto":
        yield Rule(
            "driver-kept",
            "info",
            f"the working driver {decision.version} (branch {decision.branch}) is kept",
            None,
        )


def _source_rules(
    config: HostConfig, target: DriverBranch, distribution: Distribution | None, catalog: Catalog, as_of: date
) -> Iterator[Rule]:
    if distribution is None:
        return
    if config.nvidia_driver_source == "local_files" and not config.nvidia_driver_local_files:
        yield Rule(
            "driver-local-files-missing",
            "refuse",
            "`nvidia_driver_source: local_files` without `nvidia_driver_local_files`",
            "`nvidia_driver_local_files: FOLDER`, a folder of package files on the controller",
        )
    sources = _sources(target, distribution)
    source = chosen_source(config, sources)
    if source is None and any(item.usable for item in sources):
        yield _elsewhere_rule(config, target, sources, distribution, catalog)
        return
    if source is None:
        others = [
            row
            for row in catalog.drivers
            if row.drives_volta
            and int(row.branch) >= OLDEST_KEPT_BRANCH
            and any(item.usable for item in _sources(row, distribution))
        ]
        living = [row for row in others if not row.has_ended(as_of)] or others
        reason = next((f": {item.reason}" for item in sources if item.reason), "")
        yield Rule(
            "driver-not-packaged",
            "refuse",
            f"{distribution.name} has no packages of driver branch {target.branch}{reason}",
            f'`nvidia_driver_branch: "{living[-1].branch}"`' if living else "another distribution, or a driver installed by hand",
        )
        return
    for item in sources:
        if item.kind == "transitional":
            yield Rule(
                "driver-transitional-package",
                "info",
                f"{distribution.name}'s own {', '.join(item.packages) or 'package'} is transitional and installs branch "
                f"{item.installs}; branch {target.branch} comes from {source_in_words(source)}",
                None,
            )


def _elsewhere_rule(
    config: HostConfig, target: DriverBranch, sources: Sequence[PackageSource], distribution: Distribution, catalog: Catalog
) -> Rule:
    """The branch is to be had, but not from where the inventory wants it."""
    wanted = config.nvidia_driver_source
    theirs = wanted == "nvidia_repository"
    where = "NVIDIA's repository" if theirs else "its own archive"
    reason = next((item.reason for item in sources if item.reason and not item.usable and item.of_nvidia == theirs), None)
    here = [
        row.branch
        for row in catalog.drivers
        if row.drives_volta
        and int(row.branch) >= OLDEST_KEPT_BRANCH
        and chosen_source(config, _sources(row, distribution)) is not None
    ]
    other = f', or `nvidia_driver_branch: "{here[-1]}"`' if here else ""
    return Rule(
        "driver-not-in-source",
        "refuse",
        f"`nvidia_driver_source: {wanted}`: {distribution.name} has no packages of driver branch {target.branch} in {where}"
        + (f": {reason}" if reason else ""),
        f"`nvidia_driver_source: {'distribution' if theirs else 'nvidia_repository'}`{other}",
    )


def _kernel_rules(
    config: HostConfig,
    target: DriverBranch,
    decision: DriverDecision,
    source: PackageSource | None,
    facts: Facts,
    distribution: Distribution | None,
    catalog: Catalog,
) -> Iterator[Rule]:
    """Can modules be built and loaded for the kernel that runs?"""
    if facts.secure_boot and signs_modules(config, distribution):
        yield Rule(
            "driver-modules-signed",
            "info",
            f"Secure Boot is on: modules are signed with {config.nvidia_driver_signing_key}; its certificate has to be enrolled",
            None,
        )
    elif facts.secure_boot:
        yield Rule(
            "driver-secure-boot",
            "refuse",
            "Secure Boot is on: modules that DKMS builds here are not signed with a key that the firmware knows, "
            "so the kernel refuses them",
            "enrol a machine owner key (`mokutil --import`) and name it in `nvidia_driver_signing_key` and "
            "`nvidia_driver_signing_certificate`, or switch Secure Boot off in the firmware",
        )
    # Where nobody says which version comes, the newest of the branch is taken: that is what a repository installs.
    version = decision.version or (source.version if source else None) or f"{target.branch}.999"
    packaged_by = distribution.id if distribution and source and source.kind == "distribution" else None
    if version and facts.kernel:
        builds, entry = target.builds_for(version, facts.kernel, packaged_by)
        if builds is False and entry is not None:
            able = [
                row.branch
                for row in catalog.drivers
                if row.drives_volta and int(row.branch) > int(target.branch) and _may_build(row, distribution, facts.kernel)
            ]
            upto = f" up to {entry.newest}" if entry.newest else f" before {entry.fails_from}"
            yield Rule(
                "driver-kernel-too-new",
                "refuse",
                f"the host runs kernel {facts.kernel}; the modules of driver {version} build for kernels{upto}",
                f'`nvidia_driver_branch: "{able[-1]}"`' if able else f"a kernel{upto}",
            )
        known = [entry.newest for entry in target.kernels if entry.newest is not None]
        newest = max(known, key=version_key, default=None)
        if builds is None and newest is not None and version_key(facts.kernel)[:2] > version_key(newest)[:2]:
            yield Rule(
                "driver-kernel-unproven",
                "warn",
                f"the host runs kernel {facts.kernel}; branch {target.branch} is known to build for kernels up to {newest}, "
                "and nothing is known beyond",
                f"a kernel up to {newest}, or try: a build that fails leaves the host as it was",
            )
    own = distribution_kernels(distribution, facts) if distribution else ()
    if facts.kernel and facts.kernel not in own and facts.kernel not in facts.kernel_headers and distribution is not None:
        yield Rule(
            "driver-kernel-foreign",
            "warn",
            f"the host runs kernel {facts.kernel}, which is none of {distribution.name}'s: no package has its headers, so no "
            "modules are built for it",
            "a kernel of the distribution, or headers at `/lib/modules/KERNEL/build`; a container has the modules of its host",
        )
    installs = kernel_headers(distribution, facts) if distribution else ()
    if facts.kernel_headers and facts.kernel and facts.kernel not in facts.kernel_headers:
        yield Rule(
            "kernel-headers-other",
            "warn",
            f"the kernel that runs is {facts.kernel}, and the headers on the host are for {', '.join(facts.kernel_headers)}: "
            "DKMS would build for a kernel that does not run",
            f"the headers of {facts.kernel}{', which the plan installs' if installs else ''}, "
            f"or a reboot into {facts.kernel_headers[-1]}",
        )


def _may_build(branch: DriverBranch, distribution: Distribution | None, kernel: str) -> bool:
    """Whether the distribution gets the branch from somewhere and nobody says that those modules fail for this kernel."""
    source = next((item for item in _sources(branch, distribution) if item.usable), None)
    if source is None:
        return False
    packaged_by = distribution.id if distribution and source.kind == "distribution" else None
    return branch.builds_for(source.version or f"{branch.branch}.999", kernel, packaged_by)[0] is not False
