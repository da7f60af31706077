"""Engines that the user brings: what the inventory may say of them, and the command line and release that follow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from v100ctl.catalog import load_catalog
from v100ctl.compare import compare
from v100ctl.errors import InventoryError
from v100ctl.fleet import PLACEHOLDER, PLACEHOLDERS, load_fleet, names_a_secret, parse_config
from v100ctl.plan import DIGEST_VARIABLE, external, probe_request
from v100ctl.plan.types import HostPlan

from .factory import MODEL, make_config, make_facts, make_plan

SOURCE = {"url": "https://engines.example/engine-1.tar.gz", "sha256": "cd" * 32, "kind": "archive"}
ARGV = ["{release}/bin/server", "--model", "{model}", "--listen", "{listen}:{port}"]


def definition(**keys: Any) -> dict[str, Any]:
    return {"source": SOURCE, "argv": ARGV, "backend": "cpu", **keys}


def decided(instance: dict[str, Any] | None = None, **keys: Any) -> HostPlan:
    """The plan of an instance ``chat`` of an engine ``mine`` on the processor."""
    chat = {"engine": "external", "external": "mine", **(instance or {})}
    return make_plan(config=make_config(chat, external_engine_definitions={"mine": definition(**keys)}))


WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"argv": ["{release}/bin/server", "{modle}"]}, "argv.1", "did you mean `{model}`?"),
    ({"argv": ["{release}/bin/server", "{MODEL}"]}, "argv.1", "did you mean `{model}`?"),
    ({"argv": ["{release}/bin/server", "{zzz}"]}, "argv.1", "Known: release, model"),
    ({"argv": []}, "argv", "at least 1 item"),
    ({"argv": "server --port 1"}, "argv", "valid tuple"),
    ({"argv": ["bin/server"]}, "", "must be a program"),
    ({"argv": ["{release}/../server"]}, "", "must not lead out of the release"),
    ({"argv": [*ARGV, "--api-key", "x"]}, "", "`--api-key` in `argv` would show a secret"),
    ({"argv": [*ARGV, "--api_key=x"]}, "", "`--api_key` in `argv` would show a secret"),
    ({"env": {"HF_TOKEN": "x"}}, "", "`HF_TOKEN` in `env` would show a secret"),
    ({"env": {"CUDA_VISIBLE_DEVICES": "0"}}, "", "is set by the plan, from `gpus`"),
    ({"env": {"A B": "0"}}, "", "no name of an environment variable"),
    ({"env": {"A": "{nothing}"}}, "env.A", "`{nothing}` is no placeholder"),
    ({"check": ["{release}/bin/server", "{port}"]}, "", "it knows `{release}` and not `{port}`"),
    ({"must_log": ["("]}, "must_log.0", "is no regular expression"),
    ({"must_not_log": [""]}, "must_not_log.0", "must not be empty"),
    ({"health_path": "health"}, "health_path", "match pattern"),
    ({"min_driver": "570+"}, "min_driver", "match pattern"),
    ({"helth_path": "/"}, "helth_path", "no such key"),
    ({"source": {"url": "https://e.example/x", "kind": "file"}}, "source.sha256", "is missing"),
    ({"source": {"url": "https://e.example/x", "sha256": "cd" * 32}}, "source.kind", "is missing"),
    ({"source": {**SOURCE, "path": "/x"}}, "source", "exactly one of"),
    ({"source": {**SOURCE, "url": "ftp://e.example/x"}}, "source", "must start with https://"),
    ({"source": {**SOURCE, "kind": "image"}}, "source", "a container image is not supported"),
    ({"source": {**SOURCE, "kind": "wheel"}}, "source", "a wheel is a .zip"),
    ({"source": {**SOURCE, "kind": "file", "strip_components": 1}}, "source", "belongs to `kind: archive`"),
    ({"source": {"from_controller": "engine", "sha256": "cd" * 32, "kind": "file"}}, "source.from_controller", "absolute path"),
]


@pytest.mark.parametrize(("keys", "where", "says"), WRONG, ids=[says for _, _, says in WRONG])
def test_what_is_wrong_is_named_with_its_place(keys: dict[str, Any], where: str, says: str) -> None:
    with pytest.raises(InventoryError) as caught:
        parse_config("h1", {"external_engine_definitions": {"mine": definition(**keys)}})
    place = ".".join(part for part in ("external_engine_definitions.mine", where) if part)
    assert f"`{place}`: " in caught.value.message
    assert says in f"{caught.value.message} {caught.value.hint}"


def test_a_wrong_word_is_named_with_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "hosts.yml"
    path.write_text(
        "all:\n  hosts: {h1: }\n  vars:\n    external_engine_definitions:\n      mine:\n"
        f"        source: {{url: {SOURCE['url']}, sha256: {SOURCE['sha256']}, kind: archive}}\n"
        "        argv:\n          - '{release}/server'\n          - '{prot}'\n"
    )
    with pytest.raises(InventoryError, match=r"did you mean `\{port\}`\? \(.*hosts\.yml:9:13\)"):
        load_fleet([path])
    path.write_text(path.read_text().replace("{prot}", "{port}").replace("external_engine_def", "external_engines_def"))
    with pytest.raises(InventoryError, match="`external_engines_definitions` is not known"):
        load_fleet([path])


@pytest.mark.parametrize("word", ["--api-key", "--api_key=x", "--hf-token", "--password", "--token", "API_KEY", "OPENAI_API_KEY"])
def test_names_of_secrets(word: str) -> None:
    assert names_a_secret(word)


@pytest.mark.parametrize(
    "word", ["--max-num-batched-tokens", "--tokens", "--bos-token-id", "--tokenizer", "--api-key-file", "--port"]
)
def test_names_that_are_no_secrets(word: str) -> None:
    assert not names_a_secret(word)


def test_the_command_line_is_filled_word_by_word() -> None:
    (instance,) = decided(
        {
            "port": 8123,
            "settings": {
                "context_length": 2048,
                "sampling": {"temperature": 0.5},
                "metrics": True,
                "served_model_name": "{port} $x",
            },
            "extra_args": ["--more", "{port}"],
        },
        argv=[
            *ARGV,
            "--name={alias}",
            "--ctx={context_length}",
            "-t",
            "{sampling.temperature}",
            "{metrics}",
            '{"json": {}}',
            "a b;c",
        ],
        env={"LD_LIBRARY_PATH": "{release}/lib", "SLOTS": "{parallel}"},
    ).instances
    release = instance.release_path
    assert instance.argv == (
        f"{release}/bin/server",
        "--model",
        "/var/lib/v100ctl/models/abababababab-tiny.gguf",
        "--listen",
        "127.0.0.1:8123",
        # A value is never looked at again, and no shell reads any of it.
        "--name={port} $x",
        "--ctx=2048",
        "-t",
        "0.5",
        "true",
        '{"json": {}}',
        "a b;c",
        "--more",
        "{port}",
    )
    assert instance.environment["LD_LIBRARY_PATH"] == f"{release}/lib"
    assert instance.environment["SLOTS"] == "1"
    assert not set(instance.environment) & {"CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"}


def test_a_unit_is_written_and_nothing_is_compiled() -> None:
    plan = decided()
    (release,) = plan.releases
    assert (plan.verdict, plan.cuda, plan.driver) == ("ok", None, None)
    assert (release.engine, release.path) == ("external", f"/opt/v100ctl/engines/external/{release.build_id}")
    assert release.toolchain_packages == ()
    unit = next(file for file in plan.files if file.path.endswith("v100-chat.service"))
    assert f"ExecStart={release.path}/bin/server" in unit.content


def test_the_release_is_named_by_its_bytes_and_layout() -> None:
    def build_id(**keys: Any) -> str:
        (release,) = decided(**keys).releases
        return release.build_id

    plain = build_id()
    assert plain.startswith("mine-")
    # How it is started, and where it was fetched, change no byte of it.
    assert build_id(argv=[*ARGV, "--fast"]) == plain
    assert build_id(source={**SOURCE, "url": "https://mirror.example/other-name.tar.gz"}) == plain
    others = [
        build_id(source={**SOURCE, **change}) for change in ({"sha256": "ef" * 32}, {"strip_components": 1}, {"kind": "file"})
    ]
    assert len({plain, *others}) == 4


def test_two_instances_share_a_release() -> None:
    one = {"engine": "external", "external": "mine", "model": MODEL}
    instances = {"a": {**one, "port": 8001}, "b": {**one, "port": 8002, "settings": {"parallel": 2}}}
    config = parse_config("h1", {"external_engine_definitions": {"mine": definition()}, "llm_server_instances": instances})
    plan = make_plan(config=config)
    assert len(plan.releases) == 1
    assert {instance.release_path for instance in plan.instances} == {plan.releases[0].path}


def test_what_the_command_line_names_of_the_release_has_to_be_in_it() -> None:
    argv = ["/usr/bin/python3", "{release}/serve.py", "--lib", "{release}/lib", "--log", "{release}/{alias}", "--port={port}"]
    (release,) = decided(argv=argv, check=["{release}/bin/check", "--all"], env={"A": "{release}", "B": "{port}"}).releases
    assert release.build["programs"] == ["bin/check"]
    assert release.build["paths"] == ["lib", "serve.py"]
    assert release.build["check_environment"] == {"A": "{release}"}


def test_the_inventory_wins_over_the_profile() -> None:
    catalog = load_catalog()
    profile = catalog.profiles["pxq-16gb-256k"]
    config = make_config(
        {"engine": "external", "external": "mine"},
        external_engine_definitions={"mine": {"source": SOURCE, "min_driver": "535", "must_log": ["pxq kernel active"]}},
    )
    engine = external.engine_of(config.llm_server_instances["chat"], config.external_engine_definitions, profile)
    assert engine is not None
    assert profile.external is not None
    assert engine.argv == profile.external.argv
    assert (engine.needs.driver, engine.needs.glibc, engine.health_path) == ("535", "2.35", "/health")
    assert engine.must_log == ("pxq kernel active",)


def test_the_probe_asks_each_engine_at_its_own_path() -> None:
    definitions = {"mine": definition(health_path="/ready")}
    config = parse_config(
        "h1",
        {
            "external_engine_definitions": definitions,
            "llm_server_instances": {
                "chat": {"model": MODEL, "port": 8000},
                "own": {"model": MODEL, "port": 8001, "engine": "external", "external": "mine"},
                "none": {"model": MODEL, "port": 8002, "engine": "external", "external": "other"},
                "profile": {"model": MODEL, "port": 8003, "external": "mine", "profile": "pxq-16gb-256k"},
            },
        },
    )
    assert probe_request(config).health == {
        "chat": "http://127.0.0.1:8000/health",
        "own": "http://127.0.0.1:8001/ready",
        "profile": "http://127.0.0.1:8003/ready",
    }


KNOWN = {name: f"<{name}>" for name in PLACEHOLDERS}


@given(st.lists(st.one_of(st.text(), st.sampled_from(PLACEHOLDERS).map(lambda name: f"{{{name}}}"))))
def test_only_placeholders_change(parts: list[str]) -> None:
    word = "\x00".join(parts)
    filled = external.filled(word, KNOWN | {name: f"<{name}>" for name in PLACEHOLDER.findall(word)})
    assert filled == "\x00".join(PLACEHOLDER.sub(lambda match: f"<{match[1]}>", part) for part in parts)


def test_an_interpreter_of_the_host_is_the_planned_program() -> None:
    plan = decided(argv=["/usr/bin/python3", "-m", "engine", "--port={port}"], env={"PYTHONPATH": "{release}"})
    (instance,) = plan.instances
    process = {"pid": 1, "unit": instance.unit, "executable": "/usr/bin/python3.11", "argv": instance.argv, "user": "v100"}
    process["environ"] = {DIGEST_VARIABLE: instance.digest}

    def ids(**changes: Any) -> set[str]:
        facts = make_facts(processes=[process | changes])
        return {finding.id for finding in compare(plan, facts) if finding.layer == "process"}

    assert ids() == set()
    assert ids(argv=[*instance.argv, "-x"]) == {"process.executable:chat"}
    assert ids(executable_deleted=True) == {"process.executable:chat"}


def test_the_engine_may_make_its_own_model() -> None:
    prepare = {"argv": ["{release}/bin/quantize", "--bits", "4", "{input}", "{output}"], "output": "model.own"}
    plan = decided({"model": {**MODEL, "prepare": prepare}})
    (instance,) = plan.instances
    made = next(model for model in plan.models if model.source["kind"] == "prepared")
    assert made.source["argv"][0] == f"{plan.releases[0].path}/bin/quantize"
    assert made.path.endswith("model.own")
    assert instance.argv[:3] == (f"{plan.releases[0].path}/bin/server", "--model", made.path)


def test_log_lines_are_part_of_the_proof() -> None:
    (instance,) = decided(must_log=["sm_70"], must_not_log=["fall.*back"]).instances
    # On the processor there is no card whose memory it could hold.
    assert (instance.proof.on_cards, instance.proof.must_log, instance.proof.must_not_log) == (False, ("sm_70",), ("fall.*back",))
