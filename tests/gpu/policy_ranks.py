"""What a rank runs to compare the policy with transformers on the same device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.gpu.building import KIND, build_policy, layer_class, sequences, whole_batch


def against_transformers(folder: Path, megatron: dict[str, Any]) -> dict[str, Any]:
    """Log-probabilities of the same response tokens: by the policy and by transformers, in bfloat16, and exactly."""
    pairs = sequences(16, 400)
    policy = build_policy(folder, megatron)
    batch = whole_batch(pairs)
    ours = policy.logprobs(batch)[batch.response_mask]
    theirs, exact = (_transformers(folder, pairs, dtype) for dtype in (torch.bfloat16, torch.float32))
    difference = ours - theirs
    return {
        "layers": layer_class(policy),
        "tokens": len(ours),
        "mean": difference.abs().mean().item(),
        "max": difference.abs().max().item(),
        "k3": (difference.exp() - difference - 1).mean().item(),
        "mult_prob_error": difference.abs().exp().mean().item(),
        "own_error": (ours - exact).abs().mean().item(),
        "their_error": (theirs - exact).abs().mean().item(),
        "spread": exact.std().item(),
    }


@torch.no_grad()
def _transformers(folder: Path, pairs: Any, dtype: torch.dtype) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    loaded: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    model = loaded.to(KIND).eval()
    parts = []
    for prompt, response in pairs:
        ids = torch.tensor([prompt + response], device=KIND)
        logp = model(ids).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
        parts.append(logp.gather(1, ids[0, len(prompt) :, None])[:, 0].cpu())
    return torch.cat(parts)
