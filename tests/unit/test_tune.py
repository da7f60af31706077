"""Finding faster settings: the search on servers of known noise, what is tried at all, and that the live settings come back."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import random
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tests.unit.factory import AS_OF, applied_facts, make_config, make_plan
from tests.unit.test_bench import valid
from v100ctl.apply import make_reporter
from v100ctl.cli.tune import plan_text
from v100ctl.compare import compare
from v100ctl.errors import UsageError, V100ctlError
from v100ctl.examine import Examined, decide
from v100ctl.fleet import FleetHost, HostConfig, Speculative
from v100ctl.plan.units import TRIAL_DROP_IN
from v100ctl.probe.connection import Connection
from v100ctl.tune import host_script, objectives
from v100ctl.tune import run as run_module
from v100ctl.tune.chart import chart
from v100ctl.tune.objectives import QUALITY_LIMIT_NATS, Name, Workload
from v100ctl.tune.planned import Planned, with_flag
from v100ctl.tune.remote import TuneError, drop_in
from v100ctl.tune.report import table
from v100ctl.tune.search import (
    ALPHA,
    SCHEDULES,
    Candidate,
    LiveFailed,
    Outcome,
    OutOfTime,
    Result,
    Schedule,
    Search,
    schedule_for,
)
from v100ctl.tune.space import Checked, Space
from v100ctl.tune.trials import Log, TrialFailed, Trials, plan_of


class Bench:
    """Servers of known speed and noise, on a clock of their own.

    A start moves a server by ``start_sd``, each measurement by ``run_sd``; the card slows down by ``drift`` over an hour.
    """

    def __init__(self, seed: int, effects: Mapping[str, float], *, start_sd: float = 0.005, run_sd: float = 0.007) -> None:
        self.dice = random.Random(seed)
        self.effects, self.start_sd, self.run_sd = effects, start_sd, run_sd
        self.now_s, self.limit_s, self.trials = 0.0, math.inf, 0

    def truth(self, candidate: Candidate) -> float:
        gain = 1.0
        for name, value in candidate.choices.items():
            gain *= 1 + self.effects.get(f"{name}={value}", 0.0)
        return gain

    def measure(self, candidate: Candidate) -> Outcome:
        if self.now_s > self.limit_s:
            raise OutOfTime
        self.now_s += 45.0
        self.trials += 1
        drift = 1 - 0.03 * min(self.now_s / 3600, 1)
        noise = math.exp(self.dice.gauss(0, self.start_sd) + self.dice.gauss(0, self.run_sd))
        return Outcome(38.0 * self.truth(candidate) * drift * noise)


def singles(values: Mapping[str, Sequence[str]]) -> list[Candidate]:
    return [Candidate({name: value}) for name, known in values.items() for value in known]


def combine(sets: Sequence[Mapping[str, str]]) -> list[Candidate]:
    return [Candidate(item) for item in sets]


SPACE = {"flash": ["on"], "kv": ["q8_0", "q4_0"], "ubatch": ["256", "1024", "2048"], "threads": ["4", "8"]}
EFFECTS = {"flash=on": 0.05, "kv=q8_0": -0.04, "kv=q4_0": -0.08, "ubatch=1024": 0.03, "ubatch=2048": 0.0, "threads=4": -0.02}


def found(seed: int, effects: Mapping[str, float], space: Mapping[str, Sequence[str]] = SPACE) -> tuple[Result, Bench]:
    bench = Bench(seed, effects)
    alone = singles(space)
    return Search(alone, combine, bench.measure, Schedule(), seed=seed).run(), bench


def test_the_right_winner_in_95_of_100_runs() -> None:
    right = hours = 0.0
    for seed in range(100):
        result, bench = found(seed, EFFECTS)
        # Whatever else it changes makes no difference.
        chosen = result.winner.candidate if result.winner else Candidate()
        right += math.isclose(bench.truth(chosen), 1.05 * 1.03)
        hours += bench.now_s / 3600 / 100
    assert right >= 95, right
    assert hours < 1.0


def test_no_gain_between_equal_settings_more_than_5_times_in_100() -> None:
    assert sum(found(seed, {})[0].winner is not None for seed in range(100)) <= 5
    assert sum(found(seed, {}, {"flash": ["on"]})[0].winner is not None for seed in range(100)) <= 5


def test_a_candidate_that_fails_is_never_asked_again() -> None:
    bench = Bench(3, EFFECTS)
    asked: list[str] = []

    def measure(candidate: Candidate) -> Outcome:
        asked.append(candidate.id)
        return Outcome(None, "out of memory") if "ubatch=2048" in candidate.id else bench.measure(candidate)

    result = Search(singles(SPACE), combine, measure, Schedule()).run()
    assert asked.count("ubatch=2048") == 1
    row = next(row for row in result.rows if row.candidate.id == "ubatch=2048")
    assert (row.status, row.problem) == ("failed", "out of memory")
    assert result.winner is not None


def test_without_live_settings_there_is_nothing_to_compare_with() -> None:
    with pytest.raises(LiveFailed, match="gone"):
        Search(singles(SPACE), combine, lambda candidate: Outcome(None, "gone"), Schedule()).run()


def test_everything_fails() -> None:
    result = Search(singles(SPACE), combine, lambda item: Outcome(None, "no") if item.choices else Outcome(1.0), Schedule()).run()
    assert (result.winner, result.finished) == (None, True)
    assert {row.status for row in result.rows} == {"failed"}


def test_the_time_ends_a_search_before_anything_is_claimed() -> None:
    bench = Bench(4, EFFECTS)
    bench.limit_s = 1000.0
    result = Search(singles(SPACE), combine, bench.measure, Schedule()).run()
    assert (result.winner, result.finished) == (None, False)
    assert bench.now_s <= 1000.0 + 45.0


def test_the_schedule_follows_the_time() -> None:
    assert schedule_for(8, 1000).pairs == 7
    assert schedule_for(8, 35).finalists == 1
    assert schedule_for(8, 1) == schedule_for(8, 0)
    for count in (1, 4, 12):
        for trials in (20, 40, 80):
            found = schedule_for(count, trials)
            assert found.trials(count) <= trials or found == SCHEDULES[-1]
    # A test that could not say anything would be no test.
    assert all(item.finalists / 2**item.pairs <= ALPHA for item in SCHEDULES)


def test_the_longest_context_that_keeps_the_speed() -> None:
    lengths = ["65536", "49152", "32768"]
    alone = [Candidate({"context_length": value}) for value in lengths]
    found = []
    for seed in range(20):
        bench = Bench(seed, {"context_length=65536": -0.2, "context_length=49152": -0.03, "context_length=32768": -0.02})
        result = Search(alone, combine, bench.measure, Schedule()).run_contexts(0.9)
        found.append(result.winner.candidate.choices["context_length"] if result.winner else "")
    assert found == ["49152"] * 20
    bench = Bench(1, {f"context_length={value}": -0.3 for value in lengths})
    assert Search(alone, combine, bench.measure, Schedule()).run_contexts(0.9).winner is None


# --- trials and their log -------------------------------------------------------------------------------------------------------


class Rig:
    """Servers that answer at once, on a clock of their own."""

    def __init__(self, bench: Bench, *, skew: Mapping[str, float] | None = None, context: int = 4096) -> None:
        self.bench, self.skew, self.context, self.started = bench, skew or {}, context, list[str]()

    def start(self, candidate: Candidate) -> None:
        if "ubatch=2048" in candidate.id:
            raise TrialFailed("cudaMalloc failed: out of memory")
        self.started.append(candidate.id)
        self.tps = self.bench.measure(candidate).value or 0.0

    def ask(self, candidate: Candidate, request: Mapping[str, Any]) -> Mapping[str, Any]:
        if request["kind"] == "likely":
            far = max((value for name, value in self.skew.items() if name in candidate.id), default=0.0)
            return {"likely": [{str(n): -1.0 - n * (1 + far) for n in range(8)}] * 4, "samples": []}
        sample = {
            "error": "",
            "tokens": request["tokens"],
            "first_tokens": 1,
            "started_s": 0.0,
            "first_s": 0.1,
            "last_s": 0.1 + (request["tokens"] - 1) / self.tps,
            "ended_s": 0.1 + (request["tokens"] - 1) / self.tps,
            "text": "a small boat on the river",
        }
        return {"samples": [sample] * request["requests"], "busy_slots": 0, "strangers": []}

    def context_length(self, candidate: Candidate) -> int:
        return self.context


def trials_of(rig: Rig, path: Path, *, limit_s: float = math.inf, name: Name = "latency") -> tuple[Trials, int]:
    log = Log(path, {"space": "x"})
    known = log.open()
    bench = rig.bench
    made = Trials(rig, log, name, Workload(streams=2), lambda item: "kv" in item.choices, lambda: bench.now_s, limit_s)
    return made, known


def test_a_search_that_was_cut_goes_on_where_it_was(tmp_path: Path) -> None:
    whole_rig = Rig(Bench(11, EFFECTS))
    trials, _ = trials_of(whole_rig, tmp_path / "whole.jsonl")
    whole = Search(singles(SPACE), combine, trials.measure, Schedule()).run()
    path = tmp_path / "cut.jsonl"
    bench = Bench(11, EFFECTS)
    rig = Rig(bench)
    known, runs = 0, 0
    while True:
        trials, again = trials_of(rig, path, limit_s=bench.now_s + 400.0)
        assert again == known
        result = Search(singles(SPACE), combine, trials.measure, Schedule()).run()
        known, runs = len(trials.log.entries), runs + 1
        if result.finished:
            break
        # Killed while it wrote.
        with path.open("a") as stream:
            stream.write('{"candidate": "fla')
    assert runs > 3
    # The same trials in the same order, each done once.
    assert rig.started == whole_rig.started
    assert result.winner is not None and whole.winner is not None
    assert result.winner.candidate == whole.winner.candidate
    assert result.winner.gain == whole.winner.gain


def test_the_log_of_another_search_is_set_aside(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    log = Log(path, {"space": "one"})
    log.open()
    log.append({"candidate": "live", "value": 1.0, "problem": "", "elapsed_s": 1.0})
    assert plan_of(path) == {"space": "one"}
    assert Log(path, {"space": "two"}).open() == 0
    assert (tmp_path / "log.old.jsonl").exists()
    assert Log(path, {"space": "two"}).open() == 0
    assert plan_of(tmp_path / "none.jsonl") is None


def test_a_cache_type_that_changes_the_answers_is_refused_and_one_that_does_not_is_measured(tmp_path: Path) -> None:
    rig = Rig(Bench(5, {"kv=q8_0": 0.06, "kv=q4_0": 0.3}), skew={"q8_0": 0.01, "q4_0": 0.5})
    trials, _ = trials_of(rig, tmp_path / "log.jsonl")
    result = Search(singles({"kv": ["q8_0", "q4_0"]}), combine, trials.measure, Schedule()).run()
    assert result.winner is not None and result.winner.candidate.id == "kv=q8_0"
    row = next(row for row in result.rows if row.candidate.id == "kv=q4_0")
    assert row.status == "failed" and "quality: the next token's distribution moves by" in row.problem
    assert trials.divergences["kv=q4_0"] > QUALITY_LIMIT_NATS > trials.divergences["kv=q8_0"] > 0


def test_a_server_without_probabilities_gets_no_other_cache_type(tmp_path: Path) -> None:
    class Silent(Rig):
        def ask(self, candidate: Candidate, request: Mapping[str, Any]) -> Mapping[str, Any]:
            if request["kind"] == "likely":
                raise TrialFailed("the server gives no probabilities")
            return super().ask(candidate, request)

    trials, _ = trials_of(Silent(Bench(5, {"kv=q8_0": 0.3, "flash=on": 0.1})), tmp_path / "log.jsonl")
    result = Search(singles({"kv": ["q8_0"], "flash": ["on"]}), combine, trials.measure, Schedule()).run()
    assert result.winner is not None and result.winner.candidate.id == "flash=on"


def test_divergence() -> None:
    base = [{"1": math.log(0.7), "2": math.log(0.2)}]
    assert objectives.divergence(base, base) == pytest.approx(0.0)
    other = [{"1": math.log(0.5), "2": math.log(0.4)}]
    exact = 0.7 * math.log(0.7 / 0.5) + 0.2 * math.log(0.2 / 0.4) + 0.1 * math.log(0.1 / 0.1)
    assert objectives.divergence(base, other) == pytest.approx(exact)
    assert objectives.divergence(base, [{"3": math.log(0.9), "4": math.log(0.05)}]) > 1.0
    with pytest.raises(ValueError, match="places"):
        objectives.divergence(base, [])


def test_what_is_asked_fits_the_context() -> None:
    for name in objectives.NAMES:
        for context in (256, 4096, 131072):
            for phase in objectives.phases(name, Workload(streams=4), context, fill=True):
                assert phase.prompt_tokens + phase.tokens <= context, (name, context, phase)


def answers(**changes: Any) -> dict[str, Any]:
    sample = {"error": "", "tokens": 10, "first_tokens": 1, "started_s": 0.0, "first_s": 1.0, "last_s": 2.0, "ended_s": 2.0}
    sample |= {"text": "a small boat"}
    answer = {"samples": [{**sample, **changes.pop("sample", {})}] * 2, "busy_slots": 0, "strangers": [], **changes}
    return {"streams-0": answer, "streams-1": answer, "decode": answer}


def test_values_of_objectives() -> None:
    assert objectives.value("latency", answers()) == 9.0
    assert objectives.value("throughput", answers()) == 10.0
    assert objectives.value("energy", answers()) is None
    watts = answers(cards_during=[{"uuid": "GPU-1", "power_w": 200.0}, {"uuid": "GPU-2", "power_w": 50.0}])
    assert objectives.value("energy", watts) == pytest.approx(20 / 500)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, ""),
        ({"sample": {"error": "HTTP status 500"}}, "HTTP status 500"),
        ({"busy_slots": 2}, "requests of others"),
        ({"strangers": ["77 python"]}, "process 77 python"),
        ({"sample": {"text": "!" * 64}}, "no language"),
    ],
)
def test_what_does_not_count(changes: dict[str, Any], said: str) -> None:
    assert said in objectives.problem(answers(**changes))
    assert bool(objectives.problem(answers(**changes))) == bool(said)


# --- what is tried --------------------------------------------------------------------------------------------------------------


def test_what_works_only_with_another_change_is_tried_with_it() -> None:
    def check(choices: Mapping[str, str]) -> Checked:
        settings = {"flash": "off", "kv": "f16", **choices}
        if settings["kv"] == "q8_0" and settings["flash"] != "on":
            return Checked("", "quantised-v-needs-flash-attention", "refused")
        return Checked(str(sorted(settings.items())))

    space = Space({"flash": ["on", "off"], "kv": ["f16", "q8_0"]}, check)
    assert [item.id for item in space.singles()] == ["flash=on", "flash=on kv=q8_0"]
    assert [(item.candidate, item.rule) for item in space.excluded] == [("kv=q8_0", "quantised-v-needs-flash-attention")]
    # What is known already is not made again, and what does not work is said.
    assert space.combine([{"flash": "on", "kv": "q8_0"}, {"flash": "off", "kv": "q8_0"}]) == []
    assert len(space.excluded) == 2


def looked_at(config: HostConfig | None = None, **facts: Any) -> Examined:
    wanted = config or make_config()
    plan = make_plan(config=wanted)
    host = FleetHost("h1", {}, wanted)
    connection = Connection.from_vars("h1", {"ansible_connection": "local"})
    return decide(host, connection, applied_facts(plan, **facts), as_of=AS_OF)


def planned(config: HostConfig | None = None) -> Planned:
    return Planned(looked_at(config), "chat", headers=None, as_of=AS_OF)


def test_candidates_go_through_the_plan() -> None:
    found = planned(make_config({"settings": {"flash_attention": "off", "batch_size": 512, "ubatch_size": 256}}))
    values = found.values("throughput", ("flash_attention", "kv_cache_type", "ubatch_size=512,1024"), allow_power=False)
    space = Space(values, found.check)
    names = [item.id for item in space.singles()]
    # The cache of now is f16; a quantised one needs flash attention, which is on in the pair.
    assert "flash_attention=on" in names and "flash_attention=on kv_cache_type=q8_0" in names
    assert {item.rule for item in space.excluded} == {"quantised-v-needs-flash-attention"}
    wide = found.instance(Candidate({"ubatch_size": "1024"}))
    words = dict(itertools.pairwise(wide.argv))
    # The engine would cut ubatch down to batch.
    assert (words["--ubatch-size"], words["--batch-size"]) == ("1024", "1024")
    assert found.guarded(Candidate({"kv_cache_type": "q8_0"})) and not found.guarded(Candidate({"ubatch_size": "512"}))
    text = drop_in(wide)
    assert (
        "ExecStart=\nExecStart=/opt/v100ctl/engines/" in text
        and "--ubatch-size 1024" in text
        and "CPUAffinity=\nNUMAMask=\n" in text
    )
    assert f"V100CTL_INSTANCE_DIGEST={wide.digest}" in text and wide.digest != found.live.digest


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("colour", "no dimension"),
        ("power_limit", "--allow-power"),
        ("ubatch_size=many", "ubatch_size=many"),
        ("flash_attention=maybe", "flash_attention=maybe"),
        ("numa", "which values"),
    ],
)
def test_dimensions_that_do_not_exist(asked: str, said: str) -> None:
    with pytest.raises(UsageError) as error:
        planned().values("latency", (asked,), allow_power=False)
    assert said in f"{error.value.message} {error.value.hint}"


def test_power_and_builds_are_tried_only_when_asked_for() -> None:
    for objective in objectives.NAMES:
        assert not {"power_limit", "force_mmq"} & set(planned().values(objective, (), allow_power=True))


def test_an_instance_that_differs_from_the_inventory_is_not_tuned() -> None:
    state = looked_at()
    other = dataclasses.replace(state, host=FleetHost("h1", {}, make_config({"settings": {"parallel": 3}})))
    assert other.facts is not None
    with pytest.raises(V100ctlError, match="does not run as the inventory says"):
        Planned(decide(other.host, other.connection, other.facts, as_of=AS_OF), "chat", headers=None, as_of=AS_OF)


def test_a_flag_of_extra_args_is_set_and_kept() -> None:
    assert with_flag(("--verbose",), "--cache-ram", "0") == ("--verbose", "--cache-ram", "0")
    assert with_flag(("--cache-ram", "8192", "-x"), "--cache-ram", "0") == ("--cache-ram", "0", "-x")
    found = planned(make_config({"extra_args": ["--cache-ram", "4096"]}))
    assert found.written({"cache_ram": "0"}) == {("llm_server_instances", "chat", "extra_args"): ("--cache-ram", "0")}
    assert found.instance(Candidate({"cache_ram": "0"})).argv[-2:] == ("--cache-ram", "0")


def test_speculative_kinds_are_whole() -> None:
    found = planned()
    assert found.written({"speculative": "ngram:4"}) == {
        ("llm_server_instances", "chat", "settings", "speculative", "kind"): "ngram",
        ("llm_server_instances", "chat", "settings", "speculative", "depth"): 4,
    }
    assert found.config({"speculative": "ngram:4"}).llm_server_instances["chat"].settings.speculative == Speculative(
        kind="ngram", depth=4
    )


# --- from end to end ------------------------------------------------------------------------------------------------------------


class FakeHost:
    """The script on a host, as far as a search sees it."""

    calls: ClassVar[list[str]] = []

    def __init__(self, *arguments: Any) -> None:
        FakeHost.calls = []

    def begin(self, cards: Any, *, power: bool) -> None:
        FakeHost.calls.append(f"begin power={power}")

    def end(self) -> None:
        FakeHost.calls.append("end")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """`tune` on a host that is none: the rig and the state of the server are the test's."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    FakeHost.calls = []
    known: dict[str, Any] = {"busy": 0, "effects": {"ubatch_size=1024": 0.2}, "rig": None}

    def rig(*arguments: Any) -> Rig:
        known["rig"] = known["rig"] or Rig(Bench(1, known["effects"]))
        return known["rig"]  # type: ignore[no-any-return]

    monkeypatch.setattr(run_module, "Host", FakeHost)
    monkeypatch.setattr(run_module, "HostRig", rig)
    monkeypatch.setattr(run_module, "heartbeat", lambda *words: contextlib.nullcontext())
    monkeypatch.setattr(run_module, "open_session", lambda connection: contextlib.nullcontext(None))
    monkeypatch.setattr(run_module, "on_host", lambda session: lambda request: {"busy_slots": known["busy"]})
    for name in ("drain", "await_healthy", "call_gateway"):
        monkeypatch.setattr(run_module, name, lambda *words, name=name, **more: FakeHost.calls.append(name))
    monkeypatch.setattr(run_module, "known_headers", lambda hosts: {"h1": {}})
    return known


