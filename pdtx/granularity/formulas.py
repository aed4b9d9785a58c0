"""What a piece is and what its bytes come to, as text, read off the axes inside it."""

from pdtx.granularity.backends import backend_layout
from pdtx.granularity.request import RequestKind
from pdtx.granularity.runs import BlockRuns
from pdtx.layout import RecordLayout, StridedLayout


def layers_text(kind: RequestKind, layers: int) -> str:
    """Return the layers of a group: "L layers" where that is all of them, else their number."""
    return "L layers" if layers == kind.layers else f"{layers} layers"


def unit_text(kind: RequestKind, layout: StridedLayout, runs: BlockRuns, *, joins: bool) -> str:
    """Return what a run of a block is: block x layer x K|V, for example."""
    apart = {axis.name for axis in layout.axes} - runs.spans
    return " x ".join(
        [
            "r blocks" if joins else "block",
            "layer" if "layer" in apart else layers_text(kind, layout.extent("layer")),
            *(["K|V"] if "kv" in apart else []),
            *(["head"] if "head" in apart else []),
        ]
    )


def run_formula(kind: RequestKind, layout: StridedLayout, runs: BlockRuns, *, joins: bool, split: bool) -> str:
    """Return the bytes of a run in the letters of symbols; r blocks joined, H/t heads where ranks share them."""
    terms = {
        "r": joins,
        "2": "kv" in runs.spans,
        "L": "layer" in runs.spans,
        "bs": kind.spec.storage_block_size == kind.spec.block_size,
        "bs/c": kind.spec.storage_block_size != kind.spec.block_size,
        "H": "head" in runs.spans and not kind.is_latent and not split,
        "H/t": "head" in runs.spans and not kind.is_latent and split,
        "D*s": not isinstance(layout, RecordLayout),
        "R": isinstance(layout, RecordLayout),
    }
    return "*".join(term for term, present in terms.items() if present)


def gathered_formula(kind: RequestKind, per: str, chunk: int, *, all_layers: bool, by_token: bool) -> str:
    """Return the bytes of what is gathered: n blocks, T tokens, a block, or a chunk."""
    if kind.is_state:
        return "state"
    layout = _whole_pages(kind)
    records, both = isinstance(layout, RecordLayout), "kv" in layout.by_name
    compressed = kind.spec.storage_block_size != kind.spec.block_size
    tokens = per == "chunk" or by_token
    terms = {
        "n": per == "request" and not by_token,
        "T": per == "request" and by_token,
        str(chunk): per == "chunk",
        "2": both,
        "L": all_layers,
        "bs": not tokens and not compressed,
        "bs/c": not tokens and compressed,
        "1/c": tokens and compressed,
        "H": not kind.is_latent,
        "D*s": not records,
        "R": records,
    }
    return "*".join(term for term, present in terms.items() if present)


def symbols(kind: RequestKind) -> dict[str, int]:
    """Return what the letters stand for; R are the bytes of a record: one vector, or one head with its scale.

    bs tokens of a block, H heads of a rank, D channels of a head, s bytes of an element, c tokens of a stored vector,
    n blocks and T positions of the request. L is the number of layers of a group, of which a kind may have several.
    """
    if kind.is_state:
        return {}
    layout, spec = _whole_pages(kind), kind.spec
    found = {"bs": spec.block_size}
    if spec.storage_block_size != spec.block_size:
        found["c"] = spec.block_size // spec.storage_block_size
    if not kind.is_latent:
        found["H"] = layout.extent("head")
    if isinstance(layout, RecordLayout):
        found["R"] = layout.extent("byte")
    else:
        found |= {"D": layout.extent("channel"), "s": layout.itemsize}
    return found | {"n": kind.blocks, "T": len(kind.positions)}


def _whole_pages(kind: RequestKind) -> StridedLayout:
    """A layout in which a page is one run, whatever the backend."""
    return backend_layout("flashinfer_nhd", kind.spec, 1)
