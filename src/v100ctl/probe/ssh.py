"""A session over SSH, by paramiko: reached, trusted and logged into as the user's ``ssh`` would do it."""

from __future__ import annotations

import base64
import contextlib
import io
import logging
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Literal, cast

import paramiko
from cryptography.exceptions import UnsupportedAlgorithm
from paramiko.agent import AgentSSH
from paramiko.pkey import UnknownKeyType
from paramiko.ssh_exception import IncompatiblePeer

from v100ctl.errors import UnreachableError
from v100ctl.probe import known_hosts
from v100ctl.probe.connection import (
    Connection,
    HostKeyPolicy,
    HostKeyQuestion,
    SshTarget,
    expand_home,
    expand_proxy_command,
    jump_command,
)
from v100ctl.probe.deadline import Deadline
from v100ctl.probe.known_hosts import KnownHost
from v100ctl.probe.session import DEFAULT_TIMEOUT_S, Conversation, Result, TcpStream, converse
from v100ctl.probe.text import last_line, printable

# paramiko logs what it also raises; without a handler that would land on the terminal.
logging.getLogger("paramiko").addHandler(logging.NullHandler())

#: Signature algorithms for each type of key that `known_hosts` holds and paramiko knows, best first.
_KEY_ALGORITHMS = {
    "ssh-ed25519": ("ssh-ed25519",),
    "ecdsa-sha2-nistp256": ("ecdsa-sha2-nistp256",),
    "ecdsa-sha2-nistp384": ("ecdsa-sha2-nistp384",),
    "ecdsa-sha2-nistp521": ("ecdsa-sha2-nistp521",),
    "ssh-rsa": ("rsa-sha2-512", "rsa-sha2-256"),
}
#: How long a host may leave what it is sent without a sign, in the middle of a session.
SILENCE_LIMIT_S = 120.0
#: Only one question may stand on the terminal.
_ASKING = threading.Lock()


