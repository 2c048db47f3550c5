"""Teachers beside the policy, in runs of a step: what they score, what the policy learns of it, in every layout."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import grpo_megatron
from grpo_megatron.algo.distillation import LEAST_LOGPROB
from grpo_megatron.checks.validate import validate
from grpo_megatron.cli.config_file import load_config
from tests import worlds
from tests.e2e import run_ranks
from tests.models.test_divergence import dense, dense_divergence
from tests.runs import SIZES, make_run, write_rows, write_tokenizer
from tests.stored import rows_without
from tests.tiny import make_model, transformers_logprobs
from tests.training.test_supervised import settings, train
from tests.worlds import ranks

SETTINGS = [
    *("rollout.engine=transformers", "rollout.n=3", "rollout.temperature=0.7", "data.train_batch_size=4"),
    *("trainer.total_training_steps=2", "trainer.test_freq=-1", "trainer.val_before_train=false"),
    *("trainer.save_hf_at_end=false", "trainer.save_freq=-1", "trainer.logger=[jsonl]", "actor.use_kl_loss=false"),
]
ALONE = ["algorithm.adv_estimator=zero"]  # and no reward
TP, PP = ("actor.megatron.tensor_model_parallel_size=2", "actor.megatron.pipeline_model_parallel_size=2")


@ranks()
def steps(folder: Path, cases: list[list[str]]) -> list[dict[str, Any]]:
    """For each case, what one step of this rank has: its rows, their teacher's scores, the metrics."""
    from unittest import mock

    from megatron.core.parallel_state import destroy_model_parallel

    from grpo_megatron import run as run_module

    results = []
    for number, overrides in enumerate(cases):
        settings = [*SETTINGS, *overrides, f"trainer.n_gpus_per_node={os.environ['WORLD_SIZE']}"]
        settings.append(f"trainer.output_dir={folder / str(number)}")
        with (
            mock.patch.object(run_module, "destroy_mesh", destroy_model_parallel),  # the world is used again
            grpo_megatron.open(folder / "run.yaml", settings) as run,
        ):
            samples = run.sample(run.prompts[:4])
            num_sent = sum(sample.scores is not None for sample in samples)  # to a server, while others were generated
            batch = run.batch(samples)
            pairs = [(t[:p].tolist(), t[p:].tolist()) for t, p in zip(batch.tokens, batch.prompt_lengths, strict=True)]
            metrics = [
                run.forward_backward(batch, mini_batch=n) | run.optim_step() for n in range(len(batch.mini_batches))
            ]
            results.append({"pairs": pairs, "batch": batch, "metrics": metrics, "rewards": batch.table.reward})
            results[-1]["num_sent"] = num_sent
    return results


def make_teachers(folder: Path, num_rows: int = 128) -> None:
    """A run in `folder`, and beside it a teacher of another family and size, and prompts without answers.

    The policy's vocabulary has 101 rows, of which the tokenizer needs 18, and the teacher's `num_rows`.
    """
    make_run(folder)
    make_model(folder / "large", "mistral", seed=3, **{**SIZES, "num_hidden_layers": 4, "vocab_size": num_rows})
    write_tokenizer(folder / "large")
    write_rows(folder / "prompts.jsonl", [{"prompt": f"{n} + 1 ="} for n in range(9)])


def merge_adapters(folder: Path) -> Path:
    """Random adapters of the large teacher in `adapters`. Returns the folder of the model into which PEFT merges them."""
    import peft
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", init_lora_weights=False)
    model: Any = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(folder / "large"), config)
    model.save_pretrained(folder / "adapters")
    model.merge_and_unload().save_pretrained(folder / "merged")
    return folder / "merged"


def same(folder: Path) -> list[str]:
    return [f"teachers.t.path={folder / 'model'}"]


def large(folder: Path) -> list[str]:
    return [f"teachers.t.path={folder / 'large'}", f"data.train_files=[{folder / 'prompts.jsonl'}]"]


