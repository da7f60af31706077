"""``v100ctl test``."""

from __future__ import annotations

import click

from v100ctl.cli.options import launcher_options


@click.command("test", short_help="Run this toolkit's own tests, from unit tests to roles in containers.")
@click.argument("names", nargs=-1, metavar="[NAME]...")
@click.option("--slow", is_flag=True, help="Also run what takes long.")
@click.option("--keep", is_flag=True, help="Keep test hosts, to look at them.")
@click.option("--list", "list_only", is_flag=True, help="List what can be named, run nothing.")
@click.option(
    "--jobs", "-j", type=click.IntRange(1, 16), help="How many run at once; by default one for each core, four at most."
)
@click.option("-k", "expression", metavar="EXPR", help="Only pytest tests that match (as `pytest -k`).")
@launcher_options
def command(names: tuple[str, ...], slow: bool, keep: bool, list_only: bool, jobs: int | None, expression: str | None) -> int:
    """Run this toolkit's own tests: unit tests, lints, then roles and whole runs in containers.

    NAME is a part (unit, lint, integration, molecule), a role, or a test file; nothing means all of them. Unit tests run
    several at once, and so do roles beside the integration tests; `--jobs 1` runs one after the other. Needs a checkout, and
    root for the container engine.
    """
    from v100ctl.selftest import run_tests

    extra = ["-k", expression] if expression else []
    return run_tests(list(names), slow=slow, keep=keep, list_only=list_only, jobs=jobs, extra=extra)
