"""Tiny random-weight checkpoints with a tokenizer, so that tests need no download."""

from pathlib import Path
from typing import Any

import torch

VOCAB = 259
"""256 bytes and three special tokens."""

_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    # Ten times the usual spread: logits far enough apart that greedy tokens vary and near-ties are rare.
    "initializer_range": 0.2,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": 258,
}
_CHAT_TEMPLATE = "{% for message in messages %}<s>{{ message['content'] }}{% endfor %}</s>"


def tiny_config(kind: str, **changes: Any) -> Any:  # noqa: ANN401 - transformers is not typed
    """Return the config of a tiny model; kind is a model_type of transformers."""
    from transformers import AutoConfig

    return AutoConfig.for_model(kind, **(_SIZES | changes))


def tiny_checkpoint(directory: Path, kind: str = "llama", *, seed: int = 0, **changes: Any) -> Path:  # noqa: ANN401
    """Write a checkpoint of kind under directory and return its path; equal arguments give equal weights.

    changes: config fields to set, e.g. num_hidden_layers=2.
    """
    from transformers import AutoModelForCausalLM

    path = directory / f"tiny-{kind}-{seed}"
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(tiny_config(kind, **changes), dtype=torch.float32)
    model.save_pretrained(path)
    _save_tokenizer(path)
    return path


def _save_tokenizer(path: Path) -> None:
    """Write a tokenizer whose tokens are single bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    fast.chat_template = _CHAT_TEMPLATE
    fast.save_pretrained(path)
