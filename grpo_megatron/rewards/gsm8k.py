r"""Exact numeric answers: the one extractor of GSM8K training and evaluation, and two rewards on top of it.

The last mark decides: `#### 18`, `<answer>18</answer>` or `\boxed{18}`, whichever comes last in the text. The number
has to follow the mark at once; currency signs, markdown and LaTeX dressing, thousands commas and a percent sign are
dropped, units may follow. Values are compared as exact fractions, so 12.50 = 25/2. What is not one plain number
(`9 * 2`, `10-20`, `5e3`, `1,23`, a digit outside ASCII) is no answer. GSM8K: arXiv 2110.14168.

Departures from verl's `gsm8k` reward: it reads only the last 300 characters, wants one space after `####`, takes no
`$`, compares strings, and knows only `####`; its "flexible" mode takes the last number of the text, marked or not.
"""

from __future__ import annotations

import re
from fractions import Fraction

from grpo_megatron.rewards.reward import Answers, answers, rewards

WINDOW = 256  # characters read after a mark; bounds every regular expression below, so time is linear in the text

_SIGNS_AND_SPACES = str.maketrans({"\u2212": "-", "\u00a0": " ", "\u202f": " ", "\u2009": " "})
_THOUSANDS = re.compile(r"(?<=[0-9])(?:\{,\}|,\\!|\\,)\s?(?=[0-9]{3}(?![0-9]))")  # LaTeX spellings of 1,234
_NUMBER = re.compile(
    r"""(?:\s | [*_`=~] | \\?\$ | [\u20ac\u00a3\u00a5] | \\\( | \\\[ | USD?(?=\s?\$))*  # $, euro, pound, yen
        (?P<sign>[-+]?) (?:\\?\$|[\u20ac\u00a3\u00a5])?
        (?: \\[dt]?frac \s*\{ (?P<top>[0-9]+) \}\s*\{ (?P<bottom>[0-9]+) \}
          | (?P<mixed>[0-9]+)\s+(?P<mixed_top>[0-9]+)\s?/\s?(?P<mixed_bottom>[0-9]+)
          | (?P<whole>[0-9]{1,3}(?:,[0-9]{3})+(?![0-9]) | [0-9]*) (?P<decimals>\.[0-9]+)? (?:\s?/\s?(?P<over>[0-9]+))?
        ) (?:\s?\\?%)?""",
    re.VERBOSE,
)
# the number goes on: an operator and an operand, a second number, an exponent, a malformed group, an identifier
_GOES_ON = re.compile(
    r"""\s*(?: [-+*/^=<>\u00d7\u00f7\u00b7\u2013] | \*\* | \\times | \\cdot | \\div ) \s* [-(\\{$]* [0-9]
      | \s+[.]?[0-9] | [,._':][0-9] | [A-Za-z][-+]?[0-9]""",
    re.VERBOSE,
)


def extract_answer(text: str) -> Fraction | None:
    """The number the text's last mark gives as its answer; None when there is no mark or no plain number behind it."""
    hashes, tag = text.rfind("####"), text.rfind("<answer>")
    box = max(text.rfind("\\boxed"), text.rfind("\\fbox"))
    last = max(hashes, tag, box)
    if last < 0:
        return None
    if last == hashes:
        return parse_number(text[last + 4 : last + 4 + 16 * WINDOW].lstrip().partition("\n")[0])
    if last == tag:
        start = last + len("<answer>")
        end = text.find("</answer>", start)
        return parse_number(text[start:end].strip()) if end >= 0 else None
    return _boxed(text[last : last + WINDOW])


def parse_number(text: str) -> Fraction | None:
    """The number `text` begins with, exactly; None when it begins with anything else or the number is an expression."""
    window = _THOUSANDS.sub(",", text[:WINDOW].translate(_SIGNS_AND_SPACES))
    match = _NUMBER.match(window)
    assert match is not None, "every part of the pattern is optional"
    if (match.end() == len(window) and len(text) > WINDOW) or _GOES_ON.match(window, match.end()):
        return None
    following = window[match.end() : match.end() + 1]
    if not following.isascii() and following.isnumeric():
        return None  # 4 and a full-width 2, or 5 and a one-half sign
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


def _boxed(text: str) -> Fraction | None:
    r"""The number of a text that starts with `\boxed{...}` or `\boxed 7`; None when the brace is not closed."""
    content = text.removeprefix("\\boxed").removeprefix("\\fbox").lstrip()
    if not content.startswith("{"):
        return parse_number(re.split(r"[$\n]", content, maxsplit=1)[0])
    depth = 0
    for position, character in enumerate(content):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return parse_number(content[1:position].strip())
    return None


def read_gold(answer: str) -> Fraction:
    """The reference answer as a number, marked or bare. Raises ValueError: without one no sample can be scored."""
    value = extract_answer(answer)
    value = parse_number(answer.strip()) if value is None else value
    if value is None:
        raise ValueError(f"the reference answer {answer[:80]!r} is not a number")
    return value


def contains_number(text: str, value: Fraction) -> bool:
    """Whether `value` stands anywhere in `text` as a number of its own, as a decimal or as a fraction. Linear time."""
    top, bottom = abs(value.numerator), value.denominator
    spellings = [] if bottom == 1 else [rf"{top}\s?/\s?{bottom}"]
    places = next((n for n in range(20) if (10**n) % bottom == 0), None)
    if places is not None:  # a finite decimal
        whole, rest = divmod(top * 10**places // bottom, 10**places)
        decimals = rf"\.{rest:0{places}d}0*" if places else r"(?:\.0*)?"
        spellings.append((f"{whole:,}".replace(",", ",?") if whole or not places else "0?") + decimals)
    sign = "-" if value < 0 else ""
    return bool(
        re.search(
            rf"(?<![0-9.])(?<![0-9],){sign}\$?(?:{'|'.join(spellings)})(?![0-9]|\.[0-9]|,[0-9]{{3}}(?![0-9]))", text
        )
    )


def answer_text(text: str) -> str | None:
    """The extracted number as text: `1234`, `-12.5`, or `1/3` when no decimal can write it."""
    value = extract_answer(text)
    if value is None:
        return None
    places = next((n for n in range(40) if 10**n % value.denominator == 0), None)
    if not places:
        return str(value)
    whole, rest = divmod(abs(value.numerator) * 10**places // value.denominator, 10**places)
    return f"{'-' if value < 0 else ''}{whole}.{rest:0{places}d}"


for _name in ("gsm8k", "graded", "arithmetic_steps"):
    answers.register(_name)(Answers(answer_text, read_gold))


@rewards.register("gsm8k")
def gsm8k(completion: str, answer: str) -> dict[str, float]:
    """1 when the extracted answer equals the reference, else 0. "extracted": 1 when there was an answer to compare."""
    gold, value = read_gold(answer), extract_answer(completion)
    correct = float(value == gold)
    return {"score": correct, "acc": correct, "extracted": float(value is not None)}


@rewards.register("graded")
def graded(completion: str, answer: str) -> dict[str, float]:
    """1 for the exact answer, 0.5 when the reference stands somewhere in the text as a number, 0.01 otherwise."""
    gold, value = read_gold(answer), extract_answer(completion)
    if value == gold:
        return {"score": 1.0, "acc": 1.0, "extracted": 1.0}
    score = 0.5 if contains_number(completion, gold) else 0.01
    return {"score": score, "acc": 0.0, "extracted": float(value is not None)}
