"""The states of recurrent layers: their shapes on one tensor-parallel rank, and how ranks share them.

Shapes are those of vLLM's MambaStateShapeCalculator.
"""

from dataclasses import dataclass
from typing import Protocol

from pdtx.kvspec import MambaSpec, Segment, StateSharding
from pdtx.models.options import CacheOptions

Shapes = tuple[tuple[int, ...], ...]


class States(Protocol):
    """What a kind of recurrent layer keeps."""

    def shapes(self, options: CacheOptions) -> Shapes:
        """Return the shape of each state on one of options.tensor_parallel_size ranks."""

    @property
    def sharding(self) -> StateSharding:
        """What of each state goes to which rank."""


def state_spec(options: CacheOptions, states: States, dtypes: tuple[str, ...]) -> MambaSpec:
    """Return the spec of a layer with one state of each shape; its page is not padded yet."""
    return MambaSpec(block_size=options.state_block_size, shapes=states.shapes(options), dtypes=dtypes)


@dataclass(frozen=True, kw_only=True)
class Mamba1:
    """Mamba: the last kernel - 1 inputs of the convolution, and `state` numbers a channel."""

    inner: int
    state: int
    kernel: int

    def shapes(self, options: CacheOptions) -> Shapes:
        """See States."""
        channels = options.share("the Mamba channels", self.inner)
        return (self.kernel - 1, channels), (channels, self.state)

    @property
    def sharding(self) -> StateSharding:
        """Channels alone."""
        return StateSharding(conv=((_segment("x", self.inner, 1),),), heads=self.inner)


@dataclass(frozen=True, kw_only=True)
class Mamba2:
    """Mamba 2: the convolution also has B and C of every group; groups that cannot be divided are copied to ranks."""

    heads: int
    head_dim: int
    groups: int
    state: int
    kernel: int

    def shapes(self, options: CacheOptions) -> Shapes:
        """See States."""
        ranks = options.tensor_parallel_size
        groups = self.groups if self.groups % ranks == 0 else ranks
        channels = self.heads * self.head_dim + 2 * groups * self.state
        conv = (self.kernel - 1, options.share("the Mamba convolution's channels", channels))
        return conv, (options.share("the number of Mamba heads", self.heads), self.head_dim, self.state)

    @property
    def sharding(self) -> StateSharding:
        """[x | B | C]."""
        x = _segment("x", self.heads, self.head_dim)
        b, c = (_segment(name, self.groups, self.state) for name in ("B", "C"))
        return StateSharding(conv=((x, b, c),), heads=self.heads)


@dataclass(frozen=True, kw_only=True)
class GatedDelta:
    """Gated delta net: one convolution over queries, keys and values, and a matrix a value head."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int

    def shapes(self, options: CacheOptions) -> Shapes:
        """See States."""
        channels = 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim
        conv = (self.kernel - 1, options.share("the convolution's channels", channels))
        return conv, (options.share("linear_num_value_heads", self.value_heads), self.value_dim, self.key_dim)

    @property
    def sharding(self) -> StateSharding:
        """[q | k | v]."""
        q, k = (_segment(name, self.key_heads, self.key_dim) for name in ("q", "k"))
        return StateSharding(conv=((q, k, _segment("v", self.value_heads, self.value_dim)),), heads=self.value_heads)


@dataclass(frozen=True, kw_only=True)
class KimiDelta:
    """Kimi delta attention: convolutions over queries, keys and values, and a matrix a head."""

    heads: int
    head_dim: int
    kernel: int

    def shapes(self, options: CacheOptions) -> Shapes:
        """See States."""
        own = options.share("linear_attn_config.num_heads", self.heads)
        conv = (self.kernel - 1, own * self.head_dim)
        return conv, conv, conv, (own, self.head_dim, self.head_dim)

    @property
    def sharding(self) -> StateSharding:
        """Three convolutions of their own."""
        conv = tuple((_segment(name, self.heads, self.head_dim),) for name in ("q", "k", "v"))
        return StateSharding(conv=conv, heads=self.heads)


@dataclass(frozen=True, kw_only=True)
class ShortConv:
    """A convolution without a recurrence: its last kernel - 1 inputs."""

    inner: int
    kernel: int

    def shapes(self, options: CacheOptions) -> Shapes:
        """See States."""
        return ((self.kernel - 1, options.share("the convolution's channels", self.inner)),)

    @property
    def sharding(self) -> StateSharding:
        """Channels alone."""
        return StateSharding(conv=((_segment("x", self.inner, 1),),), heads=0)


def _segment(name: str, units: int, width: int) -> Segment:
    return Segment(name=name, channels=units * width, units=units)
