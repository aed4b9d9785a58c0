"""Which specs hold plain elements, nothing beside them."""

from pdtx.errors import LayoutError
from pdtx.kvspec import FullAttentionSpec, KVQuantMode

_WITHOUT_SCALES = (KVQuantMode.NONE, KVQuantMode.FP8_PER_TENSOR)


def check_plain(name: str, spec: FullAttentionSpec) -> None:
    """Raise LayoutError unless a spec is full attention with elements of its dtype and nothing else."""
    if type(spec) is not FullAttentionSpec or spec.kv_quant_mode not in _WITHOUT_SCALES:
        raise LayoutError(
            f"{name} holds plain full attention, not {type(spec).__name__} with {spec.kv_quant_mode.value}"
        )
