"""The recipes: each one's plan at full size with the real architecture, and the first two steps with a shrunk model.

A full-size plan needs config.json, and headers of weight files where a folder must have weights. A shrunk model has the
recipe's family and random weights, with a real tokenizer of 2,000 tokens; one that reads images has a token per character. Its
run shows that the recipe's keys fit together from the prompts to the update. Only GPUs can show that a recipe reaches its
scores.
"""

from __future__ import annotations

import json
import math
import re
import struct
from pathlib import Path
from typing import Any

import pyarrow
import pytest
import torch
from pyarrow import parquet

from grpo_megatron.cli import main
from grpo_megatron.cli.config_file import load_config
from grpo_megatron.config import Config
from grpo_megatron.data.task import get_task
from grpo_megatron.rewards.reward import rewards
from grpo_megatron.rollout.vllm.versions import is_newest
from tests import tiny, vision, worlds
from tests.e2e import run_ranks
from tests.e2e.test_examples import ROOT
from tests.files import DATA, QWEN_SMALL
from tests.stored import metric_rows

pytestmark = pytest.mark.slow

RECIPES = sorted(path.relative_to(ROOT) for path in (ROOT / "examples/recipes").glob("*/*.yaml"))
RECIPES = [path for path in RECIPES if path.parent.name != "tasks"]
MODELS = ROOT / "examples/models"  # config.json of each recipe's model, for plans
FILES = {  # file under /data -> its rows
    "gsm8k_train.jsonl": "gsm8k/train.jsonl",
    "gsm8k_test.jsonl": "gsm8k/test.jsonl",
    "math_train.jsonl": "math/train.jsonl",
    "math_lvl3to5.jsonl": "math/train.jsonl",
    "math_test.jsonl": "math/test.jsonl",
    "math500.jsonl": "math/math500_test.jsonl",
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of /data with a few of their rows. DAPO-Math-17k and AIME are not there: two rows of their form are."""
    folder = tmp_path_factory.mktemp("data")
    for name, source in FILES.items():
        lines = (DATA / source).read_text().splitlines(keepends=True)
        (folder / name).write_text("".join(lines[:16]))
    lines = [json.loads(line) for line in (folder / "gsm8k_train.jsonl").read_text().splitlines()]
    written = [{"prompt": row["question"], "response": row["answer"].rpartition("\n")[2]} for row in lines]
    (folder / "gsm8k_sft.jsonl").write_text("".join(json.dumps(row) + "\n" for row in written))
    for name in ("geometry3k_train.parquet", "geometry3k_test.parquet"):
        drawn = [{"bytes": vision.png(vision.draw(seed, 56 + 28 * (seed % 2))), "path": None} for seed in range(16)]
        problems = [
            {"images": [image], "problem": f"<image>Find x{n}.", "answer": f"{n}"} for n, image in enumerate(drawn)
        ]
        parquet.write_table(pyarrow.Table.from_pylist(problems), folder / name)
    asked = [f"What is {number} + 1?" for number in range(16)]
    rows: list[dict[str, Any]] = [
        {
            "prompt": text,
            "answer": number + 1,
            "subject": ("math", "code")[number % 2],
            "with_solution": f"{text} {text}",
        }
        for number, text in enumerate(asked)
    ]
    for name in ("dapo_math_17k.jsonl", "aime24.jsonl"):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def rows_of(path: Path) -> list[dict[str, Any]]:
    if path.suffix == ".parquet":
        return parquet.read_table(path).to_pylist()  # type: ignore[no-any-return]
    return [json.loads(line) for line in path.read_text().splitlines()]


def add_tokenizer(folder: Path, template: str) -> None:
    """Qwen's tokenizer with a ChatML template."""
    (folder / "tokenizer.json").symlink_to(QWEN_SMALL)
    about = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps({**about, "chat_template": template}))


