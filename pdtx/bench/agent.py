"""An agent: a station that a driver elsewhere works with, over the side channel."""

import contextlib
import logging
import platform
import queue
import threading
import time
from collections.abc import Callable
from typing import Self

import psutil

import pdtx
from pdtx.address import WILDCARDS, parse_address
from pdtx.bench import calls
from pdtx.bench.agent_methods import AgentMethods, AnyStation
from pdtx.bench.clock import boot_id
from pdtx.bench.work import Role
from pdtx.errors import InputError, PdtxError
from pdtx.protocol import Answer, Call, Hello, Message, Reject, TierHello
from pdtx.report import machine_facts
from pdtx.sidechannel import Listener, Security, require_protection
from pdtx.text import printable

logger = logging.getLogger(__name__)

_SHARE_OF_MEMORY = 0.8
_MAX_WAITING = 4096
"""Calls that may wait for the worker: a driver opens all links of a case at once."""

_CLOSE_S = 10.0


def default_max_bytes() -> int:
    """Return the bytes that an agent's caches may take if nobody says: four fifths of what is free on this machine."""
    return int(psutil.virtual_memory().available * _SHARE_OF_MEMORY)


def data_host(listen: str, advertise: str | None, security: Security) -> str:
    """Return the host at which an agent that listens at listen is reached for data.

    Raises InputError for every address of the machine without one of them to tell, or an address that needs keys.
    """
    host, _ = parse_address(listen)
    require_protection(host, security)
    if advertise is None and host in WILDCARDS:
        raise InputError(f"{listen} is every address of this host; give --advertise HOST, or --listen at one address")
    return advertise or host


