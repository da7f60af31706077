"""After a dry run on a bare host."""

from testinfra.host import Host


def test_nothing_was_made(host: Host) -> None:
    assert not host.user("v100").exists
    assert not host.file("/etc/v100ctl").exists
    assert not host.file("/etc/systemd/system/v100-chat.service").exists
