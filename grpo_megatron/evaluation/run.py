"""Run: the plan's samples, drawn on the training engine by every rank of a world, into the ledger.

Blocks of `tp` ranks answer batches of requests; batches are dealt to blocks in turn, and blocks never wait for each
other before the end of a task. A batch that is complete in the ledger is not drawn again; one that is not is drawn
whole, with the composition that it had.
"""

from __future__ import annotations

import fcntl
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_megatron.config import ConfigError, RolloutConfig
from grpo_megatron.convert import ConvertError
from grpo_megatron.device import Device
from grpo_megatron.evaluation import weights
from grpo_megatron.evaluation.ledger import GREEDY, Ledger, LedgerEntry
from grpo_megatron.evaluation.prompting import cut, stop_token_ids
from grpo_megatron.evaluation.settings import RUN_FILE, EvaluationSettings, Selected
from grpo_megatron.models.families import hf_shapes
from grpo_megatron.parallel.mesh import Mesh, RankError, build_mesh, destroy_mesh
from grpo_megatron.rollout.build import build_engine
from grpo_megatron.rollout.engine import Completion, Request, RolloutEngine, sample_seed
from grpo_megatron.storage.atomic import write_file
from grpo_megatron.types import Prompt

VERSION = 0  # of the weights: there is only one
BUCKET_BYTES = 512 << 20
TIMEOUT_S = 7 * 24 * 3600.0  # blocks wait for the slowest at the end of a task
REPORT_EVERY_S = 10.0


@dataclass(frozen=True)
class EngineOptions:
    """How the numbers are drawn, none of which decides them."""

    tp: int = 1
    device: str = "auto"
    batch_size: int = 2048  # requests between two writes of the ledger
    max_num_seqs: int = 256
    kv_cache_gib: int = 1
    gpu_memory_utilization: float = 0.9


def is_complete(plan: EvaluationSettings) -> bool:
    """Whether every sample is in the ledger: then no engine is needed."""
    return all(set(s.keys()) <= Ledger(plan.options.output, s.name).read().keys() for s in plan.selected)


