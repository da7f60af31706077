#!/usr/bin/env python3
"""Ask a CUDA toolkit for its version and let it compile a kernel, in an environment that nothing else speaks into.

Standard library only, Python >= 3.8. Exit code 0 and ``{"version": ...}`` when the toolkit is the one that was asked for and
compiles; 1 and ``{"problem": ...}`` when it is not. The compiled object is thrown away.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

LIMIT_S = 300
#: Includes what breaks where toolkit and C library do not fit: the math headers. Without the host compiler it does not compile.
KERNEL = """\
#include <cmath>
#include <cuda_runtime.h>
__global__ void scale(float *values, float factor) { values[threadIdx.x] *= cospif(factor); }
int main() { scale<<<1, 32>>>(nullptr, std::cos(1.0f)); return cudaGetLastError(); }
"""


class Unusable(Exception):
    """The toolkit cannot be used; the text says why."""


def release_of(output: str) -> str:
    """The release in what ``nvcc --version`` prints (``release 11.8, V11.8.89``), empty where there is none."""
    found = re.search(r"\brelease ([0-9]+\.[0-9]+)\b", output)
    return found.group(1) if found else ""


def code_flags(architectures: "list[str]") -> "list[str]":
    """nvcc's flags for machine code of each architecture (``70``)."""
    return [f"-gencode=arch=compute_{number},code=sm_{number}" for number in architectures]


def run(argv: "list[str]", folder: str, search_path: str) -> str:
    """What a program printed.

    Raises:
        Unusable: it is missing, failed or took too long.
    """
    # A toolkit that is on the caller's PATH or in its NVCC_APPEND_FLAGS must not take part: two of them on one path mix.
    environment = {"PATH": search_path, "LC_ALL": "C", "TMPDIR": folder, "HOME": folder}
    try:
        done = subprocess.run(
            argv,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=LIMIT_S,
            check=False,
        )
    except OSError as error:
        raise Unusable(f"`{argv[0]}` does not start: {error.strerror}") from None
    except subprocess.TimeoutExpired:
        raise Unusable(f"`{argv[0]}` did not end within {LIMIT_S} s") from None
    output = done.stdout.decode("utf-8", "replace")
    if done.returncode != 0:
        raise Unusable("`{}` failed: {}".format(" ".join(argv), output.strip()[-2000:]))
    return output


def verify(nvcc: str, version: str, host_compiler: str, architectures: "list[str]") -> str:
    """The toolkit's release, which is ``version`` and compiles for ``architectures``.

    Raises:
        Unusable: it is another one, or does not compile.
    """
    search_path = os.pathsep.join([str(Path(nvcc).parent), "/usr/bin", "/bin"])
    folder = tempfile.mkdtemp(prefix="v100ctl-cuda-")
    try:
        release = release_of(run([nvcc, "--version"], folder, search_path))
        if release != version:
            raise Unusable("{} is CUDA {}, not {}".format(nvcc, release or "of an unknown release", version))
        (Path(folder) / "probe.cu").write_text(KERNEL, encoding="ascii")
        argv = [nvcc, *code_flags(architectures), "-ccbin", host_compiler, "-c", "-o", "probe.o", "probe.cu"]
        run(argv, folder, search_path)
        if not (Path(folder) / "probe.o").stat().st_size:
            raise Unusable(f"{nvcc} wrote an empty object")
    except OSError as error:
        raise Unusable(str(error)) from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return release


def main(arguments: "list[str]") -> int:
    """The program; returns its exit code."""
    parser = argparse.ArgumentParser(description="Ask a CUDA toolkit for its version and let it compile a kernel.")
    parser.add_argument("--nvcc", required=True)
    parser.add_argument("--version", required=True)
    parser.add_argument("--host-compiler", required=True)
    parser.add_argument("--architecture", action="append", required=True, dest="architectures")
    options = parser.parse_args(arguments)
    try:
        print(json.dumps({"version": verify(options.nvcc, options.version, options.host_compiler, options.architectures)}))
    except Unusable as error:
        print(json.dumps({"problem": str(error)}))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
