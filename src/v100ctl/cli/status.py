"""``v100ctl status``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from v100ctl.cli.options import HostOptions, format_option, host_options, output_options, today, write_output, write_table

if TYPE_CHECKING:
    from collections.abc import Mapping

    from v100ctl.operate import HostStatus

_STYLES = {"serving": "green", "loading": "yellow", "starting": "yellow", "stopping": "yellow", "stopped": "yellow"}


@click.command("status", short_help="Show what runs where.")
@host_options
@format_option("table", "json")
@output_options
def command(hosts: HostOptions, output_format: str, output: Path | None, no_color: bool) -> int:
    """Show what runs where: each instance of the inventory, and what an earlier run has left on a host.

    Nothing is changed. `audit` says whether what runs is what was planned.

    Exit code 0: every instance of the inventory serves. 2: one does not. 1: a host could not be asked.

    \b
    v100ctl status
    v100ctl status --limit gpu1 --json
    """
    from v100ctl.examine import examine
    from v100ctl.operate import status_document, status_exit_code, status_of

    fleet = hosts.fleet()
    examined = examine(list(fleet.hosts.values()), hosts.access(), as_of=today())
    found = {name: status_of(state) for name, state in examined.items()}
    if output_format == "json":
        write_output(json.dumps(status_document(found), indent=2), output)
    else:
        print_status(found, no_color=no_color, output=output)
    return status_exit_code(found)


def print_status(found: Mapping[str, HostStatus], *, no_color: bool, output: Path | None) -> None:
    """One line an instance."""
    from rich.table import Table
    from rich.text import Text

    from v100ctl.apply.reporter import clean_line, format_duration
    from v100ctl.cli.show import console

    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("instance", "state", "engine", "model", "address", "cards", "up", "requests"):
        table.add_column(title, overflow="fold")
    for host, status in found.items():
        if status.status != "ok":
            table.add_row(host, Text(status.status, "bold red"), Text(clean_line(status.error), overflow="fold"))
        for name, item in status.instances.items():
            state = item.state if item.planned else f"{item.state}, not in the inventory"
            if item.gateway is not None and not item.gateway.startswith("UP"):
                state += f", {clean_line(item.gateway)} at the gateway"
            table.add_row(
                Text(f"{host}/{clean_line(name)}"),
                Text(state, _STYLES.get(item.state, "bold red")),
                Text(clean_line(item.engine)),
                Text(clean_line(item.model)),
                Text(clean_line(item.address)),
                str(len(item.gpus) or ""),
                format_duration(item.uptime_s) if item.uptime_s is not None else "",
                "" if item.requests_running is None else str(item.requests_running),
            )
        if status.status == "ok" and not status.instances:
            table.add_row(host, "no instance")
    out = console(no_color=no_color, output=output)
    with out.capture() as captured:
        out.print(table)
    write_table(captured.get(), output)
