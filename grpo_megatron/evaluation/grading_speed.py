"""How many answers a second one core grades: GSM8K and MATH here, MATH by plain math-verify (`tools/benchmark.py grade`).

The texts are the reference solutions of the files given. Of MATH, a third of the completions is the solution itself, a
third boxes the reference in another spelling, a third the answer to another problem, so that verdicts can be checked.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from pathlib import Path

from grpo_megatron.config import ConfigError
from grpo_megatron.evaluation.grading import grade
from grpo_megatron.rewards import answers, rewards
from grpo_megatron.rewards.math.formula import load
from grpo_megatron.rewards.workers.pool import RewardPool

Pairs = list[tuple[str, str]]  # (gold, completion)


def report(data: Path, problems: int) -> None:
    """Print the table. Raises ConfigError when `data` has no gsm8k/test.jsonl or math/test.jsonl."""
    rows = []
    gsm8k = [(row["answer"].rpartition("#### ")[2], row["answer"]) for row in _read(data / "gsm8k" / "test.jsonl")]
    rows.append(("GSM8K, the reward", *_rate(gsm8k, lambda gold, text: rewards.get("gsm8k")(text, gold)["acc"])))
    rows.append(("GSM8K, one worker process", *_pool_rate("gsm8k", gsm8k)))
    load()
    math = math_pairs(data / "math" / "test.jsonl", problems)
    rows.append(("MATH, the reward", *_rate(math, lambda gold, text: rewards.get("math")(text, gold)["acc"])))
    rows.append(("MATH, one worker process", *_pool_rate("math", math)))
    rows.append(("MATH, plain math-verify", *_rate(math, _plain())))
    print(f"{'':28s}{'answers':>9s}{'right':>7s}{'answers/s':>11s}")
    for name, count, right, rate in rows:
        print(f"{name:28s}{count:9d}{right:7d}{rate:11,.0f}")
    print(
        f"Of MATH's completions {len(math) * 2 // 3} are meant to be right. Seconds are the processor's, except with workers."
    )


def math_pairs(path: Path, problems: int) -> Pairs:
    """Three completions for each of the first `problems`."""
    rows = _read(path)[:problems]
    extract = answers.get("math").extract
    golds = [extract(row["solution"]) or "" for row in rows]
    pairs: Pairs = []
    for index, (row, gold) in enumerate(zip(rows, golds, strict=True)):
        other = next((g for g in golds[index + 1 :] + golds if g != gold), "")
        respelt = gold.replace("\\frac", "\\dfrac").replace(",", ", ")
        pairs += [
            (gold, row["solution"]),
            (gold, f"It is $\\boxed{{ {respelt} }}$."),
            (gold, f"It is $\\boxed{{{other}}}$."),
        ]
    return pairs


def _read(path: Path) -> list[dict[str, str]]:
    try:
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except OSError as error:
        raise ConfigError(
            f"cannot read {str(path)!r}: {error.strerror}; --data names a folder with gsm8k/ and math/"
        ) from None


def _rate(pairs: Pairs, is_right: Callable[[str, str], float | bool]) -> tuple[int, int, float]:
    """(answers, right ones, answers a second of processor time)."""
    start = time.process_time()
    right = sum(bool(is_right(gold, text)) for gold, text in pairs)
    return len(pairs), right, len(pairs) / (time.process_time() - start)


def _pool_rate(task: str, pairs: Pairs) -> tuple[int, int, float]:
    """As `_rate`, through the pool, on the clock: two processes share the work."""
    with RewardPool(1) as pool:
        pool.self_test([task])
        start = time.monotonic()
        grades = grade(task, [gold for gold, _ in pairs], [text for _, text in pairs], pool=pool)
        seconds = time.monotonic() - start
    return len(pairs), sum(verdict.correct for verdict in grades), len(pairs) / seconds


def _plain() -> Callable[[str, str], bool]:
    import math_verify

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)

    def is_right(gold: str, text: str) -> bool:
        return bool(math_verify.verify(math_verify.parse(f"${gold}$"), math_verify.parse(text)))

    return is_right
