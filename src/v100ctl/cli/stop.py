"""``v100ctl stop``."""

from __future__ import annotations

import click

from v100ctl.cli.operate import complete_instance, drain_options, operate_from_cli
from v100ctl.cli.options import HostOptions, host_options


@click.command("stop", short_help="Stop an instance by hand, after its running requests.")
@click.argument("instance", metavar="HOST/NAME", shell_complete=complete_instance)
@host_options
@drain_options
def command(instance: str, hosts: HostOptions, drain_limit_s: float, force: bool) -> int:
    """Stop an instance; behind the gateway its running requests end first, and new ones wait.

    NAME alone is enough where one host has it. It stays stopped until `v100ctl start`, `v100ctl provision` or a boot; `audit`
    reports it. Requests that wait get a 503 after `gateway_wait_s`; a gateway of the fleet sends them elsewhere. Without a
    gateway the engine cuts what runs.

    Exit code 0: it is stopped. 1: requests still ran at the limit, and it was left as it is.

    \b
    v100ctl stop gpu1/chat
    v100ctl stop gpu1/chat --drain-limit 60 --force
    """
    return operate_from_cli(instance, hosts, "stop", drain_limit_s=drain_limit_s, force=force)
