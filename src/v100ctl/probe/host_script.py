"""Look at this host and print one JSON document about it (schema ``v100ctl/facts/1``).

Runs on the host that is looked at: ``python3 -I -S -B - --request JSON`` with this file on stdin, or as a file. Standard
library only, Python >= 3.8; the syntax stays within 3.6, so that an older Python can say in one line that it is too old.

``--request JSON`` is what the controller wants looked at beside the places that the toolkit manages (``ProbeRequest`` in
``facts.py``). ``--locks`` prints only ``{"package_locks": [...]}``.

Three promises:

* It changes nothing: no temporary files, no bytecode, no tool that writes.
* It never hangs. All looking is done in a forked worker that reports result by result. A worker that falls silent (a stat on a
  dead NFS server, a ``/proc`` read of a stuck process) is killed, not waited for, and another one goes on with the next part.
* A part that fails is named in ``errors`` and takes no other part with it.

Contents of ``*.keys``, ``*.env`` and of files that others may not read are never sent, nor any environment variable whose name
does not start with ``V100CTL_``.
"""

import sys

sys.dont_write_bytecode = True

import errno
import fcntl
import hashlib
import json
import math
import os
import re
import select
import signal
import socket
import stat
import struct
import subprocess
import threading
import time

# Typing costs a host several milliseconds a run, and annotations must not be evaluated by an old Python: so they are quoted.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Iterator

    Document = dict[str, Any]

SCHEMA = "v100ctl/facts/1"
MINIMUM_PYTHON = (3, 8)
#: Exit code of a Python that is too old (EX_CONFIG of sysexits.h).
EXIT_TOO_OLD = 78

BUDGET_S = 20.0
DEEP_BUDGET_S = 3600.0
TASK_LIMIT_S = 5.0
SMI_LIMIT_S = 10.0
COMMAND_OUTPUT_BYTES = 8 << 20
MAX_FILES = 500
MAX_DEPTH = 8
MAX_CONTENT_BYTES = 64 << 10
MAX_CONTENT_TOTAL_BYTES = 4 << 20
MAX_HASHED_BYTES = 8 << 20
MAX_DOCUMENT_BYTES = 2 << 20
MAX_STATUS_BYTES = 64 << 20
MAX_JSON_DEPTH = 32
MAX_DIGITS = 20
MAX_RELEASES = 100
MAX_RELEASE_FILES = 5000
#: Lists the files of a release that has too many for its ``release.json``: they are looked at with ``--deep`` alone.
MANIFEST = "manifest.json"
MAX_UNITS = 200
MAX_LISTENERS = 1000
MAX_PROC_LINKS = 200000
MAX_GPU_PROCESSES = 256
MAX_OCCUPANTS = 32
MAX_FIREWALL_RULES = 500
MAX_ANCESTORS = 32
MAX_DOCKER_BYTES = 4 << 20
MAX_PCI_DEVICES = 4096
MAX_KERNELS = 64
MAX_CPUS = 4096
MAX_APT_SOURCES = 200
MAX_TOOLKITS = 32
MAX_LOG_RECORDS = 400000
MAX_XIDS = 200
MAX_DKMS_MODULES = 32
MAX_PREFERENCES = 50
MAX_CRON_FILES = 200
MAX_BASELINES = 200
MAX_DELETED_LIBRARIES = 20
MAX_MODEL_NAMES = 20
XID_AGE_S = 24 * 3600.0

CONFIG_DIR = "/etc/v100ctl"
INSTANCES_DIR = "/etc/v100ctl/instances"
GATEWAY_KEYS_DIR = "/etc/v100ctl/gateway"
#: Files of these names are secret, whoever may read them.
SECRET_SUFFIXES = (".keys", ".env")
KEYED_DIGEST_ROUNDS = 20000
#: Says which keys a process was started with. Its value is not told.
KEYS_VARIABLE = b"V100CTL_KEYS_SHA256"
UNIT_DIR = "/etc/systemd/system"
CRON_FILE = "/etc/cron.d/v100ctl"
ENGINES_DIR = "/opt/v100ctl/engines"
MODELS_DIR = "/var/lib/v100ctl/models"
#: Entries of the store that are looked at, and folders below each.
MAX_STORED_MODELS = 1000
MAX_STORED_FOLDERS = 200
MODEL_RECORDS_DIR = "/var/lib/v100ctl/state/models"
BASELINES_DIR = "/var/lib/v100ctl/state/baselines"
KEYS_FILE = "/etc/v100ctl/instances/{}.keys"
HOST_JSON = "/etc/v100ctl/host.json"
PACKAGE_LOCKS = (
    "/var/lib/dpkg/lock-frontend",
    "/var/lib/dpkg/lock",
    "/var/lib/apt/lists/lock",
    "/var/cache/apt/archives/lock",
    "/var/lib/rpm/.rpm.lock",
    "/usr/lib/sysimage/rpm/.rpm.lock",
)
#: What dnf keeps at its version, where it has the plugin for that.
VERSION_LOCKS = "/etc/dnf/plugins/versionlock.list"
#: Where the gateway's HAProxy is asked for its state.
GATEWAY_SOCKET = "/run/v100ctl-gateway/admin.sock"
# A template (`v100-x@.service`) is no unit that can be shown, and one odd name would spoil the one call for all units.
INSTANCE_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?")
UNIT_NAME = re.compile(r"v100-(?:[A-Za-z0-9:_.\\-]|@(?!\.service))+\.service|v100ctl-nightly@[a-z0-9-]+\.timer")
#: Units of others that this toolkit has something to do with.
OTHER_UNITS = (
    "cron.service",
    # Its name on Enterprise Linux.
    "crond.service",
    "docker.service",
    "nvidia-dcgm-exporter.service",
    "nvidia-persistenced.service",
    "prometheus-node-exporter.service",
    "v100ctl-gateway.service",
    "v100ctl-gpu-tuning.service",
    "v100ctl-metrics.service",
    "v100ctl-metrics.timer",
    "v100ctl-watchdog.service",
)
UNIT_PROPERTIES = (
    "Id,LoadState,ActiveState,SubState,UnitFileState,FragmentPath,DropInPaths,NeedDaemonReload,MainPID,Result,NRestarts"
)
COMMAND_ENVIRONMENT = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "LC_ALL": "C",
    "SYSTEMD_COLORS": "0",
    "SYSTEMD_PAGER": "",
}
#: Where Docker's engine is asked which container publishes a port.
DOCKER_SOCKET = "/run/docker.sock"
#: A container's id in a control group: `docker-ID.scope`, `/docker/ID`, `libpod-ID.scope`, `cri-containerd-ID.scope`.
CONTAINER_GROUP = re.compile(r"(docker|libpod|cri-containerd|crio|containerd)[-/.]([0-9a-f]{64})")
#: What stands for a secret in a command line.
HIDDEN = "(hidden)"
#: Flags and variables whose value is a secret, by their names: words that mean one, and what makes them mean something else.
#: vLLM takes the beginnings of its flags too.
SECRET_NAME = re.compile(
    r"(?:^|-)(?:api-?ke?|keys?|apikeys?|hf-?t(?:o|ok|oke)?|tokens?|password|passwd|passphrase|secrets?|credentials?|auth)$", re.I
)
SECRET_TEXT = re.compile(
    r"\bhf_[A-Za-z0-9]{8,}|\bsk-[A-Za-z0-9_-]{8,}|(?<=Bearer )\S+|(?<=://)[^/@\s]+(?=@)|(?<=[?&_]token=)[^&\s]+|(?<=key=)[^&\s]+"
)
#: Variables that decide what a server of models does.
SERVER_VARIABLES = (b"CUDA_", b"OMP_", b"GGML_", b"LLAMA_", b"VLLM_", b"NVIDIA_")
INTERPRETER = re.compile(r"(?:python|pypy|node|perl|ruby|java|php|sh|bash|dash)[0-9.]*")
CAP_SYS_RESOURCE = 24
#: Flags of a PCI resource (include/linux/ioport.h): memory, 64-bit, no address assigned.
IORESOURCE_MEM = 0x200
IORESOURCE_MEM_64 = 0x100000
IORESOURCE_UNSET = 0x20000000
#: The most lanes a PCI Express link can have; a card that has fallen off the bus reads as 63.
MAX_LINK_WIDTH = 32
# A product name may hold a comma, so it comes last.
SMI_FIELDS = (
    "index",
    "uuid",
    "pci.bus_id",
    "memory.total",
    "memory.used",
    "memory.reserved",
    "persistence_mode",
    "ecc.mode.current",
    "compute_cap",
    "power.limit",
    "clocks.applications.memory",
    "clocks.applications.graphics",
    "compute_mode",
    "temperature.gpu",
    "temperature.memory",
    "power.draw",
    "clocks.current.sm",
    "clocks.max.sm",
    "clocks_event_reasons.active",
    "ecc.mode.pending",
    "ecc.errors.corrected.volatile.total",
    "ecc.errors.uncorrected.volatile.total",
    "ecc.errors.uncorrected.aggregate.total",
    "retired_pages.single_bit_ecc.count",
    "retired_pages.double_bit.count",
    "retired_pages.pending",
    "name",
)
#: What older drivers call a field.
SMI_OLDER_NAMES = {"clocks_event_reasons.active": "clocks_throttle_reasons.active"}
#: Bits of that field (``nvmlClocksEventReasons`` in ``nvml.h``). An idle card and application clocks are no reasons to be told.
SMI_REASONS = (
    (0x4, "sw_power_cap"),
    (0x8, "hw_slowdown"),
    (0x10, "sync_boost"),
    (0x20, "sw_thermal_slowdown"),
    (0x40, "hw_thermal_slowdown"),
    (0x80, "hw_power_brake_slowdown"),
)
SMI_PROCESS_FIELDS = ("gpu_uuid", "pid", "used_memory", "process_name")
SMI_UNKNOWN_FIELD = re.compile(r'Field "([a-z_.0-9]{1,60})" is not a valid field to query')
SMI_MISMATCH = "Driver/library version mismatch"
WATCHED_MODULES = ("nvidia", "nvidia_uvm", "nvidia_drm", "nvidia_modeset", "nouveau", "vfio_pci")
# Debian names its builds `nvidia-current`, `nvidia-tesla-470`, `nvidia-current-open`; all others just `nvidia`.
MODULE_FILE = re.compile(r"nvidia(?:-current|-tesla(?:-[0-9]+)?|-legacy-[0-9]+xx|-[0-9]+)?(?:-open)?\.ko(?:\.(?:gz|xz|zst))?")
DRIVER_VERSION = re.compile(r"[0-9]{3,}\.[0-9]+(?:\.[0-9]+)?")
LIBRARY_DIRS = ("/usr/lib/{machine}-linux-gnu", "/usr/lib64", "/usr/lib", "/usr/local/nvidia/lib64")
MODPROBE_DIRS = ("etc/modprobe.d", "run/modprobe.d", "usr/local/lib/modprobe.d", "usr/lib/modprobe.d", "lib/modprobe.d")
PCI_DEVICES = "/sys/bus/pci/devices"
UVM_DEVICE = "/dev/nvidia-uvm"
SECURE_BOOT_VARIABLE = "SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c"
XID = re.compile(r"NVRM: Xid \((?:PCI:)?([0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2})(?:\.[0-7])?\): ([0-9]{1,4})(?:, *(.*))?")
#: The kernel log (``/dev/kmsg``) is this device.
KMSG_DEVICE = (1, 11)
#: Packages of which a preference of somebody else's is told.
DRIVER_NAMES = re.compile(r"nvidia|cuda", re.I)
#: What a job of somebody else's is told for: our servers, the cards, the end of the host. `@reboot` is a time, no command.
CRON_WORDS = re.compile(r"v100-[A-Za-z0-9:_.-]+|v100ctl|nvidia-smi|llama-server|vllm|(?<![@\w-])(?:reboot|shutdown|poweroff)\b")
CRON_TABLES = ("/etc/crontab", "/var/spool/cron/crontabs", "/var/spool/cron")
COMPILER = re.compile(r"(?:gcc|g\+\+)(?:-[0-9]{1,2})?")
COMPILERS_LIMIT_S = 3.0
X86_LEVELS = (
    ("x86-64-v2", ("cx16", "lahf_lm", "popcnt", "pni", "sse4_1", "sse4_2", "ssse3")),
    ("x86-64-v3", ("abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", "xsave")),
    ("x86-64-v4", ("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")),
)


class ProbeFailure(Exception):
    """Something could not be learned; the text says what and why."""


# --- reading, bounded ---------------------------------------------------------------------------------------------------------


def text(raw: "bytes | str") -> str:
    """Text that JSON can carry: bytes that are not UTF-8, and the surrogates that stand for them in paths, are replaced."""
    if isinstance(raw, str):
        raw = raw.encode("utf-8", "surrogateescape")
    return raw.decode("utf-8", "replace")


def open_regular(path: str, follow: bool = False) -> int:
    """Open a regular file for reading without ever blocking on a FIFO or a device.

    Raises:
        OSError: it cannot be opened, or is a link and ``follow`` is false.
        ProbeFailure: it is not a regular file.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
    descriptor = os.open(path, flags if follow else flags | os.O_NOFOLLOW)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ProbeFailure("not a regular file")
    return descriptor


def read_descriptor(descriptor: int, limit_bytes: int) -> bytes:
    """At most ``limit_bytes`` of an open file."""
    chunks = []
    left = limit_bytes
    while left > 0:
        chunk = os.read(descriptor, min(left, 1 << 20))
        if not chunk:
            break
        chunks.append(chunk)
        left -= len(chunk)
    return b"".join(chunks)


def read_file(path: str, limit_bytes: int = 1 << 20, follow: bool = True) -> bytes:
    """At most ``limit_bytes`` of a regular file (kernel files in ``/proc`` and ``/sys`` count as such)."""
    descriptor = open_regular(path, follow=follow)
    try:
        return read_descriptor(descriptor, limit_bytes)
    finally:
        os.close(descriptor)


def read_text(path: str, default: "str | None" = None, limit_bytes: int = 1 << 20) -> str:
    """A file as text without surrounding blanks; ``default``, where given, if it cannot be read."""
    try:
        return text(read_file(path, limit_bytes)).strip()
    except (OSError, ProbeFailure):
        if default is None:
            raise
        return default


def read_json(path: str, limit_bytes: int = MAX_DOCUMENT_BYTES) -> "Document":
    """A JSON object from a regular file.

    Raises:
        OSError: it cannot be read.
        ProbeFailure: it is too large, not a regular file, or not a JSON object.
    """
    raw = read_file(path, limit_bytes + 1, follow=False)
    if len(raw) > limit_bytes:
        raise ProbeFailure(f"larger than {limit_bytes} bytes")

    def refuse(constant: str) -> "Any":
        raise ValueError(f"{constant} is not JSON")

    def whole(digits: str) -> int:
        # Nothing has more, and turning very many of them into a number takes minutes.
        return int(digits) if len(digits) <= MAX_DIGITS else refuse(f"a number of {len(digits)} digits")

    def real(digits: str) -> float:
        number = float(digits)
        return number if math.isfinite(number) else refuse("a number without end")

    try:
        document = json.loads(raw.decode("utf-8"), parse_constant=refuse, parse_int=whole, parse_float=real)
    except RecursionError:
        raise ProbeFailure("nested too deeply") from None
    except ValueError as error:
        raise ProbeFailure(f"not valid JSON: {error}") from None
    if not isinstance(document, dict):
        raise ProbeFailure("not a JSON object")
    layer = [document]  # type: list[Any]
    for _ in range(MAX_JSON_DEPTH):
        layer = [inner for outer in layer for inner in (outer.values() if isinstance(outer, dict) else outer)]
        layer = [inner for inner in layer if isinstance(inner, (dict, list))]
        if not layer:
            return document
    # The reader of the whole document has a limit too: one file must not cost all the rest.
    raise ProbeFailure("nested too deeply")


def hash_descriptor(descriptor: int) -> str:
    """SHA-256 of an open file from where it stands."""
    digest = hashlib.sha256()
    while True:
        chunk = os.read(descriptor, 1 << 20)
        if not chunk:
            return digest.hexdigest()
        digest.update(chunk)


def kill_group(pid: int) -> None:
    """Kill a process and all that it started; one that is gone is fine."""
    for kill in (os.killpg, os.kill):
        try:
            kill(pid, signal.SIGKILL)
        except OSError:
            continue


class Command:
    """An external program in a process group of its own, with a time limit. One that cannot be killed is left behind."""

    def __init__(self, argv: "list[str]", limit_s: float) -> None:
        self.argv = argv
        self.deadline_s = time.monotonic() + limit_s
        self.limit_s = limit_s
        self.process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=COMMAND_ENVIRONMENT,
            cwd="/",
            start_new_session=True,
        )

    def finish(self) -> "tuple[int | None, bytes]":
        """Exit code (``None``: the time ran out) and what it wrote (stdout and stderr together, bounded)."""
        pipe = self.process.stdout
        if pipe is None:
            raise ProbeFailure("no pipe")
        chunks = []
        left = COMMAND_OUTPUT_BYTES
        poller = select.poll()
        poller.register(pipe, select.POLLIN | select.POLLHUP)
        while left > 0:
            wait_s = self.deadline_s - time.monotonic()
            if wait_s <= 0 or not poller.poll(wait_s * 1000):
                break
            chunk = os.read(pipe.fileno(), 1 << 16)
            if not chunk:
                break
            chunks.append(chunk)
            left -= len(chunk)
        # Its output may have ended a moment before the program itself does.
        while self.process.poll() is None and time.monotonic() < self.deadline_s and left > 0:
            time.sleep(0.002)
        code = self.process.poll()
        if code is None:
            kill_group(self.process.pid)
        pipe.close()
        if left <= 0:
            raise ProbeFailure(f"`{self.argv[0]}` printed more than {COMMAND_OUTPUT_BYTES} bytes")
        return code, b"".join(chunks)


def run_command(argv: "list[str]", limit_s: float) -> str:
    """What a program printed.

    Raises:
        ProbeFailure: it is missing, failed, or took longer than ``limit_s``.
    """
    try:
        code, output = Command(argv, limit_s).finish()
    except FileNotFoundError:
        raise ProbeFailure(f"`{argv[0]}` is not installed") from None
    if code is None:
        raise ProbeFailure(f"`{argv[0]}` gave no answer within {limit_s:g} s")
    if code != 0:
        raise ProbeFailure(f"`{argv[0]}` failed with {code}: {text(output).strip()[:300]}")
    return text(output)


# --- the host -----------------------------------------------------------------------------------------------------------------


def parse_os_release(content: str) -> "Document":
    """``/etc/os-release`` (shell assignments, quoted or not) as the fields of ``Distribution``."""
    values = {}
    for line in content.splitlines():
        name, separator, value = line.strip().partition("=")
        if not separator or name.startswith("#"):
            continue
        value = value.strip()
        if len(value) >= 2 and value[0] == value[-1] and value[0] in "\"'":
            quote = value[0]
            value = value[1:-1]
            if quote == '"':
                value = re.sub(r'\\([\\"$`])', r"\1", value)
        values[name] = value
    return {
        "id": values.get("ID", ""),
        "version_id": values.get("VERSION_ID", ""),
        "codename": values.get("VERSION_CODENAME", ""),
        "name": values.get("PRETTY_NAME", "") or values.get("NAME", ""),
        "id_like": values.get("ID_LIKE", "").split(),
    }


def collect_distribution(etc: str = "/etc/os-release", usr: str = "/usr/lib/os-release") -> "Document":
    """The distribution, from the first of two places that the specification names."""
    return parse_os_release(read_text(etc, "") or read_text(usr))


def collect_libc() -> "Document":
    """The C library: glibc says its version itself; musl shows by its loader's name."""
    try:
        name, _, version = (os.confstr("CS_GNU_LIBC_VERSION") or "").partition(" ")
    except (ValueError, OSError):
        name, version = "", ""
    if not name:
        for folder in ("/lib", "/usr/lib"):
            if any(entry.startswith("ld-musl-") for entry in os.listdir(folder)):
                return {"name": "musl", "version": ""}
    return {"name": name, "version": version}


