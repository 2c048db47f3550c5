"""Problems with images through `curate`: equal texts with different images are different problems, and paths stay valid."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest

from grpo_megatron.cli.main import main
from grpo_megatron.config import DataConfig, SamplingConfig
from grpo_megatron.data.images import ImageFormat
from grpo_megatron.data.pass_rates import select_prompts
from grpo_megatron.data.prompts import load_prompts
from grpo_megatron.data.responses import load_offline_groups
from grpo_megatron.data.tokenizer import load_tokenizer
from grpo_megatron.sampling.collector import pack_sample, unpack_sample
from grpo_megatron.types import Sample
from tests.data.test_curate import curate, rows, write_rollouts
from tests.runs import write_rows
from tests.vision import draw, make_config, png, write_tokenizer

DATA = DataConfig(task="jsonl", max_prompt_length=128, max_response_length=32, system_prompt="")
PASSES = [4, 0, 2, 3, 1]  # of 4 responses to each of five problems, which have one text and one answer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("model")
    write_tokenizer(folder)
    made = load_tokenizer(folder, DATA)
    made.image_format = ImageFormat.of(folder, make_config().to_dict(), made, DATA)
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Path:
    """data/rows.jsonl with an image by path, in a message, as bytes, in {"path"}, and none; and rollouts/ of it."""
    folder = tmp_path_factory.mktemp("curation")
    (folder / "data/pictures").mkdir(parents=True)
    for number in range(3):
        draw(number).save(folder / f"data/pictures/{number}.png")
    part = {"type": "image", "image": "pictures/1.png"}
    asked = {"prompt": "<image>Which?", "answer": "7"}
    lines = [
        {**asked, "images": ["pictures/0.png"], "note": 1},
        {"prompt": [{"role": "user", "content": [part, {"type": "text", "text": "Which?"}]}], "answer": "7"},
        {**asked, "images": [{"bytes": base64.b64encode(png(draw(7))).decode(), "path": "7.png"}]},
        {**asked, "image": {"path": "pictures/2.png"}},
        asked,
    ]
    write_rows(folder / "data/rows.jsonl", lines)
    samples = []
    for group, prompt in enumerate(load_prompts(DATA, [folder / "data/rows.jsonl"], tokenizer, "math")):
        for index in range(4):
            score = float(index < PASSES[group])
            ids = tokenizer(text := f"{score:g} by {index}", add_special_tokens=False)["input_ids"]
            one = Sample(prompt, group, index, ids, [0.0] * len(ids), "stop", 0, text=text, reward=score)
            pixels = {image.digest: image.pixels for image in prompt.images}
            samples.append(
                unpack_sample(pack_sample(one), pixels) if index % 2 else one
            )  # some were drawn before a resume
    write_rollouts(folder / "rollouts", 0, samples)
    return folder


def test_problems_of_one_text_keep_their_own_rates(folder: Path, tokenizer: Any, tmp_path: Path) -> None:
    out, data = tmp_path / "out", folder / "data"
    options = ("--data", data / "rows.jsonl", "--task", "jsonl", "--drop-all-wrong")
    assert curate(folder / "rollouts", "--output", out, *options) == 0
    assert [row["rate"] for row in rows(out / "pass_rates.jsonl")] == [passes / 4 for passes in PASSES]
    before, kept = rows(data / "rows.jsonl"), rows(out / "rows.jsonl")
    assert kept == [
        {**before[0], "images": [f"{data}/pictures/0.png"]},
        before[2],
        {**before[3], "image": {"path": f"{data}/pictures/2.png"}},
        before[4],
    ]
    # the next run reads both files, also where the numbers of the rows are others
    prompts = load_prompts(DATA, [out / "rows.jsonl"], tokenizer, "math")
    assert [[image.size for image in prompt.images] for prompt in prompts] == [[(2, 2)]] * 3 + [[]]
    selected = select_prompts(prompts, SamplingConfig(pass_rates=out / "pass_rates.jsonl"))
    assert [prompt.pass_rate for prompt in selected] == [1.0, 0.5, 0.75, 0.25]
    assert [prompt.images for prompt in selected] == [prompt.images for prompt in prompts]


def test_supervised_rows_have_the_images_of_the_data_file(
    folder: Path, tokenizer: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = (folder / "rollouts", "--output", tmp_path / "out", "--sft", 1, "--pairs", "best-worst")
    assert curate(*options) == 2
    assert (
        f"a question has the image {folder}/data/pictures/0.png, and files of responses hold no"
        in capsys.readouterr().err
    )
    assert curate(*options, "--data", folder / "data/rows.jsonl", "--task", "jsonl") == 0
    groups = load_offline_groups(DATA, [tmp_path / "out/sft.jsonl"], tokenizer, {"response": 1.0})
    trained = load_prompts(DATA, [folder / "data/rows.jsonl"], tokenizer, "math")
    assert [(one.prompt_ids, one.images) for one, _, _ in groups] == [
        (prompt.prompt_ids, prompt.images) for prompt, passes in zip(trained, PASSES, strict=True) if passes
    ]
    pairs = rows(tmp_path / "out/pairs.jsonl")
    assert [len(row.get("images", [])) for row in pairs] == [1, 1, 0]  # of rows 2, 3 and 4


def test_a_rollout_file_has_the_images_that_are_files(folder: Path, tokenizer: Any, tmp_path: Path) -> None:
    """It has no bytes of images, so a run that would learn from such rows without them does not start."""
    file = folder / "rollouts/step_000000.jsonl"
    with pytest.raises(ValueError, match=r"4 of 20 rows are wrong:\n  line 9: images\[0\] is neither a path nor bytes"):
        load_offline_groups(DATA, [file], tokenizer, {"response": 1.0})
    lines = file.read_text().splitlines(keepends=True)
    (tmp_path / "rest.jsonl").write_text("".join([*lines[:8], *lines[12:]]))
    groups = load_offline_groups(DATA, [tmp_path / "rest.jsonl"], tokenizer, {"response": 1.0})
    prompts = load_prompts(DATA, [folder / "data/rows.jsonl"], tokenizer, "math")
    assert [groups[4 * n][0].images for n in range(4)] == [prompts[number].images for number in (0, 1, 3, 4)]


def test_other_images_were_not_measured(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    draw(5).save(tmp_path / "other.png")
    write_rows(tmp_path / "other.jsonl", [{"prompt": "<image>Which?", "answer": "7", "image": "other.png"}])
    options = ["--data", tmp_path / "other.jsonl", "--task", "jsonl", "--output", tmp_path / "out"]
    assert main(["curate", str(folder / "rollouts"), *map(str, options)]) == 2
    assert "none of its questions and answers" in capsys.readouterr().err
