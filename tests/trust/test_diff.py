"""`diff` names the stage and the row or tensor of each planted fault, and raises no alarm over honest pairs.

One world makes two steps of a tiny run again and again from one state, each time with one fault. Another world makes them with
data and with tensor parallelism. docs/trust.md has the table of the faults.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

import grpo_megatron
from grpo_megatron import ConfigError
from grpo_megatron.report.trace_file import Leaves, StepFile, TraceFolder, level_sizes, step_content
from grpo_megatron.trust.compare import (
    NOTHING,
    RESULTS,
    _config_changes,
    compare_runs,
    compare_seams,
    likely_first,
    poisson_tail,
)
from grpo_megatron.trust.diff import DiffOptions, print_diff
from grpo_megatron.types import PromptImage
from tests.runs import SIZES, make_run
from tests.tiny import make_model
from tests.worlds import ranks

SETTINGS = [
    *("rollout.engine=transformers", "data.shuffle=false", "rollout.n=3", "data.train_batch_size=4"),
    *("reward.function=tests.trust.rewards_of_certify:odd", "trainer.total_training_steps=2", "trainer.test_freq=-1"),
    *(
        "trainer.val_before_train=false",
        "trainer.save_hf_at_end=false",
        "trainer.save_freq=-1",
        "trainer.logger=[jsonl]",
    ),
    *("actor.optim.lr=0.01", "actor.kl_loss_coef=0.05", "rollout.temperature=0.9"),
    "algorithm.rollout_correction.rollout_rs=token",
    "data.max_response_length=10",
]


QKV = "decoder.layers.1.self_attention.linear_qkv.weight"
EMBEDDING = "model.embed_tokens.weight"
UP = "decoder.layers.2.mlp.linear_fc1.weight"
At = Callable[[str, int, Any], None]  # a point of the step, the step, what is there


def at(point: str, step: int, change: Callable[[Any], Any]) -> At:
    """A fault that changes what is at one point of one step."""

    def fault(name: str, number: int, content: Any) -> None:
        if (name, number) == (point, step):
            change(content)

    return fault


def sample(number: int, **changes: Any) -> At:
    """A fault of one sample of step 0. A value that is a function gets the old one."""

    def change(samples: Any) -> None:
        one = samples[number]
        for name, value in changes.items():
            setattr(one, name, value(getattr(one, name)) if callable(value) else value)

    return at("samples", 0, change)


def column(name: str, row: int, change: Callable[[Any], Any]) -> At:
    """A fault of one row of a tensor of the batch, in step 0."""
    return at("batch", 0, lambda batch: getattr(batch, name)[row].copy_(change(getattr(batch, name)[row])))


def parameter(run: Any, name: str) -> Any:
    return {one.removeprefix("module."): p for one, p in run.policy.ddp.module.named_parameters()}[
        name
    ]  # of Float16Module


def scaled(name: str, factor: float) -> Callable[[Any], Any]:
    return lambda run: parameter(run, name).data.mul_(factor)


def moment(kind: str, name: str) -> Callable[[Any], Any]:
    def lose(run: Any) -> None:
        for part in getattr(run.policy.optimizer, "chained_optimizers", [run.policy.optimizer]):
            group, order = part.model_param_group_index_map[parameter(run, name)]
            part.optimizer.state[part.optimizer.param_groups[group]["params"][order]][kind].zero_()

    return lose


def rounded(tensor: Any) -> Any:
    return tensor.copy_(tensor.bfloat16().float())


@contextlib.contextmanager
def groups(**settings: Any) -> Iterator[None]:
    """Other settings of the optimizer's parameter groups."""
    of_run = RUN[0].policy.optimizer.param_groups
    before = [{name: group[name] for name in settings} for group in of_run]
    for group in of_run:
        group.update(settings)
    yield
    for group, old in zip(of_run, before, strict=True):
        group.update(old)


def swap(samples: Any, name: str, one: int, other: int) -> None:
    values = getattr(samples[one], name), getattr(samples[other], name)
    for place, value in zip((other, one), values, strict=True):
        setattr(samples[place], name, value)


def stale_shard(point: str, step: int, content: Any) -> None:
    """Rank 1 keeps its shard of one tensor as it was before the update of step 0."""
    if RUN[0].mesh.rank == 1 and (point, step) == ("batch", 0):
        KEPT[:] = [parameter(RUN[0], UP).data.clone()]
    elif RUN[0].mesh.rank == 1 and (point, step) == ("prompts", 1):
        parameter(RUN[0], UP).data.copy_(KEPT[0])


