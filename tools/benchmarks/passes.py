"""`tools.benchmarks passes`: the training part of a step, with and without the passes that it can do without.

One rank on the CPU, two random models. Both ways of a pair take turns on the same batch. Of a step on two ranks, the updates
of both are made one after the other, and the longer one is the step's time.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from tools.benchmarks.workload import machine

WORKLOADS: dict[str, dict[str, Any]] = {
    "0.4 M": {
        "model": {"hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4},
        "vocab_size": 80,
        "prompts": 16,
        "prompt_length": 24,
        "response_length": 32,
        "long_responses": True,
    },
    "26 M": {
        "model": {"hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 8, "num_attention_heads": 8},
        "vocab_size": 4096,
        "prompts": 8,
        "prompt_length": 64,
        "response_length": 128,
        "ratios": True,
    },
}
RATIOS = [(256, 64), (128, 128), (64, 256), (16, 256)]  # prompt and response tokens, 4:1 to 1:16
SAMPLES = 8
LONG = 2000  # tokens of one response of each prompt, where ranks are balanced
Ways = dict[str, Callable[[], Any]]  # the first is what the others are compared with; seconds that a way returns count


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--workload", choices=WORKLOADS, action="append", help="default: both")


def passes(args: argparse.Namespace) -> int:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    os.environ |= dict.fromkeys(("RANK", "LOCAL_RANK"), "0") | dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), "1")
    import torch

    from grpo_megatron.device import Device
    from grpo_megatron.parallel.mesh import build_mesh

    mesh = build_mesh(Device("cpu"), tp=1, pp=1, rollout_tp=1)
    print(f"{machine()}; {torch.get_num_threads()} threads, medians of {args.repeats}")
    for name in args.workload or WORKLOADS:
        with tempfile.TemporaryDirectory(prefix="benchmark-passes-") as root:
            for title, ways in pairs(Path(root), WORKLOADS[name], mesh).items():
                print(report(f"{name} parameters, {title}", in_turn(ways, args.repeats)))
                sys.stdout.flush()
    return 0


def in_turn(ways: Ways, repeats: int) -> dict[str, float]:
    """Median seconds of each, after one turn that is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats + 1):
        for name, way in ways.items():
            begin = time.perf_counter()
            told = way()
            seconds[name].append(time.perf_counter() - begin if told is None else told)
    return {name: statistics.median(values[1:]) for name, values in seconds.items()}


def report(title: str, medians: dict[str, float]) -> str:
    base = next(iter(medians.values()))
    lines = [f"  {name:<44}{value:8.3f} s  {value / base:5.2f} x" for name, value in medians.items()]
    return "\n".join([title, *lines])


def pairs(folder: Path, workload: dict[str, Any], mesh: Any) -> dict[str, Ways]:
    """Title -> the two ways."""
    from grpo_megatron.config import ActorConfig
    from grpo_megatron.device import Device
    from grpo_megatron.models.families import read_architecture
    from grpo_megatron.models.policy import Policy
    from grpo_megatron.training.correction_step import build_loss

    write_model(folder, workload)
    actor = ActorConfig.model_validate({"use_kl_loss": False, "optim": {"lr": 1e-6}})
    policy = Policy.load(folder, "float32", read_architecture(folder), actor, mesh, Device("cpu"))
    policy.set_optimizer(actor.optim, 1)
    loss = build_loss(actor)
    table, sequences = draw(workload)
    batch = make_batch(table, sequences, actor)

    def separate() -> None:
        batch.old_logprobs = policy.logprobs(batch)
        policy.update(batch, loss)

    def folded() -> None:
        batch.old_logprobs = None
        policy.update(batch, loss)

    def with_reference() -> None:
        policy.logprobs(batch)
        folded()

    # Half of the groups have equal rewards.
    uninformative = replace(
        table, reward=[r if p % 2 else 1.0 for r, p in zip(table.reward, table.prompt_index, strict=True)]
    )
    small = actor.model_copy(update={"ppo_max_token_len_per_gpu": max(map(len, sequences)) * SAMPLES})
    some = make_batch(uninformative, sequences, small)
    assert some.num_forward_only[0] > 0
    all_backward = replace(some, num_forward_only=[])

    def update(batch: Any) -> None:
        policy.update(batch, loss)

    sharing: dict[str, Ways] = {}
    if workload.get("ratios"):
        for prompt, response in RATIOS:
            shape = {**workload, "prompts": 2, "prompt_length": prompt, "response_length": response}
            sharing[f"update, prompt {prompt} and responses of at most {response} tokens"] = {
                "whole rows": functools.partial(update, make_batch(*draw(shape), actor)),
                "rows share their prompt": functools.partial(
                    update, make_batch(*draw(shape), actor.model_copy(update={"share_prompts": True}))
                ),
            }
    balance: dict[str, Ways] = {}
    if workload.get("long_responses"):
        balance[f"the slower of two ranks, one response in {SAMPLES} of {LONG} tokens"] = {
            f"balanced by {name}": functools.partial(slower, batches, update)
            for name, batches in long_tail(workload, actor, policy.arch).items()
        }
    return {
        "old log-probabilities and update": {"a pass of their own": separate, "of the update's pass": folded},
        "KL with a coefficient of 0": {"with the reference's pass": with_reference, "without it": folded},
        "update, half of the groups uninformative": {
            "a backward pass for all rows": functools.partial(update, all_backward),
            "only for rows with an advantage": functools.partial(update, some),
        },
        **balance,
        **sharing,
    }


