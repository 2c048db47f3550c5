r"""GSM8K as lm-evaluation-harness scores it (task `gsm8k`, version 3.0), for numbers that have to match its tables.

    score of the harness              here                what is read
    exact_match, strict-match         gsm8k_strict        the FIRST `#### N`, one space, N of [-0-9.,]
    exact_match, flexible-extract     gsm8k_flexible      the LAST run of two or more of [$0-9.,], or of digits

Both sides then lose `,`, `$`, all up to the last `#### ` and a final `.`, and are compared as strings in small letters;
where nothing is found, "[invalid]" is compared. The harness cuts a completion at its stop strings ("Question:",
"</s>", "<|im_end|>") first; that is the generator's work. Our own `gsm8k` differs: the last mark of any kind, values
instead of strings (18.00 is 18), and nothing without a mark.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from grpo_megatron.rewards.reward import Answers, answers, rewards

INVALID = "[invalid]"
STOP = ("Question:", "</s>", "<|im_end|>")

_STRICT = re.compile(r"#### (\-?[0-9\.\,]+)")
_FLEXIBLE = re.compile(r"(-?[$0-9.,]{2,})|(-?[0-9]+)")


def strict(text: str) -> str | None:
    """The filter strict-match; None where the harness has "[invalid]"."""
    match = _STRICT.search(text)
    return match[1].strip() if match else None


def flexible(text: str) -> str | None:
    """The filter flexible-extract."""
    last = None
    for last in _FLEXIBLE.finditer(text):  # noqa: B007 - the last one
        pass
    return (last[1] or last[2]).strip() if last else None


def normal(text: str) -> str:
    """What the harness compares. A reference may be the bare answer or the whole solution."""
    text = text.replace(",", "").replace("$", "")
    text = text[text.rfind("#### ") + 5 :] if "#### " in text else text  # (?s).*####, in linear time
    return re.sub(r"\.$", "", text).lower()


def _score(extract: Callable[[str], str | None], completion: str, answer: str) -> dict[str, float]:
    value = extract(completion)
    correct = float(normal(value if value is not None else INVALID) == normal(answer))
    return {"score": correct, "acc": correct, "extracted": float(value is not None)}


@rewards.register("gsm8k_strict")
def gsm8k_strict(completion: str, answer: str) -> dict[str, float]:
    """1 where the harness' strict-match is 1, else 0."""
    return _score(strict, completion, answer)


@rewards.register("gsm8k_flexible")
def gsm8k_flexible(completion: str, answer: str) -> dict[str, float]:
    """1 where the harness' flexible-extract is 1, else 0."""
    return _score(flexible, completion, answer)


answers.register("gsm8k_strict")(Answers(strict, str.strip, normal))
answers.register("gsm8k_flexible")(Answers(flexible, str.strip, normal))
