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
import re
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store

from grpo_megatron.parallel.control import INCARNATION, LostRank, parts_of_message, received_message

VALUES, WEIGHTS = 1, 2  # tags
NEWEST, JOINED, OVER = "newest", "joined", "over"  # keys: the newest incarnation, that it is awaited, that none is
PAUSE_S = 0.05
PLACE = re.compile(r"\[/\S+:\d+\] ")  # of gloo's source
PATIENCE = datetime.timedelta(days=365)


class RunOver(Exception):
    """In a rank that replaces another one: the run has ended without it."""


class Bridge:
    """`rank` counts all ranks of the run: those that train first, then those that sample."""

    def __init__(self, store: Store, device: torch.device, timeout: datetime.timedelta, num_rollout_ranks: int) -> None:
        """Connect all ranks of the run. Collective. `device`: this rank's."""
        self._store, self._device, self._timeout = store, device, timeout
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.num_training, self.num_rollout_ranks = self.size - num_rollout_ranks, num_rollout_ranks
        self.replaces = False  # on a rank that trains: a lost rollout rank is no error (see `lost`)
        self._left: list[Any] = []  # groups with lost ranks: gloo cannot end what is on its way
        self._connect(int(os.environ.get(INCARNATION, "0")))

    def _connect(self, incarnation: int) -> None:
        self.incarnation, self.lost = incarnation, ""
        self._sent: deque[tuple[int, list[Any]]] = deque()  # values on their way, with their receiver
        if self.rank == self.num_training:
            self._store.set(NEWEST, str(incarnation))
        elif self.rank == 0:
            self._store.set(f"{JOINED}{incarnation}", "")
        while self.samples_only and incarnation and not self._store.check([f"{JOINED}{incarnation}"]):
            if self._store.check([OVER]):
                raise RunOver
            time.sleep(PAUSE_S)
        store, size = PrefixStore(str(incarnation), self._store), self.size
        gloo: Any = dist.ProcessGroupGloo(store, self.rank, size, self._timeout)
        self.group = gloo
        on_gpu = torch.tensor([int(self._device.type != "cpu")])
        self.group.allreduce([on_gpu]).wait()
        num_gpus = int(on_gpu)
        self.is_mixed = 0 < num_gpus < size  # not all ranks have a GPU
        self._on_gpus: list[Any] = []  # NCCL's groups, for messages between nodes and within one
        if num_gpus < size:
            return
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = self._timeout
        stores = (PrefixStore(name, store) for name in ("between", "within"))  # a group's messages run in turn
        self._on_gpus = [dist.ProcessGroupNCCL(of_group, self.rank, size, options) for of_group in stores]
        for nccl in self._on_gpus:
            nccl.eager_connect_single_device(self._device)  # one communicator, also for messages between two ranks

    # -- rollout ranks that replace lost ones (cli/keeper.py) ----------------------------------------------------------

    def successor(self) -> int:
        """Waits for the rollout ranks after those that are lost. Raises LostRank when none has come in the time-out."""
        until = time.monotonic() + self._timeout.total_seconds()
        while (newest := int(self._store.get(NEWEST))) <= self.incarnation:
            if time.monotonic() > until:
                raise LostRank(f"{self.lost}, and no other has taken its place for {self._timeout.total_seconds():g} s")
            time.sleep(PAUSE_S)
        return newest

    def rejoin(self, incarnation: int) -> None:
        """Connects to the ranks that replace lost ones. Collective over the ranks that train. Raises LostRank."""
        self._left += [self.group, *self._sent]
        for nccl in self._on_gpus:
            nccl.abort()
        with self._naming(None):
            self._connect(incarnation)

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
        with self._naming(to, tolerant=True):
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
            with self._naming(to, tolerant=True):
                for _, work in works:
                    work.wait()

    def close(self) -> None:
        """Wait until all values have been received, and leave the groups. Collective over the run."""
        self.flush()
        for group in self._on_gpus:
            group.shutdown()
        if self.rank == 0:
            self._store.set(OVER, "")  # for ranks that replace others meanwhile

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
                with self._naming(peer, tolerant=True):
                    works.append((peer, buffer, call([buffer], peer, WEIGHTS)))
        if on_gpus:
            return group._end_coalescing().wait  # type: ignore[no-any-return]

        def wait() -> None:
            for peer, _, work in works:
                with self._naming(peer, tolerant=True):
                    work.wait(*[PATIENCE] * self.samples_only)

        return wait

    @contextmanager
    def _naming(self, peer: int | None, *, tolerant: bool = False) -> Iterator[None]:
        """`tolerant`: what was to be sent to a rank that is lost is not needed any more where it is replaced."""
        try:
            yield
        except RuntimeError as error:
            if "timed out" in str(error).lower():
                raise  # parallel/heartbeat.py names the ranks that are late
            who = "a rank of the other role" if peer is None else self.name(peer)
            self.lost = self.lost or f"lost the connection to {who} ({PLACE.sub('', str(error)).partition('. ')[0]})"
            if not (tolerant and self.replaces):
                raise LostRank(self.lost) from error
