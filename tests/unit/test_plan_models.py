"""From a model in the inventory to the files, steps and removals of a plan."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from v100ctl.compare import compare
from v100ctl.fleet import InstanceSpec, ModelSpec
from v100ctl.plan import HostPlan
from v100ctl.plan.models import model_path, model_specs

from .factory import make_config, make_facts, make_plan

A, B, C = "ab" * 32, "cd" * 32, "ef" * 32
SOURCE = {"url": "https://models.example/tiny-F16.gguf", "sha256": A, "size_bytes": 1000}
STORE = "/var/lib/v100ctl/models"


def spec(**keys: Any) -> ModelSpec:
    return ModelSpec.model_validate(keys)


def planned(model: dict[str, Any], facts: Any = None, **variables: Any) -> HostPlan:
    config = make_config({"model": {**dict.fromkeys(("url", "sha256", "size_bytes")), **model}}, **variables)
    return make_plan(facts, config)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ({"url": "https://x/a.gguf"}, "`sha256` is missing"),
        ({"url": "https://x/a.gguf", "sha256": A, "files": {"a.gguf": A}}, "not both"),
        ({"url": "https://x/a.gguf", "path": "/x", "sha256": A}, "exactly one of"),
        ({"hf": {"repo": "a/b"}, "sha256": A}, "no `sha256` of its own"),
        ({"hf": {"repo": "b"}}, "hf.repo"),
        ({"hf": {"repo": "a/b", "file": "../x.gguf"}}, "plain name"),
        ({"hf": {"repo": "a/b", "file": "x.gguf", "include": ["*"]}}, "`include` goes with a whole repository"),
        ({"path": "/srv/m", "files": {"../x": A}}, "plain name"),
        ({"path": "/srv/m", "files": {"/x": A}}, "plain name"),
        ({"path": "/srv/m", "files": {"x": "ab"}}, "64 hexadecimal digits"),
        ({"path": "/srv/m", "files": "what is this"}, "`sha256sum` prints"),
        ({"from_host": {"host": "h2", "path": "x.gguf"}, "sha256": A}, "absolute path"),
        ({**SOURCE, "prepare": {}}, "exactly one of `quantize` and `argv`"),
        ({**SOURCE, "prepare": {"quantize": "Q4_K_M", "argv": ["x"]}}, "exactly one of `quantize` and `argv`"),
        ({**SOURCE, "prepare": {"argv": ["x", "{input}"], "output": "x"}}, "where `{input}` and `{output}` go"),
        ({**SOURCE, "prepare": {"argv": ["x", "{input}", "{output}"]}}, "needs `output`"),
        ({**SOURCE, "prepare": {"argv": ["x", "{input}", "{output}"], "output": "x", "pure": True}}, "only with `quantize`"),
        ({**SOURCE, "prepare": {"argv": ["x", "{input}", "{output}", "{imatrix}"], "output": "x"}}, "belong together"),
        ({**SOURCE, "prepare": {"argv": ["x", "{input}", "{output}"], "output": "../x"}}, "output"),
    ],
)
def test_what_cannot_be_meant_is_refused(model: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError) as caught:
        spec(**model)
    text = "; ".join(f"{'.'.join(map(str, error['loc']))}: {error['msg']}" for error in caught.value.errors())
    assert said in text


def test_files_may_be_what_sha256sum_prints() -> None:
    text = f"{A}  config.json\n{B} *sub dir/model.safetensors\n\n{C}  ./tokenizer.json\n"
    assert spec(path="/srv/m", files=text).files == {"config.json": A, "sub dir/model.safetensors": B, "tokenizer.json": C}


@pytest.mark.parametrize(
    ("model", "path"),
    [
        ({"path": "/srv/x.gguf", "sha256": A}, "/srv/x.gguf"),
        ({"path": "/srv/m", "files": {"config.json": A}}, "/srv/m"),
        ({"path": "/srv/m", "files": {"b-00002-of-00002.gguf": A, "b-00001-of-00002.gguf": B}}, "/srv/m/b-00001-of-00002.gguf"),
        (
            {"path": "/srv/m/b-00001-of-00002.gguf", "files": {"b-00002-of-00002.gguf": A, "b-00001-of-00002.gguf": B}},
            "/srv/m/b-00001-of-00002.gguf",
        ),
        ({"url": "https://x/a.gguf?download=true", "sha256": A}, f"{STORE}/abababababab-a.gguf"),
        ({"hf": {"repo": "o/n", "file": "Q4/a.gguf"}, "sha256": A}, f"{STORE}/abababababab-a.gguf"),
        ({"from_host": {"host": "h2", "path": "/srv/a.gguf"}, "sha256": A}, f"{STORE}/abababababab-a.gguf"),
    ],
)
def test_where_a_model_lies(model: dict[str, Any], path: str) -> None:
    assert model_path(spec(**model)) == path


def test_the_files_of_a_split_model_lie_in_a_folder_under_their_own_names() -> None:
    files = {"big-00001-of-00002.gguf": A, "big-00002-of-00002.gguf": B}
    decided = planned({"url": "https://x/dir/big-00001-of-00002.gguf?sig=1", "files": files})
    (model,) = decided.models
    folder = model.path.removesuffix("/big-00001-of-00002.gguf")
    assert folder.startswith(f"{STORE}/") and folder.endswith("-big")
    assert [(file.path, file.sha256, file.source["url"]) for file in model.files] == [
        (f"{folder}/{name}", digest, f"https://x/dir/{name}?sig=1") for name, digest in files.items()
    ]
    assert model.path in decided.instances[0].argv
    other = planned({"url": "https://x/dir/big-00001-of-00002.gguf?sig=1", "files": {**files, "big-00002-of-00002.gguf": C}})
    assert other.models[0].path != model.path, "another version has another folder"
    assert other.instances[0].digest != decided.instances[0].digest


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ({"url": "https://x/dir"}, {"kind": "url", "url": "https://x/dir/config.json"}),
        ({"url": "https://x/dir/"}, {"kind": "url", "url": "https://x/dir/config.json"}),
        ({"from_controller": "/home/me/dir"}, {"kind": "controller", "path": "/home/me/dir/config.json"}),
        ({"from_host": {"host": "h2", "path": "/srv/dir"}}, {"kind": "fleet", "host": "h2", "path": "/srv/dir/config.json"}),
        (
            {"hf": {"repo": "o/n", "revision": "v1/x"}},
            {"kind": "hf", "url": "https://huggingface.co/o/n/resolve/v1%2Fx/config.json"},
        ),
        ({"path": "/srv/dir"}, {"kind": "host"}),
    ],
)
def test_where_the_files_of_a_folder_come_from(source: dict[str, Any], expected: dict[str, Any]) -> None:
    (model,) = planned({**source, "files": {"config.json": A, "model.safetensors": B}}).models
    assert model.files[0].source == expected


def step_of(decided: HostPlan) -> Any:
    return next(model for model in decided.models if model.source["kind"] == "prepared")


def test_a_step_is_the_releases_own_program_with_what_it_reads() -> None:
    imatrix = {"path": "/srv/imatrix.gguf", "sha256": B}
    prepare = {
        "quantize": "IQ2_XXS",
        "imatrix": imatrix,
        "token_embedding_type": "q6_k",
        "tensor_types": {"attn_v": "q4_k"},
        "threads": 8,
    }
    decided = planned({**SOURCE, "prepare": prepare})
    step = step_of(decided)
    release = decided.instances[0].release_path
    source = f"{STORE}/abababababab-tiny-F16.gguf"
    assert step.source["argv"] == [
        f"{release}/bin/llama-quantize",
        *("--imatrix", "/srv/imatrix.gguf"),
        *("--token-embedding-type", "q6_k"),
        *("--tensor-type", "attn_v=q4_k"),
        *(source, "{output}", "IQ2_XXS", "8"),
    ]
    assert step.source["inputs"] == [source, "/srv/imatrix.gguf"]
    assert step.path.endswith("-tiny-F16-IQ2_XXS.gguf")
    assert step.path in decided.instances[0].argv
    assert [model.source["kind"] for model in decided.models] == ["host", "url", "prepared"], "what is made comes last"


def test_any_program_may_be_a_step() -> None:
    argv = ["{release}/bin/convert", "--in={input}", "{output}", "--text={other}"]
    decided = planned({**SOURCE, "prepare": {"argv": argv, "output": "x.pxq", "environment": {"A": "1"}, "timeout_s": 7}})
    step = step_of(decided)
    release = decided.instances[0].release_path
    source = f"{STORE}/abababababab-tiny-F16.gguf"
    assert step.source["argv"] == [f"{release}/bin/convert", f"--in={source}", "{output}", "--text={other}"]
    assert (step.source["environment"], step.source["timeout_s"]) == ({"A": "1"}, 7)
    assert step.path.endswith("-x.pxq")


def test_what_decides_the_bytes_decides_the_path_and_nothing_else_does() -> None:
    def path(**prepare: Any) -> str:
        return model_path(spec(**SOURCE, prepare={"quantize": "Q4_K_M", **prepare}))

    same = path()
    assert path(threads=3) == path(timeout_s=9) == same
    others = {
        path(quantize="Q5_K_M"),
        path(pure=True),
        path(tensor_types={"a": "q8_0"}),
        path(imatrix={"path": "/i", "sha256": B}),
    }
    assert len(others | {same}) == 5
    moved = model_path(spec(url="https://other.example/tiny-F16.gguf", sha256=A, prepare={"quantize": "Q4_K_M"}))
    assert moved == same, "where the same bytes come from is no matter"


def test_what_a_model_was_made_of_is_needed_until_it_is_made() -> None:
    model = {**SOURCE, "prepare": {"quantize": "Q4_K_M"}}
    before = planned(model)
    made, source = step_of(before).path, f"{STORE}/abababababab-tiny-F16.gguf"
    assert {finding.id for finding in compare(before, make_facts()) if finding.id.startswith("model.")} == {
        f"model.missing:{made}",
        f"model.missing:{source}",
    }
    facts = make_facts(
        models={
            made: {"exists": True, "size_bytes": 500, "sha256": C},
            source: {"exists": True, "size_bytes": 1000, "sha256": A},
        },
        stored_models={made: 500, source: 1000},
    )
    after = planned(model, facts)
    assert [found.path for found in after.models] == [made]
    assert [finding.id for finding in compare(after, facts) if finding.id.startswith("model.")] == []
    (rule,) = [rule for rule in after.rules if rule.id == "model-unused"]
    assert source in rule.reason
    assert after.unused_models == ()
    pruned = planned(model, facts, model_store_prune=True)
    assert pruned.unused_models == (source,)
    (finding,) = [finding for finding in compare(pruned, facts) if finding.id.startswith("model.")]
    assert (finding.id, finding.kind) == (f"model.unused:{source}", "pending")


def test_what_is_recorded_is_the_same_before_and_after_a_step() -> None:
    model = {**SOURCE, "prepare": {"quantize": "Q4_K_M"}}
    before = planned(model)
    made = step_of(before).path
    after = planned(model, make_facts(models={made: {"exists": True, "size_bytes": 500, "sha256": B}}))
    assert (len(before.models), len(after.models)) == (2, 1)
    assert before.host_json is not None and after.host_json is not None
    assert before.host_json.content == after.host_json.content
    assert [model["path"] for model in json.loads(before.host_json.content)["models"]] == [made]


def test_a_made_file_that_changed_since_is_made_again() -> None:
    model = {**SOURCE, "prepare": {"quantize": "Q4_K_M"}}
    made = step_of(planned(model)).path
    facts = make_facts(models={made: {"exists": True, "size_bytes": 500, "sha256": ""}})
    assert len(planned(model, facts).models) == 2
    assert f"model.unverified:{made}" in {finding.id for finding in compare(planned(model, facts), facts)}


def test_only_names_of_our_own_are_removed() -> None:
    stored = {
        f"{STORE}/0123456789ab-old.gguf": 1,
        f"{STORE}/0123456789ab-old-folder": 2,
        f"{STORE}/by-hand.gguf": 4,
        f"{STORE}/lost+found": 8,
        f"{STORE}/abababababab-tiny.gguf": 16,
    }
    decided = planned({"url": "https://x/tiny.gguf", "sha256": A}, make_facts(stored_models=stored), model_store_prune=True)
    assert decided.unused_models == (f"{STORE}/0123456789ab-old-folder", f"{STORE}/0123456789ab-old.gguf")


def test_a_wrong_file_of_several_is_what_the_finding_says() -> None:
    files = {"config.json": A, "model.safetensors": B, "tokenizer.json": C}
    decided = planned({"path": "/srv/m", "files": files})
    facts = make_facts(
        models={
            "/srv/m/config.json": {"exists": True, "size_bytes": 1, "sha256": A},
            "/srv/m/model.safetensors": {"exists": True, "size_bytes": 1, "sha256": "12" * 32},
            "/srv/m/tokenizer.json": {"exists": True, "size_bytes": 1, "sha256": ""},
        }
    )
    (finding,) = [item for item in compare(decided, facts) if item.id.startswith("model.")]
    assert finding.id == "model.wrong:/srv/m"
    assert finding.actual == f"2 of 3 files, the first: sha256 {'12' * 32}"
    assert finding.expected == "3 files, verified"


def test_an_instance_may_read_two_models() -> None:
    own: dict[str, Any] = {"model": {"path": "/m.gguf", "sha256": "ab" * 32}}
    draft = {"speculative": {"kind": "draft", "model": {"path": "/d.gguf", "sha256": "ab" * 32}}}
    assert [model.path for model in model_specs(InstanceSpec.model_validate({**own, "settings": draft}))] == [
        "/m.gguf",
        "/d.gguf",
    ]
    assert [model.path for model in model_specs(InstanceSpec.model_validate(own))] == ["/m.gguf"]
