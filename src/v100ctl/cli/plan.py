"""``v100ctl plan``."""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from v100ctl.cli.options import (
    HostOptions,
    adopt_option,
    adopting_from_cli,
    format_option,
    host_options,
    output_options,
    today,
    write_output,
    write_table,
)
from v100ctl.errors import UsageError, V100ctlError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from v100ctl.facts import Facts
    from v100ctl.fleet import Fleet, FleetHost
    from v100ctl.models.types import Known, ModelHeader


@click.command("plan", short_help="Show what would change on which host and why; touch nothing.")
@host_options
@click.option("--offline", is_flag=True, help="Ask no host: plan from --facts.")
@click.option(
    "--facts",
    "facts_file",
    type=click.Path(exists=True, path_type=Path),
    help="A probe's document (JSON) to plan from, for one host; or a folder with one HOST.json a host.",
)
@click.option(
    "--model-header",
    "model_headers",
    multiple=True,
    metavar="[INSTANCE=]PATH",
    help="Where the model (a GGUF file or a model folder) lies on this machine, for a header that --offline cannot read.",
)
@click.option(
    "--explain-command",
    "explained",
    metavar="FILE|-",
    type=click.Path(allow_dash=True),
    help="Instead of planning, explain the command lines that this text holds: llama-server, vllm, cmake.",
)
@click.option(
    "--engine-version",
    "engine_versions",
    multiple=True,
    metavar="VERSION",
    help="With --explain-command: a build of llama.cpp or a version of vLLM, else what the inventory pins.",
)
@click.option("--gpu", metavar="NAME", help="With --explain-command: the card, such as V100-SXM2-16GB.")
@adopt_option
@format_option("table", "json")
@output_options
def command(
    hosts: HostOptions,
    offline: bool,
    facts_file: Path | None,
    model_headers: tuple[str, ...],
    explained: str | None,
    engine_versions: tuple[str, ...],
    gpu: str | None,
    adopt: tuple[str, ...],
    output_format: str,
    output: Path | None,
    no_color: bool,
) -> int:
    """Show what would change on which host and why; touch nothing.

    Exit code 0: every host is as planned. 2: something would change. 1: a host is refused or cannot be reached.

    With --explain-command, 0: every flag means what it says. 2: some are ignored, renamed or unwise. 1: some are refused by that
    version's parser or cannot work on that card.
    """
    from pydantic_core import to_json

    from v100ctl.catalog import load_catalog
    from v100ctl.cli.show import lines_console, print_changes, print_host, print_instances, print_rules
    from v100ctl.examine import decide, examine, with_hub_listings
    from v100ctl.plan.report import exit_code, host_document, plan_document

    if explained is not None:
        from v100ctl.cli.explain import explain_command

        return explain_command(
            explained,
            hosts=hosts,
            engine_versions=engine_versions,
            gpu=gpu,
            facts=_read_facts(facts_file) if facts_file is not None else None,
            output_format=output_format,
            output=output,
            no_color=no_color,
        )
    if engine_versions or gpu is not None:
        raise click.UsageError("--engine-version and --gpu belong to --explain-command")
    if offline != (facts_file is not None):
        raise click.UsageError("--offline and --facts FILE belong together")
    fleet, _ = adopting_from_cli(hosts.fleet(), adopt)
    as_of = today()
    if model_headers and facts_file is None:
        raise click.UsageError("--model-header belongs to --offline: otherwise the header is read from where the model lies")
    if facts_file is not None:
        fleet = dataclasses.replace(
            fleet, hosts={host.name: host for host in with_hub_listings(list(fleet.hosts.values()), ask=False)}
        )
        known = _offline_headers(fleet, model_headers)
        examined = {
            host.name: decide(host, None, facts, headers=known[host.name], as_of=as_of)
            for host, facts in _offline_facts(fleet, facts_file)
        }
    else:
        access = hosts.access()
        examined = examine(list(fleet.hosts.values()), access, as_of=as_of)
    document = plan_document(examined, as_of=as_of)
    if output_format == "json":
        # A fleet's document is tens of megabytes: the standard library's encoder takes longer for it than planning.
        write_output(to_json(document, indent=2).decode(), output)
        return exit_code(document)
    out = lines_console(no_color=no_color, output=output)
    with out.capture() as captured:
        for state in examined.values():
            described: dict[str, Any] = host_document(state)
            print_host(out, state, described["verdict"])
            print_rules(out, state)
            print_instances(out, state)
            if state.changes:
                print_changes(out, state)
            elif state.error is None:
                out.print("  nothing would change")
        age_days = load_catalog().age_days(as_of)
        out.print(f"catalog checked on {document['catalog_as_of']}" + (f", {age_days} days ago" if age_days > 1 else ""))
    write_table(captured.get(), output)
    return exit_code(document)


def _offline_facts(fleet: Fleet, path: Path) -> Iterator[tuple[FleetHost, Facts]]:
    """Each host with its facts, from one file for one host or from a folder with one file a host."""
    if path.is_dir():
        missing = [name for name in fleet.hosts if not (path / f"{name}.json").is_file()]
        if missing:
            more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
            raise UsageError(
                f"--facts: {path} has no {', '.join(f'{name}.json' for name in missing[:3])}{more}",
                hint="name the hosts that it has with --limit",
            )
        for name, host in fleet.hosts.items():
            yield host, _read_facts(path / f"{name}.json")
        return
    if len(fleet.hosts) != 1:
        raise click.UsageError(
            f"--facts FILE is for one host, the inventory has {len(fleet.hosts)}: choose one with --limit, or name a folder"
        )
    (host,) = fleet.hosts.values()
    yield host, _read_facts(path)


def _offline_headers(fleet: Fleet, given: tuple[str, ...]) -> dict[str, dict[str, Known]]:
    """What is known of the models without asking anybody: what was named, else what lies here or was read before."""
    from v100ctl.examine import known_headers
    from v100ctl.models.local import read_local
    from v100ctl.plan import model_path, present_instances

    by_instance: dict[str | None, ModelHeader] = {}
    for item in given:
        name, separator, path = item.rpartition("=")
        by_instance[name if separator else None] = read_local(Path(path).expanduser())
    instances = {name for host in fleet.hosts.values() for name in present_instances(host.config)}
    for unknown in sorted(name for name in by_instance if name is not None and name not in instances):
        raise UsageError(
            f"--model-header: there is no instance `{unknown}`",
            hint=f"the instances are {', '.join(sorted(instances)) or 'none'}",
        )
    known = known_headers(list(fleet.hosts.values()))
    for host in fleet.hosts.values():
        for name, spec in present_instances(host.config).items():
            header = by_instance.get(name, by_instance.get(None))
            if header is not None:
                known[host.name][model_path(spec.model)] = header
    return known


def _read_facts(path: Path) -> Facts:
    from pydantic import ValidationError

    from v100ctl.facts import FACTS_SCHEMA, Facts
    from v100ctl.probe.run import HOST_SCRIPT, facts_problem

    try:
        facts = Facts.model_validate_json(path.read_bytes())
        if facts.schema_id == FACTS_SCHEMA:
            return facts
        problem = f"its schema is {facts.schema_id}, not {FACTS_SCHEMA}"
    except OSError as error:
        raise V100ctlError(f"{path} cannot be read: {error.strerror}", hint="name another file with `--facts FILE`") from error
    except ValidationError as error:
        problem = facts_problem(error)
    raise UsageError(
        f"--facts: {path} is not a probe's document ({problem})",
        hint=f"run as root on the host, `python3 {shlex.quote(str(HOST_SCRIPT))} --request '{{}}'` prints one",
    )
