"""After a dry run on a bare host."""

import pytest
from testinfra.host import Host


@pytest.mark.parametrize(
    "path",
    ["/etc/v100ctl", "/opt/v100ctl", "/etc/systemd/system/v100ctl-metrics.timer", "/var/lib/prometheus", "/usr/bin/prometheus"],
)
def test_nothing_was_made(host: Host, path: str) -> None:
    assert not host.file(path).exists


def test_nothing_listens(host: Host) -> None:
    assert not host.package("prometheus-node-exporter").is_installed
    assert not host.socket("tcp://127.0.0.1:9100").is_listening
