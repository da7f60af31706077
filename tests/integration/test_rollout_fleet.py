"""Five hosts behind their gateway, asked without a pause by the client that people have: what a rollout costs those who ask.

The client is the ``openai`` package with ``max_retries=0``. A request counts as lost when the package raises, and when an answer
lacks its end or a part. Latencies before and during, and the time beside its floor, are printed and not judged: run with ``-s``.
"""

from __future__ import annotations

import collections
import hashlib
import itertools
import re
import shlex
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import openai
import pytest

from tests.device import made_weights, shapes
from v100ctl.lab.hosts import write_inventory

from .hosts import on_host, v100ctl
from .play_fleet import SERVER, WORDS, PlayFleet, hosts_up, rollout

if TYPE_CHECKING:
    from v100ctl.apply.reporter import Reporter
    from v100ctl.lab.hosts import Lab, RunningHost

pytestmark = pytest.mark.slow

HOSTS = 5
KEY = "a-key-of-this-test-alone"
#: Two releases of upstream with a row in the catalog, which differ in more than their names.
OLD_BUILD, NEW_BUILD = 11053, 11434
#: Half of the clients want streams. So many that each host has something to do, and the machine is not full.
CLIENTS = 6
PAUSE_S = 0.2
#: How long latency is looked at before anything changes.
BEFORE_S = 60.0
#: What these engines decode is over in milliseconds and shares two cores with everything: a tenth of the speed is noise here.
#: The gate itself is tried with a steady engine in `test_rollout.py`.
ENGINE_NOISE = ("--min-speed", "5%")


@dataclass(frozen=True)
class Answer:
    """One request: whether it was for a stream, when it ended, how long it took, and what was wrong (empty: nothing)."""

    stream: bool
    ended_s: float
    elapsed_s: float
    first_s: float
    problem: str


#: Ask the client for a stream or not; the seconds to the first word, and what is wrong with the answer.
Ask = Callable[[openai.OpenAI, bool], tuple[float, str]]


def ask_stand_in(client: openai.OpenAI, stream: bool) -> tuple[float, str]:
    """The stand-in's answer is known word by word."""
    began_s = time.monotonic()
    first_s = 0.0
    if stream:
        words = []
        for part in client.chat.completions.create(
            model="chat", messages=[{"role": "user", "content": "?"}], max_tokens=WORDS, stream=True
        ):
            first_s = first_s or time.monotonic() - began_s
            words.append(part.choices[0].delta.content or "")
        text = "".join(words)
    else:
        answer = client.chat.completions.create(model="chat", messages=[{"role": "user", "content": "?"}], max_tokens=WORDS)
        text = answer.choices[0].message.content or ""
    return first_s, "" if text == "".join(f"w{number} " for number in range(WORDS)) else f"not whole: {text!r}"


#: Tokens of an answer: a stream takes long enough for a restart to meet it.
STREAM_TOKENS, PLAIN_TOKENS = 200, 60
_serial = itertools.count()
#: Random weights say bytes that are no text, which 11053 answers with a 500 ("does not match the expected ... format"). These are
#: the tokens of single bytes in a made model.
WORDS_ALONE = {str(token): -100 for token in range(259)}


def ask_engine(client: openai.OpenAI, stream: bool) -> tuple[float, str]:
    """A real engine says how many tokens it has given and why it ended: all that were asked for, and for that reason."""
    # Another prompt each time, so that no server has it ready.
    question = f"t{next(_serial) % 1700 + 300} t400 t500"
    wanted = STREAM_TOKENS if stream else PLAIN_TOKENS
    asked: dict[str, Any] = {
        "model": "chat",
        "prompt": question,
        "max_tokens": wanted,
        "logit_bias": WORDS_ALONE,
        "extra_body": {"ignore_eos": True},
    }
    began_s = time.monotonic()
    first_s, ends, tokens = 0.0, [], 0
    if stream:
        for part in client.completions.create(**asked, stream=True, stream_options={"include_usage": True}):
            first_s = first_s or time.monotonic() - began_s
            ends += [choice.finish_reason for choice in part.choices if choice.finish_reason]
            tokens = part.usage.completion_tokens if part.usage else tokens
    else:
        answer = client.completions.create(**asked)
        ends = [choice.finish_reason for choice in answer.choices]
        tokens = answer.usage.completion_tokens if answer.usage else 0
    return first_s, "" if (ends, tokens) == (["length"], wanted) else f"not whole: {tokens} of {wanted} tokens, ended {ends}"


