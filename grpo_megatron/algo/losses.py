"""Policy losses per token, and the one function that composes policy loss, KL and entropy into a scalar.

With rho = exp(clamp(logprobs - old_logprobs, -20, 20)), A the advantage and sg the stop of the gradient:

    vanilla   max(-A rho, -A clamp(rho, 1 - clip_ratio_low, 1 + clip_ratio_high))        PPO, arXiv 1707.06347
              where A < 0 also at most -A clip_ratio_c (dual clip)                       arXiv 1912.09729
              clip_ratio_high > clip_ratio_low is DAPO's clip-higher                     arXiv 2503.14476
    cispo     -sg(clamp(rho, 1 - cispo_clip_ratio_low, 1 + clip_ratio_high)) A logprobs  arXiv 2506.13585
    sapo      -A 4/tau sigmoid(tau (rho - 1)), tau = tau_pos where A > 0, else tau_neg   arXiv 2511.20347
    gpg, sft  -A logprobs                                    arXiv 2504.02546; A = 1: maximum likelihood

    total     sum over tokens of  w * (c * policy loss + kl_loss_coef * KL - entropy_coeff * entropy)

The losses of whole responses, of a scalar head and of the critic follow below. c is the correction of
`divergence.py` (1 without one). w are the token weights of `plan.py`, which are normalised over the optimizer step. The
total is therefore a **plain sum**: add it, and its gradient, over micro-batches and ranks; never average.

Departures from the papers: the log-ratio is clamped, so that one token cannot overflow exp (as in verl).
`actor/ratio_clamp_frac` counts those tokens; `actor/ppo_kl` is reported unclamped. CISPO's lower bound is off by
default, as in its paper.

Another loss is one function with the signature of `PolicyLoss`: registered here, or the user's own
`package.module:function`. It gets whole responses, so it can compute sequence-level ratios. Tokens outside the loss are
0 in every tensor it gets. Declare what validation must know about it (the fields of `LossFacts`):

    @policy_losses.declare(paired=True, needs_reference=True, aggregation=("seq-mean-token-mean",))
    def my_preference_loss(inputs: LossInputs, config: ActorConfig) -> tuple[Tensor, LossMetrics]: ...
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as functional
from torch import Tensor

from grpo_megatron.algo.advantages import advantage_estimators
from grpo_megatron.algo.divergence import LOG_RATIO_CLAMP, KlPenalty, ratio_of
from grpo_megatron.config import ActorConfig, AlgorithmConfig
from grpo_megatron.registry import FactRegistry


class _MaskedInputs:
    """The constructor replaces entries outside `mask` of every tensor by 0. This must happen before any exp: a -inf or NaN
    that is multiplied by a zero mask afterwards is NaN, in the value or in the gradient."""

    mask: Tensor

    def __post_init__(self) -> None:
        assert self.mask.dtype == torch.bool, f"mask must be bool, not {self.mask.dtype}"
        for name, value in vars(self).items():
            if value is None or name == "mask":
                continue
            # A [B, 1] or [R] tensor would broadcast into a plausible, wrong loss.
            assert value.shape == self.mask.shape, f"{name} is {value.shape}, mask is {self.mask.shape}"
            object.__setattr__(self, name, value.masked_fill(~self.mask, 0.0))


@dataclass(frozen=True)
class LossInputs(_MaskedInputs):
    """The inputs of a loss: one micro-batch of B whole responses, all `[B, R]`, column t = response token t."""

    logprobs: Tensor  # current policy; carries the gradient
    entropy: Tensor  # current policy, nats
    old_logprobs: Tensor  # the policy at the start of the update
    rollout_logprobs: Tensor  # of the rollout engine
    ref_logprobs: Tensor | None  # None: no reference model
    advantages: Tensor
    mask: Tensor  # bool, the loss mask: true at a token of the loss
    token_weights: Tensor
    correction: Tensor | None = None  # multiplies the policy loss alone; None: 1


class MetricSum(NamedTuple):
    """One micro-batch's share of a metric, detached. Add the shares of all micro-batches and ranks of a mini-batch.

    num_tokens None: `total` is the value. Its terms carried the token weights, so it aggregates as the loss does.
    num_tokens given: the value is total / num_tokens, a token mean.
    """

    total: Tensor  # []
    num_tokens: Tensor | None  # [], int64

    def plus(self, other: MetricSum) -> MetricSum:
        """The share of both micro-batches together."""
        total = self.total.double() + other.total.double()
        if self.num_tokens is None or other.num_tokens is None:
            return MetricSum(total, None)
        return MetricSum(total, self.num_tokens + other.num_tokens)


# A metric by name: [B, R], averaged over the loss tokens, or a MetricSum that the loss has computed itself.
LossMetrics = dict[str, Tensor | MetricSum]
PolicyLoss = Callable[[LossInputs, ActorConfig], tuple[Tensor, LossMetrics]]  # the loss is [B, R]


@dataclass(frozen=True)
class LossFacts:
    """Facts about a policy loss that validation and the trainer read."""

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


policy_losses: FactRegistry[PolicyLoss, LossFacts] = FactRegistry("policy loss", LossFacts())


def ratio_metrics(log_ratio: Tensor, clipped: Tensor, lower: Tensor | None = None) -> LossMetrics:
    """The metrics of every loss with a ratio, all [B, R]. `log_ratio` is unclamped; `lower` None: no lower clip."""
    return {
        "actor/pg_clipfrac": clipped,
        "actor/pg_clipfrac_lower": torch.zeros_like(clipped) if lower is None else lower,
        "actor/ppo_kl": -log_ratio,
        "actor/ratio_clamp_frac": log_ratio.abs() > LOG_RATIO_CLAMP,
    }


@policy_losses.register("vanilla", is_proportional=True)
def vanilla(inputs: LossInputs, config: ActorConfig) -> tuple[Tensor, LossMetrics]:
    """PPO's clipped surrogate with asymmetric bounds and the dual clip; the loss of GRPO and DAPO.

    Reports `actor/pg_clipfrac` (clipped surrogate > unclipped one, as losses), `actor/pg_clipfrac_lower` (dual clip
    active), `actor/ppo_kl` (old - new, unclamped) and `actor/ratio_clamp_frac`.
    """
    log_ratio = inputs.logprobs - inputs.old_logprobs
    loss, metrics = _clip_form(inputs, config, ratio_of(log_ratio), log_ratio)
    if config.clip_ratio_c is not None:
        bound = -inputs.advantages * config.clip_ratio_c
        dual_active = (inputs.advantages < 0) & (loss > bound)
        loss = torch.where(dual_active, bound, loss)
        metrics["actor/pg_clipfrac_lower"] = dual_active
    return loss, metrics


def _clip_form(inputs: LossInputs, config: ActorConfig, ratio: Tensor, log_ratio: Tensor) -> tuple[Tensor, LossMetrics]:
    unclipped = -inputs.advantages * ratio
    clipped = -inputs.advantages * ratio.clamp(1.0 - config.clip_ratio_low, 1.0 + config.clip_ratio_high)
    return torch.maximum(unclipped, clipped), ratio_metrics(log_ratio, clipped > unclipped)


@policy_losses.register("cispo", is_proportional=True)
def cispo(inputs: LossInputs, config: ActorConfig) -> tuple[Tensor, LossMetrics]:
    """REINFORCE with a clipped importance weight: a clipped token keeps its gradient, at a bounded weight.

    `actor/pg_clipfrac` is the share of tokens whose ratio is outside the bounds, whatever the advantage.
    """
    log_ratio = inputs.logprobs - inputs.old_logprobs
    ratio = ratio_of(log_ratio).detach()
    weight = ratio.clamp(max(0.0, 1.0 - config.cispo_clip_ratio_low), 1.0 + config.clip_ratio_high)
    return -weight * inputs.advantages * inputs.logprobs, ratio_metrics(log_ratio, weight != ratio)


@policy_losses.register("sapo", is_proportional=True, aggregation=("seq-mean-token-mean",))
def sapo(inputs: LossInputs, config: ActorConfig) -> tuple[Tensor, LossMetrics]:
    """A sigmoid gate in place of the clip. Its slope is 1 at ratio 1 and decreases smoothly on both sides."""
    log_ratio = inputs.logprobs - inputs.old_logprobs
    tau = torch.full_like(log_ratio, config.tau_neg).masked_fill(inputs.advantages > 0, config.tau_pos)
    gate = torch.sigmoid(tau * (ratio_of(log_ratio) - 1.0)) * 4.0 / tau
    return -inputs.advantages * gate, ratio_metrics(log_ratio, torch.zeros_like(inputs.mask))


@policy_losses.register("gpg", is_proportional=True)
def policy_gradient(inputs: LossInputs, config: ActorConfig) -> tuple[Tensor, LossMetrics]:
    """The plain policy gradient on the policy's own samples."""
    return -inputs.advantages * inputs.logprobs, {}


