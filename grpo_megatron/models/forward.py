"""Forward and backward passes of one rank's shard of a model: Megatron's pipeline schedule over packs.

`forward_backward` runs the schedule. `LossPass` makes gradients and metric sums of a mini-batch, from the model's numbers.
`ShardedModel` is the base of every model: passes over a batch, and the stream of its weights. `LanguageModel` reads
log-probabilities.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from torch import Tensor

from grpo_megatron.algo.distillation import LEAST_LOGPROB, Divergence
from grpo_megatron.algo.losses import LossInputs, MetricSum
from grpo_megatron.algo.plan import pack_units
from grpo_megatron.config import ActorConfig
from grpo_megatron.data.images import rope_positions
from grpo_megatron.device import Device
from grpo_megatron.exact import rowwise
from grpo_megatron.models.architecture import Architecture
from grpo_megatron.models.build import Targets, build_model
from grpo_megatron.models.layers.divergence import SoftTargets, TeacherStates
from grpo_megatron.models.layers.head import KeptTargets
from grpo_megatron.models.layers.modules import Branch, TreeParams
from grpo_megatron.models.layers.precision import token_multiple
from grpo_megatron.models.layers.routes import RouteChoice, replay_routes
from grpo_megatron.models.vision import PLACED
from grpo_megatron.models.weights.hf_folder import SafetensorsFolder, WeightReader, load_hf, read_head_rows
from grpo_megatron.models.weights.stream import hf_weights, sent_parameters, stage_owners, unwrapped
from grpo_megatron.parallel.mesh import Mesh
from grpo_megatron.shapes import Float, Int
from grpo_megatron.sync.digest import Expected
from grpo_megatron.sync.weight_sync import WeightSync
from grpo_megatron.types import Batch, WeightBucket, is_shared

# -- packs: micro-batches as Megatron-Core computes them ---------------------------------------------------------------
#
#     plain   p p p a a | p p p b b b | p p p c          tree   p p p a a | b b b | c
#
# Plain: sequences end to end ("thd"), no padding between them. T tokens are rounded up once, at the end of the last sequence.
# Attention is causal, so the padding cannot change a real token.
#
# Tree (`Batch.shares_prompts`): a row is whole, and each row after it whose prompt begins as it does is a branch of it, with
# its other tokens only: its positions start after what is shared, and its tokens attend to the shared keys and to their own.
# A hidden state depends only on the tokens before it, so log-probabilities and gradients are those of the plain pack, up to the
# order of sums. A prompt's last hidden state predicts the first token of every response, so its gradient is a sum over them.
# Tokens: P + sum(R) instead of sum(P + R). A trajectory's earlier rows are branches of its last one, whose prompt is the longest.


@dataclass(frozen=True)
class TargetShare:
    """The n of a pack's N targets that one rank computes."""

    target_indices: Tensor  # [n], among the N
    state_indices: Tensor  # [n], among the rank's T / cp hidden states: those that predict the targets
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


class _Sequence(NamedTuple):
    """The tokens that one row adds to a pack: a full sequence, or a response that follows a shared prompt."""

    branch: Branch
    tokens: Tensor  # [t]
    position_ids: Tensor  # [t]
    angles: Tensor  # [3, t]: the positions of a model that reads images
    states: Tensor  # [R]: the tokens of the pack whose hidden states predict the targets
    targets: Tensor  # [R]
    routes: Tensor | None
    images: PLACED


class Share(NamedTuple):
    """A row's first `size` tokens, which it shares with the whole row before it in a pack. 0: it is whole itself."""

    size: int
    routes: Tensor | None  # of the tokens that it adds; those of shared tokens are known if any row's are


def shares_of(batch: Batch, rows: list[int]) -> list[Share]:
    """Counts the tokens that each of `rows` shares; 0 for all without `shares_prompts`.

    A row is whole where less than half of its prompt would be shared (`types.is_shared`), and where its known routes of the
    shared tokens are others than theirs: one copy has one choice of experts.
    """
    routes = [batch.routes[row] for row in rows] if batch.routes is not None else None
    if not batch.shares_prompts:
        return [Share(0, None if routes is None else routes[place]) for place in range(len(rows))]
    sizes: list[int] = []
    whole = 0  # the place of the last whole row
    for place, row in enumerate(rows):
        size = _num_common(batch, rows[whole], row) if place else 0
        if size and routes is not None:
            known, own = routes[whole][:size], routes[place][:size]
            if bool(((own == known) | (own < 0) | (known < 0)).all()):
                routes[whole] = torch.cat([torch.maximum(known, own), routes[whole][size:]])  # -1: unknown
            else:
                size = 0
        whole = whole if size else place
        sizes.append(size)
    return [Share(size, routes[place][size:] if routes is not None else None) for place, size in enumerate(sizes)]


