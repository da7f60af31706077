"""What the steps of a rollout do to real hosts: SSH for gateways, history and questions, Ansible for what changes."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import date
from typing import Any

from v100ctl.access import DEFAULT_DRAIN_LIMIT_S, Access
from v100ctl.apply import Reporter, Secrets, run_playbook
from v100ctl.errors import UnreachableError, V100ctlError
from v100ctl.examine import Examined, examine
from v100ctl.fleet import Fleet, FleetHost
from v100ctl.fronts import Fronts
from v100ctl.history import History, LockedError, NoHistoryError, State, go_back, read_history
from v100ctl.probe import Connection, Session, open_session
from v100ctl.provision import alone_on, fetch, provision
from v100ctl.rollback import connection_to
from v100ctl.rollout.state import HostState, Options, RolloutError
from v100ctl.serving import PROOF_MAX_TOKENS, PROOF_PROMPT, PROOF_TIMEOUT_S, Completion, ServingError, ask

#: What comes to a host beside what serves there.
PREPARING_ROLES = ("cuda_toolkit", "llama_cpp", "external_engine", "vllm", "model_store")
#: Of so many answers the fastest counts: what else a host does makes an answer slower, never faster.
MEASUREMENTS = 3
MEASURED_TOKENS = 64
MEASURING_PROMPT = "Write a story about a machine that learns to read."
#: How long servers may take to stop: longer than their units allow them.
STOP_LIMIT_S = 900.0


class FleetActions:
    """See :class:`v100ctl.rollout.machine.Actions`.

    Args:
        fleet: The hosts, and the gateways in front of them.
        access: How they are reached.
        reporter: Where progress goes.
        as_of: The day that the plans are made for.
        options: Of the rollout.
        verbosity: Ansible's ``-v`` count.
        sleep: Waits so many seconds.
    """

    def __init__(
        self,
        fleet: Fleet,
        access: Access,
        reporter: Reporter,
        as_of: date,
        options: Options,
        *,
        verbosity: int = 0,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._fleet = fleet
        self._access = access
        self._reporter = reporter
        self._as_of = as_of
        self._options = options
        self._verbosity = verbosity
        self._sleep = sleep
        self._fronts = Fronts(fleet.gateways, self._way_to, sleep=sleep)

    # --- before anything is drained ----------------------------------------------------------------------------------------

    def prepare(self, names: Sequence[str]) -> Mapping[str, V100ctlError]:
        """See there. Nothing that serves is touched: releases and models lie beside those that are in use."""
        # Who cannot be told now would have to be told that a host is back, too.
        self._fronts.check(names)
        states = examine([self._fleet.hosts[name] for name in names], self._access, as_of=self._as_of)
        problems = {name: state.error for name, state in states.items() if state.error is not None}
        roles = {name: _preparing_roles(state) for name, state in states.items() if name not in problems}
        wanted = [name for name, found in roles.items() if found]
        if not wanted:
            return problems
        fetch([states[name] for name in wanted], self._reporter)
        with alone_on([states[name] for name in wanted], self._reporter):
            applied = run_playbook(
                "provision",
                self._fleet.sources,
                wanted,
                passwords=self._secrets(),
                vault_arguments=self._fleet.vault_arguments,
                reporter=self._reporter,
                verbosity=self._verbosity,
                forks=self._access.forks,
                # What is used no more is removed once nothing uses it, not now.
                extra_vars={"v100ctl_as_of": self._as_of.isoformat(), "v100ctl_roles": roles, "model_store_unused": []},
                title=f"Prepare {', '.join(wanted)}",
            )
        for failure in applied.failures:
            problems[failure.host] = RolloutError(f"{failure.task}: {failure.message}", hint=failure.hint)
        for name in wanted:
            if name not in applied.hosts:
                problems[name] = UnreachableError(f"{name}: Ansible did not reach it")
        return problems

    # --- one host ------------------------------------------------------------------------------------------------------------

    def drain(self, host: HostState) -> None:
        """See there. In front of a host without a gateway of the fleet there is nobody to tell; its own gateway queues."""
        self._fronts.drain(host.name, self._options.drain_limit_s)

    def open(self, host: HostState) -> None:
        """See there."""
        self._fronts.open(host.name)

    def good_state(self, host: HostState) -> str | None:
        """See there."""
        with self._session(host.name) as session:
            state = _present(_history(session, host.name))
        return state.id if state else None

    def speed(self, host: HostState, *, may_be_silent: bool = False) -> dict[str, float]:
        """See there. Only what the engine itself says of its decoding, or else all of an answer's tokens by the clock."""
        found: dict[str, float] = {}
        with self._session(host.name) as session:
            state = _present(_history(session, host.name))
            for name, served in (state.served if state else {}).items():
                try:
                    answers = [_ask(session, name, served, MEASURING_PROMPT, MEASURED_TOKENS) for _ in range(MEASUREMENTS)]
                except ServingError as error:
                    if not may_be_silent:
                        raise
                    self._reporter.note(f"{host.name}: its speed before is not known: {error.message}")
                    continue
                speeds = [answer.tokens_per_second or answer.tokens / max(answer.elapsed_s, 1e-3) for answer in answers]
                if max(speeds) > 0:
                    found[name] = round(max(speeds), 2)
        return found

    def stop(self, host: HostState) -> None:
        """See there. The driver's role changes nothing under servers that run."""
        with self._session(host.name) as session:
            done = session.run(["systemctl", "stop", "v100-*.service"], timeout_s=STOP_LIMIT_S, become=True)
        if done.rc != 0:
            said = done.stderr.decode("utf-8", "replace").strip().splitlines()
            raise RolloutError(f"servers on {host.name} cannot be stopped: {said[-1] if said else f'exit code {done.rc}'}")

    def settle(self, host: HostState) -> None:
        """See there."""
        self._sleep(self._options.settle_s)
        with self._session(host.name) as session:
            state = _present(_history(session, host.name))
            for name, served in (state.served if state else {}).items():
                _ask(session, name, served, PROOF_PROMPT, PROOF_MAX_TOKENS)

    def go_back(self, host: HostState) -> None:
        """See there. A host that does not answer is waited for, and so is one that another controller, by now dead, sent back."""
        deadline_s = time.monotonic() + self._options.return_limit_s
        while True:
            try:
                with self._session(host.name) as session:
                    host.good = _aim(session, host)
                    if host.good is None:
                        raise RolloutError(
                            f"{host.name} has no earlier state to go back to; once `v100ctl provision --limit {host.name}` has "
                            "made it serve, `v100ctl rollout --resume` lets requests in"
                        )
                    go_back(session, host.name, to=host.good, drain_limit_s=self._options.drain_limit_s)
                return
            except (UnreachableError, LockedError) as error:
                if time.monotonic() >= deadline_s:
                    raise
                self._reporter.note(f"{host.name} does not go back yet ({error.message}); waiting for it")
                self._sleep(min(10.0, self._options.return_limit_s))

    # --- a batch -------------------------------------------------------------------------------------------------------------

    def apply(self, names: Sequence[str]) -> Mapping[str, V100ctlError]:
        """See there: the roles that the differences name, as `provision` runs them."""
        batch = dataclasses.replace(self._fleet, hosts={name: self._fleet.hosts[name] for name in names})
        # A host that goes back needs the model that it had: what nobody uses is removed by the next `provision`.
        variables: dict[str, Any] = {"model_store_unused": []}
        if self._options.start_limit_s is not None:
            variables["llm_server_start_limit_s"] = self._options.start_limit_s
        if self._options.drain_limit_s != DEFAULT_DRAIN_LIMIT_S:
            # For hosts with a gateway of their own. What the inventory says of it counts unless something else was asked for.
            variables["gateway_drain_limit_s"] = math.ceil(self._options.drain_limit_s)
        result = provision(
            batch,
            access=self._access,
            reporter=self._reporter,
            as_of=self._as_of,
            verbosity=self._verbosity,
            named_roles=True,
            many_restarts=True,
            variables=variables,
        )
        return {
            name: UnreachableError(host.message, hint=host.hint)
            if host.status == "unreachable"
            else RolloutError(host.message, hint=host.hint)
            for name, host in result.hosts.items()
            if host.status not in ("changed", "unchanged")
        }

    # --- tools ---------------------------------------------------------------------------------------------------------------

    def _secrets(self) -> Secrets:
        return Secrets(
            connection_password=self._access.secrets.connection_password,
            become_password=self._access.secrets.become_password,
            vault_password=self._fleet.vault_password,
        )

    def _session(self, name: str) -> AbstractContextManager[Session]:
        return self._way_to(self._fleet.hosts[name])

    def _way_to(self, host: FleetHost) -> AbstractContextManager[Session]:
        connection: Connection = connection_to(host, self._access)
        return open_session(connection)


