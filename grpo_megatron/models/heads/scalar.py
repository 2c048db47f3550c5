"""A decoder with a scalar head: one linear layer [1, h] in place of the vocabulary's. The base of reward and value models.

The number at a target is w . h_t (+ b) in float32, where h_t is the final hidden state of the decoder at token t. Attention is
causal, so h_t depends on all tokens up to t. Which tokens are targets is up to the model that uses the head:

    every response token   `ShardedModel.packs` as it is: the state before each response token   a value model
    chosen tokens          `read_at` with their indices                                           a process reward model
    one token              `read_at` with the last one                                            a reward model

Everything else, from the layout to the optimizer, is as for the policy. Under tensor parallelism the head is replicated:
every rank computes the same numbers from the same whole hidden states. The head's gradient is therefore complete on each
rank. It must not be summed over these ranks, and the head must not be marked as a shard.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from grpo_megatron.algo.losses import MetricSum, ValueInputs, value_loss
from grpo_megatron.algo.scores import pairwise_loss
from grpo_megatron.config import ActorConfig, CriticConfig, MegatronConfig, ModelConfig, RewardModelConfig
from grpo_megatron.device import Device
from grpo_megatron.models.architecture import Architecture
from grpo_megatron.models.build import HeadOutput, LogprobModel, build_model
from grpo_megatron.models.forward import LanguageModel, ShardedModel, add_sums, forward_backward
from grpo_megatron.models.heads.folder import (
    HEAD,
    HEAD_BIAS,
    RewardFolder,
    check_files,
    exported_config,
    exported_head,
    read_head,
    read_reward_folder,
)
from grpo_megatron.models.layers.precision import set_parameter
from grpo_megatron.models.optimizer import OffloadedTensors
from grpo_megatron.models.packing import Pack, Targets, local_tokens, target_share, unpack
from grpo_megatron.models.policy import Policy
from grpo_megatron.models.weights.export import save_hf
from grpo_megatron.models.weights.load import SafetensorsFolder, global_parameters, model_rows, unwrapped
from grpo_megatron.parallel.mesh import Mesh
from grpo_megatron.types import Batch, WeightBucket


class ScalarModel(LogprobModel):
    """GPTModel whose last stage returns one number per target, at `Targets.state_indices`. Target tokens are not used."""

    score: torch.nn.Linear

    def __init__(self, *args: Any, share_embeddings_and_output_weights: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, share_embeddings_and_output_weights=False, **kwargs)
        if self.post_process:
            del self.output_layer

    def _postprocess(self, hidden_states: Tensor, labels: Targets, **unused: Any) -> Any:
        """hidden_states [t (/tp under sequence parallelism), 1, h]."""
        if not self.post_process:
            return hidden_states
        if self.config.sequence_parallel:
            # Backward: each rank takes its part, because every rank has the whole gradient.
            hidden_states = tensor_parallel.gather_from_sequence_parallel_region(
                hidden_states, tensor_parallel_output_grad=False
            )
        states = hidden_states.squeeze(1)[labels.state_indices].float()  # [targets, h]
        # Called as a module: with `overlap_param_gather` its hook waits for the head, which has a bucket of its own in bf16.
        numbers = self.score(states).squeeze(1)
        return HeadOutput(numbers, torch.zeros_like(numbers))  # no entropy: zeros

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: Any = None) -> Any:  # type: ignore[type-arg]
        """Skips GPTModel's own method, which needs an output layer."""
        return MegatronModule.sharded_state_dict(self, prefix, sharded_offsets, metadata)


