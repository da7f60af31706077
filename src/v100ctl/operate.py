"""Instances by hand: what runs where, and one of them stopped, started or restarted without cutting a request."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from v100ctl.access import DEFAULT_DRAIN_LIMIT_S
from v100ctl.apply import Reporter
from v100ctl.errors import EXIT_DIFFERENCES, EXIT_ERROR, EXIT_OK, UnreachableError, V100ctlError
from v100ctl.examine import Examined
from v100ctl.facts import Facts
from v100ctl.fronts import Fronts
from v100ctl.paths import content_dir
from v100ctl.plan import gateway
from v100ctl.plan.units import START_TIMEOUT_S, unit_name
from v100ctl.probe import open_session
from v100ctl.probe.session import Result, Session

STATUS_SCHEMA = "v100ctl/status/1"
#: What is asked of systemd returns by then: a unit's own time limits are shorter.
_SYSTEMCTL_TIMEOUT_S = 300.0
_POLL_S = 2.0
#: As `gateway_control.py` ends: at the limit; without a program, without a gateway, without that instance in it.
_RC_LIMIT = 3
_RC_NO_GATEWAY = (2, 4, 5)

State = Literal["serving", "loading", "unhealthy", "starting", "stopping", "stopped", "failed", "absent"]
Action = Literal["start", "stop", "restart"]


@dataclass(frozen=True)
class InstanceStatus:
    """One instance as it is on its host.

    ``address`` is where clients reach it, ``gateway`` the gateway's word for it (``UP``, ``DRAIN``; ``None`` without a gateway),
    ``uptime_s`` how long its process has run, ``planned`` whether the inventory still has it.
    """

    state: State
    unit: str
    planned: bool
    engine: str = ""
    model: str = ""
    address: str = ""
    gpus: tuple[str, ...] = ()
    pid: int | None = None
    uptime_s: float | None = None
    restarts_count: int = 0
    health_status: int | None = None
    gateway: str | None = None
    requests_running: int | None = None


@dataclass(frozen=True)
class HostStatus:
    """One host: its instances, or why it could not be asked."""

    status: Literal["ok", "unreachable", "error"]
    instances: Mapping[str, InstanceStatus] = field(default_factory=dict)
    error: str = ""


def status_of(state: Examined) -> HostStatus:
    """What runs on a host that was looked at. An instance is known by the inventory, by the last applied plan or by its unit."""
    if state.error is not None or state.facts is None:
        problem = "unreachable" if isinstance(state.error, UnreachableError) else "error"
        return HostStatus("unreachable" if problem == "unreachable" else "error", {}, state.error.message if state.error else "")
    facts = state.facts
    applied = _applied(facts)
    specs = {name: spec for name, spec in state.host.config.llm_server_instances.items() if spec.state == "present"}
    units = {name.removeprefix("v100-").removesuffix(".service") for name in facts.units if name.startswith("v100-")}
    names = sorted({*specs, *applied, *units})
    return HostStatus("ok", {name: _instance(name, state, facts, applied.get(name, {}), planned=name in specs) for name in names})


def _applied(facts: Facts) -> dict[str, Mapping[str, Any]]:
    found = (facts.host_json.document or {}).get("instances")
    if not isinstance(found, Mapping):
        return {}
    return {str(name): value for name, value in found.items() if isinstance(value, Mapping)}


def _mapping(value: object) -> Mapping[str, Any]:
    """A part of the host's record that is a mapping; a damaged one is as good as none."""
    return value if isinstance(value, Mapping) else {}


