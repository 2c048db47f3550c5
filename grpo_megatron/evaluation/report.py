"""Report: one HTML file to look at, without a network: scores, distributions, and problems with their answers.

The page shows 20 problems at a time and makes their elements, and their MathML, when they are opened. It carries every
problem's verdicts, but texts within bounds: of `num_texts` problems a task, evenly spread, `SAMPLES_SHOWN` answers of
at most `LONGEST` characters, `BUDGET` characters in all; the rest is named, and stands in samples/. Texts are JSON in a
script element, with <, > and & escaped, and become text nodes: nothing a model wrote can become markup. A content
security policy forbids every request.
"""

from __future__ import annotations

import json
import re
from html import escape
from pathlib import Path
from typing import Any

from grpo_megatron.evaluation import figures
from grpo_megatron.evaluation.results import Graded, GradedProblem
from grpo_megatron.types import GREEDY

PAGE = Path(__file__).parent / "page"
SAMPLES_SHOWN, LONGEST, BUDGET = 4, 12_000, 8_000_000
FORMAT_ERROR, TRUNCATED, FAILED = 1, 2, 4  # bits of a row's flags, and of a sample's


def page(result: dict[str, Any], graded: dict[str, list[GradedProblem]], num_texts: int) -> str:
    """The report of `result`; `graded` has the samples of each of its tasks."""
    tasks = result["tasks"]
    parts = {
        "TITLE": escape(f"{result['model']['path']}: {', '.join(tasks)}"),
        "STYLE": (PAGE / "page.css").read_text(),
        "MATH": (PAGE / "math.js").read_text(),
        "SCRIPT": (PAGE / "page.js").read_text(),
        "BODY": _body(result, graded),
        "DATA": script_json({name: _task_data(tasks[name], graded[name], num_texts) for name in tasks}),
    }
    template = (PAGE / "page.html").read_text()
    return re.sub("@([A-Z]+)@", lambda match: parts[match[1]], template)  # once: texts may hold such words


def script_json(value: Any) -> str:
    """JSON that can stand in a script element, whatever its strings hold."""
    text = json.dumps(value, ensure_ascii=True, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


# -- what is drawn here ------------------------------------------------------------------------------------------------


def _body(result: dict[str, Any], graded: dict[str, list[GradedProblem]]) -> str:
    model = result["model"]
    versions = ", ".join(f"{name} {number}" for name, number in result["versions"].items())
    parts = [
        f"<h1>{escape(model['path'])}</h1>",
        f'<p class="soft small">{escape(model["dtype"])}, sha256 <code>{escape(model["sha256"][:16])}</code>, seed'
        f" {result['seed']}; {escape(versions)}</p>",
        "<h2>Scores</h2>",
        figures.score_rows(result["tasks"]),
        '<p class="note small">Percent, with 95 % bootstrap intervals over problems.</p>',
    ]
    parts += [_task_section(name, task, graded[name]) for name, task in result["tasks"].items()]
    return "\n".join(parts)


def _task_section(name: str, task: dict[str, Any], answered: list[GradedProblem]) -> str:
    rates, tokens = task["rates"], task["tokens"]
    facts = [
        ("format errors", f"{100 * rates['format_error']:.2f} %"),
        ("truncated", f"{100 * rates['truncated']:.2f} %"),
        ("grader timeouts", f"{100 * rates['grader_timeout']:.2f} %"),
        ("grader errors", f"{100 * rates['grader_error']:.2f} %"),
        ("tokens an answer", f"{tokens['mean']:,.0f}"),
        ("median", f"{tokens['median']:,.0f}"),
        ("95th percentile", f"{tokens['p95']:,.0f}"),
    ]
    head, row = ("".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) for tag, cells in _columns(facts))
    samples = [sample for problem in answered for sample in problem.samples]
    lengths = [[s.drawn.num_tokens for s in samples if s.correct is right] for right in (True, False)]
    key = '<span class="key right"></span>right<span class="key wrong"></span>wrong'
    drawn = [_figure(f"Tokens an answer {key}", figures.histogram(lengths[0], lengths[1], f"{name}: tokens an answer"))]
    if task["samples"] > 1:
        rights = [sum(s.correct for s in problem.drawn()) for problem in answered]
        title = f"Problems by right answers of {task['samples']}"
        drawn.append(_figure(title, figures.counts_of(rights, task["samples"], f"{name}: {title}")))
    for kind, groups in task["by"].items():
        measure = next(iter(next(iter(groups.values()))))
        title = f"{measure} by {kind}"
        drawn.append(_figure(title, figures.bars({g: s[measure] for g, s in groups.items()}, f"{name}: {title}")))
    return (
        f'<section class="task"><h2>{escape(name)}</h2><p class="soft small">{escape(task["title"])}<br>{_asked(task)}</p>'
        f'<div class="scroll"><table><tr>{head}</tr><tr>{row}</tr></table></div>'
        f'<div class="figures">{"".join(drawn)}</div></section>'
    )


