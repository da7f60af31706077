"""A session on a host: run programs there and reach its TCP ports, over SSH or, for this machine, without.

Everything is bounded: each call has its time limit and at most :data:`MAX_OUTPUT_BYTES` of output are taken.
"""

from __future__ import annotations

import contextlib
import io
import os
import secrets
import select
import shlex
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, Protocol

from v100ctl.errors import ProbeError, UnreachableError
from v100ctl.probe.connection import Connection
from v100ctl.probe.deadline import Deadline
from v100ctl.probe.text import last_line, printable

MAX_OUTPUT_BYTES = 32 << 20
DEFAULT_TIMEOUT_S = 30.0
#: How long a program's output may stay open after it has ended (something it started may still hold it).
LINGER_S = 1.0


@dataclass(frozen=True)
class Result:
    """How a program ended. ``rc`` is -1 when a signal killed it."""

    rc: int
    stdout: bytes
    stderr: bytes


class TcpStream(Protocol):
    """What :meth:`Session.open_tcp` returns: the part of a socket that ``http.client`` uses."""

    def sendall(self, data: bytes, /) -> None:
        """Send all of it."""

    def recv(self, size: int, /) -> bytes:
        """Up to ``size`` bytes; empty at the end."""

    def makefile(self, mode: Literal["rb"], /) -> io.BufferedReader:
        """A buffered reader (``rb``) over the stream."""

    def settimeout(self, timeout_s: float | None, /) -> None:
        """Let reading and writing fail with :class:`TimeoutError` after this long."""

    def close(self) -> None:
        """Close it; twice is fine."""


class Process(Protocol):
    """A started program, as :func:`converse` talks to it. Implementations never block longer than they are told."""

    def send(self, data: bytes) -> int:
        """Send what can be sent at once; returns how many bytes that were."""

    def close_stdin(self) -> None:
        """Say that no more will come."""

    def receive(self, wait_s: float, *, writing: bool) -> tuple[bytes, bytes]:
        """What came on stdout and stderr, waiting at most ``wait_s`` for it or, with ``writing``, for room to send."""

    def ended(self) -> bool:
        """Whether the program has ended and its output is complete."""

    def exit_code(self) -> int | None:
        """Its exit code, -1 for a signal, ``None`` while it runs."""

    def kill(self) -> None:
        """End it as far as that can be done from here."""


class Session(Protocol):
    """An open way into a host."""

    connection: Connection

    def run(
        self,
        command: Sequence[str] | str,
        *,
        stdin: bytes | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        become: bool = False,
    ) -> Result:
        """Run a program (a list) or a shell script (text).

        Args:
            command: What to run.
            stdin: What it is given to read.
            timeout_s: When to give up.
            become: As root (or the inventory's ``ansible_become_user``) through `sudo`, unless that user it is already or the
                inventory says ``ansible_become: false``.

        Raises:
            UnreachableError: the connection broke, the time ran out, or `sudo` refused.
            ProbeError: too much output.
        """

    def open_tcp(self, address: str, port: int, *, timeout_s: float = 10.0) -> TcpStream:
        """Connect to a TCP port as seen from the host.

        Raises:
            OSError: nothing listens there.
            UnreachableError: the host does not forward connections.
        """

    def close(self) -> None:
        """End it; twice is fine."""


# What runs a command on the host. All that a login shell prints before the mark ($0) is noise and is dropped.
# One line each: csh, as a login shell, takes no line breaks inside quotes.
_PLAIN = 'printf "%s\\n" "$0"; exec "$@"'
# Arguments: user, prompt or nothing, command. `sudo` is used only where it is needed.
_BECOME = "; ".join(
    (
        f"plain={shlex.quote(_PLAIN)} u=$1 p=$2",
        "shift 2",
        'if [ "$(id -un)" = "$u" ] || [ "$u$(id -u)" = root0 ]; then printf "%s\\n" "$0"; exec "$@"; fi',
        'command -v sudo >/dev/null 2>&1 || { echo "v100ctl: no sudo" >&2; exit 127; }',
        "LC_ALL=C",
        "export LC_ALL",
        'if [ -n "$p" ]; then exec sudo -H -S -p "$p" -u "$u" -- /bin/sh -c "$plain" "$0" "$@"; fi',
        'exec sudo -H -n -u "$u" -- /bin/sh -c "$plain" "$0" "$@"',
    )
)


