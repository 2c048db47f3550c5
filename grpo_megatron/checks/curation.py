"""Pass rates that weight the prompts, and the folder of rollout files."""

from __future__ import annotations

from grpo_megatron.checks.problems import Problems
from grpo_megatron.config import Config, SamplingConfig
from grpo_megatron.storage.run_files import owner_problem, rollout_files


def curation_problems(config: Config) -> Problems:
    yield from _sampling(config)
    yield from _rollout_files(config)


def _sampling(config: Config) -> Problems:
    sampling = config.data.sampling
    if sampling.pass_rates is None:
        default = SamplingConfig()
        for name in SamplingConfig.model_fields:
            if (value := getattr(sampling, name)) != getattr(default, name):
                yield f"data.sampling.{name}={value} needs pass rates; set data.sampling.pass_rates, or leave it out"
        return
    if config.algorithm.source == "file":
        yield (
            "data.sampling.pass_rates chooses among prompts, and algorithm.source=file reads prompts with responses;"
            " filter the file with `grpo-megatron curate`, or leave pass_rates out"
        )
    low, high = sampling.min_pass_rate, sampling.max_pass_rate
    if low > high:
        yield f"data.sampling.min_pass_rate={low:g} is above max_pass_rate={high:g}; swap them"
    if sampling.weight != "uniform" and not config.data.shuffle:
        yield (
            f"data.sampling.weight={sampling.weight} draws prompts at random, and data.shuffle=false takes them in the"
            " file's order; set shuffle=true, or weight=uniform"
        )
    if sampling.weight == "uniform" and sampling.uniform_share:
        yield (
            f"data.sampling.uniform_share={sampling.uniform_share:g} has no effect with data.sampling.weight=uniform;"
            " set weight=p(1-p), say, or leave it out"
        )


def _rollout_files(config: Config) -> Problems:
    folder, trainer = config.trainer.rollout_data_dir, config.trainer
    if folder is None:
        return
    key = f"trainer.rollout_data_dir={str(folder)!r}"
    if config.algorithm.source == "file":
        yield f"{key}: algorithm.source=file draws no responses, which could be written there; leave it out"
    if folder.resolve() == trainer.output_dir.resolve():
        yield f"{key} is trainer.output_dir; set a folder in it, such as {str(trainer.output_dir / 'rollouts')!r}"
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not existing.is_dir():
        yield f"{key}: {str(existing)!r} is a file, not a folder; choose another"
        return
    is_inside = folder.resolve().is_relative_to(trainer.output_dir.resolve())
    if trainer.resume_mode == "disable" and is_inside:
        return  # moved aside with the rest of the earlier run
    if trainer.resume_mode == "disable" and rollout_files(folder):
        yield f"{key} holds an earlier run's rollouts, which trainer.resume_mode=disable keeps; choose another folder"
    elif problem := owner_problem(folder, trainer.output_dir):
        yield f"{key}: {problem}"
