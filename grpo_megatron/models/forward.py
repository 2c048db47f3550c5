"""Packing and the pipeline: whole sequences in, one number per response token out. Callers never see padding.

A micro-batch is packed end to end ("thd"): T tokens, no padding between sequences. T is rounded up once, at the end of the
last sequence. Attention is causal, so the padding cannot change a real token. Under context parallelism every sequence is
rounded up to a multiple of 2 cp in the same way, and a rank holds T / cp of the tokens (see context.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from torch import Tensor

from grpo_megatron.device import Device
from grpo_megatron.models.build import Targets
from grpo_megatron.models.context import TargetShare, gather_targets, local_tokens, target_share
from grpo_megatron.types import Batch


@dataclass(frozen=True)
class Pack:
    """One micro-batch on the device. `rows` are rows of the Batch; `lengths` are their response lengths."""

    rows: list[int]
    lengths: list[int]
    tokens: Tensor  # [1, T / cp]
    position_ids: Tensor  # [1, T / cp]
    packed: PackedSeqParams
    targets: Targets
    share: TargetShare | None = None  # context parallelism: the part of the targets that this rank computes


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
) -> Pack:
    """Put sequences `rows` of `batch` end to end and take rank `cp_rank`'s part. No rows: padding without targets.

    `multiple` is `precision.token_multiple`, a multiple of 2 cp if cp > 1.
    """
    sequences = [batch.tokens[row] for row in rows] or [torch.zeros(1, dtype=torch.int64)]
    if cp > 1:
        sequences = [torch.nn.functional.pad(s, (0, -len(s) % (2 * cp))) for s in sequences]
    padding = -sum(len(s) for s in sequences) % multiple
    sequences[-1] = torch.nn.functional.pad(sequences[-1], (0, padding))
    lengths = [len(s) for s in sequences]
    cuts = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    before_targets, response_lengths = [], []
    for row, start in zip(rows, cuts.tolist(), strict=False):
        prompt_length, end = batch.prompt_lengths[row], len(batch.tokens[row])
        # The hidden state at a token predicts the next token.
        before_targets.append(torch.arange(start + prompt_length - 1, start + end - 1))
        response_lengths.append(end - prompt_length)
    state_indices = torch.cat(before_targets) if before_targets else torch.empty(0, dtype=torch.int64)
    tokens = torch.cat(sequences)
    target_tokens = tokens[state_indices + 1]
    position_ids = torch.cat([torch.arange(n) for n in lengths])
    to = device.torch_device
    share = None
    if cp > 1:
        local = local_tokens(lengths, cp, cp_rank)
        share = target_share(state_indices, local)
        tokens, position_ids = tokens[local], position_ids[local]
        target_tokens, state_indices = target_tokens[share.target_indices], share.state_indices
        share = TargetShare(share.target_indices.to(to), state_indices, share.num_targets)
    cuts = cuts.to(to)
    # The padding of a sequence counts as part of it. Attention kernels are fastest without gaps; some allow none.
    padded = cuts if cp > 1 else None
    return Pack(
        rows=rows,
        lengths=response_lengths,
        tokens=tokens.unsqueeze(0).to(to),
        position_ids=position_ids.unsqueeze(0).to(to),
        packed=PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=cuts,
            cu_seqlens_kv=cuts,
            cu_seqlens_q_padded=padded,
            cu_seqlens_kv_padded=padded,
            max_seqlen_q=max(lengths),
            max_seqlen_kv=max(lengths),
        ),
        targets=Targets(state_indices.to(to), target_tokens.to(to), temperature, chunk),
        share=share,
    )


def num_padding_tokens(lengths: list[int], multiple: int, cp: int = 1) -> int:
    """How many tokens `pack` adds to sequences of these lengths; none at all is a pack of padding."""
    aligned = sum(n + (-n % (2 * cp) if cp > 1 else 0) for n in lengths)
    return max(aligned + (-aligned % multiple), multiple) - sum(lengths)


def unpack(flat: Tensor, lengths: list[int], width: int) -> Tensor:
    """[N] in pack order -> [len(lengths), width], zeros after each row's end. Differentiable."""
    columns = torch.arange(width, device=flat.device)
    mask = columns < torch.tensor(lengths, device=flat.device).unsqueeze(1)
    return flat.new_zeros(len(lengths), width).masked_scatter(mask, flat)


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
