"""Work: what a checked request makes all ranks compute. Every method is collective and returns its result on rank 0.

A datum of the protocol is N input tokens and N targets. It becomes a row of N + 1 tokens with a prompt of one: its N "response"
tokens are scored against `Batch.targets`. The loss is a sum over tokens, so its gradient does not depend on the layout
(algo/plan.py), up to rounding.
"""

from __future__ import annotations

import contextlib
import functools
import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from grpo_megatron.algo.plan import assign, assign_leaves
from grpo_megatron.checks.validate import Checked
from grpo_megatron.config import Config
from grpo_megatron.device import Device
from grpo_megatron.models.forward import MetricSums
from grpo_megatron.models.weights.hf_folder import load_hf
from grpo_megatron.models.weights.sharded_state import load_sharded, save_sharded
from grpo_megatron.parallel.mesh import on_first_rank
from grpo_megatron.report.metrics import Metrics
from grpo_megatron.rollout.engine import Completion, Request, StopTexts
from grpo_megatron.service.losses import token_losses
from grpo_megatron.service.slots import Slots
from grpo_megatron.service.wire import AdamSettings, LoraRequest, PassRequest, RequestError, SampleJob, WireDatum
from grpo_megatron.storage.files import partial_of, publish_folder, remove_folder
from grpo_megatron.training.colocation import build_colocation, build_export, build_policy
from grpo_megatron.training.placement import join_world, with_engine_sequences
from grpo_megatron.types import Batch, rows_of_mini_batch


@dataclass(frozen=True)
class Sampled:
    """The answer to a SampleJob. `prompt_logprobs`: of every token given those before it; NaN where none was wanted."""

    completions: list[Completion]
    prompt_logprobs: list[float] | None


