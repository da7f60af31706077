"""The order of steps of a rollout, and what happens when one fails. It knows no host: :class:`Actions` does.

Every step is written down before it begins, and every step may be done twice. So a controller that dies anywhere is followed by
one that repeats the step that was under way: :func:`go_on` leads on, :func:`abort` leads back. Whatever happens, a host ends on
what was planned or on its last good state, in the gateway, or it is said to be lost.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

from v100ctl.errors import V100ctlError
from v100ctl.rollout.state import Event, HostState, Phase, Rollout, leaves_servers, now

_Result = TypeVar("_Result")


class Actions(Protocol):
    """What a rollout does to hosts. All may be called again after they were cut off, and raise V100ctlError."""

    def prepare(self, names: Sequence[str]) -> Mapping[str, V100ctlError]:
        """Brings releases and models to hosts beside what serves there; those that failed, with the reason."""

    def drain(self, host: HostState) -> None:
        """No new request reaches the host, and those that ran have ended."""

    def good_state(self, host: HostState) -> str | None:
        """The last state in the host's history that was proved; ``None`` where it has none."""

    def speed(self, host: HostState, *, may_be_silent: bool = False) -> dict[str, float]:
        """Tokens per second of each instance, by name. With ``may_be_silent`` one that does not answer is left out."""

    def stop(self, host: HostState) -> None:
        """Nothing runs on the host's cards any more."""

    def apply(self, names: Sequence[str]) -> Mapping[str, V100ctlError]:
        """Makes hosts as planned and proves each instance; those that failed, with the reason."""

    def open(self, host: HostState) -> None:
        """Requests reach the host again."""

    def settle(self, host: HostState) -> None:
        """It serves under load for a while, and still answers."""

    def go_back(self, host: HostState) -> None:
        """The host returns to its last good state (to the one that it is in where nobody has looked before) and proves it."""


class GateError(V100ctlError):
    """A host does not do as well as it has to."""


class StoppedError(BaseException):
    """Another thread was interrupted. No :class:`Exception`: no host has failed."""


def sleep_unless(stopped: threading.Event) -> Callable[[float], None]:
    """Waits so many seconds, and no longer than until nothing more is to be begun."""

    def sleep(seconds: float) -> None:
        if stopped.wait(seconds):
            raise StoppedError

    return sleep


