"""After a dry run on a bare host."""

import pytest
from testinfra.host import Host


@pytest.mark.parametrize("path", ["/opt/v100ctl", "/var/lib/v100ctl/build"])
def test_nothing_was_made(host: Host, path: str) -> None:
    assert not host.file(path).exists
