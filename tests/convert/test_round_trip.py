"""Hugging Face -> Megatron -> Hugging Face changes no bit: families, dtypes, tied or not, odd vocabulary, any file split."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_megatron.convert import layout, megatron
from grpo_megatron.convert import source as source_module
from grpo_megatron.evaluation.ask import open_model
from grpo_megatron.models.architecture import UnsupportedModel
from grpo_megatron.models.families import FAMILIES, architecture_of
from tests import tiny
from tests.convert import folders
from tests.convert.folders import convert, same_bits, tensors_of
from tests.files import CONFIGS
from tests.models import ministral3

pytestmark = pytest.mark.both_stacks
SMALL_BLOCKS = 3000  # elements: cuts the tensors of the tiny models into several blocks, as in a 70B model


FORMS = [(family, list(folders.DTYPES)[number % 3]) for number, family in enumerate(folders.FAMILIES)]


@pytest.mark.parametrize(("family", "dtype"), sorted({*FORMS, *(("qwen2", dtype) for dtype in folders.DTYPES)}))
def test_bitwise(family: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_module, "BLOCK_ELEMENTS", SMALL_BLOCKS)
    monkeypatch.setattr(megatron, "FILE_BYTES", 100_000)
    source = folders.write(tmp_path / "hf", folders.config_of(family), dtype, num_files=3)
    assert convert("to-megatron", source, tmp_path / "megatron") == 0
    assert convert("to-hf", tmp_path / "megatron", tmp_path / "back", "--shard-size", "40K") == 0
    assert len(list((tmp_path / "megatron" / "release").glob("*.distcp"))) > 3
    assert len(list((tmp_path / "back").glob("*.safetensors"))) > 3
    same_bits(tensors_of(source), tensors_of(tmp_path / "back"))
    assert (tmp_path / "back" / "config.json").read_bytes() == (source / "config.json").read_bytes()


def test_a_family_of_the_users_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--family` in all four commands. Without it, the error names the key that would help."""
    own = "tests.models.ministral3:FAMILY"
    config = {**folders.config_of("qwen2"), **ministral3.CONFIG}
    source = folders.write(tmp_path / "hf", config, family=own)
    assert convert("to-megatron", source, tmp_path / "megatron") == 2
    assert "model_type='ministral3' is not supported" in capsys.readouterr().err
    assert convert("to-megatron", source, tmp_path / "megatron", "--family", own) == 0
    assert convert("to-hf", tmp_path / "megatron", tmp_path / "back", "--family", own) == 0
    same_bits(tensors_of(source), tensors_of(tmp_path / "back"))
    assert convert("verify", tmp_path / "megatron", source, "--family", own) == 0
    step = tmp_path / "step"  # as a training run leaves it: its trainer.json names the family
    step.mkdir()
    (tmp_path / "megatron" / "release").rename(step / "state")
    (step / "trainer.json").write_text(json.dumps({"config": {"model": {"path": str(source), "family": own}}}))
    assert convert("inspect", step) == 0
    assert own in capsys.readouterr().out
    assert open_model(source, None, own).arch.family == own  # the evaluation's --family


def test_transformers_reads_the_result(tmp_path: Path) -> None:
    """Written by transformers, converted twice, read by transformers: the same logits."""
    from transformers import AutoModelForCausalLM

    source = tiny.make_model(tmp_path / "hf", "llama3")
    assert convert("to-megatron", source, tmp_path / "megatron", "--quiet") == 0
    assert convert("to-hf", tmp_path / "megatron", tmp_path / "back", "--shard-size", "100K", "--quiet") == 0
    tokens = torch.arange(50)[None]
    with torch.no_grad():
        logits = [AutoModelForCausalLM.from_pretrained(tmp_path / f)(tokens).logits for f in ("hf", "back")]
    assert torch.equal(*logits)


def test_numbered_rows(tmp_path: Path) -> None:
    """4 heads of 32 in 2 groups. Row r of Q is filled with r, of K with 1000 + r, of V with 2000 + r.

    Megatron's order is [Q rows of group 0 (64), K (32), V (32), Q rows of group 1, ...]; derived by hand, not by the table.
    """
    source = folders.write(tmp_path / "hf", folders.config_of("qwen2"))
    tensors = tensors_of(source)
    for layer in range(4):
        for part, base in (("q", 0), ("k", 1000), ("v", 2000)):
            for kind in ("weight", "bias"):
                tensor = tensors[f"model.layers.{layer}.self_attn.{part}_proj.{kind}"]
                numbers = torch.arange(len(tensor), dtype=torch.float32) + base + 10000 * layer
                tensor.copy_(numbers[:, None].expand_as(tensor) if tensor.dim() == 2 else numbers)
    folders.put(source, tensors)
    assert convert("to-megatron", source, tmp_path / "megatron") == 0
    expected = []
    for group in range(2):
        expected += [group * 64 + i for i in range(64)]
        expected += [1000 + group * 32 + i for i in range(32)]
        expected += [2000 + group * 32 + i for i in range(32)]
    stored = read_with_torch(tmp_path / "megatron" / "release", "decoder.layers.self_attention.linear_qkv.weight")
    bias = read_with_torch(tmp_path / "megatron" / "release", "decoder.layers.self_attention.linear_qkv.bias")
    for layer in range(4):
        rows = torch.tensor(expected, dtype=torch.float32) + 10000 * layer
        assert torch.equal(stored[layer], rows[:, None].expand(256, 128))
        assert torch.equal(bias[layer], rows)


