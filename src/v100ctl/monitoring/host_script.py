"""Writes what this host knows of its cards, its driver, its servers and of drift, as a file for the node exporter.

Runs on the host as root with its own Python (3.8 or later), by a timer. It asks the probe that lies beside it, the
controller's own, and compares with ``/etc/v100ctl/host.json``, what was applied last. What the plan alone can tell (a changed
inventory, for one) is the audit's. Differences have the ids that the audit gives them.

``METRICS`` is the one list of what is written: alert rules and dashboard are checked against it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Dict, Iterator, Mapping, NamedTuple

JsonObject = Dict[str, Any]

PROBE = Path(__file__).resolve().parent / "probe.py"
SETTINGS = Path("/etc/v100ctl/monitoring.json")
STATE_DIR = Path("/var/lib/v100ctl/state/upkeep")
HOST_JSON = "/etc/v100ctl/host.json"
#: The probe keeps itself to less than that.
PROBE_LIMIT_S = 60
MAX_ANSWER_BYTES = 32 * 1024**2
MAX_STATE_BYTES = 64 * 1024
MAX_LABEL_CHARACTERS = 300
#: So many differences are told by name; all are counted.
MAX_DRIFT = 200
#: Why a card's clocks may be lowered, as the probe words it.
THROTTLE_REASONS = (
    "hw_power_brake_slowdown",
    "hw_slowdown",
    "hw_thermal_slowdown",
    "sw_power_cap",
    "sw_thermal_slowdown",
    "sync_boost",
)
SMI_STATUSES = ("absent", "error", "ok", "timeout")
#: Name -> type and help.
METRICS: Mapping[str, tuple[str, str]] = {
    "v100ctl_metrics_timestamp_seconds": ("gauge", "When this file was written."),
    "v100ctl_metrics_interval_seconds": ("gauge", "How often it is written."),
    "v100ctl_metrics_probe_seconds": ("gauge", "How long the host took to look at itself."),
    "v100ctl_metrics_probe_errors": ("gauge", "Parts of the host that could not be looked at."),
    "v100ctl_driver_info": ("gauge", "Versions of the NVIDIA driver: loaded module, library, module on disk."),
    "v100ctl_driver_package_info": ("gauge", "Version of an installed package of the driver; empty where it is missing."),
    "v100ctl_driver_mismatch": ("gauge", "1 where library and loaded module are of different versions."),
    "v100ctl_driver_reboot_pending": ("gauge", "1 where another module is on the disk than the one that is loaded."),
    "v100ctl_nvidia_smi_status": ("gauge", "1 for how nvidia-smi answered."),
    "v100ctl_uvm_poisoned": ("gauge", "1 where every new CUDA program fails until nvidia_uvm is loaded anew."),
    "v100ctl_cards_expected": ("gauge", "V100s that the host had when the plan was applied."),
    "v100ctl_cards_present": ("gauge", "V100s that answer on the bus."),
    "v100ctl_card_missing": ("gauge", "1 for each place of the bus where a V100 was and none is."),
    "v100ctl_gpu_info": ("gauge", "Name and number of a card."),
    "v100ctl_gpu_fallen_off": ("gauge", "1 where the card reads all ones: it has fallen off the bus."),
    "v100ctl_gpu_temperature_celsius": ("gauge", "Temperature of the processor."),
    "v100ctl_gpu_memory_temperature_celsius": ("gauge", "Temperature of the memory."),
    "v100ctl_gpu_throttled": ("gauge", "1 where clocks are lowered for this reason."),
    "v100ctl_gpu_power_watts": ("gauge", "Power that the card draws."),
    "v100ctl_gpu_power_limit_watts": ("gauge", "Power that it may draw."),
    "v100ctl_gpu_sm_clock_hertz": ("gauge", "Clock of its processors."),
    "v100ctl_gpu_memory_used_bytes": ("gauge", "Memory in use."),
    "v100ctl_gpu_memory_total_bytes": ("gauge", "Memory that it has."),
    "v100ctl_gpu_processes": ("gauge", "Processes that compute on it."),
    "v100ctl_gpu_persistence_enabled": ("gauge", "1 where the driver keeps it awake."),
    "v100ctl_gpu_link_width_lanes": ("gauge", "Lanes of its PCIe link now."),
    "v100ctl_gpu_link_width_max_lanes": ("gauge", "Lanes that it has at most."),
    "v100ctl_gpu_link_gigatransfers_per_second": ("gauge", "Speed of a lane; an idle card may lower it."),
    "v100ctl_gpu_ecc_enabled": ("gauge", "1 where its memory is protected by ECC."),
    "v100ctl_gpu_ecc_errors": ("gauge", "Memory errors since the driver was loaded, or ever."),
    "v100ctl_gpu_retired_pages": ("gauge", "Pages of its memory that are no longer used, by what was found in them."),
    "v100ctl_gpu_retirement_pending": ("gauge", "1 where one more page goes with the next reset."),
    "v100ctl_kernel_log_readable": ("gauge", "1 where the kernel log could be read, so that XIDs are seen."),
    "v100ctl_gpu_xids": ("gauge", "XID errors of the last day, by code."),
    "v100ctl_gpu_xid_timestamp_seconds": ("gauge", "When the latest of them came."),
    "v100ctl_unit_active": ("gauge", "1 where the unit runs."),
    "v100ctl_unit_failed": ("gauge", "1 where systemd has given it up."),
    "v100ctl_unit_restarts_total": ("counter", "Restarts by systemd since the unit was started by hand or at boot."),
    "v100ctl_watchdog_restarts_total": ("counter", "Restarts of a server that computed nothing any more."),
    "v100ctl_nightly_outcome": ("gauge", "1 for what became of the last restart at night."),
    "v100ctl_nightly_timestamp_seconds": ("gauge", "When that ended."),
    "v100ctl_drift": ("gauge", "1 for each difference from what was applied, by the id that the audit gives it."),
    "v100ctl_drift_differences": ("gauge", "Differences from what was applied."),
}


class Sample(NamedTuple):
    """One number of one series."""

    name: str
    labels: Mapping[str, object]
    value: float


# --- from the probe's document to numbers -------------------------------------------------------------------------------------


def _mapping(value: object) -> JsonObject:
    return value if isinstance(value, dict) else {}


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _objects(value: object) -> list[JsonObject]:
    return [item for item in _list(value) if isinstance(item, dict)]


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def driver_samples(facts: JsonObject, applied: JsonObject) -> Iterator[Sample]:
    """What is loaded, what lies on the disk, and whether they agree."""
    nvidia = _mapping(facts.get("nvidia"))
    smi = _mapping(nvidia.get("smi"))
    module, library = str(nvidia.get("module_version") or ""), str(nvidia.get("library_version") or "")
    on_disk = str(nvidia.get("on_disk_module_version") or "")
    labels = {
        "module": module,
        "library": library,
        "on_disk": on_disk,
        "flavour": nvidia.get("module_flavour") or "",
        "cuda": nvidia.get("cuda_version") or "",
    }
    yield Sample("v100ctl_driver_info", labels, 1)
    installed = _mapping(_mapping(facts.get("packages")).get("installed"))
    for name in _list(_mapping(applied.get("driver")).get("packages")):
        yield Sample("v100ctl_driver_package_info", {"package": name, "version": installed.get(name, "")}, 1)
    differ = bool(module and library) and module != library
    yield Sample("v100ctl_driver_mismatch", {}, differ or smi.get("mismatch") is True)
    yield Sample("v100ctl_driver_reboot_pending", {}, bool(module and on_disk) and module != on_disk)
    for status in SMI_STATUSES:
        yield Sample("v100ctl_nvidia_smi_status", {"status": status}, smi.get("status", "absent") == status)
    yield Sample("v100ctl_uvm_poisoned", {}, facts.get("uvm") == "poisoned")


def _is_ours(gpu: JsonObject, card_ids: list[str]) -> bool:
    # One that has fallen off tells no id of its own any more.
    return gpu.get("pci_id") in card_ids or gpu.get("revision_ff") is True


def card_samples(facts: JsonObject, applied: JsonObject, card_ids: list[str]) -> Iterator[Sample]:
    """Each card, and those that are gone."""
    gpus = [gpu for gpu in _objects(facts.get("gpus")) if _is_ours(gpu, card_ids)]
    present = [str(gpu.get("pci_address")) for gpu in gpus if gpu.get("revision_ff") is not True]
    expected = [str(address) for address in _list(applied.get("cards"))]
    yield Sample("v100ctl_cards_expected", {}, len(expected))
    yield Sample("v100ctl_cards_present", {}, len(present))
    # A card that was added may move the addresses of others: then none is missing.
    if len(present) < len(expected):
        for address in sorted(set(expected) - set(present)):
            yield Sample("v100ctl_card_missing", {"pci_address": address}, 1)
    for gpu in gpus:
        yield from _gpu_samples(gpu)


def _gpu_samples(gpu: JsonObject) -> Iterator[Sample]:
    labels = {"pci_address": gpu.get("pci_address", ""), "uuid": gpu.get("uuid") or ""}
    index = gpu.get("index")
    shown = "" if index is None else index
    yield Sample("v100ctl_gpu_info", {**labels, "name": gpu.get("name") or "", "index": shown}, 1)
    fallen = gpu.get("revision_ff") is True
    yield Sample("v100ctl_gpu_fallen_off", labels, fallen)
    if fallen:
        # Whatever else is read of it is all ones.
        return
    reasons = gpu.get("throttle_reasons")
    if isinstance(reasons, list):
        for reason in THROTTLE_REASONS:
            yield Sample("v100ctl_gpu_throttled", {**labels, "reason": reason}, reason in reasons)
    clock_mhz = _number(gpu.get("sm_clock_mhz"))
    if clock_mhz is not None:
        yield Sample("v100ctl_gpu_sm_clock_hertz", labels, clock_mhz * 1e6)
    for name, key in (
        ("temperature_celsius", "temperature_c"),
        ("memory_temperature_celsius", "memory_temperature_c"),
        ("power_watts", "power_draw_w"),
        ("power_limit_watts", "power_limit_w"),
        ("memory_used_bytes", "memory_used_bytes"),
        ("memory_total_bytes", "memory_total_bytes"),
        ("link_width_lanes", "link_width"),
        ("link_width_max_lanes", "max_link_width"),
        ("link_gigatransfers_per_second", "link_speed_gts"),
    ):
        value = _number(gpu.get(key))
        if value is not None:
            yield Sample(f"v100ctl_gpu_{name}", labels, value)
    for name, key in (("persistence_enabled", "persistence_mode"), ("ecc_enabled", "ecc_mode")):
        if gpu.get(key) in ("enabled", "disabled"):
            yield Sample(f"v100ctl_gpu_{name}", labels, gpu[key] == "enabled")
    if gpu.get("uuid"):
        yield Sample("v100ctl_gpu_processes", labels, len(_list(gpu.get("processes"))))
    for key, kind, since in (
        ("ecc_corrected_volatile", "corrected", "driver_load"),
        ("ecc_uncorrected_volatile", "uncorrected", "driver_load"),
        ("ecc_uncorrected_aggregate", "uncorrected", "ever"),
    ):
        value = _number(gpu.get(key))
        if value is not None:
            yield Sample("v100ctl_gpu_ecc_errors", {**labels, "kind": kind, "since": since}, value)
    for key, cause in (("retired_pages_single_bit", "single_bit"), ("retired_pages_double_bit", "double_bit")):
        value = _number(gpu.get(key))
        if value is not None:
            yield Sample("v100ctl_gpu_retired_pages", {**labels, "cause": cause}, value)
    if isinstance(gpu.get("retired_pages_pending"), bool):
        yield Sample("v100ctl_gpu_retirement_pending", labels, gpu["retired_pages_pending"])


def xid_samples(facts: JsonObject) -> Iterator[Sample]:
    """NVIDIA's numbered errors of the last day."""
    log = _mapping(facts.get("kernel_log"))
    yield Sample("v100ctl_kernel_log_readable", {}, log.get("seen") is True)
    uuids = {gpu.get("pci_address"): gpu.get("uuid") or "" for gpu in _objects(facts.get("gpus"))}
    for xid in _objects(log.get("xids")):
        address = xid.get("pci_address", "")
        labels = {"pci_address": address, "uuid": uuids.get(address, ""), "code": xid.get("code", "")}
        yield Sample("v100ctl_gpu_xids", labels, _number(xid.get("count")) or 1)
        yield Sample("v100ctl_gpu_xid_timestamp_seconds", labels, _number(xid.get("last_s")) or 0)


