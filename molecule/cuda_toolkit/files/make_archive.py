#!/usr/bin/env python3
"""Make a small package archive that stands in for Debian's 1.6 GB toolkit: real apt, another nvcc.

Its `nvidia-cuda-toolkit` depends on a driver library as Debian's own does; its nvcc has the host
compile what it is given, so that a kernel is not compiled for a card. The whole toolkit is installed by a test marked `slow`.
"""

import argparse
import hashlib
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

NVCC = """\
#!/bin/sh
# Stands in for nvcc: takes its arguments, and compiles the host's part of what it is given.
test "$1" = --version && { echo "Cuda compilation tools, release @VERSION@, V@VERSION@.89"; exit 0; }
while test $# -gt 0; do
  case "$1" in
    -gencode=arch=compute_70,code=sm_70) architecture=70 ;;
    -ccbin) compiler=$2; shift ;;
    -o) object=$2; shift ;;
    -c) ;;
    *) source=$1 ;;
  esac
  shift
done
test "$architecture" = 70 || { echo "no machine code for sm_70 was asked for" >&2; exit 1; }
grep -q __global__ "$source" || exit 1
echo 'int main() { return 0; }' | "$compiler" -x c++ -c -o "$object" -
"""

POSTINST = """\
#!/bin/sh
# As NVIDIA's packages do: the newest version takes the shared link.
update-alternatives --install /usr/local/cuda cuda /usr/local/cuda-@VERSION@ @PRIORITY@
"""


def build(folder, name, version, depends="", files=None, postinst=""):
    """One package."""
    with tempfile.TemporaryDirectory() as root:
        control = Path(root) / "DEBIAN"
        control.mkdir()
        fields = ["Package: " + name, "Version: " + version, "Architecture: amd64", "Maintainer: Tests <tests@example.org>"]
        fields += ["Depends: " + depends] if depends else []
        control.joinpath("control").write_text("\n".join([*fields, "Description: stand-in", ""]), encoding="utf-8")
        if postinst:
            control.joinpath("postinst").write_text(postinst, encoding="utf-8")
            control.joinpath("postinst").chmod(0o755)
        for path, content in (files or {}).items():
            file = Path(root) / path.lstrip("/")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(content, encoding="utf-8")
            file.chmod(0o755)
        Path(root).chmod(0o755)
        package = folder / f"{name}_{version.replace('~', '')}.deb"
        subprocess.run(["dpkg-deb", "--root-owner-group", "--build", root, str(package)], check=True, stdout=subprocess.DEVNULL)
    raw = package.read_bytes()
    described = [*fields, f"Filename: ./{package.name}", f"Size: {len(raw)}", f"SHA256: {hashlib.sha256(raw).hexdigest()}"]
    with (folder / "Packages").open("a", encoding="utf-8") as index:
        index.write("\n".join([*described, "Description: stand-in", "", ""]))


def toolkit(folder, version, depends):
    """NVIDIA's form of a toolkit, in a folder of its own, that takes the shared link."""
    digits = version.replace(".", "")
    postinst = POSTINST.replace("@VERSION@", version).replace("@PRIORITY@", digits)
    nvcc = {f"/usr/local/cuda-{version}/bin/nvcc": NVCC.replace("@VERSION@", version)}
    build(folder, "cuda-toolkit-" + version.replace(".", "-"), version + ".0-1", depends, nvcc, postinst)


def main(arguments):
    """The program; returns its exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args(arguments).folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    # The driver of the host, of which only a part is installed, and the same one in a later version.
    for version in ("535.216.01-1", "535.309.01-1"):
        build(folder, "nvidia-alternative", version)
        build(folder, "libcuda1", version, f"nvidia-alternative (= {version})")
    own = {"/usr/lib/nvidia-cuda-toolkit/bin/nvcc": NVCC.replace("@VERSION@", "11.8")}
    build(folder, "nvidia-cuda-toolkit", "11.8.89~11.8.0-5", "libcuda1 (>= 520)", own)
    toolkit(folder, "12.1", "")
    toolkit(folder, "12.9", "")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
