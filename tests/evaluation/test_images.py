"""Rows with images in `evaluate`: the answers are the model's own, and the page has thumbnails of them.

The model is random. Its greedy answers are compared with transformers', which reads the images from the prompt's places.
"""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_megatron.cli.main import main
from grpo_megatron.config import ConfigError, DataConfig
from grpo_megatron.data.benchmarks import read_task_prompts
from grpo_megatron.evaluation.ask import Asker
from grpo_megatron.evaluation.evaluate import complete_ledger, evaluate
from grpo_megatron.evaluation.ledger import Ledger
from grpo_megatron.evaluation.options import EvaluateOptions
from grpo_megatron.evaluation.settings import prepare
from grpo_megatron.rollout.transformers_engine import TransformersEngine
from tests.evaluation.models import make_folder
from tests.runs import write_rows
from tests.vision import CELL, EOS, draw, load, logits, make_model, png

MAX_TOKENS = 5
COMMON: dict[str, Any] = {"reward": "math", "engine": "transformers", "device": "cpu", "max_tokens": MAX_TOKENS}


pytestmark = pytest.mark.usefixtures("same_environment")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """model/, and rows.jsonl: equal texts with different images, one with two images, one without."""
    folder = tmp_path_factory.mktemp("images")
    make_model(folder / "model", max_position_embeddings=2048)
    (folder / "pictures").mkdir()
    for number, size in enumerate([(2, 2), (3, 2), (2, 4)]):
        draw(number, size[0] * CELL, size[1] * CELL).save(folder / f"pictures/{number}.png")
    encoded = f"data:image/png;base64,{base64.b64encode(png(draw(9))).decode()}"
    rows = [
        {"prompt": "<image>Which?", "answer": "1", "images": ["pictures/0.png"]},
        {"prompt": "<image>Which?", "answer": "1", "images": ["pictures/1.png"]},
        {"prompt": "Which? <image>or<image>", "answer": "1", "images": ["pictures/2.png", encoded]},
        {"prompt": "Which <image>?", "answer": "1"},
    ]
    write_rows(folder / "rows.jsonl", rows)
    return folder


def greedy_text(model: Any, prompt: Any, tokenizer: Any) -> str:
    ids: list[int] = []
    with torch.no_grad():
        while len(ids) < MAX_TOKENS and ids[-1:] != [EOS]:
            ids.append(int(logits(model, [*prompt.prompt_ids, *ids], prompt.images)[-1].argmax()))
    return str(tokenizer.decode(ids, skip_special_tokens=True))


def test_answers_are_those_of_transformers(folder: Path, tmp_path: Path) -> None:
    options = EvaluateOptions(
        model=folder / "model", file=(str(folder / "rows.jsonl"),), output=tmp_path / "out", **COMMON
    )
    settings = prepare(options)
    [run] = settings.runs
    prompts = run.prompts.prompts
    assert [[image.size for image in prompt.images] for prompt in prompts] == [[(2, 2)], [(2, 3)], [(4, 2), (2, 2)], []]
    asker = Asker(settings.model, settings.max_model_len)
    complete_ledger(settings, run, asker)
    asker.close()
    drawn = {uid: entry.text for (uid, _), entry in Ledger(options.folder, run.name).read().items()}
    model = load(folder / "model")
    assert drawn == {prompt.uid: greedy_text(model, prompt, settings.model.tokenizer) for prompt in prompts}
    assert drawn["rows/0"] != drawn["rows/1"]  # only the images differ


