"""What has to be done so that a host has its NVIDIA driver: package calls, files, holds. Data for the role to carry out."""

from __future__ import annotations

import dataclasses
import fnmatch
import re
from collections.abc import Iterator, Sequence

from v100ctl.catalog import Catalog, Distribution
from v100ctl.catalog.hardware import DriverBranch, PackageSource
from v100ctl.facts import AptSource, Facts
from v100ctl.fleet import HostConfig
from v100ctl.plan.render import MANAGED_HEADER
from v100ctl.plan.types import CudaDecision, DriverDecision, ManagedFile, PackageCall, RepositoryKey

ROLE = "nvidia_driver"
PREFERENCES = "/etc/apt/preferences.d/v100ctl-nvidia-driver"
UPGRADES = "/etc/apt/apt.conf.d/52v100ctl-nvidia-driver"
ARCHIVE_SOURCES = "/etc/apt/sources.list.d/v100ctl-archive.sources"
NVIDIA_SOURCES = "/etc/apt/sources.list.d/v100ctl-nvidia.sources"
NVIDIA_KEY = "/etc/apt/keyrings/v100ctl-nvidia.asc"
RPM_KEY = "/etc/pki/rpm-gpg/RPM-GPG-KEY-v100ctl-nvidia"
YUM_REPOSITORY = "/etc/yum.repos.d/v100ctl-nvidia.repo"
NOUVEAU = "/etc/modprobe.d/v100ctl-nouveau.conf"
SIGNING = "/etc/dkms/framework.conf.d/v100ctl.conf"
#: Where the role puts package files that come from the controller.
LOCAL_PACKAGES = "/var/lib/v100ctl/packages/nvidia_driver"
#: Every file that a driver may need, for the probe to look at.
FILES = (PREFERENCES, UPGRADES, ARCHIVE_SOURCES, NVIDIA_SOURCES, YUM_REPOSITORY, NOUVEAU, SIGNING)

#: Names that a driver's packages have, as apt and dpkg match them ...
NAME_PATTERNS = ("*nvidia*", "libcuda1*", "cuda-drivers*")
#: ... and what tells them from those of CUDA (11.8.89) and of containers (1.17.4): a driver's version starts with its branch.
VERSION_PATTERN = r"^([0-9]+:)?[0-9]{3}\.[0-9]"
#: Packages with the open kernel modules.
_OPEN_MODULES = re.compile(r"nvidia.*-open(-|$)")
#: What unattended-upgrades leaves alone, as regular expressions from a name's beginning.
LEFT_ALONE = ("nvidia-.*", "libnvidia-.*", "cuda-.*", "libcuda.*")
#: How long apt waits for another process that holds its lock.
_LOCK_TIMEOUT_S = 600
#: dnf's own hold is a plugin's.
_VERSION_LOCK = "python3-dnf-plugin-versionlock"
#: The marker in the preferences of a driver that this toolkit has installed: the rest of its packages is ours to keep.
_INSTALLED_MARK = ", installed from "


def is_driver_package(name: str, version: str) -> bool:
    """Is an installed package a part of the driver?"""
    return _named_like_a_driver(name) and bool(re.match(VERSION_PATTERN, version))


def _named_like_a_driver(name: str) -> bool:
    return any(fnmatch.fnmatchcase(name.partition(":")[0], pattern) for pattern in NAME_PATTERNS)


def upstream_version(version: str) -> str:
    """A package's version without epoch and revision: ``1:535.309.01-0ubuntu1`` -> ``535.309.01``."""
    return version.rpartition(":")[2].partition("-")[0]


def was_installed_here(facts: Facts) -> bool:
    """Did this toolkit install the driver that the host has?"""
    found = facts.files.get(PREFERENCES)
    return found is not None and _INSTALLED_MARK in (found.content or "")


def signs_modules(config: HostConfig, distribution: Distribution | None) -> bool:
    """Is there a key to sign with, and a DKMS that can be told of it?"""
    known = distribution is not None and distribution.dkms_settings_folder
    return known and bool(config.nvidia_driver_signing_key and config.nvidia_driver_signing_certificate)


