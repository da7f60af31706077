"""What was applied to a host and proved, by time: read it, and have the host go back to one of these states.

The host keeps its history itself (``/var/lib/v100ctl/state/history/TIMESTAMP.json``, the last ten) and can go back without the
controller: :data:`PROGRAM` does both. Here is what is filed there, and the way to it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Protocol

from v100ctl.access import DEFAULT_DRAIN_LIMIT_S
from v100ctl.errors import V100ctlError
from v100ctl.plan.units import BASELINES_DIR, GO_BACK_PROGRAM
from v100ctl.serving import PROOF_MAX_TOKENS, PROOF_PROMPT, PROOF_TIMEOUT_S, Completion

STATE_SCHEMA = "v100ctl/state/1"
HISTORY_SCHEMA = "v100ctl/history/1"
ROLLBACK_SCHEMA = "v100ctl/rollback/1"
PROGRAM = GO_BACK_PROGRAM
#: What is gone back to is what serves. A driver or a card's settings are no files that could be put back.
ROLES = ("llm_server", "gateway")
LIST_TIMEOUT_S = 60.0
#: Draining, stopping, loading and proving several large models.
RESTORE_TIMEOUT_S = 4 * 3600.0

#: The program's exit statuses.
_BUSY, _LOCKED, _IMPOSSIBLE = 3, 4, 5


class Runner(Protocol):
    """What runs a program on a host: a probe session."""

    def run(self, command: Sequence[str] | str, *, stdin: bytes | None = None, timeout_s: float = 0, become: bool = False) -> Any:
        """See :meth:`v100ctl.probe.session.Session.run`."""


@dataclass(frozen=True)
class State:
    """One state in a host's history.

    Attributes:
        id: When it was applied and proved, in UTC (``20261130T041500Z``).
        digest: What it is: the same for the same files, releases and models.
        restored_from: The state that was gone back to, where it is not one that was provisioned.
        releases: Build ids.
        models: Paths.
        instances: Name to the digest of its unit.
        served: Name to its ``unit``, the ``url`` at which it answers, its ``model``'s name there, its ``keys_file``.
        missing: What it rests on and the host no longer has; empty where it can be gone back to.
    """

    id: str
    digest: str
    restored_from: str | None
    releases: tuple[str, ...]
    models: tuple[str, ...]
    instances: Mapping[str, str]
    missing: tuple[str, ...] = ()
    served: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    @property
    def time(self) -> datetime:
        """When."""
        return datetime.strptime(self.id, "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)


@dataclass(frozen=True)
class History:
    """A host's states, the newest first. ``current`` is the one that it is in, ``previous`` the one that it would go back to."""

    states: tuple[State, ...]
    current: str | None = None
    previous: str | None = None

    @property
    def newest(self) -> State | None:
        """The last state that was proved."""
        return self.states[0] if self.states else None


@dataclass(frozen=True)
class Restored:
    """How going back ended. ``id`` is the state that the host is in now, ``answers`` what its instances said."""

    id: str
    changed: bool
    restarted: tuple[str, ...]
    removed: tuple[str, ...]
    files: tuple[str, ...]
    answers: Mapping[str, Completion] = field(default_factory=dict)


class HistoryError(V100ctlError):
    """A host has no history, or cannot go back."""


class NoHistoryError(HistoryError):
    """Nothing was applied to the host yet, or by a v100ctl that kept no history."""


class UntouchedError(HistoryError):
    """The host was left as it is."""


class LockedError(UntouchedError):
    """Another one goes back on the host right now."""


def record_document(plan: Mapping[str, Any]) -> dict[str, Any]:
    """What the host files of a plan, as plain data: enough to go back to it by itself, and no secrets.

    Args:
        plan: ``v100ctl_plan``, the plan as role variables.
    """
    files = [file for file in plan.get("files", ()) if file.get("role", "llm_server") in ROLES]
    gateway = plan.get("gateway") or {}
    return {
        "schema": STATE_SCHEMA,
        "releases": [{key: item[key] for key in ("engine", "build_id", "path")} for item in plan.get("releases", ())],
        "models": [{"path": item["path"], "sha256": item["sha256"]} for item in plan.get("models", ())],
        "files": [
            {key: file[key] for key in ("path", "content", "mode", "owner", "group")} for file in files if not file.get("secret")
        ],
        # They stay on the host as they are.
        "secret_files": [file["path"] for file in files if file.get("secret")],
        "instances": {
            item["name"]: {
                "unit": item["unit"],
                "digest": item["digest"],
                "health_url": item["health_url"],
                "start_timeout_s": item["start_timeout_s"],
                "proof_request": {
                    "unit": item["unit"],
                    "url": item["completion_url"],
                    "model": item["model_alias"],
                    "prompt": PROOF_PROMPT,
                    "max_tokens": PROOF_MAX_TOKENS,
                    "timeout_s": PROOF_TIMEOUT_S,
                    "proof": item.get("proof") or {},
                    "keys_file": item.get("api_keys_file") or "",
                    "baseline": f"{BASELINES_DIR}/{item['name']}.json",
                },
            }
            for item in plan.get("instances", ())
        },
        "gateway": (
            {"unit": gateway["unit"], "files": [file["path"] for file in files if file.get("role") == "gateway"]}
            if gateway.get("state") == "started"
            else None
        ),
        "host_json": plan["host_json"]["content"],
    }