def _planned_units(applied: JsonObject) -> dict[str, str]:
    """Units of the applied plan that shall run, with the name of the instance, empty where it is none."""
    units = {
        str(item["unit"]): str(name)
        for name, item in _mapping(applied.get("instances")).items()
        if isinstance(item, dict) and "unit" in item
    }
    front = _mapping(applied.get("gateway")).get("unit")
    if front:
        units[str(front)] = ""
    files = _mapping(applied.get("files"))
    for path in files:
        # A service that a timer starts does not run in between.
        name = path.rpartition("/")[2]
        if name == "v100ctl-watchdog.service" or (name.startswith("v100ctl-") and name.endswith(".timer")):
            units[name] = ""
    return units


def unit_samples(facts: JsonObject, applied: JsonObject) -> Iterator[Sample]:
    """Whether what shall run does."""
    planned = _planned_units(applied)
    found = _mapping(facts.get("units"))
    seen = {name for name in found if name.startswith("v100-") or name in planned or name == "nvidia-persistenced.service"}
    for unit in sorted({*planned, *seen}):
        shown = _mapping(found.get(unit))
        if unit not in planned and shown.get("load_state") in (None, "", "not-found"):
            continue
        labels = {"unit": unit, "instance_name": planned.get(unit, "")}
        yield Sample("v100ctl_unit_active", labels, shown.get("active_state") == "active")
        yield Sample("v100ctl_unit_failed", labels, shown.get("active_state") == "failed")
        yield Sample("v100ctl_unit_restarts_total", labels, _number(shown.get("restarts_count")) or 0)


