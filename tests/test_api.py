"""`import pdtx` as a library: what it loads, what it offers, plans, and transfers between two ends."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import pdtx
from pdtx.cache import KVCaches
from pdtx.kvspec import FullAttentionSpec, SlidingWindowSpec
from tests.engine_pair import wait_until
from tests.slow_link import slow_proxy
from tests.state_families import state_cache

ROOT = Path(__file__).parent.parent


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a process of its own."""
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=100, cwd=ROOT)


# -- names -----------------------------------------------------------------------------------------------------------


def test_import_loads_no_heavy_package() -> None:
    code = (
        "import sys, pdtx; dir(pdtx), pdtx.__version__, pdtx.PdtxError; "
        "print(sorted({name.partition('.')[0] for name in sys.modules} & "
        "{'torch', 'numpy', 'zmq', 'msgspec', 'msgpack', 'yaml', 'typer', 'rich', 'psutil', 'transformers'}))"
    )
    assert python("-c", code).stdout == "[]\n"


def test_arithmetic_needs_no_torch() -> None:
    code = "import sys, pdtx; pdtx.spec_of; pdtx.plan; pdtx.bench; print('torch' in sys.modules, 'zmq' in sys.modules)"
    assert python("-c", code).stdout == "False False\n"


def test_every_name_is_there_and_listed() -> None:
    assert set(pdtx.__all__) == {"__version__", *pdtx._NAMES, *pdtx._PACKAGES}
    assert set(pdtx.__all__) <= set(dir(pdtx))
    for name in pdtx.__all__:
        assert getattr(pdtx, name) is getattr(pdtx, name)
    assert callable(pdtx.plan)
    assert callable(pdtx.layout)
    assert pdtx.Cache.__name__ == "KVCaches"


def test_names_are_what_types_say() -> None:
    """The imports that type checkers read are the ones that are made."""
    seen = (ROOT / "pdtx" / "__init__.py").read_text().split("if TYPE_CHECKING:")[1].split("_PLACES")[0]
    names: dict[str, Any] = {}
    exec("\n".join(line.strip() for line in seen.splitlines()), names)
    del names["__builtins__"]
    assert set(names) == set(pdtx.__all__) - {"__version__"}
    for name, value in names.items():
        if name in ("plan", "layout"):
            assert getattr(pdtx, name).public_function == f"{value.__module__}:{value.__name__}"
        else:
            assert getattr(pdtx, name) is value, name


def test_an_unknown_name_says_where_the_known_are() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'plans'; its public names are in docs/python\.md"):
        pdtx.plans  # type: ignore[attr-defined]  # noqa: B018
    assert not hasattr(pdtx, "__wrapped__")


def test_types_are_shipped() -> None:
    assert (ROOT / "pdtx" / "py.typed").is_file()


def test_packages_that_are_functions_are_packages_still() -> None:
    import pdtx.plan as plan_package
    from pdtx.plan import build_plan

    assert plan_package.build_plan is build_plan
    assert pdtx.plan is plan_package  # type: ignore[comparison-overlap]


# -- specs and caches ------------------------------------------------------------------------------------------------


def test_specs_of_models_and_of_numbers() -> None:
    llama = pdtx.spec_of("llama-3-8b", num_layers=2)
    assert list(llama.layers) == [f"model.layers.{layer}.self_attn.attn" for layer in range(2)]
    assert llama.spec == FullAttentionSpec(block_size=16, num_kv_heads=8, head_size=128, dtype="bfloat16")
    assert llama.bytes_per_block == 2 * 2 * 16 * 8 * 128 * 2
    config = {
        "model_type": "llama",
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_size": 64,
        "torch_dtype": "float16",
        "max_position_embeddings": 128,
    }
    own = pdtx.spec_of(config, block_size=8)
    assert own.spec == FullAttentionSpec(block_size=8, num_kv_heads=2, head_size=16, dtype="float16")
    assert pdtx.spec_of(num_kv_heads=2, head_size=16, dtype="float16", block_size=8).spec == own.spec
    window = pdtx.spec_of(num_kv_heads=2, head_size=16, sliding_window=64, num_layers=3)
    assert isinstance(window.spec, SlidingWindowSpec)
    assert len(window.layers) == 3


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ({}, "InputError", "give a model, or num_kv_heads and head_size"),
        ({"model": "llama-3-8b", "num_kv_heads": 3}, "InputError", "are the model's"),
        ({"num_kv_heads": 3, "head_size": 4, "kv_cache_dtype": "fp8"}, "InputError", "go with a model; give dtype"),
        ({"num_kv_heads": 3, "head_size": 4, "num_layers": 0}, "InputError", "num_layers must be 1 or more, not 0"),
        ({"model": "llama-3-8b", "num_layers": 99}, "InputError", "has 32 layers .* not the first 99"),
        ({"model": "nothing-at-all"}, "ModelError", "no config.json at nothing-at-all"),
        ({"num_kv_heads": -1, "head_size": 4}, "SpecError", "num_kv_heads"),
    ],
)
def test_specs_that_cannot_be_are_refused(given: dict[str, Any], error: str, text: str) -> None:
    with pytest.raises(getattr(pdtx, error), match=text):
        pdtx.spec_of(**given)
    with pytest.raises(pdtx.InputError, match="2 kinds of layers, not one"):
        _ = pdtx.spec_of("gemma-3-27b").spec


