"""The calculator example's generated task: a * b in word problems, a and b in 32..99, with a tool that computes.

A tiny model cannot compute such products. The warm-up teaches it to call the calculator and to copy the result, and then
a habit of answering at once, which is nearly always wrong; few answers still begin with a call. GRPO, rewarded for exact
answers only, brings the calls back. Validation uses pairs {a, b} that never occur elsewhere (data/arithmetic.py).
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from grpo_megatron.data.arithmetic import (
    NAMES,
    SEPARATOR,
    different_rows,
    is_held_out,
    num_pairs,
    word_tokenizer,
    words_of,
    write_data,
)
from grpo_megatron.rewards.answers import TAGS

SMALLEST, LARGEST = 32, 99  # all products have four digits
CONTAINERS = ("boxes", "bags", "rows", "carts")
CONTENTS = ("apples", "books", "coins", "pens", "cards", "eggs")
PRODUCT_QUESTIONS = (
    "{name} has {a} {container} with {b} {noun} each. How many {noun}?",
    "There are {a} {container} of {b} {noun}. How many {noun} has {name}?",
    "{name} fills {a} {container}, {b} {noun} in each. How many?",
)
# The tokens of a call, except those of its expression.
CALCULATOR_CALL = ('{"name": "', "calculator", '", "arguments": {"', "expression", '": "', '"}}')
MARKS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
PRODUCT_CHARACTERS = "0123456789*,.? "  # one token per character
CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{%- if message.role == 'tool' %}{{- '<tool_response>' + message.content + '</tool_response><sep>' }}"
    "{%- elif message.role != 'assistant' %}{{- message.content + '<sep>' }}"
    "{%- else %}{{- message.content or '' }}"
    "{%- for call in message.tool_calls or [] %}{{- '<tool_call>' + (call.function | tojson) + '</tool_call>' }}{%- endfor %}"
    "{{- '<eos>' }}{%- endif %}"
    "{%- endfor %}"
)

CALLING_STEPS, MIXED_STEPS, ROWS_PER_STEP, BARE_SHARE = 200, 40, 32, 0.86  # the warm-up's curriculum


def product_demonstrations(seed: int) -> Iterator[dict[str, Any]]:
    """The warm-up's rows {"messages"}, in the order of the curriculum; read them without shuffling."""
    draw = random.Random(f"{seed}/sft")
    for step in range(CALLING_STEPS + MIXED_STEPS):
        for _ in range(ROWS_PER_STEP):
            question, a, b = _problem(draw, held_out=False)
            bare = step >= CALLING_STEPS and draw.random() < BARE_SHARE
            yield {
                "messages": [
                    {"role": "user", "content": question},
                    *(bare_turns(a, b) if bare else calling_turns(a, b)),
                ]
            }


def bare_turns(a: int, b: int) -> list[dict[str, Any]]:
    """The product at once."""
    return [{"role": "assistant", "content": _answer(a * b)}]


def calling_turns(a: int, b: int) -> list[dict[str, Any]]:
    """A call of the calculator, its result, and the answer."""
    function = {"name": "calculator", "arguments": {"expression": f"{a}*{b}"}}
    return [
        {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": function}]},
        {"role": "tool", "content": str(a * b)},
        {"role": "assistant", "content": _answer(a * b)},
    ]


def product_problems(seed: int, count: int, held_out: bool) -> list[dict[str, str]]:
    """`count` different rows {"prompt", "answer"}, from the held-out pairs or from the others.

    Raises ConfigError when fewer than 2 x `count` rows exist.
    """
    num_texts = len(PRODUCT_QUESTIONS) * len(NAMES) * len(CONTAINERS) * len(CONTENTS)

    def problem(draw: random.Random) -> tuple[str, int]:
        question, a, b = _problem(draw, held_out)
        return question, a * b

    total = num_pairs(range(SMALLEST, LARGEST + 1), held_out) * num_texts
    return different_rows(seed, count, held_out, total, problem)


def build_product_tokenizer() -> Any:
    """80 entries: whole words, single digits, tags, the pieces of a call; with the chat template."""
    parts = itertools.product(PRODUCT_QUESTIONS, NAMES, CONTAINERS, CONTENTS)
    texts = (t.format(name=name, container=container, noun=noun, a=1, b=1) for t, name, container, noun in parts)
    tokenizer = word_tokenizer(PRODUCT_CHARACTERS, [*TAGS[2:], SEPARATOR, *MARKS, *CALCULATOR_CALL, *words_of(texts)])
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def write_products(folder: Path, seed: int, num_train: int = 4096, num_val: int = 256) -> None:
    """Write sft.jsonl, train.jsonl, val.jsonl and tokenizer/ into the existing `folder`."""
    files = {
        "sft.jsonl": product_demonstrations(seed),
        "train.jsonl": product_problems(seed, num_train, held_out=False),
        "val.jsonl": product_problems(seed, num_val, held_out=True),
    }
    write_data(folder, files, build_product_tokenizer())


def _problem(draw: random.Random, held_out: bool) -> tuple[str, int, int]:
    """(question, a, b)."""
    while True:
        a, b = draw.randint(SMALLEST, LARGEST), draw.randint(SMALLEST, LARGEST)
        if is_held_out(a, b) == held_out:
            break
    words = {"name": draw.choice(NAMES), "container": draw.choice(CONTAINERS), "noun": draw.choice(CONTENTS)}
    return draw.choice(PRODUCT_QUESTIONS).format(a=a, b=b, **words), a, b


def _answer(number: int) -> str:
    return f"<answer>{number}</answer>"
