"""Provisioning: which hosts are touched, what is refused, and what the exit code says. Whole runs are integration tests."""

from __future__ import annotations

import dataclasses
import io
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from v100ctl.access import Access
from v100ctl.apply import ApplyResult, make_reporter
from v100ctl.apply import runner as apply_runner
from v100ctl.errors import UnreachableError, V100ctlError
from v100ctl.examine import Examined, decide
from v100ctl.facts import Facts
from v100ctl.fleet import Fleet, FleetHost
from v100ctl.probe import Connection, PythonMissingError
from v100ctl.provision import (
    HostResult,
    HostStatus,
    ProvisionResult,
    _early_result,
    _refuse_many_restarts,
    _verdict_after,
    alone_on,
    provision,
)

from .factory import AS_OF, applied_facts, make_config, make_facts, make_plan


def examined(facts: Facts, **instance: Any) -> Examined:
    return decide(FleetHost("h1", {}, make_config(instance)), None, facts, as_of=AS_OF)


SERVING = applied_facts(make_plan())
BARE = make_facts()
RESTARTING = examined(SERVING, settings={"context_length": 1024})


def test_only_running_servers_count_as_restarted() -> None:
    assert RESTARTING.restarts == ("chat",)
    assert examined(SERVING).restarts == ()
    assert examined(BARE).restarts == (), "a bare host serves nobody yet"


def test_what_is_not_ours_is_no_change() -> None:
    facts = applied_facts(make_plan(), units={"v100-chat.service": {"drop_in_paths": ["/etc/systemd/system/x.conf"]}})
    state = examined(facts)
    assert [finding.kind for finding in state.findings] == ["external"]
    assert state.changes == ()


def test_two_serving_hosts_are_not_restarted_at_once() -> None:
    with pytest.raises(V100ctlError, match="2 hosts at once: a, b") as caught:
        _refuse_many_restarts({"a": RESTARTING, "b": RESTARTING, "c": examined(BARE)})
    assert "--limit" in (caught.value.hint or "")
    _refuse_many_restarts({"a": RESTARTING, "b": examined(BARE), "c": examined(SERVING)})
    _refuse_many_restarts({})


def test_a_host_that_cannot_be_provisioned_is_said_early() -> None:
    unreachable = _early_result(Examined(FleetHost("h1", {}, make_config()), error=UnreachableError("no route", hint="look")))
    assert unreachable is not None
    assert (unreachable.status, unreachable.message, unreachable.hint) == ("unreachable", "no route", "look")
    refused = _early_result(examined(make_facts(systemd=None)))
    assert refused is not None
    assert refused.status == "refused"
    assert "systemd-missing" in refused.message
    assert "nothing was changed" in refused.message
    assert _early_result(examined(BARE)) is None


def test_two_runs_do_not_change_one_host_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    connection = Connection(host="h1", address="192.0.2.1", port=22)
    # The same machine under two names is one host.
    here = dataclasses.replace(examined(BARE), connection=connection)
    there = dataclasses.replace(here, connection=dataclasses.replace(connection, host="h2"))
    said = io.StringIO()
    reporter = make_reporter(stream=said)
    entered = threading.Event()

    def second() -> None:
        with alone_on([there], reporter):
            entered.set()

    with alone_on([here], reporter):
        thread = threading.Thread(target=second)
        thread.start()
        while "waiting for it" not in said.getvalue():
            time.sleep(0.01)
        assert not entered.is_set()
    thread.join(10)
    assert entered.is_set()


@pytest.mark.parametrize(
    ("statuses", "code"),
    [
        (["unchanged"], 0),
        (["changed", "unchanged"], 0),
        (["would-change", "unchanged"], 2),
        (["would-change", "failed"], 1),
        (["refused", "changed"], 1),
        (["unreachable", "would-change"], 1),
    ],
)
def test_the_worst_host_decides_the_exit_code(statuses: list[HostStatus], code: int) -> None:
    state = examined(BARE)
    assert ProvisionResult({str(number): HostResult(status, state) for number, status in enumerate(statuses)}).exit_code == code