@contextmanager
def claimed(output: Path) -> Iterator[None]:
    """Hold OUT for this process. Raises ConfigError when another evaluation has it."""
    output.mkdir(parents=True, exist_ok=True)
    with (output / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError(
                f"--output {str(output)!r} is in use by another evaluation; wait for it, or choose another folder"
            ) from error
        yield


def remember(plan: EvaluationSettings) -> None:
    """Write what decides the numbers to OUT/run.json, beside the tasks that were there."""
    path = plan.options.output / RUN_FILE
    identity = plan.identity()
    if path.exists():
        identity["tasks"] = {**json.loads(path.read_text())["tasks"], **identity["tasks"]}
    write_file(path, json.dumps(identity, indent=1, sort_keys=True) + "\n")


def draw(plan: EvaluationSettings, how: EngineOptions) -> None:
    """Collective over the world that the environment describes: draw what is missing.

    Raises RankError on every rank when one fails before drawing.
    """
    device = Device(how.device)  # type: ignore[arg-type]
    mesh = build_mesh(device, tp=1, pp=1, rollout_tp=how.tp, seed=plan.options.seed, timeout_s=TIMEOUT_S)
    engine = _engine(plan, how, mesh, device)
    for (
        selected
    ) in plan.selected:  # after a failure other ranks may not come here: engine and groups are left to the exit
        _draw_task(plan, selected, how, engine, mesh)
    engine.shutdown()
    destroy_mesh()


def _engine(plan: EvaluationSettings, how: EngineOptions, mesh: Mesh, device: Device) -> RolloutEngine:
    rollout = RolloutConfig(
        seed=plan.options.seed % 2**31,
        tensor_model_parallel_size=how.tp,
        gpu_memory_utilization=how.gpu_memory_utilization,
        engine_options={"kv_cache_gib": how.kv_cache_gib},
        max_num_seqs=how.max_num_seqs,
        max_num_batched_tokens=max(8192, how.max_num_seqs),
        free_cache_engine=False,  # nobody else wants the memory
        engine_kwargs=plan.options.engine_kwargs,
    )
    engine = build_engine(
        rollout,
        plan.source.hf_folder,
        mesh,
        device,
        dtype=plan.dtype,
        max_model_len=plan.max_model_len,
        eos_token_ids=plan.eos_token_ids,
        expected=hf_shapes(plan.source.arch),
    )
    try:
        engine.load_weights(weights.stream(plan.source, plan.dtype, device.torch_device, BUCKET_BYTES), VERSION)
    except ConvertError as error:
        raise RankError(f"cannot read the weights: {error}") from error
    return engine


def _draw_task(
    plan: EvaluationSettings, selected: Selected, how: EngineOptions, engine: RolloutEngine, mesh: Mesh
) -> None:
    ledger = Ledger(plan.options.output, selected.name)
    done = _shared(set(ledger.read()) if mesh.rank == 0 else None, mesh)
    stops = tuple(stop_token_ids(selected.prompts.stop, plan.tokenizer))
    progress = _Progress(selected, len(done & set(selected.keys())), mesh)
    for batch in _batches(selected, how.batch_size, mesh):
        if all((prompt.uid, index) in done for prompt, index in batch):
            continue
        requests = [_request(plan, selected, prompt, index, stops) for prompt, index in batch]
        completions = engine.generate(requests, VERSION)
        if mesh.is_block_leader:
            rows = [_drawn(plan, selected, p, i, c) for (p, i), c in zip(batch, completions, strict=True)]
            ledger.append(mesh.rollout_block, rows)
        progress.add(sum((p.uid, i) not in done for p, i in batch), sum(len(c.response_ids) for c in completions))
    mesh.barrier()


def _shared(value: Any, mesh: Mesh) -> Any:
    """Rank 0's value, on every rank: a file system may show the others an older ledger."""
    return mesh.broadcast(value)


def _batches(selected: Selected, batch_size: int, mesh: Mesh) -> list[list[tuple[Prompt, int]]]:
    """This block's batches."""
    requests = selected.requests()
    blocks = mesh.num_rollout_blocks
    size = max(1, min(batch_size, -(-len(requests) // blocks)))
    return [requests[i : i + size] for i in range(0, len(requests), size)][mesh.rollout_block :: blocks]


def _request(
    plan: EvaluationSettings, selected: Selected, prompt: Prompt, index: int, stops: tuple[int, ...]
) -> Request:
    is_greedy = index == GREEDY
    return Request(
        prompt_ids=prompt.prompt_ids,
        seed=sample_seed(plan.options.seed, 0, prompt.uid, index),  # the uid begins with the task
        max_tokens=selected.max_tokens,
        temperature=0.0 if is_greedy else selected.temperature,
        top_p=1.0 if is_greedy else selected.top_p,
        stop_token_ids=stops,
    )


def _drawn(
    plan: EvaluationSettings, selected: Selected, prompt: Prompt, index: int, completion: Completion
) -> LedgerEntry:
    text, num_tokens, was_cut = cut(completion.response_ids, selected.prompts.stop, plan.tokenizer)
    return LedgerEntry(prompt.uid, index, text, num_tokens, "stop" if was_cut else completion.finish_reason)


class _Progress:
    """A line every now and then, from rank 0, about its own block."""

    def __init__(self, selected: Selected, done: int, mesh: Mesh) -> None:
        self.speaks, self.name, self.blocks = mesh.rank == 0, selected.name, mesh.num_rollout_blocks
        self.total, self.done, self.tokens = len(selected.keys()), done, 0
        self.start = self.last = time.monotonic()
        if self.speaks and done:
            print(f"{self.name}: {done} of {self.total} samples are there already", flush=True)

    def add(self, samples: int, tokens: int) -> None:
        self.done += samples * self.blocks  # the others are about as far
        self.tokens += tokens
        now = time.monotonic()
        if self.speaks and (now - self.last >= REPORT_EVERY_S or self.done >= self.total):
            self.last = now
            rate = self.tokens / (now - self.start)
            about = "about " if self.blocks > 1 else ""
            print(
                f"{self.name}: {about}{min(self.done, self.total)} of {self.total} samples, {rate:,.0f} tokens/s a block",
                flush=True,
            )
