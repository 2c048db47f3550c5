"""Tasks over the real files, their prompts, the same in training and evaluation, and those of lm-evaluation-harness.

The harness' numbers are those of lm-eval 0.4.13. Its task gsm8k (version 3.0) ran over these train and test files with a
model that returns `harness_completions`. Recorded are the sha256 of its 1,319 prompts, joined by NUL, and the sha256 of
each filter's 0/1 verdicts as a string. It scored 348 (strict-match) and 773 (flexible-extract).
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from grpo_megatron.config import ConfigError, DataConfig
from grpo_megatron.data.benchmarks import DataPlaces, Dataset, read_datasets, read_task_prompts
from grpo_megatron.data.prompts import load_prompts
from grpo_megatron.data.task import Task, get_task, get_tasks, task_names
from grpo_megatron.environments import programs
from grpo_megatron.evaluation.evaluate import cut_at_stop
from grpo_megatron.evaluation.grading import grade
from grpo_megatron.evaluation.settings import build_prompts, choose_format
from grpo_megatron.rewards import instructions
from grpo_megatron.rewards.pool import RewardPool
from tests.evaluation.models import byte_tokenizer, gsm8k_rows
from tests.files import WHOLE
from tests.runs import write_rows

# Of the harness' code for gsm8k_cot (version 3.0), and for minerva_math in its first version, on the 1,319 and 5,000 test rows.
OWN_EXAMPLES = {
    "gsm8k_cot8": (8, 1319, "9a08edd9368fad0c8e3a7d85f65d607fcbc6566b30b3ef3e479a4d6c11eaf204"),
    "math_minerva4": (4, 5000, "37e104bcfb39f8b47c0f1049cecfd2a95c57455c29ca5a4fb80abf151ff982b4"),
}
PROMPTS = "84119a05b6c77e92415182c7963444e153dd2df04e05e238744f26b105c0a8b6"
STRICT = "29071e1d349bf9260a6fe2bc389d8774ce71735594cff48e6c557c6ad8e8e4a1"
FLEXIBLE = "40864a854d99700da8db80d3d76bec45307f9704e7a1a054dc792edda7ace63f"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return byte_tokenizer()


@pytest.fixture(scope="module")
def pool() -> Iterator[RewardPool]:
    with RewardPool(1, 30.0) as pool:
        yield pool


@pytest.fixture(scope="module")
def closing_tokenizer() -> Any:
    """Puts <bos> and <eos> around every text that is no chat, as tokenizers of the Llama family may."""
    from tokenizers.processors import TemplateProcessing

    tokenizer = byte_tokenizer()
    special = [("<bos>", tokenizer.bos_token_id), ("<eos>", tokenizer.eos_token_id)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<bos> $A <eos>", special_tokens=special)
    assert len(tokenizer("ab")["input_ids"]) == 4
    return tokenizer


def _read(
    *names: str, shots: int | None = None, data: Path = WHOLE, limit: int | None = None, **files: Path
) -> list[Dataset]:
    def num_fewshot(task: Task) -> int:
        if shots is not None:
            return shots
        return task.fewshot.default if task.fewshot else 0

    return read_datasets(get_tasks(list(names)), DataPlaces(data, files), num_fewshot, limit)


def harness_completions(answers: list[str]) -> list[str]:
    """The completions that the harness graded: right and wrong, in many spellings, and text after a stop."""
    completions = []
    for number, answer in enumerate(answers):
        plain = int(float(answer.replace(",", "")))
        styles = [
            f" x\n#### {answer}", f" so {answer}", f" #### ${answer}.", f" #### {answer}\n\nQuestion: next\n#### 7",
            f" The answer is **{answer}**.", " I do not know", f" #### {answer}. and 12", f" 3 + 4 = 7\n#### 1,{answer}",
            f" ####{answer}", f" ${answer}.00", f" #### {plain + 1}", f" {answer}</s> 9",
        ]  # fmt: skip
        completions.append(styles[random.Random(number).randrange(len(styles))])
    return completions


class OneTokenTokenizer:
    """For tests of texts only: 9 MB as single bytes would take a while to tokenise."""

    eos_token_id, loss_is_reported = 0, True

    def __call__(self, texts: list[str], add_special_tokens: bool) -> dict[str, list[list[int]]]:
        return {"input_ids": [[1] for _ in texts]}


@pytest.mark.real_data
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


@pytest.mark.real_data
def test_the_prompts_are_those_of_lm_evaluation_harness(tokenizer: Any) -> None:
    (dataset,) = _read("gsm8k_lm_eval")
    prompts = build_prompts(dataset, "text", 5, 0, OneTokenTokenizer())
    assert len(prompts.prompts) == 1319 and prompts.prompts_sha256 == PROMPTS == prompts.asked_sha256
    assert dataset.task.text.stop == ["Question:", "</s>", "<|im_end|>"]
    assert (dataset.task.fewshot.default, dataset.task.max_tokens) == (5, 256)  # type: ignore[union-attr]


@pytest.mark.real_data
@pytest.mark.parametrize("name", OWN_EXAMPLES)
def test_examples_in_the_task_make_the_published_prompts(name: str) -> None:
    (dataset,) = _read(name)
    shots, count, digest = OWN_EXAMPLES[name]
    prompts = build_prompts(dataset, "text", shots, 0, OneTokenTokenizer())
    assert len(prompts.prompts) == count and prompts.prompts_sha256 == digest
    assert dataset.task.fewshot.default == shots == len(dataset.pool)  # type: ignore[union-attr]
    fewer = build_prompts(_read(name, shots=2)[0], "text", 2, 0, OneTokenTokenizer()).prompts[0].text
    assert prompts.prompts[0].text.startswith(fewer.rpartition(dataset.problems[0].question)[0].rpartition("\n\n")[0])
    with pytest.raises(ConfigError, match=f"--num-fewshot 9: task '{name}' has {shots} examples of its own"):
        _read(name, shots=9)


def test_what_a_chain_of_thought_is_graded_by(pool: RewardPool) -> None:
    right = [" So 9 x 2 = 18. The answer is 18.", " The answer is 1,8 Q"]
    wrong = [" The answer is $18.00.", " 18", "The answer is 18"]
    graded = grade("gsm8k_cot_strict", ["18"] * 5, [*right, *wrong], pool)
    assert [one.correct for one in graded] == [True] * 2 + [False] * 3


@pytest.mark.real_data
def test_the_scores_are_those_of_lm_evaluation_harness(tokenizer: Any, pool: RewardPool) -> None:
    (dataset,) = _read("gsm8k_lm_eval")
    answers = [problem.answer for problem in dataset.problems]
    stop = dataset.task.text.stop
    texts = [cut_at_stop(tokenizer(c)["input_ids"], stop, tokenizer)[0] for c in harness_completions(answers)]
    for (name, grader), (right, digest) in zip(
        dataset.task.graders.items(), ((348, STRICT), (773, FLEXIBLE)), strict=True
    ):
        verdicts = "".join(str(int(g.correct)) for g in grade(grader, answers, texts, pool))
        assert (verdicts.count("1"), hashlib.sha256(verdicts.encode()).hexdigest()) == (right, digest), name


def test_fewshot_examples_are_drawn_once_from_the_training_file(tokenizer: Any) -> None:
    (dataset,) = _read("gsm8k", shots=8, limit=20)
    prompts = build_prompts(dataset, "text", 8, 1234, tokenizer)
    head = prompts.prompts[0].text.rpartition("Question: ")[0]
    assert head.count("Question: ") == 8 and "<<" not in head and head.count("####") == 8
    assert all(prompt.text.startswith(head) for prompt in prompts.prompts)
    assert build_prompts(dataset, "text", 8, 1234, tokenizer).prompts_sha256 == prompts.prompts_sha256
    assert build_prompts(dataset, "text", 8, 1, tokenizer).prompts_sha256 != prompts.prompts_sha256
    test = {problem.question for problem in dataset.problems}
    assert not any(example.question in test for example in dataset.pool)
    chat = build_prompts(dataset, "chat", 8, 1234, tokenizer).prompts[0].text
    assert (
        chat.startswith("<system>Reason step by step.") and chat.endswith("\n<assistant>") and chat.count("<user>") == 9
    )


def test_a_file_of_the_user(tmp_path: Path, tokenizer: Any) -> None:
    file = write_rows(tmp_path / "own.jsonl", [{"problem": "1{x}+1?", "answer": 2.0}, {"problem": "2?", "answer": "3"}])
    (dataset,) = _read("aime", aime=file)
    assert [(p.uid, p.question, p.answer) for p in dataset.problems] == [
        ("aime/0", "1{x}+1?", "2"),
        ("aime/1", "2?", "3"),
    ]
    text = build_prompts(dataset, "chat", 0, 0, tokenizer).prompts[0].text
    assert text == "<user>1{x}+1?\n\nReason step by step, and put the final answer in \\boxed{}.\n<assistant>"


def test_every_mistake_is_named_at_once(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"(?s)'gsm8k': no data file.*looked for gsm8k/test.jsonl.*'aime': no data file"
    ):
        _read("gsm8k", "aime", data=tmp_path)
    with pytest.raises(ConfigError, match="--file math=...: 'math' is not one of --tasks"):
        _read("gsm8k", data=tmp_path, math=tmp_path)
    write_rows(tmp_path / "gsm8k" / "test.jsonl", [{"question": "a", "answer": "no mark"}, {"answer": "#### 1"}])
    with pytest.raises(
        ConfigError,
        match=r"(?s)2 of 2 rows are wrong.*line 1: field 'answer' has no ####.*line 2: field 'question' is missing",
    ):
        _read("gsm8k", data=tmp_path)
    write_rows(tmp_path / "svamp.jsonl", [{"Body": "b", "Question": "q", "Answer": 1.0}])
    with pytest.raises(ConfigError, match="'svamp' has no training file.*--num-fewshot 0"):
        _read("svamp", shots=2, data=tmp_path)


def test_formats_and_stops(tokenizer: Any) -> None:
    gsm8k, harness = get_tasks(["gsm8k", "gsm8k_lm_eval"])
    assert [choose_format(gsm8k, "auto", shots, tokenizer) for shots in (0, 8)] == ["chat", "text"]
    assert choose_format(gsm8k, "chat", 8, tokenizer) == "chat"
    with pytest.raises(ConfigError, match="'gsm8k_lm_eval' has plain text prompts only; set --format text"):
        choose_format(harness, "chat", 5, tokenizer)
    base = byte_tokenizer()
    base.chat_template = None
    with pytest.raises(ConfigError, match="needs a chat template, and the tokenizer has none; set --format text"):
        choose_format(gsm8k, "auto", 0, base)
    ids = tokenizer("It is 4.\n\nQuestion: more")["input_ids"]
    cut = ("It is 4.", 10, True)  # 8 bytes, and the two of the stop
    assert cut_at_stop(ids, ["Question:", "\n\n"], tokenizer) == cut
    assert cut_at_stop(ids, ["</s>"], tokenizer) == ("It is 4.\n\nQuestion: more", len(ids), False)


GSM8K = ("gsm8k", "gsm8k_lm_eval", "gsm8k_cot8", "gsm8k_r1")
ROWS: dict[str, dict[str, Any]] = {
    **{name: {"question": "What is 1+1?", "answer": "It is 2.\n#### 2"} for name in GSM8K},
    "r1": {"prompt": "Which city?", "answer": "Paris"},
    "svamp": {"Body": "One and one.", "Question": "What is it?", "Answer": 2.0},
    "math": {"problem": "Find $x{y}$.", "solution": "It is $\\boxed{\\frac12}$."},
    "math_minerva4": {"problem": "Find $x{y}$.", "solution": "It is $\\boxed{\\frac12}$."},
    "math500": {"problem": "Find $x$.", "answer": "\\frac12"},
    "olympiadbench": {"question": "Find $x$.", "final_answer": ["$1$", "$2$"]},
    **{key: {"problem": "Find $x$.", "answer": 204} for key in ("aime", "aime24", "aime25", "aime26", "hmmt")},
    "mgsm": {"question": "What is 1+1?", "answer": None, "answer_number": 2},
    "mmlu": {"question": "What is it?", "choices": ["one", "two"], "answer": 1},
    "mmlu_pro": {"question": "What is it?", "options": ["one", "two"], "answer": "B"},
    "supergpqa": {"question": "What is it?", "options": ["one", "two"], "answer_letter": "B"},
    "gpqa": {"Question": "What?", "Correct Answer": "two", **{f"Incorrect Answer {n}": f"{n}" for n in (1, 2, 3)}},
    "ifeval": {"prompt": "Write no comma.", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]},
    "ifbench": {"prompt": "Write no comma.", "instruction_id_list": ["format:emoji"], "kwargs": [{"N": None}]},
    "humaneval_plus": {"prompt": "def f():", "canonical_solution": " return 1", "test": "", "entry_point": "f"},
    "mbpp_plus": {"prompt": "Write f.", "code": "def f(): return 1", "test_list": ["assert f()", "assert f() < 2"]},
    "livecodebench": {"question_content": "Add.", "starter_code": "class Solution:", "public_test_cases": "[]"},
    "bfcl": {
        "question": [[{"role": "user", "content": "Now?"}]],
        "function": [{"name": "f"}],
        "ground_truth": [{"f": {}}],
    },
    "amc": {"question": "Find $x$.", "answer": "$27$"},
    "minerva": {"problem": "Find $x$.", "solution": "\\boxed{3}"},
    "boxed": {"prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "Find $x$."}], "answer": 2},
    "arithmetic": {"prompt": "1+1<sep>", "answer": "2"},
    "products": {"prompt": "1*2", "answer": "2"},
    "two_hops": {"prompt": "In which city?", "answer": "2"},
    "folders": {"problem_statement": "What is 1+1?", "image_name": "x", "FAIL_TO_PASS": ["a.py::b"]},
    "jsonl": {"prompt": "What is 1+1?", "answer": ""},
    "geometry3k": {"problem": "Find $x$.", "answer": "2 \\sqrt { 3 }"},
    "geoqa": {"problem": "Find $x$.", "solution": "<answer> 145\u00b0 </answer>"},
    "trl": {"prompt": "What is 1+1?", "solution": "2"},
    "verl": {
        "prompt": [{"role": "user", "content": "What is 1+1?"}],
        "data_source": "openai/gsm8k",
        "reward_model": {"style": "rule", "ground_truth": "2"},
    },
}


@pytest.mark.parametrize("name", task_names())
@pytest.mark.parametrize("chat", [True, False], ids=["chat", "text"])
def test_training_validation_and_evaluation_share_prompts_and_answers(
    name: str, chat: bool, tmp_path: Path, closing_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same row gives the same token ids and the same reference answer, zero-shot, in all three."""
    monkeypatch.setattr(programs, "find_isolation", lambda unsafe: "none")  # what a machine lacks is reported elsewhere
    monkeypatch.setattr(instructions, "LIBRARIES", ())
    monkeypatch.setattr(instructions, "PACKAGES", dict.fromkeys(("ifeval", "ifbench"), "json"))
    monkeypatch.setattr(instructions, "DATA", ())
    tokenizer = closing_tokenizer
    task, format = get_task(name), "chat" if chat else "text"
    file = write_rows(tmp_path / (task.files[0] if task.files else "rows.jsonl"), [ROWS[name]])
    data = DataConfig(task=name, apply_chat_template=chat, val_tasks=[name], val_data=tmp_path, max_prompt_length=2048)
    is_messages = name in ("boxed", "verl", "bfcl")
    if (chat and task.user_prompt is None) or (not chat and is_messages):
        with pytest.raises(ConfigError, match="plain text prompts only" if chat else "is a list of chat messages"):
            load_prompts(data, [file], tokenizer, "gsm8k")
        return
    (trained,) = load_prompts(data, [file], tokenizer, task.reward or "gsm8k")
    (dataset,) = _read(name, shots=0, data=tmp_path, **({} if task.files else {name: file}))
    (evaluated,) = build_prompts(dataset, format, 0, 0, tokenizer).prompts
    assert trained.prompt_ids == evaluated.prompt_ids and trained.text == evaluated.text
    assert trained.answer == evaluated.answer == dataset.problems[0].answer
    assert (trained.source, evaluated.source) == (ROWS[name].get("data_source", name), name)
    assert (trained.prompt_ids[0] == tokenizer.bos_token_id) is not chat  # a chat template writes its own
    assert trained.prompt_ids[-1] != tokenizer.eos_token_id
    question = dataset.problems[0].question_text.rpartition("\n")[2]
    assert question in trained.text and ("<user>" in trained.text) is chat
    if task.reward is not None and task.files:
        assert read_task_prompts(data, {}, tokenizer) == [evaluated]


