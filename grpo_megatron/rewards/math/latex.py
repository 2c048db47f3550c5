r"""One spelling for equal LaTeX answers: removes sizes, spacing, fonts and thousands commas, completes short fractions.

`tidy` keeps everything that can change the meaning; `tree.py` and `value.py` read brackets, separators, relations and
units. Text stays as `\text{...}`; a percent sign is `%`; white space stays only where it separates (`\pi r`, `1 000`,
words). Linear or quadratic time in at most `tree.MAX_ANSWER` characters.
"""

from __future__ import annotations

import re

_UNICODE = str.maketrans(
    {
        "\u2212": "-",
        "\u2013": "-",
        "\u00a0": " ",
        "\u2009": " ",
        "\u202f": " ",
        "\u00d7": "\\times ",
        "\u00b7": "\\cdot ",
        "\u03c0": "\\pi ",
        "\u221e": "\\infty ",
        "\u00b0": "^\\circ ",
        "\u2264": "\\le ",
        "\u2265": "\\ge ",
        "\u222a": "\\cup ",
        "\u2208": "\\in ",
        "\u00b1": "\\pm ",
        "\u211d": "\\mathbb{R}",
        "\u2205": "\\emptyset ",
        "\u20ac": "\\$",
        "\u00a3": "\\$",
    }
)
_ASCII_RELATIONS = (  # `5!=120` has a factorial, `x != 3` has not
    (re.compile(r">\s?="), r"\\ge "),
    (re.compile(r"<\s?="), r"\\le "),
    (re.compile(r"(?<=\s)!="), r"\\ne "),
)
_LATEX_COMMA = re.compile(r"(?<=[0-9])(?:\{,\}|\\!,|,\\!|,\\,|\\,|\\;|\\ |~)\s*(?:\\!)?(?=[0-9]{3}(?![0-9]))")
_BRACED_NUMBER = re.compile(r"(?<!\\)\{(-?[0-9]{1,3}(?:,[0-9]{3})+)\}")
_SIZES = re.compile(r"\\(?:left|right|[bB]igg?[lrm]?|displaystyle|textstyle|limits|nolimits)(?![A-Za-z])\.?")
_SPACES = re.compile(r"\\[,;:! ]|\\q?quad(?![A-Za-z])|~|\\(?:\(|\)|\[|\])|\\v?phantom\{[^{}]*\}|\\hspace\{[^{}]*\}")
_TEXT_COMMAND = re.compile(
    r"\\(?:text|textbf|textit|textrm|textnormal|texttt|textsc|mbox|hbox|mathrm|operatorname)\s*\{"
)
_FONT = re.compile(r"\\(?:mathbf|boldsymbol|bm|mathit|mathsf|mathcal|rm|bf|it)(?![A-Za-z])\s*")
_COLOR = re.compile(r"\\(?:text)?color\s*\{[A-Za-z]+\}")
_WORDLESS_TEXT = re.compile(r"\\text\{([^{}A-Za-z]*)\}")
_CHOOSE = re.compile(r"\{([^{}\\]+)\\choose\s*([^{}\\]+)\}")
_SYNONYMS = {
    "dfrac": "frac",
    "tfrac": "frac",
    "cfrac": "frac",
    "leqslant": "le",
    "leq": "le",
    "geqslant": "ge",
    "geq": "ge",
    "neq": "ne",
    "lbrace": "{",
    "rbrace": "}",
    "lbrack": "[",
    "rbrack": "]",
    "varnothing": "emptyset",
    "lvert": "|",
    "rvert": "|",
    "vert": "|",
    "lt": "<",
    "gt": ">",
    "land": "text{and}",
    "lor": "text{or}",
    "degree": "circ",
    "infin": "infty",
    "simeq": "approx",
    "sim": "approx",
}
_SYNONYM = re.compile(r"\\(" + "|".join(sorted(_SYNONYMS, key=len, reverse=True)) + r")(?![A-Za-z])")
_PLAIN = {"[", "]", "|", "<", ">"}  # without a backslash
_TRIG = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![A-Za-z])")
_DEGREES = re.compile(r"\s*\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![A-Za-z]))")
_NUMBER_DEGREES = re.compile(r"([0-9]+(?:\.[0-9]+)?)" + _DEGREES.pattern)
_ARGUMENT = r"(?:\\[A-Za-z]+|[0-9A-Za-z])"
_SHORT = (
    (re.compile(rf"\\frac\s*({_ARGUMENT})\s*({_ARGUMENT})"), r"\\frac{\1}{\2}"),
    (re.compile(rf"\\frac\s*({_ARGUMENT})\s*(?=\{{)"), r"\\frac{\1}"),
    (re.compile(rf"(\\frac\s*\{{[^{{}}]*\}})\s*({_ARGUMENT})"), r"\1{\2}"),
    (re.compile(rf"\\sqrt\s*(\[[^\[\]]*\])?\s*({_ARGUMENT})"), r"\\sqrt\1{\2}"),
    (re.compile(r"([_^])\s*\{([0-9A-Za-z])\}"), r"\1\2"),
)
_MIXED = re.compile(r"(?<![0-9.A-Za-z}_^/])([0-9]+)\s+([0-9]+)\s?/\s?([0-9]+)(?![0-9])")
# What is left of the line that an answer was cut from: alignment, tags, ends of proofs and of environments.
_DEBRIS = re.compile(
    r"""(?:\s|[.,;:&]|\x00|\\+$|\{\}|\\(?:blacksquare|square|Box|qed|qedsymbol|hfill|newline)(?![A-Za-z])
    |\\tag\*?\{[^{}]*\}|\\end\{(?:align|aligned|equation|gather|gathered|split|center)\*?\})+$""",
    re.VERBOSE,
)
_FIRST_ZERO = re.compile(r"(?<![0-9])\.(?=[0-9])")
_LAST_ZERO = re.compile(r"(?<=[0-9])\.0*(?![0-9A-Za-z\\])")
_SPACE = re.compile(r"(\\[A-Za-z]+\s+(?=[A-Za-z]))|([0-9A-Za-z]\s+(?=[0-9A-Za-z]))|\s+")


