"""Converted checkpoints in real Megatron models, and checkpoints of real training back to Hugging Face.

Megatron-Core's own loader loads every TP x PP of {1, 2, 4} x {1, 2, 4} into a model full of NaN. The gathered weights
equal the Hugging Face file bit for bit. There are two key-value groups, so that TP 4 cuts a group, and 101 tokens, so
that every layout pads the vocabulary.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state

from grpo_megatron.config import MegatronConfig
from grpo_megatron.device import Device
from grpo_megatron.models.build import build_model
from grpo_megatron.models.families import read_architecture
from grpo_megatron.models.layers.spec import gelu_tanh
from grpo_megatron.models.weights import sharded_state
from grpo_megatron.models.weights.hf_folder import save_hf
from grpo_megatron.models.weights.plain_data import read_table
from grpo_megatron.models.weights.stream import global_parameters, hf_weights, stage_owners, unwrapped
from grpo_megatron.parallel.mesh import build_mesh
from tests import tiny
from tests.convert import folders
from tests.convert.folders import convert, same_bits, tensors_of
from tests.files import CONFIGS
from tests.models.policies import Layout, build, loss, stream
from tests.tiny import make_batch, make_sequences
from tests.worlds import ranks

# ranks of a world, which are data-parallel where a layout needs fewer -> (tp, pp) -> families
LAYOUTS = {
    4: {
        (1, 1): ["llama2", "qwen2-tied"],
        (2, 1): ["qwen3", "llama3", "olmo2", "seed_oss"],
        (1, 2): ["mistral", "qwen2-tied"],
        (2, 2): ["qwen2", "llama3", "qwen3", "gemma3"],
        (4, 1): ["qwen2", "llama3"],
        (1, 4): ["qwen3", "qwen2-tied"],
    },
    8: {(4, 2): ["llama2", "qwen2-tied"], (2, 4): ["mistral", "llama3"]},
    16: {(4, 4): ["qwen2", "qwen2-tied"]},
}
# Mixtures of experts of real config.json files, shrunk: experts are an axis of the stored tensors. DeepSeek-V3's first layer
# has none, and Qwen3-Next's have different attention: each of their layers is stored alone.
EXPERTS = ("Qwen3-30B-A3B", "Mixtral-8x7B-v0.1", "DeepSeek-V3", "Qwen3-Next-80B-A3B-Instruct")
EXPERT_LAYOUTS = [(1, 1, 2), (2, 2, 1), (2, 1, 2)]  # tp, pp, ep of four ranks


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    root = tmp_path_factory.mktemp("converted")
    out = {}
    for family in tiny.FAMILIES:
        source = folders.write(root / family, folders.config_of(family))
        assert convert("to-megatron", source, root / f"{family}-megatron", "--quiet") == 0
        out[family] = (source, root / f"{family}-megatron")
    return out


def test_every_layout_is_there() -> None:
    layouts = {layout: families for of_world in LAYOUTS.values() for layout, families in of_world.items()}
    assert set(layouts) == {(tp, pp) for tp in (1, 2, 4) for pp in (1, 2, 4)}
    assert {*itertools.chain(*layouts.values())} >= set(tiny.FAMILIES) - {"qwen3-moe", "mixtral"}


@pytest.mark.parametrize("world", [pytest.param(n, marks=[pytest.mark.soak] * (n > 4)) for n in LAYOUTS])
def test_loads(world: int, converted: dict[str, tuple[Path, Path]]) -> None:
    tasks = [(converted[f], tp, pp, 1) for (tp, pp), families in LAYOUTS[world].items() for f in families]
    for ((source, _), *layout), tensors in zip(tasks, loaded(world, tasks=tasks)[0], strict=True):
        print(source.name, layout)
        same_bits(tensors_of(source), tensors)


def test_experts_load(tmp_path: Path) -> None:
    pairs = []
    for name in EXPERTS:
        config = folders.shrunk(json.loads((CONFIGS / f"{name}.json").read_text()))
        pairs.append((folders.write(tmp_path / name, config), tmp_path / f"{name}-megatron"))
        assert convert("to-megatron", *pairs[-1], "--quiet") == 0
    tasks = [(pair, *layout) for layout in EXPERT_LAYOUTS for pair in pairs]
    for ((source, _), *layout), tensors in zip(tasks, loaded(4, tasks=tasks)[0], strict=True):
        print(source.name, layout)
        same_bits(tensors_of(source), tensors)


@pytest.mark.parametrize(
    ("family", "tp", "pp", "dtype"),
    [
        ("qwen3", 2, 2, "bfloat16"),
        pytest.param("qwen2-tied", 2, 1, "float32", marks=pytest.mark.soak),
        pytest.param("deepseek_v3", 1, 2, "bfloat16", marks=pytest.mark.soak),
        ("qwen3_next", 1, 2, "bfloat16"),
        ("gemma3", 2, 1, "bfloat16"),
    ],
)
def test_training_writes_what_converts(family: str, tp: int, pp: int, dtype: str, tmp_path: Path) -> None:
    """A training step, with its optimizer state, converts to the tensors of the policy's own stream, bit for bit."""
    source = folders.write(tmp_path / "hf", folders.config_of(family))
    step = tmp_path / "out" / "checkpoints" / "step_000001"
    expected = trained(tp * pp, folder=source, step=step, tp=tp, pp=pp, dtype=dtype)[0]
    (step / "trainer.json").write_text(json.dumps({"config": {"model": {"path": str(source)}}}))
    assert convert("to-hf", step, tmp_path / "back") == 0
    same_bits(expected, tensors_of(tmp_path / "back"))
    assert json.loads((tmp_path / "back" / "config.json").read_text())["dtype"] == dtype
    assert convert("verify", step, tmp_path / "back") == 0
    assert convert("verify", step, source) == 1
    part = min((step / "state").glob("*.distcp"))  # there is no manifest, but each archive has a checksum
    data = bytearray(part.read_bytes())
    contents = read_table(step / "state" / ".metadata")
    stored = [(k, i) for k, i in contents.storage_data.items() if i.relative_path == part.name and k.offset]
    info = next(i for k, i in stored if k.fqn.startswith("decoder"))
    data[info.offset + info.length // 2] ^= 1
    part.write_bytes(data)
    assert convert("to-hf", step, tmp_path / "damaged") == 2
    assert not (tmp_path / "damaged").exists()


def test_a_run_exports_the_layers_after_the_last_one(tmp_path: Path) -> None:
    """As they are in its model, beside what it has trained: in several files, with an index."""
    source = folders.write(tmp_path / "hf", folders.config_of("qwen3_next"), "bfloat16", num_files=2)
    further = {"mtp.fc.weight": torch.randn(3, 5), "mtp.layers.0.self_attn.q_norm.weight": torch.ones(2).half()}
    wanted = tensors_of(source) | further
    folders.put(source, wanted, 3)
    exported(1, folder=source, target=tmp_path / "out")
    same_bits(wanted, tensors_of(tmp_path / "out"))
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == wanted.keys()
    assert json.loads((tmp_path / "out/config.json").read_text())["dtype"] == "bfloat16"


def test_training_starts_from_float16(tmp_path: Path) -> None:
    """A float16 folder is cast when read: to float32 without loss, to bfloat16 as torch rounds. (`model.dtype=float16`
    is refused: tests/test_config.py.)"""
    source = folders.write(tmp_path / "hf", folders.config_of("qwen3"), "float16")
    weights = started(folder=source)[0]
    for dtype, tensors in weights.items():
        same_bits({n: t.to(folders.DTYPES[dtype]) for n, t in tensors_of(source).items()}, tensors)


# -- what the ranks run ------------------------------------------------------------------------------------------------


@ranks()
def loaded(tasks: list[tuple[tuple[Path, Path], int, int, int]]) -> list[dict[str, torch.Tensor]] | None:
    """The gathered Hugging Face tensors of each ((Hugging Face folder, checkpoint), tp, pp, ep), on rank 0.

    The model is built and filled with NaN, then Megatron-Core's own loader loads the checkpoint, in the place and with the
    metadata of Megatron-LM's load_checkpoint.
    """
    device, results, mesh = Device("cpu"), [], None
    for (folder, load), tp, pp, ep in tasks:
        if mesh is None or (mesh.tp, mesh.pp, mesh.ep) != (tp, pp, ep):
            parallel_state.destroy_model_parallel()
            mesh = build_mesh(device, tp=tp, pp=pp, ep=ep, rollout_tp=1)
        sizes = {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp, "expert_model_parallel_size": ep}
        assert (load / "latest_checkpointed_iteration.txt").read_text() == "release"
        checkpoint = str(load / "release")
        assert dist_checkpointing.check_is_distributed_checkpoint(checkpoint)
        common = dist_checkpointing.load_common_state_dict(checkpoint)
        assert common["iteration"] == 0 and common["checkpoint_version"] == 3.0
        metadata = dist_checkpointing.load_content_metadata(preloaded_state_dict=common) or {}
        arch = read_architecture(folder)
        model = build_model(arch, MegatronConfig.model_validate(sizes), "float32", device)
        with torch.no_grad():
            for parameter in global_parameters(model).values():
                parameter.fill_(torch.nan)
        with device.megatron():
            metadata["dp_cp_group"] = parallel_state.get_data_parallel_group(with_context_parallel=True)
            wanted = unwrapped(model).sharded_state_dict(metadata=metadata)
            state = dist_checkpointing.load({"model": wanted}, checkpoint)
            missing, unexpected = unwrapped(model).load_state_dict(state["model"], strict=False)
        assert_describes(common["args"], unwrapped(model).config)
        assert not [name for name in [*missing, *unexpected] if "_extra_state" not in name]
        assert all(parameter.isfinite().all() for parameter in global_parameters(model).values())
        stages = stage_owners(model, arch, mesh)
        results.append({n: t.clone() for bucket in hf_weights(model, arch, mesh, 1, stages) for n, t in bucket})
    return results if mesh is not None and mesh.rank == 0 else None


def assert_describes(args: Any, config: Any) -> None:
    """The arguments in common.pt are those of the model that the checkpoint loads into (the others: `megatron_fields`)."""
    assert getattr(args, "num_experts", None) == config.num_moe_experts
    assert args.norm_epsilon == config.layernorm_epsilon
    assert args.swiglu == (config.gated_linear_unit and config.activation_func is not gelu_tanh)


@ranks()
def exported(folder: Path, target: Path) -> None:
    policy = build(folder, Layout(1), dtype="bfloat16")
    save_hf(policy.hf_weights(1), folder, folder, target, policy.mesh, shard_bytes=1 << 19, arch=policy.arch)


@ranks()
def trained(folder: Path, step: Path, tp: int, pp: int, dtype: str) -> dict[str, torch.Tensor]:
    """The weights after one update. They are saved as a training checkpoint in `step`/state."""
    policy = build(folder, Layout(tp * pp, tp, pp), dtype=dtype)
    policy.update(make_batch(make_sequences(), [[[0, 1], [2], [], [3, 4, 5]]]), loss)
    if policy.mesh.rank == 0:
        (step / "state").mkdir(parents=True)
    dist.barrier()
    sharded_state.save_sharded(policy, step / "state")
    return stream(policy)


@ranks(1)
def started(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    """The weights at the start of training, for each `model.dtype`."""
    return {dtype: stream(build(folder, dtype=dtype)) for dtype in ("float32", "bfloat16")}
