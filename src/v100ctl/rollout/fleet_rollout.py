"""Begin a rollout, go on with one that was cut off, or end it: the three ways into the machine."""

from __future__ import annotations

import dataclasses
import hashlib
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from datetime import UTC, date, datetime

from v100ctl.access import Access
from v100ctl.apply import Reporter
from v100ctl.examine import Examined, examine
from v100ctl.fleet import Fleet, FleetHost
from v100ctl.plan.types import describe
from v100ctl.probe import Session, open_session
from v100ctl.provision import fixable, lock_path, roles_that_mend
from v100ctl.rollback import connection_to
from v100ctl.rollout import claims, state
from v100ctl.rollout.actions import FleetActions
from v100ctl.rollout.machine import Machine, sleep_unless
from v100ctl.rollout.state import AT_REST, HostState, Options, Phase, Rollout, RolloutError


def plan_rollout(fleet: Fleet, access: Access, reporter: Reporter, as_of: date, options: Options) -> Rollout:
    """What would change on which host, in which order. Nothing is written down and nothing is touched.

    Raises:
        RolloutError: another rollout over these hosts was not ended, or a host cannot be changed at all.
    """
    _refuse_documents(fleet)
    with reporter.phase(f"probing {len(fleet.hosts)} hosts"):
        examined = examine(list(fleet.hosts.values()), access, as_of=as_of)
    problems = [problem for found in examined.values() if (problem := _problem(found))]
    if problems:
        raise RolloutError(
            "\n".join(["not every host can be changed, so none is", *problems]),
            hint="mend them, or leave them out with `--limit 'all:!HOST'`",
        )
    addresses = {name: _address(found) for name, found in examined.items()}
    _refuse_unfinished(addresses.values())
    hosts = [_host_state(found, addresses[name]) for name, found in examined.items() if found.changes]
    # Those that restart first: the canary has to try what may fail.
    hosts.sort(key=lambda host: host.serves_meanwhile)
    serving = sum(1 for found in examined.values() if found.plan is not None and found.plan.instances)
    servers = Counter(name for found in examined.values() for name in _serves(found))
    batches = state.in_batches(
        [host.name for host in hosts],
        options,
        max(1, serving - 1),
        missing={host.name: host.missing for host in hosts},
        servers=servers,
    )
    begun = datetime.now(UTC)
    return Rollout(
        id=begun.strftime("%Y%m%dT%H%M%S%fZ"),
        owner=state.owner(),
        started=begun.isoformat(timespec="seconds"),
        as_of=as_of.isoformat(),
        options=options,
        hosts={host.name: host for host in hosts},
        batches=batches,
        status="planned" if hosts else "done",
        servers=dict(servers),
    )


def find_unfinished(fleet: Fleet, access: Access) -> Rollout:
    """The rollout over these hosts that was cut off, or that has lost a host.

    Raises:
        RolloutError: there is none.
    """
    addresses = [lock_path(host, connection_to(host, access)).name for host in fleet.hosts.values()]
    found = state.unfinished(addresses)
    if found is None:
        raise RolloutError("no rollout over these hosts was left unfinished", hint="`v100ctl rollout` begins one")
    return found


def carry_out(
    rollout: Rollout,
    fleet: Fleet,
    access: Access,
    reporter: Reporter,
    *,
    abort: bool = False,
    resumed: bool = False,
    verbosity: int = 0,
) -> Rollout:
    """Do it, from wherever it is.

    Args:
        rollout: Planned, or found unfinished.
        fleet: The inventory of its hosts.
        access: How they are reached.
        reporter: Where progress goes.
        abort: Lead back what is under way instead.
        resumed: It was begun by another run: the inventory has to want the same still.
        verbosity: Ansible's ``-v`` count.

    Raises:
        RolloutError: another one runs over the same hosts, the inventory lacks a host or wants something else by now.
    """
    every = fleet.hosts

    def way(name: str) -> AbstractContextManager[Session]:
        return open_session(connection_to(every[name], access))

    addresses = [host.address for host in rollout.held.values()]
    with state.alone(addresses):
        # Somebody may have been faster, while a person was asked or just before the lock was taken.
        if resumed or abort:
            rollout = state.load(rollout.id)
            if not rollout.unfinished:
                raise RolloutError("the rollout has ended meanwhile", hint="`v100ctl rollout` begins one")
        else:
            _refuse_unfinished(addresses)
            rollout.status = "running"
        fleet = dataclasses.replace(fleet, hosts=_needed(rollout, fleet, abort=abort))
        as_of = date.fromisoformat(rollout.as_of)
        if resumed and not abort:
            _refuse_another_plan(rollout, fleet, access, as_of)
        state.save(rollout)
        _claim(rollout, fleet, way, access.forks, new=not (resumed or abort))
        stopped = threading.Event()
        actions = FleetActions(fleet, access, reporter, as_of, rollout.options, verbosity=verbosity, sleep=sleep_unless(stopped))

        def tell(host: str, step: str, problem: str) -> None:
            if problem:
                reporter.failure(host, step, problem, None)
            else:
                reporter.note(f"{host}: {step}: done")

        machine = Machine(rollout, actions, state.save, forks=access.forks, tell=tell, stopped=stopped)
        try:
            if abort:
                machine.abort()
            else:
                machine.go_on()
        except BaseException:
            # Ctrl-C, a full disk, a bug: hosts are where it was.
            reporter.hint("`v100ctl rollout --resume` goes on from here, `v100ctl rollout --abort` leads back")
            raise
        rest = [name for name, host in rollout.hosts.items() if host.phase in AT_REST and name in every]
        claims.let_go(rollout, rest, way, forks=access.forks)
        state.forget_old()
    return rollout


