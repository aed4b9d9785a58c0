"""Two movers that face each other, for one check."""

import os
import secrets
import threading
import time
from collections.abc import Callable
from types import TracebackType

from pdtx.testing.receivers import GrantingReceiver
from pdtx.transports import Connection, Mover, Receiver

MakeMover = Callable[[], Mover]

LISTEN_AT = "127.0.0.1:0"
PATIENCE_S = 10.0
"""How long a check waits for what should come at once."""


class ContractViolation(AssertionError):
    """A mover does not do what a mover must do."""


def require(condition: bool, what: str) -> None:
    """Raise ContractViolation, saying what was required, unless condition holds."""
    if not condition:
        raise ContractViolation(what)


def require_error(kind: type[Exception], what: str, call: Callable[[], object]) -> Exception:
    """Return the error of call. Raises ContractViolation if it raises none, or one of another kind."""
    try:
        call()
    except kind as error:
        return error
    except Exception as error:
        raise ContractViolation(f"{what}: {kind.__name__} expected, got {type(error).__name__}: {error}") from error
    raise ContractViolation(f"{what}: {kind.__name__} expected, nothing was raised")


class MoverPair:
    """A consumer that listens and a producer, both made by make_mover. Use in a with statement.

    receiver: what listens, a GrantingReceiver by default; grants: the GrantingReceiver at the bottom of it.
    """

    def __init__(
        self,
        make_mover: MakeMover,
        listen_at: str = LISTEN_AT,
        receiver: Receiver | None = None,
        grants: GrantingReceiver | None = None,
    ) -> None:
        self.grants = grants or GrantingReceiver()
        self._tokens = dict[str, bytes]()
        self.consumer, self.producer = make_mover(), make_mover()
        try:
            self.address = self.consumer.listen(listen_at, receiver or self.grants)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "MoverPair":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def connect(self, session_id: str = "session", producer: Mover | None = None) -> Connection:
        """Let a session in, if it is new, and connect it."""
        token = self.token(session_id)
        return (producer or self.producer).connect(self.address, session_id, token, time.monotonic() + PATIENCE_S)

    def token(self, session_id: str) -> bytes:
        """Let a session in, if it is new; return its token."""
        token = self._tokens.setdefault(session_id, secrets.token_bytes(32))
        self.grants.add_session(session_id, token)
        return token

    def close(self) -> None:
        """Close both movers."""
        self.producer.close()
        self.consumer.close()


def open_descriptors() -> int:
    """Return how many descriptors this process has open."""
    return len(os.listdir("/proc/self/fd"))


class Leaks:
    """What threads and descriptors there are more than at the start."""

    def __init__(self) -> None:
        self._threads = set(threading.enumerate())
        self._descriptors = open_descriptors()

    def require_none(self, after: str, patience_s: float = 2.0) -> None:
        """Raise ContractViolation if something is left after a while."""
        limit = time.monotonic() + patience_s
        while (left := self._left()) and time.monotonic() < limit:
            time.sleep(0.02)
        require(not left, f"left after {after}: {left}")

    def _left(self) -> str:
        threads = [thread.name for thread in threading.enumerate() if thread not in self._threads]
        descriptors = open_descriptors() - self._descriptors
        names = [*threads, *([f"{descriptors} descriptors"] if descriptors > 0 else [])]
        return ", ".join(names)
