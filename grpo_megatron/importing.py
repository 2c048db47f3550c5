"""Large libraries, imported without looking for garbage: a sixth of the seconds that a rank needs before it can start."""

from __future__ import annotations

import atexit
import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def large_imports() -> Iterator[None]:
    """Around imports of many modules. What exists afterwards stays until the end, and no collection before looks at it."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        # At the end all is collected after all: bindings in C++ would list on the console, as leaks, what was not.
        atexit.register(gc.unfreeze)
        if was_enabled:
            gc.enable()
