"""What a package manager would do, read from what real ones printed, and what of it is refused."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

ROOT = Path(__file__).resolve().parents[2]
OUTPUTS = Path(__file__).parent / "fixtures/packages"


def _module() -> ModuleType:
    spec = importlib.util.spec_from_file_location("simulate_packages", ROOT / "roles/cuda_toolkit/files/simulate_packages.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


simulate_packages = _module()


def apt(name: str) -> list[dict[str, str]]:
    """The actions in a recorded simulation of `apt-get install nvidia-cuda-toolkit g++-11` on Debian 12."""
    actions: list[dict[str, str]] = simulate_packages.parse_apt((OUTPUTS / f"apt_{name}.txt").read_text(encoding="utf-8"))
    return actions


def dnf(name: str) -> list[dict[str, str]]:
    """The actions in a recorded answer of dnf 4 on packages that carry the names and versions of NVIDIA's."""
    actions: list[dict[str, str]] = simulate_packages.parse_dnf((OUTPUTS / f"dnf_{name}.txt").read_text(encoding="utf-8"))
    return actions


def test_debians_toolkit_on_a_bare_host() -> None:
    actions = apt("cuda_bare")
    assert len(actions) == 90
    assert {item["kind"] for item in actions} == {"install"}
    assert {"kind": "install", "name": "nvidia-cuda-toolkit", "old": "", "new": "11.8.89~11.8.0-5~deb12u1"} in actions
    assert simulate_packages.judge(actions, set(), "") == []
    assert simulate_packages.judge(actions, set(), "535") == []


def test_libraries_of_the_same_version_may_come() -> None:
    assert simulate_packages.judge(apt("cuda_bare"), {"535.309.01"}, "535") == []


@pytest.mark.parametrize("known", ["535.216.01", "580.65.06"])
def test_libraries_of_another_version_may_not(known: str) -> None:
    refusals = simulate_packages.judge(apt("cuda_bare"), {known}, known[:3])
    assert f"libcuda1 535.309.01-0+deb12u1 would be added beside the driver {known}" in refusals
    # Nothing of the toolkit's own is meant.
    assert all("535.309.01" in refusal for refusal in refusals)


def test_libraries_of_another_branch_than_the_planned_one() -> None:
    refusals = simulate_packages.judge(apt("cuda_bare"), set(), "580")
    assert "libcuda1 535.309.01-0+deb12u1 would be added beside a driver of branch 580" in refusals


def test_an_installed_driver_package_that_would_change() -> None:
    refusals = simulate_packages.judge(apt("cuda_beside_older_535"), {"535.216.01"}, "535")
    assert (
        "the installed driver package nvidia-alternative would change from 535.216.01-1~deb12u1 to 535.309.01-0+deb12u1"
        in refusals
    )


def test_a_driver_from_elsewhere() -> None:
    refusals = simulate_packages.judge(apt("cuda_beside_550"), {"550.163.01"}, "550")
    assert "libnvidia-ml1 535.309.01-0+deb12u1 would be added beside the driver 550.163.01" in refusals


def test_a_toolkit_alone_with_dnf() -> None:
    actions = dnf("cuda_toolkit")
    assert [item["name"] for item in actions] == [
        "cuda-toolkit-11-8",
        "cuda-nvcc-11-8",
        "cuda-toolkit-11-8-config-common",
        "libcublas-devel-11-8",
    ]
    assert simulate_packages.judge(actions, {"535.161.08"}, "535") == []


def test_a_toolkit_that_brings_its_driver_with_dnf() -> None:
    actions = dnf("cuda_with_driver")
    assert len(actions) == 10
    refusals = simulate_packages.judge(actions, {"535.161.08"}, "535")
    assert "the installed driver package nvidia-driver would change to 3:580.65.06-1.el9" in refusals
    assert "cuda-drivers 580.65.06-1 would be added beside the driver 535.161.08" in refusals
    assert not [refusal for refusal in refusals if "toolkit" in refusal or "libcublas" in refusal]


