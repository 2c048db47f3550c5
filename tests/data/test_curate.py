"""From a run's rollouts, or an evaluation, through `curate` to the rows of the next run; and every refusal of it.

The rollout files and evaluations of the quickstart's task have known verdicts. The code that a run uses writes them.
"""

from __future__ import annotations

import base64
import csv
import json
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from grpo_megatron.checks.inputs import only_present, read_train_prompts
from grpo_megatron.cli.main import main
from grpo_megatron.config import Config, ConfigError, DataConfig, SamplingConfig
from grpo_megatron.data.benchmarks import BenchmarkProblem
from grpo_megatron.data.images import ImageFormat
from grpo_megatron.data.prompts import load_prompts
from grpo_megatron.data.responses import load_offline_groups
from grpo_megatron.data.sampler import select_prompts
from grpo_megatron.data.tokenizer import load_tokenizer
from grpo_megatron.evaluation.grading import Grade
from grpo_megatron.evaluation.ledger import LedgerEntry
from grpo_megatron.evaluation.results import GradedProblem, GradedSample, write_samples
from grpo_megatron.report.metrics import Metrics
from grpo_megatron.report.step import RolloutFiles
from grpo_megatron.sampling.collector import pack_sample, unpack_sample
from grpo_megatron.starting.generated import bare_response, build_tokenizer, problem_rows, worked_response
from grpo_megatron.types import GREEDY, GroupTable, Plan, Prompt, Sample, Turn
from tests.fakes import LoneMesh
from tests.files import load_supervised
from tests.runs import write_rows
from tests.vision import draw, make_config, png, write_tokenizer

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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """data.jsonl, rollouts/ and evaluation/, of which no test changes anything."""
    folder = tmp_path_factory.mktemp("curation")
    prompts = write_data(folder / "data.jsonl")
    rollouts(folder / "rollouts", prompts)
    evaluation(folder / "evaluation", prompts)
    return folder


@pytest.fixture(scope="module")
def prompts(folder: Path) -> list[Prompt]:
    return load_prompts(DATA, [folder / "data.jsonl"], TOKENIZER)


def curate(*arguments: Any) -> int:
    return main(["curate", *map(str, arguments)])


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]


# -- from responses to the rows of a run -------------------------------------------------------------------------------


def test_rollouts_become_the_prompts_of_the_next_run(folder: Path, prompts: list[Prompt], tmp_path: Path) -> None:
    """Passes 0 1 2 4 4 3 of 4. The band 0.25 to 0.75 keeps rows 1, 2 and 5, byte for byte; their weights are 3 : 4 : 3."""
    out = tmp_path / "out"
    band = ["--min-rate", 0.25, "--max-rate", 0.75]
    data = ["--data", folder / "data.jsonl", "--task", "arithmetic"]
    assert curate(folder / "rollouts", "--output", out, *data, *band) == 0
    lines = (folder / "data.jsonl").read_bytes().splitlines()
    assert (out / "data.jsonl").read_bytes().splitlines() == [lines[1], lines[2], lines[5]]

    config = next_run(out / "data.jsonl", out / "pass_rates.jsonl")
    selected = read_train_prompts(config, TOKENIZER)
    assert [prompt.prompt_ids for prompt in selected] == [prompts[i].prompt_ids for i in (1, 2, 5)]
    assert [prompt.pass_rate for prompt in selected] == [0.25, 0.5, 0.75]
    assert [prompt.weight for prompt in selected] == pytest.approx([0.9, 1.2, 0.9])
    config = next_run(folder / "data.jsonl", out / "pass_rates.jsonl")  # the unfiltered file has other row numbers
    assert [prompt.pass_rate for prompt in read_train_prompts(config, TOKENIZER)] == [passes / 4 for passes in PASSES]


def next_run(train_file: Path, pass_rates: Path) -> Config:
    sampling = {"pass_rates": pass_rates, "weight": "p(1-p)"}
    data = {**DATA.model_dump(), "train_files": [train_file], "sampling": sampling}
    return Config.model_validate({"model": {"path": "m"}, "data": data})


