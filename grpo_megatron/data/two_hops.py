"""The search example's generated task: questions that two searches answer, over a small corpus made on the spot.

    corpus      "Person 481 works for firm 273."      "Firm 273 is in city 58."
    question    In which city does person 481 work?
    trajectory  search "person 481" -> search "city firm 273" -> <answer>58</answer>

The warm-up teaches the two searches, and then a habit of guessing at once. GRPO brings the searches back. Validation asks
about persons that occur neither in the warm-up nor in training, so their answers are in the corpus only.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from grpo_megatron.data.arithmetic import SEPARATOR, word_tokenizer, words_of, write_data
from grpo_megatron.data.products import CHAT_TEMPLATE, MARKS
from grpo_megatron.rewards.answers import TAGS

PERSONS, FIRMS, CITIES = range(100, 700), range(700, 1000), range(10, 100)  # disjoint: a number names one thing
HOP_QUESTIONS = ("In which city does person {person} work?", "Person {person} works in a city. Which one?")
WORKS, LIES = "Person {person} works for firm {firm}.", "Firm {firm} is in city {city}."
FIRST_QUERY, SECOND_QUERY = "person {person}", "city firm {firm}"
# The tokens of a call, except those of its query.
SEARCH_CALL = ('{"name": "', "search", '", "arguments": {"', "query", '": "', '"}}')
HOP_CHARACTERS = "0123456789[].,:? "  # one token per character

SEARCHING_STEPS, MIXED_STEPS, ROWS_PER_STEP, GUESS_SHARE = 300, 40, 32, 0.82  # the warm-up's curriculum


class World:
    """Who works where, and where the firms are."""

    def __init__(self, seed: int) -> None:
        draw = random.Random(f"{seed}/world")
        self.firm_of = {person: draw.choice(FIRMS) for person in PERSONS}
        self.city_of = {firm: draw.choice(CITIES) for firm in FIRMS}

    def answer(self, person: int) -> int:
        return self.city_of[self.firm_of[person]]

    def passages(self) -> list[dict[str, str]]:
        """The corpus, one fact per passage."""
        works = [WORKS.format(person=person, firm=firm) for person, firm in self.firm_of.items()]
        lies = [LIES.format(firm=firm, city=city) for firm, city in self.city_of.items()]
        return [{"text": text} for text in works + lies]

    def searching_turns(self, person: int) -> list[dict[str, Any]]:
        """Two searches, with what the tool answers, and the answer."""
        firm, city = self.firm_of[person], self.answer(person)
        return [
            _call(FIRST_QUERY.format(person=person)),
            {"role": "tool", "content": f"[1] {WORKS.format(person=person, firm=firm)}"},
            _call(SECOND_QUERY.format(firm=firm)),
            {"role": "tool", "content": f"[1] {LIES.format(firm=firm, city=city)}"},
            {"role": "assistant", "content": _tagged(city)},
        ]


def is_held_out_person(person: int) -> bool:
    """Whether the person is kept for validation."""
    return hashlib.sha256(f"person {person}".encode()).digest()[0] % 10 == 0


def hop_demonstrations(seed: int) -> Iterator[dict[str, Any]]:
    """The warm-up's rows {"messages"}, in the order of the curriculum; read them without shuffling."""
    world, draw = World(seed), random.Random(f"{seed}/sft")
    persons = [person for person in PERSONS if not is_held_out_person(person)]
    for step in range(SEARCHING_STEPS + MIXED_STEPS):
        for _ in range(ROWS_PER_STEP):
            person = draw.choice(persons)
            guess = step >= SEARCHING_STEPS and draw.random() < GUESS_SHARE
            guessed = [{"role": "assistant", "content": _tagged(draw.choice(CITIES))}]
            question = {"role": "user", "content": draw.choice(HOP_QUESTIONS).format(person=person)}
            yield {"messages": [question, *(guessed if guess else world.searching_turns(person))]}


def hop_problems(seed: int, count: int, held_out: bool) -> list[dict[str, str]]:
    """At most `count` different rows {"prompt", "answer"}, about held-out persons or the others."""
    world = World(seed)
    persons = [person for person in PERSONS if is_held_out_person(person) == held_out]
    rows = [
        {"prompt": template.format(person=person), "answer": str(world.answer(person))}
        for person in persons
        for template in HOP_QUESTIONS
    ]
    random.Random(f"{seed}/{'val' if held_out else 'train'}").shuffle(rows)
    return rows[:count]


def build_hop_tokenizer() -> Any:
    """80 entries: whole words, single digits, tags, the pieces of a call; with the calculator example's chat template."""
    texts = [text.format(person=1, firm=1, city=1) for text in (*HOP_QUESTIONS, WORKS, LIES, FIRST_QUERY, SECOND_QUERY)]
    tokenizer = word_tokenizer(HOP_CHARACTERS, [*TAGS[2:], SEPARATOR, *MARKS, *SEARCH_CALL, *words_of(texts)])
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def write_two_hops(folder: Path, seed: int, num_train: int = 4096, num_val: int = 256) -> None:
    """Write corpus.jsonl, sft.jsonl, train.jsonl, val.jsonl and tokenizer/ into the existing `folder`."""
    files = {
        "corpus.jsonl": World(seed).passages(),
        "sft.jsonl": hop_demonstrations(seed),
        "train.jsonl": hop_problems(seed, num_train, held_out=False),
        "val.jsonl": hop_problems(seed, num_val, held_out=True),
    }
    write_data(folder, files, build_hop_tokenizer())


def _call(query: str) -> dict[str, Any]:
    function = {"name": "search", "arguments": {"query": query}}
    return {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": function}]}


def _tagged(city: int) -> str:
    return f"<answer>{city}</answer>"