def kernel_headers(distribution: Distribution, facts: Facts) -> tuple[str, ...]:
    """Packages with the headers of the kernel that runs, of the one that boots next, and of those that will follow it.

    Nothing for a kernel that is not the distribution's own: no package has its headers.
    """
    kernels = distribution_kernels(distribution, facts)
    if distribution.package_manager == "dnf":
        # `-matched` keeps them in step from then on. It brings the kernel of its own version, so that is named.
        return (*(f"kernel-devel-{kernel}" for kernel in kernels), *(f"kernel-devel-matched-{kernel}" for kernel in kernels[-1:]))
    following = [
        name.replace("linux-image-", "linux-headers-", 1)
        for name in facts.packages.installed
        if re.fullmatch(r"linux-image-[a-z][a-z0-9.-]*", name) and not name.startswith("linux-image-unsigned")
    ]
    return (*(f"linux-headers-{kernel}" for kernel in kernels), *sorted(following if kernels else ()))


def distribution_kernels(distribution: Distribution, facts: Facts) -> tuple[str, ...]:
    """The kernel that runs and the newest installed one, which boots next; those of the distribution only, each once."""
    forms = {
        "debian": r"[0-9]+\.[0-9]+\.[0-9]+(-[0-9]+|\+deb[0-9]+(\+[0-9]+)?)(-[a-z]+)?-amd64",
        "ubuntu": r"[0-9]+\.[0-9]+\.[0-9]+-[0-9]+-[a-z][a-z0-9-]*",
        "rhel": r"[0-9]+\.[0-9]+\.[0-9]+-.+\.el[0-9_]+.*\.x86_64",
    }
    form = forms.get(distribution.id, r"(?!)")
    wanted = (facts.kernel, *facts.kernels_installed[-1:])
    return tuple(dict.fromkeys(kernel for kernel in wanted if re.fullmatch(form, kernel)))


def chosen_source(config: HostConfig, sources: Sequence[PackageSource]) -> PackageSource | None:
    """The source that the inventory asks for, ``None`` where none of ``sources`` is that and brings the branch."""
    usable = [item for item in sources if item.usable]
    if config.nvidia_driver_source == "distribution":
        usable = [item for item in usable if not item.of_nvidia]
    elif config.nvidia_driver_source == "nvidia_repository":
        usable = [item for item in usable if item.of_nvidia]
    return usable[0] if usable else None


def with_actions(
    decision: DriverDecision,
    config: HostConfig,
    facts: Facts,
    target: DriverBranch,
    source: PackageSource | None,
    sources: Sequence[PackageSource],
    distribution: Distribution,
    catalog: Catalog,
    *,
    source_words: str,
    volta: bool,
) -> DriverDecision:
    """``decision`` with everything that the role has to do.

    A driver that was found and is kept gets its packages held and its branch pinned, and nothing installed. Calls are those that
    are still needed: where the packages are as they shall be, there are none.
    """
    explicit = "auto" not in (config.nvidia_driver_branch, config.nvidia_driver_source)
    managed = source is not None and (decision.action != "keep" or was_installed_here(facts) or explicit)
    apt = distribution.package_manager == "apt"
    local = managed and config.nvidia_driver_source == "local_files"
    from_nvidia = managed and not local and source is not None and source.of_nvidia
    transitional = any(item.kind == "transitional" for item in sources)
    exact = config.nvidia_driver_version or (config.nvidia_driver_branch if "." in config.nvidia_driver_branch else "")
    packages = (*source.pins, *source.packages) if managed and source else ()
    files: list[ManagedFile] = [_nouveau()]
    if signs_modules(config, distribution):
        files.append(_signing(config))
    if apt:
        blocked = "Ubuntu" if from_nvidia and transitional else ""
        files += [_preferences(target.branch, exact, source_words if managed else "", blocked=blocked), _upgrades()]
    key: RepositoryKey | None = None
    stale: tuple[str, ...] = ()
    if managed and source is not None and not local:
        if source.of_nvidia:
            files_of_nvidia, key, stale = _nvidia_repository(config, source, facts, distribution, catalog)
            files += files_of_nvidia
        elif apt:
            files += _archive(source, facts, distribution)
    unwanted = _unwanted(facts, target, packages, volta=volta) if managed and decision.action != "keep" else ()
    planned = dataclasses.replace(
        decision,
        manager=distribution.package_manager,
        packages=packages,
        exact=exact if managed else "",
        own_versions=source.own_versions if managed and source else (),
        unwanted=unwanted,
        files=tuple(sorted(files, key=lambda file: file.path)),
        absent_files=stale,
        key=key,
        untrusted_keys=catalog.nvidia_repository.rotated_fingerprints if from_nvidia else (),
        hold=NAME_PATTERNS,
        hold_version=VERSION_PATTERN,
        hold_package="" if apt else _VERSION_LOCK,
        kernels=distribution_kernels(distribution, facts) if managed else (),
        initramfs=_initramfs(distribution, facts),
        uninstaller=(facts.nvidia.uninstaller, "--silent") if facts.nvidia.uninstaller and decision.action == "replace" else (),
        local_packages=LOCAL_PACKAGES if local else "",
        signed=signs_modules(config, distribution),
        certificate=config.nvidia_driver_signing_certificate if signs_modules(config, distribution) else "",
    )
    if not managed or source is None:
        return planned
    calls = _apt_calls if apt else _dnf_calls
    return dataclasses.replace(planned, calls=tuple(calls(planned, source, facts, distribution, catalog)))


