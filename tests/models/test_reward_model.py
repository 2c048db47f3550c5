"""The reward model: scores and gradients equal transformers' in any layout. The loop that uses and trains it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import tiny, worlds
from tests.convert.folders import convert, same_bits, tensors_of
from tests.models import policy_ranks
from tests.models import reward_ranks as reward
from tests.models.test_layouts import close

PAIRS = reward.make_pairs()
PAD = 99
SEQUENCES = [*tiny.make_sequences(5), ([5, 6], [7, PAD, 8, PAD, PAD])]  # the last is read at the 8
CLASSIFIERS: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "llama3": {"pad_token_id": PAD},
    "qwen3": {"pad_token_id": PAD},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
}


def make_classifier(folder: Path, family: str, **changes: Any) -> Path:
    """A random *ForSequenceClassification of transformers' own, norms and biases perturbed as in `tiny`."""
    return tiny.make_classifier(folder, "Sequence", family, seed=1, **changes)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("reward")
    return {name: make_classifier(root / name, name, **changes) for name, changes in CLASSIFIERS.items()}


def make_step_classifier(folder: Path, **changes: Any) -> Path:
    """A random *ForTokenClassification with two labels, which transformers gives a bias."""
    labels_and_layers = {"num_labels": 2, "num_hidden_layers": 2, **changes}
    return tiny.make_classifier(folder, "Token", "qwen2", seed=2, score_std=0.3, **labels_and_layers)


@pytest.fixture(scope="module")
def step_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("steps")
    return {
        "two labels": make_step_classifier(root / "two"),
        "one label": make_step_classifier(root / "one", num_labels=1),
    }


def transformers_steps(folder: Path, sequences: Any, ends: list[list[int]]) -> list[list[float]]:
    """The log-odds at the last response token of each step."""
    model, out = tiny.load_classifier(folder), []
    for (prompt, response), row_ends in zip(sequences, ends, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + response])).logits[0]
        odds = logits[:, -1] - logits[:, 0] if logits.shape[1] == 2 else logits[:, 0]
        out.append([odds[len(prompt) + end].item() for end in row_ends])
    return out


