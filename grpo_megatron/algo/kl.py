"""KL from the reference: the estimates, the KL in the reward and its adaptive coefficient.

All of it is elementwise on `[B, R]` log-probabilities of the sampled tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_megatron.algo.losses import KlPenalty, clamp_log_ratio
from grpo_megatron.config import KlCtrl
from grpo_megatron.registry import Registry
from grpo_megatron.shapes import Bool, Float

VALUE_CLAMP = 10.0

# With d = ref_logprobs - logprobs (Schulman, "Approximating KL divergence", 2020; k3: DeepSeekMath, arXiv 2402.03300):
#
#     name               value         gradient coefficient on logprobs
#     kl, k1             -d            1             unbiased value; as a loss its expected gradient is 0
#     abs                |d|           -sign(d)      diagnostic
#     mse, k2            d^2 / 2       -d            biased value, the reverse KL's gradient on-policy
#     low_var_kl, k3     e^d - 1 - d   1 - e^d       unbiased value, biased gradient
#     any of them + "+"  its value     -d            straight-through: the estimator's value, the gradient of k2
kl_penalties: Registry[KlPenalty] = Registry("KL estimator")


def k2(
    logprobs: Float[Tensor, "*shape"], ref_logprobs: Float[Tensor, "*shape"]
) -> tuple[Float[Tensor, "*shape"], dict[str, Tensor]]:
    """Computes half the squared log-ratio."""
    return 0.5 * (logprobs - ref_logprobs).square(), {}


def k3(
    logprobs: Float[Tensor, "*shape"], ref_logprobs: Float[Tensor, "*shape"]
) -> tuple[Float[Tensor, "*shape"], dict[str, Tensor]]:
    """Computes Schulman's low-variance estimate e^d - 1 - d, clamped as in verl; it is never negative.

    d is clamped to +-20, then the value to at most 10, which also sets the gradient to 0: for tokens more than about 13.6 times
    less likely than under the reference (e^d - 1 - d > 10 at d > 2.61), or e^11 times likelier. `actor/kl_clamp_frac` is their
    share. "k3+" keeps its gradient there. expm1 is exact where d is small.
    """
    d = clamp_log_ratio(ref_logprobs - logprobs)
    value = torch.expm1(d) - d
    return value.clamp(max=VALUE_CLAMP), {"actor/kl_clamp_frac": (value.detach() > VALUE_CLAMP).to(value.dtype)}


def straight_through(penalty: KlPenalty) -> KlPenalty:
    """Combines the penalty's value with the gradient of k2."""

    def value_with_gradient_of_k2(logprobs: Tensor, ref_logprobs: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        value, metrics = penalty(logprobs.detach(), ref_logprobs)
        gradient, _ = k2(logprobs, ref_logprobs)
        # Added in this order: the bracket is exactly 0, so the value stays bit-identical.
        return value + (gradient - gradient.detach()), metrics

    return value_with_gradient_of_k2


_PENALTIES: dict[tuple[str, ...], KlPenalty] = {
    ("kl", "k1"): lambda logprobs, ref_logprobs: (logprobs - ref_logprobs, {}),
    ("abs",): lambda logprobs, ref_logprobs: ((logprobs - ref_logprobs).abs(), {}),
    ("mse", "k2"): k2,
    ("low_var_kl", "k3"): k3,
}
for _names, _penalty in _PENALTIES.items():
    kl_penalties.register(*_names)(_penalty)
    kl_penalties.register(*(name + "+" for name in _names))(straight_through(_penalty))


def binary_kl(logp: Float[Tensor, "*shape"], logq: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Computes the KL of two-event distributions, p log(p/q) + (1 - p) log((1 - p)/(1 - q)): this token, or any other.

    Nats, never negative: a lower bound of the KL over the vocabulary. Probabilities are within 1e-6 and 1 - 1e-6.
    """
    p, q = (log.exp().clamp(1e-6, 1.0 - 1e-6) for log in (logp, logq))
    return p * (p / q).log() + (1.0 - p) * ((1.0 - p) / (1.0 - q)).log()


@torch.no_grad()
def reward_penalty(
    kl_penalty: KlPenalty,
    old_logprobs: Float[Tensor, "B R"],
    ref_logprobs: Float[Tensor, "B R"],
    mask: Bool[Tensor, "B R"],
) -> Float[Tensor, "B R"]:
    """Computes the KL estimate of every loss token, before the coefficient; 0 where masked. All [B, R]; `mask` is the loss mask.

    `algorithm.use_kl_in_reward` subtracts coefficient * this from each token's reward, instead of a KL in the loss. It is taken
    at the start of the update, and has no gradient.
    """
    old, ref = (tensor.masked_fill(~mask, 0.0) for tensor in (old_logprobs, ref_logprobs))
    value, _ = kl_penalty(old, ref)
    return value.masked_fill(~mask, 0.0)


def sequence_kl(penalty: Float[Tensor, "B R"], mask: Bool[Tensor, "B R"]) -> Float[Tensor, " rows"]:
    """Computes the mean over each row's loss tokens: [rows with one]. `mask` is the loss mask, bool [B, R]."""
    num_tokens = mask.sum(-1)
    return penalty.double().sum(-1)[num_tokens > 0] / num_tokens[num_tokens > 0]


class KlController:
    """The coefficient of the KL penalty in the reward, fixed or adaptive. `kl_coef` is that of the current step."""

    def __init__(self, config: KlCtrl) -> None:
        self._config = config
        self.kl_coef = config.kl_coef

    def update(self, kl: float, num_samples: int) -> None:
        """Adapts the coefficient after a step of n samples with a mean KL of `kl` nats (Ziegler et al., arXiv 1909.08593).

        kl_coef *= 1 + clamp(kl / target - 1, -0.2, 0.2) * n / horizon
        """
        if self._config.type == "adaptive":
            error = max(-0.2, min(0.2, kl / self._config.target_kl - 1.0))
            self.kl_coef *= 1.0 + error * num_samples / self._config.horizon

    def state(self) -> dict[str, float]:
        return {"kl_coef": self.kl_coef, "start": self._config.kl_coef}

    def load_state(self, state: dict[str, float]) -> None:
        """Continues from `state`. A fixed coefficient, or one that the user has changed for the resumed run, is the config's."""
        if self._config.type == "adaptive" and state.get("start", self._config.kl_coef) == self._config.kl_coef:
            self.kl_coef = state["kl_coef"]
