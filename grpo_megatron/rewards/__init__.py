"""Rewards: plain functions `fn(completion, answer, **kwargs) -> float | dict`, scored in killable worker processes.

Standard library only, so that a worker starts in some 50 ms (math-verify is imported by the worker that needs it, in
`math/formula.py`). Importing this package registers the built-in rewards; `RewardPool` is in `workers/pool.py`.
"""

from grpo_megatron.rewards import arithmetic, format, gsm8k, lm_eval, steps  # noqa: F401 - importing registers them
from grpo_megatron.rewards.math import grader  # noqa: F401
from grpo_megatron.rewards.reward import Answers, Reward, RewardResult, Steps, answers, check_reward, rewards

__all__ = ["Answers", "Reward", "RewardResult", "Steps", "answers", "check_reward", "rewards"]