@policy_losses.register("sft", is_proportional=True, is_likelihood=True)
def log_likelihood(inputs: LossInputs, config: ActorConfig) -> tuple[Tensor, LossMetrics]:
    """The formula of `gpg` on samples from any source. Where the advantage is 1, it is supervised learning."""
    return policy_gradient(inputs, config)


def total_loss(
    inputs: LossInputs, config: ActorConfig, policy_loss: PolicyLoss, kl_penalty: KlPenalty | None
) -> tuple[Tensor, dict[str, MetricSum]]:
    """One micro-batch's share of the mini-batch's loss, and of its metrics (see `MetricSum`).

    Returns a scalar with gradient: 0, with zero gradients, when everything is masked or B is 0. `actor/pg_loss`,
    `actor/entropy_loss` and, with a penalty, `actor/kl_loss` aggregate like the loss, before their coefficients.
    `actor/entropy` and the metrics of the policy loss and of the penalty are means over the loss tokens.
    `kl_penalty` None: no KL term; otherwise `inputs.ref_logprobs` is required.
    """
    weights = inputs.token_weights
    per_token, loss_metrics = policy_loss(inputs, config)
    per_token = torch.where(inputs.mask, per_token, 0.0)
    if inputs.correction is not None:
        per_token = per_token * _correction(inputs.mask, inputs.correction, policy_loss)
    weighted = {"actor/pg_loss": per_token, "actor/entropy_loss": inputs.entropy}

    if kl_penalty is not None:
        assert inputs.ref_logprobs is not None, "a KL loss needs ref_logprobs"
        kl, kl_metrics = kl_penalty(inputs.logprobs, inputs.ref_logprobs)
        weighted["actor/kl_loss"] = kl
        loss_metrics = {**loss_metrics, **kl_metrics}
        # With a coefficient of 0 the term must not be added: 0 * inf is NaN.
        if config.kl_loss_coef != 0.0:
            per_token = per_token + config.kl_loss_coef * kl
    if config.entropy_coeff != 0.0:
        per_token = per_token - config.entropy_coeff * inputs.entropy

    metrics = {name: MetricSum((weights * value.detach()).sum(), None) for name, value in weighted.items()}
    num_tokens = inputs.mask.sum()
    for name, metric in {**loss_metrics, "actor/entropy": inputs.entropy}.items():
        if isinstance(metric, Tensor):
            masked = torch.where(inputs.mask, metric.detach().to(weights.dtype), 0.0)
            metric = MetricSum(masked.sum(), num_tokens)
        metrics[name] = metric
    return (weights * per_token).sum(), metrics


