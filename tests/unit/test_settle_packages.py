"""What becomes of installed packages when another driver takes their place."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "roles/nvidia_driver/files/settle_packages.py"


def _module() -> Any:
    spec = importlib.util.spec_from_file_location("settle_packages", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


settle = _module()
# As `apt-cache policy` of apt 2.6 prints it, shortened.
POLICY = """\
libcuda1:
  Installed: 535.309.01-0+deb12u1
  Candidate: 580.159.04-1
  Version table:
     590.48.01-1 500
        500 http://127.0.0.1:8099/debian12/x86_64  Packages
     580.159.04-1 1001
        500 http://127.0.0.1:8099/debian12/x86_64  Packages
 *** 535.309.01-0+deb12u1 500
        100 /var/lib/dpkg/status
libcuda1:i386:
  Installed: 535.309.01-0+deb12u1
  Candidate: 535.309.01-0+deb12u1
nvidia-alternative:
  Installed: 535.309.01-0+deb12u1
  Candidate: (none)
"""


def test_what_has_a_successor_comes_along_and_what_has_none_goes() -> None:
    found = settle.candidates(POLICY)
    assert found == {"libcuda1": "580.159.04-1", "libcuda1:i386": "535.309.01-0+deb12u1", "nvidia-alternative": ""}
    names = ["libcuda1", "libcuda1:i386", "nvidia-alternative", "nvidia-smi"]
    assert settle.words(names, found, "580") == ["libcuda1", "libcuda1:i386-", "nvidia-alternative-", "nvidia-smi-"]
    assert settle.words(["libcuda1"], found, "580.126.20") == ["libcuda1-"]


def test_only_packages_of_another_driver_are_settled() -> None:
    listed = (
        "installed libcuda1 535.309.01-0+deb12u1\nunpacked nvidia-smi 535.309.01-0+deb12u1\nconfig-files nvidia-old 470.1-1\n"
        "installed libnvidia-ml1 580.159.04-1\ninstalled nvidia-cuda-toolkit 11.8.89~11.8.0-5\nnot-installed nvidia-none \n"
        "installed cuda-drivers 1:535.309.01-1\n"
        "installed libnvidia-cfg1:amd64 535.309.01-0+deb12u1\ninstalled libcuda1:i386 535.309.01-0+deb12u1\n"
    )
    # As apt says them: the host's own architecture is not part of a name.
    found = settle.others(listed, "580", "amd64")
    assert found == ["libcuda1", "nvidia-smi", "cuda-drivers", "libnvidia-cfg1", "libcuda1:i386"]


@pytest.mark.parametrize(
    ("version", "driver", "expected"),
    [
        ("580.159.04-1", "580", True),
        ("1:580.159.04-1", "580.159.04", True),
        ("580.159.04-1", "580.159", True),
        ("5801.1-1", "580", False),
        ("580-1", "580", True),
        ("", "580", False),
    ],
)
def test_versions(version: str, driver: str, expected: bool) -> None:
    assert settle.is_of(version, driver) is expected
