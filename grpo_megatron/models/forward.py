"""Forward and backward passes of one rank's shard of a model: Megatron's pipeline schedule over packs.

`forward_backward` runs the schedule. `LossPass` makes gradients and metric sums of a mini-batch, from the model's numbers.
`ShardedModel` is what every model has: passes over a batch, and the stream of its weights. `LanguageModel` reads
log-probabilities.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from torch import Tensor

from grpo_megatron.algo.losses import LossInputs, MetricSum
from grpo_megatron.algo.plan import pack_units
from grpo_megatron.config import ActorConfig
from grpo_megatron.data.images import rope_positions
from grpo_megatron.device import Device
from grpo_megatron.exact import rowwise
from grpo_megatron.models.architecture import Architecture
from grpo_megatron.models.build import Targets, build_model
from grpo_megatron.models.layers.modules import Branch, TreeParams
from grpo_megatron.models.layers.precision import token_multiple
from grpo_megatron.models.layers.routes import RouteChoice, replay_routes
from grpo_megatron.models.vision import PLACED
from grpo_megatron.models.weights.hf_folder import load_hf
from grpo_megatron.models.weights.stream import Resharding, hf_weights, stage_owners, unwrapped
from grpo_megatron.parallel.mesh import Mesh
from grpo_megatron.sync.digest import Expected
from grpo_megatron.types import Batch, WeightBucket

# -- Packs: micro-batches of whole sequences as Megatron-Core computes them, with the targets to read ------------------
#
#     plain   p p p a a | p p p b b b | p p p c          tree   p p p a a | b b b | c
#
# Plain: sequences end to end ("thd"), no padding between them. T tokens are rounded up once, at the end of the last sequence.
# Attention is causal, so the padding cannot change a real token.
#
# Tree (`Batch.shares_prompts`): consecutive rows with equal prompts share one copy of it. The first response continues the
# prompt. Every other one is a branch: its positions start after the prompt, and its tokens attend to the prompt's keys and to
# their own. A hidden state depends on the tokens before it alone, so log-probabilities and gradients are those of the plain
# pack, up to the order of sums. The prompt's last hidden state predicts the first token of every response, so its gradient is a
# sum over them. Tokens: P + sum(R) instead of sum(P + R).


@dataclass(frozen=True)
class TargetShare:
    """The n of a pack's N targets that one rank computes.

    `target_indices` [n]: which of the N. `state_indices` [n]: which of the rank's own T / cp hidden states predict them.
    """

    target_indices: Tensor
    state_indices: Tensor
    num_targets: int  # N


@dataclass(frozen=True)
class Pack:
    """One micro-batch on the device. `rows` are rows of the Batch; `lengths` are their response lengths."""

    rows: list[int]
    lengths: list[int]
    tokens: Tensor  # [1, T / cp]
    position_ids: Tensor  # [1, T / cp]; [3, 1, T] for a model that reads images
    packed: PackedSeqParams  # `routes`: see layers/routes.py; `images`: their places (vision.py)
    targets: Targets
    share: TargetShare | None = None  # context parallelism: the part of the targets that this rank computes


def trees_of(batch: Batch, rows: list[int]) -> list[list[int]]:
    """`rows` cut into runs of rows that share their prompt; without `shares_prompts` each row is one."""
    trees: list[list[int]] = []
    for row in rows:
        if batch.shares_prompts and trees and _has_prompt_of(batch, trees[-1][0], row):
            trees[-1].append(row)
        else:
            trees.append([row])
    return trees


def _has_prompt_of(batch: Batch, row: int, other: int) -> bool:
    """Whether two rows have one prompt: the same tokens, and the same images in the same places."""
    first, second = (batch.tokens[r][: batch.prompt_lengths[r]] for r in (row, other))
    return torch.equal(first, second) and (not batch.images or batch.images[row] == batch.images[other])


def packed_lengths(batch: Batch, rows: list[int]) -> list[int]:
    """Returns the tokens that each of `rows` has in their pack."""
    starts = {tree[0] for tree in trees_of(batch, rows)}
    return [len(batch.tokens[row]) - (0 if row in starts else batch.prompt_lengths[row]) for row in rows]


def pack(
    batch: Batch,
    rows: list[int],
    *,
    multiple: int,
    temperature: float,
    chunk: int,
    device: Device,
    cp: int = 1,
    cp_rank: int = 0,
    has_images: bool = False,
) -> Pack:
    """Put sequences `rows` of `batch` end to end and take rank `cp_rank`'s part. No rows: padding without targets.

    `has_images`: of a model that reads images. Every token then has three positions, in rows without images equal ones.

    `multiple` is `precision.token_multiple`, a multiple of 2 cp if cp > 1. A pack of trees is not cut: cp is 1.
    """
    is_tree, size, to = batch.shares_prompts and bool(rows), 0, device.torch_device
    tokens, positions, states, targets = [], [], [torch.empty(0, dtype=torch.int64)], []
    branches: list[Branch] = []
    routes: list[Tensor] = []
    angles: list[Tensor] = []  # three rows of positions
    placed: PLACED = []
    for tree in trees_of(batch, rows):
        prompt, prefix = batch.prompt_lengths[tree[0]], size
        for i, row in enumerate(tree):
            shared = prompt if i else 0  # tokens of the prompt that the tree has already
            part, end = batch.tokens[row][shared:], size + len(batch.tokens[row]) - shared
            # The prompt's last token predicts the first token of the response, and each token the next one.
            if shared:
                states.append(torch.tensor([prefix + prompt - 1]))
            states.append(torch.arange(size + prompt - shared - (not shared), end - 1))
            targets.append(batch.tokens[row][prompt:])
            if cp > 1:
                part = torch.nn.functional.pad(part, (0, -len(part) % (2 * cp)))
            if batch.routes:
                routes.append(_with_unknown(batch.routes[row][shared:], len(part)))
            tokens.append(part)
            positions.append(torch.arange(len(part)) + shared)
            if has_images:
                images = batch.images[row] if batch.images else ()
                angles.append(torch.from_numpy(rope_positions(len(batch.tokens[row]), images))[:, shared:])
                placed += [(size + image.first, image) for image in images if not shared]
            branches.append(Branch(size, size + len(part), prefix, prefix + shared))
            size += len(part)
    padding = -size % multiple if rows else multiple
    if padding:
        tokens.append(torch.zeros(padding, dtype=torch.int64))
        # The padding is a branch of its own, or the end of the last sequence: kernels are fastest without gaps; some allow none.
        first = len(positions[-1]) if positions and not is_tree else 0
        positions.append(torch.arange(first, first + padding))
        angles.append(positions[-1].expand(3, -1))
        branches.append(Branch(size, size + padding, size, size))
    starts = [0] if is_tree else [branch.start for branch in branches[: len(rows) or 1]]
    cuts = torch.tensor([*starts, size + padding], dtype=torch.int32)
    whole, position_ids, state_indices = torch.cat(tokens), torch.cat(positions), torch.cat(states)
    whole_routes = _with_unknown(torch.cat(routes), len(whole)) if routes else None
    target_tokens = torch.cat([torch.empty(0, dtype=torch.int64), *targets])
    longest, share = int(position_ids.max()) + 1, None
    if cp > 1:
        assert not is_tree, "checks refuse it"
        local = local_tokens(cuts.diff().tolist(), cp, cp_rank)
        share = target_share(state_indices, local)
        whole, position_ids = whole[local], position_ids[local]
        whole_routes = None if whole_routes is None else whole_routes[local]
        target_tokens, state_indices = target_tokens[share.target_indices], share.state_indices
        share = replace(share, target_indices=share.target_indices.to(to))
    cuts = cuts.to(to)
    fields: dict[str, Any] = {"max_seqlen_q": longest, "max_seqlen_kv": longest}
    fields |= {"qkv_format": "thd", "cu_seqlens_q": cuts, "cu_seqlens_kv": cuts}
    if cp > 1:  # the padding of a sequence counts as part of it
        fields |= {"cu_seqlens_q_padded": cuts, "cu_seqlens_kv_padded": cuts}
    packed = TreeParams(**fields, branches=branches) if is_tree else PackedSeqParams(**fields)
    packed.routes, packed.images = whole_routes, placed  # type: ignore[union-attr]
    position_ids = torch.cat(angles, dim=1) if has_images else position_ids
    return Pack(
        rows=rows,
        lengths=[len(batch.tokens[row]) - batch.prompt_lengths[row] for row in rows],
        tokens=whole.unsqueeze(0).to(to),
        position_ids=position_ids.unsqueeze(-2).to(to),
        packed=packed,
        targets=Targets(state_indices.to(to), target_tokens.to(to), temperature, chunk),
        share=share,
    )


def _with_unknown(routes: Tensor, size: int) -> Tensor:
    """[T, layers x k] -> [size, layers x k]: the routes of padding are unknown."""
    return torch.nn.functional.pad(routes, (0, 0, 0, size - len(routes)), value=-1)


def unpack(flat: Tensor, lengths: list[int], width: int) -> Tensor:
    """[N] in pack order -> [len(lengths), width], zeros after each row's end. Differentiable."""
    columns = torch.arange(width, device=flat.device)
    mask = columns < torch.tensor(lengths, device=flat.device).unsqueeze(1)
    return flat.new_zeros(len(lengths), width).masked_scatter(mask, flat)


