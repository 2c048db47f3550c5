r"""Are two single values one? Exact fractions, units, percent, ratios, bases and words here; formulas by math-verify.

In this order, the first that can tell decides: one string; two plain numbers (exact; a decimal of six places or more
may stand for a fraction it rounds, as in math-verify); numerals with a base (`1101_2`, digits compared, the base may be
left out); words (letters only, any case: `\text{Evelyn}` = Evelyn, while algebra would call anagrams equal); ratios
`1:2`; at last `rewards/formula.py`. Units are dropped (`5\text{ cm}` = 5), but 5 cm is not 5 m; `10\%` is 10 and 0.1.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction

PLACES = 6  # of a decimal that may stand for an endless one

_INTEGER = r"[0-9]{1,60}"
_RATIONAL = re.compile(
    rf"""(?P<sign>(?:[-+]\s*)*)
    (?: (?P<decimal>{_INTEGER}(?:\.{_INTEGER})?) (?:/(?P<over>{_INTEGER}(?:\.{_INTEGER})?))?
      | (?P<mixed>{_INTEGER})?\s?\\frac\{{(?P<top>-?{_INTEGER})\}}\{{(?P<bottom>-?{_INTEGER})\}} )""",
    re.VERBOSE,
)
_REPEATING = re.compile(r"(-?)([0-9]{0,20})\.([0-9]{0,20})\\overline\{([0-9]{1,20})\}")
_SPACED = re.compile(r"-?[0-9]{1,3}(?: [0-9]{3})+")
_GROUPED = re.compile(r"-?[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?")
_NUMERAL = re.compile(r"(-?[0-9A-Z.]+?)_\{?(?:\\text\{)?([0-9]{1,2}|[a-z]+)\}{0,2}")
_TEXT = re.compile(r"\\text\{([^{}]*)\}")
_TEXT_UNIT = re.compile(r"(.*(?:[0-9})/%]|\\pi))\s*\\text\{([^{}]*)\}(?:\s*\^?\{?[23]\}?)?", re.DOTALL)
_BARE_UNIT = re.compile(r"(.*[0-9}])\s+([A-Za-z][A-Za-z.]+(?: [A-Za-z.]+){0,3})(?:\^?\{?[23]\}?)?", re.DOTALL)
_JOINED_UNIT = re.compile(r"(-?[0-9.]+)(cm|mm|km|kg|ft|mph|min|inches|feet|miles|hours|days|degrees)(?:\^?\{?[23]\}?)?")
_DIMENSIONS = {  # units that exclude each other, by dimension
    "length": "mm | cm centimeter centimeters | m meter meters | km kilometer kilometers | in inch inches"
    " | ft foot feet | yd yard yards | mi mile miles",
    "time": "s sec second seconds | min minute minutes | h hr hour hours | day days | week weeks | month months"
    " | year years",
    "mass": "g gm gram grams | kg kilogram kilograms | lb pound pounds | oz ounce ounces",
    "money": "$ dollar dollars | cent cents",
    "half": "am a.m. a.m | pm p.m. p.m",
    "angle": "degree degrees | rad radian radians",
}
_NO_UNITS = {"pi", "or", "and", "sqrt", "sin", "cos", "tan", "log", "ln", "mod", "choose", "to", "over", "times"}
_UNITS = {
    name: (dimension, group.split()[0])
    for dimension, groups in _DIMENSIONS.items()
    for group in groups.split("|")
    for name in group.split()
}
_CLOCK = re.compile(r"([0-9]{1,2}:[0-9]{2})\s?([aApP])\.?\s?[mM]\.?")


def rational(text: str) -> Fraction | None:
    """The exact number when `text` is a plain one: an integer, a decimal, a fraction, a mixed number; else None."""
    if len(text) > 130:
        return None
    if _SPACED.fullmatch(text) or _GROUPED.fullmatch(text):
        text = text.replace(" ", "").replace(",", "")
    match = _RATIONAL.fullmatch(text)
    if match is None:
        return _repeating(text)
    part = match.groupdict()
    if part["decimal"]:
        over = Fraction(part["over"] or 1)
        if not over:
            return None
        value = Fraction(part["decimal"]) / over
    else:
        bottom = int(part["bottom"])
        if not bottom or (part["mixed"] and part["top"].startswith("-")):
            return None
        value = int(part["mixed"] or 0) + Fraction(int(part["top"]), bottom)
    return -value if part["sign"].count("-") % 2 else value


def _repeating(text: str) -> Fraction | None:
    r"""`0.1\overline{6}` = 1/6."""
    match = _REPEATING.fullmatch(text)
    if match is None:
        return None
    sign, whole, first, period = match.groups()
    value = Fraction(int(whole or 0))
    value += Fraction(int(first or 0) + Fraction(int(period), 10 ** len(period) - 1), 10 ** len(first))
    return -value if sign else value


def split_unit(text: str) -> tuple[str, str]:
    r"""(`text` without its unit, the unit in small letters or ""). `-\$5` -> ("-5", "$"), `5\text{ cm}^2` -> ("5", "cm")."""
    plain = text.replace("\\$", "").replace("$", "")
    unit = "$" if plain != text else ""
    whole = _TEXT.fullmatch(plain)
    plain = whole[1] if whole and whole[1][:1].isdigit() else plain
    match = _CLOCK.fullmatch(_TEXT.sub(r"\1", plain))
    if match:
        return match[1], match[2].lower() + "m"
    match = _TEXT_UNIT.fullmatch(plain) or _BARE_UNIT.fullmatch(plain) or _JOINED_UNIT.fullmatch(plain)
    if match and match[2].split() and match[2].split()[0].lower() not in _NO_UNITS:
        return match[1].strip().removesuffix("\\").strip(), unit or match[2].strip().lower()
    return plain.strip(), unit


def units_clash(one: str, other: str) -> bool:
    """Whether both are known units of one dimension, and not the same."""
    first, second = (next((_UNITS[word] for word in unit.split() if word in _UNITS), None) for unit in (one, other))
    return bool(first and second and first[0] == second[0] and first[1] != second[1])


def same_value(gold: str, answer: str, same_formula: Callable[[str, str], bool]) -> bool:
    """Whether two values (tidy LaTeX) are one; `same_formula` is asked last, and not for plain numbers or words."""
    if gold == answer:
        return bool(gold)
    (gold, gold_unit), (answer, answer_unit) = split_unit(gold), split_unit(answer)
    if not gold or not answer or units_clash(gold_unit, answer_unit):
        return False
    if "percent" in gold_unit:
        gold = gold.removesuffix("%") + "%"
    if "percent" in answer_unit:
        answer = answer.removesuffix("%") + "%"
    if gold.endswith("%") != answer.endswith("%"):
        return _same_percent(gold, answer, same_formula)
    return _same(gold.removesuffix("%").strip(), answer.removesuffix("%").strip(), same_formula)


def _same_percent(gold: str, answer: str, same_formula: Callable[[str, str], bool]) -> bool:
    """One has a percent sign: its number is meant, or a hundredth of it."""
    percent, plain = (gold, answer) if gold.endswith("%") else (answer, gold)
    percent = percent[:-1].strip()
    value, other = rational(percent), rational(plain)
    if value is not None and other is not None:
        return value == other or value / 100 == other
    return _same(percent, plain, same_formula) or same_formula(rf"\frac{{{percent}}}{{100}}", plain)


def _same(gold: str, answer: str, same_formula: Callable[[str, str], bool]) -> bool:
    if gold == answer:
        return True
    first, second = rational(gold), rational(answer)
    if first is not None and second is not None:
        return first == second or _rounds(gold, first, second) or _rounds(answer, second, first)
    numeral, other = _NUMERAL.fullmatch(gold), _NUMERAL.fullmatch(answer)
    if (numeral and other) or (numeral and rational(answer) is not None) or (other and first is not None):
        return _same_numeral(numeral, gold, other, answer)
    if ":" in gold and ":" in answer:
        return _same_ratio(gold.split(":"), answer.split(":"), same_formula)
    if _is_words(gold) or _is_words(answer):
        return _letters(gold) == _letters(answer) != ""
    gold, answer = (_TEXT.sub(r"\1", text) for text in (gold, answer))
    if "\\infty" in (gold.lstrip("+-"), answer.lstrip("+-")):
        return gold.lstrip("+") == answer.lstrip("+")
    choice = re.fullmatch(r"\(?([A-Za-z])\)?", gold)
    if choice and re.fullmatch(r"\(?[A-Za-z]\)?", answer):
        return choice[1] == answer.strip("()")  # to math-verify a is A
    if choice and re.match(rf"\(?{choice[1]}(?:\)|[.:]\s)", answer):
        return True  # (B) 12, B. twelve
    return same_formula(gold, answer)


def _rounds(text: str, value: Fraction, exact: Fraction) -> bool:
    """Whether `text` is a decimal of PLACES or more that rounds `exact`, which no decimal can write."""
    places = len(text.partition(".")[2]) if "/" not in text and "frac" not in text else 0
    endless = 10**60 % exact.denominator != 0
    return places >= PLACES and endless and abs(value - exact) * 2 * 10**places <= 1


def _same_numeral(gold: re.Match[str] | None, gold_text: str, answer: re.Match[str] | None, answer_text: str) -> bool:
    names = {"two": "2", "three": "3", "four": "4", "five": "5", "six": "6", "seven": "7", "eight": "8", "nine": "9"}
    digits = [match[1] if match else text for match, text in ((gold, gold_text), (answer, answer_text))]
    bases = {names.get(match[2], match[2]) for match in (gold, answer) if match}
    return digits[0].lstrip("0") == digits[1].lstrip("0") and len(bases) == 1


def _same_ratio(gold: list[str], answer: list[str], same_formula: Callable[[str, str], bool]) -> bool:
    if len(gold) != len(answer):
        return False
    first, second = [rational(part.strip()) for part in gold], [rational(part.strip()) for part in answer]
    if all(first) and all(second):
        return len({a / b for a, b in zip(first, second, strict=True) if a and b}) == 1
    return all(_same(g.strip(), a.strip(), same_formula) for g, a in zip(gold, answer, strict=True))


def _is_words(text: str) -> bool:
    r"""A text of two letters or more in \text, or a bare word of four or more."""
    inner = "".join(_TEXT.findall(text))
    bare = _TEXT.sub("", text)
    return len(re.findall("[A-Za-z]", inner)) > 1 or bool(re.search(r"(?<![\\A-Za-z])[A-Za-z]{4,}", bare))


def _letters(text: str) -> str:
    return re.sub(r"[^0-9a-z]", "", _TEXT.sub(r"\1", text).casefold())
