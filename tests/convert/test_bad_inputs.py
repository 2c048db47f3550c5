"""Every mistake is one clear error that names all mistakes of the kind, with exit code 2. Nothing is written."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.convert import folders
from tests.convert.folders import convert, put, tensors_of
from tests.stored import Bomb

Q, K = "model.layers.0.self_attn.q_proj.weight", "model.layers.1.self_attn.k_proj.weight"


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("pristine")
    hf = folders.write(root / "hf", folders.config_of("qwen2"), num_files=2)
    assert convert("to-megatron", hf, root / "megatron", "--quiet") == 0
    return {"hf": hf, "megatron": root / "megatron"}


@pytest.fixture
def hf(pristine: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine["hf"], tmp_path / "hf"))


@pytest.fixture
def megatron(pristine: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine["megatron"], tmp_path / "megatron"))


Refused = Callable[..., str]


@pytest.fixture
def refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Refused:
    """The error text of a command. Checks exit code and form, and that nothing was written."""

    def refuse(command: str, source: Path, out: Path = tmp_path / "out", *options: str) -> str:
        before = sorted(p.name for p in out.parent.iterdir())
        capsys.readouterr()
        assert convert(command, source, out, *options, "--quiet") == 2
        error = capsys.readouterr().err
        first, *rest = error.splitlines()
        assert first.startswith("error: ") and all(line.startswith("  ") for line in rest), error
        assert sorted(p.name for p in out.parent.iterdir()) == before, "something was left behind"
        return error

    return refuse


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = tensors_of(folder)
    change(tensors)
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    put(folder, tensors, num_files=2)


def cut(path: Path, count: int = 1000) -> None:
    os.truncate(path, path.stat().st_size - count)


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 4
    path.write_bytes(data)


def edit(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


# -- Hugging Face folders ----------------------------------------------------------------------------------------------


def test_truncated_shards_are_all_named(hf: Path, refused: Refused) -> None:
    for file in hf.glob("*.safetensors"):
        cut(file)
    error = refused("to-megatron", hf)
    assert "model-00001-of-00002.safetensors" in error and "model-00002-of-00002.safetensors" in error


def test_missing_extra_and_misshapen_are_all_named(hf: Path, refused: Refused) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        for layer in range(3):
            del tensors[f"model.layers.{layer}.mlp.up_proj.weight"]
            tensors[f"model.layers.{layer}.extra.weight"] = torch.zeros(3)
        tensors[K] = tensors[K][:-1].clone()
        tensors[Q] = tensors[Q].to(torch.int64)

    rewrite(hf, change)
    error = refused("to-megatron", hf)
    for layer in range(3):
        assert f"missing model.layers.{layer}.mlp.up_proj.weight" in error
        assert f"unexpected model.layers.{layer}.extra.weight" in error
    assert f"{K} has shape (63, 128), expected (64, 128)" in error
    assert f"{Q} has dtype int64, supported: float32, bfloat16, float16" in error


STACK = "model.layers.0.mlp.experts.gate_up_proj"


def _in_float_scales(tensors: dict[str, torch.Tensor]) -> None:
    experts, columns, rows = tensors.pop(STACK).shape
    tensors[f"{STACK}_blocks"] = torch.zeros(experts, rows, columns // 32, 16, dtype=torch.uint8)
    tensors[f"{STACK}_scales"] = torch.full((experts, rows, columns // 32), 127.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: t.update({Q.replace("model.", "model.language_model."): t[Q] + 1}),
            f"the same tensor of the model ({Q})",
        ),
        (
            lambda t: t.update({STACK.replace("gate_up_proj", "3.up_proj.weight"): t[Q]}),
            "the same tensor of the model (model.",
        ),
        (
            lambda t: t.update({f"{STACK}_bias": t[f"{STACK}_bias"][:4]}),
            "missing model.layers.0.mlp.experts.4.gate_proj.bias",
        ),
        (_in_float_scales, f"unexpected {STACK}_scales"),
        (lambda t: t.pop("model.layers.0.self_attn.sinks"), "missing model.layers.0.self_attn.sinks"),
    ],
)
def test_hostile_stacks_of_experts(change: Any, message: str, tmp_path: Path, refused: Refused) -> None:
    hf = folders.write(tmp_path / "hf", folders.config_of("gpt_oss", num_hidden_layers=2))
    tensors = tensors_of(hf)
    change(tensors)
    put(hf, {name: tensor.clone() for name, tensor in tensors.items()})
    assert message in refused("to-megatron", hf)


def test_several_dtypes_need_a_choice(hf: Path, tmp_path: Path, refused: Refused) -> None:
    rewrite(hf, lambda tensors: tensors.update({Q: tensors[Q].bfloat16()}))
    error = refused("to-megatron", hf)
    assert Q in error and "--dtype" in error
    assert convert("to-megatron", hf, tmp_path / "out", "--dtype", "float32") == 0


def test_a_wrong_index(hf: Path, refused: Refused) -> None:
    index = hf / "model.safetensors.index.json"

    def wrong_file(content: dict[str, Any]) -> None:
        for name in (Q, K):
            here = content["weight_map"][name]
            content["weight_map"][name] = here.replace("1-of", "3-of").replace("2-of", "1-of").replace("3-of", "2-of")
        del content["weight_map"]["model.norm.weight"]

    original = index.read_text()
    edit(index, wrong_file)
    error = refused("to-megatron", hf)
    assert error.count("the index says") == 2 and Q in error and K in error and "model.norm.weight" in error
    index.write_text(original)
    edit(index, lambda content: content["weight_map"].update(ghost=content["weight_map"][Q]))
    assert "ghost: the index says" in refused("to-megatron", hf)
    edit(index, lambda content: content["weight_map"].update(ghost="../../secret.safetensors"))
    assert "no *.safetensors file of this folder" in refused("to-megatron", hf)
    edit(index, lambda content: content["weight_map"].update(ghost="model-00009.safetensors"))
    assert "model-00009.safetensors" in refused("to-megatron", hf)
    index.write_text("{")
    assert "not a readable index" in refused("to-megatron", hf)


def test_an_unknown_architecture(hf: Path, refused: Refused) -> None:
    edit(hf / "config.json", lambda config: config.update(quantization_config={"quant_method": "awq"}))
    assert "quantization_config (awq)" in refused("to-megatron", hf)
    (hf / "config.json").write_text("{")
    assert "config.json" in refused("to-megatron", hf)


def test_tied_embeddings_with_another_head(tmp_path: Path, refused: Refused) -> None:
    """A copy of the embedding is dropped. A head with other values is refused: it would be lost."""
    hf = folders.write(tmp_path / "hf", folders.config_of("qwen2-tied"))
    tensors = tensors_of(hf)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    put(hf, tensors)
    assert convert("to-megatron", hf, tmp_path / "same") == 0
    tensors["lm_head.weight"][100, 0] += 1
    put(hf, tensors)
    assert "lm_head.weight differs" in refused("to-megatron", hf)


@pytest.mark.parametrize(("flag", "error"), [("--tp=3", "4 attention heads over 3"), ("--ep=2", "no experts")])
def test_a_layout_that_does_not_divide(flag: str, error: str, hf: Path, tmp_path: Path, refused: Refused) -> None:
    assert error in refused("to-megatron", hf, tmp_path / "out", flag)
    assert "tp can be 1, 2, 4" in refused("to-megatron", hf, tmp_path / "out", flag)
    assert convert("inspect", hf, flag) == 2


def test_pickled_weights_are_not_read(hf: Path, refused: Refused) -> None:
    next(hf.glob("*.safetensors")).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    assert "a pointer of Git LFS in place of the file; fetch it" in refused("to-megatron", hf)
    for file in hf.glob("*.safetensors*"):
        file.unlink()
    torch.save({}, hf / "pytorch_model.bin")
    assert "save_pretrained" in refused("to-megatron", hf)


# -- Megatron folders --------------------------------------------------------------------------------------------------


def test_a_flipped_bit(megatron: Path, capsys: pytest.CaptureFixture[str], refused: Refused) -> None:
    flip(megatron / "release" / "__0_0.distcp", 100_000)
    assert "release/__0_0.distcp: sha256 differs" in refused("to-hf", megatron)
    assert convert("inspect", megatron, "--hashes") == 2
    assert convert("verify", megatron, megatron) == 2
    capsys.readouterr()
    (megatron / "manifest.json").unlink()
    assert "has no manifest.json any more" in refused("to-hf", megatron)


def test_a_flipped_bit_in_a_converted_hf_folder(megatron: Path, tmp_path: Path, refused: Refused) -> None:
    assert convert("to-hf", megatron, tmp_path / "back") == 0
    flip(tmp_path / "back" / "model.safetensors", -8)
    assert "model.safetensors: sha256 differs" in refused("to-megatron", tmp_path / "back")


def test_a_truncated_or_missing_part(megatron: Path, refused: Refused) -> None:
    cut(megatron / "release" / "__0_0.distcp")
    assert "__0_0.distcp" in refused("to-hf", megatron)
    (megatron / "manifest.json").unlink()
    assert "__0_0.distcp is truncated" in refused("to-hf", megatron)
    (megatron / "release" / "__0_0.distcp").unlink()
    assert "missing file __0_0.distcp" in refused("to-hf", megatron)


def test_a_checkpoint_of_another_model(megatron: Path, tmp_path: Path, refused: Refused) -> None:
    other = folders.write(tmp_path / "other", folders.config_of("qwen3", num_hidden_layers=2))
    error = refused("to-hf", megatron, tmp_path / "out", f"--hf={other}")
    for name in (
        "missing decoder.layers.0.self_attention.q_layernorm.weight",
        "unexpected decoder.layers.self_attention.linear_qkv.bias",
    ):
        assert name in error
    assert "decoder.layers.mlp.linear_fc2.weight has shape [4, 128, 112], expected [2, 128, 112]" in error


def test_a_table_of_contents_that_would_run_code(megatron: Path, tmp_path: Path, refused: Refused) -> None:
    (megatron / "manifest.json").unlink()
    (megatron / "release" / ".metadata").write_bytes(pickle.dumps(Bomb(tmp_path / "exploded")))
    assert "not a readable table of contents" in refused("to-hf", megatron)
    assert not (tmp_path / "exploded").exists()


def test_folders_without_a_model(tmp_path: Path, megatron: Path, hf: Path, refused: Refused) -> None:
    assert "is not a folder" in refused("to-hf", tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    assert "neither" in refused("to-hf", tmp_path / "empty")
    assert "already" in refused("to-megatron", megatron)
    assert "already" in refused("to-hf", hf)
    (megatron / "release" / "metadata.json").write_text("{}")
    (megatron / "manifest.json").unlink()
    assert "no Megatron-Core distributed checkpoint" in refused("to-hf", megatron)


def test_an_output_folder_of_a_run_leads_to_its_model(tmp_path: Path, refused: Refused) -> None:
    """Its exported model, or else its newest step, which is not that of its supervised stage."""
    run, out = tmp_path / "run", tmp_path / "out"
    for step in ("sft/checkpoints/step_000420", "checkpoints/step_000009", "checkpoints/step_000030"):
        (run / step / "state").mkdir(parents=True)
        (run / step / "state" / "metadata.json").write_text("{}")
        (run / step / "trainer.json").write_text("{}")
    assert f"did you mean '{run}/checkpoints/step_000030'?" in refused("to-hf", run, out)
    assert f"did you mean '{run}/sft/checkpoints/step_000420'?" in refused("to-hf", run / "sft", out)
    (run / "hf").mkdir()
    (run / "hf" / "config.json").write_text("{}")
    assert f"did you mean '{run}/hf' or '{run}/checkpoints/step_000030'?" in refused("to-megatron", run, out)


# -- outputs -----------------------------------------------------------------------------------------------------------


def test_an_output_that_exists(hf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], refused: Refused) -> None:
    out = tmp_path / "out"
    assert convert("to-megatron", hf, out) == 0
    capsys.readouterr()
    before = (out / "manifest.json").read_bytes()
    assert "--force" in refused("to-megatron", hf, out)
    assert (out / "manifest.json").read_bytes() == before
    assert convert("to-megatron", hf, out, "--force", "--dtype", "bfloat16") == 0
    assert (out / "manifest.json").read_bytes() != before
    capsys.readouterr()
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis.txt").write_text("years of work")
    assert "remove it yourself" in refused("to-megatron", hf, tmp_path / "precious", "--force")
    assert (tmp_path / "precious" / "thesis.txt").exists()
    assert "overlap" in refused("to-megatron", hf, hf, "--force")
    assert "overlap" in refused("to-megatron", hf, hf / "out")
    (tmp_path / "file").touch()
    for target, words in (
        (tmp_path / "file" / "out", "file' is no folder"),
        (tmp_path / "a" / ("c" * 300), "a name in it has 300 bytes"),
    ):
        assert convert("to-megatron", hf, target, "--quiet") == 2
        assert words in capsys.readouterr().err
    assert not (tmp_path / "a").exists()  # what a failure has made is gone again
    assert convert("to-megatron", hf, tmp_path / "a" / "b" / "c") == 0


def test_inspect_and_verify(hf: Path, megatron: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert convert("inspect", megatron, "--hashes") == 0
    error = capsys.readouterr().out
    for part in ("qwen2", "float32", "tp 1, 2, 4", "compared: equal", "parameters"):
        assert part in error
    assert convert("verify", hf, megatron) == 0
    assert "the models are the same" in capsys.readouterr().out
    rewrite(hf, lambda tensors: tensors[Q].view(-1)[7].add_(1))
    assert convert("verify", hf, megatron) == 1
    error = capsys.readouterr().out
    assert f"{Q}" in error and "1 of 16384 elements, largest 1" in error
    assert convert("verify", hf, megatron, "--tolerance", "0.99") == 1
    assert convert("verify", hf, megatron, "--tolerance", "1.01", "--quiet") == 0
    assert "51 tensors compared within 1.01, 0 differ" in capsys.readouterr().out
