"""From what the script saw to the report: speeds, ceiling, and what is wrong with a run. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from v100ctl.bench.phases import Phase
from v100ctl.bench.stats import Summary

SCHEMA = "v100ctl/bench/1"
#: Bits of ``clocks_event_reasons.active`` (NVML) that mean that a card runs slower than it could.
THROTTLES = {
    0x8: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
}
#: The power limit holds the clocks down: that is what a limit is for, and no fault.
POWER_CAP = 0x4
#: A card that is used more than this before anything is asked is not ours alone.
IDLE_PERCENT = 10.0
#: The two clocks of one run are never the same to the digit; beyond this they measure different things.
CLOCKS_DIFFER = 0.05
#: One and the same character so often in a row is no language.
BROKEN_RUN = 32


@dataclass(frozen=True)
class Target:
    """What is measured, as the plan knows it.

    Attributes:
        cards: UUIDs; empty with the CPU backend.
        ceiling_tps: What memory bandwidth allows one stream; ``None`` where it is not known.
        identity: What tells this very server from another: ``engine``, ``release``, ``argv``, ``digest``, ``model`` ...
    """

    host: str
    instance: str
    url: str
    api: str
    model: str
    context_length: int
    parallel: int
    unit: str = ""
    keys_file: str = ""
    cards: tuple[str, ...] = ()
    ceiling_tps: float | None = None
    published: tuple[Mapping[str, Any], ...] = ()
    identity: Mapping[str, Any] = field(default_factory=dict)

    def to_request(self, phase: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """As the script takes it; holds no secret."""
        return {
            "url": self.url,
            "api": self.api,
            "model": self.model,
            "unit": self.unit,
            "keys_file": self.keys_file,
            "cards": list(self.cards),
            "timeout_s": timeout_s,
            "phase": dict(phase),
        }


def client_decode_tps(sample: Mapping[str, Any]) -> float | None:
    """Tokens a second between the first that came and the last, by the client's clock."""
    first_s, last_s = sample.get("first_s"), sample.get("last_s")
    after_first = int(sample.get("tokens") or 0) - int(sample.get("first_tokens") or 1)
    if first_s is None or last_s is None or last_s <= first_s or after_first < 1:
        return None
    return after_first / float(last_s - first_s)


def engine_decode_tps(sample: Mapping[str, Any]) -> float | None:
    """The same by the engine's own figures."""
    engine = sample.get("engine") or {}
    count, spent_ms = engine.get("predicted_n"), engine.get("predicted_ms")
    # As the engine itself: the first token comes out of the prompt's last step.
    return (count - 1) / spent_ms * 1000 if count and count > 1 and spent_ms else None


def first_token_s(sample: Mapping[str, Any]) -> float | None:
    """From the request to the first token."""
    if sample.get("first_s") is None:
        return None
    return float(sample["first_s"]) - float(sample["started_s"])


def client_prefill_tps(sample: Mapping[str, Any]) -> float | None:
    """Prompt tokens a second, all of the time to the first token counted."""
    spent_s = first_token_s(sample)
    count = sample.get("prompt_tokens")
    return count / spent_s if count and spent_s else None


def engine_prefill_tps(sample: Mapping[str, Any]) -> float | None:
    """The same by the engine's own figures."""
    engine = sample.get("engine") or {}
    count, spent_ms = engine.get("prompt_n"), engine.get("prompt_ms")
    return count / spent_ms * 1000 if count and spent_ms else None


def aggregate_tps(samples: Sequence[Mapping[str, Any]]) -> float | None:
    """Tokens of all streams over the time from the first request to the last token."""
    good = [sample for sample in samples if not sample.get("error") and sample.get("last_s") is not None]
    if not good:
        return None
    spent_s = max(sample["last_s"] for sample in good) - min(sample["started_s"] for sample in good)
    return sum(int(sample["tokens"]) for sample in good) / spent_s if spent_s > 0 else None


def aggregate_prefill_tps(samples: Sequence[Mapping[str, Any]]) -> float | None:
    """Prompt tokens of all requests over the time from the first request to the last first token."""
    good = [sample for sample in samples if not sample.get("error") and sample.get("first_s") is not None]
    if not good:
        return None
    spent_s = max(sample["first_s"] for sample in good) - min(sample["started_s"] for sample in good)
    return sum(int(sample["prompt_tokens"] or 0) for sample in good) / spent_s if spent_s > 0 else None


def energy_j(answer: Mapping[str, Any]) -> float | None:
    """What the cards took while the requests ran: mean power of each card times the time. ``None`` without samples."""
    samples = [sample for sample in answer.get("samples", ()) if sample.get("ended_s") is not None and "started_s" in sample]
    powers: dict[str, list[float]] = {}
    for state in answer.get("cards_during", ()):
        if state.get("power_w") is not None:
            powers.setdefault(state["uuid"], []).append(state["power_w"])
    if not samples or not powers:
        return None
    spent_s = max(sample["ended_s"] for sample in samples) - min(sample["started_s"] for sample in samples)
    return float(sum(statistics.fmean(values) for values in powers.values()) * spent_s)


