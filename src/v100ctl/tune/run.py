"""Tune an instance of a host from end to end: what is tried, the trials there, and the live settings again."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

from v100ctl import __version__
from v100ctl.access import DEFAULT_DRAIN_LIMIT_S
from v100ctl.apply import Reporter
from v100ctl.bench.history import folder_name
from v100ctl.bench.report import Target
from v100ctl.bench.run import on_host, target_of
from v100ctl.errors import V100ctlError
from v100ctl.examine import Examined, known_headers
from v100ctl.operate import await_healthy, call_gateway, drain
from v100ctl.paths import state_dir
from v100ctl.plan.types import Instance
from v100ctl.probe import open_session
from v100ctl.tune import objectives
from v100ctl.tune.objectives import QUALITY_LIMIT_NATS, Name, Workload
from v100ctl.tune.planned import Planned
from v100ctl.tune.remote import DEFAULT_LEASE_S, Host, HostRig, TuneError, heartbeat
from v100ctl.tune.report import document
from v100ctl.tune.search import CONTEXTS, Candidate, LiveFailed, Result, Schedule, Search, schedule_for
from v100ctl.tune.space import Space
from v100ctl.tune.trials import Log, Trials, plan_of

#: What a model's weights come from disk or page cache with, for an estimate; the log has the truth afterwards.
LOAD_BYTES_PER_S = 1e9
START_S = 10.0
#: For an estimate where nothing is known of the speed: of one stream, and how much faster a prompt is read.
DECODE_TPS, PREFILL_FACTOR = 30.0, 10.0
#: What of the memory bandwidth's ceiling engines reach.
CEILING_SHARE = 0.6
GATEWAY_LIMIT_S = 60.0


@dataclass(frozen=True)
class Options:
    """How an instance is tuned.

    Attributes:
        objective: What for.
        dimensions: ``NAME`` or ``NAME=VALUE,VALUE`` each; none: those of the objective.
        budget_s: No trial begins after so long.
        streams: Requests at once, for the objectives that count all of them; ``None``: the most that is tried of ``parallel``.
        keep: For ``context``: the share of the live settings' speed that a longer one has to keep.
        quality_limit_nats: See :data:`v100ctl.tune.objectives.QUALITY_LIMIT_NATS`.
        allow_power: Whether power limits may be set.
        lease_s: See :data:`v100ctl.tune.remote.DEFAULT_LEASE_S`.
        drain_limit_s: How long running requests may take to end.
        force: Cut those that still run then.
        yes: Whether it was said that others who use the server may be kept waiting.
        fresh: Do not go on from an earlier search.
    """

    objective: Name = "latency"
    dimensions: tuple[str, ...] = ()
    budget_s: float = 1800.0
    streams: int | None = None
    keep: float = 0.9
    quality_limit_nats: float = QUALITY_LIMIT_NATS
    allow_power: bool = False
    lease_s: float = DEFAULT_LEASE_S
    drain_limit_s: float = DEFAULT_DRAIN_LIMIT_S
    force: bool = False
    yes: bool = False
    fresh: bool = False


@dataclass
class Prepared:
    """What will be done, before anything is."""

    state: Examined
    name: str
    options: Options
    planned: Planned
    target: Target
    space: Space
    singles: list[Candidate]
    work: Workload
    trial_s: float
    schedule: Schedule

    @property
    def trials(self) -> int:
        """About how many."""
        if self.options.objective == "context":
            return min(len(self.singles), CONTEXTS) * (3 + 2 * max(self.schedule.pairs, 6))
        return self.schedule.trials(len(self.singles))

    @property
    def expected_s(self) -> float:
        """About how long; no trial begins after the budget."""
        return min(self.trials * self.trial_s, self.options.budget_s + self.trial_s)

    def to_json(self) -> dict[str, Any]:
        """The plan of a search, as it is shown before it."""
        return {
            "schema": "v100ctl/tune-plan/1",
            "host": self.state.host.name,
            "instance": self.name,
            "objective": self.options.objective,
            "work": self.work.to_json(),
            "candidates": [item.id for item in self.singles],
            "excluded": [item.to_json() for item in self.space.excluded],
            "schedule": dataclasses.asdict(self.schedule),
            "trials": self.trials,
            "trial_s": round(self.trial_s),
            "expected_s": round(self.expected_s),
        }


def prepare(state: Examined, name: str, options: Options, as_of: date) -> Prepared:
    """Decide what is tried; asks nobody.

    Raises:
        V100ctlError: the instance does not run as the inventory says, or there is nothing to try.
    """
    target = target_of(state, name)
    headers = known_headers([state.host])[state.host.name]
    planned = Planned(state, name, headers=headers, as_of=as_of)
    if options.objective == "energy" and not target.cards:
        raise TuneError(f"{target.host}/{name} has no card whose power could be measured", hint="another `--objective`")
    values = planned.values(options.objective, options.dimensions, allow_power=options.allow_power)
    if options.objective == "context" and not any(words.startswith("context_length=") for words in options.dimensions):
        values["context_length"] = _lengths(planned, values)
    if options.objective == "context" and not values["context_length"]:
        raise TuneError(
            f"{target.host}/{name}: no longer context fits, or nobody knows which does",
            hint="`--dimension context_length=N,N` names some; `v100ctl plan` shows the budget",
        )
    space = Space(values, planned.check)
    singles = _contexts(space, values) if options.objective == "context" else space.singles()
    if not singles:
        said = "; ".join(f"{item.candidate}: [{item.rule}] {item.reason}" for item in space.excluded)
        raise TuneError(f"{target.host}/{name}: nothing of it can be tried", hint=said or "name some with `--dimension`")
    parallel = max([target.parallel, *(planned.instance(item).parallel for item in singles)])
    work = Workload(streams=options.streams or parallel)
    trial_s = _trial_s(planned.live, state, options.objective, work, target)
    schedule = schedule_for(len(singles), options.budget_s / trial_s)
    prepared = Prepared(state, name, options, planned, target, space, singles, work, trial_s, schedule)
    # A search goes on with the schedule that it began with, whatever time it gets now.
    begun = None if options.fresh else plan_of(log_path(target.host, name, options.objective))
    if begun is not None and {**begun, "schedule": None} == {**_log_plan(prepared), "schedule": None}:
        prepared.schedule = Schedule(**begun["schedule"])
    return prepared


def _lengths(planned: Planned, values: Mapping[str, Sequence[str]]) -> list[str]:
    """Contexts beyond the one that is served now, up to the longest that fits with any of the cache types."""
    kinds: list[dict[str, str]] = [{}, *({"kv_cache_type": value} for value in values.get("kv_cache_type", ()))]
    fitting = [planned.instance(Candidate(kind)) for kind in kinds if not planned.check(kind).rule]
    most = max((item.largest_context_length or 0 for item in fitting), default=0) // 1024 * 1024
    now = planned.live.context_length
    step = max((most - now) // 8, 1024) // 1024 * 1024
    return [str(size) for size in range(most, now, -step)]


def _contexts(space: Space, values: Mapping[str, Sequence[str]]) -> list[Candidate]:
    """Longest first; each with the first cache type with which it fits."""
    found: list[Candidate] = []
    types: list[dict[str, str]] = [{}, *({"kv_cache_type": value} for value in values.get("kv_cache_type", ()))]
    for length in sorted(values["context_length"], key=int, reverse=True):
        sets = [{"context_length": length, **kind} for kind in types]
        found += space.combine(sets)[:1]
    return found


def _trial_s(live: Instance, state: Examined, objective: Name, work: Workload, target: Target) -> float:
    plan = state.plan
    size = next((model.size_bytes for model in plan.models if model.path == live.model_path), None) if plan else None
    decode_tps = target.ceiling_tps * CEILING_SHARE if target.ceiling_tps else DECODE_TPS
    asked = objectives.phases(objective, work, live.context_length, fill=objective == "context")
    prompt, answered = objectives.requested_tokens(asked)
    return START_S + (size or 0) / LOAD_BYTES_PER_S + prompt / (decode_tps * PREFILL_FACTOR) + answered / decode_tps


def log_path(host: str, instance: str, objective: str) -> Path:
    """Where the trials of an instance are written down."""
    return state_dir() / "tune" / folder_name(host) / folder_name(instance) / f"{objective}.jsonl"


def traffic(prepared: Prepared, busy_slots: int | None) -> str:
    """Who uses the server now, in words; empty where nobody was seen."""
    facts = prepared.state.facts
    server = facts.gateway.servers.get(prepared.name) if facts and facts.gateway else None
    if server is not None and server.requests_running:
        return f"the gateway has {server.requests_running} requests running there"
    return f"it works on {busy_slots} requests" if busy_slots else ""


def tune(
    prepared: Prepared,
    reporter: Reporter,
    *,
    clock: Callable[[], float] = time.monotonic,
    now: Callable[[], datetime] = lambda: datetime.now(UTC),
) -> dict[str, Any]:
    """Search, and bring the live settings back. Returns the report.

    Raises:
        V100ctlError: the server is in use, cannot be let go, or does not answer as it should.
    """
    state, name, options, target = prepared.state, prepared.name, prepared.options, prepared.target
    place = f"{target.host}/{name}"
    if state.connection is None:
        raise V100ctlError(f"{target.host} cannot be reached")
    measured_at = now().strftime("%Y-%m-%dT%H:%M:%SZ")
    log = Log(log_path(target.host, name, options.objective), _log_plan(prepared))
    known = log.open(fresh=options.fresh)
    if known:
        reporter.note(f"going on after {known} trials of an earlier run ({log.path}); `--fresh` begins anew")
    with open_session(state.connection) as session:
        busy = on_host(session)(target.to_request({"kind": "state"}, 60.0)).get("busy_slots")
        used = traffic(prepared, busy)
        if used and not options.yes:
            raise TuneError(
                f"{place} is in use: {used}",
                hint="while it is tuned it serves nobody; `--yes` says that this is fine, or take it out of its gateway first",
            )
        host = Host(session, name, target.unit, options.lease_s)
        power = any("power_limit" in item.choices for item in prepared.singles)
        with reporter.phase(f"{place}: starting the dead-man"):
            host.begin(target.cards, power=power)
        try:
            with heartbeat(host, state.connection, options.lease_s):
                with reporter.phase(f"{place}: waiting for running requests"):
                    drain(session, place, name, options.drain_limit_s, force=options.force)
                trials = Trials(
                    rig=HostRig(host, session, target, prepared.planned.instance, prepared.planned.power_w),
                    log=log,
                    name=options.objective,
                    work=prepared.work,
                    guarded=prepared.planned.guarded,
                    clock=clock,
                    deadline_s=clock() + options.budget_s,
                    note=reporter.note,
                    quality_limit_nats=options.quality_limit_nats,
                    fills=options.objective == "context",
                )
                result = _search(prepared, trials)
        finally:
            _bring_back(host, prepared, reporter)
        with reporter.phase(f"{place}: waiting until it is healthy"):
            await_healthy(session, state, place, name)
        call_gateway(session, "open", name, GATEWAY_LIMIT_S)
    found = document(
        result,
        host=target.host,
        instance=name,
        name=options.objective,
        work=prepared.work.to_json(),
        measured_at=measured_at,
        version=__version__,
        excluded=[item.to_json() for item in prepared.space.excluded],
        divergences=trials.divergences,
        notes=[note for entry in log.entries for note in entry.get("notes", ())],
    )
    if result.finished:
        # The next one begins anew.
        stem = f"{options.objective}-{measured_at.replace('-', '').replace(':', '')}"
        log.path.replace(log.path.with_name(f"{stem}.jsonl"))
        log.path.with_name(f"{stem}.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return found


def _search(prepared: Prepared, trials: Trials) -> Result:
    search = Search(prepared.singles, prepared.space.combine, trials.measure, prepared.schedule)
    try:
        if prepared.options.objective == "context":
            return search.run_contexts(prepared.options.keep)
        return search.run()
    except LiveFailed as error:
        raise TuneError(
            f"{prepared.target.host}/{prepared.name}: the live settings cannot be measured: {error}",
            hint=f"`v100ctl bench {prepared.target.host}/{prepared.name}` says more",
        ) from error


def _log_plan(prepared: Prepared) -> dict[str, Any]:
    """What has to be the same for a search to go on from its log."""
    return {
        "host": prepared.target.host,
        "instance": prepared.name,
        "digest": prepared.planned.live.digest,
        "objective": prepared.options.objective,
        "keep": prepared.options.keep,
        "quality_limit_nats": prepared.options.quality_limit_nats,
        "work": prepared.work.to_json(),
        "candidates": [item.id for item in prepared.singles],
        "schedule": dataclasses.asdict(prepared.schedule),
    }


def _bring_back(host: Host, prepared: Prepared, reporter: Reporter) -> None:
    place = f"{prepared.target.host}/{prepared.name}"
    with contextlib.ExitStack() as shown:
        shown.enter_context(reporter.phase(f"{place}: bringing the live settings back"))
        try:
            host.end()
        except V100ctlError as error:
            # A session that a lost connection has closed; another may do.
            try:
                if prepared.state.connection is None:
                    raise
                with open_session(prepared.state.connection) as session:
                    host.call("end", session=session, timeout_s=900.0)
            except V100ctlError:
                seconds = f"{prepared.options.lease_s:g} s"
                reporter.warning(f"{place}: {error.message}; the host brings the live settings back by itself within {seconds}")
