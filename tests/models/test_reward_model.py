"""The reward model: scores and gradients equal transformers' in any layout. The loop that uses and trains it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from grpo_megatron.config import RewardModelConfig, ScoringModel
from grpo_megatron.device import Device
from grpo_megatron.models.heads.reward_folder import read_reward_folder
from grpo_megatron.models.heads.scalar import FrozenScalar, ScalarReader, last_token
from grpo_megatron.models.weights.sharded_state import save_sharded
from grpo_megatron.models.weights.stream import unwrapped
from grpo_megatron.parallel.exchange import gather_groups
from grpo_megatron.report.metrics import Metrics
from grpo_megatron.training.reward_model import (
    FrozenReward,
    LearningReward,
    PreferencePair,
    Scorer,
    pair_batch,
    pair_loss,
    update_pairs,
)
from grpo_megatron.types import Prompt, Sample
from tests import tiny
from tests.convert.folders import convert, same_bits, tensors_of
from tests.models.policies import (
    LAYOUTS,
    OPTIM,
    Layout,
    actor,
    close,
    named_gradients,
    same,
    scalar,
    stream,
    whole_scalar,
    world,
)
from tests.worlds import ranks


def make_pairs(count: int = 5, *, seed: int = 0) -> Any:
    """Pairs of various lengths: each prompt of `tiny.make_sequences` with its own and another prompt's response."""
    drawn = tiny.make_sequences(2 * count, seed=seed)
    pairs = []
    for (prompt, chosen), (_, rejected) in zip(drawn[:count], drawn[count:], strict=True):
        both = [torch.tensor([*prompt, *response], dtype=torch.int32) for response in (chosen, rejected)]
        pairs.append(PreferencePair(len(prompt), *both))
    return pairs


PAIRS = make_pairs()
CHOSEN = [(p.chosen[: p.prompt_length].tolist(), p.chosen[p.prompt_length :].tolist()) for p in PAIRS]
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


# -- the ranks ---------------------------------------------------------------------------------------------------------


def build(folder: Path, layout: Layout, **options: Any) -> Any:
    """A reward model that learns."""
    return scalar(folder, "outcome", layout, places=last_token(read_reward_folder(folder)), **options)


def frozen(folder: Path, layout: Layout, kind: Any = "outcome") -> Any:
    """A model that is not trained. Its weights are on the host before and after each batch."""
    device, mesh = world(layout)
    limits = actor(layout, megatron={"offload_reference": True}, ppo_max_token_len_per_gpu=120)
    model = FrozenScalar(read_reward_folder(folder, kind), "float32", limits, mesh, device)

    def check(forward: Any) -> Any:
        def checked(*args: Any) -> Any:
            assert all(p.untyped_storage().nbytes() == 0 for p in model.model.parameters() if p.numel() > 1)
            out = forward(*args)
            assert all(p.untyped_storage().nbytes() == 0 for p in model.model.parameters() if p.numel() > 1)
            return out

        return checked

    model.forward_batch = check(model.forward_batch)
    return model


@ranks()
def all_scores(
    folders: dict[str, Path], sequences: Any, layout: Layout, steps: dict[str, Path] | None = None, ends: Any = None
) -> dict[str, torch.Tensor]:
    """Family -> scores, in micro-batches of different sizes, one of them empty. `steps`: folders of process reward models."""
    batch = tiny.make_batch(sequences, [[[0, 1], [2], [], [3, 4, 5]]])
    out = {family: build(folder, layout).numbers(batch)[:, 0] for family, folder in folders.items()}
    out |= {f"frozen {family}": frozen(folder, layout).numbers(batch)[:, 0] for family, folder in folders.items()}
    places = [[batch.prompt_lengths[row] + end for end in of_row] for row, of_row in enumerate(ends or ())]
    return out | {
        name: frozen(folder, layout, "process").numbers(batch, places) for name, folder in (steps or {}).items()
    }


@ranks()
def update(folder: Path, layout: Layout) -> dict[str, Any]:
    """Whole gradients of one backward pass. Then, with the distributed optimizer, metrics and weights of an update."""
    model = build(folder, layout, megatron={"use_distributed_optimizer": False})  # leaves whole gradients on every rank
    batch = pair_batch(PAIRS, model.actor, model.mesh.dp_rank, model.mesh.dp)
    model.forward_backward(batch, batch.mini_batches[0], pair_loss(len(PAIRS)))
    gradients = whole_scalar(model, named_gradients(model))
    model = build(folder, layout)
    metrics = update_pairs(model, batch, len(PAIRS))
    return {"gradients": gradients, "metrics": metrics, "weights": stream(model)}


