"""Keeps rollouts of other controllers off hosts: each host holds the name of the rollout that changes it, until that has ended.

A file, and not a lock of the kernel's: it has to outlive sessions, a controller that dies, and reboots of the host.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager

from v100ctl.errors import UnreachableError, V100ctlError
from v100ctl.probe import Session
from v100ctl.rollout.state import Rollout, RolloutError, age

CLAIM = "/var/lib/v100ctl/state/rollout.json"
_TIMEOUT_S = 60.0
_TAKEN = 3

#: `ln` makes the file whole or not at all, `mv` replaces it whole. A host without the folder is bare: nothing serves there.
_ASIDE = '[ -d "${1%/*}" ] || exit 0; aside=$(mktemp "$1.XXXXXX") && printf "%s\\n" "$2" >"$aside" || exit 1; '
_TAKE = _ASIDE + (
    'ln "$aside" "$1" 2>/dev/null; done=$?; rm -f "$aside"; [ "$done" = 0 ] && exit 0; '
    f'[ -f "$1" ] || {{ echo "no link can be made there" >&2; exit 1; }}; cat "$1" && exit {_TAKEN}'
)
_REPLACE = _ASIDE + 'mv -f "$aside" "$1"'
_LEAVE = 'if grep -qsF -- "$2" "$1"; then rm -f "$1"; fi'

#: The way to a host, by its name.
Way = Callable[[str], AbstractContextManager[Session]]


def claim(rollout: Rollout, hosts: Sequence[str], way: Way, *, ended: Collection[str], forks: int) -> None:
    """Write on each host that this rollout changes it.

    Args:
        rollout: Which one. What it holds already it keeps.
        hosts: Their names.
        way: To each of them. One that is away now was claimed as the rollout began.
        ended: Rollouts of this account that have ended: a host that was away then may still hold one of them.
        forks: Hosts at once.

    Raises:
        RolloutError: another one changes one of them, or it cannot be written there.
    """
    mine = json.dumps({"id": rollout.id, "owner": rollout.owner, "since": rollout.started})

    def take(name: str) -> str:
        try:
            with way(name) as session:
                done = session.run(["/bin/sh", "-c", _TAKE, "sh", CLAIM, mine], timeout_s=_TIMEOUT_S, become=True)
                holder = _read(done.stdout) if done.rc == _TAKEN else {}
                if holder.get("id") in ended:
                    done = session.run(["/bin/sh", "-c", _REPLACE, "sh", CLAIM, mine], timeout_s=_TIMEOUT_S, become=True)
        except UnreachableError:
            # Its turn will tell.
            return ""
        if done.rc == 0 or holder.get("id") == rollout.id:
            return ""
        if done.rc == _TAKEN:
            since = age(holder.get("since", ""))
            return f"{name} is being changed by the rollout that {holder.get('owner', 'somebody')} began {since} ago"
        said = done.stderr.decode("utf-8", "replace").strip().splitlines()
        return f"{name}: {CLAIM} cannot be written: {said[-1] if said else f'exit code {done.rc}'}"

    with ThreadPoolExecutor(max_workers=forks) as pool:
        problems = [problem for problem in pool.map(take, hosts) if problem]
    if problems:
        raise RolloutError(
            "\n".join(["not every host can be claimed, so none is changed", *problems]),
            hint=f"a rollout is ended where it was begun; where nobody can do that any more, remove {CLAIM} on the host",
        )


def let_go(rollout: Rollout, hosts: Sequence[str], way: Way, *, forks: int) -> None:
    """This rollout changes these hosts no more. One that is away keeps the file, and this account knows what it is worth."""
    mark = json.dumps(rollout.id)

    def leave(name: str) -> None:
        with contextlib.suppress(V100ctlError), way(name) as session:
            session.run(["/bin/sh", "-c", _LEAVE, "sh", CLAIM, mark], timeout_s=_TIMEOUT_S, become=True)

    with ThreadPoolExecutor(max_workers=forks) as pool:
        list(pool.map(leave, hosts))


def _read(text: bytes) -> dict[str, str]:
    with contextlib.suppress(ValueError):
        document = json.loads(text)
        if isinstance(document, dict):
            return {str(key): str(value) for key, value in document.items()}
    return {}
