"""Every built-in mover passes the contract, and the contract catches movers that are broken."""

from collections.abc import Callable

import pytest

from pdtx.cache import PagedBuffer, PagedKVCache, PagedLatentCache, PagedStateCache
from pdtx.errors import InputError
from pdtx.kvspec import MambaSpec, MLAAttentionSpec, SlidingWindowSpec
from pdtx.testing import CONTRACT, BufferScene, ContractViolation, Subject, check_mover
from pdtx.testing.contract import start
from pdtx.transports import Mover, make_mover
from tests.broken_movers import DropsTheLastRun, ReportsDoneTooEarly, SwapsTwoRuns, WritesOutside
from tests.contract_subjects import SUBJECTS, sampled, usable


@pytest.mark.parametrize("check", CONTRACT, ids=lambda check: check.__name__.removeprefix("check_"))
@pytest.mark.parametrize("name", sampled(SUBJECTS))
def test_contract(name: str, check: Callable[[Subject], None]) -> None:
    check(usable(name))


def states(layout: str) -> PagedStateCache:
    spec = MambaSpec(block_size=64, shapes=((3, 10), (2, 5, 4)), dtypes=("float16", "float32"))
    return PagedStateCache(spec, layout=layout, num_layers=3, num_blocks=4)


def latent(block_size: int) -> PagedLatentCache:
    spec = MLAAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=12, dtype="bfloat16")
    return PagedLatentCache(spec, num_layers=3, num_blocks=16)


def parted(layout: str) -> PagedKVCache:
    spec = SlidingWindowSpec(block_size=8, num_kv_heads=2, head_size=8, dtype="float32", sliding_window=9)
    return PagedKVCache(spec, layout=layout, num_layers=3, num_blocks=9)


@pytest.mark.parametrize(
    ("source", "destination", "positions"),
    [
        (states("mamba_sd"), states("mamba_ds"), 1),
        (latent(4), latent(16), 19),
        (parted("cpu_attn_lbhnc"), parted("sglang"), 19),
    ],
    ids=["states", "latent", "parted"],
)
@pytest.mark.parametrize("name", SUBJECTS)
def test_every_kind_of_buffer_is_moved(
    name: str, source: PagedBuffer, destination: PagedBuffer, positions: int
) -> None:
    for buffer in (source, destination):
        buffer.poison()
    with usable(name).pair() as pair:
        scene = BufferScene(source, destination, positions, seed=7)
        start(pair, pair.connect(), scene, scene.plan(range(1, 3))).wait()
        scene.require_exact()


def test_a_wrong_byte_of_any_kind_of_buffer_is_seen() -> None:
    """In what was moved, and beside it."""
    for source, destination, positions in ((states("mamba_sd"), states("mamba_ds"), 1), (latent(4), latent(16), 19)):
        scene = BufferScene(source, destination, positions)
        scene.require_exact()
        scene.dst.memory[-1] ^= 1
        with pytest.raises(ContractViolation, match="1 bytes were written that belong to no transfer"):
            scene.require_exact()
        scene.moved(scene.plan(range(1)))
        with pytest.raises(ContractViolation, match=r"elements are wrong, the first at layer 0"):
            scene.require_exact()


@pytest.mark.parametrize("broken", [SwapsTwoRuns, DropsTheLastRun, WritesOutside, ReportsDoneTooEarly])
def test_contract_catches_a_broken_mover(broken: type[Mover]) -> None:
    with pytest.raises(ContractViolation):
        check_mover(broken)


def test_unknown_mover_names_those_there_are() -> None:
    with pytest.raises(InputError, match="unknown mover 'pigeon'; one of inproc, nixl, shm, tcp, ucx"):
        make_mover("pigeon")


def test_unknown_option_is_an_input_error() -> None:
    with pytest.raises(InputError, match="wings"):
        make_mover("tcp", wings=2)
