"""A world with a live engine. It is started once, then runs all its checks in turn and reports each by name."""

from __future__ import annotations

import contextlib
import os
import random
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from grpo_megatron.config import RolloutConfig
from grpo_megatron.device import Device
from grpo_megatron.models.architecture import Architecture
from grpo_megatron.models.families import read_architecture
from grpo_megatron.models.weights.stream import engine_tensors
from grpo_megatron.parallel.mesh import build_mesh
from grpo_megatron.rollout.build import build_engine
from grpo_megatron.rollout.engine import Completion, Request, sample_seed
from grpo_megatron.rollout.vllm.process import UNUSED_BY_VLLM
from tests.rollout import tiny


class World:
    """What a check gets: an engine, and random models of one kind whose weights can be loaded."""

    max_model_len, eos = tiny.MAX_MODEL_LEN, tuple(tiny.EOS)

    def __init__(self, kind: str, folder: str, tp: int, facts: dict[str, Any]) -> None:
        self.kind, self.folder = kind, folder
        self.device = Device("cpu")
        self.mesh = build_mesh(self.device, tp=1, pp=1, rollout_tp=tp)
        self.models = {seed: tiny.model(kind, seed) for seed in (1, 2)}
        self.tensors = engine_tensors(read_architecture(Path(folder)), tp, reads_shards=True)
        own, foreign = leftover(os.environ["MASTER_PORT"]), leftover(f"1{os.environ['MASTER_PORT']}")
        cache = Path(folder) / f"vllm_{os.environ['RANK']}"
        os.environ["VLLM_CACHE_ROOT"] = str(cache)  # empty, as on a new machine
        before = host_state()
        facts["own_leftover_before"] = own.exists()
        self.mesh.barrier()
        try:
            self.engine = self.build()
            facts["own_leftover_after"] = own.exists() and own.read_bytes() == LEFT
            facts["foreign_leftover_after"] = foreign.exists()
            facts["names_contain_the_port"] = os.environ["VLLM_DIST_IDENT"] == os.environ["MASTER_PORT"]
        finally:
            self.mesh.barrier()
            foreign.unlink(missing_ok=True)
        facts["cached_classes"] = [path.name for path in cache.rglob("*.json")]
        facts["unused_packages"] = [name for name in UNUSED_BY_VLLM if name in sys.modules]
        after = host_state()
        facts["host_changes"] = [key for key in before if before[key] != after[key]]

    def build(self, **kwargs: Any) -> Any:
        return build_engine(
            RolloutConfig(tensor_model_parallel_size=self.mesh.rollout_tp, **kwargs),
            self.folder,
            self.mesh,
            self.device,
            dtype="float32",
            max_model_len=self.max_model_len,
            eos_token_ids=list(self.eos),
            tensors=self.tensors,
        )

    def architecture(self) -> Architecture:
        return read_architecture(Path(self.folder))

    def push(self, seed: int, version: int) -> Any:
        """Load the weights of model `seed` into the engine. Returns the model."""
        self.engine.load_weights(iter(tiny.buckets(self.models[seed])), version)
        return self.models[seed]

    def generate(self, requests: list[Request]) -> list[Completion]:
        assert self.engine.version is not None
        return self.engine.generate(requests, self.engine.version)

    def assert_samples_from(self, model: Any, requests: list[Request]) -> None:
        """The engine's log-probabilities, of its own samples and of the same text as input, equal the model's."""
        completions = self.generate(requests)
        drawn = [value for completion in completions for value in completion.logprobs]
        expected = [
            tiny.logprobs(model, list(r.prompt_ids), c.response_ids, r.temperature)
            for r, c in zip(requests, completions, strict=True)
        ]
        tiny.assert_close(drawn, torch.cat(expected))
        text = [[*r.prompt_ids, *c.response_ids] for r, c in zip(requests, completions, strict=True)]
        recomputed = [value for sequence in self.engine.logprobs(text) for value in sequence]
        tiny.assert_close(recomputed, torch.cat([tiny.logprobs(model, ids[:1], ids[1:]) for ids in text]))


