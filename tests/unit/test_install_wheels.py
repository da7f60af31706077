"""The program that installs vLLM on a host: what makes a release unsound, how scripts are moved, what it tells of failures."""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FILE = Path(__file__).parents[2] / "roles/vllm/files/install_wheels.py"


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("install_wheels", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


program: Any = load()


def record_line(path: str, content: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
    return f"{path},sha256={digest},{len(content)}\n"


def environment(folder: Path, shebang: str) -> Path:
    """What pip leaves: a package, a script of it, its RECORD."""
    site = folder / "lib/python3.11/site-packages"
    info = site / "toy-1.dist-info"
    info.mkdir(parents=True)
    (folder / "bin").mkdir()
    (folder / "bin/python").symlink_to(sys.executable)
    (folder / "bin/activate").write_text(f"VIRTUAL_ENV={folder}\n", encoding="utf-8")
    (folder / "pyvenv.cfg").write_text(f"home = /usr/bin\ncommand = python3 -m venv {folder}\n", encoding="utf-8")
    script = f"{shebang}\nprint('ran')\n".encode()
    (folder / "bin/toy").write_bytes(script)
    (folder / "bin/toy").chmod(0o755)
    (site / "toy.py").write_bytes(b"x = 1\n")
    record = record_line("toy.py", b"x = 1\n") + record_line("../../../bin/toy", script) + "toy-1.dist-info/RECORD,,\n"
    # As numpy's wheel has it; the installation compiles it anew.
    record += record_line("__pycache__/toy.cpython-311.pyc", b"code")
    (info / "RECORD").write_text(record, encoding="utf-8")
    (info / "METADATA").write_text(
        "Name: toy\nVersion: 1\nClassifier: License :: OSI Approved :: MIT License\n", encoding="utf-8"
    )
    return folder


@pytest.mark.parametrize("long", [False, True])
def test_scripts_run_from_the_final_place(tmp_path: Path, long: bool) -> None:
    final = tmp_path / ("final" * (30 if long else 1))
    incoming = tmp_path / ".incoming"
    environment(incoming, f"#!{incoming}/bin/python")
    program.relocate(incoming, final)
    program.make_manifest(incoming)
    incoming.rename(final)
    first = (final / "bin/toy").read_text(encoding="utf-8").splitlines()[0]
    assert first == ("#!/bin/sh" if long else f"#!{final}/bin/python")
    assert subprocess.run([str(final / "bin/toy")], capture_output=True, check=True).stdout == b"ran\n"
    assert not (final / "bin/activate").exists()
    assert str(incoming) not in (final / "pyvenv.cfg").read_text(encoding="utf-8")


def test_pips_form_for_long_names_is_moved_too(tmp_path: Path) -> None:
    incoming, final = tmp_path / (".incoming" + "x" * 120), tmp_path / "final"
    environment(incoming, f"#!/bin/sh\n'''exec' {incoming}/bin/python \"$0\" \"$@\"\n' '''")
    program.relocate(incoming, final)
    incoming.rename(final)
    assert (final / "bin/toy").read_text(encoding="utf-8") == f"#!{final}/bin/python\nprint('ran')\n"
    assert subprocess.run([str(final / "bin/toy")], capture_output=True, check=True).stdout == b"ran\n"


def release(tmp_path: Path) -> Path:
    """A whole release."""
    folder = environment(tmp_path / "toy-1", f"#!{tmp_path / 'toy-1'}/bin/python")
    text = json.dumps(program.make_manifest(folder))
    (folder / "manifest.json").write_text(text, encoding="utf-8")
    entry = {"size_bytes": len(text), "mode": "0644", "sha256": hashlib.sha256(text.encode()).hexdigest()}
    document = {"schema": "v100ctl/release/1", "build_id": "toy-1", "files": {"manifest.json": entry}}
    (folder / "release.json").write_text(json.dumps(document), encoding="utf-8")
    return folder


def relink(folder: Path) -> None:
    (folder / "bin/python").unlink()
    (folder / "bin/python").symlink_to("/usr/bin/python3.42")


SITE = "lib/python3.11/site-packages"
DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "longer": (lambda folder: (folder / SITE / "toy.py").write_text("x = 11\n"), "has 7 bytes instead of 6"),
    "gone": (lambda folder: (folder / SITE / "toy.py").unlink(), "is missing"),
    "added": (lambda folder: (folder / SITE / "sitecustomize.py").write_text(""), "does not belong to it"),
    "mode": (lambda folder: (folder / "bin/toy").chmod(0o777), "has mode 0777 instead of 0755"),
    "link": (relink, "leads elsewhere"),
    "manifest": (lambda folder: (folder / "manifest.json").write_text("{}"), "another sha256 than release.json says"),
    "document": (lambda folder: (folder / "release.json").write_text("{"), "release.json is missing, damaged"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_seen_without_hashing(tmp_path: Path, name: str) -> None:
    folder = release(tmp_path)
    assert program.release_problem(folder, hashes=False) is None
    assert program.release_problem(folder) is None
    harm, said = DAMAGE[name]
    harm(folder)
    assert said in program.release_problem(folder, hashes=False)


def test_content_of_the_same_size_is_seen_by_hashing(tmp_path: Path) -> None:
    folder = release(tmp_path)
    (folder / SITE / "toy.py").write_text("x = 2\n", encoding="utf-8")
    assert program.release_problem(folder, hashes=False) is None
    assert "has another sha256" in program.release_problem(folder)
    done = subprocess.run([sys.executable, FILE, "verify", "--release", folder], capture_output=True, check=False)
    assert (done.returncode, json.loads(done.stdout)["sound"]) == (1, False)


def test_a_release_under_another_name_is_none(tmp_path: Path) -> None:
    release(tmp_path).rename(tmp_path / "toy-2")
    assert program.release_problem(tmp_path / "toy-2") == "release.json is missing, damaged, or of another kind"


def test_what_a_wheel_did_not_bring_is_no_release(tmp_path: Path) -> None:
    folder = environment(tmp_path / "toy-1", "#!/bin/sh")
    (folder / SITE / "toy.py").write_bytes(b"x = 3\n")
    with pytest.raises(program.InstallError, match="not what its wheel brought"):
        program.make_manifest(folder)
    (folder / SITE / "toy.py").unlink()
    with pytest.raises(program.InstallError, match="missing after the installation"):
        program.make_manifest(folder)


def test_licences_are_named(tmp_path: Path) -> None:
    assert program.licences(environment(tmp_path / "toy-1", "#!/bin/sh")) == {"toy 1": "MIT License"}


@pytest.mark.parametrize(
    ("output", "said"),
    [
        ("ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE", "another file than the lock was made for"),
        ("ERROR: Could not install: [Errno 28] No space left on device", "free some space"),
        ("ERROR: No matching distribution found for torch==2.6.0", "`vllm_wheels`"),
        ("ensurepip is not available", "python3-venv"),
        ("ReadTimeoutError", "run it again"),
    ],
)
def test_a_failure_says_what_to_do(output: str, said: str) -> None:
    assert said in program.explain(output)


def test_a_unit_is_named_by_the_release() -> None:
    assert program.unit_of(Path("/x/0.8.5.post1-py3.11-abc")) == "v100ctl-install-0.8.5.post1-py3.11-abc.service"


def test_only_what_pip_may_need_is_passed_on() -> None:
    for name in ("https_proxy", "NO_PROXY", "PIP_INDEX_URL", "SSL_CERT_FILE"):
        assert program.PASSED_ON.fullmatch(name)
    for name in ("LD_LIBRARY_PATH", "PYTHONPATH", "HF_TOKEN", "PATH"):
        assert not program.PASSED_ON.fullmatch(name)


@pytest.mark.parametrize("place", ["first", "second", "python/_bundled"])
def test_the_distributions_own_pip_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    """Debian and Enterprise Linux keep it in folders of their own, Python's own installation beside itself."""
    assert set(program.WHEEL_FOLDERS) == {"/usr/share/python-wheels", "/usr/share/python3-wheels"}
    monkeypatch.setattr(program, "WHEEL_FOLDERS", (str(tmp_path / "first"), str(tmp_path / "second")))
    interpreter = tmp_path / "python3"
    interpreter.write_text(f"#!/bin/sh\nprintf '21.3.1\\n{tmp_path}/python\\n'\n")
    interpreter.chmod(0o755)
    asked = {"path": str(tmp_path / "release"), "interpreter": str(interpreter)}
    (tmp_path / "asked.json").write_text(json.dumps(asked))
    (tmp_path / "requirements.txt").write_text("")
    installation = program.Installation(tmp_path)
    with pytest.raises(program.InstallError, match=r"no `pip-21\.3\.1-py3-none-any\.whl` on this host"):
        installation.pip_wheel()
    wheel = tmp_path / place / "pip-21.3.1-py3-none-any.whl"
    wheel.parent.mkdir(parents=True)
    wheel.touch()
    assert installation.pip_wheel() == wheel
