"""What a process that is to be killed or stopped is told to do."""

import msgspec

Option = bool | int | float | str | None


class Job(msgspec.Struct, forbid_unknown_fields=True):
    """What a peer process is to do.

    mover, options: for make_mover(). address: to listen at, or to connect to. token: of every session.
    session_id: a producer's. nbytes: of its memory, all of which is filled with the byte fill.
    shared: see pdtx.cache.memory.allocate. puts, gets: what a producer does.
    """

    mover: str
    options: dict[str, Option]
    producer: bool
    address: str
    token: bytes
    nbytes: int
    fill: int
    session_id: str = "peer"
    shared: bool = False
    puts: bool = True
    gets: bool = True
