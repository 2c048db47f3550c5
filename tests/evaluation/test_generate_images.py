"""Images in `generate`: beside a prompt, in rows, in the first question of a chat; and what is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_megatron.cli.main import main
from grpo_megatron.config import DataConfig
from grpo_megatron.config.options import parse
from grpo_megatron.data.prompts import load_prompts
from grpo_megatron.evaluation.chat import hold_chat
from grpo_megatron.evaluation.generate import generate
from grpo_megatron.evaluation.generate_settings import GenerationSettings, prepare_generation
from grpo_megatron.evaluation.options import GenerateOptions
from grpo_megatron.rollout.engine import Request
from tests.evaluation.models import FakeAsker, TextEngine, make_folder
from tests.evaluation.test_images import greedy_text
from tests.runs import write_rows
from tests.vision import CELL, IMAGE_PAD, draw, load, make_model

ENGINE = ("--engine", "transformers", "--device", "cpu", "--max-tokens", 5)


pytestmark = pytest.mark.usefixtures("same_environment")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """run/hf, a model that reads images, with the config of its run; run/0.png, run/1.png, rows and a text model."""
    folder = tmp_path_factory.mktemp("run")
    make_model(folder / "hf", max_position_embeddings=1024)
    limits = {"image_max_pixels": 6 * CELL * CELL}
    (folder / "config.yaml").write_text(yaml.safe_dump({"data": {"task": "jsonl", **limits}, "trainer": {}}))
    draw(0, 2 * CELL, 2 * CELL).save(folder / "0.png")
    draw(1, 4 * CELL, 4 * CELL).save(folder / "1.png")
    rows = [{"prompt": "Which <image>?", "answer": "", "image": "0.png"}, {"prompt": "Which <image>?", "answer": ""}]
    write_rows(folder / "rows.jsonl", rows)
    make_folder(folder / "text")
    return folder


def prepared(run: Path, *options: Any) -> GenerationSettings:
    return prepare_generation(parse(GenerateOptions, list(map(str, ["--model", run / "hf", *ENGINE, *options]))))


def test_images_come_first_or_at_their_marks(run: Path) -> None:
    """The run's limit of 6 tokens makes 2 x 2 of the larger image."""
    images = ("--image", run / "0.png", "--image", run / "1.png")
    [first] = prepared(run, *images, "--prompt", "Which?").prompts
    [marked] = prepared(run, *images, "--prompt", "a<image>b<image>", "--image-max-pixels", 20 * CELL * CELL).prompts
    assert first.text.endswith(
        "<|vision_end|><|vision_start|><|image_pad|><|vision_end|>Which?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert [image.size for image in first.images] == [(2, 2), (2, 2)]
    assert [image.size for image in marked.images] == [(2, 2), (4, 4)] and ">b<" in marked.text
    for prompt in (first, marked):
        places = [place for image in prompt.images for place in range(image.first, image.first + image.num_tokens)]
        assert [place for place, token in enumerate(prompt.prompt_ids) if token == IMAGE_PAD] == places


def test_rows_are_rendered_as_in_training(run: Path) -> None:
    settings = prepared(run, "--file", run / "rows.jsonl")
    data = DataConfig(task="jsonl", image_max_pixels=6 * CELL * CELL)
    trained = load_prompts(data, [run / "rows.jsonl"], settings.model.tokenizer, "")
    asked = [(prompt.prompt_ids, prompt.images) for prompt in settings.prompts]
    assert asked == [(prompt.prompt_ids, prompt.images) for prompt in trained] and len(asked[0][1]) == 1


def test_the_command_answers_as_transformers(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--model", run / "hf", *ENGINE, "--json", "--image", run / "1.png", "--prompt", "Which?"]
    assert generate(parse(GenerateOptions, list(map(str, argv))), lambda *_: 1) == 0
    [prompt], tokenizer = prepared(run, *argv[-4:]).prompts, prepared(run, "--prompt", "?").model.tokenizer
    text = greedy_text(load(run / "hf"), prompt, tokenizer)
    assert json.loads(capsys.readouterr().out)["completion"] == text


def test_a_chat_has_its_images_in_every_turn(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`<image>` in an answer, or in a later question, is text. The placeholder itself is refused, and the chat goes on."""
    settings = prepared(run, "--chat", "--image", run / "0.png")
    tokenizer, asked = settings.model.tokenizer, list[str]()

    def script(request: Request) -> str:
        places = [i for i, token in enumerate(request.prompt_ids) if token == IMAGE_PAD]
        assert places == [i for image in request.images for i in range(image.first, image.first + image.num_tokens)]
        assert [image.num_tokens for image in request.images] == [4]
        asked.append("".join(tokenizer.convert_ids_to_tokens(request.prompt_ids)))
        return "x"

    monkeypatch.setattr(tokenizer, "decode", lambda ids, **_: "<image>" if ids else "")
    asker = FakeAsker(settings.model, TextEngine(tokenizer, script))
    lines: Iterator[str] = iter(["a <image> or <image>", "One", "<image>?", "<|image_pad|>", "/new", "Two", "/quit"])
    hold_chat(settings, asker, lambda _: next(lines))
    assert "<image> 2 times, and the row 1 images" in capsys.readouterr().err
    first, second, new = asked
    pads = "<|vision_start|>" + 4 * "<|image_pad|>" + "<|vision_end|>"
    assert f"user\n{pads}One<" in first and f"{pads}One<" in second and "<image><" in second and "<image>?<" in second
    assert f"{pads}Two<" in new and "One" not in new


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--prompt", "x", "--image", "none.png"], "--image none.png: 'none.png' cannot be read"),
        (["--prompt", "x", "--image", "rows.jsonl"], "is no PNG, JPEG, WEBP, BMP, GIF file"),
        (["--file", "rows.jsonl", "--image", "0.png"], "--image with --file: the rows of a file name their images"),
        (["--prompt", "<image> <image>", "--image", "0.png"], "<image> 2 times, and the row 1 images"),
        (["--prompt", "<|image_pad|>", "--image", "0.png"], "the prompt has '<|image_pad|>', which the chat template"),
        (["--prompt", "x", "--image", "0.png", "--format", "text"], "has images, which a chat template places; set --format"),
        (["--prompt", "x", "--image", "0.png", "--model", "text"], "--image 0.png: the model 'text' reads no images"),
        (["--file", "rows.jsonl", "--model", "text"], "has images, and the model reads none; set --model to one"),
        (["--prompt", "x", "--image", "0.png", "--max-tokens", "1020"], "exceeds the model's max_position_embeddings 1024"),
    ],
)  # fmt: skip
def test_mistakes_are_named(
    options: list[str], words: str, run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run)
    assert main(["generate", "--model", "hf", *map(str, ENGINE), *options]) == 2
    assert words in capsys.readouterr().err
