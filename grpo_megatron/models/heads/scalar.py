"""Models that score: a decoder with a scalar head. At token t it computes w . h_t (+ b) in float32, h_t the final hidden state.

model                       its head is read at                        class
critic (value)              the state before each response token       ScalarPolicy, places=None
reward model (outcome)      the last token that is not padding         FrozenScalar, or ScalarPolicy if it learns
process reward model        the last token of each step                FrozenScalar, with places in each call
trained from labelled rows  every response token, at that token        ScalarPolicy, places=response_tokens
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from grpo_megatron.algo.ppo import ValueInputs, value_loss
from grpo_megatron.config import ActorConfig, LoraConfig, MegatronConfig, MoeConfig, OptimConfig
from grpo_megatron.device import Device
from grpo_megatron.models.build import HeadOutput, LogprobModel, Targets, build_model
from grpo_megatron.models.forward import MetricSums, Pack, ShardedModel, like_rows, local_tokens, target_share, unpack
from grpo_megatron.models.heads.reward_folder import (
    HEAD,
    HEAD_BIAS,
    RewardFolder,
    check_files,
    exported_config,
    exported_head,
    read_head,
)
from grpo_megatron.models.optimizer import OffloadedTensors
from grpo_megatron.models.policy import FrozenModel, Policy
from grpo_megatron.models.weights.hf_folder import SafetensorsFolder, save_hf
from grpo_megatron.models.weights.stream import global_parameters, model_rows, set_parameter, unwrapped
from grpo_megatron.parallel.mesh import Mesh
from grpo_megatron.storage.files import private_folder
from grpo_megatron.types import Batch, WeightBucket

# Batch, row -> the tokens (indices into prompt + response) at which the head is read.
Places = Callable[[Batch, int], Sequence[int]]


class ScalarModel(LogprobModel):
    """GPTModel whose last stage returns one number per target, at `Targets.state_indices`. Target tokens are not used.

    Under tensor parallelism the head is replicated: every rank computes the same numbers from the same full hidden states. The
    head's gradient is complete on each rank. It must not be summed over these ranks, nor the head be marked as a shard.
    """

    score: torch.nn.Linear

    def __init__(self, *args: Any, share_embeddings_and_output_weights: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, share_embeddings_and_output_weights=False, **kwargs)
        if self.post_process:
            del self.output_layer

    def _postprocess(self, hidden_states: Tensor, labels: Targets, **unused: Any) -> Any:
        """Computes the numbers from hidden_states [t (/tp under sequence parallelism), 1, h]."""
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
    """Returns this rank's part of the model, with its weights. The head is float32 at any `dtype`. Raises WeightsError."""
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


# -- the places at which the head is read ------------------------------------------------------------------------------


def last_token(folder: RewardFolder) -> Places:
    """Reads the head at the last token that is not the folder's padding; at the first one if there is none.

    `*ForSequenceClassification` reads a score there: if a response ends in pad_token_id, at the token before it.
    """

    def places(batch: Batch, row: int) -> Sequence[int]:
        tokens = batch.tokens[row]
        if folder.pad_token_id is None:
            return [len(tokens) - 1]
        is_token = tokens != folder.pad_token_id
        return [int(is_token.nonzero().max()) if is_token.any() else 0]

    return places


def response_tokens(batch: Batch, row: int) -> Sequence[int]:
    """Reads the head at every response token. The loss mask says which numbers are in the loss (data/responses.py)."""
    return range(batch.prompt_lengths[row], len(batch.tokens[row]))


class ScalarReader(ShardedModel):
    """A sharded model whose head is read at `places`; None: before each response token, as log-probabilities are."""

    folder: RewardFolder
    places: Places | None = None

    def packs(self, batch: Batch, micro_batches: list[list[int]], temperature: float | None = None) -> list[Pack]:
        """Returns the micro-batches on the device, with the places of this model as targets."""
        packs = super().packs(batch, micro_batches, temperature)
        return packs if self.places is None else [self._read_at_places(batch, pack) for pack in packs]

    def numbers(self, batch: Batch, places: Sequence[Sequence[int]] | None = None) -> Tensor:
        """Returns the number at each place: [B, places of a row], float32 on the host, 0 behind a row's last. Collective.

        `places[row]` replaces the model's own. Numbers of response tokens are as wide as the response mask.
        """
        if places is not None:
            self.places = lambda batch, row: places[row]
        width = batch.response_mask.shape[1]
        if self.places not in (None, response_tokens):
            width = max((len(self.places(batch, row)) for row in range(len(batch))), default=1)  # type: ignore[misc]
        out = torch.zeros(len(batch), width)
        return self.forward_batch(batch, out, lambda pack, numbers: unpack(numbers, pack.lengths, width))

    def _read_at_places(self, batch: Batch, pack: Pack) -> Pack:
        """Returns the pack with other targets. The numbers come back in the order of the places, row by row."""
        assert self.places is not None
        places = [self.places(batch, row) for row in pack.rows]
        cuts, mesh, to = pack.packed.cu_seqlens_q.tolist(), self.mesh, self.device.torch_device
        indices = [start + place for row_places, start in zip(places, cuts, strict=False) for place in row_places]
        state_indices, share = torch.tensor(indices, dtype=torch.int64), None
        if mesh.cp > 1:
            lengths = [end - start for start, end in itertools.pairwise(cuts)]
            share = target_share(state_indices, local_tokens(lengths, mesh.cp, mesh.cp_rank))
            state_indices = share.state_indices
            share = replace(share, target_indices=share.target_indices.to(to))
        state_indices = state_indices.to(to)
        targets = Targets(state_indices, tokens=state_indices, temperature=1.0, chunk=self.chunk)
        return replace(pack, lengths=[len(row_places) for row_places in places], targets=targets, share=share)


