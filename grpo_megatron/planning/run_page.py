"""The printed plan: what a config means in numbers, before anything is started. `train --dry-run` shows it."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from math import ceil
from typing import TYPE_CHECKING

from grpo_megatron.algo.losses import (
    folds_old_logprobs,
    forward_only_at_zero_advantage,
    has_kl_in_reward,
    has_kl_loss,
    needs_old_logprobs,
    needs_reference,
    policy_losses,
    reasons_for_old_pass,
)
from grpo_megatron.checks.environment import environment_lines
from grpo_megatron.checks.layout import data_parallel_size
from grpo_megatron.checks.machine import device_lines
from grpo_megatron.checks.methods import steps_of_epochs
from grpo_megatron.checks.model_folders import has_critic
from grpo_megatron.checks.names import sources_of
from grpo_megatron.checks.reward_call import reward_lines, trial_lines
from grpo_megatron.config import (
    Config,
    ScoringModel,
    TrainerConfig,
)
from grpo_megatron.data.sampler import Mixture
from grpo_megatron.memory.engine import engine_cache
from grpo_megatron.memory.parameters import (
    DTYPE_BYTES,
    SAVED_OPTIMIZER_BYTES,
    StageParameters,
    memory_of_stages,
)
from grpo_megatron.memory.phases import ESTIMATED, GIB, PARTS, Phase, memory_phases
from grpo_megatron.models.architecture import Architecture
from grpo_megatron.models.heads.folder import RewardFolder
from grpo_megatron.planning.traffic import weight_sync_lines
from grpo_megatron.types import Prompt

if TYPE_CHECKING:
    from grpo_megatron.checks.validate import Checked


# -- The data ----------------------------------------------------------------------------------------------------------


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


# -- Rows: all texts begin in the same column, and long ones go on below it --------------------------------------------

NAME_WIDTH = 18


def named_row(name: str, text: str) -> str:
    """A row of the page: a name of a fixed width, and a text."""
    return f"{name:<{NAME_WIDTH}}{text}"


def named_rows(pairs: Iterable[tuple[str, str]]) -> Iterator[str]:
    """One row for each (name, text)."""
    return (named_row(name, text) for name, text in pairs)


def fitted_row(line: str, width: int) -> list[str]:
    """The row in lines of at most `width` characters, where its words allow it. A line that is no row stays as it is."""
    name, text = line[:NAME_WIDTH], line[NAME_WIDTH:]
    is_row = name[-1:] == " " and text[:1].strip() and (name[0].strip() or not name.strip())
    if len(line) <= width or not is_row:
        return [line]
    return textwrap.wrap(
        line, width, subsequent_indent=" " * NAME_WIDTH, break_on_hyphens=False, break_long_words=False
    )


# -- One prompt, with special tokens as the tokenizer writes them ------------------------------------------------------

MAX_CHARACTERS = 3000  # of a long prompt, both ends


def prompt_lines(checked: Checked) -> Iterator[str]:
    """The prompt on which the reward was called, else the first one of the run. Nothing without prompts or a tokenizer."""
    prompt = _example(checked)
    if prompt is None or checked.tokenizer is None:
        return
    yield f"{prompt.uid}, {counted(len(prompt.prompt_ids), 'token')}:"
    text = str(checked.tokenizer.decode(list(prompt.prompt_ids), skip_special_tokens=False))
    yield from (f"  | {line}".rstrip() for line in _shortened(text).split("\n"))


def _example(checked: Checked) -> Prompt | None:
    called = [trial.prompt for trial in checked.reward_calls[:1]]
    lists: list[Sequence[Prompt]] = [called, checked.train_prompts, checked.val_prompts]
    offline = [group[0] for group in checked.offline_groups[:1]]
    return next((prompts[0] for prompts in [*lists, offline] if prompts), None)


def _shortened(text: str) -> str:
    if len(text) <= MAX_CHARACTERS:
        return text
    half = MAX_CHARACTERS // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half:,} characters are not shown ...]\n{text[-half:]}"


LABEL_WIDTH, CELL_WIDTH = 22, 8  # of the table of phases


def describe_run(
    config: Config, checked: Checked, world_size: int, device_gib: float | None = None, *, width: int = 120
) -> str:
    """The plan of a validated config: layout, step, lengths, model, memory, data. Several lines.

    `device_gib`: the memory of one device in GiB, to say which phases fit it. `width`: characters of a line, apart from
    tables and the prompt.
    """
    models = checked.models(config).stages(config)
    sections = {
        "Layout": _layout_lines(config, world_size),
        "One step": _step_lines(config, checked, world_size),
        "Lengths, in tokens": _length_lines(config, checked.arch),
        "Model": _model_lines(config, checked),
        "Memory of one rank, in GiB": chain(
            _memory_lines(config, world_size, *models), _host_lines(config, checked.arch, models[0])
        ),
        "Weight sync": named_rows(weight_sync_lines(config, checked.arch, world_size) if config.draws else []),
        "Data": named_rows(data_lines(config, checked)),
        "One prompt, as the model reads it": prompt_lines(checked),
        "The reward of two answers to it": named_rows(trial_lines(checked.reward_calls)),
    }
    if config.trainer.device != "cpu":
        phases = memory_phases(config, checked.arch, world_size, *models)
        title = "Device memory of one rank in each phase, in GiB (~: estimated)"
        sections[title] = _phase_lines(config, checked.arch, phases, device_gib, width - 2)
    written = {
        title: [f"  {part}" for line in lines for part in fitted_row(line, width - 2)]
        for title, lines in sections.items()
    }
    parts = ["\n".join([title, *map(str.rstrip, lines)]) for title, lines in written.items() if lines]
    return "\n\n".join(parts)


def _layout_lines(config: Config, world_size: int) -> Iterator[str]:
    megatron, rollout_tp = config.actor.megatron, config.rollout.tensor_model_parallel_size
    nodes, per_node = config.trainer.nnodes, config.trainer.n_gpus_per_node
    if world_size == nodes * per_node:
        yield named_row("ranks", f"{world_size} = {counted(nodes, 'node')} x {per_node}")
    else:
        yield named_row("ranks", f"{world_size} (the config has {nodes} x {per_node})")
    tp, cp = megatron.tensor_model_parallel_size, megatron.context_parallel_size
    pp, ep = megatron.pipeline_model_parallel_size, megatron.expert_model_parallel_size
    sizes = [f"tp {tp}", f"pp {pp}", f"dp {data_parallel_size(config, world_size)}"]
    if cp > 1:
        sizes.insert(1, f"cp {cp}")
    training = [" x ".join(sizes)]
    if ep > 1:
        training.append(f"experts over ep {ep}")
    if megatron.use_sequence_parallel:
        training.append("sequence parallel")
    if megatron.use_distributed_optimizer:
        training.append("distributed optimizer")
    yield named_row("training", ", ".join([*training, config.model.dtype]))
    engines = f"{counted(world_size // rollout_tp, 'engine')} of tp {rollout_tp}"
    if config.rollout.has_whole_experts:
        engines += f", experts over ep {config.rollout.expert_parallel_size}"
    yield named_row("rollout", engines if config.draws else "no engine: nothing is drawn")
    yield from (named_row(name, text) for name, text in device_lines(config))


def _step_lines(config: Config, checked: Checked, world_size: int) -> Iterator[str]:
    actor, batch = config.actor, config.data.train_batch_size
    n = _samples_of_prompt(config)
    samples_per_update = actor.mini_batch_size(batch) * n
    engines = world_size // config.rollout.tensor_model_parallel_size
    dp = data_parallel_size(config, world_size)
    if config.algorithm.source == "file":
        responses = "" if n == 1 else f" x {n} responses = {batch * n:,}"
        yield named_row("samples", f"{counted(batch, 'row')}{responses}, read from files")
    else:
        samples = f"{counted(batch, 'prompt')} x {n} = {batch * n:,}"
        yield named_row("samples", f"{samples}, about {_divided(batch * n, engines)} per engine")
    mini_batches = counted(actor.num_mini_batches(batch), "mini-batch", "mini-batches")
    updates = f"{mini_batches} x {counted(actor.ppo_epochs, 'epoch')} = {actor.num_updates(1, batch)}"
    yield named_row("optimizer steps", f"{updates}, of {samples_per_update:,} samples each")
    yield named_row("per dp rank", f"about {_divided(samples_per_update, dp)} samples of each optimizer step")
    cap = f"at most {actor.ppo_max_token_len_per_gpu:,} tokens"
    if actor.ppo_micro_batch_size_per_gpu:
        cap += f" and {counted(actor.ppo_micro_batch_size_per_gpu, 'sequence')}"
    yield named_row("micro-batch", f"{cap}, packed")
    yield named_row("objective", f"{config.algorithm.adv_estimator}, {actor.loss_mode}, {actor.loss_agg_mode}")
    lines = chain(
        partial_lines(config),
        pass_lines(config),
        reward_lines(config, checked.reward_calls),
        environment_lines(config, checked.first_messages),
    )
    yield from (named_row(name, text) for name, text in lines)


def _samples_of_prompt(config: Config) -> int:
    """Rows of a file have one response, or a chosen and a rejected one."""
    if config.algorithm.source != "file":
        return config.rollout.n
    return 2 if policy_losses.facts(config.actor.loss_mode).paired else 1


def _length_lines(config: Config, arch: Architecture) -> Iterator[str]:
    prompt, response = config.data.max_prompt_length, config.data.max_response_length
    yield named_row(
        "sequence",
        f"prompt {prompt:,} + response {response:,} = {prompt + response:,}"
        f" of the model's {arch.max_position_embeddings:,}",
    )


def _model_lines(config: Config, checked: Checked) -> Iterator[str]:
    arch = checked.arch
    yield named_row("path", str(config.model.path))
    mlp = f"MLP {arch.ffn_hidden_size}"
    if arch.num_experts:
        mlp = f"{arch.experts_per_token} of {arch.num_experts} experts of {arch.ffn_hidden_size}"
        mlp += f" + {arch.shared_ffn_hidden_size} shared" if arch.shared_ffn_hidden_size else ""
        mlp += f" (first {arch.num_dense_layers}: MLP {arch.dense_ffn_hidden_size})" if arch.num_dense_layers else ""
    vocabulary = f"vocabulary {arch.vocab_size:,}"
    if arch.tied:
        vocabulary += " (tied)"
    yield named_row(
        "architecture", f"{arch.family}: {arch.num_layers} layers x {arch.hidden_size}, {mlp}, {vocabulary}"
    )
    heads = f"{arch.num_attention_heads} heads of {arch.head_dim}, {arch.num_query_groups} for keys and values"
    if arch.latent is not None:
        heads += f"; latents of {arch.latent.q_rank or 'no'} (queries), {arch.latent.kv_rank} (keys and values)"
    yield named_row("attention", heads)
    yield named_row("parameters", f"{arch.num_parameters():,}")
    if checked.has_weights:
        yield named_row("weights", "complete, by name and shape")
    else:
        yield named_row("weights", "NOT FOUND, so not checked; training needs *.safetensors in the folder")
    if checked.tokenizer is None:
        yield named_row("tokenizer", "NOT FOUND, so neither it nor the lengths of prompts were checked")
    else:
        yield named_row("tokenizer", f"{len(checked.tokenizer):,} tokens")
        assert checked.end_tokens is not None
        for number, text in enumerate(checked.end_tokens.lines(checked.tokenizer)):
            yield named_row("" if number else "answers end with", text)
    reward_models = reward_model_lines(config, checked.reward_folder, checked.reward_folders)
    yield from (named_row("reward model", text) for text in reward_models)
    yield from (named_row("critic", text) for text in critic_lines(config, checked.critic_folder))


def _memory_lines(
    config: Config,
    world_size: int,
    policy: list[StageParameters],
    reward_models: Sequence[list[StageParameters]],
    critic: list[StageParameters] | None,
) -> Iterator[str]:
    """One line per pipeline stage: what `memory/` counts, and the sum."""
    others = [name for name, models in (("reward model", reward_models), ("critic", critic)) if models]
    titles = ["weights", "gradients", "optimizer", "reference", *others, "together"]
    widths = [max(9, len(title)) for title in titles]
    header = " ".join(f"{title:>{width}}" for title, width in zip(titles, widths, strict=True))
    yield f"{'stage':>5} {'layers':>6} {'parameters':>15} {header}"
    for number, memory in enumerate(memory_of_stages(config, world_size, policy, reward_models, critic)):
        parts = [memory.weights, memory.gradients, memory.optimizer, memory.reference]
        parts += [getattr(memory, name.replace(" ", "_")) for name in others]
        columns = zip([*parts, memory.total], widths, strict=True)
        cells = " ".join(f"{part / GIB:>{width}.3f}" for part, width in columns)
        yield f"{number:>5} {policy[number].layers:>6} {policy[number].total:>15,} {cells}"


def _host_lines(config: Config, arch: Architecture, policy: list[StageParameters]) -> Iterator[str]:
    """What `trainer.async_save` and `rollout.sync=delta` (sync/delta.py) keep on the host."""
    if config.trainer.async_save and config.trainer.save_freq != -1:
        stage = max(stage.total for stage in policy)
        copy = stage * (DTYPE_BYTES[config.model.dtype] + SAVED_OPTIMIZER_BYTES) / GIB
        yield f"trainer.async_save, on the host: at most {copy:.3f} for the copy that is written (critic and reward model: more)"
    if config.rollout.sync != "delta" or not config.draws:
        return
    itemsize = DTYPE_BYTES[config.model.dtype]
    engine = arch.num_parameters() * itemsize / config.rollout.tensor_model_parallel_size / GIB
    sent = max(stage.total for stage in policy) * itemsize / GIB
    yield (
        f"rollout.sync=delta, on the host: at most {engine + sent:.3f} = {engine:.3f} of the engine's shard +"
        f" {sent:.3f} sent (engine_options.sleep_level=1 keeps the engine's shard there, too)"
    )


def _phase_lines(
    config: Config, arch: Architecture, phases: list[Phase], device_gib: float | None, width: int
) -> Iterator[str]:
    """A column per phase, a row per part; then the smallest device that fits, or whether `device_gib` does."""
    count = (width - LABEL_WIDTH) // CELL_WIDTH
    for start in range(0, len(phases), count):
        yield from [""] if start else []
        yield from _phase_table(config, arch, phases[start : start + count], device_gib)
    if device_gib is None:
        yield "--gpu NAME (or GIB) marks the phases that do not fit."


def _phase_table(config: Config, arch: Architecture, phases: list[Phase], device_gib: float | None) -> Iterator[str]:
    yield _cells("", [phase.name for phase in phases])
    if config.actor.megatron.pipeline_model_parallel_size > 1:
        yield _cells("fullest stage", [str(phase.stage) for phase in phases])
    for name in PARTS:
        sizes = [phase.parts.get(name) for phase in phases]
        if not any(sizes):
            continue
        label = f"~ {name}" if name in ESTIMATED else name
        yield _cells(label, ["-" if size is None else f"{size / GIB:.2f}" for size in sizes])
    if device_gib is None:
        if config.draws:
            yield _cells("engine's share", [f"{p.utilization:g} x" if p.utilization else "-" for p in phases])
        yield _cells("a device of", [f"{phase.smallest_device / GIB:.2f}" for phase in phases])
        return
    shares = [phase.utilization * device_gib for phase in phases]
    if config.draws:
        yield _cells("engine's share", [f"{share:.2f}" if share else "-" for share in shares])
        yield from _share_lines(config, arch, phases, device_gib)
    yield _cells("together", [f"{p.total / GIB + share:.2f}" for p, share in zip(phases, shares, strict=True)])
    device = device_gib * GIB
    yield _cells(f"of {device_gib:.5g}", ["fits" if phase.fits(device) else "NO" for phase in phases])


def _share_lines(config: Config, arch: Architecture, phases: list[Phase], device_gib: float) -> Iterator[str]:
    """What the engine does with its share. Before its start the share must only be free."""
    cache = engine_cache(config, arch, DTYPE_BYTES[config.model.dtype], device_gib * GIB)
    has_share = [phase.utilization > 0 and phase.name != "start" for phase in phases]
    for label, size in (("weights", cache.weights), ("~ workspace", cache.workspace), ("~ KV cache", cache.cache)):
        cell = f"{max(0.0, size) / GIB:.2f}"
        yield _cells(f"  of it {label}", [cell if has else "-" for has in has_share])


def _cells(label: str, cells: list[str]) -> str:
    return f"{label:<{LABEL_WIDTH}}" + "".join(f"{cell:>{CELL_WIDTH}}" for cell in cells)


def _divided(number: int, parts: int) -> str:
    """The quotient, with one decimal if it is no whole number."""
    return f"{number // parts:,}" if number % parts == 0 else f"{number / parts:,.1f}"


# -- What a step computes, and with which models ------------------------------------------------------------------------


def critic_lines(config: Config, folder: RewardFolder | None) -> Iterator[str]:
    """The plan's line about the critic; none without one."""
    if not has_critic(config.algorithm):
        return
    section, only = config.critic, config.critic_only_steps
    parts = ["the model that the policy starts from" if folder is None else str(folder.path)]
    if folder is None or not folder.has_head:
        parts.append("new head")
    parts.append(f"gamma {config.algorithm.gamma:g}, lambda {_shown_lambda(config)}")
    updates = section.num_updates(1, config.actor, config.data.train_batch_size)
    parts.append(f"{updates} updates per step")
    if only:
        parts.append(f"trained alone before step {only}")
    yield ", ".join(parts)


