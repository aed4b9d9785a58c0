"""Traces of requests in Mooncake's format: JSON lines with lengths, and the names of the prompt's blocks.

{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 2353, ...]}

A block's id stands for its tokens and all before them, so equal ids are equal prefixes. The last one may be part full.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import msgspec

from pdtx.errors import InputError
from pdtx.units import ceil_div

MOONCAKE_BLOCK_TOKENS = 512
MOST_LINE_BYTES = 32 << 20
"""More is no request: its blocks would be 100 million tokens and more."""
_MOST_ID = (1 << 63) - 1

Progress = Callable[[int, int], None]
"""Told now and then how many bytes of how many have been read."""
_TELL_EVERY = 256

Whole = Annotated[int, msgspec.Meta(ge=0, le=_MOST_ID)]


class TraceRequest(msgspec.Struct, frozen=True):
    """One request. timestamp: milliseconds. input_length, output_length: tokens. hash_ids: of the prompt's blocks."""

    timestamp: Annotated[float, msgspec.Meta(ge=0)]
    input_length: Whole
    output_length: Whole
    hash_ids: tuple[Whole, ...]


def read_trace(
    path: Path, block_tokens: int = MOONCAKE_BLOCK_TOKENS, progress: Progress = lambda *_: None
) -> Iterator[TraceRequest]:
    """Yield the requests of a file, which is never in memory as a whole. Empty lines are passed over.

    Raises InputError for a file that cannot be read or has no requests, and for a line that is none, with its number.
    """
    decoder = msgspec.json.Decoder(TraceRequest)
    number = found = 0
    try:
        with path.open("rb") as file:
            total = path.stat().st_size
            while line := file.readline(MOST_LINE_BYTES + 1):
                number += 1
                if len(line) > MOST_LINE_BYTES:
                    raise InputError(f"{path} line {number} has more than {MOST_LINE_BYTES} bytes; is this a trace?")
                if line.strip():
                    found += 1
                    yield _request(decoder, line, block_tokens, f"{path} line {number}")
                if number % _TELL_EVERY == 0:
                    progress(file.tell(), total)
    except OSError as error:
        raise InputError(f"cannot read the trace {path}: {error.strerror}") from None
    if not found:
        raise InputError(f"the trace {path} has no requests; every line is a JSON object with hash_ids")


def _request(decoder: msgspec.json.Decoder[TraceRequest], line: bytes, block_tokens: int, where: str) -> TraceRequest:
    try:
        request = decoder.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(f"{where} is no request of a trace: {error}") from None
    blocks = ceil_div(request.input_length, block_tokens)
    if len(request.hash_ids) != blocks:
        raise InputError(
            f"{where}: {request.input_length} tokens make {blocks} blocks of {block_tokens} tokens, but hash_ids has "
            f"{len(request.hash_ids)}; say with --trace-block-tokens how many tokens a block has"
        )
    if len(set(request.hash_ids)) != blocks:
        raise InputError(f"{where} names a block twice in hash_ids: an id stands for all tokens up to the block's end")
    return request
