"""Images in the messages of environments: from a picture to the tokens and the places that engine and policy read."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from grpo_megatron.config import DataConfig, MultiTurnConfig
from grpo_megatron.data.images import ImageFormat
from grpo_megatron.data.tokenizer import TurnRenderer
from grpo_megatron.environments.environment import Environment, Outcome, Step, _Session, read_outcome
from grpo_megatron.rollout.engine import FULL, Completion, Request
from grpo_megatron.sampling.multi_turn import EnvironmentAnswers, Trajectory, TrajectoryLimits, play
from grpo_megatron.types import PromptImage
from tests import vision
from tests.fakes import LoneMesh

PICTURES = [
    vision.draw(n, columns * vision.CELL, rows * vision.CELL) for n, rows, columns in [(1, 1, 2), (2, 2, 2), (3, 3, 1)]
]
REWRITING = "{{ 'x' if message.role == 'assistant' and not loop.last else '' }}"


class Album(Environment):
    """Shows two pictures, then one, and then the first again. `forms`: how its messages name them."""

    gives_rewards = True

    def __init__(self, folder: str) -> None:
        self.folder, self.number = Path(folder), 0

    def reset(self, row: Any, seed: int) -> list[dict[str, Any]]:
        PICTURES[1].save(self.folder / "two.png")
        return [
            {"role": "system", "content": "<image> is text here"},
            {"role": "user", "content": "a<image>b<image>?", "images": [PICTURES[0], str(self.folder / "two.png")]},
        ]

    def step(self, completion: str) -> Step:
        self.number += 1
        uri = f"data:image/png;base64,{base64.b64encode(vision.png(PICTURES[2])).decode()}"
        parts = [{"type": "text", "text": "so"}, {"type": "image_url", "image_url": {"url": uri}}]
        messages = [
            {"role": "user", "content": parts},
            {"role": "user", "content": "", "images": [vision.png(PICTURES[0])]},
        ]
        return Step(messages[self.number - 1 : self.number], 1.0, self.number == 3)


class Pool:
    """The environment in this process. What it returns crosses a pipe in a run: as JSON."""

    def __init__(self, folder: Path) -> None:
        self.call = _Session(Album, {"kwargs": {"folder": str(folder)}, "max_characters": 1000})
        self.value: dict[str, Any] = {}

    def start(self, key: str, row: Any, seed: int) -> None:
        self.value = self.call({"start": row, "seed": seed, "completions": []})

    def step(self, key: str, completion: str) -> None:
        self.value = self.call({"step": completion})

    def wait(self, keys: list[str]) -> dict[str, Outcome]:
        answer = {"status": "ok", "seconds": 0.0, "value": self.value}
        return {key: read_outcome(answer, 1000) for key in keys}

    def end(self, keys: list[str]) -> None:
        pass


class Writer:
    """An engine that writes an ordinary `<|image_pad|>`."""

    version = 3

    def __init__(self) -> None:
        self.log: list[Request] = []

    def submit(self, key: str, request: Request, version: int) -> None:
        self.log.append(request)

    def poll(self) -> list[tuple[str, Completion]]:
        ids = [vision.IMAGE_PAD, vision.VOCABULARY.index("y"), vision.EOS]
        return [("one", Completion(ids, [-0.5] * 3, "stop"))]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("model")
    vision.make_config().save_pretrained(folder)
    vision.write_tokenizer(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    data = DataConfig(image_min_pixels=vision.CELL**2, image_max_pixels=100 * vision.CELL**2)
    tokenizer.image_format = ImageFormat.of(folder, vision.make_config().to_dict(), tokenizer, data)
    return tokenizer


def played(tokenizer: Any, folder: Path, prompt: int = 100) -> tuple[Trajectory, list[Request]]:
    renderer = TurnRenderer(tokenizer)
    renderer.check("user", may_rewrite=True)
    answers = EnvironmentAnswers(Pool(folder), renderer, MultiTurnConfig(), LoneMesh())  # type: ignore[arg-type]
    trajectory, engine = Trajectory("one", {}, 0, 5, TrajectoryLimits(prompt, 300, 9), 1.0, FULL, 3), Writer()
    for _ in play([trajectory], engine, answers, 3, 1):  # type: ignore[arg-type]
        pass
    assert (trajectory.status, trajectory.is_over) == ("ok", True), trajectory.message
    return trajectory, engine.log


def shown(request: Request) -> str:
    """The prompt, with each image as its size at its place. Checks that all its tokens are placeholders."""
    ids: list[Any] = list(request.prompt_ids)
    for image in reversed(request.images):
        place = slice(image.first, image.first + image.num_tokens)
        assert ids[place] == [vision.IMAGE_PAD] * image.num_tokens
        ids[place] = [f"{image.size[0]}x{image.size[1]}"]
    texts = [one if isinstance(one, str) else vision.VOCABULARY[one] for one in ids]
    return "".join(texts).replace("<|im_start|>", "[").replace("<|im_end|>\n", "]")


def pixels(images: tuple[PromptImage, ...]) -> list[int]:
    """Which of PICTURES each one is."""
    return [[picture.tobytes() for picture in PICTURES].index(image.pixels) for image in images]


BEGINNING = "[system\n<image> is text here][user\na@1x2#b@2x2#?][assistant\n"
FIRST, SECOND = "[user\nso@3x1#][assistant\n", "[user\n@1x2#][assistant\n"
SAMPLED = "<|image_pad|>y]"  # three tokens


def marked(text: str) -> str:
    return text.replace("@", "<|vision_start|>").replace("#", "<|vision_end|>")


def test_each_turn_reads_the_images_before_it_in_their_places(tokenizer: Any, tmp_path: Path) -> None:
    trajectory, log = played(tokenizer, tmp_path)
    texts = [BEGINNING, f"{BEGINNING}{SAMPLED}{FIRST}", f"{BEGINNING}{SAMPLED}{FIRST}{SAMPLED}{SECOND}"]
    assert [shown(request) for request in log] == [*map(marked, texts)]
    assert [pixels(request.images) for request in log] == [[0, 1], [0, 1, 2], [0, 1, 2, 0]]
    assert trajectory.images == log[-1].images and not trajectory.branches
    assert trajectory.images[0].digest == trajectory.images[3].digest


def test_a_new_row_has_the_images_of_its_own_context(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The template writes an x before earlier turns, so each turn begins a row. The sampled placeholder becomes a text."""
    text = "{%- if message.content is string %}"
    monkeypatch.setattr(tokenizer, "chat_template", vision.TEMPLATE.replace(text, f"{REWRITING}{text}"))
    trajectory, log = played(tokenizer, tmp_path, prompt=100)
    written = "x< |image_pad|> y]"  # this tokenizer decodes a special token with a space behind it
    texts = [BEGINNING, f"{BEGINNING}{written}{FIRST}", f"{BEGINNING}{written}{FIRST}{written}{SECOND}"]
    assert [shown(request) for request in log] == [*map(marked, texts)]
    rows = [*trajectory.branches, trajectory]
    assert [row.images for row in rows] == [request.images for request in log]
    assert len(rows[-1].prompt_ids) == 100 < rows[-1].images[-1].first  # the rest of a long context is an observation


@pytest.mark.parametrize(
    ("messages", "error"),
    [
        ([{"role": "user", "content": "<image>", "images": ["a.png", "b.png"]}], "has <image> 1 times, and 2 images"),
        ([{"role": "user", "content": "", "images": ["http://x/a.png"]}], "a run downloads nothing"),
        ([{"role": "user", "content": "", "images": [b"x" * (6 << 20) + b"xxx"]}], "at most 8,388,608 are read"),
        ([{"role": "user", "content": [{"type": "video", "video": "a"}]}], "content part of the type 'video'"),
    ],
)
def test_images_that_cannot_be_read(messages: Any, error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Album, "reset", lambda self, row, seed: messages)
    with pytest.raises(Exception, match=error):
        Pool(tmp_path).start("one", {}, 0)


def test_the_trainer_reads_no_file_that_a_process_names() -> None:
    value = {"messages": [{"role": "user", "content": [{"type": "image", "image": "/etc/passwd"}]}], "done": False}
    outcome = read_outcome({"status": "ok", "seconds": 0.0, "value": {**value, "reward": None, "metrics": {}}}, 1000)
    assert outcome.status == "died" and "no image that was read" in outcome.message
