"""``v100ctl audit``."""

from __future__ import annotations

import json
from pathlib import Path

import click

from v100ctl.cli.options import HostOptions, format_option, host_options, output_options, today, write_output, write_table


@click.command("audit", short_help="Report where hosts differ from their plan.")
@host_options
@click.option("--deep", is_flag=True, help="Hash releases and models instead of trusting size and time.")
@format_option("table", "json")
@output_options
def command(
    hosts: HostOptions,
    deep: bool,
    output_format: str,
    output: Path | None,
    no_color: bool,
) -> int:
    """Report where hosts differ from their plan: packages, releases, models, files, units, processes, services.

    One round trip a host; nothing is changed. Exit code 0: all clean. 2: drift. 1: a host is refused or cannot be reached.
    """
    from v100ctl.audit import audit
    from v100ctl.cli.show import console, findings_table, print_host, print_rules

    fleet = hosts.fleet()
    access = hosts.access(deep=deep)
    report = audit(fleet, access=access, as_of=today(), deep=deep)
    if output_format == "json":
        write_output(json.dumps(report.to_json(), indent=2), output)
        return report.exit_code
    out = console(no_color=no_color, output=output)
    with out.capture() as captured:
        for name, state in report.hosts.items():
            print_host(out, state, report.status(name))
            if report.status(name) == "error":
                print_rules(out, state)
            if state.findings:
                out.print(findings_table(state.findings))
    write_table(captured.get(), output)
    return report.exit_code