def _shown_lambda(config: Config) -> str:
    """Of the policy's advantages, and of the value's targets where that differs."""
    alpha, lam = config.critic.lam_alpha, config.algorithm.lam
    of_policy = f"{lam:g}" if alpha is None else f"1 - 1 / ({alpha:g} x length)"
    targets = lam if config.critic.lam is None else config.critic.lam
    return of_policy if alpha is None and targets == lam else f"{of_policy} (targets {targets:g})"


def reward_model_lines(config: Config, main: RewardFolder | None, others: Mapping[str, RewardFolder]) -> Iterator[str]:
    """One line of the plan per model."""
    if main is not None:
        learns = config.algorithm.iteration_steps is not None
        yield _description(main, config.reward_model, learns=learns)
    for name, folder in others.items():
        yield f"{name}: {_description(folder, config.reward_models[name], learns=False)}"


def _description(folder: RewardFolder, model: ScoringModel, *, learns: bool) -> str:
    parts = [f"{folder.path}: {folder.arch.num_parameters():,} parameters", "learns" if learns else "frozen"]
    if folder.kind == "process":
        parts.append(f"scores steps, which end with {model.step_separator!r}")
    if model.coefficient != 1:
        parts.append(f"x {model.coefficient:g}")
    return ", ".join(parts)


