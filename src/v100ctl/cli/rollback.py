"""``v100ctl rollback``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from v100ctl.cli.options import (
    HostOptions,
    drain_limit_option,
    format_option,
    host_options,
    output_options,
    write_output,
    write_table,
)
from v100ctl.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from v100ctl.rollback import HostRollback


@click.command("rollback", short_help="Bring a host back to its previous good state, and prove it.")
@click.argument("targets", nargs=-1, metavar="[HOST]...")
@host_options
@click.option("--all", "all_hosts", is_flag=True, help="Every host of the inventory.")
@click.option("--to", metavar="TIME", help="A state by its time (UTC) or the beginning of it, as `v100ctl history` shows them.")
@drain_limit_option
@click.option("--check", is_flag=True, help="Change nothing; say what would be restored and restarted.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@format_option("table", "json")
@output_options
def command(
    targets: tuple[str, ...],
    hosts: HostOptions,
    all_hosts: bool,
    to: str | None,
    drain_limit_s: float,
    check: bool,
    yes: bool,
    output_format: str,
    output: Path | None,
    no_color: bool,
) -> int:
    """Bring a host back to its previous good state, and prove it with a real completion.

    A state is what was applied and proved: units, settings, release and model. Its files are written anew, the servers that do
    not run it are restarted (behind the gateway: once their requests have ended), and each has to answer. Drivers, cards'
    settings and keys stay as they are. The host does all that by itself, so it ends well also where this machine goes away.

    Hosts go one after the other; after one that failed the rest is left as it is. The inventory is not changed: until it says
    what was gone back to, `v100ctl plan` shows the difference.

    \b
    v100ctl rollback gpu1
    v100ctl rollback gpu1 --to '2026-11-30 04:15'
    v100ctl rollback --all --check
    """
    from v100ctl.apply import make_reporter
    from v100ctl.cli.provision import named_hosts
    from v100ctl.rollback import rollback, rollback_document, rollback_exit_code

    if bool(targets) == all_hosts:
        raise UsageError("name the hosts, or give `--all`")
    fleet = hosts.fleet() if all_hosts else named_hosts(hosts, targets)
    access = hosts.access()

    def confirm(question: str) -> bool:
        return yes or (sys.stdin.isatty() and click.confirm(question, err=True))

    reporter = make_reporter(color=False if no_color else None)
    try:
        results = rollback(
            fleet, access=access, reporter=reporter, to=to, drain_limit_s=drain_limit_s, check=check, confirm=confirm
        )
    finally:
        reporter.close()
    if output_format == "json":
        write_output(json.dumps(rollback_document(results), indent=2), output)
    else:
        print_rollback(results, no_color=no_color, output=output)
    return rollback_exit_code(results)


def print_rollback(results: Mapping[str, HostRollback], *, no_color: bool, output: Path | None) -> None:
    """One block a host."""
    from rich.text import Text

    from v100ctl.apply.reporter import clean
    from v100ctl.cli.show import console, shorten
    from v100ctl.rollback import describe_time

    style = {"restored": "green", "unchanged": "green", "would-restore": "yellow"}
    out = console(no_color=no_color, output=output)
    with out.capture() as captured:
        for name, result in results.items():
            out.print(Text.assemble((name, "bold"), "  ", (result.status, style.get(result.status, "bold red"))))
            if result.target is not None:
                out.print(Text(f"  the state of {describe_time(result.target)}"))
            if result.message:
                out.print(Text(f"  {clean(result.message)}"))
            if result.restored is None:
                continue
            verb = "would be " if result.status == "would-restore" else ""
            for what, names in (("restarted", result.restored.restarted), ("removed", result.restored.removed)):
                if names:
                    out.print(Text(f"  {verb}{what}: {', '.join(names)}"))
            for instance, answer in result.restored.answers.items():
                out.print(Text(f"  {instance} answers: {shorten(answer.text, 70)!r}"))
    write_table(captured.get(), output)
