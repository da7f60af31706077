"""What a rollout writes down as it goes, so that a crash of the controller loses nothing.

One file a rollout, replaced whole at each step. Who holds the lock of a host is rolling it out right now; a file that is not
finished without a lock is one whose controller died.
"""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import re
import socket
import tempfile
import types
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from v100ctl.access import DEFAULT_DRAIN_LIMIT_S
from v100ctl.errors import EXIT_DIFFERENCES, EXIT_ERROR, EXIT_OK, V100ctlError
from v100ctl.locks import Held, try_exclusive
from v100ctl.paths import state_dir

SCHEMA = "v100ctl/rollout/1"
#: Finished rollouts that are kept.
KEPT = 20

#: Where a host is. The four behind ``applying`` are steps of one that goes well; ``returning`` is on its way back.
Phase = Literal[
    "waiting", "draining", "applying", "proving", "opening", "settling", "done", "returning", "returned", "lost", "untouched"
]
#: Where nothing is under way.
AT_REST: frozenset[str] = frozenset({"waiting", "done", "returned", "untouched"})
Status = Literal["planned", "running", "done", "stopped", "aborted"]


class RolloutError(V100ctlError):
    """A rollout cannot be started, or not be gone on with."""


@dataclass
class Event:
    """One step of one host: when it began, how long it took, and what was wrong (empty: nothing)."""

    step: str
    at: str
    elapsed_s: float
    problem: str = ""


@dataclass
class HostState:
    """One host of a rollout.

    Attributes:
        name: In the inventory.
        address: What its lock is named by.
        wanted: A digest of the plan that it shall get.
        changes: What changes there, in words.
        roles: The roles that make it so.
        restarts: Instances that are restarted.
        starts: Instances that do not run now, and are started.
        serves: Instances that run there now: what is missing while it is out of the gateway.
        reboots: Whether its driver changes, which may need a reboot.
        phase: Where it is.
        good: The state in its history that it goes back to; ``None`` while that is not known, or where there is none.
        before: Tokens per second of each instance just before, at rest.
        after: The same, afterwards.
        problem: The gate that failed.
        events: What was done, in order.
    """

    name: str
    address: str = ""
    wanted: str = ""
    changes: list[str] = field(default_factory=list)
    roles: list[str] = field(default_factory=list)
    restarts: list[str] = field(default_factory=list)
    starts: list[str] = field(default_factory=list)
    serves: list[str] = field(default_factory=list)
    reboots: bool = False
    phase: Phase = "waiting"
    good: str | None = None
    before: dict[str, float] | None = None
    after: dict[str, float] | None = None
    problem: str = ""
    events: list[Event] = field(default_factory=list)

    @property
    def given_up(self) -> bool:
        """Whether it could not go back before: since then somebody may have mended it by hand."""
        return any(event.step == "go back" and event.problem for event in self.events)

    @property
    def looked(self) -> bool:
        """Whether its history was read before anything was changed: without a good state there then is none."""
        return any(event.step == "look" and not event.problem for event in self.events)

    @property
    def missing(self) -> list[str]:
        """Instances that are missing while it is out of the gateway; none where it stays in it."""
        return [] if self.serves_meanwhile else self.serves

    @property
    def serves_meanwhile(self) -> bool:
        """Whether nothing that serves there is disturbed, and nothing gets requests that was not judged yet."""
        return not self.restarts and not self.starts and not self.reboots


@dataclass
class Options:
    """How careful a rollout is. ``min_speed`` is a share; ``batch`` is a number or a share of the hosts (``25%``)."""

    canary: int = 1
    batch: str = "25%"
    max_failed: int = 0
    min_speed: float = 0.9
    drain_limit_s: float = DEFAULT_DRAIN_LIMIT_S
    settle_s: float = 10.0
    return_limit_s: float = 900.0
    start_limit_s: int | None = None


