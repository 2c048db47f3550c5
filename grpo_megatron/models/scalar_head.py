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

import itertools
import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from grpo_megatron.config import ActorConfig, MegatronConfig, ModelConfig
from grpo_megatron.device import Device
from grpo_megatron.models.architecture import Architecture
from grpo_megatron.models.build import HeadOutput, LogprobModel, Targets, build_model
from grpo_megatron.models.context import local_tokens, target_share
from grpo_megatron.models.export import save_hf
from grpo_megatron.models.forward import Pack
from grpo_megatron.models.policy import Policy
from grpo_megatron.models.precision import set_parameter
from grpo_megatron.models.reward_folder import (
    HEAD,
    HEAD_BIAS,
    RewardFolder,
    check_files,
    exported_config,
    exported_head,
    read_head,
)
from grpo_megatron.models.sharded import ShardedModel
from grpo_megatron.models.weights import SafetensorsFolder, global_parameters, model_rows, unwrapped
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
