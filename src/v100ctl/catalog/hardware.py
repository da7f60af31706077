"""Typed rows of the hardware side: GPUs, driver branches, CUDA toolkits, and how a distribution installs each.

How ranges are to be read, which the catalog's own test checks:

- a **driver** row answers for every version from its branch up to the next row's branch, the last row for everything newer. So
  every version from the first row on has exactly one answer, and a branch that NVIDIA never released on Linux cannot fall
  through. Versions before the first row have none.
- a **CUDA** row answers for one ``major.minor``; its compiler and libc bounds answer for every gcc and every glibc.
- an **architecture** answers for ranges of PCI device ids that do not overlap; an id in no range is unknown, never an error.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from datetime import date
from typing import Literal

from pydantic import Field

from v100ctl.catalog.rows import Row, version_key

OpenModules = Literal["required", "optional", "refused"]


class Architecture(Row):
    """A GPU architecture, the device ids that belong to it, and the kernel modules it takes.

    ``open_modules``: ``refused`` where there is no GPU System Processor, ``required`` where the proprietary modules no longer
    drive the card, ``optional`` between.
    """

    name: str
    open_modules: OpenModules
    #: Inclusive ranges of device ids, in hexadecimal, ``"1d81-1df6"``.
    device_ids: tuple[str, ...]
    #: Regular expression over the name that ``nvidia-smi`` shows, ``None`` where names do not tell.
    name_pattern: str | None
    source: str

    @functools.cached_property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """``device_ids`` as numbers."""
        return tuple((int(first, 16), int(last, 16)) for first, _, last in (item.partition("-") for item in self.device_ids))

    def has(self, device_id: int) -> bool:
        """Is ``device_id`` (without the vendor) one of this architecture's?"""
        return any(first <= device_id <= last for first, last in self.ranges)


class GpuRow(Row):
    """One card that this toolkit serves from.

    Attributes:
        pci_id: Vendor and device, ``10de:1db1``.
        also: Names that other boards of the same id carry; ``-LS`` and ``-H`` boards differ in clocks and power limit.
        memory_bytes: What CUDA can have of it, the least that was seen.
        memory_total_bytes: What ``nvidia-smi`` of current drivers calls the total; what lies between is reserved.
        power_limit_w: Default power limit, ``None`` where no source says.
        power_min_w: Lowest power limit that may be set; ``None`` where no source says.
        bandwidth_bytes_per_s: Peak of the memory, reads and writes together; ``None`` where no source says.
        sm_clock_max_mhz, memory_clock_mhz: The highest clock of its processors, and its memory's; ``None`` where no source says.
        nvswitch: Sits behind NVSwitches, so that CUDA starts only with the fabric manager running.
    """

    pci_id: str
    name: str
    also: tuple[str, ...] = ()
    form: Literal["PCIE", "SXM2", "SXM3", "FHHL", "DGXS"]
    memory_bytes: int
    memory_total_bytes: int
    compute_capability: str
    architecture: str
    power_limit_w: int | None
    power_min_w: int | None
    bandwidth_bytes_per_s: int | None
    sm_clock_max_mhz: int | None = None
    memory_clock_mhz: int | None = None
    pcie_generation: int
    pcie_width: int
    nvswitch: bool
    source: str


class NeighbourGpu(Row):
    """A card of another generation that a mixed host may hold; nothing is served from it."""

    pci_id: str
    name: str
    compute_capability: str
    architecture: str
    source: str


