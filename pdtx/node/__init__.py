"""Nodes from Python: configs, and the prefill and decode node that are started with them (docs/nodes.md).

Importing this imports neither torch nor typer; a node imports what it needs as it starts.
"""

from pdtx.node.config import (
    CacheConfig,
    CaptureConfig,
    DecodeConfig,
    MetricsConfig,
    ModelConfig,
    PrefillConfig,
    SecurityConfig,
    SendConfig,
    TierConfig,
    TransportConfig,
)
from pdtx.node.decode import DecodeNode, Served
from pdtx.node.prefill import PrefillNode
from pdtx.node.prompts import Prompt, read_prompts

__all__ = [
    "CacheConfig",
    "CaptureConfig",
    "DecodeConfig",
    "DecodeNode",
    "MetricsConfig",
    "ModelConfig",
    "PrefillConfig",
    "PrefillNode",
    "Prompt",
    "SecurityConfig",
    "SendConfig",
    "Served",
    "TierConfig",
    "TransportConfig",
    "read_prompts",
]