@ranks()
def saved(folder: Path, layout: Layout, target: Path, dtype: str = "float32") -> torch.Tensor:
    """Two updates, then a Hugging Face folder and, beside it, a checkpoint. Returns the scores of the chosen sequences."""
    model = build(folder, layout, dtype=dtype)
    batch = pair_batch(PAIRS, model.actor, model.mesh.dp_rank, model.mesh.dp)
    for _ in range(2):
        assert update_pairs(model, batch, len(PAIRS))["reward_model/grad_norm"] > 0
    model.save_hf(target, folder)
    save_sharded(model, target.parent / "reward_model" / "state")
    return model.numbers(tiny.make_batch(CHOSEN, [[[i] for i in range(len(CHOSEN))]]))[:, 0]


@ranks(2)
def poisoned(folder: Path) -> dict[str, Any]:
    """In the second update the weights of rank 1 give NaN."""
    model = build(folder, LAYOUTS["DP2"])
    batch = pair_batch(PAIRS, model.actor, model.mesh.dp_rank, 2)
    first = update_pairs(model, batch, len(PAIRS))
    before = stream(model)
    head = unwrapped(model.ddp).score.weight
    if model.mesh.rank == 1:
        good, head.data = head.data, head.data * float("nan")
    second = update_pairs(model, batch, len(PAIRS))
    if model.mesh.rank == 1:
        head.data = good
    same(stream(model), before)
    return {"norms": [first["reward_model/grad_norm"], second["reward_model/grad_norm"]]}


@ranks(1)
def read_at(cp: int) -> list[int]:
    """The token at which each of three sequences is read, from the shares of `cp` ranks."""
    tokens = [list(range(10, 10 + n)) for n in (2, 6, 9)]
    batch = tiny.make_batch([(t[:1], t[1:]) for t in tokens], [])
    found = torch.zeros(3, dtype=torch.int64)
    for cp_rank in range(cp):
        scorer = ScalarReader.__new__(ScalarReader)  # the index arithmetic needs no model
        scorer.mesh = SimpleNamespace(cp=cp, cp_rank=cp_rank)  # type: ignore[assignment]
        scorer.device, scorer.multiple, scorer.temperature, scorer.chunk = Device("cpu"), 2 * cp, 1.0, 8
        scorer.routers, scorer.arch = [], SimpleNamespace(vision=None)  # type: ignore[assignment]
        scorer.places = last_token(SimpleNamespace(pad_token_id=None))  # type: ignore[arg-type]
        (pack,) = scorer.packs(batch, [[0, 1, 2]])
        assert pack.share is not None and pack.share.num_targets == 3
        found[pack.share.target_indices] += pack.tokens[0, pack.targets.state_indices]
    return found.tolist()


# -- the tests ---------------------------------------------------------------------------------------------------------


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
    shape = LAYOUTS[layout]
    inputs = {"folders": models, "steps": step_models, "ends": ENDS, "sequences": SEQUENCES, "layout": shape}
    for got in all_scores(shape.world, **inputs):
        assert got.keys() == want.keys()
        for family, scores in got.items():
            assert scores.std() > 0.1
            torch.testing.assert_close(scores, want[family], rtol=0, atol=1e-5, msg=family)


@pytest.fixture(scope="module")
def alone(models: dict[str, Path]) -> dict[str, Any]:
    return update(1, folder=models["qwen2"], layout=LAYOUTS["1"])[0]


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


