"""After a dry run on a bare host."""

from testinfra.host import Host


def test_nothing_was_made(host: Host) -> None:
    assert not host.file("/opt/v100ctl").exists