def read_with_torch(checkpoint: Path, key: str) -> torch.Tensor:
    """One tensor, read by torch's own reader."""
    from torch.distributed import checkpoint as dcp

    reader = dcp.FileSystemReader(checkpoint)
    info = reader.read_metadata().state_dict_metadata[key]
    state = {key: torch.empty(info.size, dtype=info.properties.dtype)}
    dcp.load(state, storage_reader=reader, no_dist=True)
    return state[key]


def test_dtype_changes_on_request(tmp_path: Path) -> None:
    """torch casts the values, and config.json has the new dtype."""
    source = folders.write(tmp_path / "hf", folders.config_of("qwen3"))
    assert convert("to-megatron", source, tmp_path / "megatron", "--dtype", "bfloat16") == 0
    assert convert("to-hf", tmp_path / "megatron", tmp_path / "half") == 0
    same_bits({n: t.bfloat16() for n, t in tensors_of(source).items()}, tensors_of(tmp_path / "half"))
    assert json.loads((tmp_path / "half" / "config.json").read_text())["dtype"] == "bfloat16"
    assert convert("verify", source, tmp_path / "half") == 1
    assert convert("verify", source, tmp_path / "half", "--dtype", "bfloat16") == 0
    assert convert("verify", source, tmp_path / "half", "--tolerance", "0.02") == 0  # 4.5 / 2**9 is 0.0088
    assert convert("verify", source, tmp_path / "half", "--tolerance", "1e-4") == 1


def test_other_places_of_the_checkpoint_are_read(tmp_path: Path) -> None:
    """The folder itself, as older outputs have it; iter_0000005/, as Megatron-LM saves; release/, named by the user."""
    source, out = folders.write(tmp_path / "hf", folders.config_of("qwen3")), tmp_path / "megatron"
    assert convert("to-megatron", source, out, "--quiet") == 0
    assert convert("verify", source, out / "release", "--quiet") == 0
    (out / "manifest.json").unlink()
    (out / "release").rename(out / "iter_0000005")
    (out / "latest_checkpointed_iteration.txt").write_text("5\n")
    assert convert("verify", source, out, "--quiet", "--no-hashes") == 0
    for file in (out / "iter_0000005").iterdir():
        file.rename(out / file.name)
    (out / "latest_checkpointed_iteration.txt").unlink()
    assert convert("verify", source, out, "--quiet", "--no-hashes") == 0


def test_a_step_is_found_from_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run was started in project/, with relative paths. Another folder of the same name is elsewhere."""
    source = folders.write(tmp_path / "project" / "models" / "a", folders.config_of("qwen3"))
    folders.write(tmp_path / "elsewhere" / "models" / "a", folders.config_of("llama3"))
    step = tmp_path / "project" / "outputs" / "run" / "checkpoints" / "step_000001"
    assert convert("to-megatron", source, step / "out", "--quiet") == 0
    (step / "out" / "release").rename(step / "state")
    run = {"model": {"path": "models/a"}, "trainer": {"output_dir": "./outputs/run"}}
    (step / "trainer.json").write_text(json.dumps({"config": run}))
    for place, name in (
        ("project", str(step)),
        ("elsewhere", str(step)),
        ("elsewhere", f"../{step.relative_to(tmp_path)}"),
    ):
        monkeypatch.chdir(tmp_path / place)
        assert convert("inspect", name) == 0
        assert "qwen3" in capsys.readouterr().out
    monkeypatch.chdir(step)
    assert convert("inspect", ".") == 0


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.json")), ids=lambda path: path.stem)
def test_every_config_converts_or_is_refused(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = folders.shrunk(json.loads(path.read_text()))
    try:
        architecture_of(config)
    except UnsupportedModel as error:
        (tmp_path / "hf").mkdir()
        (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
        assert convert("to-megatron", tmp_path / "hf", tmp_path / "megatron") == 2
        message = capsys.readouterr().err.strip()
        assert message == f"error: {error}" and "\n" not in message and "supported" in message
        assert not (tmp_path / "megatron").exists()
        return
    assert config["model_type"] in FAMILIES
    source = folders.write(tmp_path / "hf", config, "bfloat16")
    wanted = tensors_of(source)
    extras = ["model.layers.2.eh_proj.weight"] if config.get("num_nextn_predict_layers") else []
    extras += ["mtp.fc.weight"] if "linear_conv_kernel_dim" in str(config) else []
    extras += ["model.visual.merger.weight"] if "text_config" in config and extras else []
    if extras:  # layers after the last, and a tower that is not read, go along
        wanted |= {name: torch.ones(3) for name in extras}
        folders.put(source, wanted)
    assert convert("to-megatron", source, tmp_path / "megatron") == 0
    shutil.move(source, tmp_path / "away")  # nothing of the original is needed
    assert convert("to-hf", tmp_path / "megatron", tmp_path / "back") == 0
    same_bits(wanted, tensors_of(tmp_path / "back"))
    assert convert("verify", tmp_path / "away", tmp_path / "megatron") == 0


def test_names_of_local_specs_and_unstacked_layers_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Written at each other place that layout.py knows (norms unfused; one tensor per layer), then read."""
    source = folders.write(tmp_path / "hf", folders.config_of("qwen3"))
    for number in (1, 2, 3):

        def chosen(row: Any, arch: Any, number: int = number) -> list[layout.Place]:
            known = layout.places(row, arch)
            return [known[min(number, len(known) - 1)]]

        monkeypatch.setattr(megatron, "written_places", chosen)
        assert convert("to-megatron", source, tmp_path / str(number), "--quiet") == 0
        assert convert("verify", source, tmp_path / str(number), "--quiet") == 0
