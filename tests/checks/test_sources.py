"""Several data sets in one run, and rows in verl's and TRL's form: what is read, planned and refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from grpo_megatron.checks.components import with_recognised_tasks
from grpo_megatron.checks.resume import differences
from grpo_megatron.checks.validate import Checked, validate
from grpo_megatron.cli.config_file import load_config
from grpo_megatron.cli.plan import plan_page
from grpo_megatron.config import ConfigError
from grpo_megatron.data.sampler import Mixture
from grpo_megatron.sampling.wrappers import prompt_sampler
from tests.runs import make_run, write_rows

VERL = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "user", "content": "1 + 1 ="}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "2"},
    "extra_info": {"split": "train", "index": 0},
}
ALONE = ["data.val_files=[]", "trainer.val_before_train=false", "trainer.test_freq=-1"]
CHAT = ["data.apply_chat_template=true", "data.chat_template={run}/chat.jinja"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_run(tmp_path_factory.mktemp("run"))
    (folder / "chat.jinja").write_text("{% for m in messages %}{{ m['role'] + ' ' + m['content'] + ' ' }}{% endfor %}")
    write_rows(folder / "verl.jsonl", [VERL, {**VERL, "data_source": "lighteval/MATH"}, VERL])
    write_rows(folder / "trl.jsonl", [{"prompt": "1 + 1 =", "solution": "2", "level": 5}, {"prompt": "2 + 1 ="}])
    return folder


def checked(run: Path, *overrides: str) -> Checked:
    config = load_config(run / "run.yaml", [override.replace("{run}", str(run)) for override in overrides])
    return validate(config, 2, dry_run=True)


def unset(run: Path) -> Path:
    """The config without data.task."""
    path = run / "unset.yaml"
    path.write_text((run / "run.yaml").read_text().replace("  task: arithmetic\n", ""))
    return path


def test_rows_of_verl_are_recognised_and_graded_by_their_source(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    overrides = ["data.train_files={run}/verl.jsonl", *ALONE, "data.train_batch_size=2", *CHAT]
    config = load_config(unset(run), [o.replace("{run}", str(run)) for o in overrides])
    found = validate(config, 2, dry_run=True)
    assert found.config.data.task == "verl"
    assert caplog.text.count("data.task is not set") == 1 and "rows in verl's form" in caplog.text
    prompts = list(found.train_prompts)
    assert [prompt.reward for prompt in prompts] == ["gsm8k", "math", "gsm8k"]
    assert [prompt.source for prompt in prompts] == ["openai/gsm8k", "lighteval/MATH", "openai/gsm8k"]
    first = prompts[0]
    assert (first.uid, first.answer, first.data_source) == ("verl/verl/0", "2", "openai/gsm8k")
    assert first.columns == VERL and first.messages == VERL["prompt"]
    assert first.text == "user 1 + 1 = " and len(first.prompt_ids) == 4
    # a config with the task set is not looked at again, and a run that samples nothing neither
    caplog.clear()
    assert with_recognised_tasks(found.config) == found.config and not caplog.text


def test_a_source_without_a_reward_here_is_named(run: Path, tmp_path: Path) -> None:
    file = write_rows(tmp_path / "other.jsonl", [VERL, {**VERL, "data_source": "mine"}])
    overrides = [f"data.train_files={file}", *ALONE, "data.task=verl", *CHAT]
    with pytest.raises(ConfigError, match=r"(?s)1 of 2 rows is wrong:\n  line 2: data_source 'mine' has no reward"):
        checked(run, *overrides)
    rewarded = checked(run, *overrides, "reward.function=gsm8k", "data.train_batch_size=2")
    assert {prompt.reward for prompt in rewarded.train_prompts} == {"gsm8k"}


def test_rows_of_trl_need_no_answer_and_keep_their_columns(run: Path) -> None:
    overrides = ["data.train_files={run}/trl.jsonl", *ALONE, "data.task=trl", "data.train_batch_size=2"]
    with pytest.raises(ConfigError, match="data.task='trl' has no reward of its own; set reward.function"):
        checked(run, *overrides)
    first, second = checked(run, *overrides, "reward.function=gsm8k").train_prompts
    assert (first.answer, second.answer) == ("2", "") and first.columns["level"] == 5


SOURCES = (
    "data.sources=[{name: sums, files: {run}/train.jsonl, val_files: {run}/val.jsonl, weight: 3},"
    " {name: verl, files: {run}/verl.jsonl, weight: 1, task: verl, reward: gsm8k, system_prompt: '9'}]"
)
BOTH = [SOURCES, "data.train_files=[]", "data.val_files=[]", *CHAT, "reward_model={}"]


def test_each_source_has_its_task_reward_prompt_and_share(run: Path) -> None:
    found = checked(run, *BOTH)
    mixture = found.train_prompts
    assert isinstance(mixture, Mixture) and len(mixture) == 12
    own = [(prompt.uid, prompt.source, prompt.reward) for prompt in (mixture[0], mixture[9])]
    assert own == [("sums/train/0", "sums", "arithmetic"), ("verl/verl/0", "verl", "gsm8k")]
    assert mixture[9].text.startswith("system 9 user 1") and mixture[0].text.startswith("user 0 + 1")
    assert {prompt.source for prompt in found.val_prompts} == {"sums"} and len(found.val_prompts) == 4
    config = load_config(run / "run.yaml", [o.replace("{run}", str(run)) for o in BOTH])
    batch = prompt_sampler(mixture, config.data).batch(0)
    assert [prompt.source for prompt in batch].count("verl") == 2 == len(batch) // 4
    lines = plan_page(config, found, 2, None).sections["Data"]
    assert lines[0].startswith("training          12 prompts of task arithmetic, verl; 4 steps x 8")
    assert lines[1] == "  sums            9 prompts of task arithmetic; 75.0% = 6.0 per step = 2.67 epochs"
    assert lines[2] == "  verl            3 prompts of task verl; 25.0% = 2.0 per step = 2.67 epochs"


REFUSED: dict[str, tuple[list[str], str]] = {
    "both": ([SOURCES], "data.sources beside data.train_files"),
    "responses": ([*BOTH, "algorithm.source=file", "actor.loss_mode=sft"], "algorithm.source=file reads responses"),
    "pass rates": (
        [*BOTH, "data.sampling.weight=1-p"],
        "data.sampling.weight=1-p samples single prompts by their pass rates",
    ),
    "a name twice": ([SOURCES.replace("name: verl", "name: sums"), *BOTH[1:]], r"\(sums\): the name is given twice"),
    "no files": ([SOURCES.replace("{run}/verl.jsonl", "[]"), *BOTH[1:]], r"\(verl\) has no files to train on"),
    "a wrong reward": ([SOURCES.replace("gsm8k", "gsm9k"), *BOTH[1:]], r"data.sources\[1\] \(verl\).reward: .*gsm9k"),
    "a wrong row": (
        [SOURCES.replace("{run}/verl.jsonl", "{run}/trl.jsonl"), *BOTH[1:]],
        r"\(verl\).files: data file .*trl.jsonl': 2 of 2 rows are wrong",
    ),
    "whose accuracy": (
        [*BOTH, "reward.components=[{name: accuracy}, {name: format}]"],
        "accuracy is the task's own reward, and data.sources have tasks with different ones",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_the_reason(run: Path, name: str) -> None:
    overrides, message = REFUSED[name]
    with pytest.raises(ConfigError, match=message):
        checked(run, *overrides)


def test_sources_are_fixed_for_a_run_that_exists(run: Path) -> None:
    old = load_config(run / "run.yaml", [o.replace("{run}", str(run)) for o in BOTH]).model_dump(mode="json")
    new: dict[str, Any] = {**old, "data": {**old["data"], "sources": old["data"]["sources"][:1]}}
    (difference,) = differences(old, new)
    assert (difference.key, difference.resume_class) == ("data.sources", "fixed")
