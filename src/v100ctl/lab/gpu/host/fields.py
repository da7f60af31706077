"""The fields of ``nvidia-smi --query-gpu``: which a driver's branch knows, and what it answers for a card.

Names and aliases are those that ``nvidia-smi --help-query-gpu`` of 470 (huggingface/candle#733) and 535 (netdata/netdata#15755)
list, and the columns of real answers of 580.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from .readings import REASONS, Reading

NA = "[N/A]"
Value = Callable[[Reading, "dict[str, Any]"], str]


class Field:
    """One field.

    Args:
        name: As it stands at the head of a column.
        value: Its answer for a card, without the unit. Also gets the whole state.
        unit: Stands in the column's head and, unless ``nounits`` is asked for, after each value.
        since: The first branch that knows it.
        until: The first branch that no longer does.
        aliases: Other names that are asked with; the head shows :attr:`name`.
    """

    def __init__(
        self, name: str, value: Value, unit: str = "", *, since: int = 0, until: int = 9999, aliases: tuple[str, ...] = ()
    ) -> None:
        self.name = name
        self.value = value
        self.unit = unit
        self.since = since
        self.until = until
        self.aliases = aliases


def _switch(value: bool) -> str:
    return "Enabled" if value else "Disabled"


def _or_na(value: object) -> str:
    return NA if value is None else str(value)


def _watts(value: float | None) -> str:
    return NA if value is None else f"{value:.2f}"


def _part(index: int) -> Value:
    def value(reading: Reading, state: dict[str, Any]) -> str:
        domain, bus, device = reading.bus_id.replace(".", ":").split(":")[:3]
        return "0x" + (domain[4:], bus, device)[index]

    return value


def _reason(bit: int) -> Value:
    return lambda reading, state: "Active" if reading.reasons & bit else "Not Active"


def _constant(text: str) -> Value:
    return lambda reading, state: text


def _of_card(key: str) -> Value:
    return lambda reading, state: _or_na(reading.card[key])


def _id(key: str) -> Value:
    def value(reading: Reading, state: dict[str, Any]) -> str:
        vendor, device = reading.card[key].upper().split(":")
        return f"0x{device}{vendor}"

    return value


def _double_bit(span: str) -> Value:
    """Errors since the driver was loaded, or all that have retired a page."""
    if span == "volatile":
        return lambda reading, state: str(int(reading.retirement_pending))
    return lambda reading, state: str(reading.card["retired_double"])


def _timestamp(reading: Reading, state: dict[str, Any]) -> str:
    now = time.time()
    return time.strftime("%Y/%m/%d %H:%M:%S", time.localtime(now)) + f".{int(now % 1 * 1000):03d}"


def _make() -> list[Field]:
    fields = [
        Field("timestamp", _timestamp),
        Field("driver_version", lambda reading, state: str(state["loaded"]["version"])),
        Field("count", lambda reading, state: str(len(state["cards"]))),
        Field("name", _of_card("name"), aliases=("gpu_name",)),
        Field("serial", _of_card("serial"), aliases=("gpu_serial",)),
        Field("uuid", _of_card("uuid"), aliases=("gpu_uuid",)),
        Field("pci.bus_id", lambda reading, state: reading.bus_id, aliases=("gpu_bus_id",)),
        Field("pci.domain", _part(0)),
        Field("pci.bus", _part(1)),
        Field("pci.device", _part(2)),
        Field("pci.device_id", _id("pci_id")),
        Field("pci.sub_device_id", _id("subsystem_id")),
        Field("pcie.link.gen.current", lambda reading, state: str(reading.generation)),
        Field("pcie.link.gen.gpucurrent", lambda reading, state: str(reading.generation), since=525),
        Field("pcie.link.gen.max", _constant("3")),
        Field("pcie.link.gen.gpumax", _constant("3"), since=525),
        Field("pcie.link.width.current", lambda reading, state: str(reading.width)),
        Field("pcie.link.width.max", _constant("16")),
        Field("index", lambda reading, state: str(reading.card["minor"])),
        Field("display_mode", _constant("Enabled")),
        Field("display_active", _constant("Disabled")),
        Field("persistence_mode", lambda reading, state: _switch(reading.card["persistence"])),
        Field("accounting.mode", _constant("Disabled")),
        Field("accounting.buffer_size", _constant("4000")),
        Field("driver_model.current", _constant(NA)),
        Field("driver_model.pending", _constant(NA)),
        Field("vbios_version", _of_card("vbios")),
        Field("inforom.img", _of_card("inforom"), aliases=("inforom.image",)),
        Field("inforom.oem", _constant("1.1")),
        Field("inforom.ecc", _constant("5.0")),
        Field("inforom.pwr", _constant(NA), aliases=("inforom.power",)),
        Field("fan.speed", _constant(NA), "%"),
        Field("pstate", _constant("P0")),
        Field("memory.total", lambda reading, state: str(reading.total_mib), "MiB"),
        Field("memory.reserved", lambda reading, state: str(reading.reserved_mib), "MiB", since=510),
        Field("memory.used", lambda reading, state: str(reading.used_mib), "MiB"),
        Field("memory.free", lambda reading, state: str(reading.free_mib), "MiB"),
        Field("compute_mode", _of_card("compute_mode")),
        Field("compute_cap", _of_card("compute_capability"), since=510),
        Field("utilization.gpu", lambda reading, state: str(reading.utilization), "%"),
        Field("utilization.memory", lambda reading, state: str(reading.utilization // 2), "%"),
        Field("encoder.stats.sessionCount", _constant("0")),
        Field("encoder.stats.averageFps", _constant("0")),
        Field("encoder.stats.averageLatency", _constant("0")),
        Field("ecc.mode.current", lambda reading, state: _switch(reading.card["ecc"])),
        Field("ecc.mode.pending", lambda reading, state: _switch(reading.card["ecc_pending"])),
        Field("retired_pages.single_bit_ecc.count", _of_card("retired_single"), aliases=("retired_pages.sbe",)),
        Field("retired_pages.double_bit.count", _of_card("retired_double"), aliases=("retired_pages.dbe",)),
        Field("retired_pages.pending", lambda reading, state: "Yes" if reading.retirement_pending else "No"),
        Field("temperature.gpu", lambda reading, state: str(reading.temperature_c)),
        Field("temperature.gpu.tlimit", _constant(NA), since=545),
        Field("temperature.memory", lambda reading, state: str(reading.memory_temperature_c)),
        Field("power.management", lambda reading, state: _switch(True)),
        Field("power.draw", lambda reading, state: _watts(reading.power_w), "W"),
        Field("power.draw.average", _constant(NA), "W", since=535),
        Field("power.draw.instant", lambda reading, state: _watts(reading.power_w), "W", since=535),
        Field("power.limit", lambda reading, state: _watts(reading.limit_w), "W"),
        Field("enforced.power.limit", lambda reading, state: _watts(reading.limit_w), "W"),
        Field("power.default_limit", lambda reading, state: _watts(reading.card["power_limit_w"]), "W"),
        Field("power.min_limit", lambda reading, state: _watts(reading.card["power_min_w"]), "W"),
        Field("power.max_limit", lambda reading, state: _watts(reading.card["power_limit_w"]), "W"),
        Field("clocks.current.graphics", lambda reading, state: str(reading.sm_mhz), "MHz", aliases=("clocks.gr",)),
        Field("clocks.current.sm", lambda reading, state: str(reading.sm_mhz), "MHz", aliases=("clocks.sm",)),
        Field("clocks.current.memory", _of_card("memory_mhz"), "MHz", aliases=("clocks.mem",)),
        Field("clocks.current.video", lambda reading, state: str(reading.video_mhz), "MHz", aliases=("clocks.video",)),
        Field("clocks.applications.graphics", lambda reading, state: _or_na(reading.clocks[1]), "MHz"),
        Field("clocks.applications.memory", lambda reading, state: _or_na(reading.clocks[0]), "MHz"),
        Field("clocks.default_applications.graphics", _of_card("app_mhz"), "MHz"),
        Field("clocks.default_applications.memory", _of_card("memory_mhz"), "MHz"),
        Field("clocks.max.graphics", _of_card("sm_max_mhz"), "MHz", aliases=("clocks.max.gr",)),
        Field("clocks.max.sm", _of_card("sm_max_mhz"), "MHz"),
        Field("clocks.max.memory", _of_card("memory_mhz"), "MHz", aliases=("clocks.max.mem",)),
        Field("mig.mode.current", _constant(NA), since=450),
        Field("mig.mode.pending", _constant(NA), since=450),
        Field("fabric.state", _constant(NA), since=535),
        Field("fabric.status", _constant(NA), since=535),
    ]
    for kind in ("corrected", "uncorrected"):
        for span in ("volatile", "aggregate"):
            for place in ("device_memory", "register_file", "l1_cache", "l2_cache", "texture_memory", "total"):
                value = _constant(NA if place == "texture_memory" else "0")
                if kind == "uncorrected" and place in ("device_memory", "total"):
                    value = _double_bit(span)
                fields.append(Field(f"ecc.errors.{kind}.{span}.{place}", value))
    for prefix, since in (("clocks_throttle_reasons", 0), ("clocks_event_reasons", 535)):
        fields.append(Field(f"{prefix}.supported", _constant("0x00000000000001FF"), since=since))
        fields.append(Field(f"{prefix}.active", lambda reading, state: f"0x{reading.reasons:016X}", since=since))
        for bit, name, _ in REASONS[:-1]:
            fields.append(Field(f"{prefix}.{name}", _reason(bit), since=since))
    return fields


_FIELDS = {name: field for field in _make() for name in (field.name, *field.aliases)}


def known(branch: int) -> list[str]:
    """All names that a branch takes."""
    return [name for name, field in _FIELDS.items() if field.since <= branch < field.until]


def find(name: str, branch: int) -> Field | None:
    """A field by one of its names, ``None`` where the branch does not know it."""
    field = _FIELDS.get(name)
    return field if field is not None and field.since <= branch < field.until else None
