"""The tasks: what their rows give, what is wrong with a row, their prompts, and the three ways of naming one."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path
from typing import Any

import pytest

from grpo_megatron.config import ConfigError
from grpo_megatron.data.prompts import parsed_row
from grpo_megatron.data.rows import read_rows
from grpo_megatron.data.task import TASKS_FOLDER, Example, Task, fill_template, get_task, get_tasks, task_names
from grpo_megatron.rewards import check_reward, extractors, rewards
from tests.files import DATA, SLICE_AND_WHOLE

EMPTY_BOX = "For any integer $n>1$, the number of prime numbers greater than $n!+1$ and less than $n!+n$ is:\n$(A) 0$"


@pytest.mark.parametrize(
    ("task", "row", "answer"),
    [
        ("gsm8k", {"question": "q", "answer": "<<1+1=2>>\n#### 1,234 "}, "1,234"),
        ("math", {"problem": "q", "solution": r"\boxed{1} is $\boxed{\frac{1}{2}}$"}, r"\frac{1}{2}"),
        ("math", {"problem": "q", "answer": None, "solution": r"\boxed{8}"}, "8"),
        ("math", {"problem": EMPTY_BOX, "solution": r"\boxed{}"}, "0"),
        ("olympiadbench", {"question": "q", "final_answer": ["$1$", "$2$"]}, "1, 2"),
        ("olympiadbench", {"question": "q", "final_answer": ["$1$,$2$"]}, "$1$,$2$"),
        ("aime", {"question": "q", "answer": 204}, "204"),
        ("aime26", {"problem": "q", "answer": 204, "problem_type": ["Algebra"]}, "204"),
        ("hmmt", {"problem": "q", "answer": r"\frac{1}{576}"}, r"\frac{1}{576}"),
        ("mgsm", {"question": "q", "answer": None, "answer_number": 18}, "18"),
        ("amc", {"prompt": "q", "final_answer": ["$27$"]}, "27"),
        ("boxed", {"prompt": "q", "answer": 204}, "204"),
        ("boxed", {"problem": " ", "question": "q", "answer": "204"}, "204"),
        ("svamp", {"Body": "b ", "Question": " q", "Answer": 145.0}, "145"),
        ("svamp", {"Body": "b", "Question": "q", "Answer": 2.5}, "2.5"),
        ("arithmetic", {"prompt": "1+1<sep>", "answer": "-2"}, "-2"),
        ("jsonl", {"prompt": [{"role": "user", "content": "x"}], "answer": " y"}, " y"),
    ],
)
def test_questions_and_answers_of_rows(task: str, row: dict[str, Any], answer: str) -> None:
    question, read_answer = get_task(task).read_row(row)
    assert read_answer == answer
    shown = next((row[name] for name in ("question", "problem", "prompt") if row.get(name, " ") != " "), "b q")
    assert question == shown


def test_choices_are_lettered_and_an_index_is_a_letter(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs/evaluation.md").read_text()
    (tmp_path / "mmlu.yaml").write_text(next(b for b in page.split("```yaml\n") if "my_mmlu" in b).partition("```")[0])
    task = get_task(str(tmp_path / "mmlu.yaml"))
    row = {"question": "Which is red?", "choices": ["sky", " blood"], "answer": 1}
    assert task.read_row(row) == ("Which is red?\nA. sky\nB. blood", "B")
    assert task.read_row({**row, "answer": "A"})[1] == "A"
    end = "\nPut the letter of the right choice in \\boxed{}."
    assert task.plain_text("x") == task.messages("x")[0]["content"] == f"x{end}"
    with pytest.raises(ValueError, match="'choices' is a list"):
        task.read_row({**row, "choices": ["a", 2]})
    wrong = dataclasses.replace(task, user_prompt="{question} {choices}")
    with pytest.raises(ValueError, match="knows only {question}; name {choices} in `question`"):
        parsed_row(wrong, None, row)


OPTIONS = {"question": "Which is red?", "options": ["sky", "blood", "grass"]}
GPQA = {"Question": "Which?", "Correct Answer": "yes", **{f"Incorrect Answer {n}": f"no {n}" for n in (1, 2, 3)}}


@pytest.mark.parametrize(
    ("task", "row", "letter"),
    [
        ("mmlu", {"question": "Which is red?", "choices": OPTIONS["options"], "answer": 1}, "B"),
        ("mmlu_pro", {**OPTIONS, "answer": "C", "answer_index": 2}, "C"),
        ("supergpqa", {**OPTIONS, "answer": "blood", "answer_letter": "B"}, "B"),
    ],
)
def test_choices_of_public_rows_keep_their_order(task: str, row: dict[str, Any], letter: str) -> None:
    assert get_task(task).read_row(row) == ("Which is red?\n\nA. sky\nB. blood\nC. grass", letter)
    assert get_task(task).read_unanswered(row)[0] == "Which is red?\n\nA. sky\nB. blood\nC. grass"


def test_choices_are_shuffled_by_a_seed(tmp_path: Path) -> None:
    """The letter follows the right choice; the order depends on seed and texts, not on the row's place or other columns."""
    (tmp_path / "other.yaml").write_text(
        "extends: gpqa\nname: other\nversion: 1\ntitle: another seed\n"
        "choices: {fields: [Correct Answer, Incorrect Answer 1, Incorrect Answer 2, Incorrect Answer 3], shuffle_seed: 1}\n"
    )
    rows = [{**GPQA, "Incorrect Answer 3": f"no {n}"} for n in range(3, 43)]
    first, other = (get_task(str(name)) for name in ("gpqa", tmp_path / "other.yaml"))
    read, again = ([task.read_row(row) for row in rows] for task in (first, other))
    for question, letter in read + again:
        assert isinstance(question, str) and f"\n{letter}. yes" in question
    assert {letter for _, letter in read} == set("ABCD") and read != again
    assert read == [first.read_row({"Record ID": "x", **row}) for row in reversed(rows)][::-1]


