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

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from grpo_megatron.cli import main
from grpo_megatron.config import Config
from grpo_megatron.device import DeviceMemory
from grpo_megatron.memory import phases
from grpo_megatron.memory.parameters import RunModels, parameters_from_table
from grpo_megatron.memory.phases import GIB, RESERVED, Phase, memory_phases, phase_problems
from grpo_megatron.models.architecture import Architecture
from grpo_megatron.models.families import architecture_of
from grpo_megatron.training.colocation import memory_problem
from tests import worlds
from tests.runs import make_run

P = 8_030_261_248
LLAMA_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "vocab_size": 128256,
}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
OFFLOAD = {"offload_optimizer": True, "offload_reference": True, "override_transformer_config": FULL}
WITH_GRADIENTS = {**OFFLOAD, "offload_optimizer": False}
ITERATIVE = {"iteration_steps": 2}


def arch_8b() -> Architecture:
    return architecture_of(LLAMA_8B)


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
    assert phases["start"].parts == {"weights": 2 * P, "CUDA, NCCL, graphs": RESERVED}
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
        "weights 14.96 + gradients 29.92 + CUDA, NCCL, graphs ~2.00 + engine 0.6 x 80.00 = 48.00 = 94.87" in problems[0]
    )
    # 14.96 + 29.92 + 2 leave 33.13 of 80, and 21.91 beside the optimizer, too
    for problem, utilization in zip(problems, (0.41, 0.27), strict=True):
        remedy = f"set actor.megatron.offload_optimizer=true, or rollout.gpu_memory_utilization={utilization}, or"
        assert remedy in problem
        lowered = config_of(WITH_GRADIENTS, rollout={"gpu_memory_utilization": utilization})
        assert phases_of(lowered)[problem.split()[1]].fits(80 * GIB)


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
        "save": ("weights", "optimizer"),
    }
    phases = phases_of(config_of())
    assert list(phases) == list(expected)
    for name, parts in expected.items():
        assert phases[name].certain == sum(sizes[part] for part in parts), name
    assert phases["save"].parts["gathered states"] == 4 * P * (1 + 1 / 8)

    learning = phases_of(config_of(algorithm=ITERATIVE, reward_model={"path": "r"}), reward_models=1)
    for name, phase in phases.items():
        reward = 0 if name in ("load", "start") else 2 * P
        assert learning[name].certain == phase.certain + reward, name
    assert learning["learn"].certain == learning["update"].certain + training

    stays = {"override_transformer_config": FULL}  # nothing is offloaded
    on_device = phases_of(config_of(stays, algorithm=ITERATIVE, reward_model={"path": "r"}), reward_models=1)
    assert on_device["rollout"].certain == 2 * P + training + 2 * P + (2 * P + training)
    assert on_device["update"].parts["reference"] == 2 * P


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
        for name in ("sync", "rollout", "scoring", "update", "save"):
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
        # The engine draws from the reference, which is streamed into it.
        ({"algorithm": {"source": "initial"}}, "sync", {"reference": 2 * P}),
        ({"rollout": {"engine_kwargs": {"kv_cache_memory_bytes": 5 * GIB}}}, "rollout", {"KV cache": 5 * GIB}),
        ({"actor": {"use_kl_loss": False}}, "scoring", {"reference": None}),
        ({"trainer": {"save_freq": -1}}, "save", None),
        # Buckets of at least 40,000,000 parameters; the embedding, of 128,256 x 4,096, is a larger one.
        (
            {"actor": {}, "megatron": {**OFFLOAD, "overlap_grad_reduce": True}},
            "save",
            {"gathered states": 4 * 128_256 * 4096 * (1 + 1 / 8)},
        ),
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
    """A tiny model in 2.5 GiB: 2 GiB are reserved, so 0.6 x 2.5 GiB cannot be free. Exact parts fit: no error."""
    small_buckets = "rollout.update_weights_bucket_megabytes=1"
    command = ["train", str(run / "run.yaml"), "--dry-run", "trainer.device=auto", small_buckets]
    assert main.main([*command, "--gpu-memory", "80"]) == 0
    rows = {line[:24].strip(): line[24:].split() for line in capsys.readouterr().out.splitlines()}
    assert rows["of 80"] == ["fits"] * 7
    assert rows["engine's share"] == ["-", "48.00", "-", "48.00", "-", "-", "-"]
    of_share = [rows[f"of it {part}"] for part in ("weights", "~ workspace", "~ KV cache")]
    assert all(cells[:3] + cells[4:] == ["-"] * 6 for cells in of_share)
    assert sum(float(cells[3]) for cells in of_share) == pytest.approx(48, abs=0.02)
    assert main.main([*command, "--gpu-memory", "2.5"]) == 0
    out = capsys.readouterr().out
    assert "fits      NO    fits      NO" in out and "- phase start does not fit a device of 2.50 GiB" in out
    assert max(map(len, out.splitlines())) <= 120
    assert out.splitlines()[-1].startswith("  DOES NOT FIT 2.5 GiB") and "by the estimated parts" in out
    assert main.main([*command, "--gpu", "0.001"]) == 2  # 1 MiB: not even the weights
    captured = capsys.readouterr()
    assert "- phase load does not fit a device of 0.00 GiB" in captured.out
    assert "the run does not fit a GPU of 0.00 GiB, even without the estimated parts (phase load" in captured.err
    assert main.main(command) == 0
    out = capsys.readouterr().out
    assert "0.6 x" in out and "--gpu NAME (or GIB) marks the phases" in out
    assert main.main(["train", str(run / "run.yaml"), "--dry-run"]) == 0  # trainer.device=cpu
    assert "in each phase" not in capsys.readouterr().out
    assert main.main(["train", str(run / "run.yaml"), "--gpu-memory", "80"]) == 2
    assert "--gpu needs --dry-run" in capsys.readouterr().err