def collect_virtualization(root: str = "/") -> str:
    """``none``, or the container or virtual machine that this is, in systemd's words."""
    told = read_text(os.path.join(root, "run/systemd/container"), "")
    if told:
        return told[:64]
    for mark, name in (("run/.containerenv", "podman"), (".dockerenv", "docker")):
        if os.path.exists(os.path.join(root, mark)):
            return name
    try:
        environment = read_file(os.path.join(root, "proc/1/environ"), 1 << 16).split(b"\0")
    except (OSError, ProbeFailure):
        environment = []
    for entry in environment:
        if entry.startswith(b"container="):
            return text(entry[10:])[:64] or "container-other"
    vendor = " ".join(read_text(os.path.join(root, "sys/class/dmi/id", name), "") for name in ("sys_vendor", "product_name"))
    for mark, name in (
        ("KVM", "kvm"),
        ("QEMU", "qemu"),
        ("VMware", "vmware"),
        ("VirtualBox", "oracle"),
        ("Xen", "xen"),
        ("Virtual Machine", "microsoft"),
        ("Amazon EC2", "amazon"),
        ("Google Compute Engine", "google"),
    ):
        if mark in vendor:
            return name
    flags = re.search(r"^flags\s*:(.*)$", read_text(os.path.join(root, "proc/cpuinfo"), ""), re.M)
    return "vm-other" if flags and "hypervisor" in flags.group(1).split() else "none"


def x86_level(flags: "set[str]") -> str:
    """The highest x86-64 micro-architecture level that a CPU with these ``/proc/cpuinfo`` flags reaches."""
    level = "x86-64" if "lm" in flags else ""
    for name, needed in X86_LEVELS:
        if not level or not flags.issuperset(needed):
            break
        level = name
    return level


def parse_cpuinfo(content: str) -> "Document":
    """``/proc/cpuinfo``: model name, number of logical and physical CPUs, level."""
    logical = 0
    cores = set()
    model = ""
    flags = set()  # type: set[str]
    package = core = ""
    for line in [*content.splitlines(), ""]:
        name, _, value = line.partition(":")
        name, value = name.strip(), value.strip()
        if name == "processor":
            logical += 1
        elif name in ("model name", "cpu", "Processor") and not model:
            model = value
        elif name == "flags" and not flags:
            flags = set(value.split())
        elif name == "physical id":
            package = value
        elif name == "core id":
            core = value
        elif not name and core:
            cores.add((package, core))
            package = core = ""
    return {"model": model, "logical_count": logical, "physical_count": len(cores) or logical, "level": x86_level(flags)}


def cgroup_cpu_limit(root: str = "/sys/fs/cgroup") -> "float | None":
    """CPUs that this host's own top control group allows (a container's ceiling), or ``None``."""
    try:
        quota, _, period = read_text(os.path.join(root, "cpu.max"), "").partition(" ")
        if not quota:
            quota = read_text(os.path.join(root, "cpu/cpu.cfs_quota_us"), "-1")
            period = read_text(os.path.join(root, "cpu/cpu.cfs_period_us"), "100000")
        if quota == "max" or int(quota) <= 0:
            return None
        return int(quota) / int(period)
    except (ValueError, ZeroDivisionError):
        return None


def collect_numa_nodes(root: str = "/sys/devices/system/node") -> "list[Document]":
    """NUMA nodes with their CPUs and memory; empty where the kernel shows none."""
    nodes = []
    try:
        names = os.listdir(root)
    except OSError:
        return []
    for name in names:
        if not re.fullmatch(r"node[0-9]{1,6}", name):
            continue
        folder = os.path.join(root, name)
        memory = re.search(r"MemTotal:\s*([0-9]+) kB", read_text(os.path.join(folder, "meminfo"), ""))
        nodes.append(
            {
                "id": int(name[4:]),
                "cpus": read_text(os.path.join(folder, "cpulist"), ""),
                "memory_bytes": int(memory.group(1)) * 1024 if memory else 0,
            }
        )
    return sorted(nodes, key=lambda node: int(str(node["id"])))


def collect_governors(root: str = "/sys/devices/system/cpu") -> "list[str]":
    """The frequency governors that are in use, each once; empty where the kernel scales nothing."""
    names = [name for name in _listdir(root) if re.fullmatch(r"cpu[0-9]{1,6}", name)][:MAX_CPUS]
    found = {read_text(os.path.join(root, name, "cpufreq/scaling_governor"), "") for name in names}
    return sorted(found - {""})


def collect_cpu() -> "Document":
    """Processors. What is usable is what PID 1 may run on, since services inherit from it, within the control group's quota."""
    cpu = parse_cpuinfo(read_text("/proc/cpuinfo", limit_bytes=16 << 20))
    try:
        usable = len(os.sched_getaffinity(1))
    except OSError:
        usable = len(os.sched_getaffinity(0))
    quota = cgroup_cpu_limit()
    if quota is not None:
        usable = min(usable, max(1, int(quota)))
    cpu["usable_count"] = usable
    first = read_text("/proc/1/status", "")
    cpu["usable_cpus"] = status_field(first, "Cpus_allowed_list")
    cpu["usable_nodes"] = status_field(first, "Mems_allowed_list")
    cpu["numa_nodes"] = collect_numa_nodes()
    cpu["governors"] = collect_governors()
    return cpu


def parse_meminfo(content: str) -> "Document":
    """``/proc/meminfo`` in bytes."""
    values = {name: int(number) * 1024 for name, number in re.findall(r"^(\w+):\s*([0-9]+) kB$", content, re.M)}
    return {
        "total_bytes": values.get("MemTotal", 0),
        "available_bytes": values.get("MemAvailable", values.get("MemFree", 0)),
        "swap_total_bytes": values.get("SwapTotal", 0),
        "swap_free_bytes": values.get("SwapFree", 0),
    }


def cgroup_memory_limit(root: str = "/sys/fs/cgroup") -> "int | None":
    """Bytes that this host's own top control group allows (a container's ceiling), or ``None``."""
    limit = read_text(os.path.join(root, "memory.max"), "") or read_text(os.path.join(root, "memory/memory.limit_in_bytes"), "")
    return int(limit) if re.fullmatch(r"[0-9]{1,20}", limit) else None


def collect_memory() -> "Document":
    """Memory, with the control group's ceiling where that is what counts."""
    memory = parse_meminfo(read_text("/proc/meminfo"))
    limit_bytes = cgroup_memory_limit()
    memory["limit_bytes"] = limit_bytes if limit_bytes is not None and limit_bytes < memory["total_bytes"] else None
    return memory


def parse_limits(content: str) -> "dict[str, tuple[int | None, int | None]]":
    """``/proc/PID/limits``: name -> (soft, hard), ``None`` for unlimited."""
    limits = {}
    for name, soft, hard in re.findall(r"^(Max [a-z ]+?)\s{2,}(unlimited|[0-9]+)\s+(unlimited|[0-9]+)", content, re.M):
        limits[name] = (None if soft == "unlimited" else int(soft), None if hard == "unlimited" else int(hard))
    return limits


def status_field(content: str, name: str) -> str:
    """One field of ``/proc/PID/status``, empty if it is not there."""
    found = re.search(rf"^{re.escape(name)}:[ \t]*(.*)$", content, re.M)
    return found.group(1).strip() if found else ""


def collect_limits(proc: str = "/proc") -> "Document":
    """The most that a service can be given: what PID 1 may raise to, or its own hard limits where it may not raise."""
    hard = parse_limits(read_text(os.path.join(proc, "1/limits")))
    capabilities = status_field(read_text(os.path.join(proc, "1/status")), "CapEff")
    # Inside a user namespace the capability is there but does not count for the kernel's limits.
    whole = read_text(os.path.join(proc, "self/uid_map"), "").split() in (["0", "0", "4294967295"], [])
    nofile_hard, memlock_hard = hard["Max open files"][1], hard["Max locked memory"][1]
    if whole and capabilities and int(capabilities, 16) & (1 << CAP_SYS_RESOURCE):
        nofile_hard = int(read_text(os.path.join(proc, "sys/fs/nr_open"), "0")) or nofile_hard
        memlock_hard = None
    return {"nofile_hard": nofile_hard, "memlock_hard_bytes": memlock_hard}


def unescape_mount(field: str) -> str:
    """A path from ``/proc/self/mounts`` with its octal escapes resolved."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found.group(1), 8)), field)


def find_mount(path: str, mounts: str) -> "tuple[str, str]":
    """Device and mount point of the filesystem that holds ``path``, by ``/proc/self/mounts``; the last mount on a point wins."""
    best = ("", "")
    for line in mounts.splitlines():
        fields = line.split(" ")
        if len(fields) < 4:
            continue
        point = unescape_mount(fields[1])
        if (path == point or path.startswith(point.rstrip("/") + "/")) and len(point) >= len(best[1]):
            best = (unescape_mount(fields[0]), point)
    return best


def collect_filesystem(path: str) -> "Document":
    """The filesystem of a path or of its nearest existing parent."""
    nearest = os.path.abspath(path)
    while not os.path.lexists(nearest) and nearest != "/":
        nearest = os.path.dirname(nearest)
    space = os.statvfs(nearest)
    device, mount = find_mount(os.path.realpath(nearest), read_text("/proc/self/mounts", "", limit_bytes=4 << 20))
    return {
        "mount": mount,
        "device": device,
        "total_bytes": space.f_blocks * space.f_frsize,
        # Root may use the blocks that are set aside for it.
        "free_bytes": space.f_bfree * space.f_frsize,
        "read_only": bool(space.f_flag & os.ST_RDONLY),
        "no_exec": bool(space.f_flag & os.ST_NOEXEC),
    }


# --- accounts -----------------------------------------------------------------------------------------------------------------
# Read from the files: a lookup through NSS may wait for a directory server that does not answer.


def parse_passwd(content: str) -> "dict[str, list[str]]":
    """``/etc/passwd``: name -> its seven fields."""
    rows = (line.split(":") for line in content.splitlines())
    return {row[0]: row for row in rows if len(row) == 7 and row[2].isdigit() and row[3].isdigit()}


def parse_group(content: str) -> "dict[str, tuple[int, list[str]]]":
    """``/etc/group``: name -> (gid, members)."""
    rows = (line.split(":") for line in content.splitlines())
    return {
        row[0]: (int(row[2]), [member for member in row[3].split(",") if member])
        for row in rows
        if len(row) == 4 and row[2].isdigit()
    }


class Names:
    """Names for user and group ids, from the two files."""

    def __init__(self, etc: str = "/etc") -> None:
        self.passwd = parse_passwd(read_text(os.path.join(etc, "passwd"), "", limit_bytes=16 << 20))
        self.group = parse_group(read_text(os.path.join(etc, "group"), "", limit_bytes=16 << 20))
        self._users = {int(row[2]): name for name, row in reversed(list(self.passwd.items()))}
        self._groups = {gid: name for name, (gid, _) in reversed(list(self.group.items()))}

    def user(self, uid: int) -> str:
        """A user's name, or the number."""
        return self._users.get(uid, str(uid))

    def of_group(self, gid: int) -> str:
        """A group's name, or the number."""
        return self._groups.get(gid, str(gid))

    def account(self, name: str) -> "Document | None":
        """An account with its supplementary groups, or ``None``."""
        row = self.passwd.get(name)
        if row is None:
            return None
        groups = sorted(group for group, (_, members) in self.group.items() if name in members)
        return {"uid": int(row[2]), "gid": int(row[3]), "home": row[5], "shell": row[6], "groups": groups}


# --- packages -----------------------------------------------------------------------------------------------------------------


def parse_dpkg_status(raw: bytes) -> "Document":
    """dpkg's status file: installed versions, holds, and packages that were left half done.

    A package of a foreign architecture has the architecture in its name (``libc6:i386``), as ``dpkg`` shows it.
    """
    native = re.search(rb"^Package: dpkg\n(?:.+\n)*?Architecture: (.+)$", raw, re.M)
    own = native.group(1).strip() if native else b""
    installed = {}
    held = []
    half_configured = []
    for paragraph in raw.split(b"\n\n"):
        # A field starts a line; a leading newline lets the first line of a paragraph be found like the others.
        lines = b"\n" + paragraph
        fields = []
        for name in (b"\nPackage: ", b"\nStatus: ", b"\nVersion: ", b"\nArchitecture: "):
            start = lines.find(name)
            if start < 0:
                fields.append(b"")
                continue
            start += len(name)
            end = lines.find(b"\n", start)
            fields.append((lines[start:] if end < 0 else lines[start:end]).strip())
        package, status, version, architecture = fields
        words = status.split()
        if not package or len(words) != 3:
            continue
        name_text = text(package)
        if own and architecture not in (own, b"all", b""):
            name_text += ":" + text(architecture)
        want, flag, state = words
        if want == b"hold":
            held.append(name_text)
        if state in (b"unpacked", b"half-configured", b"half-installed") or flag == b"reinstreq":
            half_configured.append(name_text)
        elif state in (b"installed", b"triggers-awaited", b"triggers-pending"):
            installed[name_text] = text(version)
    return {"manager": "dpkg", "installed": installed, "held": sorted(held), "half_configured": sorted(half_configured)}


def parse_rpm_list(output: str) -> "Document":
    """``name TAB version`` lines; several versions of one name (kernels) stand side by side."""
    installed = {}  # type: dict[str, str]
    for line in output.splitlines():
        name, separator, version = line.partition("\t")
        if separator and name != "gpg-pubkey":
            installed[name] = installed[name] + ", " + version if name in installed else version
    return {"manager": "rpm", "installed": installed, "held": [], "half_configured": []}


def parse_version_locks(content: str) -> "list[str]":
    """The packages that dnf's plugin ``versionlock`` holds.

    Its lines are ``NAME-EPOCH:VERSION-RELEASE.*``; with ``!`` before it they are what it forbids.
    """
    found = (re.match(r"(?![!#])(.+)-[0-9]+:[^-]+-[^-]+$", line.strip()) for line in content.splitlines())
    return sorted({match.group(1) for match in found if match})


def collect_packages(dpkg_status: str = "/var/lib/dpkg/status") -> "Document":
    """Installed packages, from dpkg's status file or through one `rpm -qa`."""
    try:
        raw = read_file(dpkg_status, MAX_STATUS_BYTES + 1)
    except FileNotFoundError:
        raw = b""
    if len(raw) > MAX_STATUS_BYTES:
        raise ProbeFailure(f"{dpkg_status} is larger than {MAX_STATUS_BYTES} bytes")
    if raw.strip():
        return parse_dpkg_status(raw)
    if os.path.isdir("/var/lib/rpm") or os.path.isdir("/usr/lib/sysimage/rpm"):
        form = r"%{NAME}\t%|EPOCH?{%{EPOCH}:}:{}|%{VERSION}-%{RELEASE}\n"
        packages = parse_rpm_list(run_command(["rpm", "-qa", "--qf", form], 10.0))
        packages["held"] = parse_version_locks(read_text(VERSION_LOCKS, ""))
        return packages
    return {"manager": "", "installed": {}, "held": [], "half_configured": []}