def read_history(session: Runner, host: str) -> History:
    """What a host remembers.

    Raises:
        NoHistoryError: nothing was applied there yet, or by a v100ctl that kept no history.
        HistoryError: what it has cannot be read.
        UnreachableError: it cannot be asked.
    """
    _, document = _call(session, host, ["list"], LIST_TIMEOUT_S)
    states = tuple(
        State(
            id=str(item["id"]),
            digest=str(item["state"]),
            restored_from=item["restored_from"],
            releases=tuple(str(release["build_id"]) for release in item["releases"]),
            models=tuple(str(model["path"]) for model in item["models"]),
            instances={name: str(instance["digest"]) for name, instance in item["instances"].items()},
            missing=tuple(item["missing"]),
            served={
                name: {key: str(instance[key]) for key in ("unit", "url", "model", "keys_file")}
                for name, instance in item["instances"].items()
            },
        )
        for item in document["states"]
    )
    return History(states, document["current"], document["previous"])


def find_state(history: History, text: str, host: str) -> State:
    """The state that a person means by its time or the beginning of it (``20261130T0415``, ``2026-11-30 04:15 UTC``), in UTC.

    Of several the newest is taken.

    Raises:
        HistoryError: there is none.
    """
    # As the table and the JSON document of `v100ctl history` have it, which say that it is UTC.
    time = re.sub(r"(?: *UTC|(?<=[0-9])Z|\+00:?00)$", "", text.strip().upper())
    wanted = re.sub(r"[-:]", "", re.sub(r"[ T]+", "T", time))
    found = next((state for state in history.states if wanted and state.id.startswith(wanted)), None)
    if found is None:
        known = ", ".join(state.id for state in history.states) or "none"
        raise HistoryError(f"{host} remembers no state {text}; it has {known}", hint=f"`v100ctl history {host}` shows them")
    return found


def go_back(
    session: Runner, host: str, *, to: str | None = None, drain_limit_s: float = DEFAULT_DRAIN_LIMIT_S, check: bool = False
) -> Restored:
    """Have a host go back to a state and prove that it serves.

    Args:
        session: The way in.
        host: Its name, for messages.
        to: The state's id; by default the last good one that the host is not in.
        drain_limit_s: How long running requests may take to end.
        check: Change nothing; say what would be done.

    Raises:
        UntouchedError: it was not done.
        HistoryError: what was restored does not serve.
        UnreachableError: the host cannot be reached.
    """
    words = ["restore", "--drain-limit-s", str(drain_limit_s), *(["--to", to] if to else []), *(["--check"] if check else [])]
    status, document = _call(session, host, words, RESTORE_TIMEOUT_S)
    if status != 0 or document["problem"]:
        kind = LockedError if status == _LOCKED else UntouchedError if status in (_BUSY, _IMPOSSIBLE) else HistoryError
        raise kind(f"{host}: {document['problem']}", hint=_HINTS.get(status, f"`v100ctl audit` says what {host} lacks"))
    answers = {
        name: Completion(str(answer["text"]).strip(), int(answer["tokens"]), answer["tokens_per_second"], 0.0)
        for name, answer in document["instances"].items()
        if answer
    }
    return Restored(
        str(document["id"]),
        bool(document["changed"]),
        tuple(document["restarted"]),
        tuple(document["removed"]),
        tuple(document["files"]),
        answers,
    )


_HINTS = {
    _BUSY: "try again later, or with a longer `--drain-limit`",
    _LOCKED: "wait for it: the nightly restart, or another `v100ctl`",
    _IMPOSSIBLE: "`v100ctl history HOST` shows what it can go back to",
}


def _call(session: Runner, host: str, words: Sequence[str], timeout_s: float) -> tuple[int, dict[str, Any]]:
    script = f'[ -f {PROGRAM} ] || exit 44; exec python3 -I -S -B {PROGRAM} "$@"'
    done = session.run(["/bin/sh", "-c", script, "sh", *words], timeout_s=timeout_s, become=True)
    if done.rc == 44:
        raise NoHistoryError(
            f"{host} keeps no history: nothing was applied there yet, or by an older v100ctl",
            hint=f"`v100ctl provision --limit {host}` writes the first state",
        )
    try:
        document = json.loads(done.stdout)
        if not isinstance(document, dict):
            raise ValueError("no object")
    except ValueError as error:
        said = (done.stderr or done.stdout).decode("utf-8", "replace").strip().splitlines()
        raise HistoryError(
            f"{host}: {PROGRAM} failed with exit code {done.rc}: {said[-1] if said else 'nothing said'}"
        ) from error
    return done.rc, document
