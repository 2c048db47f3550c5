"""The host side of a step in a large world, in one process: what one rank computes, for several numbers of ranks.

The samples of all ranks are sampled as numbers (no tokens), and sent as they would be: pickled parts of every engine replica.
Every phase is timed once, after a first run; then it runs under tracemalloc for the largest memory that it holds at once,
besides its inputs. Network time is not in it; `parallel/control.py` gives the number of messages.
"""

from __future__ import annotations

import argparse
import pickle
import random
import sys
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # runs from a checkout that is not installed

GROUP = 8  # samples per prompt
REPLICA = 8  # ranks per data-parallel replica, and per engine replica
METRICS = 100  # names that every rank records


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 512, 4096])
    parser.add_argument("--samples", type=int, default=65536)


def scale(args: argparse.Namespace) -> int:
    print(
        f"{args.samples:,} samples, {GROUP} per prompt; replicas and engine replicas of {REPLICA} ranks; seconds (peak MiB)"
    )
    print(f"{'ranks':>6s}  " + "  ".join(f"{name:>16s}" for name in PHASES))
    for ranks in args.ranks:
        step = SimulatedStep(ranks, args.samples)
        cells = [f"{seconds:6.3f} ({mebibytes:6.1f})" for seconds, mebibytes in map(step.measured, PHASES)]
        print(f"{ranks:6d}  " + "  ".join(f"{cell:>16s}" for cell in cells))
    return 0


class SimulatedStep:
    """The work of rank 0 of a world: what it receives and computes."""

    def __init__(self, ranks: int, num_samples: int) -> None:
        from grpo_megatron.config import ActorConfig, AlgorithmConfig

        self.ranks, self.num_samples, self.dp = ranks, num_samples, ranks // REPLICA
        self.parts = self._parts()
        self.records = self._records()
        self.algorithm = AlgorithmConfig()
        self.actor = ActorConfig(ppo_mini_batch_size=num_samples // GROUP, ppo_max_token_len_per_gpu=16384)
        self.table = self.gather()
        self.plan = self.make_plan()

    def measured(self, phase: str) -> tuple[float, float]:
        """Seconds, and MiB that are held at the same time."""
        action: Callable[[], object] = getattr(self, PHASES[phase])
        begin = time.process_time()
        action()
        seconds = time.process_time() - begin
        tracemalloc.start()
        action()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return seconds, peak / 2**20

    def _parts(self) -> list[bytes]:
        """Returns every rank's message: samples from the first rank of an engine replica, nothing from the others."""
        from grpo_megatron.parallel.exchange import table_part
        from grpo_megatron.types import Prompt, Sample

        rng, blocks = random.Random(0), max(1, self.ranks // REPLICA)
        samples = []
        for number in range(self.num_samples):
            prompt = Prompt(str(number // GROUP), tuple(range(rng.randint(50, 200))), "", "", "s", "r")
            length = int(rng.gammavariate(2, 150)) + 1
            sample = Sample(prompt, number // GROUP, number % GROUP, [0] * length, [], "stop", 0)
            sample.reward = float(rng.random() < 0.5)
            samples.append(sample)
        self.crossing = samples[: len(samples) * 2 // max(2, blocks)]
        parts = []
        for rank in range(self.ranks):
            block = rank // REPLICA
            held = samples[block * len(samples) // blocks : (block + 1) * len(samples) // blocks]
            parts.append(pickle.dumps(table_part(held if rank % REPLICA == 0 else []), protocol=5))
        return parts

    def _records(self) -> list[bytes]:
        from grpo_megatron.report.metrics import Metrics

        sent: list[Any] = []

        def keep(local: Any) -> list[Any]:
            sent.append(local)
            return [local]

        metrics = Metrics()
        for number in range(METRICS):
            kind = (metrics.mean_of, metrics.std, lambda name, values: metrics.max(name, values[0]))[number % 3]
            kind(f"section/metric_{number}", [0.5, float(number)])
        metrics.reduce(keep)
        return [pickle.dumps(sent[0], protocol=5)] * self.ranks

    def gather(self) -> Any:
        from grpo_megatron.parallel.exchange import drawn_twice, merge_parts

        parts = [pickle.loads(part) for part in self.parts]
        assert not drawn_twice(parts)
        return merge_parts(parts)

    def make_plan(self) -> Any:
        from grpo_megatron.algo.plan import make_plan

        sizes = {"dp": self.dp, "train_batch_size": self.num_samples // GROUP, "max_response_length": 4096}
        return make_plan(self.table, self.algorithm, self.actor, **sizes)

    def exchange(self) -> Any:
        from grpo_megatron.parallel.exchange import moves

        return moves(self.table, self.plan.owner(), 0, 0)

    def select(self) -> Any:
        """A round of dynamic sampling, after its table is gathered."""
        from grpo_megatron.algo.advantages import informative_groups
        from grpo_megatron.report.metrics import Metrics
        from grpo_megatron.sampling import wrappers
        from grpo_megatron.sampling.collector import Group

        drawn = [Group(0, []) for _ in range(self.num_samples // GROUP)]
        chosen = [drawn[self.table.prompt_index[rows[0]]] for rows in informative_groups(self.table)]
        inner: Any = SimpleNamespace(groups=lambda step, count, metrics: drawn[:count])
        mesh: Any = None
        collector = wrappers.DynamicSampling(inner, mesh, round_size=len(drawn), max_rounds=1, max_staleness=1)
        with mock.patch.object(wrappers, "select_informative", lambda groups, mesh: chosen):
            return collector.groups(0, len(drawn) // 2, Metrics())

    def cross(self) -> Any:
        """Simulates two roles: a replica's samples, as its first rank sends them, and as a training rank has them."""
        from grpo_megatron.sampling.collector import Group, groups_by_prompt

        groups = groups_by_prompt(self.crossing, self.num_samples // GROUP, 0)
        parts = pickle.loads(pickle.dumps(groups, protocol=5))
        return [Group(group.version, list(part.samples)) for group, part in zip(groups, parts, strict=True)]

    def reduce(self) -> Any:
        from grpo_megatron.report.metrics import Metrics

        return Metrics().reduce(lambda local: [pickle.loads(record) for record in self.records])


PHASES = {
    "gather": "gather",
    "plan": "make_plan",
    "exchange": "exchange",
    "dynamic sampling": "select",
    "metrics": "reduce",
    "two roles": "cross",
}
