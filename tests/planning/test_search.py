"""Layouts, the search and the nearest layouts: what is proposed is valid, fits, and is the nearest or the fastest there is."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch.distributed as dist

from grpo_megatron.checks.models import read_models
from grpo_megatron.cli.config_file import load_config
from grpo_megatron.config import Config
from grpo_megatron.planning.cost import Workload
from grpo_megatron.planning.gpus import PlannedMachine, find_gpu
from grpo_megatron.planning.layout import FULL_RECOMPUTATION, Layout, micro_batches, shapes, variants, world_problems
from grpo_megatron.planning.parameters import RunModels, stage_layers
from grpo_megatron.planning.search import (
    PROPOSED,
    _candidates,
    estimated,
    fit,
    nearest_layouts,
    proposed_fit,
    search,
    search_splits,
)
from tests.planning import published

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = str(ROOT / "examples" / "llama3_70b.yaml")


def config_70b(monkeypatch: pytest.MonkeyPatch, *overrides: str) -> tuple[Config, RunModels, Workload]:
    monkeypatch.chdir(ROOT)
    config = load_config(EXAMPLE, list(overrides))
    models = read_models(config)
    return config, models, Workload.of(config, models)


def test_the_arguments_of_a_layout_make_its_config(monkeypatch: pytest.MonkeyPatch) -> None:
    config, models, _ = config_70b(monkeypatch)
    layouts = [
        Layout(tp=8, pp=2, rollout_tp=4, tokens=4096, utilization=0.55),
        Layout(tp=1, pp=16, recompute=True, offload_optimizer=True, distributed_optimizer=False),
        Layout.of(config),
    ]
    for layout in layouts:
        assert load_config(EXAMPLE, list(layout.overrides(config))) == layout.applied(config)
        assert Layout.of(layout.applied(config)) == layout
    assert not list(layouts[-1].overrides(config))
    own = load_config(EXAMPLE, ["actor.megatron.override_transformer_config={moe_router_dtype: fp32}"])
    assert any("moe_router_dtype: fp32, recompute" in text for text in layouts[1].overrides(own))  # the user's own stay
    divided = load_config(EXAMPLE, ["rollout.expert_parallel_size=8"])  # as many as the engine's ranks
    assert "rollout.expert_parallel_size=4" in list(Layout(tp=4, pp=4, rollout_tp=4).overrides(divided))
    strict = load_config(EXAMPLE, ["actor.megatron.sequence_parallel=true"])
    alone = Layout(tp=1, pp=8)
    assert "actor.megatron.sequence_parallel=null" in list(alone.overrides(strict))
    assert not list(world_problems(alone.applied(strict), 64, models.arch))


def test_uneven_stages_belong_to_their_pipeline(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = "{num_layers_in_first_pipeline_stage: 17, recompute_granularity: selective}"
    config, _, _ = config_70b(monkeypatch, f"actor.megatron.override_transformer_config={ends}")
    table = Layout(tp=4, pp=8, recompute=True).applied(config).actor.megatron.override_transformer_config
    assert table == FULL_RECOMPUTATION
    table = Layout(tp=4, pp=4, first_layers=17).applied(config).actor.megatron.override_transformer_config
    assert table == {"num_layers_in_first_pipeline_stage": 17, "recompute_granularity": "selective"}


def test_distance_counts_keys_and_then_levels() -> None:
    now = Layout(tp=4, pp=4, tokens=8192, utilization=0.6)
    assert Layout(tp=1, pp=4, tokens=8192, utilization=0.6).distance(now) == (1, 2.0)
    assert Layout(tp=4, pp=8, tokens=4096, recompute=True, utilization=0.6).distance(now) == (3, 3.0)
    assert Layout(tp=4, pp=4, tokens=8192, utilization=0.5).distance(now) == (1, pytest.approx(1.0))


def test_shapes_are_all_valid_layouts_of_the_world(monkeypatch: pytest.MonkeyPatch) -> None:
    """tp x pp divides 64, tp is in a node, pp divides 80 layers; engines divide the 64 heads, and have 2 nodes at most."""
    config, models, _ = config_70b(monkeypatch)
    found = {(s.tp, s.pp, s.rollout_tp) for s in shapes(config, models.arch, 64, 8)}
    pairs = [(tp, pp) for tp in (1, 2, 4, 8) for pp in (1, 2, 4, 8, 16) if tp * pp <= 64]
    assert found == {(*pair, engine) for pair, engine in itertools.product(pairs, (1, 2, 4, 8, 16))}
    assert micro_batches(config) == [4096, 8192, 16384, 32768]
    sparse = published.architecture("Qwen3-30B-A3B")
    assert {s.ep for s in shapes(config, sparse, 64, 8)} == {1, 2, 4, 8, 16, 32, 64}


def test_stages_need_not_be_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    """80 layers over 3 stages: 26, 27, 27. Over 6: 10 and 14 x 5. Over 24: 80 - 23 x 4 layers are none."""
    ends = "{num_layers_in_first_pipeline_stage: 40}"
    keys = ["actor.megatron.pipeline_model_parallel_size=3", f"actor.megatron.override_transformer_config={ends}"]
    config, models, _ = config_70b(monkeypatch, *keys)
    found = {(s.pp, s.first_layers) for s in shapes(config, models.arch, 48, 8)}
    assert found == {(1, 0), (2, 0), (3, 26), (3, 40), (4, 0), (6, 10), (8, 0), (12, 3), (16, 0)}
    uneven = Layout(tp=4, pp=3, first_layers=26, tokens=8192)
    assert Layout.of(load_config(EXAMPLE, list(uneven.overrides(config)))).first_layers == 26
    assert stage_layers(80, uneven.applied(config).actor.megatron) == [26, 27, 27]
    assert uneven.largest_stage(80) == 27 * 3 / 80 and Layout(pp=4).largest_stage(80) == 1.0


def test_the_search_lists_what_fits_fastest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """And 512 ranks need neither a GPU nor a process group."""
    config, models, work = config_70b(monkeypatch)
    machine = PlannedMachine(find_gpu("h100-80"), 512)
    result = search(config, models, work, machine)
    assert not dist.is_initialized()
    assert result.num_tried > 1000 and len(result.layouts) > 20
    seconds = [planned.seconds.step for planned in result.layouts]
    assert seconds == sorted(seconds)
    for planned in result.layouts:
        alone = fit(planned.layout.applied(config), models, 512, machine.gpu.usable_bytes)
        assert alone == planned.fit and alone.fits and alone.fullest[1] <= PROPOSED * machine.gpu.usable_bytes
        assert alone.cache is not None and alone.cache.sequences(4096) >= 1
    best = result.layouts[0].layout
    of_shape = [v for v in variants(best, config) if (v.tp, v.pp, v.rollout_tp) == (best.tp, best.pp, best.rollout_tp)]
    fits = [proposed_fit(v.applied(config), models, 512, machine.gpu.usable_bytes) for v in of_shape]
    assert min(estimated(f, work, machine).seconds.step for f in fits if f.has_margin) == seconds[0]
    # 8 GPUs of 40 GB hold neither 1.1 TB of weights, gradients and optimizer nor a part of them that is enough.
    small = search(config, models, work, PlannedMachine(find_gpu("a100-40"), 8))
    assert small.layouts == [] and small.num_tried > 0


def test_adapters_of_70b_fit_one_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 8 GPUs of 80 GB, which cannot train all weights: 141 GB of weights twice (policy, engine), 1 GB of adapters."""
    machine = PlannedMachine(find_gpu("h100-80"), 8)
    config, models, work = config_70b(monkeypatch, "actor.lora.rank=32")
    best = search(config, models, work, machine).layouts[0]
    config, _, work = config_70b(monkeypatch, "actor.lora={rank: 32, mode: split}")
    split = estimated(fit(best.layout.applied(config), models, 8, machine.gpu.usable_bytes), work, machine)
    assert split.fit.fits
    assert 1.2 < best.seconds.update / split.seconds.update < 1.5  # gradients of W; merging takes 8 % of the update
    config, models, _ = config_70b(monkeypatch)
    assert fit(best.layout.applied(config), models, 8, machine.gpu.usable_bytes).is_impossible