def num_padding_tokens(lengths: list[int], multiple: int, cp: int = 1) -> int:
    """Returns the number of tokens that `pack` adds to sequences of these lengths. Without sequences it is a whole pack."""
    aligned = sum(n + (-n % (2 * cp) if cp > 1 else 0) for n in lengths)
    return max(aligned + (-aligned % multiple), multiple) - sum(lengths)


# -- context parallelism: which tokens of a pack each of the cp ranks computes -------------------------------------------
#
# A causal token attends to all tokens before it, so the end of a sequence costs more than its beginning. Each sequence is
# therefore rounded up to a multiple of 2 cp and cut into 2 cp chunks, and rank r takes chunk r from the front and chunk r
# from the back. (Ring Attention with balanced load, arXiv:2310.01889; Transformer Engine's attention over packed sequences
# expects this cut.)
#
#     cp 2, a sequence of 8:   rank 0: 0 1 . . . . 6 7    rank 1: . . 2 3 4 5 . .
#
# The index arithmetic is plain torch and tested. The attention itself was not run on a GPU yet.


def local_tokens(lengths: Sequence[int], cp: int, cp_rank: int) -> Tensor:
    """Indices into the whole pack, int64 [T / cp]: the tokens of rank `cp_rank`, in the order in which it computes them.

    The pack is sequences of `lengths`, end to end. Each length is a multiple of 2 cp.
    """
    parts, start = [], 0
    for length in lengths:
        chunk, rest = divmod(length, 2 * cp)
        assert rest == 0, f"a sequence of {length} cannot be cut in 2 x cp {cp} chunks"
        firsts = [start + index * chunk for index in (cp_rank, 2 * cp - 1 - cp_rank)]
        parts += [torch.arange(first, first + chunk) for first in firsts]
        start += length
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)


