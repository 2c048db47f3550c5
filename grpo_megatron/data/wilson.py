"""Wilson's interval of a share (1927, JASA 22:209), at 95 %: the shares p from which the observed one is z of their own
standard errors sqrt(p (1 - p) / n) away. It has a width at 0 and at 100 %, too.
"""

from __future__ import annotations

import math

Z = 1.959963984540054  # 97.5 % quantile of the normal distribution


def wilson(share: float, n: int) -> tuple[float, float]:
    """(low, high) of a share of n > 0 trials."""
    center, root = share + Z * Z / (2 * n), Z * math.sqrt(share * (1 - share) / n + Z * Z / (4 * n * n))
    scale = 1 + Z * Z / n
    return max(0.0, (center - root) / scale), min(1.0, (center + root) / scale)
