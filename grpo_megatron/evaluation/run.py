"""Run: all samples of an evaluation, drawn by the rollout engine on every rank of a world, into the ledger.

A rollout block of `tp` ranks generates batches of requests. The batches are assigned to the blocks in turn, and the
blocks wait for each other only at the end of a task. A batch that is complete in the ledger is skipped. Any other batch
is drawn as a whole, so that it consists of the same requests as before an interruption.
"""

from __future__ import annotations

import contextlib
import time

from grpo_megatron.device import Device
from grpo_megatron.environments.pool import build_pool
from grpo_megatron.evaluation.engine import WEIGHTS_VERSION, load_engine
from grpo_megatron.evaluation.ledger import Ledger, LedgerEntry
from grpo_megatron.evaluation.prompting import Arena, cut_at_stop, new_trajectory, played_entry
from grpo_megatron.evaluation.settings import EvaluationSettings, Selected
from grpo_megatron.parallel.mesh import Mesh, build_mesh, destroy_mesh
from grpo_megatron.rollout.engine import Completion, Request, RolloutEngine, StopTexts, sample_seed
from grpo_megatron.sampling.multi_turn import EnvironmentAnswers
from grpo_megatron.sampling.trajectory import TrajectoryLimits, play
from grpo_megatron.types import GREEDY, Prompt

TIMEOUT_S = 7 * 24 * 3600.0  # of a collective: blocks wait for the slowest one at the end of a task
REPORT_EVERY_S = 10.0


def is_complete(settings: EvaluationSettings) -> bool:
    """Whether the ledger holds every sample: then no engine is needed."""
    output = settings.options.folder
    return all(set(task.keys()) <= Ledger(output, task.name).read().keys() for task in settings.selected)


def draw_samples(settings: EvaluationSettings) -> None:
    """Draw what the ledger does not hold. Collective over the world that the environment describes.

    Raises RankError on every rank when one fails before drawing. There is no clean-up after a failure: the other ranks
    may not reach it, so engine and process groups end with the process.
    """
    device = Device(settings.options.device)
    tp, seed = settings.options.tp, settings.options.seed
    mesh = build_mesh(device, tp=1, pp=1, rollout_tp=tp, seed=seed, timeout_s=TIMEOUT_S)
    engine = _build_engine(settings, mesh, device)
    for selected in settings.selected:
        draw_task(settings, selected, engine, mesh)
    engine.shutdown()
    destroy_mesh()


def _build_engine(settings: EvaluationSettings, mesh: Mesh, device: Device) -> RolloutEngine:
    """The engine with the model's weights. Collective. Raises RankError when the weights cannot be read."""
    return load_engine(
        settings.source,
        mesh,
        device,
        settings.options,
        dtype=settings.dtype,
        max_model_len=settings.max_model_len,
        eos_token_ids=settings.eos_token_ids,
    )


def draw_task(settings: EvaluationSettings, selected: Selected, engine: RolloutEngine, mesh: Mesh) -> None:
    """Draw what the ledger does not hold of one task. Collective."""
    ledger = Ledger(settings.options.folder, selected.name)
    # rank 0 reads for all: a network file system may show other ranks an older ledger
    done = mesh.broadcast(set(ledger.read()) if mesh.rank == 0 else set())
    stop = StopTexts(settings.tokenizer, selected.prompts.stop) if selected.prompts.stop else None
    progress = _Progress(selected, len(done & set(selected.keys())), mesh)
    with contextlib.ExitStack() as opened:
        answers = _open_environments(selected.arena, mesh, opened)
        for batch in _block_batches(selected, settings.options.batch_size, mesh):
            if all((prompt.uid, index) in done for prompt, index in batch):
                continue
            if answers is not None:
                entries = _play(settings, selected, batch, engine, answers)
            else:
                requests = [_request(settings, selected, prompt, index, stop) for prompt, index in batch]
                completions = zip(batch, engine.generate(requests, WEIGHTS_VERSION), strict=True)
                entries = [_ledger_entry(settings, selected, p, i, completion) for (p, i), completion in completions]
            if mesh.is_block_leader:
                ledger.append(mesh.rollout_block, entries)
            progress.add(sum((p.uid, i) not in done for p, i in batch), sum(entry.num_tokens for entry in entries))
    mesh.barrier()


