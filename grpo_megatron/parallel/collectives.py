"""Collectives: every operation between ranks that Python starts while a profile is recorded, of torch.distributed.

All of torch.distributed, Megatron-Core and this package call the methods of `ProcessGroup`, and wait by `Work.wait`. Inside
`recorded` these methods are replaced by ones that note the time. Outside nothing is replaced, so nothing is paid.

An operation has a key that all its ranks compute alike: the group, and its number among the group's operations since the
start; for a message, its number among those between the two ranks. All ranks of a group must begin to record at the same
point. Operations of groups of one rank are left out. With a device that runs asynchronously, `synchronize` is called before
each operation and after each wait: then the times are those of the work and not of its launch, and computation no longer
overlaps with communication. What a CUDA graph or a compiled module sends is not seen. Not run on a GPU yet.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist

OPERATIONS = {  # method of ProcessGroup -> its name in torch.distributed; methods that a version lacks are passed over
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "gather": "gather",
    "scatter": "scatter",
    "allgather": "all_gather",
    "_allgather_base": "all_gather",
    "all_gather_single": "all_gather",
    "allgather_coalesced": "all_gather",
    "allgather_into_tensor_coalesced": "all_gather",
    "all_gather_single_coalesced": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "_reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_single": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "reduce_scatter_single_coalesced": "reduce_scatter",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all",
    "all_to_all_single": "all_to_all",
    "barrier": "barrier",
    "send": "send",
    "recv": "recv",
}
MESSAGES = ("send", "recv")
_Span = Callable[..., contextlib.AbstractContextManager[None]]
_Key = tuple[str, str, int]


@contextlib.contextmanager
def recorded(span: _Span, clock: Callable[[], int], synchronize: Callable[[], None]) -> Iterator[None]:
    """Inside, each wait is a `span("collective", name, when the operation was started, its key)`."""
    group, work = dist.ProcessGroup, dist.Work
    counts: Counter[tuple[str, str]] = Counter()
    started: dict[int, tuple[str, int, _Key]] = {}  # id of a work that nobody has waited for yet

    def starting(method: str, original: Any) -> Any:
        name = OPERATIONS[method]

        def start(self: Any, *args: Any, **kwargs: Any) -> Any:
            if self.size() == 1:
                return original(self, *args, **kwargs)
            synchronize()
            now, channel = clock(), _channel(self, name, args)
            result = original(self, *args, **kwargs)
            if result is not None:
                place = self.group_name, channel
                counts[place] += 1
                size = 2 if name in MESSAGES else self.size()
                started[id(result)] = name, now, (place[0], f"{channel}{counts[place]}", size)
            return result

        return start

    original_wait = work.__dict__["wait"]

    def wait(self: Any, *args: Any, **kwargs: Any) -> Any:
        operation = started.pop(id(self), None)
        if operation is None:
            return original_wait(self, *args, **kwargs)
        name, now, key = operation
        with span("collective", name, now, key):
            result = original_wait(self, *args, **kwargs)
            synchronize()
        return result

    found = [name for name in OPERATIONS if name in group.__dict__]
    originals: dict[tuple[type, str], Any] = {(group, name): group.__dict__[name] for name in found}
    replaced = {place: starting(place[1], original) for place, original in originals.items()}
    originals[work, "wait"], replaced[work, "wait"] = original_wait, wait
    try:
        for (owner, name), method in replaced.items():
            setattr(owner, name, method)
        yield
    finally:
        for (owner, name), method in originals.items():
            setattr(owner, name, method)


def _channel(group: Any, name: str, args: tuple[Any, ...]) -> str:
    """What numbers the operation within its group: "" for collectives, the two ranks for messages."""
    if name not in MESSAGES:
        return ""
    own, other = group.rank(), args[1]
    return f"{own}->{other} " if name == "send" else f"{other}->{own} "
