"""Forward and backward passes of one rank's shard of a model: Megatron's pipeline schedule over packs (packing.py).

`forward_backward` runs the schedule. `LossPass` makes gradients and metric sums of a mini-batch, from the model's numbers.
`ShardedModel` is what every model has: passes over a batch, and the stream of its weights. `LanguageModel` reads
log-probabilities.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from torch import Tensor

from grpo_megatron.algo.losses import LossInputs, MetricSum
from grpo_megatron.config import ActorConfig
from grpo_megatron.device import Device
from grpo_megatron.models.architecture import Architecture
from grpo_megatron.models.layers.precision import token_multiple
from grpo_megatron.models.packing import Pack, gather_targets, pack, pack_trees, unpack
from grpo_megatron.models.weights.load import hf_weights, stage_owners
from grpo_megatron.models.weights.resharding import Resharding
from grpo_megatron.parallel.mesh import Mesh
from grpo_megatron.sync.digest import Expected
from grpo_megatron.types import Batch, WeightBucket


def forward_backward(
    model: torch.nn.Module,
    packs: list[Pack],
    consume: Callable[[Pack, Tensor, Tensor], Any],
    *,
    device: Device,
    forward_only: bool,
) -> list[Any]:
    """Megatron's pipeline schedule over `packs`. The last stage calls `consume(pack, values [N], entropy [N])` for each.

    `values` are log-probabilities, or the scores of a reward model (see `build.HeadOutput`).
    forward_only: `consume` returns anything. The results are returned in order; other stages return an empty list.
    Training: `consume` returns (loss to be summed, result). Gradients are left in the model's buffers. They are summed over
    micro-batches, data-parallel and context-parallel ranks, and divided by nothing.
    """

    def step(remaining: Any, model: torch.nn.Module) -> tuple[Any, Callable[..., Any]]:
        current: Pack = next(remaining)
        output = model(
            input_ids=current.tokens,
            position_ids=current.position_ids,
            attention_mask=None,
            packed_seq_params=current.packed,
            labels=current.targets,
        )

        def finish(output: tuple[Tensor, Tensor], non_loss_data: bool = False) -> Any:
            if (share := current.share) is not None:
                group = parallel_state.get_context_parallel_group()
                values, entropy = (gather_targets(part, share, group) for part in output)
                output = values, entropy
            result = consume(current, *output)
            if non_loss_data:
                return result
            loss, metrics = result
            return loss, torch.zeros((), dtype=torch.int, device=loss.device), metrics  # 0 tokens: divide by nothing

        return output, finish

    with device.megatron(), torch.set_grad_enabled(not forward_only):
        results = get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=iter(packs),
            model=model,
            num_microbatches=len(packs),
            seq_length=1,  # unused: shapes are sent with the tensors (variable_seq_lengths)
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )
    return list(results)


MetricSums = dict[str, MetricSum]
LossFunction = Callable[[Any], tuple[Tensor, MetricSums]]  # of what `Policy.loss_inputs` returns


class LossPass:
    """Forward and backward of one mini-batch. Gradients go to the model's buffers, the rest is here.

    `inputs` makes of a pack's rows, log-probabilities and entropies what `loss` reads.
    `sums`: the metric sums of this rank. `logprobs`: for each pack, its rows and their log-probabilities [rows, R of the
    pack], on the device. Both are empty on other pipeline stages than the last.
    """

    def __init__(
        self, batch: Batch, loss: LossFunction, inputs: Callable[[Batch, list[int], Tensor, Tensor], Any]
    ) -> None:
        self.batch, self.loss, self.inputs = batch, loss, inputs
        self.sums: MetricSums = {}
        self.logprobs: list[tuple[list[int], Tensor]] = []

    def run(self, model: torch.nn.Module, packs: list[Pack], device: Device, num_forward_only: int = 0) -> None:
        """Add the gradients of `packs` to the model's buffers. Collective over the replica.

        The last `num_forward_only` packs have no gradient. They get a forward pass, for metrics and log-probabilities.
        """
        cut = len(packs) - num_forward_only
        if num_forward_only:
            forward_backward(model, packs[cut:], self._consume, device=device, forward_only=True)
        forward_backward(model, packs[:cut], self._consume, device=device, forward_only=False)

    def host_logprobs(self) -> Tensor:
        """Log-probability of every response token [B, R], float32 on the host; 0 in rows that were not in a pack."""
        out = torch.zeros(self.batch.response_mask.shape)
        for rows, part in self.logprobs:
            out[rows, : part.shape[1]] = part.float().cpu()
        return out

    def _consume(self, current: Pack, flat_logprobs: Tensor, flat_entropy: Tensor) -> tuple[Tensor, None]:
        if not current.rows:
            return flat_logprobs.sum() + flat_entropy.sum(), None  # zero, but connected to every parameter
        width = max(current.lengths)
        logprobs, entropy = (unpack(flat, current.lengths, width) for flat in (flat_logprobs, flat_entropy))
        self.logprobs.append((current.rows, logprobs.detach()))
        value, metrics = self.loss(self.inputs(self.batch, current.rows, logprobs, entropy))
        for name, part in metrics.items():
            self.sums[name] = self.sums[name].plus(part) if name in self.sums else part
        return value, None


def loss_inputs(batch: Batch, rows: list[int], logprobs: Tensor, entropy: Tensor) -> LossInputs:
    """Returns what a loss reads of `rows`. `logprobs` and `entropy` [len(rows), R] are the model's.

    Where the batch has no old log-probabilities, they are the model's own.
    """
    of_rows = functools.partial(like_rows, rows, logprobs)
    return LossInputs(
        logprobs=logprobs,
        entropy=entropy,
        old_logprobs=logprobs.detach() if batch.old_logprobs is None else of_rows(batch.old_logprobs),
        rollout_logprobs=of_rows(batch.rollout_logprobs),
        ref_logprobs=None if batch.ref_logprobs is None else of_rows(batch.ref_logprobs),
        advantages=of_rows(batch.advantages),
        mask=of_rows(batch.loss_mask),
        token_weights=of_rows(batch.token_weights),
        correction=None if batch.correction is None else of_rows(batch.correction),
    )


def like_rows(rows: list[int], like: Tensor, tensor: Tensor) -> Tensor:
    """`rows` of a batch's `tensor` [B, R], as wide as `like` [len(rows), ...] and on its device."""
    return tensor[rows, : like.shape[1]].to(like.device)