@dataclass
class Rollout:
    """A rollout: its hosts by name, and in which batches they change.

    ``servers``: how many hosts serve an instance of a name as it begins, those among them that do not change.
    """

    id: str
    owner: str
    started: str
    as_of: str
    options: Options
    hosts: dict[str, HostState]
    batches: list[list[str]]
    status: Status = "running"
    prepared: bool = False
    ended: str | None = None
    servers: dict[str, int] = field(default_factory=dict)

    @property
    def failed(self) -> list[str]:
        """Hosts whose gate failed."""
        return [name for name, host in self.hosts.items() if host.problem]

    @property
    def held(self) -> dict[str, HostState]:
        """The hosts that no other rollout may touch: all of one that was cut off, and those that one that has ended has lost."""
        return {name: host for name, host in self.hosts.items() if self._begun or host.phase not in AT_REST}

    @property
    def unfinished(self) -> bool:
        """Whether something is left to be gone on with, or to be brought back."""
        return self._begun or bool(self.held)

    @property
    def _begun(self) -> bool:
        return self.status in ("planned", "running")

    @property
    def exit_code(self) -> int:
        """0 where every host got what was planned, or was led back as it was asked for; 2 where that is still to be done."""
        if self.status == "planned":
            return EXIT_DIFFERENCES
        if self.status == "aborted":
            return EXIT_ERROR if any(host.phase == "lost" for host in self.hosts.values()) else EXIT_OK
        return EXIT_OK if all(host.phase == "done" for host in self.hosts.values()) else EXIT_ERROR

    def to_json(self) -> dict[str, Any]:
        """The document ``v100ctl/rollout/1``."""
        return {"schema": SCHEMA, **asdict(self), "exit_code": self.exit_code}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Rollout:
        """What :meth:`to_json` made."""
        values = {key: value for key, value in document.items() if key not in ("schema", "exit_code")}
        values["options"] = Options(**values["options"])
        values["hosts"] = {
            name: HostState(**{**host, "events": [Event(**event) for event in host["events"]]})
            for name, host in values["hosts"].items()
        }
        return cls(**values)


def owner() -> str:
    """Who does this, and where: ``user@host``."""
    try:
        name = getpass.getuser()
    except (KeyError, OSError):
        # An account without a name, as in a container.
        name = str(os.getuid())
    return f"{name}@{socket.gethostname()}"


