"""After a dry run on a bare host."""

from testinfra.host import Host


def test_nothing_was_made(host: Host) -> None:
    assert not host.file("/var/lib/v100ctl").exists


def test_the_users_own_model_is_untouched(host: Host) -> None:
    assert host.file("/srv/models/mine.gguf").mode == 0o640
