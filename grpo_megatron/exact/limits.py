"""Refusals of configs that `model.exact` does not cover. Each refusal names what it would take."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from grpo_megatron.algo.advantages import advantage_estimators
from grpo_megatron.algo.losses import loss_facts
from grpo_megatron.config import Config
from grpo_megatron.config.problems import Problems, written
from grpo_megatron.device import read_hardware
from grpo_megatron.exact.rowwise import NUM_BLOCKS, VOCABULARY_MULTIPLE


def exact_problems(
    config: Config, world_size: int, arch: Any, engine_problem: str | None = None, *, elsewhere: bool = False
) -> Problems:
    """`arch`: of model.path, or None if it cannot be read. `engine_problem`: `rollout.build.exact_engine_problem`.

    `elsewhere`: the plan is for another machine.
    """
    if not config.model.exact:
        return
    sizes = _sizes(config, arch, world_size) if arch is not None else ()
    for problem in (*_settings(config, engine_problem, elsewhere), *sizes):
        yield f"model.exact=true: {problem}, or leave model.exact out"


def _settings(config: Config, engine_problem: str | None, elsewhere: bool) -> Iterator[str]:
    rollout, megatron, algorithm = config.rollout, config.actor.megatron, config.algorithm
    correction = algorithm.rollout_correction
    if config.trainer.device not in ("auto", "cpu") or (not elsewhere and read_hardware(config.trainer.device).is_cuda):
        yield (
            "its expressions are those of the CPU; set trainer.device=cpu, or for a GPU rollout.batch_invariant=true and"
            " actor.megatron.deterministic=true"
        )
    if algorithm.source != "policy":
        yield f"algorithm.source={algorithm.source}: the policy samples nothing that it could equal; set algorithm.source=policy"
    elif engine_problem is not None:
        yield engine_problem
    if correction.rollout_rs is not None or correction.rollout_is not in ("token", None) or correction.bypass_mode:
        key = (
            "bypass_mode" if correction.bypass_mode else "rollout_is" if correction.rollout_rs is None else "rollout_rs"
        )
        yield f"algorithm.rollout_correction.{key} corrects a difference that is 0; leave it out"
    filtered = algorithm.filter_groups
    for key, is_set in (
        ("algorithm.replay.ratio", algorithm.replay.ratio > 0),
        ("rollout.partial.over_sample", rollout.partial.is_on),
        ("rollout.lag", rollout.lag > 0),
        ("algorithm.filter_groups.max_staleness", filtered.enable and filtered.max_staleness > 0),
    ):
        if is_set:
            yield f"{key}={written(config.at(key))} trains on samples of earlier weights, which differ; leave it out, or 0"
    for key in (
        "actor.megatron.overlap_grad_reduce",
        "actor.megatron.overlap_param_gather",
        "actor.megatron.fp8.recipe",
        "actor.lora.rank",
        "rollout.quantization",
    ):
        if config.at(key):
            yield f"{key}={written(config.at(key))} is not covered; leave it out"
    if megatron.context_parallel_size > 1:
        yield f"actor.megatron.context_parallel_size={megatron.context_parallel_size} is not covered; leave it out"
    if advantage_estimators.facts(algorithm.adv_estimator).needs_values:
        yield f"algorithm.adv_estimator={algorithm.adv_estimator} needs a critic, which is not covered; set another"
    if advantage_estimators.facts(algorithm.adv_estimator).needs_score_norms:
        yield f"algorithm.adv_estimator={algorithm.adv_estimator} reads a sum over the vocabulary; set another"
    if config.reward_model.path is not None and algorithm.iteration_steps is not None:
        yield "reward_model.path with algorithm.iteration_steps is a model that learns, which is not covered; freeze it"
    if loss_facts(config.actor).paired:
        yield f"actor.loss_mode={config.actor.loss_mode} reads pairs of rows, which are not covered; set another"


def _sizes(config: Config, arch: Any, world_size: int) -> Iterator[str]:
    megatron = config.actor.megatron
    tp, pp = megatron.tensor_model_parallel_size, megatron.pipeline_model_parallel_size
    for name, is_there in (
        ("experts: their order depends on which tokens they get", arch.num_experts),
        ("latent attention", arch.latent),
        ("norms after attention and MLP", arch.has_norms_after),
        ("gated delta nets", arch.delta),
        ("sliding windows", arch.sliding_window),
        ("attention sinks", arch.sinks),
        ("a vision tower", arch.vision),
    ):
        if is_there:
            yield f"the family {arch.family} has {name}; set another model.path"
    for name, size in (("attention width", arch.attention_size), ("MLP width", arch.ffn_hidden_size)):
        if size % NUM_BLOCKS:
            yield (
                f"the {name} {size} cannot be cut into {NUM_BLOCKS} blocks, {size} / {NUM_BLOCKS} ="
                f" {size / NUM_BLOCKS:g}; set another model.path"
            )
    key = f"actor.megatron.tensor_model_parallel_size={tp}"
    dp = world_size // (tp * pp)
    if dp and NUM_BLOCKS % dp:
        yield (
            f"{world_size} ranks / (tp {tp} x pp {pp}) = {dp} data-parallel ranks do not divide the {NUM_BLOCKS} parts of a"
            " mini-batch; set trainer.n_gpus_per_node so that there are 1, 2, 4 or 8"
        )
    if arch.tied and pp > 1:
        yield (
            f"actor.megatron.pipeline_model_parallel_size={pp} with tied embeddings, whose two stages add up their gradients"
            " in another order; set 1"
        )
    if NUM_BLOCKS % config.rollout.tensor_model_parallel_size:
        yield (
            f"rollout.tensor_model_parallel_size={config.rollout.tensor_model_parallel_size} does not divide the"
            f" {NUM_BLOCKS} blocks of every sum; set 1, 2, 4 or 8"
        )
    if NUM_BLOCKS % tp:
        yield f"{key} does not divide the {NUM_BLOCKS} blocks of every sum; set 1, 2, 4 or 8"
    elif tp > 1 and arch.vocab_size % VOCABULARY_MULTIPLE:
        yield (
            f"{key} with a vocabulary of {arch.vocab_size}, which is not a multiple of {VOCABULARY_MULTIPLE}, so that the"
            " ranks' parts are no whole blocks; set 1"
        )
