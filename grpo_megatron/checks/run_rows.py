"""RunRows: the rows that a run reads, as prompts and examples of token ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from grpo_megatron.checks import inputs
from grpo_megatron.checks.environment import CheckedEnvironment
from grpo_megatron.checks.problems import ProblemList
from grpo_megatron.checks.prompt_inputs import read_train_prompts, read_val_prompts
from grpo_megatron.checks.reward_call import examples_of
from grpo_megatron.config import Config
from grpo_megatron.data.benchmarks import read_task_prompts
from grpo_megatron.data.item_table import one_of_each
from grpo_megatron.data.written import OfflineGroup, SupervisedExample
from grpo_megatron.types import Prompt


@dataclass(frozen=True)
class RunRows:
    """Empty: the config does not ask for them, or they cannot be read."""

    train_prompts: Sequence[Prompt] = ()
    offline_groups: Sequence[OfflineGroup] = ()
    val_prompts: list[Prompt] = field(default_factory=list)
    task_prompts: list[Prompt] = field(default_factory=list)  # data.val_tasks
    supervised: Sequence[SupervisedExample] = ()
    val_loss_groups: Sequence[OfflineGroup] = ()

    @classmethod
    def read(
        cls,
        config: Config,
        problems: ProblemList,
        tokenizer: Any | None,
        environment: CheckedEnvironment | None,
        end_token_ids: Sequence[int],
        *,
        is_plan: bool,
    ) -> RunRows:
        """Without a tokenizer the files are checked, and there are no prompts."""
        attempt, renderer = problems.attempt, environment.renderer if environment else None
        written = (config, tokenizer, renderer, end_token_ids)
        train = attempt(read_train_prompts, config, tokenizer, environment, is_plan=is_plan)
        offline = attempt(inputs.read_offline_groups, *written)
        val = attempt(read_val_prompts, config, tokenizer, environment)
        of_tasks = None
        if config.data.val_tasks:
            of_tasks = attempt(read_task_prompts, config.data, config.reward.kwargs, tokenizer)
        supervised = attempt(inputs.read_supervised, *written)
        val_loss = attempt(inputs.read_val_loss_groups, *written)
        return cls(train or [], offline or [], val or [], of_tasks or [], supervised or [], val_loss or [])

    @property
    def num_trained(self) -> int:
        """Rows of the training."""
        return len(self.train_prompts or self.offline_groups)

    @property
    def examples(self) -> list[Prompt]:
        """The prompts that rewards are tried on."""
        return [*examples_of(self.train_prompts), *self.val_prompts, *self.task_prompts]

    @property
    def first_of_each(self) -> list[Prompt]:
        """The prompts that the environment may be tried on."""
        return [*one_of_each(self.train_prompts), *self.val_prompts]
