"""A transformers model whose keys and values live in a PagedKVCache."""

import inspect
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import torch

from pdtx.cache import torch_dtype
from pdtx.errors import ModelError
from pdtx.kvspec import FullAttentionSpec
from pdtx.runner.architecture import Architecture, check_config, inspect_model
from pdtx.runner.checkpoint import fingerprint
from pdtx.runner.quiet import quiet_transformers
from pdtx.runner.sequence import PagedSequence

DTYPES = ("float32", "bfloat16", "float16")
"""The types a model can be run in."""


class ModelRunner:
    """A loaded causal language model that computes tokens of paged sequences; make one with load.

    It keeps nothing of a request: what a forward pass computes depends on the weights, the sequence's pages, the new
    tokens and the number of threads only.
    name: the checkpoint directory's name. fingerprint: see pdtx.runner.fingerprint. dtype: as in DTYPES.
    max_model_len: tokens of a sequence, prompt and answer together. eos_token_ids: tokens that end an answer.
    """

    def __init__(self, path: Path, model: Any, architecture: Architecture, dtype: str) -> None:  # noqa: ANN401
        self.path, self.name, self.dtype = path, path.resolve().name, dtype
        self.fingerprint = fingerprint(path)
        self.device: torch.device = model.device
        self.num_layers, self.max_model_len = len(architecture.layer_kinds), architecture.max_model_len
        self.vocab_size = architecture.vocab_size
        self.eos_token_ids = _eos_token_ids(model)
        self._model, self._architecture = model, architecture
        # Logits of all but the last token would cost a matrix product over the vocabulary each, for nothing.
        takes = inspect.signature(model.forward).parameters
        self._arguments = {"logits_to_keep": 1} if "logits_to_keep" in takes else {}

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
        model = _load_model(path, torch_dtype(dtype), device)
        return cls(path, model, inspect_model(model, path.resolve().name), dtype)

    def kv_cache_spec(self, block_size: int) -> FullAttentionSpec:
        """Return the spec of each layer's cache. Raises SpecError for an impossible block_size."""
        facts = self._architecture
        return FullAttentionSpec(
            block_size=block_size,
            num_kv_heads=facts.num_kv_heads,
            head_size=facts.head_size,
            head_size_v=facts.head_size_v,
            dtype=self.dtype,
        )

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
        on_layer: Callable[[int, int, int], None] | None = None,
    ) -> torch.Tensor:
        """Compute token_ids as the sequence's next tokens, appending their K/V; return logits (vocab,) of the last.

        on_layer: called as on_layer(layer, start, stop), in the order of layers, once K/V of tokens start..stop of a
        layer are in the cache (on a GPU: once their writing is queued on the current stream). If it raises, the pass
        ends there and the sequence keeps its num_tokens.
        Raises ModelError for tokens past max_model_len, too few blocks, or a cache that is not for this model.
        """
        from pdtx.runner.paged import paged_cache

        self._check(sequence, token_ids)
        start, stop = sequence.num_tokens, sequence.num_tokens + len(token_ids)
        cache = paged_cache(self._architecture.layer_kinds, sequence.cache, sequence.block_ids, start, on_layer)
        ids = torch.tensor([list(token_ids)], dtype=torch.int64, device=self.device)
        with torch.inference_mode():
            arguments = {self._architecture.cache_argument: cache, **self._arguments}
            logits: torch.Tensor = self._model(input_ids=ids, use_cache=True, **arguments).logits[0, -1]
        for layer, paged in enumerate(cache.layers):
            if paged.get_seq_length() != stop:
                raise ModelError(
                    f"layer {layer} of model {self.name!r} did not store the K/V of tokens {start}..{stop}"
                )
        sequence.num_tokens = stop
        return logits

    @cached_property
    def _tokenizer(self) -> Any:  # noqa: ANN401 - transformers is not typed
        """Read on first use: a node that only meets token ids needs none."""
        from transformers import AutoTokenizer

        try:
            with quiet_transformers():
                return AutoTokenizer.from_pretrained(self.path, local_files_only=True, trust_remote_code=False)
        except (OSError, ValueError, ImportError) as error:
            raise ModelError(f"model {self.name!r} has no tokenizer that can be read: {_one_line(error)}") from error

    def _check(self, sequence: PagedSequence, token_ids: Sequence[int]) -> None:
        """Raise ModelError unless the tokens can be computed into the sequence's blocks."""
        if not token_ids:
            raise ModelError("there are no tokens to compute; give at least one")
        if min(token_ids) < 0 or max(token_ids) >= self.vocab_size:
            wrong = next(token for token in token_ids if not 0 <= token < self.vocab_size)
            raise ModelError(f"token {wrong} is not in model {self.name!r}'s vocabulary, 0..{self.vocab_size - 1}")
        stop = sequence.num_tokens + len(token_ids)
        counts = f"{sequence.num_tokens} tokens and {len(token_ids)} more"
        if stop > self.max_model_len:
            raise ModelError(f"{counts} are over the {self.max_model_len} that model {self.name!r} can take")
        if stop > sequence.capacity:
            size = sequence.cache.spec.block_size
            needed, present = -(-stop // size), len(sequence.block_ids)
            raise ModelError(f"{counts} need {needed} blocks of {size}, the sequence has {present}; extend it first")
        self._check_cache(sequence)

    def _check_cache(self, sequence: PagedSequence) -> None:
        cache = sequence.cache
        wanted = self.kv_cache_spec(cache.spec.block_size)
        for field in ("num_kv_heads", "head_size", "head_size_v", "dtype"):
            mine, its = getattr(wanted, field), getattr(cache.spec, field)
            if mine != its:
                raise ModelError(f"the cache's {field} is {its}, model {self.name!r} has {mine}; use its kv_cache_spec")
        if cache.num_layers != self.num_layers:
            raise ModelError(f"the cache has {cache.num_layers} layers, model {self.name!r} has {self.num_layers}")
        if cache.device.type != self.device.type:
            raise ModelError(f"the cache is on {cache.device}, model {self.name!r} on {self.device}; use one device")


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
    on_layer: Callable[[int, int, int], None] | None = None,
) -> int:
    """Compute a prompt in chunks of at most chunk_size tokens and return the first token of the answer, greedily.

    on_layer: as in ModelRunner.forward; called for every layer of every chunk.
    Raises ModelError as ModelRunner.forward does.
    """
    if chunk_size < 1:
        raise ModelError(f"the chunk size must be 1 token or more, not {chunk_size}")
    if not token_ids:
        raise ModelError("there are no tokens to compute; give at least one")
    logits = torch.empty(0)
    for start in range(0, len(token_ids), chunk_size):
        logits = runner.forward(sequence, token_ids[start : start + chunk_size], on_layer)
    return greedy(logits)


