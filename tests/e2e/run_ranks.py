"""What the ranks of the end-to-end tests run: the real Trainer, with its samples and plans recorded."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import time
import zlib
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from grpo_megatron.config import Config
from grpo_megatron.models.families import FAMILIES

ONE_PER_NODE = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
LLAMA = FAMILIES["llama"]  # to be named as a family of the user's own


def settings(root: Path, output_dir: Path, world: int, **sections: dict[str, Any]) -> dict[str, Any]:
    """The config of a tiny complete run on `world` ranks. `sections` replace its values key by key."""
    base: dict[str, dict[str, Any]] = {
        "model": {"path": str(root / "model"), "dtype": "float32"},
        "data": {
            "task": "arithmetic",
            "train_files": [str(root / "data/train.jsonl")],
            "val_files": [str(root / "data/val.jsonl")],
            "val_max_samples": 6,
            "apply_chat_template": False,
            "train_batch_size": 6,
            "max_prompt_length": 24,
            "max_response_length": 12,
        },
        "actor": {
            "optim": {"lr": 2e-3},
            "kl_loss_coef": 0.05,
            "ppo_mini_batch_size": 3,
            "ppo_epochs": 2,
            "ppo_max_token_len_per_gpu": 160,
        },
        "rollout": {
            "n": 3,
            "enforce_eager": True,
            "engine_options": {"kv_cache_gib": 0.05},
            "val_kwargs": {"temperature": 1.0},
        },
        "reward": {"function": "tests.e2e.rewards:length_reward"},
        "trainer": {
            "total_training_steps": 2,
            "test_freq": -1,
            "val_before_train": False,
            "save_freq": -1,
            "save_hf_at_end": False,
            "n_gpus_per_node": world,
            "device": "cpu",
            "output_dir": str(output_dir),
            "logger": ["jsonl"],
        },
    }
    for section, values in sections.items():
        base.setdefault(section, {}).update(values)
    if not base["actor"].get("use_kl_loss", True):
        del base["actor"]["kl_loss_coef"]  # refused: it would have no effect
    return base


def train(
    raw: dict[str, Any],
    keep_weights: bool = True,
    kill_in_step: int | None = None,
    profiled: range | None = None,
    closes: bool = True,
) -> dict[str, Any]:
    """Run the Trainer. Returns this rank's samples per step, and the final weights and optimizer state.

    `kill_in_step`: the process ends without a word in the middle of that step's trajectories, or behind its samples.
    """
    from grpo_megatron.checks.validate import validate
    from grpo_megatron.trainer import Trainer

    config = Config.model_validate(raw)
    trainer = Trainer(config, validate(config, int(os.environ["WORLD_SIZE"])), profiled)
    run: Any = trainer.parts
    drawn: dict[int, list[Any]] = {}
    collect = trainer.collect

    def recorded(step: int) -> Any:
        if step == kill_in_step and config.rollout.multi_turn.environment is not None:
            _exit_at_an_answer(run.placement.generator.answers, 4)
        samples = collect(step)
        if step == kill_in_step:
            os._exit(9)
        drawn[step] = [(*_content(s), s.rollout_logprobs, s.reward) for s in samples]
        return samples

    trainer.collect = recorded  # type: ignore[method-assign]
    result: dict[str, Any] = {"samples": drawn, "rank": run.mesh.rank, "leader": run.mesh.is_replica_leader}
    if config.rollout.multi_turn.environment is not None and run.placement.generator is not None:
        result["log"] = _engine_log(run.placement.generator.engine)
    close = run.close

    def keep_then_close() -> None:
        if keep_weights:
            result["weights"] = {n: t.clone() for bucket in run.policy.hf_weights(1) for n, t in bucket}
            result["optimizer"] = [
                {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in state.items()}
                for one in getattr(run.policy.optimizer, "chained_optimizers", [run.policy.optimizer])
                for state in one.optimizer.state.values()
            ]
            result["first_step"] = run.first_step
        if closes:
            close()

    run.close = keep_then_close
    trainer.run()
    return result


def train_in_roles(
    raw: dict[str, Any],
    delays: int | None = None,
    die: tuple[int, str, int] | None = None,
    nodes_of_one: bool = False,
) -> Any:
    """`train` on the ranks that train, with the weights of each version; None on those that sample.

    `delays`: a seed of random pauses, before every phase of either role and every message between them. `die`: (rank of
    the run, phase, n), at whose n-th beginning that rank ends without a word.
    """
    from grpo_megatron.checks.validate import validate
    from grpo_megatron.parallel.bridge import Bridge
    from grpo_megatron.parallel.heartbeat import Heartbeat
    from grpo_megatron.training.roles import RolloutRanks
    from grpo_megatron.training.rollout_rank import RolloutRank

    if nodes_of_one:
        os.environ |= ONE_PER_NODE
    enter, rank, versions, begun = Heartbeat.phase, int(os.environ["RANK"]), {}, Counter[str]()
    pauses = random.Random(None if delays is None else 100 * delays + rank)

    def pause(longest: float) -> None:
        time.sleep(0.0 if delays is None else pauses.choice([0, 0, longest / 10, longest]))

    def paused(self: Heartbeat, name: str) -> Any:
        begun[name] += 1
        if die == (rank, name, begun[name]):
            os._exit(9)
        pause(0.2)
        return enter(self, name)

    def slow(method: Any) -> Any:
        def call(*args: Any, **named: Any) -> Any:
            pause(0.04)
            return method(*args, **named)

        return call

    def recorded(self: RolloutRanks, version: int, *attested: Any) -> None:
        send(self, version, *attested)
        versions[version] = {n: t.clone() for bucket in self.policy.hf_weights(1) for n, t in bucket}

    config, world, send = Config.model_validate(raw), int(os.environ["WORLD_SIZE"]), RolloutRanks._send_weights
    with contextlib.ExitStack() as patches:
        patches.enter_context(mock.patch.object(Heartbeat, "phase", paused))
        patches.enter_context(mock.patch.object(RolloutRanks, "_send_weights", recorded))
        for name in ("send", "receive", "post"):  # a slow network
            patches.enter_context(mock.patch.object(Bridge, name, slow(getattr(Bridge, name))))
        if rank < world - config.num_rollout_ranks:
            return {**train(raw), "versions": versions}
        RolloutRank(config, validate(config, world)).run()
        return None


def _content(sample: Any) -> tuple[Any, ...]:
    """What does not depend on the layout: everything but the logical times of turns."""
    turns = [(turn.start, turn.end, turn.kind, turn.version) for turn in sample.turns]
    rewards, metrics = sample.turn_rewards, sample.trajectory_metrics
    images = _images(sample.prompt.images)
    ids = sample.prompt.prompt_ids, sample.response_ids, sample.loss_mask, images
    return sample.prompt.uid, sample.index, *ids, turns, sample.status, sample.finish_reason, rewards, metrics


def _images(images: Any) -> list[tuple[str, int, int]]:
    return [(image.digest, image.first, zlib.crc32(image.pixels)) for image in images]


def _engine_log(engine: Any) -> list[tuple[tuple[Any, ...], tuple[int, ...]]]:
    """Records what the engine is given (with its images, if there are any) and gives, from now on, in no order."""
    asked: dict[str, tuple[Any, ...]] = {}
    log: list[tuple[tuple[Any, ...], tuple[int, ...]]] = []
    submit, poll = engine.submit, engine.poll

    def logged_submit(key: str, request: Any, version: int) -> None:
        asked[key] = (*request.prompt_ids, *_images(request.images))
        submit(key, request, version)

    def logged_poll() -> Any:
        finished = poll()
        log.extend((asked[key], tuple(completion.response_ids)) for key, completion in finished)
        return finished

    engine.submit, engine.poll = logged_submit, logged_poll
    return log


def _exit_at_an_answer(answers: Any, count: int) -> None:
    take, taken = answers.take, []

    def dying(trajectories: Any) -> Any:
        taken.append(len(trajectories))
        if len(taken) == count:
            os._exit(9)
        return take(trajectories)

    answers.take = dying


def all_samples(results: list[dict[str, Any]]) -> dict[int, list[Any]]:
    """Step -> the samples of all engine replicas, ordered."""
    steps = results[0]["samples"]
    return {
        step: sorted(sample for result in results if result["leader"] for sample in result["samples"][step])
        for step in steps
    }


def train_in_turn(raws: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """`train_many` for runs without an engine. Returns what `train` does, per run."""
    return train_many(raws, train)


def train_many(raws: list[dict[str, Any]], one: Any = None) -> list[dict[str, Any]]:
    """Train one config after the other in one world with one engine, because starting these takes most of the time.

    Returns what `one` does for each; by default the tables and plans of its steps, this rank's token weights with their
    masks, and the final weights.
    """
    from grpo_megatron import run as run_module
    from grpo_megatron.parallel import mesh as mesh_module
    from grpo_megatron.sync import attest
    from grpo_megatron.training import colocation, placement

    built: dict[str, Any] = {}

    def once(name: str, build: Any) -> Any:
        def cached(*args: Any, **kwargs: Any) -> Any:
            if name not in built:
                built[name] = build(*args, **kwargs)
            return built[name]

        return cached

    with (
        mock.patch.object(colocation, "build_engine", once("engine", colocation.build_engine)),
        mock.patch.object(placement, "build_mesh", once("mesh", placement.build_mesh)),
        mock.patch.object(run_module, "destroy_mesh", lambda: None),
        mock.patch.object(attest, "LENGTH", 32),  # the engine is that of the first run, and no longer
    ):
        results = [(one or _recorded)(raw) for raw in raws]
    if "engine" in built:
        built["engine"].shutdown()
    mesh_module.destroy_mesh()
    return results


def train_and_resume(raws: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """`train` for each config, with one engine. One with "resumed" continues the checkpoint of the run before, at that step."""

    outputs: list[Path] = []

    def one(raw: dict[str, Any]) -> dict[str, Any]:
        outputs.append(Path(raw["trainer"]["output_dir"]))
        if (step := raw.pop("resumed", None)) is not None:
            before, after = (output / f"checkpoints/step_{step:06d}" for output in outputs[-2:])
            if os.environ["RANK"] == "0":
                shutil.copytree(before, after)
            torch.distributed.barrier()
        return train(raw, closes=False)

    return train_many(raws, one)


def _recorded(raw: dict[str, Any]) -> dict[str, Any]:
    from grpo_megatron.checks.validate import validate
    from grpo_megatron.trainer import Trainer

    config = Config.model_validate(raw)
    trainer = Trainer(config, validate(config, int(os.environ["WORLD_SIZE"])))
    seen: dict[str, Any] = {"tables": [], "plans": [], "token_weights": []}
    log = trainer.log

    def record(step: int, samples: Any, batch: Any) -> None:
        seen["tables"].append(batch.table)
        seen["plans"].append(batch.plan)
        seen["token_weights"].append((batch.token_weights, batch.loss_mask))
        log(step, samples, batch)

    trainer.log = record  # type: ignore[method-assign]
    trainer.parts.close = lambda: None  # type: ignore[method-assign]
    trainer.run()
    seen["weights"] = {name: t.clone() for bucket in trainer.parts.policy.hf_weights(1) for name, t in bucket}
    return seen
