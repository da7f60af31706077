"""The models of what a probe returns, and the hosts that other tests start from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest
from pydantic import BaseModel

from v100ctl.facts import Facts
from v100ctl.probe import host_script as script

HOSTS = sorted((Path(__file__).parent / "plan/hosts").glob("*.json"))


def unknown_keys(document: Any, model: Any, where: str = "") -> list[str]:
    """Paths of a document's keys that its model would ignore."""
    if isinstance(document, list):
        element = next((argument for argument in get_args(model) if argument is not Ellipsis), None)
        return [path for item in document for path in unknown_keys(item, element, where + "[]")]
    if not isinstance(document, dict):
        return []
    if get_origin(model) is dict:
        return [path for key, item in document.items() for path in unknown_keys(item, get_args(model)[1], f"{where}[{key}]")]
    models = [item for item in (model, *get_args(model)) if isinstance(item, type) and issubclass(item, BaseModel)]
    if not models:
        return []
    fields = {field.alias or name: field for name, field in models[0].model_fields.items()}
    return [f"{where}.{key}" for key in document if key not in fields] + [
        path
        for key in document
        if key in fields
        for path in unknown_keys(document[key], fields[key].annotation, f"{where}.{key}")
    ]


@pytest.mark.parametrize("path", HOSTS, ids=lambda path: path.stem)
def test_hosts_say_nothing_that_the_models_do_not_know(path: Path) -> None:
    document = json.loads(path.read_text())
    assert unknown_keys(document, Facts) == []
    facts = Facts.model_validate(document)
    assert {gpu.pci_address for gpu in facts.gpus} == {item["pci_address"] for item in document["gpus"]}
    # What `nvidia-smi` printed is what the fields of each card say.
    for address, card in script.parse_smi(facts.nvidia.smi.output).items():
        gpu = next(gpu for gpu in facts.gpus if gpu.pci_address == address)
        assert gpu.model_dump(include=set(card)) == card


def test_there_are_hosts() -> None:
    assert len(HOSTS) >= 6


def test_unknown_keys_are_found() -> None:
    document = {"schema": "x", "odd": 1, "gpus": [{"pci_address": "a", "odder": 2}], "nvidia": {"smi": {"oddest": 3}}}
    assert unknown_keys(document, Facts) == [".odd", ".gpus[].odder", ".nvidia.smi.oddest"]


def test_a_document_of_an_older_probe_says_not_known() -> None:
    facts = Facts.model_validate(
        {
            "schema": "v100ctl/facts/1",
            "gpus": [{"pci_address": "0000:3b:00.0"}],
            "nvidia": {"smi": {"status": "ok", "output": ""}},
        }
    )
    gpu = facts.gpus[0]
    assert (gpu.bar1_bytes, gpu.link_width, gpu.display_attached, gpu.compute_capability) == (None, None, None, "")
    assert (facts.secure_boot, facts.memory.limit_bytes, facts.nvidia.fabric_manager) == (None, None, "")


def test_a_document_of_a_newer_probe_is_read() -> None:
    assert Facts.model_validate({"novelty": 1, "gpus": [{"pci_address": "a", "novelty": 2}]}).gpus[0].pci_address == "a"


def test_what_the_script_says_here_the_models_know() -> None:
    assert unknown_keys(script.probe(script.parse_request("{}")), Facts) == []
