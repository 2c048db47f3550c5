"""Single values: fractions, units, percent, ratios, bases and words here; formulas by math-verify (sympy), behind guards.

A policy may write any text. `refuses` keeps from math-verify what is long, nested or huge. What may still run for ever
ends by TIME_LIMIT_S; a call that hangs in C is ended from outside: the pool kills its worker, whose memory is bounded.
Nothing here evaluates Python: latex2sympy2 is a grammar (ANTLR), and math-verify's search for expressions, which calls
sympy's `parse_expr`, is not used.
"""

from __future__ import annotations

import functools
import itertools
import logging
import re
from fractions import Fraction
from typing import Any

from grpo_megatron.processes.process import time_limit

MAX_FORMULA = 300  # characters
MAX_NESTING = 12
TIME_LIMIT_S = 2.0  # processor seconds per comparison

_TOWER = re.compile(r"\^\s?(?:[0-9]{5,}|\{[^{}A-Za-z]*(?:[0-9]{5,}|\^|!)|[0-9]+\s?\^)")
_POWER_OF_POWER = re.compile(r"\([^()]*\^[^()]*\)\s?\^\s?\{?[0-9]{3,}")
_FACTORIAL_POWER = re.compile(r"([0-9a-z]!)\s?\^")  # 3!^2: the grammar reads 3!^(2)
_FACTOR_BEFORE_BRACKET = re.compile(r"(?<![A-Za-z\\])([0-9a-zA-Z])\s?\(")  # n(n-1)!: no function n
_SMALL_FACTORIAL = re.compile(r"\((?!.{0,11}[0-9]{4})[0-9a-z+-]{1,12}\)\s?!(?!\s?!)")  # (n-1)!, (2n+1)!
_HUGE = re.compile(r"[0-9]{60,}|[0-9]{4,}\s?!|[)}!]\s?!\s?!?|(?:binom|choose)[^A-Za-z]*[0-9]{5,}")


def refuses(text: str) -> bool:
    """Tells whether a formula is kept from sympy; it equals only the same string.

    Refused are other characters than printable ASCII, long and deep texts, towers of powers, huge factorials and literals.
    """
    if len(text) > MAX_FORMULA or not (text.isascii() and text.isprintable()):
        return True
    depths = itertools.accumulate((character in "({[") - (character in ")}]") for character in text)
    text = _SMALL_FACTORIAL.sub("n", text)
    return max(depths, default=0) > MAX_NESTING or any(p.search(text) for p in (_TOWER, _HUGE, _POWER_OF_POWER))


@functools.lru_cache(maxsize=4096)  # a prompt's samples share a few answers
def same_formula(answer: str, prediction: str) -> bool:
    """Tells whether math-verify calls two LaTeX formulas equivalent. Raises TimeoutError after TIME_LIMIT_S."""
    if refuses(answer) or refuses(prediction):
        return False
    import_math_verify()
    with time_limit(TIME_LIMIT_S, "a formula"):
        first, second = parsed(answer), parsed(prediction)
        if first is None or second is None or _differ(first, second):
            return False
        return _verify(first, second) or _same_where_positive(first, second)


