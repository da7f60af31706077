"""A small CMake project laid out like the engine: a shared library, a program that names its build, an option, a licence.

It is really configured, compiled and started, in seconds instead of minutes.
"""

from __future__ import annotations

import hashlib
import importlib.util
import io
import json
import platform
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).resolve().parents[2] / "roles/llama_cpp/files/build_release.py"
BUILD_NUMBER = 4711
BUILD_ID = "b4711-cpu-0123456789ab"
#: Enough compiler runs that a test can look at a build, or end it, in the middle.
SLOW_FILES = 6

_CMAKE = """cmake_minimum_required(VERSION 3.14)
project(toy C CXX)
option(TOY_LOUD "print in capitals" OFF)
set(CMAKE_RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/bin)
set(CMAKE_LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/bin)
file(GLOB slow src/slow_*.cpp)
add_library(toy SHARED src/toy.c ${slow})
set_target_properties(toy PROPERTIES VERSION 0.3.1 SOVERSION 0)
add_executable(toy-server tools/server/main.c)
target_compile_definitions(toy-server PRIVATE "BUILD=\\"${LLAMA_BUILD_NUMBER}\\"")
target_link_libraries(toy-server toy)
"""

_FILES = {
    "CMakeLists.txt": _CMAKE,
    "LICENSE": "Do as you like.\n",
    "licenses/LICENSE-part": "As you like, too.\n",
    "src/toy.c": "const char *toy_name(void) { return TOY; }\n".replace("TOY", '"toy"'),
    "tools/server/main.c": (
        "#include <stdio.h>\nconst char *toy_name(void);\n"
        'int main(void) { printf("%s version (build " BUILD ")\\n", toy_name()); return 0; }\n'
    ),
    "README.md": "Not read by the compile.\n",
}


_CUDA_CMAKE = """cmake_minimum_required(VERSION 3.18)
project(toy C CXX)
option(TOY_LOUD "print in capitals" OFF)
set(CMAKE_RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/bin)
set(CMAKE_LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/bin)
# As the engine does it: whatever CUDA this finds gives headers and libraries, whichever compiler the next line takes.
find_package(CUDAToolkit REQUIRED)
enable_language(CUDA)
add_library(ggml-cuda SHARED src/scale.cu)
set_target_properties(ggml-cuda PROPERTIES VERSION 0.3.1 SOVERSION 0)
target_link_libraries(ggml-cuda PRIVATE CUDA::cudart CUDA::cublas CUDA::cuda_driver)
add_executable(toy-server tools/server/main.c)
target_compile_definitions(toy-server PRIVATE "BUILD=\\"${LLAMA_BUILD_NUMBER}\\"")
target_link_libraries(toy-server ggml-cuda)
"""

_CUDA_FILES = {
    "CMakeLists.txt": _CUDA_CMAKE,
    "LICENSE": "Do as you like.\n",
    "src/scale.cu": (
        "#include <cublas_v2.h>\n#include <cuda.h>\n#include <cuda_runtime.h>\n"
        "__global__ void scale(float *x) { x[threadIdx.x] *= 2; }\n"
        'extern "C" const char *toy_cards(void) {\n'
        "    int count = 0; CUdevice device; cublasHandle_t handle;\n"
        "    if (cudaGetDeviceCount(&count) != cudaSuccess) { return cudaGetErrorString(cudaGetLastError()); }\n"
        "    scale<<<1, 1>>>(nullptr); cublasCreate(&handle); cuDeviceGet(&device, 0);\n"
        '    return "cards";\n}\n'
    ),
    "tools/server/main.c": (
        "#include <stdio.h>\nconst char *toy_cards(void);\n"
        'int main(void) { printf("%s, version (build " BUILD ")\\n", toy_cards()); return 0; }\n'
    ),
}


def cuda_source_files() -> dict[str, str]:
    """The files of a like project with a kernel, linked with what the engine's CUDA backend is linked with."""
    return dict(_CUDA_FILES)