class PackageSource(Row):
    """One way in which a distribution's release gets a driver branch or a toolkit.

    Attributes:
        kind: ``distribution``: its own archive. ``nvidia_repository``: NVIDIA's repository for that release. ``dnf_module``: a
            module stream of that repository. ``transitional``: a package of the name asked for that installs ``installs``
            instead. ``none``: not to be had in the way that ``repository`` names (in no way, where that is ``None``).
        repository: Archive components or NVIDIA's name of the repository, such as ``non-free`` or ``ubuntu2404``.
        packages: What is installed, in one call, after ``pins``.
        stream: The module stream of a ``dnf_module``, which holds the branch.
        pins: Packages that hold the branch; installed first, in a call of their own.
        hold: Patterns for the package manager's own hold (``apt-mark hold``, ``dnf versionlock``), where no pin package exists.
        version: The version seen there, ``None`` where no source gives one.
        host_compiler: The compiler package that a toolkit needs beside it, ``None`` where the default one will do.
        driver_min: The oldest driver branch that a toolkit's packages allow beside them, ``None`` where they ask for none.
        own_versions: Packages of ``packages`` whose version is not the driver's own.
        glibc_patched: Do this source's headers compile with a glibc beyond the toolkit's own bound, since they are patched or lie
            in a system folder, where a compiler lets the contradiction pass?
        installs: The branch that a ``transitional`` package really brings.
        reason: Why not, for ``none`` and ``transitional``; what to know first, for others.
    """

    kind: Literal["distribution", "nvidia_repository", "dnf_module", "transitional", "none"]
    repository: str | None = None
    packages: tuple[str, ...] = ()
    stream: str | None = None
    pins: tuple[str, ...] = ()
    hold: tuple[str, ...] = ()
    version: str | None = None
    host_compiler: str | None = None
    driver_min: str | None = None
    own_versions: tuple[str, ...] = ()
    glibc_patched: bool = False
    installs: str | None = None
    reason: str | None = None
    source: str

    @property
    def usable(self) -> bool:
        """Does it bring what was asked for?"""
        return self.kind not in ("none", "transitional")

    @property
    def of_nvidia(self) -> bool:
        """Does it need NVIDIA's repository?"""
        return self.kind in ("nvidia_repository", "dnf_module")


class NvidiaRepository(Row):
    """NVIDIA's own package repositories, of which there is one for each release of a distribution.

    Attributes:
        url: Where all of them lie; each is ``URL/NAME/x86_64``.
        apt_key: The file of the key that signs those for apt, inside each repository.
        apt_key_fingerprint: What that key has to be.
        dnf_key, dnf_key_fingerprint: The same for those of Enterprise Linux.
        rotated_fingerprints: Keys that once signed, and that nothing shall trust any more.
    """

    url: str
    apt_key: str
    apt_key_fingerprint: str
    dnf_key: str
    dnf_key_fingerprint: str
    rotated_fingerprints: tuple[str, ...]
    source: str


#: ``debian/12`` -> its sources, the best first.
Sources = Mapping[str, tuple[PackageSource, ...]]


def _sources(by_distribution: Sources, distribution_id: str, version_id: str) -> tuple[PackageSource, ...]:
    """Sources of a release; a point release (``9.4``) has its major's."""
    found = by_distribution.get(f"{distribution_id}/{version_id}")
    if found is None:
        found = by_distribution.get(f"{distribution_id}/{version_id.partition('.')[0]}", ())
    return found


class KernelBuilds(Row):
    """What a source says about the kernels that the modules of one driver version build for.

    ``newest``: the newest kernel for which they build; they build for older kernels too, and so do later drivers.
    ``fails_from``: the oldest for which they do not; they fail for newer kernels too, and so do earlier drivers.
    ``packaged_by``: the distribution whose package the entry speaks of, ``None`` for NVIDIA's sources as released. A
    distribution patches, so that NVIDIA's failure is not its own, while what NVIDIA's sources can its package can.
    """

    driver: str
    newest: str | None = None
    fails_from: str | None = None
    packaged_by: str | None = None
    source: str


