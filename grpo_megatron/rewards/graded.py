"""Graded rewards: 1 for the right answer, less for an answer that is nearly there. References are numbers or any other text.

    graded          1: what the last mark (####, answer tags, box) holds is right   0.5: the answer stands somewhere   0.01: else
    graded_answer   1: what the answer tags hold is right   0.5: they hold the answer and more   0.01: another answer
                    0: no answer tags

`graded_answer` has the values of open-thought's tiny-grpo (train.py). That program compares strings and reads the first
pair of tags. Here the last pair counts, numbers are compared by value (18.00 is 18), and other texts without regard to
case, white space and outer punctuation.
"""

from __future__ import annotations

import re
from fractions import Fraction

from grpo_megatron.rewards.gsm8k import (
    contains_number,
    marked_number,
    marked_text,
    numeric_prediction,
    parse_number,
)
from grpo_megatron.rewards.reward import Extractor, extractors, rewards

RIGHT, INSIDE, WRONG, NONE = 1.0, 0.5, 0.01, 0.0
OUTER = " *_`~$\"'.,;:!?"  # characters that do not count at the ends of a text
MAX_COMPARED = 4096  # characters of an answer that are compared


def reference(answer: str) -> Fraction | str:
    """The reference answer, marked or bare: a number, or else plain text. Raises ValueError when it is blank."""
    marked = marked_text(answer)
    text = answer.strip() if marked is None else marked
    number = parse_number(text)
    if number is None and not text.strip():
        raise ValueError(f"the reference answer {answer[:80]!r} is empty")
    return plain(text) if number is None else number


def plain(text: str) -> str:
    """For comparison: lower case, single spaces, no punctuation at the ends (unless there is nothing else)."""
    joined = " ".join(text.split()).casefold()
    return joined.strip(OUTER) or joined


def tagged_answer(text: str) -> str | None:
    """What the last `<answer>...</answer>` holds; None when the last tag is not closed, or when there is none."""
    start = text.rfind("<answer>")
    end = text.find("</answer>", start) if start >= 0 else -1
    return text[start + len("<answer>") : end][:MAX_COMPARED].strip() if end >= 0 else None


def is_answer(text: str, expected: Fraction | str) -> bool:
    """Whether the text is the expected answer."""
    return parse_number(text) == expected if isinstance(expected, Fraction) else plain(text[:MAX_COMPARED]) == expected


def holds_answer(text: str, expected: Fraction | str) -> bool:
    """Whether the expected answer stands anywhere in the text, as a number or as words of its own. Linear time."""
    if isinstance(expected, Fraction):
        return contains_number(text, expected)
    joined = " ".join(text.split()).casefold()
    return bool(re.search(rf"(?<!\w){re.escape(expected)}(?!\w)", joined))


@rewards.register("graded")
def graded_reward(completion: str, answer: str) -> dict[str, float]:
    """1 for the marked answer, 0.5 when it stands somewhere in the text, else 0.01. "extracted": something is marked."""
    expected = reference(answer)
    if isinstance(expected, Fraction):
        extracted = float(marked_number(completion) is not None)
    else:
        extracted = float(bool(marked_text(completion)))
    if extracted and is_answer(marked_text(completion) or "", expected):
        return {"score": RIGHT, "acc": 1.0, "extracted": extracted}
    score = INSIDE if holds_answer(completion, expected) else WRONG
    return {"score": score, "acc": 0.0, "extracted": extracted}


@rewards.register("graded_answer")
def graded_answer_reward(completion: str, answer: str) -> dict[str, float]:
    """1, 0.5, 0.01 or 0, as the header says. "extracted": 1 when there is a pair of answer tags."""
    expected, given = reference(answer), tagged_answer(completion)
    if given is None:
        return {"score": NONE, "acc": 0.0, "extracted": 0.0}
    if is_answer(given, expected):
        return {"score": RIGHT, "acc": 1.0, "extracted": 1.0}
    return {"score": INSIDE if holds_answer(given, expected) else WRONG, "acc": 0.0, "extracted": 1.0}


def _marked_prediction(text: str) -> str | None:
    number = numeric_prediction(text)
    marked = marked_text(text) if number is None else number
    return plain(marked[:MAX_COMPARED]) if marked else None


def _tagged_prediction(text: str) -> str | None:
    given = tagged_answer(text)
    return None if given is None else numeric_prediction(f"<answer>{given}</answer>") or plain(given) or None


extractors.register("graded")(Extractor(_marked_prediction, reference))
extractors.register("graded_answer")(Extractor(_tagged_prediction, reference))
