"""Bytes of planning/parameters.py: activations against measured peaks, and what a model that reads images adds.

Qwen2.5-VL-7B: a tower of 676,550,144 parameters, 44,574,464 of them in the merger, and a decoder of 7,615,616,512. A token of
an image is 28 x 28 pixels in 4 patches. In bfloat16 a layer of width w = 1280 with an MLP of f = 3420 keeps for each token

    4 (2 (11 w + 4 f) + 8 w) = 263,040 bytes,  all 32 layers 8,417,280,  the merger 4 (2 + 1) 4 w = 61,440
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_megatron.config import Config, LoraConfig, MegatronConfig
from grpo_megatron.models.architecture import MAX_KEPT
from grpo_megatron.models.engine_cache import engine_cache, engine_weights, tower_layer_bytes
from grpo_megatron.models.families import architecture_of
from grpo_megatron.planning.parameters import (
    RunModels,
    forward_bytes,
    head_bytes,
    kept_bytes,
    memory_of_stages,
    parameters_from_table,
    pinned_ratio,
    tower_bytes,
    working_bytes,
)
from grpo_megatron.planning.phases import Phase, host_parts, image_bytes, memory_phases
from grpo_megatron.planning.traffic import planned_for
from tests import tiny, vision, worlds
from tests.models import policies
from tests.planning import published

# -- Activations and logits against measured peaks: real Megatron-Core layers on the CPU -------------------------------
# The profiler records every allocation of a forward and backward pass. 1,024 tokens, 4 layers of hidden size 128; the case
# with a vocabulary of 20,000 has one layer, so that the output head decides its peak.

FULL: dict[str, Any] = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("qwen2", "float32", {}),
    ("qwen3", "bfloat16", {}),
    ("qwen2", "bfloat16", {**FULL, "recompute_num_layers": 2}),
    ("qwen2", "bfloat16", {**FULL, "recompute_method": "block"}),
    ("large vocabulary", "bfloat16", {}),
]


def peak_bytes(call: Callable[[], Any]) -> int:
    """The most bytes that `call` has allocated at a time, from the profiler's record of every allocation."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        call()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]  # type: ignore[union-attr]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def peaks(folders: dict[str, Path], cases: list[tuple[str, str, dict[str, Any]]], tokens: int) -> list[Any]:
    """Per case (family, dtype, recomputation): the measured and the estimated peak, of an update and of log-probabilities."""
    return [peak(folders[family], dtype, recompute, tokens) for family, dtype, recompute in cases]


