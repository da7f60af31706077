"""``v100ctl restart``."""

from __future__ import annotations

import click

from v100ctl.cli.operate import complete_instance, drain_options, operate_from_cli
from v100ctl.cli.options import HostOptions, host_options


@click.command("restart", short_help="Restart an instance by hand, after its running requests.")
@click.argument("instance", metavar="HOST/NAME", shell_complete=complete_instance)
@host_options
@drain_options
def command(instance: str, hosts: HostOptions, drain_limit_s: float, force: bool) -> int:
    """Restart an instance; behind the gateway its running requests end first, and new ones wait until it is back.

    NAME alone is enough where one host has it. A gateway of the fleet sends new ones elsewhere. Without a gateway the
    engine cuts what runs.

    Exit code 0: it serves again. 1: requests still ran at the limit and it was left as it is, or it did not come up.

    \b
    v100ctl restart gpu1/chat
    """
    return operate_from_cli(instance, hosts, "restart", drain_limit_s=drain_limit_s, force=force)
