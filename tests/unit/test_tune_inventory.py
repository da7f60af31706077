"""The winner as an edit of the inventory: only what it says changes, and what would not come of it is not offered."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from v100ctl.errors import UsageError, V100ctlError
from v100ctl.fleet import Fleet, HostConfig, load_fleet
from v100ctl.tune.inventory import Edit, EditError, edit_inventory, set_value

SETTINGS = ("llm_server_instances", "chat", "settings")

BLOCK = """\
---
# Our fleet.
llm_server_instances:
  chat:  # the one that everybody uses
    model: {path: /srv/m.gguf, sha256: "00"}
    settings:
      context_length: 8192
      flash_attention: off   # measured in May
      # A comment of its own.

    port: 8000

other: [1,   2]
"""


@pytest.mark.parametrize(
    ("text", "keys", "value", "expected"),
    [
        (BLOCK, (*SETTINGS, "context_length"), 16384, BLOCK.replace("8192", "16384")),
        (BLOCK, (*SETTINGS, "flash_attention"), "on", BLOCK.replace("off ", "'on' ")),
        (
            BLOCK,
            (*SETTINGS, "ubatch_size"),
            512,
            BLOCK.replace("# measured in May\n", "# measured in May\n      ubatch_size: 512\n"),
        ),
        (
            BLOCK,
            (*SETTINGS, "speculative", "kind"),
            "ngram",
            BLOCK.replace("# measured in May\n", "# measured in May\n      speculative:\n        kind: ngram\n"),
        ),
        (BLOCK, ("llama_cpp_force_mmq",), False, f"{BLOCK.rstrip()}\nllama_cpp_force_mmq: false\n"),
        (
            BLOCK,
            ("llm_server_instances", "chat", "extra_args"),
            ("--cache-ram", "0"),
            BLOCK.replace("port: 8000\n", "port: 8000\n    extra_args:\n    - --cache-ram\n    - '0'\n"),
        ),
        ("a: {b: 1}\n", ("a", "c"), 2, "a: {b: 1, c: 2}\n"),
        ("a: {}\n", ("a", "c", "d"), "x", "a: {c: {d: x}}\n"),
        ('{"a": {"b": 1}}\n', ("a", "b"), 2, '{"a": {"b": 2}}\n'),
        ("a:\nb: 1\n", ("a", "c"), 2, "a:\n  c: 2\nb: 1\n"),
        ("a: ~\n", ("a",), 2, "a: 2\n"),
        ("a:\n  - x  # one\n  - y\nb: 1\n", ("a",), ["x", "z"], "a:\n  - x  # one\n  - z\nb: 1\n"),
        ("a:\n  - x  # one\nb: 1\n", ("a",), ["x", "z"], "a:\n  - x  # one\n  - z\nb: 1\n"),
        ("a:\n- x\n", ("a",), ["x", "z"], "a:\n- x\n- z\n"),
        ("a:\n  b: |\n    text\n    more\n\n# end\n", ("a", "c"), 1, "a:\n  b: |\n    text\n    more\n  c: 1\n\n# end\n"),
        ("", ("a", "b"), 1, "---\na:\n  b: 1\n"),
        ("# only words\n", ("a",), 1, "# only words\na: 1\n"),
        ("a: !vault |\n  $ANSIBLE_VAULT;1.1\n  00\nb: 1\n", ("b",), 2, "a: !vault |\n  $ANSIBLE_VAULT;1.1\n  00\nb: 2\n"),
    ],
)
def test_only_what_is_set_changes(text: str, keys: tuple[str, ...], value: Any, expected: str) -> None:
    assert set_value(text, keys, value) == expected
    assert set_value(expected, keys, value) == expected


@pytest.mark.parametrize(
    ("text", "keys", "value", "said"),
    [
        ("a: '{{ b }}'\n", ("a",), 1, "template or a secret"),
        ("a: !vault |\n  x\n", ("a",), 1, "template or a secret"),
        ("a: [1]\n", ("a", "b"), 1, "no mapping"),
        ("a:\n  - x\n  - y\n", ("a",), ["z"], "item by item"),
        ("$ANSIBLE_VAULT;1.1;AES256\n00\n", ("a",), 1, "encrypted"),
        ("a: &x {c: 1}\nb: *x\n", ("a", "c"), 2, "without touching more"),
    ],
)
def test_what_cannot_be_edited_is_said(text: str, keys: tuple[str, ...], value: Any, said: str) -> None:
    with pytest.raises(EditError, match=said):
        set_value(text, keys, value)


_names = st.sampled_from(["a", "b", "c", "on", "1"])
_leaves = st.one_of(st.integers(), st.booleans(), st.text(max_size=8), st.none(), st.lists(st.integers(), max_size=2))
_documents = st.dictionaries(
    _names, st.recursive(_leaves, lambda inner: st.dictionaries(_names, inner, max_size=3), max_leaves=8)
)


@settings(max_examples=60)
@given(_documents, st.lists(_names, min_size=1, max_size=3), st.one_of(st.integers(), st.booleans(), st.text(max_size=5)))
def test_any_document_is_edited_right_or_not_at_all(document: Any, keys: list[str], value: Any) -> None:
    for flow in (True, False, None):
        text = yaml.safe_dump(document, default_flow_style=flow, sort_keys=False)
        try:
            after = yaml.safe_load(set_value(text, tuple(keys), value))
        except EditError:
            continue
        node = after
        for key in keys:
            node = node[key]
        assert node == value and type(node) is type(value)


# --- files ----------------------------------------------------------------------------------------------------------------------

MODEL = {"path": "/srv/m.gguf", "sha256": "0" * 64}
CHANGES = {("llm_server_instances", "chat", "settings", "ubatch_size"): 1024}


def fleet_of(folder: Path, files: dict[str, Any]) -> Fleet:
    for name, document in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(document if isinstance(document, str) else yaml.safe_dump(document, sort_keys=False))
    return load_fleet([folder / "hosts.yml"])


def wanted_of(fleet: Fleet) -> HostConfig:
    config = fleet.hosts["a"].config
    spec = config.llm_server_instances["chat"]
    changed = spec.model_copy(update={"settings": spec.settings.model_copy(update={"ubatch_size": 1024})})
    return config.model_copy(update={"llm_server_instances": {**config.llm_server_instances, "chat": changed}})


HOSTS = {"all": {"children": {"v100s": {"hosts": {"a": {"ansible_host": "192.0.2.1"}, "b": None}}}, "hosts": {"c": None}}}
ALL = {
    "llm_server_instances": {"chat": {"model": MODEL, "settings": {"ubatch_size": 512}}, "code": {"model": MODEL, "port": 8001}}
}


def edited(fleet: Fleet, level: str) -> Edit:
    return edit_inventory(fleet, "a", "chat", CHANGES, wanted_of(fleet), level)


def test_levels(tmp_path: Path) -> None:
    fleet = fleet_of(tmp_path, {"hosts.yml": HOSTS, "group_vars/all.yml": ALL})
    host = edited(fleet, "host")
    assert host.hosts == ("a",) and host.path == tmp_path / "hosts.yml"
    assert "+          llm_server_instance_overrides:" in host.diff
    group = edited(fleet, "group:v100s")
    assert group.hosts == ("a", "b") and group.path == tmp_path / "group_vars/v100s.yml" and not group.path.exists()
    every = edited(fleet, "all")
    assert every.hosts == ("a", "b", "c")
    assert "-      ubatch_size: 512\n+      ubatch_size: 1024" in every.diff
    for edit in (every, group, host):
        edit.write()
    assert load_fleet([tmp_path / "hosts.yml"]).hosts["c"].config.llm_server_instances["chat"].settings.ubatch_size == 1024
    with pytest.raises(V100ctlError, match="changed meanwhile"):
        every.write()
    with pytest.raises(UsageError):
        edited(fleet, "group:")


def test_files_of_a_host_win_over_its_line_in_the_inventory(tmp_path: Path) -> None:
    fleet = fleet_of(tmp_path, {"hosts.yml": HOSTS, "group_vars/all.yml": ALL, "host_vars/a/main.yml": "---\n# mine\nx: 1\n"})
    edit = edited(fleet, "host")
    assert edit.path == tmp_path / "host_vars/a/main.yml"
    assert edit.after.startswith("---\n# mine\nx: 1\nllm_server_instance_overrides:\n")


def test_an_edit_that_another_level_hides_is_not_offered(tmp_path: Path) -> None:
    overrides = {"llm_server_instance_overrides": {"chat": {"settings": {"ubatch_size": 256}}}}
    fleet = fleet_of(tmp_path, {"hosts.yml": HOSTS, "group_vars/all.yml": ALL, "host_vars/a.yml": overrides})
    with pytest.raises(EditError, match="would not get what was measured"):
        edited(fleet, "all")
    # Where the host's own word is changed, it gets it.
    assert edited(fleet, "host").path == tmp_path / "host_vars/a.yml"


def test_an_edit_that_takes_what_a_group_says_is_not_offered(tmp_path: Path) -> None:
    overrides = {"llm_server_instance_overrides": {"chat": {"settings": {"parallel": 2}}}}
    fleet = fleet_of(tmp_path, {"hosts.yml": HOSTS, "group_vars/all.yml": ALL, "group_vars/v100s.yml": overrides})
    # Ansible takes the host's variable for the group's, and `parallel` would be lost.
    with pytest.raises(EditError, match="would not get what was measured"):
        edited(fleet, "host")
    assert edited(fleet, "group:v100s").hosts == ("a", "b")


def test_a_builds_option_is_a_variable_of_the_host(tmp_path: Path) -> None:
    fleet = fleet_of(tmp_path, {"hosts.yml": HOSTS, "group_vars/all.yml": ALL})
    wanted = fleet.hosts["a"].config.model_copy(update={"llama_cpp_force_mmq": False})
    edit = edit_inventory(fleet, "a", "chat", {("llama_cpp_force_mmq",): False}, wanted, "group:v100s")
    assert edit.after == "---\nllama_cpp_force_mmq: false\n"
