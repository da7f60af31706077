"""After the role."""

from testinfra.host import Host


def test_package_is_installed(host: Host) -> None:
    assert host.package("tree").is_installed