class Clients:
    """Those who ask. What they got is in ``answers``, in the order of the ends."""

    def __init__(self, address: str, ask: Ask) -> None:
        self._client = openai.OpenAI(base_url=f"http://{address}:8000/v1", api_key=KEY, max_retries=0, timeout=300)
        self._ask = ask
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(number % 2 == 0,)) for number in range(CLIENTS)]
        self.answers: list[Answer] = []

    def __enter__(self) -> Clients:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        self._client.close()

    def _run(self, stream: bool) -> None:
        while not self._stop.is_set():
            began_s = time.monotonic()
            first_s = 0.0
            try:
                first_s, problem = self._ask(self._client, stream)
            # The package lets errors of its HTTP library through while a stream is read: whatever is raised, a request is lost.
            except Exception as error:
                problem = f"{type(error).__name__}: {error}"
            now_s = time.monotonic()
            self.answers.append(Answer(stream, now_s, now_s - began_s, first_s, problem))
            self._stop.wait(PAUSE_S)

    @property
    def problems(self) -> list[str]:
        """What was wrong with answers."""
        return [answer.problem for answer in self.answers if answer.problem]


class EngineFleet(PlayFleet):
    """The same with the real engine on the processor, keys, and a model of random weights."""

    def __init__(self, folder: Path, serving: Sequence[RunningHost], front: RunningHost) -> None:
        super().__init__(folder, serving, front)
        model = folder / "tiny.gguf"
        made_weights.fill(
            shapes.llama(n_layer=4, n_embd=256, n_ff=512, n_head=4, n_head_kv=2, n_vocab=2048, tied=True, weight="q8_0"), model
        )
        self._model = {"from_controller": str(model), "sha256": hashlib.sha256(model.read_bytes()).hexdigest()}

    def want_engine(self, *, build: int, context_length: int) -> None:
        """The inventory asks for this from now on."""
        chat = {
            "model": self._model,
            "gpus": [],
            "port": 8000,
            "listen": "0.0.0.0",
            "api_keys": [KEY],
            "settings": {"context_length": context_length, "parallel": 2, "threads": 1},
        }
        engine = {"llama_cpp_backend": "cpu", "llama_cpp_build": build, "llama_cpp_build_on": "container"}
        hosts = {host.name: {**host.variables(), "llm_server_instances": {"chat": chat}} for host in self.serving}
        front = {"gateway_placement": "fleet", "gateway_listen": "0.0.0.0", "llm_server_allow_unauthenticated": True}
        hosts[self.front.name] = {**self.front.variables(), **front}
        write_inventory(self.inventory, hosts, variables=engine)


def releases(fleet: PlayFleet) -> set[str]:
    """The releases that the hosts' running processes are of."""
    command = "tr '\\0' ' ' < /proc/$(systemctl show --property MainPID --value v100-chat)/cmdline"
    return {re.findall(r"/opt/v100ctl/engines/([^ ]+)/bin/", on_host(host, command))[0] for host in fleet.serving}


def served(fleet: PlayFleet) -> dict[str, int]:
    """How many requests the gateway has given each server since it started."""
    asked = "import urllib.request as r; print(r.urlopen('http://127.0.0.1:8404/metrics').read().decode())"
    lines = on_host(fleet.front, f"python3 -c {shlex.quote(asked)}").splitlines()
    found = (re.match(r'haproxy_server_sessions_total\{proxy="engine-chat",server="([^"]+)"\} ([0-9]+)', line) for line in lines)
    return {match[1]: int(match[2]) for match in found if match}


