"""A timer that runs the audit where the inventory is, and leaves its result where a node exporter finds it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from v100ctl.plan.render import render
from v100ctl.plan.types import ManagedFile

SERVICE = "v100ctl-audit.service"
TIMER = "v100ctl-audit.timer"
#: Below ``/var/lib``; it belongs to whoever runs the audit.
STATE_FOLDER = "v100ctl-audit"
TEXTFILE_NAME = "v100ctl_audit.prom"


def audit_units(
    command: Sequence[str], *, user: str, home: str, folder: Path, textfile_directory: str, interval_s: int, units_dir: str
) -> tuple[ManagedFile, ...]:
    """The pair of units.

    Args:
        command: The audit's command line without its output.
        user: Who runs it: whoever has the keys to the hosts.
        home: Their home.
        folder: Where relative paths of the inventory begin.
        textfile_directory: The folder that the node exporter reads.
        interval_s: How often.
        units_dir: Where systemd reads units.
    """
    written = f"/var/lib/{STATE_FOLDER}/{TEXTFILE_NAME}"
    service = render(
        "systemd/audit.service.j2",
        argv=(*command, "--output", f"prometheus:{written}"),
        user=user,
        home=home,
        folder=str(folder),
        state_folder=STATE_FOLDER,
        written=written,
        aside=f"{textfile_directory}/.{TEXTFILE_NAME}.new",
        textfile=f"{textfile_directory}/{TEXTFILE_NAME}",
    )
    timer = render("systemd/audit.timer.j2", interval_s=interval_s)
    return (
        ManagedFile(f"{units_dir}/{SERVICE}", service, "monitoring"),
        ManagedFile(f"{units_dir}/{TIMER}", timer, "monitoring"),
    )
