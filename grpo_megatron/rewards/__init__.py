"""Rewards: functions that take what they name and return a float or a dict, run in killable worker processes.

reward.py            the registry, signatures (ours, verl's, TRL's), and what a reward function may return
pool.py              the processes that grade; the self-test of the package's rewards
calling.py           in such a process: the call of one function, for one sample or several; a weighted sum of rewards
answers.py           how a response writes its answer: marks, boxes, numbers, layouts; the rewards gsm8k and format
numeric.py           lm-evaluation-harness' graders of GSM8K, graded rewards, the quickstart's arithmetic
math/                the grader of MATH; `math/__init__.py` is its front
style.py             length, language and repetition
judge.py             the verdict of another model, by HTTP
process_rewards.py   a step reward: is the written arithmetic right?

Importing this package registers the built-in rewards. It imports the standard library only, so that a worker starts in
some 50 ms; the worker that needs math-verify imports it in `math/value.py`.
"""

from grpo_megatron.rewards import (  # noqa: F401 - importing registers them
    answers,
    calling,
    judge,
    math,
    numeric,
    process_rewards,
    style,
)
from grpo_megatron.rewards.reward import Extractor, RewardFunction, RewardResult, check_reward, extractors, rewards

__all__ = ["Extractor", "RewardFunction", "RewardResult", "check_reward", "extractors", "rewards"]
