"""After the role."""

from testinfra.host import Host


def test_package_is_installed(host: Host) -> None:
    assert host.package("tree").is_installed


def test_nothing_that_was_not_asked_for_came_with_it(host: Host) -> None:
    assert host.run("apt-config dump APT::Install-Recommends").rc == 0
    assert host.run("apt-mark showauto tree").stdout == ""