def upkeep_samples(folder: Path) -> Iterator[Sample]:
    """What watchdog and nightly restarts have written down."""
    for path in sorted(folder.glob("*.json")) if folder.is_dir() else ():
        document = read_json(path)
        labels = {"instance_name": document.get("instance", "")}
        if document.get("schema") == "v100ctl/watchdog/1":
            yield Sample("v100ctl_watchdog_restarts_total", labels, _number(document.get("restarts_count")) or 0)
        elif document.get("schema") == "v100ctl/nightly/1":
            yield Sample("v100ctl_nightly_outcome", {**labels, "outcome": document.get("outcome", "")}, 1)
            yield Sample("v100ctl_nightly_timestamp_seconds", labels, _number(document.get("ended_at_s")) or 0)


# --- drift --------------------------------------------------------------------------------------------------------------------


def seal(document: JsonObject) -> str:
    """The digest that ``host.json`` has of all the rest of itself."""
    rest = {key: value for key, value in document.items() if key != "digest"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()[:16]


def differences(facts: JsonObject, applied: JsonObject) -> Iterator[tuple[str, str]]:
    """Where the host is not what ``host.json`` says was applied: the audit's id and layer."""
    record = _mapping(facts.get("host_json"))
    if record.get("problem") or (applied and "digest" in applied and applied["digest"] != seal(applied)):
        yield f"file.content:{HOST_JSON}", "file"
    installed = _mapping(_mapping(facts.get("packages")).get("installed"))
    for name in _list(applied.get("packages")) if installed else ():
        if name not in installed:
            yield f"package.missing:{name}", "package"
    for name in _list(_mapping(applied.get("driver")).get("packages")) if installed else ():
        if name not in installed:
            yield f"driver.package-missing:{name}", "driver"
    yield from _file_differences(_mapping(facts.get("files")), _mapping(applied.get("files")))
    releases = {item.get("path"): item for item in _objects(facts.get("releases"))}
    for release in _objects(applied.get("releases")):
        shown = releases.get(release.get("path"))
        if shown is None or shown.get("problem"):
            yield f"release.{'damaged' if shown else 'missing'}:{release.get('build_id', '')}", "file"
    yield from _unit_differences(facts, applied)


def _file_differences(found: JsonObject, applied: JsonObject) -> Iterator[tuple[str, str]]:
    for path, wanted in applied.items():
        wanted, shown = _mapping(wanted), _mapping(found.get(path))
        if shown.get("kind") != "file":
            yield f"file.missing:{path}", "file"
            continue
        # Of a secret only its own planner knows the content.
        if not wanted.get("secret") and shown.get("sha256") != wanted.get("sha256"):
            yield f"file.content:{path}", "file"
        if any(shown.get(key) != wanted.get(key) for key in ("owner", "group", "mode")):
            yield f"file.mode:{path}", "file"


def _unit_differences(facts: JsonObject, applied: JsonObject) -> Iterator[tuple[str, str]]:
    units = _mapping(facts.get("units"))
    processes = {item.get("unit"): item for item in _objects(facts.get("processes"))}
    for unit in sorted(_planned_units(applied)):
        shown = _mapping(units.get(unit))
        if shown.get("load_state") in (None, "", "not-found"):
            yield f"unit.missing:{unit}", "unit"
            continue
        if "masked" in (shown.get("load_state"), shown.get("unit_file_state")):
            yield f"unit.masked:{unit}", "unit"
        elif shown.get("unit_file_state") != "enabled":
            yield f"unit.disabled:{unit}", "unit"
        if shown.get("need_daemon_reload") is True:
            yield f"unit.stale:{unit}", "unit"
        if shown.get("active_state") == "failed":
            yield f"unit.failed:{unit}", "unit"
        elif shown.get("active_state") != "active":
            yield f"unit.inactive:{unit}", "unit"
    for name, instance in _mapping(applied.get("instances")).items():
        process = processes.get(_mapping(instance).get("unit"))
        environ = _mapping(process.get("environ")) if process else {}
        if process and environ.get("V100CTL_INSTANCE_DIGEST") != _mapping(instance).get("digest"):
            yield f"process.stale:{name}", "process"


def drift_samples(facts: JsonObject, applied: JsonObject) -> Iterator[Sample]:
    """Each difference once, and how many there are."""
    found = dict(differences(facts, applied))
    for identifier, layer in sorted(found.items())[:MAX_DRIFT]:
        yield Sample("v100ctl_drift", {"id": identifier, "layer": layer}, 1)
    yield Sample("v100ctl_drift_differences", {}, len(found))


def samples(facts: JsonObject, settings: JsonObject, now_s: float, state_dir: Path = STATE_DIR) -> Iterator[Sample]:
    """Everything that is written."""
    applied = _mapping(_mapping(facts.get("host_json")).get("document"))
    yield Sample("v100ctl_metrics_timestamp_seconds", {}, round(now_s, 3))
    yield Sample("v100ctl_metrics_interval_seconds", {}, _number(settings.get("interval_s")) or 0)
    yield Sample("v100ctl_metrics_probe_seconds", {}, (_number(facts.get("probe_ms")) or 0) / 1000)
    yield Sample("v100ctl_metrics_probe_errors", {}, len(_mapping(facts.get("errors"))))
    yield from driver_samples(facts, applied)
    yield from card_samples(facts, applied, [str(item) for item in _list(settings.get("card_ids"))])
    yield from xid_samples(facts)
    yield from unit_samples(facts, applied)
    yield from upkeep_samples(state_dir)
    yield from drift_samples(facts, applied)


# --- the text -----------------------------------------------------------------------------------------------------------------

#: A name may hold whatever somebody wrote on the host: no control characters, and no halves of surrogate pairs.
_ODD = re.compile("[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def label(value: object) -> str:
    """A label's value in quotes, short and harmless."""
    text = _ODD.sub("?", str(value))[:MAX_LABEL_CHARACTERS]
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def to_text(found: Iterator[Sample]) -> str:
    """Prometheus' text format: each metric with its help and type, each series once."""
    lines: dict[str, dict[str, str]] = {name: {} for name in METRICS}
    for item in found:
        inner = ",".join(f"{key}={label(value)}" for key, value in item.labels.items())
        series = f"{item.name}{{{inner}}}" if inner else item.name
        value = float(item.value)
        lines[item.name].setdefault(series, f"{series} {int(value) if value.is_integer() else value}")
    text = []
    for name, series_of in lines.items():
        if series_of:
            kind, help_text = METRICS[name]
            text += [f"# HELP {name} {help_text}", f"# TYPE {name} {kind}", *series_of.values()]
    return "\n".join(text) + "\n"


# --- reading and writing ------------------------------------------------------------------------------------------------------


def read_json(path: Path) -> JsonObject:
    """A small JSON object; empty where it is none."""
    try:
        with path.open("rb") as file:
            return _mapping(json.loads(file.read(MAX_STATE_BYTES)))
    except (OSError, ValueError):
        return {}


def ask_probe(program: Path = PROBE) -> JsonObject:
    """The probe's document.

    Raises:
        OSError: it gave none.
    """
    argv = [sys.executable or "/usr/bin/python3", "-I", "-S", "-B", str(program), "--request", "{}"]
    try:
        done = subprocess.run(argv, capture_output=True, timeout=PROBE_LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        raise OSError(f"{program} gave no answer within {PROBE_LIMIT_S} s") from None
    if done.returncode != 0 or len(done.stdout) > MAX_ANSWER_BYTES:
        raise OSError(f"{program} ended with {done.returncode}: {done.stderr.decode('utf-8', 'replace').strip()[:500]}")
    try:
        return _mapping(json.loads(done.stdout.decode("utf-8", "replace")))
    except ValueError as error:
        raise OSError(f"{program} gave no JSON: {error}") from None


def write_whole(path: Path, text: str) -> None:
    """Makes a file aside and renames it in; its folder is no link that somebody has put there."""
    folder = os.open(str(path.parent), os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    # The exporter reads `*.prom` alone.
    aside = f".{path.name}.{os.urandom(6).hex()}"
    try:
        descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644, dir_fd=folder)
        try:
            with os.fdopen(descriptor, "wb") as file:
                os.fchmod(file.fileno(), 0o644)
                file.write(text.encode())
            os.rename(aside, path.name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            os.unlink(aside, dir_fd=folder)
            raise
    finally:
        os.close(folder)


def main() -> int:
    """The program: exit code 0, or 1 and why nothing was written. An old file tells its age."""
    settings = read_json(SETTINGS)
    try:
        if not settings.get("output"):
            raise OSError(f"{SETTINGS} says not where to write")
        facts = ask_probe()
        write_whole(Path(str(settings["output"])), to_text(samples(facts, settings, time.time())))
    except OSError as error:
        sys.stderr.write(f"v100ctl: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
