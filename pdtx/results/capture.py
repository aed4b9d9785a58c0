"""Captures: what a prefill node did with each request, JSON lines that `pdtx replay` and `pdtx bench` read.

The first line is a header; every other one a request, with the fields of Mooncake's traces and some more. Neither text
nor token ids are in it unless somebody has asked for them: equal hash_ids are equal prefixes, and say no more.

History of the format, the field `version` (`format` is "pdtx-capture"):
1  this one.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import msgspec

from pdtx.errors import InputError

CAPTURE_FORMAT = "pdtx-capture"
CAPTURE_VERSION = 1
MOST_LINE_BYTES = 64 << 20

Whole = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
BlockId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
Tables = tuple[list[BlockId], list[BlockId]]
"""Block ids of one request: the prefill node's, and those that the decode node has granted. 0 is no block."""


class CaptureHeader(msgspec.Struct, frozen=True, kw_only=True):
    """What was captured. block_tokens: tokens that one of hash_ids stands for. chunk_size: most tokens at a time.

    block_size: tokens in a block of the prefill node's cache. started: when, in ISO form.
    """

    format: str
    version: int
    engine_id: str
    model: str
    block_tokens: Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]
    block_size: Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]
    chunk_size: Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]
    max_num_seqs: Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]
    started: str = ""
    mover: str = ""
    pdtx: str = ""


class CapturedChunk(msgspec.Struct, frozen=True):
    """Tokens start..stop, computed at once. begun: seconds after the request's arrival.

    ready: (buffer, layer, seconds after begun) of each layer, in the order in which they were computed.
    """

    start: Whole
    stop: Whole
    begun: Seconds
    ready: list[tuple[Whole, Whole, Seconds]]


class CapturedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request. timestamp: milliseconds after the first one's arrival. Lengths in tokens; times in seconds.

    block_tables: of the first group that keeps all tokens; group_tables: of all groups by name, where there
    are several.
    cached_tokens: that tiers gave, so that they were not computed; peer_cached_tokens: that were not sent.
    outcome: verified, finished (nobody looked) or failed, and then error says why.
    """

    timestamp: Annotated[float, msgspec.Meta(ge=0)]
    input_length: Whole
    output_length: Whole
    hash_ids: list[Whole]
    request_id: str = ""
    block_tables: Tables = ([], [])
    group_tables: dict[str, Tables] = {}
    chunks: list[CapturedChunk] = []
    cached_tokens: Whole = 0
    peer_cached_tokens: Whole = 0
    load_s: Seconds = 0.0
    computed_s: Seconds | None = None
    move_s: Seconds = 0.0
    nbytes: Whole = 0
    outcome: str = ""
    error: str | None = None
    token_ids: list[Whole] | None = None


def is_capture(path: Path) -> bool:
    """Whether a file begins like a capture. Raises InputError if it cannot be read."""
    try:
        with path.open("rb") as file:
            line = file.readline(1 << 16)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None
    try:
        found = msgspec.json.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return False
    return isinstance(found, dict) and found.get("format") == CAPTURE_FORMAT


def read_header(path: Path) -> CaptureHeader:
    """Return a capture's header. Raises InputError if there is none, or of a version that is not known here."""
    if not is_capture(path):
        raise InputError(f"{path} is no capture: its first line has no format {CAPTURE_FORMAT!r}")
    with path.open("rb") as file:
        return _header(file.readline(MOST_LINE_BYTES), path)


def read_capture(path: Path) -> tuple[CaptureHeader, list[CapturedRequest]]:
    """Return a capture's header and its requests in the order of their arrival.

    A last line that was cut off, as when the node was killed, is left out. Raises InputError, naming the line.
    """
    header = read_header(path)
    found = sorted(_requests(path), key=lambda request: request.timestamp)
    for request in found:
        blocks = -(-request.input_length // header.block_tokens)
        if len(request.hash_ids) != blocks:
            raise InputError(
                f"{path}: request {request.request_id} has {len(request.hash_ids)} hash_ids; {request.input_length} "
                f"tokens in blocks of {header.block_tokens} have {blocks}"
            )
    return header, found


def read_block_tables(path: Path) -> list[tuple[list[int], list[int]]]:
    """Return the block ids of every captured request: (prefill, decode).

    Requests that were not granted any are left out. Raises InputError as read_capture does, and where nothing is left.
    """
    _, requests = read_capture(path)
    tables = [request.block_tables for request in requests if all(request.block_tables)]
    if not tables:
        raise InputError(f"{path} has no request with block tables of both sides")
    return tables


def _header(line: bytes, path: Path) -> CaptureHeader:
    try:
        header = msgspec.json.decode(line, type=CaptureHeader)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(f"{path} line 1 is no header of a capture: {error}") from None
    if header.version != CAPTURE_VERSION:
        raise InputError(f"{path} is a capture of version {header.version}; this pdtx reads version {CAPTURE_VERSION}")
    return header


def _requests(path: Path) -> Iterator[CapturedRequest]:
    decoder = msgspec.json.Decoder(CapturedRequest)
    with path.open("rb") as file:
        file.readline(MOST_LINE_BYTES)
        number = 1
        while line := file.readline(MOST_LINE_BYTES + 1):
            number += 1
            if len(line) > MOST_LINE_BYTES:
                raise InputError(f"{path} line {number} has more than {MOST_LINE_BYTES} bytes; is this a capture?")
            if not line.strip():
                continue
            try:
                yield decoder.decode(line)
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                if not line.endswith(b"\n"):  # it was being written when the node ended
                    return
                raise InputError(f"{path} line {number} is no request of a capture: {error}") from None
