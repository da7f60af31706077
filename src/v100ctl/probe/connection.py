"""Where a host is and how to get in: Ansible's variables, then the user's own ``ssh`` configuration.

Nothing here opens a connection; :mod:`v100ctl.probe.session` does.
"""

from __future__ import annotations

import enum
import os
import re
import shlex
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from v100ctl.errors import InventoryError, UnreachableError
from v100ctl.probe.text import last_line, printable

#: `ssh -G` only reads files, but `Match exec` in them may run anything.
SSH_CONFIG_TIMEOUT_S = 10.0
DEFAULT_CONNECT_TIMEOUT_S = 10.0


class HostKeyPolicy(enum.Enum):
    """What to do with a host whose key is not in ``known_hosts``. A key that has changed is always refused."""

    ASK = "ask"
    ACCEPT_NEW = "accept-new"
    REFUSE = "refuse"


@dataclass(frozen=True)
class HostKeyQuestion:
    """An unknown host key that a person is to judge."""

    host: str
    address: str
    key_type: str
    fingerprint: str
    note: str = ""


#: Asks a person; returns whether the key is to be trusted.
ConfirmHostKey = Callable[[HostKeyQuestion], bool]


@dataclass(frozen=True)
class Secrets:
    """Passwords given on the terminal (``-k``, ``-K``). Values in the inventory win over them, as in Ansible."""

    connection_password: str | None = field(default=None, repr=False)
    become_password: str | None = field(default=None, repr=False)


@dataclass(frozen=True)
class SshTarget:
    """What ``ssh`` itself would use to reach the host, from ``ssh -G``."""

    hostname: str
    port: int
    user: str
    identity_files: tuple[Path, ...] = ()
    certificate_files: tuple[Path, ...] = ()
    identities_only: bool = False
    identity_agent: str = "SSH_AUTH_SOCK"
    user_known_hosts_files: tuple[Path, ...] = ()
    global_known_hosts_files: tuple[Path, ...] = ()
    hash_known_hosts: bool = False
    host_key_alias: str = ""
    strict_host_key_checking: str = "ask"
    proxy_command: str = ""
    proxy_jump: str = ""
    connect_timeout_s: float = DEFAULT_CONNECT_TIMEOUT_S
    keepalive_s: int = 0
    address_family: str = "any"