#: Restart the server and wait until it is healthy; the seconds that this took. Run on its host.
RESTART = """
import subprocess, time, urllib.request
began = time.monotonic()
subprocess.run(["systemctl", "restart", "v100-chat"], check=True)
while True:
    try:
        urllib.request.urlopen("http://127.0.0.1:8000/health", timeout=5)
        break
    except OSError:
        time.sleep(0.01)
print(time.monotonic() - began)
"""


def restart_s(fleet: PlayFleet) -> float:
    """What one host needs at the least: restart and load, while the others serve. The median of three."""
    host = fleet.serving[0]
    control = "python3 -I -S -B /opt/v100ctl/gateway/gateway_control.py"
    on_host(fleet.front, f"{control} drain chat@{host.name} --limit-s 120")
    taken = [float(on_host(host, f"python3 -c {shlex.quote(RESTART)}")) for _ in range(3)]
    on_host(fleet.front, f"{control} open chat@{host.name} --limit-s 120")
    return statistics.median(taken)


def percentile_s(values: Sequence[float], percent: int) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def table(columns: Mapping[str, Sequence[Answer]]) -> Iterator[str]:
    """Latencies as rows of Markdown."""
    yield "| requests | | number | median | p99 | longest |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for kind, stream in (("streams, to the end", True), ("plain", False)):
        for when, answers in columns.items():
            taken = [answer.elapsed_s for answer in answers if answer.stream == stream]
            yield f"| {kind} | {when} | {len(taken)} | {row(taken)} |"
    for when, answers in columns.items():
        taken = [answer.first_s for answer in answers if answer.stream and answer.first_s]
        yield f"| streams, to the first word | {when} | {len(taken)} | {row(taken)} |"


def row(taken: Sequence[float]) -> str:
    return f"{statistics.median(taken):.3f} s | {percentile_s(taken, 99):.3f} s | {max(taken):.3f} s"


def roll_under_load(fleet: PlayFleet, ask: Ask, what: str, want: Callable[[], None], *arguments: str) -> dict[str, Any]:
    """One rollout with the command's own batches while clients ask; no request is lost. The report."""
    with Clients(fleet.address, ask) as clients:
        time.sleep(BEFORE_S)
        before = list(clients.answers)
        least_s = restart_s(fleet)
        began_s, asked_before = time.monotonic(), served(fleet)
        want()
        code, report, said = rollout(fleet, "--batch", "25%", "--settle", "10", *arguments)
        ended_s, asked_after = time.monotonic(), served(fleet)
    during = [answer for answer in clients.answers if began_s < answer.ended_s <= ended_s]
    assert code == 0, said
    assert not clients.problems, collections.Counter(clients.problems).most_common(5)
    assert len(report["hosts"]) == HOSTS
    assert [len(batch) for batch in report["batches"]] == [1, 2, 2]
    more = {name: asked_after[name] - asked_before[name] for name in asked_after}
    assert len(more) == HOSTS and min(more.values()) > 0, "a host got no request, so that nothing was shown about it"
    assert min(len(before), len(during)) > 100

    took_s = (datetime.fromisoformat(report["ended"]) - datetime.fromisoformat(report["started"])).total_seconds()
    floor_s = len(report["batches"]) * least_s
    steps: dict[str, list[float]] = {}
    for event in itertools.chain.from_iterable(host["events"] for host in report["hosts"].values()):
        steps.setdefault(event["step"], []).append(event["elapsed_s"])
    lines = [
        f"### {what}",
        f"{len(clients.answers)} requests, {len(clients.problems)} lost; each host got {min(more.values())} to "
        f"{max(more.values())} during the rollout",
        *table({"before": before, "during": during}),
        f"rollout {took_s:.0f} s ({ended_s - began_s:.0f} s with planning)",
        f"floor {floor_s:.1f} s: {len(report['batches'])} batches, restart and load {least_s:.2f} s; "
        f"ratio {took_s / floor_s:.1f}",
        *(f"step {step}: {min(taken):.1f} to {max(taken):.1f} s" for step, taken in steps.items()),
    ]
    print("\n" + "\n".join(lines), flush=True)
    return report


