"""Answers per second that one core grades: GSM8K and MATH here, MATH by plain math-verify (`tools.benchmarks grade`).

The completions are the reference solutions of the given files. Of MATH, one third of them are the solutions themselves,
one third box the reference in another spelling, and one third box the answer to another problem: two of three are right.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from pathlib import Path

from grpo_megatron.config import ConfigError
from grpo_megatron.evaluation.grading import grade
from grpo_megatron.rewards import extractors, rewards
from grpo_megatron.rewards.math.value import import_math_verify
from grpo_megatron.rewards.pool import RewardPool

Pairs = list[tuple[str, str]]  # (answer, completion)


def print_rates(data: Path, problems: int) -> None:
    """Print the table. Raises ConfigError when `data` has no gsm8k/test.jsonl or math/test.jsonl."""
    rows = []
    gsm8k = [(row["answer"].rpartition("#### ")[2], row["answer"]) for row in _read_rows(data / "gsm8k" / "test.jsonl")]
    rows.append(
        ("GSM8K, the reward", *_processor_rate(gsm8k, lambda answer, text: rewards.get("gsm8k")(text, answer)["acc"]))
    )
    rows.append(("GSM8K, one worker process", *_pool_rate("gsm8k", gsm8k)))
    import_math_verify()
    math = math_pairs(data / "math" / "test.jsonl", problems)
    rows.append(
        ("MATH, the reward", *_processor_rate(math, lambda answer, text: rewards.get("math")(text, answer)["acc"]))
    )
    rows.append(("MATH, one worker process", *_pool_rate("math", math)))
    rows.append(("MATH, plain math-verify", *_processor_rate(math, _plain_math_verify())))
    print(f"{'':28s}{'answers':>9s}{'right':>7s}{'answers/s':>11s}")
    for name, count, right, rate in rows:
        print(f"{name:28s}{count:9d}{right:7d}{rate:11,.0f}")
    print(
        f"{len(math) * 2 // 3} of MATH's completions should be right. Rates with workers are per second of wall clock,"
        " the others per second of processor time."
    )


def math_pairs(path: Path, problems: int) -> Pairs:
    """Three completions for each of the first `problems`."""
    rows = _read_rows(path)[:problems]
    extract = extractors.get("math").extract
    answers = [extract(row["solution"]) or "" for row in rows]
    pairs: Pairs = []
    for index, (row, answer) in enumerate(zip(rows, answers, strict=True)):
        other = next((text for text in answers[index + 1 :] + answers if text != answer), "")
        respelt = answer.replace("\\frac", "\\dfrac").replace(",", ", ")
        pairs += [
            (answer, row["solution"]),
            (answer, f"It is $\\boxed{{ {respelt} }}$."),
            (answer, f"It is $\\boxed{{{other}}}$."),
        ]
    return pairs


def _read_rows(path: Path) -> list[dict[str, str]]:
    try:
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except OSError as error:
        raise ConfigError(
            f"cannot read {str(path)!r}: {error.strerror}; --data names a folder with gsm8k/ and math/"
        ) from None


def _processor_rate(pairs: Pairs, is_right: Callable[[str, str], float | bool]) -> tuple[int, int, float]:
    """(number of answers, number of right ones, answers per second of processor time)."""
    start = time.process_time()
    right = sum(bool(is_right(answer, text)) for answer, text in pairs)
    return len(pairs), right, len(pairs) / (time.process_time() - start)


def _pool_rate(task: str, pairs: Pairs) -> tuple[int, int, float]:
    """As `_processor_rate`, but per second of wall clock: this process and one worker share the work."""
    with RewardPool(1) as pool:
        pool.self_test([task])
        start = time.monotonic()
        grades = grade(task, [answer for answer, _ in pairs], [text for _, text in pairs], pool)
        seconds = time.monotonic() - start
    return len(pairs), sum(verdict.correct for verdict in grades), len(pairs) / seconds


def _plain_math_verify() -> Callable[[str, str], bool]:
    import math_verify

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)

    def is_right(answer: str, text: str) -> bool:
        return bool(math_verify.verify(math_verify.parse(f"${answer}$"), math_verify.parse(text)))

    return is_right
