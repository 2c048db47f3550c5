"""Rewards: functions that take what they name and return a float or a dict, run in killable worker processes.

reward.py, calling.py, pool.py        signatures and results; the call in a worker, the sum `composite`; the workers
answers.py, numeric.py, math/         graders of GSM8K, layouts, graded rewards; the grader of MATH
instructions.py                       IFEval and IFBench; programs and tool calls are in environments/, beside the sandbox
style.py, judge.py                    length, language and repetition; another model's verdict
services.py                           the reward `remote`; cache on disk, rate limits and ledger of services
teacher_server.py                     a teacher's scores from a server: no reward

Importing this package registers them. It imports the standard library only, so a worker starts in some 50 ms.
"""

from grpo_megatron.rewards import (  # noqa: F401 - importing registers them
    answers,
    calling,
    instructions,
    judge,
    math,
    numeric,
    services,
    style,
)
from grpo_megatron.rewards.reward import Extractor, RewardFunction, RewardResult, check_reward, extractors, rewards

__all__ = ["Extractor", "RewardFunction", "RewardResult", "check_reward", "extractors", "rewards"]
