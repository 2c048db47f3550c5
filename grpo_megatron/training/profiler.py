"""Profiler: records some training steps on every rank, and rank 0 writes what they did into OUTPUT_DIR/profile.

    trace.json    the events of all ranks, for ui.perfetto.dev or chrome://tracing (observability/trace.py)
    index.html    where the time went, in words and tables (observability/profile_report.py)

While it records, `Metrics.within` and the engine's `poll` are replaced, and the operations of torch.distributed
(parallel/collectives.py). Before and after, the run is what it is without a profile.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from grpo_megatron.config import Config
from grpo_megatron.models.policy import Policy
from grpo_megatron.observability.clocks import ClockRound, clock_offset
from grpo_megatron.observability.metrics import Metrics
from grpo_megatron.observability.profile_report import build_profile_report
from grpo_megatron.observability.recorder import COLLECTIVE, ENGINE, PHASE, STEP, Event, Recorder, max_events
from grpo_megatron.observability.sinks import Sinks
from grpo_megatron.observability.step_time import measure
from grpo_megatron.observability.trace import trace_lines
from grpo_megatron.parallel.collectives import recorded
from grpo_megatron.parallel.mesh import Mesh
from grpo_megatron.rollout.engine import RolloutEngine
from grpo_megatron.storage.atomic import new_folder
from grpo_megatron.training.colocation import PolicyAlone

PROFILE_FOLDER = "profile"
CLOCK_ROUNDS = 32  # collectives that compare the clocks
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")  # processes with the same one read the same clock


class _Record(NamedTuple):
    """What one rank sends to rank 0."""

    node: str
    boot_id: str
    rounds: list[ClockRound]
    events: list[Event]
    num_dropped: int


class Profiler:
    """`steps` None: nothing is recorded. `settings`: the run's config, "section.key" -> value. `note` shows text."""

    def __init__(
        self,
        steps: range | None,
        metrics: Metrics,
        engine: RolloutEngine | None,
        mesh: Mesh,
        synchronize: Callable[[], None],
        *,
        output_dir: Path,
        settings: Mapping[str, Any],
        note: Callable[[str], None],
    ) -> None:
        self.steps, self.metrics, self.engine, self.mesh, self.synchronize = steps, metrics, engine, mesh, synchronize
        self.folder, self.settings, self.note = output_dir / PROFILE_FOLDER, settings, note

    def over(self, steps: range) -> Iterator[int]:
        """The steps of the run, in order; those of the profile are recorded until the next one is asked for. Collective."""
        wanted = range(0) if self.steps is None else range(max(self.steps.start, steps.start), self.steps.stop)
        if self.steps is not None and not wanted:
            self.note(f"no profile: the run starts at step {steps.start}, after the last step of --profile")
        yield from range(steps.start, min(wanted.start, steps.stop)) if wanted else steps
        if not wanted:
            return
        recorder, rounds = Recorder(max_events(self.mesh.world_size)), self._compare_clocks()
        with self._recording(recorder):
            for step in wanted:
                with recorder.span(STEP, f"training step {step}", step):
                    yield step
        with self.metrics.within("profile"):
            self._write(recorder, rounds)
        yield from range(wanted.stop, steps.stop)

    def _compare_clocks(self) -> list[ClockRound]:
        clock, rounds = Recorder(0).clock, []
        for _ in range(CLOCK_ROUNDS):
            entered = clock()
            self.mesh.barrier()
            rounds.append((entered, clock()))
        return rounds

    @contextlib.contextmanager
    def _recording(self, recorder: Recorder) -> Iterator[None]:
        within, engine = self.metrics.within, self.engine

        @contextlib.contextmanager
        def phase(name: str) -> Iterator[None]:
            with within(name), recorder.span(PHASE, name):
                yield

        with recorded(recorder.span, recorder.clock, self.synchronize):
            self.metrics.within = phase
            if engine is not None:
                poll = engine.poll

                def recorded_poll() -> Any:
                    with recorder.span(ENGINE, "engine step", engine.num_unfinished):
                        return poll()

                engine.poll = recorded_poll  # type: ignore[method-assign]
            try:
                yield
            finally:
                self.metrics.within = within
                if engine is not None:
                    del engine.poll

    def _write(self, recorder: Recorder, rounds: list[ClockRound]) -> None:
        """Collective. A full disk ends the profile and not the run."""
        boot_id = BOOT_ID.read_text() if BOOT_ID.exists() else str(self.mesh.rank)
        records = self.mesh.gather(
            _Record(socket.gethostname(), boot_id, rounds, recorder.events, recorder.num_dropped)
        )
        if not records:
            return
        first, offsets, accuracy = records[0], [], 0.0
        for record in records:
            is_same = record.boot_id == first.boot_id
            offset, error = (0.0, 0.0) if is_same else clock_offset(first.rounds, record.rounds)
            offsets.append(round(offset))
            accuracy = max(accuracy, error / 1e9)
        time = measure([[_shifted(e, o) for e in r.events] for r, o in zip(records, offsets, strict=True)])
        num_dropped = sum(record.num_dropped for record in records)
        report = build_profile_report(
            time, self.settings, accuracy_s=accuracy, num_dropped=num_dropped, limit=recorder.limit
        )
        names = [f"rank {rank} ({record.node})" for rank, record in enumerate(records)]
        about = {"clocks_agree_within_s": accuracy, "dropped_events": num_dropped}
        try:
            with new_folder(self.folder) as folder:
                with (folder / "trace.json").open("w", encoding="utf-8") as file:
                    file.writelines(trace_lines(time, names, about))
                (folder / "index.html").write_text(report.page(), encoding="utf-8")
        except OSError as error:
            self.note(f"cannot write the profile to {self.folder}: {error}")
        else:
            self.note(f"profile: {self.folder}/index.html and trace.json\n{report.text()}")


def _shifted(event: Event, offset: int) -> Event:
    """The event on rank 0's clock."""
    started = event.number - offset if event.kind == COLLECTIVE else event.number
    return event._replace(begin=event.begin - offset, end=event.end - offset, number=started)


def flat_settings(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"section": {"key": value}} -> {"section.key": value}."""
    result: dict[str, Any] = {}
    for key, value in settings.items():
        result |= (
            flat_settings(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {f"{prefix}{key}": value}
        )
    return result


def build_profiler(
    steps: range | None, config: Config, metrics: Metrics, colocation: PolicyAlone, policy: Policy, sinks: Sinks
) -> Profiler:
    """Of the `steps` of `--profile`. `colocation` and `policy` are those of the run."""
    return Profiler(
        steps,
        metrics,
        colocation.engine,
        policy.mesh,
        policy.device.synchronize,
        output_dir=config.trainer.output_dir,
        settings=flat_settings(config.model_dump(mode="json")),
        note=sinks.note,
    )