class Agent:
    """Serves a station to one driver at a time; a second is told who the first is.

    The driver's calls are carried out in order by one thread; clocks are read, and a stranger is answered, at once, for
    a call can take long. When the driver goes, or is lost, what was made for it is released before the next one's hello
    is answered. on_driver(name): called when a driver comes, with its name, and goes, with "".
    max_bytes: that the station's caches may take, and the references of a case as much again.
    address: where the agent listens. Owns the station: close() closes it.
    Raises InputError and AddressInUse as Listener does.
    """

    def __init__(
        self,
        station: AnyStation,
        role: Role,
        listen: str,
        *,
        security: Security,
        max_bytes: int,
        advertise: str | None = None,
        silence_s: float = calls.SILENCE_S,
        on_driver: Callable[[str], None] = lambda _: None,
    ) -> None:
        host = data_host(listen, advertise, security)
        self._station, self._methods = station, AgentMethods(station, role, host, max_bytes)
        self._facts = calls.AgentFacts(role, platform.node(), boot_id(), dict(machine_facts()), max_bytes)
        self._on_driver = on_driver
        self._lock = threading.Lock()
        self._driver: tuple[bytes, str] | None = None
        self._work: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._waiting = 0
        self._closing = threading.Event()
        self._worker = threading.Thread(target=self._carry_out_all, name=f"pdtx-agent-{role}", daemon=True)
        self._worker.start()
        try:
            with self._lock:  # until the listener is known, what it hears has to wait
                self._listener = Listener(
                    listen, self._on_message, self._on_lost, security=security, silence_s=silence_s
                )
        except BaseException:
            self._work.put(None)
            raise
        self.address = self._listener.endpoint.removeprefix("tcp://")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def driver(self) -> str:
        """The present driver's name; "" while there is none."""
        driver = self._driver
        return driver[1] if driver is not None else ""

    def close(self) -> None:
        """Say goodbye to the driver, end its case and close the station. Idempotent."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._listener.close(0.5)
        self._methods.stop("the agent ends")
        self._work.put(None)
        self._worker.join(_CLOSE_S)
        if self._worker.is_alive():
            logger.error("what the driver asked for last does not end within %g s; it ends with the process", _CLOSE_S)
            return
        with contextlib.suppress(PdtxError):  # a case that broke; there is nobody left to tell
            self._methods.release()
        self._station.close()

    # -- on the listener's thread -------------------------------------------------------------------------------------

    def _on_message(self, peer: bytes, message: Message) -> None:
        with self._lock:
            listener = self._listener
        if isinstance(message, Call):
            self._on_call(peer, message)
        elif isinstance(message, Hello | TierHello):
            listener.send(peer, _NO_NODE)
        else:
            logger.warning("ignored a %s: an agent takes calls only", type(message).__name__)

    def _on_call(self, peer: bytes, call: Call) -> None:
        if call.method == calls.HELLO.name:
            self._on_hello(peer, call)
            return
        with self._lock:
            known = self._driver is not None and self._driver[0] == peer
        if not known:
            self._send(peer, calls.failed(call.call_id, InputError("you are not this agent's driver; say hello first")))
        elif call.method == calls.PING.name:
            self._send(peer, Answer(call_id=call.call_id, body=calls.pack(calls.ClockRead(time.monotonic()))))
        else:
            self._later(peer, call, lambda: self._methods.carry_out(call.method, call.body))

    def _on_hello(self, peer: bytes, call: Call) -> None:
        try:
            hello = calls.unpack(call.body, calls.HelloCall)
            calls.check_hello(hello, pdtx.__version__)
            self._admit(peer, printable(hello.driver[:200], " "))
        except PdtxError as error:
            self._send(peer, calls.failed(call.call_id, error))
            return
        # Behind what is still being released of the driver before.
        self._later(peer, call, lambda: calls.pack(self._facts))

    def _admit(self, peer: bytes, name: str) -> None:
        """Make peer the driver. Raises InputError while there is another one."""
        with self._lock:
            if self._driver is not None and self._driver[0] != peer:
                raise InputError(f"this agent is at work for {self._driver[1]}; one driver at a time, try again later")
            self._driver = peer, name
        self._on_driver(name)

    def _on_lost(self, peer: bytes, reason: str) -> None:
        with self._lock:
            if self._driver is None or self._driver[0] != peer:
                return
            name, self._driver = self._driver[1], None
        logger.info("%s is gone: %s", name, calls.cause_of(reason))
        self._methods.stop(f"{name} is gone")
        self._work.put(self._release)
        self._on_driver("")

    def _later(self, peer: bytes, call: Call, function: Callable[[], bytes]) -> None:
        with self._lock:
            full = self._waiting >= _MAX_WAITING
            self._waiting += not full
        if full:
            self._send(peer, calls.failed(call.call_id, InputError(f"{_MAX_WAITING} calls are waiting already")))
        else:
            self._work.put(lambda: self._answer(peer, call, function))

    def _send(self, peer: bytes, message: Message) -> None:
        self._listener.send(peer, message)

    # -- on the worker's ----------------------------------------------------------------------------------------------

    def _carry_out_all(self) -> None:
        while (work := self._work.get()) is not None:
            if not self._closing.is_set():
                work()

    def _answer(self, peer: bytes, call: Call, function: Callable[[], bytes]) -> None:
        with self._lock:
            self._waiting -= 1
            gone = self._driver is None or self._driver[0] != peer
        if gone:
            return
        try:
            answer = Answer(call_id=call.call_id, body=function())
        except PdtxError as error:
            answer = calls.failed(call.call_id, error)
        except Exception as error:
            # A bug here must not leave the driver without an answer, nor end the agent.
            logger.exception("%s failed", call.method)
            answer = calls.failed(call.call_id, PdtxError(f"{call.method}: {type(error).__name__}: {error}"))
        self._send(peer, answer)

    def _release(self) -> None:
        try:
            self._methods.release()
        except Exception:
            logger.exception("what was made for the driver that is gone could not be released")


_NO_NODE = Reject(
    field="what listens there",
    producer="a node that serves requests",
    consumer="an agent of pdtx bench",
    advice="start pdtx-decode without --bench",
)