def provision(fleet: PlayFleet) -> None:
    done = v100ctl("provision", "-i", fleet.inventory, "--json")
    assert done.code == 0, done.err + done.out


@pytest.fixture(scope="class")
def stand_in(lab: Lab, lab_reporter: Reporter, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlayFleet]:
    with hosts_up(lab, lab_reporter, "five", HOSTS) as hosts:
        fleet = PlayFleet(tmp_path_factory.mktemp("stand-in"), hosts[1:], hosts[0])
        fleet.want()
        provision(fleet)
        yield fleet


@pytest.fixture(scope="class")
def engines(lab: Lab, lab_reporter: Reporter, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineFleet]:
    """A release that the cache lacks is compiled first, which takes the longest of all."""
    with hosts_up(lab, lab_reporter, "engines", HOSTS) as hosts:
        fleet = EngineFleet(tmp_path_factory.mktemp("engines"), hosts[1:], hosts[0])
        fleet.want_engine(build=OLD_BUILD, context_length=2048)
        provision(fleet)
        yield fleet


class TestStandIn:
    """The engine of a few lines, whose answers take as long as a steady server's: about a second each."""

    def test_a_restart_that_nobody_announces_is_seen_by_the_client(self, stand_in: PlayFleet) -> None:
        """What the others rest on: the client does say so when a request is cut off."""
        with Clients(stand_in.address, ask_stand_in) as clients:
            for host in stand_in.serving:
                time.sleep(2)
                on_host(host, "systemctl kill --signal SIGKILL v100-chat")
        assert clients.problems
        for _ in range(120):
            if set(stand_in.servers().values()) == {"UP"}:
                break
            time.sleep(0.5)
        stand_in.assert_all_serve([1024])

    def test_a_changed_context_length(self, stand_in: PlayFleet) -> None:
        roll_under_load(stand_in, ask_stand_in, "stand-in engine, context length", lambda: stand_in.want(context_length=2048))
        stand_in.assert_all_serve([2048])

    def test_a_new_release(self, stand_in: PlayFleet) -> None:
        before = releases(stand_in)
        new = SERVER.replace('"--fault"', '"--fault", "--new"')
        roll_under_load(
            stand_in, ask_stand_in, "stand-in engine, new release", lambda: stand_in.want(context_length=2048, server=new)
        )
        stand_in.assert_all_serve([2048])
        assert len(before) == len(releases(stand_in)) == 1
        assert before != releases(stand_in)


class TestEngine:
    """llama.cpp itself, on the processor."""

    def test_a_changed_context_length(self, engines: EngineFleet) -> None:
        roll_under_load(
            engines,
            ask_engine,
            f"llama.cpp {OLD_BUILD}, context length 2048 to 4096",
            lambda: engines.want_engine(build=OLD_BUILD, context_length=4096),
            *ENGINE_NOISE,
        )
        engines.assert_all_serve([2 * 4096])
        assert [name.split("-")[0] for name in releases(engines)] == [f"llama_cpp/b{OLD_BUILD}"]

    def test_a_new_release(self, engines: EngineFleet) -> None:
        report = roll_under_load(
            engines,
            ask_engine,
            f"llama.cpp {OLD_BUILD} to {NEW_BUILD}",
            lambda: engines.want_engine(build=NEW_BUILD, context_length=4096),
            *ENGINE_NOISE,
        )
        engines.assert_all_serve([2 * 4096])
        assert [name.split("-")[0] for name in releases(engines)] == [f"llama_cpp/b{NEW_BUILD}"]
        # It lay beside the old one before the first host was drained.
        events = [event for host in report["hosts"].values() for event in host["events"]]
        prepared = max(event["at"] for event in events if event["step"] == "prepare")
        assert prepared <= min(event["at"] for event in events if event["step"] == "drain")
