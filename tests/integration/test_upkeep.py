"""The watchdog and the nightly restart on a host with a real engine behind the gateway.

The tests of this file share one host and run in order. Each leaves a server that serves.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zoneinfo import ZoneInfo

import pytest

from v100ctl.lab.hosts import LabHost, run_identity, write_inventory
from v100ctl.lab.image import ensure_image
from v100ctl.plan import upkeep

from .hosts import on_host, serving_variables, v100ctl

if TYPE_CHECKING:
    from v100ctl.apply.reporter import Reporter
    from v100ctl.lab.hosts import Lab, RunningHost

# The engine is compiled once, by the first `try`.
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("practiced")]

UNIT = "v100-chat.service"
NIGHT = "v100ctl-nightly@chat.service"
LIMIT_S = 30
#: Streams answers through the gateway, one after the other, until there is such a file; says how each ended.
LOAD = """
import json, pathlib, sys, urllib.request
ends = []
while not pathlib.Path(sys.argv[1]).exists() or not ends:
    body = {"prompt": "Once upon a time", "max_tokens": int(sys.argv[2]), "stream": True, "ignore_eos": True}
    kind = {"Content-Type": "application/json"}
    asked = urllib.request.Request("http://127.0.0.1:8000/v1/completions", json.dumps(body).encode(), kind)
    try:
        with urllib.request.urlopen(asked, timeout=600) as answer:
            lines = [line for line in answer.read().decode().splitlines() if line]
        ends.append("whole" if lines[-1] == "data: [DONE]" else lines[-1])
    except OSError as error:
        ends.append(repr(error))
