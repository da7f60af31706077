"""Lab hosts with a kernel of their own: virtual machines of QEMU, for what no container can show.

A container shares the machine's kernel: it has no initramfs, loads no module, and its restart is no boot. A virtual machine has
all of that, two NUMA nodes, and V100s on its PCI bus (:mod:`v100ctl.lab.pci_card`). Its price is time: where ``/dev/kvm`` does
not work every instruction is translated, which takes about ten times as long. So its disk is filled on this machine, in a
``chroot``, and the guest boots only to show what takes a boot.

:func:`make_disk` makes a disk that boots by itself: firmware, boot loader (extlinux), the kernel and the initramfs that lie on
it. What the guest rebuilds is what it boots next. :class:`VirtualMachine` runs one. Both need root on Debian or Ubuntu, loop
devices, and the packages :data:`PACKAGES`.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from v100ctl.apply.reporter import Reporter
from v100ctl.errors import LabError
from v100ctl.lab.engine import install_packages, os_release
from v100ctl.lab.hosts import SshHost, key_pair, ssh_config
from v100ctl.lab.image import ADMIN_SETUP, AUTHORIZED_KEYS, SSHD_SETUP, apt_settings, apt_sources
from v100ctl.lab.pci_card import PlayedCard

#: Program -> the package of Debian and Ubuntu that brings it.
PACKAGES = {
    "qemu-system-x86_64": "qemu-system-x86",
    "extlinux": "extlinux",
    "mmdebstrap": "mmdebstrap",
    "mkfs.ext4": "e2fsprogs",
    "ssh": "openssh-client",
}
#: What a guest is made of beside Debian's essential packages.
GUEST_PACKAGES = (
    "ca-certificates",
    "dbus",
    "initramfs-tools",
    "iproute2",
    "kmod",
    "linux-image-amd64",
    "openssh-server",
    "pciutils",
    "procps",
    "python3",
    "sudo",
    "systemd",
    "systemd-sysv",
    "udev",
    "zstd",
)
_SUITE = ("debian", "bookworm")
_DISK_BYTES = 12 << 30
_DISK_TIMEOUT_S = 3600.0
_STOP_TIMEOUT_S = 20.0
_POLL_S = 1.0
_LABEL = "v100ctl-lab"
#: The network that QEMU makes for a guest: its address, this machine, and a name server that asks this machine's.
_GUEST, _GATEWAY, _NAMESERVER = "10.0.2.15/24", "10.0.2.2", "10.0.2.3"
_COMMAND_LINE = f"root=LABEL={_LABEL} ro console=ttyS0 net.ifnames=0 mitigations=off"

# Run with the disk's path, the mount point, mmdebstrap's words and the two scripts in place, in name spaces of its own: whatever
# ends it, no mount is left.
_MAKE = (
    r"""
set -eu
disk=$1 root=$2 size=$3 work=$4
shift 4
truncate -s "$size" "$disk"
# The boot loader reads neither 64-bit block numbers nor checksummed metadata.
mkfs.ext4 -q -F -L LABEL -O ^64bit,^metadata_csum -E lazy_itable_init=1,lazy_journal_init=1 "$disk"
mount -o loop "$disk" "$root"
mmdebstrap --mode=root --variant=minbase "$@" "$root" "$work/sources.list"
mount -t proc proc "$root/proc"
mount -t sysfs -o ro sysfs "$root/sys"
mount --rbind /dev "$root/dev"
mount -t tmpfs tmpfs "$root/tmp"
cp -L /etc/resolv.conf "$root/etc/resolv.conf"
cp "$work/authorized-keys" "$root/AUTHORIZED_KEYS"
cp "$work/apt.conf" "$root/etc/apt/apt.conf.d/90v100ctl-lab"
rm -f "$root/etc/apt/apt.conf.d/99mmdebstrap"
cp "$work/script" "$root/tmp/script"
# Nothing is started while packages are installed.
printf '#!/bin/sh\nexit 101\n' > "$root/usr/sbin/policy-rc.d"
chmod 0755 "$root/usr/sbin/policy-rc.d"
env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LC_ALL=C.UTF-8 DEBIAN_FRONTEND=noninteractive \
    chroot "$root" /bin/sh -eu /tmp/script < /dev/null