@dataclass(frozen=True)
class Connection:
    """One host's way in, as the inventory gives it. Passwords are not shown by ``repr``."""

    host: str
    kind: str = "ssh"
    address: str = ""
    port: int | None = None
    user: str | None = None
    private_key_file: str | None = None
    ssh_executable: str = "ssh"
    ssh_arguments: tuple[str, ...] = ()
    python_interpreter: str | None = None
    become: bool | None = None
    become_user: str = "root"
    password: str | None = field(default=None, repr=False)
    become_password: str | None = field(default=None, repr=False)
    host_keys: HostKeyPolicy = HostKeyPolicy.ASK
    confirm_host_key: ConfirmHostKey | None = field(default=None, repr=False, compare=False)

    @classmethod
    def from_vars(
        cls,
        host: str,
        variables: Mapping[str, Any],
        *,
        ask: Secrets | None = None,
        host_keys: HostKeyPolicy = HostKeyPolicy.ASK,
        confirm_host_key: ConfirmHostKey | None = None,
    ) -> Connection:
        """Read a host's ``ansible_*`` variables.

        Args:
            host: The inventory's name for it.
            variables: All its variables, templated, with vault values decrypted.
            ask: Passwords from the terminal, for hosts whose variables hold none.
            host_keys: What to do with an unknown host key.
            confirm_host_key: Asks about one (with :attr:`HostKeyPolicy.ASK`); by default the terminal is used.

        Raises:
            InventoryError: a variable has a value that cannot be meant, or asks for what is not supported.
        """
        ask = ask or Secrets()
        read = _Reader(host, variables)
        kind = (read.string("ansible_connection") or "ssh").rpartition(".")[2]
        if kind in ("smart", "paramiko", "paramiko_ssh"):
            kind = "ssh"
        if kind not in ("ssh", "local"):
            raise InventoryError(f"{host}: `ansible_connection: {printable(kind)}` is not supported", hint="use `ssh` or `local`")
        method = (read.string("ansible_become_method") or "sudo").rpartition(".")[2]
        become = read.boolean("ansible_become")
        if method != "sudo" and become is not False:
            raise InventoryError(
                f"{host}: `ansible_become_method: {printable(method)}` is not supported",
                hint="use `sudo`, or connect as root and set `ansible_become: false`",
            )
        address = read.string("ansible_host", "ansible_ssh_host") or host
        user = read.string("ansible_user", "ansible_ssh_user")
        for name, value in (("ansible_host", address), ("ansible_user", user)):
            # A leading dash would be read as an option by `ssh`.
            if value is not None and (value.startswith("-") or not value.isprintable() or any(c.isspace() for c in value)):
                raise InventoryError(f"{host}: `{name}` cannot be {printable(value)!r}")
        return cls(
            host=host,
            kind=kind,
            address=address,
            port=read.port("ansible_port", "ansible_ssh_port"),
            user=user,
            private_key_file=read.string("ansible_ssh_private_key_file", "ansible_private_key_file"),
            ssh_executable=read.string("ansible_ssh_executable") or "ssh",
            ssh_arguments=(
                *read.arguments("ansible_ssh_args"),
                *read.arguments("ansible_ssh_common_args"),
                *read.arguments("ansible_ssh_extra_args"),
            ),
            python_interpreter=read.interpreter(),
            become=become,
            become_user=read.string("ansible_become_user") or "root",
            password=read.string("ansible_password", "ansible_ssh_password", "ansible_ssh_pass") or ask.connection_password,
            become_password=read.string("ansible_become_password", "ansible_become_pass", "ansible_sudo_pass")
            or ask.become_password,
            host_keys=host_keys,
            confirm_host_key=confirm_host_key,
        )

    def ssh_command(self, *options: str) -> list[str]:
        """``ssh`` with the user's arguments for this host, and the host last."""
        argv = [self.ssh_executable, *options, *self.ssh_arguments]
        if self.port is not None:
            argv += ["-p", str(self.port)]
        if self.user is not None:
            argv += ["-l", self.user]
        if self.private_key_file is not None:
            argv += ["-i", expand_home(self.private_key_file)]
        return [*argv, "--", self.address]

    def resolve(self) -> SshTarget:
        """Ask ``ssh -G`` what it would do.

        Raises:
            UnreachableError: ``ssh`` is missing, or refuses its configuration.
        """
        argv = self.ssh_command("-G")
        try:
            done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=SSH_CONFIG_TIMEOUT_S, check=False)
        except FileNotFoundError:
            raise UnreachableError(
                f"{self.host}: `{self.ssh_executable}` is not installed here",
                hint="install OpenSSH's client: `apt-get install openssh-client` or `dnf install openssh-clients`",
            ) from None
        except subprocess.TimeoutExpired:
            raise UnreachableError(
                f"{self.host}: `{shlex.join(argv)}` gave no answer within {SSH_CONFIG_TIMEOUT_S:g} s",
                hint="a `Match exec` in your ssh configuration may be stuck",
            ) from None
        if done.returncode != 0:
            raise UnreachableError(
                f"{self.host}: `{shlex.join(argv)}` failed: {last_line(done.stderr)}",
                hint="check `ansible_ssh_common_args`, `ansible_ssh_extra_args` and your ssh configuration",
            )
        return parse_ssh_config(done.stdout.decode("utf-8", "replace"), self.address)


