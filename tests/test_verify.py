from collections.abc import Iterator
from itertools import product

import numpy as np
import pytest
import torch

from pdtx.cache import POISON, CoordinateCodes, Mismatch, compare, describe_mismatch
from pdtx.cache.verify import NOTHING_COMPARED, Coordinate, Meant, Naming, Rows, Verification, find_row, is_poison

LAYERS, TOKENS, HEADS, CHANNELS = 2, 12, 3, 4
SHAPE = CoordinateCodes(layers=LAYERS, tokens=TOKENS, heads=HEADS, channels=CHANNELS, itemsize=2)


def rows_of(codes: CoordinateCodes, layer: int) -> Rows:
    """Canonical bytes of one layer."""
    words = codes.of(range(layer, layer + 1), range(codes.tokens))[0]
    return torch.from_numpy(np.ascontiguousarray(words).view(np.uint8))


def reference() -> Iterator[Meant]:
    for layer in range(LAYERS):
        yield Meant(layer, 0, rows_of(SHAPE, layer))


def block_of(token: int) -> int:
    """Blocks 5, 9 and 2 of four tokens."""
    return (5, 9, 2)[token // 4]


def described(result: Verification) -> str:
    assert result.first is not None
    return describe_mismatch(result.first, reference(), block_of, 2)


class TestCodes:
    def test_plain_codes_are_the_acceptance_formula(self) -> None:
        """code(l,kv,p,h,d) = ((((l*2+kv)*P + p)*H + h)*D + d)."""
        codes = SHAPE.of(range(LAYERS), range(TOKENS))
        assert SHAPE.plain
        assert codes.shape == (LAYERS, 2, TOKENS, HEADS, CHANNELS)
        assert codes.dtype == np.uint16
        for l, kv, p, h, d in product(*(range(n) for n in codes.shape)):  # noqa: E741 - the formula's own letters
            assert codes[l, kv, p, h, d] == (((l * 2 + kv) * TOKENS + p) * HEADS + h) * CHANNELS + d

    @pytest.mark.parametrize("itemsize", [1, 2, 4])
    def test_plain_while_the_last_index_fits(self, itemsize: int) -> None:
        last = 1 << (8 * itemsize)
        fits = CoordinateCodes(layers=1, tokens=last // 8, heads=2, channels=2, itemsize=itemsize)
        assert fits.plain
        beyond = CoordinateCodes(layers=1, tokens=last // 8 + 1, heads=2, channels=2, itemsize=itemsize)
        assert not beyond.plain

    @pytest.mark.parametrize("itemsize", [1, 2, 4])
    def test_parts_are_parts_of_the_whole(self, itemsize: int) -> None:
        codes = CoordinateCodes(layers=4, tokens=50, heads=2, channels=8, itemsize=itemsize)
        whole = codes.of(range(4), range(50))
        assert whole.dtype.itemsize == itemsize
        assert np.array_equal(codes.of(range(1, 3), range(7, 50)), whole[1:3, :, 7:50])
        assert codes.of(range(2, 2), range(5)).shape == (0, 2, 5, 2, 8)

    def test_truncation_would_repeat_and_mixing_does_not(self) -> None:
        """With 2 * P * H * D a multiple of 65,536, truncated codes of all layers, and of K and V, are the same."""
        codes = CoordinateCodes(layers=3, tokens=128, heads=8, channels=64, itemsize=2)
        assert not codes.plain
        words = codes.of(range(3), range(128))
        truncated = np.arange(words.size, dtype=np.uint64).astype(np.uint16).reshape(words.shape)
        assert np.array_equal(truncated[0, 0], truncated[2, 1]), "the shape must be one that truncation fails on"
        rows = words.reshape(-1, 64)
        assert len(np.unique(rows, axis=0)) == len(rows)

    def test_mixed_codes_are_the_same_on_every_machine(self) -> None:
        codes = CoordinateCodes(layers=64, tokens=1024, heads=8, channels=128, itemsize=4)
        assert codes.plain  # 2^27 elements
        mixed = CoordinateCodes(layers=64, tokens=1024, heads=8, channels=128, itemsize=2)
        first = mixed.of(range(1), range(1))[0, 0, 0, 0, :4]
        # splitmix64's outputs for the states 0..3, upper word, lower half.
        expected = [(splitmix64(index) >> 32) & 0xFFFF for index in range(4)]
        assert first.tolist() == expected

    def test_poison_is_the_agreed_word(self) -> None:
        assert POISON & 0xFFFF == 0xDEAD


def splitmix64(state: int) -> int:
    """As published, in Python's integers."""
    mask = (1 << 64) - 1
    z = (state + 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


class TestCompare:
    def test_equal(self) -> None:
        result = compare(rows_of(SHAPE, 1), rows_of(SHAPE, 1), layer=1, start=0, itemsize=2)
        assert result == Verification(2 * TOKENS * HEADS * CHANNELS, 0, None)

    @pytest.mark.parametrize("byte", [0, 1])
    @pytest.mark.parametrize("at", [(0, 0, 0, 0), (1, 7, 2, 3), (0, 11, 1, 2)])
    def test_one_flipped_bit(self, at: tuple[int, int, int, int], byte: int) -> None:
        kv, token, head, channel = at
        found = rows_of(SHAPE, 1)
        found[kv, token, head, channel * 2 + byte] ^= 0x10
        result = compare(found, rows_of(SHAPE, 1), layer=1, start=0, itemsize=2)
        assert result.wrong == 1
        assert result.first is not None
        assert result.first.coordinate == Coordinate(1, kv, token, head, channel)

    def test_counts_elements_and_not_bytes(self) -> None:
        found = rows_of(SHAPE, 0)
        found[1, 2:5] ^= 0xFF
        result = compare(found, rows_of(SHAPE, 0), layer=0, start=0, itemsize=2)
        assert result.wrong == 3 * HEADS * CHANNELS
        assert result.compared == 2 * TOKENS * HEADS * CHANNELS

    @pytest.mark.parametrize("seed", range(10))
    def test_random_damage_is_counted_exactly(self, seed: int) -> None:
        chance = np.random.default_rng(seed)
        places = chance.choice(2 * TOKENS * HEADS * CHANNELS, 1 + seed * 7, replace=False)
        found = rows_of(SHAPE, 0)
        found.view(torch.int16).reshape(-1)[torch.from_numpy(places)] ^= 0x0100
        result = compare(found, rows_of(SHAPE, 0), layer=0, start=0, itemsize=2)
        assert result.wrong == len(places)
        assert result.first is not None
        kv, token, head, channel = np.unravel_index(places.min(), (2, TOKENS, HEADS, CHANNELS))
        assert result.first.coordinate == Coordinate(0, int(kv), int(token), int(head), int(channel))

    def test_positions_count_from_start(self) -> None:
        found = rows_of(SHAPE, 0)[:, 5:9]
        expected = found.clone()
        found = found.clone()
        found[0, 2, 1, 0] ^= 1
        result = compare(found, expected, layer=0, start=5, itemsize=2)
        assert result.first is not None
        assert str(result.first.coordinate) == "layer 0 K token 7 head 1 channel 0"

    def test_layers_add_up_and_keep_the_first_fault(self) -> None:
        total, broken = NOTHING_COMPARED, rows_of(SHAPE, 1)
        broken[0, 0] ^= 1
        for layer, found in ((0, rows_of(SHAPE, 0)), (1, broken), (1, broken)):
            total += compare(found, rows_of(SHAPE, layer), layer=layer, start=0, itemsize=2)
        assert total.compared == 3 * 2 * TOKENS * HEADS * CHANNELS
        assert total.first is not None
        assert total.first.coordinate == Coordinate(1, 0, 0, 0)


class TestTrueSourceIsNamed:
    """Each classic fault: the first wrong coordinate, where its value comes from, and how many are wrong."""

    def check(self, found: Rows, message: str, wrong: int, layer: int = 0) -> None:
        result = compare(found, rows_of(SHAPE, layer), layer=layer, start=0, itemsize=2)
        assert described(result) == message
        assert result.wrong == wrong

    def test_two_heads_swapped(self) -> None:
        found = rows_of(SHAPE, 0)[:, :, [0, 2, 1]]
        message = "layer 0 K token 0 head 1 channel 0 (block 5) holds the value of layer 0 K token 0 head 2"
        self.check(found, message, 2 * TOKENS * 2 * CHANNELS)

    def test_k_and_v_swapped(self) -> None:
        found = rows_of(SHAPE, 0).flip(0)
        message = "layer 0 K token 0 head 0 channel 0 (block 5) holds the value of layer 0 V token 0 head 0"
        self.check(found, message, 2 * TOKENS * HEADS * CHANNELS)

    def test_two_blocks_swapped(self) -> None:
        found = rows_of(SHAPE, 1)[:, [0, 1, 2, 3, 8, 9, 10, 11, 4, 5, 6, 7]]
        message = "layer 1 K token 4 head 0 channel 0 (block 9) holds the value of layer 1 K token 8 head 0"
        self.check(found, message, 2 * 8 * HEADS * CHANNELS, layer=1)

    def test_a_layer_too_far(self) -> None:
        message = "layer 0 K token 0 head 0 channel 0 (block 5) holds the value of layer 1 K token 0 head 0"
        self.check(rows_of(SHAPE, 1), message, 2 * TOKENS * HEADS * CHANNELS)

    def test_one_token_late(self) -> None:
        found = rows_of(SHAPE, 0)
        found[:, 4:8] = found[:, 3:7].clone()
        message = "layer 0 K token 4 head 0 channel 0 (block 9) holds the value of layer 0 K token 3 head 0"
        self.check(found, message, 2 * 4 * HEADS * CHANNELS)

    def test_never_written(self) -> None:
        found = rows_of(SHAPE, 0)
        found[1, 9:].view(torch.int16).fill_(POISON)
        message = "layer 0 V token 9 head 0 channel 0 (block 2) was never written: it holds poison"
        self.check(found, message, 3 * HEADS * CHANNELS)

    def test_an_alien_value(self) -> None:
        found = rows_of(SHAPE, 0)
        found[0, 6, 1, 4:6] = torch.tensor([0xEF, 0xBE], dtype=torch.uint8)
        code = (6 * HEADS + 1) * CHANNELS + 2
        message = f"layer 0 K token 6 head 1 channel 2 (block 9) is 0xbeef, should be 0x{code:04x}; "
        self.check(found, message + "no row of the source holds this value", 1)

    def test_the_reference_is_read_only_as_far_as_needed(self) -> None:
        read = list[int]()

        def parts() -> Iterator[Meant]:
            for meant in reference():
                read.append(meant.layer)
                yield meant

        mismatch = Mismatch(Coordinate(1, 0, 0, 0), rows_of(SHAPE, 0)[1, 3, 2], rows_of(SHAPE, 1)[0, 0, 0])
        assert describe_mismatch(mismatch, parts(), block_of, 2).endswith("holds the value of layer 0 V token 3 head 2")
        assert read == [0]


def test_find_row() -> None:
    meant = Meant(1, 100, rows_of(SHAPE, 1))
    assert find_row(meant.rows[1, 4, 2], meant) == Coordinate(1, 1, 104, 2)
    assert find_row(rows_of(SHAPE, 0)[0, 0, 0], meant) is None
    assert find_row(meant.rows[1, 4, 2, :-1], meant) is None, "rows of another size are of another buffer"


class TestNaming:
    """What coordinates are called: only what tells them apart."""

    @pytest.mark.parametrize(
        ("naming", "text"),
        [
            (Naming(), "layer 3 V token 5 head 1 channel 7"),
            (Naming("full", "full"), "buffer full layer 3 V token 5 head 1 channel 7"),
            (Naming("latent", "full", kind="record", heads=1), "group full buffer latent layer 3 token 5 channel 7"),
            (Naming("hidden", "", kind="record", heads=4), "buffer hidden layer 3 token 5 head 1 channel 7"),
            (Naming("state", "state", kind="state"), "buffer state layer 3 byte 7"),
        ],
    )
    def test_by_kind(self, naming: Naming, text: str) -> None:
        assert str(Coordinate(3, 1, 5, 1, 7, naming)) == text

    @pytest.mark.parametrize(
        ("name", "text"),
        [
            ("layers.1", "layer 1"),
            ("model.layers.1.self_attn", "layer 1"),
            ("layers.11", "layer 1 (layers.11)"),
            ("layers.0", "layer 1 (layers.0)"),
            ("draft", "layer 1 (draft)"),
        ],
    )
    def test_a_layers_name_is_told_where_it_counts_differently(self, name: str, text: str) -> None:
        assert Naming(layers=("other", name)).layer(1) == text

    def test_a_coordinate_is_the_same_whatever_it_is_called(self) -> None:
        assert Coordinate(1, 0, 2, 3, naming=Naming("full")) == Coordinate(1, 0, 2, 3)

    def test_the_source_is_named_with_its_own_buffer(self) -> None:
        latent, state = Naming("latent", "full", kind="record", heads=1), Naming("state", "state", kind="state")
        rows = torch.arange(24, dtype=torch.uint8).view(1, 3, 1, 8)
        alien = torch.arange(50, 58, dtype=torch.uint8).view(1, 1, 1, 8)
        found = rows.clone()
        found[0, 1, 0] = alien[0, 0, 0]
        result = compare(found, rows, layer=0, start=0, itemsize=2, naming=latent)
        assert result.first is not None
        meant = [Meant(0, 0, rows, latent), Meant(2, 0, alien, state)]
        text = describe_mismatch(result.first, meant, lambda token: 7, 2)
        where = "group full buffer latent layer 0 token 1 channel 0 (block 7)"
        assert text == f"{where} holds the value of buffer state layer 2"


@pytest.mark.parametrize("length", [1, 2, 3, 8, 9])
def test_poison_is_seen_at_any_length_and_place(length: int) -> None:
    """States may be of an odd number of bytes, and begin at an odd one."""
    memory = torch.full((16,), POISON, dtype=torch.int16).view(torch.uint8)
    for start in (0, 1):
        row = memory[start : start + length].clone()
        assert is_poison(row)
        row[-1] ^= 1
        assert not is_poison(row)


@pytest.mark.parametrize("itemsize", [1, 2, 4])
def test_every_swap_of_two_rows_is_seen(itemsize: int) -> None:
    """Whatever the element's size, codes make any two exchanged rows show."""
    codes = CoordinateCodes(layers=1, tokens=16, heads=4, channels=16, itemsize=itemsize)
    rows = rows_of(codes, 0)
    flat = rows.reshape(-1, rows.shape[-1])
    assert len(torch.unique(flat, dim=0)) == len(flat)
