"""Generated data for tiny models on two CPU cores: the quickstart's, the reward models' and the agents' examples.

The quickstart's task is a + b in word problems, a and b in 1..99. A worked response shows units, then tens with the carry:
`<think>8+3=11,1+7+1=9</think><answer>91</answer>`. A bare response is `<answer>91</answer>`. The warmup teaches the worked form,
then a habit of bare answers, which are mostly wrong. GRPO brings the worked form back: it changes the form of the answers and
teaches no new arithmetic. Validation uses 10 % of the unordered pairs {a, b}, which never occur in the warmup or in training. A
hash chooses them, so they do not depend on the seed.
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
from typing import Any, NamedTuple, TypeVar

from grpo_megatron.config import ConfigError
from grpo_megatron.rewards.answers import TAGS

LARGEST = 99
NAMES = ("Tom", "Ann", "Ben", "Eva", "Max", "Zoe", "Leo", "Mia", "Sam", "Ida", "Kai", "Amy")
NOUNS = ("apples", "books", "coins", "pens", "cards", "eggs", "stamps", "shells")
SEPARATOR = "<sep>"  # ends the question
SUM_QUESTIONS = (
    "{name} has {a} {noun} and buys {b} more. How many?",
    "{name} had {a} {noun} and found {b} more. How many now?",
    "There are {a} {noun} here, {name} adds {b}. How many?",
)
WORKED_STEPS, MIXED_STEPS, ROWS_PER_STEP, BARE_SHARE = 360, 60, 32, 0.6  # the warmup's curriculum
STEP_SEPARATOR = ","
BARE_BAD_SHARE = 0.75  # of the bad answers

SPECIAL_TOKENS = {"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>", "pad_token": "<pad>"}
VOCABULARY_SIZE = 80

T = TypeVar("T")
PairDraw = Callable[[random.Random, bool], tuple[str, int, int]]  # (prompt, a, b), of a held-out pair or of another
Rows = Iterable[Mapping[str, Any]]


# -- The quickstart's sums ---------------------------------------------------------------------------------------------


def is_held_out(a: int, b: int) -> bool:
    """Says if the pair, in either order, is kept for validation."""
    low, high = sorted((a, b))
    return int.from_bytes(hashlib.sha256(f"{low}+{high}".encode()).digest()[:8], "big") % 10 == 0


def worked_response(a: int, b: int) -> str:
    """Writes `<think>units,tens with the carry</think><answer>a + b</answer>`."""
    return STEP_SEPARATOR.join(_worked_steps(a, b))


def bare_response(a: int, b: int) -> str:
    """Writes `<answer>a + b</answer>`."""
    return f"<answer>{a + b}</answer>"


def _worked_steps(a: int, b: int, *, units_error: int = 0, tens_error: int = 0) -> list[str]:
    """Writes the two steps. A sum that an error would make negative is one too large instead."""
    units = abs(a % 10 + b % 10 + units_error)
    tens = abs(a // 10 + b // 10 + units // 10 + tens_error)
    return [
        f"<think>{a % 10}+{b % 10}={units}",
        f"{a // 10}+{b // 10}+{units // 10}={tens}</think>{bare_response(10 * tens, units % 10)}",
    ]


def _sum(draw: random.Random, held_out: bool) -> tuple[str, int, int]:
    a, b = _pair(draw, 1, LARGEST, held_out)
    text = draw.choice(SUM_QUESTIONS).format(name=draw.choice(NAMES), noun=draw.choice(NOUNS), a=a, b=b)
    return text + SEPARATOR, a, b


def _pair(draw: random.Random, smallest: int, largest: int, held_out: bool) -> tuple[int, int]:
    """Samples two numbers of the range until they are a held-out pair, or are not."""
    while True:
        a, b = draw.randint(smallest, largest), draw.randint(smallest, largest)
        if is_held_out(a, b) == held_out:
            return a, b


def supervised_rows(seed: int) -> Iterator[dict[str, str]]:
    """Makes the warmup's 420 x 32 rows {"prompt", "response"}, in the order of the curriculum; read them without shuffling."""
    draw = random.Random(f"{seed}/sft")
    drawn = _curriculum(draw, WORKED_STEPS, MIXED_STEPS, BARE_SHARE, lambda: _sum(draw, False))
    for bare, (prompt, a, b) in drawn:
        yield {"prompt": prompt, "response": bare_response(a, b) if bare else worked_response(a, b)}


