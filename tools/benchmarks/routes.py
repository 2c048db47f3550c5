"""`tools.benchmarks routes`: engine and trainer on a mixture of experts in bfloat16, with and without route replay.

Two runs in turn with a learning rate of 0: the same weights draw the same samples, so the two differ only in the experts that
the trainer computes. k3 is the mean over tokens of e^d - d - 1, d the trainer's log-probability minus the engine's.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tools.benchmarks.lora import run
from tools.benchmarks.step import own_config
from tools.benchmarks.workload import Workload, machine, write_folder

COLUMNS = {
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
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
    print("| actor.moe.route_replay | " + " | ".join(COLUMNS) + " |\n|" + " --- |" * (1 + len(COLUMNS)))
    k3 = {}
    for replay, steps in rows.items():
        values = {title: [step[name] for step in steps if name in step] for title, name in COLUMNS.items()}
        means = {title: statistics.mean(of_steps) for title, of_steps in values.items() if of_steps}
        k3[replay] = means["k3, nats"]
        print(
            f"| {replay} | " + " | ".join(f"{means[title]:.3g}" if title in means else "" for title in COLUMNS) + " |"
        )
    print(json.dumps({"k3 none / k3 engine": round(k3["none"] / k3["engine"], 2)}))
    return 0
