"""Rewards of single steps by a rule: is each sum of `8+3=11,1+7+1=9` right? For grpo_process.yaml, and as a pattern."""

import re

from grpo_megatron.rewards.numeric import arithmetic_reward

SUM = re.compile(r"(\d+(?:\+\d+)+)=(\d+)")


def reward(completion, answer):
    """A sum earns 1 or 0 where it ends; the response's end earns the reward of the answer."""
    outcome, end = arithmetic_reward(completion, answer), len(completion.rstrip())
    sums = [(one.end(), float(sum(map(int, one[1].split("+"))) == int(one[2]))) for one in SUM.finditer(completion)]
    return {**outcome, "steps": [*(step for step in sums if step[0] < end), (end, outcome["score"])] if end else []}