def _claim(rollout: Rollout, fleet: Fleet, way: claims.Way, forks: int, *, new: bool) -> None:
    """Keep other controllers off. What was begun goes on holding its hosts also where it cannot go on now."""
    ended = {found.id for found in state.load_all() if not found.unfinished}
    try:
        claims.claim(rollout, list(fleet.hosts), way, ended=ended, forks=forks)
    except RolloutError:
        if new:
            claims.let_go(rollout, list(fleet.hosts), way, forks=forks)
            state.forget(rollout)
        raise


def _needed(rollout: Rollout, fleet: Fleet, *, abort: bool) -> dict[str, FleetHost]:
    """The hosts with which something is left to do. What is done, or not to be begun any more, may have left the inventory."""
    settled = AT_REST if abort else AT_REST - {"waiting"}
    needed = [name for name, host in rollout.held.items() if host.phase not in settled]
    missing = sorted(set(needed) - set(fleet.hosts))
    if missing:
        raise RolloutError(
            f"the rollout has {', '.join(missing)}, which the inventory or `--limit` leaves out",
            hint="name the inventory that it was begun with",
        )
    return {name: fleet.hosts[name] for name in needed}


def _refuse_unfinished(addresses: Iterable[str]) -> None:
    left = state.unfinished(addresses)
    if left is None:
        return
    began = f"a rollout over these hosts was not ended: {left.owner} began it {state.age(left.started)} ago"
    if left.status == "running":
        raise RolloutError(began, hint="`v100ctl rollout --resume` goes on with it, `v100ctl rollout --abort` leads back")
    raise RolloutError(
        f"{began}, and it has lost {', '.join(left.held)}",
        hint="once that is there again `v100ctl rollout --resume` leads it back; until then "
        f"`--limit '{':'.join(['all', *(f'!{name}' for name in left.held)])}'` leaves it out",
    )


def _refuse_documents(fleet: Fleet) -> None:
    if fleet.document is not None:
        raise RolloutError("a rollout needs an inventory", hint="name one with `-i`")


def _problem(found: Examined) -> str:
    if found.error is not None:
        return f"{found.host.name}: {found.error.message.removeprefix(f'{found.host.name}: ')}"
    if found.plan is not None and found.plan.verdict == "refused":
        refusals = [describe(rule) for rule in found.plan.rules if rule.severity == "refuse"]
        return f"{found.host.name}: {'; '.join(refusals)}"
    if _changes_driver(found):
        reboot = found.host.config.nvidia_driver_reboot
        if reboot != "auto":
            return (
                f"{found.host.name}: its driver changes, which may need a reboot, and `nvidia_driver_reboot` is `{reboot}`; "
                "`auto` lets a rollout do it"
            )
        if found.host.config.gateway_placement == "fleet":
            return (
                f"{found.host.name}: its driver changes, and a reboot would take the gateway of the whole fleet away; "
                f"`v100ctl provision --limit {found.host.name}` does it when nobody asks"
            )
        if found.connection is not None and found.connection.kind == "local":
            return f"{found.host.name}: its driver changes, and a reboot of the controller itself would end the rollout"
    return ""


#: What the role mends beside servers that run.
_DISTURB_NOBODY = ("driver.unheld", "driver.file-unwanted:")


def _changes_driver(found: Examined) -> bool:
    """Whether servers have to stop for another driver."""
    if not (found.plan and found.plan.driver and found.plan.driver.serving):
        return False
    findings = [finding for finding in found.changes if finding.role == "nvidia_driver" and fixable(finding)]
    return any(
        finding.restarts or (finding.layer == "driver" and not finding.id.startswith(_DISTURB_NOBODY)) for finding in findings
    )


def _address(found: Examined) -> str:
    return lock_path(found.host, found.connection).name


def _serves(found: Examined) -> list[str]:
    """Its instances that run now."""
    if found.plan is None or found.facts is None:
        return []
    return sorted(item.name for item in found.plan.instances if found.facts.process_of(item.unit) is not None)


def _host_state(found: Examined, address: str) -> HostState:
    roles, serves = roles_that_mend(found.changes), _serves(found)
    return HostState(
        name=found.host.name,
        address=address,
        wanted=_wanted(found),
        changes=[finding.id for finding in found.changes],
        roles=list(roles),
        restarts=list(found.restarts),
        starts=sorted({item.name for item in found.plan.instances} - set(serves)) if found.plan else [],
        serves=serves,
        reboots=_changes_driver(found),
    )


def _wanted(found: Examined) -> str:
    content = found.plan.host_json.content if found.plan is not None and found.plan.host_json is not None else ""
    return hashlib.sha256(content.encode()).hexdigest()[:16]


#: Phases of hosts that get what is planned when a rollout is gone on with.
_TO_GET_IT: frozenset[Phase] = frozenset({"waiting", "draining", "applying", "proving", "opening", "settling"})


def _refuse_another_plan(rollout: Rollout, fleet: Fleet, access: Access, as_of: date) -> None:
    """What was begun with one plan must not end with another."""
    # Those that are to get it, also where that was begun. Another driver tells other cards, and so makes another plan.
    to_get_it: Sequence[str] = [
        name for name, host in rollout.hosts.items() if host.phase in _TO_GET_IT and not host.problem and not host.reboots
    ]
    examined = examine([fleet.hosts[name] for name in to_get_it], access, as_of=as_of) if to_get_it else {}
    other = [name for name, found in examined.items() if found.error is None and _wanted(found) != rollout.hosts[name].wanted]
    if other:
        raise RolloutError(
            f"the inventory no longer wants for {', '.join(other)} what the rollout was begun with",
            hint="`v100ctl rollout --abort` ends it; then `v100ctl rollout` begins one with what is wanted now",
        )
