"""CHORD in a run: one update of two ranks has the loss and the norm of a float64 computation by transformers.

loss = -0.9 sum over samples of w A log p - 0.1 / N sum over the expert's N tokens of p (1 - p) log p, p (1 - p) constant,
w = 1 / (all sampled tokens) and A = r - mean of the group.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_megatron.checks.validate import validate
from grpo_megatron.config import Config
from grpo_megatron.trainer import Trainer
from tests import worlds
from tests.e2e import run_ranks
from tests.stored import metric_rows
from tests.training.test_guards import replayed


def plain_samples(raw: dict[str, Any]) -> list[Any]:
    """Trains; this rank's samples of the only step, as (prompt, its tokens, the response's, reward)."""
    config = Config.model_validate(raw)
    trainer = Trainer(config, validate(config, int(os.environ["WORLD_SIZE"])))
    collect, samples = trainer.collect, list[Any]()

    def recorded(step: int) -> Any:
        drawn = collect(step)
        samples.extend((s.prompt_index, list(s.prompt.prompt_ids), s.response_ids, s.reward) for s in drawn)
        return drawn

    trainer.collect = recorded  # type: ignore[method-assign]
    trainer.run()
    return samples


def test_an_update_is_that_of_a_float64_computation(workspace: Path, tmp_path: Path) -> None:
    raw = run_ranks.settings(
        workspace,
        tmp_path / "run",
        2,
        sft={"train_files": [str(workspace / "data/sft.jsonl")]},
        algorithm={"chord": {"batch_size": 5}, "norm_adv_by_std_in_grpo": False},
        actor={"use_kl_loss": False, "ppo_mini_batch_size": None, "ppo_epochs": 1},
        rollout={"engine": "transformers", "engine_options": {}},
    )
    raw["method"] = "chord_phi"
    raw["data"] |= {"max_response_length": 40, "shuffle": False}
    raw["trainer"]["total_training_steps"] = 1
    raw["guards"] = {"grad_norm": {"high": 1e-9}}  # warns, and dumps the update
    results = worlds.run(plain_samples, 2, raw=raw)
    model = AutoModelForCausalLM.from_pretrained(raw["model"]["path"], dtype=torch.float64)

    def logprobs(prompt: list[int], response: list[int]) -> torch.Tensor:
        logits = model(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1]
        return logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0]

    samples = [sample for rank in results for sample in rank]
    rewards = {i: [reward for prompt, *_, reward in samples if prompt == i] for i in range(6)}
    num_tokens, loss = sum(len(response) for _, _, response, _ in samples), torch.zeros((), dtype=torch.float64)
    value = 0.0
    for number, prompt, response, reward in samples:
        weighted = 0.9 * (reward - sum(rewards[number]) / 3) / num_tokens
        loss -= weighted * logprobs(prompt, response).sum()
        value -= weighted * len(response)  # the ratio is 1
    tokenizer = AutoTokenizer.from_pretrained(raw["model"]["path"])
    lines = (workspace / "data/sft.jsonl").read_text().splitlines()[:5]
    rows = [
        (tokenizer(row["prompt"]).input_ids, tokenizer(row["response"]).input_ids) for row in map(json.loads, lines)
    ]
    experts = torch.cat([logprobs(prompt, [*response, tokenizer.eos_token_id]) for prompt, response in rows])
    phi = experts.detach().exp() * (1 - experts.detach().exp())
    expert = -0.1 * (phi * experts).mean()
    (loss + expert).backward()
    norm = math.sqrt(sum(one.grad.square().sum().item() for one in model.parameters()))
    [row] = metric_rows(tmp_path / "run")
    assert row["actor/expert_loss"] == pytest.approx(expert.item(), rel=1e-5) and row["actor/chord_mu"] == 0.1
    assert row["actor/grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert row["actor/pg_loss"] == pytest.approx(value, rel=1e-4)
    [(code, text)] = replayed(1, dumps=[tmp_path / "run/dumps/step_000000_grad_norm"])[0]
    assert code == 0 and "actor/expert_loss" in text, text
    assert len(samples) == 18 and row["critic/unscorable_ratio"] == 0.0
