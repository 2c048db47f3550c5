"""Per-token estimates of the KL divergence from the reference, from the log-probabilities of the sampled tokens.

With d = ref_logprobs - logprobs (Schulman, "Approximating KL divergence", 2020; k3: DeepSeekMath, arXiv 2402.03300):

    name               value         gradient coefficient on logprobs
    kl, k1             -d            1             unbiased value; as a loss its expected gradient is 0
    abs                |d|           -sign(d)      diagnostic
    mse, k2            d^2 / 2       -d            biased value, the reverse KL's gradient on-policy
    low_var_kl, k3     e^d - 1 - d   1 - e^d       unbiased value, biased gradient
    any of them + "+"  its value     -d            straight-through: the estimator's value, the gradient of k2

Only k3 is clamped (as in verl): d to +-20, then the value to at most 10; it is never negative. The value clamp also
sets k3's gradient to 0. That happens to tokens more than about 13.6 times less likely than under the reference
(e^d - 1 - d > 10 at d > 2.61), or e^11 times likelier. `actor/kl_clamp_frac` is the share of tokens whose value was
clamped. "k3+" keeps its gradient there. e^d - 1 is computed with expm1, which is exact where d is small.

A penalty has the contract of a policy loss: value and per-token metrics, elementwise, `[B, R]` in and out.

`algorithm.use_kl_in_reward` puts the KL into the reward instead of the loss. Then coefficient * the same value is
subtracted from each token's reward. It is taken at the start of the update, and without a gradient. A token outside the
loss has no penalty. The coefficient may be adaptive (Ziegler et al., arXiv 1909.08593). After a step with n samples and
a KL of k nats:

    coefficient *= 1 + clamp(k / target - 1, -0.2, 0.2) * n / horizon
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from grpo_megatron.config import KlCtrl
from grpo_megatron.importing import Registry

if TYPE_CHECKING:
    from torch import Tensor


# -- Ratios of probabilities -------------------------------------------------------------------------------------------
# Ratios of probabilities from differences of log-probabilities, and the one bound on their exponent.
#
#     ratio = exp(clamp(log-ratio, -20, 20))
#
# e^20 = 4.9e8 is far outside anything that still trains, and no product of it with an advantage overflows float32.

LOG_RATIO_CLAMP = 20.0


def clamp_log_ratio(log_ratio: Tensor) -> Tensor:
    """`log_ratio` within +-LOG_RATIO_CLAMP, elementwise."""
    return log_ratio.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)


def ratio_of(log_ratio: Tensor) -> Tensor:
    """exp of the clamped log-ratio, elementwise."""
    return clamp_log_ratio(log_ratio).exp()


VALUE_CLAMP = 10.0

# (logprobs, ref_logprobs) -> (penalty, metrics by name); all [B, R]. The metrics are averaged over tokens.
KlPenalty = Callable[[Tensor, Tensor], tuple[Tensor, dict[str, Tensor]]]

kl_penalties: Registry[KlPenalty] = Registry("KL estimator")


def k1(logprobs: Tensor, ref_logprobs: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The log-ratio itself."""
    return logprobs - ref_logprobs, {}


def absolute(logprobs: Tensor, ref_logprobs: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The absolute log-ratio."""
    return (logprobs - ref_logprobs).abs(), {}


def k2(logprobs: Tensor, ref_logprobs: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Half the squared log-ratio."""
    return 0.5 * (logprobs - ref_logprobs).square(), {}


def k3(logprobs: Tensor, ref_logprobs: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Schulman's low-variance estimate, clamped; reports `actor/kl_clamp_frac`."""
    d = clamp_log_ratio(ref_logprobs - logprobs)
    value = torch.expm1(d) - d
    return value.clamp(max=VALUE_CLAMP), {"actor/kl_clamp_frac": (value.detach() > VALUE_CLAMP).to(value.dtype)}


def straight_through(penalty: KlPenalty) -> KlPenalty:
    """The penalty's value with the gradient of k2."""

    def value_with_gradient_of_k2(logprobs: Tensor, ref_logprobs: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        value, metrics = penalty(logprobs.detach(), ref_logprobs)
        gradient, _ = k2(logprobs, ref_logprobs)
        # Added in this order: the bracket is exactly 0, so the value stays bit-identical.
        return value + (gradient - gradient.detach()), metrics

    return value_with_gradient_of_k2


_PENALTIES = {"kl": k1, "k1": k1, "abs": absolute, "mse": k2, "k2": k2, "low_var_kl": k3, "k3": k3}
for _name, _penalty in _PENALTIES.items():
    kl_penalties.register(_name)(_penalty)
    kl_penalties.register(_name + "+")(straight_through(_penalty))


@torch.no_grad()
def reward_penalty(kl_penalty: KlPenalty, old_logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> Tensor:
    """The KL estimate of every loss token, before the coefficient; 0 where masked. All [B, R]; `mask` is the loss mask."""
    old, ref = (tensor.masked_fill(~mask, 0.0) for tensor in (old_logprobs, ref_logprobs))
    value, _ = kl_penalty(old, ref)
    return value.masked_fill(~mask, 0.0)


def sequence_kl(penalty: Tensor, mask: Tensor) -> Tensor:
    """[number of rows with a loss token]: the mean over each row's loss tokens. `mask` is the loss mask, bool [B, R]."""
    num_tokens = mask.sum(-1)
    return penalty.double().sum(-1)[num_tokens > 0] / num_tokens[num_tokens > 0]


class KlController:
    """The coefficient of the KL penalty in the reward. `kl_coef` is that of the current step."""

    def __init__(self, config: KlCtrl) -> None:
        self._config = config
        self.kl_coef = config.kl_coef

    def update(self, kl: float, num_samples: int) -> None:
        """After a step of `num_samples` samples whose mean KL (nats, before the coefficient) was `kl`."""
        if self._config.type == "adaptive":
            error = max(-0.2, min(0.2, kl / self._config.target_kl - 1.0))
            self.kl_coef *= 1.0 + error * num_samples / self._config.horizon

    def state(self) -> dict[str, float]:
        """Returns what a checkpoint stores of the controller."""
        return {"kl_coef": self.kl_coef, "start": self._config.kl_coef}

    def load_state(self, state: dict[str, float]) -> None:
        """Continue from `state`. A fixed coefficient, or one that the user has changed for the resumed run, is the config's."""
        if self._config.type == "adaptive" and state.get("start", self._config.kl_coef) == self._config.kl_coef:
            self.kl_coef = state["kl_coef"]
