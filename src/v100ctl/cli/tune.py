"""``v100ctl tune``."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from v100ctl.cli.operate import complete_instance, drain_options
from v100ctl.cli.options import (
    HostOptions,
    PictureFile,
    format_option,
    host_options,
    output_options,
    today,
    write_output,
    write_picture,
    write_table,
)
from v100ctl.errors import EXIT_ERROR, EXIT_OK, UsageError

if TYPE_CHECKING:
    from v100ctl.fleet import Fleet
    from v100ctl.tune.inventory import Edit
    from v100ctl.tune.run import Prepared

_SECONDS = {"s": 1, "m": 60, "h": 3600}


class _Duration(click.ParamType[float]):
    """Seconds, or a number with s, m or h."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([smh]?)", str(value))
        if match is None:
            self.fail(f"{value!r} is no time: write 30m, 2h or 900s", param, ctx)
        return float(match[1]) * _SECONDS[match[2] or "s"]


@click.command("tune", short_help="Find the settings that are fastest on this card, and show them as a diff.")
@click.argument("instance", metavar="HOST/NAME", shell_complete=complete_instance)
@host_options
@click.option(
    "--objective",
    type=click.Choice(["latency", "throughput", "context", "energy"]),
    default="latency",
    show_default=True,
    help="One stream's tokens/s; all streams' together; the longest context; tokens per joule.",
)
@click.option(
    "--dimension",
    "dimensions",
    multiple=True,
    metavar="NAME[=V,V]",
    help="Try only this, with these values or the usual ones. May be given more than once.",
)
@click.option("--budget", "budget_s", type=_Duration(), default="30m", show_default=True, help="Begin no trial after so long.")
@click.option("--streams", type=click.IntRange(1, 256), help="Requests at once; else the most of `parallel` that is tried.")
@click.option(
    "--keep-speed",
    "keep_percent",
    type=click.FloatRange(1, 100),
    default=90.0,
    show_default=True,
    metavar="PERCENT",
    help="With `--objective context`: what a longer context has to keep of the speed.",
)
@click.option(
    "--quality-limit",
    "quality_limit_nats",
    type=click.FloatRange(0),
    metavar="NATS",
    help="How far the next token's distribution may move (0.01).",
)
@click.option("--allow-power", is_flag=True, help="Let `--dimension power_limit` set the cards' power limits meanwhile.")
@click.option(
    "--lease",
    "lease_s",
    type=click.FloatRange(10, 3600),
    default=90.0,
    show_default=True,
    metavar="SECONDS",
    help="Without a sign of life for so long the host brings the live settings back.",
)
@drain_options
@click.option("--dry-run", is_flag=True, help="Show what would be tried and for how long; touch nothing.")
@click.option("--fresh", is_flag=True, help="Begin anew instead of going on with a search that was cut.")
@click.option("--write-to", "level", default="host", show_default=True, metavar="LEVEL", help="`host`, `group:NAME` or `all`.")
@click.option("--write", is_flag=True, help="Write the winner into the inventory after a confirmation.")
@click.option("-y", "--yes", is_flag=True, help="Tune a server that is in use; with --write, write without asking.")
@click.option("--chart", type=PictureFile(), metavar="FILE", help="Draw it into this file: `.svg` or `.png`.")
@format_option("table", "json")
@output_options
def command(
    instance: str,
    hosts: HostOptions,
    objective: Any,
    dimensions: tuple[str, ...],
    budget_s: float,
    streams: int | None,
    keep_percent: float,
    quality_limit_nats: float | None,
    allow_power: bool,
    lease_s: float,
    drain_limit_s: float,
    force: bool,
    dry_run: bool,
    fresh: bool,
    level: str,
    write: bool,
    yes: bool,
    chart: Path | None,
    output_format: str,
    output: Path | None,
    no_color: bool,
) -> int:
    """Try other settings of a running instance, each against the live ones, and say what is surely better.

    The same unit is restarted with other words, again and again: meanwhile the server serves nobody. Behind the gateway running
    requests end first, and new ones wait. The live settings come back at the end, and by themselves when this program dies. What
    the plan refuses is not tried. A change of the cache type is measured for what it does to the answers too.

    A gain is one only where a test on fresh pairs of trials says so; the winner is shown as a diff of the inventory, for
    `v100ctl rollout` or `v100ctl provision` to carry out. The same command goes on with a search that was cut.

    Exit code 0: the search has ended, with a winner or without. 1: it was cut, or could not be done.

    \b
    v100ctl tune gpu1/chat --dry-run
    v100ctl tune gpu1/chat --objective throughput --budget 1h --chart tune.svg
    v100ctl tune gpu1/chat --dimension ubatch_size=512,1024 --write --write-to group:v100s
    """
    from v100ctl.apply import make_reporter
    from v100ctl.cli.bench import find_instance
    from v100ctl.examine import examine
    from v100ctl.provision import alone_on
    from v100ctl.tune.chart import chart as picture
    from v100ctl.tune.objectives import QUALITY_LIMIT_NATS
    from v100ctl.tune.report import table
    from v100ctl.tune.run import Options, prepare, tune

    if not re.fullmatch(r"host|all|group:.+", level):
        raise UsageError(f"--write-to {level}: `host`, `group:NAME` or `all`")
    options = Options(
        objective=objective,
        dimensions=dimensions,
        budget_s=budget_s,
        streams=streams,
        keep=keep_percent / 100,
        quality_limit_nats=QUALITY_LIMIT_NATS if quality_limit_nats is None else quality_limit_nats,
        allow_power=allow_power,
        lease_s=lease_s,
        drain_limit_s=drain_limit_s,
        force=force,
        yes=yes,
        fresh=fresh,
    )
    fleet = hosts.fleet()
    host, name = find_instance(fleet, instance)
    access = hosts.access()
    reporter = make_reporter(color=False if no_color else None)
    try:
        with reporter.phase(f"probing {host.name}"):
            state = examine([host], access, as_of=today())[host.name]
        prepared = prepare(state, name, options, today())
        if dry_run:
            shown = json.dumps(prepared.to_json(), indent=2) if output_format == "json" else plan_text(prepared)
            write_table(shown, output)
            return EXIT_OK
        # No provision restarts it at the same time.
        with alone_on([state], reporter):
            document = tune(prepared, reporter)
    finally:
        reporter.close()
    edit = _edit(fleet, prepared, document, level)
    document["diff"] = edit.diff if edit else None
    document["changes"] = list(edit.hosts) if edit else []
    if chart is not None:
        write_picture(picture(document), chart)
    if output_format == "json":
        write_output(json.dumps(document, indent=2), output)
    else:
        write_table(table(document) + (f"\n\n{edit.diff}" if edit else "") + "\n", output)
    if edit is not None:
        _offer(edit, host.name, write=write, yes=yes)
    return EXIT_OK if document["finished"] else EXIT_ERROR


