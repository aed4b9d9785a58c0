"""Nodes with tiers: what a prompt has in common with an earlier one is loaded, and the text stays the same."""

import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pdtx.cache import KVCaches
from pdtx.engine import KVConsumer, KVProducer, PeerTier, TierServer, describe_cache
from pdtx.errors import InputError
from pdtx.node.config import TierConfig, TransportConfig
from pdtx.node.loop import ModelLoop
from pdtx.node.tiers import open_tiers
from pdtx.plan import CostTable
from pdtx.report import RequestRow
from pdtx.runner import ModelRunner, PagedSequence
from pdtx.serving import Job, ModelComputer, PrefillScheduler
from pdtx.tiers.base import Tier
from pdtx.tiers.copies import Copier
from pdtx.tiers.cpu import CopierFactory, CpuTier
from pdtx.tiers.geometry import tier_caches
from pdtx.tiers.keys import fingerprint_of
from pdtx.tiers.prefix import PrefixCache, Request
from pdtx.transports import make_mover
from tests.engine_pair import OPEN, all_free, wait_until
from tests.node_process import run
from tests.test_nodes import NODE, decode_node
from tests.tiny_models import ARCHITECTURES, prompt, tiny_checkpoint

BLOCK = 32
TOKENS = 8
pytestmark = pytest.mark.timeout(240)

_runners: dict[str, ModelRunner] = {}


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
    _runners.clear()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def runner_of(folder: Path, kind: str) -> ModelRunner:
    if kind not in _runners:
        _runners[kind] = ModelRunner.load(tiny_checkpoint(folder, kind, **ARCHITECTURES[kind]), "float32")
    return _runners[kind]


def cpu_tier(cache: KVCaches, *, copier: CopierFactory = Copier) -> CpuTier:
    memory = tier_caches(cache, block_tokens=BLOCK, nbytes=4 << 20, tokens_per_state=BLOCK)
    return CpuTier(memory, like=cache, copier=copier)


@dataclass
class Nodes:
    """A prefill and a decode node in this process. Tiers are made from the caches by the given functions."""

    runner: ModelRunner
    producer: KVProducer
    consumer: KVConsumer
    prefill: PrefixCache | None
    decode: PrefixCache | None
    chunk_size: int = 24
    stack: ExitStack = field(default_factory=ExitStack)

    def ask(self, *prompts: Sequence[int]) -> list[RequestRow]:
        scheduler = PrefillScheduler(
            ModelComputer(self.runner),
            self.producer,
            max_tokens=TOKENS,
            chunk_size=self.chunk_size,
            max_num_seqs=4,
            timeout_s=60.0,
            ignore_eos=True,
            prefix=self.prefill,
        )
        return scheduler.run([Job(f"r{at}", tokens) for at, tokens in enumerate(prompts)])

    def answer(self, tokens: Sequence[int]) -> RequestRow:
        (row,) = self.ask(tokens)
        assert row.error is None, row.error
        assert row.wrong == 0
        return row

    def settle(self) -> None:
        """Wait until nothing holds a block: what was to be kept is kept."""
        wait_until(lambda: all_free(self.producer.allocator), "the producer's blocks")
        wait_until(lambda: all_free(self.consumer.allocator), "the consumer's blocks")


