"""The script that runs on the host: what it reads right, and what hostile content cannot do to it."""

from __future__ import annotations

import fcntl
import hashlib
import http.server
import json
import os
import resource
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from v100ctl.facts import Facts, ProbeRequest
from v100ctl.probe import host_script as script

SCRIPT = Path(script.__file__)
ROOT_NAMES = "root:x:0:0:root:/root:/bin/bash\nv100:x:990:991::/var/lib/v100ctl:/usr/sbin/nologin\nbad line\n"


def run_script(*arguments: str, python: str = sys.executable) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [python, "-I", "-S", "-B", "-", *arguments],
        input=SCRIPT.read_text(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


# --- the program --------------------------------------------------------------------------------------------------------------


def test_it_prints_one_document_that_fits_the_models() -> None:
    done = run_script("--request", ProbeRequest(accounts=("root",), filesystems=("/", "/nonexistent/below")).model_dump_json())
    assert (done.returncode, done.stderr) == (0, "")
    facts = Facts.model_validate_json(done.stdout)
    assert facts.schema_id == "v100ctl/facts/1"
    assert facts.hostname == os.uname().nodename
    assert facts.user.uid == os.getuid()
    assert facts.cpu.logical_count >= 1
    assert facts.memory.total_bytes > 0
    assert facts.accounts["root"].uid == 0
    assert facts.filesystems["/"].mount == "/"
    assert facts.filesystems["/nonexistent/below"].mount == "/"
    assert facts.boot_id and facts.distribution.id and facts.libc.name


def test_every_key_of_the_document_is_one_of_the_models() -> None:
    document = json.loads(run_script("--request", "{}").stdout)
    known = {field.alias or name for name, field in Facts.model_fields.items()}
    assert set(document) <= known
    # What only appears where there is something to show.
    assert known - set(document) <= {"accounts", "filesystems", "models"} | set(document["errors"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--request", "nonsense"], "--request is not valid JSON"),
        (["--request", "[]"], "--request is not a JSON object"),
        (["--request"], "wrong arguments"),
        ([], "wrong arguments"),
        (["--locks", "x"], "wrong arguments"),
    ],
)
def test_wrong_arguments_are_one_line(arguments: list[str], message: str) -> None:
    done = run_script(*arguments)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert message in done.stderr


def test_unknown_and_odd_parts_of_a_request_are_ignored() -> None:
    request = script.parse_request(
        json.dumps({"new": 1, "files": ["/a", "/a", "relative", 7, "/nul\0"], "models": "x", "health": ["y"], "deep": "yes"})
    )
    assert request == {"files": ["/a"], "models": [], "filesystems": [], "accounts": [], "health": {}, "deep": False}


def test_it_writes_no_bytecode(tmp_path: Path) -> None:
    # As Ansible runs it: from a file, without `-B`.
    copy = tmp_path / "host_script.py"
    copy.write_bytes(SCRIPT.read_bytes())
    done = subprocess.run([sys.executable, str(copy), "--request", "{}"], capture_output=True, timeout=60, check=False)
    assert done.returncode == 0
    assert [path.name for path in tmp_path.iterdir()] == ["host_script.py"]


def test_an_old_python_says_so_in_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 6, 15, "final", 0))
    assert script.main(["--request", "{}"]) == script.EXIT_TOO_OLD
    assert capsys.readouterr().err == "v100ctl: Python 3.6.15 is too old, 3.8 or newer is needed\n"


def test_its_syntax_is_old_enough_to_reach_that_line() -> None:
    import ast

    tree = ast.parse(SCRIPT.read_text(), feature_version=(3, 6))
    # Postponed evaluation would let newer annotations in, but is itself a syntax error before 3.7.
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module == "__future__"]


# --- workers ------------------------------------------------------------------------------------------------------------------


def test_a_failing_task_costs_only_itself() -> None:
    facts: dict[str, Any] = {"errors": {}}

    def fail() -> None:
        raise ValueError("odd \udcff thing")

    script.run_tasks(
        [script.Task("a", lambda: 1), script.Task("b", fail), script.Task("c", lambda: 3)], facts, time.monotonic() + 30
    )
    assert (facts["a"], facts["c"]) == (1, 3)
    assert "b" not in facts
    assert list(facts["errors"]) == ["b"]
    assert facts["errors"]["b"].startswith("ValueError: odd")


def test_a_stuck_task_is_given_up_and_the_next_goes_on() -> None:
    facts: dict[str, Any] = {"errors": {}}
    tasks = [
        script.Task("a", lambda: 1),
        script.Task("stuck", lambda: time.sleep(600), limit_s=0.3),
        script.Task("sections", lambda path: {"seen": path}, "/x", item="/x"),
    ]
    script.run_tasks(tasks, facts, time.monotonic() + 30)
    assert facts["a"] == 1
    assert facts["sections"] == {"/x": {"seen": "/x"}}
    assert facts["errors"] == {"stuck": "no answer within 0.3 s"}


def test_a_dying_worker_costs_only_its_task() -> None:
    facts: dict[str, Any] = {"errors": {}}
    tasks = [script.Task("dies", lambda: os.kill(os.getpid(), signal.SIGKILL)), script.Task("b", lambda: 2)]
    script.run_tasks(tasks, facts, time.monotonic() + 30)
    assert facts["b"] == 2
    assert list(facts["errors"]) == ["dies"]


def test_nothing_lasts_past_the_deadline() -> None:
    facts: dict[str, Any] = {"errors": {}}
    tasks = [script.Task("stuck", lambda: time.sleep(600), limit_s=600.0), script.Task("b", lambda: 2)]
    script.run_tasks(tasks, facts, time.monotonic() + 0.3)
    assert "b" not in facts
    assert set(facts["errors"]) == {"stuck", "b"}


def test_a_worker_leaves_the_callers_streams_alone(capfd: pytest.CaptureFixture[str]) -> None:
    facts: dict[str, Any] = {"errors": {}}
    script.run_tasks([script.Task("a", lambda: os.write(1, b"noise") and os.write(2, b"noise"))], facts, time.monotonic() + 30)
    assert capfd.readouterr() == ("", "")