@torch.no_grad()
def load_scalar_model(
    folder: RewardFolder,
    megatron: MegatronConfig,
    dtype: str,
    mesh: Mesh,
    device: Device,
    *,
    has_gradients: bool = True,
) -> torch.nn.Module:
    """This rank's part of the model, with its weights. The head is float32 at any `dtype`. Raises WeightsError."""
    arch = folder.arch
    model = build_model(arch, megatron, dtype, device, ScalarModel, has_gradients=has_gradients)
    rows = model_rows(arch)
    with SafetensorsFolder(folder.path) as files:
        check_files(files, folder)
        for name, parameter in global_parameters(model).items():
            set_parameter(parameter, rows[name].shard(files.slice, arch, mesh.tp_rank, mesh.tp))
        if mesh.is_last_stage:
            # Added after the model is built, so that the head is neither rounded to bfloat16 nor marked as a shard.
            head = torch.nn.Linear(
                arch.hidden_size, 1, bias=folder.has_bias, dtype=torch.float32, device=device.torch_device
            )
            weight, bias = read_head(files, folder)
            head.weight.copy_(weight)
            if folder.has_bias:
                head.bias.copy_(bias)
            unwrapped(model).score = head
    return model


def read_at(model: ShardedModel, batch: Batch, pack: Pack, positions: Sequence[Sequence[int]]) -> Pack:
    """The pack with other targets: `positions[i]` are indices into the tokens (prompt + response) of its i-th sequence.

    The numbers come back in this order. `Pack.lengths` becomes how many each sequence has.
    """
    cuts, mesh = pack.packed.cu_seqlens_q.tolist(), model.mesh
    indices = [start + position for row, start in zip(positions, cuts, strict=False) for position in row]
    state_indices, share, to = torch.tensor(indices, dtype=torch.int64), None, model.device.torch_device
    if mesh.cp > 1:
        lengths = [end - start for start, end in itertools.pairwise(cuts)]
        share = target_share(state_indices, local_tokens(lengths, mesh.cp, mesh.cp_rank))
        state_indices = share.state_indices
        share = replace(share, target_indices=share.target_indices.to(to))
    state_indices = state_indices.to(to)
    targets = Targets(state_indices, tokens=state_indices, temperature=1.0, chunk=model.chunk)
    return replace(pack, lengths=[len(row) for row in positions], targets=targets, share=share)


class ScalarPolicy(Policy):
    """A policy whose output is one number per target. It is updated, saved and loaded (`models.state`) like a policy.

    Built on every rank at the same point. `actor` gives the layout and the limits of a micro-batch. Call `set_optimizer`
    before the first update.
    """

    def __init__(self, folder: RewardFolder, dtype: str, actor: ActorConfig, mesh: Mesh, device: Device) -> None:
        self.folder = folder
        model = ModelConfig.model_validate({"path": folder.path, "dtype": dtype})
        super().__init__(model, actor, folder.arch, mesh, device)

    def _load(
        self, model: ModelConfig, arch: Architecture, actor: ActorConfig, mesh: Mesh, device: Device
    ) -> torch.nn.Module:
        return load_scalar_model(self.folder, actor.megatron, model.dtype, mesh, device)

    def logprobs(self, batch: Batch, temperature: float | None = None) -> Tensor:
        raise NotImplementedError(
            "a scalar head gives no log-probabilities: it is not an output head over the vocabulary"
        )

    def hf_weights(self, bucket_megabytes: int = 512) -> Iterator[WeightBucket]:
        """See ShardedModel. The last bucket is the head, in float32 and in the form of the exported folder."""
        yield from super().hf_weights(bucket_megabytes)
        h, device = self.arch.hidden_size, self.device.torch_device
        flat = torch.empty(h + self.folder.has_bias, device=device)
        if self.mesh.is_last_stage:
            inner = unwrapped(self.ddp)
            names = [HEAD, HEAD_BIAS][: 1 + self.folder.has_bias]
            flat = torch.cat([inner.get_parameter(name).detach().flatten() for name in names])
        if self.mesh.pp > 1:
            dist.broadcast(flat, self.mesh.stage_rank(self.mesh.pp - 1), group=self.mesh.pp_group)
        yield exported_head(self.folder, flat[:h].clone(), flat[h:].clone())

    def save_hf(self, target: Path, tokenizer_path: Path) -> None:
        """Collective: write a `*ForSequenceClassification` or `*ForTokenClassification` folder, as the kind asks.

        transformers and `reward_model.path` can read it.
        """
        with tempfile.TemporaryDirectory() as config_folder:
            config = exported_config(self.folder)
            (Path(config_folder) / "config.json").write_text(json.dumps(config))
            save_hf(self.hf_weights(), Path(config_folder), tokenizer_path, target, self.mesh)


