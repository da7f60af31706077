"""The build script with a real toolchain: a small project is configured, compiled, killed, taken up again and installed."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.toy_engine import BUILD_ID, BUILD_NUMBER, SCRIPT, SLOW_FILES, ToyBuild, run_script, source_files


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> ToyBuild:
    """A finished build, for looking only."""
    build = ToyBuild(tmp_path_factory.mktemp("built"))
    build.start()
    status = build.await_end()
    assert status["state"] == "done", status
    return build


@pytest.fixture
def build(tmp_path: Path) -> Iterator[ToyBuild]:
    """A build that was not started, and does not outlive its test."""
    build = ToyBuild(tmp_path)
    yield build
    _kill_session(build)


@pytest.fixture
def slow_build(tmp_path: Path) -> Iterator[ToyBuild]:
    """The same with more to compile, so that something can happen in the middle."""
    build = ToyBuild(tmp_path, files=source_files(slow=True))
    yield build
    _kill_session(build)


def _kill_session(build: ToyBuild) -> None:
    with contextlib.suppress(ProcessLookupError, FileNotFoundError):
        os.killpg(build.builder_pid(), signal.SIGKILL)


def _kill_builder(build: ToyBuild) -> None:
    """``kill -9`` of the builder alone: what it started lives on, as after a real one."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(build.builder_pid(), signal.SIGKILL)