# --- commands -----------------------------------------------------------------------------------------------------------------


def test_commands() -> None:
    assert script.run_command(["sh", "-c", "echo out; echo err >&2"], 10) == "out\nerr\n"
    with pytest.raises(script.ProbeFailure, match="`false` failed with 1"):
        script.run_command(["false"], 10)
    with pytest.raises(script.ProbeFailure, match="`no-such-program` is not installed"):
        script.run_command(["no-such-program"], 10)


def test_a_command_that_hangs_is_killed_with_all_that_it_started(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    with pytest.raises(script.ProbeFailure, match="gave no answer within"):
        script.run_command(["sh", "-c", f"sleep 600 & echo $! > {pid_file}; wait"], 1.0)
    pid = int(pid_file.read_text())
    for _ in range(100):
        state = script.read_text(f"/proc/{pid}/stat", "")
        if not state or state.rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.05)
    raise AssertionError("its child still runs")


def test_a_command_that_prints_without_end_is_stopped() -> None:
    with pytest.raises(script.ProbeFailure, match="printed more than"):
        script.run_command(["yes"], 30)


# --- files --------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def names(tmp_path: Path) -> script.Names:
    etc = tmp_path / "etc-names"
    etc.mkdir()
    (etc / "passwd").write_text(ROOT_NAMES)
    (etc / "group").write_text("root:x:0:\nv100:x:991:\nrender:x:105:v100,other\nvideo:x:44:v100\n")
    return script.Names(str(etc))


def test_accounts(names: script.Names) -> None:
    assert names.account("v100") == {
        "uid": 990,
        "gid": 991,
        "home": "/var/lib/v100ctl",
        "shell": "/usr/sbin/nologin",
        "groups": ["render", "video"],
    }
    assert names.account("nobody-else") is None
    assert (names.user(0), names.user(4242), names.of_group(991), names.of_group(4242)) == ("root", "4242", "v100", "4242")


def report(path: Path, names: script.Names, **options: Any) -> dict[str, dict[str, Any]]:
    reporter = script.FileReporter(names, **options)
    reporter.walk(str(path))
    return reporter.files


def test_files_are_reported_with_content_only_where_it_is_no_secret(tmp_path: Path, names: script.Names) -> None:
    root = tmp_path / "v100ctl"
    (root / "instances").mkdir(parents=True)
    for name, content in {
        "host.json": b'{"a": 1}\n',
        "instances/chat.env": b"TOKEN=secret\n",
        "instances/chat.keys": b"sk-secret\n",
        "private": b"for root only\n",
        "binary": b"\xff\xfe\x00",
        "large": b"x" * (script.MAX_CONTENT_BYTES + 1),
        "exactly": b"y" * script.MAX_CONTENT_BYTES,
    }.items():
        (root / name).write_bytes(content)
        (root / name).chmod(0o644)
    (root / "private").chmod(0o640)
    (root / "link").symlink_to("/etc/shadow")
    (root / "folder-link").symlink_to("/etc")
    os.mkfifo(root / "fifo")

    files = report(root, names)
    of = {path.removeprefix(f"{root}/"): entry for path, entry in files.items()}
    with_content = {name for name, entry in of.items() if entry["content"] is not None}
    assert with_content == {"host.json", "exactly"}
    assert of["host.json"]["content"] == '{"a": 1}\n'
    assert {name: entry["kind"] for name, entry in of.items() if entry["kind"] != "file"} == {
        str(root): "directory",
        "instances": "directory",
        "link": "symlink",
        "folder-link": "symlink",
        "fifo": "other",
    }
    assert not [path for path in files if "folder-link/" in path]
    assert of["instances/chat.keys"]["sha256"] == hashlib.sha256(b"sk-secret\n").hexdigest()
    assert of["large"]["sha256"] == hashlib.sha256(b"x" * (script.MAX_CONTENT_BYTES + 1)).hexdigest()
    assert of["private"]["mode"] == "0640"
    assert of["link"]["sha256"] == ""
    assert "secret" not in json.dumps(files)


def test_a_huge_file_is_hashed_only_when_that_is_asked_for(tmp_path: Path, names: script.Names) -> None:
    huge = tmp_path / "huge"
    with huge.open("wb") as file:
        file.truncate(script.MAX_HASHED_BYTES + 1)
    assert report(huge, names)[str(huge)]["sha256"] == ""
    assert report(huge, names)[str(huge)]["size_bytes"] == script.MAX_HASHED_BYTES + 1
    assert report(huge, names, deep=True)[str(huge)]["sha256"] == hashlib.sha256(bytes(script.MAX_HASHED_BYTES + 1)).hexdigest()


def test_thousands_of_files_end_at_the_bound(tmp_path: Path, names: script.Names) -> None:
    for number in range(script.MAX_FILES + 10):
        (tmp_path / f"f{number}").touch()
    reporter = script.FileReporter(names)
    with pytest.raises(script.ProbeFailure, match="more than 500 files"):
        reporter.walk(str(tmp_path))
    assert len(reporter.files) == script.MAX_FILES