def _one_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _load_model(path: Path, dtype: torch.dtype, device: str) -> Any:  # noqa: ANN401 - transformers is not typed
    """Return the model in evaluation mode on the device."""
    try:
        from huggingface_hub.errors import StrictDataclassError
        from safetensors import SafetensorError
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        raise ModelError(f"running a model needs the package {error.name}; pip install 'pdtx[models]'") from None
    if not (path / "config.json").is_file():
        raise ModelError(f"{str(path)!r} is not a checkpoint directory: it has no config.json")
    local = {"local_files_only": True, "trust_remote_code": False}
    try:
        with quiet_transformers():
            config = AutoConfig.from_pretrained(path, **local)
            # Before the weights are read: a model that cannot be run should not take minutes to say so.
            check_config(config, path.resolve().name)
            # Attention is left to transformers' choice, sdpa where the model has it: for the same shapes it computes
            # the same bits every time, and is several times as fast as "eager".
            model, report = AutoModelForCausalLM.from_pretrained(
                path, config=config, dtype=dtype, use_safetensors=True, output_loading_info=True, **local
            )
            model = model.eval().to(device)
    except (OSError, ValueError, RuntimeError, KeyError, ImportError, StrictDataclassError, SafetensorError) as error:
        raise ModelError(f"cannot load the model in {str(path)!r}: {_one_line(error)}") from error
    # transformers fills tensors that the files lack with random numbers, and only warns.
    if missing := sorted(report["missing_keys"]):
        raise ModelError(f"the weights in {str(path)!r} lack {len(missing)} tensors, e.g. {missing[0]}; get them again")
    return model


def _eos_token_ids(model: Any) -> frozenset[int]:  # noqa: ANN401 - transformers is not typed
    """Return the tokens that end an answer, as the generation config says, else the config."""
    generation = getattr(model, "generation_config", None)
    found = getattr(generation, "eos_token_id", None)
    if found is None:
        found = getattr(model.config.get_text_config(decoder=True), "eos_token_id", None)
    if found is None:
        return frozenset()
    return frozenset([found] if isinstance(found, int) else found)
