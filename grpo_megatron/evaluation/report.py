"""Report: one HTML file that needs no network: scores, distributions, and problems with their completions.

Scores and figures are made here. The browser makes the list of problems from data (page_data.py): 20 at a time, and the
texts of a problem when it is opened.

A model may write anything, and none of it can become markup. Texts are JSON in a script element, with <, > and &
escaped, and the page adds them as text nodes. Formulas are MathML in a <template> (formulas.py), each once, and the page
copies them by number. A content security policy forbids every request.
"""

from __future__ import annotations

import re
from html import escape
from pathlib import Path
from typing import Any

from grpo_megatron.evaluation import figures
from grpo_megatron.evaluation.formulas import FormulaTable
from grpo_megatron.evaluation.page_data import script_json, task_data
from grpo_megatron.evaluation.results import GradedProblem, limited
from grpo_megatron.pages.run_page import base_style

PAGE = Path(__file__).parent / "page"


def render_page(result: dict[str, Any], graded: dict[str, list[GradedProblem]], num_texts: int) -> str:
    """The report of `result`. `graded` has the problems of each task, `num_texts` is per task."""
    tasks = result["tasks"]
    formulas = FormulaTable()
    data = script_json({name: task_data(tasks[name], graded[name], num_texts) for name in tasks}, formulas)
    parts = {
        "TITLE": escape(f"{result['model']['path']}: {', '.join(tasks)}"),
        "STYLE": base_style() + (PAGE / "page.css").read_text(),
        "SCRIPT": (PAGE / "page.js").read_text(),
        "BODY": _body(result, graded),
        "FORMULAS": "".join(formulas.markup),
        "DATA": data,
    }
    template = (PAGE / "page.html").read_text()
    return re.sub("@([A-Z]+)@", lambda match: parts[match[1]], template)  # in one pass: texts may hold such words


def _body(result: dict[str, Any], graded: dict[str, list[GradedProblem]]) -> str:
    model = result["model"]
    versions = ", ".join(f"{name} {number}" for name, number in result["versions"].items())
    parts = [
        f"<h1>{escape(model['path'])}</h1>",
        f'<p class="soft small">{escape(model["dtype"])}, sha256 <code>{escape(model["sha256"][:16])}</code>, seed'
        f" {result['seed']}; {escape(versions)}</p>",
        "<h2>Scores</h2>",
        figures.score_rows(result["tasks"]),
        '<p class="note small">Percent, with 95 % intervals over problems.</p>',
    ]
    parts += [_task_section(name, task, graded[name]) for name, task in result["tasks"].items()]
    return "\n".join(parts)


def _task_section(name: str, task: dict[str, Any], graded: list[GradedProblem]) -> str:
    rates, tokens = task["rates"], task["tokens"]
    facts = {
        "format errors": f"{100 * rates['format_error']:.2f} %",
        "truncated": f"{100 * rates['truncated']:.2f} %",
        "grader timeouts": f"{100 * rates['grader_timeout']:.2f} %",
        "grader errors": f"{100 * rates['grader_error']:.2f} %",
        "tokens per completion": f"{tokens['mean']:,.0f}",
        "median": f"{tokens['median']:,.0f}",
        "95th percentile": f"{tokens['p95']:,.0f}",
    }
    if "trajectories" in task:
        played = task["trajectories"]
        facts["turns per trajectory"] = f"{played['turns']:.2f}"
        facts |= {f"ended: {status}": f"{100 * share:.2f} %" for status, share in played["statuses"].items()}
    head = "".join(f"<th>{escape(fact)}</th>" for fact in facts)
    row = "".join(f"<td>{escape(value)}</td>" for value in facts.values())
    return (
        f'<section class="task"><h2>{escape(name)}{_limit_mark(task)}</h2>'
        f'<p class="soft small">{escape(task["title"])}<br>{_settings(task)}</p>'
        f'<div class="scroll"><table><tr>{head}</tr><tr>{row}</tr></table></div>'
        f'<div class="figures">{_task_figures(name, task, graded)}</div></section>'
    )


def _limit_mark(task: dict[str, Any]) -> str:
    """Says that the scores are not those of the whole benchmark."""
    text = limited(task)
    return f' <span class="badge mark">{text} problems: --limit</span>' if text else ""


def _task_figures(name: str, task: dict[str, Any], graded: list[GradedProblem]) -> str:
    samples = [sample for problem in graded for sample in problem.samples]
    right = [sample.entry.num_tokens for sample in samples if sample.correct]
    wrong = [sample.entry.num_tokens for sample in samples if not sample.correct]
    key = '<span class="key right"></span>right<span class="key wrong"></span>wrong'
    histogram = figures.histogram(right, wrong, f"{name}: tokens per completion")
    parts = [_figure(f"Tokens per completion {key}", histogram)]
    if task["samples"] > 1:
        title = f"Problems by right answers of {task['samples']}"
        counts = [problem.num_right() for problem in graded]
        parts.append(_figure(title, figures.right_counts(counts, task["samples"], f"{name}: {title}")))
    for label, groups in task["by"].items():
        measure = next(iter(next(iter(groups.values()))))
        title = f"{measure} by {label}"
        scores = {group: measures[measure] for group, measures in groups.items()}
        parts.append(_figure(title, figures.bars(scores, f"{name}: {title}")))
    return "".join(parts)


def _figure(title: str, svg: str) -> str:
    return f"<figure><figcaption>{title}</figcaption>{svg}</figure>"


def _settings(task: dict[str, Any]) -> str:
    sampling = ""
    if task["samples"]:
        sampling = f"{task['samples']} samples at temperature {task['temperature']:g}, top_p {task['top_p']:g}; "
    hashes = (
        f"{what} <code>{task[key][:12]}</code>"
        for what, key in (("task file", "task_sha256"), ("data", "data_sha256"), ("prompts", "prompts_sha256"))
    )
    return (
        f"version {task['version']}, {task['num_fewshot']}-shot {escape(task['format'])}, up to {task['max_tokens']:,}"
        f" tokens; {sampling}sha256 of {', '.join(hashes)}"
    )
