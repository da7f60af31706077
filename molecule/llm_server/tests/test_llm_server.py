"""After the role."""

import json

import pytest
from testinfra.host import Host

INSTANCES = {"chat": 8000, "embed": 8001}


def test_the_account_cannot_log_in(host: Host) -> None:
    account = host.user("v100")
    assert (account.group, account.home, account.shell) == ("v100", "/var/lib/v100ctl", "/usr/sbin/nologin")


@pytest.mark.parametrize("instance", INSTANCES)
def test_unit_runs_and_comes_back_after_a_reboot(host: Host, instance: str) -> None:
    unit = host.service(f"v100-{instance}")
    assert unit.is_running
    assert unit.is_enabled


@pytest.mark.parametrize("instance", INSTANCES)
def test_server_runs_as_its_account_with_the_planned_digest(host: Host, instance: str) -> None:
    pid = host.check_output(f"systemctl show --value --property MainPID v100-{instance}")
    assert host.process.get(pid=int(pid)).user == "v100"
    environment = host.file(f"/proc/{pid}/environ").content.split(b"\0")
    assert {"chat": b"V100CTL_INSTANCE_DIGEST=first", "embed": b"V100CTL_INSTANCE_DIGEST=always"}[instance] in environment


@pytest.mark.parametrize("port", INSTANCES.values())
def test_server_listens_on_loopback_alone(host: Host, port: int) -> None:
    assert host.socket(f"tcp://127.0.0.1:{port}").is_listening
    assert not host.socket(f"tcp://0.0.0.0:{port}").is_listening


def test_secrets_are_for_root_and_the_account_alone(host: Host) -> None:
    for name in ("chat.env", "chat.keys"):
        secrets = host.file(f"/etc/v100ctl/instances/{name}")
        assert (secrets.user, secrets.group, secrets.mode) == ("root", "v100", 0o640)


def test_the_key_stands_nowhere_else(host: Host) -> None:
    found = host.run("grep -rl 'first-key-of-the-tes[t]' /etc /opt /run /var/log /var/lib /tmp /root")
    assert found.stdout.split() == ["/etc/v100ctl/instances/chat.keys"]
    assert host.run("journalctl --no-pager | grep -c 'first-key-of-the-tes[t]'").stdout.strip() == "0"
    assert host.run("ps axww | grep 'first-key-of-the-tes[t]'").stdout == ""


def test_the_applied_plan_is_recorded(host: Host) -> None:
    record = host.file("/etc/v100ctl/host.json")
    assert json.loads(record.content_string) == {"schema": "v100ctl/host/1", "digest": "first"}
    assert (record.user, record.mode) == ("root", 0o644)