FORWARD, JSD = ([f"distillation.{one}" for one in ones] for ones in (("kl=forward", "top_k=0"), ("kl=jsd", "beta=0.3")))
REVERSE = ["distillation.kl=reverse", "distillation.top_k=8", "actor.ppo_mini_batch_size=2"]
SAMPLED = ["actor.ppo_mini_batch_size=2"]


@pytest.mark.parametrize(
    ("world", "cases"),
    [
        (1, [SAMPLED, ["actor.share_prompts=true"], JSD]),
        (2, [SAMPLED, [*SAMPLED, TP], [*SAMPLED, PP], [*FORWARD, TP], [*REVERSE, PP], [*FORWARD, PP]]),
    ],
)
def test_a_teacher_that_is_the_policy_teaches_nothing(tmp_path: Path, world: int, cases: list[list[str]]) -> None:
    """The sampled term is exactly 0, and so is a divergence and the gradient; also where the batch has two optimizer steps."""
    make_teachers(tmp_path)
    settings = [[*same(tmp_path), *ALONE, *case] for case in cases]
    for case, results in zip(cases, zip(*steps(world, folder=tmp_path, cases=settings), strict=True), strict=True):
        for result in results:
            assert len(result["metrics"]) == 1 + ("actor.ppo_mini_batch_size=2" in case)
            for metrics in result["metrics"]:
                assert metrics["distillation/reverse_kl"] == 0 and metrics["actor/grad_norm"] == 0
                assert metrics.get("distillation/divergence", 0) == 0


@pytest.mark.parametrize("num_rows", [pytest.param(128, marks=pytest.mark.soak), 60])
def test_a_teacher_of_another_size_and_family_scores_each_response(tmp_path: Path, num_rows: int) -> None:
    """Without any reward; the log-probabilities are transformers', at the temperature of the rollout.

    With fewer rows than the policy's, an id beyond them has e^-87, and is read as the last one. That teacher has adapters.
    """
    make_teachers(tmp_path, num_rows)
    folder, of_teacher = tmp_path / "large", [*large(tmp_path), f"rollout.stop_token_ids={[*range(20, 45)]}"]
    if num_rows == 60:
        folder = merge_adapters(tmp_path)
        of_teacher.append(f"teachers.t.adapters={tmp_path / 'adapters'}")
    modes = [[], ["distillation.loss_agg_mode=seq-mean-token-mean", "teachers.t.coefficient=0.5"]]
    if num_rows == 60:
        modes[0] = [*FORWARD, TP]
    micro = "actor.ppo_micro_batch_size_per_gpu=2"
    cases = [[*of_teacher, *ALONE, micro, *mode] for mode in modes]
    results = steps(2, folder=tmp_path, cases=cases)
    counts = [len(response) for rank in results for _, response in rank[1]["pairs"]]
    assert len(counts) == 12 and len({*counts}) > 1  # rows without a reward are in the loss
    for rank in results:
        for number, result in enumerate(rank):
            batch, metrics = result["batch"], result["metrics"][0]
            assert all(reward != reward for reward in result["rewards"]) and metrics["actor/grad_norm"] > 0
            known = [tuple([min(one, num_rows - 1) for one in ids] for ids in pair) for pair in result["pairs"]]
            expected = transformers_logprobs(folder, known, 0.7)
            total, is_unknown = 0.0, [torch.tensor(response) >= num_rows for _, response in result["pairs"]]
            assert torch.cat(is_unknown).any() == (num_rows == 60) and metrics["distillation/reverse_kl"] < 1e3
            for row, logprobs in enumerate(expected):
                logprobs = logprobs.masked_fill(is_unknown[row], LEAST_LOGPROB)
                torch.testing.assert_close(batch.teacher.logprobs[row, : len(logprobs)], logprobs, atol=2e-5, rtol=0)
                weight = 0.5 / len(counts) / len(logprobs) if number else 1 / sum(counts)
                expected_weights = torch.full((len(logprobs),), weight)
                torch.testing.assert_close(batch.teacher.weights[row, : len(logprobs)], expected_weights)
                assert bool((batch.teacher.weights[row, len(logprobs) :] == 0).all())
                total += float(logprobs.sum())
            assert total < 0 and metrics["distillation/reverse_kl"] != 0


