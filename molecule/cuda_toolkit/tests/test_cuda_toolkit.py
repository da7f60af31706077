"""After the role."""

import pytest
from testinfra.host import Host


@pytest.mark.parametrize("name", ["nvidia-cuda-toolkit", "g++-11", "libcuda1"])
def test_packages_are_installed(host: Host, name: str) -> None:
    assert host.package(name).is_installed


def test_the_driver_library_that_came_is_held(host: Host) -> None:
    held = host.check_output("apt-mark showhold").split()
    assert {"libcuda1", "nvidia-alternative"} <= set(held)


def test_it_is_the_toolkit_that_was_asked_for(host: Host) -> None:
    assert "release 11.8" in host.check_output("/usr/lib/nvidia-cuda-toolkit/bin/nvcc --version")


def test_nothing_is_left_of_the_proof(host: Host) -> None:
    assert host.run("ls -d /tmp/v100ctl-cuda-*").rc != 0
