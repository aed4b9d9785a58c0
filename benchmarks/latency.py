"""How long one block takes: 64 runs of 32 KiB in one put, to its DONE, against a socket that moves as many bytes."""

from collections.abc import Mapping

from benchmarks.contest import TIME, compare, measure_in_turns
from benchmarks.movers import UCX_TCP
from benchmarks.pair import MoverPair
from benchmarks.peers import SocketPingPong
from benchmarks.rows import Row
from benchmarks.settings import Settings
from benchmarks.workload import LLAMA_CASE

_AT_MOST = 1.5
"""Times the ping-pong's. A row's ratio is the other way round, so the bar is 1 / 1.5."""

_HAND_OVERS = "a put passes through three threads and an acknowledgement; the socket's caller does all of it itself"


def latency(settings: Settings) -> list[Row]:
    """TCP held to the bar, the other movers beside it."""
    case = settings.case(LLAMA_CASE).one_block()

    def pair(mover: str, environment: Mapping[str, str] | None = None) -> MoverPair:
        return MoverPair(mover, case, environment=environment, repeat=settings.repeat)

    got = measure_in_turns(
        {
            "tcp": pair("tcp"),
            "socket": SocketPingPong(case.nbytes, repeat=settings.repeat),
            "shm": pair("shm"),
            "ucx": pair("ucx"),
            "ucx tcp": pair("ucx", UCX_TCP),
            "nixl": pair("nixl"),
        },
        settings.rounds,
    )
    socket = got["socket"]
    rows = [
        compare("tcp one block : ping-pong", got["tcp"], socket, at_least=1 / _AT_MOST, figure=TIME, limit=_HAND_OVERS)
    ]
    return rows + [
        compare(f"{key} one block : ping-pong over tcp", got[key], socket, figure=TIME)
        for key in ("shm", "ucx", "ucx tcp", "nixl")
    ]
