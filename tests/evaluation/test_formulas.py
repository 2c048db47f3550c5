"""Formulas: what is found in a text, its MathML, and that no text of a model can leave its element."""

from __future__ import annotations

import html.parser
import random
import time

import pytest

from grpo_megatron.evaluation import formulas
from grpo_megatron.evaluation.formulas import FormulaTable, TextPiece, mathml, split_formulas


def _split(text: str, dollars: bool = True) -> list[tuple[str, str]]:
    return [(piece.kind, piece.text) for piece in split_formulas(text, dollars)]


def test_the_pieces_of_a_text() -> None:
    text = (
        r"so $x_1$ is \$5, \(y\) \[z\] $$w$$ \boxed{\frac{1}{2}} [asy] draw(a); [/asy] and \begin{align*}a\end{align*}."
    )
    assert _split(text) == [
        *(("text", "so "), ("inline", "x_1"), ("text", r" is \$5, "), ("inline", "y"), ("text", " "), ("block", "z")),
        *(("text", " "), ("block", "w"), ("text", " "), ("inline", r"\boxed{\frac{1}{2}}"), ("text", " ")),
        *(("drawing", "draw(a);"), ("text", " and "), ("block", r"\begin{align*}a\end{align*}"), ("text", ".")),
    ]
    assert _split("", True) == []


def test_dollars_are_money_in_word_problems() -> None:
    assert _split("$5 and $6", dollars=False) == [("text", "$5 and $6")]
    assert _split(r"\(5\) costs $6", dollars=False) == [("inline", "5"), ("text", " costs $6")]


@pytest.mark.parametrize(
    "text", ["$5", r"\(x", r"\boxed{1", r"\boxed 1", "a $ b\n\nc $ d", "$ $", "$$$$", "[asy]", r"\begin{align}x"]
)
def test_what_is_not_closed_or_empty_is_text(text: str) -> None:
    assert _split(text) == [("text", text)]


def test_braces_are_matched_and_escaped_ones_are_not() -> None:
    assert _split(r"\boxed{\{1\}}}")[0] == ("inline", r"\boxed{\{1\}}")
    assert _split(r"$a\$b$")[0] == ("inline", r"a\$b")


