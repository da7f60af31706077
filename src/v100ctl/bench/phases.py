"""What a measurement asks of a server, phase by phase. Pure: nothing is sent here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

#: Prompts that everybody's figures are given for; longer ones follow by doubling, up to the context.
PREFILL_TOKENS = (512, 2048, 8192, 16384)
#: How many prompts at once, and their length.
BATCHES = ((16, 512), (8, 2048))
#: Kept free of a context for the answer and for tokens that a server puts before a prompt.
CONTEXT_ROOM = 48
#: Tokens asked after a long prompt: enough to see how fast the answer is at that depth.
TOKENS_AT_DEPTH = 32
#: Prompts beyond this length are sent once: each takes a minute or more.
LONG_PROMPT = 16384


@dataclass(frozen=True)
class Options:
    """How much is measured.

    Attributes:
        runs: Decode runs, at least 2.
        tokens: Tokens of each.
        prompt_runs: Runs of each prompt length.
        max_prompt_tokens: The longest prompt; ``None``: the context.
        streams: Whether several requests at once are measured too.
        longest_phase_s: A phase that would take longer, by what was seen before it, is left out and named in the report.
        seed: The same seed asks the same.
    """

    runs: int = 10
    tokens: int = 256
    prompt_runs: int = 3
    max_prompt_tokens: int | None = None
    streams: bool = True
    longest_phase_s: float = 600.0
    seed: int = 1


@dataclass(frozen=True)
class Phase:
    """One call of the script on the host.

    Attributes:
        id: What the report calls it.
        kind: ``state`` looks at the cards, ``run`` sends requests.
        requests: How many; with ``together`` at the same time, else one after the other.
        prompt_tokens: 0: the short tasks.
        tokens: Of each answer.
    """

    id: str
    kind: str = "run"
    requests: int = 0
    prompt_tokens: int = 0
    tokens: int = 0
    together: bool = False
    seed: int = 1

    def to_request(self) -> dict[str, Any]:
        """As the script takes it."""
        return {
            "kind": self.kind,
            "requests": self.requests,
            "prompt_tokens": self.prompt_tokens,
            "tokens": self.tokens,
            "together": self.together,
            "seed": self.seed,
        }


def prompt_lengths(context_length: int, options: Options) -> list[int]:
    """The prompt lengths that fit: the usual ones, their doubles, and the longest that the context takes."""
    most = context_length - CONTEXT_ROOM
    if options.max_prompt_tokens is not None:
        most = min(most, options.max_prompt_tokens)
    lengths = [*PREFILL_TOKENS]
    while lengths[-1] * 2 <= most:
        lengths.append(lengths[-1] * 2)
    fitting = [length for length in lengths if length <= most]
    # The context's end is worth a run of its own where it is well beyond the last of them.
    if most >= 64 and (not fitting or (most > fitting[-1] * 1.2 and options.max_prompt_tokens is None)):
        fitting.append(most)
    return fitting


def stream_counts(parallel: int) -> list[int]:
    """1, 2, 4, 8 ... and ``parallel`` itself."""
    counts = [1]
    while counts[-1] * 2 <= parallel:
        counts.append(counts[-1] * 2)
    return counts if counts[-1] == parallel else [*counts, parallel]


def phases(context_length: int, parallel: int, options: Options) -> list[Phase]:
    """Everything that is asked, in order. The warm-up is asked and not counted.

    Args:
        context_length: Tokens that one request may use.
        parallel: Requests that the server works on at once.
        options: How much.
    """
    tokens = max(1, min(options.tokens, context_length - CONTEXT_ROOM - 64))
    plan = [
        Phase("state", kind="state"),
        Phase("warm-up", requests=2, tokens=min(64, tokens), seed=options.seed + 900),
        Phase("decode", requests=options.runs, tokens=tokens, seed=options.seed),
    ]
    for number, length in enumerate(prompt_lengths(context_length, options)):
        runs = options.prompt_runs if length <= LONG_PROMPT else 1
        answer = min(TOKENS_AT_DEPTH, context_length - length - 8)
        plan.append(
            Phase(
                f"prefill-{length}", requests=runs, prompt_tokens=length, tokens=answer, seed=options.seed + 1000 * (number + 1)
            )
        )
    if not options.streams:
        return plan
    for requests, length in BATCHES:
        if length <= context_length - CONTEXT_ROOM and length <= (options.max_prompt_tokens or length):
            batch = Phase(f"batch-{requests}x{length}", requests=requests, prompt_tokens=length, tokens=1, together=True)
            plan.append(batch)
    for streams in stream_counts(parallel):
        plan.append(Phase(f"streams-{streams}", requests=streams, tokens=tokens, together=True, seed=options.seed))
    return plan