def tuned(options: run_module.Options, state: Examined | None = None) -> dict[str, Any]:
    prepared = run_module.prepare(state or looked_at(), "chat", options, AS_OF)
    document = run_module.tune(prepared, make_reporter())
    valid(document, "tune")
    ElementTree.fromstring(chart(document).to_svg())  # noqa: S314 - our own
    return document


OPTIONS = run_module.Options(dimensions=("ubatch_size=256,1024",), budget_s=1e6)


def test_a_search_brings_the_live_settings_back_and_names_the_winner(fake: dict[str, Any]) -> None:
    document = tuned(OPTIONS)
    assert FakeHost.calls == ["begin power=False", "drain", "end", "await_healthy", "call_gateway"]
    assert document["winner"] == "ubatch_size=1024" and document["finished"]
    assert "winner: ubatch_size=1024" in table(document)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("bug"), TuneError("lapsed")])
def test_whatever_happens_the_host_is_told_to_bring_them_back(fake: dict[str, Any], error: BaseException) -> None:
    class Broken(Rig):
        def start(self, candidate: Candidate) -> None:
            if len(self.started) == 4:
                raise error
            super().start(candidate)

    fake["rig"] = Broken(Bench(1, {}))
    with pytest.raises(type(error)):
        tuned(OPTIONS)
    assert FakeHost.calls == ["begin power=False", "drain", "end"]
    # What was measured is not lost.
    fake["rig"] = Rig(Bench(1, {}))
    assert tuned(OPTIONS)["finished"]
    # Two candidates in seven pairs with the live settings: the round before was read from the log.
    assert len(fake["rig"].started) == 21


