"""``v100ctl rollout``."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from v100ctl.cli.options import (
    HostOptions,
    check_output,
    drain_limit_option,
    format_option,
    host_options,
    not_nan,
    output_options,
    today,
    verbosity_option,
    write_output,
    write_table,
)
from v100ctl.errors import UsageError

if TYPE_CHECKING:
    from v100ctl.rollout.state import Rollout


def _share(ctx: click.Context, parameter: click.Parameter, value: str) -> float:
    match = re.fullmatch(r"([0-9]{1,3}(?:\.[0-9]+)?)(%?)", value.strip())
    share = float(match[1]) / (100 if match[2] else 1) if match else -1.0
    if not 0 <= share <= 1:
        raise click.BadParameter(f"{value} is no share: write it as `90%` or 0.9", ctx, parameter)
    return share


def _batch(ctx: click.Context, parameter: click.Parameter, value: str) -> str:
    from v100ctl.rollout.state import RolloutError, batch_size

    try:
        batch_size(value, 1)
    except RolloutError as error:
        raise click.BadParameter(error.message, ctx, parameter) from error
    return value


@click.command("rollout", short_help="Change a fleet host by host, gated, and lose no request.")
@host_options
@click.option("--canary", type=click.IntRange(min=0), default=1, show_default=True, help="How many hosts change first.")
@click.option(
    "--batch",
    default="25%",
    show_default=True,
    callback=_batch,
    help="How many of the others at once: a number, or a share of all.",
)
@click.option("--max-failed", type=click.IntRange(min=0), default=0, show_default=True, help="Go on while so many have failed.")
@click.option(
    "--min-speed",
    default="90%",
    show_default=True,
    callback=_share,
    help="The least decode speed, of what the same host had just before.",
)
@drain_limit_option
@click.option(
    "--settle",
    "settle_s",
    type=click.FloatRange(min=0, max=86400),
    callback=not_nan,
    default=10.0,
    show_default=True,
    metavar="SECONDS",
    help="How long a host serves again before it counts.",
)
@click.option(
    "--start-limit",
    "start_limit_s",
    type=click.IntRange(min=2, max=86400),
    metavar="SECONDS",
    help="How long a server may take to get healthy; else what the plan says.",
)
@click.option(
    "--return-limit",
    "return_limit_s",
    type=click.FloatRange(min=0, max=86400),
    callback=not_nan,
    default=900.0,
    show_default=True,
    metavar="SECONDS",
    help="How long a host that went away is waited for.",
)
@click.option("--check", is_flag=True, help="Change nothing; say what would change, where, and in which order.")
@click.option("--resume", is_flag=True, help="Go on with a rollout that was cut off, as it was begun.")
@click.option("--abort", is_flag=True, help="End one: what is under way goes back, what is done stays.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@format_option("table", "json", "html")
@output_options
@verbosity_option
def command(
    hosts: HostOptions,
    canary: int,
    batch: str,
    max_failed: int,
    min_speed: float,
    drain_limit_s: float,
    settle_s: float,
    start_limit_s: int | None,
    return_limit_s: float,
    check: bool,
    resume: bool,
    abort: bool,
    yes: bool,
    output_format: str,
    output: Path | None,
    no_color: bool,
    verbosity: int,
) -> int:
    """Change a fleet host by host, gated, and lose no request.

    What the inventory plans now comes to every host that differs: first releases and models, beside what serves there; then,
    host by host, out of the gateway, wait until its requests have ended, only the roles that differ, only the servers that must
    restart, a real completion, the decode speed beside what it was just before, back into the gateway, and a while of serving.
    First a canary, then batches.

    A host that fails at one of these goes back by itself to its last good state and proves that it serves; the rollout ends
    there, or goes on within `--max-failed`. Everything is written down as it goes: after a crash or Ctrl-C `--resume` goes on
    and `--abort` leads back.

    Exit code 0: every host has what is planned, or is back as before `--abort`. 1: some have not, or are lost. 2: `--check` found
    something to change.

    \b
    v100ctl rollout -i inventory/hosts.yml --check
    v100ctl rollout -i inventory/hosts.yml --canary 2 --batch 10% --yes
    v100ctl rollout -i inventory/hosts.yml --resume
    """
    from v100ctl.apply import make_reporter
    from v100ctl.cli.show import console
    from v100ctl.rollout.fleet_rollout import carry_out, find_unfinished, plan_rollout
    from v100ctl.rollout.report import print_plan
    from v100ctl.rollout.state import Options

    if resume + abort + check > 1:
        raise UsageError("`--resume`, `--abort` and `--check` do not go together")
    check_output(output)
    fleet = hosts.fleet()
    access = hosts.access()
    reporter = make_reporter(color=False if no_color else None, verbosity=verbosity)
    try:
        if resume or abort:
            rollout = find_unfinished(fleet, access)
        else:
            options = Options(
                canary=canary,
                batch=batch,
                max_failed=max_failed,
                min_speed=min_speed,
                drain_limit_s=drain_limit_s,
                settle_s=settle_s,
                return_limit_s=return_limit_s,
                start_limit_s=start_limit_s,
            )
            rollout = plan_rollout(fleet, access, reporter, today(), options)
            if check or not rollout.hosts:
                _write(rollout, output_format, output, no_color=no_color)
                return rollout.exit_code
            if not yes:
                shown = console(no_color=no_color)
                with shown.capture() as captured:
                    print_plan(shown, rollout)
                click.echo(captured.get(), err=True)
                if not (sys.stdin.isatty() and click.confirm("Go on?", err=True)):
                    raise UsageError("nobody said yes", hint="`--yes` says so")
        rollout = carry_out(rollout, fleet, access, reporter, abort=abort, resumed=resume, verbosity=verbosity)
    finally:
        reporter.close()
    _write(rollout, output_format, output, no_color=no_color)
    return rollout.exit_code


def _write(rollout: Rollout, output_format: str, output: Path | None, *, no_color: bool) -> None:
    from v100ctl.cli.show import console
    from v100ctl.rollout.report import page, print_plan, print_report

    if output_format == "json":
        write_output(json.dumps(rollout.to_json(), indent=2), output)
    elif output_format == "html":
        write_output(page(rollout), output)
    else:
        out = console(no_color=no_color, output=output)
        with out.capture() as captured:
            if not rollout.hosts:
                out.print("nothing to change")
            elif rollout.status == "planned":
                print_plan(out, rollout)
            else:
                print_report(out, rollout)
        write_table(captured.get(), output)
