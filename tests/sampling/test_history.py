"""Conversations in the real chat templates of six families, most of which change earlier turns.

What must hold: the model reads before each turn what its template makes of the whole conversation, token for token; each
of its turns is in one row, behind exactly what it has read; and a row goes on wherever the template lets it.
"""

from __future__ import annotations

import functools
import json
import random
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from grpo_megatron.config import MultiTurnConfig
from grpo_megatron.data.tokenizer import TurnRenderer
from grpo_megatron.environments.environment import Outcome, Step, TurnRequest
from grpo_megatron.rollout.engine import FULL, Completion, Request
from grpo_megatron.sampling.multi_turn import EnvironmentAnswers, Trajectory, TrajectoryLimits, play
from tests.fakes import LoneMesh
from tests.files import QWEN_SMALL, WHOLE

TEMPLATES = Path(__file__).parents[1] / "data" / "templates" / "real"
TOOL = {"type": "function", "function": {"name": "look", "description": "Look.", "parameters": {"type": "object"}}}
CALL = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
CHATML = ["<|im_end|>"]
DEEPSEEK = ["<\uff5cend\u2581of\u2581sentence\uff5c>"]
FAMILIES = {  # the tokens that end a turn, and whether the prompt has written <think> for it
    "qwen2_5": (CHATML, ""),
    "qwen3": (CHATML, "<think>\n"),
    "qwen3_5_think": (CHATML, ""),
    "glm4moe": (["<|user|>", "<|observation|>"], "\n<think>"),
    "deepseekv3": (DEEPSEEK, ""),
    "deepseek_r1_distill": (DEEPSEEK, ""),
}
VOCABULARIES = {"qwen2_5": "qwen", "qwen3": "qwen", "qwen3_5_think": "qwen3_5", "glm4moe": "glm"}
VOCABULARIES |= {"deepseekv3": "deepseek", "deepseek_r1_distill": "deepseek"}
MARKS = ["<|im_start|>", "<|endoftext|>", "<|assistant|>", "<|system|>", "[gMASK]", "<sop>"]
MARKS += ["<\uff5cUser\uff5c>", "<\uff5cAssistant\uff5c>"]


@functools.cache
def tokenizer_of(family: str) -> Any:
    """The family's own tokenizer where GRPO_TEST_DATA (tests/files.py) has it as tokenizers/VOCABULARY/tokenizer.json."""
    ends, _ = FAMILIES[family]
    whole = WHOLE / "tokenizers" / VOCABULARIES.get(family, "") / "tokenizer.json"
    file = whole if whole.is_file() else QWEN_SMALL
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(file), eos_token=ends[0])
    tokenizer.add_tokens([*ends, *MARKS], special_tokens=True)
    tokenizer.add_tokens(["<think>", "</think>", "<tool_call>", "</tool_call>"])
    tokenizer.chat_template = (TEMPLATES / f"{family}.jinja").read_text()
    return tokenizer


class Game:
    """A pool of one environment: random words of a user or a tool, for a few turns. Keeps the conversation as it was held."""

    def __init__(self, seed: int, role: str, turns: int, reward: bool) -> None:
        self.random, self.role, self.left, self.reward = random.Random(seed), role, turns, reward
        self.messages = [{"role": "user", "content": f"Question {seed}: caf\u00e9?"}]
        self.new = list(self.messages)

    def start(self, key: str, row: Any, seed: int) -> None:
        pass

    def step(self, key: str, completion: str) -> None:
        self.left -= 1
        words = " ".join(self.random.choice(["north", "7.5", "\u00e9t\u00e9", "wall\n", "{}"]) for _ in range(4))
        self.new = [{"role": self.role, "content": words}]
        if self.role == "tool":
            self.new[0]["tool_call_id"] = f"{sum(m['role'] == 'tool' for m in self.messages):09d}"
        self.messages = [*self.messages, {"role": "assistant", "content": completion}, *self.new]

    def wait(self, keys: list[str]) -> dict[str, Outcome]:
        reward = 0.25 if self.reward and len(self.messages) > 1 else None
        return {key: Outcome(Step(list(self.new), reward, not self.left), seconds=0.0) for key in keys}

    def end(self, keys: list[str]) -> None:
        pass