def requests(count: int = 12, **kwargs: Any) -> list[Request]:
    """Prompts of several lengths, a seed for each."""
    return [
        Request(
            tuple((7 * i + 3 * t + 20) % tiny.VOCAB for t in range(1 + i % 5)),
            sample_seed(0, 0, f"prompt {i}", 0),
            **{"max_tokens": 16, **kwargs},
        )
        for i in range(count)
    ]


def raises(error: type[BaseException], words: str, call: Callable[[], Any]) -> None:
    """`call` raises `error` with `words`. If it hangs instead, the world's deadline ends it."""
    with pytest.raises(error, match=words):
        call()


# -- one rank's life ---------------------------------------------------------------------------------------------------


def serve(
    kind: str, folder: str, tp: int, checks: list[Callable[[World], None]], meet: tuple[Path, Path] | None = None
) -> dict[str, Any]:
    """Build the engine and run the checks. Per check None or its traceback; then facts about the host.

    `meet`: (this job's file, another job's file). This job creates its file when its engine works, and runs its checks
    after the other job's file exists. Both engines are then alive at the same time.
    """
    facts: dict[str, Any] = {}
    with _console() as console:
        world = World(kind, folder, tp, facts)
        world.push(1, 0)
        facts["samples"] = world.generate(requests())
    facts["console"] = console()
    if meet is not None:
        _meet(*meet)
    return {"reports": run_checks(world, checks), **facts}


def run_checks(world: World, checks: list[Callable[[World], None]]) -> dict[str, str | None]:
    """Per check None or its traceback."""
    reports: dict[str, str | None] = {}
    for check in checks:
        try:
            check(world)
            reports[check.__name__] = None
        except Exception:
            reports[check.__name__] = traceback.format_exc()
    return reports


def _meet(own: Path, other: Path, timeout_s: float = 300.0) -> None:
    own.touch()
    deadline = time.monotonic() + timeout_s
    while not other.exists():
        assert time.monotonic() < deadline, f"the other job has not created {other}"
        time.sleep(0.05)


@contextlib.contextmanager
def _console() -> Iterator[Callable[[], str]]:
    """Everything that this process writes to file descriptors 1 and 2. It is printed if the block fails."""
    with tempfile.TemporaryFile("w+") as file:
        kept = [os.dup(1), os.dup(2)]
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        text = ""
        try:
            yield lambda: text
        except BaseException:
            file.seek(0)
            os.write(kept[1], file.read().encode())
            raise
        finally:
            os.dup2(kept[0], 1)
            os.dup2(kept[1], 2)
            file.seek(0)
            text = file.read()


def rng_state() -> list[bytes]:
    """The states of the three random generators, in a form that can be compared."""
    numpy = np.random.get_state()
    return [repr(random.getstate()).encode(), repr(numpy).encode(), torch.get_rng_state().numpy().tobytes()]


def host_state() -> dict[str, Any]:
    """What building an engine must leave unchanged in its process."""
    return {
        "rng": rng_state(),
        "LOCAL_WORLD_SIZE": os.environ.get("LOCAL_WORLD_SIZE"),
        "LD_PRELOAD": os.environ.get("LD_PRELOAD"),
        "num_threads": torch.get_num_threads(),
        "set_num_threads": torch.set_num_threads,
        "grad": torch.is_grad_enabled(),
        "dtype": torch.get_default_dtype(),
    }


LEFT = b"left by a killed run"


def leftover(port: str, ranks: str = "0-1") -> Path:
    """Shared memory as a killed run on `port` leaves it, under the name that vLLM will create.

    vLLM's AVX-512 build would refuse to start with it. Other builds do not use it: there only the removal is tested.
    """
    path = Path(f"/dev/shm/{port}-tp:0-[{ranks}]-cpushm_0")
    path.write_bytes(LEFT)
    return path
