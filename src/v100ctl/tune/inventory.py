"""The winner as an edit of the inventory: the smallest change of its text, so that comments and layout stay; checked by loading.

PyYAML tells where in the text each value stands; only those places are written.
"""

from __future__ import annotations

import difflib
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from v100ctl.errors import UsageError, V100ctlError
from v100ctl.fleet import Fleet, HostConfig, load_fleet

#: A path of keys below a file's top.
Keys = tuple[str, ...]
_SUFFIXES = (".yml", ".yaml", ".json", "")
_INSTANCES, _OVERRIDES = "llm_server_instances", "llm_server_instance_overrides"


class EditError(V100ctlError):
    """The text cannot be changed so by a small edit."""


# --- text ----------------------------------------------------------------------------------------------------------------------


def set_value(text: str, keys: Keys, value: Any) -> str:
    """``text`` (YAML, or JSON as a part of it) with one value set, and nothing else of it touched.

    Raises:
        EditError: what stands there is no mapping, is a template or a secret, or is a list that cannot be changed item by item.
    """
    if text.startswith("$ANSIBLE_VAULT"):
        raise EditError("the file is encrypted with Ansible Vault")
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    changed = _placed(text, root, keys, value)
    expected = _merged(_plain(root), keys, value)
    try:
        whole = _plain(yaml.compose(changed, Loader=yaml.SafeLoader)) == expected
    except yaml.YAMLError:
        whole = False
    if not whole:
        raise EditError(f"`{'.'.join(keys)}` cannot be set there without touching more")
    return changed


def _placed(text: str, root: yaml.Node | None, keys: Keys, value: Any) -> str:
    if root is None:
        return f"{text.rstrip()}\n{_block(keys, value, 0)}".lstrip("\n") if text.strip() else f"---\n{_block(keys, value, 0)}"
    node = root
    for depth, key in enumerate(keys):
        if not isinstance(node, yaml.MappingNode):
            raise EditError(f"`{'.'.join(keys[:depth])}` is no mapping")
        pair = next((item for item in node.value if item[0].value == key), None)
        if pair is None:
            return _inserted(text, node, keys[depth:], value)
        parent, (name, node) = node, pair
        if _is_empty(node):
            rest = keys[depth + 1 :]
            colon = text.find(":", name.end_mark.index) + 1
            if not colon:
                raise EditError(f"`{'.'.join(keys[: depth + 1])}` has no value")
            in_line = not rest or parent.flow_style
            made = (
                f" {_flow(_nested(rest, value))}"
                if in_line
                else "\n" + _block(rest, value, name.start_mark.column + 2).rstrip("\n")
            )
            # Where nothing is written, its place is that of what follows.
            written = node.start_mark.index != node.end_mark.index
            return text[:colon] + made + text[node.end_mark.index if written else colon :]
    return _replaced(text, node, keys, value)


def _is_empty(node: yaml.Node) -> bool:
    return isinstance(node, yaml.ScalarNode) and node.tag == "tag:yaml.org,2002:null"


def _replaced(text: str, node: yaml.Node, keys: Keys, value: Any) -> str:
    where = ".".join(keys)
    first, last = node.start_mark.index, node.end_mark.index
    if isinstance(node, yaml.ScalarNode):
        if not node.tag.startswith("tag:yaml.org,2002:") or "{{" in node.value or node.style in ("|", ">"):
            raise EditError(f"`{where}` is a template or a secret")
        return text[:first] + _flow(value) + text[last:]
    if isinstance(node, yaml.SequenceNode) and isinstance(value, list | tuple):
        if node.flow_style:
            return text[:first] + _flow(list(value)) + text[last:]
        known = [_plain(item) for item in node.value]
        if len(value) == len(known):
            for item, old, new in reversed(list(zip(node.value, known, value, strict=True))):
                if old != new:
                    text = text[: item.start_mark.index] + _flow(new) + text[item.end_mark.index :]
            return text
        if known and list(value[: len(known)]) == known:
            end = _line_end(text, _end(text, node))
            # Where the dash of an item is.
            indent = text[: node.value[0].start_mark.index].rpartition("\n")[2].index("-")
            added = "".join(f"\n{' ' * indent}- {_flow(item)}" for item in value[len(known) :])
            return text[:end] + added + text[end:]
    raise EditError(f"`{where}` cannot be replaced item by item")


def _inserted(text: str, node: yaml.MappingNode, keys: Keys, value: Any) -> str:
    if node.flow_style:
        brace = node.end_mark.index - 1
        before = text[:brace].rstrip()
        comma = "" if not node.value or before.endswith(",") else ","
        made = _flow(_nested(keys, value))[1:-1]
        gap = " " if comma or before.endswith(",") else ""
        return f"{before}{comma}{gap}{made}{text[brace:]}"
    end = _line_end(text, _end(text, node))
    indent = node.value[0][0].start_mark.column
    return f"{text[:end]}\n{_block(keys, value, indent).rstrip()}{text[end:]}"


