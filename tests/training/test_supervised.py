"""Supervised runs with the real trainer on two ranks: epochs, stops and a kill, validation loss, other layouts, a dump.

One world does all runs of two replicas, another one those with tensor parallelism. 16 rows in batches of 5 are
floor(16 / 5) = 3 steps per epoch, so two epochs are six steps.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import yaml
from safetensors.torch import load_file

from grpo_megatron.config import Config
from tests.printed import run_printed
from tests.soak.soak import make_workspace
from tests.stored import rows_without
from tests.training.test_guards import replayed
from tests.worlds import ranks

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.slow


# -- The programs of the ranks -----------------------------------------------------------------------------------------

SFT = {"algorithm": {"source": "file", "adv_estimator": "constant"}, "actor": {"loss_mode": "sft"}}
DPO = {
    "algorithm": {"source": "file", "adv_estimator": "best_worst"},
    "actor": {"loss_mode": "dpo", "loss_agg_mode": "seq-mean-token-mean"},
}


def settings(root: Path, output: Path, method: dict[str, Any], tp: int = 1, **sections: Any) -> dict[str, Any]:
    """Two ranks, 16 rows in batches of 5: two epochs are six steps. Held out: the rows of `root`/held_out.jsonl."""
    raw: dict[str, Any] = {
        "model": {"path": str(root / "model"), "dtype": "float32"},
        "data": {
            "task": "arithmetic",
            "train_files": [str(root / "data/written.jsonl")],
            "val_loss_files": [str(root / "held_out.jsonl")],
            "apply_chat_template": False,
            "train_batch_size": 5,
            "max_prompt_length": 32,
            "max_response_length": 32,
        },
        **method,
        "trainer": {
            "total_epochs": 2,
            "test_freq": 3,
            "save_freq": 2,
            "save_hf_at_end": False,
            "n_gpus_per_node": 2,
            "device": "cpu",
            "output_dir": str(output),
            "logger": ["jsonl"],
        },
    }
    megatron = {"tensor_model_parallel_size": tp}
    raw["actor"] = {**raw["actor"], "use_kl_loss": False, "optim": {"lr": 1e-3}, "megatron": megatron}
    raw["actor"]["ppo_max_token_len_per_gpu"] = 200
    for section, values in sections.items():
        raw[section] = {**raw.get(section, {}), **values}
    return raw


def train(
    raw: dict[str, Any], stop_in: tuple[str, int] | None = None, kill_in_step: int | None = None
) -> dict[str, Any]:
    """Run the Trainer. `stop_in`: ("sft" or "task", step): the stop file appears in that step of the warm-up or the run.

    `kill_in_step`: the run ends after that step's report, without a checkpoint. Returns how it ended, and the weights of a
    finished run.
    """
    from grpo_megatron import run as run_module
    from grpo_megatron.checks.validate import validate
    from grpo_megatron.report.step import StepReport
    from grpo_megatron.trainer import Trainer
    from grpo_megatron.training.stopping import Stopped

    stop_file = Path(raw["trainer"]["output_dir"]) / "stop"
    config = Config.model_validate({**raw, "trainer": {**raw["trainer"], "stop_file": str(stop_file)}})
    result: dict[str, Any] = {"ended": "done"}
    log = StepReport.log

    def watched(self: Any, step: int, metrics: Any, samples: Any, *arguments: Any, **named: Any) -> Any:
        reduced = log(self, step, metrics, samples, *arguments, **named)
        stage = "sft" if samples[0].prompt.uid.startswith("sft/") else "task"
        if stop_in == (stage, step):
            stop_file.touch()
        if stage == "task" and step == kill_in_step:
            raise KeyboardInterrupt
        return reduced

    with (
        mock.patch.object(StepReport, "log", watched),
        mock.patch.object(run_module, "destroy_mesh", lambda: None),  # the world is used again
    ):
        try:
            trainer = Trainer(config, validate(config, int(os.environ["WORLD_SIZE"])))
            trainer.run()
            result["weights"] = {n: t.clone() for bucket in trainer.parts.policy.hf_weights(1) for n, t in bucket}
        except Stopped as stopped:
            result["ended"], result["text"] = str(stopped.exit_code), str(stopped)
        except KeyboardInterrupt:
            result["ended"] = "killed"
    torch.distributed.barrier()
    stop_file.unlink(missing_ok=True)
    return result


def warm_up(root: Path) -> dict[str, Any]:
    """The section `sft`: three steps of four of nine rows."""
    files = [str(root / "data/train.sft.jsonl")]
    return {"steps": 3, "train_files": files, "train_batch_size": 4, "optim": {"lr": 1e-3}}


@ranks()
def dp2(root: Path, out: Path) -> dict[str, Any]:
    """Every run of two replicas, in one world. Between them only Megatron's groups are made anew."""
    sft = warm_up(root)
    results: dict[str, Any] = {}

    def run(name: str, folder: str, method: dict[str, Any], sections: dict[str, Any], **options: Any) -> None:
        results[name] = train(settings(root, out / folder, method, **sections), **options)
        _leave_groups()

    run("whole", "whole", SFT, {"sft": sft})
    run("stopped in the warm-up", "parts", SFT, {"sft": sft}, stop_in=("sft", 1))
    run("killed", "parts", SFT, {"sft": sft}, kill_in_step=4)
    if os.environ["RANK"] == "0":
        shutil.copytree(out / "parts", out / "moved")
    torch.distributed.barrier()
    run("resumed", "parts", SFT, {"sft": sft})
    rows = {"train_files": sft["train_files"], "train_batch_size": 4, "shuffle": False}
    run("alone", "alone", SFT, {"data": rows, "trainer": {"total_epochs": None, "total_training_steps": 3}})
    run("dpo", "dpo", DPO, {"guards": {"grad_norm": {"high": 1e-6}, "max_dumps": 1}})
    return results


