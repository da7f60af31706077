"""What the builder's image is made with: where its packages come from."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from v100ctl.artifacts import container

ONE_LINE = "deb http://archive.example/debian bookworm {}\n"
DEB822 = "Types: deb\nURIs: http://archive.example/debian\nSuites: bookworm\nComponents: {}\n"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("sources.list", ONE_LINE),
        # Where mmdebstrap leaves them.
        ("sources.list.d/0000sources.list", ONE_LINE),
        ("sources.list.d/debian.sources", DEB822),
    ],
)
@pytest.mark.parametrize("before", ["main", "main non-free", "main non-free-firmware"])
def test_components_are_added_wherever_the_archive_is_named(tmp_path: Path, name: str, text: str, before: str) -> None:
    file = tmp_path / "apt" / name
    file.parent.mkdir(parents=True)
    (tmp_path / "apt/sources.list.d").mkdir(exist_ok=True)
    (tmp_path / "dpkg/dpkg.cfg.d").mkdir(parents=True)
    file.write_text(text.format(before), encoding="utf-8")
    script = container._INSTALL.partition("apt-get update")[0].replace("/etc/", f"{tmp_path}/")
    assert "non-free" not in script
    subprocess.run(["/bin/sh", "-c", script, "install", "contrib", "non-free", "--", "nvidia-cuda-toolkit"], check=True)
    wanted = before.split() + [word for word in ("contrib", "non-free") if word not in before.split()]
    assert file.read_text(encoding="utf-8") == text.format(" ".join(wanted))