def _correction(mask: Tensor, correction: Tensor, policy_loss: PolicyLoss) -> Tensor:
    """What multiplies the policy loss: [B, R], or [B, 1] for losses with `geometric_correction`."""
    if not policy_losses.facts_of(policy_loss).geometric_correction:
        return correction
    logs = torch.where(mask, correction, 1.0).log()  # one weight of 0 makes the sequence's mean 0
    return (logs.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)).exp()


# -- Losses of whole responses -----------------------------------------------------------------------------------------
# Policy losses of whole responses: ratios of sequences, and pairs of sequences.
#
# With d_t = logprobs - old_logprobs at token t, over the n loss tokens of a response, A its advantage:
#
#     gspo        clip form of vanilla (no dual clip) with s = exp(mean of d_t)             arXiv 2507.18071
#     gspo_token  the same with s_t = sg(s) exp(logprobs - sg(logprobs)): same value, and the same gradient where A is one
#                 number for the sequence; A may differ from token to token
#     gmpo        -A exp(mean of g_t), g_t = the smaller of d_t and clamp(d_t, -clip_ratio_low, clip_ratio_high) where
#                 A > 0, the larger elsewhere; "geo_mean" in verl                           arXiv 2507.20673
#     dpo         -log sigmoid(dpo_beta * margin), margin = sum of (logprobs - ref_logprobs) of the chosen response minus
#                 the same of the rejected one                                              arXiv 2305.18290
#
# The ratio of whole sequences is exp(sum of d_t). GSPO takes the mean, as its paper defines it: for independent d_t of
# standard deviation 0.01, the sum over 4,096 tokens has 0.64, and more for longer responses, so that no bound suits all
# lengths and one token can clip a response. The mean has 0.00016, which is the scale of the paper's bounds. With the mean
# the gradient of a response is its tokens' mean, so a long response weighs no more than a short one.
#
# Every loss token of a sequence (of a pair) has the value of the sequence (of the pair). Under seq-mean-token-mean, with
# weights 1 / (N n), the tokens of a sequence add up to 1/N of its value. The total is the mean over the N sequences **of
# the optimizer step**, whatever the micro-batches and ranks. (Others average GMPO over a micro-batch.) For dpo, two
# sequences of weight 1/N each make 2/N = 1 over the number of pairs. Each loss declares this aggregation as a fact.
#
# Compared with vanilla, useful clip ratios are far smaller for gspo (3e-4 and 4e-4 in the paper). They are larger for gmpo
# (0.4), whose bounds are in log space.

