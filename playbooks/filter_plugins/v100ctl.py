"""Filters through which playbooks reach the same plan, comparison and judgement that the CLI uses.

They stay thin: arguments become plain data, one function of the package is called, and an error keeps its message and hint.
"""

from __future__ import annotations

import datetime
import importlib
import importlib.util
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from ansible.errors import AnsibleFilterError
from ansible.release import __version__ as ansible_core_version


def _module(name: str) -> Any:
    """A module of the package, imported when a filter is used.

    Not at the top: a plugin that cannot be imported is dropped by Ansible with a bare warning.

    Raises:
        AnsibleFilterError: the package or one of its dependencies is missing.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise AnsibleFilterError(
            f"the Python package v100ctl cannot be imported by {sys.executable}: {error}. "
            "hint: run `./v100ctl --help` once, then use the `ansible-playbook` in its `.venv/bin`"
        ) from error


if importlib.util.find_spec("v100ctl") is None:
    # Plain `ansible-playbook` from a checkout: the package lies beside the playbooks.
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))


def _plain(value: Any) -> Any:
    """``value`` without Ansible's tagged and lazily templated types."""
    return _module("v100ctl.fleet").plain(value)


class _PlainMapping(Mapping[str, Any]):
    """A host's variables as plain data, each templated only when it is read.

    Most of a host's variables are none of ours, and one that cannot be templated is no error before somebody asks for it.
    """

    def __init__(self, source: Mapping[str, Any]) -> None:
        self._source = source

    def __getitem__(self, name: str) -> Any:
        return _plain(self._source[name])

    def __contains__(self, name: object) -> bool:
        return name in self._source

    def __iter__(self) -> Iterator[str]:
        return (str(name) for name in self._source)

    def __len__(self) -> int:
        return len(self._source)