class Work:
    """The policy, the engine and the states of all models on this rank."""

    def __init__(self, config: Config, checked: Checked) -> None:
        """Build policy and engine. Collective. Raises RankError."""
        self.device = Device(config.trainer.device)
        self.mesh = join_world(config, self.device)
        self.config = config = with_engine_sequences(config, checked, self.mesh)
        self.tokenizer = checked.tokenizer
        self.policy = build_policy(config, checked, self.mesh, self.device)
        self.export_weights = build_export(config, checked, self.policy)
        self.colocation = build_colocation(config, checked, self.policy)
        self.policy.set_optimizer(config.actor.optim, 1)
        self.slots = Slots(self.policy)
        self.metrics = Metrics(self.device.synchronize)
        self._awake = contextlib.ExitStack()  # is inside `rollout` while samples are generated
        self._version = 0
        self._sampler: Path | None = None  # whose weights the awake engine has
        self._saved: dict[str, Path] = {}  # model -> the sampler that has its current weights

    def close(self) -> None:
        """Release the engine."""
        self._sleep()
        if self.colocation is not None:
            self.colocation.close()

    def recover(self) -> None:
        """Bring engine and device into order after a command that failed. Raises what they raise."""
        self._sleep()
        self.device.synchronize()

    def _sleep(self) -> None:
        self._sampler = None
        self._awake.close()

    # -- models ----------------------------------------------------------------------------------------------------

    def create(self, model_id: str, lora: LoraRequest | None) -> None:
        """Make a new model, with a new optimizer."""
        self._sleep()
        self._saved.pop(model_id, None)
        self.slots.create(model_id, lora)

    def drop(self, model_id: str) -> None:
        """Free a model's memory."""
        self.slots.drop(model_id)

    def save(self, model_id: str, folder: Path) -> None:
        """Write a checkpoint of the model and its optimizer, complete or not at all. Any layout reads it. Raises RankError."""
        self._enter(model_id)
        partial = partial_of(folder)
        task = f"cannot write {folder}"

        def start() -> None:
            if partial.exists():
                remove_folder(partial)
            partial.mkdir(parents=True)

        try:
            on_first_rank(self.mesh, task, start)
            save_sharded(self.policy, partial / "state")
            on_first_rank(self.mesh, task, functools.partial(publish_folder, partial, folder))
        except Exception:
            if self.mesh.rank == 0:
                shutil.rmtree(partial, ignore_errors=True)  # the disk may be full
            raise

    def load(self, model_id: str, folder: Path, lora: LoraRequest | None, *, optimizer: bool) -> None:
        """Read a checkpoint into a loaded model or a new one, without the gradients since it. Raises RankError."""
        self._sleep()
        self._saved.pop(model_id, None)
        if model_id in self.slots.loaded:
            self.slots.enter(model_id)
        else:
            self.slots.create(model_id, lora)
        load_sharded(self.policy, folder / "state", same_world=False)
        self.slots.has_gradients = False
        if not optimizer:
            self.slots.reset_optimizer()

    def export(self, model_id: str, folder: Path) -> None:
        """Write the weights for others to read: a PEFT folder of adapters, or a whole Hugging Face folder."""
        self._enter(model_id)
        self.export_weights(folder, adapters=True)

    def snapshot(self, model_id: str, folder: Path) -> None:
        """Write the weights for a sampler."""
        self.export(model_id, folder)
        self._saved[model_id] = folder

    def _enter(self, model_id: str) -> None:
        self._sleep()
        self.slots.enter(model_id)

    # -- passes and steps ------------------------------------------------------------------------------------------

    def run_pass(self, request: PassRequest) -> tuple[list[np.ndarray[Any, Any]], float]:
        """Compute the targets' log-probabilities [N] of each datum, and the sum of the loss. Adds its gradients, if wanted."""
        self._enter(request.model_id)
        batch, rows = self._batch(request.data)
        if request.forward_only:
            logprobs = self.policy.logprobs(batch)
        else:
            loss = functools.partial(token_sum, name=request.loss, settings=request.settings)
            [(micro_batches, _)] = batch.updates()
            compute = functools.partial(self.policy.forward_backward, batch, micro_batches, loss)
            logprobs = self.slots.add_gradients(compute).host_logprobs()
        values = token_losses(request.loss, logprobs, _columns(batch), request.settings) * batch.response_mask
        sums = values.double().sum(1).tolist()
        mine = {row: (logprobs[i, : len(request.data[row].tokens)].numpy(), sums[i]) for i, row in enumerate(rows)}
        parts = self.mesh.gather(mine if self.mesh.is_replica_reporter else {})
        if self.mesh.rank:
            return [], 0.0
        found = {row: part for of_rank in parts for row, part in of_rank.items()}
        ordered = [found[row] for row in range(len(request.data))]
        return [one for one, _ in ordered], sum(size for _, size in ordered)

    def _batch(self, data: Sequence[WireDatum]) -> tuple[Batch, list[int]]:
        """Returns this rank's rows as a batch of one mini-batch, and their numbers in `data`."""
        units, lengths = [[row] for row in range(len(data))], [len(datum.tokens) + 1 for datum in data]
        if self.config.model.exact:
            assigned = assign_leaves([units], self.mesh.dp, lengths)
        else:
            assigned = assign([units], self.mesh.dp, lengths, lengths, self.config.actor)
        [mini_batch] = assigned.mini_batches[self.mesh.dp_rank]
        rows = sorted(rows_of_mini_batch(mini_batch))
        place = {row: number for number, row in enumerate(rows)}
        shape = len(rows), max((lengths[row] - 1 for row in rows), default=1)
        names = ("logprobs", "advantages", "weights", "sequence_ratio_mask")
        columns = {name: torch.zeros(shape) for name in names}
        mask = torch.zeros(shape, dtype=torch.bool)
        for number, row in enumerate(rows):
            mask[number, : lengths[row] - 1] = True
            for name, values in data[row].columns.items():
                columns[name][number, : lengths[row] - 1] = torch.from_numpy(values)
        tokens = [torch.from_numpy(np.append(data[row].tokens, 0)) for row in rows]  # the last one is read by no target
        batch = Batch(
            tokens=tokens,
            prompt_lengths=[1] * len(rows),
            response_mask=mask,
            loss_mask=mask,
            rollout_logprobs=columns["logprobs"],
            advantages=columns["advantages"],
            token_weights=columns["weights"],
            correction=columns["sequence_ratio_mask"],
            mini_batches=[[[place[row] for row in rows_of_micro] for rows_of_micro in mini_batch]],
            targets=[torch.from_numpy(data[row].targets.astype(np.int64)) for row in rows],
        )
        return batch, rows

    def step(self, model_id: str, adam: AdamSettings) -> float:
        """Make one step of AdamW on the gradients so far. Returns their norm before clipping; infinity: no step was made."""
        self._enter(model_id)
        self._saved.pop(model_id, None)
        return self.slots.step(adam)

    # -- samples ---------------------------------------------------------------------------------------------------

    def sample(self, sampler: Path | None, jobs: Sequence[SampleJob]) -> list[Sampled]:
        """Generate for `jobs` with the weights of the folder `sampler`; None: of the base."""
        if self.colocation is None:
            raise RequestError("this server has no engine")
        sampler = sampler or Path()
        if self._sampler != sampler:
            self._wake(sampler)
        engine, mesh = self.colocation.engine, self.mesh
        wanted = [(number, index) for number, job in enumerate(jobs) for index in range(len(job.seeds))]
        first, end = (len(wanted) * (mesh.engine_replica + i) // mesh.num_engine_replicas for i in range(2))
        stops = {job.stop: StopTexts(self.tokenizer, job.stop) if job.stop else None for job in jobs}
        requests = [
            Request(
                prompt_ids=jobs[number].prompt,
                seed=jobs[number].seeds[index],
                max_tokens=jobs[number].max_tokens,
                temperature=jobs[number].temperature,
                top_p=jobs[number].top_p,
                top_k=jobs[number].top_k,
                stop_token_ids=jobs[number].stop_token_ids,
                stop=stops[jobs[number].stop],
            )
            for number, index in wanted[first:end]
        ]
        completions = engine.generate(requests, self._version) if requests else []
        scored = [number for number, job in enumerate(jobs) if job.num_scored]
        scored = scored[mesh.engine_replica :: mesh.num_engine_replicas]
        logprobs = engine.logprobs([list(jobs[number].prompt) for number in scored]) if scored else []
        mine = dict(zip(wanted[first:end], completions, strict=True)), dict(zip(scored, logprobs, strict=True))
        parts = mesh.gather(mine if mesh.is_replica_leader else ({}, {}))
        drawn = {place: one for of_rank, _ in parts for place, one in of_rank.items()}
        of_prompts = {number: one for _, of_rank in parts for number, one in of_rank.items()}
        return [
            Sampled(
                [drawn[number, index] for index in range(len(job.seeds))],
                _last(job, of_prompts.get(number, [])),
            )
            for number, job in enumerate(jobs if parts else ())
        ]

    def _wake(self, sampler: Path) -> None:
        """Give the engine a sampler's weights. The model in the policy stays as it is. Raises RequestError, RankError."""
        self._sleep()
        assert self.colocation is not None
        if self.slots.has_gradients:  # their buffers may be freed while samples are generated
            self.slots.leave()
        is_there = self.slots.model_id is not None and self._saved.get(self.slots.model_id) == sampler
        with contextlib.nullcontext() if is_there else self._with_weights(sampler):
            if not all(self.mesh.all_gather(self.policy.has_finite_weights())):
                raise RequestError("the weights are not finite: an optimizer step was too large; load an earlier state")
            self._version += 1
            self.colocation.probe.forget()
            rollout = self.colocation.rollout(self._version, self.metrics)
            try:
                self._awake.enter_context(rollout)
            except Exception:  # a RankError is on every rank: the engine has other numbers than the policy
                self.colocation.engine.sleep()
                self.policy.onload()
                raise
        self.metrics.reduce(lambda value: [value])  # nothing reads them
        self._sampler = sampler

    @contextlib.contextmanager
    def _with_weights(self, sampler: Path) -> Iterator[None]:
        """The policy has a sampler's weights inside the block; the base's for an empty path."""
        kept = [one.to("cpu", copy=True) for one in self.slots.parameters()]
        try:
            self._set(sampler)
            yield
        finally:
            with torch.no_grad():
                for parameter, before in zip(self.slots.parameters(), kept, strict=True):
                    parameter.copy_(before)

    @torch.no_grad()
    def _set(self, sampler: Path) -> None:
        policy, slots = self.policy, self.slots
        if sampler == Path():
            for parameter, value in zip(slots.parameters(), slots.first, strict=True):
                parameter.copy_(value if policy.lora is None else torch.zeros_like(value))
        elif policy.lora is None:
            load_hf(policy.ddp, sampler, policy.arch, self.mesh)
        else:
            for name, (a, b) in policy.lora.stored(sampler, policy.arch, self.mesh).items():
                policy.lora.modules[name].lora_a.copy_(a)
                policy.lora.modules[name].lora_b.copy_(b)


def _last(job: SampleJob, logprobs: list[float]) -> list[float] | None:
    if job.num_scored is None:
        return None
    return [math.nan] * (len(job.prompt) - job.num_scored) + logprobs[len(logprobs) - job.num_scored :]


def token_sum(inputs: Any, *, name: str, settings: Mapping[str, float]) -> tuple[Tensor, MetricSums]:
    """Sums a loss of the protocol over the rows of a micro-batch (`LossInputs`). It has no metrics of its own."""
    logprobs = inputs.logprobs.masked_fill(~inputs.mask, 0.0)
    return (token_losses(name, logprobs, _columns(inputs), settings) * inputs.mask).sum(), {}


def _columns(inputs: Any) -> dict[str, Tensor]:
    """Returns the protocol's tensors of a batch, or of a loss's inputs."""
    return {
        "logprobs": inputs.rollout_logprobs,
        "advantages": inputs.advantages,
        "weights": inputs.token_weights,
        "sequence_ratio_mask": inputs.correction,
    }
