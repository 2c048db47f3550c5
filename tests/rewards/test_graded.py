"""Graded rewards: the values 1, 0.5, 0.01 and 0, for numbers and for other texts."""

from __future__ import annotations

import pytest

from grpo_megatron.rewards import extractors
from grpo_megatron.rewards.numeric import graded_answer_reward, graded_reward, reference


@pytest.mark.parametrize(
    ("completion", "answer", "marked", "tagged"),
    [
        # numbers
        ("<think>6 * 7</think><answer>42</answer>", "42", 1, 1),
        ("<answer> $42.00 </answer>", "42", 1, 1),
        ("<answer>the sum is 42</answer>", "42", 0.5, 0.5),
        ("it is 42 <answer>43</answer>", "42", 0.5, 0.01),
        ("<answer>142</answer>", "42", 0.01, 0.01),
        ("#### 42", "42", 1, 0),
        ("it is 42", "42", 0.5, 0),
        ("", "42", 0.01, 0),
        ("<answer>42", "42", 0.5, 0),
        ("<answer>42</answer> or <answer>43</answer>", "42", 0.5, 0.01),  # the last pair counts
        ("<answer>43</answer> or <answer>42</answer>", "42", 1, 1),
        ("<answer>42</answer><answer>", "42", 0.5, 0),
        # other texts
        ("<answer>Paris</answer>", "Paris", 1, 1),
        ("<answer>\n  **paris**.\n</answer>", "Paris", 1, 1),
        ("<answer>new   york</answer>", "New York", 1, 1),
        ("<answer>It is Paris, in France</answer>", "Paris", 0.5, 0.5),
        ("Paris <answer>Rome</answer>", "Paris", 0.5, 0.01),
        ("<answer>Parisian</answer>", "Paris", 0.01, 0.01),
        ("so\n#### Paris", "Paris", 1, 0),
        (r"\boxed{Paris}", "Paris", 1, 0),
        ("<answer>3:45</answer>", "3:45", 1, 1),
        ("<answer>3:46</answer>", "3:45", 0.01, 0.01),
        ("<answer></answer>", "Paris", 0.01, 0.01),
        ("<answer>.*</answer>", "Paris", 0.01, 0.01),
        ("<answer>a</answer>", ".*", 0.01, 0.01),  # the reference is no pattern
        ("<answer>yes</answer>", "#### Yes", 1, 1),
    ],
)
def test_the_four_values(completion: str, answer: str, marked: float, tagged: float) -> None:
    for function, score in ((graded_reward, marked), (graded_answer_reward, tagged)):
        returned = function(completion, answer)
        assert returned["score"] == score, function.__name__
        assert returned["acc"] == float(score == 1)


def test_a_blank_reference_is_an_error_and_predictions_are_comparable() -> None:
    for answer in ("", " \n", "#### "):
        with pytest.raises(ValueError, match="is empty"):
            reference(answer)
    for name in ("graded", "graded_answer"):
        extract = extractors.get(name).extract
        assert extract("<answer> $1,234.50 </answer>") == "1234.5"
        assert extract("<answer> New  York. </answer>") == "new york"
        assert extract("New York") is None