def _explained(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` with errors for people turned into Ansible's own kind, hint included."""

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except _module("v100ctl.errors").V100ctlError as error:
            hint = f". hint: {error.hint}" if error.hint else ""
            raise AnsibleFilterError(f"{error.message}{hint}") from error
        except ValueError as error:
            # pydantic's errors are of this kind: a document is not what it has to be.
            raise AnsibleFilterError(str(error)) from error

    return call


def probe_request(hostvars: Mapping[str, Any], deep: bool = False) -> dict[str, Any]:
    """What the probe shall look at on a host, from the host's variables. ``deep``: and hash."""
    result: dict[str, Any] = _module("v100ctl.plan").probe_request(_config(hostvars), deep=deep).model_dump(mode="json")
    return result


def _config(hostvars: Mapping[str, Any]) -> Any:
    variables = _module("v100ctl.plan").ansible_variables(_PlainMapping(hostvars))
    # The variables as they are too: Ansible's marks say in which file and line a wrong value stands.
    config = _module("v100ctl.fleet").parse_config(str(hostvars["inventory_hostname"]), variables, hostvars)
    return _module("v100ctl.plan.models").with_listings(config, _module("v100ctl.models.hub").listings(config))


def models_on_host(hostvars: Mapping[str, Any]) -> list[str]:
    """The models that the inventory says are on the host already, by path."""
    found: list[str] = _module("v100ctl.examine").models_on_host(_config(hostvars))
    return found


def header_script(_: str) -> str:
    """The script that reads model headers on a host."""
    text: bytes = _module("v100ctl.models.host").script()
    return text.decode("ascii")


def headers(hostvars: Mapping[str, Any], answer: str) -> dict[str, Any]:
    """What is known of each model, by its path on the host: its header as plain data, or why there is none.

    Args:
        hostvars: The host's variables.
        answer: What the header script printed on the host; empty where it was not run.
    """
    found: dict[str, Any] = _module("v100ctl.examine").headers_for_playbook(_config(hostvars), answer)
    return found


def make_plan(
    hostvars: Mapping[str, Any],
    facts: Mapping[str, Any],
    as_of: str | None = None,
    headers: Mapping[str, Any] | None = None,
    fleet: Mapping[str, Any] | None = None,
    builders: Collection[str] = (),
) -> dict[str, Any]:
    """The decided values for the roles.

    Args:
        hostvars: The host's variables.
        facts: What the probe returned.
        as_of: The day the plan is made for, ``YYYY-MM-DD``; today where it is not given.
        headers: What :func:`headers` returned.
        fleet: The variables of all hosts; only a gateway of the fleet looks at them.
        builders: Hosts that only compile.
    """
    config = _module("v100ctl.fleet").parse_config(
        str(hostvars["inventory_hostname"]), _module("v100ctl.plan").ansible_variables(_PlainMapping(hostvars)), hostvars
    )
    listings = {key: value.model_dump(mode="json") for key, value in _module("v100ctl.models.hub").listings(config).items()}
    day = datetime.date.fromisoformat(str(as_of)) if as_of else datetime.date.today()
    result: dict[str, Any] = _module("v100ctl.plan").from_ansible(
        _PlainMapping(hostvars),
        _plain(facts),
        day,
        headers=_plain(headers or {}),
        listings=listings,
        servers=_servers(fleet or {}, builders) if config.gateway_placement == "fleet" else (),
        ansible_core=ansible_core_version,
    )
    return result


def _servers(fleet: Mapping[str, Any], builders: Collection[str]) -> Any:
    """What the hosts of an inventory serve, for the gateway in front of them."""
    found = {}
    for name in fleet:
        if name in builders:
            continue
        variables = _module("v100ctl.plan").ansible_variables(_PlainMapping(fleet[name]))
        config = _module("v100ctl.fleet").parse_config(str(name), variables, fleet[name])
        address = {key: _plain(fleet[name][key]) for key in ("ansible_host", "ansible_ssh_host") if key in fleet[name]}
        found[str(name)] = (address, config)
    return _module("v100ctl.plan.fleet_gateway").servers_of(found)


def toolkit(hostvars: Mapping[str, Any], facts: Mapping[str, Any]) -> dict[str, Any]:
    """The toolkit on another host that compiles this one's engine, from what the probe returned there."""
    result: dict[str, Any] = _module("v100ctl.plan").toolkit_from_ansible(_PlainMapping(hostvars), _plain(facts))
    return result


def history_record(decided: Mapping[str, Any]) -> dict[str, Any]:
    """What the host files of a plan that it serves by, so that it can go back to it."""
    result: dict[str, Any] = _module("v100ctl.history").record_document(_plain(decided))
    return result


def restarts(decided: Mapping[str, Any], facts: Mapping[str, Any]) -> list[str]:
    """The instances whose process does not run, or runs something else than the plan says."""
    return list(_module("v100ctl.compare").restarts(_plain(decided), _plain(facts)))


def judge(completion: Mapping[str, Any]) -> dict[str, Any]:
    """Whether an answer of ``/v1/chat/completions`` proves that the model serves."""
    result: dict[str, Any] = _module("v100ctl.serving").judge_completion(_plain(completion))
    return result


def vllm_requirements(build: Mapping[str, Any], file: str) -> str:
    """The packages of a release of vLLM, one a line with hashes: the shipped lock's for its Python, or those of the user's file.

    Args:
        build: What the plan asks for.
        file: ``vllm_requirements``, a path on the controller.
    """
    found: str = _module("v100ctl.wheels").requirements(_plain(build), str(file))
    return found


def vllm_wheels(folder: str, requirements: str) -> list[str]:
    """The wheels of a folder on the controller that a release's requirements allow, by their hashes.

    Args:
        folder: ``vllm_wheels``.
        requirements: What :func:`vllm_requirements` returned.
    """
    found: list[str] = _module("v100ctl.wheels").wheels(str(folder), str(requirements))
    return found


def package_file(name: str) -> str:
    """The absolute path of something that the package ships, for modules that read from the controller.

    Args:
        name: Its path inside the package, such as ``probe/host_script.py``.
    """
    path = Path(_module("v100ctl").__file__).resolve().parent / name
    if not path.exists():
        raise AnsibleFilterError(f"{path} is missing. hint: install v100ctl again")
    return str(path)


class FilterModule:
    """Ansible's entry point."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """The filters by name."""
        return {
            "v100ctl_header_script": _explained(header_script),
            "v100ctl_headers": _explained(headers),
            "v100ctl_history_record": _explained(history_record),
            "v100ctl_judge": _explained(judge),
            "v100ctl_models_on_host": _explained(models_on_host),
            "v100ctl_package_file": _explained(package_file),
            "v100ctl_plan": _explained(make_plan),
            "v100ctl_probe_request": _explained(probe_request),
            "v100ctl_restarts": _explained(restarts),
            "v100ctl_toolkit": _explained(toolkit),
            "v100ctl_vllm_requirements": _explained(vllm_requirements),
            "v100ctl_vllm_wheels": _explained(vllm_wheels),
        }