def test_a_long_name_stands_on_a_line_of_its_own() -> None:
    table = (
        "Installing dependencies:\n"
        " a-name-that-is-longer-than-its-column\n"
        "                x86_64  1:2.0-1.el9  appstream  10 k\n"
        " short          noarch  1.0-1        appstream  20 k\n"
        "     replacing  old.noarch 0.9-1\n"
        "Removing dependent packages:\n"
        " gone           x86_64  3.0-1        @appstream  1 M\n"
        "\nTransaction Summary\n Install  2 Packages 3 4 5\n"
    )
    assert simulate_packages.parse_dnf(table) == [
        {"kind": "install", "name": "a-name-that-is-longer-than-its-column", "old": "", "new": "1:2.0-1.el9"},
        {"kind": "install", "name": "short", "old": "", "new": "1.0-1"},
        {"kind": "remove", "name": "gone", "old": "3.0-1", "new": ""},
    ]


@pytest.mark.parametrize(
    ("line", "refusal"),
    [
        (
            "Inst linux-image-6.1.0-58-amd64 (6.1.193-1 Debian [amd64])",
            "a kernel would be added: linux-image-6.1.0-58-amd64 6.1.193-1",
        ),
        (
            "Inst linux-image-amd64 [6.1.192-1] (6.1.193-1 Debian [amd64])",
            "the installed kernel package linux-image-amd64",
        ),
        ("Inst linux-headers-amd64 [6.1.192-1] (6.1.193-1 Debian [amd64])", "the installed kernel package linux-headers-amd64"),
        (
            "Inst dkms [3.0.10-8] (3.0.11-1 Debian [all])",
            "the installed DKMS package dkms would change from 3.0.10-8",
        ),
        ("Inst nvidia-kernel-dkms [535.1.2-1] (535.1.3-1 Debian [amd64])", "the installed driver package nvidia-kernel-dkms"),
        ("Inst firmware-misc-nonfree [1-1] (2-1 Debian [all])", "the installed firmware package firmware-misc-nonfree"),
        (
            "Remv nvidia-smi [535.309.01-0+deb12u1] [nvidia-driver:amd64 ]",
            "the driver package nvidia-smi 535.309.01",
        ),
        ("Remv hello [2.10-3]", "the package hello 2.10-3 would be removed"),
        (
            "Inst nvidia-persistenced (550.54.14-1 Debian [amd64])",
            "nvidia-persistenced 550.54.14-1 would be added",
        ),
    ],
)
def test_what_is_refused(line: str, refusal: str) -> None:
    (found,) = simulate_packages.judge(simulate_packages.parse_apt(line), {"535.309.01"}, "535")
    assert found.startswith(refusal)


@pytest.mark.parametrize(
    "line",
    [
        "Inst linux-libc-dev [6.1.192-1] (6.1.193-1 Debian [amd64])",
        "Inst linux-headers-6.1.0-57-amd64 (6.1.192-1 Debian [amd64])",
        "Inst libc6 [2.36-9+deb12u13] (2.36-9+deb12u14 Debian [amd64]) [libc6-dev:amd64 on libc6:amd64]",
        "Inst libnvidia-ml-dev (11.8.86~11.8.0-5~deb12u1 Debian [amd64])",
        "Inst libnvidia-container1 (1.17.4-1 NVIDIA [amd64])",
        # A helper is released less often than its branch's drivers.
        "Inst nvidia-persistenced (535.171.04-1~deb12u1 Debian [amd64])",
        "Inst nvidia-installer-cleanup (20220217+3~deb12u1 Debian [amd64])",
        "Inst firmware-misc-nonfree (20230210-5 Debian [all])",
    ],
)
def test_what_is_not(line: str) -> None:
    actions = simulate_packages.parse_apt(line)
    assert len(actions) == 1
    assert simulate_packages.judge(actions, {"535.309.01"}, "535") == []


def test_which_driver_a_host_has() -> None:
    proc = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.309.01  Wed Oct  1 00:00:00 UTC 2026\n"
    installed = {
        "libcuda1": "535.309.01-0+deb12u1",
        "nvidia-persistenced": "535.171.04-1~deb12u1",
        "nvidia-cuda-dev": "11.8.89~1",
    }
    assert simulate_packages.driver_versions(installed, "") == {"535.309.01"}
    assert simulate_packages.driver_versions({}, proc) == {"535.309.01"}
    assert simulate_packages.driver_versions({"nvidia-driver": "3:580.65.06-1.el9"}, "") == {"580.65.06"}
    assert simulate_packages.driver_versions({"libc6": "2.36-9"}, "") == set()


@given(st.text())
def test_no_output_breaks_it(output: str) -> None:
    for parse in (simulate_packages.parse_apt, simulate_packages.parse_dnf):
        actions = parse(output)
        assert isinstance(json.dumps(simulate_packages.judge(actions, {"535.309.01"}, "535")), str)
