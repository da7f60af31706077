"""What the probe returns about one host, as typed models.

The document is made by ``probe/host_script.py`` on the host and is read here and nowhere else. Unknown keys are ignored, so that
a newer probe can be read; a missing key takes the default that means "not known". Sizes are bytes, times seconds unless the
name says otherwise.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

FACTS_SCHEMA = "v100ctl/facts/1"

#: Numbers as kernels and cards count. What a host claims beyond them would end in an overflow where it is divided or printed.
Whole = Annotated[int, Field(ge=-(2**63), lt=2**64)]
Real = Annotated[float, Field(ge=-1e18, le=1e18)]


class _Facts(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class Distribution(_Facts):
    """``/etc/os-release``."""

    id: str = ""
    version_id: str = ""
    codename: str = ""
    name: str = ""
    id_like: tuple[str, ...] = ()


class Libc(_Facts):
    """The C library that programs on the host are linked with."""

    name: str = ""
    version: str = ""


class PythonFacts(_Facts):
    """The Python that ran the probe."""

    version: str = ""
    executable: str = ""


class User(_Facts):
    """Who the probe ran as (after sudo)."""

    name: str = ""
    uid: Whole = -1


class NumaNode(_Facts):
    """One NUMA node: its CPUs in the kernel's list form (``0-7,16-23``)."""

    id: Whole
    cpus: str = ""
    memory_bytes: Whole = 0


class Cpu(_Facts):
    """Processors; ``level`` is the x86-64 micro-architecture level (``x86-64-v3``), empty elsewhere."""

    model: str = ""
    logical_count: Whole = 0
    physical_count: Whole = 0
    usable_count: Whole = 0
    level: str = ""
    numa_nodes: tuple[NumaNode, ...] = ()
    #: The processors and the memory nodes that a service may use (those of PID 1), in the kernel's list form; empty: not known.
    usable_cpus: str = ""
    usable_nodes: str = ""
    #: Frequency governors in use, each once; empty where the kernel scales nothing (in most virtual machines).
    governors: tuple[str, ...] = ()


class Memory(_Facts):
    """``/proc/meminfo``; ``limit_bytes`` is the control group's ceiling where it is below that (a container), else ``None``."""

    total_bytes: Whole = 0
    available_bytes: Whole = 0
    swap_total_bytes: Whole = 0
    swap_free_bytes: Whole = 0
    limit_bytes: Whole | None = None


class Limits(_Facts):
    """The most this host can give to a service; ``None`` is unlimited."""

    nofile_hard: Whole | None = None
    memlock_hard_bytes: Whole | None = None


class Filesystem(_Facts):
    """Where a path lives (its nearest existing parent) and the space left there for root."""

    mount: str = ""
    device: str = ""
    total_bytes: Whole = 0
    free_bytes: Whole = 0
    read_only: bool = False
    #: Nothing that lies there can be run, or loaded as code.
    no_exec: bool = False


class Systemd(_Facts):
    """The running service manager; ``None`` in :class:`Facts` where PID 1 is something else."""

    version: Whole = 0
    state: str = ""


class GpuProcess(_Facts):
    """A process that computes on a card. ``unit`` is its systemd service, empty where it has none or is not of this host.

    ``memory_bytes`` is what ``nvidia-smi`` says of it, ``None`` where it does not know.
    """

    pid: Whole
    command: str = ""
    unit: str = ""
    memory_bytes: Whole | None = None


