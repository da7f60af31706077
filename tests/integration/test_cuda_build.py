"""llama.cpp really compiled for a V100 with CUDA 11.8, in a container on this machine, and started where there is no toolkit.

About 52 minutes of processor time when no compiled object is kept in the volume `v100ctl-ccache`, and 1.6 GB of packages once.
"""

from __future__ import annotations

import faulthandler
import json
import subprocess
import tarfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.toy_engine import SCRIPT, build_spec, cuda_source_files, tree_sha256, write_archive
from tests.unit.factory import AS_OF, MODEL, make_facts
from v100ctl.apply.reporter import make_reporter
from v100ctl.artifacts import container as builders
from v100ctl.artifacts.fetch import fetch_source
from v100ctl.fleet import parse_config
from v100ctl.lab.containers import execute, put_file, remove_container
from v100ctl.lab.engine import ensure_docker
from v100ctl.plan import HostPlan, plan

from .hosts import on_host

if TYPE_CHECKING:
    from docker.models.containers import Container

    from v100ctl.lab.hosts import RunningHost

pytestmark = pytest.mark.slow

CARD = {"pci_address": "0000:06:00.0", "pci_id": "10de:1db1", "pci_class": "0302"}
APT = {
    "path": "/etc/apt/sources.list",
    "uri": "http://archive.example/debian",
    "suite": "bookworm",
    "components": ["main"],
    "origin": "Debian",
}
#: Somebody else's toolkit, first in everything that programs look at.
STRAY = {
    "PATH": "/stray/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "CUDACXX": "/stray/bin/nvcc",
    "CUDAHOSTCXX": "/stray/bin/g++",
    "CUDA_HOME": "/stray",
    "CUDA_PATH": "/stray",
    "NVCC_PREPEND_FLAGS": "-arch=sm_50",
    "NVCC_APPEND_FLAGS": "-arch=sm_50",
    "CPATH": "/stray/include",
    "LIBRARY_PATH": "/stray/lib",
    "LD_LIBRARY_PATH": "/stray/lib",
}


@pytest.fixture(scope="module")
def decided() -> HostPlan:
    """The plan of a Debian 12 host with one V100 for which a container compiles."""
    settings = {"context_length": 4096, "kv_cache_type_k": "q8_0", "kv_cache_type_v": "q8_0", "flash_attention": "on"}
    chat = {"model": MODEL, "gpus": [0], "settings": settings}
    values = {"llama_cpp_backend": "cuda", "llama_cpp_build_on": "container", "llm_server_instances": {"chat": chat}}
    found = plan("h1", parse_config("h1", values), make_facts(gpus=[CARD], apt_sources=[APT]), as_of=AS_OF)
    assert found.verdict != "refused", found.rules
    return found


@pytest.fixture(scope="module")
def builder(decided: HostPlan) -> Iterator[Container]:
    """A container of the builder's image, for builds that are driven by hand."""
    reporter = make_reporter()
    client = ensure_docker(reporter, install=True)
    image = builders.ensure_image(client, reporter, decided.releases[0].build["container"])
    made = client.containers.run(image, ["sleep", "infinity"], detach=True, init=True, network_mode="none", stop_signal="SIGKILL")
    try:
        yield made
    finally:
        remove_container(made)
        client.close()


def build(container: Container, spec: Mapping[str, Any], archive: Path, environment: Mapping[str, str] | None = None) -> Any:
    """Builds in the container with the role's script; the last status."""
    work = f"/srv/build/{spec['build_id']}"
    execute(container, ["mkdir", "-p", work])
    put_file(container, f"{work}/build_release.py", SCRIPT.read_bytes(), mode=0o755)
    put_file(container, f"{work}/asked.json", json.dumps(spec).encode(), mode=0o644)
    put_file(container, f"{work}/source.tar.gz", archive.read_bytes(), mode=0o644)
    script = f"/usr/bin/python3 -B {work}/build_release.py"
    start = f"{script} start --spec {work}/asked.json --archive {work}/source.tar.gz --work {work}"
    wait = f'while {script} status --work {work} | grep -q \'"state": "running"\'; do sleep 0.5; done'
    code, output = execute(container, ["sh", "-c", f"{start} && {wait}"], environment=dict(environment or {}))
    assert code == 0, output
    _, status = execute(container, ["sh", "-c", f"{script} status --work {work}"])
    return json.loads(status)


