"""What is on the device in each phase, and what vLLM requires to be free at its construction.

Llama-3.1-8B in bfloat16 with the distributed optimizer over 8 ranks, GPUs of 80 GiB, gpu_memory_utilization 0.6:

    parameters P     32 layers of 218,112,000, embedding and head 128,256 * 4096 each, final norm 4096 = 8,030,261,248
    weights          2 P                     = 14.958 GiB
    gradients        4 P, float32            = 29.915 GiB
    optimizer        12 P / 8                = 11.218 GiB
    vLLM             0.6 * 80 must be free   = 48 GiB

    start            14.958 + 48 = 62.958 of 80; with the gradient buffers on the device 92.873: refused by vLLM
    rollout          the same; without offloading 14.958 + 29.915 + 11.218 + 48 = 104.091
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from grpo_megatron.cli import main
from grpo_megatron.config import Config, RolloutConfig
from grpo_megatron.device import DeviceMemory
from grpo_megatron.models.architecture import Architecture
from grpo_megatron.models.engine_cache import EngineCache, engine_cache, engine_weights, kv_token_bytes, with_sequences
from grpo_megatron.models.families import architecture_of
from grpo_megatron.planning import phases
from grpo_megatron.planning.parameters import RunModels, memory_of_stages, parameters_from_table
from grpo_megatron.planning.phases import (
    ALL_REDUCE,
    CONTEXT,
    GIB,
    GRAPHS,
    PROCESS_BYTES,
    Phase,
    host_parts,
    memory_phases,
    phase_problems,
    reserved_bytes,
)
from grpo_megatron.training.colocation import memory_problem
from tests import tiny, worlds
from tests.models.test_moe import MODELS
from tests.planning import published
from tests.runs import make_run

P = 8_030_261_248
PINNED = (2 * 4096 + 2**25 + 2**24 + 2**27 + 2**26) / 218_112_000  # a layer's tensors as powers of two: 15 % more
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
OFFLOAD = {"offload_optimizer": True, "offload_reference": True, "override_transformer_config": FULL}
WITH_GRADIENTS = {**OFFLOAD, "offload_optimizer": False}
ITERATIVE = {"iteration_steps": 2}


def arch_8b() -> Architecture:
    return published.architecture("Llama-3.1-8B")


def config_of(megatron: dict[str, Any] | None = None, **sections: Any) -> Config:
    actor = {**sections.pop("actor", {}), "megatron": OFFLOAD if megatron is None else megatron}
    return Config.model_validate({"model": {"path": "x"}, "actor": actor, **sections})


def phases_of(
    config: Config, *, world_size: int = 8, reward_models: int = 0, has_critic: bool = False
) -> dict[str, Phase]:
    arch = arch_8b()
    policy = parameters_from_table(arch, config.actor.megatron)
    critic = policy if has_critic else None
    phases = memory_phases(config, arch, world_size, policy, [policy] * reward_models, critic)
    return {phase.name: phase for phase in phases}


def test_8b_on_80_gib_fits_at_the_start_only_without_gradient_buffers() -> None:
    config = config_of()
    phases = phases_of(config)
    assert arch_8b().num_parameters() == P == 32 * 218_112_000 + 2 * 128_256 * 4096 + 4096
    nccl = (
        3 * 2 * 24 * 12 * 2**20
    )  # rings and trees of the world, the data-parallel ranks and those of the gradients' norm
    assert phases["start"].parts == {"weights": 2 * P, "CUDA context": CONTEXT, "NCCL buffers": nccl}
    assert phases["start"].utilization == 0.6
    assert all(phase.fits(80 * GIB) for phase in phases.values())
    assert not list(phase_problems(config, arch_8b(), list(phases.values()), 80 * GIB))

    on_device = config_of(WITH_GRADIENTS)
    phases = phases_of(on_device)
    assert phases["start"].parts["gradients"] == 4 * P
    assert phases["start"].certain == 6 * P
    assert phases["start"].is_impossible(80 * GIB) and not phases["start"].is_impossible(113 * GIB)
    problems = list(phase_problems(on_device, arch_8b(), list(phases.values()), 80 * GIB))
    assert [problem.split()[1] for problem in problems] == ["start", "rollout"]
    assert (
        "weights 14.96 + gradients 29.92 + CUDA context ~0.50 + NCCL buffers ~1.69 + engine 0.6 x 80.00 = 48.00 = 95.06"
        in problems[0]
    )
    # 14.96 + 29.92 + 2.19 leave 32.93 of 80, and 21.71 beside the optimizer, too
    for problem, utilization in zip(problems, (0.41, 0.27), strict=True):
        remedy = f"set actor.megatron.offload_optimizer=true, or rollout.gpu_memory_utilization={utilization}, or"
        assert remedy in problem
        lowered = config_of(WITH_GRADIENTS, rollout={"gpu_memory_utilization": utilization})
        assert phases_of(lowered)[problem.split()[1]].fits(80 * GIB)


def test_what_is_reserved_is_counted_from_the_layout() -> None:
    """24 channels of a group, and 32 to each peer of the node that sends parts of weights, of 12 MiB each.

    TP4 x PP2 over 16 ranks: a ring each of the world, the tensors, the pipeline, the data, the gradients' norm and the
    engine; and a tree of each that has more than two ranks, which pipeline and data have not.
    """
    connection, arch = 12 * 2**20, arch_8b()
    layout = {"tensor_model_parallel_size": 4, "pipeline_model_parallel_size": 2}

    def reserved(rollout_tp: int, world_size: int, megatron: dict[str, Any] = layout, **rollout: Any) -> list[float]:
        rollout["tensor_model_parallel_size"] = rollout_tp
        return list(reserved_bytes(config_of(megatron, rollout=rollout), arch, world_size).values())

    assert reserved(4, 16) == [CONTEXT, (10 * 24 + 7 * 32) * connection, ALL_REDUCE, GRAPHS]
    assert reserved(1, 16, enforce_eager=True) == [CONTEXT, (8 * 24 + 7 * 32) * connection, 0, 0]
    assert reserved(16, 16)[2] == 0  # an engine on two nodes
    assert reserved(4, 8, {"tensor_model_parallel_size": 4})[1] == 9 * 24 * connection  # every rank has what it reads
    assert reserved(2, 8, {"tensor_model_parallel_size": 4})[1] == (8 * 24 + 7 * 32) * connection
    assert reserved(1, 1, {}) == [CONTEXT, 0, 0, GRAPHS]
    of_phase = {name: phase.parts.get("CUDA graphs", 0) for name, phase in phases_of(config_of()).items()}
    assert [name for name, size in of_phase.items() if not size] == ["load", "start", "rollout"]


def test_what_is_on_the_device_in_each_phase() -> None:
    """A reward model of the policy's size that learns: 2 P weights; 4 P + 12 P / 8 more while it is trained."""
    adam, training = 12 * P / 8, 4 * P + 12 * P / 8
    sizes = {
        "weights": 2 * P,
        "gradients": 4 * P,
        "optimizer": adam,
        "copy of weights": 2 * P,
        "reference": 2 * P,
        "engine weights": 2 * P,
    }
    expected = {
        "load": ("weights", "gradients", "copy of weights"),
        "start": ("weights",),
        "sync": ("weights", "engine weights"),
        "rollout": ("weights",),
        "scoring": ("weights", "gradients", "optimizer", "reference"),
        "update": ("weights", "gradients", "optimizer"),
    }
    phases = phases_of(config_of())
    assert list(phases) == list(expected)
    for name, parts in expected.items():
        assert phases[name].certain == sum(sizes[part] for part in parts), name

    learning = phases_of(config_of(algorithm=ITERATIVE, reward_model={"path": "r"}), reward_models=1)
    for name, phase in phases.items():
        reward = 0 if name in ("load", "start") else 2 * P
        assert learning[name].certain == phase.certain + reward, name
    assert learning["learn"].certain == learning["update"].certain + training

    stays = {"override_transformer_config": FULL}  # nothing is offloaded
    on_device = phases_of(config_of(stays, algorithm=ITERATIVE, reward_model={"path": "r"}), reward_models=1)
    assert on_device["rollout"].certain == 2 * P + training + 2 * P + (2 * P + training)
    assert on_device["update"].parts["reference"] == 2 * P


