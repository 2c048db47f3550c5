"""Policy losses, the frame: what a loss gets, and the one function that composes policy loss, KL and entropy into a scalar.

The losses are in the files of their families: ppo.py, grpo.py, reinforce.py, preference.py, reward_models.py. They
are on `[B, R]` tensors. rho = exp(clamp(logprobs - old_logprobs, -20, 20)), A is the advantage, sg stops the gradient.
The end of this file decides which passes a method needs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from grpo_megatron.algo.advantages import FAMILY_MODULES, advantage_estimators
from grpo_megatron.config import ActorConfig, AlgorithmConfig
from grpo_megatron.registry import FactRegistry
from grpo_megatron.shapes import Bool, Float

LOG_RATIO_CLAMP = 20.0  # one token cannot overflow exp, as in verl: no product with e^20 = 4.9e8 overflows float32
SEQUENCE_MEAN = ("seq-mean-token-mean",)


class MaskedInputs:
    """Tensors with entries of 0 outside `mask`. The constructor replaces them, before any exp: a -inf or NaN that is
    multiplied by a zero mask afterwards is NaN, in the value or in the gradient."""

    mask: Tensor

    def __post_init__(self) -> None:
        assert self.mask.dtype == torch.bool, f"mask must be bool, not {self.mask.dtype}"
        for name, value in vars(self).items():
            if value is None or name in ("mask", "observation_loss", "all_logprobs", "expert_weights"):
                continue
            # A [B, 1] or [R] tensor would broadcast into a plausible, wrong loss.
            assert value.shape == self.mask.shape, f"{name} is {value.shape}, mask is {self.mask.shape}"
            object.__setattr__(self, name, value.masked_fill(~self.mask, 0.0))


@dataclass(frozen=True)
class LossInputs(MaskedInputs):
    """The inputs of a loss: one micro-batch of B whole responses, all `[B, R]`, column t = response token t."""

    logprobs: Float[Tensor, "B R"]  # current policy; carries the gradient
    entropy: Float[Tensor, "B R"]  # current policy, nats
    old_logprobs: Float[Tensor, "B R"]  # the policy at the start of the update
    rollout_logprobs: Float[Tensor, "B R"]  # of the rollout engine
    ref_logprobs: Float[Tensor, "B R"] | None  # None: no reference model
    advantages: Float[Tensor, "B R"]
    mask: Bool[Tensor, "B R"]  # the loss mask: true at a token of the loss
    token_weights: Float[Tensor, "B R"]
    correction: Float[Tensor, "B R"] | None = None  # multiplies the policy loss alone; None: 1
    selected: Float[Tensor, "B R"] | None = None  # 1 at the tokens that selection.py has chosen; None: it chooses none
    ages: Float[Tensor, "B R"] | None = None  # A-3PO: steps since each token was sampled
    observation_loss: Float[Tensor, "B R"] | None = None  # ECHO: weighed, at text of the environment; not masked
    all_logprobs: Float[Tensor, "B R"] | None = None  # CHORD: as `logprobs`, not masked
    expert_weights: Float[Tensor, "B R"] | None = None  # CHORD: of tokens of an expert; not masked
    # Distillation (distillation.py). None: the batch has no teacher, or the objective is another one
    teacher_logprobs: Float[Tensor, "B R"] | None = None  # of the row's teacher
    teacher_weights: Float[Tensor, "B R"] | None = None  # coefficient * the token's weight; 0: no teacher
    teacher_index: Float[Tensor, "B R"] | None = None  # among the run's teachers; -1: none
    divergence: Float[Tensor, "B R"] | None = None  # between teacher and current policy; carries a gradient
    agreement: Float[Tensor, "B R"] | None = None  # 1: both have the same best token


class MetricSum(NamedTuple):
    """One micro-batch's share of a metric, detached. Add the shares of all micro-batches and ranks of a mini-batch.

    num_tokens None: `total` is the value. Its terms carried the token weights, so it aggregates as the loss does.
    num_tokens given: the value is total / num_tokens, a token mean.
    """

    total: Tensor  # []
    num_tokens: Tensor | None  # [], int64

    def plus(self, other: MetricSum) -> MetricSum:
        """Adds the shares of two micro-batches."""
        total = self.total.double() + other.total.double()
        if self.num_tokens is None or other.num_tokens is None:
            return MetricSum(total, None)
        return MetricSum(total, self.num_tokens + other.num_tokens)


# A metric by name: [B, R], averaged over the loss tokens, or a MetricSum that the loss has computed itself.
LossMetrics = dict[str, Tensor | MetricSum]
PolicyLoss = Callable[[LossInputs, ActorConfig], tuple[Tensor, LossMetrics]]  # the loss is [B, R]
# (logprobs, ref_logprobs) -> (penalty, metrics by name); all [B, R]. The metrics are averaged over tokens (kl.py).
KlPenalty = Callable[[Tensor, Tensor], tuple[Tensor, dict[str, Tensor]]]


@dataclass(frozen=True)
class LossFacts:
    """Facts about a policy loss, for the checks and the trainer. Another loss, such as a user's own, declares them too:

    @policy_losses.declare(paired=True, needs_reference=True, aggregation=("seq-mean-token-mean",))
    def my_preference_loss(inputs: LossInputs, config: ActorConfig) -> tuple[Tensor, LossMetrics]: ...

    It gets whole responses, so it can compute sequence-level ratios. Tokens outside the loss are 0 in every tensor.
    """

    is_likelihood: bool = False  # no ratio to old_logprobs: samples from any source, and no mismatch to correct
    paired: bool = False  # rows 2i (chosen) and 2i + 1 (rejected) of a micro-batch belong together
    needs_reference: bool = False  # reads ref_logprobs, with a KL penalty or without
    aggregation: tuple[str, ...] = ()  # the loss_agg_mode values under which it is its paper's loss; empty: any
    scores: Literal["", "response", "step"] = ""  # what the model scores: it has a scalar head instead of a vocabulary
    is_proportional: bool = False  # to the advantage of its row: where that is 0, so are the loss and its gradient
    geometric_correction: bool = False  # one value per sequence, corrected by the geometric mean of its tokens' weights

    def __post_init__(self) -> None:
        if isinstance(self.aggregation, str):
            raise TypeError(f"aggregation={self.aggregation!r} is not a tuple; write ({self.aggregation!r},)")


policy_losses: FactRegistry[PolicyLoss, LossFacts] = FactRegistry("policy loss", LossFacts(), FAMILY_MODULES)


def ratio_metrics(log_ratio: Tensor, clipped: Tensor, lower: Tensor | None = None) -> LossMetrics:
    """Lists the metrics of a loss with a ratio, all [B, R]. `log_ratio` is unclamped; `lower` None: no lower clip."""
    return {
        "actor/pg_clipfrac": clipped,
        "actor/pg_clipfrac_lower": torch.zeros_like(clipped) if lower is None else lower,
        "actor/ppo_kl": -log_ratio,
        "actor/ratio_clamp_frac": log_ratio.abs() > LOG_RATIO_CLAMP,
    }


def clamp_log_ratio(log_ratio: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Clamps `log_ratio` to +-LOG_RATIO_CLAMP, elementwise. `actor/ratio_clamp_frac` counts the clamped tokens."""
    return log_ratio.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)