class DriverBranch(Row):
    """A branch of NVIDIA's Linux driver.

    Attributes:
        first_version: The first release for Linux that was no beta, and ``released`` its date; ``None`` where none was found.
        end_of_life: The last day of the month that NVIDIA names, ``None`` where it names none.
        ended: NVIDIA's list calls the branch ended, with or without a date.
        drives_volta: Do its modules bind a V100?
        cuda: The CUDA version of its own libcuda: PTX up to this one loads.
        default_modules: The flavour that its packages install unless told otherwise.
        proprietary_modules: Does it still come with the flavour that a V100 needs?
    """

    branch: str
    kind: Literal["long_term_support", "production", "new_feature"]
    first_version: str | None
    released: date | None
    end_of_life: date | None
    ended: bool
    drives_volta: bool
    cuda: str
    default_modules: Literal["proprietary", "open"]
    proprietary_modules: bool = True
    kernels: tuple[KernelBuilds, ...] = ()
    packages: Sources = Field(default_factory=dict)
    source: str

    def has_ended(self, as_of: date) -> bool:
        """Is the branch out of support on ``as_of``?"""
        return self.ended or (self.end_of_life is not None and as_of > self.end_of_life)

    def sources(self, distribution_id: str, version_id: str) -> tuple[PackageSource, ...]:
        """Ways to install the branch on a release, the best first; ``()`` where none was looked up."""
        return _sources(self.packages, distribution_id, version_id)

    def builds_for(self, driver: str, kernel: str, packaged_by: str | None = None) -> tuple[bool | None, KernelBuilds | None]:
        """Do the modules of version ``driver`` build for ``kernel``?

        Args:
            driver: A version of this branch, as the package or ``nvidia-smi`` spells it.
            kernel: A kernel release, as ``uname -r`` spells it.
            packaged_by: The id of the distribution whose package it is, ``None`` for NVIDIA's own.

        Returns:
            ``True`` or ``False`` and the entry that says so; ``None`` where no source says.
        """
        asked, wanted = version_key(driver), version_key(kernel)[:2]
        if not asked or len(wanted) != 2:
            return None, None
        for entry in self.kernels:
            able = entry.newest is not None and version_key(entry.driver) <= asked and wanted <= version_key(entry.newest)
            if able and entry.packaged_by in (None, packaged_by):
                return True, entry
        for entry in self.kernels:
            unable = (
                entry.fails_from is not None and asked <= version_key(entry.driver) and wanted >= version_key(entry.fails_from)
            )
            if unable and entry.packaged_by == packaged_by:
                return False, entry
        return None, None


class CudaRow(Row):
    """A CUDA toolkit.

    Attributes:
        gcc_max: The newest gcc major that its headers accept.
        glibc_max_exclusive: The first glibc with which NVIDIA's headers do not compile, ``None`` where there is none.
        sm_min, sm_max: The oldest and the newest architecture that it makes machine code for, as numbers (70 is ``sm_70``).
        driver_min: The oldest driver that runs its machine code (minor-version compatibility).
        driver_bundled: The driver released with it, the oldest with every feature.
        ptx_driver_min: The oldest branch whose own CUDA version is at least this one, so that its PTX loads.
    """

    version: str
    gcc_max: int
    glibc_max_exclusive: str | None
    sm_min: int
    sm_max: int
    driver_min: str
    driver_bundled: str
    ptx_driver_min: str
    repositories: Sources
    source: str

    def accepts_gcc(self, major: int) -> bool:
        """Do its headers accept this gcc?"""
        return major <= self.gcc_max

    def accepts_glibc(self, version: str) -> bool:
        """Do NVIDIA's own headers compile with this glibc? A distribution's package may be patched: see its source."""
        return self.glibc_max_exclusive is None or version_key(version) < version_key(self.glibc_max_exclusive)

    def targets(self, compute_capability: str) -> bool:
        """Does it make machine code for ``7.0``?"""
        return self.sm_min <= int(compute_capability.replace(".", "")) <= self.sm_max

    def runs_machine_code(self, driver: str) -> bool:
        """Does machine code from this toolkit run on version ``driver``?"""
        return version_key(driver) >= version_key(self.driver_min)

    def loads_ptx(self, driver: str) -> bool:
        """Does PTX from this toolkit load on version ``driver``?"""
        return version_key(driver)[:1] >= version_key(self.ptx_driver_min)[:1]

    def sources(self, distribution_id: str, version_id: str) -> tuple[PackageSource, ...]:
        """Ways to install the toolkit on a release, the best first; ``()`` where none was looked up."""
        return _sources(self.repositories, distribution_id, version_id)


