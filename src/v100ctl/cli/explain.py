"""``v100ctl plan --explain-command``."""

from __future__ import annotations

import difflib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import click
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from v100ctl.apply.reporter import clean, clean_line
from v100ctl.cli.options import HostOptions, write_output, write_table
from v100ctl.errors import V100ctlError
from v100ctl.plan.command_line import LONGEST_TEXT

if TYPE_CHECKING:
    from v100ctl.catalog import Catalog
    from v100ctl.facts import Facts
    from v100ctl.plan.explain.types import Card, CommandExplanation, Explanation, Finding

_Pin = TypeVar("_Pin", int, str)
_STYLE = {"refused": "bold red", "fails": "bold red", "unwise": "yellow", "renamed": "yellow", "ignored": "yellow", "ok": "green"}
#: A card of this compute capability is what the toolkit is for.
_VOLTA = "7.0"
#: Below this many columns a table's cells would be a few letters wide: one finding is written below the other.
_NARROW = 100
#: Where there is no terminal.
_WIDE = 240


def explain_command(
    source: str,
    *,
    hosts: HostOptions,
    engine_versions: Sequence[str],
    gpu: str | None,
    facts: Facts | None,
    output_format: str,
    output: Path | None,
    no_color: bool,
) -> int:
    """Explain what ``source`` (a file, or ``-``) holds.

    Raises:
        click.UsageError: no such version or GPU.
        V100ctlError: the text cannot be read, or holds no command.
    """
    from v100ctl.catalog import load_catalog
    from v100ctl.plan.explain import explain
    from v100ctl.plan.explain.report import exit_code, explain_document

    catalog = load_catalog()
    llama_cpp_build, vllm_version = _versions(engine_versions, hosts, catalog)
    card = _card(gpu, facts, catalog)
    text = _read(source)
    try:
        found = explain(text, catalog, llama_cpp_build=llama_cpp_build, vllm_version=vllm_version, card=card)
    except KeyError as error:
        raise V100ctlError(
            f"nobody has read what {error.args[0]}, which the inventory pins, takes",
            hint=f"`--engine-version`: {', '.join((*map(str, catalog.llama_cpp_parser_builds), *catalog.vllm_versions))}",
        ) from error
    if output_format == "json":
        write_output(json.dumps(explain_document(found), indent=2, ensure_ascii=False), output)
        return exit_code(found)
    out = _console(no_color=no_color, output=output)
    with out.capture() as captured:
        print_explanation(out, found)
    write_table(captured.get(), output)
    return exit_code(found)


def _console(*, no_color: bool, output: Path | None) -> Console:
    if output is not None or not sys.stdout.isatty():
        return Console(file=sys.stdout, no_color=True, force_terminal=False, highlight=False, width=_WIDE)
    return Console(file=sys.stdout, no_color=True if no_color else None, highlight=False)


def _read(source: str) -> str:
    try:
        if source == "-":
            data = sys.stdin.buffer.read(4 * LONGEST_TEXT)
        else:
            with Path(source).open("rb") as stream:
                data = stream.read(4 * LONGEST_TEXT)
    except OSError as error:
        raise V100ctlError(
            f"{source} cannot be read: {error.strerror}", hint="name another file with `--explain-command FILE`, or `-` for stdin"
        ) from error
    return data.decode("utf-8-sig", errors="replace")


def _versions(asked: Sequence[str], hosts: HostOptions, catalog: Catalog) -> tuple[int, str]:
    """The build of llama.cpp and the version of vLLM to judge by: what was asked for, else what the inventory pins."""
    from v100ctl.fleet import inventory_is_named, parse_config

    builds, versions = catalog.llama_cpp_parser_builds, catalog.vllm_versions
    build: int | None = None
    version: str | None = None
    for item in asked:
        number = item.removeprefix("b")
        if number.isdecimal() and int(number) in builds:
            build = int(number)
        elif item.removeprefix("v") in versions:
            version = item.removeprefix("v")
        else:
            names = [*map(str, builds), *versions]
            near = difflib.get_close_matches(number, names, n=1)
            meant = f" Did you mean {near[0]}?" if near else ""
            raise click.UsageError(
                f"--engine-version: nobody has read what {item} takes.{meant} "
                f"Known are llama.cpp {', '.join(map(str, builds))} and vLLM {', '.join(versions)}."
            )
    if build is None or version is None:
        named = bool(hosts.inventory) or inventory_is_named()
        configs = [host.config for host in hosts.fleet().hosts.values()] if named else [parse_config("defaults", {})]
        build = build or _pinned("llama_cpp_build", [config.llama_cpp_build for config in configs])
        version = version or _pinned("vllm_version", [config.vllm_version for config in configs])
    return build, version


