"""RewardModel: a decoder with one linear head [1, h] in place of the vocabulary's; one score a sequence.

The score is w . h_t in float32, h_t the final hidden state at the sequence's last token that is not padding: what
transformers' `*ForSequenceClassification` computes, pad_token_id included (a response that ends in that id is read at
the token before it). It sees the whole response, because attention is causal. Training is -log sigmoid(chosen -
rejected), summed over pairs and divided by the number of pairs of the whole step before batching, so that the layout
cannot change the gradient; a pair's two sequences are always in one micro-batch.

Everything else, from the layout to the optimizer, is the policy's. Under tensor parallelism the head is replicated: every
rank computes the same score from the same whole hidden state, so that its gradient is whole on each rank and must be
neither summed nor marked as a shard.
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
from grpo_megatron.models.build import Scored, ScoringModel, Targets, build_model
from grpo_megatron.models.context import own_scores, own_tokens
from grpo_megatron.models.export import save_hf
from grpo_megatron.models.forward import Pack, run
from grpo_megatron.models.policy import Policy
from grpo_megatron.models.precision import fill
from grpo_megatron.models.reward_folder import HEAD, RewardFolder, check_files, exported_config, read_reward_folder
from grpo_megatron.models.scorer import Scorer
from grpo_megatron.models.weights import SafetensorsFolder, bare, bind, bound_rows
from grpo_megatron.parallel.mesh import Mesh
from grpo_megatron.types import Batch, WeightBucket


class SequenceScoringModel(ScoringModel):
    """GPTModel whose last stage returns `Scored` with one score [sequences]: at `Targets.positions`, tokens unused."""

    score: torch.nn.Linear

    def __init__(self, *args: Any, share_embeddings_and_output_weights: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, share_embeddings_and_output_weights=False, **kwargs)
        if self.post_process:
            del self.output_layer

    def _postprocess(self, hidden_states: Tensor, labels: Targets, **unused: Any) -> Any:
        """hidden_states [t (/tp under sequence parallelism), 1, h]."""
        if not self.post_process:
            return hidden_states
        if self.config.sequence_parallel:  # backward: each rank's own part, for every rank has the whole gradient
            hidden_states = tensor_parallel.gather_from_sequence_parallel_region(
                hidden_states, tensor_parallel_output_grad=False
            )
        last = hidden_states.squeeze(1)[labels.positions].float()  # [sequences, h]
        scores = last @ self.score.weight.squeeze(0)
        return Scored(scores, scores.detach())

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: Any = None) -> Any:  # type: ignore[type-arg]
        """Past GPTModel's own, which asks for an output layer."""
        return MegatronModule.sharded_state_dict(self, prefix, sharded_offsets, metadata)


@torch.no_grad()
def load_reward_model(
    folder: RewardFolder, megatron: MegatronConfig, dtype: str, mesh: Mesh, device: Device
) -> torch.nn.Module:
    """This rank's part of the model, with its weights; the head in float32 whatever `dtype` is. Raises WeightsError."""
    arch = folder.arch
    model = build_model(arch, megatron, dtype, device, SequenceScoringModel)
    rows = bound_rows(arch)
    with SafetensorsFolder(folder.path) as files:
        check_files(files, folder)
        for name, (_, parameter) in bind(model, arch).items():
            fill(parameter, rows[name].shard(files.slice, arch, mesh.tp_rank, mesh.tp))
        if mesh.is_last_stage:  # put in here, where nothing rounds it to bfloat16 or takes it for a shard any more
            head = torch.nn.Linear(arch.hidden_size, 1, bias=False, dtype=torch.float32, device=device.torch_device)
            head.weight.copy_(files.slice(HEAD)[:]) if folder.has_head else head.weight.zero_()
            bare(model).score = head
    return model


class SequenceScorer(Scorer):
    """Scores whole sequences under a frozen reward model, the same on every rank of the replica."""

    pad_token_id: int | None

    def packs(self, batch: Batch, micro_batches: list[list[int]], temperature: float | None = None) -> list[Pack]:
        packs = super().packs(batch, micro_batches, temperature)
        return [self._at_the_ends(batch, pack) for pack in packs]

    def _at_the_ends(self, batch: Batch, pack: Pack) -> Pack:
        """The pack, read at the end of each sequence and not before each response token."""
        cuts = pack.packed.cu_seqlens_q.tolist()
        ends = [start + self._last(batch.tokens[row]) for row, start in zip(pack.rows, cuts, strict=False)]
        positions, share, to = torch.tensor(ends, dtype=torch.int64), None, self.device.torch_device
        if self.mesh.cp > 1:
            lengths = [end - start for start, end in itertools.pairwise(cuts)]
            share = own_scores(positions, own_tokens(lengths, self.mesh.cp, self.mesh.cp_rank))
            positions, share = share.positions, replace(share, slots=share.slots.to(to))
        positions = positions.to(to)
        return replace(pack, targets=Targets(positions, positions, temperature=1.0, chunk=self.chunk), share=share)

    def _last(self, tokens: Tensor) -> int:
        """Index of the last token that is not padding; 0 when there is none."""
        if self.pad_token_id is None:
            return len(tokens) - 1
        return int((tokens != self.pad_token_id).nonzero().max().item()) if (tokens != self.pad_token_id).any() else 0

    @torch.no_grad()
    def score(self, batch: Batch) -> Tensor:
        """One score a sequence [B], float32 on the host. Collective over the replica; the batch's own micro-batches."""
        out = torch.zeros(len(batch))

        def consume(current: Pack, scores: Tensor, _: Tensor) -> None:
            if current.rows:
                out[current.rows] = scores.float().cpu()

        micro_batches = [rows for mini in batch.mini_batches for rows in mini]
        if not micro_batches:
            return out
        run(self.model, self.packs(batch, micro_batches), consume, device=self.device, forward_only=True)
        if self.mesh.pp > 1:
            shared = out.to(self.device.torch_device)
            dist.broadcast(shared, self.mesh.stage_rank(self.mesh.pp - 1), group=self.mesh.pp_group)
            out = shared.cpu()
        return out

    def logprobs(self, batch: Batch, temperature: float | None = None) -> Tensor:
        raise NotImplementedError("a reward model has no vocabulary to give probabilities over")


