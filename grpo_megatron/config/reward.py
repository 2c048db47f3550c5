"""The sections `reward`, `reward_model` and `reward_models`: functions and models that score responses."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from grpo_megatron.config.model import OptimConfig
from grpo_megatron.config.section import Count, Fixed, Needs, Processes, Schedule, Seconds, Section


class OverlongBuffer(Section):
    """DAPO's soft penalty for responses that come close to data.max_response_length (algo/advantages.py)."""

    len: int | None = Field(None, ge=1)
    """the penalty grows from 0 to 1 over the last so many tokens; null: off"""
    penalty_factor: Annotated[float, Needs(".len")] = Field(1.0, gt=0, le=1e4)
    """multiplies the penalty"""


class LengthReward(Section):
    """A reward for the length of a response in tokens, added to the others (algo/advantages.py)."""

    kind: Literal["group", "target"] | None = None
    """group: the shortest of a prompt's responses gets 1/2, the longest -1/2 (Kimi k1.5); target: -|tokens - target_len| (L1)"""
    coefficient: Annotated[float, Needs(".kind")] = Field(1.0, gt=0, le=1e4)
    """multiplies it; target: per token, 0.0003 in L1"""
    correct_from: Annotated[float, Needs(".kind=group")] = 1.0
    """group: a response whose reward is below this gets at most 0"""
    target_len: Annotated[int | None, Needs(".kind=target")] = Field(None, ge=1)
    """target: tokens"""


class Gate(Section):
    """The component counts only where the value of another component is at least `min` and at most `max`."""

    component: str
    """its name"""
    min: float | None = None
    """null: no lower bound"""
    max: float | None = None
    """null: no upper bound"""


class RewardComponent(Section):
    """One term of the reward: weight x value. Its value is the metric reward/NAME/mean."""

    name: str = Field(pattern="^[A-Za-z][A-Za-z0-9_-]{0,63}$")
    function: str | None = None
    """null: the reward called `name`; for the name accuracy, the task's own reward"""
    weight: float = Field(1.0, ge=-1e4, le=1e4)
    """0: only a metric"""
    kwargs: dict[str, Any] = {}
    """keyword arguments of the function"""
    gate: Gate | None = None
    """null: counts always"""


class BudgetConfig(Section):
    """Limits on what judges may spend. The run saves and stops, with exit code 75, before a step that could exceed one."""

    folder: Path | None = None
    """that of the judge's `folder`, whose ledger counts all runs; null: no budget"""
    cost: Annotated[float | None, Needs(".folder")] = Field(None, gt=0)
    """in the currency of the judges' prices"""
    tokens: Annotated[int | None, Needs(".folder")] = Field(None, gt=0)
    """of prompts and replies"""

    @property
    def limits(self) -> dict[str, float]:
        return {name: value for name in ("cost", "tokens") if (value := getattr(self, name)) is not None}


class RewardConfig(Section):
    """The reward function of the samples, or a weighted sum of several, and the processes that call it."""

    function: str | None = None
    """a registered reward, or module:function; null: the task's own"""
    components: list[RewardComponent] = Field([], max_length=16)
    """the reward is their weighted sum (rewards/calling.py); not with `function`"""
    num_workers: Processes = 1
    """processes per engine"""
    timeout_s: Seconds = 10.0
    """wall-clock seconds per sample; then its worker is killed"""
    max_failed_ratio: float = Field(0.5, ge=0, le=1)
    """the run stops if a larger share of a step's samples has no reward; below 1 also if all of their environments failed"""
    kwargs: Annotated[dict[str, Any], Needs(".components=[]")] = {}
    """keyword arguments of the reward function"""
    budget: BudgetConfig = BudgetConfig()
    overlong_buffer: OverlongBuffer = OverlongBuffer()
    length: LengthReward = LengthReward()


HAS_STEPS = Needs("reward_model.path or actor.loss_mode:scores=step")


class ScoringModel(Section):
    """One model. `reward_models` has any number of them, frozen, each under a name of its own."""

    path: Fixed[Path | None] = None
    """Hugging Face folder (models/heads/reward_folder.py); null: there is none"""
    kind: Annotated[Fixed[Literal["outcome", "process"]], HAS_STEPS] = "outcome"
    """one score per response, or per step"""
    coefficient: float = Field(1.0, gt=0, le=1e4)
    """multiplies its score in the sum (algo/reward_models.py)"""
    step_separator: Annotated[str, HAS_STEPS] = Field("\n", min_length=1)
    """process: the text that ends a step (data/prompts.py)"""


class RewardModelConfig(ScoringModel):
    """A reward model in the policy's layout. path = null: there is none.

    With algorithm.iteration_steps it learns after every outer iteration (iterative GRPO); without, it is frozen.
    """

    start_iteration: Annotated[int, Needs(".path"), Needs("algorithm.iteration_steps")] = Field(0, ge=0)
    """in earlier outer iterations, the reward function alone gives the reward"""
    combine: Annotated[Literal["replace", "add"], Needs("reward_model.path or reward_models")] = "replace"
    """the sum of all models replaces the function's reward, or is added"""
    max_pairs_per_group: int | None = Field(4, ge=1)
    """(better, worse) pairs among one prompt's samples; null: all"""
    steps: Schedule[int] = Field(50, ge=1)
    """its optimizer steps after each outer iteration"""
    train_batch_size: Count = 32
    """pairs per optimizer step"""
    replay_ratio: float = Field(0.1, ge=0, lt=1)
    """share of these pairs that comes from earlier outer iterations"""
    history_size: int = Field(2048, ge=1)
    """pairs kept for the replay: a uniform sample of all earlier ones"""
    optim: OptimConfig = OptimConfig()

    def num_updates(self, num_steps: int, iteration_steps: int) -> int:
        """Counts optimizer steps of a learning reward model in `num_steps` training steps."""
        return num_steps // iteration_steps * self.steps
