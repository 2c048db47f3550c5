r"""The grader of MATH: is the prediction in the last `\boxed{...}` equal to the reference answer?

grader.py      the reward "math" and its extractor; equations and inequalities; the answer in a sentence
structure.py   one spelling for equal LaTeX; the structure of an answer: lists, intervals, matrices, ...
value.py       single values: numbers, units, words; formulas, by math-verify

Other packages import from here only.
"""

from grpo_megatron.rewards.math.grader import latex_answer
from grpo_megatron.rewards.math.value import import_math_verify

__all__ = ["import_math_verify", "latex_answer"]