def test_a_row_has_the_teacher_and_the_prompt_of_its_columns(tmp_path: Path) -> None:
    """Two teachers, the second one is the policy with a longer prompt. Each row has the scores that its teacher gives alone."""
    make_teachers(tmp_path)
    rows = [{"prompt": f"{n} + 1 =", "kind": "ab"[n % 2], "hint": f"{n} + 1 = {n + 1} . {n} + 1 ="} for n in range(9)]
    write_rows(tmp_path / "rows.jsonl", rows)
    teachers = f"{{a: {{path: {tmp_path / 'large'}}}, other: {{self: START, key: b, prompt_column: hint}}}}"
    common = [f"data.train_files=[{tmp_path / 'rows.jsonl'}]", "distillation.key=kind", *ALONE]
    kinds = [["START", "start"], ["START", "current"]]
    cases = [
        [*common, f"teachers={teachers.replace(*kinds[0])}"],
        [*common, f"teachers={teachers.replace(*kinds[1])}", *REVERSE],
        [*common, f"teachers={teachers.replace(*kinds[0])}", "actor.lora.rank=4", "distillation.kl=forward", TP],
    ]
    texts = {tuple(ids): number for number, ids in enumerate(prompt_ids(tmp_path, [row["prompt"] for row in rows]))}
    hints = prompt_ids(tmp_path, [row["hint"] for row in rows])
    for results in zip(*steps(2, folder=tmp_path, cases=cases), strict=True):
        for result in results:
            batch = result["batch"]
            for row, (prompt, response) in enumerate(result["pairs"]):
                number = texts[tuple(prompt)]
                assert batch.teacher.index[row] == number % 2
                folder, prompt = ("model", hints[number]) if number % 2 else ("large", prompt)
                [expected] = transformers_logprobs(tmp_path / folder, [(prompt, response)], 0.7)
                torch.testing.assert_close(batch.teacher.logprobs[row, : len(response)], expected, atol=2e-5, rtol=0)
            assert result["metrics"][0]["actor/grad_norm"] > 0
            assert {"distillation/reverse_kl/a", "distillation/reverse_kl/other"} <= result["metrics"][0].keys()


@pytest.mark.parametrize(
    ("time", "adapted"),
    [
        ("renew_steps", []),
        pytest.param("lag_steps", ["actor.lora.rank=4"], marks=pytest.mark.soak),
        pytest.param("renew_steps", ["actor.lora.rank=4"], marks=pytest.mark.soak),
        pytest.param("lag_steps", [], marks=pytest.mark.soak),
    ],
)
def test_the_policy_of_some_steps_ago_teaches_also_after_a_resume(
    tmp_path: Path, adapted: list[str], time: str
) -> None:
    """Renewed, it is the policy itself before the updates of steps 0 and 2, so that its term is exactly 0 there, and not at 1
    and 3. With a lag it is the start in the first three steps, as in a run whose teacher stays it, and not in the fourth.

    A run that ends after three steps goes on with the copies, and has the weights of the other, bit for bit.
    """
    make_teachers(tmp_path)
    common = [*SETTINGS, *adapted, "teachers.t.self=start", f"teachers.t.{time}=2", "trainer.n_gpus_per_node=1"]
    common += ["reward.function=tests.e2e.rewards:length_reward", "actor.optim.lr=0.01"]
    parts = {"whole": (4, -1), "stopped": (3, 3), "resumed": (4, 3)}  # steps, save_freq
    configs = []
    for name, (steps, save_freq) in parts.items():
        output = tmp_path / name.replace("stopped", "resumed")
        trainer = {"total_training_steps": steps, "save_freq": save_freq, "output_dir": output}
        changes = [f"trainer.{key}={value}" for key, value in trainer.items()]
        configs.append(load_config(tmp_path / "run.yaml", [*common, *changes]))
    start = ["trainer.total_training_steps=4", f"trainer.output_dir={tmp_path / 'start'}", f"teachers.t.{time}=null"]
    configs.append(load_config(tmp_path / "run.yaml", [*common, *start]))
    whole, stopped, resumed, _ = worlds.run(run_ranks.train_many, 1, raws=configs)[0]
    for name, tensor in whole["weights"].items():
        assert torch.equal(tensor, resumed["weights"][name])
    assert any(not torch.equal(tensor, whole["weights"][name]) for name, tensor in stopped["weights"].items())
    kls, again, unchanged = (
        [row["distillation/reverse_kl"] for row in rows_without(tmp_path / name)]
        for name in ("whole", "resumed", "start")
    )
    is_renewed = time == "renew_steps"
    assert kls == again and [kl == 0 for kl in kls] == [True, False, is_renewed, False]
    assert [kl == other for kl, other in zip(kls, unchanged, strict=True)] == [True, True, not is_renewed, False]
    copies = sorted((tmp_path / "resumed" / "iterations").iterdir())
    assert [copy.name for copy in copies] == [f"t.step_00000{n}" for n in ([2] if is_renewed else [1, 2, 3])]
    assert all(bool([*copy.glob("adapter*")]) == bool(adapted) for copy in copies)


