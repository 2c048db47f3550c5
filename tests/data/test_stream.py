"""Streams: rows of a user's iterator in its order, the same on every rank, and the same ones after a resume."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from grpo_megatron.checks.validate import Checked, validate
from grpo_megatron.cli.config_file import load_config
from grpo_megatron.cli.plan import plan_page
from grpo_megatron.config import ConfigError
from grpo_megatron.data import stream
from grpo_megatron.data.sampler import Sampler
from grpo_megatron.sampling.wrappers import prompt_sampler
from grpo_megatron.types import Prompt
from tests.data import streamed
from tests.runs import make_run

TWO = "data.sources=[{name: new, files: 'tests.data.streamed:Sums'}, {name: old, files: {run}/train.jsonl, weight: 3}]"
STREAM = "data.train_files=tests.data.streamed:"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("run"))


def checked(run: Path, *overrides: str) -> Checked:
    return validate(load_config(run / "run.yaml", [o.replace("{run}", str(run)) for o in overrides]), 2, dry_run=True)


def sampler(run: Path, *overrides: str, **named: Any) -> Sampler[Prompt]:
    found = checked(run, *overrides)
    return prompt_sampler(found.train_prompts, found.config.data, **named)


def contents(prompts: list[Prompt]) -> list[tuple[str, str, str]]:
    return [(prompt.uid, prompt.text, prompt.answer) for prompt in prompts]


@pytest.mark.parametrize("name", ["Sums", "plain"])
def test_a_resumed_run_reads_on(run: Path, name: str) -> None:
    whole, first = sampler(run, STREAM + name), sampler(run, STREAM + name)
    drawn = contents([prompt for step in range(5) for prompt in whole.batch(step)])
    assert len(dict.fromkeys(uid for uid, _, _ in drawn)) == 40 and drawn[0][0] == f"arithmetic/{name}/0"
    for step in range(3):
        first.batch(step)
    later = sampler(run, STREAM + name)
    later.load_state(json.loads(json.dumps(first.state())))
    assert contents([prompt for step in (3, 4) for prompt in later.batch(step)]) == drawn[24:]
    if name == "plain":  # the row of 3 is too long, and each pass has its number
        assert [text for _, text, _ in drawn[:5]] == [f"{n} + 0 =" for n in (0, 1, 2, 4)] + ["0 + 1 ="]
        assert [uid for uid, _, _ in drawn[3:5]] == ["arithmetic/plain/4", "arithmetic/plain/5"]


def test_one_rank_reads_and_the_others_get_its_rows(run: Path) -> None:
    """The other rank's function would give other rows: it must not be called."""
    shared: list[Any] = []
    first = sampler(run, STREAM + "Sums", share=lambda make: shared.append(make()) or shared[-1])
    other = sampler(run, STREAM + "Sums", "data.seed=7", share=lambda make: shared.pop(0))
    opened = streamed.Sums.opened
    for step in range(2):
        assert contents(first.batch(step)) == contents(other.batch(step))
    assert streamed.Sums.opened == opened + 1
    assert first.state() == other.state()


