"""pdtx: move, verify and measure KV caches between prefill and decode nodes.

What is public, with an example of each name, is in docs/python.md. Names are imported when they are first used, so that
`import pdtx` takes milliseconds and needs no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from pdtx import bench
    from pdtx.api.caches import cache_of, layout
    from pdtx.api.moving import Receiving, Sent, Ticket, receive, send
    from pdtx.api.planning import Plan, RankPlan, plan
    from pdtx.api.specs import ModelSpec, spec_of
    from pdtx.cache import BufferShape, CacheGroup, CallerBlocks, ForeignBuffer, Memory
    from pdtx.cache import KVCaches as Cache
    from pdtx.check import Stray, TransferReport, WrongRun, check_transfer
    from pdtx.engine import Arrived, KVConsumer, KVProducer, describe_cache
    from pdtx.errors import (
        CacheError,
        DeadlineExceeded,
        InputError,
        LayoutError,
        LeaseExpired,
        ModelError,
        ParallelError,
        PdtxError,
        PeerError,
        PlanError,
        ProtocolError,
        SpecError,
        TierError,
        TransferError,
        VerificationError,
    )
    from pdtx.sidechannel import Security
    from pdtx.transports.registry import make_mover as transport
    from pdtx.transports.registry import mover_names as transport_names

_PLACES = {
    "pdtx.api.caches": ("cache_of",),
    "pdtx.api.moving": ("Receiving", "Sent", "Ticket", "receive", "send"),
    "pdtx.api.planning": ("Plan", "RankPlan"),
    "pdtx.api.specs": ("ModelSpec", "spec_of"),
    "pdtx.cache": ("BufferShape", "CacheGroup", "CallerBlocks", "ForeignBuffer", "Memory"),
    "pdtx.check": ("Stray", "TransferReport", "WrongRun", "check_transfer"),
    "pdtx.engine": ("Arrived", "KVConsumer", "KVProducer", "describe_cache"),
    "pdtx.sidechannel": ("Security",),
    "pdtx.errors": (
        "CacheError",
        "DeadlineExceeded",
        "InputError",
        "LayoutError",
        "LeaseExpired",
        "ModelError",
        "ParallelError",
        "PdtxError",
        "PeerError",
        "PlanError",
        "ProtocolError",
        "SpecError",
        "TierError",
        "TransferError",
        "VerificationError",
    ),
}
_RENAMED = {
    "Cache": ("pdtx.cache", "KVCaches"),
    "transport": ("pdtx.transports.registry", "make_mover"),
    "transport_names": ("pdtx.transports.registry", "mover_names"),
}
# Packages that are public by themselves: plan and layout are functions, too, see pdtx.callable_package.
_PACKAGES = ("bench", "layout", "plan")
_NAMES = {name: (module, name) for module, names in _PLACES.items() for name in names} | _RENAMED

__all__ = [
    "Arrived",
    "BufferShape",
    "Cache",
    "CacheError",
    "CacheGroup",
    "CallerBlocks",
    "DeadlineExceeded",
    "ForeignBuffer",
    "InputError",
    "KVConsumer",
    "KVProducer",
    "LayoutError",
    "LeaseExpired",
    "Memory",
    "ModelError",
    "ModelSpec",
    "ParallelError",
    "PdtxError",
    "PeerError",
    "Plan",
    "PlanError",
    "ProtocolError",
    "RankPlan",
    "Receiving",
    "Security",
    "Sent",
    "SpecError",
    "Stray",
    "Ticket",
    "TierError",
    "TransferError",
    "TransferReport",
    "VerificationError",
    "WrongRun",
    "__version__",
    "bench",
    "cache_of",
    "check_transfer",
    "describe_cache",
    "layout",
    "plan",
    "receive",
    "send",
    "spec_of",
    "transport",
    "transport_names",
]


if not TYPE_CHECKING:  # type checkers know the names above, and no others

    def __getattr__(name: str) -> object:
        if name in _PACKAGES:
            return import_module(f"pdtx.{name}")
        if name not in _NAMES:
            raise AttributeError(f"module 'pdtx' has no attribute {name!r}; its public names are in docs/python.md")
        module, attribute = _NAMES[name]
        found: object = getattr(import_module(module), attribute)
        globals()[name] = found
        return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