def test_a_plan_for_another_machine_checks_the_pass_rates_that_are_there(folder: Path, tmp_path: Path) -> None:
    missing = next_run(folder / "data.jsonl", tmp_path / "none.jsonl")
    with pytest.raises(ConfigError, match="cannot read data file .*none.jsonl"):
        read_train_prompts(missing, tokenizer=None)
    assert only_present(missing).data.sampling.pass_rates is None
    (tmp_path / "wrong.jsonl").write_text("{}\n")
    wrong = only_present(next_run(folder / "data.jsonl", tmp_path / "wrong.jsonl"))
    with pytest.raises(ConfigError, match="field 'question' is missing"):
        read_train_prompts(wrong, tokenizer=None)


def test_right_responses_become_the_tokens_that_were_drawn(folder: Path, prompts: list[Prompt], tmp_path: Path) -> None:
    """At most 3 per problem, and different ones: `right` has two texts, of which others differ in white space only."""
    out = tmp_path / "out"
    assert curate(folder / "rollouts", "--output", out, "--sft", 3, "--min-rate", 0.1) == 0
    measured = list(zip(prompts, PASSES, strict=True))
    kept = [(prompt, right(prompt, number)) for prompt, passes in measured for number in range(min(passes, 2))]
    # and a rollout file is a file of supervised rows
    drawn = [(prompt, text) for prompt, passes in measured[:3] for text, _ in texts_of(prompt, passes)]
    for file, expected in ((out / "sft.jsonl", kept), (folder / "rollouts" / "step_000000.jsonl", drawn)):
        tokens = [(list(prompt.prompt_ids), sample(prompt, 0, 0, text, 1.0).response_ids) for prompt, text in expected]
        assert [(ids, response.ids) for ids, response in load_supervised(DATA, [file], TOKENIZER)] == tokens


@pytest.mark.parametrize("kind", ["right-wrong", "best-worst"])
def test_pairs_are_read_as_preferences(folder: Path, prompts: list[Prompt], tmp_path: Path, kind: str) -> None:
    out, expected = tmp_path / "out", [1, 2, 5]
    assert curate(folder / "rollouts", "--output", out, "--pairs", kind) == 0
    groups = load_offline_groups(DATA, [out / "pairs.jsonl"], TOKENIZER, {"chosen": 1.0, "rejected": 0.0})
    assert [prompt.prompt_ids for prompt, _, _ in groups] == [prompts[i].prompt_ids for i in expected]
    made = rows(out / "pairs.jsonl")
    assert made[0] == {
        "prompt": prompts[1].question,
        "chosen": right(prompts[1], 0),
        "rejected": wrong(prompts[1], 0),
    }
    assert len({row["chosen"] for row in made}) == len({row["rejected"] for row in made}) == len(made)


def test_an_evaluation_gives_the_same_as_rollouts(folder: Path, tmp_path: Path) -> None:
    """The greedy response is no sample from the distribution, and does not count."""
    wanted = ["--data", folder / "data.jsonl", "--task", "arithmetic", "--sft", 2, "--pairs", "right-wrong"]
    for source in ("rollouts", "evaluation"):
        assert curate(folder / source, "--output", tmp_path / source, *wanted) == 0
    names = {path.name for path in (tmp_path / "rollouts").iterdir()}
    assert names == {"pass_rates.jsonl", "pass_rates.csv", "data.jsonl", "sft.jsonl", "pairs.jsonl", "summary.txt"}
    for name in names:
        assert (tmp_path / "rollouts" / name).read_text() == (tmp_path / "evaluation" / name).read_text()
    line = rows(folder / "evaluation" / "samples" / "arithmetic.jsonl")[0]
    (tmp_path / "greedy.jsonl").write_text(json.dumps({**line, "samples": line["samples"][:1]}) + "\n")
    assert curate(tmp_path / "greedy.jsonl", "--output", tmp_path / "out") == 0  # the only responses that there are
    assert [(row["n"], row["rate"]) for row in rows(tmp_path / "out" / "pass_rates.jsonl")] == [(1, 0.0)]


# -- numbers -----------------------------------------------------------------------------------------------------------