def parse_source_line(line: str) -> "list[Document]":
    """One line of a ``.list`` file: ``deb [signed-by=FILE arch=amd64] URI SUITE COMPONENT...``."""
    found = re.match(r"[ \t]*deb[ \t]+(?:\[([^\]]*)\][ \t]*)?(\S+)[ \t]+(\S+)([^#]*)", line)
    if not found:
        return []
    options = {name.lower(): value for name, _, value in (word.partition("=") for word in (found.group(1) or "").split())}
    return [
        {
            "uri": found.group(2),
            "suite": found.group(3),
            "components": found.group(4).split(),
            "architectures": [word for word in options.get("arch", "").split(",") if word],
            "signed_by": options.get("signed-by", ""),
            "trusted": options.get("trusted", "").lower() in ("yes", "true", "1"),
        }
    ]


def parse_source_paragraphs(content: str) -> "list[Document]":
    """A ``.sources`` file: paragraphs of fields, each with one or more addresses and suites."""
    found = []
    for paragraph in re.split(r"\n[ \t]*\n", content):
        fields = {}  # type: dict[str, str]
        name = ""
        for line in paragraph.splitlines():
            if line.startswith("#"):
                continue
            if line[:1] in (" ", "\t") and name:
                fields[name] += "\n" + line
            elif ":" in line:
                name, _, value = line.partition(":")
                name = name.strip().lower()
                fields[name] = value.strip()
        if fields.get("enabled", "yes").lower() in ("no", "false", "0") or "deb" not in fields.get("types", "").split():
            continue
        for uri in fields.get("uris", "").split():
            for suite in fields.get("suites", "").split():
                found.append(
                    {
                        "uri": uri,
                        "suite": suite,
                        "components": fields.get("components", "").split(),
                        "architectures": fields.get("architectures", "").split(),
                        "signed_by": fields.get("signed-by", "").strip(),
                        "trusted": fields.get("trusted", "").lower() in ("yes", "true", "1"),
                    }
                )
    return found


def archive_origin(uri: str, suite: str, lists: str = "/var/lib/apt/lists") -> str:
    """What an archive calls itself, by the lists that apt has fetched of it; empty where there are none."""
    place = uri.partition("://")[2].rstrip("/") + ("/" + suite if suite.endswith("/") else "/dists/" + suite)
    # Apt writes the slashes as underscores, and the underscores by their number.
    name = re.sub(r"/+", "_", place.rstrip("/").replace("_", "%5f"))
    for ending in ("_InRelease", "_Release"):
        try:
            head = read_file(os.path.join(lists, name + ending), 1 << 20)
        except (OSError, ProbeFailure):
            continue
        found = re.search(rb"^Origin: (.+)$", head, re.M)
        if found:
            return text(found.group(1)).strip()
    return ""


def collect_apt_sources(etc: str = "/etc/apt", lists: str = "/var/lib/apt/lists") -> "list[Document]":
    """Where apt takes packages from. An address that holds a password is not told."""
    folder = os.path.join(etc, "sources.list.d")
    paths = [os.path.join(etc, "sources.list")]
    paths += [os.path.join(folder, name) for name in sorted(_listdir(folder)) if name.endswith((".list", ".sources"))]
    found = []  # type: list[Document]
    for path in paths:
        content = read_text(path, "")
        if path.endswith(".sources"):
            entries = parse_source_paragraphs(content)
        else:
            entries = [entry for line in content.splitlines() for entry in parse_source_line(line)]
        for entry in entries:
            if "@" not in entry["uri"]:
                found.append(dict(entry, path=text(path), origin=archive_origin(entry["uri"], entry["suite"], lists)))
    return found[:MAX_APT_SOURCES]


def collect_preferences(etc: str = "/etc/apt", dpkg_info: str = "/var/lib/dpkg/info") -> "list[Document]":
    """Which files of apt's preferences speak of the driver or of CUDA, of which packages, and which package brought them."""
    folder = os.path.join(etc, "preferences.d")
    paths = [os.path.join(etc, "preferences")]
    # As apt does: names without an ending, and those with this one.
    paths += [os.path.join(folder, name) for name in sorted(_listdir(folder)) if "." not in name or name.endswith(".pref")]
    found = []  # type: list[Document]
    for path in paths:
        packages = re.findall(r"^Package:[ \t]*(.+)$", read_text(path, ""), re.M)
        named = [word for line in packages for word in line.split() if DRIVER_NAMES.search(word)]
        if named:
            found.append({"path": text(path), "packages": [text(word)[:100] for word in dict.fromkeys(named)][:20]})
    found = found[:MAX_PREFERENCES]
    # Packages that pin the driver are called like it; the lists of all others are not read.
    lists = (
        [name for name in sorted(_listdir(dpkg_info)) if name.endswith(".list") and DRIVER_NAMES.search(name)] if found else []
    )
    for name in lists:
        files = set(read_text(os.path.join(dpkg_info, name), "").splitlines())
        for preference in found:
            if preference["path"] in files:
                preference["owner"] = text(name[: -len(".list")].partition(":")[0])
    return found


def collect_unattended_upgrades(etc: str = "/etc/apt") -> "bool | None":
    """Whether apt installs upgrades by itself; ``None`` where no file says."""
    folder = os.path.join(etc, "apt.conf.d")
    paths = [os.path.join(folder, name) for name in sorted(_listdir(folder)) if "." not in name or name.endswith(".conf")]
    told = None
    for path in [*paths, os.path.join(etc, "apt.conf")]:
        content = re.sub(r"^[ \t]*(?://|#).*$", "", read_text(path, ""), flags=re.M)
        values = re.findall(r'Unattended-Upgrade[ \t]+"([^"]*)"', content)
        if values:
            # The last one counts.
            told = values[-1].strip().lower() not in ("", "0", "no", "false")
    return told


def collect_cron(root: str = "/") -> "list[Document]":
    """Jobs of somebody else's that speak of our servers, of the cards or of a restart. Only those words are told: a command may
    hold secrets.
    """
    tables = [os.path.join(root, path.lstrip("/")) for path in CRON_TABLES]
    folder = os.path.join(root, "etc/cron.d")
    paths = [tables[0]] + [os.path.join(folder, name) for name in sorted(_listdir(folder))]
    for place in tables[1:]:
        paths += [os.path.join(place, name) for name in sorted(_listdir(place)) if os.path.isfile(os.path.join(place, name))]
    found = []  # type: list[Document]
    for path in paths[:MAX_CRON_FILES]:
        lines = [line for line in read_text(path, "").splitlines() if not line.lstrip().startswith("#")]
        words = sorted({word for line in lines for word in CRON_WORDS.findall(line)})
        if words:
            found.append({"path": text("/" + os.path.relpath(path, root)), "words": [text(word)[:100] for word in words][:10]})
    return found


def command_name(pid: int, proc: str = "/proc") -> str:
    """A process's short name. Reading it never waits, while its command line may wait for a stuck process."""
    return read_text(os.path.join(proc, str(pid), "comm"), "")


def describe_command(argv: "list[str]") -> str:
    """What a command line runs: program and, for an interpreter, its script or module. No more: arguments may hold secrets."""
    program = os.path.basename(argv[0]) if argv else ""
    # Daemons that write their state over their arguments (`nginx: master process ...`) are better known by their short name.
    if not program or " " in argv[0]:
        return ""
    words = [program]
    if INTERPRETER.fullmatch(program):
        rest = iter(argv[1:])
        for argument in rest:
            if argument in ("-m", "-jar"):
                words += [argument, next(rest, "")]
            elif not argument.startswith("-"):
                words.append(argument)
            elif argument not in ("-c", "-e"):
                continue
            break
    return " ".join(words)[:200]


def command_of(pid: int, proc: str = "/proc") -> str:
    """What a process runs. Its command line is not read while it is in an uninterruptible sleep."""
    name = command_name(pid, proc)
    folder = os.path.join(proc, str(pid))
    if read_text(os.path.join(folder, "stat"), "").rpartition(")")[2].split()[:1] == ["D"]:
        return name
    try:
        argv = read_file(os.path.join(folder, "cmdline"), 1 << 16).split(b"\0")[:-1]
    except (OSError, ProbeFailure):
        return name
    return describe_command([text(argument) for argument in argv]) or name


