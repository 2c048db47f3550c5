"""ProfileReport: what a profile says, in words and tables, as text and as one HTML file that needs no network."""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_megatron.observability.remedies import Remedy, largest_remedies
from grpo_megatron.observability.step_time import TAIL, TIME_PARTS, StepTime, TimeParts
from grpo_megatron.pages.run_page import base_style

MAX_RANK_ROWS = 64  # of the table of ranks: those that wait least come first
COLOURS = {"computing": "#2e9e68", "waiting": "#e08214", "moving": "#3b78c2", "idle": "#bbb"}
MEANING = {
    "computing": "computing",
    "waiting": "waiting for the slowest rank",
    "moving": "moving data between ranks, to the engine or to the disk",
    "idle": "idle: sleeping, or without a core",
}


@dataclass(frozen=True)
class ProfileReport:
    """`accuracy_s`: how far the clocks of two ranks may be apart. `num_dropped`: events that did not fit, of all ranks."""

    time: StepTime
    remedies: Sequence[Remedy]
    accuracy_s: float
    num_dropped: int
    limit: int

    def sentences(self) -> Iterator[str]:
        """Where the time went."""
        whole, steps = self.time.whole(), self.time.steps
        which = f"Step {steps[0]} took" if len(steps) == 1 else f"Steps {steps[0]} to {steps[-1]} took on average"
        ranks = len(self.time.ranks)
        yield f"{which} {whole.total:.3f} s on {ranks} rank{'s' if ranks > 1 else ''}. Of it, the average rank spent:"
        for part in TIME_PARTS:
            yield f"  {_amount(getattr(whole, part), whole.total)}  {MEANING[part]}"
        charged = sorted(self.time.charged.items(), key=lambda item: -item[1])[:3]
        for (rank, phase), seconds in charged:
            per_step = seconds / len(steps)
            yield f"All others together waited {per_step:.3f} s per step for rank {rank}, which was in {phase}."
        if self.time.engine_steps:
            count = self.time.engine_steps / self.time.num_rank_steps
            mean_ms = 1e3 * self.time.engine_s / self.time.engine_steps
            tail = self.time.tail_s / self.time.num_rank_steps
            yield f"An engine made {count:.0f} steps of {mean_ms:.2f} ms each per training step."
            yield f"While it did so, at most 1/{TAIL} of its requests were left for {tail:.3f} s."

    def remedy_lines(self) -> list[str]:
        """One per remedy; seconds are per step."""
        if not self.remedies:
            return ["No remedy is known for what was measured."]
        return [f"{r.key}: {r.advice}. At most {r.seconds:.3f} s per step ({r.from_what})." for r in self.remedies]

    def limits(self) -> Iterator[str]:
        """What the numbers do not say."""
        accuracy_ms = 1e3 * self.accuracy_s
        if accuracy_ms:
            yield f"Clocks of different machines agree within {accuracy_ms:.3f} ms, measured at the profile's start."
        else:
            yield "All ranks are on one machine and read the same clock."
        yield "Seconds of a remedy are per step and an upper bound: the time measured where it applies. They do not add up."
        if self.num_dropped:
            yield f"{self.num_dropped:,} events did not fit: a rank keeps {self.limit:,}. Profile fewer steps."
        if self.time.num_undivided:
            yield f"{self.time.num_undivided:,} collectives were not recorded by all their ranks and count as moving."

    def text(self) -> str:
        """For the console."""
        lines = ["where the time went", *self.sentences(), "", "the largest remedies"]
        lines += [f"  {number}. {line}" for number, line in enumerate(self.remedy_lines(), 1)]
        lines += ["", *_text_table(("phase", "seconds", *TIME_PARTS), self._phase_rows()), "", *self.limits()]
        return "\n".join(lines)

    def page(self) -> str:
        """One HTML document, without scripts."""
        phases = _html_table(("phase", "seconds", *TIME_PARTS), self._phase_rows())
        ranks = _html_table(("rank", "seconds", *TIME_PARTS, ""), self._rank_rows())
        remedies = "".join(f"<li>{html.escape(line)}</li>" for line in self.remedy_lines())
        words = "<br>".join(html.escape(line).replace("  ", "&ensp;") for line in self.sentences())
        limits = " ".join(html.escape(line) for line in self.limits())
        legend = " ".join(f'<span style="color:{COLOURS[part]}">&#9632;</span> {part}' for part in TIME_PARTS)
        return (
            '<!doctype html><html lang="en"><meta charset="utf-8"><title>Profile</title>'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
            f"<style>{base_style()}{_STYLE}</style>"
            f"<h1>Where the time went</h1><p>{words}</p>{_bar(self.time.whole())}<p>{legend}</p>"
            f"<h2>The largest remedies</h2><ol>{remedies}</ol>"
            f"<h2>Phases</h2><p>Seconds per step of the average rank.</p>{phases}"
            f"<h2>Ranks</h2><p>Seconds per step. Others wait for the rank that waits least.</p>{ranks}"
            f"<h2>Limits</h2><p>{limits}</p><p>The trace is trace.json, for ui.perfetto.dev or chrome://tracing.</p></html>\n"
        )

    def _phase_rows(self) -> list[tuple[str, ...]]:
        return [(phase, *_numbers(seconds)) for phase, seconds in self.time.by_phase().items()]

    def _rank_rows(self) -> list[tuple[str, ...]]:
        ranks = sorted(
            ((r, self.time.of_rank(r)) for r in range(len(self.time.ranks))), key=lambda item: item[1].waiting
        )
        return [(str(rank), *_numbers(seconds), _bar(seconds)) for rank, seconds in ranks[:MAX_RANK_ROWS]]


def build_profile_report(
    time: StepTime, settings: Mapping[str, Any], *, accuracy_s: float, num_dropped: int, limit: int
) -> ProfileReport:
    """`settings`: the run's config, "section.key" -> value."""
    return ProfileReport(time, largest_remedies(time, settings), accuracy_s, num_dropped, limit)


_STYLE = "body{max-width:60rem}.bar{display:flex;width:24rem;max-width:100%;height:1em}td .bar{width:12rem}"


def _amount(seconds: float, whole: float) -> str:
    return f"{seconds:7.3f} s ({100 * seconds / whole if whole else 0:3.0f} %)"


def _numbers(seconds: TimeParts) -> tuple[str, ...]:
    return f"{seconds.total:.3f}", *(f"{getattr(seconds, part):.3f}" for part in TIME_PARTS)


def _text_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    return [
        "  ".join(cell.rjust(w) if i else cell.ljust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True)))
        for row in (header, *rows)
    ]


def _html_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Cells that begin with "<div" are HTML already."""
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in header)
    body = "".join(
        "<tr>" + "".join(f"<td>{c if c.startswith('<div') else html.escape(c)}</td>" for c in row) + "</tr>"
        for row in rows
    )
    return f'<div class="scroll"><table><tr>{head}</tr>{body}</table></div>'


def _bar(seconds: TimeParts) -> str:
    parts = "".join(
        f'<div style="flex:{getattr(seconds, part):.6f};background:{COLOURS[part]}" title="{part}"></div>'
        for part in TIME_PARTS
    )
    return f'<div class="bar">{parts}</div>'
