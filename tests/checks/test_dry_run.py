"""The dry run's plan: what it prints, and the memory that it counts. Llama-3.1-70B is counted by hand."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from grpo_megatron.checks import layout, machine
from grpo_megatron.cli import main
from grpo_megatron.cli import plan as plans
from grpo_megatron.cli.config_file import load_config
from grpo_megatron.config import MegatronConfig
from grpo_megatron.evaluation.ask import open_model
from grpo_megatron.models.architecture import Architecture
from grpo_megatron.models.families import read_architecture
from grpo_megatron.planning.parameters import (
    StageParameters,
    memory_of_stages,
    parameters_from_table,
    stage_layers,
)
from tests.files import CONFIGS
from tests.runs import write_tokenizer

TP, PP = "actor.megatron.tensor_model_parallel_size", "actor.megatron.pipeline_model_parallel_size"
EP = "actor.megatron.expert_model_parallel_size"


def plan(run: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main.main(["train", str(run / "run.yaml"), "--dry-run", *arguments]) == 0
    return capsys.readouterr().out


def cut(arch: Architecture, layers: list[int], tp: int, ep: int = 1) -> list[StageParameters]:
    """`parameters_from_table` of a model with `layers` on its stages. All stages but the first and the last are equal."""
    ends = {"num_layers_in_first_pipeline_stage": layers[0], "num_layers_in_last_pipeline_stage": layers[-1]}
    megatron = MegatronConfig(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=len(layers),
        expert_model_parallel_size=ep,
        override_transformer_config=ends if len(layers) > 1 else {},
    )
    return parameters_from_table(dataclasses.replace(arch, num_layers=sum(layers)), megatron)


# -- what is printed --------------------------------------------------------------------------------------------------


def test_the_plan_counts_what_a_step_is(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = plan(run, capsys, f"{TP}=2", f"{PP}=2", "trainer.n_gpus_per_node=8", "actor.ppo_mini_batch_size=4")
    for line in (
        "8 = 1 node x 8",
        "tp 2 x pp 2 x dp 2, sequence parallel, distributed optimizer, float32",
        "8 engines of tp 1",
        "8 prompts x 4 = 32, about 4 per engine",
        "2 mini-batches x 1 epoch = 2, of 16 samples each",
        "about 8 samples of each optimizer step",
        "old log-probs     a pass before the update: 2 optimizer steps per rollout read the first one's\n",
        "reference         0.001 x low_var_kl in the loss",
        "prompt 16 + response 16 = 32 of the model's 128",
        "qwen2: 4 layers x 64, MLP 96, vocabulary 101",
        "complete, by name and shape",
        "tokenizer         18 tokens\n  answers end with  2 '<eos>' (tokenizer, config.json, generation_config.json)\n",
        "9 prompts of task arithmetic; 4 steps x 8 = 3.56 epochs",
        "4 prompts, before training, every 5 steps, at the end",
    ):
        assert line in text, text
    assert max(map(len, text.splitlines())) <= 120


def test_the_plan_says_which_passes_a_step_makes(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = plan(run, capsys, "actor.use_kl_loss=false", "actor.share_prompts=true")
    for line in (
        "old log-probs     of the update's own forward pass\n",
        "backward pass     left out",
        "prompts           one copy",
    ):
        assert line in text, text
    text = plan(run, capsys, "actor.kl_loss_coef=0", "actor.entropy_coeff=0.1", "actor.ppo_epochs=2")
    assert "old log-probs     a pass before the update: 2 optimizer steps" in text
    assert "no reference model, as actor.kl_loss_coef=0\n" in text and "backward pass" not in text


def test_the_resolved_config_is_a_file_that_can_be_run(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    resolved = tmp_path / "resolved.yaml"
    text = plan(run, capsys, "rollout.n=3", "sft.steps=2", "--resolved-config", str(resolved))
    assert load_config(resolved) == load_config(run / "run.yaml", ["rollout.n=3", "sft.steps=2"])
    assert "5 rows; 2 steps x 32 = 12.80 epochs" in text
    assert main.main(["train", str(run / "run.yaml"), "--dry-run", "--resolved-config", str(resolved)]) == 2
    assert "resolved.yaml exists; name another file" in capsys.readouterr().err
    assert main.main(["train", str(run / "run.yaml"), "--resolved-config", str(resolved)]) == 2
    assert "--resolved-config needs --dry-run" in capsys.readouterr().err


def test_the_last_line_says_if_a_run_can_start(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan alone needs no weights. On this machine a missing device or package is an exception; weights are needed."""
    folder = shutil.copytree(run / "model", tmp_path / "model")
    (folder / "model.safetensors").unlink()
    bare = f"model.path={folder}"
    assert main.main(["plan", str(run / "run.yaml"), bare]) == 0
    text = capsys.readouterr().out
    assert "NOT FOUND, so not checked" in text and "READY" not in text
    assert main.main(["train", str(run / "run.yaml"), "--dry-run", bare]) == 2
    assert f"NOT READY: model.path='{folder}' has no weights" in capsys.readouterr().err
    monkeypatch.setattr(machine, "engine_packages", lambda rollout: {})
    monkeypatch.setitem(sys.modules, "wandb", None)
    on_gpus = ["trainer.device=cuda", "rollout.engine=transformers"]
    assert main.main(["train", str(run / "run.yaml"), "--dry-run", *on_gpus]) == 2
    assert "NOT READY: rollout.engine=transformers on GPUs: this engine has no GPU path" in capsys.readouterr().err
    for arguments, expected in {
        (): "READY: without --dry-run the run starts",
        ("trainer.nnodes=2",): "READY: by torchrun on each of the 2 nodes the run starts",
        ("trainer.device=cuda", "rollout.engine=vllm"): "READY EXCEPT: trainer.device=cuda, but ",
        ("trainer.logger=[wandb]",): "READY EXCEPT: trainer.logger=['wandb']: the package 'wandb' does not import",
    }.items():
        assert plan(run, capsys, *arguments).splitlines()[-1].startswith(f"  {expected}")
    monkeypatch.setattr(plans, "on_disk", lambda folder: [folder / "checkpoints/step_000003"])
    assert "READY: without --dry-run the run goes on after step 3 of 4, from " in plan(run, capsys)
    assert "; by torchrun on each of the 2 nodes the run goes on" in " ".join(
        plan(run, capsys, "trainer.logger=[wandb]", "trainer.nnodes=2").split()
    )
    auto = ("trainer.device=auto", "rollout.engine=vllm")  # which is the CPU here
    monkeypatch.setattr(layout, "VLLM_CPU_HEADS", (7,))
    assert "READY EXCEPT: rollout.engine=vllm on the CPU: its attention has heads of 7" in plan(run, capsys, *auto)
    assert main.main(["train", str(run / "run.yaml"), *auto]) == 2  # not after ranks have started
    assert "rollout.engine=vllm on the CPU: its attention has heads of 7" in capsys.readouterr().err