@pytest.mark.parametrize("model", ["jamba", "bamba-9b", "qwen3-next", "kimi-linear"])
def test_a_hybrid_models_caches_know_how_ranks_share_its_states(model: str) -> None:
    spec = pdtx.spec_of(model, num_layers=4)
    caches = [pdtx.cache_of(spec, "flash_attn_nhd,mla,mamba_sd", num_blocks=2, tp_size=tp) for tp in (1, 2)]
    for one, two in zip(*(cache.buffers for cache in caches), strict=True):
        if one.sharding is None:
            continue
        assert one.sharding == two.sharding == spec.sharding
        copied = 2 * 128 * 3 * 2 if model == "bamba-9b" else 0  # B and C of its one group, for 3 inputs
        assert 2 * two.layout.bytes_per_block - one.layout.bytes_per_block == copied
    assert any(buffer.sharding for buffer in caches[0].buffers)


def test_states_between_ranks_are_planned_from_their_caches() -> None:
    one, two, other = (
        KVCaches.single(state_cache(family, tp))
        for family, tp in (("gated delta net", 1), ("gated delta net", 2), ("mamba1", 2))
    )
    plan = pdtx.plan(one, [3], two, [1], tokens=1)
    assert [(rank.source_rank, rank.destination_rank) for rank in plan.ranks] == [(0, 0), (0, 1)]
    assert plan.nbytes == one.buffers[0].num_layers * one.buffers[0].bytes_per_position
    with pytest.raises(pdtx.InputError, match="share states over ranks in different ways"):
        pdtx.plan(one, [3], other, [1], tokens=1)


def test_caches_over_memory_of_others_are_not_written() -> None:
    spec = pdtx.spec_of("llama-3-8b", num_layers=2)
    memory = [torch.full((2, 2, 4, 16, 4, 128), 3, dtype=torch.bfloat16) for _ in range(2)]
    cache = pdtx.cache_of(spec, num_blocks=4, tp_size=2, memory=memory)
    assert not cache.owned
    assert cache.buffers[0].ranks[1].memory.data_ptr() == memory[1].data_ptr()
    assert all(bool((one == 3).all()) for one in memory)
    with pytest.raises(pdtx.InputError, match="memory was given for x; the buffers are full"):
        pdtx.cache_of(spec, num_blocks=4, memory={"x": memory[0]})
    for name in ("triton_per_token_head_hnd", "mla", "flashinfer_nvfp4_hnd", "mla,mamba_sd"):
        with pytest.raises(pdtx.LayoutError, match=f"{name.replace(',', ', ')}: this does not hold .*flash_attn_nhd"):
            pdtx.cache_of(spec, name, num_blocks=4, tp_size=2, memory=memory)
    with pytest.raises(pdtx.LayoutError):
        pdtx.cache_of(spec, num_blocks=5, tp_size=2, memory=memory)
    with pytest.raises(pdtx.InputError, match="leave them out beside memory"):
        pdtx.cache_of(spec, num_blocks=4, tp_size=2, memory=memory, shared=True)


# -- plans -----------------------------------------------------------------------------------------------------------


def elements(order: tuple[str, ...], sizes: dict[str, int], itemsize: int) -> np.ndarray[Any, Any]:
    """Return the byte offset of each element by (layer, block, kv, token, head, channel), of axes in an order."""
    shape = [sizes[axis] for axis in order]
    offsets = np.arange(np.prod(shape)).reshape(shape) * itemsize
    return np.moveaxis(offsets, [order.index(axis) for axis in "LBKTHC"], range(6))


