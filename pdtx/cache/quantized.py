"""A paged cache of quantized keys and values, with their scales in the page, as bytes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from pdtx.cache.buffer import PagedBuffer, RankMemory
from pdtx.cache.tokens import put_tokens, take_tokens
from pdtx.cache.verify import Kind
from pdtx.errors import CacheError, LayoutError
from pdtx.kvspec import TURBOQUANT_PRESETS, AttentionSpec, TQFullAttentionSpec, TurboQuantSlot
from pdtx.layout import VALUE_SCALE_GROUP, QuantizedLayout, RecordLayout
from pdtx.parallel import heads_of_rank
from pdtx.units import ceil_div

_TOKENS = ("block", "token", "head", "byte")


@dataclass(frozen=True)
class QuantizedField:
    """Some bytes of a head's row: its elements, or its scales. part: of the layout; first: byte of its record there."""

    name: str
    part: int
    first: int
    nbytes: int


class PagedQuantizedCache(PagedBuffer):
    """A buffer of layers whose keys and values are quantized, each head with its scales beside its elements.

    layout: a preset of RECORD_ORDERS for the spec's mode. Nothing is decoded: a head's row is its bytes, elements
    first, then scales, in one order for all layouts. fields: what those are. Of TurboQuant one row is key, value and
    padding of a head; of the others K and V have a row each.
    Rank r holds the heads heads_of_rank(r, tp_size, spec.num_kv_heads).
    Raises LayoutError, SpecError or ParallelError for impossible numbers, InputError if the memory cannot be had.
    """

    spec: AttentionSpec
    layout: RecordLayout | QuantizedLayout
    itemsize = 1

    usual_name, usual_layout = "full", "triton_per_token_head_nhd"
    kind: ClassVar[Kind] = "kv"

    def _open(self) -> None:
        self.fields = _fields(self.spec, self.layout)
        self.planes = 2 if "kv" in self.layout.parts[0].layout.by_name else 1
        self._heads = [heads_of_rank(rank, self.tp_size, self.spec.num_kv_heads) for rank in self.tp_ranks]
        # The first rank here that holds a head speaks for it.
        self._owners = [
            place
            for place, heads in enumerate(self._heads)
            if all(heads.start not in earlier for earlier in self._heads[:place])
        ]
        self._views = [
            [[self._plane(rank, layer, kv) for kv in range(self.planes)] for layer in range(self.num_layers)]
            for rank in self.ranks
        ]

    def _check_layout(self) -> None:
        if not isinstance(self.layout, RecordLayout | QuantizedLayout):
            raise LayoutError(f"{self.layout.name} does not hold quantized heads, as buffer {self.name} needs")
        lacking = {"head", "byte", "token"} & {
            axis for part in self.layout.parts for axis in getattr(part.layout, "opaque", ()) if axis != "byte"
        }
        if lacking:
            raise LayoutError(
                f"{self.layout.name}: which bytes are whose scale is not known where its axes are in this order; "
                "choose flashinfer_nvfp4_nhd, flashinfer_nvfp4_hnd or nvfp4_lbhnc"
            )

    def _plane(self, rank: RankMemory, layer: int, kv: int) -> list[torch.Tensor]:
        """Each field of K or V of a layer: uint8, (block steps, tokens of a step, heads, bytes)."""
        at = {"layer": layer, "kv": kv} if self.planes == 2 else {"layer": layer}
        parts = rank.layout.parts
        return [
            rank.view(parts[field.part], _TOKENS, torch.uint8, at)[..., field.first : field.first + field.nbytes]
            for field in self.fields
        ]

    def write(self, layer: int, block_ids: torch.Tensor, start: int, *fields: torch.Tensor) -> None:
        """Store tokens start.. of a layer: for each of fields uint8, (planes, T, heads of the model, bytes).

        planes: K and V, or the one row of TurboQuant. block_ids: as in PagedKVCache.write. Raises CacheError for other
        fields, or if the blocks are too few.
        """
        heads, count = self.spec.num_kv_heads, fields[0].shape[1] if fields else 0
        meant = [(self.planes, count, heads, field.nbytes) for field in self.fields]
        if [tuple(each.shape) for each in fields] != meant:
            names = ", ".join(f"{field.name} {shape}" for field, shape in zip(self.fields, meant, strict=True))
            raise CacheError(f"buffer {self.name} takes {names}, not {[tuple(each.shape) for each in fields]}")
        self._check_fit(block_ids, start, start + count)
        steps = self._steps(block_ids)
        for own, layers in zip(self._heads, self._views, strict=True):
            for kv, views in enumerate(layers[layer]):
                for number, (view, rows) in enumerate(zip(views, fields, strict=True)):
                    put = _put_value_scales if self._interleaved(kv, number) else put_tokens
                    put(view, steps, start, rows[kv][:, own.start : own.stop])

    def read(self, layer: int, block_ids: torch.Tensor, start: int, stop: int) -> tuple[torch.Tensor, ...]:
        """Return copies of what write() takes. Raises CacheError if blocks are too few, or not all ranks are here."""
        self.require_all_ranks()
        self._check_fit(block_ids, start, stop)
        rows = torch.cat([self._rows(place, layer, block_ids, start, stop) for place in self._owners], 2)
        return tuple(torch.split(rows, [field.nbytes for field in self.fields], -1))

    def _rows(self, place: int, layer: int, block_ids: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        """Return what a rank here holds of tokens start..stop: (planes, T, its heads, bytes of a head)."""
        steps = self._steps(block_ids)
        planes = list[torch.Tensor]()
        for kv, views in enumerate(self._views[place][layer]):
            takes = [
                _take_value_scales if self._interleaved(kv, number) else take_tokens for number in range(len(views))
            ]
            found = [take(view, steps, start, stop) for take, view in zip(takes, views, strict=True)]
            planes.append(torch.cat(found, -1))
        return torch.stack(planes)

    def _interleaved(self, kv: int, number: int) -> bool:
        """Whether a field of K (0) or V (1) does not lie token by token."""
        return isinstance(self.layout, QuantizedLayout) and kv == 1 and self.fields[number].name == "scale"

    def block_tensors(self) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
        """Return shape and dtype of each field of a block, see PagedBuffer."""
        heads = self.spec.num_kv_heads
        return tuple(((self.planes, self.block_size, heads, one.nbytes), torch.uint8) for one in self.fields)

    def read_block(self, layer: int, block_id: int) -> tuple[torch.Tensor, ...]:
        """Return the fields of a block, see PagedBuffer."""
        return self.read(layer, torch.tensor([block_id], device=self.device), 0, self.block_size)

    def rows_shape(self, positions: int) -> tuple[int, int, int, int]:
        """Return (2, or 1 of TurboQuant, positions, heads, bytes of a head with its scales)."""
        return self.planes, positions, self.spec.num_kv_heads, sum(field.nbytes for field in self.fields)

    @property
    def row_fields(self) -> Sequence[tuple[str, int]]:
        """The names of the bytes of a row, see Naming."""
        return tuple((field.name, field.nbytes) for field in self.fields)

    def common_units(self, rank: int, other_rank: int, other_tp: int) -> range:
        """Return the KV heads that both ranks hold, see PagedBuffer."""
        heads = self.spec.num_kv_heads
        ours, theirs = heads_of_rank(rank, self.tp_size, heads), heads_of_rank(other_rank, other_tp, heads)
        return range(max(ours.start, theirs.start), min(ours.stop, theirs.stop))

    def common_rows(
        self, rank: int, other_rank: int, other_tp: int, layer: int, block_ids: torch.Tensor, start: int, stop: int
    ) -> torch.Tensor:
        """Return the bytes of tokens start..stop of the KV heads that both ranks hold, see PagedBuffer."""
        place, units = self.place_of(rank), self.common_units(rank, other_rank, other_tp)
        self._check_fit(block_ids, start, stop)
        first = self._heads[place].start
        own = slice(units.start - first, max(units.start, units.stop) - first)
        return self._rows(place, layer, block_ids, start, stop)[:, :, own].cpu()

    def canonical(self, layer: int, block_ids: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        """Return the bytes of tokens start..stop, see PagedBuffer."""
        return torch.cat(self.read(layer, block_ids, start, stop), -1).cpu()

    def write_canonical(self, layer: int, block_ids: torch.Tensor, start: int, rows: torch.Tensor) -> None:
        """Store the bytes of tokens start.., see PagedBuffer."""
        self.require_all_ranks()
        fields = torch.split(rows.to(self.device), [field.nbytes for field in self.fields], -1)
        self.write(layer, block_ids, start, *fields)

    def replicas_differ(self, layer: int, block_ids: torch.Tensor, start: int, stop: int) -> int:
        """Count bytes in which a rank's copy of a head is not that of the first rank that holds it."""
        self._check_fit(block_ids, start, stop)
        differing, owner = 0, 0
        for place in range(len(self.ranks)):
            if place in self._owners:
                owner = place
                continue
            copies = [self._rows(one, layer, block_ids, start, stop) for one in (owner, place)]
            differing += int(torch.ne(*copies).sum())
        return differing


def _take_value_scales(view: torch.Tensor, steps: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """take_tokens() of NVFP4's value scales: (T, heads, scales), each token's own."""
    first = start // VALUE_SCALE_GROUP * VALUE_SCALE_GROUP
    rows = take_tokens(view, steps, first, ceil_div(stop, VALUE_SCALE_GROUP) * VALUE_SCALE_GROUP)
    # In memory: (groups, quarters of a token's scales, heads, scales of a quarter, tokens of a group).
    groups, scales = rows.shape[0] // VALUE_SCALE_GROUP, rows.shape[-1] // VALUE_SCALE_GROUP
    grouped = rows.view(groups, VALUE_SCALE_GROUP, rows.shape[1], scales, VALUE_SCALE_GROUP)
    return grouped.permute(0, 4, 2, 1, 3).reshape(rows.shape)[start - first : stop - first]


def _put_value_scales(view: torch.Tensor, steps: torch.Tensor, start: int, rows: torch.Tensor) -> None:
    """put_tokens() of NVFP4's value scales: those of other tokens in the first and the last group are kept."""
    first, stop = start // VALUE_SCALE_GROUP * VALUE_SCALE_GROUP, start + len(rows)
    scales = _take_value_scales(view, steps, first, ceil_div(stop, VALUE_SCALE_GROUP) * VALUE_SCALE_GROUP)
    scales[start - first : stop - first] = rows
    groups, per_quarter = scales.shape[0] // VALUE_SCALE_GROUP, scales.shape[-1] // VALUE_SCALE_GROUP
    grouped = scales.reshape(groups, VALUE_SCALE_GROUP, scales.shape[1], VALUE_SCALE_GROUP, per_quarter)
    put_tokens(view, steps, first, grouped.permute(0, 3, 2, 4, 1).reshape(scales.shape))


def _fields(spec: AttentionSpec, layout: RecordLayout | QuantizedLayout) -> tuple[QuantizedField, ...]:
    """Return what a head's row consists of."""
    widths = [part.layout.extent("byte") for part in layout.parts]
    if isinstance(layout, QuantizedLayout):
        return QuantizedField("element", 0, 0, widths[0]), QuantizedField("scale", 1, 0, widths[1])
    if isinstance(spec, TQFullAttentionSpec):
        key, value = _turboquant(spec)
        rest = widths[0] - key - value
        fields = QuantizedField("key", 0, 0, key), QuantizedField("value", 0, key, value)
        return (*fields, QuantizedField("padding", 0, key + value, rest)) if rest else fields
    if spec.kv_quant_mode.is_per_token_head:
        scale = 4
        return QuantizedField("element", 0, 0, widths[0] - scale), QuantizedField("scale", 0, widths[0] - scale, scale)
    raise LayoutError(f"{layout.name} holds {type(spec).__name__} with {spec.kv_quant_mode.value}: not quantized heads")


def _turboquant(spec: TQFullAttentionSpec) -> tuple[int, int]:
    """Return the bytes of key and value of the preset that comes to the spec's slot; halves where that is not one."""
    found = set[tuple[int, int]]()
    for preset in TURBOQUANT_PRESETS:
        slot = TurboQuantSlot(preset=preset, head_size=spec.head_size)
        if slot.slot_bytes_aligned == spec.tq_slot_size:
            found.add((slot.key_packed_bytes, slot.value_packed_bytes))
    if len(found) == 1:
        return found.pop()
    return ceil_div(spec.tq_slot_size, 2), spec.tq_slot_size // 2
