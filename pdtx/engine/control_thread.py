"""The control thread of a node: it alone changes sessions and requests; everybody else posts events to it."""

import logging
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from math import inf
from typing import Any, ParamSpec, TypeVar

from pdtx.arguments import shown
from pdtx.engine.waking import Bell
from pdtx.errors import InputError, NotTheOwner

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

DEBUG_VARIABLE = "PDTX_DEBUG"
"""Set in the environment, every change of an Owned record is checked to come from its owner."""

_FAILED = "%s: an event failed, which is an error of pdtx; please report it"
_TICK_S = 0.05
_SLICE_S = 0.02
"""How long events may be handled before timers are looked at again."""


class ControlThread:
    """Runs events one after another, in the order in which they were posted. An event never blocks.

    tick(now): looks at deadlines, every tick_s while there is something to look at, which it returns; now is
    time.monotonic(). errors: events that raised what nobody expected; each is logged, and the thread goes on.

    After close() events run in the thread that posts them, one at a time, so that nothing is lost. A process that was
    forked has no such thread, and takes no events.
    """

    def __init__(self, name: str, tick: Callable[[float], bool], *, tick_s: float = _TICK_S) -> None:
        self.name, self.errors = name, 0
        self._tick, self._tick_s = tick, tick_s
        self._events = deque[Callable[[], object]]()
        self._bell = Bell()
        self._closing = self._ended = False
        self._pid = os.getpid()
        self._late = threading.RLock()  # after the end: whoever holds it is the owner
        self._late_owner: int | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def is_current(self) -> bool:
        """Whether the calling thread may change what this thread owns."""
        # By object: the system gives the number of a thread that has ended to a new one.
        return threading.current_thread() is self._thread or threading.get_ident() == self._late_owner

    def post(self, event: Callable[P, object], *args: P.args, **options: P.kwargs) -> None:
        """Have event(*args, **options) run; returns at once, but for after close(). Safe from any thread."""
        self.require_here()
        self._events.append(partial(event, *args, **options))
        if self._ended:
            self._run_late()
        else:
            self._bell.ring()

    def call(self, event: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
        """Have event(*args, **options) run after all that was posted before; return its result, or raise its error."""
        self.require_here()
        if self.is_current:
            return event(*args, **options)
        results, errors = list[T](), list[BaseException]()
        answered = queue.SimpleQueue[None]()  # noqa: TID251  # no timeouts

        def run() -> None:
            try:
                results.append(event(*args, **options))
            except BaseException as error:  # noqa: BLE001 - it is the caller's
                errors.append(error)
            answered.put(None)

        self.post(run)
        answered.get()
        if errors:
            raise errors.pop()
        return results.pop()

    def close(self) -> None:
        """Handle what was posted, then end. Idempotent; not from the thread itself."""
        self._closing = True
        self._bell.ring()
        self._thread.join()

    # -- what callers may do ------------------------------------------------------------------------------------------

    @property
    def is_forked(self) -> bool:
        """Whether this process was forked from the one that the thread runs in."""
        return os.getpid() != self._pid

    def require_here(self) -> None:
        """Raise InputError in a process that was forked."""
        if self.is_forked:
            what = self.name.removeprefix("pdtx-")
            raise InputError(f"this {what} is process {self._pid}'s, which forked this one; make another {what} here")

    def require_own(self, request: object) -> None:
        """Raise InputError for a request that is not changed by this thread, and in a process that was forked."""
        self.require_here()
        if not isinstance(request, Owned) or request.owner is not self:
            name = f"request {shown(getattr(request, 'request_id', request))}"
            raise InputError(f"{name} is not one of this {self.name.removeprefix('pdtx-')}; give it to its own")

    def require_outside(self, call: str) -> None:
        """Raise InputError in an event, as on_free is called in one: call would wait there for the event's own end."""
        if threading.current_thread() is self._thread:
            raise InputError(f"{call} in on_free would wait for on_free itself; call it from another thread")

    # -- on the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        looking, looked = True, 0.0
        while True:
            self._bell.wait_for(self._has_work, looked + self._tick_s - time.monotonic() if looking else inf)
            if not self._events and self._closing:
                self._ended = True
                self._run_late()  # what was posted just now, by who did not see that yet
                return
            until = time.monotonic() + _SLICE_S
            looking = looking or bool(self._events)
            while self._events and time.monotonic() < until:
                self._handle(self._events.popleft())
            if (now := time.monotonic()) >= looked + self._tick_s and looking:
                looked, looking = now, self._look(now)

    def _has_work(self) -> bool:
        return bool(self._events) or self._closing

    def _look(self, now: float) -> bool:
        try:
            return self._tick(now)
        except Exception:
            self.errors += 1
            logger.exception(_FAILED, self.name)
            return True

    def _handle(self, event: Callable[[], object]) -> None:
        try:
            event()
        except Exception:
            self.errors += 1
            logger.exception(_FAILED, self.name)

    def _run_late(self) -> None:
        with self._late:
            before, self._late_owner = self._late_owner, threading.get_ident()
            try:
                while self._events:
                    self._handle(self._events.popleft())
            finally:
                self._late_owner = before


MAX_WAITING = 50_000
"""Messages of one peer that may wait for a control thread; one that keeps up has a handful."""


class PeerInbox:
    """How many messages of one peer wait for the control thread: bounded, so that a flood ends its sender.

    came: counted by the side channel's thread; handled: by the control thread. Each number has one writer.
    """

    def __init__(self) -> None:
        self.came = self.handled = 0

    def take(self) -> bool:
        """Count a message that has come; False if too many wait, so that the peer is to be given up."""
        if self.came - self.handled >= MAX_WAITING:
            return False
        self.came += 1
        return True

    def done(self) -> None:
        """Count a message that has been dealt with."""
        self.handled += 1


FLOOD = f"{MAX_WAITING} of its messages wait to be handled"


class Owned:
    """A record that its owner alone may change. owner: None until it has been handed over."""

    owner: ControlThread | None = None


def _set_checked(record: Owned, name: str, value: Any) -> None:  # noqa: ANN401 - of any field
    owner = record.__dict__.get("owner")
    if owner is not None and not owner.is_current:
        thread = threading.current_thread().name
        raise NotTheOwner(f"{type(record).__name__}.{name} was set by thread {thread}; only {owner.name} may")
    object.__setattr__(record, name, value)


if os.environ.get(DEBUG_VARIABLE):
    setattr(Owned, "__setattr__", _set_checked)  # noqa: B010 - mypy knows no other way
