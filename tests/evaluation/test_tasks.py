"""Tasks over the real files, their prompts, and the mapping to lm-evaluation-harness.

The harness' numbers are lm-eval 0.4.13's own: its task gsm8k (version 3.0) was run over these train and test files with
a model that gives the answers of `harness_answers`; kept are the sha256 of its 1,319 prompts, joined by NUL, and the
sha256 of each filter's 0/1 verdicts as a string. It scored 348 (strict-match) and 773 (flexible-extract).
"""

from __future__ import annotations

import hashlib
import random
from pathlib import Path
from typing import Any

import pytest

from grpo_megatron.config import ConfigError, DataConfig
from grpo_megatron.evaluation.grading import grade
from grpo_megatron.evaluation.problems import Dataset, fill, read_datasets
from grpo_megatron.evaluation.prompting import build, choose_format, cut, stop_token_ids
from grpo_megatron.evaluation.task import Task, read_tasks, task_names
from grpo_megatron.evaluation.validation import read_task_prompts
from tests.evaluation.models import byte_tokenizer, gsm8k_rows, write_rows

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
real_data = pytest.mark.skipif(not DATA.is_dir(), reason="needs the real benchmark files in ../shared/data")

PROMPTS = "84119a05b6c77e92415182c7963444e153dd2df04e05e238744f26b105c0a8b6"
STRICT = "29071e1d349bf9260a6fe2bc389d8774ce71735594cff48e6c557c6ad8e8e4a1"
FLEXIBLE = "40864a854d99700da8db80d3d76bec45307f9704e7a1a054dc792edda7ace63f"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return byte_tokenizer()


def _read(
    *names: str, shots: int | None = None, data: Path = DATA, limit: int | None = None, **files: Path
) -> list[Dataset]:
    def num_fewshot(task: Task) -> int:
        return shots if shots is not None else task.spec.fewshot.default if task.spec.fewshot else 0

    return read_datasets(read_tasks(list(names)), data, files, num_fewshot, limit)


def harness_answers(golds: list[str]) -> list[str]:
    """What the harness was given: right and wrong, in many spellings, and text after a stop."""
    answers = []
    for number, gold in enumerate(golds):
        plain = int(float(gold.replace(",", "")))
        styles = [
            f" x\n#### {gold}", f" so {gold}", f" #### ${gold}.", f" #### {gold}\n\nQuestion: next\n#### 7",
            f" The answer is **{gold}**.", " I do not know", f" #### {gold}. and 12", f" 3 + 4 = 7\n#### 1,{gold}",
            f" ####{gold}", f" ${gold}.00", f" #### {plain + 1}", f" {gold}</s> 9",
        ]  # fmt: skip
        answers.append(styles[random.Random(number).randrange(len(styles))])
    return answers


class Mute:
    """In the tokenizer's place where only the texts are looked at: 9 MB of single bytes would take a while."""

    eos_token_id = 0

    def __call__(self, texts: list[str], add_special_tokens: bool) -> dict[str, list[list[int]]]:
        return {"input_ids": [[1] for _ in texts]}


@real_data
def test_every_row_of_the_real_files_is_a_problem() -> None:
    found = {d.task.name: d for d in _read("gsm8k", "math", "math500", "svamp", "olympiadbench")}
    counts = {name: len(dataset.problems) for name, dataset in found.items()}
    assert counts == {"gsm8k": 1319, "math": 5000, "math500": 500, "svamp": 1000, "olympiadbench": 675}
    first = {name: dataset.problems[0] for name, dataset in found.items()}
    assert {name: p.answer for name, p in first.items()} == {
        "gsm8k": "18", "math": "2", "math500": "\\left( 3, \\frac{\\pi}{2} \\right)", "svamp": "145", "olympiadbench": "2",
    }  # fmt: skip
    assert (first["math"].subject, first["math"].level) == ("Algebra", "Level 3")
    assert (first["math500"].subject, first["math500"].level) == ("Precalculus", "Level 2")
    assert len({p.subject for p in found["math"].problems}) == 7 and len({p.level for p in found["math"].problems}) == 5
    questions = {p.question: p.answer for p in found["math"].problems}
    shared = [p for p in found["math500"].problems if p.question in questions]
    assert len(shared) > 490 and sum(p.answer == questions[p.question] for p in shared) > 0.99 * len(shared)


