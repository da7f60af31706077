"""``v100ctl init``."""

from __future__ import annotations

import shlex
import shutil
import tempfile
from pathlib import Path

import click

from v100ctl.errors import EXIT_OK, V100ctlError
from v100ctl.paths import content_dir


@click.command("init", short_help="Make a fleet folder to start from.")
@click.argument("folder", type=click.Path(path_type=Path), metavar="DIR")
def command(folder: Path) -> int:
    """Make DIR with an example inventory, documented variable by variable, to start a fleet from."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise V100ctlError(
            f"{folder} is not an empty folder, and nothing in it is overwritten", hint="name one that does not exist yet"
        )
    try:
        _make(folder)
    except OSError as error:
        raise V100ctlError(f"{folder} cannot be made: {error.strerror}", hint="name another folder") from error
    click.echo(f"{folder}/inventory/hosts.yml: name your hosts there, then:", err=True)
    click.echo(f"    cd {shlex.quote(str(folder))} && v100ctl plan", err=True)
    return EXIT_OK


def _make(folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Made aside and renamed in: an interrupted `init` leaves no half folder behind.
    aside = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    try:
        shutil.copytree(content_dir() / "inventory" / "example", aside / "inventory")
        if folder.exists():
            folder.rmdir()
        aside.chmod(0o755)
        aside.rename(folder)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
