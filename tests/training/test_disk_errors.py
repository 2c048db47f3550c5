"""A disk that refuses on one rank is a RankError on every rank, wherever in a save it refuses; the next save works.

Two data-parallel ranks; each case makes the disk of one rank refuse one file. A rank that leaves the common sequence of
collectives shows as a timeout of the other rank. Rank 0 writes common.pt, .metadata and metadata.json of each of the two
states, pairs.json of the reward model, trainer.json and the manifest; both ranks write *.distcp files and hash them.
"""

from __future__ import annotations

import builtins
import contextlib
import errno
import io
import json
import os
import pickle
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests import tiny
from tests.stored import Bomb
from tests.worlds import ranks

Failure = tuple[int, str, str]  # rank, part of the path, modes of opening

STATE: list[Failure] = [
    (0, "common.pt", "w"),
    (0, "__0_", "wx"),
    (1, "__1_", "wx"),
    (0, ".metadata", "wx"),
    (0, "metadata.json", "wx"),
]
REWARD_MODEL: list[Failure] = [
    (0, "reward_model", "m"),
    (0, "pairs.json", "wx"),
    *((rank, f"reward_model/state/{part}", modes) for rank, part, modes in STATE),
]
CHECKPOINT: list[Failure] = [
    (0, ".partial", "m"),
    *STATE,
    *REWARD_MODEL,
    (0, "__0_", "r"),
    (1, "__1_", "r"),
    (0, "trainer.json", "wx"),
    (0, "manifest.json", "wx"),
]
EXPORT: list[Failure] = [(0, "hf.partial", "m"), (0, "index.json", "w"), (0, "config.json", "r")]


# -- The programs of the ranks -----------------------------------------------------------------------------------------

TIMEOUT_S = 60.0  # of a collective that the other rank does not reach


