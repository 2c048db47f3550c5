"""Length, language, repetition, tag count, layouts, and a thought that the prompt has opened: values, hostile texts, time.

Cosine: end + (start - end) (1 + cos(pi x)) / 2 is start at x = 0, the mean at 1/2, end at 1, and with start 2, end 1 at
x = 1/3: 1 + 0.75.
"""

from __future__ import annotations

import math
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_megatron.rewards import rewards
from grpo_megatron.rewards.answers import format_reward, tag_count_reward
from grpo_megatron.rewards.reward import opened_thought
from grpo_megatron.rewards.style import language_reward, length_reward, repetition_reward

FREE: dict[str, dict[str, Any]] = {"length": {"max_length": 100}}  # arguments of the rewards that need some
STYLE = ("format", "graded", "graded_answer", "language", "length", "repetition", "tag_count")


@pytest.mark.parametrize(
    ("length", "kwargs", "value"),
    [
        (0, {}, 0.0),
        (25, {}, -0.25),
        (100, {}, -1.0),
        (101, {"beyond": -10.0}, -10.0),
        (75, {"free_length": 50}, -0.5),
        (0, {"shape": "cosine", "start": 2.0, "end": 1.0, "max_length": 90}, 2.0),
        (30, {"shape": "cosine", "start": 2.0, "end": 1.0, "max_length": 90}, 1.75),
        (45, {"shape": "cosine", "start": -10.0, "end": 0.0, "max_length": 90}, -5.0),
    ],
)
def test_length(length: int, kwargs: dict[str, Any], value: float) -> None:
    assert math.isclose(length_reward("x" * length, "", **{"max_length": 100, **kwargs}), value, abs_tol=1e-12)


@pytest.mark.parametrize(
    ("text", "script", "value"),
    [
        ("All in English, don't!", "latin", 1.0),
        ("na\u00efve caf\u00e9, cafe\u0301", "latin", 1.0),
        ("\u4f60\u597d", "latin", 0.0),
        ("\u4f60\u597d world or so", "han", 0.4),  # two characters are two words
        ("\u0422\u0430\u043a \u0447\u0442\u043e x = 5", "cyrillic", 1.0),  # single Latin letters are variables
        ("\\frac{a}{b} \u56e0\u6b64 <think>", "han", 1.0),  # nor do commands and tags count
        ("\u3042\u308a\u304c\u3068\u3046 \u6f22\u5b57", ["hiragana", "katakana", "han"], 1.0),
        ("\u3042\u308a\u304c\u3068\u3046 thanks", "hiragana", 5 / 6),
        ("\u0939\u093f\u0928\u094d\u0926\u0940 is one word", "devanagari", 0.25),  # vowel signs belong to their letter
        ("\U0001d465 plus \U0001d466", "latin", 1.0),  # mathematical letters
        ("1 + 1 = 2", "latin", 1.0),
        ("", "han", 1.0),
    ],
)
def test_language(text: str, script: Any, value: float) -> None:
    assert language_reward(text, "", script=script) == pytest.approx(value)


@pytest.mark.parametrize(
    ("text", "kwargs", "value"),
    [
        ("a b c", {}, 0.0),  # shorter than an n-gram
        ("a b c d A B C D", {}, 4 / 5 - 1),  # 5 four-grams, the last one is the first again
        ("go " * 100, {}, 1 / 97 - 1),
        ("a b a b", {"ngram": 2}, 2 / 3 - 1),
        ("aaaa", {"ngram": 2, "unit": "character"}, 1 / 3 - 1),
    ],
)
def test_repetition(text: str, kwargs: dict[str, Any], value: float) -> None:
    assert repetition_reward(text, "", **kwargs) == pytest.approx(value)


def test_tag_count_and_layouts() -> None:
    whole = "<think>a</think><answer>b</answer>"
    for text, count in (
        (whole, 1.0),
        (whole + "<answer>", 0.75),
        (whole * 2, 0.0),
        ("</think><answer>b", 0.5),
        ("", 0),
    ):
        assert tag_count_reward(text, "") == count
    assert [format_reward(whole, "", layout=name) for name in ("tagged", "hashes", "any")] == [1, 0, 1]  # type: ignore[arg-type]
    assert [format_reward("#### 4", "", layout=name) for name in ("tagged", "hashes", "any")] == [0, 1, 1]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("prompt", "opened"),
    [
        ("User: 1+1?\nAssistant: <think>\n", "<think>\n"),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", "<think>\n\n</think>\n\n"),
        ("use <think> </think> tags. User: 1+1?\nAssistant:", ""),
        ("<think>\n" + " " * 100, ""),  # far from the end
        ("", ""),
    ],
)
def test_a_thought_that_the_prompt_has_opened(prompt: str, opened: str) -> None:
    assert opened_thought(prompt) == opened
    response = "6 * 7</think><answer>42</answer>"
    assert format_reward(opened_thought(prompt) + response, "") == float(opened.strip() == "<think>")


@pytest.mark.parametrize(
    ("name", "kwargs", "message"),
    [
        ("length", {"max_length": 5, "free_length": 5}, "free_length=5 must be at least 0 and below max_length=5"),
        ("length", {"max_length": 5, "shape": "round"}, "shape='round' is neither"),
        ("language", {"script": "english"}, "script='english' must be one or several of latin"),
        ("repetition", {"ngram": 0}, "ngram=0 must be between 1 and 32"),
        ("repetition", {"unit": "token"}, "unit='token' is neither"),
        ("format", {"layout": "xml"}, "layout='xml' is not one of tagged, hashes, any"),
    ],
)
def test_wrong_arguments(name: str, kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rewards.get(name)("text", "", **kwargs)


@settings(max_examples=60, deadline=None)
@given(st.text(st.characters(), max_size=200))
def test_any_text_has_a_finite_value(text: str) -> None:
    for name in STYLE:
        value = rewards.get(name)(text, "42", **FREE.get(name, {}))
        assert -1 <= (value["score"] if isinstance(value, dict) else value) <= 1


@pytest.mark.parametrize("piece", ["a", "ab ", "\u0301", "<think>", "<answer>", "\u4f60", "\\a", "\n", "\ud800", "<"])
def test_a_long_text_takes_linear_time(piece: str) -> None:
    """Some 0.3 s each; quadratic time would be an hour."""
    text = piece * (250_000 // len(piece))
    start = time.process_time()
    for name in STYLE:
        for answer in ("42", "a b") if name.startswith("graded") else ("",):
            rewards.get(name)(text, answer, **FREE.get(name, {}))
    opened_thought(text)
    assert time.process_time() - start < 60
