"""Bring hosts back to a state of their history, one after the other, and prove that they serve."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

from v100ctl.access import DEFAULT_DRAIN_LIMIT_S, Access
from v100ctl.apply import Reporter
from v100ctl.errors import EXIT_DIFFERENCES, EXIT_ERROR, EXIT_OK, UnreachableError, V100ctlError
from v100ctl.fleet import Fleet, FleetHost
from v100ctl.fronts import Fronts
from v100ctl.history import (
    HISTORY_SCHEMA,
    ROLLBACK_SCHEMA,
    History,
    HistoryError,
    Restored,
    State,
    UntouchedError,
    find_state,
    go_back,
    read_history,
)
from v100ctl.locks import exclusive
from v100ctl.probe import Connection, Session, open_session
from v100ctl.provision import Confirm, lock_path
from v100ctl.rollout.state import alone

RollbackStatus = Literal["restored", "unchanged", "would-restore", "stopped", "unreachable", "failed", "skipped"]


@dataclass(frozen=True)
class HostHistory:
    """What one host remembers, or the error that kept it from being asked."""

    history: History | None = None
    error: V100ctlError | None = None


@dataclass(frozen=True)
class HostRollback:
    """How it ended on one host. ``target`` is the state that was wanted."""

    status: RollbackStatus
    target: State | None = None
    restored: Restored | None = None
    message: str = ""
    hint: str | None = None


def connection_to(host: FleetHost, access: Access) -> Connection:
    """How a host is reached.

    Raises:
        V100ctlError: its variables do not say it.
    """
    return Connection.from_vars(
        host.name, host.variables, ask=access.secrets, host_keys=access.host_keys, confirm_host_key=access.confirm_host_key
    )


def histories(fleet: Fleet, access: Access) -> dict[str, HostHistory]:
    """What each host remembers, all asked at once."""

    def ask(host: FleetHost) -> HostHistory:
        try:
            with open_session(connection_to(host, access)) as session:
                return HostHistory(read_history(session, host.name))
        except V100ctlError as error:
            return HostHistory(error=error)

    with ThreadPoolExecutor(max_workers=access.forks) as pool:
        return dict(zip(fleet.hosts, pool.map(ask, fleet.hosts.values()), strict=True))


def histories_exit_code(found: Mapping[str, HostHistory]) -> int:
    """1 where a host could not be asked."""
    return EXIT_ERROR if any(item.error is not None for item in found.values()) else EXIT_OK


def histories_document(found: Mapping[str, HostHistory]) -> dict[str, Any]:
    """The document ``v100ctl/history/1``."""
    return {
        "schema": HISTORY_SCHEMA,
        "hosts": {
            name: {
                "current": item.history.current if item.history else None,
                "previous": item.history.previous if item.history else None,
                "error": item.error.message if item.error else "",
                "states": [_state_document(state) for state in item.history.states] if item.history else [],
            }
            for name, item in found.items()
        },
    }


def _state_document(state: State) -> dict[str, Any]:
    return {
        "id": state.id,
        "time": state.time.isoformat(),
        "state": state.digest,
        "restored_from": state.restored_from,
        "releases": list(state.releases),
        "models": list(state.models),
        "instances": dict(state.instances),
        "missing": list(state.missing),
    }


def rollback(
    fleet: Fleet,
    *,
    access: Access,
    reporter: Reporter,
    to: str | None = None,
    drain_limit_s: float = DEFAULT_DRAIN_LIMIT_S,
    check: bool = False,
    confirm: Confirm = lambda question: False,
) -> dict[str, HostRollback]:
    """Bring every host back: to its previous good state, or to that of a time.

    One host after the other, so that the others go on serving; after one that failed the rest is left as it is.

    Args:
        fleet: The hosts.
        access: How they are reached.
        reporter: Where progress goes.
        to: A time, or the beginning of one, as :func:`v100ctl.history.find_state` takes it.
        drain_limit_s: How long running requests may take to end.
        check: Change nothing; say what would be done.
        confirm: Asked once, before anything is changed.
    """
    results: dict[str, HostRollback] = {}
    targets: dict[str, State] = {}
    for name, found in histories(fleet, access).items():
        try:
            targets[name] = _target(name, found, to)
        except V100ctlError as error:
            unreachable = isinstance(error, UnreachableError)
            results[name] = HostRollback("unreachable" if unreachable else "failed", message=error.message, hint=error.hint)
            reporter.failure(name, "", error.message.removeprefix(f"{name}: "), error.hint)
    question = "; ".join(f"{name} goes back to its state of {describe_time(state)}" for name, state in targets.items())
    if targets and not check and not confirm(f"{question}. Go on?"):
        return results | {name: HostRollback("stopped", state, message="nobody said yes") for name, state in targets.items()}
    fronts = Fronts(fleet.gateways, lambda host: open_session(connection_to(host, access)))
    failed = False
    for name, state in targets.items():
        if failed:
            results[name] = HostRollback("skipped", state, message="left as it is, since a host before it failed")
            continue
        results[name] = _restore(fleet.hosts[name], state, access, reporter, drain_limit_s, fronts=None if check else fronts)
        failed = results[name].status not in ("restored", "unchanged", "would-restore")
    return {name: results[name] for name in fleet.hosts}


def describe_time(state: State) -> str:
    """A state by its time, for people."""
    return state.time.strftime("%Y-%m-%d %H:%M:%S UTC")


def _target(name: str, found: HostHistory, to: str | None) -> State:
    if found.error is not None or found.history is None:
        raise found.error or HistoryError(f"{name} keeps no history")
    if to is not None:
        return find_state(found.history, to, name)
    wanted = found.history.previous
    state = next((item for item in found.history.states if item.id == wanted), None)
    if state is None:
        raise HistoryError(f"{name} remembers no state before the one that it is in", hint=f"`v100ctl history {name}` shows them")
    return state


def _restore(
    host: FleetHost, state: State, access: Access, reporter: Reporter, drain_limit_s: float, *, fronts: Fronts | None
) -> HostRollback:
    """One host. ``fronts``: the gateways of the fleet; ``None``: change nothing, say what would be done."""
    name = host.name
    try:
        connection = connection_to(host, access)

        def waiting() -> None:
            reporter.note(f"another v100ctl is changing {name}; waiting for it")

        with (
            # What is judged by a rollout must not change meanwhile.
            contextlib.nullcontext() if fronts is None else alone([lock_path(host, connection).name]),
            exclusive(lock_path(host, connection), waiting),
            reporter.phase(f"{name}: going back to {describe_time(state)}"),
            open_session(connection) as session,
        ):
            done = go_back(session, name, to=state.id, drain_limit_s=drain_limit_s, check=True)
            if fronts is not None:
                disturbs = bool(done.restarted or done.removed)
                done = _behind_fronts(fronts, session, name, state, drain_limit_s, reporter, disturbs=disturbs)
    except V100ctlError as error:
        reporter.failure(name, "", error.message.removeprefix(f"{name}: "), error.hint)
        status: RollbackStatus = "unreachable" if isinstance(error, UnreachableError) else "failed"
        return HostRollback(status, state, message=error.message, hint=error.hint)
    if fronts is None:
        return HostRollback("would-restore" if done.changed else "unchanged", state, done)
    return HostRollback("restored" if done.changed else "unchanged", state, done)


def _behind_fronts(
    fronts: Fronts, session: Session, name: str, state: State, drain_limit_s: float, reporter: Reporter, *, disturbs: bool
) -> Restored:
    """Its own gateway, where it has one, lets requests wait; those of the fleet send them elsewhere meanwhile."""
    untouched = True
    try:
        if disturbs:
            fronts.drain(name, drain_limit_s)
        untouched = False
        done = go_back(session, name, to=state.id, drain_limit_s=drain_limit_s)
    except BaseException as error:
        # Also after Ctrl-C: it serves as before. One that was changed and does not serve stays outside.
        if untouched or isinstance(error, UntouchedError):
            with contextlib.suppress(V100ctlError):
                fronts.open(name)
        elif disturbs:
            reporter.hint(f"{name} may be out of the fleet's gateway until `v100ctl rollback {name} --to {state.id}` ends well")
        raise
    # Also one that a run that was cut off has left outside.
    fronts.open(name)
    return done


def rollback_exit_code(results: Mapping[str, HostRollback]) -> int:
    """1 before 2 before 0, over all hosts."""
    statuses = {result.status for result in results.values()}
    if statuses & {"stopped", "unreachable", "failed", "skipped"}:
        return EXIT_ERROR
    return EXIT_DIFFERENCES if "would-restore" in statuses else EXIT_OK


def rollback_document(results: Mapping[str, HostRollback]) -> dict[str, Any]:
    """The document ``v100ctl/rollback/1``."""
    return {
        "schema": ROLLBACK_SCHEMA,
        "hosts": {
            name: {
                "status": result.status,
                "to": result.target.id if result.target else None,
                "state": result.restored.id if result.restored else None,
                "restarted": list(result.restored.restarted) if result.restored else [],
                "removed": list(result.restored.removed) if result.restored else [],
                "files": list(result.restored.files) if result.restored else [],
                "proofs": {
                    instance: {"text": answer.text, "tokens": answer.tokens, "tokens_per_second": answer.tokens_per_second}
                    for instance, answer in (result.restored.answers if result.restored else {}).items()
                },
                "message": result.message,
            }
            for name, result in results.items()
        },
    }