rm "$root/usr/sbin/policy-rc.d"
printf 'nameserver NAMESERVER\n' > "$root/etc/resolv.conf"
cp "$root/etc/ssh/ssh_host_ed25519_key.pub" "$work/host-key"
mkdir -p "$root/boot/extlinux"
cp "$work/extlinux.conf" "$root/boot/extlinux/extlinux.conf"
extlinux --install "$root/boot/extlinux"
sync
""".replace("LABEL", _LABEL)
    .replace("AUTHORIZED_KEYS", AUTHORIZED_KEYS.lstrip("/"))
    .replace("NAMESERVER", _NAMESERVER)
)

_EXTLINUX = f"DEFAULT linux\nPROMPT 0\nTIMEOUT 0\nLABEL linux\n  LINUX /vmlinuz\n  INITRD /initrd.img\n  APPEND {_COMMAND_LINE}\n"

_SETUP = (
    f"""
echo HOSTNAME > /etc/hostname
printf '127.0.0.1 localhost\\n127.0.1.1 HOSTNAME\\n' > /etc/hosts
echo 'LABEL={_LABEL} / ext4 errors=remount-ro,noatime 0 1' > /etc/fstab
mkdir -p /etc/systemd/network
printf '[Match]\\nName=eth0\\n[Network]\\nAddress={_GUEST}\\nGateway={_GATEWAY}\\n' > /etc/systemd/network/lab.network
# A translated processor on a busy machine is slower than any unit's own limit foresees.
mkdir -p /etc/systemd/system.conf.d
printf '[Manager]\\nDefaultTimeoutStartSec=15min\\nDefaultDeviceTimeoutSec=15min\\n' > /etc/systemd/system.conf.d/lab.conf
: > /etc/machine-id
rm -f /var/lib/dbus/machine-id /etc/ssh/ssh_host_*
ssh-keygen -q -t ed25519 -N '' -f /etc/ssh/ssh_host_ed25519_key
systemctl -q enable systemd-networkd.service ssh.service
# A small initramfs: what finds the disk, and what hooks put in. The guest makes it anew with each change of its modules.
echo MODULES=list > /etc/initramfs-tools/conf.d/lab
printf 'virtio_pci\\nvirtio_blk\\next4\\n' >> /etc/initramfs-tools/modules
update-initramfs -u -k all
# What takes a translated processor seconds and shows nothing; and apt's timers, which take its lock when they choose.
systemctl -q mask \\
    apt-daily.timer apt-daily-upgrade.timer dpkg-db-backup.timer e2scrub_all.timer e2scrub_reap.service fstrim.timer \\
    getty.target man-db.timer motd-news.timer systemd-networkd-wait-online.service systemd-timesyncd.service
systemctl -q set-default multi-user.target
"""
    + SSHD_SETUP
    + ADMIN_SETUP
)


@dataclass(frozen=True)
class Card:
    """A card on the bus of a NUMA node: vendor and device of its chip (``10de:1db1``) and of its board."""

    pci_id: str
    subsystem_id: str
    node: int = 0


@dataclass(frozen=True)
class Hardware:
    """A virtual machine's parts. Processors and memory are shared out to the NUMA nodes evenly."""

    processors: int = 2
    memory_mib: int = 2048
    nodes: int = 2
    cards: tuple[Card, ...] = ()

    def __post_init__(self) -> None:
        if self.processors % self.nodes or self.memory_mib % self.nodes:
            raise LabError(f"{self.processors} processors and {self.memory_mib} MiB cannot be shared out to {self.nodes} nodes")
        if any(not 0 <= card.node < self.nodes for card in self.cards):
            raise LabError(f"a card is on a NUMA node that the machine does not have (it has {self.nodes})")


@dataclass(frozen=True)
class Disk:
    """A disk that boots. ``host_key`` is the public key that its sshd will show."""

    path: Path
    host_key: str


def ensure_programs(reporter: Reporter) -> None:
    """Installs what lacks of :data:`PACKAGES`.

    Raises:
        LabError: Something lacks and this user cannot install it; or this is no x86-64 machine with root's rights.
    """
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    missing = sorted(package for program, package in PACKAGES.items() if shutil.which(program, path=path) is None)
    if os.uname().machine != "x86_64":
        raise LabError(f"virtual lab hosts are x86-64 machines, and this is {os.uname().machine}")
    if os.geteuid() != 0:
        raise LabError("making a virtual lab host's disk takes root", hint="run this as root")
    if missing:
        install_packages(reporter, missing, purpose="virtual lab hosts")


