"""Getting in: host keys, keys, passwords, and hosts that do not behave."""

from __future__ import annotations

import base64
import http.client
import http.server
import io
import os
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import paramiko
import pytest

from tests.unit.ssh_server import PASSWORD, USER, Server, ed25519_key, ssh_server, write_key
from v100ctl.errors import ProbeError, UnreachableError
from v100ctl.probe import HostKeyPolicy, HostKeyQuestion, Secrets, known_hosts, open_session
from v100ctl.probe import session as session_module
from v100ctl.probe.connection import Connection
from v100ctl.probe.session import MAX_OUTPUT_BYTES
from v100ctl.probe.ssh import confirm_on_terminal


@pytest.fixture(autouse=True)
def no_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)


@pytest.fixture
def server() -> Iterator[Server]:
    with ssh_server() as running:
        yield running


class Way:
    """Makes connections to a server, with files of its own in place of the user's."""

    def __init__(self, server: Server, folder: Path) -> None:
        self.server = server
        self.folder = folder
        self.known_hosts = folder / "known_hosts"
        self.options = ["-F", "/dev/null", "-o", "GlobalKnownHostsFile=/dev/null"]
        self.name = f"[127.0.0.1]:{server.port}"

    def know(self, key: paramiko.PKey, *, marker: str = "", name: str = "") -> None:
        with self.known_hosts.open("a") as file:
            encoded = base64.b64encode(key.asbytes()).decode()
            file.write(f"{marker} {name or self.name} {key.get_name()} {encoded}\n".lstrip())

    def connection(self, *, host_keys: HostKeyPolicy = HostKeyPolicy.REFUSE, confirm: Any = None, **variables: Any) -> Connection:
        options = [*self.options, "-o", f"UserKnownHostsFile={self.known_hosts}"]
        base = {"ansible_host": "127.0.0.1", "ansible_port": self.server.port, "ansible_user": USER}
        given = {**base, "ansible_ssh_common_args": options, **variables}
        return Connection.from_vars("web1", given, host_keys=host_keys, confirm_host_key=confirm)

    def refused(self, **options: Any) -> UnreachableError:
        with pytest.raises(UnreachableError) as caught, open_session(self.connection(**options), timeout_s=20):
            pass
        return caught.value


@pytest.fixture
def way(server: Server, tmp_path: Path) -> Way:
    return Way(server, tmp_path)


@pytest.fixture
def key_file(way: Way, tmp_path: Path) -> Path:
    """A key that the server takes, from a host whose key is known."""
    way.server.authorized.append(write_key(tmp_path / "id"))
    way.know(way.server.host_keys[0])
    return tmp_path / "id"


# --- host keys ----------------------------------------------------------------------------------------------------------------


def test_a_known_host_is_not_asked_about(way: Way, key_file: Path) -> None:
    with open_session(way.connection(ansible_ssh_private_key_file=str(key_file))) as session:
        assert session.run(["echo", "hello"]).stdout == b"hello\n"


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such limit")
def test_a_host_that_dies_in_the_middle_of_a_session_is_noticed(way: Way, key_file: Path) -> None:
    with open_session(way.connection(ansible_ssh_private_key_file=str(key_file))) as session:
        transport: paramiko.Transport = session._transport
        assert transport.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 120_000
        # Without something sent there is nothing that could stay unanswered.
        assert transport.packetizer._Packetizer__keepalive_interval == 15


def test_an_unknown_host_is_refused_with_its_fingerprint(way: Way) -> None:
    error = way.refused()
    assert f"the host key of {way.name} is not known" in error.message
    assert known_hosts.fingerprint(way.server.host_keys[0].asbytes()) in error.message
    assert "--accept-new-host-keys" in (error.hint or "")
    assert not way.known_hosts.exists()


