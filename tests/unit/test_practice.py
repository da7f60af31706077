"""What `v100ctl try` prints and how it exits; the run itself is tested on real hosts."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
from docker.models.containers import Container

from tests.unit.factory import AS_OF, applied_facts, make_facts
from v100ctl import practice
from v100ctl.audit import AuditReport
from v100ctl.cli.practice import print_summary
from v100ctl.examine import decide
from v100ctl.fleet import FleetHost, parse_config
from v100ctl.lab.hosts import RunningHost
from v100ctl.plan import plan
from v100ctl.practice import HOST, Practice, next_steps
from v100ctl.provision import HostResult
from v100ctl.serving import Completion


def _practice(**changes: Any) -> Practice:
    """A run on a host that is as planned but for ``changes`` to its facts."""
    config = parse_config(HOST, practice.inventory_variables(builder=False))
    facts = applied_facts(plan(HOST, config, make_facts(), as_of=AS_OF), **changes)
    state = decide(FleetHost(HOST, {}, config), None, facts, as_of=AS_OF)
    return Practice(
        inventory=Path("/state with blank/hosts.yml"),
        host=RunningHost(HOST, "172.17.0.2", "ssh-ed25519 AAAA", Path("/state with blank"), cast(Container, None)),
        result=HostResult("changed", state),
        log_path=None,
        elapsed_s=12.0,
        question="What is\x1b[31m it?",
        answer=Completion("It is\x07 Paris.", 5, 41.26, 0.2),
        audit=AuditReport.of({HOST: state}),
    )


def test_a_clean_run_tells_all_of_it_and_exits_0(capsys: pytest.CaptureFixture[str]) -> None:
    run = _practice()
    assert run.exit_code == 0
    print_summary(run, no_color=True)
    out, err = capsys.readouterr()
    assert err == ""
    for text in ("Q: What is it?", "A: It is Paris.", "5 tokens, 41.3 tokens/s", "audit: clean", "v100-chat.service", "--port"):
        assert text in out
    assert "ssh -F '/state with blank/ssh_config' practice\n" in out
    assert "v100ctl provision -i '/state with blank/hosts.yml'\n" in out
    assert "v100ctl try --down\n" in out
    assert "\x1b" not in out


def test_drift_is_shown_and_exits_2(capsys: pytest.CaptureFixture[str]) -> None:
    run = _practice(units={"v100-chat.service": {"unit_file_state": "disabled"}})
    assert run.exit_code == 2
    print_summary(run, no_color=True)
    out = capsys.readouterr().out
    assert "audit: drift" in out
    assert "disabled" in out


def test_a_host_that_was_not_provisioned_exits_1_and_promises_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    import dataclasses

    run = dataclasses.replace(_practice(), answer=None, audit=None)
    assert run.exit_code == 1
    print_summary(run, no_color=True)
    out = capsys.readouterr().out
    assert "A:" not in out
    assert "ssh -F" not in out


def test_every_next_step_says_what_it_does() -> None:
    assert all(command and purpose for command, purpose in next_steps(_practice()))
