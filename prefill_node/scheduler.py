"""Chunked prefill of several requests at once, each layer's slices shipped while later layers compute."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from pdtx.engine import KVProducer, OutboundRequest
from pdtx.errors import ModelError, OutOfBlocks, PdtxError, VerificationError
from pdtx.report import RequestRow
from pdtx.runner import ModelRunner, PagedSequence, greedy
from pdtx.units import gb_per_s


@dataclass(frozen=True)
class Job:
    """A prompt to run: its tokens, and the features of a model with an encoder (mel, frames)."""

    request_id: str
    token_ids: Sequence[int]
    features: torch.Tensor | None = None


@dataclass
class _Active:
    request: OutboundRequest
    sequence: PagedSequence
    features: torch.Tensor | None


class PrefillScheduler:
    """Runs jobs through one model and one producer.

    chunk_size: most tokens computed at a time; requests take turns after each chunk.
    max_num_seqs: most requests whose prefill is under way at once.
    """

    def __init__(
        self,
        runner: ModelRunner,
        producer: KVProducer,
        *,
        max_tokens: int,
        chunk_size: int,
        max_num_seqs: int,
        timeout_s: float,
        ignore_eos: bool,
    ) -> None:
        self.runner, self.producer = runner, producer
        self.max_tokens, self.chunk_size, self.max_num_seqs = max_tokens, chunk_size, max_num_seqs
        self.timeout_s, self.ignore_eos = timeout_s, ignore_eos

    def run(self, jobs: Sequence[Job]) -> list[RequestRow]:
        """Run all jobs; return one row each, in their order. A job that fails has its error in its row."""
        rows = {job.request_id: RequestRow(request_id=job.request_id, prompt_tokens=len(job.token_ids)) for job in jobs}
        waiting, active, shipped = deque(jobs), deque[_Active](), list[OutboundRequest]()
        while waiting or active:
            while waiting and len(active) < self.max_num_seqs:
                try:
                    begun = self._begin(waiting[0], patient=not active)
                except PdtxError as error:
                    rows[waiting[0].request_id].error = str(error)
                    waiting.popleft()
                    continue
                if begun is None:
                    break
                waiting.popleft()
                active.append(begun)
            if active:
                self._step(active, shipped)
        for request in shipped:
            self._collect(request, rows[request.request_id])
        return [rows[job.request_id] for job in jobs]

    def _begin(self, job: Job, *, patient: bool) -> _Active | None:
        """Start a job; None if it must wait for blocks. Raises what makes it impossible."""
        longest = len(job.token_ids) + self.max_tokens
        if longest > self.runner.max_model_len:
            raise ModelError(
                f"{len(job.token_ids)} prompt tokens and {self.max_tokens} new ones exceed the model's "
                f"{self.runner.max_model_len}"
            )
        needed = self.producer.blocks_needed(len(job.token_ids))
        self.producer.allocator.check_possible(needed)
        if not self.producer.allocator.fits(needed) and not (
            patient and self.producer.wait_for_blocks(needed, self.timeout_s)
        ):
            if patient:
                raise OutOfBlocks(f"{sum(needed)} blocks did not become free within {self.timeout_s:g} s")
            return None
        request = self.producer.begin(
            job.request_id,
            job.token_ids,
            max_tokens=self.max_tokens,
            timeout_s=self.timeout_s,
            ignore_eos=self.ignore_eos,
        )
        return _Active(request, PagedSequence(self.producer.cache, request.tables), job.features)

    def _step(self, active: deque[_Active], shipped: list[OutboundRequest]) -> None:
        """Compute one chunk of the request whose turn it is."""
        job = active.popleft()
        request, sequence = job.request, job.sequence
        start = sequence.num_tokens
        size = self.runner.chunk(len(request.token_ids) - start, self.chunk_size)
        chunk = request.token_ids[start : start + size]
        try:
            if request.error is None:
                logits = self.runner.forward(
                    sequence,
                    chunk,
                    on_layer=partial(self.producer.layer_ready, request),
                    features=None if start else job.features,
                )
        except PdtxError as error:
            self.producer.fail(request, error)
        if request.error is not None:
            shipped.append(request)
        elif sequence.num_tokens < len(request.token_ids):
            active.append(job)
        else:
            self.producer.computed(request, greedy(logits))
            shipped.append(request)

    def _collect(self, request: OutboundRequest, row: RequestRow) -> None:
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
        row.gb_per_s = gb_per_s(row.nbytes, times.move)
        row.prepare_s, row.post_s, row.move_s, row.hidden = times.prepare, times.post, times.move, times.hidden