@pytest.mark.parametrize(
    ("tex", "expected"),
    [
        (r"\frac{1}{2}", "<math><mfrac><mn>1</mn><mn>2</mn></mfrac></math>"),
        (r"\sqrt[3]{x}", "<mroot><mi>x</mi><mn>3</mn></mroot>"),
        (r"x_1^2", "<msubsup><mi>x</mi><mn>1</mn><mn>2</mn></msubsup>"),
        (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", "<mtr><mtd><mn>1</mn></mtd><mtd><mn>2</mn></mtd></mtr>"),
        (r"\boxed{7}", '<menclose notation="box"><mn>7</mn></menclose>'),
        (r"\text{a b}", "<mtext>a&#160;b</mtext>"),
        (r"x \le \pi", "<mo>&#8804;</mo><mi>&#960;</mi>"),
        (r"\unknowncommand", r'<mi class="unknown">\unknowncommand</mi>'),
    ],
)
def test_mathml(tex: str, expected: str) -> None:
    markup = mathml(tex, block=False)
    assert markup is not None and expected in markup
    block = mathml(tex, block=True)
    assert block is not None and block.startswith('<math display="block">')


@pytest.mark.parametrize(
    "tex",
    [
        *("{" * 300, "x" * 4001, r"\frac{1}", r"\left( x", r"a_1_2", "", r"\displaystyle", r"\begin{array}{q}x", "^"),
        r"\def\a{x}\a",
        "{" * 80 + "x" + "^{y}}" * 80,  # deeper than MAX_ELEMENT_DEPTH
    ],
)
def test_what_cannot_be_rendered_is_shown_as_tex(tex: str) -> None:
    assert mathml(tex, block=False) is None


@pytest.mark.parametrize(
    "tex",
    [
        r"\def\a{\b\b\b\b}\def\b{\c\c\c\c}\def\c{\d\d\d\d}\def\d{\e\e\e\e}\def\e{\f\f\f\f}\def\f{\g\g\g\g}\def\g{xxxx}\a",
        r"\sideset{}{}" * 300 + "{x}",
    ],
)
def test_exponential_formulas_are_refused_at_once(tex: str) -> None:
    start = time.process_time()
    assert mathml(tex, block=False) is None
    assert time.process_time() - start < formulas.RENDER_LIMIT_S / 2  # refused by its text, not by the time limit


def test_a_formula_that_takes_too_long_is_shown_as_tex(monkeypatch: pytest.MonkeyPatch) -> None:
    def endless(*_: object) -> None:
        while True:
            pass

    monkeypatch.setattr("latex2mathml.converter.Converter.convert_to_element", endless)
    monkeypatch.setattr(formulas, "RENDER_LIMIT_S", 0.05)
    assert mathml("x", block=False) is None


def test_equal_formulas_are_rendered_once() -> None:
    table = FormulaTable()
    one, block, wrong = TextPiece("inline", "x^2"), TextPiece("block", "x^2"), TextPiece("inline", "{{")
    assert [table.number(piece) for piece in (one, block, wrong, one, wrong)] == [0, 1, None, 0, None]
    assert len(table.markup) == 2


class _Checker(html.parser.HTMLParser):
    """Accepts one balanced <math> element with the allowed tags and attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.roots = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in formulas.MATHML_TAGS
        assert {name for name, _ in attrs} <= formulas.MATHML_ATTRIBUTES | {"class"}
        self.roots += not self.open
        self.open.append(tag)
        assert len(self.open) <= formulas.MAX_ELEMENT_DEPTH + 1

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        assert self.open

    def handle_comment(self, data: str) -> None:
        raise AssertionError(data)

    handle_decl = handle_pi = unknown_decl = handle_comment


@pytest.mark.parametrize(
    "tex", [r"\href{abc}{x}", r"\style{red}{x}", r"\class{boxed}{x}", r'x\hspace{"}y', r"x\hspace{>}y", r"\color{red}x"]
)
def test_other_attributes_and_values_are_dropped(tex: str) -> None:
    markup = mathml(tex, block=False)
    assert markup is not None and "=" not in markup


HOSTILE = [
    *("<script>", "</math>", "</template>", "<!--", "<img src=x onerror=alert(1)>", "&lt;script&gt;", "&#60;b&#62;"),
    *(r"\href{javascript:alert(1)}{x}", r"\style{position:fixed}{x}", r"\class{a onclick=alert(1)}{x}", r"\text{<b>}"),
    *(
        r"\text{&lt;/math&gt;}",
        r'\hspace{1em" onclick="alert(1)}',
        r"\color{red;}",
        r"\verb|<script>|",
        r"\unicode{x3c}",
    ),
    *(
        r"\operatorname{<}",
        r"\hspace{99999em}",
        r"\rule{1em}{9999em}",
        r"\mathbb{R}",
        r"\begin{matrix}",
        r"\end{matrix}",
    ),
    *(
        r"\frac",
        r"\sqrt",
        r"\left(",
        r"\right)",
        r"\overset",
        "{",
        "}",
        "^",
        "_",
        "&",
        "\\\\",
        '"',
        "'",
        "\x00",
        "\ud800",
        "x",
    ),
]


def test_hostile_text_stays_text() -> None:
    draw = random.Random(0)
    rendered = 0
    for number in range(3000):
        pieces = [draw.choice(HOSTILE) for _ in range(1 + number % 6)]
        tex = "".join(piece + draw.choice(["", " ", "{x}"]) for piece in pieces)
        markup = mathml(tex, block=False)
        if markup is None:
            continue
        rendered += 1
        checker = _Checker()
        checker.feed(markup)
        checker.close()
        assert checker.open == [] and checker.roots == 1 and markup.isascii()
        for forbidden in ("script>", "href", "style=", 'onclick="', 'javascript:alert(1)"'):
            assert f"<{forbidden}" not in markup and f" {forbidden}" not in markup, markup
    assert rendered > 500
