"""pdtx: move, verify and measure KV caches between prefill and decode nodes."""

__version__ = "0.1.0"
