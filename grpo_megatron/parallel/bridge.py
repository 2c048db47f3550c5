"""Bridge: messages between ranks that train and rollout ranks (`rollout.placement: separate`).

The last `num_rollout_ranks` ranks of one job sample. torch, Megatron-Core and vLLM see a world per role; only the bridge
has all ranks. Nothing on it is collective but `join` and `meet`.

Values, and weights on the host, travel over gloo, in its own thread, from the sender's memory: what is sent must not change
before `wait`. Weights on GPUs travel over NCCL. Messages between two ranks with one tag arrive in the order in which they were
sent.
"""

from __future__ import annotations

import datetime
import os
import pickle
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store

from grpo_megatron.parallel.control import LostRank, parts_of_message, received_message

VALUES, WEIGHTS = 1, 2  # tags
PATIENCE = datetime.timedelta(days=365)


class Bridge:
    """`rank` counts all ranks of the run: those that train first, then those that sample."""

    def __init__(self, group: Any, num_rollout_ranks: int, on_gpus: Sequence[Any] = (), is_mixed: bool = False) -> None:
        """`on_gpus`: NCCL's groups, for messages between nodes and within one. `is_mixed`: not all ranks have a GPU."""
        self.group, self.rank, self.size = group, group.rank(), group.size()
        self._on_gpus, self.is_mixed = on_gpus, is_mixed
        self.num_training, self.num_rollout_ranks = self.size - num_rollout_ranks, num_rollout_ranks
        self._sent: deque[tuple[int, list[Any]]] = deque()  # values on their way, with their receiver

    @classmethod
    def join(cls, store: Store, device: torch.device, timeout: datetime.timedelta, num_rollout_ranks: int) -> Bridge:
        """Connect all ranks of the run. Collective. `device`: this rank's."""
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        group = dist.ProcessGroupGloo(store, rank, size, timeout)
        num_gpus = torch.tensor([int(device.type != "cpu")])
        group.allreduce([num_gpus]).wait()  # type: ignore[attr-defined]
        if num_gpus != size:
            return cls(group, num_rollout_ranks, is_mixed=bool(num_gpus))
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        stores = (PrefixStore(name, store) for name in ("between", "within"))  # a group's messages run in turn
        on_gpus = [dist.ProcessGroupNCCL(of_group, rank, size, options) for of_group in stores]
        for nccl in on_gpus:
            nccl.eager_connect_single_device(device)  # one communicator, also for messages between two ranks
        return cls(group, num_rollout_ranks, on_gpus)

    @property
    def samples_only(self) -> bool:
        """True on a rank that only has an engine."""
        return self.rank >= self.num_training

    def name(self, rank: int) -> str:
        """A rank of the run, for a message."""
        if rank < self.num_training:
            return f"training rank {rank}"
        return f"rollout rank {rank - self.num_training} (rank {rank} of the run)"

    def meet(self) -> None:
        """Collective over the run: returns when all ranks have called it."""
        with self._naming(None):
            self.group.barrier().wait()

    def send(self, value: object, to: int) -> None:
        """Send a host-side value, which is pickled, to a rank of the run. Does not wait."""
        parts = parts_of_message(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL))
        with self._naming(to):
            self._sent.append((to, [(part, self.group.send([part], to, VALUES)) for part in parts]))

    def receive(self, source: int) -> Any:
        """The next value that a rank of the run has sent to this one. Waits for it."""
        with self._naming(source):
            content = received_message(lambda part: self.group.recv([part], source, VALUES).wait())
        return pickle.loads(content.numpy().data)

    def flush(self, keep: int = 0) -> None:
        """Wait until all values that this rank has sent have been received, or all but the last `keep`."""
        while len(self._sent) > keep:
            to, works = self._sent.popleft()
            with self._naming(to):
                for _, work in works:
                    work.wait()

    def close(self) -> None:
        """Wait until all values have been received, and leave the groups. Collective over the run."""
        self.flush()
        for group in self._on_gpus:
            group.shutdown()

    def post(
        self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]], *, within_node: bool = False
    ) -> Callable[[], None]:
        """Weights: starts all messages. The result waits for them (see `Post` of sync/exchange.py).

        A rollout rank, which may receive long before a rank that trains sends, has no time-out. On GPUs the messages are one
        kernel, and the current stream waits for it, not this program.
        """
        on_gpus = any(buffer.device.type != "cpu" for _, buffer in (*sends, *receives))
        group, works = self._on_gpus[within_node] if on_gpus else self.group, []
        if on_gpus:
            group._start_coalescing()
        for call, envelopes in ((group.recv, receives), (group.send, sends)):
            for peer, buffer in envelopes:
                with self._naming(peer):
                    works.append((peer, buffer, call([buffer], peer, WEIGHTS)))
        if on_gpus:
            return group._end_coalescing().wait  # type: ignore[no-any-return]

        def wait() -> None:
            for peer, _, work in works:
                with self._naming(peer):
                    work.wait(*[PATIENCE] * self.samples_only)

        return wait

    @contextmanager
    def _naming(self, peer: int | None) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            if "timed out" in str(error).lower():
                raise  # parallel/heartbeat.py names the ranks that are late
            who = "a rank of the other role" if peer is None else self.name(peer)
            raise LostRank(f"lost the connection to {who} ({str(error).partition('. ')[0]})") from error