SEQUENCE_MEAN = ("seq-mean-token-mean",)


def sequence_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over each row's loss tokens, [B, R] -> [B, 1]; 0 for a row without any. Masked entries must be 0."""
    return values.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)


@policy_losses.register("gspo", is_proportional=True, aggregation=SEQUENCE_MEAN)
def gspo(inputs: LossInputs, config: ActorConfig) -> tuple[Tensor, LossMetrics]:
    """One ratio per sequence, which is clipped as a whole."""
    log_ratio = inputs.logprobs - inputs.old_logprobs
    ratio = ratio_of(sequence_mean(log_ratio, inputs.mask)).expand_as(log_ratio)
    return _clip_form(inputs, config, ratio, log_ratio)


@policy_losses.register("gspo_token", is_proportional=True, aggregation=SEQUENCE_MEAN)
def gspo_token(inputs: LossInputs, config: ActorConfig) -> tuple[Tensor, LossMetrics]:
    """The sequence's ratio with each token's own gradient."""
    log_ratio = inputs.logprobs - inputs.old_logprobs
    ratio = ratio_of(sequence_mean(log_ratio.detach(), inputs.mask))
    return _clip_form(inputs, config, ratio * (inputs.logprobs - inputs.logprobs.detach()).exp(), log_ratio)


