"""``v100ctl logs``."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import click

from v100ctl.cli.operate import complete_instance
from v100ctl.cli.options import HostOptions, one_host_options
from v100ctl.errors import EXIT_OK, V100ctlError

if TYPE_CHECKING:
    from v100ctl.probe.session import Session

#: How often a followed journal is asked for more. Asking anew leaves no program behind on the host, whatever ends this one.
_POLL_S = 1.0
_READ_TIMEOUT_S = 60.0


@click.command("logs", short_help="Show the journal of an instance.")
@click.argument("instance", metavar="HOST/NAME", shell_complete=complete_instance)
@one_host_options
@click.option("-f", "--follow", is_flag=True, help="Go on with what comes, until Ctrl-C.")
@click.option("-n", "--lines", type=click.IntRange(0, 100000), default=100, show_default=True, help="How many of the last lines.")
@click.option(
    "--since", metavar="TIME", help="Only from then on, as journalctl reads it: `10 min ago`, `2026-11-29 03:00`, `today`."
)
def command(instance: str, hosts: HostOptions, follow: bool, lines: int, since: str | None) -> int:
    """Show the journal of an instance: what its server, its start checks and systemd say of it.

    NAME alone is enough where one host has it. Control sequences of terminals are left out.

    \b
    v100ctl logs gpu1/chat
    v100ctl logs gpu1/chat -f -n 20
    v100ctl logs gpu1/chat --since "1 hour ago" -n 10000 | grep error
    """
    from v100ctl.cli.bench import find_instance
    from v100ctl.plan.units import unit_name
    from v100ctl.probe import Connection, open_session

    host, name = find_instance(hosts.fleet(), instance)
    access = hosts.access()
    connection = Connection.from_vars(
        host.name, host.variables, ask=access.secrets, host_keys=access.host_keys, confirm_host_key=access.confirm_host_key
    )
    argv = ["journalctl", "--unit", unit_name(name), "--no-pager", "--quiet", "--output", "short-iso", "--show-cursor"]
    first = [*argv, f"--lines={lines}", *([f"--since={since}"] if since else [])]
    with open_session(connection) as session:
        cursor = _show(session, first, host.name)
        while follow:
            time.sleep(_POLL_S)
            after = [f"--after-cursor={cursor}"] if cursor else ["--lines=100"]
            cursor = _show(session, [*argv, *after], host.name) or cursor
    return EXIT_OK


def _show(session: Session, argv: list[str], host: str) -> str:
    """Print what the journal says, without control sequences; returns where it ends, empty where it said nothing."""
    from v100ctl.apply.reporter import clean

    done = session.run(argv, become=True, timeout_s=_READ_TIMEOUT_S)
    text = done.stdout.decode("utf-8", "replace")
    if done.rc != 0:
        said = clean(done.stderr.decode("utf-8", "replace")).strip().splitlines()
        raise V100ctlError(f"{host}: the journal cannot be read: {said[0] if said else f'exit code {done.rc}'}")
    lines = text.split("\n")
    # journalctl's own last line; what a server logs stands behind a time and a name.
    cursor = ""
    while lines and (not lines[-1] or lines[-1].startswith("-- cursor: ")):
        cursor = cursor or lines[-1].removeprefix("-- cursor: ").strip()
        lines.pop()
    for line in lines:
        click.echo(clean(line).replace("\r", ""))
    return cursor
