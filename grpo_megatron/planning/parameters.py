"""Bytes of one rank, before anything is built: parameters of all models per pipeline stage, and activations of a pass.

Parameters are counted from the weight table and exact. Activations and logits are estimates, compared with measured peaks
in tests/planning/test_parameters.py. Not counted: the h weights of a reward model's score head.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from grpo_megatron.algo.losses import needs_reference
from grpo_megatron.config import ActorConfig, Config, DataConfig, LoraConfig, MegatronConfig, VisionConfig
from grpo_megatron.models.architecture import Architecture, Vision
from grpo_megatron.models.engine_cache import tower_layer_bytes
from grpo_megatron.models.families import table_of
from grpo_megatron.models.lora.table import lora_rows
from grpo_megatron.models.weights.table import WeightRow, is_expert, is_layered

DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
GRADIENT_BYTES = 4
FIRST, LAST = "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"
SAVED_OPTIMIZER_BYTES = 12  # per parameter in a checkpoint: the weight in float32 and two moments of Adam


@dataclass(frozen=True)
class StageParameters:
    """Numbers of parameters on one rank of a pipeline stage."""

    layers: int
    dense: int
    experts: int
    fp8: int = 0  # weights of linear layers that an FP8 recipe does not leave in bfloat16
    adapters: int | None = None  # the factors of LoRA, besides; None: all parameters are trained
    merged_layer: int = 0  # the adapted weights of the largest layer
    merged_weight: int = 0  # the largest adapted weight
    frozen: int = 0  # of `dense`: parameters of a vision tower that are not trained

    @property
    def total(self) -> int:
        """The number of parameters without adapters."""
        return self.dense + self.experts

    @property
    def with_adapters(self) -> int:
        """The number of parameters with adapters."""
        return self.total + (self.adapters or 0)

    @property
    def trained(self) -> StageParameters:
        """The parameters with gradients."""
        if self.adapters is not None:
            return replace(self, dense=self.adapters, experts=0, frozen=0)
        return replace(self, dense=self.dense - self.frozen, frozen=0)


Stages = list[StageParameters]  # of a model
TeacherStages = list[tuple[Architecture, Stages]]


@dataclass(frozen=True)
class StageMemory:
    """Bytes of one rank of a pipeline stage; the first three are the policy's."""

    weights: float
    gradients: float
    optimizer: float
    reference: float
    reward_model: float  # of all reward models
    reward_training: float  # of `reward_model`: gradients and optimizer; 0 if all are frozen
    frozen_rewards: tuple[float, ...] = ()  # of `reward_model`: the weights of each frozen one
    critic: float = 0.0  # weights, gradients and optimizer
    critic_weights: float = 0.0
    trained: float = 0.0  # of `weights`: what is trained, with LoRA the adapters
    critic_trained: float = 0.0  # of `critic_weights`, likewise
    teacher_weights: tuple[float, ...] = ()  # of each teacher
    teacher_heads: float = 0.0  # their output heads' rows beside the policy's (distillation.top_k=0)
    teacher_working: float = 0.0  # the most that a pass of a teacher needs besides

    @property
    def teachers(self) -> float:
        return sum(self.teacher_weights) + self.teacher_heads

    @property
    def total(self) -> float:
        of_policy = self.weights + self.gradients + self.optimizer
        return of_policy + self.reference + self.reward_model + self.critic + self.teachers