def ratio_of(log_ratio: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Computes exp of the clamped log-ratio, elementwise."""
    return clamp_log_ratio(log_ratio).exp()


def sequence_mean(values: Float[Tensor, "B R"], mask: Bool[Tensor, "B R"]) -> Float[Tensor, "B 1"]:
    """Computes the mean over each row's loss tokens, [B, R] -> [B, 1]; 0 for a row without any. Masked entries must be 0."""
    return values.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)


def clipped_surrogate(
    inputs: LossInputs, config: ActorConfig, ratio: Tensor, log_ratio: Tensor
) -> tuple[Tensor, LossMetrics]:
    """Computes max(-A ratio, -A clamp(ratio, 1 - clip_ratio_low, 1 + clip_ratio_high)) and its metrics."""
    unclipped = -inputs.advantages * ratio
    clipped = -inputs.advantages * ratio.clamp(1.0 - config.clip_ratio_low, 1.0 + config.clip_ratio_high)
    return torch.maximum(unclipped, clipped), ratio_metrics(log_ratio, clipped > unclipped)


def total_loss(
    inputs: LossInputs, config: ActorConfig, policy_loss: PolicyLoss, kl_penalty: KlPenalty | None
) -> tuple[Tensor, dict[str, MetricSum]]:
    """Computes one micro-batch's share of the mini-batch's loss, and of its metrics (see `MetricSum`).

        sum over tokens of  w * (c * policy loss + kl_loss_coef * KL - entropy_coeff * entropy) + w' * divergence

    w are the token weights (plan.py), which are normalised over the optimizer step, c the correction (corrections.py; 1
    without one), w' the weights of the teachers
    (distillation.py; without them the last term is absent). This is a plain sum: add it, and its gradient, over
    micro-batches and ranks; never average.

    Returns a scalar with gradient: 0, with zero gradients, when everything is masked or B is 0. `actor/pg_loss`,
    `actor/entropy_loss` and, with a penalty, `actor/kl_loss` aggregate like the loss, before their coefficients.
    `actor/entropy` and the metrics of the policy loss and of the penalty are means over the loss tokens.
    `kl_penalty` None: no KL term; otherwise `inputs.ref_logprobs` is required. `use_unbiased_kl` multiplies it by rho, with
    gradient (DeepSeek-V3.2, arXiv 2512.02556, 3.1): for k3 that is rho (logprobs - ref_logprobs), which is unbiased off-policy.
    """
    weights = inputs.token_weights
    per_token, loss_metrics = policy_loss(inputs, config)
    per_token = torch.where(inputs.mask, per_token, 0.0)
    if config.top_entropy_quantile < 1.0 and inputs.selected is not None:
        per_token = per_token * inputs.selected
        loss_metrics = {**loss_metrics, "actor/selected_frac": inputs.selected}
    if inputs.correction is not None:
        per_token = per_token * _correction(inputs.mask, inputs.correction, policy_loss)
    weighted = {"actor/pg_loss": per_token, "actor/entropy_loss": inputs.entropy}

    if kl_penalty is not None:
        assert inputs.ref_logprobs is not None, "a KL loss needs ref_logprobs"
        kl, kl_metrics = kl_penalty(inputs.logprobs, inputs.ref_logprobs)
        if config.use_unbiased_kl:
            kl = kl * ratio_of(inputs.logprobs - inputs.old_logprobs)
        weighted["actor/kl_loss"] = kl
        loss_metrics = {**loss_metrics, **kl_metrics}
        # With a coefficient of 0 the term must not be added: 0 * inf is NaN.
        if config.kl_loss_coef != 0.0:
            per_token = per_token + config.kl_loss_coef * kl
    if config.entropy_coeff != 0.0:
        per_token = per_token - config.entropy_coeff * inputs.entropy

    total = (weights * per_token).sum()
    metrics = {name: MetricSum((weights * value.detach()).sum(), None) for name, value in weighted.items()}
    if inputs.divergence is not None:
        assert inputs.teacher_weights is not None
        distilled = (inputs.teacher_weights * inputs.divergence).sum()
        total, metrics["distillation/loss"] = total + distilled, MetricSum(distilled.detach(), None)
    if inputs.observation_loss is not None:  # ECHO: a weighed cross entropy on what the environment has written
        observed = inputs.observation_loss.sum()
        total, metrics["actor/observation_loss"] = total + observed, MetricSum(observed.detach(), None)
    num_tokens = inputs.mask.sum()
    for name, metric in {**loss_metrics, "actor/entropy": inputs.entropy}.items():
        if isinstance(metric, Tensor):
            masked = torch.where(inputs.mask, metric.detach().to(weights.dtype), 0.0)
            metric = MetricSum(masked.sum(), num_tokens)
        metrics[name] = metric
    return total, metrics