def now() -> str:
    """The time, in UTC."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def age(since: str) -> str:
    """How long ago, in words."""
    from v100ctl.apply.reporter import format_duration

    with contextlib.suppress(ValueError):
        return format_duration(max(0.0, (datetime.now(UTC) - datetime.fromisoformat(since)).total_seconds()))
    return "an unknown time"


def batch_size(batch: str, hosts: int) -> int:
    """How many of so many hosts a batch is, at least one.

    Raises:
        RolloutError: it is neither a number nor a share.
    """
    match = re.fullmatch(r"([0-9]{1,9})(%?)", batch.strip())
    if match is None or int(match[1]) < 1:
        raise RolloutError(f"`--batch {batch}`: write it as a number of hosts or as a share, such as `25%`")
    return max(1, -(-hosts * int(match[1]) // 100) if match[2] else int(match[1]))


def in_batches(
    names: Sequence[str],
    options: Options,
    most: int,
    *,
    missing: Mapping[str, Collection[str]] = types.MappingProxyType({}),
    servers: Mapping[str, int] = types.MappingProxyType({}),
) -> list[list[str]]:
    """The canary, then the rest in batches.

    Args:
        names: Of the hosts, in their order.
        options: Of the rollout.
        most: So many at once leave somebody to serve.
        missing: Host to the instances that are missing while it is out.
        servers: How many hosts serve an instance of that name.

    Raises:
        RolloutError: ``batch`` is neither a number nor a share.
    """
    size = max(1, min(batch_size(options.batch, len(names)), most))
    canary = min(options.canary, len(names))
    first = _parts(names[:canary], max(1, most), missing, servers)
    return [*first, *_parts(names[canary:], size, missing, servers)]


def _parts(
    names: Sequence[str], size: int, missing: Mapping[str, Collection[str]], servers: Mapping[str, int]
) -> list[list[str]]:
    """At most so many at once, and of no name all servers; one that alone serves a name has to go all the same."""
    parts: list[list[str]] = []
    left = list(names)
    while left:
        part: list[str] = []
        for name in left:
            if len(part) < size and (not part or leaves_servers([*part, name], missing, servers)):
                part.append(name)
        parts.append(part)
        left = [name for name in left if name not in part]
    return parts


def leaves_servers(out: Iterable[str], missing: Mapping[str, Collection[str]], servers: Mapping[str, int]) -> bool:
    """Whether every name still has a server while these hosts are out; names that had one alone are left aside."""
    gone = Counter(instance for name in out for instance in missing.get(name, ()))
    return all(servers.get(instance, 0) - count > 0 or servers.get(instance, 0) < 2 for instance, count in gone.items())


# --- on the disk --------------------------------------------------------------------------------------------------------------


def folder() -> Path:
    """Where rollouts are written down."""
    return state_dir() / "rollouts"


def save(rollout: Rollout) -> None:
    """Write it down, whole: whoever reads it sees the state before this step or the one after it.

    Raises:
        RolloutError: the disk is full, or the folder cannot be written.
    """
    path = folder() / f"{rollout.id}.json"
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor, aside = tempfile.mkstemp(dir=path.parent, prefix=f".{rollout.id}.")
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                json.dump(rollout.to_json(), file, indent=1)
                file.flush()
                os.fsync(file.fileno())
            Path(aside).replace(path)
        except BaseException:
            Path(aside).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise RolloutError(
            f"{path} cannot be written: {error.strerror}", hint="make room there; then `v100ctl rollout --resume` goes on"
        ) from error


def load_all() -> Iterator[Rollout]:
    """Every rollout that was written down, the newest first.

    Raises:
        RolloutError: one of them cannot be read: nobody knows which hosts it has left where.
    """
    for path in sorted(folder().glob("*.json"), reverse=True) if folder().is_dir() else ():
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
            if document["schema"] != SCHEMA:
                raise ValueError("another version's")
            rollout = Rollout.from_json(document)
        except FileNotFoundError:
            # Another run has just forgotten it.
            continue
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise RolloutError(
                f"{path}, where a rollout was written down, cannot be read ({type(error).__name__}: {error})",
                hint="resume it with the v100ctl that began it; or move the file away once no host of it is out of the gateway",
            ) from error
        yield rollout


def load(identifier: str) -> Rollout:
    """What was written down of one rollout.

    Raises:
        RolloutError: nothing is, or not any more.
    """
    for rollout in load_all():
        if rollout.id == identifier:
            return rollout
    raise RolloutError("what was written down of the rollout is gone", hint="`v100ctl rollout` begins one")


def unfinished(addresses: Iterable[str]) -> Rollout | None:
    """The rollout that still holds any of these hosts.

    Raises:
        RolloutError: what was written down of one cannot be read.
    """
    wanted = set(addresses)
    for rollout in load_all():
        if wanted & {host.address for host in rollout.held.values()}:
            return rollout
    return None


def forget(rollout: Rollout) -> None:
    """Removes what was written down of it."""
    (folder() / f"{rollout.id}.json").unlink(missing_ok=True)


def forget_old() -> None:
    """Removes finished rollouts but for the last ones."""
    for rollout in [rollout for rollout in load_all() if not rollout.unfinished][KEPT:]:
        forget(rollout)


@contextlib.contextmanager
def alone(addresses: Iterable[str]) -> Iterator[None]:
    """Keeps another rollout of this account off the same hosts.

    Raises:
        RolloutError: there is one, with its owner and its age.
    """
    with contextlib.ExitStack() as held:
        # In one order for everybody.
        for address in sorted(set(addresses)):
            try:
                held.enter_context(try_exclusive(folder() / "locks" / address, json.dumps({"owner": owner(), "since": now()})))
            except Held as error:
                holder = _holder(error.note)
                raise RolloutError(
                    f"another rollout runs over the same hosts: {holder['owner']} began it {age(holder['since'])} ago",
                    hint="wait for its end, or stop it with Ctrl-C where it runs",
                ) from error
        yield


def _holder(note: str) -> dict[str, str]:
    try:
        document = json.loads(note)
        return {"owner": str(document["owner"]), "since": str(document["since"])}
    except (ValueError, KeyError, TypeError):
        return {"owner": "somebody", "since": ""}
