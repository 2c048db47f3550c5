"""Rollout files and evaluations of the quickstart's task with known verdicts, written by the code that a run uses."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from grpo_megatron.config import DataConfig
from grpo_megatron.data.benchmarks import BenchmarkProblem
from grpo_megatron.data.generated import bare_response, build_tokenizer, problem_rows, worked_response
from grpo_megatron.data.prompts import load_prompts
from grpo_megatron.evaluation.grading import Grade
from grpo_megatron.evaluation.ledger import LedgerEntry
from grpo_megatron.evaluation.results import GradedProblem, GradedSample, write_samples
from grpo_megatron.observability.metrics import Metrics
from grpo_megatron.training.samples import RolloutFiles
from grpo_megatron.types import GREEDY, GroupTable, Plan, Prompt, Sample, Turn
from tests.sampling.fakes import LoneMesh

DATA = DataConfig(task="arithmetic", apply_chat_template=False, max_prompt_length=32, max_response_length=32)
TOKENIZER = build_tokenizer()
PASSES = [0, 1, 2, 4, 4, 3]  # of 4 responses to each of six problems


def write_data(path: Path) -> list[Prompt]:
    """Six rows, two of them with a field that no task reads, in spellings that a rewrite would not keep."""
    rows = problem_rows(3, 6, held_out=False)
    lines = [json.dumps(row) for row in rows]
    lines[1] = json.dumps({**rows[1], "note": "\u00fc"}, ensure_ascii=False)
    lines[2] = json.dumps({"answer": rows[2]["answer"], "prompt": rows[2]["prompt"]}, separators=(" , ", ":"))
    path.write_text("\n".join(lines) + "\n\n", encoding="utf-8")
    return load_prompts(DATA, [path], TOKENIZER)


def right(prompt: Prompt, number: int) -> str:
    """Two different right responses; those of other numbers differ in white space only."""
    total = int(prompt.answer)
    text = worked_response(total // 2, total - total // 2) if number % 2 else bare_response(total, 0)
    return text if number < 2 else f"{text} "


def wrong(prompt: Prompt, number: int) -> str:
    return bare_response(int(prompt.answer), number + 1)


def texts_of(prompt: Prompt, passes: int) -> list[tuple[str, float]]:
    """(text, score) of four responses, the right ones last."""
    wrongs = [(wrong(prompt, number), 0.0) for number in range(4 - passes)]
    return wrongs + [(right(prompt, number), 1.0) for number in range(passes)]


def sample(prompt: Prompt, group: int, index: int, text: str, score: float, **fields: Any) -> Sample:
    ids = [*TOKENIZER(text, add_special_tokens=False)["input_ids"], TOKENIZER.eos_token_id]
    plain = {"finish_reason": "stop", "version": 0, "text": text, "reward": score, **fields}
    return Sample(prompt, group, index, ids, [0.0] * len(ids), **plain)


def write_rollouts(folder: Path, step: int, samples: Sequence[Sample]) -> None:
    mesh: Any = LoneMesh()
    table = GroupTable(
        [one.prompt_index for one in samples],
        [one.index for one in samples],
        [one.reward for one in samples],
        [len(one.prompt.prompt_ids) for one in samples],
        [len(one.response_ids) for one in samples],
        [one.finish_reason == "length" for one in samples],
        [0] * len(samples),
    )
    plan = Plan([None] * len(samples), [], [[]])
    RolloutFiles(folder, folder / "run", mesh, TOKENIZER).write(step, Metrics(), samples, table, plan)


def rollouts(folder: Path, prompts: Sequence[Prompt]) -> Path:
    """Two steps of three problems each."""
    for step in range(2):
        chosen = list(zip(prompts, PASSES, strict=True))[3 * step : 3 * step + 3]
        drawn = [
            sample(prompt, group, index, text, score)
            for group, (prompt, passes) in enumerate(chosen)
            for index, (text, score) in enumerate(texts_of(prompt, passes))
        ]
        write_rollouts(folder, step, drawn)
    return folder


def trajectory(prompt: Prompt, group: int, score: float) -> Sample:
    one = sample(prompt, group, 9, right(prompt, 0), score)
    one.turns = [Turn(0, len(one.response_ids), "assistant", 0, 0)]
    return one


def evaluation(folder: Path, prompts: Sequence[Prompt]) -> Path:
    """The same responses and a wrong greedy one, as the scripted evaluation writes them."""
    graded = []
    for number, (prompt, passes) in enumerate(zip(prompts, PASSES, strict=True)):
        uid = f"arithmetic/{number}"
        drawn = [(GREEDY, "nothing", 0.0), *((i, *pair) for i, pair in enumerate(texts_of(prompt, passes)))]
        samples = [
            GradedSample(
                LedgerEntry(uid, index, text, len(TOKENIZER(text)["input_ids"]) + 1, "stop"),
                (Grade(score == 1.0, text),),
            )
            for index, text, score in drawn
        ]
        graded.append(GradedProblem(BenchmarkProblem(uid, prompt.question, prompt.answer), prompt.text, samples))
    selected: Any = SimpleNamespace(graders={"accuracy": "arithmetic"})
    write_samples(folder / "samples" / "arithmetic.jsonl", selected, graded)
    return folder