def test_pass_rates_and_their_intervals(folder: Path, prompts: list[Prompt], tmp_path: Path) -> None:
    """Wilson, 95 %: 0 of 4 is (0, z^2 / (4 + z^2)); 2 of 4 is 1/2 -+ z / (2 sqrt(4 + z^2)), with z^2 = 3.8415."""
    assert curate(folder / "rollouts", "--output", tmp_path / "out") == 0
    made = rows(tmp_path / "out" / "pass_rates.jsonl")
    assert [(row["n"], row["passes"], row["rate"]) for row in made] == [(4, passes, passes / 4) for passes in PASSES]
    assert [(row["question"], row["answer"]) for row in made] == [
        (prompt.question, prompt.answer) for prompt in prompts
    ]
    assert (made[0]["low"], made[0]["high"]) == (0.0, 0.489891)
    assert (made[2]["low"], made[2]["high"]) == (0.150039, 0.849961)
    assert made[3]["low"] == pytest.approx(1 - 0.489891) and made[3]["high"] == 1.0
    with (tmp_path / "out" / "pass_rates.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    assert [(float(row["rate"]), row["question"]) for row in table] == [(row["rate"], row["question"]) for row in made]


def test_the_summary_counts_problems_by_pass_rate(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert curate(folder / "rollouts", "--output", tmp_path / "out", "--drop-all-right") == 0
    summary = (tmp_path / "out" / "summary.txt").read_text()
    assert summary in capsys.readouterr().out
    assert summary.splitlines()[:2] == [
        "6 problems, 24 responses (0 truncated); not counted: 0 replayed or left out by the options, 0 without a score",
        "mean pass rate 0.5833; the filters keep 4 problems",
    ]
    counts = [line.split("#")[0].split()[-1] for line in summary.splitlines()[4:11]]
    assert counts == ["1", "0", "1", "1", "1", "0", "2"]  # 0, >0 - <0.2, ... 0.8 - <1, 1


def test_which_responses_count(prompts: list[Prompt], tmp_path: Path) -> None:
    """A truncated response is no row of any kind; an unscorable one is no failure of the model; `acc` goes
    before score; what was replayed counts where it was sampled."""
    prompt = prompts[0]
    first = [
        sample(prompt, 0, 0, right(prompt, 0), 1.0, finish_reason="length"),
        sample(prompt, 0, 1, right(prompt, 1), float("nan")),
        sample(prompt, 0, 2, wrong(prompt, 0), 0.6, reward_metrics={"acc": 0.0}),
    ]
    write_rollouts(tmp_path / "r", 3, first)
    replayed = sample(prompt, 0, 1, wrong(prompt, 1), 0.0, is_replayed=True)
    write_rollouts(tmp_path / "r", 4, [sample(prompt, 0, 0, "late", 0.6), replayed])

    def counted(name: str, *options: Any) -> tuple[int, int, int]:
        assert curate(tmp_path / "r", "--output", tmp_path / name, *options) == 0
        [row] = rows(tmp_path / name / "pass_rates.jsonl")
        return row["n"], row["passes"], row["truncated"]

    assert counted("all") == (3, 1, 1)
    assert counted("whole", "--drop-truncated") == (2, 0, 0)
    assert counted("late", "--first-step", 4) == (1, 0, 0)
    assert counted("lenient", "--right", 0.5) == (3, 2, 1)
    assert counted("pairs", "--right", 0.5, "--pairs", "right-wrong") == (3, 2, 1)
    assert [row["chosen"] for row in rows(tmp_path / "pairs" / "pairs.jsonl")] == ["late"]


def test_which_rows_are_kept(folder: Path, prompts: list[Prompt], tmp_path: Path) -> None:
    """Only the problems of step 0 are measured (passes 0, 1, 2)."""

    def kept(name: str, *options: Any) -> list[int]:
        data = ["--data", folder / "data.jsonl", "--task", "arithmetic"]
        assert curate(folder / "rollouts", "--output", tmp_path / name, *data, *options) == 0
        answers = [prompt.answer for prompt in prompts]
        return [answers.index(row["answer"]) for row in rows(tmp_path / name / "data.jsonl")]

    assert kept("dupo", "--drop-all-right") == [0, 1, 2, 5]
    assert kept("both", "--drop-all-right", "--min-rate", 0.1) == [1, 2, 5]
    assert kept("later", "--first-step", 1) == [3, 4, 5]
    assert kept("inclusive", "--min-rate", 0.5, "--max-rate", 0.75) == [2, 5]
    assert kept("often", "--min-samples", 4) == [0, 1, 2, 3, 4, 5]
    listed = rows(folder / "data.jsonl")
    (tmp_path / "listed.json").write_text(json.dumps(listed))
    data = ["--data", tmp_path / "listed.json", "--task", "arithmetic"]
    assert curate(folder / "rollouts", "--output", tmp_path / "lines", *data, "--min-rate", 0.1) == 0
    assert rows(tmp_path / "lines" / "listed.jsonl") == listed[1:]
    summary = (tmp_path / "later" / "summary.txt").read_text()
    assert "data.jsonl: 3 of 6 rows (left out: 3 not measured)" in summary


def test_memory_does_not_grow_with_the_responses(prompts: list[Prompt], tmp_path: Path) -> None:
    """24 MB of responses to one problem, of which two rows are written."""
    row = {"metrics": {}, "response_tokens": 1, "finish_reason": "stop", "step": 0, "replayed": False}
    row |= {"prompt": "q", "answer": "a"}
    with (tmp_path / "step_000000.jsonl").open("w") as file:
        for number in range(1200):
            file.write(json.dumps({**row, "response": f"{number} " + "x" * 20_000, "score": number % 2}) + "\n")
    tracemalloc.start()
    try:
        assert curate(tmp_path, "--output", tmp_path / "out", "--sft", 2) == 0
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(rows(tmp_path / "out" / "sft.jsonl")) == 2
    assert peak < 4 << 20


# -- refusals: exit code 2, and nothing is written ---------------------------------------------------------------------


def test_trajectories_are_counted_and_make_no_rows(
    prompts: list[Prompt], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    write_rollouts(tmp_path / "r", 0, [trajectory(prompts[0], 0, 1.0)])
    assert curate(tmp_path / "r", "--output", tmp_path / "rates") == 0
    assert curate(tmp_path / "r", "--output", tmp_path / "out", "--sft", 1) == 2
    assert "responses for one (left out: 1 trajectory of several turns); widen" in capsys.readouterr().err
    mixed = [trajectory(prompts[0], 0, 1.0), sample(prompts[1], 1, 0, "yes", 1.0)]
    write_rollouts(tmp_path / "mixed", 0, mixed)
    assert curate(tmp_path / "mixed", "--output", tmp_path / "out", "--sft", 1) == 0
    assert "1 row from 2 problems (left out: 1 trajectory of several turns)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--min-rate", "0.6", "--max-rate", "0.5"], "--min-rate 0.6 is above --max-rate 0.5; swap them"),
        (["--data", "data.jsonl"], "--data FILE and --task NAME go together"),
        (["--data", "sft.jsonl", "--task", "gsm8k"], "--data: two files would be"),
        (["--data", "data.jsonl", "--task", "arithmetic", "--min-rate", "0.8", "--max-rate", "0.9"], "no row is left"),
        (["--data", "other.jsonl", "--task", "arithmetic"], "none of its questions and answers, as --task arithmetic"),
        (["--sft", "1", "--max-rate", "0"], "sft.jsonl would have no row: none of the 1 problems"),
        (["--first-step", "7"], "no response is counted: 24 are left out by --drop-truncated or --first-step, or"),
        (["--output", "there"], "exists; choose another folder, or add --force"),
        (["--output", "there", "--force"], "was not written by this command; choose another folder"),
    ],
)
def test_mistakes_are_named_and_nothing_is_written(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
    options: list[str],
    message: str,
) -> None:
    (tmp_path / "data.jsonl").write_bytes((folder / "data.jsonl").read_bytes())
    (tmp_path / "other.jsonl").write_text('{"prompt": "1 + 1", "answer": "2"}\n')
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "notes.txt").write_text("keep me")
    monkeypatch.chdir(tmp_path)
    assert curate(folder / "rollouts", "--output", "out", *options) == 2
    assert message in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data.jsonl", "other.jsonl", "there"]
    assert [path.name for path in (tmp_path / "there").iterdir()] == ["notes.txt"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"prompt": "1"', "line 2: is not JSON"),
        ('{"prompt": "q", "answer": "1"}', "line 2: field 'metrics' is missing"),
        ('{"question": "q", "answer": "1", "samples": [3]}', "line 2: field 'samples' must be a list of objects"),
        (
            '{"question": "q", "answer": "1", "samples": [{"completion": "", "grades": {}}]}',
            "line 2: field 'grades' must have the verdict of a grader",
        ),
        ('{"prompt": "q", "metrics": {}, "answer": "", "response": "r", "score": NaN}', "is nan, not a finite number"),
    ],
)
def test_wrong_lines_are_named(tmp_path: Path, capsys: pytest.CaptureFixture, content: str, message: str) -> None:
    (tmp_path / "step_000000.jsonl").write_text(f"\n{content}\n")
    assert curate(tmp_path, "--output", tmp_path / "out") == 2
    error = capsys.readouterr().err
    assert str(tmp_path / "step_000000.jsonl") in error and message in error
    assert not (tmp_path / "out").exists()


