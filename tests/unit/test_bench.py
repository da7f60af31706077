"""Measuring a server: what is asked, what the clock says, what is called wrong, what is called a gain."""

from __future__ import annotations

import io
import json
import random
import xml.etree.ElementTree as ElementTree
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from tests.engine_stand_in import Behaviour, StandIn
from tests.unit.factory import AS_OF, applied_facts, make_config, make_facts, make_plan
from v100ctl.bench import history, host_script
from v100ctl.bench.chart import BLUE, chart
from v100ctl.bench.compare import compare
from v100ctl.bench.phases import Options, phases, prompt_lengths, stream_counts
from v100ctl.bench.picture import Picture
from v100ctl.bench.report import Target, text_problem
from v100ctl.bench.run import BenchError, bench, from_here, target_of
from v100ctl.bench.stats import Summary, change_interval, percentile, sign_flip_p
from v100ctl.cli import run
from v100ctl.errors import UnreachableError, V100ctlError
from v100ctl.examine import Examined, decide
from v100ctl.fleet import FleetHost

REFERENCE = Path(__file__).parents[2] / "docs/reference"
SMALL = Options(runs=3, tokens=24, prompt_runs=2, max_prompt_tokens=600)


def valid(document: Any, name: str) -> None:
    schema = json.loads((REFERENCE / f"{name}.schema.json").read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(json.loads(json.dumps(document)), schema, cls=jsonschema.Draft202012Validator)


def target(url: str, **changed: Any) -> Target:
    known = {"host": "h1", "instance": "chat", "api": "llama_cpp", "model": "m", "context_length": 2048, "parallel": 2}
    return Target(url=url, **{**known, **changed})


def measured(behaviour: Behaviour, *, key: str = "", options: Options = SMALL, **changed: Any) -> dict[str, Any]:
    """A report on a stand-in. How busy this machine is says nothing about it."""
    with StandIn(behaviour) as server:

        def measure(request: Any) -> Any:
            return {**from_here(key)(request), "load_1m": 0.0}

        document = bench(
            target(server.url, api=behaviour.api, **changed), measure, options, now=lambda: datetime(2026, 11, 30, tzinfo=UTC)
        )
    valid(document, "bench")
    return document


# --- what is asked ------------------------------------------------------------------------------------------------------------


def test_prompts_up_to_the_context() -> None:
    assert prompt_lengths(65536, Options()) == [512, 2048, 8192, 16384, 32768, 65488]
    assert prompt_lengths(8192, Options()) == [512, 2048, 8144]
    assert prompt_lengths(300, Options()) == [252]
    assert prompt_lengths(65536, Options(max_prompt_tokens=4000)) == [512, 2048]
    assert prompt_lengths(65536, Options(max_prompt_tokens=100)) == [100]


def test_streams_up_to_the_slots() -> None:
    assert [stream_counts(count) for count in (1, 2, 6, 8)] == [[1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8]]


@given(st.integers(128, 300000), st.integers(1, 32))
def test_no_request_exceeds_the_context(context: int, parallel: int) -> None:
    for phase in phases(context, parallel, Options()):
        assert phase.prompt_tokens + phase.tokens <= context
        assert phase.kind == "state" or (phase.requests >= 1 and phase.tokens >= 1)


def test_prompts_are_the_same_each_time_and_differ_by_seed() -> None:
    assert host_script.passage(1, 500) == host_script.passage(1, 500)
    assert host_script.passage(1, 500)[:20] != host_script.passage(2, 500)[:20]
    assert len(host_script.passage(3, 5000)) >= 5000


def test_two_measurements_ask_the_same_and_use_no_cache() -> None:
    first, second = Behaviour(), Behaviour()
    measured(first)
    measured(second)
    key = lambda body: json.dumps(body, sort_keys=True)  # noqa: E731 - one line
    assert sorted(map(key, first.asked)) == sorted(map(key, second.asked))
    assert all(not body["cache_prompt"] and body["temperature"] == 0 and body["ignore_eos"] for body in first.asked)
    lengths = [len(body["prompt"]) for body in first.asked]
    assert lengths.count(512) == 2 + 16


# --- what the clock says ------------------------------------------------------------------------------------------------------


def test_speeds_of_a_known_server() -> None:
    document = measured(
        Behaviour(decode_tps=200, prefill_tps=20000), options=Options(runs=3, tokens=40, prompt_runs=2, max_prompt_tokens=600)
    )
    # It is never faster than it was told to be; how much slower is up to this machine.
    assert 20 < document["decode"]["client_tps"]["median"] <= 210
    assert document["decode"]["engine_tps"]["count"] == 3
    assert [row["prompt_tokens"] for row in document["prefill"]] == [512]
    assert 0 < document["prefill"][0]["client_tps"]["median"] <= 20000
    assert document["prefill"][0]["first_token_s"]["median"] >= 512 / 20000
    assert [row["requests"] for row in document["batched_prefill"]] == [16]
    assert [row["streams"] for row in document["streams"]] == [1, 2]
    assert document["comparable"] and document["cards"] == []


def test_an_engine_that_leaves_out_its_drafts_is_not_believed() -> None:
    document = measured(
        Behaviour(boast=3.0, drafts=20, decode_tps=150), options=Options(runs=3, tokens=40, max_prompt_tokens=100, prompt_runs=1)
    )
    assert "clocks-differ" in [item["id"] for item in document["flags"]]
    assert document["decode"]["engine_tps"]["median"] > 1.2 * document["decode"]["client_tps"]["median"]
    assert document["decode"]["draft_acceptance"] == 0.5
    assert document["comparable"]


def test_the_ceiling_is_shown_with_the_share_that_was_reached() -> None:
    document = measured(Behaviour(), ceiling_tps=50.0, published=({"model": "m", "card": "c", "decode_tps": 1.0, "source": "s"},))
    assert document["ceiling"]["decode_tps"] == 50.0
    assert document["ceiling"]["share"] == pytest.approx(document["decode"]["client_tps"]["median"] / 50, rel=0.01)


def test_other_servers_are_asked_in_their_own_way() -> None:
    for api, tokenizer in (("vllm", True), ("openai", False)):
        behaviour = Behaviour(api=api, tokenizer=tokenizer)
        document = measured(behaviour)
        assert document["decode"]["engine_tps"] is None
        assert document["decode"]["client_tps"]["count"] == 3
        assert document["comparable"], document["flags"]
        assert all(body["model"] == "m" for body in behaviour.asked)
        assert ("ignore_eos" in behaviour.asked[0]) == (api == "vllm")
        assert isinstance(behaviour.asked[-1]["prompt"], list) == tokenizer


def test_the_key_is_presented_and_nowhere_in_the_report(tmp_path: Path) -> None:
    behaviour = Behaviour(key="sk-very-secret")
    assert "sk-very-secret" not in json.dumps(measured(behaviour, key="sk-very-secret"))
    assert set(behaviour.keys) == {"Bearer sk-very-secret"}
    keys = tmp_path / "chat.keys"
    keys.write_text("\nsk-very-secret\nother\n")
    assert host_script.first_key(str(keys)) == "sk-very-secret"
    assert host_script.first_key(str(tmp_path / "none")) == ""


def test_without_its_key_nothing_is_measured() -> None:
    with pytest.raises(BenchError, match="Invalid API Key"):
        measured(Behaviour(key="sk-very-secret"))


def test_what_would_take_too_long_is_left_out_and_named() -> None:
    options = Options(runs=2, tokens=8, prompt_runs=2, max_prompt_tokens=600, longest_phase_s=0.5)
    document = measured(Behaviour(prefill_tps=1500), options=options)
    assert {item["phase"] for item in document["skipped"]} >= {"batch-16x512"}
    assert document["batched_prefill"] == []


# --- what is wrong ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("behaviour", "flag", "comparable"),
    [
        (Behaviour(busy=1), "busy-server", False),
        (Behaviour(words=("!",)), "text", False),
        (Behaviour(words=()), "text", False),
        (Behaviour(stops_after=5), "short-answers", True),
    ],
    ids=["busy", "broken", "mute", "short"],
)
def test_flags(behaviour: Behaviour, flag: str, comparable: bool) -> None:
    document = measured(behaviour, options=Options(runs=2, tokens=40, max_prompt_tokens=100, prompt_runs=1, streams=False))
    assert flag in [item["id"] for item in document["flags"]]
    assert document["comparable"] is comparable


