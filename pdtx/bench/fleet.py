"""The driver's side: agents that work together, and cases measured with them."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Self

from pdtx.bench import calls
from pdtx.bench.fleet_case import GRACE_S, CaseOptions, CaseRun, Progress
from pdtx.bench.fleet_remote import RemoteAgent, gather
from pdtx.bench.patterns import plan_pattern
from pdtx.bench.work import Role
from pdtx.errors import DeadlineExceeded, InputError, PdtxError, PeerLost
from pdtx.results.model import Case, CaseResult, NodeFacts
from pdtx.sidechannel import Security

__all__ = ["Fleet", "Progress", "Target"]


_PATIENCE_S = 3.0
"""Until somebody is told that an agent has not answered yet, and again each time."""


@dataclass(frozen=True)
class Target:
    """An agent to connect to, HOST:PORT, and how the channel to it is protected."""

    role: Role
    address: str
    security: Security


class Fleet:
    """Agents that work for this driver. Holds no cache itself. Used by one thread.

    current: the result of the case under way, with what has been measured so far; for who is interrupted, and after a
    lost agent. None between cases.
    failure: what the case that failed last failed with.
    """

    def __init__(
        self,
        targets: Sequence[Target],
        *,
        timeout_s: float,
        silence_s: float = calls.SILENCE_S,
        waiting: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Connect to all; as connect() does."""
        self.current: CaseResult | None = None
        self.failure: PdtxError | None = None
        self._broken: PdtxError | None = None
        self._agents: dict[tuple[Role, int], RemoteAgent] = {}
        deadline = time.monotonic() + timeout_s
        try:
            for target in sorted(targets, key=lambda target: target.role != "prefill"):
                rank = sum(role == target.role for role, _ in self._agents)
                remote = RemoteAgent(
                    target.address, target.role, rank, target.security, on_lost=self._on_lost, silence_s=silence_s
                )
                self._agents[target.role, rank] = remote
                with _told_again(waiting, f"waiting for {remote.name}"):
                    remote.connect(deadline)
        except BaseException:
            self.close()
            raise

    @classmethod
    def connect(
        cls,
        prefill: Sequence[str],
        decode: Sequence[str],
        *,
        security: Security,
        timeout_s: float,
        silence_s: float = calls.SILENCE_S,
        waiting: Callable[[str], None] = lambda _: None,
    ) -> Self:
        """Connect to agents at HOST:PORT, say hello and read their clocks, all within timeout_s.

        security: peer_public is one key that all agents have, or one for each: of prefill agents first, in order.
        silence_s: after which an agent that says nothing counts as lost. waiting: hears every few seconds, from a
        thread of its own, which agent has not answered yet.
        Raises PeerUnreachable, AuthenticationFailed, PeerLost, DeadlineExceeded; InputError for an agent of the other
        role, of another version or at work for another driver, keys that are too few, no agents.
        """
        addresses: list[tuple[Role, str]] = [("prefill", one) for one in prefill] + [("decode", one) for one in decode]
        if not prefill or not decode:
            raise InputError("a fleet needs a prefill and a decode agent at least; give their HOST:PORT")
        keys = security.peer_public
        if len(keys) not in (0, 1, len(addresses)):
            raise InputError(f"{len(keys)} --peer-key for {len(addresses)} agents; give one that all have, or one each")
        targets = [
            Target(
                role, address, Security(security.own, keys[at : at + 1] if len(keys) > 1 else keys, security.insecure)
            )
            for at, (role, address) in enumerate(addresses)
        ]
        return cls(targets, timeout_s=timeout_s, silence_s=silence_s, waiting=waiting)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def nodes(self) -> tuple[NodeFacts, ...]:
        """The agents, prefill ones first; clock_error_s as of now."""
        return tuple(
            NodeFacts(
                role=role,
                host=remote.facts.host,
                rank=rank,
                facts={**remote.facts.facts, "address": remote.address, "max_bytes": remote.facts.max_bytes},
                clock_error_s=remote.clock.error_s,
            )
            for (role, rank), remote in self._agents.items()
        )

    @property
    def max_bytes(self) -> int:
        """What the caches of a case may take at every agent: the least of what they say."""
        return min(remote.facts.max_bytes for remote in self._agents.values())

    def measure(
        self,
        case: Case,
        *,
        iterations: int,
        warmup: int,
        verify: bool,
        references: Sequence[str],
        deadline: float,
        told: Callable[[Progress], None] = lambda _: None,
    ) -> CaseResult:
        """Measure a case. One that fails, or is cut off by deadline (time.monotonic()), says so in its error.

        references: names, or "auto", see reference_names; a round of each follows each counted iteration, between the
        agents of the first link. Its samples are numbered from 0, warm-up included.
        Raises PeerLost when an agent is gone, DeadlineExceeded when one has not ended the case before; what was
        measured of it is then in current. InputError for numbers that nothing can be measured with.
        """
        if iterations < 1 or warmup < 0:
            raise InputError(f"{iterations} iterations and {warmup} for warm-up measure nothing; 1 and 0 are the least")
        if self._broken is not None:
            raise self._broken
        result = CaseResult(case=case, iterations=iterations, warmup=warmup, verified=verify)
        self.current = result
        try:
            counts = [sum(role == one for role, _ in self._agents) for one in ("prefill", "decode")]
            pattern = plan_pattern(case, *counts, verify=verify)
            CaseRun(self._agents, pattern, result, CaseOptions(verify, references, deadline, told)).run()
        except PeerLost as error:
            result.error = str(error)
            raise
        except PdtxError as error:
            self.failure = error
            result.error = str(error)
        self._release()
        self.current = None
        return result

    def _release(self) -> None:
        """Have every agent end the case. Raises PeerLost; notes an agent that does not, for the next case."""
        deadline = time.monotonic() + 2 * GRACE_S
        try:
            gather([remote.start(calls.RELEASE) for remote in self._agents.values()], deadline)
        except PeerLost:
            raise
        except DeadlineExceeded as error:
            stuck = ", ".join(remote.name for remote in self._agents.values() if remote.stuck)
            self._broken = DeadlineExceeded("the end of the case before", stuck, error.seconds, "start it anew")
        except PdtxError as error:
            self._broken = error

    def _on_lost(self, error: PdtxError) -> None:
        """With one agent gone nothing can be measured: whoever waits for another one need not."""
        for remote in list(self._agents.values()):
            remote.give_up(error)

    def close(self) -> None:
        """Say goodbye to all; they end what is under way and wait for the next driver. Idempotent."""
        for remote in self._agents.values():
            remote.close()


@contextlib.contextmanager
def _told_again(tell: Callable[[str], None], text: str) -> Iterator[None]:
    """Tell a text every few seconds while what is within takes its time."""
    done = threading.Event()

    def run() -> None:
        while not done.wait(_PATIENCE_S):
            tell(text)

    thread = threading.Thread(target=run, name="pdtx-waiting", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
