"""Facts in, plan out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from v100ctl.fleet import parse_config
from v100ctl.plan import from_ansible, plan, probe_request
from v100ctl.plan.render import MANAGED_HEADER

from .factory import AS_OF, BARE_FACTS, MODEL, applied_facts, make_config, make_facts, make_plan, merge


def test_two_instances_on_one_port_are_refused() -> None:
    both = {"a": {"model": MODEL, "port": 8000}, "b": {"model": MODEL, "port": 8000}}
    config = parse_config("h1", {"llama_cpp_backend": "cpu", "llm_server_instances": both})
    assert "port-twice" in {rule.id for rule in make_plan(config=config).rules}
    apart = {"a": {"model": MODEL, "port": 8000}, "b": {"model": MODEL, "port": 8001}}
    config = parse_config("h1", {"llama_cpp_backend": "cpu", "llm_server_instances": apart})
    decided = make_plan(config=config)
    assert decided.verdict == "ok"
    assert len(decided.models) == 1, "one model for both"
    absent = {"a": {"model": MODEL}, "b": {"model": MODEL, "state": "absent"}}
    config = parse_config("h1", {"llama_cpp_backend": "cpu", "llm_server_instances": absent})
    decided = make_plan(config=config)
    assert decided.verdict == "ok"
    assert [unit.state for unit in decided.units] == ["started", "absent"]


def test_one_file_with_two_hashes_is_refused() -> None:
    def rules_of(second: str) -> set[str]:
        models = {"a": {"path": "/srv/x", "sha256": "ab" * 32}, "b": {"path": "/srv/x", "sha256": second}}
        both = {name: {"model": model, "port": 8000 + number} for number, (name, model) in enumerate(models.items())}
        config = parse_config("h1", {"llama_cpp_backend": "cpu", "llm_server_instances": both})
        return {rule.id for rule in make_plan(config=config).rules if rule.severity != "info"}

    assert "model-two-hashes" in rules_of("cd" * 32)
    assert rules_of("ab" * 32) == set()


def flags(argv: tuple[str, ...]) -> dict[str, str]:
    """The flags of an argv with their values; a switch has an empty one."""
    found: dict[str, str] = {}
    for word, following in zip(argv[1:], (*argv[2:], "--"), strict=True):
        if word.startswith("--"):
            found[word] = "" if following.startswith("--") else following
    return found


def test_settings_are_spelled_for_the_build() -> None:
    settings = {
        "context_length": 1024,
        "parallel": 3,
        "batch_size": 512,
        "ubatch_size": 256,
        "kv_cache_type_k": "q8_0",
        "kv_cache_type_v": "q8_0",
        "flash_attention": "on",
        "threads": 4,
        "threads_batch": 6,
        "load_mode": "none",
        "sampling": {"temperature": 0.8, "top_p": 1.0, "top_k": 40},
        "served_model_name": "tiny",
    }
    (instance,) = make_plan(config=make_config({"settings": settings, "extra_args": ["--log-prefix"]})).instances
    found = flags(instance.argv)
    assert found["--ctx-size"] == "3072", "the context is shared by the slots"
    expected = {
        "--parallel": "3",
        "--batch-size": "512",
        "--ubatch-size": "256",
        "--cache-type-k": "q8_0",
        "--cache-type-v": "q8_0",
        "--flash-attn": "on",
        "--threads": "4",
        "--threads-batch": "6",
        "--load-mode": "none",
        "--temp": "0.8",
        "--top-p": "1",
        "--top-k": "40",
        "--alias": "tiny",
        "--fit": "off",
    }
    assert {name: found.get(name) for name in expected} == expected
    assert instance.argv[-1] == "--log-prefix"
    assert "--gpu-layers" not in found, "a CPU build has no layers to offload"


def test_a_unified_cache_is_not_multiplied() -> None:
    (instance,) = make_plan(
        config=make_config({"settings": {"context_length": 1024, "parallel": 3, "kv_unified": True}})
    ).instances
    assert flags(instance.argv)["--ctx-size"] == "1024"
    assert "--kv-unified" in instance.argv


def test_threads_default_to_usable_physical_cores() -> None:
    (instance,) = make_plan().instances
    assert flags(instance.argv)["--threads"] == "20"
    (instance,) = make_plan(make_facts(cpu={"usable_count": 2})).instances
    assert flags(instance.argv)["--threads"] == "2"
    (instance,) = make_plan(make_facts(cpu={"physical_count": 0, "usable_count": 0})).instances
    assert flags(instance.argv)["--threads"] == "1"


def test_the_release_id_covers_what_decides_the_bytes() -> None:
    def build_id(facts: Any = None, **variables: Any) -> str:
        (release,) = make_plan(facts, make_config(**variables)).releases
        return release.build_id

    same = build_id()
    assert same.startswith("b11434-cpu-")
    assert build_id(make_facts(hostname="other", cpu={"model": "other"})) == same, "like hosts share one release"
    others = {
        build_id(make_facts(libc={"version": "2.41"})),
        build_id(llama_cpp_backend="cuda"),
        build_id(llama_cpp_backend="cuda", llama_cpp_force_mmq=False),
        build_id(llama_cpp_backend="cuda", llama_cpp_cuda_architectures="70-real"),
    }
    assert len(others | {same}) == 5


def test_cuda_options_are_todays_names() -> None:
    (release,) = make_plan(config=make_config(llama_cpp_backend="cuda")).releases
    options = release.build["cmake_options"]
    assert options["GGML_CUDA_FORCE_MMQ"] == "ON"
    assert options["CMAKE_CUDA_ARCHITECTURES"] == "70"
    assert not [name for name in options if name.startswith("LLAMA_CUDA")]


def test_the_digest_changes_with_what_needs_a_restart() -> None:
    def digest(instance: dict[str, Any] | None = None, **variables: Any) -> str:
        (found,) = make_plan(config=make_config(instance, **variables)).instances
        return found.digest

    same = digest()
    assert digest() == same
    assert digest({"settings": {"context_length": 2048}}) != same
    assert digest({"model": {"sha256": "cd" * 32}}) != same
    assert digest(llama_cpp_build_on="builder") == same


def test_host_json_is_reproducible_and_holds_no_secret() -> None:
    first, second = make_plan(), make_plan()
    assert first.host_json is not None
    assert first.host_json == second.host_json
    document = json.loads(first.host_json.content)
    assert document["instances"]["chat"]["digest"] == first.instances[0].digest
    assert AS_OF.isoformat() not in first.host_json.content, "a date would be drift"
    secret = make_plan(config=make_config({"extra_args": ["--api-key", "s3cret-key"]}))
    assert "s3cret-key" not in json.dumps(secret.to_role_variables())


def test_every_file_starts_with_the_constant_header() -> None:
    for file in make_plan().files:
        if file.path.endswith(".json"):
            # JSON knows no comments.
            assert json.loads(file.content)["comment"] == MANAGED_HEADER
            continue
        assert file.content.splitlines()[0] == f"# {MANAGED_HEADER}"


def test_an_instance_that_left_the_inventory_is_removed() -> None:
    decided = make_plan()
    config = make_config(llm_server_instances={})
    after = plan("h1", config, applied_facts(decided), as_of=AS_OF)
    assert [(unit.name, unit.state) for unit in after.units] == [("v100-chat.service", "absent")]


def test_a_unit_of_a_run_that_was_killed_is_removed_too() -> None:
    """The inventory drops an instance whose first run never got as far as recording its plan."""
    decided = make_plan()
    half = applied_facts(decided, host_json={"document": None})
    after = plan("h1", make_config(llm_server_instances={}), half, as_of=AS_OF)
    assert [(unit.name, unit.state) for unit in after.units] == [("v100-chat.service", "absent")]
    strange = {"/etc/systemd/system/v100-chat.service": {"content": "[Unit]\nDescription=somebody else's\n"}}
    after = plan(
        "h1",
        make_config(llm_server_instances={}),
        half.model_copy(update={"files": make_facts(files=strange).files}),
        as_of=AS_OF,
    )
    assert after.units == ()


def test_names_on_the_host_cannot_lead_to_other_paths() -> None:
    facts = make_facts(host_json={"document": {"instances": {"../../x": {}, "": {}, "A b": {}, "old": {}}}})
    assert [unit.instance for unit in make_plan(facts).units] == ["old", "chat"]


@pytest.mark.parametrize("document", [{}, {"instances": []}, {"instances": 5}, {"files": "x", "models": {}, "packages": 1}])
def test_a_damaged_host_json_is_no_obstacle(document: dict[str, Any]) -> None:
    assert make_plan(make_facts(host_json={"document": document})).verdict == "ok"


def test_fetched_models_are_named_by_their_hash() -> None:
    (model,) = make_plan().models
    assert model.path == "/var/lib/v100ctl/models/abababababab-tiny.gguf"
    hostile = {"model": {"url": "https://x.example/a%20b;rm&-rf/..", "sha256": "cd" * 32}}
    (model,) = make_plan(config=make_config(hostile)).models
    assert model.path.startswith("/var/lib/v100ctl/models/cdcdcdcdcdcd-")
    assert "/" not in model.path.removeprefix("/var/lib/v100ctl/models/")


def test_ansible_gets_the_same_plan() -> None:
    variables = {
        "inventory_hostname": "h1",
        "llama_cpp_backend": "cpu",
        "llm_server_instances": {"chat": {"model": MODEL}},
        "ansible_password": "s3cret",
    }
    document = from_ansible(variables, BARE_FACTS, AS_OF)
    assert document == make_plan().to_role_variables()
    json.dumps(document)


def test_the_probe_is_asked_for_what_the_inventory_names() -> None:
    request = probe_request(make_config({"listen": "0.0.0.0", "port": 9000}))
    assert request.models == ("/var/lib/v100ctl/models/abababababab-tiny.gguf",)
    assert request.health == {"chat": "http://127.0.0.1:9000/health"}
    assert probe_request(make_config({"listen": "::1"})).health == {"chat": "http://[::1]:8000/health"}


def test_a_setting_without_a_spelling_is_refused() -> None:
    # Build 10121 has one word for mlock, and that memory-maps as well.
    config = make_config({"settings": {"load_mode": "mlock"}}, llama_cpp_build=10121)
    decided = plan("h1", config, make_facts(), as_of=AS_OF)
    assert {rule.id for rule in decided.rules if rule.severity != "info"} == {"setting-unspelled"}
    assert decided.verdict == "refused"
    for build in (9851, 11053, 11434):
        config = make_config({"settings": {"load_mode": "mlock"}}, llama_cpp_build=build)
        assert plan("h1", config, make_facts(), as_of=AS_OF).verdict == "ok"


def test_merge_helper_keeps_the_base() -> None:
    assert merge({"a": {"b": 1, "c": 2}}, {"a": {"b": 3}}) == {"a": {"b": 3, "c": 2}}


def test_the_plan_counts_a_compiler_as_the_build_script_does() -> None:
    import runpy

    from v100ctl.plan.rules.host import BUILD_JOB_BYTES

    script = Path(__file__).parents[2] / "roles/llama_cpp/files/build_release.py"
    assert runpy.run_path(str(script))["JOB_MEMORY_BYTES"] == BUILD_JOB_BYTES
