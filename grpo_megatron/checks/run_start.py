"""RunStart: what is known about the start of a run besides its config."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class RunStart:
    """`problems`: those that the caller has found. `profiled`: the steps of --profile. `device`: bytes of --gpu.

    `wrong_keys`: keys of the file that cannot be read; the config has their defaults.
    """

    problems: Sequence[str] = ()
    profiled: range | None = None
    device: float | None = None
    wrong_keys: Collection[str] = ()

    def knows(self, *keys: str) -> bool:
        """Whether all values of these keys or sections could be read."""
        return not any(wrong == key or wrong.startswith(f"{key}.") for wrong in self.wrong_keys for key in keys)
