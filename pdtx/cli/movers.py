"""Movers from the command line: a name, and options as KEY=VALUE, typed as the mover's constructor says."""

import inspect
import types
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin, get_type_hints

from pdtx.errors import InputError

if TYPE_CHECKING:
    from pdtx.plan import CostTable, Mode
    from pdtx.transports import Mover
    from pdtx.transports.base import PathKind

_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")
_REQUIRABLE: tuple["PathKind", ...] = ("rdma", "tcp", "shm")


def open_mover(name: str, options: Sequence[str] | None, *, advertise: str | None = None) -> "Mover":
    """Make a mover. options: as given; advertise: the host that others reach this node at, if not the one listened at.

    Raises InputError for an unknown mover, or an option that it does not have or that is not of the option's type.
    """
    from pdtx.transports import make_mover
    from pdtx.transports.registry import mover_class

    if name == "inproc":
        raise InputError("the mover inproc works within one process, and nodes are two; on one host use shm")
    typed = typed_options(name, mover_class(name), options or [])
    if advertise is not None:
        typed.setdefault("advertise_host", advertise)
    return make_mover(name, **typed)


def shares_memory(mover: str) -> bool:
    """Whether a mover wants caches in memory that other processes of this host can map."""
    return mover == "shm"


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


def parse_require(text: str | None) -> "PathKind | None":
    """Return what must carry the payload. Raises InputError for what cannot be required."""
    found = next((kind for kind in _REQUIRABLE if kind == text), None)
    if text is not None and found is None:
        raise InputError(f"--require takes {', '.join(_REQUIRABLE)}, not {text!r}")
    return found


def parse_mode(text: str) -> "Mode":
    """Return a mode. Raises InputError for an unknown one."""
    from pdtx.plan import Mode

    if text not in tuple(Mode):
        raise InputError(f"mode {text!r} is not one of {', '.join(Mode)}")
    return Mode(text)


def read_costs() -> "CostTable":
    """Return the costs that auto picks by, where somebody measured them. Raises InputError for a broken file."""
    from pdtx.plan import load_costs

    return load_costs()


def mover_flags(mover: str, options: Sequence[str] | None) -> list[str]:
    """Return the flags that give a node the same mover."""
    return ["--mover", mover, *(part for option in options or () for part in ("--mover-option", option))]
