"""How far two policies are apart on the same tokens: KL estimates, importance weights, and rejected tokens.

All of it is elementwise on `[B, R]` log-probabilities of the sampled tokens, and begins with one bound, as no product with
e^20 = 4.9e8 overflows float32:

    ratio = exp(clamp(log-ratio, -20, 20))

**KL from the reference.** With d = ref_logprobs - logprobs (Schulman, "Approximating KL divergence", 2020; k3: DeepSeekMath,
arXiv 2402.03300):

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

`algorithm.use_kl_in_reward` puts the KL into the reward instead of the loss. Then coefficient * the same value is
subtracted from each token's reward. It is taken at the start of the update, and without a gradient. A token outside the
loss has no penalty. The coefficient may be adaptive (Ziegler et al., arXiv 1909.08593). After a step with n samples and
a KL of k nats:

    coefficient *= 1 + clamp(k / target - 1, -0.2, 0.2) * n / horizon

**Correction for the rollout mismatch**: see the second half.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from grpo_megatron.config import KlCtrl, RolloutCorrection
from grpo_megatron.registry import Registry

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


_PENALTIES: dict[tuple[str, ...], KlPenalty] = {
    ("kl", "k1"): lambda logprobs, ref_logprobs: (logprobs - ref_logprobs, {}),
    ("abs",): lambda logprobs, ref_logprobs: ((logprobs - ref_logprobs).abs(), {}),
    ("mse", "k2"): k2,
    ("low_var_kl", "k3"): k3,
}
for _names, _penalty in _PENALTIES.items():
    kl_penalties.register(*_names)(_penalty)
    kl_penalties.register(*(name + "+" for name in _names))(straight_through(_penalty))


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
        return {"kl_coef": self.kl_coef, "start": self._config.kl_coef}

    def load_state(self, state: dict[str, float]) -> None:
        """Continue from `state`. A fixed coefficient, or one that the user has changed for the resumed run, is the config's."""
        if self._config.type == "adaptive" and state.get("start", self._config.kl_coef) == self._config.kl_coef:
            self.kl_coef = state["kl_coef"]


# -- Correction for the rollout mismatch -------------------------------------------------------------------------------
# Samples come from mu (the engine), gradients are taken from pi_old (the policy). Even at equal weights their probabilities
# differ: in kernels, in precision, in the experts chosen. With
#
#     w_t = exp(clamp(old_logprobs - rollout_logprobs, -20, 20))
#
# the policy loss of token t is multiplied by a weight, without a gradient (`algorithm.rollout_correction.rollout_is`):
#
#     token       min(w_t, C)                                       truncated importance sampling, Yao et al. 2025
#     sequence    min(product of the response's w, C), the same at all its tokens; the product's log in +-20
#     geometric   the same with the geometric mean of the response's w
#     icepop      w_t where low <= w_t <= C, else 0                 Ring-1T, arXiv 2510.18855
#
# Rejection (`rollout_rs`) is different. A token of weight 0 still counts in the denominators of the aggregation; a
# rejected token does not. `rejection_mask` returns the tokens that stay, and the token weights must be computed anew:
#
#     token       keep a token if low <= w_t <= high
#     sequence    keep a response if low <= product of its w <= high
#     geometric   keep a response if low <= geometric mean of its w <= high
#     off_policy  drop a response of negative advantage if mean of (rollout - old) > high      arXiv 2512.02556, 3.1
#
# So the objective of a token is w_t * L(pi / pi_old): the clip bounds the step from pi_old, the weight corrects the age of the
# sample. This is decoupled PPO, AReaL, arXiv 2505.24298, equation 5, with the proximal policy pi_old recomputed at the step's
# start. With `bypass_mode` it is L(pi / mu), plain PPO with the behaviour policy mu: one forward pass less where a step has
# several updates, but the clip then takes old tokens out of the loss that the update has not moved yet.
#
# Products and means are over the loss tokens of a response: `mask` is the loss mask. Lower bounds default to 1 / the
# upper one. The default is `token` with C = 2, which changes nothing where the engines agree. A correction bounds the
# damage of a mismatch and does not remove it: a mean |old - rollout| above 0.1 is a bug to be found.

# Records for `Metrics`, name -> (method, values): call `Metrics.<method>(name, values)` for each.
Method = Literal["mean_of", "population_std", "effective_sample_size", "max", "min"]
MetricRecords = dict[str, tuple[Method, Tensor]]


