"""An agent as its driver sees it: calls that go out, and their answers."""

import getpass
import itertools
import os
import platform
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pdtx
from pdtx.bench import calls
from pdtx.bench.calls import AgentFacts, Method
from pdtx.bench.clock import Clock, boot_id, read_clock
from pdtx.bench.work import Role
from pdtx.errors import DeadlineExceeded, InputError, PdtxError, PeerLost
from pdtx.protocol import PROTOCOL_VERSION, Answer, Call, Message, Reject
from pdtx.sidechannel import Dialer, Security

_CLOCK_FRESH_S = 2.0
"""Quartz differs by some 50 us a second at worst; within this time by less than a network's jitter."""

_Waiting = queue.Queue[Answer | PdtxError]


class Pending:
    """A call under way."""

    def __init__(self, remote: "RemoteAgent", call_id: int, method: Method, answers: _Waiting) -> None:
        self._remote, self._call_id, self._method, self._answers = remote, call_id, method, answers

    def result(self, deadline: float) -> Any:  # noqa: ANN401 - what the method gives
        """Return what came of it; deadline: time.monotonic().

        Raises the agent's error, PeerLost when the agent is gone, DeadlineExceeded, ProtocolError for an answer that
        is none.
        """
        started = time.monotonic()
        try:
            answer = self._answers.get(timeout=max(0.0, deadline - started))
        except queue.Empty:
            self._remote.forget(self._call_id, overdue=True)
            waited = round(time.monotonic() - started, 3)
            raise DeadlineExceeded(f"the answer to {self._method.name}", self._remote.name, waited) from None
        if isinstance(answer, PdtxError):
            raise answer
        if answer.error:
            raise calls.error_of(answer, self._remote.name)
        return calls.unpack(answer.body, self._method.gives)


class RemoteAgent:
    """An agent at address, from connect() on.

    facts: what it says of itself. clock: its clock against ours, as of the last read_clock(). stuck: whether a call's
    deadline has passed and its answer has not come yet, so that whatever is asked next would wait behind it.
    on_lost(error): called on the channel's thread when the agent is gone.
    Used by one thread.
    """

    facts: AgentFacts

    def __init__(
        self,
        address: str,
        role: Role,
        rank: int,
        security: Security,
        *,
        on_lost: Callable[[PdtxError], None] = lambda _: None,
        silence_s: float = calls.SILENCE_S,
    ) -> None:
        self.address, self.role, self.rank = address, role, rank
        self._tell_loss, self._clock_read_at = on_lost, 0.0
        self.name = f"{role} agent {rank} at {address}"
        self.clock = Clock()
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._waiting: dict[int, _Waiting] = {}
        self._overdue = set[int]()
        self._lost: PdtxError | None = None
        self._dialer = Dialer(address, self._on_message, self._on_lost, security=security, silence_s=silence_s)

    def connect(self, deadline: float) -> None:
        """Dial the agent, say hello and read its clock, until deadline (time.monotonic()).

        Raises PeerUnreachable, AuthenticationFailed, PeerLost, DeadlineExceeded; InputError for an agent of another
        role or version, or one that works for somebody else.
        """
        self._dialer.connect(max(0.0, deadline - time.monotonic()))
        hello = calls.HelloCall(PROTOCOL_VERSION, pdtx.__version__, _own_name())
        try:
            self.facts = self.start(calls.HELLO, hello).result(deadline)
        except DeadlineExceeded as error:
            advice = "it may still be ending what another driver began"
            raise DeadlineExceeded(error.phase, error.peer, error.seconds, advice) from None
        except PeerLost as error:
            raise PeerLost(f"{error}; is it a node with --bench?") from None
        if self.facts.role != self.role:
            raise InputError(f"{self.address} is a {self.facts.role} agent; give it with --{self.facts.role}")
        self.read_clock(deadline)

    def read_clock(self, deadline: float) -> None:
        """Measure how far the agent's clock is from ours. Raises PeerLost and DeadlineExceeded."""
        self._clock_read_at = time.monotonic()
        same_host = bool(boot_id()) and (self.facts.boot_id, self.facts.host) == (boot_id(), platform.node())
        self.clock = read_clock(lambda: float(self.start(calls.PING).result(deadline).at), same_host=same_host)

    def refresh_clock(self, deadline: float) -> None:
        """Measure again where clocks may have drifted apart meanwhile. Raises as read_clock does."""
        if self.clock != Clock() and time.monotonic() - self._clock_read_at > _CLOCK_FRESH_S:
            self.read_clock(deadline)

    @property
    def stuck(self) -> bool:
        """See the class."""
        return bool(self._overdue)

    def start(self, method: Method, body: object = calls.Nothing()) -> Pending:
        """Begin a call. Raises PeerLost if the agent is gone, ProtocolError for a body that is too large."""
        call_id, answers = next(self._numbers), _Waiting()
        with self._lock:
            if self._lost is not None:
                raise PeerLost(str(self._lost))
            self._waiting[call_id] = answers
        self._dialer.send(Call(call_id=call_id, method=method.name, body=calls.pack(body)))
        return Pending(self, call_id, method, answers)

    def forget(self, call_id: int, *, overdue: bool) -> None:
        """Wait no more for a call."""
        with self._lock:
            if self._waiting.pop(call_id, None) is not None and overdue:
                self._overdue.add(call_id)

    def close(self) -> None:
        """Say goodbye. Idempotent."""
        self._dialer.close(0.5)

    # -- on the dialer's thread ---------------------------------------------------------------------------------------

    def _on_message(self, message: Message) -> None:
        if isinstance(message, Answer):
            with self._lock:
                self._overdue.discard(message.call_id)
                answers = self._waiting.pop(message.call_id, None)
            if answers is not None:
                answers.put(message)
        elif isinstance(message, Reject):
            self.give_up(InputError(f"{self.name} refuses to be driven: {message.field}; {message.advice}"))

    def _on_lost(self, reason: str) -> None:
        error = PeerLost(f"lost {self.name}: {calls.cause_of(reason)}")
        self.give_up(error)
        self._tell_loss(error)

    def give_up(self, error: PdtxError) -> None:
        """End all calls under way with an error, and refuse others. Safe from any thread."""
        with self._lock:
            self._lost = error
            waiting, self._waiting = self._waiting, {}
        for answers in waiting.values():
            answers.put(error)


def gather(started: Sequence[Pending], deadline: float) -> list[Any]:
    """Wait for all of several calls and return their results in order; deadline: time.monotonic().

    Raises PeerLost at once; else, after all have ended, the first other error: what goes on after one of them has
    failed would disturb what comes next.
    """
    results, failure = list[Any](), None
    for pending in started:
        try:
            results.append(pending.result(deadline))
        except PeerLost:
            raise
        except PdtxError as error:
            failure = failure or error
    if failure is not None:
        raise failure
    return results


def _own_name() -> str:
    """What a second driver is told of this one."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError):
        user = "somebody"
    return f"{user} on {platform.node()} (process {os.getpid()})"
