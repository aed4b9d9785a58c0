"""What an agent does for its driver, method by method: a station's work, and references beside it."""

import math
import os
import time
from collections.abc import Callable
from typing import Any, Protocol

from pdtx.bench import calls
from pdtx.bench.references import ReferenceClient, ReferenceServer
from pdtx.bench.work import LinkChecked, LinkMoved, Prepared, Role, StationWork
from pdtx.errors import InputError, ProtocolError
from pdtx.transports.base import Path

MAX_WAIT_S = 3600.0
"""Longest that an agent waits for anything on its driver's word."""


_MOST_WITH_MEMORY = 3
"""References that hold memory at one agent: both sides of a socket, and memcpy."""


class AnyStation(Protocol):
    """What an agent needs of a station, see pdtx.bench.station.Station."""

    def prepare(self, work: StationWork, host: str) -> Prepared:
        """Make what a case needs."""

    def connect(self, link: int, address: str, token: bytes, timeout_s: float) -> Path:
        """Open a link."""

    def facts(self, link: int) -> dict[str, object]:
        """Tell what is known of a link now."""

    def ready(self, iteration: int) -> None:
        """Make an iteration's contents."""

    def move(self, links: tuple[int, ...], start_at: float, timeout_s: float) -> tuple[LinkMoved, ...]:
        """Move links at once."""

    def stop(self, reason: str) -> None:
        """Make a move under way end soon; from any thread."""

    def check(self, links: tuple[int, ...], full: bool) -> tuple[LinkChecked, ...]:
        """Count what has arrived, and look at it."""

    def release(self) -> None:
        """End the case."""

    def close(self) -> None:
        """Give back everything."""


class AgentMethods:
    """Carries out calls, one at a time.

    role: of the station. host: where its data connections are reached. max_bytes: that all references may take.
    """

    def __init__(self, station: AnyStation, role: Role, host: str, max_bytes: int) -> None:
        self._station, self._role, self._host = station, role, host
        self._reference_bytes = max(1, max_bytes // _MOST_WITH_MEMORY)
        self._servers: dict[str, ReferenceServer] = {}
        self._clients: dict[str, ReferenceClient] = {}
        self._table: dict[str, tuple[calls.Method, Callable[[Any], object]]] = {
            method.name: (method, function)
            for method, function in (
                (calls.PREPARE, self._prepare),
                (calls.CONNECT, self._connect),
                (calls.FACTS, self._tell_facts),
                (calls.READY, self._ready),
                (calls.MOVE, self._move),
                (calls.CHECK, self._check),
                (calls.OPEN_REFERENCE, self._open_reference),
                (calls.CONNECT_REFERENCE, self._connect_reference),
                (calls.REFERENCE_ROUND, self._reference_round),
                (calls.RELEASE, self._release),
                (calls.LOAD, self._load),
            )
        }

    def carry_out(self, name: str, body: bytes) -> bytes:
        """Do what a call asks for and return the answer's body.

        Raises ProtocolError for a method that is not there or a malformed body, and whatever doing it raises.
        """
        found = self._table.get(name)
        if found is None:
            raise ProtocolError(f"no method {name!r}; an agent has {', '.join(sorted(self._table))}")
        method, function = found
        return calls.pack(function(calls.unpack(body, method.takes)))

    def stop(self, reason: str) -> None:
        """Make a move under way end soon: nobody waits for it any more. Safe from any thread."""
        self._station.stop(reason)

    def release(self) -> None:
        """End everything of the present case. Idempotent."""
        try:
            for client in self._clients.values():
                client.close()
            for server in self._servers.values():
                server.close()
        finally:
            self._clients.clear()
            self._servers.clear()
            self._station.release()

    def _prepare(self, work: StationWork) -> Prepared:
        if work.role != self._role:
            raise InputError(f"this agent is a {self._role} agent and was given the work of a {work.role} agent")
        if work.case.mover == "inproc":
            raise InputError(
                "the mover inproc works within one process, and agents are processes of their own; use shm"
            )
        return self._station.prepare(work, self._host)

    def _connect(self, call: calls.ConnectCall) -> Path:
        return self._station.connect(call.link, call.address, call.token, _wait(call.timeout_s))

    def _tell_facts(self, call: calls.LinkCall) -> dict[str, object]:
        return self._station.facts(call.link)

    def _ready(self, call: calls.ReadyCall) -> calls.Nothing:
        self._station.ready(call.iteration)
        return calls.Nothing()

    def _move(self, call: calls.MoveCall) -> calls.Moved:
        _wait(call.start_at - time.monotonic())
        return self._station.move(call.links, call.start_at, _wait(call.timeout_s))

    def _check(self, call: calls.CheckCall) -> calls.Checked:
        return self._station.check(call.links, call.full)

    def _open_reference(self, call: calls.OpenReference) -> calls.ReferenceOpened:
        old = self._servers.pop(call.name, None)
        if old is not None:
            old.close()
        server = self._servers[call.name] = ReferenceServer.open(
            call.name, self._host, call.nbytes, max_bytes=self._reference_bytes
        )
        return calls.ReferenceOpened(server.address, server.token, server.detail)

    def _connect_reference(self, call: calls.ConnectReference) -> calls.Nothing:
        old = self._clients.pop(call.name, None)
        if old is not None:
            old.close()
        self._clients[call.name] = ReferenceClient(
            call.name,
            call.address,
            call.token,
            call.nbytes,
            timeout_s=_wait(call.timeout_s),
            run_sizes=call.run_sizes,
            max_bytes=self._reference_bytes,
        )
        return calls.Nothing()

    def _reference_round(self, call: calls.ReferenceCall) -> calls.ReferenceRound:
        client = self._clients.get(call.name)
        if client is None:
            raise InputError(f"no reference {call.name!r} is open at this agent")
        return calls.ReferenceRound(client.round(), client.detail)

    def _release(self, _: calls.Nothing) -> calls.Nothing:
        self.release()
        return calls.Nothing()

    def _load(self, _: calls.Nothing) -> calls.Load:
        return calls.Load(os.getloadavg()[0])


def _wait(seconds: float) -> float:
    """Return seconds. Raises ProtocolError for more than an agent waits on a driver's word."""
    if not math.isfinite(seconds) or seconds > MAX_WAIT_S:
        raise ProtocolError(f"an agent waits {MAX_WAIT_S:g} s at most, not {seconds:g} s")
    return seconds
