"""``v100ctl provision``."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import click
import yaml
from click.core import ParameterSource

from v100ctl.cli.options import (
    HostOptions,
    adopt_option,
    adopting_from_cli,
    host_options,
    output_options,
    today,
    verbosity_option,
    write_table,
)
from v100ctl.errors import InventoryError, UsageError

if TYPE_CHECKING:
    from v100ctl.fleet import Fleet
    from v100ctl.provision import ProvisionResult

#: Parameters that say what else an inventory says, and their options.
_WITHOUT_INVENTORY = {
    "model_sha256": "--model-sha256",
    "backend": "--backend",
    "name": "--name",
    "port": "--port",
    "settings": "--set",
}


@click.command("provision", short_help="Make hosts as planned and prove it with a real completion.")
@click.argument("targets", nargs=-1, metavar="[HOST | USER@HOST[:PORT] | localhost]...")
@host_options
@click.option("--check", is_flag=True, help="Change nothing; say what would change (Ansible's check mode).")
@click.option("--force", is_flag=True, help="Run the roles even where nothing differs.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask (before Python is installed on a host that lacks it).")
@click.option("--model", metavar="PATH|URL", help="Without an inventory: the model, a file on the host or a URL.")
@click.option("--model-sha256", metavar="HEX", help="Its SHA-256.")
@click.option("--backend", type=click.Choice(["cuda", "cpu"]), help="Without an inventory: what the engine computes on.")
@click.option("--name", default="chat", show_default=True, help="Without an inventory: the instance's name.")
@click.option("--port", type=click.IntRange(1, 65535), default=8000, show_default=True, help="Without an inventory: its port.")
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="KEY=VALUE",
    help="Without an inventory: one of its settings, such as context_length=8192.",
)
@adopt_option
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@output_options
@verbosity_option
def command(
    targets: tuple[str, ...],
    hosts: HostOptions,
    check: bool,
    force: bool,
    yes: bool,
    model: str | None,
    model_sha256: str | None,
    backend: str | None,
    name: str,
    port: int,
    settings: tuple[str, ...],
    adopt: tuple[str, ...],
    as_json: bool,
    no_color: bool,
    verbosity: int,
) -> int:
    """Make hosts as planned and prove it with a real completion.

    Without HOST: every host of the inventory. HOST is a name in the inventory; with `--model`, any host that SSH reaches, or
    `localhost`. A host that is as planned already costs one probe and one question: Ansible does not run for it.

    \b
    v100ctl provision -i inventory/hosts.yml --limit gpu1
    v100ctl provision admin@10.0.0.5 --backend cpu --model /srv/models/x.gguf --model-sha256 9f86...
    """
    from v100ctl.apply import make_reporter
    from v100ctl.fleet import adhoc_fleet
    from v100ctl.provision import provision

    if model is None:
        # Silently ignored they would be a wish that nobody hears.
        source = click.get_current_context().get_parameter_source
        ignored = [option for name, option in _WITHOUT_INVENTORY.items() if source(name) is not ParameterSource.DEFAULT]
        if ignored:
            raise UsageError(f"{', '.join(ignored)}: only with --model; else the inventory says it")
        serve = "say what it shall serve: `v100ctl provision user@host --model PATH --model-sha256 HEX`"
        fleet = named_hosts(hosts, targets, otherwise=serve) if targets else hosts.fleet()
    else:
        if not targets:
            raise UsageError(
                "--model is for hosts named on the command line: name one", hint="`v100ctl provision user@host --model ...`"
            )
        if hosts.inventory or hosts.limit:
            raise UsageError("--model does not go with -i or --limit: an inventory says the model itself")
        instance = _instance(model, model_sha256, port, settings)
        variables: dict[str, Any] = {"llm_server_instances": {name: instance}}
        if backend is not None:
            variables["llama_cpp_backend"] = backend
        fleet = adhoc_fleet(targets, variables)
    fleet, extra = adopting_from_cli(fleet, adopt)
    access = hosts.access()

    def confirm(question: str) -> bool:
        return yes or (sys.stdin.isatty() and click.confirm(question, err=True))

    reporter = make_reporter(color=False if no_color else None, verbosity=verbosity)
    try:
        result = provision(
            fleet,
            access=access,
            reporter=reporter,
            as_of=today(),
            check=check,
            force=force,
            confirm=confirm,
            verbosity=verbosity,
            variables=extra,
        )
    finally:
        reporter.close()
    if as_json:
        click.echo(json.dumps(result_document(result), indent=2))
    else:
        print_result(result, no_color=no_color)
    return result.exit_code


def named_hosts(hosts: HostOptions, targets: tuple[str, ...], *, otherwise: str = "") -> Fleet:
    """The hosts of the inventory that were named.

    Args:
        hosts: The inventory.
        targets: Names in it.
        otherwise: What to do for a host without an inventory.

    Raises:
        InventoryError: there is no inventory, or it has no such host.
    """
    import dataclasses

    from v100ctl.fleet import inventory_is_named

    instead = f", or {otherwise}" if otherwise else ""
    if not hosts.inventory and not inventory_is_named():
        raise InventoryError(
            f"there is no inventory that says what {', '.join(targets)} shall serve", hint=f"name one with `-i`{instead}"
        )
    fleet = hosts.fleet()
    unknown = [target for target in targets if target not in fleet.hosts]
    if unknown:
        raise InventoryError(
            f"the inventory {', '.join(fleet.sources)} has no host {', '.join(unknown)}",
            hint=f"add it there{instead}",
        )
    return dataclasses.replace(fleet, hosts={name: fleet.hosts[name] for name in targets})


def _instance(model: str, model_sha256: str | None, port: int, settings: tuple[str, ...]) -> dict[str, Any]:
    if model_sha256 is None:
        raise UsageError("--model needs --model-sha256", hint="`sha256sum FILE` prints it")
    values: dict[str, Any] = {}
    for setting in settings:
        key, separator, text = setting.partition("=")
        if not separator or not key:
            raise UsageError(f"--set {setting}: write it as KEY=VALUE")
        try:
            values[key] = yaml.safe_load(text)
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            # A date that no calendar has and a number of too many digits are a ValueError there.
            raise UsageError(f"--set {setting}: the value is not YAML") from error
    source = "url" if model.startswith(("http://", "https://")) else "path"
    return {"model": {source: model, "sha256": model_sha256}, "port": port, "settings": values}


def result_document(result: ProvisionResult) -> dict[str, Any]:
    """The result of a run as JSON."""
    return {
        "schema": "v100ctl/provision/1",
        "log": str(result.log_path) if result.log_path else None,
        "hosts": {
            name: {
                "status": host.status,
                "message": host.message,
                "adopted": [dict(entry) for entry in host.adopted],
                "changes": [finding.id for finding in host.examined.changes] if host.status == "would-change" else [],
                "proofs": {
                    instance: {
                        "text": proof.text,
                        "tokens": proof.tokens,
                        "tokens_per_second": proof.tokens_per_second,
                        "elapsed_s": round(proof.elapsed_s, 3),
                    }
                    for instance, proof in host.proofs.items()
                },
            }
            for name, host in result.hosts.items()
        },
    }


def print_result(result: ProvisionResult, *, no_color: bool) -> None:
    """One block a host on stdout."""
    from rich.text import Text

    from v100ctl.apply.reporter import clean_line
    from v100ctl.cli.show import console, print_changes, shorten

    out = console(no_color=no_color)
    with out.capture() as captured:
        for name, host in result.hosts.items():
            out.print(Text.assemble((name, "bold"), f"  {host.status}"))
            if host.status == "would-change":
                print_changes(out, host.examined)
            for entry in host.adopted:
                what = entry.get("unit") or f"pid {entry.get('pid')}"
                out.print(Text(clean_line(f"  stopped {what} for {entry.get('instance')}: {entry.get('command')}")))
                out.print(Text(clean_line(f"    what brings it back: {entry.get('undo')}")))
            for instance, proof in host.proofs.items():
                speed = f"{proof.tokens_per_second:.1f} tokens/s" if proof.tokens_per_second else f"{proof.tokens} tokens"
                out.print(Text(f"  {instance} answers: {shorten(proof.text, 70)!r} ({speed})"))
    write_table(captured.get(), None)
