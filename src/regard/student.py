"""Student's interval of a mean: mean ± t s / √n, s with n - 1 in its denominator.

Below FEW samples there is no interval: t is large, and its expansion is not exact.

Next: display.py
"""

from __future__ import annotations

from statistics import NormalDist
from typing import Any

FEW = 8  # minimum samples for an interval
SURE = 0.95


def student(sure: float, freedom: Any) -> Any:
    """Return the quantile of Student's t for a two-sided interval.

    freedom: degrees of it, a number or an array; 1 or more

    Four terms of its expansion around the normal quantile: with 7 degrees of freedom
    the error is below 0.01 %, and 1 % for an interval that holds for 2,000 heads.
    """
    z, v = NormalDist().inv_cdf((1 + sure) / 2), freedom
    first, second = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    fourth = 79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z
    return z + first / v + second / v**2 + third / v**3 + fourth / 92160 / v**4
