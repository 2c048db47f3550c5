"""Reads a dumped mini-batch (training/dump.py), and computes its loss and the gradient's norm again."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor

from grpo_megatron.algo.losses import MetricSum
from grpo_megatron.config import Config, ConfigError, MegatronConfig
from grpo_megatron.device import Device
from grpo_megatron.models.families import read_architecture
from grpo_megatron.models.policy import Policy
from grpo_megatron.parallel.exchange import same_width
from grpo_megatron.parallel.mesh import build_mesh, destroy_mesh
from grpo_megatron.training.correction import build_loss
from grpo_megatron.training.dump import (
    COLUMNS,
    DUMP_FILE,
    DUMP_FORMAT,
    OPTIONAL_COLUMNS,
    WEIGHTS,
    Incident,
    metric_parts,
    metric_values,
)
from grpo_megatron.types import Batch, PromptImage


@dataclass(frozen=True)
class Dump:
    """A dump as it was read. The batch has one mini-batch: the rows of all data-parallel ranks."""

    folder: Path
    incident: Incident
    config: Config
    metrics: dict[str, float]
    batch: Batch


def read_dump(folder: Path) -> Dump:
    """Read a dump. Raises ConfigError when the folder is none, or a newer one."""
    try:
        content = json.loads((folder / DUMP_FILE).read_text())
        if content["format"] != DUMP_FORMAT:
            raise ConfigError(f"{folder} has the dump format {content['format']}, and this version reads {DUMP_FORMAT}")
        parts = [load_file(file) for file in sorted(folder.glob("batch_*.safetensors"))]
        return Dump(
            folder,
            Incident(
                content["step"], content["update"], content["guard"], content["problems"], float(content["grad_norm"])
            ),
            Config.model_validate(content["config"]),
            {name: float(value) for name, value in content["metrics"].items()},
            _batch(parts),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"{folder} is not a dump that a guard has written: {type(error).__name__}: {error}"
        ) from error


def _batch(parts: list[dict[str, Tensor]]) -> Batch:
    """Returns the rows of all ranks as one batch with one mini-batch, in the micro-batches of the run."""
    width = max(part["loss_mask"].shape[1] for part in parts)
    lengths = [part["lengths"].tolist() for part in parts]
    tokens = [row for part, own in zip(parts, lengths, strict=True) for row in part["tokens"].split(own)]
    columns: dict[str, Any] = {}
    for name in (*COLUMNS, *OPTIONAL_COLUMNS):
        if name in parts[0]:
            padded = [torch.nn.functional.pad(part[name], (0, width - part[name].shape[1])) for part in parts]
            columns[name] = torch.cat(padded)
    routes = [
        part["routes"].split(own) if "routes" in part else [None] * len(own)
        for part, own in zip(parts, lengths, strict=True)
    ]
    columns["routes"] = same_width(list(chain(*routes)), list(chain(*lengths)))
    if any("images" in part for part in parts):
        columns["images"] = [row for n, part in enumerate(parts) for row in _images(n, part)]
    micro_batches, first = [], 0
    for size in torch.cat([part["micro_batch_sizes"] for part in parts]).tolist():
        micro_batches.append(list(range(first, first + size)))
        first += size
    return Batch(
        tokens=tokens,
        prompt_lengths=torch.cat([part["prompt_lengths"] for part in parts]).tolist(),
        mini_batches=[micro_batches],
        rows=torch.cat([part["table_rows"] for part in parts]).tolist(),
        **columns,
    )


def _images(rank: int, part: dict[str, Tensor]) -> list[tuple[PromptImage, ...]]:
    """Returns the images of each row of a rank."""
    rows: list[list[PromptImage]] = [[] for _ in part["lengths"]]
    if "images" in part:
        pixels = [one.numpy().tobytes() for one in part["pixels"].split(part["pixel_counts"].tolist())]
        for row, first, height, width, number in part["images"].tolist():
            rows[row].append(PromptImage(f"{rank}/{number}", (height, width), first, pixels[number]))
    return list(map(tuple, rows))


# -- Recomputation: the loss and the gradient's norm of a dumped mini-batch, computed again by one process on the CPU --
# The model is the policy of the run, with the weights before the update, in the run's dtype and without any parallelism. In
# float32 the loss differs from the run's by rounding, about 1e-7. Where both have NaN, the data or the weights are
# the cause; where only the run had it, look for the cause in the machine, its kernels or the layout.

TOLERANCE = {"float32": 1e-6, "bfloat16": 1e-2}  # of the loss


class Comparison(NamedTuple):
    """One number of the run, and the same computed again."""

    name: str
    recorded: float
    recomputed: float

    def is_equal(self, tolerance: float) -> bool:
        """Returns whether both are equal within `tolerance`, relative above 1; NaN and infinities equal themselves."""
        if not math.isfinite(self.recorded) or not math.isfinite(self.recomputed):
            return str(self.recorded) == str(self.recomputed)
        return abs(self.recomputed - self.recorded) <= tolerance * max(1.0, abs(self.recorded))


def recompute(dump: Dump) -> list[Comparison]:
    """Returns the loss first, then the gradient's norm and the other metrics.

    Needs a process without process groups.
    """
    device, config = Device("cpu"), dump.config
    mesh = build_mesh(device, tp=1, pp=1, rollout_tp=1, seed=config.trainer.seed)
    norms: list[float] = []

    def measure(batch: Batch, micro_batches: list[list[int]], sums: Mapping[str, MetricSum], norm: float) -> bool:
        norms.append(norm)
        return False

    try:
        # The same loss on one CPU rank: no parallelism, no FP8, nothing offloaded, one skipped update allowed.
        overrides = config.actor.megatron.override_transformer_config
        megatron = MegatronConfig(transformer_impl="local", override_transformer_config=overrides)
        actor = config.actor.model_copy(update={"megatron": megatron, "max_skipped_steps": 1})
        folder, temperature = dump.folder / WEIGHTS, config.rollout.temperature
        arch = read_architecture(folder, config.model.family)
        parts = (folder, config.model.dtype, arch, actor, mesh, device)
        policy = Policy.load(*parts, temperature=temperature, exact=config.model.exact)
        policy.set_optimizer(actor.optim, 1)
        (sums,), _ = policy.update(dump.batch, build_loss(actor), guard=measure)
    finally:
        destroy_mesh()
    values = metric_values([metric_parts(sums)], actor) | {"grad_norm": norms[0]}
    recorded = {"loss": dump.metrics["loss"], "grad_norm": dump.incident.norm, **dump.metrics}
    return [Comparison(name, value, values.get(name, math.nan)) for name, value in recorded.items()]
