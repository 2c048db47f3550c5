"""Guards: what fires, the same on all ranks; a skipped step changes no bit; and a dump replays to the loss of the run.

The faults are seeded into real updates of a tiny model on two ranks: a gradient that is NaN on one rank only, a NaN
log-probability, an infinite reward, a gradient norm beyond its band. The logged loss is composed of what a step logs:
pg_loss + 0.1 * kl_loss - 0.05 * entropy_loss.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from grpo_megatron.config import ConfigError
from grpo_megatron.training.dump import mini_batch_tensors
from grpo_megatron.training.replay import read_dump
from tests import tiny, worlds
from tests.models.policies import LAYOUTS
from tests.training import guard_ranks

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_model(tmp_path_factory.mktemp("guards") / "model", "qwen2-tied", num_hidden_layers=2)


@pytest.fixture(scope="module", params=["DP2", "TP2"])
def run(request: pytest.FixtureRequest, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(output folder, the results of all ranks)."""
    out = tmp_path_factory.mktemp(request.param)
    return out, worlds.run(guard_ranks.faults, 2, folder=folder, out=out, layout=LAYOUTS[request.param])


EXPECTED: dict[str, tuple[bool, set[str]]] = {  # fault -> (is the step made, the guards that fire)
    "healthy": (True, set()),
    "gradient": (False, {"gradients"}),
    "logprob": (False, {"logprobs"}),  # the clamp of the ratio gives its token a gradient of 0, not NaN
    "logprob, stop": (False, {"logprobs"}),
    "reward": (False, {"rewards"}),
    "norm, warn": (True, {"grad_norm"}),
    "norm, skip": (False, {"grad_norm"}),
    "in all bands": (True, set()),
    "out of all bands": (False, {"entropy", "kl", "response_length", "rollout_gap"}),
}


def test_what_fires_and_whether_the_step_is_made(run: Any) -> None:
    """A step that is not made leaves weights, Adam's state and the schedule as they are, bit for bit."""
    _, results = run
    for fault, (is_made, fired) in EXPECTED.items():
        for result in results:
            assert result[fault]["unchanged"] == (not is_made), fault
            assert result[fault]["fired"] == dict.fromkeys(fired, 1.0), fault
            assert math.isfinite(result[fault]["logged"].get("actor/grad_norm", 0.0))


def test_stop_ends_all_ranks_with_one_message(run: Any) -> None:
    out, results = run
    is_dp = out.name.startswith("DP2")
    for result in results:
        for fault, text, dump in (
            (
                "reward",
                "guards.rewards=stop: step 4, update 1: 1 rewards of the step are infinite",
                "step_000004_rewards",
            ),
            ("logprob, stop", "guards.logprobs=stop: step 3, update 1: ", "step_000003_logprobs"),
        ):
            stopped = result[fault]["stopped"]
            assert stopped.startswith(text) and f"`python -m grpo_megatron replay {out}/dumps/{dump}`" in stopped
        assert f"not finite on {'rank 1' if is_dp else 'all ranks'}\n" in result["logprob, stop"]["stopped"]
    assert [fault for fault in EXPECTED if results[0][fault]["stopped"]] == ["logprob, stop", "reward"]


def test_a_dump_replays_to_the_logged_loss(run: Any) -> None:
    out, (first, _) = run
    dumps = sorted((out / "dumps").iterdir())
    assert [dump.name for dump in dumps] == [
        "step_000001_gradients",
        "step_000002_logprobs",
        "step_000003_logprobs",
        "step_000004_rewards",
        "step_000005_grad_norm",
        "step_000006_grad_norm",
        "step_000008_entropy",
    ]
    [results] = worlds.run(guard_ranks.replayed, 1, dumps=dumps)
    tables: dict[str, dict[str, list[str]]] = {}
    for (code, text), dump in zip(results, dumps, strict=True):
        assert code == 0, text
        rows = {line.split()[0]: line.split()[1:] for line in text.splitlines() if len(line.split()) == 4}
        tables[dump.name] = rows
        recorded, again, _ = map(float, rows["loss"])
        if "logprobs" in dump.name:
            assert math.isnan(recorded) and math.isnan(again)
        else:
            assert math.isfinite(recorded)
    for step, fault in ((1, "gradient"), (5, "norm, warn"), (6, "norm, skip")):
        logged = first[fault]["logged"]
        loss = logged["actor/pg_loss"] + 0.1 * logged["actor/kl_loss"] - 0.05 * logged["actor/entropy_loss"]
        rows = tables[f"step_{step:06d}_{'gradients' if step == 1 else 'grad_norm'}"]
        recorded, again, _ = map(float, rows["loss"])
        assert recorded == pytest.approx(loss, abs=1e-7) and again == pytest.approx(loss, abs=1e-6)
        recorded_norm, norm, _ = map(float, rows["grad_norm"])
        assert math.isfinite(norm) and (
            math.isnan(recorded_norm) if step == 1 else norm == pytest.approx(recorded_norm, rel=1e-4)
        )


@pytest.mark.parametrize("run", ["DP2"], indirect=True)
def test_ranks_without_routes_have_unknown_ones(run: Any, tmp_path: Path) -> None:
    """Routes are in the file of a rank that has rows with routes; the other rank's rows, or no rows at all, have none."""
    out, _ = run
    for file in (out / "dumps" / "step_000005_grad_norm").iterdir():
        (tmp_path / file.name).symlink_to(file)
    last = tmp_path / "batch_00001.safetensors"
    tensors = load_file(last)
    routes = torch.randint(8, (len(tensors["tokens"]), 4), dtype=torch.int8)
    last.unlink()
    save_file({**tensors, "routes": routes}, last)
    batch = read_dump(tmp_path).batch
    assert batch.routes is not None and list(map(len, batch.routes)) == list(map(len, batch.tokens))
    num_known = len(tensors["lengths"])
    assert torch.equal(torch.cat(batch.routes[-num_known:]), routes)
    assert all(bool((own == -1).all()) for own in batch.routes[:-num_known])
    assert "routes" in mini_batch_tensors(batch, [[0]]) and "routes" not in mini_batch_tensors(batch, [])


@pytest.mark.parametrize("run", ["DP2"], indirect=True)
def test_the_command_says_when_the_loss_is_another_one(run: Any, tmp_path: Path) -> None:
    """A dump whose config was changed: the coefficient of the KL."""
    out, _ = run
    for file in (out / "dumps" / "step_000005_grad_norm").iterdir():
        (tmp_path / file.name).symlink_to(file)
    content = json.loads((tmp_path / "dump.json").read_text())
    content["config"]["actor"]["kl_loss_coef"] = 0.2
    (tmp_path / "dump.json").unlink()
    (tmp_path / "dump.json").write_text(json.dumps(content))
    command = [sys.executable, "-m", "grpo_megatron", "replay", str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert result.returncode == 1, result.stderr
    assert "the loss is another one (tolerance 1e-06)" in result.stdout
    with pytest.raises(ConfigError, match="is not a dump that a guard has written: FileNotFoundError"):
        read_dump(out)
