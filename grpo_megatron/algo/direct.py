"""Direct calls of the mathematics, for a notebook: advantages of plain rewards, and a loss of plain tensors.

    advantages("grpo", rewards=[1.0, 0.0, 1.0, 1.0], groups=["a", "a", "b", "b"])
    loss, metrics = policy_loss("vanilla", logprobs, advantages, old_logprobs=old)

No model, no process group and no config file; the options are the config's keys.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any

from grpo_megatron.algo.advantages import Advantages, advantage_estimators, check_rewards
from grpo_megatron.algo.plan import token_weights as weights_of_mode
from grpo_megatron.config import ActorConfig, AlgorithmConfig
from grpo_megatron.config.section import read_section
from grpo_megatron.types import GroupTable

if TYPE_CHECKING:
    from torch import Tensor


def advantages(
    name: str,
    rewards: Sequence[float],
    groups: Sequence[Hashable],
    lengths: Sequence[int] | None = None,
    **options: Any,
) -> Advantages:
    """Estimate the advantage of each response. `groups[i]` labels the prompt of response i; equal labels are one group.

    `name`: of `algorithm.adv_estimator`, or "module:function". `lengths`: response tokens (None: 1 each), which
    estimators per token and by length read. `options`: keys of section `algorithm`. Returns, in the order of `rewards`,
    one number, one per response token, or None for a response that the estimator leaves out. Raises ValueError.
    """
    lengths = [1] * len(rewards) if lengths is None else list(lengths)
    if not len(rewards) == len(groups) == len(lengths):
        raise ValueError(
            f"rewards has {len(rewards)} entries, groups {len(groups)} and lengths {len(lengths)}; give one per response"
        )
    check_rewards(rewards)
    algorithm = read_section(AlgorithmConfig, {"adv_estimator": name, **options})
    numbers = {label: number for number, label in enumerate(dict.fromkeys(groups))}
    order = sorted(range(len(rewards)), key=lambda i: numbers[groups[i]])  # rows of a group are neighbours
    labels = [numbers[groups[i]] for i in order]
    table = GroupTable(
        prompt_index=labels,
        index=[labels[:row].count(label) for row, label in enumerate(labels)],
        reward=[float(rewards[i]) for i in order],
        prompt_length=[1] * len(order),
        response_length=[lengths[i] for i in order],
        truncated=[False] * len(order),
        holder=[0] * len(order),
    )
    estimated = dict(zip(order, advantage_estimators.get(name)(table, algorithm), strict=True))
    return [estimated[i] for i in range(len(order))]


def policy_loss(
    name: str,
    logprobs: Tensor,
    advantages: Tensor | Sequence[float],
    mask: Tensor | None = None,
    *,
    old_logprobs: Tensor | None = None,
    rollout_logprobs: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, dict[str, float]]:
    """Compute the loss of one optimizer step, a scalar with a gradient on `logprobs`, and its metrics.

    `logprobs` [B, R]: log-probabilities of the response tokens under the current policy, right-padded. `mask` bool
    [B, R]: tokens in the loss (None: all). `advantages`: [B], or [B, R]. The other log-probabilities are [B, R]; None:
    equal to the current ones. With `ref_logprobs` the loss has a KL penalty. `name`: of `actor.loss_mode`, or
    "module:function". `options`: keys of section `actor`, `loss_agg_mode="token-mean"` for instance. Raises ValueError.
    """
    import torch

    from grpo_megatron.algo.kl import kl_penalties
    from grpo_megatron.algo.losses import LossInputs, policy_losses, total_loss

    tensors = {"logprobs": logprobs, "mask": mask, "old_logprobs": old_logprobs}
    tensors |= {"rollout_logprobs": rollout_logprobs, "ref_logprobs": ref_logprobs}
    for argument, one in tensors.items():
        if one is not None and not (isinstance(one, torch.Tensor) and one.dim() == 2 and one.shape == logprobs.shape):
            shape = list(one.shape) if isinstance(one, torch.Tensor) else f"a {type(one).__name__}"
            raise ValueError(f"{argument} is {shape}; give a tensor [B, R], of the shape of logprobs")
    actor = read_section(ActorConfig, {"loss_mode": name, "use_kl_loss": ref_logprobs is not None, **options})
    mask = torch.ones_like(logprobs, dtype=torch.bool) if mask is None else mask.bool()
    given = torch.as_tensor(advantages, dtype=logprobs.dtype, device=logprobs.device)
    if given.dim() == 1:
        given = given[:, None]
    if given.shape not in (logprobs.shape, (len(logprobs), 1)):
        raise ValueError(
            f"advantages is {list(given.shape)} and logprobs {list(logprobs.shape)}; give one per response, [B], or [B, R]"
        )
    counts, longest = mask.sum(1).tolist(), float(logprobs.shape[1])
    weights = torch.tensor(weights_of_mode(actor.loss_agg_mode, counts, actor.loss_scale_factor or longest))
    current = logprobs.detach()
    inputs = LossInputs(
        logprobs=logprobs,
        entropy=torch.zeros_like(current),
        old_logprobs=current if old_logprobs is None else old_logprobs,
        rollout_logprobs=current if rollout_logprobs is None else rollout_logprobs,
        ref_logprobs=ref_logprobs,
        advantages=given * mask,
        mask=mask,
        token_weights=weights.to(logprobs)[:, None] * mask,
    )
    penalty = kl_penalties.get(actor.kl_loss_type) if actor.use_kl_loss else None
    loss, sums = total_loss(inputs, actor, policy_losses.get(name), penalty)
    metrics = {
        key: part.total / max(1, 1 if part.num_tokens is None else part.num_tokens) for key, part in sums.items()
    }
    return loss, {key: float(value) for key, value in metrics.items() if not key.startswith("actor/entropy")}
