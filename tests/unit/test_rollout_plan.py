"""What keeps a rollout from being begun: a driver that changes where nobody may reboot."""

from __future__ import annotations

import dataclasses
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from v100ctl.access import Access
from v100ctl.apply.reporter import make_reporter
from v100ctl.examine import Examined
from v100ctl.findings import Finding
from v100ctl.fleet import Fleet, FleetHost
from v100ctl.plan.types import DriverDecision
from v100ctl.probe.connection import Connection
from v100ctl.rollout import fleet_rollout as module
from v100ctl.rollout.fleet_rollout import _host_state, _problem
from v100ctl.rollout.state import Options

from .factory import applied_facts, make_config, make_plan

DRIVER = Finding("driver.branch", "pending", "driver", "nvidia_driver", "580", "535", "error", "provision", restarts=("chat",))
FILE = Finding("file.content:/x", "drifted", "file", "llm_server", "a", "b", "error", "provision", restarts=("chat",))
HOLD = Finding("driver.unheld", "drifted", "driver", "nvidia_driver", "held: libcuda1", "not held", "error", "provision")
SETTING = Finding("file.content:/y", "drifted", "file", "nvidia_driver", "a", "b", "error", "provision")
UNLOADED = Finding("driver.not-loaded", "pending", "driver", "nvidia_driver", "loaded", "not", "error", "provision")


def examined(finding: Finding, *, serving: tuple[str, ...] = ("chat",), kind: str = "ssh", **variables: Any) -> Examined:
    decision = DriverDecision(branch="580", version="", action="replace", source="somewhere", serving=serving)
    plan = dataclasses.replace(make_plan(), driver=decision)
    host = FleetHost("a", {"ansible_host": "192.0.2.1"}, make_config(**variables))
    return Examined(host, Connection("a", kind=kind, address="192.0.2.1"), plan=plan, findings=(finding,))


@pytest.mark.parametrize(
    ("found", "says"),
    [
        (examined(DRIVER), ""),
        (examined(DRIVER, nvidia_driver_reboot="auto"), ""),
        (examined(DRIVER, nvidia_driver_reboot="never"), "`nvidia_driver_reboot` is `never`"),
        (examined(DRIVER, nvidia_driver_reboot="ask"), "`nvidia_driver_reboot` is `ask`"),
        (examined(DRIVER, kind="local"), "a reboot of the controller itself"),
        (examined(DRIVER, gateway_placement="fleet"), "take the gateway of the whole fleet away"),
        (examined(FILE, gateway_placement="fleet"), ""),
        # Nobody is stopped for these.
        (examined(FILE, nvidia_driver_reboot="never"), ""),
        (examined(HOLD, nvidia_driver_reboot="never"), ""),
        (examined(DRIVER, serving=(), nvidia_driver_reboot="never"), ""),
    ],
)
def test_a_driver_that_nobody_may_reboot_for_is_refused(found: Examined, says: str) -> None:
    problem = _problem(found)
    assert says in problem
    assert bool(problem) == bool(says)


@pytest.mark.parametrize(
    ("finding", "reboots"), [(DRIVER, True), (UNLOADED, True), (FILE, False), (HOLD, False), (SETTING, False)]
)
def test_servers_stop_for_another_driver_alone(finding: Finding, reboots: bool) -> None:
    assert _host_state(examined(finding), "a").reboots is reboots


def test_a_new_host_is_no_server_that_others_could_rely_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    decided = make_plan()
    hosts = {name: FleetHost(name, {"ansible_host": name}, make_config()) for name in "abcd"}
    found = {
        name: Examined(
            host,
            Connection(name, kind="ssh", address=name),
            applied_facts(decided, **({"processes": []} if name in "bd" else {})),
            decided,
            (FILE,),
        )
        for name, host in hosts.items()
    }
    monkeypatch.setattr(module, "examine", lambda *_, **__: found)
    options = Options(canary=0, batch="100%")
    rollout = module.plan_rollout(Fleet(hosts), Access(), make_reporter(), date(2026, 11, 30), options)
    assert rollout.servers == {"chat": 2}
    assert {name: host.serves for name, host in rollout.hosts.items()} == {"a": ["chat"], "b": [], "c": ["chat"], "d": []}
    # It is out of the gateway until it was judged: one that answers rubbish looks healthy there.
    assert {name: host.starts for name, host in rollout.hosts.items()} == {"a": [], "b": ["chat"], "c": [], "d": ["chat"]}
    assert not [name for name, host in rollout.hosts.items() if host.serves_meanwhile]
    assert [set(batch) & {"a", "c"} for batch in rollout.batches if set(batch) & {"a", "c"}] == [{"a"}, {"c"}]
