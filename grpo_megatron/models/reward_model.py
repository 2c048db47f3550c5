"""RewardModel: a decoder with one linear head [1, h] in place of the vocabulary's; one score per sequence.

The score is w . h_t in float32. h_t is the final hidden state at the sequence's last token that is not padding. This is
what transformers' `*ForSequenceClassification` computes, pad_token_id included: if a response ends in that id, the
score is read at the token before it. Attention is causal, so h_t depends on the whole response.

The training loss is -log sigmoid(chosen - rejected), summed over pairs and divided by the number of pairs of the whole
step. The divisor is fixed before batching, so the layout cannot change the gradient. Both sequences of a pair are always
in one micro-batch.

Everything else, from the layout to the optimizer, is as for the policy. Under tensor parallelism the head is replicated:
every rank computes the same score from the same whole hidden state. The head's gradient is therefore complete on each rank.
It must not be summed over these ranks, and the head must not be marked as a shard.
"""

from __future__ import annotations

import itertools
import json
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from grpo_megatron.algo.ranking import pairwise_loss
from grpo_megatron.config import ActorConfig, MegatronConfig, ModelConfig, RewardModelConfig
from grpo_megatron.device import Device
from grpo_megatron.models.architecture import Architecture
from grpo_megatron.models.build import HeadOutput, LogprobModel, Targets, build_model
from grpo_megatron.models.context import local_tokens, target_share
from grpo_megatron.models.export import save_hf
from grpo_megatron.models.forward import Pack, forward_backward
from grpo_megatron.models.policy import Policy
from grpo_megatron.models.precision import set_parameter
from grpo_megatron.models.reward_folder import HEAD, RewardFolder, check_files, exported_config, read_reward_folder
from grpo_megatron.models.sharded import ShardedModel
from grpo_megatron.models.weights import SafetensorsFolder, global_parameters, model_rows, unwrapped
from grpo_megatron.parallel.mesh import Mesh
from grpo_megatron.types import Batch, WeightBucket


class ScoreModel(LogprobModel):
    """GPTModel whose last stage returns one score per sequence, at `Targets.state_indices`. Target tokens are not used."""

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
        last = hidden_states.squeeze(1)[labels.state_indices].float()  # [sequences, h]
        scores = last @ self.score.weight.squeeze(0)
        return HeadOutput(scores, scores.detach())

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: Any = None) -> Any:  # type: ignore[type-arg]
        """Skips GPTModel's own method, which needs an output layer."""
        return MegatronModule.sharded_state_dict(self, prefix, sharded_offsets, metadata)


