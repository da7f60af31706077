"""How the cards and processors of a host are set, what Docker's containers may take, and whether the host can do so."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from v100ctl.facts import Facts
from v100ctl.fleet import HostConfig
from v100ctl.paths import content_dir
from v100ctl.plan.cards import HostCard
from v100ctl.plan.render import MANAGED_HEADER, render
from v100ctl.plan.types import CardTuning, ManagedFile, Rule, TuningDecision

ROLE = "gpu_tuning"
#: Not `v100-NAME.service`: such a unit is an instance.
UNIT = "v100ctl-gpu-tuning.service"
UNIT_PATH = f"/etc/systemd/system/{UNIT}"
SETTINGS = "/etc/v100ctl/gpu_tuning.json"
PROGRAM = "/opt/v100ctl/gpu_tuning/apply_tuning.py"
DOCKER_CONFIG = "/etc/docker/daemon.json"
DOCKER_UNIT = "docker.service"
PERSISTENCED_UNIT = "nvidia-persistenced.service"
#: Every file that tuning may need, for the probe to look at.
FILES = (UNIT_PATH, PROGRAM, DOCKER_CONFIG)


def decide_tuning(
    config: HostConfig, facts: Facts, cards: Sequence[HostCard]
) -> tuple[TuningDecision, tuple[ManagedFile, ...], tuple[Rule, ...]]:
    """What is set on a host whose V100s compute, the files that say so there, and what is wrong with it.

    What the inventory does not ask for is left as it is. Cards are named by their PCI address: before a driver runs, nobody knows
    their UUIDs. Cards of other kinds and those of virtual machines are left alone.
    """
    own = [card for card in cards if card.is_volta and not card.passed_through]
    # Of cards that are alike one is spoken of.
    alike = {(card.name, card.gpu.ecc_mode, bool(card.gpu.uuid)): card for card in reversed(own)}
    rules = [
        *(rule for card in alike.values() for rule in _card_rules(config, card)),
        *_governor_rules(config, facts),
    ]
    decision = TuningDecision(
        persistence=config.gpu_tuning_persistence,
        cpu_governor=config.gpu_tuning_cpu_governor,
        cards=tuple(_card(config, card) for card in own),
    )
    files = [
        ManagedFile(PROGRAM, _program(), ROLE, mode="0755"),
        ManagedFile(SETTINGS, json.dumps(settings_document(decision), indent=2, sort_keys=True) + "\n", ROLE),
        ManagedFile(UNIT_PATH, render("systemd/gpu_tuning.service.j2", program=PROGRAM, settings=SETTINGS), ROLE),
    ]
    docker, docker_rules = _docker_config(config, facts)
    return decision, (*files, *((docker,) if docker else ())), (*rules, *docker_rules)


def settings_document(decision: TuningDecision) -> dict[str, Any]:
    """What the program on the host reads."""
    cards: dict[str, dict[str, Any]] = {}
    for card in decision.cards:
        asked = {
            "power_limit_w": card.power_limit_w,
            "application_clocks_mhz": list(card.application_clocks_mhz) if card.application_clocks_mhz else None,
            "ecc": card.ecc or None,
            "compute_mode": card.compute_mode or None,
        }
        cards[card.pci_address] = {name: value for name, value in asked.items() if value is not None}
    return {
        "comment": MANAGED_HEADER,
        "persistence": decision.persistence,
        "cpu_governor": decision.cpu_governor,
        "cards": cards,
    }


def _program() -> str:
    return (content_dir() / "roles/gpu_tuning/files/apply_tuning.py").read_text(encoding="utf-8")


def _clocks(config: HostConfig) -> tuple[int, int] | None:
    if not config.gpu_tuning_application_clocks_mhz:
        return None
    memory, graphics = config.gpu_tuning_application_clocks_mhz.split(",")
    return int(memory), int(graphics)


def _card(config: HostConfig, card: HostCard) -> CardTuning:
    return CardTuning(
        pci_address=card.gpu.pci_address,
        power_limit_w=config.gpu_tuning_power_limit_w or None,
        application_clocks_mhz=_clocks(config),
        ecc=config.gpu_tuning_ecc,
        compute_mode=config.gpu_tuning_compute_mode,
    )


def _card_rules(config: HostConfig, card: HostCard) -> Iterator[Rule]:
    name = f"the {card.name}"
    row = card.row
    limit = config.gpu_tuning_power_limit_w
    highest, lowest = (row.power_limit_w, row.power_min_w) if row else (None, None)
    if limit and ((highest is not None and limit > highest) or (lowest is not None and limit < lowest)):
        reach = f"{lowest} to {highest} W" if lowest and highest else f"up to {highest} W"
        yield Rule(
            "power-limit-out-of-range",
            "refuse",
            f"`gpu_tuning_power_limit_w: {limit}`: {name} takes {reach}",
            f"`gpu_tuning_power_limit_w: {min(max(limit, lowest or limit), highest or limit)}`",
        )
    elif limit and (highest is None or lowest is None):
        known = f"up to {highest} W, and no source says from where on" if highest is not None else "nobody knows which"
        yield Rule(
            "power-limit-unproven",
            "warn",
            f"`gpu_tuning_power_limit_w: {limit}`: {name} takes power limits {known}; the card itself may refuse it",
            f"what `nvidia-smi -q -d POWER -i {card.gpu.pci_address}` shows as its least and most",
        )
    clocks = _clocks(config)
    if clocks is not None and row is not None and row.memory_clock_mhz and row.sm_clock_max_mhz:
        memory, graphics = clocks
        if memory != row.memory_clock_mhz or graphics > row.sm_clock_max_mhz:
            yield Rule(
                "application-clocks-out-of-range",
                "refuse",
                f"`gpu_tuning_application_clocks_mhz: {memory},{graphics}`: the memory of {name} runs at "
                f"{row.memory_clock_mhz} MHz and its processors at up to {row.sm_clock_max_mhz} MHz",
                f'`gpu_tuning_application_clocks_mhz: "{row.memory_clock_mhz},{min(graphics, row.sm_clock_max_mhz)}"`',
            )
    elif clocks is not None:
        yield Rule(
            "application-clocks-unproven",
            "warn",
            f"`gpu_tuning_application_clocks_mhz: {config.gpu_tuning_application_clocks_mhz}`: no source says which clocks "
            f"{name} takes; the card itself may refuse them",
            f"a pair of `nvidia-smi -q -d SUPPORTED_CLOCKS -i {card.gpu.pci_address}`",
        )
    current = card.gpu.ecc_mode
    if config.gpu_tuning_ecc and card.gpu.uuid and not current:
        yield Rule(
            "ecc-unsupported",
            "refuse",
            f"`gpu_tuning_ecc: {config.gpu_tuning_ecc}`: the driver says that {name} has no ECC to switch",
            '`gpu_tuning_ecc: ""`, which leaves it alone',
        )
    elif config.gpu_tuning_ecc and current and current != config.gpu_tuning_ecc:
        yield Rule(
            "ecc-needs-reboot",
            "warn",
            f"ECC of {name} is {current} and is to be {config.gpu_tuning_ecc}: that takes effect with the next reboot",
            None,
        )


def _governor_rules(config: HostConfig, facts: Facts) -> Iterator[Rule]:
    wish = config.gpu_tuning_cpu_governor
    if wish and not facts.cpu.governors:
        yield Rule(
            "cpu-governor-absent",
            "warn",
            f"`gpu_tuning_cpu_governor: {wish}`: the host's kernel scales no processor's frequency"
            + (", since it is a virtual machine or a container" if facts.virtualization not in ("", "none") else ""),
            'a setting in the firmware or on the machine below; `gpu_tuning_cpu_governor: ""` leaves it alone',
        )


def has_docker(facts: Facts) -> bool:
    """Is a Docker Engine installed on the host?"""
    unit = facts.units.get(DOCKER_UNIT)
    return unit is not None and unit.load_state == "loaded"


def merged_docker_config(content: str, ulimits: Mapping[str, int]) -> str:
    """``daemon.json`` with the ulimits in it, every byte as it was where they are there already.

    Args:
        content: The file as it is; empty where there is none.
        ulimits: Name -> value, -1 for unlimited.

    Raises:
        ValueError: it is not a JSON object, or its ulimits are none.
    """
    document = json.loads(content) if content.strip() else {}
    current = document.get("default-ulimits", {}) if isinstance(document, dict) else None
    if not isinstance(current, dict):
        raise ValueError("it does not hold what Docker expects")
    asked = {name: {"Name": name, "Hard": value, "Soft": value} for name, value in ulimits.items()}
    if all(current.get(name) == value for name, value in asked.items()):
        return content
    return json.dumps({**document, "default-ulimits": {**current, **asked}}, indent=2, ensure_ascii=False) + "\n"


def _docker_config(config: HostConfig, facts: Facts) -> tuple[ManagedFile | None, tuple[Rule, ...]]:
    if not config.gpu_tuning_docker_ulimits or not has_docker(facts):
        return None, ()
    found = facts.files.get(DOCKER_CONFIG)
    problem = ""
    content = ""
    if found is not None and found.content is None:
        problem = "others than root may not read it, so that it may hold secrets"
    else:
        try:
            content = merged_docker_config((found.content or "") if found else "", config.gpu_tuning_docker_ulimits)
        except ValueError as error:
            problem = str(error)
    if problem:
        rule = Rule(
            "docker-config-left-alone",
            "warn",
            f"{DOCKER_CONFIG} is not changed: {problem}",
            "`default-ulimits` written there by hand, or `gpu_tuning_docker_ulimits: {}`",
        )
        return None, (rule,)
    if found is None:
        return ManagedFile(DOCKER_CONFIG, content, ROLE, secret=True), ()
    return ManagedFile(DOCKER_CONFIG, content, ROLE, mode=found.mode, owner=found.owner, group=found.group, secret=True), ()
