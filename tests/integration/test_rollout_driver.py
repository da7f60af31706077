"""A rollout of another driver on two hosts that play V100s: one after the other drained, new packages, a reboot, and back."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from tests.device import shapes
from v100ctl.facts import ProbeRequest
from v100ctl.lab.containers import put_file
from v100ctl.lab.gpu import FakeCards, FakeDriver
from v100ctl.lab.hosts import LabHost, run_identity, write_inventory
from v100ctl.lab.image import ensure_image
from v100ctl.probe import probe_host
from v100ctl.probe.connection import Connection

from .addresses import keep_addresses
from .hosts import on_host, v100ctl
from .play_fleet import MODEL, SERVER, Load, PlayFleet, rollout
from .test_nvidia_driver import NEW, moving_to_580, serve_mirror

if TYPE_CHECKING:
    from v100ctl.apply.reporter import Reporter
    from v100ctl.facts import Facts
    from v100ctl.lab.hosts import Lab, RunningHost

pytestmark = pytest.mark.slow


class CardFleet(PlayFleet):
    """Hosts with a card each. ``keys``: the key of each host's own repository of drivers."""

    keys: dict[str, str]
    digest: str

    def want_driver(self, **variables: Any) -> None:
        """The inventory asks for 580 with these variables from now on; without any, for whatever driver works."""
        program = self.folder / "server"
        program.write_text(SERVER)
        argv = ["{release}/bin/server", "--host", "{listen}", "--port", "{port}", "--model", "{model}", "--release", "{release}"]
        engine = {
            "source": {"from_controller": str(program), "sha256": hashlib.sha256(SERVER.encode()).hexdigest(), "kind": "file"},
            "argv": [*argv, "--ctx-size", "{context_length}"],
            # The lab's card shows that it holds this.
            "env": {"FAKE_CUDA_MEMORY_MIB": "2000"},
        }
        chat = {
            "engine": "external",
            "external": "server",
            "model": {"path": MODEL, "sha256": self.digest},
            "gpus": [0],
            "listen": "0.0.0.0",
            "settings": {"context_length": 1024},
        }
        every = {"external_engine_definitions": {"server": engine}, "llm_server_allow_unauthenticated": True}
        hosts = {}
        for host in self.serving:
            moving = {**moving_to_580(self.keys[host.name]), **variables} if variables else {}
            hosts[host.name] = {**host.variables(), **moving, "llm_server_instances": {"chat": chat}}
        hosts[self.front.name] = {**self.front.variables(), "gateway_placement": "fleet", "gateway_listen": "0.0.0.0"}
        write_inventory(self.inventory, hosts, variables=every)


@pytest.fixture(scope="module")
def fleet(lab: Lab, lab_reporter: Reporter, tmp_path_factory: pytest.TempPathFactory) -> Iterator[CardFleet]:
    folder = tmp_path_factory.mktemp("driver")
    image = ensure_image(lab.client, lab_reporter)
    names = [f"test-{os.getpid()}-driver-{number}" for number in ("front", 1, 2)]
    cards = {"cards": FakeCards.parse("1xV100-SXM2-16GB"), "driver": FakeDriver.parse("535")}
    made = [lab.up(LabHost(names[0], owner=run_identity()), image, lab_reporter)]
    made += [lab.up(LabHost(name, owner=run_identity(), **cards), image, lab_reporter) for name in names[1:]]
    model = folder / "x.gguf"
    shapes.write(shapes.MODELS["smallest"](), model)
    for host in made[1:]:
        on_host(host, "mkdir -p /srv/models")
        put_file(host.container, MODEL, model.read_bytes(), mode=0o644)
    kept = keep_addresses(made, folder / "ssh")
    fleet = CardFleet(folder, kept[1:], kept[0])
    fleet.digest = hashlib.sha256(model.read_bytes()).hexdigest()
    fleet.keys = {host.name: serve_mirror(host, NEW)[0] for host in kept[1:]}
    fleet.want_driver()
    done = v100ctl("provision", "-i", fleet.inventory, "--json")
    assert done.code == 0, done.err + done.out
    yield fleet
    lab.down(*names)


def facts_of(host: RunningHost) -> Facts:
    """What the probe sees."""
    return probe_host(Connection.from_vars(host.name, host.variables()), ProbeRequest())


def test_a_driver_that_nobody_may_reboot_for_is_refused_before_anybody_is_drained(fleet: CardFleet) -> None:
    fleet.want_driver(nvidia_driver_reboot="ask")
    code, report, said = rollout(fleet)
    assert (code, report) == (1, {})
    assert "`nvidia_driver_reboot` is `ask`" in said
    assert set(fleet.servers().values()) == {"UP"}


def test_another_driver_costs_no_request(fleet: CardFleet) -> None:
    before = {host.name: facts_of(host) for host in fleet.serving}
    assert {facts.nvidia.module_version.partition(".")[0] for facts in before.values()} == {"535"}
    fleet.want_driver(nvidia_driver_reboot="auto")
    with Load(fleet.address) as load:
        code, report, said = rollout(fleet)
    assert code == 0, said
    assert load.problems == []
    assert load.answered > 20
    assert [len(batch) for batch in report["batches"]] == [1, 1]
    for host in fleet.serving:
        after = facts_of(host)
        assert after.nvidia.module_version == NEW
        assert after.boot_id not in ("", before[host.name].boot_id)
        told = report["hosts"][host.name]
        steps = [event["step"] for event in told["events"]]
        assert steps == ["prepare", "look", "drain", "measure", "stop", "apply", "measure again", "open", "settle"]
        assert (told["phase"], told["problem"], told["reboots"]) == ("done", "", True)
        assert told["after"]["chat"] > 0
    fleet.assert_all_serve([1024])
    # The second left only when the first was back.
    first, second = (report["hosts"][batch[0]]["events"] for batch in report["batches"])
    ended = {event["step"]: event["at"] for event in first}
    assert {event["step"]: event["at"] for event in second}["drain"] >= ended["settle"]
    # Nothing is left to do.
    code, report, said = rollout(fleet)
    assert (code, report["hosts"]) == (0, {}), said + json.dumps(report)
