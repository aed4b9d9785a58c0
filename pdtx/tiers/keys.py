"""Names of blocks by content: chained digests of tokens, the same in every process and every run."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from enum import Enum

import numpy as np
import numpy.typing as npt
import xxhash
from blake3 import blake3

from pdtx.cache import KVCaches
from pdtx.errors import TierError
from pdtx.kvspec import KVCacheSpec

Hash = Callable[[bytes], bytes]

_TOKEN = np.dtype("<u4")
_NOT_CONTENT = ("block_size", "page_size_padded")
"""Fields of a spec that say how its bytes are cut and set apart, and not what they are."""


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


def strong_digest(data: bytes) -> bytes:
    """Return the 32 bytes of BLAKE3, which nobody can make to be equal for other data."""
    return blake3(data).digest()


def prefix_keys(
    token_ids: Sequence[int] | npt.NDArray[np.integer],
    block_tokens: int,
    fingerprint: bytes,
    digest: Hash = strong_digest,
) -> PrefixKeys:
    """Return the names of a prompt's whole blocks.

    digest_i = digest(digest_{i-1}, tokens of block i as little-endian uint32), and digest_{-1} is that of the
    fingerprint and block_tokens. The proofs are chained by XXH3, apart from the digests: equal digests of other tokens
    show, whatever digest() is. Raises TierError for block_tokens < 1 or a token id that is no uint32.
    """
    if block_tokens < 1:
        raise TierError(f"blocks of {block_tokens} tokens cannot be named; use 1 or more")
    count = len(token_ids) // block_tokens
    tokens = _as_words(token_ids, count * block_tokens)
    start = fingerprint + block_tokens.to_bytes(8, "little")
    name, before = digest(start), xxhash.xxh3_128_digest(start)
    digests, proofs, nbytes = list[bytes](), list[bytes](), block_tokens * _TOKEN.itemsize
    for first in range(0, len(tokens), nbytes):
        block = tokens[first : first + nbytes]
        name = digest(name + block)
        digests.append(name)
        proofs.append(block + before)
        before = xxhash.xxh3_128_digest(before + block)
    return PrefixKeys(block_tokens, tuple(digests), tuple(proofs))


def _as_words(token_ids: Sequence[int] | npt.NDArray[np.integer], count: int) -> bytes:
    """Return the first count ids as bytes."""
    try:
        ids = np.asarray(token_ids)[:count]
        wide = ids.astype(np.int64, casting="same_kind") if count else np.empty(0, np.int64)
    except (TypeError, ValueError, OverflowError):
        raise TierError("token ids must be whole numbers, each at least 0 and less than 2**32") from None
    # What a signed word cannot hold turns negative, and is found with what is negative.
    wrong = (wide < 0) | (wide >= 1 << 32)
    if wrong.any():
        at = int(wrong.argmax())
        raise TierError(f"token {at} has the id {ids[at]}; it must be at least 0 and less than 2**32")
    return wide.astype(_TOKEN).tobytes()


def fingerprint_of(cache: KVCaches, *, model: str) -> bytes:
    """Return 32 bytes that differ wherever one token's keys and values would: of the model, and what each layer keeps.

    model: the fingerprint of its weights and configuration. Layouts, ranks and block sizes do not count: plans carry
    blocks from any to any, and prefix_keys takes the size of the tier's blocks in.
    """
    lines = [f"model {model}"]
    lines += [f"group {group.name} {group.kind} {group.encoder_positions}" for group in cache.groups]
    for buffer in cache.buffers:
        group = cache.groups[buffer.group].name
        lines.append(f"buffer {buffer.name} of {group}: {_content(buffer.spec)}; {', '.join(buffer.layer_names)}")
    return blake3("\n".join(lines).encode()).digest()


def _content(spec: KVCacheSpec) -> str:
    named = ((field.name, getattr(spec, field.name)) for field in fields(spec) if field.name not in _NOT_CONTENT)
    values = (f"{name}={value.name if isinstance(value, Enum) else repr(value)}" for name, value in named)
    return f"{type(spec).__name__}({', '.join(values)})"