def test_lora_trains_and_keeps_adapters_only() -> None:
    """Rank 32 on all linear layers: a layer has 32 x (8,192 + 2 x 5,120 + 8,192 + 3 x 18,432) = 2,621,440 parameters more.

    Its weights have 218,103,808 parameters, of which gate and up, one weight, have 2 x 14,336 x 4,096. Recomputed as a whole,
    their merged copies are there together, with dW of one weight in bfloat16 and in float32.
    """
    adapters, layer, weight = 32 * 2_621_440, 218_103_808, 2 * 14_336 * 4_096
    phases = {}
    for mode in ("merged", "split"):
        config = config_of(WITH_GRADIENTS, actor={"lora": {"rank": 32, "mode": mode}})
        models = RunModels(arch_8b())
        memory = memory_phases(config, arch_8b(), 8, *models.stages(config))
        phases[mode] = {phase.name: phase for phase in memory}
        for name in ("update", "scoring", "rollout"):
            parts = phases[mode][name].parts
            assert (parts["weights"], parts["gradients"]) == (2 * (P + adapters), 4 * adapters)
            assert parts["optimizer"] == 12 * adapters / 8 and "reference" not in parts
        assert phases[mode]["load"].parts["copy of weights"] == 2 * adapters
    found = [phases["merged"][name].parts["merged weights"] for name in ("scoring", "update")]
    assert found == [2 * weight + 2 * weight, 2 * layer + 6 * weight]
    assert not any("merged weights" in phase.parts for phase in phases["split"].values())
    iterative = config_of(actor={"lora": {"rank": 32}}, algorithm=ITERATIVE)
    (memory,) = memory_of_stages(iterative, 8, *RunModels(arch_8b()).stages(iterative))
    assert memory.reference == memory.trained == 2 * adapters
    host = host_parts(iterative, arch_8b(), 8, memory)
    assert host["copies of a save"] == PINNED * 14 * adapters / 8 and host["offloaded optimizer"] == 12 * adapters / 8
    both = config_of(critic={"lora": {"rank": 32}})  # of a policy of which all is trained
    (memory,) = memory_of_stages(both, 8, *RunModels(arch_8b(), critic=arch_8b()).stages(both))
    assert memory.weights == 2 * P and memory.critic_weights > 2 * P - 2 * 128_256 * 4096
    assert memory.critic - memory.critic_weights == (4 + 12 / 8) * adapters


