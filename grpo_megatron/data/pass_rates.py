"""Pass rates: the share of right responses per problem, measured before training, and the prompts that they select.

A file of pass rates has rows {"question", "answer", "rate"}, and "weight" for data.sampling.weight=file. Other fields are
not read. `grpo-megatron curate` writes such a file. Problems are found by question and reference answer, and by the names
of their "images" ({"name"}, data/images.py).
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_megatron.config import ConfigError, SamplingConfig
from grpo_megatron.data.rows import missing_field, problem_digest, read_question, read_rows, text_field, type_name
from grpo_megatron.types import Prompt

logger = logging.getLogger(__name__)

PROMPT_WEIGHTS: dict[str, Callable[[float], float]] = {
    "uniform": lambda p: 1.0,
    "1-p": lambda p: 1.0 - p,
    "p(1-p)": lambda p: p * (1.0 - p),
}


@dataclass(frozen=True)
class Measured:
    """A row of a file of pass rates."""

    rate: float
    weight: float | None = None


def read_pass_rates(path: Path) -> dict[str, Measured]:
    """Read the rows of the file by `problem_digest`. Raises ConfigError."""
    rates: dict[str, Measured] = {}

    def parse(row: dict[str, Any]) -> None:
        images = row.get("images") or []
        if not (isinstance(images, list) and all(isinstance(one, dict) and "name" in one for one in images)):
            raise ValueError("field 'images' is no list of objects with the name of an image")
        digest = problem_digest(read_question(row, "question"), text_field(row, "answer", empty=True), images)
        if digest in rates:
            raise ValueError("has the question and the answer of an earlier row; keep one of them")
        rate = _number(row, "rate")
        if rate > 1:
            raise ValueError(f"field 'rate' is {rate:g}, and a pass rate is 0 to 1")
        rates[digest] = Measured(rate, _number(row, "weight") if "weight" in row else None)

    read_rows(path, parse)
    return rates


def _number(row: dict[str, Any], field: str) -> float:
    if field not in row:
        raise missing_field([field], row)
    value = row[field]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"field {field!r} is {type_name(value)}, not a number")
    if not 0 <= value < math.inf:
        raise ValueError(f"field {field!r} is {value}, not a number of 0 or more")
    return float(value)


def select_prompts(prompts: Sequence[Prompt], sampling: SamplingConfig) -> list[Prompt]:
    """Select the prompts with a pass rate in the configured range, in order, and set `pass_rate` and `weight`.

    Raises ConfigError: an unreadable file, prompts that it lacks, no prompt in the range, or no weight above 0.
    """
    assert sampling.pass_rates is not None
    prompts = list(prompts)
    key = f"data.sampling.pass_rates={str(sampling.pass_rates)!r}"
    measured = _measured(prompts, sampling, key)
    low, high = sampling.min_pass_rate, sampling.max_pass_rate
    chosen = [(prompt, one) for prompt, one in zip(prompts, measured, strict=True) if low <= one.rate <= high]
    if len(chosen) < len(prompts):
        below, above = (sum(test(one.rate) for one in measured) for test in (lambda p: p < low, lambda p: p > high))
        count = f"{below} of {len(prompts)} prompts have a pass rate below {low:g}, and {above} above {high:g}"
        if not chosen:
            raise ConfigError(f"{key}: {count}: nothing is left; widen data.sampling.min_pass_rate to max_pass_rate")
        logger.warning("%s: they are left out (data.sampling)", count)
    weights = [_weight(one, sampling.weight) for _, one in chosen]
    mean = sum(weights) / len(weights)
    if mean == 0:
        raise ConfigError(
            f"{key}: data.sampling.weight={sampling.weight} is 0 for all {len(chosen)} prompts; set another weight, or"
            " narrow data.sampling.min_pass_rate to max_pass_rate"
        )
    share, selected = sampling.uniform_share, []
    for (prompt, one), weight in zip(chosen, weights, strict=True):
        selected.append(copy.copy(prompt))  # makes neither text nor tokens of a RowPrompt
        selected[-1].__dict__.update(pass_rate=one.rate, weight=(1 - share) * weight / mean + share)
    return selected


def _measured(prompts: Sequence[Prompt], sampling: SamplingConfig, key: str) -> list[Measured]:
    assert sampling.pass_rates is not None
    rates, default = read_pass_rates(sampling.pass_rates), sampling.default_pass_rate
    facts: list[Any] = [prompt.columns.get("images") or () for prompt in prompts]
    digests = [problem_digest(one.question, one.answer, images) for one, images in zip(prompts, facts, strict=True)]
    measured = [rates.get(digest) for digest in digests]
    if missing := [prompt.uid for prompt, one in zip(prompts, measured, strict=True) if one is None]:
        count = f"{key} lacks {len(missing)} of the {len(prompts)} prompts (the first: {missing[0]})"
        if sampling.weight == "file":
            raise ConfigError(f"{count}, and data.sampling.weight=file needs a weight for each; add them")
        if default is None:
            raise ConfigError(
                f"{count}; measure them, leave them out of data.train_files, or set data.sampling.default_pass_rate=0.5"
            )
    if sampling.weight == "file" and any(one is not None and one.weight is None for one in measured):
        raise ConfigError(f'{key}: data.sampling.weight=file needs a number "weight" in every row, and some have none')
    return [Measured(default or 0.0) if one is None else one for one in measured]


def _weight(measured: Measured, name: str) -> float:
    if measured.weight is not None and name == "file":
        return measured.weight
    return PROMPT_WEIGHTS[name](measured.rate)


Z = 1.959963984540054  # 97.5 % quantile of the normal distribution


def wilson(share: float, n: int) -> tuple[float, float]:
    """Compute Wilson's 95 % interval (1927, JASA 22:209) of a share of n > 0 trials: (low, high).

    Its ends are the shares p from which the observed one is z standard errors sqrt(p (1 - p) / n) away. It has a width at 0
    and at 100 %, too.
    """
    center, root = share + Z * Z / (2 * n), Z * math.sqrt(share * (1 - share) / n + Z * Z / (4 * n * n))
    scale = 1 + Z * Z / n
    return max(0.0, (center - root) / scale), min(1.0, (center + root) / scale)
