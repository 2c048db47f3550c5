r"""Formulas: finds the LaTeX formulas of a text, and renders them as MathML with latex2mathml.

A model may write anything, and latex2mathml's own output is not escaped: `\text{<script>}` and `\href{javascript:...}`
pass through it. So this file writes the library's element tree itself: it allows only listed tags and attributes with
plain values, and escapes all text. A formula is shown as TeX when it is too long or defines macros, when the library
raises, takes too long or yields no text, and when its tree is too deep, too large, or not valid MathML.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from latex2mathml.converter import Converter

from grpo_megatron.processes.process import time_limit

MAX_TEX = 4000  # characters of one formula
MAX_ELEMENT_DEPTH = 60  # HTML parsers limit it to some hundreds
RENDER_LIMIT_S = 1.0  # processor seconds per formula; a usual one takes 0.1 ms

MATHML_TAGS = {
    *("math", "mrow", "mi", "mn", "mo", "mtext", "mspace", "mstyle", "mpadded", "mphantom", "menclose"),
    *("mfrac", "msqrt", "mroot", "msub", "msup", "msubsup", "munder", "mover", "munderover", "mtable", "mtr", "mtd"),
}
MATHML_ATTRIBUTES = {
    *("display", "displaystyle", "scriptlevel", "mathvariant", "linethickness", "notation", "accent", "movablelimits"),
    *("stretchy", "fence", "form", "separator", "largeop", "lspace", "rspace", "minsize", "maxsize"),
    *("columnalign", "columnlines", "rowlines", "width", "height", "depth", "voffset"),
}
MATHML_ARITY = {"mfrac": 2, "mroot": 2, "msub": 2, "msup": 2, "munder": 2, "mover": 2, "msubsup": 3, "munderover": 3}
_WORD = r"(?:[a-z-]{1,30}|[+-]?[0-9]{0,2}(?:\.[0-9]{1,4})?[a-z]{0,5})"
_ATTRIBUTE_VALUE = re.compile(rf"{_WORD}(?: {_WORD}){{0,20}}")
_MACROS = re.compile(r"\\(?:newcommand|renewcommand|def|DeclareMathOperator|newenvironment|sideset)(?![A-Za-z])")

_DELIMITERS = {"$$": "$$", "\\[": "\\]", "\\(": "\\)", "$": "$"}
_ENVIRONMENTS = r"\\begin\{(?:align|equation|gather|cases|array|[pbv]?matrix)\*?\}"
_START = re.compile(r"\\\[|\\\(|\\boxed\s*\{|\[asy\]")
_START_WITH_DOLLARS = re.compile(rf"\$\$|\\\[|\\\(|(?<!\\)\$|\\boxed\s*\{{|{_ENVIRONMENTS}|\[asy\]")
_BRACE_OR_ESCAPE = re.compile(r"\\.|[{}]", re.DOTALL)


PieceKind = Literal["text", "inline", "block", "drawing"]


@dataclass(frozen=True)
class TextPiece:
    """A piece of a text. A formula is its TeX without delimiters; a drawing is the code of Asymptote."""

    kind: PieceKind
    text: str


def split_formulas(text: str, dollars: bool) -> list[TextPiece]:
    """The pieces of `text`, in order. `dollars`: whether $ encloses formulas; in word problems it is money."""
    pieces: list[TextPiece] = []
    braces: dict[int, int] | None = None
    done = position = 0
    start = _START_WITH_DOLLARS if dollars else _START
    while match := start.search(text, position):
        position = match.end()
        if match[0].startswith("\\boxed"):
            braces = _closing_braces(text) if braces is None else braces
            end = braces.get(match.end() - 1, -1) + 1
            piece = TextPiece("inline", text[match.start() : end])
        else:
            piece, end = _delimited(text, match)
        if end > 0 and piece.text.strip():
            pieces += [TextPiece("text", text[done : match.start()]), piece]
            done = position = end
    pieces.append(TextPiece("text", text[done:]))
    return [piece for piece in pieces if piece.text]


def _delimited(text: str, match: re.Match[str]) -> tuple[TextPiece, int]:
    """(the piece that begins at `match`, where it ends; 0 when it does not end)."""
    opening, start = match[0], match.end()
    kind: PieceKind
    if opening == "[asy]":
        closing, kind = "[/asy]", "drawing"
    elif opening.startswith("\\begin"):
        closing, kind = "\\end" + opening.removeprefix("\\begin"), "block"
    else:
        closing, kind = _DELIMITERS[opening], "block" if opening in ("$$", "\\[") else "inline"
    end = text.find(closing, start)
    while closing == "$" and end > 0 and text[end - 1] == "\\":
        end = text.find("$", end + 1)
    if end < 0:
        return TextPiece("text", ""), 0
    content = text[start:end]
    if closing == "$" and re.search(r"\n\s*\n", content):  # a formula does not span paragraphs
        return TextPiece("text", ""), 0
    if opening.startswith("\\begin"):
        content = opening + content + closing
    return TextPiece(kind, content.strip() if kind == "drawing" else content), end + len(closing)


def _closing_braces(text: str) -> dict[int, int]:
    """Position of every closed brace -> position of the brace that closes it. Linear time."""
    opened: list[int] = []
    pairs: dict[int, int] = {}
    for brace in _BRACE_OR_ESCAPE.finditer(text):
        if brace[0] == "{":
            opened.append(brace.start())
        elif brace[0] == "}" and opened:
            pairs[opened.pop()] = brace.start()
    return pairs


class FormulaTable:
    """The formulas of a page, each rendered once. `markup` holds their MathML by number."""

    def __init__(self) -> None:
        self.markup: list[str] = []
        self._numbers: dict[TextPiece, int | None] = {}

    def number(self, formula: TextPiece) -> int | None:
        """The number of the formula's MathML; None when it must be shown as TeX."""
        if formula not in self._numbers:
            markup = mathml(formula.text, formula.kind == "block")
            self._numbers[formula] = None if markup is None else len(self.markup)
            if markup is not None:
                self.markup.append(markup)
        return self._numbers[formula]


