"""Lab hosts: containers that boot systemd and sshd and are reached over SSH like any other host.

:class:`Lab` brings them up and takes them down. What others need to reach them is kept in the lab folder: one key pair, a
``known_hosts`` with the keys as Docker shows them (so that no first contact has to be trusted), and an ``ssh_config`` by which
``ssh -F``, testinfra and scripts mean the same hosts. :func:`write_inventory` gives the same facts to Ansible.

A host is described by :class:`LabHost` and found by its name. Bringing up one that runs already changes nothing; one that has
stopped is started; one that was made of another image or in another way is replaced.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import socket
import struct
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import docker
import yaml
from docker.errors import DockerException, NotFound
from docker.models.containers import Container
from docker.models.images import Image

from v100ctl.apply.reporter import Reporter
from v100ctl.errors import LabError
from v100ctl.lab import LABEL, lab_dir
from v100ctl.lab.containers import execute, put_file, remove_container
from v100ctl.lab.engine import engine_errors
from v100ctl.lab.gpu import CONTROL, FakeCards, FakeDriver, files, set_up, specification
from v100ctl.lab.image import ADMIN, AUTHORIZED_KEYS, apt_settings
from v100ctl.locks import exclusive

#: The lab folder that a host belongs to: another user's hosts, on the same engine, are theirs.
FOLDER_LABEL = f"{LABEL}.folder"
#: A digest of the image and of how the container was made.
RECIPE_LABEL = f"{LABEL}.recipe"
#: Present on hosts that belong to one program's run: its pid and start time. Gone when that program is.
OWNER_LABEL = f"{LABEL}.owner"
#: Present on hosts that play machines with cards: which cards.
CARDS_LABEL = f"{LABEL}.cards"
#: The second account of a host that was given ``sudo_password``: same key, but sudo asks.
PASSWORD_ADMIN = "admin-pw"  # noqa: S105  (an account's name)

_CONTAINER_PREFIX = "v100ctl-"
_NAME = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,38}[a-z0-9])?")
_HOST_KEY = "/etc/ssh/ssh_host_ed25519_key.pub"
_KEY_TRIES = 5
_APT_SETTINGS = "/etc/apt/apt.conf.d/90v100ctl-lab"
#: What systemd understands as "shut down"; SIGTERM only makes it start itself again.
_STOP_SIGNAL = "SIGRTMIN+3"
_BOOT_TIMEOUT_S = 60.0
_POLL_S = 0.1
_BOOTED = frozenset({"running", "degraded"})

# The kernel's capabilities in the order of their bits (include/uapi/linux/capability.h).
_CAPABILITY_NAMES = (
    "CHOWN DAC_OVERRIDE DAC_READ_SEARCH FOWNER FSETID KILL SETGID SETUID SETPCAP LINUX_IMMUTABLE NET_BIND_SERVICE NET_BROADCAST "
    "NET_ADMIN NET_RAW IPC_LOCK IPC_OWNER SYS_MODULE SYS_RAWIO SYS_CHROOT SYS_PTRACE SYS_PACCT SYS_ADMIN SYS_BOOT SYS_NICE "
    "SYS_RESOURCE SYS_TIME SYS_TTY_CONFIG MKNOD LEASE AUDIT_WRITE AUDIT_CONTROL SETFCAP MAC_OVERRIDE MAC_ADMIN SYSLOG WAKE_ALARM "
    "BLOCK_SUSPEND AUDIT_READ PERFMON BPF CHECKPOINT_RESTORE"
)
_CAPABILITIES = tuple(_CAPABILITY_NAMES.split())
# A practice host has no business with the clock, the modules or the hardware of the machine that it shares.
_WITHHELD = frozenset({"SYS_TIME", "SYS_MODULE", "SYS_RAWIO"})


@dataclass(frozen=True)
class LabHost:
    """What a lab host is to be.

    Args:
        name: Lower-case letters, digits and inner hyphens; also its host name.
        sudo_password: Makes the account :data:`PASSWORD_ADMIN`, which logs in with the key like the other, but sudo asks it for
            this password.
        owner: A program's run that the host belongs to (see :func:`run_identity`); empty for a host that outlives it.
        cards: The V100s that it plays to have, none of them for a bare machine; ``None`` for a host that plays none, whose buses
            and modules are those of the machine that it shares. One that plays restarts with another boot id.
        driver: The driver that it starts with, where it plays.
    """

    name: str
    sudo_password: str | None = field(default=None, repr=False)
    owner: str = ""
    cards: FakeCards | None = None
    driver: FakeDriver = field(default_factory=FakeDriver)

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise LabError(
                f"{self.name!r} cannot be a lab host's name", hint="use up to 40 lower-case letters, digits and inner hyphens"
            )

    @property
    def container_name(self) -> str:
        """What Docker calls it."""
        return _CONTAINER_PREFIX + self.name


@dataclass(frozen=True)
class SshHost:
    """A host that answers on SSH. ``host_key`` is its public key in OpenSSH's one-line form, without a comment."""

    name: str
    address: str
    host_key: str
    folder: Path
    user: str = field(default=ADMIN, kw_only=True)
    port: int = field(default=22, kw_only=True)

    @property
    def key_path(self) -> Path:
        """The private key that :attr:`user` is logged in with."""
        return self.folder / "id_ed25519"

    @property
    def known_hosts_path(self) -> Path:
        """Holds the host's key, by name and by address."""
        return self.folder / "known_hosts"

    @property
    def ssh_config_path(self) -> Path:
        """Knows the host by its name."""
        return self.folder / "ssh_config"

    def ssh_command(self, *command: str) -> list[str]:
        """The argument list that runs ``command`` on the host, or a shell where none is given."""
        return ["ssh", "-F", str(self.ssh_config_path), self.name, *([shlex.join(command)] if command else [])]

    def variables(self, user: str | None = None) -> dict[str, Any]:
        """The host's connection as Ansible variables. The user's own SSH configuration plays no part in it.

        Args:
            user: Another account than :attr:`user`.
        """
        options = ("-F", "/dev/null", "-o", "IdentitiesOnly=yes", "-o", "GlobalKnownHostsFile=/dev/null")
        known_hosts = f"UserKnownHostsFile={ssh_quote(str(self.known_hosts_path))}"
        return {
            "ansible_host": self.address,
            "ansible_port": self.port,
            "ansible_user": user or self.user,
            "ansible_ssh_private_key_file": str(self.key_path),
            "ansible_ssh_common_args": shlex.join([*options, "-o", known_hosts]),
            "ansible_become": True,
        }


