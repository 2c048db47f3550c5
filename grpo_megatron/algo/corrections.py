"""Correction for the rollout mismatch: weights on the policy loss, or rejected tokens.

Samples come from mu (the engine), gradients are taken from pi_old (the policy). Even at equal weights their probabilities
differ: in kernels, in precision, in the experts chosen. A correction bounds the damage and does not remove it: a mean
|old - rollout| above 0.1 is a bug to be found. The default is `token` with C = 2, which changes nothing where both agree.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from grpo_megatron.algo.kl import binary_kl
from grpo_megatron.algo.losses import ratio_of
from grpo_megatron.config import RolloutCorrection
from grpo_megatron.shapes import Bool, Float

# Records for `Metrics`, name -> (method, values): call `Metrics.<method>(name, values)` for each.
Method = Literal["mean_of", "population_std", "effective_sample_size", "max", "min"]
MetricRecords = dict[str, tuple[Method, Tensor]]


@torch.no_grad()
def mixed_old_logprobs(logprobs: Tensor, rollout_logprobs: Tensor, ages: Tensor) -> Tensor:
    """Computes log pi_prox = log mu + a / (a + 1) (log pi - log mu), in place of a pass for old ones (A-3PO, arXiv 2512.06547).

    a: the versions of weights between a token's and the step's start; 0 for samples of this step, whose pi_prox is mu. As
    AReaL's "loglinear". The ratio pi / pi_prox is clipped, and pi_prox / mu weighs. All [B, R].
    """
    mixed = rollout_logprobs + ages / (ages + 1.0) * (logprobs - rollout_logprobs)
    return torch.where(rollout_logprobs.isfinite(), mixed, rollout_logprobs)


@torch.no_grad()
def importance_weights(
    old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, config: RolloutCorrection
) -> Tensor | None:
    """Computes the factors of the policy loss: [B, R], float32, 0 where masked; None without a correction. All [B, R], mask bool.

        w_t         exp(clamp(old_logprobs - rollout_logprobs, -20, 20))
        token       min(w_t, C)                              truncated importance sampling, Yao et al. 2025
        sequence    min(product of the response's w, C), the same at all its tokens; the product's log in +-20
        geometric   the same with the geometric mean of the response's w
        icepop      w_t where low <= w_t <= C, else 0        Ring-1T, arXiv 2510.18855

    Products and means are over the loss tokens of a response. The lower bound is 1 / C by default. So the objective of a token is
    w_t * L(pi / pi_old): the clip bounds the step from pi_old, the weight corrects the age of the sample. This is decoupled PPO
    (AReaL, arXiv 2505.24298, equation 5), with the proximal policy pi_old recomputed at the step's start. With `bypass_mode`
    it is L(pi / mu), plain PPO with the behaviour policy mu: one forward pass less where a step has several updates, but the
    clip then takes old tokens out of the loss that the update has not moved yet.

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
    """Takes the rejected tokens out of `mask`; None: this config rejects nothing. All [B, R], masks bool.

        token       keep a token if low <= w_t <= high
        sequence    keep a response if low <= product of its w <= high
        geometric   keep a response if low <= geometric mean of its w <= high
        off_policy  drop a response of negative advantage if mean of (rollout - old) > high      arXiv 2512.02556, 3.1
        binary_kl   keep a token if D(old, rollout) <= high and D(rollout, old) <= high          KPop, as in AReaL (kl.binary_kl)

    A token of weight 0 still counts in the denominators of the aggregation; a rejected token does not: the token weights
    must be computed anew.
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
    elif kind == "binary_kl":
        rejected = (binary_kl(old_logprobs, rollout_logprobs) > high) | (
            binary_kl(rollout_logprobs, old_logprobs) > high
        )
    else:
        weights = _weights_at_level(log_ratios, mask, kind)
        low, high = _bounds(config.rollout_rs_threshold_low, high)
        rejected = (weights < low) | (weights > high)
    remaining = mask & ~rejected
    return remaining, {"rollout_corr/rollout_rs_masked_fraction": ("mean_of", (mask & ~remaining)[mask].double())}


def _log_ratios(
    old_logprobs: Float[Tensor, "B R"], rollout_logprobs: Float[Tensor, "B R"], mask: Bool[Tensor, "B R"]
) -> Float[Tensor, "B R"]:
    """Computes log w_t in float64, unclamped but finite; 0 where masked, and where both log-probabilities are -inf."""
    difference = old_logprobs.double() - rollout_logprobs.double()
    return torch.nan_to_num(difference, nan=0.0, posinf=1e6, neginf=-1e6).masked_fill(~mask, 0.0)


def _bounds(low: float | None, high: float) -> tuple[float, float]:
    return low or 1.0 / high, high


def _raw_and_applied(log_ratios: Tensor, mask: Tensor, config: RolloutCorrection) -> tuple[Tensor, Tensor]:
    """Computes the weights before and after their bounds: per token [B, R], or per response [B, 1]."""
    assert config.rollout_is is not None
    raw = _weights_at_level(log_ratios, mask, config.rollout_is)
    low, high = _bounds(config.rollout_is_threshold_low, config.rollout_is_threshold)
    if config.rollout_is == "icepop":
        return raw, torch.where((raw < low) | (raw > high), 0.0, raw)
    return raw, raw.clamp(max=high)


def _weights_at_level(log_ratios: Float[Tensor, "B R"], mask: Bool[Tensor, "B R"], level: str) -> Float[Tensor, "B _"]:
    """Computes w per token [B, R], or per response [B, 1]."""
    if level == "sequence":
        log_ratios = log_ratios.sum(-1, keepdim=True)
    elif level == "geometric":
        log_ratios = log_ratios.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)
    return ratio_of(log_ratios)