def make_disk(
    folder: Path,
    name: str,
    reporter: Reporter,
    *,
    packages: Sequence[str] = (),
    script: str = "",
    timeout_s: float = _DISK_TIMEOUT_S,
) -> Disk:
    """Makes a disk with Debian 12, from this machine's own apt sources. It takes minutes.

    Args:
        folder: Where the disk goes, with the key pair that opens it.
        name: The guest's host name.
        reporter: Told what is being done.
        packages: What goes in beside :data:`GUEST_PACKAGES`.
        script: Shell commands that are run in the disk, as root and at this machine's own speed, before its first boot.
        timeout_s: When to give up.

    Raises:
        LabError: A step failed; the message ends with its last words.
    """
    ensure_programs(reporter)
    if os_release().get("VERSION_CODENAME") != _SUITE[1]:
        raise LabError(
            f"a virtual lab host is made from this machine's own package mirror, which has to hold {' '.join(_SUITE)}",
            hint="run this on a Debian 12 machine",
        )
    folder.mkdir(parents=True, exist_ok=True)
    disk, log = folder / f"{name}.img", folder / f"{name}.log"
    with tempfile.TemporaryDirectory(prefix="v100ctl-disk-") as made, reporter.phase(f"making the disk of {name}"):
        work, root = Path(made), Path(made) / "root"
        root.mkdir()
        sources = "".join(f"{line}\n" for line in apt_sources(*_SUITE))
        settings = apt_settings()
        for file, text in {
            "apt.conf": settings,
            "authorized-keys": f"{key_pair(folder / 'id_ed25519')} v100ctl lab\n",
            "extlinux.conf": _EXTLINUX,
            "make": _MAKE,
            "script": _SETUP.replace("HOSTNAME", name) + script,
            "sources.list": sources,
        }.items():
            (work / file).write_text(text, encoding="utf-8")
        command = ["unshare", "--mount", "--propagation", "private", "--pid", "--fork", "--kill-child", "/bin/sh"]
        command += [str(work / "make"), str(disk), str(root), str(_DISK_BYTES), str(work)]
        command += [f"--include={','.join((*GUEST_PACKAGES, *packages))}", f"--aptopt={work / 'apt.conf'}", _SUITE[1]]
        code = _run_logged(command, log, timeout_s)
        if code != 0:
            disk.unlink(missing_ok=True)
            words = log.read_text(encoding="utf-8", errors="replace").splitlines()[-5:]
            raise LabError(f"the disk of {name} could not be made: {'; '.join(words)}", hint=f"the whole output is in {log}")
        return Disk(disk, " ".join((work / "host-key").read_text(encoding="ascii").split()[:2]))


def _run_logged(command: Sequence[str], log: Path, timeout_s: float) -> int:
    """Runs a command with its output in a file; killed with all that it started when the time is up, or this program is."""
    with (
        log.open("wb") as output,
        subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", *command], stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        ) as process,
    ):
        try:
            return process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            output.write(f"not done within {timeout_s:.0f} s\n".encode())
            return -1
        finally:
            process.kill()


