"""`tools.benchmarks waiting`: rollouts of two ranks whose responses differ much in length, with and without waiting.

Two ranks on the CPU, each with the real vLLM on a small random model. First, steps that wait for all their responses beside
partial rollouts; every step has as many groups. Then requests sorted by length, as a data file is that is sorted by
difficulty: cut in order, shared, and dealt out by length and shared. The ways take turns.

Engine steps are counted beside the seconds: on a GPU a step takes nearly as long for few sequences as for many, on a CPU not.

This file is also what the two ranks run.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tools.benchmarks.overlap import EOS, MODEL, Numbers

MAX_TOKENS, SAMPLES, BATCH = 512, 8, 8
PARTIAL = {"over_sample": 1.5, "max_staleness": 4, "chunk_tokens": 32}
WARM = 4  # the first steps of partial rollouts take short responses only
CAPACITY = 16  # sequences that an engine decodes at a time, where requests are shared


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=12, help="measured training steps of partial rollouts")
    parser.add_argument("--repeats", type=int, default=5, help="of the shared requests")


def waiting(args: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory(prefix="benchmark-waiting-") as root:
        (Path(root) / "config.json").write_text(json.dumps({**MODEL, "max_position_embeddings": 2 * MAX_TOKENS}))
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
        command += [root, str(args.steps), str(args.repeats)]
        return subprocess.run(command, env=environment, check=False).returncode


def run_rank(folder: Path, steps: int, repeats: int) -> None:
    import torch

    from grpo_megatron.config import RolloutConfig
    from grpo_megatron.device import Device
    from grpo_megatron.models.families import hf_shapes, read_architecture
    from grpo_megatron.models.weights.stream import engine_tensors
    from grpo_megatron.parallel.mesh import build_mesh
    from grpo_megatron.rollout.build import build_engine

    device, rollout = Device("cpu"), RolloutConfig(engine_options={"kv_cache_gib": 0.5})
    mesh, arch = build_mesh(device, tp=1, pp=1, rollout_tp=1), read_architecture(folder)
    limits: dict[str, Any] = {"dtype": "float32", "max_model_len": MAX_TOKENS + 16, "eos_token_ids": [EOS]}
    engine = build_engine(rollout, folder, mesh, device, **limits, tensors=engine_tensors(arch, 1, reads_shards=True))
    torch.manual_seed(0)
    stream = iter([[(name, torch.randn(shape) * 0.05) for name, shape in hf_shapes(arch).items()]])
    engine.load_weights(stream, 0)
    engine = CountedEngine(engine)
    text = f"{partial(engine, mesh, steps)}\n{shared(engine, mesh, repeats)}"
    if mesh.rank == 0:
        print(text, flush=True)
    mesh.barrier()
    os._exit(0)  # threads of vLLM and gloo would delay a normal exit


class CountedEngine:
    """An engine that counts its steps, and does not mind which version it is asked for."""

    def __init__(self, engine: Any) -> None:
        self.engine, self.num_steps = engine, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def poll(self) -> Any:
        self.num_steps += 1
        return self.engine.poll()

    def stream(self, requests: Any, version: int) -> Any:
        from grpo_megatron.rollout.engine import RolloutEngine

        return RolloutEngine.stream(self, requests, version)  # type: ignore[arg-type]


class Clock:
    """Seconds and engine steps until the last rank is done."""

    def __init__(self, engine: CountedEngine, mesh: Any) -> None:
        self.engine, self.mesh = engine, mesh
        self.seconds: list[float] = []
        self.steps: list[int] = []

    def measure(self, work: Callable[[], Any]) -> Any:
        self.mesh.barrier()
        begin, self.engine.num_steps = time.perf_counter(), 0
        result = work()
        steps = max(self.mesh.all_gather(self.engine.num_steps))
        self.seconds.append(time.perf_counter() - begin)
        self.steps.append(steps)
        return result


def partial(engine: Any, mesh: Any, steps: int) -> str:
    """Seconds per step: of all its responses, and of those that are complete when the batch is full."""
    from grpo_megatron.config import DataConfig, RolloutConfig
    from grpo_megatron.data.sampler import Sampler
    from grpo_megatron.report.metrics import Metrics
    from grpo_megatron.sampling.collector import PolicyCollector
    from grpo_megatron.sampling.generator import Generator
    from grpo_megatron.sampling.partial import PartialCollector
    from grpo_megatron.types import BY_MODEL, Prompt

    prompts = [Prompt(f"p/{i}", (3 + i % 60, 5, 7), "", "", "", BY_MODEL) for i in range(64)]
    rollout = RolloutConfig.model_validate({"n": SAMPLES, "partial": PARTIAL})
    data = DataConfig(max_response_length=MAX_TOKENS)

    def collector(kind: type[PolicyCollector]) -> PolicyCollector:
        generator = Generator(engine, None, Numbers(), mesh, rollout, lambda: "")
        return kind(generator, Sampler(prompts, BATCH, shuffle=False), data, rollout)

    ways = {"all awaited": collector(PolicyCollector), "partial": collector(PartialCollector)}
    clocks = {name: Clock(engine, mesh) for name in ways}
    lengths: dict[str, list[int]] = {name: [] for name in ways}
    ages: list[float] = []
    for step in range(WARM + steps):
        engine.engine._version = step  # the weights stay: a sync would cost both the same
        for name, way in ways.items():
            metrics = Metrics()
            groups = clocks[name].measure(lambda way=way, step=step, metrics=metrics: way.groups(step, BATCH, metrics))
            reduced = metrics.reduce(mesh.all_gather)
            if step >= WARM:
                lengths[name] += [len(sample.response_ids) for group in groups for sample in group.samples]
                ages += [reduced["rollout/partial/staleness_mean"]] if name == "partial" else []
    lines = [f"{BATCH} groups of {SAMPLES} responses per step, {MAX_TOKENS} tokens at most; means of {steps} steps"]
    base: list[float] = []
    for name, clock in clocks.items():
        tokens = statistics.fmean(length for values in mesh.all_gather(lengths[name]) for length in values)
        measured = [statistics.fmean(clock.seconds[WARM:]) / tokens, statistics.fmean(clock.steps[WARM:]) / tokens]
        base = base or measured
        ratios = " and ".join(f"{new / old:.2f}" for new, old in zip(measured, base, strict=True))
        lines.append(
            f"  {name:<20} {measured[0] * tokens:.2f} s, {measured[1] * tokens:.0f} engine steps, {tokens:.0f} tokens per"
            f" response; per token {ratios}"
        )
    return "\n".join([*lines, f"  a token of a partial rollout is {statistics.fmean(ages):.2f} steps old"])


def shared(engine: Any, mesh: Any, repeats: int) -> str:
    """Seconds until the last rank is done with 128 requests of known lengths, the longest ones first in the file."""
    from grpo_megatron.rollout.engine import Request
    from grpo_megatron.sampling.generator import assign_samples, stream_shared

    generator = random.Random(0)
    sizes = [min(MAX_TOKENS, int(generator.lognormvariate(4, 1))) + 1 for _ in range(128 // SAMPLES)]
    sizes.sort(reverse=True)

    def request(number: int) -> Request:
        prompt = number // SAMPLES
        return Request((3 + prompt, 5, 7), seed=number, max_tokens=sizes[prompt])

    in_order = assign_samples(len(sizes), SAMPLES, 2)
    by_length = assign_samples(len(sizes), SAMPLES, 2, [float(size) for size in sizes])

    def draw(queues: list[list[int]]) -> None:
        for _ in stream_shared(engine, queues, request, engine.version, mesh, CAPACITY):
            pass

    ways: dict[str, Callable[[], None]] = {
        "cut in order": lambda: _alone(engine, in_order[mesh.rank], request),
        "shared": lambda: draw(in_order),
        "by length, shared": lambda: draw(by_length),
    }
    clocks = {name: Clock(engine, mesh) for name in ways}
    for _ in range(repeats + 1):
        for name, run in ways.items():
            clocks[name].measure(run)
    title = f"128 requests sorted by length, at most {max(sizes)} tokens, {CAPACITY} decoded at a time; medians of {repeats}"
    base = statistics.median(clocks["cut in order"].seconds[1:]), clocks["cut in order"].steps[-1]
    lines = [
        f"  {name:<20} {(spent := statistics.median(clock.seconds[1:])):.2f} s, {clock.steps[-1]} engine steps; ratios"
        f" {spent / base[0]:.2f} and {clock.steps[-1] / base[1]:.2f}"
        for name, clock in clocks.items()
    ]
    return "\n".join([title, *lines])


def _alone(engine: Any, queue: list[int], request: Callable[[int], Any]) -> None:
    """The queue of this rank, CAPACITY requests at a time, without the others."""
    left, unfinished = list(queue), set()
    while left or unfinished:
        while left and len(unfinished) < CAPACITY:
            number = left.pop(0)
            engine.submit(str(number), request(number), engine.version)
            unfinished.add(str(number))
        unfinished -= {key for key, _ in engine.poll()}


if __name__ == "__main__":
    run_rank(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
