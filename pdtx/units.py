"""Sizes, rates and durations as text, always with their unit.

GB is 10^9 bytes, GiB is 2^30 bytes, Gb is 10^9 bits. Files hold plain integers of bytes and seconds.
"""

import re

from pdtx.errors import InputError

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB")
_FACTORS = {
    "": 1, "b": 1,
    "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
}  # fmt: skip


def ceil_div(number: int, by: int) -> int:
    """Return number / by, rounded up; both whole, by 1 or more."""
    return -(-number // by)


def round_up(number: int, multiple: int) -> int:
    """Return the least multiple of `multiple` that is not below number."""
    return ceil_div(number, multiple) * multiple


def format_bytes(nbytes: int) -> str:
    """Return a size in binary units: 65,536 -> '64 KiB'; exact where the number is whole."""
    value = float(nbytes)
    for unit in _BINARY:
        if abs(value) < 1024 or unit == _BINARY[-1]:
            return f"{value:.0f} {unit}" if value == int(value) else f"{value:.2f} {unit}"
        value /= 1024
    raise InputError(f"not a size: {nbytes}")


def counted(number: int, what: str) -> str:
    """Return a number of things in words: '1 case', '1,200 cases'."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def parse_bytes(text: str) -> int:
    """Return the bytes of '64KiB', '1.5GB', '256M' (a bare K, M, G, T is a power of two, as in nccl-tests).

    Raises InputError for anything else.
    """
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)\s*", text)
    if match is None or match[2].lower() not in _FACTORS:
        raise InputError(f"not a size: {text!r}; write for example 64KiB, 256MiB or 1GB")
    return int(float(match[1]) * _FACTORS[match[2].lower()])


def gb_per_s(nbytes: int, seconds: float) -> float:
    """Return GB/s (10^9 bytes a second); 0 where no time passed."""
    return nbytes / seconds / 1e9 if seconds > 0 else 0.0


def format_rate(nbytes: int, seconds: float) -> str:
    """Return one rate in the three units the field uses, side by side."""
    if seconds <= 0:
        return "n/a"
    rate = nbytes / seconds
    return f"{rate / 1e9:.3f} GB/s = {rate / 2**30:.3f} GiB/s = {rate * 8 / 1e9:.3f} Gb/s"


def format_seconds(seconds: float) -> str:
    """Return a duration with three significant digits: 0.00123 -> '1.23 ms'."""
    for factor, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if abs(seconds) >= factor:
            return f"{seconds / factor:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"
