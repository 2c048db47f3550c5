"""The section `algorithm`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from grpo_megatron.config.model import OptimConfig
from grpo_megatron.config.section import Coefficient, Count, Fixed, Processes, Schedule, Seconds, Section


class FilterGroups(Section):
    """DAPO's dynamic sampling: a prompt whose samples all got the same reward is replaced by another prompt."""

    enable: Fixed[bool] = False
    max_num_gen_batches: Count = 10  # rounds per step; after them the step trains on a smaller batch
    max_staleness: int = Field(1, ge=0)  # largest age of a left-over group, in steps; older ones are dropped


class ReplayConfig(Section):
    """Groups of earlier steps in the batch. Only groups whose rewards differ are kept."""

    ratio: Fixed[float] = Field(0.0, ge=0, lt=1)  # largest share of the batch's prompts; 0: off
    size: Count = 512  # groups in the buffer
    max_staleness: int = Field(2, ge=1)  # largest age of a group, in steps; older groups are dropped


class KlCtrl(Section):
    """The coefficient of the KL penalty in the reward. adaptive: it follows target_kl (algo/divergence.py)."""

    type: Literal["fixed", "adaptive"] = "fixed"
    kl_coef: Coefficient = 0.001  # adaptive: its value at the start; 0: no KL, and no reference
    target_kl: float = Field(0.1, gt=0)  # adaptive: nats per token
    horizon: int = Field(10000, ge=1)  # adaptive: n samples change it by at most 20 % * n / horizon


class RolloutCorrection(Section):
    """Corrects for log-probabilities that differ between engine and policy (algo/divergence.py).

    `rollout_is` multiplies the loss by importance weights; `rollout_rs` takes tokens or whole responses out of the loss.
    """

    rollout_is: Literal["token", "sequence", "geometric", "icepop"] | None = "token"  # null: no weights
    rollout_is_threshold: float = Field(2.0, gt=0)  # larger weights are cut to it (icepop: set to 0)
    rollout_is_threshold_low: float | None = Field(None, gt=0)  # icepop: smaller weights are set to 0; null: 1 / upper
    rollout_rs: Literal["token", "sequence", "geometric", "off_policy"] | None = None  # null: nothing is taken out
    rollout_rs_threshold: float = Field(2.0, gt=0)  # largest ratio that stays (off_policy: nats per token)
    rollout_rs_threshold_low: float | None = Field(None, gt=0)  # smallest ratio that stays; null: 1 / upper


class AlgorithmConfig(Section):
    """Where samples come from, their advantages, and which of them are trained on."""

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
    source: Fixed[Literal["policy", "initial", "file"]] = "policy"
    # iterative GRPO: steps per outer iteration; null: one iteration
    iteration_steps: Fixed[int | None] = Field(None, ge=1)
    filter_groups: FilterGroups = FilterGroups()
    dupo: bool = False  # replace groups of equal rewards by copies of the other groups
    mask_truncated_samples: bool = False  # responses cut at the limit: out of the loss, in their group's statistics
    replay: ReplayConfig = ReplayConfig()


# -- The section `reward`: one reward function, or a weighted sum of several -------------------------------------------


class OverlongBuffer(Section):
    """DAPO's soft penalty for responses that come close to data.max_response_length (algo/plan.py)."""

    len: int | None = Field(None, ge=1)  # the penalty grows from 0 to 1 over the last so many tokens; null: off
    penalty_factor: float = Field(1.0, gt=0, le=1e4)  # multiplies the penalty


class Gate(Section):
    """The component counts only where the value of another component is at least `min` and at most `max`."""

    component: str  # its name
    min: float | None = None  # null: no lower bound
    max: float | None = None  # null: no upper bound


class RewardComponent(Section):
    """One term of the reward: weight x value. Its value is the metric reward/NAME/mean."""

    name: str = Field(pattern="^[A-Za-z][A-Za-z0-9_-]{0,63}$")
    function: str | None = None  # null: the reward called `name`; for the name accuracy, the task's own reward
    weight: float = Field(1.0, ge=-1e4, le=1e4)  # 0: only a metric
    kwargs: dict[str, Any] = {}  # keyword arguments of the function
    gate: Gate | None = None  # null: counts always


class RewardConfig(Section):
    """The reward function of the samples, or a weighted sum of several, and the processes that call it."""

    function: str | None = None  # a registered reward, or module:function; null: the task's own
    # the reward is their weighted sum (rewards/composite.py); not with `function`
    components: list[RewardComponent] = []
    num_workers: Processes = 1  # processes per engine
    timeout_s: Seconds = 10.0  # wall-clock seconds per sample; then its worker is killed
    max_failed_ratio: float = Field(0.5, ge=0, le=1)  # the run stops if a larger share of a draw has no reward
    kwargs: dict[str, Any] = {}  # keyword arguments of the reward function
    overlong_buffer: OverlongBuffer = OverlongBuffer()


# -- The sections `reward_model` and `reward_models`: models that score responses --------------------------------------


class ScoringModel(Section):
    """One model. `reward_models` has any number of them, frozen, each under a name of its own."""

    path: Fixed[Path | None] = None  # Hugging Face folder (models/heads/folder.py); null: there is none
    kind: Fixed[Literal["outcome", "process"]] = "outcome"  # one score per response, or one per step
    coefficient: float = Field(1.0, gt=0, le=1e4)  # multiplies its score in the sum (algo/scores.py)
    step_separator: str = Field("\n", min_length=1)  # process: the text that ends a step (data/scored.py)


class RewardModelConfig(ScoringModel):
    """A reward model in the policy's layout. path = null: there is none.

    With algorithm.iteration_steps it learns after every outer iteration (iterative GRPO); without, it is frozen.
    """

    start_iteration: int = Field(0, ge=0)  # in earlier outer iterations, the reward function alone gives the reward
    combine: Literal["replace", "add"] = "replace"  # the sum of all models replaces the function's reward, or is added
    max_pairs_per_group: int | None = Field(4, ge=1)  # (better, worse) pairs among one prompt's samples; null: all
    steps: Schedule[int] = Field(50, ge=1)  # its optimizer steps after each outer iteration
    train_batch_size: Count = 32  # pairs per optimizer step
    replay_ratio: float = Field(0.1, ge=0, lt=1)  # share of these pairs that comes from earlier outer iterations
    history_size: int = Field(2048, ge=1)  # pairs kept for the replay: a uniform sample of all earlier ones
    optim: OptimConfig = OptimConfig()

    def num_updates(self, num_steps: int, iteration_steps: int) -> int:
        """Optimizer steps of a learning reward model in `num_steps` training steps."""
        return num_steps // iteration_steps * self.steps
