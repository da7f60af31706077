"""After the role."""

import json

import pytest
from testinfra.host import Host

RECORDS = "/var/lib/v100ctl/state/models"
STORE = "/var/lib/v100ctl/models"
CONTENTS = {
    "/srv/models/mine.gguf": "mine",
    f"{STORE}/controller.gguf": "a model from the controller\n",
    f"{STORE}/fleet.gguf": "mine",
    f"{STORE}/hub.gguf": "from the hub",
    f"{STORE}/made.gguf": "MINE",
    f"{STORE}/split/big-00001-of-00002.gguf": "1",
    f"{STORE}/split/big-00002-of-00002.gguf": "2",
    f"{STORE}/whole.gguf": "whole",
}


@pytest.mark.parametrize("path", CONTENTS)
def test_model_is_whole(host: Host, path: str) -> None:
    assert host.file(path).content_string == CONTENTS[path]


def test_fetched_models_can_be_read_by_the_server(host: Host) -> None:
    found = host.file(f"{STORE}/whole.gguf")
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
    # What the toolkit put there before and nobody uses any more is gone too.
    assert sorted(host.file(STORE).listdir()) == ["controller.gguf", "fleet.gguf", "hub.gguf", "made.gguf", "split", "whole.gguf"]
    assert sorted(host.file(f"{STORE}/split").listdir()) == ["big-00001-of-00002.gguf", "big-00002-of-00002.gguf"]
    assert host.file("/var/lib/v100ctl/transfer").listdir() == []
    assert sorted(host.file("/var/lib/v100ctl/state/model_store").listdir()) == ["locks", "model_store.py"]


def test_what_was_made_says_of_what(host: Host) -> None:
    (name,) = [name for name in host.file(RECORDS).listdir() if name.startswith("made.gguf-")]
    record = json.loads(host.file(f"{RECORDS}/{name}").content_string)
    assert list(record["inputs"]) == ["/srv/models/mine.gguf"]
    assert record["argv"][0] == "/bin/sh"


def test_the_token_is_nowhere_on_the_host(host: Host) -> None:
    # The brackets keep the search itself, which sudo logs, from being found.
    assert host.run("grep -r 'hf_forTheHubAlon[e]' /var/lib/v100ctl /tmp /root /etc /var/log").rc == 1
