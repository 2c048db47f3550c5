"""The generated tasks of the agents' examples: answers that need a tool, for a tiny model with the quickstart's words.

A tiny model can neither compute the products nor know the facts. The warm-up teaches it to call the tool and to copy the
result, and then a habit of answering at once, which is nearly always wrong; few answers still begin with a call. GRPO,
rewarded for exact answers only, brings the calls back. Validation asks what occurs neither in the warm-up nor in training.
"""

from __future__ import annotations

import hashlib
import itertools
import operator
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from grpo_megatron.data.arithmetic import (
    NAMES,
    SEPARATOR,
    curriculum,
    different_rows,
    draw_pair,
    num_pairs,
    word_tokenizer,
    words_of,
    write_data,
)
from grpo_megatron.rewards.answers import TAGS

MARKS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{%- if message.role == 'tool' %}{{- '<tool_response>' + message.content + '</tool_response><sep>' }}"
    "{%- elif message.role != 'assistant' %}{{- message.content + '<sep>' }}"
    "{%- else %}{{- message.content or '' }}"
    "{%- for call in message.tool_calls or [] %}{{- '<tool_call>' + (call.function | tojson) + '</tool_call>' }}{%- endfor %}"
    "{{- '<eos>' }}{%- endif %}"
    "{%- endfor %}"
)