def _num_common(batch: Batch, whole: int, row: int) -> int:
    """The first tokens of a row's prompt that another row has, too: up to the first image that differs, or is not whole."""
    prompt = batch.tokens[row][: batch.prompt_lengths[row]]
    other = batch.tokens[whole][: len(prompt)]
    differs = (prompt[: len(other)] != other).nonzero()
    size = int(differs[0]) if len(differs) else len(other)
    pairs = itertools.zip_longest(batch.images[whole], batch.images[row]) if batch.images else ()
    for image, own in pairs:
        first = min(one.first for one in (image, own) if one is not None)
        if first < size and (image != own or first + image.num_tokens > size):
            size = first
    return size if is_shared(size, len(prompt)) else 0


def trees_of(batch: Batch, rows: list[int]) -> list[list[int]]:
    """Cuts `rows` into runs of a whole row and those that share its tokens."""
    trees: list[list[int]] = []
    for row, share in zip(rows, shares_of(batch, rows), strict=True):
        if share.size:
            trees[-1].append(row)
        else:
            trees.append([row])
    return trees


def packed_lengths(batch: Batch, rows: list[int]) -> list[int]:
    """Returns the number of tokens that each of `rows` has in their pack."""
    return [len(batch.tokens[row]) - share.size for row, share in zip(rows, shares_of(batch, rows), strict=True)]


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

    `multiple` is `precision.token_multiple`, a multiple of 2 cp if cp > 1. A pack of trees is not cut: cp is 1.
    `has_images`: the model reads images. Every token then has three positions, equal ones in rows without images.
    """
    is_tree, to = batch.shares_prompts and bool(rows), device.torch_device
    sequences = list(_sequences(batch, rows, cp, has_images))
    size = sum(len(sequence.tokens) for sequence in sequences)
    padding = -size % multiple if rows else multiple
    none = torch.empty(0, dtype=torch.int64)
    if padding:
        # The padding is a branch of its own, or the end of the last sequence: kernels are fastest without gaps; some allow none.
        first = len(sequences[-1].tokens) if sequences and not is_tree else 0
        branch, positions = Branch(size, size + padding, size, size), torch.arange(first, first + padding)
        zeros, angles = torch.zeros(padding, dtype=torch.int64), positions.expand(3, -1)
        sequences.append(_Sequence(branch, zeros, positions, angles, none, none, None, []))
    branches = [sequence.branch for sequence in sequences]
    starts = [0] if is_tree else [branch.start for branch in branches[: len(rows) or 1]]
    cuts = torch.tensor([*starts, size + padding], dtype=torch.int32)
    tokens, position_ids, state_indices, targets = (
        torch.cat([none, *(getattr(sequence, name) for sequence in sequences)])
        for name in ("tokens", "position_ids", "states", "targets")
    )
    routes = [sequence.routes for sequence in sequences if sequence.routes is not None]
    all_routes = _with_unknown(torch.cat(routes), len(tokens)) if routes else None
    longest, share = int(position_ids.max()) + 1, None
    if cp > 1:
        assert not is_tree, "checks refuse it"
        local = local_tokens(cuts.diff().tolist(), cp, cp_rank)
        share = target_share(state_indices, local)
        tokens, position_ids = tokens[local], position_ids[local]
        all_routes = None if all_routes is None else all_routes[local]
        targets, state_indices = targets[share.target_indices], share.state_indices
    soft, kept = soft_targets(batch, rows, share, device), kept_targets(batch, rows, share, device)
    if share is not None:
        share = replace(share, target_indices=share.target_indices.to(to))
    cuts = cuts.to(to)
    fields: dict[str, Any] = {"max_seqlen_q": longest, "max_seqlen_kv": longest}
    fields |= {"qkv_format": "thd", "cu_seqlens_q": cuts, "cu_seqlens_kv": cuts}
    if cp > 1:  # the padding of a sequence counts as part of it
        fields |= {"cu_seqlens_q_padded": cuts, "cu_seqlens_kv_padded": cuts}
    packed = TreeParams(**fields, branches=branches) if is_tree else PackedSeqParams(**fields)
    packed.routes = all_routes  # type: ignore[union-attr]
    packed.images = [placed for sequence in sequences for placed in sequence.images]  # type: ignore[union-attr]
    if has_images:
        position_ids = torch.cat([sequence.angles for sequence in sequences], dim=1)
    return Pack(
        rows=rows,
        lengths=[len(batch.tokens[row]) - batch.prompt_lengths[row] for row in rows],
        tokens=tokens.unsqueeze(0).to(to),
        position_ids=position_ids.unsqueeze(-2).to(to),
        packed=packed,
        targets=Targets(state_indices.to(to), targets.to(to), temperature, chunk, soft, kept=kept),
        share=share,
    )


def _sequences(batch: Batch, rows: list[int], cp: int, has_images: bool) -> Iterator[_Sequence]:
    """Yields the sequences of a pack in their order. Under context parallelism each is rounded up to 2 cp tokens."""
    size = prefix = 0
    for row, (shared, routes) in zip(rows, shares_of(batch, rows), strict=True):
        prefix = prefix if shared else size
        prompt, tokens = batch.prompt_lengths[row], batch.tokens[row][shared:]
        # The prompt's last token predicts the first token of the response, and each token the next one.
        states = torch.arange(size + prompt - shared - 1, size + len(tokens) - 1)
        if shared == prompt:
            states[0] = prefix + prompt - 1
        if cp > 1:
            tokens = torch.nn.functional.pad(tokens, (0, -len(tokens) % (2 * cp)))
        images, positions = batch.images[row] if has_images and batch.images else (), torch.arange(len(tokens)) + shared
        angles = positions.expand(3, -1)
        if has_images:
            angles = torch.from_numpy(rope_positions(len(batch.tokens[row]), images))[:, shared:]
        yield _Sequence(
            branch=Branch(size, size + len(tokens), prefix, prefix + shared),
            tokens=tokens,
            position_ids=positions,
            angles=angles,
            states=states,
            targets=batch.tokens[row][prompt:] if batch.targets is None else batch.targets[row],
            routes=None if routes is None else _with_unknown(routes, len(tokens)),
            images=[(size + image.first - shared, image) for image in images if image.first >= shared],
        )
        size += len(tokens)


def _with_unknown(routes: Int[Tensor, "T routes"], size: int) -> Int[Tensor, "size routes"]:
    """Pads routes [T, layers x k] to [size, layers x k]. Those of padding are unknown."""
    return torch.nn.functional.pad(routes, (0, 0, 0, size - len(routes)), value=-1)


def unpack(flat: Float[Tensor, " N"], lengths: list[int], width: int) -> Float[Tensor, "rows width"]:
    """Maps [N] in pack order to [len(lengths), width], zeros after each row's end. Differentiable."""
    columns = torch.arange(width, device=flat.device)
    mask = columns < torch.tensor(lengths, device=flat.device).unsqueeze(1)
    return flat.new_zeros(len(lengths), width).masked_scatter(mask, flat)


