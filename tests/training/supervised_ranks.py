"""What the ranks of test_supervised.py run: the real Trainer without an engine, several times in one world."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from grpo_megatron.config import Config

SFT = {"algorithm": {"source": "file", "adv_estimator": "constant"}, "actor": {"loss_mode": "sft"}}
DPO = {
    "algorithm": {"source": "file", "adv_estimator": "best_worst"},
    "actor": {"loss_mode": "dpo", "loss_agg_mode": "seq-mean-token-mean"},
}


def settings(root: Path, output: Path, method: dict[str, Any], tp: int = 1, **sections: Any) -> dict[str, Any]:
    """Two ranks, 16 rows in batches of 5: two epochs are six steps. Held out: the rows of `root`/held_out.jsonl."""
    raw: dict[str, Any] = {
        "model": {"path": str(root / "model"), "dtype": "float32"},
        "data": {
            "task": "arithmetic",
            "train_files": [str(root / "data/written.jsonl")],
            "val_loss_files": [str(root / "held_out.jsonl")],
            "apply_chat_template": False,
            "train_batch_size": 5,
            "max_prompt_length": 32,
            "max_response_length": 32,
        },
        **method,
        "trainer": {
            "total_epochs": 2,
            "test_freq": 3,
            "save_freq": 2,
            "save_hf_at_end": False,
            "n_gpus_per_node": 2,
            "device": "cpu",
            "output_dir": str(output),
            "logger": ["jsonl"],
        },
    }
    megatron = {"tensor_model_parallel_size": tp}
    raw["actor"] = {**raw["actor"], "use_kl_loss": False, "optim": {"lr": 1e-3}, "megatron": megatron}
    raw["actor"]["ppo_max_token_len_per_gpu"] = 200
    for section, values in sections.items():
        raw[section] = {**raw.get(section, {}), **values}
    return raw


def train(
    raw: dict[str, Any], stop_in: tuple[str, int] | None = None, kill_in_step: int | None = None
) -> dict[str, Any]:
    """Run the Trainer. `stop_in`: ("sft" or "task", step): the stop file appears in that step of the warm-up or the run.

    `kill_in_step`: the run ends after that step's report, without a checkpoint. Returns how it ended, and the weights of a
    finished run.
    """
    from grpo_megatron import run as run_module
    from grpo_megatron.checks.validate import validate
    from grpo_megatron.report.step import StepReport
    from grpo_megatron.trainer import Trainer
    from grpo_megatron.training.stopping import Stopped

    stop_file = Path(raw["trainer"]["output_dir"]) / "stop"
    config = Config.model_validate({**raw, "trainer": {**raw["trainer"], "stop_file": str(stop_file)}})
    result: dict[str, Any] = {"ended": "done"}
    log = StepReport.log

    def watched(self: Any, step: int, metrics: Any, samples: Any, *arguments: Any, **named: Any) -> Any:
        reduced = log(self, step, metrics, samples, *arguments, **named)
        stage = "sft" if samples[0].prompt.uid.startswith("sft/") else "task"
        if stop_in == (stage, step):
            stop_file.touch()
        if stage == "task" and step == kill_in_step:
            raise KeyboardInterrupt
        return reduced

    with (
        mock.patch.object(StepReport, "log", watched),
        mock.patch.object(run_module, "destroy_mesh", lambda: None),  # the world is used again
    ):
        try:
            trainer = Trainer(config, validate(config, int(os.environ["WORLD_SIZE"])))
            trainer.run()
            result["weights"] = {n: t.clone() for bucket in trainer.parts.policy.hf_weights(1) for n, t in bucket}
        except Stopped as stopped:
            result["ended"] = str(stopped.exit_code)
        except KeyboardInterrupt:
            result["ended"] = "killed"
    torch.distributed.barrier()
    stop_file.unlink(missing_ok=True)
    return result


def warm_up(root: Path) -> dict[str, Any]:
    """The section `sft`: three steps of four of nine rows."""
    files = [str(root / "data/train.sft.jsonl")]
    return {"steps": 3, "train_files": files, "train_batch_size": 4, "optim": {"lr": 1e-3}}


def dp2(root: Path, out: Path) -> dict[str, Any]:
    """Every run of two replicas, in one world. Between them only Megatron's groups are made anew."""
    sft = warm_up(root)
    results: dict[str, Any] = {}

    def run(name: str, folder: str, method: dict[str, Any], sections: dict[str, Any], **options: Any) -> None:
        results[name] = train(settings(root, out / folder, method, **sections), **options)
        _leave_groups()

    run("whole", "whole", SFT, {"sft": sft})
    run("stopped in the warm-up", "parts", SFT, {"sft": sft}, stop_in=("sft", 1))
    run("stopped", "parts", SFT, {"sft": sft}, stop_in=("task", 2))
    run("killed", "parts", SFT, {"sft": sft}, kill_in_step=4)
    if os.environ["RANK"] == "0":
        shutil.copytree(out / "parts", out / "moved")
    torch.distributed.barrier()
    run("resumed", "parts", SFT, {"sft": sft})
    rows = {"train_files": sft["train_files"], "train_batch_size": 4, "shuffle": False}
    run("alone", "alone", SFT, {"data": rows, "trainer": {"total_epochs": None, "total_training_steps": 3}})
    run("dpo", "dpo", DPO, {"guards": {"grad_norm": {"high": 1e-6}, "max_dumps": 1}})
    return results


def tp2(root: Path, out: Path) -> dict[str, Any]:
    """The killed run goes on with tensor parallelism; and the pairs from their beginning."""
    sft = warm_up(root)
    results = {"moved": train(settings(root, out / "moved", SFT, tp=2, sft=sft))}
    _leave_groups()
    return {**results, "dpo": train(settings(root, out / "dpo_tp2", DPO, tp=2))}


def _leave_groups() -> None:
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