def lock_holder(path: str) -> "int | None":
    """The process that holds a POSIX lock on a file (0: one that cannot be seen from here), or ``None``."""
    try:
        descriptor = open_regular(path)
    except FileNotFoundError:
        return None
    try:
        # struct flock of 64-bit Linux: type, whence, start, length, pid. F_GETLK only asks.
        asked = struct.pack("@hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        answer = struct.unpack("@hhqqi4x", fcntl.fcntl(descriptor, fcntl.F_GETLK, asked))
    finally:
        os.close(descriptor)
    return None if answer[0] == fcntl.F_UNLCK else max(0, int(answer[4]))


def package_locks(paths: "tuple[str, ...]" = PACKAGE_LOCKS) -> "list[Document]":
    """Locks of the package manager that another process holds.

    Raises:
        ProbeFailure: a lock file may not be read (the probe does not run as root).
    """
    locks = []
    for path in paths:
        try:
            holder = lock_holder(path)
        except PermissionError:
            raise ProbeFailure(f"{path} may be read by root only") from None
        if holder is not None:
            locks.append({"path": path, "pid": holder, "command": command_of(holder) if holder else ""})
    return locks


# --- files --------------------------------------------------------------------------------------------------------------------


def keyed_digest(salt: str, content: bytes) -> str:
    """What stands for a file of secrets in the document.

    A plain digest would be the same everywhere and at any time. This one is of a salt that is new with each document, so that
    nothing that is kept can be compared with it, and slow enough that guessing costs more than with a hash.
    """
    return hashlib.pbkdf2_hmac("sha256", content, salt.encode("ascii"), KEYED_DIGEST_ROUNDS).hex()


class FileReporter:
    """Reports files like ``ManagedFile``, at most :data:`MAX_FILES` of them and within a budget of content."""

    def __init__(self, names: Names, deep: bool = False, salt: str = "") -> None:
        self.names = names
        self.salt = salt
        self.deep = deep
        self.files = {}  # type: dict[str, Document]
        self.problems = []  # type: list[str]
        self.content_left_bytes = MAX_CONTENT_TOTAL_BYTES

    def add(self, path: str, with_content: bool = True) -> "str | None":
        """Report one path, never following a link at its end; returns its kind, or ``None`` if it is not there."""
        known = self.files.get(text(path))
        if known is not None:
            return str(known["kind"])
        try:
            status = os.lstat(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError) as error:
            self.problems.append(f"{text(path)}: {error}")
            return None
        if len(self.files) >= MAX_FILES:
            raise ProbeFailure(f"more than {MAX_FILES} files")
        kinds = ((stat.S_ISREG, "file"), (stat.S_ISDIR, "directory"), (stat.S_ISLNK, "symlink"))
        kind = next((name for test, name in kinds if test(status.st_mode)), "other")
        entry = {
            "kind": kind,
            "sha256": "",
            "mode": f"{stat.S_IMODE(status.st_mode):04o}",
            "owner": self.names.user(status.st_uid),
            "group": self.names.of_group(status.st_gid),
            "size_bytes": status.st_size,
            "mtime_s": status.st_mtime,
            "content": None,
        }  # type: Document
        self.files[text(path)] = entry
        if kind == "file":
            try:
                self._read(path, entry, with_content)
            except (OSError, ProbeFailure) as error:
                self.problems.append(f"{text(path)}: {error}")
        return kind

    def _read(self, path: str, entry: "Document", with_content: bool) -> None:
        descriptor = open_regular(path)
        try:
            status = os.fstat(descriptor)
            if status.st_size > MAX_HASHED_BYTES and not self.deep:
                return
            # A second bound, for files that grow or that say a size of nothing.
            raw = read_descriptor(descriptor, MAX_CONTENT_BYTES + 1)
            digest = hashlib.sha256(raw)
            read_bytes = len(raw)
            while len(raw) > MAX_CONTENT_BYTES:
                chunk = os.read(descriptor, 1 << 20)
                if not chunk:
                    break
                read_bytes += len(chunk)
                if read_bytes > MAX_HASHED_BYTES and not self.deep:
                    return
                digest.update(chunk)
            secret = path.endswith(SECRET_SUFFIXES)
            if not secret:
                entry["sha256"] = digest.hexdigest()
            elif self.salt and len(raw) <= MAX_CONTENT_BYTES:
                entry["keyed_digest"] = keyed_digest(self.salt, raw)
        finally:
            os.close(descriptor)
        secret = secret or not status.st_mode & stat.S_IROTH
        if with_content and not secret and len(raw) <= min(MAX_CONTENT_BYTES, self.content_left_bytes):
            try:
                entry["content"] = raw.decode("utf-8")
            except UnicodeDecodeError:
                return
            self.content_left_bytes -= len(raw)

    def walk(self, path: str, depth: int = 0) -> None:
        """Report a path and, where it is a folder and no link to one, all below it."""
        if self.add(path) != "directory":
            return
        if depth >= MAX_DEPTH:
            self.problems.append(f"{text(path)}: nested too deeply")
            return
        try:
            names = sorted(os.listdir(path))
        except OSError as error:
            self.problems.append(f"{text(path)}: {error}")
            return
        for name in names:
            self.walk(os.path.join(path, name), depth + 1)


def unit_names(folder: str = UNIT_DIR) -> "list[str]":
    """File names of this toolkit's units."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    return sorted(name for name in names if UNIT_NAME.fullmatch(name))[:MAX_UNITS]


def managed_by(host_json: "Document | None") -> "list[str]":
    """Paths that an applied plan names; an odd ``host.json`` names none."""
    files = host_json.get("files") if host_json else None
    if not isinstance(files, dict):
        return []
    return [path for path in files if isinstance(path, str) and path.startswith("/") and "\0" not in path]


def collect_files(facts: "Document", request: "Document") -> "Document":
    """Every file that the toolkit manages here. Content comes only from its own places and from what the controller asked for.

    A file that only ``host.json`` names is reported without content: what is written there must not be able to fetch others.
    """
    reporter = FileReporter(Names(), bool(request["deep"]), str(facts.get("secret_salt", "")))
    problem = ""
    try:
        reporter.walk(CONFIG_DIR)
        for name in sorted(entry for entry in _listdir(UNIT_DIR) if entry.startswith(("v100-", "v100ctl-nightly@"))):
            if name.endswith(".service") or (name.endswith(".timer") and UNIT_NAME.fullmatch(name)):
                reporter.add(os.path.join(UNIT_DIR, name))
            elif name.endswith(".service.d"):
                reporter.walk(os.path.join(UNIT_DIR, name))
        reporter.add(CRON_FILE)
        for path in request["files"]:
            reporter.add(path)
        for path in managed_by(facts.get("host_json", {}).get("document")):
            reporter.add(path, with_content=False)
    except ProbeFailure as error:
        problem = str(error)
    problems = ([problem] if problem else []) + reporter.problems
    if problems:
        note_error(facts, "files", "; ".join(problems[:10]))
    return reporter.files


def _listdir(path: str) -> "list[str]":
    try:
        return os.listdir(path)
    except FileNotFoundError:
        return []


def collect_host_json(path: str = HOST_JSON) -> "Document":
    """The plan that was applied last; ``problem`` says why it cannot be read."""
    try:
        return {"document": read_json(path), "problem": ""}
    except FileNotFoundError:
        return {"document": None, "problem": ""}
    except (OSError, ProbeFailure) as error:
        problem = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        if isinstance(error, OSError) and error.errno == errno.ELOOP:
            problem = "a symbolic link"
        return {"document": None, "problem": problem}


def collect_baselines(folder: str = BASELINES_DIR) -> "dict[str, Document]":
    """How each instance was when it was proved: speed and memory, with the digest of the plan that this was for."""
    found = {}
    for name in sorted(_listdir(folder))[:MAX_BASELINES]:
        if not name.endswith(".json") or name.startswith("."):
            continue
        try:
            record = read_json(os.path.join(folder, name), 1 << 16)
        except (OSError, ProbeFailure):
            continue
        entry = {"digest": str(record.get("digest", ""))[:100]}  # type: Document
        for key in ("tokens_per_second", "anonymous_bytes"):
            value = record.get(key)
            entry[key] = value if isinstance(value, (int, float)) and not isinstance(value, bool) else None
        found[text(name[: -len(".json")])] = entry
    return found


# --- releases and models ------------------------------------------------------------------------------------------------------


def check_release_file(folder: str, relative: str, expected: object, deep: bool) -> str:
    """Why a file of a release is not what ``release.json`` says, empty if it is."""
    parts = relative.split("/")
    if not isinstance(expected, dict) or not relative or "" in parts or ".." in parts or "\0" in relative:
        return f"{relative}: release.json lists it wrongly"
    path = os.path.join(folder, relative)
    try:
        status = os.lstat(path)
    except OSError:
        return f"{relative} is missing"
    if not stat.S_ISREG(status.st_mode):
        return f"{relative} is not a regular file"
    if status.st_size != expected.get("size_bytes"):
        wanted_bytes = expected.get("size_bytes")
        return f"{relative} has {status.st_size} bytes, not {wanted_bytes}"
    if deep:
        descriptor = open_regular(path)
        try:
            if hash_descriptor(descriptor) != expected.get("sha256"):
                return f"{relative} has other content"
        finally:
            os.close(descriptor)
    return ""


def check_manifest(folder: str) -> str:
    """Why one of the many files is not what the release's ``manifest.json`` says, empty if all are.

    ``release.json`` lists it with its hash. It has ``[size, mode, sha256]`` for each file, for a link ``[0, "link", target]``.
    """
    try:
        listed = read_json(os.path.join(folder, MANIFEST), MAX_STATUS_BYTES)
    except (OSError, ProbeFailure) as error:
        return "{}: {}".format(MANIFEST, getattr(error, "strerror", None) or error)
    for relative in sorted(listed):
        entry = listed[relative]
        if not isinstance(entry, list) or len(entry) != 3:
            return f"{relative}: {MANIFEST} lists it wrongly"
        if entry[1] == "link":
            try:
                if os.readlink(os.path.join(folder, relative)) != entry[2]:
                    return f"{relative} leads elsewhere"
            except OSError:
                return f"{relative} is missing"
            continue
        problem = check_release_file(folder, relative, {"size_bytes": entry[0], "sha256": entry[2]}, deep=True)
        if problem:
            return problem
    return ""


def check_release(folder: str, engine: str, build_id: str, deep: bool) -> "Document":
    """One release folder, as ``ReleaseFacts``."""
    facts = {"path": folder, "engine": engine, "build_id": build_id, "release": {}, "problem": ""}  # type: Document
    try:
        release = read_json(os.path.join(folder, "release.json"))
    except (OSError, ProbeFailure) as error:
        facts["problem"] = "release.json: %s" % (getattr(error, "strerror", None) or error)
        return facts
    facts["release"] = release
    files = release.get("files")
    if not isinstance(files, dict) or not files:
        facts["problem"] = "release.json lists no files"
    elif len(files) > MAX_RELEASE_FILES:
        facts["problem"] = f"release.json lists more than {MAX_RELEASE_FILES} files"
    elif release.get("build_id") != build_id:
        facts["problem"] = "release.json belongs to {}".format(text(str(release.get("build_id"))[:100]))
    else:
        problems = (check_release_file(folder, relative, files[relative], deep) for relative in sorted(files))
        facts["problem"] = next((problem for problem in problems if problem), "")
        if deep and not facts["problem"] and MANIFEST in files:
            facts["problem"] = check_manifest(folder)
    return facts


def collect_releases(request: "Document", root: str = ENGINES_DIR) -> "list[Document]":
    """All releases below ``ENGINE/BUILD_ID/``. Hidden folders are half-made ones that will be renamed in."""
    releases = []  # type: list[Document]
    for engine in sorted(_listdir(root)):
        engine_folder = os.path.join(root, engine)
        if engine.startswith(".") or not stat.S_ISDIR(os.lstat(engine_folder).st_mode):
            continue
        for build_id in sorted(_listdir(engine_folder)):
            folder = os.path.join(engine_folder, build_id)
            if build_id.startswith(".") or not stat.S_ISDIR(os.lstat(folder).st_mode):
                continue
            if len(releases) >= MAX_RELEASES:
                raise ProbeFailure(f"more than {MAX_RELEASES} releases")
            releases.append(check_release(text(folder), text(engine), text(build_id), bool(request["deep"])))
    return releases


def read_model_records(folder: str = MODEL_RECORDS_DIR) -> "dict[str, Document]":
    """What was verified: model path -> its record. A broken record is as good as none."""
    records = {}
    for name in sorted(_listdir(folder))[:1000]:
        if not name.endswith(".json") or name.startswith("."):
            continue
        try:
            record = read_json(os.path.join(folder, name), 1 << 16)
        except (OSError, ProbeFailure):
            continue
        path = record.get("path")
        if isinstance(path, str) and path.startswith("/"):
            records[path] = record
    return records


def collect_model(path: str, deep: bool, records_dir: str = MODEL_RECORDS_DIR, names: "Names | None" = None) -> "Document":
    """A model file, as ``ModelFacts``; a link is followed, since model stores often are trees of links.

    Its hash is what was verified when it had just this size and time, or is taken now (``deep``).
    """
    record = read_model_records(records_dir).get(path)
    try:
        status = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return {"exists": False}
    if not stat.S_ISREG(status.st_mode):
        raise ProbeFailure("not a regular file")
    sha256 = ""
    if deep:
        descriptor = open_regular(path, follow=True)
        try:
            status = os.fstat(descriptor)
            sha256 = hash_descriptor(descriptor)
        finally:
            os.close(descriptor)
    elif record and (record.get("size_bytes"), record.get("mtime_s")) == (status.st_size, int(status.st_mtime)):
        sha256 = str(record.get("sha256", ""))
    return {
        "exists": True,
        "size_bytes": status.st_size,
        "mtime_ns": status.st_mtime_ns,
        "sha256": sha256,
        "owner": (names or Names()).user(status.st_uid),
        "mode": f"{stat.S_IMODE(status.st_mode):04o}",
    }


def collect_stored_models(root: str = MODELS_DIR) -> "dict[str, int]":
    """What lies in the store of models: path -> size in bytes. Hidden entries are files that are being made."""
    found = {}
    for name in sorted(_listdir(root))[:MAX_STORED_MODELS]:
        path = os.path.join(root, name)
        if name.startswith("."):
            continue
        status = os.lstat(path)
        size_bytes = status.st_size
        if stat.S_ISDIR(status.st_mode):
            size_bytes = 0
            for number, (folder, _, names) in enumerate(os.walk(path)):
                if number >= MAX_STORED_FOLDERS:
                    break
                size_bytes += sum(os.lstat(os.path.join(folder, inner)).st_size for inner in names)
        found[text(path)] = size_bytes
    return found


# --- systemd ------------------------------------------------------------------------------------------------------------------


def parse_show(output: str) -> "list[dict[str, str]]":
    """Blocks of ``Name=value`` lines, as ``systemctl show`` prints them."""
    blocks = []
    for block in output.split("\n\n"):
        pairs = (line.partition("=") for line in block.splitlines())
        values = {name: value for name, separator, value in pairs if separator}
        if values:
            blocks.append(values)
    return blocks


def _number(value: str) -> int:
    return int(value) if value.isdigit() else 0


def unit_facts(shown: "dict[str, str]") -> "Document":
    """One block of ``systemctl show`` as ``UnitFacts``."""
    return {
        "load_state": shown.get("LoadState", ""),
        "active_state": shown.get("ActiveState", ""),
        "sub_state": shown.get("SubState", ""),
        "unit_file_state": shown.get("UnitFileState", ""),
        "fragment_path": shown.get("FragmentPath", ""),
        "drop_in_paths": shown.get("DropInPaths", "").split(),
        "need_daemon_reload": shown.get("NeedDaemonReload", "") == "yes",
        "main_pid": _number(shown.get("MainPID", "")),
        "result": shown.get("Result", ""),
        "restarts_count": _number(shown.get("NRestarts", "")),
    }


def parse_units(output: str) -> "dict[str, Document]":
    """All units of one ``systemctl show``, by name."""
    units = {}
    for shown in parse_show(output):
        name = shown.get("Id", "")
        # One of ours that is not there is told; that others' are not there is no news.
        if UNIT_NAME.fullmatch(name) or (name in OTHER_UNITS and shown.get("LoadState") != "not-found"):
            units[name] = unit_facts(shown)
    return units


def collect_systemd() -> "Document | None":
    """The service manager, or ``None`` where PID 1 is something else."""
    if not os.path.isdir("/run/systemd/system"):
        return None
    shown = parse_show(run_command(["systemctl", "show", "--property=Version,SystemState"], 4.0))
    values = shown[0] if shown else {}
    version = re.match(r"[0-9]+", values.get("Version", "").lstrip("v"))
    return {"version": int(version.group()) if version else 0, "state": values.get("SystemState", "")}


def collect_units() -> "dict[str, Document]":
    """This toolkit's units, found as files or loaded, and a few others, at once. The pattern finds those whose file is gone."""
    if not os.path.isdir("/run/systemd/system"):
        return {}
    argv = ["systemctl", "show", "--property=" + UNIT_PROPERTIES, "--", "v100-*.service", "v100ctl-nightly@*.timer", *OTHER_UNITS]
    return parse_units(run_command(argv + unit_names(), 4.0))


# --- processes and sockets ----------------------------------------------------------------------------------------------------


def _kilobytes(value: str) -> int:
    number = value.split(" ")[0]
    return int(number) * 1024 if number.isdigit() else 0


def memory_policy(path: str) -> str:
    """The policy in the first line of ``/proc/PID/numa_maps``. No more is read: the kernel walks every page of what it tells."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        words = text(os.read(descriptor, 512)).split("\n")[0].split(" ")
    except OSError:
        return ""
    finally:
        os.close(descriptor)
    return words[1] if len(words) > 1 else ""


def deleted_libraries(content: str) -> "list[str]":
    """Libraries in ``/proc/PID/maps`` whose files were removed or replaced since they were loaded."""
    found = re.findall(r"^\S+ ..x. \S+ \S+ \S+\s+(/\S*\.so[.0-9]*) \(deleted\)$", content, re.M)
    return [text(path)[:300] for path in dict.fromkeys(found)][:MAX_DELETED_LIBRARIES]


def collect_process(pid: int, unit: str, names: Names, proc: str = "/proc") -> "Document":
    """The main process of a unit, as ``ProcessFacts``. Of its environment only names without secrets are looked at."""
    folder = os.path.join(proc, str(pid))
    status = read_text(os.path.join(folder, "status"))
    limits = parse_limits(read_text(os.path.join(folder, "limits")))
    executable = text(os.readlink(os.path.join(folder, "exe")))
    deleted = executable.endswith(" (deleted)")
    argv = read_file(os.path.join(folder, "cmdline"), 1 << 17)
    environment = {}
    keys_current = None
    for entry in read_file(os.path.join(folder, "environ"), 1 << 20).split(b"\0"):
        name, separator, value = entry.partition(b"=")
        if name == KEYS_VARIABLE:
            keys_current = has_keys_of(unit, text(value))
        elif separator and name.startswith((b"V100CTL_", b"CUDA_", b"OMP_")):
            environment[text(name)] = text(value[:4096])
    # The name in parentheses may hold blanks and parentheses itself.
    fields = read_text(os.path.join(folder, "stat")).rpartition(")")[2].split()
    boot = re.search(r"^btime ([0-9]+)$", read_text(os.path.join(proc, "stat"), "", limit_bytes=4 << 20), re.M)
    started_s = (int(boot.group(1)) if boot else 0) + int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return {
        "pid": pid,
        "unit": unit,
        "executable": executable[:-10] if deleted else executable,
        "executable_deleted": deleted,
        # Each argument ends with a NUL; an empty one is an argument too.
        "argv": [text(argument) for argument in argv.split(b"\0")[:-1]],
        "environ": environment,
        "keys_current": keys_current,
        "user": names.user(int(status_field(status, "Uid").split()[1])),
        "started_s": started_s,
        "nofile_soft": limits["Max open files"][0],
        "memlock_soft_bytes": limits["Max locked memory"][0],
        "cpus_allowed": status_field(status, "Cpus_allowed_list"),
        "cgroup_unit": unit_of(read_text(os.path.join(folder, "cgroup"), "")),
        "memory_policy": memory_policy(os.path.join(folder, "numa_maps")),
        "rss_anonymous_bytes": _kilobytes(status_field(status, "RssAnon")),
        "swap_bytes": _kilobytes(status_field(status, "VmSwap")),
        "deleted_libraries": deleted_libraries(read_text(os.path.join(folder, "maps"), "", limit_bytes=4 << 20)),
    }


def keys_of(instance: str, folder: str = INSTANCES_DIR) -> bytes:
    """The file of an instance's keys; empty where it has none, or only its owner may read it."""
    if not INSTANCE_NAME.fullmatch(instance):
        return b""
    try:
        return read_file(os.path.join(folder, f"{instance}.keys"), 1 << 20, follow=False)
    except (OSError, ProbeFailure):
        return b""


def has_keys_of(unit: str, digest: str) -> "bool | None":
    """Whether a process that was started with the keys of ``digest`` has those that its file holds now."""
    keys = keys_of(unit[len("v100-") : -len(".service")])
    return hashlib.sha256(keys).hexdigest() == digest if keys else None


def parse_tcp(content: str) -> "list[tuple[str, int, int]]":
    """Listening sockets of ``/proc/net/tcp`` or ``tcp6``: address, port, inode."""
    found = []
    for line in content.splitlines()[1:]:
        fields = line.split()
        if len(fields) < 10 or fields[3] != "0A":
            continue
        raw, _, port = fields[1].partition(":")
        if len(raw) not in (8, 32):
            continue
        # The kernel prints 32-bit words in the machine's own byte order.
        words = struct.pack(f"={len(raw) // 8}I", *(int(raw[at : at + 8], 16) for at in range(0, len(raw), 8)))
        address = socket.inet_ntop(socket.AF_INET if len(words) == 4 else socket.AF_INET6, words)
        found.append((address, int(port, 16), int(fields[9])))
    return found


def process_ids(proc: str = "/proc") -> "Iterator[int]":
    """All processes that can be seen."""
    return (int(name) for name in os.listdir(proc) if name.isdigit())


def socket_owners(inodes: "set[int]", proc: str = "/proc") -> "dict[int, int]":
    """Who holds a socket: inode -> process. Stops as soon as all are found, and after a bounded amount of looking."""
    wanted = {f"socket:[{inode}]": inode for inode in inodes}
    owners = {}  # type: dict[int, int]
    looked = 0
    for pid in process_ids(proc):
        if not wanted or looked > MAX_PROC_LINKS:
            break
        folder = os.path.join(proc, str(pid), "fd")
        try:
            descriptors = os.listdir(folder)
        except OSError:
            continue
        looked += len(descriptors)
        for descriptor in descriptors:
            try:
                target = os.readlink(folder + "/" + descriptor)
            except OSError:
                continue
            inode = wanted.pop(target, None) if target.startswith("socket:") else None
            if inode is not None:
                owners[inode] = pid
    return owners


def unit_of(cgroup: str) -> str:
    """The service that ``/proc/PID/cgroup`` shows, in the unified hierarchy or in systemd's own."""
    for line in cgroup.splitlines():
        hierarchy, _, path = line.partition("::")
        if not path:
            hierarchy, _, path = line.partition(":name=systemd:")
        if path and hierarchy.isdigit():
            services = [part for part in path.split("/") if part.endswith(".service")]
            if services:
                return services[-1]
    return ""


def collect_listeners(proc: str = "/proc") -> "list[Document]":
    """All listening TCP sockets with their owner where ``/proc`` shows it."""
    sockets = []
    for name in ("tcp", "tcp6"):
        sockets += parse_tcp(read_text(os.path.join(proc, "net", name), "", limit_bytes=32 << 20))
    sockets = sockets[:MAX_LISTENERS]
    owners = socket_owners({inode for _, _, inode in sockets}, proc)
    listeners = []
    for address, port, inode in sorted(sockets):
        pid = owners.get(inode)
        listeners.append(
            {
                "address": address,
                "port": port,
                "pid": pid,
                "command": command_name(pid, proc) if pid else "",
                "unit": unit_of(read_text(os.path.join(proc, str(pid), "cgroup"), "")) if pid else "",
            }
        )
    return listeners


def name_listeners(listeners: "list[Document]", proc: str = "/proc") -> "list[Document]":
    """The same listeners with what their owners run; apart, because reading that may hang where finding them does not."""
    return [dict(entry, command=command_of(entry["pid"], proc)) if entry["pid"] else entry for entry in listeners]


# --- firewall -----------------------------------------------------------------------------------------------------------------


def port_spans(ports: str) -> "list[tuple[int, int]]":
    """First and last of each span in ufw's (``80,8000:8010``, ``any``) or firewalld's words (``8000-8010``)."""
    if ports == "any":
        return [(0, 65535)]
    spans = []
    for part in ports.split(","):
        found = re.fullmatch(r"([0-9]{1,5})(?:[:-]([0-9]{1,5}))?", part)
        if found:
            spans.append((int(found[1]), int(found[2] or found[1])))
    return spans


def parse_ufw_rules(content: str) -> "list[Document]":
    """What ``/etc/ufw/user.rules`` says of TCP from anywhere to any address of the host, in its order: the first match counts."""
    rules = []
    for line in re.findall(r"^### tuple ### (.*)$", content, re.M):
        fields = line.partition(" comment=")[0].split()
        # Of one network interface or one network nobody knows whether clients come through it.
        if len(fields) not in (7, 9) or fields[-1] != "in" or fields[1] not in ("tcp", "any"):
            continue
        action, _, port, to_address, _, from_address = fields[:6]
        if to_address == "0.0.0.0/0" and from_address == "0.0.0.0/0" and action in ("allow", "limit", "deny", "reject"):
            for first, last in port_spans(port):
                rules.append({"allows": action in ("allow", "limit"), "first_port": first, "last_port": last})
    return rules[:MAX_FIREWALL_RULES]


def shell_value(content: str, name: str) -> str:
    """The value of ``NAME=VALUE`` or ``NAME="VALUE"`` in a file of settings."""
    found = re.search("^" + name + r"\s*=\s*[\"']?([^\"'\n#]*)", content, re.M)
    return found[1].strip() if found else ""


def collect_ufw(root: str = "/") -> "Document | None":
    """ufw, where it is enabled: by its files, which its own program reads too."""
    if shell_value(read_text(os.path.join(root, "etc/ufw/ufw.conf"), ""), "ENABLED").lower() != "yes":
        return None
    defaults = read_text(os.path.join(root, "etc/default/ufw"), "")
    rules = parse_ufw_rules(read_text(os.path.join(root, "etc/ufw/user.rules"), "", limit_bytes=4 << 20))
    return {
        "kind": "ufw",
        "zone": "",
        "lets_in": shell_value(defaults, "DEFAULT_INPUT_POLICY").upper() == "ACCEPT",
        "rules": rules,
        "permanent": rules,
    }


def parse_firewalld_zone(output: str) -> "Document":
    """What ``firewall-cmd --list-all`` prints of the default zone: its name, its target and its ports."""
    head = re.search(r"^(\S+)", output)
    target = re.search(r"^\s+target: (\S+)", output, re.M)
    ports = re.search(r"^\s+ports: ?(.*)$", output, re.M)
    rules = [
        {"allows": True, "first_port": first, "last_port": last}
        for word in (ports[1].split() if ports else [])
        if word.endswith("/tcp")
        for first, last in port_spans(word[: -len("/tcp")])
    ]
    return {
        "zone": head[1] if head else "",
        "lets_in": target is not None and target[1] == "ACCEPT",
        "rules": rules[:MAX_FIREWALL_RULES],
    }


def collect_firewalld(root: str = "/") -> "Document | None":
    """firewalld, where it runs: the default zone as it is now, and as it will be after a restart."""
    if not os.path.exists(os.path.join(root, "run/firewalld.pid")) and not os.path.isdir(os.path.join(root, "run/firewalld")):
        return None
    try:
        shown = parse_firewalld_zone(run_command(["firewall-cmd", "--list-all"], 4.0))
    except (ProbeFailure, OSError):
        # What its package leaves behind does not run.
        return None
    content = ""
    if re.fullmatch(r"[A-Za-z0-9_-]+", shown["zone"]):
        for folder in ("usr/lib/firewalld/zones", "etc/firewalld/zones"):
            content = read_text(os.path.join(root, folder, shown["zone"] + ".xml"), "") or content
    permanent = []
    for tag in re.findall(r"<port\s[^>]*>", content):
        number = re.search(r"\bport=[\"']([0-9-]+)[\"']", tag)
        if number and re.search(r"\bprotocol=[\"']tcp[\"']", tag):
            for first, last in port_spans(number[1]):
                permanent.append({"allows": True, "first_port": first, "last_port": last})
    return dict(shown, kind="firewalld", permanent=permanent[:MAX_FIREWALL_RULES])


def collect_firewall() -> "Document | None":
    """The firewall that is active, of those that this toolkit can open a port of."""
    return collect_firewalld() or collect_ufw()


# --- servers of others --------------------------------------------------------------------------------------------------------


def is_secret(name: str) -> bool:
    """Whether a flag or a variable of this name holds a secret."""
    name = name.lstrip("-").replace("_", "-")
    return bool(SECRET_NAME.search(name)) and not re.search(r"\b(?:max|num|batched)\b", name, re.I)


def without_secrets(argv: "list[str]") -> "list[str]":
    """A command line with each secret replaced: nothing else of it may leave the host.

    Replaced are what follows a flag that is called like a secret (and every word up to the next flag: some take several), values
    of assignments of such names, the code of an interpreter's ``-c``, and what looks like a token.
    """
    words = []  # type: list[str]
    hiding = False
    code = bool(argv) and bool(INTERPRETER.fullmatch(os.path.basename(argv[0])))
    for position, word in enumerate(argv):
        name, separator, _ = word.partition("=")
        # What directly follows its flag is the key, whatever it looks like.
        if hiding and not (word.startswith("-") and words[-1] == HIDDEN):
            words.append(HIDDEN)
        elif separator and is_secret(name) and (name.startswith("-") or re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name)):
            words.append(name + "=" + HIDDEN)
            hiding = False
        elif code and position and argv[position - 1] in ("-c", "-e"):
            words.append(HIDDEN)
        else:
            words.append(SECRET_TEXT.sub(HIDDEN, word))
            hiding = position > 0 and word.startswith("-") and is_secret(word)
        if position and not word.startswith("-"):
            code = False
    return [text(word)[:1000] for word in words]


