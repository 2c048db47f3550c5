"""`tools.benchmarks lora`: steps with LoRA, merged and split, beside training of all weights. `train` runs each in turn.

Two ranks on the CPU, TP2 in training and TP1 in the engines, so that half of the weights travel into each rank. Memory is
a rank's largest resident set, engine and libraries included. Seconds are medians over the steps of all rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tools.benchmarks.step import ROOT, launch, own_config
from tools.benchmarks.workload import WORKLOADS, Workload, machine, write_folder

LORA_COLUMNS = {  # title -> (metric, factor)
    "step, s": ("timing_s/step", 1.0),
    "update, s": ("timing_s/update_actor", 1.0),
    "sync, s": ("timing_s/update_weights", 1.0),
    "sync, MB": ("sync/bytes_received", 1e-6),
    "memory, GB": ("perf/cpu_memory_used_gb", 2**30 / 1e9),
}


def add_lora_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workload", choices=WORKLOADS, default="26M")
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--steps", type=int, default=4, help="steps of a run; the first is not counted")
    parser.add_argument("--rounds", type=int, default=3)


def lora(args: argparse.Namespace) -> int:
    adapters = [f"actor.lora.rank={args.rank}", "actor.optim.lr=1e-5"]
    sides = {"all weights": [], "LoRA, merged": adapters, "LoRA, split": [*adapters, "actor.lora.mode=split"]}
    workload, rows = WORKLOADS[args.workload], {side: [] for side in sides}  # type: dict[str, list[Any]]
    with tempfile.TemporaryDirectory(prefix="benchmark-lora-") as root:
        folder = Path(root)
        write_folder(folder, workload, workload.prompts * args.steps)
        config = own_config(folder, workload, args.steps)
        config["actor"]["megatron"] = {"tensor_model_parallel_size": 2}
        config["actor"]["ppo_max_token_len_per_gpu"] = 2048  # one micro-batch of 12,000 tokens would hide all else
        config["rollout"]["engine_options"] = {"kv_cache_gib": 0.5}
        (folder / "own.yaml").write_text(yaml.safe_dump(config))
        for _ in range(args.rounds):
            for side, overrides in sides.items():
                rows[side] += run(folder, overrides)
    print(f"{machine()}\n{args.workload}, rank {args.rank}; medians of {args.rounds} x {args.steps - 1} steps")
    print("| | " + " | ".join(LORA_COLUMNS) + " |\n|" + " --- |" * (1 + len(LORA_COLUMNS)))
    for side, steps in rows.items():
        values = (statistics.median(step[name] for step in steps) * factor for name, factor in LORA_COLUMNS.values())
        print(f"| {side} | " + " | ".join(f"{value:.3g}" for value in values) + " |")
    return 0


def run(folder: Path, overrides: list[str]) -> list[dict[str, float]]:
    """The metrics of the counted steps."""
    shutil.rmtree(folder / "own_output", ignore_errors=True)
    command = [sys.executable, *launch(), "-m", "grpo_megatron", "train", str(folder / "own.yaml"), *overrides]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{folder}:{ROOT}"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{overrides} failed with exit code {done.returncode}:\n{(done.stdout + done.stderr)[-3000:]}")
    lines = (folder / "own_output" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines][1:]


# `tools.benchmarks routes`: engine and trainer on a mixture of experts in bfloat16, with and without route replay.
#
# Two runs in turn with a learning rate of 0: the same weights sample the same samples, so the two differ only in the experts that
# the trainer computes. k3 is the mean over tokens of e^d - d - 1, d the trainer's log-probability minus the engine's.

ROUTES_COLUMNS = {
    "k3, nats": "rollout_corr/k3_kl",
    "mean \\|d\\|": "training/rollout_logp_diff_mean",
    "max \\|d\\|": "training/rollout_logp_diff_max",
    "equal choices": "actor/route_agreement",
    "update, s": "timing_s/update_actor",
}


@dataclass(frozen=True)
class Experts(Workload):
    """A Qwen3-MoE: in every layer `experts`, of which a token visits `visited`."""

    experts: int = 32
    visited: int = 4

    def config(self) -> dict[str, Any]:
        sizes = {"num_experts": self.experts, "num_experts_per_tok": self.visited, "norm_topk_prob": True}
        sizes |= {"moe_intermediate_size": self.intermediate, "head_dim": self.hidden // self.heads}
        names = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"]}
        return {**super().config(), **sizes, **names, "torch_dtype": "bfloat16"}


MODEL = Experts("experts", 8, 128, 64, 4, 2, 512, prompts=8, prompt_length=32, response_length=64)


def add_routes_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=3, help="steps of a run; the first is not counted")
    parser.add_argument(
        "--pages", type=Path, metavar="DIR", help="keep the output folders, for `report DIR/none DIR/engine`"
    )


def routes(args: argparse.Namespace) -> int:
    rows: dict[str, list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory(prefix="benchmark-routes-") as root:
        folder = Path(root)
        write_folder(folder, MODEL, MODEL.prompts * args.steps)
        config = own_config(folder, MODEL, args.steps)
        config["model"]["dtype"] = "bfloat16"
        config["actor"] |= {"optim": {"lr": 0.0, "weight_decay": 0.0}, "ppo_mini_batch_size": MODEL.prompts // 2}
        config["rollout"]["engine_options"] = {"kv_cache_gib": 0.5}
        (folder / "own.yaml").write_text(yaml.safe_dump(config))
        for replay in ("none", "engine"):
            rows[replay] = run(folder, [f"actor.moe.route_replay={replay}"])
            if args.pages is not None:
                shutil.copytree(folder / "own_output", args.pages / replay)
    print(
        f"{machine()}\n{MODEL.layers} layers, {MODEL.visited} of {MODEL.experts} experts, bfloat16; {args.steps - 1} steps"
    )
    print("| actor.moe.route_replay | " + " | ".join(ROUTES_COLUMNS) + " |\n|" + " --- |" * (1 + len(ROUTES_COLUMNS)))
    k3 = {}
    for replay, steps in rows.items():
        values = {title: [step[name] for step in steps if name in step] for title, name in ROUTES_COLUMNS.items()}
        means = {title: statistics.mean(of_steps) for title, of_steps in values.items() if of_steps}
        k3[replay] = means["k3, nats"]
        print(
            f"| {replay} | "
            + " | ".join(f"{means[title]:.3g}" if title in means else "" for title in ROUTES_COLUMNS)
            + " |"
        )
    print(json.dumps({"k3 none / k3 engine": round(k3["none"] / k3["engine"], 2)}))
    return 0


# `tools.benchmarks roles`: steps of ranks that train and sample in turn, beside ranks of two roles with a lag of 0, 1 and 2.
#
# Two ranks on the CPU, with the quickstart's sizes and transformers' engine. What a GPU would take is emulated by sleeping: each
# engine step takes DECODE seconds, however many sequences it decodes, and an update UPDATE seconds for all tokens of the batch,
# divided over the ranks that train. So colocated ranks gain only from sharing the update.
#
# This file is also what the ranks run.

WARM = 3  # steps that are not counted
WAYS = {"colocated": {}, **{f"lag {lag}": {"placement": "separate", "num_ranks": 1, "lag": lag} for lag in (0, 1, 2)}}


def add_roles_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--decode", type=float, default=0.025, help="seconds of an engine step")
    parser.add_argument("--update", type=float, default=0.8, help="seconds of an update by one rank")


def roles(args: argparse.Namespace) -> int:
    workload, rows = WORKLOADS["0.4M"], []
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    for name, placement in WAYS.items():
        with tempfile.TemporaryDirectory(prefix="benchmark-roles-") as folder:
            root = Path(folder)
            write_folder(root, workload, 64)
            raw = {
                "model": {"path": str(root / "model"), "dtype": "float32"},
                "data": {
                    "task": "jsonl",
                    "train_files": [str(root / "train.jsonl")],
                    "train_batch_size": workload.prompts,
                }
                | {"max_prompt_length": workload.prompt_length, "max_response_length": workload.response_length}
                | {"apply_chat_template": False},
                "actor": {"use_kl_loss": False, "optim": {"lr": 1e-5}},
                "rollout": {"engine": "transformers", "n": 8, **placement},
                "reward": {"function": "benchmark_reward:reward"},
                "trainer": {"total_training_steps": WARM + args.steps, "save_freq": -1, "save_hf_at_end": False}
                | {"output_dir": str(root / "out"), "device": "cpu", "n_gpus_per_node": 2, "logger": ["jsonl"]}
                | {"val_before_train": False, "test_freq": -1},
            }
            (root / "run.json").write_text(json.dumps({"raw": raw, "decode": args.decode, "update": args.update}))
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__]
            paths = {"PYTHONPATH": f"{environment['PYTHONPATH']}:{root}"}
            subprocess.run([*command, folder], env=environment | paths, check=True, stdout=subprocess.DEVNULL)
            lines = (root / "out/metrics.jsonl").read_text().splitlines()
            rows.append((name, [json.loads(line) for line in lines][WARM:]))
    print(f"medians of {args.steps} steps; a wait in seconds, and in engine steps of {args.decode:g} s")
    print(
        f"{'':<10} {'samples/s':>10} {'step s':>8} {'draws s':>8} {'update s':>9} {'training waits':>16} {'drawing waits':>16}"
    )
    for name, steps in rows:
        names = ("step", "gen", "update_actor", "wait_samples", "wait_weights")
        found = [statistics.median(row.get(f"timing_s/{key}", 0.0) for row in steps) for key in names]
        step, draws, update, *waits = found
        waited = "".join(f"{wait:>8.2f} ({wait / args.decode:>5.0f})" for wait in waits)
        print(f"{name:<10} {workload.num_samples / step:>10.1f} {step:>8.2f} {draws:>8.2f} {update:>9.2f} {waited}")
    return 0


def run_rank(folder: Path) -> None:
    from grpo_megatron.checks.validate import validate
    from grpo_megatron.config import Config
    from grpo_megatron.models.policy import Policy
    from grpo_megatron.rollout.transformers_engine import TransformersEngine
    from grpo_megatron.trainer import Trainer
    from grpo_megatron.training.rollout_rank import RolloutRank

    content = json.loads((folder / "run.json").read_text())
    config = Config.model_validate(content["raw"])
    world, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    training = world - config.num_rollout_ranks
    poll, optim_step = TransformersEngine.poll, Policy.optim_step

    def slow_poll(self: Any) -> Any:
        time.sleep(content["decode"])
        return poll(self)

    def slow_step(self: Any, *args: Any, **named: Any) -> Any:
        time.sleep(content["update"] / training)
        return optim_step(self, *args, **named)

    TransformersEngine.poll, Policy.optim_step = slow_poll, slow_step  # type: ignore[method-assign]
    checked = validate(config, world)
    (Trainer(config, checked) if rank < training else RolloutRank(config, checked)).run()
    os._exit(0)


if __name__ == "__main__":
    run_rank(Path(sys.argv[1]))