def test_teachers_sleep_and_score_one_after_the_other() -> None:
    """Two of the policy's size; the second in float32. With all ids, rows of their heads stay beside the policy's."""
    teachers = {"a": {"path": "a"}, "b": {"path": "b", "dtype": "float32"}}
    models, head = RunModels(arch_8b(), teachers=(arch_8b(), arch_8b())), 128_256 * 4096
    logits: list[float] = []
    for objective, heads in (({}, 0), ({"kl": "forward", "top_k": 0}, (2 + 4) * head)):
        actor = {"logprob_chunk_size": 4096}
        config = config_of(WITH_GRADIENTS, teachers=teachers, distillation=objective, actor=actor)
        phases = {one.name: one for one in memory_phases(config, arch_8b(), 8, *models.stages(config))}
        assert phases["teacher"].parts["teachers"] == 4 * P + heads
        assert phases["update"].parts.get("teachers", 0) == heads
        logits.append(phases["update"].parts["layer or logits"])
        (memory,) = memory_of_stages(config, 8, *models.stages(config))
        assert memory.teacher_weights == (2 * P, 4 * P)
        assert host_parts(config, arch_8b(), 8, memory)["offloaded weights"] == 2 * P * bool(memory.reference) + 6 * P
    assert logits[1] - logits[0] == (10 - 4.5) * 4 * 4096 * 128_256  # copies of a chunk


@pytest.mark.parametrize(
    ("teacher", "actor", "weights", "adapters"),
    [
        ({"self": "current"}, {}, 0, 0),
        ({"self": "start"}, {}, 1, 0),
        ({"self": "start"}, {"lora": {"rank": 8}}, 0, 0),
        ({"self": "start", "renew_steps": 5}, {"lora": {"rank": 8}}, 0, 1),
        ({"self": "start"}, {"lora": {"rank": 8, "path": "x"}}, 0, 1),
    ],
)
def test_a_teacher_that_is_the_policy_costs_what_differs(
    teacher: dict[str, Any], actor: dict[str, Any], weights: int, adapters: int
) -> None:
    config, models = config_of(teachers={"t": teacher}, actor=actor), RunModels(arch_8b(), teachers=(arch_8b(),))
    stages = models.stages(config)
    (memory,) = memory_of_stages(config, 8, *stages)
    assert memory.teacher_weights == (weights * 2 * P + adapters * 2 * (stages[0][0].adapters or 0),)