def own_group(cgroup: str, around: str) -> str:
    """The control group of a process that says most of who started it, without what this host itself lies in (``around``)."""
    for content_of in (r"0::(.*)", r"[0-9]+:name=systemd:(.*)"):
        found = re.search("^" + content_of + "$", cgroup, re.M)
        if found and found[1] != "/":
            outside = re.search("^" + content_of + "$", around, re.M)
            prefix = re.sub(r"/(?:init\.scope)?$", "", outside[1]) if outside else ""
            return found[1][len(prefix) :] if (found[1] + "/").startswith(prefix + "/") else found[1]
    return ""


def parse_stat(content: str) -> "tuple[int, int]":
    """The parent of a process and its start in clock ticks since boot, from ``/proc/PID/stat``."""
    # The name in parentheses may hold blanks and parentheses itself.
    fields = content.rpartition(")")[2].split()
    return int(fields[1]), int(fields[19])


def ancestors(pid: int, proc: str = "/proc") -> "list[Document]":
    """Who started a process, nearest first, without PID 1."""
    found = []  # type: list[Document]
    while pid > 1 and len(found) < MAX_ANCESTORS:
        try:
            pid = parse_stat(read_text(os.path.join(proc, str(pid), "stat")))[0]
        except (OSError, ProbeFailure, ValueError, IndexError):
            break
        if pid > 1:
            found.append({"pid": pid, "name": command_name(pid, proc)})
    return found


def ask_docker(path: str, socket_path: str = DOCKER_SOCKET, limit_s: float = 2.0) -> "Any":
    """One answer of Docker's engine; ``None`` where there is none to ask."""
    client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    client.settimeout(limit_s)
    answer = b""
    try:
        client.connect(socket_path)
        client.sendall(b"GET " + path.encode("ascii") + b" HTTP/1.0\r\nHost: docker\r\n\r\n")
        while len(answer) < MAX_DOCKER_BYTES:
            part = client.recv(1 << 16)
            if not part:
                break
            answer += part
    except OSError:
        return None
    finally:
        client.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    if not re.match(rb"HTTP/1\.[01] 200 ", head):
        return None
    try:
        return json.loads(body.decode("utf-8", "replace"))
    except ValueError:
        return None


def docker_container(identifier: str, port: int, socket_path: str = DOCKER_SOCKET) -> "Document | None":
    """What Docker says of a container, known by its id or by the port of the host that it publishes."""
    listed = ask_docker("/containers/json", socket_path)
    for entry in listed if isinstance(listed, list) else []:
        ports = entry.get("Ports") or []
        if entry.get("Id") == identifier or (
            not identifier and port and any(item.get("PublicPort") == port and item.get("Type") == "tcp" for item in ports)
        ):
            shown = ask_docker("/containers/{}/json".format(entry["Id"]), socket_path)
            shown = shown if isinstance(shown, dict) else {}
            policy = ((shown.get("HostConfig") or {}).get("RestartPolicy") or {}).get("Name") or ""
            argv = [str(word) for word in (shown.get("Path") or "", *(shown.get("Args") or [])) if word]
            return {
                "runtime": "docker",
                "id": text(str(entry["Id"]))[:64],
                "name": text(str((entry.get("Names") or [""])[0]).lstrip("/"))[:200],
                "image": text(str(entry.get("Image") or ""))[:300],
                "restarts": policy in ("always", "unless-stopped", "on-failure"),
                "argv": without_secrets(argv),
            }
    return None


def container_of(group: str, command: str, port: int) -> "Document | None":
    """The container that a process is in, or that it forwards a port to."""
    found = CONTAINER_GROUP.search(group)
    runtime, identifier = (found[1], found[2]) if found else ("docker", "")
    if not found and command != "docker-proxy":
        return None
    if runtime == "docker":
        known = docker_container(identifier, port)
        if known is not None:
            return known
    names = {"libpod": "podman", "crio": "kubernetes", "cri-containerd": "kubernetes"}
    return {"runtime": names.get(runtime, runtime), "id": identifier, "name": "", "image": "", "restarts": False, "argv": []}


def show_unit(unit: str) -> "dict[str, str]":
    """What systemd says of a unit of others."""
    properties = "Id,LoadState,ActiveState,UnitFileState,FragmentPath,MainPID,Transient"
    try:
        shown = parse_show(run_command(["systemctl", "show", "--property=" + properties, "--", unit], 3.0))
    except (ProbeFailure, OSError):
        return {}
    return shown[0] if shown else {}


def collect_occupant(pid: int, ports: "list[int]", names: Names, salt: str, proc: str = "/proc") -> "Document":
    """A process of somebody else that is where an instance shall be, as ``Occupant``."""
    folder = os.path.join(proc, str(pid))
    argv = read_file(os.path.join(folder, "cmdline"), 1 << 17)
    group = own_group(read_text(os.path.join(folder, "cgroup"), ""), read_text(os.path.join(proc, "1", "cgroup"), ""))
    user_manager = re.search(r"/user@([0-9]+)\.service/(?:.*/)?([^/]+\.service)$", group)
    login = re.search(r"/(session-[^/]+\.scope)$", group)
    unit = "" if login else (user_manager[2] if user_manager else unit_of("0::" + group))
    shown = show_unit(unit) if unit and not user_manager else {}
    environment = {}
    for entry in read_file(os.path.join(folder, "environ"), 1 << 20).split(b"\0"):
        name, separator, value = entry.partition(b"=")
        if separator and name.startswith(SERVER_VARIABLES):
            key = text(name)[:100]
            environment[key] = HIDDEN if is_secret(key) else SECRET_TEXT.sub(HIDDEN, text(value[:1000]))
    parents = ancestors(pid, proc)
    main_pid = _number(shown.get("MainPID", ""))
    try:
        working_directory = text(os.readlink(os.path.join(folder, "cwd")))
    except OSError:
        working_directory = ""
    return {
        "pid": pid,
        "start_ticks": parse_stat(read_text(os.path.join(folder, "stat")))[1],
        "command_digest": keyed_digest(salt, argv),
        "argv": without_secrets([text(argument) for argument in argv.split(b"\0")[:-1]]),
        "environ": environment,
        "user": names.user(int(status_field(read_text(os.path.join(folder, "status")), "Uid").split()[1])),
        "working_directory": working_directory,
        "ports": sorted(set(ports)),
        "unit": unit,
        "unit_user": names.user(int(user_manager[1])) if user_manager else "",
        "unit_file_state": shown.get("UnitFileState", ""),
        "unit_path": shown.get("FragmentPath", ""),
        "is_main": main_pid > 0 and main_pid in [pid] + [parent["pid"] for parent in parents],
        "session": login[1] if login else "",
        "ancestors": [text(parent["name"]) for parent in parents],
        "container": container_of(group, command_name(pid, proc), ports[0] if ports else 0),
    }


def is_ours(unit: str) -> bool:
    """Whether a unit is of this toolkit."""
    return unit.startswith(("v100-", "v100ctl-"))


def collect_occupants(facts: "Document", request: "Document", proc: str = "/proc") -> "list[Document]":
    """Who is not ours and listens on a port that was asked about, or computes on a card."""
    ports = {}  # type: dict[int, list[int]]
    for listener in facts.get("listeners", []):
        if listener["pid"] and listener["port"] in request["ports"] and not is_ours(listener["unit"]):
            ports.setdefault(listener["pid"], []).append(listener["port"])
    for gpu in facts.get("gpus", []):
        for process in gpu.get("processes", []):
            if not is_ours(process["unit"]):
                ports.setdefault(process["pid"], [])
    names = Names()
    found = []
    for pid in sorted(ports)[:MAX_OCCUPANTS]:
        try:
            found.append(collect_occupant(pid, ports[pid], names, facts["secret_salt"], proc))
        except (OSError, ProbeFailure, ValueError, IndexError) as error:
            # In a container `nvidia-smi` tells the host's numbers; others have just ended.
            if os.path.isdir(os.path.join(proc, str(pid))):
                note_error(facts, "occupants." + str(pid), str(error))
    return found


# --- gateway ------------------------------------------------------------------------------------------------------------------


def ask_gateway(command: str, path: str = GATEWAY_SOCKET, limit_s: float = 2.0) -> str:
    """One question to HAProxy's runtime API, and its answer, cut to a megabyte."""
    answer = b""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as channel:
        channel.settimeout(limit_s)
        channel.connect(path)
        channel.sendall(command.encode() + b"\n")
        while len(answer) < 1024 * 1024:
            block = channel.recv(65536)
            if not block:
                break
            answer += block
    return answer.decode("utf-8", "replace")


def gateway_facts(info: str, statistics: str) -> "Document":
    """Which configuration the gateway has loaded, and how it sees each server."""
    loaded = re.search(r"^description: v100ctl ([0-9a-f]{1,64})\s*$", info, re.MULTILINE)
    servers = {}
    rows = statistics.lstrip("# ").splitlines()
    columns = rows[0].split(",") if rows else []
    for row in rows[1:]:
        fields = dict(zip(columns, row.split(",")))
        name, server = fields.get("pxname", ""), fields.get("svname", "")
        if name.startswith("engine-") and server not in ("FRONTEND", "BACKEND"):
            running = fields.get("scur", "")
            # The gateway of a fleet has the hosts there, by name.
            servers[text(name[len("engine-") :] + ("" if server == "engine" else f"@{server}"))] = {
                "status": text(fields.get("status", "")),
                "requests_running": int(running) if running.isdigit() else 0,
            }
    return {"digest": loaded.group(1) if loaded else "", "servers": servers}


def map_lines(content: str, skip: str = "") -> "set[str]":
    """The entries of a map of keys, of its file or as HAProxy tells what it has loaded (``skip``: what stands before each)."""
    lines = [re.sub(skip, "", line) for line in content.splitlines()] if skip else content.splitlines()
    return {line for line in lines if line.strip() and not line.startswith("#")}


def gateway_keys_current(folder: str = GATEWAY_KEYS_DIR, path: str = GATEWAY_SOCKET) -> bool:
    """Whether the gateway has loaded the keys that its files hold."""
    listed = ask_gateway("show map", path)
    loaded = set(re.findall(rf"\(({re.escape(folder)}/[a-z0-9-]+\.keys)\)", listed))
    names = {os.path.join(folder, name) for name in _listdir(folder) if name.endswith(".keys")}
    return loaded == names and all(
        map_lines(ask_gateway(f"show map {name}", path), r"^0x[0-9a-f]+ ") == map_lines(read_text(name)) for name in sorted(names)
    )


def collect_gateway() -> "Document | None":
    """The gateway that runs; ``None`` where there is none, or only its owner may ask it."""
    if not os.access(GATEWAY_SOCKET, os.W_OK):
        return None
    found = gateway_facts(ask_gateway("show info"), ask_gateway("show stat"))
    found["keys_current"] = gateway_keys_current()
    return found


# --- health -------------------------------------------------------------------------------------------------------------------


def ask_health(url: str, limit_s: float = 3.0, key: str = "") -> "Document":
    """The HTTP status of one GET, or the reason why there is none. ``key``: what opens the server, where it asks for one."""
    match = re.fullmatch(r"http://(\[[0-9A-Fa-f:.]+\]|[0-9.]+|localhost)(?::([0-9]{1,5}))?(/[!-~]*)?", url)
    if not match:
        return {"status": None, "error": f"cannot ask {text(url[:200])}"}
    host = match.group(1).strip("[]")
    address = "127.0.0.1" if host == "localhost" else host
    deadline_s = time.monotonic() + limit_s
    head = b""
    try:
        with socket.create_connection((address, int(match.group(2) or 80)), timeout=limit_s) as connection:
            shown = f"Authorization: Bearer {key}\r\n" if re.fullmatch(r"[!-~]+", key) else ""
            head_lines = f"Host: {match.group(1)}\r\n{shown}Connection: close\r\n\r\n"
            connection.sendall("GET {} HTTP/1.0\r\n{}".format(match.group(3) or "/", head_lines).encode("ascii"))
            # The time limit is for the whole answer: a server that drips bytes must not stretch it.
            while b"\n" not in head and len(head) < 4096:
                wait_s = deadline_s - time.monotonic()
                if wait_s <= 0:
                    raise socket.timeout
                connection.settimeout(wait_s)
                chunk = connection.recv(1024)
                if not chunk:
                    break
                head += chunk
    except socket.timeout:
        return {"status": None, "error": f"no answer within {limit_s:g} s"}
    except (OSError, OverflowError) as error:
        return {"status": None, "error": getattr(error, "strerror", None) or str(error)}
    line = re.match(rb"HTTP/1\.[01] ([1-5][0-9]{2})\b", head)
    if not line:
        return {"status": None, "error": "no HTTP answer: {}".format(text(head[:60].split(b"\r")[0]))}
    return {"status": int(line.group(1)), "error": ""}


def collect_health(urls: "dict[str, str]", limit_s: float = 3.0) -> "dict[str, Document]":
    """All health paths at once."""
    answers = {}  # type: dict[str, Document]

    def ask(name: str, url: str) -> None:
        key = text(keys_of(name).split(b"\n")[0])
        answers[name] = ask_health(url, limit_s, key)

    threads = [threading.Thread(target=ask, args=item, daemon=True) for item in sorted(urls.items())[:64]]
    for thread in threads:
        thread.start()
    deadline_s = time.monotonic() + limit_s + 0.5
    for thread in threads:
        thread.join(max(0.0, deadline_s - time.monotonic()))
    return {name: answers.get(name, {"status": None, "error": f"no answer within {limit_s:g} s"}) for name in urls}


# --- identity -----------------------------------------------------------------------------------------------------------------


def ask_models(url: str, key: str = "", limit_s: float = 3.0) -> "tuple[int | None, list[str]]":
    """HTTP status of one GET of the models that a server has, and their names."""
    match = re.fullmatch(r"http://(\[[0-9A-Fa-f:.]+\]|[0-9.]+):([0-9]{1,5})(/[!-~]*)", url)
    if not match:
        return None, []
    deadline_s = time.monotonic() + limit_s
    answer = b""
    try:
        with socket.create_connection((match.group(1).strip("[]"), int(match.group(2))), timeout=limit_s) as connection:
            lines = [f"GET {match.group(3)} HTTP/1.0", "Host: " + match.group(1), "Connection: close"]
            if key:
                lines.append("Authorization: Bearer " + key)
            connection.sendall("\r\n".join([*lines, "", ""]).encode("latin-1"))
            while len(answer) < MAX_CONTENT_BYTES:
                wait_s = deadline_s - time.monotonic()
                if wait_s <= 0:
                    break
                connection.settimeout(wait_s)
                chunk = connection.recv(1 << 16)
                if not chunk:
                    break
                answer += chunk
    except (OSError, OverflowError, ValueError):
        pass
    line = re.match(rb"HTTP/1\.[01] ([1-5][0-9]{2})\b", answer)
    if not line:
        return None, []
    try:
        document = json.loads(answer.partition(b"\r\n\r\n")[2].decode("utf-8"))
        entries = document["data"] if isinstance(document, dict) else []
        names = [str(entry["id"])[:200] for entry in entries if isinstance(entry, dict) and "id" in entry]
    except (ValueError, KeyError, TypeError, RecursionError):
        names = []
    return int(line.group(1)), [text(name) for name in names][:MAX_MODEL_NAMES]