def _correction(mask: Tensor, correction: Tensor, policy_loss: PolicyLoss) -> Tensor:
    """Computes the factors of the policy loss: [B, R], or [B, 1] for losses with `geometric_correction`."""
    if not policy_losses.facts_of(policy_loss).geometric_correction:
        return correction
    logs = torch.where(mask, correction, 1.0).log()  # one weight of 0 makes the sequence's mean 0
    return (logs.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)).exp()


# -- What a method needs computed: the trainer and the checks must agree on it -----------------------------------------


def loss_facts(actor: ActorConfig) -> LossFacts:
    """Looks up the facts of `actor.loss_mode`. Raises ValueError on an unknown name."""
    return policy_losses.facts(actor.loss_mode)


def is_corrected(algorithm: AlgorithmConfig, actor: ActorConfig) -> bool:
    """Tests that a rollout correction applies: to samples of the policy, under a loss with a ratio."""
    correction = algorithm.rollout_correction
    configured = correction.rollout_is is not None or correction.rollout_rs is not None
    return configured and algorithm.source == "policy" and not loss_facts(actor).is_likelihood


def selected_by(actor: ActorConfig) -> str:
    """Names the rule that chooses tokens of a step (selection.py): clip_cov, kl_cov, entropy, or "" for none."""
    if actor.loss_mode in ("clip_cov", "kl_cov"):
        return actor.loss_mode
    return "entropy" if actor.top_entropy_quantile < 1.0 else ""