def lora_scale(point: str, step: int, content: Any) -> None:
    """Rank 1 scales its adapters otherwise in the update of step 0."""
    lora = RUN[0].policy.lora
    if RUN[0].mesh.rank == 1 and step == 0 and point in ("samples", "updated"):
        lora.config = lora.config.model_copy(
            update={"alpha": 8.0 if point == "samples" else RUN[0].config.actor.lora.alpha}
        )


def scaled_adapters(run: Any) -> None:
    for name, one in run.policy.ddp.module.named_parameters():
        if one.requires_grad and "layers.1.self_attention.linear_qkv" in name:
            one.data.mul_(2)


def drop_token(samples: Any) -> None:
    for name in ("response_ids", "rollout_logprobs", "loss_mask"):
        setattr(samples[4], name, getattr(samples[4], name)[:-1])


@contextlib.contextmanager
def patched(target: str, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """Replace `run.<target>.<name>` by what `make` makes of it. `run` is set by the step."""
    owner = RUN[0]
    for part in filter(None, target.split(".")):
        owner = getattr(owner, part)
    with mock.patch.object(owner, name, make(getattr(owner, name))):
        yield


RUN: list[Any] = []
KEPT: list[Any] = []
ROOT = Path(__file__).resolve().parents[2]


# name -> (the fault, step, stage, the row or tensor that must be named first). As in docs/trust.md.
FAULTS: dict[str, tuple[Any, int, str, str]] = {
    "prompts in another order": (at("prompts", 1, lambda prompts: prompts.reverse()), 1, "prompts", "row 0:"),
    "a template that drops the prompt's last token": (
        sample(3, prompt=lambda p: replace(p, prompt_ids=p.prompt_ids[:-1])), 0, "prompts", "row 3:"),
    "images of two prompts swapped": (at("samples", 0, lambda s: swap(s, "prompt", 2, 3)), 0, "prompts", "row 2:"),
    "an image resized differently": (
        sample(5, prompt=lambda p: replace(p, images=(replace(p.images[0], digest="other"),))), 0, "images", "row 5:"),
    "a rank with another seed": (sample(7, seed=lambda seed: seed + 1), 0, "seeds", "row 7:"),
    "weights changed between update and sync": (at("prompts", 1, lambda _: scaled(UP, 1.01)(RUN[0])), 1, "engine weights",
        "model.layers.2.mlp.gate_proj.weight"),
    "a replica that has missed a sync": (sample(2, version=-1), 0, "sampled by", "row 2:"),
    "a template that drops a token": (at("samples", 1, drop_token), 1, "responses", "row 4:"),
    "a loss mask that is shifted by one": (sample(1, loss_mask=lambda mask: [0, *mask[:-1]]), 0, "responses", "row 1:"),
    "another finish reason": (sample(0, finish_reason="other"), 0, "responses", "row 0:"),
    "temperature missing in the engine's log-probabilities": (
        sample(6, rollout_logprobs=lambda old: [0.9 * one for one in old]), 0, "engine log-probabilities", "row 6:"),
    "a route table shifted by one": (sample(8, routes=lambda r: np.roll(r, 1, axis=0)), 0, "routes", "row 8:"),
    "a reward that reads the clock": (sample(9, reward=lambda r: r + 1e-6), 0, "rewards", "row 9:"),
    "a worker that answers with another row's reward": (
        at("samples", 0, lambda s: swap(s, "reward", *different(s))), 0, "rewards", "row "),
    "a reward that has timed out": (sample(6, reward=math.nan), 0, "rewards", "row 6:"),
    "rewards at steps, one token late": (sample(4, steps=[(1, 0.0)]), 0, "rewards", "row 4:"),
    "a reward that reports the load": (sample(3, reward_metrics=lambda m: {**m, "seconds": 0.1}), 0, "reward parts", "row 3:"),
    "a penalty on one response": (at("batch", 0, lambda b: b.table.reward.__setitem__(2, -1.0)), 0, "scores", "row 2:"),
    "temperature missing in the trainer's pass": (
        lambda: patched("policy", "temperature", lambda t: 1.0), 0, "old log-probabilities", "row "),
    "a reference of other weights": (column("ref_logprobs", 5, lambda t: t * 1.001), 0, "reference log-probabilities", "row 5:"),
    "a correction that is not truncated": (column("correction", 1, lambda t: t * 2), 0, "corrections", "row 1:"),
    "the advantage of one row": (column("advantages", 3, lambda t: t + 1e-3), 0, "advantages", "row 3:"),
    "advantages with the wrong sign": (at("batch", 1, lambda b: b.advantages.neg_()), 1, "advantages", "row "),
    "a denominator per micro-batch": (column("token_weights", 4, lambda t: t * 2), 0, "token weights", "row 4:"),
    "one row twice": (at("batch", 0, lambda b: b.mini_batches[0][0].__setitem__(0, b.mini_batches[0][0][1])), 0,
        "losses 0", "actor/entropy_loss"),
    "gradients that are not cleared": (
        lambda: patched("policy.ddp", "zero_grad_buffer", lambda _: lambda: None), 0, "gradients 0", "model.embed_tokens.weight"),
    "the scale of one gradient": (at("gradients", 0, lambda run: parameter(run, QKV).main_grad.mul_(0.5)), 0,
        "gradients 0", "model.layers.1.self_attn.q_proj.weight"),
    "one element of one gradient": (at("gradients", 0, lambda run: parameter(run, UP).main_grad[3, 5].add_(1e-4)), 0,
        "gradients 0", "model.layers.2.mlp.gate_proj.weight"),
    "a swapped KL direction": (lambda: patched("", "loss", lambda _: loss(kl_loss_type="kl")), 0, "gradients 0", EMBEDDING),
    "an entropy bonus": (lambda: patched("", "loss", lambda _: loss(entropy_coeff=0.1)), 0, "gradients 0", EMBEDDING),
    "a lost first moment": (at("prompts", 1, lambda _: moment("exp_avg", QKV)(RUN[0])), 1, "weights",
        "model.layers.1.self_attn.q_proj.weight"),
    "a lost second moment": (at("prompts", 1, lambda _: moment("exp_avg_sq", UP)(RUN[0])), 1, "weights",
        "model.layers.2.mlp.gate_proj.weight"),
    "another learning rate": (
        lambda: patched("policy.lr_scheduler", "get_lr", lambda old: lambda group: 2 * old(group)), 0, "weights", EMBEDDING),
    "one stale tensor": (at("updated", 0, lambda run: scaled(UP, 0.999)(run)), 0, "weights",
        "model.layers.2.mlp.gate_proj.weight"),
    "one element of one weight": (at("updated", 1, lambda run: parameter(run, QKV).data[0, 0].add_(1e-3)), 1, "weights",
        "model.layers.1.self_attn.q_proj.weight"),
    "random numbers that something takes": (at("updated", 0, lambda run: torch.rand(1)), 0, "random state", "rank 0"),
    "a prompt that is asked twice": (at("prompts", 1, lambda p: p.__setitem__(3, p[2])), 1, "prompts", "row 9:"),
    "a system prompt that one row has": (
        sample(4, prompt=lambda p: replace(p, prompt_ids=(5, *p.prompt_ids))), 0, "prompts", "row 4:"),
    "two samples with one seed": (at("samples", 0, lambda s: setattr(s[1], "seed", s[0].seed)), 0, "seeds", "row 1:"),
    "a sample of weights that nobody has sent": (sample(4, weights_digest="other"), 0, "sampled by", "row 4:"),
    "one token of a response": (sample(5, response_ids=lambda ids: [*ids[:-1], ids[-1] ^ 1]), 0, "responses", "row 5:"),
    "two responses under each other's numbers": (
        at("samples", 0, lambda s: [swap(s, name, 6, 7) for name in ("response_ids", "rollout_logprobs", "loss_mask")]),
        0, "responses", "row 6:"),
    "the engine's log-probabilities one token late": (
        sample(2, rollout_logprobs=lambda old: [0.0, *old[:-1]]), 0, "engine log-probabilities", "row 2:"),
    "a log-probability that the engine has not given": (
        sample(10, rollout_logprobs=lambda old: [*old[:-1], 0.0]), 0, "engine log-probabilities", "row 10:"),
    "another expert at one token": (sample(11, routes=lambda r: r ^ (np.arange(r.size).reshape(r.shape) == 0)), 0,
        "routes", "row 11:"),
    "a failed reward that counts as 0": (
        at("samples", 0, lambda s: [setattr(s[i], "reward", 0.0) for i in different(s)]), 0, "rewards", "row "),
    "old log-probabilities of the step before": (column("old_logprobs", 3, lambda t: t + 1e-3), 0,
        "old log-probabilities", "row 3:"),
    "the engine's log-probabilities as the old ones": (
        at("batch", 0, lambda b: b.old_logprobs.copy_(b.rollout_logprobs)), 0, "old log-probabilities", "row "),
    "rows of the reference permuted": (
        at("batch", 0, lambda b: b.ref_logprobs.copy_(b.ref_logprobs.flip(0))), 0, "reference log-probabilities", "row "),
    "a correction that is left out": (at("batch", 0, lambda b: b.correction.fill_(1)), 0, "corrections", "row "),
    "advantages that are not divided by the deviation": (
        at("batch", 0, lambda b: b.advantages.mul_(0.7)), 0, "advantages", "row "),
    "advantages that are clipped": (at("batch", 0, lambda b: b.advantages.clamp_(-0.5, 0.5)), 0, "advantages", "row "),
    "advantages of other rows": (at("batch", 0, lambda b: b.advantages.copy_(b.advantages.roll(1, 0))), 0, "advantages", "row "),
    "a mean over sequences in place of tokens": (
        at("batch", 0, lambda b: b.token_weights.div_(12 * b.token_weights.sum(1, keepdim=True))), 0, "token weights", "row "),
    "a micro-batch that is left out": (at("batch", 0, lambda b: b.mini_batches[0][0].pop()), 0, "losses 0",
        "actor/entropy_loss"),
    "a gradient with the wrong sign": (at("gradients", 0, lambda run: parameter(run, QKV).main_grad.neg_()), 0,
        "gradients 0", "model.layers.1.self_attn.q_proj.weight"),
    "a gradient that is rounded to bfloat16": (at("gradients", 0, lambda run: rounded(parameter(run, UP).main_grad)), 0,
        "gradients 0", "model.layers.2.mlp.gate_proj.weight"),
    "an optimizer step that is left out": (
        lambda: patched("policy.optimizer", "step", lambda old: lambda: (True, 0.0, 0)), 0, "weights", EMBEDDING),
    "an optimizer step that is made twice": (
        lambda: patched("policy.optimizer", "step", lambda old: lambda: (old(), old())[1]), 0, "weights", EMBEDDING),
    "another weight decay": (
        lambda: patched("policy.lr_scheduler", "get_wd", lambda _: lambda *of: 0.5), 0, "weights", EMBEDDING),
    "another beta of Adam": (lambda: groups(betas=(0.9, 0.5)), 0, "weights", EMBEDDING),
    "a weight that is rounded to bfloat16": (at("updated", 0, lambda run: rounded(parameter(run, UP).data)), 0, "weights",
        "model.layers.2.mlp.gate_proj.weight"),
    "a norm that drifts": (at("updated", 0, lambda run: scaled("decoder.final_layernorm.weight", 1.001)(run)), 0, "weights",
        "model.norm.weight"),
    "one layer's weights in another": (
        at("updated", 0, lambda run: parameter(run, QKV).data.copy_(parameter(run, QKV.replace("1", "2", 1)).data)), 0, "weights",
        "model.layers.1.self_attn.q_proj.weight"),
    "a row that is lost": (at("samples", 0, lambda s: s.pop()), 0, "prompts", "other rows, first sample 2 of prompt 3"),
    "an update that is left out": (at("batch", 0, lambda b: b.mini_batches.clear()), 0, "losses 0", "only in"),
    "a correction that is not computed": (at("batch", 0, lambda b: setattr(b, "correction", None)), 0, "corrections", "only in"),
    "a row without weight": (column("token_weights", 5, lambda t: t * 0), 0, "token weights", "row 5:"),
    "another clip of the gradient": (
        lambda: patched("policy.optimizer.config", "clip_grad", lambda _: 0.01), 0, "weights", EMBEDDING),
    "the reference is the policy": (at("batch", 1, lambda b: b.ref_logprobs.copy_(b.old_logprobs)), 1,
        "reference log-probabilities", "row "),
    "two heads swapped": (at("updated", 0, lambda run: parameter(run, QKV).data.copy_(parameter(run, QKV).data.roll(8, 0))), 0,
        "weights", "model.layers.1.self_attn.q_proj.weight"),
    "a generator that is seeded again": (at("updated", 0, lambda run: torch.manual_seed(5)), 0, "random state", "rank 0"),
}  # fmt: skip

# The same in two tensor-parallel ranks, of which the second one has the fault.
IN_ONE_RANK: dict[str, tuple[Any, int, str, str]] = {
    "one shard that is not synced": (stale_shard, 1, "engine weights", "model.layers.2.mlp.gate_proj.weight"),
    "the gradient of one shard": (at("gradients", 0, lambda run: parameter(run, QKV).main_grad.mul_(1 - run.mesh.rank / 2)), 0,
        "gradients 0", "model.layers.1.self_attn.q_proj.weight"),
    "random numbers that one rank takes": (at("updated", 0, lambda run: torch.rand(run.mesh.rank)), 0, "random state", "rank 1"),
}  # fmt: skip

# The same with adapters.
WITH_LORA: dict[str, tuple[Any, int, str, str]] = {
    "LoRA scale in one rank": (lora_scale, 0, "gradients 0",
        "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"),
    "adapters changed between update and sync": (at("prompts", 1, lambda _: scaled_adapters(RUN[0])), 1, "engine weights",
        "model.layers.1.self_attn.q_proj.weight"),
}  # fmt: skip

# What a checkpoint loses, found by `diff --self` at the resume in step 1.
LOST: dict[str, tuple[Any, str]] = {
    "an optimizer moment lost at a resume": (lambda run: moment("exp_avg", QKV)(run), "optimizer"),
    "a weight changed at a resume": (lambda run: scaled(UP, 1.001)(run), "weights"),
    "a generator not restored at a resume": (lambda run: torch.manual_seed(7), "random state"),
}
ALL_FAULTS = {**FAULTS, **IN_ONE_RANK, **WITH_LORA}
# The first fault of each stage, and what other tests compare; `make soak` has all others.
FIRST = dict.fromkeys([
    *{fault[2]: name for name, fault in reversed(FAULTS.items())}.values(),
    "a worker that answers with another row's reward", "a reward that has timed out", "a template that drops a token",
    "a template that drops the prompt's last token", "a lost first moment", "an optimizer step that is left out",
])  # fmt: skip


def different(samples: Any) -> tuple[int, int]:
    """Two samples of one prompt with different rewards."""
    pairs = (
        (i, j) for i in range(len(samples)) for j in range(i) if samples[i].prompt_index == samples[j].prompt_index
    )
    return next((i, j) for i, j in pairs if samples[i].reward != samples[j].reward)


def loss(**changes: Any) -> Any:
    from grpo_megatron.training.correction import build_loss

    return build_loss(RUN[0].config.actor.model_copy(update=changes), RUN[0].config.algorithm)


def make_steps(run: Any, folder: Path, fault: Any = None, case: int = 0, steps: int = 2) -> None:
    """Make steps from the saved state, with a fault, and write their trace."""
    from grpo_megatron.training.trace import Trace

    RUN[:] = [run]
    run.load_state(folder.parent / "state")
    run.policy.device.seed(1, 0)
    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").write_text(json.dumps(run.config.record(), default=str))
    settings = {"output_dir": folder, "trace": "light" if folder.name == "light" else "full"}
    config = run.effective.model_copy(update={"trainer": run.effective.trainer.model_copy(update=settings)})
    planted: At = lambda point, step, content: None  # noqa: E731
    with contextlib.ExitStack() as faults:
        if fault is not None and fault.__code__.co_argcount == 0:
            faults.enter_context(fault())
        elif fault is not None:
            planted = fault
        run.trace = faults.enter_context(
            contextlib.closing(Trace(config, run.policy, run.placement.provenance, None, 0))
        )
        digest, step = run.trace.gradients, 0
        run.trace.gradients = lambda *update: (planted("gradients", step, run), digest(*update))
        for step in range(steps):
            prompts = [run.prompts[(case + number) % 9] for number in range(4 * step, 4 * step + 4)]
            run._leave_rollout()
            planted("prompts", step, prompts)
            samples = run.sample(prompts)
            for one in samples:  # this model reads neither
                one.routes = np.arange(2 * len(one.response_ids), dtype=np.int8).reshape(-1, 2)
                one.prompt = replace(one.prompt, images=(PromptImage(one.prompt.uid, (1, 1), 0, b""),))
            planted("samples", step, samples)
            batch = run.batch(samples)
            planted("batch", step, batch)
            run.update(batch)
            planted("updated", step, run)
            run.trace.write(step, samples, batch)
            run.metrics.reduce()
            if folder.name in LOST and step == 0:
                run.trace.saved(1)
                run.trace.close()
                LOST[folder.name][0](run)
                run.trace = faults.enter_context(
                    contextlib.closing(Trace(config, run.policy, run.placement.provenance, None, 1))
                )
                break


@ranks()
def make_runs(folder: Path, overrides: list[str], faults: list[str]) -> None:
    """Write the trace of an honest run, and of one with each fault."""
    settings = [*SETTINGS, *overrides, f"trainer.output_dir={folder / 'out'}"]
    with grpo_megatron.open(folder.parent / "run.yaml", settings) as run:
        run.save_state(folder / "state")
        for fault in ("honest", *faults):
            planted, step = ALL_FAULTS[fault][:2] if fault in ALL_FAULTS else (None, 1)
            make_steps(run, folder / fault, planted, steps=step + 1)


def change_step(run: Path, step: int, change: Callable[[dict[str, Leaves]], Any]) -> None:
    """Change the record of a step, with its roots."""
    path, lines = run / f"trace/step_{step:06d}.bin", run / "trace/steps.jsonl"
    file = StepFile(path)
    stages = {n: Leaves(file.nodes(n, 0, 0, file.count(n)), file.numbers(n), tuple(file.terms(n))) for n in file.roots}
    change(stages)
    content, roots = step_content(step, stages, np.array(file.rows), file.uids)
    path.write_bytes(content)
    rows = map(json.loads, lines.read_text().splitlines())
    changed = [{**row, "stages": roots} if row["step"] == step and "stages" in row else row for row in rows]
    lines.write_text("".join(f"{json.dumps(row)}\n" for row in changed))


def traces(folder: Path, *names: str) -> list[TraceFolder]:
    return [TraceFolder(folder / name) for name in names]


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    is_soak = any(item.get_closest_marker("soak") and item.path == request.path for item in request.session.items)
    folder = make_run(tmp_path_factory.mktemp("diff"))
    make_model(folder / "model", "qwen2", **{**SIZES, "num_hidden_layers": 3})  # the faults are in layers 1 and 2
    faults = ["again", "light", *(FAULTS if is_soak else FIRST), *LOST]
    make_runs(1, folder=folder / "one", overrides=["trainer.n_gpus_per_node=1"], faults=faults)
    tp2 = ["actor.megatron.tensor_model_parallel_size=2"]
    make_runs(2, folder=folder / "tp2", overrides=tp2, faults=[*BEYOND_ROUNDING, *IN_ONE_RANK])
    make_runs(2, folder=folder / "lora", overrides=[*tp2, "actor.lora.rank=4"], faults=[*WITH_LORA])
    return folder


@pytest.mark.parametrize(
    "names",
    [
        pytest.param([*FIRST, *IN_ONE_RANK, *WITH_LORA], id="the first of each stage"),
        pytest.param([name for name in FAULTS if name not in FIRST], id="all others", marks=pytest.mark.soak),
    ],
)
def test_every_planted_fault_is_named(runs: Path, names: list[str]) -> None:
    wrong = []
    for name in names:
        _, step, stage, leaf = ALL_FAULTS[name]
        folder = "one" if name in FAULTS else "lora" if name in WITH_LORA else "tp2"
        result = compare_runs(*traces(runs / folder, "honest", name))
        first = result.first
        place = (first.step, first.stage, first.leaves[0].name if first.leaves else first.measured) if first else None
        if place is None or place[:2] != (step, stage) or not place[2].startswith(leaf) or not result.cause:
            wrong.append(f"{name}: {place}, not {(step, stage, leaf)}; {result.cause}")
    assert not wrong, "\n".join(wrong)


def test_what_a_checkpoint_loses_is_named(runs: Path) -> None:
    for name, (_, lost) in LOST.items():
        seams = compare_seams(*traces(runs / "one", name))
        assert [(one.step, one.stage) for one in seams.partings] == [(1, lost)], name


def test_the_page_lists_every_planted_fault() -> None:
    listed = re.findall(r"^\| .+ \| \d+ \| .* \|$", (ROOT / "docs/trust.md").read_text(), re.M)
    table = [(name, step, stage, leaf.rstrip(": ")) for name, (_, step, stage, leaf) in ALL_FAULTS.items()]
    table += [(name, 1, stage, "`diff --self`") for name, (_, stage) in LOST.items()]
    assert listed == [f"| {' | '.join(map(str, row))} |" for row in table] and len(table) >= 60


# Faults in another layout than the honest run's: told from rounding, by these stages.
BEYOND_ROUNDING = {
    "the advantage of one row": "advantages",
    "the scale of one gradient": "gradients 0",
    "temperature missing in the trainer's pass": "old log-probabilities",
    "a denominator per micro-batch": "token weights",
    "an entropy bonus": "gradients 0",
    "a lost first moment": "weights",
}


@pytest.mark.parametrize(
    ("fault", "stage"),
    [
        (
            "an optimizer step that is left out",
            "weights",
        ),  # its size follows from the weights that the run has begun with
        ("a template that drops the prompt's last token", "prompts"),
        ("an image resized differently", "images"),
    ],
)
def test_no_tolerance_explains_it(runs: Path, fault: str, stage: str) -> None:
    result = compare_runs(*traces(runs / "one", "honest", fault), tolerance=True)
    assert result.verdict == "wrong" and result.first and (result.first.step, result.first.stage) == (0, stage)


def test_honest_pairs_raise_no_alarm(runs: Path) -> None:
    """The same run twice is equal. Another layout rounds differently, and a fault in it is still found."""
    assert compare_runs(*traces(runs, "one/honest", "one/again")).verdict == "equal"
    light = compare_runs(*traces(runs, "one/honest", "one/light"))
    assert light.verdict == "equal" and light.notes == [
        "not in both traces, and not compared: gradient norm, gradients"
    ]
    sides = traces(runs, "one/honest", "tp2/honest")
    exact, judged = compare_runs(*sides), compare_runs(*sides, tolerance=True)
    assert exact.verdict == "part" and exact.first and exact.first.stage.startswith(("old", "gradients", "engine log"))
    assert "rounding" in exact.cause and any(change.kind == "layout" for change in exact.changes)
    assert judged.verdict == "explained", judged.partings
    for fault, stage in BEYOND_ROUNDING.items():
        judged = compare_runs(*traces(runs, "one/honest", f"tp2/{fault}"), tolerance=True)
        assert judged.verdict == "wrong" and judged.first and judged.first.stage == stage, (fault, judged.partings)


def test_what_differs_is_named_in_the_order_of_its_likelihood() -> None:
    keys = [
        "actor.optim.lr",
        "algorithm.lam",
        "data.seed",
        "data.train_files a.jsonl",
        "reward.function",
        "rollout.top_p",
        "sources",
    ]
    for stage, first in {
        "prompts": keys[2:4],
        "responses": keys[5:6],
        "rewards": keys[4:5],
        "old log-probabilities": [keys[0], keys[5]],
        "critic losses 1": keys[:2],
    }.items():
        named = likely_first(stage, keys)
        assert named[: len(first)] == first and sorted(named) == keys, stage


def test_the_command(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Text, JSON and page; later differences of other prompts are said to be no consequence; one sentence for bad input."""
    honest, left = runs / "one/honest", tmp_path / "run"
    options = {"left": honest, "json_file": tmp_path / "a.json", "page": tmp_path / "a.html"}
    assert print_diff(DiffOptions(**options, right=runs / "one/a worker that answers with another row's reward")) == 1
    text = capsys.readouterr().out
    assert "first: step 0, rewards" in text and "2 of 12 rows" in text and "no function of the response" in text
    stored = json.loads((tmp_path / "a.json").read_text())
    timed_out = compare_runs(*traces(runs / "one", "honest", "a reward that has timed out"))
    assert timed_out.first and timed_out.first.leaves[0].right == {"reward": None}
    assert stored["verdict"] == "part" and stored["partings"][0]["leaves"][0]["left"]["reward"] >= 0
    assert "<h2>likely cause</h2>" in (tmp_path / "a.html").read_text()
    assert print_diff(DiffOptions(left=honest, right=runs / "tp2/honest", tolerance=1.0)) == 0

    dropped = runs / "one/a template that drops a token"
    file = TraceFolder(honest).file(1)
    assert file is not None
    prompt, index = file.rows[4]
    for number, folder in enumerate((honest, dropped)):
        pieces = [["7 ", -0.5, 0.0], ["+ ", -1.5 - number, 0.0]]
        one = {"index": index, "reward": 1.0, "advantage": None, "tokens": 2, "pieces": pieces, "drawn": True}
        stored = {"step": 1, "groups": [{"uid": file.uids[prompt], "prompt": "", "answer": "", "samples": [one]}]}
        (folder / "report_samples.jsonl").write_text(json.dumps(stored) + "\n")
    assert print_diff(DiffOptions(left=honest, right=dropped)) == 1
    text = capsys.readouterr().out
    assert "from token 1: left [('+ ', -1.5)]" in text and "from token 1: right [('+ ', -2.5)]" in text

    def refuse(change: Callable[[Path], Any], **itself: bool) -> str:
        shutil.rmtree(left, ignore_errors=True)
        shutil.copytree(honest, left)
        change(left)
        with pytest.raises(ConfigError) as error:
            print_diff(DiffOptions(left=left, **(itself or {"right": runs / "one/a lost first moment"})))
        assert "\n" not in str(error.value)
        return str(error.value)

    def edit(path: Path, change: Callable[[bytes], bytes]) -> None:
        path.write_bytes(change(path.read_bytes()))

    assert "is no folder" in refuse(shutil.rmtree)
    assert "has no trace" in refuse(lambda run: shutil.rmtree(run / "trace"))
    with pytest.raises(ConfigError, match=f"name {honest}, which has one"):
        print_diff(DiffOptions(left=honest / "trace", right=honest))
    cut = refuse(lambda run: edit(run / "trace/step_000001.bin", lambda old: old[:-9]))
    assert "step_000001.bin is cut short" in cut
    lines = "trace/steps.jsonl"
    assert "format 0" in refuse(lambda run: edit(run / lines, lambda old: old.replace(b'"format": 2', b'"format": 0')))
    assert "is not of the step" in refuse(
        lambda run: shutil.copy(run / "trace/step_000000.bin", run / "trace/step_000001.bin")
    )
    assert "config.yaml cannot be read" in refuse(lambda run: (run / "config.yaml").unlink())
    assert "no step in common" in refuse(lambda run: edit(run / lines, lambda old: old.splitlines(keepends=True)[0]))
    assert "never resumed" in refuse(lambda run: None, itself=True)
    shutil.copytree(runs / "one/a weight changed at a resume/trace", left / "sft/trace")
    assert print_diff(DiffOptions(left=left, itself=True)) == 1
    assert "in the warm-up the weights after step 0 and at the resume differ" in capsys.readouterr().out
    no_list = lambda old: old.replace(b'"tensors"', b'"tensor"')  # noqa: E731
    assert "no complete line with the facts" in refuse(lambda run: edit(run / lines, no_list))
    no_table = lambda old: old.replace(b'"layout": {', b'"layout": 3, "x": {')  # noqa: E731
    assert "no complete line with the facts" in refuse(lambda run: edit(run / lines, no_table))
    assert "beginning was cut" in refuse(lambda run: edit(run / lines, lambda old: old.partition(b"\n")[2]))
    for one in ("honest", "tp2"):  # other layouts have other random states, also where no leaves are kept
        shutil.rmtree(tmp_path / one, ignore_errors=True)
        shutil.copytree(honest, tmp_path / one)
        for path in (tmp_path / one / "trace").glob("*.bin"):
            path.unlink()
    edit(tmp_path / "tp2" / lines, lambda old: old.replace(b'"tp": 1', b'"tp": 2'))
    edit(tmp_path / "tp2" / lines, lambda old: re.sub(rb'("random state": ")\w+', rb"\g<1>00", old))
    assert compare_runs(*traces(tmp_path, "honest", "tp2")).verdict == "equal"
    shutil.rmtree(left)
    shutil.copytree(honest, left)
    edit(left / lines, lambda old: b"".join(old.splitlines(keepends=True)[:2]))  # step 1 is missing
    result = compare_runs(TraceFolder(left), TraceFolder(honest))
    assert result.verdict == "equal" and "1 more steps, from step 1 on" in result.notes[0]
    wrong: list[tuple[dict[str, Any], str]] = [
        ({}, "name two runs; or one with --self"),
        ({"right": left}, "both runs are"),
    ]
    for arguments, message in [*wrong, ({"right": honest, "page": left}, "in a folder that exists")]:
        with pytest.raises(ConfigError, match=message):
            DiffOptions(left=left, **arguments)
    (left / "trace/step_000000.bin").unlink()  # a difference that is no longer kept is not taken for rounding
    change_step(runs / "one/the advantage of one row", 0, lambda stages: None)
    judged = compare_runs(TraceFolder(left), TraceFolder(runs / "one/the advantage of one row"), tolerance=True)
    assert judged.verdict == "part" and "cannot be judged" in judged.notes[-1]


def test_two_large_steps_are_compared_with_few_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count, wrong, read = 50_000, [7, 33_333], []
    files = []
    for name, changed in (("a", []), ("b", wrong)):
        digests = np.arange(count, dtype=np.uint64)
        digests[changed] += np.uint64(1)
        content, _ = step_content(0, {"seeds": Leaves(digests, np.zeros((count, 0)))}, np.zeros((count, 2)), [])
        (tmp_path / name).write_bytes(content)
        files.append(StepFile(tmp_path / name))
    nodes = StepFile.nodes
    monkeypatch.setattr(StepFile, "nodes", lambda self, *at: (read.append(1), nodes(self, *at))[1])
    assert list(files[0].differing(files[1], "seeds")) == wrong
    assert len(read) <= 2 * 2 * len(level_sizes(count)) < 30  # sides x differences x levels


def test_a_table_that_one_run_lacks_is_one_change() -> None:
    one: dict[str, Any] = {"teachers": {}, "model.path": "a", "actor.n": 1}
    two = {"teachers.math.path": "x", "teachers.math.self": None, "model.path": "b", "actor.n": 1}
    places, teachers = _config_changes(one, two, same_inputs=True)
    assert (places.key, places.effect) == ("model.path", NOTHING)
    assert (teachers.key, teachers.left, teachers.right, teachers.effect) == (
        *("teachers", {}, {"math.path": "x"}, RESULTS),
    )
    three = {**two, "teachers.code.path": "y"}
    assert [(c.key, c.left, c.right, c.effect) for c in _config_changes(three, two, same_inputs=True)] == [
        ("teachers.code", {"path": "y"}, None, RESULTS)
    ]


def test_poisson_tail() -> None:
    """P(X >= 1) = 1 - e^-m, P(X >= 2) = 1 - e^-m (1 + m)."""
    assert poisson_tail(0, 0.5) == 1 and poisson_tail(1, 0.5) == pytest.approx(1 - math.exp(-0.5))
    assert poisson_tail(2, 1e-4) == pytest.approx(0.5e-8, rel=1e-3) and poisson_tail(100, 1.0) == 0
