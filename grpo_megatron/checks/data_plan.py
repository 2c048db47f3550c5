"""The data of a run in its printed plan: rows, epochs, validations."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from grpo_megatron.checks.epochs import steps_of_epochs
from grpo_megatron.checks.sources import sources_of
from grpo_megatron.config import Config, TrainerConfig
from grpo_megatron.data.sampler import Mixture

if TYPE_CHECKING:
    from grpo_megatron.checks.validate import Checked


def data_lines(config: Config, checked: Checked) -> Iterator[tuple[str, str]]:
    """For the plan, (name, text): which rows are read, and how often."""
    trainer, sft = config.trainer, config.sft
    if sft.steps:
        rows = len(checked.supervised_rows)
        yield ("warmup", f"{_found(rows, 'row')}; {_epochs(sft.steps, sft.train_batch_size, rows)}")
    if trainer.total_training_steps:
        rows = len(checked.train_prompts) or len(checked.offline_groups)
        noun = "row" if config.algorithm.source == "file" else "prompt"
        tasks = ", ".join(dict.fromkeys(source.data.task for source in sources_of(config)))
        yield ("training", f"{_found(rows, noun)} of task {tasks}; {_duration(config, rows)}")
        if isinstance(checked.train_prompts, Mixture):
            yield from _source_lines(config, checked.train_prompts)
    if checked.val_prompts:
        yield ("validation", f"{counted(len(checked.val_prompts), 'prompt')}, {_validation_times(trainer)}")
    if checked.val_loss_groups:
        yield ("validation loss", f"{counted(len(checked.val_loss_groups), 'row')}, {_validation_times(trainer)}")
    yield ("output", str(trainer.output_dir))


def _source_lines(config: Config, mixture: Mixture) -> Iterator[tuple[str, str]]:
    """The share of each source, and how often each of its prompts is seen."""
    total = sum(source.weight for source in mixture.sources)
    tasks = {source.name: source.data.task for source in sources_of(config)}
    trainer, batch = config.trainer, config.data.train_batch_size
    steps = steps_of_epochs(config, len(mixture)) or trainer.total_training_steps
    for source in mixture.sources:
        share, count = source.weight / total, len(source.prompts)
        drawn = f"{share:.1%} = {batch * share:.1f} per step = {steps * batch * share / count:.2f} epochs"
        yield f"  {source.name}"[:17], f"{counted(count, 'prompt')} of task {tasks[source.name]}; {drawn}"


def _duration(config: Config, rows: int) -> str:
    """The training steps, and how often each row is seen."""
    trainer, batch = config.trainer, config.data.train_batch_size
    if trainer.total_epochs is None:
        return _epochs(trainer.total_training_steps, batch, rows)
    steps = steps_of_epochs(config, rows)
    if steps is None:
        return f"{trainer.total_epochs} epochs, of unknown length"
    arithmetic = f"{trainer.total_epochs} x floor({rows:,} / {batch})"
    return f"trainer.total_epochs: {arithmetic} = {_epochs(steps, batch, rows)}"


def _validation_times(trainer: TrainerConfig) -> str:
    times = []
    if trainer.val_before_train:
        times.append("before training")
    if trainer.test_freq > 0:
        times.append(f"every {trainer.test_freq} steps")
    times.append("at the end" if times else "never")
    return ", ".join(times)


def _found(number: int, noun: str) -> str:
    return counted(number, noun) if number else f"{noun}s NOT FOUND, so not checked,"


def _epochs(steps: int, batch_size: int, items: int) -> str:
    epochs = f" = {steps * batch_size / items:.2f} epochs" if items else ""
    return f"{steps} steps x {batch_size}{epochs}"


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """1 node, 2 nodes."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"
