"""What the text of a sweep's flag means: lists with commas, pairs with colons, sizes and durations with units."""

import re
from collections.abc import Callable, Sequence
from typing import Literal, TypeVar, get_args

from pdtx.errors import InputError
from pdtx.units import parse_bytes

T = TypeVar("T")
Pair = tuple[T, T]

_MOST_VALUES = 10_000
# Python's own words for numbers have underscores and digits of all scripts too.
_WHOLE = re.compile(r"[+-]?[0-9]{1,20}")
_DECIMAL = re.compile(r"[0-9]{1,20}(\.[0-9]*)?")
_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?|\.[0-9]+)\s*(us|ms|s|)")
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_SWITCH = {"on": True, "true": True, "yes": True, "off": False, "false": False, "no": False}


def values(flag: str, text: str, read: Callable[[str, str], T]) -> tuple[T, ...]:
    """Return what a list with commas holds, each value once, in its order; read(flag, part) reads one of them.

    Raises InputError for an empty part or too many, and what read raises.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(parts):
        raise InputError(f"--{flag} {text!r} has an empty value; separate values by one comma each")
    if len(parts) > _MOST_VALUES:
        raise InputError(f"--{flag} has {len(parts):,} values; {_MOST_VALUES:,} at most")
    return tuple(dict.fromkeys(read(flag, part) for part in parts))


def pair(read: Callable[[str, str], T]) -> Callable[[str, str], Pair[T]]:
    """Return what reads PREFILL:DECODE, or one value for both sides."""

    def read_pair(flag: str, text: str) -> Pair[T]:
        parts = text.split(":")
        if len(parts) > 2 or not all(part.strip() for part in parts):
            raise InputError(f"--{flag} takes PREFILL:DECODE or one value for both sides, not {text!r}")
        return read(flag, parts[0].strip()), read(flag, parts[-1].strip())

    return read_pair


def word(flag: str, text: str) -> str:
    """Return a name as it is."""
    return text


def whole(least: int, most: int = 1 << 40) -> Callable[[str, str], int]:
    """Return what reads a whole number within bounds. Raises InputError for others."""

    def read(flag: str, text: str) -> int:
        if not _WHOLE.fullmatch(text):
            raise InputError(f"--{flag} takes whole numbers, not {text!r}")
        number = int(text)
        if not least <= number <= most:
            raise InputError(f"--{flag} takes numbers from {least:,} to {most:,}, not {number:,}")
        return number

    return read


def whole_or_all(least: int) -> Callable[[str, str], int]:
    """Return what reads a whole number, or 'all' as 0."""
    read = whole(least)
    return lambda flag, text: 0 if text == "all" else read(flag, text)


def whole_or_none(least: int) -> Callable[[str, str], int | None]:
    """Return what reads a whole number, or 'all' as None."""
    read = whole(least)
    return lambda flag, text: None if text == "all" else read(flag, text)


def mean_run(flag: str, text: str) -> float:
    """Return a mean length of pieces; 0 for 'all'."""
    if text == "all":
        return 0.0
    number = float(text) if _DECIMAL.fullmatch(text) else -1.0
    if not 1 <= number < 1 << 31:
        raise InputError(f"--{flag} takes a mean length of 1 or more blocks, or 'all', not {text!r}")
    return number


def size(flag: str, text: str) -> int:
    """Return bytes. Raises InputError for what is no size, or none at all."""
    try:
        nbytes = parse_bytes(text)
    except InputError as error:
        raise InputError(f"--{flag}: {error}") from None
    if nbytes < 1:
        raise InputError(f"--{flag} takes sizes of 1 byte and more, not {text!r}")
    return nbytes


def seconds(flag: str, text: str) -> float:
    """Return the seconds of '500us', '2ms', '1.5s'; a bare number is only 0, for anything else needs its unit."""
    match = _DURATION.fullmatch(text)
    if match is None or (not match[2] and float(match[1])):
        raise InputError(f"--{flag} takes durations with a unit, as in 500us, 2ms, 1.5s, or 0; not {text!r}")
    return float(match[1]) * _SECONDS.get(match[2], 0.0)


def switch(flag: str, text: str) -> bool:
    """Return whether it says on or off."""
    if text.lower() not in _SWITCH:
        raise InputError(f"--{flag} takes on or off, not {text!r}")
    return _SWITCH[text.lower()]


def one_of(words: object) -> Callable[[str, str], str]:
    """Return what reads one of the words of a Literal. Raises InputError naming all of them."""
    known: Sequence[str] = get_args(words)

    def read(flag: str, text: str) -> str:
        if text not in known:
            raise InputError(f"--{flag} takes {', '.join(known)}, not {text!r}")
        return text

    return read


Reference = Literal["auto", "none", "memcpy", "socket", "ucx_perftest"]
