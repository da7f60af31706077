"""The script that installs engines of one's own: archives, checks, and what is kept."""

from __future__ import annotations

import hashlib
import importlib.util
import io
import json
import os
import stat
import sys
import tarfile
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "roles/external_engine/files/install_release.py"
SERVER = "#!/bin/sh\nexec sleep 1\n"
#: Name -> kind and content or target.
Members = dict[str, tuple[str, str]]


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("install_release", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


script = _load()


def tar(path: Path, members: Members, mode: str = "w:gz") -> Path:
    kinds = {
        "file": tarfile.REGTYPE,
        "link": tarfile.SYMTYPE,
        "hard": tarfile.LNKTYPE,
        "fifo": tarfile.FIFOTYPE,
        "dev": tarfile.CHRTYPE,
    }
    with tarfile.open(path, mode) as archive:  # type: ignore[call-overload]  # the mode is not a literal here
        for name, (kind, content) in members.items():
            member = tarfile.TarInfo(name)
            member.type, member.mode = kinds[kind], 0o4755 if content.startswith("#!") else 0o640
            if kind == "file":
                member.size = len(content.encode())
                archive.addfile(member, io.BytesIO(content.encode()))
            else:
                member.linkname = content
                archive.addfile(member)
    return path


def zipped(path: Path, members: Members) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, (kind, content) in members.items():
            info = zipfile.ZipInfo(name)
            info.external_attr = (stat.S_IFLNK | 0o777 if kind == "link" else 0) << 16
            archive.writestr(info, content)
    return path


def spec_of(source: Path, **changes: Any) -> dict[str, Any]:
    return {
        "schema": "v100ctl/external/1",
        "engine": "external",
        "name": "mine",
        "build_id": "mine-000000000001",
        "kind": "archive",
        "file_name": "server",
        "strip_components": 0,
        "sha256": hashlib.sha256(source.read_bytes()).hexdigest(),
        "size_bytes": None,
        "source": {"kind": "host", "path": str(source)},
        "licence": "",
        "programs": ["bin/server"],
        "paths": [],
        "check": [],
        "check_environment": {},
        **changes,
    }


def install(source: Path, folder: Path, **changes: Any) -> Path:
    """Installs into ``folder`` and returns the release."""
    spec = spec_of(source, **changes)
    release = folder / spec["build_id"]
    script.install(spec, source, release)
    assert script.release_problem(release, spec["build_id"]) is None
    return release


@pytest.fixture
def engines(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path / "engines"
    folder.mkdir()
    # An engine's check runs as the account that owns nothing, which cannot look into pytest's own folders: that of all runs, that
    # of this run, and within it those of parallel processes.
    base = tmp_path_factory.getbasetemp()
    for parent in (tmp_path, base, *list(base.parents)[: 2 if base.name.startswith("popen-") else 1]):
        parent.chmod(0o755)
    return folder


WHOLE: Members = {
    "./bin/server": ("file", SERVER),
    "lib/libx.so.1.2": ("file", "library"),
    "lib/libx.so.1": ("link", "libx.so.1.2"),
    "lib/libx.so": ("link", "libx.so.1"),
    "lib64": ("link", "lib"),
    "copy": ("hard", "lib/libx.so.1.2"),
    "bin/again": ("link", "../lib64/libx.so"),
}


@pytest.mark.parametrize("mode", ["w:gz", "w:xz", "w:bz2", "w:"])
def test_links_become_further_names_of_their_files(tmp_path: Path, engines: Path, mode: str) -> None:
    release = install(tar(tmp_path / "e.tar", WHOLE, mode), engines)
    document = json.loads((release / "release.json").read_text())
    assert sorted(document["files"]) == [
        *("bin/again", "bin/server", "copy"),
        *(f"{folder}/{name}" for folder in ("lib", "lib64") for name in ("libx.so", "libx.so.1", "libx.so.1.2")),
    ]
    assert (release / "lib64/libx.so").read_text() == "library"
    assert not [path for path in release.rglob("*") if path.is_symlink()]
    assert (release / "copy").stat().st_nlink == 8
    # Neither setuid nor hidden from the account that serves.
    assert [stat.S_IMODE((release / name).stat().st_mode) for name in ("bin/server", "copy", ".")] == [0o755, 0o644, 0o755]


def test_leading_folders_are_left_out(tmp_path: Path, engines: Path) -> None:
    members = {f"engine-1.0/{name.removeprefix('./')}": value for name, value in WHOLE.items() if value[0] != "hard"}
    members["engine-1.0/copy"] = ("hard", "engine-1.0/lib/libx.so.1.2")
    release = install(tar(tmp_path / "e.tar", members), engines, strip_components=1)
    assert (release / "bin/again").read_text() == "library"
    with pytest.raises(script.InstallError) as caught:
        install(tar(tmp_path / "e.tar", members), engines, build_id="mine-2")
    assert caught.value.hint == "it is `engine-1.0/bin/server`: `strip_components` 1 higher, or that path"
    assert [path.name for path in engines.iterdir()] == ["mine-000000000001"]


def test_a_zip_has_lost_modes(tmp_path: Path, engines: Path) -> None:
    release = install(
        zipped(tmp_path / "e.zip", {"bin/": ("file", ""), "bin/server": ("file", SERVER), "a": ("link", "bin/server")}), engines
    )
    assert os.access(release / "bin/server", os.X_OK)
    assert (release / "a").read_text() == SERVER


def test_a_single_program_keeps_its_name(tmp_path: Path, engines: Path) -> None:
    source = tmp_path / "whatever"
    source.write_text(SERVER)
    release = install(source, engines, kind="file")
    assert [str(path.relative_to(release)) for path in sorted(release.rglob("*"))] == ["bin", "bin/server", "release.json"]


REFUSED: list[tuple[Members, str]] = [
    ({"../x": ("file", "x")}, "unsafe path '../x'"),
    ({"/etc/x": ("file", "x")}, "unsafe path '/etc/x'"),
    ({"a/../../x": ("file", "x")}, "unsafe path"),
    ({"a\nb": ("file", "x")}, "unsafe path"),
    ({"x": ("link", "/etc/passwd")}, "a link out of its folder: `x` -> `/etc/passwd`"),
    ({"a/x": ("link", "../../x")}, "a link out of its folder"),
    ({"x": ("hard", "../x")}, "unsafe path '../x'"),
    ({"x": ("link", "y")}, "a link to something that it lacks: `x` -> `y`"),
    ({"x": ("link", "y"), "y": ("link", "x")}, "a link to itself"),
    ({"d": ("link", "e"), "e/f": ("link", "../d/f"), "e/g": ("file", "")}, "a link to itself"),
    ({"a/b": ("file", "x"), "a/c": ("link", "../a")}, "a link to a folder with links to folders"),
    ({"x": ("fifo", "")}, "neither a file, a folder nor a link"),
    ({"x": ("dev", "")}, "neither a file, a folder nor a link"),
    ({"a": ("file", "x"), "a/b": ("file", "x")}, "both as a file and as a folder"),
    ({"release.json": ("file", "{}")}, "a `release.json` at its top"),
    ({}, "nothing is left"),
]


@pytest.mark.parametrize(("members", "says"), REFUSED, ids=[f"{number}-{says}" for number, (_, says) in enumerate(REFUSED)])
def test_an_archive_that_is_not_safe_leaves_nothing(tmp_path: Path, engines: Path, members: Members, says: str) -> None:
    source = tar(tmp_path / "e.tar", {"bin/server": ("file", SERVER), **members} if members else {})
    with pytest.raises(script.InstallError) as caught:
        install(source, engines)
    assert says in caught.value.message
    assert list(engines.iterdir()) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["e.tar", "engines"]


def test_many_files_are_refused(tmp_path: Path, engines: Path) -> None:
    with pytest.raises(script.InstallError, match="more than 5000"):
        install(tar(tmp_path / "e.tar", {f"f{number}": ("file", "") for number in range(5001)}, "w:"), engines)
    assert list(engines.iterdir()) == []


@pytest.mark.parametrize(
    ("content", "changes", "says"),
    [
        (b"no archive", {}, "it is no archive"),
        (b"no program", {"kind": "file"}, "neither a Linux program nor a script"),
        (b"\x7fELF\x02\x01" + b"\0" * 12 + b"\x08\x00", {"kind": "file"}, "made for another machine"),
        (SERVER.encode(), {"kind": "file", "sha256": "00" * 32}, "instead of 0000"),
        (SERVER.encode(), {"kind": "file", "paths": ["lib"]}, "`{release}/lib` is in the engine's command line"),
        (SERVER.encode(), {"kind": "file", "check": ["/bin/false"]}, "`/bin/false` ended with status 1"),
        (SERVER.encode(), {"kind": "file", "check": ["{release}/nothing"]}, "does not start on this host: No such file"),
        (
            SERVER.encode(),
            {
                "kind": "file",
                "check": ["/bin/sh", "-c", "echo error while loading shared libraries: libq.so.1: cannot open; exit 1"],
            },
            "lacks the library libq.so.1",
        ),
        (
            SERVER.encode(),
            {"kind": "file", "check": ["/bin/sh", "-c", "kill -ILL $$"]},
            "instructions that this host's processor lacks",
        ),
    ],
)
def test_what_cannot_serve_is_refused_and_nothing_is_left(
    tmp_path: Path, engines: Path, content: bytes, changes: dict[str, Any], says: str
) -> None:
    source = tmp_path / "source"
    source.write_bytes(content)
    with pytest.raises(script.InstallError) as caught:
        install(source, engines, **changes)
    assert says in caught.value.message
    assert list(engines.iterdir()) == []


def test_an_archive_that_is_cut_off_leaves_nothing(tmp_path: Path, engines: Path) -> None:
    source = tar(tmp_path / "e.tar", {"bin/server": ("file", SERVER), "x": ("file", os.urandom(20000).hex())})
    source.write_bytes(source.read_bytes()[:9000])
    with pytest.raises(script.InstallError, match="not a whole archive"):
        install(source, engines)
    assert list(engines.iterdir()) == []


def test_one_that_does_not_fit_is_refused(tmp_path: Path, engines: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from collections import namedtuple

    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(script.shutil, "disk_usage", lambda _: usage(1, 1, 1024**2))
    source = tar(tmp_path / "e.tar", WHOLE)
    with pytest.raises(script.InstallError, match=r"has 1 MiB free"):
        install(source, engines)
    assert list(engines.iterdir()) == []


def test_the_check_runs_with_its_own_environment_alone(tmp_path: Path, engines: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_PRELOAD", "")
    source = tmp_path / "source"
    source.write_text('#!/bin/sh\n[ "$1" = "$OWN/bin/server" ] && [ "$(env | grep -c LD_PRELOAD)" = 0 ] && [ "$(id -u)" != 0 ]\n')
    check = ["{release}/bin/server", "{release}/bin/server"]
    install(source, engines, kind="file", check=check, check_environment={"OWN": "{release}"})


def test_a_sound_release_is_left_alone_and_a_broken_one_replaced(tmp_path: Path, engines: Path) -> None:
    source = tar(tmp_path / "e.tar", WHOLE)
    release = install(source, engines)
    spec = spec_of(source)
    # Not even the source is needed.
    assert script.install(spec, tmp_path / "gone", release) == {"changed": False, "path": str(release)}
    with (release / "lib/libx.so").open("a") as stream:
        stream.write("!")
    (engines / ".incoming-mine-000000000001").mkdir()
    assert "has 8 bytes instead of 7" in script.release_problem(release, spec["build_id"], hashes=False)
    with pytest.raises(script.InstallError, match="does not exist on this host"):
        script.install(spec, tmp_path / "gone", release)
    answer = script.install(spec, source, release)
    assert answer["changed"]
    assert "bytes instead of 7" in answer["replaced"]
    assert [path.name for path in engines.iterdir()] == [release.name]


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda release: (release / "copy").unlink(), "`copy` is missing"),
        (lambda release: (release / "bin/server").chmod(0o644), "`bin/server` has mode 0644 instead of 0755"),
        (lambda release: (release / "bin/server").write_text(SERVER.replace("1", "2")), "another sha256"),
        (lambda release: (release / "release.json").write_text("{"), "release.json is missing, damaged"),
        (lambda release: release.rename(release.with_name("x")), "does not exist"),
    ],
)
def test_damage_is_named(tmp_path: Path, engines: Path, damage: Any, says: str) -> None:
    release = install(tar(tmp_path / "e.tar", WHOLE), engines)
    damage(release)
    assert says in script.release_problem(release, release.name)


def make_release(engines: Path, build_id: str, age_s: int) -> None:
    (engines / build_id).mkdir()
    os.utime(engines / build_id, (1_000_000 - age_s, 1_000_000 - age_s))


def names(engines: Path) -> list[str]:
    return sorted(path.name for path in engines.iterdir())


@pytest.fixture
def nobody_uses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No process, unit or plan names a release; what is returned is the applied plan's path."""
    monkeypatch.setattr(script, "UNITS", tmp_path / "units")
    monkeypatch.setattr(script, "HOST_JSON", tmp_path / "host.json")
    monkeypatch.setattr(script, "HISTORY", tmp_path / "history")
    return tmp_path / "host.json"


@pytest.mark.usefixtures("nobody_uses")
def test_the_one_before_is_kept_and_older_ones_go(engines: Path) -> None:
    for age, build_id in enumerate(["mine-c", "mine-b", "mine-a", "other-b", "other-a"]):
        make_release(engines, build_id, age)
    for name in (".incoming-mine-a", ".broken-old-x", ".incoming-mine-c.source"):
        (engines / name).mkdir()
    assert script.prune(engines, ["mine-c"], dry_run=True) == {"changed": True, "removed": ["mine-a", "other-a"]}
    assert len(names(engines)) == 8
    assert script.prune(engines, ["mine-c"], dry_run=False)["removed"] == ["mine-a", "other-a"]
    # What a run that goes on now may be making stays.
    assert names(engines) == [".incoming-mine-c.source", "mine-b", "mine-c", "other-b"]
    assert script.prune(engines, ["mine-c"], dry_run=False) == {"changed": False, "removed": []}
    assert script.prune(engines / "nothing", [], dry_run=False) == {"changed": False, "removed": []}


def test_what_was_applied_is_the_one_before(engines: Path, nobody_uses: Path) -> None:
    for age, build_id in enumerate(["mine-c", "mine-b", "mine-a"]):
        make_release(engines, build_id, age)
    nobody_uses.write_text(json.dumps({"releases": [{"path": f"{engines}/mine-a"}]}))
    assert script.prune(engines, ["mine-c"], dry_run=False)["removed"] == ["mine-b"]


def test_the_last_two_good_states_can_be_gone_back_to(engines: Path, nobody_uses: Path) -> None:
    history = nobody_uses.parent / "history"
    history.mkdir()
    for age, build_id in enumerate(["mine-e", "mine-d", "mine-c", "mine-b", "mine-a"]):
        make_release(engines, build_id, age)
    # The last one was gone back to: it is the same state as an earlier one.
    for number, build_id in enumerate(["mine-a", "mine-b", "mine-c", "mine-b"]):
        document = {"state": build_id, "releases": [{"path": f"{engines}/{build_id}"}]}
        (history / f"20261130T00000{number}Z.json").write_text(json.dumps(document))
    (history / "20261130T000009Z.json").write_text("{")
    assert script.prune(engines, ["mine-e"], dry_run=False)["removed"] == ["mine-a", "mine-d"]


@pytest.mark.usefixtures("nobody_uses")
def test_what_a_process_runs_is_kept(engines: Path) -> None:
    import subprocess

    for age, build_id in enumerate(["mine-c", "mine-b", "mine-a"]):
        make_release(engines, build_id, age)
    process = subprocess.Popen([sys.executable, "-c", "input()", f"{engines}/mine-a/serve.py"], stdin=subprocess.PIPE)
    try:
        assert script.prune(engines, ["mine-c"], dry_run=True)["removed"] == ["mine-b"]
    finally:
        process.kill()
        process.wait()


def test_the_command_line_answers_in_json(tmp_path: Path, engines: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tar(tmp_path / "e.tar", WHOLE)
    spec = spec_of(source)
    release = engines / spec["build_id"]
    options = ["--spec", json.dumps(spec), "--release", str(release)]
    assert script.main(["verify", *options]) == 1
    assert json.loads(capsys.readouterr().out) == {"sound": False, "problem": "it does not exist"}
    assert script.main(["install", *options, "--source", str(source)]) == 0
    assert json.loads(capsys.readouterr().out)["changed"]
    assert script.main(["verify", *options, "--hashes"]) == 0
    # Another command line that names what the release lacks.
    options[1] = json.dumps({**spec, "paths": ["share"]})
    capsys.readouterr()
    assert script.main(["verify", *options]) == 1
    assert "`{release}/share` is in the engine's command line" in json.loads(capsys.readouterr().out)["problem"]
    assert script.main(["install", *options, "--source", str(source)]) == 1
    assert "hint: the top of it holds bin, copy, lib" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        script.main(["verify", "--spec", "{}", "--release", "/x"])