def test_the_page_has_small_thumbnails(folder: Path, tmp_path: Path) -> None:
    from PIL import Image

    where: dict[str, Any] = {"model": folder / "model", "output": tmp_path / "out"}
    result = evaluate(file=(str(folder / "rows.jsonl"),), **where, **COMMON)
    assert result["tasks"]["rows"]["image_pixels"] == [3136, 12845056]
    samples = [json.loads(line) for line in (tmp_path / "out/samples/rows.jsonl").read_text().splitlines()]
    assert [[(one["rows"], one["columns"]) for one in row.get("images", [])] for row in samples] == [
        [(2, 2)], [(2, 3)], [(4, 2), (2, 2)], [],
    ]  # fmt: skip
    page = (tmp_path / "out/report.html").read_text()
    data = json.loads(page.partition('id="data">')[2].partition("</script>")[0])["rows"]
    assert [row[6]["images"] for row in data["rows"]] == [[0], [1], [2, 3], []]
    shown = [Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2]))) for uri in data["pictures"]]
    assert [image.size for image in shown] == [(56, 56), (84, 56), (48, 96), (56, 56)]
    # another task of the folder makes the page again, from samples/
    other = tmp_path / "other.jsonl"
    write_rows(other, [{"prompt": "Which?", "answer": "1"}])
    evaluate(file=(str(other),), **where, **COMMON)
    page = (tmp_path / "out/report.html").read_text()
    again = json.loads(page.partition('id="data">')[2].partition("</script>")[0])
    assert again["rows"]["pictures"] == data["pictures"] and again["other"]["pictures"] == []


def refused(capsys: pytest.CaptureFixture[str], *argv: object) -> str:
    assert main(["evaluate", "--device", "cpu", "--reward", "math", *map(str, argv)]) == 2
    return capsys.readouterr().err


def test_what_cannot_read_images_is_refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model, plain text, an engine, limits, and a missing file."""
    rows = ("--file", folder / "rows.jsonl", "--output", tmp_path / "out")
    vision = ("--model", folder / "model", *rows)
    text = refused(capsys, "--model", make_folder(tmp_path / "text"), *rows)
    assert "rows/0: has images, and the model reads none; set --model to one that reads images" in text
    assert "has images, which a chat template places; set --format chat" in refused(
        capsys, *vision, "--engine", "transformers", "--format", "text"
    )
    limits = ("--image-max-pixels", "500")
    text = refused(capsys, *vision, "--engine", "transformers", *limits)
    assert "--image-max-pixels=500" in text and "an image token is 28 x 28 pixels" in text
    write_rows(tmp_path / "lost.jsonl", [{"prompt": "<image>?", "answer": "1", "images": ["no.png"]}])
    lost = refused(capsys, *vision[:2], "--engine", "transformers", "--file", tmp_path / "lost.jsonl")
    assert "line 1: images[0]" in lost and f"{tmp_path}/no.png" in lost
    monkeypatch.setattr(TransformersEngine, "reads_images", False)
    assert "--engine transformers serves no model that reads images" in refused(
        capsys, *vision, "--engine", "transformers"
    )


def test_a_published_benchmark_has_its_drawings(folder: Path, tmp_path: Path) -> None:
    """Geometry3K as on the Hub: a list of {"bytes", "path"} per row. As data.val_tasks the prompts are the same."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    drawings = [{"bytes": png(draw(number, (2 + number) * CELL)), "path": None} for number in range(3)]
    rows = [{"images": [one], "problem": "<image>Find $x$.", "answer": "5"} for one in drawings]
    (tmp_path / "geometry3k").mkdir()
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "geometry3k/test.parquet")
    options = EvaluateOptions(
        model=folder / "model", tasks=("geometry3k",), data=tmp_path, max_tokens=9, engine="transformers"
    )
    settings = prepare(options)
    prompts = settings.runs[0].prompts.prompts
    assert [prompt.images[0].size for prompt in prompts] == [(2, 2), (2, 3), (2, 4)]
    data = DataConfig(val_tasks=["geometry3k"], val_data=tmp_path, max_prompt_length=300)
    validated = read_task_prompts(data, {}, settings.model.tokenizer)
    assert [(one.prompt_ids, one.images) for one in validated] == [(one.prompt_ids, one.images) for one in prompts]
    with pytest.raises(ConfigError, match="geometry3k/2 has .* tokens, data.max_prompt_length is 20"):
        read_task_prompts(data.model_copy(update={"max_prompt_length": 20}), {}, settings.model.tokenizer)
