"""What :func:`v100ctl.plan.plan` decides for one host. Plain frozen data, no behaviour beyond turning into JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import BaseModel

from v100ctl.catalog.speeds import PublishedSpeed

Severity = Literal["info", "warn", "refuse"]
Verdict = Literal["ok", "warn", "refused"]


@dataclass(frozen=True)
class Rule:
    """One verdict of one rule: why, in numbers, and the nearest thing that would work. ``card`` is the key of the one meant."""

    id: str
    severity: Severity
    reason: str
    nearest: str | None = None
    instance: str | None = None
    card: str | None = None


@dataclass(frozen=True)
class GpuBudget:
    """What one instance takes of one card at its peak, under a full prompt, in bytes.

    ``reserve_bytes`` is left free on purpose (what the driver keeps for itself, and a margin); ``output_bytes`` are the logits,
    ``context_bytes`` what the CUDA context and its libraries take beside the engine's own buffers.
    """

    total_bytes: int
    reserve_bytes: int
    weights_bytes: int
    kv_bytes: int
    state_bytes: int
    compute_bytes: int
    output_bytes: int
    context_bytes: int

    @property
    def peak_bytes(self) -> int:
        """The most that is in use at any moment."""
        return self.weights_bytes + self.kv_bytes + self.state_bytes + self.compute_bytes + self.output_bytes + self.context_bytes

    @property
    def free_bytes(self) -> int:
        """What is left for nobody; negative where it does not fit."""
        return self.total_bytes - self.reserve_bytes - self.peak_bytes


@dataclass(frozen=True)
class ManagedFile:
    """A file that lands on the host, as bytes. ``role`` writes it."""

    path: str
    content: str
    role: str
    mode: str = "0644"
    owner: str = "root"
    group: str = "root"
    instance: str | None = None
    secret: bool = False


@dataclass(frozen=True)
class Directory:
    """A directory that the roles make."""

    path: str
    mode: str = "0755"
    owner: str = "root"
    group: str = "root"


@dataclass(frozen=True)
class Account:
    """The user that serves."""

    name: str = "v100"
    group: str = "v100"
    home: str = "/var/lib/v100ctl"
    shell: str = "/usr/sbin/nologin"


@dataclass(frozen=True)
class Release:
    """An engine release: where it lies on the host, and how it is built where no copy of it exists yet.

    ``build`` is the document that ``roles/llama_cpp/files/build_release.py`` takes. ``toolchain_repositories`` are asked for
    packages too while the toolchain is installed, and only then. ``relabel``: its files need the labels of SELinux's policy.
    """

    engine: str
    build_id: str
    path: str
    build: Mapping[str, Any]
    toolchain_packages: tuple[str, ...]
    toolchain_repositories: tuple[str, ...] = ()
    relabel: bool = False


@dataclass(frozen=True)
class ModelFile:
    """One file of a model on the host and where it comes from; what a step makes has no ``sha256`` before that."""

    path: str
    sha256: str
    size_bytes: int | None
    source: Mapping[str, Any]


@dataclass(frozen=True)
class Model:
    """A model on the host and where it comes from (``kind``: host, url, hf, controller, fleet, pypi, prepared).

    ``path`` is what the engine is given: a file, the first of several, or their folder. ``sha256`` stands for all ``files``.
    """

    path: str
    sha256: str
    size_bytes: int | None
    source: Mapping[str, Any]
    files: tuple[ModelFile, ...] = ()


@dataclass(frozen=True)
class Unit:
    """A systemd unit and the state it shall have."""

    name: str
    instance: str
    enabled: bool
    state: Literal["started", "absent"]


@dataclass(frozen=True)
class PackageCall:
    """One call of the package manager: what it is for, and its words.

    ``changes`` is false for a call that only fetches lists, ``disturbs`` true for one that changes the driver under its users.
    With ``local_packages`` package files on the host follow the words. ``settles`` are installed packages of another branch.
    Their names follow too: as they are where the host's package index has them in a version of the wanted branch, else with a
    ``-`` behind, which removes them.
    """

    name: str
    argv: tuple[str, ...]
    changes: bool = True
    disturbs: bool = False
    local_packages: bool = False
    settles: tuple[str, ...] = ()


@dataclass(frozen=True)
class RepositoryKey:
    """The key that signs a repository: where it lies on the host, where it is fetched, and what its fingerprint has to be."""

    path: str
    url: str
    fingerprint: str


@dataclass(frozen=True)
class DriverDecision:
    """The NVIDIA driver that a host shall have, and what has to be done for it.

    Attributes:
        version: The exact one where it is known (kept or pinned), else empty.
        source: Where its packages come from, in words.
        packages: What has to be installed, pins among them; empty where a driver that was found is kept.
        manager: ``apt`` or ``dnf``.
        exact: The version that is pinned, empty where any of the branch will do.
        own_versions: Packages of ``packages`` whose version is not the driver's.
        unwanted: Installed packages of another branch or kind, which change or go in the same call in which the others come.
        calls: The calls of the package manager that are still needed, in their order.
        files: Files to write before any of them.
        absent_files: Files to remove before any of them.
        key: The key of the repository, fetched and checked.
        untrusted_keys: Fingerprints that nothing on the host shall trust any more.
        hold, hold_version: Installed packages whose name matches one of the patterns and whose version matches the regular
            expression are held.
        hold_package: What the package manager needs for that; empty where it can by itself.
        kernels: Kernel releases for which the modules have to be there: the one that runs, and the one that boots next.
        initramfs: What rebuilds the initramfs of each kernel that can be booted.
        uninstaller: What removes a driver that did not come as packages.
        local_packages: The folder on the host for package files from the controller; empty where a repository brings them.
        signed, certificate: Whether modules are signed for Secure Boot, and the certificate that the firmware has to know.
        serving: Instances that run on cards now: a reboot or another driver under them stops their answers.
        unloaded: The kept driver is installed and not loaded; it can be, by now or by a reboot.
    """

    branch: str
    version: str
    action: Literal["keep", "install", "replace"]
    source: str
    packages: tuple[str, ...] = ()
    manager: str = ""
    exact: str = ""
    own_versions: tuple[str, ...] = ()
    unwanted: tuple[str, ...] = ()
    calls: tuple[PackageCall, ...] = ()
    files: tuple[ManagedFile, ...] = ()
    absent_files: tuple[str, ...] = ()
    key: RepositoryKey | None = None
    untrusted_keys: tuple[str, ...] = ()
    hold: tuple[str, ...] = ()
    hold_version: str = ""
    hold_package: str = ""
    kernels: tuple[str, ...] = ()
    initramfs: tuple[tuple[str, ...], ...] = ()
    uninstaller: tuple[str, ...] = ()
    local_packages: str = ""
    signed: bool = False
    certificate: str = ""
    serving: tuple[str, ...] = ()
    unloaded: bool = False


@dataclass(frozen=True)
class CudaDecision:
    """The CUDA toolkit that compiles on a host, the compiler beside it, and what machine code it shall make.

    Attributes:
        action: ``keep`` where the toolkit was found; its compiler may still have to come.
        source: Where its packages come from, in words; the folder of a toolkit that is kept.
        host_compiler: The package of the C++ compiler that works with it.
        packages: What has to be installed; empty where everything is there.
        manager: ``apt`` or ``dnf``; empty on a distribution that is not known.
        repository: NVIDIA's name of the repository that brings it, or the components of the distribution's archive.
        nvcc, host_compiler_path: The two programs after the installation. Always called by these paths: what
            ``/usr/local/cuda`` and ``PATH`` lead to is left alone.
        architectures: What it shall make machine code for, as numbers (70 is ``sm_70``).
        driver_branch: The branch that the host shall have; a package of another driver must not come with the toolkit.
        files, absent_files, key, untrusted_keys: As of the driver: what names the repository, where the driver's own do not yet.
    """

    version: str
    action: Literal["keep", "install"]
    source: str
    host_compiler: str
    packages: tuple[str, ...] = ()
    manager: str = ""
    repository: str = ""
    nvcc: str = ""
    host_compiler_path: str = ""
    architectures: tuple[int, ...] = ()
    driver_branch: str = ""
    files: tuple[ManagedFile, ...] = ()
    absent_files: tuple[str, ...] = ()
    key: RepositoryKey | None = None
    untrusted_keys: tuple[str, ...] = ()


@dataclass(frozen=True)
class CardTuning:
    """What is set on one card; ``None`` and empty leave it as it is. ``application_clocks_mhz``: memory, graphics."""

    pci_address: str
    power_limit_w: int | None = None
    application_clocks_mhz: tuple[int, int] | None = None
    ecc: str = ""
    compute_mode: str = ""


@dataclass(frozen=True)
class TuningDecision:
    """What is set on a host's cards and processors."""

    persistence: bool
    cpu_governor: str = ""
    cards: tuple[CardTuning, ...] = ()