def test_validation_has_the_prompts_of_the_scripted_evaluation(tmp_path: Path, tokenizer: Any) -> None:
    write_rows(tmp_path / "gsm8k" / "test.jsonl", gsm8k_rows(5))
    settings = {"val_tasks": ["gsm8k"], "val_data": tmp_path, "val_max_samples": 3}
    prompts = read_task_prompts(DataConfig(**settings), {}, tokenizer)
    assert prompts == build_prompts(_read("gsm8k", data=tmp_path)[0], "chat", 0, 0, tokenizer).prompts[:3]
    assert {(p.source, p.reward) for p in prompts} == {("gsm8k", "gsm8k")}
    brief = read_task_prompts(DataConfig(**settings, system_prompt="Be brief."), {}, tokenizer)
    assert brief[0].text.startswith("<system>Be brief.\n<user>What is 0")  # as in training
    for changes, words in [
        ({"val_data": None}, "set data.val_data=DIR"),
        ({"val_tasks": ["gsm8k_lm_eval"]}, "'gsm8k_lm_eval' has no reward: it is for the scripted evaluation only"),
        ({"val_tasks": ["jsonl"]}, "'jsonl' has no reward"),
        ({"val_tasks": ["boxed"]}, "'boxed' names no data file; set data.val_files"),
        ({"val_data": tmp_path / "none"}, "none' is not a folder.*; set data.val_data=DIR"),
        ({"max_prompt_length": 9}, "data.max_prompt_length is 9; set it to 1[0-9]+ or more"),
    ]:
        with pytest.raises(ConfigError, match=words):
            read_task_prompts(DataConfig(**{**settings, **changes}), {}, tokenizer)
    with pytest.raises(ConfigError, match="task 'gsm8k': reward 'gsm8k' cannot be called: it has no parameter 'mode'"):
        read_task_prompts(DataConfig(**settings), {"mode": 1}, tokenizer)
