"""Load a checkpoint's model with transformers."""

from pathlib import Path
from typing import Any

import torch

from pdtx.errors import ModelError
from pdtx.runner.architecture import check_config
from pdtx.runner.quiet import quiet_transformers


def one_line(error: BaseException) -> str:
    """Return the first line of an error, or its kind if it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def load_model(path: Path, dtype: torch.dtype, device: str) -> Any:  # noqa: ANN401 - transformers is not typed
    """Return the model in evaluation mode on the device.

    Raises ModelError if it cannot be read, lacks weights, or is of a kind that cannot be run.
    """
    try:
        from huggingface_hub.errors import StrictDataclassError
        from safetensors import SafetensorError
        from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSpeechSeq2Seq
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
            kind = AutoModelForSpeechSeq2Seq if config.is_encoder_decoder else AutoModelForCausalLM
            model, report = kind.from_pretrained(
                path, config=config, dtype=dtype, use_safetensors=True, output_loading_info=True, **local
            )
            model = model.eval().to(device)
    except (OSError, ValueError, RuntimeError, KeyError, ImportError, StrictDataclassError, SafetensorError) as error:
        raise ModelError(f"cannot load the model in {str(path)!r}: {one_line(error)}") from error
    # transformers fills tensors that the files lack with random numbers, and only warns.
    if missing := sorted(report["missing_keys"]):
        raise ModelError(f"the weights in {str(path)!r} lack {len(missing)} tensors, e.g. {missing[0]}; get them again")
    return model


def eos_token_ids(model: Any) -> frozenset[int]:  # noqa: ANN401 - transformers is not typed
    """Return the tokens that end an answer, as the generation config says, else the config."""
    generation = getattr(model, "generation_config", None)
    found = getattr(generation, "eos_token_id", None)
    if found is None:
        found = getattr(model.config.get_text_config(decoder=True), "eos_token_id", None)
    if found is None:
        return frozenset()
    return frozenset([found] if isinstance(found, int) else found)