def missing_packages(decision: DriverDecision, facts: Facts, catalog: Catalog) -> tuple[str, ...]:
    """Packages of the decision that are not installed, or whose version is another branch's or not the pinned one."""
    return tuple(name for name in decision.packages if package_problem(decision, name, facts, catalog) is not None)


def unheld_packages(decision: DriverDecision, facts: Facts) -> tuple[str, ...]:
    """Installed packages of the driver that the package manager may change on its own."""
    if not decision.hold:
        return ()
    held = {name.partition(":")[0] for name in facts.packages.held}
    names = (name for name, version in facts.packages.installed.items() if is_driver_package(name, version))
    return tuple(sorted(name for name in names if name.partition(":")[0] not in held and name not in decision.unwanted))


def package_problem(decision: DriverDecision, name: str, facts: Facts, catalog: Catalog) -> str | None:
    """What is wrong with a package of the decision: empty where it is missing, its version where that is wrong, or ``None``."""
    version = facts.packages.installed.get(name)
    if version is None:
        return ""
    if name in decision.own_versions or not re.match(VERSION_PATTERN, version):
        return None
    found = upstream_version(version)
    row = catalog.driver(found)
    wrong = found != decision.exact if decision.exact else row is not None and row.branch != decision.branch
    return version if wrong else None


# --- apt ------------------------------------------------------------------------------------------------------------------


def _apt(*words: str) -> tuple[str, ...]:
    return (
        "apt-get",
        "--yes",
        "--no-install-recommends",
        "-o",
        f"DPkg::Lock::Timeout={_LOCK_TIMEOUT_S}",
        # A file that an administrator changed stays as it is, and nobody is asked.
        "-o",
        "Dpkg::Options::=--force-confdef",
        "-o",
        "Dpkg::Options::=--force-confold",
        *words,
    )


def _apt_calls(
    decision: DriverDecision, source: PackageSource, facts: Facts, distribution: Distribution, catalog: Catalog
) -> Iterator[PackageCall]:
    headers = [name for name in kernel_headers(distribution, facts) if name not in facts.packages.installed]
    missing = missing_packages(decision, facts, catalog)
    # What an interrupted installation left has no version that one could count on before it is finished.
    unfinished = [
        name
        for name in facts.packages.half_configured
        if decision.action == "replace" and _named_like_a_driver(name) and name not in decision.packages and not _shared(name)
    ]
    if not headers and not missing and not decision.unwanted and not unfinished:
        return
    if not decision.local_packages:
        yield PackageCall("Fetch the package lists", (*_apt("update"),), changes=False)
    if headers:
        # Before the driver: its modules are built when it is installed, for every kernel that has its headers by then.
        yield PackageCall("Install the kernel's headers", _apt("install", *headers))
    pins = [name for name in source.pins if name in missing]
    if pins and not decision.local_packages:
        yield PackageCall(f"Install the pin of branch {decision.branch}", _apt("install", *pins))
    wanted = [_at_version(name, decision) for name in source.packages]
    going = [f"{name}-" for name in decision.unwanted if _goes_anyway(name)]
    # Debian and NVIDIA's repository share most names: to remove one would be to refuse what the other packages depend on.
    settles = tuple(sorted({name for name in (*decision.unwanted, *unfinished) if not _goes_anyway(name)}))
    # What goes and what comes in one call: it is resolved and downloaded whole before anything is removed.
    words = ["install", "--allow-downgrades", "--allow-change-held-packages", *(("--purge",) if going or settles else ())]
    if not [name for name in missing if name not in pins] and not decision.unwanted and not settles:
        return
    versions = facts.packages.installed
    held = [name for name in facts.packages.held if name in unfinished or is_driver_package(name, versions.get(name, ""))]
    if held:
        # Packages that others drag along would stay as they are: only those that are named may change while held.
        yield PackageCall("Release what is held", ("apt-mark", "unhold", *held))
    if decision.local_packages:
        name = "Install the driver from package files"
        yield PackageCall(name, _apt(*words, *going), disturbs=True, local_packages=True, settles=settles)
        return
    name = f"Install driver {decision.exact or decision.branch}"
    yield PackageCall(name, _apt(*words, *wanted, *going), disturbs=True, settles=settles)


