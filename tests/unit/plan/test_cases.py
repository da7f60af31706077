"""Facts in, plan out: one folder a case.

``facts.json`` is a probe's document, ``fleet.yml`` an inventory with one host, ``headers.yml`` (where there is one) says what is
known of each model, by its path on the host: the name of a shape in ``tests/device/shapes.py`` or of a checkpoint below, a
header as data, or a text that says why it could not be read. ``listings.yml`` has what model hubs said, by
:func:`v100ctl.plan.models.listing_key`. ``controller.yml`` says which ansible-core the controller has. ``expected.json`` has the
verdict, every rule that refuses or warns with its severity, the rules that inform where they matter, words that its reasons must
hold, and figures of instances.

A case can be tried by hand: ``v100ctl plan -i fleet.yml --offline --facts facts.json``.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.device.shapes import MODELS, tensor_bytes
from tests.unit.factory import AS_OF
from tests.unit.vllm_models import AWQ, GPTQ, QWEN25_14B, model
from v100ctl.facts import Facts
from v100ctl.fleet import parse_config
from v100ctl.models.types import HubListing, Known, ModelHeader, NotAModel, Tensor
from v100ctl.plan import HostPlan, plan
from v100ctl.plan.models import with_listings
from v100ctl.plan.types import plain_data

CASES = sorted(path for path in (Path(__file__).parent / "cases").iterdir() if path.is_dir())


@functools.cache
def shape_header(name: str) -> ModelHeader:
    """The header of a shape, as reading its file would give it."""
    shape = MODELS[name]()
    tensors = tuple(Tensor(tensor, kind, sizes, tensor_bytes(kind, sizes)) for tensor, kind, sizes in shape.tensors)
    return ModelHeader(
        format="gguf",
        architecture=shape.architecture,
        metadata={"general.architecture": shape.architecture, **shape.metadata},
        array_lengths={key: len(value) for key, value in shape.metadata.items() if isinstance(value, list | tuple)},
        tensors=tensors,
        file_bytes=sum(tensor.size_bytes for tensor in tensors),
    )


#: Folders of safetensors, by the names that ``headers.yml`` uses.
CHECKPOINTS: dict[str, Callable[[], ModelHeader]] = {
    "qwen2.5-14b": lambda: model(QWEN25_14B),
    "qwen2.5-14b-gptq": lambda: model(QWEN25_14B, GPTQ),
    "qwen2.5-14b-awq": lambda: model(QWEN25_14B, AWQ),
    "qwen2.5-32b-gptq": lambda: model({**QWEN25_14B, "num_hidden_layers": 64, "intermediate_size": 27648}, GPTQ),
}


def headers(folder: Path) -> dict[str, Known]:
    """What ``headers.yml`` says."""
    file = folder / "headers.yml"
    known: dict[str, Known] = {}
    for path, value in (yaml.safe_load(file.read_text(encoding="utf-8")) if file.exists() else {}).items():
        if isinstance(value, str):
            known[path] = shape_header(value) if value in MODELS else CHECKPOINTS[value]() if value in CHECKPOINTS else value
        elif "not_a_model" in value:
            known[path] = NotAModel(value["not_a_model"])
        else:
            known[path] = ModelHeader.model_validate(value)
    return known


def decide(folder: Path, facts: Facts | None = None) -> HostPlan:
    """The plan of a case, of other facts where they are given."""
    inventory = yaml.safe_load((folder / "fleet.yml").read_text(encoding="utf-8"))["all"]
    ((name, variables),) = inventory["hosts"].items()
    config = parse_config(name, {**inventory.get("vars", {}), **(variables or {})})
    file = folder / "listings.yml"
    listings = yaml.safe_load(file.read_text(encoding="utf-8")) if file.exists() else {}
    config = with_listings(config, {key: HubListing.model_validate(value) for key, value in listings.items()})
    facts = facts or Facts.model_validate_json((folder / "facts.json").read_bytes())
    file = folder / "controller.yml"
    controller = yaml.safe_load(file.read_text(encoding="utf-8")) if file.exists() else {}
    return plan(name, config, facts, headers=headers(folder), as_of=AS_OF, **controller)


@pytest.mark.parametrize("folder", CASES, ids=[path.name for path in CASES])
def test_case(folder: Path) -> None:
    expected: dict[str, Any] = json.loads((folder / "expected.json").read_text(encoding="utf-8"))
    decided = decide(folder)
    spoken = {rule.id: rule.severity for rule in decided.rules}
    loud = {rule_id: severity for rule_id, severity in spoken.items() if severity != "info"}
    assert loud == {rule_id: severity for rule_id, severity in expected["rules"].items() if severity != "info"}, decided.rules
    for rule_id, severity in expected["rules"].items():
        assert spoken.get(rule_id) == severity, decided.rules
    for rule_id in expected.get("silent", []):
        assert rule_id not in spoken, decided.rules
    assert decided.verdict == expected["verdict"]
    for rule_id, words in expected.get("says", {}).items():
        said = [f"{rule.reason} | {rule.nearest}" for rule in decided.rules if rule.id == rule_id]
        for word in words:
            assert any(word in text for text in said), said
    # A playbook gets the plan as variables, and Ansible takes plain data only.
    json.dumps(decided.to_role_variables())
    for rule in decided.rules:
        if rule.severity == "refuse":
            assert rule.nearest, f"{rule.id} refuses without saying what would work"
    for key in ("driver", "cuda"):
        if key in expected:
            found = plain_data(getattr(decided, key))
            assert {name: (found or {}).get(name) for name in expected[key]} == expected[key]
    instances = {instance.name: instance for instance in decided.instances}
    for name, figures in expected.get("instances", {}).items():
        for figure, value in figures.items():
            if figure == "argv":
                missing = [word for word in value if word not in instances[name].argv]
                assert not missing, instances[name].argv
            else:
                assert plain_data(getattr(instances[name], figure)) == value


def test_there_are_enough_cases_and_both_sides_of_every_rule() -> None:
    """A rule is tried where it speaks and where it does not; a plan without any shows that rules can be silent."""
    import re

    expected = [json.loads((folder / "expected.json").read_text(encoding="utf-8")) for folder in CASES]
    assert len(expected) >= 80
    source_folder = Path(__file__).parents[3] / "src/v100ctl/plan"
    source = "".join(path.read_text(encoding="utf-8") for path in sorted(source_folder.rglob("*.py")))
    ids = set(re.findall(r'(?:Rule\(\s*|rule_id = )"([a-z0-9-]+)"', source))
    spoken = {rule_id for case in expected for rule_id in case["rules"]}
    # Rules that need a model's configuration in detail are tried on both sides there.
    elsewhere = (Path(__file__).parents[1] / "test_vllm_rules.py").read_text(encoding="utf-8")
    spoken |= {rule_id for rule_id in ids if f'"{rule_id}"' in elsewhere}
    silent = {rule_id for case in expected for rule_id in ids - set(case["rules"])}
    assert ids - spoken == set(), "rules that no case provokes"
    assert ids - silent == set()


def test_the_page_of_rules_is_in_step() -> None:
    from tests.unit.plan.rules_page import PAGE, page

    assert PAGE.read_text(encoding="utf-8") == page(), "run `python -m tests.unit.plan.rules_page`"
