"""Test hosts without a V100: containers that boot real systemd and real sshd, reached over real SSH.

:mod:`~v100ctl.lab.engine` makes Docker Engine ready, :mod:`~v100ctl.lab.image` the image, :mod:`~v100ctl.lab.hosts` the hosts;
:mod:`~v100ctl.lab.pytest_plugin` gives them to tests. Everything that Docker keeps for the lab carries the label
:data:`LABEL`, so that it is found again whatever happened to the program that made it.
"""

from __future__ import annotations

from pathlib import Path

from v100ctl.paths import state_dir

#: On every container (value: the host's name), network and image of the lab.
LABEL = "v100ctl.lab"


def lab_dir() -> Path:
    """Keys, known hosts, inventories and logs of the lab (``lab/`` in the state folder)."""
    return state_dir() / "lab"
