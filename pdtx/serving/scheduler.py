"""Chunked prefill of several requests at once, each layer's slices shipped while later layers compute."""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

import torch

from pdtx.cache import record_fence
from pdtx.engine import KVProducer, OutboundRequest
from pdtx.errors import DeadlineExceeded, ModelError, OutOfBlocks, PdtxError, VerificationError
from pdtx.report import RequestRow
from pdtx.runner import PagedSequence, greedy
from pdtx.serving.computer import Computer
from pdtx.serving.jobs import Arrivals, Chunk, Ended, Job
from pdtx.tiers import Moved
from pdtx.tiers.prefix import Fetched, PrefixCache, Request
from pdtx.units import gb_per_s

logger = logging.getLogger(__name__)

_LOADERS = 2
"""Requests that are loaded from tiers at once."""

_LOOK_S = 0.05
_PAUSE_S = 0.005
_KEEP_S = 10.0
"""How long the end of a run waits for tiers to take what they were given."""


@dataclass
class _Active:
    """A request whose prefill is under way.

    prompt: the request for the tiers, if there are any. loading: what it waits for before its first chunk; storing:
    before its next one, which overwrites the states that are being stored. first: for each group the first block that
    is computed, or loaded, and not stored yet.
    """

    job: Job
    arrived: float
    request: OutboundRequest
    sequence: PagedSequence
    chunks: list[Chunk] = field(default_factory=list)
    prompt: Request | None = None
    loading: Future[Fetched] | None = None
    storing: Future[Moved] | None = None
    first: list[int] = field(default_factory=list)

    @property
    def pending(self) -> Future[Any] | None:
        """What must have ended before the next chunk can be computed."""
        found = self.loading or self.storing
        return found if found is not None and not found.done() else None


def _nobody(_: Ended) -> None:
    """Take note of nothing."""