@policy_losses.register("gmpo", "geo_mean", is_proportional=True, aggregation=SEQUENCE_MEAN, geometric_correction=True)
def gmpo(inputs: LossInputs, config: ActorConfig) -> tuple[Tensor, LossMetrics]:
    """Geometric mean of token ratios that are clipped in log space. The advantage is the mean over the tokens.

    `actor/pg_clipfrac` and `_lower` are the shares of tokens outside the bounds where A > 0 and where A < 0 (as verl).
    """
    log_ratio = inputs.logprobs - inputs.old_logprobs
    advantage = sequence_mean(inputs.advantages, inputs.mask)
    bounded = log_ratio.clamp(-config.clip_ratio_low, config.clip_ratio_high)
    pessimistic = torch.where(advantage > 0, torch.minimum(log_ratio, bounded), torch.maximum(log_ratio, bounded))
    ratio = ratio_of(sequence_mean(pessimistic, inputs.mask))
    outside = bounded != log_ratio
    metrics = ratio_metrics(log_ratio, outside & (advantage > 0), outside & (advantage < 0))
    return (-advantage * ratio).expand_as(log_ratio), metrics


@policy_losses.register("dpo", is_likelihood=True, paired=True, needs_reference=True, aggregation=SEQUENCE_MEAN)
def dpo(inputs: LossInputs, config: ActorConfig) -> tuple[Tensor, LossMetrics]:
    """Rows 2i (chosen, advantage 1) and 2i + 1 (rejected, advantage -1) are a pair.

    Reports `actor/dpo_accuracy` (margin above 0) and `actor/dpo_margin` (nats, without beta), means over pairs.
    """
    assert inputs.ref_logprobs is not None, "the dpo loss needs ref_logprobs"
    assert len(inputs.mask) % 2 == 0, f"{len(inputs.mask)} rows are no pairs"
    side = torch.ones_like(inputs.advantages)
    side[1::2] = -1.0
    assert bool(((inputs.advantages == side) | ~inputs.mask).all()), (
        "rows are not chosen (+1) and rejected (-1) in turn"
    )
    log_ratio = (inputs.logprobs - inputs.ref_logprobs).sum(-1)  # [B]
    margin = log_ratio[0::2] - log_ratio[1::2]  # [B / 2]
    return _per_token(-functional.logsigmoid(config.dpo_beta * margin), inputs.mask), {
        "actor/dpo_accuracy": _pair_mean(inputs, (margin > 0).to(margin.dtype)),
        "actor/dpo_margin": _pair_mean(inputs, margin),
    }


def _per_token(pair_values: Tensor, mask: Tensor) -> Tensor:
    """Each pair's value at every token of both its rows: [B / 2] -> [B, R]."""
    return pair_values.repeat_interleave(2)[:, None].expand_as(mask)


def _pair_mean(inputs: LossInputs, pair_values: Tensor) -> MetricSum:
    return MetricSum((inputs.token_weights * _per_token(pair_values.detach(), inputs.mask)).sum(), None)


# -- Losses of a scalar head -------------------------------------------------------------------------------------------
# Losses of a scalar head: the model that is trained scores responses, or steps of responses.
#
# The "log-probability" of such a model at a token is its score there, and the loss mask is 1 at the scored tokens only:
#
#     bradley_terry  -log sigmoid(s_chosen - s_rejected - margin)           arXiv:2203.02155, equation 1; margin: 2307.09288
#     step_labels    -log sigmoid(s) of a right step, -log sigmoid(-s) of a wrong one: binary cross entropy with the probability
#                    sigmoid(s) that the step is right                                            Math-Shepherd, arXiv:2312.08935
#
# The estimators `preference` and `step_labels` (advantages.py) put the labels into the advantages: 1 + margin for the chosen and
# -(1 + margin) for the rejected response of a pair, 1 at the last token of a right step and -1 at that of a wrong one.
#
# bradley_terry is a mean over the pairs of the optimizer step (seq-mean-token-mean; each response has one scored token). The
# mean of step_labels is over all its steps (token-mean), or over the mean of each response (seq-mean-token-mean).


