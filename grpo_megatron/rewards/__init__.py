"""Rewards: plain functions `fn(completion, answer, **kwargs) -> float | dict`, scored in killable worker processes.

Standard library only, so that a worker starts in some 50 ms. Importing this package registers the built-in rewards;
`RewardPool` lives in `grpo_megatron.rewards.pool`.
"""

from grpo_megatron.rewards import arithmetic, format, gsm8k  # noqa: F401 - importing registers them
from grpo_megatron.rewards.reward import Reward, RewardResult, check_reward, rewards

__all__ = ["Reward", "RewardResult", "check_reward", "rewards"]
