"""Gradients of the tests' loss: of this rank after `backward`, and of transformers by its own autograd."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import pad
from torch.overrides import TorchFunctionMode

from tests import tiny


def named_gradients(policy: Any) -> dict[str, torch.Tensor]:
    """This rank's summed gradients by global Megatron name."""
    from grpo_megatron.models.weights.stream import global_parameters

    parameters = global_parameters(policy.ddp).items()
    trained = ((name, p) for name, p in parameters if isinstance(p, torch.nn.Parameter) and p.requires_grad)
    return {name: p.main_grad.clone() for name, p in trained}  # type: ignore[attr-defined]


class _NoFloat32(TorchFunctionMode):
    """transformers converts to float32 in its norms. In a float64 model such a conversion would round: leave it out."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        is_float32 = func is torch.Tensor.float or torch.float32 in (*args[1:], kwargs.get("dtype"))
        if func in (torch.Tensor.to, torch.Tensor.float) and is_float32 and args[0].dtype is torch.float64:
            return args[0]
        return func(*args, **kwargs)


def transformers_backward(
    folder: Path, pairs: Any, loss: Any, dtype: torch.dtype = torch.float32, *, masked: bool = False, adapt: Any = None
) -> Any:
    """transformers' model after one backward pass of `loss` over all pairs, in `dtype`: its parameters have `grad`.

    `masked`: with the loss mask of `make_batch(masked=True)`. `adapt(model)`: called before the pass.
    """
    from transformers import AutoModelForCausalLM

    from grpo_megatron.algo.losses import LossInputs

    batch = tiny.make_batch(pairs, [], masked=masked)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    if adapt is not None:
        adapt(model)
    logprobs, entropies = [], []  # [R] each, zeros after the end
    width = batch.response_mask.shape[1]
    for prompt, response in pairs:
        with _NoFloat32():
            logits = model(torch.tensor([prompt + response])).logits[0]
        logp = logits.log_softmax(-1)[len(prompt) - 1 : -1]
        padding = (0, width - len(response))
        logprobs.append(pad(logp.gather(1, torch.tensor(response)[:, None]).squeeze(1), padding))
        entropies.append(pad(-(logp.exp() * logp).sum(-1), padding))
    inputs = LossInputs(
        logprobs=torch.stack(logprobs),
        entropy=torch.stack(entropies),
        old_logprobs=batch.old_logprobs.to(dtype),
        rollout_logprobs=batch.rollout_logprobs.to(dtype),
        ref_logprobs=batch.ref_logprobs.to(dtype),
        advantages=batch.advantages.to(dtype),
        mask=batch.loss_mask,
        token_weights=batch.token_weights.to(dtype),
    )
    loss(inputs)[0].backward()
    model.expected_logprobs = torch.stack(logprobs).detach()
    return model
