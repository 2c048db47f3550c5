"""Playing: the trajectories of a task with an environment. The environment, its limits and the driver are those of training.

A task file names the environment by the keys of `rollout.multi_turn`:

    name: my_env
    version: 1
    title: My environment
    question: ["{question}"]
    answer: [{field: answer}]
    reward: math                     # left out where the environment gives the rewards itself
    max_tokens: 2048                 # generated and observed tokens of all turns
    multi_turn: {environment: tools, tools: [calculator], max_assistant_turns: 4}

The reward function grades the last turn of the assistant. Where the environment gives the rewards, a trajectory is right if
the sum of its rewards is at least 1.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from grpo_megatron.config import ConfigError, MultiTurnConfig
from grpo_megatron.data.conversation import TurnRenderer
from grpo_megatron.data.task import Task
from grpo_megatron.environments.build import find_environment, make_environment
from grpo_megatron.evaluation.ledger import LedgerEntry, PlayedTurn
from grpo_megatron.rollout.engine import sample_seed, stable_hash
from grpo_megatron.sampling.trajectory import Trajectory, TrajectoryLimits
from grpo_megatron.types import GREEDY, Prompt

ENVIRONMENT = "environment"  # the grader of a task whose environment gives the rewards


@dataclass(frozen=True)
class Arena:
    """What a task with an environment needs besides its prompts."""

    multi_turn: MultiTurnConfig
    renderer: TurnRenderer
    gives_rewards: bool


def gives_rewards(task: Task) -> bool:
    """Whether an environment grades the task's trajectories. Raises ConfigError for a name that cannot be found."""
    name = task.multi_turn.environment
    return name is not None and find_environment(name).gives_rewards


def read_arena(task: Task, tokenizer: Any, eos_token_ids: Sequence[int]) -> Arena | None:
    """None: the task is a single turn. Raises ConfigError: no such environment, a template that cannot render its turns."""
    if task.multi_turn.environment is None:
        return None
    try:
        environment = make_environment(task.multi_turn)
    except ConfigError as error:
        raise ConfigError(f"task {task.name!r}: {str(error).replace('rollout.multi_turn', 'multi_turn')}") from error
    renderer = TurnRenderer(tokenizer, environment.tools(), f"task {task.name!r}", end_token_ids=eos_token_ids)
    renderer.check()
    return Arena(task.multi_turn, renderer, environment.gives_rewards)


def new_trajectory(
    prompt: Prompt,
    index: int,
    *,
    run_seed: int,
    version: int,
    limits: TrajectoryLimits,
    temperature: float,
    top_p: float,
) -> Trajectory:
    """A trajectory of a problem. Its seeds depend on the run's seed, the problem and the sample only."""
    is_greedy = index == GREEDY
    row: Any = prompt.extra["row"]
    return Trajectory(
        key=json.dumps([prompt.uid, index]),
        row=row,
        environment_seed=stable_hash(json.dumps(["environment", run_seed, prompt.uid])),
        seed=sample_seed(run_seed, 0, prompt.uid, index),
        limits=limits,
        temperature=0.0 if is_greedy else temperature,
        top_p=1.0 if is_greedy else top_p,
        version=version,
    )


def played_entry(prompt: Prompt, index: int, trajectory: Trajectory, tokenizer: Any) -> LedgerEntry:
    """The trajectory as text, turn by turn. Its text is the assistant's last turn, which the graders read."""

    def decoded(start: int, end: int, *, plain: bool) -> str:
        return str(tokenizer.decode(trajectory.response_ids[start:end], skip_special_tokens=plain))

    turns = [PlayedTurn(turn.kind, decoded(turn.start, turn.end, plain=False)) for turn in trajectory.turns]
    last = trajectory.last_turn
    return LedgerEntry(
        prompt.uid,
        index,
        decoded(*last, plain=True) if last else "",
        sum(trajectory.loss_mask()),
        trajectory.finish_reason,
        turns=turns,
        status=trajectory.status,
        reward=sum(reward for _, reward in trajectory.turn_rewards),
    )