@real_data
def test_the_prompts_are_those_of_lm_evaluation_harness(tokenizer: Any) -> None:
    (dataset,) = _read("gsm8k_lm_eval")
    prompts = build(dataset, "text", 5, 0, Mute())
    assert len(prompts.prompts) == 1319 and prompts.prompts_sha256 == PROMPTS == prompts.asked_sha256
    assert dataset.task.spec.text.stop == ["Question:", "</s>", "<|im_end|>"]
    assert (dataset.task.spec.fewshot.default, dataset.task.spec.max_tokens) == (5, 256)  # type: ignore[union-attr]


@real_data
def test_the_scores_are_those_of_lm_evaluation_harness(tokenizer: Any) -> None:
    (dataset,) = _read("gsm8k_lm_eval")
    golds = [problem.answer for problem in dataset.problems]
    stop = dataset.task.spec.text.stop
    texts = [cut(tokenizer(a)["input_ids"], stop, tokenizer)[0] for a in harness_answers(golds)]
    for (name, grader), (right, digest) in zip(
        dataset.task.spec.graders.items(), ((348, STRICT), (773, FLEXIBLE)), strict=True
    ):
        verdicts = "".join(str(int(g.correct)) for g in grade(grader, golds, texts))
        assert (verdicts.count("1"), hashlib.sha256(verdicts.encode()).hexdigest()) == (right, digest), name


@real_data
def test_fewshot_examples_are_one_draw_of_the_training_file(tokenizer: Any) -> None:
    (dataset,) = _read("gsm8k", shots=8, limit=20)
    prompts = build(dataset, "text", 8, 1234, tokenizer)
    head = prompts.prompts[0].text.rpartition("Question: ")[0]
    assert head.count("Question: ") == 8 and "<<" not in head and head.count("####") == 8
    assert all(prompt.text.startswith(head) for prompt in prompts.prompts)
    assert build(dataset, "text", 8, 1234, tokenizer).prompts_sha256 == prompts.prompts_sha256
    assert build(dataset, "text", 8, 1, tokenizer).prompts_sha256 != prompts.prompts_sha256
    test = {problem.question for problem in dataset.problems}
    assert not any(example.question in test for example in dataset.pool)
    chat = build(dataset, "chat", 8, 1234, tokenizer).prompts[0].text
    assert (
        chat.startswith("<system>Reason step by step.") and chat.endswith("\n<assistant>") and chat.count("<user>") == 9
    )


def test_a_file_of_the_users_own(tmp_path: Path, tokenizer: Any) -> None:
    file = write_rows(
        tmp_path / "mine.jsonl", [{"problem": "1{x}+1?", "answer": 2.0}, {"problem": "2?", "answer": "3"}]
    )
    (dataset,) = _read("aime", aime=file)
    assert [(p.uid, p.question, p.answer) for p in dataset.problems] == [
        ("aime/0", "1{x}+1?", "2"),
        ("aime/1", "2?", "3"),
    ]
    text = build(dataset, "chat", 0, 0, tokenizer).prompts[0].text
    assert text == "<user>1{x}+1?\n\nReason step by step, and put the final answer in \\boxed{}.\n<assistant>"
    assert fill("{a} {b} {}", {"a": "{b}"}) == "{b} {b} {}"