ENDS = [sorted({0, len(response) // 2, len(response) - 1}) for _, response in SEQUENCES]
ENDS[2] = []  # a row without a step


@pytest.fixture(scope="module")
def language_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_model(tmp_path_factory.mktemp("reward") / "qwen2-tied", "qwen2-tied", num_hidden_layers=2)


def transformers_scores(folder: Path, sequences: list[tuple[list[int], list[int]]]) -> torch.Tensor:
    model = tiny.load_classifier(folder)
    with torch.no_grad():
        return torch.stack([model(torch.tensor([p + r])).logits[0, 0] for p, r in sequences])


@pytest.mark.parametrize("layout", ["1", "TP2xPP2+SP"])
def test_scores_of_every_kind_equal_transformers(
    models: dict[str, Path], step_models: dict[str, Path], layout: str
) -> None:
    """On every rank. The models cover biases, tied embeddings, llama3 RoPE, q/k norms, experts, and padding at the end.

    The scores of the same models when frozen and offloaded, and of process models at the ends of steps.
    """
    want = {family: transformers_scores(folder, SEQUENCES) for family, folder in models.items()}
    want |= {f"frozen {family}": scores for family, scores in want.items()}
    for name, folder in step_models.items():
        want[name] = torch.zeros(len(SEQUENCES), 3)
        for row, scores in enumerate(transformers_steps(folder, SEQUENCES, ENDS)):
            want[name][row, : len(scores)] = torch.tensor(scores)
    shape = policy_ranks.LAYOUTS[layout]
    inputs = {"folders": models, "steps": step_models, "ends": ENDS, "sequences": SEQUENCES, "layout": shape}
    for got in worlds.run(reward.scores, shape[0], **inputs):
        assert got.keys() == want.keys()
        for family, scores in got.items():
            assert scores.std() > 0.1
            torch.testing.assert_close(scores, want[family], rtol=0, atol=1e-5, msg=family)


@pytest.fixture(scope="module")
def alone(models: dict[str, Path]) -> dict[str, Any]:
    return worlds.run(reward.update, 1, folder=models["qwen2"], pairs=PAIRS, layout=policy_ranks.LAYOUTS["1"])[0]


def test_gradients_equal_those_of_the_loss_over_transformers(models: dict[str, Path], alone: dict[str, Any]) -> None:
    model = tiny.load_classifier(models["qwen2"])
    margins = [model(p.chosen[None].long()).logits[0, 0] - model(p.rejected[None].long()).logits[0, 0] for p in PAIRS]
    loss = -torch.nn.functional.logsigmoid(torch.stack(margins)).mean()
    loss.backward()
    want = {name: parameter.grad for name, parameter in model.named_parameters()}
    close(alone["gradients"], want, 1e-5)
    assert alone["metrics"]["reward_model/loss"] == pytest.approx(loss.item(), abs=1e-6)
    assert alone["metrics"]["reward_model/accuracy"] == sum(m.item() > 0 for m in margins) / len(margins)
    norm = torch.stack([g.square().sum() for g in want.values()]).sum().sqrt().item()
    assert alone["metrics"]["reward_model/grad_norm"] == pytest.approx(norm, rel=1e-5)


@pytest.mark.parametrize("layout", ["DP2", "TP2+SP", "TP2xPP2+SP"])
def test_the_layout_changes_nothing(models: dict[str, Path], alone: dict[str, Any], layout: str) -> None:
    """The norm too: only the norm shows a head that every tensor-parallel rank counts."""
    shape = policy_ranks.LAYOUTS[layout]
    for got in worlds.run(reward.update, shape[0], folder=models["qwen2"], pairs=PAIRS, layout=shape):
        close(got["gradients"], alone["gradients"], 1e-5)
        close(got["weights"], alone["weights"], 1e-5)
        assert got["metrics"] == pytest.approx(alone["metrics"], rel=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_trained_language_model_is_saved_as_a_classifier(language_model: Path, tmp_path: Path, dtype: str) -> None:
    """Two updates of a model with a new head. transformers and another layout compute the same scores from its folder."""
    layout, target = policy_ranks.LAYOUTS["TP2xPP2+SP"], tmp_path / "hf"
    results = worlds.run(reward.saved, 4, folder=language_model, pairs=PAIRS, layout=layout, target=target, dtype=dtype)
    sequences = [(p.chosen[:1].tolist(), p.chosen[1:].tolist()) for p in PAIRS]
    want = transformers_scores(target, sequences)
    assert want.abs().min() > 1e-3  # the head is no longer zero
    tolerance = 1e-5 if dtype == "float32" else 2**-7 * float(want.abs().max())
    for got in results:
        torch.testing.assert_close(got, want, rtol=0, atol=tolerance)
    config = json.loads((target / "config.json").read_text())
    assert config["architectures"] == ["Qwen2ForSequenceClassification"]
    check_conversion(tmp_path, language_model, config)
    read = worlds.run(
        reward.scores, 1, folders={"m": target}, sequences=[*sequences, ([1], [2])], layout=(1, 1, 1, False)
    )
    torch.testing.assert_close(read[0]["m"][: len(want)], want, rtol=0, atol=1e-5)


def check_conversion(root: Path, start: Path, config: dict[str, Any]) -> None:
    """From the checkpoint of four ranks, the tensors and the config.json of the export. The tokenizer is the policy's."""
    part, out = root / "reward_model", root / "converted"
    (part / "pairs.json").write_text("{}")
    (root / "policy").mkdir()
    (root / "policy/tokenizer_config.json").write_text("{}")
    record = {"model": {"path": str(root / "policy")}, "reward_model": {"path": str(start)}}
    (root / "trainer.json").write_text(json.dumps({"config": record}))
    assert convert("to-hf", part, out, "--quiet") == 0
    same_bits(tensors_of(root / "hf"), tensors_of(out))
    assert json.loads((out / "config.json").read_text()) == config
    assert (out / "tokenizer_config.json").exists()
    assert convert("verify", part, root / "hf", "--quiet") == 0
    assert convert("to-hf", part, root / "small", "--quiet", "--dtype", "bfloat16") == 0
    dtypes = {name: tensor.dtype for name, tensor in tensors_of(root / "small").items()}
    assert dtypes.pop("score.weight") == torch.float32 and set(dtypes.values()) == {torch.bfloat16}
    largest = max((part / "state").glob("*.distcp"), key=lambda path: path.stat().st_size)
    data = bytearray(largest.read_bytes())
    for position in range(0, len(data), 1000):  # at least one of them is in a weight
        data[position] ^= 1
    largest.write_bytes(data)
    assert convert("to-hf", part, root / "damaged", "--quiet") == 2 and not (root / "damaged").exists()


def test_sequences_are_read_at_their_ends_under_context_parallelism() -> None:
    """The ranks' shares together contain the end of every sequence. The model is not run: the CPU has no attention for cp.

    In place of a score the test reads the token, which shows where the score would be read.
    """
    assert worlds.run(reward.read_at, 1, cp=2)[0] == [11, 15, 18]


def test_a_step_that_is_not_finite_on_one_rank_is_skipped_on_all(models: dict[str, Path]) -> None:
    for result in worlds.run(reward.poisoned, 2, folder=models["qwen2"]):
        first, second = result["norms"]
        assert first < float("inf") and second == float("inf") and result["same"]


# -- the loop ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("combine", ["replace", "add"])
def test_frozen_models_reward_a_step_in_every_layout(
    models: dict[str, Path], step_models: dict[str, Path], combine: str
) -> None:
    """reward = 2 x score + 0.5 x the smallest probability of a step (+ the rule's reward, which is the last step's, too).

    Steps end at token 7 and at the end. A 7 after another, or at the start, ends no step.
    """
    process = step_models["two labels"]
    for name in ("1", "DP2", "TP2xPP2+SP") if combine == "replace" else ("1",):
        shape = policy_ranks.LAYOUTS[name]
        inputs = {"outcome": models["qwen2"], "process": process, "layout": shape, "combine": combine}
        for got in worlds.run(reward.frozen_loop, shape[0], **inputs):
            sequences, table = got["sequences"], got["table"]
            ends = [[end for end, _ in row] for row in table.step_rewards]
            assert ends == [expected_ends(response) for _, response in sequences] and max(map(len, ends)) > 2
            scores = transformers_scores(models["qwen2"], sequences).tolist()
            odds = transformers_steps(process, sequences, ends)
            rules = got["rules"] if combine == "add" else [0.0] * len(scores)
            for row, (score, rule) in enumerate(zip(scores, rules, strict=True)):
                right = torch.tensor(odds[row]).sigmoid().tolist()
                assert table.reward[row] == pytest.approx(rule + 2 * score + 0.5 * min(right), abs=1e-5)
                steps = [0.5 * p for p in right]
                steps[-1] += 2 * score + rule
                assert [value for _, value in table.step_rewards[row]] == pytest.approx(steps, abs=1e-5)
            metrics, flat = got["metrics"], [p for row in odds for p in torch.tensor(row).sigmoid().tolist()]
            assert metrics["reward_model/score/mean"] == pytest.approx(sum(scores) / len(scores), abs=1e-5)
            assert metrics["reward_model/prm/step_score/mean"] == pytest.approx(sum(flat) / len(flat), abs=1e-5)
            assert metrics["reward_model/prm/steps/mean"] == len(flat) / len(scores)
            assert {"reward_model/agreement", "reward_model/prm/agreement"} <= metrics.keys()
            assert metrics["reward_model/rule_reward/mean"] == sum(got["rules"]) / len(scores)


def expected_ends(response: list[int]) -> list[int]:
    """By hand: a 7 after a token that is neither 7 nor the special token 2; then what is left, if it has text."""
    ends, has_text = [], False
    for place, token in enumerate(response):
        if token == 7 and has_text:
            ends.append(place)
        has_text = token not in (2, 7) or (has_text and token == 2)
    return [*ends, len(response) - 1] if has_text or not ends else ends


def test_iterations_are_the_same_in_every_layout(language_model: Path) -> None:
    """Steps 0 and 1 are rewarded by rules, 2 and 3 by the model trained on their pairs. Its second training has replay."""
    want = worlds.run(reward.loop, 1, folder=language_model, layout=policy_ranks.LAYOUTS["1"], during=range(4))[0]
    assert want["rewards"][:2] == want["rules"][:2]
    assert all(set(rules) <= {0.0, 1.0} for rules in want["rules"])
    assert all(len(set(rewards)) == 16 for rewards in want["rewards"][2:])
    assert [("reward_model/loss" in row, "reward_model/agreement" in row) for row in want["metrics"]] == [
        (False, False),
        (True, False),
        (False, True),
        (True, True),
    ]
    assert want["metrics"][1]["reward_model/loss/first"] == pytest.approx(0.693147, abs=1e-6)  # a head of zeros
    assert len(want["pairs"]) == 8 and max(want["pairs"]) >= 8  # bounded, and of both iterations
    for name in ("DP2", "TP2xPP2+SP"):
        shape = policy_ranks.LAYOUTS[name]
        for got in worlds.run(reward.loop, shape[0], folder=language_model, layout=shape, during=range(4)):
            assert got["rules"] == want["rules"] and got["pairs"] == want["pairs"]
            for rewards, expected in zip(got["rewards"], want["rewards"], strict=True):
                assert rewards == pytest.approx(expected, abs=1e-5)


@pytest.mark.slow
def test_a_stop_in_the_middle_of_an_iteration_changes_no_bit(language_model: Path, tmp_path: Path) -> None:
    """Steps 0, 1, 2, stop, 3, 4, 5 = steps 0 ... 5: weights, optimizer, collected pairs and history are restored.

    The two runs with the stop offload the optimizer between updates; the run without the stop does not. In bfloat16 a group
    of the optimizer has the float32 head beside main copies. tests/e2e/test_reward_models.py resumes in float32.
    """
    shape = policy_ranks.LAYOUTS["DP2xTP2"]
    common = {"folder": language_model, "layout": shape, "dtype": "bfloat16"}
    whole = worlds.run(reward.loop, 4, during=range(6), **common)
    common["megatron"] = {"offload_optimizer": True}
    worlds.run(reward.loop, 4, during=range(3), save=tmp_path, **common)
    resumed = worlds.run(reward.loop, 4, during=range(3, 6), load=tmp_path, **common)
    for want, got in zip(whole, resumed, strict=True):
        assert got["rewards"] == want["rewards"][3:]
        assert got["pairs"] == want["pairs"]
        assert all(torch.equal(got["weights"][name], want["weights"][name]) for name in want["weights"])
