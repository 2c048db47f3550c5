"""The quickstart's generated task: a + b in word problems, a and b in 1..99, for a tiny model on two CPU cores.

A worked response shows units, then tens with the carry: `<think>8+3=11,1+7+1=9</think><answer>91</answer>`. A bare
response is `<answer>91</answer>`. The warmup teaches the worked form, then a habit of bare answers, which are mostly
wrong. GRPO brings the worked form back: it changes the form of the answers and teaches no new arithmetic. Validation uses
10 % of the unordered pairs {a, b}, which never occur in the warmup or in training. A hash chooses them, so they do not
depend on the seed.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import operator
import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from grpo_megatron.config import ConfigError
from grpo_megatron.rewards.answers import TAGS

LARGEST = 99
NAMES = ("Tom", "Ann", "Ben", "Eva", "Max", "Zoe", "Leo", "Mia", "Sam", "Ida", "Kai", "Amy")
NOUNS = ("apples", "books", "coins", "pens", "cards", "eggs", "stamps", "shells")
SEPARATOR = "<sep>"  # ends the question
TEMPLATES = (
    "{name} has {a} {noun} and buys {b} more. How many?",
    "{name} had {a} {noun} and found {b} more. How many now?",
    "There are {a} {noun} here, {name} adds {b}. How many?",
)

WORKED_STEPS, MIXED_STEPS, ROWS_PER_STEP, BARE_SHARE = 360, 60, 32, 0.6  # the warmup's curriculum

SPECIAL_TOKENS = {"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>", "pad_token": "<pad>"}
CHARACTERS = "0123456789+=,.? "  # one token per character
VOCABULARY_SIZE = 80

T = TypeVar("T")
PairDraw = Callable[
    [random.Random, bool], tuple[str, int, int]
]  # draws (prompt, a, b), of a held-out pair or of another


def is_held_out(a: int, b: int) -> bool:
    """Whether the pair, in either order, is kept for validation."""
    low, high = sorted((a, b))
    return int.from_bytes(hashlib.sha256(f"{low}+{high}".encode()).digest()[:8], "big") % 10 == 0


def worked_response(a: int, b: int) -> str:
    """`<think>units,tens with the carry</think><answer>a + b</answer>`."""
    return STEP_SEPARATOR.join(_worked_steps(a, b))


def bare_response(a: int, b: int) -> str:
    """`<answer>a + b</answer>`."""
    return f"<answer>{a + b}</answer>"


def supervised_rows(seed: int) -> Iterator[dict[str, str]]:
    """The warmup's 420 x 32 rows {"prompt", "response"}, in the order of the curriculum; read them without shuffling."""
    draw = random.Random(f"{seed}/sft")
    for bare, (prompt, a, b) in curriculum(
        draw, WORKED_STEPS, MIXED_STEPS, BARE_SHARE, lambda: draw_problem(draw, False)
    ):
        yield {"prompt": prompt, "response": bare_response(a, b) if bare else worked_response(a, b)}


def curriculum(
    draw: random.Random, full_steps: int, mixed_steps: int, bare_share: float, problem: Callable[[], T]
) -> Iterator[tuple[bool, T]]:
    """(whether its answer is a bare one, problem) of each row of a warmup: after `full_steps`, `bare_share` of them are."""
    for row in range((full_steps + mixed_steps) * ROWS_PER_STEP):
        drawn = problem()
        yield row >= full_steps * ROWS_PER_STEP and draw.random() < bare_share, drawn


def written_rows(seed: int, count: int) -> Iterator[dict[str, str]]:
    """Yields `count` rows with the worked answer as "response" and "chosen", and a wrong bare one as "rejected"."""
    draw = random.Random(f"{seed}/written")
    for _ in range(count):
        prompt, a, b = draw_problem(draw, held_out=False)
        wrong = bare_response(a, b + draw.choice((-10, -1, 1, 10)))
        worked = worked_response(a, b)
        yield {"prompt": prompt, "response": worked, "chosen": worked, "rejected": wrong}


