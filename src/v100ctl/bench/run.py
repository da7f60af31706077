"""Run a measurement: on the host of an instance, or from here against a URL."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from v100ctl import __version__
from v100ctl.bench import host_script
from v100ctl.bench.phases import Options, Phase, phases
from v100ctl.bench.report import Target, client_decode_tps, client_prefill_tps, document
from v100ctl.errors import V100ctlError
from v100ctl.examine import Examined
from v100ctl.plan.types import Instance
from v100ctl.plan.units import DIGEST_VARIABLE
from v100ctl.probe.run import run_python, shell_safe_json
from v100ctl.probe.session import Session

HOST_SCRIPT = Path(host_script.__file__)
#: Most time without a word from the server: a prompt of 256K tokens takes minutes on one card.
SILENCE_S = 1800.0
#: Slower than any server that is worth measuring: what bounds a phase that hangs.
SLOWEST_PREFILL_TPS, SLOWEST_DECODE_TPS = 20.0, 0.5

#: Does one phase: takes a request of :meth:`Target.to_request`, returns what the script saw.
Measure = Callable[[Mapping[str, Any]], Mapping[str, Any]]


class BenchError(V100ctlError):
    """What was to be measured cannot be, or what was measured is of no use."""


def target_of(state: Examined, name: str) -> Target:
    """The running instance of a host that was looked at.

    Raises:
        BenchError: the host could not be asked, has no such instance, or it does not run.
    """
    host = state.host.name
    if state.error is not None:
        raise state.error
    if state.plan is None or state.facts is None:
        raise BenchError(f"{host}: nothing is known of it", hint="`v100ctl plan` says more")
    instance = next((item for item in state.plan.instances if item.name == name), None)
    if instance is None:
        known = ", ".join(item.name for item in state.plan.instances)
        hint = f"it has {known}" if known else f"`v100ctl plan --limit {host}` says why"
        raise BenchError(f"{host} has no instance {name} in its plan", hint=hint)
    process = state.facts.process_of(instance.unit)
    if process is None:
        raise BenchError(f"{host}/{name} does not run", hint=f"`v100ctl provision {host}` starts it")
    url = urlsplit(instance.completion_url or instance.health_url)
    release = next((item for item in state.plan.releases if item.path == instance.release_path), None)
    model = next((item for item in state.plan.models if item.path == instance.model_path), None)
    pending = sorted({finding.id for finding in state.changes if finding.instance == name})
    spec = state.host.config.llm_server_instances[name]
    return Target(
        host=host,
        instance=name,
        url=f"{url.scheme}://{url.netloc}",
        api=api_of(instance),
        model=instance.model_alias,
        context_length=instance.context_length,
        parallel=instance.parallel,
        unit=instance.unit,
        keys_file=f"/etc/v100ctl/instances/{name}.keys",
        cards=tuple(uuid for uuid in instance.gpus if uuid.startswith("GPU-")),
        ceiling_tps=instance.decode_ceiling_tps,
        published=tuple(
            {"model": row.model, "card": row.card, "decode_tps": row.decode_tps, "source": row.source}
            for row in instance.published
        ),
        identity={
            "engine": instance.engine,
            "release": release.build_id if release else "",
            "model": instance.model_path,
            "model_sha256": model.sha256 if model else "",
            "digest": process.environ.get(DIGEST_VARIABLE, instance.digest),
            "settings": spec.settings.model_dump(mode="json", exclude_none=True),
            "pending_changes": pending,
        },
    )


def api_of(instance: Instance) -> str:
    """How the engine is talked to."""
    return instance.engine if instance.engine in ("llama_cpp", "vllm") else "openai"


def on_host(session: Session) -> Measure:
    """Measures with the script on the host, over one session."""

    def measure(request: Mapping[str, Any]) -> Mapping[str, Any]:
        answer = run_python(
            session,
            HOST_SCRIPT.read_bytes(),
            shell_safe_json(dict(request)),
            what="the measurement",
            timeout_s=_limit_s(request["phase"]),
        )
        found: dict[str, Any] = json.loads(answer)
        return found

    return measure


def from_here(key: str = "") -> Measure:
    """Measures from this machine. ``key``: for a server that wants one."""
    return lambda request: host_script.measure(dict(request), key)


def _limit_s(phase: Mapping[str, Any]) -> float:
    requests = int(phase.get("requests", 0))
    return (
        300
        + requests * int(phase.get("prompt_tokens") or 64) / SLOWEST_PREFILL_TPS
        + requests * int(phase.get("tokens", 0)) / SLOWEST_DECODE_TPS
    )


def expected(phase: Phase, answers: Mapping[str, Mapping[str, Any]]) -> float | None:
    """How long a phase will take by what was seen before it, in seconds; ``None`` where nothing was seen yet."""
    samples = [sample for answer in answers.values() for sample in answer["samples"] if not sample["error"]]
    decode = [speed for sample in samples if (speed := client_decode_tps(sample))]
    prefill = [speed for sample in samples if (speed := client_prefill_tps(sample))]
    if not decode or not prefill:
        return None
    # Long prompts are worked on fastest; short ones are mostly waiting.
    spent_s = phase.requests * phase.prompt_tokens / max(prefill)
    return spent_s + phase.requests * phase.tokens / statistics.median(decode)


def bench(
    target: Target,
    measure: Measure,
    options: Options,
    *,
    now: Callable[[], datetime] = lambda: datetime.now(UTC),
    note: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Measure a server and return the report.

    Args:
        target: What.
        measure: How one phase is done.
        options: How much.
        now: The clock for the report's date.
        note: Told which phase begins.

    Raises:
        BenchError: the server does not answer at all.
    """
    plan = phases(target.context_length, target.parallel, options)
    answers: dict[str, Mapping[str, Any]] = {}
    measured_at = now().strftime("%Y-%m-%dT%H:%M:%SZ")
    skipped = []
    for phase in plan:
        expected_s = expected(phase, answers)
        if expected_s is not None and expected_s > options.longest_phase_s:
            skipped.append({"phase": phase.id, "expected_s": round(expected_s)})
            continue
        note(phase.id)
        answers[phase.id] = measure(target.to_request(phase.to_request(), SILENCE_S))
        failed = [sample["error"] for sample in answers[phase.id]["samples"] if sample["error"]]
        if failed and phase.id == "warm-up":
            raise BenchError(f"{target.host}/{target.instance} does not answer: {failed[0]}", hint="nothing was measured")
    return document(target, plan, answers, skipped=skipped, measured_at=measured_at, version=__version__)