def partial_lines(config: Config) -> Iterator[tuple[str, str]]:
    """The line about responses that take several steps; none without them."""
    partial, batch = config.rollout.partial, config.data.train_batch_size
    if partial.is_on:
        yield (
            "partial rollouts",
            f"{ceil(batch * partial.over_sample)} prompts in progress for a batch of {batch}, in rounds of"
            f" {partial.chunk_tokens:,} tokens; none waits more than {partial.max_staleness} steps",
        )


def pass_lines(config: Config) -> Iterator[tuple[str, str]]:
    """(name, text) of each line: old log-probabilities, reference, what is left out of the update."""
    actor, algorithm, batch = config.actor, config.algorithm, config.data.train_batch_size
    name = "old log-probs"
    if folds_old_logprobs(algorithm, actor, batch):
        yield name, "of the update's own forward pass"
    elif not needs_old_logprobs(algorithm, actor):
        yield name, f"not read by {actor.loss_mode}"
    for reason in reasons_for_old_pass(algorithm, actor, batch):
        yield name, f"a pass before the update: {reason}"
    yield "reference", "; ".join(_uses_of_reference(config))
    if forward_only_at_zero_advantage(algorithm, actor):
        yield "backward pass", "left out for rows of advantage 0, where the plan finds this cheaper"
    if actor.share_prompts:
        yield "prompts", "one copy for the responses in a micro-batch, where the heaviest rank gets lighter"


def _uses_of_reference(config: Config) -> Iterator[str]:
    """What the reference model is used for."""
    actor, algorithm = config.actor, config.algorithm
    if not needs_reference(algorithm, actor):
        yield "no reference model" + (", as actor.kl_loss_coef=0" if actor.use_kl_loss else "")
        return
    if has_kl_loss(actor):
        yield f"{actor.kl_loss_coef:g} x {actor.kl_loss_type} in the loss"
    if has_kl_in_reward(algorithm):
        yield f"{algorithm.kl_ctrl.kl_coef:g} x {algorithm.kl_penalty} in the reward"
    if algorithm.source == "initial":
        yield "draws the responses"
    if not (has_kl_loss(actor) or has_kl_in_reward(algorithm) or algorithm.source == "initial"):
        yield f"read by {actor.loss_mode}"
