"""Who looks after servers that run: a watchdog that sees whether they get on, and restarts at night.

Both are programs on the host that read one file, and both restart through systemd alone. The watchdog sees the engine's own count
of what it has computed, not whether its HTTP threads answer: those go on answering while nothing is computed any more.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from v100ctl.catalog import Catalog
from v100ctl.catalog.rows import Progress
from v100ctl.facts import Facts
from v100ctl.fleet import HostConfig, InstanceSpec, NightlyRestart
from v100ctl.paths import content_dir
from v100ctl.plan.gateway import RUNTIME_FOLDER
from v100ctl.plan.render import MANAGED_HEADER, render
from v100ctl.plan.types import Account, Instance, ManagedFile, Rule, UpkeepDecision, plain_data
from v100ctl.plan.units import PROGRAMS_DIR, ROLE, local_url

SETTINGS = "/etc/v100ctl/upkeep.json"
WATCH_PROGRAM = f"{PROGRAMS_DIR}/watch.py"
NIGHTLY_PROGRAM = f"{PROGRAMS_DIR}/nightly.py"
WATCHDOG_UNIT = "v100ctl-watchdog.service"
NIGHTLY_UNIT = "v100ctl-nightly@.service"
CRON_FILE = "/etc/cron.d/v100ctl"
#: Any of them runs what lies in /etc/cron.d; a host without one gets the one that its distribution names.
CRON_PACKAGES = ("cron", "cronie", "systemd-cron", "bcron")
#: Timers name zones of this package's database.
ZONES_PACKAGE = "tzdata"
UNITS_DIR = "/etc/systemd/system"
#: What became of each night and of each wedged server, and the unit of each instance that was proved last.
STATE_DIR = "/var/lib/v100ctl/state/upkeep"
_WATCHDOG_FILES = (WATCH_PROGRAM, f"{UNITS_DIR}/{WATCHDOG_UNIT}")
_NIGHTLY_FILES = (NIGHTLY_PROGRAM, f"{UNITS_DIR}/{NIGHTLY_UNIT}", CRON_FILE)
FILES = (SETTINGS, *_WATCHDOG_FILES, *_NIGHTLY_FILES)

#: A step on cards takes seconds: a whole long prompt at once (vLLM), or `batch_size` tokens of one (llama.cpp).
CARD_LIMIT_S = 300
#: On the processor a batch of 2048 tokens of a large model takes a quarter of an hour.
PROCESSOR_LIMIT_S = 1800
#: Instances of one host that share a window begin so far apart.
_STAGGER_MINUTES = 10
_DAY_MINUTES = 24 * 60


def progress_of(spec: InstanceSpec, config: HostConfig, catalog: Catalog) -> Progress | None:
    """Where the engine of an instance shows that it gets on; ``None`` where nobody knows, as for an engine of one's own."""
    if spec.engine == "llama_cpp":
        build = catalog.llama_cpp_build(config.llama_cpp_build)
        return build.progress if build else None
    version = catalog.vllm(config.vllm_version) if spec.engine == "vllm" else None
    return version.progress if version else None


def _hiding(instance: Instance, progress: Progress) -> str | None:
    words = {word.partition("=")[0] for word in instance.argv if word.startswith("-")}
    return next((word for word in progress.hidden_by if word in words), None)


def watchdog_limit_s(spec: InstanceSpec, instance: Instance) -> int:
    """How long a server may have requests and get on with none."""
    whole = instance.gpus and spec.settings.gpu_layers is None
    return spec.watchdog.limit_s or (CARD_LIMIT_S if whole else PROCESSOR_LIMIT_S)


def _watched(spec: InstanceSpec, instance: Instance, progress: Progress | None) -> bool:
    return spec.watchdog.enabled is not False and progress is not None and _hiding(instance, progress) is None


