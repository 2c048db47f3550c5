"""Models that read images: bitwise both ways, and the folders that a run writes as transformers, PEFT and servers read them."""

from __future__ import annotations

import itertools
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_megatron.config import DataConfig
from grpo_megatron.convert import megatron
from grpo_megatron.convert import source as source_module
from grpo_megatron.convert.conversion import open_source
from grpo_megatron.data.images import ImageFormat, write_processor
from grpo_megatron.evaluation.ask import model_tokenizer
from grpo_megatron.evaluation.options import EngineOptions
from grpo_megatron.models.families import read_config
from grpo_megatron.models.weights.hf_folder import Serving, write_companions
from tests import vision, worlds
from tests.convert.folders import convert, put, same_bits, tensors_of
from tests.e2e import run_ranks
from tests.models.policies import LAYOUTS
from tests.models.test_lora import bfloat16
from tests.runs import write_rows

CELL = vision.CELL
LIMITS = {"image_min_pixels": 2 * CELL * CELL, "image_max_pixels": 6 * CELL * CELL}
PROMPTS = vision.make_prompts()


def module_names(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """As transformers 4.52 and later wrote some folders."""
    names = {name: name.replace("model.", "model.language_model.") for name in tensors if name.startswith("model.")}
    return {names.get(name, name.replace("visual.", "model.visual.")): tensor for name, tensor in tensors.items()}


@pytest.mark.both_stacks
@pytest.mark.parametrize(
    ("family", "layout"),
    [
        *itertools.product(("qwen2_5_vl", "qwen2_vl"), ("text_config", "flat", "tied", "module names")),
        *itertools.product(("qwen3_vl", "qwen3_vl_moe"), ("text_config", "tied")),
    ],
)
def test_bitwise(
    family: str, layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every tensor, also the five-dimensional one. `tied` is the 3B's form; the published folders are `flat`.

    Qwen3-VL's have `text_config` and names of modules, which are written, too.
    """
    monkeypatch.setattr(source_module, "BLOCK_ELEMENTS", 3000)
    monkeypatch.setattr(megatron, "FILE_BYTES", 100_000)
    source = vision.make_model(tmp_path / "hf", family, tie_word_embeddings=layout == "tied")
    wanted = tensors_of(source)
    patches = (
        "model.visual.patch_embed.proj.weight" if family.startswith("qwen3_vl") else "visual.patch_embed.proj.weight"
    )
    assert wanted[patches].dim() == 5 and ("lm_head.weight" in wanted) == (layout != "tied")
    if layout == "flat":
        (source / "config.json").write_text(json.dumps(vision.flat_config(source)))
    if layout == "module names":
        (source / "model.safetensors").unlink()
        put(source, module_names(wanted), num_files=3)
    assert convert("to-megatron", source, tmp_path / "megatron", "--tp", 2, "--pp", 2, "--quiet") == 0
    assert convert("to-hf", tmp_path / "megatron", tmp_path / "back", "--shard-size", "100K", "--quiet") == 0
    same_bits(wanted, tensors_of(tmp_path / "back"))
    assert read_config(tmp_path / "back") == read_config(source)
    assert convert("verify", source, tmp_path / "megatron", "--quiet") == 0
    capsys.readouterr()
    assert convert("inspect", tmp_path / "megatron") == 0
    text = capsys.readouterr().out
    assert family in text and f"{sum(tensor.numel() for tensor in wanted.values()):,}" in text
    assert "pretrain_gpt.py of Megatron-LM builds neither" in text
    model = vision.load(tmp_path / "back")
    for prompt, images, response in PROMPTS:
        want = vision.logprobs(vision.load(source), prompt, images, response)
        assert torch.equal(vision.logprobs(model, prompt, images, response), want)


# -- what a run writes -------------------------------------------------------------------------------------------------

WORLDS: dict[str, dict[str, Any]] = {
    "TP2+SP": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "PP2": {"pipeline_model_parallel_size": 2},
}


def run(root: Path, model: Path, megatron: dict[str, Any], **actor: Any) -> Path:
    """A run of one step on two ranks with a checkpoint and an export; its folder."""
    rows = []
    for number in range(6):
        (root / f"{number}.png").write_bytes(vision.png(vision.draw(number, (1 + number % 3) * CELL)))
        rows.append({"prompt": "what is it?", "answer": "1", "images": [f"{number}.png"]})
    write_rows(root / "data/train.jsonl", [{**row, "images": [f"../{path}" for path in row["images"]]} for row in rows])
    write_rows(root / "data/val.jsonl", [{"prompt": "what?", "answer": "1"}])
    raw = run_ranks.settings(root, root / "out", 2)
    raw["model"]["path"] = str(model)
    raw["data"] |= {"task": "jsonl", "apply_chat_template": True, "max_prompt_length": 64, **LIMITS}
    raw["actor"] |= {"megatron": megatron, **actor}
    raw["rollout"] |= {"engine": "transformers", "engine_options": {}}
    raw["trainer"] |= {"total_training_steps": 1, "save_freq": 1, "save_hf_at_end": True}
    worlds.run(run_ranks.train, 2, raw=raw)
    return root / "out"


def limits(folder: Path, model: Path) -> tuple[int, int]:
    """The limits of image sizes that evaluation, generation and a new run read."""
    from transformers import AutoTokenizer

    found = ImageFormat.of(folder, read_config(model), AutoTokenizer.from_pretrained(model), DataConfig())
    return found.min_pixels, found.max_pixels


def check_servers_read(folder: Path, model: Path) -> None:
    """transformers' processor of the folder resizes images as the run did; so does what reads the folder here."""
    from transformers import AutoTokenizer
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    assert limits(folder, model) == tuple(LIMITS.values())
    processor = Qwen2VLImageProcessorPil.from_pretrained(folder)
    for width, height, rows, columns in ((1, 1, 2, 2), (9, 3, 1, 4), (3, 2, 2, 3)):  # smallest 2 tokens, largest 6
        grid = processor(vision.draw(1, width * CELL, height * CELL), return_tensors="pt")["image_grid_thw"]
        assert grid.tolist() == [[1, rows * vision.MERGE, columns * vision.MERGE]]
    assert AutoTokenizer.from_pretrained(folder).chat_template == vision.TEMPLATE


@pytest.mark.parametrize(
    ("family", "layout"),
    [pytest.param("qwen2_5_vl", "TP2+SP", marks=pytest.mark.soak), ("qwen2_vl", "PP2"), ("qwen3_vl", "TP2+SP")],
)
def test_a_runs_folders_are_read_by_transformers(family: str, layout: str, tmp_path: Path) -> None:
    """The export at the end, and `to-hf` of the step: the same bits, all of them used, and the processor's files."""
    model = vision.make_model(tmp_path / "model", family)
    if family != "qwen3_vl":
        (model / "config.json").write_text(json.dumps(vision.flat_config(model)))
    before = tensors_of(model)
    if layout == "PP2":
        put(model, module_names(before))
    out = run(tmp_path, model, WORLDS[layout], vision={"freeze_tower": False, "freeze_merger": False})
    step = out / "checkpoints/step_000001"
    assert convert("to-hf", step, tmp_path / "converted", "--quiet") == 0
    after = tensors_of(out / "hf")
    same_bits(after, tensors_of(tmp_path / "converted"))
    assert before.keys() == after.keys() and all(not torch.equal(before[name], after[name]) for name in before)
    assert convert("verify", step, out / "hf", "--quiet") == 0
    for folder in (out / "hf", tmp_path / "converted"):
        check_servers_read(folder, model)
        loaded = vision.load(folder)
        assert torch.equal(loaded.state_dict()["lm_head.weight"], after["lm_head.weight"])


@pytest.mark.both_stacks
def test_limits_are_written_where_each_version_reads_them(tmp_path: Path) -> None:
    """transformers 5 has them nested in processor_config.json, and prefers these to preprocessor_config.json."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    model = vision.make_model(tmp_path / "model")
    config = read_config(model)
    (model / "processor_config.json").write_text(json.dumps({"processor_class": "Qwen2_5_VLProcessor"}))
    write_processor(model, config, None, None)
    assert limits(model, model) == (3136, 12845056)  # the published ones, where nothing is said
    nested = {"processor_class": "Qwen2_5_VLProcessor", "image_processor": {"size": {"longest_edge": 5 * CELL * CELL}}}
    (model / "processor_config.json").write_text(json.dumps(nested))
    assert limits(model, model) == (3136, 5 * CELL * CELL)
    write_processor(model, config, 2 * CELL * CELL, None)
    assert limits(model, model) == (2 * CELL * CELL, 5 * CELL * CELL)
    written = json.loads((model / "preprocessor_config.json").read_text())
    assert json.loads((model / "processor_config.json").read_text()) == {**nested, "image_processor": written}
    processor = Qwen2VLImageProcessorPil.from_pretrained(model)
    assert processor.size["shortest_edge"] == 2 * CELL * CELL and processor.size["longest_edge"] == 5 * CELL * CELL


def test_a_template_of_the_run_is_the_only_one(tmp_path: Path) -> None:
    """A processor of transformers 5 prefers chat_template.json, which the published folders have, to chat_template.jinja."""
    model, target = vision.make_model(tmp_path / "model"), tmp_path / "out"
    (model / "chat_template.json").write_text(json.dumps({"chat_template": "old"}))
    target.mkdir()
    for template, has_both in ((None, True), ("new", False)):
        write_companions(target, model, model, Serving(chat_template=template))
        assert (target / "chat_template.json").exists() == has_both
        assert (target / "chat_template.jinja").read_text() == (template or vision.TEMPLATE)


# -- adapters ----------------------------------------------------------------------------------------------------------


def test_adapters_of_a_run_are_read_by_peft(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every key is used, on decoder layers alone, and the log-probabilities are those of the merged weights."""
    import peft

    model = vision.make_model(tmp_path / "model", tower={"intermediate_size": 64})
    out = run(tmp_path, model, WORLDS["TP2+SP"], lora={"rank": 3, "alpha": 5}, optim={"lr": 0.05})
    assert convert("merge", out / "hf", tmp_path / "whole", "--quiet") == 0
    assert convert("to-hf", out / "checkpoints/step_000001", tmp_path / "converted") == 0
    assert re.fullmatch(r"to-hf: (.+) of \1 \(100%\), .+/s", capsys.readouterr().err.splitlines()[-1])
    given, merged = tensors_of(out / "hf"), vision.load(tmp_path / "whole")
    for folder in (out / "hf", tmp_path / "converted", tmp_path / "whole"):
        check_servers_read(folder, model)
        images = model_tokenizer(open_source(folder), EngineOptions(model=folder), None).image_format  # of `evaluate`
        assert (images.min_pixels, images.max_pixels) == tuple(LIMITS.values())
    same_bits(given, tensors_of(tmp_path / "converted"))
    for folder in (out / "hf", tmp_path / "converted"):
        adapted = peft.PeftModel.from_pretrained(vision.load(model), folder)
        held = {name.replace(".default", ""): p for name, p in adapted.named_parameters() if "lora_" in name}
        same_bits(given, {name: parameter.detach() for name, parameter in held.items()})
        assert all(".language_model.layers." in name for name in held) and len(held) == 2 * 7 * 2
        for prompt, images, response in PROMPTS:
            want = vision.logprobs(merged, prompt, images, response)
            got = vision.logprobs(adapted.base_model.model.eval(), prompt, images, response)
            torch.testing.assert_close(got, want, rtol=0, atol=1e-5)
            assert (got - vision.logprobs(vision.load(model), prompt, images, response)).abs().max() > 1e-3
    by_transformers = vision.load(out / "hf")
    assert any("lora_A" in name for name in by_transformers.state_dict())


@pytest.mark.both_stacks
@pytest.mark.parametrize("names", ["model.language_model.layers.", "model.layers."])
def test_adapters_with_either_form_of_names_are_read(
    names: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """PEFT on transformers 5 writes the first, on transformers 4.51 and earlier the second. Those of a tower are refused."""
    import peft

    model, given = vision.make_model(tmp_path / "model"), tmp_path / "given"
    config = {"task_type": "CAUSAL_LM", "r": 3, "lora_alpha": 5, "exclude_modules": ".*visual.*"}
    adapted = peft.get_peft_model(vision.load(model), peft.LoraConfig(target_modules=["q_proj", "up_proj"], **config))
    for number, (name, parameter) in enumerate(sorted(adapted.named_parameters())):
        if "lora_" in name:
            generator = torch.Generator().manual_seed(number)
            parameter.data = 0.1 * torch.randn(parameter.shape, generator=generator)
    adapted.save_pretrained(given)
    wanted = tensors_of(given)
    (given / "adapter_model.safetensors").unlink()
    put(given, {name.replace("model.language_model.layers.", names): tensor for name, tensor in wanted.items()})
    (given / "model.safetensors").rename(given / "adapter_model.safetensors")
    lora = {"rank": 3, "alpha": 5, "target_modules": ["q_proj", "up_proj"], "path": given}
    bfloat16(2, folder=model, layout=LAYOUTS["TP2+SP"], lora=lora, out=tmp_path / "out")
    same_bits({name: tensor.bfloat16() for name, tensor in wanted.items()}, tensors_of(tmp_path / "out"))
    assert convert("merge", given, tmp_path / "whole", "--quiet") == 0
    merged = vision.load(tmp_path / "whole")
    for prompt, images, response in PROMPTS:
        want = vision.logprobs(adapted.base_model.model, prompt, images, response)
        torch.testing.assert_close(vision.logprobs(merged, prompt, images, response), want, rtol=0, atol=1e-5)
    of_tower = {f"base_model.model.model.visual.blocks.0.attn.proj.lora_{x}.weight": torch.zeros(3, 3) for x in "AB"}
    (given / "adapter_model.safetensors").unlink()
    put(given, {**wanted, **of_tower})
    (given / "model.safetensors").rename(given / "adapter_model.safetensors")
    shutil.rmtree(tmp_path / "whole")
    assert convert("merge", given, tmp_path / "whole", "--quiet") == 2
    assert "has adapters of the vision tower, such as visual.blocks.0.attn.proj; here only" in capsys.readouterr().err