class _Reader:
    """Ansible variables, with an error that names the one that is wrong."""

    def __init__(self, host: str, variables: Mapping[str, Any]) -> None:
        self._host = host
        self._variables = variables

    def string(self, *names: str) -> str | None:
        """The first of these variables that is set and not empty."""
        for name in names:
            value = self._variables.get(name)
            if value is None or value == "":
                continue
            if isinstance(value, bool | Mapping | list | tuple):
                raise InventoryError(f"{self._host}: `{name}` must be text")
            return str(value)
        return None

    def boolean(self, name: str) -> bool | None:
        """A truth value as Ansible reads it, or ``None`` where it is not set."""
        value = self._variables.get(name)
        if value is None or isinstance(value, bool):
            return value
        if str(value).strip().lower() in ("yes", "true", "on", "1", "y", "t", "1.0"):
            return True
        if str(value).strip().lower() in ("no", "false", "off", "0", "n", "f", "0.0"):
            return False
        raise InventoryError(f"{self._host}: `{name}` must be true or false, not {printable(str(value))!r}")

    def port(self, *names: str) -> int | None:
        """A TCP port."""
        value = self.string(*names)
        if value is None:
            return None
        if not re.fullmatch(r"[0-9]{1,5}", value) or not 0 < int(value) < 65536:
            raise InventoryError(f"{self._host}: `{names[0]}` must be a port number, not {printable(value)!r}")
        return int(value)

    def arguments(self, name: str) -> list[str]:
        """Options as a shell would split them, or a list of them."""
        value = self._variables.get(name)
        if isinstance(value, list | tuple):
            return [str(item) for item in value]
        try:
            return shlex.split(str(value)) if value else []
        except ValueError as error:
            raise InventoryError(f"{self._host}: `{name}` cannot be split into arguments: {error}") from None

    def interpreter(self) -> str | None:
        """A set path; ``None`` where it is to be found, which is what Ansible's ``auto*`` words mean too."""
        value = self.string("ansible_python_interpreter")
        if value is None or value.startswith("auto"):
            return None
        if not self.arguments("ansible_python_interpreter"):
            raise InventoryError(f"{self._host}: `ansible_python_interpreter` is blank", hint="leave it out to have one found")
        return value


def parse_ssh_config(output: str, host: str) -> SshTarget:
    """``ssh -G`` as an :class:`SshTarget`.

    Args:
        output: ``keyword value`` lines; a keyword may come several times.
        host: The name that was given to ``ssh``, for the tokens in paths.

    Raises:
        UnreachableError: a value is not what ``ssh`` prints, or asks for what cannot be done here.
    """
    values: dict[str, list[str]] = {}
    for line in output.splitlines():
        keyword, _, value = line.strip().partition(" ")
        values.setdefault(keyword.lower(), []).append(value.strip())

    def one(keyword: str, default: str = "") -> str:
        # `none` is how ssh says that a value is unset.
        value = values.get(keyword, [default])[0]
        return default if value.lower() == "none" else value

    port = one("port", "22")
    if not port.isdigit():
        raise UnreachableError(f"{host}: `ssh -G` printed {printable(port)!r} as the port")
    target = SshTarget(hostname=one("hostname", host), port=int(port), user=one("user"))
    if one("proxyusefdpass", "no") == "yes":
        raise UnreachableError(f"{host}: `ProxyUseFdpass yes` is not supported", hint="use `ProxyJump`, or `ssh -W %h:%p`")

    def paths(texts: Sequence[str]) -> tuple[Path, ...]:
        return tuple(Path(_expand(text, host, target)) for text in texts if text.lower() != "none")

    connect_timeout, keepalive = one("connecttimeout"), one("serveraliveinterval", "0")
    return SshTarget(
        hostname=target.hostname,
        port=target.port,
        user=target.user,
        identity_files=paths(values.get("identityfile", [])),
        certificate_files=paths(values.get("certificatefile", [])),
        identities_only=one("identitiesonly") == "yes",
        identity_agent=values.get("identityagent", ["SSH_AUTH_SOCK"])[0],
        user_known_hosts_files=_files(one("userknownhostsfile")),
        global_known_hosts_files=_files(one("globalknownhostsfile")),
        hash_known_hosts=one("hashknownhosts") == "yes",
        host_key_alias=one("hostkeyalias"),
        strict_host_key_checking=one("stricthostkeychecking", "ask"),
        proxy_command=one("proxycommand"),
        proxy_jump=one("proxyjump"),
        connect_timeout_s=float(connect_timeout) if connect_timeout.isdigit() else DEFAULT_CONNECT_TIMEOUT_S,
        keepalive_s=int(keepalive) if keepalive.isdigit() else 0,
        address_family=one("addressfamily", "any"),
    )


