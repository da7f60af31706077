"""Make hosts as planned, and prove it: probe, plan, roles, probe again, one real completion."""

from __future__ import annotations

import contextlib
import hashlib
import json
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path
from typing import Any, Literal

from v100ctl.access import Access
from v100ctl.apply import ApplyResult, Reporter, run_playbook
from v100ctl.apply import Secrets as AnsibleSecrets
from v100ctl.errors import EXIT_DIFFERENCES, EXIT_ERROR, EXIT_OK, V100ctlError
from v100ctl.examine import Examined, examine
from v100ctl.findings import Finding
from v100ctl.fleet import Fleet, FleetHost
from v100ctl.locks import exclusive
from v100ctl.paths import state_dir
from v100ctl.plan.adoption import ADOPTED
from v100ctl.plan.keys import first_keys
from v100ctl.plan.types import describe, plain_data
from v100ctl.probe import HostKeyQuestion, PythonMissingError, install_python, open_session
from v100ctl.probe.connection import ConfirmHostKey, Connection
from v100ctl.serving import PROOF_MAX_TOKENS, PROOF_PROMPT, PROOF_TIMEOUT_S, Completion, ask

HostStatus = Literal["unchanged", "changed", "would-change", "refused", "unreachable", "failed"]
#: Asked before something that the user did not name is done; returns whether it may be.
Confirm = Callable[[str], bool]


@dataclass(frozen=True)
class HostResult:
    """How one host ended. ``proofs`` holds one answer for each instance that serves."""

    status: HostStatus
    examined: Examined
    message: str = ""
    hint: str | None = None
    proofs: Mapping[str, Completion] = field(default_factory=dict)
    #: The roles that ran where not all of them were to; empty else.
    roles: tuple[str, ...] = ()
    #: Servers of others that this run has stopped, as the host has recorded it: with what brings each back.
    adopted: tuple[Mapping[str, Any], ...] = ()


def fixable(finding: Finding) -> bool:
    """Whether running its role mends it. Nobody else's things are touched, and a role waits for a server that hangs."""
    return finding.kind != "external" and finding.layer != "service"


def roles_that_mend(findings: Sequence[Finding]) -> tuple[str, ...]:
    """The roles that mend these findings: those that they name, and the one that starts servers anew where that is needed."""
    wanted = [finding for finding in findings if fixable(finding)]
    restarting = {"llm_server"} if any(finding.restarts for finding in wanted) else set()
    return tuple(sorted({finding.role for finding in wanted} | restarting))


@dataclass(frozen=True)
class ProvisionResult:
    """How all hosts ended. ``log_path`` is Ansible's full output, ``None`` where Ansible did not run."""

    hosts: Mapping[str, HostResult]
    log_path: Path | None = None

    @property
    def exit_code(self) -> int:
        """1 before 2 before 0, over all hosts."""
        statuses = {result.status for result in self.hosts.values()}
        if statuses & {"refused", "unreachable", "failed"}:
            return EXIT_ERROR
        return EXIT_DIFFERENCES if "would-change" in statuses else EXIT_OK


