"""The prefill node: computes prompts and ships their K/V to a decode node, layer by layer."""

import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pdtx.errors import InputError
from pdtx.node.check import check_config
from pdtx.node.config import PrefillConfig
from pdtx.node.lifecycle import Node
from pdtx.node.metrics import open_metrics
from pdtx.node.model import OnNote, load_model, open_cache, open_security
from pdtx.node.prompts import Prompt, check_id, check_ids, named, token_list
from pdtx.node.tiers import NodeTiers, open_tiers
from pdtx.node.transport import open_mover, parse_mode, parse_require, read_costs, shares_memory

if TYPE_CHECKING:
    from pdtx.cache import KVCaches
    from pdtx.replay.synthetic import SyntheticModel
    from pdtx.report import RequestRow
    from pdtx.runner import ModelRunner
    from pdtx.serving import Computer, Ended, Job, PrefillScheduler

logger = logging.getLogger(__name__)


class PrefillNode(Node):
    """A prefill node: entering the context loads the model and connects, leaving it releases everything.

    on_note: called with a line about progress; by default it is logged. close() during run() makes the prompts that
    have not ended fail. Entering raises InputError for what cannot be used here, ModelError, PeerError,
    IncompatiblePeer, TransferError, or DeadlineExceeded; nothing stays open then.
    """

    def __init__(self, config: PrefillConfig, *, on_note: OnNote = logger.info) -> None:
        check_config("PrefillNode", config, PrefillConfig)
        super().__init__("prefill node", on_note)
        self.config = config
        self._num_prompts = 0

    def _interrupt(self) -> None:
        self.producer.stop()

    def _open(self, stack: ExitStack) -> None:
        config, transport = self.config, self.config.transport
        security = open_security(config.security)
        required, mode, costs = parse_require(transport.require), parse_mode(transport.mode), read_costs()
        # Before the model is loaded: a mover that cannot be had fails at once.
        mover = open_mover(transport)
        stack.callback(mover.close)
        metrics = open_metrics(config.metrics, stack, role="prefill", mover=transport.mover, on_note=self._note)
        self.model: ModelRunner | SyntheticModel = load_model(config.model, self._note)

        from pdtx.engine import KVProducer
        from pdtx.node.watching import PrefillWatch, open_recorder

        cache, description = open_cache(self.model, config.cache, shared=shares_memory(transport.mover))
        self.tiers: NodeTiers | None = open_tiers(
            config.tiers,
            cache,
            self.model,
            stack,
            block_size=config.cache.block_size,
            security=security,
            transport=transport,
            costs=costs,
            on_note=self._note,
        )
        self.producer: KVProducer = KVProducer(cache, description, mover, mode=mode, costs=costs)
        stack.callback(self.producer.close)
        recorder = open_recorder(config, self.producer, stack, self._note)
        self._watch: PrefillWatch = PrefillWatch(self.producer, self.tiers, metrics, recorder)
        self._computer = self._make_computer(cache)
        self.producer.connect(config.connect, security=security, timeout_s=config.connect_timeout, require=required)
        self._note(f"connected to {self.producer.peer} at {config.connect}; the payload goes over {self.producer.path}")

    def _make_computer(self, cache: "KVCaches") -> "Computer":
        from pdtx.runner import ModelRunner
        from pdtx.serving import ModelComputer

        if isinstance(self.model, ModelRunner):
            return ModelComputer(self.model)
        from pdtx.replay.pace import RatePace
        from pdtx.replay.synthetic import SyntheticComputer

        names = tuple(self.model.specs(self.config.cache.block_size))
        return SyntheticComputer(cache, names, RatePace(self.config.prefill_rate))

    def run(
        self, prompts: "Iterable[str | Prompt | Job]", *, on_end: "Callable[[Ended], None] | None" = None
    ) -> "list[RequestRow]":
        """Compute prompts and ship their K/V; return a row each, in their order; one that fails has its error there.

        prompts: texts, prompts, or jobs that are ready to run. on_end: called with each at its end.
        Raises InputError for a prompt that cannot be used, and for a node that is not started or runs already;
        ModelError for a text without tokens. Nothing is sent then.
        """
        if on_end is not None and not callable(on_end):
            raise InputError(f"on_end takes a function of what has ended, not {on_end!r}")
        with self._running():
            scheduler = self._scheduler(on_end)
            jobs = self._jobs(prompts)
            self._watch.begin()
            return scheduler.run(jobs)

    def _scheduler(self, on_end: "Callable[[Ended], None] | None") -> "PrefillScheduler":
        from pdtx.serving import PrefillScheduler

        config = self.config

        def end(ended: "Ended") -> None:
            self._watch.ended(ended)
            if on_end is not None:
                on_end(ended)

        return PrefillScheduler(
            self._computer,
            self.producer,
            max_tokens=config.max_tokens,
            chunk_size=config.chunk_size,
            max_num_seqs=config.max_num_seqs,
            timeout_s=config.deadline,
            ignore_eos=config.ignore_eos,
            prefix=self.tiers.prefix if self.tiers is not None else None,
            on_end=end,
            closing=self._closing.is_set,
        )

    def _jobs(self, prompts: "Iterable[str | Prompt | Job]") -> "list[Job]":
        """Return a job for each of prompts, of which everything is checked here: one that fails would end the run."""
        from pdtx.serving import Job

        if isinstance(prompts, str | Prompt | Job) or not isinstance(prompts, Iterable):
            raise InputError(f"run() takes a list of prompts, not {prompts!r}")
        texts = [Prompt(prompt=one) if isinstance(one, str) and one else one for one in prompts]
        for one in texts:
            if not isinstance(one, Prompt | Job):
                raise InputError(f"a prompt is a text that is not empty, a Prompt or a Job, not {one!r}")
        made = iter(named([one for one in texts if isinstance(one, Prompt)], self._num_prompts))
        jobs = [self._checked(one if isinstance(one, Job) else self._job(next(made))) for one in texts]
        check_ids(job.request_id for job in jobs)
        self._num_prompts += len(jobs)
        return jobs

    def _checked(self, job: "Job") -> "Job":
        check_id(job.request_id)
        return replace(job, token_ids=token_list(job.token_ids, f"prompt {job.request_id}"))

    def _job(self, prompt: Prompt) -> "Job":
        from pdtx.runner import ModelRunner
        from pdtx.serving import Job

        model = self.model
        if isinstance(model, ModelRunner):
            tokens = prompt.tokens(lambda text: model.encode(text, self.config.chat))
            return Job(str(prompt.id), tokens, prompt.load_features())
        if prompt.token_ids is None or prompt.features is not None:
            raise InputError(f"prompt {prompt.id} needs a model with weights; --synthetic takes token_ids only")
        return Job(str(prompt.id), prompt.token_ids)

    def document(self, rows: "Sequence[RequestRow]", command: Sequence[str] = ()) -> dict[str, Any]:
        """Return what `pdtx-prefill --json` prints of rows: the machine, the settings, the path, tiers and requests.

        command: the command line to put into it. Tiers' counters are reported to on_note as well, a line each.
        """
        import msgspec

        from pdtx.report import machine_facts

        config, registration = self.config, self.producer.registration
        return {
            "version": 1,
            "command": list(command),
            "machine": machine_facts(),
            "model": {
                "name": self.model.name,
                "fingerprint": self.model.fingerprint,
                "dtype": config.model.dtype,
            },
            "layout": config.cache.layout,
            "block_size": config.cache.block_size,
            "tensor_parallel_size": config.cache.tensor_parallel_size,
            "mover": {"name": config.transport.mover, "options": config.transport.mover_option or []},
            "path": msgspec.to_builtins(self.producer.path),
            "registered_bytes": registration.nbytes,
            "registration_s": registration.seconds,
            "tiers": self.tiers.report(self._note) if self.tiers is not None else [],
            "requests": msgspec.to_builtins(list(rows)),
        }