@dataclass(frozen=True)
class Proof:
    """How a running instance shows that it computes where it shall.

    Attributes:
        on_cards: Whether it has to hold memory of its cards.
        must_log: Regular expressions, each of which some line has to match that the unit has logged since its start.
        must_not_log: Regular expressions that none of those lines may match.
        least_bytes: What it holds at least of each card's memory once it serves, by UUID; 0 where nobody has computed it.
    """

    on_cards: bool = False
    must_log: tuple[str, ...] = ()
    must_not_log: tuple[str, ...] = ()
    least_bytes: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Placement:
    """The nodes of an instance, their processors in the kernel's list form (``0-7,16-23``), and what becomes of its memory.

    ``preferred`` takes memory of the node as long as there is some; ``bind`` takes no other; ``interleave`` spreads it.
    """

    nodes: tuple[int, ...]
    cpus: str
    policy: Literal["preferred", "bind", "interleave"]


@dataclass(frozen=True)
class GatewayFront:
    """One public port: where the gateway listens, and the engine behind it (``ADDRESS:PORT`` each).

    The gateway of a fleet has the hosts in ``servers`` behind it instead.
    ``keys_file`` says which keys open it and what each is called towards the engine, empty where it asks for none.
    """

    instance: str
    bind: str
    engine: str
    health_path: str
    keys_file: str = ""
    servers: tuple[str, ...] = ()