def upkeep_rules(
    config: HostConfig, specs: Mapping[str, InstanceSpec], instances: Mapping[str, Instance], catalog: Catalog
) -> Iterator[Rule]:
    """Rules about watchdogs and nightly restarts."""
    for name, instance in sorted(instances.items()):
        spec = specs[name]
        progress = progress_of(spec, config, catalog)
        if spec.watchdog.enabled is not False and not _watched(spec, instance, progress):
            word = _hiding(instance, progress) if progress else None
            why = f"with `{word}` it must not be asked" if word else "nothing is known of how this engine shows it"
            yield Rule(
                "watchdog-blind",
                "warn" if spec.watchdog.enabled else "info",
                f"no watchdog looks whether the server gets on: {why}",
                f"leave `{word}` out" if word else "`watchdog: {enabled: false}`",
                instance=name,
            )
        nightly = spec.nightly_restart
        if nightly is None or not nightly.enabled:
            continue
        if config.gateway_placement == "none":
            yield Rule(
                "nightly-without-gateway",
                "warn",
                "nobody holds requests back while the server is restarted at night: those that come then are refused",
                "`gateway_placement: host`",
                instance=name,
            )
        elif nightly.limit_s >= config.gateway_wait_s:
            yield Rule(
                "nightly-outwaits-gateway",
                "warn",
                f"running requests may take {nightly.limit_s} s to end before the restart at night, and new ones wait "
                f"{config.gateway_wait_s} s: then they fail",
                f"`limit_s` of `nightly_restart` well below `gateway_wait_s`, such as {config.gateway_wait_s // 2}",
                instance=name,
            )


def begins_at(host: str, nightly: NightlyRestart, place: int) -> tuple[int, int]:
    """Hour and minute at which a host's restart begins: always the same, spread over the window by the host's name.

    Args:
        host: Its inventory name.
        nightly: The window.
        place: Of the instance among those of the host, which do not begin together.
    """
    first, last = (int(part[:2]) * 60 + int(part[3:]) for part in nightly.window.split("-"))
    length = (last - first) % _DAY_MINUTES
    spread = int.from_bytes(hashlib.sha256(host.encode()).digest()[:8], "big")
    minute = (first + (spread + place * _STAGGER_MINUTES) % length) % _DAY_MINUTES
    return divmod(minute, 60)


@functools.cache
def _program(name: str) -> str:
    return (content_dir() / "roles/llm_server/files" / name).read_text(encoding="utf-8")


def _settings(instance: Instance, spec: InstanceSpec, progress: Progress | None, *, nightly: bool) -> dict[str, Any]:
    shown = progress if progress is not None and _hiding(instance, progress) is None else None
    look = shown.model_dump(include={"kind", "busy", "counters"}, mode="json") if shown else {}
    return {
        "unit": instance.unit,
        "health_url": instance.health_url,
        "completion_url": instance.completion_url,
        "model": instance.model_alias,
        "keys_file": instance.api_keys_file,
        "progress": {**look, "url": local_url(spec, shown.path)} if shown else None,
        "watchdog": {"limit_s": watchdog_limit_s(spec, instance)} if _watched(spec, instance, progress) else None,
        "nightly": {
            "limit_s": spec.nightly_restart.limit_s,
            "start_timeout_s": instance.start_timeout_s,
            "proof": plain_data(instance.proof),
        }
        if nightly and spec.nightly_restart
        else None,
    }


