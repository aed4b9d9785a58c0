"""What a station is told to do, and what it says of it: the words between a driver's fleet and the stations."""

from dataclasses import dataclass, field
from typing import Literal

from pdtx.results.model import Case, Registration, Transfer

Role = Literal["prefill", "decode"]


@dataclass(frozen=True)
class LinkWork:
    """One link as one of its two stations sees it. Both derive the same plans from the same numbers.

    number: of the link, in the whole case. requests: numbers of its requests in the pools of both sides.
    ranks: tensor-parallel ranks of the prefill and of the decode side that take part.
    """

    number: int
    requests: range
    prefill_ranks: range
    decode_ranks: range


@dataclass(frozen=True)
class StationWork:
    """What one station takes part in. pool_requests: that its pool has blocks for; ranks: that it keeps memory of."""

    case: Case
    role: Role
    ranks: range
    pool_requests: int
    links: tuple[LinkWork, ...]
    verify: bool = True


@dataclass(frozen=True)
class Prepared:
    """What a station has made: facts of each of its links by number, and what registering its memory took.

    links: from a link's number to {"wire_bytes", "unique_bytes", "runs", "run_sizes", "num_transfers", "modes",
    "mode_reason"}, as pdtx.results.model.Link has them. address, token: where peers connect, of the side that listens.
    """

    links: dict[int, dict[str, object]]
    registrations: tuple[Registration, ...]
    address: str = ""
    token: bytes = field(default=b"", repr=False)


@dataclass(frozen=True)
class LinkMoved:
    """What the side that posts says of one link's iteration; times as time.monotonic() of its own host."""

    link: int
    begun: float
    ended: float
    prepare_s: float
    post_s: float
    move_s: float
    claimed_bytes: int
    posts: int
    transfers: tuple[Transfer, ...]


@dataclass(frozen=True)
class LinkChecked:
    """What the side that was written to says of one link's iteration. wrong: None where nobody looked."""

    link: int
    received_bytes: int
    deliveries: int
    wrong: int | None
    first_wrong: str = ""
