"""Tunes one model on a machine with a card as `v100ctl tune` does, and measures the whole grid of the same settings.

    PYTHONPATH=src:. python3 -m tests.device.tune_on_a_card INPUTS WORK MODEL BUDGET_S STAGE... [--server WORD...]

A stage is ``grid`` (one more pass over every point), ``tune``, or ``mmq`` (the best point and the live settings with the other
build, in turn). Servers are plain processes here. Only the card's settings are read. Standard library alone. Every measurement is
written to WORK as soon as it is there, so that a second call goes on; ``WORK/result.json`` has all of them together.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from v100ctl.bench import host_script
from v100ctl.bench.report import Target
from v100ctl.tune import objectives
from v100ctl.tune.chart import chart
from v100ctl.tune.objectives import Workload
from v100ctl.tune.report import document, table
from v100ctl.tune.search import Candidate, Search, schedule_for
from v100ctl.tune.space import Checked, Space
from v100ctl.tune.trials import Log, TrialFailed, Trials

PORT = 18100
LOAD_LIMIT_S = 120.0
#: A guess for the first plan; a server of 15 GB loads from the page cache.
TRIAL_S = 16.0
#: So many of a model of 15 GB, with their caches and buffers, fit an H200 together.
AT_ONCE = 6


class Server:
    """One process that serves, on a port of its own."""

    def __init__(self, argv: list[str], model: str, port: int, log: Path, program: list[str]) -> None:
        words = list(argv)
        for name, value in (("--model", model), ("--port", str(port))):
            words[words.index(name) + 1] = value
        for name in ("--threads", "--threads-batch"):
            words[words.index(name) + 1] = str(min(8, os.cpu_count() or 8))
        words = [*program, *words[1:]] if program else words
        environment = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": "0", "CUDA_MODULE_LOADING": "LAZY"}
        if program:
            environment["PYTHONPATH"] = os.environ.get("PYTHONPATH", "")
        self.port, self._log = port, log
        with log.open("wb") as stream:
            self._process = subprocess.Popen(words, env=environment, stdout=stream, stderr=subprocess.STDOUT)

    @property
    def pid(self) -> int:
        """Its process."""
        return self._process.pid

    def await_health(self) -> None:
        """Return when it serves.

        Raises:
            TrialFailed: it has ended, or does not serve within the limit.
        """
        deadline_s = time.monotonic() + LOAD_LIMIT_S
        while time.monotonic() < deadline_s and self._process.poll() is None:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5) as answer:
                    if answer.status == 200:
                        return
            except OSError:
                pass
            time.sleep(0.25)
        lines = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        raise TrialFailed(f"does not serve: {lines[-1] if lines else 'no word'}")

    def stop(self) -> None:
        """End it and wait until its memory is free."""
        self._process.kill()
        self._process.wait()


class ProcessRig:
    """See :class:`v100ctl.tune.trials.Rig`. ``ours``: processes that rest meanwhile and are no strangers."""

    def __init__(self, space: Mapping[str, Any], model: str, work: Path, program: list[str]) -> None:
        self._space, self._model, self._work, self._program = space, model, work, program
        self._argv = {Candidate(item["choices"]).id: item["argv"] for item in space["grid"]}
        self._cards = tuple(card["uuid"] for card in host_script.cards(())[:1])
        self._server: Server | None = None
        self.loads_s: list[float] = []
        self.ours: set[str] = set()

    def launch(self, name: str, port: int) -> Server:
        """A server of one point."""
        server = Server(self._argv[name], self._model, port, self._work / f"server-{port}.log", self._program)
        self.ours.add(str(server.pid))
        return server

    def start(self, candidate: Candidate) -> None:
        """See there."""
        self.stop()
        began_s = time.monotonic()
        self._server = self.launch(candidate.id, PORT)
        self._server.await_health()
        self.loads_s.append(round(time.monotonic() - began_s, 2))

    def stop(self) -> None:
        """Nothing runs afterwards."""
        if self._server is not None:
            self._server.stop()
            self._server = None

    def ask(self, candidate: Candidate, request: Mapping[str, Any]) -> Mapping[str, Any]:
        """See there."""
        return self.ask_at(PORT, request)

    def ask_at(self, port: int, request: Mapping[str, Any]) -> Mapping[str, Any]:
        """The same, of a server on another port."""
        target = Target(
            host="card",
            instance="chat",
            url=f"http://127.0.0.1:{port}",
            api="llama_cpp",
            model="made",
            context_length=self._space["context_length"],
            parallel=self._space["parallel"],
            cards=self._cards,
        )
        answer = host_script.measure(target.to_request(request, 300.0))
        answer["strangers"] = [words for words in answer["strangers"] if words.split()[0] not in self.ours]
        return answer

    def context_length(self, candidate: Candidate) -> int:
        """See there."""
        return int(self._space["context_length"])


def one_pass(rig: ProcessRig, work: Workload, path: Path, began_s: float, budget_s: float, passes: int) -> None:
    """Measure every point of the grid once more, some loaded together and measured one at a time while the others rest."""
    names = list(rig._argv)
    seen = [json.loads(line)["candidate"] for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
    # Each pass in another order: what a card does over time must not fall on the same points.
    turn = passes % len(names)
    order = [name for name in [*names[turn:], *names[:turn]] if seen.count(name) < passes]
    with path.open("a", encoding="utf-8") as stream:
        for first in range(0, len(order), AT_ONCE):
            if time.monotonic() - began_s > budget_s - 90:
                print(f"no time left for {len(order) - first} points", flush=True)
                return
            wave = order[first : first + AT_ONCE]
            servers = [rig.launch(name, PORT + 1 + place) for place, name in enumerate(wave)]
            try:
                for name, server in zip(wave, servers, strict=True):
                    entry: dict[str, Any] = {"candidate": name, "pass": passes}
                    try:
                        server.await_health()
                        asked = objectives.phases("throughput", work, rig.context_length(Candidate()))
                        answers = {phase.id: rig.ask_at(server.port, phase.to_request()) for phase in asked}
                        entry["problem"] = objectives.problem(answers)
                        entry["value"] = objectives.value("throughput", answers)
                        entry["notes"] = objectives.notes(answers)
                    except TrialFailed as error:
                        entry |= {"value": None, "problem": str(error)}
                    stream.write(json.dumps(entry) + "\n")
                    stream.flush()
                    print(f"{time.monotonic() - began_s:.0f} s: grid: {name}: {entry['value']} {entry['problem']}", flush=True)
            finally:
                for server in servers:
                    server.stop()


def tune(rig: ProcessRig, space: Mapping[str, Any], work: Workload, folder: Path, began_s: float, budget_s: float) -> None:
    """The search, as the command does it, from the plan's own command lines."""
    argv = {Candidate(item["choices"]).id: item["argv"] for item in space["grid"]}
    refused = {Candidate(item["choices"]).id: item["refused"][0] for item in space["refused"]}

    def check(choices: Mapping[str, str]) -> Checked:
        name = Candidate(choices).id
        if name in argv:
            return Checked(json.dumps(argv[name]))
        rule, _, reason = refused.get(name, "[same] as another point").partition("] ")
        return Checked(name, rule.strip("["), reason)

    values: dict[str, list[str]] = {}
    for item in (*space["grid"], *space["refused"]):
        for name, value in item["choices"].items():
            if value not in values.setdefault(name, []):
                values[name].append(value)
    candidates = Space(values, check)
    singles = candidates.singles()
    plan_path = folder / "tune-plan.json"
    if not plan_path.exists():
        left = max(0.0, budget_s - (time.monotonic() - began_s))
        plan_path.write_text(json.dumps({"trials": left / TRIAL_S}), encoding="utf-8")
    schedule = schedule_for(len(singles), json.loads(plan_path.read_text(encoding="utf-8"))["trials"])
    print(f"tune: {[item.id for item in singles]}, {schedule}, about {schedule.trials(len(singles))} trials", flush=True)
    log = Log(folder / "tune.jsonl", {"space": sorted(argv), "work": work.to_json(), "schedule": vars(schedule)})
    print(f"tune: {log.open()} trials are known", flush=True)
    trials = Trials(
        rig=rig,
        log=log,
        name="throughput",
        work=work,
        guarded=lambda candidate: "kv_cache_type" in candidate.choices,
        clock=time.monotonic,
        deadline_s=began_s + budget_s - 10,
        note=lambda words: print(f"{time.monotonic() - began_s:.0f} s: tune: {words}", flush=True),
    )
    try:
        result = Search(singles, candidates.combine, trials.measure, schedule).run()
    finally:
        rig.stop()
    found = document(
        result,
        host="card",
        instance="chat",
        name="throughput",
        work=work.to_json(),
        measured_at=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        version="0",
        excluded=[item.to_json() for item in candidates.excluded],
        divergences=trials.divergences,
        notes=[note for entry in log.entries for note in entry.get("notes", ())],
    )
    found["loads_s"] = rig.loads_s
    found["trials_s"] = [entry["elapsed_s"] for entry in log.entries]
    (folder / "tune.json").write_text(json.dumps(found, indent=1), encoding="utf-8")
    (folder / "tune.svg").write_text(chart(found).to_svg(), encoding="utf-8")
    print(table(found), flush=True)