def _at_version(name: str, decision: DriverDecision) -> str:
    return f"{name}={decision.exact}*" if decision.exact and name not in decision.own_versions else name


def _unwanted(facts: Facts, target: DriverBranch, packages: Sequence[str], *, volta: bool) -> tuple[str, ...]:
    """Installed packages of another branch, pins of another branch, and those with open modules where these do not work."""
    found = []
    for name, version in facts.packages.installed.items():
        if name.partition(":")[0] in packages:
            continue
        open_modules = volta and bool(_OPEN_MODULES.search(name))
        if name.startswith("nvidia-driver-pinning-") or (open_modules and is_driver_package(name, version)):
            found.append(name)
        elif is_driver_package(name, version):
            branch = upstream_version(version).partition(".")[0]
            if branch != target.branch and not _shared(name):
                found.append(name)
    return tuple(sorted(found))


def _goes_anyway(name: str) -> bool:
    """A pin of another branch, and packages with open modules: they go, whichever versions there are."""
    return name.startswith("nvidia-driver-pinning-") or bool(_OPEN_MODULES.search(name))


def _shared(name: str) -> bool:
    """Programs that a distribution packages once for all branches; another branch's driver takes them along."""
    return name in ("nvidia-modprobe", "nvidia-persistenced", "nvidia-settings", "nvidia-xconfig")


def _preferences(branch: str, exact: str, source_words: str, *, blocked: str) -> ManagedFile:
    """apt's pin: the branch's versions win over every other, the exact one over the branch's."""
    names = " ".join(NAME_PATTERNS)
    origin = f"{_INSTALLED_MARK}{source_words}" if source_words else ", found on the host and kept"
    lines = [f"# {MANAGED_HEADER}", f"# Driver branch {branch}{origin}"]
    if blocked:
        lines += [
            f"# Packages of these names in {blocked}'s own archive are transitional and install another branch.",
            f"Package: {names}",
            f"Pin: release o={blocked}",
            "Pin-Priority: -1",
            "",
        ]
    # 1000 and above lets apt go back to an older version.
    if exact:
        lines += [f"Package: {names}", f"Pin: version {exact}*", "Pin-Priority: 1002", ""]
    lines += [f"Package: {names}", f"Pin: version {branch}.*", "Pin-Priority: 1001"]
    return ManagedFile(PREFERENCES, "\n".join(lines) + "\n", role=ROLE)


def _upgrades() -> ManagedFile:
    patterns = "\n".join(f'  "{pattern}";' for pattern in LEFT_ALONE)
    text = f"// {MANAGED_HEADER}\nUnattended-Upgrade::Package-Blacklist {{\n{patterns}\n}};\n"
    return ManagedFile(UPGRADES, text, role=ROLE)