@dataclass(frozen=True)
class RunningHost(SshHost):
    """A container that answers on SSH."""

    container: Container = field(repr=False)

    def execute(self, *command: str) -> tuple[int | None, str]:
        """Runs a command as root without SSH: to break something, or to look at a host that SSH does not reach."""
        return execute(self.container, command)


@dataclass(frozen=True)
class HostState:
    """A lab host as Docker knows it; ``address`` is empty while it does not run, ``cards`` where it plays none."""

    name: str
    status: str
    address: str
    image: str
    cards: str = ""


class Lab:
    """The lab hosts of one lab folder.

    Args:
        client: An engine that answers (see :func:`~v100ctl.lab.engine.ensure_docker`).
        folder: Where keys and connection files are kept; :func:`~v100ctl.lab.lab_dir` when not given.
    """

    def __init__(self, client: docker.DockerClient, folder: Path | None = None) -> None:
        self.client = client
        self.folder = (folder or lab_dir()).absolute()

    # --- for callers ------------------------------------------------------------------------------------------------

    def up(self, host: LabHost, image: Image, reporter: Reporter) -> RunningHost:
        """Brings ``host`` up and waits until systemd has booted and sshd answers.

        Safe to call for a host that runs, has stopped, or was left half made by a program that was killed.

        Raises:
            LabError: It does not boot; the message ends with its journal. A container of its name belongs to somebody else.
        """
        with exclusive(self._lock(host.name)), engine_errors(f"bring up the lab host {host.name}"):
            container = self._container(host, image)
            self._furnish(container, host)
            if container.status != "running":
                with reporter.phase(f"booting the lab host {host.name}"):
                    container.start()
                    self._await_boot(container, host.name)
            else:
                self._await_boot(container, host.name)
            self._finish(container, host)
            return self._refresh()[host.name]

    def running(self, name: str) -> RunningHost:
        """A host that was brought up before.

        Raises:
            LabError: It does not run.
        """
        with engine_errors(f"look for the lab host {name}"):
            hosts = self._refresh()
        if name not in hosts:
            raise LabError(f"the lab host {name} does not run", hint="`v100ctl lab list` lists them; `v100ctl lab up` starts one")
        return hosts[name]

    def reboot(self, name: str) -> RunningHost:
        """Restarts a host that plays cards as ``systemctl reboot`` does, and waits until it is back with another boot id.

        Raises:
            LabError: It does not run, plays no cards, or does not come back.
        """
        host = self.running(name)
        if CARDS_LABEL not in host.container.labels:
            raise LabError(f"the lab host {name} plays no cards, so nothing starts it again", hint="`v100ctl lab up` makes one")
        with exclusive(self._lock(name)), engine_errors(f"restart the lab host {name}"):
            before = _boot_id(host.container)
            execute(host.container, ["systemctl", "reboot"])
            deadline_s = time.monotonic() + _BOOT_TIMEOUT_S
            while _boot_id(host.container) in ("", before):
                if time.monotonic() > deadline_s:
                    raise LabError(f"the lab host {name} did not restart within {_BOOT_TIMEOUT_S:.0f} s")
                time.sleep(_POLL_S)
            self._await_boot(host.container, name)
            return self._refresh()[name]

    def down(self, *names: str) -> list[str]:
        """Removes hosts, all of this folder's when none is named. Returns the names of those that were there."""
        with engine_errors("remove lab hosts"):
            removed = []
            for container in self._containers():
                name = container.labels[LABEL]
                if names and name not in names:
                    continue
                with exclusive(self._lock(name)):
                    remove_container(container)
                removed.append(name)
            self._refresh()
        return sorted(removed)

    def down_orphans(self) -> list[str]:
        """Removes hosts whose owner, a program's run, is no more. Returns their names."""
        with engine_errors("look for abandoned lab hosts"):
            owners = {container.labels[LABEL]: container.labels.get(OWNER_LABEL, "") for container in self._containers()}
        orphans = [name for name, owner in owners.items() if owner and not is_running(owner)]
        return self.down(*orphans) if orphans else []

    def list(self) -> list[HostState]:
        """All hosts of this folder by name, running or not."""
        with engine_errors("list the lab hosts"):
            states = [
                HostState(
                    name=container.labels[LABEL],
                    status=container.status,
                    address=_address(container),
                    image=str(container.attrs["Config"]["Image"]),
                    cards=container.labels.get(CARDS_LABEL, ""),
                )
                for container in self._containers()
            ]
        return sorted(states, key=lambda state: state.name)

    # --- the container ----------------------------------------------------------------------------------------------

    def _lock(self, name: str) -> Path:
        return self.folder / "locks" / name

    def _containers(self) -> Sequence[Container]:
        labels = [LABEL, f"{FOLDER_LABEL}={self.folder}"]
        # Without the details first: one that vanishes while they are asked for is not an error.
        return self.client.containers.list(all=True, filters={"label": labels}, ignore_removed=True)

    def _container(self, host: LabHost, image: Image) -> Container:
        """The host's container as it should be, made when it is not there; perhaps not started."""
        options = _creation_options(self.client)
        made_of: list[Any] = [image.id, options]
        if host.cards is not None:
            _play_cards(options)
            made_of.append(specification(host.name, host.cards, host.driver))
        recipe = hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()[:12]
        try:
            container = self.client.containers.get(host.container_name)
        except NotFound:
            container = None
        if container is not None:
            if container.labels.get(FOLDER_LABEL) != str(self.folder):
                whose = container.labels.get(FOLDER_LABEL)
                raise LabError(
                    f"a container named {host.container_name} is there already and "
                    + (f"belongs to the lab in {whose}" if whose else "is not a lab host"),
                    hint=f"remove it with `docker rm -f {host.container_name}`, or use another name",
                )
            same = container.labels.get(RECIPE_LABEL) == recipe and container.labels.get(OWNER_LABEL, "") == host.owner
            if same and container.status in ("created", "exited", "running", "restarting"):
                return container
            # Made otherwise, or paused, dying, dead: a host holds nothing that could not be made again.
            remove_container(container)
        labels = {LABEL: host.name, FOLDER_LABEL: str(self.folder), RECIPE_LABEL: recipe}
        if host.owner:
            labels[OWNER_LABEL] = host.owner
        if host.cards is not None:
            labels[CARDS_LABEL] = str(host.cards)
        return self.client.containers.create(
            image.id or "", name=host.container_name, hostname=host.name, labels=labels, **options
        )

    def _furnish(self, container: Container, host: LabHost) -> None:
        """Puts in what every boot needs anew: the key that opens the account, apt's way to the mirrors, the cards."""
        authorized = f"{self._public_key()} v100ctl lab\n".encode()
        put_file(container, AUTHORIZED_KEYS, authorized, mode=0o644)
        put_file(container, _APT_SETTINGS, apt_settings().encode(), mode=0o600)
        if host.cards is not None and not container.put_archive("/", files(host.name, host.cards, host.driver)):
            raise LabError(f"Docker Engine did not take the cards of container {container.name}", hint="see the engine's log")

    def _await_boot(self, container: Container, name: str) -> None:
        deadline_s = time.monotonic() + _BOOT_TIMEOUT_S
        state, reachable = "not started", False
        while True:
            container.reload()
            if container.status == "exited":
                raise LabError(
                    f"the lab host {name} stopped while it booted: {_last_words(container)}", hint=_boot_hint(container)
                )
            if container.status == "running":
                state = _system_state(container)
                reachable = _ssh_answers(_address(container))
                if state in _BOOTED and reachable:
                    return
            if time.monotonic() > deadline_s:
                missing = f"systemd is {state}" if state not in _BOOTED else f"sshd does not answer on {_address(container)}"
                raise LabError(
                    f"the lab host {name} did not boot within {_BOOT_TIMEOUT_S:.0f} s: {missing}: {_last_words(container)}",
                    hint=_boot_hint(container),
                )
            time.sleep(_POLL_S)

    def _finish(self, container: Container, host: LabHost) -> None:
        if host.cards is not None:
            set_up(container, host.name)
        if host.sudo_password is None:
            return
        # Through a file, because an argument or variable would show in `docker inspect` and in the process list.
        put_file(container, "/root/.lab-password", f"{PASSWORD_ADMIN}:{host.sudo_password}\n".encode(), mode=0o600)
        script = f"""
            set -eu
            id {PASSWORD_ADMIN} >/dev/null 2>&1 || useradd --create-home --shell /bin/bash {PASSWORD_ADMIN}
            chpasswd < /root/.lab-password
            rm -f /root/.lab-password
            echo '{PASSWORD_ADMIN} ALL=(ALL:ALL) ALL' > /etc/sudoers.d/lab-{PASSWORD_ADMIN}
            chmod 0440 /etc/sudoers.d/lab-{PASSWORD_ADMIN}
        """
        code, output = execute(container, ["/bin/sh", "-c", script])
        if code != 0:
            raise LabError(f"the lab host {host.name} could not be given the account {PASSWORD_ADMIN}: {output.strip()}")

    # --- the lab folder ---------------------------------------------------------------------------------------------

    def _public_key(self) -> str:
        """The lab's public key in OpenSSH's form; the pair is made at the first call."""
        with exclusive(self._lock("id_ed25519")):
            return key_pair(self.folder / "id_ed25519")

    def _refresh(self) -> dict[str, RunningHost]:
        """Writes ``known_hosts`` and ``ssh_config`` for the hosts that run now, and returns these.

        They are made from what Docker says each time: an address passes from host to host. A host that is restarting keeps its
        line in ``known_hosts``: whoever waits for it has to know it again.
        """
        with exclusive(self._lock("ssh_config")):
            containers = self._containers()
            hosts = {host.name: host for host in map(self._running_host, containers) if host is not None}
            known = [f"{host.name},{host.address} {host.host_key}\n" for _, host in sorted(hosts.items())]
            away = {container.labels[LABEL] for container in containers} - set(hosts)
            known += _lines_of(self.folder / "known_hosts", away, taken={host.address for host in hosts.values()})
            _write(self.folder / "known_hosts", "".join(known), mode=0o644)
            _write(self.folder / "ssh_config", ssh_config(list(hosts.values())), mode=0o644)
        return hosts

    def _running_host(self, container: Container) -> RunningHost | None:
        address = _address(container)
        if container.status != "running" or not address:
            return None
        key = read_host_key(container)
        return None if key is None else RunningHost(container.labels[LABEL], address, key, self.folder, container)


