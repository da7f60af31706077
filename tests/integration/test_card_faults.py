"""What goes wrong with V100s, on lab hosts: each fault is named by plan and audit with what mends it, and what a role or
`v100ctl recover` can mend is mended, over SSH; what only power, a reboot or a hand mends is said and left alone.

The hosts have no engine: what is compared is what the roles `nvidia_driver` and `gpu_tuning` make, and the state of the cards.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from v100ctl.facts import Facts, ProbeRequest
from v100ctl.lab.gpu import FakeCards, FakeDriver, fault
from v100ctl.lab.hosts import LabHost, run_identity
from v100ctl.lab.image import ensure_image
from v100ctl.probe import probe_host
from v100ctl.probe.connection import Connection

from .hosts import ROOT, Done, WriteInventory, on_host, v100ctl

if TYPE_CHECKING:
    from v100ctl.apply.reporter import Reporter
    from v100ctl.lab.hosts import Lab, RunningHost

ROLES = ("nvidia_driver", "gpu_tuning")
LIMIT_W = 180
ASK_AGAIN = 5
#: The two roles as `playbooks/provision.yml` has them; what serves on the cards is another matter.
PLAYBOOK = f"""
- hosts: all
  gather_facts: false
  become: true
  tasks:
    - name: Plan
      ansible.builtin.import_tasks: {ROOT}/playbooks/tasks/plan.yml

    - name: Install the driver
      ansible.builtin.include_role:
        name: nvidia_driver
      vars:
        nvidia_driver_decision: "{{{{ v100ctl_plan.driver }}}}"
      when: "'nvidia_driver' in v100ctl_roles"

    - name: Tune
      ansible.builtin.include_role:
        name: gpu_tuning
      vars:
        gpu_tuning_decision: "{{{{ v100ctl_plan.tuning }}}}"
        gpu_tuning_files: "{{{{ v100ctl_plan.files | selectattr('role', 'equalto', 'gpu_tuning') }}}}"
      when: "'gpu_tuning' in v100ctl_roles"
"""


class Fleet:
    """One host with V100s, and what a user does with it.

    A machine on which much else runs may keep `nvidia-smi` beyond the probe's limit, which looks like a driver that hangs: unless
    it does, what is asked is asked again.
    """

    def __init__(self, host: RunningHost, inventory: Path) -> None:
        self.host = host
        self.inventory = inventory
        self.hangs = False

    def facts(self) -> Facts:
        """What the probe sees."""
        for _ in range(ASK_AGAIN):
            facts = probe_host(Connection.from_vars(self.host.name, self.host.variables()), ProbeRequest())
            if self.hangs or facts.nvidia.smi.status != "timeout":
                break
        return facts

    def run_roles(self, *roles: str) -> str:
        """The roles by `ansible-playbook`; its recap."""
        playbook = self.inventory.parent / "cards.yml"
        playbook.write_text(PLAYBOOK, encoding="utf-8")
        argv = ["ansible-playbook", "-i", str(self.inventory), str(playbook), "-e", f"v100ctl_roles={','.join(roles or ROLES)}"]
        environment = {
            **os.environ,
            "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
            "ANSIBLE_ROLES_PATH": str(ROOT / "roles"),
            "ANSIBLE_FILTER_PLUGINS": str(ROOT / "playbooks/filter_plugins"),
            "PYTHONPATH": str(ROOT / "src"),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        }
        done = subprocess.run(argv, env=environment, capture_output=True, text=True, check=False, timeout=1500)
        assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
        return done.stdout

    def audit(self, *, xids: bool = False) -> dict[str, dict[str, Any]]:
        """The findings of the two roles, by id. A card's is told by the card's index instead of its UUID or address.

        ``xids``: with what the kernel log has of the last day, earlier tests among it.
        """
        for _ in range(ASK_AGAIN):
            document = v100ctl("audit", "-i", self.inventory, "--json").document["hosts"][self.host.name]
            if self.hangs or "driver.wedged" not in [finding["id"] for finding in document["findings"]]:
                break
        self.status = document["status"]
        keys = {}
        for number, gpu in enumerate(sorted(self.facts_at_rest.gpus, key=lambda gpu: gpu.pci_address)):
            keys |= {gpu.uuid: str(number), gpu.pci_address: str(number)}
        findings = {}
        for finding in document["findings"]:
            if finding["role"] in ROLES and (xids or not finding["id"].startswith("gpu.xid:")):
                head, _, tail = finding["id"].partition(":")
                findings[f"{head}:{keys[tail]}" if tail in keys else finding["id"]] = finding
        return findings

    def plan(self) -> dict[str, str]:
        """The plan's rules that refuse or warn, with their severities."""
        rules = v100ctl("plan", "-i", self.inventory, "--json").document["hosts"][self.host.name]["rules"]
        return {rule["id"]: rule["severity"] for rule in rules if rule["severity"] != "info"}

    def recover(self, *options: str) -> tuple[Done, dict[str, Any]]:
        """`v100ctl recover` and what it says of the host."""
        for _ in range(ASK_AGAIN):
            done = v100ctl("recover", self.host.name, "-i", self.inventory, "--json", *options)
            answer = done.document["hosts"][self.host.name]
            if self.hangs or "driver-wedged" not in [rule["id"] for rule in answer["left"]]:
                break
        return done, answer

    def rest(self) -> Fleet:
        """Remembers how it is when all is well."""
        self.facts_at_rest = self.facts()
        return self

    def state(self) -> str:
        """What a recovery could change: modules, settings of the cards, processes of the services."""
        return on_host(
            self.host,
            "cat /run/fake-v100/modules; nvidia-smi --query-gpu=persistence_mode,power.limit --format=csv 2>&1 || true;"
            "systemctl show --property=MainPID,ActiveEnterTimestamp nvidia-persistenced v100ctl-gpu-tuning",
        )


