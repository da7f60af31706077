"""The complete locks of vLLM: what is in them, how they are made, and how they are read for the Python of a host."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.unit.factory import make_config, make_facts
from v100ctl.catalog import load_catalog
from v100ctl.catalog.lock_vllm import LockError, head, main, merge, resolve
from v100ctl.catalog.vllm import VllmRow
from v100ctl.catalog.vllm_lock import LockedPackage, LockProblem, for_python, parse_lock, shipped_lock, shipped_lock_for
from v100ctl.errors import V100ctlError
from v100ctl.plan import vllm
from v100ctl.wheels import fetch, requirements, wheels

LOCKED = [row for row in load_catalog().vllm_rows if row.lock is not None]
A, B = "sha256:" + "a" * 64, "sha256:" + "b" * 64


@pytest.mark.parametrize("row", LOCKED, ids=lambda row: row.version)
def test_a_shipped_lock_is_complete_and_names_no_index(row: VllmRow) -> None:
    assert row.lock is not None
    text = shipped_lock(row.version)
    assert text is not None
    assert text.startswith(head(row))
    assert "://" not in text and "--index" not in text and "--find-links" not in text
    for python in row.lock.pythons:
        lines = for_python(text, python).splitlines()
        pins = {line.partition("==")[0]: line.partition("==")[2].split()[0] for line in lines}
        assert all(re.fullmatch(r"[a-z0-9-]+==\S+( --hash=sha256:[0-9a-f]{64})+", line) for line in lines)
        assert len(pins) == len(lines) > 100, "a package twice"
        assert pins["vllm"] == row.version
        assert pins["torch"] == row.torch
        assert {"triton", "xformers", "nvidia-cuda-runtime-cu12", "nvidia-cublas-cu12", "setuptools"} <= set(pins)
        assert pins["nvidia-cuda-runtime-cu12"].startswith(row.cuda)
        for name, bound in row.requirements.items():
            assert Requirement(f"{name}{bound}").specifier.contains(pins[name])
        assert not set(row.lock.left_out) & set(pins)


def test_both_versions_are_locked() -> None:
    assert [row.version for row in LOCKED] == ["0.6.3.post1", "0.8.5.post1"]
    assert shipped_lock("0.7.3") is None
    assert shipped_lock("../vllm") is None


def test_locks_of_several_pythons_become_one() -> None:
    both, old, new = LockedPackage("both", "1", (A, B)), LockedPackage("one", "1", (A,)), LockedPackage("one", "2", (B,))
    text = merge({"3.9": [both, old], "3.10": [both, new], "3.11": [both, new]})
    assert parse_lock(text) == (both, new, old)
    assert for_python(text, "3.9") == f"both==1 --hash={A} --hash={B}\none==1 --hash={A}\n"
    assert for_python(text, "3.11") == f"both==1 --hash={A} --hash={B}\none==2 --hash={B}\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"a==1 --hash={A}\n", f"a==1 --hash={A}\n"),
        (f"# made by x\na==1 \\\n    --hash={B} \\\n    --hash={A}\n    # via b\n", f"a==1 --hash={A} --hash={B}\n"),
        (f"a==1 ; sys_platform == 'darwin' --hash={A}\nb==1; python_version < '3.12' --hash={B}", f"b==1 --hash={B}\n"),
        (
            f"b==1 --hash={B}\n--extra-index-url https://example.org/simple\na==1 --hash={A}\n",
            f"--extra-index-url https://example.org/simple\na==1 --hash={A}\nb==1 --hash={B}\n",
        ),
        (
            f"a @ https://example.org/a-1.whl?x=1;y=2 ; python_version > '3' --hash={A}",
            f"a @ https://example.org/a-1.whl?x=1;y=2 --hash={A}\n",
        ),
        ("", ""),
    ],
)
def test_a_requirements_file_is_read_for_one_python(text: str, expected: str) -> None:
    assert for_python(text, "3.11") == expected


@pytest.mark.parametrize(
    ("text", "said"), [("a==1", "`a==1` has no `--hash`"), (f"a==1 ; nonsense --hash={A}", "a marker that is none")]
)
def test_what_pip_would_refuse_is_refused(text: str, said: str) -> None:
    with pytest.raises(LockProblem, match=said):
        for_python(text, "3.11")


def fake_uv(tmp_path: Path, answer: str, code: int = 0) -> str:
    program = tmp_path / "uv"
    program.write_text(
        f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\nfor last; do :; done\ncat "$last" >> {tmp_path}/asked\n'
        f"printf '{answer}'\nexit {code}\n",
        encoding="utf-8",
    )
    program.chmod(0o755)
    return str(program)


def test_uv_is_asked_for_the_rows_bounds_and_no_newer_package(tmp_path: Path) -> None:
    row = LOCKED[0]
    found = resolve(row, "3.9", fake_uv(tmp_path, f"a==1 --hash={A}\\n"))
    assert found == (LockedPackage("a", "1", (A,)),)
    asked = (tmp_path / "asked").read_text(encoding="utf-8")
    for words in (
        "--generate-hashes",
        "--no-emit-index-url",
        "--only-binary :all:",
        "--python-version 3.9",
        "--exclude-newer 2024-12-01",
        "vllm==0.6.3.post1\n",
        "transformers==4.45.2\n",
    ):
        assert words in asked
    with pytest.raises(LockError, match=r"nothing fits vLLM 0\.6\.3\.post1 on Python 3\.9"):
        resolve(row, "3.9", fake_uv(tmp_path, "", code=1))
    with pytest.raises(LockError, match="not installed"):
        resolve(row, "3.9", str(tmp_path / "none"))


def test_only_versions_with_a_row_are_locked(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["0.7.3"])
    assert ended.value.code == 2
    assert "no row with `lock`" in capsys.readouterr().err


# What a host gets.
# --------------------------------------------------------------------------------------------------------------------


def release_of(python: str = "3.11.2", **variables: str) -> vllm.Release:
    config = make_config({"engine": "vllm"}, **variables)
    row = load_catalog().vllm(config.vllm_version)
    assert row is not None
    found = vllm.release(config, row, None, make_facts(python={"version": python, "executable": "/usr/bin/python3"}))
    assert found is not None
    return found


def test_a_release_is_named_by_its_lock_its_python_and_its_machine() -> None:
    found = release_of()
    assert re.fullmatch(r"0\.8\.5\.post1-py3\.11-[0-9a-f]{12}", found.build_id)
    assert found.path == f"/opt/v100ctl/engines/vllm/{found.build_id}"
    assert release_of("3.11.9").build_id == found.build_id
    others = {release_of("3.10.12").build_id, release_of(vllm_version="0.6.3.post1").build_id}
    own = {"vllm_requirements": "/srv/fork.txt", "vllm_requirements_sha256": "ab" * 32}
    others |= {release_of(**own).build_id, release_of(**{**own, "vllm_requirements_sha256": "cd" * 32}).build_id}
    assert len(others | {found.build_id}) == 5
    moved = release_of(**{**own, "vllm_requirements": "/srv/other.txt"})
    assert moved.build_id == release_of(**own).build_id, "where the file lies decides nothing"


def test_the_shipped_lock_is_handed_out_as_it_was_planned() -> None:
    build = dict(release_of().build)
    text = requirements(build, "")
    assert text == shipped_lock_for("0.8.5.post1", "3.11")
    with pytest.raises(V100ctlError, match="another lock"):
        requirements({**build, "lock_sha256": "0" * 64}, "")


def test_a_file_of_the_users_own_has_to_be_the_planned_one(tmp_path: Path) -> None:
    file = tmp_path / "fork.txt"
    file.write_text(f"vllm==1 --hash={A}\n", encoding="utf-8")
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    build = dict(release_of(vllm_requirements=str(file), vllm_requirements_sha256=digest).build)
    assert requirements(build, str(file)) == f"vllm==1 --hash={A}\n"
    with pytest.raises(V100ctlError, match="cannot be read"):
        requirements(build, str(tmp_path / "none"))
    file.write_text("vllm==1\n", encoding="utf-8")
    with pytest.raises(V100ctlError, match=f"instead of {digest}"):
        requirements(build, str(file))
    with pytest.raises(V100ctlError, match="has no `--hash`"):
        requirements({**build, "file_sha256": hashlib.sha256(file.read_bytes()).hexdigest()}, str(file))


def test_wheels_of_a_folder_are_taken_by_their_hash(tmp_path: Path) -> None:
    for name in ("a-1-py3-none-any.whl", "b-1-py3-none-any.whl"):
        (tmp_path / name).write_bytes(name.encode())
    digest = hashlib.sha256(b"a-1-py3-none-any.whl").hexdigest()
    lock = f"--no-index\na==1 --hash=sha256:{digest} --hash={A}\n"
    assert wheels(str(tmp_path), lock) == [str(tmp_path / "a-1-py3-none-any.whl")]
    with pytest.raises(V100ctlError, match="lacks 1 of 2 wheels: c==1"):
        wheels(str(tmp_path), f"{lock}c==1 --hash={B}\n")
    with pytest.raises(V100ctlError, match="no folder"):
        wheels(str(tmp_path / "none"), lock)


def test_the_controller_fetches_each_wheel_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    make_wheels = Path(__file__).parents[2] / "molecule/vllm/files/make_wheels.py"
    subprocess.run([sys.executable, make_wheels, tmp_path / "toy"], check=True)
    packages = for_python((tmp_path / "toy/requirements.txt").read_text(encoding="utf-8"), "3.11")
    changed = f"--no-index\n--find-links {tmp_path / 'toy/changed'}\n{packages}"
    with pytest.raises(V100ctlError, match="DO NOT MATCH THE HASHES"):
        fetch("toy", "3.11", changed)
    lock = f"--no-index\n--find-links {tmp_path / 'toy/wheels'}\n{packages}"
    folder = fetch("toy", "3.11", lock)
    assert folder == tmp_path / "cache/v100ctl/wheels/toy"
    assert len(wheels(str(folder), lock)) == 3
    # Nothing is asked for again: what was served before is not needed.
    assert fetch("toy", "3.11", changed) == folder


def test_the_command_makes_the_same_file_from_the_same_answers(tmp_path: Path) -> None:
    program = fake_uv(tmp_path, f"a==1 --hash={A}\\n")
    assert subprocess.run([program, "x", "/dev/null"], check=True, capture_output=True).stdout == f"a==1 --hash={A}\n".encode()
    first, second = (merge({python: resolve(LOCKED[1], python, program) for python in ("3.9", "3.10")}) for _ in range(2))
    assert first == second == f"a==1 \\\n    --hash={A}\n"
