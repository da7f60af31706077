"""The script that runs on the host: what it reads right, and what hostile content cannot do to it."""

from __future__ import annotations

import errno
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
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from v100ctl.facts import DkmsModule, Facts, Gpu, KernelLog, Nvidia, ProbeRequest
from v100ctl.probe import host_script as script

SCRIPT = Path(script.__file__)
FIXTURES = Path(__file__).parent / "fixtures"
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
    assert request == {
        "files": ["/a"],
        "models": [],
        "filesystems": [],
        "accounts": [],
        "health": {},
        "identity": {},
        "ports": [],
        "deep": False,
    }


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
    assert of["instances/chat.keys"]["sha256"] == "", "a digest of a key can be compared with guesses"
    assert "keyed_digest" not in of["instances/chat.keys"]
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
        # Python reads these, and whoever reads the whole document does not.
        (b'{"a":' * 40 + b"1" + b"}" * 40, "nested too deeply"),
        (b'{"a": ' + b"[" * 300 + b"]" * 300 + b"}", "nested too deeply"),
        (b'{"a": [-1e999]}', "a number without end"),
        (b'{"a": ' + b"9" * 1000000 + b"}", "a number of 1000000 digits"),
        (b" " * (script.MAX_DOCUMENT_BYTES + 1), "larger than"),
    ],
)
def test_host_json_that_is_none_says_why(tmp_path: Path, content: bytes, problem: str) -> None:
    path = tmp_path / "host.json"
    path.write_bytes(content)
    found = script.collect_host_json(str(path))
    assert found["document"] is None
    assert problem in found["problem"]


def test_what_is_as_deep_and_as_large_as_can_be_is_read(tmp_path: Path) -> None:
    depth = script.MAX_JSON_DEPTH
    path = tmp_path / "host.json"
    path.write_bytes(b'{"a":' * depth + b"18446744073709551615" + b"}" * depth)
    found = script.collect_host_json(str(path))["document"]
    for _ in range(depth):
        found = found["a"]
    assert found == 2**64 - 1


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