def _pinned(variable: str, pins: Sequence[_Pin]) -> _Pin:
    """The first host's pin; where the hosts differ, that is said."""
    others = sorted({str(pin) for pin in pins} - {str(pins[0])})
    if others:
        click.echo(f"note: hosts differ in `{variable}`; read as {pins[0]}, not {', '.join(others)}", err=True)
    return pins[0]


def _card(gpu: str | None, facts: Facts | None, catalog: Catalog) -> Card:
    from v100ctl.plan.explain.types import Card

    if gpu is not None:
        row = catalog.gpu_named(gpu)
        if row is None:
            near = catalog.gpu_names_like(gpu)
            meant = f" Did you mean {near[0]}?" if near else ""
            raise click.UsageError(f"--gpu: the catalog has no {gpu}.{meant} It has {', '.join(catalog.gpu_names)}.")
        return Card(row.name, row.compute_capability, "asked")
    for item in facts.gpus if facts is not None else ():
        row = catalog.gpu(item.pci_id)
        if row is not None:
            return Card(row.name, row.compute_capability, "facts")
    return Card(None, _VOLTA, "default")


def print_explanation(out: Console, explanation: Explanation) -> None:
    """Every command: its findings, worst first, then the inventory that says the same."""
    from v100ctl.plan.explain.shared import engine_name

    card = explanation.card
    judged = card.name or f"compute capability {card.compute_capability}, since `--gpu` was not given"
    for number, command in enumerate(explanation.commands):
        if number:
            out.print()
        heading = Text.assemble(
            (clean_line(command.typed), "bold"),
            f"  line {command.line}, read as {engine_name(command.engine)} {command.version} on {judged}: ",
            (command.verdict, _STYLE[command.verdict]),
        )
        out.print(heading)
        if out.width < _NARROW:
            _print_list(out, command)
        else:
            out.print(_table(command))
        if command.inventory:
            out.print(Text("\nThe same as inventory:", style="bold"))
            # A snippet is pasted: never wrapped.
            out.print(Text(clean(command.inventory).rstrip("\n")), soft_wrap=True)


def _table(command: CommandExplanation) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("verdict", no_wrap=True)
    for title, ratio in (("words", 3), ("meaning", 4), ("why, and what instead", 6)):
        table.add_column(title, overflow="fold", ratio=ratio)
    for finding in command.findings:
        table.add_row(
            Text(finding.verdict, style=_STYLE[finding.verdict]),
            Text(_words(finding)),
            Text(_meaning(finding)),
            Text(_why(finding)),
        )
    return table


def _print_list(out: Console, command: CommandExplanation) -> None:
    for finding in command.findings:
        out.print(Text.assemble((finding.verdict, _STYLE[finding.verdict]), f"  {_words(finding)}"))
        for line in (_meaning(finding), _why(finding)):
            if line:
                out.print(Padding(Text(line), (0, 0, 0, 2)))


def _words(finding: Finding) -> str:
    return clean_line(" ".join(finding.words))


def _meaning(finding: Finding) -> str:
    settings = ", ".join(f"{name}: {_value(value)}" for name, value in finding.settings.items())
    return clean_line("; ".join(part for part in (finding.meaning, f"[{settings}]" if settings else None) if part))


def _value(value: object) -> str:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, list | dict | bool) else str(value)


def _why(finding: Finding) -> str:
    nearest = finding.nearest
    if nearest is not None and finding.reason is not None and not nearest.startswith(("did you mean", "leave", "give")):
        nearest = f"instead: {nearest}"
    return clean_line("; ".join(part for part in (finding.reason, nearest) if part))
