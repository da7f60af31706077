"""Which driver the package manager says is installed, and packages that stand for a driver's.

A lab host's driver is what ``dpkg`` knows, real packages or stand-ins alike: so removing, holding and upgrading them means what
it means elsewhere.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

_UPSTREAM = re.compile(r"(?:\d+:)?(\d{3,}\.\d+(?:\.\d+)?)")
# Debian's names, Ubuntu's and those of NVIDIA's own repository.
_PROPRIETARY = re.compile(r"nvidia(?:-tesla(?:-\d+)?)?-kernel-dkms|nvidia-dkms-\d+(?:-server)?")
_OPEN = re.compile(r"nvidia(?:-tesla(?:-\d+)?)?-open-kernel-dkms|nvidia-kernel-open-dkms|nvidia-dkms-\d+(?:-server)?-open")
_SMI = re.compile(r"nvidia(?:-tesla(?:-\d+)?)?-smi|nvidia-utils-\d+(?:-server)?|nvidia-driver-cuda")
_LIBRARY_FOLDERS = ("usr/lib/x86_64-linux-gnu", "usr/lib/aarch64-linux-gnu", "usr/lib64", "usr/lib")
#: Packages whose program of the same name, in ``/usr/bin``, needs a driver in the kernel: the machine's own takes its place.
DAEMONS = ("nvidia-modprobe", "nvidia-persistenced")
#: Says in the package's description whose it is.
STAND_IN = "Stand-in for the package of this name on a v100ctl lab host"


def installed(root: Path) -> dict[str, str]:
    """All packages that are fully installed, with their versions."""
    try:
        status = (root / "var/lib/dpkg/status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    found = {}
    for paragraph in status.split("\n\n"):
        fields = dict(re.findall(r"^(Package|Status|Version): (.*)$", paragraph, re.M))
        if fields.get("Status", "").endswith(" installed"):
            found[fields.get("Package", "")] = fields.get("Version", "")
    return found


def upstream(version: str) -> str:
    """``535.309.01`` of ``535.309.01-0+deb12u1``; empty where a version is none of a driver."""
    match = _UPSTREAM.match(version)
    return match.group(1) if match else ""


def module(packages: dict[str, str]) -> dict[str, str] | None:
    """The kernel module that the installed packages build: its version and flavour; ``None`` where there is none."""
    # Where both are there, the last one built wins; Debian's and NVIDIA's packages of the two conflict, so there is one.
    for pattern, flavour in ((_OPEN, "open"), (_PROPRIETARY, "proprietary")):
        for name, version in packages.items():
            if pattern.fullmatch(name) and upstream(version):
                return {"version": upstream(version), "flavour": flavour}
    return None


def has_smi(packages: dict[str, str]) -> bool:
    """Whether a package brings ``nvidia-smi``."""
    return any(_SMI.fullmatch(name) for name in packages)


def library_version(root: Path, packages: dict[str, str]) -> str:
    """The version of the management library that a program would load, else of the package with ``nvidia-smi``."""
    for folder in _LIBRARY_FOLDERS:
        path = root / folder / "libnvidia-ml.so.1"
        found = re.fullmatch(r"libnvidia-ml\.so\.(\d{3,}\.\d+(?:\.\d+)?)", path.resolve().name)
        if found and path.exists():
            return found.group(1)
    return next((upstream(version) for name, version in packages.items() if _SMI.fullmatch(name)), "")


def stand_ins(driver: dict[str, Any]) -> dict[str, str]:
    """The packages of a driver, as Debian and NVIDIA's repository for Debian name them: name -> version.

    Args:
        driver: ``version``, ``revision`` (what follows it in the package's version), ``flavour``, and ``family`` (how its
            packages' names start: ``nvidia``, ``nvidia-tesla-535``).
    """
    version = driver["version"] + driver["revision"]
    family = driver["family"]
    kernel = _modules(driver) if driver["flavour"] == "proprietary" else driver["open_package"]
    libraries = ("libcuda1", "libnvidia-ml1") if family == "nvidia" else (f"lib{family}-cuda1", f"lib{family}-ml1")
    names = (f"{family}-driver", kernel, f"{family}-kernel-support", *libraries, f"{family}-smi", *DAEMONS)
    return {name: version for name in names}


def _modules(driver: dict[str, Any]) -> str:
    """The package with the proprietary modules."""
    return f"{driver['family']}-kernel-dkms"


_SERVICE = """[Unit]
Description=NVIDIA Persistence Daemon
Wants=syslog.target

[Service]
Type=forking
ExecStart=/usr/bin/nvidia-persistenced --user nvpd --persistence-mode --verbose
ExecStartPre=/bin/mkdir -p /var/run/nvidia-persistenced
ExecStopPost=/bin/rm -rf /var/run/nvidia-persistenced

[Install]
WantedBy=multi-user.target
"""


def divert() -> None:
    """Keeps the real daemons of packages to come out of the way of the machine's own."""
    for name in DAEMONS:
        path = f"/usr/bin/{name}"
        argv = ["dpkg-divert", "--local", "--no-rename", "--divert", f"{path}.real", "--add", path]
        subprocess.run(argv, check=True, stdout=subprocess.DEVNULL, env=_ENVIRONMENT)


def install(driver: dict[str, Any]) -> None:
    """Makes the stand-ins of a driver and installs them with ``dpkg``; others of the same names are replaced.

    Raises:
        subprocess.CalledProcessError: ``dpkg`` refused.
    """
    wanted = stand_ins(driver)
    present = installed(Path("/"))
    obsolete = [name for name in (_modules(driver), driver["open_package"]) if name in present and name not in wanted]
    if obsolete:
        _dpkg("--purge", "--force-depends", *obsolete)
    missing = {name: version for name, version in wanted.items() if present.get(name) != version}
    if not missing:
        return
    with tempfile.TemporaryDirectory(prefix="fake-v100-") as folder:
        files = [_build(Path(folder), name, version, driver["version"]) for name, version in missing.items()]
        _dpkg("--install", *files)


def purge() -> None:
    """Removes every stand-in; real packages stay."""
    try:
        status = Path("/var/lib/dpkg/status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return
    names = [
        match.group(1)
        for paragraph in status.split("\n\n")
        if STAND_IN in paragraph
        for match in [re.search(r"^Package: (.*)$", paragraph, re.M)]
        if match
    ]
    if names:
        _dpkg("--purge", "--force-depends", "--force-hold", *names)


def _build(folder: Path, name: str, version: str, driver: str) -> str:
    tree = folder / name
    (tree / "DEBIAN").mkdir(parents=True)
    (tree / "DEBIAN/control").write_text(
        f"Package: {name}\nVersion: {version}\nArchitecture: amd64\nSection: non-free/libs\nPriority: optional\n"
        f"Maintainer: v100ctl lab <root@localhost>\nDescription: {STAND_IN}\n",
        encoding="utf-8",
    )
    if name.startswith("libnvidia-") and name.endswith("ml1"):
        libraries = tree / "usr/lib/x86_64-linux-gnu"
        libraries.mkdir(parents=True)
        (libraries / f"libnvidia-ml.so.{driver}").write_text("a stand-in\n", encoding="utf-8")
        (libraries / "libnvidia-ml.so.1").symlink_to(f"libnvidia-ml.so.{driver}")
    elif name == "nvidia-persistenced":
        (tree / "lib/systemd/system").mkdir(parents=True)
        (tree / "lib/systemd/system/nvidia-persistenced.service").write_text(_SERVICE, encoding="utf-8")
    path = folder / f"{name}.deb"
    subprocess.run(
        ["dpkg-deb", "--root-owner-group", "-Znone", "--build", str(tree), str(path)], check=True, stdout=subprocess.DEVNULL
    )
    shutil.rmtree(tree)
    return str(path)


def _dpkg(*arguments: str) -> None:
    subprocess.run(
        ["dpkg", "--force-confnew", "--force-downgrade", *arguments], check=True, stdout=subprocess.DEVNULL, env=_ENVIRONMENT
    )


_ENVIRONMENT = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "DEBIAN_FRONTEND": "noninteractive",
    "LC_ALL": "C",
}