def provision(
    fleet: Fleet,
    *,
    access: Access,
    reporter: Reporter,
    as_of: date,
    check: bool = False,
    force: bool = False,
    confirm: Confirm = lambda question: False,
    verbosity: int = 0,
    named_roles: bool = False,
    more_roles: Mapping[str, Sequence[str]] = types.MappingProxyType({}),
    deep: bool = False,
    many_restarts: bool = False,
    variables: Mapping[str, Any] | None = None,
) -> ProvisionResult:
    """Bring every host of ``fleet`` to its plan.

    A host that is as planned already is only asked for its proof; Ansible does not run for it unless ``force``.

    Args:
        fleet: The hosts.
        access: How they are reached.
        reporter: Where progress goes.
        as_of: Today, for the plan.
        check: Change nothing; say what would change.
        force: Run the roles even where nothing differs.
        confirm: Asked before Python is installed on a host that has none.
        verbosity: Ansible's ``-v`` count.
        named_roles: Run only the roles that the differences name.
        more_roles: And these, by host, for what no difference tells.
        deep: Hash releases and models, before and after, instead of trusting size and time.
        many_restarts: Servers of several hosts may restart at once: somebody else sees to it that others serve.
        variables: More for Ansible, without secrets.

    Raises:
        V100ctlError: more than one serving host would be restarted at once, or what the controller has to fetch cannot be had.
    """
    access = replace(access, confirm_host_key=_confirm_host_key(access, reporter))
    with reporter.phase(f"probing {_count(len(fleet.hosts), 'host')}"):
        examined = _examine(list(fleet.hosts.values()), access, as_of, reporter, confirm, check=check, deep=deep)
    results: dict[str, HostResult] = {}
    to_apply: list[str] = []
    for name, state in examined.items():
        early = _early_result(state)
        if early is not None:
            results[name] = early
            _report_failure(reporter, name, early)
        elif state.changes or force or more_roles.get(name):
            to_apply.append(name)
        else:
            results[name] = HostResult("unchanged", state)
        if early is None:
            _announce(reporter, state)
    try:
        if not many_restarts:
            _refuse_many_restarts({name: examined[name] for name in to_apply})
    except V100ctlError as error:
        if not check:
            raise
        # Nothing is restarted now, and what would change is what was asked.
        reporter.warning(f"{error.message}; {error.hint}")

    log_path: Path | None = None
    roles = {name: tuple(sorted({*roles_that_mend(examined[name].changes), *more_roles.get(name, ())})) for name in to_apply}
    if to_apply:
        if not check:
            fetch([examined[name] for name in to_apply], reporter)
        # ansible-playbook stays the one way in which a host is changed, so `--check` shows Ansible's own view too.
        with alone_on([examined[name] for name in to_apply], reporter):
            applied = run_playbook(
                "provision",
                fleet.sources if fleet.document is None else fleet.document,
                to_apply,
                check=check,
                passwords=AnsibleSecrets(
                    connection_password=access.secrets.connection_password,
                    become_password=access.secrets.become_password,
                    vault_password=fleet.vault_password,
                ),
                vault_arguments=fleet.vault_arguments,
                reporter=reporter,
                verbosity=verbosity,
                forks=access.forks,
                # The plan of this very run: a run over midnight must not decide anew in the middle.
                extra_vars={
                    "v100ctl_as_of": as_of.isoformat(),
                    **({"v100ctl_roles": roles} if named_roles else {}),
                    **({"v100ctl_deep": True} if deep else {}),
                    **(variables or {}),
                },
            )
        log_path = applied.log_path
        results |= _after_apply(fleet, to_apply, examined, applied, access, reporter, as_of, check=check, deep=deep)
        if named_roles:
            results |= {name: replace(results[name], roles=roles[name]) for name in to_apply}
    if not check:
        for name, result in list(results.items()):
            if result.status in ("unchanged", "changed"):
                results[name] = _prove(name, result, reporter)
    return ProvisionResult({name: results[name] for name in fleet.hosts}, log_path)


def _confirm_host_key(access: Access, reporter: Reporter) -> ConfirmHostKey:
    """Asks as ``access`` would, with the live display out of the way."""
    from v100ctl.probe.ssh import confirm_on_terminal

    ask_person = access.confirm_host_key or confirm_on_terminal

    def confirm(question: HostKeyQuestion) -> bool:
        with reporter.suspended():
            return ask_person(question)

    return confirm


@contextlib.contextmanager
def alone_on(states: Sequence[Examined], reporter: Reporter) -> Iterator[None]:
    """Keeps another v100ctl of this account from changing the same hosts at the same time."""
    with contextlib.ExitStack() as held:
        # In one order for everybody: two runs over overlapping hosts must not wait for each other.
        for state in sorted(states, key=_lock_name):

            def waiting(name: str = state.host.name) -> None:
                reporter.note(f"another v100ctl is provisioning {name}; waiting for it")

            held.enter_context(exclusive(lock_path(state.host, state.connection), waiting))
        yield


def _lock_name(state: Examined) -> str:
    return lock_path(state.host, state.connection).name