def other_build(rig: ProcessRig, work: Workload, folder: Path, began_s: float, budget_s: float, release: str) -> None:
    """The live settings and the grid's best with both builds in turn, for as long as there is time."""
    grid = medians(folder / "grid.jsonl")
    names = list(dict.fromkeys([Candidate().id, max(grid, key=lambda name: grid[name])])) if grid else [Candidate().id]
    known = dict(rig._argv)
    path = folder / "mmq.jsonl"
    number = 0
    with path.open("a", encoding="utf-8") as stream:
        while number < 6 and time.monotonic() - began_s < budget_s - 60:
            for name in names:
                for build in ("on", "off") if number % 2 else ("off", "on"):
                    words = list(known[name])
                    rig._argv[name] = words if build == "on" else [f"{release}/bin/llama-server", *words[1:]]
                    rig.start(Candidate() if name == Candidate().id else _candidate(name))
                    asked = objectives.phases("throughput", work, rig.context_length(Candidate()))
                    answers = {phase.id: rig.ask(Candidate(), phase.to_request()) for phase in asked}
                    entry = {
                        "candidate": name,
                        "force_mmq": build,
                        "value": objectives.value("throughput", answers),
                        "problem": objectives.problem(answers),
                    }
                    stream.write(json.dumps(entry) + "\n")
                    stream.flush()
                    print(f"{time.monotonic() - began_s:.0f} s: FORCE_MMQ {build}: {name}: {entry['value']}", flush=True)
            number += 1
    rig._argv |= known
    rig.stop()