def ask_identity(name: str, url: str, keys_file: str = KEYS_FILE) -> "Document":
    """Which models an instance has, and whether it says so to those who have no key. A key is used here and never told."""
    status, models = ask_models(url)
    entry = {"status": status, "models": models}  # type: Document
    if status in (401, 403) and re.fullmatch(r"[a-z0-9][a-z0-9-]*", name):
        try:
            key = text(read_file(keys_file.format(name), 1 << 16, follow=False)).partition("\n")[0].strip()
        except (OSError, ProbeFailure):
            key = ""
        if key and not re.search(r"[^!-~]", key):
            entry["status_with_key"], entry["models"] = ask_models(url, key)
    return entry


def collect_identity(urls: "dict[str, str]", limit_s: float = 3.0) -> "dict[str, Document]":
    """All instances at once; one that does not answer in time has no entry."""
    answers = {}  # type: dict[str, Document]

    def ask(name: str, url: str) -> None:
        answers[name] = ask_identity(name, url)

    threads = [threading.Thread(target=ask, args=item, daemon=True) for item in sorted(urls.items())[:64]]
    for thread in threads:
        thread.start()
    deadline_s = time.monotonic() + limit_s + 0.5
    for thread in threads:
        thread.join(max(0.0, deadline_s - time.monotonic()))
    return {name: answers[name] for name in urls if name in answers}


# --- kernel and firmware ------------------------------------------------------------------------------------------------------


def by_version(names: "set[str]") -> "list[str]":
    """Kernel releases, oldest first: numbers are compared as numbers."""
    return sorted(
        names,
        key=lambda name: [(len(part), part) if part.isdigit() else (0, part) for part in re.findall(r"[0-9]+|[^0-9]+", name)],
    )


def collect_kernel_headers(modules: str = "/lib/modules") -> "list[str]":
    """Kernel releases that modules can be built for. A link to headers that were removed leads nowhere and does not count."""
    found = {name for name in _listdir(modules) if os.path.isfile(os.path.join(modules, name, "build", "Makefile"))}
    return [text(name) for name in by_version(found)[-MAX_KERNELS:]]


def collect_kernels_installed(boot: str = "/boot", modules: str = "/lib/modules") -> "list[str]":
    """Kernel releases that can be booted: Debian's images lie in ``/boot``, some others' beside the modules too."""
    found = {name[len("vmlinuz-") :] for name in _listdir(boot) if name.startswith("vmlinuz-") and "rescue" not in name}
    found |= {name for name in _listdir(modules) if os.path.isfile(os.path.join(modules, name, "vmlinuz"))}
    return [text(name) for name in by_version(found)[-MAX_KERNELS:]]


def collect_selinux(enforce: str = "/sys/fs/selinux/enforce") -> str:
    """``enforcing`` or ``permissive``; empty where the kernel runs without SELinux."""
    return {"1": "enforcing", "0": "permissive"}.get(read_text(enforce, ""), "")


def collect_secure_boot(firmware: str = "/sys/firmware/efi") -> "bool | None":
    """Whether Secure Boot is on; ``None`` without EFI or where its variables are not to be seen (a container).

    Raises:
        ProbeFailure: the variable holds something else.
    """
    names = _listdir(os.path.join(firmware, "efivars"))
    if not names:
        return None
    if SECURE_BOOT_VARIABLE not in names:
        # Firmware that knows no Secure Boot.
        return False
    # Four bytes of attributes, then the value.
    raw = read_file(os.path.join(firmware, "efivars", SECURE_BOOT_VARIABLE), 16)
    if len(raw) != 5 or raw[4] > 1:
        raise ProbeFailure(f"{SECURE_BOOT_VARIABLE} holds {raw.hex() or 'nothing'}")
    return raw[4] == 1


def loaded_modules(root: str = "/") -> "set[str]":
    """Names of all loaded kernel modules, and of the watched ones that are built into the kernel, which only ``/sys`` shows."""
    content = read_text(os.path.join(root, "proc/modules"), "", limit_bytes=4 << 20)
    listed = {line.partition(" ")[0] for line in content.splitlines()}
    return listed | {name for name in WATCHED_MODULES if os.path.isdir(os.path.join(root, "sys/module", name))}


def blacklists_nouveau(content: str) -> bool:
    """Whether a ``modprobe.d`` file keeps nouveau from loading, or from taking a card."""
    return bool(
        re.search(
            r"^[ \t]*(?:blacklist[ \t]+nouveau|alias[ \t]+nouveau[ \t]+off|install[ \t]+nouveau[ \t]+(?:/usr)?/bin/(?:true|false)"
            r"|options[ \t]+nouveau\b.*\bmodeset=0)[ \t]*(?:#.*)?$",
            content,
            re.M,
        )
    )


def boot_blacklists_nouveau(command_line: str) -> bool:
    """Whether the kernel's command line does the same."""
    for word in command_line.split():
        name, _, value = word.partition("=")
        if name in ("modprobe.blacklist", "module_blacklist", "rd.driver.blacklist") and "nouveau" in value.split(","):
            return True
        if (name, value) in (("nouveau.modeset", "0"), ("nouveau.blacklist", "1")):
            return True
    return False


def collect_nouveau(root: str = "/") -> "Document":
    """The kernel's own driver for NVIDIA cards."""
    blacklisted = boot_blacklists_nouveau(read_text(os.path.join(root, "proc/cmdline"), ""))
    for folder in MODPROBE_DIRS:
        for name in sorted(_listdir(os.path.join(root, folder)))[:MAX_FILES]:
            if blacklisted:
                break
            if name.endswith(".conf"):
                blacklisted = blacklists_nouveau(read_text(os.path.join(root, folder, name), ""))
    return {"loaded": "nouveau" in loaded_modules(root), "blacklisted": blacklisted}


# --- compilers and toolkits ---------------------------------------------------------------------------------------------------


def upstream_version(version: str) -> str:
    """The upstream part of a package's version: ``4:13.2.0-7ubuntu1`` is ``13.2.0``."""
    return re.sub(r"-[^-]*$", "", version.partition(":")[2] or version)


def installed_packages(facts: "Document") -> "dict[str, str]":
    """What the package manager has, as far as that is known by now."""
    installed = facts.get("packages", {}).get("installed", {})
    return installed if isinstance(installed, dict) else {}


def compiler_version(path: str, installed: "dict[str, str]", limit_s: float) -> str:
    """The full version of a gcc: its package's, else what it says itself; empty if neither is known.

    Debian's ``gcc`` leads to ``x86_64-linux-gnu-gcc-12``, which the package ``gcc-12`` brings.
    """
    real = os.path.realpath(path)
    found = re.fullmatch(r"/usr/bin/(?:[a-z0-9_]+-[a-z0-9_-]+-)?((?:gcc|g\+\+)(?:-[0-9]{1,2})?)", real)
    package = found.group(1) if found else ""
    # Its name on systems with rpm.
    version = upstream_version(installed.get(package, "") or installed.get(package.replace("g++", "gcc-c++"), ""))
    if re.fullmatch(r"[0-9]+(?:\.[0-9]+){2}", version):
        return version
    if limit_s <= 0:
        return ""
    try:
        told = run_command([path, "-dumpfullversion", "-dumpversion"], limit_s).strip()
    except (ProbeFailure, OSError):
        return ""
    return told if re.fullmatch(r"[0-9]+(?:\.[0-9]+){0,3}", told) else ""


def collect_compilers(facts: "Document", folders: "tuple[str, ...]" = ("/usr/local/bin", "/usr/bin")) -> "dict[str, str]":
    """The gcc compilers that a build would find by name, with their versions. One whose version is not known is left out."""
    deadline_s = time.monotonic() + COMPILERS_LIMIT_S
    installed = installed_packages(facts)
    compilers = {}  # type: dict[str, str]
    for folder in folders:
        for name in sorted(_listdir(folder)):
            path = os.path.join(folder, name)
            if name in compilers or not COMPILER.fullmatch(name) or not os.access(path, os.X_OK):
                continue
            version = compiler_version(path, installed, min(1.0, deadline_s - time.monotonic()))
            if version:
                compilers[name] = version
            else:
                note_error(facts, f"compilers.{name}", f"{path} does not tell its version")
    return compilers


def cuda_release(folder: str, include: str) -> str:
    """A toolkit's release (``11.8``) from the files that say so, by age: ``version.json``, ``version.txt``, ``cuda.h``."""
    try:
        stated = read_json(os.path.join(folder, "version.json")).get("cuda")
        version = str(stated.get("version", "")) if isinstance(stated, dict) else ""
    except (OSError, ProbeFailure):
        version = ""
    found = re.match(r"[0-9]+\.[0-9]+", version)
    if not found:
        found = re.search(r"(?<=CUDA Version )[0-9]+\.[0-9]+", read_text(os.path.join(folder, "version.txt"), ""))
    if found:
        return found.group()
    header = read_text(os.path.join(include, "cuda.h"), "", limit_bytes=256 << 10)
    number = re.search(r"^[ \t]*#[ \t]*define[ \t]+CUDA_VERSION[ \t]+([0-9]{4,6})\b", header, re.M)
    return f"{int(number.group(1)) // 1000}.{int(number.group(1)) % 1000 // 10}" if number else ""


def collect_cuda_toolkits(facts: "Document", root: str = "/") -> "list[Document]":
    """CUDA toolkits: NVIDIA's below ``/usr/local``, and the distribution's own. Links to one are not counted again."""
    local = os.path.join(root, "usr/local")
    folders = dict.fromkeys(
        os.path.realpath(os.path.join(local, name))
        for name in sorted(_listdir(local))
        if re.fullmatch(r"cuda(?:-[0-9]+(?:\.[0-9]+)*)?", name)
    )
    toolkits = []  # type: list[Document]
    for folder in list(folders)[:MAX_TOOLKITS]:
        if not os.path.isdir(folder):
            continue
        named = re.search(r"/cuda-([0-9]+\.[0-9]+)", folder)
        version = cuda_release(folder, os.path.join(folder, "include")) or (named.group(1) if named else "")
        nvcc = os.access(os.path.join(folder, "bin/nvcc"), os.X_OK)
        toolkits.append({"path": text(folder), "version": version, "nvcc": nvcc})
    own = os.path.join(root, "usr/lib/nvidia-cuda-toolkit")
    include = os.path.join(root, "usr/include")
    if os.path.isdir(own) or os.path.isfile(os.path.join(include, "cuda.h")):
        package = installed_packages(facts).get("nvidia-cuda-toolkit", "")
        packaged = re.match(r"[0-9]+\.[0-9]+", package)
        version = cuda_release(own, include) or (packaged.group() if packaged else "")
        nvcc = os.access(os.path.join(own, "bin/nvcc"), os.X_OK)
        toolkits.append({"path": text(own), "version": version, "nvcc": nvcc})
    return toolkits


def collect_cmake_version(facts: "Document") -> str:
    """The version of the ``cmake`` that a build would find: its package's, else what it says itself; empty if there is none."""
    program = find_program("cmake")
    if program is None:
        return ""
    packaged = upstream_version(installed_packages(facts).get("cmake", "")) if program == "/usr/bin/cmake" else ""
    if not packaged:
        packaged = run_command([program, "--version"], 2.0)
    found = re.search(r"[0-9]+\.[0-9]+(?:\.[0-9]+)?", packaged)
    return found.group() if found else ""


# --- GPUs ---------------------------------------------------------------------------------------------------------------------


def link_speed(content: str) -> "float | None":
    """``8.0 GT/s PCIe`` as 8.0; the kernel says ``Unknown`` of a card that does not answer."""
    found = re.match(r"([0-9]{1,3}(?:\.[0-9])?) GT/s", content)
    return float(found.group(1)) if found else None


def link_width(content: str) -> "int | None":
    """A number of lanes, ``None`` where there is no link."""
    return int(content) if re.fullmatch(r"[0-9]{1,3}", content) and 0 < int(content) <= MAX_LINK_WIDTH else None


def bar1_size(content: str) -> "int | None":
    """The size of NVIDIA's BAR1, the window on the card's memory, from the ``resource`` file; 0 if it has no address.

    A line is a PCI base address register (start, end, flags in hexadecimal), and a 64-bit region takes two. BAR1 comes after the
    card's registers. Those are a 32-bit region on Volta, Ampere and GeForce, so that it is the second line and the third one is
    empty; on Hopper they are a 64-bit one, so that it is the third line.
    """
    try:
        bars = [tuple(int(field, 16) for field in line.split()) for line in content.splitlines()[:6]]
    except ValueError:
        return None
    if len(bars) < 3 or any(len(bar) != 3 for bar in bars):
        return None
    start, end, flags = bars[2 if bars[2][2] & IORESOURCE_MEM_64 else 1]
    if not start or not flags & IORESOURCE_MEM or flags & IORESOURCE_UNSET:
        return 0
    return end - start + 1


def off_the_bus(folder: str) -> bool:
    """Whether a device's configuration space reads all ones. One that sleeps is left asleep: reading would wake it."""
    if read_text(os.path.join(folder, "power/runtime_status"), "") in ("suspended", "suspending"):
        return False
    try:
        raw = read_file(os.path.join(folder, "config"), 64)
    except (OSError, ProbeFailure):
        return False
    return len(raw) >= 4 and not raw.strip(b"\xff")


def display_attached(folder: str) -> "bool | None":
    """Whether a monitor is connected, by the connectors that a display driver shows; ``None`` where none does."""
    states = []
    for card in _listdir(os.path.join(folder, "drm")):
        for connector in _listdir(os.path.join(folder, "drm", card)):
            if connector.startswith(card + "-"):
                states.append(read_text(os.path.join(folder, "drm", card, connector, "status"), ""))
    return "connected" in states if states else None


def link_name(path: str) -> str:
    """The last part of where a link leads to, empty if it is none."""
    try:
        return text(os.path.basename(os.readlink(path)))
    except OSError:
        return ""


def nvidia_devices(root: str) -> "Iterator[tuple[str, str, str]]":
    """NVIDIA's devices on the PCI bus, in PCI order: address, folder, class (``0302``)."""
    for address in sorted(_listdir(root))[:MAX_PCI_DEVICES]:
        folder = os.path.join(root, address)
        if read_text(os.path.join(folder, "vendor"), "") == "0x10de":
            yield address, folder, read_text(os.path.join(folder, "class"), "")[2:6]


def collect_gpus(root: str = PCI_DEVICES) -> "list[Document]":
    """NVIDIA display and 3D controllers on the PCI bus, in PCI order, with what the kernel itself knows of each."""
    gpus = []
    for address, folder, kind in nvidia_devices(root):
        if not kind.startswith("03"):
            continue
        numa_node = re.fullmatch(r"[0-9]{1,6}", read_text(os.path.join(folder, "numa_node"), ""))
        iommu_group = link_name(os.path.join(folder, "iommu_group"))
        device, board_vendor, board = (
            read_text(os.path.join(folder, name), "") for name in ("device", "subsystem_vendor", "subsystem_device")
        )
        has_board = board_vendor.startswith("0x") and board.startswith("0x")
        gpus.append(
            {
                "pci_address": text(address),
                "pci_id": "10de:" + device[2:] if device.startswith("0x") else "",
                "kernel_driver": link_name(os.path.join(folder, "driver")),
                "numa_node": int(numa_node.group()) if numa_node else -1,
                "pci_class": kind,
                "subsystem_id": f"{board_vendor[2:]}:{board[2:]}" if has_board else "",
                "bar1_bytes": bar1_size(read_text(os.path.join(folder, "resource"), "")),
                "iommu_group": int(iommu_group) if re.fullmatch(r"[0-9]{1,6}", iommu_group) else None,
                "display_attached": display_attached(folder),
            }
        )
    return gpus


def ask_gpus(gpus: "list[Document]", root: str = PCI_DEVICES) -> "list[Document]":
    """The same cards with what they answer on the bus; apart, because a card that is being reset keeps one waiting."""
    asked = []
    for gpu in gpus:
        folder = os.path.join(root, str(gpu["pci_address"]))
        speed, width, max_speed, max_width = (
            read_text(os.path.join(folder, name), "")
            for name in ("current_link_speed", "current_link_width", "max_link_speed", "max_link_width")
        )
        asked.append(
            dict(
                gpu,
                link_speed_gts=link_speed(speed),
                link_width=link_width(width),
                max_link_speed_gts=link_speed(max_speed),
                max_link_width=link_width(max_width),
                revision_ff=off_the_bus(folder),
            )
        )
    return asked


def parse_driver_version(content: str) -> "Document":
    """``/proc/driver/nvidia/version``: version and flavour of the loaded module."""
    line = next((line for line in content.splitlines() if line.startswith("NVRM version:")), "")
    version = re.search(rf"\b({DRIVER_VERSION.pattern})\b", line)
    if not version:
        return {"module_version": "", "module_flavour": ""}
    return {"module_version": version.group(1), "module_flavour": "open" if "Open Kernel Module" in line else "proprietary"}


def normalize_pci_address(address: str) -> str:
    """``00000000:3B:00.0`` of ``nvidia-smi`` as ``0000:3b:00.0`` of the kernel."""
    match = re.fullmatch(r"([0-9A-Fa-f]+):([0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-9A-Fa-f])", address.strip())
    return f"{int(match.group(1), 16):04x}:{match.group(2).lower()}" if match else address.strip().lower()


