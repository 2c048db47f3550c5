"""`generate`: options, prompts as the run renders them, images, lengths, output, and a chat, over engines without a model.

tests/evaluation/test_run.py samples with the real engine.
"""

from __future__ import annotations

import json
import shlex
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import yaml

from grpo_megatron.cli.main import main
from grpo_megatron.config import Config, ConfigError, DataConfig
from grpo_megatron.config.options import parse
from grpo_megatron.data.prompts import load_prompts
from grpo_megatron.evaluation import generate as cli
from grpo_megatron.evaluation.generate import HELP, TextStream, generate, hold_chat
from grpo_megatron.evaluation.generate_settings import GenerationSettings, prepare_generation
from grpo_megatron.evaluation.options import GenerateOptions
from grpo_megatron.report import console
from grpo_megatron.report.console import Summary
from grpo_megatron.rollout.engine import Completion, Request
from tests.evaluation.models import FakeAsker, TextEngine, byte_tokenizer, gsm8k_rows, make_folder
from tests.evaluation.test_images import greedy_text
from tests.runs import write_rows
from tests.vision import CELL, IMAGE_PAD, draw, load, make_model

pytestmark = pytest.mark.usefixtures("same_environment")
TEMPLATE = "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }} {% endfor %}[assistant] "


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """run/hf, a model, with run/config.yaml beside it; and run/rows.jsonl."""
    folder = tmp_path_factory.mktemp("run")
    make_folder(folder / "hf", max_position_embeddings=512)
    (folder / "template.jinja").write_text(TEMPLATE)
    data = {"task": "gsm8k", "system_prompt": "Be brief.", "max_response_length": 40}
    config = {"data": data, "trainer": {}, "rollout": {"stop": ["###"], "stop_token_ids": [7]}}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    write_rows(folder / "rows.jsonl", gsm8k_rows(3))
    return folder


def prepared(*options: Any) -> GenerationSettings:
    return prepare_generation(parse(GenerateOptions, [*map(str, options)]))


def test_the_prompts_are_those_of_the_run(run: Path, tmp_path: Path) -> None:
    """Also where the folder has another name, by options; and as they are, with another task."""
    settings = prepared("--model", run / "hf", "--file", run / "rows.jsonl")
    data = DataConfig(task="gsm8k", system_prompt="Be brief.")
    trained = load_prompts(data, [run / "rows.jsonl"], byte_tokenizer(), "gsm8k")
    assert [prompt.prompt_ids for prompt in settings.prompts] == [prompt.prompt_ids for prompt in trained]
    assert (settings.answers.max_tokens, settings.answers.stop, settings.answers.stop_token_ids) == (40, ["###"], [7])
    assert settings.max_model_len == max(len(prompt.prompt_ids) for prompt in trained) + 40
    (tmp_path / "copy").symlink_to(tmp_path)  # no hf/ beside a config
    (tmp_path / "model").mkdir()
    for file in (run / "hf").iterdir():
        (tmp_path / "model" / file.name).symlink_to(file)
    options = ("--task", "gsm8k", "--system-prompt", "Be brief.", "--stop", "###")
    other = prepared("--model", tmp_path / "model", "--file", run / "rows.jsonl", *options)
    assert other.style.run is None and other.prompts == settings.prompts
    plain = prepared("--model", tmp_path / "model", "--prompt", "What is 0 plus 0?")
    assert [prompt.text for prompt in plain.prompts] == ["<user>What is 0 plus 0?\n<assistant>"]
    assert plain.answers.max_tokens == 512 - len(plain.prompts[0].prompt_ids)  # of the default, what there is room for
    text = prepared("--model", tmp_path / "model", "--prompt", "2 +", "--format", "text", "--max-tokens", 3)
    assert text.prompts[0].text == "2 +" and text.max_model_len == 6


