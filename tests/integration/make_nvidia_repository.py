#!/usr/bin/env python3
"""Make a small apt repository that stands for NVIDIA's for Debian 12, signed with a key of its own. Runs on a lab host.

Names and versions are NVIDIA's; the dependencies are of the kind that its packages have, each on the others of its version. The
packages hold what a lab host's machine looks at: the management library, the daemon's unit, the pin of a branch.
"""

import argparse
import hashlib
import shutil
import subprocess
import tempfile
from pathlib import Path

SERVICE = """[Unit]
Description=NVIDIA Persistence Daemon

[Service]
Type=forking
ExecStart=/usr/bin/nvidia-persistenced --user nvpd --persistence-mode --verbose

[Install]
WantedBy=multi-user.target
"""
LIBRARIES = "/usr/lib/x86_64-linux-gnu"


def packages(version):
    """Name, version, dependencies, conflicts and files of each package of a driver."""
    same = f"(= {version}-1)"
    branch = version.partition(".")[0]
    pin = f"Package: *nvidia* libcuda1* cuda-drivers*\nPin: version {branch}.*\nPin-Priority: 1000\n"
    yield "nvidia-driver-pinning-" + branch, branch + "-1", "", "", {"/etc/apt/preferences.d/nvidia-pinning": pin}
    yield (
        "nvidia-driver-cuda",
        version + "-1",
        f"libcuda1 {same}, libnvidia-ml1 {same}, nvidia-persistenced {same}, nvidia-modprobe {same}, "
        f"nvidia-kernel-dkms {same} | nvidia-kernel-open-dkms {same}",
        "nvidia-smi",
        {},
    )
    yield "nvidia-kernel-dkms", version + "-1", "nvidia-kernel-support " + same, "nvidia-kernel-open-dkms", {}
    yield "nvidia-kernel-open-dkms", version + "-1", "nvidia-kernel-support " + same, "nvidia-kernel-dkms", {}
    yield "nvidia-kernel-support", version + "-1", "nvidia-modprobe " + same, "", {}
    yield "nvidia-modprobe", version + "-1", "", "", {}
    yield "nvidia-persistenced", version + "-1", "", "", {"/lib/systemd/system/nvidia-persistenced.service": SERVICE}
    yield "libcuda1", version + "-1", "libnvidia-ml1 " + same, "", {f"{LIBRARIES}/libcuda.so.{version}": "-\n"}
    yield "libnvidia-ml1", version + "-1", "", "", {f"{LIBRARIES}/libnvidia-ml.so.{version}": "-\n"}


def build(folder, name, version, depends, conflicts, files):
    """One package; returns its paragraph of the index."""
    fields = ["Package: " + name, "Version: " + version, "Architecture: amd64", "Maintainer: Tests <tests@example.org>"]
    fields += ["Depends: " + depends] if depends else []
    fields += [f"Conflicts: {conflicts}\nReplaces: {conflicts}"] if conflicts else []
    fields += ["Description: stand-in"]
    with tempfile.TemporaryDirectory() as root:
        for path, content in {"/DEBIAN/control": "\n".join([*fields, ""]), **files}.items():
            file = Path(root) / path.lstrip("/")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(content, encoding="utf-8")
        for path in files:
            if ".so." in path:
                name_of_link = path.rpartition("/")[2].partition(".so.")[0] + ".so.1"
                (Path(root) / path.lstrip("/")).with_name(name_of_link).symlink_to(path.rpartition("/")[2])
        Path(root).chmod(0o755)
        package = folder / f"{name}_{version}_amd64.deb"
        argv = ["dpkg-deb", "--root-owner-group", "-Znone", "--build", root, str(package)]
        subprocess.run(argv, check=True, stdout=subprocess.DEVNULL)
    raw = package.read_bytes()
    described = ["Filename: ./" + package.name, f"Size: {len(raw)}", "SHA256: " + hashlib.sha256(raw).hexdigest()]
    return "\n".join([*fields, *described, "", ""])


def gpg(*arguments):
    """What gpg printed."""
    argv = ["gpg", "--batch", "--yes", "--quiet", *arguments]
    return subprocess.run(argv, check=True, stdout=subprocess.PIPE).stdout.decode()


def make_key(name):
    """A key without a password; returns its fingerprint."""
    gpg("--passphrase", "", "--quick-generate-key", name + " <tests@example.org>", "ed25519", "sign", "never")
    listed = gpg("--with-colons", "--list-keys", name)
    return next(line.split(":")[9] for line in listed.splitlines() if line.startswith("fpr:"))


def main():
    """Makes the repository and its key, and a second key that stands for one that was rotated; prints both fingerprints."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("rotated", type=Path)
    parser.add_argument("versions", nargs="+")
    options = parser.parse_args()
    shutil.rmtree(str(options.folder), ignore_errors=True)
    options.folder.mkdir(parents=True)
    found = {}
    for version in options.versions:
        for name, number, depends, conflicts, files in packages(version):
            # A pin has the same version for every driver of its branch.
            if (name, number) not in found:
                found[name, number] = build(options.folder, name, number, depends, conflicts, files)
    index = "".join(found.values()).encode()
    (options.folder / "Packages").write_bytes(index)
    release = "Origin: NVIDIA\nLabel: NVIDIA CUDA\nArchitecture: amd64\nDate: Sun, 29 Nov 2026 00:00:00 UTC\nSHA256:\n"
    release += f" {hashlib.sha256(index).hexdigest()} {len(index)} Packages\n"
    (options.folder / "Release").write_text(release, encoding="utf-8")
    key = make_key("Mirror")
    gpg("--local-user", key, "--clearsign", "--output", str(options.folder / "InRelease"), str(options.folder / "Release"))
    (options.folder / "mirror.asc").write_text(gpg("--armor", "--export", key), encoding="utf-8")
    rotated = make_key("Rotated")
    options.rotated.write_text(gpg("--armor", "--export", rotated), encoding="utf-8")
    print(key, rotated)


if __name__ == "__main__":
    main()