@contextmanager
def nodes(
    runner: ModelRunner,
    *,
    prefill: bool = False,
    decode: bool = False,
    copier: CopierFactory = Copier,
    peers: Sequence[Tier] = (),
    served: bool = False,
    caches: tuple[KVCaches, KVCaches] | None = None,
) -> Iterator[Nodes]:
    source, destination = caches or caches_of(runner)
    fingerprint = fingerprint_of(source, model=runner.fingerprint)

    def prefix(cache: KVCaches, wanted: bool, others: Sequence[Tier] = ()) -> PrefixCache | None:
        if not wanted and not others:
            return None
        tier = cpu_tier(cache, copier=copier) if wanted else None
        found = PrefixCache(cache, tier, fingerprint, peers=others, hashed=served)
        stack.callback(found.close)
        return found

    def describe(cache: KVCaches) -> object:
        return describe_cache(cache, model=runner.name, fingerprint=runner.fingerprint)

    with ExitStack() as stack:
        before, after = prefix(source, prefill), prefix(destination, decode, peers)
        consumer = KVConsumer(destination, describe(destination), make_mover("inproc"), verify=True, prefix=after)  # type: ignore[arg-type]
        stack.callback(consumer.close)
        address = consumer.listen("127.0.0.1:0", security=OPEN)
        mover = make_mover("inproc")
        stack.callback(mover.close)
        producer = KVProducer(source, describe(source), mover)  # type: ignore[arg-type]
        stack.callback(producer.close)
        producer.connect(address, security=OPEN)
        stop = threading.Event()
        loop = threading.Thread(target=ModelLoop(runner, consumer, stop, None).run)
        loop.start()
        stack.callback(loop.join)
        stack.callback(stop.set)
        yield Nodes(runner, producer, consumer, before, after)


def caches_of(runner: ModelRunner, ranks: tuple[int, int] = (1, 1)) -> tuple[KVCaches, KVCaches]:
    return (
        runner.make_cache(layout="flash_attn_nhd", block_size=16, num_blocks=40, tp_size=ranks[0]),
        runner.make_cache(layout="flashinfer_hnd", block_size=32, num_blocks=40, tp_size=ranks[1]),
    )


def loaded(prefix: PrefixCache | None) -> int:
    assert prefix is not None
    return sum(group.loaded.blocks for usage in prefix.usages() for group in usage.groups)


KINDS = ["llama", "gemma3_text", "jamba", "qwen3_next", "deepseek_v3"]
FIRST, SECOND = prompt(0, 100), [*prompt(0, 80), *prompt(5, 25)]
"""The second has two blocks and a half of the first one's, and goes on differently."""


def plain(runner: ModelRunner) -> list[list[int]]:
    with nodes(runner) as pair:
        return [pair.answer(tokens).token_ids for tokens in (FIRST, SECOND)]


@pytest.mark.parametrize(("kind", "ranks"), [*((kind, (1, 1)) for kind in KINDS), ("qwen3_next", (2, 4))])
def test_a_second_prompt_is_loaded_on_both_sides_and_its_text_is_the_same(
    folder: Path, kind: str, ranks: tuple[int, int]
) -> None:
    runner = runner_of(folder, kind)
    without = plain(runner)
    with nodes(runner, prefill=True, decode=True, caches=caches_of(runner, ranks)) as pair:
        first = pair.answer(FIRST)
        assert (first.cached_tokens, first.cached_from, first.peer_cached_tokens) == (0, "", 0)
        pair.settle()
        again = pair.answer(FIRST)
        pair.settle()
        second = pair.answer(SECOND)
        pair.settle()
        assert [first.token_ids, second.token_ids] == without
        assert again.token_ids == first.token_ids
        assert again.nbytes < first.nbytes
        # Of the block in which a window begins the decode node has a part only, which is not kept.
        assert again.peer_cached_tokens == (2 if kind == "gemma3_text" else 3) * BLOCK
        assert second.peer_cached_tokens == 2 * BLOCK
        assert loaded(pair.decode) > 0
        if runner.resumes:
            assert (again.cached_tokens, again.cached_from) == (3 * BLOCK, "cpu")
            assert again.load_bytes > 0
            assert again.load_s > 0
            assert second.cached_tokens == 2 * BLOCK
            assert loaded(pair.prefill) > 0
        else:
            assert again.cached_tokens == 0


class Swapped(Copier):
    """Copies into the cache what belongs to another block: the last one every time."""

    broken = False

    def copy(self, group, src_table, dst_table, positions):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
        if self.broken and len(src_table) > 1:
            src_table = np.full_like(src_table, src_table[-1])
        return super().copy(group, src_table, dst_table, positions)