print(json.dumps(ends))
"""


@pytest.fixture(scope="module")
def inventory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fleet") / "hosts.yml"


def provision(host: RunningHost, inventory: Path, nightly: dict[str, Any]) -> None:
    """Makes the host what the inventory says with such a nightly restart, and nothing is left to do."""
    variables = serving_variables(watchdog={"limit_s": LIMIT_S}, nightly_restart=nightly, settings={"parallel": 2})
    write_inventory(inventory, {host.name: host.variables()}, variables={**variables, "gateway_placement": "host"})
    done = v100ctl("provision", "-i", inventory, "--json")
    assert done.code == 0, done.err
    again = v100ctl("plan", "-i", inventory, "--json")
    assert again.code == 0, again.out


@pytest.fixture(scope="module")
def serving(lab: Lab, lab_reporter: Reporter, inventory: Path) -> Iterator[RunningHost]:
    """A host that serves behind the gateway, with a quick watchdog and a nightly restart."""
    wanted = LabHost(f"upkeep-{os.getpid()}", owner=run_identity())
    host = lab.up(wanted, ensure_image(lab.client, lab_reporter), lab_reporter)
    provision(host, inventory, {"window": "03:00-05:00"})
    yield host
    lab.down(host.name)


def wait_for(what: Callable[[], Any]) -> Any:
    """The first true value of ``what``, which a busy machine may take minutes to give."""
    for _ in range(600):
        found = what()
        if found:
            return found
        time.sleep(0.5)
    raise AssertionError("it never came")


def main_pid(host: RunningHost) -> int:
    return int(on_host(host, f"systemctl show --value --property MainPID {UNIT}"))


def engine_says(host: RunningHost, path: str) -> str:
    """What the engine itself answers; empty where it does not, or with another status than 200."""
    asked = f"import urllib.request as r; print(r.urlopen('http://127.0.0.1:18000{path}', timeout=10).read().decode())"
    code, output = host.execute("python3", "-c", asked)
    return output if code == 0 else ""


def answers(host: RunningHost) -> bool:
    return "ok" in engine_says(host, "/health")


def state(host: RunningHost, what: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(on_host(host, f"cat {upkeep.STATE_DIR}/chat.{what}.json"))
    return found


def start_load(host: RunningHost, name: str, tokens: int) -> Callable[[], list[str]]:
    """Two clients that stream through the gateway; the returned function ends them and says how each of their answers ended."""
    on_host(host, f"rm -f /run/{name}.*")
    for number in (1, 2):
        command = f"python3 -c {shlex.quote(LOAD)} /run/{name}.end {tokens} >/run/{name}.{number} 2>&1"
        on_host(host, f"systemd-run --quiet --unit {name}-{number} /bin/sh -c {shlex.quote(command)}")
    wait_for(lambda: '"is_processing":true' in engine_says(host, "/slots"))

    def end() -> list[str]:
        on_host(host, f"touch /run/{name}.end")
        return [
            end
            for number in (1, 2)
            for end in json.loads(wait_for(lambda number=number: on_host(host, f"cat /run/{name}.{number}").strip()))
        ]

    return end


def night(host: RunningHost) -> dict[str, Any]:
    """Run the nightly restart as cron does, but wait for its end; what it has written down."""
    host.execute("systemctl", "start", NIGHT)
    return state(host, "nightly")


def test_units_are_sound_and_cron_reads_its_file(serving: RunningHost) -> None:
    for unit in (upkeep.WATCHDOG_UNIT, NIGHT):
        assert on_host(serving, f"systemd-analyze verify {unit} 2>&1").strip() == ""
        exposure = on_host(serving, f"systemd-analyze security --no-pager {unit} | tail -1")
        assert float(re.findall(r"[0-9]+\.[0-9]", exposure)[0]) <= 4.0, exposure
    assert on_host(serving, f"systemctl is-active cron {upkeep.WATCHDOG_UNIT}").split() == ["active", "active"]
    # cron takes a file of root's that nobody else can write.
    assert on_host(serving, f"stat -c '%U %a' {upkeep.CRON_FILE}").split() == ["root", "644"]


def test_a_stopped_server_is_restarted_by_the_watchdog(serving: RunningHost) -> None:
    before = wait_for(lambda: main_pid(serving))
    # It has been seen well.
    time.sleep(LIMIT_S / 3)
    on_host(serving, f"kill -STOP {before}")
    wait_for(lambda: main_pid(serving) not in (0, before))
    wait_for(lambda: answers(serving))
    document = wait_for(lambda: state(serving, "watchdog"))
    assert document["restarts_count"] == 1 and "it has not answered for" in document["reason"], document
    assert "is wedged and is restarted" in on_host(serving, f"journalctl --no-pager -u {upkeep.WATCHDOG_UNIT}")


def test_one_that_somebody_has_stopped_stays_stopped(serving: RunningHost) -> None:
    on_host(serving, f"systemctl stop {UNIT}")
    assert night(serving)["outcome"] == "idle"
    time.sleep(LIMIT_S * 1.5)
    assert main_pid(serving) == 0
    on_host(serving, f"systemctl start {UNIT}")
    wait_for(lambda: answers(serving))


def test_a_night_under_load_loses_no_request(serving: RunningHost) -> None:
    before = main_pid(serving)
    end = start_load(serving, "load", 40)
    document = night(serving)
    ends = end()
    assert document["outcome"] == "restarted", document
    assert main_pid(serving) not in (0, before)
    assert len(ends) >= 4 and set(ends) == {"whole"}, ends
    # Nobody was restarted by the watchdog meanwhile.
    assert state(serving, "watchdog")["restarts_count"] == 1


def test_at_the_limit_the_night_is_skipped(serving: RunningHost) -> None:
    before = main_pid(serving)
    on_host(serving, f'cp {upkeep.SETTINGS} /run/upkeep.json; sed -i \'s/"limit_s": 120/"limit_s": 1/\' {upkeep.SETTINGS}')
    end = start_load(serving, "long", 1500)
    document = night(serving)
    ends = end()
    on_host(serving, f"cp /run/upkeep.json {upkeep.SETTINGS}")
    assert document["outcome"] == "skipped" and "of its requests still ran" in document["reason"], document
    assert main_pid(serving) == before
    assert set(ends) == {"whole"}, ends


def test_a_unit_that_does_not_start_gives_way_to_the_one_that_was_proved(serving: RunningHost) -> None:
    proved = on_host(serving, f"cat /etc/systemd/system/{UNIT}")
    on_host(serving, f"sed -i 's/--parallel 2/--parallel none/' /etc/systemd/system/{UNIT}; systemctl daemon-reload")
    assert on_host(serving, f"cat /etc/systemd/system/{UNIT}") != proved
    document = night(serving)
    assert document["outcome"] == "fell-back", document
    assert on_host(serving, f"cat /etc/systemd/system/{UNIT}") == proved
    assert answers(serving)
    assert on_host(serving, f"systemctl is-failed {NIGHT} || true").strip() == "failed"
    assert set(start_load(serving, "after", 5)()) == {"whole"}


def test_where_a_zone_is_asked_for_a_timer_takes_the_place_of_cron(serving: RunningHost, inventory: Path) -> None:
    before = main_pid(serving)
    provision(serving, inventory, {"window": "03:00-05:00", "time_zone": "Asia/Tokyo"})
    assert main_pid(serving) == before
    timer = NIGHT.replace(".service", ".timer")
    assert on_host(serving, f"systemd-analyze verify {timer} 2>&1").strip() == ""
    assert on_host(serving, f"systemctl is-enabled {timer}; systemctl is-active {timer}").split() == ["enabled", "active"]
    assert serving.execute("test", "-e", upkeep.CRON_FILE)[0] != 0
    # The host's own clock is on another zone.
    shown = on_host(serving, f"TZ=UTC systemctl show --value --property NextElapseUSecRealtime {timer}").strip()
    next_run = datetime.strptime(shown, "%a %Y-%m-%d %H:%M:%S UTC").replace(tzinfo=UTC)
    assert next_run.astimezone(ZoneInfo("Asia/Tokyo")).hour in (3, 4), shown
