"""The section `algorithm`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from grpo_megatron.config.section import Coefficient, Count, Section


class FilterGroups(Section):
    """DAPO's dynamic sampling: a prompt whose samples all got the same reward is replaced by another prompt."""

    enable: bool = False
    max_num_gen_batches: Count = 10  # rounds per step; after them the step trains on a smaller batch
    max_staleness: int = Field(1, ge=0)  # largest age of a left-over group, in steps; older ones are dropped


class ReplayConfig(Section):
    """Groups of earlier steps in the batch. Only groups whose rewards differ are kept."""

    ratio: float = Field(0.0, ge=0, lt=1)  # largest share of the batch's prompts; 0: off
    size: Count = 512  # groups in the buffer
    max_staleness: int = Field(2, ge=1)  # largest age of a group, in steps; older groups are dropped


class KlCtrl(Section):
    """The coefficient of the KL penalty in the reward. adaptive: it follows target_kl (algo/kl.py)."""

    type: Literal["fixed", "adaptive"] = "fixed"
    kl_coef: Coefficient = 0.001  # adaptive: its value at the start; 0: no KL, and no reference
    target_kl: float = Field(0.1, gt=0)  # adaptive: nats per token
    horizon: int = Field(10000, ge=1)  # adaptive: n samples change it by at most 20 % * n / horizon


class RolloutCorrection(Section):
    """Corrects for log-probabilities that differ between engine and policy (algo/correction.py).

    `rollout_is` multiplies the loss by importance weights; `rollout_rs` takes tokens or whole responses out of the loss.
    """

    rollout_is: Literal["token", "sequence", "geometric", "icepop"] | None = "token"  # null: no weights
    rollout_is_threshold: float = Field(2.0, gt=0)  # larger weights are cut to it (icepop: set to 0)
    rollout_is_threshold_low: float | None = Field(None, gt=0)  # icepop: smaller weights are set to 0; null: 1 / upper
    rollout_rs: Literal["token", "sequence", "geometric", "off_policy"] | None = None  # null: nothing is taken out
    rollout_rs_threshold: float = Field(2.0, gt=0)  # largest ratio that stays (off_policy: nats per token)
    rollout_rs_threshold_low: float | None = Field(None, gt=0)  # smallest ratio that stays; null: 1 / upper


class AlgorithmConfig(Section):
    adv_estimator: str = "grpo"  # a registered advantage estimator, or module:function
    norm_adv_by_std_in_grpo: bool = True  # grpo: divide by the standard deviation of the group's rewards
    gamma: float = Field(1.0, gt=0, le=1)  # reinforce_plus_plus, gae: discount per token
    lam: float = Field(1.0, ge=0, le=1)  # gae: weight of later values; 1: returns, 0: the next value alone
    rft_threshold: float = 1.0  # rft: a response with at least this reward is right
    use_kl_in_reward: bool = False  # subtract kl_ctrl.kl_coef * KL to the reference from each token's reward
    kl_penalty: str = "kl"  # the estimator of that KL: a name as in actor.kl_loss_type
    kl_ctrl: KlCtrl = KlCtrl()
    rollout_correction: RolloutCorrection = RolloutCorrection()
    # Where responses come from: the policy, the model that the run starts from, or data.train_files.
    source: Literal["policy", "initial", "file"] = "policy"
    iteration_steps: int | None = Field(None, ge=1)  # iterative GRPO: steps per outer iteration; null: one iteration
    filter_groups: FilterGroups = FilterGroups()
    dupo: bool = False  # replace groups of equal rewards by copies of the other groups
    mask_truncated_samples: bool = False  # responses cut at the limit: out of the loss, in their group's statistics
    replay: ReplayConfig = ReplayConfig()
