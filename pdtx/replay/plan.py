"""What is to be replayed, and how: read and checked once before anything begins."""

from collections.abc import Mapping
from dataclasses import dataclass

from pdtx.errors import InputError
from pdtx.replay.pace import CapturedPace, RatePace
from pdtx.replay.source import Scale, Source
from pdtx.replay.synthetic import SyntheticModel

CHUNK_TOKENS = 2048
MAX_NUM_SEQS = 4
"""Of a replay that is told nothing else, by the user or by a capture."""


@dataclass(frozen=True)
class ReplayPlan:
    """A replay. most: requests, None for all. pool: bytes of either node's cache.

    chunk_size: most tokens computed at a time; max_num_seqs: most prompts under way. timeout_s: of one request;
    deadline_s: of the whole, None for none.
    """

    source: Source
    scale: Scale
    model: SyntheticModel
    most: int | None
    pool: int
    chunk_size: int
    max_num_seqs: int
    timeout_s: float
    deadline_s: float | None

    @classmethod
    def of(
        cls,
        source: Source,
        scale: Scale,
        model: SyntheticModel,
        *,
        most: int | None,
        pool: int,
        chunk_size: int | None,
        max_num_seqs: int | None,
        timeout_s: float,
        deadline_s: float | None,
    ) -> "ReplayPlan":
        """Return a plan; what is None is as it was captured, or usual."""
        captured = source.header
        if captured is not None:
            chunk_size = chunk_size or max(1, captured.chunk_size // scale.by)
            max_num_seqs = max_num_seqs or captured.max_num_seqs
        return cls(
            source,
            scale,
            model,
            most,
            pool,
            chunk_size or CHUNK_TOKENS,
            max_num_seqs or MAX_NUM_SEQS,
            timeout_s,
            deadline_s,
        )

    def blocks(self, block_size: int) -> int:
        """Return the blocks of a node's pool, the null block among them. Raises InputError for room for none."""
        blocks = self.model.blocks_in(self.pool, block_size)
        if blocks < 2:
            raise InputError(f"--pool-size {self.pool} has no room for two blocks of {block_size} tokens; give more")
        return blocks

    def check(self, block_sizes: Mapping[str, int]) -> None:
        """Read all requests once. Raises InputError for a line that is none, or a request that fits into no pool.

        block_sizes: tokens in a block of each node that is made here, by its role.
        """
        lengths = [(self.scale.length(one), self.scale.output(one)) for one in self.source.requests(self.most)]
        if not lengths:
            raise InputError(f"{self.source.path} has no request with a prompt")
        for role, block_size in block_sizes.items():
            has = (self.blocks(block_size) - 1) * block_size
            # The prefill node keeps prompts, the decode node their answers as well.
            prompt, answer = max(lengths, key=lambda one: one[0] + one[1])
            if prompt + answer > has:
                raise InputError(
                    f"a request of {prompt:,} tokens and {answer:,} new ones does not fit into the {role} node's "
                    f"pool of {has:,} tokens; give a larger --pool-size or --scale-tokens, or fewer --layers"
                )

    def pace(self, rate: float) -> CapturedPace | RatePace:
        """Return how long prefill takes: as captured, or by a rate of tokens a second."""
        if self.source.header is None:
            return RatePace(rate)
        chunks = {f"r{at}": one.chunks for at, one in enumerate(self.source.requests(self.most))}
        return CapturedPace(chunks, RatePace(rate), self.scale.by)
