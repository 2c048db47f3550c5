"""The report: output of a model can never become markup, the page stays small, and a real browser shows it."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

from grpo_megatron.data.benchmarks import BenchmarkProblem
from grpo_megatron.evaluation import page as report
from grpo_megatron.evaluation.estimates import estimate
from grpo_megatron.evaluation.grading import Grade
from grpo_megatron.evaluation.ledger import LedgerEntry
from grpo_megatron.evaluation.page import histogram, render_page
from grpo_megatron.evaluation.results import GradedProblem, GradedSample
from grpo_megatron.types import GREEDY
from tests.browser import DESKTOP, PHONE, WIDTHS, Browser

NASTY = (
    "</script><script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\"> {{ data }} \u2028 \ud800"
    " {{ title }} \x1b[31m $\\frac{1}{2}$ \\boxed{7} costs $5"
)


def _graded(number: int, texts: list[str], right: list[bool], level: str = "Level 1") -> GradedProblem:
    samples = [
        GradedSample(
            LedgerEntry(f"math/{number}", index + GREEDY, text, len(text), "stop" if ok else "length"),
            (Grade(ok, "7" if ok else None),),
        )
        for index, (text, ok) in enumerate(zip(texts, right, strict=True))
    ]
    return GradedProblem(
        BenchmarkProblem(f"math/{number}", f"What is <b>{number}</b>?", "7", "Algebra", level), "prompt", samples
    )


def _result(graded: list[GradedProblem], num_samples: int) -> dict[str, Any]:
    ones = estimate([1.0, 0.0])
    task = {
        "title": "MATH <&>", "version": 1, "task_sha256": "a" * 64, "data_sha256": "b" * 64, "prompts_sha256": "c" * 64,
        "num_problems": len(graded), "format": "chat", "num_fewshot": 0, "greedy": True, "samples": num_samples,
        "temperature": 0.6, "top_p": 0.95, "max_tokens": 99, "graders": {"accuracy": "math"},
        "scores": {"accuracy": {"pass@1 (greedy)": ones}},
        "rates": dict.fromkeys(("format_error", "truncated", "grader_timeout", "grader_error"), 0.5),
        "tokens": {"mean": 3.0, "median": 3.0, "p95": 9.0},
        "by": {"level": {"Level 1": {"avg@2": ones}, "Level <2>": {"avg@2": ones}}},
    }  # fmt: skip
    model = {"path": "a <model>", "sha256": "d" * 64, "dtype": "float32"}
    return {"model": model, "seed": 0, "versions": {"torch": "2"}, "tasks": {"math": task}}


def _data(page: str) -> Any:
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    return json.loads(text)


@pytest.fixture(scope="module")
def page() -> str:
    graded = [_graded(n, [NASTY, "ok \\boxed{7}", "no"], [n % 2 == 0, True, False]) for n in range(45)]
    return render_page(_result(graded, 2), {"math": graded}, 30)


def test_text_cannot_leave_its_script_element(page: str) -> None:
    assert page.count("</script>") == page.count("<script") == 2  # the data and our program
    assert "<img" not in page and "a &lt;model&gt;" in page and "MATH &lt;&amp;&gt;" in page
    data = _data(page)["math"]
    assert data["rows"][0][3:6] == [1, 1, report.FORMAT_ERROR | report.TRUNCATED]
    assert len(data["rows"]) == 45 and sum(row[6] is not None for row in data["rows"]) == 30
    text = data["rows"][0][6]["samples"][0]["text"]
    assert text == NASTY.replace("\ud800", "<U+D800>").replace("\x1b", "<U+001B>")
    assert set(re.findall(r"https?://[\w.]+", page)) == {"http://www.w3.org"}  # SVG's name
    assert "default-src 'none'" in page


def test_five_thousand_problems_of_sixteen_samples_stay_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "BUDGET", 1_000_000)  # of 8 MB, so that the test is fast
    long = "a step of many words, " * 1000
    samples = _graded(0, [long] * 17, [True] * 17).samples
    graded = [dataclasses.replace(_graded(n, [], []), samples=samples) for n in range(5000)]
    text = render_page(_result(graded, 16), {"math": graded}, 400)
    data = _data(text)["math"]
    kept = [row for row in data["rows"] if row[6] is not None]
    assert len(data["rows"]) == 5000 and len(text) < report.BUDGET + 500_000 and 10 < len(kept) < 50
    assert kept[-1][0] >= 5000 - 5000 / len(kept) - 1  # evenly spread
    texts = kept[0][6]
    assert len(texts["samples"]) == report.SAMPLES_SHOWN and texts["numSamples"] == 17
    assert texts["samples"][0]["cut"] == len(long) - report.LONGEST


def test_the_histogram_counts_every_sample() -> None:
    """Lengths 0 to 100 in 32 bins: 4 tokens each, so that 100 is in bin 25."""

    def samples(right: bool, lengths: list[int]) -> list[GradedSample]:
        return [GradedSample(LedgerEntry("a/0", 0, "", n, "stop"), (Grade(right, None),)) for n in lengths]

    made = histogram([*samples(True, [0, 0, 100]), *samples(False, [100, 7])])
    assert made["size"] == 4 and len(made["right"]) == len(made["wrong"]) == 26
    assert {place: n for place, n in enumerate(made["right"]) if n} == {0: 2, 25: 1}
    assert {place: n for place, n in enumerate(made["wrong"]) if n} == {1: 1, 25: 1}
    assert histogram([]) == {"size": 1, "right": [0], "wrong": [0]}


def test_a_browser_shows_it_on_a_desktop_and_on_a_phone(browser: Browser, page: str, tmp_path: Path) -> None:
    """No request, error or overflow. A table that is wider than the phone can be seen to scroll."""
    (tmp_path / "report.html").write_text(page)
    hints = {}
    for width in WIDTHS:
        with browser.open(tmp_path / "report.html", width, "#open=3") as shown:
            assert shown.faults() == []
            text, html = shown.text(), shown.evaluate("document.documentElement.outerHTML")
            hints[width] = text.count("the table is wider: scroll it sideways")
            assert shown.evaluate("document.title") == "a <model>: math" and "<img" not in html
            assert (
                shown.evaluate("document.querySelectorAll('.problem').length") == 20 and "page 1 of 3" in text
            )  # of 45
            assert "<U+001B>[31m $\\frac{1}{2}$ \\boxed{7} costs $5" in text  # TeX is shown as TeX
            assert shown.evaluate("document.querySelectorAll('.charts figure').length") == 2
            assert "right 68" in text and "wrong 67" in text  # of 45 x 3 samples, 23 of the greedy ones are right
            assert "45 of 45 problems; this page holds the texts of 30 of them" in text
            if width == PHONE:
                last = "document.querySelector('.task .scroll th:last-child').getBoundingClientRect().right"
                assert shown.evaluate(last) > PHONE
                shown.evaluate("document.querySelector('.task .scroll').scrollLeft = 9999")
                assert shown.evaluate(last) <= PHONE
                names = "document.querySelectorAll('.scroll thead + tbody td:first-child')"
                assert shown.evaluate(f"[...{names}].map((e) => getComputedStyle(e).position)") == ["sticky"] * 3
    assert hints == {DESKTOP: 0, PHONE: 2}