def test_sources_that_are_none(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    for sources, message in (
        ([tmp_path], "has no rollouts (step_000000.jsonl, of trainer.rollout_data_dir) and no samples/*.jsonl"),
        ([tmp_path / "no.jsonl"], "cannot read"),
        ([folder / "rollouts", folder / "rollouts" / "step_000001.jsonl"], "is given twice; name it once"),
    ):
        assert curate(*sources, "--output", tmp_path / "out") == 2
        assert message in capsys.readouterr().err


def test_a_folder_is_replaced_by_force_only(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert curate(folder / "rollouts", "--output", out, "--sft", 1) == 0
    assert curate(folder / "rollouts", "--output", out) == 2 and (out / "sft.jsonl").exists()
    assert curate(folder / "rollouts", "--output", out, "--force") == 0 and not (out / "sft.jsonl").exists()
    (tmp_path / "file").write_text("")
    assert curate(folder / "rollouts", "--output", tmp_path / "file" / "out") == 1
    assert f"cannot write --output '{tmp_path}/file/out': " in capsys.readouterr().err


IMAGE_DATA = DataConfig(task="jsonl", max_prompt_length=128, max_response_length=32, system_prompt="")
IMAGE_PASSES = [4, 0, 2, 3, 1]  # of 4 responses to each of five problems, which have one text and one answer


@pytest.fixture(scope="module")
def image_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    pictured = tmp_path_factory.mktemp("model")
    write_tokenizer(pictured)
    made = load_tokenizer(pictured, IMAGE_DATA)
    made.image_format = ImageFormat.of(pictured, make_config().to_dict(), made, IMAGE_DATA)
    return made


@pytest.fixture(scope="module")
def pictured(tmp_path_factory: pytest.TempPathFactory, image_tokenizer: Any) -> Path:
    """data/rows.jsonl with an image by path, in a message, as bytes, in {"path"}, and none; and rollouts/ of it."""
    pictured = tmp_path_factory.mktemp("curation")
    (pictured / "data/pictures").mkdir(parents=True)
    for number in range(3):
        draw(number).save(pictured / f"data/pictures/{number}.png")
    part = {"type": "image", "image": "pictures/1.png"}
    asked = {"prompt": "<image>Which?", "answer": "7"}
    lines = [
        {**asked, "images": ["pictures/0.png"], "note": 1},
        {"prompt": [{"role": "user", "content": [part, {"type": "text", "text": "Which?"}]}], "answer": "7"},
        {**asked, "images": [{"bytes": base64.b64encode(png(draw(7))).decode(), "path": "7.png"}]},
        {**asked, "image": {"path": "pictures/2.png"}},
        asked,
    ]
    write_rows(pictured / "data/rows.jsonl", lines)
    samples = []
    for group, prompt in enumerate(load_prompts(IMAGE_DATA, [pictured / "data/rows.jsonl"], image_tokenizer, "math")):
        for index in range(4):
            score = float(index < IMAGE_PASSES[group])
            ids = image_tokenizer(text := f"{score:g} by {index}", add_special_tokens=False)["input_ids"]
            one = Sample(prompt, group, index, ids, [0.0] * len(ids), "stop", 0, text=text, reward=score)
            pixels = {image.digest: image.pixels for image in prompt.images}
            samples.append(
                unpack_sample(pack_sample(one), pixels) if index % 2 else one
            )  # some were sampled before a resume
    write_rollouts(pictured / "rollouts", 0, samples)
    return pictured


def test_problems_of_one_text_keep_their_own_rates(pictured: Path, image_tokenizer: Any, tmp_path: Path) -> None:
    out, data = tmp_path / "out", pictured / "data"
    options = ("--data", data / "rows.jsonl", "--task", "jsonl", "--min-rate", 0.1)
    assert curate(pictured / "rollouts", "--output", out, *options) == 0
    assert [row["rate"] for row in rows(out / "pass_rates.jsonl")] == [passes / 4 for passes in IMAGE_PASSES]
    before, kept = rows(data / "rows.jsonl"), rows(out / "rows.jsonl")
    assert kept == [
        {**before[0], "images": [f"{data}/pictures/0.png"]},
        before[2],
        {**before[3], "image": {"path": f"{data}/pictures/2.png"}},
        before[4],
    ]
    # the next run reads both files, also where the numbers of the rows are others
    prompts = load_prompts(IMAGE_DATA, [out / "rows.jsonl"], image_tokenizer, "math")
    assert [[image.size for image in prompt.images] for prompt in prompts] == [[(2, 2)]] * 3 + [[]]
    selected = select_prompts(prompts, SamplingConfig(pass_rates=out / "pass_rates.jsonl"))
    assert [prompt.pass_rate for prompt in selected] == [1.0, 0.5, 0.75, 0.25]
    assert [prompt.images for prompt in selected] == [prompt.images for prompt in prompts]


def test_supervised_rows_have_the_images_of_the_data_file(
    pictured: Path, image_tokenizer: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = (pictured / "rollouts", "--output", tmp_path / "out", "--sft", 1, "--pairs", "best-worst")
    assert curate(*options) == 2
    assert (
        f"a question has the image {pictured}/data/pictures/0.png, and files of responses hold no"
        in capsys.readouterr().err
    )
    assert curate(*options, "--data", pictured / "data/rows.jsonl", "--task", "jsonl") == 0
    groups = load_offline_groups(IMAGE_DATA, [tmp_path / "out/sft.jsonl"], image_tokenizer, {"response": 1.0})
    trained = load_prompts(IMAGE_DATA, [pictured / "data/rows.jsonl"], image_tokenizer, "math")
    assert [(one.prompt_ids, one.images) for one, _, _ in groups] == [
        (prompt.prompt_ids, prompt.images) for prompt, passes in zip(trained, IMAGE_PASSES, strict=True) if passes
    ]
    pairs = rows(tmp_path / "out/pairs.jsonl")
    assert [len(row.get("images", [])) for row in pairs] == [1, 1, 0]  # of rows 2, 3 and 4


def test_a_rollout_file_has_the_images_that_are_files(pictured: Path, image_tokenizer: Any, tmp_path: Path) -> None:
    """It has no bytes of images, so a run that would learn from such rows without them does not start."""
    file = pictured / "rollouts/step_000000.jsonl"
    with pytest.raises(ValueError, match=r"4 of 20 rows are wrong:\n  line 9: images\[0\] is neither a path nor bytes"):
        load_offline_groups(IMAGE_DATA, [file], image_tokenizer, {"response": 1.0})
    lines = file.read_text().splitlines(keepends=True)
    (tmp_path / "rest.jsonl").write_text("".join([*lines[:8], *lines[12:]]))
    groups = load_offline_groups(IMAGE_DATA, [tmp_path / "rest.jsonl"], image_tokenizer, {"response": 1.0})
    prompts = load_prompts(IMAGE_DATA, [pictured / "data/rows.jsonl"], image_tokenizer, "math")
    assert [groups[4 * n][0].images for n in range(4)] == [prompts[number].images for number in (0, 1, 3, 4)]


def test_other_images_were_not_measured(pictured: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    draw(5).save(tmp_path / "other.png")
    write_rows(tmp_path / "other.jsonl", [{"prompt": "<image>Which?", "answer": "7", "image": "other.png"}])
    options = ["--data", tmp_path / "other.jsonl", "--task", "jsonl", "--output", tmp_path / "out"]
    assert main(["curate", str(pictured / "rollouts"), *map(str, options)]) == 2
    assert "none of its questions and answers" in capsys.readouterr().err
