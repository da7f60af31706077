"""One instance as its unit file: the argv and the environment that start it, and the digest that tells when it is stale."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from v100ctl.facts import Facts
from v100ctl.fleet import InstanceSpec
from v100ctl.paths import content_dir
from v100ctl.plan.render import MANAGED_HEADER, render
from v100ctl.plan.types import Account, Instance, ManagedFile, Placement

ROLE = "llm_server"
#: What a unit and a login ask for; where the kernel or a container allows less, they get that.
LIMIT_NOFILE = 1048576
#: Loading a model from a slow disk takes minutes, and so does the first start after a reboot.
START_TIMEOUT_S = 600
#: How long a start waits for memory that a server which has just stopped still holds.
MEMORY_WAIT_S = 60
#: The longest that the checks before a start may take: that, two calls of a slow driver and what the devices need.
CHECK_TIMEOUT_S = 240
#: From this version on systemd waits longer after each failed start (`RestartSteps=`).
RESTART_STEPS_SINCE = 254
#: From this version on it can hide other users' processes (`ProtectProc=`); an older one warns of a key that it does not know.
PROTECT_PROC_SINCE = 247
#: How fast each instance was when it was proved: NAME.json. Measured, so no part of the plan.
BASELINES_DIR = "/var/lib/v100ctl/state/baselines"
#: The name under which a process carries the digest of the plan that started it.
DIGEST_VARIABLE = "V100CTL_INSTANCE_DIGEST"
#: Names of a process's environment start so where the probe tells their values; a secret must have another name.
TOLD_VARIABLES = ("V100CTL_", "CUDA_", "OMP_")
#: What makes a unit run a trial of `v100ctl tune`: its name in the unit's folder of drop-ins.
TRIAL_DROP_IN = "90-v100ctl-tune.conf"
PROGRAMS_DIR = "/opt/v100ctl/llm_server"
CHECK_PROGRAM = f"{PROGRAMS_DIR}/check_start.py"
#: Keeps the history and goes back in it, with the two below: a host does so without its controller.
GO_BACK_PROGRAM = f"{PROGRAMS_DIR}/go_back.py"
PROGRAMS = (CHECK_PROGRAM, GO_BACK_PROGRAM, f"{PROGRAMS_DIR}/prove.py", f"{PROGRAMS_DIR}/readiness.py")
#: What was applied and proved, by time: TIMESTAMP.json.
HISTORY_DIR = "/var/lib/v100ctl/state/history"
#: Not `v100-NAME.service`: such a unit is an instance.
DEVICES_UNIT = "v100ctl-devices.service"
LOGIN_LIMITS = "/etc/security/limits.d/90-v100ctl.conf"
#: Every file that serving needs beside those of instances, for the probe to look at.
FILES = (*PROGRAMS, f"/etc/systemd/system/{DEVICES_UNIT}", LOGIN_LIMITS)


def unit_name(instance: str) -> str:
    """The systemd unit of an instance."""
    return f"v100-{instance}.service"


def local_url(spec: InstanceSpec, path: str) -> str:
    """The URL at which an instance answers on its own host."""
    # A server that listens everywhere is asked on loopback: from the host itself that is always one of its addresses.
    address = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(spec.listen, spec.listen)  # noqa: S104 - compared, not bound
    return f"http://[{address}]:{spec.port}{path}" if ":" in address else f"http://{address}:{spec.port}{path}"


@dataclass(frozen=True)
class Surroundings:
    """What an instance needs around its process.

    Attributes:
        model_paths: What has to be there before it starts.
        cards: Its cards, by UUID (by PCI address before a driver tells it).
        weights_on_cards: All of its weights go there, so that there has to be room for them.
        by_index: The engine knows cards by number alone, so that these are looked up at each start.
        writes_code: It makes machine code at run time, and so needs memory that is written and executed.
        placement: The processors and the memory that it is bound to.
        systemd_version: Of the host; 0 where it is not known.
        secret_environment_file: The file that says which keys it is started with, and the keys where the engine wants them there.
    """

    model_paths: tuple[str, ...] = ()
    cards: tuple[str, ...] = ()
    weights_on_cards: bool = False
    by_index: bool = False
    writes_code: bool = False
    placement: Placement | None = None
    systemd_version: int = 0
    secret_environment_file: str = ""


def cache_directory(name: str) -> str:
    """Where an instance on cards may write what it compiles."""
    return f"/var/cache/{_cache_name(name)}"


def _cache_name(name: str) -> str:
    return f"v100ctl/{name}"


def _check_argv(name: str, around: Surroundings) -> tuple[str, ...]:
    words = ["/usr/bin/python3", "-ISB", CHECK_PROGRAM]
    for path in around.model_paths:
        words += ["--model", path]
    for card in around.cards:
        words += ["--card", card]
    if around.cards:
        words += ["--unit", unit_name(name), "--wait-s", str(MEMORY_WAIT_S)]
    if around.cards and around.weights_on_cards:
        words.append("--weights-on-cards")
    if around.cards and around.by_index:
        words += ["--indices", _cards_file(name)]
    return tuple(words)


def _cards_file(name: str) -> str:
    return f"/run/v100ctl/{name}.env"


def render_unit(
    name: str,
    *,
    engine: str,
    argv: tuple[str, ...],
    environment: Mapping[str, str],
    release_path: str,
    model_sha256s: tuple[str, ...],
    around: Surroundings,
) -> tuple[ManagedFile, dict[str, str], str]:
    """The unit file, the environment of its process (with the digest), and the digest.

    The digest covers the whole unit and the models' bytes: whatever makes a running process stale.
    """
    defaults = {}
    if around.cards:
        defaults["CUDA_CACHE_PATH"] = f"{cache_directory(name)}/cuda"
    if around.writes_code:
        # Not in the account's home, which is read-only to it.
        defaults["XDG_CACHE_HOME"] = cache_directory(name)
    environment = defaults | dict(environment)
    placement = around.placement
    values: dict[str, Any] = {
        "name": name,
        "engine": engine,
        "argv": argv,
        "release_path": release_path,
        "account": Account(),
        "limit_nofile": LIMIT_NOFILE,
        "cards": bool(around.cards),
        "cards_file": _cards_file(name) if around.cards and around.by_index else "",
        "secret_environment_file": around.secret_environment_file,
        "check_argv": _check_argv(name, around),
        "check_timeout_s": CHECK_TIMEOUT_S,
        "devices_unit": DEVICES_UNIT,
        "cache_directory": _cache_name(name),
        "writes_code": around.writes_code,
        "restart_steps": around.systemd_version >= RESTART_STEPS_SINCE,
        # A version that nobody told is not taken for an old one.
        "protect_proc": not 0 < around.systemd_version < PROTECT_PROC_SINCE,
        "cpus": placement.cpus if placement else "",
        "numa_policy": placement.policy if placement else "",
        "numa_nodes": ",".join(map(str, placement.nodes)) if placement else "",
    }
    bare = render("systemd/llm_server.service.j2", **values, environment=environment)
    models = "\n".join(model_sha256s)
    digest = hashlib.sha256(f"{models}\n{bare}".encode()).hexdigest()[:16]
    complete = {**environment, DIGEST_VARIABLE: digest}
    file = ManagedFile(
        path=f"/etc/systemd/system/{unit_name(name)}",
        content=render("systemd/llm_server.service.j2", **values, environment=complete),
        role=ROLE,
        instance=name,
    )
    return file, complete, digest


@functools.cache
def _program(path: str) -> str:
    return (content_dir() / "roles/llm_server/files" / path.rpartition("/")[2]).read_text(encoding="utf-8")


def shared_files(facts: Facts, instances: Collection[Instance]) -> tuple[ManagedFile, ...]:
    """The files that instances share."""
    if not instances:
        return ()
    files = [ManagedFile(path, _program(path), ROLE, mode="0755") for path in PROGRAMS]
    files.append(ManagedFile(LOGIN_LIMITS, login_limits(facts), ROLE))
    if any(instance.gpus for instance in instances):
        files.append(ManagedFile(f"/etc/systemd/system/{DEVICES_UNIT}", render("systemd/devices.service.j2"), ROLE))
    return tuple(files)


def attainable_nofile(facts: Facts) -> int:
    """The open files that a process of this host can have, at most what is asked for."""
    hard = facts.limits.nofile_hard
    return LIMIT_NOFILE if hard is None else min(LIMIT_NOFILE, hard)


def login_limits(facts: Facts) -> str:
    """The limits of logins. Never above what the host can give: a login that asks for more is refused."""
    memlock_bytes = facts.limits.memlock_hard_bytes
    memlock = "unlimited" if memlock_bytes is None else str(memlock_bytes // 1024)
    lines = [f"# {MANAGED_HEADER}"]
    # `*` does not mean root.
    for who in ("*", "root"):
        lines += [f"{who} - nofile {attainable_nofile(facts)}", f"{who} - memlock {memlock}"]
    return "\n".join(lines) + "\n"


def told(environment: Mapping[str, str]) -> dict[str, str]:
    """The part of an environment that the probe tells of a process."""
    return {name: value for name, value in environment.items() if name.startswith(TOLD_VARIABLES)}