def manifest_release(release: Path) -> Path:
    """A release of so many files that a manifest beside `release.json` lists them."""
    (release / "lib").mkdir()
    (release / "lib/module.py").write_bytes(b"x = 1\n")
    (release / "bin/python").symlink_to("/usr/bin/python3")
    entry = [6, "0644", hashlib.sha256(b"x = 1\n").hexdigest()]
    content = json.dumps({"lib/module.py": entry, "bin/python": [0, "link", "/usr/bin/python3"]}).encode()
    (release / "manifest.json").write_bytes(content)
    listed = {"size_bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    write_release(release, {"manifest.json": listed})
    return release


def change(path: Path) -> None:
    path.write_bytes(b"x = 2\n")


def lead_elsewhere(path: Path) -> None:
    path.unlink()
    path.symlink_to("/usr/bin/python2")


@pytest.mark.parametrize(
    ("name", "harm", "problem"),
    [
        ("lib/module.py", change, "lib/module.py has other content"),
        ("lib/module.py", Path.unlink, "lib/module.py is missing"),
        ("bin/python", lead_elsewhere, "bin/python leads elsewhere"),
        ("bin/python", Path.unlink, "bin/python is missing"),
    ],
)
def test_files_of_a_manifest_are_looked_at_deeply_alone(
    release: Path, name: str, harm: Callable[[Path], None], problem: str
) -> None:
    manifest_release(release)
    assert releases(release, deep=True)[0]["problem"] == ""
    harm(release / name)
    assert releases(release)[0]["problem"] == ""
    assert releases(release, deep=True)[0]["problem"] == problem


def test_a_manifest_that_was_changed_is_seen(release: Path) -> None:
    manifest_release(release)
    (release / "manifest.json").write_text("{}")
    assert "manifest.json has 2 bytes" in releases(release)[0]["problem"]


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


def test_what_dnf_holds() -> None:
    """The lines that its plugin writes, with what people add by hand."""
    content = """\

# Added lock on Mon Nov 30 09:00:00 2026
kmod-nvidia-latest-dkms-3:535.309.01-1.el9.*
nvidia-driver-cuda-3:535.309.01-1.el9.*
nvidia-driver-cuda-3:535.288.01-1.el9.*
# Added exclude on Mon Nov 30 09:00:00 2026
!nvidia-persistenced-3:580.82.07-1.el9.*
*nvidia*580*
"""
    assert script.parse_version_locks(content) == ["kmod-nvidia-latest-dkms", "nvidia-driver-cuda"]


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

Id=docker.service
LoadState=loaded

Id=nvidia-persistenced.service
LoadState=not-found

"""
    units = script.parse_units(output)
    # That a unit of others is not there is no news.
    assert set(units) == {"v100-chat.service", "v100-gone.service", "docker.service"}
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


def test_governors(tmp_path: Path) -> None:
    for name, governor in (("cpu0", "performance"), ("cpu1", "powersave"), ("cpu10", "performance")):
        (tmp_path / name / "cpufreq").mkdir(parents=True)
        (tmp_path / name / "cpufreq/scaling_governor").write_text(f"{governor}\n")
    (tmp_path / "cpu2").mkdir()
    (tmp_path / "cpufreq").mkdir()
    assert script.collect_governors(str(tmp_path)) == ["performance", "powersave"]
    assert script.collect_governors(str(tmp_path / "none")) == []


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


def make_device(folder: Path, **files: str | bytes) -> None:
    folder.mkdir(parents=True)
    for name, value in files.items():
        (folder / name).write_bytes(value if isinstance(value, bytes) else f"{value}\n".encode())


# As the kernel shows a V100-PCIE-32GB: registers of 16 MiB, BAR1 of 32 GiB and its upper half, BAR3 of 32 MiB, nothing, ROM.
V100_RESOURCE = """\
0x00000000c4000000 0x00000000c4ffffff 0x0000000000040200
0x0000038000000000 0x00000387ffffffff 0x000000000014220c
0x0000000000000000 0x0000000000000000 0x0000000000000000
0x0000038800000000 0x0000038801ffffff 0x000000000014220c
0x0000000000000000 0x0000000000000000 0x0000000000000000
0x0000000000000000 0x0000000000000000 0x0000000000000000
0x0000000000000000 0x0000000000000000 0x0000000000000000"""


@pytest.fixture
def pci(tmp_path: Path) -> Path:
    root = tmp_path / "pci"
    v100 = {"vendor": "0x10de", "class": "0x030200", "device": "0x1db4", "numa_node": "1"}
    make_device(
        root / "0000:3b:00.0",
        **v100,
        subsystem_vendor="0x10de",
        subsystem_device="0x1214",
        resource=V100_RESOURCE,
        current_link_speed="8.0 GT/s PCIe",
        current_link_width="8",
        max_link_speed="8.0 GT/s PCIe",
        max_link_width="16",
        config=bytes.fromhex("de10b41d 06041000 a1000203 00000000") + bytes(48),
    )
    make_device(root / "0000:18:00.0", vendor="0x10de", device="0x1db6", numa_node="nonsense", **{"class": "0x030000"})
    make_device(root / "0000:18:00.1", vendor="0x10de", device="0x10f7", **{"class": "0x040300"})
    make_device(root / "0000:00:02.0", vendor="0x1a03", device="0x2000", **{"class": "0x030000"})
    for address in ("0000:05:00.0", "0000:06:00.0"):
        make_device(root / address, vendor="0x10de", device="0x1ac2", **{"class": "0x068000"})
    for kind, name in (("drivers", "nvidia"), ("iommu_groups", "42")):
        (tmp_path / kind / name).mkdir(parents=True)
    (root / "0000:3b:00.0" / "driver").symlink_to(tmp_path / "drivers/nvidia")
    (root / "0000:3b:00.0" / "iommu_group").symlink_to(tmp_path / "iommu_groups/42")
    return root


NOT_KNOWN = {
    "subsystem_id": "",
    "bar1_bytes": None,
    "link_speed_gts": None,
    "link_width": None,
    "max_link_speed_gts": None,
    "max_link_width": None,
    "revision_ff": False,
    "iommu_group": None,
    "display_attached": None,
}


def look(root: Path) -> list[dict[str, Any]]:
    return script.ask_gpus(script.collect_gpus(str(root)), str(root))


def test_gpus_are_found_on_the_bus(pci: Path) -> None:
    bare = {"pci_address": "0000:18:00.0", "pci_id": "10de:1db6", "kernel_driver": "", "numa_node": -1, "pci_class": "0300"}
    assert look(pci) == [
        bare | NOT_KNOWN,
        {
            "pci_address": "0000:3b:00.0",
            "pci_id": "10de:1db4",
            "kernel_driver": "nvidia",
            "numa_node": 1,
            "pci_class": "0302",
            "subsystem_id": "10de:1214",
            "bar1_bytes": 32 << 30,
            "link_speed_gts": 8.0,
            "link_width": 8,
            "max_link_speed_gts": 8.0,
            "max_link_width": 16,
            "revision_ff": False,
            "iommu_group": 42,
            "display_attached": None,
        },
    ]
    assert script.collect_gpus(str(pci / "none")) == []
    assert set(look(pci)[0]) <= set(Gpu.model_fields)


def test_a_card_that_has_fallen_off_the_bus(pci: Path) -> None:
    """As seen of one: the files that the kernel keeps say what it was, those that ask the card say nonsense."""
    card = pci / "0000:3b:00.0"
    (card / "config").write_bytes(b"\xff" * 64)
    (card / "current_link_speed").write_text("Unknown\n")
    (card / "current_link_width").write_text("63\n")
    gpu = look(pci)[1]
    assert (gpu["revision_ff"], gpu["pci_id"], gpu["link_speed_gts"], gpu["link_width"]) == (True, "10de:1db4", None, None)


def test_a_card_that_keeps_one_waiting_is_still_listed(pci: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts: dict[str, Any] = {"errors": {}, "gpus": script.collect_gpus(str(pci))}
    monkeypatch.setattr(script, "ask_gpus", lambda gpus: time.sleep(600))
    tasks = [task for task in script.second_tasks(facts) if task.key == "gpus"]
    for task in tasks:
        task.limit_s = 0.3
    script.run_tasks(tasks, facts, time.monotonic() + 30)
    assert [gpu["pci_id"] for gpu in facts["gpus"]] == ["10de:1db6", "10de:1db4"]
    assert facts["errors"] == {"gpus": "no answer within 0.3 s"}


def test_a_sleeping_card_is_left_asleep(pci: Path) -> None:
    card = pci / "0000:3b:00.0"
    (card / "config").write_bytes(b"\xff" * 64)
    (card / "power").mkdir()
    (card / "power/runtime_status").write_text("suspended\n")
    assert look(pci)[1]["revision_ff"] is False


def test_a_card_bound_to_vfio(pci: Path, tmp_path: Path) -> None:
    (tmp_path / "drivers/vfio-pci").mkdir()
    (pci / "0000:18:00.0" / "driver").symlink_to(tmp_path / "drivers/vfio-pci")
    assert [gpu["kernel_driver"] for gpu in script.collect_gpus(str(pci))] == ["vfio-pci", "nvidia"]


@pytest.mark.parametrize(("states", "attached"), [((), None), (("disconnected",), False), (("disconnected", "connected"), True)])
def test_a_monitor_is_seen_on_the_connectors(pci: Path, states: tuple[str, ...], attached: bool | None) -> None:
    for number, state in enumerate(states):
        connector = pci / f"0000:18:00.0/drm/card1/card1-DP-{number}"
        connector.mkdir(parents=True)
        (connector / "status").write_text(f"{state}\n")
    (pci / "0000:18:00.0/drm/renderD129").mkdir(parents=True, exist_ok=True)
    assert script.collect_gpus(str(pci))[0]["display_attached"] is attached


def bars(*lines: tuple[int, int, int]) -> str:
    return "\n".join(
        f"0x{start:016x} 0x{end:016x} 0x{flags:016x}" for start, end, flags in (*lines, *[(0, 0, 0)] * (7 - len(lines)))
    )


@pytest.mark.parametrize(
    ("content", "size"),
    [
        (V100_RESOURCE, 32 << 30),
        # A GeForce: 256 MiB, with an I/O region.
        (bars((0xA0000000, 0xA3FFFFFF, 0x40200), (0x6000000000, 0x600FFFFFFF, 0x14220C), (0, 0, 0)), 256 << 20),
        # Hopper: its registers are a 64-bit region, so that BAR1 is the third line.
        (
            bars(
                (0x88042000000, 0x88042FFFFFF, 0x14220C),
                (0, 0, 0),
                (0x84000000000, 0x85FFFFFFFFF, 0x14220C),
                (0, 0, 0),
                (0x88040000000, 0x88041FFFFFF, 0x14220C),
            ),
            128 << 30,
        ),
        # Not assigned: the kernel has cleared it, or keeps its size with a mark.
        (bars((0xC4000000, 0xC4FFFFFF, 0x40200), (0, 0, 0), (0, 0, 0), (0x38800000000, 0x38801FFFFFF, 0x14220C)), 0),
        (bars((0xC4000000, 0xC4FFFFFF, 0x40200), (0, (16 << 30) - 1, 0x2014220C)), 0),
        (bars((0xC4000000, 0xC4FFFFFF, 0x40200), (0, 0, 0), (0, (128 << 30) - 1, 0x2014220C)), 0),
        ("", None),
        ("0x1 0x2\n" * 7, None),
        ("nonsense", None),
    ],
)
def test_bar1(content: str, size: int | None) -> None:
    assert script.bar1_size(content) == size


@given(st.text())
def test_any_bus_file_can_be_read(content: str) -> None:
    script.bar1_size(content)
    script.link_speed(content)
    script.link_width(content)


@pytest.mark.parametrize(
    ("content", "speed"),
    [("2.5 GT/s PCIe", 2.5), ("8.0 GT/s PCIe", 8.0), ("8 GT/s", 8.0), ("32.0 GT/s PCIe", 32.0), ("Unknown", None), ("", None)],
)
def test_link_speed(content: str, speed: float | None) -> None:
    assert script.link_speed(content) == speed


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
    reason = "0x00000000000000C4"
    output = (
        "0, GPU-aa, 00000000:18:00.0, 16384, 4, 240, Enabled, Disabled, 7.0, 300.00, 877, 1290, Exclusive_Process, "
        f"88, 86, 150.25, 690, 1380, {reason}, Enabled, 3, 1, 2, 4, 1, Yes, Tesla V100\n"
        "1, GPU-bb, 00000000:3B:00.0, [N/A], [Unknown Error], [N/A], [N/A], N/A, nonsense, [N/A], [N/A], N/A, [N/A], "
        "[N/A], N/A, [GPU requires reset], [N/A], [N/A], Not Active, [N/A], [N/A], [N/A], [N/A], [N/A], [N/A], [N/A], Odd, Name\n"
        "Unable to determine the device handle for GPU 0000:AF:00.0: Unknown Error\n"
    )
    assert script.parse_smi(output) == {
        "0000:18:00.0": {
            "index": 0,
            "uuid": "GPU-aa",
            "name": "Tesla V100",
            "memory_total_bytes": 16384 << 20,
            "memory_used_bytes": 4 << 20,
            "memory_reserved_bytes": 240 << 20,
            "compute_capability": "7.0",
            "persistence_mode": "enabled",
            "ecc_mode": "disabled",
            "power_limit_w": 300.0,
            "application_memory_clock_mhz": 877,
            "application_graphics_clock_mhz": 1290,
            "compute_mode": "exclusive_process",
            "temperature_c": 88,
            "memory_temperature_c": 86,
            "power_draw_w": 150.25,
            "sm_clock_mhz": 690,
            "max_sm_clock_mhz": 1380,
            "throttle_reasons": ["sw_power_cap", "hw_thermal_slowdown", "hw_power_brake_slowdown"],
            "ecc_pending_mode": "enabled",
            "ecc_corrected_volatile": 3,
            "ecc_uncorrected_volatile": 1,
            "ecc_uncorrected_aggregate": 2,
            "retired_pages_single_bit": 4,
            "retired_pages_double_bit": 1,
            "retired_pages_pending": True,
        },
        "0000:3b:00.0": {
            "index": 1,
            "uuid": "GPU-bb",
            "name": "Odd, Name",
            "memory_total_bytes": None,
            "memory_used_bytes": None,
            "memory_reserved_bytes": None,
            "compute_capability": "",
            "persistence_mode": "",
            "ecc_mode": "",
            "power_limit_w": None,
            "application_memory_clock_mhz": None,
            "application_graphics_clock_mhz": None,
            "compute_mode": "",
            "temperature_c": None,
            "memory_temperature_c": None,
            "power_draw_w": None,
            "sm_clock_mhz": None,
            "max_sm_clock_mhz": None,
            "throttle_reasons": None,
            "ecc_pending_mode": "",
            "ecc_corrected_volatile": None,
            "ecc_uncorrected_volatile": None,
            "ecc_uncorrected_aggregate": None,
            "retired_pages_single_bit": None,
            "retired_pages_double_bit": None,
            "retired_pages_pending": None,
        },
    }


def test_smi_processes() -> None:
    output = (
        "GPU-aa, 4242, 15021, /opt/v100ctl/engines/llama_cpp/x/llama-server\n"
        "GPU-aa, 77, [N/A], [Not Found]\n"
        # Newer drivers give the whole command line, and that may hold secrets and commas.
        "GPU-bb, 9, 300, /usr/bin/python3 serve.py --api-key secret, --more\n"
        "No running processes found\n"
    )
    processes = script.parse_smi_processes(output)
    assert processes == {
        "GPU-aa": [
            {"pid": 4242, "command": "llama-server", "unit": "", "memory_bytes": 15021 << 20},
            {"pid": 77, "command": "", "unit": "", "memory_bytes": None},
        ],
        "GPU-bb": [{"pid": 9, "command": "python3", "unit": "", "memory_bytes": 300 << 20}],
    }
    assert len(script.parse_smi_processes("GPU-aa, 1, 1, x\n" * 100000)["GPU-aa"]) == script.MAX_GPU_PROCESSES


@given(st.text())
def test_any_smi_output_can_be_read(output: str) -> None:
    script.parse_smi(output)
    script.parse_smi_processes(output)
    script.parse_cuda_version(output)


@pytest.mark.parametrize(
    ("table", "version"),
    [
        ((FIXTURES / "nvidia_smi/h200_580.txt").read_text(), "13.0"),
        ((FIXTURES / "nvidia_smi/v100_sxm2_418.txt").read_text(), "10.1"),
        # Before 410 it is not told, and from 6xx on it has another name.
        ("| NVIDIA-SMI 410.48                 Driver Version: 410.48                    |\n", ""),
        ("| NVIDIA-SMI 610.57.04              KMD Version: 610.57.04     CUDA UMD Version: 13.3     |\n", "13.3"),
    ],
)
def test_cuda_version(table: str, version: str) -> None:
    assert script.parse_cuda_version(table) == version


# Answers like the real one: `--query-gpu` refuses a field that it does not know with exit code 2.
SMI = """#!/bin/sh
echo "$*" >> {folder}/calls
alone() {{ :; }}
row() {{
    old=$(cat {folder}/unknown 2>/dev/null)
    for field in $old; do
        case ",${{1#*=}}," in *",$field,"*) printf 'Field "%s" is not a valid field to query.\\n\\n' "$field"; exit 2;; esac
    done
    line=
    for field in $(echo "${{1#*=}}" | tr , " "); do
        case "$field" in
            index) value=0;; uuid) value=GPU-aa;; pci.bus_id) value=00000000:18:00.0;; name) value=V100;;
            memory.total) value=16384;; memory.*) value=4;; compute_cap) value=7.0;;
            clocks_event_reasons.active) value=0x8;; clocks_throttle_reasons.active) value=0x80;; *) value=Enabled;;
        esac
        line="$line, $value"
    done
    echo "${{line#, }}"
}}
apps() {{ echo "GPU-aa, 1, 300, /sbin/init"; }}
table() {{ echo "| NVIDIA-SMI 535.309.01   Driver Version: 535.309.01   CUDA Version: 12.2 |"; }}
{body}
case "$1" in
    --query-gpu=*) row "$1";;
    --query-compute-apps=*) apps;;
    -i) alone "$2"; case "$3" in
        --query-gpu=*) row "$3";;
        --query-compute-apps=*) apps;;
        "") table;;
        esac;;
    "") table;;
    *) exit 9;;
