"""LaTeX answers: one spelling for equal ones (`tidy`), and their structure (`parse_tree`, `same_tree`).

Why a parser stands beside math-verify 0.9. Of 374 pairs of tests/data/math/pairs.txt, math-verify alone misses 64 of
216 equal answers and accepts 29 of 158 different ones. With `tidy`, units, sentences and the kind of brackets as checks
before it, it still misses 27 and accepts 11: named tuples, unions, set-builder notation, inequalities as intervals, repeated
elements, matrices' shapes. It also costs each worker the import of sympy, which plain answers do not need here.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from grpo_megatron.rewards.math.value import rational, same_value

_UNICODE = {
    ord(character): latex
    for characters, latex in (
        *(("\u2212\u2013", "-"), ("\u00a0\u2009\u202f", " "), ("\u20ac\u00a3", "\\$"), ("\u00d7", "\\times ")),
        *(("\u00b7", "\\cdot "), ("\u03c0", "\\pi "), ("\u221e", "\\infty "), ("\u00b0", "^\\circ ")),
        *(("\u2264", "\\le "), ("\u2265", "\\ge "), ("\u222a", "\\cup "), ("\u2208", "\\in "), ("\u00b1", "\\pm ")),
        *(("\u211d", "\\mathbb{R}"), ("\u2205", "\\emptyset ")),
    )
    for character in characters
}
_ASCII_RELATIONS = (  # `5!=120` has a factorial, `x != 3` has not
    (re.compile(r">\s?="), r"\\ge "),
    (re.compile(r"<\s?="), r"\\le "),
    (re.compile(r"(?<=\s)!="), r"\\ne "),
)
_BRACKETS = r"\s*\(([^()]*(?:\([^()]*\)[^()]*)*)\)"
_AS_PROGRAMS_WRITE = (  # 2*pi, sqrt(3), exp(-2), 1.5e3, sin(x), x**2, 14 + -1i; no base as in 1e5_{16}
    (re.compile(r"(?<![A-Za-z\\{])pi(?![A-Za-z}])"), r"\\pi "),
    (re.compile(r"(?<![A-Za-z\\])\\?sqrt" + _BRACKETS), r"\\sqrt{\1}"),
    (re.compile(r"(?<![A-Za-z\\])\\?exp" + _BRACKETS), r"e^{\1}"),
    (re.compile(r"(?<![A-Za-z\\])abs" + _BRACKETS), r"|\1|"),
    (re.compile(r"(?<![0-9A-Za-z.])([0-9]+(?:\.[0-9]+)?)[eE]\+?(-?[0-9]{1,3})(?![0-9A-Za-z._])"), r"\1\\times 10^{\2}"),
    (re.compile(r"(?<![A-Za-z\\{])a(?=(?:sin|cos|tan)h?\()"), "arc"),
    (re.compile(r"(?<![A-Za-z\\{])((?:arc)?(?:sin|cos|tan)h?|cot|sec|csc|ln|log)(?=\()"), r"\\\1"),
    (re.compile(r"((?<![A-Za-z])[A-Za-z]|[0-9)])\*\*\(?(-?[0-9]+|[A-Za-z])\)?"), r"\1^{\2}"),
    (re.compile(r"\+\s*-(?=[0-9])"), "-"),
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
_SYNONYMS: dict[str, str] = dict(
    re.findall(
        r"(\w+):(\S+)",
        "dfrac:frac tfrac:frac cfrac:frac leqslant:le leq:le geqslant:ge geq:ge neq:ne lbrace:{ rbrace:} lbrack:[ rbrack:]"
        " varnothing:emptyset lvert:| rvert:| vert:| lt:< gt:> land:text{and} lor:text{or} degree:circ infin:infty"
        " simeq:approx sim:approx",
    )
)
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
_LAST_ZERO = re.compile(r"(?<=[0-9])\.0*(?![0-9A-Za-hj-z\\])")
_SPACE = re.compile(r"(\\[A-Za-z]+\s+(?=[A-Za-z]))|([0-9A-Za-z]\s+(?=[0-9A-Za-z]))|\s+")


def tidy(text: str) -> str:
    r"""Writes an answer in one spelling. Tidying twice changes nothing, for practical purposes. Never raises.

    Removes sizes, spacing, fonts and thousands commas, completes short fractions. Text stays as `\text{...}`; white space
    stays only where it separates (`\pi r`, `1 000`, words). Linear or quadratic time in at most MAX_ANSWER characters.
    """
    text = text.translate(_UNICODE).replace("\\\\", "\x00")  # the end of a matrix row, not a space
    for pattern, latex in (*_ASCII_RELATIONS, *_AS_PROGRAMS_WRITE):
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
    """Removes closing braces at the end that nothing has opened."""
    plain = text.replace("\\{", "").replace("\\}", "")
    surplus = plain.count("}") - plain.count("{")
    while surplus > 0 and text.rstrip().endswith("}") and not text.rstrip().endswith("\\}"):
        text, surplus = text.rstrip()[:-1], surplus - 1
    return text


def _squeeze(text: str) -> str:
    r"""Keeps white space only between names or digits; the content of `\text{...}` keeps single spaces."""
    segments = re.split(r"(\\text\{[^{}]*\})", text)
    for index, segment in enumerate(segments):
        if index % 2:
            segments[index] = "\\text{" + " ".join(segment[6:-1].split()) + "}"
        else:
            segments[index] = _SPACE.sub(lambda m: (m[0].rstrip() + " ") if m[1] or m[2] else "", segment)
    return "".join(segments)


# -- the structure of an answer ----------------------------------------------------------------------------------------

MAX_ANSWER = 1000  # characters; longer answers are compared as strings
MAX_PARTS = 64
MAX_DEPTH = 6

Kind = Literal["value", "list", "set", "()", "[]", "(]", "[)", "union", "matrix", "det"]


@dataclass(frozen=True)
class Node:
    """Structure of an answer. Kind "value" has `text`, others `parts`; `name`: before `=`; a matrix has `columns`."""

    kind: Kind
    text: str = ""
    parts: tuple[Node, ...] = ()
    name: str = ""
    columns: int = 0


_LATEX_TOKEN = re.compile(r"\\[A-Za-z]+|\\.|[^\\]", re.DOTALL)
_OPEN = {"(", "[", "{", "\\{", "\\langle", "\\begin"}
_CLOSE = {")", "]", "}", "\\}", "\\rangle", "\\end"}
_VARIABLE = re.compile(
    r"\([a-z](?:,[a-z])+\)|[A-Za-z]{1,2}(?:_\{?\w\}?)?(?::[A-Za-z]{1,2}(?:_\{?\w\}?)?)+|\\Pr\([^()]{1,12}\)|[A-Za-z]{1,3}|[A-Za-z]_?\{?\w{1,3}\}?|\\[a-z]+|[A-Za-z]{1,2}'?\([A-Za-z0-9,]{1,5}\)|[a-zA-Z]\^\{-1\}\([a-z]\)"
)
_CONSTANTS = {"\\pi", "\\infty", "\\sqrt", "\\frac"}
_WORD_NAME = re.compile(r"\\angle\s?\w+|(?:\\text\{)?[A-Za-z][A-Za-z ]*\}?")
_MATRIX = re.compile(r"\\begin\{([pbBvV]?matrix|smallmatrix|array)\}(?:\{[^{}]*\})?(.*)\\end\{\1\}", re.DOTALL)
_OR = re.compile(r"\\text\{,?\s?(?:and|or)\s?,?\}|(?<![A-Za-z\\{])(?:and|or)(?![A-Za-z}])")
_ELEMENT = re.compile(r"\\text\{(?:is |lies )?in\}")
_ABOUT = re.compile(
    r"(?<=.)(?:\(\\approx\s?|=(?=[-0-9.]+\\[cl]?dots$)|\\text\{\(?(?:or )?(?:approximately|about|approx\.?) )"
    r"(?P<number>-?[0-9]+(?:\.[0-9]+)?)(?:\\[cl]?dots|\)?\}|\))$"
)
_LEAD = re.compile(r"^\\text\{[^{}]* is:?\}")
_TEXT_LIST = re.compile(r"\\text\{([^{}]*,[^{}]*)\}")
_GROUPED_NUMBER = re.compile(r"-?(?:\\?\$)?-?[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?(?![0-9,])(?:[^,;(\[]*)")


def parse_tree(text: str) -> Node:
    r"""Parses an answer. Never raises: a text without structure is one value.

    Sets and lists are `3, 5`, `x=1 or x=2`, `1 \pm \sqrt2`. `(1,2)` is neither `[1,2]` nor the list `1,2`. An
    inequality in one variable is its interval. A leading `x =`, `f(x) =` or `x \in` becomes the name of its node.
    """
    text = tidy(text)
    text = _TEXT_LIST.sub(lambda m: ",".join(f"\\text{{{part.strip()}}}" for part in m[1].split(",")), text)
    text = _ABOUT.sub(r"\\approx \g<number>", _ELEMENT.sub(r"\\in ", _LEAD.sub("", text)))
    node = _parse(_OR.sub(",", text), 0)
    if node.kind == "list" and len({part.name for part in node.parts}) > 1 and "or" in "".join(_OR.findall(text)):
        return Node("value", text)  # x = 3 or y = 5 is not x = 3, y = 5
    return node


def _parse(text: str, depth: int) -> Node:
    text = text.strip()
    if depth > MAX_DEPTH:
        return Node("value", text)
    if not depth and _GROUPED_NUMBER.fullmatch(text):
        return _value(text.replace(",", ""))
    matrix = _MATRIX.fullmatch(text.removeprefix("[").removesuffix("]") if text.startswith("[\\begin{array}") else text)
    if matrix and "\\begin" not in matrix[2]:
        return _matrix(matrix[1], matrix[2], depth)
    parts = [part for part in split_outside_brackets(text, {",", ";"}) if part.strip()]
    if 1 < len(parts) <= MAX_PARTS:
        return _list(parts, depth)
    text = parts[0].strip() if len(parts) == 1 else text
    return _relation(text, depth) or _union(text, depth) or _bracketed(text, depth) or _value(text)


def split_outside_brackets(text: str, separators: set[str]) -> list[str]:
    """Cuts `text` at the separators outside brackets. Any closing bracket closes any opening one, as in (1,2]."""
    parts, start, depth = [], 0, 0
    for token in _LATEX_TOKEN.finditer(text):
        word = token[0]
        depth += (word in _OPEN) - (word in _CLOSE)
        if depth == 0 and word in separators:
            parts.append(text[start : token.start()])
            start = token.end()
    return [*parts, text[start:]]


def _list(parts: Sequence[str], depth: int) -> Node:
    nodes = [_parse(part, depth + 1) for part in parts]
    if nodes[0].name and not any(node.name for node in nodes[1:]):  # x = 1, 2
        return Node("list", parts=tuple(replace(node, name="") for node in nodes), name=nodes[0].name)
    flat: list[Node] = []
    for node in nodes:
        flat += node.parts if node.kind == "list" else (node,)
    names = {node.name for node in flat}
    if len(flat) == 2 and (both := _intersection(*flat)) is not None:  # x > 1 and x < 5
        return both
    if len(names) == 1 and names != {""}:  # x = 1, x = 2
        return Node("list", parts=tuple(replace(node, name="") for node in flat), name=names.pop())
    return Node("list", parts=tuple(flat))


def _intersection(first: Node, second: Node) -> Node | None:
    """Returns the interval between a lower and an upper bound of one name; None for other nodes, and where it is empty
    (`x < 1 or x > 3` is a union).
    """
    if not (first.name == second.name != "" and {first.kind, second.kind} <= {"()", "[]", "(]", "[)"}):
        return None
    lower, upper = (first, second) if first.parts[1].text == "\\infty" else (second, first)
    if lower.parts[1].text != "\\infty" or upper.parts[0].text != "-\\infty":
        return None
    low, high = rational(lower.parts[0].text), rational(upper.parts[1].text)
    if low is None or high is None or low >= high:
        return None
    kind = _interval_kind(lower.kind[0] == "[", upper.kind[1] == "]")
    return Node(kind, parts=(lower.parts[0], upper.parts[1]), name=first.name)


def _matrix(kind: str, body: str, depth: int) -> Node:
    rows = [row for row in split_outside_brackets(body, {"\\\\"}) if row.strip()]
    cells = [[_parse(cell, depth + 1) for cell in split_outside_brackets(row, {"&"})] for row in rows]
    widths = {len(row) for row in cells}
    columns = -1 if len(widths) > 1 else max(widths, default=0)
    parts = tuple(cell for row in cells for cell in row)
    return Node("det" if kind[0] in "vV" else "matrix", parts=parts, columns=columns)


_RELATIONS = ("=", "<", ">", "\\le", "\\ge", "\\in", "\\approx")


def _relation(text: str, depth: int) -> Node | None:
    if text.startswith("\\{"):
        return None
    signs = [token for token in tokens_outside_brackets(text) if token in _RELATIONS]
    if not signs:
        return None
    sides = [side.strip() for side in split_outside_brackets(text, set(signs))]
    exact = text[: text.rfind("\\approx")]
    if signs[-1] == "\\approx" and not is_name(exact):  # the value `exact`; the decimal stays for value.py
        node = _parse(exact, depth + 1)
        return replace(node, text=f"{node.text}\\approx {sides[-1]}") if node.kind == "value" else node
    if set(signs) <= {"=", "\\in", "\\approx"}:
        named = is_name(sides[0]) and all(sides[1:])
        constant = "\\in" not in signs and not any(re.search(r"(?<![\\a-z])[a-zA-Z](?![a-z])", side) for side in sides)
        if named or constant:
            node = _parse(sides[-1], depth + 1)
            return replace(node, name=sides[0]) if named else node
        return None
    if "=" in signs or "\\in" in signs or len(signs) > 2:
        return None
    return _inequality(sides, signs, depth)


def _inequality(sides: list[str], signs: list[str], depth: int) -> Node | None:
    if {"<", "\\le"} & set(signs) and {">", "\\ge"} & set(signs):
        return None
    if signs[0] in (">", "\\ge"):
        sides, signs = sides[::-1], signs[::-1]
    closed = [sign in ("\\le", "\\ge") for sign in signs]
    if len(sides) == 3 and is_name(sides[1]):
        low, name, high = sides
    elif len(sides) == 2 and is_name(sides[0]):
        (name, high), low, closed = sides, "-\\infty", [False, *closed]
    elif len(sides) == 2 and is_name(sides[1]):
        (low, name), high, closed = sides, "\\infty", [*closed, False]
    else:
        return None
    if not (low and high):
        return None
    return Node(_interval_kind(*closed), parts=(_parse(low, depth + 1), _parse(high, depth + 1)), name=name)


def _interval_kind(closed_left: bool, closed_right: bool) -> Kind:
    kinds: tuple[Kind, ...] = ("()", "(]", "[)", "[]")
    return kinds[2 * closed_left + closed_right]


def _union(text: str, depth: int) -> Node | None:
    parts = split_outside_brackets(text, {"\\cup"})
    if 1 < len(parts) <= MAX_PARTS:
        return Node("union", parts=tuple(_parse(part, depth + 1) for part in parts))
    parts = split_outside_brackets(text, {"\\pm", "\\mp"})
    if len(parts) == 2 and parts[1].strip():
        left, right = (part.strip() for part in parts)
        return Node("list", parts=(_value(f"{left}+{right}" if left else right), _value(f"{left}-{right}")))
    return None


def _bracketed(text: str, depth: int) -> Node | None:
    """Parses a text that is in one pair of brackets as a whole; None for other texts."""
    first, last = _outer_brackets(text)
    if first + last == "{}":
        return _parse(text[1:-1], depth + 1)
    if first not in ("(", "[", "\\{", "\\langle") or last not in (")", "]", "\\}", "\\rangle"):
        return None
    inside = text[len(first) : len(text) - len(last)].strip()
    parts = split_outside_brackets(inside, {",", ";"})
    if len(parts) > MAX_PARTS:
        return None
    if first == "\\{":
        condition = split_outside_brackets(inside, {":", "\\mid", "|"})
        if len(condition) == 2 and is_name(condition[0].partition("\\in")[0]):  # {x : 1 < x < 2}
            return _relation(condition[1].strip(), depth + 1)
        if last != "\\}" or len(condition) > 1:
            return None
        return Node("set", parts=tuple(_parse(part, depth + 1) for part in parts if part.strip()))
    if first == "(" and last == ")" and len(parts) == 1:
        return _parse(inside, depth + 1)
    if len(parts) < 2:
        return None
    return Node(_interval_kind(first == "[", last == "]"), parts=tuple(_parse(part, depth + 1) for part in parts))


def _value(text: str) -> Node:
    words = re.sub(r"\\text|[{}]", "", text).strip().casefold()
    if text == "\\emptyset" or words in ("empty set", "no solution", "no solutions"):
        return Node("set")
    if text in ("\\mathbb{R}", "\\mathbb R") or words in ("all real numbers", "all reals"):
        return Node("()", parts=(Node("value", "-\\infty"), Node("value", "\\infty")))
    return Node("value", text.strip())


def _outer_brackets(text: str) -> tuple[str, str]:
    """Returns the first and last token, when they are one pair of brackets around all between them; else empty strings."""
    tokens, depth = [token[0] for token in _LATEX_TOKEN.finditer(text)], 0
    for index, token in enumerate(tokens):
        depth += (token in _OPEN) - (token in _CLOSE)
        if depth == 0 and index < len(tokens) - 1:
            return "", ""
    return (tokens[0], tokens[-1]) if len(tokens) > 1 and depth == 0 else ("", "")


def tokens_outside_brackets(text: str) -> list[str]:
    """Lists the LaTeX tokens of a text that no brackets enclose."""
    tokens, depth = [], 0
    for token in _LATEX_TOKEN.finditer(text):
        depth += (token[0] in _OPEN) - (token[0] in _CLOSE)
        if depth == 0:
            tokens.append(token[0])
    return tokens


def is_name(text: str) -> bool:
    r"""Tells whether a text is a name: `x`, `x_1`, `f(x)`, `\theta`, `AB`, `\angle ABC`, one or two words."""
    text = text.strip()
    return bool(_VARIABLE.fullmatch(text) or (_WORD_NAME.fullmatch(text) and len(text) < 40)) and text not in _CONSTANTS


def same_tree(answer: Node, prediction: Node) -> bool:
    """Tells whether two trees are one answer. Raises TimeoutError as `same_formula`.

    Order counts in tuples, intervals and matrices, and not in sets and lists. A leading name counts only where both
    sides have one. `x = 3, y = 5` is also `(3,5)`, and so is `y = 5, x = 3`, where the names are neighbours in the
    alphabet. A list of tuples may repeat one; a list of numbers may not (`3, 5` is no `3, 5, 5`).
    """
    if answer.name and prediction.name and _bare_name(answer.name) != _bare_name(prediction.name):
        return False
    kinds = {answer.kind, prediction.kind}
    if kinds == {"list", "union"}:  # x < 1 or x > 3
        return _same_unordered(answer.parts, prediction.parts)
    if kinds == {"list", "set"} or kinds == {"set"}:
        return _same_unordered(_distinct(answer.parts), _distinct(prediction.parts))
    if kinds == {"()", "list"}:  # x = 3, y = 5 for (3,5), and the reverse
        listed = answer if answer.kind == "list" else prediction
        is_named = all(part.name for part in listed.parts)
        return is_named and _same_ordered(_coordinates(answer), _coordinates(prediction))
    if answer.kind != prediction.kind:
        return False
    if answer.kind == "value":
        return same_value(answer.text, prediction.text)
    if answer.kind in ("list", "union"):
        names = {part.name for part in answer.parts}
        if answer.kind == "list" and len(names) > 1 and not any(part.name for part in prediction.parts):
            return _same_ordered(answer.parts, prediction.parts)  # 3, 5 for x = 3, y = 5
        if {part.kind for part in answer.parts + prediction.parts} == {"()"}:
            return _same_unordered(_distinct(answer.parts), _distinct(prediction.parts))
        return _same_unordered(answer.parts, prediction.parts)
    if answer.columns != prediction.columns or answer.columns < 0:
        return False
    return _same_ordered(answer.parts, prediction.parts)


def _bare_name(name: str) -> str:
    return re.sub(r"\\text|[{}\s_]", "", name)


def _coordinates(node: Node) -> Sequence[Node]:
    """Returns the parts of a tuple or list, in the order of their names where these are neighbours in the alphabet."""
    names = [_bare_name(part.name) for part in node.parts]
    if node.kind == "()" and node.name.startswith("("):  # (p,q) = (2,-3)
        names = node.name.strip("()").split(",")
    if len(names) != len(node.parts) or not all(re.fullmatch("[a-zA-Z]", name) for name in names):
        return node.parts
    parts = [replace(part, name=name) for part, name in zip(node.parts, names, strict=True)]
    ordered = sorted(parts, key=lambda part: part.name)
    codes = [ord(part.name) for part in ordered]
    return ordered if codes == list(range(codes[0], codes[0] + len(codes))) else parts


def _same_ordered(answer: Sequence[Node], prediction: Sequence[Node]) -> bool:
    return len(answer) == len(prediction) and all(map(same_tree, answer, prediction))


def _same_unordered(answer: Sequence[Node], prediction: Sequence[Node]) -> bool:
    left = list(prediction)
    for part in answer:
        match = next((index for index, other in enumerate(left) if same_tree(part, other)), None)
        if match is None:
            return False
        del left[match]
    return not left


def _distinct(parts: Sequence[Node]) -> list[Node]:
    distinct: list[Node] = []
    for part in parts:
        if not any(same_tree(other, part) for other in distinct):
            distinct.append(part)
    return distinct
