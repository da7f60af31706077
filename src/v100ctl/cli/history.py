"""``v100ctl history``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from v100ctl.cli.options import HostOptions, format_option, host_options, output_options, write_output, write_table

if TYPE_CHECKING:
    from collections.abc import Mapping

    from v100ctl.rollback import HostHistory


@click.command("history", short_help="Show what was applied to a host and proved, and when.")
@click.argument("targets", nargs=-1, metavar="[HOST]...")
@host_options
@format_option("table", "json")
@output_options
def command(targets: tuple[str, ...], hosts: HostOptions, output_format: str, output: Path | None, no_color: bool) -> int:
    """Show what was applied to a host and proved, and when: the last ten states, the newest first.

    Each is kept on the host with all that is needed to go back to it there, but no secrets. `*` marks the state that the host is
    in, `<` the one that `v100ctl rollback` would take. Without HOST: every host of the inventory.

    \b
    v100ctl history gpu1
    v100ctl rollback gpu1 --to '2026-11-30 04:15'
    """
    from v100ctl.cli.provision import named_hosts
    from v100ctl.rollback import histories, histories_document, histories_exit_code

    fleet = named_hosts(hosts, targets) if targets else hosts.fleet()
    found = histories(fleet, hosts.access())
    if output_format == "json":
        write_output(json.dumps(histories_document(found), indent=2), output)
    else:
        print_histories(found, no_color=no_color, output=output)
    return histories_exit_code(found)


def print_histories(found: Mapping[str, HostHistory], *, no_color: bool, output: Path | None) -> None:
    """One block a host."""
    from rich.text import Text

    from v100ctl.apply.reporter import clean
    from v100ctl.cli.show import console
    from v100ctl.rollback import describe_time

    out = console(no_color=no_color, output=output)
    with out.capture() as captured:
        for name, item in found.items():
            out.print(Text(name, "bold"))
            if item.error is not None:
                out.print(Text(f"  {clean(item.error.message)}", "red"))
                if item.error.hint:
                    out.print(Text(f"  hint: {clean(item.error.hint)}"))
                continue
            for state in item.history.states if item.history else ():
                current, previous = (item.history.current, item.history.previous) if item.history else (None, None)
                mark = "*" if state.id == current else "<" if state.id == previous else " "
                serves = ", ".join(f"{instance} ({digest})" for instance, digest in sorted(state.instances.items()))
                out.print(Text(f" {mark} {describe_time(state)}  {serves or 'nothing serves'}"))
                for release in state.releases:
                    out.print(Text(f"     release {release}"))
                if state.restored_from:
                    out.print(Text(f"     gone back to {state.restored_from}"))
                if state.missing:
                    out.print(Text(f"     cannot be gone back to: {', '.join(map(clean, state.missing))} is no longer there"))
    write_table(captured.get(), output)
