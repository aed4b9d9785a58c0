"""Options of movers as text, KEY=VALUE, typed as the mover's constructor says."""

import inspect
import types
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from pdtx.errors import InputError

_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


def typed_options(name: str, cls: type, options: Sequence[str]) -> dict[str, Any]:
    """Turn KEY=VALUE into arguments of cls; name: the mover's, for messages. Raises InputError."""
    known = {
        key: parameter
        for key, parameter in inspect.signature(cls).parameters.items()
        if parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    }
    hints = _hints(cls)
    found = dict[str, Any]()
    for text in options:
        key, equals, value = text.partition("=")
        key = key.strip().replace("-", "_")
        if not equals or not key:
            raise InputError(f"mover option {text!r} is not KEY=VALUE")
        if key not in known:
            has = ", ".join(known) or "none"
            raise InputError(f"mover {name} has no option {key!r}; its options: {has}")
        if key in found:
            raise InputError(f"mover option {key!r} is given twice")
        kinds = _kinds(hints.get(key, type(known[key].default)))
        found[key] = _read(f"option {key!r} of mover {name}", value, kinds)
    return found


def _hints(cls: type) -> Mapping[str, Any]:
    try:
        return get_type_hints(inspect.getattr_static(cls, "__init__"))
    except (NameError, TypeError):  # a stranger's annotations need not resolve here
        return {}


def _kinds(hint: object) -> tuple[object, ...]:
    """The types or, of a Literal, the words that a value may have; None's type for an option that can be left out."""
    if get_origin(hint) in (Union, types.UnionType):
        return tuple(kind for member in get_args(hint) for kind in _kinds(member))
    return get_args(hint) if get_origin(hint) is Literal else (hint,)


def _read(what: str, text: str, kinds: Sequence[object]) -> bool | int | float | str | None:
    """Read a value as the first type that fits, the narrowest first. Raises InputError."""
    value = text.strip()
    if type(None) in kinds and value.lower() in ("", "none"):
        return None
    if bool in kinds and value.lower() in (*_TRUE, *_FALSE):
        return value.lower() in _TRUE
    for kind in (int, float):
        if kind in kinds:
            try:
                return kind(value)
            except ValueError:
                continue
    if str in kinds or value in kinds:
        return value
    words = [kind for kind in kinds if isinstance(kind, str)]
    names = {bool: "true or false", int: "a whole number", float: "a number", type(None): "none"}
    wanted = " or ".join([*words, *(names[kind] for kind in kinds if isinstance(kind, type) and kind in names)])
    raise InputError(f"{what} must be {wanted or 'set in Python, not here'}, not {text!r}")