@policy_losses.register("bradley_terry", is_likelihood=True, paired=True, scores="response", aggregation=SEQUENCE_MEAN)
def bradley_terry(inputs: LossInputs, config: ActorConfig) -> tuple[Tensor, LossMetrics]:
    """Rows 2i (chosen, advantage 1 + margin) and 2i + 1 (rejected) are a pair.

    Reports `actor/pair_accuracy` (s_chosen > s_rejected; a tie counts half) and `actor/score_margin` (their difference), means
    over pairs.
    """
    assert len(inputs.mask) % 2 == 0, f"{len(inputs.mask)} rows are no pairs"
    scores, labels = (sequence_mean(x, inputs.mask).squeeze(-1) for x in (inputs.logprobs, inputs.advantages))  # [B]
    is_pair = (labels[0::2] == -labels[1::2]) & (labels[0::2] >= 1)
    assert bool((is_pair | ~inputs.mask.any(-1)[0::2]).all()), "rows are not chosen (1 or more) and rejected in turn"
    difference, margin = scores[0::2] - scores[1::2], labels[0::2] - 1.0  # [B / 2]
    correct = (difference > 0).to(difference.dtype) + 0.5 * (difference == 0).to(difference.dtype)
    return _per_token(functional.softplus(margin - difference), inputs.mask), {
        "actor/pair_accuracy": _pair_mean(inputs, correct),
        "actor/score_margin": _pair_mean(inputs, difference),
    }


@policy_losses.register(
    "step_labels", is_likelihood=True, scores="step", aggregation=("token-mean", "seq-mean-token-mean")
)
def step_labels(inputs: LossInputs, config: ActorConfig) -> tuple[Tensor, LossMetrics]:
    """The advantage of a scored token is 1 (right) or -1 (wrong).

    Reports `actor/step_accuracy` (the sign of the score; 0 counts half) and `actor/step_right` (share of right steps), means over
    steps.
    """
    signed = inputs.logprobs * inputs.advantages
    correct = (signed > 0).to(signed.dtype) + 0.5 * (signed == 0).to(signed.dtype)
    return functional.softplus(-signed), {"actor/step_accuracy": correct, "actor/step_right": inputs.advantages > 0}


# -- The loss of the critic --------------------------------------------------------------------------------------------
# The critic's loss: squared error with a bounded move per step, as in PPO's reference implementation and verl.
#
#     v' = clamp(v, v_old - c, v_old + c)
#     loss per token = 1/2 max((v - R)^2, (v' - R)^2)
#
# v_old are the values before the step's first update, R their targets (`returns.py`), c is `critic.cliprange_value`. The maximum
# takes the gradient from a value that has moved more than c and is still nearer to R than v'. Without c it is the squared
# error. The total is a plain sum over tokens of weight x loss, like the policy's.


@dataclass(frozen=True)
class ValueInputs(_MaskedInputs):
    """The inputs of the value loss: one micro-batch of B whole responses, all `[B, R]`."""

    values: Tensor  # of the current critic; carries the gradient
    old_values: Tensor
    returns: Tensor
    mask: Tensor  # bool, the loss mask
    token_weights: Tensor


def value_loss(inputs: ValueInputs, cliprange: float | None) -> tuple[Tensor, dict[str, MetricSum]]:
    """One micro-batch's share of the mini-batch's loss, a scalar with gradient, and of its metrics.

    `critic/vf_loss` aggregates like the loss. `critic/vf_clipfrac` (share of tokens whose loss is the clipped one) and
    `critic/vpred_mean` are means over the loss tokens.
    """
    values, old, returns = inputs.values, inputs.old_values, inputs.returns
    error = (values - returns).square()
    clipped_error = error
    if cliprange is not None:
        clipped_error = (torch.minimum(torch.maximum(values, old - cliprange), old + cliprange) - returns).square()
    loss = (inputs.token_weights * 0.5 * torch.maximum(error, clipped_error)).sum()
    count = inputs.mask.sum()
    is_clipped = (clipped_error > error).detach().to(values.dtype).sum()
    return loss, {
        "critic/vf_loss": MetricSum(loss.detach(), None),
        "critic/vf_clipfrac": MetricSum(is_clipped, count),
        "critic/vpred_mean": MetricSum(values.detach().sum(), count),
    }


# -- What a method needs computed: properties of the config that the trainer and the checks must agree on --------------


