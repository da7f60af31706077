"""``v100ctl monitoring``."""

from __future__ import annotations

import getpass
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from v100ctl.cli.options import HostOptions, host_options, write_output
from v100ctl.errors import EXIT_OK, UsageError, V100ctlError

if TYPE_CHECKING:
    from v100ctl.monitoring.targets import Hosts

_KEYS_FOLDER = "/etc/prometheus/v100ctl-keys"
_RULES_FILE = "v100ctl.rules.yml"
_AUDIT_INTERVAL_S = 900
_output_option = click.option(
    "-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="Write to this file instead of stdout."
)


@click.group("monitoring", short_help="Print what Prometheus and Grafana are told of the fleet.")
def command() -> None:
    """Print what Prometheus and Grafana are told of the fleet; no host is asked.

    Hosts with `monitoring_enabled` write metrics and serve them. `prometheus` says where these and the servers' own are, `rules`
    when to raise an alarm, `dashboard` how to show them.

    \b
    v100ctl monitoring prometheus -o prometheus.yml
    v100ctl monitoring rules -o v100ctl.rules.yml
    v100ctl monitoring dashboard -o v100ctl.json
    """


@command.command("prometheus", short_help="Scrape jobs for exporters and servers.")
@host_options
@click.option(
    "--keys-folder",
    default=_KEYS_FOLDER,
    show_default=True,
    metavar="PATH",
    help="Where the files of `v100ctl monitoring keys` lie beside Prometheus.",
)
@click.option("--rules-file", default=_RULES_FILE, show_default=True, metavar="PATH", help="Where its rules lie.")
@_output_option
def prometheus(hosts: HostOptions, keys_folder: str, rules_file: str, output: Path | None) -> int:
    """Print a configuration of Prometheus: a job for the node exporters, one for DCGM's, and one for each name of servers.

    A server that asks for a key is asked with the file of that key; the key itself stands nowhere.
    """
    from v100ctl.catalog import load_catalog
    from v100ctl.monitoring.targets import render_prometheus, unreachable_of

    found = _hosts(hosts)
    catalog = load_catalog()
    text = render_prometheus(found, catalog, keys_folder=keys_folder, rule_files=[rules_file])
    write_output(text, output)
    for words in unreachable_of(found, catalog):
        click.echo(f"warning: {words} listen on loopback alone: only a Prometheus on that host reaches them", err=True)
    return EXIT_OK


def _hosts(hosts: HostOptions) -> Hosts:
    return {name: (host.variables, host.config) for name, host in hosts.fleet().hosts.items()}


@command.command("keys", short_help="Write the key files that Prometheus asks servers with.")
@host_options
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
def keys(hosts: HostOptions, folder: Path) -> int:
    """Write the first key of each server that asks for one into FOLDER, a file each, readable for you alone.

    They go to Prometheus' host, readable for Prometheus alone; their names are those that `prometheus` says.
    """
    from v100ctl.catalog import load_catalog
    from v100ctl.monitoring.targets import engines_of

    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for engines in engines_of(_hosts(hosts), load_catalog()):
            if engines.key_name:
                _write_secret(folder / engines.key_name, engines.key)
                click.echo(folder / engines.key_name)
    except OSError as error:
        raise V100ctlError(
            f"{error.filename or folder} cannot be written: {error.strerror}", hint="name another folder"
        ) from error
    return EXIT_OK


def _write_secret(path: Path, text: str) -> None:
    aside = path.with_name(f".{path.name}.{os.urandom(6).hex()}")
    try:
        with os.fdopen(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            file.write(text + "\n")
        aside.replace(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


@command.command("rules", short_help="Alert rules.")
@click.option(
    "--audit-stale",
    "audit_stale_s",
    type=click.IntRange(min=60),
    default=4 * _AUDIT_INTERVAL_S,
    show_default=True,
    metavar="SECONDS",
    help="So old the last audit may be.",
)
@_output_option
def rules(audit_stale_s: int, output: Path | None) -> int:
    """Print alert rules for Prometheus (`rule_files`); they use no metric that is not written."""
    from v100ctl.monitoring.rules import render_rules

    write_output(render_rules(audit_stale_s=audit_stale_s), output)
    return EXIT_OK


@command.command("dashboard", short_help="A dashboard for Grafana.")
@_output_option
def dashboard(output: Path | None) -> int:
    """Print a dashboard for Grafana (JSON, to import or to provision): hosts, cards, errors, servers."""
    from v100ctl.catalog import load_catalog
    from v100ctl.monitoring.dashboard import render_dashboard

    write_output(render_dashboard(load_catalog()), output)
    return EXIT_OK


@command.command("audit-timer", short_help="Units that run the audit from here.")
@host_options
@click.option(
    "--interval",
    "interval_s",
    type=click.IntRange(min=60, max=7 * 86400),
    default=_AUDIT_INTERVAL_S,
    show_default=True,
    metavar="SECONDS",
    help="How often.",
)
@click.option(
    "--textfile-directory", metavar="PATH", help="The folder that the node exporter here reads; else the distribution's."
)
@click.option(
    "-o",
    "--output",
    type=click.Path(file_okay=False, exists=True, path_type=Path),
    help="Write both units into this folder instead of stdout: as root, /etc/systemd/system.",
)
def audit_timer(hosts: HostOptions, interval_s: int, textfile_directory: str | None, output: Path | None) -> int:
    """Print a service and a timer that run `v100ctl audit` here and leave its findings and its exit code to the node exporter.

    It runs as you (through sudo: as who called it), with your SSH keys; a password cannot be asked for.

    \b
    sudo v100ctl monitoring audit-timer -i inventory/hosts.yml -o /etc/systemd/system
    sudo systemctl enable --now v100ctl-audit.timer
    """
    from v100ctl.catalog import load_catalog
    from v100ctl.fleet import default_inventory
    from v100ctl.monitoring.audit_timer import audit_units

    if hosts.ask_pass or hosts.ask_become_pass or hosts.ask_vault_pass:
        raise UsageError(
            "a timer has nobody to ask for a password: use SSH keys, `ansible_become_password` from a vault, and "
            "`--vault-password-file`"
        )
    # It has to be readable now.
    hosts.fleet()
    words = [sys.executable, "-P", "-m", "v100ctl", "audit"]
    for inventory in hosts.inventory or (str(default_inventory()),):
        words += ["--inventory", str(Path(inventory).resolve()) if Path(inventory).exists() else inventory]
    words += ["--limit", hosts.limit] if hosts.limit else []
    for path in hosts.vault_password_files:
        words += ["--vault-password-file", str(path.resolve())]
    words += ["--forks", str(hosts.forks)]
    words += ["--timeout", f"{hosts.timeout_s:g}"] if hosts.timeout_s else []
    user = (os.environ.get("SUDO_USER") if os.geteuid() == 0 else None) or getpass.getuser()
    units = audit_units(
        words,
        user=user,
        home=str(Path(f"~{user}").expanduser()),
        folder=Path.cwd(),
        textfile_directory=textfile_directory or load_catalog().monitoring.node_exporter.textfile_directory,
        interval_s=interval_s,
        units_dir=str(output) if output else "/etc/systemd/system",
    )
    if output is None:
        write_output("\n".join(f"==> {unit.path}\n{unit.content}" for unit in units), None)
        return EXIT_OK
    for unit in units:
        write_output(unit.content, Path(unit.path))
        click.echo(unit.path)
    return EXIT_OK
