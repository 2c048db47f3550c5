"""Partial rollouts of trajectories in real runs (engine transformers): the gradient, a kill, layouts, two roles."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from grpo_megatron.checks.validate import validate
from grpo_megatron.config import Config
from grpo_megatron.trainer import Trainer
from tests import worlds
from tests.e2e import run_ranks
from tests.e2e.test_determinism import assert_same
from tests.e2e.test_trajectories import REWRITING, TEMPLATE, generated_logprobs, oracle, settings
from tests.models import policies
from tests.stored import metric_rows


def config(root: Path, output: Path, world: int, **sections: dict[str, Any]) -> dict[str, Any]:
    raw = settings(root, output, world, "Long", multi_turn={"max_assistant_turns": 6}, **sections)
    raw["reward"] = {}
    raw["data"] |= {"train_batch_size": 4, "max_response_length": 60}
    raw["rollout"] |= {"engine": "transformers", "engine_options": {}, "stop_token_ids": [*range(20, 60)]}
    raw["rollout"]["partial"] = {"over_sample": 1.5, "max_staleness": 2}
    return raw


def watched(raws: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each step: its samples, the weights that it began with, and its gradient, by Hugging Face's names."""

    def one(raw: dict[str, Any]) -> dict[str, Any]:
        trainer = Trainer(parsed := Config.model_validate(raw), validate(parsed, int(os.environ["WORLD_SIZE"])))
        run: Any = trainer.parts
        seen: dict[str, Any] = {"samples": [], "weights": [], "gradients": []}
        collect, run.close = trainer.collect, lambda: None

        def keep(norm: float, sums: Any) -> None:
            seen["gradients"].append(
                policies.whole(run.policy, {n: g.clone() for n, g in run.policy.gradients().items()})
            )

        def recorded(step: int) -> Any:
            seen["weights"].append({n: t.clone() for bucket in run.policy.hf_weights(1) for n, t in bucket})
            seen["samples"].append(samples := collect(step))
            return samples

        run.policy.on_gradients, trainer.collect = keep, recorded  # type: ignore[method-assign]
        trainer.run()
        return seen

    return run_ranks.train_many(raws, one)


def test_a_row_of_two_versions_has_the_gradient_of_a_float64_computation(workspace: Path, tmp_path: Path) -> None:
    """Each token was sampled by the weights of its turn's version, mu, and its ratio is p / mu, at most 2 (rollout_is=token):

    gradient = -sum w min(p / mu, 2) A d log p, over the tokens of the model; here by transformers in float64.
    """
    raw = config(workspace, tmp_path / "run", 1)
    raw["actor"] = {"use_kl_loss": False, "loss_agg_mode": "seq-mean-token-mean", "optim": {"lr": 2e-2}}
    raw["algorithm"] = {"rollout_correction": {"rollout_is": "token", "rollout_is_threshold": 2.0}}
    raw["trainer"]["total_training_steps"] = 4
    [[seen]] = worlds.run(watched, 1, raws=[raw])
    models = []
    for weights in seen["weights"]:
        models.append(AutoModelForCausalLM.from_pretrained(raw["model"]["path"], dtype=torch.float64))
        models[-1].load_state_dict({name: tensor.double() for name, tensor in weights.items()}, strict=False)
    num_mixed, ratios = 0, []
    for step, (samples, gradient) in enumerate(zip(seen["samples"], seen["gradients"], strict=True)):
        model = models[step]
        model.zero_grad()
        advantages, weights = oracle({(s.prompt_index, s.index): [s] for s in samples}, "grpo")
        loss = torch.zeros((), dtype=torch.float64)
        for sample in samples:
            turns = [turn for turn in sample.turns if turn.kind == "assistant"]
            versions = [turn.version for turn in turns for _ in range(turn.start, turn.end)]
            num_mixed += len(set(versions)) > 1
            with torch.no_grad():
                by_version = {version: generated_logprobs(models[version], sample) for version in {*versions}}
            mu = torch.stack([by_version[version][i] for i, version in enumerate(versions)])
            recorded = [p for p, is_in in zip(sample.rollout_logprobs, sample.loss_mask, strict=True) if is_in]
            torch.testing.assert_close(torch.tensor(recorded, dtype=torch.float64), mu, rtol=0, atol=1e-4)
            logprobs, key = generated_logprobs(model, sample), (sample.prompt_index, sample.index)
            ratio = (logprobs.detach() - mu).exp().clamp(max=2.0)
            ratios += ratio.tolist()
            loss -= weights[key] * (ratio * advantages[key] * (logprobs - logprobs.detach()).exp()).sum()
        loss.backward()
        policies.close(gradient, {name: one.grad.float() for name, one in model.named_parameters()}, 1e-3)
    assert num_mixed >= 2 and max(ratios) > 1.05 and min(ratios) < 0.95
    rows = metric_rows(tmp_path / "run")
    assert (
        max(row["rollout/partial/waiting_responses"] for row in rows) > 0 == rows[-1]["rollout/partial/waiting_groups"]
    )