def parameters_from_table(
    arch: Architecture,
    megatron: MegatronConfig,
    *,
    has_output_head: bool = True,
    lora: LoraConfig | None = None,
    vision: VisionConfig | None = None,
) -> list[StageParameters]:
    """Counts the parameters of every pipeline stage of a valid layout, as the sum of the weight table's shards.

    A tied head on another stage than the embedding is a copy of it. A vision tower is complete on every rank of the first
    stage. `lora` None: all parameters are trained, those of a tower as `vision` says (None: they are not).
    """
    tp, ep = megatron.tensor_model_parallel_size, megatron.expert_model_parallel_size
    layers = stage_layers(arch.num_layers, megatron)
    assert layers is not None, "the layout was checked"
    rows = [row for row in table_of(arch) if not row.is_constant]
    embedding, tower = ([row for row in rows if row.megatron.startswith(name)] for name in ("embedding.", "visual."))
    ends = [row for row in rows if not is_layered(row) and row not in (*embedding, *tower)]
    if arch.tied and len(layers) > 1 and has_output_head:
        ends += embedding
    in_fp8 = fp8_layers(arch.num_layers, megatron)
    stages, first = [], 0
    for number in layers:
        sizes = {"dense": 0, "experts": 0, "fp8": 0}
        for layer, row in itertools.product(range(first, first + number), filter(is_layered, rows)):
            if row.is_in(layer, arch):
                size = _size([row], arch, tp) * (arch.num_experts // ep if is_expert(row) else 1)
                sizes["experts" if is_expert(row) else "dense"] += size
                sizes["fp8"] += size * (layer in in_fp8 and _is_linear(row, arch, tp))
        stages.append(StageParameters(number, **sizes))
        first += number
    stages[0] = replace(
        stages[0],
        dense=stages[0].dense + _size([*embedding, *tower], arch, tp),
        frozen=frozen_parameters(arch, vision),
    )
    stages[-1] = replace(stages[-1], dense=stages[-1].dense + _size(ends, arch, tp))
    return stages if lora is None or lora.rank is None else _with_adapters(stages, arch, lora, tp)


def frozen_parameters(arch: Architecture, vision: VisionConfig | None) -> int:
    """Counts the parameters of a vision tower, if there is one, that are not trained."""
    if arch.vision is None:
        return 0
    vision, count = vision or VisionConfig(), arch.vision.num_parameters
    tower, merger = count(arch.hidden_size, False), count(arch.hidden_size, True)
    return tower * vision.freeze_tower + merger * vision.freeze_merger


def _with_adapters(stages: Stages, arch: Architecture, lora: LoraConfig, tp: int) -> Stages:
    factors, weights = ([[0] for _ in range(arch.num_layers)] for _ in range(2))  # sizes per layer
    rows = list(lora_rows(arch, lora).values())  # A and B in turn
    for a, b in zip(rows[::2], rows[1::2], strict=True):
        layer = int(a.megatron.split(".")[2])
        factors[layer].append(_size([a, b], arch, tp))
        weights[layer].append(_size([a.base], arch, tp))
    out, first = [], 0
    for stage in stages:
        local = slice(first, first + stage.layers)
        adapters, largest = sum(map(sum, factors[local])), max(map(max, weights[local]))
        out.append(replace(stage, adapters=adapters, merged_layer=max(map(sum, weights[local])), merged_weight=largest))
        first += stage.layers
    return out


def fp8_layers(num_layers: int, megatron: MegatronConfig) -> range:
    """Returns the layers that an FP8 recipe computes in FP8, of weights in bfloat16; none without a recipe."""
    fp8 = megatron.fp8
    if fp8.recipe is None or fp8.param_gather:  # whose weights are FP8 themselves, in two layouts of a byte
        return range(0)
    if not fp8.first_last_layers_bf16:
        return range(num_layers)
    return range(fp8.num_layers_at_start_in_bf16, num_layers - fp8.num_layers_at_end_in_bf16)


def _is_linear(row: WeightRow, arch: Architecture, tp: int) -> bool:
    return len(row.local_shape(arch, tp)) == 2 and ".router." not in row.megatron


def _size(rows: Sequence[WeightRow], arch: Architecture, tp: int) -> int:
    return sum(math.prod(row.local_shape(arch, tp)) for row in rows)


def pinned_ratio(arch: Architecture, tp: int) -> float:
    """Returns the pinned bytes per byte of a layer's tensors, each in pinned memory of its own.

    torch rounds each size up to a power of two (ATen/core/CachingHostAllocator.h). The ratio of a tensor is the same for 2
    or 4 bytes per element, and for a half, a quarter, ... of it, as replicas write them.
    """
    rows = [row for row in table_of(arch) if is_layered(row) and not row.is_constant]
    sizes = [(_size([row], arch, tp), arch.num_experts if is_expert(row) else 1) for row in rows]
    pinned = sum(count << (size - 1).bit_length() for size, count in sizes)
    return pinned / sum(size * count for size, count in sizes)


@dataclass(frozen=True)
class RunModels:
    """The models of a run."""

    arch: Architecture  # of the policy
    reward_archs: tuple[Architecture, ...] = ()  # that of `reward_model.path` first
    critic: Architecture | None = None
    has_head: bool = True  # False: the policy learns to score, and has no output head
    teachers: tuple[Architecture, ...] = ()  # in the order of the config
    _known: dict[tuple[object, ...], Stages] = field(default_factory=dict, repr=False, compare=False)

    def stages(self, config: Config) -> tuple[Stages, list[Stages], Stages | None, TeacherStages]:
        """Counts every stage of the policy, of each reward model, of the critic, of each teacher. The layout must be valid."""
        actor, critic = config.actor, None
        policy = self._stages(self.arch, config, has_output_head=self.has_head, lora=actor.lora, vision=actor.vision)
        rewards = [self._stages(arch, config, has_output_head=False) for arch in self.reward_archs]
        if self.critic is not None:
            critic = self._stages(self.critic, config, has_output_head=False, lora=config.critic.lora)
        teachers = []
        for arch, teacher in zip(self.teachers, config.local_teachers.values(), strict=True):
            teachers.append((arch, self._stages(arch, config.with_values({"actor": teacher.layout(config.actor)}))))
        return policy, rewards, critic, teachers

    def _stages(self, arch: Architecture, config: Config, **of_model: Any) -> Stages:
        megatron = config.actor.megatron
        layers = str(sorted(megatron.override_transformer_config.items()))
        tp, pp = megatron.tensor_model_parallel_size, megatron.pipeline_model_parallel_size
        in_fp8 = fp8_layers(arch.num_layers, megatron)
        key = (id(arch), layers, tp, pp, megatron.expert_model_parallel_size, in_fp8, str(of_model))
        if key not in self._known:
            self._known[key] = parameters_from_table(arch, megatron, **of_model)
        return self._known[key]


def memory_of_stages(
    config: Config,
    world_size: int,
    policy: list[StageParameters],
    reward_models: Sequence[list[StageParameters]],
    critic: list[StageParameters] | None = None,
    teachers: TeacherStages | tuple[()] = (),
) -> list[StageMemory]:
    """Sizes each stage of the policy, of its reference if the method needs one, and of all other models.

    A parameter has 2 bytes (bfloat16) or 4 of weights. A trained one has 4 of gradients and 8 of Adam, with bfloat16 4 more
    for a float32 copy. With algorithm.iteration_steps the first reward model, that of `reward_model.path`, is trained.
    """
    itemsize = DTYPE_BYTES[config.model.dtype]
    has_reference = needs_reference(config.algorithm, config.actor) and not config.shares_reference
    keeps_adapters = config.shares_reference and bool(config.algorithm.iteration_steps or config.actor.lora.path)
    has_main = bool(reward_models) and config.reward_model.path is not None
    learns = has_main and config.algorithm.iteration_steps is not None
    out = []
    for number, stage in enumerate(policy):
        weights = [model[number].total * itemsize for model in reward_models]
        reward_training = _training(config, world_size, reward_models[0][number]) if learns else 0.0
        critic_weights = critic_training = critic_trained = 0.0
        if critic is not None:
            critic_weights = critic[number].with_adapters * itemsize
            critic_trained = critic[number].trained.total * itemsize
            critic_training = _training(config, world_size, critic[number].trained)
        out.append(
            StageMemory(
                weights=stage.with_adapters * itemsize,
                gradients=stage.trained.total * GRADIENT_BYTES,
                optimizer=_optimizer(config, world_size, stage.trained),
                reference=(stage.total * has_reference + (stage.adapters or 0) * keeps_adapters) * itemsize,
                reward_model=sum(weights) + reward_training,
                reward_training=reward_training,
                frozen_rewards=tuple(weights[1:] if learns else weights),
                critic=critic_weights + critic_training,
                critic_weights=critic_weights,
                trained=stage.trained.total * itemsize,
                critic_trained=critic_trained,
                **_teachers(config, number, teachers, stage.adapters or 0, is_last=number == len(policy) - 1),
            )
        )
    return out


def _teachers(
    config: Config, number: int, teachers: TeacherStages | tuple[()], adapters: int, *, is_last: bool
) -> dict[str, Any]:
    """Sizes what the teachers have on stage `number`, where the policy has `adapters`: the fields of StageMemory."""
    actor, distillation = config.actor, config.distillation
    tp = actor.megatron.tensor_model_parallel_size
    has_heads = is_last and distillation.reads_states
    weights, heads, working = [], 0.0, 0.0
    for (arch, stages), teacher in zip(teachers, config.local_teachers.values(), strict=True):
        itemsize, layout = DTYPE_BYTES[teacher.dtype or config.model.dtype], teacher.layout(actor)
        has_layout = teacher.tensor_model_parallel_size is not None  # then the largest stage: a rank may have any
        total = max(stage.total for stage in stages) if has_layout else stages[number].total
        is_policy = teacher.self == "current" or (teacher.self and actor.lora.rank is not None and not config.sft.steps)
        if is_policy:  # with the adapters of another time, or without any
            has_copy = teacher.self == "start" and bool(teacher.renew_steps or teacher.lag_steps or actor.lora.path)
            total = adapters * has_copy
        weights.append(total * itemsize)
        heads += has_heads * itemsize * arch.hidden_size * arch.padded_vocab_size(tp) / tp
        of_head = (is_last or has_layout) * head_bytes(arch, layout, itemsize, backward=False)
        working = max(working, forward_bytes(arch, layout, itemsize), of_head)
    return {"teacher_weights": tuple(weights), "teacher_heads": heads, "teacher_working": working}


def _training(config: Config, world_size: int, stage: StageParameters) -> float:
    """Sizes gradients and Adam's state on one rank."""
    return stage.total * GRADIENT_BYTES + _optimizer(config, world_size, stage)


def _optimizer(config: Config, world_size: int, stage: StageParameters) -> float:
    """Sizes Adam's state on one rank.

    The distributed optimizer divides it by the number of ranks with the same parameters: for a dense parameter the dp x cp
    data-parallel ranks, for an expert dp x cp / ep, because the other ranks have other experts.
    """
    megatron = config.actor.megatron
    per_parameter = 8 + (4 if config.model.dtype == "bfloat16" else 0)
    if not megatron.use_distributed_optimizer:
        return per_parameter * stage.total
    replicas = world_size // (megatron.tensor_model_parallel_size * megatron.pipeline_model_parallel_size)
    expert_replicas = replicas // megatron.expert_model_parallel_size
    return per_parameter * (stage.dense / replicas + stage.experts / expert_replicas)


def stage_layers(num_layers: int, megatron: MegatronConfig) -> list[int] | None:
    """Counts the layers of each pipeline stage, as Megatron divides them (evenly or not); None if it cannot."""
    ends: list[Any] = [megatron.override_transformer_config.get(end) for end in (FIRST, LAST)]
    given = [n for n in ends if n is not None]
    if not all(isinstance(n, int) and n > 0 for n in given):
        return None
    middle, rest = megatron.pipeline_model_parallel_size - len(given), num_layers - sum(given)
    if middle == 0:
        return given if rest == 0 else None
    if middle < 0 or rest < middle or rest % middle:
        return None
    stages = [ends[0], *[rest // middle] * middle, ends[1]]
    return [n for n in stages if n is not None]


# -- Activations and logits of one packed micro-batch ------------------------------------------------------------------
# Counted from what the local layers of models/layers/spec.py keep for the backward pass; Transformer Engine's fused layers
# keep less. Selective recomputation is not subtracted.


def recomputes_all(megatron: MegatronConfig) -> bool:
    """Returns True if the layers compute their activations again in the backward pass."""
    return megatron.override_transformer_config.get("recompute_granularity") == "full"


def kept_bytes(arch: Architecture, actor: ActorConfig, itemsize: int, *, stage: int, layers: int) -> float:
    """Sizes what a stage of `layers` layers keeps from its forward to its backward passes.

    Full recomputation keeps the input of each unit of layers only. Stage i of pp keeps activations of pp - i micro-batches.
    """
    megatron = actor.megatron
    layer, recomputed = layer_bytes(arch, actor, itemsize), 0
    units = 0.0
    if recomputes_all(megatron):
        number = _recompute_number(megatron, layers)
        is_block = megatron.override_transformer_config.get("recompute_method") == "block"
        recomputed = number if is_block else layers  # block: the first `number` layers, each a unit of its own
        units = recomputed if is_block else math.ceil(layers / number)
    in_flight = megatron.pipeline_model_parallel_size - stage
    return in_flight * (units * _layer_input(arch, actor, itemsize) + (layers - recomputed) * layer)


def working_bytes(arch: Architecture, actor: ActorConfig, itemsize: int, *, layers: int) -> float:
    """Sizes what the backward pass of one layer needs besides: gradients, and the unit of layers that is computed again."""
    tp = actor.megatron.tensor_model_parallel_size
    # Of the layer's output, and of the MLP's projection and product.
    gradients = _layer_input(arch, actor, itemsize) + _tokens(actor) * itemsize * 3 * arch.ffn_hidden_size / tp
    if not recomputes_all(actor.megatron):
        return gradients
    unit = _recompute_number(actor.megatron, layers)
    if actor.megatron.override_transformer_config.get("recompute_method") == "block":
        unit = int(unit == layers)  # the other layers' activations are used up before the first is computed again
    return gradients + unit * layer_bytes(arch, actor, itemsize)


def image_tokens(data: DataConfig, vision: Vision, *, in_turns: bool = False) -> tuple[int, int]:
    """Returns the tokens of a prompt's largest image, and of all its images; `in_turns`: of all images of a trajectory."""
    largest = data.max_prompt_length
    if data.image_max_pixels is not None:
        largest = min(largest, data.image_max_pixels // (vision.patch * vision.merge) ** 2)
    together = data.max_prompt_length + data.max_response_length
    return largest, together if in_turns else min(data.max_prompt_length, data.max_images * largest)


def tower_bytes(config: Config, arch: Architecture, itemsize: int) -> tuple[float, float]:
    """Sizes what a vision tower keeps from its forward to its backward passes, and what a forward pass needs.

    A frozen tower needs what a layer keeps of the largest image. A trained one keeps all layers (with full recomputation
    their inputs) and the mergers of all images of a micro-batch of prompts that are nothing but images. Features that are added
    behind layers (DeepStack) are kept with a frozen tower, too. Each image is computed by all tensor-parallel ranks of the
    first stage.
    """
    if (vision := arch.vision) is None:
        return 0.0, 0.0
    actor, data, layer = config.actor, config.data, tower_layer_bytes(vision, itemsize)
    largest, together = image_tokens(data, vision, in_turns=config.rollout.multi_turn.environment is not None)
    tokens = actor.ppo_max_token_len_per_gpu * together / (data.max_prompt_length + data.max_response_length)
    merger = 4 * (itemsize + vision.gated) * vision.merge**2 * vision.width * (1 + vision.levels)
    kept = vision.merge**2 * vision.width * itemsize if recomputes_all(actor.megatron) else layer  # inputs only
    per_token = 0 if actor.vision.freeze_tower else vision.depth * kept
    per_token += merger if per_token or not actor.vision.freeze_merger else 0
    per_token += itemsize * arch.hidden_size * (1 + vision.levels) if vision.levels else 0
    rotated = (
        44 * vision.merge**2 * vision.width
    )  # measured: a forward pass, which rotates in float32, needs at least this
    return actor.megatron.pipeline_model_parallel_size * tokens * per_token, float(largest * max(layer, rotated))


def merged_bytes(
    stage: StageParameters, lora: LoraConfig, actor: ActorConfig, itemsize: int, *, backward: bool
) -> float:
    """Sizes what merging adds to a pass of a stage with LoRA; 0 for all others.

    A pass multiplies by the merged weight of one layer at a time: that weight, and the part of it that is merged, or in a
    backward pass dW in the weight's type and in float32. Where layers are recomputed as a whole, the merged weights of a unit
    of layers are kept together; else nothing keeps one, under Transformer Engine either (models/lora/layers.py). Split LoRA
    keeps r numbers per adapted layer, which are not counted.
    """
    if lora.rank is None or lora.mode == "split":
        return 0.0
    weight, table = stage.merged_weight, actor.megatron.override_transformer_config
    if not backward:
        return 2.0 * itemsize * weight
    is_unit = recomputes_all(actor.megatron) and table.get("recompute_method") == "uniform"
    kept = stage.merged_layer * _recompute_number(actor.megatron, stage.layers) if is_unit else weight
    return float(itemsize * kept + (itemsize + 4) * weight)


def layer_bytes(arch: Architecture, actor: ActorConfig, itemsize: int) -> float:
    """Sizes what one layer keeps of one micro-batch on one rank, without recomputation. Per token:

    two norms   h (4 + 2 s) each: float32 input, result, result times weight; over tp under sequence parallelism (Gemma 3
                has four)
    attention   s (6 q + 3 k) / tp: projection, rotated queries and keys, results; with norms of q and k
                (4 + s) (q + k) / tp more
    MLP         s 5 f / tp: projection 2 f, activation, gate, product. With experts: of those that a token visits, and
                2 s h for each copy of the token that is sent to an expert and back
    latents     (4 + 3 s) for each element of a latent; its heads count as attention, with as many key heads as query
                heads (not compared with measured peaks)
    gates       (4 + 3 s) q / tp of an output gate (not compared either)
    delta nets  of layers with them instead of attention, on average over all: s (i + 3 c + 4 V k + 3 v + 64 V) + 8 v, over
                tp, with fla's rule: i rows of the input projection, c channels, V heads of k, v their sizes together (not
                compared; torch's rule on the CPU keeps far more)

    h is the hidden size, q and k the sizes of all query and all key heads, f the MLP's, s the bytes of a number.
    """
    tp = actor.megatron.tensor_model_parallel_size
    queries, keys = arch.num_attention_heads * arch.head_dim, arch.num_query_groups * arch.head_dim
    copies = arch.experts_per_token if arch.num_experts else 1
    shared = max(arch.shared_ffn_hidden_size, arch.dense_ffn_hidden_size - copies * arch.ffn_hidden_size)
    per_token = (
        (4 if arch.sandwich_norms else 2) * arch.hidden_size * (4 + 2 * itemsize) / _sequence_cut(actor.megatron)
    )
    per_token += itemsize * 5 * (copies * arch.ffn_hidden_size + shared) / tp
    attention = itemsize * (6 * queries + 3 * keys) / tp
    if arch.qk_norm or arch.post_norms:
        attention += (4 + itemsize) * (queries + keys) / tp
    if arch.output_gate:
        attention += (4 + 3 * itemsize) * queries / tp
    if (delta := arch.delta) is not None:
        rows = (
            delta.input_size + 3 * delta.conv_size + 3 * delta.value_size + delta.value_heads * (4 * delta.key_dim + 64)
        )
        linear = (itemsize * rows + 8 * delta.value_size) / tp
        attention += (linear - attention) * arch.num_linear_layers / arch.num_layers
    per_token += attention
    if arch.latent is not None:  # projections, float32 inputs of their norms, results, products
        latents = arch.latent.down_rows + (arch.latent.q_rank or 0)
        per_token += latents * (4 + 3 * itemsize) / _sequence_cut(actor.megatron)
    if arch.num_experts:
        per_token += 2 * itemsize * copies * arch.hidden_size
    return _tokens(actor) * per_token


def forward_bytes(arch: Architecture, actor: ActorConfig, itemsize: int) -> float:
    """Sizes the peak of a layer in a pass without gradients: about half of what it would keep for a backward pass."""
    return layer_bytes(arch, actor, itemsize) / 2


def teacher_scores_bytes(config: Config, teachers: Sequence[Architecture], world_size: int) -> float:
    """Sizes a step's scores of teachers on the host of a rank: per response token, the log-probability and the distribution."""
    distillation, megatron, data = config.distillation, config.actor.megatron, config.data
    if not config.teachers:
        return 0.0
    per_token = 4.0
    if distillation.kl != "sampled":
        states = max((arch.hidden_size for arch in teachers), default=0) * DTYPE_BYTES[config.model.dtype]
        per_token += 4 * (2 * distillation.top_k + 1) if distillation.top_k else states
    ranks = megatron.tensor_model_parallel_size * megatron.pipeline_model_parallel_size * megatron.context_parallel_size
    return per_token * data.train_batch_size * config.rollout.n * data.max_response_length * ranks / world_size


def head_bytes(
    arch: Architecture, actor: ActorConfig, itemsize: int, *, backward: bool, has_full_divergence: bool = False
) -> float:
    """Sizes what the output head (models/layers/head.py) needs on the last stage: logits of a chunk, and its weight's gradient.

    The forward pass has three float32 copies of a chunk's logits at a time; the backward pass has four and its result, or six
    with an entropy bonus. Triton's kernels on CUDA have one copy in the weight's type, so this is an upper bound there. A
    float32 weight's gradient is summed beside a chunk's product. A bfloat16 weight's is added to the gradient buffer, and the
    backward pass returns an empty tensor of the weight's size. A divergence from a teacher's full distribution has ten copies
    in the backward pass (measured: jsd; reverse has seven), and one of best tokens no more than without a teacher.
    """
    tp = actor.megatron.tensor_model_parallel_size
    rows = arch.padded_vocab_size(tp) / tp
    tokens = actor.ppo_max_token_len_per_gpu
    logits = 4 * min(actor.logprob_chunk_size, tokens) * rows
    hidden = itemsize * tokens * arch.hidden_size  # of the tokens with a target, from all tensor-parallel ranks
    if not backward:
        return hidden + 3 * logits
    weight = 0.0 if actor.lora.rank is not None else rows * arch.hidden_size  # the head of a base is frozen
    in_chunk = (10 if has_full_divergence else 6 if actor.entropy_coeff else 4 if itemsize == 4 else 4.5) * logits
    if itemsize == 4:
        return 2 * hidden + 4 * weight + max(in_chunk, logits + 4 * weight)
    return 2 * hidden + max(in_chunk, itemsize * weight)


def _recompute_number(megatron: MegatronConfig, layers: int) -> int:
    """Returns `recompute_num_layers`, at most the layers of a stage."""
    return min(layers, int(megatron.override_transformer_config.get("recompute_num_layers") or 1))


def _layer_input(arch: Architecture, actor: ActorConfig, itemsize: int) -> float:
    return _tokens(actor) * itemsize * arch.hidden_size / _sequence_cut(actor.megatron)


def _tokens(actor: ActorConfig) -> float:
    """Counts the tokens of a full micro-batch on one rank."""
    return actor.ppo_max_token_len_per_gpu / actor.megatron.context_parallel_size


def _sequence_cut(megatron: MegatronConfig) -> int:
    """Counts the ranks over which the activations outside attention and MLP are divided."""
    return megatron.tensor_model_parallel_size if megatron.use_sequence_parallel else 1
