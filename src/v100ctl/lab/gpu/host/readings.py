"""What a card reads at the moment: memory, clocks, temperatures, power, reasons for lower clocks.

Its numbers at rest are those of real V100s at rest (``nvidia-smi -q`` of drivers 550 and 570, NVIDIA/nvidia-docker#914).
"""

from __future__ import annotations

from typing import Any

from .machine import link

#: Bits of ``clocks_event_reasons.active`` (NVML), their field names and the words of ``nvidia-smi -q``.
REASONS = (
    (0x1, "gpu_idle", "Idle"),
    (0x2, "applications_clocks_setting", "Applications Clocks Setting"),
    (0x4, "sw_power_cap", "SW Power Cap"),
    (0x8, "hw_slowdown", "HW Slowdown"),
    (0x40, "hw_thermal_slowdown", "HW Thermal Slowdown"),
    (0x80, "hw_power_brake_slowdown", "HW Power Brake Slowdown"),
    (0x10, "sync_boost", "Sync Boost"),
    (0x20, "sw_thermal_slowdown", "SW Thermal Slowdown"),
    (0x100, "display_clock_setting", "Display Clock Setting"),
)
IDLE_CLOCK_MHZ, IDLE_VIDEO_MHZ = 135, 555
SHUTDOWN_C, SLOWDOWN_C, OPERATING_C, MEMORY_C = 90, 87, 83, 85


class Reading:
    """One card at one moment.

    Args:
        card: The card's part of the state.
        branch: The loaded driver's branch, ``535``.
    """

    def __init__(self, card: dict[str, Any], branch: int) -> None:
        self.card = card
        self.branch = branch
        self.throttled = bool(card["faults"].get("throttled"))
        self.retirement_pending = bool(card["faults"].get("memory-error"))
        self.processes: list[dict[str, Any]] = card["processes"]
        self.width, speed = link(card)
        self.generation = 3 if speed >= 8.0 else 1
        # From 510 on the total is all of the card, with what the driver keeps told apart; before, what was left.
        self.total_mib = card["memory_total_mib"] if branch >= 510 else card["memory_cuda_mib"]
        self.reserved_mib = card["memory_total_mib"] - card["memory_cuda_mib"]
        taken = sum(process["memory_mib"] for process in self.processes)
        self.used_mib = taken + (1 if branch >= 510 else 0)
        self.free_mib = card["memory_cuda_mib"] - taken
        self.busy = bool(self.processes) or self.throttled
        if self.throttled:
            self.reasons = 0x8 | 0x40
        else:
            self.reasons = 0x0 if self.busy else 0x1
        sm_max = card["sm_max_mhz"] or IDLE_CLOCK_MHZ
        limit_w = self.limit_w or 0.0
        self.temperature_c = 88 if self.throttled else 58 if self.busy else 33 + card["minor"] % 4
        self.memory_temperature_c = 86 if self.throttled else 55 if self.busy else 31 + card["minor"] % 4
        self.utilization = 100 if self.busy else 0
        self.sm_mhz = sm_max // 2 if self.throttled else (self.clocks[1] or sm_max) if self.busy else IDLE_CLOCK_MHZ
        self.video_mhz = (card["video_max_mhz"] or IDLE_VIDEO_MHZ) if self.busy else IDLE_VIDEO_MHZ
        self.power_w = (
            round(limit_w * 0.6, 2) if self.throttled else round(limit_w * 0.7, 2) if self.busy else 38.0 + card["minor"]
        )

    @property
    def limit_w(self) -> float | None:
        """The power limit that holds, ``None`` where the card's own is not known."""
        chosen: float | None = self.card["power_set_w"] or self.card["power_limit_w"]
        return chosen

    @property
    def clocks(self) -> tuple[int | None, int | None]:
        """The application clocks, memory and SM."""
        memory, core = self.card["clocks_set"] or (self.card["memory_mhz"], self.card["app_mhz"])
        return memory, core

    @property
    def bus_id(self) -> str:
        """``00000000:3B:00.0``."""
        return bus_id(self.card)


def bus_id(card: dict[str, Any]) -> str:
    """The card's address as ``nvidia-smi`` writes it: eight digits of domain, capitals."""
    address: str = card["pci_address"]
    return f"0000{address.upper()}"


def graphics_clocks(card: dict[str, Any]) -> list[int]:
    """What the SMs can be set to, the highest first: steps of 7.5 MHz, shown without the half."""
    top = card["sm_max_mhz"]
    if not top:
        return []
    doubled = top * 2 + (1 if (top * 2) % 15 else 0)
    return [half // 2 for half in range(doubled, 2 * IDLE_CLOCK_MHZ - 1, -15)]