@dataclass(frozen=True)
class GatewayDecision:
    """The HAProxy in front of a host's instances. ``digest`` is that of the configuration which it shall have loaded;
    ``absent_files`` are those of one that goes.
    """

    unit: str
    state: Literal["started", "absent"]
    digest: str
    fronts: tuple[GatewayFront, ...]
    absent_files: tuple[str, ...] = ()


@dataclass(frozen=True)
class Adoption:
    """A server of somebody else that is stopped because an instance takes its place, and how it is known again.

    With ``unit`` (of the user manager of ``unit_user``, where that is not empty) that unit is stopped and disabled, else the
    process is ended, if it is still the one with ``start_ticks`` and ``command_digest`` (made with ``salt``). ``port`` is free
    on ``listen`` afterwards; 0 where it was in the way on a card alone. ``command`` is without secrets, ``undo`` for people.
    """

    instance: str
    where: str
    listen: str
    port: int
    pid: int
    start_ticks: int
    command_digest: str
    salt: str
    command: str
    user: str
    unit: str
    unit_user: str
    undo: str


@dataclass(frozen=True)
class FirewallDecision:
    """The ports of a host's own firewall that this toolkit opens.

    ``ports`` are those that it answers for; ``closed`` those of them that are not open yet, ``unwanted`` those that an earlier
    run has opened for what is gone. ``open_calls`` and ``close_calls`` are the commands for these.
    """

    kind: Literal["ufw", "firewalld"]
    ports: tuple[int, ...] = ()
    closed: tuple[int, ...] = ()
    unwanted: tuple[int, ...] = ()
    open_calls: tuple[tuple[str, ...], ...] = ()
    close_calls: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True)
class UpkeepDecision:
    """Who looks after running servers: the watchdog and the nightly restarts.

    ``units`` run and come back after a reboot; ``absent_units`` and ``absent_files`` are left of what is wanted no more.
    ``calendars`` are what timers say, for the host's systemd to read before one is written.
    """

    units: tuple[str, ...] = ()
    calendars: tuple[str, ...] = ()
    absent_units: tuple[str, ...] = ()
    absent_files: tuple[str, ...] = ()


@dataclass(frozen=True)
class Exporter:
    """A unit that serves metrics, and words of its command line by which a running one is known to be as planned."""

    unit: str
    arguments: tuple[str, ...]
    url: str


@dataclass(frozen=True)
class MonitoringDecision:
    """Who tells the state of a host: a timer that writes metrics, and exporters that serve them.

    ``textfile`` is what the timer writes. ``units`` run and come back after a reboot. ``packages`` are installed once the files
    are there: an exporter starts when it is installed, and shall not listen everywhere until then. ``missing_packages`` are not
    there yet. ``absent_units`` and ``absent_files`` are of what is wanted no more.
    """

    state: Literal["started", "absent"]
    textfile: str = ""
    service: str = ""
    units: tuple[str, ...] = ()
    exporters: tuple[Exporter, ...] = ()
    packages: tuple[str, ...] = ()
    missing_packages: tuple[str, ...] = ()
    absent_units: tuple[str, ...] = ()
    absent_files: tuple[str, ...] = ()