def target_share(state_indices: Tensor, tokens: Tensor) -> TargetShare:
    """Returns the targets whose hidden states, `state_indices` [N] in the whole pack, are among a rank's `tokens` [T / cp]."""
    sizes = [int(indices.max()) + 1 for indices in (state_indices, tokens) if len(indices)]
    local_index = torch.full((max(sizes, default=0),), -1, dtype=torch.int64)  # index in the pack -> among `tokens`
    local_index[tokens] = torch.arange(len(tokens))
    target_indices = (local_index[state_indices] >= 0).nonzero().squeeze(1)
    return TargetShare(target_indices, local_index[state_indices[target_indices]], len(state_indices))


class _GatherTargets(torch.autograd.Function):
    """Forward: every rank gets all N values. Backward: each rank keeps the gradients of its own values.

    All ranks compute the same loss from the same N values. The gradient on one rank is then that of its own tokens' part of
    the loss. DDP sums over ranks, and the sum is the gradient of the loss, counted once.
    """

    @staticmethod
    def forward(ctx: Any, values: Tensor, target_indices: Tensor, num_targets: int, group: Any) -> Tensor:
        ctx.save_for_backward(target_indices)
        whole = values.new_zeros(num_targets)
        whole[target_indices] = values
        dist.all_reduce(whole, group=group)  # one rank's value plus zeros: the same bits on every rank
        return whole

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        (target_indices,) = ctx.saved_tensors
        return grads[0][target_indices], None, None, None


def gather_targets(values: Tensor, share: TargetShare, group: Any) -> Tensor:
    """Returns this rank's values [n] -> all ranks' [N], the same on each. Collective over the context-parallel `group`."""
    return _GatherTargets.apply(values, share.target_indices, share.num_targets, group)  # type: ignore[no-any-return]


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
    _free_fp8_copies(model)
    return list(results)


