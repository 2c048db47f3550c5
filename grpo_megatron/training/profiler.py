"""Profiler: records some training steps with torch.profiler on every rank, and writes them into OUTPUT_DIR/profile.

    trace_rank0.json.gz    torch.profiler's trace, for ui.perfetto.dev or chrome://tracing; one file of each of the first 8 ranks
    table.txt              rank 0's operations and phases by their own time, as torch.profiler sums them up

The phases of a step are named ranges in the trace: a rank that waits for another stands in a collective there. While a profile
is recorded, `Metrics.within` is wrapped; nothing else of the run is touched.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from grpo_megatron.parallel.mesh import Mesh
from grpo_megatron.report.metrics import Metrics
from grpo_megatron.storage.files import new_folder

PROFILE_FOLDER = "profile"
MAX_TRACES = 8  # a trace of a real step may have a gigabyte before compression
MAX_ROWS = 60  # of the table


class Profiler:
    """The recorder of `steps`. `note` shows text on the console."""

    def __init__(
        self, steps: range, metrics: Metrics, mesh: Mesh, output_dir: Path, note: Callable[[str], None]
    ) -> None:
        self.steps, self.metrics, self.mesh, self.note = steps, metrics, mesh, note
        self.folder = output_dir / PROFILE_FOLDER

    def over(self, steps: range) -> Iterator[int]:
        """Yields the steps of the run, in order; those of the profile are recorded until the next one is asked for.

        Collective.
        """
        wanted = range(max(self.steps.start, steps.start), min(self.steps.stop, steps.stop))
        if not wanted:
            self.note(f"no profile: the run has steps {steps.start} to {steps.stop - 1}, and none of --profile")
            yield from steps
            return
        yield from range(steps.start, min(wanted.start, steps.stop))
        recording = torch.profiler.profile(activities=torch.profiler.supported_activities())
        with recording, self._named_phases():
            for step in wanted:
                with torch.profiler.record_function(f"training step {step}"):
                    yield step
        with self.metrics.within("profile"):
            self._write(recording)
        yield from range(wanted.stop, steps.stop)

    @contextlib.contextmanager
    def _named_phases(self) -> Iterator[None]:
        within = self.metrics.within

        @contextlib.contextmanager
        def phase(name: str) -> Iterator[None]:
            with within(name), torch.profiler.record_function(name):
                yield

        self.metrics.within = phase
        try:
            yield
        finally:
            self.metrics.within = within

    def _write(self, recording: torch.profiler.profile) -> None:
        """Collective. A full disk ends the profile and not the run."""
        if self.mesh.rank == 0:
            self._or_note(self._write_table, recording)
        self.mesh.barrier()
        if self.mesh.rank < MAX_TRACES:
            self._or_note(self._write_trace, recording)

    def _write_table(self, recording: torch.profiler.profile) -> None:
        on_gpu = torch.profiler.ProfilerActivity.CUDA in recording.activities
        order = "self_device_time_total" if on_gpu else "self_cpu_time_total"
        table = recording.key_averages().table(sort_by=order, row_limit=MAX_ROWS, max_name_column_width=60)
        with new_folder(self.folder) as folder:
            (folder / "table.txt").write_text(f"{table}\n", encoding="utf-8")
        self.note(f"profile: {self.folder}/table.txt and traces of ranks")

    def _write_trace(self, recording: torch.profiler.profile) -> None:
        path = self.folder / f"trace_rank{self.mesh.rank}.json.gz"
        recording.export_chrome_trace(str(path.with_name(f".{path.name}")))
        path.with_name(f".{path.name}").rename(path)

    def _or_note(self, write: Callable[[Any], None], content: Any) -> None:
        try:
            write(content)
        except OSError as error:
            self.note(f"cannot write the profile to {self.folder}: {error}")