class Gpu(_Facts):
    """One NVIDIA display or 3D controller on the PCI bus.

    From the bus, driver or not:

    * ``pci_class``: ``0300`` (VGA) or ``0302`` (3D controller).
    * ``subsystem_id``: the board, ``vendor:device`` like ``pci_id``.
    * ``bar1_bytes``: the size of the window on the card's memory; 0 where the firmware assigned none (its setting "Above 4G
      decoding" is off), ``None`` where it is not known.
    * ``link_*``, ``max_link_*``: transfer rate per lane in GT/s (2.5, 5, 8, 16 ...) and number of lanes, now and at most. An idle
      card may lower its rate, never its width.
    * ``revision_ff``: its configuration space reads all ones: it has fallen off the bus.
    * ``display_attached``: a monitor is connected, ``None`` where no display driver says so.

    From ``nvidia-smi``, where it answers: ``index`` and all that follows. ``memory_reserved_bytes`` is what the driver keeps of
    the total for itself; older drivers show a lesser total instead and do not know the question, nor that for
    ``compute_capability`` (``7.0``).

    * ``temperature_c``, ``memory_temperature_c``: of the processor and of the memory.
    * ``throttle_reasons``: why its clocks are lower than asked (``hw_thermal_slowdown``, ``sw_power_cap`` ...), ``None`` where it
      does not say.
    * ``ecc_*_volatile``: memory errors since the driver was loaded; ``ecc_uncorrected_aggregate``: in the card's life.
    * ``retired_pages_*``: pages of memory that are no longer used, by what was found in them; ``retired_pages_pending``: one more
      goes with the next reset. Cards after Volta remap rows instead and say nothing here.
    """

    pci_address: str
    pci_id: str = ""
    kernel_driver: str = ""
    numa_node: Whole = -1
    pci_class: str = ""
    subsystem_id: str = ""
    bar1_bytes: Whole | None = None
    link_speed_gts: Real | None = None
    link_width: Whole | None = None
    max_link_speed_gts: Real | None = None
    max_link_width: Whole | None = None
    revision_ff: bool = False
    iommu_group: Whole | None = None
    display_attached: bool | None = None
    index: Whole | None = None
    uuid: str = ""
    name: str = ""
    memory_total_bytes: Whole | None = None
    memory_used_bytes: Whole | None = None
    memory_reserved_bytes: Whole | None = None
    compute_capability: str = ""
    persistence_mode: Literal["", "enabled", "disabled"] = ""
    ecc_mode: Literal["", "enabled", "disabled"] = ""
    power_limit_w: Real | None = None
    application_memory_clock_mhz: Whole | None = None
    application_graphics_clock_mhz: Whole | None = None
    compute_mode: str = ""
    temperature_c: Whole | None = None
    memory_temperature_c: Whole | None = None
    power_draw_w: Real | None = None
    sm_clock_mhz: Whole | None = None
    max_sm_clock_mhz: Whole | None = None
    throttle_reasons: tuple[str, ...] | None = None
    ecc_pending_mode: Literal["", "enabled", "disabled"] = ""
    ecc_corrected_volatile: Whole | None = None
    ecc_uncorrected_volatile: Whole | None = None
    ecc_uncorrected_aggregate: Whole | None = None
    retired_pages_single_bit: Whole | None = None
    retired_pages_double_bit: Whole | None = None
    retired_pages_pending: bool | None = None
    processes: tuple[GpuProcess, ...] = ()


class NvidiaSmi(_Facts):
    """How ``nvidia-smi`` answered; a hang is a fact, not a failure of the probe.

    ``mismatch``: it refused because its library is of another version than the loaded module (an upgrade without a reboot).
    """

    status: Literal["absent", "ok", "error", "timeout"] = "absent"
    output: str = ""
    mismatch: bool = False


