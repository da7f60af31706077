"""How hosts are reached: one object from the command line down to the probe and Ansible."""

from __future__ import annotations

from dataclasses import dataclass, field

from v100ctl.probe.connection import ConfirmHostKey, HostKeyPolicy, Secrets

DEFAULT_FORKS = 20
#: How long running requests may take to end, in seconds, before a server is stopped.
DEFAULT_DRAIN_LIMIT_S = 600.0
DEFAULT_PROBE_TIMEOUT_S = 60.0
#: Hashing every model and release of a host takes minutes; the probe itself gives up after an hour.
DEFAULT_DEEP_PROBE_TIMEOUT_S = 3660.0


@dataclass(frozen=True)
class Access:
    """Secrets given on the terminal, what to do with unknown host keys, how many hosts at once, how long each may take."""

    secrets: Secrets = field(default_factory=Secrets)
    host_keys: HostKeyPolicy = HostKeyPolicy.ASK
    forks: int = DEFAULT_FORKS
    timeout_s: float = DEFAULT_PROBE_TIMEOUT_S
    #: Asks a person about an unknown host key; the terminal by default.
    confirm_host_key: ConfirmHostKey | None = field(default=None, repr=False)
