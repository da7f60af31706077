"""After the role."""

import json

import pytest
from testinfra.host import Host

RECORDS = "/var/lib/v100ctl/state/models"
CONTENTS = {
    "/srv/models/mine.gguf": "mine",
    "/var/lib/v100ctl/models/controller.gguf": "a model from the controller\n",
    "/var/lib/v100ctl/models/whole.gguf": "whole",
}


@pytest.mark.parametrize("path", CONTENTS)
def test_model_is_whole(host: Host, path: str) -> None:
    assert host.file(path).content_string == CONTENTS[path]


def test_fetched_models_can_be_read_by_the_server(host: Host) -> None:
    found = host.file("/var/lib/v100ctl/models/whole.gguf")
    assert (found.user, found.group, found.mode) == ("root", "root", 0o644)


def test_the_users_own_model_is_untouched(host: Host) -> None:
    assert host.file("/srv/models/mine.gguf").mode == 0o640


def test_each_model_has_the_record_that_the_probe_reads(host: Host) -> None:
    records = [json.loads(host.file(f"{RECORDS}/{name}").content_string) for name in host.file(RECORDS).listdir()]
    assert {record["path"] for record in records} == set(CONTENTS)
    for record in records:
        found = host.file(record["path"])
        assert record["sha256"] == found.sha256sum
        assert record["size_bytes"] == found.size
        assert record["mtime_s"] == int(host.check_output("stat --format=%%Y %s", record["path"]))


def test_nothing_is_left_aside(host: Host) -> None:
    assert sorted(host.file("/var/lib/v100ctl/models").listdir()) == ["controller.gguf", "whole.gguf"]
