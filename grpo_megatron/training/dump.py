"""A dumped mini-batch: the inputs of its loss as plain data, from which one CPU process computes it again.

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
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor

from grpo_megatron.algo.losses import MetricSum
from grpo_megatron.config import ActorConfig, Config, ConfigError, MegatronConfig
from grpo_megatron.device import Device
from grpo_megatron.models.families import read_architecture
from grpo_megatron.models.policy import Policy
from grpo_megatron.models.weights.hf_folder import write_tensors
from grpo_megatron.parallel.exchange import all_kept, same_width
from grpo_megatron.parallel.mesh import Mesh, build_mesh, destroy_mesh, on_every_rank, on_first_rank
from grpo_megatron.storage.files import clear_leftovers, partial_of, publish_folder, write_file
from grpo_megatron.training.correction import build_loss
from grpo_megatron.types import Batch, PromptImage, TeacherScores, rows_of_mini_batch
from grpo_megatron.untrusted import reason_of

DUMP_FORMAT = 1
DUMP_FILE, WEIGHTS = "dump.json", "weights"
COLUMNS = ("response_mask", "loss_mask", "rollout_logprobs", "advantages", "token_weights")  # [B, R]
OPTIONAL_COLUMNS = (
    *("old_logprobs", "ref_logprobs", "correction", "selected", "observation_weights", "ages", "expert_weights"),
)
ADDED = ("distillation/loss", "actor/observation_loss", "actor/expert_loss")  # with their weights


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
        "config": config.record(),
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
    if batch.kept is not None and rows:
        kept = [batch.kept[row] for row in rows]
        tensors |= {"kept": torch.cat(kept), "kept_sizes": torch.tensor([len(ids) for ids in kept])}
    for name in (*COLUMNS, *OPTIONAL_COLUMNS):
        if (column := getattr(batch, name)) is not None:
            tensors[name] = column[rows].contiguous()
    if (teacher := batch.teacher) is not None:
        tensors |= {"teacher_logprobs": teacher.logprobs[rows], "teacher_weights": teacher.weights[rows]}
        tensors["teacher_index"] = torch.tensor([teacher.index[row] for row in rows], dtype=torch.int64)
        if top := [part for row in rows if teacher.top and (part := teacher.top[row]) is not None]:
            tensors["teacher_top"] = torch.cat(top)
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

    The gradient belongs to loss = pg_loss + kl_loss_coef * kl_loss - entropy_coeff * entropy_loss + those of ADDED, summed
    over all ranks.
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
    loss += sum(values.get(name, 0.0) for name in ADDED)
    return {"loss": loss, **values}


def _number(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


# -- Replay: reads a dumped mini-batch, and computes its loss and the gradient's norm again ----------------------------


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
        config = Config.model_validate(content["config"])
        if config.teachers and config.distillation.kl != "sampled" and config.distillation.top_k == 0:
            raise ConfigError(
                f"{folder} cannot be replayed: distillation.top_k=0, and a dump has no distributions of the whole vocabulary;"
                " a run with distillation.top_k=64, say, writes what can"
            )
        return Dump(
            folder,
            Incident(
                content["step"], content["update"], content["guard"], content["problems"], float(content["grad_norm"])
            ),
            config,
            {name: float(value) for name, value in content["metrics"].items()},
            _batch(parts, config),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, ConfigError):
            raise
        if isinstance(error, OSError):
            raise ConfigError(f"cannot read the dump {str(folder)!r}: {reason_of(error)}") from error
        raise ConfigError(
            f"{folder} is not a dump that a guard has written: {type(error).__name__}: {error}"
        ) from error


def _batch(parts: list[dict[str, Tensor]], config: Config) -> Batch:
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
    if "teacher_index" in parts[0]:
        columns["teacher"] = _teacher(parts, width, config)
    no_ids = torch.empty(0, dtype=torch.int32)
    kept = [
        part["kept"].split(part["kept_sizes"].tolist()) if "kept" in part else [no_ids] * len(own)
        for part, own in zip(parts, lengths, strict=True)
    ]
    sizes = torch.cat([part["lengths"] - part["prompt_lengths"] for part in parts]).tolist()
    columns["kept"] = all_kept(list(chain(*kept)), sizes)
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


def _teacher(parts: list[dict[str, Tensor]], width: int, config: Config) -> TeacherScores:
    """Returns the scores of all rows. Distributions of the full vocabulary are not in a dump."""
    objective, top = config.distillation, list[Tensor | None]()
    logprobs, weights = (
        torch.cat([torch.nn.functional.pad(part[name], (0, width - part[name].shape[1])) for part in parts])
        for name in ("teacher_logprobs", "teacher_weights")
    )
    for part in parts:
        if "teacher_top" in part:
            top += part["teacher_top"].split((part["lengths"] - part["prompt_lengths"]).tolist())
    index = torch.cat([part["teacher_index"] for part in parts]).tolist()
    return TeacherScores(index, weights, logprobs, top=top, kl=objective.kl, beta=objective.beta)


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
        algorithm = (
            config.algorithm if dump.batch.expert_weights is not None else None
        )  # of CHORD; the rest is in columns
        discount = config.distillation.discount
        loss = build_loss(actor, algorithm, teachers=tuple(config.teachers), discount=discount)
        (sums,), _ = policy.update(dump.batch, loss, guard=measure)
    finally:
        destroy_mesh()
    values = metric_values([metric_parts(sums)], actor) | {"grad_norm": norms[0]}
    recorded = {"loss": dump.metrics["loss"], "grad_norm": dump.incident.norm, **dump.metrics}
    return [Comparison(name, value, values.get(name, math.nan)) for name, value in recorded.items()]