#: What came out, what was said, and the hosts that Ansible ran for.
Ran = tuple[ProvisionResult, str, list[str]]
Run = Callable[..., Ran]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """A provision of hosts in given states; Ansible changes nothing, and says that all went well where it got to."""

    def provisioned(
        given: Mapping[str, Examined], *, reached: bool = True, told: dict[str, Any] | None = None, **options: Any
    ) -> Ran:
        states = {name: replace(state, host=replace(state.host, name=name)) for name, state in given.items()}
        ran: list[str] = []

        def examine(hosts: Sequence[FleetHost], *args: Any, **kwargs: Any) -> dict[str, Examined]:
            return {host.name: states[host.name] for host in hosts}

        def run_playbook(name: str, inventory: object, hosts: Sequence[str], **kwargs: Any) -> ApplyResult:
            ran.extend(hosts)
            if told is not None:
                told.update(kwargs["extra_vars"])
            counts = apply_runner.HostResult("ok", ok=1, changed=0, failed=0, unreachable=0, skipped=0, rescued=0, ignored=0)
            return ApplyResult({host: counts for host in hosts if reached}, (), {}, tmp_path / "log")

        monkeypatch.setattr("v100ctl.provision.examine", examine)
        monkeypatch.setattr("v100ctl.provision.run_playbook", run_playbook)
        monkeypatch.setattr("v100ctl.provision.fetch", lambda *args: None)
        said = io.StringIO()
        reporter = make_reporter(stream=said)
        fleet = Fleet({name: state.host for name, state in states.items()}, sources=("x",))
        result = provision(fleet, access=Access(), reporter=reporter, as_of=AS_OF, **options)
        reporter.close()
        return result, said.getvalue(), ran

    return provisioned


def test_check_says_what_would_change_even_where_a_run_is_refused(run: Run) -> None:
    states = {"a": RESTARTING, "b": RESTARTING}
    with pytest.raises(V100ctlError, match="2 hosts at once"):
        run(states)
    result, said, ran = run(states, check=True)
    assert (result.exit_code, ran) == (2, ["a", "b"])
    assert "warning: this would restart servers on 2 hosts at once" in said


def test_a_host_that_ansible_did_not_get_to_is_said(run: Run) -> None:
    result, said, _ = run({"a": examined(BARE)}, reached=False)
    assert result.hosts["a"].status == "unreachable"
    assert "Ansible did not reach this host" in said


def test_roles_run_for_what_a_probe_does_not_tell(run: Run) -> None:
    told: dict[str, Any] = {}
    states = {"a": examined(SERVING), "b": examined(SERVING), "c": examined(BARE)}
    result, _, ran = run(states, named_roles=True, more_roles={"a": ("model_store",)}, deep=True, told=told)
    assert ran == ["a", "c"], "one is as planned, as far as anybody knows"
    assert (told["v100ctl_deep"], told["v100ctl_roles"]["a"]) == (True, ("model_store",))
    assert "llm_server" in told["v100ctl_roles"]["c"]
    assert (result.hosts["a"].status, result.hosts["b"].status) == ("unchanged", "unchanged")
    told.clear()
    run({"c": examined(BARE)}, named_roles=True, told=told)
    assert "v100ctl_deep" not in told


def test_a_warning_is_said_where_nothing_changes_too(run: Run) -> None:
    dropped_in = applied_facts(make_plan(), units={"v100-chat.service": {"drop_in_paths": ["/etc/x.conf"]}})
    result, said, ran = run({"a": examined(dropped_in)}, check=True)
    assert (result.hosts["a"].status, ran) == ("unchanged", [])
    assert "/etc/x.conf" in said


def test_a_host_that_gets_no_python_does_not_keep_the_others(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config()
    missing = PythonMissingError("no Python", hint="install it")
    bare = Examined(FleetHost("a", {}, config), cast(Connection, object()), error=missing)

    def open_session(connection: object) -> None:
        raise UnreachableError("the line is cut")

    monkeypatch.setattr("v100ctl.provision.open_session", open_session)
    result, said, ran = run({"a": bare, "b": examined(BARE)}, confirm=lambda question: True)
    assert result.hosts["a"].status == "unreachable"
    assert "the line is cut" in said
    assert ran == ["b"]


@pytest.mark.parametrize(("changed", "status"), [(True, "changed"), (False, "unchanged")])
def test_a_forced_run_that_changed_nothing_says_so(changed: bool, status: str) -> None:
    reporter = make_reporter(stream=io.StringIO())
    assert _verdict_after("h1", examined(SERVING), reporter, changed=changed).status == status
    assert _verdict_after("h1", examined(BARE), reporter, changed=changed).status == "failed", "it still differs"
