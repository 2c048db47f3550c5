"""A dumped mini-batch: the inputs of its loss as plain data, from which one CPU process computes it again (replay.py).

    output_dir/dumps/step_000012_gradients/
        dump.json                  step, update, guard, its findings, the metrics of the mini-batch, the config
        batch_00001.safetensors    the rows of data-parallel rank 1, and each of their images once
        weights/                   the policy before this update, a Hugging Face folder

The folder is complete or absent. Numbers that are not finite are strings in dump.json.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from grpo_megatron.algo.losses import MetricSum
from grpo_megatron.config import ActorConfig, Config
from grpo_megatron.models.weights.hf_folder import write_tensors
from grpo_megatron.parallel.mesh import Mesh, on_every_rank, on_first_rank
from grpo_megatron.storage.files import clear_leftovers, partial_of, publish_folder, write_file
from grpo_megatron.types import Batch, rows_of_mini_batch

DUMP_FORMAT = 1
DUMP_FILE, WEIGHTS = "dump.json", "weights"
COLUMNS = ("response_mask", "loss_mask", "rollout_logprobs", "advantages", "token_weights")  # [B, R]
OPTIONAL_COLUMNS = ("old_logprobs", "ref_logprobs", "correction")


@dataclass(frozen=True)
class Incident:
    """The reason for which a mini-batch is dumped. `update` counts the optimizer steps of the training step, from 1."""

    step: int
    update: int
    guard: str
    problems: Mapping[str, str]
    norm: float  # of the gradient, before clipping


def write_dump(
    target: Path,
    incident: Incident,
    batch: Batch,
    micro_batches: list[list[int]],
    sums: Mapping[str, MetricSum],
    config: Config,
    mesh: Mesh,
    save_weights: Callable[[Path], None],
) -> None:
    """Write the mini-batch with these micro-batches. Collective. `sums` are this rank's metric sums of it.

    Raises RankError on every rank when any rank cannot write.
    """
    partial, task = partial_of(target), f"cannot write {target}"

    def start() -> None:
        partial.parent.mkdir(parents=True, exist_ok=True)
        clear_leftovers(partial.parent)
        partial.mkdir()

    on_first_rank(mesh, task, start)
    is_writer = mesh.is_replica_reporter
    totals = mesh.all_gather(metric_parts(sums) if is_writer else {})
    path = partial / f"batch_{mesh.dp_rank:05d}.safetensors"
    on_every_rank(
        mesh, task, lambda: write_tensors(path, mini_batch_tensors(batch, micro_batches)) if is_writer else None
    )
    save_weights(partial / WEIGHTS)
    content = {
        "format": DUMP_FORMAT,
        "step": incident.step,
        "update": incident.update,
        "guard": incident.guard,
        "problems": dict(incident.problems),
        "grad_norm": _number(incident.norm),
        "metrics": {name: _number(value) for name, value in metric_values(totals, config.actor).items()},
        "config": config.model_dump(mode="json"),
    }

    def publish() -> None:
        write_file(partial / DUMP_FILE, json.dumps(content, indent=2) + "\n")
        publish_folder(partial, target)

    on_first_rank(mesh, task, publish)


def mini_batch_tensors(batch: Batch, micro_batches: list[list[int]]) -> dict[str, Tensor]:
    """Returns the rows of the mini-batch in the order of their micro-batches."""
    rows = rows_of_mini_batch(micro_batches)
    tokens = [batch.tokens[row] for row in rows]
    tensors = {
        "tokens": torch.cat(tokens) if tokens else torch.empty(0, dtype=torch.int64),  # one after the other
        "lengths": torch.tensor([len(t) for t in tokens], dtype=torch.int64),  # prompt + response
        "prompt_lengths": torch.tensor([batch.prompt_lengths[row] for row in rows], dtype=torch.int64),
        "micro_batch_sizes": torch.tensor([len(micro) for micro in micro_batches], dtype=torch.int64),
        "table_rows": torch.tensor([batch.rows[row] for row in rows] if batch.rows else [], dtype=torch.int64),
    }
    if batch.routes is not None and rows:
        tensors["routes"] = torch.cat([batch.routes[row] for row in rows])
    for name in (*COLUMNS, *OPTIONAL_COLUMNS):
        if (column := getattr(batch, name)) is not None:
            tensors[name] = column[rows].contiguous()
    placed = [(place, image) for place, row in enumerate(rows if batch.images else []) for image in batch.images[row]]
    if different := {image.digest: image for _, image in placed}:
        numbers, pixels = list(different), [image.pixels for image in different.values()]
        tensors["pixels"] = torch.frombuffer(bytearray(b"".join(pixels)), dtype=torch.uint8)  # one after the other
        tensors["pixel_counts"] = torch.tensor([len(one) for one in pixels])
        # [images of all rows, 5]: the row, the first token, rows and columns of tokens, and which pixels
        tensors["images"] = torch.tensor([[n, i.first, *i.size, numbers.index(i.digest)] for n, i in placed])
    return tensors


def metric_parts(sums: Mapping[str, MetricSum]) -> dict[str, tuple[float, float | None]]:
    """Returns one rank's part of a mini-batch's metrics: name -> (total, number of tokens)."""
    return {
        name: (float(part.total), None if part.num_tokens is None else float(part.num_tokens))
        for name, part in sums.items()
    }


def metric_values(totals: list[dict[str, tuple[float, float | None]]], actor: ActorConfig) -> dict[str, float]:
    """Returns the metrics of a mini-batch, and its `loss`, from every rank's {name: (total, number of tokens)}.

    The gradient belongs to loss = pg_loss + kl_loss_coef * kl_loss - entropy_coeff * entropy_loss, summed over all ranks.
    """
    values: dict[str, float] = {}
    for name in sorted({name for rank in totals for name in rank}):
        parts = [rank[name] for rank in totals if name in rank]
        total, counts = sum(part for part, _ in parts), [count for _, count in parts if count is not None]
        values[name] = total / max(1.0, sum(counts)) if counts else total
    loss = values.get("actor/pg_loss", 0.0)
    if actor.use_kl_loss and actor.kl_loss_coef:
        loss += actor.kl_loss_coef * values.get("actor/kl_loss", 0.0)
    if actor.entropy_coeff:
        loss -= actor.entropy_coeff * values.get("actor/entropy_loss", 0.0)
    return {"loss": loss, **values}


def _number(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)
