"""References of a case: opened at the two ends of its first link, and measured a round at a time."""

from collections.abc import Mapping, Sequence

from pdtx.bench import calls
from pdtx.bench.fleet_remote import RemoteAgent
from pdtx.errors import PdtxError, PeerLost
from pdtx.results.model import Reference
from pdtx.transports.base import Path


class FleetReference:
    """A reference between two agents; once something has gone wrong with it there are no more rounds, and it says why.

    server: the agent that listens; client: the one that measures. nbytes: of a round. run_sizes: of the case's link.
    """

    def __init__(
        self, name: str, server: RemoteAgent, client: RemoteAgent, nbytes: int, run_sizes: Mapping[str, int]
    ) -> None:
        self.name, self.nbytes, self.missing = name, nbytes, ""
        self._run_sizes = {int(size): count for size, count in run_sizes.items()}
        self._server, self._client = server, client
        self._seconds, self._detail = list[float](), ""

    def open(self, deadline: float) -> None:
        """Make both ends and measure a first round, which counts as warm-up. Raises PeerLost."""
        try:
            opened = self._server.start(calls.OPEN_REFERENCE, calls.OpenReference(self.name, self.nbytes)).result(
                deadline
            )
            self._detail = opened.detail
            call = calls.ConnectReference(
                self.name, opened.address, opened.token, self.nbytes, ROUND_S, self._run_sizes
            )
            self._client.start(calls.CONNECT_REFERENCE, call).result(deadline)
            self._round(deadline)
        except PeerLost:
            raise
        except PdtxError as error:
            self.missing = str(error)

    def round(self, deadline: float) -> None:
        """Measure another round. Raises PeerLost."""
        if self.missing:
            return
        try:
            self._seconds.append(self._round(deadline))
        except PeerLost:
            raise
        except PdtxError as error:
            self.missing = str(error)

    def _round(self, deadline: float) -> float:
        answer: calls.ReferenceRound = self._client.start(calls.REFERENCE_ROUND, calls.ReferenceCall(self.name)).result(
            deadline
        )
        self._detail = answer.detail or self._detail
        return answer.seconds

    def result(self, limits: bool) -> Reference:
        """Return what was measured. limits: whether percentages are of this one."""
        return Reference(
            name=self.name,
            nbytes=self.nbytes,
            seconds=self._seconds,
            detail=self._detail,
            limits=limits,
            missing=self.missing,
        )


ROUND_S = 60.0
"""Longest that a round may take."""


def reference_names(asked: Sequence[str], mover: str, path: Path) -> tuple[str, ...]:
    """Return the references to measure, the one that limits first.

    asked: their names; auto stands for what fits: memcpy where the payload stays in one host's memory, else a socket,
    and what UCX itself does with one operation where the mover is built on it; none for nothing.
    """
    found = list[str]()
    for name in asked:
        if name == "auto":
            own = ["ucx_perftest"] if mover == "ucx" else []
            found += [*own, "memcpy" if path.kind in ("shm", "inproc") else "socket"]
        elif name != "none":
            found.append(name)
    return tuple(dict.fromkeys(found))


def results_of(references: Sequence[FleetReference]) -> list[Reference]:
    """Return all references; the first one with figures is the one that percentages are of."""
    first = next((one for one in references if not one.missing), None)
    return [one.result(one is first) for one in references]
