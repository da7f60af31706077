"""The gateways of a fleet, told to take a host out and to let it in again."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from v100ctl.errors import UnreachableError, V100ctlError
from v100ctl.fleet import FleetHost
from v100ctl.plan import gateway
from v100ctl.plan.fleet_gateway import server_name
from v100ctl.probe import Session

#: How long a gateway may take to answer that is being started anew.
GATEWAY_RESTART_S = 60.0
#: How long it may take to see a server healthy again.
OPEN_LIMIT_S = 120.0
RETRY_S = 1.0

#: Exit statuses of the gateway's program.
_LIMIT, _NOT_RUNNING, _UNKNOWN, _NO_PROGRAM = 3, 4, 5, 2


class FrontError(V100ctlError):
    """A gateway does not run, does not let a server go, or does not see it healthy."""


class Fronts:
    """The gateways of a fleet.

    Args:
        gateways: Their hosts, by name.
        session: The way to one of them.
        sleep: Waits so many seconds.
    """

    def __init__(
        self,
        gateways: Mapping[str, FleetHost],
        session: Callable[[FleetHost], AbstractContextManager[Session]],
        *,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._gateways = gateways
        self._session = session
        self._sleep = sleep

    def check(self, hosts: Sequence[str]) -> None:
        """Each gateway in front of one of these hosts can be told; one that was not made yet need not.

        Raises:
            FrontError: one does not run.
            UnreachableError: the host of one does not answer.
        """
        for name in dict.fromkeys(name for host in hosts for name, _ in self._servers(host, None)):
            self._call(name, ["status"], 0.0)

    def drain(self, host: str, limit_s: float, instance: str | None = None) -> None:
        """No new request reaches a host, and those that ran have ended. Where no gateway is in front of it nobody is told.

        Args:
            host: Its name in the inventory.
            limit_s: How long running requests may take to end.
            instance: Only this one there.

        Raises:
            FrontError: some still ran at the limit, and none comes any more; or a gateway does not run.
            UnreachableError: the host of a gateway does not answer.
        """
        for name, server in self._servers(host, instance):
            status, said = self._call(name, ["drain", server, "--limit-s", str(limit_s)], limit_s)
            if status == _LIMIT:
                raise FrontError(
                    f"{said.get('running', 'some')} requests to {server} still ran after {limit_s:g} s",
                    hint="try again later, or with a longer `--drain-limit`",
                )

    def open(self, host: str, instance: str | None = None, *, limit_s: float = OPEN_LIMIT_S) -> None:
        """Requests reach a host again, from every gateway that can be told.

        Args:
            host: Its name in the inventory.
            instance: Only this one there.
            limit_s: How long a gateway may take to see it healthy.

        Raises:
            V100ctlError: a gateway does not see it healthy, does not run or does not answer; the others were told.
        """
        problems: list[V100ctlError] = []
        for name, server in self._servers(host, instance):
            try:
                status, said = self._call(name, ["open", server, "--limit-s", str(limit_s)], limit_s)
                if status == _LIMIT:
                    raise FrontError(f"the gateway {name} does not see {server} healthy: {said.get('status', 'no word')}")
            except V100ctlError as error:
                # Another server, or another gateway, must not stay closed for it.
                problems.append(error)
        if len(problems) == 1:
            raise problems[0]
        if problems:
            raise FrontError("; ".join(problem.message for problem in problems))

    def _servers(self, host: str, instance: str | None) -> list[tuple[str, str]]:
        """The gateways in front of a host, each with what it calls a server there."""
        called = server_name(host)
        return [
            (name, f"{server.instance}@{server.host}")
            for name, front in self._gateways.items()
            for server in front.config.gateway_servers
            if server.host == called and instance in (None, server.instance)
        ]

    def _call(self, name: str, words: Sequence[str], limit_s: float) -> tuple[int, dict[str, Any]]:
        """One call of a gateway's program; 0 where it does not know the server. One that is being started anew is waited for.

        Raises:
            FrontError: it does not run.
            UnreachableError: its host does not answer.
        """
        deadline_s = time.monotonic() + GATEWAY_RESTART_S
        command = ["python3", "-I", "-S", "-B", gateway.PROGRAM, *words]
        while True:
            problem: V100ctlError
            try:
                with self._session(self._gateways[name]) as session:
                    done = session.run(command, timeout_s=limit_s + 60.0, become=True)
            except UnreachableError as error:
                problem = error
            else:
                if done.rc in (_UNKNOWN, _NO_PROGRAM):
                    # It has not been made yet, or was not told of the server yet: no request comes from there.
                    return 0, {}
                if done.rc in (0, _LIMIT):
                    return done.rc, _document(done.stdout)
                said = done.stderr.decode("utf-8", "replace").strip().splitlines()
                problem = FrontError(f"the gateway on {name} fails: {said[-1] if said else f'exit code {done.rc}'}")
                if done.rc != _NOT_RUNNING:
                    raise problem
            if time.monotonic() >= deadline_s:
                raise problem
            self._sleep(RETRY_S)


def _document(text: bytes) -> dict[str, Any]:
    """What the program says beside its exit status, which alone decides."""
    with contextlib.suppress(ValueError):
        document = json.loads(text)
        if isinstance(document, dict):
            return document
    return {}