esac
"""


class Smi:
    """A stand-in for `nvidia-smi` on the PATH."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def install(self, body: str = "") -> None:
        program = self.folder / "nvidia-smi"
        program.write_text(SMI.format(folder=self.folder, body=body))
        program.chmod(0o755)

    def collect(self, *, loaded: bool = True) -> tuple[dict[str, Any], str, dict[str, dict[str, Any]], dict[str, Any]]:
        facts: dict[str, Any] = {"errors": {}}
        smi, cuda_version, cards = script.collect_smi(loaded, facts)
        return smi, cuda_version, cards, facts["errors"]

    @property
    def calls(self) -> list[str]:
        path = self.folder / "calls"
        return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Smi:
    monkeypatch.setitem(script.COMMAND_ENVIRONMENT, "PATH", f"{tmp_path}:/usr/bin:/bin")
    return Smi(tmp_path)


def test_what_smi_knows(smi: Smi) -> None:
    smi.install()
    answer, cuda_version, cards, errors = smi.collect()
    assert (answer["status"], answer["mismatch"], cuda_version, errors) == ("ok", False, "12.2", {})
    card = cards["0000:18:00.0"]
    assert (card["compute_capability"], card["name"]) == ("7.0", "V100")
    assert card["processes"] == [{"pid": 1, "command": "init", "unit": "", "memory_bytes": 300 << 20}]
    assert set(card) <= set(Gpu.model_fields)


def test_what_an_older_driver_does_not_know_is_left_out(smi: Smi) -> None:
    smi.install()
    (smi.folder / "unknown").write_text("memory.reserved compute_cap\n")
    answer, _, cards, errors = smi.collect()
    assert (answer["status"], errors) == ("ok", {})
    assert (cards["0000:18:00.0"]["compute_capability"], cards["0000:18:00.0"]["memory_reserved_bytes"]) == ("", None)
    assert cards["0000:18:00.0"]["ecc_mode"] == "enabled"
    assert len([call for call in smi.calls if call.startswith("--query-gpu")]) == 3


def test_an_older_driver_is_asked_with_the_name_that_it_knows(smi: Smi) -> None:
    smi.install()
    assert smi.collect()[2]["0000:18:00.0"]["throttle_reasons"] == ["hw_slowdown"]
    (smi.folder / "unknown").write_text("clocks_event_reasons.active\n")
    assert smi.collect()[2]["0000:18:00.0"]["throttle_reasons"] == ["hw_power_brake_slowdown"]
    (smi.folder / "unknown").write_text("clocks_event_reasons.active clocks_throttle_reasons.active\n")
    answer, _, cards, errors = smi.collect()
    assert (answer["status"], cards["0000:18:00.0"]["throttle_reasons"], errors) == ("ok", None, {})


