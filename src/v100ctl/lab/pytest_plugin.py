"""Lab hosts as pytest fixtures, for this project's tests and for any that test roles against a real systemd over real SSH.

Installed with v100ctl and found by pytest by itself. A host is started when a test first asks for one:

.. code-block:: python

    def test_the_service_runs(lab_host, lab_ssh, lab_inventory):
        subprocess.run(["ansible-playbook", "-i", str(lab_inventory(lab_host)), "site.yml"], check=True)
        assert lab_ssh.service("x").is_running

========================  ========  ======================================================================================
fixture                   scope     value
========================  ========  ======================================================================================
``lab``                   session   :class:`~v100ctl.lab.hosts.Lab`: the hosts of this user, on an engine that answers
``lab_host``              session   a :class:`~v100ctl.lab.hosts.RunningHost` that all tests share
``fresh_lab_host``        function  one that this test alone gets, new
``make_lab_host``         function  a function ``(**options) -> RunningHost`` for more of them, also with a sudo password, or of
                                    another release (``debian="13"``)
``lab_ssh``               session   testinfra's ``Host`` for ``lab_host``, over SSH
``fresh_lab_ssh``         function  the same for ``fresh_lab_host``
``lab_inventory``         function  a function that writes an Ansible inventory of hosts and returns its path
``make_v100_host``        function  a function ``(cards, driver="535", debian=None) -> RunningHost`` for hosts with fake V100s
``lab_fault``             function  a function ``(host, name, card=None)`` that breaks one; mended when the test ends
``lab_reboot``            function  a function ``(host) -> RunningHost`` that restarts one and waits until it is back
``v100ctl_facts``         module    what the probe finds on testinfra's ``host``, by whichever backend (``--hosts``)
``v100ctl_plan``          module    what the inventory plans for it (``--v100ctl-inventory``)
``v100ctl_findings``      module    where the two differ: what ``v100ctl audit`` reports
========================  ========  ======================================================================================

Hosts are removed at the end of the session, also those that an earlier, killed session left. ``--lab-keep`` keeps the
shared host for a look and for a faster next session. Docker Engine is started where it is installed; with ``--lab-install``
it is installed too.
"""

from __future__ import annotations

import importlib
import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from v100ctl.apply.reporter import Reporter
    from v100ctl.facts import Facts
    from v100ctl.findings import Finding
    from v100ctl.fleet import Fleet, FleetHost
    from v100ctl.lab.hosts import Lab, RunningHost
    from v100ctl.plan.types import HostPlan

