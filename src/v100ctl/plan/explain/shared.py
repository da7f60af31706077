"""What both engines' explanations have in common: environment, wrappers, the text itself."""

from __future__ import annotations

import dataclasses
import difflib
import ipaddress
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from v100ctl.catalog.history import Advice, History, Variable, Verdict
from v100ctl.plan.command_line import DASHES, Command
from v100ctl.plan.explain.types import HIDDEN, Card, Engine, Finding, is_opaque, looks_secret
from v100ctl.plan.types import Rule, Severity

_NAMES: dict[Engine, str] = {"llama_cpp": "llama.cpp", "vllm": "vLLM"}


def text_findings(command: Command) -> Iterator[Finding]:
    """What is wrong with the text as it was pasted."""
    for remark in command.remarks:
        yield Finding(
            (), "unwise" if remark.harmful else "ok", f"text-{remark.id}", meaning="the text itself", reason=remark.text
        )


def nearest_name(word: str, names: Iterable[str]) -> str | None:
    """The known word that is most like ``word``."""
    near = difflib.get_close_matches(word, sorted(names), n=1, cutoff=0.75)
    return near[0] if near else None


def wrapper_findings(command: Command) -> Iterator[Finding]:
    """``sudo``, ``numactl`` and their like."""
    for wrapper in command.wrappers:
        program = wrapper[0].rsplit("/", 1)[-1]
        words = tuple(_without_assigned_secrets(wrapper))
        if program == "numactl":
            yield Finding(words, "ok", "wrapper", meaning="keeps threads and memory on the named NUMA nodes")
        elif program == "taskset":
            yield Finding(words, "ok", "wrapper", meaning="keeps threads on the named processors")
        elif program == "sudo" and not {"-u", "--user"} & set(wrapper) and not any(w.startswith("--user=") for w in wrapper):
            if command.program == "cmake" or command.image is not None:
                continue
            yield Finding(
                words,
                "unwise",
                "server-as-root",
                meaning="starts the server as root",
                reason="whoever breaks into the server has the host",
                nearest="a user of its own; units of this toolkit run as `v100`",
            )


def _without_assigned_secrets(words: Sequence[str]) -> Iterator[str]:
    for word in words:
        name, separator, _ = word.partition("=")
        yield f"{name}={HIDDEN}" if separator and looks_secret(name) else word


def environment_findings(
    command: Command, engine: Engine, history: History, card: Card, version: str | None = None
) -> Iterator[Finding]:
    """Variables that the text sets, as far as anything is known about them."""
    visible = command.environment.get("CUDA_VISIBLE_DEVICES")
    order = command.environment.get("CUDA_DEVICE_ORDER")
    if visible is not None:
        yield _visible_devices(visible, order, engine)
    if order is not None:
        known = order in ("PCI_BUS_ID", "FASTEST_FIRST")
        yield Finding(
            (f"CUDA_DEVICE_ORDER={order}",),
            "ok" if order == "PCI_BUS_ID" else "unwise",
            "device-order",
            meaning="numbers cards as `nvidia-smi` does" if order == "PCI_BUS_ID" else "numbers cards by speed",
            reason=None if order == "PCI_BUS_ID" else "index 0 may be another card than the one that `nvidia-smi` calls 0",
            nearest=None
            if order == "PCI_BUS_ID"
            else "`CUDA_DEVICE_ORDER=PCI_BUS_ID`"
            if known
            else "PCI_BUS_ID or FASTEST_FIRST",
        )
    for name, value in command.environment.items():
        if name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
            continue
        rows = [row for row in history.environment if row.name == name]
        row = next((item for item in rows if _variable_applies(item, value, card, version)), None)
        if row is None:
            continue
        secret = row.secret or looks_secret(name)
        unit = secret and command.origin == "systemd"
        yield Finding(
            (f"{name}={HIDDEN if secret else value}",),
            "unwise" if unit and row.verdict == "ok" else row.verdict,
            "secret-in-unit" if unit else "environment",
            meaning=row.meaning,
            reason="every user of the host can read a unit's `Environment=`" if unit else row.reason,
            nearest="an `EnvironmentFile=` that only its reader may read" if unit else row.nearest,
            settings={row.setting: int(value)} if row.setting and value.isdecimal() else {},
        )


def _variable_applies(row: Variable, value: str, card: Card, version: str | None) -> bool:
    if row.values is not None and value not in row.values:
        return False
    if row.versions is not None and version is not None and Version(version) not in SpecifierSet(row.versions):
        return False
    return row.compute_capability_below is None or card.capability < row.compute_capability_below


