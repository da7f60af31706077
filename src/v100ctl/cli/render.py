"""``v100ctl render``."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from v100ctl.cli.options import HostOptions, host_options, today, write_output
from v100ctl.errors import EXIT_ERROR, EXIT_OK, InventoryError


@click.command("render", short_help="Print every file and command line of a host; touch nothing.")
@click.argument("host")
@host_options
@click.option("-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="Write to this file instead of stdout.")
def command(
    host: str,
    hosts: HostOptions,
    output: Path | None,
) -> int:
    """Print every file and command line that HOST's plan holds: the same bytes that land on the host and that audit expects.

    The host is asked for its facts (threads, libraries, layout depend on them); nothing is changed.
    """
    from v100ctl.apply.reporter import clean_line
    from v100ctl.examine import examine
    from v100ctl.plan.types import describe

    fleet = hosts.fleet()
    if host not in fleet.hosts:
        raise InventoryError(f"the inventory has no host {host}", hint=f"it has {', '.join(list(fleet.hosts)[:10])}")
    access = hosts.access()
    state = examine([fleet.hosts[host]], access, as_of=today())[host]
    if state.error is not None:
        raise state.error
    if state.plan is None:
        return EXIT_ERROR
    pieces = [f"# {clean_line(describe(rule))}" for rule in state.plan.rules]
    for file in state.plan.all_files:
        content = "(secret, not shown)\n" if file.secret else file.content
        pieces.append(f"==> {file.path}  {file.owner}:{file.group} {file.mode}\n{content}")
    pieces += [f"==> command line of {instance.name}\n{shlex.join(instance.argv)}\n" for instance in state.plan.instances]
    write_output("\n".join(pieces), output)
    return EXIT_ERROR if state.plan.verdict == "refused" else EXIT_OK