def read_host_key(container: Container) -> str | None:
    """The host's public key, type and data; ``None`` where it has stopped, or has none yet."""
    # An engine under load now and then gives the status of `cat` without what it wrote. An empty key in known_hosts would cut
    # the host off from everybody who uses it at that moment.
    for _ in range(_KEY_TRIES):
        try:
            code, output = execute(container, ["cat", _HOST_KEY])
        except DockerException:
            # It stopped after it was listed.
            return None
        words = output.split()
        if code != 0:
            return None
        if len(words) >= 2:
            return " ".join(words[:2])
    return None


def _lines_of(known_hosts: Path, names: Collection[str], *, taken: Collection[str]) -> list[str]:
    """The lines of hosts by name whose address no other has now."""
    try:
        lines = known_hosts.read_text(encoding="utf-8").splitlines(keepends=True)
    except FileNotFoundError:
        return []
    split = [(line.partition(" ")[0].partition(","), line) for line in lines]
    return [line for (name, _, address), line in split if name in names and address not in taken]


# --- how a container is made ------------------------------------------------------------------------------------------


def capability_lists(process_status: str) -> tuple[list[str], list[str]]:
    """What to add to and drop from Docker's capabilities so that a container gets all that can be given to it.

    ``--privileged`` and ``--cap-add ALL`` ask for every capability that the engine knows, and the kernel refuses the container
    when the engine itself lacks one of them, as it does inside many virtual machines and containers.

    Args:
        process_status: ``/proc/PID/status`` of the engine.

    Returns:
        Names to add and names to drop. What a lab host must never do to the machine it shares is among the latter.
    """
    masks = dict(re.findall(r"^(Cap\w+):\s*([0-9a-f]+)$", process_status, re.MULTILINE))
    held = int(masks.get("CapPrm", "f" * 16), 16) & int(masks.get("CapBnd", "f" * 16), 16)
    missing = {name for bit, name in enumerate(_CAPABILITIES) if not held >> bit & 1}
    return ["ALL"], [name for name in _CAPABILITIES if name in missing | _WITHHELD]