def long_tail(workload: dict[str, Any], actor: Any, arch: Any) -> dict[str, list[Any]]:
    """What ranks are balanced by -> the batches of two ranks, from short responses and a few very long ones."""
    from grpo_megatron.models.flops import sequence_cost

    shape = {**workload, "prompts": 3, "response_length": 300}
    table, sequences = draw(shape, [LONG if row % SAMPLES == 0 else None for row in range(3 * SAMPLES)])
    costs = {"tokens": None, "FLOP": sequence_cost(arch)}
    return {
        name: [make_batch(table, sequences, actor, rank=rank, dp=2, cost=cost) for rank in range(2)]
        for name, cost in costs.items()
    }


def slower(batches: list[Any], update: Callable[[Any], None]) -> float:
    """Seconds of the batch that takes the longest."""
    seconds = []
    for batch in batches:
        begin = time.perf_counter()
        update(batch)
        seconds.append(time.perf_counter() - begin)
    return max(seconds)


def draw(workload: dict[str, Any], lengths: list[int | None] | None = None) -> tuple[Any, list[list[int]]]:
    """The table of one step and its sequences. Responses end after half to all of the limit; half of the rewards are 1.

    `lengths`: of each response in turn; None: as without it.
    """
    from grpo_megatron.types import GroupTable

    rng, vocab = random.Random(0), workload["vocab_size"]
    table = GroupTable([], [], [], [], [], [], [])
    sequences = []
    for p in range(workload["prompts"]):
        prompt = [rng.randrange(vocab) for _ in range(workload["prompt_length"])]
        for i in range(SAMPLES):
            length = rng.randint(workload["response_length"] // 2, workload["response_length"])
            length = (lengths[len(sequences)] if lengths else None) or length
            sequences.append([*prompt, *(rng.randrange(vocab) for _ in range(length))])
            row = (p, i, float(i % 2), len(prompt), length, False, 0)
            columns = ("prompt_index", "index", "reward", "prompt_length", "response_length", "truncated", "holder")
            for name, value in zip(columns, row, strict=True):
                getattr(table, name).append(value)
    return table, sequences


def make_batch(
    table: Any,
    sequences: list[list[int]],
    actor: Any,
    *,
    rank: int = 0,
    dp: int = 1,
    cost: Any = None,
    exact: bool = False,
) -> Any:
    import torch

    from grpo_megatron.algo.plan import make_plan
    from grpo_megatron.config import AlgorithmConfig
    from grpo_megatron.parallel.exchange import build_batch

    count = len(table.groups())
    longest = max(table.response_length)
    plan = make_plan(
        table,
        AlgorithmConfig(),
        actor,
        dp=dp,
        train_batch_size=count,
        max_response_length=longest,
        cost=cost,
        exact=exact,
    )
    rows = plan.rows(rank)
    return build_batch(
        rows,
        plan,
        rank,
        tokens=[torch.tensor(sequences[row]) for row in rows],
        prompt_lengths=[table.prompt_length[row] for row in rows],
        rollout_logprobs=[torch.full((table.response_length[row],), -1.0) for row in rows],
    )


def write_model(folder: Path, workload: dict[str, Any]) -> None:
    """A random Llama as a Hugging Face folder."""
    import torch
    from safetensors.torch import save_file

    from grpo_megatron.models.families import hf_shapes, read_architecture

    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "vocab_size": workload["vocab_size"],
        **workload["model"],
    }
    config["num_key_value_heads"] = config["num_attention_heads"]
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(0)
    shapes = hf_shapes(read_architecture(folder))
    weights = {name: torch.randn(shape, generator=generator) * 0.02 for name, shape in shapes.items()}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
