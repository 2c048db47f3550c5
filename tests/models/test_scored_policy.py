"""A scalar head that is trained by the loss of pairs or of steps: gradients, layouts and folders equal transformers'."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_megatron.algo.losses import policy_losses, total_loss
from grpo_megatron.algo.plan import make_plan
from grpo_megatron.config import ActorConfig, AlgorithmConfig
from grpo_megatron.models.heads.scalar import response_tokens
from grpo_megatron.parallel.exchange import exchange, gather_groups
from grpo_megatron.types import Prompt, Sample
from tests import tiny
from tests.models.policies import LAYOUTS, Layout, close, named_gradients, scalar, whole_scalar
from tests.models.test_reward_model import make_classifier, make_step_classifier
from tests.worlds import ranks

Row = tuple[list[int], list[int], list[tuple[int, float]]]  # prompt, response, (scored token, advantage)
SEQUENCES = tiny.make_sequences(8, longest=20)
MARGINS = [0.0, 0.0, 1.5, 0.3]
PAIRS: list[Row] = [
    (prompt, response, [(len(response) - 1, (1 + MARGINS[i // 2]) * (-1 if i % 2 else 1))])
    for i, (prompt, response) in enumerate(SEQUENCES)
]
STEPS: list[Row] = [
    (
        prompt,
        response,
        [(end, 1.0 if (i + end) % 3 else -1.0) for end in sorted({0, len(response) // 2, len(response) - 1})],
    )
    for i, (prompt, response) in enumerate(SEQUENCES)
]


def build(folder: Path, kind: Any, layout: Layout, **megatron: Any) -> Any:
    return scalar(folder, kind, layout, places=response_tokens, megatron=megatron)


def batch_of(rows: list[Row], paired: bool, policy: Any) -> Any:
    """The plan's batch of this replica, as a step of the trainer makes it."""
    samples = []
    for i, (prompt, response, labels) in enumerate(rows):
        mask = [int(token in dict(labels)) for token in range(len(response))]
        about = Prompt(str(i), tuple(prompt), "", "", "", "")
        group, index = divmod(i, 2) if paired else (i, 0)
        steps = [(token, float(label > 0)) for token, label in labels]
        sample = Sample(about, group, index, response, [0.0] * len(response), "stop", 0, loss_mask=mask, steps=steps)
        sample.reward = max(labels[0][1], 0.0)
        samples.append(sample)
    mesh = policy.mesh
    mine = [sample for sample in samples if sample.prompt_index % mesh.num_engine_replicas == mesh.engine_replica]
    table = gather_groups(mine, mesh)
    estimator = "preference" if paired else "step_labels"
    config = policy.actor.model_copy(
        update={"loss_mode": "bradley_terry", "loss_agg_mode": "seq-mean-token-mean"}
        if paired
        else {"loss_mode": "step_labels"}
    )
    algorithm = AlgorithmConfig(source="file", adv_estimator=estimator)
    plan = make_plan(table, algorithm, config, dp=mesh.dp, train_batch_size=len(rows), max_response_length=50)
    return exchange(mine, table, plan, mesh)


def loss_of(paired: bool) -> Any:
    config = ActorConfig(use_kl_loss=False)
    mode = policy_losses.get("bradley_terry" if paired else "step_labels")
    return lambda inputs: total_loss(inputs, config, mode, None)


@ranks()
def update(folder: Path, rows: list[Row], paired: bool, layout: Layout, target: Path | None = None) -> dict[str, Any]:
    """Whole gradients and this rank's loss of one backward pass. With `target`: an update, and the folder it is saved as."""
    kind = "outcome" if paired else "process"
    policy = build(folder, kind, layout, use_distributed_optimizer=False)
    batch = batch_of(rows, paired, policy)
    sums = [policy.forward_backward(batch, micro_batches, loss_of(paired)).sums for micro_batches in batch.mini_batches]
    out: dict[str, Any] = {"gradients": whole_scalar(policy, named_gradients(policy))}
    first = policy.mesh.is_replica_reporter
    out["metrics"] = {name: float(part.total) if first else 0.0 for name, part in (sums[0] if sums else {}).items()}
    if target is not None:
        policy = build(folder, kind, layout)
        batch = batch_of(rows, paired, policy)
        policy.update(batch, loss_of(paired))
        policy.save_hf(target, folder)
        out["scores"] = dict(zip(batch.rows, policy.logprobs(batch), strict=True))
    return out


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    root = tmp_path_factory.mktemp("scored")
    return {
        True: make_classifier(root / "outcome", "qwen2", num_hidden_layers=2),
        False: make_step_classifier(root / "steps"),
    }


def want(folder: Path, paired: bool) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss and its gradients, by transformers. Two labels: the gradient of their difference is half the difference."""
    model = tiny.load_classifier(folder)
    if paired:
        scores = torch.stack([model(torch.tensor([p + r])).logits[0, 0] for p, r, _ in PAIRS])
        differences = scores[0::2] - scores[1::2] - torch.tensor(MARGINS)
        loss = -torch.nn.functional.logsigmoid(differences).mean()
    else:
        losses = []
        for prompt, response, labels in STEPS:
            logits = model(torch.tensor([prompt + response])).logits[0]
            targets = torch.tensor([int(label > 0) for _, label in labels])
            at = torch.tensor([len(prompt) + end for end, _ in labels])
            losses.append(torch.nn.functional.cross_entropy(logits[at], targets, reduction="none"))
        loss = torch.cat(losses).mean()
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    if not paired:  # d loss / d (w_1 - w_0)
        gradients |= {name: gradients[name][1:] for name in ("score.weight", "score.bias")}
    return loss.item(), gradients


@pytest.mark.parametrize("paired", [True, False], ids=["pairs", "steps"])
def test_gradients_equal_those_of_the_loss_over_transformers(
    folders: dict[bool, Path], tmp_path: Path, paired: bool
) -> None:
    """In every layout, and the folder written after an update has the scores that the ranks compute."""
    loss, gradients = want(folders[paired], paired)
    rows = PAIRS if paired else STEPS
    for name in ("1", "DP2", "TP2xPP2+SP"):
        shape, target = LAYOUTS[name], tmp_path / name
        inputs: dict[str, Any] = {"folder": folders[paired], "rows": rows, "paired": paired, "layout": shape}
        results = update(shape.world, **inputs, target=None if name == "DP2" else target)
        for got in results:
            close(got["gradients"], gradients, 1e-5)
        total = sum(got["metrics"].get("actor/pg_loss", 0.0) for got in results)
        assert total == pytest.approx(loss, abs=1e-6)
        if name != "DP2":
            check_folder(target, results[0]["scores"], rows, paired)


def check_folder(folder: Path, scores: dict[int, torch.Tensor], rows: list[Row], paired: bool) -> None:
    config = json.loads((folder / "config.json").read_text())
    kind = "Sequence" if paired else "Token"
    assert config["architectures"] == [f"Qwen2For{kind}Classification"]
    assert list(config["id2label"].values()) == (["LABEL_0"] if paired else ["wrong", "right"])
    model = tiny.load_classifier(folder)
    for row, (prompt, response, labels) in enumerate(rows):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + response])).logits[0]
        for token, _ in labels:
            expected = logits[0] if paired else logits[len(prompt) + token, 1] - logits[len(prompt) + token, 0]
            assert scores[row][token].item() == pytest.approx(expected.item(), abs=1e-5)