def _preparing_roles(state: Examined) -> list[str]:
    return [role for role in PREPARING_ROLES if role in {finding.role for finding in state.changes}]


def _ask(session: Session, name: str, served: Mapping[str, str], prompt: str, max_tokens: int) -> Completion:
    """One question to an instance as it serves now, with the key that its host keeps for helpers."""
    key = None
    if served["keys_file"]:
        done = session.run(["head", "-n", "1", "--", served["keys_file"]], become=True)
        key = done.stdout.decode("utf-8", "replace").strip() or None
    instance = {"name": name, "unit": served["unit"], "completion_url": served["url"], "model_alias": served["model"]}
    return ask(session, instance, prompt, max_tokens=max_tokens, timeout_s=PROOF_TIMEOUT_S, api_key=key)


def _history(session: Session, host: str) -> History:
    try:
        return read_history(session, host)
    except NoHistoryError:
        # Bare, or of an older version: there is nothing to go back to, and nothing is measured.
        return History(())


def _aim(session: Session, host: HostState) -> str | None:
    """The state that a host goes back to."""
    if not host.given_up and (host.good is not None or host.looked):
        return host.good
    # It was away before its turn: what it is in is what it was in. Or it could not go back, and somebody has looked after it
    # since: what was proved there by now counts where the state of then is no longer there.
    history = _history(session, host.name)
    if any(state.id == host.good and not state.missing for state in history.states):
        return host.good
    state = _present(history)
    return state.id if state else host.good


def _present(history: History) -> State | None:
    """The state that a host is in, or the last one that was proved there."""
    return next((state for state in history.states if state.id == history.current), history.newest)
