"""The section `algorithm`: where samples come from, their advantages, and which of them are trained on."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from grpo_megatron.config.actor import HAS_CRITIC
from grpo_megatron.config.section import Coefficient, Count, Fixed, Needs, Section


class FilterGroups(Section):
    """DAPO's dynamic sampling: a prompt whose samples all got the same reward is replaced by another prompt."""

    enable: Fixed[bool] = False
    """replace prompts whose samples all got one reward"""
    max_num_gen_batches: Annotated[Count, Needs(".enable=true")] = 10
    """rounds per step; after them the step trains on a smaller batch"""
    max_staleness: Annotated[int, Needs(".enable=true")] = Field(1, ge=0)
    """largest age of a left-over group, in steps; older ones are dropped"""


class ReplayConfig(Section):
    """Groups of earlier steps in the batch. Only groups whose rewards differ are kept."""

    ratio: Fixed[float] = Field(0.0, ge=0, lt=1)
    """largest share of the batch's prompts; 0: off"""
    size: Annotated[Count, Needs(".ratio>0")] = 512
    """groups in the buffer"""
    max_staleness: Annotated[int, Needs(".ratio>0")] = Field(2, ge=1)
    """largest age of a group, in steps; older groups are dropped"""


class ChordConfig(Section):
    """CHORD: rows of `sft.train_files` in every batch, beside the policy's samples (algo/chord.py)."""

    batch_size: Annotated[
        Fixed[int],
        Needs("algorithm.source=policy"),
        Needs("rollout.placement=colocated"),
        Needs("actor.loss_mode:paired=false"),
        Needs("algorithm.adv_estimator:needs_values=false"),
    ] = Field(0, ge=0)
    """rows per step, in equal parts for its optimizer steps; 0: off"""
    mu: Annotated[float, Needs(".batch_size>0")] = Field(0.1, ge=0, lt=1)
    """weight of their loss, at the first step; the policy's samples have the rest"""
    mu_end: Annotated[float | None, Needs(".batch_size>0")] = Field(None, ge=0, lt=1)
    """the weight from step mu_steps on, along a cosine; null: mu throughout"""
    mu_steps: Annotated[int, Needs(".mu_end")] = Field(200, ge=1)
    """steps from mu to mu_end"""
    phi: Annotated[bool, Needs(".batch_size>0")] = True
    """weigh each of their tokens by p (1 - p), p its probability; false: plain cross entropy"""


class KlCtrl(Section):
    """The coefficient of the KL penalty in the reward. adaptive: it follows target_kl (algo/kl.py)."""

    type: Annotated[Literal["fixed", "adaptive"], Needs("algorithm.use_kl_in_reward=true")] = "fixed"
    kl_coef: Annotated[Coefficient, Needs("algorithm.use_kl_in_reward=true or .kl_coef=0")] = 0.001
    """adaptive: its value at the start; 0: no KL, and no reference"""
    target_kl: Annotated[float, Needs("algorithm.use_kl_in_reward=true"), Needs(".type=adaptive")] = Field(0.1, gt=0)
    """adaptive: nats per token"""
    horizon: Annotated[int, Needs("algorithm.use_kl_in_reward=true"), Needs(".type=adaptive")] = Field(10000, ge=1)
    """adaptive: n samples change it by at most 20 % * n / horizon"""


class RolloutCorrection(Section):
    """Corrects for log-probabilities that differ between engine and policy (algo/corrections.py).

    `rollout_is` multiplies the loss by importance weights; `rollout_rs` takes tokens or whole responses out of the loss.
    """

    bypass_mode: Annotated[bool, Needs("actor.loss_mode:is_likelihood=false")] = False
    """the ratio of the loss is to the engine's log-probabilities, without weights: no old ones are computed"""
    prox_logp_method: Annotated[Literal["recompute", "loglinear"], Needs("actor.loss_mode:is_likelihood=false")] = (
        "recompute"
    )
    """The old log-probabilities of the ratio: the policy's at the step's start, or A-3PO's mixture with the engine's, by age."""
    rollout_is: Literal["token", "sequence", "geometric", "icepop"] | None = "token"
    """null: no weights"""
    rollout_is_threshold: Annotated[float, Needs(".rollout_is")] = Field(2.0, gt=0)
    """larger weights are cut to it (icepop: set to 0)"""
    rollout_is_threshold_low: Annotated[float | None, Needs(".rollout_is=icepop")] = Field(None, gt=0)
    """icepop: smaller weights are set to 0; null: 1 / upper"""
    rollout_rs: Literal["token", "sequence", "geometric", "off_policy", "binary_kl"] | None = None
    """null: nothing is taken out"""
    rollout_rs_threshold: Annotated[float, Needs(".rollout_rs")] = Field(2.0, gt=0)
    """largest ratio that stays (off_policy: nats per token; binary_kl: nats)"""
    rollout_rs_threshold_low: Annotated[float | None, Needs(".rollout_rs")] = Field(None, gt=0)
    """smallest ratio that stays; null: 1 / upper"""


class AlgorithmConfig(Section):
    """The source of samples, their advantages, and the choice of those that are trained on."""

    adv_estimator: str = "grpo"
    """a registered advantage estimator, or module:function"""
    norm_adv_by_std_in_grpo: bool = True
    """grpo: divide by the standard deviation of the group's rewards"""
    gdpo_reward_keys: Annotated[list[str], Needs(".adv_estimator:needs_reward_parts")] = Field([], max_length=16)
    """GDPO: numbers that the reward function reports, such as names of reward.components"""
    gdpo_reward_weights: Annotated[list[float] | None, Needs(".gdpo_reward_keys")] = None
    """GDPO: a weight for each of them; null: 1"""
    gamma: Annotated[float, Needs(".adv_estimator=reinforce_plus_plus or .adv_estimator=gae")] = Field(1.0, gt=0, le=1)
    """reinforce_plus_plus, gae: discount per token"""
    lam: Annotated[float, HAS_CRITIC] = Field(1.0, ge=0, le=1)
    """gae: weight of later values; 1: returns, 0: the next value alone"""
    rft_threshold: Annotated[float, Needs(".adv_estimator=rft")] = 1.0
    """rft: a response with at least this reward is right"""
    use_kl_in_reward: Annotated[bool, Needs(".adv_estimator:ignores_token_penalties=false")] = False
    """subtract kl_ctrl.kl_coef * KL to the reference from each token's reward"""
    kl_penalty: Annotated[str, Needs(".use_kl_in_reward=true")] = "kl"
    """the estimator of that KL: a name as in actor.kl_loss_type"""
    kl_ctrl: KlCtrl = KlCtrl()
    rollout_correction: RolloutCorrection = RolloutCorrection()
    source: Fixed[Literal["policy", "initial", "file"]] = "policy"
    """Where responses come from: the policy, the model that the run starts from, or data.train_files."""
    iteration_steps: Fixed[int | None] = Field(None, ge=1)
    """iterative GRPO: steps per outer iteration; null: one iteration"""
    filter_groups: FilterGroups = FilterGroups()
    dupo: bool = False
    """replace groups of equal rewards by copies of the other groups"""
    mask_truncated_samples: bool = False
    """responses cut at the limit of tokens (not of turns): out of the loss, in their group's statistics"""
    replay: ReplayConfig = ReplayConfig()
    chord: ChordConfig = ChordConfig()