def _free_fp8_copies(model: torch.nn.Module) -> None:
    """Transformer Engine keeps the FP8 copies of its weights until the next pass, which makes them anew. The engine, and the
    other models, need their memory: a byte for each weight of a linear layer, or two after a backward pass."""
    for module in model.modules():
        copies = getattr(module, "_fp8_workspaces", None)
        if copies:
            copies.clear()


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
        """Returns log-probability of every response token [B, R], float32 on the host; 0 in rows that were not in a pack."""
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
        self.is_exact = bool(getattr(unwrapped(model), "is_exact", False))
        self.routers: list[RouteChoice] = []  # those that replay
        # Packs are padded to a multiple of this many tokens, in all layouts to the same where sums over tokens must be equal.
        self.multiple = rowwise.NUM_BLOCKS if self.is_exact else token_multiple(actor.megatron)
        self.stage_of = stage_owners(model, arch, mesh)

    def packs(self, batch: Batch, micro_batches: list[list[int]], temperature: float | None = None) -> list[Pack]:
        """Returns the micro-batches on the device, at `temperature` (None: the model's own)."""
        temperature = self.temperature if temperature is None else temperature
        options: dict[str, Any] = {"multiple": self.multiple, "chunk": self.chunk, "device": self.device}
        options |= {"temperature": temperature, "cp": self.mesh.cp, "cp_rank": self.mesh.cp_rank}
        options |= {"has_images": self.arch.vision is not None}
        batch = batch if self.routers else replace(batch, routes=None)
        return [pack(batch, rows, **options) for rows in micro_batches]

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
        if self.is_exact:  # they have one row each, for the gradients; several have the same bits
            batch, micro_batches = self._packed(batch, [row for rows in micro_batches for row in rows])
        packs = self.packs(batch, micro_batches, temperature)
        forward_backward(self.model, packs, consume, device=self.device, forward_only=True)
        return self.from_last_stage(out)

    def _packed(self, batch: Batch, rows: list[int]) -> tuple[Batch, list[list[int]]]:
        """`rows` in full micro-batches, in which they share prompts if the config allows it."""
        batch = replace(batch, shares_prompts=self.actor.share_prompts)
        lengths, units = [len(tokens) for tokens in batch.tokens], []
        for tree in trees_of(batch, rows):
            room = self.actor.ppo_max_token_len_per_gpu // max(lengths[row] for row in tree)
            count = max(1, min(room, self.actor.ppo_micro_batch_size_per_gpu or room))
            units += [tree[first : first + count] for first in range(0, len(tree), count)]
        [micro_batches] = pack_units([units], lengths, self.actor)
        return batch, micro_batches

    def from_last_stage(self, out: Tensor) -> Tensor:
        """Returns the host tensor `out` of the last pipeline stage, on the ranks of all stages. Collective over the replica."""
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
            yield from hf_weights(self.model, self.arch, self.mesh, bucket_megabytes, self.stage_of)

    def engine_weights(self, resharding: Resharding, version: int) -> Iterator[WeightBucket]:
        """Collective stream of the weights for an engine: only the parts that it reads (see `Resharding.stream`)."""
        with self.readable_weights():
            yield from resharding.stream(self.model, version)

    def expected_digests(self, resharding: Resharding) -> Expected:
        """Returns the digests of the current weights, for each rank of the engine. Collective (see `Resharding`)."""
        with self.readable_weights():
            return resharding.expected_digests(self.model)


class LanguageModel(ShardedModel):
    """A sharded model that computes log-probabilities of a batch: the policy or the reference."""

    is_frozen: ClassVar[bool] = False

    def __init__(self, model: torch.nn.Module, arch: Architecture, actor: ActorConfig, *parts: Any) -> None:
        super().__init__(model, arch, actor, *parts)
        if actor.moe.route_replay != "none":
            self.routers = replay_routes(model, arch.num_dense_layers)

    def packs(self, batch: Batch, micro_batches: list[list[int]], temperature: float | None = None) -> list[Pack]:
        """See ShardedModel. With the routes that the first pass over them has recorded, where that pass decides."""
        packs = super().packs(batch, micro_batches, temperature)
        recorded = batch.recorded_routes
        if self.actor.moe.route_replay == "old" and not self.is_frozen and recorded is not None:
            for current in packs:
                current.packed.routes = recorded.setdefault(tuple(current.rows), {})  # type: ignore[attr-defined]
        return packs

    @classmethod
    def load(
        cls,
        folder: Path,
        dtype: str,
        arch: Architecture,
        actor: ActorConfig,
        mesh: Mesh,
        device: Device,
        *,
        temperature: float = 1.0,
        exact: bool = False,
    ) -> Self:
        """Returns the model with the weights of a Hugging Face folder. Collective. Raises WeightsError."""
        megatron = actor.megatron if cls.is_frozen else actor.layers
        model = build_model(arch, megatron, dtype, device, has_gradients=not cls.is_frozen, is_exact=exact)
        load_hf(model, folder, arch, mesh)
        return cls(model, arch, actor, mesh, device, temperature)

    def logprobs(self, batch: Batch, temperature: float | None = None) -> Tensor:
        """Returns log-probability of every response token [B, R], float32 on the host, 0 after the end. Collective."""
        width = batch.response_mask.shape[1]

        def read(current: Pack, values: Tensor) -> Tensor:
            return unpack(values, current.lengths, width)

        return self.forward_batch(batch, torch.zeros(len(batch), width), read, temperature)
