"""After the role."""

import json

from testinfra.host import Host


def test_the_card_is_set(host: Host) -> None:
    card = json.loads(host.file("/var/lib/stand-in-card.json").content_string)
    assert (card["persistence"], card["power"], card["clocks"]) == ("Enabled", "250.00", ["877", "1380"])
    assert card["mode"] == "Exclusive_Process"


def test_nothing_was_set_twice(host: Host) -> None:
    calls = json.loads(host.file("/var/lib/stand-in-card.json").content_string)["calls"]
    settings = [call for call in calls if "--query" not in call]
    assert len(settings) == len(set(settings))


def test_ecc_was_left_alone(host: Host) -> None:
    card = json.loads(host.file("/var/lib/stand-in-card.json").content_string)
    assert card["ecc"] == ["Enabled", "Enabled"]


def test_the_daemon_runs(host: Host) -> None:
    daemon = host.service("nvidia-persistenced")
    assert (daemon.is_masked, daemon.is_enabled, daemon.is_running) == (False, True, True)


def test_settings_come_back_at_boot(host: Host) -> None:
    assert host.service("v100ctl-gpu-tuning").is_enabled
    assert host.run("systemd-analyze verify /etc/systemd/system/v100ctl-gpu-tuning.service").stderr == ""


def test_docker_has_its_own_settings_and_the_ulimits(host: Host) -> None:
    settings = json.loads(host.file("/etc/docker/daemon.json").content_string)
    assert settings["log-driver"] == "journald"
    assert settings["default-ulimits"]["stack"] == {"Name": "stack", "Hard": 67108864, "Soft": 67108864}


def test_docker_was_not_restarted(host: Host) -> None:
    # It runs without live-restore: a restart would have stopped its containers.
    assert "default-ulimits" not in host.file("/run/stand-in-docker.json").content_string
