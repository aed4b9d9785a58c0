"""pdtx's own movers, measured as the yardsticks are: two processes, driven round by round."""

from collections import Counter
from collections.abc import Mapping
from contextlib import AbstractContextManager
from statistics import median
from typing import Any

from benchmarks.peers import Peer
from benchmarks.peers.child import Child, awake
from benchmarks.station import Operation, StationOptions, Stations
from benchmarks.workload import LLAMA_CASE, Case, Side
from pdtx.bench.turns import MOVES_A_ROUND
from pdtx.errors import PdtxError
from pdtx.plan import Costs, Mode, load_costs

_SHARED = ("shm",)
"""Movers whose caches lie in memory that a peer can map, as they do in the nodes."""
_ONE_PROCESS = ("inproc",)
_QUIET = {"UCX_WARN_UNUSED_ENV_VARS": "n"}
"""Of UCX: what ucxx sets for older versions is no news."""


class MoverPair(Peer):
    """Two processes with a cache each, between which a mover moves a case: from the first put to the last DONE.

    mover, options: of make_mover. environment: of both processes; the caller's settings of UCX and the like do not
    count. operation: "put" lets the source connect, "get" the destination. mode: direct, staged, or picked for each
    transfer by costs (default: those measured on this machine, else the mover's usual ones). repeat: moves in one
    round, of which the median counts. room: bytes of either cache, where cases follow that are larger than the first.
    Raises InputError on start if the mover is not to be had.
    """

    def __init__(
        self,
        mover: str,
        case: Case = LLAMA_CASE,
        *,
        options: Mapping[str, object] | None = None,
        environment: Mapping[str, str] | None = None,
        operation: Operation = "put",
        mode: Mode = Mode.DIRECT,
        costs: Costs | None = None,
        repeat: int = MOVES_A_ROUND,
        room: int = 0,
    ) -> None:
        super().__init__(f"pdtx {mover} {operation}", "", case.nbytes)
        self._mover, self._case, self._mode, self._costs, self._repeat = mover, case, mode, costs, repeat
        self._operation: Operation = operation
        self._environment = dict(environment or {})
        self._options = StationOptions(mover, dict(options or {}), max(room, case.room), mover in _SHARED)
        self._children = dict[Side, Child[Stations]]()
        self._staged, self._path, self._checked = list[bool](), "", set[Case]()

    # -- life -------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the processes, connect them and plan the case."""
        groups: list[list[Side]] = [["source"], ["destination"]]
        if self._mover in _ONE_PROCESS:
            groups = [["source", "destination"]]
        for sides in groups:
            child = Child(_QUIET | self._environment, Stations, sides, self._options)
            self._children.update(dict.fromkeys(sides, child))
        self._wait_until_made()
        address, token = self._do(self._listens, "listen")
        self._path = self._do(self._connects, "connect", address, token)
        self._lay(self._case)
        self._pause()

    def _wait_until_made(self) -> None:
        """Wait for all processes, also when one of them fails: the other one should be able to say so, too."""
        errors = list[PdtxError]()
        for child in self._distinct():
            try:
                child.ready()
            except PdtxError as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def stop(self) -> None:
        """End the processes."""
        children, self._children = self._distinct(), {}
        for child in children:
            child.end()

    def lay(self, case: Case) -> None:
        """Move another case from now on, in the same memory."""
        with self._awake():
            self._lay(case)

    def _lay(self, case: Case) -> None:
        self._case, self.nbytes = case, case.nbytes
        self._do_both("lay", case)
        self._do("source", "fill")
        table = load_costs()
        costs = self._costs or table.of(self._mover, "cpu")[0]
        self._staged = self._do(self._connects, "choose", self._mode, costs)
        measured = self._costs is not None or (self._mover, "cpu") in table.measured
        self.detail = self._description("measured" if measured else "default")

    def _description(self, costs: str) -> str:
        """Say what carries the payload, what was picked and by which costs, and what was set."""
        count = Counter("staged" if staged else "direct" for staged in self._staged)
        picked = ", ".join(f"{mode} {number}" for mode, number in sorted(count.items()))
        if self._mode is Mode.AUTO:
            picked = f"{picked} by {costs} costs"
        settings = {**self._options.options, **self._environment}
        return ", ".join([self._path, picked, *(f"{name}={value}" for name, value in settings.items())])

    # -- rounds -----------------------------------------------------------------------------------------------------

    def round(self) -> float:
        """Move the case repeat times, verify it; return the seconds of one move.

        What else was written at the destination counts as wrong, too; that is looked at in a case's first round.
        """
        with self._awake():
            self._do("destination", "poison")
            seconds = [self._move() for _ in range(self._repeat)]
            self.wrong += self._do("destination", "wrong")
            if self._case not in self._checked:
                self._checked.add(self._case)
                self.wrong += self._do("destination", "strays")
        return median(seconds)

    def _move(self) -> float:
        seconds: float = self._do(self._connects, "move", self._operation, self._staged)
        return seconds

    def pack(self) -> float:
        """Pack the case at its source as staging does; return the seconds."""
        with self._awake():
            seconds: float = self._do("source", "pack")
        return seconds

    # -- memory -----------------------------------------------------------------------------------------------------

    def watch_memory(self) -> None:
        """Count the memory of both processes from now on, for rss_above(): before the first round."""
        with self._awake():
            # Its pages are the cache's and not the mover's; they are there once something has been written to them.
            self._do("destination", "poison")
            self._do_both("watch_memory")

    def rss_above(self) -> dict[Side, int]:
        """Do a round; return the resident bytes of both processes at the highest, above those of before."""
        with self._awake():
            self._do("destination", "poison")
            self._do_both("forget_peak")
            self._move()
            above: dict[Side, int] = {side: self._do(side, "memory_above") for side in self._children}
            self.wrong += self._do("destination", "wrong")
        return above

    # -- processes --------------------------------------------------------------------------------------------------

    @property
    def _connects(self) -> Side:
        return "source" if self._operation == "put" else "destination"

    @property
    def _listens(self) -> Side:
        return "destination" if self._operation == "put" else "source"

    def _do(self, side: Side, method: str, *arguments: object) -> Any:  # noqa: ANN401  # whatever the method returns
        if side not in self._children:
            raise PdtxError(f"{self.name} has not been started")
        return self._children[side].call(Stations.do, side, method, *arguments)

    def _do_both(self, method: str, *arguments: object) -> None:
        """Let both ends do the same: at the same time, where they can."""
        if len(self._distinct()) == 1:
            for side in self._children:
                self._do(side, method, *arguments)
            return
        for one in [child.begin(Stations.do, side, method, *arguments) for side, child in self._children.items()]:
            one.result()

    def _distinct(self) -> list[Child[Stations]]:
        return list({id(child): child for child in self._children.values()}.values())

    def _awake(self) -> AbstractContextManager[None]:
        return awake(*self._distinct())

    def _pause(self) -> None:
        for child in self._distinct():
            child.pause()