class ShardedModel:
    """`model` is this rank's stage and shard, with its weights. Collective: built on every rank at the same point."""

    def __init__(
        self,
        model: torch.nn.Module,
        arch: Architecture,
        actor: ActorConfig,
        mesh: Mesh,
        device: Device,
        temperature: float = 1.0,
    ) -> None:
        self.model, self.arch, self.actor, self.mesh, self.device = model, arch, actor, mesh, device
        self.temperature, self.chunk = temperature, actor.logprob_chunk_size
        self.multiple = token_multiple(actor.megatron)  # packs are padded to a multiple of this many tokens
        self.stage_of = stage_owners(model, arch, mesh)

    def packs(self, batch: Batch, micro_batches: list[list[int]], temperature: float | None = None) -> list[Pack]:
        """The micro-batches on the device, at `temperature` (None: the model's own)."""
        options: dict[str, Any] = {
            "multiple": self.multiple,
            "temperature": self.temperature if temperature is None else temperature,
            "chunk": self.chunk,
            "device": self.device,
        }
        return [
            pack_trees(batch, rows, **options)
            if batch.shares_prompts and rows
            else pack(batch, rows, **options, cp=self.mesh.cp, cp_rank=self.mesh.cp_rank)
            for rows in micro_batches
        ]

    @torch.no_grad()
    def forward_batch(
        self, batch: Batch, out: Tensor, read: Callable[[Pack, Tensor], Tensor], temperature: float | None = None
    ) -> Tensor:
        """Set each pack's rows of `out` [B, ...] to `read(pack, values)`. The same on every rank of the replica.

        Runs the micro-batches of the batch, so that a later update computes the same numbers. Collective over the replica.
        """

        def consume(current: Pack, values: Tensor, entropy: Tensor) -> None:
            if current.rows:
                out[current.rows] = read(current, values).float().cpu()

        micro_batches = [rows for mini in batch.mini_batches for rows in mini]
        if not micro_batches:  # the batch is empty on every rank
            return out
        packs = self.packs(batch, micro_batches, temperature)
        forward_backward(self.model, packs, consume, device=self.device, forward_only=True)
        return self.from_last_stage(out)

    def from_last_stage(self, out: Tensor) -> Tensor:
        """The host tensor `out` of the last pipeline stage, on the ranks of all stages. Collective over the replica."""
        if self.mesh.pp == 1:
            return out
        shared = out.to(self.device.torch_device)
        dist.broadcast(shared, self.mesh.stage_rank(self.mesh.pp - 1), group=self.mesh.pp_group)
        return shared.cpu()

    def readable_weights(self) -> contextlib.AbstractContextManager[None]:
        """Inside the block the model's weights are current and on the device. Collective."""
        return contextlib.nullcontext()

    def hf_weights(self, bucket_megabytes: int = 512) -> Iterator[WeightBucket]:
        """Collective stream of every Hugging Face tensor, whole, on every rank (see `weights.hf_weights`)."""
        with self.readable_weights():
            yield from hf_weights(self.model, self.arch, self.mesh, bucket_megabytes << 20, self.stage_of)

    def engine_weights(self, resharding: Resharding, version: int) -> Iterator[WeightBucket]:
        """Collective stream of the weights for an engine: only the parts that it reads (see `Resharding.stream`)."""
        with self.readable_weights():
            yield from resharding.stream(self.model, version)

    def expected_digests(self, resharding: Resharding) -> Expected:
        """The digests of the current weights, for each rank of the engine. Collective (see `Resharding`)."""
        with self.readable_weights():
            return resharding.expected_digests(self.model)


class LanguageModel(ShardedModel):
    """A sharded model that computes log-probabilities of a batch: the policy or the reference."""

    def logprobs(self, batch: Batch, temperature: float | None = None) -> Tensor:
        """Log-probability of every response token [B, R], float32 on the host, 0 after the end. Collective."""
        width = batch.response_mask.shape[1]

        def read(current: Pack, values: Tensor) -> Tensor:
            return unpack(values, current.lengths, width)

        return self.forward_batch(batch, torch.zeros(len(batch), width), read, temperature)