def _mebibytes(field: str) -> "int | None":
    return int(field) << 20 if re.fullmatch(r"[0-9]{1,9}", field) else None


def _whole(field: str) -> "int | None":
    return int(field) if re.fullmatch(r"[0-9]{1,9}", field) else None


def _figure(field: str) -> "float | None":
    return float(field) if re.fullmatch(r"[0-9]{1,9}(?:\.[0-9]{1,6})?", field) else None


def _word(field: str) -> str:
    return field.lower() if re.fullmatch(r"[A-Z][A-Za-z_]{1,40}", field) else ""


def _switch(field: str) -> str:
    return field.lower() if field in ("Enabled", "Disabled") else ""


def throttle_reasons(field: str) -> "list[str] | None":
    """Why a card's clocks are lowered, of a bit mask in hexadecimal; ``None`` where it does not say."""
    if not re.fullmatch(r"0x[0-9A-Fa-f]{1,16}", field):
        return None
    mask = int(field, 16)
    return [name for bit, name in SMI_REASONS if mask & bit]


def parse_smi(output: str, fields: "tuple[str, ...]" = SMI_FIELDS) -> "dict[str, Document]":
    """The rows of ``nvidia-smi --query-gpu``, by PCI address. Fields that were not asked for are not known."""
    cards = {}
    for line in output.splitlines():
        values = [value.strip() for value in line.split(",", len(fields) - 1)]
        row = dict(zip(fields, values))
        if len(values) < len(fields) or not re.fullmatch(r"[0-9]{1,4}", row["index"]):
            continue
        capability = row.get("compute_cap", "")
        cards[normalize_pci_address(row["pci.bus_id"])] = {
            "index": int(row["index"]),
            "uuid": row["uuid"] if row["uuid"].startswith(("GPU-", "MIG-")) else "",
            "name": row["name"],
            "memory_total_bytes": _mebibytes(row["memory.total"]),
            "memory_used_bytes": _mebibytes(row["memory.used"]),
            "memory_reserved_bytes": _mebibytes(row.get("memory.reserved", "")),
            "compute_capability": capability if re.fullmatch(r"[0-9]{1,2}\.[0-9]", capability) else "",
            "persistence_mode": _switch(row.get("persistence_mode", "")),
            "ecc_mode": _switch(row.get("ecc.mode.current", "")),
            "power_limit_w": _figure(row.get("power.limit", "")),
            "application_memory_clock_mhz": _whole(row.get("clocks.applications.memory", "")),
            "application_graphics_clock_mhz": _whole(row.get("clocks.applications.graphics", "")),
            "compute_mode": _word(row.get("compute_mode", "")),
            "temperature_c": _whole(row.get("temperature.gpu", "")),
            "memory_temperature_c": _whole(row.get("temperature.memory", "")),
            "power_draw_w": _figure(row.get("power.draw", "")),
            "sm_clock_mhz": _whole(row.get("clocks.current.sm", "")),
            "max_sm_clock_mhz": _whole(row.get("clocks.max.sm", "")),
            "throttle_reasons": throttle_reasons(
                row.get("clocks_event_reasons.active") or row.get("clocks_throttle_reasons.active", "")
            ),
            "ecc_pending_mode": _switch(row.get("ecc.mode.pending", "")),
            "ecc_corrected_volatile": _whole(row.get("ecc.errors.corrected.volatile.total", "")),
            "ecc_uncorrected_volatile": _whole(row.get("ecc.errors.uncorrected.volatile.total", "")),
            "ecc_uncorrected_aggregate": _whole(row.get("ecc.errors.uncorrected.aggregate.total", "")),
            "retired_pages_single_bit": _whole(row.get("retired_pages.single_bit_ecc.count", "")),
            "retired_pages_double_bit": _whole(row.get("retired_pages.double_bit.count", "")),
            "retired_pages_pending": {"Yes": True, "No": False}.get(row.get("retired_pages.pending", "")),
        }
    return cards


def parse_smi_processes(output: str) -> "dict[str, list[Document]]":
    """The rows of ``nvidia-smi --query-compute-apps``, by the card's UUID.

    Of what it calls the process's name only the program is kept: the rest may be a command line.
    """
    processes = {}  # type: dict[str, list[Document]]
    for line in output.splitlines()[:MAX_GPU_PROCESSES]:
        values = [value.strip() for value in line.split(",", len(SMI_PROCESS_FIELDS) - 1)]
        if len(values) < len(SMI_PROCESS_FIELDS) or not re.fullmatch(r"[0-9]{1,10}", values[1]):
            continue
        uuid, pid, used, name = values
        program = name.split(" ")[0]
        processes.setdefault(uuid, []).append(
            {
                "pid": int(pid),
                "command": "" if program.startswith("[") else os.path.basename(program)[:200],
                "unit": "",
                "memory_bytes": _mebibytes(used),
            }
        )
    return processes


def parse_cuda_version(table: str) -> str:
    """The CUDA level in the head of ``nvidia-smi``'s table: ``CUDA Version: 12.2``, lately ``CUDA UMD Version: 13.3``."""
    found = re.search(r"CUDA (?:UMD )?Version:\s*([0-9]+\.[0-9]+)", table)
    return found.group(1) if found else ""


def find_program(name: str) -> "str | None":
    """A program in the usual places."""
    for folder in COMMAND_ENVIRONMENT["PATH"].split(":"):
        path = os.path.join(folder, name)
        if os.path.isfile(path) and os.access(path, os.X_OK):
            return path
    return None


def query_cards(program: str, deadline_s: float, only: "tuple[str, ...]" = ()) -> "tuple[int | None, str, dict[str, Document]]":
    """Exit code (``None``: no answer in time), output and cards. What an older driver does not know is not asked again.

    ``only``: arguments that name one card.
    """
    fields = SMI_FIELDS  # type: tuple[str, ...]
    while True:
        argv = [program, *only, "--query-gpu=" + ",".join(fields), "--format=csv,noheader,nounits"]
        code, raw = Command(argv, deadline_s - time.monotonic()).finish()
        output = text(raw)
        unknown = set(SMI_UNKNOWN_FIELD.findall(output)) & set(fields) if code else set()
        # Without these the rest says nothing.
        if not unknown or unknown & {"index", "uuid", "pci.bus_id", "name", "memory.total", "memory.used"}:
            return code, output, parse_smi(output, fields) if code is not None else {}
        older = {field: SMI_OLDER_NAMES.get(field, "") for field in unknown}
        fields = tuple(name for name in (older.get(field, field) for field in fields) if name)


def query_the_others(program: str, lost: "set[str]", deadline_s: float) -> "dict[str, Document]":
    """The cards that still answer, one by one: a card that has fallen off the bus ends a query for all of them."""
    cards = {}  # type: dict[str, Document]
    for address, _, kind in nvidia_devices(PCI_DEVICES):
        if not kind.startswith("03") or address in lost or deadline_s - time.monotonic() < 0.1:
            continue
        code, _, found = query_cards(program, deadline_s, ("-i", text(address)))
        if code == 0:
            cards.update(found)
    return cards


def collect_smi(loaded: bool, facts: "Document") -> "tuple[Document, str, dict[str, Document]]":
    """How ``nvidia-smi`` answers, the CUDA level it shows, and the cards it lists with who computes on them.

    Without a loaded module it is not called: it would load one. One time limit holds for all its calls. What else it may know is
    asked only once it has listed cards: each call to a stuck driver leaves a process behind that nobody can kill.
    """
    smi = {"status": "absent", "output": "", "mismatch": False}  # type: Document
    program = find_program("nvidia-smi")
    if program is None:
        return smi, "", {}
    if not loaded:
        return dict(smi, status="error", output="the kernel module is not loaded"), "", {}
    deadline_s = time.monotonic() + SMI_LIMIT_S
    try:
        code, output, cards = query_cards(program, deadline_s)
    except (ProbeFailure, OSError) as error:
        return dict(smi, status="error", output=text(str(error))[:2000]), "", {}
    smi["output"] = output[:2000]
    smi["status"] = "timeout" if code is None else "ok" if code == 0 else "error"
    smi["mismatch"] = SMI_MISMATCH in output
    chosen = [()]  # type: list[tuple[str, ...]]
    if not cards and code not in (None, 0):
        lost = {address for address, folder, _ in nvidia_devices(PCI_DEVICES) if off_the_bus(folder)}
        if lost:
            cards = query_the_others(program, lost, deadline_s)
            chosen = [("-i", address) for address in cards]
    if not cards:
        return smi, "", {}
    query = "--query-compute-apps=" + ",".join(SMI_PROCESS_FIELDS)
    answers = {"processes": "", "cuda_version": ""}
    # All at once: where no persistence mode keeps the cards awake, each call takes its time.
    commands = [("cuda_version", Command([program, *chosen[0]], max(0.1, deadline_s - time.monotonic())))]
    for only in chosen:
        argv = [program, *only, query, "--format=csv,noheader,nounits"]
        commands.append(("processes", Command(argv, max(0.1, deadline_s - time.monotonic()))))
    for key, command in commands:
        try:
            code, raw = command.finish()
            answers[key] += text(raw) if code is not None else ""
            if code is None:
                note_error(facts, f"nvidia.{key}", f"`nvidia-smi` gave no answer within {SMI_LIMIT_S:g} s")
        except ProbeFailure as error:
            note_error(facts, f"nvidia.{key}", str(error))
    processes = parse_smi_processes(answers["processes"])
    for card in cards.values():
        card["processes"] = processes.get(card["uuid"], []) if card["uuid"] else []
    return smi, parse_cuda_version(answers["cuda_version"]), cards


def name_gpu_processes(gpus: "list[Document]", proc: str = "/proc") -> "list[Document]":
    """The same cards with what computes on them as the host itself sees it; apart, because reading that may hang."""
    for gpu in gpus:
        for process in gpu.get("processes", []):
            folder = os.path.join(proc, str(process["pid"]))
            process["command"] = command_of(process["pid"], proc) or process["command"]
            process["unit"] = unit_of(read_text(os.path.join(folder, "cgroup"), ""))
    return gpus


def library_version(folders: "tuple[str, ...]" = LIBRARY_DIRS, machine: str = "") -> str:
    """The version of the driver's management library, by the name of the file that ``libnvidia-ml.so.1`` leads to."""
    for folder in folders:
        path = os.path.join(folder.format(machine=machine or os.uname().machine), "libnvidia-ml.so.1")
        found = re.fullmatch(r"libnvidia-ml\.so\.(.+)", os.path.basename(os.path.realpath(path)))
        if found and DRIVER_VERSION.fullmatch(found.group(1)):
            return found.group(1)
    return ""


def find_module(release: str, modules: str = "/lib/modules") -> "str | None":
    """The file of the ``nvidia`` module that a kernel would load, by ``depmod``'s own list."""
    folder = os.path.join(modules, release)
    listed = read_text(os.path.join(folder, "modules.dep"), "", limit_bytes=32 << 20)
    found = [line.partition(":")[0] for line in listed.splitlines() if "/nvidia" in line]
    found = [path for path in found if MODULE_FILE.fullmatch(os.path.basename(path))]
    # Depmod's usual order: what was added later comes before what the kernel brought.
    found.sort(key=lambda path: not path.startswith(("updates/", "extra/", "weak-updates/")))
    return os.path.join(folder, found[0]) if found else None


def collect_module_file(release: str, modules: str = "/lib/modules") -> "Document":
    """Version and flavour of the module on disk, by ``modinfo``, which knows how to unpack it.

    Raises:
        ProbeFailure: there is a module, but it cannot be read.
    """
    path = find_module(release, modules)
    if path is None:
        return {"on_disk_module_version": "", "on_disk_module_flavour": ""}
    shown = run_command(["modinfo", path], 4.0)
    fields = {name: value.strip() for name, _, value in (line.partition(":") for line in shown.splitlines()[:200])}
    version, licence = fields.get("version", ""), fields.get("license", "")
    if not DRIVER_VERSION.fullmatch(version):
        raise ProbeFailure(f"`modinfo {text(path)}` tells no version")
    flavour = {"NVIDIA": "proprietary", "Dual MIT/GPL": "open"}.get(licence, "")
    return {"on_disk_module_version": version, "on_disk_module_flavour": flavour}


def collect_next_boot(release: str, boot: str = "/boot", modules: str = "/lib/modules") -> "Document":
    """Version and flavour of the module that the next boot loads: the newest kernel is what boot loaders start.

    Nothing where that is the kernel that runs, whose module is known anyway, or where none can be booted (a container).
    """
    kernels = collect_kernels_installed(boot, modules)
    if not kernels or kernels[-1] == release:
        return {}
    found = collect_module_file(kernels[-1], modules)
    return {name.replace("on_disk", "next_boot"): value for name, value in found.items()}


def collect_fabric_manager(proc: str = "/proc") -> str:
    """Whether NVIDIA's fabric manager is there, and whether it runs. The kernel keeps 15 characters of a process's name."""
    if find_program("nv-fabricmanager") is None:
        return ""
    return "active" if any(command_name(pid, proc) == "nv-fabricmanage" for pid in process_ids(proc)) else "installed"


def ask_smi(facts: "Document") -> "tuple[Document, str, dict[str, Document]]":
    """How ``nvidia-smi`` answers; apart, because a driver that hangs must not cost what the disk and the kernel say of it."""
    return collect_smi(bool(facts["nvidia"]["module_version"]), facts)


def collect_nvidia(facts: "Document", devices: str = PCI_DEVICES) -> "Document":
    """The driver as the kernel and the disk show it. What fails here costs only its own fields."""
    nvidia = parse_driver_version(read_text("/proc/driver/nvidia/version", ""))
    loaded = loaded_modules()
    nvidia["modules_loaded"] = [name for name in WATCHED_MODULES if name in loaded]
    for name, learn in (
        ("module_file", lambda: collect_module_file(os.uname().release)),
        ("next_boot", lambda: collect_next_boot(os.uname().release)),
        ("library", lambda: {"library_version": library_version()}),
        ("fabric_manager", lambda: {"fabric_manager": collect_fabric_manager()}),
        ("uninstaller", lambda: {"uninstaller": find_program("nvidia-uninstall") or ""}),
        ("nvswitch_count", lambda: {"nvswitch_count": sum(kind == "0680" for _, _, kind in nvidia_devices(devices))}),
    ):  # type: tuple[str, Callable[[], Document]]
        try:
            nvidia.update(learn())
        except (ProbeFailure, OSError) as error:
            note_error(facts, f"nvidia.{name}", str(error))
    return nvidia


# --- what goes wrong with cards -----------------------------------------------------------------------------------------------


def collect_uvm(root: str = "/", device: str = UVM_DEVICE) -> str:
    """Whether ``nvidia_uvm`` still takes programs: ``ok``, ``poisoned``, or nothing where that is not known.

    The module remembers the first error that it cannot recover from, and from then on fails each ``open`` of its device
    (``uvm_open`` in NVIDIA/open-gpu-kernel-modules, ``kernel-open/nvidia-uvm/uvm.c``), which CUDA calls ``unknown error``. So
    opening it tells, and needs neither a CUDA context nor libcuda: it takes no lock and touches no card.
    """
    if "nvidia_uvm" not in loaded_modules(root):
        return ""
    try:
        os.close(os.open(device, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY))
    except OSError as error:
        # Anything else speaks of the device's node or of a container's rules.
        return "poisoned" if error.errno == errno.EIO else ""
    return "ok"


