"""``v100ctl bench``."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

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
from v100ctl.errors import EXIT_ERROR, EXIT_OK, InventoryError, UsageError

if TYPE_CHECKING:
    from v100ctl.fleet import Fleet, FleetHost

#: Where a key for `--url` comes from: an argument would show in the list of processes.
KEY_VARIABLE = "V100CTL_API_KEY"


@click.command("bench", short_help="Measure a running instance: decode, prompts, streams, against the card's ceiling.")
@click.argument("instance", required=False, metavar="HOST/NAME")
@host_options
@click.option("--runs", type=click.IntRange(2, 1000), default=10, show_default=True, help="Decode runs.")
@click.option("--tokens", type=click.IntRange(8, 8192), default=256, show_default=True, help="Tokens of each.")
@click.option("--max-prompt", type=click.IntRange(64), metavar="TOKENS", help="The longest prompt; else the context.")
@click.option("--no-streams", is_flag=True, help="One stream only.")
@click.option(
    "--longest-phase", type=click.FloatRange(1), default=600.0, show_default=True, help="Leave out what takes longer (s)."
)
@click.option("--quick", is_flag=True, help="A first look: 3 runs of 64 tokens, prompts up to 2048. Not for comparing.")
@click.option("--url", metavar="URL", help="Measure a server at URL from this machine, instead of an instance beside it.")
@click.option("--api", type=click.Choice(["llama_cpp", "vllm", "openai"]), default="llama_cpp", help="With --url: its engine.")
@click.option("--model", default="default", show_default=True, help="With --url: the model's name there.")
@click.option("--context", type=click.IntRange(128), default=8192, show_default=True, help="With --url: tokens of its context.")
@click.option("--parallel", type=click.IntRange(1, 256), default=1, show_default=True, help="With --url: its slots.")
@click.option("--card", "cards", multiple=True, metavar="UUID", help="With --url: a card of this machine that it runs on.")
@click.option("--ceiling", type=click.FloatRange(0, min_open=True), help="With --url: the card's ceiling in tokens/s.")
@click.option("--compare", nargs=2, metavar="A B", help="Compare two reports: files, `last`, `-2`, or times as --history lists.")
@click.option("--history", is_flag=True, help="List what was measured of the instance.")
@click.option("--chart", type=PictureFile(), metavar="FILE", help="Draw it into this file: `.svg` or `.png`.")
@format_option("table", "json")
@output_options
def command(
    instance: str | None,
    hosts: HostOptions,
    runs: int,
    tokens: int,
    max_prompt: int | None,
    no_streams: bool,
    longest_phase: float,
    quick: bool,
    url: str | None,
    api: str,
    model: str,
    context: int,
    parallel: int,
    cards: tuple[str, ...],
    ceiling: float | None,
    compare: tuple[str, str] | None,
    history: bool,
    chart: Path | None,
    output_format: str,
    output: Path | None,
    no_color: bool,
) -> int:
    """Measure a running instance where it runs, and say what the card could do.

    A script on the host sends fixed prompts with fixed seeds at temperature 0 and clocks the answers, so no network is measured.
    The client's clock counts; the engine's own figure stands beside it (with a draft model it may leave the draft's time out).
    Cards are looked at before, during and after. A run is marked not comparable when the card or the server was busy with others,
    when the card throttled, or when the answers are no language. Nothing is changed; the server serves on, and what others ask
    meanwhile spoils the figures.

    Each report is kept (`--history`), and `--compare` says what between two of them is a gain and what is noise.

    Exit code 0: measured. 1: not measured, or not comparable.

    \b
    v100ctl bench gpu1/chat
    v100ctl bench gpu1/chat --compare -2 last
    v100ctl bench --url http://127.0.0.1:8080 --context 8192 --json
    """
    from v100ctl.bench import history as past
    from v100ctl.bench.chart import chart as picture

    if history and instance is None:
        raise UsageError("--history wants an instance: `v100ctl bench HOST/NAME --history`")
    named = _named(instance) if (history or compare) and instance is not None else None
    if history and named is not None:
        return _list(past.entries(*named), output_format, output)
    if compare is not None:
        host, name = named if named is not None else (None, None)
        return _compare(past.find(compare[0], host, name), past.find(compare[1], host, name), output_format, output)
    if (instance is None) == (url is None):
        raise UsageError("say what to measure: `v100ctl bench HOST/NAME`, or `v100ctl bench --url URL`")
    from v100ctl.bench.phases import Options

    options = Options(
        runs=3 if quick else runs,
        tokens=64 if quick else tokens,
        prompt_runs=1 if quick else 3,
        max_prompt_tokens=min(2048, max_prompt or 2048) if quick else max_prompt,
        streams=not no_streams,
        longest_phase_s=longest_phase,
    )
    document = (
        _measure_url(url, options, api=api, model=model, context=context, parallel=parallel, cards=cards, ceiling=ceiling)
        if url is not None
        else _measure_instance(instance or "", hosts, options)
    )
    kept = past.save(document)
    if chart is not None:
        write_picture(picture(document), chart)
    if output_format == "json":
        write_output(json.dumps(document, indent=2), output)
    else:
        write_table(report_text(document) + f"\nkept as {kept.stem}; compare with `--compare -2 last`\n", output)
    return EXIT_OK if document["comparable"] else EXIT_ERROR


def _named(text: str) -> tuple[str, str]:
    host, _, name = text.partition("/")
    if not host or not name:
        raise UsageError(f"{text!r} is no instance: write HOST/NAME")
    return host, name


def find_instance(fleet: Fleet, text: str) -> tuple[FleetHost, str]:
    """The host and the instance's name that ``HOST/NAME``, or ``NAME`` alone where it is unique, means.

    Raises:
        InventoryError: there is none, or several hosts have one of that name.
    """
    from v100ctl.plan import present_instances

    host, slash, name = text.partition("/")
    if not slash:
        having = [item for item in fleet.hosts.values() if text in present_instances(item.config)]
        if len(having) == 1:
            return having[0], text
        if having:
            raise InventoryError(
                f"{len(having)} hosts have an instance {text}", hint=f"name one: {having[0].name}/{text}, {having[1].name}/{text}"
            )
        host, name = text, ""
    if host not in fleet.hosts:
        raise InventoryError(f"the inventory has no {'host ' + host if slash else 'instance ' + text}", hint="write HOST/NAME")
    present = present_instances(fleet.hosts[host].config)
    if name not in present:
        raise InventoryError(
            f"{host} has no instance {name}" if name else f"{text!r} is a host: write HOST/NAME",
            hint=f"it has {', '.join(present) or 'none'}",
        )
    return fleet.hosts[host], name


def _measure_instance(text: str, hosts: HostOptions, options: Any) -> dict[str, Any]:
    from v100ctl.apply import make_reporter
    from v100ctl.bench.run import bench, on_host, target_of
    from v100ctl.examine import examine
    from v100ctl.probe import open_session
    from v100ctl.provision import alone_on

    fleet_host, name = find_instance(hosts.fleet(), text)
    access = hosts.access()
    reporter = make_reporter()
    try:
        with reporter.phase(f"probing {fleet_host.name}"):
            state = examine([fleet_host], access, as_of=today())[fleet_host.name]
        target = target_of(state, name)
        if state.connection is None:
            raise InventoryError(f"{fleet_host.name} cannot be reached")
        # Nobody restarts it in the middle.
        with alone_on([state], reporter), open_session(state.connection) as session:
            return bench(target, on_host(session), options, note=lambda phase: reporter.note(f"measuring {phase}"))
    finally:
        reporter.close()


def _measure_url(
    url: str,
    options: Any,
    *,
    api: str,
    model: str,
    context: int,
    parallel: int,
    cards: tuple[str, ...],
    ceiling: float | None,
) -> dict[str, Any]:
    from urllib.parse import urlsplit

    from v100ctl.bench.report import Target
    from v100ctl.bench.run import bench, from_here

    split = urlsplit(url)
    if split.scheme not in ("http", "https") or not split.hostname:
        raise UsageError(f"--url {url}: not an address such as http://127.0.0.1:8080")
    target = Target(
        host=split.hostname,
        instance=str(split.port or split.scheme),
        url=url,
        api=api,
        model=model,
        context_length=context,
        parallel=parallel,
        cards=cards,
        ceiling_tps=ceiling,
        identity={"engine": api, "release": "", "model": model, "settings": {}, "pending_changes": []},
    )

    def note(phase: str) -> None:
        click.echo(f"measuring {phase}", err=True)

    return bench(target, from_here(os.environ.get(KEY_VARIABLE, "")), options, note=note)


def _spread(summary: dict[str, Any] | None, unit: str = "tokens/s") -> str:
    if summary is None:
        return "not seen"
    return f"{summary['median']:.2f} {unit}  (p5 {summary['p5']:.2f}, p95 {summary['p95']:.2f}, {summary['count']} runs)"


def report_text(document: dict[str, Any]) -> str:
    """The report for people, as lines. Text of the host is cleaned of terminal control characters."""
    from v100ctl.apply.reporter import clean

    decode, ceiling = document["decode"], document["ceiling"]
    identity = document["identity"]
    lines = [f"{document['host']}/{document['instance']}  {document['measured_at']}  {identity.get('release', '')}".rstrip()]
    lines += [f"  {item['severity']}: [{item['id']}] {item['reason']}" for item in document["flags"]]
    lines += [
        f"  left out: {item['phase']} would take {item['expected_s']} s (`--longest-phase`)" for item in document["skipped"]
    ]
    if identity.get("pending_changes"):
        lines.append(f"  the plan differs from what runs: {', '.join(identity['pending_changes'])}")
    lines += [
        f"  one stream       {_spread(decode['client_tps'])}",
        f"    engine's word  {_spread(decode['engine_tps'])}",
    ]
    if decode["draft_acceptance"] is not None:
        lines.append(f"    drafts         {decode['draft_acceptance']:.0%} accepted")
    if ceiling["decode_tps"]:
        share = f", {ceiling['share']:.0%} of it reached" if ceiling["share"] else ""
        lines.append(f"    ceiling        {ceiling['decode_tps']:.1f} tokens/s by memory bandwidth{share}")
    lines += [f"    published      {row['decode_tps']:g} for {row['model']} on a {row['card']}" for row in document["published"]]
    if decode["first_token_s"]:
        first = decode["first_token_s"]
        lines.append(f"    first token    {first['median'] * 1000:.0f} ms (p95 {first['p95'] * 1000:.0f} ms), short prompt")
    if decode["tokens_per_joule"]:
        lines.append(f"    energy         {decode['tokens_per_joule']:.3f} tokens/J")
    for row in document["prefill"]:
        speed = row["client_tps"]["median"] if row["client_tps"] else 0
        first_s = row["first_token_s"]["median"] if row["first_token_s"] else 0
        after = f", then {row['decode_tps_after']['median']:.1f} tokens/s" if row["decode_tps_after"] else ""
        lines.append(f"  prompt of {row['prompt_tokens']:>6} {speed:9.1f} tokens/s  (first token after {first_s:.2f} s{after})")
    for row in document["batched_prefill"]:
        if row["tps"]:
            lines.append(f"  {row['requests']:>2} prompts of {row['prompt_tokens']:>4} {row['tps']:8.1f} tokens/s together")
    for row in document["streams"]:
        if row["aggregate_tps"] and row["stream_tps"]:
            each = row["stream_tps"]["median"]
            energy = f", {row['tokens_per_joule']:.3f} tokens/J" if row["tokens_per_joule"] else ""
            lines.append(
                f"  {row['streams']:>2} streams       {row['aggregate_tps']:9.1f} tokens/s together  ({each:.1f} each{energy})"
            )
    for card in document["cards"]:
        during = card["during"]
        if during["samples"]:
            memory = f", memory {during['max_memory_temperature_c']:.0f} C" if during["max_memory_temperature_c"] else ""
            lines.append(
                f"  {card['name']}: up to {during['max_temperature_c'] or 0:.0f} C{memory}, {during['max_power_w'] or 0:.0f} W, "
                f"{during['min_sm_clock_mhz'] or 0:.0f} to {during['max_sm_clock_mhz'] or 0:.0f} MHz"
            )
    return "\n".join(clean(words) for words in lines)


def _list(entries: list[Path], output_format: str, output: Path | None) -> int:
    from v100ctl.bench.history import load

    rows = [(path.stem, load(path)) for path in entries]
    if output_format == "json":
        write_output(json.dumps([document for _, document in rows], indent=2), output)
        return EXIT_OK
    lines = []
    for stem, document in rows:
        speed = document["decode"]["client_tps"]
        wrong = "" if document["comparable"] else "  not comparable"
        median = f"{speed['median']:8.2f} tokens/s" if speed else "       - tokens/s"
        lines.append(f"{stem}  {median}  {document['identity'].get('release', '')}{wrong}")
    write_table("\n".join(lines) or "nothing was measured yet", output)
    return EXIT_OK


def _compare(before: dict[str, Any], after: dict[str, Any], output_format: str, output: Path | None) -> int:
    from v100ctl.apply.reporter import clean
    from v100ctl.bench.compare import compare

    found = compare(before, after)
    if output_format == "json":
        write_output(json.dumps(found, indent=2), output)
        return EXIT_OK
    lines = []
    for side in ("before", "after"):
        wrong = "" if found[side]["comparable"] else "  NOT COMPARABLE"
        lines.append(f"{side:<7} {found[side]['host']}/{found[side]['instance']}  {found[side]['measured_at']}{wrong}")
    lines += [f"  differs: {words}" for words in found["differences"]]
    for row in found["changes"]:
        interval = "" if row["low"] is None else f"  95%: {row['low']:+.1%} to {row['high']:+.1%}"
        verdict = row["verdict"] if row["low"] is not None else "not tested"
        speeds = f"{row['before']:9.2f} -> {row['after']:9.2f} tokens/s"
        lines.append(f"  {row['figure']:<14} {speeds}  {row['change']:+.1%}{interval}  {verdict}")
    write_table("\n".join(clean(words) for words in lines), output)
    return EXIT_OK