def test_the_host_has_offloaded_copies_and_a_share_of_every_save() -> None:
    """A save of 8 data-parallel ranks. A saved parameter is 2 bytes of weights and 12 of Adam; the gradients go nowhere.

    Pinned copies are rounded up to powers of two: qkv, 6,144 x 4,096, and 3 x 14,336 x 4,096 of the MLP.
    """
    policy, adam = parameters_from_table(arch_8b(), config_of().actor.megatron), 12 * P / 8

    def parts(config: Config, **models: Any) -> dict[str, float]:
        (memory,) = memory_of_stages(config, 8, policy, models.get("rewards", []), models.get("critic"))
        return host_parts(config, arch_8b(), 8, memory)

    expected = {"offloaded optimizer": adam, "offloaded weights": 2 * P, "copies of a save": PINNED * 14 * P / 8}
    assert parts(config_of()) == {"process": PROCESS_BYTES, **expected}
    with_critic = parts(config_of(critic={"offload": True}), critic=policy)
    assert with_critic["offloaded optimizer"] == 2 * adam and with_critic["offloaded weights"] == 4 * P
    assert with_critic["copies of a save"] == PINNED * 14 * P / 8  # one model after the other
    behind = parts(config_of(trainer={"async_save": True}), critic=policy)
    assert behind["copies of a save"] == PINNED * 28 * P / 8
    learns = parts(config_of(algorithm=ITERATIVE, reward_model={"path": "r"}), rewards=[policy, policy])
    assert learns["offloaded optimizer"] == 2 * adam and learns["offloaded weights"] == 4 * P
    nothing = config_of({"override_transformer_config": FULL}, trainer={"save_freq": -1})
    assert parts(nothing) == {"process": PROCESS_BYTES}


def test_the_critic_is_on_the_device_whole_or_in_part_or_only_in_its_own_phase() -> None:
    """Of the policy's size: 2 P weights, 4 P + 12 P / 8 to train it. The phase `critic` has all of it."""
    weights, training, plain = 2 * P, 4 * P + 12 * P / 8, phases_of(config_of())
    beside = {
        "optimizer offloaded": (OFFLOAD, False, weights),
        "all offloaded": (OFFLOAD, True, 0),
        "nothing offloaded": ({"override_transformer_config": FULL}, False, weights + training),
    }
    for megatron, offload, resident in beside.values():
        phases = phases_of(config_of(megatron, critic={"offload": offload}), has_critic=True)
        assert set(phases) == {*plain, "critic"}
        for name in ("sync", "rollout", "scoring", "update"):
            assert phases[name].parts.get("critic", 0) == resident, name
        assert phases["critic"].certain - phases["update"].certain == weights + training - resident
        assert "critic" not in {*phases["load"].parts, *phases["start"].parts}
    config = config_of(WITH_GRADIENTS)
    problems = list(phase_problems(config, arch_8b(), list(phases_of(config, has_critic=True).values()), 80 * GIB))
    assert any("phase rollout" in problem and "critic.offload=true" in problem for problem in problems), problems


def test_every_reward_model_is_on_the_device_or_one_at_a_time() -> None:
    """Three models, of 2 P each. The first learns with algorithm.iteration_steps: it is not offloaded."""
    sections = {"reward_model": {"path": "r"}, "algorithm": ITERATIVE}
    for offload, rewards, update in ((False, 3, 3), (True, 2, 1)):
        megatron = {**OFFLOAD, "offload_reference": offload}
        phases = phases_of(config_of(megatron, **sections), reward_models=3)
        assert phases["rewards"].parts["reward model"] == rewards * 2 * P
        assert phases["update"].parts["reward model"] == phases["rollout"].parts["reward model"] == update * 2 * P
        assert phases["rewards"].parts.get("reference", 0) == (0 if offload else 2 * P)
    frozen = phases_of(config_of({**OFFLOAD, "offload_reference": True}), reward_models=2)
    assert frozen["rewards"].parts["reward model"] == 2 * P
    assert "reward model" not in frozen["update"].parts and "rewards" not in phases_of(config_of())