def test_every_mistake_is_named_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="(?s)unknown task 'gsm9k'; did you mean 'gsm8k'.*task 'math' is given twice"):
        read_tasks(["gsm9k", "math", "math"])
    with pytest.raises(
        ConfigError, match=r"(?s)'gsm8k': no data file.*looked for gsm8k/test.jsonl.*'aime': no data file"
    ):
        _read("gsm8k", "aime", data=tmp_path)
    with pytest.raises(ConfigError, match="--file math=...: 'math' is not one of --tasks"):
        _read("gsm8k", data=tmp_path, math=tmp_path)
    write_rows(tmp_path / "gsm8k" / "test.jsonl", [{"question": "a", "answer": "no mark"}, {"answer": "#### 1"}])
    with pytest.raises(
        ConfigError, match=r"(?s)2 of 2 rows are wrong.*line 1: field 'answer' holds no answer.*line 2: no q"
    ):
        _read("gsm8k", data=tmp_path)
    (tmp_path / "bad.yaml").write_text("name: x\nversion: 0\n")
    with pytest.raises(ConfigError, match=r"(?s)bad.yaml' is wrong:.*version: .*title: Field required"):
        read_tasks([str(tmp_path / "bad.yaml")])
    write_rows(tmp_path / "svamp.jsonl", [{"Body": "b", "Question": "q", "Answer": 1.0}])
    with pytest.raises(ConfigError, match="'svamp' has no training file.*--num-fewshot 0"):
        _read("svamp", shots=2, data=tmp_path)


def test_formats_and_stops(tokenizer: Any) -> None:
    gsm8k, harness = (task.spec for task in read_tasks(["gsm8k", "gsm8k_lm_eval"]))
    assert [choose_format(gsm8k, "auto", shots, tokenizer) for shots in (0, 8)] == ["chat", "text"]
    assert choose_format(gsm8k, "chat", 8, tokenizer) == "chat"
    with pytest.raises(ConfigError, match="'gsm8k_lm_eval' is text only; set --format text"):
        choose_format(harness, "chat", 5, tokenizer)
    base = byte_tokenizer()
    base.chat_template = None
    with pytest.raises(ConfigError, match="no chat template; set --format text"):
        choose_format(gsm8k, "auto", 0, base)
    ids = tokenizer("It is 4.\n\nQuestion: more")["input_ids"]
    assert cut(ids, ["Question:", "\n\n"], tokenizer) == ("It is 4.", 10, True)  # 8 bytes, and the two of the stop
    assert cut(ids, ["</s>"], tokenizer) == ("It is 4.\n\nQuestion: more", len(ids), False)
    assert stop_token_ids(["<eos>", "Question:"], tokenizer) == [tokenizer.eos_token_id]


def test_all_task_files_can_be_read() -> None:
    assert {"gsm8k", "math", "math500", "svamp", "olympiadbench", "aime", "amc", "minerva"} <= set(task_names())
    for task in read_tasks(task_names()):
        assert task.name in task_names() and len(task.sha256) == 64


def test_validation_asks_what_the_scripted_evaluation_asks(tmp_path: Path, tokenizer: Any) -> None:
    write_rows(tmp_path / "gsm8k" / "test.jsonl", gsm8k_rows(5))
    settings = {"val_tasks": ["gsm8k"], "val_data": tmp_path, "val_max_samples": 3}
    prompts = read_task_prompts(DataConfig(**settings), {}, tokenizer)
    assert prompts == build(_read("gsm8k", data=tmp_path)[0], "chat", 0, 0, tokenizer).prompts[:3]
    assert {(p.source, p.reward) for p in prompts} == {("gsm8k", "gsm8k")}
    for changes, words in [
        ({"val_data": None}, "set data.val_data=DIR"),
        ({"val_tasks": ["gsm8k_lm_eval"]}, "scripted evaluation only"),
        ({"apply_chat_template": False}, "set data.apply_chat_template=true"),
        ({"max_prompt_length": 9}, "data.max_prompt_length is 9; set it to 1[0-9]+ or more"),
    ]:
        with pytest.raises(ConfigError, match=words):
            read_task_prompts(DataConfig(**{**settings, **changes}), {}, tokenizer)
    with pytest.raises(ConfigError, match="task 'gsm8k': reward 'gsm8k' cannot be called .* kwargs mode"):
        read_task_prompts(DataConfig(**settings), {"mode": 1}, tokenizer)
