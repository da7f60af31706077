"""An SSH server inside the test process, by paramiko: as odd as a test wants it.

The integration tests use a real sshd; this one is for what a real one does not do.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import paramiko
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

USER, PASSWORD = "admin", "correct horse"
#: What a command does: it gets the channel and the command line, and closes the channel at its end.
Behaviour = Callable[[paramiko.Channel, str], None]


def run_for_real(channel: paramiko.Channel, command: str) -> None:
    """Run the command with a shell on this machine, as sshd does."""
    with subprocess.Popen(
        ["/bin/sh", "-c", f"exec {command}"],
        start_new_session=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        stdin, stdout, stderr = process.stdin, process.stdout, process.stderr

        def feed() -> None:
            # The program may end before it has read everything.
            with contextlib.suppress(OSError, ValueError), stdin:
                while data := channel.recv(1 << 16):
                    stdin.write(data)
                    stdin.flush()

        def pump(source: object, send: Callable[[bytes], None]) -> None:
            with contextlib.suppress(OSError):
                while data := source.read1(1 << 16):
                    send(data)

        threads = [
            threading.Thread(target=feed, daemon=True),
            threading.Thread(target=pump, args=(stdout, channel.sendall)),
            threading.Thread(target=pump, args=(stderr, channel.sendall_stderr)),
        ]
        for thread in threads:
            thread.start()
        while process.poll() is None:
            # sshd leaves a program to itself when its client goes; a test must not leave one behind.
            if channel.closed:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            time.sleep(0.005)
        for thread in threads[1:]:
            thread.join()
        code = process.wait()
    with contextlib.suppress(OSError, EOFError):
        if code >= 0:
            channel.send_exit_status(code)
        channel.close()


@dataclass
class Server(paramiko.ServerInterface):
    """One listening server; each attribute may be changed while it runs."""

    port: int
    host_keys: list[paramiko.PKey]
    authorized: list[paramiko.PKey] = field(default_factory=list)
    methods: str = "publickey,password"
    password_after_key: bool = False
    behaviour: Behaviour = run_for_real
    forwarding: bool = True
    on_handshake: Callable[[paramiko.Transport], None] | None = None
    logins: list[str] = field(default_factory=list)
    _transport: paramiko.Transport | None = None

    def get_allowed_auths(self, username: str) -> str:
        """See paramiko."""
        return self.methods

    def check_auth_publickey(self, username: str, key: paramiko.PKey) -> int:
        """See paramiko."""
        if username != USER or key not in self.authorized:
            return paramiko.AUTH_FAILED
        if self.password_after_key:
            self.methods = "password"
            return paramiko.AUTH_PARTIALLY_SUCCESSFUL
        self.logins.append("publickey")
        return paramiko.AUTH_SUCCESSFUL

    def check_auth_password(self, username: str, password: str) -> int:
        """See paramiko."""
        if (username, password) != (USER, PASSWORD) or "password" not in self.methods:
            return paramiko.AUTH_FAILED
        self.logins.append("password")
        return paramiko.AUTH_SUCCESSFUL

    def check_channel_request(self, kind: str, chanid: int) -> int:
        """See paramiko."""
        return paramiko.OPEN_SUCCEEDED if kind == "session" else paramiko.OPEN_FAILED_ADMINISTRATIVELY_PROHIBITED

    def check_channel_direct_tcpip_request(self, chanid: int, origin: tuple[str, int], destination: tuple[str, int]) -> int:
        """See paramiko."""
        if not self.forwarding:
            return paramiko.OPEN_FAILED_ADMINISTRATIVELY_PROHIBITED
        try:
            target = socket.create_connection(destination, timeout=10)
        except OSError:
            return paramiko.OPEN_FAILED_CONNECT_FAILED
        threading.Thread(target=self._forward, args=(target,), daemon=True).start()
        return paramiko.OPEN_SUCCEEDED

    def _forward(self, target: socket.socket) -> None:
        assert self._transport is not None
        channel = self._transport.accept(10)

        def pump(receive: Callable[[int], bytes], send: Callable[[bytes], None], finish: Callable[[], None]) -> None:
            with contextlib.suppress(OSError):
                while data := receive(1 << 16):
                    send(data)
                finish()

        there = threading.Thread(
            target=pump, args=(channel.recv, target.sendall, lambda: target.shutdown(socket.SHUT_WR)), daemon=True
        )
        there.start()
        pump(target.recv, channel.sendall, channel.close)

    def check_channel_exec_request(self, channel: paramiko.Channel, command: bytes) -> bool:
        """See paramiko."""
        # The reply to the request has to go out first, which it does after this method.
        timer = threading.Timer(0.05, self.behaviour, args=(channel, command.decode()))
        timer.daemon = True
        timer.start()
        return True

    def serve(self, connection: socket.socket) -> None:
        """Talk to one client until it leaves."""
        transport = paramiko.Transport(connection)
        for key in self.host_keys:
            transport.add_server_key(key)
        self._transport = transport
        with contextlib.suppress(paramiko.SSHException, EOFError, OSError):
            transport.start_server(server=self)
            if self.on_handshake is not None:
                self.on_handshake(transport)


@contextlib.contextmanager
def ssh_server(**options: object) -> Iterator[Server]:
    """A server on a free port of 127.0.0.1; options as of :class:`Server`."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        options.setdefault("host_keys", [ed25519_key()])
        server = Server(port=listener.getsockname()[1], **options)

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    server.serve(listener.accept()[0])

        threading.Thread(target=accept, daemon=True).start()
        yield server
        # Wakes the accept above, which closing alone does not.
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)


def write_key(path: Path, kind: str = "ed25519", passphrase: str = "") -> paramiko.PKey:
    """Make a private key file with its public one beside it, as `ssh-keygen` does."""
    subprocess.run(["ssh-keygen", "-q", "-t", kind, "-N", passphrase, "-f", str(path)], check=True)
    return paramiko.PKey.from_path(path, password=passphrase.encode() if passphrase else None)


def ed25519_key() -> paramiko.PKey:
    """A new key in memory."""

    pem = Ed25519PrivateKey.generate().private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
    return paramiko.Ed25519Key.from_private_key(io.StringIO(pem.decode()))
