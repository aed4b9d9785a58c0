"""Percentiles and rates: what a list of seconds and a number of bytes amount to, each with its unit."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


def percentile(values: Sequence[float], percent: float) -> float:
    """Return a percentile by linear interpolation between the two nearest samples, as numpy does by default."""
    return float(np.percentile(np.asarray(values, dtype=np.float64), percent))


@dataclass(frozen=True)
class Spread:
    """Seconds of count samples. mean: told, but never a headline, for one slow sample moves it."""

    count: int
    p50: float
    p90: float
    p99: float
    min: float
    max: float
    mean: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread | None":
        """Summarise; None where there is nothing."""
        if not values:
            return None
        p50, p90, p99 = (percentile(values, percent) for percent in (50, 90, 99))
        return cls(len(values), p50, p90, p99, min(values), max(values), sum(values) / len(values))


@dataclass(frozen=True)
class Rate:
    """Bytes a second, in every unit that the field uses."""

    bytes_per_s: float

    @property
    def gb_per_s(self) -> float:
        """10^9 bytes a second, as nccl-tests and nixlbench have it."""
        return self.bytes_per_s / 1e9

    @property
    def gib_per_s(self) -> float:
        """2^30 bytes a second."""
        return self.bytes_per_s / 2**30

    @property
    def gbit_per_s(self) -> float:
        """10^9 bits a second, as network cards and perftest have it."""
        return self.bytes_per_s * 8 / 1e9

    @property
    def mib_per_s(self) -> float:
        """2^20 bytes a second, which vLLM's log calls MB/s."""
        return self.bytes_per_s / 2**20

    def __str__(self) -> str:
        return (
            f"{self.gb_per_s:.3f} GB/s = {self.gib_per_s:.3f} GiB/s = {self.gbit_per_s:.3f} Gb/s "
            f"= {self.mib_per_s:,.6g} MiB/s"
        )


def rate_of(nbytes: float, seconds: float) -> Rate | None:
    """Return nbytes in seconds as a rate; None where either is nothing."""
    return Rate(nbytes / seconds) if seconds > 0 and nbytes > 0 else None


def median_rate(rates: Sequence[Rate]) -> Rate | None:
    """Return the median of rates; None of none."""
    return Rate(percentile([rate.bytes_per_s for rate in rates], 50)) if rates else None