@dataclass(frozen=True)
class Instance:
    """One served model. ``digest`` covers everything whose change needs a restart; the process carries it in its environment.

    ``gpus`` are the keys of its cards (UUIDs, once a driver tells them), ``budgets`` what it takes of each. What could not be
    computed is ``None``: ``largest_context_length`` (tokens per request that still fit) and ``decode_ceiling_tps`` (tokens per
    second that the cards' memory bandwidth allows one stream). ``published`` are figures that others gave for the like.
    ``parser_argv`` makes the engine read its command line and end, without a model or a card; empty where it cannot.
    ``proof`` says how it is seen that the cards do the work, ``placement`` to which processors and memory it is bound, if to any.
    ``api_keys_file`` is where its keys lie on the host, empty where it asks for none.
    """

    name: str
    unit: str
    engine: str
    argv: tuple[str, ...]
    environment: Mapping[str, str]
    digest: str
    release_path: str
    model_path: str
    model_alias: str
    listen: str
    port: int
    health_url: str
    completion_url: str
    start_timeout_s: int
    context_length: int
    parallel: int
    parser_argv: tuple[str, ...] = ()
    gpus: tuple[str, ...] = ()
    budgets: Mapping[str, GpuBudget] = field(default_factory=dict)
    largest_context_length: int | None = None
    decode_ceiling_tps: float | None = None
    published: tuple[PublishedSpeed, ...] = ()
    proof: Proof = Proof()
    placement: Placement | None = None
    api_keys_file: str = ""


@dataclass(frozen=True)
class HostPlan:
    """Everything that is decided for one host.

    A refused plan holds its rules and whatever was decided before; :attr:`verdict` says that none of it may be applied.
    ``unused_models`` are paths in the store that are to be removed, ``absent_files`` files of keys that nothing needs any more.
    """

    host: str
    as_of: str
    rules: tuple[Rule, ...] = ()
    packages: tuple[str, ...] = ()
    account: Account = Account()
    directories: tuple[Directory, ...] = ()
    releases: tuple[Release, ...] = ()
    models: tuple[Model, ...] = ()
    unused_models: tuple[str, ...] = ()
    files: tuple[ManagedFile, ...] = ()
    absent_files: tuple[str, ...] = ()
    units: tuple[Unit, ...] = ()
    instances: tuple[Instance, ...] = ()
    host_json: ManagedFile | None = field(default=None)
    driver: DriverDecision | None = None
    cuda: CudaDecision | None = None
    tuning: TuningDecision | None = None
    gateway: GatewayDecision | None = None
    upkeep: UpkeepDecision = UpkeepDecision()
    adoptions: tuple[Adoption, ...] = ()
    firewall: FirewallDecision | None = None
    monitoring: MonitoringDecision | None = None

    @property
    def verdict(self) -> Verdict:
        """The worst severity of the rules."""
        severities = {rule.severity for rule in self.rules}
        return "refused" if "refuse" in severities else "warn" if "warn" in severities else "ok"

    @property
    def all_files(self) -> tuple[ManagedFile, ...]:
        """Every managed file, ``host.json`` last as it is written last."""
        return (*self.files, *((self.host_json,) if self.host_json else ()))

    def to_role_variables(self) -> dict[str, Any]:
        """The plan as the plain data that playbooks pass to the roles (``v100ctl_plan``)."""
        document: dict[str, Any] = plain_data(self)
        document["verdict"] = self.verdict
        document["refusals"] = [describe(rule) for rule in self.rules if rule.severity == "refuse"]
        document["warnings"] = [describe(rule) for rule in self.rules if rule.severity == "warn"]
        return document


def describe(rule: Rule) -> str:
    """A rule's verdict as one line for people."""
    where = f"{rule.instance}: " if rule.instance else ""
    nearest = f"; nearest that works: {rule.nearest}" if rule.nearest else ""
    return f"[{rule.id}] {where}{rule.reason}{nearest}"


def plain_data(value: Any) -> Any:
    """Dataclasses, rows of the catalog, tuples and mappings as dicts and lists, for JSON and for Ansible."""
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {item.name: plain_data(getattr(value, item.name)) for item in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain_data(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_data(item) for item in value]
    return value
