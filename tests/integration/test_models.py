"""Models on real hosts: from a hub through the engine's own llama-quantize to a server, then from that host to another.

The hub is one on this machine that answers as the real one is documented to: none is reached from here.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from tests.model_hub import COMMIT, serving_hub, sha256
from v100ctl import practice
from v100ctl.artifacts import Cache

from .hosts import WriteInventory, on_host, serving_variables, v100ctl

if TYPE_CHECKING:
    from v100ctl.lab.hosts import RunningHost

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("practiced")]

TOKEN = "hf_aTokenThatNobodyElseMaySee"
STORE = "/var/lib/v100ctl/models"


def provisioned(inventory: Path, host: str) -> dict[str, Any]:
    done = v100ctl("provision", "-i", inventory, "--limit", host, "--json")
    assert done.code == 0, done.err
    assert TOKEN not in done.out + done.err + Path(done.document["log"]).read_text()
    result: dict[str, Any] = done.document["hosts"][host]
    return result


def test_a_model_is_fetched_quantised_served_and_copied_on(
    make_lab_host: Callable[..., RunningHost], lab_inventory: WriteInventory
) -> None:
    first, second = make_lab_host(), make_lab_host()
    content = Cache().model_path(practice.inventory_variables(builder=False)["llm_server_instances"]["chat"]["model"]["sha256"])
    with serving_hub({"tiny-Q4_1.gguf": content.read_bytes()}, large={"tiny-Q4_1.gguf"}, address="0.0.0.0") as hub:
        # This machine, as the hosts see it.
        hub.name = on_host(first, "ip -4 route show default | awk '{print $3}'").strip()
        hub.token = TOKEN
        model: dict[str, Any] = {
            "hf": {"repo": "example/tiny", "file": "tiny-Q4_1.gguf", "revision": COMMIT},
            "prepare": {"quantize": "Q8_0", "allow_requantize": True},
        }
        variables = serving_variables(model=model) | {"model_store_hf_endpoint": hub.url, "model_store_hf_token": TOKEN}
        inventory = lab_inventory(first, second, variables=variables)

        result = provisioned(inventory, first.name)
        assert result["proofs"]["chat"]["tokens"] > 0
        assert hub.storage.seen_tokens == {None}

    made, came = sorted(on_host(first, f"ls {STORE}").split(), key=lambda name: "Q8_0" not in name)
    assert (made[13:], came[13:]) == ("tiny-Q4_1-Q8_0.gguf", "tiny-Q4_1.gguf")
    unit = on_host(first, "cat /etc/systemd/system/v100-chat.service")
    assert f"{STORE}/{made}" in unit
    assert came not in unit
    (record,) = [
        json.loads(text)
        for text in on_host(first, "cat /var/lib/v100ctl/state/models/*.json").splitlines()
        if json.loads(text)["path"] == f"{STORE}/{made}"
    ]
    assert record["inputs"] == {f"{STORE}/{came}": sha256(content.read_bytes())}
    assert record["argv"][0].endswith("/bin/llama-quantize")
    assert record["argv"][-3:] == [f"{STORE}/{came}", "{output}", "Q8_0"]
    assert "hf_" not in on_host(first, "grep -rl hf_aToken /var/lib/v100ctl /etc /run /tmp || true")

    # The hub is gone: what was made is there, and what it was made of is needed no more.
    done = v100ctl("plan", "-i", inventory, "--limit", first.name, "--json")
    assert done.code == 0, done.out
    (rule,) = [rule for rule in done.document["hosts"][first.name]["rules"] if rule["id"] == "model-unused"]
    assert came in rule["reason"]

    document = yaml.safe_load(inventory.read_text())
    document["all"]["vars"]["model_store_prune"] = True
    del document["all"]["vars"]["model_store_hf_token"]
    other = {"from_host": {"host": first.name, "path": f"{STORE}/{made}"}, "sha256": record["sha256"]}
    document["all"]["hosts"][second.name]["llm_server_instances"] = {
        "chat": {**document["all"]["vars"]["llm_server_instances"]["chat"], "model": other}
    }
    inventory.write_text(yaml.safe_dump(document))
    provisioned(inventory, first.name)
    assert on_host(first, f"ls -A {STORE}").split() == [made]
    result = provisioned(inventory, second.name)
    assert result["proofs"]["chat"]["tokens"] > 0
    assert on_host(second, f"sha256sum {STORE}/*.gguf").split()[0] == record["sha256"]
    assert on_host(first, "ls -A /var/lib/v100ctl/transfer") == ""
    for host in (first, second):
        done = v100ctl("plan", "-i", inventory, "--limit", host.name, "--json")
        assert done.code == 0, done.out
