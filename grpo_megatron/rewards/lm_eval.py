r"""GSM8K as lm-evaluation-harness grades it (tasks `gsm8k` and `gsm8k_cot`, version 3.0), for numbers that match its tables.

    score of the harness              here                what is read
    exact_match, strict-match         gsm8k_strict        the FIRST `#### N`, one space, N of [-0-9.,]
    the same of task gsm8k_cot        gsm8k_cot_strict    the FIRST `The answer is N` and one more character
    exact_match, flexible-extract     gsm8k_flexible      the LAST run of two or more of [$0-9.,], or of digits

Both sides then lose `,`, `$`, everything up to the last `#### ` and a final `.`, and are compared as lower-case strings.
When nothing is found, "[invalid]" is compared. The harness first cuts a completion at its stop strings ("Question:",
"</s>", "<|im_end|>"); here the generator does that. Our own `gsm8k` differs: it reads the last mark of any kind,
compares values instead of strings (18.00 is 18), and reads nothing without a mark.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from grpo_megatron.rewards.reward import Extractor, extractors, rewards

INVALID = "[invalid]"

_STRICT = re.compile(r"#### (\-?[0-9\.\,]+)")
_COT_STRICT = re.compile(r"The answer is (\-?[0-9\.\,]+).")  # the last dot is any character, as there
_FLEXIBLE = re.compile(r"(-?[$0-9.,]{2,})|(-?[0-9]+)")


def strict_match(text: str) -> str | None:
    """The harness' filter strict-match; None where it has "[invalid]"."""
    match = _STRICT.search(text)
    return match[1].strip() if match else None


def cot_strict_match(text: str) -> str | None:
    """The filter strict-match of task gsm8k_cot; None where it has "[invalid]"."""
    match = _COT_STRICT.search(text)
    return match[1].strip() if match else None


def flexible_extract(text: str) -> str | None:
    """The harness' filter flexible-extract; None where it has "[invalid]"."""
    last = None
    for match in _FLEXIBLE.finditer(text):
        last = match
    return (last[1] or last[2]).strip() if last else None


def normalized(text: str) -> str:
    """What the harness compares. A reference may be the bare answer or the whole solution."""
    text = text.replace(",", "").replace("$", "")
    text = text[text.rfind("#### ") + 5 :] if "#### " in text else text  # (?s).*####, in linear time
    return re.sub(r"\.$", "", text).lower()


def _exact_match(extract: Callable[[str], str | None], completion: str, answer: str) -> dict[str, float]:
    prediction = extract(completion)
    correct = float(normalized(INVALID if prediction is None else prediction) == normalized(answer))
    return {"score": correct, "acc": correct, "extracted": float(prediction is not None)}


@rewards.register("gsm8k_strict")
def gsm8k_strict_reward(completion: str, answer: str) -> dict[str, float]:
    """1 where the harness' strict-match is 1, else 0."""
    return _exact_match(strict_match, completion, answer)


@rewards.register("gsm8k_cot_strict")
def gsm8k_cot_strict_reward(completion: str, answer: str) -> dict[str, float]:
    """1 where the strict-match of the harness' task gsm8k_cot is 1, else 0."""
    return _exact_match(cot_strict_match, completion, answer)


@rewards.register("gsm8k_flexible")
def gsm8k_flexible_reward(completion: str, answer: str) -> dict[str, float]:
    """1 where the harness' flexible-extract is 1, else 0."""
    return _exact_match(flexible_extract, completion, answer)


extractors.register("gsm8k_strict")(Extractor(strict_match, str.strip, normalized))
extractors.register("gsm8k_cot_strict")(Extractor(cot_strict_match, str.strip, normalized))
extractors.register("gsm8k_flexible")(Extractor(flexible_extract, str.strip, normalized))
