"""Clocks: how far the clocks of two ranks are apart, with a bound on the error that needs no assumption about the network.

Both ranks take part in the same collectives and note when they entered and left each one. Nobody leaves before everybody
has entered. With o = clock of the other rank - clock of the first rank, this says for every collective:

    entered_first <= left_other - o    and    entered_other - o <= left_first
"""

from __future__ import annotations

from collections.abc import Sequence

ClockRound = tuple[int, int]  # (entered, left) of one collective, nanoseconds of the rank's own clock


def clock_offset(first: Sequence[ClockRound], other: Sequence[ClockRound]) -> tuple[float, float]:
    """(offset of `other`'s clock against `first`'s, largest error of it), nanoseconds. Both lists have the same rounds."""
    low = max(entered - left for (_, left), (entered, _) in zip(first, other, strict=True))
    high = min(left - entered for (entered, _), (_, left) in zip(first, other, strict=True))
    return (low + high) / 2, (high - low) / 2