def _visible_devices(value: str, order: str | None, engine: Engine) -> Finding:
    words = (f"CUDA_VISIBLE_DEVICES={value}",)
    meaning = "the cards that the process sees"
    parts = [part.strip() for part in value.split(",") if part.strip()]
    if is_opaque(value):
        return Finding(words, "ok", "visible-devices", meaning=meaning)
    if engine == "vllm" and any(not part.lstrip("-").isdecimal() for part in parts):
        return Finding(
            words,
            "fails",
            "vllm-card-by-uuid",
            meaning=meaning,
            reason="both pinned versions of vLLM read whole numbers there, so a UUID ends in a ValueError",
            nearest="`CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES=0`, or `gpus: [GPU-...]` in the inventory",
            settings={"gpus": parts},
        )
    numbers = all(part.isdecimal() for part in parts)
    if not parts or parts == ["-1"]:
        return Finding(words, "unwise", "no-visible-device", meaning="no card at all", reason="the engine sees no card")
    gpus = [int(part) for part in parts] if numbers else parts
    if numbers and order is None:
        return Finding(
            words,
            "unwise",
            "device-order-unsaid",
            meaning=meaning,
            reason="CUDA numbers cards by speed unless told otherwise: on a mixed host that is another card than `nvidia-smi`'s",
            nearest=f"`CUDA_DEVICE_ORDER=PCI_BUS_ID {words[0]}`, or the card's UUID",
            settings={"gpus": gpus},
        )
    return Finding(words, "ok", "visible-devices", meaning=meaning, settings={"gpus": gpus})


def hidden(command: Command, secret_flags: Iterable[str]) -> Command:
    """The command with every secret replaced, so that nothing made from it can show one.

    Secrets are the values of ``secret_flags`` (abbreviated ones too), of flags and variables that are named like one, and the
    user and password of a URL, and what looks like a token wherever it stands. What only names a variable (``$KEY``) stays.
    """
    flags = {flag.lstrip("-") for flag in secret_flags}
    words: list[str] = []
    pending = False
    for word in command.words:
        bare, separator, value = word.lstrip(f"-{DASHES}").partition("=")
        is_flag = word[:1] == "-" or word[:1] in DASHES
        normal = bare.replace("_", "-")
        # argparse takes two letters for an argument that nothing else begins with; `-hf` is another's name.
        least = 2 if word.startswith("--") else 5
        secret = is_flag and (
            looks_secret(bare) or any(flag == normal or (len(normal) >= least and flag.startswith(normal)) for flag in flags)
        )
        if secret:
            words.append(f"{word[: len(word) - len(value)]}{_hidden_value(value)}" if separator else word)
        elif pending and (not is_flag or (len(word) > _LONGEST_SHORT_FLAG and not word.startswith("--"))):
            # llama.cpp takes what follows, whatever it looks like.
            words.append(_hidden_value(word))
            pending = False
            continue
        elif words and words[-1] == HIDDEN and not is_flag and re.fullmatch(r"sk-\S+|[A-Za-z0-9_-]{16,}", word):
            # Later versions of vLLM take several keys.
            words.append(HIDDEN)
        elif re.match(r"[A-Z_]*(KEY|TOKEN|SECRET|PASSWORD)[A-Z_]*=", word) and looks_secret(word.partition("=")[0]):
            words.append(f"{word.partition('=')[0]}={HIDDEN}")
        else:
            words.append(_without_credentials(word))
        pending = secret and not separator
    return dataclasses.replace(
        command,
        words=tuple(words),
        environment={
            name: _hidden_value(value) if looks_secret(name) else _without_credentials(value)
            for name, value in command.environment.items()
        },
        wrappers=tuple(tuple(_without_assigned_secrets(wrapper)) for wrapper in command.wrappers),
    )


def _hidden_value(value: str) -> str:
    return value if is_opaque(value) else HIDDEN


#: `-nkvo`, `-otd`, `-dev`: words after a key that are another flag, not the key.
_LONGEST_SHORT_FLAG = 7
#: Tokens of Hugging Face and keys of the OpenAI kind, and what an HTTP header or a URL's query carries under such a name.
_TOKEN = re.compile(
    r"\bhf_[A-Za-z0-9]{8,}|\bsk-[A-Za-z0-9_-]{16,}|(?<=\bBearer )\S+|(?<=[?&_]token=)[^&\s]+|(?<=[?&]api_key=)[^&\s]+"
)


def _without_credentials(word: str) -> str:
    return _TOKEN.sub(HIDDEN, re.sub(r"(://)[^/@\s]*[^/@\s:][^/@\s]*@", rf"\1{HIDDEN}@", word))


def advice_applies(row: Advice, names: Sequence[str], value: str | None, card: Card) -> bool:
    """Whether a row is about this flag with this value on this card; builds and versions are the caller's."""
    if not set(row.names) & set(names):
        return False
    if row.values is not None and value not in row.values:
        return False
    if row.above is not None and not (value is not None and _number(value) > row.above):
        return False
    return row.compute_capability_below is None or card.capability < row.compute_capability_below


def _number(value: str) -> float:
    try:
        return float(value)
    except ValueError:
        return -math.inf


def is_loopback(host: str) -> bool:
    """Whether only the host itself can reach a server that listens there."""
    if host in ("localhost", ""):
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        # A socket's path, or a name that nobody can look up here.
        return host.startswith("/") or host.endswith(".sock")