class Machine:
    """One run of a rollout.

    Args:
        rollout: What was written down so far.
        actions: What is done to hosts.
        save: Writes it down.
        forks: Hosts at once, for what is no Ansible.
        tell: Told of each step: host, step, and what was wrong (empty: nothing).
        clock: Seconds.
        stopped: Set where nothing more is to be begun.
    """

    def __init__(
        self,
        rollout: Rollout,
        actions: Actions,
        save: Callable[[Rollout], None],
        *,
        forks: int = 1,
        tell: Callable[[str, str, str], None] = lambda host, step, problem: None,
        clock: Callable[[], float] = time.monotonic,
        stopped: threading.Event | None = None,
    ) -> None:
        self.rollout = rollout
        self._actions = actions
        self._write_down = save
        self._lock = threading.Lock()
        self._forks = forks
        self._tell = tell
        self._clock = clock
        self._stopped = stopped or threading.Event()

    # --- the two ways ---------------------------------------------------------------------------------------------------------

    def go_on(self) -> None:
        """From wherever it is to the end: every host is done, or too many failed and the rest stays as it is."""
        rollout = self.rollout
        failed = [host for host in rollout.hosts.values() if host.phase in ("returning", "lost") or self._failed_under_way(host)]
        if failed:
            self._give_back(failed)
        if rollout.status == "running" and self._may_go_on() and self._prepare():
            for batch in rollout.batches:
                under_way = [rollout.hosts[name] for name in batch if rollout.hosts[name].phase not in _ENDED]
                if under_way:
                    self._advance_while_others_serve(under_way)
                if not self._may_go_on():
                    break
        if left := self._under_way():
            # Cut off in the middle of a batch of which another host failed.
            self._give_back(left)
        self._end()

    def abort(self) -> None:
        """What is under way goes back, what was not begun stays, what is done stays done."""
        under_way = [
            host for host in self.rollout.hosts.values() if host.phase not in (*_ENDED, "waiting") or host.phase == "lost"
        ]
        if under_way:
            self._give_back(under_way)
        self._end(aborted=True)

    def _end(self, *, aborted: bool = False) -> None:
        rollout = self.rollout
        for host in rollout.hosts.values():
            if host.phase == "waiting":
                host.phase = "untouched"
        # Those that were prepared for nothing, or went back because of another one, have no problem of their own.
        left = any(host.phase == "lost" or (host.phase != "done" and not host.problem) for host in rollout.hosts.values())
        # One that was ended stays so, also where a host that it had lost is led back later.
        aborted = aborted or rollout.status == "aborted"
        rollout.status = "aborted" if aborted else "stopped" if left or not self._may_go_on() else "done"
        rollout.ended = now()
        self._save(rollout)

    def _save(self, rollout: Rollout) -> None:
        with self._lock:
            self._write_down(rollout)

    def _under_way(self) -> list[HostState]:
        return [host for host in self.rollout.hosts.values() if host.phase not in (*_ENDED, "waiting")]

    @staticmethod
    def _failed_under_way(host: HostState) -> bool:
        return bool(host.problem) and host.phase not in (*_ENDED, "waiting")

    def _may_go_on(self) -> bool:
        return len(self.rollout.failed) <= self.rollout.options.max_failed

    # --- steps ----------------------------------------------------------------------------------------------------------------

    def _prepare(self) -> bool:
        """Before the first host is drained everybody has what the new plan needs; whether that went well."""
        rollout = self.rollout
        if rollout.prepared:
            return True
        waiting = [name for name, host in rollout.hosts.items() if host.phase == "waiting"]
        began_s, at = self._clock(), now()
        problems = self._run_over(waiting, self._actions.prepare) if waiting else {}
        for name in waiting:
            problem = problems.get(name, "")
            rollout.hosts[name].events.append(Event("prepare", at, round(self._clock() - began_s, 3), problem))
            self._tell(name, "prepare", problem)
            rollout.hosts[name].problem = problem
        # With so many failures allowed, the others go on without those.
        for name in problems:
            rollout.hosts[name].phase = "untouched"
        rollout.prepared = self._may_go_on()
        self._save(rollout)
        return rollout.prepared

    def _advance_while_others_serve(self, hosts: Sequence[HostState]) -> None:
        """One batch. Where a lost host is missed: one host after the other, and none that alone is left to serve something."""
        if self._others_serve(hosts):
            self._advance(hosts)
            return
        if begun := [host for host in hosts if host.phase != "waiting"]:
            self._advance(begun)
        for host in hosts:
            if host.phase != "waiting" or not self._may_go_on():
                continue
            if self._others_serve([host]):
                self._advance([host])
                continue
            host.problem = f"left as it is: while it is out nobody would serve {', '.join(host.missing)}"
            self._tell(host.name, "wait", host.problem)
            self._enter(host, "untouched")

    def _others_serve(self, hosts: Sequence[HostState]) -> bool:
        # Batches leave somebody to serve as long as everybody comes back.
        lost = [name for name, host in self.rollout.hosts.items() if host.phase == "lost"]
        missing = {name: host.missing for name, host in self.rollout.hosts.items()}
        return not lost or leaves_servers([*lost, *(host.name for host in hosts)], missing, self.rollout.servers)

    def _advance(self, hosts: Sequence[HostState]) -> None:
        """One batch: out of the gateway, changed, judged, and in again."""
        ready = self._all(self._take_out, hosts)
        good: list[HostState] = []
        if ready:
            for host in ready:
                host.phase = "applying"
            self._save(self.rollout)
            began_s, at = self._clock(), now()
            problems = self._run_over([host.name for host in ready], self._actions.apply)
            for host in ready:
                problem = problems.get(host.name, "")
                self._note(host, "apply", at, began_s, problem)
                host.problem = problem
            self._save(self.rollout)
            good = self._all(self._judge, [host for host in ready if not host.problem])
        failed = [host for host in hosts if host not in good]
        if failed:
            self._give_back(failed)

    @staticmethod
    def _run_over(names: Sequence[str], action: Callable[[Sequence[str]], Mapping[str, V100ctlError]]) -> dict[str, str]:
        """What was wrong with which host. What cannot be run at all has failed on each: those that are out have to get back."""
        try:
            return {name: problem.message for name, problem in action(names).items()}
        except V100ctlError as error:
            return dict.fromkeys(names, error.message)
        except OSError as error:
            # The controller's own disk, or a program that it cannot start.
            return dict.fromkeys(names, f"{error.filename or 'the controller'}: {error.strerror or error}")

    def _take_out(self, host: HostState) -> None:
        self._enter(host, "draining")
        if host.good is None:
            host.good = self._step(host, "look", lambda: self._actions.good_state(host))
        if not host.serves_meanwhile:
            self._step(host, "drain", lambda: self._actions.drain(host))
            if host.before is None:
                # What does not serve now may be what the rollout mends.
                host.before = self._step(host, "measure", lambda: self._actions.speed(host, may_be_silent=True))
        # Written down before anything is changed: later the host is no longer what is measured here.
        self._save(self.rollout)
        if host.reboots:
            self._step(host, "stop", lambda: self._actions.stop(host))

    def _judge(self, host: HostState) -> None:
        self._enter(host, "proving")
        if not host.serves_meanwhile:
            host.after = self._step(host, "measure again", lambda: self._fast_enough(host))
            self._enter(host, "opening")
            self._step(host, "open", lambda: self._actions.open(host))
        self._enter(host, "settling")
        self._step(host, "settle", lambda: self._actions.settle(host))
        self._enter(host, "done")

    def _fast_enough(self, host: HostState) -> dict[str, float]:
        found = self._actions.speed(host)
        slow = [
            f"{name} decodes {found[name]:.1f} tokens/s instead of {before:.1f} before "
            f"({100 * found[name] / before:.0f} %, and {100 * self.rollout.options.min_speed:.0f} % are asked for)"
            for name, before in sorted((host.before or {}).items())
            if name in found and found[name] < before * self.rollout.options.min_speed
        ]
        if slow:
            host.after = found
            raise GateError("; ".join(slow))
        return found

    def _give_back(self, hosts: Sequence[HostState]) -> None:
        """Hosts return by themselves to their last good state; one that cannot is lost, and said to be."""
        for host in hosts:
            host.phase = "returning"
        self._save(self.rollout)

        def give_back(host: HostState) -> None:
            problem = host.problem
            self._step(host, "go back", lambda: self._actions.go_back(host))
            if not host.serves_meanwhile:
                self._step(host, "open again", lambda: self._actions.open(host))
            # What failed before is what is told; going back went well.
            host.problem = problem
            self._enter(host, "returned")

        returned = self._all(give_back, hosts)
        for host in hosts:
            if host not in returned:
                host.phase = "lost"
        self._save(self.rollout)

    def _all(self, function: Callable[[HostState], None], hosts: Sequence[HostState]) -> list[HostState]:
        """Those for which it went well; of the others the reason is noted."""

        def run(host: HostState) -> bool:
            try:
                function(host)
            except V100ctlError as error:
                host.problem = f"{host.problem}; {error.message}" if host.problem else error.message
                return False
            return True

        if self._forks <= 1 or len(hosts) <= 1:
            return [host for host in hosts if run(host)]
        with ThreadPoolExecutor(max_workers=self._forks) as pool:
            try:
                return [host for host, well in zip(hosts, pool.map(run, hosts), strict=True) if well]
            except BaseException:
                # Ctrl-C reaches this thread alone; the others end with the step that they are in.
                self._stopped.set()
                raise

    def _enter(self, host: HostState, phase: Phase) -> None:
        host.phase = phase
        self._save(self.rollout)

    def _step(self, host: HostState, step: str, function: Callable[[], _Result]) -> _Result:
        if self._stopped.is_set():
            raise StoppedError
        began_s, at = self._clock(), now()
        try:
            result = function()
        except V100ctlError as error:
            self._note(host, step, at, began_s, error.message)
            raise
        self._note(host, step, at, began_s, "")
        return result

    def _note(self, host: HostState, step: str, at: str, began_s: float, problem: str) -> None:
        with self._lock:
            host.events.append(Event(step, at, round(self._clock() - began_s, 3), problem))
        self._tell(host.name, step, problem)


#: Nothing is done to these any more in the same run.
_ENDED: frozenset[str] = frozenset({"done", "returned", "lost", "untouched"})
