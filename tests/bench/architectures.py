#!/usr/bin/env python3
"""What compiling llama.cpp for a V100 alone saves against the project's own default list of architectures, from a few kernels.

    python3 tests/bench/architectures.py --build DIR [FILE.cu ...]

DIR is a build folder that was configured for cards (`/var/lib/v100ctl/build/BUILD_ID/build` of a build that has not ended, or
one's own), on the machine or in the container that has the toolkit. Each file is compiled by the command that ninja would run,
for one list after the other, so that a busy machine slows both alike. Prints processor seconds, object sizes and their ratios.
Standard library alone.
"""

from __future__ import annotations

import argparse
import json
import re
import resource
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

#: What ggml/src/ggml-cuda/CMakeLists.txt at b11434 sets for CUDA 11.8 where nothing is asked for, but 90-virtual:
#: its common.cuh calls `cudaGridDependencySynchronize` there, which Debian's 11.8 has not, so the list as it is ends in errors.
DEFAULT = ("50-virtual", "61-virtual", "70-virtual", "75-virtual", "80-virtual", "86-real", "89-real")
LISTS = {"70": ("70",), "70-real": ("70-real",), "default": DEFAULT}
#: A short kernel, matrix-vector products of every quantisation, and one instance of flash attention.
FILES = ("softmax.cu", "mmvq.cu", "fattn-vec-instance-f16-f16.cu")


def code_options(architectures: tuple[str, ...]) -> list[str]:
    """nvcc's options for architectures in CMake's words."""
    options = []
    for name in architectures:
        number, _, kind = name.partition("-")
        codes = {"": f"[compute_{number},sm_{number}]", "real": f"[sm_{number}]", "virtual": f"[compute_{number}]"}
        options.append(f"--generate-code=arch=compute_{number},code={codes[kind]}")
    return options


def command_of(build: Path, file: str) -> list[str]:
    """The words that compile a file, without ccache, architectures and what names its output."""
    targets = subprocess.run(
        ["ninja", "-C", str(build), "-t", "targets", "all"], capture_output=True, text=True, check=True
    ).stdout
    target = next((line.split(":")[0] for line in targets.splitlines() if line.split(":")[0].endswith(f"/{file}.o")), None)
    if target is None:
        sys.exit(f"{build} compiles no {file}")
    said = subprocess.run(
        ["ninja", "-C", str(build), "-t", "commands", target], capture_output=True, text=True, check=True
    ).stdout
    words = shlex.split(said.strip().splitlines()[-1].split("&&")[-1])
    if words[0].endswith("ccache"):
        words = words[1:]
    words = [word for word in words if not re.match(r"--generate-code=|-MD$", word)]
    for option in ("-MT", "-MF", "-o"):
        if option in words:
            position = words.index(option)
            del words[position : position + 2]
    return words


def measure(build: Path, words: list[str], architectures: tuple[str, ...]) -> tuple[float, int]:
    """Processor seconds of one compile, and the size of its object in bytes."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder, "x.o")
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([*words, *code_options(architectures), "-o", str(target)], cwd=build, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, target.stat().st_size


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Compile time and size of one architecture against the default list")
    parser.add_argument("--build", type=Path, required=True)
    parser.add_argument("--json", type=Path, help="also write the figures there")
    parser.add_argument("files", nargs="*", default=list(FILES))
    given = parser.parse_args()
    found: dict[str, dict[str, tuple[float, int]]] = {}
    for file in given.files:
        words = command_of(given.build, file)
        found[file] = {name: measure(given.build, words, architectures) for name, architectures in LISTS.items()}
        for name, (seconds, size_bytes) in found[file].items():
            print(f"{file:34} {name:8} {seconds:8.1f} s {size_bytes / 1024:10.0f} KiB", flush=True)
    for name in ("70", "70-real"):
        seconds = sum(item["default"][0] for item in found.values()) / sum(item[name][0] for item in found.values())
        size = sum(item["default"][1] for item in found.values()) / sum(item[name][1] for item in found.values())
        print(f"the default list against {name}: {seconds:.1f} times the processor time, {size:.1f} times the size")
    if given.json:
        given.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
