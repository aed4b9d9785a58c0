"""The decode node: receives K/V into its own paged cache, verifies them, and generates from exactly that cache."""

import logging
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pdtx.address import parse_address
from pdtx.errors import ConfigError, InputError
from pdtx.layout import KVCacheLayout
from pdtx.node.check import check_config
from pdtx.node.config import DecodeConfig, two_axes
from pdtx.node.lifecycle import Node
from pdtx.node.metrics import open_metrics
from pdtx.node.model import OnNote, load_model, open_cache, open_security
from pdtx.node.stop import AnyOf, Flag, Stop
from pdtx.node.tiers import NodeTiers, open_tiers
from pdtx.node.transport import open_mover, read_costs, shares_memory

if TYPE_CHECKING:
    from pdtx.cache import KVCaches
    from pdtx.engine import CacheRegistration
    from pdtx.node.loop import DecodeLoop
    from pdtx.replay.synthetic import SyntheticModel
    from pdtx.runner import ModelRunner

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Served:
    """Since a node's start: requests that have ended, those of them that failed, and its tiers' counters."""

    requests: int
    failed: int
    tiers: list[dict[str, Any]] = field(default_factory=list)


class DecodeNode(Node):
    """A decode node: entering the context loads the model and listens, leaving it releases everything.

    on_note: called with a line about progress; by default it is logged. run() serves; stop() ends it, from any thread
    and in a signal's handler. Entering raises InputError for what cannot be used here, ModelError, AddressInUse or
    TransferError; nothing stays open then.
    """

    def __init__(self, config: DecodeConfig, *, on_note: OnNote = logger.info) -> None:
        check_config("DecodeNode", config, DecodeConfig)
        super().__init__("decode node", on_note)
        self.config = config
        self._stopped = Flag()
        self._counted = 0
        self.address = ""

    def stop(self) -> None:
        """Let run() end, from any thread; the next one does at once, too."""
        self._stopped.set()

    def _interrupt(self) -> None:
        self.stop()

    def _open(self, stack: ExitStack) -> None:
        from pdtx.sidechannel import require_protection

        config, transport = self.config, self.config.transport
        self._stopped.clear()
        self._counted = 0
        security = open_security(config.security)
        host, _ = parse_address(config.listen)
        require_protection(host, security)
        # Before the model is loaded: a mover that cannot be had fails at once.
        mover = open_mover(transport, advertise=config.advertise)
        stack.callback(mover.close)
        metrics = open_metrics(config.metrics, stack, role="decode", mover=transport.mover, on_note=self._note)
        self.model: ModelRunner | SyntheticModel = load_model(config.model, self._note)

        from pdtx.engine import KVConsumer
        from pdtx.node.watching import DecodeWatch

        cache, description = open_cache(self.model, config.cache, shared=shares_memory(transport.mover))
        plan_layout = _wrong_layout(cache, config.inject_fault) if config.inject_fault is not None else None
        self.tiers: NodeTiers | None = open_tiers(
            config.tiers,
            cache,
            self.model,
            stack,
            block_size=config.cache.block_size,
            security=security,
            transport=transport,
            costs=read_costs(),
            on_note=self._note,
        )
        prefix = self.tiers.prefix if self.tiers is not None else None
        self.consumer: KVConsumer = KVConsumer(
            cache, description, mover, verify=config.verify, plan_layout=plan_layout, prefix=prefix
        )
        stack.callback(self.consumer.close)
        self.address = self.consumer.listen(config.listen, data_port=config.data_port, security=security)
        self._watch: DecodeWatch = DecodeWatch(self.consumer, self.tiers, metrics)
        self._note(f"{self.consumer.engine_id} listening on {self.address}")

    @property
    def registration(self) -> "CacheRegistration":
        """The cache's registration with the mover: bytes and seconds."""
        return self.consumer.registration

    @property
    def tier_address(self) -> str | None:
        """Where other nodes read this one's tier; None where they may not."""
        return self.tiers.served_at if self.tiers is not None else None

    def run(self, *, stop: Stop | None = None, limit: int | None = None) -> Served:
        """Serve until stop is set, stop() or close() is called, or limit requests have ended since the last run.

        limit: 0 or more; by default the config's requests. Failures of single requests are reported to their producers.
        Raises InputError for a node that is not started or runs already.
        """
        _check_run(stop, limit)
        with self._running():
            most = limit if limit is not None else self.config.requests
            until = self._counted + most if most is not None else None
            self._loop(AnyOf(self._stopped, *([stop] if stop is not None else [])), until).run()
            consumer = self.consumer
            self._counted = consumer.num_ended
            usages = self.tiers.report(self._note) if self.tiers is not None else []
            self._note(
                f"{consumer.engine_id} served {consumer.num_ended} requests, {consumer.num_failed} of them failed"
            )
            return Served(consumer.num_ended, consumer.num_failed, usages)

    def _loop(self, stop: Stop, limit: int | None) -> "DecodeLoop":
        """Return what decodes: with a model, or without weights."""
        from pdtx.runner import ModelRunner

        if isinstance(self.model, ModelRunner):
            from pdtx.node.loop import ModelLoop

            return ModelLoop(self.model, self.consumer, stop, limit, self._watch.finished)
        from pdtx.node.synthetic import SyntheticLoop

        return SyntheticLoop(self.consumer, stop, limit, self._watch.finished, self.config.decode_rate)


def _check_run(stop: object, limit: object) -> None:
    """Raise InputError for what run() cannot use."""
    if stop is not None and not isinstance(stop, Stop):
        raise InputError(f"stop takes what has is_set(), such as a threading.Event, not {stop!r}")
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 0):
        raise InputError(f"limit is {limit!r}; give a whole number of requests, 0 or more, or None")


def _wrong_layout(cache: "KVCaches", fault: str) -> KVCacheLayout:
    """Return the first buffer's layout with two axes swapped. Raises InputError where it does not hold keys and values.

    fault: the axes, with a comma.
    """
    layout = cache.buffers[0].layout
    if not isinstance(layout, KVCacheLayout):
        raise ConfigError(
            "inject_fault",
            f"--inject-fault swaps axes of keys and values; this model's first buffer is {layout.name}",
        )
    return layout.with_swapped(*two_axes(fault))
