"""Limits on a chat template: it is a program that comes with a model, and it may loop or build a text of gigabytes."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator

from grpo_megatron.processes.process import time_limit

TEMPLATE_S = 2.0  # processor seconds for one chat; a usual one takes a millisecond, and the first some 0.1 s to compile
TEMPLATE_BYTES = 2 << 30  # that one chat may add to the memory
MAX_RENDERED = 1 << 24  # characters of one chat


@contextlib.contextmanager
def template_limits() -> Iterator[None]:
    """Raises TimeoutError or MemoryError. The time limit works on the main thread only (`time_limit`)."""
    with time_limit(TEMPLATE_S, "it"), _memory_limit(TEMPLATE_BYTES):
        yield


@contextlib.contextmanager
def _memory_limit(size: int) -> Iterator[None]:
    """The process may map `size` bytes more than it has mapped. No limit where /proc does not tell that."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    try:
        with open("/proc/self/statm") as file:
            limit = int(file.read().split()[0]) * resource.getpagesize() + size
    except OSError:
        yield
        return
    bounds = [bound for bound in (limit, *before) if bound != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_AS, (min(bounds), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
