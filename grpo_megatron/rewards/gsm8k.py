r"""Exact numeric answers: the one extractor of GSM8K training and evaluation, and the reward on top of it.

The last mark decides: `#### 18`, `<answer>18</answer>` or `\boxed{18}`, whichever comes last in the text. The number
must follow the mark at once. Currency signs, markdown, LaTeX commands, thousands commas and a percent sign are dropped;
units may follow. Values are compared as exact fractions, so 12.50 = 25/2. What is not one plain number (`9 * 2`,
`10-20`, `5e3`, `1,23`, a digit outside ASCII) is no prediction. GSM8K: arXiv 2110.14168.

Departures from verl's `gsm8k` reward: verl reads only the last 300 characters, needs one space after `####`, accepts no
`$`, compares strings, and knows only `####`. Its "flexible" mode takes the last number of the text, marked or not.
"""

from __future__ import annotations

import re
from fractions import Fraction

from grpo_megatron.rewards.math.boxed import last_boxed
from grpo_megatron.rewards.reward import Extractor, extractors, rewards

WINDOW = 256  # characters read after a mark; bounds every regular expression below, so time is linear in the text

_SIGNS_AND_SPACES = str.maketrans({"\u2212": "-", "\u00a0": " ", "\u202f": " ", "\u2009": " "})
_LATEX_THOUSANDS = re.compile(r"(?<=[0-9])(?:\{,\}|,\\!|\\,)\s?(?=[0-9]{3}(?![0-9]))")  # LaTeX spellings of 1,234
_LEADING_NUMBER = re.compile(
    r"""(?:\s | [*_`=~] | \\?\$ | [\u20ac\u00a3\u00a5] | \\\( | \\\[ | USD?(?=\s?\$))*  # $, euro, pound, yen
        (?P<sign>[-+]?) (?:\\?\$|[\u20ac\u00a3\u00a5])?
        (?: \\[dt]?frac \s*\{ (?P<top>[0-9]+) \}\s*\{ (?P<bottom>[0-9]+) \}
          | (?P<mixed>[0-9]+)\s+(?P<mixed_top>[0-9]+)\s?/\s?(?P<mixed_bottom>[0-9]+)
          | (?P<whole>[0-9]{1,3}(?:,[0-9]{3})+(?![0-9]) | [0-9]*) (?P<decimals>\.[0-9]+)? (?:\s?/\s?(?P<over>[0-9]+))?
        ) (?:\s?\\?%)?""",
    re.VERBOSE,
)
# what may not follow a number: an operator and an operand, a second number, an exponent, a malformed group, an identifier
_CONTINUATION = re.compile(
    r"""\s*(?: [-+*/^=<>\u00d7\u00f7\u00b7\u2013] | \*\* | \\times | \\cdot | \\div ) \s* [-(\\{$]* [0-9]
      | \s+[.]?[0-9] | [,._':][0-9] | [A-Za-z][-+]?[0-9]""",
    re.VERBOSE,
)


def marked_text(text: str) -> str | None:
    """What stands behind the text's last mark: the line, the content of the tags or of the box. None: nothing is marked."""
    hashes, tag = text.rfind("####"), text.rfind("<answer>")
    box = max(text.rfind("\\boxed"), text.rfind("\\fbox"))
    last = max(hashes, tag, box)
    if last < 0:
        return None
    if last == hashes:
        return text[last + 4 : last + 4 + 16 * WINDOW].lstrip().partition("\n")[0]
    if last == tag:
        start = last + len("<answer>")
        end = text.find("</answer>", start)
        return text[start:end].strip() if end >= 0 else None
    return last_boxed(text[last : last + WINDOW], joined=False)


def marked_number(text: str) -> Fraction | None:
    """The number behind the text's last mark; None when there is no mark, or no plain number behind it."""
    marked = marked_text(text)
    return None if marked is None else parse_number(marked)