class PrefillScheduler:
    """Runs jobs through one computer and one producer.

    chunk_size: most tokens computed at a time; requests take turns after each chunk.
    max_num_seqs: most requests whose prefill is under way at once.
    prefix: this node's tiers, from which prompts' beginnings are loaded instead of computed.
    on_end: told of each job at its end, on the thread that runs them.
    closing: whether no job is to be waited for any more, since the producer lets none begin.
    """

    def __init__(
        self,
        computer: Computer,
        producer: KVProducer,
        *,
        max_tokens: int,
        chunk_size: int,
        max_num_seqs: int,
        timeout_s: float,
        ignore_eos: bool,
        prefix: PrefixCache | None = None,
        on_end: Callable[[Ended], None] = _nobody,
        closing: Callable[[], bool] = lambda: False,
    ) -> None:
        self.computer, self.producer = computer, producer
        self.max_tokens, self.chunk_size, self.max_num_seqs = max_tokens, chunk_size, max_num_seqs
        self.timeout_s, self.ignore_eos, self._on_end = timeout_s, ignore_eos, on_end
        self._prefix, self._closing = prefix, closing
        self._loaders: ThreadPoolExecutor | None = None
        self._fetched = dict[str, Fetched]()
        self._until = float("inf")

    def run(self, jobs: Iterable[Job], *, until: float = float("inf")) -> list[RequestRow]:
        """Run jobs as they arrive; return one row each, in their order. A job that fails has its error in its row.

        until: time.monotonic() at which those that have begun fail, and no more are begun: those have no rows.
        """
        self._until = until
        if self._prefix is None:
            return self._run(jobs)
        with ThreadPoolExecutor(_LOADERS, "pdtx-loader") as self._loaders:
            rows = self._run(jobs)
        self._prefix.settle(_KEEP_S)
        return rows

    def _run(self, jobs: Iterable[Job]) -> list[RequestRow]:
        arrivals = Arrivals(jobs, time.monotonic())
        rows, active, shipped = dict[str, RequestRow](), deque[_Active](), deque[_Active]()
        while (arrivals.next is not None or active) and time.monotonic() < self._until:
            self._admit(arrivals, active, rows)
            if active:
                self._step(active, shipped)
            elif arrivals.next is not None:
                time.sleep(max(0.0, min(arrivals.due - time.monotonic(), self._until - time.monotonic(), _LOOK_S)))
            self._collect_ended(shipped, rows)
        shipped += active
        while shipped:
            self._collect_ended(shipped, rows)
            time.sleep(_PAUSE_S if shipped else 0.0)
        return list(rows.values())

    def _admit(self, arrivals: Arrivals, active: deque[_Active], rows: dict[str, RequestRow]) -> None:
        """Begin jobs that have arrived, as long as there is room for them."""
        while (job := arrivals.next) is not None and (arrivals.due <= time.monotonic() or self._closing()):
            if len(active) >= self.max_num_seqs:
                return
            row = rows.setdefault(
                job.request_id, RequestRow(request_id=job.request_id, prompt_tokens=len(job.token_ids))
            )
            arrived = min(arrivals.due, time.monotonic())
            try:
                begun = self._begin(job, arrived, patient=not active)
            except PdtxError as error:
                row.error = str(error)
                self._end(Ended(job, row, arrived))
            else:
                if begun is None:
                    return
                active.append(begun)
            arrivals.advance()

    def _collect_ended(self, shipped: deque[_Active], rows: dict[str, RequestRow]) -> None:
        """Make the rows of those that need no more waiting, so that what is told of them comes while others run."""
        now = time.monotonic()
        for _ in range(len(shipped)):
            job = shipped.popleft()
            request = job.request
            if request.finished is not None or request.error is not None or request.deadline < now:
                self._collect(job, rows)
            else:
                shipped.append(job)

    def _end(self, ended: Ended) -> None:
        row = ended.row
        extra = {"request_id": row.request_id}
        if row.error is None:
            logger.info("request %s ended well: %d bytes", row.request_id, row.nbytes, extra=extra)
        else:
            logger.info("request %s failed: %s", row.request_id, row.error, extra=extra)
        self._on_end(ended)

    def _begin(self, job: Job, arrived: float, *, patient: bool) -> _Active | None:
        """Start a job; None if it must wait for blocks. Raises what makes it impossible."""
        max_tokens = job.max_tokens or self.max_tokens
        if len(job.token_ids) + max_tokens > self.computer.max_model_len:
            raise ModelError(
                f"{len(job.token_ids)} prompt tokens and {max_tokens} new ones exceed the model's "
                f"{self.computer.max_model_len}"
            )
        timeout_s = max(0.0, min(self.timeout_s, self._until - time.monotonic()))
        needed = self.producer.blocks_needed(len(job.token_ids))
        self.producer.allocator.check_possible(needed)
        if not self.producer.allocator.fits(needed) and not (
            patient and self.producer.wait_for_blocks(needed, timeout_s)
        ):
            if patient:
                raise OutOfBlocks(f"{sum(needed)} blocks did not become free within {timeout_s:g} s")
            return None
        request = self.producer.begin(
            job.request_id,
            job.token_ids,
            max_tokens=max_tokens,
            timeout_s=timeout_s,
            ignore_eos=self.ignore_eos,
        )
        active = _Active(job, arrived, request, PagedSequence(self.producer.cache, request.sources))
        self._look_up(active)
        return active

    def _look_up(self, active: _Active) -> None:
        """Begin to load what the tiers have of a prompt."""
        prefix, request = self._prefix, active.request
        if prefix is None or self._loaders is None:
            return
        try:
            keys = prefix.keys(request.token_ids)
        except PdtxError as error:  # the model will say what is wrong with them
            logger.warning("request %s has no keys: %s", request.request_id, error)
            return
        active.first = [0] * len(request.sources)
        active.prompt = Request(keys, request.sources, request.own_blocks, self.producer)
        if not self.computer.resumes:
            return  # a model that must compute a prompt in one piece has no use for a part of it; peers may have
        active.loading = self._loaders.submit(
            prefix.fetch, active.prompt, request.num_tokens, request.deadline, resume=True
        )

    def _take_loaded(self, active: _Active, prefix: PrefixCache) -> None:
        """Go on from what was loaded, and ship it. Raises DeadlineExceeded while it may still be written."""
        loading, active.loading = active.loading, None
        if loading is None:
            return
        try:
            fetched = loading.result()
        except DeadlineExceeded:
            raise
        except Exception:
            logger.exception("nothing of request %s is loaded from a tier", active.request.request_id)
            return
        self._fetched[active.request.request_id] = fetched
        active.first = [fetched.first_place(group, prefix.block_tokens) for group in range(len(active.first))]
        active.sequence.num_tokens = fetched.num_tokens
        if fetched.num_tokens:
            self.producer.prefix_ready(active.request, fetched.num_tokens)

    def _keep(self, active: _Active, prefix: PrefixCache) -> None:
        """Store what is computed: at the end, or after every chunk where there are states, which the next changes."""
        request, done = active.request, active.sequence.num_tokens
        if active.prompt is None or (done < request.num_tokens and not prefix.has_states):
            return
        fence, fetched = record_fence(self.producer.cache.device), self._fetched.get(request.request_id)
        kept = prefix.keep(active.prompt, active.first, done, fence, fetched=fetched)
        active.first = [max(first, done // prefix.block_tokens) for first in active.first]
        if kept is not None:
            active.storing = kept

    def _size(self, start: int, num_tokens: int) -> int:
        """Return how many tokens to compute next, so that states are seen at the ends of the tiers' blocks."""
        size = self.computer.chunk(num_tokens - start, self.chunk_size)
        if self._prefix is not None and self._prefix.has_states and self.computer.resumes:
            block = self._prefix.block_tokens
            end = min(start + size, num_tokens - 1) // block * block
            size = end - start if end > start else size
        return size

    def _waits(self, job: _Active, others: deque[_Active]) -> bool:
        """Whether a request waits for a tier; if all others do too, wait a moment for the first."""
        pending = job.pending
        if pending is None:
            return False
        if time.monotonic() > job.request.deadline or job.request.error is not None:
            return False
        rest = [other.pending for other in others]
        if None not in rest:
            wait([pending, *(each for each in rest if each is not None)], _LOOK_S, FIRST_COMPLETED)
        return True

    def _compute(self, job: _Active) -> torch.Tensor:
        """Compute a request's next chunk; return its logits. Raises what makes that impossible."""
        request, sequence = job.request, job.sequence
        if job.pending is not None:
            waited = round(time.monotonic() - request.begun, 3)
            raise DeadlineExceeded("blocks of the prompt", "this node's tiers", waited)
        if self._prefix is not None:
            self._take_loaded(job, self._prefix)
        start = sequence.num_tokens
        chunk = Chunk(start, start + self._size(start, request.num_tokens), time.monotonic())
        job.chunks.append(chunk)

        def ready(buffer: int, layer: int, first: int, last: int) -> None:
            chunk.ready.append((buffer, layer, time.monotonic() - chunk.begun))
            self.producer.layer_ready(request, buffer, layer, first, last)

        logits = self.computer.compute(job.job, sequence, chunk.stop, ready)
        if self._prefix is not None:
            self._keep(job, self._prefix)
        return logits

    def _step(self, active: deque[_Active], shipped: deque[_Active]) -> None:
        """Compute one chunk of the request whose turn it is."""
        job = active.popleft()
        request, sequence = job.request, job.sequence
        if self._waits(job, active):
            active.append(job)
            return
        try:
            if request.error is None:
                logits = self._compute(job)
        except PdtxError as error:
            self.producer.fail(request, error)
        if request.error is not None:
            shipped.append(job)
        elif sequence.num_tokens < len(request.token_ids):
            active.append(job)
        else:
            self.producer.computed(request, greedy(logits))
            shipped.append(job)

    def _collect(self, job: _Active, rows: dict[str, RequestRow]) -> None:
        """Wait for the end of a request, and make its row."""
        request, row = job.request, rows[job.request.request_id]
        try:
            finished = self.producer.wait(request)
        except PdtxError as error:
            row.error = str(error)
            row.wrong = error.wrong if isinstance(error, VerificationError) else None
        else:
            row.token_ids, row.text = finished.token_ids, finished.text
            row.wrong = finished.wrong if finished.verified else None
        times, path = request.times, self.producer.path
        row.mode, row.mode_reason = request.picks.text, request.picks.reason
        if path is not None:
            row.carried_by, row.emulated = path.kind, path.emulated
        row.nbytes, row.num_runs, row.transport = request.nbytes, request.num_runs, self.producer.mover.name
        fetched = self._fetched.pop(request.request_id, Fetched())
        row.cached_tokens, row.cached_from = fetched.num_tokens, ", ".join(fetched.sources)
        row.load_s, row.load_bytes = fetched.seconds, fetched.nbytes
        row.peer_cached_tokens = request.grant.cached_tokens if request.grant is not None else 0
        row.gb_per_s = gb_per_s(row.nbytes, times.move)
        row.prepare_s, row.post_s, row.move_s, row.hidden = times.prepare, times.post, times.move, times.hidden
        self._end(Ended(job.job, row, job.arrived, request, job.chunks))