def decide_upkeep(
    host: str,
    config: HostConfig,
    facts: Facts,
    specs: Mapping[str, InstanceSpec],
    instances: Mapping[str, Instance],
    catalog: Catalog,
) -> tuple[UpkeepDecision, tuple[ManagedFile, ...], tuple[str, ...]]:
    """Who looks after the servers of a host, the files of that, and the packages that it needs.

    Args:
        host: Its inventory name.
        config: What the inventory asks for.
        facts: What the probe found.
        specs: The instances as they are started.
        instances: What was decided of them.
        catalog: What is known.
    """
    nightly = {name: found for name in sorted(instances) if (found := specs[name].nightly_restart) is not None and found.enabled}
    settings = {
        name: _settings(instance, specs[name], progress_of(specs[name], config, catalog), nightly=name in nightly)
        for name, instance in sorted(instances.items())
    }
    settings = {name: found for name, found in settings.items() if found["watchdog"] or found["nightly"]}
    files: list[ManagedFile] = []
    watched = any(found["watchdog"] for found in settings.values())
    if settings:
        document = {"schema": "v100ctl/upkeep/1", "comment": MANAGED_HEADER, "instances": settings}
        files.append(ManagedFile(SETTINGS, json.dumps(document, indent=2, sort_keys=True) + "\n", ROLE))
    if watched:
        files += _watchdog_files()
    calendars: list[str] = []
    timers: list[str] = []
    lines: list[dict[str, Any]] = []
    for place, (name, found) in enumerate(nightly.items()):
        hour, minute = begins_at(host, found, place)
        if found.time_zone is None:
            lines.append({"hour": hour, "minute": minute, "instance": name})
            continue
        calendars.append(f"*-*-* {hour:02}:{minute:02}:00 {found.time_zone}")
        timers.append(f"v100ctl-nightly@{name}.timer")
        content = render("systemd/nightly.timer.j2", instance=name, calendar=calendars[-1])
        files.append(ManagedFile(f"{UNITS_DIR}/{timers[-1]}", content, ROLE, instance=name))
    if nightly:
        files += [
            ManagedFile(NIGHTLY_PROGRAM, _program("nightly.py"), ROLE, mode="0755"),
            ManagedFile(
                f"{UNITS_DIR}/{NIGHTLY_UNIT}",
                render(
                    "systemd/nightly.service.j2",
                    program=NIGHTLY_PROGRAM,
                    state_dir=STATE_DIR,
                    gateway_folder=RUNTIME_FOLDER,
                    units_dir=UNITS_DIR,
                ),
                ROLE,
            ),
        ]
    distribution = catalog.distribution(facts.distribution.id, facts.distribution.version_id)
    cron_package = distribution.cron_package if distribution else CRON_PACKAGES[0]
    others = [package for package in CRON_PACKAGES if package != cron_package]
    other_cron = any(package in facts.packages.installed for package in others)
    if lines:
        files.append(ManagedFile(CRON_FILE, render("cron.j2", lines=lines), ROLE))
    decided = UpkeepDecision(
        units=(
            *((WATCHDOG_UNIT,) if watched else ()),
            *((distribution.cron_unit,) if lines and not other_cron and distribution else ()),
            *timers,
        ),
        calendars=tuple(calendars),
        **_left_over(facts, {file.path for file in files}),
    )
    packages = (*((cron_package,) if lines and not other_cron else ()), *((ZONES_PACKAGE,) if timers else ()))
    return decided, tuple(files), packages


def _watchdog_files() -> Iterator[ManagedFile]:
    program = _program("watch.py")
    values = {"program": WATCH_PROGRAM, "state_dir": STATE_DIR, "account": Account()}
    bare = render("systemd/watchdog.service.j2", **values, digest="")
    # The running program looks whether it is of this file, and makes room for its successor where it is not.
    digest = hashlib.sha256((bare + program).encode()).hexdigest()[:16]
    yield ManagedFile(WATCH_PROGRAM, program, ROLE, mode="0755")
    yield ManagedFile(f"{UNITS_DIR}/{WATCHDOG_UNIT}", render("systemd/watchdog.service.j2", **values, digest=digest), ROLE)


def _left_over(facts: Facts, planned: set[str]) -> dict[str, tuple[str, ...]]:
    """What an earlier plan has left, as fields of the decision."""
    applied = (facts.host_json.document or {}).get("files", {})
    found = [path for path in (*FILES, *_timer_paths(facts)) if path not in planned and path in facts.files]
    # Somebody else's file of that name is left alone.
    ours = [
        path
        for path in found
        if facts.files[path].kind == "file"
        and (MANAGED_HEADER in (facts.files[path].content or "")[:200] or (isinstance(applied, Mapping) and path in applied))
    ]
    names = [path.rpartition("/")[2] for path in ours if path.startswith(f"{UNITS_DIR}/")]
    return {"absent_files": tuple(ours), "absent_units": tuple(name for name in names if "@." not in name)}


def _timer_paths(facts: Facts) -> list[str]:
    prefix = f"{UNITS_DIR}/v100ctl-nightly@"
    return sorted(path for path in facts.files if path.startswith(prefix) and path.endswith(".timer"))
