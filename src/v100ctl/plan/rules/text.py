"""Numbers for people, as all rules write them."""

from __future__ import annotations


def gib(value_bytes: float) -> str:
    """Bytes for people, in GiB (2^30), or MiB below one."""
    return f"{value_bytes / 1024**3:.1f} GiB" if value_bytes >= 1024**3 else f"{value_bytes / 1024**2:.0f} MiB"
