"""Guards: what fires, the same on all ranks; a skipped step changes no bit; and a dump replays to the loss of the run.

The faults are seeded into real updates of a tiny model on two ranks: a gradient that is NaN on one rank only, a NaN
log-probability, an infinite reward, a gradient norm beyond its band. The logged loss is composed of what a step logs:
pg_loss + 0.1 * kl_loss - 0.05 * entropy_loss.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from grpo_megatron.config import ConfigError
from grpo_megatron.training.dump import mini_batch_tensors, read_dump
from tests import tiny
from tests.models import policies
from tests.models.policies import LAYOUTS
from tests.printed import printed_commands
from tests.worlds import ranks

pytestmark = pytest.mark.slow


# -- The programs of the ranks -----------------------------------------------------------------------------------------

ACTOR = {"kl_loss_coef": 0.1, "entropy_coeff": 0.05, "optim": {"lr": 1e-3}}


def config_of(folder: Path, out: Path, **guards: Any) -> Any:
    from grpo_megatron.config import Config

    return Config.model_validate(
        {
            "model": {"path": folder, "dtype": "float32"},
            "actor": {**ACTOR, "max_skipped_steps": 100},
            "guards": {"max_dumps": 100, **guards},
            "trainer": {"output_dir": out},
        }
    )


class Run:
    """One policy in a layout, and a batch of six rows with one mini-batch."""

    def __init__(self, folder: Path, out: Path, layout: policies.Layout) -> None:
        from grpo_megatron.training.correction import build_loss

        self.folder, self.out = folder, out
        self.config = config_of(folder, out)
        self.policy = policies.build(folder, layout, **ACTOR, max_skipped_steps=100)
        self.mesh, self.loss = self.policy.mesh, build_loss(self.config.actor)
        self.forward_backward = self.policy.forward_backward

    def batch(self) -> Any:
        rows = policies.share(6, self.mesh.dp_rank, self.mesh.dp)
        micros = [[i] for i in range(len(rows))]
        batch = tiny.make_batch(tiny.make_sequences(6), [micros], rows, masked=True)
        batch.rows = rows
        return batch

    def save_weights(self, target: Path) -> None:
        from grpo_megatron.models.weights.hf_folder import save_hf

        save_hf(self.policy.hf_weights(1), self.folder, self.folder, target, self.mesh)

    def state(self) -> list[torch.Tensor]:
        """Weights, Adam's state and the schedule of this rank."""
        optimizer = self.policy.optimizer
        parts = getattr(optimizer, "chained_optimizers", [optimizer])
        tensors = [parameter.detach().clone() for parameter in self.policy.ddp.parameters()]
        for part in parts:
            for group in part.optimizer.param_groups:
                tensors += [parameter.detach().clone() for parameter in group["params"]]
            for state in part.optimizer.state.values():
                tensors += [torch.as_tensor(value).clone() for _, value in sorted(state.items())]
        return [*tensors, torch.tensor(self.policy.lr_scheduler.num_steps)]

    def update(self, step: int, reward: float = 1.0, batch: Any = None, **guards: Any) -> dict[str, Any]:
        """One update under guards of these actions. Returns what it did and what a step would log."""
        from grpo_megatron.report.metrics import Metrics
        from grpo_megatron.report.step import record_update
        from grpo_megatron.training.guards import Guards, GuardStop
        from grpo_megatron.types import GroupTable

        guard = Guards(config_of(self.folder, self.out, **guards), self.mesh, self.save_weights, contextlib.nullcontext)
        guard.begin(step, GroupTable([0, 0], [0, 1], [0.0, reward], [1, 1], [4, 8], [False] * 2, [0, 0]))
        before, metrics = self.state(), Metrics()
        try:
            sums, constants = self.policy.update(batch or self.batch(), self.loss, guard=guard)
            record_update(metrics, sums, constants, self.mesh.is_replica_reporter)
            stopped = ""
        except GuardStop as error:
            stopped = str(error)
        guard.record(metrics, self.policy.has_finite_weights())
        logged = metrics.reduce(self.mesh.all_gather)
        after = self.state()
        return {
            "unchanged": all(map(torch.equal, before, after)),
            "stopped": stopped,
            "fired": {name[7:]: value for name, value in logged.items() if name.startswith("guards/") and value},
            "logged": logged,
        }


@ranks()
def faults(folder: Path, out: Path, layout: policies.Layout) -> dict[str, dict[str, Any]]:
    """Fault -> what the update did. Each has its own step number, from which its dump is named."""
    run = Run(folder, out, layout)
    last = run.mesh.world_size - 1
    results = {"healthy": run.update(0)}
    norm = results["healthy"]["logged"]["actor/grad_norm"]

    def spoiled(*arguments: Any) -> Any:
        loss_pass = run.forward_backward(*arguments)
        if run.mesh.rank == last:
            for buffer in run.policy.ddp.buffers:
                buffer.grad_data.fill_(torch.nan)
        return loss_pass

    run.policy.forward_backward = spoiled
    results["gradient"] = run.update(1)
    run.policy.forward_backward = run.forward_backward

    batch = run.batch()
    if run.mesh.dp_rank == run.mesh.dp - 1:
        batch.old_logprobs[0][batch.loss_mask[0].nonzero()[0]] = torch.nan
    results["logprob"] = run.update(2, batch=batch)
    results["logprob, stop"] = run.update(3, batch=batch, logprobs="stop")
    results["reward"] = run.update(4, reward=float("inf"))
    results["norm, warn"] = run.update(5, grad_norm={"high": norm / 100})
    results["norm, skip"] = run.update(6, grad_norm={"high": norm / 100, "action": "skip"})
    wide, narrow = {"low": 0.0, "high": 100.0, "action": "stop"}, {"high": 1e-6, "action": "skip"}
    bands = ("entropy", "kl", "response_length", "rollout_gap")
    results["in all bands"] = run.update(7, **dict.fromkeys((*bands, "grad_norm"), wide))
    results["out of all bands"] = run.update(8, **dict.fromkeys(bands, narrow))
    return results


@ranks()
def replayed(dumps: list[Path]) -> list[tuple[int, str]]:
    """Exit code and output of `replay` for each dump."""
    from grpo_megatron.cli.main import main

    results = []
    for dump in dumps:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            code = main(["replay", str(dump)])
        results.append((code, out.getvalue()))
    return results


# -- Tests -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_model(tmp_path_factory.mktemp("guards") / "model", "qwen2-tied", num_hidden_layers=2)


@pytest.fixture(scope="module", params=["DP2", pytest.param("TP2", marks=pytest.mark.soak)])
def run(request: pytest.FixtureRequest, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(output folder, the results of all ranks)."""
    out = tmp_path_factory.mktemp(request.param)
    return out, faults(2, folder=folder, out=out, layout=LAYOUTS[request.param])


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
            assert stopped.startswith(text)
            [command] = printed_commands(stopped)  # the next test runs it for each dump
            assert command == ["python", "-m", "grpo_megatron", "replay", f"{out}/dumps/{dump}"]
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
    [results] = replayed(1, dumps=dumps)
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
    [[(code, text)]] = replayed(1, dumps=[tmp_path])
    assert code == 1 and "the loss is another one (tolerance 1e-06)" in text
    with pytest.raises(ConfigError, match="cannot read the dump .*: No such file"):
        read_dump(out)