def num_padding_tokens(lengths: list[int], multiple: int, cp: int = 1) -> int:
    """Returns the number of tokens that `pack` adds to sequences of these lengths. Without sequences it is a full pack."""
    aligned = sum(n + (-n % (2 * cp) if cp > 1 else 0) for n in lengths)
    return max(aligned + (-aligned % multiple), multiple) - sum(lengths)


# -- context parallelism -----------------------------------------------------------------------------------------------
#
# A causal token attends to all tokens before it, so the end of a sequence costs more than its beginning. Each sequence is
# therefore rounded up to a multiple of 2 cp and cut into 2 cp chunks, and rank r takes chunk r from the front and chunk r
# from the back. (Ring Attention with balanced load, arXiv:2310.01889; Transformer Engine's attention over packed sequences
# expects this cut.)
#
#     cp 2, a sequence of 8:   rank 0: 0 1 . . . . 6 7    rank 1: . . 2 3 4 5 . .
#
# The index arithmetic is plain torch and tested. The attention itself was not run on a GPU yet.


def local_tokens(lengths: Sequence[int], cp: int, cp_rank: int) -> Int[Tensor, " T_local"]:
    """Returns the indices of rank `cp_rank`'s tokens in the pack, int64 [T / cp], in the order in which it computes them.

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


def soft_targets(batch: Batch, rows: list[int], share: TargetShare | None, device: Device) -> SoftTargets | None:
    """Returns the teachers' distributions of a pack's targets on the device. `share`: this rank's targets alone."""
    scores, to = batch.teacher, device.torch_device
    if scores is None or not (scores.top or scores.states):
        return None
    divergence = Divergence(scores.kl, scores.beta)
    lengths = [len(batch.tokens[row]) - batch.prompt_lengths[row] for row in rows]
    chosen = torch.arange(sum(lengths)) if share is None else share.target_indices
    for row, length in zip(rows, lengths, strict=True):
        for part in (*scores.top[row : row + 1], *scores.states[row : row + 1]):
            assert part is None or len(part) == length, f"a teacher scored {len(part)} tokens of a row of {length}"
    known = [part for part in scores.top if part is not None]
    if known:
        k = known[0].shape[1] // 2
        unknown = torch.tensor([-1.0] * k + [LEAST_LOGPROB] * k + [0.0])  # all of the mass in the tail
        parts = []
        for row, length in zip(rows, lengths, strict=True):
            part = scores.top[row]
            parts.append(unknown.expand(length, -1) if part is None else part)
        return SoftTargets(divergence, top=torch.cat(parts)[chosen].to(to))
    runs: list[tuple[int, int, list[Tensor]]] = []  # teacher, first target, states of its rows
    first = start = 0
    for row, length in zip(rows, lengths, strict=True):
        local = chosen[(chosen >= first) & (chosen < first + length)] - first
        row_states, number = scores.states[row] if scores.states else None, scores.index[row]
        if row_states is not None:
            if not runs or runs[-1][0] != number or runs[-1][1] + sum(map(len, runs[-1][2])) != start:
                runs.append((number, start, []))
            runs[-1][2].append(row_states[local])
        first, start = first + length, start + len(local)
    states = []
    for number, start, parts in runs:
        part, head = torch.cat(parts).to(to), scores.heads[number]
        assert head is not None
        states.append(TeacherStates(start, start + len(part), part, head))
    return SoftTargets(divergence, states=states)


