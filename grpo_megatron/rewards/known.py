r"""Completions whose reward is known, per reward function: the self-test of the reward workers.

A grader that calls everything right, or everything wrong, then stops the run. `RewardPool` grades these completions
before the first sample of each reward, in the same worker processes.
"""

from __future__ import annotations

KnownReward = tuple[str, str, float]  # completion, answer, reward

_GSM8K: list[KnownReward] = [
    ("6 * 7 = 42\n#### 42", "42", 1.0),
    ("<answer> $1,234.50 </answer>", "2469/2", 1.0),
    ("so \\boxed{42}", "42", 1.0),
    ("6 * 7 = 42\n#### 43", "42", 0.0),
    ("The answer is 42.", "42", 0.0),
    ("", "42", 0.0),
]

KNOWN_REWARDS: dict[str, list[KnownReward]] = {
    "gsm8k": _GSM8K,
    "arithmetic_steps": _GSM8K,
    "gsm8k_cot_strict": [("The answer is 42.", "42", 1.0), ("The answer is 43.", "42", 0.0), ("it is 42", "42", 0.0)],
    "gsm8k_strict": [("#### 42", "42", 1.0), ("#### 43", "42", 0.0), ("it is 42", "42", 0.0)],
    "gsm8k_flexible": [("it is 42.", "42", 1.0), ("it is 43.", "42", 0.0), ("", "42", 0.0)],
    "graded": [
        ("#### 42", "42", 1.0),
        ("it is 42", "42", 0.5),
        ("#### 43", "42", 0.01),
        ("<answer>Paris.</answer>", "Paris", 1.0),
        ("<answer>Rome</answer>", "Paris", 0.01),
    ],
    "graded_answer": [
        ("<think>6 * 7</think><answer>42.0</answer>", "42", 1.0),
        ("<answer>I think it is 42</answer>", "42", 0.5),
        ("42 <answer>43</answer>", "42", 0.01),
        ("<answer>paris</answer>", "Paris", 1.0),
        ("#### 42", "42", 0.0),
    ],
    "arithmetic": [
        ("<think>8+3=11,1+7+1=9</think><answer>91</answer>", "91", 1.0),
        ("<answer>92</answer>", "91", 0.0),
        ("91", "91", 0.0),
    ],
    "format": [("#### 42", "", 1.0), ("42", "", 0.0)],
    "tag_count": [("<think>a</think><answer>b</answer>", "", 1.0), ("<think>a</think>", "", 0.5), ("42", "", 0.0)],
    "language": [("All in English.", "", 1.0), ("\u4f60\u597d", "", 0.0), ("hello \u4f60", "", 0.5)],
    "repetition": [("a b c d e", "", 0.0), ("go on and on " * 5, "", 4 / 17 - 1)],
    "math": [
        (r"so \boxed{42}.", "42", 1.0),
        (r"so $\boxed{\tfrac{1}{2}}$", "0.5", 1.0),
        (r"\boxed{\text{Evelyn}}", "Evelyn", 1.0),
        (r"\boxed{(1+x)^2}", "x^2+2x+1", 1.0),  # this one and the next need math-verify
        (r"\boxed{(1+x)^2}", "x^2+2x+2", 0.0),
        (r"\boxed{43}", "42", 0.0),
        ("The answer is 42.", "42", 0.0),
        ("", "42", 0.0),
    ],
}
