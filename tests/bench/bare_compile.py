#!/usr/bin/env python3
"""The compile that `try` does, alone and by hand: cmake and ninja in a lab host, for `bench.py cold-try`.

bare_compile.py --prepare    a lab host with the toolchain and the unpacked source (not timed)
bare_compile.py              configure and compile from nothing (timed)
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "src"))

HOST = "bench"
CONTAINER = f"v100ctl-{HOST}"


def in_host(command: str, stdin: bytes | None = None) -> None:
    """Run a shell command as root in the lab host."""
    argv = ["docker", "exec", "--interactive", CONTAINER, "sh", "-ec", command]
    subprocess.run(argv, input=stdin, check=True, stdout=sys.stderr)


def main() -> None:
    """Prepare or compile."""
    from v100ctl.catalog import load_catalog

    row = load_catalog().llama_cpp[0]
    if sys.argv[1:] == ["--prepare"]:
        subprocess.run([sys.executable, "-m", "v100ctl.lab", "up", HOST], check=True, stdout=sys.stderr)
        build = {
            "engine": "llama_cpp",
            "build_number": row.build,
            "source": {
                "archives": [archive.model_dump(exclude_none=True) for archive in row.archives],
                "tree_sha256": row.tree_sha256,
            },
        }
        fetch = [sys.executable, "-m", "v100ctl.artifacts", "fetch-source", "--json", json.dumps(build)]
        archive = json.loads(subprocess.run(fetch, check=True, capture_output=True).stdout)["path"]
        in_host("apt-get -qq update; apt-get -qq install -y --no-install-recommends g++ cmake ninja-build >/dev/null")
        in_host("rm -rf /src; mkdir /src; tar -xz -C /src", Path(archive).read_bytes())
        return
    options = {**row.cmake_options.common, "LLAMA_BUILD_NUMBER": str(row.build), "LLAMA_BUILD_COMMIT": row.commit}
    configure = shlex.join(["cmake", "-G", "Ninja", "-B", "/compile", *(f"-D{key}={value}" for key, value in options.items())])
    in_host(
        f'rm -rf /compile; {configure} -S "$(dirname "$(find /src -path "*/ggml/CMakeLists.txt")")/.." >/dev/null;'
        f"ninja -C /compile {' '.join(row.targets)} >/dev/null"
    )


if __name__ == "__main__":
    main()
