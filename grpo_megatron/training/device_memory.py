"""DeviceWatch: the GPU memory that stays taken while the engine sleeps, and whether the next phase fits beside it.

NCCL's buffers, CUDA graphs and workspaces stay. What grows from step to step was never planned. Not run on a GPU yet.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence

from grpo_megatron.device import DeviceMemory
from grpo_megatron.parallel.mesh import Mesh
from grpo_megatron.planning.phases import ESTIMATED, GIB, Phase
from grpo_megatron.report.metrics import Metrics

logger = logging.getLogger(__name__)
WARN = GIB  # more than after the first sleep
_AWAKE = "engine weights", "KV cache"
_REMEDY = (
    "start the run again from its last checkpoint (a new process has none of it), and set rollout.enforce_eager=true, a lower"
    " rollout.gpu_memory_utilization, or actor.megatron.offload_optimizer=true"
)


class DeviceWatch:
    """Compares each sleep with the first, and the free memory with what a phase needs.

    `read`: `Device.memory`; it returns None where nothing sleeps. `phases`: those of this rank's stage. Estimated parts do not
    count, so that no estimate stops a run. A rollout needs what the last sleep has freed: the plan gives only its share.
    """

    def __init__(self, mesh: Mesh, read: Callable[[], DeviceMemory | None], phases: Sequence[Phase] = ()) -> None:
        self._mesh, self._read = mesh, read
        beside = {phase.name: phase for phase in phases}.get("rollout", Phase("rollout", 0, {}))
        self._beside = {name: size for name, size in beside.parts.items() if name not in (*ESTIMATED, *_AWAKE)}
        after = [phase.name for phase in phases].index("rollout") + 1 if self._beside else len(phases)
        self._training = [phase for phase in phases[after:] if not phase.utilization]
        self._first: DeviceMemory | None = None
        self._freed, self._limit = 0, WARN

    def require_rollout(self) -> None:
        """Raises RankError on every rank where one lacks the memory that the engine takes. Collective on GPUs."""
        if (now := self._read()) is None:
            return
        is_short = now.free < self._freed
        needs = f"{self._freed / GIB:.2f} GiB, which the last sleep has freed (the engine's share of the device)"
        self._mesh.agree(self._shortage("rollout", now, needs) if is_short else None)

    @contextlib.contextmanager
    def sleeping(self, metrics: Metrics) -> Iterator[None]:
        """Surrounds the engine's falling asleep, before anything else is allocated. Raises as `require_rollout`. Collective."""
        before = self._read()
        yield
        now = self._read()
        if before is None or now is None:
            return
        # What torch only caches it frees when it lacks memory: no need of a rollout.
        cached, kept = (memory.reserved - memory.allocated for memory in (before, now))
        self._first, self._freed = self._first or now, now.free - before.free - max(0, cached - kept)
        metrics.max("perf/device_memory_asleep_gb", (now.total - now.free) / GIB)
        if self._first.free - now.free >= self._limit:
            self._limit = self._first.free - now.free + WARN
            logger.warning("rank %d, engine asleep: %s; %s", self._mesh.rank, self._growth(now), _REMEDY)
        self._mesh.agree(next(self._problems(now), None))

    def _problems(self, now: DeviceMemory) -> Iterator[str]:
        for phase in self._training:
            parts = {name: size - self._beside.get(name, 0.0) for name, size in phase.parts.items()}
            parts = {name: size for name, size in parts.items() if size > 0 and name not in ESTIMATED}
            if now.free < sum(parts.values()):
                sizes = " + ".join(f"{name} {size / GIB:.2f}" for name, size in parts.items())
                yield self._shortage(phase.name, now, f"{sum(parts.values()) / GIB:.2f} GiB more ({sizes}, as planned)")

    def _shortage(self, phase: str, now: DeviceMemory, needs: str) -> str:
        free = f"{now.free / GIB:.2f} of {now.total / GIB:.2f} GiB are free"
        return f"phase {phase} does not fit: {free}, and it needs {needs}; {self._growth(now)}; {_REMEDY}"

    def _growth(self, now: DeviceMemory) -> str:
        """Describes what has grown since the first sleep, by the allocator that has it."""
        first = self._first or now
        taken, reserved = first.free - now.free, now.reserved - first.reserved
        return (
            f"{taken / GIB:+.2f} GiB more than at the first sleep are taken, torch's caching allocator has {reserved / GIB:+.2f}"
            f" (its tensors {(now.allocated - first.allocated) / GIB:+.2f}) of them, and CUDA, NCCL, CUDA graphs, vLLM's"
            f" sleeping pool and other processes {(taken - reserved) / GIB:+.2f}"
        )