def test_cards_beside_one_that_fell_off_are_asked_one_by_one(smi: Smi, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    bus = tmp_path / "bus"
    for address, config in (("0000:18:00.0", b"\xde\x10"), ("0000:5e:00.0", b"\xff\xff")):
        (bus / address).mkdir(parents=True)
        for name, value in (("vendor", "0x10de"), ("class", "0x030200")):
            (bus / address / name).write_text(value + "\n")
        (bus / address / "config").write_bytes(config * 32)
    monkeypatch.setattr(script, "PCI_DEVICES", str(bus))
    smi.install(
        'alone() { [ "$1" = 0000:18:00.0 ] || { echo lost; exit 15; }; }; '
        '[ "$1" = -i ] || { echo "Unable to determine the device handle for GPU0000:5E:00.0: Unknown Error"; exit 255; }'
    )
    answer, cuda_version, cards, errors = smi.collect()
    assert (answer["status"], cuda_version, list(cards), errors) == ("error", "12.2", ["0000:18:00.0"], {})
    assert [process["pid"] for process in cards["0000:18:00.0"]["processes"]] == [1]
    # The lost one is left alone: whoever asks it may wait.
    assert not [call for call in smi.calls if call.startswith("-i 0000:5e:00.0")]


@pytest.mark.parametrize(
    ("loaded", "error", "expected"),
    [
        (True, None, "ok"),
        (True, errno.EIO, "poisoned"),
        (True, errno.EPERM, ""),
        (True, errno.ENOENT, ""),
        (True, errno.ENXIO, ""),
        (False, errno.EIO, ""),
    ],
)
def test_poisoned_unified_memory(
    loaded: bool, error: int | None, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/modules").write_text("nvidia_uvm 1527808 0 - Live 0x0\n" if loaded else "")
    device = tmp_path / "nvidia-uvm"
    device.write_bytes(b"")
    real = os.open

    def opened(path: str, flags: int, *arguments: int) -> int:
        if path == str(device) and error is not None:
            raise OSError(error, os.strerror(error), path)
        return real(path, flags, *arguments)

    monkeypatch.setattr(os, "open", opened)
    assert script.collect_uvm(str(tmp_path), str(device)) == expected


def kernel_records(*messages: str) -> bytes:
    """Messages as ``/dev/kmsg`` gives them, ten seconds apart up to now."""
    now_us = int(time.clock_gettime(time.CLOCK_MONOTONIC) * 1e6)
    return b"".join(
        f"3,{number},{now_us - 10_000_000 * (len(messages) - number)},-;{message}\n SUBSYSTEM=pci\n".encode()
        for number, message in enumerate(messages)
    )


XIDS = (
    "NVRM: Xid (PCI:0000:5e:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.",
    # Older drivers leave the process out.
    "NVRM: Xid (PCI:0000:06:00): 48, An uncorrectable double bit error (DBE) has been detected on GPU in the framebuffer",
    "NVRM: Xid (PCI:0000:06:00): 31, pid=77, Ch 00000010, intr 10000000.",
    "usb 1-1: new device",
    "NVRM: Xid (PCI:0000:06:00): 31, pid=78, Ch 00000011, intr 10000000.",
)


def test_xids_of_the_kernel_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "kmsg"
    log.write_bytes(kernel_records(*XIDS))
    read = script.read_kernel_log(str(log))
    assert read is not None
    assert [message for _, message in read] == [XIDS[number] for number in (0, 1, 2, 4)]
    monkeypatch.setattr(script, "read_kernel_log", lambda: read)
    now_s = time.time()
    earlier = "NVRM: Xid (PCI:0000:06:00): 63, pid=1, Dynamic Page Retirement"
    journal = [
        # The same record as the kernel's own; one of an earlier boot; one too old to be told.
        ("b00t", read[0][0], now_s - 49, XIDS[0]),
        ("earlier", 5_000_000, now_s - 7200, earlier),
        ("oldest", 5_000_000, now_s - 25 * 3600, earlier.replace(": 63", ": 64")),
    ]
    monkeypatch.setattr(script, "read_journal", lambda: journal)
    found = script.collect_kernel_log({"boot_id": "b0-0t"})
    assert found["seen"] is True
    assert [(xid["pci_address"], xid["code"], xid["count"], xid["this_boot"]) for xid in found["xids"]] == [
        ("0000:06:00.0", 31, 2, True),
        ("0000:06:00.0", 48, 1, True),
        ("0000:5e:00.0", 79, 1, True),
        ("0000:06:00.0", 63, 1, False),
    ]
    latest = found["xids"][0]
    assert latest["message"] == "pid=78, Ch 00000011, intr 10000000."
    assert latest["first_s"] == pytest.approx(now_s - 30, abs=5)
    assert latest["last_s"] == pytest.approx(now_s - 10, abs=5)
    KernelLog.model_validate(found)


def test_a_kernel_log_that_is_not_to_be_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "none", tmp_path / "fifo", Path("/dev/null")):
        assert script.read_kernel_log(str(path)) is None
    monkeypatch.setattr(script, "read_kernel_log", lambda: None)
    monkeypatch.setattr(script, "read_journal", list)
    assert script.collect_kernel_log({}) == {"seen": False, "xids": []}


@given(st.binary())
def test_any_kernel_log_can_be_read(content: bytes) -> None:
    with tempfile.NamedTemporaryFile() as file:
        file.write(content)
        file.flush()
        assert script.read_kernel_log(file.name) is not None


def test_the_journal_knows_earlier_boots(smi: Smi) -> None:
    program = smi.folder / "journalctl"
    entries = [
        {"_BOOT_ID": "aa", "__REALTIME_TIMESTAMP": "1700000000000000", "_SOURCE_MONOTONIC_TIMESTAMP": "77", "MESSAGE": XIDS[0]},
        {"_BOOT_ID": "bb", "__REALTIME_TIMESTAMP": "1700000001000000", "__MONOTONIC_TIMESTAMP": "78", "MESSAGE": [78, 86]},
        {"_BOOT_ID": "cc"},
    ]
    program.write_text("#!/bin/sh\ncat <<'EOF'\nnonsense\n" + "\n".join(map(json.dumps, entries)) + "\nEOF\n")
    program.chmod(0o755)
    assert script.read_journal() == [("aa", 77, 1.7e9, XIDS[0]), ("bb", 78, 1.7e9 + 1, "NV")]
    program.write_text("#!/bin/sh\necho 'Compiled without pattern matching support' >&2; exit 1\n")
    assert script.read_journal() == []
    program.write_text("#!/bin/sh\nsleep 600\n")
    assert script.read_journal(0.3) == []


def test_dkms(tmp_path: Path) -> None:
    module = tmp_path / "nvidia-current"
    for version, kernels in (("535.309.01", ("6.1.0-57-amd64", "6.1.0-9-amd64")), ("525.147.05", ())):
        (module / version).mkdir(parents=True)
        (module / version / "source").symlink_to(f"/usr/src/nvidia-current-{version}")
        for kernel in kernels:
            (module / version / kernel / "x86_64/module").mkdir(parents=True)
    (module / "kernel-6.1.0-57-amd64-x86_64").symlink_to("535.309.01/6.1.0-57-amd64/x86_64")
    (module / "525.147.05/build").mkdir()
    log = "DKMS make.log for nvidia-current-525.147.05 for kernel 6.1.0-57-amd64 (x86_64)\nerror\n"
    (module / "525.147.05/build/make.log").write_text(log)
    (tmp_path / "zfs/2.1.11").mkdir(parents=True)
    (tmp_path / "zfs/2.1.11/source").symlink_to("/usr/src/zfs-2.1.11")
    found = script.collect_dkms(str(tmp_path))
    assert found == [
        {"name": "nvidia-current", "version": "525.147.05", "built": [], "installed": [], "failed": "6.1.0-57-amd64"},
        {
            "name": "nvidia-current",
            "version": "535.309.01",
            "built": ["6.1.0-9-amd64", "6.1.0-57-amd64"],
            "installed": ["6.1.0-57-amd64"],
            "failed": "",
        },
    ]
    for document in found:
        DkmsModule.model_validate(document)
    assert script.collect_dkms(str(tmp_path / "none")) == []


def test_a_driver_that_does_not_know_what_is_needed_is_an_error(smi: Smi) -> None:
    smi.install()
    (smi.folder / "unknown").write_text("uuid\n")
    answer, cuda_version, cards, _ = smi.collect()
    assert (answer["status"], cuda_version, cards) == ("error", "", {})
    assert len(smi.calls) == 1


def test_a_lost_card_does_not_hide_the_others(smi: Smi) -> None:
    smi.install(
        'row() { echo "1, GPU-bb, 00000000:3B:00.0, 16384, 4, 4, Enabled, Enabled, 7.0, 300, 877, 999, Default, '
        '40, 38, 40.00, 135, 1380, 0x1, Enabled, 0, 0, 0, 0, 0, No, V100"; exit 15; }'
    )
    answer, cuda_version, cards, _ = smi.collect()
    assert (answer["status"], cuda_version, list(cards)) == ("error", "12.2", ["0000:3b:00.0"])
    assert cards["0000:3b:00.0"]["processes"] == []


def test_a_library_of_another_version_is_told(smi: Smi) -> None:
    smi.install(
        'echo "Failed to initialize NVML: Driver/library version mismatch"; echo "NVML library version: 535.309"; exit 18'
    )
    answer, _, cards, _ = smi.collect()
    assert (answer["status"], answer["mismatch"], cards) == ("error", True, {})


@pytest.mark.parametrize(
    ("body", "status", "output"),
    [
        ("echo NVIDIA-SMI has failed; exit 9", "error", "NVIDIA-SMI has failed\n"),
        ("sleep 600", "timeout", ""),
        ("echo; exec yes", "error", "printed more than"),
        ("exec head -c 300000 /dev/urandom", "ok", ""),
        ("echo No devices were found; exit 0", "ok", "No devices were found\n"),
    ],
)
def test_how_a_sick_smi_answers(smi: Smi, monkeypatch: pytest.MonkeyPatch, body: str, status: str, output: str) -> None:
    monkeypatch.setattr(script, "SMI_LIMIT_S", 5.0 if "yes" in body else 1.0)
    smi.install(body)
    answer, cuda_version, cards, errors = smi.collect()
    assert (answer["status"], cuda_version, cards, errors) == (status, "", {}, {})
    assert output in answer["output"]
    assert len(answer["output"]) <= 2000
    # What is stuck once is not asked again.
    assert len(smi.calls) == 1


def test_an_smi_that_gets_stuck_later_costs_only_what_it_was_asked_then(smi: Smi, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "SMI_LIMIT_S", 3.0)
    smi.install("apps() { sleep 600; }; table() { exec yes; }")
    answer, cuda_version, cards, errors = smi.collect()
    assert (answer["status"], cuda_version, cards["0000:18:00.0"]["name"]) == ("ok", "", "V100")
    assert cards["0000:18:00.0"]["processes"] == []
    assert set(errors) == {"nvidia.processes", "nvidia.cuda_version"}


def test_a_file_that_is_no_program_is_an_error(smi: Smi) -> None:
    (smi.folder / "nvidia-smi").write_bytes(b"\x7fELF\0\0garbage")
    (smi.folder / "nvidia-smi").chmod(0o755)
    assert smi.collect()[0]["status"] == "error"


def test_without_a_module_smi_is_not_called(smi: Smi) -> None:
    """It would load the module, and the probe changes nothing."""
    smi.install()
    answer, _, cards, _ = smi.collect(loaded=False)
    assert (answer["status"], answer["output"], cards) == ("error", "the kernel module is not loaded", {})
    assert smi.calls == []


def test_no_smi_is_absent(smi: Smi) -> None:
    assert smi.collect() == ({"status": "absent", "output": "", "mismatch": False}, "", {}, {})


def test_who_computes_is_named_by_the_host(tmp_path: Path) -> None:
    (tmp_path / "4242").mkdir()
    (tmp_path / "4242/comm").write_text("llama-server\n")
    (tmp_path / "4242/cmdline").write_bytes(b"/usr/bin/python3\0-m\0vllm\0--api-key\0secret\0")
    (tmp_path / "4242/cgroup").write_text("0::/system.slice/v100-chat.service\n")
    gpus: list[dict[str, Any]] = [
        {"processes": [{"pid": pid, "command": "seen", "unit": "", "memory_bytes": None} for pid in (4242, 5000)]},
        {"pci_address": "without any"},
    ]
    named = script.name_gpu_processes(gpus, str(tmp_path))
    assert [(process["command"], process["unit"]) for process in named[0]["processes"]] == [
        ("python3 -m vllm", "v100-chat.service"),
        ("seen", ""),
    ]


# --- the driver on disk -------------------------------------------------------------------------------------------------------


def test_library_version(tmp_path: Path) -> None:
    for folder, files in {
        "debian": {"libnvidia-ml.so.1": "alternatives", "alternatives": "current/libnvidia-ml.so.1"},
        "debian/current": {"libnvidia-ml.so.1": "libnvidia-ml.so.535.309.01", "libnvidia-ml.so.535.309.01": ""},
        "odd": {"libnvidia-ml.so.1": "libnvidia-ml.so.beta", "libnvidia-ml.so.beta": ""},
        "x86_64-linux-gnu": {"libnvidia-ml.so.1": "libnvidia-ml.so.580.65.06", "libnvidia-ml.so.580.65.06": ""},
    }.items():
        (tmp_path / folder).mkdir()
        for name, target in files.items():
            if target:
                (tmp_path / folder / name).symlink_to(target)
            else:
                (tmp_path / folder / name).touch()

    def version(*folders: str) -> str:
        return script.library_version(tuple(str(tmp_path / folder) for folder in folders), "x86_64")

    assert version("none", "odd", "debian") == "535.309.01"
    assert version("{machine}-linux-gnu", "debian") == "580.65.06"
    assert version("none", "odd") == ""


@pytest.mark.parametrize(
    ("listed", "found"),
    [
        # Debian's DKMS build; Ubuntu's ready-made one; the installer's own; Debian's open one.
        ("updates/dkms/nvidia-current.ko", "updates/dkms/nvidia-current.ko"),
        ("kernel/nvidia-535/nvidia.ko", "kernel/nvidia-535/nvidia.ko"),
        ("kernel/drivers/video/nvidia.ko.zst", "kernel/drivers/video/nvidia.ko.zst"),
        ("updates/dkms/nvidia-current-open.ko.xz", "updates/dkms/nvidia-current-open.ko.xz"),
        ("kernel/drivers/video/nvidia.ko updates/dkms/nvidia.ko", "updates/dkms/nvidia.ko"),
        ("kernel/drivers/platform/x86/nvidia-wmi-ec-backlight.ko updates/dkms/nvidia-current-drm.ko", None),
        ("", None),
    ],
)
def test_the_module_that_a_kernel_would_load(tmp_path: Path, listed: str, found: str | None) -> None:
    folder = tmp_path / "6.1.0-41-amd64"
    folder.mkdir()
    (folder / "modules.dep").write_text("kernel/x.ko:\n" + "".join(f"{path}: kernel/y.ko\n" for path in listed.split()))
    assert script.find_module(folder.name, str(tmp_path)) == (str(folder / found) if found else None)
    assert script.find_module("another", str(tmp_path)) is None


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("echo 'license:        NVIDIA'; echo 'version:        535.309.01'", ("535.309.01", "proprietary")),
        ("echo 'version:        580.65.06'; echo 'license:        Dual MIT/GPL'", ("580.65.06", "open")),
        ("echo 'version: 580.65.06'", ("580.65.06", "")),
        ("echo 'modinfo: ERROR: Module nvidia not found.' >&2; exit 1", "`modinfo` failed with 1"),
        ("head -c 100000 /dev/urandom", "tells no version"),
        ("exec yes", "printed more than"),
    ],
)
def test_the_module_on_disk(smi: Smi, body: str, expected: str | tuple[str, str]) -> None:
    modinfo = smi.folder / "modinfo"
    modinfo.write_text(f"#!/bin/sh\n{body}\n")
    modinfo.chmod(0o755)
    (smi.folder / "6.1").mkdir()
    (smi.folder / "6.1/modules.dep").write_text("updates/dkms/nvidia.ko:\n")
    if isinstance(expected, str):
        with pytest.raises(script.ProbeFailure, match=expected):
            script.collect_module_file("6.1", str(smi.folder))
    else:
        assert script.collect_module_file("6.1", str(smi.folder)) == {
            "on_disk_module_version": expected[0],
            "on_disk_module_flavour": expected[1],
        }