def listening_finding(words: tuple[str, ...], host: str) -> Finding:
    """A server that anyone on the network may use."""
    return Finding(
        words,
        "unwise",
        "listen-unauthenticated",
        meaning=f"listens on {host} without a key",
        reason="anyone on that network may use the server",
        nearest="`listen: 127.0.0.1`, or `api_keys`",
    )


def published_findings(command: Command) -> Iterator[Finding]:
    """Ports of a container that others than the host itself can reach; inside, a server has to listen on every address."""
    options = next((wrapper for wrapper in command.wrappers if wrapper[-1:] == (command.image,)), ())
    for word, following in itertools.pairwise(options):
        joined = re.match(r"(?:-p|--publish=)(.+)", word)
        port = following if word in ("-p", "--publish") else joined[1] if joined else None
        if port is not None and not re.match(r"(127\.[0-9.]+|localhost|\[?::1\]?):", port):
            yield Finding(
                ("-p", port),
                "unwise",
                "listen-unauthenticated",
                meaning="publishes the container's port without a key",
                reason="a port without an address is published on every one, past the firewall's own rules",
                nearest=f"`-p 127.0.0.1:{port if ':' in port else f'{port}:{port}'}`, or `api_keys`",
            )
        elif (following == "host" and word in ("--network", "--net")) or word in ("--network=host", "--net=host"):
            yield listening_finding((word, following) if "=" not in word else (word,), "every address of the host")


#: Rules of the plan that are about the host, the inventory or what this toolkit does, not about a command line.
_NOT_ABOUT_FLAGS = frozenset(
    {
        "context-shared",
        "gpus-without-cuda",
        "listen-unauthenticated",
        "vllm-long-context",
    }
)
#: The settings that a rule is about, where its text does not name them all.
_SETTINGS_OF_RULES: dict[str, tuple[str, ...]] = {
    "quantised-v-needs-flash-attention": ("kv_cache_type_v", "flash_attention"),
    "kv-types-converted": ("kv_cache_type_k", "kv_cache_type_v"),
    "kv-types-without-kernel": ("kv_cache_type_k", "kv_cache_type_v"),
    "ubatch-above-batch": ("ubatch_size", "batch_size"),
    "vllm-batch-below-context": ("batch_size", "context_length"),
    "vllm-batch-below-parallel": ("batch_size", "parallel"),
    "vllm-quantization-below-minimum": ("quantization",),
    "vllm-quantization-unknown": ("quantization",),
    "vllm-fp8-cache": ("kv_cache_type_k",),
    "vllm-swap-space": ("swap_space_gib",),
}
_VERDICT_OF_SEVERITY: dict[Severity, Verdict] = {"refuse": "fails", "warn": "unwise", "info": "ok"}


def settings_said(findings: Iterable[Finding]) -> dict[str, tuple[str, ...]]:
    """Setting -> the words that say it; the last ones count."""
    return {setting: finding.words for finding in findings for setting in finding.settings}


def rule_findings(rules: Iterable[Rule], said: Mapping[str, tuple[str, ...]], default: str) -> Iterator[Finding]:
    """What the plan's own rules say about the settings that a command line asks for.

    Args:
        rules: Their verdicts on an instance with these settings.
        said: From :func:`settings_said`.
        default: The word that stands for a rule about no flag.
    """
    for rule in rules:
        if rule.id in _NOT_ABOUT_FLAGS:
            continue
        named = re.findall(r"`([a-z_]+)[:`]", f"{rule.reason} {rule.nearest or ''}")
        settings = _SETTINGS_OF_RULES.get(rule.id) or tuple(dict.fromkeys(named))
        words = tuple(word for setting in settings if setting in said for word in said[setting])
        yield Finding(words or (default,), _VERDICT_OF_SEVERITY[rule.severity], rule.id, reason=rule.reason, nearest=rule.nearest)


def add_to(findings: list[Finding], found: Finding) -> None:
    """Put a verdict on the finding of the same words where that one is plainly ok, else beside it."""
    for index, own in enumerate(findings):
        if own.words == found.words and own.id == "ok":
            findings[index] = dataclasses.replace(
                own, verdict=found.verdict, id=found.id, reason=found.reason, nearest=found.nearest
            )
            return
    findings.append(found)


def unseen_finding(words: tuple[str, ...]) -> Finding:
    """A variable that the text does not set: it may hold any number of arguments."""
    return Finding(words, "ok", "unseen-words", reason="the text does not set it; what it holds is not seen here")


def secret_finding(words: tuple[str, ...], nearest: str) -> Finding:
    """A secret on a command line."""
    return Finding(
        words,
        "unwise",
        "secret-in-argv",
        reason="every user of the host can read a command line (`ps`), and so can every report that quotes it",
        nearest=nearest,
    )


def engine_name(engine: Engine) -> str:
    """The engine as people call it."""
    return _NAMES[engine]
