"""The seven verbs, as in a notebook: one step of them is the Trainer's step, bit for bit; errors; the direct calls."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import yaml

import grpo_megatron
from grpo_megatron import ConfigError, load_config
from tests.runs import make_run
from tests.stored import metric_rows
from tests.worlds import ranks

ROOT = Path(__file__).resolve().parents[1]
OVERRIDES = [
    *(
        "rollout.engine=transformers",
        "data.shuffle=false",
        "rollout.n=3",
        "data.train_batch_size=4",
        "reward.function=tests.e2e.rewards:odd_reward",
    ),
    *("trainer.total_training_steps=1", "trainer.test_freq=-1", "trainer.val_before_train=false"),
    *("trainer.save_hf_at_end=false", "trainer.save_freq=-1", "trainer.logger=[jsonl]", "actor.optim.lr=0.01"),
]
CORRECTED = ["actor.ppo_mini_batch_size=2", "algorithm.rollout_correction.rollout_rs=token"]
KL = ["actor.use_kl_loss=false", "algorithm.use_kl_in_reward=true", "algorithm.adv_estimator=reinforce_plus_plus"]
KL += [f"algorithm.kl_ctrl.{setting}" for setting in ("type=adaptive", "kl_coef=0.5", "target_kl=0.001", "horizon=100")]


def weights_of(run: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for bucket in run.policy.hf_weights(1) for name, tensor in bucket}


def equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(tensor, right[name]) for name, tensor in left.items())


@ranks()
def both_steps(folder: Path, cases: list[list[str]]) -> list[dict[str, Any]]:
    """For each case, the weights after the Trainer's one step, and what `verbs_step` returns, on this rank."""
    from megatron.core.parallel_state import destroy_model_parallel

    from grpo_megatron import Trainer
    from grpo_megatron import run as run_module

    results = []
    for number, overrides in enumerate(cases):
        out = folder / str(number)
        settings = [*OVERRIDES, *overrides, f"trainer.n_gpus_per_node={os.environ['WORLD_SIZE']}"]
        trainer = Trainer(load_config(folder / "run.yaml", [*settings, f"trainer.output_dir={out / 'trainer'}"]))
        close, trained = trainer.parts.close, dict[str, torch.Tensor]()

        def keep(parts: Any = trainer.parts, close: Any = close, trained: Any = trained) -> None:
            trained.update(weights_of(parts))
            close()

        with (
            mock.patch.object(trainer.parts, "close", keep),
            mock.patch.object(run_module, "destroy_mesh", destroy_model_parallel),  # the world is used again
        ):
            trainer.run()
            stepped = verbs_step(folder, [*settings, f"trainer.output_dir={out / 'verbs'}"])
        results.append({"trainer": out / "trainer", "trained": trained, **stepped})
    return results


def verbs_step(folder: Path, settings: list[str]) -> dict[str, Any]:
    """A step of the verbs on this rank, and the step after it: at once, and from the state that was saved between the two."""

    def step(start: int) -> tuple[list[Any], list[dict[str, Any]], dict[str, torch.Tensor]]:
        samples = run.sample(run.prompts[start : start + 4])
        batch = run.batch(samples)
        numbers = range(len(batch.mini_batches))
        metrics = [run.forward_backward(batch, mini_batch=number) | run.optim_step() for number in numbers]
        drawn = [(s.version, s.response_ids, s.rollout_logprobs, repr(s.reward)) for s in samples]
        return drawn, metrics, weights_of(run)

    with grpo_megatron.open(folder / "run.yaml", settings) as run:
        drawn, metrics, weights = step(0)
        result: dict[str, Any] = {"metrics": metrics, "step": weights, "rewards": [float(s[-1]) for s in drawn]}
        run.save_state(state := run.config.trainer.output_dir / "state")
        result["probe"] = run.sync()["rollout/probe_logp_diff_mean"]
        again = run.sample(["1 + 1 =", {"prompt": "2 + 2 =", "answer": "4"}], n=2)
        result["asked"] = [
            (s.version, s.prompt_index, s.index, math.isnan(s.reward), bool(s.weights_digest)) for s in again
        ]
        run.sync()  # so that the rounds of `sample` are counted anew
        *later, changed = step(4)
        run.load_state(state)
        result["loaded"] = equal(weights_of(run), weights) and not equal(changed, weights)
        *resumed, weights = step(4)
        result["resumed"] = resumed == later and equal(weights, changed)
    return result