@pytest.mark.parametrize(
    "layout", [*(pytest.param(name, marks=pytest.mark.soak) for name in ("DP2", "TP2+SP")), "TP2xPP2+SP"]
)
def test_the_layout_changes_nothing(models: dict[str, Path], alone: dict[str, Any], layout: str) -> None:
    """The norm too: only the norm shows a head that every tensor-parallel rank counts."""
    shape = LAYOUTS[layout]
    for got in update(shape.world, folder=models["qwen2"], layout=shape):
        close(got["gradients"], alone["gradients"], 1e-5)
        close(got["weights"], alone["weights"], 1e-5)
        assert got["metrics"] == pytest.approx(alone["metrics"], rel=1e-5)


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.soak), "bfloat16"])
def test_a_trained_language_model_is_saved_as_a_classifier(language_model: Path, tmp_path: Path, dtype: str) -> None:
    """Two updates of a model with a new head. transformers and another layout compute the same scores from its folder."""
    layout, target = LAYOUTS["TP2xPP2+SP"], tmp_path / "hf"
    results = saved(4, folder=language_model, layout=layout, target=target, dtype=dtype)
    want = transformers_scores(target, CHOSEN)
    assert want.abs().min() > 1e-3  # the head is no longer zero
    tolerance = 1e-5 if dtype == "float32" else 2**-7 * float(want.abs().max())
    for got in results:
        torch.testing.assert_close(got, want, rtol=0, atol=tolerance)
    config = json.loads((target / "config.json").read_text())
    assert config["architectures"] == ["Qwen2ForSequenceClassification"]
    check_conversion(tmp_path, language_model, config)
    read = all_scores(1, folders={"m": target}, sequences=[*CHOSEN, ([1], [2])], layout=LAYOUTS["1"])
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
    assert read_at(cp=2)[0] == [11, 15, 18]


def test_a_step_that_is_not_finite_on_one_rank_is_skipped_on_all(models: dict[str, Path]) -> None:
    for result in poisoned(folder=models["qwen2"]):
        first, second = result["norms"]
        assert first < float("inf") and second == float("inf")


# -- the loop: samples in, rewards out, training after each outer iteration ---------------------------------------------


def decoded(ids: Any) -> str:
    """Token 7 ends a step; token 2 is a special token, which has no text."""
    return "".join("" if token == 2 else ";" if token == 7 else "x" for token in ids)


@ranks()
def frozen_loop(outcome: Path, process: Path, layout: Layout, combine: str) -> dict[str, Any]:
    """A step rewarded by the sum of two frozen models: 2 x the outcome model's score, 0.5 x that of the process model."""
    config = RewardModelConfig.model_validate({"path": outcome, "coefficient": 2.0, "combine": combine})
    steps = ScoringModel.model_validate({"path": process, "coefficient": 0.5, "step_separator": ";", "kind": "process"})
    _, mesh = world(layout)
    limits = actor(layout, ppo_max_token_len_per_gpu=120)
    scorers = [
        Scorer("", config, frozen(outcome, layout), limits),
        Scorer("prm", steps, frozen(process, layout, "process"), limits, decoded),
    ]
    samples = make_samples(mesh, 0)
    table = gather_groups(samples, mesh)
    metrics = Metrics()
    rewarded = FrozenReward(config, scorers).reward(0, samples, table, metrics)
    whole = [(list(s.prompt.prompt_ids), s.response_ids) for part in mesh.all_gather(samples) for s in part]
    order = [(s.prompt_index, s.index) for part in mesh.all_gather(samples) for s in part]
    sequences = [pair for _, pair in sorted(zip(order, whole, strict=True))]
    reduced = metrics.reduce(mesh.all_gather)
    return {"table": rewarded, "rules": table.reward, "sequences": sequences, "metrics": reduced}


def make_samples(mesh: Any, step: int, *, prompts: int = 4, n: int = 4, good: int = 7) -> list[Any]:
    """This rank's share of a step's samples. The reward is 1 if token `good` is at least twice in the response."""
    samples = []
    for p in range(prompts):
        generator = torch.Generator().manual_seed(1000 * step + p)
        ids = torch.randint(10, 100, (3 + p % 5,), generator=generator).tolist()
        prompt = Prompt(uid=f"{p}", prompt_ids=tuple(ids), text="", answer="", source="", reward="")
        for i in range(n):
            response = torch.randint(0, 100, (int(torch.randint(6, 12, (), generator=generator)),), generator=generator)
            often = torch.rand(len(response), generator=generator) < (0.5 if i % 2 else 0.1)
            response = response.masked_fill(often, good).tolist()
            sample = Sample(prompt, p, i, response, [-1.0] * len(response), "stop", step)
            sample.reward = float(response.count(good) >= 2)
            samples.append(sample)
    return samples[mesh.rank :: mesh.world_size]


