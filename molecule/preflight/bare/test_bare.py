"""After a dry run on a bare host."""

from testinfra.host import Host


def test_nothing_was_installed(host: Host) -> None:
    assert not host.package("tree").is_installed
