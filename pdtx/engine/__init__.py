"""A request's life on either side of a transfer: KVProducer in the prefill node, KVConsumer in the decode node."""

from pdtx.engine.consumer import KVConsumer
from pdtx.engine.describe import check_compatible, describe_cache, layout_of
from pdtx.engine.inbound import InboundRequest
from pdtx.engine.producer import KVProducer, OutboundRequest
from pdtx.engine.timing import TransferTimes, union_seconds

__all__ = [
    "InboundRequest",
    "KVConsumer",
    "KVProducer",
    "OutboundRequest",
    "TransferTimes",
    "check_compatible",
    "describe_cache",
    "layout_of",
    "union_seconds",
]
