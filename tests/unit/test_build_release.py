"""The build script's pure parts: source trees, options, releases as archives. What needs a compiler is an integration test."""

from __future__ import annotations

import fcntl
import io
import json
import os
import subprocess
import tarfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.toy_engine import SCRIPT, load_script, run_script, source_files, tree_sha256, write_archive

script = load_script()

CMAKE_WARNING = """-- Generating done
CMake Warning:
  Manually-specified variables were not used by the project:

    LLAMA_CUDA_FORCE_MMQ
    NO_SUCH


-- Build files have been written to: /b
"""


def _tar(path: Path, *members: tuple[str, str, str]) -> Path:
    """A .tar.gz of ``(name, kind, content or link target)``."""
    kinds = {
        "file": tarfile.REGTYPE,
        "link": tarfile.SYMTYPE,
        "hard": tarfile.LNKTYPE,
        "dir": tarfile.DIRTYPE,
        "fifo": tarfile.FIFOTYPE,
    }
    with tarfile.open(path, "w:gz") as archive:
        for name, kind, content in members:
            member = tarfile.TarInfo(name)
            member.type = kinds[kind]
            if kind == "file":
                member.size = len(content.encode())
                archive.addfile(member, io.BytesIO(content.encode()))
            else:
                member.linkname = content
                archive.addfile(member)
    return path