class Conversation:
    """One run: its command line, and what is said in which order.

    With a password, `sudo` reads stdin first: the password goes out when its prompt has come, and ``stdin`` only when the mark
    shows that the program itself has started, so that the two cannot mix.
    """

    def __init__(self, connection: Connection, command: Sequence[str] | str, stdin: bytes | None, become: bool) -> None:
        argv = ["/bin/sh", "-c", command] if isinstance(command, str) else list(command)
        self.connection = connection
        self.become = become and connection.become is not False
        self._stdin = stdin or b""
        mark = f"v100ctl-{secrets.token_hex(8)}"
        self._mark = f"{mark}\n".encode()
        prompt = f"[v100ctl {secrets.token_hex(8)}] password: " if self.become and connection.become_password else ""
        self._prompt = prompt.encode()
        if self.become:
            self.argv = ["/bin/sh", "-c", _BECOME, mark, connection.become_user, prompt, *argv]
        else:
            self.argv = ["/bin/sh", "-c", _PLAIN, mark, *argv]
        self.stdout, self.stderr = bytearray(), bytearray()
        self.started = False
        self._password_sent = False
        #: What is to be sent now, and whether nothing will follow it.
        self.outgoing = memoryview(b"" if prompt else self._stdin)
        self.last = not prompt

    def heard(self, stdout: bytes, stderr: bytes) -> None:
        """Take what came.

        Raises:
            UnreachableError: `sudo` asks again, so the password is wrong.
        """
        self.stdout += stdout
        self.stderr += stderr
        if self.started:
            return
        if (at := self.stdout.find(self._mark)) >= 0:
            del self.stdout[: at + len(self._mark)]
            self.started = True
            if self._prompt:
                # The prompt and what `sudo` says around it are no part of the program's output.
                self.stderr = bytearray(self.stderr.rpartition(self._prompt)[2])
                self.outgoing, self.last = memoryview(self._stdin), True
            return
        asked = self.stderr.count(self._prompt) if self._prompt else 0
        if asked > 1:
            raise self._sudo_refused("Sorry, try again.")
        if asked and not self._password_sent:
            self._password_sent = True
            self.outgoing = memoryview(f"{self.connection.become_password}\n".encode())

    def result(self, exit_code: int | None) -> Result:
        """How it ended.

        Raises:
            UnreachableError: it never started, or the connection was lost.
        """
        if not self.started:
            raise self._not_started(exit_code)
        if exit_code is None:
            raise UnreachableError(
                f"{self.connection.host}: the connection was lost", hint="try again; if the host restarts, wait until it is back"
            )
        return Result(exit_code, bytes(self.stdout), bytes(self.stderr))

    def _not_started(self, exit_code: int | None) -> UnreachableError:
        host = self.connection.host
        said = last_line(bytes(self.stderr)) or last_line(bytes(self.stdout))
        if exit_code is None:
            return UnreachableError(f"{host}: the connection was lost before anything ran", hint="try again")
        if self.become and b"v100ctl: no sudo" in self.stderr:
            return UnreachableError(
                f"{host}: root is needed and `sudo` is not installed",
                hint="set `ansible_user: root`, or install sudo on the host and allow this user to use it",
            )
        if self.become and b"sudo" in self.stderr:
            said_by_sudo = self.stderr.replace(self._prompt, b"\n") if self._prompt else self.stderr
            return self._sudo_refused(said_by_sudo.decode("utf-8", "replace"))
        return UnreachableError(
            f"{host}: the login shell ran nothing (exit code {exit_code})" + (f": {said}" if said else ""),
            hint="this account needs a shell that runs commands given by `ssh HOST COMMAND`",
        )

    def _sudo_refused(self, said: str) -> UnreachableError:
        host = self.connection.host
        user = self.connection.user or "this user"
        if any(words in said for words in ("try again", "incorrect password")):
            return UnreachableError(
                f"{host}: `sudo` does not take the password",
                hint="check what was typed after `-K`, or `ansible_become_password` in the inventory",
            )
        if any(words in said for words in ("password is required", "no password was provided", "terminal is required")):
            return UnreachableError(
                f"{host}: `sudo` wants a password",
                hint="give it with `-K` or as `ansible_become_password`, or allow it without one (NOPASSWD in sudoers)",
            )
        if any(words in said for words in ("not in the sudoers", "not allowed to", "may not run sudo")):
            return UnreachableError(
                f"{host}: `sudo` refuses: {last_line(said)}",
                hint=f"let an administrator allow it (`usermod --append --groups sudo {printable(user)}` on Debian and Ubuntu, "
                "`wheel` on others), or connect as root",
            )
        return UnreachableError(f"{host}: `sudo` failed: {last_line(said)}", hint="try `sudo true` on the host by hand")