@torch.no_grad()
def importance_weights(
    old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, config: RolloutCorrection
) -> Tensor | None:
    """Computes the factors of the policy loss: [B, R], float32, 0 where masked; None without a correction. All [B, R], mask bool.

    A row's weights depend on this row alone. They can be computed within the loss, one micro-batch at a time.
    """
    if config.rollout_is is None:
        return None
    _, applied = _raw_and_applied(_log_ratios(old_logprobs, rollout_logprobs, mask), mask, config)
    return torch.where(mask, applied, 0.0).float()


@torch.no_grad()
def correction_weights(
    old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, config: RolloutCorrection
) -> tuple[Tensor | None, MetricRecords]:
    """Computes the factors as `importance_weights` does, and their records.

    `rollout_corr/rollout_is_mean`, `_std` (ddof 0) and `_eff_sample_size` describe the applied weights: of tokens, or of
    responses where a response has one weight. `_max` and `_min` are of the applied weights of tokens, of the raw ones of
    responses. `_ratio_fraction_high` and `_low` are the shares of raw weights beyond the bounds.
    """
    kind = config.rollout_is
    if kind is None:
        return None, {}
    per_response = kind in ("sequence", "geometric")
    raw, applied = _raw_and_applied(_log_ratios(old_logprobs, rollout_logprobs, mask), mask, config)
    low, high = _bounds(config.rollout_is_threshold_low, config.rollout_is_threshold)
    counted = mask.any(-1, keepdim=True) if per_response else mask
    raw_values, values = raw[counted], applied[counted]
    extremes = raw_values if per_response else values
    records: MetricRecords = {
        "rollout_corr/rollout_is_mean": ("mean_of", values),
        "rollout_corr/rollout_is_std": ("population_std", values),
        "rollout_corr/rollout_is_eff_sample_size": ("effective_sample_size", values),
        "rollout_corr/rollout_is_ratio_fraction_high": ("mean_of", (raw_values > high).double()),
        "rollout_corr/rollout_is_ratio_fraction_low": ("mean_of", (raw_values < low).double()),
    }
    if extremes.numel():
        records["rollout_corr/rollout_is_max"] = ("max", extremes.max())
        records["rollout_corr/rollout_is_min"] = ("min", extremes.min())
    return torch.where(mask, applied, 0.0).float(), records


@torch.no_grad()
def rejection_mask(
    old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, advantages: Tensor, config: RolloutCorrection
) -> tuple[Tensor | None, MetricRecords]:
    """`mask` without the rejected tokens; None: this config rejects nothing. All [B, R], masks bool.

    `rollout_corr/rollout_rs_masked_fraction`: share of the loss tokens that are rejected.
    """
    kind = config.rollout_rs
    if kind is None:
        return None, {}
    log_ratios = _log_ratios(old_logprobs, rollout_logprobs, mask)
    high = config.rollout_rs_threshold
    if kind == "off_policy":
        drift = -log_ratios.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)
        rejected = (drift > high) & (advantages < 0)
    else:
        weights = _weights_at_level(log_ratios, mask, kind)
        low, high = _bounds(config.rollout_rs_threshold_low, high)
        rejected = (weights < low) | (weights > high)
    kept = mask & ~rejected
    return kept, {"rollout_corr/rollout_rs_masked_fraction": ("mean_of", (mask & ~kept)[mask].double())}


def _log_ratios(old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor) -> Tensor:
    """log w_t in float64, unclamped but finite; 0 where masked, and where both log-probabilities are -inf."""
    difference = old_logprobs.double() - rollout_logprobs.double()
    return torch.nan_to_num(difference, nan=0.0, posinf=1e6, neginf=-1e6).masked_fill(~mask, 0.0)


def _bounds(low: float | None, high: float) -> tuple[float, float]:
    return low or 1.0 / high, high


def _raw_and_applied(log_ratios: Tensor, mask: Tensor, config: RolloutCorrection) -> tuple[Tensor, Tensor]:
    """The weights before and after their bounds: per token [B, R], or per response [B, 1]."""
    assert config.rollout_is is not None
    raw = _weights_at_level(log_ratios, mask, config.rollout_is)
    low, high = _bounds(config.rollout_is_threshold_low, config.rollout_is_threshold)
    if config.rollout_is == "icepop":
        return raw, torch.where((raw < low) | (raw > high), 0.0, raw)
    return raw, raw.clamp(max=high)


def _weights_at_level(log_ratios: Tensor, mask: Tensor, level: str) -> Tensor:
    """w per token [B, R], or per response [B, 1]."""
    if level == "sequence":
        log_ratios = log_ratios.sum(-1, keepdim=True)
    elif level == "geometric":
        log_ratios = log_ratios.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)
    return ratio_of(log_ratios)
