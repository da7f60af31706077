"""After a dry run on a bare host."""

import json

import pytest
from testinfra.host import Host


@pytest.mark.parametrize("path", ["/etc/v100ctl", "/opt/v100ctl", "/etc/systemd/system/v100ctl-gpu-tuning.service"])
def test_nothing_was_made(host: Host, path: str) -> None:
    assert not host.file(path).exists


def test_nothing_was_set(host: Host) -> None:
    card = json.loads(host.file("/var/lib/stand-in-card.json").content_string)
    assert (card["persistence"], card["power"], card["mode"]) == ("Disabled", "300.00", "Default")
    assert all("--query" in call for call in card["calls"])


def test_nothing_was_unmasked(host: Host) -> None:
    assert host.service("nvidia-persistenced").is_masked