def test_a_mistyped_model_is_all_that_a_plan_reports(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where data are missing, too; the dry run of `train` reports both."""
    wrong = (str(run / "run.yaml"), "model.path=/none/such", "data.train_files=[none.jsonl]")
    reported = {}
    for command in (("plan", *wrong), ("train", *wrong, "--dry-run")):
        assert main.main(list(command)) == 2
        reported[command[0]] = re.findall(r"^error: ([\w.]+)", capsys.readouterr().err, re.MULTILINE)
    assert reported == {"plan": ["model.path"], "train": ["data.train_files", "model.path"]}


def test_a_model_of_the_hub_is_its_folder_in_the_cache(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    model, commit = tmp_path / "models--me--tiny", "1" * 40
    (model / "refs").mkdir(parents=True)
    (model / "refs" / "main").write_text(commit)
    folder = shutil.copytree(run / "model", model / "snapshots" / commit)
    resolved = tmp_path / "resolved.yaml"
    assert "complete, by name and shape" in plan(run, capsys, "model.path=me/tiny", "--resolved-config", str(resolved))
    assert load_config(resolved).model.path == folder  # of a commit: what the Hub has later is not taken
    assert open_model(Path("me/tiny")).hf_folder == folder


def test_epochs_are_shown_as_arithmetic(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """9 rows in batches of 8: the file's 4 steps are 4 epochs. In a plan for another machine nobody may know the rows."""
    expected = "9 prompts of task arithmetic; trainer.total_epochs: 4 x floor(9 / 8) = 4 steps x 8 = 3.56 epochs"
    assert expected in plan(run, capsys, "trainer.total_epochs=4")
    elsewhere = ["data.train_files=[gone.jsonl]", "--world-size", "2"]
    assert "4 epochs, of unknown length" in plan(run, capsys, "trainer.total_epochs=4", *elsewhere)


def test_epochs_and_validation_rows_that_cannot_be(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """9 rows, and the file sets 4 steps. The rows of the training have no responses."""
    nine = "floor(9 rows / data.train_batch_size="
    for arguments, expected in {
        ("trainer.total_epochs=1",): f"1 x {nine}8) = 1 step, and trainer.total_training_steps=4; leave one",
        ("trainer.total_epochs=4", "data.train_batch_size=10"): f"4 x {nine}10) = 0 steps; set data.train_batch_size=9",
        (f"data.val_loss_files=[{run}/train.jsonl]",): f"data.val_loss_files: data file '{run}/train.jsonl': 9 of 9",
    }.items():
        assert main.main(["train", str(run / "run.yaml"), "--dry-run", *arguments]) == 2
        assert expected in capsys.readouterr().err


def test_the_plan_of_70b(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """80 layers, h 8192, MLP 28672, 64 heads in 8 groups of 128, V 128256; tp 8 x pp 4 x dp 2 on 64 ranks, bfloat16.

    A layer: q and o 2 * 8192**2, k and v 2 * 1024 * 8192, MLP 3 * 28672 * 8192, two norms of 8192 = 855,654,400. Of it
    a tp rank has the matrices over 8 and the norms whole: 855,638,016 / 8 + 16,384 = 106,971,136. Embedding, head:
    128256 * 8192 = 1,050,673,152 each, over 8: 131,334,144 (128256 is a multiple of 64: no padding).
    """
    shutil.copy(CONFIGS / "Llama-3.1-70B.json", tmp_path / "config.json")
    write_tokenizer(tmp_path)
    arguments = [f"model.path={tmp_path}", "model.dtype=bfloat16", "trainer.nnodes=8", "trainer.n_gpus_per_node=8"]
    sizes = [f"{TP}=8", f"{PP}=4", "rollout.tensor_model_parallel_size=8", "--world-size", "64"]
    text = plan(run, capsys, *arguments, *sizes)
    layers = 20 * 106_971_136
    assert "70,553,706,496" in text
    assert 80 * 855_654_400 + 2 * 1_050_673_152 + 8192 == 70_553_706_496
    assert re.search(rf"0 +20 +{layers + 131_334_144:,} ", text)
    assert re.search(rf"1 +20 +{layers:,} ", text)
    assert re.search(rf"3 +20 +{layers + 131_334_144 + 8192:,} ", text)
    gib = layers / 2**30  # of a middle stage: weights 2 bytes, gradients 4, optimizer 12 over dp 2, reference 2
    assert f"{2 * gib:>9.3f} {4 * gib:>9.3f} {6 * gib:>9.3f} {2 * gib:>9.3f} {14 * gib:>9.3f}" in text
    # Into a rank of a middle stage: an eighth of the model but its own shard. Into its node: what other stages have.
    into_rank, into_node = 2 * (70_553_706_496 / 8 - layers) / 1e9, 2 * (70_553_706_496 - 20 * 855_654_400) / 1e9
    assert f"at most {into_rank:.2f} GB of 141.1 GB\n" in text
    assert f"at most {into_node:.1f} GB over the border of a node\n" in text
    assert "NOT FOUND" in text
    assert "on the host" not in text
    keys = ["rollout.sync=delta", "rollout.engine_options={sleep_level: 1}", "rollout.tensor_model_parallel_size=4"]
    text = plan(run, capsys, *arguments, f"{TP}=8", f"{PP}=4", "--world-size", "64", *keys)
    engine, sent = 2 * 70_553_706_496 / 4 / 2**30, 2 * (layers + 131_334_144 + 8192) / 2**30
    expected = f"on the host: at most {engine + sent:.3f} = {engine:.3f} of the engine's shard + {sent:.3f} sent"
    assert expected in text


# -- what is counted --------------------------------------------------------------------------------------------------


def test_stages_add_up_to_the_model(run: Path) -> None:
    """At tp 1 every parameter is on one stage: the sum is the model, and its padding rows (101 -> 104) twice."""
    arch = read_architecture(run / "model")
    for layers in ([4], [2, 2], [1, 2, 1]):
        stages = cut(arch, layers, 1)
        assert [stage.layers for stage in stages] == layers
        assert sum(stage.total for stage in stages) == arch.num_parameters() + 2 * 3 * arch.hidden_size


def test_the_ends_of_the_pipeline_hold_embedding_and_head(run: Path) -> None:
    """101 rows of 64, padded to 112, over tp 2: 3,584. The final norm: 64. A tied head on another stage is a copy."""
    arch = read_architecture(run / "model")
    first, middle, last = cut(arch, [1, 1, 1], 2)
    assert (first.total - middle.total, last.total - middle.total) == (3584, 3584 + 64)
    tied = dataclasses.replace(arch, tied=True)
    assert cut(tied, [1, 1, 1], 2) == cut(arch, [1, 1, 1], 2)
    assert cut(tied, [3], 2)[0].total == cut(arch, [3], 2)[0].total - 3584


# -- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("cp", "ep", "sharded", "expected"), [

    (1, 4, True, 12 * (800 / 8 + 160 / 2)),
    (2, 4, True, 12 * (800 / 8 + 160 / 2)),  # context-parallel ranks are replicas, too
    (1, 4, False, 12 * (800 + 160)),
])  # fmt: skip
def test_adam_is_divided_over_the_replicas(run: Path, cp: int, ep: int, sharded: bool, expected: float) -> None:
    """bfloat16: 12 bytes. 32 ranks / (tp 2 x pp 2) = 8 replicas of a dense parameter, 8 / ep of an expert."""
    megatron: dict[str, Any] = {TP: 2, PP: 2, EP: ep, "actor.megatron.context_parallel_size": cp}
    megatron["actor.megatron.use_distributed_optimizer"] = str(sharded).lower()
    config = load_config(run / "run.yaml", ["model.dtype=bfloat16", *(f"{k}={v}" for k, v in megatron.items())])
    (memory,) = memory_of_stages(config, 32, [StageParameters(layers=1, dense=800, experts=160)], [])
    assert (memory.weights, memory.gradients, memory.optimizer) == (2 * 960, 4 * 960, expected)


@pytest.mark.parametrize(("overrides", "has_reference", "words"), [
    ([], True, "0.001 x low_var_kl in the loss"),

    (["actor.use_kl_loss=false", "algorithm.use_kl_in_reward=true"], True, "0.001 x kl in the reward"),
    (
        ["actor.use_kl_loss=false", "actor.loss_mode=dpo", "actor.loss_agg_mode=seq-mean-token-mean",
         "algorithm.adv_estimator=best_worst"],
        True,
        "read by dpo",
    ),
    (
        ["actor.use_kl_loss=false", "actor.loss_mode=sft", "algorithm.source=initial", "algorithm.adv_estimator=rft"],
        True,
        "generates the responses",
    ),
])  # fmt: skip
def test_a_reference_is_counted_where_the_method_needs_one(
    run: Path, capsys: pytest.CaptureFixture[str], overrides: list[str], has_reference: bool, words: str
) -> None:
    """In float32, the reference has the 4 bytes per parameter of the policy's weights, and nothing else."""
    config = load_config(run / "run.yaml", overrides)
    (memory,) = memory_of_stages(config, 2, [StageParameters(layers=4, dense=1000, experts=0)], [])
    assert memory.reference == (4000 if has_reference else 0)
    assert memory.total == 4000 + 4000 + 8000 / 2 + memory.reference
    assert f"reference         {words}\n" in plan(run, capsys, *overrides)


def test_a_reward_model_is_counted(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The policy's folder as a reward model, float32 on 2 ranks: no head, 104 padded rows of 64 = 6,656 parameters fewer."""
    frozen = [f"reward_model.path={run / 'model'}"]
    learns = [*frozen, "algorithm.iteration_steps=2", "reward_model.start_iteration=1"]
    text = plan(run, capsys, *learns)
    assert re.search(r"reward model \S+: [\d,]+ parameters, learns ", " ".join(text.split()))
    assert re.search(r"stage layers .* reference reward model  together\n", text)
    config = load_config(run / "run.yaml", learns)
    arch = read_architecture(run / "model")
    (policy,) = parameters_from_table(arch, config.actor.megatron)
    tied = dataclasses.replace(arch, tied=True)
    (reward,) = parameters_from_table(tied, config.actor.megatron, has_output_head=False)
    assert reward.total == policy.total - 104 * 64
    for overrides, bytes_per_parameter in ((frozen, 4), (learns, 4 + 4 + 8 / 2)):
        config = load_config(run / "run.yaml", overrides)
        (memory,) = memory_of_stages(config, 2, [policy], [[reward]])
        assert memory.reward_model == bytes_per_parameter * reward.total
        assert memory.total == memory_of_stages(config, 2, [policy], [])[0].total + memory.reward_model


# -- stages -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pp", "first", "last", "expected"),
    [
        (1, None, None, [8]),
        (4, None, None, [2, 2, 2, 2]),
        (3, 2, None, [2, 3, 3]),
        (4, 1, 1, [1, 3, 3, 1]),
        (2, 3, 4, None),
        (2, 0, None, None),
        (2, "4", None, None),
    ],
)
def test_stages_are_cut_as_megatron_cuts_them(
    run: Path, pp: int, first: object, last: object, expected: list[int] | None
) -> None:
    ends = {"num_layers_in_first_pipeline_stage": first, "num_layers_in_last_pipeline_stage": last}
    override = json.dumps({name: value for name, value in ends.items() if value is not None})
    config = load_config(run / "run.yaml", [f"{PP}={pp}", f"actor.megatron.override_transformer_config={override}"])
    assert stage_layers(8, config.actor.megatron) == expected
