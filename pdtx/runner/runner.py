"""A transformers model that keeps all it keeps of a request in paged caches."""

import inspect
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import torch

from pdtx.cache import CacheGroup, KVCaches, torch_dtype
from pdtx.errors import ModelError
from pdtx.layout import parse_layouts
from pdtx.plan import NULL_BLOCK
from pdtx.runner.architecture import Architecture
from pdtx.runner.buffers import CachePlan, make_caches, plan_cache
from pdtx.runner.checkpoint import fingerprint
from pdtx.runner.load import eos_token_ids, load_model, one_line
from pdtx.runner.pages import OnLayer, Pass
from pdtx.runner.probe import gate_biases, inspect_model
from pdtx.runner.quiet import quiet_transformers
from pdtx.runner.sequence import PagedSequence

DTYPES = ("float32", "bfloat16", "float16")
"""The types a model can be run in."""


class ModelRunner:
    """A loaded model that computes tokens of paged sequences; make one with load.

    It keeps nothing of a request: what a forward pass computes depends on the weights, the sequence's pages, the new
    tokens and the number of threads only.
    name: the checkpoint directory's name. fingerprint: see pdtx.runner.fingerprint. dtype: as in DTYPES.
    max_model_len: tokens of a sequence, prompt and answer together. eos_token_ids: tokens that end an answer.
    features_shape: (mel, frames) of the features that a prompt comes with, or None if it has none.
    """

    def __init__(self, path: Path, model: Any, architecture: Architecture, dtype: str) -> None:  # noqa: ANN401
        self.path, self.name, self.dtype = path, path.resolve().name, dtype
        self.fingerprint = fingerprint(path)
        self.device: torch.device = model.device
        self.num_layers, self.max_model_len = len(architecture.layers), architecture.max_model_len
        self.vocab_size = architecture.vocab_size
        self.eos_token_ids = eos_token_ids(model)
        self._model, self._architecture = model, architecture
        self.features_shape = architecture.encoder.features if architecture.encoder else None
        self._plans: dict[int, CachePlan] = {}
        self._biases = gate_biases(model, architecture.layers, self.name)
        # Logits of all but the last token would cost a matrix product over the vocabulary each, for nothing.
        takes = inspect.signature(model.forward).parameters
        self._arguments = {"logits_to_keep": 1} if "logits_to_keep" in takes else {}
        self._positions = next((one for one in ("position_ids", "decoder_position_ids") if one in takes), None)

    @classmethod
    def load(cls, path: Path, dtype: str = "float32", device: str = "cpu", threads: int | None = None) -> Self:
        """Load the checkpoint directory path.

        dtype: one of DTYPES, for weights and K/V. device: a torch device.
        threads: CPU threads of the whole process (torch has one setting); None leaves it. Results can differ in the
        last bits between numbers of threads.
        Raises ModelError if it cannot be read or is of a kind that is not supported.
        """
        if dtype not in DTYPES:
            raise ModelError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
        if threads is not None:
            if threads < 1:
                raise ModelError(f"threads must be 1 or more, not {threads}")
            torch.set_num_threads(threads)
        model = load_model(path, torch_dtype(dtype), device)
        return cls(path, model, inspect_model(model, path.resolve().name), dtype)

    def make_cache(
        self,
        *,
        layout: str = "flash_attn_nhd",
        block_size: int = 16,
        num_blocks: int = 512,
        tp_size: int = 1,
        shared: bool = False,
    ) -> KVCaches:
        """Allocate the model's caches on its device.

        layout: see pdtx.layout.parse_layouts. block_size: tokens in a block. num_blocks: of each group; a group of
        states gets one for each sequence, 65 at most. tp_size: ranks that share the heads. shared: see PagedBuffer.
        Raises LayoutError, SpecError, ParallelError or InputError for what cannot be.
        """
        return make_caches(
            self._plan(block_size), parse_layouts(layout), num_blocks, tp_size, self.device, shared=shared
        )

    def _plan(self, block_size: int) -> CachePlan:
        if block_size not in self._plans:
            self._plans[block_size] = plan_cache(self._architecture, self.dtype, block_size)
        return self._plans[block_size]

    @property
    def resumes(self) -> bool:
        """Whether several tokens can be computed at once after others, see Architecture.continues_states."""
        return self._architecture.continues_states

    def chunk(self, num_tokens: int, chunk_size: int) -> int:
        """Return how many of the num_tokens tokens that are left of a prompt to compute at once: chunk_size at most.

        All of them where the model's states do not go on from pass to pass, see Architecture.continues_states.
        """
        return min(num_tokens, chunk_size) if self._architecture.continues_states else num_tokens

    def encode(self, text: str, chat: bool = False) -> list[int]:
        """Return the token ids of a text; chat: as a user's message in the model's chat template.

        Raises ModelError if there is no tokenizer or chat template, or the text has no tokens.
        """
        tokenizer = self._tokenizer
        if chat and not tokenizer.chat_template:
            raise ModelError(f"model {self.name!r} has no chat template; give the prompt without chat")
        if chat:
            message = [{"role": "user", "content": text}]
            text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
        # A template writes its own special tokens.
        ids = [int(token) for token in tokenizer(text, add_special_tokens=not chat)["input_ids"]]
        if not ids:
            raise ModelError("the prompt has no tokens; give at least one character")
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids, special tokens left out. Raises ModelError if there is no tokenizer."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def forward(
        self,
        sequence: PagedSequence,
        token_ids: Sequence[int],
        on_layer: OnLayer | None = None,
        features: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute token_ids as the sequence's next tokens, appending their K/V; return logits (vocab,) of the last.

        on_layer: called as on_layer(buffer, layer, start, stop) for every layer of every buffer, once what tokens
        start..stop have made of it is in the cache (on a GPU: once its writing is queued on the current stream). If it
        raises, the pass ends there and the sequence keeps its num_tokens.
        features: for a model with features_shape, in the sequence's first pass: float, of that shape.
        Raises ModelError for tokens past max_model_len, too few blocks, or a cache that is not for this model.
        """
        from pdtx.runner.paged import flush, paged_cache

        start, stop = sequence.num_tokens, sequence.num_tokens + len(token_ids)
        plan = self._check(sequence, token_ids)
        run = Pass(start, stop, on_layer)
        cache = paged_cache(self._architecture, plan, sequence, run, self._biases)
        ids = torch.tensor([list(token_ids)], dtype=torch.int64, device=self.device)
        with torch.inference_mode():
            arguments = {
                self._architecture.cache_argument: cache,
                **self._arguments,
                **self._inputs(ids, start, features),
            }
            logits: torch.Tensor = self._model(use_cache=True, **arguments).logits[0, -1]
            flush(cache)
        self._check_stored(plan, run)
        sequence.num_tokens = stop
        return logits

    def _inputs(self, ids: torch.Tensor, start: int, features: torch.Tensor | None) -> dict[str, Any]:
        """Return what the model computes from, by its arguments' names."""
        encoder = self._architecture.encoder
        inputs = dict[str, Any]()
        if self._positions is not None:
            # As transformers' generate does: left to themselves some models count from 0 in every pass.
            inputs[self._positions] = torch.arange(start, start + ids.shape[1], device=self.device)[None]
        if features is not None and (encoder is None or start):
            raise ModelError(
                f"model {self.name!r} takes no features {'after the first pass' if encoder else 'with a prompt'}"
            )
        if encoder is None:
            return inputs | {"input_ids": ids}
        if start:
            # All that the decoder needs of the encoder is in the pages; this only says that there was one.
            nothing = torch.zeros((1, 1, encoder.hidden_size), dtype=self._model.dtype, device=self.device)
            return inputs | {"decoder_input_ids": ids, "encoder_outputs": (nothing,)}
        if features is None or tuple(features.shape) != encoder.features:
            found = "none" if features is None else f"{tuple(features.shape)}"
            raise ModelError(
                f"model {self.name!r} needs features of shape {encoder.features} with a prompt, not {found}"
            )
        given = features.to(self.device, self._model.dtype)[None]
        return inputs | {"decoder_input_ids": ids, "input_features": given}

    def _check_stored(self, plan: CachePlan, run: Pass) -> None:
        """Raise ModelError unless the pass has stored all that it should have."""
        for index, buffer in enumerate(plan.buffers):
            if run.start and plan.groups[buffer.group].kind == "cross":
                continue
            for layer, name in enumerate(buffer.layers):
                if (index, layer) not in run.stored:
                    raise ModelError(
                        f"layer {name} of model {self.name!r} did not store tokens {run.start}..{run.stop} "
                        f"in buffer {buffer.name}"
                    )

    @cached_property
    def _tokenizer(self) -> Any:  # noqa: ANN401 - transformers is not typed
        """Read on first use: a node that only meets token ids needs none."""
        from transformers import AutoTokenizer

        try:
            with quiet_transformers():
                return AutoTokenizer.from_pretrained(self.path, local_files_only=True, trust_remote_code=False)
        except (OSError, ValueError, ImportError) as error:
            raise ModelError(f"model {self.name!r} has no tokenizer that can be read: {one_line(error)}") from error

    def _check(self, sequence: PagedSequence, token_ids: Sequence[int]) -> CachePlan:
        """Return the plan of the sequence's cache. Raises ModelError unless the tokens can be computed into it."""
        if not token_ids:
            raise ModelError("there are no tokens to compute; give at least one")
        if min(token_ids) < 0 or max(token_ids) >= self.vocab_size:
            wrong = next(token for token in token_ids if not 0 <= token < self.vocab_size)
            raise ModelError(f"token {wrong} is not in model {self.name!r}'s vocabulary, 0..{self.vocab_size - 1}")
        start, stop = sequence.num_tokens, sequence.num_tokens + len(token_ids)
        counts = f"{start} tokens and {len(token_ids)} more"
        if stop > self.max_model_len:
            raise ModelError(f"{counts} are over the {self.max_model_len} that model {self.name!r} can take")
        if start and len(token_ids) > 1 and not self._architecture.continues_states:
            raise ModelError(
                f"model {self.name!r} forgets its states when it computes several tokens at once; {counts} cannot be "
                "computed: give a prompt in one piece, then one token at a time"
            )
        plan = self._check_cache(sequence)
        for at, group in enumerate(sequence.cache.groups):
            self._check_table(group, sequence.table(at), range(start, stop), counts)
        return plan

    def _check_table(self, group: CacheGroup, table: torch.Tensor, tokens: range, counts: str) -> None:
        """Raise ModelError unless there is a block for every position that computing tokens touches."""
        places = group.table_blocks(tokens.stop, group.first_read(tokens.start))
        if places.stop > len(table):
            raise ModelError(
                f"{counts} need {places.stop} blocks of {group.block_size} in group {group.name}, "
                f"the sequence has {len(table)}; extend it first"
            )
        lacking = (table[places.start : places.stop] == NULL_BLOCK).nonzero()
        if len(lacking):
            first = (places.start + int(lacking[0])) * group.block_size
            raise ModelError(f"{counts}: there is no block for position {first} of group {group.name}")

    def _check_cache(self, sequence: PagedSequence) -> CachePlan:
        """Return the plan that the sequence's cache must have been made from. Raises ModelError if it was not."""
        cache = sequence.cache
        blocks = [buffer.block_size for buffer in cache.buffers if cache.groups[buffer.group].kind != "state"]
        plan = self._plan(blocks[0] if blocks else 1)
        wanted = [(one.name, one.spec, one.layer_names) for one in plan.buffers]
        found = [(buffer.name, buffer.spec, list(buffer.layer_names)) for buffer in cache.buffers]
        if wanted != found:
            first = next((pair for pair in zip(found, wanted, strict=False) if pair[0] != pair[1]), None)
            what = f"buffer {first[0][0]} has {_difference(*first)}" if first else f"it has {len(found)} buffers"
            raise ModelError(f"the cache is not for model {self.name!r}: {what}; make it with the model's make_cache")
        if cache.device.type != self.device.type:
            raise ModelError(f"the cache is on {cache.device}, model {self.name!r} on {self.device}; use one device")
        return plan