def test_texts() -> None:
    assert text_problem("The river is wide.\n" * 4) == ""
    assert "no text" in text_problem(" \n")
    assert "times in a row" in text_problem("!" * 200)
    assert "times in a row" not in text_problem("| --- | --- |\n" * 20)
    assert "valid" in text_problem("\ufffd\ufffda" * 10)


SMI = """#!/bin/sh
case "$1" in
--query-gpu=*) echo "GPU-1, Tesla V100-SXM2-16GB, 61, 66, 1380, 1530, 877, 181.20, 300.00, $(cat {folder}/use), 15000, {mask}" ;;
--query-compute-apps=*) echo "GPU-1, {pid}, python" ;;
esac
"""


@pytest.mark.parametrize(
    ("mask", "use", "pid", "flag", "comparable"),
    [
        ("0x0000000000000000", "0", 4194305, "", True),
        ("0x0000000000000004", "0", 4194305, "power-capped", True),
        ("0x0000000000000048", "0", 4194305, "throttled", False),
        ("[Not Supported]", "0", 4194305, "", True),
        ("0x0000000000000000", "97", 4194305, "busy-card", False),
        ("0x0000000000000000", "0", 1, "busy-card", False),
    ],
    ids=["well", "capped", "hot", "silent", "used", "stranger"],
)
def test_cards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mask: str, use: str, pid: int, flag: str, comparable: bool
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(SMI.format(folder=tmp_path, mask=mask, pid=pid))
    program.chmod(0o755)
    (tmp_path / "use").write_text(use)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(host_script.Sampler.__init__, "__defaults__", (0.01,))
    monkeypatch.setattr(host_script, "REST_WAIT_S", 0.01)
    options = Options(runs=2, tokens=40, max_prompt_tokens=100, prompt_runs=1, streams=False)
    document = measured(Behaviour(decode_tps=400), options=options, cards=("GPU-1",))
    # On a busy machine the two clocks of so short an answer may differ.
    assert [item["id"] for item in document["flags"] if item["id"] != "clocks-differ"] == ([flag] if flag else [])
    assert document["comparable"] is comparable
    (card,) = document["cards"]
    assert card["name"] == "Tesla V100-SXM2-16GB" and card["before"]["temperature_c"] == 61
    assert card["during"]["samples"] > 0 and card["during"]["max_power_w"] == 181.2
    assert card["before"]["power_capped"] is (None if mask.startswith("[") else mask.endswith("4"))
    assert document["decode"]["tokens_per_joule"] > 0


