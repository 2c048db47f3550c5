"""The printed plan: what a config comes to, in numbers, before anything is started. `train --dry-run` shows it.

    parameters of a rank = those of its pipeline stage as Megatron-Core builds it on the meta device; where it is not
                           installed, the sum of the weight table's shards
    bytes per parameter  = weights 2 (bfloat16) or 4; gradients 4; Adam 8, with bfloat16 4 more for a float32 copy

The distributed optimizer divides the last by the number of data-parallel ranks. Activations, logits and the engine's
cache are not counted: they depend on what is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import yaml

from grpo_megatron.checks.layout import stage_layers
from grpo_megatron.config import Config
from grpo_megatron.models.architecture import Architecture
from grpo_megatron.models.families import table_of
from grpo_megatron.models.mapping import WeightRow, is_expert, is_layered

if TYPE_CHECKING:
    from grpo_megatron.checks.validate import Checked

WIDTH = 100
GIB = 2**30
DTYPE_BYTES = {"float32": 4, "bfloat16": 2}


def describe(config: Config, checked: Checked, world_size: int) -> str:
    """The plan of a validated config: layout, step, lengths, model, memory, data, then every key. Several lines."""
    stages, source = _stages(config, checked.arch, world_size)
    sections = {
        "Layout": _layout(config, world_size),
        "One step": _step(config, world_size),
        "Lengths, in tokens": _lengths(config, checked.arch),
        "Model": _model(config, checked),
        f"Memory of one rank, in GiB ({source})": _memory(config, checked.arch, world_size, stages),
        "Data": _data(config, checked),
    }
    parts = [f"{title}\n" + "\n".join(f"  {line}" for line in lines) for title, lines in sections.items()]
    resolved = yaml.safe_dump(
        config.model_dump(mode="json"), sort_keys=False, width=WIDTH - 40, default_flow_style=None
    )
    return "\n\n".join([*parts, f"Resolved configuration\n\n{resolved}"])


def _line(name: str, text: str) -> str:
    return f"{name:<18}{text}"


def _layout(config: Config, world_size: int) -> Iterator[str]:
    megatron, rollout_tp = config.actor.megatron, config.rollout.tensor_model_parallel_size
    tp, pp = megatron.tensor_model_parallel_size, megatron.pipeline_model_parallel_size
    nodes, each = config.trainer.nnodes, config.trainer.n_gpus_per_node
    planned = (
        f"= {_count(nodes, 'node')} x {each}" if world_size == nodes * each else f"(the config has {nodes} x {each})"
    )
    yield _line("ranks", f"{world_size} {planned}")
    extras = [
        *["sequence parallel"] * megatron.use_sequence_parallel,
        *["distributed optimizer"] * megatron.use_distributed_optimizer,
    ]
    cp = megatron.context_parallel_size
    sizes = f"tp {tp} x {f'cp {cp} x ' if cp > 1 else ''}pp {pp} x dp {world_size // (tp * cp * pp)}"
    yield _line("training", ", ".join([sizes, *extras, config.model.dtype]))
    yield _line("rollout", f"{_count(world_size // rollout_tp, 'engine')} of tp {rollout_tp}")


def _step(config: Config, world_size: int) -> Iterator[str]:
    actor, n = config.actor, config.rollout.n
    batch = config.data.train_batch_size
    mini = actor.ppo_mini_batch_size or batch
    megatron = actor.megatron
    dp = world_size // (
        megatron.tensor_model_parallel_size * megatron.context_parallel_size * megatron.pipeline_model_parallel_size
    )
    blocks = world_size // config.rollout.tensor_model_parallel_size
    drawn = f"{_count(batch, 'prompt')} x {n} = {batch * n:,}"
    yield _line("samples", f"{drawn}, about {_share(batch * n, blocks)} an engine")
    updates = f"{_count(batch // mini, 'mini-batch', 'es')} x {_count(actor.ppo_epochs, 'epoch')}"
    yield _line("optimizer steps", f"{updates} = {batch // mini * actor.ppo_epochs}, of {mini * n:,} samples each")
    yield _line("a dp rank's share", f"about {_share(mini * n, dp)} samples of each optimizer step")
    cap = f"at most {actor.ppo_max_token_len_per_gpu:,} tokens"
    if actor.ppo_micro_batch_size_per_gpu:
        cap += f" and {_count(actor.ppo_micro_batch_size_per_gpu, 'sequence')}"
    yield _line("micro-batch", f"{cap}, packed")
    reference = "no reference model"
    if actor.use_kl_loss:
        reference = f"{actor.kl_loss_coef:g} x {actor.kl_loss_type} to the reference"
    yield _line("objective", f"{config.algorithm.adv_estimator}, {actor.loss_mode}, {actor.loss_agg_mode}; {reference}")


def _lengths(config: Config, arch: Architecture) -> Iterator[str]:
    prompt, response = config.data.max_prompt_length, config.data.max_response_length
    yield _line(
        "sequence",
        f"prompt {prompt:,} + response {response:,} = {prompt + response:,}"
        f" of the model's {arch.max_position_embeddings:,}",
    )


def _model(config: Config, checked: Checked) -> Iterator[str]:
    arch = checked.arch
    yield _line("path", str(config.model.path))
    yield _line(
        "architecture",
        f"{arch.family}: {arch.num_layers} layers x {arch.hidden_size}, MLP {arch.ffn_hidden_size},"
        f" vocabulary {arch.vocab_size:,}{' (tied)' * arch.tied}",
    )
    heads = f"{arch.num_attention_heads} heads of {arch.head_dim}, {arch.num_query_groups} for keys and values"
    yield _line("attention", heads)
    yield _line("parameters", f"{arch.num_parameters():,}")
    if checked.has_weights:
        yield _line("weights", "complete, by name and shape")
    else:
        yield _line("weights", "NOT FOUND, so not checked; training needs *.safetensors in the folder")
    if checked.tokenizer is None:
        yield _line("tokenizer", "NOT FOUND, so neither it nor the lengths of prompts were checked")
    else:
        yield _line("tokenizer", f"{len(checked.tokenizer):,} tokens, ends with {checked.tokenizer.eos_token!r}")


def _stages(config: Config, arch: Architecture, world_size: int) -> tuple[list[tuple[int, int]], str]:
    """(layers, parameters of one rank) of each pipeline stage, and where they are from."""
    megatron = config.actor.megatron
    try:
        from grpo_megatron.models.meta import count_stages
    except ImportError:
        layers = stage_layers(arch.num_layers, megatron) or []
        counts = stage_parameters(
            arch, layers, megatron.tensor_model_parallel_size, megatron.expert_model_parallel_size
        )
        return counts, "parameters from the weight table; Megatron-Core is not installed here"
    stages = count_stages(arch, megatron, config.model.dtype, world_size)
    total = sum(stage.whole for stage in stages)
    assert total == arch.num_parameters(), f"the stages hold {total:,} parameters, the model {arch.num_parameters():,}"
    return [(stage.layers, stage.parameters) for stage in stages], "parameters counted in Megatron-Core's own modules"


def _memory(config: Config, arch: Architecture, world_size: int, stages: list[tuple[int, int]]) -> Iterator[str]:
    megatron, itemsize = config.actor.megatron, DTYPE_BYTES[config.model.dtype]
    tp, pp = megatron.tensor_model_parallel_size, megatron.pipeline_model_parallel_size
    sharing = world_size // (tp * pp) if megatron.use_distributed_optimizer else 1
    optimizer_bytes = 8 + (4 if config.model.dtype == "bfloat16" else 0)
    reference = itemsize if config.actor.use_kl_loss else 0
    yield f"{'stage':>5} {'layers':>6} {'parameters':>15} {'weights':>9} {'gradients':>9} {'optimizer':>9} " + (
        f"{'reference':>9} {'together':>9}"
    )
    for stage, (layers, count) in enumerate(stages):
        bytes_ = [count * itemsize, count * 4, count * optimizer_bytes / sharing, count * reference]
        columns = " ".join(f"{part / GIB:>9.3f}" for part in [*bytes_, sum(bytes_)])
        yield f"{stage:>5} {layers:>6} {count:>15,} {columns}"
    engine = arch.num_parameters() * itemsize / config.rollout.tensor_model_parallel_size
    yield f"engine weights: {engine / GIB:.3f} more, while it is awake. Activations, logits and KV cache not counted."


def stage_parameters(arch: Architecture, layers: Sequence[int], tp: int, ep: int = 1) -> list[tuple[int, int]]:
    """(layers, parameters of one rank) of each pipeline stage; a tied head on another stage is a copy."""
    rows = table_of(arch)
    embedding = [row for row in rows if row.megatron.startswith("embedding.")]
    ends = [row for row in rows if not is_layered(row) and row not in embedding]
    if arch.tied and len(layers) > 1:
        ends += embedding
    one_layer = _size([row for row in rows if is_layered(row) and not is_expert(row)], arch, tp)
    one_layer += arch.num_experts // ep * _size([row for row in rows if is_expert(row)], arch, tp)
    counts = [number * one_layer for number in layers]
    counts[0] += _size(embedding, arch, tp)
    counts[-1] += _size(ends, arch, tp)
    return list(zip(layers, counts, strict=True))


def _size(rows: Sequence[WeightRow], arch: Architecture, tp: int) -> int:
    return sum(math.prod(row.local_shape(arch, tp)) for row in rows)


def _data(config: Config, checked: Checked) -> Iterator[str]:
    trainer, sft = config.trainer, config.sft
    if sft.steps:
        rows = len(checked.supervised_rows)
        yield _line("warm-up", f"{_read(rows, 'row')}; {_epochs(sft.steps, sft.train_batch_size, rows)}")
    if trainer.total_training_steps:
        prompts = len(checked.train_prompts) or len(checked.offline_groups)
        epochs = _epochs(trainer.total_training_steps, config.data.train_batch_size, prompts)
        yield _line("training", f"{_read(prompts, 'prompt')} of task {config.data.task}; {epochs}")
    if checked.val_prompts:
        when = ["before training"] * trainer.val_before_train
        when += [f"every {trainer.test_freq} steps"] * (trainer.test_freq > 0)
        times = ", ".join([*when, "at the end"] if when else ["never"])
        yield _line("evaluation", f"{_count(len(checked.val_prompts), 'prompt')}, {times}")
    yield _line("output", str(trainer.output_dir))


def _read(number: int, noun: str) -> str:
    return _count(number, noun) if number else f"{noun}s NOT FOUND, so not checked,"


def _epochs(steps: int, batch_size: int, items: int) -> str:
    epochs = f" = {steps * batch_size / items:.2f} epochs" if items else ""
    return f"{steps} steps x {batch_size}{epochs}"


def _count(number: int, noun: str, plural: str = "s") -> str:
    return f"{number:,} {noun}{plural if number != 1 else ''}"


def _share(number: int, parts: int) -> str:
    return f"{number // parts:,}" if number % parts == 0 else f"{number / parts:,.1f}"