class Nvidia(_Facts):
    """The driver as the kernel, ``nvidia-smi`` and the disk show it.

    * ``module_*``: what is loaded; ``on_disk_module_*``: what the running kernel would load, both empty where there is none.
    * ``next_boot_module_*``: what the newest installed kernel would load, where that is not the one that runs (else ``None``).
    * ``modules_loaded``: those of ``nvidia``, ``nvidia_uvm``, ``nvidia_drm``, ``nvidia_modeset``, ``nouveau``, ``vfio_pci``.
    * ``library_version``: of ``libnvidia-ml.so.1``.
    * ``cuda_version``: the newest CUDA that the driver serves, as ``nvidia-smi`` shows it (``12.2``).
    * ``uninstaller``: of a driver that did not come as packages (``nvidia-uninstall``), empty where there is none.
    * ``fabric_manager``: the service that NVSwitch hosts need; ``nvswitch_count``: NVSwitches on the PCI bus.
    """

    module_version: str = ""
    module_flavour: Literal["", "proprietary", "open"] = ""
    modules_loaded: tuple[str, ...] = ()
    library_version: str = ""
    on_disk_module_version: str = ""
    on_disk_module_flavour: Literal["", "proprietary", "open"] = ""
    next_boot_module_version: str | None = None
    next_boot_module_flavour: Literal["", "proprietary", "open"] = ""
    cuda_version: str = ""
    uninstaller: str = ""
    fabric_manager: Literal["", "installed", "active"] = ""
    nvswitch_count: Whole = 0
    smi: NvidiaSmi = NvidiaSmi()


class Xid(_Facts):
    """One of NVIDIA's numbered errors of one card in the last day: how often, when, and the words of the latest.

    Times are seconds since 1970. ``this_boot``: the latest one came since the host was started.
    """

    pci_address: str
    code: Whole
    count: Whole = 1
    first_s: Real = 0.0
    last_s: Real = 0.0
    this_boot: bool = True
    message: str = ""


class KernelLog(_Facts):
    """What the kernel log says of cards. ``seen``: it could be read at all."""

    seen: bool = False
    xids: tuple[Xid, ...] = ()


class DkmsModule(_Facts):
    """One version of one of NVIDIA's modules in DKMS, with the kernels that it is built for and installed for.

    ``failed``: the kernel that its last build was for, where that did not end well.
    """

    name: str
    version: str
    built: tuple[str, ...] = ()
    installed: tuple[str, ...] = ()
    failed: str = ""


class Nouveau(_Facts):
    """The kernel's own driver for NVIDIA cards. ``blacklisted``: by ``modprobe.d`` or on the kernel's command line."""

    loaded: bool = False
    blacklisted: bool = False


class CudaToolkit(_Facts):
    """An installed CUDA toolkit: its real folder, its release (``11.8``; empty if not known), and whether it has ``nvcc``.

    A distribution's own toolkit has the folder ``/usr/lib/nvidia-cuda-toolkit`` and its headers under ``/usr/include``.
    """

    path: str
    version: str = ""
    nvcc: bool = False


class Packages(_Facts):
    """The package manager's own status file, read without calling a tool."""

    manager: Literal["", "dpkg", "rpm"] = ""
    installed: dict[str, str] = Field(default_factory=dict)
    held: tuple[str, ...] = ()
    half_configured: tuple[str, ...] = ()


class AptSource(_Facts):
    """One place that apt takes packages from: one address and one suite of an entry, with the file that names it.

    ``origin`` is what the archive calls itself (``Debian``), empty where its lists were never fetched. An address with a password
    in it is left out of the document as a whole.
    """

    path: str
    uri: str
    suite: str
    components: tuple[str, ...] = ()
    architectures: tuple[str, ...] = ()
    signed_by: str = ""
    trusted: bool = False
    origin: str = ""


class AptPreference(_Facts):
    """A file of apt's preferences that speaks of the driver or of CUDA, the packages that it names, and who brought it."""

    path: str
    packages: tuple[str, ...] = ()
    owner: str = ""


class CronTable(_Facts):
    """A table of jobs that speaks of our servers, of the cards or of a restart, and those words; the commands are not told."""

    path: str
    words: tuple[str, ...] = ()


class Baseline(_Facts):
    """How an instance was when it was proved; ``digest`` is that of the plan by which it ran then. ``None``: not measured."""

    digest: str = ""
    tokens_per_second: Real | None = None
    anonymous_bytes: Whole | None = None


class Identity(_Facts):
    """What an instance says that it has: HTTP status without a key, and with one where the first was refused."""

    status: Whole | None = None
    status_with_key: Whole | None = None
    models: tuple[str, ...] = ()