# -- ScoredPolicy: a scalar head that is trained in place of a policy. Its "log-probability" of a response token is its
# Every response token has a score, of the state at that token. The loss mask says which scores are in the loss: the last of a
# response, or the last token of each step (data/scored.py). So batches, updates, guards and metrics are those of a policy.


class ScoredPolicy(ScalarPolicy):
    def packs(self, batch: Batch, micro_batches: list[list[int]], temperature: float | None = None) -> list[Pack]:
        return [
            read_at(self, batch, pack, [range(batch.prompt_lengths[row], len(batch.tokens[row])) for row in pack.rows])
            for pack in super().packs(batch, micro_batches, temperature)
        ]

    def logprobs(self, batch: Batch, temperature: float | None = None) -> Tensor:
        """The score at every response token [B, R], float32 on the host, 0 after the end. Collective."""
        return LanguageModel.logprobs(self, batch)


# -- Reward models: scores from a decoder with a scalar head (scalar_head.py), per sequence or per step. Training on pai
# SequenceScorer reads at the sequence's last token that is not padding. This is what transformers'
# `*ForSequenceClassification` computes, pad_token_id included: if a response ends in that id, the score is read at the token
# before it. StepScorer reads at the last token of each step, where transformers' `*ForTokenClassification` has that token's
# logits; its score is the log-odds that the step is right (arXiv:2312.08935).
#
# The training loss of `RewardModel` is -log sigmoid(chosen - rejected), summed over pairs and divided by the number of pairs of
# the whole step. The divisor is fixed before batching, so the layout cannot change the gradient. Both sequences of a pair are
# always in one micro-batch.


class SequenceScorer(ShardedModel):
    """A sharded model with one score per sequence, the same on every rank of the replica."""

    folder: RewardFolder

    def packs(self, batch: Batch, micro_batches: list[list[int]], temperature: float | None = None) -> list[Pack]:
        packs = super().packs(batch, micro_batches, temperature)
        return [read_at(self, batch, pack, [[self._last(batch.tokens[row])] for row in pack.rows]) for pack in packs]

    def _last(self, tokens: Tensor) -> int:
        """Index of the last token that is not padding; 0 if there is none."""
        if self.folder.pad_token_id is None:
            return len(tokens) - 1
        is_token = tokens != self.folder.pad_token_id
        return int(is_token.nonzero().max()) if is_token.any() else 0

    def score(self, batch: Batch) -> Tensor:
        """One score per sequence [B], float32 on the host. Collective over the replica."""
        return self.forward_batch(batch, torch.zeros(len(batch)), lambda current, scores: scores)


class StepScorer(ShardedModel):
    """A sharded model with one score per step, the same on every rank of the replica."""

    folder: RewardFolder

    def score_steps(self, batch: Batch, ends: Sequence[Sequence[int]]) -> Tensor:
        """The log-odds that each step is right: [B, most steps], float32 on the host, 0 behind a row's last step.

        `ends[row]`: the last response token of each step. Collective over the replica.
        """
        width = max((len(steps) for steps in ends), default=0)
        self._ends = [[batch.prompt_lengths[row] + end for end in steps] for row, steps in enumerate(ends)]
        out = torch.zeros(len(batch), width)
        return self.forward_batch(batch, out, lambda current, scores: unpack(scores, current.lengths, width))

    def packs(self, batch: Batch, micro_batches: list[list[int]], temperature: float | None = None) -> list[Pack]:
        packs = super().packs(batch, micro_batches, temperature)
        return [read_at(self, batch, pack, [self._ends[row] for row in pack.rows]) for pack in packs]