def kvm_works(device: Path = Path("/dev/kvm"), cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether guests run on this machine's processor itself.

    The device alone does not say so: on a virtual machine whose processor has no such extension it may be there, and run a
    kernel that knows of it, but neither firmware nor boot loader.
    """
    flags = re.search(r"^flags\s*:(.*)$", cpuinfo.read_text(encoding="ascii", errors="replace"), re.MULTILINE)
    return os.access(device, os.R_OK | os.W_OK) and bool(flags and {"vmx", "svm"} & set(flags.group(1).split()))


def qemu_arguments(
    hardware: Hardware, disk: Path, *, ssh_port: int, console: Path, card_descriptors: Sequence[int] = (), kvm: bool = False
) -> list[str]:
    """QEMU's argument list.

    Args:
        hardware: The machine's parts.
        disk: A raw image with a boot loader.
        ssh_port: A port of this machine's loopback address that leads to the guest's port 22.
        console: A file that gets what the guest writes to its serial port.
        card_descriptors: For each card the descriptor of the socket that it is played on.
        kvm: Whether the processor runs the guest itself (see :func:`kvm_works`).
    """
    memory_mib = hardware.memory_mib // hardware.nodes
    processors = hardware.processors // hardware.nodes
    arguments = ["qemu-system-x86_64", "-nodefaults", "-no-user-config", "-display", "none", "-machine", "pc,usb=off"]
    # Five-level page tables cost a translated processor much, and no lab host has so much memory.
    arguments += ["-accel", "kvm" if kvm else "tcg,thread=multi", "-cpu", "max,la57=off"]
    arguments += ["-smp", f"{hardware.processors},sockets={hardware.nodes},cores={processors},threads=1"]
    arguments += ["-m", f"{hardware.memory_mib}M"]
    for node in range(hardware.nodes):
        first = node * processors
        # Shared with the process that plays the cards, as QEMU's protocol demands.
        arguments += ["-object", f"memory-backend-memfd,id=memory{node},size={memory_mib}M,share=on"]
        arguments += ["-numa", f"node,nodeid={node},memdev=memory{node},cpus={first}-{first + processors - 1}"]
    if hardware.nodes > 1:
        for node in range(hardware.nodes):
            other = [f"dist,src={node},dst={peer},val=21" for peer in range(node + 1, hardware.nodes)]
            arguments += [word for distance in other for word in ("-numa", distance)]
    arguments += ["-drive", f"if=none,id=disk,format=raw,cache=unsafe,file={str(disk).replace(',', ',,')}"]
    arguments += ["-device", "virtio-blk-pci,drive=disk,bootindex=0"]
    arguments += ["-netdev", f"user,id=network,hostfwd=tcp:127.0.0.1:{ssh_port}-:22", "-device", "virtio-net-pci,netdev=network"]
    arguments += ["-device", "virtio-rng-pci", "-serial", f"file:{console}"]
    for node in sorted({card.node for card in hardware.cards}):
        arguments += ["-device", f"pxb,id=bus{node},bus_nr={0x40 * (node + 1)},numa_node={node}"]
    for index, (card, descriptor) in enumerate(zip(hardware.cards, card_descriptors, strict=True)):
        arguments += ["-device", f"x-pci-proxy-dev,id=card{index},bus=bus{card.node},fd={descriptor}"]
    return arguments


@dataclass(frozen=True)
class VirtualHost(SshHost):
    """A virtual machine that answers on SSH."""

    console: Path = field(repr=False)

    def run(self, command: str, *, timeout_s: float = 600.0) -> subprocess.CompletedProcess[str]:
        """Runs a shell command as root, over SSH."""
        return subprocess.run(
            self.ssh_command("sudo", "/bin/sh", "-c", command),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )


class VirtualMachine:
    """A virtual machine that runs as long as the ``with`` block, at most as long as this program.

    Args:
        name: The host's name.
        disk: What it boots; the guest writes to it.
        hardware: Its parts.
        boot_timeout_s: How long its boot may take.
    """

    def __init__(self, name: str, disk: Disk, hardware: Hardware, *, boot_timeout_s: float = 900.0) -> None:
        self.name = name
        self.disk = disk
        self.hardware = hardware
        self.boot_timeout_s = boot_timeout_s
        self.console = disk.path.with_suffix(".console")
        self._process: subprocess.Popen[bytes] | None = None
        self._stack = ExitStack()

    def __enter__(self) -> VirtualHost:
        with ExitStack() as stack:
            stack.callback(self._stop)
            port = _free_port()
            cards = [PlayedCard(card.pci_id, card.subsystem_id) for card in self.hardware.cards]
            descriptors = [card.remote.fileno() for card in cards]
            for card in cards:
                card.start()
            arguments = qemu_arguments(
                self.hardware,
                self.disk.path,
                ssh_port=port,
                console=self.console,
                card_descriptors=descriptors,
                kvm=kvm_works(),
            )
            log = stack.enter_context(self.disk.path.with_suffix(".qemu").open("wb"))
            self._process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=descriptors,
            )
            for card in cards:
                card.remote.close()
            host = self._host(port)
            self._await_boot(host)
            self._stack = stack.pop_all()
            return host

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stack.close()

    def _host(self, port: int) -> VirtualHost:
        folder = self.disk.path.parent
        host = VirtualHost(self.name, "127.0.0.1", self.disk.host_key, folder, self.console, port=port)
        host.known_hosts_path.write_text(f"[127.0.0.1]:{port} {host.host_key}\n", encoding="utf-8")
        host.ssh_config_path.write_text(ssh_config([host]), encoding="utf-8")
        return host

    def _await_boot(self, host: VirtualHost) -> None:
        deadline_s = time.monotonic() + self.boot_timeout_s
        while True:
            if self._process is None or self._process.poll() is not None:
                raise LabError(f"QEMU ended: {_tail(self.disk.path.with_suffix('.qemu'))}")
            if _ssh_answers(host.port):
                # It answers while systemd still starts what else there is.
                done = host.run("systemctl is-system-running --wait", timeout_s=self.boot_timeout_s)
                if done.stdout.strip() in ("running", "degraded"):
                    return
            if time.monotonic() > deadline_s:
                raise LabError(f"{self.name} did not boot within {self.boot_timeout_s:.0f} s: {_tail(self.console)}")
            time.sleep(_POLL_S)

    def _stop(self) -> None:
        if self._process is None:
            return
        # QEMU writes what it holds of the disk and ends.
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _ssh_answers(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
            # QEMU takes the connection before there is a guest behind it.
            return connection.recv(4) == b"SSH-"
    except OSError:
        return False


def _tail(path: Path) -> str:
    try:
        return "; ".join(path.read_text(encoding="utf-8", errors="replace").splitlines()[-15:]) or "it wrote nothing"
    except OSError as error:
        return str(error)
