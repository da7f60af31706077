"""After a dry run on a bare host."""

from testinfra.host import Host


def test_nothing_was_made(host: Host) -> None:
    assert not host.package("nvidia-smi").is_installed
    assert host.run("ls /etc/apt/sources.list.d/v100ctl* /etc/apt/preferences.d/v100ctl* /etc/modprobe.d/v100ctl*").stdout == ""
    assert not host.file("/var/lib/v100ctl").exists
