"""From Ansible's variables and the user's ssh configuration to the way into a host."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from v100ctl.errors import InventoryError, UnreachableError
from v100ctl.probe.connection import (
    Connection,
    HostKeyPolicy,
    Secrets,
    SshTarget,
    expand_proxy_command,
    jump_command,
    parse_ssh_config,
)


def test_a_bare_host_is_reached_by_its_name() -> None:
    connection = Connection.from_vars("web1", {})
    assert (connection.kind, connection.address, connection.port, connection.user) == ("ssh", "web1", None, None)
    assert (connection.become, connection.become_user, connection.host_keys) == (None, "root", HostKeyPolicy.ASK)
    assert connection.ssh_command("-G") == ["ssh", "-G", "--", "web1"]


def test_the_users_arguments_come_in_the_order_of_ssh() -> None:
    connection = Connection.from_vars(
        "web1",
        {
            "ansible_host": "10.0.0.1",
            "ansible_port": 2222,
            "ansible_user": "admin",
            "ansible_ssh_private_key_file": "~nobody-here/key",
            "ansible_ssh_common_args": "-o 'UserKnownHostsFile=/a b/kh'",
            "ansible_ssh_extra_args": "-o Compression=yes",
        },
    )
    assert connection.ssh_command() == [
        *("ssh", "-o", "UserKnownHostsFile=/a b/kh", "-o", "Compression=yes"),
        *("-p", "2222", "-l", "admin", "-i", "~nobody-here/key", "--", "10.0.0.1"),
    ]


@pytest.mark.parametrize(
    ("variables", "ask", "password", "become_password"),
    [
        ({}, Secrets(), None, None),
        ({}, Secrets("typed", "typed-root"), "typed", "typed-root"),
        ({"ansible_password": "kept", "ansible_become_password": "kept-r"}, Secrets("typed", "typed-root"), "kept", "kept-r"),
        ({"ansible_ssh_pass": "kept", "ansible_become_pass": "kept-root"}, Secrets(), "kept", "kept-root"),
        ({"ansible_password": 12345}, Secrets(), "12345", None),
        ({"ansible_password": ""}, Secrets("typed"), "typed", None),
    ],
)
def test_passwords(variables: dict[str, Any], ask: Secrets, password: str | None, become_password: str | None) -> None:
    connection = Connection.from_vars("web1", variables, ask=ask)
    assert (connection.password, connection.become_password) == (password, become_password)


def test_passwords_are_not_shown() -> None:
    secrets = Secrets("hush-1", "hush-2")
    connection = Connection.from_vars("web1", {"ansible_password": "hush-3", "ansible_become_password": "hush-4"}, ask=secrets)
    assert "hush" not in repr(secrets) + repr(connection) + str(connection)


@pytest.mark.parametrize(
    ("value", "expected"),
    [(None, None), (True, True), (False, False), ("yes", True), ("No", False), ("on", True), (0, False), (1, True)],
)
def test_become(value: object, expected: bool | None) -> None:
    assert Connection.from_vars("web1", {"ansible_become": value}).become is expected


@pytest.mark.parametrize(
    ("value", "kind"),
    [("ssh", "ssh"), ("smart", "ssh"), ("paramiko", "ssh"), ("ansible.builtin.ssh", "ssh"), ("local", "local")],
)
def test_kinds_of_connection(value: str, kind: str) -> None:
    assert Connection.from_vars("web1", {"ansible_connection": value}).kind == kind


@pytest.mark.parametrize(
    ("value", "expected"), [("auto", None), ("auto_silent", None), ("/usr/bin/env python3", "/usr/bin/env python3"), (None, None)]
)
def test_interpreters(value: str | None, expected: str | None) -> None:
    assert Connection.from_vars("web1", {"ansible_python_interpreter": value}).python_interpreter == expected


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"ansible_connection": "winrm"}, "`ansible_connection: winrm`"),
        ({"ansible_become_method": "su"}, "`ansible_become_method: su`"),
        ({"ansible_port": "ssh"}, "`ansible_port`"),
        ({"ansible_port": 0}, "`ansible_port`"),
        ({"ansible_port": 65536}, "`ansible_port`"),
        ({"ansible_port": "22; reboot"}, "`ansible_port`"),
        ({"ansible_host": "-oProxyCommand=reboot"}, "`ansible_host`"),
        ({"ansible_host": "a b"}, "`ansible_host`"),
        ({"ansible_user": "-x"}, "`ansible_user`"),
        ({"ansible_user": "a\x1b[2J"}, "`ansible_user`"),
        ({"ansible_user": ["root"]}, "`ansible_user`"),
        ({"ansible_become": "perhaps"}, "`ansible_become`"),
        ({"ansible_ssh_common_args": "-o 'unfinished"}, "`ansible_ssh_common_args`"),
    ],
)
def test_a_wrong_variable_is_named(variables: dict[str, Any], words: str) -> None:
    with pytest.raises(InventoryError) as caught:
        Connection.from_vars("web1", variables)
    assert caught.value.message.startswith("web1: ")
    assert words in caught.value.message
    assert "\x1b" not in caught.value.message


def test_another_become_method_is_fine_where_none_is_used() -> None:
    assert Connection.from_vars("web1", {"ansible_become_method": "su", "ansible_become": False}).become is False


SSH_G = """\
host web1
user admin
hostname 10.0.0.1
port 2222
identitiesonly yes
hashknownhosts yes
stricthostkeychecking accept-new
serveraliveinterval 30
hostkeyalias web1.internal
identityfile ~/.ssh/id_ed25519
identityfile /keys/%h-%r-%p-%%
identityfile none
globalknownhostsfile /etc/ssh/ssh_known_hosts /etc/ssh/ssh_known_hosts2
userknownhostsfile /home/u/.ssh/known_hosts /home/u/%h
connecttimeout 5
proxycommand none
proxyjump joe@jump:2200
addressfamily inet6
"""


def test_ssh_config() -> None:
    target = parse_ssh_config(SSH_G, "web1")
    assert target == SshTarget(
        hostname="10.0.0.1",
        port=2222,
        user="admin",
        identity_files=(Path.home() / ".ssh/id_ed25519", Path("/keys/10.0.0.1-admin-2222-%")),
        identities_only=True,
        user_known_hosts_files=(Path("/home/u/.ssh/known_hosts"), Path("/home/u/%h")),
        global_known_hosts_files=(Path("/etc/ssh/ssh_known_hosts"), Path("/etc/ssh/ssh_known_hosts2")),
        hash_known_hosts=True,
        host_key_alias="web1.internal",
        strict_host_key_checking="accept-new",
        proxy_jump="joe@jump:2200",
        connect_timeout_s=5.0,
        keepalive_s=30,
        address_family="inet6",
    )


def test_ssh_config_of_nothing_has_the_defaults() -> None:
    target = parse_ssh_config("userknownhostsfile none\nconnecttimeout none\n", "web1")
    assert (target.hostname, target.port, target.user_known_hosts_files) == ("web1", 22, ())


def test_a_known_hosts_file_with_a_blank_in_its_name(tmp_path: Path) -> None:
    path = tmp_path / "a b"
    assert parse_ssh_config(f"userknownhostsfile {path}\n", "web1").user_known_hosts_files == (tmp_path / "a", Path("b"))
    path.touch()
    assert parse_ssh_config(f"userknownhostsfile {path}\n", "web1").user_known_hosts_files == (path,)


@pytest.mark.parametrize("output", ["port x\n", "proxyusefdpass yes\n"])
def test_ssh_config_that_cannot_be_used(output: str) -> None:
    with pytest.raises(UnreachableError, match="web1: "):
        parse_ssh_config(output, "web1")


@given(st.text())
def test_any_ssh_config_is_read_or_refused(output: str) -> None:
    with contextlib.suppress(UnreachableError):
        parse_ssh_config(output, "web1")


def test_the_real_ssh_answers(tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.write_text(
        "Host web1\n  HostName 10.9.8.7\n  Port 2022\n  User fromfile\n"
        f'  UserKnownHostsFile "{tmp_path}/k%%h"\n  IdentityFile {tmp_path}/%%x-%h\n'
    )
    connection = Connection.from_vars("web1", {"ansible_ssh_common_args": f"-F {config}", "ansible_user": "joe"})
    target = connection.resolve()
    assert (target.hostname, target.port, target.user) == ("10.9.8.7", 2022, "joe")
    assert target.user_known_hosts_files == (tmp_path / "k%h",)
    assert target.identity_files == (tmp_path / "%x-10.9.8.7",)


def test_a_missing_ssh_is_named() -> None:
    connection = Connection.from_vars("web1", {"ansible_ssh_executable": "/no/such/ssh"})
    with pytest.raises(UnreachableError, match="`/no/such/ssh` is not installed here") as caught:
        connection.resolve()
    assert "openssh-client" in (caught.value.hint or "")


def test_an_option_that_ssh_does_not_know_is_shown() -> None:
    connection = Connection.from_vars("web1", {"ansible_ssh_extra_args": "-F /dev/null -o NoSuchOption=1"})
    with pytest.raises(UnreachableError, match=r"(?i)bad configuration option: nosuchoption"):
        connection.resolve()


def test_proxy_commands_have_their_tokens_resolved() -> None:
    target = SshTarget(hostname="10.0.0.1", port=2222, user="admin")
    expanded = expand_proxy_command("nc -x p%%q %h %p %r %n %Z", "web1", target)
    assert expanded == "nc -x p%q 10.0.0.1 2222 admin web1 %Z"


@pytest.mark.parametrize("name", ["a;reboot", "$(reboot)", "a b", "`x`", "-x", "a\nb", "a'b", ""])
def test_names_that_a_shell_would_obey_are_refused(name: str) -> None:
    with pytest.raises(UnreachableError):
        expand_proxy_command("nc %h %p", "web1", SshTarget(hostname=name, port=22, user="u"))


@pytest.mark.parametrize(
    ("jump", "arguments", "expected"),
    [
        ("jump", "", ["--", "jump"]),
        ("joe@jump:2200", "", ["-l", "joe", "-p", "2200", "--", "jump"]),
        ("joe@[::1]:2200", "", ["-l", "joe", "-p", "2200", "--", "::1"]),
        ("::1", "", ["--", "::1"]),
        ("ssh://joe@jump:1", "", ["-l", "joe", "-p", "1", "--", "jump"]),
        ("a,joe@b,c:3", "", ["-J", "a,joe@b", "-p", "3", "--", "c"]),
        ("jump", "-F /x/config -o X=y", ["-F", "/x/config", "--", "jump"]),
        ("jump", "-F/x/config", ["-F/x/config", "--", "jump"]),
    ],
)
def test_jump_hosts(jump: str, arguments: str, expected: list[str]) -> None:
    connection = Connection.from_vars("web1", {"ansible_ssh_common_args": arguments})
    target = SshTarget(hostname="10.0.0.1", port=22, user="u", proxy_jump=jump)
    assert jump_command(connection, target) == ["ssh", "-W", "[10.0.0.1]:22", *expected]


@pytest.mark.parametrize("value", ["'", " "])
def test_an_interpreter_that_is_no_command_is_refused(value: str) -> None:
    with pytest.raises(InventoryError, match="ansible_python_interpreter"):
        Connection.from_vars("h1", {"ansible_python_interpreter": value})


@pytest.mark.parametrize(
    ("value", "taken"), [("/usr/bin/env python3", "/usr/bin/env python3"), ("auto_silent", None), ("", None)]
)
def test_an_interpreter_may_have_arguments_or_be_found(value: str, taken: str | None) -> None:
    assert Connection.from_vars("h1", {"ansible_python_interpreter": value}).python_interpreter == taken