@pytest.fixture
def mixed_up() -> Iterator[type[Swapped]]:
    yield Swapped
    Swapped.broken = False


def test_another_blocks_bytes_are_found_by_verification_in_the_decode_node(
    folder: Path, mixed_up: type[Swapped]
) -> None:
    with nodes(runner_of(folder, "llama"), decode=True, copier=mixed_up) as pair:
        pair.answer(FIRST)
        pair.settle()
        mixed_up.broken = True
        (row,) = pair.ask(FIRST)
        assert row.wrong
        assert row.error is not None
        # Of whole copies of the last block the last is right.
        assert "2 of 3 blocks from tier cpu are wrong; first: buffer full block 0 (tokens 0..32) holds" in row.error
        assert "holds the content of block 2 (tokens 64..96)" in row.error
        pair.settle()


def test_another_blocks_bytes_in_the_prefill_node_show_in_the_text(folder: Path, mixed_up: type[Swapped]) -> None:
    with nodes(runner_of(folder, "llama"), prefill=True, copier=mixed_up) as pair:
        first = pair.answer(FIRST)
        pair.settle()
        mixed_up.broken = True
        assert pair.answer(FIRST).token_ids != first.token_ids


class Failing(Copier):
    """Loses the second block of what it is to load."""

    broken = False

    def copy(self, group, src_table, dst_table, positions):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
        if self.broken:
            raise OSError("the memory is gone")
        return super().copy(group, src_table, dst_table, positions)


def test_what_cannot_be_loaded_is_computed_and_sent(folder: Path) -> None:
    with nodes(runner_of(folder, "llama"), prefill=True, decode=True, copier=Failing) as pair:
        first = pair.answer(FIRST)
        pair.settle()
        Failing.broken = True
        try:
            again = pair.answer(FIRST)
            pair.settle()
        finally:
            Failing.broken = False
        assert (again.cached_tokens, again.peer_cached_tokens) == (0, 0)
        assert (again.token_ids, again.nbytes) == (first.token_ids, first.nbytes)
        assert pair.prefill is not None
        assert sum(group.failed.blocks for group in pair.prefill.usages()[0].groups) > 0


class Slow(Copier):
    """Takes its time, in which a state that nobody waited for is another one."""

    def copy(self, group, src_table, dst_table, positions):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
        time.sleep(0.03)
        return super().copy(group, src_table, dst_table, positions)


def test_a_state_is_stored_before_the_next_chunk_changes_it(folder: Path) -> None:
    runner = runner_of(folder, "qwen3_next")
    other = [*prompt(0, 40), *prompt(9, 30)]
    meant = runner.make_cache(num_blocks=40)
    sequence = PagedSequence(meant, [torch.arange(1, 2 if group.kind == "state" else 9) for group in meant.groups])
    for tokens in (other[:24], other[24:BLOCK]):  # in the scheduler's chunks
        runner.forward(sequence, tokens)
    with nodes(runner, prefill=True, copier=Slow) as pair:
        pair.answer(FIRST)
        pair.settle()
        cache, prefix = pair.producer.cache, pair.prefill
        assert prefix is not None
        places = [group.table_blocks(len(other)) for group in cache.groups]
        blocks = pair.producer.allocator.allocate([len(place) for place in places])
        request = Request(prefix.keys(other), blocks.tables(places), blocks, pair.producer)
        assert prefix.fetch(request, len(other), time.monotonic() + 30, resume=True).num_tokens == BLOCK
        for buffer, right in zip(cache.buffers, meant.buffers, strict=True):
            tables = torch.as_tensor(request.tables[buffer.group]), sequence.table(buffer.group)
            stop = 1 if cache.groups[buffer.group].kind == "state" else BLOCK
            for layer in range(buffer.num_layers):
                found, wanted = (
                    each.canonical(layer, table, 0, stop) for each, table in zip((buffer, right), tables, strict=True)
                )
                assert torch.equal(found, wanted), buffer.name
        pair.producer.allocator.free(blocks)


