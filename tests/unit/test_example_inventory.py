"""The example inventory: it can be read, and it names everything that can be written."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from v100ctl.catalog.profiles import load_profiles
from v100ctl.fleet import (
    ExternalEngine,
    ExternalSource,
    HostConfig,
    InstanceSpec,
    ModelSpec,
    RopeScaling,
    Sampling,
    Settings,
    load_fleet,
    role_defaults,
)

EXAMPLE = Path(__file__).parents[2] / "inventory/example"
TEXT = (EXAMPLE / "group_vars/all.yml").read_text()
#: A commented key with its example: `# key: value     # what it is`.
COMMENTED = re.compile(r"^ +# ([a-z_]+): (.+?)( +#.*)?$", re.MULTILINE)


def test_the_example_is_read() -> None:
    fleet = load_fleet([EXAMPLE / "hosts.yml"])
    assert fleet.hosts["gpu1"].config.llm_server_instances["chat"].settings.context_length == 8192
    assert fleet.hosts["gpu2"].config.llm_server_instances["chat"].settings.context_length == 16384


@pytest.mark.parametrize(
    "names",
    [HostConfig, ExternalEngine, ExternalSource, InstanceSpec, ModelSpec, Settings, Sampling, RopeScaling],
    ids=lambda model: model.__name__,
)
def test_every_key_is_named(names: type[BaseModel]) -> None:
    # The sizes are for tools that know them; they are no wish.
    assert {name for name in names.model_fields if not re.search(rf"\b{name}\b", TEXT)} <= {"size_bytes"}


def test_variables_stand_there_with_their_defaults() -> None:
    written = yaml.safe_load(TEXT)
    defaults: dict[str, Any] = {
        name: field.default for name, field in HostConfig.model_fields.items() if not field.is_required()
    } | role_defaults()
    # The backend is one that works on every machine.
    shown = set(defaults) - {"llm_server_instances", "llm_server_instance_overrides", "llama_cpp_backend"}
    assert {name: written.get(name) for name in shown} == {name: defaults[name] for name in shown}


def test_settings_that_are_commented_out_can_be_taken() -> None:
    commented = {name: yaml.safe_load(value) for name, value, _ in COMMENTED.findall(TEXT)}
    instance = {
        name: commented.pop(name) for name in ("profile", "external", "numa", "gpus", "api_keys", "watchdog", "nightly_restart")
    }
    written = yaml.safe_load(TEXT)["llm_server_instances"]["chat"]
    settings = Settings.model_validate(written["settings"] | commented)
    assert set(settings.model_dump(exclude_none=True)) == set(Settings.model_fields)
    InstanceSpec.model_validate(written | instance)


def test_the_engine_that_is_commented_out_can_be_taken() -> None:
    lines = TEXT.partition("external_engine_definitions: {}\n")[2].partition("\n\n")[0].splitlines()
    (engine,) = yaml.safe_load("\n".join(line.removeprefix("#") for line in lines)).values()
    engine["source"]["from_controller"] = "/x"
    assert set(ExternalEngine.model_validate(engine).model_dump(exclude_unset=True)) == set(ExternalEngine.model_fields)


def test_every_profile_is_named() -> None:
    assert [name for name in load_profiles() if name not in TEXT] == []
