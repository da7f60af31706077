"""``v100ctl lab``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from v100ctl.cli.options import write_table
from v100ctl.errors import EXIT_OK

if TYPE_CHECKING:
    from pathlib import Path

    from v100ctl.apply.reporter import Reporter
    from v100ctl.lab.hosts import Lab


@click.group("lab", short_help="Test hosts with fake V100s: up, list, ssh, fault, down.")
def command() -> None:
    """Test hosts with fake V100s, for people who write roles and playbooks.

    A lab host is a container that boots systemd and sshd and is reached over SSH. It shows V100s where programs look for them: on
    the PCI bus, in /proc/driver/nvidia, as device nodes, and in what `nvidia-smi` answers and keeps. No GPU is needed, and
    nothing is computed on these cards.

    \b
    v100ctl lab up --hosts 3 --cards 4xV100-SXM2-16GB
    v100ctl lab ssh h1 nvidia-smi
    v100ctl lab fault driver-mismatch h2
    v100ctl plan -i ~/.local/state/v100ctl/lab/lab.yml
    v100ctl lab down

    What is loaded is what was installed at boot, as on a real host: `sudo systemctl reboot` on the host stands for a restart,
    with the connection really lost and another boot id. docs/lab.md has the rest, and the pytest fixtures.
    """


def _reporter() -> Reporter:
    from v100ctl.apply.reporter import make_reporter

    return make_reporter()


def _lab(reporter: Reporter, *, install: bool = False) -> Lab:
    from v100ctl.lab.engine import ensure_docker
    from v100ctl.lab.hosts import Lab

    return Lab(ensure_docker(reporter, install=install))


def _print_rows(rows: list[tuple[str, ...]]) -> None:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    write_table("\n".join(lines) + "\n", None)


def _write_inventory(lab: Lab, path: Path) -> None:
    from v100ctl.lab.hosts import write_inventory

    hosts: dict[str, Any] = {}
    for state in lab.list():
        if state.cards and state.status == "running":
            hosts[state.name] = lab.running(state.name).variables()
    write_inventory(path, hosts)


@command.command()
@click.argument("names", nargs=-1, metavar="[HOST]...")
@click.option("--hosts", "count", type=click.IntRange(1, 64), help="How many: h1, h2, ... (default 1; not with names).")
@click.option(
    "--cards",
    default="1xV100-SXM2-16GB",
    show_default=True,
    metavar="CARDS",
    help="What each has: `4xV100-SXM2-16GB`, `1xV100-PCIE-16GB,1xV100-PCIE-32GB`, or `none`.",
)
@click.option(
    "--driver",
    default="535",
    show_default=True,
    metavar="VERSION",
    help="The driver they start with: a branch, an exact version, or `none` for bare hosts.",
)
@click.option(
    "--debian",
    metavar="VERSION",
    help="The release of Debian that they are made of: `11`, `12` or `13`. Else 12, or this machine's own if it must.",
)
@click.option("-o", "--inventory", type=click.Path(dir_okay=False), metavar="FILE", help="Where to write the inventory.")
@click.option("--install", is_flag=True, help="Install Docker Engine where it is missing (root on Debian or Ubuntu).")
def up(
    names: tuple[str, ...],
    count: int | None,
    cards: str,
    driver: str,
    debian: str | None,
    inventory: str | None,
    install: bool,
) -> int:
    """Bring hosts up and write an inventory of them.

    Hosts that run and are as asked stay as they are; one that was made otherwise is made anew. The inventory is an ordinary one:
    `v100ctl plan`, `provision` and `audit` take it after `-i`, and so does `ansible-playbook`.

    With a driver, small packages that stand for the real ones are installed under their names and versions, so that `dpkg`, holds
    and upgrades see them. With `--driver none` a host takes real packages; their kernel modules are then loaded, as far as the
    host shows, at the next restart.
    """
    from pathlib import Path

    from v100ctl.lab import lab_dir
    from v100ctl.lab.gpu import FakeCards, FakeDriver
    from v100ctl.lab.hosts import LabHost
    from v100ctl.lab.image import DEFAULT_DEBIAN, ensure_image

    if names and count is not None:
        raise click.UsageError("--hosts does not go with names")
    chosen = names or tuple(f"h{number}" for number in range(1, (count or 1) + 1))
    played = FakeDriver.parse(driver, debian=debian or DEFAULT_DEBIAN)
    wanted = [LabHost(name, cards=FakeCards.parse(cards), driver=played) for name in chosen]
    reporter = _reporter()
    try:
        lab = _lab(reporter, install=install)
        image = ensure_image(lab.client, reporter, debian=debian)
        for host in wanted:
            lab.up(host, image, reporter)
        path = Path(inventory) if inventory else lab_dir() / "lab.yml"
        _write_inventory(lab, path)
    finally:
        reporter.close()
    click.echo(f"inventory: {path}")
    click.echo(f"next: `v100ctl plan -i {path}`, `v100ctl lab ssh {chosen[0]}`, `v100ctl lab fault --help`")
    return EXIT_OK


@command.command("list")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def list_hosts(as_json: bool) -> int:
    """List all lab hosts of this user, running or not."""
    import dataclasses
    import json

    reporter = _reporter()
    try:
        states = _lab(reporter).list()
    finally:
        reporter.close()
    if as_json:
        click.echo(json.dumps([dataclasses.asdict(state) for state in states], indent=2))
    elif not states:
        click.echo("no lab host; `v100ctl lab up` makes one", err=True)
    else:
        rows = [(state.name, state.status, state.address or "-", state.cards or "-") for state in states]
        _print_rows([("HOST", "STATUS", "ADDRESS", "CARDS"), *rows])
    return EXIT_OK


@command.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.argument("host")
@click.argument("words", nargs=-1, metavar="[COMMAND]...", type=click.UNPROCESSED)
def ssh(host: str, words: tuple[str, ...]) -> int:
    """Log in to a lab host, or run a command there; its exit code is the command's.

    The account is `admin`, which may become root without a password (`sudo`).
    """
    import subprocess

    reporter = _reporter()
    try:
        running = _lab(reporter).running(host)
    finally:
        reporter.close()
    # As `ssh` has it: the words are joined and read by the shell over there.
    return subprocess.run([*running.ssh_command(), *words], check=False).returncode


@command.command()
@click.argument("name", metavar="FAULT")
@click.argument("host")
@click.option("--card", type=click.IntRange(0, 7), metavar="INDEX", help="Which card, for a fault of one; else the last.")
@click.option("--undo", is_flag=True, help="Mend it, as whoever found the cause would.")
def fault(name: str, host: str, card: int | None, undo: bool) -> int:
    """Break a lab host as reality does.

    Most faults last as they do on a real host: a restart mends a wedged driver and a library of another version, but no cable.

    \b
    no-driver        the driver's packages are removed
    nouveau          the kernel's own driver holds the cards
    not-loaded       installed, but not loaded yet
    open-modules     the open modules are loaded: `No devices were found`
    driver-mismatch  the library is newer than the loaded module
    wedged           `nvidia-smi` hangs
    fallen-off       a card has fallen off the bus (XID 79 in `dmesg`)
    throttled        a card is too hot, its clocks are slowed
    link-degraded    a card has 8 lanes at 2.5 GT/s
    bar1-zero        a card got no address space for its memory
    persistence-off  nvidia-persistenced is disabled
    uvm-poisoned     CUDA programs fail with `unknown error`
    memory-error     a card met a double-bit error, and a page waits to be retired
    """
    from v100ctl.lab.gpu import fault as break_host

    reporter = _reporter()
    try:
        break_host(_lab(reporter).running(host), name, card=card, undo=undo)
    finally:
        reporter.close()
    return EXIT_OK


@command.command()
@click.argument("names", nargs=-1, metavar="[HOST]...")
def down(names: tuple[str, ...]) -> int:
    """Remove lab hosts: those named, else all with cards. The practice host of `v100ctl try` stays."""
    from v100ctl.lab import lab_dir

    reporter = _reporter()
    try:
        lab = _lab(reporter)
        chosen = names or tuple(state.name for state in lab.list() if state.cards)
        removed = lab.down(*chosen) if chosen else []
        path = lab_dir() / "lab.yml"
        if path.exists():
            _write_inventory(lab, path)
        reporter.note(f"removed: {', '.join(removed)}" if removed else "there was no such host")
    finally:
        reporter.close()
    return EXIT_OK
