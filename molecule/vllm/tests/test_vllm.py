"""After the role."""

import json

import pytest
from testinfra.host import Host

ENGINES = "/opt/v100ctl/engines/vllm"


@pytest.fixture
def release(host: Host) -> str:
    (name,) = host.file(ENGINES).listdir()
    return f"{ENGINES}/{name}"


def test_release_says_what_it_is(host: Host, release: str) -> None:
    document = json.loads(host.file(f"{release}/release.json").content_string)
    assert document["build_id"] == release.rpartition("/")[2]
    assert (document["version"], document["torch"], document["cuda"]) == ("1.0", "2.6.0+toy", "12.4")
    assert document["cuda_architectures"] == ["sm_70", "sm_80"]
    assert document["licences"]["vllm 1.0"] == "MIT"
    for name, expected in document["files"].items():
        found = host.file(f"{release}/{name}")
        assert (found.size, found.sha256sum) == (expected["size_bytes"], expected["sha256"])
        assert (found.user, found.group, f"{found.mode:04o}") == ("root", "root", expected["mode"])


def test_every_file_is_in_the_manifest(host: Host, release: str) -> None:
    manifest = json.loads(host.file(f"{release}/manifest.json").content_string)
    found = host.check_output("cd %s && find . ! -type d -printf '%%P\\n'", release).splitlines()
    assert set(manifest) == set(found) - {"release.json", "manifest.json"}


def test_scripts_run_from_where_the_release_lies(host: Host, release: str) -> None:
    assert host.check_output("%s/bin/vllm", release) == "toy vllm"
    assert host.file(f"{release}/bin/vllm").content_string.splitlines()[0] == f"#!{release}/bin/python"
    assert host.run("grep -rlI incoming- %s --include=* --exclude-dir=__pycache__", release).stdout == ""


def test_pip_is_gone(host: Host, release: str) -> None:
    assert host.run("%s/bin/python -m pip --version", release).rc != 0


@pytest.mark.parametrize(
    ("words", "code"), [("--model /nowhere --enforce-eager", 0), ("--enforce-eager False", 2), ("--nothing", 2)]
)
def test_the_release_reads_command_lines(host: Host, release: str, words: str, code: int) -> None:
    assert host.run(f"{release}/bin/python -B {release}/read_arguments.py {words}").rc == code


def test_nothing_is_left_of_the_installation(host: Host) -> None:
    assert host.run("ls -A /var/lib/v100ctl/build").stdout == ""
    assert "v100ctl-install" not in host.check_output("systemctl list-units --all --no-legend")
