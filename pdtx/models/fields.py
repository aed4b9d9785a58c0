"""A config.json read field by field: what is missing or of the wrong kind is refused by name."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pdtx.errors import ModelError
from pdtx.kvspec import DTYPE_SIZES

_ABSENT = object()


@dataclass(frozen=True)
class Fields:
    """One JSON object of a config.

    values: its members. path: what precedes a member's name in messages, "" or "text_config.".
    """

    values: Mapping[str, Any]
    path: str = ""

    def has(self, name: str) -> bool:
        """Return whether a field is there and not null."""
        return self.values.get(name) is not None

    def integer(self, *names: str, least: int = 1) -> int:
        """Return the first of the named fields that is there. Raises ModelError for no such field or no such int."""
        name = next((name for name in names if self.has(name)), None)
        if name is None:
            raise self._missing(" or ".join(names))
        value = self.values[name]
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ModelError(f"config field {self.path}{name} must be an int of {least} or more, not {value!r}")
        return value

    def integer_or(self, name: str, default: int) -> int:
        """Return a field, or default where it is absent or null."""
        return self.integer(name) if self.has(name) else default

    def text(self, *names: str) -> str:
        """Return the first of the named fields that is there. Raises ModelError for no such field or no string."""
        name = next((name for name in names if self.has(name)), None)
        if name is None:
            raise self._missing(" or ".join(names))
        value = self.values[name]
        if not isinstance(value, str):
            raise ModelError(f"config field {self.path}{name} must be a string, not {value!r}")
        return value

    def flag(self, name: str, *, default: bool | None = None) -> bool:
        """Return a boolean field, or default where it is absent or null. Raises ModelError where there is none."""
        value = self.values.get(name)
        if value is None and default is not None:
            return default
        if value is None:
            raise self._missing(name)
        if not isinstance(value, bool):
            raise ModelError(f"config field {self.path}{name} must be true or false, not {value!r}")
        return value

    def integers(self, name: str) -> list[int]:
        """Return a list of ints, each 0 or more. Raises ModelError for anything else."""
        value = self._list(name)
        if not all(isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in value):
            raise ModelError(f"config field {self.path}{name} must be a list of ints of 0 or more, not {value!r}")
        return value

    def one_of_each(self, name: str, count: int, known: Mapping[Any, str]) -> list[str]:
        """Return known[item] for the first `count` items of a list: what each layer is.

        Raises ModelError for a shorter list and for an item that is not known.
        """
        value = self._list(name)
        if len(value) < count:
            raise ModelError(f"config field {self.path}{name} has {len(value)} entries for {count} layers")
        strange = next(
            (item for item in value[:count] if not isinstance(item, str | int) or item not in known), _ABSENT
        )
        if strange is not _ABSENT:
            raise ModelError(
                f"config field {self.path}{name} has {strange!r}, for which there is no rule; "
                f"known: {', '.join(map(str, known))}"
            )
        return [known[item] for item in value[:count]]

    def section(self, name: str) -> "Fields":
        """Return a nested object. Raises ModelError if there is none."""
        value = self.values.get(name)
        if value is None:
            raise self._missing(name)
        if not isinstance(value, Mapping):
            raise ModelError(f"config field {self.path}{name} must be an object, not {value!r}")
        return Fields(value, f"{self.path}{name}.")

    def dtype(self, name: str) -> str:
        """Return the name of an element type, without a leading "torch."."""
        dtype = self.text(name).removeprefix("torch.")
        if dtype not in DTYPE_SIZES:
            raise ModelError(f"config field {self.path}{name} is {dtype!r}; one of {', '.join(DTYPE_SIZES)} is needed")
        return dtype

    def _list(self, name: str) -> list[Any]:
        value = self.values.get(name)
        if value is None:
            raise self._missing(name)
        if not isinstance(value, list):
            raise ModelError(f"config field {self.path}{name} must be a list, not {value!r}")
        return value

    def _missing(self, names: str) -> ModelError:
        return ModelError(f"the config has no {self.path}{names}; add it to the config.json, nothing is assumed")