def test_a_card_is_given_time_to_come_to_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = iter([80.0, 30.0, 0.0])
    waited: list[float] = []
    monkeypatch.setattr(host_script, "cards", lambda wanted: [{"utilization_percent": next(seen)}])
    monkeypatch.setattr(host_script.time, "sleep", waited.append)
    host_script.await_rest(["GPU-1"])
    assert len(waited) == 2


# --- gains and noise ----------------------------------------------------------------------------------------------------------


def test_percentiles() -> None:
    assert [percentile([1, 2, 3, 4, 5], percent) for percent in (0, 5, 50, 95, 100)] == [1, 1.2, 3, 4.8, 5]
    assert percentile([7.0], 5) == 7.0
    assert Summary.of([]) is None


def test_equal_servers_are_seldom_told_apart() -> None:
    dice = random.Random(5)
    claimed = 0
    for trial in range(100):
        one, two = ([dice.gauss(60, 0.6) for _ in range(10)] for _ in range(2))
        _, low, high = change_interval(one, two, seed=trial)
        claimed += low > 0 or high < 0
    assert claimed <= 5


def test_a_real_gain_is_found() -> None:
    dice = random.Random(6)
    found = 0
    for trial in range(20):
        one, two = ([dice.gauss(speed, 0.6) for _ in range(10)] for speed in (60.0, 62.4))
        change, low, high = change_interval(one, two, seed=trial)
        found += low > 0
        assert low <= change <= high
    assert found >= 19


def test_signs() -> None:
    assert sign_flip_p([1, 1, 1, 1, 1]) == 1 / 32
    assert sign_flip_p([1, -1]) == 0.75
    assert sign_flip_p([0, 0, 0]) == 1.0


def test_compare_reports() -> None:
    before, after = measured(Behaviour(decode_tps=30)), measured(Behaviour(decode_tps=600))
    before["identity"] = {"settings": {"flash_attention": "off"}, "release": "a"}
    after["identity"] = {"settings": {"flash_attention": "on"}, "release": "a"}
    found = compare(before, after)
    valid(found, "bench-compare")
    assert found["differences"] == ["flash_attention: off -> on"]
    assert found["changes"][0]["verdict"] == "faster"
    assert compare(after, before)["changes"][0]["verdict"] == "slower"
    assert compare(before, before)["changes"][0]["verdict"] in ("same", "unsure")


# --- reports ------------------------------------------------------------------------------------------------------------------


def test_history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    document = measured(Behaviour())
    paths = [history.save({**document, "parallel": number}) for number in range(1, 13)]
    assert history.entries("h1", "chat") == paths
    assert history.find("last", "h1", "chat")["parallel"] == 12
    assert history.find("-2", "h1", "chat")["parallel"] == 11
    assert history.find(paths[0].stem, "h1", "chat")["parallel"] == 1
    assert history.find(str(paths[3]), None, None)["parallel"] == 4
    for wrong in ("-99", "yesterday"):
        with pytest.raises(V100ctlError, match="no measurement"):
            history.find(wrong, "h1", "chat")
    with pytest.raises(V100ctlError, match="no file"):
        history.find("last", None, None)
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(V100ctlError, match="no report"):
        history.find(str(tmp_path / "x.json"), None, None)
    assert history.folder_of("../../etc", "a/b").is_relative_to(tmp_path)


