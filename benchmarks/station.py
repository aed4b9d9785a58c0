"""One end of a benchmark's pair: a mover and a cache. Lives in a process of its own and does what it is told."""

import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch

from benchmarks.resident import PeakMemory
from benchmarks.workload import Case, Contents, Side
from pdtx.cache.memory import allocate
from pdtx.errors import PdtxError, TransferRefused
from pdtx.plan import Costs, Mode, Slices, TransferPlan, choose_mode
from pdtx.plan.modes import PIECE_BYTES
from pdtx.ranges.units import UnitGrid, common_unit
from pdtx.transports import Connection, Mover, Placement, Region, TransferKey, make_mover

Operation = Literal["put", "get"]

_SESSION = "benchmark"
_PATIENCE_S = 60.0
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class StationOptions:
    """How both ends of a pair are made. room: bytes of either cache. shared: in memory that a peer can map."""

    mover: str
    options: Mapping[str, object] = field(default_factory=dict)
    room: int = 0
    shared: bool = False


class _Grants:
    """A Receiver that lets everything happen that the present case is made of, as often as asked."""

    def __init__(self, region: Region) -> None:
        self.token = secrets.token_bytes(32)
        self.slices = dict[TransferKey, Slices]()
        self._region = region

    def admit(self, _: str) -> bytes:
        return self.token

    def place(self, _: str, key: TransferKey) -> Placement:
        if key not in self.slices:
            raise TransferRefused(f"{key} is not a part of this benchmark")
        return Placement(self._region, self.slices[key])

    offer = place

    def placed(self, _: str, key: TransferKey, nbytes: int, error: PdtxError | None) -> None:
        pass

    offered = placed

    def notified(self, _: str, data: bytes) -> None:
        pass

    def closed(self, _: str, reason: str) -> None:
        pass


class Station:
    """A cache, and a mover that listens or connects."""

    def __init__(self, side: Side, options: StationOptions) -> None:
        torch.set_num_threads(1)
        self._side: Side = side
        # Nothing but shared memory needs the word, and a cache that is not shared is what users have.
        self._memory = allocate(options.room, _CPU, shared=True) if options.shared else allocate(options.room, _CPU)
        self._region = Region(self._memory)
        self._mover: Mover = make_mover(options.mover, **options.options)
        self.registration = self._mover.register(self._region)
        self._grants = _Grants(self._region)
        self._connection: Connection | None = None
        self._cases = dict[Case, list[tuple[TransferKey, TransferPlan]]]()
        self._peak: PeakMemory | None = None

    # -- set-up -----------------------------------------------------------------------------------------------------

    def listen(self) -> tuple[str, bytes]:
        """Return the address and the session's token."""
        return self._mover.listen("127.0.0.1:0", self._grants), self._grants.token

    def connect(self, address: str, token: bytes) -> str:
        """Connect; return what carries the payload."""
        self._connection = self._mover.connect(address, _SESSION, token, time.monotonic() + _PATIENCE_S)
        return str(self._connection.path)

    def lay(self, case: Case) -> None:
        """Lay a case's cache over the memory, and plan its transfers, unless that was done before."""
        self._contents = Contents(case, self._side, self._memory)
        if case not in self._cases:
            self._cases[case] = [(_key(plan), plan) for plan in case.plans()]
        self._jobs = self._cases[case]
        ours = TransferPlan.source if self._side == "source" else TransferPlan.destination
        self._grants.slices = {key: ours(plan) for key, plan in self._jobs}

    def fill(self) -> None:
        """Write what is to be moved."""
        self._contents.fill()

    def poison(self) -> None:
        """Make sure that nothing of an earlier round is left."""
        self._contents.poison()

    # -- a round ----------------------------------------------------------------------------------------------------

    def move(self, operation: Operation, staged: list[bool]) -> float:
        """Put or get all of the case; return the seconds from the first one to the last DONE."""
        connection, region = self._connected, self._region
        begun = time.perf_counter()
        deadline = time.monotonic() + _PATIENCE_S
        if operation == "put":
            handles = [
                connection.put(key, region, plan.to_move, deadline, staged=pack)
                for (key, plan), pack in zip(self._jobs, staged, strict=True)
            ]
        else:
            handles = [connection.get(key, region, plan.to_move, deadline) for key, plan in self._jobs]
        # They end in order: waiting for the last one first wakes this thread once, not once for each.
        for handle in reversed(handles):
            handle.wait()
        return time.perf_counter() - begun

    def choose(self, mode: Mode, costs: Costs | None) -> list[bool]:
        """Return for each transfer whether it is to be packed on the way."""
        if not self._connected.stages:
            return [False] * len(self._jobs)
        choices = (
            choose_mode(plan.num_runs, plan.nbytes, mode, costs, num_ranges=plan.num_destination_ranges)
            for _, plan in self._jobs
        )
        return [choice.mode is Mode.STAGED for choice in choices]

    def pack(self) -> float:
        """Pack all of the case as staging does, piece by piece; return the seconds."""
        begun = time.perf_counter()
        for _, plan in self._jobs:
            slices = plan.source()
            grid = UnitGrid(self._memory, slices, common_unit(slices))
            for first, stop in grid.pieces(PIECE_BYTES):
                grid.take(first, stop)
        return time.perf_counter() - begun

    def wrong(self) -> int:
        """Count the elements of the request that are not as they were sent."""
        return self._contents.wrong()

    def strays(self) -> int:
        """Count the elements outside the request that were written; the request's are lost by this."""
        return self._contents.strays()

    @property
    def _connected(self) -> Connection:
        if self._connection is None:
            raise PdtxError("this end of the pair listens; the other one moves")
        return self._connection

    # -- memory -----------------------------------------------------------------------------------------------------

    def watch_memory(self) -> None:
        """Count memory from now on."""
        self._peak = PeakMemory()

    def forget_peak(self) -> None:
        """Look for the highest from now on; what it is compared with stays."""
        self._watched.forget()

    def memory_above(self) -> int:
        """Return the bytes needed at most above those of when watching began."""
        return self._watched.above()

    @property
    def _watched(self) -> PeakMemory:
        if self._peak is None:
            raise PdtxError("nobody has asked this end of the pair to watch its memory")
        return self._peak


class Stations:
    """The ends that live in one process: usually one."""

    def __init__(self, sides: list[Side], options: StationOptions) -> None:
        self._stations = {side: Station(side, options) for side in sides}

    def do(self, side: Side, method: str, *arguments: object) -> object:
        """Call a method of an end."""
        answer: object = getattr(self._stations[side], method)(*arguments)
        return answer


def _key(plan: TransferPlan) -> TransferKey:
    return TransferKey("r", plan.layers.start, plan.layers.stop, plan.tokens.start, plan.tokens.stop)
