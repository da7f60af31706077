"""Options that several commands share, and what they are turned into."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import re
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from v100ctl.access import DEFAULT_DEEP_PROBE_TIMEOUT_S, DEFAULT_DRAIN_LIMIT_S, DEFAULT_FORKS, DEFAULT_PROBE_TIMEOUT_S, Access
from v100ctl.errors import V100ctlError
from v100ctl.probe.connection import HostKeyPolicy, Secrets

if TYPE_CHECKING:
    from v100ctl.bench.picture import Picture
    from v100ctl.fleet import Fleet

_Command = TypeVar("_Command", bound=Callable[..., Any])


adopt_option = click.option(
    "--adopt",
    multiple=True,
    metavar="HOST/NAME",
    help="Let this instance take the place of the server that somebody runs by hand on its port or card: that is stopped.",
)


def adopting_from_cli(fleet: Fleet, instances: tuple[str, ...]) -> tuple[Fleet, dict[str, Any]]:
    """The fleet with what ``--adopt`` says, and the same as variables for Ansible.

    Raises:
        InventoryError: there is no such instance.
    """
    from v100ctl.cli.bench import find_instance
    from v100ctl.provision import adopting

    found = [find_instance(fleet, text) for text in instances]
    fleet, variables = adopting(fleet, [(host.name, name) for host, name in found])
    return fleet, dict(variables)


def not_nan(ctx: click.Context, parameter: click.Parameter, value: float | None) -> float | None:
    """For options in seconds: `nan` passes every range, and ends no waiting."""
    if value is not None and math.isnan(value):
        raise click.BadParameter(f"{value} is not a number of seconds", ctx, parameter)
    return value


drain_limit_option = click.option(
    "--drain-limit",
    "drain_limit_s",
    type=click.FloatRange(min=0, max=86400),
    callback=not_nan,
    default=DEFAULT_DRAIN_LIMIT_S,
    show_default=True,
    metavar="SECONDS",
    help="How long running requests may take to end.",
)


def today() -> date:
    """The date that plans are made for."""
    return date.today()


@dataclass(frozen=True)
class HostOptions:
    """Which hosts, and how they are reached: the options that :func:`host_options` adds, as one object."""

    inventory: tuple[str, ...]
    limit: str | None
    vault_password_files: tuple[Path, ...]
    ask_vault_pass: bool
    ask_pass: bool
    ask_become_pass: bool
    accept_new_host_keys: bool
    forks: int
    timeout_s: float | None

    def fleet(self) -> Fleet:
        """Read the inventory.

        Raises:
            InventoryError: it cannot be read or is wrong.
        """
        from v100ctl.fleet import load_fleet

        vault_password = click.prompt("Vault password", hide_input=True, err=True) if self.ask_vault_pass else None
        return load_fleet(
            self.inventory, self.limit, vault_password_files=self.vault_password_files, vault_password=vault_password
        )

    def access(self, *, deep: bool = False) -> Access:
        """How hosts are reached; asks for passwords where that was wanted. ``deep``: hosts will hash what they hold."""
        connection_password = click.prompt("SSH password", hide_input=True, err=True) if self.ask_pass else None
        become_password = None
        if self.ask_become_pass:
            same = " (empty: the same)" if connection_password else ""
            become_password = click.prompt(
                f"sudo password{same}", hide_input=True, err=True, default=connection_password or "", show_default=False
            )
        if self.accept_new_host_keys:
            policy = HostKeyPolicy.ACCEPT_NEW
        else:
            policy = HostKeyPolicy.ASK if sys.stdin.isatty() and sys.stderr.isatty() else HostKeyPolicy.REFUSE
        return Access(
            secrets=Secrets(connection_password=connection_password, become_password=become_password),
            host_keys=policy,
            forks=self.forks,
            timeout_s=self.timeout_s or (DEFAULT_DEEP_PROBE_TIMEOUT_S if deep else DEFAULT_PROBE_TIMEOUT_S),
        )


#: A week. Waiting has an end that the system's clocks can hold.
_LONGEST_TIMEOUT_S = 7 * 24 * 3600.0


_FORKS_OPTION = click.option(
    "-f", "--forks", type=click.IntRange(min=1), default=DEFAULT_FORKS, show_default=True, help="How many hosts at once."
)
_HOST_OPTIONS: tuple[Callable[[Callable[..., Any]], Callable[..., Any]], ...] = (
    click.option(
        "-i",
        "--inventory",
        multiple=True,
        metavar="PATH",
        help="Inventory; else $V100CTL_INVENTORY, else ./inventory/hosts.yml. May be given more than once.",
    ),
    click.option("-l", "--limit", metavar="PATTERN", help="Only these hosts (a pattern in Ansible's form)."),
    click.option(
        "--vault-password-file",
        "vault_password_files",
        multiple=True,
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        help="File with the vault password. May be given more than once.",
    ),
    click.option("--ask-vault-pass", is_flag=True, help="Ask for the vault password."),
    click.option("-k", "--ask-pass", is_flag=True, help="Ask for the SSH password."),
    click.option("-K", "--ask-become-pass", is_flag=True, help="Ask for the sudo password."),
    click.option(
        "--accept-new-host-keys",
        is_flag=True,
        help="Accept SSH keys of hosts that are not known yet; a changed key is always refused.",
    ),
    _FORKS_OPTION,
    click.option(
        "--timeout",
        "timeout_s",
        type=click.FloatRange(min=1, max=_LONGEST_TIMEOUT_S),
        callback=not_nan,
        show_default=f"{DEFAULT_PROBE_TIMEOUT_S:.0f}; `audit --deep` {DEFAULT_DEEP_PROBE_TIMEOUT_S:.0f}",
        metavar="SECONDS",
        help="Most time for asking one host.",
    ),
)


def host_options(command: Callable[..., int]) -> Callable[..., int]:
    """Add inventory and connection options; the command gets them as one argument, ``hosts``."""
    names = {field.name for field in dataclasses.fields(HostOptions)}

    @functools.wraps(command)
    def wrapped(**parameters: Any) -> int:
        common = {name: parameters.pop(name) for name in names}
        return command(hosts=HostOptions(**common), **parameters)

    decorated: Callable[..., int] = wrapped
    for option in reversed(_HOST_OPTIONS):
        decorated = option(decorated)
    return decorated


def one_host_options(command: Callable[..., int]) -> Callable[..., int]:
    """Like :func:`host_options` for a command that asks one host alone: no ``--forks``, whose short form is free for others."""

    @functools.wraps(command)
    def wrapped(**parameters: Any) -> int:
        names = {field.name for field in dataclasses.fields(HostOptions)} - {"forks"}
        common = {name: parameters.pop(name) for name in names}
        return command(hosts=HostOptions(**common, forks=1), **parameters)

    decorated: Callable[..., int] = wrapped
    for option in reversed([option for option in _HOST_OPTIONS if option is not _FORKS_OPTION]):
        decorated = option(decorated)
    return decorated


def output_options(command: _Command) -> _Command:
    """``--no-color``."""
    return click.option("--no-color", is_flag=True, help="No colours (NO_COLOR does the same).")(command)


def verbosity_option(command: _Command) -> _Command:
    """``-v``, for commands that run Ansible."""
    return click.option("-v", "--verbose", "verbosity", count=True, help="More of Ansible's own detail in its log.")(command)


def launcher_options(command: _Command) -> _Command:
    """``--yes`` for the launcher, which has acted on it before Python started: it lets root install a missing Python."""
    option = click.option(
        "-y", "--yes", is_flag=True, expose_value=False, help="Let the launcher install what it lacks, as root."
    )
    return option(command)


def format_option(*formats: str) -> Callable[[_Command], _Command]:
    """``--format`` with its short form ``--json``, and ``-o``."""

    def decorate(command: _Command) -> _Command:
        for option in (
            click.option(
                "-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="Write to this file instead of stdout."
            ),
            click.option("--json", "output_format", flag_value="json", help="Short for `--format json`."),
            click.option(
                "--format",
                "output_format",
                type=click.Choice(formats),
                default=formats[0],
                show_default=True,
                help="How to print.",
            ),
        ):
            command = option(command)
        return command

    return decorate


def check_output(output: Path | None) -> None:
    """For what takes long before it is written.

    Raises:
        V100ctlError: nothing could be written there.
    """
    if output is None or str(output) == "-":
        return
    target = output.resolve()
    place = target if target.exists() and not target.is_file() else target.parent
    if not os.access(place, os.W_OK):
        reason = "Permission denied" if place.exists() else "No such file or directory"
        raise V100ctlError(f"{output} cannot be written: {reason}", hint="name another file with `-o FILE`")


def write_table(text: str, output: Path | None) -> None:
    """Like :func:`write_output`, without the blanks at the ends of lines: they only pad a table's last column."""
    write_output(re.sub(r" +$", "", text, flags=re.MULTILINE), output)


