"""Large libraries, imported without looking for garbage: a sixth of the seconds that a rank needs before it can start."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def large_imports() -> Iterator[None]:
    """Around imports of many modules. What exists afterwards lives as long as the process, and no later collection looks at it."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
