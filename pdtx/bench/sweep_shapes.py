"""What the requests of a case come to, in bytes, and whether its two sides can be matched: by arithmetic alone."""

from functools import lru_cache

import msgspec

from pdtx.bench.limits import MOST_TOKENS
from pdtx.bench.patterns import plan_pattern
from pdtx.bench.station_caches import CaseModel, case_model, case_shape, positions_in_block
from pdtx.bench.station_contents import region_sizes
from pdtx.bench.station_memory import region_ends
from pdtx.errors import InputError, PdtxError
from pdtx.kvspec import KVCacheSpec
from pdtx.plan import needed_positions
from pdtx.results.model import Case
from pdtx.units import format_bytes


def model_of(case: Case) -> CaseModel:
    """Return the layers that a case keeps something of. Raises ModelError for a model that cannot be read."""
    return _model(case.model, case.kv_cache_dtype, case.layers, case.block_size)


@lru_cache(maxsize=256)
def _model(model: str, kv_cache_dtype: str, layers: int | None, block_size: tuple[int, int]) -> CaseModel:
    return case_model(Case(model=model, kv_cache_dtype=kv_cache_dtype, layers=layers, block_size=block_size))


def request_bytes(case: Case) -> int:
    """Return the bytes that a request of a case moves, each element once: of a window only what is in reach."""
    model = model_of(case)
    return sum(_layer_bytes(model, spec, case.tokens) for spec in model.layers["decode"].values())


def _layer_bytes(model: CaseModel, spec: KVCacheSpec, tokens: int) -> int:
    positions = len(needed_positions(spec, tokens, model.encoder_positions))
    return positions * spec.unpadded_page_size_bytes // positions_in_block(spec)


def tokens_for(case: Case, nbytes: int) -> int:
    """Return the whole blocks of tokens whose bytes come nearest to nbytes, one block at least.

    Raises InputError where no number of tokens comes to so much: a model with windows alone stops growing.
    """
    block = max(case.block_size)

    def amount(blocks: int) -> int:
        return request_bytes(msgspec.structs.replace(case, tokens=blocks * block))

    low, high = 0, 1
    while amount(high) < nbytes:
        low, high = high, 2 * high
        if high * block > MOST_TOKENS:
            raise InputError(
                f"no request comes to {format_bytes(nbytes)}: {low * block:,} tokens are {format_bytes(amount(low))}"
            )
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if amount(middle) < nbytes else (low, middle)
    nearer = low if low and nbytes - amount(low) < amount(high) - nbytes else high
    return nearer * block


def agent_bytes(case: Case, agents: tuple[int, int]) -> tuple[int, int]:
    """Return what the caches of a prefill and of a decode agent take, of the one that needs most of each.

    Raises InputError for agents that do not go with the case's pattern.
    """
    pattern = plan_pattern(case, *agents)
    sides = [[work for work in works if work is not None] for works in (pattern.prefill, pattern.decode)]
    shapes = {number: case_shape(case, number) for number in {work.pool_requests for works in sides for work in works}}
    here, there = (
        max(region_ends(region_sizes(work, shapes[work.pool_requests]))[-1] for work in works) for works in sides
    )
    return here, there


def why_impossible(case: Case) -> str | None:
    """Return why the two sides of a case cannot be matched, or None. Sizes, batches and the like play no part."""
    return _mismatch(case.model, case.kv_cache_dtype, case.layers, case.block_size, case.layout, case.tp)


@lru_cache(maxsize=4096)
def _mismatch(
    model: str,
    kv_cache_dtype: str,
    layers: int | None,
    block_size: tuple[int, int],
    layout: tuple[str, str],
    tp: tuple[int, int],
) -> str | None:
    try:
        # A block of either side: what cannot be cut shows with so few tokens as well.
        case = Case(
            model=model,
            kv_cache_dtype=kv_cache_dtype,
            layers=layers,
            block_size=block_size,
            layout=layout,
            tp=tp,
            tokens=max(block_size),
        )
        case_shape(case, 1)
    except PdtxError as error:
        return str(error)
    return None
