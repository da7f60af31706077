"""What the commands that act on one instance share: its name, its host, and the options for its running requests."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from v100ctl.access import DEFAULT_DRAIN_LIMIT_S
from v100ctl.cli.options import HostOptions, drain_limit_option, today
from v100ctl.operate import Action

_Command = TypeVar("_Command", bound=Callable[..., Any])


def complete_instance(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """The instances of the inventory, for a shell that completes; none where it cannot be read."""
    from v100ctl.fleet import load_fleet
    from v100ctl.plan import present_instances

    # A shell shows what is printed here in the middle of the line that is being typed.
    with contextlib.suppress(Exception), contextlib.redirect_stderr(io.StringIO()):
        files = [Path(path) for path in ctx.params.get("vault_password_files") or ()]
        fleet = load_fleet(ctx.params.get("inventory") or (), ctx.params.get("limit"), vault_password_files=files)
        names = [f"{host.name}/{name}" for host in fleet.hosts.values() for name in present_instances(host.config)]
        return [name for name in names if name.startswith(incomplete)]
    return []


def drain_options(command: _Command) -> _Command:
    """``--drain-limit`` and ``--force``."""
    force = click.option("--force", is_flag=True, help="Cut the requests that still run at the limit.")
    return drain_limit_option(force(command))


def operate_from_cli(
    instance: str, hosts: HostOptions, action: Action, *, drain_limit_s: float = DEFAULT_DRAIN_LIMIT_S, force: bool = False
) -> int:
    """Find the instance, look at its host, and act on it. Returns the exit code."""
    from v100ctl.apply import make_reporter
    from v100ctl.cli.bench import find_instance
    from v100ctl.examine import examine
    from v100ctl.fronts import Fronts
    from v100ctl.operate import operate
    from v100ctl.probe import open_session
    from v100ctl.provision import alone_on
    from v100ctl.rollback import connection_to

    fleet = hosts.fleet()
    host, name = find_instance(fleet, instance)
    access = hosts.access()
    fronts = Fronts(fleet.gateways, lambda front: open_session(connection_to(front, access)))
    reporter = make_reporter()
    try:
        with reporter.phase(f"probing {host.name}"):
            state = examine([host], access, as_of=today())[host.name]
        if state.error is not None:
            raise state.error
        # No provision restarts it at the same time.
        with alone_on([state], reporter):
            reporter.note(
                operate(state, name, action, reporter=reporter, drain_limit_s=drain_limit_s, force=force, fronts=fronts)
            )
    finally:
        reporter.close()
    return 0
