"""Recording of what a prefill node does with its requests; pdtx.results.capture says what is kept, and reads it."""

import os
import secrets
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO

import msgspec
import numpy as np

import pdtx
from pdtx.engine import KVProducer, OutboundRequest
from pdtx.errors import InputError, PdtxError
from pdtx.results.capture import (
    CAPTURE_FORMAT,
    CAPTURE_VERSION,
    CapturedChunk,
    CapturedRequest,
    CaptureHeader,
    Tables,
)
from pdtx.serving import Ended
from pdtx.tiers import prefix_keys
from pdtx.tiers.keys import strong_digest

_MOST_FILES = 1000


class Recorder:
    """Writes a line for each request that has ended. Used from one thread.

    with_tokens: whether token ids are recorded. numbered: whether a file that is there already makes another name
    be taken, path.2 and so on: several nodes may record for one command. Raises InputError for a file that cannot be
    made.
    """

    def __init__(
        self,
        path: Path,
        producer: KVProducer,
        *,
        block_size: int,
        chunk_size: int,
        max_num_seqs: int,
        with_tokens: bool,
        numbered: bool = False,
    ) -> None:
        self._producer, self._block_tokens, self._with_tokens = producer, block_size, with_tokens
        # Without it who has a capture could find out tokens by trying.
        self._salt = secrets.token_bytes(32)
        self._ids = dict[bytes, int]()
        self._begun: float | None = None
        self.path, self._file = _create(path, _MOST_FILES if numbered else 1)
        header = CaptureHeader(
            format=CAPTURE_FORMAT,
            version=CAPTURE_VERSION,
            engine_id=producer.engine_id,
            model=producer.description.model,
            block_tokens=block_size,
            block_size=block_size,
            chunk_size=chunk_size,
            max_num_seqs=max_num_seqs,
            started=datetime.now(UTC).isoformat(timespec="milliseconds"),
            mover=producer.mover.name,
            pdtx=pdtx.__version__,
        )
        self._write(header)

    def begin(self, now: float) -> None:
        """Set the time that arrivals are counted from, in time.monotonic(), unless it is set already."""
        if self._begun is None:
            self._begun = now

    def record(self, ended: Ended) -> None:
        """Write a request down."""
        row, request, arrived = ended.row, ended.request, ended.arrived
        if self._begun is None:
            self._begun = arrived
        computed = request.computed if request is not None else float("nan")
        block_tables, group_tables = self._tables(request)
        line = CapturedRequest(
            timestamp=round(max(0.0, arrived - self._begun) * 1e3, 3),
            input_length=row.prompt_tokens,
            output_length=len(row.token_ids) or (ended.job.max_tokens or 0),
            hash_ids=self._hash_ids(ended.job.token_ids),
            request_id=row.request_id,
            block_tables=block_tables,
            group_tables=group_tables,
            chunks=[
                CapturedChunk(chunk.start, chunk.stop, max(0.0, chunk.begun - arrived), chunk.ready)
                for chunk in ended.chunks
            ],
            cached_tokens=row.cached_tokens,
            peer_cached_tokens=row.peer_cached_tokens,
            load_s=row.load_s,
            computed_s=max(0.0, computed - arrived) if computed == computed else None,
            move_s=row.move_s,
            nbytes=row.nbytes,
            outcome="failed" if row.error is not None else "finished" if row.wrong is None else "verified",
            error=row.error,
            token_ids=list(ended.job.token_ids) if self._with_tokens else None,
        )
        self._write(line)

    def close(self) -> None:
        """Write no more. Idempotent."""
        self._file.close()

    def _write(self, line: CaptureHeader | CapturedRequest) -> None:
        self._file.write(msgspec.json.encode(line) + b"\n")
        self._file.flush()

    def _hash_ids(self, token_ids: Sequence[int]) -> list[int]:
        """Return a number for each block of a prompt, the same where all tokens up to its end are the same."""
        size = self._block_tokens
        try:
            names = list(prefix_keys(token_ids, size, self._salt).digests)
        except PdtxError:  # no tokens that a model could have; the request has failed
            names = [secrets.token_bytes(32) for _ in range(len(token_ids) // size)]
        rest = token_ids[len(names) * size :]
        if rest:
            before = names[-1] if names else self._salt
            names.append(strong_digest(before + repr(list(rest)).encode()))
        return [self._ids.setdefault(name, len(self._ids)) for name in names]

    def _tables(self, request: OutboundRequest | None) -> tuple[Tables, dict[str, Tables]]:
        """Return the block tables of the first group that keeps all tokens, and of all groups if there are several."""
        if request is None:
            return ([], []), {}
        consumer = self._producer.consumer
        names = [group.name for group in consumer.cache.groups] if consumer is not None else []
        granted = dict(zip(names, request.destinations, strict=False))
        groups = self._producer.cache.groups
        found = {
            group.name: (source.tolist(), granted.get(group.name, np.empty(0, np.int64)).tolist())
            for group, source in zip(groups, request.sources, strict=True)
        }
        main = next((group.name for group in groups if group.kind == "full"), groups[0].name)
        return found[main], found if len(found) > 1 else {}


def _create(path: Path, names: int) -> tuple[Path, BinaryIO]:
    """Make a new file: path, or where that is taken the first free one of so many names."""
    for number in range(1, names + 1):
        tried = path if number == 1 else path.with_name(f"{path.name}.{number}")
        try:
            # Who may read it may know which prompts begin alike.
            descriptor = os.open(tried, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            continue
        except OSError as error:
            raise InputError(f"cannot write the capture {tried}: {error.strerror}") from None
        return tried, os.fdopen(descriptor, "wb")
    raise InputError(f"there is a file {path} already; choose another name for the capture")
