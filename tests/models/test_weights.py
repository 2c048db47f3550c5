"""Which files of a model folder are read; the parts of their tensors that a rank holds and an engine reads."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from grpo_megatron.models.architecture import Architecture
from grpo_megatron.models.families import architecture_of, hf_shapes, table_of
from grpo_megatron.models.weights.file_names import parts_of_stack
from grpo_megatron.models.weights.hf_folder import SafetensorsFolder, write_tensors
from grpo_megatron.models.weights.stream import WeightsError, engine_tensors
from grpo_megatron.models.weights.table import QKV, GateUp, Vocabulary, WeightRow, expand_table
from grpo_megatron.sync.digest import DigestSlice, digest_groups
from grpo_megatron.sync.plan import SyncTensor
from tests.files import published_config
from tests.sync.simulation import FAMILIES, architecture

INDEX = "model.safetensors.index.json"


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600)])
def test_others_may_read_weights_as_the_umask_says(tmp_path: Path, umask: int, mode: int) -> None:
    before = os.umask(umask)
    try:
        write_tensors(tmp_path / "model.safetensors", {"weight": torch.ones(2)})
    finally:
        os.umask(before)
    assert (tmp_path / "model.safetensors").stat().st_mode & 0o777 == mode


def model(folder: Path, index: object) -> Path:
    folder.mkdir()
    for path in (folder / "model.safetensors", folder.parent / "outside.safetensors"):
        save_file({"weight": torch.ones(2)}, path)
    (folder / INDEX).write_text(json.dumps(index))
    return folder


@pytest.mark.parametrize("name", ["../outside.safetensors", "{}/outside.safetensors", "config.json"])
def test_an_index_that_names_another_file(tmp_path: Path, name: str) -> None:
    folder = model(tmp_path / "model", {"weight_map": {"weight": name.format(tmp_path)}})
    with pytest.raises(WeightsError, match=rf"{INDEX}: weight_map names .* no \*.safetensors file of this folder"):
        SafetensorsFolder(folder)


@pytest.mark.parametrize("index", [[], {}, {"weight_map": []}, {"weight_map": {"weight": ["model.safetensors"]}}])
def test_an_index_that_is_none(tmp_path: Path, index: object) -> None:
    with pytest.raises(WeightsError, match="not a readable index"):
        SafetensorsFolder(model(tmp_path / "model", index))


def cut_whole(row: WeightRow, whole: list[torch.Tensor], arch: Architecture, tp: int) -> list[torch.Tensor]:
    """Every rank's parameter, from whole tensors: Megatron's layouts written out with torch."""
    if isinstance(row, QKV):  # group by group: its queries, its key, its value
        grouped = [tensor.reshape(arch.num_query_groups, -1, *tensor.shape[1:]) for tensor in whole]
        return list(torch.cat(grouped, dim=1).flatten(0, 1).chunk(tp))
    if isinstance(row, GateUp):
        return [torch.cat(halves) for halves in zip(*(tensor.chunk(tp) for tensor in whole), strict=True)]
    (tensor,) = whole
    if isinstance(row, Vocabulary):
        padding = tensor.new_zeros(arch.padded_vocab_size(tp) - arch.vocab_size, arch.hidden_size)
        return list(torch.cat([tensor, padding]).chunk(tp))
    return [tensor] * tp if row.split_dim is None else list(tensor.chunk(tp, dim=row.split_dim))


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("family", FAMILIES)
def test_ranks_have_megatrons_layout_and_give_back_the_whole(family: str, tp: int) -> None:
    arch = architecture(family)
    tensors = {name: torch.rand(shape) for name, shape in hf_shapes(arch).items()}
    for row in expand_table(table_of(arch), arch):
        whole = [tensors[name] for name in row.hf]
        shards = [row.shard(tensors.__getitem__, arch, tp_rank, tp) for tp_rank in range(tp)]
        for shard, expected in zip(shards, cut_whole(row, whole, arch, tp), strict=True):
            assert torch.equal(shard, expected) and tuple(shard.shape) == row.local_shape(arch, tp), row.megatron
        merged = row.merge(shards, arch)
        assert all(torch.equal(part, tensor) for part, tensor in zip(merged, whole, strict=True)), row.megatron


@pytest.mark.parametrize("family", ["qwen3-moe", "mixtral", "deepseek-v3"])
def test_an_engine_rank_has_its_experts_whole(family: str) -> None:
    """Neighbouring experts, as vLLM places them. All else is read as without expert parallelism."""
    arch = architecture(family)
    cut, whole = (engine_tensors(arch, 4, reads_shards=True, rollout_ep=ep) for ep in (1, 4))
    per_rank = arch.num_experts // 4
    for name, tensor in whole.tensors.items():
        if ".experts." not in name:
            assert whole.spans[name] == cut.spans[name]
            continue
        owner = int(name.split(".experts.")[1].split(".")[0]) // per_rank
        assert whole.spans[name] == tuple((0, tensor.length if rank == owner else 0) for rank in range(4))


def test_the_calls_of_a_sync_do_not_grow_with_the_experts() -> None:
    """Qwen3-30B-A3B has 48 layers of 9 tensors and 128 experts, and 3 tensors beside them: 18,867.

    An engine loads and digests 9 and 3 stacks of a layer in one call each. A training rank that is the witness of all experts
    digests at most 2^27 elements at a time: 42 experts' first linear layers of 2 x 768 x 2048, or 85 second ones.
    """
    arch = architecture_of(published_config("Qwen3-30B-A3B"))
    engine = engine_tensors(arch, 4, reads_shards=True)
    assert len(engine.tensors) == 48 * (9 + 3 * 128) + 3 == 18_867
    assert [len(engine.units(rank)) for rank in range(4)] == [48 * (9 + 3) + 3] * 4
    whole = engine_tensors(arch, 4, reads_shards=True, rollout_ep=4)
    assert {len(names) for unit, names in whole.units(3).items() if ".experts." in unit} == {32}
    assert len(whole.units(3)) == len(engine.units(3))
    shares = [
        DigestSlice(row.megatron, SyncTensor(name, shape, row.axis), 0, shape[row.axis], start, (0,))
        for row in expand_table(table_of(arch), arch)
        if row.expert is not None
        for name, shape, start in zip(row.hf, row.hf_shapes(arch), (0, 768), strict=False)
    ]
    assert len(shares) == 18_432
    digests = sum(len(group[0]) for group in digest_groups(shares))
    assert digests == 2 * -(-48 * 128 // 42) + -(-48 * 128 // 85) == 367


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("family", FAMILIES)
def test_engine_ranks_together_read_every_row(family: str, ranks: int) -> None:
    arch = architecture(family)
    engine = engine_tensors(arch, ranks, reads_shards=True)
    spans = engine.spans
    assert spans.keys() == engine.tensors.keys() == hf_shapes(arch).keys()
    whole = engine_tensors(arch, ranks, reads_shards=False)
    assert whole.tensors == engine.tensors
    assert all(span == ((0, whole.tensors[name].length),) * ranks for name, span in whole.spans.items())
    for row in expand_table(table_of(arch), arch):
        for name, shape in zip(row.hf, row.hf_shapes(arch), strict=True):
            covered = torch.zeros(shape[row.split_dim or 0])
            for start, stop in spans[name]:
                covered[start:stop] += 1
            assert covered.ge(1).all(), name
            copies = ranks if row.split_dim is None else 1
            if name.rsplit(".", 2)[1] in ("k_proj", "v_proj"):
                copies = max(1, ranks // arch.num_query_groups)
            assert covered.eq(copies).all(), name


def test_experts_in_mxfp4_are_transformers(tmp_path: Path) -> None:
    """Against transformers' own reader, which has [experts, inputs, outputs]. Scales may be in another file than their blocks."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (2, 12, 3, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(90, 160, (2, 12, 3), generator=generator, dtype=torch.uint8)
    want, prefix = convert_moe_packed_tensors(blocks, scales), "model.layers.0.mlp.experts"
    (tmp_path / "config.json").write_text('{"model_type": "gpt_oss", "hidden_size": 96}')
    write_tensors(tmp_path / "a.safetensors", {f"{prefix}.gate_up_proj_blocks": blocks})
    write_tensors(tmp_path / "b.safetensors", {f"{prefix}.gate_up_proj_scales": scales})
    with SafetensorsFolder(tmp_path) as files:
        assert {tensor.dtype for tensor in files.tensors.values()} == {"BF16"}
        for expert in range(2):
            for part, name in enumerate(("gate_proj", "up_proj")):
                tensor = f"{prefix}.{expert}.{name}.weight"
                assert torch.equal(files.slice(tensor)[:], want[expert].T[part::2])
                assert files.tensors[tensor].shape == files.read(tensor).shape == (6, 96)
    write_tensors(tmp_path / "b.safetensors", {f"{prefix}.gate_up_proj_scales": scales[:, :6].clone()})
    assert SafetensorsFolder(tmp_path).tensors.keys() == {
        f"{prefix}.gate_up_proj_{part}" for part in ("blocks", "scales")
    }


def test_a_stack_that_does_not_show_its_layout_is_refused() -> None:
    """2 x the experts' width is the model's: published, and as transformers saves it, it has the same shape."""
    name = "model.layers.0.mlp.experts.gate_up_proj"
    assert [part[0].split(".")[-2] for part in parts_of_stack(name, (1, 8, 12), "qwen3_vl_moe", 8)] == [
        "gate_proj",
        "up_proj",
    ]
    with pytest.raises(WeightsError, match="does not show if they are transposed, as published, or not"):
        list(parts_of_stack(name, (1, 8, 8), "qwen3_vl_moe", 8))
