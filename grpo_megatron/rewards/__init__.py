"""Rewards: functions that take what they name and return a float or a dict, run in killable worker processes.

reward.py                 the registry, and what a reward function may return
item.py                   what is known of a completion
signature.py bound.py     what a function gets, ours or verl's or TRL's; its call
answer_form.py            how a response writes its answer
gsm8k.py lm_eval.py       numeric answers: our grader, and lm-evaluation-harness' two
math/                     the grader of MATH (`math/__init__.py` names what other packages may use)
graded.py                 1 / 0.5 / 0.01, for numbers and other texts
arithmetic.py             the quickstart's reward
format.py style.py        the layout of a response; its length, language and repetition
judge.py                  the verdict of another model, by HTTP
composite.py              a weighted sum of rewards
steps.py equation.py      a step reward: is the written arithmetic right?
known.py                  completions whose reward is known, for the self-test of the workers
time_limit.py             a limit on processor time
workers/                  the processes (other packages may use `workers/pool.py`)

Importing this package registers the built-in rewards. It imports the standard library only, so that a worker starts in
some 50 ms; the worker that needs math-verify imports it in `math/formula.py`.
"""

from grpo_megatron.rewards import (  # noqa: F401 - importing registers them
    arithmetic,
    composite,
    format,
    graded,
    gsm8k,
    judge,
    lm_eval,
    steps,
    style,
)
from grpo_megatron.rewards.math import grader  # noqa: F401
from grpo_megatron.rewards.reward import (
    Extractor,
    RewardFunction,
    RewardResult,
    check_reward,
    extractors,
    rewards,
)

__all__ = ["Extractor", "RewardFunction", "RewardResult", "check_reward", "extractors", "rewards"]