def build_tool_tokenizer(characters: str, tool: str, argument: str, texts: Iterable[str]) -> Any:
    """80 entries: single characters, whole words, tags, the pieces of a call; with the chat template."""
    call = ('{"name": "', tool, '", "arguments": {"', argument, '": "', '"}}')
    tokenizer = word_tokenizer(characters, [*TAGS[2:], SEPARATOR, *MARKS, *call, *words_of(texts)])
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def _call(tool: str, argument: str, value: str, result: str) -> list[dict[str, Any]]:
    """The turns of a call and of its result."""
    function = {"name": tool, "arguments": {argument: value}}
    call = {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": function}]}
    return [call, {"role": "tool", "content": result}]


def _answer(number: int) -> dict[str, Any]:
    return {"role": "assistant", "content": f"<answer>{number}</answer>"}


# -- The calculator example: a * b in word problems, a and b in 32..99, with a tool that computes ----------------------

SMALLEST, LARGEST = 32, 99  # all products have four digits
CONTAINERS = ("boxes", "bags", "rows", "carts")
CONTENTS = ("apples", "books", "coins", "pens", "cards", "eggs")
PRODUCT_QUESTIONS = (
    "{name} has {a} {container} with {b} {noun} each. How many {noun}?",
    "There are {a} {container} of {b} {noun}. How many {noun} has {name}?",
    "{name} fills {a} {container}, {b} {noun} in each. How many?",
)
CALLING_STEPS, BARE_STEPS, BARE_SHARE = 200, 40, 0.86  # the warm-up's curriculum


def product_demonstrations(seed: int) -> Iterator[dict[str, Any]]:
    """The warm-up's rows {"messages"}, in the order of the curriculum; read them without shuffling."""
    draw = random.Random(f"{seed}/sft")
    for bare, (question, a, b) in curriculum(
        draw, CALLING_STEPS, BARE_STEPS, BARE_SHARE, lambda: _product(draw, False)
    ):
        called = [] if bare else _call("calculator", "expression", f"{a}*{b}", str(a * b))
        yield {"messages": [{"role": "user", "content": question}, *called, _answer(a * b)]}


def product_problems(seed: int, count: int, held_out: bool) -> list[dict[str, str]]:
    """As `different_rows`, of products."""
    num_texts = len(PRODUCT_QUESTIONS) * len(NAMES) * len(CONTAINERS) * len(CONTENTS)
    total = num_pairs(range(SMALLEST, LARGEST + 1), held_out) * num_texts
    return different_rows(seed, count, held_out, total, _product, operator.mul)


def write_products(folder: Path, seed: int, num_train: int = 4096, num_val: int = 256) -> None:
    """Write sft.jsonl, train.jsonl, val.jsonl and tokenizer/ into the existing `folder`."""
    files = {
        "sft.jsonl": product_demonstrations(seed),
        "train.jsonl": product_problems(seed, num_train, held_out=False),
        "val.jsonl": product_problems(seed, num_val, held_out=True),
    }
    parts = itertools.product(PRODUCT_QUESTIONS, NAMES, CONTAINERS, CONTENTS)
    texts = (t.format(name=name, container=container, noun=noun, a=1, b=1) for t, name, container, noun in parts)
    write_data(folder, files, build_tool_tokenizer("0123456789*,.? ", "calculator", "expression", texts))


def _product(draw: random.Random, held_out: bool) -> tuple[str, int, int]:
    """(question, a, b)."""
    a, b = draw_pair(draw, SMALLEST, LARGEST, held_out)
    words = {"name": draw.choice(NAMES), "container": draw.choice(CONTAINERS), "noun": draw.choice(CONTENTS)}
    return draw.choice(PRODUCT_QUESTIONS).format(a=a, b=b, **words), a, b


# -- The search example: questions that two searches answer, over a small corpus made on the spot ----------------------
# corpus      "Person 481 works for firm 273."      "Firm 273 is in city 58."
# question    In which city does person 481 work?
# trajectory  search "person 481" -> search "city firm 273" -> <answer>58</answer>
#
# Validation asks about persons that occur neither in the warm-up nor in training, so their answers are in the corpus only.

PERSONS, FIRMS, CITIES = range(100, 700), range(700, 1000), range(10, 100)  # disjoint: a number names one thing
HOP_QUESTIONS = ("In which city does person {person} work?", "Person {person} works in a city. Which one?")
WORKS, LIES = "Person {person} works for firm {firm}.", "Firm {firm} is in city {city}."
FIRST_QUERY, SECOND_QUERY = "person {person}", "city firm {firm}"
SEARCHING_STEPS, GUESSING_STEPS, GUESS_SHARE = 300, 40, 0.82  # the warm-up's curriculum


class World:
    """Who works where, and where the firms are."""

    def __init__(self, seed: int) -> None:
        draw = random.Random(f"{seed}/world")
        self.firm_of = {person: draw.choice(FIRMS) for person in PERSONS}
        self.city_of = {firm: draw.choice(CITIES) for firm in FIRMS}

    def answer(self, person: int) -> int:
        """The city in which a person works."""
        return self.city_of[self.firm_of[person]]

    def passages(self) -> list[dict[str, str]]:
        """The corpus, one fact per passage."""
        works = [WORKS.format(person=person, firm=firm) for person, firm in self.firm_of.items()]
        lies = [LIES.format(firm=firm, city=city) for firm, city in self.city_of.items()]
        return [{"text": text} for text in works + lies]

    def searching_turns(self, person: int) -> list[dict[str, Any]]:
        """Two searches, with what the tool answers, and the answer."""
        facts = {"person": person, "firm": self.firm_of[person], "city": self.answer(person)}
        searches = [(FIRST_QUERY, WORKS), (SECOND_QUERY, LIES)]
        turns = [_call("search", "query", q.format(**facts), f"[1] {fact.format(**facts)}") for q, fact in searches]
        return [*itertools.chain(*turns), _answer(facts["city"])]


def _persons(held_out: bool) -> list[int]:
    """The persons that are kept for validation, or the others."""
    return [p for p in PERSONS if (hashlib.sha256(f"person {p}".encode()).digest()[0] % 10 == 0) == held_out]


def hop_demonstrations(seed: int) -> Iterator[dict[str, Any]]:
    """The warm-up's rows {"messages"}, in the order of the curriculum; read them without shuffling."""
    world, draw, persons = World(seed), random.Random(f"{seed}/sft"), _persons(held_out=False)
    drawn = curriculum(draw, SEARCHING_STEPS, GUESSING_STEPS, GUESS_SHARE, lambda: draw.choice(persons))
    for guess, person in drawn:
        guessed = [_answer(draw.choice(CITIES))]
        question = {"role": "user", "content": draw.choice(HOP_QUESTIONS).format(person=person)}
        yield {"messages": [question, *(guessed if guess else world.searching_turns(person))]}


def hop_problems(seed: int, count: int, held_out: bool) -> list[dict[str, str]]:
    """At most `count` different rows {"prompt", "answer"}, about held-out persons or the others."""
    world = World(seed)
    rows = [
        {"prompt": template.format(person=person), "answer": str(world.answer(person))}
        for person in _persons(held_out)
        for template in HOP_QUESTIONS
    ]
    random.Random(f"{seed}/{'val' if held_out else 'train'}").shuffle(rows)
    return rows[:count]


def write_two_hops(folder: Path, seed: int, num_train: int = 4096, num_val: int = 256) -> None:
    """Write corpus.jsonl, sft.jsonl, train.jsonl, val.jsonl and tokenizer/ into the existing `folder`."""
    files = {
        "corpus.jsonl": World(seed).passages(),
        "sft.jsonl": hop_demonstrations(seed),
        "train.jsonl": hop_problems(seed, num_train, held_out=False),
        "val.jsonl": hop_problems(seed, num_val, held_out=True),
    }
    texts = [text.format(person=1, firm=1, city=1) for text in (*HOP_QUESTIONS, WORKS, LIES, FIRST_QUERY, SECOND_QUERY)]
    write_data(folder, files, build_tool_tokenizer("0123456789[].,:? ", "search", "query", texts))
