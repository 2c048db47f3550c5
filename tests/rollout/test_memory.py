"""Digests of vLLM's own memory, with real engines: never a false alarm, and every wrong tensor is named with slice and rank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from grpo_megatron.config import RolloutConfig
from grpo_megatron.device import Device
from grpo_megatron.models.families import read_architecture
from grpo_megatron.models.weights.stream import engine_tensors
from grpo_megatron.parallel.mesh import build_mesh
from grpo_megatron.rollout.build import build_engine
from grpo_megatron.rollout.vllm.versions import is_newest
from grpo_megatron.sync.digest import DigestSlice, Expected, compare, expected_digests, group_digests
from grpo_megatron.sync.plan import Interval, SyncTensor
from grpo_megatron.types import WeightBucket
from tests import vision
from tests.models.test_moe import DELTA, MODELS
from tests.sync.simulation import FAMILIES, SMALL
from tests.tiny import COMMON
from tests.worlds import run

pytestmark = pytest.mark.slow

# name -> ranks = rollout tp, [(family, dtype, rollout ep, with all faults)]. Biases, q and k norms, a tied head, experts, vision
# towers. The decoder of qwen2_5_vl is that of qwen2.
CASES = {
    "1": (
        1,
        [("mixtral", "bfloat16", 1, True), ("deepseek-v3", "bfloat16", 1, False), ("qwen2_5_vl", "float32", 1, True)],
    ),
    "1, others": (
        1,
        [
            ("qwen3", "bfloat16", 1, False),
            ("llama-tied", "float32", 1, False),
            ("qwen3-moe", "float32", 1, False),
            ("qwen2_vl", "bfloat16", 1, False),
            ("qwen3_vl", "bfloat16", 1, False),
        ],
    ),
    "2": (
        2,
        [
            ("qwen3-moe", "bfloat16", 1, True),
            ("qwen2", "bfloat16", 1, True),
            ("llama-tied", "bfloat16", 1, False),
            ("qwen3", "float32", 1, False),
            ("mixtral", "float32", 1, False),
            ("mixtral", "bfloat16", 2, True),
            ("qwen2_vl", "float32", 1, False),
            ("qwen2_5_vl", "bfloat16", 1, True),
            ("qwen3_vl", "float32", 1, False),
            ("qwen3_vl_moe", "float32", 1, False),
            ("qwen3_next", "bfloat16", 1, True),
            ("qwen3_5", "bfloat16", 1, True),
        ],
    ),
}


@pytest.mark.soak
@pytest.mark.parametrize("name", CASES)
def test_wrong_weights_are_named_and_good_ones_never(name: str, tmp_path: Path) -> None:
    tp, listed = CASES[name]
    cases = [case for case in listed if is_newest() or case[0] not in ("deepseek-v3", *DELTA)]
    run(attest, tp, folder=tmp_path, tp=tp, cases=cases)


# -- what the ranks run: engines of several families, one after the other in one process -------------------------------


Weights = dict[str, torch.Tensor]
CLASSES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "qwen2_vl": "Qwen2VLForConditionalGeneration",
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
    "qwen3_vl_moe": "Qwen3VLMoeForConditionalGeneration",
    "qwen3_next": "Qwen3NextForCausalLM",
    "qwen3_5": "Qwen3_5ForConditionalGeneration",
}
# vLLM's attention on CPU needs head sizes that are multiples of 32
CHANGES = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32, "num_experts": 4}


class Subject:
    """An engine of one family, and weights by number."""

    def __init__(self, folder: Path, family: str, dtype: str, ep: int, mesh: Any) -> None:
        config = {**SMALL, **FAMILIES.get(family, {}), **CHANGES}
        if family in vision.TOWERS:
            config = vision.make_config(family).to_dict()
        if family in DELTA:
            config = {**COMMON, **MODELS[family], "num_hidden_layers": 2}
        if family == "qwen3_5":  # as published
            config = {"model_type": family, "text_config": config, "vision_config": {}}
        if mesh.rank == 0:
            folder.mkdir(parents=True)
            (folder / "config.json").write_text(
                json.dumps({**config, "architectures": [CLASSES[config["model_type"]]]})
            )
        mesh.barrier()
        arch = read_architecture(folder)
        self.mesh, self.dtype, self.version = mesh, getattr(torch, dtype), 0
        self.engine_rank = mesh.rank % mesh.rollout_tp
        self.tensors = engine_tensors(arch, mesh.rollout_tp, reads_shards=True, rollout_ep=ep)
        sizes = {"tensor_model_parallel_size": mesh.rollout_tp, "expert_parallel_size": ep}
        rollout = RolloutConfig(**sizes, engine_options={"kv_cache_gib": 0.01})
        self.engine: Any = build_engine(
            rollout, folder, mesh, Device("cpu"), dtype=dtype, max_model_len=64, eos_token_ids=[1], tensors=self.tensors
        )

    def weights(self, seed: int) -> Weights:
        generator = torch.Generator().manual_seed(seed)
        return {
            name: (0.1 * torch.randn(tensor.shape, generator=generator)).to(self._dtype_of(name))
            for name, tensor in self.tensors.tensors.items()
        }

    def _dtype_of(self, name: str) -> torch.dtype:
        """A router's bias is float32 in a bfloat16 model too."""
        return torch.float32 if name.endswith("e_score_correction_bias") else self.dtype

    def expected(self, whole: Weights) -> Expected:
        shares = [share for tensor in self.tensors.tensors.values() for share in self._shares(tensor)]
        device = torch.device("cpu")
        return expected_digests(shares, whole.__getitem__, self.tensors, lambda table: None, device)

    def _shares(self, tensor: SyncTensor) -> list[DigestSlice]:
        spans = self.tensors.spans[tensor.name]
        borders = sorted({0, tensor.length, *(border for span in spans for border in span)})
        parts = zip(borders, borders[1:], strict=False)
        return [
            DigestSlice(tensor.name, tensor, a, b, a, tuple(r for r, (c, d) in enumerate(spans) if c <= a and b <= d))
            for a, b in parts
        ]

    def span(self, name: str) -> Interval:
        return self.tensors.spans[name][self.engine_rank]

    def part(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        start, stop = self.tensors.intervals(name, self.engine_rank)[-1]
        return whole.narrow(self.tensors.tensors[name].axis, start, stop - start)

    def sync(self, whole: Weights) -> None:
        self.version += 1
        items = []
        for name, tensor in whole.items():
            sent = torch.full_like(tensor, torch.nan)
            axis, (start, stop) = self.tensors.tensors[name].axis, self.span(name)
            sent.narrow(axis, start, stop - start).copy_(tensor.narrow(axis, start, stop - start))
            items.append((name, sent))
        buckets: list[WeightBucket] = [items[i : i + 15] for i in range(0, len(items), 15)]
        self.engine.load_weights(iter(buckets), self.version)

    def problem(self, expected: Expected) -> str | None:
        return compare(expected, self.engine.digests(), self.tensors, self.engine_rank, self.mesh.rank)

    def where(self, name: str) -> str:
        start, stop = self.span(name)
        return f"{name} {'columns' if self.tensors.tensors[name].axis else 'rows'} {start} to {stop} on rank {self.mesh.rank}"


def _own(subject: Subject, name: str) -> bool:
    start, stop = subject.span(name)
    return start < stop


def every_tensor_with_one_bit_flipped(subject: Subject, good: Weights, expected: Expected) -> None:
    for name in good:
        if _own(subject, name):
            changed = good[name].clone()
            part = subject.part(name, changed)
            flat = part.clone().view(torch.int16 if part.element_size() == 2 else torch.int32).view(-1)
            flat[len(flat) // 2] ^= 1
            part.copy_(flat.view(part.dtype).view(part.shape))
            _is_named(subject, {**good, name: changed}, expected, {name})
        else:
            subject.sync(good)  # the other ranks of the block load, too


def every_tensor_stale(subject: Subject, good: Weights, expected: Expected) -> None:
    old = subject.weights(7)
    for name in good:
        _is_named(subject, {**good, name: old[name]}, expected, {name} if _own(subject, name) else set())


def every_tensor_from_the_wrong_slice(subject: Subject, good: Weights, expected: Expected) -> None:
    for name, tensor in subject.tensors.tensors.items():
        start, stop = subject.span(name)
        is_cut = 0 < stop - start < tensor.length  # on all ranks or on none
        if is_cut and name != "model.embed_tokens.weight" and "lm_head" not in name:
            shifted = good[name].roll(stop - start, tensor.axis)
            _is_named(subject, {**good, name: shifted}, expected, {name})


def neighbours_of_one_shape_swapped(subject: Subject, good: Weights, expected: Expected) -> None:
    """gate and up, k and v, the same tensor of two layers, the same of two experts, two norms."""
    names = list(good)
    cut = {
        name: (tensor.shape, tensor.axis, subject.tensors.spans[name])
        for name, tensor in subject.tensors.tensors.items()
    }
    for index, one in enumerate(names):
        other = next((name for name in names[index + 1 :] if cut[name] == cut[one]), None)
        if other is not None:
            text = _is_named(subject, {**good, one: good[other], other: good[one]}, expected, {one, other})
            if _own(subject, one):
                assert f"(it holds {other})" in text and f"(it holds {one})" in text, text


def every_tensor_dropped_within_vllm(subject: Subject, good: Weights, expected: Expected) -> None:
    """vLLM loses one tensor without an error."""
    update = subject.engine._llm.update_weights
    subject.sync(subject.weights(7))
    for lost in good:

        def without(request: Any, lost: str = lost) -> None:
            bucket = request["update_info"]["tensors"]
            rest = [(n, t) for n, t in bucket if n != lost]
            update({"update_info": {**request["update_info"], "tensors": rest}})

        with mock.patch.object(subject.engine._llm, "update_weights", without):
            subject.sync(good)
        assert not _own(subject, lost) or subject.where(lost) in str(subject.problem(expected)), lost
        subject.sync(subject.weights(7))


def live_memory_changed_after_the_load(subject: Subject, good: Weights, expected: Expected) -> None:
    """The digests are those of the memory at the time of the call, for every parameter that keeps its bits."""
    subject.sync(good)
    [model] = subject.engine._llm.apply_model(lambda model: model)
    changed = 0
    for name, parameter in list(model.named_parameters()):
        if name in good and parameter.numel() and _own(subject, name) and "conv1d" not in name:  # which the CPU packs
            assert subject.problem(expected) is None
            parameter.data.view(-1)[3] += 1
            assert subject.where(name) in str(subject.problem(expected)), name
            parameter.data.view(-1)[3] -= 1
            subject.sync(good)
            changed += 1
    assert changed >= 2 * 2 + 2  # two norms per layer, the last norm, the embedding


FAULTS = [
    every_tensor_with_one_bit_flipped,
    every_tensor_stale,
    every_tensor_from_the_wrong_slice,
    neighbours_of_one_shape_swapped,
    every_tensor_dropped_within_vllm,
    live_memory_changed_after_the_load,
]


def calls_are_counted(subject: Subject, good: Weights) -> None:
    """One call of a weight loader, and one digest, for each tensor or stack: 3 stacks per layer, whatever the experts."""
    loader = "vllm.model_executor.model_loader.reload.layerwise.get_numel_loaded"
    digest = mock.patch("grpo_megatron.rollout.vllm.memory.group_digests", wraps=group_digests)
    with mock.patch(loader, wraps=layerwise_loader()) as loads, digest as digests:
        subject.sync(good)
        subject.engine.digests()
    experts = [name for name in good if ".experts." in name and _own(subject, name)]
    own = sum(_own(subject, name) for name in good)
    layers = len({name.partition(".experts.")[0] for name in experts})
    assert loads.call_count == own - len(experts) + 3 * layers
    assert digests.call_count == loads.call_count + 2 * len(subject.tensors.kept)  # q, k and v


def layerwise_loader() -> Any:
    from vllm.model_executor.model_loader.reload import layerwise

    return layerwise.get_numel_loaded


def _is_named(subject: Subject, sent: Weights, expected: Expected, wrong: set[str]) -> str:
    """The comparison names all of `wrong` and nothing else."""
    subject.sync(sent)
    text = subject.problem(expected)
    named = {name for name in sent if f", {name} " in str(text)}
    assert named == {name for name in wrong if _own(subject, name)}, (wrong, text)
    for name in named:
        assert subject.where(name) in str(text)
    return str(text)


def attest(folder: Path, tp: int, cases: list[tuple[str, str, int, bool]]) -> None:
    """Per (family, dtype, ep, with faults): good syncs never alarm; faults are always named; good syncs follow."""
    mesh = build_mesh(Device("cpu"), tp=1, pp=1, rollout_tp=tp)
    for family, dtype, ep, with_faults in cases:
        subject = Subject(folder / family / dtype / str(ep), family, dtype, ep, mesh)
        for seed in range(2):
            good = subject.weights(seed)
            subject.sync(good)
            assert subject.problem(subject.expected(good)) is None, (family, dtype)
        if family in ("mixtral", "qwen3-moe"):
            calls_are_counted(subject, good)
        expected = subject.expected(good)
        for fault in FAULTS if with_faults else ():
            fault(subject, good, expected)
            subject.sync(good)
            assert subject.problem(expected) is None, fault.__name__
        for _ in range(2 if with_faults else 0):
            subject.sync(good)
            assert subject.problem(expected) is None
        subject.engine.shutdown()