def test_content_ends_at_its_budget(tmp_path: Path, names: script.Names) -> None:
    folder = tmp_path / "many"
    folder.mkdir()
    for number in range(script.MAX_CONTENT_TOTAL_BYTES // script.MAX_CONTENT_BYTES + 5):
        (folder / f"f{number:03}").write_bytes(b"z" * script.MAX_CONTENT_BYTES)
    files = report(folder, names)
    assert sum(len(entry["content"] or "") for entry in files.values()) == script.MAX_CONTENT_TOTAL_BYTES
    assert all(entry["sha256"] for entry in files.values() if entry["kind"] == "file")


def test_deep_folders_end_at_the_bound(tmp_path: Path, names: script.Names) -> None:
    folder = tmp_path
    for number in range(20):
        folder = folder / f"d{number}"
    folder.mkdir(parents=True)
    reporter = script.FileReporter(names)
    reporter.walk(str(tmp_path))
    assert str(tmp_path / "/".join(f"d{number}" for number in range(script.MAX_DEPTH))) in reporter.files
    assert str(tmp_path / "/".join(f"d{number}" for number in range(script.MAX_DEPTH + 1))) not in reporter.files
    assert "nested too deeply" in reporter.problems[0]


def test_names_that_are_not_utf8_can_be_reported(tmp_path: Path, names: script.Names, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / os.fsdecode(b"caf\xe9")).write_text("x")
    script.write_document(report(tmp_path, names))
    assert f"{tmp_path}/caf\ufffd" in json.loads(capfd.readouterr().out)


def test_half_surrogates_become_question_marks(capfd: pytest.CaptureFixture[str]) -> None:
    script.write_document({"a": "\ud800x"})
    assert json.loads(capfd.readouterr().out) == {"a": "?x"}


def test_a_fifo_where_a_file_is_expected_blocks_nothing(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(script.ProbeFailure, match="not a regular file"):
        script.read_file(str(tmp_path / "fifo"))
    with pytest.raises(script.ProbeFailure, match="not a regular file"):
        script.read_file("/dev/zero")


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"{", "not valid JSON"),
        (b"[]", "not a JSON object"),
        (b'{"a": NaN}', "NaN is not JSON"),
        (b'"\xff"', "not valid JSON"),
        (b'{"a":' * 100000, "nested too deeply"),
        (b" " * (script.MAX_DOCUMENT_BYTES + 1), "larger than"),
    ],
)
def test_host_json_that_is_none_says_why(tmp_path: Path, content: bytes, problem: str) -> None:
    path = tmp_path / "host.json"
    path.write_bytes(content)
    found = script.collect_host_json(str(path))
    assert found["document"] is None
    assert problem in found["problem"]


def test_host_json(tmp_path: Path) -> None:
    path = tmp_path / "host.json"
    assert script.collect_host_json(str(path)) == {"document": None, "problem": ""}
    path.write_text('{"schema": "v100ctl/host/1", "files": {"/etc/x": {}, "relative": {}, "/nul\\u0000": {}}}')
    document = script.collect_host_json(str(path))["document"]
    assert document["schema"] == "v100ctl/host/1"
    assert script.managed_by(document) == ["/etc/x"]
    (tmp_path / "link").symlink_to(path)
    assert script.collect_host_json(str(tmp_path / "link")) == {"document": None, "problem": "a symbolic link"}


@pytest.mark.parametrize("document", [None, {}, {"files": []}, {"files": "/etc/shadow"}])
def test_an_odd_host_json_names_no_files(document: dict[str, Any] | None) -> None:
    assert script.managed_by(document) == []


def test_what_only_host_json_names_is_reported_without_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: script.Names
) -> None:
    for constant in ("CONFIG_DIR", "UNIT_DIR", "CRON_FILE"):
        monkeypatch.setattr(script, constant, str(tmp_path / constant))
    listed, asked = tmp_path / "listed", tmp_path / "asked"
    for path in (listed, asked):
        path.write_text("text\n")
        path.chmod(0o644)
    facts = {"host_json": {"document": {"files": {str(listed): {}, str(tmp_path / "gone"): {}}}}, "errors": {}}
    files = script.collect_files(facts, {"files": [str(asked)], "deep": False})
    assert {path: entry["content"] for path, entry in files.items()} == {str(asked): "text\n", str(listed): None}
    assert facts["errors"] == {}


def test_units_and_their_drop_ins_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    units = tmp_path / "units"
    (units / "v100-chat.service.d").mkdir(parents=True)
    (units / "v100-chat.service.d" / "more.conf").touch()
    for name in ("v100-chat.service", "other.service", "v100-x.timer", "v100-odd name.service", "v100-t@.service"):
        (units / name).touch()
    monkeypatch.setattr(script, "CONFIG_DIR", str(tmp_path / "none"))
    monkeypatch.setattr(script, "UNIT_DIR", str(units))
    monkeypatch.setattr(script, "CRON_FILE", str(tmp_path / "none"))
    files = script.collect_files({"errors": {}}, {"files": [], "deep": False})
    assert sorted(path.removeprefix(f"{units}/") for path in files) == [
        "v100-chat.service",
        "v100-chat.service.d",
        "v100-chat.service.d/more.conf",
        "v100-odd name.service",
        "v100-t@.service",
    ]
    # Neither a template nor an impossible name may spoil the one `systemctl show`.
    assert script.unit_names(str(units)) == ["v100-chat.service"]
    assert script.unit_names(str(tmp_path / "none")) == []


# --- releases and models ------------------------------------------------------------------------------------------------------


@pytest.fixture
def release(tmp_path: Path) -> Path:
    folder = tmp_path / "engines" / "llama_cpp" / "b1-cpu"
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "llama-server").write_bytes(b"program")
    sha256 = hashlib.sha256(b"program").hexdigest()
    write_release(folder, {"bin/llama-server": {"size_bytes": 7, "sha256": sha256, "mode": "0755"}})
    return folder


def write_release(folder: Path, files: object, **more: object) -> None:
    (folder / "release.json").write_text(json.dumps({"build_id": folder.name, "files": files, **more}))


def releases(folder: Path, *, deep: bool = False) -> list[dict[str, Any]]:
    return script.collect_releases({"deep": deep}, str(folder.parent.parent))


def test_a_sound_release(release: Path) -> None:
    (release.parent / ".b2-cpu.half").mkdir()
    (release.parent / "b3-link").symlink_to(release)
    (found,) = releases(release, deep=True)
    assert (found["path"], found["engine"], found["build_id"]) == (str(release), "llama_cpp", "b1-cpu")
    assert found["problem"] == ""
    assert found["release"]["files"]


def test_no_engines_folder_is_no_error(tmp_path: Path) -> None:
    assert script.collect_releases({"deep": False}, str(tmp_path / "none")) == []