@contextlib.contextmanager
def refusing(part: str, modes: str) -> Iterator[None]:
    """Opening a path that contains `part`, in a mode that begins with one of `modes`, fails. "m": creating a folder."""

    def wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
        def opened(path: Any, mode: Any = "r", *args: Any, **kwargs: Any) -> Any:
            check(path, mode)
            return function(path, mode, *args, **kwargs)

        return opened

    def check(path: Any, mode: str) -> None:
        if mode[0] in modes and not isinstance(path, int) and part in str(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    make_folder, torch_save = os.mkdir, torch.save

    def mkdir(path: Any, *args: Any, **kwargs: Any) -> None:
        check(path, "m")
        make_folder(path, *args, **kwargs)

    def save(content: Any, file: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(file, str | Path) and part in str(file) and "w" in modes:
            raise RuntimeError(f"[enforce fail at inline_container.cc:672] . unexpected pos 640 vs 534: {file}")
        torch_save(content, file, *args, **kwargs)

    with contextlib.ExitStack() as stack:
        for owner in (builtins, io):
            stack.enter_context(mock.patch.object(owner, "open", wrapped(open)))
        stack.enter_context(mock.patch.object(os, "mkdir", mkdir))
        stack.enter_context(mock.patch.object(torch, "save", save))
        yield


def _build(folder: Path) -> tuple[Any, Any]:
    """A policy and a reward model that learns, on two data-parallel ranks."""
    from grpo_megatron.config import OptimConfig
    from grpo_megatron.device import Device
    from grpo_megatron.parallel.mesh import build_mesh
    from grpo_megatron.training.reward_model import LearningReward
    from tests.models import policies, test_reward_model

    device = Device("cpu")
    mesh = build_mesh(device, tp=1, pp=1, rollout_tp=1, timeout_s=TIMEOUT_S)
    policies.world = lambda *layout: (device, mesh)  # type: ignore[assignment]
    policy = policies.build(folder)
    policy.set_optimizer(OptimConfig(), 10)
    model = test_reward_model.build(folder, policies.LAYOUTS["DP2"])
    config = test_reward_model.model_config(folder, {"steps": 1, "train_batch_size": 4, "history_size": 8})
    return policy, LearningReward(config, model, model.actor, iteration_steps=2, total_steps=8, seed=5)


def _outcome(action: Callable[[], Any], part: str, modes: str) -> str:
    """What `action` raises, or "saved"."""
    from grpo_megatron.parallel.mesh import RankError

    try:
        with refusing(part, modes) if part else contextlib.nullcontext():
            action()
    except RankError as error:
        return f"RankError: {error}"
    return "saved"


@ranks()
def save_checkpoint(folder: Path, out: Path, failures: list[tuple[int, str, str]]) -> list[tuple[str, list[str]]]:
    """(outcome, names in the checkpoint folder) of `Checkpoints.save` for each failure, then without one."""
    from grpo_megatron.config import Config
    from grpo_megatron.training.checkpoint import Checkpoints

    policy, reward = _build(folder)
    config = Config.model_validate({"model": {"path": folder}})
    checkpoints = Checkpoints(out, policy.mesh, keep=1)
    outcomes = []
    for number, (rank, part, modes) in enumerate([*failures, (-1, "", "")]):
        here = part if rank == policy.mesh.rank else ""

        def save(step: int = number + 1) -> None:
            checkpoints.save(step, policy, config, parts=[reward])

        outcome = _outcome(save, here, modes)
        policy.mesh.barrier()
        outcomes.append((outcome, sorted(path.name for path in checkpoints.root.glob("step_*"))))
        policy.mesh.barrier()
    background = _save_in_background(policy, reward, config, out / "background")
    return [
        *outcomes,
        background,
        *(_load_bomb(checkpoints, policy, reward, part) for part in ("reward_model/state", "state")),
    ]


def _save_in_background(policy: Any, reward: Any, config: Any, out: Path) -> dict[str, Any]:
    """Step 1 at once, then step 2, of the same state, by a thread that is held until the weights have changed; then errors."""
    from grpo_megatron.models.weights.sharded_state import ShardedWrite
    from grpo_megatron.training.checkpoint import Checkpoints

    Checkpoints(out, policy.mesh, keep=None).save(1, policy, config, parts=[reward])
    checkpoints = Checkpoints(out, policy.mesh, keep=1, in_background=True)
    gate, write = threading.Event(), ShardedWrite.write

    def held(self: ShardedWrite) -> None:
        gate.wait()
        write(self)

    def names() -> list[str]:
        policy.mesh.barrier()
        found = sorted(path.name for path in checkpoints.root.iterdir())
        policy.mesh.barrier()
        return found

    with mock.patch.object(ShardedWrite, "write", held):
        final = checkpoints.save(2, policy, config, parts=[reward])
        checkpoints.poll()
        seen: dict[str, Any] = {"while it waits": (names(), checkpoints.last)}
        for model in (policy, reward.model):
            for parameter in model.ddp.parameters():
                parameter.data.add_(1.0)
        digests = _digests(checkpoints.root / "step_000001")
        gate.set()
        checkpoints.wait()
        seen["at the end"] = (final == checkpoints.last, names())
    seen["same"] = (digests, _digests(final))
    for rank, part in ((1, "__1_"), (0, ".metadata")):
        here = part if rank == policy.mesh.rank else ""
        seen[part] = (_outcome(lambda: _save_and_wait(checkpoints, policy, config), here, "wx"), names())
    return seen


def _save_and_wait(checkpoints: Any, policy: Any, config: Any) -> None:
    """The error of the thread does not come from `save`."""
    checkpoints.save(3, policy, config)
    checkpoints.wait()


def _digests(checkpoint: Path) -> dict[str, str]:
    """File -> sha256, of the tensors and of the states that Megatron keeps beside them."""
    files = json.loads((checkpoint / "manifest.json").read_text())["files"]
    return {name: entry["sha256"] for name, entry in files.items() if name.endswith((".distcp", ".pt"))}


def _load_bomb(checkpoints: Any, policy: Any, reward: Any, part: str) -> tuple[str, list[str]]:
    """The outcome of loading the last checkpoint with a table of contents that runs code, and the file that it makes."""
    exploded = checkpoints.root / "exploded"
    if policy.mesh.rank == 0:
        (checkpoints.last / part / ".metadata").write_bytes(pickle.dumps(Bomb(exploded)))
    policy.mesh.barrier()
    outcome = _outcome(lambda: checkpoints.load(checkpoints.last, policy, [reward]), "", "")
    return outcome, [exploded.name] if exploded.exists() else []


@ranks()
def export(folder: Path, out: Path, failures: list[tuple[int, str, str]]) -> list[tuple[str, list[str]]]:
    """(outcome, names in `out`) of `save_hf` for each failure, then without one. Rank 0 has a limit on file sizes."""
    import resource

    from grpo_megatron.models.weights.hf_folder import save_hf

    policy, _ = _build(folder)
    outcomes = []

    def save() -> None:
        stream = ([tensor] for bucket in policy.hf_weights(1) for tensor in bucket)  # one tensor per bucket
        save_hf(stream, folder, folder, out / "hf", policy.mesh, shard_bytes=1 << 16)

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for rank, part, modes in [*failures, (0, "", "limit"), (-1, "", "")]:
        here = rank == policy.mesh.rank
        if here and modes == "limit":
            resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
        outcome = _outcome(save, part if here else "", modes)
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        policy.mesh.barrier()
        outcomes.append((outcome, sorted(path.name for path in out.iterdir())))
        policy.mesh.barrier()
    return outcomes


# -- Tests -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_model(tmp_path_factory.mktemp("disk") / "model", num_hidden_layers=1)


def check(outcome: str, failure: Failure) -> None:
    rank = failure[0]
    assert outcome.startswith("RankError: ") and f"rank {rank}: cannot write" in outcome, (failure, outcome)
    assert "No space left on device" in outcome or ("GiB free" in outcome and "enforce fail" in outcome), (
        failure,
        outcome,
    )
    assert f"rank {1 - rank}:" not in outcome, (failure, outcome)


@pytest.mark.slow
def test_a_checkpoint_with_a_reward_model(model: Path, tmp_path: Path) -> None:
    """No failure leaves a checkpoint behind. A checkpoint whose table of contents runs code is refused on every rank.

    In the background, the files of a save are those of one at the same place of the run, whatever the weights are meanwhile.
    """
    first, second = save_checkpoint(2, folder=model, out=tmp_path, failures=CHECKPOINT, timeout_s=400)
    assert first == second
    for (outcome, names), failure in zip(first, CHECKPOINT, strict=False):
        check(outcome, failure)
        assert names == [], failure
    assert first[len(CHECKPOINT)] == ("saved", [f"step_{len(CHECKPOINT) + 1:06d}"])
    background = first[-3]
    assert background["while it waits"] == ([".step_000002.partial", "step_000001"], None)
    assert background["at the end"] == (True, ["step_000002"])
    before, copied = background["same"]
    assert before == copied and len(before) == 10  # two states, each with common.pt and two files of each rank
    for failure in ((1, "__1_", "wx"), (0, ".metadata", "wx")):
        outcome, names = background[failure[1]]
        check(outcome, failure)
        assert names == [".step_000003.partial", "step_000002"]
    for outcome, exploded in first[-2:]:
        assert outcome.startswith("RankError: rank 0, 1: cannot read checkpoint") and "is not plain data" in outcome
        assert exploded == []


def test_an_export(model: Path, tmp_path: Path) -> None:
    """The last failure is a real one, a limit on the size of files, which safetensors reports in its own way."""
    first, second = export(2, folder=model, out=tmp_path, failures=EXPORT, timeout_s=400)
    assert first == second
    for (outcome, names), failure in zip(first, EXPORT, strict=False):
        check(outcome, failure)
        assert names == [], failure
    assert first[-2][0].startswith("RankError: rank 0: cannot write") and "File too large" in first[-2][0]
    assert first[-2][1] == [] and first[-1] == ("saved", ["hf"])