def test_a_row_without_a_teacher_is_named(tmp_path: Path) -> None:
    make_teachers(tmp_path)
    teachers = f"teachers={{a: {{path: {tmp_path / 'model'}, prompt_column: hint, max_prompt_length: 3}}}}"
    idle = f"teachers.idle.path={tmp_path / 'model'}"
    for row, more, message in (
        ({"kind": "b"}, [], "column 'kind' is 'b', and no teacher has this key (a); add one, or take the row out"),
        ({}, [], "column 'kind' is missing"),
        ({"kind": "a"}, [], "hint"),
        (
            {"kind": "a", "hint": "1 + 1 = 2"},
            [],
            "the prompt of teacher 'a' has 5 tokens, and teachers.a.max_prompt_length=3",
        ),
        ({"kind": "a", "hint": "1"}, [idle], "teachers.idle: no row has its key 'idle' in the column 'kind'"),
    ):
        rows = write_rows(tmp_path / "rows.jsonl", [{"prompt": "1 + 1 =", **row}])
        settings = [teachers, *more, "distillation.key=kind", f"data.train_files=[{rows}]", *SETTINGS, *ALONE]
        with pytest.raises(grpo_megatron.ConfigError, match=re.escape(message)):
            validate(load_config(tmp_path / "run.yaml", [*settings, f"trainer.output_dir={tmp_path / 'out'}"]), 2)


def prompt_ids(folder: Path, texts: list[str]) -> list[list[int]]:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder / "model")(texts)["input_ids"]


@pytest.mark.soak
def test_a_teacher_of_another_layout_scores_the_same(tmp_path: Path) -> None:
    """Log-probabilities, distributions and the gradient's norm are those of a teacher in the policy's layout."""
    make_teachers(tmp_path)
    sizes = ("tensor_model_parallel_size=", "pipeline_model_parallel_size=")
    wide, long, single = (
        [f"teachers.t.{size}{n}" for size, n in zip(sizes, ns, strict=True)] for ns in ("21", "12", "11")
    )
    pairs = [([], wide), ([*REVERSE, PP], wide), ([*FORWARD, TP], single), (FORWARD, long)]
    cases = [[*large(tmp_path), *ALONE, *case] for case, layout in pairs for case in (case, [*case, *layout])]
    for rank in steps(2, folder=tmp_path, cases=cases):
        for same, other in zip(rank[::2], rank[1::2], strict=True):
            left, right = same["batch"].teacher, other["batch"].teacher
            assert len(same["pairs"]) > 3 and same["pairs"] == other["pairs"]
            torch.testing.assert_close(left.logprobs, right.logprobs, atol=1e-5, rtol=0)
            for mine, theirs in ((left.top, right.top), (left.states, right.states)):
                assert len(mine) == len(theirs)
                for one, another in zip(mine, theirs, strict=True):
                    torch.testing.assert_close(one, another, atol=1e-4, rtol=0)
            for one, another in zip(same["metrics"], other["metrics"], strict=True):
                assert one["actor/grad_norm"] == pytest.approx(another["actor/grad_norm"], rel=1e-4)
                assert one["distillation/reverse_kl"] == pytest.approx(another["distillation/reverse_kl"], abs=1e-5)