def problem_rows(seed: int, count: int, held_out: bool) -> list[dict[str, str]]:
    """As `different_rows`, of sums."""
    total = num_pairs(range(1, LARGEST + 1), held_out) * len(TEMPLATES) * len(NAMES) * len(NOUNS)
    return different_rows(seed, count, held_out, total, draw_problem, operator.add)


def num_pairs(numbers: range, held_out: bool) -> int:
    """How many pairs of these numbers are held out, or are not."""
    return sum(is_held_out(a, b) == held_out for a in numbers for b in numbers)


def different_rows(
    seed: int, count: int, held_out: bool, total: int, problem: PairDraw, solve: Callable[[int, int], int]
) -> list[dict[str, str]]:
    """`count` different rows {"prompt", "answer"}, from the held-out pairs or from the others.

    Raises ConfigError for more than half of the `total` that there are: drawing until all differ would become slow.
    """
    if not 0 < count <= total // 2:
        raise ConfigError(
            f"cannot draw {count} different {'held-out' if held_out else 'training'} rows; at most {total // 2}"
        )
    draw = random.Random(f"{seed}/{'val' if held_out else 'train'}")
    answers: dict[str, int] = {}
    while len(answers) < count:
        prompt, a, b = problem(draw, held_out)
        answers[prompt] = solve(a, b)
    return [{"prompt": prompt, "answer": str(answer)} for prompt, answer in answers.items()]


def build_tokenizer() -> Any:
    """A transformers tokenizer of 80 entries: whole words, single digits, tags. Decoding returns the text exactly."""
    words = itertools.product(TEMPLATES, NAMES, NOUNS)
    texts = (template.format(name=name, noun=noun, a=1, b=1) for template, name, noun in words)
    return word_tokenizer(CHARACTERS, [*TAGS, SEPARATOR, *words_of(texts)])


def word_tokenizer(characters: str, tokens: Sequence[str]) -> Any:
    """A transformers tokenizer of 80 entries: one token per character of `characters`, and each of `tokens`.

    The class is Qwen2Tokenizer and every word is an added token. A WordLevel model would not work: for `model_type`
    qwen2, transformers 5 loads Qwen2Tokenizer whatever class the folder names, and all words would be lost without an
    error. Characters outside the vocabulary are dropped.
    """
    from transformers import AddedToken, Qwen2Tokenizer

    letters = characters.replace(" ", "\u0120")  # how byte-level BPE writes a space
    tokenizer = Qwen2Tokenizer(vocab={c: index for index, c in enumerate(letters)}, merges=[], **SPECIAL_TOKENS)
    num_unused = VOCABULARY_SIZE - len(tokenizer) - len(tokens)
    assert num_unused >= 0
    unused = [f"<unused{index}>" for index in range(num_unused)]  # so that every id the model can draw decodes
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in [*tokens, *unused]])
    return tokenizer


def words_of(texts: Iterable[str]) -> list[str]:
    """The words of all texts, each with the space that precedes it."""
    return sorted({word for text in texts for word in re.findall(" ?[A-Za-z]+", text)})


def write_task(folder: Path, seed: int, num_train: int = 4096, num_val: int = 256) -> None:
    """Write sft.jsonl, train.jsonl, val.jsonl, written.jsonl and tokenizer/ into the existing `folder`."""
    files = {
        "sft.jsonl": supervised_rows(seed),
        "train.jsonl": problem_rows(seed, num_train, held_out=False),
        "val.jsonl": problem_rows(seed, num_val, held_out=True),
        "written.jsonl": written_rows(seed, num_val),
    }
    write_data(folder, files, build_tokenizer())


def write_data(folder: Path, files: Mapping[str, Iterable[Mapping[str, Any]]], tokenizer: Any) -> None:
    """Write `files` (name -> rows) and tokenizer/ into the existing `folder`."""
    for name, rows in files.items():
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    tokenizer.save_pretrained(folder / "tokenizer")


def draw_problem(draw: random.Random, held_out: bool) -> tuple[str, int, int]:
    """Draws (prompt, a, b)."""
    a, b = draw_pair(draw, 1, LARGEST, held_out)
    text = draw.choice(TEMPLATES).format(name=draw.choice(NAMES), noun=draw.choice(NOUNS), a=a, b=b)
    return text + SEPARATOR, a, b