@ranks()
def tp2(root: Path, out: Path) -> dict[str, Any]:
    """The killed run goes on with tensor parallelism; and the pairs from their beginning."""
    sft = warm_up(root)
    results = {"moved": train(settings(root, out / "moved", SFT, tp=2, sft=sft))}
    _leave_groups()
    return {**results, "dpo": train(settings(root, out / "dpo_tp2", DPO, tp=2))}


def _leave_groups() -> None:
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()


# -- Tests -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The arithmetic task, with held-out rows of very different lengths."""
    root = make_workspace(tmp_path_factory.mktemp("supervised"))
    rows = [json.loads(line) for line in (root / "data/written.jsonl").read_text().splitlines()]
    for row in rows[::3]:
        row["response"] = row["chosen"] = "7"
    (root / "held_out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:7]))
    (root / "data/train.sft.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:9]))
    return root


@pytest.fixture(scope="module")
def runs(root: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """(output folders, results of rank 0 by run); those of `tp2` are under "tp2"."""
    out = tmp_path_factory.mktemp("runs")
    results = dp2(2, root=root, out=out)[0]
    return out, {**results, "tp2": tp2(2, root=root, out=out)[0]}


def column(folder: Path, name: str) -> dict[int, float]:
    return {row["step"]: row[name] for row in rows_without(folder) if name in row}


def test_stopped_and_killed_is_as_if_never_stopped(runs: Any) -> None:
    """Stopped in the warm-up's second step of three; killed after the fifth of six steps."""
    out, results = runs
    assert run_printed(results["stopped in the warm-up"]["text"], out) == ["train"]
    names = ("whole", "stopped in the warm-up", "killed", "resumed")
    assert [results[name]["ended"] for name in names] == ["done", "75", "killed", "done"]
    for name, tensor in results["whole"]["weights"].items():
        assert torch.equal(tensor, results["resumed"]["weights"][name]), name
    assert rows_without(out / "parts") == rows_without(out / "whole")
    assert rows_without(out / "parts/sft") == rows_without(out / "whole/sft")
    assert (out / "whole/sft/report.html").exists()
    assert [row["step"] for row in rows_without(out / "whole/sft")] == [0, 1, 2]
    assert [row["training/epoch"] for row in rows_without(out / "whole")[:6]] == pytest.approx(
        [n * 5 / 16 for n in range(1, 7)]
    )


def test_the_warm_up_is_a_run_from_a_file(runs: Any) -> None:
    """The section `sft`, and `algorithm.source=file` without shuffling: the same losses and weights."""
    out, results = runs
    assert column(out / "alone", "actor/pg_loss") == column(out / "whole/sft", "actor/pg_loss")
    warmed_up = load_file(out / "whole/warmup/model.safetensors")
    assert all(torch.equal(tensor, results["alone"]["weights"][name]) for name, tensor in warmed_up.items())


def test_the_validation_loss_is_the_token_mean_of_transformers(root: Path, runs: Any) -> None:
    """Before the first step: of the model after the warm-up. Over all tokens, which a mean over ranks or rows would miss."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    out, _ = runs
    model = AutoModelForCausalLM.from_pretrained(out / "whole/warmup", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(out / "whole/warmup")
    losses: list[torch.Tensor] = []
    for line in (root / "held_out.jsonl").read_text().splitlines():
        row = json.loads(line)
        prompt, response = (
            tokenizer(row[name], add_special_tokens=False)["input_ids"] for name in ("prompt", "response")
        )
        ids = torch.tensor([*prompt, *response, tokenizer.eos_token_id])
        with torch.no_grad():
            logprobs = model(ids[None]).logits[0, :-1].double().log_softmax(-1)
        losses.append(-logprobs.gather(1, ids[1:, None])[len(prompt) - 1 :, 0])
    measured = column(out / "whole", "val/loss/held_out")
    assert list(measured) == [0, 3, 6]
    assert measured[0] == pytest.approx(torch.cat(losses).mean().item(), abs=2e-6)
    assert measured[0] != pytest.approx(torch.stack([loss.mean() for loss in losses]).mean().item(), abs=1e-2)
    assert measured[6] < measured[3] < measured[0]


def test_another_layout_gives_the_same_numbers(runs: Any) -> None:
    """Pairs from the beginning; responses after a kill in the fifth step, from the checkpoint of two replicas."""
    out, results = runs
    for one, other in (("dpo", "dpo_tp2"), ("whole", "moved")):
        rows = list(zip(rows_without(out / one), rows_without(out / other), strict=True))
        assert len(rows) == 7
        for a, b in rows:
            for key in (k for k in a.keys() | b.keys() if k.startswith("val/") or k == "actor/pg_loss"):
                assert a[key] == pytest.approx(b[key], abs=5e-6), key
    for name, tensor in results["whole"]["weights"].items():
        torch.testing.assert_close(tensor, results["tp2"]["moved"]["weights"][name], atol=2e-5, rtol=0)


def test_pairs_have_accuracy_and_margin(runs: Any) -> None:
    """At first the policy is the reference: loss log 2, margin 0, nothing preferred. Then it learns."""
    out, _ = runs
    folder = out / "dpo"
    loss, margin = column(folder, "val/loss/held_out"), column(folder, "val/dpo_margin/held_out")
    assert loss[0] == pytest.approx(math.log(2), abs=1e-6) and margin[0] == pytest.approx(0, abs=1e-5)
    assert loss[6] < loss[0] and margin[6] > 0 and column(folder, "val/dpo_accuracy/held_out")[6] > 0.5


def test_a_dump_of_a_supervised_run_replays(runs: Any) -> None:
    out, _ = runs
    dumps = sorted((out / "dpo/dumps").iterdir())
    [[(code, text)]] = replayed(1, dumps=dumps)
    assert (code, [dump.name for dump in dumps]) == (0, ["step_000000_grad_norm"]), text


HIDE_VLLM = """
import sys

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "vllm":
            raise ImportError("vllm is hidden")

sys.meta_path.insert(0, Hidden())
"""


@pytest.mark.soak
def test_the_command_needs_no_vllm(root: Path, tmp_path: Path) -> None:
    """The launcher, the server that ranks are forked from, and the ranks. A second start finds nothing to do."""
    (tmp_path / "sitecustomize.py").write_text(HIDE_VLLM)
    out, method = tmp_path / "out", SFT
    trainer = {"total_epochs": 1, "save_freq": 9, "logger": ["console"]}
    raw = settings(root, out, method, trainer=trainer)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(raw))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "grpo_megatron", "train", str(tmp_path / "run.yaml")]
    for expected in (
        "checking, then starting 2 ranks: Megatron-Core;",
        "has all 3 steps; for more, raise trainer.total_epochs;",
    ):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0 and expected in done.stdout, done.stdout + done.stderr
        assert (out / "checkpoints/step_000003").is_dir()
