"""What the ranks of test_traffic.py run: one real update, with every byte counted that they send to others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests import tiny
from tests.models import policy_ranks


def sent(folder: Path, lengths: list[int]) -> int:
    """Bytes of the floating-point messages that this rank sends during `policy.update`, at pp 2 on 2 ranks."""
    policy = policy_ranks.build(folder, 1, 2, False, ppo_max_token_len_per_gpu=64)
    pairs = [([1] * 4, [3] * (length - 4)) for length in lengths]
    batch = tiny.make_batch(pairs, [[[index] for index in range(len(pairs))]])
    count, send = 0, dist.ProcessGroup.send

    def counting(self: Any, tensors: list[torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        nonlocal count  # messages about shapes are integers
        count += sum(tensor.nbytes for tensor in tensors if torch.is_floating_point(tensor))
        return send(self, tensors, *args, **kwargs)

    dist.ProcessGroup.send = counting  # type: ignore[assignment,method-assign]
    policy.update(batch, policy_ranks.loss)
    dist.ProcessGroup.send = send  # type: ignore[method-assign]
    return count