def _difference(found: tuple[str, Any, list[str]], wanted: tuple[str, Any, list[str]]) -> str:
    """Say in what a buffer differs from the one that should be there."""
    for what, ours, theirs in zip(("name", "spec", "layers"), found, wanted, strict=True):
        if ours != theirs and type(ours) is type(theirs) and is_dataclass(ours):
            names = (one.name for one in fields(ours))
            name = next(name for name in names if getattr(ours, name) != getattr(theirs, name))
            return f"{name} {getattr(ours, name)}, not {getattr(theirs, name)}"
        if what == "layers" and len(ours) != len(theirs):
            return f"{len(ours)} layers, not {len(theirs)}"
        if ours != theirs:
            return f"{what} {ours}, not {theirs}"
    return "nothing wrong"


def greedy(logits: torch.Tensor) -> int:
    """Return the most likely token of logits (vocab,); the lowest id among equals.

    Raises ModelError if they are not numbers, as after reading pages that nothing was written to.
    """
    # argmax promises no order among equal logits, which bfloat16 makes common.
    best = torch.nonzero(logits == logits.max())
    if not len(best):
        raise ModelError("the model computed NaN; its weights or the K/V in the cache are damaged")
    return int(best[0])


def prefill(
    runner: ModelRunner,
    sequence: PagedSequence,
    token_ids: Sequence[int],
    chunk_size: int,
    on_layer: OnLayer | None = None,
    features: torch.Tensor | None = None,
) -> int:
    """Compute a prompt in chunks of at most chunk_size tokens and return the first token of the answer, greedily.

    A model whose states do not go on computes it in one piece, see ModelRunner.chunk.
    on_layer, features: as in ModelRunner.forward; on_layer is called for every layer of every chunk.
    Raises ModelError as ModelRunner.forward does.
    """
    if chunk_size < 1:
        raise ModelError(f"the chunk size must be 1 token or more, not {chunk_size}")
    if not token_ids:
        raise ModelError("there are no tokens to compute; give at least one")
    logits, left = torch.empty(0), list(token_ids)
    while left:
        size = runner.chunk(len(left), chunk_size)
        logits = runner.forward(sequence, left[:size], on_layer, features)
        left, features = left[size:], None
    return greedy(logits)