def text_problem(text: str) -> str:
    """What is wrong with a text at first sight; empty where nothing is."""
    if not text.strip():
        return "no text came"
    visible = "".join(text.split())
    run, longest, last = 0, 0, ""
    for character in visible:
        run = run + 1 if character == last else 1
        longest, last = max(longest, run), character
    if longest >= BROKEN_RUN:
        return f"the same character {longest} times in a row"
    if text.count("\ufffd") * 10 > len(text):
        return "most of it is no valid text"
    return ""


def _values(samples: Iterable[Mapping[str, Any]], figure: Any) -> list[float]:
    return [value for sample in samples if not sample.get("error") and (value := figure(sample)) is not None]


def _summary(values: Sequence[float], digits: int = 2) -> dict[str, Any] | None:
    found = Summary.of(values)
    return found.to_json(digits) if found else None


def flags(target: Target, phases: Sequence[Phase], answers: Mapping[str, Mapping[str, Any]]) -> list[dict[str, str]]:
    """What makes a run not comparable with others, the worst first."""
    found: list[dict[str, str]] = []

    def flag(name: str, severity: str, reason: str) -> None:
        if all(item["id"] != name for item in found):
            found.append({"id": name, "severity": severity, "reason": reason})

    first = answers.get("state", {})
    for phase in phases:
        answer = answers.get(phase.id, {})
        if answer.get("busy_slots"):
            flag("busy-server", "error", f"before {phase.id} the server worked on {answer['busy_slots']} requests of others")
        for other in answer.get("strangers", ()):
            flag("busy-card", "error", f"another program computes on the card: process {other}")
        states = [*answer.get("cards_during", ()), *answer.get("cards_after", ())]
        for state in states:
            mask = state.get("throttle_mask") or 0
            reasons = [words for bit, words in THROTTLES.items() if mask & bit]
            if reasons:
                warm = "" if state.get("temperature_c") is None else f" at {state['temperature_c']:.0f} C"
                flag("throttled", "error", f"in {phase.id} the card slowed down: {', '.join(reasons)}{warm}")
            if mask & POWER_CAP:
                limit = "" if state.get("power_limit_w") is None else f" of {state['power_limit_w']:.0f} W"
                flag("power-capped", "info", f"in {phase.id} the power limit{limit} held the clocks down")
        for sample in answer.get("samples", ()):
            if sample.get("error"):
                flag("failed", "error", f"{phase.id}: {sample['error']}")
            elif phase.tokens > 1 and sample.get("tokens", 0) < phase.tokens:
                flag("short-answers", "warn", f"{phase.id}: {sample.get('tokens', 0)} tokens came of {phase.tokens} asked")
    for state in first.get("cards_before", ()):
        if (state.get("utilization_percent") or 0) > IDLE_PERCENT:
            flag("busy-card", "error", f"before anything was asked the card was used to {state['utilization_percent']:.0f}%")
    if not target.cards and first and first["load_1m"] > first["cpus"] / 2:
        flag(
            "busy-processors",
            "error",
            f"the host's load was {first['load_1m']:.1f} on {first['cpus']} processors before the start",
        )
    decode = answers.get("decode", {}).get("samples", ())
    for sample in decode:
        problem = "" if sample.get("error") else text_problem(sample.get("text", ""))
        if problem:
            flag("text", "error", f"an answer is no language: {problem}")
    client = _values(decode, client_decode_tps)
    engine = _values(decode, engine_decode_tps)
    if client and engine:
        ratio = statistics.median(engine) / statistics.median(client)
        if abs(ratio - 1) > CLOCKS_DIFFER:
            reason = f"the engine says {statistics.median(engine):.1f} tokens/s, the client saw {statistics.median(client):.1f}: "
            flag("clocks-differ", "warn", reason + "the client's figure counts")
    order = {"error": 0, "warn": 1, "info": 2}
    return sorted(found, key=lambda item: order[item["severity"]])


