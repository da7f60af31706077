"""What the build script decides about CUDA without one: which toolkit, what is in a library, what a host keeps."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.toy_engine import load_script, run_script

script = load_script()

#: As cuobjdump 11.8 lists two objects of a library compiled for 70.
LIST_ELF = """ELF file    1: libggml-cuda.1.sm_70.cubin
ELF file    2: libggml-cuda.2.sm_70.cubin
"""
LIST_PTX = """PTX file    1: libggml-cuda.1.sm_70.ptx
PTX file    2: libggml-cuda.2.sm_70.ptx
"""


def _program(path: Path, text: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def _toolkit(root: Path, version: str, *, headers: str = "include") -> Path:
    """A folder laid out like a toolkit; its nvcc only tells its version."""
    nvcc = _program(root / "bin/nvcc", f"echo 'Cuda compilation tools, release {version.rpartition('.')[0]}, V{version}'")
    _program(root / "bin/cuobjdump")
    (root / headers).mkdir(parents=True)
    (root / headers / "cuda_runtime.h").touch()
    return nvcc


class TestFindToolkit:
    @pytest.fixture
    def asked(self, tmp_path: Path) -> dict[str, Any]:
        compiler = _program(tmp_path / "g++-11")
        return {"version": "11.8", "nvcc": [], "host_compiler": [str(tmp_path / "none"), str(compiler)]}

    def test_the_first_place_with_that_version(self, asked: dict[str, Any], tmp_path: Path) -> None:
        newer = _toolkit(tmp_path / "cuda-13.0", "13.0.48")
        right = _toolkit(tmp_path / "cuda-11.8", "11.8.89", headers="targets/x86_64-linux/include")
        found = script.find_toolkit({**asked, "nvcc": [str(tmp_path / "absent"), str(newer), str(right)]})
        assert (found.version, found.nvcc, found.root) == ("11.8.89", right, tmp_path / "cuda-11.8")
        assert found.options() == {
            "CMAKE_CUDA_COMPILER": str(right),
            "CMAKE_CUDA_HOST_COMPILER": str(tmp_path / "g++-11"),
            "CUDAToolkit_ROOT": str(tmp_path / "cuda-11.8"),
        }

    def test_the_callers_path_is_not_looked_at(
        self, asked: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        stray = _toolkit(tmp_path / "stray", "11.8.89")
        right = _toolkit(tmp_path / "right", "11.8.89")
        monkeypatch.setenv("PATH", f"{stray.parent}:{os.environ['PATH']}")
        monkeypatch.setenv("CUDACXX", str(stray))
        monkeypatch.setenv("CUDA_HOME", str(stray.parent.parent))
        found = script.find_toolkit({**asked, "nvcc": [str(right)]})
        assert found.nvcc == right
        environment = script._clean_environment(tmp_path, found.search_path, {})
        assert environment["PATH"].split(":")[0] == str(right.parent)
        assert "stray" not in json.dumps(environment)

    def test_another_version_is_named(self, asked: dict[str, Any], tmp_path: Path) -> None:
        newer = _toolkit(tmp_path / "cuda", "13.0.48")
        with pytest.raises(
            script.BuildError, match=r"no CUDA 11\.8 where it is looked for: .*cuda/bin/nvcc` is 13\.0\.48"
        ) as caught:
            script.find_toolkit({**asked, "nvcc": [str(newer)]})
        assert "llama_cpp_build_on: container" in caught.value.hint

    @pytest.mark.parametrize(
        ("missing", "message"), [("bin/cuobjdump", "lacks cuobjdump"), ("include/cuda_runtime.h", "has no headers")]
    )
    def test_half_a_toolkit(self, asked: dict[str, Any], tmp_path: Path, missing: str, message: str) -> None:
        nvcc = _toolkit(tmp_path / "cuda", "11.8.89")
        (tmp_path / "cuda" / missing).unlink()
        with pytest.raises(script.BuildError, match=message):
            script.find_toolkit({**asked, "nvcc": [str(nvcc)]})

    def test_the_compiler_beside_it(self, asked: dict[str, Any], tmp_path: Path) -> None:
        nvcc = _toolkit(tmp_path / "cuda", "11.8.89")
        with pytest.raises(script.BuildError, match=r"the C\+\+ compiler beside CUDA 11\.8 is missing") as caught:
            script.find_toolkit({**asked, "nvcc": [str(nvcc)], "host_compiler": [str(tmp_path / "bin/g++-12")]})
        assert caught.value.hint == "install g++-12"


class TestCode:
    def test_lists(self) -> None:
        assert script.code_lists(LIST_ELF) == {"sm_70": 2}
        assert script.code_lists(LIST_PTX) == {"sm_70": 2}
        assert script.code_lists("ELF file    1: a.sm_90.b.1.sm_120a.cubin\n") == {"sm_120a": 1}
        assert (
            script.code_lists("cuobjdump info    : No PTX file found to extract from 'x'. You may try with -all option.\n") == {}
        )

    @pytest.mark.parametrize(
        ("asked", "machine_code", "ptx"),
        [
            (["70"], {"sm_70": 144}, {"sm_70": 144}),
            (["70-real"], {"sm_70": 144}, {}),
            (["70-virtual"], {}, {"sm_70": 144}),
            (["70-real", "80"], {"sm_70": 1, "sm_80": 1}, {"sm_80": 1}),
            (["120"], {"sm_120a": 1}, {"sm_120a": 1}),
        ],
    )
    def test_what_was_asked_for(self, asked: list[str], machine_code: dict[str, int], ptx: dict[str, int]) -> None:
        assert script.code_problems(asked, machine_code, ptx) == []

    @pytest.mark.parametrize(
        ("asked", "machine_code", "ptx", "problems"),
        [
            (["70"], {}, {"sm_70": 1}, ["holds no machine code for sm_70"]),
            (["70-real"], {"sm_70": 1}, {"sm_70": 1}, ["holds PTX for sm_70, which nobody asked for"]),
            (
                ["70"],
                {"sm_52": 1},
                {"sm_70": 1},
                ["holds no machine code for sm_70", "holds machine code for sm_52, which nobody asked for"],
            ),
            (
                ["90a-real"],
                {"sm_90": 1},
                {},
                ["holds no machine code for sm_90a", "holds machine code for sm_90, which nobody asked for"],
            ),
        ],
    )
    def test_more_or_less(self, asked: list[str], machine_code: dict[str, int], ptx: dict[str, int], problems: list[str]) -> None:
        assert script.code_problems(asked, machine_code, ptx) == problems


class TestPatches:
    def test_digest_covers_names_and_contents(self, tmp_path: Path) -> None:
        (tmp_path / "0002-b.diff").write_text("b")
        (tmp_path / "0001-a.patch").write_text("a")
        (tmp_path / "README").write_text("not a patch")
        before = script.patches_digest(tmp_path)
        assert before[1] == ["0001-a.patch", "0002-b.diff"]
        assert json.loads(run_script("patches-digest", "--patches", tmp_path).stdout) == {"names": before[1], "sha256": before[0]}
        (tmp_path / "README").write_text("still none")
        assert script.patches_digest(tmp_path) == before
        (tmp_path / "0002-b.diff").write_text("c")
        assert script.patches_digest(tmp_path)[0] != before[0]

    def test_no_patches(self, tmp_path: Path) -> None:
        with pytest.raises(script.BuildError, match="holds no file that ends in"):
            script.patches_digest(tmp_path)
        done = run_script("patches-digest", "--patches", tmp_path / "absent")
        assert (done.returncode, done.stdout) == (1, "")
        assert "does not exist" in done.stderr


class TestPrune:
    @pytest.fixture
    def engines(self, tmp_path: Path) -> Path:
        """Four releases, each made after the one before."""
        for number in range(1, 5):
            (tmp_path / f"engines/b{number}/bin").mkdir(parents=True)
            os.utime(tmp_path / f"engines/b{number}", (number, number))
        (tmp_path / "units").mkdir()
        return tmp_path / "engines"

    def _prune(self, engines: Path, *options: str) -> list[str]:
        keep = ["--keep", str(engines / "b4")]
        folders = ["--units", engines.parent / "units", "--history", engines.parent / "history"]
        done = run_script("prune", *keep, *folders, *options)
        assert done.returncode == 0, done.stderr
        answer = json.loads(done.stdout)
        assert answer["changed"] is bool(answer["removed"])
        removed: list[str] = answer["removed"]
        return removed

    def test_the_one_before_stays(self, engines: Path) -> None:
        assert self._prune(engines, "--check") == ["b1", "b2"]
        assert self._prune(engines) == ["b1", "b2"]
        assert sorted(path.name for path in engines.iterdir()) == ["b3", "b4"]
        assert self._prune(engines) == []

    def test_what_still_runs_is_the_one_before(self, engines: Path) -> None:
        unit = engines.parent / "units/v100-chat.service"
        unit.write_text(f"[Service]\nExecStart={engines}/b2/bin/llama-server\n")
        assert self._prune(engines) == ["b1", "b3"]
        assert sorted(path.name for path in engines.iterdir()) == ["b2", "b4"]

    def test_the_last_two_good_states_can_be_gone_back_to(self, engines: Path) -> None:
        (engines.parent / "history").mkdir()
        for number in (1, 2, 3, 2):
            document = {"state": f"s{number}", "releases": [{"path": f"{engines}/b{number}"}]}
            count = len(list((engines.parent / "history").iterdir()))
            (engines.parent / f"history/20261130T00000{count}Z.json").write_text(json.dumps(document))
        assert self._prune(engines) == ["b1"]

    def test_what_a_killed_run_was_removing_goes(self, engines: Path) -> None:
        (engines / "b1").rename(engines / ".removed-b1")
        (engines / "b2").rename(engines / ".incoming-b2")
        assert self._prune(engines) == []
        assert sorted(path.name for path in engines.iterdir()) == [".incoming-b2", "b3", "b4"]

    def test_nothing_is_installed_yet(self, tmp_path: Path) -> None:
        done = run_script("prune", "--keep", tmp_path / "none/b1", "--units", tmp_path)
        assert json.loads(done.stdout) == {"changed": False, "removed": []}
