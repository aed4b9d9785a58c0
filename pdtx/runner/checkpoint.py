"""From the name of a model to its checkpoint directory, and a fingerprint that tells two of them apart."""

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pdtx.errors import ModelError
from pdtx.runner.demo_model import DEMO_MODEL, demo_model_path

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_HUB_FILES = ("*.json", "*.safetensors", "*.txt", "*.jinja", "*.model")
# Config fields that say who wrote the file, not what the model is.
_VOLATILE = frozenset({"_name_or_path", "_model_name_or_path", "transformers_version"})
_SLICES, _SLICE_BYTES = 64, 4096


def resolve_model(name: str | None, progress: Callable[[str], None] | None = None) -> Path:
    """Return the checkpoint directory of a model.

    name: None or DEMO_MODEL for the demo model, a directory with a config.json, or the id of a model on the hub, which
    is looked for in the local hub cache before it is downloaded (never with HF_HUB_OFFLINE set).
    progress: told in one line what takes a while.
    Raises ModelError if there is no such model or it cannot be had.
    """
    if name is None or name.lower() == DEMO_MODEL:
        return demo_model_path(progress)
    path = Path(name).expanduser()
    if (path / "config.json").is_file():
        return path
    if path.is_dir():
        raise ModelError(f"{name!r} is a directory without config.json; give a checkpoint in the Hugging Face format")
    if name.startswith(("/", ".", "~")) or name.count("/") > 1:
        raise _not_found(name, "there is no such directory")
    return _from_hub(name, progress)


def fingerprint(path: Path) -> str:
    """Return 16 hex digits that are equal for equal config and weights and differ between models and revisions.

    Takes in the config, and of each weight file its name, size, safetensors header and 64 evenly spaced slices of
    4 KiB. It samples: an edit of single weights can go unseen, in exchange for milliseconds whatever the model's size.
    Raises ModelError if the directory holds no readable config or safetensors.
    """
    digest = hashlib.sha256()
    config = {key: value for key, value in _read_json(path / "config.json").items() if key not in _VOLATILE}
    digest.update(json.dumps(config, sort_keys=True, separators=(",", ":")).encode())
    for file in _weight_files(path):
        try:
            _sample(file, digest)
        except OSError as error:
            raise ModelError(f"cannot read the weights {file}: {error.strerror}; get the checkpoint again") from None
    return digest.hexdigest()[:16]


def _not_found(name: str, reason: str) -> ModelError:
    return ModelError(
        f"model not found: {name!r} is neither a directory with config.json nor a model to be had from the hub "
        f"({reason}); give a path or a hub id you can reach, or leave it out for {DEMO_MODEL}"
    )


def _from_hub(name: str, progress: Callable[[str], None] | None) -> Path:
    """Return the hub's snapshot of a model, from the local cache if it is there."""
    try:
        from huggingface_hub import constants, snapshot_download

        from pdtx.runner.quiet import quiet_transformers
    except ImportError:
        raise _not_found(name, "looking there needs pip install 'pdtx[models]'") from None
    with quiet_transformers():
        try:
            path = Path(snapshot_download(name, local_files_only=True, allow_patterns=list(_HUB_FILES)))
            _weight_files(path)
        except (OSError, ValueError, ModelError) as error:
            if constants.HF_HUB_OFFLINE:
                raise _not_found(name, "HF_HUB_OFFLINE is set and the local cache has none") from error
        else:
            return path
        if progress:
            progress(f"downloading {name} from the hub")
        try:
            return Path(snapshot_download(name, allow_patterns=list(_HUB_FILES)))
        except (OSError, ValueError, RuntimeError) as error:
            raise _not_found(name, _first_line(error)) from error


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


def _read_json(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {file}: {_first_line(error)}; get the checkpoint again") from None
    if not isinstance(found, dict):
        raise ModelError(f"{file} holds no JSON object; get the checkpoint again")
    return found


def _weight_files(path: Path) -> list[Path]:
    """Return the files that transformers would load, in the order of their names."""
    if (path / _INDEX).is_file():
        shards = _read_json(path / _INDEX).get("weight_map")
        if not isinstance(shards, dict) or not shards:
            raise ModelError(f"{path / _INDEX} has no weight_map; get the checkpoint again")
        files = sorted(path / str(shard) for shard in set(shards.values()))
    else:
        files = [path / _SINGLE]
    for file in files:
        if not file.is_file():
            raise ModelError(f"checkpoint {os.fspath(path)!r} has no {file.name}; only safetensors weights are read")
    return files


def _sample(file: Path, digest: Any) -> None:  # noqa: ANN401 - hashlib's type has no public name
    """Add one weight file to the digest."""
    size = file.stat().st_size
    digest.update(f"{file.name} {size}".encode())
    with file.open("rb") as source:
        # A safetensors file begins with the length of its JSON header; a nonsensical length is only another sample.
        length = int.from_bytes(source.read(8), "little")
        header = min(length, size)
        digest.update(source.read(header))
        room = max(size - 8 - header - _SLICE_BYTES, 0)
        for offset in sorted({room * index // (_SLICES - 1) for index in range(_SLICES)}):
            source.seek(8 + header + offset)
            digest.update(source.read(_SLICE_BYTES))