def test_several_prompts_at_once(folder: Path) -> None:
    runner = runner_of(folder, "qwen3_next")
    prompts = [[*prompt(0, 70), *prompt(seed, 20)] for seed in range(1, 5)]
    with nodes(runner) as pair:
        without = [row.token_ids for row in pair.ask(*prompts)]
    with nodes(runner, prefill=True, decode=True) as pair:
        pair.answer(prompts[0])
        pair.settle()
        rows = pair.ask(*prompts)
        pair.settle()
    assert [row.token_ids for row in rows] == without
    assert [row.wrong for row in rows] == [0] * 4
    assert [row.cached_tokens for row in rows[1:]] == [64] * 3


@contextmanager
def serving(runner: ModelRunner) -> Iterator[tuple[Nodes, CpuTier, TierServer, str]]:
    """Nodes of which the prefill node serves its tier; the tier, its server, and the address."""
    with ExitStack() as stack:
        mover = make_mover("tcp")
        stack.callback(mover.close)
        source, spare = caches_of(runner)[0], runner.make_cache(block_size=32, num_blocks=40)
        first = stack.enter_context(nodes(runner, prefill=True, served=True, caches=(source, spare)))
        assert first.prefill is not None
        tier = first.prefill.tier
        assert isinstance(tier, CpuTier)
        server = TierServer(tier, describe_cache(tier.cache, model=runner.name, fingerprint=runner.fingerprint), mover)
        stack.callback(server.close)
        yield first, tier, server, server.listen("127.0.0.1:0", security=OPEN)


@contextmanager
def reading(runner: ModelRunner, address: str) -> Iterator[Nodes]:
    """Nodes of which the decode node reads the tier that is served at an address."""
    _, destination = caches_of(runner)
    here = describe_cache(destination, model=runner.name, fingerprint=runner.fingerprint)
    peer = PeerTier(address, destination, here, make_mover("tcp"), block_tokens=BLOCK, security=OPEN)
    other = runner.make_cache(layout="flash_attn_hnd", block_size=16, num_blocks=40)
    with nodes(runner, caches=(other, destination), peers=[peer]) as second:
        yield second


@pytest.mark.parametrize("kind", KINDS)
def test_a_decode_node_reads_the_prefill_nodes_tier(folder: Path, kind: str) -> None:
    runner = runner_of(folder, kind)
    with serving(runner) as (first, _, server, address):
        row = first.answer(FIRST)
        first.settle()
        with reading(runner, address) as second:
            second.chunk_size = 20  # other last bits, which are not held against what the peer had
            again = second.answer(FIRST)
            second.settle()
            assert again.token_ids == row.token_ids
            assert again.peer_cached_tokens == 3 * BLOCK
            assert loaded(second.decode) > 0
        wait_until(lambda: server.num_lent == 0, "what was lent is given back")


def test_a_block_that_changed_in_a_peers_tier_is_found(folder: Path) -> None:
    runner = runner_of(folder, "llama")
    with serving(runner) as (first, tier, _, address):
        first.answer(FIRST)
        first.settle()
        assert first.prefill is not None
        with tier.lookup(first.prefill.keys(FIRST), (np.array([1]),)) as lease:
            (buffer,), table = tier.cache.buffers, torch.as_tensor(lease.tables(0)[1:])
            rows = buffer.canonical(1, table, 9, 10)
            rows[1, 0, 1, 5] ^= 1
            buffer.write_canonical(1, table, 9, rows)
        with reading(runner, address) as second:
            (row,) = second.ask(FIRST)
            second.settle()
    assert row.wrong
    assert "1 of 3 blocks from tier peer are wrong; first: buffer full block 1 (tokens 32..64)" in (row.error or "")