def _replace_by_link(folder: Path) -> None:
    (folder / "bin/llama-server").unlink()
    (folder / "bin/llama-server").symlink_to("/bin/true")


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda folder: (folder / "release.json").unlink(), "release.json: No such file"),
        (lambda folder: (folder / "release.json").write_text("{"), "release.json: not valid JSON"),
        (lambda folder: (folder / "bin/llama-server").unlink(), "bin/llama-server is missing"),
        (lambda folder: (folder / "bin/llama-server").write_bytes(b"short"), "bin/llama-server has 5 bytes, not 7"),
        (_replace_by_link, "bin/llama-server is not a regular file"),
        (lambda folder: write_release(folder, {}), "lists no files"),
        (lambda folder: write_release(folder, ["x"]), "lists no files"),
        (lambda folder: write_release(folder, {"../../x": {}}), "lists it wrongly"),
        (lambda folder: write_release(folder, {"/etc/passwd": {}}), "lists it wrongly"),
        (lambda folder: write_release(folder, {"bin/llama-server": 7}), "lists it wrongly"),
        (lambda folder: write_release(folder, {"a": {}}, build_id="other"), "belongs to other"),
        (lambda folder: write_release(folder, {str(number): {} for number in range(5001)}), "more than 5000 files"),
    ],
)
def test_a_damaged_release_says_what_is_wrong(release: Path, damage: Callable[[Path], object], problem: str) -> None:
    damage(release)
    assert problem in releases(release)[0]["problem"]


def test_changed_content_of_the_same_size_is_found_only_in_depth(release: Path) -> None:
    (release / "bin/llama-server").write_bytes(b"PROGRAM")
    assert releases(release)[0]["problem"] == ""
    assert releases(release, deep=True)[0]["problem"] == "bin/llama-server has other content"


def test_a_models_hash_is_the_verified_one_only_while_size_and_time_fit(tmp_path: Path, names: script.Names) -> None:
    model, records = tmp_path / "m.gguf", tmp_path / "records"
    records.mkdir()
    model.write_bytes(b"weights")
    os.utime(model, ns=(0, 1_700_000_000_900_000_000))

    def facts(*, deep: bool = False) -> dict[str, Any]:
        return script.collect_model(str(model), deep, str(records), names)

    assert facts()["sha256"] == ""
    (records / "m.json").write_text(
        json.dumps({"path": str(model), "sha256": "ab" * 32, "size_bytes": 7, "mtime_s": 1_700_000_000})
    )
    (records / "broken.json").write_text("{")
    (records / "list.json").write_text("[]")
    assert facts()["sha256"] == "ab" * 32
    assert facts()["mtime_ns"] == 1_700_000_000_900_000_000
    assert facts(deep=True)["sha256"] == hashlib.sha256(b"weights").hexdigest()
    os.utime(model, ns=(0, 1_700_000_001_000_000_000))
    assert facts()["sha256"] == ""


def test_a_model_that_is_missing_a_link_or_no_file(tmp_path: Path) -> None:
    assert script.collect_model(str(tmp_path / "none"), False) == {"exists": False}
    (tmp_path / "m").write_bytes(b"xy")
    (tmp_path / "link").symlink_to("m")
    assert script.collect_model(str(tmp_path / "link"), False)["size_bytes"] == 2
    with pytest.raises(script.ProbeFailure, match="not a regular file"):
        script.collect_model(str(tmp_path), False)


# --- packages -----------------------------------------------------------------------------------------------------------------

DPKG_STATUS = b"""\
Package: dpkg
Status: install ok installed
Architecture: amd64
Version: 1.21.22
Description: Debian package management system
 Status: this is no field
Package-Type: no field either

Package: libc6
Status: install ok installed
Architecture: amd64
Multi-Arch: same
Version: 2.36-9+deb12u10

Package: libc6
Status: install ok installed
Architecture: i386
Version: 2.36-9+deb12u10

Package: tzdata
Status: hold ok installed
Architecture: all
Version: 2025a-0

Package: gone
Status: deinstall ok config-files
Architecture: amd64
Version: 1

Package: nvidia-kernel-dkms
Status: install ok half-configured
Architecture: amd64
Version: 535.309.01-0

Package: broken
Status: install reinstreq installed
Architecture: amd64
Version: 2

Package: waits
Status: install ok triggers-pending
Architecture: amd64
Version: 3
"""


def test_dpkg_status() -> None:
    assert script.parse_dpkg_status(DPKG_STATUS) == {
        "manager": "dpkg",
        "installed": {
            "dpkg": "1.21.22",
            "libc6": "2.36-9+deb12u10",
            "libc6:i386": "2.36-9+deb12u10",
            "tzdata": "2025a-0",
            "waits": "3",
        },
        "held": ["tzdata"],
        "half_configured": ["broken", "nvidia-kernel-dkms"],
    }


@given(st.binary(max_size=400))
def test_any_dpkg_status_can_be_read(noise: bytes) -> None:
    parsed = script.parse_dpkg_status(DPKG_STATUS + b"\n" + noise.replace(b"Package: ", b""))
    assert parsed["installed"]["libc6"] == "2.36-9+deb12u10"


@given(
    st.dictionaries(
        st.from_regex(r"[a-z][a-z0-9+.-]{1,20}", fullmatch=True), st.from_regex(r"[0-9][0-9a-z.+~:-]{0,20}", fullmatch=True)
    )
)
def test_all_installed_packages_are_found(packages: dict[str, str]) -> None:
    status = "\n".join(
        f"Package: {name}\nStatus: install ok installed\nArchitecture: all\nVersion: {version}\n"
        for name, version in packages.items()
    )
    assert script.parse_dpkg_status(status.encode())["installed"] == packages


def dpkg_listed() -> dict[str, str]:
    form = "${binary:Package}\t${Version}\t${db:Status-Status}\n"
    listed = subprocess.run(["dpkg-query", "-W", "-f", form], capture_output=True, text=True, check=True).stdout
    native = subprocess.run(["dpkg", "--print-architecture"], capture_output=True, text=True, check=True).stdout.strip()
    rows = (line.split("\t") for line in listed.splitlines())
    # dpkg-query names the architecture of every `Multi-Arch: same` package, also the machine's own.
    return {
        name.removesuffix(f":{native}"): version
        for name, version, status in rows
        if status in ("installed", "triggers-pending", "triggers-awaited")
    }


