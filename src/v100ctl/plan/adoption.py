"""Servers that somebody has started by hand where an instance shall be: who they are, and whether they may be stopped.

Nobody's server is touched unless ``llm_server_adopt`` names the instance that takes its place. Even then some are left alone,
because stopping them would stop more than a server, or because somebody else would start them anew at once.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import NamedTuple

import yaml

from v100ctl.catalog import Catalog
from v100ctl.errors import V100ctlError
from v100ctl.facts import Facts, Listener, Occupant
from v100ctl.fleet import HostConfig, InstanceSpec
from v100ctl.plan.cards import HostCard
from v100ctl.plan.types import Adoption, Rule

#: Addresses to listen on that stand for all of a host's.
ANYWHERE = frozenset(("0.0.0.0", "::", "*"))  # noqa: S104 - compared, not bound
ADOPTED = "/var/lib/v100ctl/state/adopted.json"

#: Services that others are started from: what is in their control group is not them.
_LAUNCHERS = frozenset({"cron.service", "crond.service", "atd.service", "anacron.service"})
#: Services that a host needs. Whoever gives an instance their port has made a mistake.
_NEEDED = re.compile(
    r"(systemd-.*|ssh|sshd|ssh@.*|sshd@.*|dbus|dbus-broker|docker|containerd|podman|kubelet|NetworkManager|networking|getty@.*|"
    r"nvidia-persistenced|nvidia-fabricmanager|user@.*)\.service"
)
#: Programs that start their children anew, and how each is told not to.
_SUPERVISORS: Mapping[str, str] = {
    "supervisord": "`supervisorctl stop NAME` on the host, and `autostart=false` in its configuration",
    "runsv": "`sv down NAME` on the host, and a file `down` in its folder",
    "s6-supervise": "`s6-svc -d FOLDER` on the host, and a file `down` in it",
    "monit": "`monit stop NAME` on the host",
    "PM2": "`pm2 delete NAME && pm2 save` on the host",
}
_MULTIPLEXERS: Mapping[str, str] = {"tmux": "tmux", "screen": "screen", "SCREEN": "screen"}
#: Longer command lines are cut where a person reads them.
_SHOWN = 400


def command_of(occupant: Occupant) -> str:
    """Its command line as a shell takes it, without secrets. Of a container the one that runs inside."""
    argv = occupant.container.argv if occupant.container and occupant.container.argv else occupant.argv
    line = shlex.join(argv)
    return line if len(line) <= _SHOWN else f"{line[: _SHOWN - 3]}..."


def origin_of(occupant: Occupant) -> str:
    """Who has started it, as far as the host tells."""
    container = occupant.container
    if container is not None:
        named = container.name or container.id[:12] or "that forwards the port"
        return f"in the {container.runtime} container {named}" + (f" of {container.image}" if container.image else "")
    starters = [name.split(":")[0].split(" ")[0] for name in occupant.ancestors]
    who = f"of {occupant.user}" if occupant.user else ""
    if _is_unit(occupant):
        state = f" ({occupant.unit_file_state})" if occupant.unit_file_state else ""
        manager = f"of the user manager of {occupant.unit_user}" if occupant.unit_user else who
        return f"{manager}, started by the unit {occupant.unit}{state}".strip(", ")
    for name, how in _MULTIPLEXERS.items():
        if name in starters:
            return f"{who}, started inside {how}".strip(", ")
    if occupant.unit in _LAUNCHERS or {"cron", "crond", "CRON", "atd"} & set(starters):
        return f"{who}, started by cron".strip(", ")
    if occupant.session and "sshd" in " ".join(starters):
        return f"{who}, started in the SSH login {occupant.session.removesuffix('.scope')}".strip(", ")
    if occupant.session:
        return f"{who}, left behind by the login {occupant.session.removesuffix('.scope')}".strip(", ")
    return f"{who}, started by hand".strip(", ")


def who(occupant: Occupant) -> str:
    """One occupant for people: command line, number, and who has started it."""
    return f"`{command_of(occupant) or '?'}` (pid {occupant.pid}, {origin_of(occupant)})"


def _is_unit(occupant: Occupant) -> bool:
    """Whether stopping its unit is how it is stopped."""
    if not occupant.unit or occupant.unit in _LAUNCHERS:
        return False
    # Nobody asks another user's manager for the main process.
    return bool(occupant.unit_user) or occupant.is_main


def stays(occupant: Occupant) -> tuple[str, str] | None:
    """Why it is not stopped even when told, and what to do instead; ``None``: it may be."""
    container = occupant.container
    if container is not None:
        name = container.name or container.id[:12] or "NAME"
        if container.runtime not in ("docker", "podman"):
            return f"it is in a container of {container.runtime}", "remove it there"
        keep = f"{container.runtime} update --restart=no {shlex.quote(name)} && " if container.restarts else ""
        return (
            f"it is in a container, which {container.runtime} looks after",
            f"`{keep}{container.runtime} stop {shlex.quote(name)}` on the host"
            + (f"; `{container.runtime} ps` there shows its name" if name == "NAME" else ""),
        )
    if occupant.unit and not occupant.unit_user and _NEEDED.fullmatch(occupant.unit):
        return f"the host needs {occupant.unit}", "another `port` for the instance"
    for ancestor in occupant.ancestors:
        for name, how in _SUPERVISORS.items():
            if ancestor.split(" ")[0] == name:
                return f"{name} would start it anew", how
    return None


def _undo(occupant: Occupant) -> str:
    """What brings it back, for a shell on the host."""
    if _is_unit(occupant):
        # A unit that was not enabled did not come back at a boot before either.
        enabled = "enable --now" if occupant.unit_file_state in ("enabled", "enabled-runtime") or occupant.unit_user else "start"
        control = f"systemctl --user --machine={occupant.unit_user}@" if occupant.unit_user else "systemctl"
        if occupant.unit_file_state != "transient":
            return f"{control} {enabled} {shlex.quote(occupant.unit)}"
    variables = " ".join(f"{name}={shlex.quote(value)}" for name, value in sorted(occupant.environ.items()))
    folder = f"cd {shlex.quote(occupant.working_directory)} && " if occupant.working_directory else ""
    return f"as {occupant.user or 'its user'}: {folder}{f'{variables} ' if variables else ''}{shlex.join(occupant.argv)}"


def adopts(host: str, name: str, config: HostConfig) -> bool:
    """Whether the inventory says that an instance takes the place of what is there."""
    return bool({name, f"{host}/{name}"} & set(config.llm_server_adopt))


def taking(spec: InstanceSpec, facts: Facts, ours: Collection[str]) -> Iterator[Listener]:
    """Who else listens where ``spec`` wants to. ``ours``: units that may, or that are stopped before."""
    yield from holding(spec.listen, spec.port, facts, ours)


def holding(listen: str, port: int, facts: Facts, ours: Collection[str]) -> Iterator[Listener]:
    """Who else has a port of an address. ``ours``: units that may, or that are stopped before."""
    for listener in facts.listeners:
        if listener.port == port and overlap(listener.address, listen) and listener.unit not in ours:
            yield listener


def overlap(one: str, other: str) -> bool:
    """Whether two cannot listen on the same port of these addresses."""
    return one == other or not ANYWHERE.isdisjoint((one, other))


class Place(NamedTuple):
    """Where somebody is in the way: a port with its address, or the name of a card."""

    occupant: Occupant
    listen: str = ""
    port: int = 0
    card: str = ""

    @property
    def words(self) -> str:
        """The place for people."""
        return f"port {self.port}" if self.port else self.card


def places(specs: Sequence[InstanceSpec], cards: Sequence[HostCard], facts: Facts, ours: Collection[str]) -> Iterator[Place]:
    """Who is where an instance shall be. Each comes once.

    Args:
        specs: The instance as the inventory has it, and as its engine is started.
        cards: Those that it was given.
        facts: What the probe found.
        ours: Units of this toolkit.
    """
    seen: set[int] = set()
    for spec in specs:
        for listener in taking(spec, facts, ours):
            occupant = facts.occupant(listener.pid)
            if occupant is not None and occupant.pid not in seen:
                seen.add(occupant.pid)
                yield Place(occupant, listen=spec.listen, port=spec.port)
    for card in cards:
        for process in card.gpu.processes:
            occupant = facts.occupant(process.pid)
            if occupant is not None and process.unit not in ours and occupant.pid not in seen:
                seen.add(occupant.pid)
                yield Place(occupant, card=card.name)


def decide(
    host: str, name: str, config: HostConfig, found: Sequence[Place], salt: str, catalog: Catalog
) -> tuple[tuple[Adoption, ...], tuple[Rule, ...]]:
    """What becomes of those who are where an instance shall be, and what is said about them."""
    adoptions: list[Adoption] = []
    rules: list[Rule] = []
    for place in found:
        occupant = place.occupant
        explained = explanation(occupant, config, catalog)
        if explained is not None:
            rules.append(Rule("hand-run-server", "info", *explained, instance=name))
        if not adopts(host, name, config):
            continue
        held = f"{place.words} is held by {who(occupant)}"
        kept = stays(occupant)
        if kept is not None:
            rules.append(Rule("adoption-refused", "refuse", f"{held}: {kept[0]}", kept[1], instance=name))
            continue
        unit = occupant.unit if _is_unit(occupant) else ""
        undo = _undo(occupant)
        adoptions.append(
            Adoption(
                instance=name,
                where=place.words,
                listen=place.listen,
                port=place.port,
                pid=occupant.pid,
                start_ticks=occupant.start_ticks,
                command_digest=occupant.command_digest,
                salt=salt,
                command=command_of(occupant),
                user=occupant.user,
                unit=unit,
                unit_user=occupant.unit_user if unit else "",
                undo=undo,
            )
        )
        how = f"the unit {unit} is stopped and disabled, and its file stays" if unit else "it is ended (SIGTERM, then SIGKILL)"
        rules.append(
            Rule(
                "adoption",
                "warn",
                f"{held}: {how}, since `llm_server_adopt` names {name}",
                f"nothing of it is changed without `llm_server_adopt`; afterwards this brings it back: {undo}",
                instance=name,
            )
        )
    return tuple(adoptions), tuple(rules)


def explanation(occupant: Occupant, config: HostConfig, catalog: Catalog) -> tuple[str, str | None] | None:
    """What a hand-run server's flags mean here, in short, and the settings that say the same; ``None`` where nobody knows it."""
    # Only a host with such a server needs the history of flags.
    from v100ctl.plan.explain import Card, explain

    argv = list(occupant.container.argv if occupant.container and occupant.container.argv else occupant.argv)
    names = [PurePosixPath(word).name for word in argv[:2]]
    # A script's interpreter comes first: `python3 /usr/local/bin/vllm serve`.
    if len(argv) > 1 and re.fullmatch(r"python[0-9.]*", names[0]) and names[1] in ("vllm", "llama-server"):
        argv = argv[1:]
    text = " ".join([*(f"{name}={shlex.quote(value)}" for name, value in sorted(occupant.environ.items())), shlex.join(argv)])
    if not argv or catalog.llama_cpp_parser(config.llama_cpp_build) is None or catalog.vllm_parser(config.vllm_version) is None:
        return None
    try:
        found = explain(
            text,
            catalog,
            llama_cpp_build=config.llama_cpp_build,
            vllm_version=config.vllm_version,
            card=Card(None, "7.0", "default"),
        )
    except V100ctlError:
        return None
    command = found.commands[0]
    odd = [
        f"`{' '.join(item.words)}` is {'wrong here' if item.verdict == 'fails' else item.verdict}"
        + (f" ({item.reason})" if item.reason else "")
        for item in command.findings
        if item.verdict != "ok" and item.words
    ]
    engine = f"{'llama.cpp' if command.engine == 'llama_cpp' else 'vLLM'} {command.version}"
    says = "; ".join(odd[:5]) or "every flag means the same"
    instance = yaml.safe_load(command.inventory)["llm_server_instances"]["chat"]
    same = {key: instance[key] for key in ("gpus", "settings", "extra_args") if instance.get(key)}
    flow = (
        yaml.safe_dump(same, default_flow_style=True, sort_keys=False, width=10**6, allow_unicode=True).strip().removeprefix("{")
    )
    return (
        f"pid {occupant.pid}, to {engine}, which the inventory pins: {says}",
        f"`{flow.removesuffix('}')}` in the inventory says the same" if same else None,
    )
