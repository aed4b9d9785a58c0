"""Where configs come from: a file, a folder, or one of those that come with pdtx."""

import json
from importlib import resources
from pathlib import Path
from typing import Any

from pdtx.errors import ModelError

_PRESETS = resources.files("pdtx.models") / "presets"


def preset_names() -> tuple[str, ...]:
    """Return the names of the configs that come with pdtx."""
    names = (entry.name for entry in _PRESETS.iterdir())
    return tuple(sorted(name.removesuffix(".json") for name in names if name.endswith(".json")))


def load_config(source: str | Path) -> dict[str, Any]:
    """Return the config of a folder with a config.json, of a JSON file, or of a preset by its name.

    Raises ModelError if there is none of these, or no JSON object in it.
    """
    path = Path(source)
    if str(source) in preset_names() and not path.exists():
        return _parse((_PRESETS / f"{source}.json").read_text("utf-8"), str(source))
    file = path / "config.json" if path.is_dir() else path
    try:
        text = file.read_text("utf-8")
    except FileNotFoundError:
        raise ModelError(
            f"no config.json at {file} and no preset of that name; presets: {', '.join(preset_names())}"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"cannot read {file}: {error}") from None
    return _parse(text, str(file))


def _parse(text: str, source: str) -> dict[str, Any]:
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{source} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise ModelError(f"{source} holds no JSON object; a Hugging Face config.json does")
    return config