@pytest.mark.parametrize(
    ("sections", "phase", "changes"),
    [
        # The engine samples from the reference, which is streamed into it.
        ({"algorithm": {"source": "initial"}}, "sync", {"reference": 2 * P}),
        ({"rollout": {"engine_kwargs": {"kv_cache_memory_bytes": 5 * GIB}}}, "rollout", {"KV cache": 5 * GIB}),
        ({"actor": {"use_kl_loss": False}}, "scoring", {"reference": None}),
        ({"rollout": {"update_weights_bucket_megabytes": 1024}}, "sync", {"sync buckets": GIB}),
    ],
)
def test_options_change_what_is_there(sections: Any, phase: str, changes: dict[str, float | None] | None) -> None:
    phases = phases_of(config_of(**sections))
    assert (phase in phases) == (changes is not None)
    for part, size in (changes or {}).items():
        assert phases[phase].parts.get(part) == size


def test_an_engine_that_never_sleeps_is_in_every_later_phase() -> None:
    awake = phases_of(config_of(rollout={"free_cache_engine": False}))
    assert [name for name, phase in awake.items() if not phase.utilization] == ["load"]
    asleep = phases_of(config_of())
    assert [name for name, phase in asleep.items() if phase.utilization] == ["start", "rollout"]


def test_the_smallest_device_fits_and_a_smaller_one_does_not() -> None:
    for phase in phases_of(config_of()).values():
        assert phase.fits(1.0001 * phase.smallest_device) and not phase.fits(0.9999 * phase.smallest_device)


def test_each_column_is_of_the_fullest_stage() -> None:
    """tp 1 x pp 4 on 8 ranks: stage 0 keeps 4 micro-batches; the last one has the head's logits, and its final norm."""
    pipeline = {**OFFLOAD, "pipeline_model_parallel_size": 4, "override_transformer_config": {}}
    phases = phases_of(config_of(pipeline))
    assert (phases["update"].stage, phases["scoring"].stage, phases["load"].stage) == (0, 3, 3)
    # Stages of 2 and 6 x 5 layers: of the equal middle stages, the first keeps most.
    ends = {"num_layers_in_first_pipeline_stage": 2}
    uneven = {**pipeline, "pipeline_model_parallel_size": 7, "override_transformer_config": ends}
    assert phases_of(config_of(uneven), world_size=7)["update"].stage == 1


def test_a_budget_without_room_for_a_cache_is_refused() -> None:
    config = config_of(rollout={"gpu_memory_utilization": 0.15})
    (problem,) = phase_problems(config, arch_8b(), list(phases_of(config).values()), 80 * GIB)
    assert "0.15 x 80.00 GiB = 12.00 GiB leaves no KV cache beside the engine's weights of 14.96 GiB" in problem


# -- the engine's cache -------------------------------------------------------------------------------------------------
# How many sequences an engine's cache holds. vLLM's own count of blocks: tests/rollout/checks.py.
#
# Llama-3.1-8B in bfloat16 on 80 GiB, share 0.6, tp 1: 32 layers x 2 x 8 heads x 128 x 2 bytes = 131,072 bytes per token.
#
#     weights     8,030,261,248 x 2                                              = 16,060,522,496
#     workspace   8,192 tokens x 2 x (4 x 4,096 + 3 x 14,336) + 256 x 128,256 x 12 =  1,367,080,960
#     cache       0.6 x 80 x 2^30 - both                                         = 34,112,004,096
#
# so 16,265 blocks of 16 tokens = 260,240 tokens; a sequence of 4,096 has 256 blocks, and 63 sequences fit.


def cache_of(device: float = 80 * GIB, max_num_seqs: int | None = 256, **rollout: Any) -> EngineCache:
    rollout["max_num_seqs"] = max_num_seqs
    config = Config.model_validate({"model": {"path": "x"}, "rollout": rollout})
    return engine_cache(config.rollout, arch_8b(), 2, device, 4096)


def test_an_engines_cache_by_hand() -> None:
    found = cache_of()
    assert found.weights == 2 * P == 16_060_522_496
    assert found.workspace == 8192 * 2 * (4 * 4096 + 3 * 14336) + 256 * 128256 * 12 == 1_367_080_960
    assert found.cache == pytest.approx(34_112_004_096, abs=1)
    assert (found.token_bytes, found.tokens) == (131_072, 260_240)
    assert found.sequences(4096) == 63
    assert found.sequences(4097) == 16_265 // 257


