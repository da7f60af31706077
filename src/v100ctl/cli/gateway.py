"""``v100ctl gateway``."""

from __future__ import annotations

from pathlib import Path

import click

from v100ctl.cli.options import HostOptions, host_options, write_output
from v100ctl.errors import EXIT_OK


@click.command("gateway", short_help="Print the fleet's servers for a gateway of your own.")
@click.argument("output_kind", metavar="nginx|litellm|prometheus", type=click.Choice(["nginx", "litellm", "prometheus"]))
@host_options
@click.option("-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="Write to this file instead of stdout.")
def command(output_kind: str, hosts: HostOptions, output: Path | None) -> int:
    """Print the fleet's servers for a gateway of your own; no host is asked.

    `nginx` are upstreams, `litellm` is the configuration of LiteLLM's proxy (which reads keys from its own environment, that of
    `chat` from $V100_CHAT_KEY), `prometheus` is a file for `file_sd_configs`. Servers that listen on loopback alone are left out.

    \b
    v100ctl gateway nginx -i inventory/hosts.yml -o /etc/nginx/conf.d/llm.conf
    """
    from v100ctl.plan.fleet_gateway import reachable, render_for, servers_of

    fleet = hosts.fleet()
    servers = servers_of({name: (host.variables, host.config) for name, host in fleet.hosts.items()})
    found = reachable(servers)
    write_output(render_for(output_kind, found), output)
    for server in servers:
        if server not in found:
            click.echo(f"warning: {server.host}/{server.instance} listens on loopback alone (`listen`) and is left out", err=True)
    if not found:
        click.echo("warning: no host has an instance that another host reaches (`llm_server_instances`)", err=True)
    return EXIT_OK