def _candidate(name: str) -> Candidate:
    return Candidate(dict(pair.split("=", 1) for pair in name.split()))


def medians(path: Path) -> dict[str, float]:
    """Each point's median over the passes."""
    values: dict[str, list[float]] = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        entry = json.loads(line)
        if entry["value"] and not entry["problem"]:
            values.setdefault(entry["candidate"], []).append(entry["value"])
    return {name: statistics.median(found) for name, found in values.items()}


def summary(folder: Path) -> dict[str, Any]:
    """The grid against what `tune` has picked."""
    grid = medians(folder / "grid.jsonl")
    found: dict[str, Any] = {"grid": dict(sorted(grid.items(), key=lambda item: -item[1]))}
    if (folder / "tune.json").exists():
        report = json.loads((folder / "tune.json").read_text(encoding="utf-8"))
        picked = report["winner"] or Candidate().id
        found |= {"tune_pick": picked, "tune_finished": report["finished"]}
        if grid and picked in grid:
            best = max(grid, key=lambda name: grid[name])
            found |= {"grid_best": best, "pick_over_best": round(grid[picked] / grid[best], 4)}
            found["within_2_percent"] = found["pick_over_best"] >= 0.98
    return found


def main(arguments: list[str]) -> None:
    """See the module."""
    program = arguments[arguments.index("--server") + 1 :] if "--server" in arguments else []
    words = arguments[: arguments.index("--server")] if "--server" in arguments else arguments
    inputs, folder, model, budget_s = Path(words[0]), Path(words[1]), words[2], float(words[3])
    began_s = time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    space = json.loads((inputs / "space.json").read_text(encoding="utf-8"))
    rig = ProcessRig(space, model, folder, program)
    work = Workload(tokens=64, streams=space["parallel"], prompt_tokens=512, rounds=2)
    for stage in words[4:]:
        if stage == "grid":
            counts = folder / "passes"
            passes = int(counts.read_text(encoding="utf-8")) + 1 if counts.exists() else 1
            one_pass(rig, work, folder / "grid.jsonl", began_s, budget_s, passes)
            done = [json.loads(line)["candidate"] for line in (folder / "grid.jsonl").read_text(encoding="utf-8").splitlines()]
            if all(done.count(name) >= passes for name in rig._argv):
                counts.write_text(str(passes), encoding="utf-8")
        elif stage == "tune":
            tune(rig, space, work, folder, began_s, budget_s)
        elif stage.startswith("mmq:"):
            other_build(rig, work, folder, began_s, budget_s, stage.removeprefix("mmq:"))
    result = summary(folder)
    (folder / "result.json").write_text(json.dumps(result, indent=1), encoding="utf-8")
    print(json.dumps(result, indent=1), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