def _engine_status() -> str:
    """``/proc/PID/status`` of the engine behind the socket, or of this process where the engine cannot be seen."""
    address = os.environ.get("DOCKER_HOST", "").removeprefix("unix://") or "/var/run/docker.sock"
    pid = 0
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(address)
            pid = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
    except OSError:
        pid = 0
    for path in (Path(f"/proc/{pid}/status"), Path("/proc/self/status")):
        try:
            return path.read_text(encoding="ascii", errors="replace")
        except OSError:
            continue
    return ""


def _creation_options(client: docker.DockerClient) -> dict[str, Any]:
    """Everything about a lab host's container that does not depend on the host. As plain data: a digest is made of it."""
    add, drop = capability_lists(_engine_status())
    options: dict[str, Any] = {
        "cap_add": add,
        "cap_drop": drop,
        # `no-new-privileges` may be the engine's default, and sudo needs them.
        "security_opt": ["seccomp=unconfined", "apparmor=unconfined", "no-new-privileges=false"],
        "environment": {"container": "docker"},
        "init": False,
        "stop_signal": _STOP_SIGNAL,
        "tmpfs": {"/run": "mode=755", "/run/lock": "mode=1777"},
        "userns_mode": "host",
    }
    if str(client.info().get("CgroupVersion") or "1") == "2":
        # The container sees its own part of the tree only, but read-only: systemd has to make groups in it.
        options["cgroupns"] = "private"
        options["command"] = ["/bin/sh", "-c", "mount -o remount,rw /sys/fs/cgroup && exec /sbin/init"]
    else:
        options["cgroupns"] = "host"
        options["command"] = ["/sbin/init"]
        options["volumes"] = {"/sys/fs/cgroup": {"bind": "/sys/fs/cgroup", "mode": "rw"}}
    return options


