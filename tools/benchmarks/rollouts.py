"""`tools.benchmarks overlap`: rewards graded while the engine generates, beside rewards graded afterwards.

One rank on the CPU, with the real vLLM on a small random model, whose responses end at random lengths, and real reward
workers, whose reward sleeps. Both ways sample the same samples; their tokens and rewards are compared.

Then a validation, whose rewards are slow, between training samples, whose rewards are quick: what it takes beyond sampling.
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

from tools.benchmarks.workload import machine

MODEL: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_hidden_layers": 4,
    "vocab_size": 64,  # of which one token ends the response
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "torch_dtype": "float32",
}
EOS, MAX_TOKENS, SAMPLES = 2, 256, 8
REWARD = """
import time

def reward(completion, answer, *, seconds):
    time.sleep(seconds)
    return float(len(completion))


def quick(completion, answer, *, seconds):
    return float(len(completion))
"""


def add_overlap_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompts", type=int, default=16, help="with 8 samples each")
    parser.add_argument("--milliseconds", type=float, default=4.0, help="that the reward of one sample takes")
    parser.add_argument("--workers", type=int, default=1, help="reward.num_workers")
    parser.add_argument("--repeats", type=int, default=5)


class Numbers:
    """A tokenizer that writes ids as numbers."""

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return " ".join(map(str, ids))


def overlap(args: argparse.Namespace) -> int:
    print(machine())
    with tempfile.TemporaryDirectory(prefix="benchmark-overlap-") as root:
        folder = Path(root)
        (folder / "config.json").write_text(json.dumps(MODEL))
        (folder / "slow_reward.py").write_text(REWARD)
        sys.path.insert(0, str(folder))
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "OMP_NUM_THREADS": "1"}
        os.environ |= dict.fromkeys(("RANK", "LOCAL_RANK"), "0") | dict.fromkeys(
            ("WORLD_SIZE", "LOCAL_WORLD_SIZE"), "1"
        )
        measure(folder, args)
    os._exit(0)  # threads of vLLM and gloo would delay a normal exit


def measure(folder: Path, args: argparse.Namespace) -> None:
    import torch

    from grpo_megatron.config import RolloutConfig
    from grpo_megatron.device import Device
    from grpo_megatron.models.families import hf_shapes, read_architecture
    from grpo_megatron.models.weights.stream import engine_tensors
    from grpo_megatron.parallel.mesh import build_mesh
    from grpo_megatron.rewards.pool import RewardPool
    from grpo_megatron.rollout.build import build_engine
    from grpo_megatron.sampling.generator import Generator

    device, rollout = Device("cpu"), RolloutConfig(engine_options={"kv_cache_gib": 0.25})
    mesh, arch = build_mesh(device, tp=1, pp=1, rollout_tp=1), read_architecture(folder)
    limits: dict[str, Any] = {"dtype": "float32", "max_model_len": MAX_TOKENS + 16, "eos_token_ids": [EOS]}
    tensors = engine_tensors(arch, 1, reads_shards=True)
    engine = build_engine(rollout, folder, mesh, device, **limits, tensors=tensors)
    torch.manual_seed(0)
    engine.load_weights(iter([[(name, torch.randn(shape) * 0.05) for name, shape in hf_shapes(arch).items()]]), 0)
    with RewardPool(args.workers, 10.0, {"seconds": args.milliseconds / 1000}) as pool:
        alone = Generator(engine, None, Numbers(), mesh, rollout, lambda: "")
        both = Generator(engine, pool, Numbers(), mesh, rollout, lambda: "")
        print(report(step(alone, both, pool, args), args), flush=True)
        print(validation_report(validation(alone, both, folder, args), args), flush=True)
    engine.shutdown()


def prompts_of(args: argparse.Namespace, reward: str) -> list[Any]:
    from grpo_megatron.types import Prompt

    return [Prompt(f"p/{i}", (3 + i % 60, 5, 7), "", "", "", f"slow_reward:{reward}") for i in range(args.prompts)]


DRAW: dict[str, Any] = {"round_id": 0, "version": 0, "max_tokens": MAX_TOKENS, "temperature": 1.0}


def step(alone: Any, both: Any, pool: Any, args: argparse.Namespace) -> dict[str, list[float]]:
    from grpo_megatron.report.metrics import Metrics

    seconds: dict[str, list[float]] = {"generate": [], "grade": [], "afterwards": [], "overlapped": [], "tail": []}
    prompts = prompts_of(args, "reward")
    for _ in range(args.repeats + 1):
        begin = time.perf_counter()
        drawn = alone.sample(prompts, SAMPLES, **DRAW, metrics=Metrics())
        generated = time.perf_counter()
        results = pool.grade([(s.prompt.reward, Numbers().decode(s.response_ids, True), "") for s in drawn])
        graded, metrics = time.perf_counter(), Metrics()
        overlapped = both.sample(prompts, SAMPLES, **DRAW, metrics=metrics)
        seconds["overlapped"].append(time.perf_counter() - graded)
        seconds["tail"].append(metrics.reduce()["timing_s/reward"])
        seconds["generate"].append(generated - begin)
        seconds["grade"].append(graded - generated)
        seconds["afterwards"].append(graded - begin)
        assert [s.response_ids for s in overlapped] == [s.response_ids for s in drawn]
        assert [s.reward for s in overlapped] == [result.reward for result in results]
    return {name: values[1:] for name, values in seconds.items()}


def validation(alone: Any, both: Any, folder: Path, args: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds of sampling alone; of a validation graded afterwards and meanwhile; and of all in it but its sample."""
    from grpo_megatron.config import Config
    from grpo_megatron.report.metrics import Metrics
    from grpo_megatron.training.stopping import Cadence
    from grpo_megatron.training.validation import Validator

    raw: dict[str, Any] = {"model": {"path": str(folder)}, "data": {"max_response_length": MAX_TOKENS}}
    raw["rollout"] = {"val_kwargs": {"n": SAMPLES, "temperature": 1.0, "top_p": 1.0}}
    raw["trainer"] = {"output_dir": str(folder), "num_logged_samples": 8}
    config = Config.model_validate(raw)
    slow, quick = prompts_of(args, "reward"), prompts_of(args, "quick")
    seconds: dict[str, list[float]] = {"draw": [], "afterwards": [], "meanwhile": [], "rest": []}
    in_draw = 0.0

    class Timed:
        """A generator that adds up the seconds of its samples."""

        mesh = both.mesh

        def sample(self, *arguments: Any, **options: Any) -> Any:
            nonlocal in_draw
            begin = time.perf_counter()
            samples = both.sample(*arguments, **options)
            in_draw += time.perf_counter() - begin
            return samples

    validators = {
        name: Validator(generator, slow, config, Cadence(config.trainer, None))
        for name, generator in (("draw", alone), ("afterwards", both), ("meanwhile", Timed()))
    }
    for _ in range(args.repeats + 1):
        for name, validator in validators.items():
            both.sample(quick, 1, **DRAW, metrics=Metrics())
            if name == "afterwards":
                both.grading._seconds_per_sample.clear()
                both.grading._seconds_per_sample[frozenset({"slow_reward:reward"})] = 0.0
            begin, in_draw = time.perf_counter(), 0.0
            validator.run(0, Metrics())
            seconds[name].append(time.perf_counter() - begin)
        seconds["rest"].append(seconds["meanwhile"][-1] - in_draw)
    return {name: values[1:] for name, values in seconds.items()}


