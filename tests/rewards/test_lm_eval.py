r"""The rewards that copy lm-evaluation-harness' GSM8K, against its documented algorithm, written again with `findall`.

Filter: re.findall; the first or the last match; of a tuple the first group that is not empty; "[invalid]" without a
match. Metric exact_match: remove `,`, `\$`, `(?s).*#### ` and `\.$` from both sides, lower the case, compare. The code of
lm-eval 0.4.13 itself (RegexFilter, exact_match_hf_evaluate, the task's YAML) gave the same in all of 7,914 completions.
"""

from __future__ import annotations

import json
import random
import re

from grpo_megatron.rewards import rewards
from tests.files import WHOLE

STRICT, FLEXIBLE = r"#### (\-?[0-9\.\,]+)", r"(-?[$0-9.,]{2,})|(-?[0-9]+)"
FORMS = [
    *("%s", "#### %s", "####%s", "#### $%s", "#### %s.", "#### %s dollars", "The answer is %s.", "\\boxed{%s}"),
    *("#### %s\n#### 7", "#### 7\nno #### %s", "#### -%s", "#### %s.00", "%s%%", "#### ", "#### .", "", "-", "$$"),
    *("...", "#### %s...", "#### %s,", "#### 1.000,%s", "**%s**", "%s\n\n", "Question: %s"),
]


def harness(pattern: str, select: int, completion: str, solution: str) -> float:
    found = re.findall(pattern, completion)
    match = found[select] if found else "[invalid]"
    if isinstance(match, tuple):
        match = next(group for group in match if group)
    sides = []
    for side in (match.strip(), solution):
        for ignored in (",", r"\$", r"(?s).*#### ", r"\.$"):
            side = re.sub(ignored, "", side)
        sides.append(side.lower())
    return float(sides[0] == sides[1])


def _compare(completion: str, answer: str, solution: str) -> None:
    for name, pattern, select in (("gsm8k_strict", STRICT, 0), ("gsm8k_flexible", FLEXIBLE, -1)):
        expected = harness(pattern, select, completion, solution)
        for reference in (answer, solution):  # either may be the reference answer
            assert rewards.get(name)(completion, reference)["score"] == expected, (name, completion, reference)


def test_equal_completions_get_equal_scores() -> None:
    draw = random.Random(0)
    for number in range(1500):
        answer = draw.choice([str(number), f"{number * 1000:,}", f"-{number}", f"{number}.5"])
        solution = f"It is 3 * 4 = <<3*4=12>>12.\n#### {answer}"
        value = draw.choice([answer, answer.replace(",", ""), str(draw.randint(0, 99))])
        form = draw.choice(FORMS)
        text = draw.choice(["", "It is 3 * 4 = 12.\n"]) + (form % value if "%s" in form else form)
        _compare(text, answer, solution)


def test_real_solutions_are_right_under_both_filters() -> None:
    for row in map(json.loads, (WHOLE / "gsm8k" / "test.jsonl").read_text().splitlines()):
        answer = row["answer"].rpartition("#### ")[2]
        _compare(row["answer"], answer, row["answer"])
        assert rewards.get("gsm8k_strict")(row["answer"], answer)["score"] == 1.0


def test_where_the_reward_gsm8k_differs() -> None:
    for completion, gsm8k, strict, flexible in [
        ("The answer is 18.", 0, 0, 1),
        ("#### 18.00", 1, 0, 0),
        ("####18", 1, 0, 1),
        ("#### $18", 1, 0, 1),
        ("#### 17\n#### 18", 1, 0, 1),
        ("#### 18\n#### 17", 0, 1, 0),
        ("#### 18 of 20", 1, 1, 0),
    ]:
        scores = [rewards.get(name)(completion, "18")["score"] for name in ("gsm8k", "gsm8k_strict", "gsm8k_flexible")]
        assert scores == [gsm8k, strict, flexible], completion
