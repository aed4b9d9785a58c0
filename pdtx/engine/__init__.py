"""A request's life on either side of a transfer: KVProducer in the prefill node, KVConsumer in the decode node."""

from pdtx.engine.consumer import KVConsumer
from pdtx.engine.coverage import check_compatible
from pdtx.engine.describe import BufferFacts, CacheFacts, describe_cache, facts_of
from pdtx.engine.inbound import Arrived, InboundRequest, PrefillEngine
from pdtx.engine.matching import Match, match_caches
from pdtx.engine.outbound import OutboundRequest
from pdtx.engine.outbound_session import DecodeEngine
from pdtx.engine.peer_tier import PeerTier
from pdtx.engine.producer import KVProducer
from pdtx.engine.registering import CacheRegistration, register_cache
from pdtx.engine.tier_server import TierServer
from pdtx.engine.timing import TransferTimes

__all__ = [
    "Arrived",
    "BufferFacts",
    "CacheFacts",
    "CacheRegistration",
    "DecodeEngine",
    "InboundRequest",
    "KVConsumer",
    "KVProducer",
    "Match",
    "OutboundRequest",
    "PeerTier",
    "PrefillEngine",
    "TierServer",
    "TransferTimes",
    "check_compatible",
    "describe_cache",
    "facts_of",
    "match_caches",
    "register_cache",
]
