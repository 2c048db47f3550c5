"""Ratios of probabilities from differences of log-probabilities, and the one bound on their exponent.

    ratio = exp(clamp(log-ratio, -20, 20))

e^20 = 4.9e8 is far outside anything that still trains, and no product of it with an advantage overflows float32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

LOG_RATIO_CLAMP = 20.0


def clamp_log_ratio(log_ratio: Tensor) -> Tensor:
    """`log_ratio` within +-LOG_RATIO_CLAMP, elementwise."""
    return log_ratio.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)


def ratio_of(log_ratio: Tensor) -> Tensor:
    """exp of the clamped log-ratio, elementwise."""
    return clamp_log_ratio(log_ratio).exp()
