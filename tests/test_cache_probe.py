"""Probe: an owner's own write function against the layout that was named. Owners write through views of their own."""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from pdtx.cache import CacheGroup, ForeignBuffer, KVCaches, torch_dtype
from pdtx.errors import CacheError, LayoutError
from pdtx.kvspec import FullAttentionSpec, KVCacheSpec, MambaSpec, MLAAttentionSpec
from tests.foreign_scenes import group_of

LAYERS, BLOCKS, HEADS, TOKENS, CHANNELS = 2, 5, 2, 16, 8
SPARE = 3
FULL = FullAttentionSpec(block_size=TOKENS, num_kv_heads=HEADS, head_size=CHANNELS, dtype="bfloat16")
LATENT = MLAAttentionSpec(block_size=TOKENS, num_kv_heads=1, head_size=24, dtype="bfloat16")
STATES = MambaSpec(block_size=1, shapes=((3, 10), (6, 5, 2)), dtypes=("bfloat16", "float32"))

Write = Callable[..., None]


def names() -> list[str]:
    return [f"model.layers.{layer}.attn" for layer in range(LAYERS)]


def layer_of(name: str) -> int:
    return int(name.split(".")[2])


class Owner:
    """vLLM's memory order LBHNC, with K and then V in each token of a head, held by its owner as one tensor."""

    def __init__(self, dtype: str = "bfloat16", layout: str = "vllm_lbhnc") -> None:
        self.dtype = torch_dtype(dtype)
        shape = LAYERS, BLOCKS, HEADS, TOKENS, 2 * CHANNELS
        noise = np.random.default_rng(1).integers(0, 256, (*shape[:-1], shape[-1] * self.dtype.itemsize), np.uint8)
        self.kv = torch.from_numpy(noise).view(self.dtype)
        self.before = self.bits().clone()
        spec = replace(FULL, dtype=dtype)
        group = CacheGroup("full", "full", TOKENS, BLOCKS, spec)
        self.cache = KVCaches.over([group], [ForeignBuffer("full", "full", spec, layout, names(), BLOCKS, self.kv)])
        self.written = set[int]()

    def bits(self) -> torch.Tensor:
        return self.kv.view(torch.uint8)

    def write(self, name: str, block: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """As the layout says: key and value are (tokens, heads, channels)."""
        self.written.add(block)
        self.kv[layer_of(name), block, :, :, :CHANNELS] = key.transpose(0, 1)
        self.kv[layer_of(name), block, :, :, CHANNELS:] = value.transpose(0, 1)

    def swapped(self, name: str, block: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """V before K."""
        self.write(name, block, value, key)

    def transposed(self, name: str, block: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """As on vLLM's CPUs: in each head K as (channel, token), then V as (token, channel)."""
        page = self.kv[layer_of(name), block].view(HEADS, 2, TOKENS * CHANNELS)
        page[:, 0] = key.permute(1, 2, 0).reshape(HEADS, -1)
        page[:, 1] = value.permute(1, 0, 2).reshape(HEADS, -1)

    def tiles(self, name: str, block: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """As AMX packs bf16: for 16 tokens, pairs of channels, (channels / 2, 16, 2), in place of (16, channels)."""
        page = self.kv[layer_of(name), block].view(HEADS, 2, TOKENS * CHANNELS)
        for at, rows in enumerate((key, value)):
            tile = rows.permute(1, 0, 2).reshape(HEADS, TOKENS // 16, 16, CHANNELS // 2, 2).permute(0, 1, 3, 2, 4)
            page[:, at] = tile.reshape(HEADS, -1)


def require_restored(owner: Owner) -> None:
    assert torch.equal(owner.bits(), owner.before)


class TestKeysAndValues:
    @pytest.mark.parametrize(
        "dtype", ["bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2", "uint8", "int8"]
    )
    def test_what_lies_where_the_layout_says_passes(self, dtype: str) -> None:
        owner = Owner(dtype)
        owner.cache.probe(owner.write, SPARE)
        assert owner.written == {SPARE}
        require_restored(owner)

    def test_a_cache_of_its_own_can_be_probed(self) -> None:
        owner = Owner()
        mine = torch.zeros_like(owner.kv)
        owner.kv, group = mine, owner.cache.groups[0]
        cache = KVCaches.over([group], [ForeignBuffer("full", "full", FULL, "vllm_lbhnc", names(), BLOCKS, mine)])
        cache.probe(owner.write, BLOCKS - 1)
        assert not mine.any()

    def test_keys_and_values_swapped(self) -> None:
        owner = Owner()
        with pytest.raises(LayoutError) as refused:
            owner.cache.probe(owner.swapped, SPARE)
        assert str(refused.value) == (
            "probe: buffer full layer 0 (model.layers.0.attn) K token 0 head 0 channel 0 (block 3) holds what was "
            "written to buffer full layer 0 (model.layers.0.attn) V token 0 head 0 channel 0; 1024 of 1024 elements do "
            "not lie where layout vllm_lbhnc has them: name the layout that their owner writes"
        ).replace(" (model.layers.0.attn)", "")
        require_restored(owner)

    def test_keys_transposed_as_on_cpus(self) -> None:
        """In memory K[token 0] is followed by K[token 1] of the same channel, not by the next channel."""
        owner = Owner(layout="cpu_attn_lbhnc")
        owner.cache.probe(owner.transposed, SPARE)
        require_restored(owner)
        owner = Owner()
        with pytest.raises(
            LayoutError, match=r"K token 0 head 0 channel 1 .*holds what was written to .* K token 1 head 0 ch"
        ):
            owner.cache.probe(owner.transposed, SPARE)
        require_restored(owner)
        owner = Owner(layout="cpu_attn_lbhnc")
        with pytest.raises(LayoutError, match="where layout cpu_attn_lbhnc has them"):
            owner.cache.probe(owner.write, SPARE)
        require_restored(owner)

    def test_tiles_as_amx_packs_them(self) -> None:
        """Same strides, same shape, same name, and no layout of one stride an axis: refused, with the coordinate."""
        for layout in ("vllm_lbhnc", "cpu_attn_lbhnc"):
            owner = Owner(layout=layout)
            with pytest.raises(
                LayoutError, match=r"probe: buffer full layer 0 K token \d+ head 0 channel \d+ \(block 3\)"
            ):
                owner.cache.probe(owner.tiles, SPARE)
            require_restored(owner)

    @pytest.mark.parametrize("seed", range(20))
    def test_any_two_elements_exchanged_are_found_and_named(self, seed: int) -> None:
        """Oracle: the first of the two in the order of coordinates, and the other as what it holds."""
        owner, chance = Owner("float8_e5m2"), np.random.default_rng(seed)
        size = LAYERS, 2, TOKENS, HEADS, CHANNELS
        first, second = sorted(
            tuple(int(x) for x in np.unravel_index(at, size)) for at in chance.choice(np.prod(size), 2, replace=False)
        )
        given: dict[int, list[torch.Tensor]] = {}

        def write(name: str, block: int, *tensors: torch.Tensor) -> None:
            given[layer_of(name)] = [tensor.clone() for tensor in tensors]
            if layer_of(name) < LAYERS - 1:
                return
            (a, *here), (b, *there) = first, second
            one, other = given[a][here[0]][tuple(here[1:])].clone(), given[b][there[0]][tuple(there[1:])].clone()
            given[a][here[0]][tuple(here[1:])], given[b][there[0]][tuple(there[1:])] = other, one
            for layer, (key, value) in given.items():
                owner.write(names()[layer], block, key, value)

        def words(at: Sequence[int]) -> str:
            return f"layer {at[0]} {'KV'[at[1]]} token {at[2]} head {at[3]} channel {at[4]}"

        with pytest.raises(LayoutError) as refused:
            owner.cache.probe(write, SPARE)
        told = re.match(
            r"probe: buffer full (.*) \(block 3\) holds what was written to buffer full (.*); 2 of 1024 ",
            str(refused.value),
        )
        assert told is not None, str(refused.value)
        assert told.groups() == (words(first), words(second))
        require_restored(owner)

    def test_what_was_not_written_or_elsewhere(self) -> None:
        owner = Owner()
        with pytest.raises(
            LayoutError, match=r"K token 0 head 0 channel 0 .* holds nothing that was written; 1024 of 1024"
        ):
            owner.cache.probe(lambda *_: None, SPARE)
        require_restored(owner)
        with pytest.raises(LayoutError, match="holds nothing that was written; 1024 of 1024"):
            owner.cache.probe(lambda name, block, key, value: owner.write(name, block + 1, key, value), SPARE)

    def test_what_is_left_of_an_earlier_write_counts_for_nothing(self) -> None:
        """1,024 elements take two rounds in bfloat16; this owner's kernel stores in the first one only."""
        owner, calls = Owner(), list[str]()

        def write(name: str, block: int, key: torch.Tensor, value: torch.Tensor) -> None:
            calls.append(name)
            if len(calls) <= LAYERS:
                owner.write(name, block, key, value)

        with pytest.raises(LayoutError, match="holds nothing that was written; 1024 of 1024"):
            owner.cache.probe(write, SPARE)
        assert calls == 2 * names()
        require_restored(owner)

    def test_layers_exchanged(self) -> None:
        owner = Owner()

        def write(name: str, block: int, key: torch.Tensor, value: torch.Tensor) -> None:
            owner.write(names()[1 - layer_of(name)], block, key, value)

        with pytest.raises(
            LayoutError, match=r"layer 0 K token 0 head 0 channel 0 .*written to buffer full layer 1 K token 0"
        ):
            owner.cache.probe(write, SPARE)
        require_restored(owner)

    def test_one_element_that_is_rounded(self) -> None:
        owner = Owner()

        def write(name: str, block: int, key: torch.Tensor, value: torch.Tensor) -> None:
            owner.write(name, block, key, value)
            owner.kv[1, block, 1, 5, CHANNELS + 6] += 0.5

        with pytest.raises(LayoutError, match=r"layer 1 V token 5 head 1 channel 6 .*; 1 of 1024 "):
            owner.cache.probe(write, SPARE)

    def test_what_the_owner_raises_comes_through_and_the_block_is_restored(self) -> None:
        owner = Owner()

        def write(name: str, block: int, key: torch.Tensor, value: torch.Tensor) -> None:
            owner.write(name, block, key, value)
            raise RuntimeError("no such kernel")

        with pytest.raises(RuntimeError, match="no such kernel"):
            owner.cache.probe(write, SPARE)
        require_restored(owner)

    @pytest.mark.parametrize("block", [0, -1, BLOCKS])
    def test_never_the_null_block(self, block: int) -> None:
        owner = Owner()
        with pytest.raises(CacheError, match=rf"block {block} cannot be probed: group full has blocks 1\.\.4"):
            owner.cache.probe(owner.write, block)
        assert not owner.written
        require_restored(owner)

    def test_ranks_that_keep_copies(self) -> None:
        """Four ranks of two heads: a head lies twice, and both copies are looked at."""
        spec = FULL
        kv = [torch.zeros(LAYERS, BLOCKS, 1, TOKENS, 2 * CHANNELS, dtype=torch.bfloat16) for _ in range(4)]
        buffer = ForeignBuffer("full", "full", spec, "vllm_lbhnc", names(), BLOCKS, kv, tp_size=4)
        cache = KVCaches.over([CacheGroup("full", "full", TOKENS, BLOCKS, spec)], [buffer])

        def write(
            name: str, block: int, key: torch.Tensor, value: torch.Tensor, ranks: Sequence[int] = range(4)
        ) -> None:
            for rank in ranks:
                page = kv[rank][layer_of(name), block, 0]
                page[:, :CHANNELS], page[:, CHANNELS:] = key[:, rank // 2], value[:, rank // 2]

        cache.probe(write, SPARE)
        with pytest.raises(LayoutError, match=r"layer 0 block 3: 256 elements differ between ranks that keep copies"):
            cache.probe(partial(write, ranks=(0, 1, 2)), SPARE)
        assert not any(one.any() for one in kv)


def over(spec: KVCacheSpec, layout: str, memory: torch.Tensor) -> KVCaches:
    return KVCaches.over([group_of(spec, BLOCKS)], [ForeignBuffer("b", "g", spec, layout, names(), BLOCKS, memory)])


class TestOtherKinds:
    def test_latent_vectors(self) -> None:
        theirs = torch.randn(LAYERS, BLOCKS, TOKENS, 24).to(torch.bfloat16)
        before, cache = theirs.clone(), over(LATENT, "mla", theirs)

        def write(name: str, block: int, vectors: torch.Tensor, shift: int = 0) -> None:
            theirs[layer_of(name), block] = vectors.roll(shift, 0)

        cache.probe(write, SPARE)
        with pytest.raises(
            LayoutError, match=r"buffer b layer 0 token 0 channel 0 \(block 3\) holds .* token 15 channel 0;"
        ):
            cache.probe(partial(write, shift=1), SPARE)
        assert torch.equal(theirs, before)

    def test_vectors_for_several_tokens_are_named_by_their_first(self) -> None:
        spec = MLAAttentionSpec(block_size=TOKENS, num_kv_heads=1, head_size=24, dtype="bfloat16", compress_ratio=4)
        theirs = torch.zeros(LAYERS, BLOCKS, TOKENS // 4, 24, dtype=torch.bfloat16)
        cache = over(spec, "mla", theirs)

        def write(name: str, block: int, vectors: torch.Tensor, shift: int = 0) -> None:
            theirs[layer_of(name), block] = vectors.roll(shift, 0)

        cache.probe(write, SPARE)
        with pytest.raises(LayoutError, match=r"token 0 channel 0 \(block 3\) holds .* token 12 channel 0;"):
            cache.probe(partial(write, shift=1), SPARE)

    def test_blocks_whose_inside_is_not_known(self) -> None:
        """DeepSeek's indexer: all data of a block, then all scales. That all bytes lie in the block is all there is."""
        spec = MLAAttentionSpec(block_size=TOKENS, num_kv_heads=1, head_size=132, dtype="uint8")
        theirs = torch.zeros(LAYERS, BLOCKS, TOKENS * 132, dtype=torch.uint8)
        cache = over(spec, "deepseek_indexer", theirs)

        def write(name: str, block: int, records: torch.Tensor, missing: int = 0) -> None:
            data = torch.cat((records[:, :128].reshape(-1), records[:, 128:].reshape(-1)))
            theirs[layer_of(name), block, missing:] = data[missing:]

        cache.probe(write, SPARE)
        with pytest.raises(LayoutError, match="holds nothing that was written"):
            cache.probe(partial(write, missing=1), SPARE)
        assert not theirs.any()

    def test_states(self) -> None:
        """A convolution's inputs (inputs, channels) and a recurrence's state, one after another in a page."""
        page = 3 * 10 * 2 + 6 * 5 * 2 * 4
        theirs = torch.zeros(LAYERS, BLOCKS, page, dtype=torch.uint8)
        before = theirs.clone()

        def write(
            name: str, block: int, conv: torch.Tensor, ssm: torch.Tensor, *, channels_first: bool = False
        ) -> None:
            assert (conv.shape, conv.dtype, ssm.shape, ssm.dtype) == ((3, 10), torch.bfloat16, (6, 5, 2), torch.float32)
            inside = conv.T if channels_first else conv
            row = theirs[layer_of(name), block]
            row[:60] = inside.contiguous().view(torch.uint8).reshape(-1)
            row[60:] = ssm.contiguous().view(torch.uint8).reshape(-1)

        first = partial(write, channels_first=True)

        over(STATES, "mamba_sd", theirs).probe(write, SPARE)
        over(STATES, "mamba_ds", theirs).probe(first, SPARE)
        with pytest.raises(
            LayoutError, match=r"layer 0 state conv element \(0, 1\) \(block 3\) holds .* state conv element \(1, 0\);"
        ):
            over(STATES, "mamba_sd", theirs).probe(first, SPARE)
        assert torch.equal(theirs, before)
