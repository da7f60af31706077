"""Who looks after servers that run: the plan of it, the watchdog's judgement, and the nightly restart step by step."""

from __future__ import annotations

import importlib.util
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from v100ctl.catalog import load_catalog
from v100ctl.compare import compare
from v100ctl.errors import InventoryError
from v100ctl.fleet import NightlyRestart
from v100ctl.plan import HostPlan, gateway, probe_request, upkeep
from v100ctl.probe import host_script

from .factory import applied_facts, make_config, make_facts, make_plan

FILES = Path(__file__).resolve().parents[2] / "roles/llm_server/files"


def _module(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, FILES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


watch, nightly = _module("watch"), _module("nightly")


def decided(instance: dict[str, Any] | None = None, **variables: Any) -> HostPlan:
    return make_plan(config=make_config(instance or {}, **variables))


def settings(plan: HostPlan) -> dict[str, Any]:
    text = next(file.content for file in plan.files if file.path == upkeep.SETTINGS)
    found: dict[str, Any] = json.loads(text)["instances"]["chat"]
    return found


def paths(plan: HostPlan) -> set[str]:
    return {file.path for file in plan.files}


NIGHTLY: dict[str, Any] = {"nightly_restart": {"enabled": True, "window": "03:00-05:00"}}

# --- the plan -----------------------------------------------------------------------------------------------------------------


def test_an_engine_that_shows_its_progress_is_watched() -> None:
    plan = decided()
    assert plan.upkeep.units == (upkeep.WATCHDOG_UNIT,)
    assert settings(plan)["progress"]["url"] == "http://127.0.0.1:8000/slots"
    # On the processor one step may take long.
    assert settings(plan)["watchdog"] == {"limit_s": upkeep.PROCESSOR_LIMIT_S}
    assert settings(decided({"watchdog": {"limit_s": 45}}))["watchdog"] == {"limit_s": 45}
    assert upkeep.CRON_FILE not in paths(plan)
    assert set(upkeep.FILES) <= set(probe_request(make_config()).files)


@pytest.mark.parametrize("instance", [{"watchdog": {"enabled": False}}, {"extra_args": ["--no-slots"]}])
def test_one_that_does_not_or_shall_not_is_not(instance: dict[str, Any]) -> None:
    plan = decided(instance)
    assert plan.upkeep.units == ()
    assert upkeep.SETTINGS not in paths(plan)


def test_keys_are_named_by_their_file() -> None:
    plan = decided({**NIGHTLY, "api_keys": ["a-secret-key-of-some-length"]})
    assert settings(plan)["keys_file"] == "/etc/v100ctl/instances/chat.keys"
    assert "a-secret-key" not in "".join(file.content for file in plan.files if file.path in upkeep.FILES)


def test_what_looks_after_a_server_restarts_none() -> None:
    assert decided().instances[0].digest == decided({**NIGHTLY, "watchdog": {"limit_s": 77}}).instances[0].digest


def test_a_nightly_restart_is_cron_s_or_a_timer_s() -> None:
    plan = decided(NIGHTLY, gateway_placement="host")
    assert "cron" in plan.packages
    assert plan.upkeep.units == (upkeep.WATCHDOG_UNIT, "cron.service")
    line = next(file.content for file in plan.files if file.path == upkeep.CRON_FILE).splitlines()[-1]
    minute, hour = (int(part) for part in line.split()[:2])
    assert 3 * 60 <= hour * 60 + minute < 5 * 60
    assert line.endswith(" * * * root systemctl start --no-block v100ctl-nightly@chat.service")
    zoned = decided({"nightly_restart": {"time_zone": "Europe/Berlin"}}, gateway_placement="host")
    assert "cron" not in zoned.packages and "tzdata" in zoned.packages
    assert zoned.upkeep.units == (upkeep.WATCHDOG_UNIT, "v100ctl-nightly@chat.timer")
    assert zoned.upkeep.calendars[0].endswith(":00 Europe/Berlin")
    timer = next(file.content for file in zoned.files if file.path.endswith(".timer"))
    assert f"OnCalendar={zoned.upkeep.calendars[0]}\n" in timer
    # Another cron does as well.
    other = make_facts(packages={"installed": {"cronie": "1"}})
    assert make_plan(facts=other, config=make_config(NIGHTLY)).upkeep.units == (upkeep.WATCHDOG_UNIT,)


def test_a_nightly_restart_may_write_where_the_gateway_keeps_who_is_out() -> None:
    """What is read-only to it cannot be drained: it would cut the requests that run."""
    unit = next(file.content for file in decided(NIGHTLY, gateway_placement="host").files if upkeep.NIGHTLY_UNIT in file.path)
    writable = next(line for line in unit.splitlines() if line.startswith("ReadWritePaths=")).partition("=")[2].split()
    assert f"-{gateway.RUNTIME_FOLDER}" in writable


def test_hosts_are_spread_over_the_window_and_stay_where_they_are() -> None:
    wanted = NightlyRestart(window="23:30-01:30")
    minutes = [hour * 60 + minute for hour, minute in (upkeep.begins_at(f"gpu{number}", wanted, 0) for number in range(400))]
    assert all(minute >= 23 * 60 + 30 or minute < 90 for minute in minutes)
    quarters = {(minute - (23 * 60 + 30)) % 1440 // 15 for minute in minutes}
    assert quarters == set(range(8))
    assert upkeep.begins_at("gpu1", wanted, 0) == upkeep.begins_at("gpu1", wanted, 0) != upkeep.begins_at("gpu1", wanted, 1)


@pytest.mark.parametrize("window", ["3-5", "03:00-03:00", "24:00-01:00", "03:00"])
def test_windows_that_are_none(window: str) -> None:
    with pytest.raises(InventoryError, match="window"):
        make_config({"nightly_restart": {"window": window}})


def test_a_time_zone_is_a_name_and_nothing_more() -> None:
    with pytest.raises(InventoryError, match="time_zone"):
        make_config({"nightly_restart": {"time_zone": "UTC\nUser=root"}})


def test_drift_of_it_is_found_and_what_is_wanted_no_more_goes() -> None:
    plan = decided(NIGHTLY, gateway_placement="host")
    front = {"load_state": "loaded", "active_state": "active", "unit_file_state": "enabled"}
    units = {"v100ctl-gateway.service": front}
    facts = applied_facts(plan, units=units, gateway={"digest": plan.gateway.digest if plan.gateway else ""})
    assert compare(plan, facts) == ()
    stopped = applied_facts(
        plan, units={upkeep.WATCHDOG_UNIT: {"active_state": "inactive"}, "cron.service": {"unit_file_state": "disabled"}}
    )
    assert {f"unit.inactive:{upkeep.WATCHDOG_UNIT}", "unit.disabled:cron.service"} <= {item.id for item in compare(plan, stopped)}
    less = make_plan(facts=facts, config=make_config({"watchdog": {"enabled": False}}, gateway_placement="host"))
    assert set(less.upkeep.absent_files) == set(upkeep.FILES)
    assert less.upkeep.absent_units == (upkeep.WATCHDOG_UNIT,)
    assert f"file.unwanted:{upkeep.CRON_FILE}" in {item.id for item in compare(less, facts)}
    # Somebody else's file of that name is left alone.
    foreign = make_facts(files={upkeep.CRON_FILE: {"kind": "file", "content": "# mine\n"}})
    assert make_plan(facts=foreign).upkeep.absent_files == ()


def test_the_probe_knows_the_units() -> None:
    assert upkeep.WATCHDOG_UNIT in host_script.OTHER_UNITS
    assert {row.cron_unit for row in load_catalog().distributions} <= set(host_script.OTHER_UNITS)
    assert host_script.UNIT_NAME.fullmatch("v100ctl-nightly@chat-2.timer")
    assert not host_script.UNIT_NAME.fullmatch("v100ctl-nightly@.service")


# --- the watchdog -------------------------------------------------------------------------------------------------------------


class Clock:
    """Time that passes only when it is told to."""

    def __init__(self) -> None:
        self.now_s = 10_000.0

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


def judged(looks: list[Any], *, step_s: float = 10.0, limit_s: float = 60.0) -> list[int]:
    """Which looks, taken ``step_s`` apart from a start on, find the server wedged."""
    judge, found = watch.Judge(limit_s, 1000.0), []
    for number, seen in enumerate(looks):
        if judge.look(number * step_s, "start", 0.0, seen):
            found.append(number)
            judge.reset()
    return found


def busy(mark: object) -> Any:
    return watch.Seen("busy", str(mark), "1 request")


IDLE, SILENT, LOADING = watch.Seen("idle"), watch.Seen("silent"), watch.Seen("loading")


def test_a_server_that_stands_still_is_wedged_once_the_limit_is_over() -> None:
    assert judged([IDLE, *[busy(7)] * 20]) == [7, 14]
    assert judged([IDLE, *[SILENT] * 8]) == [6]


@pytest.mark.parametrize(
    "looks",
    [
        # It rests.
        [IDLE] * 100,
        # A long prompt, read in steps that each take most of the limit; and a full queue, which is nothing else.
        [busy(number // 6) for number in range(200)],
        # It loads, with and without an answer meanwhile, for longer than the limit.
        [*[LOADING] * 90, IDLE],
        [*[SILENT] * 90, IDLE],
        # It answers now and then.
        [IDLE, *[SILENT, SILENT, SILENT, SILENT, busy(1), SILENT, SILENT, busy(2)] * 5],
        # Nobody can tell.
        [watch.Seen("blind")] * 100,
    ],
)
def test_one_that_gets_on_is_left_alone(looks: list[Any]) -> None:
    assert judged(looks) == []


def test_a_load_that_never_ends_is_wedged_too_and_each_start_counts_anew() -> None:
    assert judged([LOADING] * 106) == [100]
    judge = watch.Judge(60.0, 1000.0)
    for number in range(20):
        assert not judge.look(number * 10.0, f"start {number // 5}", number // 5 * 50.0, busy(1))


def test_one_late_look_on_a_busy_host_is_no_evidence() -> None:
    assert judged([IDLE, *[busy(1)] * 4], step_s=500.0) == [4]


def test_slots_tell_progress_and_not_what_was_asked() -> None:
    slots = [{"id": 0, "is_processing": True, "n_prompt_tokens_processed": 512, "params": {"seed": 1}}, {"id": 1}]
    first = watch.read_slots(json.dumps(slots).encode())
    slots[0] = {**slots[0], "params": {"seed": 2}}
    same = watch.read_slots(json.dumps(slots).encode())
    slots[0] = {**slots[0], "n_prompt_tokens_processed": 1024}
    later = watch.read_slots(json.dumps(slots).encode())
    assert first.state == "busy" and first.mark == same.mark != later.mark
    assert watch.read_slots(b'[{"id": 0, "is_processing": false}]').state == "idle"
    with pytest.raises(ValueError, match="slots"):
        watch.read_slots(b'{"error": {}}')


METRICS = """# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{model_name="chat"}} {running}
vllm:num_requests_waiting{{model_name="chat"}} 0.0
vllm:generation_tokens_total{{model_name="chat"}} {tokens}
"""


def test_metrics_tell_progress() -> None:
    progress = watch.read_metrics, ("vllm:num_requests_running", "vllm:num_requests_waiting"), ("vllm:generation_tokens_total",)
    read, gauges, counters = progress
    first, later = (read(METRICS.format(running=2.0, tokens=tokens).encode(), gauges, counters) for tokens in (1.0, 2.0))
    assert first.state == later.state == "busy" and first.mark != later.mark
    assert read(METRICS.format(running=0.0, tokens=1.0).encode(), gauges, counters).state == "idle"
    assert read(b"python_info 1.0\n", gauges, counters).state == "blind"


class Engine(ThreadingHTTPServer):
    """A server with states that a test sets: what it answers by path, as status and text."""

    daemon_threads = True

    def __init__(self) -> None:
        self.answers: dict[str, tuple[int, str]] = {}
        self.asked: list[tuple[str, str]] = []
        super().__init__(("127.0.0.1", 0), _Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    def _answer(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        engine: Any = self.server
        engine.asked.append((self.path, self.headers.get("Authorization", "")))
        status, text = engine.answers[self.path]
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    do_GET = do_POST = _answer

    def log_message(self, *_: object) -> None:
        """Quiet."""


@pytest.fixture
def engine() -> Iterator[Engine]:
    server = Engine()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def test_looks_present_the_key_and_tell_states_apart(engine: Engine, tmp_path: Path) -> None:
    keys = tmp_path / "chat.keys"
    keys.write_text("\nfirst\nsecond\n")
    assert (watch.first_key(str(keys)), watch.first_key(str(tmp_path / "none"))) == ("first", "")
    progress = {"kind": "slots", "url": f"{engine.url}/slots"}
    states = []
    for answer in ((200, "[]"), (503, "{}"), (401, ""), (200, "nonsense")):
        engine.answers["/slots"] = answer
        states.append(watch.look(progress, "first", 5.0).state)
    assert states == ["idle", "loading", "blind", "blind"]
    assert set(engine.asked) == {("/slots", "Bearer first")}
    assert watch.look({"kind": "slots", "url": "http://127.0.0.1:1/slots"}, "", 5.0).state == "silent"


@pytest.fixture
def watched(engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A watch over a vLLM whose unit always runs; ``restarted`` collects what it restarts."""
    monkeypatch.setattr(watch, "STATE_DIR", tmp_path / "state")
    monkeypatch.setattr(watch, "running_start", lambda _: ("start", 0.0))
    progress = {
        "kind": "metrics",
        "url": f"{engine.url}/metrics",
        "busy": ["vllm:num_requests_running"],
        "counters": ["vllm:generation_tokens_total"],
    }
    document = {
        "unit": "v100-chat.service",
        "completion_url": f"{engine.url}/ask",
        "model": "chat",
        "keys_file": str(tmp_path / "none"),
        "progress": progress,
        "watchdog": {"limit_s": 60},
    }
    found = watch.Watch("chat", document, threading.Event())
    found.restarted = []
    monkeypatch.setattr(watch, "restart", lambda unit: found.restarted.append(unit) or "")
    return found


def _rounds(watched: Any, clock: Clock, count: int) -> None:
    for _ in range(count):
        watched.once(clock)
        question = watched._question
        while question is not None and question.outcome is None:
            pass
        clock.sleep(10.0)


@pytest.mark.parametrize(("status", "wedged"), [(200, False), (400, False), (500, True)])
def test_one_at_rest_is_asked_for_a_token(engine: Engine, watched: Any, status: int, wedged: bool) -> None:
    engine.answers |= {"/metrics": (200, METRICS.format(running=0, tokens=1).replace("{{", "{")), "/ask": (status, "{}")}
    _rounds(watched, Clock(), 20)
    assert ("/ask", "") in engine.asked
    assert bool(watched.restarted) == wedged


def test_what_was_done_is_written_down(engine: Engine, watched: Any) -> None:
    engine.answers["/metrics"] = (200, METRICS.format(running=2, tokens=1))
    _rounds(watched, Clock(), 15)
    document = json.loads((watch.STATE_DIR / "chat.watchdog.json").read_text())
    assert document["restarts_count"] == len(watched.restarted) == 2
    assert document["schema"] == "v100ctl/watchdog/1"
    assert "has computed nothing for 60 s" in document["reason"]


def test_one_that_somebody_has_just_stopped_is_left_alone(engine: Engine, watched: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.answers["/metrics"] = (200, METRICS.format(running=2, tokens=1))
    starts = iter([("start", 0.0)] * 7 + [("", 0.0)] * 20)
    monkeypatch.setattr(watch, "running_start", lambda _: next(starts))
    _rounds(watched, Clock(), 12)
    assert watched.restarted == []


# --- the night ----------------------------------------------------------------------------------------------------------------

DIGESTS = {"old": "a" * 16, "new": "b" * 16}


def unit_text(which: str) -> str:
    return f"[Service]\nEnvironment=V100CTL_INSTANCE_DIGEST={DIGESTS[which]}\n"


class Host:
    """systemd, the gateway and the helpers of a host, played: which units come up, and what is called."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.state = {"LoadState": "loaded", "ActiveState": "active", "NeedDaemonReload": "no", "Job": "0"}
        self.comes_up: Callable[[str], bool] = lambda _: True
        self.answer = "A GPU computes in parallel."
        self.still_running = 0
        self.has_gateway = True
        self.calls: list[str] = []
        self.unit_file = folder / "v100-chat.service"
        self.up = True

    def run(self, argv: list[str], timeout_s: float) -> tuple[int, str]:
        words = [word for word in argv if not word.startswith("-I") and word not in nightly.PYTHON]
        verb = f"{Path(words[0]).name} {words[1]}"
        if words[:2] == ["systemctl", "show"]:
            return 0, "\n".join(f"{name}={value}" for name, value in self.state.items())
        self.calls.append(verb)
        if words[:2] == ["systemctl", "restart"]:
            self.up = self.comes_up(self.unit_file.read_text())
            return (0, "") if self.up else (1, "Job for v100-chat.service failed")
        if words[0].endswith("gateway_control.py"):
            if words[1] == "drain":
                return (3, json.dumps({"running": self.still_running})) if self.still_running else (0, '{"running": 0}')
            return 0, "{}"
        if words[0].endswith("readiness.py"):
            return 0, json.dumps({"state": "done" if self.up else "failed", "message": "it keeps exiting"})
        if words[0].endswith("prove.py"):
            body = {"choices": [{"message": {"content": self.answer}}]}
            return 0, json.dumps({"problems": [], "answer": {"body": body}})
        return 0, ""

    def night(self) -> Any:
        instance = {
            "unit": "v100-chat.service",
            "health_url": "http://127.0.0.1:18000/health",
            "completion_url": "http://127.0.0.1:18000/v1/chat/completions",
            "model": "chat",
            "keys_file": str(self.folder / "none"),
            "progress": None,
            "nightly": {"limit_s": 120, "start_timeout_s": 600, "proof": {}},
        }
        clock = Clock()
        return nightly.Night("chat", instance, clock, clock.sleep).run()

    @property
    def gateway_verbs(self) -> list[str]:
        return [call.split()[1] for call in self.calls if call.startswith("gateway_control.py")]


@pytest.fixture
def played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    found = Host(tmp_path)
    found.unit_file.write_text(unit_text("new"))
    program = tmp_path / "gateway_control.py"
    program.touch()
    for name in ("STATE_DIR", "BASELINES_DIR", "HISTORY_DIR", "UNITS_DIR"):
        monkeypatch.setattr(nightly, name, tmp_path if name == "UNITS_DIR" else tmp_path / name)
    monkeypatch.setattr(nightly, "GATEWAY_PROGRAM", program)
    monkeypatch.setattr(nightly, "run", found.run)
    return found


def test_requests_end_first_and_are_let_in_after_the_proof(played: Host) -> None:
    assert played.night() == ("restarted", "")
    order = [call for call in played.calls if call != "systemctl reset-failed"]
    assert [call.split()[-1] for call in order][:2] == ["drain", "restart"]
    assert order[-1] == "gateway_control.py open"
    # What came up is what is gone back to some other night.
    assert (nightly.STATE_DIR / "chat.service").read_text() == unit_text("new")


def test_at_the_limit_the_night_is_skipped_and_requests_go_on(played: Host) -> None:
    played.still_running = 2
    outcome = played.night()
    assert outcome.what == "skipped" and "after 120 s 2 of its requests still ran" in outcome.reason
    assert played.gateway_verbs == ["drain", "open"]
    assert "systemctl restart" not in played.calls


@pytest.mark.parametrize(
    ("state", "what"),
    [
        ({"ActiveState": "inactive"}, "idle"),
        ({"Job": "4711"}, "skipped"),
        ({"NeedDaemonReload": "yes"}, "skipped"),
        ({"LoadState": "not-found"}, "failed"),
    ],
)
def test_nobody_s_work_is_crossed(played: Host, state: dict[str, str], what: str) -> None:
    played.state |= state
    assert played.night().what == what
    assert played.calls == []


def test_a_start_that_fails_once_is_tried_again(played: Host) -> None:
    outcomes = iter([False, True])
    played.comes_up = lambda _: next(outcomes)
    assert played.night().what == "restarted"


def _history(unit: str) -> None:
    nightly.HISTORY_DIR.mkdir()
    for number, content in enumerate(("long ago", unit)):
        state = {"files": [{"path": str(nightly.UNITS_DIR / "v100-chat.service"), "content": content}]}
        (nightly.HISTORY_DIR / f"2026113{number}T000000Z.json").write_text(json.dumps(state))


@pytest.mark.parametrize("kept_by", ["an earlier night", "the history"])
def test_one_that_fails_twice_gets_the_unit_that_was_proved_last(played: Host, kept_by: str) -> None:
    if kept_by == "the history":
        _history(unit_text("old"))
    else:
        nightly.STATE_DIR.mkdir()
        (nightly.STATE_DIR / "chat.service").write_text(unit_text("old"))
    played.comes_up = lambda text: text == unit_text("old")
    outcome = played.night()
    assert outcome.what == "fell-back" and "did not come up twice" in outcome.reason
    assert played.unit_file.read_text() == unit_text("old")
    assert (nightly.STATE_DIR / "chat.refused.service").read_text() == unit_text("new")
    assert played.calls.count("systemctl restart") == 3
    assert played.gateway_verbs == ["drain", "open"]


def test_what_was_proved_when_it_was_provisioned_is_kept_before_the_restart(played: Host) -> None:
    nightly.BASELINES_DIR.mkdir()
    (nightly.BASELINES_DIR / "chat.json").write_text(json.dumps({"digest": DIGESTS["new"]}))
    played.comes_up = lambda _: False
    outcome = played.night()
    assert outcome.what == "failed" and "no other unit of it was ever proved here" in outcome.reason
    assert (nightly.STATE_DIR / "chat.service").read_text() == unit_text("new")
    # One that is down gets requests as soon as it is up.
    assert played.gateway_verbs == ["drain", "open"]


def test_one_that_answers_wrongly_stays_outside(played: Host) -> None:
    played.answer = "GGGGGGGGGGGG"
    outcome = played.night()
    assert outcome.what == "failed" and "'G' repeated 12 times" in outcome.reason
    assert played.gateway_verbs == ["drain"]


def test_one_that_is_down_already_is_started(played: Host) -> None:
    played.state["ActiveState"] = "failed"
    assert played.night().what == "restarted"
    assert played.gateway_verbs == []


def test_without_a_gateway_it_has_to_be_quiet(played: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    nightly.GATEWAY_PROGRAM.unlink()
    counts = iter([1, 0, 1, 0, 0, 0])
    monkeypatch.setattr(nightly, "requests_running", lambda _: next(counts))
    assert played.night().what == "restarted"
    monkeypatch.setattr(nightly, "requests_running", lambda _: 1)
    assert played.night().what == "skipped"


def test_requests_are_counted_by_the_engine_or_by_connections() -> None:
    slots = {"kind": "slots"}
    assert nightly.running_of(slots, b'[{"is_processing": true}, {"is_processing": false}]') == 1
    gauges = {"kind": "metrics", "busy": ["vllm:num_requests_running", "vllm:num_requests_waiting"]}
    assert nightly.running_of(gauges, METRICS.format(running=2.0, tokens=1).encode()) == 2
    with pytest.raises(ValueError, match="gauges"):
        nightly.running_of(gauges, b"")
    table = (
        "  sl  local_address rem_address   st\n   0: 0100007F:4650 0100007F:A001 01 0\n   1: 0100007F:4650 00000000:0000 0A 0\n"
    )
    assert (nightly.open_connections([table], 0x4650), nightly.open_connections([table], 8000)) == (1, 0)


def test_the_end_of_a_night_is_written_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nightly, "STATE_DIR", tmp_path)
    nightly.record("chat", "v100-chat.service", nightly.Outcome("restarted"), 5.0)
    first = json.loads((tmp_path / "chat.nightly.json").read_text())
    nightly.record("chat", "v100-chat.service", nightly.Outcome("skipped", "2 still ran"), 6.0)
    second = json.loads((tmp_path / "chat.nightly.json").read_text())
    assert (second["outcome"], second["reason"]) == ("skipped", "2 still ran")
    assert second["restarted_at_s"] == first["restarted_at_s"] == first["ended_at_s"]


def test_only_a_run_that_was_killed_lets_requests_in_afterwards(
    played: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "upkeep.json"
    path.write_text(json.dumps({"instances": {"chat": {"unit": "v100-chat.service", "nightly": {"limit_s": 1}}}}))
    monkeypatch.setattr(nightly, "SETTINGS", path)
    for result, verbs in (("success", []), ("exit-code", []), ("signal", ["open"])):
        monkeypatch.setenv("SERVICE_RESULT", result)
        assert nightly.main(["--after", "chat"]) == 0
        assert played.gateway_verbs == verbs
