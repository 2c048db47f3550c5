"""Whole sequences in, per-token numbers out: packing, padding and the pipeline schedule stay behind this file.

A micro-batch is packed end to end ("thd"): T tokens, no padding between sequences. Its length is rounded up once, at the
end of the last sequence, where causal attention cannot let the rounding reach a real token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from torch import Tensor

from grpo_megatron.device import Device
from grpo_megatron.models.build import Targets
from grpo_megatron.types import Batch


@dataclass(frozen=True)
class Pack:
    """One micro-batch on the device. `rows` are rows of the Batch; `lengths` their response lengths."""

    rows: list[int]
    lengths: list[int]
    tokens: Tensor  # [1, T]
    positions: Tensor  # [1, T]
    packed: PackedSeqParams
    targets: Targets
    num_padding: int


def pack(batch: Batch, rows: list[int], *, multiple: int, temperature: float, chunk: int, device: Device) -> Pack:
    """Sequences `rows` of `batch` end to end. No rows: a pack of padding that scores nothing."""
    sequences = [batch.tokens[row] for row in rows] or [torch.zeros(1, dtype=torch.int64)]
    total = sum(len(s) for s in sequences)
    padding = -total % multiple
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
    to = device.torch_device
    cuts = cuts.to(to)
    return Pack(
        rows=rows,
        lengths=responses,
        tokens=tokens.unsqueeze(0).to(to),
        positions=torch.cat([torch.arange(n) for n in lengths]).unsqueeze(0).to(to),
        packed=PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=cuts,
            cu_seqlens_kv=cuts,
            max_seqlen_q=max(lengths),
            max_seqlen_kv=max(lengths),
        ),
        targets=Targets(positions.to(to), tokens[positions + 1].to(to), temperature, chunk),
        num_padding=padding if rows else len(tokens),
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
    micro-batches and data-parallel ranks, divided by nothing.
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
