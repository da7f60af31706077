"""What a host remembers of what was applied to it, and how it goes back."""

from __future__ import annotations

import importlib.util
import json
import stat
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from v100ctl.history import HistoryError, find_state, go_back, read_history, record_document
from v100ctl.plan.types import ManagedFile
from v100ctl.plan.units import HISTORY_DIR, PROGRAMS
from v100ctl.rollback import describe_time
from v100ctl.serving import judge_completion

from .factory import make_plan

SCRIPT = Path(__file__).resolve().parents[2] / "roles/llm_server/files/go_back.py"
NOW_S = 1_796_000_000.0


class Killed(BaseException):
    """The host lost power."""


class Host:
    """A host of which only files are real: systemd, the servers and the gateway are played."""

    def __init__(self, script: Any, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.script = script
        self.root = root
        #: Unit to the digest that its process was started with.
        self.processes: dict[str, str] = {}
        self.enabled: set[str] = set()
        self.broken: set[str] = set()
        self.busy: set[str] = set()
        self.calls: list[str] = []
        self.left = 10_000
        for name, path in {
            "STATE": "state",
            "HISTORY": "state/history",
            "APPLIED": "state/applied.json",
            "HOST_JSON": "host.json",
            "UNITS": "units",
            "INSTANCES": "instances",
            "GATEWAY_PROGRAM": "gateway_control.py",
        }.items():
            monkeypatch.setattr(script, name, root / path)
        for folder in ("state", "units", "instances", "engines", "models"):
            (root / folder).mkdir()
        written = script.write

        def write(*arguments: Any) -> None:
            self.step()
            written(*arguments)

        monkeypatch.setattr(script, "write", write)
        monkeypatch.setattr(script, "run", self.run)
        monkeypatch.setattr(script, "runs", lambda unit, digest: self.processes.get(unit) == digest)
        monkeypatch.setattr(script, "POLL_S", 0.0)

    def step(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise Killed

    def run(self, *argv: str, timeout_s: float = 0) -> tuple[int, str]:
        self.step()
        line = " ".join(argv)
        self.calls.append(line)
        if argv[0] == "systemctl":
            unit = argv[-1]
            if argv[1] in ("restart", "start"):
                text = (self.root / "units" / unit).read_text()
                self.processes[unit] = text.split("DIGEST=")[1].split()[0]
            elif argv[1] == "stop" or "--now" in argv:
                self.processes.pop(unit, None)
            if argv[1] == "enable":
                self.enabled.add(unit)
            return (0 if unit in self.processes else 3, "") if argv[1] == "is-active" else (0, "")
        if "readiness.py" in line:
            unit = argv[argv.index("--unit") + 1]
            return 0, json.dumps({"state": "done" if unit in self.processes else "failed", "message": "it is failed"})
        if "prove.py" in line:
            request = json.loads(argv[-1])
            text = "" if self.processes[request["unit"]] in self.broken else "a GPU computes"
            body = {"choices": [{"message": {"content": text}}], "usage": {"completion_tokens": 3}}
            return 0, json.dumps({"problems": [], "answer": {"status": 200, "body": body}})
        if "gateway_control.py" in line:
            return (3, '{"running": 1}') if "drain" in argv and self.processes["v100-chat.service"] in self.busy else (0, "{}")
        raise AssertionError(line)

    def apply(self, digest: str, *, release: str = "one", record: bool = True, names: Sequence[str] = ("chat",)) -> None:
        """What the roles do: files, restart, proof, record."""
        (self.root / "engines" / release).mkdir(exist_ok=True)
        (self.root / "engines" / release / "release.json").write_text("{}")
        files = []
        for name in names:
            path = self.root / f"units/v100-{name}.service"
            content = f"{self.script.MANAGED}[Service]\nEnvironment=DIGEST={digest}\n"
            path.write_text(content)
            files.append({"path": str(path), "content": content, "mode": "0644", "owner": "root", "group": "root"})
            self.processes[path.name] = digest
        if record:
            document = {
                "schema": self.script.SCHEMA,
                "releases": [{"engine": "external", "build_id": release, "path": str(self.root / "engines" / release)}],
                "models": [],
                "files": files,
                "secret_files": [],
                "instances": {
                    name: {
                        "unit": f"v100-{name}.service",
                        "digest": digest,
                        "health_url": "http://127.0.0.1:8000/health",
                        "start_timeout_s": 5,
                        "proof_request": {"unit": f"v100-{name}.service", "url": "http://x", "model": "m", "timeout_s": 1},
                    }
                    for name in names
                },
                "gateway": None,
                "host_json": f'{{"digest": "{digest}"}}\n',
            }
            (self.root / "state/applied.json").write_text(json.dumps(document))
            self.script.record(NOW_S)
            (self.root / "host.json").write_text(document["host_json"])

    def restore(self, to: str | None = None, *, check: bool = False) -> tuple[dict[str, Any], int]:
        document, status = self.script.restore(to, 5.0, check, NOW_S)
        return document, status

    @property
    def ids(self) -> list[str]:
        return [str(state["id"]) for state in self.script.states()]


@pytest.fixture
def script() -> Any:
    spec = importlib.util.spec_from_file_location("go_back", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def make_host(script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Host]:
    return lambda: Host(script, tmp_path, monkeypatch)


@pytest.fixture
def host(make_host: Callable[[], Host]) -> Host:
    return make_host()


# --- what is filed ------------------------------------------------------------------------------------------------------------


def test_what_is_filed_is_all_that_serving_needs_and_no_secret() -> None:
    decided = make_plan()
    secret = ManagedFile("/etc/v100ctl/instances/chat.keys", "sk-very-secret\n", "llm_server", "0640", secret=True)
    decided = replace(decided, files=(*decided.files, secret))
    document = record_document(decided.to_role_variables())
    text = json.dumps(document)
    assert "sk-very-secret" not in text
    assert document["secret_files"] == [secret.path]
    paths = {file["path"] for file in document["files"]}
    assert {"/etc/systemd/system/v100-chat.service", *PROGRAMS} <= paths
    assert document["host_json"] == decided.host_json.content if decided.host_json else False
    assert [item["path"] for item in document["releases"]] == [item.path for item in decided.releases]
    assert document["instances"]["chat"]["digest"] == decided.instances[0].digest
    assert HISTORY_DIR in {item.path for item in decided.directories}


def test_a_gateway_is_filed_with_its_files() -> None:
    from .test_gateway import behind_gateway

    document = record_document(behind_gateway().to_role_variables())
    assert "/etc/v100ctl/gateway.cfg" in document["gateway"]["files"]
    assert {file["path"] for file in document["files"]} >= set(document["gateway"]["files"])


def test_the_same_state_is_filed_once(host: Host) -> None:
    host.apply("a")
    host.apply("a")
    assert len(host.ids) == 1
    host.apply("b")
    assert len(host.ids) == 2
    path = host.root / f"state/history/{host.ids[0]}.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_the_last_ten_are_kept_and_times_only_grow(host: Host) -> None:
    for number in range(14):
        host.apply(f"d{number}")
    assert len(host.ids) == 10
    assert host.ids == sorted(host.ids, reverse=True)
    assert len(set(host.ids)) == 10


def test_what_is_damaged_or_foreign_is_passed_over(host: Host) -> None:
    host.apply("a")
    (host.root / "state/history/20991231T000000Z.json").write_text("{")
    (host.root / "state/history/note.json").write_text("{}")
    assert len(host.ids) == 1


# --- going back ---------------------------------------------------------------------------------------------------------------


def test_a_failed_change_goes_back_to_the_newest_state(host: Host) -> None:
    host.apply("a")
    host.apply("b", record=False)
    document, status = host.restore()
    assert (status, document["restarted"], document["problem"]) == (0, ["chat"], "")
    assert host.processes == {"v100-chat.service": "a"}
    assert document["instances"]["chat"]["text"] == "a GPU computes"
    assert len(host.ids) == 1


def test_a_proved_change_goes_back_to_the_state_before_and_no_further_by_itself(host: Host) -> None:
    host.apply("a")
    host.apply("b")
    host.apply("c")
    assert host.restore()[0]["restarted"] == ["chat"]
    assert host.processes == {"v100-chat.service": "b"}
    assert host.script.states()[0]["restored_from"] == host.ids[2]
    # Once more: to the one before that, not to the one that was left.
    host.restore()
    assert host.processes == {"v100-chat.service": "a"}
    with pytest.raises(host.script.GoBackError, match="no earlier state"):
        host.restore()
    # What is applied next goes back to what ran before it.
    host.apply("d")
    host.restore()
    assert host.processes == {"v100-chat.service": "a"}


def test_what_runs_as_it_was_is_not_restarted(host: Host) -> None:
    host.apply("a")
    before = host.ids
    document, status = host.restore(host.ids[0])
    assert (status, document["changed"], document["restarted"]) == (0, False, [])
    assert not any("restart" in call for call in host.calls)
    assert host.ids == before


def test_an_instance_that_came_later_goes(host: Host) -> None:
    host.apply("a")
    host.apply("b", names=("chat", "more"))
    (host.root / "instances/more.keys").write_text("x")
    (host.root / "units/v100-foreign.service").write_text("[Service]\n")
    document, _ = host.restore()
    assert document["removed"] == ["more"]
    assert host.processes == {"v100-chat.service": "a"}
    assert sorted(path.name for path in (host.root / "units").iterdir()) == ["v100-chat.service", "v100-foreign.service"]
    assert not (host.root / "instances/more.keys").exists()


def test_a_state_without_its_release_is_refused_and_nothing_changes(host: Host) -> None:
    host.apply("a", release="one")
    host.apply("b", release="two")
    (host.root / "engines/one/release.json").unlink()
    with pytest.raises(host.script.GoBackError, match=r"engines/one is no longer there") as error:
        host.restore()
    assert error.value.status == host.script.EXIT_IMPOSSIBLE
    assert host.processes == {"v100-chat.service": "b"}
    assert host.script.listing()["states"][1]["missing"] == [str(host.root / "engines/one")]


def test_a_dry_run_says_what_would_be_done(host: Host) -> None:
    host.apply("a")
    host.apply("b")
    document, _ = host.restore(check=True)
    assert (document["changed"], document["restarted"]) == (True, ["chat"])
    assert host.processes == {"v100-chat.service": "b"}


def test_running_requests_are_not_cut(host: Host) -> None:
    host.apply("a")
    host.apply("b")
    (host.root / "gateway_control.py").write_text("")
    host.busy.add("b")
    with pytest.raises(host.script.GoBackError, match="still ran after 5 s") as error:
        host.restore()
    assert error.value.status == host.script.EXIT_BUSY
    assert host.processes == {"v100-chat.service": "b"}
    assert "open chat" in host.calls[-1]


def test_what_does_not_serve_is_said_and_stays_unfinished(host: Host) -> None:
    host.apply("a")
    host.apply("b")
    host.broken.add("a")
    document, status = host.restore()
    assert status == host.script.EXIT_FAILED
    assert "the answer is empty" in document["problem"]
    assert json.loads((host.root / "host.json").read_text()) == {"digest": "b"}


@pytest.mark.parametrize("steps", range(24))
def test_killed_anywhere_the_next_call_completes_it(host: Host, steps: int) -> None:
    host.apply("a")
    wanted = host.ids[0]
    host.apply("b", names=("chat", "more"), release="two")
    host.left = steps
    try:
        host.restore(wanted)
    except Killed:
        host.left = 10_000
        host.restore(wanted)
    assert host.processes == {"v100-chat.service": "a"}
    assert json.loads((host.root / "host.json").read_text()) == {"digest": "a"}
    assert host.script.states()[0]["restored_from"] == wanted
    assert len(host.ids) == 3


@pytest.mark.parametrize(
    "body",
    [
        {"choices": [{"message": {"content": "a GPU computes"}}], "usage": {"completion_tokens": 3}},
        {"choices": [{"message": {"reasoning_content": "hm"}}], "timings": {"predicted_per_second": 31.456}},
        {"choices": [{"message": {"content": "GGGGGGGGGG"}}]},
        {"choices": [{"message": {"content": " \n"}}]},
        {"error": {"message": "no"}},
        {"error": "no"},
        {"choices": []},
        {},
    ],
)
def test_a_host_judges_an_answer_as_the_controller_does(script: Any, body: dict[str, Any]) -> None:
    problem, seen = script.answer_problem(body)
    verdict = judge_completion(body)
    assert (not problem) is verdict["ok"]
    assert verdict["reason"].startswith(problem)
    assert seen == {key: verdict[key] for key in ("text", "tokens", "tokens_per_second")}


# --- from the controller ------------------------------------------------------------------------------------------------------


class Done:
    def __init__(self, rc: int, document: Any) -> None:
        self.rc, self.stdout, self.stderr = rc, json.dumps(document).encode(), b""


class Session:
    """Answers a call with what it is given."""

    def __init__(self, rc: int, document: Any) -> None:
        self.done = Done(rc, document)
        self.asked: Sequence[str] = ()

    def run(
        self, command: Sequence[str] | str, *, stdin: bytes | None = None, timeout_s: float = 0, become: bool = False
    ) -> Done:
        assert become
        self.asked = command
        return self.done


def test_the_history_is_read_as_the_host_tells_it(host: Host) -> None:
    host.apply("a")
    host.apply("b")
    history = read_history(Session(0, host.script.listing()), "h1")
    assert [state.id for state in history.states] == host.ids
    assert (history.current, history.previous) == (host.ids[0], host.ids[1])
    assert history.states[0].instances == {"chat": "b"}
    assert history.states[0].time.year == 2026
    newest = history.states[0]
    assert find_state(history, newest.id[:8], "h1") == newest
    assert find_state(history, newest.time.isoformat(sep=" ")[:19], "h1") == newest
    # As the table and the JSON document show it, whole or from its beginning.
    for state in history.states:
        shown = (describe_time(state), state.time.isoformat(), state.id)
        assert [find_state(history, text, "h1") for text in shown] == [state] * 3
    assert find_state(history, f"  {newest.time:%Y-%m-%d  %H:%M}z ", "h1") == newest
    for nothing in ("", " ", "UTC", "Z", "+00:00", "-"):
        with pytest.raises(HistoryError, match="remembers no state"):
            find_state(history, nothing, "h1")
    with pytest.raises(HistoryError, match="remembers no state 2001"):
        find_state(history, "2001", "h1")


def test_going_back_says_what_went_wrong() -> None:
    problem = {"id": None, "changed": False, "problem": "requests to chat still ran after 5 s, so nothing was changed"}
    with pytest.raises(HistoryError, match="still ran") as error:
        go_back(Session(3, problem), "h1")
    assert error.value.hint is not None and "--drain-limit" in error.value.hint
    with pytest.raises(HistoryError, match="keeps no history"):
        go_back(Session(44, None), "h1")


def test_the_answers_come_along() -> None:
    answer = {"text": "a GPU computes", "tokens": 3, "tokens_per_second": None}
    document = {
        "id": "20261130T000000Z",
        "changed": True,
        "restarted": ["chat"],
        "removed": [],
        "files": [],
        "problem": "",
        "instances": {"chat": answer},
    }
    session = Session(0, document)
    assert go_back(session, "h1", to="20261130T000000Z").answers["chat"].text == "a GPU computes"
    assert session.asked[-2:] == ["--to", "20261130T000000Z"]
