"""Trajectories with the real engine: the same in every layout, whenever tools answer, after a kill, cached or not.

The policy has random weights, so its turns end at a digit (`stop_token_ids`) or at the end-of-sequence token.
"""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from grpo_megatron.checks.validate import validate
from grpo_megatron.config import Config
from grpo_megatron.sampling.multi_turn import FAILURES
from grpo_megatron.trainer import Trainer
from grpo_megatron.types import BRANCH
from tests import worlds
from tests.e2e import run_ranks
from tests.e2e.test_determinism import assert_same, metrics
from tests.models import policies
from tests.stored import metric_rows
from tests.training.test_guards import replayed

TEMPLATE = "{% for m in messages %}{{ m.content }}{{ '<eos>' if m.role == 'assistant' else '<sep>' }}{% endfor %}"

# It writes a digit before an earlier turn of the model.
REWRITING = TEMPLATE.replace(
    "m.content }}", "'0' ~ m.content if m.role == 'assistant' and not loop.last else m.content }}"
)


def settings(root: Path, output_dir: Path, world: int, environment: str, **sections: dict[str, Any]) -> dict[str, Any]:
    from grpo_megatron.starting.generated import build_tokenizer

    template = root / "turns.jinja"
    template.write_text(sections.pop("template", TEMPLATE))  # type: ignore[arg-type]
    multi_turn = {
        "environment": f"tests.e2e.environments:{environment}",
        "max_tool_response_length": 8,
        "max_assistant_turns": 4,
        "latency_ticks": 3,
        **sections.pop("multi_turn", {}),
    }
    data = {"apply_chat_template": True, "chat_template": str(template), "max_prompt_length": 32}
    raw = run_ranks.settings(root, output_dir, world, **sections)
    raw["data"] |= {**data, "max_response_length": 28, "train_batch_size": 7} | sections.get("data", {})
    raw["actor"] |= {"ppo_mini_batch_size": None}
    raw["rollout"] |= {
        "stop_token_ids": build_tokenizer().convert_tokens_to_ids(list("01234567")),
        "multi_turn": multi_turn,
    }
    return raw


def test_trajectories_depend_neither_on_ranks_nor_on_delays_nor_on_the_cache(workspace: Path, tmp_path: Path) -> None:
    """7 x 3 trajectories, spread over 1 and 4 engines. Every call of a tool takes a random time, except on one rank.

    In each run engine and policy agree at every generated token; the second step is sampled after a sync.
    """
    drawn, observed = [], []
    for world, cache, delay in ((1, True, 0.0), (4, False, 0.1)):
        raw = settings(workspace, tmp_path / str(world), world, "Echo", multi_turn={"kwargs": {"delay_s": delay}})
        raw["rollout"]["enable_prefix_caching"] = cache
        raw["actor"] = {"optim": {"lr": 0.0}, "echo_coef": 0.1}  # the second step is comparable, too
        drawn.append(run_ranks.all_samples(worlds.run(run_ranks.train, world, raw=raw, keep_weights=False)))
        for row in metric_rows(tmp_path / str(world)):
            assert row["training/rollout_logp_diff_mean"] <= 1e-6
            assert row["training/rollout_logp_diff_max"] <= 1e-5
            assert row["trajectory/turns/mean"] > 1.2 and row["trajectory/observation_share"] > 0.1
            observed.append(row["actor/observation_loss"])
    assert observed == pytest.approx([0.1 * math.log(80)] * 4, rel=0.1)  # untrained: uniform over 80 tokens
    assert observed[:2] == pytest.approx(observed[2:], rel=1e-5)
    assert drawn[0] == drawn[1]
    assert [len(samples) for samples in drawn[0].values()] == [21, 21]
    assert drawn[0][0] != drawn[0][1]


@pytest.mark.parametrize("estimator", ["reinforce_plus_plus", pytest.param("gae", marks=pytest.mark.soak)])
def test_a_template_that_changes_earlier_turns(workspace: Path, tmp_path: Path, estimator: str) -> None:
    """Its trajectories are several rows, with rewards of turns: the same samples, and weights, on one rank and on four."""
    drawn, weights, norms = [], [], []
    for world in (1, 4):
        raw = settings(workspace, tmp_path / str(world), world, "Judge", template=REWRITING)  # type: ignore[arg-type]
        raw["algorithm"], raw["reward"] = {"adv_estimator": estimator}, {}
        raw["trainer"]["total_training_steps"] = 1
        raw["actor"]["share_prompts"] = world == 4 and estimator != "gae"
        if estimator == "gae":
            raw["critic"] = {"optim": {"lr": 1e-3}}
        results = worlds.run(run_ranks.train, world, raw=raw)
        drawn.append(without_rewards(run_ranks.all_samples(results)))
        weights.append(results[0]["weights"])
        [row] = metric_rows(tmp_path / str(world))
        norms.append(row["actor/grad_norm"])
        assert row["training/rollout_logp_diff_max"] <= 1e-5
        assert 1.2 < row["trajectory/sequences/mean"] <= row["trajectory/turns/mean"]
    assert drawn[0] == drawn[1] and norms[0] == pytest.approx(norms[1], rel=1e-4)
    for name, tensor in weights[0].items():
        torch.testing.assert_close(tensor, weights[1][name], rtol=1e-3, atol=2e-5)  # Adam's first steps


