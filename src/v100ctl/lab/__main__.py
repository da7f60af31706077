"""``python -m v100ctl.lab``: lab hosts for scripts and for molecule's create and destroy playbooks."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from v100ctl.apply.reporter import make_reporter
from v100ctl.errors import V100ctlError
from v100ctl.lab.engine import ensure_docker
from v100ctl.lab.gpu import FakeCards, FakeDriver
from v100ctl.lab.hosts import Lab, LabHost, write_inventory
from v100ctl.lab.image import DEBIAN_SUITES, DEFAULT_DEBIAN, ensure_image


@click.group()
def cli() -> None:
    """Lab hosts: containers that boot systemd and sshd."""


@cli.command()
@click.argument("names", nargs=-1, required=True)
@click.option("--inventory", type=click.Path(path_type=Path), help="Write an Ansible inventory of these hosts.")
@click.option("--install", is_flag=True, help="Install Docker Engine where it is missing.")
@click.option(
    "--cards", default="", help="The fake V100s that each plays to have (`4xV100-SXM2-16GB`, `none`); else none is played."
)
@click.option("--driver", default="none", show_default=True, help="With --cards: the driver that each starts with.")
@click.option("--debian", type=click.Choice(sorted(DEBIAN_SUITES)), help="The release of Debian that they are made of.")
def up(names: tuple[str, ...], inventory: Path | None, install: bool, cards: str, driver: str, debian: str | None) -> None:
    """Bring hosts up; ones that run are left as they are. Prints their connection as JSON."""
    reporter = make_reporter()
    try:
        client = ensure_docker(reporter, install=install)
        image = ensure_image(client, reporter, debian=debian)
        lab = Lab(client)
        played = FakeCards.parse(cards) if cards else None
        chosen = FakeDriver.parse(driver, debian=debian or DEFAULT_DEBIAN)
        made = [LabHost(name, cards=played, driver=chosen) for name in names]
        hosts = {host.name: lab.up(host, image, reporter).variables() for host in made}
    finally:
        reporter.close()
    if inventory is not None:
        write_inventory(inventory, hosts)
    click.echo(json.dumps(hosts, indent=2))


@cli.command()
@click.argument("names", nargs=-1, required=True)
def down(names: tuple[str, ...]) -> None:
    """Remove hosts; ones that are not there are fine. Prints the names of those that were."""
    reporter = make_reporter()
    try:
        removed = Lab(ensure_docker(reporter, install=False)).down(*names)
    finally:
        reporter.close()
    click.echo(json.dumps(removed))


@cli.command(name="list")
def list_hosts() -> None:
    """Print all hosts as JSON."""
    reporter = make_reporter()
    try:
        states = Lab(ensure_docker(reporter, install=False)).list()
    finally:
        reporter.close()
    click.echo(json.dumps([{"name": state.name, "status": state.status, "address": state.address} for state in states], indent=2))


if __name__ == "__main__":
    try:
        cli(prog_name="python -m v100ctl.lab")
    except V100ctlError as error:
        click.echo(f"error: {error.message}", err=True)
        if error.hint:
            click.echo(f"hint: {error.hint}", err=True)
        sys.exit(error.exit_code)
