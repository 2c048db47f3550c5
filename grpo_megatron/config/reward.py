"""The section `reward`: one reward function, or a weighted sum of several."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from grpo_megatron.config.section import Processes, Seconds, Section


class OverlongBuffer(Section):
    """DAPO's soft penalty for responses that come close to data.max_response_length (algo/token_weights.py)."""

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
    function: str | None = None  # a registered reward, or module:function; null: the task's own
    components: list[
        RewardComponent
    ] = []  # the reward is their weighted sum (rewards/composite.py); not with `function`
    num_workers: Processes = 1  # processes per engine
    timeout_s: Seconds = 10.0  # wall-clock seconds per sample; then its worker is killed
    max_failed_ratio: float = Field(0.5, ge=0, le=1)  # the run stops if a larger share of a draw has no reward
    kwargs: dict[str, Any] = {}  # keyword arguments of the reward function
    overlong_buffer: OverlongBuffer = OverlongBuffer()
