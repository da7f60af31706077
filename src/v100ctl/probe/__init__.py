"""Ask hosts what they are: one script, one round trip, one document.

Loaded piece by piece, so that a command line that probes nothing pays for nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from v100ctl.probe.connection import Connection, HostKeyPolicy, HostKeyQuestion, Secrets
    from v100ctl.probe.run import (
        PythonMissingError,
        install_python,
        parse_facts,
        probe_host,
        probe_hosts,
        probe_session,
        python_bootstrap_command,
    )
    from v100ctl.probe.session import Result, Session, TcpStream, open_session

__all__ = [
    "Connection",
    "HostKeyPolicy",
    "HostKeyQuestion",
    "PythonMissingError",
    "Result",
    "Secrets",
    "Session",
    "TcpStream",
    "install_python",
    "open_session",
    "parse_facts",
    "probe_host",
    "probe_hosts",
    "probe_session",
    "python_bootstrap_command",
]

_HOMES = {
    "connection": ("Connection", "HostKeyPolicy", "HostKeyQuestion", "Secrets"),
    "run": (
        "PythonMissingError",
        "install_python",
        "parse_facts",
        "probe_host",
        "probe_hosts",
        "probe_session",
        "python_bootstrap_command",
    ),
    "session": ("Result", "Session", "TcpStream", "open_session"),
}


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