def confirm_on_terminal(question: HostKeyQuestion) -> bool:
    """Show an unknown key's fingerprint and ask, as ``ssh`` does. False where there is no terminal."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return False
    sys.stderr.write(
        f"The host key of {printable(question.host)} ({printable(question.address)}) is not known.\n"
        f"{printable(question.key_type)} key fingerprint is {question.fingerprint}\n"
        + (f"{printable(question.note, 500)}\n" if question.note else "")
    )
    while True:
        sys.stderr.write("Connect and remember it? (yes/no/[fingerprint]) ")
        sys.stderr.flush()
        answer = sys.stdin.readline()
        if answer.strip() == question.fingerprint or answer.strip().lower() == "yes":
            return True
        if not answer or answer.strip().lower() == "no":
            return False


class HostKeyCheck:
    """What ``known_hosts`` says about one host."""

    def __init__(self, connection: Connection, target: SshTarget) -> None:
        self._connection = connection
        self._target = target
        # An alias stands for the host whatever the port.
        self.name = target.host_key_alias or known_hosts.lookup_name(target.hostname, target.port)
        self.entries = self._load()

    def _load(self) -> list[KnownHost]:
        files = (*self._target.user_known_hosts_files, *self._target.global_known_hosts_files)
        entries = known_hosts.load(files)
        found = [entry for entry in entries if entry.matches(self.name)]
        if not any(not entry.marker for entry in found) and self.name != self._target.hostname:
            # As `ssh` does: a key kept without the port counts too, but only when it fits.
            self._portless = [entry for entry in entries if not entry.marker and entry.matches(self._target.hostname)]
        else:
            self._portless = []
        return found

    def preferred_algorithms(self, offered: Sequence[str]) -> tuple[str, ...]:
        """``offered`` with the types of known keys first: a host is not asked about because another type was negotiated."""
        types = dict.fromkeys(entry.key_type for entry in (*self.entries, *self._portless) if not entry.marker)
        first = [algorithm for key_type in types for algorithm in _KEY_ALGORITHMS.get(key_type, ()) if algorithm in offered]
        return (*first, *(algorithm for algorithm in offered if algorithm not in first))

    def verify(self, key_type: str, key: bytes, deadline: Deadline) -> None:
        """Accept the host's key or refuse it.

        Raises:
            UnreachableError: the key is revoked, another one than is known, or unknown and not accepted.
        """
        if self._known(key_type, key):
            return
        fingerprint = known_hosts.fingerprint(key)
        policy = self._connection.host_keys
        # The user's own configuration may be stricter than what was asked for, or say that new keys are fine.
        if self._target.strict_host_key_checking in ("yes", "true"):
            policy = HostKeyPolicy.REFUSE
        elif self._target.strict_host_key_checking == "accept-new" and policy is HostKeyPolicy.ASK:
            policy = HostKeyPolicy.ACCEPT_NEW
        if policy is HostKeyPolicy.REFUSE:
            raise self._unknown(key_type, fingerprint)
        if policy is HostKeyPolicy.ASK:
            with deadline.paused(), _ASKING:
                # It may have been answered meanwhile, for the same host under another name.
                self.entries = self._load()
                if self._known(key_type, key):
                    return
                confirm = self._connection.confirm_host_key or confirm_on_terminal
                address = f"{self._target.hostname} port {self._target.port}"
                question = HostKeyQuestion(self._connection.host, address, key_type, fingerprint, self._note())
                if not confirm(question):
                    raise self._unknown(key_type, fingerprint)
                self._remember(key_type, key)
            return
        self._remember(key_type, key)

    def _known(self, key_type: str, key: bytes) -> bool:
        """Whether this key is known as the host's.

        Raises:
            UnreachableError: it is revoked, or another one is known.
        """
        host = self._connection.host
        plain = [entry for entry in self.entries if not entry.marker]
        revoked = next((entry for entry in self.entries if entry.marker == "@revoked" and entry.key == key), None)
        if revoked is not None:
            raise UnreachableError(
                f"{host}: its {key_type} host key {known_hosts.fingerprint(key)} is marked as revoked in {revoked.place}",
                hint="the key was given up; let the host make new ones, and never connect while it shows this one",
            )
        if any(entry.key == key for entry in (*plain, *self._portless)):
            return True
        # A host that was known by one type of key and now shows only another has changed too.
        comparable = [entry for entry in plain if entry.key_type in _KEY_ALGORITHMS]
        if comparable:
            same_type = [entry for entry in comparable if entry.key_type == key_type]
            known = (same_type or comparable)[0]
            raise UnreachableError(
                f"{host}: its host key has changed: {known.place} has {known.key_type} {known_hosts.fingerprint(known.key)}, "
                f"the host shows {key_type} {known_hosts.fingerprint(key)}",
                hint="somebody may be in between; if the host was really set up anew, "
                f"`ssh-keygen -f {shlex.quote(str(known.path))} -R {shlex.quote(self.name)}` forgets the old key",
            )
        return False

    def _note(self) -> str:
        authority = next((entry for entry in self.entries if entry.marker == "@cert-authority"), None)
        if authority is None:
            return ""
        return f"{authority.place} trusts a certificate authority for this host; v100ctl does not check host certificates"

    def _unknown(self, key_type: str, fingerprint: str) -> UnreachableError:
        note = self._note()
        return UnreachableError(
            f"{self._connection.host}: the host key of {self.name} is not known ({key_type} {fingerprint})"
            + (f"; {note}" if note else ""),
            hint="compare it with `ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub` on the host, then connect once with `ssh`, "
            "or give `--accept-new-host-keys`",
        )

    def _remember(self, key_type: str, key: bytes) -> None:
        if not self._target.user_known_hosts_files:
            raise UnreachableError(
                f"{self._connection.host}: there is no file to remember its host key in", hint="set `UserKnownHostsFile`"
            )
        path = self._target.user_known_hosts_files[0]
        try:
            known_hosts.append(path, [self.name], key_type, key, hashed=self._target.hash_known_hosts)
        except OSError as error:
            raise UnreachableError(
                f"{self._connection.host}: its host key cannot be remembered in {path}: {error.strerror or error}",
                hint="make the file writable, or name another one with `-o UserKnownHostsFile=...`",
            ) from None


class Proxy:
    """A program (``ProxyCommand``, ``ProxyJump``) whose stdin and stdout are the connection."""

    def __init__(self, argv: Sequence[str]) -> None:
        self.socket, theirs = socket.socketpair()
        # A file and no pipe: nobody reads along, and a pipe that is full would stop the program.
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the program, see close()
        # A session of its own: no terminal to ask on, and Ctrl-C is ours. No graphical question either.
        environment = {**os.environ, "SSH_ASKPASS_REQUIRE": "never"}
        try:
            self._process = subprocess.Popen(
                argv,
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=self._said,
                env=environment,
                start_new_session=True,
            )
        except OSError:
            self.socket.close()
            self._said.close()
            raise
        finally:
            theirs.close()

    def said(self) -> str:
        """The last line that it wrote on stderr."""
        size_bytes = self._said.seek(0, os.SEEK_END)
        self._said.seek(max(0, size_bytes - 4096))
        return last_line(self._said.read(4096))

    def close(self) -> None:
        """End it."""
        self.socket.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._said.close()


class ChannelProcess:
    """A program on the host, behind one channel."""

    def __init__(self, channel: paramiko.Channel) -> None:
        self._channel = channel
        # Not `channel.fileno()`: its pipe is closed by the reader while the transport's thread may write to it, which ends the
        # whole connection, or writes to whatever got the descriptor next.
        self._heard = threading.Event()
        channel.in_buffer.set_event(self._heard)
        channel.in_stderr_buffer.set_event(self._heard)

    def send(self, data: bytes) -> int:
        """See :class:`v100ctl.probe.session.Process`. A program that does not read its input is no error."""
        if not self._channel.send_ready():
            return len(data) if self._channel.closed else 0
        try:
            return self._channel.send(data)
        except OSError:
            return len(data)

    def close_stdin(self) -> None:
        """See :class:`v100ctl.probe.session.Process`."""
        with contextlib.suppress(OSError, EOFError):
            self._channel.shutdown_write()

    def receive(self, wait_s: float, *, writing: bool) -> tuple[bytes, bytes]:
        """See :class:`v100ctl.probe.session.Process`."""
        if not self._channel.recv_ready() and not self._channel.recv_stderr_ready():
            # Once both streams have ended, only the exit code is waited for. paramiko has no sign for room in the window, so that
            # is looked at again soon.
            event = self._channel.status_event if self._channel.eof_received else self._heard
            event.wait(min(wait_s, 0.02 if writing else wait_s))
        stdout = self._channel.recv(1 << 18) if self._channel.recv_ready() else b""
        stderr = self._channel.recv_stderr(1 << 18) if self._channel.recv_stderr_ready() else b""
        return stdout, stderr

    def ended(self) -> bool:
        """See :class:`v100ctl.probe.session.Process`."""
        if self._channel.recv_ready() or self._channel.recv_stderr_ready():
            return False
        return bool(self._channel.closed or (self._channel.eof_received and self._channel.exit_status_ready()))

    def exit_code(self) -> int | None:
        """See :class:`v100ctl.probe.session.Process`. A channel that closes without a code on a live connection met a signal."""
        if self._channel.exit_status_ready():
            code = self._channel.recv_exit_status()
            transport = self._channel.get_transport()
            return None if code == -1 and not transport.is_active() else code
        return None

    def kill(self) -> None:
        """See :class:`v100ctl.probe.session.Process`: the program loses its streams, which is all that SSH offers."""
        self._channel.close()


class ChannelStream:
    """A TCP connection that the host opened for us (``direct-tcpip``).

    As with a socket, closing it leaves readers from :meth:`makefile` alive; the last one to close ends the connection.
    """

    def __init__(self, channel: paramiko.Channel) -> None:
        self._channel = channel
        self._readers = 0
        self._closed = False

    def sendall(self, data: bytes, /) -> None:
        """See :class:`v100ctl.probe.session.TcpStream`."""
        self._channel.sendall(data)

    def recv(self, size: int, /) -> bytes:
        """See :class:`v100ctl.probe.session.TcpStream`."""
        return self._channel.recv(size)

    def makefile(self, mode: Literal["rb"], /) -> io.BufferedReader:
        """See :class:`v100ctl.probe.session.TcpStream`."""
        self._readers += 1
        return io.BufferedReader(_StreamReader(self))

    def settimeout(self, timeout_s: float | None, /) -> None:
        """See :class:`v100ctl.probe.session.TcpStream`."""
        self._channel.settimeout(timeout_s)

    def close(self) -> None:
        """See :class:`v100ctl.probe.session.TcpStream`."""
        self._closed = True
        if not self._readers:
            self._channel.close()

    def reader_closed(self) -> None:
        """A reader from :meth:`makefile` is done."""
        self._readers -= 1
        if self._closed:
            self.close()


class _StreamReader(io.RawIOBase):
    """The reading half of a forwarded connection."""

    def __init__(self, stream: ChannelStream) -> None:
        self._stream = stream

    def readable(self) -> bool:
        """Yes."""
        return True

    def readinto(self, buffer: object, /) -> int:
        """Read into ``buffer``; 0 at the end."""
        view = memoryview(cast(bytearray, buffer)).cast("B")
        data = self._stream.recv(len(view))
        view[: len(data)] = data
        return len(data)

    def close(self) -> None:
        """Close it; twice is fine."""
        if not self.closed:
            self._stream.reader_closed()
        super().close()


class SshSession:
    """A :class:`v100ctl.probe.session.Session` over SSH, logged in when made.

    Raises:
        UnreachableError: there is no way in.
    """

    def __init__(self, connection: Connection, deadline: Deadline) -> None:
        self.connection = connection
        self._proxy: Proxy | None = None
        self._transport: paramiko.Transport | None = None
        self._target = connection.resolve()
        try:
            self._login(deadline)
        except BaseException:
            self.close()
            raise

    @property
    def _place(self) -> str:
        return f"{printable(self._target.hostname)} port {self._target.port}"

    # --- getting in ---

    def _login(self, deadline: Deadline) -> None:
        check = HostKeyCheck(self.connection, self._target)
        transport = self._connect(check, deadline)
        key = transport.get_remote_server_key()
        check.verify(key.get_name(), key.asbytes(), deadline)
        if not transport.is_active():
            # A person took longer to answer than the host waits for a login.
            self.close()
            check = HostKeyCheck(self.connection, self._target)
            transport = self._connect(check, deadline)
            key = transport.get_remote_server_key()
            check.verify(key.get_name(), key.asbytes(), deadline)
        transport.auth_timeout = max(deadline.remaining_s(), 0.1)
        Login(self.connection, self._target, transport, deadline).run()
        transport.set_keepalive(self._target.keepalive_s or 15)

    def _connect(self, check: HostKeyCheck, deadline: Deadline) -> paramiko.Transport:
        stream = self._open_stream(deadline)
        try:
            transport = paramiko.Transport(stream)
        except paramiko.SSHException as error:
            stream.close()
            raise self._no_ssh(error) from None
        self._transport = transport
        transport.daemon = True
        wait_s = max(min(deadline.remaining_s(), max(self._target.connect_timeout_s, 15.0)), 0.1)
        transport.banner_timeout = transport.handshake_timeout = wait_s
        options = transport.get_security_options()
        options.key_types = check.preferred_algorithms(options.key_types)
        try:
            transport.start_client(timeout=wait_s)
        except (paramiko.SSHException, OSError, EOFError) as error:
            raise self._no_ssh(error) from None
        if not transport.initial_kex_done:
            raise self._no_ssh(TimeoutError(f"no answer within {wait_s:.3g} s"))
        return transport

    def _no_ssh(self, error: Exception) -> UnreachableError:
        said = self._proxy.said() if self._proxy is not None else ""
        if said:
            return UnreachableError(
                f"{self.connection.host}: no connection through the proxy: {said}",
                hint=f"`{shlex.join(self.connection.ssh_command())}` shows more; jump hosts are used without questions, "
                "so connect to each once by hand first",
            )
        reason = printable(str(error)) or type(error).__name__
        if isinstance(error, IncompatiblePeer):
            return UnreachableError(
                f"{self.connection.host}: {self._place} speaks no SSH that is still safe: {reason}", hint="update its SSH server"
            )
        return UnreachableError(
            f"{self.connection.host}: {self._place} does not answer as an SSH server: {reason}",
            hint="check `ansible_port`, and that `sshd` is up there",
        )

    def _open_stream(self, deadline: Deadline) -> socket.socket:
        argv: list[str] = []
        if self._target.proxy_command:
            command = expand_proxy_command(self._target.proxy_command, self.connection.address, self._target)
            argv = ["/bin/sh", "-c", f"exec {command}"]
        elif self._target.proxy_jump:
            argv = jump_command(self.connection, self._target)
        if argv:
            try:
                self._proxy = Proxy(argv)
            except OSError as error:
                raise UnreachableError(f"{self.connection.host}: cannot start `{shlex.join(argv)}`: {error.strerror}") from None
            return self._proxy.socket
        wait_s = max(min(deadline.remaining_s(), self._target.connect_timeout_s), 0.1)
        try:
            return self._dial(wait_s)
        except TimeoutError:
            reason = f"no answer within {wait_s:.3g} s"
        except socket.gaierror as error:
            raise UnreachableError(
                f"{self.connection.host}: the name {printable(self._target.hostname)} does not resolve: {error.strerror}",
                hint="check the spelling, or set `ansible_host` to its address",
            ) from None
        except OSError as error:
            reason = error.strerror or str(error)
        raise UnreachableError(
            f"{self.connection.host}: cannot connect to {self._place}: {reason}",
            hint=f"check that it is up: `{shlex.join(self.connection.ssh_command())}`",
        )

    def _dial(self, wait_s: float) -> socket.socket:
        family = {"inet": socket.AF_INET, "inet6": socket.AF_INET6}.get(self._target.address_family, socket.AF_UNSPEC)
        found = socket.getaddrinfo(self._target.hostname, self._target.port, family, socket.SOCK_STREAM)
        last: OSError = OSError("no address")
        for kind, _, protocol, _, address in found:
            dialled = socket.socket(kind, socket.SOCK_STREAM, protocol)
            try:
                dialled.settimeout(wait_s)
                dialled.connect(address)
                dialled.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                dialled.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                if sys.platform == "linux":
                    # What we send to keep the connection is not answered for so long: the host is gone. Else it takes 15 minutes.
                    dialled.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(SILENCE_LIMIT_S * 1000))
                return dialled
            except OSError as error:
                dialled.close()
                last = error
        raise last

    # --- being in ---

    def run(
        self,
        command: Sequence[str] | str,
        *,
        stdin: bytes | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        become: bool = False,
    ) -> Result:
        """See :class:`v100ctl.probe.session.Session`."""
        deadline = Deadline(timeout_s)
        talk = Conversation(self.connection, command, stdin, become)
        try:
            channel = self._live().open_session(timeout=max(timeout_s, 0.1))
            channel.settimeout(max(timeout_s, 0.1))
            channel.exec_command(shlex.join(talk.argv))
            process = ChannelProcess(channel)
        except (paramiko.SSHException, OSError, EOFError) as error:
            raise UnreachableError(
                f"{self.connection.host}: it runs no command: {printable(str(error)) or 'the connection was lost'}",
                hint="this account needs a shell that runs commands given by `ssh HOST COMMAND`",
            ) from None
        try:
            return converse(process, talk, deadline)
        finally:
            channel.close()

    def open_tcp(self, address: str, port: int, *, timeout_s: float = 10.0) -> TcpStream:
        """See :class:`v100ctl.probe.session.Session`."""
        try:
            channel = self._live().open_channel("direct-tcpip", (address, port), ("127.0.0.1", 0), timeout=timeout_s)
        except paramiko.ChannelException as error:
            # RFC 4254, 5.1: SSH_OPEN_CONNECT_FAILED
            if error.code == 2:
                raise ConnectionRefusedError(f"{self.connection.host}: nothing listens on {address} port {port}") from None
            raise UnreachableError(
                f"{self.connection.host}: it does not forward connections: {printable(error.text)}",
                hint="set `AllowTcpForwarding local` in its sshd_config",
            ) from None
        except (paramiko.SSHException, EOFError) as error:
            raise UnreachableError(f"{self.connection.host}: {printable(str(error)) or 'the connection was lost'}") from None
        channel.settimeout(timeout_s)
        return ChannelStream(channel)

    def _live(self) -> paramiko.Transport:
        if self._transport is None or not self._transport.is_active():
            raise UnreachableError(f"{self.connection.host}: the connection was lost", hint="try again")
        return self._transport

    def close(self) -> None:
        """See :class:`v100ctl.probe.session.Session`."""
        if self._transport is not None:
            self._transport.close()
            self._transport = None
        if self._proxy is not None:
            self._proxy.close()
            self._proxy = None


class _SocketAgent(AgentSSH):
    """The agent behind a socket; one that does not answer is given up on."""

    def __init__(self, path: str, timeout_s: float) -> None:
        super().__init__()
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(timeout_s)
            connection.connect(path)
            # paramiko's own Agent knows only the socket of the environment, and waits for ever; the stubs hide this method.
            self._connect(connection)  # type: ignore[attr-defined]
        except BaseException:
            connection.close()
            raise

    def close(self) -> None:
        """Let go of it."""
        # Hidden by the stubs like the method above.
        self._close()  # type: ignore[attr-defined]


class Login:
    """Prove who we are: keys first (agent and files), then a password, as ``ssh`` does."""

    def __init__(self, connection: Connection, target: SshTarget, transport: paramiko.Transport, deadline: Deadline) -> None:
        self._connection = connection
        self._target = target
        self._transport = transport
        self._deadline = deadline
        self._keys_tried = 0
        self._notes: list[str] = []
        self._hints: list[str] = []
        #: Methods that the host takes, once it has said so.
        self._allowed: list[str] | None = None

    def run(self) -> None:
        """Log in.

        Raises:
            UnreachableError: nothing was accepted.
        """
        password = self._connection.password
        agent = self._agent()
        try:
            for key in self._keys(agent):
                self._keys_tried += 1
                if self._attempt(partial(self._transport.auth_publickey, self._target.user, key)):
                    return
                if self._allowed is not None and "publickey" not in self._allowed:
                    break
        finally:
            if agent is not None:
                agent.close()
        if password and self._attempt(partial(self._transport.auth_password, self._target.user, password)):
            return
        raise self._refused(password is not None)

    def _attempt(self, authenticate: Callable[[], list[str] | None]) -> bool:
        if not self._transport.is_active() or self._deadline.expired:
            return False
        try:
            # What is still missing, where the host wants more than one proof.
            self._allowed = authenticate() or self._allowed
        except paramiko.BadAuthenticationType as error:
            self._allowed = list(error.allowed_types)
        except paramiko.AuthenticationException as error:
            if not self._transport.is_active():
                self._notes.append(printable(str(error)) or "the host closed the connection")
        except (paramiko.SSHException, OSError, EOFError) as error:
            self._notes.append(printable(str(error)) or "the host closed the connection")
        return self._transport.is_authenticated()

    def _agent(self) -> _SocketAgent | None:
        named = self._target.identity_agent
        path = os.environ.get(named.removeprefix("$"), "") if named == "SSH_AUTH_SOCK" or named.startswith("$") else named
        if not path or path.lower() == "none":
            return None
        try:
            return _SocketAgent(str(Path(path).expanduser()), max(min(self._deadline.remaining_s(), 10.0), 0.1))
        except (OSError, RuntimeError, paramiko.SSHException):
            # A socket that was left over by an agent of another login is an everyday thing.
            return None

    def _keys(self, agent: _SocketAgent | None) -> Iterator[paramiko.PKey]:
        """Keys in the order of ``ssh``; what was named for this host comes before whatever else the agent holds."""
        held: dict[bytes, paramiko.PKey] = {key.asbytes(): key for key in agent.get_keys()} if agent is not None else {}
        later = []
        for path in self._target.identity_files:
            public = _public_blob(path)
            if public is not None and public in held:
                yield held.pop(public)
            elif self._connection.private_key_file is not None:
                yield from self._load(path)
            else:
                later.append(path)
        if not self._target.identities_only:
            yield from held.values()
        for path in later:
            yield from self._load(path)

    def _load(self, path: Path) -> Iterator[paramiko.PKey]:
        try:
            status = path.stat()
            # `ssh` refuses such a key too, so Ansible would fail where the probe did not.
            if status.st_uid == os.getuid() and status.st_mode & 0o077:
                self._hints.append(f"others may read {path}, so it is not used: `chmod 600 {shlex.quote(str(path))}`")
                return
            key = paramiko.PKey.from_path(path)
            for certificate in self._target.certificate_files:
                with contextlib.suppress(OSError, ValueError, paramiko.SSHException):
                    key.load_certificate(str(certificate))
        except FileNotFoundError:
            # The files that `ssh` looks for by itself need not be there.
            return
        except (TypeError, paramiko.PasswordRequiredException):
            self._hints.append(f"{path} has a passphrase: `ssh-add {shlex.quote(str(path))}` gives it to your agent")
        except (OSError, ValueError, paramiko.SSHException, UnknownKeyType, UnsupportedAlgorithm) as error:
            self._hints.append(f"{path} cannot be used: {printable(str(error), 100)}")
        else:
            yield key

    def _refused(self, password_tried: bool) -> UnreachableError:
        where = f"{self._connection.host}: `{printable(self._target.user)}` cannot log in at {self._target.hostname}"
        if self._deadline.expired:
            return UnreachableError(f"{where}: no answer within {self._deadline.timeout_s:g} s", hint="try again")
        if self._allowed is None and self._transport.is_active():
            with contextlib.suppress(paramiko.SSHException, OSError, EOFError):
                self._attempt(partial(self._transport.auth_none, self._target.user))
        keys = f"{self._keys_tried} key{'s' * (self._keys_tried != 1)}"
        tried = [keys] * bool(self._keys_tried) + ["the password"] * password_tried
        reason = f"the host refuses {' and '.join(tried)}" if tried else "there is no key and no password to try"
        if self._allowed is not None:
            reason += f" (it takes {printable(', '.join(self._allowed))})"
        reason += "".join(f"; {note}" for note in dict.fromkeys(self._notes))
        hints = list(dict.fromkeys(self._hints))
        named = self._connection.private_key_file
        if named is not None and not Path(expand_home(named)).exists():
            hints.insert(0, f"there is no key file {printable(named)}: correct `ansible_ssh_private_key_file`")
        if password_tried:
            hints.append("check the password (`-k`, `ansible_password`)")
        elif not hints:
            hints.append(
                "add your public key there with `ssh-copy-id`, name a key as `ansible_ssh_private_key_file`, or give a "
                "password with `-k`"
            )
        return UnreachableError(f"{where}: {reason}", hint="; ".join(hints))


def _public_blob(path: Path) -> bytes | None:
    """The public key beside a private one, as bytes."""
    try:
        fields = path.with_name(path.name + ".pub").read_text("utf-8", "replace").split()
        return base64.b64decode(fields[1], validate=True)
    except (OSError, IndexError, ValueError):
        return None