def lock_path(host: FleetHost, connection: Connection | None) -> Path:
    """The lock file of a host, named by where the host is and not by what an inventory calls it."""
    where = f"{connection.address}:{connection.port}" if connection and connection.kind == "ssh" else host.name
    return state_dir() / "locks" / hashlib.sha256(where.encode()).hexdigest()[:24]


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _examine(
    hosts: Sequence[FleetHost],
    access: Access,
    as_of: date,
    reporter: Reporter,
    confirm: Confirm,
    *,
    check: bool,
    deep: bool,
) -> dict[str, Examined]:
    examined = examine(hosts, access, as_of=as_of, deep=deep)
    without_python = [name for name, state in examined.items() if isinstance(state.error, PythonMissingError)]
    for name in without_python:
        state = examined[name]
        if check or state.connection is None:
            continue
        with reporter.suspended():
            allowed = confirm(f"{name} has no Python, which Ansible needs there. Install it?")
        if not allowed:
            continue
        try:
            with reporter.phase(f"{name}: installing Python"), open_session(state.connection) as session:
                install_python(session)
        except V100ctlError as error:
            examined[name] = replace(state, error=error)
        else:
            examined |= examine([state.host], access, as_of=as_of, deep=deep)
    return examined


def _early_result(state: Examined) -> HostResult | None:
    """The result of a host that cannot be provisioned at all."""
    if state.error is not None:
        return HostResult("unreachable", state, state.error.message, state.error.hint)
    if state.plan is not None and state.plan.verdict == "refused":
        refusals = [describe(rule) for rule in state.plan.rules if rule.severity == "refuse"]
        return HostResult("refused", state, "\n".join(["refused, and nothing was changed", *refusals]))
    return None


def _report_failure(reporter: Reporter, name: str, result: HostResult) -> None:
    # Errors about a connection name their host already.
    reporter.failure(name, "", result.message.removeprefix(f"{name}: "), result.hint)


def _announce(reporter: Reporter, state: Examined) -> None:
    if state.plan is not None:
        for rule in state.plan.rules:
            if rule.severity == "warn":
                reporter.warning(f"{state.host.name}: {describe(rule)}")
    for finding in state.findings:
        if finding.kind == "external":
            reporter.warning(f"{state.host.name}: {finding.id}: {finding.actual}; {finding.fix}")


def _refuse_many_restarts(states: Mapping[str, Examined]) -> None:
    serving = [name for name, state in states.items() if state.restarts]
    if len(serving) > 1:
        raise V100ctlError(
            f"this would restart servers on {len(serving)} hosts at once: {', '.join(serving)}",
            hint="`v100ctl rollout` does that host by host while the others go on serving; `--limit HOST` is one of them",
        )


def fetch(states: Sequence[Examined], reporter: Reporter) -> None:
    """Fetch what comes through the controller before any host is touched: a failure here leaves every host as it was."""
    from v100ctl.artifacts import Cache, fetch_engine, fetch_model, fetch_source
    from v100ctl.compare import model_file_problem

    models = {}
    builds = {}
    engines = {}
    for state in states:
        if state.plan is None or state.facts is None:
            continue
        for model in state.plan.models:
            for file in model.files:
                if file.source["kind"] in ("controller", "pypi") and model_file_problem(file, state.facts) is not None:
                    models[file.sha256] = file
        for release in state.plan.releases:
            on_host = state.facts.release(release.path)
            if on_host is not None and not on_host.problem:
                continue
            if release.engine == "llama_cpp":
                builds[release.build_id] = release
            elif release.engine == "external" and release.build["source"]["kind"] != "host":
                engines[release.build_id] = release

    def progress(done_bytes: int, total_bytes: int | None, label: str) -> None:
        reporter.host_progress("", label, done_bytes, total_bytes, "bytes")

    cache = Cache()
    wanted_builds = [release for release in builds.values() if cache.find_release(release.build_id, reporter.note) is None]
    if not models and not wanted_builds and not engines:
        return
    with reporter.phase("fetching what the hosts need"):
        for release in engines.values():
            fetch_engine(release.build, progress, note=reporter.note)
        for file in models.values():
            fetch_model(plain_data(file), progress, note=reporter.note)
        for release in wanted_builds:
            fetch_source(release.build, progress, note=reporter.note)
        reporter.host_idle("")