def test_a_step_has_the_template_of_its_run(run: Path, tmp_path: Path) -> None:
    from grpo_megatron.convert import to_megatron

    step = tmp_path / "step_000001"
    to_megatron(run / "hf", step / "out", quiet=True)
    (step / "out" / "release").rename(step / "state")
    data = {"task": "jsonl", "chat_template": str(run / "template.jinja")}
    config = {"model": {"path": str(run / "hf")}, "data": data}
    (step / "trainer.json").write_text(json.dumps({"config": config}))
    write_rows(tmp_path / "chats.jsonl", [{"messages": [{"role": "user", "content": "Hi"}]}, {"prompt": "Ho"}])
    settings = prepared("--model", step, "--file", tmp_path / "chats.jsonl")
    assert [prompt.text for prompt in settings.prompts] == ["[user] Hi [assistant] ", "[user] Ho [assistant] "]
    data["chat_template"] = "gone.jinja"
    (step / "trainer.json").write_text(json.dumps({"config": config}))
    with pytest.raises(ConfigError, match="chat_template='gone.jinja', which is not there; set --chat-template FILE"):
        prepared("--model", step, "--prompt", "Hi")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--prompt", "x", "--samples", "2"], "--samples 2 with --temperature 0: greedy answers are all the same"),
        (["--prompt", "x", "--temperature", "9"], "--temperature 9 is outside 0.01 to 2; set one inside, or 0"),
        (["--prompt", " "], "--prompt ' ': the prompt is empty"),
        (["--prompt", "x", "--max-tokens", "900"], "of 37 tokens + --max-tokens 900 = 937 exceeds the model's max_po"),
        (["--prompt", "x" * 600], "exceeds the model's max_position_embeddings 512; shorten the prompt"),
        (["--prompt", "x", "--tp", "2"], "--tp 2 starts 2 ranks, which share the terminal; set --output OUT.jsonl"),
        (["--prompt", "-", "--tp", "2"], "--prompt - with --tp 2: only one process has standard input"),
        (["--chat", "--tp", "2"], "serve the model instead (vllm serve HF_DIR --tensor-parallel-size 2"),
        (["--chat", "--samples", "2", "--temperature", "1"], "each turn has one answer; leave --samples out"),
        (["--prompt", "x", "--tp", "5", "--output", "o"], "--tp 5 cannot split the model"),
        (["--prompt", "x", "--task", "gsm9k"], "unknown task 'gsm9k'; did you mean 'gsm8k'?"),
        (["--prompt", "x", "--format", "text"], "--system-prompt needs a chat template, and prompts are plain"),
        (["--file", "none.txt"], "cannot read --file 'none.txt': No such file or directory\n"),
        (["--prompt", "x", "--output", "."], "--output '.' is a folder; name a file"),
    ],
)
def test_mistakes_are_named(options: list[str], words: str, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--model", str(run / "hf"), *options]) == 2
    assert words in capsys.readouterr().err


def test_a_chat_needs_a_template(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = make_folder(tmp_path / "model")
    (model / "chat_template.jinja").unlink(missing_ok=True)
    config = json.loads((model / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    assert main(["generate", "--model", str(model), "--chat"]) == 2
    assert "--chat needs a chat template" in capsys.readouterr().err


def test_answers_go_to_standard_output_or_a_file(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = TextEngine(byte_tokenizer(), lambda request: f"{len(request.prompt_ids)} \u00e9", shortest=40)
    monkeypatch.setattr(cli, "Asker", lambda model, max_model_len: FakeAsker(model, engine))
    monkeypatch.setattr("grpo_megatron.evaluation.ask.destroy_mesh", lambda: None)

    def generate(*options: str) -> tuple[str, str]:
        assert cli.generate(parse(GenerateOptions, ["--model", str(run / "hf"), *options]), lambda *_: 1) == 0
        printed = capsys.readouterr()
        return printed.out, printed.err

    out, err = generate("--prompt", "Why?", "--max-tokens", "9")
    assert out == "40 \u00e9\n" and "(cut after 5 tokens: --max-tokens)" in err
    assert f"prompts as in {run / 'config.yaml'}: task gsm8k (--task jsonl: as they are)" in err
    several = ["--file", str(run / "rows.jsonl"), "--samples", "2", "--temperature", "1", "--max-num-seqs", "3"]
    out, err = generate(*several)
    rows = [json.loads(line) for line in out.splitlines()]
    assert [(row["row"], row["sample"]) for row in rows] == [(n, s) for n in range(3) for s in range(2)]
    assert rows[0]["question"] == "What is 0 plus 0?" and rows[0]["prompt"].startswith("<system>Be brief.\n<user>")
    assert "6 answers, 30 tokens in " in err
    assert generate(*several, "--output", str(tmp_path / "new" / "out.jsonl"))[0] == ""
    assert (tmp_path / "new" / "out.jsonl").read_text() == out
    monkeypatch.setattr("sys.stdin.read", lambda size: "From a pipe\n", raising=False)
    assert json.loads(generate("--prompt", "-", "--json")[0])["question"] == "From a pipe"


ENGINE = ("--engine", "transformers", "--device", "cpu", "--max-tokens", 5)


@pytest.fixture(scope="module")
def vision_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
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


def vision_prepared(vision_run: Path, *options: Any) -> GenerationSettings:
    return prepare_generation(parse(GenerateOptions, list(map(str, ["--model", vision_run / "hf", *ENGINE, *options]))))


def test_images_come_first_or_at_their_marks(vision_run: Path) -> None:
    """The run's limit of 6 tokens makes 2 x 2 of the larger image."""
    images = ("--image", vision_run / "0.png", "--image", vision_run / "1.png")
    [first] = vision_prepared(vision_run, *images, "--prompt", "Which?").prompts
    [marked] = vision_prepared(
        vision_run, *images, "--prompt", "a<image>b<image>", "--image-max-pixels", 20 * CELL * CELL
    ).prompts
    assert first.text.endswith(
        "<|vision_end|><|vision_start|><|image_pad|><|vision_end|>Which?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert [image.size for image in first.images] == [(2, 2), (2, 2)]
    assert [image.size for image in marked.images] == [(2, 2), (4, 4)] and ">b<" in marked.text
    for prompt in (first, marked):
        places = [place for image in prompt.images for place in range(image.first, image.first + image.num_tokens)]
        assert [place for place, token in enumerate(prompt.prompt_ids) if token == IMAGE_PAD] == places


def test_rows_are_rendered_as_in_training(vision_run: Path) -> None:
    settings = vision_prepared(vision_run, "--file", vision_run / "rows.jsonl")
    data = DataConfig(task="jsonl", image_max_pixels=6 * CELL * CELL)
    trained = load_prompts(data, [vision_run / "rows.jsonl"], settings.model.tokenizer, "")
    asked = [(prompt.prompt_ids, prompt.images) for prompt in settings.prompts]
    assert asked == [(prompt.prompt_ids, prompt.images) for prompt in trained] and len(asked[0][1]) == 1


@pytest.mark.parametrize("has_torchvision", [False, True])
def test_the_command_that_a_run_prints_answers_as_transformers(
    vision_run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, has_torchvision: bool
) -> None:
    """Its server needs torchvision, without which no command to serve it is printed."""
    monkeypatch.setattr(console, "_is_installed", lambda package: has_torchvision)
    sinks = mock.Mock()
    Summary(vision_run, Config.model_validate({"model": {"path": vision_run / "hf"}})).show(sinks)
    *serves, line = [call.args[0] for call in sinks.note.call_args_list[1:]]
    assert [text.split(":")[0].strip() for text in serves] == ["to serve it", "and then"][: 1 + has_torchvision]
    assert ("where torchvision is installed" in serves[0]) == (not has_torchvision)
    asked = line.replace("FILE", str(vision_run / "1.png")).replace("TEXT", "Which?")
    argv = [*shlex.split(asked.partition(" generate ")[2]), *ENGINE, "--json"]
    assert generate(parse(GenerateOptions, list(map(str, argv))), lambda *_: 1) == 0
    [prompt], tokenizer = (
        vision_prepared(vision_run, "--image", vision_run / "1.png", "--prompt", "Which?").prompts,
        vision_prepared(vision_run, "--prompt", "?").model.tokenizer,
    )
    text = greedy_text(load(vision_run / "hf"), prompt, tokenizer)
    assert json.loads(capsys.readouterr().out)["completion"] == text


def test_a_chat_has_its_images_in_every_turn(
    vision_run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`<image>` in an answer, or in a later question, is text. The placeholder itself is refused, and the chat goes on."""
    settings = vision_prepared(vision_run, "--chat", "--image", vision_run / "0.png")
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
    assert "<image> 2 times, and the row has 1 images" in capsys.readouterr().err
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
        (["--prompt", "<image> <image>", "--image", "0.png"], "<image> 2 times, and the row has 1 images"),
        (["--prompt", "<|image_pad|>", "--image", "0.png"], "the prompt has '<|image_pad|>', which the chat template"),
        (["--prompt", "x", "--image", "0.png", "--format", "text"], "has images, which a chat template places; set --format"),
        (["--prompt", "x", "--image", "0.png", "--model", "text"], "--image 0.png: the model 'text' reads no images"),
        (["--file", "rows.jsonl", "--model", "text"], "has images, and the model reads none; set --model to one"),
        (["--prompt", "x", "--image", "0.png", "--max-tokens", "1020"], "exceeds the model's max_position_embeddings 1024"),
    ],
)  # fmt: skip
def test_mistakes_with_images_are_named(
    options: list[str],
    words: str,
    vision_run: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(vision_run)
    assert main(["generate", "--model", "hf", *map(str, ENGINE), *options]) == 2
    assert words in capsys.readouterr().err


def pieces(decode: Callable[[Sequence[int]], str], ids: Sequence[int]) -> list[str]:
    """Returns the texts written after each token, and at the end."""
    written: list[str] = []
    stream = TextStream(decode, written.append)
    shown = []
    for count in range(1, len(ids) + 1):
        stream.add(ids[:count])
        shown.append("".join(written))
        written.clear()
    assert stream.finish() == decode(ids)
    return [*shown, "".join(written)]


def test_a_character_is_shown_when_its_last_byte_is_there() -> None:
    tokenizer = byte_tokenizer()
    text = "a\u00e9\u65e5\U0001f389."  # of 1, 2, 3, 4 and 1 bytes
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == 11
    expected = ["a", "", "\u00e9", "", "", "\u65e5", "", "", "", "\U0001f389", ".", ""]
    assert pieces(tokenizer.decode, ids) == expected
    cut = pieces(tokenizer.decode, ids[:-2])  # within the last character but one
    assert "".join(cut[:-1]) == "a\u00e9\u65e5" and "".join(cut) == tokenizer.decode(ids[:-2])


def test_spaces_at_the_beginning_of_a_word_are_kept() -> None:
    """As decoders of SentencePiece: the first space of a text is dropped. Token 3 decodes to nothing, as special tokens do."""
    words = [" The", " sum", " is", "", " 4", "2"]

    def decode(ids: Sequence[int]) -> str:
        return "".join(words[one] for one in ids).removeprefix(" ")

    assert pieces(decode, range(6)) == ["The", " sum", " is", "", " 4", "2", ""]


def test_a_text_that_changes_later_is_shown_again() -> None:
    """Some tokenizers remove a space before a full stop that comes later."""
    assert pieces(lambda ids: "ab ."[: len(ids)].replace(" .", "."), range(4))[-1] == "\nab."


class OneByOne:
    """An engine of one request, which samples the answer's tokens, one per step. `steps` are called before their token."""

    def __init__(self, tokenizer: Any, answers: list[str], steps: dict[int, Callable[[], None]]) -> None:
        self._answers, self._steps, self._encode = iter(answers), steps, tokenizer
        self.prompts: list[str] = []
        self.limits: list[int] = []
        self.request: Request | None = None

    def submit(self, request_id: str, request: Request, version: int) -> None:
        assert self.request is None, "the request before has not ended"
        self.request, self._id, self._drawn = request, request_id, 0
        self.prompts.append(self._encode.decode(request.prompt_ids))
        self.limits.append(request.max_tokens)
        self._ids = self._encode(next(self._answers))["input_ids"]

    def poll(self) -> list[tuple[str, Completion]]:
        assert self.request is not None and self.request.stop is not None
        self._steps.get(self._drawn, lambda: None)()
        self._drawn += 1
        drawn = self._ids[: self._drawn]
        is_stopped = self.request.stop.completed_by(drawn)
        if not is_stopped and self._drawn < min(len(self._ids), self.request.max_tokens):
            return []
        reason = "stop" if is_stopped or self._drawn == len(self._ids) else "length"
        self.request = None
        return [(self._id, Completion(drawn, [0.0] * len(drawn), reason))]

    def abort(self, request_ids: Sequence[str]) -> None:
        assert list(request_ids) == [self._id]
        self.request = None


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("model") / "folder", max_position_embeddings=512)


def hold(
    model: Path, lines: Iterator[Any], answers: list[str], steps: dict[int, Callable[[], None]] | None = None
) -> OneByOne:
    """A chat of these lines. A line that is an exception is raised."""
    options = GenerateOptions(
        model=model, chat=True, max_length=120, max_tokens=40, system_prompt="Be brief.", stop=("###",)
    )
    settings = prepare_generation(options)
    engine = OneByOne(settings.model.tokenizer, answers, steps or {})
    asker: Any = FakeAsker(settings.model, engine)

    def read(prompt: str) -> str:
        line = next(lines)
        if isinstance(line, BaseException):
            raise line
        return str(line)

    hold_chat(settings, asker, read)
    return engine


def test_a_chat_remembers_until_a_new_one(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = iter(["Hello", "", "And?", "/new", "Again", "x" * 99, "/quit", "never"])
    engine = hold(model, lines, ["Hi \u00e9!", "Yes ### no", "z" * 50])
    first = "<system>Be brief.\n<user>Hello\n<assistant>"
    assert engine.prompts == [
        first,
        f"{first}Hi \u00e9!\n<user>And?\n<assistant>",
        "<system>Be brief.\n<user>Again\n<assistant>",
    ]
    assert next(lines) == "never" and engine.limits[0] == 40
    printed = capsys.readouterr()
    assert printed.out == f"Hi \u00e9!\nYes ###\n{'z' * 40}\n"
    assert "(cut after 40 tokens)" in printed.err
    assert "of at most 120 (--max-length); /new begins a new one" in printed.err


def test_ctrl_c_ends_the_answer_and_ctrl_d_the_chat(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It comes within the step that samples the fourth token: this token is still shown, and the engine goes on."""
    before = signal.getsignal(signal.SIGINT)
    lines = iter(["Count", "On", KeyboardInterrupt(), EOFError(), "never"])
    pressed = {3: lambda: signal.raise_signal(signal.SIGINT)}
    engine = hold(model, lines, ["1 2 3 4", "5"], pressed)
    assert engine.prompts[1].endswith("<assistant>1 2 \n<user>On\n<assistant>")
    printed = capsys.readouterr()
    assert printed.out == "1 2 \n5\n" and "(ended by Ctrl-C after 4 tokens)" in printed.err
    assert next(lines) == "never" and signal.getsignal(signal.SIGINT) is before
    assert printed.err.count(HELP) == 2  # at the start, and after Ctrl-C at an empty line


def test_a_second_ctrl_c_is_not_held_back(model: Path) -> None:
    """An engine that hangs in its step must not need a kill."""

    def twice() -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        hold(model, iter(["Count"]), ["1 2 3"], {1: twice})