#: The shared host where it is kept; each other session has hosts of its own names.
_KEPT_NAME = "test"
_serial = itertools.count(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the plugin's options."""
    group = parser.getgroup("v100ctl", "v100ctl's lab hosts, and its audit as tests")
    group.addoption(
        "--v100ctl-inventory",
        dest="v100ctl_inventory",
        action="append",
        default=[],
        metavar="PATH",
        help="the inventory that the hosts are held against; else $V100CTL_INVENTORY, else ./inventory/hosts.yml",
    )
    group.addoption(
        "--v100ctl-lab-keep", "--lab-keep", dest="lab_keep", action="store_true", help="keep the shared lab host after the tests"
    )
    group.addoption(
        "--v100ctl-lab-install",
        "--lab-install",
        dest="lab_install",
        action="store_true",
        help="install Docker Engine where it is missing (root on Debian or Ubuntu)",
    )


def _worker() -> str:
    """Which of several parallel processes (pytest-xdist) this is, as part of a host's name; empty for a single one."""
    return os.environ.get("PYTEST_XDIST_WORKER", "")


@pytest.fixture(scope="session")
def lab_reporter(request: pytest.FixtureRequest) -> Iterator[Reporter]:
    """Says on stderr what takes long, past pytest's capture: making the image may take a minute."""
    from v100ctl.apply.reporter import make_reporter

    reporter = make_reporter()
    yield reporter
    reporter.close()


@pytest.fixture(scope="session")
def lab(request: pytest.FixtureRequest, lab_reporter: Reporter) -> Lab:
    """The lab: Docker Engine answers, and what a killed session left is gone."""
    from v100ctl.lab.engine import ensure_docker
    from v100ctl.lab.hosts import Lab

    made = Lab(ensure_docker(lab_reporter, install=bool(request.config.getoption("lab_install"))))
    made.down_orphans()
    return made


@pytest.fixture(scope="session")
def lab_host(request: pytest.FixtureRequest, lab: Lab, lab_reporter: Reporter) -> Iterator[RunningHost]:
    """A host that all tests of the session share: leave it as it was, or ask for ``fresh_lab_host``."""
    from v100ctl.lab.hosts import LabHost, run_identity
    from v100ctl.lab.image import ensure_image

    image = ensure_image(lab.client, lab_reporter)
    if request.config.getoption("lab_keep"):
        yield lab.up(LabHost("-".join(filter(None, [_KEPT_NAME, _worker()]))), image, lab_reporter)
        return
    host = LabHost(f"test-{os.getpid()}", owner=run_identity())
    yield lab.up(host, image, lab_reporter)
    lab.down(host.name)


@pytest.fixture
def make_lab_host(lab: Lab, lab_reporter: Reporter) -> Iterator[Callable[..., RunningHost]]:
    """Makes new hosts that live as long as the test; takes :class:`~v100ctl.lab.hosts.LabHost`'s options but the owner.

    ``debian``: the release that it is made of (:data:`v100ctl.lab.image.DEBIAN_SUITES`).
    """
    from v100ctl.lab.hosts import LabHost, run_identity
    from v100ctl.lab.image import ensure_image

    names: list[str] = []

    def make(name: str | None = None, *, debian: str | None = None, **options: Any) -> RunningHost:
        chosen = LabHost(name or f"test-{os.getpid()}-{next(_serial)}", owner=run_identity(), **options)
        names.append(chosen.name)
        return lab.up(chosen, ensure_image(lab.client, lab_reporter, debian=debian), lab_reporter)

    yield make
    if names:
        lab.down(*names)


@pytest.fixture
def make_v100_host(make_lab_host: Callable[..., RunningHost]) -> Callable[..., RunningHost]:
    """Makes new hosts with fake V100s, which live as long as the test: ``make_v100_host("4xV100-SXM2-16GB", driver="580")``.

    The driver is a branch, an exact version, or ``none`` for a host that real packages go into. ``debian="13"`` makes one of that
    release.
    """
    from v100ctl.lab.gpu import FakeCards, FakeDriver
    from v100ctl.lab.image import DEFAULT_DEBIAN

    def make(
        cards: str = "1xV100-PCIE-16GB", driver: str = "535", name: str | None = None, *, debian: str | None = None
    ) -> RunningHost:
        played = FakeDriver.parse(driver, debian=debian or DEFAULT_DEBIAN)
        return make_lab_host(name, debian=debian, cards=FakeCards.parse(cards), driver=played)

    return make


@pytest.fixture
def lab_fault() -> Iterator[Callable[..., None]]:
    """Breaks a host with fake V100s (see :data:`v100ctl.lab.gpu.FAULTS`); what was broken is mended at the end, last first."""
    from v100ctl.errors import LabError
    from v100ctl.lab.gpu import fault

    broken: list[tuple[RunningHost, str, int | None]] = []

    def break_host(host: RunningHost, name: str, card: int | None = None) -> None:
        fault(host, name, card=card)
        broken.append((host, name, card))

    yield break_host
    for host, name, card in reversed(broken):
        # The test may have removed the host, or what could be mended.
        with suppress(LabError):
            fault(host, name, card=card, undo=True)


@pytest.fixture
def lab_reboot(lab: Lab) -> Callable[[RunningHost], RunningHost]:
    """Restarts a host with fake V100s as ``systemctl reboot`` does: SSH is lost, and it comes back with another boot id."""
    return lambda host: lab.reboot(host.name)


@pytest.fixture
def fresh_lab_host(make_lab_host: Callable[..., RunningHost]) -> RunningHost:
    """A new host for this test alone."""
    return make_lab_host()


@pytest.fixture(scope="session")
def lab_ssh(lab_host: RunningHost) -> Any:
    """testinfra's view of ``lab_host``, as its administrator over SSH; ``with lab_ssh.sudo():`` for root's."""
    return ssh_view(lab_host)


@pytest.fixture
def fresh_lab_ssh(fresh_lab_host: RunningHost) -> Any:
    """testinfra's view of ``fresh_lab_host``."""
    return ssh_view(fresh_lab_host)


@pytest.fixture
def lab_inventory(tmp_path: Path) -> Callable[..., Path]:
    """Writes an Ansible inventory: ``lab_inventory(host, ..., variables={...}, groups={"builders": [...]})``."""
    from v100ctl.lab.hosts import write_inventory

    def write(
        *hosts: RunningHost,
        variables: Mapping[str, Any] | None = None,
        groups: Mapping[str, Sequence[str]] | None = None,
    ) -> Path:
        return write_inventory(
            tmp_path / "hosts.yml", {host.name: host.variables() for host in hosts}, variables=variables, groups=groups
        )

    return write


def ssh_view(host: RunningHost) -> Any:
    """testinfra's ``Host`` for a lab host, over the same SSH configuration that everything else uses."""
    # Loaded by name: it carries no types, and only those who ask for this fixture need it.
    return importlib.import_module("testinfra").get_host(f"ssh://{host.name}", ssh_config=str(host.ssh_config_path))


# --- the audit as tests: `pytest --pyargs v100ctl.audit.checks --hosts=...` ----------------------------------------------------


@pytest.fixture(scope="session")
def v100ctl_fleet(pytestconfig: pytest.Config) -> Fleet:
    """The inventory that hosts are held against."""
    from v100ctl.audit.through_testinfra import fleet_of

    return fleet_of(pytestconfig.getoption("v100ctl_inventory"))


@pytest.fixture(scope="module")
def v100ctl_host(host: Any, v100ctl_fleet: Fleet) -> FleetHost:
    """The inventory's host that testinfra's ``host`` is."""
    from v100ctl.audit.through_testinfra import planned_host

    return planned_host(v100ctl_fleet, host)


@pytest.fixture(scope="module")
def v100ctl_facts(host: Any, v100ctl_host: FleetHost) -> Facts:
    """What the probe finds, asked once for all tests of a module."""
    from v100ctl.audit.through_testinfra import probe, request_for

    return probe(host, request_for(v100ctl_host))


@pytest.fixture(scope="module")
def v100ctl_plan(v100ctl_host: FleetHost, v100ctl_facts: Facts) -> HostPlan:
    """What the inventory plans for the host."""
    from v100ctl.audit.through_testinfra import decide

    return decide(v100ctl_host, v100ctl_facts, as_of=date.today())


@pytest.fixture(scope="module")
def v100ctl_findings(v100ctl_plan: HostPlan, v100ctl_facts: Facts) -> tuple[Finding, ...]:
    """Where they differ."""
    from v100ctl.audit.through_testinfra import findings

    return findings(v100ctl_plan, v100ctl_facts)
