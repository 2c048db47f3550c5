"""Bridge: messages between ranks that train and rollout ranks (`rollout.placement: separate`).

The last `num_rollout_ranks` ranks of one job sample. torch, Megatron-Core and vLLM see a world per role; only the bridge
knows all ranks. Nothing on it is collective but `meet`. A sender never waits for the receiver's program, so that a late rank
delays only what reads its message.

gloo moves a message when its receiver has asked for it, in its own thread, from the sender's memory: what is sent must not change
before `wait`. Messages between two ranks with one tag arrive in the order in which they were sent.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from grpo_megatron.parallel.control import LostRank, parts_of_message, received_message

VALUES, WEIGHTS = 1, 2  # tags


class Bridge:
    """`rank` counts all ranks of the run: those that train first, then those that sample."""

    def __init__(self, group: Any, num_rollout_ranks: int) -> None:
        self.group, self.rank, self.size = group, group.rank(), group.size()
        self.num_training, self.num_rollout_ranks = self.size - num_rollout_ranks, num_rollout_ranks
        self._sent: deque[tuple[int, list[Any]]] = deque()  # values on their way, with their receiver

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

    def post(self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]) -> Callable[[], None]:
        """Weights: starts all messages. The result waits for them (see `Post` of sync/exchange.py)."""
        works = []
        for call, envelopes in ((self.group.recv, receives), (self.group.send, sends)):
            for peer, buffer in envelopes:
                with self._naming(peer):
                    works.append((peer, buffer, call([buffer], peer, WEIGHTS)))

        def wait() -> None:
            for peer, _, work in works:
                with self._naming(peer):
                    work.wait()

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