def test_a_stream_is_a_source_beside_files_and_a_piece_of_a_curriculum(run: Path) -> None:
    sources = (
        "data.sources=[{name: new, files: 'tests.data.streamed:Sums', weight: 1, n: 2, max_response_length: 5},"
        " {name: old, files: {run}/train.jsonl, weight: 3}]"
    )
    reads: list[Any] = []  # by rank 0
    mixed = sampler(run, sources, "data.train_files=[]", share=lambda make: reads.append(make) or make())
    batch = mixed.batch(0)
    assert [prompt.columns["count"] for prompt in batch if prompt.source == "new"] == [1, 2]
    assert len(reads) == 1
    assert {(prompt.source, prompt.n, prompt.max_tokens) for prompt in batch} == {("new", 2, 5), ("old", None, None)}
    pieces = "data.curriculum.pieces=[{name: a, source: new, weight: 1}, {name: b, weight: [[0, 1], [1, 7]]}]"
    mixed = sampler(run, sources, "data.train_files=[]", pieces)
    assert [prompt.source for prompt in mixed.batch(0)].count("new") == 4
    state = json.loads(json.dumps(mixed.state()))
    following = contents(mixed.batch(1))
    assert [uid.startswith("new") for uid, _, _ in following].count(True) == 1
    again = sampler(run, sources, "data.train_files=[]", pieces)
    again.load_state(state)
    assert contents(again.batch(1)) == following


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            [STREAM + "nothing"],
            "cannot be opened: ValueError: 'tests.data.streamed:nothing': module .* has no attribute",
        ),
        ([STREAM + "broken"], None),
        ([STREAM + "wrong"], "row 1: .*'prompt'"),
        ([STREAM + "stateful"], r"its state_dict\(\) is no JSON: TypeError"),
        ([STREAM + "Deaf"], "cannot be opened: TypeError: state vector must be a tuple"),
        ([STREAM + "plain", "data.filter_overlong_prompts=false"], "longer than data.max_prompt_length=16 tokens"),
        ([STREAM + "Sums", "trainer.total_epochs=2"], "trainer.total_epochs=2: the stream .* has no end"),
        (
            ["data.train_files=[tests.data.streamed:Sums, {run}/train.jsonl]"],
            "it must be the only one in data.train_files",
        ),
        (["data.val_files=tests.data.streamed:Sums"], "it must be the only one in data.train_files"),
        (
            [STREAM + "Sums", "data.curriculum.pieces=[{name: a}]"],
            r"data.curriculum.pieces \(a\): a stream has no pass rates and its own order; make it a source",
        ),
        (
            ["data.curriculum.pieces=[{name: a, order: easiest}]"],
            r"\(a\) needs pass rates; set data.sampling.pass_rates",
        ),
        (["data.curriculum.pieces=[{name: a, weight: [[2, 1.0], [9, 0]]}]"], "at step 9 all weights are 0"),
        (["data.curriculum.pieces=[{name: a}, {name: a}]"], "the name is given twice"),
        (
            ["data.curriculum.pieces=[{name: a, source: b}]"],
            r"\(a\): source='b' is none of data.sources \(there are none\)",
        ),
        (
            [TWO, "data.train_files=[]", "data.curriculum.pieces=[{name: a, source: old}]"],
            "no piece has the source 'new', so that nothing of it",
        ),
        (
            [TWO, "data.train_files=[]", "data.curriculum.pieces=[{name: a}]"],
            "no piece has the source 'new', so that nothing of it",
        ),
        (["data.curriculum.pieces=[{name: a, weight: []}]"], "weight=.*it has 0 entries; give 1 or more"),
    ],
)
def test_refused_with_the_reason(run: Path, overrides: list[str], message: str | None) -> None:
    if message is None:  # it fails in the run
        stream = sampler(run, *overrides)
        with pytest.raises(
            ConfigError, match="reading row 39 raised OSError: the source is gone; correct the function"
        ):
            [stream.batch(step) for step in range(5)]
        return
    with pytest.raises(ConfigError, match=message) as caught:
        checked(run, *overrides)
    assert len(caught.value.problems) == 1 or "curriculum" not in overrides[-1]


def test_an_empty_cell_of_images_is_no_row_without_images(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert sampler(run, STREAM + "unpictured").batch(0)  # the model reads no images
    monkeypatch.setattr(stream, "image_format", lambda tokenizer: object())
    with pytest.raises(ConfigError, match=r"row 0: has the empty cell images=\[\]; name the image, or write null"):
        checked(run, STREAM + "unpictured")


def test_the_plan_counts_no_epochs_of_a_stream(run: Path) -> None:
    sources = (
        "data.sources=[{name: new, files: 'tests.data.streamed:Sums', weight: 1},"
        " {name: old, files: {run}/train.jsonl, weight: 1}]"
    )
    for overrides in ([STREAM + "Sums"], [sources, "data.train_files=[]"]):
        found = checked(run, *overrides)
        lines = plan_page(found.config, found, 2, None).sections["Data"]
        assert lines[0] == "training          prompts without end of task arithmetic; 4 steps x 8"
    assert lines[1:3] == [
        "  new             a stream of task arithmetic; 50.0% = 4.0 per step",
        "  old             9 prompts of task arithmetic; 50.0% = 4.0 per step = 1.78 epochs",
    ]