def _curriculum(
    draw: random.Random, full_steps: int, mixed_steps: int, bare_share: float, problem: Callable[[], T]
) -> Iterator[tuple[bool, T]]:
    """Yields (is the answer a bare one, problem) of each row of a warmup: after `full_steps`, `bare_share` of them are."""
    for row in range((full_steps + mixed_steps) * ROWS_PER_STEP):
        drawn = problem()
        yield row >= full_steps * ROWS_PER_STEP and draw.random() < bare_share, drawn


def written_rows(seed: int, count: int) -> Iterator[dict[str, str]]:
    """Yields `count` rows with the worked answer as "response" and "chosen", and a wrong bare one as "rejected"."""
    draw = random.Random(f"{seed}/written")
    for _ in range(count):
        prompt, a, b = _sum(draw, False)
        wrong = bare_response(a, b + draw.choice((-10, -1, 1, 10)))
        worked = worked_response(a, b)
        yield {"prompt": prompt, "response": worked, "chosen": worked, "rejected": wrong}


def problem_rows(seed: int, count: int, held_out: bool) -> list[dict[str, str]]:
    """Makes `count` different rows {"prompt", "answer"} of sums, held out or not. Raises ConfigError."""
    texts = len(SUM_QUESTIONS) * len(NAMES) * len(NOUNS)
    return _different_rows(seed, count, held_out, range(1, LARGEST + 1), texts, _sum, operator.add)


def _different_rows(
    seed: int,
    count: int,
    held_out: bool,
    numbers: range,
    num_texts: int,
    problem: PairDraw,
    solve: Callable[[int, int], int],
) -> list[dict[str, str]]:
    """Raises ConfigError for more than half of the rows that there are: drawing until all differ would become slow."""
    total = sum(is_held_out(a, b) == held_out for a in numbers for b in numbers) * num_texts
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


# -- Generated feedback on the sums: what the examples of reward models learn from -------------------------------------
# A worked answer has two steps, units and tens: `<think>8+3=11` and `1+7+1=9</think><answer>91</answer>`, joined by a comma.
# Three of four bad answers are bare and wrong, one step: `<answer>92</answer>`. The others are worked, and the sum of one step is
# off by one. What follows is computed from the wrong sum, so that only the wrong step itself is wrong. (A tiny model learns soon
# to tell the bare ones, and slowly to check the sums.) The held-out files use sums that the others never have.


def pair_rows(seed: int, count: int, *, held_out: bool) -> Iterator[dict[str, Any]]:
    """Makes `count` rows {"prompt", "chosen", "rejected"}: the worked answer, and a bad one."""
    draw = random.Random(f"{seed}/pairs/{held_out}")
    for _ in range(count):
        prompt, a, b = _sum(draw, held_out)
        rejected = STEP_SEPARATOR.join(_bad_answer(a, b, draw)[0])
        yield {"prompt": prompt, "chosen": worked_response(a, b), "rejected": rejected}


def step_rows(seed: int, count: int, *, held_out: bool) -> Iterator[dict[str, Any]]:
    """Makes `count` rows {"prompt", "completions", "labels"}: the steps of a good answer or, as often, of a bad one."""
    draw = random.Random(f"{seed}/steps/{held_out}")
    for _ in range(count):
        prompt, a, b = _sum(draw, held_out)
        is_bad = draw.random() < 0.5
        steps, labels = _bad_answer(a, b, draw) if is_bad else (_worked_steps(a, b), [True, True])
        yield {"prompt": prompt, "completions": steps, "labels": labels}


def _bad_answer(a: int, b: int, draw: random.Random) -> tuple[list[str], list[bool]]:
    """Makes the steps, and says which of them are right."""
    if draw.random() < BARE_BAD_SHARE:
        return [bare_response(a, b + draw.choice((-10, -1, 1, 10)))], [False]
    if draw.random() < 0.5:
        return _worked_steps(a, b, units_error=draw.choice((-1, 1))), [False, True]
    return _worked_steps(a, b, tens_error=draw.choice((-1, 1))), [True, False]


# -- The agents' examples: answers that need a tool --------------------------------------------------------------------
# A tiny model can neither compute the products nor know the facts. The warm-up teaches it to call the tool and to copy the
# result, and then a habit of answering at once, which is nearly always wrong; few answers still begin with a call. GRPO,
# rewarded for exact answers only, brings the calls back. Validation asks what occurs neither in the warm-up nor in training.
#
# The calculator example: a * b in word problems, a and b in 32..99, so that all products have four digits.

