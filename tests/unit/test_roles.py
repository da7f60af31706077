"""Every role: what it documents is what it has."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible.playbook.block import Block
from ansible.playbook.handler_task_include import HandlerTaskInclude

from v100ctl.catalog import load_catalog

ROLES = Path(__file__).resolve().parents[2] / "roles"
NAMES = sorted(path.parent.parent.name for path in ROLES.glob("*/tasks/main.yml"))
TYPES = {"str": str, "int": int, "bool": bool, "list": list, "dict": dict, "path": str, "float": (int, float), "raw": object}


def _load(role: str, file: str) -> Any:
    return yaml.safe_load((ROLES / role / file).read_text(encoding="utf-8")) or {}


def differences(defaults: dict[str, Any], options: dict[str, dict[str, Any]]) -> list[str]:
    """What ``defaults/main.yml`` and the options of ``meta/argument_specs.yml`` say differently."""
    found = [f"{name} has a default and no row" for name in defaults if name not in options]
    for name, option in options.items():
        if "description" not in option or "type" not in option:
            found.append(f"{name} lacks its description or type")
        elif option.get("required"):
            found += [f"{name} is required and has a default"] if name in defaults or "default" in option else []
        elif name not in defaults:
            found.append(f"{name} is optional and has no default")
        elif ("default" in option, option.get("default")) != (True, defaults[name]):
            found.append(f"{name} is {defaults[name]!r} and documented as {option.get('default', 'nothing')!r}")
        elif not isinstance(defaults[name], TYPES[option["type"]]):
            found.append(f"{name} is {defaults[name]!r}, not a {option['type']}")
    return found


def test_there_are_roles() -> None:
    assert "llama_cpp" in NAMES


@pytest.mark.parametrize("role", NAMES)
def test_argument_specs_and_defaults_are_the_same(role: str) -> None:
    specs = _load(role, "meta/argument_specs.yml")["argument_specs"]
    assert differences(_load(role, "defaults/main.yml"), specs["main"]["options"]) == []


@pytest.mark.parametrize("role", NAMES)
def test_platforms_are_the_catalogs(role: str) -> None:
    platforms = _load(role, "meta/main.yml")["galaxy_info"]["platforms"]
    claimed = {f"{platform['name'].lower()} {version}" for platform in platforms for version in platform["versions"]}
    # Galaxy wants code names; a row's name ends in its own: `Debian 12 (bookworm)`. Enterprise Linux has none.
    assert claimed == {
        f"el {row.version_id}" if row.id == "rhel" else f"{row.id} {row.name.rpartition('(')[2].rstrip(')')}"
        for row in load_catalog().distributions
        if role not in row.refused
    }


@pytest.mark.parametrize("role", NAMES)
def test_variables_carry_the_roles_name(role: str) -> None:
    assert [name for name in _load(role, "defaults/main.yml") if not name.startswith(f"{role}_")] == []
    private = _load(role, "vars/main.yml") if (ROLES / role / "vars/main.yml").is_file() else {}
    assert [name for name in private if not name.startswith(f"_{role}_")] == []


@pytest.mark.parametrize("role", NAMES)
def test_readme_names_every_variable(role: str) -> None:
    text = (ROLES / role / "README.md").read_text(encoding="utf-8")
    assert [
        name for name in _load(role, "meta/argument_specs.yml")["argument_specs"]["main"]["options"] if f"`{name}`" not in text
    ] == []


KEYWORDS = {*Block.fattributes, *HandlerTaskInclude.fattributes}


def tasks_of(document: Any) -> Iterator[dict[str, Any]]:
    """Every task of a task file or playbook, those inside blocks too."""
    for item in document or []:
        yield item
        for key in ("block", "rescue", "always", "pre_tasks", "tasks", "post_tasks", "handlers"):
            yield from tasks_of(item.get(key))


def actions_of(task: dict[str, Any]) -> list[str]:
    """The modules that a task names: one, or none for a block or a play."""
    return [key for key in task if key not in KEYWORDS and not key.startswith("with_")]


@pytest.mark.parametrize("role", NAMES)
def test_every_module_is_part_of_ansible_core(role: str) -> None:
    tasks = [task for file in (ROLES / role / "tasks").glob("*.yml") for task in tasks_of(yaml.safe_load(file.read_text()))]
    found = [actions_of(task) for task in tasks]
    assert [actions for actions in found if len(actions) > 1] == []
    modules = [actions[0] for actions in found if actions]
    assert modules
    assert [module for module in modules if not module.startswith("ansible.builtin.")] == []


@pytest.mark.parametrize("role", NAMES)
def test_what_is_registered_carries_the_roles_name(role: str) -> None:
    tasks = [task for file in (ROLES / role / "tasks").glob("*.yml") for task in tasks_of(yaml.safe_load(file.read_text()))]
    registered = [task["register"] for task in tasks if "register" in task]
    assert [name for name in registered if not name.startswith(f"__{role}_")] == []


def test_modules_are_found_in_blocks() -> None:
    document = yaml.safe_load("[{name: b, when: x, block: [{name: t, copy: {}}], rescue: [{community.general.x: {}}]}]")
    assert [actions_of(task) for task in tasks_of(document)] == [[], ["copy"], ["community.general.x"]]


@pytest.mark.parametrize(
    ("defaults", "options"),
    [
        ({"a": 1}, {}),
        ({}, {"a": {"type": "int", "description": ""}}),
        ({"a": 1}, {"a": {"type": "int", "description": "", "default": 2}}),
        ({"a": None}, {"a": {"type": "raw", "description": ""}}),
        ({"a": "1"}, {"a": {"type": "int", "description": "", "default": "1"}}),
        ({"a": 1}, {"a": {"type": "int", "description": "", "required": True}}),
        ({"a": 1}, {"a": {"type": "int", "default": 1}}),
    ],
)
def test_differences_are_seen(defaults: dict[str, Any], options: dict[str, dict[str, Any]]) -> None:
    assert len(differences(defaults, options)) == 1


def test_no_difference() -> None:
    options = {"a": {"type": "int", "description": "", "default": 1}, "b": {"type": "str", "description": "", "required": True}}
    assert differences({"a": 1}, options) == []
