"""After a dry run on a bare host."""

import pytest
from testinfra.host import Host


@pytest.mark.parametrize("name", ["nvidia-cuda-toolkit", "g++-11", "libcuda1"])
def test_nothing_was_installed(host: Host, name: str) -> None:
    assert not host.package(name).is_installed
