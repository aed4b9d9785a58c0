"""Names of blocks by content: chained digests of tokens, the same in every process and every run."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class PrefixKeys:
    """Names of the whole blocks of a prompt: block i is tokens i * block_tokens .. (i + 1) * block_tokens.

    digests: of the fingerprint and all tokens up to the block's end. proofs: what a digest must agree with before it is
    believed: the block's own tokens, and another digest of those before.
    """

    block_tokens: int
    digests: tuple[bytes, ...]
    proofs: tuple[bytes, ...]

    def __len__(self) -> int:
        return len(self.digests)


Hash = Callable[[bytes], bytes]


def prefix_keys(token_ids: Sequence[int], block_tokens: int, fingerprint: bytes) -> PrefixKeys:
    """Return the names of a prompt's whole blocks. Raises TierError for block_tokens < 1."""
    raise NotImplementedError
