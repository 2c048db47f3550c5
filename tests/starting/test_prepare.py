"""prepare: transformers loads its folders, weights are drawn by name, and no folder is lost by accident."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from grpo_megatron.cli.main import main
from grpo_megatron.config import ConfigError, DataConfig
from grpo_megatron.data.tokenizer import load_tokenizer
from grpo_megatron.starting.generated import build_tokenizer
from tests.files import CONFIGS
from tests.runs import write_tokenizer

ROOT = Path(__file__).resolve().parents[2]
SMALL = [
    *("--set", "vocab_size=80", "--set", "num_hidden_layers=1", "--set", "hidden_size=32"),
    *("--set", "num_attention_heads=4", "--set", "num_key_value_heads=2", "--set", "intermediate_size=48"),
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tokenizer")
    build_tokenizer().save_pretrained(folder)
    return str(folder)


def _model(*arguments: object) -> int:
    return main(["prepare", "model", *map(str, arguments)])


def _load(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def test_the_quickstart_model_is_the_recipes(tmp_path: Path, tokenizer: str) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert _model(tmp_path / "m", "--preset", "quickstart", "--tokenizer", tokenizer, "--std", 0.05) == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "m")
    assert type(model).__name__ == "Qwen2ForCausalLM" and model.dtype == torch.float32
    assert sum(p.numel() for p in model.parameters()) == 404_608
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert (model.config.eos_token_id, model.generation_config.eos_token_id) == (17, 17)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:  # n draws: the standard deviation's standard error is 0.05 / sqrt(2 n)
            assert abs(parameter.std().item() - 0.05) < 5 * 0.05 / (2 * parameter.numel()) ** 0.5, name
            assert abs(parameter.mean().item()) < 5 * 0.05 / parameter.numel() ** 0.5, name
        else:
            assert set(parameter.tolist()) == {0.0 if name.endswith("bias") else 1.0}, name
    text = "Tom has 23 apples and buys 45 more. How many?<sep>"
    assert AutoTokenizer.from_pretrained(tmp_path / "m")(text) == AutoTokenizer.from_pretrained(tokenizer)(text)


def test_weights_depend_on_seed_and_name_only(tmp_path: Path, tokenizer: str) -> None:
    """A model with another depth has equal tensors under equal names."""
    base = ("--preset", "quickstart", "--tokenizer", tokenizer)
    assert _model(tmp_path / "a", *base) == _model(tmp_path / "b", *base, "--set", "num_hidden_layers=1") == 0
    assert _model(tmp_path / "c", *base, "--seed", 1) == _model(tmp_path / "d", *base, "--std", 0.1) == 0
    a, b, c, d = (_load(tmp_path / name) for name in "abcd")
    assert b.keys() < a.keys() and all(torch.equal(a[name], b[name]) for name in b)
    matrices = [name for name in a if a[name].dim() == 2]
    assert not any(torch.equal(a[name], c[name]) for name in matrices)
    assert all(torch.allclose(2 * a[name], d[name]) for name in matrices)
    assert len({a[name].flatten()[0].item() for name in matrices}) == len(matrices)


@pytest.mark.parametrize("name", ["Qwen3-0.6B", "Llama-3.2-1B"])
def test_real_configs_shrunk(tmp_path: Path, tokenizer: str, name: str) -> None:
    from transformers import AutoModelForCausalLM

    source = CONFIGS / f"{name}.json"
    given = json.loads(source.read_text())
    changes = [*SMALL, "--set", "tie_word_embeddings=false"]
    if "head_dim" in given:
        changes += ["--set", "head_dim=8"]
    assert _model(source, tmp_path / "m", "--tokenizer", tokenizer, *changes) == 0
    written = json.loads((tmp_path / "m" / "config.json").read_text())
    changed = {item.partition("=")[0] for item in changes[1::2]} | {"torch_dtype", "dtype"}
    changed |= {"bos_token_id", "eos_token_id", "pad_token_id"}  # the tokenizer's
    assert {k: v for k, v in written.items() if k not in changed} == {
        k: v for k, v in given.items() if k not in changed
    }
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "m")
    assert model.dtype == torch.float32 and "lm_head.weight" in _load(tmp_path / "m")
    assert torch.isfinite(model(torch.tensor([[1, 2, 3]])).logits).all()


def test_mistakes_exit_with_2_and_leave_nothing(
    tmp_path: Path, tokenizer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for changed, message in (
        ("vocab_size=79", "vocab_size=79 does not fit the tokenizer in .* largest id is 79; add --set vocab_size=80"),
        ("hiden_size=64", "a qwen2 config has no key 'hiden_size'; did you mean 'hidden_size'"),
        ("hidden_size", "not of the form key=value"),
        ("hidden_size.x=1", "'hidden_size' is a value, not a table"),
        ("hidden_act=swish9", "transformers cannot build this config"),
    ):
        assert _model(tmp_path / "m", "--preset", "quickstart", "--tokenizer", tokenizer, "--set", changed) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ") and re.search(message, error), error
    for arguments in (["m"], ["c.json", "m", "--preset", "quickstart"]):  # either a config or a preset
        assert _model(*arguments, "--tokenizer", "x") == 2
    assert list(tmp_path.iterdir()) == []


def test_an_existing_folder_is_replaced_only_on_request(
    tmp_path: Path, tokenizer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "m"
    base: tuple[Any, ...] = (out, "--preset", "quickstart", "--tokenizer", tokenizer)
    assert _model(*base) == 0
    before = _load(out)
    assert _model(*base, "--seed", 1) == 2
    assert "exists; give another folder, or --force" in capsys.readouterr().err
    assert _model(*base, "--seed", 1, "--force", "--set", "vocab_size=1") == 2  # fails: the old folder stays
    assert all(torch.equal(tensor, before[name]) for name, tensor in _load(out).items())
    assert _model(*base, "--seed", 1, "--force") == 0
    assert not torch.equal(before["model.embed_tokens.weight"], _load(out)["model.embed_tokens.weight"])
    assert [path.name for path in tmp_path.iterdir()] == ["m"]
    (tmp_path / "precious").mkdir()
    assert _model(tmp_path / "precious", *base[1:], "--force") == 2
    assert "was not made by this command" in capsys.readouterr().err


def test_the_arithmetic_command_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "grpo_megatron", "prepare", "arithmetic", str(tmp_path / "out"), "--num-val", "8"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"sft.jsonl", "train.jsonl", "val.jsonl", "written.jsonl", "tokenizer"}
    assert len((tmp_path / "out" / "val.jsonl").read_text().splitlines()) == 8


def test_a_tokenizer_that_names_no_end_gets_a_remedy_that_works(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder with tokenizer.json alone: the line of the message, written where it says, makes the folder usable."""
    folder, arguments = tmp_path / "alone", ["--preset", "quickstart", *SMALL]
    write_tokenizer(folder)
    for path in folder.iterdir():
        if path.name != "tokenizer.json":
            path.unlink()
    assert _model(tmp_path / "m", *arguments, "--tokenizer", folder, "--eos-token", "<end>") == 2
    assert "--eos-token '<end>' is no token of the tokenizer; it has '<pad>'" in capsys.readouterr().err
    assert _model(tmp_path / "m", *arguments, "--tokenizer", folder) == 2
    assert "has no eos_token; name one: --eos-token TOKEN" in capsys.readouterr().err.replace(
        ", so no response could end", ""
    )
    assert _model(tmp_path / "m", *arguments, "--tokenizer", folder, "--eos-token", "<eos>") == 0
    assert json.loads((tmp_path / "m/tokenizer_config.json").read_text())["eos_token"] == "<eos>"
    with pytest.raises(ConfigError, match="has no eos_token") as raised:
        load_tokenizer(folder, DataConfig())
    found = re.search(r"write the file (\S+) with the line (\{.*?\}),", str(raised.value))
    assert found is not None
    Path(found[1]).write_text(found[2])
    assert load_tokenizer(folder, DataConfig()).eos_token == "<eos>"