def add_weight_headers(folder: Path) -> None:
    """A weight file of the right names, shapes and length, without content: it takes no space on the disk."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)
    header, end = {}, 0
    for name, tensor in model.state_dict().items():
        start, end = end, end + 2 * tensor.numel()
        header[name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [start, end]}
    encoded = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        file.truncate(8 + len(encoded) + end)


def shape_of(name: str) -> dict[str, Any]:
    """The config.json of a recipe's model. A recipe's later stages start from the model of the first."""
    return json.loads((MODELS / name.replace("hf", "llama-7b") / "config.json").read_text())  # type: ignore[no-any-return]


def full_size(name: str, root: Path, with_weights: bool = False) -> Path:
    """The folder of a real architecture; those of 7B by Qwen with their tokenizer, which takes seconds to load."""
    folder = root / name
    folder.mkdir()
    config = shape_of(name)
    if "image_token_id" in config:
        config["image_token_id"] = 4108  # of the small tokenizer
    (folder / "config.json").write_text(json.dumps(config))
    if "-VL-" in name:
        add_tokenizer(folder, vision.TEMPLATE)
    if name in ("Qwen2.5-7B-Instruct", "Qwen2.5-Math-7B"):
        add_tokenizer(folder, (ROOT / "examples/templates/chatml.jinja").read_text())
    if with_weights:
        add_weight_headers(folder)
    return folder


def files_in(data: Path, files: list[Path]) -> str:
    return f"[{','.join(str(data / file.name) for file in files)}]"


def data_overrides(config: Config, data: Path) -> list[str]:
    """The recipe's files below `data` instead of /data."""
    assert all(file.parent == Path("/data") for file in [*config.data.train_files, *config.data.val_files])
    overrides = [f"data.train_files={files_in(data, config.data.train_files)}"]
    if config.data.val_files:
        overrides.append(f"data.val_files={files_in(data, config.data.val_files)}")
    if config.data.val_tasks:
        overrides.append(f"data.val_data={data}")
    return overrides


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_the_plan_at_full_size(
    recipe: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The dry run passes, every phase fits GPUs of 79 GiB, and the numbers of the header and of the page are the plan's."""
    monkeypatch.chdir(ROOT)
    config = load_config(recipe, [])
    overrides = [f"model.path={full_size(config.model.path.name, tmp_path)}", *data_overrides(config, data)]
    if config.reward_model.path is not None:
        overrides.append(f"reward_model.path={full_size(config.reward_model.path.name, tmp_path, with_weights=True)}")
    for name, teacher in config.teachers.items():
        if teacher.path is not None:
            overrides.append(f"teachers.{name}.path={full_size(teacher.path.name, tmp_path)}")
    world = config.trainer.nnodes * config.trainer.n_gpus_per_node
    command = ["train", str(recipe), "--dry-run", "--world-size", str(world), "--gpu-memory", "79", *overrides]
    assert main.main(command) == 0
    plan = capsys.readouterr().out
    fits = next(line for line in plan.splitlines() if line.startswith("  of 79")).split()[2:]
    assert fits == ["fits"] * len(gib_of_phases(plan))
    header = " ".join(
        line.removeprefix("#").strip() for line in recipe.read_text().partition("\n\nmodel:")[0].splitlines()
    )
    assert str(recipe) in header and "Not run on a GPU yet" in header and "Expected" in header and "Values: " in header
    assert all((ROOT / path).exists() for path in re.findall(r"examples/recipes/[\w/]+\.yaml", header))
    stage = ["model.path=llama-7b"] if config.model.path.name == "hf" else []
    resolved = tmp_path / "resolved.yaml"
    command = ["plan", str(recipe), "--gpu", "h100-80", "--resolved-config", str(resolved), *stage]
    assert main.main(command) == 0  # no folder, no data
    offline = capsys.readouterr().out
    path = "llama-7b" if stage else str(config.model.path)
    assert f"model.path={path} is not here: its shape is that of {MODELS}" in offline and "FITS h100-80" in offline
    gib = gib_of_phases(offline)
    fullest = max(gib[name] for name in gib if name not in ("load", "start", "sync", "rollout", "save"))
    assert stated(header, r"takes (\d+) GiB") == round(fullest)
    rollouts = f"{gib['rollout']:.0f}" if "rollout" in gib else "-"
    assert rollouts == "-" or stated(header, r"rollouts (\d+)") == float(rollouts)
    if row := re.search(rf"\({re.escape('../' + str(recipe))}\).*", (ROOT / "docs/recipes.md").read_text()):
        assert f"| {world} | {rollouts}, {fullest:.0f} |" in row[0]
    assert f"path: {path}," in resolved.read_text()


def gib_of_phases(plan: str) -> dict[str, float]:
    """The plan's memory of a GPU in each phase."""
    lines = plan.splitlines()
    phases = next(line for line in lines if line.split()[:1] == ["load"] and "update" in line).split()
    together = next(line for line in lines if line.startswith("  together")).split()[1:]
    return dict(zip(phases, map(float, together), strict=True))


def stated(header: str, pattern: str) -> float:
    """The number that the header states."""
    found = re.search(pattern, header)
    assert found is not None, f"no {pattern!r} in the header"
    return float(found[1])


@pytest.mark.parametrize("path", sorted((ROOT / "examples/recipes/tasks").glob("*.yaml")), ids=lambda path: path.stem)
def test_a_task_reads_its_files_and_grades_them(path: Path, data: Path) -> None:
    """The instruction asks for a box, and a box with the reference answer is right."""
    task = get_task(str(path))
    names = [name for name in task.files if (data / name).exists()] or ["gsm8k_train.jsonl", "math_train.jsonl"]
    for name in names:
        for question, answer in map(task.read_row, rows_of(data / name)):
            assert "\\boxed{}" in json.dumps(task.messages(question))
            assert rewards.get(task.reward or "")("\\boxed{" + answer + "}", answer)["acc"] == 1.0
            assert rewards.get(task.reward or "")("\\boxed{no}", answer)["acc"] == 0.0


SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "vocab_size": 2048,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True}
GLM = {**EXPERTS, "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "attention_bias": True}
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
REAL_REWARDS = ("qwen25_7b", "r1_gsm8k_1b", "easyr1_qwen25_7b")  # the others have one that a random model gets
PROMPT, RESPONSE = 720, 16  # tokens; longer prompts are left out


def shrunk(family: str, root: Path) -> Path:
    """A model of the family with random weights."""
    if family in vision.TOWERS:
        return vision.make_model(root / family, family, max_position_embeddings=1024)
    experts = GLM if family == "glm4_moe" else EXPERTS if family.endswith("_moe") or family == "gpt_oss" else {}
    folder = tiny.make_model(root / family, "llama2", **{**SMALL, **experts, "model_type": family})
    (folder / "tokenizer.json").symlink_to(DATA / "tokenizers/torchtitan_test/tokenizer.json")
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end_of_text|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    return folder


def shrunk_run(recipe: Path, model: Path, data: Path, out: Path) -> dict[str, Any]:
    """The recipe's first two steps on two CPU ranks. Kept are all its keys that have nothing to do with size."""
    config = load_config(recipe, [])
    batch = 4
    ep = min(2, config.actor.megatron.expert_model_parallel_size)
    engine_ep = ep if is_newest() else 1
    overrides = [
        f"model.path={model}",
        "model.dtype=float32",
        *data_overrides(config, data),
        "data.val_max_samples=2",
        f"data.train_batch_size={batch}",
        f"data.max_prompt_length={PROMPT}",
        f"data.max_response_length={RESPONSE}",
        f"actor.ppo_mini_batch_size={max(1, batch // config.actor.num_mini_batches(config.data.train_batch_size))}",
        "actor.ppo_max_token_len_per_gpu=2048",
        "actor.optim.lr_warmup_steps=0",
        "actor.megatron.tensor_model_parallel_size=1",
        "actor.megatron.pipeline_model_parallel_size=1",
        f"actor.megatron.expert_model_parallel_size={ep}",
        "rollout.n=3",
        f"rollout.tensor_model_parallel_size={engine_ep}",
        f"rollout.expert_parallel_size={engine_ep}",
        "rollout.stop_token_ids=[]",
        "rollout.enforce_eager=true",
        "rollout.engine_options.kv_cache_gib=0.1",
        "rollout.val_kwargs.n=1",
        "trainer.total_training_steps=2",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
        "trainer.save_hf_at_end=false",
        "trainer.logger=[jsonl]",
        "trainer.nnodes=1",
        "trainer.n_gpus_per_node=2",
        "trainer.device=cpu",
        f"trainer.output_dir={out}",
    ]
    if config.data.image_max_pixels is not None:
        overrides += [f"data.image_min_pixels={2 * vision.CELL**2}", f"data.image_max_pixels={6 * vision.CELL**2}"]
    if recipe.parent.name not in REAL_REWARDS:
        overrides += ["reward.function=tests.e2e.rewards:length_reward", "reward.components=[]"]
    if config.algorithm.filter_groups.enable:  # some groups must have equal rewards
        overrides += ["reward.function=tests.e2e.rewards:parity_reward", f"data.gen_batch_size={batch}"]
    if config.reward.overlong_buffer.len is not None:
        overrides.append(f"reward.overlong_buffer.len={RESPONSE // 4}")
    if config.reward_model.path is not None:
        overrides += [f"reward_model.path={model}", "reward_model.steps=2", "reward_model.train_batch_size=4"]
        overrides.append("algorithm.iteration_steps=1")
    for name, teacher in config.teachers.items():
        if teacher.path is not None:
            overrides += [f"teachers.{name}.path={model}", f"teachers.{name}.tensor_model_parallel_size=2"]
            overrides.append(f"teachers.{name}.expert_model_parallel_size=1")
        elif teacher.prompt_column is not None:
            overrides.append(f"teachers.{name}.max_prompt_length={PROMPT}")
    if config.algorithm.adv_estimator == "gae":
        overrides.append("critic.ppo_mini_batch_size=1")
    if getattr(config.trainer, "total_epochs", None) is not None:
        overrides.append("trainer.total_epochs=null")
    return load_config(recipe, overrides).model_dump(mode="json")


@pytest.mark.parametrize(
    ("family", "only"),
    [
        pytest.param("qwen2_5_vl", "", marks=pytest.mark.soak),
        ("qwen3", ""),
        *(pytest.param(f, "", marks=pytest.mark.soak) for f in ("qwen2", "llama", "qwen3_moe", "glm4_moe", "gpt_oss")),
        pytest.param("qwen3_vl_moe", "", marks=pytest.mark.soak),
    ],
)
def test_two_steps_of_a_shrunk_model(
    family: str, only: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All recipes of a family, or the one in the folder `only`, one after the other in one world."""
    monkeypatch.chdir(ROOT)
    model = shrunk(family, tmp_path)
    raws = {}
    for recipe in [recipe for recipe in RECIPES if only in str(recipe)]:
        if shape_of(load_config(recipe, []).model.path.name)["model_type"] == family:
            raws[recipe] = shrunk_run(recipe, model, data, tmp_path / recipe.parent.name / recipe.stem)
    assert raws
    worlds.run(run_ranks.train_many, 2, raws=list(raws.values()))
    for recipe, raw in raws.items():
        first, second, *validations = metric_rows(Path(raw["trainer"]["output_dir"]))
        check_metrics(raw, first, second, has_gradient=recipe.parent.name not in REAL_REWARDS)
        for task in raw["data"]["val_tasks"]:
            assert f"val-core/{Path(task).stem}/acc/mean@1" in validations[0]


def check_metrics(raw: dict[str, Any], first: dict[str, float], second: dict[str, float], has_gradient: bool) -> None:
    """Both steps were updates on the samples of an engine that agrees with the policy, with the parts that the config names."""
    filtered = raw["algorithm"]["filter_groups"]["enable"]
    for row in (first, second):
        if raw["algorithm"]["source"] == "policy" and (row is first or not filtered):  # else older weights drew some
            assert row["training/rollout_logp_diff_mean"] < 1e-6
        assert math.isfinite(row["actor/grad_norm"]) and row["actor/skipped_updates"] == 0
        assert row["actor/grad_norm"] > 0 or not has_gradient
        assert ("actor/kl_loss" in row) == raw["actor"]["use_kl_loss"]
        assert ("train/num_gen_batches" in row) == filtered
        assert ("distillation/reverse_kl" in row) == bool(raw["teachers"])
        assert ("critic/vf_loss" in row) == (raw["algorithm"]["adv_estimator"] == "gae")
    assert (first.get("perf/image_tokens", 0) > 0) == (raw["data"]["image_max_pixels"] is not None)
    assert ("reward_model/agreement" in second) == (raw["reward_model"]["path"] is not None)
