"""The options of the command `curate`: which responses count, which problems are kept, and what is written."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from grpo_megatron.config.options import Argument, Option, Options

PASS_RATES = "pass_rates.jsonl"  # by this file a folder is recognised as an output of this command
SUPERVISED, PAIRS = "sft.jsonl", "pairs.jsonl"
MAX_STEP = 1 << 40

counting, keeping, writing = (
    partial(Option, group=group)
    for group in ("which responses count", "which problems to keep", "what to write besides pass rates")
)


class CurateOptions(Options):
    """The options of `curate`."""

    program = "curate"
    description = "Pass rates per problem, from rollouts or evaluations;\nfiltered data; rows for SFT and preferences."
    epilog = """
pass rates of a training run, or of an evaluation with --samples 8:
  grpo-megatron curate outputs/run/rollouts --output outputs/curated
  grpo-megatron curate outputs/evaluation/model --output outputs/curated

and besides:
  --data train.jsonl --task gsm8k --min-rate 0.1    the rows that are left
  --sft 4                       up to 4 right responses per prompt
  --pairs best-worst            rows {"prompt", "chosen", "rejected"}

OUT/pass_rates.jsonl is for data.sampling.pass_rates, pass_rates.csv for a
spreadsheet. The rows of sft.jsonl and pairs.jsonl are for sft.train_files,
and for data.train_files with algorithm.source=file.
"""
    groups = ("which responses count", "which problems to keep", "what to write besides pass rates")
    sources: Annotated[tuple[Path, ...], Argument("trainer.rollout_data_dir, an evaluation's folder, files", "SOURCE")]
    output: Annotated[Path, Option("a new folder", "OUT")]
    force: Annotated[bool, Option("replace a folder that this command has written")] = False
    right: Annotated[float, counting("lowest score of a right response (default 1)", "SCORE")] = 1.0
    drop_truncated: Annotated[bool, counting("do not count responses that the length limit has cut off")] = False
    first_step: Annotated[
        int | None, counting("of a training run: only its samples from step N on", "N", ge=0, le=MAX_STEP)
    ] = None
    min_rate: Annotated[float, keeping("lowest pass rate", "P", ge=0, le=1)] = 0.0
    max_rate: Annotated[float, keeping("highest pass rate", "P", ge=0, le=1)] = 1.0
    drop_all_right: Annotated[bool, keeping("leave out what every response solves (DUPO)")] = False
    min_samples: Annotated[int, keeping("leave out what has fewer responses", "N", ge=1)] = 1
    data: Annotated[tuple[Path, ...], writing("data files: write their kept rows", "FILE")] = ()
    task: Annotated[str | None, writing("as data.task: how the rows of --data are read", "NAME")] = None
    sft: Annotated[int | None, writing("write up to K different right responses per problem", "K", ge=1)] = None
    pairs: Annotated[Literal["right-wrong", "best-worst"] | None, writing("write preference pairs")] = None

    @property
    def texts(self) -> int:
        """The most responses of each verdict that the rows of a problem can need."""
        return self.sft or 1

    def problems(self) -> Iterator[str]:
        """Yield options that do not go together, and data files that would be one file."""
        if self.min_rate > self.max_rate:
            yield f"--min-rate {self.min_rate:g} is above --max-rate {self.max_rate:g}; swap them"
        if bool(self.data) != (self.task is not None):
            yield "--data FILE and --task NAME go together: the task reads the question and answer of each row"
        names = [f"{path.stem}.jsonl" for path in self.data]
        for name in dict.fromkeys(names):
            if names.count(name) > 1 or name in (PASS_RATES, SUPERVISED, PAIRS):
                yield f"--data: two files would be {self.output / name}; rename one"