def report(seconds: dict[str, list[float]], args: argparse.Namespace) -> str:
    median = {name: statistics.median(values) for name, values in seconds.items()}
    return (
        f"{args.prompts * SAMPLES} samples, {args.milliseconds:g} ms for each reward, {args.workers} worker(s); medians of"
        f" {args.repeats}: generate {median['generate']:.2f} s, grade {median['grade']:.2f} s\n"
        f"graded afterwards {median['afterwards']:.2f} s; graded meanwhile {median['overlapped']:.2f} s, of which"
        f" {median['tail']:.2f} s after the last response; ratio {median['overlapped'] / median['afterwards']:.2f}"
    )


def validation_report(seconds: dict[str, list[float]], args: argparse.Namespace) -> str:
    median = {name: statistics.median(values) for name, values in seconds.items()}
    beyond = [median[name] - median["draw"] for name in ("afterwards", "meanwhile")]
    return (
        f"validation of {args.prompts * SAMPLES} samples with these rewards, between steps with quick ones: sampled in"
        f" {median['draw']:.2f} s\n"
        f"graded afterwards {beyond[0]:.2f} s beyond the sample; graded meanwhile {beyond[1]:.2f} s beyond it, of which"
        f" {1000 * median['rest']:.1f} ms are gathering, metrics and files; ratio {beyond[1] / beyond[0]:.2f}"
    )


# `tools.benchmarks waiting`: rollouts of two ranks whose responses differ much in length, with and without waiting.
#
# Two ranks on the CPU, each with the real vLLM on a small random model. First, steps that wait for all their responses beside
# partial rollouts; every step has as many groups. Then requests sorted by length, as a data file is that is sorted by
# difficulty: cut in order, shared, and dealt out by length and shared. The ways take turns.
#
# Engine steps are counted beside the seconds: on a GPU a step takes nearly as long for few sequences as for many, on a CPU not.
#
# This file is also what the two ranks run.

MAX_TOKENS, SAMPLES, BATCH = 512, 8, 8
PARTIAL = {"over_sample": 1.5, "max_staleness": 4, "chunk_tokens": 32}
WARM = 4  # the first steps of partial rollouts take short responses only
CAPACITY = 16  # sequences that an engine decodes at a time, where requests are shared


def add_waiting_arguments(parser: argparse.ArgumentParser) -> None:
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