def test_a_real_dpkg_agrees() -> None:
    if not Path("/var/lib/dpkg/status").exists():
        assert script.collect_packages()["manager"] != "dpkg"
        return
    for _ in range(10):
        before, found, after = dpkg_listed(), script.collect_packages()["installed"], dpkg_listed()
        # Something may be installing packages just now.
        if before == after:
            assert found == before
            return
    raise AssertionError("packages kept changing")


def test_rpm_list() -> None:
    output = "bash\t5.1.8-9.el9\ngpg-pubkey\t1-2\nkernel-core\t5.14.0-1\nkernel-core\t5.14.0-2\nshadow\t2:4.9-8\nodd line\n"
    assert script.parse_rpm_list(output)["installed"] == {
        "bash": "5.1.8-9.el9",
        "kernel-core": "5.14.0-1, 5.14.0-2",
        "shadow": "2:4.9-8",
    }


def test_a_lock_is_shown_with_its_holder(tmp_path: Path) -> None:
    free, taken, missing = tmp_path / "free", tmp_path / "taken", tmp_path / "missing"
    free.touch()
    code = "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.lockf(f, fcntl.LOCK_EX); print('locked', flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code, str(taken)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "locked\n"
        locks = script.package_locks((str(free), str(taken), str(missing)))
        assert locks == [{"path": str(taken), "pid": holder.pid, "command": script.describe_command([sys.executable])}]
        assert holder.stdin is not None
        holder.stdin.write("\n")
        holder.stdin.close()
    assert script.package_locks((str(free), str(taken), str(missing))) == []
    # Asking must not have taken it.
    with taken.open("w") as file:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_locks_alone_are_a_document_of_their_own(tmp_path: Path) -> None:
    done = run_script("--locks")
    if os.getuid() == 0:
        assert isinstance(json.loads(done.stdout)["package_locks"], list)
    else:
        assert done.returncode in (0, 1)


# --- the host -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (
            'PRETTY_NAME="Debian GNU/Linux 12 (bookworm)"\nNAME="Debian GNU/Linux"\nVERSION_ID="12"\n'
            "VERSION_CODENAME=bookworm\nID=debian\n",
            ("debian", "12", "bookworm", "Debian GNU/Linux 12 (bookworm)", []),
        ),
        ('ID="rocky"\nID_LIKE="rhel fedora"\nVERSION_ID="9.4"\nNAME=Rocky\n', ("rocky", "9.4", "", "Rocky", ["rhel", "fedora"])),
        ('# comment\n\nID=\'x\'\nnonsense\nPRETTY_NAME="a \\"b\\" \\$c"\n', ("x", "", "", 'a "b" $c', [])),
        ("", ("", "", "", "", [])),
    ],
)
def test_os_release(content: str, expected: tuple[object, ...]) -> None:
    assert tuple(script.parse_os_release(content).values()) == expected


@given(st.text())
def test_any_os_release_can_be_read(content: str) -> None:
    assert set(script.parse_os_release(content)) == {"id", "version_id", "codename", "name", "id_like"}


def test_os_release_falls_back_to_the_vendors(tmp_path: Path) -> None:
    vendor = tmp_path / "vendor"
    vendor.write_text("ID=ubuntu\n")
    assert script.collect_distribution(str(tmp_path / "none"), str(vendor))["id"] == "ubuntu"


V3_FLAGS = "lm cx16 lahf_lm popcnt pni sse4_1 sse4_2 ssse3 abm avx avx2 bmi1 bmi2 f16c fma movbe xsave"


def test_cpuinfo() -> None:
    cores = [(package, core) for package in (0, 1) for core in (0, 1) for _ in "ht"]
    content = "".join(
        f"processor\t: {number}\nmodel name\t: Xeon\nphysical id\t: {package}\ncore id\t\t: {core}\nflags\t\t: {V3_FLAGS}\n\n"
        for number, (package, core) in enumerate(cores)
    )
    assert script.parse_cpuinfo(content) == {"model": "Xeon", "logical_count": 8, "physical_count": 4, "level": "x86-64-v3"}
    # A virtual machine that does not show its topology.
    assert script.parse_cpuinfo("processor : 0\nprocessor : 1\n")["physical_count"] == 2


@pytest.mark.parametrize(
    ("flags", "level"),
    [
        ("", ""),
        ("lm", "x86-64"),
        (V3_FLAGS, "x86-64-v3"),
        (V3_FLAGS.replace(" fma", ""), "x86-64-v2"),
        (V3_FLAGS.replace(" popcnt", ""), "x86-64"),
        (V3_FLAGS + " avx512f avx512bw avx512cd avx512dq avx512vl", "x86-64-v4"),
    ],
)
def test_x86_levels(flags: str, level: str) -> None:
    assert script.x86_level(set(flags.split())) == level


def test_cgroup_cpu_limit(tmp_path: Path) -> None:
    assert script.cgroup_cpu_limit(str(tmp_path)) is None
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu/cpu.cfs_quota_us").write_text("150000\n")
    (tmp_path / "cpu/cpu.cfs_period_us").write_text("100000\n")
    assert script.cgroup_cpu_limit(str(tmp_path)) == 1.5
    (tmp_path / "cpu.max").write_text("400000 100000\n")
    assert script.cgroup_cpu_limit(str(tmp_path)) == 4
    for unlimited in ("max 100000\n", "nonsense\n", "1 0\n"):
        (tmp_path / "cpu.max").write_text(unlimited)
        assert script.cgroup_cpu_limit(str(tmp_path)) is None


