"""What a few measurements say, and what they do not: medians, percentiles, intervals."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

#: Enough that the ends of a 95% interval move by less than what anybody would act on.
RESAMPLES = 1000
CONFIDENCE = 0.95


def percentile(values: Sequence[float], percent: float) -> float:
    """The percentile by linear interpolation between the two nearest values.

    Args:
        values: At least one.
        percent: 0 to 100.
    """
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


@dataclass(frozen=True)
class Summary:
    """Median and spread of some values, and how many there were."""

    median: float
    p5: float
    p95: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Summary | None:
        """``None`` where there are no values."""
        if not values:
            return None
        return cls(statistics.median(values), percentile(values, 5), percentile(values, 95), len(values))

    def to_json(self, digits: int = 2) -> dict[str, float | int]:
        """For a report."""
        return {
            "median": round(self.median, digits),
            "p5": round(self.p5, digits),
            "p95": round(self.p95, digits),
            "count": self.count,
        }


def change_interval(
    before: Sequence[float], after: Sequence[float], *, seed: int = 1, confidence: float = CONFIDENCE
) -> tuple[float, float, float]:
    """The relative change of the median from ``before`` to ``after``, and a bootstrap interval around it.

    Both sides are drawn again with replacement. With few values a plain interval of percentiles is too narrow: it is widened as
    the t distribution is wider than the normal one, by ``sqrt(n / (n - 1))`` of the smaller side and by the ratio of quantiles.

    Returns:
        Change, lower and upper end, as fractions (0.05: 5% more).
    """
    dice = random.Random(seed)  # noqa: S311 - a resampling that is the same each time, no secret
    change = math.log(statistics.median(after) / statistics.median(before))
    drawn = sorted(
        math.log(statistics.median(dice.choices(after, k=len(after))) / statistics.median(dice.choices(before, k=len(before))))
        for _ in range(RESAMPLES)
    )
    tail = (1 - confidence) / 2 * 100
    smaller = min(len(before), len(after))
    wider = _t_quantile(smaller - 1) / 1.96 * math.sqrt(smaller / (smaller - 1)) if smaller > 1 else math.inf
    low = change - (change - percentile(drawn, tail)) * wider
    high = change + (percentile(drawn, 100 - tail) - change) * wider
    return math.expm1(change), math.expm1(low), math.expm1(high)


#: Two-sided 95% quantiles of Student's t by degrees of freedom; from 30 on within 4% of the normal's 1.96.
_T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110)


def _t_quantile(freedom: int) -> float:
    return _T95[freedom - 1] if 1 <= freedom <= len(_T95) else 2.05 if freedom < 30 else 1.96


def sign_flip_p(differences: Sequence[float]) -> float:
    """How often chance alone gives a mean of paired differences at least as high, if neither side is better.

    Exact: were the two sides alike, each difference could as well have the other sign, so all ``2 ** n`` sets of signs are tried
    (Fisher's randomisation test). At most 16 pairs.
    """
    found = sum(differences)
    slack = 1e-12 * (1 + abs(found))
    as_high = sum(
        1
        for signs in itertools.product((1, -1), repeat=len(differences))
        if sum(sign * value for sign, value in zip(signs, differences, strict=True)) >= found - slack
    )
    return as_high / float(1 << len(differences))


def paired_change_interval(
    log_ratios: Sequence[float], *, seed: int = 1, confidence: float = CONFIDENCE
) -> tuple[float, float, float]:
    """The mean relative change over pairs, from the logarithm of each pair's ratio, and a bootstrap interval around it.

    Pairs are drawn again with replacement; the interval is widened as in :func:`change_interval`.

    Args:
        log_ratios: At least two.
        seed: Of the drawing.
        confidence: Of the interval.

    Returns:
        Change, lower and upper end, as fractions (0.05: 5% more).
    """
    dice = random.Random(seed)  # noqa: S311 - a resampling that is the same each time, no secret
    count = len(log_ratios)
    change = statistics.fmean(log_ratios)
    drawn = sorted(statistics.fmean(dice.choices(log_ratios, k=count)) for _ in range(RESAMPLES))
    tail = (1 - confidence) / 2 * 100
    wider = _t_quantile(count - 1) / 1.96 * math.sqrt(count / (count - 1))
    low = change - (change - percentile(drawn, tail)) * wider
    high = change + (percentile(drawn, 100 - tail) - change) * wider
    return math.expm1(change), math.expm1(low), math.expm1(high)
