"""Serves one model in several configurations on a machine with a card, and measures each as `v100ctl bench` does.

    PYTHONPATH=src:. python3 -m tests.device.bench_on_a_card INPUTS OUT MODEL BUDGET_S

Servers are loaded some at a time, since loading takes longest, and measured one at a time while the others rest. It only reads
the card's settings. Standard library alone. What was measured is in ``OUT/NUMBER.json`` as soon as it is; with the time used up
the rest is left out and said.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from v100ctl.bench import host_script
from v100ctl.bench.phases import Options, Phase, phases
from v100ctl.bench.report import Target, document

#: So many of a model of 15 GB, with their caches, fit an H200 together.
AT_ONCE = 4
FIRST_PORT = 18000
LOAD_LIMIT_S = 120.0


def start(number: int, configuration: dict[str, Any], model: str, out: Path) -> subprocess.Popen[bytes]:
    """A server with the configuration's words, on a port of its own."""
    words = list(configuration["argv"])
    for name, value in (("--model", model), ("--port", str(FIRST_PORT + number))):
        words[words.index(name) + 1] = value
    for name in ("--threads", "--threads-batch"):
        if name in words:
            words[words.index(name) + 1] = str(min(8, os.cpu_count() or 8))
    (out / f"{number}.argv").write_text(json.dumps(words), encoding="utf-8")
    environment = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": "0", "CUDA_MODULE_LOADING": "LAZY"}
    with (out / f"{number}.log").open("wb") as log:
        return subprocess.Popen(words, env=environment, stdout=log, stderr=subprocess.STDOUT)


def await_health(number: int, process: subprocess.Popen[bytes]) -> bool:
    """Whether it serves before the limit."""
    deadline_s = time.monotonic() + LOAD_LIMIT_S
    while time.monotonic() < deadline_s and process.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{FIRST_PORT + number}/health", timeout=5) as answer:
                if answer.status == 200:
                    return True
        except OSError:
            pass
        time.sleep(0.5)
    return False


def asked(configuration: dict[str, Any]) -> list[Phase]:
    """The phases of a configuration."""
    context_length, parallel = configuration["context_length"], configuration["parallel"]
    if configuration["how"] == "whole":
        return phases(context_length, parallel, Options(runs=10, tokens=256, max_prompt_tokens=16384))
    options = Options(runs=10, tokens=128, prompt_runs=2, max_prompt_tokens=16384, streams=False)
    return [phase for phase in phases(context_length, parallel, options) if phase.id not in ("prefill-512", "prefill-8144")]


def measure(number: int, configuration: dict[str, Any], cards: tuple[str, ...], ours: set[str]) -> dict[str, Any]:
    """One report. ``ours``: processes that rest meanwhile and are no strangers."""
    target = Target(
        host="card",
        instance=str(number),
        url=f"http://127.0.0.1:{FIRST_PORT + number}",
        api="llama_cpp",
        model="made",
        context_length=configuration["context_length"],
        parallel=configuration["parallel"],
        cards=cards,
        identity={"engine": "llama_cpp", "model": configuration["name"], "settings": {}},
    )
    plan = asked(configuration)
    answers = {}
    at = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    for phase in plan:
        answer = host_script.measure(target.to_request(phase.to_request(), 300.0))
        answer["strangers"] = [words for words in answer["strangers"] if words.split()[0] not in ours]
        answers[phase.id] = answer
    return document(target, plan, answers, measured_at=at, version="0")


def main(inputs: Path, out: Path, model: str, budget_s: float) -> None:
    """See the module."""
    began_s = time.monotonic()
    configurations = json.loads((inputs / "configurations.json").read_text(encoding="utf-8"))
    cards = tuple(card["uuid"] for card in host_script.cards(())[:1])
    for first in range(0, len(configurations), AT_ONCE):
        wave = dict(enumerate(configurations))
        wave = {number: wave[number] for number in list(wave)[first : first + AT_ONCE] if not (out / f"{number}.json").exists()}
        if wave and time.monotonic() - began_s > budget_s - 40:
            print("no time left for", [item["name"] for item in wave.values()], flush=True)
            break
        servers = {number: start(number, item, model, out) for number, item in wave.items()}
        ours = {str(server.pid) for server in servers.values()}
        ready = {number: await_health(number, server) for number, server in servers.items()}
        print(f"{time.monotonic() - began_s:.0f} s: loaded {ready}", flush=True)
        for number, item in wave.items():
            if not ready[number]:
                continue
            if time.monotonic() - began_s > budget_s - 30:
                print("no time left for", item["name"], flush=True)
                continue
            report = measure(number, item, cards, ours)
            (out / f"{number}.json").write_text(json.dumps(report), encoding="utf-8")
            speed = report["decode"]["client_tps"]
            flags = [flag["id"] for flag in report["flags"]]
            print(f"{time.monotonic() - began_s:.0f} s: {item['name']}: {speed} {flags}", flush=True)
        for server in servers.values():
            server.kill()
        for server in servers.values():
            server.wait()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], float(sys.argv[4]))
