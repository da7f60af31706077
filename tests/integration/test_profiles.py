"""Every llama.cpp profile served on a real host by a real engine, as far as a processor can show: with a small model, and with
the model's own drafting head where the profile drafts. What is left to a card is speed and memory.
"""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.device import made_weights, shapes
from v100ctl.catalog import load_catalog

from .hosts import WriteInventory, on_host, serving_variables, v100ctl

if TYPE_CHECKING:
    from v100ctl.lab.hosts import RunningHost

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("practiced")]


def model_with_a_head(path: Path) -> dict[str, Any]:
    """A small model of the family that the reports serve, with one layer that drafts."""
    shape = shapes.qwen35(
        n_layer=4, n_embd=256, n_ff=512, n_head=4, n_head_kv=2, head=64, value_heads=4, key_heads=2, state=64, nextn=1,
        n_vocab=2048, weight="q8_0",
    )  # fmt: skip
    made_weights.fill(shape, path)
    return {"from_controller": str(path), "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}


def answer(host: RunningHost, port: int, path: str, question: dict[str, Any] | None = None) -> dict[str, Any]:
    """What a server of the host answers to a request on the host."""
    body = "None" if question is None else f"json.dumps({question!r}).encode()"
    asked = f"import json, urllib.request as r; print(r.urlopen('http://127.0.0.1:{port}{path}', {body}).read().decode())"
    found: dict[str, Any] = json.loads(on_host(host, f"python3 -c {shlex.quote(asked)}"))
    return found


def test_each_profile_serves(make_lab_host: Callable[..., RunningHost], lab_inventory: WriteInventory, tmp_path: Path) -> None:
    variables = serving_variables()
    chat = variables["llm_server_instances"]["chat"]
    profiles = sorted(name for name, profile in load_catalog().profiles.items() if profile.engine == "llama_cpp")
    assert "llama-32gb-mtp" in profiles
    instances: dict[str, Any] = {}
    for number, name in enumerate(profiles):
        settings = load_catalog().profiles[name].values
        drafts = settings.get("speculative", {}).get("kind") == "mtp"
        model = model_with_a_head(tmp_path / "head.gguf") if drafts else chat["model"]
        instances[name] = {"profile": name, "model": model, "gpus": [], "port": 8001 + number}
    host = make_lab_host()
    inventory = lab_inventory(host, variables={**variables, "llm_server_instances": instances})

    done = v100ctl("provision", "-i", inventory, "--json")
    assert done.code == 0, done.err
    result = done.document["hosts"][host.name]
    assert set(result["proofs"]) == set(profiles)
    assert all(proof["tokens"] > 0 for proof in result["proofs"].values())

    for name in profiles:
        props = answer(host, instances[name]["port"], "/props")
        asked = load_catalog().profiles[name].values
        assert props["total_slots"] == asked["parallel"]
    # The engine says itself how many tokens it drafted.
    question = {"prompt": "t5 t6 t7", "n_predict": 32, "temperature": 0}
    timings = answer(host, instances["llama-32gb-mtp"]["port"], "/completion", question)["timings"]
    assert timings["draft_n"] > 0, timings
    assert v100ctl("audit", "-i", inventory, "--json").document["hosts"][host.name]["status"] == "clean"
