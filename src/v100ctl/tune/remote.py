"""Trials on a host: the script there, a heartbeat that renews its lease, and the server's own requests."""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from v100ctl.bench.report import Target
from v100ctl.bench.run import SILENCE_S, Measure, on_host
from v100ctl.errors import ProbeError, UnreachableError, V100ctlError
from v100ctl.plan.render import render
from v100ctl.plan.types import Instance
from v100ctl.plan.units import START_TIMEOUT_S
from v100ctl.probe import Connection, open_session
from v100ctl.probe.run import run_python, shell_safe_json
from v100ctl.probe.session import Session
from v100ctl.tune import host_script
from v100ctl.tune.search import LIVE, Candidate
from v100ctl.tune.trials import TrialFailed

HOST_SCRIPT = Path(host_script.__file__)
#: How long a host waits for a sign of life before it brings the live settings back.
DEFAULT_LEASE_S = 90.0
#: Ending restarts the server, which may take as long as a stop and the checks before a start.
_END_TIMEOUT_S = host_script.RESTART_TIMEOUT_S + 120.0
_POLL_S = 1.0


class TuneError(V100ctlError):
    """Nothing can be tuned, or not any more."""


def drop_in(instance: Instance) -> str:
    """What makes the unit run as a candidate's plan says."""
    placement = instance.placement
    return render(
        "systemd/tune.conf.j2",
        environment=dict(instance.environment),
        argv=instance.argv,
        cpus=placement.cpus if placement else "",
        numa_policy=placement.policy if placement else "",
        numa_nodes=",".join(map(str, placement.nodes)) if placement else "",
    )


class Host:
    """The script on a host, for one instance.

    Args:
        session: The way in.
        name, unit: The instance.
        lease_s: See :data:`DEFAULT_LEASE_S`.
    """

    def __init__(self, session: Session, name: str, unit: str, lease_s: float) -> None:
        self._session = session
        self._common = {"name": name, "unit": unit, "lease_s": lease_s, "token": secrets.token_hex(8)}
        self._script = HOST_SCRIPT.read_bytes()

    def call(self, verb: str, *, timeout_s: float = 120.0, session: Session | None = None, **words: Any) -> dict[str, Any]:
        """One verb of the script.

        Raises:
            TuneError: it refuses.
            UnreachableError, ProbeError: the host does not answer, or the script failed.
        """
        request = shell_safe_json({**self._common, "verb": verb, **words})
        answer = run_python(session or self._session, self._script, request, what=f"tune's {verb}", timeout_s=timeout_s)
        found: dict[str, Any] = json.loads(answer)
        if found.get("refused"):
            raise TuneError(f"{self._session.connection.host}: {found['refused']}", hint="run the same command again: it goes on")
        return found

    def begin(self, cards: tuple[str, ...], *, power: bool) -> dict[str, Any]:
        """Start the dead-man. ``power``: power limits will be set, so that those of now are kept."""
        return self.call("begin", script=self._script.decode("utf-8"), cards=list(cards), power=power)

    def end(self) -> None:
        """Bring the live settings back."""
        self.call("end", timeout_s=_END_TIMEOUT_S)


@contextmanager
def heartbeat(host: Host, connection: Connection, lease_s: float) -> Iterator[None]:
    """Renews the lease from a session of its own while the block runs; a long request must not look like a dead controller."""
    over = threading.Event()

    def beat() -> None:
        while not over.is_set():
            try:
                with open_session(connection) as session:
                    while not over.wait(lease_s / 4):
                        host.call("look", session=session, timeout_s=lease_s / 2)
            except (UnreachableError, ProbeError):
                over.wait(1.0)
            except TuneError:
                # It has lapsed: whatever is asked next of the host says so.
                return

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(lease_s)


class HostRig:
    """See :class:`v100ctl.tune.trials.Rig`.

    Args:
        host: The script.
        session: For requests to the server.
        target: The live server.
        instance_of: The planned instance of a candidate.
        power_of: The power limit of a candidate in watts, if it changes that.
        sleep, clock: For tests.
    """

    def __init__(
        self,
        host: Host,
        session: Session,
        target: Target,
        instance_of: Callable[[Candidate], Instance],
        power_of: Callable[[Candidate], float | None],
        *,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._host, self._target = host, target
        self._instance_of, self._power_of = instance_of, power_of
        self._measure: Measure = on_host(session)
        self._sleep, self._clock = sleep, clock

    def start(self, candidate: Candidate) -> None:
        """See there."""
        instance = self._instance_of(candidate)
        watts = self._power_of(candidate)
        power = {} if watts is None else dict.fromkeys(self._target.cards, watts)
        text = "" if candidate.id == LIVE else drop_in(instance)
        started = self._host.call("trial", drop_in=text, power=power)
        if started["problem"]:
            raise TrialFailed(started["problem"])
        deadline_s = self._clock() + START_TIMEOUT_S
        while True:
            seen = self._host.call("look", url=instance.health_url, keys_file=instance.api_keys_file)
            fresh = seen["invocation"] not in ("", started["before"])
            if fresh and seen["active"] == "active" and seen["status"] == 200:
                return
            if fresh and (seen["active"] == "failed" or (seen["active"] == "inactive" and not seen["job"])):
                raise TrialFailed(f"does not serve: {seen.get('said') or seen.get('result') or 'it has ended'}")
            if self._clock() >= deadline_s:
                raise TrialFailed(f"did not serve within {START_TIMEOUT_S} s")
            self._sleep(_POLL_S)

    def ask(self, candidate: Candidate, request: Mapping[str, Any]) -> Mapping[str, Any]:
        """See there."""
        instance = self._instance_of(candidate)
        try:
            answer = self._measure({**self._target.to_request(request, SILENCE_S), "model": instance.model_alias})
        except ProbeError as error:
            raise TrialFailed(error.message) from error
        return answer

    def context_length(self, candidate: Candidate) -> int:
        """See there."""
        return self._instance_of(candidate).context_length
