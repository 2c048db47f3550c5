"""More rewards that compare answers: lm-evaluation-harness' graders, and graded ones."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from fractions import Fraction

from grpo_megatron.rewards.answers import (
    contains_number,
    marked_number,
    marked_text,
    numeric_prediction,
    parse_number,
    tagged_answer,
)
from grpo_megatron.rewards.reward import Extractor, extractors, rewards

INVALID = "[invalid]"

_STRICT = re.compile(r"#### (\-?[0-9\.\,]+)")
_COT_STRICT = re.compile(r"The answer is (\-?[0-9\.\,]+).")  # the last dot is any character, as there
_FLEXIBLE = re.compile(r"(-?[$0-9.,]{2,})|(-?[0-9]+)")


def normalized(text: str) -> str:
    """Normalizes as the harness before it compares. A reference may be the bare answer or the whole solution."""
    text = text.replace(",", "").replace("$", "")
    text = text[text.rfind("#### ") + 5 :] if "#### " in text else text  # (?s).*####, in linear time
    return re.sub(r"\.$", "", text).lower()


def _register(name: str, find: Callable[[str], str | None]) -> None:
    """Registers the reward `name`, 1 where `find` gives the answer, else 0: GSM8K as lm-evaluation-harness 3.0 grades it.

    exact_match, strict-match -> gsm8k_strict: the FIRST `#### N`, one space, N of [-0-9.,]. The same of the task gsm8k_cot ->
    gsm8k_cot_strict: the FIRST `The answer is N` and one more character. flexible-extract -> gsm8k_flexible: the LAST run of
    two or more of [$0-9.,], or of digits. Both sides then lose `,`, `$`, everything up to the last `#### ` and a final `.`,
    and are compared as lower-case strings; when nothing matches, "[invalid]" is compared. The harness first cuts a completion
    at its stop strings; here the generator does that. Our own `gsm8k` reads the last mark of any kind, and compares values.
    """

    def reward(completion: str, answer: str) -> dict[str, float]:
        prediction = find(completion)
        correct = float(normalized(INVALID if prediction is None else prediction) == normalized(answer))
        return {"score": correct, "acc": correct, "extracted": float(prediction is not None)}

    rewards.register(name)(reward)
    extractors.register(name)(Extractor(find, str.strip, normalized))


def _first(pattern: re.Pattern[str], text: str) -> str | None:
    match = pattern.search(text)
    return match[1].strip() if match else None


def _flexible(text: str) -> str | None:
    last = None
    for match in _FLEXIBLE.finditer(text):
        last = match
    return (last[1] or last[2]).strip() if last else None


_register("gsm8k_strict", functools.partial(_first, _STRICT))
_register("gsm8k_cot_strict", functools.partial(_first, _COT_STRICT))
_register("gsm8k_flexible", _flexible)


# -- graded rewards: 1 for the right answer, less for one that is nearly there -----------------------------------------

RIGHT, INSIDE, WRONG, NONE = 1.0, 0.5, 0.01, 0.0
# Characters that do not count at the ends of a text: ASCII, then the Chinese and Japanese full stop, commas, marks and quotes.
OUTER = " *_`~$\"'.,;:!?" + "\u3002\u3001\uff0c\uff1b\uff1a\uff01\uff1f\u201c\u201d\u300c\u300d\u300e\u300f"
MAX_COMPARED = 4096  # characters of an answer that are compared
# A word character of a script with spaces between words: not Thai to Burmese, Khmer, kana, Chinese characters.
_SPACED = r"[^\W\u0e00-\u109f\u1780-\u17ff\u3005\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]"


def reference(answer: str) -> Fraction | str:
    """Reads the reference answer, marked or bare: a number, or else plain text. Raises ValueError when it is blank."""
    marked = marked_text(answer)
    text = answer.strip() if marked is None else marked
    number = parse_number(text)
    if number is None and not text.strip():
        raise ValueError(f"the reference answer {answer[:80]!r} is empty")
    return plain(text) if number is None else number


def plain(text: str) -> str:
    """Normalizes a text for comparison: lower case, single spaces, no punctuation at the ends."""
    joined = " ".join(text.split()).casefold()
    return joined.strip(OUTER) or joined


def is_answer(text: str, expected: Fraction | str) -> bool:
    """Tells whether the text is the expected answer."""
    return parse_number(text) == expected if isinstance(expected, Fraction) else plain(text[:MAX_COMPARED]) == expected


def holds_answer(text: str, expected: Fraction | str) -> bool:
    """Tells whether the expected answer stands in the text, as a number or as words of its own. Linear time.

    In a script without spaces between words, any place counts.
    """
    if isinstance(expected, Fraction):
        return contains_number(text, expected)
    joined = " ".join(text.split()).casefold()
    before = rf"(?<!{_SPACED})" if re.match(_SPACED, expected) else ""
    after = rf"(?!{_SPACED})" if re.match(_SPACED, expected[-1:]) else ""
    return bool(re.search(before + re.escape(expected) + after, joined))


@rewards.register("graded")
def graded_reward(completion: str, answer: str) -> dict[str, float]:
    """Returns 1 for the marked answer, 0.5 where it stands somewhere, else 0.01. "extracted": something is marked."""
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
    """Returns 1 when the answer tags have the answer, 0.5 the answer and more, 0.01 another one, 0 without tags.

    The values are those of open-thought's tiny-grpo (train.py), which compares strings and reads the first pair of
    tags. Here the last pair counts, numbers are compared by value (18.00 is 18), and other texts without regard to
    case, white space and outer punctuation. "extracted": 1 when there is a pair of answer tags.
    """
    expected, given = reference(answer), _tagged(completion)
    if given is None:
        return {"score": NONE, "acc": 0.0, "extracted": 0.0}
    if is_answer(given, expected):
        return {"score": RIGHT, "acc": 1.0, "extracted": 1.0}
    return {"score": INSIDE if holds_answer(given, expected) else WRONG, "acc": 0.0, "extracted": 1.0}


def _tagged(text: str) -> str | None:
    given = tagged_answer(text)
    return None if given is None else given[:MAX_COMPARED]


def _marked_prediction(text: str) -> str | None:
    number = numeric_prediction(text)
    marked = marked_text(text) if number is None else number
    return plain(marked[:MAX_COMPARED]) if marked else None


def _tagged_prediction(text: str) -> str | None:
    given = _tagged(text)
    return None if given is None else numeric_prediction(f"<answer>{given}</answer>") or plain(given) or None


extractors.register("graded")(Extractor(_marked_prediction, reference))
extractors.register("graded_answer")(Extractor(_tagged_prediction, reference))


# -- the reward of the quickstart --------------------------------------------------------------------------------------

MAX_TAIL = 256  # characters from the last <answer> on; bounds the regular expression and the integer
_TAGGED_INTEGER = re.compile(r"<answer>\s*(-?[0-9]+)\s*</answer>\s*")


def final_integer(text: str) -> str | None:
    """Returns the integer in the answer tags that end the text, without leading zeros; None when there is none."""
    start = text.rfind("<answer>")
    if start < max(0, len(text) - MAX_TAIL):
        return None
    match = _TAGGED_INTEGER.fullmatch(text[start:])
    return None if match is None else str(int(match[1]))


extractors.register("arithmetic")(Extractor(final_integer, int))


@rewards.register("arithmetic")
def arithmetic_reward(completion: str, answer: str) -> dict[str, float]:
    """Returns 1 when the final integer equals `answer`, else 0.

    "format": 1 when the response ends with an integer in answer tags. "worked": 1 when its <think> part is not empty.
    Raises ValueError when `answer` is not an integer.
    """
    expected = int(answer)
    prediction = final_integer(completion)
    thought, closed, _ = completion.partition("<think>")[2].partition("</think>")
    correct = float(prediction is not None and int(prediction) == expected)
    return {
        "score": correct,
        "acc": correct,
        "format": float(prediction is not None),
        "worked": float(bool(closed and thought.strip())),
    }
