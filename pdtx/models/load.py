"""Where configs come from: a file, a folder, or one of those that come with pdtx."""

import json
import stat
from importlib import resources
from pathlib import Path
from typing import Any

from pdtx.errors import ModelError
from pdtx.text import printable

_PRESETS = resources.files("pdtx.models") / "presets"
_MOST_BYTES = 16 << 20
_MOST_SHOWN = 200


def preset_names() -> tuple[str, ...]:
    """Return the names of the configs that come with pdtx."""
    names = (entry.name for entry in _PRESETS.iterdir())
    return tuple(sorted(name.removesuffix(".json") for name in names if name.endswith(".json")))


def load_config(source: str | Path) -> dict[str, Any]:
    """Return the config of a preset by its name, of a folder with a config.json, or of a JSON file.

    A preset's name is always the preset; a file or folder called like one is had by its path, as ./NAME.
    Raises ModelError if there is none of these, no regular file of a bearable size, or no JSON object in it.
    """
    name = str(source)
    if name in preset_names():
        return _parse((_PRESETS / f"{name}.json").read_text("utf-8"), name)
    shown = _shown(name)
    try:
        return _parse(_read(Path(source), shown), shown)
    except FileNotFoundError:
        raise ModelError(
            f"no config.json at {shown} and no preset of that name; presets: {', '.join(preset_names())}"
        ) from None
    except OSError as error:
        raise ModelError(f"cannot read {shown}: {error.strerror or type(error).__name__}") from None
    except ValueError as error:  # no UTF-8, or a name that no file can have
        raise ModelError(f"cannot read {shown}: {error}") from None


def _read(path: Path, shown: str) -> str:
    """Return a file's text: a driver elsewhere may have named it, so nothing else is opened, nor read without end."""
    file = path / "config.json" if path.is_dir() else path
    if not stat.S_ISREG(file.stat().st_mode):
        raise ModelError(f"{shown} is no regular file and no folder with a config.json")
    with file.open("rb") as stream:
        data = stream.read(_MOST_BYTES + 1)
    if len(data) > _MOST_BYTES:
        raise ModelError(f"{shown} has more than {_MOST_BYTES:,} bytes; a Hugging Face config.json is far smaller")
    return data.decode("utf-8")


def _shown(name: str) -> str:
    """Return a name for a message: one line of a bearable length."""
    text = printable(name)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def _parse(text: str, source: str) -> dict[str, Any]:
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{source} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise ModelError(f"{source} holds no JSON object; a Hugging Face config.json does")
    return config