class Distribution(Row):
    """A Linux distribution's release.

    Attributes:
        id: ``ID`` of ``os-release``; a rebuild of Enterprise Linux is looked up under ``rhel``.
        tested: ``run``: the whole path is run by this project's tests. ``partly``: all of it but ``not_run``. ``rendered``: names
            were looked up, nothing was run.
        not_run: What of the path was not run there.
        glibc, gcc, kernel, python, cmake: What the release brings by default.
        compilers: gcc major -> the package of its C++ compiler, the default one among them.
        toolchain_repository: A repository that has some of ``toolchain_packages`` and that the release does not enable by itself,
            by ``ID`` of ``os-release``. It is asked in the one call that installs them, and stays as it is.
        ccache_package: ``None`` where the release itself has none.
        ca_bundle: The file in which ``ca-certificates`` has the authorities that the host trusts.
        python_packages: What an engine written in Python needs: virtual environments, and a C compiler with the headers of Python
            and of the C library for the kernels that Triton compiles while it runs.
        cron_package, cron_unit: What runs the files in ``/etc/cron.d``, and its unit.
        dkms_source: Package (a name or an address) that makes the repository known which has DKMS, by ``ID`` of ``os-release``;
            empty where the release itself has it.
        dkms_settings_folder: Does its DKMS read a folder of settings, so that it can be told which key signs modules? Older ones
            sign by a distribution's own means or not at all.
        selinux: Does the release enforce SELinux unless somebody has switched that off?
        refused: Parts of this toolkit that cannot be decided for the release, and why; the others can.
    """

    id: str
    version_id: str
    name: str
    package_manager: Literal["apt", "dnf"]
    tested: Literal["run", "partly", "rendered"]
    not_run: str | None = None
    glibc: str
    gcc: int
    kernel: str
    python: str
    cmake: str
    compilers: Mapping[int, str]
    toolchain_packages: tuple[str, ...]
    toolchain_repository: Mapping[str, str] = Field(default_factory=dict)
    ccache_package: str | None = "ccache"
    runtime_packages: tuple[str, ...]
    ca_bundle: str
    python_packages: tuple[str, ...]
    cron_package: str
    cron_unit: str
    dkms_source: Mapping[str, str] = Field(default_factory=dict)
    dkms_settings_folder: bool
    selinux: bool = False
    refused: Mapping[Literal["gateway", "monitoring"], str] = Field(default_factory=dict)
    source: str

    def compiler(self, gcc_max: int) -> str | None:
        """The package of the newest C++ compiler that is not newer than ``gcc_max``, ``None`` where the release has none."""
        fitting = [major for major in self.compilers if major <= gcc_max]
        return self.compilers[max(fitting)] if fitting else None


class AnsibleCore(Row):
    """The oldest Pythons that a minor version of ansible-core (``2.19``) takes.

    Attributes:
        host_python_min: On the hosts that it manages.
        controller_python_min: Where it runs itself.
    """

    version: str
    host_python_min: str
    controller_python_min: str
    source: str


#: Rebuilds of Enterprise Linux, which take its packages: ``ID`` of ``os-release`` -> the row's ``id``.
ENTERPRISE_LINUX = {"rhel": "rhel", "rocky": "rhel", "almalinux": "rhel"}


def device_of(pci_id: str) -> int | None:
    """The device number of ``10de:1DB1``, ``None`` for another vendor or no id at all."""
    found = re.fullmatch(r"10de:([0-9a-f]{4})", pci_id.strip().lower())
    return int(found.group(1), 16) if found else None


def plain_name(name: str) -> str:
    """A GPU's name without maker and brand, in lower case: ``Tesla V100-SXM2-16GB`` -> ``v100-sxm2-16gb``."""
    return re.sub(r"^(nvidia|tesla)[ -]+", "", re.sub(r"^nvidia[ -]+", "", name.strip().lower()))
