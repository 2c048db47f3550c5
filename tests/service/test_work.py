"""The ranks of a service: gradients beside transformers', models that share a policy, and their states on disk."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import AutoModelForCausalLM

from grpo_megatron.checks.validate import validate_service
from grpo_megatron.cli.config_file import load_config
from grpo_megatron.cli.serve_training import service_defaults
from grpo_megatron.service.losses import DEFAULTS
from grpo_megatron.service.wire import AdamSettings, LoraRequest, PassRequest, SampleJob
from grpo_megatron.service.work import Work
from tests.models.policies import named_gradients, whole
from tests.service.inputs import LORA, make_data, make_service
from tests.worlds import ranks

LAYOUTS = {
    "1": (1, []),
    "DP2": (2, []),
    "TP2": (2, ["actor.megatron.tensor_model_parallel_size=2"]),
    "PP2": (2, ["actor.megatron.pipeline_model_parallel_size=2"]),
}
ADAM = AdamSettings(learning_rate=0.02, weight_decay=0.1, grad_clip_norm=1.0)
JOB = SampleJob((5, 9, 12), (1, 2, 3), 12, 1.0, 1.0, -1, (), (), 2)


def build(config: Path, out: Path, overrides: list[str]) -> Work:
    """The work of this rank."""
    size = int(os.environ["WORLD_SIZE"])
    settings = [*overrides, f"trainer.n_gpus_per_node={size}", f"trainer.output_dir={out}"]
    read = load_config(config, settings, service_defaults)
    return Work(read, validate_service(read, size))


def request(model: str, data: Any, loss: str = "cross_entropy", forward_only: bool = False) -> PassRequest:
    return PassRequest(model, 1, data, loss, DEFAULTS[loss], forward_only)


@ranks()
def gradients(config: Path, overrides: list[str]) -> dict[str, Any]:
    """Loss -> gradients of two passes together, as whole Hugging Face tensors; log-probabilities and sums of the losses."""
    work = build(config, config.parent / "gradients", [*overrides, "actor.megatron.use_distributed_optimizer=false"])
    found: dict[str, Any] = {}
    for loss in DEFAULTS:
        work.create(loss, None)
        data = make_data(7, loss)
        forward = work.run_pass(request(loss, data, loss, forward_only=True))
        parts = [work.run_pass(request(loss, data[:4], loss)), work.run_pass(request(loss, data[4:], loss))]
        found[loss] = whole(work.policy, named_gradients(work.policy)), forward, parts
    return found


def by_hand(loss: str, logprobs: torch.Tensor, columns: dict[str, torch.Tensor]) -> torch.Tensor:
    """The sum of a loss over one datum, from the formulas of the protocol's documentation; token by token where it clips."""
    if loss == "cross_entropy":
        return -(columns["weights"] * logprobs).sum()
    total, old, advantages = torch.zeros((), dtype=torch.float64), columns["logprobs"], columns["advantages"]
    ratios = (logprobs - old).exp()
    if loss == "gspo":
        in_mean = columns["sequence_ratio_mask"] > 0
        mean = (logprobs - old)[in_mean].mean() if in_mean.any() else torch.zeros(())
        ratios = torch.stack([mean.detach().exp() * (one - one.detach()).exp() for one in logprobs])
    for ratio, logprob, before, advantage in zip(ratios, logprobs, old, advantages, strict=True):
        if loss == "importance_sampling":
            total = total - ratio * advantage
        elif loss == "cispo":
            total = total - min(float(ratio), 4.0) * advantage * logprob
        elif loss == "dro":
            total = total - logprob * advantage + 0.025 * (logprob - before) ** 2
        elif advantage > 0:
            total = total - (ratio if ratio < 1.2 else 1.2) * advantage
        else:
            total = total - (ratio if ratio > 0.8 else 0.8) * advantage
    return total