def needs_old_logprobs(algorithm: AlgorithmConfig, actor: ActorConfig) -> bool:
    """Tests that the loss or the reward reads the policy's log-probabilities from before the update."""
    needs_norms = advantage_estimators.facts(algorithm.adv_estimator).needs_score_norms
    return not loss_facts(actor).is_likelihood or has_kl_in_reward(algorithm) or needs_norms


def reasons_for_old_pass(algorithm: AlgorithmConfig, actor: ActorConfig, train_batch_size: int) -> list[str]:
    """Lists why old log-probabilities need a forward pass before the update. Empty: they have none (`folds_old_logprobs`)."""
    if not needs_old_logprobs(algorithm, actor):
        return []
    reasons = []
    num_updates = actor.num_updates(1, train_batch_size)
    correction = algorithm.rollout_correction
    if num_updates > 1 and not correction.bypass_mode and correction.prox_logp_method == "recompute":
        reasons.append(f"{num_updates} optimizer steps per rollout read the first one's")
    if has_kl_in_reward(algorithm):
        reasons.append("the KL in the reward changes the advantages")
    if advantage_estimators.facts(algorithm.adv_estimator).needs_score_norms:
        reasons.append(f"adv_estimator={algorithm.adv_estimator} reads the policy's probabilities")
    rejection = algorithm.rollout_correction.rollout_rs
    if rejection is not None and is_corrected(algorithm, actor):
        reasons.append(f"rollout_rs={rejection} changes the token counts of the loss")
    if selected_by(actor):
        reasons.append("tokens are chosen among all of the step")
    return reasons


def folds_old_logprobs(algorithm: AlgorithmConfig, actor: ActorConfig, train_batch_size: int) -> bool:
    """Tests that the old log-probabilities are those of the update's own forward pass.

    One optimizer step per rollout is made at the weights that they are defined by, so the pass before it is left out.
    """
    is_one_step = actor.num_updates(1, train_batch_size) == 1  # bypass_mode reads none in more steps
    is_read = is_one_step and needs_old_logprobs(algorithm, actor)
    return is_read and not reasons_for_old_pass(algorithm, actor, train_batch_size)


def forward_only_at_zero_advantage(algorithm: AlgorithmConfig, actor: ActorConfig) -> bool:
    """Tests that rows of advantage 0 have no gradient, and that the advantages of the plan are final.

    The loss is then weight x policy loss alone, and the policy loss is a multiple of the advantage.
    """
    is_proportional = loss_facts(actor).is_proportional
    facts = advantage_estimators.facts(algorithm.adv_estimator)
    is_final = not has_kl_in_reward(algorithm) and not facts.needs_values and not facts.needs_score_norms
    other_terms = (actor.entropy_coeff, actor.entropy_target, actor.echo_coef)
    return is_proportional and is_final and not has_kl_loss(actor) and not any(other_terms)


def has_kl_loss(actor: ActorConfig) -> bool:
    """Tests that the loss has a KL to the reference. With a coefficient of 0 it is not computed either."""
    return actor.use_kl_loss and actor.kl_loss_coef != 0.0


def has_kl_in_reward(algorithm: AlgorithmConfig) -> bool:
    """Tests that a KL is subtracted from the rewards. A coefficient of 0 stays 0, also if it is adaptive."""
    return algorithm.use_kl_in_reward and algorithm.kl_ctrl.kl_coef != 0.0


def reads_reference(algorithm: AlgorithmConfig, actor: ActorConfig) -> bool:
    """Tests that a loss or a reward reads the reference's log-probabilities."""
    return has_kl_loss(actor) or loss_facts(actor).needs_reference or has_kl_in_reward(algorithm)


def needs_reference(algorithm: AlgorithmConfig, actor: ActorConfig) -> bool:
    """Tests that a reference is built: its log-probabilities are read, or it generates the responses."""
    return reads_reference(algorithm, actor) or algorithm.source == "initial"
