"""Whether one list of seconds is really longer than another; the statistics are scipy's.

Times of moves are skewed and have outliers, so medians are compared: their ratio, with an interval of 95 % by the
percentile bootstrap. Whether there is a difference at all is told by the Mann-Whitney rank test, which asks nothing of
the shape of the distributions. Both take samples for independent; runs drift, and so a third question is put: is the
difference larger than those inside the runs themselves (see wander) and than what two runs differ by anyway (noise)?
"""

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Literal

import numpy as np

from pdtx.errors import InputError
from pdtx.results.figures import percentile

LEAST = 5
"""Samples on each side; with fewer the rank test can hardly find anything."""
CONFIDENCE = 0.95
_RESAMPLES = 9999
_LONG, _RESAMPLES_OF_LONG = 1000, 1999
"""Of so many samples the interval is narrow, and fewer resamples will do."""
_AT_ONCE = 4_000_000
"""Samples drawn at a time: 32 MB, however long the runs are."""
_SEED = 6
_PARTS = 4

Verdict = Literal["slower", "faster", "not significant", "too few"]


@dataclass(frozen=True)
class Difference:
    """Two lists of seconds compared. ratio: median of the second over that of the first; low, high: its interval.

    p: of the rank test, adjusted for the number of comparisons. wander: the share by which either list differs in
    itself. counts: of samples. why: of a verdict that is none.
    """

    verdict: Verdict
    ratio: float
    low: float
    high: float
    p: float
    wander: float
    counts: tuple[int, int]
    why: str = ""

    def __str__(self) -> str:
        if self.verdict == "too few":
            return f"too few samples ({self.why})"
        interval = f"95% CI {self.low:.2f} to {self.high:.2f}"
        if self.verdict == "not significant":
            return f"not significant (ratio of times {self.ratio:.2f}, {interval}; {self.why})"
        if self.verdict == "slower":
            return f"{self.ratio:.2f}x slower ({interval})"
        return f"{1 / self.ratio:.2f}x faster (95% CI {1 / self.high:.2f} to {1 / self.low:.2f})"


def differences(pairs: Sequence[tuple[Sequence[float], Sequence[float]]], noise: float) -> list[Difference]:
    """Compare pairs of lists of seconds. noise: share that two runs of the same thing may differ by, 0.05 for 5 %.

    The p values are adjusted together (Benjamini and Hochberg), so that a long sweep does not find a difference by
    chance. Raises InputError without scipy.
    """
    stats = _scipy_stats()
    enough = [number for number, pair in enumerate(pairs) if min(map(len, pair)) >= LEAST]
    raw = [float(stats.mannwhitneyu(*pairs[number], alternative="two-sided").pvalue) for number in enough]
    adjusted = dict(zip(enough, stats.false_discovery_control(raw, method="bh") if raw else (), strict=True))
    return [
        _difference(stats, *pair, p=float(adjusted[number]), noise=noise) if number in adjusted else _too_few(*pair)
        for number, pair in enumerate(pairs)
    ]


def wander(seconds: Sequence[float]) -> float:
    """Return by what share the medians of a run's quarters differ, slowest from fastest; 0 of fewer than 8 samples."""
    if len(seconds) < 2 * _PARTS:
        return 0.0
    medians = [float(np.median(part)) for part in np.array_split(np.asarray(seconds), _PARTS)]
    return max(medians) / min(medians) - 1 if min(medians) > 0 else 0.0


def _difference(
    stats: ModuleType, before: Sequence[float], after: Sequence[float], *, p: float, noise: float
) -> Difference:
    ratio = percentile(after, 50) / percentile(before, 50)
    low, high = _interval(stats, before, after)
    wanders = max(wander(before), wander(after))
    size = max(ratio, 1 / ratio) - 1
    why = ""
    if p >= 1 - CONFIDENCE or low <= 1 <= high:
        why = f"p = {p:.2g}"
    elif size <= noise:
        why = f"two runs may differ by {noise:.0%}"
    elif size <= wanders:
        why = f"quarters of the same run differ by {wanders:.0%}"
    verdict: Verdict = "not significant" if why else "slower" if ratio > 1 else "faster"
    return Difference(verdict, ratio, low, high, p, wanders, (len(before), len(after)), why)


def _too_few(before: Sequence[float], after: Sequence[float]) -> Difference:
    nan = float("nan")
    why = f"{len(before)} and {len(after)}; {LEAST} or more are needed"
    return Difference("too few", nan, nan, nan, nan, nan, (len(before), len(after)), why)


def _interval(stats: ModuleType, before: Sequence[float], after: Sequence[float]) -> tuple[float, float]:
    """The percentile interval: medians jump, and the corrections of other methods suppose that they do not."""
    most = max(len(before), len(after))
    found = stats.bootstrap(
        (np.asarray(before), np.asarray(after)),
        lambda first, second, axis: np.median(second, axis=axis) / np.median(first, axis=axis),
        n_resamples=_RESAMPLES if most <= _LONG else _RESAMPLES_OF_LONG,
        batch=max(1, _AT_ONCE // most),
        confidence_level=CONFIDENCE,
        vectorized=True,
        method="percentile",
        random_state=np.random.default_rng(_SEED),
    ).confidence_interval
    return float(found.low), float(found.high)


def _scipy_stats() -> ModuleType:
    try:
        return importlib.import_module("scipy.stats")
    except ImportError:
        raise InputError("comparing needs scipy; install it with: pip install 'pdtx[plot]'") from None