def peak(folder: Path, dtype: str, recompute: dict[str, Any], tokens: int) -> tuple[tuple[float, float], ...]:
    policy = policies.build(
        folder,
        dtype=dtype,
        megatron={"override_transformer_config": recompute},
        logprob_chunk_size=128,
        ppo_max_token_len_per_gpu=tokens,
        entropy_coeff=policies.ENTROPY_COEF,
    )
    batch = tiny.make_batch([([1] * 8, [3] * (tokens // 2 - 8))] * 2, [[[0, 1]]])

    def backward() -> None:
        policy.forward_backward(batch, [[0, 1]], policies.loss)

    backward()  # what is allocated once is no activation
    itemsize, layers = 4 if dtype == "float32" else 2, policy.arch.num_layers
    kept = kept_bytes(policy.arch, policy.actor, itemsize, stage=0, layers=layers)
    working = working_bytes(policy.arch, policy.actor, itemsize, layers=layers)
    update = kept + max(working, head_bytes(policy.arch, policy.actor, itemsize, backward=True))
    head = head_bytes(policy.arch, policy.actor, itemsize, backward=False)
    scoring = max(forward_bytes(policy.arch, policy.actor, itemsize), head)
    return (peak_bytes(backward), update), (peak_bytes(lambda: policy.logprobs(batch)), scoring)


@pytest.mark.slow
def test_the_estimate_agrees_with_measured_peaks(tmp_path: Path) -> None:
    shape = {"intermediate_size": 224, "max_position_embeddings": 2048}
    folders = {family: tiny.make_model(tmp_path / family, family, **shape) for family in ("qwen2", "qwen3")}
    large = {"num_hidden_layers": 1, "vocab_size": 20_000}
    folders["large vocabulary"] = tiny.make_model(tmp_path / "large", "qwen2", **shape, **large)
    (results,) = worlds.run(peaks, 1, folders=folders, cases=CASES, tokens=1024)
    for case, ((measured, estimated), (scoring, scoring_estimate)) in zip(CASES, results, strict=True):
        assert estimated == pytest.approx(measured, rel=0.12), case
        assert scoring_estimate == pytest.approx(scoring, rel=0.25), case  # some CPUs pack bfloat16 weights: 23 %


# -- Images ------------------------------------------------------------------------------------------------------------

TOWER, MERGER, DECODER = 676_550_144, 44_574_464, 7_615_616_512
LAYER, LAYERS, MERGED = 263_040, 8_417_280, 61_440
FREEZING = [{"freeze_tower": tower, "freeze_merger": merger} for tower in (True, False) for merger in (True, False)]
ARCH = published.architecture("Qwen2.5-VL-7B-Instruct")


def config_of(**sections: Any) -> Config:
    data = {"max_prompt_length": 1024, "max_response_length": 3072, "train_batch_size": 64, **sections.pop("data", {})}
    return Config.model_validate({"model": {"path": "x"}, "data": data, **sections})


def phases_of(config: Config, world_size: int = 8) -> dict[str, Phase]:
    phases = memory_phases(config, ARCH, world_size, *RunModels(ARCH).stages(config))
    return {phase.name: phase for phase in phases}


def test_the_tower_is_whole_on_every_rank_of_the_first_stage() -> None:
    """tp 2 x pp 2: the decoder of a text model with the same sizes, and the tower on stage 0."""
    megatron = MegatronConfig(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
    text = parameters_from_table(published.architecture("Qwen2.5-7B-Instruct"), megatron)
    stages = parameters_from_table(ARCH, megatron)
    assert [stage.total for stage in stages] == [text[0].total + TOWER, text[1].total]
    assert [stage.trained.total for stage in stages] == [stage.total for stage in text]


@pytest.mark.parametrize(("frozen", "trained"), [*zip(FREEZING, (0, MERGER, TOWER - MERGER, TOWER), strict=True)])
def test_gradients_and_optimizer_are_of_what_is_trained(frozen: dict[str, bool], trained: int) -> None:
    config = config_of(actor={"vision": frozen, "use_kl_loss": True})
    (memory,) = memory_of_stages(config, 8, RunModels(ARCH).stages(config)[0], [])
    assert memory.weights == memory.reference == 2 * (DECODER + TOWER)
    assert memory.gradients == 4 * (DECODER + trained) and memory.optimizer == 12 / 8 * (DECODER + trained)
    assert memory.trained == 2 * (DECODER + trained)


def test_adapters_are_of_the_decoder() -> None:
    lora = LoraConfig(rank=8)
    (text,) = parameters_from_table(published.architecture("Qwen2.5-7B-Instruct"), MegatronConfig(), lora=lora)
    (stage,) = parameters_from_table(ARCH, MegatronConfig(), lora=lora)
    assert stage.trained.total == text.trained.total and stage.with_adapters == text.with_adapters + TOWER


def built(folder: Path, tp: int, pp: int, frozen: list[dict[str, bool]]) -> None:
    for values in frozen:
        policies.build(folder, policies.Layout(tp * pp, tp, pp), vision=values)  # compares the counts


@pytest.mark.slow
@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2)])
def test_the_built_model_has_what_is_counted(tp: int, pp: int, tmp_path: Path) -> None:
    folder = vision.make_model(tmp_path / "model", tie_word_embeddings=pp == 2)
    worlds.run(built, 2, folder=folder, tp=tp, pp=pp, frozen=FREEZING)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen2_vl", "qwen3_vl"])
@pytest.mark.parametrize(
    ("dtype", "again"),
    [
        (torch.bfloat16, False),
        pytest.param(torch.float32, False, marks=pytest.mark.soak),
        (torch.float32, True),
    ],
)
def test_a_towers_activations_agree_with_measured_peaks(family: str, dtype: torch.dtype, again: bool) -> None:
    """One image of 32 x 32 patches through 4 layers; without gradients within what a layer keeps."""
    from grpo_megatron.models.vision import build_tower

    tower = {"depth": 4, "num_heads": 4, **({"embed_dim": 128, "mlp_ratio": 3} if family == "qwen2_vl" else {})}
    if family != "qwen2_vl":
        tower |= {"hidden_size": 128, "intermediate_size": 352}
    arch = architecture_of(vision.make_config(family, tower=tower).to_dict())
    assert arch.vision is not None
    model = build_tower(arch.vision, arch.hidden_size, dtype, torch.device("cpu"), recomputes=again)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    patches, grid = torch.randn(1024, 1176).to(dtype), torch.tensor([[1, 32, 32]])

    def forward() -> torch.Tensor:
        output = model(patches, grid_thw=grid)
        return torch.cat([getattr(output, "pooler_output", output), *getattr(output, "deepstack_features", ())], 1)

    def backward() -> None:
        forward().float().sum().backward()

    backward()  # what is allocated once is no activation
    frozen = {"freeze_tower": False, "freeze_merger": False}
    data = {"max_prompt_length": 256, "max_response_length": 1}  # the image's tokens, and nothing else
    actor = {"vision": frozen, "ppo_max_token_len_per_gpu": 257}
    actor["megatron"] = {"override_transformer_config": FULL if again else {}}
    kept, working = tower_bytes(config_of(actor=actor, data=data), arch, dtype.itemsize)
    assert kept + again * working == pytest.approx(peak_bytes(backward), rel=0.35 if again else 0.12)
    with torch.no_grad():
        assert 0.4 * working < peak_bytes(forward) < working


def test_what_a_trained_tower_keeps() -> None:
    """A micro-batch of 8,192 tokens has 2,048 of images, and stage 0 of two keeps two of them."""
    assert ARCH.vision is not None and tower_layer_bytes(ARCH.vision, 2) == LAYER
    for frozen, per_token in zip(FREEZING, (0, MERGED, LAYERS + MERGED, LAYERS + MERGED), strict=True):
        actor = {"vision": frozen, "ppo_max_token_len_per_gpu": 8192}
        megatron = {"pipeline_model_parallel_size": 2, "use_distributed_optimizer": True}
        config = config_of(actor={**actor, "megatron": megatron})
        assert tower_bytes(config, ARCH, 2) == (2 * 2048 * per_token, 1024 * LAYER)
    stages = RunModels(ARCH).stages(config)
    phases = {phase.name: phase for phase in memory_phases(config, ARCH, 8, *stages)}
    assert phases["update"].stage == 0 and phases["update"].parts["images kept"] == 2 * 2048 * per_token
    assert "images kept" not in phases["scoring"].parts


def test_a_tower_that_is_computed_again_keeps_the_inputs_of_its_layers() -> None:
    """With recomputed layers: of 2,048 tokens the inputs of 32 layers, 1280 wide, of four patches each."""
    actor = {"vision": {"freeze_tower": False}, "ppo_max_token_len_per_gpu": 8192}
    config = config_of(actor={**actor, "megatron": {"override_transformer_config": FULL}})
    assert tower_bytes(config, ARCH, 2)[0] == 2048 * (32 * 4 * 1280 * 2 + MERGED)


def test_limits_of_images_bound_them() -> None:
    """256 x 256 pixels are 83 tokens of 28 x 28; two of them at most are in a prompt."""
    frozen = {"freeze_tower": False}
    data = {"image_max_pixels": 256 * 256, "max_images": 2}
    config = config_of(actor={"vision": frozen, "ppo_max_token_len_per_gpu": 8192}, data=data)
    kept, working = tower_bytes(config, ARCH, 2)
    assert working == 83 * LAYER and kept == pytest.approx(8192 * 166 / 4096 * (LAYERS + MERGED))


def test_a_pass_over_images_needs_a_layer_of_the_largest_one() -> None:
    long = config_of(data={"max_prompt_length": 16384, "max_response_length": 2048})
    assert phases_of(long)["scoring"].parts["layer or logits"] == 16384 * LAYER
    assert phases_of(long)["update"].parts["layer or logits"] >= 16384 * LAYER


def test_images_on_the_host() -> None:
    """64 prompts x 8 samples over 4 replicas: any rank may get a sample of each of the 64 prompts."""
    token = 28 * 28 * 3
    pixels, patches = 64 * 1024 * token, 1024 * token * 2 * 4
    megatron = {"tensor_model_parallel_size": 2}
    frozen = config_of(actor={"megatron": megatron}, rollout={"n": 8})
    assert image_bytes(frozen, ARCH, 8, has_reference=True) == pixels + patches + 2 * MAX_KEPT
    assert image_bytes(frozen, ARCH, 8, has_reference=False) == pixels + patches + MAX_KEPT
    trained = config_of(actor={"megatron": megatron, "vision": {"freeze_merger": False}}, rollout={"n": 8})
    assert image_bytes(trained, ARCH, 8, has_reference=False) == pixels + patches
    single = frozen.with_values({"rollout.n": 1})
    assert image_bytes(single, ARCH, 8, has_reference=False) == pixels / 4 + patches + MAX_KEPT
    assert image_bytes(frozen, published.architecture("Qwen2.5-7B-Instruct"), 8, has_reference=True) == 0


def test_a_save_has_the_frozen_tower_too() -> None:
    """Of one of 8 replicas: bfloat16 weights of all, and Adam of what is trained, which 8 ranks divide already."""
    config = config_of()
    (memory,) = memory_of_stages(config, 8, RunModels(ARCH).stages(config)[0], [])
    saved = 2 / 8 * (DECODER + TOWER) + 12 / 8 * DECODER
    assert host_parts(config, ARCH, 8, memory)["copies of a save"] == pinned_ratio(ARCH, 1) * saved


def test_engine_and_sync_have_the_whole_tower() -> None:
    config = config_of(rollout={"tensor_model_parallel_size": 4}, actor={"megatron": {"tensor_model_parallel_size": 2}})
    text = published.architecture("Qwen2.5-7B-Instruct")
    assert (
        engine_weights(config.rollout, ARCH, 2)
        == 2 * (DECODER / 4 + TOWER)
        == engine_weights(config.rollout, text, 2) + 2 * TOWER
    )
    plain, cache = (engine_cache(config.rollout, arch, 2, 80e9, 4096) for arch in (text, ARCH))
    assert cache.workspace - plain.workspace == config.rollout.max_num_batched_tokens * (2 * 3584 + LAYER)
    pipeline = config.with_values({"actor.megatron.pipeline_model_parallel_size": 2})
    received = [planned_for(pipeline, arch, 8).received for arch in (text, ARCH)]
    more = received[1] - received[0]
    assert more.tolist() == [0] * 4 + [2 * TOWER] * 4  # the ranks of stage 1 get the tower from stage 0