def loss_facts(actor: ActorConfig) -> LossFacts:
    """The facts of `actor.loss_mode`. Raises ValueError on an unknown name."""
    return policy_losses.facts(actor.loss_mode)


def is_corrected(algorithm: AlgorithmConfig, actor: ActorConfig) -> bool:
    """Whether a rollout correction applies: to samples of the policy, under a loss with a ratio."""
    correction = algorithm.rollout_correction
    configured = correction.rollout_is is not None or correction.rollout_rs is not None
    return configured and algorithm.source == "policy" and not loss_facts(actor).is_likelihood


def needs_old_logprobs(algorithm: AlgorithmConfig, actor: ActorConfig) -> bool:
    """Whether the loss or the reward reads the policy's log-probabilities from before the update. Likelihood losses do not."""
    return not loss_facts(actor).is_likelihood or has_kl_in_reward(algorithm)


def reasons_for_old_pass(algorithm: AlgorithmConfig, actor: ActorConfig, train_batch_size: int) -> list[str]:
    """Why old log-probabilities need a forward pass before the update. Empty: they have none (`folds_old_logprobs`)."""
    if not needs_old_logprobs(algorithm, actor):
        return []
    reasons = []
    num_updates = actor.num_updates(1, train_batch_size)
    if num_updates > 1 and not algorithm.rollout_correction.bypass_mode:
        reasons.append(f"{num_updates} optimizer steps per rollout read the first one's")
    if has_kl_in_reward(algorithm):
        reasons.append("the KL in the reward changes the advantages")
    rejection = algorithm.rollout_correction.rollout_rs
    if rejection is not None and is_corrected(algorithm, actor):
        reasons.append(f"rollout_rs={rejection} changes the token counts of the loss")
    return reasons


def folds_old_logprobs(algorithm: AlgorithmConfig, actor: ActorConfig, train_batch_size: int) -> bool:
    """Whether the old log-probabilities are those of the update's own forward pass.

    One optimizer step per rollout is made at the weights that they are defined by, so the pass before it is left out.
    """
    is_one_step = actor.num_updates(1, train_batch_size) == 1  # bypass_mode reads none in more steps
    is_read = is_one_step and needs_old_logprobs(algorithm, actor)
    return is_read and not reasons_for_old_pass(algorithm, actor, train_batch_size)


def forward_only_at_zero_advantage(algorithm: AlgorithmConfig, actor: ActorConfig) -> bool:
    """Whether a row whose advantage is 0 has no gradient, and the advantages of the plan are final.

    The loss is then weight x policy loss alone, and the policy loss is a multiple of the advantage.
    """
    is_proportional = loss_facts(actor).is_proportional
    is_final = not has_kl_in_reward(algorithm) and not advantage_estimators.facts(algorithm.adv_estimator).needs_values
    return is_proportional and is_final and not has_kl_loss(actor) and actor.entropy_coeff == 0.0


def has_kl_loss(actor: ActorConfig) -> bool:
    """Whether the loss has a KL to the reference. With a coefficient of 0 it is not computed either."""
    return actor.use_kl_loss and actor.kl_loss_coef != 0.0


def has_kl_in_reward(algorithm: AlgorithmConfig) -> bool:
    """Whether a KL is subtracted from the rewards. A coefficient of 0 stays 0, also if it is adaptive."""
    return algorithm.use_kl_in_reward and algorithm.kl_ctrl.kl_coef != 0.0


def reads_reference(algorithm: AlgorithmConfig, actor: ActorConfig) -> bool:
    """Whether a loss or a reward reads the reference's log-probabilities."""
    return has_kl_loss(actor) or loss_facts(actor).needs_reference or has_kl_in_reward(algorithm)


def needs_reference(algorithm: AlgorithmConfig, actor: ActorConfig) -> bool:
    """Whether a reference is built: its log-probabilities are read, or responses are drawn from it."""
    return reads_reference(algorithm, actor) or algorithm.source == "initial"
