"""After a dry run on a bare host."""

from testinfra.host import Host


def test_nothing_was_made(host: Host) -> None:
    assert host.file("/var/lib/v100ctl").listdir() == ["models"]
    assert host.file("/var/lib/v100ctl/models").listdir() == ["0123456789ab-old.gguf"]


def test_the_users_own_model_is_untouched(host: Host) -> None:
    assert host.file("/srv/models/mine.gguf").mode == 0o640
