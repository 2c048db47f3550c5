"""`tools/benchmark.py overlap`: rewards graded while the engine generates, beside rewards graded afterwards.

One rank on the CPU, with the real vLLM on a small random model, whose responses end at random lengths, and real reward
workers, whose reward sleeps. Both ways draw the same samples; their tokens and rewards are compared.
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
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompts", type=int, default=16, help="with 8 samples each")
    parser.add_argument("--milliseconds", type=float, default=20.0, help="that the reward of one sample takes")
    parser.add_argument("--workers", type=int, default=1, help="reward.num_workers")
    parser.add_argument("--repeats", type=int, default=5)


class Numbers:
    """A tokenizer that writes ids as numbers."""

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return " ".join(map(str, ids))


def overlap(args: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory(prefix="benchmark-overlap-") as root:
        folder = Path(root)
        (folder / "config.json").write_text(json.dumps(MODEL))
        (folder / "slow_reward.py").write_text(REWARD)
        sys.path.insert(0, str(folder))
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "OMP_NUM_THREADS": "1"}
        os.environ |= dict.fromkeys(("RANK", "LOCAL_RANK"), "0") | dict.fromkeys(
            ("WORLD_SIZE", "LOCAL_WORLD_SIZE"), "1"
        )
        print(report(measure(folder, args), args))
        sys.stdout.flush()
    os._exit(0)  # threads of vLLM and gloo would delay a normal exit


def measure(folder: Path, args: argparse.Namespace) -> dict[str, list[float]]:
    import torch

    from grpo_megatron.config import RolloutConfig
    from grpo_megatron.device import Device
    from grpo_megatron.models.families import hf_shapes, read_architecture
    from grpo_megatron.models.sync_parameters import engine_tensors
    from grpo_megatron.observability.metrics import Metrics
    from grpo_megatron.parallel.mesh import build_mesh
    from grpo_megatron.rewards.workers.pool import RewardPool
    from grpo_megatron.rollout.build import build_engine
    from grpo_megatron.sampling.generator import Generator
    from grpo_megatron.types import Prompt

    device, rollout = Device("cpu"), RolloutConfig(engine_options={"kv_cache_gib": 0.25})
    mesh, arch = build_mesh(device, tp=1, pp=1, rollout_tp=1), read_architecture(folder)
    limits: dict[str, Any] = {"dtype": "float32", "max_model_len": MAX_TOKENS + 16, "eos_token_ids": [EOS]}
    tensors = engine_tensors(arch, 1, reads_shards=True)
    engine = build_engine(rollout, folder, mesh, device, **limits, tensors=tensors)
    torch.manual_seed(0)
    engine.load_weights(iter([[(name, torch.randn(shape) * 0.05) for name, shape in hf_shapes(arch).items()]]), 0)
    prompts = [Prompt(f"p/{i}", (3 + i % 60, 5, 7), "", "", "", "slow_reward:reward") for i in range(args.prompts)]
    draw: dict[str, Any] = {"draw_id": 0, "version": 0, "max_tokens": MAX_TOKENS, "temperature": 1.0}
    seconds: dict[str, list[float]] = {"generate": [], "grade": [], "afterwards": [], "overlapped": [], "tail": []}
    with RewardPool(args.workers, 10.0, {"seconds": args.milliseconds / 1000}) as pool:
        alone = Generator(engine, None, Numbers(), mesh, rollout, lambda: "")
        both = Generator(engine, pool, Numbers(), mesh, rollout, lambda: "")
        for _ in range(args.repeats + 1):
            begin = time.perf_counter()
            drawn = alone.draw(prompts, SAMPLES, **draw, metrics=Metrics())
            generated = time.perf_counter()
            results = pool.grade([(s.prompt.reward, Numbers().decode(s.response_ids, True), "") for s in drawn])
            graded, metrics = time.perf_counter(), Metrics()
            overlapped = both.draw(prompts, SAMPLES, **draw, metrics=metrics)
            seconds["overlapped"].append(time.perf_counter() - graded)
            seconds["tail"].append(metrics.reduce()["timing_s/reward"])
            seconds["generate"].append(generated - begin)
            seconds["grade"].append(graded - generated)
            seconds["afterwards"].append(graded - begin)
            assert [s.response_ids for s in overlapped] == [s.response_ids for s in drawn]
            assert [s.reward for s in overlapped] == [result.reward for result in results]
    engine.shutdown()
    return {name: values[1:] for name, values in seconds.items()}


def report(seconds: dict[str, list[float]], args: argparse.Namespace) -> str:
    median = {name: statistics.median(values) for name, values in seconds.items()}
    return (
        f"{args.prompts * SAMPLES} samples, {args.milliseconds:g} ms for each reward, {args.workers} worker(s); medians of"
        f" {args.repeats}: generate {median['generate']:.2f} s, grade {median['grade']:.2f} s\n"
        f"graded afterwards {median['afterwards']:.2f} s; graded meanwhile {median['overlapped']:.2f} s, of which"
        f" {median['tail']:.2f} s after the last response; ratio {median['overlapped'] / median['afterwards']:.2f}"
    )