def _files(value: str) -> tuple[Path, ...]:
    """The files of a list. Other than in single paths, `ssh -G` has resolved their tokens by then."""
    # It prints blanks between files and does not quote a blank inside a name.
    names = [value] if " " in value and Path(value).exists() else value.split()
    return tuple(Path(expand_home(name)) for name in names)


def expand_home(text: str) -> str:
    """A leading ``~`` resolved; one of an unknown user stays, as with ``ssh``."""
    try:
        return str(Path(text).expanduser())
    except RuntimeError:
        return text


def _expand_tokens(text: str, tokens: Mapping[str, str]) -> str:
    return re.sub(r"%(.)", lambda found: tokens.get(found.group(1), found.group(0)), text)


def _expand(text: str, host: str, target: SshTarget) -> str:
    """Resolve the tokens that ssh_config(5) allows in paths."""
    tokens = {
        "%": "%",
        "d": str(Path.home()),
        "h": target.hostname,
        "n": host,
        "p": str(target.port),
        "r": target.user,
        "u": os.environ.get("USER", "") or target.user,
        "i": str(os.getuid()),
        "k": target.host_key_alias or host,
    }
    return expand_home(_expand_tokens(text, tokens))


def expand_proxy_command(command: str, host: str, target: SshTarget) -> str:
    """A ``ProxyCommand`` with its tokens resolved.

    Raises:
        UnreachableError: a name that would go to the shell holds characters that a shell obeys.
    """
    for value in (target.hostname, target.user, host):
        if not re.fullmatch(r"[A-Za-z0-9._:@%+\[\]][A-Za-z0-9._:@%+\[\]-]*", value):
            raise UnreachableError(f"{host}: {printable(value)!r} cannot be put into a `ProxyCommand`")
    return _expand_tokens(command, {"%": "%", "h": target.hostname, "n": host, "p": str(target.port), "r": target.user})


def jump_command(connection: Connection, target: SshTarget) -> list[str]:
    """The ``ssh`` that a ``ProxyJump`` stands for: the last hop forwards, the ones before it are its own jumps."""
    *before, last = target.proxy_jump.split(",")
    argv = [connection.ssh_executable, "-W", f"[{target.hostname}]:{target.port}"]
    if before:
        argv += ["-J", ",".join(before)]
    # Another configuration file is meant for the jump too; other options are not, as with `ssh -J`.
    arguments = connection.ssh_arguments
    for index, argument in enumerate(arguments):
        if argument == "-F" and index + 1 < len(arguments):
            argv += ["-F", arguments[index + 1]]
        elif argument.startswith("-F") and len(argument) > 2:
            argv += [argument]
    last = last.removeprefix("ssh://")
    user, _, address = last.rpartition("@")
    parts = re.fullmatch(r"(?:\[(?P<bracketed>[^\]]+)\]|(?P<plain>[^:\[\]]+))(?::(?P<port>[0-9]+))?", address)
    name = (parts["bracketed"] or parts["plain"]) if parts else address
    port = parts["port"] if parts else None
    if user:
        argv += ["-l", user]
    if port:
        argv += ["-p", port]
    return [*argv, "--", name]