def _command_in_session(session: int, name: str) -> bool:
    """Whether a living process of that name belongs to the session."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            command, _, rest = path.read_text().partition("(")[2].rpartition(")")
            state, _, _, found = rest.split()[:4]
            if (command, int(found)) == (name, session) and state != "Z":
                return True
    return False


def _install(build: ToyBuild, release: Path, sha256: str = "") -> subprocess.CompletedProcess[str]:
    archive = build.work / "release.tar.gz"
    return run_script("install", "--archive", archive, "--sha256", sha256 or build.status()["sha256"], "--release", release)


class TestBuild:
    def test_says_what_it_made(self, built: ToyBuild) -> None:
        status = built.status()
        assert (status["build_id"], status["archive"]) == (BUILD_ID, str(built.work / "release.tar.gz"))
        with tarfile.open(built.work / "release.tar.gz") as archive:
            names = archive.getnames()
            assert {(member.mtime, member.uid, member.uname) for member in archive} == {(0, 0, "")}
            document = json.load(archive.extractfile("release.json"))  # type: ignore[arg-type]
        assert sorted(set(names) - {"release.json"}) == sorted(document["files"])
        assert names == ["LICENSE", "bin/toy-server", "lib/libtoy.so.0", "licenses/LICENSE-part", "release.json"]
        assert document["compiler"].startswith("GNU ")
        assert document["needs"] and all(
            name.startswith(("libc.", "libstdc++.", "libgcc_s.", "libm.")) for name in document["needs"]
        )
        assert document["source"]["tree_sha256"] == built.spec["source"]["tree_sha256"]
        assert document["cmake_options"] == built.spec["cmake_options"]

    def test_same_input_gives_same_bytes(self, built: ToyBuild) -> None:
        before = built.status()["sha256"]
        for name in ("status.json", "release.tar.gz"):
            (built.work / name).unlink()
        shutil.rmtree(built.work / "build")
        assert built.start()["started"]
        assert built.await_end()["sha256"] == before

    def test_finished_build_is_not_built_again(self, built: ToyBuild) -> None:
        log = (built.work / "build.log").read_text()
        answer = built.start()
        assert (answer["state"], answer["started"]) == ("done", False)
        assert (built.work / "build.log").read_text() == log

    def test_damaged_result_is_made_again(self, built: ToyBuild) -> None:
        archive = built.work / "release.tar.gz"
        content = archive.read_bytes()
        archive.write_bytes(content[:-10])
        assert built.start()["started"]
        assert built.await_end()["state"] == "done"
        assert archive.read_bytes() == content

    def test_another_spec_starts_anew(self, build: ToyBuild) -> None:
        build.start()
        assert build.await_end()["state"] == "done"
        build.spec["cmake_options"]["TOY_LOUD"] = "OFF"
        assert build.start()["started"]
        assert build.await_end()["state"] == "done"
        assert "TOY_LOUD:BOOL=OFF" in (build.work / "build/CMakeCache.txt").read_text()

    def test_surroundings_do_not_leak_in(self, build: ToyBuild, monkeypatch: pytest.MonkeyPatch) -> None:
        fake = build.folder / "bin"
        fake.mkdir()
        for name in ("cmake", "ninja", "c++", "cc"):
            (fake / name).write_text("#!/bin/sh\nexit 77\n")
            (fake / name).chmod(0o755)
        monkeypatch.setenv("PATH", f"{fake}:{os.environ['PATH']}")
        monkeypatch.setenv("CXXFLAGS", "-no-such-flag")
        monkeypatch.setenv("CXX", "/nonexistent/c++")
        build.start()
        assert build.await_end()["state"] == "done"

    def test_progress_is_ninjas_own_count(self, slow_build: ToyBuild) -> None:
        slow_build.start()
        status = slow_build.await_that(lambda status: status["phase"] == "compile" and status["done"] > 0)
        assert 1 <= status["done"] <= status["total"]
        assert status["total"] >= SLOW_FILES
        assert status["message"]
        assert slow_build.await_end()["state"] == "done"


class TestFailures:
    @pytest.mark.parametrize(
        ("option", "value", "message"),
        [
            ("TOY_QUIET", "ON", "does not use the option `TOY_QUIET`"),
            ("OLD_LOUD", "ON", "does not use the option `OLD_LOUD` (it knows `TOY_LOUD`)"),
        ],
    )
    def test_unused_option(self, build: ToyBuild, option: str, value: str, message: str) -> None:
        build.spec["cmake_options"][option] = value
        build.start()
        status = build.await_end()
        assert (status["state"], status["phase"]) == ("failed", "configure")
        assert message in status["message"]
        assert not list(build.work.glob("build/**/*.o"))

    def test_option_that_the_project_overrules(self, tmp_path: Path) -> None:
        files = source_files()
        files["CMakeLists.txt"] += 'set(TOY_LOUD "OFF" CACHE BOOL "" FORCE)\n'
        build = ToyBuild(tmp_path, files=files)
        build.start()
        status = build.await_end()
        assert "`TOY_LOUD` was asked as `ON` and stands as `OFF`" in status["message"]

    def test_corrected_option_goes_on(self, build: ToyBuild) -> None:
        build.spec["cmake_options"]["TOY_QUIET"] = "ON"
        build.start()
        assert build.await_end()["state"] == "failed"
        del build.spec["cmake_options"]["TOY_QUIET"]
        build.start()
        assert build.await_end()["state"] == "done"

    def test_compile_error_is_shown_with_the_log(self, tmp_path: Path) -> None:
        build = ToyBuild(tmp_path, files=source_files(src__toy_c="#error broken on purpose\n"))
        build.start()
        status = build.await_end()
        assert (status["state"], status["phase"]) == ("failed", "compile")
        assert "toy.c" in status["message"]
        assert any("broken on purpose" in line for line in status["log_tail"])
        assert len(status["log_tail"]) <= 40

    def test_program_that_names_another_build(self, build: ToyBuild) -> None:
        build.spec["cmake_options"]["LLAMA_BUILD_NUMBER"] = f"{BUILD_NUMBER}0"
        build.start()
        status = build.await_end()
        assert (status["state"], status["phase"]) == ("failed", "verify")
        assert f"does not name build {BUILD_NUMBER}" in status["message"]

    def test_library_searched_outside_the_release(self, build: ToyBuild) -> None:
        build.spec["cmake_options"]["CMAKE_INSTALL_RPATH"] = "/usr/local/lib"
        build.start()
        assert "/usr/local/lib" in build.await_end()["message"]

    def test_source_of_another_digest(self, build: ToyBuild) -> None:
        build.spec["source"]["tree_sha256"] = "0" * 64
        build.start()
        status = build.await_end()
        assert status["state"] == "failed"
        assert "instead of 000000" in status["message"]
        assert not (build.work / "src").exists()

    def test_other_libc_is_refused_at_once(self, build: ToyBuild) -> None:
        build.spec["libc"] = "glibc-2.11"
        (build.folder / "spec.json").write_text(json.dumps(build.spec))
        done = build.call("start", "--spec", build.folder / "spec.json", "--archive", build.archive, "--work", build.work)
        assert done.returncode == 1
        assert "glibc-2.11" in done.stderr
        assert "hint: " in done.stderr
        assert build.status()["state"] == "absent"

    def test_full_disk_is_named_and_survived(self, tmp_path: Path) -> None:
        small = tmp_path / "small"
        small.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", small], check=True)
        try:
            build = ToyBuild(tmp_path, build_space_bytes=1024)
            build.work = small / "work"
            build.start()
            status = build.await_end()
            assert status["state"] == "failed"
            assert "the disk became full" in status["message"]
            subprocess.run(["mount", "-o", "remount,size=200m", small], check=True)
            build.start()
            status = build.await_end()
            assert status["state"] == "done", status
        finally:
            subprocess.run(["umount", "--lazy", small], check=True)

    def test_too_little_space_is_refused_before(self, build: ToyBuild) -> None:
        build.spec["build_space_bytes"] = 10**18
        (build.folder / "spec.json").write_text(json.dumps(build.spec))
        done = build.call("start", "--spec", build.folder / "spec.json", "--archive", build.archive, "--work", build.work)
        assert done.returncode == 1
        assert "MiB are free there" in done.stderr


RENAME = """--- a/src/toy.c
+++ b/src/toy.c
@@ -1 +1 @@
-const char *toy_name(void) { return "toy"; }
+const char *toy_name(void) { return "patched"; }
"""


class TestPatches:
    @pytest.fixture
    def patched(self, build: ToyBuild, tmp_path: Path) -> ToyBuild:
        """A build with two patches, of which the second needs the first."""
        build.patches = tmp_path / "patches"
        build.patches.mkdir()
        (build.patches / "1-rename.patch").write_text(RENAME)
        (build.patches / "2-again.diff").write_text(RENAME.replace('"patched"', '"twice"').replace('"toy"', '"patched"'))
        digest = json.loads(run_script("patches-digest", "--patches", build.patches).stdout)["sha256"]
        build.spec["source"]["patches_sha256"] = digest
        return build

    def test_are_applied_in_the_order_of_their_names(self, patched: ToyBuild) -> None:
        patched.start()
        status = patched.await_end()
        assert status["state"] == "done", status
        program = subprocess.run([patched.work / "stage/bin/toy-server"], capture_output=True, text=True, check=True)
        assert program.stdout.startswith("twice version")
        source = json.loads((patched.work / "stage/release.json").read_text())["source"]
        assert source["patches"] == ["1-rename.patch", "2-again.diff"]
        assert source["patches_sha256"] == patched.spec["source"]["patches_sha256"]

    def test_one_that_does_not_fit_is_named(self, patched: ToyBuild) -> None:
        assert patched.patches
        (patched.patches / "1-rename.patch").unlink()
        digest = json.loads(run_script("patches-digest", "--patches", patched.patches).stdout)["sha256"]
        patched.spec["source"]["patches_sha256"] = digest
        patched.start()
        status = patched.await_end()
        assert (status["state"], status["phase"]) == ("failed", "unpack")
        assert "the patch `2-again.diff` does not fit" in status["message"]
        assert not (patched.work / "src").exists(), "half a patched tree is never compiled"

    def test_others_than_the_plan_says(self, patched: ToyBuild) -> None:
        assert patched.patches
        (patched.patches / "3-more.patch").write_text(RENAME)
        patched.start()
        assert "have the digest" in patched.await_end()["message"]


class TestKilled:
    def test_dead_builder_is_seen_and_its_build_taken_up(self, slow_build: ToyBuild) -> None:
        slow_build.start()
        slow_build.await_that(lambda status: status["phase"] == "compile" and status["done"] >= 3)
        _kill_builder(slow_build)
        status = slow_build.status()
        assert status["state"] == "failed"
        assert "the builder died" in status["message"]
        answer = slow_build.start()
        assert (answer["state"], answer["started"]) == ("running", True)
        status = slow_build.await_that(lambda status: status["state"] != "running" or status["total"] >= 1)
        assert slow_build.await_end()["state"] == "done"
        steps = [line for line in (slow_build.work / "build.log").read_text().splitlines() if "Building CXX object" in line]
        # Compiled files were kept; only those that were being compiled at the kill may come twice.
        assert len(steps) <= SLOW_FILES + (os.cpu_count() or 1)

    def test_killed_at_random_points(self, slow_build: ToyBuild) -> None:
        seed = random.randrange(10**6)
        print(f"seed {seed}")
        moments = random.Random(seed)
        for _ in range(8):
            slow_build.start()
            subprocess.run(["sleep", f"{moments.uniform(0, 2.5):.2f}"], check=True)
            _kill_builder(slow_build)
        slow_build.start()
        assert slow_build.await_end()["state"] == "done"
        release = slow_build.folder / "engines" / BUILD_ID
        assert _install(slow_build, release).returncode == 0
        assert (
            subprocess.run([release / "bin/toy-server"], capture_output=True, check=True).stdout == b"toy version (build 4711)\n"
        )

    def test_what_a_killed_builder_left_running_is_ended(self, tmp_path: Path) -> None:
        files = source_files()
        files["CMakeLists.txt"] += "add_custom_target(wait COMMAND sleep 600)\nadd_dependencies(toy-server wait)\n"
        build = ToyBuild(tmp_path, files=files)
        build.start()
        build.await_that(lambda status: _command_in_session(build.builder_pid(), "sleep"))
        first = build.builder_pid()
        _kill_builder(build)
        assert _command_in_session(first, "sleep")
        assert "the builder died" in build.status()["message"]
        try:
            assert build.start()["started"]
            assert build.builder_pid() != first
            assert not _command_in_session(first, "sleep")
        finally:
            _kill_session(build)

    def test_second_start_attaches(self, slow_build: ToyBuild) -> None:
        assert slow_build.start()["started"]
        pid = slow_build.builder_pid()
        answer = slow_build.start()
        assert (answer["state"], answer["started"]) == ("running", False)
        assert slow_build.builder_pid() == pid
        assert slow_build.await_end()["state"] == "done"

    def test_starts_at_the_same_moment_make_one_builder(self, build: ToyBuild) -> None:
        spec = build.folder / "spec.json"
        spec.write_text(json.dumps(build.spec))
        argv = ["python3", "-B", str(SCRIPT), "start", "--spec", str(spec)]
        argv += ["--archive", str(build.archive), "--work", str(build.work)]
        calls = [subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) for _ in range(4)]
        answers = [json.loads(call.communicate()[0]) for call in calls]
        assert sorted(answer["started"] for answer in answers) == [False, False, False, True]
        assert build.await_end()["state"] == "done"
        assert (build.work / "build.log").read_text().count("$ ninja") == 1


class TestInstall:
    def test_installs_once(self, built: ToyBuild, tmp_path: Path) -> None:
        release = tmp_path / "engines/llama_cpp" / BUILD_ID
        first, second = _install(built, release), _install(built, release)
        assert json.loads(first.stdout)["changed"] is True
        assert json.loads(second.stdout)["changed"] is False
        assert run_script("verify", "--release", release).returncode == 0
        assert [path.name for path in release.parent.iterdir()] == [BUILD_ID]

    @pytest.mark.parametrize("damage", ["missing", "cut", "flipped", "added", "mode", "no release.json"])
    def test_broken_release_is_found_and_replaced(self, built: ToyBuild, tmp_path: Path, damage: str) -> None:
        release = tmp_path / BUILD_ID
        _install(built, release)
        library = release / "lib/libtoy.so.0"
        if damage == "missing":
            library.unlink()
        elif damage == "cut":
            library.write_bytes(library.read_bytes()[:100])
        elif damage == "flipped":
            content = bytearray(library.read_bytes())
            content[len(content) // 2] ^= 1
            library.write_bytes(content)
        elif damage == "added":
            (release / "lib/libevil.so").write_bytes(b"")
        elif damage == "mode":
            library.chmod(0o777)
        else:
            (release / "release.json").unlink()
        by_size = run_script("verify", "--release", release, "--sizes").returncode
        assert by_size == (0 if damage in ("flipped", "added") else 1)
        assert run_script("verify", "--release", release).returncode == 1
        assert json.loads(_install(built, release).stdout)["changed"] is True
        assert run_script("verify", "--release", release).returncode == 0
        assert [path.name for path in tmp_path.iterdir()] == [BUILD_ID]

    def test_leftovers_of_a_killed_install_are_removed(self, built: ToyBuild, tmp_path: Path) -> None:
        (tmp_path / f".incoming-{BUILD_ID}/bin").mkdir(parents=True)
        (tmp_path / f".broken-{BUILD_ID}").mkdir()
        assert _install(built, tmp_path / BUILD_ID).returncode == 0
        assert [path.name for path in tmp_path.iterdir()] == [BUILD_ID]

    def test_wrong_archive_leaves_what_was_there(self, built: ToyBuild, tmp_path: Path) -> None:
        done = _install(built, tmp_path / BUILD_ID, sha256="0" * 64)
        assert done.returncode == 1
        assert "instead of 000000" in done.stderr
        assert list(tmp_path.iterdir()) == []

    def test_release_under_another_name_is_refused(self, built: ToyBuild, tmp_path: Path) -> None:
        done = _install(built, tmp_path / "b1-cpu-000000000000")
        assert done.returncode == 1
        assert f"holds the release {BUILD_ID}" in done.stderr
        assert list(tmp_path.iterdir()) == []

    def test_killed_at_random_points(self, built: ToyBuild, tmp_path: Path) -> None:
        release = tmp_path / BUILD_ID
        sha256 = built.status()["sha256"]
        argv = [
            "python3",
            "-B",
            str(SCRIPT),
            "install",
            "--archive",
            str(built.work / "release.tar.gz"),
        ]
        argv += ["--sha256", sha256, "--release", str(release)]
        seed = random.randrange(10**6)
        print(f"seed {seed}")
        moments = random.Random(seed)
        for _ in range(15):
            shutil.rmtree(release, ignore_errors=True)
            call = subprocess.Popen(argv, stdout=subprocess.DEVNULL)
            subprocess.run(["sleep", f"{moments.uniform(0.02, 0.25):.3f}"], check=True)
            call.kill()
            call.wait()
            # Never anything half-written under the final name.
            assert not release.exists() or run_script("verify", "--release", release).returncode == 0
        assert _install(built, release).returncode == 0
        assert [path.name for path in tmp_path.iterdir()] == [BUILD_ID]