def _play_cards(options: dict[str, Any]) -> None:
    """Changes a container's options to those of a machine with cards: it is laid out before systemd starts, and restarts."""
    start = options["command"][-1] if len(options["command"]) == 3 else "exec /sbin/init"
    options["command"] = ["/bin/sh", "-c", f"{CONTROL} boot; {start}"]
    options["restart_policy"] = {"Name": "unless-stopped"}


# --- looking at a container -------------------------------------------------------------------------------------------


def _address(container: Container) -> str:
    """Where this machine reaches the container; empty while it has no address."""
    networks = container.attrs.get("NetworkSettings", {}).get("Networks", {})
    return next((str(network["IPAddress"]) for network in networks.values() if network.get("IPAddress")), "")


def _system_state(container: Container) -> str:
    try:
        _, output = execute(container, ["systemctl", "is-system-running"])
    except DockerException:
        # Stopped in between; the next look at its status says so.
        return "gone"
    return output.strip().splitlines()[-1] if output.strip() else "silent"


def _boot_id(container: Container) -> str:
    """The host's boot id; empty while it is down."""
    try:
        code, output = execute(container, ["cat", "/proc/sys/kernel/random/boot_id"])
    except DockerException:
        return ""
    return output.strip() if code == 0 else ""


def _ssh_answers(address: str) -> bool:
    if not address:
        return False
    try:
        with socket.create_connection((address, 22), timeout=2) as connection:
            return connection.recv(4) == b"SSH-"
    except OSError:
        return False