def _instance(name: str, state: Examined, facts: Facts, applied: Mapping[str, Any], *, planned: bool) -> InstanceStatus:
    unit = unit_name(name)
    process = facts.process_of(unit)
    health = facts.health.get(name)
    found = facts.units.get(unit)
    spec = state.host.config.llm_server_instances.get(name)
    front = _mapping(_mapping(_mapping((facts.host_json.document or {}).get("gateway")).get("fronts")).get(name))
    server = facts.gateway.servers.get(name) if facts.gateway else None
    address = str(front.get("bind") or f"{applied.get('listen', '')}:{applied.get('port', '')}") if applied else ""
    if not address and spec is not None:
        address = f"{spec.listen}:{spec.port}"
    now: State
    if found is None or found.load_state in ("", "not-found"):
        now = "absent"
    elif found.active_state == "active":
        # Nobody knows where one that the inventory has dropped says that it is well.
        well = health is None or health.status == 200
        now = "serving" if well else "loading" if health and health.status in (None, 503) else "unhealthy"
    else:
        known: Mapping[str, State] = {"activating": "starting", "deactivating": "stopping", "failed": "failed"}
        now = known.get(found.active_state, "stopped")
    gpus = applied.get("gpus", [])
    return InstanceStatus(
        state=now,
        unit=unit,
        planned=planned,
        engine=str(applied.get("engine") or (spec.engine if spec else "")),
        model=str(applied.get("model_path") or (spec.model.file_name if spec else "")).rsplit("/", 1)[-1],
        address=address,
        gpus=tuple(map(str, gpus)) if isinstance(gpus, list) else (),
        pid=process.pid if process else None,
        uptime_s=round(max(facts.now_s - process.started_s, 0.0), 1) if process and process.started_s else None,
        restarts_count=found.restarts_count if found else 0,
        health_status=health.status if health else None,
        gateway=server.status if server else None,
        requests_running=server.requests_running if server else None,
    )


def status_document(hosts: Mapping[str, HostStatus]) -> dict[str, Any]:
    """All hosts as the document ``v100ctl/status/1``."""
    document: dict[str, Any] = {}
    for name, host in hosts.items():
        instances = {key: {**vars(item), "gpus": list(item.gpus)} for key, item in host.instances.items()}
        document[name] = {"status": host.status, "error": host.error or None, "instances": instances}
    return {"schema": STATUS_SCHEMA, "hosts": document}


def status_exit_code(hosts: Mapping[str, HostStatus]) -> int:
    """1 where a host could not be asked, 2 where an instance of the inventory does not serve, else 0."""
    if any(host.status != "ok" for host in hosts.values()):
        return EXIT_ERROR
    silent = any(item.planned and item.state != "serving" for host in hosts.values() for item in host.instances.values())
    return EXIT_DIFFERENCES if silent else EXIT_OK


def operate(
    state: Examined,
    name: str,
    action: Action,
    *,
    reporter: Reporter,
    drain_limit_s: float = DEFAULT_DRAIN_LIMIT_S,
    force: bool = False,
    fronts: Fronts | None = None,
) -> str:
    """Start, stop or restart one instance; behind a gateway its running requests end first.

    Args:
        state: Its host, as it was looked at.
        name: The instance.
        action: What to do.
        reporter: Where progress goes.
        drain_limit_s: How long running requests may take to end.
        force: Cut those that still run then.
        fronts: The gateways of the fleet, which send requests elsewhere meanwhile.

    Returns:
        What was done, in words.

    Raises:
        V100ctlError: the host cannot be asked, has no such unit, requests still ran at the limit, or it did not come up.
    """
    if state.error is not None:
        raise state.error
    if state.facts is None or state.connection is None:
        raise V100ctlError(f"{state.host.name} cannot be reached")
    place, unit = f"{state.host.name}/{name}", unit_name(name)
    found = state.facts.units.get(unit)
    if found is None or found.load_state in ("", "not-found"):
        raise V100ctlError(f"{place} is not on its host yet", hint=f"`v100ctl provision {state.host.name}` brings it there")
    active = found.active_state not in ("inactive", "failed")
    if action == "start" and found.active_state == "active":
        return f"{place} runs already"
    if action == "stop" and not active:
        return f"{place} does not run"
    stops = action != "start" and active
    with open_session(state.connection) as session, _elsewhere(fronts, state.host.name, name, drain_limit_s, force, stops=stops):
        if stops:
            with reporter.phase(f"{place}: waiting for running requests"):
                drain(session, place, name, drain_limit_s, force=force)
        if action == "stop":
            with reporter.phase(f"{place}: stopping"):
                _systemctl(session, place, "stop", unit)
            return f"{place} is stopped; a boot, `v100ctl start {place}` or `v100ctl provision` starts it again"
        with reporter.phase(f"{place}: starting"):
            # Starts that failed before count against the unit's limit.
            session.run(["systemctl", "reset-failed", unit], become=True)
            _systemctl(session, place, action, unit)
        with reporter.phase(f"{place}: waiting until it is healthy"):
            await_healthy(session, state, place, name)
        call_gateway(session, "open", name, 60.0)
    return f"{place} serves"