FACTORS = range(32, 100)
CONTAINERS = ("boxes", "bags", "rows", "carts")
CONTENTS = ("apples", "books", "coins", "pens", "cards", "eggs")
PRODUCT_QUESTIONS = (
    "{name} has {a} {container} with {b} {noun} each. How many {noun}?",
    "There are {a} {container} of {b} {noun}. How many {noun} has {name}?",
    "{name} fills {a} {container}, {b} {noun} in each. How many?",
)
CALLING_STEPS, ANSWERING_STEPS, ANSWERING_SHARE = 200, 40, 0.86  # the warm-up's curriculum


def product_demonstrations(seed: int) -> Iterator[dict[str, Any]]:
    """Makes the warm-up's rows {"messages"}, in the order of the curriculum; read them without shuffling."""
    draw = random.Random(f"{seed}/sft")
    drawn = _curriculum(draw, CALLING_STEPS, ANSWERING_STEPS, ANSWERING_SHARE, lambda: _product(draw, False))
    for bare, (question, a, b) in drawn:
        called = [] if bare else _call("calculator", "expression", f"{a}*{b}", str(a * b))
        yield {"messages": [{"role": "user", "content": question}, *called, _answer(a * b)]}


def product_problems(seed: int, count: int, held_out: bool) -> list[dict[str, str]]:
    """As `problem_rows`, of products."""
    texts = len(PRODUCT_QUESTIONS) * len(NAMES) * len(CONTAINERS) * len(CONTENTS)
    return _different_rows(seed, count, held_out, FACTORS, texts, _product, operator.mul)


def _product(draw: random.Random, held_out: bool) -> tuple[str, int, int]:
    a, b = _pair(draw, FACTORS[0], FACTORS[-1], held_out)
    words = {"name": draw.choice(NAMES), "container": draw.choice(CONTAINERS), "noun": draw.choice(CONTENTS)}
    return draw.choice(PRODUCT_QUESTIONS).format(a=a, b=b, **words), a, b