def _columns(facts: list[tuple[str, str]]) -> list[tuple[str, list[str]]]:
    return [("th", [name for name, _ in facts]), ("td", [value for _, value in facts])]


def _figure(title: str, svg: str) -> str:
    return f"<figure><figcaption>{title}</figcaption>{svg}</figure>"


def _asked(task: dict[str, Any]) -> str:
    drawn = f"{task['samples']} samples at temperature {task['temperature']:g}, top_p {task['top_p']:g}; "
    hashes = (
        f"{what} <code>{task[key][:12]}</code>"
        for what, key in (("task file", "task_sha256"), ("data", "data_sha256"), ("prompts", "prompts_sha256"))
    )
    return (
        f"version {task['version']}, {task['num_fewshot']}-shot {escape(task['format'])}, up to {task['max_tokens']:,}"
        f" tokens; {drawn if task['samples'] else ''}sha256 of {', '.join(hashes)}"
    )


# -- what the browser draws --------------------------------------------------------------------------------------------


def _task_data(task: dict[str, Any], answered: list[GradedProblem], num_texts: int) -> dict[str, Any]:
    subjects = sorted({p.problem.subject for p in answered if p.problem.subject is not None})
    levels = sorted({p.problem.level for p in answered if p.problem.level is not None})
    texts = _texts(answered, num_texts)
    rows = []
    for number, item in enumerate(answered):
        problem, greedy = item.problem, item.greedy()
        rows.append(
            [
                number,
                None if problem.subject is None else subjects.index(problem.subject),
                None if problem.level is None else levels.index(problem.level),
                None if greedy is None else int(greedy.correct),
                sum(s.correct for s in item.drawn()),
                _flags(item.samples),
                texts.get(number),
            ]
        )
    return {
        "subjects": subjects,
        "levels": levels,
        "drawn": task["samples"],
        "greedy": task["greedy"],
        "dollars": "math" in task["graders"].values(),
        "prompt": _sound(answered[0].prompt),
        "rows": rows,
    }


def _texts(answered: list[GradedProblem], num_texts: int) -> dict[int, dict[str, Any]]:
    """The texts of evenly spread problems, within the budget."""
    count = min(num_texts, len(answered))
    while count:
        places = [place * len(answered) // count for place in range(count)]
        found = {number: _text(answered[number]) for number in places}
        size = sum(len(json.dumps(text)) for text in found.values())
        if size <= BUDGET:
            return found
        count = min(count - 1, int(0.95 * count * BUDGET / size))
    return {}


def _text(item: GradedProblem) -> dict[str, Any]:
    return {
        "q": _sound(item.problem.question_text[:LONGEST]),
        "g": _sound(item.problem.answer[:LONGEST]),
        "n": len(item.samples),
        "s": [_sample(s) for s in item.samples[:SAMPLES_SHOWN]],
    }


def _sample(sample: Graded) -> dict[str, Any]:
    text, grade = sample.drawn.text, sample.grades[0]
    return {
        "i": -1 if sample.drawn.index == GREEDY else sample.drawn.index,
        "c": int(grade.correct),
        "e": None if grade.extracted is None else _sound(grade.extracted[:500]),
        "k": sample.drawn.num_tokens,
        "f": _flags([sample]),
        "t": _sound(text[:LONGEST]),
        "x": max(0, len(text) - LONGEST),
    }


def _sound(text: str) -> str:
    """Without halves of surrogate pairs, which some browsers do not survive."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _flags(samples: list[Graded]) -> int:
    return (
        FORMAT_ERROR * any(not s.grades[0].format_ok for s in samples)
        | TRUNCATED * any(s.drawn.finish_reason == "length" for s in samples)
        | FAILED * any(s.grades[0].status != "ok" for s in samples)
    )
