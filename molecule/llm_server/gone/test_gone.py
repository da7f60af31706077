"""After an instance was taken out of the plan."""

from testinfra.host import Host


def test_nothing_of_the_instance_is_left(host: Host) -> None:
    assert not host.file("/etc/systemd/system/v100-chat.service").exists
    assert not host.file("/etc/v100ctl/instances/chat.env").exists
    assert not host.file("/etc/systemd/system/multi-user.target.wants/v100-chat.service").exists
    assert host.run("systemctl is-active v100-chat.service").stdout.strip() == "inactive"
    assert not host.socket("tcp://127.0.0.1:8000").is_listening


def test_the_other_one_still_serves(host: Host) -> None:
    assert host.service("v100-embed").is_running
