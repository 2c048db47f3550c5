"""Many trajectories at once, in real environments: slow ones are trained or named, and nothing of them stays behind."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from grpo_megatron.config import RolloutConfig
from grpo_megatron.data.tokenizer import TurnRenderer
from grpo_megatron.environments.pool import build_pool
from grpo_megatron.processes.process import MARK
from grpo_megatron.report.metrics import Metrics
from grpo_megatron.report.step import record_samples
from grpo_megatron.sampling.multi_turn import EnvironmentAnswers, TrajectoryGenerator
from grpo_megatron.types import Prompt, Sample
from tests.fakes import LoneMesh, SeedEngine
from tests.rewards.waiting import processes_with, wait_until
from tests.sampling.test_history import tokenizer_of


@contextmanager
def playing(timeout_s: float, num_workers: int) -> Iterator[TrajectoryGenerator]:
    """Yields the generator of a run in a template that changes earlier turns."""
    multi_turn = {"environment": "tests.environments.games:Slow", "timeout_s": timeout_s, "num_workers": num_workers}
    rollout = RolloutConfig.model_validate({"multi_turn": multi_turn})
    tokenizer, engine, mesh = tokenizer_of("qwen3"), SeedEngine(), LoneMesh()
    renderer = TurnRenderer(tokenizer)
    renderer.check(may_rewrite=True)
    with build_pool(rollout.multi_turn) as pool:
        answers = EnvironmentAnswers(pool, renderer, rollout.multi_turn, mesh)
        parts: Any = (engine, None, tokenizer, mesh, rollout, lambda: "d")
        yield TrajectoryGenerator(*parts, answers=answers, gives_rewards=True, max_prompt_length=900)


def sampled(generator: TrajectoryGenerator, rows: list[dict[str, Any]], n: int, metrics: Metrics) -> list[Sample]:
    prompts = [Prompt(f"p/{i}", (1,), "", "", "task", "", {"row": row}) for i, row in enumerate(rows)]
    named: dict[str, Any] = {"round_id": 0, "version": 0, "max_tokens": 900, "temperature": 1.0, "metrics": metrics}
    return generator.sample(prompts, n, **named)


def test_a_slow_trajectory_is_trained_or_counted_and_named(caplog: pytest.LogCaptureFixture) -> None:
    """The step waits for one that keeps within the time of each call. One that does not has no reward, and is in the log."""
    metrics = Metrics()
    with caplog.at_level(logging.WARNING), playing(2.0, 1) as generator:
        rows = [{"name": "quick", "sleeps": 0.0}, {"name": "slow", "sleeps": 0.5}, {"name": "late", "sleeps": 60.0}]
        samples = [s for s in sampled(generator, rows, 2, metrics) if s.index < 2]
    record_samples(metrics, samples, has_sources=False)
    assert [s.status for s in samples] == ["ok"] * 4 + ["timeout"] * 2
    assert [s.reward for s in samples[:4]] == [3.0] * 4 and all(math.isnan(s.reward) for s in samples[4:])
    assert {s.version for s in samples} == {0}
    assert metrics.reduce()["trajectory/status/timeout"] == pytest.approx(1 / 3)
    assert "2 of 6 environments failed (timeout 2)" in caplog.text and "rollout.multi_turn.timeout_s" in caplog.text


def usage() -> tuple[int, int, float]:
    """Returns the processes of environments and their hosts; open files, and MiB in memory, of them and of this process."""
    pids = processes_with(f"{MARK}={os.getpid()}.")
    files = pages = 0
    for pid in (os.getpid(), *pids):
        with suppress(OSError):  # it has ended
            files += len(list(Path(f"/proc/{pid}/fd").iterdir()))
            pages += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return len(pids), files, pages * os.sysconf("SC_PAGE_SIZE") / 2**20


@pytest.mark.slow
@pytest.mark.soak
def test_rounds_leave_nothing_behind() -> None:
    """50 rounds of 200 trajectories, one in ten of which fails: as many processes and files after each, and no more memory."""
    after = []
    with playing(60.0, 2) as generator:
        for _ in range(50):
            rows = [{"name": str(n), "sleeps": 0.0, "fails": n % 10 == 0} for n in range(50)]
            samples = [s for s in sampled(generator, rows, 4, Metrics()) if s.index < 4]
            assert len(samples) == 200 and sum(s.status == "raised" for s in samples) == 20
            answers, engine = generator.answers, generator.engine
            assert not answers._histories and not answers._kept.pool._starts and not engine._queue  # type: ignore[attr-defined, union-attr]
            engine.requests.clear()  # type: ignore[attr-defined] - the stand-in's own record
            engine.versions.clear()  # type: ignore[attr-defined]
            wait_until(lambda: usage()[0] == 2)  # the hosts
            after.append(usage())
    assert {files - after[0][1] for _, files, _ in after} <= {
        -1,
        0,
        1,
    }  # a host may be closing the pipe of one that has ended
    assert after[-1][2] - after[25][2] < 4, after  # MiB; 1.6 measured, and 13 where 2.5 kB of each trajectory stay
