"""``nvidia-smi -q`` and ``-q -x``: one tree of readings, written as text and as XML.

The order and the words of a V100 are those of real output: driver 550 on V100-SXM2-16GB and 570 on V100-PCIE-16GB, with 535 and
580 where they differ from these (a vGPU's log of 535.216.01; an H200's of 580.159.04).
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

from .readings import MEMORY_C, OPERATING_C, REASONS, SHUTDOWN_C, SLOWDOWN_C, Reading, graphics_clocks

NA = "N/A"


class Node(NamedTuple):
    """A line of the log: its label there (``None``: in XML only), its element (empty: in the log only), a value or what is in it.

    ``section``: the names by which ``-d`` picks it, with all that is in it.
    """

    label: str | None
    tag: str
    value: str | list[Node]
    section: str = ""


def tree(reading: Reading, state: dict[str, Any]) -> list[Node]:
    """Everything about one card."""
    card, branch = reading.card, reading.branch
    version = state["loaded"]["version"]
    old = "Requested functionality has been deprecated"
    nodes = [
        Node("Product Name", "product_name", card["name"]),
        Node("Product Brand", "product_brand", "Tesla"),
    ]
    if branch >= 510:
        nodes.append(Node("Product Architecture", "product_architecture", "Volta"))
    nodes.append(Node("Display Mode", "display_mode", old if branch >= 575 else "Enabled"))
    if branch >= 575:
        nodes.append(Node("Display Attached", "display_attached", "No"))
    nodes += [
        Node("Display Active", "display_active", "Disabled"),
        Node("Persistence Mode", "persistence_mode", _switch(card["persistence"])),
    ]
    if branch >= 535:
        nodes.append(Node("Addressing Mode", "addressing_mode", NA))
    if branch >= 450:
        nodes.append(_pair("MIG Mode", "mig_mode", ("current_mig", "pending_mig")))
        nodes.append(Node(None, "mig_devices", "None"))
    nodes += [
        Node("Accounting Mode", "accounting_mode", "Disabled"),
        Node("Accounting Mode Buffer Size", "accounting_mode_buffer_size", "4000"),
        _pair("Driver Model", "driver_model", ("current_dm", "pending_dm")),
        Node("Serial Number", "serial", card["serial"]),
        Node("GPU UUID", "uuid", card["uuid"]),
    ]
    if branch >= 575:
        nodes.append(Node("GPU PDI", "pdi", NA))
    nodes += [
        Node("Minor Number", "minor_number", str(card["minor"])),
        Node("VBIOS Version", "vbios_version", card["vbios"]),
        Node("MultiGPU Board", "multigpu_board", "No"),
        Node("Board ID", "board_id", f"0x{int(card['pci_address'].split(':')[1], 16) << 8:x}"),
    ]
    if branch >= 510:
        nodes.append(Node("Board Part Number", "board_part_number", _or_na(card["board_part"])))
    nodes.append(Node("GPU Part Number", "gpu_part_number", _or_na(card["gpu_part"] if branch >= 510 else card["board_part"])))
    if branch >= 510:
        nodes.append(Node("FRU Part Number", "gpu_fru_part_number", NA))
    if branch >= 570:
        platform = ("Chassis Serial Number", "Slot Number", "Tray Index", "Host ID", "Peer Type")
        inner = [Node(label, label.lower().replace(" ", "_"), NA) for label in platform]
        inner += [Node("Module Id", "module_id", str(card["module_id"])), Node("GPU Fabric GUID", "gpu_fabric_guid", NA)]
        nodes.append(Node("Platform Info", "platformInfo", inner))
    elif branch >= 510:
        nodes.append(Node("Module ID", "gpu_module_id", str(card["module_id"])))
    nodes.append(
        Node(
            "Inforom Version",
            "inforom_version",
            [
                Node("Image Version", "img_version", _or_na(card["inforom"])),
                Node("OEM Object", "oem_object", "1.1"),
                Node("ECC Object", "ecc_object", "5.0"),
                Node("Power Management Object", "pwr_object", NA),
            ],
        )
    )
    if branch >= 535:
        nodes.append(
            Node(
                "Inforom BBX Object Flush",
                "inforom_bbx_flush",
                [Node("Latest Timestamp", "latest_timestamp", NA), Node("Latest Duration", "latest_duration", NA)],
            )
        )
    nodes.append(_pair("GPU Operation Mode", "gpu_operation_mode", ("current_gom", "pending_gom")))
    if branch >= 545:
        nodes.append(Node("GPU C2C Mode", "c2c_mode", NA))
    if 510 <= branch < 545:
        nodes.append(Node("GSP Firmware Version", "gsp_firmware_version", NA))
    virtual = [Node("Virtualization Mode", "virtualization_mode", "None"), Node("Host VGPU Mode", "host_vgpu_mode", NA)]
    if branch >= 545:
        virtual.append(Node("vGPU Heterogeneous Mode", "vgpu_heterogeneous_mode", NA))
    nodes.append(Node("GPU Virtualization Mode", "gpu_virtualization_mode", virtual))
    if 535 <= branch < 575:
        required, drain = (old, old) if branch >= 570 else ("No", NA)
        nodes.append(
            Node(
                "GPU Reset Status",
                "gpu_reset_status",
                [
                    Node("Reset Required", "reset_required", required),
                    Node("Drain and Reset Recommended", "drain_and_reset_recommended", drain),
                ],
            )
        )
    if branch >= 570:
        nodes.append(Node("GPU Recovery Action", "gpu_recovery_action", "None"))
    if branch >= 545:
        nodes.append(Node("GSP Firmware Version", "gsp_firmware_version", NA))
    nodes.append(Node("IBMNPU", "ibmnpu", [Node("Relaxed Ordering Mode", "relaxed_ordering_mode", NA)]))
    nodes.append(_pci(reading))
    nodes += [
        Node("Fan Speed", "fan_speed", NA),
        Node("Performance State", "performance_state", "P0", "PERFORMANCE"),
        _reasons(reading),
    ]
    if branch >= 575:
        nodes.append(_reason_counters(reading))
    if branch >= 535:
        nodes.append(Node("Sparse Operation Mode", "sparse_operation_mode", NA))
    nodes += _memory(reading)
    nodes.append(Node("Compute Mode", "compute_mode", card["compute_mode"], "COMPUTE"))
    nodes += _utilization(reading)
    nodes += _ecc(reading)
    nodes += _temperature(reading)
    nodes += _power(reading)
    nodes += _clocks(reading)
    if branch >= 535:
        fabric = [Node("State", "state", NA), Node("Status", "status", NA)]
        if branch >= 545:
            fabric += [Node("CliqueId", "cliqueId", NA), Node("ClusterUUID", "clusterUuid", NA)]
            health = ["Bandwidth"]
            if branch >= 570:
                health += ["Route Recovery in progress", "Route Unhealthy", "Access Timeout Recovery"]
            if branch >= 575:
                health = ["Summary", *health, "Incorrect Configuration", "Partition Assigned"]
            fabric.append(Node("Health", "health", [Node(name, name.lower().replace(" ", "_"), NA) for name in health]))
        nodes.append(Node("Fabric", "fabric", fabric))
    nodes.append(_supported(card))
    nodes.append(_processes(reading))
    if branch >= 570:
        nodes.append(Node(None, "accounted_processes", []))
        nodes.append(Node("Capabilities", "capabilities", [Node("EGM", "egm", "disabled")]))
    else:
        nodes.append(Node(None, "accounted_processes", []))
    if not version:
        raise ValueError("no driver is loaded")
    return nodes


def _switch(value: bool) -> str:
    return "Enabled" if value else "Disabled"


def _or_na(value: object) -> str:
    return NA if value is None else str(value)


def _pair(label: str, tag: str, tags: tuple[str, str], values: tuple[str, str] = (NA, NA), section: str = "") -> Node:
    return Node(label, tag, [Node("Current", tags[0], values[0]), Node("Pending", tags[1], values[1])], section)


def _pci(reading: Reading) -> Node:
    card, branch = reading.card, reading.branch
    domain, bus, device = reading.bus_id.replace(".", ":").split(":")[:3]
    vendor, number = card["pci_id"].upper().split(":")
    board_vendor, board = card["subsystem_id"].upper().split(":")
    inner = [
        Node("Bus", "pci_bus", f"0x{bus}"),
        Node("Device", "pci_device", f"0x{device}"),
        Node("Domain", "pci_domain", f"0x{domain[4:]}"),
    ]
    if branch >= 545:
        inner += [Node("Base Classcode", "pci_base_class", "0x3"), Node("Sub Classcode", "pci_sub_class", "0x2")]
    inner += [
        Node("Device Id", "pci_device_id", f"0x{number}{vendor}"),
        Node("Bus Id", "pci_bus_id", reading.bus_id),
        Node("Sub System Id", "pci_sub_system_id", f"0x{board}{board_vendor}"),
    ]
    generation = str(reading.generation)
    generations = [Node("Max", "max_link_gen", "3"), Node("Current", "current_link_gen", generation)]
    if branch >= 525:
        generations += [
            Node("Device Current", "device_current_link_gen", generation),
            Node("Device Max", "max_device_link_gen", "3"),
            Node("Host Max", "max_host_link_gen", "3" if branch < 545 else NA),
        ]
    inner.append(
        Node(
            "GPU Link Info",
            "pci_gpu_link_info",
            [
                Node("PCIe Generation", "pcie_gen", generations),
                Node(
                    "Link Width",
                    "link_widths",
                    [Node("Max", "max_link_width", "16x"), Node("Current", "current_link_width", f"{reading.width}x")],
                ),
            ],
        )
    )
    inner.append(
        Node("Bridge Chip", "pci_bridge_chip", [Node("Type", "bridge_chip_type", NA), Node("Firmware", "bridge_chip_fw", NA)])
    )
    inner += [
        Node("Replays Since Reset", "replay_counter", "0"),
        Node("Replay Number Rollovers", "replay_rollover_counter", "0"),
        Node("Tx Throughput", "tx_util", "0 KB/s"),
        Node("Rx Throughput", "rx_util", "0 KB/s"),
    ]
    if branch >= 535:
        caps = [Node("Atomic Caps Inbound", "atomic_caps_inbound", NA), Node("Atomic Caps Outbound", "atomic_caps_outbound", NA)]
        inner += reversed(caps) if branch >= 570 else caps
    return Node("PCI", "pci", inner)


def _reasons(reading: Reading) -> Node:
    label, prefix = ("Clocks Event", "clocks_event") if reading.branch >= 535 else ("Clocks Throttle", "clocks_throttle")
    inner = [
        # The two causes of a slowdown by hardware stand below it in the log, beside it in XML.
        Node(
            ("    " if bit in (0x40, 0x80) else "") + words,
            f"{prefix}_reason_{name.replace('display_clock_', 'display_clocks_')}",
            "Active" if reading.reasons & bit else "Not Active",
        )
        for bit, name, words in REASONS
    ]
    return Node(f"{label} Reasons", f"{prefix}_reasons", inner, "PERFORMANCE")


def _reason_counters(reading: Reading) -> Node:
    prefix = "clocks_event_reasons_counters"
    rows = (
        ("SW Power Capping", "sw_power_cap", 0),
        ("Sync Boost", "sync_boost", 0),
        ("SW Thermal Slowdown", "sw_therm_slowdown", 0),
        ("HW Thermal Slowdown", "hw_therm_slowdown", 1042511 if reading.throttled else 0),
        ("HW Power Braking", "hw_power_brake", 0),
    )
    inner = [Node(label, f"{prefix}_{tag}", f"{count} us") for label, tag, count in rows]
    return Node("Clocks Event Reasons Counters", prefix, inner, "PERFORMANCE")


def _sizes(label: str, tag: str, values: list[tuple[str, int]]) -> Node:
    return Node(label, tag, [Node(name.capitalize(), name, f"{size} MiB") for name, size in values], "MEMORY")


def _memory(reading: Reading) -> list[Node]:
    values = [("total", reading.total_mib), ("used", reading.used_mib), ("free", reading.free_mib)]
    if reading.branch >= 510:
        values.insert(1, ("reserved", reading.reserved_mib))
    bar1 = reading.card["bar1_mib"]
    nodes = [
        _sizes("FB Memory Usage", "fb_memory_usage", values),
        _sizes("BAR1 Memory Usage", "bar1_memory_usage", [("total", bar1), ("used", 2), ("free", bar1 - 2)]),
    ]
    if reading.branch >= 535:
        nothing = [("total", 0), ("used", 0), ("free", 0)]
        nodes.append(_sizes("Conf Compute Protected Memory Usage", "cc_protected_memory_usage", nothing))
    return nodes


def _utilization(reading: Reading) -> list[Node]:
    inner = [
        Node("GPU" if reading.branch >= 570 else "Gpu", "gpu_util", f"{reading.utilization} %"),
        Node("Memory", "memory_util", f"{reading.utilization // 2} %"),
        Node("Encoder", "encoder_util", "0 %"),
        Node("Decoder", "decoder_util", "0 %"),
    ]
    if reading.branch >= 535:
        inner += [Node("JPEG", "jpeg_util", NA), Node("OFA", "ofa_util", NA)]
    nodes = [Node("Utilization", "utilization", inner, "UTILIZATION")]
    for label, tag, section in (("Encoder Stats", "encoder_stats", "ENCODER_STATS"), ("FBC Stats", "fbc_stats", "FBC_STATS")):
        stats = (("Active Sessions", "session_count"), ("Average FPS", "average_fps"), ("Average Latency", "average_latency"))
        nodes.append(Node(label, tag, [Node(words, name, "0") for words, name in stats], section))
    if reading.branch >= 570:
        nodes.append(
            _pair("DRAM Encryption Mode", "dram_encryption_mode", ("current_dram_encryption", "pending_dram_encryption"))
        )
    return nodes


def _ecc(reading: Reading) -> list[Node]:
    card = reading.card
    modes = (_switch(card["ecc"]), _switch(card["ecc_pending"]))
    counts = ("Device Memory", "Register File", "L1 Cache", "L2 Cache", "Texture Memory", "Texture Shared", "CBU", "Total")
    tags = {"Texture Shared": "texture_shm"}

    def bits(label: str, tag: str, found: int) -> Node:
        absent = {"Texture Memory", "Texture Shared"} | (set() if tag == "double_bit" else {"CBU"})
        inner = [
            Node(
                words,
                tags.get(words, words.lower().replace(" ", "_")),
                NA if words in absent or not card["ecc"] else str(found) if words in ("Device Memory", "Total") else "0",
            )
            for words in counts
        ]
        return Node(f"{label}            ", tag, inner)

    pending = "Yes" if reading.retirement_pending else "No"
    spans = [
        Node(label, label.lower(), [bits("Single Bit", "single_bit", 0), bits("Double Bit", "double_bit", found)])
        for label, found in (("Volatile", int(reading.retirement_pending)), ("Aggregate", card["retired_double"]))
    ]
    retired = [
        Node("Single Bit ECC", "", str(card["retired_single"])),
        Node("Double Bit ECC", "", str(card["retired_double"])),
        Node("Pending Page Blacklist", "pending_blacklist", pending),
        Node(None, "pending_retirement", pending),
    ]
    for tag, count in (("multiple_single_bit_retirement", "retired_single"), ("double_bit_retirement", "retired_double")):
        inner = [Node(None, "retired_count", str(card[count])), Node(None, "retired_pagelist", "")]
        retired.insert(-2, Node(None, tag, inner))
    nodes = [
        _pair("ECC Mode", "ecc_mode", ("current_ecc", "pending_ecc"), modes, "ECC"),
        Node("ECC Errors", "ecc_errors", spans, "ECC"),
        Node("Retired Pages", "retired_pages", retired, "PAGE_RETIREMENT"),
    ]
    if reading.branch >= 450:
        nodes.append(Node("Remapped Rows", "remapped_rows", NA, "ROW_REMAPPER"))
    return nodes


def _temperature(reading: Reading) -> list[Node]:
    inner = [Node("GPU Current Temp", "gpu_temp", f"{reading.temperature_c} C")]
    if reading.branch >= 535:
        inner.append(Node("GPU T.Limit Temp", "gpu_temp_tlimit", NA))
    inner += [
        Node("GPU Shutdown Temp", "gpu_temp_max_threshold", f"{SHUTDOWN_C} C"),
        Node("GPU Slowdown Temp", "gpu_temp_slow_threshold", f"{SLOWDOWN_C} C"),
        Node("GPU Max Operating Temp", "gpu_temp_max_gpu_threshold", f"{OPERATING_C} C"),
    ]
    if reading.branch >= 450:
        inner.append(Node("GPU Target Temperature", "gpu_target_temperature", NA))
    inner += [
        Node("Memory Current Temp", "memory_temp", f"{reading.memory_temperature_c} C"),
        Node("Memory Max Operating Temp", "gpu_temp_max_mem_threshold", f"{MEMORY_C} C"),
    ]
    supported = [Node(None, "gpu_target_temp_min", NA), Node(None, "gpu_target_temp_max", NA)]
    return [
        Node("Temperature", "temperature", inner, "TEMPERATURE"),
        Node(None, "supported_gpu_target_temp", supported, "TEMPERATURE"),
    ]


def _power(reading: Reading) -> list[Node]:
    card, branch = reading.card, reading.branch

    def watts(value: float | None) -> str:
        return NA if value is None else f"{value:.2f} W"

    if branch < 535:
        inner = [
            Node(None, "power_state", "P0"),
            Node("Power Management", "power_management", "Supported"),
            Node("Power Draw", "power_draw", watts(reading.power_w)),
            Node("Power Limit", "power_limit", watts(reading.limit_w)),
            Node("Default Power Limit", "default_power_limit", watts(card["power_limit_w"])),
            Node("Enforced Power Limit", "enforced_power_limit", watts(reading.limit_w)),
            Node("Min Power Limit", "min_power_limit", watts(card["power_min_w"])),
            Node("Max Power Limit", "max_power_limit", watts(card["power_limit_w"])),
        ]
        return [Node("Power Readings", "power_readings", inner, "POWER")]

    def draws(now: str) -> list[Node]:
        if branch < 570:
            return [Node("Power Draw", "power_draw", now)]
        return [Node("Average Power Draw", "average_power_draw", NA), Node("Instantaneous Power Draw", "instant_power_draw", now)]

    def limits(*values: str) -> list[Node]:
        names = ("Current", "Requested", "Default", "Min", "Max")
        return [Node(f"{name} Power Limit", f"{name.lower()}_power_limit", value) for name, value in zip(names, values)]

    now = watts(reading.limit_w)
    chosen = limits(now, now, watts(card["power_limit_w"]), watts(card["power_min_w"]), watts(card["power_limit_w"]))
    nodes = [
        Node(
            "GPU Power Readings", "gpu_power_readings", [Node(None, "power_state", "P0"), *draws(watts(reading.power_w)), *chosen]
        )
    ]
    if branch >= 545:
        nodes.append(Node("GPU Memory Power Readings ", "gpu_memory_power_readings", draws(NA)))
    module = [Node(None, "power_state", "P0"), *draws(NA), *limits(NA, NA, NA, NA, NA)]
    nodes.append(Node("Module Power Readings", "module_power_readings", module))
    if branch >= 570:
        profiles = [
            Node("Requested Profiles", "power_profile_requested_profiles", NA),
            Node("Enforced Profiles", "power_profile_enforced_profiles", NA),
        ]
        nodes += [Node("Power Smoothing", "power_smoothing", NA), Node("Workload Power Profiles", "power_profiles", profiles)]
    return [node._replace(section="POWER") for node in nodes]


def _clocks(reading: Reading) -> list[Node]:
    card, branch = reading.card, reading.branch

    def clocks(label: str, tag: str, **values: int | None) -> Node:
        words = {"graphics": "Graphics", "sm": "SM", "mem": "Memory", "video": "Video"}
        inner = [Node(words[name], f"{name}_clock", NA if value is None else f"{value} MHz") for name, value in values.items()]
        return Node(label, tag, inner, "CLOCK")

    memory, core = reading.clocks
    top, own = card["sm_max_mhz"], card["memory_mhz"]
    nodes = [
        clocks("Clocks", "clocks", graphics=reading.sm_mhz, sm=reading.sm_mhz, mem=own, video=reading.video_mhz),
        clocks("Applications Clocks", "applications_clocks", graphics=core, mem=memory),
        clocks("Default Applications Clocks", "default_applications_clocks", graphics=card["app_mhz"], mem=own),
    ]
    if branch >= 535:
        nodes.append(clocks("Deferred Clocks", "deferred_clocks", mem=None))
    nodes += [
        clocks("Max Clocks", "max_clocks", graphics=top, sm=top, mem=own, video=card["video_max_mhz"]),
        clocks("Max Customer Boost Clocks", "max_customer_boost_clocks", graphics=top),
        Node(
            "Clock Policy",
            "clock_policy",
            [Node("Auto Boost", "auto_boost", NA), Node("Auto Boost Default", "auto_boost_default", NA)],
            "CLOCK",
        ),
    ]
    if 510 <= branch < 575:
        nodes.append(Node("Voltage", "voltage", [Node("Graphics", "graphics_volt", NA)], "VOLTAGE"))
    return nodes


def _supported(card: dict[str, Any]) -> Node:
    """In the log only where ``-d SUPPORTED_CLOCKS`` asks for it."""
    clocks = graphics_clocks(card)
    if not clocks or not card["memory_mhz"]:
        return Node(None, "supported_clocks", NA, "SUPPORTED_CLOCKS")
    inner = [Node("Memory", "value", f"{card['memory_mhz']} MHz")]
    inner += [Node("    Graphics", "supported_graphics_clock", f"{clock} MHz") for clock in clocks]
    return Node(None, "supported_clocks", [Node(None, "supported_mem_clock", inner)], "SUPPORTED_CLOCKS")


def _processes(reading: Reading) -> Node:
    if not reading.processes:
        return Node("Processes", "processes", "None", "PIDS")
    inner = []
    for process in reading.processes:
        rows = [
            Node("GPU instance ID", "gpu_instance_id", NA),
            Node("Compute instance ID", "compute_instance_id", NA),
            Node("Process ID", "pid", str(process["pid"])),
            Node("    Type", "type", "C"),
            Node("    Name", "process_name", process["name"]),
            Node("    Used GPU Memory", "used_memory", f"{process['memory_mib']} MiB"),
        ]
        inner.append(Node("", "process_info", rows))
    return Node("Processes", "processes", inner, "PIDS")


# --- writing ----------------------------------------------------------------------------------------------------------


def chosen(nodes: list[Node], sections: list[str]) -> list[Node]:
    """What ``-d`` asks for; all of it where nothing is asked for."""
    return [node for node in nodes if node.section in sections] if sections else nodes


def as_text(cards: list[tuple[Reading, list[Node]]], state: dict[str, Any], cuda: str, branch: int, sections: list[str]) -> str:
    """``nvidia-smi -q``."""
    # Where the colons stand.
    column = 55 if branch >= 575 else 42 if branch >= 510 else 36
    lines = ["", "==============NVSMI LOG==============", ""]
    head = {
        "Timestamp": time.strftime("%a %b %e %H:%M:%S %Y"),
        "Driver Version": state["loaded"]["version"],
        "CUDA Version": cuda,
    }
    lines += [f"{label:<{column}}: {value}" for label, value in head.items()]
    lines += ["", f"{'Attached GPUs':<{column}}: {len(state['cards'])}"]
    for reading, nodes in cards:
        lines.append(f"GPU {reading.bus_id}")
        for node in chosen(nodes, sections):
            if node.tag == "supported_clocks":
                lines += _supported_lines(node, column) if "SUPPORTED_CLOCKS" in sections else []
            else:
                lines += _text_lines(node, 1, column)
        lines.append("")
    return "\n".join(lines) + "\n"


def _text_lines(node: Node, depth: int, column: int) -> list[str]:
    if node.label is None:
        return []
    margin = "    " * depth
    if isinstance(node.value, str):
        return [f"{margin + node.label:<{column}}: {node.value}"]
    inner = [line for child in node.value for line in _text_lines(child, depth + 1 if node.label else depth, column)]
    return [margin + node.label, *inner] if node.label else inner


def _supported_lines(node: Node, column: int) -> list[str]:
    if isinstance(node.value, str):
        return [f"{'    Supported Clocks':<{column}}: {node.value}"]
    return ["    Supported Clocks", *[line for child in node.value for row in child.value for line in _rows(row, column)]]


def _rows(row: str | Node, column: int) -> list[str]:
    return _text_lines(row, 2, column) if isinstance(row, Node) else []


def as_xml(cards: list[tuple[Reading, list[Node]]], state: dict[str, Any], cuda: str, branch: int, sections: list[str]) -> str:
    """``nvidia-smi -q -x``."""
    dtd = 13 if branch >= 575 else 12 if branch >= 510 else 11
    lines = [
        '<?xml version="1.0" ?>',
        f'<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v{dtd}.dtd">',
        "<nvidia_smi_log>",
        f"\t<timestamp>{time.strftime('%a %b %e %H:%M:%S %Y')}</timestamp>",
        f"\t<driver_version>{state['loaded']['version']}</driver_version>",
        f"\t<cuda_version>{cuda}</cuda_version>",
        f"\t<attached_gpus>{len(state['cards'])}</attached_gpus>",
    ]
    for reading, nodes in cards:
        lines.append(f'\t<gpu id="{reading.bus_id}">')
        for node in chosen(nodes, sections):
            lines += _xml_lines(node, 2)
        lines += ["\t</gpu>", ""]
    return "\n".join([*lines, "</nvidia_smi_log>"]) + "\n"


def _xml_lines(node: Node, depth: int) -> list[str]:
    if not node.tag:
        return []
    margin = "\t" * depth
    if node.tag in ("mig_devices", "processes") and isinstance(node.value, str):
        inner = [f"{margin}\t{node.value}"] if node.tag == "mig_devices" else []
        return [f"{margin}<{node.tag}>", *inner, f"{margin}</{node.tag}>"]
    if isinstance(node.value, str):
        value = node.value
        # The log writes these numbers in hexadecimal with a prefix, the document without.
        if node.tag.startswith("pci_") and value.startswith("0x"):
            value = value[2:]
        return [f"{margin}<{node.tag}>{escape(value)}</{node.tag}>"]
    inner = [line for child in node.value for line in _xml_lines(child, depth + 1)]
    return [f"{margin}<{node.tag}>", *inner, f"{margin}</{node.tag}>"]