def test_numa_nodes(tmp_path: Path) -> None:
    for node, cpus in (("node10", "8-9"), ("node1", "0-7,16-23")):
        (tmp_path / node).mkdir()
        (tmp_path / node / "cpulist").write_text(f"{cpus}\n")
        (tmp_path / node / "meminfo").write_text(f"Node {node[4:]} MemTotal:       1024 kB\n")
    (tmp_path / "possible").touch()
    assert script.collect_numa_nodes(str(tmp_path)) == [
        {"id": 1, "cpus": "0-7,16-23", "memory_bytes": 1 << 20},
        {"id": 10, "cpus": "8-9", "memory_bytes": 1 << 20},
    ]
    assert script.collect_numa_nodes(str(tmp_path / "none")) == []


def test_meminfo() -> None:
    content = (
        "MemTotal:       16384 kB\nMemFree:         1024 kB\nMemAvailable:    8192 kB\n"
        "SwapTotal:       2048 kB\nSwapFree: 1 kB\nHugePages_Total: 0\n"
    )
    assert script.parse_meminfo(content) == {
        "total_bytes": 16 << 20,
        "available_bytes": 8 << 20,
        "swap_total_bytes": 2 << 20,
        "swap_free_bytes": 1 << 10,
    }


LIMITS = """\
Limit                     Soft Limit           Hard Limit           Units
Max cpu time              unlimited            unlimited            seconds
Max locked memory         8388608              8388608              bytes
Max open files            1024                 20000                files
Max realtime timeout      unlimited            unlimited            us
"""


@pytest.mark.parametrize(
    ("capabilities", "uid_map", "nofile", "memlock"),
    [
        # A plain host: root raises limits as it likes.
        ("000001ffffffffff", "0 0 4294967295", 1048576, None),
        # A container without CAP_SYS_RESOURCE: what it was given is the ceiling.
        ("000001fffeffffff", "0 0 4294967295", 20000, 8388608),
        # A user namespace: the capability is there, but not where it counts.
        ("000001ffffffffff", "0 100000 65536", 20000, 8388608),
    ],
)
def test_limits_are_what_a_service_can_be_given(
    tmp_path: Path, capabilities: str, uid_map: str, nofile: int, memlock: int | None
) -> None:
    for path, content in {
        "1/limits": LIMITS,
        "1/status": f"Name:\tsystemd\nCapEff:\t{capabilities}\n",
        "self/uid_map": f"         {uid_map}\n",
        "sys/fs/nr_open": "1048576\n",
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(content)
    assert script.collect_limits(str(tmp_path)) == {"nofile_hard": nofile, "memlock_hard_bytes": memlock}


MOUNTS = """\
rootfs / ext4 rw 0 0
/dev/sdb /srv xfs rw 0 0
/dev/sdc /srv/big\\040disk xfs rw 0 0
tmpfs /srv tmpfs rw 0 0
odd
"""


@pytest.mark.parametrize(
    ("path", "device", "mount"),
    [
        ("/", "rootfs", "/"),
        ("/etc", "rootfs", "/"),
        ("/srvx", "rootfs", "/"),
        ("/srv/models", "tmpfs", "/srv"),
        ("/srv/big disk/m", "/dev/sdc", "/srv/big disk"),
    ],
)
def test_mounts(path: str, device: str, mount: str) -> None:
    assert script.find_mount(path, MOUNTS) == (device, mount)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"run/systemd/container": "docker\n"}, "docker"),
        ({".dockerenv": ""}, "docker"),
        ({"proc/1/environ": "PATH=/\0container=lxc\0"}, "lxc"),
        ({"sys/class/dmi/id/sys_vendor": "QEMU\n"}, "qemu"),
        ({"sys/class/dmi/id/sys_vendor": "VMware, Inc.\n"}, "vmware"),
        ({"proc/cpuinfo": "flags\t: fpu hypervisor\n"}, "vm-other"),
        ({"sys/class/dmi/id/sys_vendor": "Dell Inc.\n", "proc/cpuinfo": "flags\t: fpu\n"}, "none"),
        ({}, "none"),
    ],
)
def test_virtualization(tmp_path: Path, files: dict[str, str], expected: str) -> None:
    for path, content in files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(content)
    assert script.collect_virtualization(str(tmp_path)) == expected


# --- units, processes, sockets ------------------------------------------------------------------------------------------------


def test_units_of_one_show() -> None:
    output = """\
Id=v100-chat.service
LoadState=loaded
ActiveState=active
SubState=running
UnitFileState=enabled
FragmentPath=/etc/systemd/system/v100-chat.service
DropInPaths=/etc/systemd/system/v100-chat.service.d/a.conf /run/b.conf
NeedDaemonReload=yes
MainPID=42
Result=success
NRestarts=3

Id=v100-gone.service
LoadState=not-found
ActiveState=active
MainPID=[not set]

Id=ssh.service
LoadState=loaded

"""
    units = script.parse_units(output)
    assert set(units) == {"v100-chat.service", "v100-gone.service"}
    assert units["v100-chat.service"] == {
        "load_state": "loaded",
        "active_state": "active",
        "sub_state": "running",
        "unit_file_state": "enabled",
        "fragment_path": "/etc/systemd/system/v100-chat.service",
        "drop_in_paths": ["/etc/systemd/system/v100-chat.service.d/a.conf", "/run/b.conf"],
        "need_daemon_reload": True,
        "main_pid": 42,
        "result": "success",
        "restarts_count": 3,
    }
    assert units["v100-gone.service"]["main_pid"] == 0


@given(st.text())
def test_any_show_can_be_read(output: str) -> None:
    script.parse_units(output)


def await_program(process: subprocess.Popen[bytes], argv: list[str]) -> None:
    """Until exec has happened, a child still is a copy of this process."""
    for _ in range(1000):
        if Path(f"/proc/{process.pid}/cmdline").read_bytes() == b"".join(os.fsencode(argument) + b"\0" for argument in argv):
            return
        time.sleep(0.01)
    raise AssertionError(f"{argv[0]} did not start")