def test_without_a_module_on_disk_nobody_is_asked(tmp_path: Path) -> None:
    assert script.collect_module_file("6.1", str(tmp_path)) == {"on_disk_module_version": "", "on_disk_module_flavour": ""}


def test_the_module_of_the_next_boot(smi: Smi) -> None:
    boot, modules = smi.folder / "boot", smi.folder / "modules"
    boot.mkdir()
    assert script.collect_next_boot("6.1.0-41-amd64", str(boot), str(modules)) == {}, "a container boots no kernel"
    modinfo = smi.folder / "modinfo"
    modinfo.write_text("#!/bin/sh\necho 'license: NVIDIA'; echo 'version: 535.309.01'\n")
    modinfo.chmod(0o755)
    for release in ("6.1.0-41-amd64", "6.1.0-42-amd64"):
        (boot / f"vmlinuz-{release}").touch()
        (modules / release).mkdir(parents=True)
    (modules / "6.1.0-41-amd64/modules.dep").write_text("updates/dkms/nvidia.ko:\n")
    (modules / "6.1.0-42-amd64/modules.dep").write_text("kernel/x.ko:\n")
    assert script.collect_next_boot("6.1.0-42-amd64", str(boot), str(modules)) == {}, "the running one is asked already"
    assert script.collect_next_boot("6.1.0-41-amd64", str(boot), str(modules)) == {
        "next_boot_module_version": "",
        "next_boot_module_flavour": "",
    }
    (modules / "6.1.0-42-amd64/modules.dep").write_text("updates/dkms/nvidia.ko:\n")
    assert script.collect_next_boot("6.1.0-41-amd64", str(boot), str(modules)) == {
        "next_boot_module_version": "535.309.01",
        "next_boot_module_flavour": "proprietary",
    }


