"""What is shipped: the wheel, the source distribution and the locks."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LOCKS = ("requirements.lock", "requirements-test.lock")
PYTHONS = ("3.11", "3.12", "3.13", "3.14")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the source distribution of this checkout."""
    folder = tmp_path_factory.mktemp("dist")
    build(ROOT, folder)
    return folder


def build(source: Path, folder: Path, *options: str) -> None:
    command = [sys.executable, "-m", "hatchling", "build", *options, "-d", str(folder)]
    result = subprocess.run(command, cwd=source, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def wheel_of(folder: Path) -> zipfile.ZipFile:
    (wheel,) = folder.glob("*.whl")
    return zipfile.ZipFile(wheel)


def sources(*folders: str) -> set[str]:
    """The files of these folders, without what tools leave there."""
    files = {file.relative_to(ROOT).as_posix() for folder in folders for file in (ROOT / folder).rglob("*") if file.is_file()}
    return {file for file in files if "__pycache__" not in file}


def test_wheel_carries_the_content(built: Path) -> None:
    expected = {f"v100ctl/content/{file}" for file in sources("playbooks", "roles", "templates", "inventory/example")}
    assert {name for name in wheel_of(built).namelist() if name.startswith("v100ctl/content/")} == expected
    assert "v100ctl/content/playbooks/provision.yml" in expected


def test_wheel_carries_the_whole_package(built: Path) -> None:
    names = set(wheel_of(built).namelist())
    expected = {file.removeprefix("src/") for file in sources("src/v100ctl")}
    assert expected <= names
    assert {"v100ctl/py.typed", "v100ctl/probe/host_script.py", "v100ctl/catalog/llama_cpp.yml"} <= names
    strange = {name for name in names - expected if not re.match(r"v100ctl/content/|v100ctl-[0-9.]+\.dist-info/", name)}
    assert not strange


def test_installed_wheel_finds_its_content(built: Path, tmp_path: Path) -> None:
    (wheel,) = built.glob("*.whl")
    shutil.unpack_archive(wheel, tmp_path, "zip")
    script = "from v100ctl import paths; print(paths.content_dir(), paths.checkout_dir())"
    result = subprocess.run(
        [sys.executable, "-IS", "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r}); {script}"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout == f"{tmp_path}/v100ctl/content None\n"


def test_entry_points(built: Path) -> None:
    wheel = wheel_of(built)
    (name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/entry_points.txt")]
    lines = wheel.read(name).decode().split("\n")
    assert "v100ctl = v100ctl.cli:main" in lines
    assert "v100ctl_lab = v100ctl.lab.pytest_plugin" in lines


def test_wheel_from_source_distribution_is_the_same(built: Path, tmp_path: Path) -> None:
    (archive,) = built.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        opened.extractall(tmp_path, filter="data")
    (source,) = tmp_path.iterdir()
    assert (source / "v100ctl").stat().st_mode & 0o111
    build(source, tmp_path / "dist", "-t", "wheel")
    assert sorted(wheel_of(tmp_path / "dist").namelist()) == sorted(wheel_of(built).namelist())


# --- Locks ------------------------------------------------------------------------------------------------------------


def locked(lock: str) -> list[tuple[Requirement, int]]:
    """Each requirement of a lock with the number of its hashes."""
    text = re.sub(r"\\\n", " ", (ROOT / lock).read_text())
    lines = [line for line in text.split("\n") if line.strip() and not line.lstrip().startswith("#")]
    return [(Requirement(line.split(" --hash=")[0]), line.count(" --hash=sha256:")) for line in lines]


def linux(python: str) -> dict[str, str]:
    """What markers are held against."""
    return {
        "platform_machine": "x86_64",
        "python_full_version": f"{python}.0",
        "python_version": python,
        "sys_platform": "linux",
    }


def pins(lock: str, python: str) -> dict[str, Version]:
    """What a lock installs on Linux with that Python."""
    environment = linux(python)
    found: dict[str, Version] = {}
    for requirement, _ in locked(lock):
        if requirement.marker is None or requirement.marker.evaluate(environment):
            name = canonicalize_name(requirement.name)
            assert name not in found, f"{name} is locked twice for Python {python}"
            (specifier,) = requirement.specifier
            assert specifier.operator == "=="
            found[name] = Version(specifier.version)
    return found


@pytest.mark.parametrize("lock", LOCKS)
def test_lock_has_a_hash_for_everything(lock: str) -> None:
    assert locked(lock)
    assert [str(requirement) for requirement, hashes in locked(lock) if hashes == 0] == []


@pytest.mark.parametrize("lock", LOCKS)
def test_lock_names_no_place(lock: str) -> None:
    text = (ROOT / lock).read_text()
    # Neither an address nor an option that holds one: where packages come from is each machine's own business.
    for forbidden in ("://", "--index", "--extra-index", "--find-links", "--trusted-host", "@ file"):
        assert forbidden not in text


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize(("lock", "extras"), [(LOCKS[0], ("build",)), (LOCKS[1], ("build", "test"))])
def test_lock_fits_the_package_definition(lock: str, extras: tuple[str, ...], python: str) -> None:
    found = pins(lock, python)
    wanted = [*PROJECT["dependencies"], *(text for extra in extras for text in PROJECT["optional-dependencies"][extra])]
    for requirement in map(Requirement, wanted):
        assert found[canonicalize_name(requirement.name)] in requirement.specifier


@pytest.mark.parametrize("python", PYTHONS)
def test_test_lock_changes_nothing_of_the_first(python: str) -> None:
    base = pins(LOCKS[0], python)
    tests = pins(LOCKS[1], python)
    assert {name: tests.get(name) for name in base} == base


def test_ansible_core_follows_python() -> None:
    # 2.19 is the last that starts on Python 3.11; newer Pythons get a newer one.
    assert pins(LOCKS[0], "3.11")["ansible-core"] in Requirement("a~=2.19.0").specifier
    for python in PYTHONS[1:]:
        assert pins(LOCKS[0], python)["ansible-core"] >= Version("2.20")