class Scripted:
    """An engine whose turns are a thought, an answer, a call, or one of them cut off. `log`: what it was given and gave."""

    def __init__(self, tokenizer: Any, family: str, seed: int, role: str) -> None:
        self.tokenizer, self.random, self.version, self.role = tokenizer, random.Random(seed), 3, role
        self.ends, self.think = FAMILIES[family]
        self.log: list[tuple[list[int], list[int]]] = []

    def submit(self, key: str, request: Request, version: int) -> None:
        think = self.think + self.random.choice(["left\n", "right, or\n\nnot \n"])
        answer = "\n".join(self.random.choice(["Go.", " a wall? ", CALL]) for _ in range(self.random.randint(1, 2)))
        text = f"{think}</think>\n\n{answer}" if self.random.random() < 0.8 else answer
        if len(self.ends) == 2 and self.random.random() < 0.5:
            text = "\n<think>left</think>\nGo."  # with GLM's own white space, so that a row may go on
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        if self.random.random() < 0.15:
            ids = ids[: len(ids) // 2 + 1]
        else:
            end = self.ends[-1 if self.role == "tool" else 0]  # GLM's model names who speaks next; it may be wrong
            end = self.random.choice(self.ends) if self.random.random() < 0.6 else end
            ids.append(self.tokenizer.convert_tokens_to_ids(end))
        self.log.append((list(request.prompt_ids), ids))

    def poll(self) -> list[tuple[str, Completion]]:
        ids = self.log[-1][1]
        return [("one", Completion(ids, [-0.5] * len(ids), "stop"))]


def played(
    family: str, role: str, seed: int, turns: int = 4, **game: Any
) -> tuple[Trajectory, Scripted, Game, TurnRenderer]:
    tokenizer = tokenizer_of(family)
    ends = [tokenizer.convert_tokens_to_ids(end) for end in FAMILIES[family][0]]
    renderer = TurnRenderer(tokenizer, [TOOL], end_token_ids=ends)
    renderer.check(role, may_rewrite=True)
    pool, engine = Game(seed, role, turns, game.get("reward", False)), Scripted(tokenizer, family, seed, role)
    answers = EnvironmentAnswers(pool, renderer, MultiTurnConfig(), LoneMesh())  # type: ignore[arg-type]
    trajectory = Trajectory("one", {}, 0, 5, TrajectoryLimits(4096, 4096, 99), 1.0, FULL, 3)
    for _ in play([trajectory], engine, answers, 3, 1):  # type: ignore[arg-type]
        pass
    assert trajectory.is_over and not answers._histories, trajectory.message
    return trajectory, engine, pool, renderer


@pytest.mark.parametrize("role", ["user", "tool"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_turn_is_trained_in_the_context_that_it_was_drawn_in(family: str, role: str) -> None:
    for seed in range(8):
        trajectory, engine, game, renderer = played(family, role, seed)
        drawn = []
        for row in (*trajectory.branches, trajectory):
            whole = [*row.prompt_ids, *row.response_ids]
            for turn in row.turns:
                if turn.kind == "assistant":
                    start, end = (len(row.prompt_ids) + place for place in (turn.start, turn.end))
                    drawn.append((whole[:start], whole[start:end]))
            assert row.loss_mask() == [int(t.kind == "assistant") for t in row.turns for _ in range(t.start, t.end)]
        assert drawn == engine.log  # each turn once, id for id
        if renderer.rewrites:
            expected = [as_served(renderer, game, number) for number in range(len(engine.log))]
            assert [renderer.tokenizer.decode(prompt) for prompt, _ in engine.log] == expected


def as_served(renderer: TurnRenderer, game: Game, number: int) -> str:
    """The template's text of the conversation before turn `number`, by transformers alone."""
    messages = []
    for message in game.messages[: 1 + 2 * number]:
        content = message["content"]
        if message["role"] == "assistant":
            content = renderer.opening + content
        messages.append({**message, "content": content})
    text = renderer.tokenizer.apply_chat_template(messages, tools=[TOOL], tokenize=False, add_generation_prompt=True)
    return str(text)


def test_a_row_goes_on_where_the_template_lets_it() -> None:
    """Qwen3 keeps the thoughts since the user's last message: turns of tools are one row, those of users begin rows."""
    lengths = {}
    for role in ("tool", "user"):
        trajectories = [played("qwen3_5_think", role, seed)[0] for seed in range(8)]
        lengths[role] = sum(1 + len(trajectory.branches) for trajectory in trajectories)
    assert lengths["tool"] < lengths["user"] <= 8 * 4


def test_turn_rewards_stay_with_their_rows() -> None:
    trajectory, engine, _, _ = played("qwen3", "user", 1, reward=True)
    rows = [*trajectory.branches, trajectory]
    assert len(rows) > 1 and all(row.turn_rewards for row in rows)
    assert sum(reward for row in rows for _, reward in row.turn_rewards) == 0.25 * len(engine.log)


def test_an_agents_own_words_are_rendered_and_it_may_begin_again() -> None:
    """A client repeats the answer as a message with calls, which the template writes; a branch has a history of its own."""
    tokenizer = tokenizer_of("qwen3_5_think")
    renderer = TurnRenderer(tokenizer, [TOOL])
    renderer.check("tool", may_rewrite=True)
    function = {"name": "look", "arguments": "{}"}
    reply = {"role": "assistant", "content": "I look.", "tool_calls": [{"type": "function", "function": function}]}
    steps = [
        Step([{"role": "user", "content": "Where?"}]),
        Step([{"role": "tool", "content": "north"}], request=TurnRequest(answer=reply)),
        Step([{"role": "user", "content": "Again."}], request=TurnRequest(branch=True)),
        Step([], reward=1.0, done=True),
    ]

    class Client(Game):
        def wait(self, keys: list[str]) -> dict[str, Outcome]:
            return {key: Outcome(steps.pop(0), seconds=0.0) for key in keys}

    engine = Scripted(tokenizer, "qwen3_5_think", 0, "tool")
    answers = EnvironmentAnswers(Client(0, "tool", 9, False), renderer, MultiTurnConfig(), LoneMesh())  # type: ignore[arg-type]
    trajectory = Trajectory("one", {}, 0, 5, TrajectoryLimits(4096, 4096, 99), 1.0, FULL, 3)
    for _ in play([trajectory], engine, answers, 3, 1):  # type: ignore[arg-type]
        pass
    second, third = (tokenizer.decode(prompt) for prompt, _ in engine.log[1:])
    assert "I look." in second and "<function=look>" in second and second.endswith("assistant\n<think>\n")
    assert "Again." in third and "Where?" not in third and len(trajectory.branches) == 2
    assert json.loads(function["arguments"]) == {}  # the client's message is not changed