def test_a_split_takes_as_long_as_its_slower_role(monkeypatch: pytest.MonkeyPatch) -> None:
    """max(G', U'): more rollout ranks need less time."""
    config, models, work = config_70b(monkeypatch)
    machine = PlannedMachine(find_gpu("h100-80"), 64)
    splits = list(search_splits(config, models, work, machine))
    for split, planned in splits:
        seconds, trains = planned.seconds, 64 - planned.rollout_ranks
        assert seconds.step == max(seconds.generate, seconds.score + seconds.update + seconds.sync)
        assert (
            split.num_rollout_ranks == planned.rollout_ranks and trains % (planned.layout.tp * planned.layout.pp) == 0
        )
        assert "rollout" not in {phase.name for phase in planned.fit.phases} and planned.fit.fits
    by_drawing = {planned.rollout_ranks: planned.seconds.generate for _, planned in splits}
    assert by_drawing.keys() <= {*range(8, 64, 8)} and len(by_drawing) > 1
    assert [by_drawing[n] for n in sorted(by_drawing)] == sorted(by_drawing.values(), reverse=True)


def test_narrow_experts_are_left_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """768 rows of an expert in 4 parts are products of 192 rows, which reach 4/7 of what those of 768 reach."""
    config, _, _ = config_70b(monkeypatch)
    models = RunModels(published.architecture("Qwen3-30B-A3B"))
    machine = PlannedMachine(find_gpu("h100-80"), 32)
    assert [one.layout.tp for one in search(config, models, Workload.of(config, models), machine).layouts[:3]] == [
        1,
        1,
        1,
    ]