def parse_number(text: str) -> Fraction | None:
    """The exact number that `text` begins with; None when it begins with anything else, or with an expression."""
    window = _LATEX_THOUSANDS.sub(",", text[:WINDOW].translate(_SIGNS_AND_SPACES))
    match = _LEADING_NUMBER.match(window)
    assert match is not None, "every part of the pattern is optional"
    if (match.end() == len(window) and len(text) > WINDOW) or _CONTINUATION.match(window, match.end()):
        return None
    following = window[match.end() : match.end() + 1]
    if not following.isascii() and following.isnumeric():
        return None  # for example 4 and a full-width 2, or 5 and a one-half sign
    part = match.groupdict()
    if part["top"]:
        value = _ratio(part["top"], part["bottom"])
    elif part["mixed"]:
        value = _ratio(part["mixed_top"], part["mixed_bottom"])
        value = None if value is None else value + int(part["mixed"])
    elif part["whole"] or part["decimals"]:
        value = _ratio(part["whole"].replace(",", "") + (part["decimals"] or ""), part["over"] or "1")
    else:
        value = None
    return -value if value is not None and part["sign"] == "-" else value


def _ratio(top: str, bottom: str) -> Fraction | None:
    return Fraction(top) / int(bottom) if int(bottom) else None


def numeric_answer(answer: str) -> Fraction:
    """The reference answer as a number, marked or bare. Raises ValueError: without one no sample can be graded."""
    if len(answer) <= WINDOW and answer.isascii() and answer.isdigit():  # most answers, in a tenth of the time
        return Fraction(int(answer))
    value = marked_number(answer)
    value = parse_number(answer.strip()) if value is None else value
    if value is None:
        raise ValueError(f"the reference answer {answer[:80]!r} is not a number")
    return value


def contains_number(text: str, value: Fraction) -> bool:
    """Whether `value` stands anywhere in `text` as a number of its own, as a decimal or as a fraction. Linear time."""
    numerator, denominator = abs(value.numerator), value.denominator
    spellings = []
    if denominator != 1:
        spellings.append(rf"{numerator}\s?/\s?{denominator}")
    places = _decimal_places(value, 20)
    if places is not None:
        whole, rest = divmod(numerator * 10**places // denominator, 10**places)
        decimals = rf"\.{rest:0{places}d}0*" if places else r"(?:\.0*)?"
        integer = f"{whole:,}".replace(",", ",?") if whole or not places else "0?"
        spellings.append(integer + decimals)
    sign = "-" if value < 0 else ""
    before, after = r"(?<![0-9.])(?<![0-9],)", r"(?![0-9]|\.[0-9]|,[0-9]{3}(?![0-9]))"  # no part of a longer number
    return bool(re.search(rf"{before}{sign}\$?(?:{'|'.join(spellings)}){after}", text))


def _decimal_places(value: Fraction, limit: int) -> int | None:
    """The number of decimals, below `limit`, that write the value exactly; None when no number does."""
    return next((places for places in range(limit) if 10**places % value.denominator == 0), None)


def numeric_prediction(text: str) -> str | None:
    """The marked number as text: `1234`, `-12.5`, or `1/3` when no decimal is exact."""
    value = marked_number(text)
    if value is None:
        return None
    places = _decimal_places(value, 40)
    if not places:
        return str(value)
    whole, rest = divmod(abs(value.numerator) * 10**places // value.denominator, 10**places)
    return f"{'-' if value < 0 else ''}{whole}.{rest:0{places}d}"


for _name in ("gsm8k", "arithmetic_steps"):
    extractors.register(_name)(Extractor(numeric_prediction, numeric_answer))


@rewards.register("gsm8k")
def gsm8k_reward(completion: str, answer: str) -> dict[str, float]:
    """1 when the prediction equals the answer, else 0. "extracted": 1 when there is a prediction to compare."""
    expected, prediction = numeric_answer(answer), marked_number(completion)
    correct = float(prediction == expected)
    return {"score": correct, "acc": correct, "extracted": float(prediction is not None)}
