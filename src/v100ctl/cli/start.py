"""``v100ctl start``."""

from __future__ import annotations

import click

from v100ctl.cli.operate import complete_instance, operate_from_cli
from v100ctl.cli.options import HostOptions, host_options


@click.command("start", short_help="Start an instance by hand and wait until it is healthy.")
@click.argument("instance", metavar="HOST/NAME", shell_complete=complete_instance)
@host_options
def command(instance: str, hosts: HostOptions) -> int:
    """Start an instance that was stopped, and wait until it is healthy.

    NAME alone is enough where one host has it. Starts that failed before are forgotten. Behind the gateway requests are let in
    once it is healthy. Nothing else is changed: `v100ctl provision` makes a host as planned.

    Exit code 0: it serves. 1: it did not come up, and the message says why.

    \b
    v100ctl start gpu1/chat
    """
    return operate_from_cli(instance, hosts, "start")