def _archive(source: PackageSource, facts: Facts, distribution: Distribution) -> Iterator[ManagedFile]:
    """The components that the driver is in, from the very archives that the host uses already."""
    wanted = (source.repository or "").split()
    origin = {"debian": "Debian", "ubuntu": "Ubuntu"}[distribution.id]
    stanzas: dict[str, None] = {}
    entries = [entry for entry in facts.apt_sources if entry.path != ARCHIVE_SOURCES]
    own = [entry for entry in entries if "main" in entry.components and entry.origin == origin]
    # Before its first update a host does not know what its archives call themselves.
    for entry in own or [entry for entry in entries if "main" in entry.components and not entry.origin]:
        enabled = {
            component
            for other in entries
            if (other.uri.rstrip("/"), other.suite) == (entry.uri.rstrip("/"), entry.suite)
            for component in other.components
        }
        lacking = [component for component in wanted if component not in enabled]
        if lacking:
            stanzas[_stanza(entry, lacking)] = None
    if stanzas:
        yield ManagedFile(ARCHIVE_SOURCES, f"# {MANAGED_HEADER}\n" + "\n".join(stanzas), role=ROLE)


def _stanza(entry: AptSource, components: Sequence[str]) -> str:
    lines = ["Types: deb", f"URIs: {entry.uri}", f"Suites: {entry.suite}", f"Components: {' '.join(components)}"]
    if entry.architectures:
        lines.append(f"Architectures: {' '.join(entry.architectures)}")
    if entry.signed_by:
        lines.append(f"Signed-By: {entry.signed_by}")
    if entry.trusted:
        lines.append("Trusted: yes")
    return "\n".join(lines) + "\n"


def _nvidia_repository(
    config: HostConfig, source: PackageSource, facts: Facts, distribution: Distribution, catalog: Catalog
) -> tuple[list[ManagedFile], RepositoryKey | None, tuple[str, ...]]:
    """NVIDIA's repository as files, its key, and files of older set-ups that must go: apt refuses two keys for one place."""
    row = catalog.nvidia_repository
    url = f"{(config.nvidia_driver_repository_url or row.url).rstrip('/')}/{source.repository}/x86_64"
    dnf = distribution.package_manager == "dnf"
    # A mirror that signs anew has a key of its own; one that only copies has NVIDIA's beside the packages.
    key = RepositoryKey(
        RPM_KEY if dnf else NVIDIA_KEY,
        config.nvidia_driver_repository_key_url or f"{url}/{row.dnf_key if dnf else row.apt_key}",
        config.nvidia_driver_repository_key_fingerprint or (row.dnf_key_fingerprint if dnf else row.apt_key_fingerprint),
    )
    if dnf:
        text = (
            f"# {MANAGED_HEADER}\n[v100ctl-nvidia]\nname=NVIDIA CUDA {source.repository}\nbaseurl={url}\n"
            f"enabled=1\ngpgcheck=1\ngpgkey=file://{RPM_KEY}\n"
        )
        return [ManagedFile(YUM_REPOSITORY, text, role=ROLE)], key, ()
    stale = {
        entry.path
        for entry in facts.apt_sources
        if entry.path not in (NVIDIA_SOURCES, "/etc/apt/sources.list") and f"/{source.repository}/x86_64" in f"{entry.uri}/"
    }
    shared = {entry.path for entry in facts.apt_sources if f"/{source.repository}/x86_64" not in f"{entry.uri}/"}
    text = f"# {MANAGED_HEADER}\nTypes: deb\nURIs: {url}/\nSuites: /\nSigned-By: {NVIDIA_KEY}\n"
    return [ManagedFile(NVIDIA_SOURCES, text, role=ROLE)], key, tuple(sorted(stale - shared))


def with_repository(
    decision: CudaDecision,
    config: HostConfig,
    facts: Facts,
    source: PackageSource,
    driver: DriverDecision | None,
    distribution: Distribution,
    catalog: Catalog,
) -> CudaDecision:
    """A toolkit's decision with what names the repository that it comes from, as far as the driver's decision does not."""
    files: list[ManagedFile] = []
    if source.of_nvidia:
        files, key, stale = _nvidia_repository(config, source, facts, distribution, catalog)
        rotated = catalog.nvidia_repository.rotated_fingerprints
        decision = dataclasses.replace(decision, key=key, absent_files=stale, untrusted_keys=rotated)
    elif distribution.package_manager == "apt":
        files = list(_archive(source, facts, distribution))
    written = {file.path for file in driver.files} if driver is not None else set()
    own = (dataclasses.replace(file, role="cuda_toolkit") for file in files if file.path not in written)
    return dataclasses.replace(decision, files=tuple(own))