@ranks()
def loop(
    folder: Path,
    layout: Layout,
    during: range,
    *,
    load: Path | None = None,
    save: Path | None = None,
    prompts: int = 4,
    megatron: Any = None,
    dtype: str = "float32",
    **config: Any,
) -> dict[str, Any]:
    """Outer iterations of two steps. Returns rewards and metrics of every step, and the final weights."""
    settings = {"steps": 3, "train_batch_size": 4, "history_size": 8, "start_iteration": 1, **config}
    model = build(folder, layout, megatron=megatron, dtype=dtype)
    rewards = LearningReward(
        model_config(folder, settings), model, model.actor, iteration_steps=2, total_steps=8, seed=5
    )
    if load is not None:
        rewards.load(load, same_world=True)
    out: dict[str, Any] = {"rewards": [], "rules": [], "metrics": []}
    for step in during:
        samples = make_samples(model.mesh, step, prompts=prompts)
        table = gather_groups(samples, model.mesh)
        metrics = Metrics()
        rewarded = rewards.reward(step, samples, table, metrics)
        if (step + 1) % 2 == 0:
            rewards.learn(step, metrics)
        out["rules"].append(table.reward)
        out["rewards"].append(rewarded.reward)
        out["metrics"].append(metrics.reduce(model.mesh.all_gather))
        assert replace(rewarded, reward=table.reward) == table
    if save is not None:
        rewards.save(save)
    out["weights"] = stream(model)
    out["pairs"] = [number for number, *_ in rewards.history.state()["kept"]]
    return out


def model_config(folder: Path, settings: dict[str, Any]) -> Any:
    return RewardModelConfig.model_validate({"path": folder, "optim": {**OPTIM, "weight_decay": 0.0}, **settings})


@pytest.mark.parametrize("combine", ["replace", pytest.param("add", marks=pytest.mark.soak)])
def test_frozen_models_reward_a_step_in_every_layout(
    models: dict[str, Path], step_models: dict[str, Path], combine: str
) -> None:
    """reward = 2 x score + 0.5 x the smallest probability of a step (+ the rule's reward, which is the last step's, too).

    Steps end at token 7 and at the end. A 7 after another, or at the start, ends no step.
    """
    process = step_models["two labels"]
    for name in ("1", "DP2", "TP2xPP2+SP") if combine == "replace" else ("1",):
        shape = LAYOUTS[name]
        inputs = {"outcome": models["qwen2"], "process": process, "layout": shape, "combine": combine}
        for got in frozen_loop(shape.world, **inputs):
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


@pytest.mark.soak
def test_iterations_are_the_same_in_every_layout(language_model: Path) -> None:
    """Steps 0 and 1 are rewarded by rules, 2 and 3 by the model trained on their pairs. Its second training has replay."""
    want = loop(1, folder=language_model, layout=LAYOUTS["1"], during=range(4))[0]
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
        shape = LAYOUTS[name]
        for got in loop(shape.world, folder=language_model, layout=shape, during=range(4)):
            assert got["rules"] == want["rules"] and got["pairs"] == want["pairs"]
            for rewards, expected in zip(got["rewards"], want["rewards"], strict=True):
                assert rewards == pytest.approx(expected, abs=1e-5)


@pytest.mark.slow
def test_a_stop_in_the_middle_of_an_iteration_changes_no_bit(language_model: Path, tmp_path: Path) -> None:
    """Steps 0, 1, 2, stop, 3, 4, 5 = steps 0 ... 5: weights, optimizer, collected pairs and history are restored.

    The two runs with the stop offload the optimizer between updates; the run without the stop does not. In bfloat16 a group
    of the optimizer has the float32 head beside main copies. tests/e2e/test_reward_models.py resumes in float32.
    """
    shape = LAYOUTS["DP2xTP2"]
    common = {"folder": language_model, "layout": shape, "dtype": "bfloat16"}
    whole = loop(4, during=range(6), **common)
    common["megatron"] = {"offload_optimizer": True}
    loop(4, during=range(3), save=tmp_path, **common)
    resumed = loop(4, during=range(3, 6), load=tmp_path, **common)
    for want, got in zip(whole, resumed, strict=True):
        assert got["rewards"] == want["rewards"][3:]
        assert got["pairs"] == want["pairs"]
        assert all(torch.equal(got["weights"][name], want["weights"][name]) for name in want["weights"])
