"""Models of a hub, from the inventory to the plan, against a hub on this machine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.model_hub import COMMIT, Hub, serving_hub, sha256
from tests.unit.factory import AS_OF, make_facts
from tests.unit.models.making import dense
from v100ctl.access import Access
from v100ctl.compare import compare
from v100ctl.examine import read_headers, with_hub_listings
from v100ctl.fleet import FleetHost, HubSource, parse_config
from v100ctl.models import hub as hub_module
from v100ctl.models.hub import HubError
from v100ctl.models.types import ModelHeader
from v100ctl.plan import HostPlan, plan, probe_request

TOKEN = "hf_aTokenThatNobodyElseMaySee"
PARTS = {f"Q4/big-{number:05d}-of-00003.gguf": f"part {number}".encode() for number in (1, 2, 3)}
FILES = {
    "config.json": b'{"architectures": ["X"]}',
    "tokenizer.json": b"{}",
    "model-00001-of-00002.safetensors": b"weights 1",
    "model-00002-of-00002.safetensors": b"weights 2",
    "model.safetensors.index.json": b"{}",
    "pytorch_model.bin": b"the same weights in another form",
    "original/consolidated.safetensors": b"and once more",
    "README.md": b"# Tiny",
    "tiny-Q4_K_M.gguf": b"a gguf",
    **PARTS,
}
LARGE = {name for name in FILES if name.endswith((".gguf", ".safetensors", ".bin"))}


@pytest.fixture
def hub() -> Iterator[Hub]:
    with serving_hub(FILES, large=LARGE) as hub:
        yield hub


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def client(hub: Hub, *, token: str = "") -> hub_module.Hub:
    return hub_module.Hub(hub.url, token=token, timeout_s=10)


def source(**keys: Any) -> HubSource:
    return HubSource(repo="example/tiny", **keys)


def test_a_file_is_listed_with_the_digest_of_the_large_file_storage(hub: Hub) -> None:
    listing = client(hub).listing(source(file="tiny-Q4_K_M.gguf", revision=COMMIT))
    assert listing.commit == COMMIT
    (file,) = listing.files
    assert (file.name, file.sha256, file.size_bytes) == ("tiny-Q4_K_M.gguf", sha256(b"a gguf"), 6)
    assert hub.requests == [f"/api/models/example/tiny/tree/{COMMIT}"]
    hub.requests.clear()
    client(hub).listing(source(file="tiny-Q4_K_M.gguf", revision=COMMIT))
    assert hub.requests == [], "what a commit holds is asked for once"


def test_all_parts_of_a_split_file_are_listed(hub: Hub) -> None:
    listing = client(hub).listing(source(file="Q4/big-00001-of-00003.gguf", revision=COMMIT))
    assert [(file.name, file.path) for file in listing.files] == [(path.partition("/")[2], path) for path in PARTS]
    del hub.files["Q4/big-00002-of-00003.gguf"]
    hub.commit = "f" * 40
    with pytest.raises(HubError, match=r"has no `Q4/big-00002-of-00003\.gguf`; it has .*big-00001-of-00003"):
        client(hub).listing(source(file="Q4/big-00001-of-00003.gguf", revision=hub.commit))


def test_a_whole_repository_is_what_a_server_loads_of_it(hub: Hub) -> None:
    listing = client(hub).listing(source(revision=COMMIT))
    assert {file.name: file.sha256 for file in listing.files} == {
        name: sha256(FILES[name])
        for name in (
            "config.json",
            "model-00001-of-00002.safetensors",
            "model-00002-of-00002.safetensors",
            "model.safetensors.index.json",
            "tokenizer.json",
        )
    }
    assert f"/example/tiny/resolve/{COMMIT}/config.json" in hub.requests, "small files have no SHA-256 there"
    chosen = client(hub).listing(source(revision=COMMIT, include=("*.json", "pytorch_model.bin")))
    assert "pytorch_model.bin" in {file.name for file in chosen.files}
    with pytest.raises(HubError, match=r"no `config\.json` among its files"):
        client(hub).listing(source(revision=COMMIT, include=("*.gguf",)))


def test_a_name_is_asked_for_again_and_a_run_asks_once(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    assert client(hub).listing(source(file="tiny-Q4_K_M.gguf")).commit == COMMIT
    assert client(hub).listing(source(file="tiny-Q4_K_M.gguf")).commit == COMMIT
    assert hub.requests.count("/api/models/example/tiny/revision/main") == 1
    monkeypatch.setattr(hub_module, "NAME_LIFETIME_S", 0.0)
    hub.commit, hub.files["tiny-Q4_K_M.gguf"] = "e" * 40, b"another"
    listing = client(hub).listing(source(file="tiny-Q4_K_M.gguf"))
    assert (listing.commit, listing.files[0].sha256) == ("e" * 40, sha256(b"another"))
    assert client(hub).listing(source(file="tiny-Q4_K_M.gguf"), ask=False) == listing


def test_without_asking_only_what_is_known_is_known(hub: Hub) -> None:
    with pytest.raises(HubError, match="not looked at before"):
        client(hub).listing(source(file="tiny-Q4_K_M.gguf"), ask=False)
    assert hub.requests == []


@pytest.mark.parametrize("mirrored", [False, True], ids=["hub", "mirror"])
def test_long_lists_come_in_pages(hub: Hub, mirrored: bool) -> None:
    hub.page_size = 3
    if mirrored:
        hub.link_base, hub.token = "https://huggingface.co", TOKEN
    listing = client(hub, token=TOKEN if mirrored else "").listing(source(file="tiny-Q4_K_M.gguf", revision=COMMIT))
    assert listing.files[0].sha256 == sha256(b"a gguf")
    assert len(hub.requests) == 5


def test_a_token_is_for_the_hub_alone(hub: Hub) -> None:
    hub.token = TOKEN
    with pytest.raises(HubError, match="Access to model example/tiny is restricted") as caught:
        client(hub).listing(source(revision=COMMIT))
    assert "model_store_hf_token" in caught.value.message
    with pytest.raises(HubError) as caught:
        client(hub, token="another").listing(source(revision=COMMIT))
    assert "licence" in caught.value.message
    assert "another" not in caught.value.message
    assert len(client(hub, token=TOKEN).listing(source(revision=COMMIT)).files) == 5
    assert hub.storage.seen_tokens <= {None}


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"<html>", "did not answer with JSON"),
        (b"{}", "is no list of files"),
        (b'[{"type": "file", "path": "tiny-Q4_K_M.gguf", "size": -1, "oid": "x"}]', "says nothing of the size"),
        (b'[{"type": "file", "path": "tiny-Q4_K_M.gguf", "size": 1, "oid": "x", "lfs": {"oid": "zz"}}]', "gives no SHA-256"),
        (b'[{"type": "file", "path": "../tiny-Q4_K_M.gguf", "size": 1, "oid": "x"}]', "has no `tiny-Q4_K_M.gguf`"),
        (b"[1, null]", "has no `tiny-Q4_K_M.gguf`"),
    ],
)
def test_an_answer_that_cannot_be_true_is_refused(hub: Hub, monkeypatch: pytest.MonkeyPatch, body: bytes, said: str) -> None:
    monkeypatch.setattr(hub_module.Hub, "_get", lambda self, url, ask, limit_bytes: (body, ""))
    with pytest.raises(HubError) as caught:
        client(hub).listing(source(file="tiny-Q4_K_M.gguf", revision=COMMIT))
    assert said in caught.value.message


def test_a_small_file_that_is_not_the_listed_one_is_refused(hub: Hub) -> None:
    listed = client(hub)
    listed._tree("example/tiny", COMMIT, True)
    hub.files["config.json"] = b'{"architectures": ["Y"]}'
    with pytest.raises(HubError, match="is not the file that the hub lists"):
        listed.listing(source(revision=COMMIT))


# From the inventory to the plan


def fleet_host(hub: Hub, model: dict[str, Any], **variables: Any) -> FleetHost:
    given = {
        "llama_cpp_backend": "cpu",
        "model_store_hf_endpoint": hub.url,
        "llm_server_instances": {"chat": {"model": model}},
        **variables,
    }
    return FleetHost("h1", given, parse_config("h1", given))


def planned(host: FleetHost) -> HostPlan:
    return plan("h1", host.config, make_facts(), as_of=AS_OF)


def test_a_plan_knows_each_file_and_never_holds_the_token(hub: Hub) -> None:
    hub.token = TOKEN
    model = {"hf": {"repo": "example/tiny", "file": "Q4/big-00001-of-00003.gguf", "revision": COMMIT}}
    (host,) = with_hub_listings([fleet_host(hub, model, model_store_hf_token=TOKEN)])
    decided = planned(host)
    assert decided.verdict == "ok", decided.rules
    (found,) = decided.models
    folder = found.path.rpartition("/")[0]
    assert folder.startswith("/var/lib/v100ctl/models/")
    assert folder.endswith("-big")
    assert [file.path for file in found.files] == [f"{folder}/{path.partition('/')[2]}" for path in PARTS]
    assert [file.sha256 for file in found.files] == [sha256(content) for content in PARTS.values()]
    assert found.files[0].source == {"kind": "hf", "url": f"{hub.url}/example/tiny/resolve/{COMMIT}/Q4/big-00001-of-00003.gguf"}
    assert found.path in decided.instances[0].argv
    assert set(probe_request(host.config).models) == {file.path for file in found.files}
    (finding,) = [item for item in compare(decided, make_facts()) if item.id.startswith("model.")]
    assert (finding.id, finding.actual) == (f"model.missing:{found.path}", "3 of 3 files, the first: absent")
    assert TOKEN not in json.dumps(decided.to_role_variables()) + repr(host.config) + repr(decided)


def test_a_folder_is_given_to_the_engine_as_a_folder(hub: Hub) -> None:
    model = {"hf": {"repo": "example/tiny", "revision": COMMIT}}
    (host,) = with_hub_listings([fleet_host(hub, model)])
    (found,) = planned(host).models
    assert found.path.endswith("-tiny")
    assert [file.path.removeprefix(f"{found.path}/") for file in found.files] == sorted(
        ["config.json", "tokenizer.json", "model.safetensors.index.json"]
        + [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    )


def test_a_hub_that_does_not_answer_refuses_the_plan_and_delays_nothing_else(hub: Hub) -> None:
    hub.shutdown()
    hub.server_close()
    model = {"hf": {"repo": "example/tiny", "revision": COMMIT}}
    (host,) = with_hub_listings([fleet_host(hub, model)], timeout_s=5)
    decided = planned(host)
    assert [rule.id for rule in decided.rules if rule.severity == "refuse"] == ["model-hub-unread"]
    assert compare(decided, make_facts()), "the rest is planned all the same"


def test_the_header_is_read_by_ranges_with_the_token(hub: Hub, tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    dense(path)
    hub.files["tiny-Q4_K_M.gguf"] = path.read_bytes()
    hub.token = TOKEN
    model = {"hf": {"repo": "example/tiny", "file": "tiny-Q4_K_M.gguf", "revision": COMMIT}}
    hosts = with_hub_listings([fleet_host(hub, model, model_store_hf_token=TOKEN)])
    ((known,),) = [list(item.values()) for item in read_headers(hosts, {}, Access()).values()]
    assert isinstance(known, ModelHeader), known
    assert known.architecture == "qwen2"
    assert hub.storage.seen_tokens == {None}
