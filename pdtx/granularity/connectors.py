"""vLLM's KV connectors: names, movers, and the rule by which each cuts a cache. No number is kept here."""

from dataclasses import dataclass

VLLM_VERSIONS = ("0.22", "0.32")
ATTENTION, LATENT, STATE = "attention", "latent", "state"
BACKEND = "FA"
"""The variant that stands for a backend of attention; other kinds of layers have one layout, whatever backend."""
_ALL = frozenset({ATTENTION, LATENT, STATE})
_TOKENS = frozenset({ATTENTION, LATENT})
_KV = frozenset({ATTENTION})


@dataclass(frozen=True, kw_only=True)
class Runs:
    """Pieces are the runs of a layout.

    backend: see pdtx.granularity.backends. cut: axes at which the connector cuts, though the bytes go on.
    joins: whether it joins runs of adjacent blocks. splits_heads: pieces for ranks of another tensor-parallel size.
    one_group: whether vLLM has this layout only where all layers lie in one group.
    objects: whether the pieces of a block are the segments of one stored object.
    state_parts: whether it moves the parts of a state one by one.
    """

    backend: str
    cut: tuple[str, ...] = ()
    joins: bool = False
    splits_heads: bool = False
    one_group: bool = False
    objects: bool = False
    state_parts: bool = False


@dataclass(frozen=True, kw_only=True)
class Gather:
    """Pieces are copied together first; see pdtx.granularity.pieces.gathered_pieces. counted: whether vLLM's side
    decides how many there are."""

    per: str
    chunk: int = 0
    all_layers: bool = False
    by_token: bool = False
    counted: bool = True


@dataclass(frozen=True, kw_only=True)
class Nothing:
    """The connector itself moves no KV. units: 0, or None where the question has no answer."""

    why: str
    units: int | None = None


@dataclass(frozen=True, kw_only=True)
class Connector:
    """One row of the table: a connector in one version, on one kind of layout.

    variant: the layout, said of attention only. holds: kinds of layers that the row is about.
    note: a restriction.
    """

    name: str
    version: str
    mover: str
    rule: Runs | Gather | Nothing
    variant: str = ""
    holds: frozenset[str] = _ALL
    note: str = ""


def _nixl() -> list[Connector]:
    old, new = "NixlConnector", "NixlConnector, Pull, Push"
    read, both = "NIXL READ", "NIXL READ/WRITE"
    fa, fi = "flash_attn_hnd_cross_layer", "flashinfer_hnd_cross_layer"
    return [
        Connector(
            name=old, version="0.22", mover=read, rule=Runs(backend="default_hnd", cut=("kv",), state_parts=True)
        ),
        Connector(
            name=old,
            variant="FA cross-layer",
            version="0.22",
            mover=read,
            rule=Runs(backend=fa, one_group=True),
            holds=_KV,
        ),
        Connector(
            name=old,
            variant="FI cross-layer",
            version="0.22",
            mover=read,
            rule=Runs(backend=fi, cut=("kv",), one_group=True),
            holds=_KV,
        ),
        Connector(name=new, version="0.32", mover=both, rule=Runs(backend="lbhnc", state_parts=True)),
        Connector(name=new, variant="row", version="0.32", mover=both, rule=Runs(backend="blnhc"), holds=_TOKENS),
        Connector(name=new, variant="LHBNC", version="0.32", mover=both, rule=Runs(backend="lhbnc"), holds=_KV),
    ]


def _mooncake() -> list[Connector]:
    name, mover = "MooncakeConnector", "RDMA write"
    fa, fi = "flash_attn_hnd", "flashinfer_hnd"
    return [
        Connector(name=name, variant="FA", version="0.22", mover=mover, rule=Runs(backend=fa, joins=True)),
        Connector(
            name=name,
            variant="FI",
            version="0.22",
            mover=mover,
            rule=Runs(backend=fi, cut=("kv",), joins=True),
            holds=_KV,
        ),
        Connector(
            name=name,
            variant="head-split",
            version="0.22",
            mover=mover,
            rule=Runs(backend="default_hnd", splits_heads=True),
            holds=_KV,
        ),
        Connector(name=name, version="0.32", mover=mover, rule=Runs(backend="lbhnc", joins=True)),
        Connector(
            name=name,
            variant="row",
            version="0.32",
            mover=mover,
            rule=Runs(backend="blnhc", joins=True),
            holds=_TOKENS,
        ),
        Connector(
            name=name,
            variant="head-split",
            version="0.32",
            mover=mover,
            rule=Runs(backend="lbhnc", splits_heads=True),
            holds=_KV,
        ),
    ]


def _copying() -> list[Connector]:
    moriio, nccl = "MoRIIOConnector", "P2pNcclConnector"
    rdma = "RDMA read/write"
    return [
        Connector(name=moriio, version="0.22", mover=rdma, rule=Runs(backend="default_nhd", joins=True)),
        Connector(name=moriio, version="0.32", mover=rdma, rule=Runs(backend="lbnhc", joins=True)),
        Connector(name=nccl, version="0.22", mover="ncclSend", rule=Gather(per="request")),
    ]