@pytest.mark.parametrize("memory", [0.0, 1 / 256])
def test_what_an_earlier_process_kept_on_disk_is_loaded(folder: Path, tmp_path: Path, memory: float) -> None:
    runner = runner_of(folder, "gemma3_text")
    config = TierConfig(
        kv_offloading_size=memory,
        kv_offloading_disk_size=1 / 64,
        kv_offloading_dir=tmp_path,
        kv_offloading_block_size=BLOCK,
    )
    rows = list[RequestRow]()
    for _ in range(2):
        caches = caches_of(runner)
        with ExitStack() as stack:
            found = open_tiers(
                config,
                caches[0],
                runner,
                stack,
                block_size=16,
                security=OPEN,
                transport=TransportConfig("tcp"),
                costs=CostTable({}),
                on_note=lambda _: None,
            )
            assert found is not None
            with nodes(runner, caches=caches) as pair:
                pair.prefill = found.prefix
                rows.append(pair.answer(FIRST))
                pair.settle()
            usages = {usage["name"]: usage for usage in found.report(lambda _: None)}
            assert list(usages) == (["cpu", "disk"] if memory else ["disk"])
            assert (usages["disk"]["groups"][1]["loaded"]["blocks"] > 0) == (len(rows) == 2)
    first, again = rows
    assert (first.cached_tokens, again.cached_tokens) == (0, 3 * BLOCK)
    assert again.cached_from == "disk"
    assert again.token_ids == first.token_ids


def test_flags_of_the_nodes(tmp_path: Path) -> None:
    model = tiny_checkpoint(tmp_path, "llama")
    prompts = tmp_path / "prompts.jsonl"
    lines = [{"id": f"p{at}", "token_ids": tokens} for at, tokens in enumerate((FIRST, SECOND))]
    prompts.write_text("\n".join(map(json.dumps, lines)))
    tiers = ["--kv-offloading-size", "0.01", "--kv-offloading-block-size", "32"]
    with decode_node(tmp_path, "--model", model, *NODE, "--verify", *tiers) as node:
        work = ["--max-tokens", "8", "--ignore-eos", "--max-num-seqs", "1", "--prompts", str(prompts), "--json"]
        # One prompt's blocks at a time, which are back when they have been stored: the second finds them.
        serve = ["--serve-tier", "127.0.0.1:0", "--num-blocks", "9"]
        done = run("prefill_node", "--model", model, *NODE, "--connect", node.wait_for_address(), *work, *tiers, *serve)
        assert done.code == 0, done.stderr
        first, second = done.requests["p0"], done.requests["p1"]
        assert (first["cached_tokens"], second["cached_tokens"], second["cached_from"]) == (0, 64, "cpu")
        assert (first["wrong"], second["wrong"]) == (0, 0)
        (usage,) = json.loads(done.stdout)["tiers"]
        assert (usage["name"], usage["groups"][0]["loaded"]["blocks"]) == ("cpu", 2)
        assert "tier cpu: " in done.stderr
        assert " serves its tier at 127.0.0.1:" in done.stderr
        assert node.stop() == 0
        assert "tier cpu: " in node.said


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"kv_offloading_policy": "mru"}, "--kv-offloading-policy takes "),
        ({"kv_offloading_write": "never"}, "--kv-offloading-write takes through, back, not 'never'"),
        ({"kv_offloading_disk_size": 1.0}, "--kv-offloading-disk-size and --kv-offloading-dir go together"),
        ({"kv_offloading_dir": Path("here")}, "--kv-offloading-disk-size and --kv-offloading-dir go together"),
        ({"serve_tier": "127.0.0.1:0", "kv_offloading_size": 0.0}, "give --kv-offloading-size too"),
        ({"peer_tier": "nowhere"}, "not an address"),
    ],
)
def test_flags_that_cannot_be_are_one_line(flags: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError) as caught:
        TierConfig(**({"kv_offloading_size": 1.0} | flags))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
