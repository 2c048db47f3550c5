"""RunStart: what is known about the start of a run besides its config."""

from __future__ import annotations

import difflib
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
        """Whether all values of these keys or sections could be read, also if a wrong key is a misspelt one of them."""
        return not any(_concerns(wrong, key) for wrong in self.wrong_keys for key in keys)


def _concerns(wrong: str, key: str) -> bool:
    is_part = f"{wrong}.".startswith(f"{key}.") or f"{key}.".startswith(f"{wrong}.")
    return is_part or bool(difflib.get_close_matches(wrong, [key], cutoff=0.8))