def kept_targets(batch: Batch, rows: list[int], share: TargetShare | None, device: Device) -> KeptTargets | None:
    """Returns the ids that a pack's targets were sampled from, on the device. `share`: this rank's targets alone."""
    if batch.kept is None or not rows:
        return None
    lengths = [len(batch.tokens[row]) - batch.prompt_lengths[row] for row in rows]
    parts = [batch.kept[row].split([n, len(batch.kept[row]) - n]) for row, n in zip(rows, lengths, strict=True)]
    counts, ids = (torch.cat(column) for column in zip(*parts, strict=True))
    if share is not None:
        is_local = torch.zeros(len(counts), dtype=torch.bool)
        is_local[share.target_indices] = True
        counts, ids = counts[is_local], ids[is_local.repeat_interleave(counts)]
    return KeptTargets.of(counts, ids, device.torch_device)


def target_share(state_indices: Int[Tensor, " N"], tokens: Int[Tensor, " T_local"]) -> TargetShare:
    """Returns the targets whose hidden states, `state_indices` [N] in the pack, are among a rank's `tokens` [T / cp]."""
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
        gathered = values.new_zeros(num_targets, *values.shape[1:])
        gathered[target_indices] = values
        dist.all_reduce(gathered, group=group)  # one rank's value plus zeros: the same bits on every rank
        return gathered

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        (target_indices,) = ctx.saved_tensors
        return grads[0][target_indices], None, None, None


def gather_targets(values: Float[Tensor, "n ..."], share: TargetShare, group: Any) -> Float[Tensor, "N ..."]:
    """Gathers all ranks' values [N, ...] from each rank's [n, ...]. Collective over the context-parallel `group`."""
    return _GatherTargets.apply(values, share.target_indices, share.num_targets, group)  # type: ignore[no-any-return]