def _call(tool: str, argument: str, value: str, result: str) -> list[dict[str, Any]]:
    """Makes the turns of a call and of its result."""
    function = {"name": tool, "arguments": {argument: value}}
    call = {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": function}]}
    return [call, {"role": "tool", "content": result}]


def _answer(number: int) -> dict[str, Any]:
    return {"role": "assistant", "content": f"<answer>{number}</answer>"}


# The search example: questions that two searches answer, over a small corpus made on the spot
#
#     corpus      "Person 481 works for firm 273."      "Firm 273 is in city 58."
#     question    In which city does person 481 work?
#     trajectory  search "person 481" -> search "city firm 273" -> <answer>58</answer>
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
        """Returns the city in which a person works."""
        return self.city_of[self.firm_of[person]]

    def passages(self) -> list[dict[str, str]]:
        """Returns the corpus, one fact per passage."""
        works = [WORKS.format(person=person, firm=firm) for person, firm in self.firm_of.items()]
        return [{"text": text} for text in works + [LIES.format(firm=f, city=c) for f, c in self.city_of.items()]]

    def searching_turns(self, person: int) -> list[dict[str, Any]]:
        """Makes two searches, with what the tool answers, and the answer."""
        facts = {"person": person, "firm": self.firm_of[person], "city": self.answer(person)}
        searches = [(FIRST_QUERY, WORKS), (SECOND_QUERY, LIES)]
        turns = [_call("search", "query", q.format(**facts), f"[1] {fact.format(**facts)}") for q, fact in searches]
        return [*itertools.chain(*turns), _answer(facts["city"])]


def _persons(held_out: bool) -> list[int]:
    """Returns the persons that are kept for validation, or the others."""
    return [p for p in PERSONS if (hashlib.sha256(f"person {p}".encode()).digest()[0] % 10 == 0) == held_out]


def hop_demonstrations(seed: int) -> Iterator[dict[str, Any]]:
    """Makes the warm-up's rows {"messages"}, in the order of the curriculum; read them without shuffling."""
    world, draw, persons = World(seed), random.Random(f"{seed}/sft"), _persons(held_out=False)
    drawn = _curriculum(draw, SEARCHING_STEPS, GUESSING_STEPS, GUESS_SHARE, lambda: draw.choice(persons))
    for guess, person in drawn:
        guessed = [_answer(draw.choice(CITIES))]
        question = {"role": "user", "content": draw.choice(HOP_QUESTIONS).format(person=person)}
        yield {"messages": [question, *(guessed if guess else world.searching_turns(person))]}


def hop_problems(seed: int, count: int, held_out: bool) -> list[dict[str, str]]:
    """Makes at most `count` different rows {"prompt", "answer"}, about held-out persons or the others."""
    world = World(seed)
    rows = [
        {"prompt": question.format(person=person), "answer": str(world.answer(person))}
        for person, question in itertools.product(_persons(held_out), HOP_QUESTIONS)
    ]
    random.Random(f"{seed}/{'val' if held_out else 'train'}").shuffle(rows)
    return rows[:count]


# The shell example: task folders in Harbor's format, whose agent copies a number from a file to another
#
#     instruction  Copy the number in file 481 to out.
#     trajectory   bash "cat 481" -> bash "echo 58 >out" -> <answer>58</answer>
#
# The verifier reads `out`. Validation has files that occur neither in the warm-up nor in training.

COPY = "Copy the number in file {person} to out."
READ, WRITE = "cat {file}", "echo {number} >out"
SHELL_STEPS, SHELL_GUESS_SHARE = 360, 0.7
SHELL_TASK = 'version = "1.0"\n\n[agent]\ntimeout_sec = 20.0\n\n[verifier]\ntimeout_sec = 10.0\n'
SHELL_TEST = 'test "$(cat out)" = {number} && reward=1 || reward=0\necho $reward > /logs/verifier/reward.txt\n'


def shell_demonstrations(seed: int) -> Iterator[dict[str, Any]]:
    """Makes the warm-up's rows {"messages"}, in the order of the curriculum; read them without shuffling."""
    draw, files = random.Random(f"{seed}/shell"), _persons(held_out=False)
    drawn = _curriculum(draw, SHELL_STEPS, GUESSING_STEPS, SHELL_GUESS_SHARE, lambda: draw.choice(files))
    for guess, file in drawn:
        number = draw.choice(CITIES)
        read = [] if guess else _call("bash", "command", READ.format(file=file), str(number))
        wrote = _call("bash", "command", WRITE.format(number=number), "")
        yield {"messages": [{"role": "user", "content": COPY.format(person=file)}, *read, *wrote, _answer(number)]}


def shell_tasks(seed: int, count: int, held_out: bool) -> Iterator[dict[str, str]]:
    """Makes at most `count` task folders, each as path -> text."""
    draw = random.Random(f"{seed}/{held_out}")
    for file in _persons(held_out)[:count]:
        number = draw.choice(CITIES)
        files = {
            "task.toml": SHELL_TASK,
            "instruction.md": COPY.format(person=file),
            "environment/Dockerfile": "FROM debian:stable-slim\nWORKDIR /app\nCOPY files/ /app/\n",
            f"environment/files/{file}": f"{number}\n",
            "tests/test.sh": SHELL_TEST.format(number=number),
        }
        yield {f"copy-{file}/{name}": text for name, text in files.items()}


# -- Tokenizers of 80 entries, and the examples' folders ---------------------------------------------------------------

MARKS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
TOOL_TEMPLATE = (
    "{%- for message in messages %}"
    "{%- if message.role == 'tool' %}{{- '<tool_response>' + message.content + '</tool_response><sep>' }}"
    "{%- elif message.role != 'assistant' %}{{- message.content + '<sep>' }}"
    "{%- else %}{{- message.content or '' }}"
    "{%- for call in message.tool_calls or [] %}{{- '<tool_call>' + (call.function | tojson) + '</tool_call>' }}{%- endfor %}"
    "{{- '<eos>' }}{%- endif %}"
    "{%- endfor %}"
)


def build_tokenizer() -> Any:
    """Builds the quickstart's transformers tokenizer: whole words, single digits, tags. Decoding returns the text exactly."""
    return _tokenizer("0123456789+=,.? ", [*TAGS, SEPARATOR], _texts(SUM_QUESTIONS, name=NAMES, noun=NOUNS))


def _tool_tokenizer(characters: str, tool: str, argument: str, texts: Iterable[str]) -> Any:
    call = ('{"name": "', tool, '", "arguments": {"', argument, '": "', '"}}')
    tokenizer = _tokenizer(characters, [*TAGS[2:], SEPARATOR, *MARKS, *call], texts)
    tokenizer.chat_template = TOOL_TEMPLATE
    return tokenizer


def _texts(templates: Sequence[str], **words: Sequence[str]) -> Iterator[str]:
    """Returns the templates with all words, and numbers that are 1."""
    for template, *chosen in itertools.product(templates, *words.values()):
        numbers = dict.fromkeys(("a", "b", "person", "firm", "city"), 1)
        yield template.format(**numbers, **dict(zip(words, chosen, strict=True)))


def _tokenizer(characters: str, tokens: Sequence[str], texts: Iterable[str]) -> Any:
    """Builds tokens: each of `characters`, each of `tokens`, each word of the texts with the space before it.

    The class is Qwen2Tokenizer and every word is an added token. A WordLevel model would not work: for `model_type`
    qwen2, transformers 5 loads Qwen2Tokenizer whatever class the folder names, and all words would be lost without an
    error. Characters outside the vocabulary are dropped.
    """
    from transformers import AddedToken, Qwen2Tokenizer

    added = [*tokens, *sorted({word for text in texts for word in re.findall(" ?[A-Za-z]+", text)})]
    letters = characters.replace(" ", "\u0120")  # how byte-level BPE writes a space
    tokenizer = Qwen2Tokenizer(vocab={c: index for index, c in enumerate(letters)}, merges=[], **SPECIAL_TOKENS)
    num_unused = VOCABULARY_SIZE - len(tokenizer) - len(added)
    assert num_unused >= 0
    added += [f"<unused{index}>" for index in range(num_unused)]  # so that every id the model can draw decodes
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in added])
    return tokenizer


