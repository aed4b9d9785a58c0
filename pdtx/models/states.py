"""The shapes of recurrent layers' states on one tensor-parallel rank, as vLLM's MambaStateShapeCalculator has them."""

from pdtx.kvspec import MambaSpec
from pdtx.models.options import CacheOptions

Shapes = tuple[tuple[int, ...], ...]


def state_spec(options: CacheOptions, shapes: Shapes, dtypes: tuple[str, ...]) -> MambaSpec:
    """Return the spec of a layer with one state of each shape; its page is not padded yet."""
    return MambaSpec(block_size=options.state_block_size, shapes=shapes, dtypes=dtypes)


def mamba1_shapes(options: CacheOptions, *, inner: int, state: int, kernel: int) -> Shapes:
    """Mamba: the last kernel - 1 inputs of the convolution, and `state` numbers a channel."""
    channels = options.share("the Mamba channels", inner)
    return (kernel - 1, channels), (channels, state)


def mamba2_shapes(options: CacheOptions, *, heads: int, head_dim: int, groups: int, state: int, kernel: int) -> Shapes:
    """Mamba 2: the convolution also has B and C of every group; groups that cannot be divided are copied to ranks."""
    ranks = options.tensor_parallel_size
    groups = groups if groups % ranks == 0 else ranks
    channels = heads * head_dim + 2 * groups * state
    conv = (kernel - 1, options.share("the Mamba convolution's channels", channels))
    return conv, (options.share("the number of Mamba heads", heads), head_dim, state)


def gated_delta_shapes(
    options: CacheOptions, *, key_heads: int, value_heads: int, key_dim: int, value_dim: int, kernel: int
) -> Shapes:
    """Gated delta net: one convolution over queries, keys and values, and a matrix a value head."""
    channels = 2 * key_heads * key_dim + value_heads * value_dim
    conv = (kernel - 1, options.share("the convolution's channels", channels))
    return conv, (options.share("linear_num_value_heads", value_heads), value_dim, key_dim)


def kimi_delta_shapes(options: CacheOptions, *, heads: int, head_dim: int, kernel: int) -> Shapes:
    """Kimi delta attention: convolutions over queries, keys and values, and a matrix a head."""
    own = options.share("linear_attn_config.num_heads", heads)
    conv = (kernel - 1, own * head_dim)
    return conv, conv, conv, (own, head_dim, head_dim)
