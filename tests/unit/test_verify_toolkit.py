"""The proof that a toolkit is the one that was asked for and compiles, with programs that stand in for nvcc."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


def _module() -> ModuleType:
    spec = importlib.util.spec_from_file_location("verify_toolkit", ROOT / "roles/cuda_toolkit/files/verify_toolkit.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


verify_toolkit = _module()
VERSION = 'test "$1" = --version && { echo "Cuda compilation tools, release 11.8, V11.8.89"; exit 0; }\n'


def nvcc(folder: Path, body: str) -> str:
    """A program in nvcc's place."""
    program = folder / "nvcc"
    program.write_text(f"#!/bin/sh\n{body}")
    program.chmod(0o755)
    return str(program)


def test_a_toolkit_that_compiles(tmp_path: Path) -> None:
    log = tmp_path / "log"
    program = nvcc(tmp_path, f'{VERSION}echo "$@" > {log}\necho "$NVCC_APPEND_FLAGS$CPATH" >> {log}\necho object > probe.o\n')
    assert verify_toolkit.verify(program, "11.8", "/usr/bin/g++-11", ["70", "75"]) == "11.8"
    arguments, surroundings = log.read_text().splitlines()
    assert "-gencode=arch=compute_70,code=sm_70 -gencode=arch=compute_75,code=sm_75 -ccbin /usr/bin/g++-11 -c" in arguments
    assert surroundings == ""


def test_nothing_around_takes_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVCC_APPEND_FLAGS", "-ccbin clang")
    monkeypatch.setenv("CPATH", "/usr/local/cuda-12.9/include")
    test_a_toolkit_that_compiles(tmp_path)


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (VERSION + 'echo "unsupported GNU version" >&2; exit 1\n', "unsupported GNU version"),
        (VERSION + ": > probe.o\n", "wrote an empty object"),
        (VERSION + ":\n", "No such file"),
        ('echo "release 12.1, V12.1.105"\n', "is CUDA 12.1, not 11.8"),
        ("echo nonsense\n", "of an unknown release"),
        ("exit 3\n", "failed"),
    ],
)
def test_a_toolkit_that_is_not_right(tmp_path: Path, body: str, problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--nvcc", nvcc(tmp_path, body), "--version", "11.8", "--host-compiler", "g++", "--architecture", "70"]
    assert verify_toolkit.main(arguments) == 1
    assert problem in json.loads(capsys.readouterr().out)["problem"]


def test_a_toolkit_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--nvcc", str(tmp_path / "none"), "--version", "11.8", "--host-compiler", "g++", "--architecture", "70"]
    assert verify_toolkit.main(arguments) == 1
    assert "does not start" in json.loads(capsys.readouterr().out)["problem"]


def test_one_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify_toolkit, "LIMIT_S", 1)
    with pytest.raises(verify_toolkit.Unusable, match="did not end within 1 s"):
        verify_toolkit.verify(nvcc(tmp_path, "exec sleep 30\n"), "11.8", "g++", ["70"])


def test_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    verify_toolkit.verify(nvcc(tmp_path, VERSION + "echo object > probe.o\n"), "11.8", "g++", ["70"])
    assert [file.name for file in tmp_path.iterdir()] == ["nvcc"]