def toy(decided: HostPlan, architectures: str = "70", **changed: Any) -> dict[str, Any]:
    """A small project with a kernel, built as the plan has the engine built."""
    real = decided.releases[0].build
    files = cuda_source_files()
    linker = {name: value for name, value in real["cmake_options"].items() if name.endswith("_LINKER_FLAGS")}
    spec = build_spec(files, build_id="b4711-cuda-0123456789ab", backend="cuda", libc=real["libc"], cuda=dict(real["cuda"]))
    spec["source"]["tree_sha256"] = tree_sha256(files)
    spec["cmake_options"] = {**spec["cmake_options"], **linker, "CMAKE_CUDA_ARCHITECTURES": architectures}
    spec["cuda_architectures"] = architectures.split(";")
    return {**spec, **changed}


@pytest.fixture
def toy_archive(tmp_path: Path) -> Path:
    return write_archive(tmp_path / "toy.tar.gz", cuda_source_files())


def test_another_cuda_cannot_leak_in(builder: Container, decided: HostPlan, toy_archive: Path) -> None:
    execute(builder, ["mkdir", "-p", "/stray/bin", "/stray/include", "/stray/lib"])
    stray = b"#!/bin/sh\necho 'Cuda compilation tools, release 11.8, V11.8.89'; touch /stray/used; exit 1\n"
    for name in ("nvcc", "g++", "gcc", "c++", "cc", "ld", "ptxas", "cmake", "ninja", "ccache"):
        put_file(builder, f"/stray/bin/{name}", stray, mode=0o755)
    put_file(builder, "/stray/include/cuda_runtime.h", b"#error stray\n", mode=0o644)
    status = build(builder, toy(decided), toy_archive, STRAY)
    assert status["state"] == "done", status
    assert execute(builder, ["ls", "/stray"])[1].split() == ["bin", "include", "lib"], "nothing of it was started"
    _, text = execute(builder, ["cat", "/srv/build/b4711-cuda-0123456789ab/stage/release.json"])
    document = json.loads(text)
    assert document["cuda"]["version"] == "11.8.89"
    assert document["cuda"]["machine_code"] == document["cuda"]["ptx"] == {"sm_70": 1}
    assert set(document["cuda"]["libraries"]) == {"libcudart.so.11.0", "libcublas.so.11", "libcublasLt.so.11"}
    assert "libcuda.so.1" in document["needs"]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        # More than what was asked for, and less.
        ({"cuda_architectures": ["70-real"]}, "holds PTX for sm_70, which nobody asked for"),
        ({"cuda_architectures": ["70", "80"]}, "holds no machine code for sm_80"),
    ],
)
def test_what_was_not_asked_for_is_refused(
    builder: Container, decided: HostPlan, toy_archive: Path, changed: dict[str, Any], message: str
) -> None:
    status = build(builder, toy(decided, **changed), toy_archive)
    assert (status["state"], status["phase"]) == ("failed", "verify")
    assert message in status["message"]
    assert "archive" not in status


def test_an_old_option_name_fails_right_after_configuring(builder: Container, decided: HostPlan) -> None:
    """CMake itself only warns, and a build without the option would be compiled for half an hour."""
    real = {name: value for name, value in decided.releases[0].build.items() if name != "container"}
    options = {name: value for name, value in real["cmake_options"].items() if name != "GGML_CUDA_FORCE_MMQ"}
    spec = {**real, "build_id": "b11434-cuda-old", "cmake_options": {**options, "LLAMA_CUDA_FORCE_MMQ": "ON"}}
    status = build(builder, spec, fetch_source(spec))
    assert (status["state"], status["phase"]) == ("failed", "configure")
    assert "does not use the option `LLAMA_CUDA_FORCE_MMQ` (it knows `GGML_CUDA_FORCE_MMQ`)" in status["message"]


