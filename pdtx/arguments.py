"""Checks of what callers give: what can be used comes back as a plain Python value, all else is an InputError."""

import math
import operator
import reprlib
from collections.abc import Iterable
from typing import SupportsFloat, SupportsIndex, cast

from pdtx.errors import InputError

MAX_SECONDS = 1e9
"""The longest time that a wait or a deadline may be, and that a message carries."""

_NOT_CONVERTED = (TypeError, ValueError, OverflowError, RuntimeError)
"""What numbers of Python, numpy and torch raise that are no numbers of the kind asked for."""


def integer(name: str, value: object, least: int, most: int) -> int:
    """Return an integer of any kind (int, numpy's, a tensor) as an int. name: for messages. Raises InputError."""
    try:
        found = int(operator.index(cast("SupportsIndex", value)))
    except _NOT_CONVERTED:
        raise InputError(f"{name} is {shown(value)}; give an integer") from None
    if not least <= found <= most:
        raise InputError(f"{name} is {shown(found)}; give {least} to {most}")
    return found


def integers(name: str, values: object, least: int, most: int) -> list[int]:
    """Return integers of any kind (a list, an array or a tensor of one axis) as a list. Raises InputError."""
    try:
        # Elements of arrays and tensors are objects that take long to make one by one.
        plain = values.tolist() if hasattr(values, "tolist") else values
        found = list(map(operator.index, cast("Iterable[SupportsIndex]", plain)))
    except _NOT_CONVERTED:
        raise InputError(f"{name} is {shown(values)}; give a list of integers") from None
    if found:
        integer(f"one of {name}", min(found), least, most)
        integer(f"one of {name}", max(found), least, most)
    return found


def seconds(name: str, value: object) -> float:
    """Return a time in seconds, from 0 to MAX_SECONDS, as a float. Raises InputError, for NaN too."""
    try:
        number = cast("SupportsFloat", value)
        possible = math.isfinite(number) and 0.0 <= float(number) <= MAX_SECONDS  # texts are no numbers for isfinite()
    except _NOT_CONVERTED:
        possible = False
    if not possible:
        raise InputError(f"{name} is {shown(value)}; give seconds from 0 to {MAX_SECONDS:g}")
    return float(number)


def shown(value: object) -> str:
    """Return a value as it stands in a message: on one line, and short."""
    return " ".join(reprlib.repr(value).split())