def tidy(text: str) -> str:
    """One spelling of an answer. Tidying twice changes nothing, for practical purposes. Never raises."""
    text = text.translate(_UNICODE).replace("\\\\", "\x00")  # the end of a matrix row, not a space
    for pattern, latex in _ASCII_RELATIONS:
        text = pattern.sub(latex, text)
    text = _LATEX_COMMA.sub("", text)
    text = _BRACED_NUMBER.sub(lambda match: match[0].replace(",", ""), text)
    text = re.sub(r"(?<!\\)\$|\*\*|`", "", text)
    text = _SIZES.sub("", text)
    text = _SYNONYM.sub(lambda m: ("" if _SYNONYMS[m[1]] in _PLAIN else "\\") + _SYNONYMS[m[1]] + " ", text)
    text = _TEXT_COMMAND.sub(r"\\text{", text)
    text = _WORDLESS_TEXT.sub(r"\1", text)
    text = _FONT.sub("", _COLOR.sub("", text))
    text = _CHOOSE.sub(r"\\binom{\1}{\2}", text)
    text = _SPACES.sub(" ", text)
    if _TRIG.search(text):
        text = _NUMBER_DEGREES.sub(r"{\\frac{\1\\pi}{180}}", text)
    text = _DEGREES.sub("", text)
    text = text.replace("\\%", "%")
    for pattern, full in _SHORT:
        text = pattern.sub(full, text)
    text = _MIXED.sub(r"\1\\frac{\2}{\3}", text)
    text = _LAST_ZERO.sub("", _FIRST_ZERO.sub("0.", text))
    text = _DEBRIS.sub("", _without_open_brace(text)).lstrip(" &")
    return _squeeze(text.replace("\x00", "\\\\")).strip()


def _without_open_brace(text: str) -> str:
    """Without closing braces at the end that nothing has opened."""
    plain = text.replace("\\{", "").replace("\\}", "")
    surplus = plain.count("}") - plain.count("{")
    while surplus > 0 and text.rstrip().endswith("}") and not text.rstrip().endswith("\\}"):
        text, surplus = text.rstrip()[:-1], surplus - 1
    return text


def _squeeze(text: str) -> str:
    r"""Keeps white space only between names or digits; the content of `\text{...}` keeps single spaces."""
    pieces = re.split(r"(\\text\{[^{}]*\})", text)
    for index, piece in enumerate(pieces):
        if index % 2:
            pieces[index] = "\\text{" + " ".join(piece[6:-1].split()) + "}"
        else:
            pieces[index] = _SPACE.sub(lambda m: (m[0].rstrip() + " ") if m[1] or m[2] else "", piece)
    return "".join(pieces)