@pytest.fixture(scope="module")
def packed(decided: HostPlan) -> Path:
    """The real release, packed, in this user's cache."""
    # On a busy machine it takes longer than any other test may.
    faulthandler.cancel_dump_traceback_later()
    return builders.build_in_container(decided.releases[0].build, note=print)


def test_what_the_release_holds(packed: Path, tmp_path: Path) -> None:
    with tarfile.open(packed) as archive:
        names = set(archive.getnames())
        stream = archive.extractfile("release.json")
        assert stream is not None
        document = json.load(stream)
        archive.extractall(tmp_path, filter="data")
    cuda = document["cuda"]
    print(json.dumps({"cuda": cuda, "packed_bytes": packed.stat().st_size}, indent=1))
    assert set(cuda["machine_code"]) == set(cuda["ptx"]) == {"sm_70"}
    assert cuda["machine_code"]["sm_70"] > 100
    assert (cuda["version"], cuda["host_compiler"].split()[0]) == ("11.8.89", "g++-11")
    for library in ("libcudart.so.11.0", "libcublas.so.11", "libcublasLt.so.11"):
        assert f"lib/{library}" in names
        assert cuda["libraries"][library]["licence"] in names
        assert "11.8" in cuda["libraries"][library]["package"] or "11.11" in cuda["libraries"][library]["package"]
    assert "lib/libcuda.so.1" not in names
    assert "libcuda.so.1" in document["needs"]
    assert b"FORCE_MMQ" in (tmp_path / "lib/libggml-cuda.so.0").read_bytes()


def test_it_starts_where_there_is_no_toolkit(packed: Path, decided: HostPlan, make_lab_host: Callable[..., RunningHost]) -> None:
    host = make_lab_host()
    release = decided.releases[0].path
    for path, name in ((packed, "release.tar.gz"), (SCRIPT, "build_release.py")):
        subprocess.run([*host.ssh_command(), f"cat > /tmp/{name}"], stdin=path.open("rb"), check=True)
    sha256 = packed.with_name(packed.name + ".sha256").read_text(encoding="ascii").strip()
    install = f"python3 -B /tmp/build_release.py install --archive /tmp/release.tar.gz --sha256 {sha256} --release {release}"
    on_host(host, "apt-get update -qq && apt-get install -y -qq libgomp1 >/dev/null")
    # Without a driver it is not installed, and what is missing is said.
    refused = on_host(host, f"{install} 2>&1 || true; ls {release} 2>&1 || true")
    assert "lacks libcuda.so.1, which comes with the NVIDIA driver" in refused
    assert "No such file" in refused
    components = "sed -i -E '/^deb .* main/s/$/ contrib non-free/; /^Components:/s/$/ contrib non-free/'"
    on_host(host, f"{components} $(find /etc/apt -name '*.list' -o -name '*.sources')")
    on_host(host, "apt-get update -qq && apt-get install -y -qq --no-install-recommends libcuda1 >/dev/null")
    assert json.loads(on_host(host, install))["changed"] is True
    assert on_host(host, "ls /usr/lib/x86_64-linux-gnu | grep -E 'cublas|cudart' || true") == ""
    version = on_host(host, f"env -i {release}/bin/llama-server --version 2>&1")
    assert "11434" in version
    (instance,) = decided.instances
    on_host(host, " ".join(f"'{word}'" for word in instance.parser_argv) + " >/dev/null 2>&1")
    words = " ".join(f"'{word}'" for word in instance.argv)
    said = on_host(host, f"env -i {words} 2>&1 | head -c 20000 || true")
    assert "no CUDA-capable device is detected" in said
