"""The filters that playbooks use."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible.errors import AnsibleFilterError

from .factory import AS_OF, BARE_FACTS, MODEL, make_plan

ROOT = Path(__file__).resolve().parents[2]
PLUGIN = ROOT / "playbooks/filter_plugins/v100ctl.py"
VARIABLES: dict[str, Any] = {
    "inventory_hostname": "h1",
    "llama_cpp_backend": "cpu",
    "llm_server_instances": {"chat": {"model": MODEL}},
}


@pytest.fixture(scope="module")
def filters() -> Mapping[str, Any]:
    spec = importlib.util.spec_from_file_location("v100ctl_filters", PLUGIN)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: Mapping[str, Any] = module.FilterModule().filters()
    return found


class Lazy(Mapping[str, Any]):
    """A host's variables as Ansible gives them: each is templated when it is read, and two of them cannot be."""

    def __getitem__(self, name: str) -> Any:
        if name in ("somebody_elses", "llama_farm"):
            raise AssertionError("a variable was read that is none of ours")
        return VARIABLES[name]

    def __iter__(self) -> Iterator[str]:
        return iter([*VARIABLES, "somebody_elses", "llama_farm"])

    def __len__(self) -> int:
        return len(VARIABLES) + 2


def test_plan_is_that_of_the_command_line(filters: Mapping[str, Any]) -> None:
    assert filters["v100ctl_plan"](Lazy(), BARE_FACTS, AS_OF.isoformat()) == make_plan().to_role_variables()


def test_the_plan_knows_which_ansible_carries_it_out(filters: Mapping[str, Any]) -> None:
    facts = {**BARE_FACTS, "python": {"version": "3.7.3", "executable": "/usr/bin/python3"}}
    (refusal,) = filters["v100ctl_plan"](Lazy(), facts, AS_OF.isoformat())["refusals"]
    assert f"ansible-core {importlib.metadata.version('ansible-core')} on the controller" in refusal


def test_plan_is_for_today_where_no_day_is_given(filters: Mapping[str, Any]) -> None:
    assert filters["v100ctl_plan"](VARIABLES, BARE_FACTS)["host"] == "h1"


def test_probe_request_asks_for_what_the_inventory_names(filters: Mapping[str, Any]) -> None:
    request = filters["v100ctl_probe_request"](Lazy())
    assert request["health"] == {"chat": "http://127.0.0.1:8000/health"}
    assert json.loads(json.dumps(request)) == request


def test_restarts_names_what_does_not_run(filters: Mapping[str, Any]) -> None:
    assert filters["v100ctl_restarts"](make_plan().to_role_variables(), BARE_FACTS) == ["chat"]


@pytest.mark.parametrize(("text", "ok"), [("ready", True), ("", False)])
def test_judge(filters: Mapping[str, Any], text: str, ok: bool) -> None:
    assert filters["v100ctl_judge"]({"choices": [{"message": {"content": text}}]})["ok"] is ok


def test_package_file(filters: Mapping[str, Any]) -> None:
    assert Path(filters["v100ctl_package_file"]("probe/host_script.py")).is_file()
    with pytest.raises(AnsibleFilterError, match=r"nothing\.py is missing\. hint: "):
        filters["v100ctl_package_file"]("nothing.py")


def test_an_error_keeps_its_message_and_hint(filters: Mapping[str, Any]) -> None:
    with pytest.raises(
        AnsibleFilterError, match=r"variable `llama_cpp_bulid` is not known\. hint: did you mean `llama_cpp_build`"
    ):
        filters["v100ctl_probe_request"]({**VARIABLES, "llama_cpp_bulid": 1})


def test_a_document_that_is_none_is_an_error(filters: Mapping[str, Any]) -> None:
    with pytest.raises(AnsibleFilterError, match="packages"):
        filters["v100ctl_plan"](VARIABLES, {**BARE_FACTS, "packages": []})


PLAYBOOK = """
- hosts: all
  gather_facts: false
  tasks:
    - ansible.builtin.set_fact:
        decided: "{{ hostvars[inventory_hostname] | v100ctl_plan(lookup('ansible.builtin.file', facts) | from_json, as_of) }}"
    - ansible.builtin.copy:
        content: "{{ decided | to_json }}"
        dest: "{{ output }}"
        mode: "0600"
"""


def test_plan_in_a_playbook_from_a_checkout(tmp_path: Path) -> None:
    """Ansible's own tagged, lazily templated and encrypted values, and a Python path that lacks the package."""
    password = tmp_path / "password"
    password.write_text("of the vault\n")
    vault = [
        "ansible-vault",
        "encrypt_string",
        "--vault-password-file",
        str(password),
        MODEL["sha256"],
        "--name",
        "secret_sha256",
    ]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {
        "ANSIBLE_FILTER_PLUGINS": str(PLUGIN.parent),
        "ANSIBLE_LOCAL_TEMP": str(tmp_path / "tmp"),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    secret = subprocess.run(vault, env=environment, capture_output=True, text=True, check=True).stdout
    (tmp_path / "group_vars").mkdir()
    variables = {
        "llama_cpp_backend": "{{ 'cp' ~ 'u' }}",
        "llm_server_instances": {"chat": {"model": {**MODEL, "sha256": "{{ secret_sha256 }}"}}},
        "somebody_elses": "{{ nowhere_defined }}",
    }
    (tmp_path / "group_vars/all.yml").write_text(f"{secret}\n{yaml.safe_dump(variables)}")
    here = {"ansible_connection": "local", "ansible_python_interpreter": sys.executable}
    (tmp_path / "hosts.yml").write_text(yaml.safe_dump({"all": {"hosts": {"h1": here}}}))
    (tmp_path / "facts.json").write_text(json.dumps(BARE_FACTS))
    (tmp_path / "play.yml").write_text(PLAYBOOK)
    extra = {"facts": str(tmp_path / "facts.json"), "output": str(tmp_path / "plan.json"), "as_of": AS_OF.isoformat()}
    command = [
        "ansible-playbook",
        "-i",
        str(tmp_path / "hosts.yml"),
        "--vault-password-file",
        str(password),
        "-e",
        json.dumps(extra),
    ]
    result = subprocess.run([*command, str(tmp_path / "play.yml")], env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert json.loads((tmp_path / "plan.json").read_text()) == json.loads(json.dumps(make_plan().to_role_variables()))


def test_a_playbook_names_the_line_of_a_wrong_value(tmp_path: Path) -> None:
    (tmp_path / "hosts.yml").write_text(
        "all:\n  hosts:\n    h1:\n      ansible_connection: local\n      llama_cpp_backend: rocm\n"
    )
    (tmp_path / "play.yml").write_text(
        "- hosts: all\n  gather_facts: false\n  tasks:\n"
        "    - ansible.builtin.debug: {msg: '{{ hostvars[inventory_hostname] | v100ctl_probe_request }}'}\n"
    )
    environment = os.environ | {"ANSIBLE_FILTER_PLUGINS": str(PLUGIN.parent), "ANSIBLE_LOCAL_TEMP": str(tmp_path / "tmp")}
    command = [sys.executable, "-m", "ansible", "playbook", "-i", str(tmp_path / "hosts.yml"), str(tmp_path / "play.yml")]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode != 0
    assert f"({tmp_path}/hosts.yml:5:26)" in result.stdout + result.stderr