def _end(text: str, node: yaml.Node) -> int:
    """Where a value really ends; PyYAML counts what follows a block as part of it."""
    if isinstance(node, yaml.CollectionNode) and not node.flow_style and node.value:
        last = node.value[-1]
        key, value = last if isinstance(node, yaml.MappingNode) else (last, last)
        return (
            int(key.end_mark.index) + 1
            if _is_empty(value) and value.start_mark.index == value.end_mark.index
            else _end(text, value)
        )
    return len(text[: node.end_mark.index].rstrip())


def _line_end(text: str, place: int) -> int:
    found = text.find("\n", place)
    return len(text) if found < 0 else found


def _nested(keys: Keys, value: Any) -> Any:
    for key in reversed(keys):
        value = {key: value}
    return value


def _flow(value: Any) -> str:
    shown = yaml.safe_dump(value, default_flow_style=True, width=10**6, sort_keys=False).strip()
    return shown.removesuffix("...").strip()


def _block(keys: Keys, value: Any, indent: int) -> str:
    value = list(value) if isinstance(value, tuple) else value
    shown = yaml.safe_dump(_nested(keys, value), default_flow_style=False, sort_keys=False, width=10**6)
    return "".join(" " * indent + line + "\n" for line in shown.splitlines())


def _plain(node: yaml.Node | None) -> Any:
    """A document as data; what has a tag of its own is its tag and text."""
    if node is None:
        return {}
    if _is_empty(node):
        return None
    if isinstance(node, yaml.MappingNode):
        return {str(_plain(key)): _plain(value) for key, value in node.value}
    if isinstance(node, yaml.SequenceNode):
        return [_plain(item) for item in node.value]
    if node.tag.startswith("tag:yaml.org,2002:"):
        return yaml.safe_load(yaml.serialize(node))
    return [node.tag, node.value]


def _merged(data: Any, keys: Keys, value: Any) -> Any:
    if not keys:
        return list(value) if isinstance(value, tuple) else value
    base = data if isinstance(data, dict) else {}
    return {**base, keys[0]: _merged(base.get(keys[0]), keys[1:], value)}


# --- files ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Edit:
    """One file of the inventory, before and after. ``hosts``: whose settings that changes."""

    path: Path
    before: str
    after: str
    hosts: tuple[str, ...]

    @property
    def diff(self) -> str:
        """As `diff -u` shows it."""
        old, new = self.before.splitlines(keepends=True), self.after.splitlines(keepends=True)
        name = str(self.path)
        return "".join(difflib.unified_diff(old, new, name if self.before else "/dev/null", name))

    def write(self) -> None:
        """Aside, then renamed in.

        Raises:
            V100ctlError: the file is not as it was when the edit was made.
        """
        target = self.path.resolve()
        now = target.read_text(encoding="utf-8") if target.exists() else ""
        if now != self.before:
            raise V100ctlError(f"{self.path} was changed meanwhile", hint="look at it, then apply the diff by hand")
        target.parent.mkdir(parents=True, exist_ok=True)
        descriptor, aside = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            stream.write(self.after)
        Path(aside).chmod(target.stat().st_mode & 0o777 if target.exists() else 0o644)
        Path(aside).replace(target)


@dataclass(frozen=True)
class _Place:
    path: Path
    prefix: Keys = ()


def edit_inventory(fleet: Fleet, host: str, instance: str, changes: Mapping[Keys, Any], wanted: HostConfig, level: str) -> Edit:
    """The edit that sets the winner's values.

    Args:
        fleet: The inventory, as it was read.
        host: The tuned host.
        instance: The tuned instance.
        changes: Path of a host's variables -> value.
        wanted: The host's configuration with the values.
        level: ``host``, ``group:NAME`` or ``all``.

    Raises:
        UsageError: there is no such level here.
        EditError: the text cannot be changed so; or loading it again shows that something else would come of it.
    """
    kind, _, group = level.partition(":")
    if kind not in ("host", "group", "all") or (kind == "group") != bool(group):
        raise UsageError(f"--write-to {level}: `host`, `group:NAME` or `all`")
    sources = [Path(source) for source in fleet.sources if "," not in source]
    if not sources:
        raise EditError("the inventory is no file", hint="set the values where your inventory keeps them")
    bases = [source if source.is_dir() else source.parent for source in sources]
    names = (host,) if kind == "host" else (group or "all",)
    places = _places(sources, bases, "host_vars" if kind == "host" else "group_vars", names[0], is_host=kind == "host")
    place, variable = _choose(places, instance, bases[0], "host_vars" if kind == "host" else "group_vars", names[0])
    before = place.path.read_text(encoding="utf-8") if place.path.exists() else ""
    after = before
    for path, value in changes.items():
        keys = (variable, *path[1:]) if path[0] == _INSTANCES else path
        try:
            after = set_value(after, (*place.prefix, *keys), value)
        except EditError as error:
            shown = json.dumps(value)
            raise EditError(f"{place.path}: {error.message}", hint=f"set `{'.'.join(keys)}: {shown}` there by hand") from error
    base = next((item for item in bases if item in place.path.parents), bases[0])
    changed = _loaded(fleet, base, place.path, after)
    _verify(fleet, changed, host, wanted, place.path, kind)
    moved = sorted(name for name, item in fleet.hosts.items() if _data(item.config) != _data(changed.hosts[name].config))
    return Edit(place.path, before, after, tuple(moved))