class PackageLock(_Facts):
    """A process that holds a lock of the package manager."""

    path: str
    pid: Whole
    command: str = ""


class ManagedFile(_Facts):
    """A file or link under a path that this toolkit manages. ``content`` is there for small text files without secrets.

    Of a file of keys or of a secret environment there is no ``sha256`` but ``keyed_digest``, which only the salt of the same
    document makes comparable (:attr:`Facts.secret_salt`).
    """

    kind: Literal["file", "directory", "symlink", "other"] = "file"
    sha256: str = ""
    mode: str = ""
    owner: str = ""
    group: str = ""
    size_bytes: Whole = 0
    mtime_s: Real = 0.0
    content: str | None = None
    keyed_digest: str = ""


class ReleaseFacts(_Facts):
    """One folder under ``/opt/v100ctl/engines/ENGINE/``.

    ``problem`` says why the release cannot be used (a listed file missing, of another size or, with ``--deep``, another hash),
    empty when it is sound. ``release`` is its ``release.json``.
    """

    path: str
    engine: str = ""
    build_id: str = ""
    release: dict[str, Any] = Field(default_factory=dict)
    problem: str = ""


class ModelFacts(_Facts):
    """A model file. ``sha256`` is what was verified for just this size and mtime, or what ``--deep`` hashed; empty if neither."""

    exists: bool = False
    size_bytes: Whole = 0
    mtime_ns: Whole = 0
    sha256: str = ""
    owner: str = ""
    mode: str = ""


class UnitFacts(_Facts):
    """``systemctl show`` of one unit, the properties that this toolkit compares."""

    load_state: str = ""
    active_state: str = ""
    sub_state: str = ""
    unit_file_state: str = ""
    fragment_path: str = ""
    drop_in_paths: tuple[str, ...] = ()
    need_daemon_reload: bool = False
    main_pid: Whole = 0
    result: str = ""
    restarts_count: Whole = 0


class ProcessFacts(_Facts):
    """The main process of a unit, read from ``/proc``.

    ``environ`` holds only names that start with ``V100CTL_``, ``CUDA_`` or ``OMP_``. ``cgroup_unit`` is the unit whose control
    group it is in, ``memory_policy`` where its memory is (``default``, ``bind:0``, ``prefer:1``, ``interleave:0-1``); both are
    empty where the kernel does not say. ``keys_current``: it was started with the API keys that are on the disk now, ``None``
    where it has none or only their owner may say.
    """

    pid: Whole
    unit: str = ""
    executable: str = ""
    executable_deleted: bool = False
    argv: tuple[str, ...] = ()
    environ: dict[str, str] = Field(default_factory=dict)
    keys_current: bool | None = None
    user: str = ""
    started_s: Real = 0.0
    nofile_soft: Whole | None = None
    memlock_soft_bytes: Whole | None = None
    cpus_allowed: str = ""
    cgroup_unit: str = ""
    memory_policy: str = ""
    rss_anonymous_bytes: Whole = 0
    swap_bytes: Whole = 0
    #: Libraries that it has loaded and whose files were removed or replaced since.
    deleted_libraries: tuple[str, ...] = ()


class Listener(_Facts):
    """A listening TCP socket and, where ``/proc`` shows it, who owns it."""

    address: str
    port: Whole
    pid: Whole | None = None
    command: str = ""
    unit: str = ""


class Container(_Facts):
    """The container that a process is in, or that it forwards a port to. ``restarts``: its engine starts it anew by itself."""

    runtime: str = ""
    id: str = ""
    name: str = ""
    image: str = ""
    restarts: bool = False
    argv: tuple[str, ...] = ()


