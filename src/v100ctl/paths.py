"""Where this installation keeps what it ships, caches and writes on the controller."""

from __future__ import annotations

import os
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def content_dir() -> Path:
    """The folder that holds ``playbooks/``, ``roles/`` and ``templates/``.

    In a checkout that is its top level; a wheel carries the same three folders inside the package, under ``content/``.
    """
    packaged = _PACKAGE / "content"
    return packaged if packaged.is_dir() else _PACKAGE.parent.parent


def checkout_dir() -> Path | None:
    """The checkout this package runs from, or ``None`` for an installed wheel."""
    root = _PACKAGE.parent.parent
    return root if (root / "pyproject.toml").is_file() and (root / "roles").is_dir() else None


def _xdg(variable: str, fallback: str) -> Path:
    value = os.environ.get(variable, "")
    # The XDG base directory specification: a relative value is invalid and must be ignored.
    base = Path(value) if value.startswith("/") else Path.home() / fallback
    return base / "v100ctl"


def cache_dir() -> Path:
    """Sources, releases and models that can be fetched or built again (``$XDG_CACHE_HOME/v100ctl``)."""
    return _xdg("XDG_CACHE_HOME", ".cache")


def state_dir() -> Path:
    """Lab keys, lab inventories and logs (``$XDG_STATE_HOME/v100ctl``)."""
    return _xdg("XDG_STATE_HOME", ".local/state")


def log_dir() -> Path:
    """Ansible's full output, one file a run."""
    return state_dir() / "logs"
