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


_MLA = {
    "num_key_value_heads": 4,
    "head_dim": 8,
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
WINDOW = 32
"""Tokens of the tiny models' windows and chunks."""

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": WINDOW},
    "gemma3_text": {
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "query_pre_attn_scalar": 16,
        # Tied, an embedding of Gemma's size repeats its own token for ever.
        "tie_word_embeddings": False,
    },
    "gpt_oss": {
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "llama4_text": {
        "attention_chunk_size": WINDOW,
        "num_local_experts": 2,
        "intermediate_size_mlp": 96,
        "no_rope_layers": [1, 1, 0],
        "moe_layers": [1],
    },
    "deepseek_v3": _MLA,
    # Heads enough that few tokens have an index score of 0 in all: topk takes any of equals.
    "deepseek_v32": {**_MLA, "index_topk": 16, "index_n_heads": 16, "index_head_dim": 16},
    "deepseek_v4": {
        "num_key_value_heads": 1,
        "head_dim": 16,
        "partial_rotary_factor": 0.5,
        "q_lora_rank": 24,
        "moe_intermediate_size": 32,
        "num_experts_per_tok": 2,
        "n_routed_experts": 4,
        "mlp_layer_types": ["moe", "moe", "moe"],
        "layer_types": ["heavily_compressed_attention", "compressed_sparse_attention", "sliding_attention"],
        "compress_rates": {"heavily_compressed_attention": 8, "compressed_sparse_attention": 4},
        "sliding_window": WINDOW,
        "o_groups": 2,
        "o_lora_rank": 16,
        "index_n_heads": 16,
        "index_head_dim": 16,
        "index_topk": 6,
    },
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "num_experts": 2,
        "mamba_d_state": 8,
        "mamba_dt_rank": 8,
    },
    "bamba": {
        "attn_layer_indices": [1],
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_d_state": 8,
        "mamba_n_groups": 1,
        "mamba_chunk_size": 16,
    },
    "qwen3_next": {
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "num_experts": 4,
        **_EXPERTS,
    },
    "falcon_h1": {
        "mamba_d_ssm": 64,
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_n_groups": 1,
        "mamba_d_state": 8,
        "mamba_chunk_size": 16,
    },
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"], "block_ff_dim": 96},
    "kimi_linear": {
        **_MLA,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "linear_num_heads": 4,
        "linear_head_dim": 8,
        "num_local_experts": 4,
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "q_lora_rank": None,
    },
    "whisper": {
        "d_model": 64,
        "encoder_layers": 2,
        "decoder_layers": 3,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 96,
        "decoder_ffn_dim": 96,
        "num_mel_bins": 16,
        "max_source_positions": 50,
        "max_target_positions": 256,
        "init_std": 0.2,
        "decoder_start_token_id": 256,
    },
}
"""What makes a tiny model of each kind of caching, by transformers' model_type."""


def tiny_config(kind: str, **changes: Any) -> Any:  # noqa: ANN401 - transformers is not typed
    """Return the config of a tiny model; kind is a model_type of transformers."""
    from transformers import AutoConfig

    return AutoConfig.for_model(kind, **(_SIZES | changes))


def tiny_checkpoint(directory: Path, kind: str = "llama", *, seed: int = 0, **changes: Any) -> Path:  # noqa: ANN401
    """Write a checkpoint of kind under directory and return its path; equal arguments give equal weights.

    changes: config fields to set, e.g. num_hidden_layers=2.
    """
    from transformers import AutoModelForCausalLM, AutoModelForSpeechSeq2Seq

    path = directory / f"tiny-{kind}-{seed}"
    config = tiny_config(kind, **changes)
    make = AutoModelForSpeechSeq2Seq if config.is_encoder_decoder else AutoModelForCausalLM
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = make.from_config(config, dtype=torch.float32)
        for name, parameter in model.named_parameters():
            if name.endswith("position_bias"):  # zeros at first, which would hide that they were forgotten
                torch.nn.init.normal_(parameter, std=3.0)
    model.save_pretrained(path)
    _save_tokenizer(path)
    return path


def prompt(seed: int, length: int) -> list[int]:
    """Return a prompt's token ids; those of equal seeds begin alike."""
    return [(7 * at + 31 * seed + at * at) % 256 for at in range(length)]


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
