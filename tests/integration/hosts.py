"""What the tests of whole runs share: the command line as a process, and an inventory that serves the practice model."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from v100ctl import practice

if TYPE_CHECKING:
    from v100ctl.lab.hosts import RunningHost

ROOT = Path(__file__).parents[2]
#: Longer than a cold compile on two slow cores.
TIMEOUT_S = 2400


@dataclasses.dataclass(frozen=True)
class Done:
    """A finished command."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> dict[str, Any]:
        """Standard output as JSON."""
        document: dict[str, Any] = json.loads(self.out)
        return document


def v100ctl(*arguments: str | Path, environment: Mapping[str, str] | None = None) -> Done:
    """Run the command line of this checkout without a terminal."""
    argv = [sys.executable, "-P", "-m", "v100ctl", *map(str, arguments)]
    done = subprocess.run(
        argv,
        cwd=ROOT,
        env={**os.environ, **(environment or {})},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    return Done(done.returncode, done.stdout, done.stderr)


def serving_variables(**instance: Any) -> dict[str, Any]:
    """The practice host's variables, with keys of its instance replaced (``settings`` are merged)."""
    variables = practice.inventory_variables(builder=False)
    chat = variables["llm_server_instances"]["chat"]
    settings = {**chat["settings"], **instance.pop("settings", {})}
    variables["llm_server_instances"]["chat"] = {**chat, **instance, "settings": settings}
    return variables


#: Writes an inventory of hosts with variables; see ``lab_inventory``.
WriteInventory = Callable[..., Path]


def on_host(host: RunningHost, command: str) -> str:
    """Run a shell command as root in the host, past SSH; its output.

    Raises:
        AssertionError: it failed.
    """
    code, output = host.execute("/bin/sh", "-c", command)
    assert code == 0, f"{command}: {output}"
    return output


#: What a provision could change, as one text: files with mode, owner and content; packages; units; accounts.
_SNAPSHOT = (
    "find /etc /opt /usr/local /srv /var/lib/v100ctl -xdev -type f -exec sha256sum {} + 2>/dev/null | sort;"
    "find /etc /opt /usr/local /srv /var/lib/v100ctl -xdev -printf '%p %m %u %g %y\\n' 2>/dev/null | sort;"
    "dpkg-query -W -f '${Package} ${Version} ${Status}\\n' | sort;"
    "systemctl list-unit-files --no-legend --no-pager | sort"
)


def snapshot(host: RunningHost) -> list[str]:
    """The host's state, to compare before and after."""
    return on_host(host, _SNAPSHOT).splitlines()
