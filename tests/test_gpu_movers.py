"""Every mover between caches on a GPU and on the host, packed or not; what runs without a GPU shows that they can fail.

docs/gpu.md lists the paths and how to run them all.
"""

import itertools
import os

import pytest
import torch

from pdtx.cache import PagedKVCache
from pdtx.errors import InputError
from pdtx.kvspec import FullAttentionSpec
from pdtx.testing import BufferScene, ContractViolation, Subject
from pdtx.testing.contract import start, start_get

SUBJECTS = {
    "tcp": Subject.named("tcp"),  # pinned bounce buffers
    "ucx": Subject.named("ucx"),  # registered by address
    "ucx-nixl": Subject.named("ucx", library="nixl"),
    "nixl": Subject.named("nixl"),
}
"""shm needs its peer in another process: tests/test_shm_link.py."""

PAIRS = [("cuda", "cpu"), ("cpu", "cuda"), ("cuda", "cuda")]


@pytest.fixture(autouse=True)
def _cuda_transports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless the user chooses transports: those that can reach a GPU's memory, and tcp to notice a peer's end."""
    if torch.cuda.is_available() and "UCX_TLS" not in os.environ:
        monkeypatch.setenv("UCX_TLS", "tcp,cuda_copy,cuda_ipc,sm,self")


def usable(name: str) -> Subject:
    try:
        SUBJECTS[name].make().close()
    except InputError as error:
        pytest.skip(str(error))
    return SUBJECTS[name]


def scene_on(source: str, destination: str) -> BufferScene:
    """Keys and values on devices, FlashAttention NHD in blocks of 4 to FlashInfer HND in blocks of 8."""
    caches = []
    for layout, block_size, device in (("flash_attn_nhd", 4, source), ("flashinfer_hnd", 8, destination)):
        spec = FullAttentionSpec(block_size=block_size, num_kv_heads=2, head_size=16, dtype="bfloat16")
        cache = PagedKVCache(spec, layout=layout, num_layers=3, num_blocks=128, device=device)
        cache.poison()
        caches.append(cache)
    return BufferScene(caches[0], caches[1], 301)


def move(name: str, scene: BufferScene, *, staged: bool = False, gets: bool = False) -> None:
    """Layer by layer, as prefill nodes do."""
    with usable(name).pair() as pair:
        connection = pair.connect()
        for mover, side in ((pair.producer, scene.src), (pair.consumer, scene.dst)):
            mover.register(side.region)
        for layer in range(3):
            plan = scene.plan(range(layer, layer + 1))
            if gets:
                start_get(pair, connection, scene, plan).wait()
            else:
                start(pair, connection, scene, plan, staged=staged).wait()
    scene.require_exact()


@pytest.mark.gpu
@pytest.mark.parametrize("staged", [False, True], ids=["direct", "staged"])
@pytest.mark.parametrize(("source", "destination"), PAIRS)
@pytest.mark.parametrize("name", SUBJECTS)
def test_put_between_devices(name: str, source: str, destination: str, staged: bool) -> None:
    move(name, scene_on(source, destination), staged=staged)


@pytest.mark.gpu
@pytest.mark.parametrize(("source", "destination"), PAIRS)
@pytest.mark.parametrize("name", SUBJECTS)
def test_get_between_devices(name: str, source: str, destination: str) -> None:
    move(name, scene_on(destination, source), gets=True)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["ucx", "ucx-nixl", "nixl"])
def test_gpu_memory_is_registered_once(name: str) -> None:
    scene = scene_on("cuda", "cuda")
    mover = usable(name).make()
    try:
        first = mover.register(scene.src.region)
        assert first is not None
        assert first.nbytes >= scene.src.region.nbytes
        assert mover.register(scene.src.region) == first
    finally:
        mover.close()


@pytest.mark.parametrize(("staged", "gets"), [(False, False), (True, False), (False, True)])
def test_the_same_on_the_host(staged: bool, gets: bool) -> None:
    move("tcp", scene_on("cpu", "cpu"), staged=staged, gets=gets)


@pytest.mark.parametrize("where", ["src", "dst"])
def test_a_wrong_byte_is_seen(where: str) -> None:
    scene = scene_on("cpu", "cpu")
    move("tcp", scene)
    getattr(scene, where).memory[-1] ^= 1
    with pytest.raises(ContractViolation):
        scene.require_exact()


def test_pairs_are_all_with_a_gpu() -> None:
    assert sorted(PAIRS) == sorted(pair for pair in itertools.product(("cpu", "cuda"), repeat=2) if "cuda" in pair)