def test_heads_are_divided_until_each_rank_has_one() -> None:
    arch = arch_8b()
    assert [kv_token_bytes(arch, tp, 2) // 1024 for tp in (1, 2, 8, 16)] == [128, 64, 16, 16]


def test_latents_are_on_every_rank() -> None:
    arch = architecture_of({**tiny.COMMON, **MODELS["deepseek_v3"]})
    assert arch.latent is not None
    size = arch.num_layers * (arch.latent.kv_rank + arch.latent.rope_dim) * 2
    assert kv_token_bytes(arch, 1, 2) == kv_token_bytes(arch, 4, 2) == size


def test_options_of_the_engine() -> None:
    assert cache_of(engine_kwargs={"kv_cache_memory_bytes": 5 * GIB}).cache == 5 * GIB
    assert cache_of(engine_kwargs={"kv_cache_dtype": "fp8"}).token_bytes == 65_536
    blocks = cache_of(engine_kwargs={"block_size": 128, "kv_cache_memory_bytes": 131_072 * 128 * 3 + 1})
    assert (blocks.tokens, blocks.sequences(129), blocks.sequences(128)) == (384, 1, 3)


def test_a_quantised_engine_has_one_byte_per_weight_but_at_the_ends() -> None:
    config = Config.model_validate({"model": {"path": "x"}, "rollout": {"quantization": "fp8_per_block"}})
    ends = 2 * 128_256 * 4096
    assert engine_weights(config.rollout, arch_8b(), 2) == P - ends + 2 * ends


def test_weights_that_leave_nothing() -> None:
    found = cache_of(device=16 * GIB)
    assert found.cache < 0 and found.tokens == found.sequences(1) == 0


# -- how many sequences an engine decodes at a time, where rollout.max_num_seqs is null ---------------------------------
# The same engine: 0.6 x 80 x 2^30 - 16,060,522,496 - 8,192 x 2 x (4 x 4,096 + 3 x 14,336) = 34,506,006,528 bytes. A sequence
# of 2,048 of 4,096 tokens has 2,048 x 131,072 + 128,256 x 12 = 269,974,528 of cache and workspace: 127 fit, so 120.


def test_the_number_of_sequences_by_hand() -> None:
    found = cache_of(max_num_seqs=None)
    assert found.max_num_seqs == 120 == 34_506_006_528 // 269_974_528 // 8 * 8
    assert found.derivation == "32.14 GiB / (2,048 tokens x 128 KiB + 128,256 words x 12 bytes) = 127"
    assert found.cache == pytest.approx(34_506_006_528 - 120 * 128_256 * 12)
    assert found.sequences(2048) >= 120 and cache_of(max_num_seqs=120) == replace(found, derivation="")

    assert cache_of(max_num_seqs=None, device=1000 * GIB).max_num_seqs == 1024
    assert cache_of(max_num_seqs=None, device=2 * GIB).max_num_seqs == 16
    assert cache_of(max_num_seqs=None, max_num_batched_tokens=100).max_num_seqs == 100
    given = cache_of(max_num_seqs=None, engine_kwargs={"kv_cache_memory_bytes": 5 * GIB})
    assert (given.max_num_seqs, given.derivation) == (16, "5.00 GiB / (2,048 tokens x 128 KiB) = 20")


def test_all_ranks_have_the_smallest_number_and_a_cpu_256() -> None:
    mesh: Any = SimpleNamespace(all_gather=lambda own: [own, own - 8])
    parts = (arch_8b(), "bfloat16", 4096, mesh)
    assert with_sequences(RolloutConfig(), *parts, 80 * GIB).max_num_seqs == 112
    assert with_sequences(RolloutConfig(max_num_seqs=999), *parts, 80 * GIB).max_num_seqs == 999
    assert with_sequences(RolloutConfig(), *parts, None).max_num_seqs == 256
    assert with_sequences(RolloutConfig(max_num_batched_tokens=100), *parts, None).max_num_seqs == 100
    assert RolloutConfig().sequences == 256


# -- vLLM's own check --------------------------------------------------------------------------------------------------

SNAPSHOTS = [(free * GIB + extra, 80 * GIB) for free in (33, 48, 64) for extra in (-1, 0)]


def refused_by_vllm(snapshots: list[tuple[int, int]], utilization: float) -> list[bool]:
    """vLLM's `request_memory` with these (free, total) bytes."""
    from vllm.v1.worker.utils import request_memory

    cache: Any = SimpleNamespace(gpu_memory_utilization=utilization)
    out = []
    for free, total in snapshots:
        snapshot: Any = SimpleNamespace(free_memory=free, total_memory=total, device_="cuda:0")
        try:
            assert request_memory(snapshot, cache) == utilization * total
            out.append(False)
        except ValueError:
            out.append(True)
    return out


@pytest.mark.slow
def test_the_check_before_the_engine_agrees_with_vllm() -> None:
    config = config_of()
    (refused,) = worlds.run(refused_by_vllm, 1, snapshots=SNAPSHOTS, utilization=0.6)
    problems = [memory_problem(config, DeviceMemory(free, total, 10 * GIB)) for free, total in SNAPSHOTS]
    assert [problem is not None for problem in problems] == refused == [True, True, True, False, False, False]
    assert "0.6 x 80.00 GiB = 48.00 GiB must be free when the engine is built, and 33.00 GiB are" in str(problems[1])
    assert "tensors have 10.00 GiB, and 37.00 GiB are of CUDA, NCCL and other processes; set a lower" in str(
        problems[1]
    )
    assert "offload_optimizer=true" in str(memory_problem(config_of({}), DeviceMemory(33 * GIB, 80 * GIB, 0)))
    assert memory_problem(config, None) is None  # on the CPU


def test_a_run_on_gpus_is_refused_before_anything_is_built() -> None:
    config = config_of(WITH_GRADIENTS)
    models = RunModels(arch_8b())
    with mock.patch.object(phases, "device_bytes", return_value=80 * GIB):
        problems = list(phases.phase_shortages(config, 8, models))
        fits = list(phases.phase_shortages(config_of(), 8, models))
        assert not list(phases.phase_shortages(config, 8, models, elsewhere=True))
    assert len(problems) == 2 and not fits
    assert list(phases.phase_shortages(config, 8, models, 80 * GIB, elsewhere=True)) == problems
    assert not list(phases.phase_shortages(config, 8, models))  # no GPU here


# -- the plan ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("run"))


def test_the_plan_marks_phases_that_do_not_fit(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A tiny model in 3 GiB: 1.34 GiB are reserved, so 0.6 x 3 GiB cannot be free. Exact parts fit: no error."""
    small_buckets = "rollout.update_weights_bucket_megabytes=1"
    command = ["train", str(run / "run.yaml"), "--dry-run", "trainer.device=auto", small_buckets]
    assert main.main([*command, "--gpu-memory", "80"]) == 0
    rows = {line[:24].strip(): line[24:].split() for line in capsys.readouterr().out.splitlines()}
    assert rows["of 80"] == ["fits"] * 6
    assert rows["engine's share"] == ["-", "48.00", "-", "48.00", "-", "-"]
    of_share = [rows[f"of it {part}"] for part in ("weights", "~ workspace", "~ KV cache")]
    assert all(cells[:3] + cells[4:] == ["-"] * 5 for cells in of_share)
    assert sum(float(cells[3]) for cells in of_share) == pytest.approx(48, abs=0.02)
    assert main.main([*command, "--gpu-memory", "3"]) == 0
    out = capsys.readouterr().out
    assert "fits      NO    fits      NO" in out and "- phase start does not fit a device of 3.00 GiB" in out
    texts = [line for line in out.splitlines() if "override_transformer_config=" not in line]  # one word, to be copied
    assert max(map(len, texts)) <= 120
    assert out.splitlines()[-1].startswith("  DOES NOT FIT 3 GiB") and "by the estimated parts" in out
    assert main.main(command) == 0
    out = capsys.readouterr().out
    assert "0.6 x" in out and "--gpu NAME (or GIB) marks the phases" in out
    assert main.main(["train", str(run / "run.yaml"), "--dry-run"]) == 0  # trainer.device=cpu
    assert "in each phase" not in capsys.readouterr().out
    assert main.main(["train", str(run / "run.yaml"), "--gpu-memory", "80"]) == 2
    assert "--gpu needs --dry-run" in capsys.readouterr().err
