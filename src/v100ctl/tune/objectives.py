"""What is wanted of a server, as requests and as one number: higher is better. Pure; standard library only."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from v100ctl.bench.phases import CONTEXT_ROOM, Phase
from v100ctl.bench.report import THROTTLES, aggregate_tps, client_decode_tps, energy_j, text_problem

Name = Literal["latency", "throughput", "context", "energy"]
NAMES: tuple[Name, ...] = ("latency", "throughput", "context", "energy")
UNITS: Mapping[str, str] = {"latency": "tokens/s", "throughput": "tokens/s", "context": "tokens/s", "energy": "tokens/J"}

#: The likeliest tokens after every so many of a fixed text: what two settings are compared by, beside their speed.
QUALITY_TOKENS, QUALITY_EVERY, QUALITY_MOST = 512, 16, 40
#: The most mean divergence (Kullback-Leibler, nats) of the next token's distribution from that of the live settings. Our own
#: choice: twice what quantising the weights of an 8B model as Q5_K_M costs (0.0047 in the scores of eaddario/Watt-Tool-8B-GGUF,
#: where IQ3_M has 0.066).
QUALITY_LIMIT_NATS = 0.01
#: A probability that is not told is not smaller than this, so that one rare token does not decide.
_LEAST = 1e-6


@dataclass(frozen=True)
class Workload:
    """What is asked of a server in one trial.

    Attributes:
        runs: Requests of the one stream.
        tokens: Of each answer.
        streams: Requests at once, for the objectives that count all of them.
        prompt_tokens: Of each of those.
        rounds: How often those are sent.
    """

    runs: int = 5
    tokens: int = 128
    streams: int = 1
    prompt_tokens: int = 512
    rounds: int = 2

    def to_json(self) -> dict[str, int]:
        """For the log."""
        return dict(vars(self))


def phases(name: Name, work: Workload, context_length: int, *, fill: bool = False) -> list[Phase]:
    """The requests of one trial.

    Args:
        name: The objective.
        work: How much.
        context_length: Tokens that one request may use.
        fill: Also fill that context once: a context that is only promised serves nobody.
    """
    room = max(context_length - CONTEXT_ROOM, 1)
    tokens = max(1, min(work.tokens, room - 64))
    asked = [Phase("warm-up", requests=1, tokens=min(16, tokens), seed=901)]
    if fill:
        asked.append(Phase("fill", requests=1, prompt_tokens=room - 16, tokens=8, seed=77))
    if name in ("latency", "context"):
        return [*asked, Phase("decode", requests=work.runs, tokens=tokens, seed=1)]
    prompt_tokens = max(1, min(work.prompt_tokens, room - tokens))
    return asked + [
        Phase(
            f"streams-{number}",
            requests=work.streams,
            prompt_tokens=prompt_tokens,
            tokens=tokens,
            together=True,
            seed=1000 * (number + 1),
        )
        for number in range(work.rounds)
    ]


def requested_tokens(asked: Sequence[Phase]) -> tuple[float, float]:
    """Prompt tokens and answered tokens of a trial as one stream would take them, for an estimate of its time."""
    prompt = sum(phase.requests * (phase.prompt_tokens or 32) for phase in asked)
    return float(prompt), float(sum(phase.requests * phase.tokens for phase in asked))


def value(name: Name, answers: Mapping[str, Mapping[str, Any]]) -> float | None:
    """The number that a trial is judged by; ``None`` where it cannot be told."""
    if name in ("latency", "context"):
        speeds = [speed for sample in answers["decode"]["samples"] if (speed := client_decode_tps(sample))]
        return statistics.median(speeds) if speeds else None
    rounds = [answer for phase, answer in answers.items() if phase.startswith("streams-")]
    if name == "throughput":
        totals = [total for answer in rounds if (total := aggregate_tps(answer["samples"]))]
        return statistics.fmean(totals) if totals else None
    spent = [energy_j(answer) for answer in rounds]
    if not spent or any(joules is None for joules in spent):
        return None
    tokens = sum(int(sample["tokens"]) for answer in rounds for sample in answer["samples"] if not sample["error"])
    joules = math.fsum(item or 0.0 for item in spent)
    return tokens / joules if joules > 0 else None


def problem(answers: Mapping[str, Mapping[str, Any]]) -> str:
    """Why a trial does not count; empty where it does."""
    for phase, answer in answers.items():
        for sample in answer["samples"]:
            if sample["error"]:
                return f"{phase}: {sample['error']}"
        if answer.get("busy_slots"):
            return f"before {phase} the server worked on {answer['busy_slots']} requests of others"
        for other in answer.get("strangers", ()):
            return f"another program computes on the card: process {other}"
        for sample in answer["samples"] if phase not in ("warm-up", "fill") else ():
            wrong = text_problem(sample.get("text", ""))
            if wrong:
                return f"an answer is no language: {wrong}"
    return ""


def notes(answers: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """What is worth knowing of a trial that counts."""
    masks = [
        state.get("throttle_mask") or 0
        for answer in answers.values()
        for state in (*answer.get("cards_during", ()), *answer.get("cards_after", ()))
    ]
    return [f"the card slowed down: {words}" for bit, words in THROTTLES.items() if any(mask & bit for mask in masks)]


def quality_request(context_length: int) -> dict[str, Any]:
    """What is asked to compare two settings by what they say, as the script takes it."""
    tokens = max(QUALITY_EVERY, min(QUALITY_TOKENS, context_length - CONTEXT_ROOM))
    return {"kind": "likely", "prompt_tokens": tokens, "every": QUALITY_EVERY, "most": QUALITY_MOST, "seed": 7}


def divergence(base: Sequence[Mapping[str, float]], other: Sequence[Mapping[str, float]]) -> float:
    """The mean Kullback-Leibler divergence of ``other`` from ``base`` in nats, over the places of the text.

    Each place has the logarithms of the likeliest tokens' probabilities. What is not told counts as one token more.

    Raises:
        ValueError: they do not have the same places.
    """
    if not base or len(base) != len(other):
        raise ValueError(f"{len(base)} places against {len(other)}")
    total = 0.0
    for one, two in zip(base, other, strict=True):
        known = {token: math.exp(value) for token, value in one.items()}
        theirs = {token: math.exp(two[token]) for token in known if token in two}
        floor = min((math.exp(value) for value in two.values()), default=_LEAST)
        told = rest = 0.0
        for token, share in known.items():
            there = max(theirs.get(token, min(floor, 1e-3)), _LEAST)
            total += share * math.log(max(share, _LEAST) / there)
            told, rest = told + share, rest + there
        left, left_there = max(1 - told, _LEAST), max(1 - rest, _LEAST)
        total += left * math.log(left / left_there)
    return total / len(base)