def test_the_picture_is_whole() -> None:
    document = measured(
        Behaviour(), ceiling_tps=70.0, published=({"model": "<m>", "card": "c", "decode_tps": 31.0, "source": "s"},)
    )
    picture = ElementTree.fromstring(chart(document).to_svg())  # noqa: S314 - our own
    words = " ".join(element.text or "" for element in picture.iter("{http://www.w3.org/2000/svg}text"))
    assert "memory bandwidth allows 70.0" in words and "published: 31" in words and "512" in words
    empty = {**document, "decode": {**document["decode"], "samples_tps": [], "client_tps": None}, "prefill": [], "streams": []}
    ElementTree.fromstring(chart(empty).to_svg())  # noqa: S314 - our own
    # The runs are blue; without figures there is the frame.
    assert BLUE in colours_of(chart(document))
    assert BLUE not in colours_of(chart(empty))


def colours_of(picture: Picture) -> set[Any]:
    """The colours of its bitmap, which is twice as large."""
    with Image.open(io.BytesIO(picture.to_png())) as bitmap:
        assert bitmap.size == (2 * picture.width, 2 * picture.height)
        return {"#{:02x}{:02x}{:02x}".format(*colour) for _, colour in bitmap.getcolors(1 << 24) or ()}


def test_what_is_measured_is_the_plan_s_instance() -> None:
    plan = make_plan()
    state = decide(FleetHost("h1", {}, make_config()), None, applied_facts(plan), as_of=AS_OF)
    (instance,) = plan.instances
    found = target_of(state, instance.name)
    assert (found.unit, found.model, found.api) == (instance.unit, instance.model_alias, "llama_cpp")
    assert instance.completion_url.startswith(found.url)
    assert found.identity["pending_changes"] == []
    assert found.keys_file == f"/etc/v100ctl/instances/{instance.name}.keys"
    with pytest.raises(BenchError, match="no instance other"):
        target_of(state, "other")
    bare = decide(FleetHost("h1", {}, make_config()), None, make_facts(), as_of=AS_OF)
    with pytest.raises(BenchError, match="does not run"):
        target_of(bare, instance.name)
    with pytest.raises(UnreachableError):
        target_of(Examined(FleetHost("h1", {}, make_config()), error=UnreachableError("no route")), instance.name)


# --- the command --------------------------------------------------------------------------------------------------------------


def test_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("V100CTL_API_KEY", "sk-very-secret")
    monkeypatch.setattr(host_script.os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    with StandIn(Behaviour(key="sk-very-secret")) as server:
        words = ["bench", "--url", server.url, "--context", "1024", "--quick", "--ceiling", "9000"]
        assert run([*words, "--chart", str(tmp_path / "c.svg")]) == 0
        assert (tmp_path / "c.svg").read_text(encoding="utf-8").startswith("<svg")
        table = capsys.readouterr().out
        # What is no picture is told before anything is measured.
        assert run([*words, "--chart", str(tmp_path / "c.gif")]) == 64
        assert "end it in `.svg` or `.png`" in capsys.readouterr().err
        assert run([*words, "--json", "--chart", str(tmp_path / "c.png")]) == 0
        assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")
        document = json.loads(capsys.readouterr().out)
    valid(document, "bench")
    assert "sk-very-secret" not in table
    assert "one stream" in table and "prompt of" in table and "of it reached" in table
    assert (tmp_path / "c.svg").read_text().startswith("<svg")
    name = f"{document['host']}/{document['instance']}"
    assert run(["bench", name, "--history"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2
    assert run(["bench", name, "--compare", "-2", "last", "--json"]) == 0
    valid(json.loads(capsys.readouterr().out), "bench-compare")
    assert run(["bench", name, "--compare", "-2", "last"]) == 0
    assert "decode" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words",
    [
        ["bench"],
        ["bench", "h1/chat", "--url", "http://x"],
        ["bench", "--history"],
        ["bench", "--url", "ftp://x"],
        ["bench", "--url", "x"],
    ],
)
def test_wrong_usage(words: list[str]) -> None:
    assert run(words) == 64


def test_instances_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = {"path": "/srv/m.gguf", "sha256": "0" * 64}
    hosts = {name: {"llm_server_instances": {"chat": {"model": model}}} for name in ("a", "b")}
    hosts["b"]["llm_server_instances"]["code"] = {"model": model, "port": 8001}
    inventory = tmp_path / "hosts.yml"
    inventory.write_text(json.dumps({"all": {"hosts": hosts}}))
    for words, said in (
        ("chat", "2 hosts have an instance chat"),
        ("c/chat", "no host c"),
        ("a/code", "a has no instance code"),
        ("a", "is a host"),
        ("nobody", "no instance nobody"),
    ):
        assert run(["bench", words, "-i", str(inventory)]) == 1
        assert said in capsys.readouterr().err