def test_fabric_manager(smi: Smi) -> None:
    proc = smi.folder / "proc"
    (proc / "77").mkdir(parents=True)
    (proc / "77/comm").write_text("nv-fabricmanage\n")
    assert script.collect_fabric_manager(str(proc)) == ""
    (smi.folder / "nv-fabricmanager").write_text("")
    (smi.folder / "nv-fabricmanager").chmod(0o755)
    assert script.collect_fabric_manager(str(proc)) == "active"
    (proc / "77/comm").write_text("sh\n")
    assert script.collect_fabric_manager(str(proc)) == "installed"


def test_the_drivers_parts_fail_one_by_one(smi: Smi, pci: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(release: str) -> None:
        raise script.ProbeFailure(f"no module of {release} today")

    monkeypatch.setattr(script, "collect_module_file", fail)
    facts: dict[str, Any] = {"errors": {}}
    nvidia = script.collect_nvidia(facts, str(pci))
    assert nvidia["nvswitch_count"] == 2
    assert facts["errors"] == {"nvidia.module_file": f"no module of {os.uname().release} today"}
    assert set(nvidia) <= set(Nvidia.model_fields)


# --- kernel and firmware ------------------------------------------------------------------------------------------------------


def test_kernels_and_headers(tmp_path: Path) -> None:
    modules, boot, source = tmp_path / "modules", tmp_path / "boot", tmp_path / "src"
    for release in ("6.1.0-9-amd64", "6.1.0-41-amd64", "6.1.0-40-amd64", "6.1.0-42-amd64"):
        (modules / release).mkdir(parents=True)
    for release in ("6.1.0-9-amd64", "6.1.0-41-amd64"):
        (source / release).mkdir(parents=True)
        (source / release / "Makefile").touch()
        (modules / release / "build").symlink_to(source / release)
    # Headers that were removed leave the link behind.
    (modules / "6.1.0-40-amd64/build").symlink_to(source / "6.1.0-40-amd64")
    boot.mkdir()
    for name in ("vmlinuz-6.1.0-41-amd64", "vmlinuz-6.1.0-9-amd64", "vmlinuz-0-rescue-abc", "config-6.1.0-8-amd64"):
        (boot / name).touch()
    (modules / "6.1.0-42-amd64/vmlinuz").touch()
    assert script.collect_kernel_headers(str(modules)) == ["6.1.0-9-amd64", "6.1.0-41-amd64"]
    assert script.collect_kernels_installed(str(boot), str(modules)) == ["6.1.0-9-amd64", "6.1.0-41-amd64", "6.1.0-42-amd64"]
    assert script.collect_kernel_headers(str(tmp_path / "none")) == []
    assert script.collect_kernels_installed(str(tmp_path / "none"), str(tmp_path / "none")) == []


@given(st.sets(st.text()))
def test_any_kernel_names_can_be_sorted(names: set[str]) -> None:
    assert set(script.by_version(names)) == names


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        (None, None),
        ({}, None),
        ({"BootOrder-8be4df61-93ca-11d2-aa0d-00e098032b8c": b"\7\0\0\0\1\0"}, False),
        ({script.SECURE_BOOT_VARIABLE: b"\6\0\0\0\1"}, True),
        ({script.SECURE_BOOT_VARIABLE: b"\6\0\0\0\0"}, False),
    ],
)
def test_secure_boot(tmp_path: Path, variables: dict[str, bytes] | None, expected: bool | None) -> None:
    if variables is not None:
        (tmp_path / "efivars").mkdir()
        for name, value in variables.items():
            (tmp_path / "efivars" / name).write_bytes(value)
    assert script.collect_secure_boot(str(tmp_path)) is expected


@pytest.mark.parametrize(("content", "state"), [("1", "enforcing"), ("0\n", "permissive"), ("", ""), (None, ""), ("2", "")])
def test_selinux(tmp_path: Path, content: str | None, state: str) -> None:
    if content is not None:
        (tmp_path / "enforce").write_text(content)
    assert script.collect_selinux(str(tmp_path / "enforce")) == state


@pytest.mark.parametrize("value", [b"", b"\6\0\0\0", b"\6\0\0\0\7", b"x" * 1000])
def test_an_odd_secure_boot_variable_is_an_error(tmp_path: Path, value: bytes) -> None:
    (tmp_path / "efivars").mkdir()
    (tmp_path / "efivars" / script.SECURE_BOOT_VARIABLE).write_bytes(value)
    with pytest.raises(script.ProbeFailure, match="SecureBoot-"):
        script.collect_secure_boot(str(tmp_path))


@pytest.mark.parametrize(
    ("files", "loaded", "blacklisted"),
    [
        ({}, False, False),
        ({"proc/modules": "nouveau 2400000 1 - Live 0x0\nttm 1 1 nouveau, Live 0x0\n"}, True, False),
        # It is another module that uses it here.
        ({"proc/modules": "ttm 1 1 nouveau, Live 0x0\n"}, False, False),
        # Built into the kernel, or a kernel that lists none.
        ({"sys/module/nouveau/uevent": ""}, True, False),
        ({"sys/module/drm/uevent": ""}, False, False),
        ({"etc/modprobe.d/a.conf": "# comment\n  blacklist nouveau # why\noptions x\n"}, False, True),
        ({"etc/modprobe.d/a.conf": "blacklist nouveau\r\n"}, False, True),
        ({"usr/lib/modprobe.d/a.conf": "install nouveau /bin/false\n"}, False, True),
        ({"usr/lib/modprobe.d/a.conf": "options nouveau modeset=0\n"}, False, True),
        ({"lib/modprobe.d/a.conf": "alias nouveau off\n"}, False, True),
        ({"etc/modprobe.d/a.conf": "#blacklist nouveau\nblacklist nouveau_extra\n"}, False, False),
        ({"etc/modprobe.d/a.conf.disabled": "blacklist nouveau\n"}, False, False),
        ({"proc/cmdline": "root=/dev/sda1 modprobe.blacklist=a,nouveau quiet"}, False, True),
        ({"proc/cmdline": "nouveau.modeset=0"}, False, True),
        ({"proc/cmdline": "nouveau.modeset=1 modprobe.blacklist=nouveaux"}, False, False),
    ],
)
def test_nouveau(tmp_path: Path, files: dict[str, str], loaded: bool, blacklisted: bool) -> None:
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content, newline="")
    assert script.collect_nouveau(str(tmp_path)) == {"loaded": loaded, "blacklisted": blacklisted}


@pytest.mark.parametrize(
    ("name", "content", "limit"),
    [
        ("memory.max", "8589934592\n", 8 << 30),
        ("memory.max", "max\n", None),
        ("memory/memory.limit_in_bytes", "9223372036854771712\n", 9223372036854771712),
        ("memory.max", "nonsense\n", None),
        ("other", "1\n", None),
    ],
)
def test_cgroup_memory_limit(tmp_path: Path, name: str, content: str, limit: int | None) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(content)
    assert script.cgroup_memory_limit(str(tmp_path)) == limit


def test_a_ceiling_above_the_memory_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    total_bytes = script.collect_memory()["total_bytes"]
    for limit_bytes, expected in ((total_bytes - 1, total_bytes - 1), (total_bytes, None), (1 << 62, None), (None, None)):
        monkeypatch.setattr(script, "cgroup_memory_limit", lambda limit_bytes=limit_bytes: limit_bytes)
        assert script.collect_memory()["limit_bytes"] == expected


# --- compilers and toolkits ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "upstream"),
    [
        ("12.2.0-14+deb12u1", "12.2.0"),
        ("4:13.2.0-7ubuntu1", "13.2.0"),
        ("11.5.0-5.el9_5", "11.5.0"),
        ("3.25.1", "3.25.1"),
        ("", ""),
    ],
)
def test_upstream_version(version: str, upstream: str) -> None:
    assert script.upstream_version(version) == upstream


def make_program(path: Path, body: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)


def test_compilers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "COMPILERS_LIMIT_S", 2.0)
    local, system = tmp_path / "local", tmp_path / "bin"
    make_program(local / "gcc", "[ $1 = -dumpfullversion ] && echo 10.2.1")
    make_program(system / "gcc", "echo 9.9.9")
    make_program(system / "gcc-11", "echo 11.4.0; exit 1")
    make_program(system / "g++-12", "head -c 1000 /dev/urandom")
    make_program(system / "gcc-ar", "echo 1.0")
    make_program(system / "g++-13", "echo 13")
    (system / "gcc-9").write_text("not executable")
    facts: dict[str, Any] = {"errors": {}}
    # What comes first on the PATH counts.
    assert script.collect_compilers(facts, (str(local), str(system))) == {"gcc": "10.2.1", "g++-13": "13"}
    assert set(facts["errors"]) == {"compilers.gcc-11", "compilers.g++-12"}
    assert script.collect_compilers(facts, (str(tmp_path / "none"),)) == {}