def _offload() -> list[Connector]:
    name, simple, copy = "OffloadingConnector", "SimpleCPUOffload", "cuMemcpyBatchAsync"
    cross = Runs(backend="flash_attn_nhd_cross_layer", one_group=True)
    fa, fi = Runs(backend="flash_attn_nhd"), Runs(backend="flashinfer_nhd")
    batch = "DMA or Triton"
    return [
        Connector(name=name, variant="cross-layer", version="0.22", mover=copy, rule=cross, holds=_KV),
        Connector(name=name, variant="FA", version="0.22", mover=copy, rule=fa),
        Connector(name=name, variant="FI, others", version="0.22", mover=copy, rule=fi, holds=_KV),
        Connector(name=name, version="0.32", mover=batch, rule=Runs(backend="lbhnc")),
        Connector(name=name, variant="packed", version="0.32", mover=batch, rule=Runs(backend="blnhc"), holds=_TOKENS),
        Connector(name=simple, variant="FA", version="0.22", mover=copy, rule=fa),
        Connector(name=simple, variant="FI", version="0.22", mover=copy, rule=fi, holds=_KV),
        Connector(
            name=simple, version="0.32", mover="batch DMA", rule=Runs(backend="lbhnc"), note="inferred from 0.22's rule"
        ),
    ]


def _store() -> list[Connector]:
    name, put = "MooncakeStore", "batch_put"
    cross = Runs(backend="flash_attn_nhd_cross_layer", one_group=True, objects=True)
    fa, fi = Runs(backend="flash_attn_nhd", objects=True), Runs(backend="flashinfer_nhd", objects=True)
    row = Runs(backend="blnhc", objects=True)
    return [
        Connector(name=name, variant="FA", version="0.22", mover=put, rule=fa),
        Connector(name=name, variant="FI", version="0.22", mover=put, rule=fi, holds=_KV),
        Connector(name=name, variant="cross-layer", version="0.22", mover=put, rule=cross, holds=_KV),
        Connector(name=name, version="0.32", mover=put, rule=Runs(backend="lbhnc", objects=True)),
        Connector(name=name, variant="row", version="0.32", mover=put, rule=row, holds=_TOKENS),
    ]


_LMCACHE_CHUNK = 256
"""Tokens in LMCache's chunk, its default."""


def _gathering(version: str) -> list[Connector]:
    chunk = Gather(per="chunk", chunk=_LMCACHE_CHUNK, all_layers=True)
    layerwise = Gather(per="chunk", chunk=_LMCACHE_CHUNK)
    block = Gather(per="block", all_layers=True)
    external = Gather(per="block", all_layers=True, counted=False)
    files = Gather(per="request", by_token=True)
    return [
        Connector(name="LMCacheV1", version=version, mover="gather kernel", rule=chunk),
        Connector(name="LMCacheV1", variant="layer-wise", version=version, mover="gather kernel", rule=layerwise),
        Connector(name="LMCacheMP", version=version, mover="IPC to server", rule=chunk),
        Connector(name="HF3FS", version=version, mover="gather, 3FS IO", rule=block),
        Connector(
            name="FlexKV",
            version=version,
            mover="external library",
            rule=external,
            note="inferred; the unit is configured outside vLLM",
        ),
        Connector(name="ExampleConnector", version=version, mover="safetensors file", rule=files),
    ]


def _special(version: str) -> list[Connector]:
    hidden = Nothing(why="moves the request's hidden states (T*hidden*layers*s), not KV")
    bench = Nothing(why="fills the cache with made-up values; moves nothing", units=0)
    multi = Nothing(why="passes on to its children; see their rows")
    return [
        Connector(name="ExampleHiddenStates", version=version, mover="file", rule=hidden),
        Connector(name="DecodeBench", version=version, mover="none", rule=bench),
        Connector(name="Multi", version=version, mover="its children", rule=multi),
    ]


def _hisparse() -> list[Connector]:
    mover = "host-resident rows"
    rule = Runs(backend="blhnc", cut=("layer",))
    other = Nothing(why="holds latent vectors of sparse attention only")
    return [
        Connector(
            name="HiSparse",
            version="0.32",
            mover=mover,
            rule=rule,
            holds=frozenset({LATENT}),
            note="for sparse latent attention only",
        ),
        Connector(name="HiSparse", version="0.32", mover=mover, rule=other, holds=frozenset({ATTENTION, STATE})),
    ]


def _all() -> tuple[Connector, ...]:
    every = [*_nixl(), *_mooncake(), *_copying(), *_offload(), *_store(), *_hisparse()]
    for version in VLLM_VERSIONS:
        every += [*_gathering(version), *_special(version)]
    return tuple(sorted(every, key=lambda connector: VLLM_VERSIONS.index(connector.version)))


CONNECTORS = _all()
"""Every connector of both versions, 0.22's first."""