def forward_backward(
    model: torch.nn.Module,
    packs: list[Pack],
    consume: Callable[..., Any],
    *,
    device: Device,
    forward_only: bool,
) -> list[Any]:
    """Run Megatron's pipeline schedule over `packs`. The last stage calls `consume(pack, values [N], entropy [N])` for each.

    `values` are log-probabilities, or the scores of a reward model; other outputs follow (see `build.HeadOutput`).
    forward_only: `consume` returns anything. The results are returned in order; other stages return an empty list.
    Training: `consume` returns (loss to be summed, result). Gradients go to the model's buffers. They are summed over
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

        def finish(output: Iterable[Tensor], non_loss_data: bool = False) -> Any:
            if (share := current.share) is not None:
                group = parallel_state.get_context_parallel_group()
                output = [gather_targets(part, share, group) for part in output]
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
    """Free the FP8 copies of Transformer Engine's weights, which the next pass makes anew. The engine needs their memory.

    They are a byte for each weight of a linear layer, or two after a backward pass.
    """
    for module in model.modules():
        copies = getattr(module, "_fp8_workspaces", None)
        if copies:
            copies.clear()


MetricSums = dict[str, MetricSum]
LossFunction = Callable[[Any], tuple[Tensor, MetricSums]]  # its argument: the result of `Policy.loss_inputs`


class LossPass:
    """Forward and backward of one mini-batch. Gradients go to the model's buffers.

    `inputs` makes the argument of `loss` from a pack's rows, log-probabilities and entropies, with teachers also divergences
    and agreements.
    `sums`: the metric sums of this rank. `logprobs`: for each pack, its rows and their log-probabilities [rows, R of the
    pack], on the device. Both are empty on other pipeline stages than the last.
    """

    def __init__(self, batch: Batch, loss: LossFunction, inputs: Callable[..., Any]) -> None:
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

    def host_logprobs(self) -> Float[Tensor, "B R"]:
        """Returns the log-probability of every response token [B, R], float32 on the host; 0 in rows without a pack."""
        out = torch.zeros(self.batch.response_mask.shape)
        for rows, part in self.logprobs:
            out[rows, : part.shape[1]] = part.float().cpu()
        return out

    def _consume(
        self, current: Pack, flat_logprobs: Tensor, flat_entropy: Tensor, *others: Tensor
    ) -> tuple[Tensor, None]:
        if not current.rows:
            return flat_logprobs.sum() + flat_entropy.sum(), None  # zero, but connected to every parameter
        width = max(current.lengths)
        logprobs, *rest = (unpack(flat, current.lengths, width) for flat in (flat_logprobs, flat_entropy, *others))
        self.logprobs.append((current.rows, logprobs.detach()))
        value, metrics = self.loss(self.inputs(self.batch, current.rows, logprobs, *rest))
        for name, part in metrics.items():
            self.sums[name] = self.sums[name].plus(part) if name in self.sums else part
        return value, None


def loss_inputs(
    batch: Batch,
    rows: list[int],
    logprobs: Float[Tensor, "rows R"],
    entropy: Float[Tensor, "rows R"],
    divergence: Float[Tensor, "rows R"] | None = None,
    agreement: Float[Tensor, "rows R"] | None = None,
) -> LossInputs:
    """Returns the inputs of a loss on `rows`. `logprobs`, `entropy`, `divergence` [len(rows), R] are the model's.

    Where the batch has no old log-probabilities, they are the model's own.
    """
    select = functools.partial(like_rows, rows, logprobs)
    teacher: dict[str, Tensor] = {}
    if (scores := batch.teacher) is not None:
        index = torch.tensor([scores.index[row] for row in rows], dtype=logprobs.dtype, device=logprobs.device)
        teacher = {"teacher_logprobs": select(scores.logprobs), "teacher_weights": select(scores.weights)}
        teacher["teacher_index"] = index[:, None].expand(logprobs.shape)
    observed = None
    if batch.observation_weights is not None:
        weights = select(batch.observation_weights)
        observed = -torch.where(weights > 0, weights * logprobs, 0.0)
    return LossInputs(
        observation_loss=observed,
        all_logprobs=None if batch.expert_weights is None else logprobs,
        expert_weights=None if batch.expert_weights is None else select(batch.expert_weights),
        ages=None if batch.ages is None else select(batch.ages),
        logprobs=logprobs,
        entropy=entropy,
        old_logprobs=logprobs.detach() if batch.old_logprobs is None else select(batch.old_logprobs),
        rollout_logprobs=select(batch.rollout_logprobs),
        ref_logprobs=None if batch.ref_logprobs is None else select(batch.ref_logprobs),
        advantages=select(batch.advantages),
        mask=select(batch.loss_mask),
        token_weights=select(batch.token_weights),
        correction=None if batch.correction is None else select(batch.correction),
        selected=None if batch.selected is None else select(batch.selected),
        divergence=divergence,
        agreement=agreement,
        **teacher,
    )


def like_rows(rows: list[int], like: Tensor, tensor: Tensor) -> Tensor:
    """Selects `rows` of a batch's `tensor` [B, R], as wide as `like` [len(rows), ...] and on its device."""
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
        self.routers: list[RouteChoice] = []  # the routers that replay
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
        self,
        batch: Batch,
        out: Tensor,
        read: Callable[..., Tensor],
        temperature: float | None = None,
        entropies: Tensor | None = None,
        **distribution: Any,
    ) -> Tensor:
        """Set each pack's rows of `out` [B, ...] to `read(pack, values)`. The same on every rank of the replica.

        `entropies` [B, R] gets those of the response tokens, in nats. `distribution`: `top_k` and `num_ids` of a teacher (see
        `Targets`), whose distribution `read` gets, too. Runs the micro-batches of the batch, so that a later update computes
        the same numbers. Collective over the replica.
        """

        def consume(current: Pack, values: Tensor, entropy: Tensor, *others: Tensor) -> None:
            if current.rows:
                out[current.rows] = read(current, values, *others).float().cpu()
            if current.rows and entropies is not None:
                entropies[current.rows] = unpack(entropy, current.lengths, entropies.shape[1]).float().cpu()

        batch = replace(batch, teacher=None)

        micro_batches = [rows for mini in batch.mini_batches for rows in mini]
        if not micro_batches:  # the batch is empty on every rank
            return out
        if self.is_exact:  # they have one row each, for the gradients; several have the same bits
            batch, micro_batches = self._packed(batch, [row for rows in micro_batches for row in rows])
        packs = self.packs(batch, micro_batches, temperature)
        packs = [replace(one, targets=replace(one.targets, **distribution)) for one in packs] if distribution else packs
        forward_backward(self.model, packs, consume, device=self.device, forward_only=True)
        if entropies is not None:
            entropies.copy_(self.from_last_stage(entropies))
        return self.from_last_stage(out)

    def _packed(self, batch: Batch, rows: list[int]) -> tuple[Batch, list[list[int]]]:
        """Puts `rows` in full micro-batches, in which they share prompts if the config allows it."""
        batch = replace(batch, shares_prompts=self.actor.share_prompts)
        lengths, units = [len(tokens) for tokens in batch.tokens], []
        for tree in trees_of(batch, rows):
            room = self.actor.ppo_max_token_len_per_gpu // max(lengths[row] for row in tree)
            count = max(1, min(room, self.actor.ppo_micro_batch_size_per_gpu or room))
            units += [tree[first : first + count] for first in range(0, len(tree), count)]
        [micro_batches] = pack_units([units], lengths, self.actor)
        return batch, micro_batches

    def from_last_stage(self, out: Tensor) -> Tensor:
        """Returns the last pipeline stage's host tensor `out` on the ranks of all stages. Collective over the replica."""
        if self.mesh.pp == 1:
            return out
        shared = out.to(self.device.torch_device)
        dist.broadcast(shared, self.mesh.stage_rank(self.mesh.pp - 1), group=self.mesh.pp_group)
        return shared.cpu()

    def readable_weights(self) -> contextlib.AbstractContextManager[None]:
        """Makes the model's weights current and puts them on the device, for the block. Collective."""
        return contextlib.nullcontext()

    def hf_weights(self, bucket_megabytes: int = 512) -> Iterator[WeightBucket]:
        """Streams every full Hugging Face tensor to every rank. Collective (see `weights.hf_weights`)."""
        with self.readable_weights():
            yield from hf_weights(self.model, self.arch, self.mesh, bucket_megabytes, self.stage_of)

    def engine_weights(self, weight_sync: WeightSync, version: int) -> Iterator[WeightBucket]:
        """Stream the weights to an engine: only the spans that it reads (see `WeightSync.stream`). Collective."""
        with self.readable_weights():
            yield from weight_sync.stream(sent_parameters(self.model), version)

    def expected_digests(self, weight_sync: WeightSync) -> Expected:
        """Compute the digests of the current weights, for each rank of the engine. Collective (see `WeightSync`)."""
        with self.readable_weights():
            return weight_sync.expected_digests(sent_parameters(self.model))


