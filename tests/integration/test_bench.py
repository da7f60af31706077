"""``v100ctl bench`` over SSH, with a real engine on a real host: figures of both clocks, a history, a comparison."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from v100ctl import practice

from .hosts import Done, v100ctl

pytestmark = pytest.mark.slow

QUICK = ("--runs", "3", "--tokens", "32", "--max-prompt", "512", "--no-streams")


def test_a_running_instance_is_measured_and_compared(practiced: Done, tmp_path: Path) -> None:
    assert practiced.code == 0, practiced.err
    instance = f"{practice.HOST}/chat"
    places = ("-i", practice.inventory_path())
    environment = {"XDG_STATE_HOME": str(tmp_path)}

    measured = []
    for _ in range(2):
        done = v100ctl("bench", instance, *places, *QUICK, "--json", "--chart", tmp_path / "chat.svg", environment=environment)
        # On a loaded machine a report is kept and called not comparable, which is 1.
        assert done.code in (0, 1), done.err
        document = done.document
        measured.append(document["decode"])
        assert (done.code == 0) == document["comparable"]
        assert {flag["id"] for flag in document["flags"]} <= {"busy-processors", "clocks-differ"}, document["flags"]
        client, engine = document["decode"]["client_tps"], document["decode"]["engine_tps"]
        assert client["count"] == engine["count"] == 3
        assert client["median"] > 0
        (prompt,) = document["prefill"]
        assert prompt["prompt_tokens"] == pytest.approx(512, rel=0.05)
        assert document["streams"] == []
        assert document["cards"] == []
        assert document["identity"]["pending_changes"] == []
        assert "<svg" in (tmp_path / "chat.svg").read_text(encoding="utf-8")

    done = v100ctl("bench", instance, "--history", "--json", environment=environment)
    assert sorted(json.dumps(entry["decode"]) for entry in done.document) == sorted(map(json.dumps, measured))
    done = v100ctl("bench", instance, "--compare", "-2", "last", "--json", environment=environment)
    assert done.code == 0, done.err
    assert done.document["changes"]
    assert [line for line in done.document["differences"] if "release" in line or "model" in line] == []


def test_what_does_not_run_is_not_measured(practiced: Done, tmp_path: Path) -> None:
    assert practiced.code == 0, practiced.err
    done = v100ctl(
        "bench", f"{practice.HOST}/other", "-i", practice.inventory_path(), environment={"XDG_STATE_HOME": str(tmp_path)}
    )
    assert done.code == 1
    assert "it has chat" in done.err
