"""After the role."""

import json

import pytest
from testinfra.host import Host

ENGINES = "/opt/v100ctl/engines/external"


@pytest.fixture
def release(host: Host) -> str:
    (name,) = host.file(ENGINES).listdir()
    return f"{ENGINES}/{name}"


def test_the_program_runs_for_everybody(host: Host, release: str) -> None:
    done = host.run("setpriv --reuid nobody --regid nogroup --clear-groups env -i %s/bin/server", release)
    assert (done.rc, done.stdout) == (0, "engine 1 for sm_70, 1\n")


def test_the_release_says_what_it_is(host: Host, release: str) -> None:
    document = json.loads(host.file(f"{release}/release.json").content_string)
    assert document["schema"] == "v100ctl/release/1"
    assert (document["engine"], document["name"], document["licence"]) == ("external", "mine", "MIT")
    assert document["build_id"] == release.rpartition("/")[2]
    assert document["source"]["kind"] == "archive"
    assert sorted(document["files"]) == ["bin/server", "lib/kernels.so", "lib/kernels.so.7"]
    for name, expected in document["files"].items():
        found = host.file(f"{release}/{name}")
        assert found.is_file
        assert not found.is_symlink
        assert (found.size, found.sha256sum) == (expected["size_bytes"], expected["sha256"])
        assert (found.user, found.group, f"{found.mode:04o}") == ("root", "root", expected["mode"])


def test_nobody_else_may_change_it(host: Host, release: str) -> None:
    assert host.check_output("find %s -perm /022 ! -type l", release) == ""
