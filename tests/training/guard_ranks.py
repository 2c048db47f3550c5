"""What the ranks of the guard tests run: one policy, one batch, and a fault in each update."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import torch

from tests import tiny
from tests.models import policies

ACTOR = {"kl_loss_coef": 0.1, "entropy_coeff": 0.05, "optim": {"lr": 1e-3}}


def config_of(folder: Path, out: Path, **guards: Any) -> Any:
    from grpo_megatron.config import Config

    return Config.model_validate(
        {
            "model": {"path": folder, "dtype": "float32"},
            "actor": {**ACTOR, "max_skipped_steps": 100},
            "guards": {"max_dumps": 100, **guards},
            "trainer": {"output_dir": out},
        }
    )


class Run:
    """One policy in a layout, and a batch of six rows with one mini-batch."""

    def __init__(self, folder: Path, out: Path, layout: policies.Layout) -> None:
        from grpo_megatron.training.correction import build_loss

        self.folder, self.out = folder, out
        self.config = config_of(folder, out)
        self.policy = policies.build(folder, layout, **ACTOR, max_skipped_steps=100)
        self.mesh, self.loss = self.policy.mesh, build_loss(self.config.actor)
        self.forward_backward = self.policy.forward_backward

    def batch(self) -> Any:
        rows = policies.share(6, self.mesh.dp_rank, self.mesh.dp)
        micros = [[i] for i in range(len(rows))]
        batch = tiny.make_batch(tiny.make_sequences(6), [micros], rows, masked=True)
        batch.rows = rows
        return batch

    def save_weights(self, target: Path) -> None:
        from grpo_megatron.models.weights.hf_folder import save_hf

        save_hf(self.policy.hf_weights(1), self.folder, self.folder, target, self.mesh)

    def state(self) -> list[torch.Tensor]:
        """Weights, Adam's state and the schedule of this rank."""
        optimizer = self.policy.optimizer
        parts = getattr(optimizer, "chained_optimizers", [optimizer])
        tensors = [parameter.detach().clone() for parameter in self.policy.ddp.parameters()]
        for part in parts:
            for group in part.optimizer.param_groups:
                tensors += [parameter.detach().clone() for parameter in group["params"]]
            for state in part.optimizer.state.values():
                tensors += [torch.as_tensor(value).clone() for _, value in sorted(state.items())]
        return [*tensors, torch.tensor(self.policy.lr_scheduler.num_steps)]

    def update(self, step: int, reward: float = 1.0, batch: Any = None, **guards: Any) -> dict[str, Any]:
        """One update under guards of these actions. Returns what it did and what a step would log."""
        from grpo_megatron.report.metrics import Metrics
        from grpo_megatron.report.step import record_update
        from grpo_megatron.training.guards import Guards, GuardStop
        from grpo_megatron.types import GroupTable

        guard = Guards(config_of(self.folder, self.out, **guards), self.mesh, self.save_weights, contextlib.nullcontext)
        guard.begin(step, GroupTable([0, 0], [0, 1], [0.0, reward], [1, 1], [4, 8], [False] * 2, [0, 0]))
        before, metrics = self.state(), Metrics()
        try:
            sums, constants = self.policy.update(batch or self.batch(), self.loss, guard=guard)
            record_update(metrics, sums, constants, self.mesh.is_first_replica_rank)
            stopped = ""
        except GuardStop as error:
            stopped = str(error)
        guard.record(metrics, self.policy.has_finite_weights())
        logged = metrics.reduce(self.mesh.all_gather)
        after = self.state()
        return {
            "unchanged": all(map(torch.equal, before, after)),
            "stopped": stopped,
            "fired": {name[7:]: value for name, value in logged.items() if name.startswith("guards/") and value},
            "logged": logged,
        }


def faults(folder: Path, out: Path, layout: policies.Layout) -> dict[str, dict[str, Any]]:
    """Fault -> what the update did. Each has its own step number, from which its dump is named."""
    run = Run(folder, out, layout)
    last = run.mesh.world_size - 1
    results = {"healthy": run.update(0)}
    norm = results["healthy"]["logged"]["actor/grad_norm"]

    def spoiled(*arguments: Any) -> Any:
        loss_pass = run.forward_backward(*arguments)
        if run.mesh.rank == last:
            for buffer in run.policy.ddp.buffers:
                buffer.grad_data.fill_(torch.nan)
        return loss_pass

    run.policy.forward_backward = spoiled
    results["gradient"] = run.update(1)
    run.policy.forward_backward = run.forward_backward

    batch = run.batch()
    if run.mesh.dp_rank == run.mesh.dp - 1:
        batch.old_logprobs[0][batch.loss_mask[0].nonzero()[0]] = torch.nan
    results["logprob"] = run.update(2, batch=batch)
    results["logprob, stop"] = run.update(3, batch=batch, logprobs="stop")
    results["reward"] = run.update(4, reward=float("inf"))
    results["norm, warn"] = run.update(5, grad_norm={"high": norm / 100})
    results["norm, skip"] = run.update(6, grad_norm={"high": norm / 100, "action": "skip"})
    wide, narrow = {"low": 0.0, "high": 100.0, "action": "stop"}, {"high": 1e-6, "action": "skip"}
    bands = ("entropy", "kl", "response_length", "rollout_gap")
    results["in all bands"] = run.update(7, **dict.fromkeys((*bands, "grad_norm"), wide))
    results["out of all bands"] = run.update(8, **dict.fromkeys(bands, narrow))
    return results


def replayed(dumps: list[Path]) -> list[tuple[int, str]]:
    """Exit code and output of `replay` for each dump."""
    from grpo_megatron.training.replay_command import ReplayOptions, replay_dump

    results = []
    for dump in dumps:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            code = replay_dump(ReplayOptions(dump=dump))
        results.append((code, out.getvalue()))
    return results