def plan_text(prepared: Prepared) -> str:
    """What would be tried, as lines."""
    plan = prepared.to_json()
    lines = [f"{plan['host']}/{plan['instance']}  {plan['objective']}"]
    lines += [f"  {name}" for name in plan["candidates"]]
    lines += [f"  {item['candidate']}  not tried: [{item['rule']}] {item['reason']}" for item in plan["excluded"]]
    lines.append(
        f"about {plan['trials']} trials of about {plan['trial_s']} s: {plan['expected_s'] / 60:.0f} minutes, "
        f"in which {plan['host']}/{plan['instance']} serves nobody"
    )
    if plan["trials"] * plan["trial_s"] > prepared.options.budget_s:
        lines.append("the budget ends it before that: the same command goes on, or a longer `--budget`, or fewer dimensions")
    return "\n".join(lines)


def _edit(fleet: Fleet, prepared: Prepared, document: dict[str, Any], level: str) -> Edit | None:
    """The winner as an edit; where the inventory cannot be edited so, that is said and what was measured is not lost."""
    from v100ctl.errors import V100ctlError
    from v100ctl.tune.inventory import edit_inventory

    if not document["winner"]:
        return None
    changes = prepared.planned.written(document["choices"])
    try:
        wanted = prepared.planned.config(document["choices"])
        return edit_inventory(fleet, prepared.state.host.name, prepared.name, changes, wanted, level)
    except V100ctlError as error:
        shown = "; ".join(f"{'.'.join(path)}: {json.dumps(value)}" for path, value in changes.items())
        click.echo(f"warning: {error.message} ({error.hint or ''})\nset by hand: {shown}", err=True)
        return None


def _offer(edit: Edit, host: str, *, write: bool, yes: bool) -> None:
    if not write:
        click.echo(f"nothing was written; `--write` does, into {edit.path}", err=True)
        return
    question = f"Write {edit.path} (changes {', '.join(edit.hosts)})?"
    if yes or (sys.stdin.isatty() and click.confirm(question, err=True)):
        edit.write()
        click.echo(f"written; `v100ctl rollout` or `v100ctl provision {host}` carries it out", err=True)
    else:
        click.echo("nothing was written", err=True)