def converse(process: Process, talk: Conversation, deadline: Deadline) -> Result:
    """Feed a started program and take what it says, within bounds. The program is ended whenever this raises.

    Raises:
        UnreachableError: the time ran out, `sudo` refused, or the program never started.
        ProbeError: more than :data:`MAX_OUTPUT_BYTES` of output.
    """
    host = talk.connection.host
    stdin_open = True
    ended_at_s: float | None = None
    try:
        while not process.ended():
            if talk.outgoing:
                sent = process.send(bytes(talk.outgoing[: 1 << 16]))
                talk.outgoing = talk.outgoing[sent:]
            if stdin_open and talk.last and not talk.outgoing:
                process.close_stdin()
                stdin_open = False
            wait_s = min(deadline.remaining_s(), 0.5 if ended_at_s is None else 0.05)
            stdout, stderr = process.receive(wait_s, writing=bool(talk.outgoing))
            talk.heard(stdout, stderr)
            if len(talk.stdout) + len(talk.stderr) > MAX_OUTPUT_BYTES:
                raise ProbeError(f"{host}: more than {MAX_OUTPUT_BYTES >> 20} MiB of output", hint="look at what runs there")
            if process.exit_code() is not None and not stdout and not stderr:
                ended_at_s = ended_at_s or time.monotonic()
                if time.monotonic() - ended_at_s > LINGER_S:
                    break
            if deadline.expired:
                raise UnreachableError(
                    f"{host}: no answer within {deadline.timeout_s:g} s",
                    hint="the host is overloaded or stuck; look at it by hand",
                )
    except BaseException:
        process.kill()
        raise
    return talk.result(process.exit_code())


class LocalProcess:
    """A program on this machine, in a session of its own."""

    def __init__(self, argv: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd="/", start_new_session=True
        )
        pipes = (self._process.stdin, self._process.stdout, self._process.stderr)
        self._stdin, self._stdout, self._stderr = (os.dup(pipe.fileno()) for pipe in pipes if pipe is not None)
        for pipe in pipes:
            if pipe is not None:
                pipe.close()
        self._open = {self._stdin, self._stdout, self._stderr}
        os.set_blocking(self._stdin, False)

    def send(self, data: bytes) -> int:
        """See :class:`Process`. A program that does not read its input is no error."""
        try:
            return os.write(self._stdin, data)
        except BlockingIOError:
            return 0
        except BrokenPipeError:
            return len(data)

    def close_stdin(self) -> None:
        """See :class:`Process`."""
        self._close(self._stdin)

    def _close(self, descriptor: int) -> None:
        if descriptor in self._open:
            self._open.remove(descriptor)
            os.close(descriptor)

    def receive(self, wait_s: float, *, writing: bool) -> tuple[bytes, bytes]:
        """See :class:`Process`."""
        poller = select.poll()
        for descriptor in self._open & {self._stdout, self._stderr}:
            poller.register(descriptor, select.POLLIN)
        if writing and self._stdin in self._open:
            poller.register(self._stdin, select.POLLOUT)
        ready = {descriptor for descriptor, _ in poller.poll(wait_s * 1000)}
        return self._read(self._stdout, ready), self._read(self._stderr, ready)

    def _read(self, descriptor: int, ready: set[int]) -> bytes:
        if descriptor not in ready:
            return b""
        data = os.read(descriptor, 1 << 16)
        if not data:
            self._close(descriptor)
        return data

    def ended(self) -> bool:
        """See :class:`Process`."""
        return self.exit_code() is not None and not self._open & {self._stdout, self._stderr}

    def exit_code(self) -> int | None:
        """See :class:`Process`."""
        code = self._process.poll()
        return None if code is None else max(code, -1)

    def kill(self) -> None:
        """See :class:`Process`. What runs as root cannot be killed by others; it loses its pipes."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self.close()

    def close(self) -> None:
        """Let go of it."""
        for descriptor in list(self._open):
            self._close(descriptor)


class LocalSession:
    """A :class:`Session` on this machine."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    def run(
        self,
        command: Sequence[str] | str,
        *,
        stdin: bytes | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        become: bool = False,
    ) -> Result:
        """See :class:`Session`."""
        talk = Conversation(self.connection, command, stdin, become)
        process = LocalProcess(talk.argv)
        try:
            return converse(process, talk, Deadline(timeout_s))
        finally:
            process.close()

    def open_tcp(self, address: str, port: int, *, timeout_s: float = 10.0) -> TcpStream:
        """See :class:`Session`."""
        return socket.create_connection((address, port), timeout=timeout_s)

    def close(self) -> None:
        """See :class:`Session`."""


@contextmanager
def open_session(connection: Connection, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> Iterator[Session]:
    """A session on a host, closed at the end of the ``with`` block.

    Args:
        connection: The way in.
        timeout_s: The most that connecting and logging in may take; time in which a person is asked does not count.

    Raises:
        UnreachableError: there is no way in; the message says why, the hint what to do.
    """
    session = start_session(connection, Deadline(timeout_s))
    try:
        yield session
    finally:
        session.close()


def start_session(connection: Connection, deadline: Deadline) -> Session:
    """A session that the caller closes; see :func:`open_session`."""
    if connection.kind == "local":
        return LocalSession(connection)
    # paramiko takes longer to import than all the rest; a local connection needs none of it.
    from v100ctl.probe.ssh import SshSession

    return SshSession(connection, deadline)
