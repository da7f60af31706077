"""``v100ctl recover``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from v100ctl.cli.options import HostOptions, format_option, host_options, output_options, today, write_output, write_table

if TYPE_CHECKING:
    from v100ctl.recovery import RecoverResult


@click.command("recover", short_help="Bring a host's cards back without a reboot, or say what alone helps.")
@click.argument("targets", nargs=-1, required=True, metavar="HOST...")
@host_options
@click.option("--check", is_flag=True, help="Change nothing; say what would be done and which servers would stop.")
@click.option("--force", is_flag=True, help="Reset the cards even where nothing is found that this mends.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask before servers stop for a moment.")
@format_option("table", "json")
@output_options
def command(
    targets: tuple[str, ...],
    hosts: HostOptions,
    check: bool,
    force: bool,
    yes: bool,
    output_format: str,
    output: Path | None,
    no_color: bool,
) -> int:
    """Bring a host's cards back without a reboot, or say what alone helps.

    It stops the services that use a card, switches persistence off, loads the unified memory's module anew, resets the cards, and
    starts everything again, the cards' settings first. Where the library of the driver is newer than its loaded module, the
    installed module takes the place of the other; a driver that is not loaded is loaded.

    \b
    mended here          CUDA programs that end with `unknown error`, a page of memory that
                         waits to be retired, a library of another version, a driver that
                         is not loaded
    only told            a card off the bus (power off and on), a driver that hangs (reboot),
                         heat, a bad link, worn-out memory (a hand)

    Where only power, a reboot or a hand helps, nothing is changed. Programs that use a card and belong to no service are named
    and left alone. Cards are reset together, since those that NVLink connects must be.

    Exit code 0: the cards answer, or nothing was wrong. 1: something else is needed, and the message says what.

    \b
    v100ctl recover gpu1 --check
    v100ctl recover gpu1 --yes
    """
    from v100ctl.apply import make_reporter
    from v100ctl.cli.provision import named_hosts
    from v100ctl.recovery import recover

    fleet = named_hosts(hosts, targets)
    access = hosts.access()

    def confirm(question: str) -> bool:
        return yes or (sys.stdin.isatty() and click.confirm(question, err=True))

    reporter = make_reporter(color=False if no_color else None)
    try:
        result = recover(fleet, access=access, reporter=reporter, as_of=today(), check=check, force=force, confirm=confirm)
    finally:
        reporter.close()
    if output_format == "json":
        write_output(json.dumps(result.to_json(), indent=2), output)
    else:
        print_recovery(result, no_color=no_color, output=output)
    return result.exit_code


def print_recovery(result: RecoverResult, *, no_color: bool, output: Path | None) -> None:
    """One block a host."""
    from rich.text import Text

    from v100ctl.apply.reporter import clean
    from v100ctl.cli.show import console

    style = {"well": "green", "recovered": "green", "would-recover": "yellow"}
    out = console(no_color=no_color, output=output)
    with out.capture() as captured:
        for name, host in result.hosts.items():
            out.print(Text.assemble((name, "bold"), "  ", (host.status, style.get(host.status, "bold red"))))
            if host.message:
                out.print(Text(f"  {clean(host.message)}"))
            if host.users:
                verb = "would stop and start again" if host.status == "would-recover" else "stopped and started again"
                out.print(Text(f"  {verb}: {', '.join(host.users)}"))
            if host.hint:
                out.print(Text(f"  hint: {clean(host.hint)}"))
            if host.status == "recovered":
                for rule in host.left:
                    out.print(Text(f"  still: {clean(rule.reason)}; {clean(rule.nearest or '')}"))
    write_table(captured.get(), output)