def _open_environments(arena: Arena | None, mesh: Mesh, opened: contextlib.ExitStack) -> EnvironmentAnswers | None:
    """The environments of this rank's block. `opened` will end their processes. None: the task has single turns."""
    if arena is None:
        return None
    pool = opened.enter_context(build_pool(arena.multi_turn)) if mesh.is_block_leader else None
    return EnvironmentAnswers(pool, arena.renderer, arena.multi_turn, mesh)


def _play(
    settings: EvaluationSettings,
    selected: Selected,
    batch: list[tuple[Prompt, int]],
    engine: RolloutEngine,
    answers: EnvironmentAnswers,
) -> list[LedgerEntry]:
    assert selected.arena is not None
    multi_turn = selected.arena.multi_turn
    trajectories = [
        new_trajectory(
            prompt,
            index,
            run_seed=settings.options.seed,
            version=WEIGHTS_VERSION,
            limits=TrajectoryLimits(selected.max_prompt_tokens, selected.max_tokens, multi_turn.max_assistant_turns),
            temperature=selected.temperature,
            top_p=selected.top_p,
        )
        for prompt, index in batch
    ]
    for _ in play(trajectories, engine, answers, WEIGHTS_VERSION, multi_turn.latency_ticks):
        pass  # graded afterwards
    played = zip(batch, trajectories, strict=True)
    return [played_entry(prompt, index, trajectory, settings.tokenizer) for (prompt, index), trajectory in played]


def _block_batches(selected: Selected, batch_size: int, mesh: Mesh) -> list[list[tuple[Prompt, int]]]:
    """The batches of this rank's rollout block."""
    requests = selected.requests()
    num_blocks = mesh.num_rollout_blocks
    size = max(1, min(batch_size, -(-len(requests) // num_blocks)))
    batches = [requests[i : i + size] for i in range(0, len(requests), size)]
    return batches[mesh.rollout_block :: num_blocks]


def _request(
    settings: EvaluationSettings, selected: Selected, prompt: Prompt, index: int, stop: StopTexts | None
) -> Request:
    is_greedy = index == GREEDY
    return Request(
        prompt_ids=prompt.prompt_ids,
        seed=sample_seed(settings.options.seed, 0, prompt.uid, index),  # the uid contains the task
        max_tokens=selected.max_tokens,
        temperature=0.0 if is_greedy else selected.temperature,
        top_p=1.0 if is_greedy else selected.top_p,
        stop=stop,
    )


def _ledger_entry(
    settings: EvaluationSettings, selected: Selected, prompt: Prompt, index: int, completion: Completion
) -> LedgerEntry:
    text, num_tokens, was_cut = cut_at_stop(completion.response_ids, selected.prompts.stop, settings.tokenizer)
    return LedgerEntry(prompt.uid, index, text, num_tokens, "stop" if was_cut else completion.finish_reason)


class _Progress:
    """Prints progress from rank 0 every `REPORT_EVERY_S` seconds. The numbers are estimated from rank 0's block."""

    def __init__(self, selected: Selected, done: int, mesh: Mesh) -> None:
        self.prints, self.name, self.num_blocks = mesh.rank == 0, selected.name, mesh.num_rollout_blocks
        self.total, self.done, self.tokens = len(selected.keys()), done, 0
        self.start = self.last = time.monotonic()
        if self.prints and done:
            print(f"{self.name}: {done} of {self.total} samples were drawn before", flush=True)

    def add(self, samples: int, tokens: int) -> None:
        self.done += samples * self.num_blocks  # estimated: the other blocks are about as far
        self.tokens += tokens
        now = time.monotonic()
        if self.prints and (now - self.last >= REPORT_EVERY_S or self.done >= self.total):
            self.last = now
            rate = self.tokens / (now - self.start)
            about = "about " if self.num_blocks > 1 else ""
            print(
                f"{self.name}: {about}{min(self.done, self.total)} of {self.total} samples, {rate:,.0f} tokens/s per block",
                flush=True,
            )
