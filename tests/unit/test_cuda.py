"""The toolkit that compiles on a host: where it comes from, where it lies, and who needs none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.unit.factory import AS_OF, MODEL, make_facts, merge
from v100ctl.compare import compare
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
    assert (found.action, found.manager, found.repository) == ("install", "apt", "non-free")
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
    assert "Components: non-free" in file.content
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