def _last_words(container: Container) -> str:
    """The end of the host's journal, or of its console while there is no journal."""
    try:
        if container.status == "running":
            _, text = execute(
                container, ["journalctl", "--boot", "--lines=15", "--no-pager", "--output=cat", "--priority=warning"]
            )
        else:
            text = container.logs(tail=15).decode("utf-8", "replace")
    except DockerException as error:
        text = str(error)
    return text.strip() or "it left no message"


def _boot_hint(container: Container) -> str:
    return f"`docker exec {container.name} journalctl -b` shows more; `v100ctl try --down` removes it"


# --- files for SSH and Ansible ----------------------------------------------------------------------------------------


def ssh_quote(value: str) -> str:
    """A path as OpenSSH's configuration needs it: per cent signs doubled, quoted where it holds blanks, quotes or backslashes."""
    value = value.replace("%", "%%")
    if not re.search(r"[\s\"'\\#]", value):
        return value
    escaped = re.sub(r'(["\\])', r"\\\1", value)
    return f'"{escaped}"'


def ssh_config(hosts: Sequence[SshHost]) -> str:
    """An OpenSSH client configuration that knows the hosts by name."""
    lines = ["# Written by v100ctl for the lab hosts that run now.\n"]
    for host in sorted(hosts, key=lambda host: host.name):
        settings = {
            "HostName": host.address,
            "Port": str(host.port),
            "User": host.user,
            "IdentityFile": ssh_quote(str(host.key_path)),
            "IdentitiesOnly": "yes",
            "UserKnownHostsFile": ssh_quote(str(host.known_hosts_path)),
            "GlobalKnownHostsFile": "/dev/null",
            "StrictHostKeyChecking": "yes",
        }
        lines.append(f"\nHost {host.name}\n")
        lines += [f"    {name} {value}\n" for name, value in settings.items()]
    return "".join(lines)


def key_pair(path: Path) -> str:
    """The public half, in OpenSSH's one-line form, of the private key at ``path``, which is made where there is none."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    try:
        key = serialization.load_ssh_private_key(path.read_bytes(), password=None)
    except FileNotFoundError:
        key = Ed25519PrivateKey.generate()
        text = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption())
        _write(path, text.decode("ascii"), mode=0o600)
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    return public.decode("ascii")


def write_inventory(
    path: Path,
    hosts: Mapping[str, Mapping[str, Any]],
    *,
    groups: Mapping[str, Sequence[str]] | None = None,
    variables: Mapping[str, Any] | None = None,
) -> Path:
    """Writes an Ansible inventory.

    Args:
        path: The file, made aside and renamed in.
        hosts: Each host's variables, by its inventory name (see :meth:`RunningHost.variables`).
        groups: Groups and the names of their hosts.
        variables: Variables of all hosts.
    """
    document: dict[str, Any] = {"hosts": {name: dict(values) for name, values in hosts.items()}}
    if groups:
        document["children"] = {group: {"hosts": {name: {} for name in names}} for group, names in groups.items()}
    if variables:
        document["vars"] = dict(variables)
    text = yaml.safe_dump({"all": document}, sort_keys=False, allow_unicode=True, width=120)
    _write(path, f"---\n# Written by v100ctl; the next run that needs it writes it again.\n{text}", mode=0o600)
    return path


def _write(path: Path, text: str, *, mode: int) -> None:
    """Puts ``text`` at ``path`` in one step, so that no reader sees a part of it."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            stream.write(text)
        Path(name).chmod(mode)
        Path(name).rename(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


# --- who a host belongs to --------------------------------------------------------------------------------------------


def run_identity() -> str:
    """This program's run, as a text that no later program has: its pid and when it started."""
    return _identity(os.getpid())


def is_running(identity: str) -> bool:
    """Whether the program's run that :func:`run_identity` named is still going on."""
    pid = identity.partition(":")[0]
    return pid.isdigit() and _identity(int(pid)) == identity


def _identity(pid: int) -> str:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    # The 22nd field, counted after the name, which may hold spaces and parentheses.
    return f"{pid}:{text.rpartition(')')[2].split()[19]}"