def test_a_process_is_read_from_proc_without_its_secrets(names: script.Names) -> None:
    environment = {"V100CTL_INSTANCE_DIGEST": "abc", "API_KEY": "sk-secret", "PATH": os.environ["PATH"]}
    argv = [sys.executable, "-c", "input()", "a b", ""]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, env=environment) as process:
        await_program(process, argv)
        found = script.collect_process(process.pid, "v100-x.service", names)
        assert process.stdin is not None
        process.stdin.write(b"\n")
        process.stdin.close()
    assert found["environ"] == {"V100CTL_INSTANCE_DIGEST": "abc"}
    assert "sk-secret" not in json.dumps(found)
    assert found["argv"] == argv
    assert Path(found["executable"]) == Path(sys.executable).resolve()
    assert not found["executable_deleted"]
    assert abs(found["started_s"] - time.time()) < 60
    assert found["nofile_soft"] == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert found["rss_anonymous_bytes"] > 0
    assert found["cpus_allowed"]


def test_a_deleted_executable_is_told(tmp_path: Path, names: script.Names) -> None:
    program = tmp_path / "program"
    program.write_bytes(Path("/bin/sleep").read_bytes())
    program.chmod(0o755)
    with subprocess.Popen([str(program), "600"]) as process:
        await_program(process, [str(program), "600"])
        program.unlink()
        found = script.collect_process(process.pid, "v100-x.service", names)
        process.kill()
    assert (found["executable"], found["executable_deleted"]) == (str(program), True)
    assert found["argv"] == [str(program), "600"]


def test_listeners_are_found_with_their_owner() -> None:
    with socket.create_server(("127.0.0.1", 0)) as v4, socket.create_server(("::1", 0), family=socket.AF_INET6) as v6:
        found = {(entry["address"], entry["port"]): entry for entry in script.collect_listeners()}
        own = Path("/proc/self/comm").read_text().strip()
        for address, server in (("127.0.0.1", v4), ("::1", v6)):
            entry = found[(address, server.getsockname()[1])]
            assert (entry["pid"], entry["command"]) == (os.getpid(), own)


@pytest.mark.parametrize(
    ("argv", "shown"),
    [
        (["/usr/sbin/haproxy", "-f", "/etc/haproxy.cfg"], "haproxy"),
        (["/opt/llama-server", "--api-key", "sk-secret"], "llama-server"),
        (["/usr/bin/python3", "-u", "-m", "http.server", "--token", "x"], "python3 -m http.server"),
        (["python3.11", "/usr/bin/unattended-upgrade", "--secret"], "python3.11 /usr/bin/unattended-upgrade"),
        (["python3", "-c", "password = 1"], "python3"),
        (["node", "-e", "secret"], "node"),
        (["java", "-Xmx1g", "-jar", "app.jar", "--key=x"], "java -jar app.jar"),
        (["python3", "-m"], "python3 -m "),
        (["nginx: master process /usr/sbin/nginx -g x"], ""),
        ([""], ""),
        ([], ""),
    ],
)
def test_what_a_command_line_runs_is_shown_without_its_arguments(argv: list[str], shown: str) -> None:
    assert script.describe_command(argv) == shown


def test_a_process_that_cannot_be_asked_is_shown_by_its_short_name(tmp_path: Path) -> None:
    for pid, state in ((1, "S"), (2, "D")):
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "comm").write_text("short\n")
        (tmp_path / str(pid) / "stat").write_text(f"{pid} (a) b) {state} 1 1\n")
        (tmp_path / str(pid) / "cmdline").write_bytes(b"/usr/bin/long-name\0--x\0")
    (tmp_path / "3").mkdir()
    (tmp_path / "3" / "comm").write_text("kworker\n")
    assert [script.command_of(pid, str(tmp_path)) for pid in (1, 2, 3, 4)] == ["long-name", "short", "kworker", ""]
    found = script.name_listeners([{"pid": 1, "command": "short"}, {"pid": None, "command": ""}], str(tmp_path))
    assert [entry["command"] for entry in found] == ["long-name", ""]


TCP_HEADER = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"


def test_tcp_table() -> None:
    content = (
        TCP_HEADER
        + "   0: 0100007F:1F40 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 12345 1 0 100 0 0 10 0\n"
        + "   1: 0100007F:1F41 0100007F:9999 01 00000000:00000000 00:00000000 00000000     0        0 12346 1 0 100 0 0 10 0\n"
        + "   2: 00000000000000000000000001000000:0016 00000000000000000000000000000000:0000 0A 0:0 00:0 0 0 0 7 1 0\n"
        + "   3: short\n"
    )
    if sys.byteorder == "little":
        assert script.parse_tcp(content) == [("127.0.0.1", 8000, 12345), ("::1", 22, 7)]


@given(st.ip_addresses(), st.integers(0, 65535), st.integers(1, 2**32))
def test_any_listener_of_the_tcp_table_is_found(address: Any, port: int, inode: int) -> None:
    packed = address.packed
    words = "".join(f"{int.from_bytes(packed[at : at + 4], sys.byteorder):08X}" for at in range(0, len(packed), 4))
    line = f"   0: {words}:{port:04X} 0:0 0A 00000000:00000000 00:00000000 00000000     0        0 {inode} 1 0 100 0 0 10 0\n"
    ((found, found_port, found_inode),) = script.parse_tcp(TCP_HEADER + line)
    assert socket.inet_pton(socket.AF_INET if len(packed) == 4 else socket.AF_INET6, found) == packed
    assert (found_port, found_inode) == (port, inode)


@pytest.mark.parametrize(
    ("cgroup", "unit"),
    [
        ("0::/system.slice/v100-chat.service\n", "v100-chat.service"),
        ("12:cpu:/docker/x\n1:name=systemd:/docker/x/system.slice/ssh.service\n", "ssh.service"),
        ("0::/user.slice/user-0.slice/session-1.scope\n", ""),
        ("1:name=systemd:/x.service/y.scope\n0::/\n", "x.service"),
        ("", ""),
    ],
)
def test_unit_of_a_process(cgroup: str, unit: str) -> None:
    assert script.unit_of(cgroup) == unit


# --- health -------------------------------------------------------------------------------------------------------------------


