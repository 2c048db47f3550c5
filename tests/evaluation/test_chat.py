"""A chat with an engine that draws given tokens, one per step: what is shown when, what is remembered, and Ctrl-C."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from grpo_megatron.evaluation.chat import HELP, TextStream, hold_chat
from grpo_megatron.evaluation.generate_settings import prepare_generation
from grpo_megatron.evaluation.options import GenerateOptions
from grpo_megatron.rollout.engine import Completion, Request
from tests.evaluation.models import FakeAsker, byte_tokenizer, make_folder


def pieces(decode: Callable[[Sequence[int]], str], ids: Sequence[int]) -> list[str]:
    """What is written after each token, and at the end."""
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
    """An engine of one request, which draws the answer's tokens, one per step. `steps` are called before their token."""

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
    """It comes within the step that draws the fourth token: this token is still shown, and the engine goes on."""
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