def test_a_new_key_is_accepted_once_and_known_from_then_on(way: Way, key_file: Path) -> None:
    way.known_hosts.unlink()
    for policy in (HostKeyPolicy.ACCEPT_NEW, HostKeyPolicy.REFUSE):
        with open_session(way.connection(host_keys=policy, ansible_ssh_private_key_file=str(key_file))) as session:
            session.run(["true"])
    assert way.known_hosts.read_text().count("\n") == 1
    assert stat.S_IMODE(way.known_hosts.stat().st_mode) == 0o600


@pytest.mark.parametrize("policy", list(HostKeyPolicy))
def test_a_changed_key_is_always_refused_with_file_and_line(way: Way, policy: HostKeyPolicy) -> None:
    way.know(ed25519_key(), name="other")
    way.know(ed25519_key())
    error = way.refused(host_keys=policy, confirm=lambda question: True)
    assert "its host key has changed" in error.message
    assert f"{way.known_hosts}:2" in error.message
    assert f"-R '{way.name}'" in (error.hint or "")
    assert way.known_hosts.read_text().count("\n") == 2


def test_a_host_that_no_longer_shows_the_known_type_has_changed_too(way: Way, tmp_path: Path) -> None:
    way.know(write_key(tmp_path / "rsa", "rsa"))
    error = way.refused(host_keys=HostKeyPolicy.ACCEPT_NEW)
    assert "has ssh-rsa SHA256:" in error.message
    assert "shows ssh-ed25519 SHA256:" in error.message


@pytest.mark.parametrize("kind", ["rsa", "ecdsa"])
def test_the_type_that_is_known_is_preferred(way: Way, key_file: Path, tmp_path: Path, kind: str) -> None:
    other = write_key(tmp_path / "other", kind)
    way.server.host_keys.append(other)
    way.known_hosts.unlink()
    way.know(other)
    with open_session(way.connection(ansible_ssh_private_key_file=str(key_file))) as session:
        session.run(["true"])


def test_a_key_kept_without_the_port_counts_when_it_fits(way: Way, key_file: Path) -> None:
    way.known_hosts.unlink()
    way.know(ed25519_key(), name="127.0.0.1")
    assert "is not known" in way.refused().message
    way.know(way.server.host_keys[0], name="127.0.0.1")
    with open_session(way.connection(ansible_ssh_private_key_file=str(key_file))) as session:
        session.run(["true"])


def test_an_alias_stands_for_the_host(way: Way, key_file: Path) -> None:
    way.known_hosts.unlink()
    way.know(way.server.host_keys[0], name="web1.internal")
    way.options += ["-o", "HostKeyAlias=web1.internal"]
    with open_session(way.connection(ansible_ssh_private_key_file=str(key_file))) as session:
        session.run(["true"])


def test_a_revoked_key_is_refused_even_where_it_is_known(way: Way) -> None:
    way.know(way.server.host_keys[0])
    way.know(way.server.host_keys[0], marker="@revoked", name="*")
    error = way.refused(host_keys=HostKeyPolicy.ACCEPT_NEW)
    assert "is marked as revoked" in error.message
    assert f"{way.known_hosts}:2" in error.message


def test_another_revoked_key_is_no_matter(way: Way, key_file: Path) -> None:
    way.know(ed25519_key(), marker="@revoked", name="*")
    with open_session(way.connection(ansible_ssh_private_key_file=str(key_file))) as session:
        session.run(["true"])


def test_an_authority_is_no_known_key(way: Way) -> None:
    way.know(ed25519_key(), marker="@cert-authority", name="*")
    error = way.refused()
    assert "is not known" in error.message
    assert f"{way.known_hosts}:1 trusts a certificate authority" in error.message


def test_hashed_names_where_the_user_wants_them(way: Way, key_file: Path) -> None:
    way.known_hosts.unlink()
    way.options += ["-o", "HashKnownHosts=yes"]
    with open_session(way.connection(host_keys=HostKeyPolicy.ACCEPT_NEW, ansible_ssh_private_key_file=str(key_file))):
        pass
    assert way.known_hosts.read_text().startswith("|1|")


