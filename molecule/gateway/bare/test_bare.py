"""After a dry run on a host without a gateway."""

from testinfra.host import Host


def test_nothing_was_made(host: Host) -> None:
    assert not host.file("/etc/v100ctl/gateway.cfg").exists
    assert not host.file("/etc/systemd/system/v100ctl-gateway.service").exists
    assert not host.socket("tcp://127.0.0.1:8000").is_listening