class ExampleData(NamedTuple):
    """The data of an example. `files`: (seed, rows, held-out rows) -> name of a file -> its rows."""

    files: Callable[[int, int, int], dict[str, Rows]]
    tokenizer: Callable[[], Any]


EXAMPLES = {
    "arithmetic": ExampleData(
        lambda seed, num_train, num_val: {
            "sft.jsonl": supervised_rows(seed),
            "train.jsonl": problem_rows(seed, num_train, held_out=False),
            "val.jsonl": problem_rows(seed, num_val, held_out=True),
            "written.jsonl": written_rows(seed, num_val),
        },
        build_tokenizer,
    ),
    "feedback": ExampleData(
        lambda seed, num_train, num_val: {
            "pairs.jsonl": pair_rows(seed, num_train, held_out=False),
            "pairs_val.jsonl": pair_rows(seed, num_val, held_out=True),
            "steps.jsonl": step_rows(seed, num_train, held_out=False),
            "steps_val.jsonl": step_rows(seed, num_val, held_out=True),
        },
        build_tokenizer,
    ),
    "products": ExampleData(
        lambda seed, num_train, num_val: {
            "sft.jsonl": product_demonstrations(seed),
            "train.jsonl": product_problems(seed, num_train, held_out=False),
            "val.jsonl": product_problems(seed, num_val, held_out=True),
        },
        lambda: _tool_tokenizer(
            *("0123456789*,.? ", "calculator", "expression"),
            _texts(PRODUCT_QUESTIONS, name=NAMES, container=CONTAINERS, noun=CONTENTS),
        ),
    ),
    "two_hops": ExampleData(
        lambda seed, num_train, num_val: {
            "sft.jsonl": hop_demonstrations(seed),
            "train.jsonl": hop_problems(seed, num_train, held_out=False),
            "val.jsonl": hop_problems(seed, num_val, held_out=True),
            "corpus.jsonl": World(seed).passages(),
        },
        lambda: _tool_tokenizer(
            *("0123456789[].,:? ", "search", "query"),
            _texts((*HOP_QUESTIONS, WORKS, LIES, FIRST_QUERY, SECOND_QUERY)),
        ),
    ),
    "shell": ExampleData(
        lambda seed, num_train, num_val: {
            "sft.jsonl": shell_demonstrations(seed),
            "train": shell_tasks(seed, num_train, held_out=False),
            "val": shell_tasks(seed, num_val, held_out=True),
        },
        lambda: _tool_tokenizer(
            *("0123456789.,:? >'[]", "bash", "command"), [COPY.format(person=1), READ, WRITE, "exit code No such file"]
        ),
    ),
}


def write_example(name: str, folder: Path, seed: int, num_train: int = 4096, num_val: int = 256) -> None:
    """Write the files of an example and tokenizer/ into the existing `folder`."""
    for file, rows in EXAMPLES[name].files(seed, num_train, num_val).items():
        if not Path(file).suffix:  # of task folders
            for path, text in ((path, text) for row in rows for path, text in row.items()):
                (folder / file / path).parent.mkdir(parents=True, exist_ok=True)
                (folder / file / path).write_text(text, encoding="utf-8")
            continue
        (folder / file).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    EXAMPLES[name].tokenizer().save_pretrained(folder / "tokenizer")