@pytest.mark.parametrize(
    ("task", "row", "message"),
    [
        ("mmlu_pro", {**OPTIONS, "answer": "D"}, "the right choice 'D' is none of the 3"),
        ("mmlu_pro", {**OPTIONS, "options": "sky", "answer": "A"}, "'options' is no list of 1 to 26 texts"),
        ("mmlu_pro", {"question": "q", "answer": "A"}, "'options' is no list of 1 to 26 texts"),
        ("gpqa", {**GPQA, "Incorrect Answer 2": None}, "field 'Incorrect Answer 2' is null"),
        ("gsm8k", {"question": "1+1?", "answer": "2"}, "no #### before"),
        ("gsm8k", {"question": "1+1?", "answer": "####"}, "field 'answer' holds no answer"),
        ("gsm8k", {"question": "1+1?", "answer": "#### two"}, "'two' is not a number"),
        ("math", {"problem": "q", "solution": r"\boxed{1"}, r"field 'solution' has no closed"),
        ("olympiadbench", {"question": "q", "final_answer": {"a": 1}}, "'final_answer' is not a list of texts"),
        ("boxed", {"answer": "1"}, "none of the fields 'problem', 'question', 'prompt' is there"),
        ("svamp", {"Body": "b", "Question": "q", "Answer": None}, "field 'Answer' is null, not a number"),
        ("svamp", {"Body": "b", "Question": "q", "Answer": float("inf")}, "not a finite number"),
        ("arithmetic", {"prompt": "1+1", "answer": 2}, "is a number, not a string"),
        ("jsonl", {"prompt": "1+1", "answer": 2}, "is a number, not a string; write it as text, or .*data.task=trl"),
        ("jsonl", {"prompt": [], "answer": ""}, "'prompt' is empty"),
        ("jsonl", {"prompt": ["x"], "answer": ""}, "a message must be an object"),
        ("jsonl", {"prompt": [{"role": "user"}], "answer": ""}, "'content' is missing"),
        ("jsonl", {"prompt": [{"role": "assistant", "content": "x"}], "answer": ""}, "ends with the assistant's turn"),
    ],
)
def test_wrong_rows(task: str, row: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        get_task(task).read_row(row)


def brief(completion: str, want: int) -> float:
    return float(len(completion) <= want)


def test_a_row_needs_the_answer_only_where_something_reads_it() -> None:
    row, task = {"prompt": "p", "want": 3}, get_task("jsonl")
    assert parsed_row(task, f"{__name__}:brief", row) == ("p", "", f"{__name__}:brief", row)
    assert parsed_row(task, f"{__name__}:brief", {**row, "answer": {"a": 1}})[1] == ""
    assert parsed_row(task, f"{__name__}:brief", {**row, "answer": "x"})[1] == "x"
    with pytest.raises(ValueError, match="'answer' is missing"):
        parsed_row(task, "gsm8k", row)
    with pytest.raises(ValueError, match="'prompt' is missing"):
        parsed_row(task, f"{__name__}:brief", {"want": 3})


def test_every_task_can_be_read_and_its_rewards_share_one_extractor() -> None:
    names = "gsm8k gsm8k_cot8 gsm8k_lm_eval gsm8k_r1 math math500 math_minerva4 svamp olympiadbench aime amc"
    names += " minerva r1 boxed arithmetic products two_hops jsonl verl trl geometry3k geoqa"
    names += " ifeval ifbench humaneval_plus mbpp_plus livecodebench bfcl"
    names += " mmlu mmlu_pro gpqa supergpqa mgsm aime24 aime25 aime26 hmmt folders"
    assert task_names() == sorted(names.split())
    for task in get_tasks(task_names()):
        assert task.name in task_names() and len(task.sha256) == 64 and task.title
        for reward in {*task.graders.values(), *([task.reward] if task.reward else [])}:
            if not rewards.facts(reward).check and reward != "calls":  # those read no prediction
                check_reward(reward)
                assert reward in extractors.names()
        assert task.reward is None or next(iter(task.graders.values())) == task.reward
    assert get_task("gsm8k") is get_task("gsm8k")


@pytest.mark.parametrize(("task", "counts"), [("olympiadbench", (6, 675)), ("svamp", (20, 1000))])
@pytest.mark.parametrize("data", SLICE_AND_WHOLE)
def test_real_files_are_read(task: str, counts: tuple[int, int], data: Path) -> None:
    assert len(read_rows(data / "extra" / task / "test.jsonl", get_task(task).read_row)) == counts[data != DATA]


# -- prompts -----------------------------------------------------------------------------------------------------------


def _turns(*turns: tuple[str, str]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in turns]


def test_a_chat_is_system_turn_examples_and_question() -> None:
    task = Task("t", lambda row: ("", ""), system_prompt="s", user_prompt="<{question}>")
    examples = [Example("{solution}", " e\n")]
    shown = [("user", "<{solution}>"), ("assistant", "e")]
    assert task.messages("q{x}", examples) == _turns(("system", "s"), *shown, ("user", "<q{x}>"))
    assert task.messages("q", examples, system_prompt="other") == _turns(("system", "other"), *shown, ("user", "<q>"))
    assert task.messages("q", system_prompt="") == _turns(("user", "<q>"))
    chat = _turns(("system", "row"), ("user", "a"), ("assistant", "b"), ("user", "q"))
    assert task.messages(chat, examples, system_prompt="other") == _turns(
        ("system", "row"), *shown, ("user", "a"), ("assistant", "b"), ("user", "<q>")
    )
    assert chat[-1]["content"] == "q"  # the row is not changed
    with pytest.raises(ValueError, match="'gsm8k_lm_eval' has plain text prompts only"):
        get_task("gsm8k_lm_eval").messages("q")


def test_the_r1_prompt_is_the_published_one_in_both_forms(tmp_path: Path) -> None:
    """As a system turn and as plain text; a task of the user's own extends it."""
    task = get_task("gsm8k_r1")
    head = "A conversation between User and Assistant. The user asks a question, and the Assistant solves it. The assistant"
    assert task.plain_text("1+1?") == f"{task.system_prompt} User: 1+1?. Assistant:"
    assert task.messages("1+1?") == _turns(("system", str(task.system_prompt)), ("user", "1+1?"))
    assert str(task.system_prompt).startswith(head) and "answer here </answer>." in str(task.system_prompt)
    row = {"question": "1+1?", "answer": "one and one\n#### 2"}
    assert (task.read_row(row), task.reward) == (("1+1?", "2"), "graded_answer")
    path = tmp_path / "mine.yaml"
    path.write_text("name: mine\nextends: r1\nversion: 1\ntitle: mine\nreward: math\n")
    assert get_task(str(path)).read_row({"problem": "p", "answer": "a"}) == ("p", "a")


def test_plain_text_is_examples_and_question() -> None:
    assert get_task("gsm8k").plain_text("q", [Example("a", "b")]) == "Question: a\nAnswer: b\n\nQuestion: q\nAnswer:"
    assert Task("t", lambda row: ("", "")).plain_text("q") == "q"
    with pytest.raises(ValueError, match="list of chat messages"):
        get_task("gsm8k").plain_text(_turns(("user", "q")))
    assert fill_template("{a} {b} {}", {"a": "{b}"}) == "{b} {b} {}"


# -- names -------------------------------------------------------------------------------------------------------------


def test_tasks_by_name_or_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = (
        "from grpo_megatron.data.task import Task\n"
        "def make(): return Task('quiz', lambda row: (row['q'], row['a']), 'graded')\n"
        "QUIZ = make()\n"
        "def wrong(): return 5\n"
    )
    (tmp_path / "my_task.py").write_text(source)
    (tmp_path / "bad_task.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("my_task:make", "my_task:QUIZ"):
        task = get_task(name)
        assert isinstance(task, Task) and (task.name, task.reward) == ("quiz", "graded")
        assert task.read_row({"q": "1", "a": "2"}) == ("1", "2") and task.graders == {"accuracy": "graded"}
        assert task.sha256 == hashlib.sha256(source.encode()).hexdigest()
    with pytest.raises(ConfigError, match="task 'my_task:wrong' is int, not a grpo_megatron.data.task.Task"):
        get_task("my_task:wrong")
    with pytest.raises(ConfigError, match="unknown task 'gsm8'; did you mean 'gsm8k'"):
        get_task("gsm8")
    with pytest.raises(ConfigError, match="(?s)'gsm9k'; did you mean.*'math' is given twice"):
        get_tasks(["gsm9k", "math", "math"])
    with pytest.raises(ConfigError, match="importing it raised ZeroDivisionError"):
        get_tasks(["bad_task:task"])
    with pytest.raises(ConfigError, match="no task is named; choose from aime"):
        get_tasks([])
    with pytest.raises(ValueError, match="String should match pattern"):
        Task("my/task", lambda row: ("", ""))


def test_a_variant_extends_a_built_in_task(tmp_path: Path) -> None:
    path = tmp_path / "short.yaml"
    path.write_text("name: gsm8k_short\nextends: gsm8k\nversion: 2\ntitle: short answers\nsystem_prompt: Be brief.\n")
    task, base = get_task(str(path)), get_task("gsm8k")
    assert (task.name, task.version, task.system_prompt) == ("gsm8k_short", 2, "Be brief.")
    assert (task.files, task.text, task.graders) == (base.files, base.text, base.graders)
    row = {"question": "q", "answer": "#### 3"}
    assert task.read_row(row) == base.read_row(row) == ("q", "3")
    hashed = (TASKS_FOLDER / "gsm8k.yaml").read_bytes() + b"\0" + path.read_bytes()
    assert task.sha256 == hashlib.sha256(hashed).hexdigest()


def test_the_task_file_of_the_documentation(tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "docs/evaluation.md").read_text().partition("```yaml\n")[2].partition("```")[0]
    (tmp_path / "my_task.yaml").write_text(text)
    task = get_task(str(tmp_path / "my_task.yaml"))
    row = {"context": "A map.", "question": "Which?", "solution": {"final": "Po"}, "difficulty": 3}
    assert task.read_row(row) == ("A map.\n\nWhich?", "Po") and task.labels(row) == (None, "Level 3")
    assert task.read_row({"question": "Which?", "answer": "Po"}) == ("Which?", "Po")
    assert task.graders == {"accuracy": "my_reward:reward"} and task.max_tokens == 512


def test_columns_by_their_names_alone(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text('name: x\nversion: 1\ntitle: t\nquestion: "{Frage}"\nanswer: L\u00f6sung\n')
    assert get_task(str(path)).read_row({"Frage": "q", "L\u00f6sung": 3}) == ("q", "3")


def test_wrong_task_files(tmp_path: Path) -> None:
    path, own = tmp_path / "wrong.yaml", "name: x\nextends: math\nversion: 1\ntitle: t\n"
    missing = r"(?s)title: it has no default.*question: it has.*answer: it has.*version: set"
    for text, message in (
        ("- 1", "must be a mapping, not list"),
        ("{", "is not valid YAML"),
        ("name: x\nversion: 0\n", missing),
        ("extends: gsm9k\n", "extends 'gsm9k' is not a built-in task; set one of aime"),
        (f"{own}question: Frage\n", r"names no \{field\}, so that every prompt would be the same; write '\{Frage\}'"),
        (f"{own}read_row: 5\n", "read_row: not a key of a task file"),
        (f"{own}chat: {{}}\n", "chat: unknown key .known: answer, answer_is_optional, choices, extends"),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError, match=message):
            get_task(str(path))
    with pytest.raises(ConfigError, match="cannot read task file .*gone.yaml"):
        get_task(str(tmp_path / "gone.yaml"))