class Occupant(_Facts):
    """A process that is not ours and is where an instance shall be: on a port that was asked about, or on a card.

    ``argv`` and ``environ`` (of variables that decide what a server of models does) are without secrets; ``start_ticks`` and
    ``command_digest`` (of the whole command line, with :attr:`Facts.secret_salt`) tell it from another one with its number.
    ``unit``: the service whose control group it is in, of the user manager of ``unit_user`` where that is not empty.
    ``is_main``: it is that unit's main process or one that this has started. ``session``: the login that it came from.
    ``ancestors``: names of those who started it, nearest first.
    """

    pid: Whole
    start_ticks: Whole = 0
    command_digest: str = ""
    argv: tuple[str, ...] = ()
    environ: dict[str, str] = Field(default_factory=dict)
    user: str = ""
    working_directory: str = ""
    ports: tuple[int, ...] = ()
    unit: str = ""
    unit_user: str = ""
    unit_file_state: str = ""
    unit_path: str = ""
    is_main: bool = False
    session: str = ""
    ancestors: tuple[str, ...] = ()
    container: Container | None = None


class GatewayServer(_Facts):
    """How the gateway sees an instance: HAProxy's word for it (``UP``, ``DOWN``, ``DRAIN``, ``MAINT``), and its requests."""

    status: str = ""
    requests_running: Whole = 0


class FirewallRule(_Facts):
    """What a firewall does with TCP from anywhere to a span of ports."""

    allows: bool
    first_port: Whole
    last_port: Whole


class FirewallFacts(_Facts):
    """The host's own firewall, where one is active that ports can be opened of.

    ``rules``: in the order in which they count; ``permanent``: those that hold after a restart of the firewall. ``lets_in``: it
    lets everything in that no rule is about. ``zone``: firewalld's default one.
    """

    kind: Literal["ufw", "firewalld"]
    zone: str = ""
    lets_in: bool = False
    rules: tuple[FirewallRule, ...] = ()
    permanent: tuple[FirewallRule, ...] = ()


class GatewayFacts(_Facts):
    """The gateway that runs: the digest of the configuration that it has loaded, and its servers by instance.

    ``keys_current``: it has loaded the API keys that are on the disk now; ``None`` where that is not known.
    """

    digest: str = ""
    keys_current: bool | None = None
    servers: dict[str, GatewayServer] = Field(default_factory=dict)


class HealthFacts(_Facts):
    """The answer of an instance's health path: HTTP status, or ``None`` with the reason in ``error``."""

    status: Whole | None = None
    error: str = ""


class Account(_Facts):
    """A user or group entry that this toolkit manages."""

    uid: Whole
    gid: Whole
    home: str = ""
    shell: str = ""
    groups: tuple[str, ...] = ()


class HostJson(_Facts):
    """``/etc/v100ctl/host.json``: the plan that was applied last. ``document`` is ``None`` where it is absent or unreadable."""

    document: dict[str, Any] | None = None
    problem: str = ""