@contextlib.contextmanager
def _elsewhere(fronts: Fronts | None, host: str, name: str, drain_limit_s: float, force: bool, *, stops: bool) -> Iterator[None]:
    """The fleet's gateways are told. They see for themselves what does not run, so it is let in again however this ends."""
    if fronts is None:
        yield
        return
    try:
        if stops:
            try:
                fronts.drain(host, drain_limit_s, name)
            except V100ctlError:
                if not force:
                    raise
        yield
    finally:
        with contextlib.suppress(V100ctlError):
            fronts.open(host, name, limit_s=0.0)


def _systemctl(session: Session, place: str, verb: str, unit: str) -> None:
    done = session.run(["systemctl", verb, unit], become=True, timeout_s=_SYSTEMCTL_TIMEOUT_S)
    if done.rc != 0:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        raise V100ctlError(
            f"{place}: `systemctl {verb} {unit}` failed: {said[0] if said else f'exit code {done.rc}'}",
            hint=f"`v100ctl logs {place}` says why",
        )


def call_gateway(session: Session, verb: str, name: str, limit_s: float) -> Result:
    """One call of the host's gateway program about an instance."""
    argv = ["python3", "-I", "-S", "-B", gateway.PROGRAM, verb, name, "--limit-s", str(limit_s)]
    return session.run(argv, become=True, timeout_s=limit_s + 60)


def drain(session: Session, place: str, name: str, limit_s: float, *, force: bool) -> None:
    """Wait until the gateway has no request of an instance left; new ones wait there. Without a gateway there is nothing to do.

    Raises:
        V100ctlError: some still ran at the limit and ``force`` is not set (it is open again then), or the gateway fails.
    """
    done = call_gateway(session, "drain", name, limit_s)
    if done.rc == _RC_LIMIT and not force:
        running = json.loads(done.stdout).get("running", "some")
        call_gateway(session, "open", name, 60.0)
        raise V100ctlError(
            f"{place}: {running} requests still ran after {limit_s:g} s, so it was left as it is",
            hint="a longer `--drain-limit`, or `--force` to cut them",
        )
    if done.rc not in (0, _RC_LIMIT, *_RC_NO_GATEWAY):
        raise V100ctlError(f"{place}: the gateway does not let it go: {done.stderr.decode(errors='replace').strip()}")


def await_healthy(session: Session, state: Examined, place: str, name: str) -> None:
    """Until its unit is active and its health path answers, as the role `llm_server` waits."""
    planned = next((item for item in state.plan.instances if item.name == name), None) if state.plan else None
    applied = _applied(state.facts).get(name, {}) if state.facts else {}
    url = str(applied.get("health_url") or (planned.health_url if planned else ""))
    keys = str(applied.get("api_keys_file") or "")
    if not url:
        return
    script = (content_dir() / "roles/llm_server/files/readiness.py").read_bytes()
    argv = ["python3", "-", "--unit", unit_name(name), "--url", url, "--keys-file", keys]
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while True:
        done = session.run(argv, stdin=script, become=True)
        if done.rc != 0:
            raise V100ctlError(f"{place}: nobody can tell whether it is ready: {done.stderr.decode(errors='replace').strip()}")
        answer: dict[str, Any] = json.loads(done.stdout)
        if answer["state"] == "done":
            return
        if answer["state"] == "failed" or time.monotonic() >= deadline_s:
            raise V100ctlError(f"{place} did not come up: {answer['message']}", hint=f"`v100ctl logs {place}` says why")
        time.sleep(_POLL_S)