@functools.cache
def import_math_verify() -> Any:
    """Imports the library, once per process; this takes a second or two."""
    import math_verify.grader
    import math_verify.parser

    for name in ("math_verify", "latex2sympy2_extended"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # they warn that their own time limit is off
    return math_verify


def is_near(exact: str, decimal: str) -> bool:
    """Tells whether `decimal` rounds `exact`: they differ by one unit in its last place at most. Raises TimeoutError."""
    places = len(decimal.partition(".")[2])
    if refuses(exact) or not places:
        return False
    import_math_verify()  # outside the time limit
    with time_limit(TIME_LIMIT_S, "a rounding"):
        try:
            return bool(abs(complex(parsed(exact).evalf(20)) - float(decimal)) <= 10.0**-places)
        except (TypeError, ValueError, AttributeError):  # no number, or outside the grammar
            return False


def parsed(text: str) -> Any:
    """Parses a LaTeX formula for sympy; None for one outside the grammar."""
    library = import_math_verify()
    text = _FACTORIAL_POWER.sub(r"(\1)^", text)
    if "!" in text:
        text = _FACTOR_BEFORE_BRACKET.sub(r"\1\\cdot (", text)
    from latex2sympy2_extended.latex2sympy2 import NormalizationConfig, normalize_latex

    config = NormalizationConfig(
        basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none", equations=False
    )
    try:
        return library.parser.parse_latex_cached(normalize_latex(text, config=config))
    except Exception:  # noqa: BLE001 - a formula outside the grammar equals nothing
        return None


def _differ(answer: Any, prediction: Any) -> bool:
    """Tells whether two expressions differ at one point: this settles most wrong predictions without `simplify`.

    Differences are relative. Without decimals 25 digits must agree, so that 2^-99 is not 2^-98: math-verify rounds.
    """
    from sympy import Expr, Float

    if not (isinstance(answer, Expr) and isinstance(prediction, Expr)):
        return False
    if answer.is_Rational and prediction.is_Rational:
        return bool(answer != prediction)
    tolerance = 1e-5 if answer.has(Float) or prediction.has(Float) else 1e-25
    try:
        first, second = _at_a_point(answer, prediction)
        return bool(abs(first - second) > tolerance * max(abs(first), abs(second), 1e-40))  # False for nan
    except Exception:  # noqa: BLE001 - no number at this point; math-verify decides
        return False


def _at_a_point(answer: Any, prediction: Any, negative: str = "") -> list[Any]:
    """Returns both values at one positive point, to 60 digits; the letter `negative` is below zero there."""
    from sympy import Rational

    names = sorted({symbol.name for symbol in answer.free_symbols | prediction.free_symbols})
    point = {name: Rational(618034 + 377000 * index, 10**6) for index, name in enumerate(names)}
    point |= {negative: -point[negative]} if negative else {}
    sides = (answer, prediction)
    return [side.subs({symbol: point[symbol.name] for symbol in side.free_symbols}).evalf(60) for side in sides]


def _same_where_positive(answer: Any, prediction: Any) -> bool:
    r"""Compares with positive letters: \sqrt{1/n} = 1/\sqrt{n}. Not |x| and x, which are real and differ below zero."""
    from sympy import Expr, Symbol

    if not (isinstance(answer, Expr) and isinstance(prediction, Expr)):
        return False
    try:
        for letter in {symbol.name for symbol in answer.free_symbols | prediction.free_symbols}:
            first, second = _at_a_point(answer, prediction, negative=letter)
            if first.is_real and second.is_real and abs(first - second) > 1e-25 * abs(first):
                return False
    except Exception:  # noqa: BLE001 - no number at this point
        return False
    positive = [
        side.subs({symbol: Symbol(symbol.name, positive=True) for symbol in side.free_symbols})
        for side in (answer, prediction)
    ]
    return positive != [answer, prediction] and _verify(*positive)


def _verify(answer: Any, prediction: Any) -> bool:
    from sympy import Expr, factorial, gammasimp

    try:
        if isinstance(answer, Expr) and isinstance(prediction, Expr) and (answer - prediction).has(factorial):
            return bool(gammasimp((answer / prediction).rewrite("gamma")) == 1)
        return bool(import_math_verify().grader.sympy_expr_eq(answer, prediction, 6, 15))
    except Exception:  # noqa: BLE001 - sympy raises exceptions of many types at odd formulas
        return False


PLACES = 6  # decimals of a number that may stand for a fraction without finite decimal

_INTEGER = r"[0-9]{1,60}"
_RATIONAL = re.compile(
    rf"""(?P<sign>(?:[-+]\s*)*)
    (?: (?P<decimal>{_INTEGER}(?:\.{_INTEGER})?) (?:/(?P<over>{_INTEGER}(?:\.{_INTEGER})?))?
      | (?P<mixed>{_INTEGER})?\s?\\frac\{{(?P<top>-?{_INTEGER})\}}\{{(?P<bottom>-?{_INTEGER})\}} )""",
    re.VERBOSE,
)
_RATIO_WORD = re.compile(r"^([0-9]+)\s?(?:to\s|\\text\{to\}\s?)\s?([0-9]+)$")
_REPEATING = re.compile(r"(-?)([0-9]{0,20})\.([0-9]{0,20})\\overline\{([0-9]{1,20})\}")
_SPACED = re.compile(r"-?[0-9]{1,3}(?: [0-9]{3})+")
_GROUPED = re.compile(r"-?[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?")
_NUMERAL = re.compile(r"(-?[0-9A-Z.]+?)_\{?(?:\\text\{)?([0-9]{1,2}|[a-z]+)\}{0,2}")
_TEXT_GROUP = re.compile(r"\\text\{([^{}]*)\}")
_TEXT_UNIT = re.compile(r"(.*(?:[0-9})/%]|\\pi))\s*\\text\{([^{}]*)\}(?:\s*\^?\{?[23]\}?)?", re.DOTALL)
_BARE_UNIT = re.compile(r"(.*[0-9}])\s+([A-Za-z][A-Za-z.]+(?: [A-Za-z.]+){0,3})(?:\^?\{?[23]\}?)?", re.DOTALL)
_JOINED_UNIT = re.compile(r"(-?[0-9.]+)(cm|mm|km|kg|ft|mph|min|inches|feet|miles|hours|days|degrees)(?:\^?\{?[23]\}?)?")
_DIMENSIONS = {  # units of one dimension exclude each other
    "length": "mm | cm centimeter centimeters | m meter meters | km kilometer kilometers | in inch inches"
    " | ft foot feet | yd yard yards | mi mile miles",
    "time": "s sec second seconds | min minute minutes | h hr hour hours | day days | week weeks | month months"
    " | year years",
    "mass": "g gm gram grams | kg kilogram kilograms | lb pound pounds | oz ounce ounces",
    "money": "$ dollar dollars | cent cents",
    "half": "am a.m. a.m | pm p.m. p.m",
    "angle": "degree degrees | rad radian radians",
}
_NOT_UNITS = {"pi", "or", "and", "sqrt", "sin", "cos", "tan", "log", "ln", "mod", "choose", "to", "over", "times"}
_UNITS: dict[str, tuple[str, str]] = {}  # name of a unit -> (dimension, shortest name)
for _dimension, _groups in _DIMENSIONS.items():
    for _names in map(str.split, _groups.split("|")):
        _UNITS |= dict.fromkeys(_names, (_dimension, _names[0]))
_CLOCK = re.compile(r"([0-9]{1,2}:[0-9]{2})\s?([aApP])\.?\s?[mM]\.?")


def rational(text: str) -> Fraction | None:
    """Returns the exact number of a plain one: integer, decimal, fraction, mixed number; None for other texts."""
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
    r"""Reads a repeating decimal: `0.1\overline{6}` = 1/6."""
    match = _REPEATING.fullmatch(text)
    if match is None:
        return None
    sign, integer, first, period = match.groups()
    value = int(integer or 0) + (int(first or 0) + Fraction(int(period), 10 ** len(period) - 1)) / 10 ** len(first)
    return -value if sign else value


def split_unit(text: str) -> tuple[str, str]:
    r"""Splits off the unit, in small letters or "". `-\$5` -> ("-5", "$"), `5\text{ cm}^2` -> ("5", "cm")."""
    plain = text.replace("\\$", "").replace("$", "")
    unit = "$" if plain != text else ""
    group = _TEXT_GROUP.fullmatch(plain)
    plain = group[1] if group and group[1][:1].isdigit() else plain
    match = _CLOCK.fullmatch(_TEXT_GROUP.sub(r"\1", plain))
    if match:
        return match[1], match[2].lower() + "m"
    match = _TEXT_UNIT.fullmatch(plain) or _BARE_UNIT.fullmatch(plain) or _JOINED_UNIT.fullmatch(plain)
    if match and match[2].split() and match[2].split()[0].lower() not in _NOT_UNITS:
        return match[1].strip().removesuffix("\\").strip(), unit or match[2].strip().lower()
    return plain.strip(), unit


def units_clash(one: str, other: str) -> bool:
    """Tells whether both are different units of one dimension."""
    unknown = "", ""
    first, second = (next((_UNITS[word] for word in text.split() if word in _UNITS), unknown) for text in (one, other))
    return first[0] == second[0] and first[1] != second[1]


def same_value(answer: str, prediction: str) -> bool:
    r"""Tells whether two values (tidy LaTeX) are equal. The first test that can tell decides, in this order.

    1. one string; 2. two plain numbers (exact; a decimal of PLACES or more may stand for a fraction that it rounds, as
    in math-verify); 3. numerals with a base (`1101_2`: digits are compared, the base may be left out); 4. words
    (letters only, any case, while algebra would call anagrams equal); 5. ratios `1:2`; 6. math-verify. Units are
    dropped (`5\text{ cm}` = 5), but 5 cm is not 5 m. `10\%` is both 10 and 0.1.
    """
    if answer == prediction:
        return bool(answer)
    if "\\approx" in answer + prediction:
        return _same_rounded(answer, prediction)
    answer, answer_unit = split_unit(answer)
    prediction, prediction_unit = split_unit(prediction)
    if not answer or not prediction or units_clash(answer_unit, prediction_unit):
        return False
    answer = answer.removesuffix("%") + "%" if "percent" in answer_unit else answer
    prediction = prediction.removesuffix("%") + "%" if "percent" in prediction_unit else prediction
    if answer.endswith("%") != prediction.endswith("%"):
        return _same_percent(answer, prediction)
    return _same(answer.removesuffix("%").strip(), prediction.removesuffix("%").strip())


def _same_rounded(answer: str, prediction: str) -> bool:
    r"""Compares where one or both are `exact \approx decimal`: the exact values, or the decimal with a decimal answer."""
    exact, decimal = _split_rounded(answer)
    other, other_decimal = _split_rounded(prediction)
    if same_value(exact, other):
        return True
    if other_decimal and not decimal:
        return "." in exact and rational(exact) == rational(other_decimal) and is_near(other, other_decimal)
    return bool(decimal) and not other_decimal and "." in other and rational(other) == rational(decimal)


def _split_rounded(text: str) -> tuple[str, str]:
    exact, _, decimal = text.partition("\\approx")
    return exact.strip(), split_unit(decimal.strip())[0]


def _same_percent(answer: str, prediction: str) -> bool:
    """Compares where one of the two has a percent sign: it means its number, or a hundredth of it."""
    percent, plain = (answer, prediction) if answer.endswith("%") else (prediction, answer)
    percent = percent[:-1].strip()
    value, other = rational(percent), rational(plain)
    if value is not None and other is not None:
        return value == other or value / 100 == other
    return _same(percent, plain) or same_formula(rf"\frac{{{percent}}}{{100}}", plain)


def _same(answer: str, prediction: str) -> bool:
    if answer == prediction:
        return True
    first, second = rational(answer), rational(prediction)
    if first is not None and second is not None:
        return first == second or _rounds(answer, first, second) or _rounds(prediction, second, first)
    numeral, other = _NUMERAL.fullmatch(answer), _NUMERAL.fullmatch(prediction)
    if (numeral and other) or (numeral and second is not None) or (other and first is not None):
        bases = {_BASES.get(match[2], match[2]) for match in (numeral, other) if match}
        digits = {(numeral[1] if numeral else answer).lstrip("0"), (other[1] if other else prediction).lstrip("0")}
        return len(digits) == len(bases) == 1  # the base may be left out
    answer, prediction = _RATIO_WORD.sub(r"\1:\2", answer), _RATIO_WORD.sub(r"\1:\2", prediction)
    if ":" in answer and ":" in prediction:
        return _same_ratio(answer.split(":"), prediction.split(":"))
    if _is_words(answer) or _is_words(prediction):
        return _letters(answer) == _letters(prediction) != ""
    answer, prediction = _TEXT_GROUP.sub(r"\1", answer), _TEXT_GROUP.sub(r"\1", prediction)
    if "\\infty" in (answer.lstrip("+-"), prediction.lstrip("+-")):
        return answer.lstrip("+") == prediction.lstrip("+")
    choice = re.fullmatch(r"\(?([A-Za-z])\)?", answer)
    if choice and re.fullmatch(r"\(?[A-Za-z]\)?", prediction):
        return choice[1] == prediction.strip("()")  # math-verify takes a for A
    if choice and re.match(rf"\(?{choice[1]}(?:\)|[.:]\s?)", prediction):
        return True  # (B) 12, B. twelve
    if _is_equation(answer) != _is_equation(prediction):
        return False  # math-verify would compare 1 with the right side of x + y = 1
    return same_formula(answer, prediction)


def _is_equation(text: str) -> bool:
    """Tells whether a text is an equation with an operation on its left side, and no definition such as `P(A) = 0.5`."""
    left, sign, _ = re.sub(r"\([^()]*\)", "", text).partition("=")
    has_factor = re.match(r"-?[0-9.]+\s?\\?[A-Za-z]", left.strip())  # 2x = 1
    return bool(sign) and bool(has_factor or re.search(r"[-+*^0-9]", left.strip()[1:]))


def _rounds(text: str, value: Fraction, exact: Fraction) -> bool:
    """Tells whether `text` is a decimal of PLACES or more that rounds `exact`, which is no finite decimal.

    Zeros in front do not count beyond the second: 0.000001 is not 1/700000.
    """
    decimals = text.partition(".")[2] if "/" not in text and "frac" not in text else ""
    is_endless = 10**60 % exact.denominator != 0
    is_precise = len(decimals) >= PLACES and len(text.lstrip("-0.")) >= PLACES - 2
    return is_precise and is_endless and abs(value - exact) * 2 * 10 ** len(decimals) <= 1


_BASES = {
    name: str(base) for base, name in enumerate(["two", "three", "four", "five", "six", "seven", "eight", "nine"], 2)
}


def _same_ratio(answer: list[str], prediction: list[str]) -> bool:
    if len(answer) != len(prediction):
        return False
    first, second = [rational(part.strip()) for part in answer], [rational(part.strip()) for part in prediction]
    if all(first) and all(second):
        return len({a / b for a, b in zip(first, second, strict=True) if a and b}) == 1
    return all(_same(a.strip(), b.strip()) for a, b in zip(answer, prediction, strict=True))


def _is_words(text: str) -> bool:
    r"""Tells whether a text has two letters or more in \text, or a bare word of four or more."""
    inner = "".join(_TEXT_GROUP.findall(text))
    bare = _TEXT_GROUP.sub("", text)
    return len(re.findall("[A-Za-z]", inner)) > 1 or bool(re.search(r"(?<![\\A-Za-z])[A-Za-z]{4,}", bare))


def _letters(text: str) -> str:
    return re.sub(r"[^0-9a-z]", "", _TEXT_GROUP.sub(r"\1", text).casefold())