def without_logprobs(drawn: dict[int, list[Any]]) -> dict[int, list[Any]]:
    return {step: [(*content, reward) for *content, _, reward in samples] for step, samples in drawn.items()}


def test_tensor_parallelism_and_histories(workspace: Path, tmp_path: Path) -> None:
    """Two engines, and one of two ranks, give the same samples. So does a run of the latter that is resumed at step 1.

    `own`: with a template that changes earlier turns, so a resumed run also renders what the stored turns were asked with.
    """
    raws = []
    for history, template in (("own", REWRITING), ("keep_thinking", TEMPLATE)):
        for name, tensor in (("engines", 1), ("ranks", 2), ("resumed", 2)):
            trainer = {"total_training_steps": 3, "save_freq": 1}
            raw = config(workspace, tmp_path / f"{name} {history}", 2, trainer=trainer)
            raw["data"]["chat_template"] = str(tmp_path / history)
            (tmp_path / history).write_text(template)
            raw["rollout"]["multi_turn"]["history"] = history
            raw["actor"] = {"optim": {"lr": 0.0}, "megatron": {"tensor_model_parallel_size": tensor}}
            raws.append({**raw, "resumed": 1} if name == "resumed" else raw)
    results = worlds.run(run_ranks.train_and_resume, 2, raws=raws)
    for number, history in enumerate(("own", "keep_thinking")):
        sampled = [run_ranks.all_samples([rank[3 * number + k] for rank in results]) for k in range(3)]
        engines, ranks, resumed = map(without_logprobs, sampled)
        assert engines == ranks and resumed == {step: ranks[step] for step in (1, 2)}, history
        first, second, _ = metric_rows(tmp_path / f"ranks {history}")
        assert first["rollout/partial/waiting_responses"] > 0  # in the checkpoint
        assert (second["trajectory/sequences/mean"] > 1) == (history == "own")


@pytest.mark.soak
def test_a_kill_changes_nothing_and_neither_does_the_layout(workspace: Path, tmp_path: Path) -> None:
    """Two ranks, an engine each; environments that take a random time. Then one rank, without learning."""

    def run(name: str, world: int, lr: float, **arguments: Any) -> list[dict[str, Any]]:
        trainer = {"total_training_steps": 5, "save_freq": 1}
        raw = config(workspace, tmp_path / name, world, trainer=trainer)
        raw["rollout"]["multi_turn"]["kwargs"] = {"delay_s": 0.02}
        raw["actor"] = {"optim": {"lr": lr}}
        return worlds.run(run_ranks.train, world, raw=raw, **arguments)

    whole = run("whole", 2, 2e-3)
    with pytest.raises(AssertionError, match="died with exit code 9"):
        run("killed", 2, 2e-3, kill_in_step=2)
    resumed = run("killed", 2, 2e-3)
    assert [result["first_step"] for result in resumed] == [2, 2]
    after = {step: samples for step, samples in run_ranks.all_samples(whole).items() if step >= 2}
    assert without_logprobs(after) == without_logprobs(run_ranks.all_samples(resumed))
    for name, tensor in whole[0]["weights"].items():  # stored groups are dealt to the engines anew
        torch.testing.assert_close(tensor, resumed[0]["weights"][name], rtol=1e-3, atol=2e-5)
    assert any(row["rollout/partial/waiting_responses"] for row in metric_rows(tmp_path / "whole"))
    drawn = [run_ranks.all_samples(run(f"still {world}", world, 0.0)) for world in (1, 2)]
    assert drawn[0] == drawn[1]


@pytest.mark.soak
def test_two_roles_sample_the_same_trajectories(workspace: Path, tmp_path: Path) -> None:
    """Without a lag: one rank that trains and one that samples, beside one rank that does both."""
    raws = [config(workspace, tmp_path / name, world) for name, world in (("one", 1), ("roles", 2))]
    raws[1]["rollout"] |= {"placement": "separate", "num_ranks": 1}
    for raw in raws:
        raw["trainer"]["total_training_steps"] = 4
    alone = worlds.run(run_ranks.train, 1, raw=raws[0])
    first, _ = worlds.run(run_ranks.train_in_roles, 2, raw=raws[1])
    assert first["samples"] == alone[0]["samples"]
    assert_same(alone[0], first)
    assert any(row["rollout/partial/waiting_responses"] for row in metric_rows(tmp_path / "one"))