class _Frozen(ShardedModel):
    """No gradients, no optimizer. With `actor.megatron.offload_reference` its weights are on the host between two batches."""

    def __init__(self, folder: RewardFolder, dtype: str, actor: ActorConfig, mesh: Mesh, device: Device) -> None:
        self.folder = folder
        inner = load_scalar_model(folder, actor.megatron, dtype, mesh, device, has_gradients=False)
        super().__init__(inner.requires_grad_(False), folder.arch, actor, mesh, device)
        self._offloaded = OffloadedTensors(device)
        self._offload()

    def _offload(self, *, unchanged: bool = False) -> None:
        if self.actor.megatron.offload_reference:
            self._offloaded.offload(self.model.parameters(), unchanged=unchanged)

    def forward_batch(
        self, batch: Batch, out: Tensor, read: Callable[[Pack, Tensor], Tensor], temperature: float | None = None
    ) -> Tensor:
        self._offloaded.onload()
        try:
            return super().forward_batch(batch, out, read, temperature)
        finally:
            self._offload(unchanged=True)


class FrozenRewardModel(SequenceScorer, _Frozen):
    """A reward model that is not trained."""


class FrozenStepModel(StepScorer, _Frozen):
    """A process reward model that is not trained."""


class RewardModel(ScalarPolicy, SequenceScorer):
    """A reward model that learns from pairs."""

    def __init__(self, config: RewardModelConfig, dtype: str, actor: ActorConfig, mesh: Mesh, device: Device) -> None:
        assert config.path is not None
        with_optim = actor.model_copy(update={"optim": config.optim})
        super().__init__(read_reward_folder(config.path), dtype, with_optim, mesh, device)

    def update_pairs(self, batch: Batch, num_pairs: int) -> dict[str, float]:
        """One optimizer step on the batch's one mini-batch. Collective; the same metrics on every rank.

        Rows 2i (chosen) and 2i + 1 (rejected) are neighbours in one micro-batch. `num_pairs` counts the pairs of all ranks.
        Like `Policy.update`, skips the step if the gradient on any rank is not finite. Raises TooManySkippedSteps.
        """
        totals = self.backward_pairs(batch, num_pairs)
        norm = self._step()
        loss, correct, margin = (total / num_pairs for total in self.mesh.total(totals.tolist()))
        metrics = {"loss": loss, "accuracy": correct, "margin": margin, "grad_norm": norm}
        return {f"reward_model/{name}": value for name, value in metrics.items()}

    def backward_pairs(self, batch: Batch, num_pairs: int) -> Tensor:
        """Gradients into the model's buffers, summed over all ranks. Returns this rank's sums: loss, correct pairs, margins."""
        totals = torch.zeros(3, dtype=torch.float64)

        def consume(current: Pack, scores: Tensor, _: Tensor) -> tuple[Tensor, None]:
            chosen, rejected = scores[0::2], scores[1::2]
            assert [row + 1 for row in current.rows[0::2]] == current.rows[1::2], f"a pair is split: {current.rows}"
            losses = pairwise_loss(chosen, rejected)  # without rows: empty, but connected to every parameter
            if self.mesh.is_first_replica_rank:
                margins = (chosen - rejected).detach().double()
                correct = (margins > 0).double() + 0.5 * (margins == 0).double()
                totals.add_(torch.stack([losses.detach().double().sum(), correct.sum(), margins.sum()]).cpu())
            return losses.sum() / num_pairs, None

        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        (micro_batches,) = batch.mini_batches
        packs = self.packs(batch, micro_batches)
        forward_backward(self.model, packs, consume, device=self.device, forward_only=False)
        return totals


# -- ValueModel: the critic of PPO, a decoder with a scalar head (scalar_head.py) and one value per response token -----
# V_t is read at the hidden state before response token t, as the policy's log-probability of that token is. It is the number
# that transformers' `*ForTokenClassification` with one label computes at the token before.


