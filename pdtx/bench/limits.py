"""Bounds of what is measured, for who asks and for who is asked: beyond them a number is a mistake."""

from pdtx.protocol import MAX_RANKS

MOST_TOKENS = 1 << 26
MOST_REQUESTS = 1 << 20
MOST_RANKS = MAX_RANKS
MOST_BLOCK_SIZE = 1 << 20
MOST_STREAMS = 1024