def _places(sources: Sequence[Path], bases: Sequence[Path], folder: str, name: str, *, is_host: bool) -> list[_Place]:
    """Where a host or a group has variables already."""
    found = []
    for base in bases:
        for suffix in _SUFFIXES:
            path = base / folder / f"{name}{suffix}"
            if path.is_file():
                found.append(_Place(path))
            elif path.is_dir():
                found += [_Place(item) for item in sorted(path.rglob("*")) if item.is_file() and item.suffix in _SUFFIXES]
    for source in sources:
        files = [source] if source.is_file() else sorted(item for item in source.iterdir() if item.suffix in (".yml", ".yaml"))
        for file in files:
            try:
                root = yaml.compose(file.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
            except (yaml.YAMLError, UnicodeDecodeError):
                # Another kind of inventory.
                continue
            found += [_Place(file, prefix) for prefix in _inline(root, (), name, is_host=is_host)]
    return found


def _inline(node: yaml.Node | None, prefix: Keys, name: str, *, is_host: bool) -> list[Keys]:
    """Where an inventory of YAML has a host's or a group's variables itself."""
    if not isinstance(node, yaml.MappingNode):
        return []
    found: list[Keys] = []
    for key, value in node.value:
        if not isinstance(value, yaml.MappingNode):
            continue
        parts = {part.value: inner for part, inner in value.value}
        here = (*prefix, key.value)
        hosts = parts.get("hosts")
        if is_host and isinstance(hosts, yaml.MappingNode):
            found += [(*here, "hosts", name) for part, inner in hosts.value if part.value == name and inner.value]
        if not is_host and key.value == name and isinstance(parts.get("vars"), yaml.MappingNode):
            found.append((*here, "vars"))
        found += _inline(parts.get("children"), (*here, "children"), name, is_host=is_host)
    return found


def _choose(places: Sequence[_Place], instance: str, base: Path, folder: str, name: str) -> tuple[_Place, str]:
    """The place that says something of the instance already, else the first, else a new file; and the variable to set there."""
    for variable in (_INSTANCES, _OVERRIDES):
        for place in places:
            node: Any = _plain_file(place.path)
            for key in (*place.prefix, variable, *((instance,) if variable == _INSTANCES else ())):
                node = node.get(key) if isinstance(node, dict) else None
            if isinstance(node, dict):
                return place, variable
    usable = [place for place in places if not place.path.read_text(encoding="utf-8").startswith("$ANSIBLE_VAULT")]
    return (usable[0] if usable else _Place(base / folder / f"{name}.yml")), _OVERRIDES


def _plain_file(path: Path) -> Any:
    text = path.read_text(encoding="utf-8")
    return {} if text.startswith("$ANSIBLE_VAULT") else _plain(yaml.compose(text, Loader=yaml.SafeLoader))


def _loaded(fleet: Fleet, base: Path, path: Path, text: str) -> Fleet:
    """The inventory as it would be with one file changed: links to all of it in a folder beside, and the changed file."""
    with tempfile.TemporaryDirectory(prefix="v100ctl-tune-") as name:
        folder, real = Path(name) / base.resolve().name, base.resolve()
        _mirror(real, folder, path.resolve().relative_to(real).parts, text)
        sources = [
            str(folder / Path(item).resolve().relative_to(real)) if _within(item, real) else item for item in fleet.sources
        ]
        files = [
            fleet.vault_arguments[place + 1]
            for place, word in enumerate(fleet.vault_arguments)
            if word == "--vault-password-file"
        ]
        return load_fleet(sources, vault_password_files=files, vault_password=fleet.vault_password)


def _within(source: str, base: Path) -> bool:
    return "," not in source and (Path(source).resolve() == base or base in Path(source).resolve().parents)


def _mirror(real: Path, folder: Path, parts: Sequence[str], text: str) -> None:
    folder.mkdir()
    for item in real.iterdir() if real.is_dir() else ():
        if item.name != parts[0]:
            (folder / item.name).symlink_to(item)
    if len(parts) == 1:
        (folder / parts[0]).write_text(text, encoding="utf-8")
    else:
        _mirror(real / parts[0], folder / parts[0], parts[1:], text)


def _data(config: HostConfig) -> dict[str, Any]:
    return config.model_dump(mode="json")


def _verify(fleet: Fleet, changed: Fleet, host: str, wanted: HostConfig, path: Path, kind: str) -> None:
    found, expected = _data(changed.hosts[host].config), _data(wanted)
    if found != expected:
        wrong = sorted(key for key in expected if found[key] != expected[key])
        raise EditError(
            f"with the values in {path}, {host} would not get what was measured: {', '.join(wrong)} differ",
            hint="another level hides them, or loses what it had: `--write-to` names another, or set them by hand",
        )
    if kind == "host":
        others = [
            name for name in fleet.hosts if name != host and _data(changed.hosts[name].config) != _data(fleet.hosts[name].config)
        ]
        if others:
            raise EditError(f"{path} is shared: {', '.join(others)} would change too", hint="set the values by hand")