def read_kernel_log(path: str = "/dev/kmsg") -> "list[tuple[int, str]] | None":
    """The kernel's own log as microseconds since boot and text, oldest first; ``None`` where it is not to be seen.

    Read from the kernel, not through ``dmesg``: no process, no colours, and the same in every version.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    except OSError:
        return None
    records = []
    try:
        status = os.fstat(descriptor)
        device = stat.S_ISCHR(status.st_mode) and (os.major(status.st_rdev), os.minor(status.st_rdev)) == KMSG_DEVICE
        if not device and not stat.S_ISREG(status.st_mode):
            return None
        rest = b""
        for _ in range(MAX_LOG_RECORDS):
            try:
                # One record from the device, which must fit.
                chunk = os.read(descriptor, 16 << 10)
            except OSError as error:
                if error.errno == errno.EPIPE:
                    # It was overwritten while we read: the next read goes on with the oldest that is left.
                    continue
                break
            if not chunk:
                break
            *lines, rest = (rest + chunk).split(b"\n")
            # Lines that begin with a blank are a record's properties.
            records += [line for line in lines if b"NVRM: Xid" in line and not line.startswith(b" ")]
    finally:
        os.close(descriptor)
    parsed = []
    for record in records:
        head, separator, message = record.partition(b";")
        fields = head.split(b",")
        if separator and len(fields) >= 3 and fields[2].isdigit():
            parsed.append((int(fields[2]), text(message)))
    return parsed


def read_journal(limit_s: float = 3.0) -> "list[tuple[str, int, float, str]]":
    """Kernel messages about cards of the last day in the journal, earlier boots too: boot, microseconds since boot, time, text.

    Empty where there is no journal, or one that cannot be searched: what the kernel itself still has is known anyway.
    """
    fields = "--output-fields=MESSAGE,_SOURCE_MONOTONIC_TIMESTAMP"
    argv = ["journalctl", "--quiet", "--no-pager", "--output=json", fields, f"--since=-{XID_AGE_S:.0f}s", "--lines=2000"]
    try:
        shown = run_command([*argv, "--grep=NVRM: Xid", "_TRANSPORT=kernel"], limit_s)
    except (ProbeFailure, OSError):
        return []
    found = []
    for line in shown.splitlines():
        try:
            entry = json.loads(line)
            monotonic = entry.get("_SOURCE_MONOTONIC_TIMESTAMP") or entry["__MONOTONIC_TIMESTAMP"]
            message = entry["MESSAGE"]
            # Text that is not UTF-8 comes as a list of numbers.
            message = message if isinstance(message, str) else text(bytes(message))
            found.append((str(entry["_BOOT_ID"]), int(monotonic), int(entry["__REALTIME_TIMESTAMP"]) / 1e6, message))
        except (ValueError, KeyError, TypeError, AttributeError):
            continue
    return found


def collect_kernel_log(facts: "Document") -> "Document":
    """The XIDs of the last day (NVIDIA's numbered errors), each card's and number's together, the latest first."""
    kernel = read_kernel_log()
    boot_id = str(facts.get("boot_id", "")).replace("-", "")
    booted_s = time.time() - time.clock_gettime(time.CLOCK_MONOTONIC)
    seen = {}  # type: dict[tuple[str, int], tuple[float, bool, str]]
    for boot, monotonic, at_s, message in read_journal():
        seen[(boot, monotonic)] = (at_s, boot == boot_id, message)
    for monotonic, message in kernel or []:
        seen.setdefault((boot_id, monotonic), (booted_s + monotonic / 1e6, True, message))
    xids = {}  # type: dict[tuple[str, int], Document]
    for at_s, this_boot, message in sorted(seen.values()):
        match = XID.search(message)
        if match is None or at_s < time.time() - XID_AGE_S:
            continue
        key = (normalize_pci_address(match.group(1) + ".0"), int(match.group(2)))
        xid = xids.setdefault(key, {"pci_address": key[0], "code": key[1], "count": 0, "first_s": at_s})
        xid["count"] += 1
        xid.update(last_s=at_s, this_boot=this_boot, message=(match.group(3) or "")[:300])
    latest = sorted(xids.values(), key=lambda xid: -float(xid["last_s"]))
    return {"seen": kernel is not None or bool(seen), "xids": latest[:MAX_XIDS]}


def dkms_built(folder: str) -> "set[str]":
    """Kernels that a version of a module is built for: its folder has one for each, and in that one for each machine."""
    return {
        kernel
        for kernel in _listdir(folder)
        for machine in _listdir(os.path.join(folder, kernel))
        if os.path.isdir(os.path.join(folder, kernel, machine, "module"))
    }


def dkms_installed(folder: str) -> "dict[str, str]":
    """Kernel -> version that is installed for it: links beside the versions say so (``kernel-6.1.0-57-amd64-x86_64``)."""
    found = {}
    for name in _listdir(folder):
        path = os.path.join(folder, name)
        if name.startswith("kernel-") and os.path.islink(path):
            version, _, rest = os.readlink(path).partition("/")
            found[rest.partition("/")[0]] = version
    return found


def collect_dkms(root: str = "/var/lib/dkms") -> "list[Document]":
    """NVIDIA's modules that DKMS has, by its own folders. A build that failed has left its log beside what is built."""
    modules = []
    for name in sorted(_listdir(root)):
        folder = os.path.join(root, name)
        if not name.startswith("nvidia"):
            continue
        installed = dkms_installed(folder)
        for version in sorted(_listdir(folder)):
            place = os.path.join(folder, version)
            if os.path.islink(place) or not os.path.lexists(os.path.join(place, "source")):
                continue
            built = dkms_built(place)
            log = read_text(os.path.join(place, "build/make.log"), "")
            tried = re.search(r"make\.log for \S+ for kernel (\S+)", log.partition("\n")[0])
            ready = {kernel for kernel, found in installed.items() if found == version}
            modules.append(
                {
                    "name": text(name),
                    "version": text(version),
                    "built": [text(kernel) for kernel in by_version(built)[-MAX_KERNELS:]],
                    "installed": [text(kernel) for kernel in by_version(ready)[-MAX_KERNELS:]],
                    "failed": text(tried.group(1)) if tried and tried.group(1) not in built else "",
                }
            )
    return modules[:MAX_DKMS_MODULES]


# --- putting it together ------------------------------------------------------------------------------------------------------


def note_error(facts: "Document", name: str, message: str) -> None:
    """Record that a part could not be learned."""
    facts.setdefault("errors", {})[name] = text(message)[:1000]


class Task:
    """One part of the document: where its result goes, how it is learned, and how long that may take.

    Args:
        key: The section of the document.
        learn: Called with ``arguments``; its result must be made of plain types.
        item: The one entry of the section that this task is for; a result of ``None`` then leaves no entry.
        limit_s: When a worker that is busy with this task counts as stuck.
    """

    def __init__(
        self,
        key: str,
        learn: "Callable[..., object]",
        *arguments: object,
        item: "str | None" = None,
        limit_s: float = TASK_LIMIT_S,
    ) -> None:
        self.key = key
        self.learn = learn
        self.arguments = arguments
        self.item = item
        self.limit_s = limit_s
        self.name = key if item is None else f"{key}.{text(item)}"

    def store(self, facts: "Document", value: object) -> None:
        """Put a result where it belongs."""
        if self.item is None:
            facts[self.key] = value
        elif value is not None:
            facts.setdefault(self.key, {})[text(self.item)] = value


class Worker:
    """A forked process that does tasks one after the other and reports each result as it comes."""

    def __init__(self, tasks: "list[Task]", facts: "Document") -> None:
        self.pipe, write_end = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                os.setpgid(0, 0)
                os.close(self.pipe)
                # A worker that has to be left behind must not keep the caller's streams open.
                nothing = os.open(os.devnull, os.O_RDWR)
                for stream in (0, 1, 2):
                    os.dup2(nothing, stream)
                work(tasks, facts, write_end)
                code = 0
            finally:
                os._exit(code)
        os.close(write_end)

    def next_result(self, deadline_s: float) -> "tuple[bool, object, Document] | None":
        """What the next task came to: done, result, errors. ``None``: nothing came in time, or the worker died."""
        size = read_exactly(self.pipe, 4, deadline_s)
        message = read_exactly(self.pipe, struct.unpack("=I", size)[0], deadline_s) if size else None
        if message is None:
            return None
        done, value, errors = json.loads(message.decode("ascii"))
        return bool(done), value, errors

    def close(self, finished: bool) -> None:
        """Let go of it. One that has not finished is killed and not waited for: what cannot die would hang this process too."""
        os.close(self.pipe)
        if finished:
            os.waitpid(self.pid, 0)
        else:
            kill_group(self.pid)


def work(tasks: "list[Task]", facts: "Document", pipe: int) -> None:
    """What a worker does: each result goes out as a length and a JSON list: done, result, errors."""
    for task in tasks:
        errors = {}  # type: Document
        facts["errors"] = errors
        try:
            value = task.learn(*task.arguments)
            task.store(facts, value)
            message = json.dumps((True, value, errors)).encode("ascii")
        except Exception as error:  # whatever a host holds must cost no more than its own part
            reason = str(error) if isinstance(error, (ProbeFailure, OSError)) else f"{type(error).__name__}: {error}"
            note_error(facts, task.name, reason)
            message = json.dumps((False, None, errors)).encode("ascii")
        data = struct.pack("=I", len(message)) + message
        while data:
            data = data[os.write(pipe, data) :]


def read_exactly(pipe: int, size: int, deadline_s: float) -> "bytes | None":
    """``size`` bytes from a pipe, or ``None`` if it ends or the time does."""
    poller = select.poll()
    poller.register(pipe, select.POLLIN | select.POLLHUP)
    chunks = []
    while size > 0:
        wait_s = deadline_s - time.monotonic()
        if wait_s <= 0 or not poller.poll(wait_s * 1000):
            return None
        chunk = os.read(pipe, min(size, 1 << 20))
        if not chunk:
            return None
        chunks.append(chunk)
        size -= len(chunk)
    return b"".join(chunks)


def run_tasks(tasks: "list[Task]", facts: "Document", deadline_s: float) -> None:
    """Do all tasks and merge what they learn into ``facts``. A stuck one costs its own limit; all ends by ``deadline_s``."""
    left = list(tasks)
    while left and time.monotonic() < deadline_s:
        worker = Worker(left, facts)
        result = None  # type: tuple[bool, object, Document] | None
        while left:
            result = worker.next_result(min(time.monotonic() + left[0].limit_s, deadline_s))
            if result is None:
                break
            merge(facts, left.pop(0), result)
        worker.close(finished=not left)
        if left and time.monotonic() < deadline_s:
            task = left.pop(0)
            note_error(facts, task.name, f"no answer within {task.limit_s:g} s")
    for task in left:
        note_error(facts, task.name, "the probe ran out of time")


def merge(facts: "Document", task: Task, result: "tuple[bool, object, Document]") -> None:
    """Put a worker's result into the document."""
    done, value, errors = result
    facts["errors"].update(errors)
    if done:
        task.store(facts, value)


def first_tasks(facts: "Document", request: "Document") -> "list[Task]":
    """All parts that need nothing but the request."""
    long_s = DEEP_BUDGET_S if request["deep"] else TASK_LIMIT_S
    tasks = [
        Task("boot_id", read_text, "/proc/sys/kernel/random/boot_id"),
        Task("uptime_s", lambda: float(read_text("/proc/uptime").split()[0])),
        Task("virtualization", collect_virtualization),
        Task("distribution", collect_distribution),
        Task("libc", collect_libc),
        Task("user", lambda: {"name": Names().user(os.geteuid()), "uid": os.geteuid()}),
        Task("cpu", collect_cpu),
        Task("memory", collect_memory),
        Task("limits", collect_limits),
        Task("gpus", collect_gpus),
        Task("nouveau", collect_nouveau),
        Task("kernel_headers", collect_kernel_headers),
        Task("kernels_installed", collect_kernels_installed),
        Task("secure_boot", collect_secure_boot),
        Task("selinux", collect_selinux),
        Task("dkms", collect_dkms),
        Task("packages", collect_packages, limit_s=12.0),
        Task("apt_sources", collect_apt_sources),
        Task("apt_preferences", collect_preferences),
        Task("unattended_upgrades", collect_unattended_upgrades),
        Task("cron", collect_cron),
        # In the worker this is the document as it stands by then, with `packages` in it.
        Task("compilers", collect_compilers, facts),
        Task("cuda_toolkits", collect_cuda_toolkits, facts),
        Task("cmake_version", collect_cmake_version, facts),
        Task("package_locks", package_locks),
        Task("systemd", collect_systemd),
        Task("units", collect_units),
        Task("listeners", collect_listeners),
        Task("host_json", collect_host_json),
        # With `host_json` in it.
        Task("files", collect_files, facts, request, limit_s=long_s),
        Task("releases", collect_releases, request, limit_s=long_s),
        Task("stored_models", collect_stored_models),
        Task("baselines", collect_baselines),
        Task("identity", collect_identity, request["identity"]),
        Task("health", collect_health, request["health"]),
        Task("gateway", collect_gateway),
        Task("firewall", collect_firewall),
    ]
    for account in request["accounts"]:
        tasks.append(Task("accounts", lambda name: Names().account(name), account, item=account))
    for path in request["filesystems"]:
        tasks.append(Task("filesystems", collect_filesystem, path, item=path))
    for path in request["models"]:
        tasks.append(Task("models", collect_model, path, request["deep"], item=path, limit_s=long_s))
    return tasks


def second_tasks(facts: "Document") -> "list[Task]":
    """Parts that follow from the first ones, and those that a stuck process could hold up."""
    names = Names()
    tasks = [Task("listeners", name_listeners, facts.get("listeners", []))]
    if facts.get("gpus"):
        tasks.append(Task("gpus", ask_gpus, facts["gpus"]))
        tasks.append(Task("kernel_log", collect_kernel_log, facts))
        tasks.append(Task("uvm", collect_uvm, limit_s=2.0))
    for unit, shown in sorted(facts.get("units", {}).items()):
        if shown["main_pid"] > 0:
            tasks.append(Task("processes", collect_process, shown["main_pid"], unit, names, item=unit, limit_s=2.0))
    return tasks


def strings(values: object) -> "list[str]":
    """The strings of a list, each once; anything else is left out."""
    if not isinstance(values, list):
        return []
    return list(dict.fromkeys(value for value in values if isinstance(value, str) and "\0" not in value))


def parse_request(argument: str) -> "Document":
    """The request with all its keys; unknown ones, which a newer controller may send, are ignored.

    Raises:
        ProbeFailure: it is not a JSON object.
    """
    try:
        given = json.loads(argument)
    except ValueError as error:
        raise ProbeFailure(f"--request is not valid JSON: {error}") from None
    if not isinstance(given, dict):
        raise ProbeFailure("--request is not a JSON object")
    request = {key: strings(given.get(key)) for key in ("files", "models", "filesystems", "accounts")}  # type: Document
    for key in ("files", "models", "filesystems"):
        request[key] = [path for path in request[key] if path.startswith("/")]
    for key in ("health", "identity"):
        urls = given.get(key)
        request[key] = {str(name): str(url) for name, url in urls.items()} if isinstance(urls, dict) else {}
    ports = given.get("ports")
    request["ports"] = [port for port in ports if isinstance(port, int)] if isinstance(ports, list) else []
    request["deep"] = given.get("deep") is True
    return request


def probe(request: "Document") -> "Document":
    """Look at everything."""
    started_s = time.monotonic()
    deadline_s = started_s + (DEEP_BUDGET_S if request["deep"] else BUDGET_S)
    system = os.uname()
    facts = {
        "schema": SCHEMA,
        "now_s": time.time(),
        "hostname": text(system.nodename),
        "machine": system.machine,
        "kernel": text(system.release),
        "python": {"version": python_version(), "executable": text(sys.executable or "")},
        # Looked at where there is a card.
        "uvm": "",
        "kernel_log": {"seen": False, "xids": []},
        "secret_salt": os.urandom(16).hex(),
        "errors": {},
    }  # type: Document
    # `nvidia-smi` is slow even where it works: it runs beside all the rest.
    nvidia_deadline_s = min(time.monotonic() + SMI_LIMIT_S + 6.0, deadline_s)
    nvidia_worker = Worker([Task("nvidia", collect_nvidia, facts), Task("smi", ask_smi, facts)], facts)
    run_tasks(first_tasks(facts, request), facts, deadline_s)
    run_tasks(second_tasks(facts), facts, deadline_s)
    facts["processes"] = list(facts.get("processes", {}).values())
    driver = nvidia_worker.next_result(nvidia_deadline_s)
    answer = nvidia_worker.next_result(nvidia_deadline_s) if driver is not None else None
    nvidia_worker.close(finished=answer is not None)
    merge_nvidia(facts, driver, answer)
    if any(gpu.get("processes") for gpu in facts.get("gpus", [])):
        run_tasks([Task("gpus", name_gpu_processes, facts.get("gpus", []))], facts, deadline_s)
    run_tasks([Task("occupants", collect_occupants, facts, request)], facts, deadline_s)
    facts["probe_ms"] = round((time.monotonic() - started_s) * 1000, 1)
    return facts


def merge_nvidia(
    facts: "Document", driver: "tuple[bool, object, Document] | None", answer: "tuple[bool, object, Document] | None"
) -> None:
    """Put what is known of the driver into the document: what kernel and disk say, then how ``nvidia-smi`` answered."""
    for name, result in (("nvidia", driver), ("nvidia.smi", answer if driver is not None else (True, None, {}))):
        if result is None:
            note_error(facts, name, f"no answer within {SMI_LIMIT_S + 6.0:g} s")
        else:
            facts["errors"].update(result[2])
    if driver is None or not isinstance(driver[1], dict):
        return
    nvidia = facts["nvidia"] = dict(driver[1])
    if answer is None:
        # Whatever keeps it: it gives no answer.
        nvidia["smi"] = {"status": "timeout", "output": "", "mismatch": False}
    elif isinstance(answer[1], list):
        nvidia["smi"], nvidia["cuda_version"], cards = answer[1]
        for gpu in facts.get("gpus", []):
            gpu.update(cards.get(gpu["pci_address"], {}))


def python_version() -> str:
    """The version of the Python that runs this."""
    return ".".join(str(number) for number in sys.version_info[:3])


def write_document(document: "Document") -> None:
    """Print JSON on stdout. Halves of surrogate pairs, which are no text, become question marks."""
    data = json.dumps(document, ensure_ascii=False).encode("utf-8", "replace") + b"\n"
    while data:
        data = data[os.write(1, data) :]


def main(arguments: "list[str]") -> int:
    """The program. Exit code 0 and one JSON document, or another one and one line on stderr."""
    if sys.version_info < MINIMUM_PYTHON:
        sys.stderr.write(f"v100ctl: Python {python_version()} is too old, 3.8 or newer is needed\n")
        return EXIT_TOO_OLD
    if arguments == ["--locks"]:
        facts = {"errors": {}}  # type: Document
        run_tasks([Task("package_locks", package_locks)], facts, time.monotonic() + BUDGET_S)
        for problem in facts.pop("errors").values():
            raise ProbeFailure(problem)
        write_document(facts)
        return 0
    if len(arguments) == 2 and arguments[0] == "--request":
        request = parse_request(arguments[1])
        # The last resort against whatever was not thought of.
        signal.alarm(int((DEEP_BUDGET_S if request["deep"] else BUDGET_S) + 15))
        write_document(probe(request))
        return 0
    raise ProbeFailure("wrong arguments: give --request JSON or --locks")


if __name__ == "__main__":
    try:
        CODE = main(sys.argv[1:])
    except (ProbeFailure, OSError) as failure:
        sys.stderr.write(f"v100ctl: {failure}\n")
        CODE = 1
    sys.stderr.flush()
    # A worker that was left behind must not keep the interpreter from ending.
    os._exit(CODE)