def document(
    target: Target,
    phases: Sequence[Phase],
    answers: Mapping[str, Mapping[str, Any]],
    *,
    measured_at: str,
    version: str,
    skipped: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """The report as JSON (``docs/reference/bench.schema.json``).

    Args:
        target: What was measured.
        phases: What was asked.
        answers: What the script saw, by the phase's id; a phase that was not reached is missing.
        measured_at: When, in UTC (ISO 8601).
        version: Of this tool.
        skipped: Phases that were left out, and how long they would have taken.
    """
    decode = answers.get("decode", {}).get("samples", ())
    client = _values(decode, client_decode_tps)
    drafted = [sample["engine"] for sample in decode if (sample.get("engine") or {}).get("draft_n")]
    energy = energy_j(answers.get("decode", {}))
    answered = sum(int(sample.get("tokens") or 0) for sample in decode)
    tps = statistics.median(client) if client else None
    prefill, batches, streams = [], [], []
    for phase in phases:
        answer = answers.get(phase.id)
        if answer is None:
            continue
        samples = [sample for sample in answer["samples"] if not sample.get("error")]
        if phase.id.startswith("prefill-") and samples:
            prefill.append(
                {
                    "prompt_tokens": samples[0].get("prompt_tokens") or phase.prompt_tokens,
                    "client_tps": _summary(_values(samples, client_prefill_tps)),
                    "engine_tps": _summary(_values(samples, engine_prefill_tps)),
                    "first_token_s": _summary(_values(samples, first_token_s), 4),
                    "decode_tps_after": _summary(_values(samples, client_decode_tps)),
                }
            )
        elif phase.id.startswith("batch-"):
            speed = aggregate_prefill_tps(samples)
            batches.append(
                {
                    "requests": phase.requests,
                    "prompt_tokens": phase.prompt_tokens,
                    "tps": None if speed is None else round(speed, 2),
                }
            )
        elif phase.id.startswith("streams-"):
            total, spent_j = aggregate_tps(samples), energy_j(answer)
            count = sum(int(sample.get("tokens") or 0) for sample in samples)
            streams.append(
                {
                    "streams": phase.requests,
                    "aggregate_tps": None if total is None else round(total, 2),
                    "stream_tps": _summary(_values(samples, client_decode_tps)),
                    "tokens_per_joule": round(count / spent_j, 4) if spent_j else None,
                }
            )
    found = flags(target, phases, answers)
    return {
        "schema": SCHEMA,
        "v100ctl_version": version,
        "measured_at": measured_at,
        "host": target.host,
        "instance": target.instance,
        "api": target.api,
        "context_length": target.context_length,
        "parallel": target.parallel,
        "identity": dict(target.identity),
        "comparable": all(item["severity"] != "error" for item in found),
        "flags": found,
        "skipped": [dict(item) for item in skipped],
        "decode": {
            "tokens": max((phase.tokens for phase in phases if phase.id == "decode"), default=0),
            "client_tps": _summary(client),
            "engine_tps": _summary(_values(decode, engine_decode_tps)),
            "samples_tps": [round(value, 3) for value in client],
            "first_token_s": _summary(_values(decode, first_token_s), 4),
            "draft_acceptance": (
                round(sum(item["draft_n_accepted"] for item in drafted) / sum(item["draft_n"] for item in drafted), 3)
                if drafted
                else None
            ),
            "tokens_per_joule": round(answered / energy, 4) if energy else None,
            "text_sha256": [str(sample["text_sha256"]) for sample in decode if "text_sha256" in sample],
        },
        "ceiling": {
            "decode_tps": None if target.ceiling_tps is None else round(target.ceiling_tps, 2),
            "share": round(tps / target.ceiling_tps, 3) if tps and target.ceiling_tps else None,
        },
        "published": [dict(row) for row in target.published],
        "prefill": prefill,
        "batched_prefill": batches,
        "streams": streams,
        "cards": _cards(answers, phases),
    }


def _cards(answers: Mapping[str, Mapping[str, Any]], phases: Sequence[Phase]) -> list[dict[str, Any]]:
    """Each card before, after, and at its extremes meanwhile."""
    seen = [answers[phase.id] for phase in phases if phase.id in answers]
    if not seen:
        return []
    found = []
    for before in seen[0].get("cards_before", ()):
        uuid = before["uuid"]
        after = next((state for state in seen[-1].get("cards_after", ()) if state["uuid"] == uuid), None)
        during = [state for answer in seen for state in answer.get("cards_during", ()) if state["uuid"] == uuid]
        found.append(
            {
                "uuid": uuid,
                "name": before["name"],
                "before": _state(before),
                "after": _state(after) if after else None,
                "during": {
                    "samples": len(during),
                    "max_temperature_c": _extreme(max, during, "temperature_c"),
                    "max_memory_temperature_c": _extreme(max, during, "memory_temperature_c"),
                    "min_sm_clock_mhz": _extreme(min, during, "sm_clock_mhz"),
                    "max_sm_clock_mhz": _extreme(max, during, "sm_clock_mhz"),
                    "max_power_w": _extreme(max, during, "power_w"),
                },
            }
        )
    return found


def _state(state: Mapping[str, Any]) -> dict[str, Any]:
    mask = state.get("throttle_mask")
    rest = {key: value for key, value in state.items() if key not in ("uuid", "name", "throttle_mask", "at_s")}
    return {
        **rest,
        "power_capped": None if mask is None else bool(mask & POWER_CAP),
        "throttles": [words for bit, words in THROTTLES.items() if (mask or 0) & bit],
    }


def _extreme(which: Callable[[Sequence[float]], float], states: Sequence[Mapping[str, Any]], key: str) -> float | None:
    values = [float(state[key]) for state in states if state.get(key) is not None]
    return which(values) if values else None