def variables() -> dict[str, Any]:
    """An instance on both cards. Its model is nobody's: nothing is served here."""
    chat = {"model": {"url": "http://127.0.0.1:9/x.gguf", "sha256": "ab" * 32, "size_bytes": 4096}, "gpus": [0, 1], "port": 8000}
    return {
        "llama_cpp_backend": "cuda",
        "gpu_tuning_power_limit_w": LIMIT_W,
        "nvidia_driver_reboot": "auto",
        "llm_server_instances": {"chat": chat},
    }


@pytest.fixture(scope="module")
def cards(lab: Lab, lab_reporter: Reporter, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Two V100-PCIE-16GB with driver 535 as the two roles make them; every test leaves them well."""
    from v100ctl.lab.hosts import write_inventory

    name = f"test-{os.getpid()}-cards"
    made = LabHost(name, owner=run_identity(), cards=FakeCards.parse("2xV100-PCIE-16GB"), driver=FakeDriver.parse("535"))
    host = lab.up(made, ensure_image(lab.client, lab_reporter), lab_reporter)
    inventory = write_inventory(tmp_path_factory.mktemp("cards") / "hosts.yml", {name: host.variables()}, variables=variables())
    fleet = Fleet(host, inventory)
    fleet.run_roles()
    yield fleet.rest()
    lab.down(name)


@pytest.fixture(autouse=True)
def well(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test that fails halfway must not break the next one: a host that was reset is set anew."""
    yield
    if "cards" in request.fixturenames:
        fleet = request.getfixturevalue("cards")
        fleet.hangs = False
        on_host(fleet.host, "systemctl restart v100ctl-gpu-tuning.service")


def named(findings: dict[str, dict[str, Any]], *keys: str) -> dict[str, tuple[Any, ...]]:
    """Some fields of each finding."""
    return {name: tuple(finding[key] for key in keys) for name, finding in findings.items()}


# --- what a role or the recovery mends ----------------------------------------------------------------------------------------


def test_the_roles_leave_nothing_to_be_found(cards: Fleet) -> None:
    assert cards.audit() == {}
    done, answer = cards.recover()
    assert (done.code, answer["status"]) == (0, "well"), done.out + done.err


def test_poisoned_memory_and_a_page_to_be_retired_are_recovered(cards: Fleet, lab_fault: Callable[..., None]) -> None:
    lab_fault(cards.host, "uvm-poisoned")
    lab_fault(cards.host, "memory-error", card=1)
    findings = cards.audit(xids=True)
    assert named(findings, "kind", "layer", "severity") == {
        "driver.uvm-poisoned": ("external", "driver", "critical"),
        "gpu.retirement-pending:1": ("external", "hardware", "error"),
        "gpu.ecc-errors:1": ("external", "hardware", "warn"),
        "gpu.xid:1": ("external", "hardware", "warn"),
    }
    assert f"v100ctl recover {cards.host.name}" in findings["driver.uvm-poisoned"]["fix"]
    # No program would start on the cards: nothing is provisioned on them.
    assert cards.status == "error"
    before = cards.state()
    done, answer = cards.recover("--check")
    assert (done.code, answer["status"], answer["users"]) == (0, "would-recover", ["nvidia-persistenced.service"])
    assert cards.state() == before
    done, answer = cards.recover()
    assert (done.code, answer["status"]) == (0, "recovered"), done.out + done.err
    assert answer["steps"] == ["users stopped", "persistence off", "unified memory reloaded", "cards reset", "users started"]
    on_host(cards.host, "fake-cuda-context")
    # The cards keep what the role had set, and the kernel log what has happened.
    limits = on_host(cards.host, "nvidia-smi --query-gpu=power.limit --format=csv,noheader,nounits").split()
    assert limits == [f"{LIMIT_W}.00"] * 2
    assert set(cards.audit(xids=True)) == {"gpu.xid:1"}


def test_a_library_of_another_version_gets_its_module(cards: Fleet, lab_fault: Callable[..., None]) -> None:
    lab_fault(cards.host, "driver-mismatch")
    findings = cards.audit()
    assert named(findings, "kind", "layer", "severity", "role")["driver.library-mismatch"] == (
        "external",
        "driver",
        "error",
        "nvidia_driver",
    )
    assert "535.54.03" in findings["driver.library-mismatch"]["actual"]
    done, answer = cards.recover()
    assert (done.code, answer["steps"]) == (0, ["users stopped", "driver reloaded", "users started"]), done.out + done.err
    assert cards.facts().nvidia.module_version == "535.309.01"
    assert cards.audit() == {}


def test_persistence_that_was_switched_off_comes_back_with_the_role(cards: Fleet, lab_fault: Callable[..., None]) -> None:
    lab_fault(cards.host, "persistence-off")
    findings = cards.audit()
    assert named(findings, "kind", "layer", "severity", "role", "fix") == {
        **{
            f"gpu.{what}:{card}": ("pending", "hardware", "warn", "gpu_tuning", "`v100ctl provision`")
            for what in ("persistence", "power-limit")
            for card in (0, 1)
        },
        "gpu.unit-disabled:nvidia-persistenced.service": ("pending", "unit", "warn", "gpu_tuning", "`v100ctl provision`"),
    }
    cards.run_roles("gpu_tuning")
    assert cards.audit() == {}


# --- what only power or a hand mends ------------------------------------------------------------------------------------------


def test_heat_and_a_bad_link_are_told_and_left_alone(cards: Fleet, lab_fault: Callable[..., None]) -> None:
    lab_fault(cards.host, "throttled", card=0)
    lab_fault(cards.host, "link-degraded", card=1)
    findings = cards.audit()
    assert named(findings, "kind", "layer", "severity") == {
        "gpu.throttled:0": ("external", "hardware", "warn"),
        "gpu.link-degraded:1": ("external", "hardware", "warn"),
    }
    assert cards.status == "drift"
    assert "88 C, memory 86 C, 690 of 1380 MHz" in findings["gpu.throttled:0"]["actual"]
    assert "2.5 GT/s x8" in findings["gpu.link-degraded:1"]["actual"]
    before = cards.state()
    done, answer = cards.recover()
    assert (done.code, answer["status"], answer["remedy"]) == (1, "stopped", "hand")
    assert cards.state() == before


def test_a_card_off_the_bus_needs_power_and_hides_no_other(cards: Fleet, lab_fault: Callable[..., None]) -> None:
    lab_fault(cards.host, "fallen-off", card=1)
    findings = cards.audit()
    assert named(findings, "kind", "layer", "severity") == {"gpu.fallen-off:1": ("external", "hardware", "critical")}
    assert "power the host off and on" in findings["gpu.fallen-off:1"]["fix"]
    assert cards.status == "error"
    facts = cards.facts()
    assert [(xid.code, xid.pci_address) for xid in facts.kernel_log.xids if xid.code == 79] == [(79, "0000:5e:00.0")]
    well, gone = facts.gpus
    assert (well.uuid, well.power_limit_w, gone.revision_ff, gone.uuid) == (cards.facts_at_rest.gpus[0].uuid, LIMIT_W, True, "")
    before = cards.state()
    done, answer = cards.recover("--yes")
    assert (done.code, answer["status"], answer["remedy"]) == (1, "stopped", "power cycle")
    assert "nothing was changed" in answer["message"]
    assert cards.state() == before


# --- what takes longer --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_card_without_address_space_needs_a_hand(cards: Fleet, lab_fault: Callable[..., None]) -> None:
    lab_fault(cards.host, "bar1-zero", card=1)
    findings = cards.audit()
    assert named(findings, "kind", "layer", "severity")["gpu.bar1-unassigned:1"] == ("external", "hardware", "error")
    assert "Above 4G Decoding" in findings["gpu.bar1-unassigned:1"]["fix"]
    before = cards.state()
    done, answer = cards.recover("--yes")
    assert (done.code, answer["remedy"]) == (1, "hand")
    assert cards.state() == before
    # Firmware is set before a kernel starts, and the daemon has both cards from then on.
    fault(cards.host, "bar1-zero", card=1, undo=True)
    cards.run_roles("gpu_tuning")
    assert cards.audit() == {}


@pytest.mark.slow
def test_a_wedged_driver_needs_a_reboot(
    cards: Fleet, lab_fault: Callable[..., None], lab_reboot: Callable[[RunningHost], RunningHost]
) -> None:
    lab_fault(cards.host, "wedged")
    cards.hangs = True
    findings = cards.audit()
    assert named(findings, "kind", "layer", "severity", "role")["driver.wedged"] == (
        "external",
        "driver",
        "critical",
        "nvidia_driver",
    )
    # Nothing is provisioned on its cards.
    assert cards.status == "error"
    assert cards.plan()["driver-wedged"] == "refuse"
    done, answer = cards.recover("--yes", "--force")
    assert (done.code, answer["status"], answer["remedy"]) == (1, "stopped", "reboot")
    lab_reboot(cards.host)
    cards.hangs = False
    wait_until(lambda: cards.audit() == {})


@pytest.mark.slow
def test_a_driver_that_is_not_loaded_is_loaded_by_the_role(cards: Fleet, lab_fault: Callable[..., None]) -> None:
    lab_fault(cards.host, "not-loaded")
    findings = cards.audit()
    assert named(findings, "kind", "layer", "severity", "role", "fix")["driver.not-loaded"] == (
        "pending",
        "driver",
        "error",
        "nvidia_driver",
        "`v100ctl provision`",
    )
    assert cards.plan()["driver-not-loaded"] == "warn"
    boot_id = cards.facts().boot_id
    cards.run_roles()
    assert cards.facts().boot_id == boot_id
    assert cards.audit() == {}
    # By hand it is one command.
    lab_fault(cards.host, "not-loaded")
    done, answer = cards.recover()
    assert (done.code, answer["steps"]) == (0, ["driver loaded", "users started"])
    assert cards.audit() == {}


@pytest.mark.slow
def test_nouveau_goes_with_a_reboot_of_the_role(cards: Fleet, lab_fault: Callable[..., None]) -> None:
    # As on a host whose blacklist somebody has removed.
    on_host(cards.host, "rm /etc/modprobe.d/v100ctl-nouveau.conf")
    lab_fault(cards.host, "nouveau")
    findings = cards.audit()
    assert named(findings, "kind", "layer", "severity", "role")["driver.nouveau"] == (
        "pending",
        "driver",
        "error",
        "nvidia_driver",
    )
    done, answer = cards.recover()
    assert (done.code, answer["remedy"]) == (1, "provision")
    boot_id = cards.facts().boot_id
    cards.run_roles()
    facts = cards.facts()
    assert (facts.boot_id != boot_id, facts.nouveau.loaded, facts.nvidia.module_version) == (True, False, "535.309.01")
    wait_until(lambda: cards.audit() == {})


@pytest.mark.slow
@pytest.mark.parametrize("name", ["open-modules", "no-driver"])
def test_the_right_driver_comes_with_the_role(
    name: str,
    make_v100_host: Callable[..., RunningHost],
    lab_fault: Callable[..., None],
    lab_inventory: WriteInventory,
) -> None:
    host = make_v100_host("1xV100-SXM2-16GB", driver="535")
    chat = {**variables()["llm_server_instances"]["chat"], "gpus": [0]}
    fleet = Fleet(host, lab_inventory(host, variables={**variables(), "llm_server_instances": {"chat": chat}})).rest()
    lab_fault(host, name)
    findings = fleet.audit()
    if name == "open-modules":
        assert (findings["driver.wrong"]["layer"], findings["driver.wrong"]["severity"]) == ("driver", "error")
        assert "open modules" in findings["driver.wrong"]["actual"]
        assert fleet.plan()["driver-open-modules"] == "warn"
    else:
        assert (findings["driver.missing"]["actual"], findings["driver.missing"]["role"]) == ("none", "nvidia_driver")
    fleet.run_roles()
    facts = fleet.facts()
    assert (facts.nvidia.module_version.split(".")[0], facts.nvidia.module_flavour) == ("535", "proprietary")
    assert facts.gpus[0].uuid == fleet.facts_at_rest.gpus[0].uuid
    wait_until(lambda: fleet.audit() == {})


def wait_until(is_so: Callable[[], bool]) -> None:
    """The daemon starts with the host, and that takes its moment."""
    deadline_s = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline_s
        time.sleep(1)
