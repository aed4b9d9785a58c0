"""Checks of a config's fields at its construction, from what pdtx.node.options declares of them."""

import dataclasses
import math
import types
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from pdtx.errors import ConfigError, InputError
from pdtx.node.options import Option

_NAMES = {int: "a whole number", float: "a number", str: "a string", bool: "True or False", Path: "a pathlib.Path"}


@dataclasses.dataclass(frozen=True)
class OptionField:
    """A field that is an option. kind: its type, without the Annotated. default: MISSING where it has none."""

    name: str
    kind: Any
    option: Option
    default: object = dataclasses.MISSING


@lru_cache
def option_fields(config: type[Any]) -> tuple[OptionField, ...]:
    """Return the fields of a config class that are annotated with an Option, in their order."""
    hints = get_type_hints(config, include_extras=True)
    found = []
    for field in dataclasses.fields(config):
        hint = hints[field.name]
        option = next((one for one in getattr(hint, "__metadata__", ()) if isinstance(one, Option)), None)
        if get_origin(hint) is Annotated and option is not None:
            found.append(OptionField(field.name, get_args(hint)[0], option, field.default))
    return tuple(found)


@lru_cache
def nested_configs(config: type[Any]) -> dict[str, type[Any]]:
    """Return the fields of a config class that are configs themselves, with their classes."""
    hints = get_type_hints(config)
    return {
        one.name: hints[one.name] for one in dataclasses.fields(config) if dataclasses.is_dataclass(hints[one.name])
    }


def check_fields(config: object) -> None:
    """Hold every field of a config to its type and bounds. Raises ConfigError that names field and value."""
    owner: Any = type(config)
    for field in option_fields(owner):
        _check(owner.__name__, field, getattr(config, field.name))
    for name, kind in nested_configs(owner).items():
        value = getattr(config, name)
        if not isinstance(value, kind):
            raise ConfigError(name, f"{owner.__name__}.{name} takes a {kind.__name__}, not {value!r}")


def check_config(owner: str, config: object, kind: type[Any]) -> None:
    """Raise InputError for a config of another class."""
    if not isinstance(config, kind):
        raise InputError(f"{owner} takes a {kind.__name__}, not {type(config).__name__}")


def _check(owner: str, field: OptionField, value: object) -> None:
    name, option = f"{owner}.{field.name}", field.option
    kinds = _members(field.kind)
    if not any(_fits(value, kind) for kind in kinds):
        wanted = " or ".join(_name(kind) for kind in kinds)
        raise ConfigError(field.name, f"{name} takes {wanted}, not {value!r}")
    if isinstance(value, bool) or not isinstance(value, int | float):
        return
    if not _is_finite(value):
        raise ConfigError(field.name, f"{name} is {value!r}; give a finite number")
    if option.min is not None and value < option.min:
        raise ConfigError(field.name, f"{name} is {value!r}; give {option.min:g} or more")
    if option.max is not None and value > option.max:
        raise ConfigError(field.name, f"{name} is {value!r}; give {option.max:g} or less")


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number beyond all floats
        return False


def _members(kind: object) -> tuple[object, ...]:
    return get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)


def _fits(value: object, kind: object) -> bool:
    if get_origin(kind) is list:
        return isinstance(value, list | tuple) and all(_fits(one, get_args(kind)[0]) for one in value)
    if kind is type(None):
        return value is None
    if isinstance(value, bool) or kind is bool:
        return isinstance(value, bool) and kind is bool
    return isinstance(value, (int, float) if kind is float else kind)  # type: ignore[arg-type]


def _name(kind: object) -> str:
    if get_origin(kind) is list:
        return f"a list, each {_name(get_args(kind)[0])}"
    return "None" if kind is type(None) else _NAMES.get(kind, str(kind))  # type: ignore[call-overload]
