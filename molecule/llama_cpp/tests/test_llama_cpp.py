"""After the role."""

import json

import pytest
from testinfra.host import Host

ENGINES = "/opt/v100ctl/engines/llama_cpp"


@pytest.fixture
def release(host: Host) -> str:
    (name,) = host.file(ENGINES).listdir()
    return f"{ENGINES}/{name}"


def test_server_names_its_build_in_an_empty_environment(host: Host, release: str) -> None:
    done = host.run("env -i %s/bin/llama-server --version", release)
    assert done.rc == 0
    assert "build 11434" in done.stdout + done.stderr


@pytest.mark.parametrize("program", ["llama-quantize", "llama-bench"])
def test_other_programs_start(host: Host, release: str, program: str) -> None:
    assert "usage" in host.run("env -i %s/bin/%s --help", release, program).stdout.lower()


def test_libraries_come_from_the_release(host: Host, release: str) -> None:
    lines = host.check_output("ldd %s/bin/llama-server", release).splitlines()
    own = [line for line in lines if "ggml" in line or "llama" in line]
    assert own
    assert all(f"=> {release}/" in line for line in own)


def test_release_says_what_it_is(host: Host, release: str) -> None:
    document = json.loads(host.file(f"{release}/release.json").content_string)
    assert document["build_id"] == release.rpartition("/")[2]
    assert (document["build_number"], document["backend"], document["licence"]) == (11434, "cpu", "MIT")
    assert document["cpu"]["level"] == "x86-64-v3"
    assert document["needs"] and "libgomp.so.1" in document["needs"]
    for name, expected in document["files"].items():
        found = host.file(f"{release}/{name}")
        assert (found.size, found.sha256sum) == (expected["size_bytes"], expected["sha256"])
        assert (found.user, found.group, f"{found.mode:04o}") == ("root", "root", expected["mode"])


def test_licences_are_there(host: Host, release: str) -> None:
    assert "MIT License" in host.file(f"{release}/LICENSE").content_string
    assert "LICENSE-jsonhpp" in host.file(f"{release}/licenses").listdir()


def test_nothing_is_left_of_the_build(host: Host) -> None:
    # `ls`, since a build that another host took up may have left the parent folder.
    assert host.run("ls -A /var/lib/v100ctl/build").stdout == ""