# -- frozen and trained ------------------------------------------------------------------------------------------------


class FrozenScalar(ScalarReader, FrozenModel):
    """A model that is not trained: a reward model, by response or by step. It may be offloaded as the reference is."""

    def __init__(self, folder: RewardFolder, dtype: str, actor: ActorConfig, mesh: Mesh, device: Device) -> None:
        self.folder = folder
        self.places = last_token(folder) if folder.kind == "outcome" else None
        inner = load_scalar_model(folder, actor.megatron, dtype, mesh, device, has_gradients=False)
        super().__init__(inner, folder.arch, actor, mesh, device)


class ScalarPolicy(ScalarReader, Policy):
    """A policy whose output is one number per place. It is updated, saved and loaded like a policy.

    Built on every rank at the same point. `actor` gives the layout and the limits of a micro-batch, `optim` the optimizer if
    it is not the policy's, `lora` the adapters of the base, if it has any (the head is trained whole). With `offload` its
    weights and its optimizer are on the device only inside `in_use`, and its weights inside `numbers`. Call `set_optimizer`
    before the first update.
    """

    def __init__(
        self,
        folder: RewardFolder,
        dtype: str,
        actor: ActorConfig,
        mesh: Mesh,
        device: Device,
        *,
        places: Places | None = None,
        optim: OptimConfig | None = None,
        lora: LoraConfig | None = None,
        offload: bool = False,
    ) -> None:
        self.folder, self.places, self._offloads_weights = folder, places, offload
        self._weights = OffloadedTensors(device)
        self.on_use: Callable[[], None] | None = None  # called at the end of `in_use`
        megatron = actor.megatron
        megatron = megatron.model_copy(update={"offload_optimizer": offload or megatron.offload_optimizer})
        changes = {"optim": optim or actor.optim, "lora": lora or LoraConfig(), "megatron": megatron}
        actor = actor.model_copy(update={**changes, "moe": MoeConfig()})  # only the policy replays routes
        inner = load_scalar_model(folder, actor.layers, dtype, mesh, device)
        super().__init__(inner, folder.arch, actor, mesh, device)

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Keeps everything on the device inside the block. Then offloads what `offload` or `offload_optimizer` names."""
        self._weights.onload()
        self.onload()
        yield
        if self.on_use is not None:
            self.on_use()
        self.offload()
        self._offload_weights()

    def _offload_weights(self, *, unchanged: bool = False) -> None:
        if self._offloads_weights:
            with self.readable_weights():
                self._weights.offload(self._weight_tensors(), unchanged=unchanged)

    def _weight_tensors(self) -> Iterator[Tensor]:
        """Yields the distributed optimizer's buffers, of which the parameters are views, or else the parameters."""
        for buffer in (*self.ddp.buffers, *self.ddp.expert_parallel_buffers):
            if buffer.param_data is not None:
                yield buffer.param_data
        yield from self.ddp.parameters()

    def numbers(self, batch: Batch, places: Sequence[Sequence[int]] | None = None) -> Tensor:
        """See ScalarReader."""
        self._weights.onload()
        numbers = super().numbers(batch, places)
        self._offload_weights(unchanged=True)
        return numbers

    def logprobs(self, batch: Batch, *unused: Any, **also_unused: Any) -> Tensor:
        """Returns the numbers, where a loss reads log-probabilities (algo/reward_models.py)."""
        return self.numbers(batch)

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
        """Write a `*ForSequenceClassification` or `*ForTokenClassification` folder, by the kind. Collective.

        transformers, `reward_model.path` and `critic.path` can read it.
        """
        with private_folder() as config_folder:
            config = exported_config(self.folder)
            (config_folder / "config.json").write_text(json.dumps(config))
            save_hf(self.hf_weights(), config_folder, tokenizer_path, target, self.mesh, arch=self.arch)


class ValueModel(ScalarPolicy):
    """The critic of PPO: the number before each response token is its value, and the loss is that of values."""

    section = "critic"

    def update_values(
        self, batch: Batch, cliprange: float | None, *, epochs: int
    ) -> tuple[list[MetricSums], dict[str, float]]:
        """Does `Policy.update` on a batch with `values` and `returns`. `cliprange`: see `value_loss` in algo/ppo.py."""
        return self.update(batch, functools.partial(value_loss, cliprange=cliprange), epochs=epochs)

    def loss_inputs(
        self, batch: Batch, rows: list[int], values: Tensor, entropy: Tensor, *teacher: Tensor
    ) -> ValueInputs:
        """Returns the inputs of the value loss on `rows`. `values` [len(rows), R] are the model's."""
        assert batch.values is not None and batch.returns is not None
        select = functools.partial(like_rows, rows, values)
        return ValueInputs(
            values=values,
            old_values=select(batch.values),
            returns=select(batch.returns),
            mask=select(batch.loss_mask),
            token_weights=select(batch.token_weights),
        )