@pytest.mark.parametrize(
    ("real", "installed", "version"),
    [
        ("/usr/bin/x86_64-linux-gnu-gcc-12", {"gcc-12": "12.2.0-14+deb12u1"}, "12.2.0"),
        ("/usr/bin/x86_64-linux-gnu-g++-11", {"g++-11": "11.4.0-1ubuntu1~22.04", "gcc-11": "11.3.0-1"}, "11.4.0"),
        ("/usr/bin/gcc", {"gcc": "11.5.0-5.el9_5"}, "11.5.0"),
        ("/usr/bin/g++", {"gcc-c++": "11.5.0-5.el9_5"}, "11.5.0"),
        # Not a package's, a wrapper, two versions at once: the compiler itself is asked, which is not there.
        ("/usr/bin/x86_64-linux-gnu-gcc-12", {}, ""),
        ("/usr/bin/ccache", {"gcc-12": "12.2.0-14"}, ""),
        ("/usr/local/bin/gcc", {"gcc": "12.2.0-14"}, ""),
        ("/usr/bin/gcc", {"gcc": "11.5.0-5.el9, 12.1.0-1.el9"}, ""),
    ],
)
def test_a_compilers_version_is_its_packages(
    monkeypatch: pytest.MonkeyPatch, real: str, installed: dict[str, str], version: str
) -> None:
    monkeypatch.setattr(os.path, "realpath", lambda path: real)
    assert script.compiler_version("/nonexistent/compiler", installed, 1.0) == version


def test_the_compilers_here_say_the_same_as_their_packages() -> None:
    facts: dict[str, Any] = {"errors": {}, "packages": script.collect_packages()}
    known = script.collect_compilers(facts)
    if not known:
        pytest.skip("no gcc here")
    for name, version in known.items():
        told = subprocess.run([name, "-dumpfullversion"], capture_output=True, text=True, check=True).stdout.strip()
        assert version == told


def test_cuda_toolkits(tmp_path: Path) -> None:
    local = tmp_path / "usr/local"
    make_program(local / "cuda-11.8/bin/nvcc", "")
    (local / "cuda-11.8/version.json").write_text('{"cuda": {"name": "CUDA SDK", "version": "11.8.20220929"}, "cuda_nvcc": {}}')
    (local / "cuda-10.2").mkdir()
    (local / "cuda-10.2/version.txt").write_text("CUDA Version 10.2.89\n")
    (local / "cuda-12.9/include").mkdir(parents=True)
    (local / "cuda-12.9/version.json").write_text("[]")
    (local / "cuda-12.9/include/cuda.h").write_text("/* x */\n#define __CUDA_H__\n#define CUDA_VERSION 12090\n")
    # Says nothing of itself but by its name, and no name either.
    (local / "cuda-12.1").mkdir()
    (local / "cuda-12.1/version.json").write_bytes(b"\xff\0binary")
    (local / "cuda-13").mkdir()
    (local / "cuda").symlink_to("cuda-11.8")
    (local / "cuda-12").symlink_to("gone")
    (local / "cuda-samples").mkdir()
    assert [
        (item["path"].rpartition("/")[2], item["version"], item["nvcc"])
        for item in script.collect_cuda_toolkits({}, str(tmp_path))
    ] == [
        ("cuda-11.8", "11.8", True),
        ("cuda-10.2", "10.2", False),
        ("cuda-12.1", "12.1", False),
        ("cuda-12.9", "12.9", False),
        ("cuda-13", "", False),
    ]


def test_the_distributions_own_toolkit(tmp_path: Path) -> None:
    make_program(tmp_path / "usr/lib/nvidia-cuda-toolkit/bin/nvcc", "")
    own = {"path": str(tmp_path / "usr/lib/nvidia-cuda-toolkit"), "nvcc": True}
    assert script.collect_cuda_toolkits({}, str(tmp_path)) == [own | {"version": ""}]
    facts = {"packages": {"installed": {"nvidia-cuda-toolkit": "11.8.89~11.8.0-5~deb12u1"}}}
    assert script.collect_cuda_toolkits(facts, str(tmp_path)) == [own | {"version": "11.8"}]
    (tmp_path / "usr/include").mkdir()
    (tmp_path / "usr/include/cuda.h").write_text("#define CUDA_VERSION 11050\n")
    assert script.collect_cuda_toolkits({}, str(tmp_path)) == [own | {"version": "11.5"}]
    assert script.collect_cuda_toolkits({}, str(tmp_path / "none")) == []


def test_cmake_version(smi: Smi, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(script.COMMAND_ENVIRONMENT, "PATH", str(smi.folder))
    assert script.collect_cmake_version({}) == ""
    make_program(smi.folder / "cmake", "echo 'cmake version 3.31.2'; echo; echo more")
    facts = {"packages": {"installed": {"cmake": "3.25.1-1"}}}
    # One that is not the package's tells its own version.
    assert script.collect_cmake_version(facts) == "3.31.2"
    monkeypatch.setattr(script, "find_program", lambda name: "/usr/bin/cmake")
    assert script.collect_cmake_version(facts) == "3.25.1"


def test_modes_are_four_digits(tmp_path: Path, names: script.Names) -> None:
    (tmp_path / "x").touch()
    (tmp_path / "x").chmod(stat.S_ISUID | 0o755)
    assert report(tmp_path / "x", names)[str(tmp_path / "x")]["mode"] == "4755"


# --- apt's sources --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            "deb http://a.example/debian bookworm main contrib # all of it",
            ("http://a.example/debian", "bookworm", ["main", "contrib"]),
        ),
        ("  deb [arch=amd64,i386 signed-by=/k.gpg trusted=yes] http://a.example/x / ", ("http://a.example/x", "/", [])),
        ("deb-src http://a.example/debian bookworm main", None),
        ("# deb http://a.example/debian bookworm main", None),
        ("deb", None),
        ("", None),
    ],
)
def test_a_line_of_apts_sources(line: str, expected: tuple[str, str, list[str]] | None) -> None:
    found = script.parse_source_line(line)
    assert [(entry["uri"], entry["suite"], entry["components"]) for entry in found] == ([expected] if expected else [])
    if found and "signed-by" in line:
        assert (found[0]["architectures"], found[0]["signed_by"], found[0]["trusted"]) == (["amd64", "i386"], "/k.gpg", True)


def test_paragraphs_of_apts_sources() -> None:
    content = (
        "# ours\nTypes: deb deb-src\nURIs: http://a.example/debian http://b.example/debian\nSuites: bookworm bookworm-updates\n"
        "Components: main\nSigned-By:\n -----BEGIN PGP PUBLIC KEY BLOCK-----\n .\n abc\n\n"
        "Types: deb\nEnabled: no\nURIs: http://off.example\nSuites: /\n\n"
        "Types: deb-src\nURIs: http://source.example\nSuites: /\n \n"
        "Types: deb\nURIs: http://c.example\nSuites: /\nTrusted: yes\nArchitectures: amd64\n"
    )
    found = script.parse_source_paragraphs(content)
    assert [(entry["uri"], entry["suite"]) for entry in found] == [
        ("http://a.example/debian", "bookworm"),
        ("http://a.example/debian", "bookworm-updates"),
        ("http://b.example/debian", "bookworm"),
        ("http://b.example/debian", "bookworm-updates"),
        ("http://c.example", "/"),
    ]
    assert found[0]["signed_by"] == "-----BEGIN PGP PUBLIC KEY BLOCK-----\n .\n abc"
    assert (found[-1]["trusted"], found[-1]["architectures"]) == (True, ["amd64"])


@given(st.text())
def test_any_text_of_apts_sources_is_read(content: str) -> None:
    script.parse_source_paragraphs(content)
    for line in content.splitlines():
        script.parse_source_line(line)