class TestSourceTree:
    def test_digest_is_what_it_is_defined_as(self, tmp_path: Path) -> None:
        files = source_files()
        assert script.archive_tree_sha256(write_archive(tmp_path / "a.tar.gz", files), ["toy-1"]) == tree_sha256(files)

    def test_digest_does_not_depend_on_the_packing(self, tmp_path: Path) -> None:
        files = source_files()
        first = write_archive(tmp_path / "a.tar.gz", files)
        second = write_archive(tmp_path / "b.tar.gz", dict(reversed(files.items())), top="other/deep")
        assert script.archive_tree_sha256(first, ["toy-1"]) == script.archive_tree_sha256(second, ["absent", "other/deep"])

    @pytest.mark.parametrize(
        ("name", "counts"),
        [
            ("CMakeLists.txt", True),
            ("src/a.c", True),
            ("vendor/x/y.h", True),
            ("scripts/ui-assets.cmake", True),
            ("tools/ui/CMakeLists.txt", True),
            ("tools/server/a.cpp", True),
            ("README.md", False),
            ("tests/CMakeLists.txt", False),
            ("scripts/build.sh", False),
            ("scripts/deep/x.cmake", False),
            ("tools/ui/dist/index.html", False),
            ("sources/a.c", False),
        ],
    )
    def test_what_the_compile_reads(self, name: str, counts: bool) -> None:
        assert script.is_build_input(name) is counts

    def test_unpacks_only_build_inputs(self, tmp_path: Path) -> None:
        files = source_files() | {"tests/CMakeLists.txt": "", "tools/ui/dist/page.html": ""}
        archive = write_archive(tmp_path / "a.tar.gz", files)
        seen: list[tuple[int, int]] = []
        digest = script.unpack_source(archive, ["toy-1"], tmp_path / "src", lambda done, total: seen.append((done, total)))
        assert digest == script.archive_tree_sha256(archive, ["toy-1"])
        found = {str(path.relative_to(tmp_path / "src")) for path in (tmp_path / "src").rglob("*") if path.is_file()}
        assert found == {name for name in files if script.is_build_input(name)}
        assert seen[-1] == (len(found), len(found))
        assert {path.stat().st_mtime for path in (tmp_path / "src").rglob("*") if path.is_file()} == {script.SOURCE_MTIME_S}

    def test_link_inside_the_tree_counts_as_what_it_points_at(self, tmp_path: Path) -> None:
        top = ("t/CMakeLists.txt", "file", "x")
        linked = _tar(tmp_path / "a.tar.gz", top, ("t/src/a.c", "link", "../include/a.c"), ("t/include/a.c", "file", "a"))
        copied = _tar(tmp_path / "b.tar.gz", top, ("t/src/a.c", "file", "a"), ("t/include/a.c", "file", "a"))
        hard = _tar(tmp_path / "c.tar.gz", top, ("t/include/a.c", "file", "a"), ("t/src/a.c", "hard", "t/include/a.c"))
        assert len({script.archive_tree_sha256(path, ["t"]) for path in (linked, copied, hard)}) == 1
        script.unpack_source(linked, ["t"], tmp_path / "src", lambda done, total: None)
        assert not (tmp_path / "src/src/a.c").is_symlink()

    @pytest.mark.parametrize(
        "member",
        [
            ("/etc/evil", "file", "x"),
            ("t/../../evil", "file", "x"),
            ("t/src/evil", "link", "/etc/passwd"),
            ("t/src/evil", "link", "../../evil"),
            ("t/src/evil", "link", "evil"),
            ("t/src/evil", "link", "absent"),
            ("t/src/evil", "hard", "/etc/passwd"),
            ("t/src/evil", "hard", "elsewhere/file"),
            ("t/src/evil", "fifo", ""),
        ],
    )
    def test_unsafe_archive_is_refused_before_anything_is_written(self, tmp_path: Path, member: tuple[str, str, str]) -> None:
        archive = _tar(tmp_path / "a.tar.gz", ("t/CMakeLists.txt", "file", "x"), member)
        with pytest.raises(script.BuildError):
            script.unpack_source(archive, ["t"], tmp_path / "src", lambda done, total: None)
        assert list((tmp_path / "src").iterdir()) == []

    def test_unsafe_members_outside_the_inputs_are_refused_or_left_out(self, tmp_path: Path) -> None:
        archive = _tar(tmp_path / "a.tar.gz", ("t/CMakeLists.txt", "file", "x"), ("t/docs/link", "link", "/etc/passwd"))
        script.unpack_source(archive, ["t"], tmp_path / "src", lambda done, total: None)
        assert [path.name for path in (tmp_path / "src").iterdir()] == ["CMakeLists.txt"]

    @pytest.mark.parametrize("damage", [lambda data: data[: len(data) // 2], lambda data: b"no archive", lambda data: data[:-4]])
    def test_damaged_archive_is_an_error(self, tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
        archive = write_archive(tmp_path / "a.tar.gz", source_files(src__toy_c=os.urandom(5000).hex()))
        archive.write_bytes(damage(archive.read_bytes()))
        with pytest.raises(script.BuildError):
            script.archive_tree_sha256(archive, ["toy-1"])

    def test_other_top_folder_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(script.BuildError, match="toy-2/"):
            script.archive_tree_sha256(write_archive(tmp_path / "a.tar.gz", source_files()), ["toy-2"])


class TestOptions:
    def test_unused_options_are_found(self) -> None:
        assert script.unused_options(CMAKE_WARNING) == ["LLAMA_CUDA_FORCE_MMQ", "NO_SUCH"]
        assert script.unused_options("-- Generating done\n-- Build files have been written to: /b\n") == []

    @given(
        st.dictionaries(
            st.from_regex(r"[A-Z][A-Z0-9_]{0,12}", fullmatch=True),
            st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Zl", "Zp"])),
        )
    )
    def test_cache_is_read_as_cmake_writes_it(self, options: dict[str, str]) -> None:
        def quoted(value: str) -> str:
            return f"'{value}'" if value[:1] == " " or value[-1:] == " " else value

        text = "# comment\n//help\n" + "".join(f"{name}:STRING={quoted(value)}\n//help\n" for name, value in options.items())
        wanted = {name: value for name, value in options.items() if not (value[:1] == "'" == value[-1:])}
        assert {name: value for name, value in script.read_cmake_cache(text).items() if name in wanted} == wanted

    def test_all_stand(self) -> None:
        assert script.option_problems({"A": "ON"}, [], {"A": "ON", "B": "OFF"}) == []

    @pytest.mark.parametrize(
        ("asked", "unused", "cache", "problem"),
        [
            ({"A": "ON"}, [], {"A": "OFF"}, "the option `A` was asked as `ON` and stands as `OFF`"),
            ({"A": "ON"}, [], {}, "the option `A` was asked as `ON` and is not in CMakeCache.txt"),
            ({"A": "ON"}, ["A"], {"A": "ON"}, "the project does not use the option `A`"),
            (
                {"LLAMA_CUDA_FORCE_MMQ": "ON"},
                ["LLAMA_CUDA_FORCE_MMQ"],
                {"LLAMA_CUDA_FORCE_MMQ": "ON", "GGML_CUDA_FORCE_MMQ": "OFF"},
                "the project does not use the option `LLAMA_CUDA_FORCE_MMQ` (it knows `GGML_CUDA_FORCE_MMQ`)",
            ),
        ],
    )
    def test_one_does_not(self, asked: dict[str, str], unused: list[str], cache: dict[str, str], problem: str) -> None:
        assert script.option_problems(asked, unused, cache) == [problem]


@pytest.mark.parametrize(("cpus", "memory_gib", "jobs"), [(8, 64, 8), (8, 7, 3), (8, 2, 1), (8, 1, 1), (1, 64, 1), (8, -1, 1)])
def test_jobs_are_bound_by_processors_and_memory(cpus: int, memory_gib: int, jobs: int) -> None:
    assert script.job_count(cpus, memory_gib * 1024**3) == jobs


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the levels are those of x86-64")
@pytest.mark.parametrize(
    ("flags", "level"),
    [
        (["-msse4.2", "-mf16c", "-mfma", "-mbmi2", "-mavx", "-mavx2"], "x86-64-v3"),
        (["-msse4.2"], "x86-64-v2"),
        ([], "x86-64-v1"),
        (["-mavx2", "-mavx512f", "-mavx512bw"], "x86-64-v4"),
    ],
)
def test_cpu_level(flags: list[str], level: str) -> None:
    assert script.cpu_level(flags) == level


@pytest.mark.parametrize(
    ("log", "message"),
    [
        ("fatal error: error writing to x.o: No space left on device\n", "the disk became full"),
        ("c++: fatal error: Killed signal terminated program cc1plus\n", "for lack of memory"),
        ("error: expected ';'\n", ""),
    ],
)
def test_known_failures_are_explained(tmp_path: Path, log: str, message: str) -> None:
    why, hint = script.explain(log, tmp_path, 2)
    assert message in why
    assert bool(hint) is bool(message)


class TestReleaseArchive:
    @pytest.fixture
    def stage(self, tmp_path: Path) -> Path:
        stage = tmp_path / "stage"
        (stage / "bin").mkdir(parents=True)
        (stage / "bin/server").write_text("#!/bin/sh\necho version 42\n")
        (stage / "bin/server").chmod(0o755)
        self.describe(stage)
        return stage

    @staticmethod
    def describe(stage: Path, **changed: Any) -> None:
        document = {
            "schema": "v100ctl/release/1",
            "build_id": "b42",
            "build_number": 42,
            "targets": ["server"],
            "files": {
                "bin/server": {
                    "mode": "0755",
                    "sha256": script.sha256_file(stage / "bin/server"),
                    "size_bytes": (stage / "bin/server").stat().st_size,
                }
            },
        }
        (stage / "release.json").write_text(json.dumps(document | changed))

    def test_packing_twice_gives_the_same_bytes(self, stage: Path, tmp_path: Path) -> None:
        script.pack_release(stage, tmp_path / "a.tar.gz")
        os.utime(stage / "bin/server", (1, 1))
        script.pack_release(stage, tmp_path / "b.tar.gz")
        assert (tmp_path / "a.tar.gz").read_bytes() == (tmp_path / "b.tar.gz").read_bytes()
        assert script.archive_release(tmp_path / "a.tar.gz")["build_id"] == "b42"

    @pytest.mark.parametrize(
        ("changed", "message"),
        [
            ({"schema": "other/1"}, "of another kind"),
            ({"files": {}}, "disagree on `bin/server`"),
            ({"files": {"../x": {}}}, "unsafe path"),
        ],
    )
    def test_another_description_is_refused(self, stage: Path, tmp_path: Path, changed: dict[str, Any], message: str) -> None:
        self.describe(stage, **changed)
        script.pack_release(stage, tmp_path / "a.tar.gz")
        with pytest.raises(script.BuildError, match=message):
            script.archive_release(tmp_path / "a.tar.gz")

    def test_another_content_is_refused(self, stage: Path, tmp_path: Path) -> None:
        (stage / "bin/server").write_text("#!/bin/sh\necho version 43\n")
        script.pack_release(stage, tmp_path / "a.tar.gz")
        with pytest.raises(script.BuildError, match="another sha256"):
            script.archive_release(tmp_path / "a.tar.gz")

    def test_links_are_refused(self, tmp_path: Path) -> None:
        with pytest.raises(script.BuildError, match="not a regular file"):
            script.archive_release(_tar(tmp_path / "a.tar.gz", ("bin", "link", "/bin")))

    @pytest.mark.parametrize(
        ("program", "message"),
        [
            ("#!/bin/sh\necho version 421\n", "does not name build 42"),
            ("#!/bin/sh\necho version 42; exit 3\n", "ended with status 3"),
            (
                "#!/bin/sh\necho 'error while loading shared libraries: libgomp.so.1: cannot open' >&2; exit 127\n",
                "libgomp.so.1",
            ),
            ("#!/bin/sh\nkill -ILL $$\n", "lacks some of its instructions"),
            ("#!/nonexistent\n", "does not start on this host"),
        ],
    )
    def test_program_that_does_not_run_here_is_not_installed(
        self, stage: Path, tmp_path: Path, program: str, message: str
    ) -> None:
        (stage / "bin/server").write_text(program)
        self.describe(stage)
        script.pack_release(stage, tmp_path / "a.tar.gz")
        with pytest.raises(script.BuildError) as caught:
            script.install(tmp_path / "a.tar.gz", script.sha256_file(tmp_path / "a.tar.gz"), tmp_path / "engines/b42")
        assert message in caught.value.message
        assert list((tmp_path / "engines").iterdir()) == []


@pytest.mark.parametrize("arguments", [[], ["nothing"], ["verify"], ["start", "--work", "x"], ["run", "--lock", "x"]])
def test_wrong_usage(arguments: list[str]) -> None:
    done = run_script(*arguments)
    assert (done.returncode, done.stdout) == (64, "")
    assert "error: " in done.stderr


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"schema": "v100ctl/build/2"}, "not a build specification"),
        ({"schema": "v100ctl/build/1"}, "lacks `engine`"),
        (None, "not a build specification"),
    ],
)
def test_wrong_spec(tmp_path: Path, spec: Any, message: str) -> None:
    (tmp_path / "spec.json").write_text(json.dumps(spec))
    done = run_script("start", "--spec", tmp_path / "spec.json", "--archive", tmp_path / "a", "--work", tmp_path / "work")
    assert done.returncode == 1
    assert message in done.stderr
    assert not (tmp_path / "work").exists()


def test_needs_nothing_but_the_standard_library(tmp_path: Path) -> None:
    argv = ["python3", "-I", "-S", "-B", SCRIPT, "verify", "--release", tmp_path / "none"]
    done = subprocess.run(argv, capture_output=True, check=False)
    assert json.loads(done.stdout) == {"sound": False, "problem": "it does not exist"}


# --- who builds -----------------------------------------------------------------------------------------------------------


def test_a_builder_that_builds_is_attached_to_and_one_that_has_ended_is_waited_for(tmp_path: Path) -> None:
    work = script.Work(tmp_path)
    held = os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(held, fcntl.LOCK_EX)
    work.note_builder(os.getpid())
    work.write_status("running", phase="compile")
    assert work.try_lock() is None
    # Its last word is written before it ends; whoever starts anew in between must not take that word for the new build's.
    work.write_status("failed", phase="compile")
    ending = threading.Timer(0.2, os.close, (held,))
    ending.start()
    taken = work.try_lock()
    ending.join()
    assert taken is not None
    os.close(taken)