@pytest.mark.parametrize("setting", ["yes", "accept-new"])
def test_the_users_own_strictness_holds(way: Way, key_file: Path, setting: str) -> None:
    way.known_hosts.unlink()
    way.options += ["-o", f"StrictHostKeyChecking={setting}"]
    if setting == "yes":
        assert "is not known" in way.refused(host_keys=HostKeyPolicy.ACCEPT_NEW).message
    else:
        with open_session(way.connection(host_keys=HostKeyPolicy.ASK, ansible_ssh_private_key_file=str(key_file))):
            pass
        assert way.known_hosts.exists()


def test_a_key_that_cannot_be_remembered_is_not_trusted(way: Way, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    way.known_hosts = tmp_path / "file" / "known_hosts"
    assert "cannot be remembered" in way.refused(host_keys=HostKeyPolicy.ACCEPT_NEW).message


@pytest.mark.parametrize("answer", [True, False])
def test_a_person_is_asked(way: Way, key_file: Path, answer: bool) -> None:
    way.known_hosts.unlink()
    asked: list[HostKeyQuestion] = []

    def confirm(question: HostKeyQuestion) -> bool:
        asked.append(question)
        return answer

    options = {"host_keys": HostKeyPolicy.ASK, "confirm": confirm, "ansible_ssh_private_key_file": str(key_file)}
    if answer:
        with open_session(way.connection(**options)) as session:
            session.run(["true"])
    else:
        assert "is not known" in way.refused(**options).message
    (question,) = asked
    assert (question.host, question.key_type) == ("web1", "ssh-ed25519")
    assert question.fingerprint == known_hosts.fingerprint(way.server.host_keys[0].asbytes())
    assert way.known_hosts.exists() is answer


def test_a_slow_answer_costs_no_time_and_a_lost_connection_is_made_again(way: Way, key_file: Path) -> None:
    way.known_hosts.unlink()
    connections: list[paramiko.Transport] = []
    way.server.on_handshake = connections.append

    def confirm(question: HostKeyQuestion) -> bool:
        # The host does not wait for a login as long as the person thinks.
        while not connections:
            threading.Event().wait(0.01)
        connections[0].close()
        threading.Event().wait(1.5)
        return True

    connection = way.connection(host_keys=HostKeyPolicy.ASK, confirm=confirm, ansible_ssh_private_key_file=str(key_file))
    with open_session(connection, timeout_s=1.4) as session:
        session.run(["true"])
    assert len(connections) == 2


def test_one_question_at_a_time(way: Way, key_file: Path) -> None:
    way.known_hosts.unlink()
    asking: list[int] = []
    most: list[int] = []

    def confirm(question: HostKeyQuestion) -> bool:
        asking.append(1)
        threading.Event().wait(0.2)
        most.append(len(asking))
        asking.pop()
        return True

    def connect() -> None:
        options = {"host_keys": HostKeyPolicy.ASK, "confirm": confirm, "ansible_ssh_private_key_file": str(key_file)}
        with open_session(way.connection(**options)):
            pass

    threads = [threading.Thread(target=connect) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # And whoever waited found the answer in the file.
    assert most == [1]
    assert way.known_hosts.read_text().count("\n") == 1


@pytest.mark.parametrize(
    ("typed", "expected"),
    [("yes\n", True), ("no\n", False), ("", False), ("what?\nyes\n", True), ("SHA256:abc\n", True), ("SHA256:abd\nno\n", False)],
)
def test_the_question_on_the_terminal(monkeypatch: pytest.MonkeyPatch, typed: str, expected: bool) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    said = Terminal()
    monkeypatch.setattr(sys, "stdin", Terminal(typed))
    monkeypatch.setattr(sys, "stderr", said)
    question = HostKeyQuestion("web1\x1b[2J", "10.0.0.1 port 22", "ssh-ed25519", "SHA256:abc")
    assert confirm_on_terminal(question) is expected
    assert "SHA256:abc" in said.getvalue()
    assert "\x1b" not in said.getvalue()


def test_without_a_terminal_nobody_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("yes\n"))
    assert confirm_on_terminal(HostKeyQuestion("web1", "10.0.0.1 port 22", "ssh-ed25519", "SHA256:abc")) is False


# --- logging in ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["ed25519", "rsa", "ecdsa"])
def test_key_files(way: Way, tmp_path: Path, kind: str) -> None:
    way.know(way.server.host_keys[0])
    way.server.authorized.append(write_key(tmp_path / "key", kind))
    with open_session(way.connection(ansible_ssh_private_key_file=str(tmp_path / "key"))) as session:
        assert session.run(["true"]).rc == 0
    assert way.server.logins == ["publickey"]


def test_a_password(way: Way) -> None:
    way.know(way.server.host_keys[0])
    with open_session(way.connection(ansible_password=PASSWORD, ansible_ssh_private_key_file="/none")) as session:
        assert session.run(["true"]).rc == 0
    assert way.server.logins == ["password"]


def test_a_key_and_a_password_together(way: Way, key_file: Path) -> None:
    way.server.password_after_key = True
    with open_session(way.connection(ansible_password=PASSWORD, ansible_ssh_private_key_file=str(key_file))) as session:
        assert session.run(["true"]).rc == 0


def test_what_is_refused_is_said(way: Way, tmp_path: Path) -> None:
    way.know(way.server.host_keys[0])
    write_key(tmp_path / "stranger")
    key = str(tmp_path / "stranger")
    refused = way.refused(ansible_ssh_private_key_file=key)
    assert refused.message == (
        f"web1: `{USER}` cannot log in at 127.0.0.1: the host refuses 1 key (it takes publickey, password)"
    )
    assert "-k" in (refused.hint or "")
    refused = way.refused(ansible_ssh_private_key_file=key, ansible_password="wrong")
    assert "the host refuses 1 key and the password" in refused.message
    assert "wrong" not in refused.message + str(refused.hint)
    refused = way.refused(ansible_ssh_private_key_file="/no/such/key")
    assert "there is no key file /no/such/key" in (refused.hint or "")


def test_a_key_with_a_passphrase_wants_an_agent(way: Way, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    way.know(way.server.host_keys[0])
    key_file = tmp_path / "locked"
    way.server.authorized.append(write_key(key_file, passphrase="open sesame"))
    refused = way.refused(ansible_ssh_private_key_file=str(key_file))
    assert f"{key_file} has a passphrase: `ssh-add {key_file}`" in (refused.hint or "")

    agent = subprocess.run(["ssh-agent", "-a", str(tmp_path / "agent"), "-s"], check=True, capture_output=True, text=True)
    pid = int(agent.stdout.partition("SSH_AGENT_PID=")[2].partition(";")[0])
    try:
        monkeypatch.setenv("SSH_AUTH_SOCK", str(tmp_path / "agent"))
        askpass = tmp_path / "askpass"
        askpass.write_text("#!/bin/sh\necho open sesame\n")
        askpass.chmod(0o700)
        environment = {**os.environ, "SSH_ASKPASS": str(askpass), "SSH_ASKPASS_REQUIRE": "force"}
        subprocess.run(["ssh-add", "-q", str(key_file)], env=environment, check=True, stdin=subprocess.DEVNULL)
        with open_session(way.connection(ansible_ssh_private_key_file=str(key_file))) as session:
            assert session.run(["true"]).rc == 0
        # And without naming the file: whatever the agent holds is tried.
        with open_session(way.connection()) as session:
            assert session.run(["true"]).rc == 0
        way.options += ["-o", "IdentityAgent=none"]
        assert "has a passphrase" in (way.refused(ansible_ssh_private_key_file=str(key_file)).hint or "")
    finally:
        os.kill(pid, 15)


def test_a_key_that_others_may_read_is_not_used_as_ssh_would_not(way: Way, key_file: Path) -> None:
    key_file.chmod(0o644)
    refused = way.refused(ansible_ssh_private_key_file=str(key_file))
    assert f"`chmod 600 {key_file}`" in (refused.hint or "")


def test_a_file_that_is_no_key(way: Way, tmp_path: Path) -> None:
    way.know(way.server.host_keys[0])
    (tmp_path / "id").write_text("no key\n")
    (tmp_path / "id").chmod(0o600)
    assert f"{tmp_path / 'id'} cannot be used" in (way.refused(ansible_ssh_private_key_file=str(tmp_path / "id")).hint or "")


# --- hosts that do not answer as they should ----------------------------------------------------------------------------------


def test_nothing_listens(way: Way) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
    error = way.refused(ansible_port=port)
    assert error.message == f"web1: cannot connect to 127.0.0.1 port {port}: Connection refused"
    assert "ssh -F /dev/null" in (error.hint or "")


def test_a_name_that_does_not_resolve(way: Way) -> None:
    assert "the name no-such-host.invalid does not resolve" in way.refused(ansible_host="no-such-host.invalid").message


def speak(data: bytes, *, forever: bool = False) -> Callable[[socket.socket], None]:
    def serve(connection: socket.socket) -> None:
        connection.sendall(data)
        while forever:
            connection.sendall(data)
        while connection.recv(1 << 16):
            pass

    return serve


@pytest.mark.parametrize(
    "serve",
    [
        speak(b""),
        speak(b"HTTP/1.1 400 Bad Request\r\n\r\n"),
        speak(b"x" * 65536, forever=True),
        speak(b"SSH-2.0-OpenSSH_9.2\r\n"),
        speak(b"SSH-1.5-old\r\n"),
        speak(b"SSH-2.0-x\r\n" + b"\xff" * 4096),
        lambda connection: connection.close(),
    ],
    ids=["silent", "http", "endless", "half", "old", "noise", "closing"],
)
def test_what_is_no_ssh_server_ends_in_time(way: Way, serve: Callable[[socket.socket], None]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept() -> None:
            try:
                connection, _ = listener.accept()
                with connection:
                    serve(connection)
            except OSError:
                return

        thread = threading.Thread(target=accept)
        thread.start()
        connection = way.connection(ansible_port=listener.getsockname()[1])
        with pytest.raises(UnreachableError) as caught, open_session(connection, timeout_s=1.0):
            pass
        thread.join()
    assert f"127.0.0.1 port {connection.port} " in caught.value.message
    endings = ("does not answer as an SSH server", "speaks no SSH that is still safe")
    assert any(words in caught.value.message for words in endings)


def say(stdout: bytes, code: int | None = 0) -> Callable[[paramiko.Channel, str], None]:
    def behave(channel: paramiko.Channel, command: str) -> None:
        channel.sendall(stdout)
        if code is not None:
            channel.send_exit_status(code)
        channel.close()

    return behave


def test_a_login_shell_that_runs_nothing(way: Way, key_file: Path) -> None:
    way.server.behaviour = say(b"This account is currently not available.\n", 1)
    with (
        open_session(way.connection(ansible_ssh_private_key_file=str(key_file))) as session,
        pytest.raises(UnreachableError, match="This account is currently not available"),
    ):
        session.run(["true"])


def test_a_connection_that_breaks_while_something_runs(way: Way, key_file: Path) -> None:
    def behave(channel: paramiko.Channel, command: str) -> None:
        channel.get_transport().close()

    way.server.behaviour = behave
    with open_session(way.connection(ansible_ssh_private_key_file=str(key_file))) as session:
        with pytest.raises(UnreachableError, match="the connection was lost"):
            session.run(["true"])
        with pytest.raises(UnreachableError, match="the connection was lost"):
            session.run(["true"])


def test_output_without_end_is_cut(way: Way, key_file: Path) -> None:
    with open_session(way.connection(ansible_ssh_private_key_file=str(key_file))) as session:
        with pytest.raises(ProbeError, match="more than 32 MiB of output"):
            session.run(["yes"], timeout_s=120)
        assert session.run(["echo", "still here"]).stdout == b"still here\n"


def test_output_of_a_closed_channel_harms_no_other(way: Way, key_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "MAX_OUTPUT_BYTES", 1 << 20)
    with open_session(way.connection(ansible_ssh_private_key_file=str(key_file))) as session:
        for _ in range(20):
            with pytest.raises(ProbeError, match="more than 1 MiB of output"):
                session.run(["yes"], timeout_s=120)
            assert session.run(["echo", "still here"]).stdout == b"still here\n"


def test_a_program_that_does_not_end_is_given_up(way: Way, key_file: Path) -> None:
    with open_session(way.connection(ansible_ssh_private_key_file=str(key_file))) as session:
        with pytest.raises(UnreachableError, match=r"no answer within 0\.5 s"):
            session.run(["sleep", "600"], timeout_s=0.5)
        assert session.run(["echo", "still here"]).stdout == b"still here\n"


# --- being in -----------------------------------------------------------------------------------------------------------------


def test_programs_get_their_arguments_input_and_streams_unchanged(way: Way, key_file: Path) -> None:
    with open_session(way.connection(ansible_ssh_private_key_file=str(key_file))) as session:
        odd = "a b'c\"d$e`f\\g\nh!i*"
        assert session.run(["printf", "%s|", odd, ""]).stdout == f"{odd}||".encode()
        done = session.run("cat; echo oops >&2; exit 7", stdin=b"in\0put")
        assert (done.rc, done.stdout, done.stderr) == (7, b"in\0put", b"oops\n")
        assert session.run(["cat"]).stdout == b""
        assert session.run(["true"], stdin=b"x" * (1 << 20)).rc == 0
        large = os.urandom(5 << 20)
        assert session.run(["cat"], stdin=large).stdout == large
        assert session.run("kill -9 $$").rc == -1


def test_what_a_login_shell_prints_first_is_no_output(way: Way, key_file: Path) -> None:
    from tests.unit.ssh_server import run_for_real

    def behave(channel: paramiko.Channel, command: str) -> None:
        channel.sendall(b"Welcome!\nv100ctl-0000\n")
        run_for_real(channel, command)

    way.server.behaviour = behave
    with open_session(way.connection(ansible_ssh_private_key_file=str(key_file))) as session:
        assert session.run(["echo", "hello"]).stdout == b"hello\n"


class _Echo(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for part in (body, body):
            self.wfile.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
        self.wfile.write(b"0\r\n\r\n")

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing on the terminal."""


@pytest.fixture
def echo_port() -> Iterator[int]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Echo) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield running.server_address[1]
        running.shutdown()


@pytest.mark.parametrize("kind", ["ssh", "local"])
def test_http_through_the_session(way: Way, key_file: Path, echo_port: int, kind: str) -> None:
    variables = {"ansible_connection": kind, "ansible_ssh_private_key_file": str(key_file)}
    with open_session(way.connection(**variables)) as session:
        client = http.client.HTTPConnection("127.0.0.1")
        client.sock = session.open_tcp("127.0.0.1", echo_port)
        for body in (b"x" * 100_000, b"again on the same connection"):
            client.request("POST", "/", body=body)
            assert client.getresponse().read() == body * 2
        client.close()


class _ClosingEcho(_Echo):
    protocol_version = "HTTP/1.0"

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)


@pytest.mark.parametrize("kind", ["ssh", "local"])
def test_an_answer_can_be_read_after_its_connection_was_closed(way: Way, key_file: Path, kind: str) -> None:
    # What `http.client` does with a server that closes after its answer.
    variables = {"ansible_connection": kind, "ansible_ssh_private_key_file": str(key_file)}
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _ClosingEcho) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        with open_session(way.connection(**variables)) as session:
            client = http.client.HTTPConnection("127.0.0.1")
            stream = session.open_tcp("127.0.0.1", running.server_address[1])
            client.sock = stream
            client.request("POST", "/", body=b"x" * 100_000)
            response = client.getresponse()
            stream.close()
            assert response.read() == b"x" * 100_000
            with pytest.raises(OSError, match=r"(?i)closed|bad file descriptor"):
                stream.sendall(b"more")
        running.shutdown()


@pytest.mark.parametrize("kind", ["ssh", "local"])
def test_a_silent_service_times_out(way: Way, key_file: Path, kind: str) -> None:
    variables = {"ansible_connection": kind, "ansible_ssh_private_key_file": str(key_file)}
    with socket.create_server(("127.0.0.1", 0)) as silent, open_session(way.connection(**variables)) as session:
        stream = session.open_tcp("127.0.0.1", silent.getsockname()[1])
        stream.settimeout(0.2)
        with pytest.raises(TimeoutError):
            stream.recv(1)
        stream.close()
        stream.close()


@pytest.mark.parametrize("kind", ["ssh", "local"])
def test_a_closed_port_is_an_os_error(way: Way, key_file: Path, kind: str) -> None:
    variables = {"ansible_connection": kind, "ansible_ssh_private_key_file": str(key_file)}
    with open_session(way.connection(**variables)) as session:
        with socket.create_server(("127.0.0.1", 0)) as other:
            port = other.getsockname()[1]
        with pytest.raises(ConnectionRefusedError):
            session.open_tcp("127.0.0.1", port)


def test_a_host_that_forwards_nothing_says_so(way: Way, key_file: Path) -> None:
    way.server.forwarding = False
    with (
        open_session(way.connection(ansible_ssh_private_key_file=str(key_file))) as session,
        pytest.raises(UnreachableError, match="it does not forward connections"),
    ):
        session.open_tcp("127.0.0.1", 22)


# --- proxies ------------------------------------------------------------------------------------------------------------------

RELAY = """
import os, socket, sys, threading
server = socket.create_connection((sys.argv[1], int(sys.argv[2])))
def up():
    while data := os.read(0, 65536):
        server.sendall(data)
    server.shutdown(socket.SHUT_WR)
threading.Thread(target=up, daemon=True).start()
while data := server.recv(65536):
    os.write(1, data)
"""


def test_a_proxy_command(way: Way, key_file: Path, tmp_path: Path) -> None:
    (tmp_path / "relay.py").write_text(RELAY)
    way.options += ["-o", f"ProxyCommand={sys.executable} {tmp_path}/relay.py %h %p"]
    with open_session(way.connection(ansible_ssh_private_key_file=str(key_file))) as session:
        large = os.urandom(1 << 20)
        assert session.run(["cat"], stdin=large).stdout == large


def test_a_proxy_that_fails_says_why(way: Way) -> None:
    way.options += ["-o", "ProxyCommand=sh -c 'echo proxy: no route to %h >&2; exit 1'"]
    assert "no connection through the proxy: proxy: no route to 127.0.0.1" in way.refused().message


def test_a_proxy_that_is_silent_ends_in_time(way: Way) -> None:
    way.options += ["-o", "ProxyCommand=sleep 600"]
    with pytest.raises(UnreachableError, match="does not answer as an SSH server"), open_session(way.connection(), timeout_s=1.0):
        pass


def test_bounds_are_what_the_messages_say() -> None:
    assert MAX_OUTPUT_BYTES == 32 << 20
    assert Secrets() == Secrets(None, None)