class Facts(_Facts):
    """Everything that is known of one host at one moment."""

    schema_id: str = Field(default=FACTS_SCHEMA, alias="schema")
    probe_ms: Real = 0.0
    now_s: Real = 0.0
    hostname: str = ""
    machine: str = ""
    kernel: str = ""
    boot_id: str = ""
    uptime_s: Real = 0.0
    virtualization: str = ""
    distribution: Distribution = Distribution()
    libc: Libc = Libc()
    python: PythonFacts = PythonFacts()
    user: User = User()
    cpu: Cpu = Cpu()
    memory: Memory = Memory()
    limits: Limits = Limits()
    filesystems: dict[str, Filesystem] = Field(default_factory=dict)
    systemd: Systemd | None = None
    #: Kernel releases that modules can be built for (``/lib/modules/RELEASE/build`` is there), oldest first.
    kernel_headers: tuple[str, ...] = ()
    #: Kernel releases that can be booted, oldest first. Empty in a container.
    kernels_installed: tuple[str, ...] = ()
    #: Whether the firmware lets only signed kernels start; ``None`` without EFI or where its variables cannot be seen.
    secure_boot: bool | None = None
    #: Whether SELinux forbids what its policy does not allow (or only says so); empty where the kernel runs without it.
    selinux: Literal["", "enforcing", "permissive"] = ""
    gpus: tuple[Gpu, ...] = ()
    nvidia: Nvidia = Nvidia()
    #: Whether CUDA programs can use ``nvidia_uvm``; ``poisoned`` after an error from which it recovers only by being loaded anew.
    uvm: Literal["", "ok", "poisoned"] = ""
    kernel_log: KernelLog = KernelLog()
    dkms: tuple[DkmsModule, ...] = ()
    nouveau: Nouveau = Nouveau()
    #: Program name (``gcc``, ``g++-11``) -> full version (``11.3.0``).
    compilers: dict[str, str] = Field(default_factory=dict)
    cuda_toolkits: tuple[CudaToolkit, ...] = ()
    cmake_version: str = ""
    packages: Packages = Packages()
    apt_sources: tuple[AptSource, ...] = ()
    apt_preferences: tuple[AptPreference, ...] = ()
    #: Whether apt installs upgrades by itself; ``None`` where no file says.
    unattended_upgrades: bool | None = None
    cron: tuple[CronTable, ...] = ()
    package_locks: tuple[PackageLock, ...] = ()
    accounts: dict[str, Account] = Field(default_factory=dict)
    files: dict[str, ManagedFile] = Field(default_factory=dict)
    host_json: HostJson = HostJson()
    releases: tuple[ReleaseFacts, ...] = ()
    #: What lies in the store of models, by path: sizes in bytes, that of a folder with everything below it.
    stored_models: dict[str, Whole] = Field(default_factory=dict)
    models: dict[str, ModelFacts] = Field(default_factory=dict)
    units: dict[str, UnitFacts] = Field(default_factory=dict)
    processes: tuple[ProcessFacts, ...] = ()
    listeners: tuple[Listener, ...] = ()
    occupants: tuple[Occupant, ...] = ()
    health: dict[str, HealthFacts] = Field(default_factory=dict)
    identity: dict[str, Identity] = Field(default_factory=dict)
    #: By instance.
    baselines: dict[str, Baseline] = Field(default_factory=dict)
    #: New with each document: what the ``keyed_digest`` of its files was made with.
    secret_salt: str = ""
    #: The gateway's HAProxy; ``None`` where it does not run.
    gateway: GatewayFacts | None = None
    firewall: FirewallFacts | None = None
    #: Parts of the probe that failed, by name: what could not be learned and why.
    errors: dict[str, str] = Field(default_factory=dict)

    def release(self, path: str) -> ReleaseFacts | None:
        """The release at ``path``, or ``None``."""
        return next((release for release in self.releases if release.path == path), None)

    def occupant(self, pid: int | None) -> Occupant | None:
        """What is known of the process ``pid`` of somebody else, or ``None``."""
        return next((occupant for occupant in self.occupants if occupant.pid == pid), None)

    def process_of(self, unit: str) -> ProcessFacts | None:
        """The main process of ``unit``, or ``None`` when it does not run."""
        return next((process for process in self.processes if process.unit == unit), None)


class ProbeRequest(BaseModel):
    """What the controller already knows and wants looked at, beside the places that this toolkit manages.

    Sent as one JSON argument to the script: it must never hold a secret.
    """

    model_config = ConfigDict(frozen=True)

    #: More files to report like managed ones.
    files: tuple[str, ...] = ()
    #: Model files to report.
    models: tuple[str, ...] = ()
    #: Paths whose filesystem is of interest.
    filesystems: tuple[str, ...] = ("/opt/v100ctl", "/var/lib/v100ctl", "/var/lib/v100ctl/models", "/var/cache")
    #: Instances to ask for their health: name -> URL on the host itself.
    health: dict[str, str] = Field(default_factory=dict)
    #: Instances to ask for the models that they have: name -> URL on the host itself.
    identity: dict[str, str] = Field(default_factory=dict)
    #: Ports on which nobody else shall listen.
    ports: tuple[int, ...] = ()
    #: Accounts to look up.
    accounts: tuple[str, ...] = ("v100",)
    #: Hash releases and models instead of trusting size and mtime.
    deep: bool = False