class _Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response({"/health": 200, "/loading": 503}.get(self.path, 404))
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing on the terminal."""


@pytest.fixture
def health_port() -> Iterator[int]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Health) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


def test_health(health_port: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        answers = script.collect_health(
            {
                "up": f"http://127.0.0.1:{health_port}/health",
                "loading": f"http://localhost:{health_port}/loading",
                "silent": f"http://127.0.0.1:{silent.getsockname()[1]}/health",
                "closed": "http://127.0.0.1:1/health",
                "name": "http://example.com/",
                "header": f"http://127.0.0.1:{health_port}/x\r\nHost: y",
                "port": "http://127.0.0.1:99999/",
            },
            limit_s=1.0,
        )
    assert answers["up"] == {"status": 200, "error": ""}
    assert answers["loading"] == {"status": 503, "error": ""}
    assert answers["silent"] == {"status": None, "error": "no answer within 1 s"}
    assert answers["closed"] == {"status": None, "error": "Connection refused"}
    for name in ("name", "header"):
        assert answers[name]["error"].startswith("cannot ask")
    assert answers["port"]["status"] is None and answers["port"]["error"]


@pytest.mark.parametrize("answer", [b"SSH-2.0-OpenSSH\r\n", b"HTTP/1.1 abc\r\n", b"x" * 10000, b""])
def test_what_is_no_http_is_no_health(answer: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        found = script.ask_health(f"http://127.0.0.1:{server.getsockname()[1]}/health")
        thread.join()
    assert found["status"] is None
    assert found["error"]


# --- GPUs ---------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def pci(tmp_path: Path) -> Path:
    for address, vendor, kind, device in (
        ("0000:3b:00.0", "0x10de", "0x030200", "0x1db4"),
        ("0000:18:00.0", "0x10de", "0x030000", "0x1db6"),
        ("0000:18:00.1", "0x10de", "0x040300", "0x10f7"),
        ("0000:00:02.0", "0x1a03", "0x030000", "0x2000"),
    ):
        folder = tmp_path / "pci" / address
        folder.mkdir(parents=True)
        for name, value in (("vendor", vendor), ("class", kind), ("device", device), ("numa_node", "1")):
            (folder / name).write_text(f"{value}\n")
    driver = tmp_path / "drivers" / "nvidia"
    driver.mkdir(parents=True)
    (tmp_path / "pci" / "0000:3b:00.0" / "driver").symlink_to(driver)
    (tmp_path / "pci" / "0000:18:00.0" / "numa_node").write_text("nonsense")
    return tmp_path / "pci"


def test_gpus_are_found_on_the_bus(pci: Path) -> None:
    assert script.collect_gpus(str(pci)) == [
        {"pci_address": "0000:18:00.0", "pci_id": "10de:1db6", "kernel_driver": "", "numa_node": -1},
        {"pci_address": "0000:3b:00.0", "pci_id": "10de:1db4", "kernel_driver": "nvidia", "numa_node": 1},
    ]
    assert script.collect_gpus(str(pci / "none")) == []


@pytest.mark.parametrize(
    ("content", "version", "flavour"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.309.01  Thu Oct 1\nGCC: 123.4\n", "535.309.01", "proprietary"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\n", "580.65.06", "open"),
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  470.256\n", "470.256", "proprietary"),
        ("nonsense\n", "", ""),
        ("", "", ""),
    ],
)
def test_driver_version(content: str, version: str, flavour: str) -> None:
    assert script.parse_driver_version(content) == {"module_version": version, "module_flavour": flavour}


def test_smi() -> None:
    output = (
        "0, GPU-aa, 00000000:18:00.0, Tesla V100-SXM2-16GB, 16384, 4\n"
        "1, GPU-bb, 00000000:3B:00.0, Odd, Name, [N/A], [Unknown Error]\n"
        "Unable to determine the device handle for GPU 0000:AF:00.0: Unknown Error\n"
    )
    assert script.parse_smi(output) == {
        "0000:18:00.0": {
            "index": 0,
            "uuid": "GPU-aa",
            "name": "Tesla V100-SXM2-16GB",
            "memory_total_bytes": 16384 << 20,
            "memory_used_bytes": 4 << 20,
        },
        "0000:3b:00.0": {
            "index": 1,
            "uuid": "GPU-bb",
            "name": "Odd, Name",
            "memory_total_bytes": None,
            "memory_used_bytes": None,
        },
    }


@given(st.text())
def test_any_smi_output_can_be_read(output: str) -> None:
    script.parse_smi(output)


SMI = """#!/bin/sh
[ "$1" = --query-gpu=index,uuid,pci.bus_id,name,memory.total,memory.used ] || exit 9
"""


@pytest.mark.parametrize(
    ("body", "loaded", "status", "cards"),
    [
        ("echo 0, GPU-aa, 00000000:18:00.0, V100, 16384, 4", True, "ok", 1),
        ("echo NVIDIA-SMI has failed; exit 9", True, "error", 0),
        ("sleep 600", True, "timeout", 0),
        # It would load the module, and the probe changes nothing.
        ("touch called", False, "error", 0),
    ],
)
def test_how_smi_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, loaded: bool, status: str, cards: int
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(SMI + body.replace("touch called", f"touch {tmp_path}/called") + "\n")
    program.chmod(0o755)
    monkeypatch.setitem(script.COMMAND_ENVIRONMENT, "PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(script, "SMI_LIMIT_S", 1.0)
    smi, found = script.collect_smi(loaded)
    assert (smi["status"], len(found)) == (status, cards)
    assert not (tmp_path / "called").exists()


def test_no_smi_is_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(script.COMMAND_ENVIRONMENT, "PATH", str(tmp_path))
    assert script.collect_smi(True) == ({"status": "absent", "output": ""}, {})


def test_modes_are_four_digits(tmp_path: Path, names: script.Names) -> None:
    (tmp_path / "x").touch()
    (tmp_path / "x").chmod(stat.S_ISUID | 0o755)
    assert report(tmp_path / "x", names)[str(tmp_path / "x")]["mode"] == "4755"