def draw_pair(draw: random.Random, smallest: int, largest: int, held_out: bool) -> tuple[int, int]:
    """Draws two numbers of the range, until they are a held-out pair, or are not."""
    while True:
        a, b = draw.randint(smallest, largest), draw.randint(smallest, largest)
        if is_held_out(a, b) == held_out:
            return a, b


# -- Generated feedback on the quickstart's additions: what the examples of reward models learn from -------------------
# A worked answer has two steps, units and tens: `<think>8+3=11` and `1+7+1=9</think><answer>91</answer>`, joined by a comma.
# Three of four bad answers are bare and wrong, one step: `<answer>92</answer>`. The others are worked, and the sum of one step is
# off by one. What follows is computed from the wrong sum, so that only the wrong step itself is wrong. (A tiny model learns soon
# to tell the bare ones, and slowly to check the sums.)
#
# pairs.jsonl, pairs_val.jsonl    {"prompt", "chosen", "rejected"}: the worked answer, and a bad one
# steps.jsonl, steps_val.jsonl    {"prompt", "completions", "labels"}: the steps of a good answer or, as often, of a bad one
#
# The held-out files use sums that the others never have.

STEP_SEPARATOR = ","
BARE_BAD_SHARE = 0.75  # of the bad answers


def pair_rows(seed: int, count: int, *, held_out: bool) -> Iterator[dict[str, Any]]:
    """`count` rows {"prompt", "chosen", "rejected"}."""
    draw = random.Random(f"{seed}/pairs/{held_out}")
    for _ in range(count):
        prompt, a, b = draw_problem(draw, held_out)
        rejected = STEP_SEPARATOR.join(_bad_answer(a, b, draw)[0])
        yield {"prompt": prompt, "chosen": worked_response(a, b), "rejected": rejected}


def step_rows(seed: int, count: int, *, held_out: bool) -> Iterator[dict[str, Any]]:
    """`count` rows {"prompt", "completions", "labels"}."""
    draw = random.Random(f"{seed}/steps/{held_out}")
    for _ in range(count):
        prompt, a, b = draw_problem(draw, held_out)
        is_bad = draw.random() < 0.5
        steps, labels = _bad_answer(a, b, draw) if is_bad else (_worked_steps(a, b), [True, True])
        yield {"prompt": prompt, "completions": steps, "labels": labels}


def write_feedback(folder: Path, seed: int, num_train: int = 4096, num_val: int = 256) -> None:
    """Write the four files and tokenizer/ into the existing `folder`."""
    files = {
        "pairs.jsonl": pair_rows(seed, num_train, held_out=False),
        "pairs_val.jsonl": pair_rows(seed, num_val, held_out=True),
        "steps.jsonl": step_rows(seed, num_train, held_out=False),
        "steps_val.jsonl": step_rows(seed, num_val, held_out=True),
    }
    write_data(folder, files, build_tokenizer())


def _bad_answer(a: int, b: int, draw: random.Random) -> tuple[list[str], list[bool]]:
    """The steps, and which of them are right."""
    if draw.random() < BARE_BAD_SHARE:
        return [bare_response(a, b + draw.choice((-10, -1, 1, 10)))], [False]
    if draw.random() < 0.5:
        return _worked_steps(a, b, units_error=draw.choice((-1, 1))), [False, True]
    return _worked_steps(a, b, tens_error=draw.choice((-1, 1))), [True, False]


def _worked_steps(a: int, b: int, *, units_error: int = 0, tens_error: int = 0) -> list[str]:
    """The two steps. A sum that an error would make negative is one too large instead."""
    units = abs(a % 10 + b % 10 + units_error)
    tens = abs(a // 10 + b // 10 + units // 10 + tens_error)
    return [
        f"<think>{a % 10}+{b % 10}={units}",
        f"{a // 10}+{b // 10}+{units // 10}={tens}</think>{bare_response(10 * tens, units % 10)}",
    ]
