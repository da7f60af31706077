"""Provisioning: which hosts are touched, what is refused, and what the exit code says. Whole runs are integration tests."""

from __future__ import annotations

from typing import Any

import pytest

from v100ctl.errors import UnreachableError, V100ctlError
from v100ctl.examine import Examined, decide
from v100ctl.facts import Facts
from v100ctl.fleet import FleetHost
from v100ctl.provision import HostResult, HostStatus, ProvisionResult, _early_result, _refuse_many_restarts

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