@pytest.mark.parametrize(("source_tp", "destination_tp"), [(1, 1), (1, 2), (2, 1), (2, 2)])
def test_descriptors_lead_every_element_to_its_place(source_tp: int, destination_tp: int) -> None:
    heads, channels, tokens = 4, 8, range(5, 37)
    spec = pdtx.spec_of(num_layers=2, num_kv_heads=heads, head_size=channels, dtype="float16", block_size=16)
    coarse = pdtx.spec_of(num_layers=2, num_kv_heads=heads, head_size=channels, dtype="float16", block_size=32)
    plan = pdtx.plan(
        pdtx.layout("flash_attn_nhd", spec, num_blocks=6, tp_size=source_tp),
        [5, 1, 3],
        pdtx.layout("flashinfer_hnd", coarse, num_blocks=4, tp_size=destination_tp),
        [3, 1],
        tokens,
        source_tp=source_tp,
        destination_tp=destination_tp,
        spec=spec,
    )
    sizes = {"L": 2, "K": 2, "C": channels}
    here = elements(tuple("LKBTHC"), {**sizes, "B": 6, "T": 16, "H": heads // source_tp}, 2)
    there = elements(tuple("LBKHTC"), {**sizes, "B": 4, "T": 32, "H": heads // destination_tp}, 2)
    expected = set()
    for token in tokens:
        for head in range(heads):
            ranks = head * source_tp // heads, head * destination_tp // heads
            ours = here[:, [5, 1, 3][token // 16], :, token % 16, head % (heads // source_tp)]
            theirs = there[:, [3, 1][token // 32], :, token % 32, head % (heads // destination_tp)]
            expected |= {(*ranks, a, b) for a, b in zip(ours.flat, theirs.flat, strict=True)}
    found = set()
    for rank in plan.ranks:
        assert rank.descriptors.dtype == np.int64
        assert rank.descriptors.shape == (rank.num_runs, 3)
        for start, stop, nbytes in rank.descriptors.tolist():
            for step in range(0, nbytes, 2):
                found.add((rank.source_rank, rank.destination_rank, start + step, stop + step))
    assert found == expected
    assert plan.nbytes == 2 * len(expected) == sum(rank.nbytes for rank in plan.ranks)
    assert plan.num_runs == sum(len(rank.descriptors) for rank in plan.ranks)


def test_plans_of_caches_know_ranks_themselves() -> None:
    spec = pdtx.spec_of(num_kv_heads=4, head_size=8, num_layers=2)
    here, there = (pdtx.cache_of(spec, num_blocks=4, tp_size=tp) for tp in (1, 2))
    plan = pdtx.plan(here, [1, 2], there, [3, 1], 20)
    assert [(rank.source_rank, rank.destination_rank) for rank in plan.ranks] == [(0, 0), (0, 1)]
    with pytest.raises(pdtx.InputError, match="for 2 pairs of ranks; take descriptors from each"):
        _ = plan.descriptors
    with pytest.raises(pdtx.InputError, match="knows its spec and its tp size, 1"):
        pdtx.plan(here, [1, 2], there, [3, 1], 20, source_tp=2)
    layouts = [pdtx.layout("flash_attn_nhd", spec, num_blocks=4, tp_size=tp) for tp in (1, 2)]
    with pytest.raises(pdtx.InputError, match="give spec, of a layer of the whole model"):
        pdtx.plan(layouts[0], [1, 2], layouts[1], [3, 1], 20, destination_tp=2)
    with pytest.raises(pdtx.PlanError, match="null block"):
        pdtx.plan(here, [1, 0], here, [3, 1], 20)


# -- between two ends ------------------------------------------------------------------------------------------------


@pytest.fixture(params=["inproc", "tcp", "shm"])
def movers(request: pytest.FixtureRequest) -> Iterator[tuple[Any, Any]]:
    """Two ends of a transport."""
    pair = pdtx.transport(request.param), pdtx.transport(request.param)
    yield pair
    for one in pair:
        one.close()


def ends(tp: tuple[int, int] = (1, 1)) -> tuple[pdtx.Cache, pdtx.Cache, pdtx.Plan]:
    """Two caches, and a plan between them."""
    spec, coarse = (pdtx.spec_of(num_kv_heads=4, head_size=8, num_layers=2, block_size=size) for size in (16, 32))
    source = pdtx.cache_of(spec, "flash_attn_nhd", num_blocks=5, tp_size=tp[0], shared=True)
    destination = pdtx.cache_of(coarse, "flashinfer_hnd", num_blocks=4, tp_size=tp[1], shared=True)
    return source, destination, pdtx.plan(source, [4, 2, 1], destination, [3, 1], 40)


@pytest.mark.parametrize("tp", [(1, 1), (2, 4)])
def test_what_is_sent_is_received_where_the_plan_says(movers: tuple[Any, Any], tp: tuple[int, int]) -> None:
    source, destination, plan = ends(tp)

    def move(_: object, __: object) -> None:
        ours, theirs = (type(one)() for one in movers)
        with pdtx.receive(theirs, plan, destination) as receiving:
            sent = pdtx.send(ours, receiving.ticket, plan, source, timeout_s=20)
            receiving.wait()
        assert sent.nbytes == plan.nbytes
        ours.close()
        theirs.close()

    report = pdtx.check_transfer(
        source, destination, move, source_blocks=[4, 2, 1], destination_blocks=[3, 1], tokens=40, exact=True
    )
    assert report.ok, str(report)


def test_a_sender_without_the_token_is_refused(movers: tuple[Any, Any]) -> None:
    source, destination, plan = ends()
    with pdtx.receive(movers[1], plan, destination) as receiving:
        ticket = receiving.ticket
        for wrong in (
            pdtx.Ticket(ticket.address, "other", ticket.token),
            pdtx.Ticket(ticket.address, ticket.session_id, b"x" * 32),
        ):
            with pytest.raises(pdtx.PeerError):
                pdtx.send(movers[0], wrong, plan, source, timeout_s=20)
        assert pdtx.send(movers[0], ticket, plan, source, timeout_s=20).nbytes == plan.nbytes
        receiving.wait()
        # All has arrived: nothing is taken a second time.
        with pytest.raises(pdtx.PdtxError):
            pdtx.send(movers[0], ticket, plan, source, timeout_s=20)


def test_another_plan_than_the_receiver_s_is_refused(movers: tuple[Any, Any]) -> None:
    source, destination, plan = ends()
    other = pdtx.plan(source, [4, 2, 1], destination, [3, 1], 39)
    with pdtx.receive(movers[1], plan, destination) as receiving:
        with pytest.raises(pdtx.TransferError):
            pdtx.send(movers[0], receiving.ticket, other, source, timeout_s=20)
        with pytest.raises(pdtx.TransferError, match="has gone before all had arrived"):
            receiving.wait()


def test_nothing_comes_by_the_deadline(movers: tuple[Any, Any]) -> None:
    _, destination, plan = ends()
    with (
        pdtx.receive(movers[1], plan, destination, timeout_s=0.05) as receiving,
        pytest.raises(pdtx.DeadlineExceeded, match="0 of 1 payloads have arrived"),
    ):
        receiving.wait()


def test_a_closed_receiver_wakes_who_waits(movers: tuple[Any, Any]) -> None:
    _, destination, plan = ends()
    receiving = pdtx.receive(movers[1], plan, destination)
    errors = list[BaseException]()

    def waiting() -> None:
        try:
            receiving.wait()
        except pdtx.TransferError as error:
            errors.append(error)

    thread = threading.Thread(target=waiting)
    thread.start()
    receiving.close()
    thread.join(20)
    assert [str(error) for error in errors] == ["the receiver has been closed"]


@pytest.mark.parametrize("how", ["leave", "deadline"])
def test_nothing_is_written_once_a_receiver_is_closed(how: str) -> None:
    """In the middle of a payload, over a link of 900 kB/s: the memory is the caller's again."""
    movers = pdtx.transport("tcp"), pdtx.transport("tcp")
    spec = pdtx.spec_of(num_layers=2, num_kv_heads=4, head_size=64, dtype="bfloat16", block_size=16)
    source, destination = (pdtx.cache_of(spec, "flash_attn_nhd", num_blocks=120) for _ in range(2))
    blocks, memory = list(range(1, 120)), destination.buffers[0].memory
    source.buffers[0].memory.fill_(7)
    plan = pdtx.plan(source, blocks, destination, blocks, np.int64(len(blocks) * 16))
    errors = list[BaseException]()

    def sending(ticket: pdtx.Ticket) -> None:
        try:
            pdtx.send(movers[0], ticket, plan, source, timeout_s=20)
        except pdtx.PdtxError as error:
            errors.append(error)

    receiving = pdtx.receive(movers[1], plan, destination, timeout_s=20 if how == "leave" else 0.5)
    with slow_proxy(receiving.ticket.address) as address:
        ticket = pdtx.Ticket(address, receiving.ticket.session_id, receiving.ticket.token)
        sender = threading.Thread(target=sending, args=(ticket,))
        sender.start()
        if how == "leave":
            with receiving:
                wait_until(lambda: bool((memory == 7).any()), "the first bytes")
        else:
            with pytest.raises(pdtx.DeadlineExceeded):
                receiving.wait()
        memory.fill_(0x33)
        sender.join(20)
        assert len(errors) == 1
        assert bool((memory == 0x33).all())
    for one in movers:
        one.close()


def test_memory_that_does_not_fit_is_refused(movers: tuple[Any, Any]) -> None:
    source, destination, plan = ends((1, 2))
    with pytest.raises(pdtx.InputError, match="has 10 bytes of memory, its layout flashinfer_hnd"):
        pdtx.receive(movers[1], plan, [torch.zeros(10, dtype=torch.uint8)] * 2)
    with pytest.raises(pdtx.InputError, match="for 2 ranks of the destination; memory of 1"):
        pdtx.receive(movers[1], plan, destination.buffers[0].memory)
    assert source.nbytes
