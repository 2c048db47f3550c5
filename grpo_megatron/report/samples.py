"""The samples of a report: two groups of some steps, with the log-probabilities of engine and policy at each token.

OUTPUT_DIR/report_samples.jsonl has one line per step that is kept:

    {"step": 12, "groups": [{"uid", "source", "prompt", "answer", "samples": [SAMPLE, ...]}, ...]}

SAMPLE: index, reward, score, advantage (null: none), finish_reason, status, tokens (their number), failure, metrics, and
`pieces`: [text, log-probability, policy's minus engine's] of each token; null: there is none. The log-probability is the
engine's if the sample is `drawn`, and the policy's if it is from a file. `cut` tokens are left out after piece `cut_at`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from grpo_megatron.storage.atomic import write_file

SAMPLES_FILE = "report_samples.jsonl"
MAX_STEPS, NEWEST = 12, 5  # steps that are kept; the first one, the newest ones, and others between them


class KeptSamples:
    """The steps of the file. Reads what an earlier attempt has left there."""

    def __init__(self, folder: Path, first_step: int | None = None) -> None:
        """`first_step`: later steps of an earlier attempt are dropped; None keeps all."""
        self.path = folder / SAMPLES_FILE
        self.steps = [step for step in _read(self.path) if first_step is None or step["step"] < first_step]

    def add(self, step: int, groups: Sequence[dict[str, Any]]) -> None:
        """Keep the step, and write the file. Raises OSError."""
        self.steps = [*(kept for kept in self.steps if kept["step"] < step), {"step": step, "groups": list(groups)}]
        if len(self.steps) > MAX_STEPS:
            del self.steps[_superfluous([kept["step"] for kept in self.steps])]
        write_file(self.path, (json.dumps(kept) + "\n" for kept in self.steps))


def _superfluous(steps: Sequence[int]) -> int:
    """The place of the step whose neighbours are closest; neither the first step nor one of the newest."""
    return min(range(1, len(steps) - NEWEST), key=lambda place: (steps[place + 1] - steps[place - 1], place))


def _read(path: Path) -> Iterable[dict[str, Any]]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return
    for line in lines:
        try:
            step = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(step, dict) and type(step.get("step")) is int and isinstance(step.get("groups"), list):
            yield step