@torch.no_grad()
def load_reward_model(
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
    model = build_model(arch, megatron, dtype, device, ScoreModel, has_gradients=has_gradients)
    rows = model_rows(arch)
    with SafetensorsFolder(folder.path) as files:
        check_files(files, folder)
        for name, parameter in global_parameters(model).items():
            set_parameter(parameter, rows[name].shard(files.slice, arch, mesh.tp_rank, mesh.tp))
        if mesh.is_last_stage:
            # Added after the model is built, so that the head is neither rounded to bfloat16 nor marked as a shard.
            head = torch.nn.Linear(arch.hidden_size, 1, bias=False, dtype=torch.float32, device=device.torch_device)
            if folder.has_head:
                head.weight.copy_(files.slice(HEAD)[:])
            else:
                head.weight.zero_()
            unwrapped(model).score = head
    return model


class SequenceScorer(ShardedModel):
    """A sharded model with one score per sequence, the same on every rank of the replica."""

    pad_token_id: int | None

    def packs(self, batch: Batch, micro_batches: list[list[int]], temperature: float | None = None) -> list[Pack]:
        packs = super().packs(batch, micro_batches, temperature)
        return [self._at_the_ends(batch, pack) for pack in packs]

    def _at_the_ends(self, batch: Batch, pack: Pack) -> Pack:
        """The pack with one target per sequence, at its end, instead of one per response token."""
        cuts = pack.packed.cu_seqlens_q.tolist()
        ends = [start + self._last(batch.tokens[row]) for row, start in zip(pack.rows, cuts, strict=False)]
        state_indices, share, to = torch.tensor(ends, dtype=torch.int64), None, self.device.torch_device
        if self.mesh.cp > 1:
            lengths = [end - start for start, end in itertools.pairwise(cuts)]
            share = target_share(state_indices, local_tokens(lengths, self.mesh.cp, self.mesh.cp_rank))
            state_indices = share.state_indices
            share = replace(share, target_indices=share.target_indices.to(to))
        state_indices = state_indices.to(to)
        targets = Targets(state_indices, tokens=state_indices, temperature=1.0, chunk=self.chunk)
        return replace(pack, targets=targets, share=share)

    def _last(self, tokens: Tensor) -> int:
        """Index of the last token that is not padding; 0 if there is none."""
        if self.pad_token_id is None:
            return len(tokens) - 1
        is_token = tokens != self.pad_token_id
        return int(is_token.nonzero().max()) if is_token.any() else 0

    def score(self, batch: Batch) -> Tensor:
        """One score per sequence [B], float32 on the host. Collective over the replica."""
        return self.forward_batch(batch, torch.zeros(len(batch)), lambda current, scores: scores)


class FrozenRewardModel(SequenceScorer):
    """A reward model that is not trained: no gradients, no optimizer."""

    def __init__(self, config: RewardModelConfig, dtype: str, actor: ActorConfig, mesh: Mesh, device: Device) -> None:
        assert config.path is not None
        folder = read_reward_folder(config.path)
        self.pad_token_id = folder.pad_token_id
        inner = load_reward_model(folder, actor.megatron, dtype, mesh, device, has_gradients=False).requires_grad_(
            False
        )
        super().__init__(inner, folder.arch, actor, mesh, device)


class RewardModel(Policy, SequenceScorer):
    """A policy whose output is a score. It is built, updated, saved and loaded (`models.state`) like a policy.

    Built on every rank at the same point. `actor` gives the layout and the limits of a micro-batch. Call `set_optimizer`
    before the first update.
    """

    def __init__(self, config: RewardModelConfig, dtype: str, actor: ActorConfig, mesh: Mesh, device: Device) -> None:
        assert config.path is not None
        self.folder = read_reward_folder(config.path)
        self.pad_token_id = self.folder.pad_token_id
        with_optim = actor.model_copy(update={"optim": config.optim})
        model = ModelConfig.model_validate({"path": config.path, "dtype": dtype})
        super().__init__(model, with_optim, self.folder.arch, mesh, device)

    def _load(
        self, model: ModelConfig, arch: Architecture, actor: ActorConfig, mesh: Mesh, device: Device
    ) -> torch.nn.Module:
        return load_reward_model(self.folder, actor.megatron, model.dtype, mesh, device)

    def logprobs(self, batch: Batch, temperature: float | None = None) -> Tensor:
        raise NotImplementedError("a reward model has no log-probabilities: it has no output head over the vocabulary")

    def update_pairs(self, batch: Batch, num_pairs: int) -> dict[str, float]:
        """One optimizer step on the batch's one mini-batch. Collective; the same metrics on every rank.

        Rows 2i (chosen) and 2i + 1 (rejected) are neighbours in one micro-batch. `num_pairs` counts the pairs of all ranks.
        Like `Policy.update`, skips the step if the gradient on any rank is not finite. Raises TooManySkippedSteps.
        """
        totals = self.backward_pairs(batch, num_pairs)
        norm = self._step()
        dist.all_reduce(totals, group=self.mesh.control)
        loss, correct, margin = (totals / num_pairs).tolist()
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

    def hf_weights(self, bucket_megabytes: int = 512) -> Iterator[WeightBucket]:
        """See ShardedModel. The last tensor is `score.weight`, in float32."""
        yield from super().hf_weights(bucket_megabytes)
        if self.mesh.is_last_stage:
            head: Tensor = unwrapped(self.ddp).get_parameter(HEAD).detach().clone()
        else:
            head = torch.empty(1, self.arch.hidden_size, device=self.device.torch_device)
        if self.mesh.pp > 1:
            dist.broadcast(head, self.mesh.stage_rank(self.mesh.pp - 1), group=self.mesh.pp_group)
        yield [(HEAD, head)]

    def save_hf(self, target: Path, tokenizer_path: Path) -> None:
        """Collective: write a `*ForSequenceClassification` folder. transformers and `reward_model.path` can read it."""
        with tempfile.TemporaryDirectory() as config_folder:
            config = exported_config(self.folder.path)
            (Path(config_folder) / "config.json").write_text(json.dumps(config))
            save_hf(self.hf_weights(), Path(config_folder), tokenizer_path, target, self.mesh)
