"""`tools.benchmarks overlap`: rewards graded while the engine generates, beside rewards graded afterwards.

One rank on the CPU, with the real vLLM on a small random model, whose responses end at random lengths, and real reward
workers, whose reward sleeps. Both ways draw the same samples; their tokens and rewards are compared.

Then a validation, whose rewards are slow, between training draws, whose rewards are quick: what it takes beyond drawing.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
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
    "max_position_embeddings": 512,
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
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


DRAW: dict[str, Any] = {"draw_id": 0, "version": 0, "max_tokens": MAX_TOKENS, "temperature": 1.0}


def step(alone: Any, both: Any, pool: Any, args: argparse.Namespace) -> dict[str, list[float]]:
    from grpo_megatron.report.metrics import Metrics

    seconds: dict[str, list[float]] = {"generate": [], "grade": [], "afterwards": [], "overlapped": [], "tail": []}
    prompts = prompts_of(args, "reward")
    for _ in range(args.repeats + 1):
        begin = time.perf_counter()
        drawn = alone.draw(prompts, SAMPLES, **DRAW, metrics=Metrics())
        generated = time.perf_counter()
        results = pool.grade([(s.prompt.reward, Numbers().decode(s.response_ids, True), "") for s in drawn])
        graded, metrics = time.perf_counter(), Metrics()
        overlapped = both.draw(prompts, SAMPLES, **DRAW, metrics=metrics)
        seconds["overlapped"].append(time.perf_counter() - graded)
        seconds["tail"].append(metrics.reduce()["timing_s/reward"])
        seconds["generate"].append(generated - begin)
        seconds["grade"].append(graded - generated)
        seconds["afterwards"].append(graded - begin)
        assert [s.response_ids for s in overlapped] == [s.response_ids for s in drawn]
        assert [s.reward for s in overlapped] == [result.reward for result in results]
    return {name: values[1:] for name, values in seconds.items()}


def validation(alone: Any, both: Any, folder: Path, args: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds of drawing alone; of a validation graded afterwards and meanwhile; and of all in it but its draw."""
    from grpo_megatron.config import DataConfig, RolloutConfig, TrainerConfig
    from grpo_megatron.report.metrics import Metrics
    from grpo_megatron.training.validation import Validator

    rollout = RolloutConfig.model_validate({"val_kwargs": {"n": SAMPLES, "temperature": 1.0, "top_p": 1.0}})
    data, slow, quick = (
        DataConfig(max_response_length=MAX_TOKENS),
        prompts_of(args, "reward"),
        prompts_of(args, "quick"),
    )
    seconds: dict[str, list[float]] = {"draw": [], "afterwards": [], "meanwhile": [], "rest": []}
    in_draw = 0.0

    class Timed:
        """A generator that adds up the seconds of its draws."""

        def draw(self, *arguments: Any, **options: Any) -> Any:
            nonlocal in_draw
            begin = time.perf_counter()
            samples = both.draw(*arguments, **options)
            in_draw += time.perf_counter() - begin
            return samples

    validators = {
        name: Validator(
            generator, slow, data, rollout, both.mesh, TrainerConfig(output_dir=folder, num_logged_samples=8)
        )
        for name, generator in (("draw", alone), ("afterwards", both), ("meanwhile", Timed()))
    }
    for _ in range(args.repeats + 1):
        for name, validator in validators.items():
            both.draw(quick, 1, **DRAW, metrics=Metrics())
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
        f"validation of {args.prompts * SAMPLES} samples with these rewards, between steps with quick ones: drawn in"
        f" {median['draw']:.2f} s\n"
        f"graded afterwards {beyond[0]:.2f} s beyond the draw; graded meanwhile {beyond[1]:.2f} s beyond it, of which"
        f" {1000 * median['rest']:.1f} ms are gathering, metrics and files; ratio {beyond[1] / beyond[0]:.2f}"
    )