def write_output(text: str, output: Path | None) -> None:
    """Data goes to stdout, or whole to a file: made aside and renamed in.

    Raises:
        V100ctlError: the file cannot be written.
    """
    text = text.rstrip("\n") + "\n"
    if output is None or str(output) == "-":
        click.echo(text, nl=False)
    else:
        _write(text.encode(), output, "-o")


class PictureFile(click.Path):
    """A file for a picture, whose name says in which form it is wanted."""

    name = "file"

    def __init__(self) -> None:
        super().__init__(dir_okay=False, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """Refuses other names than those of pictures, before anything is measured."""
        path = Path(os.fsdecode(super().convert(value, param, ctx)))
        if path.suffix.lower() not in (".svg", ".png"):
            self.fail(f"{path} does not say which picture it is to be: end it in `.svg` or `.png`", param, ctx)
        return path


def write_picture(picture: Picture, output: Path) -> None:
    """The picture in the form that the file's name asks for.

    Raises:
        V100ctlError: the file cannot be written.
    """
    _write(picture.to_png() if output.suffix.lower() == ".png" else picture.to_svg().encode(), output, "--chart")


def _write(data: bytes, output: Path, option: str) -> None:
    try:
        # What a link points to is replaced, not the link; a device or a pipe is written to, and never replaced by a file.
        target = output.resolve()
        if target.exists() and not target.is_file():
            target.write_bytes(data)
        else:
            _replace(target, data)
    except OSError as error:
        raise V100ctlError(
            f"{output} cannot be written: {error.strerror}", hint=f"name another file with `{option} FILE`"
        ) from error


def _replace(target: Path, data: bytes) -> None:
    descriptor, aside = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(data)
        # mkstemp makes the file private; a report is an ordinary file.
        umask = os.umask(0)
        os.umask(umask)
        Path(aside).chmod(0o666 & ~umask)
        Path(aside).replace(target)
    except BaseException:
        Path(aside).unlink(missing_ok=True)
        raise
