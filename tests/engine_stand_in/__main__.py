"""The stand-in as a program that takes llama-server's words: `python -m tests.engine_stand_in --port N ...`.

Its speed follows from its words, with noise of each start: its words move it by what :data:`EFFECTS` says.
A quantised cache says other things.
"""

from __future__ import annotations

import itertools
import random
import sys
import threading

from tests.engine_stand_in import Behaviour, StandIn

#: Flag -> value -> gain.
EFFECTS = {
    "--ubatch-size": {"512": 0.04, "1024": 0.25, "2048": 0.08},
    "--flash-attn": {"on": 0.15},
    "--cache-type-k": {"q8_0": -0.1},
}
BASE_DECODE_TPS, BASE_PREFILL_TPS, NOISE = 300.0, 20000.0, 0.01


def behaviour(words: list[str]) -> Behaviour:
    """How fast a server with these words is."""
    given = dict(itertools.pairwise(words))
    gain = 1.0
    for flag, effects in EFFECTS.items():
        gain *= 1 + effects.get(given.get(flag, ""), 0.0)
    gain *= 1 + random.gauss(0, NOISE)
    skew = 0.02 if given.get("--cache-type-k") == "q8_0" else 0.0
    return Behaviour(decode_tps=BASE_DECODE_TPS * gain, prefill_tps=BASE_PREFILL_TPS * gain, skew=skew)


def main(words: list[str]) -> None:
    """Serves until it is ended."""
    if "--help" in words:
        return
    port = int(words[words.index("--port") + 1])
    with StandIn(behaviour(words), port):
        threading.Event().wait()


if __name__ == "__main__":
    main(sys.argv[1:])