class LanguageModel(ShardedModel):
    """A sharded model that computes log-probabilities of a batch: the policy or the reference."""

    is_frozen: ClassVar[bool] = False

    def __init__(self, model: torch.nn.Module, arch: Architecture, actor: ActorConfig, *parts: Any) -> None:
        super().__init__(model, arch, actor, *parts)
        if actor.moe.route_replay != "none":
            self.routers = replay_routes(model, arch.num_dense_layers)

    def packs(self, batch: Batch, micro_batches: list[list[int]], temperature: float | None = None) -> list[Pack]:
        """See ShardedModel. Under `route_replay: old` the packs have the routes that the first pass over them has recorded."""
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
        read: WeightReader = SafetensorsFolder.slice,
    ) -> Self:
        """Builds the model with the weights of a Hugging Face folder. Collective. Raises WeightsError.

        `read`: of a tensor of the folder by its name, as of a base with adapters (lora/peft_folder.py).
        """
        megatron = actor.megatron if cls.is_frozen else actor.layers
        model = build_model(arch, megatron, dtype, device, has_gradients=not cls.is_frozen, is_exact=exact)
        load_hf(model, folder, arch, mesh, read)
        return cls(model, arch, actor, mesh, device, temperature)

    def logprobs(
        self,
        batch: Batch,
        temperature: float | None = None,
        entropies: Tensor | None = None,
        squares: Tensor | None = None,
    ) -> Float[Tensor, "B R"]:
        """Returns the log-probability of every response token [B, R], float32 on the host, 0 after the end. Collective.

        `entropies` [B, R] gets the entropies at these tokens, `squares` the sums of the squared probabilities there.
        """
        width = batch.response_mask.shape[1]

        def read(current: Pack, values: Tensor, *others: Tensor) -> Tensor:
            if squares is not None:
                squares[current.rows] = unpack(others[0], current.lengths, width).cpu()
            return unpack(values, current.lengths, width)

        options = {} if squares is None else {"has_squares": True}
        out = self.forward_batch(batch, torch.zeros(len(batch), width), read, temperature, entropies, **options)
        if squares is not None:
            squares.copy_(self.from_last_stage(squares))
        return out

    def distribution(
        self, batch: Batch, top_k: int, num_ids: int, temperature: float | None = None
    ) -> tuple[Float[Tensor, "B R"], list[Tensor | None]]:
        """Returns `logprobs`, and a teacher's distribution of each row's response tokens on the host. Collective.

        It is `vocab_parallel_top` [r, 2 top_k + 1] of ids below `num_ids`, the policy's vocabulary; for `top_k` 0 the final
        hidden states [r, hidden size]; None for rows in no micro-batch. Other pipeline stages than the last get an empty list.
        """
        width, rows = batch.response_mask.shape[1], dict[int, Tensor]()

        def read(current: Pack, values: Tensor, distribution: Tensor) -> Tensor:
            rows.update(zip(current.rows, distribution.cpu().split(current.lengths), strict=True))
            return unpack(values, current.lengths, width)

        out = torch.zeros(len(batch), width)
        logprobs = self.forward_batch(batch, out, read, temperature, top_k=top_k, num_ids=num_ids)
        return logprobs, [rows[row].clone() if row in rows else None for row in range(len(batch))] if rows else []

    def teacher_head(self, folder: Path, arch: Architecture, dtype: torch.dtype) -> Tensor | None:
        """Returns a teacher's rows of the output head for this rank's part of the vocabulary; None on other stages.

        There are fewer where the teacher's vocabulary is smaller than the model's. Raises WeightsError.
        """
        if not self.mesh.is_last_stage:
            return None
        num_rows = min(arch.vocab_size, self.arch.vocab_size)
        size = self.arch.padded_vocab_size(self.mesh.tp) // self.mesh.tp
        first, end = (min(num_rows, size * (self.mesh.tp_rank + i)) for i in range(2))
        # A copy, because products with rows in unaligned memory of a file may have other bits than those of the policy.
        return read_head_rows(folder, arch, first, end).to(self.device.torch_device, dtype, copy=True)