@pytest.mark.parametrize(
    ("world", "cases"), [(1, [[], KL]), pytest.param(2, [CORRECTED], marks=pytest.mark.soak)], ids=["one", "DP2"]
)
def test_a_step_of_the_verbs_is_the_trainers(tmp_path: Path, world: int, cases: list[list[str]]) -> None:
    """And a state saved between two steps goes on with the same samples, metrics and weights."""
    make_run(tmp_path)
    for overrides, results in zip(
        cases, zip(*both_steps(world, folder=tmp_path, cases=cases), strict=True), strict=True
    ):
        [logged] = metric_rows(results[0]["trainer"])
        for result in results:
            assert equal(result["step"], result["trained"]) and result["loaded"] and result["resumed"]
            assert len(result["metrics"]) == (2 if overrides == CORRECTED else 1)
            assert result["metrics"] == results[0]["metrics"]
            mean = sum(one["actor/grad_norm"] for one in result["metrics"]) / len(result["metrics"])
            assert mean == pytest.approx(logged["actor/grad_norm"], rel=1e-12)
            assert result["probe"] < 1e-4
        rewards = [reward for result in results for reward in result["rewards"] if not math.isnan(reward)]
        assert len(set(rewards)) > 1 and len(rewards) == 12
        asked = sorted(one for result in results for one in result["asked"])
        assert asked == [(1, 0, 0, True, True), (1, 0, 1, True, True), (1, 1, 0, False, True), (1, 1, 1, False, True)]


def gentle(inputs: Any, config: Any) -> Any:
    """A loss of one's own: half the policy gradient, without a clip."""
    return -0.5 * inputs.advantages * inputs.logprobs, {}


@ranks(1)
def own_numbers(folder: Path) -> dict[str, Any]:
    """Advantages and losses of one's own, and what the verbs refuse."""
    refused: dict[str, str] = {}

    def refuse(name: str, call: Any) -> None:
        with pytest.raises((ValueError, RuntimeError, IndexError)) as error:
            call()
        refused[name] = str(error.value)

    settings = [*OVERRIDES, "trainer.n_gpus_per_node=1", f"trainer.output_dir={folder / 'own'}"]
    with grpo_megatron.open(folder / "run.yaml", settings) as run:
        refuse("no gradients", run.optim_step)
        samples = run.sample(run.prompts[:4])
        grpo = run.batch(samples, advantages="grpo")
        estimated = grpo.advantages.clone()
        table = grpo.table
        assert table is not None and grpo.plan is not None
        numbers = dict(zip(zip(table.prompt_index, table.index, strict=True), grpo.plan.advantages, strict=True))
        per_sample: list[Any] = [numbers[s.prompt_index, s.index] for s in samples]
        per_token = [[number] * len(s.response_ids) for number, s in zip(per_sample, samples, strict=True)]
        same = [torch.equal(run.batch(samples, advantages=a).advantages, estimated) for a in (per_sample, per_token)]
        left_out = run.batch(samples, advantages=[None, *[1.0] * (len(samples) - 1)])
        batch = run.batch(samples, advantages=per_sample)
        full = run.forward_backward(batch, loss="gpg")
        norm = run.optim_step()["actor/grad_norm"]
        run.load_state(run.save_state(folder / "own" / "state"))
        half = run.forward_backward(batch, loss="tests.test_run:gentle")
        again = run.forward_backward(batch, loss=gentle)
        refuse("estimator", lambda: run.batch(samples, advantages="grop"))
        refuse("critic", lambda: run.batch(samples, advantages="gae"))
        refuse("count", lambda: run.batch(samples, advantages=[1.0]))
        refuse("tokens", lambda: run.batch(samples, advantages=[[1.0, 2.0]] * len(samples)))
        refuse("finite", lambda: run.batch(samples, advantages=[math.inf] * len(samples)))
        refuse("loss", lambda: run.forward_backward(batch, loss="vanila"))
        refuse("mini-batch", lambda: run.forward_backward(batch, mini_batch=1))
        refuse("long", lambda: run.sample(["1 " * 40]))
        refuse("prompt", lambda: run.sample([3]))  # type: ignore[list-item]
        refuse("none", lambda: run.sample(run.prompts[:1], n=0))
        refuse("one prompt", lambda: run.sample("1 + 1 ="))
    refuse("closed", lambda: run.sample(run.prompts[:1]))
    return {
        "same": same,
        "rows": (len(grpo), len(left_out)),
        "losses": (full["loss"], half["loss"], again["loss"]),
        "norm": norm,
        "refused": refused,
    }


def test_advantages_and_losses_of_ones_own(tmp_path: Path) -> None:
    make_run(tmp_path)
    [result] = own_numbers(folder=tmp_path)
    assert result["same"] == [True, True] and result["rows"][0] - result["rows"][1] <= 1
    full, half, again = result["losses"]
    assert half == again and math.isfinite(full) and result["norm"] > 0
    expected = {
        "no gradients": "call run.forward_backward(batch) before run.optim_step()",
        "estimator": "did you mean 'grpo'",
        "critic": "set algorithm.adv_estimator=gae",
        "count": "advantages has 1 entries for 12 samples",
        "tokens": "advantages has 2 numbers for a response of",
        "finite": "not finite",
        "loss": "did you mean 'vanilla'",
        "mini-batch": "mini_batch=1, and the batch has 1 (actor.ppo_mini_batch_size)",
        "long": "set data.max_prompt_length=40",
        "prompt": "a list of chat messages or a row, not 3",
        "none": "n=0 responses",
        "one prompt": "prompts is one prompt; give a list of them",
        "closed": "this run is closed: its engine and ranks are released",
    }
    for name, text in expected.items():
        assert text in result["refused"][name], name