def _after_apply(
    fleet: Fleet,
    names: Sequence[str],
    before: Mapping[str, Examined],
    applied: ApplyResult,
    access: Access,
    reporter: Reporter,
    as_of: date,
    *,
    check: bool,
    deep: bool,
) -> dict[str, HostResult]:
    failures = {failure.host: failure for failure in applied.failures}
    unreachable = {name for name in names if name not in applied.hosts or applied.hosts[name].status == "unreachable"}
    results: dict[str, HostResult] = {}
    good: list[str] = []
    for name in names:
        failure = failures.get(name)
        if failure is not None or name in unreachable:
            message = f"{failure.task}: {failure.message}" if failure else "Ansible did not reach this host"
            hint = failure.hint if failure else None
            results[name] = HostResult("unreachable" if name in unreachable else "failed", before[name], message, hint)
            if failure is None:
                _report_failure(reporter, name, results[name])
        elif check:
            results[name] = HostResult("would-change" if before[name].changes else "unchanged", before[name])
        else:
            good.append(name)
    # What was stopped before something failed has to be known all the same.
    stopped = [name for name in results if not check and (plan := before[name].plan) is not None and plan.adoptions]
    if good or stopped:
        with reporter.phase("probing again"):
            after = examine([fleet.hosts[name] for name in (*good, *stopped)], access, as_of=as_of, deep=deep)
        for name in good:
            results[name] = _verdict_after(name, after[name], reporter, changed=applied.hosts[name].changed > 0)
        for name in (*good, *stopped):
            results[name] = replace(results[name], adopted=adopted_since(before[name], after[name]))
    return results


def _verdict_after(name: str, state: Examined, reporter: Reporter, *, changed: bool) -> HostResult:
    if state.error is not None:
        result = HostResult("unreachable", state, state.error.message, state.error.hint)
    elif findings := [finding for finding in state.changes if finding.severity != "info"]:
        left = "; ".join(f"{finding.id}: {finding.actual}" for finding in findings[:5])
        result = HostResult(
            "failed", state, f"the roles ran, but the host still differs from its plan: {left}", "run it again with `-v`"
        )
    else:
        return HostResult("changed" if changed else "unchanged", state)
    _report_failure(reporter, name, result)
    return result


def adopted_since(before: Examined, after: Examined) -> tuple[Mapping[str, Any], ...]:
    """What a host's record of adopted servers has that it had not before."""
    known = _adopted(before)
    return tuple(entry for entry in _adopted(after) if entry not in known)


def _adopted(state: Examined) -> list[Mapping[str, Any]]:
    found = state.facts.files.get(ADOPTED) if state.facts else None
    try:
        document = json.loads(found.content or "") if found else {}
    except ValueError:
        return []
    entries = document.get("adopted") if isinstance(document, dict) else None
    return [entry for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []


def adopting(fleet: Fleet, instances: Sequence[tuple[str, str]]) -> tuple[Fleet, Mapping[str, Any]]:
    """The fleet whose named instances (host, name) take the place of what is there, and the same as a variable for Ansible."""
    if not instances:
        return fleet, {}
    named = [f"{host}/{name}" for host, name in instances]
    named += [
        entry if "/" in entry else f"{host.name}/{entry}"
        for host in fleet.hosts.values()
        for entry in host.config.llm_server_adopt
    ]
    adopt = tuple(dict.fromkeys(named))
    hosts = {
        name: replace(host, config=host.config.model_copy(update={"llm_server_adopt": adopt}))
        for name, host in fleet.hosts.items()
    }
    return replace(fleet, hosts=hosts), {"llm_server_adopt": list(adopt)}


def _prove(name: str, result: HostResult, reporter: Reporter) -> HostResult:
    """One real completion from each instance, through SSH to the server's own port."""
    plan, connection = result.examined.plan, result.examined.connection
    if plan is None or connection is None or not plan.instances:
        return result
    proofs: dict[str, Completion] = {}
    try:
        with (
            reporter.phase(f"{name}: asking {', '.join(item.name for item in plan.instances)}"),
            open_session(connection) as session,
        ):
            keys = first_keys(plan)
            for instance in plan.instances:
                proofs[instance.name] = ask(
                    session,
                    plain_data(instance),
                    PROOF_PROMPT,
                    max_tokens=PROOF_MAX_TOKENS,
                    timeout_s=PROOF_TIMEOUT_S,
                    api_key=keys.get(instance.name),
                )
    except V100ctlError as error:
        failed = HostResult("failed", result.examined, error.message, error.hint, proofs, result.roles, result.adopted)
        _report_failure(reporter, name, failed)
        return failed
    return HostResult(result.status, result.examined, proofs=proofs, roles=result.roles, adopted=result.adopted)