# --- dnf ------------------------------------------------------------------------------------------------------------------


def _dnf_calls(
    decision: DriverDecision, source: PackageSource, facts: Facts, distribution: Distribution, catalog: Catalog
) -> Iterator[PackageCall]:
    installed = facts.packages.installed
    headers = [name for name in kernel_headers(distribution, facts) if not _is_installed(name, facts)]
    missing = missing_packages(decision, facts, catalog)
    if missing and "dkms" not in installed and "epel-release" not in installed:
        package = distribution.dkms_source.get(facts.distribution.id)
        if package is not None:
            yield PackageCall("Make the repository known that has DKMS", _dnf("install", package))
    if headers:
        yield PackageCall("Install the kernel's headers", _dnf("install", *headers))
    if not missing and not decision.unwanted:
        return
    held = [name for name in facts.packages.held if _named_like_a_driver(name)]
    if held:
        yield PackageCall("Release what is held", _dnf("versionlock", "delete", *held))
    if decision.local_packages:
        name = "Install the driver from package files"
        yield PackageCall(name, _dnf("install", "--allowerasing"), disturbs=True, local_packages=True)
        return
    others = sorted(name for name, version in installed.items() if is_driver_package(name, version))
    if source.stream is not None and others:
        # In one step with the packages: between two streams each of them belongs to neither.
        name = f"Move to the stream of branch {decision.branch}"
        yield PackageCall(name, _dnf("module", "switch-to", source.stream, "--allowerasing"), disturbs=True)
    elif source.stream is not None:
        # A stream cannot be enabled over another one of its module.
        yield PackageCall("Leave the module's other streams", _dnf("module", "reset", source.stream.partition(":")[0]))
        yield PackageCall(f"Take the stream of branch {decision.branch}", _dnf("module", "enable", source.stream))
    if source.hold:
        if _VERSION_LOCK not in installed:
            yield PackageCall("Install the version lock", _dnf("install", _VERSION_LOCK))
        yield PackageCall(f"Lock branch {decision.branch}", _dnf("versionlock", "add", *source.hold))
        if others:
            # A package that is there satisfies `install`, also one of a newer branch.
            name = f"Bring what is there to branch {decision.branch}"
            yield PackageCall(name, _dnf("distro-sync", "--allowerasing", *others), disturbs=True)
    wanted = [f"{name}-{decision.exact}" if decision.exact else name for name in source.packages]
    name = f"Install driver {decision.exact or decision.branch}"
    yield PackageCall(name, _dnf("install", "--allowerasing", *wanted), disturbs=True)


def _dnf(*words: str) -> tuple[str, ...]:
    return ("dnf", "--assumeyes", *words)


def _is_installed(name: str, facts: Facts) -> bool:
    """Is ``kernel-devel-5.14.0-503.el9.x86_64`` among the installed versions of ``kernel-devel``?"""
    package = next(package for package in ("kernel-devel-matched", "kernel-devel") if name.startswith(f"{package}-"))
    version = name.removeprefix(f"{package}-").removesuffix(".x86_64")
    return version in facts.packages.installed.get(package, "").split(", ")


# --- Files of the kernel's side -----------------------------------------------------------------------------------------


def _nouveau() -> ManagedFile:
    return ManagedFile(NOUVEAU, f"# {MANAGED_HEADER}\nblacklist nouveau\noptions nouveau modeset=0\n", role=ROLE)


def _signing(config: HostConfig) -> ManagedFile:
    text = (
        f"# {MANAGED_HEADER}\nmok_signing_key={config.nvidia_driver_signing_key}\n"
        f"mok_certificate={config.nvidia_driver_signing_certificate}\n"
    )
    return ManagedFile(SIGNING, text, role=ROLE)


def _initramfs(distribution: Distribution, facts: Facts) -> tuple[tuple[str, ...], ...]:
    """For each kernel that can be booted: what rebuilds its initramfs. Nothing in a container, which boots none."""
    if distribution.package_manager == "apt":
        return tuple(("update-initramfs", "-u", "-k", kernel) for kernel in facts.kernels_installed)
    return tuple(("dracut", "--force", f"/boot/initramfs-{kernel}.img", kernel) for kernel in facts.kernels_installed)
