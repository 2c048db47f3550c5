"""From `trainer.total_epochs` to training steps, once the rows are read.

    steps = total_epochs x floor(rows / data.train_batch_size)            as in verl

The sampler goes on from one epoch to the next without a gap (data/sampler.py), so the rows that a floor leaves over are
the last ones of the run, not the last ones of every epoch.
"""

from __future__ import annotations

from grpo_megatron.checks.problems import Problems
from grpo_megatron.config import Config


def steps_of_epochs(config: Config, rows: int) -> int | None:
    """The steps of the run; None without `trainer.total_epochs`, or where the rows could not be read."""
    epochs = config.trainer.total_epochs
    return None if epochs is None or rows == 0 else epochs * (rows // config.data.train_batch_size)


def with_total_steps(config: Config, rows: int) -> Config:
    """The config with `trainer.total_training_steps` as `trainer.total_epochs` has it. `rows` are those of the training."""
    steps = steps_of_epochs(config, rows)
    if steps is None:
        return config
    return config.model_copy(update={"trainer": config.trainer.model_copy(update={"total_training_steps": steps})})


def epoch_problems(config: Config, rows: int) -> Problems:
    """`trainer.total_epochs` gives at least one step, and no other number than a given `trainer.total_training_steps`."""
    trainer, batch = config.trainer, config.data.train_batch_size
    steps = steps_of_epochs(config, rows)
    if steps is None:
        return
    counted = (
        f"trainer.total_epochs={trainer.total_epochs} x floor({rows} rows / data.train_batch_size={batch}) = {steps}"
    )
    if steps == 0:
        yield f"{counted} steps; set data.train_batch_size={rows} or less"
    elif "total_training_steps" in trainer.model_fields_set and trainer.total_training_steps != steps:
        yield (
            f"{counted} steps, and trainer.total_training_steps={trainer.total_training_steps}; leave one of them out"
        )


def profile_problems(profiled: range | None, steps: int) -> Problems:
    """A run of so many steps has those that --profile names."""
    if profiled is not None and profiled.stop > steps:
        yield (
            f"--profile: the run has {steps} steps, counted from 0, so there is no step {profiled[-1]}; name earlier steps, or"
            " raise trainer.total_training_steps"
        )