def source_files(*, slow: bool = False, **changed: str) -> dict[str, str]:
    """The project's files.

    Args:
        slow: With ``SLOW_FILES`` more sources, each half a second or more of a compiler's time.
        changed: Other contents, with ``__`` for ``/`` and ``_`` for ``.`` in a name (``src__toy_c`` is ``src/toy.c``).
    """
    files = dict(_FILES)
    for number in range(SLOW_FILES if slow else 0):
        files[f"src/slow_{number}.cpp"] = (
            f'#include <iostream>\n#include <map>\n#include <string>\nextern "C" void slow_{number}(const char *text) '
            f"{{ std::map<std::string, int> all; all[text] = {number}; std::cout << all.begin()->second; }}\n"
        )
    names = {name.replace("/", "__").replace(".", "_"): name for name in files}
    files.update((names[name], content) for name, content in changed.items())
    return files


def write_archive(path: Path, files: dict[str, str], top: str = "toy-1") -> Path:
    """Packs files below the folder ``top`` as .tar.gz."""
    with tarfile.open(path, "w:gz") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(f"{top}/{name}")
            member.size = len(content.encode())
            archive.addfile(member, io.BytesIO(content.encode()))
    return path


def tree_sha256(files: dict[str, str]) -> str:
    """The digest of these files that the build script has to find, computed apart from it. README.md is no build input."""
    lines = [f"{hashlib.sha256(content.encode()).hexdigest()}  {name}\n" for name, content in sorted(files.items())]
    return hashlib.sha256("".join(line for line in lines if not line.endswith("README.md\n")).encode()).hexdigest()


def build_spec(files: dict[str, str], **changed: Any) -> dict[str, Any]:
    """A specification to build the project on this machine."""
    spec: dict[str, Any] = {
        "schema": "v100ctl/build/1",
        "engine": "llama_cpp",
        "build_id": BUILD_ID,
        "build_number": BUILD_NUMBER,
        "commit": "b4711",
        "backend": "cpu",
        "source": {"archives": [{"kind": "url", "url": "", "strip": "toy-1"}], "tree_sha256": tree_sha256(files)},
        "cmake_options": {
            "BUILD_SHARED_LIBS": "ON",
            "CMAKE_BUILD_TYPE": "Release",
            "CMAKE_BUILD_WITH_INSTALL_RPATH": "ON",
            "CMAKE_INSTALL_RPATH": "$ORIGIN/../lib",
            "LLAMA_BUILD_NUMBER": str(BUILD_NUMBER),
            "TOY_LOUD": "ON",
        },
        "targets": ["toy-server"],
        "cuda_architectures": [],
        "machine": platform.machine(),
        "libc": "-".join(platform.libc_ver()),
        "licence": "MIT",
    }
    return spec | changed


class ToyBuild:
    """One build in a folder of its own, driven through the script's command line as the role does."""

    def __init__(self, folder: Path, *, files: dict[str, str] | None = None, **changed: Any) -> None:
        self.folder = folder
        self.work = folder / "work"
        self.files = files or source_files()
        self.spec = build_spec(self.files, **changed)
        self.archive = write_archive(folder / "source.tar.gz", self.files)
        self.patches: Path | None = None

    def call(self, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        """Runs a verb of the script."""
        return run_script(*arguments)

    def start(self) -> dict[str, Any]:
        """``start``, which has to be accepted."""
        spec = self.folder / "spec.json"
        spec.write_text(json.dumps(self.spec))
        patches = ["--patches", self.patches] if self.patches else []
        done = self.call("start", "--spec", spec, "--archive", self.archive, "--work", self.work, *patches)
        assert done.returncode == 0, done.stderr
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer

    def status(self) -> dict[str, Any]:
        """``status``."""
        answer: dict[str, Any] = json.loads(self.call("status", "--work", self.work).stdout)
        return answer

    def builder_pid(self) -> int:
        """The process that builds, or did last."""
        return int(json.loads((self.work / "builder.json").read_text())["pid"])

    def await_end(self) -> dict[str, Any]:
        """Polls until the build is done or failed and returns its last status."""
        return self.await_that(lambda status: status["state"] != "running")

    def await_that(self, condition: Any) -> dict[str, Any]:
        """Polls until ``condition(status)`` holds; fails after several minutes."""
        for _ in range(1500):
            status = self.status()
            if condition(status):
                return status
            time.sleep(0.1)
        raise AssertionError(f"still {status}")


def run_script(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Runs the build script in a process of its own."""
    argv = [sys.executable, "-B", str(SCRIPT), *map(str, arguments)]
    return subprocess.run(argv, text=True, capture_output=True, check=False, timeout=300)


def load_script() -> Any:
    """The build script as a module."""
    spec = importlib.util.spec_from_file_location("build_release_under_test", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
