"""A result file of `pdtx bench`: what was asked for, on what, and every raw sample. Figures are made of it later.

History of the format, the field `version` (`format` is "pdtx-bench"):
1  results of single nodes and of `pdtx demo`: one row a request, no samples (see pdtx.report).
2  this one.
"""

from typing import Annotated, Any, Literal

import msgspec

RESULT_FORMAT = "pdtx-bench"
RESULT_VERSION = 2

Count = Annotated[int, msgspec.Meta(ge=0)]
Seconds = Annotated[float, msgspec.Meta(ge=0)]
"""Held to when a file is read: nothing takes less than no time."""
Taken = Annotated[float, msgspec.Meta(gt=0)]

Op = Literal["push", "pull"]
ModeName = Literal["auto", "direct", "staged"]
Pattern = Literal["pairs", "fan-in", "fan-out", "tp"]
"""Who sends to whom, of N prefill and M decode agents: i to i; all to one; one to all; ranks to those that need it."""


class Case(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One point of a sweep. Two values stand for the prefill and the decode side.

    model: a preset, a config.json or a folder with one. layers: only so many of its layers; None for all.
    tokens: of one request. batch: requests of a link that move in one iteration.
    mean_run: how block ids lie in the pool: mean length of pieces with consecutive ids; 0 for all in one piece, 1 for
    a random order. block_tables: recorded ones, (prefill, decode) of each request, instead.
    merge: whether runs that touch on both sides are joined. streams: of movers that have several; None for their own.
    depth: transfers of a link under way at once; 0 for all. layers_per_transfer: 0 for all of a buffer in one.
    layer_compute_s: seconds that computing a layer is made to take before it is moved; 0 where all is there at once.
    """

    model: str = "llama-3-8b"
    kv_cache_dtype: str = "auto"
    layers: int | None = None
    tokens: int = 2048
    batch: int = 1
    block_size: tuple[int, int] = (16, 16)
    layout: tuple[str, str] = ("flash_attn_nhd", "flash_attn_nhd")
    tp: tuple[int, int] = (1, 1)
    mover: str = "tcp"
    mover_options: dict[str, str] = {}
    op: Op = "push"
    mode: ModeName = "auto"
    merge: bool = True
    mean_run: float = 1.0
    block_tables: list[tuple[list[int], list[int]]] | None = None
    streams: int | None = None
    depth: int = 0
    layers_per_transfer: int = 1
    layer_compute_s: float = 0.0
    pattern: Pattern = "pairs"
    isolated: bool = False
    seed: int = 0


class Transfer(msgspec.Struct, frozen=True, array_like=True):
    """One transfer of one iteration; seconds since the iteration's begin on the clock of who has posted it.

    ready: when the emulated computation of its layers was over; posted: first byte given to the transport; sent: last
    one; ended: acknowledged. staged: packed on the way.
    """

    link: Count
    request: int
    buffer: int
    layer_start: int
    layer_stop: int
    src_rank: int
    dst_rank: int
    nbytes: Count
    ready: float
    posted: float
    sent: float
    ended: float
    staged: bool = False


class LinkSample(msgspec.Struct, frozen=True, kw_only=True):
    """What one link did in one iteration.

    begun, ended: seconds since the iteration's begin on the driver's clock (see clock_error_s of the nodes).
    prepare_s: planning; post_s: giving bytes to the transport, summed over transfers; move_s: from the first byte
    posted to the last transfer ended. claimed_bytes: what the sender says it moved; received_bytes: what the receiver
    has counted; deliveries: how often the receiver was given the whole, against posts: how often it was posted.
    """

    link: Count
    begun: float
    ended: float
    prepare_s: Seconds
    post_s: Seconds
    move_s: Seconds
    claimed_bytes: Count
    received_bytes: Count
    posts: Count = 1
    deliveries: Count = 1


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One iteration over all links. wall_s: from the first link's begin to the last one's end.

    wrong: elements that are not the source's, or strays outside of what was asked for; None where nobody looked.
    first_wrong: the first of them by coordinates. transfers: of all links, for timelines. error: why it did not end.
    """

    iteration: Count
    warmup: bool
    wall_s: Seconds
    links: list[LinkSample]
    wrong: Count | None = None
    first_wrong: str = ""
    transfers: list[Transfer] = []
    error: str | None = None


class Reference(msgspec.Struct, frozen=True, kw_only=True):
    """A yardstick measured between the same nodes in the same session, in turns with the samples.

    name: memcpy, socket, ucx_perftest or disk. nbytes: of each round. limits: whether it is the one that percentages
    are of. missing: why there are no figures.
    """

    name: str
    nbytes: Count
    seconds: list[Taken]
    detail: str = ""
    limits: bool = False
    missing: str = ""


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """Who sends to whom: indices of the result's nodes. path: what carried the payload, see pdtx.transports.Path.

    nbytes: that are asked for in one iteration; wire_bytes: that are moved; unique_bytes: of them without what
    replicated heads send again. runs: contiguous on both sides; run_sizes: from bytes to how many runs have them.
    """

    prefill: Count
    decode: Count
    path: dict[str, Any] = {}
    wire_bytes: Count = 0
    unique_bytes: Count = 0
    runs: Count = 0
    run_sizes: dict[str, Count] = {}
    num_transfers: Count = 0
    modes: dict[str, int] = {}
    mode_reason: str = ""


class Registration(msgspec.Struct, frozen=True, kw_only=True):
    """Memory that a node has made reachable for the network: how much, how often, and how long it took."""

    node: Count
    nbytes: Count
    seconds: Seconds
    regions: Count = 1


class CaseResult(msgspec.Struct, kw_only=True):
    """One case with all its samples. iterations, warmup: as asked for; samples holds as many unless error says why not.

    verified: whether samples were looked at. load_average: of the nodes before the first iteration.
    figures: what follows from the samples (CaseSummary), written for those who read the file by other means; pdtx makes
    it of the samples again.
    """

    case: Case
    iterations: int
    warmup: int
    verified: bool
    links: list[Link] = []
    registrations: list[Registration] = []
    samples: list[Sample] = []
    references: list[Reference] = []
    load_average: list[float] = []
    error: str | None = None
    skipped: str | None = None
    figures: dict[str, Any] | None = None


class NodeFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A node: its role, its host, its rank among those of its role, and what machine_facts() says there.

    clock_error_s: how far its clock, as the driver reads it, may be off.
    """

    role: Literal["prefill", "decode"]
    host: str
    rank: int
    facts: dict[str, Any]
    clock_error_s: float = 0.0


class Result(msgspec.Struct, kw_only=True):
    """A run. config: the flags as given, as YAML has them. complete: False where a deadline or a signal cut it off."""

    format: str = RESULT_FORMAT
    version: int = RESULT_VERSION
    command: list[str]
    config: dict[str, Any]
    label: str = ""
    started: str
    seconds: float = 0.0
    complete: bool = False
    driver: dict[str, Any] = {}
    nodes: list[NodeFacts] = []
    cases: list[CaseResult] = []