def test_no_rank_stays_without_a_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """16 samples: at most 16 engines and 16 data-parallel ranks."""
    keys = ["data.train_batch_size=4", "rollout.n=4", "actor.ppo_mini_batch_size=4"]
    config, models, work = config_70b(monkeypatch, *keys)
    for planned in search(config, models, work, PlannedMachine(find_gpu("b200"), 32)).layouts:
        assert 32 // planned.layout.rollout_tp <= 16 and 32 // (planned.layout.tp * planned.layout.pp) <= 16


def test_the_share_of_the_engine_is_lowered_where_this_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    config, models, _ = config_70b(monkeypatch, "rollout.gpu_memory_utilization=0.95")
    device = find_gpu("h100-80").usable_bytes
    found = fit(config, models, 64, device)
    assert [phase.name for phase in found.full_phases] == ["start", "rollout"]
    lowered = proposed_fit(config, models, 64, device)
    assert lowered.has_margin and lowered.layout.utilization == 0.75
    # 8.46 + 4.91 of 79.11 GiB are taken: 0.95 - 0.169 = 0.781, and the next multiple of 0.05 is 0.75
    again = load_config(EXAMPLE, ["rollout.gpu_memory_utilization=0.75"])
    assert fit(again, models, 64, device) == lowered


def test_the_nearest_are_the_nearest_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    config, models, work = config_70b(
        monkeypatch, "actor.megatron.offload_optimizer=false", "actor.megatron.pipeline_model_parallel_size=2"
    )
    machine = PlannedMachine(find_gpu("h100-80"), 64)
    now = Layout.of(config)
    assert not fit(config, models, 64, machine.gpu.usable_bytes).fits
    near = nearest_layouts(config, models, work, machine)
    assert len(near) == 3 and all(planned.fit.has_margin for planned in near)
    every = [
        proposed_fit(layout.applied(config), models, 64, machine.gpu.usable_bytes)
        for layout in _candidates(config, models, machine)
        if layout.distance(now)[0] <= 2
    ]
    distances = sorted(found.layout.distance(now) for found in every if found.has_margin)
    assert [planned.layout.distance(now) for planned in near] == distances[:3]
    assert len({planned.layout for planned in near}) == 3


def test_one_rank_has_no_split(monkeypatch: pytest.MonkeyPatch) -> None:
    config, models, work = config_70b(monkeypatch)
    assert list(search_splits(config, models, work, PlannedMachine(find_gpu("h200"), 1, 1))) == []