@ranks(1)
def readme_loop(folder: Path, code: str) -> list[float]:
    """Runs the README's loop beside a grpo.yaml of one rank; returns the rewards of its last step."""
    os.chdir(folder)
    settings = [*OVERRIDES, "trainer.n_gpus_per_node=1", "trainer.output_dir=outputs/x"]
    Path("grpo.yaml").write_text(yaml.safe_dump(load_config(Path("run.yaml"), settings).model_dump(mode="json")))
    names: dict[str, Any] = {}
    exec(code, names)
    return [sample.reward for sample in names["samples"]]


def test_the_loop_of_the_readme(tmp_path: Path) -> None:
    """Word for word but for its 100 steps, and prompts of a smaller step."""
    make_run(tmp_path)
    code = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[0]
    for text, other in (("range(100)", "range(2)"), ("8 * step", "4 * step"), ("step + 8", "step + 4"), ("n=8", "n=3")):
        assert text in code
        code = code.replace(text, other)
    [rewards] = readme_loop(folder=tmp_path, code=code)
    assert len(rewards) == 12 and any((tmp_path / "outputs/x").iterdir())


def test_open_names_wrong_keys_before_anything_is_built(tmp_path: Path) -> None:
    make_run(tmp_path)
    with pytest.raises(ConfigError, match=r"did you mean 'rollout\.temperature'"):
        grpo_megatron.open(tmp_path / "run.yaml", ["rollout.temprature=1"])
    config = grpo_megatron.load_config(tmp_path / "run.yaml", ["trainer.n_gpus_per_node=1"])
    with pytest.raises(TypeError, match="overrides change a YAML file"):
        grpo_megatron.open(config, ["rollout.n=4"])


# -- Direct calls ------------------------------------------------------------------------------------------------------


def test_advantages_of_plain_rewards() -> None:
    """Groups in any order, (r - mean) / (std + 1e-6) with ddof 1: std of (1, 0) is 0.70711."""
    values = grpo_megatron.advantages("grpo", rewards=[1.0, 4.0, 0.0, 4.0], groups=["a", "b", "a", "b"])
    assert values == pytest.approx([0.5 / (0.5**0.5 + 1e-6), 0, -0.5 / (0.5**0.5 + 1e-6), 0])
    plain = grpo_megatron.advantages("grpo", [1.0, 0.0], [0, 0], norm_adv_by_std_in_grpo=False)
    assert plain == [0.5, -0.5]
    with pytest.raises(ValueError, match="rewards has 2 entries, groups 1"):
        grpo_megatron.advantages("grpo", [1.0, 0.0], [0])
    with pytest.raises(ValueError, match="did you mean 'grpo'"):
        grpo_megatron.advantages("grop", [1.0, 0.0], [0, 0])


def test_a_loss_of_plain_tensors() -> None:
    """Token-mean over 3 tokens; rho = e^0.5 is clipped at 1.2 for A = 1: no gradient there. Else -A rho / 3."""
    logprobs = torch.tensor([[-1.0, -1.0], [-1.0, 0.0]], requires_grad=True)
    old, mask = torch.tensor([[-1.5, -1.0], [-1.0, 0.0]]), torch.tensor([[1, 1], [1, 0]])
    loss, metrics = grpo_megatron.policy_loss(
        "vanilla", logprobs, [1.0, -1.0], mask, old_logprobs=old, loss_agg_mode="token-mean", clip_ratio_c=None
    )
    assert loss.item() == pytest.approx((-1.2 - 1 + 1) / 3) and metrics["actor/pg_clipfrac"] == pytest.approx(1 / 3)
    loss.backward()
    assert logprobs.grad is not None
    assert logprobs.grad.flatten().tolist() == pytest.approx([0, -1 / 3, 1 / 3, 0])
    with pytest.raises(ValueError, match=r"advantages is \[3, 1\] and logprobs \[2, 2\]"):
        grpo_megatron.policy_loss("vanilla", logprobs, [1.0] * 3)
    for wrong in ({"old_logprobs": [[0.0]]}, {"ref_logprobs": old[:, :1]}, {"mask": mask[0]}, {"clip_ratio_low": -1}):
        with pytest.raises(ValueError, match=rf"^{next(iter(wrong))}(=-1: set| is .*; give a tensor \[B, R\])"):
            grpo_megatron.policy_loss("vanilla", logprobs, [1.0, 1.0], **wrong)  # type: ignore[arg-type]


def test_importing_the_package_imports_no_torch() -> None:
    code = "import sys, grpo_megatron; assert 'torch' not in sys.modules"
    assert not {"Any", "Path", "os"} & {*dir(grpo_megatron)}
    subprocess.run([sys.executable, "-c", code], check=True)