def by_transformers(folder: Path, loss: str) -> tuple[dict[str, torch.Tensor], list[torch.Tensor], float]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    total, logprobs = torch.zeros((), dtype=torch.float64), []
    for datum in make_data(7, loss):
        logits = model(torch.from_numpy(datum.tokens)[None]).logits[0]
        part = logits.log_softmax(-1).gather(1, torch.from_numpy(datum.targets)[:, None])[:, 0]
        columns = {name: torch.from_numpy(column).double() for name, column in datum.columns.items()}
        total = total + by_hand(loss, part, columns)
        logprobs.append(part.detach())
    total.backward()
    return {name: p.grad for name, p in model.named_parameters()}, logprobs, float(total.detach())  # type: ignore[misc]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_service(tmp_path_factory.mktemp("service"))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_equal_transformers(config: Path, layout: str) -> None:
    """In units of the largest entry of all gradients. Measured: at most 4e-7."""
    world, overrides = LAYOUTS[layout]
    results = gradients(world, config=config, overrides=overrides)
    for loss in DEFAULTS:
        wanted, logprobs, total = by_transformers(config.parent / "model", loss)
        largest = max(float(tensor.abs().max()) for tensor in wanted.values())
        got, forward, parts = results[0][loss]
        assert got.keys() == wanted.keys()
        for name, tensor in wanted.items():
            assert float((got[name] - tensor).abs().max()) <= 1e-6 * largest, (loss, name)
        for passed, size in ((forward[0], forward[1]), (parts[0][0] + parts[1][0], parts[0][1] + parts[1][1])):
            assert size == pytest.approx(total, rel=1e-5, abs=1e-5)
            for one, row in zip(passed, logprobs, strict=True):
                assert float((torch.from_numpy(one) - row).abs().max()) < 1e-5


Play = Callable[[Work, str, int], Any]


def play(work: Work, model: str, number: int) -> Any:
    """The `number`-th thing that a client does with its model."""
    data, folder = make_data(5, "cross_entropy", seed=len(model) + number), work.config.trainer.output_dir / model
    sampler = folder / f"sampler-{number // 6}"
    if number % 6 in (0, 1):
        return work.run_pass(request(model, data))
    if number % 6 == 2:
        return work.sample(sampler if number > 6 else None, [JOB]) if number != 8 else None
    if number % 6 == 3:
        norm = work.step(model, ADAM)  # and what was saved before it samples as before
        return norm, work.sample(folder / f"sampler-{number // 6}", [JOB]) if number > 6 else None
    if number % 6 == 4:
        return work.snapshot(model, folder / f"sampler-{number // 6 + 1}")
    return work.sample(folder / f"sampler-{number // 6 + 1}", [JOB, JOB])


def start(work: Work, model: str) -> None:
    lora = work.config.actor.lora.rank
    work.create(model, LoraRequest(rank=3 if model == "a" else 6, seed=len(model)) if lora else None)


@ranks()
def interleaved(config: Path, overrides: list[str]) -> list[Any]:
    """Each client alone; both in turns; one from its own checkpoint in the middle, in a new process' state."""
    results = []
    for number, order in enumerate((["a"], ["bb"], ["a", "bb"])):
        work = build(config, config.parent / f"run-{len(overrides)}-{number}", overrides)
        played: dict[str, list[Any]] = {model: [] for model in order}
        for model in order:
            start(work, model)
        for turn in range(18):
            for model in order:
                played[model].append(play(work, model, turn))
                if order == ["a"] and turn == 9:
                    work.save("a", config.parent / f"state-{len(overrides)}")
        results.append(played)
        if order == ["a"]:
            work.drop("a")
            lora = LoraRequest(rank=3, seed=7) if work.config.actor.lora.rank else None
            work.load("a", config.parent / f"state-{len(overrides)}", lora, optimizer=True)
            results.append([play(work, "a", turn) for turn in range(10, 18)])
        with mock.patch("torch.distributed.destroy_process_group"):
            work.close()
        from megatron.core.parallel_state import destroy_model_parallel

        destroy_model_parallel()
    return results


@pytest.mark.parametrize(
    ("world", "overrides"),
    [(1, LORA), (2, []), (2, [*LORA, *LAYOUTS["TP2"][1]]), (2, [*LAYOUTS["PP2"][1]])],
    ids=["LoRA", "DP2", "LoRA TP2", "PP2"],
)
def test_two_models_in_turns_are_two_alone_bit_for_bit(config: Path, world: int, overrides: list[str]) -> None:
    """Log-probabilities, losses, gradient norms, samples. And a checkpoint goes on as its model did."""
    alone_a, resumed, alone_b, both = interleaved(world, config=config, overrides=overrides)[0]
    assert repr(both["a"]) == repr(alone_a["a"])
    assert repr(both["bb"]) == repr(alone_b["bb"])
    assert repr(resumed) == repr(alone_a["a"][10:])
    assert repr(both["a"][9][1][0]) == repr(both["a"][5][0]) != repr(both["a"][11][0])
    losses = [both["a"][turn][1] for turn in (0, 6, 12)]
    assert len(set(losses)) == 3 and losses != [both["bb"][turn][1] for turn in (0, 6, 12)]