def test_a_server_in_use_is_tuned_only_when_that_was_said(fake: dict[str, Any]) -> None:
    fake["busy"] = 3
    with pytest.raises(TuneError, match="in use: it works on 3 requests"):
        tuned(OPTIONS)
    assert FakeHost.calls == []
    assert tuned(dataclasses.replace(OPTIONS, yes=True))["finished"]
    fake["busy"] = 0
    front = {"gateway": {"servers": {"chat": {"status": "UP", "requests_running": 2}}}}
    with pytest.raises(TuneError, match="the gateway has 2 requests"):
        tuned(OPTIONS, looked_at(**front))


def test_what_there_is_to_try(fake: dict[str, Any]) -> None:
    with pytest.raises(TuneError, match="no longer context"):
        tuned(dataclasses.replace(OPTIONS, objective="context", dimensions=()))
    with pytest.raises(TuneError, match="no card"):
        tuned(dataclasses.replace(OPTIONS, objective="energy"))
    document = tuned(dataclasses.replace(OPTIONS, objective="context", dimensions=("context_length=8192,16384",)))
    assert document["winner"] == "context_length=16384"


def test_the_plan_of_a_search_is_shown_and_nothing_is_touched(fake: dict[str, Any]) -> None:
    FakeHost.calls = []
    prepared = run_module.prepare(looked_at(), "chat", dataclasses.replace(OPTIONS, dimensions=()), AS_OF)
    text = plan_text(prepared)
    assert "trials of about" in text and "serves nobody" in text
    # The practice model is no model with heads of its own that draft.
    assert any("speculative" in item for item in prepared.to_json()["candidates"])
    assert FakeHost.calls == []


def test_a_tune_in_progress_is_no_drift() -> None:
    plan = make_plan()
    process = applied_facts(plan).processes[0].model_dump() | {"argv": ["/opt/other"], "environ": {}}
    path = f"/run/systemd/system/v100-chat.service.d/{TRIAL_DROP_IN}"
    unit = {"drop_in_paths": [path], "active_state": "deactivating"}
    tried = applied_facts(plan, processes=[process], units={"v100-chat.service": unit}, health={"chat": {"status": None}})
    assert [(item.id, item.kind) for item in compare(plan, tried)] == [("unit.trial:v100-chat.service", "external")]
    # Any other drop-in hides nothing.
    unit["drop_in_paths"] = [path.replace(TRIAL_DROP_IN, "mine.conf")]
    other = applied_facts(plan, processes=[process], units={"v100-chat.service": unit})
    assert {"drifted", "external"} <= {item.kind for item in compare(plan, other)}
    assert host_script.DROP_IN_NAME == TRIAL_DROP_IN
