"""`tools.benchmarks endpoint`: an agent that speaks OpenAI's API, beside the same environment as a class.

Both ask for four turns, and answer each but the last. The environments are real, a process each, in the workers of a run; the
model is not: all trajectories get their turn as soon as all have asked for it. Milliseconds are those of the workers' processors.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grpo_megatron.environments.environment import ChatMessage, Environment, Step, written_turn
from grpo_megatron.environments.pool import EnvironmentPool
from grpo_megatron.processes.host import LAST_MOMENT_S
from tools.benchmarks.workload import machine

TURNS = 4
USER: ChatMessage = {"role": "user", "content": "Say a number."}


class Numbers(Environment):
    """The class."""

    gives_rewards = True

    def reset(self, row: Mapping[str, Any], seed: int) -> list[ChatMessage]:
        self.turns = 0
        return [USER]

    def step(self, completion: str) -> Step:
        self.turns += 1
        return Step([], reward=1.0, done=True) if self.turns == TURNS else Step([USER])


WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "class": (f"{__name__}:Numbers", {}),
    "function": ("command", {"command": ["tools.benchmarks.endpoint_agent:main"]}),
    "agents": ("command", {"command": ["tools.benchmarks.endpoint_agent:main"], "episodes": 0}),
    "script": ("command", {"command": [sys.executable, str(Path(__file__).with_name("endpoint_agent.py"))]}),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--count", type=int, default=128, help="trajectories at a time")
    parser.add_argument("--workers", type=int, default=1, help="rollout.multi_turn.num_workers")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--ways", nargs="*", default=list(WAYS), choices=list(WAYS))


def endpoint(args: argparse.Namespace) -> int:
    """Prints seconds of the start and of all turns, the fastest of the repeats, and processor milliseconds of a trajectory."""
    print(machine())
    turn = written_turn("7", [5, 6], ["7", "."], [-0.5, -0.5], prompt_tokens=9)
    for way in args.ways:
        _, alone = _measure(way, args, turn, 0)
        seconds, used = _measure(way, args, turn, args.repeats)
        start, turns = map(min, zip(*seconds, strict=True))
        each = 1000 * (used - alone) / args.repeats / args.count
        print(f"{way:<9} start {start:6.2f} s, turns {turns:6.2f} s, {each:6.1f} ms per trajectory", flush=True)
    return 0


def _measure(way: str, args: argparse.Namespace, turn: str, repeats: int) -> tuple[list[tuple[float, float]], float]:
    """Returns the seconds of each repeat, and processor seconds of the workers and all below them."""
    (name, kwargs), seconds = WAYS[way], []
    kwargs = kwargs | ({"episodes": max(repeats, 1)} if "episodes" in kwargs else {})  # they end, and are counted
    keys = [str(number) for number in range(args.count)]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with EnvironmentPool(name, kwargs, args.workers, timeout_s=600.0) as pool:
        for _ in range(repeats):
            began = time.perf_counter()
            for key in keys:
                pool.start(key, {}, int(key))
            pool.wait(keys)
            started = time.perf_counter()
            for _ in range(TURNS):
                for key in keys:
                    pool.step(key, turn)
                outcomes = pool.wait(keys)
            seconds.append((started - began, time.perf_counter() - started))
            assert all(outcome.step and outcome.step.done for outcome in outcomes.values()), outcomes
            pool.end(keys)
        pool.start("last", {}, 0)
        pool.wait(["last"])
        time.sleep(2 * LAST_MOMENT_S)  # until all are waited for
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return seconds, sum(after[:2]) - sum(before[:2])