def test_apts_sources_are_told_with_origins_and_without_passwords(tmp_path: Path) -> None:
    etc, lists = tmp_path / "etc", tmp_path / "lists"
    (etc / "sources.list.d").mkdir(parents=True)
    lists.mkdir()
    (etc / "sources.list").write_text("deb http://a.example/debian bookworm main\ndeb https://u:secret@p.example/ x main\n")
    (etc / "sources.list.d/n.sources").write_text("Types: deb\nURIs: https://n.example/repos/x86_64/\nSuites: /\n")
    (etc / "sources.list.d/ignored.bak").write_text("deb http://c.example/ x main\n")
    (lists / "a.example_debian_dists_bookworm_InRelease").write_text(
        "-----BEGIN PGP SIGNED MESSAGE-----\n\nOrigin: Debian\nLabel: x\n"
    )
    (lists / "n.example_repos_x86%5f64_Release").write_text("Origin: NVIDIA\n")
    found = script.collect_apt_sources(str(etc), str(lists))
    assert [(entry["path"], entry["uri"], entry["origin"]) for entry in found] == [
        (f"{etc}/sources.list", "http://a.example/debian", "Debian"),
        (f"{etc}/sources.list.d/n.sources", "https://n.example/repos/x86_64/", "NVIDIA"),
    ]
    assert Facts.model_validate({"apt_sources": found}).apt_sources[0].origin == "Debian"
    assert script.collect_apt_sources(str(tmp_path / "none"), str(lists)) == []


def test_a_driver_that_hangs_costs_nothing_that_the_disk_says() -> None:
    found = {"module_version": "535.309.01", "on_disk_module_version": "535.309.01"}
    facts: dict[str, Any] = {"errors": {}, "gpus": [{"pci_address": "0000:18:00.0"}]}
    script.merge_nvidia(facts, (True, found, {}), None)
    assert (facts["nvidia"]["module_version"], facts["nvidia"]["smi"]["status"]) == ("535.309.01", "timeout")
    assert set(facts["errors"]) == {"nvidia.smi"}
    facts = {"errors": {}, "gpus": [{"pci_address": "0000:18:00.0"}]}
    smi = {"status": "ok", "output": "", "mismatch": False}
    script.merge_nvidia(facts, (True, found, {}), (True, [smi, "12.2", {"0000:18:00.0": {"uuid": "GPU-aa"}}], {"nvidia.x": "y"}))
    assert (facts["nvidia"]["cuda_version"], facts["gpus"][0]["uuid"], facts["errors"]) == ("12.2", "GPU-aa", {"nvidia.x": "y"})
    facts = {"errors": {}}
    script.merge_nvidia(facts, None, None)
    assert set(facts) == {"errors"} and set(facts["errors"]) == {"nvidia"}


# --- what others do -----------------------------------------------------------------------------------------------------------


def write(path: Path, content: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content, encoding="utf-8")
    return path


def test_preferences_of_the_driver(tmp_path: Path) -> None:
    write(tmp_path / "preferences", "Package: vim\nPin: release n=sid\nPin-Priority: 1\n")
    pinned = write(
        tmp_path / "preferences.d/nvidia", "Package: nvidia-* libcuda1\nPin: version 550*\n\nPackage: cuda-drivers\nPin: x\n"
    )
    write(tmp_path / "preferences.d/x.bak", "Package: nvidia-*\n")
    seen = {"path": str(pinned), "packages": ["nvidia-*", "libcuda1", "cuda-drivers"]}
    assert script.collect_preferences(str(tmp_path), str(tmp_path / "info")) == [seen]
    write(tmp_path / "info/nvidia-smi.list", "/.\n/usr/bin/nvidia-smi\n")
    write(tmp_path / "info/nvidia-driver-pinning-580:all.list", f"/.\n{pinned}\n")
    assert script.collect_preferences(str(tmp_path), str(tmp_path / "info")) == [{**seen, "owner": "nvidia-driver-pinning-580"}]
    assert script.collect_preferences(str(tmp_path / "gone")) == []


@pytest.mark.parametrize(
    ("contents", "expected"),
    [
        ([], None),
        (['APT::Periodic::Update-Package-Lists "1";\n'], None),
        (['APT::Periodic::Unattended-Upgrade "1";\n'], True),
        (['APT::Periodic {\n  Unattended-Upgrade "7";\n};\n'], True),
        (['APT::Periodic::Unattended-Upgrade "1";\n', 'APT::Periodic::Unattended-Upgrade "0";\n'], False),
        (['// APT::Periodic::Unattended-Upgrade "1";\n'], None),
    ],
)
def test_unattended_upgrades(tmp_path: Path, contents: list[str], expected: bool | None) -> None:
    for number, content in enumerate(contents):
        write(tmp_path / f"apt.conf.d/{number}0x", content)
    assert script.collect_unattended_upgrades(str(tmp_path)) is expected


def test_jobs_tell_words_and_no_command(tmp_path: Path) -> None:
    write(
        tmp_path / "etc/crontab",
        "@reboot root /usr/bin/true\n# nvidia-smi -pl 100\n0 4 * * * root /usr/local/sbin/after-reboot\n",
    )
    write(tmp_path / "etc/cron.d/x", "0 3 * * * root TOKEN=secret systemctl restart v100-chat.service; nvidia-smi -r\n")
    write(tmp_path / "var/spool/cron/crontabs/root", "0 5 * * 0 /sbin/shutdown -r now || reboot\n")
    assert script.collect_cron(str(tmp_path)) == [
        {"path": "/etc/cron.d/x", "words": ["nvidia-smi", "v100-chat.service"]},
        {"path": "/var/spool/cron/crontabs/root", "words": ["reboot", "shutdown"]},
    ]


def test_baselines(tmp_path: Path) -> None:
    write(tmp_path / "chat.json", json.dumps({"digest": "d", "tokens_per_second": 12.5, "anonymous_bytes": None}))
    write(tmp_path / "odd.json", json.dumps({"digest": ["d"], "tokens_per_second": True, "anonymous_bytes": "9"}))
    write(tmp_path / "broken.json", "{")
    (tmp_path / "link.json").symlink_to(tmp_path / "chat.json")
    assert script.collect_baselines(str(tmp_path)) == {
        "chat": {"digest": "d", "tokens_per_second": 12.5, "anonymous_bytes": None},
        "odd": {"digest": "['d']", "tokens_per_second": None, "anonymous_bytes": None},
    }


def test_libraries_that_are_gone() -> None:
    content = (
        "7f00-7f10 r-xp 00000000 08:01 11 /usr/lib/x86_64-linux-gnu/libssl.so.3 (deleted)\n"
        "7f10-7f20 r--p 00000000 08:01 11 /usr/lib/x86_64-linux-gnu/libssl.so.3 (deleted)\n"
        "7f20-7f30 r-xp 00000000 08:01 12 /usr/lib/x86_64-linux-gnu/libc.so.6\n"
        "7f30-7f40 rw-s 00000000 00:01 13 /dev/zero (deleted)\n"
    )
    assert script.deleted_libraries(content) == ["/usr/lib/x86_64-linux-gnu/libssl.so.3"]


class _Models(http.server.BaseHTTPRequestHandler):
    """Tells its models to those with the key; what it sends without is the test's choice."""

    def do_GET(self) -> None:
        known = self.path != "/closed" or self.headers.get("Authorization") == "Bearer k1"
        self.send_response(200 if known else 401)
        self.end_headers()
        body = {"/odd": b'{"data": [7, {"id": 3}, {"x": 1}]}', "/broken": b"{"}.get(self.path, b'{"data": [{"id": "chat"}]}')
        self.wfile.write(body if known else b"")

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


def test_identity(tmp_path: Path) -> None:
    server = http.server.HTTPServer(("127.0.0.1", 0), _Models)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    base = f"http://127.0.0.1:{server.server_port}"
    keys = str(tmp_path / "{}.keys")
    write(tmp_path / "chat.keys", "k1\nk2\n")
    try:
        assert script.ask_identity("chat", base + "/open", keys) == {"status": 200, "models": ["chat"]}
        assert script.ask_identity("chat", base + "/closed", keys) == {"status": 401, "status_with_key": 200, "models": ["chat"]}
        assert script.ask_identity("other", base + "/closed", keys) == {"status": 401, "models": []}
        assert script.ask_identity("../chat", base + "/closed", keys) == {"status": 401, "models": []}
        assert script.ask_identity("chat", base + "/odd", keys) == {"status": 200, "models": ["3"]}
        assert script.ask_identity("chat", base + "/broken", keys) == {"status": 200, "models": []}
    finally:
        server.shutdown()
        server.server_close()
    assert script.ask_identity("chat", "http://127.0.0.1:1/v1/models", keys) == {"status": None, "models": []}
    assert script.ask_identity("chat", "http://models.example:80/v1/models", keys) == {"status": None, "models": []}
