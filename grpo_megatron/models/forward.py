"""Whole sequences in, per-token numbers out: packing, padding and the pipeline schedule stay behind this file.

A micro-batch is packed end to end ("thd"): T tokens, no padding between sequences. Its length is rounded up once, at the
end of the last sequence, where causal attention cannot let the rounding reach a real token. Under context parallelism
every sequence is rounded up so, to a multiple of 2 cp, and a rank holds T / cp of the tokens (see context.py).
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
from grpo_megatron.models.context import Share, bring_together, own_scores, own_tokens
from grpo_megatron.types import Batch


@dataclass(frozen=True)
class Pack:
    """One micro-batch on the device. `rows` are rows of the Batch; `lengths` their response lengths."""

    rows: list[int]
    lengths: list[int]
    tokens: Tensor  # [1, T / cp]
    positions: Tensor  # [1, T / cp]
    packed: PackedSeqParams
    targets: Targets
    num_padding: int
    share: Share | None = None  # context parallelism: the part of the scored tokens that this rank has


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
    """Sequences `rows` of `batch` end to end; rank `cp_rank`'s part of them. No rows: padding that scores nothing.

    `multiple` is `precision.token_multiple`, a multiple of 2 cp where cp > 1.
    """
    sequences = [batch.tokens[row] for row in rows] or [torch.zeros(1, dtype=torch.int64)]
    num_tokens = sum(len(s) for s in sequences)
    if cp > 1:
        sequences = [torch.nn.functional.pad(s, (0, -len(s) % (2 * cp))) for s in sequences]
    padding = -sum(len(s) for s in sequences) % multiple
    sequences[-1] = torch.nn.functional.pad(sequences[-1], (0, padding))
    lengths = [len(s) for s in sequences]
    cuts = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    scored, responses = [], []
    for row, start in zip(rows, cuts.tolist(), strict=False):
        prompt_length, end = batch.prompt_lengths[row], len(batch.tokens[row])
        scored.append(torch.arange(start + prompt_length - 1, start + end - 1))  # the state before each response token
        responses.append(end - prompt_length)
    positions = torch.cat(scored) if scored else torch.empty(0, dtype=torch.int64)
    tokens = torch.cat(sequences)
    targets = tokens[positions + 1]
    places = torch.cat([torch.arange(n) for n in lengths])
    num_padding = len(tokens) - num_tokens if rows else len(tokens)
    to = device.torch_device
    share = None
    if cp > 1:
        own = own_tokens(lengths, cp, cp_rank)
        share = own_scores(positions, own)
        tokens, places, targets, positions = tokens[own], places[own], targets[share.slots], share.positions
        share = Share(share.slots.to(to), positions, share.count)
    cuts = cuts.to(to)
    # What rounds a sequence up counts as a part of it: attention kernels are fastest, or exist at all, without gaps.
    padded = cuts if cp > 1 else None
    return Pack(
        rows=rows,
        lengths=responses,
        tokens=tokens.unsqueeze(0).to(to),
        positions=places.unsqueeze(0).to(to),
        packed=PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=cuts,
            cu_seqlens_kv=cuts,
            cu_seqlens_q_padded=padded,
            cu_seqlens_kv_padded=padded,
            max_seqlen_q=max(lengths),
            max_seqlen_kv=max(lengths),
        ),
        targets=Targets(positions.to(to), targets.to(to), temperature, chunk),
        num_padding=num_padding,
        share=share,
    )


def unpack(flat: Tensor, lengths: list[int], width: int) -> Tensor:
    """[N] in pack order -> [len(lengths), width], zeros behind each row's end. Differentiable."""
    columns = torch.arange(width, device=flat.device)
    mask = columns < torch.tensor(lengths, device=flat.device).unsqueeze(1)
    return flat.new_zeros(len(lengths), width).masked_scatter(mask, flat)


def run(
    model: torch.nn.Module,
    packs: list[Pack],
    consume: Callable[[Pack, Tensor, Tensor], Any],
    *,
    device: Device,
    forward_only: bool,
) -> list[Any]:
    """Megatron's schedule over `packs`. On the last stage, `consume(pack, logprobs [N], entropy [N])` sees each one.

    forward_only: consume returns anything; the results are returned in order (other stages: an empty list).
    Training: consume returns (loss to be summed, result); gradients are left in the model's buffers, summed over
    micro-batches, data- and context-parallel ranks, divided by nothing.
    """

    def step(packs_left: Any, model: torch.nn.Module) -> tuple[Any, Callable[..., Any]]:
        current: Pack = next(packs_left)
        output = model(
            input_ids=current.tokens,
            position_ids=current.positions,
            attention_mask=None,
            packed_seq_params=current.packed,
            labels=current.targets,
        )

        def finish(output: tuple[Tensor, Tensor], non_loss_data: bool = False) -> Any:
            if (share := current.share) is not None:
                group = parallel_state.get_context_parallel_group()
                logprobs, entropy = (bring_together(values, share, group) for values in output)
                output = logprobs, entropy
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
            seq_length=1,  # unused: shapes travel with the tensors (variable_seq_lengths)
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )
    return list(results)
