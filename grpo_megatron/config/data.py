"""The sections `data` and `sft`: files, prompts, and the supervised warmup."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from grpo_megatron.config.model import OptimConfig
from grpo_megatron.config.section import Count, Files, Fixed, Frequency, Needs, Schedule, Section, Seed


class SamplingConfig(Section):
    """How often each training prompt is sampled. The weight is a function of its pass rate p, which was measured before.

    An epoch is as many samples as there are prompts (data/sampler.py).
    """

    pass_rates: Path | None = None
    """written by `grpo-megatron curate`; null: every prompt once per epoch"""
    weight: Literal["uniform", "1-p", "p(1-p)", "file"] = "uniform"
    """1-p: Kimi k1.5, arXiv 2501.12599; p(1-p): learnability, arXiv 2502.12272; file: the rows' own "weight"."""
    uniform_share: Annotated[float, Needs(".pass_rates"), Needs(".weight!=uniform")] = Field(0.0, ge=0, le=1)
    """this share of the samples ignores the weights"""
    min_pass_rate: float = Field(0.0, ge=0, le=1)
    """prompts below it are left out"""
    max_pass_rate: float = Field(1.0, ge=0, le=1)
    """prompts above it are left out"""
    default_pass_rate: float | None = Field(None, ge=0, le=1)
    """of prompts that the file lacks; null: an error"""


class DataSource(Section):
    """One of several data sets of a run. Samples follow the weights exactly: data/sampler.py."""

    name: str = Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")
    """in metrics and uids"""
    files: Files
    """to train on, as data.train_files"""
    val_files: Files = []
    """as data.val_files"""
    weight: float | None = Field(None, gt=0, le=1e9)
    """its share of the prompts, relative to the others; null: its number of rows"""
    task: str | None = None
    """null: data.task"""
    reward: str | None = None
    """null: reward.function or reward.components; else the task's"""
    n: int | None = Field(None, ge=1)
    """responses per prompt that is trained on; null: rollout.n"""
    max_response_length: int | None = Field(None, ge=1)
    """tokens, in training; null: data.max_response_length, which it cannot exceed"""
    system_prompt: str | None = None
    """null: data.system_prompt"""


Knots = Annotated[list[tuple[int, Annotated[float, Field(ge=0, le=1e9)]]], Field(min_length=1)]


class CurriculumPiece(Section):
    """A set of prompts, and its share of each step (data/curriculum.py)."""

    name: str = Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")
    """in metrics; it seeds the order"""
    weight: Annotated[float, Field(ge=0, le=1e9)] | Knots = 1.0
    """Relative to the other pieces. A list [[step, weight], ...]: linear between these steps, constant before and after"""
    source: str | None = None
    """a name in data.sources; null: all that are no streams"""
    min_pass_rate: float = Field(0.0, ge=0, le=1)
    max_pass_rate: float = Field(1.0, ge=0, le=1)
    order: Literal["random", "easiest", "hardest"] = "random"
    """of each epoch of the piece; easiest: the largest pass rate of the file first"""

    @property
    def knots(self) -> list[tuple[int, float]]:
        return [(0, self.weight)] if isinstance(self.weight, float) else sorted(self.weight)

    def weight_at(self, step: int) -> float:
        """Returns the weight at a step."""
        knots = self.knots
        after = next((place for place, (at, _) in enumerate(knots) if at > step), len(knots))
        if after in (0, len(knots)):
            return knots[min(after, len(knots) - 1)][1]
        (start, low), (end, high) = knots[after - 1], knots[after]
        return low + (high - low) * (step - start) / (end - start)


class CurriculumConfig(Section):
    """A mix of pieces on a schedule, in place of the weights of sources. Without pieces there is none."""

    pieces: list[CurriculumPiece] = []
    rates: Annotated[Literal["file", "run"], Needs("data.curriculum.pieces")] = "file"
    """pass rates: of data.sampling.pass_rates; or, from a prompt's first samples on, those of its latest ones in this run"""


class DataConfig(Section):
    """The files, and how their rows become prompts."""

    task: Fixed[str] = "gsm8k"
    """How rows become prompts: a built-in task, a task file, or module:function (data/task.py). Where it is not set,
    rows in verl's and TRL's form are recognised."""
    train_files: Fixed[Files] = []
    """.jsonl, .json, .csv, .parquet, .arrow or a folder of Hugging Face `datasets`, in this order: a path, a pattern
    or a list; hub:OWNER/NAME/SPLIT@COMMIT of the Hub; or module:function, an iterator of rows (data/stream.py)"""
    sources: Fixed[list[DataSource]] = []
    """several data sets, with weights; instead of train_files"""
    val_files: Files = []
    """rows to validate on, in the same formats"""
    train_batch_size: Schedule[Count] = 512
    """prompts per training step"""
    gen_batch_size: Annotated[Count | None, Needs("algorithm.filter_groups.enable=true")] = None
    """prompts per round of dynamic sampling; null: train_batch_size"""
    val_tasks: list[str] = []
    """tasks to validate on (gsm8k, math500, ...), with or without val_files"""
    val_data: Path | None = None
    """folder with the files of val_tasks"""
    val_loss_files: Files = []
    """responses, or pairs for a loss of pairs: their loss is part of each validation"""
    val_max_samples: int | None = Field(None, ge=1)
    """use the first N rows of val_files, and of each task; null: all"""
    max_prompt_length: Fixed[int] = Field(1024, ge=1)
    """tokens"""
    max_response_length: int = Field(2048, ge=1)
    """tokens; of several turns, all together"""
    filter_overlong_prompts: Fixed[bool] = True
    """drop prompts above max_prompt_length; false: they are an error"""
    shuffle: Fixed[bool] = True
    """the training prompts, in a new order in each epoch"""
    seed: Fixed[Seed] = 42
    """of the shuffling"""
    sampling: Annotated[Fixed[SamplingConfig], Needs("data.sampling.pass_rates")] = SamplingConfig()
    curriculum: Fixed[CurriculumConfig] = CurriculumConfig()
    apply_chat_template: Fixed[bool] = True
    """false: the task's plain text prompt"""
    chat_template: Fixed[Path | None] = None
    """Jinja file; null: the tokenizer's template"""
    chat_template_kwargs: Fixed[dict[str, Any]] = {}
    """values of the template's variables, such as {enable_thinking: false}; exports have them in their template"""
    system_prompt: Fixed[str | None] = None
    """null: the task's system prompt"""
    image_max_pixels: Fixed[int | None] = Field(None, ge=1)
    """larger images are scaled down; null: the model's limit"""
    image_min_pixels: Fixed[int | None] = Field(None, ge=1)
    """smaller images are scaled up; null: the model's limit"""
    max_images: Fixed[int] = Field(8, ge=1)
    """most images of a prompt, or of an environment's answer"""

    @property
    def has_prompts_to_validate(self) -> bool:
        return bool(self.val_files or self.val_tasks or any(source.val_files for source in self.sources))


class SftConfig(Section):
    """The supervised warmup before GRPO. steps = 0: there is none."""

    steps: Fixed[int] = Field(0, ge=0)
    """optimizer steps"""
    train_files: Fixed[Files] = []
    """rows {"prompt": ..., "response": ...}"""
    train_batch_size: Fixed[Count] = 32
    """rows per optimizer step"""
    save_freq: Frequency = 100
    """steps between its checkpoints; -1, or trainer.save_freq=-1: none"""
    optim: Fixed[OptimConfig] = OptimConfig()
