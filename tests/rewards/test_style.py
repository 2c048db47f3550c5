"""Length, language and repetition: values, and wrong arguments of rewards.

Cosine: end + (start - end) (1 + cos(pi x)) / 2 is start at x = 0, the mean at 1/2, end at 1, and with start 2, end 1 at
x = 1/3: 1 + 0.75.
"""

from __future__ import annotations

import math
from typing import Any

import pytest

from grpo_megatron.rewards import rewards
from grpo_megatron.rewards.style import language_reward, length_reward, repetition_reward


@pytest.mark.parametrize(
    ("length", "kwargs", "value"),
    [
        (0, {}, 0.0),
        (25, {}, -0.25),
        (101, {"beyond": -10.0}, -10.0),
        (75, {"free_length": 50}, -0.5),
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
        ("\u4f60\u597d", "latin", 0.0),
        ("\u4f60\u597d world or so", "han", 0.4),  # two characters are two words
        ("\u0422\u0430\u043a \u0447\u0442\u043e x = 5", "cyrillic", 1.0),  # single Latin letters are variables
        ("\\frac{a}{b} \u56e0\u6b64 <think>", "han", 1.0),  # nor do commands and tags count
        ("\u3042\u308a\u304c\u3068\u3046 \u6f22\u5b57", ["hiragana", "katakana", "han"], 1.0),
        ("\u0939\u093f\u0928\u094d\u0926\u0940 is one word", "devanagari", 0.25),  # vowel signs belong to their letter
        ("\U0001d465 plus \U0001d466", "latin", 1.0),  # mathematical letters
        ("1 + 1 = 2", "latin", 1.0),
    ],
)
def test_language(text: str, script: Any, value: float) -> None:
    assert language_reward(text, "", script=script) == pytest.approx(value)


@pytest.mark.parametrize(
    ("text", "kwargs", "value"),
    [
        ("a b c", {}, 0.0),  # shorter than an n-gram
        ("a b c d A B C D", {}, 4 / 5 - 1),  # 5 four-grams, the last one is the first again
        ("a b a b", {"ngram": 2}, 2 / 3 - 1),
        ("aaaa", {"ngram": 2, "unit": "character"}, 1 / 3 - 1),
    ],
)
def test_repetition(text: str, kwargs: dict[str, Any], value: float) -> None:
    assert repetition_reward(text, "", **kwargs) == pytest.approx(value)


@pytest.mark.parametrize(
    ("name", "kwargs", "message"),
    [
        ("length", {"max_length": 5, "free_length": 5}, "free_length=5 must be at least 0 and below max_length=5"),
        ("length", {"max_length": 5, "shape": "round"}, "shape='round' is neither"),
        ("language", {"script": "english"}, "script='english' must be one or several of latin"),
        ("repetition", {"ngram": 0}, "ngram=0 must be between 1 and 32"),
        ("repetition", {"unit": "token"}, "unit='token' is neither"),
        ("format", {"layout": "xml"}, "layout='xml' is not one of tagged, hashes, any, boxed"),
    ],
)
def test_wrong_arguments(name: str, kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rewards.get(name)("text", "", **kwargs)