class ValueModel(ScalarPolicy):
    """See ScalarPolicy. With `critic.offload` its weights are on the device only inside `in_use` and `values`."""

    def __init__(
        self, config: CriticConfig, folder: RewardFolder, dtype: str, actor: ActorConfig, mesh: Mesh, device: Device
    ) -> None:
        offloads = config.offload or actor.megatron.offload_optimizer
        megatron = actor.megatron.model_copy(update={"offload_optimizer": offloads})
        super().__init__(
            folder, dtype, actor.model_copy(update={"optim": config.optim, "megatron": megatron}), mesh, device
        )
        self.config = config
        self._weights = OffloadedTensors(device)

    # -- memory --------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Inside, everything is on the device. Afterwards, what `critic.offload` or `offload_optimizer` names is not."""
        self._weights.onload()
        self.onload()
        yield
        self.offload()
        self._offload_weights()

    def _offload_weights(self, *, unchanged: bool = False) -> None:
        if self.config.offload:
            self._gather_parameters()
            self._weights.offload(self._weight_tensors(), unchanged=unchanged)

    def _weight_tensors(self) -> Iterator[Tensor]:
        """The distributed optimizer's buffers, of which the parameters are views, or else the parameters."""
        for buffer in (*self.ddp.buffers, *self.ddp.expert_parallel_buffers):
            if buffer.param_data is not None:
                yield buffer.param_data
        yield from self.ddp.parameters()

    # -- values --------------------------------------------------------------------------------------------------------

    def values(self, batch: Batch) -> Tensor:
        """The value before every response token [B, R], float32 on the host, 0 after the end. Collective."""
        width = batch.response_mask.shape[1]

        def read(current: Pack, values: Tensor) -> Tensor:
            return unpack(values, current.lengths, width)

        self._weights.onload()
        values = self.forward_batch(batch, torch.zeros(len(batch), width), read)
        self._offload_weights(unchanged=True)
        return values

    def update_values(self, batch: Batch, *, epochs: int) -> tuple[list[dict[str, MetricSum]], dict[str, float]]:
        """One optimizer step per mini-batch of a batch with `values` and `returns`, `epochs` times. Collective.

        Returns metrics as `Policy.update` does. Skips a step whose gradient is not finite on any rank. Raises
        TooManySkippedSteps.
        """
        sums: list[dict[str, MetricSum]] = []
        norms: list[float] = []
        for _ in range(epochs):
            for micro_batches in batch.mini_batches:
                sums.append(self.backward_values(batch, micro_batches))
                norms.append(self._step())
        return sums, self._update_metrics("critic", norms)

    def backward_values(self, batch: Batch, micro_batches: list[list[int]]) -> dict[str, MetricSum]:
        """Gradients of one mini-batch into the model's buffers, summed over all ranks. Returns this rank's metric sums."""
        total: dict[str, MetricSum] = {}

        def consume(current: Pack, values: Tensor, _: Tensor) -> tuple[Tensor, None]:
            if not current.rows:
                return values.sum(), None  # zero, but connected to every parameter
            loss, metrics = value_loss(self._inputs(batch, current, values), self.config.cliprange_value)
            add_sums(total, metrics)
            return loss, None

        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        packs = self.packs(batch, micro_batches)
        forward_backward(self.model, packs, consume, device=self.device, forward_only=False)
        return total

    def _inputs(self, batch: Batch, current: Pack, values: Tensor) -> ValueInputs:
        assert batch.values is not None and batch.returns is not None
        width = max(current.lengths)

        def rows(tensor: Tensor) -> Tensor:
            return tensor[current.rows, :width].to(values.device)

        return ValueInputs(
            values=unpack(values, current.lengths, width),
            old_values=rows(batch.values),
            returns=rows(batch.returns),
            mask=rows(batch.loss_mask),
            token_weights=rows(batch.token_weights),
        )