def mathml(tex: str, block: bool) -> str | None:
    """A `<math>` element in ASCII; None when the formula must be shown as TeX."""
    if len(tex) > MAX_TEX or _MACROS.search(tex):  # nested macros and sidesets grow exponentially
        return None
    try:
        with time_limit(RENDER_LIMIT_S, "a formula"):
            tree = Converter(display="block" if block else "inline").convert_to_element(tex)
            if not "".join(tree.itertext()).strip():
                return None
            parts: list[str] = []
            limit = 1000 + 40 * len(tex)
            for part in _written(tree, 0):
                parts.append(part)
                limit -= len(part)
                if limit < 0:
                    return None
    except Exception:  # noqa: BLE001 - the library raises exceptions of many types at malformed formulas
        return None
    return "".join(parts).encode("ascii", "xmlcharrefreplace").decode("ascii")


def _written(element: Any, depth: int) -> Iterator[str]:
    """The element as HTML. Raises ValueError for a tree that is not shown."""
    if element.tag not in MATHML_TAGS or depth > MAX_ELEMENT_DEPTH:
        raise ValueError(f"<{element.tag}> at depth {depth}")
    children = list(element)
    if len(children) != MATHML_ARITY.get(element.tag, len(children)):
        raise ValueError(f"<{element.tag}> with {len(children)} children")
    attributes = {
        name: value
        for name, value in element.attrib.items()
        if name in MATHML_ATTRIBUTES and _ATTRIBUTE_VALUE.fullmatch(value)
    }
    if attributes.get("display") == "inline":
        del attributes["display"]  # the default
    text = html.unescape(element.text or "")  # the library writes symbols as character references
    if element.tag == "mrow" and len(children) == 1 and not attributes and not text:
        yield from _written(children[0], depth)
        return
    if element.tag == "mi" and text.startswith("\\"):
        attributes["class"] = "unknown"  # a command that the library does not know
    yield f"<{element.tag}" + "".join(f' {name}="{value}"' for name, value in attributes.items()) + ">"
    yield html.escape(text)
    for child in children:
        yield from _written(child, depth + 1)
    yield f"</{element.tag}>"