def one_update(raws: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each config: the leader's samples of the only step, and the gradient of the only update, by Hugging Face's names."""

    def one(raw: dict[str, Any]) -> dict[str, Any]:
        config = Config.model_validate(raw)
        trainer = Trainer(config, validate(config, int(os.environ["WORLD_SIZE"])))
        run: Any = trainer.parts
        seen: dict[str, Any] = {"samples": []}

        def keep(norm: float, sums: Any) -> None:
            seen["gradient"] = policies.whole(run.policy, {n: g.clone() for n, g in run.policy.gradients().items()})

        collect, run.close, run.policy.on_gradients = trainer.collect, lambda: None, keep

        def recorded(step: int) -> Any:
            samples = collect(step)
            seen["samples"] = samples if run.mesh.is_replica_leader else []
            return samples

        trainer.collect = recorded  # type: ignore[method-assign]
        trainer.run()
        return seen

    return run_ranks.train_many(raws, one)


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.soak), 2])
def test_a_step_over_several_rows_is_that_of_a_float64_computation(workspace: Path, tmp_path: Path, world: int) -> None:
    """One update, so that the ratio is 1: loss = -sum w A and gradient = -sum w A d log p, over the tokens of the model.

    Here from the samples' tokens and turns alone, by transformers in float64: a trajectory is its rows one after the other.
    GRPO: A = (r - mean) / (std + 1e-6) and w = 1 / (trajectories * n). REINFORCE++: whitened returns of turns, w = 1 / N.
    A dump of the update replays to its loss and norm.
    """
    raws = []
    for estimator, mode in (("grpo", "seq-mean-token-mean"), ("reinforce_plus_plus", "token-mean")):
        output = tmp_path / estimator
        raw = settings(workspace, output, world, "Judge", template=REWRITING)  # type: ignore[arg-type]
        raw["algorithm"], raw["reward"] = {"adv_estimator": estimator}, {}
        raw["actor"] = {"use_kl_loss": False, "loss_agg_mode": mode, "share_prompts": world == 2}
        raw["actor"]["megatron"] = {"tensor_model_parallel_size": world}
        raw["rollout"] |= {"engine": "transformers", "engine_options": {}}
        raw["trainer"]["total_training_steps"] = 1
        raw["guards"] = {"grad_norm": {"high": 1e-9}}  # warns, and dumps the update
        raws.append(raw)
    results = worlds.run(one_update, world, raws=raws)
    dumps = [Path(raw["trainer"]["output_dir"], "dumps", "step_000000_grad_norm") for raw in raws]
    for code, text in replayed(1, dumps=dumps)[0]:
        assert code == 0, text
        _, _, difference = next(map(float, line.split()[1:]) for line in text.splitlines() if "grad_norm  " in line)
        assert abs(difference) < 1e-4, text
    for number, raw in enumerate(raws):
        samples = [sample for rank in results for sample in rank[number]["samples"]]
        model = AutoModelForCausalLM.from_pretrained(raw["model"]["path"], dtype=torch.float64)
        trajectories: dict[tuple[int, int], list[Any]] = {}
        for sample in sorted(
            samples, key=lambda s: s.index if s.index >= BRANCH else 1 << 60
        ):  # the end is the last row
            trajectories.setdefault((sample.prompt_index, sample.index % BRANCH), []).append(sample)
        assert sum(map(len, trajectories.values())) > len(trajectories) == 21
        advantages, weights = oracle(trajectories, raw["algorithm"]["adv_estimator"])
        loss = torch.zeros((), dtype=torch.float64)
        for key, rows in trajectories.items():
            logprobs = torch.cat([generated_logprobs(model, row) for row in rows])
            loss -= weights[key] * (advantages[key] * (logprobs - logprobs.detach()).exp()).sum()
        loss.backward()
        [row] = metric_rows(Path(raw["trainer"]["output_dir"]))
        assert row["actor/pg_loss"] == pytest.approx(loss.item(), rel=1e-4, abs=1e-6)
        want = {name: one.grad.float() for name, one in model.named_parameters()}
        for rank in results:
            policies.close(rank[number]["gradient"], want, 1e-4)


def generated_logprobs(model: Any, row: Any) -> torch.Tensor:
    tokens = [*row.prompt.prompt_ids, *row.response_ids]
    logits = model(torch.tensor([tokens])).logits[0, len(row.prompt.prompt_ids) - 1 : -1]
    logprobs = logits.log_softmax(-1).gather(1, torch.tensor(row.response_ids)[:, None])[:, 0]
    return torch.cat([logprobs[t.start : t.end] for t in row.turns if t.kind == "assistant"])


def oracle(trajectories: dict[tuple[int, int], list[Any]], estimator: str) -> tuple[dict[Any, Any], dict[Any, float]]:
    """Advantages per generated token, and the weight of each token, of every trajectory."""
    earned: dict[Any, list[tuple[int, float]]] = {}  # of each turn: tokens, reward
    for key, rows in trajectories.items():
        turns = [(turn, dict(row.turn_rewards)) for row in rows for turn in row.turns if turn.kind == "assistant"]
        earned[key] = [(turn.end - turn.start, rewards.get(turn.end - 1, 0.0)) for turn, rewards in turns]
    counts = {key: sum(count for count, _ in turns) for key, turns in earned.items()}
    totals = {key: sum(reward for _, reward in turns) for key, turns in earned.items()}
    if estimator == "grpo":
        advantages = {}
        for key, total in totals.items():
            group = torch.tensor([totals[other] for other in totals if other[0] == key[0]], dtype=torch.float64)
            advantages[key] = ((total - group.mean()) / (group.std() + 1e-6)).expand(counts[key])
        return advantages, {key: 1 / (len(counts) * count) for key, count in counts.items()}
    returns = {
        key: torch.tensor([sum(r for _, r in turns[n:]) for n, (count, _) in enumerate(turns) for _ in range(count)])
        for key, turns in earned.items()
    }
    every = torch.cat(list(returns.values())).double()
    scale = (every.var() + 1e-8).sqrt()
    return {key: (one - every.mean()) / scale for key, one in returns.items()}, dict.fromkeys(counts, 1 / len(every))


def test_an_agent_of_openais_api_is_recorded_token_by_token(workspace: Path, tmp_path: Path) -> None:
    """6 x 3 trajectories of up to three turns on one engine, and on two: the same tokens, whichever answers."""
    drawn = []
    for world in (1, 2):
        command = {"command": [sys.executable, str(Path(__file__).with_name("agent.py"))]}
        raw = settings(workspace, tmp_path / str(world), world, "", data={"train_batch_size": 6})
        raw["rollout"]["multi_turn"] |= {"environment": "command", "kwargs": command}
        raw["rollout"]["n"], raw["reward"], raw["actor"]["optim"] = 3, {}, {"lr": 0.0}
        raw["trainer"]["total_training_steps"] = 1
        drawn.append(run_ranks.all_samples(worlds.run(run_ranks.train, world, raw=raw, keep_weights=False)))
        [row] = metric_rows(tmp_path / str(world))
        assert row["training/rollout_logp_diff_max"] <= 1e-5
        assert row["trajectory/turns/mean"] > 1.5 and 0 < row["trajectory/first/mean"] <= 3
        assert row["trajectory/eights/mean"] == 0 and not any(row.get(f"trajectory/status/{name}") for name in FAILURES)
    assert drawn[0] == drawn[1]


def without_rewards(drawn: dict[int, list[Any]], first: int = 0) -> list[Any]:
    """Only the leader of a block knows the rewards."""
    return [sample[:-1] for step, samples in drawn.items() for sample in samples if step >= first]


@pytest.mark.soak
def test_a_kill_in_the_middle_of_trajectories_changes_nothing(workspace: Path, tmp_path: Path) -> None:
    """Two ranks serve one engine, so every answer goes from one to the other. The environment gives rewards per turn, and
    fails now and then; groups that dynamic sampling leaves over, and those of the replay buffer, wait in the checkpoint with
    all rows of their trajectories."""

    def run(name: str, **arguments: Any) -> list[dict[str, Any]]:
        raw = settings(
            workspace,
            tmp_path / name,
            2,
            "Judge",
            template=REWRITING,  # type: ignore[arg-type]
            multi_turn={"kwargs": {"delay_s": 0.05, "is_fragile": True}, "failed": "mask"},
            algorithm={
                "adv_estimator": "reinforce_plus_plus",
                "filter_groups": {"enable": True},
                "replay": {"ratio": 0.34},
            },
            trainer={"total_training_steps": 4, "save_freq": 1},
            data={"train_batch_size": 3, "gen_batch_size": 5},
        )
        raw["rollout"]["tensor_model_parallel_size"] = 2
        raw["reward"] = {}
        return worlds.run(run_ranks.train, 2, raw=raw, **arguments)

    whole = run("whole")
    with pytest.raises(AssertionError, match="died with exit code 9"):
        run("killed", kill_in_step=2)
    resumed = run("killed")
    assert [result["first_step"] for result in resumed] == [2, 2]
    for a, b in zip(whole, resumed, strict=True):
        assert without_rewards(a["samples"], 2) == without_rewards(b["samples"], 2)
        assert_same(a, b)
    assert metrics(tmp_path / "whole") == metrics(tmp_path / "killed")
    expected = {step: whole[0]["samples"][step] for step in (2, 3)}
    assert repr(expected) == repr(
        resumed[0]["samples"]
    )  # as text: NaN, the reward of a failed one, is not equal to itself
    assert without_rewards(whole[0]["samples"]) == without_rewards(whole[1]["samples"])  # of one block
    reported = metric_rows(tmp_path / "whole")
    assert any(row["trajectory/status/raised"] > 0 for row in reported)
    assert any(row["train/left_over_staleness_max"] == 1 for row in reported)
    assert any(row["train/replayed_groups"] for row in reported) and reported[-1]["trajectory/sequences/mean"] > 1
