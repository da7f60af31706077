"""Bring a host's cards back: say what alone helps, and where that is a program, run it and look again."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from typing import Any, Literal

from v100ctl.access import Access
from v100ctl.apply import Reporter
from v100ctl.errors import EXIT_ERROR, EXIT_OK, UnreachableError, V100ctlError
from v100ctl.examine import Examined, examine
from v100ctl.fleet import Fleet
from v100ctl.paths import content_dir
from v100ctl.plan.types import Rule
from v100ctl.probe import open_session
from v100ctl.probe.run import run_python, shell_safe_json
from v100ctl.provision import Confirm, alone_on

RECOVER_SCHEMA = "v100ctl/recover/1"
#: The helper waits for hanging programs itself.
RECOVER_TIMEOUT_S = 900.0

Remedy = Literal["power cycle", "reboot", "recover", "provision", "hand", "none"]
RecoveryStatus = Literal["well", "recovered", "would-recover", "stopped", "unreachable", "failed"]

#: What alone mends what a rule found, the mightiest first: what needs power is not mended by less.
_REMEDIES: Mapping[Remedy, tuple[str, ...]] = {
    "power cycle": ("gpu-fallen-off",),
    "reboot": ("driver-wedged",),
    "recover": ("uvm-poisoned", "gpu-retirement-pending", "driver-library-mismatch", "driver-not-loaded"),
    "provision": ("nouveau-loaded", "driver-open-modules", "driver-ignores-volta"),
    "hand": ("gpu-bar1-unassigned", "gpu-throttled", "gpu-link-degraded", "gpu-memory-failing", "gpu-gone"),
}
_IN_WORDS: Mapping[Remedy, str] = {
    "power cycle": "only switching the host off and on helps",
    "reboot": "only a reboot helps",
    "provision": "`v100ctl provision` mends that",
    "hand": "no program mends that",
}


@dataclass(frozen=True)
class Diagnosis:
    """What a host's cards suffer from, and the least that mends the worst of it."""

    remedy: Remedy
    rules: tuple[Rule, ...] = ()

    @property
    def because(self) -> str:
        """Why, on one line."""
        return "; ".join(rule.reason for rule in self.rules)


@dataclass(frozen=True)
class Recovery:
    """How it ended on one host. ``left`` is what is still wrong; ``steps`` and ``users`` are the helper's."""

    status: RecoveryStatus
    remedy: Remedy = "none"
    message: str = ""
    hint: str | None = None
    steps: tuple[str, ...] = ()
    users: tuple[str, ...] = ()
    left: tuple[Rule, ...] = ()


@dataclass(frozen=True)
class RecoverResult:
    """How it ended on each host."""

    hosts: Mapping[str, Recovery]

    @property
    def exit_code(self) -> int:
        """0 where every host is well or would be, else 1."""
        well = all(result.status in ("well", "recovered", "would-recover") for result in self.hosts.values())
        return EXIT_OK if well else EXIT_ERROR

    def to_json(self) -> dict[str, Any]:
        """The document ``v100ctl/recover/1``."""
        return {
            "schema": RECOVER_SCHEMA,
            "hosts": {
                name: {
                    "status": result.status,
                    "remedy": result.remedy,
                    "message": result.message,
                    "steps": list(result.steps),
                    "users": list(result.users),
                    "left": [{"id": rule.id, "reason": rule.reason, "nearest": rule.nearest} for rule in result.left],
                }
                for name, result in self.hosts.items()
            },
        }


def diagnose(rules: Sequence[Rule]) -> Diagnosis:
    """What alone helps, by the plan's own rules. What they only inform of is left alone."""
    for remedy, ids in _REMEDIES.items():
        found = tuple(rule for rule in rules if rule.id in ids and rule.severity != "info")
        if found:
            return Diagnosis(remedy, found)
    return Diagnosis("none")


def recover(
    fleet: Fleet,
    *,
    access: Access,
    reporter: Reporter,
    as_of: date,
    check: bool = False,
    force: bool = False,
    confirm: Confirm = lambda question: False,
) -> RecoverResult:
    """Bring the cards of every host back, one host after the other.

    A host that only power, a reboot, another role or a hand can mend is told so, and nothing is changed there.

    Args:
        fleet: The hosts.
        access: How they are reached.
        reporter: Where progress goes.
        as_of: Today, for the plan.
        check: Change nothing; say what would be done.
        force: Reset the cards even where nothing is found that this would mend.
        confirm: Asked before servers are stopped.
    """
    with reporter.phase(f"probing {', '.join(fleet.hosts)}"):
        examined = examine(list(fleet.hosts.values()), access, as_of=as_of)
    results: dict[str, Recovery] = {}
    for name, state in examined.items():
        early = _early(state, force=force)
        if early is not None:
            results[name] = early
            continue
        try:
            with alone_on([state], reporter):
                results[name] = _recover_host(name, state, access, reporter, as_of, check=check, confirm=confirm)
        except V100ctlError as error:
            unreachable = isinstance(error, UnreachableError)
            results[name] = Recovery("unreachable" if unreachable else "failed", message=error.message, hint=error.hint)
    return RecoverResult(results)


