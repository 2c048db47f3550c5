"""The scripted evaluation of a task with an environment: real worker processes and grading, an engine with a script."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_megatron.checks.components import task_problem
from grpo_megatron.cli.config_file import load_config
from grpo_megatron.config import ConfigError, DataConfig
from grpo_megatron.data.benchmarks import read_task_prompts
from grpo_megatron.evaluation import results
from grpo_megatron.evaluation.evaluate import complete_ledger
from grpo_megatron.evaluation.ledger import Ledger
from grpo_megatron.evaluation.options import EvaluateOptions
from grpo_megatron.evaluation.page import render_page
from grpo_megatron.evaluation.settings import EvaluationSettings, prepare
from grpo_megatron.rewards.pool import RewardPool
from tests.data.test_conversation import CHATML
from tests.evaluation.models import FakeAsker, TextEngine, make_folder
from tests.runs import write_rows

ROOT = Path(__file__).parents[2]
CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "%s"}}\n</tool_call>'
TASK = {
    "name": "sums",
    "version": 1,
    "title": "Sums",
    "files": ["sums.jsonl"],
    "question": ["{prompt}"],
    "answer": [{"field": "answer"}],
    "reward": "arithmetic",
    "max_tokens": 600,
    "multi_turn": {"environment": "tools", "tools": ["calculator"], "max_assistant_turns": 3},
}


def calculate(text: str) -> str:
    """Calls the calculator for 2+3, answers 4+4 at once and wrongly, and copies what the tool says."""
    if "<tool_response>" in text:
        return f"<answer>{text.rpartition('<tool_response>')[2].split()[0]}</answer>"
    return CALL % "2+3" if "2+3" in text else "<answer>7</answer>"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("playing")
    make_folder(root / "model", tokens=["<|im_start|>", "<|im_end|>"], chat_template=CHATML)
    rows = [{"prompt": "What is 2+3?", "answer": "5"}, {"prompt": "What is 4+4?", "answer": "8"}]
    write_rows(root / "sums.jsonl", rows)
    return root


def settings(root: Path, output: Path, **changes: Any) -> EvaluationSettings:
    task = {**TASK, **changes}
    if task["reward"] is None:
        del task["reward"]
    path = output.parent / f"{task['name']}.yaml"
    path.write_text(yaml.safe_dump(task))
    return prepare(
        EvaluateOptions(
            model=root / "model", tasks=(str(path),), output=output, data=root, samples=2, no_greedy=True, temperature=1.0,
            batch_size=3,
        )
    )  # fmt: skip


def played(made: EvaluationSettings, script: Any) -> tuple[dict[str, Any], list[Any], str]:
    """The task's result, its graded problems and the page."""
    [run] = made.runs
    tokenizer = made.model.tokenizer
    engine = TextEngine(tokenizer, lambda request: script(tokenizer.decode(request.prompt_ids)), "<|im_end|>")
    complete_ledger(made, run, FakeAsker(made.model, engine))
    with RewardPool(1, 10.0) as pool:
        graded = results.grade_task(made, run, pool)
        result = results.task_result(run, graded, pool)
    page = render_page(results.whole_result(made, {run.name: result}), {run.name: graded}, 10)
    return result, graded, page


def test_a_task_file_with_tools_is_played_graded_and_shown_turn_by_turn(root: Path, tmp_path: Path) -> None:
    made = settings(root, tmp_path / "out")
    result, graded, page = played(made, calculate)
    assert [problem.num_right() for problem in graded] == [2, 0]
    assert result["trajectories"] == {"turns": 1.5, "statuses": {"ok": 1.0}}
    entry = graded[0].samples[0].entry
    assert [turn.kind for turn in entry.turns] == ["assistant", "observation", "assistant"]
    assert (entry.text, entry.status, entry.finish_reason) == ("<answer>5</answer>", "ok", "stop")
    assert entry.turns[1].text == (
        "\n<|im_start|>user\n<tool_response>\n5\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    assert entry.num_tokens == sum(len(turn.text.replace("<|im_end|>", "#")) for turn in entry.turns[::2])  # bytes
    assert "calculator" in graded[0].prompt  # the schemas are in the prompt
    assert "<th>turns per trajectory</th>" in page and "<th>ended: ok</th>" in page
    data = json.loads(page.partition('id="data">')[2].partition("</script>")[0])["sums"]
    sample = data["rows"][0][6]["samples"][0]
    assert [kind for kind, _ in sample["turns"]] == ["assistant", "observation", "assistant"] and "text" not in sample
    assert Ledger(tmp_path / "out", "sums").read()["sums/0", 0] == entry  # as it was written


def test_an_environment_that_gives_the_rewards_is_the_grader(root: Path, tmp_path: Path) -> None:
    name = "tests.evaluation.doubling:Doubling"
    made = settings(root, tmp_path / "out", reward=None, multi_turn={"environment": name}, max_prompt_tokens=200)
    assert made.max_model_len == 200 + 600
    result, graded, _ = played(made, lambda text: "5")  # right twice for the first row, never for the second
    assert [problem.num_right() for problem in graded] == [2, 0]
    assert result["graders"] == {"solved": "environment"}
    assert [sample.entry.reward for problem in graded for sample in problem.samples] == [1.0, 1.0, 0.0, 0.0]
    assert result["scores"]["solved"]["avg@2"]["value"] == 0.5 and "maj@2" not in result["scores"]["solved"]
    assert result["rates"]["format_error"] is None and "mean reward@2" not in result["scores"]["solved"]
    (tmp_path / "half").mkdir()
    script = lambda text: "7" if "again" in text else "5"  # noqa: E731 - one of two turns: half a point, and not right
    result, _, page = played(settings(root, tmp_path / "half" / "out", reward=None, multi_turn={"environment": name},
                                      max_prompt_tokens=200), script)  # fmt: skip
    scores = {measure: score["value"] for measure, score in result["scores"]["solved"].items()}
    assert scores["mean reward@2"] == 0.25 and scores["avg@2"] == 0 and "<b>0.250</b>" in page


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"multi_turn": {"environment": "nowhere"}}, "task 'sums': multi_turn.environment"),
        ({"multi_turn": {"environment": "tools", "tools": ["telescope"]}}, "task 'sums': .*telescope"),
        ({"multi_turn": {"enviroment": "tools"}}, "multi_turn.*enviroment"),
        ({"max_prompt_tokens": 3000}, "max_prompt_tokens of 3000 tokens . max_tokens 600 = 3600 exceed"),
    ],
)
def test_what_is_refused(root: Path, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        settings(root, tmp_path / "out", **changes)


def test_training_reads_the_environment_from_its_own_config_only(root: Path, tmp_path: Path) -> None:
    settings(root, tmp_path / "out")
    config = load_config(ROOT / "examples/quickstart.yaml", [f"data.task={tmp_path}/sums.yaml"])
    assert "rollout.multi_turn.environment is not set" in (task_problem(config) or "")
    played = load_config(ROOT / "examples/agents/calculator.yaml", [f"data.task={tmp_path}/sums.yaml"])
    assert task_problem(played) is None
    data = DataConfig(val_tasks=[str(tmp_path / "sums.yaml")], val_data=root)
    with pytest.raises(ConfigError, match="task 'sums' plays an environment: .*rollout.multi_turn"):
        read_task_prompts(data, {}, None)