GIVEN = [{"prompt": f"{n} + 1 =", "response": " ".join(str((n + i) % 10) for i in range(1, 2 + n))} for n in range(6)]


GIVEN_CASES = {1: ("zero", "forward", 8), 2: ("constant", "reverse", 0)}  # tp -> estimator, kl, top_k


@ranks()
def supervised(folder: Path, tp: int) -> None:
    """A run of one step on given responses, which end with the end token: the teacher alone, or beside SFT."""
    estimator, kl, top_k = GIVEN_CASES[tp]
    method = {
        "algorithm": {"source": "file", "adv_estimator": estimator},
        "actor": {"loss_mode": "sft", "loss_agg_mode": "token-mean"},
        "teachers": {"t": {"path": str(folder / "large"), "coefficient": 0.5}},
        "distillation": {"kl": kl, "top_k": top_k, "loss_agg_mode": "seq-mean-token-mean"},
    }
    data = {"train_files": [str(folder / "given.jsonl")], "val_loss_files": [], "train_batch_size": 6}
    trainer = {"total_epochs": 1, "save_freq": -1, "test_freq": -1, "val_before_train": False}
    train(settings(folder, folder / "out", method, tp=tp, data=data, trainer=trainer))


@pytest.mark.parametrize("tp", GIVEN_CASES)
def test_soft_targets_on_given_responses_equal_transformers(tmp_path: Path, tp: int) -> None:
    """Divergence, agreement and the gradient's norm of sum w' D - sum w log p, in float64; without SFT w log p is absent.

    6 rows have 2 to 7 tokens with the end token, 27 in all: w = 1 / 27, and w' = .5 / 6 / tokens of the row.
    """
    from transformers import AutoModelForCausalLM

    make_teachers(tmp_path)
    write_rows(tmp_path / "given.jsonl", GIVEN)
    supervised(2, folder=tmp_path, tp=tp)
    prompts, responses = (prompt_ids(tmp_path, [row[name] for row in GIVEN]) for name in ("prompt", "response"))
    policy, teacher = (
        AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.float64) for name in ("model", "large")
    )
    (estimator, kl, top_k), num_ids = GIVEN_CASES[tp], SIZES["vocab_size"]
    loss, divergences, agreements = torch.zeros((), dtype=torch.float64), [], []
    for prompt, response in zip(prompts, [[*ids, 2] for ids in responses], strict=True):
        logp = dense(policy, prompt, response, 1.0)
        with torch.no_grad():
            logq = dense(teacher, prompt, response, 1.0)
        divergences.append(dense_divergence(kl, logp, logq, top_k, num_ids))
        agreements.append(logp.argmax(1) == logq[:, :num_ids].argmax(1))
        loss = loss + 0.5 / 6 * divergences[-1].mean()
        if estimator == "constant":
            loss = loss - logp.gather(1, torch.tensor(response)[:, None]).sum() / 27
    loss.backward()
    assert torch.cat(divergences).shape == (27,)
    [metrics] = rows_without(tmp_path / "out")
    expected = {
        "distillation/divergence": torch.cat(divergences).mean(),
        "distillation/agreement": torch.cat(agreements).double().mean(),
        "actor/grad_norm": torch.cat([parameter.grad.flatten() for parameter in policy.parameters()]).norm(),
    }
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(value.item(), rel=1e-5, abs=1e-7), name