class FrozenRewardModel(SequenceScorer):
    """A reward model that is never updated: no gradients, no optimizer."""

    def __init__(self, config: RewardModelConfig, dtype: str, actor: ActorConfig, mesh: Mesh, device: Device) -> None:
        assert config.path is not None
        folder = read_reward_folder(config.path)
        self.pad_token_id = folder.pad_token_id
        inner = load_reward_model(folder, actor.megatron, dtype, mesh, device).requires_grad_(False)
        super().__init__(inner, actor.megatron, mesh, device, 1.0, actor.logprob_chunk_size)


class RewardModel(Policy, SequenceScorer):
    """A policy with a score for its output: built, updated, saved and loaded (`models.state`) like one.

    Build on every rank at the same point. `actor` gives layout and micro-batch caps.
    """

    def __init__(self, config: RewardModelConfig, dtype: str, actor: ActorConfig, mesh: Mesh, device: Device) -> None:
        assert config.path is not None
        self.folder = read_reward_folder(config.path)
        self.pad_token_id = self.folder.pad_token_id
        own = actor.model_copy(update={"optim": config.optim})
        model = ModelConfig.model_validate({"path": config.path, "dtype": dtype})
        super().__init__(model, own, self.folder.arch, mesh, device)

    def _load(self, model: ModelConfig, mesh: Mesh, device: Device) -> torch.nn.Module:
        return load_reward_model(self.folder, self.actor.megatron, model.dtype, mesh, device)

    def update_pairs(self, batch: Batch, num_pairs: int) -> dict[str, float]:
        """One optimizer step on the batch's one mini-batch. Collective; the same metrics on every rank.

        Rows 2i (chosen) and 2i + 1 (rejected) are neighbours in one micro-batch. `num_pairs`: of all ranks together.
        Skips a step that is not finite on any rank, as `Policy.update` does. Raises TooManySkippedSteps.
        """
        totals = self.backward_pairs(batch, num_pairs)
        norm = self._step()
        dist.all_reduce(totals, group=self.mesh.control)
        loss, correct, margin = (totals / num_pairs).tolist()
        metrics = {"loss": loss, "accuracy": correct, "margin": margin, "grad_norm": norm}
        return {f"reward_model/{name}": value for name, value in metrics.items()}

    def backward_pairs(self, batch: Batch, num_pairs: int) -> Tensor:
        """Gradients into the model's buffers, summed over all ranks. This rank's sums of loss, correct pairs, margins."""
        totals = torch.zeros(3, dtype=torch.float64)

        def consume(current: Pack, scores: Tensor, _: Tensor) -> tuple[Tensor, None]:
            chosen, rejected = scores[0::2], scores[1::2]
            assert [row + 1 for row in current.rows[0::2]] == current.rows[1::2], f"a pair is split: {current.rows}"
            losses = pairwise_loss(chosen, rejected)  # of no rows: nothing, but connected to every parameter
            if self.mesh.is_first_replica_rank:
                margins = (chosen - rejected).detach().double()
                right = (margins > 0).double() + 0.5 * (margins == 0).double()
                totals.add_(torch.stack([losses.detach().double().sum(), right.sum(), margins.sum()]).cpu())
            return losses.sum() / num_pairs, None

        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        (micro_batches,) = batch.mini_batches
        run(self.model, self.packs(batch, micro_batches), consume, device=self.device, forward_only=False)
        return totals

    def hf_weights(self, bucket_megabytes: int = 512) -> Iterator[WeightBucket]:
        """Collective stream of every Hugging Face tensor, whole, on every rank; `score.weight`, in float32, last."""
        yield from super().hf_weights(bucket_megabytes)
        if self.mesh.is_last_stage:
            head: Tensor = bare(self.ddp).get_parameter(HEAD).detach().clone()
        else:
            head = torch.empty(1, self.arch.hidden_size, device=self.device.torch_device)
        if self.mesh.pp > 1:
            dist.broadcast(head, self.mesh.stage_rank(self.mesh.pp - 1), group=self.mesh.pp_group)
        yield [(HEAD, head)]

    def save_hf(self, target: Path, tokenizer_path: Path) -> None:
        """Collective: a `*ForSequenceClassification` folder, which transformers scores alike and `path` can name again."""
        with tempfile.TemporaryDirectory() as config_folder:
            config = exported_config(self.folder.path)
            (Path(config_folder) / "config.json").write_text(json.dumps(config))
            save_hf(self.hf_weights(), Path(config_folder), tokenizer_path, target, self.mesh)
