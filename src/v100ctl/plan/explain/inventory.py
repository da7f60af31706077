"""The equivalent settings, as a piece of inventory that can be pasted."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass, field
from typing import Any

import yaml
from pydantic import ValidationError

from v100ctl.fleet import InstanceSpec, Settings
from v100ctl.plan.explain.types import Engine, is_opaque


@dataclass
class Wish:
    """What a command line asks for, gathered flag by flag: paths of :class:`~v100ctl.fleet.Settings`, and an instance's keys."""

    engine: Engine
    version: str
    settings: dict[str, Any] = field(default_factory=dict)
    model: str | None = None
    listen: str | None = None
    port: int | None = None
    gpus: list[int | str] | None = None
    has_key: bool = False
    extra_args: list[str] = field(default_factory=list)
    #: Lines for the reader, above the snippet.
    comments: list[str] = field(default_factory=list)

    def snippet(self) -> str:
        """The YAML."""
        version = "llama_cpp_build" if self.engine == "llama_cpp" else "vllm_version"
        lines = [f"# {comment}" for comment in self.comments]
        lines += [f"{version}: {_scalar(int(self.version) if self.version.isdecimal() else self.version)}"]
        lines += ["llm_server_instances:", "  chat:", f"    engine: {self.engine}", *self._model()]
        if self.gpus is not None:
            lines.append(f"    gpus: {_scalar(self.gpus)}")
        lines += self._listen()
        if self.port is not None and 1 <= self.port <= 65535:
            lines.append(f"    port: {self.port}")
        if self.has_key:
            lines.append('    api_keys: ["{{ vault_chat_api_key }}"]  # the key belongs into a vault')
        settings = self._settings()
        if settings:
            lines.append("    settings:")
            for line in yaml.safe_dump(settings, sort_keys=False, allow_unicode=True, width=10**6).splitlines():
                lines.append(f"      {line}")
        if self.extra_args:
            lines.append(f"    extra_args: {_scalar(self.extra_args)}")
        return "\n".join(lines) + "\n"

    def instance(self) -> InstanceSpec | None:
        """The instance that the plan's rules are asked about; ``None`` where the inventory could not hold these settings."""
        model = {"path": "/model", "sha256": "0" * 64}
        try:
            return InstanceSpec.model_validate({"engine": self.engine, "model": model, "settings": self._settings()})
        except ValidationError:
            return None

    def _model(self) -> list[str]:
        lines = ["    model:"]
        model = self.model
        if model is not None and re.fullmatch(r"https?://[^\s/?#]+\S*", model):
            lines.append(f"      url: {_scalar(model)}")
            return [*lines, '      sha256: ""  # fill in what its publisher states']
        if model is not None and model.startswith("/") and ".." not in model.split("/") and not is_opaque(model):
            lines.append(f"      path: {_scalar(model)}")
            return [*lines, '      sha256: ""  # fill in: `sha256sum` of the file on the host prints it']
        named = f" of {_comment(model)}" if model else ""
        return [*lines, f'      path: ""  # fill in: the absolute path on the host{named}', '      sha256: ""']

    def _listen(self) -> list[str]:
        listen = "127.0.0.1" if self.listen == "localhost" else (self.listen or "").strip("[]")
        if not listen:
            return []
        try:
            address = ipaddress.ip_address(listen)
        except ValueError:
            return [f"    listen: 127.0.0.1  # was: {_comment(listen)}; an IP address is needed here"]
        if not address.is_loopback and not self.has_key:
            return [f"    listen: 127.0.0.1  # was: {address} without a key; beyond loopback give `api_keys`"]
        return [f"    listen: {_scalar(str(address))}"]

    def _settings(self) -> dict[str, Any]:
        """The settings that the inventory takes, in its own order; what it does not take is dropped with a comment above."""
        nested: dict[str, Any] = {}
        for path, value in self.settings.items():
            head, _, tail = path.partition(".")
            if isinstance(value, float) and value.is_integer():
                value = int(value)
            if tail:
                nested.setdefault(head, {})[tail] = value
            else:
                nested[path] = value
        return {name: nested[name] for name in Settings.model_fields if name in nested}


def typed(path: str, value: str) -> Any | None:
    """``value`` as the inventory would have it, ``None`` where the inventory does not take it."""
    head, _, tail = path.partition(".")
    if head not in Settings.model_fields:
        return None
    candidate: Any = yaml.safe_load(value) if re.fullmatch(r"[-+]?[0-9]*\.?[0-9]+([eE][-+]?[0-9]+)?", value) else value
    if isinstance(candidate, str) and candidate in ("true", "false"):
        candidate = candidate == "true"
    document: dict[str, Any] = {head: {tail: candidate} if tail else candidate}
    if head == "rope_scaling" and tail != "kind":
        document[head]["kind"] = "yarn"
    if head == "speculative":
        return candidate
    try:
        found = getattr(Settings.model_validate(document), head)
    except ValidationError:
        return None
    return getattr(found, tail) if tail else found


def _scalar(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=True, width=10**6, allow_unicode=True).removesuffix("\n...\n").strip()


def _comment(text: str) -> str:
    """``text`` inside a comment: one line, nothing that a terminal would act on."""
    return re.sub(r"[^\x20-\x7e\u00a1-\uffff]", "?", text)[:200]