def _early(state: Examined, *, force: bool) -> Recovery | None:
    """What is said without touching the host; ``None`` where the helper shall run."""
    if state.error is not None or state.plan is None:
        message = state.error.message if state.error else "no facts"
        hint = state.error.hint if state.error else None
        return Recovery("unreachable" if isinstance(state.error, UnreachableError) else "failed", message=message, hint=hint)
    found = diagnose(state.plan.rules)
    if found.remedy in ("power cycle", "reboot"):
        # Whoever resets cards beside such a one makes it worse, or hangs.
        return Recovery(
            "stopped",
            found.remedy,
            f"{found.because}: {_IN_WORDS[found.remedy]}, and nothing was changed",
            found.rules[0].nearest,
            left=found.rules,
        )
    if found.remedy == "recover" or force:
        return None
    if found.remedy == "none":
        return Recovery("well", message="nothing was found that this would mend")
    return Recovery(
        "stopped",
        found.remedy,
        f"{found.because}: {_IN_WORDS[found.remedy]}, and nothing was changed",
        found.rules[0].nearest,
        left=found.rules,
    )


def _recover_host(
    name: str, state: Examined, access: Access, reporter: Reporter, as_of: date, *, check: bool, confirm: Confirm
) -> Recovery:
    if state.connection is None or state.plan is None:
        return Recovery("failed", message="no connection")
    found = diagnose(state.plan.rules)
    would = _run_helper(state, check=True)
    users = tuple(map(str, would["users"]))
    steps = tuple(map(str, would["steps"]))
    if would["problem"]:
        return Recovery("stopped", _needed(would, found.remedy), str(would["problem"]), left=found.rules)
    if check:
        return Recovery("would-recover", "recover", ", ".join(steps), steps=steps, users=users, left=found.rules)
    servers = [user for user in users if user.startswith("v100-")]
    if servers and not confirm(f"{name}: {', '.join(servers)} stop for a moment. Go on?"):
        return Recovery(
            "stopped", "recover", f"{', '.join(servers)} would stop, and nobody said yes", "`--yes` says so", left=found.rules
        )
    with reporter.phase(f"{name}: {', '.join(steps)}"):
        done = _run_helper(state, check=False)
    steps, users = tuple(map(str, done["steps"])), tuple(map(str, done["users"]))
    if done["problem"]:
        return Recovery("failed", _needed(done, "reboot"), str(done["problem"]), steps=steps, users=users, left=found.rules)
    with reporter.phase(f"{name}: probing again"):
        after = examine([state.host], access, as_of=as_of)[name]
    if after.error is not None or after.plan is None:
        message = after.error.message if after.error else "no facts"
        return Recovery("failed", message=message, steps=steps, users=users)
    left = diagnose(after.plan.rules)
    if left.remedy in ("power cycle", "reboot", "recover"):
        return Recovery("failed", left.remedy, left.because, steps=steps, users=users, left=left.rules)
    return Recovery("recovered", "none", ", ".join(steps), steps=steps, users=users, left=left.rules)


def _needed(answer: Mapping[str, Any], otherwise: Remedy) -> Remedy:
    needs = str(answer["needs"])
    return "power cycle" if needs == "power cycle" else "reboot" if needs == "reboot" else otherwise


def _run_helper(state: Examined, *, check: bool) -> dict[str, Any]:
    """What the helper of the role `gpu_tuning` says, run on the host as root."""
    if state.connection is None:
        raise V100ctlError("no connection")
    script = (content_dir() / "roles/gpu_tuning/files/recover_card.py").read_bytes()
    with open_session(state.connection) as session:
        request = shell_safe_json({"check": check})
        answer = run_python(session, script, request, what="the recovery helper", timeout_s=RECOVER_TIMEOUT_S)
    document: dict[str, Any] = {"steps": [], "users": [], "problem": "", "needs": "", **json.loads(answer)}
    return document
